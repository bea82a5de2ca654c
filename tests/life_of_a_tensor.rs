//! The walk in `docs/life-of-a-tensor.md` agrees with the code: its links lead to items that exist,
//! and its excerpts occur in the dump of the network that it follows.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use slabwise::nn::{Conv2d, Linear};
use slabwise::optim::Adam;
use slabwise::prelude::*;
use slabwise::{CompileOptions, Isa};

const WALK: &str = include_str!("../docs/life-of-a-tensor.md");

/// The least links and excerpts that the walk has, so that a change of its form is noticed.
const LINKS_MIN: usize = 50;
const EXCERPTS_MIN: usize = 8;

/// Whether a file declares an item or a variant of this name.
fn declares(text: &str, name: &str) -> bool {
    let kinds = ["fn", "struct", "enum", "trait", "const", "static", "type"];
    kinds.iter().any(|kind| {
        let declared = format!("{kind} {name}");
        text.match_indices(&declared).any(|(at, _)| {
            let next = text[at + declared.len()..].chars().next();
            !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
        })
    })
}

#[test]
fn files_and_items_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut links = 0;
    for (at, _) in WALK.match_indices("](../") {
        let target = WALK[at + "](../".len()..].split(')').next();
        let target = target.expect("a link ends");
        let text =
            fs::read_to_string(root.join(target)).unwrap_or_else(|e| panic!("{target}: {e}"));
        let shown = WALK[..at].rsplit('[').next().expect("a link has a text");
        let item = shown.trim_matches('`').replace('\n', " ");
        let name = item.rsplit("::").next().expect("a name");
        let is_item = shown.starts_with('`') && target.contains("src/");
        assert!(!is_item || declares(&text, name), "{target} has no {item}");
        links += usize::from(is_item);
    }
    assert!(links >= LINKS_MIN, "{links} links to items");
    // The files that sections name in their first words.
    let spans = WALK.split('`').skip(1).step_by(2);
    for path in spans.filter(|span| span.ends_with(".rs") && span.contains('/')) {
        assert!(root.join(path).is_file(), "{path} does not exist");
    }
}

/// The dump of the network's program, by file name.
fn dump() -> BTreeMap<String, String> {
    let params = Params::seeded(0);
    let at = params.root();
    let stem = Conv2d::new(&at / "stem", 1, 32, 5).padding(2);
    let body = Conv2d::new(&at / "body", 32, 64, 5).padding(2);
    let hidden = Linear::new(&at / "hidden", 64 * 7 * 7, 512);
    let head = Linear::new(&at / "head", 512, 10);
    let trace = Trace::training();
    let images = trace.input("images", F32, (64, 1, 28, 28));
    let x = images.apply(&stem).relu().max_pool2d(2);
    let x = x.apply(&body).relu().max_pool2d(2);
    let logits = x.flatten(1).apply(&hidden).relu().apply(&head);
    let labels = trace.input("labels", I32, (64,));
    let loss = logits.cross_entropy(labels);
    trace.minimize(loss, Adam::new(1e-3));
    let folder = tempfile::tempdir().expect("a folder");
    let options = CompileOptions {
        isa: Some(Isa::Portable),
        ..CompileOptions::default()
    };
    let session = Session::new(Device::Cpu, params).expect("a session");
    let session = session.with_threads(1).with_options(options);
    let session = session.with_dump(folder.path());
    session.plan(&trace, [loss]).expect("it is planned");
    let program = fs::read_dir(folder.path()).expect("a dump").next();
    let program = program.expect("a program").expect("a folder").path();
    let files = fs::read_dir(program).expect("files");
    files
        .map(|file| {
            let file = file.expect("a file");
            let text = fs::read_to_string(file.path()).expect("text");
            (file.file_name().to_string_lossy().into_owned(), text)
        })
        .collect()
}

#[test]
fn excerpts_are_of_real_dumps() {
    let dump = dump();
    let mut excerpts = 0;
    for block in WALK.split("```text ").skip(1) {
        let (file, rest) = block.split_once('\n').expect("a name and a text");
        let excerpt = rest.split("\n```").next().expect("a block ends");
        let text = dump
            .get(file)
            .unwrap_or_else(|| panic!("the dump has no {file}"));
        // A line that is cut ends with an ellipsis.
        let wanted = excerpt.trim_end_matches(" …");
        assert!(
            text.contains(wanted),
            "{file} does not have\n{wanted}\nbut\n{text}"
        );
        excerpts += 1;
    }
    assert!(excerpts >= EXCERPTS_MIN, "{excerpts} excerpts");
    let lines = dump["00-trace.txt"].lines().count();
    let left = dump["01-simplify.txt"].lines().count();
    let counts = format!("of {lines} lines of the trace {left} remain");
    assert!(WALK.replace('\n', " ").contains(&counts), "{counts}");
    let images = &dump["08-plan.json"];
    let offset = images.split("\"offset\": ").nth(1).expect("an offset");
    let offset: u64 = first_number(offset).parse().expect("a number");
    for number in [offset, offset + 64 * 28 * 28 * 4] {
        let shown = with_commas(number);
        assert!(WALK.contains(&shown), "the walk does not have {shown}");
    }
}

fn first_number(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit());
    &text[..end.unwrap_or(text.len())]
}

fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let mut shown = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}
