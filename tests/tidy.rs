//! Rules of the repository that the compiler does not check: file lengths, uses of `unsafe`, import
//! layers, prose, and documents that must agree with the code.

#[path = "tidy/cycles.rs"]
mod cycles;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;

/// The most lines of a Rust file, so that it can be read in one sitting.
const LINES_MAX: usize = 800;

/// Longer files with their limits. A file leaves the list when it fits; none joins it without a
/// reason.
const LONGER: &[(&str, usize)] = &[];

/// The only file outside of the crates of `UNSAFE` that may be `unsafe`, because a global allocator
/// requires it.
const ALLOCATOR: &str = "tests/support/allocator.rs";

/// The folders of crates that may be `unsafe`: kernels, and engines that move bytes between ranks,
/// which call foreign libraries and read the memory of peers.
const UNSAFE: &[&str] = &["kernels/", "runtime/comm/"];

/// The most occurrences of `what` and `whatever` as nouns per 1,000 words, in comments and in
/// documents.
const WHATS_MAX: f64 = 3.0;

/// The most lines of all files of the reading path in ARCHITECTURE.md together.
const PATH_LINES_MAX: usize = 8_000;

/// The start of the names of environment variables.
const PREFIX: &str = "SLABWISE_";

/// The floors (layers) of a crate, lowest first: a module imports from its own floor and from those
/// below.
type Floors = &'static [&'static [&'static str]];

/// The folders of crates with floors.
const FLOORS: &[(&str, Floors)] = &[
    ("runtime/compiler/src/", COMPILER_FLOORS),
    ("runtime/src/", RUNTIME_FLOORS),
];

const COMPILER_FLOORS: Floors = &[
    &[
        "dumps", "error", "init", "memory", "settings", "shape", "shapes", "words",
    ],
    &["backend", "device"],
    &["ops"],
    &["graph"],
    &["ir"],
    &["passes", "reference"],
    &["plan"],
    &["compile"],
];

const RUNTIME_FLOORS: Floors = &[
    // The modules of the compiler.
    &[
        "backend", "compile", "device", "error", "graph", "ir", "ops", "passes", "plan",
        "settings", "shape", "words",
    ],
    &["data", "memory", "weights", "world"],
    &["params"],
    &["nn", "optim", "tensor", "trace"],
    &[
        "buffer",
        "checkpoint",
        "feed",
        "fit",
        "init",
        "program",
        "session",
    ],
];

/// Crates of the workspace with the others that each may depend on.
const CRATES: &[(&str, &[&str])] = &[
    ("planner/packer", &[]),
    ("planner", &["slabwise-packer"]),
    ("kernels", &[]),
    ("kernels/cuda", &["slabwise-kernels"]),
    ("runtime/pool", &["slabwise-kernels", "slabwise-planner"]),
    (
        "runtime/memtools",
        &["slabwise-kernels", "slabwise-planner", "slabwise-pool"],
    ),
    (
        "runtime/compiler",
        &[
            "slabwise-cuda",
            "slabwise-kernels",
            "slabwise-planner",
            "slabwise-pool",
        ],
    ),
    ("runtime/models", &["slabwise-compiler", "slabwise-kernels"]),
    ("runtime/onnx", &[]),
    ("runtime/comm", &["slabwise-kernels"]),
    (
        "runtime/cli",
        &[
            "slabwise-comm",
            "slabwise-cuda",
            "slabwise-kernels",
            "slabwise-models",
            "slabwise-onnx",
            "slabwise-planner",
        ],
    ),
];

/// A text file of the repository.
struct Source {
    /// Its path from the root, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// Its lines of code with their numbers, without comments and without the tests at the end of
    /// the file.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let code = self
            .text
            .lines()
            .map(|l| l.split("//").next().unwrap_or_default());
        code.enumerate()
            .map(|(at, line)| (at + 1, line))
            .take_while(|(_, line)| line.trim() != "#[cfg(test)]")
    }

    /// Its prose: all of a document, the comments of source code.
    fn prose(&self) -> String {
        if self.path.ends_with(".md") {
            return self.text.clone();
        }
        let comments = self.text.lines().filter_map(|l| l.split_once("//"));
        comments.map(|(_, text)| format!("{text}\n")).collect()
    }
}

/// Every source, TOML and Markdown file, and the script of the checks.
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
                || [".rs", ".c", ".cpp", ".cuh", ".h", ".py", ".toml", ".md"]
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

/// Fails if there are offences, and lists them one per line.
fn none(rule: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{rule}:\n{}", offences.join("\n"));
}

#[test]
fn files_are_short() {
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
fn files_belong_to_a_module() {
    let sources = rust();
    let declares = |parent: &str, name: &str| {
        sources
            .iter()
            .find(|s| s.path == parent)
            .is_some_and(|s| s.text.contains(&format!("mod {name};")))
    };
    let by_path = |name: &str| {
        let ends = [format!("/{name}.rs\""), format!("\"{name}.rs\"")];
        sources
            .iter()
            .any(|s| ends.iter().any(|e| s.text.contains(e)))
    };
    let mut offences = Vec::new();
    for source in &sources {
        let Some((folder, inside)) = source.path.split_once("src/") else {
            continue;
        };
        let inside = inside.strip_suffix("/mod.rs").unwrap_or(inside);
        let inside = inside.strip_suffix(".rs").unwrap_or(inside);
        if ["lib", "main"].contains(&inside) || inside.starts_with("bin/") {
            continue;
        }
        let (above, name) = inside.rsplit_once('/').unwrap_or(("", inside));
        let parents = if above.is_empty() {
            vec!["lib.rs".to_string(), "main.rs".into()]
        } else {
            vec![format!("{above}.rs"), format!("{above}/mod.rs")]
        };
        let declared = parents
            .iter()
            .any(|parent| declares(&format!("{folder}src/{parent}"), name));
        if !declared && !by_path(name) {
            offences.push(source.path.clone());
        }
    }
    none("files that no module declares", &offences);
}

#[test]
fn no_placeholders_are_left() {
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
fn only_kernels_and_engines_are_unsafe() {
    let word = concat!("un", "safe");
    let mut offences = Vec::new();
    for source in rust()
        .iter()
        .filter(|s| !UNSAFE.iter().any(|folder| s.path.starts_with(folder)))
        .filter(|s| s.path != ALLOCATOR)
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
    none("outside of the crates that may", &offences);
    let programs = [
        "benches/gpu/src/main.rs",
        "runtime/cli/src/lib.rs",
        "runtime/cli/src/main.rs",
        "tests/cuda/src/main.rs",
        "tests/mpi/src/main.rs",
        "tests/random_programs/src/lib.rs",
        "tests/random_programs/src/main.rs",
    ];
    for root in [
        "planner/src/lib.rs",
        "planner/packer/src/lib.rs",
        "runtime/pool/src/lib.rs",
        "runtime/memtools/src/lib.rs",
        "runtime/compiler/src/lib.rs",
        "runtime/src/lib.rs",
        "runtime/models/src/lib.rs",
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
fn crates_know_only_those_below() {
    for (folder, below) in CRATES {
        let manifest = read(&format!("{folder}/Cargo.toml"));
        let own = manifest
            .lines()
            .find_map(|l| l.strip_prefix("name = \"")?.strip_suffix('"'))
            .expect("a name");
        let offences: Vec<String> = manifest
            .lines()
            .filter_map(|l| l.split_once(" = ").map(|(name, _)| name))
            .filter(|name| name.starts_with("slabwise-") && *name != own)
            .filter(|name| !below.contains(name))
            .map(String::from)
            .collect();
        none(
            &format!("{folder} must not depend on these crates"),
            &offences,
        );
    }
}

#[test]
fn the_packers_core_knows_no_rules() {
    let folder = "planner/packer/src/";
    let mut offences = Vec::new();
    for source in rust() {
        let Some(inside) = source.path.strip_prefix(folder) else {
            continue;
        };
        let banned: &[&str] = match inside.split(['/', '.']).next().unwrap_or_default() {
            "plain" => &["rules", "pack", "check"],
            "check" => &["rules", "plain", "pack"],
            _ => continue,
        };
        if inside.ends_with("tests.rs") {
            continue;
        }
        for (at, line) in source.code() {
            let imports = line.split("crate::").skip(1);
            let modules = imports.filter_map(|path| words(path).next());
            offences.extend(
                modules
                    .filter(|module| banned.contains(module))
                    .map(|module| format!("{}:{at}: crate::{module}", source.path)),
            );
        }
    }
    none("the plain core and the checker stand alone", &offences);
}

#[test]
fn imports_point_down() {
    let mut offences = BTreeSet::new();
    for source in rust() {
        let crate_of = |(folder, floors): &(&str, Floors)| {
            let inside = source.path.strip_prefix(folder)?;
            Some((inside.to_string(), *floors))
        };
        let Some((inside, floors)) = FLOORS.iter().find_map(crate_of) else {
            continue;
        };
        let floor = |module: &str| floors.iter().position(|floor| floor.contains(&module));
        if inside == "lib.rs" || inside.contains("/tests") {
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
                // A capital starts a re-export of the crate root. No module of the library may
                // use those, because they would hide an import from a higher floor.
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
        // Examples are built with the tests, and the script runs them from where they are built.
        let checked = match command.split_once(" --example ") {
            Some((_, example)) => script.contains(&format!("run \"$debug/examples/{example}\"")),
            None => script.contains(command),
        };
        assert!(checked, "`{command}` is in README.md, but not in .ci/run");
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
        let by_slope = lines
            .iter()
            .any(|l| l.contains(&format!("grad [call(ScalarOp::{op:?}, ")));
        assert!(
            used || by_cast || by_slope,
            "neither a method of Tensor nor a slope emits {op:?}"
        );
    }
}

/// Whether a word stands for a noun in a sentence, as in "the values of what it reads".
fn is_noun_what(word: &str) -> bool {
    let word = word.trim_start_matches(['(', '"', '`']);
    let word = word.trim_end_matches([',', '.', ';', ':', ')']);
    let word = word.trim_end_matches('`').to_lowercase();
    matches!(word.as_str(), "what" | "whatever")
}

/// The files whose prose is counted: comments of source code and, separately, documents. The style
/// guide is left out, because it quotes the words that it advises against.
fn prose_files() -> [(&'static str, Vec<Source>); 2] {
    let documents = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"];
    let is_document = |s: &Source| {
        let inside = s.path.starts_with("docs/") && s.path != "docs/style.md";
        s.path.ends_with(".md")
            && (inside
                || documents.contains(&s.path.as_str())
                || s.path == "CONTRIBUTING.md"
                || s.path.starts_with("benches/"))
    };
    let (documents, rest): (Vec<Source>, Vec<Source>) =
        sources().into_iter().partition(is_document);
    let is_code = |s: &Source| s.path.ends_with(".rs") || s.path.ends_with(".cuh");
    let code = rest.into_iter().filter(is_code).collect();
    [("comments", code), ("documents", documents)]
}

#[test]
fn prose_names_things() {
    let mut failures = String::new();
    for (kind, files) in prose_files() {
        let (mut words, mut found) = (0, 0);
        let mut counts = Vec::new();
        for file in files {
            let prose = file.prose();
            let is_word = |w: &&str| w.chars().any(char::is_alphabetic);
            words += prose.split_whitespace().filter(is_word).count();
            let here = prose.split_whitespace().filter(|w| is_noun_what(w)).count();
            found += here;
            counts.push((here, file.path));
        }
        let rate = 1000.0 * found as f64 / words as f64;
        println!("{kind}: {found} in {words} words, {rate:.2} per 1,000");
        if rate > WHATS_MAX {
            counts.sort_by(|a, b| b.cmp(a));
            failures += &format!("{kind}: {rate:.2} per 1,000 words, {WHATS_MAX} allowed\n");
            for (here, path) in counts.iter().take(10) {
                failures += &format!("{here:>6} {path}\n");
            }
        }
    }
    assert!(
        failures.is_empty(),
        "`what` and `whatever` in place of nouns (see docs/style.md)\n{failures}"
    );
}

#[test]
fn the_reading_path_exists_and_is_short() {
    let map = read("ARCHITECTURE.md");
    let section = map.split("## Reading path").nth(1);
    let section = section.expect("ARCHITECTURE.md marks a reading path");
    let section = section.split("\n## ").next().unwrap_or_default();
    let paths: Vec<&str> = section
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|code| code.ends_with(".rs"))
        .collect();
    assert!(paths.len() > 10, "a path of files: {paths:?}");
    let lines: usize = paths.iter().map(|path| read(path).lines().count()).sum();
    println!("{lines} lines in {} files", paths.len());
    assert!(
        lines <= PATH_LINES_MAX,
        "the reading path has {lines} lines, {PATH_LINES_MAX} allowed"
    );
}

#[test]
fn variables_of_the_environment_are_on_their_page() {
    let is_name = |c: char| c.is_ascii_uppercase() || c == '_';
    let page = read("docs/environment.md");
    let listed: BTreeSet<&str> = page
        .lines()
        .filter_map(|l| l.strip_prefix("| `")?.split_once('`'))
        .map(|(name, _)| name)
        .collect();
    let folders = [
        "runtime/",
        "kernels/",
        "planner/",
        "tests/",
        "benches/",
        "examples/",
    ];
    let mut used = BTreeSet::new();
    for source in sources() {
        if !folders.iter().any(|folder| source.path.starts_with(folder)) {
            continue;
        }
        // A name is quoted by itself, which macros of C are not.
        for quoted in source.text.split('"').filter(|q| q.starts_with(PREFIX)) {
            if quoted.len() > PREFIX.len() && quoted.chars().all(is_name) {
                used.insert(quoted.to_string());
            }
        }
    }
    assert!(used.len() > 10, "the variables were found: {used:?}");
    let used: BTreeSet<&str> = used.iter().map(String::as_str).collect();
    let missing: Vec<&&str> = used.difference(&listed).collect();
    let stale: Vec<&&str> = listed.difference(&used).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "docs/environment.md lacks {missing:?} and lists {stale:?}, which nothing reads"
    );
}
