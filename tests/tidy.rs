//! The house rules that the compiler does not check: sizes of files, where `unsafe` may stand, who
//! may import whom.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;

/// Most lines of a Rust file: what one person reads in one sitting.
const LINES_MAX: usize = 800;

/// Files that are longer, and how long they may be. A file leaves the list when it fits; none joins
/// it without a reason.
const LONGER: &[(&str, usize)] = &[];

/// Where the word may stand besides the crate of kernels: a global allocator cannot be written
/// without it.
const ALLOCATOR: &str = "tests/support/allocator.rs";

/// The floors of the runtime, lowest first: a module imports from floors below its own, and from
/// its own floor.
const FLOORS: &[&[&str]] = &[
    &[
        "data", "error", "memory", "settings", "shape", "weights", "words",
    ],
    &["backend", "device"],
    &["params"],
    &["ops"],
    &["graph"],
    &["ir"],
    &["passes", "reference"],
    &["nn", "optim", "tensor", "trace"],
    &[
        "buffer",
        "checkpoint",
        "checks",
        "compile",
        "diff",
        "dynamic",
        "feed",
        "fit",
        "found",
        "init",
        "plan",
        "program",
        "session",
        "shapes",
    ],
    &["models"],
];

/// A text file of the repository.
struct Source {
    /// Its path from the root, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// Its lines of code with their numbers: comments cut off, tests at the end of the file left
    /// out.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let code = self
            .text
            .lines()
            .map(|l| l.split("//").next().unwrap_or_default());
        code.enumerate()
            .map(|(at, line)| (at + 1, line))
            .take_while(|(_, line)| line.trim() != "#[cfg(test)]")
    }
}

/// Every Rust, TOML and Markdown file, and the script of the checks.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder") {
            let path = entry.expect("a readable entry").path();
            let inside = path.strip_prefix(root).expect("inside of the root");
            let name = inside
                .components()
                .map(|c| c.as_os_str().to_string_lossy())
                .collect::<Vec<_>>()
                .join("/");
            if path.is_dir() {
                let built = name.starts_with("target") || name.ends_with("/target");
                if !(name.starts_with('.') || built) || name == ".ci" {
                    folders.push(path);
                }
            } else if name == ".ci/run"
                || [".rs", ".c", ".cpp", ".cuh", ".h", ".toml", ".md"]
                    .iter()
                    .any(|ending| name.ends_with(ending))
            {
                let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{name}: {e}"));
                found.push(Source { path: name, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(
        found.iter().any(|s| s.path == "runtime/src/lib.rs"),
        "the walk found the sources"
    );
    found
}

fn rust() -> Vec<Source> {
    sources()
        .into_iter()
        .filter(|s| s.path.ends_with(".rs"))
        .collect()
}

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(root.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Fails with every offence, one a line.
fn none(rule: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{rule}:\n{}", offences.join("\n"));
}

#[test]
fn files_fit_one_sitting() {
    let mut offences = Vec::new();
    for source in rust() {
        let lines = source.text.lines().count();
        let listed = LONGER.iter().find(|(path, _)| *path == source.path);
        match listed {
            Some(_) if lines <= LINES_MAX => {
                offences.push(format!("{}: fits now, take it off the list", source.path))
            }
            Some((_, most)) if lines > *most => {
                offences.push(format!("{}: {lines} lines, {most} allowed", source.path))
            }
            None if lines > LINES_MAX => offences.push(format!(
                "{}: {lines} lines, {LINES_MAX} allowed",
                source.path
            )),
            _ => {}
        }
    }
    none("files too long to read in one sitting", &offences);
}

#[test]
fn nothing_is_left_to_do() {
    let left = [
        concat!("to", "do!"),
        concat!("unim", "plemented!"),
        concat!("db", "g!"),
    ];
    let mut offences = Vec::new();
    for source in rust() {
        for (at, line) in source.text.lines().enumerate() {
            offences.extend(
                left.iter()
                    .filter(|l| line.contains(*l))
                    .map(|l| format!("{}:{}: {l}", source.path, at + 1)),
            );
        }
    }
    none("left behind", &offences);
}

#[test]
fn lines_have_no_tabs_and_no_blank_ends() {
    let mut offences = Vec::new();
    for source in sources() {
        for (at, line) in source.text.lines().enumerate() {
            if line.contains('\t') || line.ends_with(' ') {
                offences.push(format!("{}:{}", source.path, at + 1));
            }
        }
    }
    none("tabs, or blanks at the end of a line", &offences);
}

#[test]
fn only_kernels_are_unsafe() {
    let word = concat!("un", "safe");
    let mut offences = Vec::new();
    for source in rust()
        .iter()
        .filter(|s| !s.path.starts_with("kernels/") && s.path != ALLOCATOR)
    {
        let lines = source
            .text
            .lines()
            .map(|l| l.split("//").next().unwrap_or_default())
            .enumerate();
        offences.extend(
            lines
                .filter(|(_, l)| words(l).any(|w| w == word))
                .map(|(at, _)| format!("{}:{}", source.path, at + 1)),
        );
    }
    none("outside of the crate of kernels", &offences);
    let programs = [
        "benches/gpu/src/main.rs",
        "tests/random_programs/src/lib.rs",
        "tests/random_programs/src/main.rs",
    ];
    for root in [
        "planner/src/lib.rs",
        "runtime/src/lib.rs",
        "runtime/src/bin/slabwise/main.rs",
    ]
    .into_iter()
    .chain(programs)
    {
        assert!(
            read(root)
                .lines()
                .any(|l| l == format!("#![forbid({word}_code)]")),
            "{root} must forbid it"
        );
    }
}

#[test]
fn planner_and_kernels_stand_alone() {
    for krate in ["planner", "kernels"] {
        let manifest = read(&format!("{krate}/Cargo.toml"));
        let name = format!("name = \"slabwise-{krate}\"");
        let offences: Vec<String> = manifest
            .lines()
            .filter(|l| l.contains("slabwise") && *l != name && !l.starts_with("description"))
            .map(String::from)
            .collect();
        none(
            &format!("{krate} must not know another crate of the workspace"),
            &offences,
        );
    }
}

#[test]
fn imports_point_down() {
    let floor = |module: &str| FLOORS.iter().position(|floor| floor.contains(&module));
    let mut offences = BTreeSet::new();
    for source in rust() {
        let Some(inside) = source.path.strip_prefix("runtime/src/") else {
            continue;
        };
        if inside == "lib.rs" || inside.starts_with("bin/") || inside.contains("/tests") {
            continue;
        }
        let module = inside.split(['/', '.']).next().unwrap_or_default();
        let Some(own) = floor(module) else {
            offences.insert(format!("{}: {module} has no floor", source.path));
            continue;
        };
        for (at, line) in source.code() {
            for path in line.split("crate::").skip(1) {
                let Some(imported) = words(path).next() else {
                    continue;
                };
                // What starts with a capital is one of the root's own names for something of a
                // module: no module of the library may use those, lest a floor be skipped unseen.
                match floor(imported) {
                    Some(other) if other <= own => {}
                    _ => drop(offences.insert(format!(
                        "{}:{at}: {module} must not import crate::{imported}",
                        source.path
                    ))),
                }
            }
        }
    }
    none(
        "imports point down",
        &offences.into_iter().collect::<Vec<_>>(),
    );
}

#[test]
fn commands_of_the_readme_are_checked() {
    let readme = read("README.md");
    let script = read(".ci/run").replace(" --locked", "");
    let commands: Vec<&str> = readme.lines().filter(|l| l.starts_with("cargo ")).collect();
    assert!(
        commands.len() >= 2,
        "the readme says how to train and how to test"
    );
    for command in commands {
        let command = command.split('#').next().unwrap_or_default().trim();
        assert!(
            script.contains(command),
            "`{command}` is in README.md, but not in .ci/run"
        );
    }
}

#[test]
fn rows_of_the_scalar_table_are_documented_and_reachable() {
    let table = read("kernels/src/scalar.rs");
    let lines: Vec<&str> = table.lines().map(str::trim).collect();
    let tensor: Vec<Source> = rust()
        .into_iter()
        .filter(|s| s.path.starts_with("runtime/src/tensor"))
        .collect();
    for op in ScalarOp::ALL {
        let row = lines
            .iter()
            .position(|l| l.starts_with(&format!("{op:?} \"{}\" ", op.name())));
        let row = row.unwrap_or_else(|| panic!("{op:?} has no row"));
        assert!(
            lines[row - 1].starts_with("/// "),
            "{op:?} has no documentation"
        );
        let variant = format!("{op:?}");
        let used = tensor
            .iter()
            .any(|s| s.code().any(|(_, l)| words(l).any(|w| w == variant)));
        let by_cast = DType::ALL.iter().any(|dtype| dtype.rounding() == Some(*op));
        assert!(used || by_cast, "no method of Tensor emits {op:?}");
    }
}
