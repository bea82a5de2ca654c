//! The example `onnx_classify`: images are prepared for models of any layout, and the likeliest
//! classes are told.

#[path = "../../../../runtime/onnx/examples/onnx_classify/classifier.rs"]
mod classifier;

use std::path::Path;

use classifier::{Classifier, Preparation};
use ndarray::Axis;
use slabwise::data::{Image, Mnist, read_image};
use slabwise_onnx::check::read_array;

use crate::{cases, made};

fn usual() -> Preparation {
    Preparation {
        size: 224,
        resize: None,
        mean: vec![0.485, 0.456, 0.406],
        deviation: vec![0.229, 0.224, 0.225],
    }
}

/// An image of one color.
fn plain(color: [f32; 3], height: usize, width: usize) -> Image {
    Image::from_shape_fn((3, height, width), |(channel, _, _)| color[channel])
}

#[test]
fn images_are_told_by_their_color() {
    let Some(root) = made("own.py", "onnx-own", "onnx 1.23.2 and numpy") else {
        return;
    };
    let open = |name: &str, preparation: Preparation| {
        let path = root.join(format!("classifiers/{name}.onnx"));
        Classifier::open(&path, preparation)
    };
    for name in ["logits", "probabilities", "open"] {
        let mut classifier = open(name, usual()).expect("a classifier");
        let color = [0.1f32, 0.9, 0.3];
        let top = classifier
            .top(&plain(color, 31, 57), 2)
            .expect("it classifies");
        let scores: Vec<f32> = (0..3)
            .map(|at| (color[at] - usual().mean[at]) / usual().deviation[at])
            .map(f32::exp)
            .collect();
        let sum: f32 = scores.iter().sum();
        assert_eq!([top[0].0, top[1].0], [1, 2], "{name}");
        for (class, probability) in top {
            let expected = scores[class] / sum;
            assert!((probability - expected).abs() < 1e-5, "{name}: {class}");
        }
    }
    for (name, part) in [
        ("many", "takes 4 images at once"),
        ("deep", "neither 1 nor 3 channels"),
        ("flat", "four axes"),
    ] {
        let error = open(name, usual()).err().expect("no classifier");
        assert!(error.to_string().contains(part), "{name}: {error}");
    }
    let preparation = |change: fn(&mut Preparation)| {
        let mut preparation = usual();
        change(&mut preparation);
        preparation
    };
    for (preparation, option) in [
        (preparation(|p| p.mean = vec![0.5, 0.5]), "--mean"),
        (preparation(|p| p.mean[0] = f32::NAN), "--mean"),
        (preparation(|p| p.deviation[1] = 0.0), "--deviation"),
        (preparation(|p| p.size = 0), "--size"),
    ] {
        let error = open("logits", preparation).err().expect("no classifier");
        assert!(error.to_string().contains(option), "{error}");
    }
    let mut classifier = open("logits", usual()).expect("a classifier");
    for (image, part) in [
        (plain([0.0; 3], 1, 4000), "too long a strip"),
        (plain([0.0; 3], 0, 5), "0 × 5 pixels"),
        (Image::zeros((1, 9, 9)), "1 channels, not 3"),
    ] {
        let error = classifier.top(&image, 1).expect_err("no such image");
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// PyTorch tells 490 of these 500 (`data/record.py`).
#[test]
fn digits_are_told_as_in_pytorch() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let preparation = Preparation {
        size: 28,
        resize: Some(28),
        mean: vec![0.1307],
        deviation: vec![0.3081],
    };
    let mut classifier =
        Classifier::open(&data.join("digits.onnx"), preparation).expect("a classifier");
    assert!(classifier.is_grey());
    let digits = Mnist::load(Mnist::default_dir()).expect("the digits").test;
    let (images, labels) = digits.batches(500).next().expect("500 images");
    let told = images
        .axis_iter(Axis(0))
        .zip(&labels)
        .filter(|(image, label)| {
            let top = classifier.top(&image.to_owned(), 1).expect("it classifies");
            i32::try_from(top[0].0) == Ok(**label)
        });
    assert_eq!(told.count(), 490);
    let seven = read_image(data.join("seven.png"), true).expect("an image");
    let top = classifier.top(&seven, 5).expect("it classifies");
    assert!(top[0].0 == 7 && top[0].1 > 0.99, "{top:?}");
}

/// A network of ImageNet's size, on a photo. Its weights are all equal, and therefore its results.
#[test]
fn a_photo_is_classified_by_a_light_network() {
    let Some(root) = cases() else { return };
    let folder = root.join("light/light_squeezenet");
    let mut classifier =
        Classifier::open(&folder.join("model.onnx"), usual()).expect("a classifier");
    assert!(!classifier.is_grey() && classifier.plan().slab_bytes() > 0);
    let photo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/images/photo.jpg");
    let image = read_image(photo, false).expect("a photo");
    let top = classifier.top(&image, 5).expect("it classifies");
    assert_eq!(top.len(), 5);
    let classes = read_array(&folder.join("test_data_set_0/output_0.pb")).expect("an array");
    for (_, probability) in top {
        assert!((probability - 1.0 / classes.len() as f32).abs() < 1e-6);
    }
}
