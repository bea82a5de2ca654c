//! Images that Pillow wrote (`tests/data/images/record.py`), and damaged ones.

use super::*;
use crate::data::{HostArray, npy};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/images")
        .join(name)
}

fn value(c: usize, y: usize, x: usize) -> f32 {
    ((y * 40 + x * 10 + c * 7) % 256) as f32 / 255.0
}

#[test]
fn files_of_pillow_are_read() {
    for (name, coloured) in [
        ("rgb", true),
        ("rgba", true),
        ("grey", false),
        ("deep", false),
        ("palette", false),
    ] {
        let image = read_image(path(&format!("{name}.png")), false).unwrap();
        let at = |c: usize| if coloured { c } else { 0 };
        let expected = Array3::from_shape_fn((3, 5, 7), |(c, y, x)| value(at(c), y, x));
        let near = image
            .iter()
            .zip(&expected)
            .all(|(a, b)| (a - b).abs() < 1.5 / 255.0 * f32::from(name == "palette") + 1e-6);
        assert!(
            image.dim() == (3, 5, 7) && near,
            "{name}: {image} {expected}"
        );
        let grey = read_image(path(&format!("{name}.png")), true).unwrap();
        assert_eq!(grey.dim(), (1, 5, 7));
        let luminance = [0.299, 0.587, 0.114]
            .iter()
            .enumerate()
            .map(|(c, w)| w * image[[c, 2, 3]])
            .sum::<f32>();
        assert!((grey[[0, 2, 3]] - luminance).abs() < 1e-5, "{name}");
    }
    let image = read_image(path("photo.jpg"), false).unwrap();
    let HostArray::U8(pixels) = npy::read(path("photo.npy")).unwrap() else {
        panic!("bytes")
    };
    assert_eq!(image.dim(), (3, 24, 16));
    // Decoders of JPEG round differently.
    for ((c, y, x), value) in image.indexed_iter() {
        assert!((value * 255.0 - f32::from(pixels[[y, x, c]])).abs() <= 3.0);
    }
}

#[test]
fn a_folder_has_a_class_for_each_folder() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let put = |to: &str, from: &str| {
        let to = root.join(to);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(path(from), to).unwrap();
    };
    assert!(
        ImageFolder::open(root)
            .unwrap_err()
            .to_string()
            .contains("it has no folders")
    );
    put("dog/b.PNG", "rgb.png");
    put("dog/more/a.jpeg", "photo.jpg");
    put("cat/1.png", "grey.png");
    put("cat/notes.txt", "photo.npy");
    put(".cache/1.png", "grey.png");
    let folder = ImageFolder::open(root).unwrap();
    assert_eq!(folder.classes(), ["cat", "dog"]);
    let files: Vec<String> = folder
        .files()
        .iter()
        .map(|(p, c)| format!("{} {c}", p.file_name().unwrap().display()))
        .collect();
    assert_eq!(files, ["1.png 0", "b.PNG 1", "a.jpeg 1"]);
    assert_eq!(folder.item(2, 0).unwrap().0.dim(), (3, 24, 16));
    let loader = folder
        .grey()
        .map(|(image, class)| (crate::data::augment::resize(&image, [4, 4]), class))
        .batch(3)
        .workers(2);
    let (images, classes) = loader.epoch(0).next().unwrap().unwrap();
    assert_eq!(
        (images.dim(), classes.to_vec()),
        ((3, 1, 4, 4), vec![0, 1, 1])
    );
    fs::create_dir(root.join("empty")).unwrap();
    assert!(
        ImageFolder::open(root)
            .unwrap_err()
            .to_string()
            .contains("no .png, .jpg or .jpeg")
    );
}

#[test]
fn damaged_images_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["rgb.png", "photo.jpg"] {
        let whole = fs::read(path(name)).unwrap();
        let file = folder.path().join(name);
        for end in [0, 1, 3, 12, whole.len() / 2, whole.len() - 8] {
            fs::write(&file, &whole[..end]).unwrap();
            match read_image(&file, false) {
                Err(error) => {
                    let error = error.to_string();
                    let known = ["neither PNG nor JPEG", "damaged or cut short"];
                    assert!(
                        error.contains(name) && known.iter().any(|k| error.contains(k)),
                        "{end}: {error}"
                    );
                }
                // The last bytes of a file are its checksum and end mark.
                Ok(image) => assert!(end >= whole.len() - 8 && image.dim().1 > 0, "{name} {end}"),
            }
        }
        // Damaged bytes are an error or another image, never a panic.
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x5A;
            let _ = decode(&bytes, false);
        }
    }
    // A header of 2³¹ − 1 by 2³¹ − 1 pixels.
    let mut huge = fs::read(path("rgb.png")).unwrap();
    for at in [16, 20] {
        huge[at..at + 4].copy_from_slice(&0x7FFF_FFFFu32.to_be_bytes());
    }
    let mut crc = crc32fast::Hasher::new();
    crc.update(&huge[12..29]);
    huge[29..33].copy_from_slice(&crc.finalize().to_be_bytes());
    let error = decode(&huge, false).unwrap_err();
    assert!(
        error.contains("more than the 67108864 read at most") || error.contains("damaged"),
        "{error}"
    );
}
