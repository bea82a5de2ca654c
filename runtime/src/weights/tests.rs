//! Written files are read back bit by bit; damaged files and those that do not fit are refused.

use std::collections::HashMap;
use std::fs;

use super::*;

/// Quiet and signalling NaNs with payloads, negative zero, a subnormal, infinity.
const BITS: [u32; 6] = [
    0x7fc0_1234,
    0xff80_0001,
    0x8000_0000,
    0x0000_0001,
    0x7f80_0000,
    0x3f80_0000,
];

fn float_bytes() -> Vec<u8> {
    BITS.iter().flat_map(|bits| bits.to_le_bytes()).collect()
}

fn sample(floats: &[u8]) -> Vec<Entry<'_>> {
    vec![
        Entry {
            name: "w",
            dtype: DType::F32,
            shape: vec![2, 3],
            bytes: floats,
        },
        Entry {
            name: "step",
            dtype: DType::I32,
            shape: vec![],
            bytes: &[0xfe, 0xff, 0xff, 0xff],
        },
        Entry {
            name: "pixels",
            dtype: DType::U8,
            shape: vec![3],
            bytes: &[0, 128, 255],
        },
        Entry {
            name: "mask",
            dtype: DType::Bool,
            shape: vec![1, 2],
            bytes: &[0, 1],
        },
        Entry {
            name: "empty",
            dtype: DType::F32,
            shape: vec![0, 4],
            bytes: &[],
        },
    ]
}

fn saved_names() -> [&'static str; 4] {
    ["w", "step", "pixels", "mask"]
}

fn notes() -> BTreeMap<String, String> {
    BTreeMap::from([
        ("epoch".to_owned(), "3".to_owned()),
        ("über \"q\"".to_owned(), "\n\u{1f600}".to_owned()),
    ])
}

fn files_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A file with the given header text and data.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [
        &(header.len() as u64).to_le_bytes(),
        header.as_bytes(),
        data,
    ]
    .concat()
}

#[test]
fn every_bit_survives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let floats = float_bytes();
    let saved = sample(&floats);
    save(&path, &saved, &notes()).unwrap();
    let file = File::open(&path).unwrap();
    assert_eq!(file.tensors().count(), saved.len());
    for entry in &saved {
        assert_eq!(file.get(entry.name).as_ref(), Some(entry));
    }
    assert!(
        file.tensors()
            .map(|e| e.name)
            .eq(["empty", "mask", "pixels", "step", "w"])
    );
    assert_eq!(file.get("nothing"), None);
    assert_eq!(file.metadata(), &notes());
    assert_eq!(files_in(folder.path()), ["a.safetensors"]);
    // A file without tensors is valid too.
    save(&path, &[], &BTreeMap::new()).unwrap();
    let file = File::open(&path).unwrap();
    assert!(file.tensors().next().is_none() && file.metadata().is_empty());
}

#[test]
fn truncated_at_every_length_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let floats = float_bytes();
    save(&path, &sample(&floats), &notes()).unwrap();
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let error = File::open(&path).unwrap_err();
        assert!(
            matches!(error, WeightsError::Malformed { .. }),
            "{length}: {error}"
        );
        assert!(error.to_string().contains(&*path.to_string_lossy()));
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(matches!(
        File::of_bytes(&path, longer),
        Err(WeightsError::Malformed { .. })
    ));
    // Damage to any one bit of a tensor is reported with its name.
    let body = whole.len() - floats.len() - 9;
    for at in body..whole.len() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 8);
        let error = File::of_bytes(&path, bytes).unwrap_err();
        // A bool of 2 is invalid, whichever file it comes from.
        assert!(
            matches!(&error, WeightsError::Damaged { .. }) || error.to_string().contains("bool"),
            "{at}: {error}"
        );
        let named = saved_names()
            .iter()
            .filter(|name| error.to_string().contains(&format!("`{name}`")))
            .count();
        assert_eq!(named, 1, "{error}");
    }
    // Damage to any one byte of the header gives an error or a file that can be read through; never
    // a panic.
    let header = body;
    for at in 0..header {
        for flip in [1, 2, 0x10, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            if let Ok(file) = File::of_bytes(&path, bytes) {
                assert!(file.tensors().map(|e| e.bytes.len()).sum::<usize>() <= whole.len());
            }
        }
    }
}

#[test]
fn bad_headers_are_errors() {
    let parse = |bytes| File::of_bytes(Path::new("x.safetensors"), bytes).unwrap_err();
    let huge_shape =
        r#"{"a":{"dtype":"F32","shape":[18446744073709551615,4],"data_offsets":[0,4]}}"#;
    let huge_offset = r#"{"a":{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}}"#;
    let overlap = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
    let bad_bool = r#"{"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}}"#;
    let no_dtype = r#"{"a":{"dtype":"F7","shape":[4],"data_offsets":[0,4]}}"#;
    for bytes in [
        raw(huge_shape, &[0; 4]),
        raw(huge_offset, &[0; 4]),
        raw(overlap, &[0; 3]),
        raw(bad_bool, &[1, 2]),
        raw(no_dtype, &[0; 4]),
        raw("not json", &[]),
        u64::MAX.to_le_bytes().to_vec(),
        vec![0xff; 64],
    ] {
        let error = parse(bytes);
        assert!(matches!(error, WeightsError::Malformed { .. }), "{error}");
    }
}

#[test]
fn a_name_twice_is_an_error() {
    let a = r#""a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let same = r#""\u0061":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    for (header, name) in [
        (format!("{{{a},{a}}}"), "`a` twice"),
        (format!("{{{a},{same}}}"), "`a` twice"),
        (
            format!(r#"{{"__metadata__":{{}},{a},"__metadata__":{{}}}}"#),
            "`__metadata__`",
        ),
        (
            format!(r#"{{"__metadata__":{{"note":"1","note":"2"}},{a}}}"#),
            "`note` twice",
        ),
    ] {
        let error = File::of_bytes(Path::new("x.safetensors"), raw(&header, &[1])).unwrap_err();
        assert!(
            matches!(&error, WeightsError::Malformed { detail, .. } if detail.contains(name)),
            "{error}"
        );
    }
    assert!(File::of_bytes(Path::new("x.safetensors"), raw(&format!("{{{a}}}  "), &[1])).is_ok());
}

#[test]
fn headers_are_not_echoed() {
    let name = "n".repeat(100_000);
    let headers = [
        format!(r#"{{"a":{{"dtype":"{name}","shape":[1],"data_offsets":[0,1]}}}}"#),
        format!(r#"{{"{name}":{{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}}}}"#),
        format!(
            r#"{{"__metadata__":{{"slabwise.crc32":"{name}"}},"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#
        ),
    ];
    for header in headers {
        let error = File::of_bytes(Path::new("x.safetensors"), raw(&header, &[2]))
            .unwrap_err()
            .to_string();
        assert!(error.len() < 500, "{error}");
    }
}

#[test]
fn checksums_are_of_every_tensor_or_of_none() {
    let file = |note: &str| {
        let header = format!(
            r#"{{"__metadata__":{{"slabwise.crc32":"{note}"}},"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#
        );
        File::of_bytes(Path::new("x.safetensors"), raw(&header, &[7]))
    };
    // CRC-32 of the byte 7.
    let right = format!("{:08x}", crc32fast::hash(&[7]));
    assert!(
        file(&right).unwrap().metadata().is_empty(),
        "it is no note of a user"
    );
    assert!(matches!(
        file("00000000"),
        Err(WeightsError::Damaged { .. })
    ));
    for wrong in [format!("{right} {right}"), "zero".into(), String::new()] {
        assert!(
            matches!(file(&wrong), Err(WeightsError::Malformed { .. })),
            "{wrong}"
        );
    }
    let path = Path::new("never/written");
    let notes = BTreeMap::from([("slabwise.crc32".to_owned(), String::new())]);
    assert!(matches!(
        save(path, &[], &notes),
        Err(WeightsError::InvalidTensor { .. })
    ));
}

/// A file of tensors of one name each, with their types as the format names them.
fn of_types(tensors: &[(&str, Dtype, Vec<u8>)]) -> File {
    let views = tensors.iter().map(|(name, dtype, bytes)| {
        let shape = vec![bytes.len() * 8 / dtype.bitsize()];
        (
            *name,
            safetensors::tensor::TensorView::new(*dtype, shape, bytes).unwrap(),
        )
    });
    let bytes = safetensors::serialize(views, None::<HashMap<String, String>>).unwrap();
    File::of_bytes(Path::new("x.safetensors"), bytes).unwrap()
}

fn expected(name: &str, dtype: DType, shape: &[u64]) -> Expected {
    Expected {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        is_state: false,
    }
}

#[test]
fn floats_are_cast_to_the_nearest() {
    let halves: Vec<u8> = [0x3c01u16, 0x0001, 0xfc00]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let brains: Vec<u8> = [0x3f81u16, 0x0001, 0xff80]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let doubles: Vec<u8> = [1.0 + f64::EPSILON, 0.1, -1e300]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let singles: Vec<u8> = [1.0f32 + f32::EPSILON, 1.0 / 3.0, -1e30]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let file = of_types(&[
        ("h", Dtype::F16, halves),
        ("b", Dtype::BF16, brains),
        ("d", Dtype::F64, doubles),
        ("s", Dtype::F32, singles),
    ]);
    let floats = |name: &str| -> Vec<f32> {
        file.elements(name, DType::F32)
            .unwrap()
            .as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect()
    };
    assert_eq!(
        floats("h"),
        [1.0 + 2f32.powi(-10), 2f32.powi(-24), f32::NEG_INFINITY]
    );
    assert_eq!(
        floats("b"),
        [
            1.0 + 2f32.powi(-7),
            f32::from_bits(0x0001_0000),
            f32::NEG_INFINITY
        ]
    );
    assert_eq!(
        floats("d"),
        [1.0, 0.1, f32::NEG_INFINITY],
        "a value too large for the type is infinite"
    );
    let narrow = file.elements("s", DType::F16).unwrap();
    assert_eq!(
        narrow
            .as_chunks()
            .0
            .iter()
            .map(|b| u16::from_le_bytes(*b))
            .collect::<Vec<_>>(),
        [0x3c00, 0x3555, 0xfc00]
    );
    assert!(file.elements("d", DType::BF16).is_none() && file.elements("s", DType::I32).is_none());
    let model = [
        ("h", DType::F32),
        ("b", DType::F16),
        ("d", DType::F32),
        ("s", DType::F32),
    ]
    .map(|(name, dtype)| expected(name, dtype, &[3]));
    let (_, loaded) = fit(&model, &file, &LoadOptions::default(), |_| false).unwrap();
    assert_eq!((loaded.count, loaded.cast.join(" ")), (4, "h b d".into()));
    let refused = fit(
        &[expected("d", DType::F16, &[3])],
        &file,
        &LoadOptions::default().ignore_extra(),
        |_| false,
    )
    .unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("wrong dtype: `d` is f16 in the model, F64 in the file"),
        "{refused}"
    );
}

#[test]
fn types_that_no_model_has_are_passed_over_unless_asked_for() {
    let file = of_types(&[
        ("w", Dtype::U8, vec![1, 2]),
        ("count", Dtype::I64, vec![0; 8]),
        ("mask", Dtype::U32, vec![0; 8]),
    ]);
    assert!(file.tensors().map(|e| e.name).eq(["w"]) && file.get("count").is_none());
    assert!(
        file.names()
            .map(|(name, ..)| name)
            .eq(["count", "mask", "w"])
    );
    let (found, loaded) = fit(
        &[expected("w", DType::U8, &[2])],
        &file,
        &LoadOptions::default(),
        |_| false,
    )
    .unwrap();
    assert_eq!(
        (found, loaded.extra.join(" ")),
        (vec![Some("w")], "count mask".into())
    );
    let model = [
        expected("w", DType::U8, &[2]),
        expected("count", DType::I32, &[1]),
    ];
    let error = fit(&model, &file, &LoadOptions::default(), |_| false)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("wrong dtype: `count` is i32 in the model, I64 in the file"),
        "{error}"
    );
}

#[test]
fn a_part_is_loaded_under_other_names() {
    let file = of_types(&[
        ("module.a", Dtype::U8, vec![1]),
        ("module.b", Dtype::U8, vec![2]),
        ("module.head", Dtype::U8, vec![3, 4]),
    ]);
    let model = || {
        [
            expected("a", DType::U8, &[1]),
            expected("b", DType::U8, &[1]),
            expected("head", DType::U8, &[5]),
        ]
    };
    let strict = fit(&model(), &file, &LoadOptions::default(), |_| false)
        .unwrap_err()
        .to_string();
    assert!(strict.contains(r#"prefix("module.", "")"#), "{strict}");
    let renamed = LoadOptions::default().prefix("module.", "");
    let wrong = fit(&model(), &file, &renamed, |_| false)
        .unwrap_err()
        .to_string();
    assert!(
        wrong.contains("wrong shape: `head` is [5] in the model, [2] in the file"),
        "{wrong}"
    );
    // A new head.
    let body = renamed.rename(|name| (name != "head").then(|| name.into()));
    let missing = fit(&model(), &file, &body, |_| false)
        .unwrap_err()
        .to_string();
    assert!(
        missing.contains("missing: `head` (u8 [5])") && missing.lines().count() == 3,
        "{missing}"
    );
    let (found, loaded) = fit(&model(), &file, &body.allow_missing(), |_| false).unwrap();
    assert_eq!(found, [Some("module.a"), Some("module.b"), None]);
    assert_eq!(
        (loaded.count, loaded.missing, loaded.extra),
        (2, vec!["head".to_string()], Vec::new())
    );
    // Only some of the file's tensors.
    let few = [expected("x.module.a", DType::U8, &[1])];
    let (_, loaded) = fit(
        &few,
        &file,
        &LoadOptions::default().prefix("", "x.").ignore_extra(),
        |_| false,
    )
    .unwrap();
    assert_eq!((loaded.count, loaded.extra.len()), (1, 2));
    let alike = fit(
        &few,
        &file,
        &LoadOptions::default().rename(|_| Some("x.module.a".into())),
        |_| false,
    )
    .unwrap_err()
    .to_string();
    assert!(
        alike.contains("`module.a` and `module.b` both become `x.module.a`"),
        "{alike}"
    );
}

#[test]
fn very_many_differences_are_cut() {
    let file = of_types(&[]);
    let model: Vec<Expected> = (0..1000)
        .map(|i| expected(&format!("layer{i}"), DType::F32, &[]))
        .collect();
    let text = fit(&model, &file, &LoadOptions::default(), |_| false)
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("missing: `layer63`")
            && !text.contains("layer64")
            && text.contains("and 936 more"),
        "{text}"
    );
}

#[test]
fn unreadable_paths_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    for path in [
        folder.path().to_owned(),
        folder.path().join("none.safetensors"),
    ] {
        let error = File::open(&path).unwrap_err();
        assert!(matches!(error, WeightsError::Read { .. }));
        assert!(
            error.to_string().contains(&*path.to_string_lossy()),
            "{error}"
        );
    }
}

#[test]
fn a_failed_save_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let floats = float_bytes();
    save(&path, &sample(&floats), &notes()).unwrap();
    let before = fs::read(&path).unwrap();
    let entry = |name, dtype, shape, bytes| Entry {
        name,
        dtype,
        shape,
        bytes,
    };
    for bad in [
        vec![entry("a", DType::F32, vec![2], &[0; 4][..])],
        vec![entry("a", DType::U8, vec![u64::MAX, 2], &[0; 4][..])],
        vec![entry("a", DType::Bool, vec![1], &[2][..])],
        vec![
            entry("a", DType::U8, vec![1], &[2][..]),
            entry("a", DType::U8, vec![1], &[2][..]),
        ],
        vec![entry(METADATA_KEY, DType::U8, vec![1], &[2][..])],
    ] {
        assert!(matches!(
            save(&path, &bad, &notes()),
            Err(WeightsError::InvalidTensor { .. })
        ));
    }
    // The rename is refused only after the temporary file was written, which must be removed.
    fs::create_dir(folder.path().join("folder")).unwrap();
    for at in [
        "folder",
        "none/a.safetensors",
        "a.safetensors/b.safetensors",
    ] {
        let at = folder.path().join(at);
        let error = save(&at, &sample(&floats), &notes()).unwrap_err();
        assert!(matches!(error, WeightsError::Write { .. }));
        assert!(
            error.to_string().contains(&*at.to_string_lossy()),
            "{error}"
        );
    }
    assert!(matches!(
        save(Path::new("/"), &[], &notes()),
        Err(WeightsError::Write { .. })
    ));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(files_in(folder.path()), ["a.safetensors", "folder"]);
}

#[test]
fn readers_see_whole_files_while_others_save() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let save_all = |byte: u8| {
        let bytes = vec![byte; 50_000];
        let entry = Entry {
            name: "a",
            dtype: DType::U8,
            shape: vec![50_000],
            bytes: &bytes,
        };
        for _ in 0..8 {
            save(&path, std::slice::from_ref(&entry), &BTreeMap::new()).unwrap();
        }
    };
    save_all(0);
    std::thread::scope(|scope| {
        let writers = [scope.spawn(|| save_all(1)), scope.spawn(|| save_all(2))];
        while !writers.iter().all(|writer| writer.is_finished()) {
            let file = File::open(&path).unwrap();
            let bytes = file.get("a").unwrap().bytes;
            assert!(bytes.iter().all(|&byte| byte == bytes[0]));
        }
    });
    assert_eq!(files_in(folder.path()), ["a.safetensors"]);
}

#[cfg(unix)]
#[test]
fn a_link_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let (path, link) = (
        folder.path().join("a.safetensors"),
        folder.path().join("latest"),
    );
    save(&path, &[], &BTreeMap::new()).unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    save(&link, &[], &notes()).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(File::open(&path).unwrap().metadata(), &notes());
}

#[test]
fn every_mismatch_is_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let floats = float_bytes();
    let saved = sample(&floats);
    save(&path, &saved, &notes()).unwrap();
    let file = File::open(&path).unwrap();
    let mut expected: Vec<_> = saved
        .iter()
        .map(|e| expected(e.name, e.dtype, &e.shape))
        .collect();
    fit(&expected, &file, &LoadOptions::default(), |_| false).unwrap();
    expected[0].shape = vec![3, 2];
    expected[1].dtype = DType::F32;
    expected[2].name = "bias".to_owned();
    let text = fit(&expected, &file, &LoadOptions::default(), |_| false)
        .unwrap_err()
        .to_string();
    for line in [
        "\n  wrong shape: `w` is [3, 2] in the model, [2, 3] in the file\n",
        "\n  wrong dtype: `step` is f32 in the model, i32 in the file\n",
        "\n  missing: `bias` (u8 [3])\n",
        "\n  unexpected: `pixels` (u8 [3])\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(text.lines().count(), 6, "{text}");
}
