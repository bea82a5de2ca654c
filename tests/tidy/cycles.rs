//! Import cycles between the folders of a crate.
//!
//! A folder is a module of the crate root with everything below it. Modules that are plain files of
//! the root share one folder, so that a cycle among them alone is none between folders.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::algo::tarjan_scc;
use petgraph::graph::{DiGraph, NodeIndex};

use super::{Source, none, rust};

/// An import of one module of the crate root by another.
struct Import {
    from: String,
    to: String,
    /// File and line.
    place: String,
}

/// The code of a file without comments and without the tests at its end.
fn code(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let tests = lines
            .peek()
            .is_some_and(|next| next.starts_with("mod tests"));
        if line == "#[cfg(test)]" && tests {
            break;
        }
        code += line.split("//").next().unwrap_or_default();
        code.push('\n');
    }
    code
}

fn first_word(text: &str) -> &str {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The first segments of a path or of a group of paths: `a` of `a::b`, `a` and `c` of `{a::b, c}`.
fn heads(path: &str) -> Vec<&str> {
    let Some(group) = path.strip_prefix('{') else {
        return vec![first_word(path)];
    };
    let (mut heads, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                heads.push(first_word(&group[start..at]));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                heads.push(first_word(&group[start..at]));
                start = at + 1;
            }
            _ => {}
        }
    }
    heads
}

/// The names at the crate root that code refers to, each with its offset. `depth` is the number of
/// segments in the path of the code's module.
fn root_names(code: &str, depth: usize) -> Vec<(usize, &str)> {
    let mut names = Vec::new();
    for (at, found) in code.match_indices("crate::") {
        let rest = &code[at + found.len()..];
        names.extend(heads(rest).into_iter().map(|name| (at, name)));
    }
    for (at, _) in code.match_indices("super::") {
        if code[..at].ends_with("super::") {
            continue;
        }
        let rest = code[at..].trim_start_matches("super::");
        let levels = (code.len() - at - rest.len()) / "super::".len();
        if levels == depth {
            names.extend(heads(rest).into_iter().map(|name| (at, name)));
        }
    }
    names
}

/// The imports between the modules of a crate's root.
fn imports(folder: &str, lib: &Source, files: &[Source]) -> Vec<Import> {
    let lib = code(&lib.text);
    let modules: BTreeSet<&str> = lib
        .split("mod ")
        .skip(1)
        .map(first_word)
        .filter(|name| !name.is_empty())
        .collect();
    // Names that the root re-exports, with their modules.
    let mut exported: BTreeMap<&str, &str> = BTreeMap::new();
    for statement in lib.split(';') {
        let Some((_, path)) = statement.rsplit_once("use ") else {
            continue;
        };
        let path = path.trim_start_matches("crate::");
        if let Some(module) = modules.get(first_word(path)) {
            let names = super::words(path).filter(|name| !name.is_empty());
            exported.extend(names.map(|name| (name, *module)));
        }
    }
    let mut imports = Vec::new();
    for file in files {
        let Some(inside) = file.path.strip_prefix(folder) else {
            continue;
        };
        let inside = inside.trim_start_matches('/').trim_end_matches(".rs");
        let mut path: Vec<&str> = inside.split('/').collect();
        path.pop_if(|last| *last == "mod");
        let is_test = path.iter().any(|segment| segment.starts_with("test"));
        if is_test || !modules.contains(path[0]) {
            continue;
        }
        let code = code(&file.text);
        for (at, name) in root_names(&code, path.len()) {
            let module = modules.get(name).or_else(|| exported.get(name));
            let Some(&module) = module.filter(|&&module| module != path[0]) else {
                continue;
            };
            imports.push(Import {
                from: path[0].to_owned(),
                to: module.to_owned(),
                place: format!("{}:{}", file.path, code[..at].lines().count().max(1)),
            });
        }
    }
    imports
}

/// The cycles between folders: strongly connected modules, of which one at least has a folder.
fn cycles(imports: &[Import], has_folder: impl Fn(&str) -> bool) -> Vec<BTreeSet<&str>> {
    let mut graph = DiGraph::<&str, ()>::new();
    let mut nodes: BTreeMap<&str, NodeIndex> = BTreeMap::new();
    for import in imports {
        let [from, to] = [&import.from, &import.to].map(|name| {
            let node = nodes.entry(name).or_insert_with(|| graph.add_node(name));
            *node
        });
        graph.update_edge(from, to, ());
    }
    let components = tarjan_scc(&graph).into_iter();
    components
        .map(|nodes| nodes.into_iter().map(|node| graph[node]).collect())
        .filter(|cycle: &BTreeSet<&str>| cycle.len() > 1 && cycle.iter().any(|m| has_folder(m)))
        .collect()
}

#[test]
fn folders_import_without_cycles() {
    let files = rust();
    let libs = files
        .iter()
        .filter(|file| file.path.ends_with("src/lib.rs"));
    let mut offences = Vec::new();
    let (mut crates, mut edges) = (0, 0);
    for lib in libs {
        let folder = lib.path.trim_end_matches("/lib.rs");
        let imports = imports(folder, lib, &files);
        (crates, edges) = (crates + 1, edges + imports.len());
        let has_folder = |module: &str| {
            let below = format!("{folder}/{module}/");
            files.iter().any(|file| file.path.starts_with(&below))
        };
        for cycle in cycles(&imports, has_folder) {
            let names: Vec<&str> = cycle.iter().copied().collect();
            offences.push(format!("{folder}: {} import each other:", names.join(", ")));
            let mut shown = BTreeSet::new();
            for import in &imports {
                let (from, to) = (&*import.from, &*import.to);
                if cycle.contains(from) && cycle.contains(to) && shown.insert((from, to)) {
                    offences.push(format!("    {}: {from} imports {to}", import.place));
                }
            }
        }
    }
    assert!(
        crates >= 4 && edges > 500,
        "the imports were found: {edges} in {crates} crates"
    );
    none("import cycles between folders of a crate", &offences);
}

#[test]
fn cycles_are_found() {
    let file = |path: &str, text: &str| Source {
        path: path.into(),
        text: text.into(),
    };
    let lib = file(
        "x/src/lib.rs",
        "mod a;\nmod b;\nmod c;\npub use b::{Deep, Other};\n",
    );
    let files = [
        file(
            "x/src/a.rs",
            "// use crate::c;\nuse crate::{\n    Deep,\n    b::f,\n};\n",
        ),
        file(
            "x/src/b.rs",
            "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::c::g;\n}\n",
        ),
        file(
            "x/src/b/inner.rs",
            "use super::f;\nuse super::super::{a::h, b::f};\n",
        ),
        file("x/src/c.rs", "use super::a;\n"),
    ];
    let imports = imports("x/src", &lib, &files);
    let shown: Vec<String> = imports
        .iter()
        .map(|i| format!("{} {} {}", i.place, i.from, i.to))
        .collect();
    let expected = [
        "x/src/a.rs:2 a b",
        "x/src/a.rs:2 a b",
        "x/src/b/inner.rs:2 b a",
        "x/src/c.rs:1 c a",
    ];
    assert_eq!(shown, expected);
    assert_eq!(cycles(&imports, |m| m == "b"), [BTreeSet::from(["a", "b"])]);
    assert_eq!(cycles(&imports, |_| false), Vec::<BTreeSet<&str>>::new());
}
