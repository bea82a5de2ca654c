//! The real data, and damaged files of each kind.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

use flate2::Compression;
use flate2::write::GzEncoder;
use ndarray::{Axis, concatenate};

use super::*;

fn mnist() -> &'static Mnist {
    static MNIST: OnceLock<Mnist> = OnceLock::new();
    MNIST.get_or_init(|| Mnist::load(Mnist::default_dir()).unwrap())
}

fn idx(dims: &[u32], data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, dims.len() as u8];
    bytes.extend(dims.iter().flat_map(|dim| dim.to_be_bytes()));
    bytes.extend(data);
    bytes
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const TRAIN_IMAGES: &str = "train-images-idx3-ubyte";
const TRAIN_LABELS: &str = "train-labels-idx1-ubyte";

/// A small data set: five images of 2 by 3 to learn from, one to judge by.
fn small(folder: &Path) {
    let pixels: Vec<u8> = (0..30).map(|i| i * 7).collect();
    fs::write(folder.join(TRAIN_IMAGES), idx(&[5, 2, 3], &pixels)).unwrap();
    // Compressed under a plain name, with a point, and plain under a name for compressed: content
    // decides.
    fs::write(
        folder.join(TRAIN_LABELS),
        gzip(&idx(&[5], &[9, 0, 1, 2, 3])),
    )
    .unwrap();
    fs::write(
        folder.join("t10k-images.idx3-ubyte"),
        gzip(&idx(&[1, 2, 3], &[255; 6])),
    )
    .unwrap();
    fs::write(folder.join("t10k-labels-idx1-ubyte.gz"), idx(&[1], &[4])).unwrap();
}

#[test]
fn the_real_data_is_read() {
    let mnist = mnist();
    assert_eq!((mnist.train.len(), mnist.test.len()), (60_000, 10_000));
    assert_eq!(
        (mnist.train.image_shape(), mnist.test.image_shape()),
        ([28, 28], [28, 28])
    );
    let histogram = |split: &Split| {
        let mut counts = [0; 10];
        split
            .labels()
            .iter()
            .for_each(|&label| counts[usize::from(label)] += 1);
        counts
    };
    // The class counts given in the literature.
    assert_eq!(
        histogram(&mnist.train),
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    );
    assert_eq!(
        histogram(&mnist.test),
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    );
    // The widely quoted mean and standard deviation of the training pixels, 0.1307 and 0.3081.
    let n = mnist.train.pixels().len() as f64;
    let (sum, squares) = mnist
        .train
        .pixels()
        .iter()
        .fold((0u64, 0u64), |(s, q), &p| {
            (s + u64::from(p), q + u64::from(p).pow(2))
        });
    let mean = sum as f64 / n / 255.0;
    let deviation = (squares as f64 / n / 255.0 / 255.0 - mean * mean).sqrt();
    assert!(
        (mean - 0.1307).abs() < 5e-5 && (deviation - 0.3081).abs() < 5e-5,
        "{mean} {deviation}"
    );
}

#[test]
fn batches_cover_the_split_in_order() {
    let test = &mnist().test;
    let batches = test.batches(300);
    assert_eq!(batches.len(), 34);
    let (mut left, mut at) = (34, 0);
    let mut walk = batches.clone();
    while let Some((images, labels)) = walk.next() {
        left -= 1;
        assert_eq!(walk.len(), left);
        let n = labels.len();
        assert_eq!(images.dim(), (n, 1, 28, 28));
        assert_eq!(n, if left == 0 { 100 } else { 300 });
        let pixels = &test.pixels()[at * 784..(at + n) * 784];
        assert!(
            images
                .iter()
                .zip(pixels)
                .all(|(&value, &pixel)| value == f32::from(pixel) / 255.0)
        );
        assert!(
            labels
                .iter()
                .zip(&test.labels()[at..])
                .all(|(&label, &stored)| label == i32::from(stored))
        );
        at += n;
    }
    assert_eq!((left, at), (0, 10_000));
    assert!(walk.next().is_none());
    for ((images, labels), (rows, same)) in batches.clone().zip(batches.flat()) {
        assert_eq!(rows.dim(), (labels.len(), 784));
        assert!(labels == same && images.iter().eq(rows.iter()));
    }
}

#[test]
fn batch_sizes_at_the_edges() {
    let split = Split::new((0..5).collect(), (0..5).collect(), [1, 1]).unwrap();
    for (batch, sizes) in [
        (0, &[1; 5][..]),
        (1, &[1; 5]),
        (2, &[2, 2, 1]),
        (5, &[5]),
        (usize::MAX, &[5]),
    ] {
        assert_eq!(split.batches(batch).len(), sizes.len());
        assert!(
            split
                .shuffled(batch, 1)
                .map(|(_, labels)| labels.len())
                .eq(sizes.iter().copied())
        );
    }
    let empty = Split::new(vec![], vec![], [28, 28]).unwrap();
    assert!(empty.is_empty());
    assert_eq!(
        (
            empty.shuffled(8, 0).len(),
            empty.batches(8).prefetch(2).count()
        ),
        (0, 0)
    );
    let white = Split::new(vec![255, 0], vec![0, 1], [1, 1]).unwrap();
    assert_eq!(
        white
            .batches(2)
            .flat()
            .next()
            .unwrap()
            .0
            .into_raw_vec_and_offset()
            .0,
        [1.0, 0.0]
    );
}

#[test]
fn shuffling_keeps_pairs_and_shows_each_image_once() {
    // Each image's only pixel is its index, so the order can be read back.
    let labels: Vec<u8> = (0..200).map(|i| i % 10).collect();
    let split = Split::new((0..200).collect(), labels, [1, 1]).unwrap();
    let order = |seed| -> Vec<u32> {
        let batches = split.shuffled(33, seed).flat();
        let pairs =
            batches.flat_map(|(images, labels)| images.into_iter().zip(labels).collect::<Vec<_>>());
        pairs
            .map(|(value, label)| {
                let index = (value * 255.0).round() as u32;
                assert_eq!(index as i32 % 10, label);
                index
            })
            .collect()
    };
    let first = order(epoch_seed(3, 0));
    assert_eq!(first, order(epoch_seed(3, 0)));
    assert_ne!(first, order(epoch_seed(3, 1)));
    let mut sorted = first.clone();
    sorted.sort_unstable();
    assert!(sorted != first && sorted.into_iter().eq(0..200));
}

#[test]
fn prefetching_changes_nothing() {
    let test = &mnist().test;
    let plain: Vec<_> = test.shuffled(512, 5).collect();
    for depth in [0, 1, 4, 1000] {
        assert!(
            test.shuffled(512, 5)
                .prefetch(depth)
                .eq(plain.iter().cloned())
        );
    }
    let rows: Vec<_> = test
        .shuffled(512, 5)
        .flat()
        .prefetch(2)
        .map(|(rows, _)| rows)
        .collect();
    let views: Vec<_> = rows.iter().map(|rows| rows.view()).collect();
    let whole: Vec<f32> = concatenate(Axis(0), &views).unwrap().into_iter().collect();
    assert!(
        whole
            .iter()
            .eq(plain.iter().flat_map(|(images, _)| images.iter()))
    );
}

#[test]
fn kinds_of_files_are_detected_by_content() {
    let folder = tempfile::tempdir().unwrap();
    small(folder.path());
    let data = Mnist::load(folder.path()).unwrap();
    assert_eq!(
        (data.train.len(), data.test.len(), data.train.image_shape()),
        (5, 1, [2, 3])
    );
    assert_eq!(
        (data.train.labels(), data.test.labels()),
        (&[9, 0, 1, 2, 3][..], &[4][..])
    );
    assert_eq!(data.train.pixels()[29], 203);
}

#[test]
fn missing_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    small(folder.path());
    for (file, what) in [
        ("t10k-images.idx3-ubyte", "test images"),
        (TRAIN_LABELS, "training labels"),
        (TRAIN_IMAGES, "training images"),
    ] {
        fs::remove_file(folder.path().join(file)).unwrap();
        let text = Mnist::load(folder.path()).unwrap_err().to_string();
        assert!(
            text.starts_with(&format!(
                "no {what} in {}: looked for ",
                folder.path().display()
            )),
            "{text}"
        );
        assert!(text.contains(file), "{text}");
    }
    let nowhere = folder.path().join("nowhere");
    assert!(
        matches!(Mnist::load(&nowhere), Err(DataError::Missing { folder, .. }) if folder == nowhere)
    );
}

/// The errors of reading the training images when their file has `bytes`, plain and compressed.
fn damaged(bytes: &[u8]) -> [DataError; 2] {
    let folder = tempfile::tempdir().unwrap();
    small(folder.path());
    [bytes.to_vec(), gzip(bytes)].map(|bytes| {
        let path = folder.path().join(TRAIN_IMAGES);
        fs::write(&path, bytes).unwrap();
        let error = Mnist::load(folder.path()).unwrap_err();
        assert!(
            error.to_string().contains(&*path.to_string_lossy()),
            "{error}"
        );
        error
    })
}

#[test]
fn damaged_files_are_errors() {
    let whole = idx(&[5, 2, 3], &[0; 30]);
    for length in 0..whole.len() {
        for error in damaged(&whole[..length]) {
            match error {
                DataError::Header { .. } => assert!(length < 16),
                DataError::Truncated {
                    declared: 30,
                    found,
                    ..
                } => assert_eq!(found + 16, length as u64),
                other => panic!("{length}: {other}"),
            }
        }
    }
    for error in damaged(&[&whole[..], &[1]].concat()) {
        assert!(
            matches!(error, DataError::Trailing { declared: 30, .. }),
            "{error}"
        );
    }
    // Labels in place of images, other element types, no IDX at all.
    for bytes in [
        idx(&[30], &[0; 30]),
        [&[0, 0, 13], &whole[3..]].concat(),
        b"<html>not the file you wanted</html>".to_vec(),
    ] {
        assert!(
            damaged(&bytes)
                .iter()
                .all(|error| matches!(error, DataError::Header { rank: 3, .. }))
        );
    }
    // Sizes that overflow, and that no machine has; a gigabyte that is not there is only cut short.
    for dims in [[u32::MAX; 3], [1 << 20, 1 << 20, 1]] {
        assert!(
            damaged(&idx(&dims, &[0; 30]))
                .iter()
                .all(|error| matches!(error, DataError::TooLarge { .. }))
        );
    }
    for error in damaged(&idx(&[1 << 20, 1 << 10, 1], &[0; 30])) {
        assert!(
            matches!(error, DataError::Truncated { found: 30, .. }),
            "{error}"
        );
    }
    // Five labels stand against these; the last holds five images without pixels.
    for dims in [[6, 5, 1], [4, 1, 1], [0, 2, 3], [5, 0, 3]] {
        let pixels = vec![0; dims.iter().product::<u32>() as usize];
        assert!(
            damaged(&idx(&dims, &pixels))
                .iter()
                .all(|error| matches!(error, DataError::Inconsistent { .. }))
        );
    }
}

#[test]
fn damaged_gzip_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gz");
    let read = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        Idx::read(&path, 1)
    };
    let data: Vec<u8> = (0..100u32).map(|i| (i * i % 251) as u8).collect();
    let whole = gzip(&idx(&[100], &data));
    assert_eq!(
        read(&whole).unwrap(),
        Idx {
            dims: vec![100],
            data
        }
    );
    for length in 0..whole.len() {
        assert!(read(&whole[..length]).is_err(), "{length}");
    }
    // The check sum, and the bytes after it.
    let mut wrong = whole.clone();
    let at = wrong.len() - 8;
    wrong[at] ^= 1;
    assert!(matches!(read(&wrong), Err(DataError::Gzip { .. })));
    assert!(matches!(
        read(&[&whole[..], b"more"].concat()),
        Err(DataError::Gzip { .. })
    ));
    // Far more than declared is not expanded further than the first byte of it.
    let bomb = gzip(&idx(&[10], &vec![0; 20_000_000]));
    assert!(matches!(
        read(&bomb),
        Err(DataError::Trailing { declared: 10, .. })
    ));
}

#[test]
fn labels_above_nine_and_other_sizes_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    small(folder.path());
    fs::write(
        folder.path().join(TRAIN_LABELS),
        idx(&[5], &[0, 1, 10, 3, 4]),
    )
    .unwrap();
    let text = Mnist::load(folder.path()).unwrap_err().to_string();
    assert!(
        text.contains(TRAIN_LABELS) && text.contains("label 2 is 10"),
        "{text}"
    );
    small(folder.path());
    fs::write(folder.path().join(TRAIN_IMAGES), idx(&[5, 3, 2], &[0; 30])).unwrap();
    let text = Mnist::load(folder.path()).unwrap_err().to_string();
    assert!(text.contains("3x2") && text.contains("2x3"), "{text}");
    small(folder.path());
    [TRAIN_IMAGES, "t10k-images.idx3-ubyte"]
        .iter()
        .for_each(|file| fs::write(folder.path().join(file), idx(&[0, 2, 3], &[])).unwrap());
    fs::write(
        folder.path().join("t10k-labels-idx1-ubyte.gz"),
        idx(&[0], &[]),
    )
    .unwrap();
    let text = Mnist::load(folder.path()).unwrap_err().to_string();
    assert!(text.contains("0 images, but 5 labels"), "{text}");
    fs::write(folder.path().join(TRAIN_LABELS), idx(&[0], &[])).unwrap();
    let text = Mnist::load(folder.path()).unwrap_err().to_string();
    assert!(
        text.contains(TRAIN_IMAGES) && text.contains("there are no training images"),
        "{text}"
    );
    small(folder.path());
    fs::write(
        folder.path().join("t10k-images.idx3-ubyte"),
        idx(&[0, 2, 3], &[]),
    )
    .unwrap();
    fs::write(
        folder.path().join("t10k-labels-idx1-ubyte.gz"),
        idx(&[0], &[]),
    )
    .unwrap();
    let text = Mnist::load(folder.path()).unwrap_err().to_string();
    assert!(
        text.contains("t10k-labels") && text.contains("there are no test images"),
        "{text}"
    );
    assert!(Split::new(vec![0; 3], vec![0], [2, 2]).is_err());
    assert!(Split::new(vec![], vec![], [usize::MAX, 2]).is_err());
}

#[test]
fn the_labels_or_a_number_say_how_many_classes_there_are() {
    let split = Split::new(vec![0; 3], vec![61, 0, 255], [1, 1]).unwrap();
    assert_eq!((split.classes(), split.first(1).classes()), (256, 256));
    assert_eq!(Split::new(vec![], vec![], [1, 1]).unwrap().classes(), 0);
    let split = Split::new(vec![0; 2], vec![46, 3], [1, 1]).unwrap();
    assert_eq!(
        (
            split.classes(),
            split.clone().with_classes(62).unwrap().classes()
        ),
        (47, 62)
    );
    let text = split.with_classes(46).unwrap_err().to_string();
    assert!(
        text.contains("label 0 is 46; labels of 46 classes run from 0 to 45"),
        "{text}"
    );
    let folder = tempfile::tempdir().unwrap();
    small(folder.path());
    fs::write(
        folder.path().join(TRAIN_LABELS),
        idx(&[5], &[0, 1, 46, 3, 4]),
    )
    .unwrap();
    let data = Mnist::load_classes(folder.path(), 47).unwrap();
    assert_eq!(
        (
            data.train.classes(),
            data.test.classes(),
            data.train.labels()[2]
        ),
        (47, 47, 46)
    );
    assert!(Mnist::load_classes(folder.path(), 46).is_err());
}

/// The six files of CIFAR-10 with so many images each: pixels count up, label is the number of the
/// image.
fn small_cifar(folder: &Path, images: [u8; 6]) {
    let names = [
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
    ];
    for (file, (name, n)) in names.iter().zip(images).enumerate() {
        let record = |i: u8| {
            [
                vec![i],
                (0..3072)
                    .map(|p| (p % 251) as u8 + file as u8 % 5)
                    .collect(),
            ]
            .concat()
        };
        fs::write(
            folder.join(format!("{name}.bin")),
            (0..n).flat_map(record).collect::<Vec<u8>>(),
        )
        .unwrap();
    }
}

#[test]
fn cifar_is_read_in_the_order_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    small_cifar(folder.path(), [2, 1, 3, 1, 1, 4]);
    let data = Cifar10::load(folder.path()).unwrap();
    assert_eq!((data.train.len(), data.test.len()), (8, 4));
    assert_eq!(
        (data.train.image_shape(), data.train.channels()),
        ([32, 32], 3)
    );
    assert_eq!(
        (data.train.labels(), data.test.labels()),
        (&[0, 1, 0, 0, 1, 2, 0, 0][..], &[0, 1, 2, 3][..])
    );
    let (images, labels) = data.train.batches(3).nth(1).unwrap();
    assert_eq!(
        (images.shape(), labels.as_slice().unwrap()),
        (&[3, 3, 32, 32][..], &[0, 1, 2][..])
    );
    // The third file; red is first, rows go down.
    assert_eq!(
        images[[1, 2, 1, 5]],
        f32::from(((2 * 1024 + 32 + 5) % 251 + 2) as u8) / 255.0
    );
    let first = data.train.first(3);
    assert_eq!(
        (first.len(), first.pixels()),
        (3, &data.train.pixels()[..3 * 3072])
    );
    assert_eq!(data.test.first(9).len(), 4);
    // The archive has them in a folder.
    let inner = folder.path().join("cifar-10-batches-bin");
    fs::create_dir(&inner).unwrap();
    small_cifar(&inner, [1; 6]);
    assert_eq!(Cifar10::load(folder.path()).unwrap().train.len(), 5);
}

#[test]
fn damaged_cifar_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    small_cifar(folder.path(), [1; 6]);
    let path = folder.path().join("data_batch_3.bin");
    let whole = fs::read(&path).unwrap();
    let too_long = vec![0; 30_730_001];
    let mut wrong_label = whole.repeat(2);
    wrong_label[3073] = 10;
    for (bytes, said) in [
        (
            &whole[..3072],
            "its 3072 bytes are not a number of images of 3073 bytes",
        ),
        (&[], "its 0 bytes are not a number of images of 3073 bytes"),
        (
            &too_long,
            "it is longer than the 30730000 bytes of 10000 images",
        ),
        (
            &wrong_label,
            "record 1 has the label 10; labels run from 0 to 9",
        ),
    ] {
        fs::write(&path, bytes).unwrap();
        let text = Cifar10::load(folder.path()).unwrap_err().to_string();
        assert_eq!(
            text,
            format!(
                "{}: {said}; take the six files of CIFAR-10's binary version",
                path.display()
            )
        );
    }
    fs::remove_file(&path).unwrap();
    assert!(
        Cifar10::load(folder.path())
            .unwrap_err()
            .to_string()
            .contains("data_batch_3.bin: there is no such file")
    );
    assert!(
        Cifar10::load(folder.path().join("none"))
            .unwrap_err()
            .to_string()
            .contains("data_batch_1.bin: there is no such file")
    );
}
