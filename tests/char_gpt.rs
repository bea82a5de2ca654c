//! The model of the example `char_gpt`: token by token from a cache, it gives the same logits as
//! for a whole text; and its texts.

#[path = "../examples/char_gpt/model.rs"]
mod model;
#[path = "../examples/char_gpt/text.rs"]
mod text;

use std::fs;
use std::io::Write;
use std::path::Path;

use model::{Gpt, Sizes};
use ndarray::{Array2, arr1};
use slabwise::World;
use slabwise::optim::Adam;
use slabwise::prelude::*;
use text::{BYTES_MAX, CHARACTERS_MAX, Text};

const SIZES: Sizes = Sizes {
    vocabulary: 11,
    length: 12,
    width: 24,
    heads: 3,
    layers: 2,
};

struct Programs {
    session: Session,
    train: Program<1>,
    whole: Program<1>,
    next: Program<1>,
}

fn programs() -> Programs {
    let params = Params::seeded(5);
    let gpt = Gpt::new(&params.root(), SIZES);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(2);
    let trace = Trace::training();
    let (x, y) = (
        trace.input("tokens", I32, (4, SIZES.length)),
        trace.input("next", I32, (4, SIZES.length)),
    );
    let loss = gpt.forward(x).cross_entropy(y.flatten(0));
    trace.minimize(loss, Adam::new(3e-3));
    let train = session.compile(&trace, [loss]).expect("it compiles");
    let trace = Trace::inference();
    let logits = gpt.forward(trace.input("tokens", I32, (Dim::bounded("batch", 4), SIZES.length)));
    let whole = session.compile(&trace, [logits]).expect("it compiles");
    let trace = Trace::inference().named("write");
    let logits = gpt.next(
        trace.input("token", I32, (1,)),
        trace.input("place", I32, (1,)),
    );
    let next = session.compile(&trace, [logits]).expect("it compiles");
    Programs {
        session,
        train,
        whole,
        next,
    }
}

/// A text whose every token follows from the two before.
fn tokens(seed: usize) -> (Array2<i32>, Array2<i32>) {
    let token =
        |i: usize, j: usize| ((seed + i * 7 + j * (1 + (seed + i) % 3)) % SIZES.vocabulary) as i32;
    let at =
        |offset: usize| Array2::from_shape_fn((4, SIZES.length), |(i, j)| token(i, j + offset));
    (at(0), at(1))
}

/// The largest difference between the logits of a text read at once and those of its tokens one
/// after the other.
fn difference(p: &mut Programs, text: &[i32]) -> f32 {
    let whole = Array2::from_shape_vec((1, SIZES.length), text.to_vec()).expect("a window");
    let at_once = p.session.run(&p.whole, (&whole,)).expect("a run")[0]
        .array::<f32>()
        .expect("f32");
    let mut most = 0.0f32;
    for (place, &token) in text.iter().enumerate() {
        let [logits] = p
            .session
            .run(&p.next, (&arr1(&[token]), &arr1(&[place as i32])))
            .expect("a run");
        let logits = logits.view::<f32>().expect("f32");
        assert_eq!(logits.shape(), [1, SIZES.vocabulary]);
        most = logits
            .iter()
            .zip(at_once.outer_iter().nth(place).expect("as many"))
            .map(|(a, b)| (a - b).abs())
            .fold(most, f32::max);
    }
    most
}

#[test]
fn logits_of_one_token_at_a_time_match_those_of_the_whole_text() {
    let mut p = programs();
    let mut losses = Vec::new();
    for step in 0..60 {
        let (x, y) = tokens(step);
        losses.push(p.session.run(&p.train, (&x, &y)).expect("a step")[0].item());
    }
    assert!(losses[59] < 0.7 * losses[0], "it learns: {losses:?}");
    let text: Vec<i32> = tokens(3).0.row(1).to_vec();
    let other: Vec<i32> = tokens(8).0.row(2).iter().rev().copied().collect();
    // Logits are of the size of 1; a sum of 24 products rounds to about 1e-6.
    for text in [&text, &other, &text] {
        let most = difference(&mut p, text);
        assert!(
            most < 5e-6,
            "an earlier text in the cache has no effect: {most}"
        );
    }
    // The cache is read: another first token changes the logits of the last.
    let last = |p: &mut Programs| {
        let feed = (&arr1(&[text[11]]), &arr1(&[11]));
        p.session.run(&p.next, feed).expect("a run")[0]
            .array::<f32>()
            .expect("f32")
    };
    let before = last(&mut p);
    p.session
        .run(&p.next, (&arr1(&[(text[0] + 1) % 11]), &arr1(&[0])))
        .expect("a run");
    assert_ne!(before, last(&mut p));
}

#[test]
fn the_cache_is_state_of_the_session_and_written_in_place() {
    let p = programs();
    let cache: Vec<&str> = p
        .session
        .names()
        .filter(|name| name.starts_with("cache."))
        .collect();
    assert_eq!(
        cache,
        [
            "cache.0.keys",
            "cache.0.values",
            "cache.1.keys",
            "cache.1.values"
        ]
    );
    let plan = p.next.plan();
    assert_eq!(
        plan.persistent().state,
        4 * (SIZES.length * SIZES.width * 4) as u64
    );
    // The slab holds the part of a cache that a block reads, once, and nothing larger.
    let cache = (SIZES.length * SIZES.width * 4) as u64;
    let large = plan
        .dag()
        .buffers
        .iter()
        .filter(|b| b.bytes >= cache)
        .map(|b| b.bytes);
    assert!(large.clone().all(|bytes| bytes == cache) && large.count() <= 4);
    assert!(
        plan.steps()
            .all(|step| !step.starts_with("cache.") || !step.ends_with(".update")),
        "no copies at the end"
    );
}

#[test]
fn a_position_or_token_beyond_the_model_is_an_error() {
    let mut p = programs();
    for (token, place) in [(0, 12), (11, 0), (-1, 0)] {
        let said = p
            .session
            .run(&p.next, (&arr1(&[token]), &arr1(&[place])))
            .map(|_| ())
            .expect_err("out of range")
            .to_string();
        assert!(said.contains("model.rs:"), "{said}");
    }
}

fn read(bytes: &[u8], length: usize) -> Result<Text> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.txt");
    fs::write(&path, bytes).expect("it is written");
    Text::read(Some(&path), length)
}

#[test]
fn texts_become_windows_of_numbers() {
    let text = read("abcdéfghij".repeat(30).as_bytes(), 8).expect("a text");
    assert_eq!(text.characters.iter().collect::<String>(), "abcdfghijé");
    assert_eq!(text.encode("bé?a"), [1, 9, 0]);
    let mut windows = 0;
    let all = |world: &World| {
        let both = text.windows(8, 3, 5, 7, world);
        both.chain(text.validation(8, 3, 2, world))
            .collect::<Vec<_>>()
    };
    let whole = all(&World::alone());
    let worlds = World::local(2).expect("a world");
    let [first, second] = [&worlds[0], &worlds[1]].map(all);
    for (at, (x, _)) in whole.iter().enumerate() {
        let parts = [first[at].0.view(), second[at].0.view()];
        let joined = ndarray::concatenate(ndarray::Axis(0), &parts).expect("one width");
        assert_eq!(&joined, x, "the shares of batch {at}");
    }
    for (x, y) in whole {
        assert_eq!((x.ncols(), y.dim()), (8, x.dim()));
        for (x, y) in x.rows().into_iter().zip(y.rows()) {
            assert_eq!(
                x.as_slice().expect("a row")[1..],
                y.as_slice().expect("a row")[..7]
            );
            windows += 1;
        }
    }
    assert_eq!(windows, 5 * 3 + 2);
    let built_in = Text::read(None, 96).expect("the text is there");
    assert_eq!(
        (built_in.tokens.len(), built_in.characters.len()),
        (1_115_394, 65)
    );
}

#[test]
fn a_checkpoint_of_another_text_is_refused() {
    let [text, other] = ["abcdef", "abxdef"].map(|letters| {
        let text = read(letters.repeat(40).as_bytes(), 8);
        text.expect("a text")
    });
    text.check_codes(&text.codes()).expect("the same text");
    let said = other.check_codes(&text.codes()).expect_err("another text");
    let said = said.to_string();
    assert!(
        said.contains("number 2 is 'd' in this text, and 'c'"),
        "{said}"
    );
}

#[test]
fn files_that_are_no_text_are_refused() {
    let said = |bytes: &[u8]| read(bytes, 8).expect_err("a mistake").to_string();
    assert!(said(b"").contains("0 characters are too few for windows of 8: 90 are needed"));
    assert!(
        said(&[b"abc".as_slice(), &[0xff], &[b'x'; 200]].concat()).contains("byte 3 is not UTF-8")
    );
    let many: String = (0x4E00u32..0x4E00 + CHARACTERS_MAX as u32 + 1)
        .filter_map(char::from_u32)
        .collect();
    assert!(said(many.as_bytes()).contains("4097 different characters"));
    assert!(said(&[0x1f, 0x8b, 8, 0, 0, 0]).contains("the gzip data is damaged"));
    let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for _ in 0..=BYTES_MAX >> 20 {
        bomb.write_all(&[b'a'; 1 << 20]).expect("in memory");
    }
    assert!(said(&bomb.finish().expect("in memory")).contains("the text is longer than"));
    assert!(Text::read(Some(Path::new("/no/such/file")), 8).is_err());
}
