//! Datasets, loaders, augmentations, tables and texts.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use ndarray::{Array1, Array2, Array3, arr1};

use super::super::{LoadedBatches, Table, Text, augment};
use super::*;

/// The numbers from 0, each beside a random number of its own.
fn numbers(n: usize) -> impl Dataset<Item = (i32, f32)> + Clone {
    Items((0..n as i32).collect::<Vec<_>>())
        .augment(9, |number, random| (number, random.uniform(0.0, 1.0)))
}

fn all<B>(batches: LoadedBatches<B>) -> Vec<B> {
    let left = batches.len();
    let all: Vec<B> = batches.map(|batch| batch.unwrap()).collect();
    assert_eq!(all.len(), left);
    all
}

#[test]
fn batches_are_the_same_for_any_number_of_workers() {
    let load = |workers: usize, ahead: usize| {
        let loader = numbers(103).batch(8).shuffle(5);
        loader.workers(workers).ahead(ahead)
    };
    let epochs: Vec<_> = (0..3).map(|epoch| all(load(0, 1).epoch(epoch))).collect();
    for (workers, ahead) in [(1, 0), (1, 4), (2, 1), (3, 2), (40, 1)] {
        for (epoch, expected) in (0..).zip(&epochs) {
            assert_eq!(
                all(load(workers, ahead).epoch(epoch)),
                *expected,
                "{workers}"
            );
            let rest = all(load(workers, ahead).epoch_from(epoch, 5));
            assert_eq!(rest, expected[5..], "{workers}");
        }
    }
    for batches in &epochs {
        let mut seen: Vec<i32> = batches.iter().flat_map(|(n, _)| n.to_vec()).collect();
        assert_eq!((batches.len(), seen.len()), (13, 103));
        assert_ne!(seen[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..103), "each item once");
    }
    assert_ne!(epochs[0], epochs[1]);
    // Random numbers belong to item and epoch, not to the order.
    let random = |epoch: u64, item: usize| numbers(103).item(item, epoch).unwrap().1;
    assert!(epochs[2].iter().all(|(n, r)| {
        n.iter()
            .zip(r)
            .all(|(&n, &r)| random(2, n as usize) == r && random(1, n as usize) != r)
    }));
    assert_eq!(all(load(2, 1).drop_last().epoch(0)), epochs[0][..12]);
    assert!(load(2, 1).epoch_from(0, 99).next().is_none());
    assert_eq!(all(numbers(0).batch(0).workers(3).epoch(0)).len(), 0);
    assert_eq!(all(numbers(3).batch(0).epoch(0)).len(), 3);
}

#[test]
fn a_loader_gives_the_batches_of_a_split() {
    let (pixels, labels) = ((0..60).collect(), (0..10).collect());
    let split = Split::new(pixels, labels, [2, 3]).unwrap();
    let loader = split.clone().batch(4).shuffle(3).workers(2);
    for epoch in 0..2 {
        let expected: Vec<_> = split.shuffled(4, epoch_seed(3, epoch)).collect();
        assert_eq!(all(loader.epoch(epoch)), expected);
    }
}

#[test]
fn memory_is_bounded() {
    for (workers, ahead) in [(1, 1), (2, 1), (2, 3)] {
        let (made, used) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let most = Arc::new(AtomicUsize::new(0));
        let (count, taken, peak) = (made.clone(), used.clone(), most.clone());
        let loader = Items(vec![0i32; 200])
            .map(move |item| {
                peak.fetch_max(count.fetch_add(1, SeqCst) + 1 - taken.load(SeqCst), SeqCst);
                item
            })
            .batch(2)
            .workers(workers)
            .ahead(ahead);
        for batch in loader.epoch(0) {
            used.fetch_add(batch.unwrap().len(), SeqCst);
            std::thread::yield_now();
        }
        assert_eq!(made.load(SeqCst), 200);
        let most = most.load(SeqCst);
        assert!(
            most <= 2 * (workers * ahead + 1),
            "{most} of {workers} times {ahead}"
        );
    }
}

#[test]
fn errors_and_panics_name_their_item() {
    for workers in [0, 1, 3] {
        let loader = Items((0..20).collect::<Vec<i32>>())
            .try_map(|n| match n {
                7 => Err(DataError::Other("seven is broken".into())),
                13 => std::panic::resume_unwind(Box::new("thirteen".to_owned())),
                n => Ok(n),
            })
            .batch(4)
            .workers(workers);
        let batches: Vec<_> = loader.epoch(0).collect();
        let said = |at: usize| batches[at].as_ref().unwrap_err().to_string();
        assert_eq!(said(1), "item 7: seven is broken");
        assert_eq!(
            said(3),
            "item 13: the function that makes it panicked: thirteen"
        );
        for at in [0, 2, 4] {
            assert_eq!(batches[at].as_ref().unwrap()[0], 4 * at as i32);
        }
        assert_eq!(batches.len(), 5);
    }
    // Items of different shapes.
    let ragged = Items(vec![1, 1, 2, 1]).map(Array1::<f32>::zeros);
    let batches: Vec<_> = ragged.batch(2).epoch(0).collect();
    let error = batches[1].as_ref().unwrap_err().to_string();
    assert!(
        error.starts_with("batch 1: a batch has items of the shapes [2] (first) and [1] (number 1"),
        "{error}"
    );
}

#[test]
fn dropping_midway_ends_the_workers() {
    let owned = Arc::new(());
    let held = Arc::clone(&owned);
    let endless = Items(vec![0i32; 1_000_000]).map(move |n| n + Arc::strong_count(&held) as i32);
    let loader = endless.batch(1).workers(3);
    let mut batches = loader.epoch(0);
    batches.next().unwrap().unwrap();
    drop(batches);
    drop(loader);
    assert_eq!(Arc::strong_count(&owned), 1);
}

#[test]
fn datasets_are_made_of_others() {
    let list = |dataset: &dyn Dataset<Item = i32>| -> Vec<i32> {
        (0..dataset.len())
            .map(|at| dataset.item(at, 0).unwrap())
            .collect()
    };
    let ten = || Items((0..10).collect::<Vec<i32>>());
    assert_eq!(list(&ten().take(3)), [0, 1, 2]);
    assert_eq!(list(&ten().take(99)).len(), 10);
    assert_eq!(list(&ten().subset([4, 4, 1]).unwrap()), [4, 4, 1]);
    let error = ten().subset([10]).err().unwrap().to_string();
    assert_eq!(error, "subset: there is no item 10; the dataset has 10");
    let [first, rest] = ten().permuted(1).split(4);
    let both = [list(&first), list(&rest)].concat();
    assert_eq!((first.len(), rest.len()), (4, 6));
    assert_eq!(both, list(&ten().permuted(1)));
    assert_ne!(both, list(&ten()));
    assert_eq!(list(&first.concat(rest)), both);
    let [none, all] = ten().split(0);
    assert!(none.is_empty() && all.len() == 10);
    assert_eq!(
        list(&ten().zip(ten().take(2)).map(|(a, b)| 10 * a + b)),
        [0, 11]
    );
    let rows = Rows(Array2::from_shape_fn((3, 2), |(i, j)| (i * 2 + j) as f32));
    assert_eq!(rows.item(1, 0).unwrap(), arr1(&[2.0, 3.0]));
    for error in [
        rows.item(3, 0).err(),
        ten().item(10, 0).err(),
        ten().take(1).item(1, 0).err(),
    ] {
        assert!(error.unwrap().to_string().contains("no such item"));
    }
}

fn image(channels: usize, height: usize, width: usize) -> Array3<f32> {
    let value = |(c, y, x): (usize, usize, usize)| ((c * 35 + y * 7 + x) * 7 % 23) as f32 / 23.0;
    Array3::from_shape_fn((channels, height, width), value)
}

#[test]
fn resizing_gives_the_numbers_of_pillow() {
    let image = image(1, 5, 7);
    for (size, expected) in [
        (
            [2, 3],
            &[
                8.775_974, 10.532_085, 13.759_74, 11.415_584, 9.398_396, 11.022_727,
            ][..],
        ),
        (
            [8, 10],
            &[
                0.0, 3.85, 8.75, 13.65, 18.55, 15.4, 5.35, 10.25, 15.15, 19.0, 1.3125, 5.1625,
            ],
        ),
        (
            [3, 7],
            &[
                1.285_714_3,
                8.285_714,
                15.285_714,
                12.428_572,
                6.285_714,
                13.285_714,
                20.285_715,
                6.0,
                13.0,
                14.888_889,
            ],
        ),
    ] {
        let resized = augment::resize(&image, size);
        assert_eq!(resized.shape()[1..], size);
        for (got, expected) in resized.iter().zip(expected) {
            assert!(
                (got * 23.0 - expected).abs() < 2e-5,
                "{size:?}: {got} {expected}"
            );
        }
    }
    assert_eq!(augment::resize(&image, [5, 7]), image);
    assert_eq!(augment::resize(&image, [0, 7]).dim(), (1, 0, 7));
    assert_eq!(
        augment::resize(&Array3::zeros((3, 0, 2)), [2, 2]),
        Array3::<f32>::zeros((3, 2, 2))
    );
}

#[test]
fn augmentations_stay_within_their_bounds() {
    let photo = image(3, 9, 7);
    for key in 0..200 {
        let random = &mut Random::keyed(1, 2, key);
        let crop = augment::random_crop(&photo, [4, 5], 0, random);
        let starts = (0..6).flat_map(|y| (0..3).map(move |x| (y, x)));
        let inside = |&(y, x): &(usize, usize)| {
            crop.indexed_iter()
                .all(|((c, i, j), &v)| v == photo[[c, y + i, x + j]])
        };
        assert!(starts.filter(inside).count() >= 1, "a part of the image");
        assert_eq!(
            augment::random_crop(&photo, [12, 5], 1, random).dim(),
            (3, 12, 5)
        );
        assert_eq!(
            augment::random_resized_crop(&photo, [6, 6], [0.1, 1.0], [0.75, 1.33], random).dim(),
            (3, 6, 6)
        );
        let changed = augment::color_jitter(photo.clone(), [0.5, 0.5, 0.5], random);
        assert!(changed.iter().all(|v| (0.0..=1.0).contains(v)));
        let erased = augment::random_erasing(photo.mapv(|v| v + 1.0), 1.0, [0.1, 0.3], random);
        let zeros = erased.iter().filter(|v| **v == 0.0).count();
        assert!(zeros % 3 == 0 && zeros <= 3 * 63 * 3 / 10 + 3, "{zeros}");
        assert!((3..8).contains(&(3 + random.below(5))) && random.below(0) == 0);
        assert!((-1.0..2.0).contains(&random.uniform(-1.0, 2.0)));
    }
    let random = &mut Random::keyed(0, 0, 0);
    let same = augment::color_jitter(photo.clone(), [0.0; 3], random);
    assert!(same.iter().zip(&photo).all(|(a, b)| (a - b).abs() < 1e-6));
    assert_eq!(
        augment::random_erasing(photo.clone(), 0.0, [0.5, 0.5], random),
        photo
    );
    let flipped = augment::flip(photo.clone());
    assert_eq!(flipped[[1, 2, 0]], photo[[1, 2, 6]]);
    assert_eq!(augment::flip(flipped.clone()), photo);
    assert!(flipped.is_standard_layout());
    assert_eq!(augment::random_flip(photo.clone(), 0.0, random), photo);
    assert_eq!(augment::random_flip(photo.clone(), 1.0, random), flipped);
    assert_eq!(
        augment::center_crop(&photo, [3, 3])[[0, 0, 0]],
        photo[[0, 3, 2]]
    );
    let padded = augment::center_crop(&photo, [11, 7]);
    assert_eq!(
        (padded[[0, 0, 3]], padded[[2, 1, 3]]),
        (0.0, photo[[2, 0, 3]])
    );
    let normal = augment::normalize(photo.clone(), &[0.5, 0.25], &[0.5]);
    assert_eq!(normal[[0, 1, 1]], (photo[[0, 1, 1]] - 0.5) / 0.5);
    assert_eq!(normal[[1, 1, 1]], photo[[1, 1, 1]] - 0.25);
    assert_eq!(normal[[2, 1, 1]], photo[[2, 1, 1]]);
}

#[test]
fn tables_are_read_and_their_mistakes_located() {
    let table = Table::of_text("a, b ,name\n1,2.5,x\n-3,,\"y, \"\"z\"\"\"\n1,1e2,x\n").unwrap();
    assert_eq!(
        (table.columns().to_vec(), table.len()),
        (vec!["a".into(), "b".into(), "name".to_owned()], 3)
    );
    assert_eq!(table.integers("a").unwrap(), arr1(&[1, -3, 1]));
    let numbers = table.numbers(&["b", "a"]).unwrap();
    assert_eq!(
        (numbers[[0, 0]], numbers[[1, 1]], numbers[[2, 0]]),
        (2.5, -3.0, 100.0)
    );
    assert!(numbers[[1, 0]].is_nan());
    assert_eq!(
        table.classes("name").unwrap(),
        (arr1(&[0, 1, 0]), vec!["x".into(), "y, \"z\"".into()])
    );
    assert_eq!(table.texts("name").unwrap()[2], "x");
    let error = |result: Result<(), DataError>| result.unwrap_err().to_string();
    let of = |text: &str| Table::of_text(text).map(|_| ());
    assert_eq!(
        error(of("a,b\n1,2\n3\n")),
        "the data: line 3 has 1 fields, and there are 2 columns: column 2 is missing"
    );
    assert!(
        error(of("a,b\n\"1\n\",2\n3,4,5\n"))
            .contains("line 4 has 3 fields, and there are 2 columns: column 3 is too much")
    );
    assert!(error(of("a,a\n")).contains("two columns are named \"a\""));
    assert!(error(of("")).contains("it is empty"));
    assert!(
        error(table.integers("b").map(|_| ()))
            .ends_with("line 2, column \"b\": \"2.5\" is not an integer of 32 bits")
    );
    assert!(
        error(table.numbers(&["name"]).map(|_| ()))
            .contains("line 2, column \"name\": \"x\" is not a number")
    );
    assert!(
        error(table.numbers(&["c"]).map(|_| ()))
            .contains("it has no column \"c\"; its columns are")
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.tsv");
    fs::write(&path, b"a\tb\n1\t\xff\n").unwrap();
    let error = Table::read_separated(&path, b'\t').unwrap_err().to_string();
    assert!(
        error.contains("t.tsv: line 2, column 2: the text is not UTF-8"),
        "{error}"
    );
    assert!(Table::read(folder.path().join("none.csv")).is_err());
}

#[test]
fn texts_are_cut_into_windows() {
    let text = Text::of_chars("hello", 2).unwrap();
    assert_eq!((text.tokens(), text.len()), (4, 3));
    let (x, y) = text.item(2, 0).unwrap();
    assert_eq!(
        (text.decode(&x), text.decode(&y)),
        ("ll".into(), "lo".into())
    );
    assert_eq!((text.encode('h'), text.encode('z')), (Some(1), None));
    assert_eq!(text.decode(&[3, 9, -1]), "o��");
    assert!(text.item(3, 0).is_err());
    assert_eq!(text.clone().every(2).len(), 2);
    let short = Text::of_chars("ab", 2).unwrap_err().to_string();
    assert_eq!(
        short,
        "the text: a window of 2 tokens and the next needs 3 tokens, and there are 2"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.txt");
    fs::write(&path, b"a\xffbc").unwrap();
    assert!(
        Text::chars_of(&path, 1)
            .unwrap_err()
            .to_string()
            .contains("no text in UTF-8")
    );
    let bytes = Text::bytes_of(&path, 3).unwrap();
    assert_eq!((bytes.tokens(), bytes.len()), (256, 1));
    assert_eq!(
        bytes.item(0, 0).unwrap(),
        (arr1(&[97, 255, 98]), arr1(&[255, 98, 99]))
    );
    assert_eq!(bytes.decode(&[104, 105]), "hi");
    let (tokens, next) = all(Text::of_chars("abcdefgh", 3).unwrap().batch(2).epoch(0)).remove(0);
    assert_eq!((tokens.dim(), next.dim()), ((2, 3), (2, 3)));
}
