//! Files that NumPy wrote (`tests/data/npy/record.py`), and hostile ones.

use std::fs;
use std::path::PathBuf;

use ndarray::array;

use super::*;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/npy")
        .join(name)
}

fn error(bytes: &[u8]) -> String {
    of_bytes(bytes).unwrap_err().to_string()
}

/// A file with this header and these bytes of elements.
fn with_header(text: &str, elements: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes.extend(elements);
    bytes
}

#[test]
fn files_of_numpy_are_read() {
    let signed = array![[-2, -1, 0], [1, 2, 3]];
    let unsigned = array![[0, 1, 2], [3, 4, 5]];
    let floats = signed.mapv(|n| n as f32);
    for (name, expected) in [
        ("f4", HostArray::from(floats.clone())),
        ("f8", HostArray::from(floats.clone())),
        ("big_f4", HostArray::from(floats.clone())),
        ("long", HostArray::from(floats.clone())),
        ("f2", HostArray::from(floats.mapv(f16::from_f32))),
        ("bf16", HostArray::from(floats.mapv(bf16::from_f32))),
        ("i1", HostArray::from(signed.clone())),
        ("i2", HostArray::from(signed.clone())),
        ("i4", HostArray::from(signed.clone())),
        ("i8", HostArray::from(signed.clone())),
        ("big_i8", HostArray::from(signed.clone())),
        ("columns_i2", HostArray::from(signed.clone())),
        ("u1", HostArray::from(unsigned.mapv(|n: i32| n as u8))),
        ("u2", HostArray::from(unsigned.clone())),
        ("u4", HostArray::from(unsigned.clone())),
        ("u8", HostArray::from(unsigned.clone())),
        ("b1", HostArray::from(signed.mapv(|n| n != 0))),
        ("scalar", HostArray::from(ndarray::arr0(7f32))),
        (
            "empty",
            HostArray::from(ndarray::Array3::<f32>::zeros((3, 0, 2))),
        ),
    ] {
        assert_eq!(
            read(path(&format!("{name}.npy"))).unwrap(),
            expected,
            "{name}"
        );
    }
}

#[test]
fn elements_that_no_type_holds_are_refused_by_name() {
    for (name, expected) in [
        ("text", "texts (\"<U1\")"),
        ("objects", "whose pickle could run code"),
        ("records", "records; save each field"),
        ("complex", "complex numbers (\"<c8\")"),
        ("dates", "dates or durations"),
        (
            "wide_i8",
            "element [1, 0] is 2147483648, beyond the range of i32",
        ),
        (
            "wide_f8",
            "element [0, 1] is -1e300, beyond the range of f32",
        ),
    ] {
        let error = read(path(&format!("{name}.npy"))).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(name), "{error}");
    }
}

/// Numbers of 64 bits are narrowed up to the ends of the ranges of f32 and i32; beyond them, the file,
/// the position and the value are named, in archives the array too.
#[test]
fn numbers_of_64_bits_are_narrowed_or_refused() {
    let file = |descr: &str, elements: &[[u8; 8]]| {
        let n = elements.len();
        let header =
            format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({n}, 1), }}\n");
        with_header(&header, elements.as_flattened())
    };
    let floats = |values: &[f64]| {
        let bytes: Vec<[u8; 8]> = values.iter().map(|x| x.to_le_bytes()).collect();
        file("<f8", &bytes)
    };
    // Half a step above the largest f32, where rounding to the nearest leaves its range.
    let limit = f64::from(f32::MAX) + 2f64.powi(103);
    let below = f64::from_bits(limit.to_bits() - 1);
    let kept = [below, -below, 0.1, 1e-300, f64::INFINITY, f64::NEG_INFINITY];
    let HostArray::F32(read) = of_bytes(&floats(&kept)).unwrap() else {
        panic!("floats");
    };
    let expected = [
        f32::MAX,
        -f32::MAX,
        0.1,
        0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
    ];
    assert_eq!(read.as_slice(), Some(&expected[..]));
    let HostArray::F32(nan) = of_bytes(&floats(&[f64::NAN])).unwrap() else {
        panic!("floats");
    };
    assert!(nan[[0, 0]].is_nan());
    for value in [limit, -limit, f64::MAX] {
        let error = error(&floats(&[1.0, value]));
        let expected = format!("the data: element [1, 0] is {value:e}, beyond the range of f32");
        assert!(error.contains(&expected), "{error}");
    }

    let (least, most) = (i64::from(i32::MIN), i64::from(i32::MAX));
    let integers = |values: &[i64]| {
        let bytes: Vec<[u8; 8]> = values.iter().map(|x| x.to_le_bytes()).collect();
        file("<i8", &bytes)
    };
    let expected = HostArray::from(array![[i32::MIN], [i32::MAX]]);
    assert_eq!(of_bytes(&integers(&[least, most])).unwrap(), expected);
    for value in [least - 1, most + 1, i64::MIN, i64::MAX] {
        let error = error(&integers(&[0, 0, value]));
        let expected = format!("the data: element [2, 0] is {value}, beyond the range of i32");
        assert!(error.contains(&expected), "{error}");
    }
    let error = error(&file("<u8", &[u64::MAX.to_le_bytes()]));
    assert!(error.contains("[0, 0] is 18446744073709551615"), "{error}");

    let mut archive = ZipArchiveWriter::new(Vec::new());
    let (mut entry, config) = archive.new_file("wide.npy").start().unwrap();
    let mut writer = config.wrap(&mut entry);
    writer.write_all(&floats(&[limit])).unwrap();
    let (_, output) = writer.finish().unwrap();
    entry.finish(output).unwrap();
    let error = of_npz_bytes(&archive.finish().unwrap())
        .unwrap_err()
        .to_string();
    let expected = "the data: array \"wide\": element [0, 0] is ";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn written_files_are_those_of_numpy() {
    for name in ["f4", "f2", "i4", "u1", "b1", "scalar", "empty"] {
        let path = path(&format!("{name}.npy"));
        let written = to_bytes(&read(&path).unwrap());
        assert_eq!(written, fs::read(&path).unwrap(), "{name}");
    }
    // NumPy has no bf16: its values are written as f32, which has them all.
    let widened = of_bytes(&to_bytes(&read(path("bf16.npy")).unwrap())).unwrap();
    assert_eq!(widened, read(path("f4.npy")).unwrap());
    // An array that lies otherwise in memory is the same file.
    let transposed = array![[1f32, 2.0], [3.0, 4.0]].reversed_axes();
    assert_eq!(
        of_bytes(&to_bytes(&HostArray::from(transposed.clone()))).unwrap(),
        HostArray::from(transposed)
    );
}

#[test]
fn archives_are_read_and_written() {
    for name in ["stored.npz", "packed.npz"] {
        let arrays = read_npz(path(name)).unwrap();
        assert_eq!(
            of_npz_bytes(&fs::read(path(name)).unwrap()).unwrap(),
            arrays
        );
        for (got, kind) in arrays.iter().zip(["f4", "i8", "b1"]) {
            let single = read(path(&format!("{kind}.npy"))).unwrap();
            assert_eq!((got.0.as_str(), &got.1), (kind, &single), "{name}");
        }
        assert_eq!(arrays.len(), 3);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.npz");
    let (x, y) = (array![1f32, 2.0].into(), ndarray::arr0(3).into());
    write_npz(&file, [("layer/x", &x), ("../y", &y)]).unwrap();
    assert_eq!(
        read_npz(&file).unwrap(),
        [("layer/x".to_owned(), x.clone()), ("../y".to_owned(), y)]
    );
    let twice = write_npz(&file, [("x", &x), ("x", &x)]).unwrap_err();
    assert!(twice.to_string().contains("\"x\": each name is used once"));
    let nowhere = write(folder.path().join("no/such/a.npy"), &x).unwrap_err();
    assert!(nowhere.to_string().contains("cannot write"), "{nowhere}");
}

#[test]
fn damaged_files_are_refused_with_their_defect() {
    let whole = fs::read(path("f4.npy")).unwrap();
    // Every prefix is an error.
    for end in 0..whole.len() {
        let error = error(&whole[..end]);
        let expected = if end < 128 {
            "no .npy file"
        } else {
            "is cut short"
        };
        assert!(error.contains(expected), "{end}: {error}");
    }
    let longer = [&whole[..], &[0]].concat();
    assert!(error(&longer).contains("bytes follow the array"));
    assert!(error(b"PK\x03\x04 an archive").contains("first bytes"));
    assert!(error(b"\x93NUMPY\x09\x00").contains("version is 9"));
    assert!(error(b"\x93NUMPY\x02\x00\xff\xff\xff\xff").contains("4294967295 bytes"));
    for (header, expected) in [
        ("", "\"{\" is missing"),
        (
            "{'descr': '<f4', 'fortran_order': False}",
            "lacks \"shape\"",
        ),
        ("{'descr': '<f4', 'shape': (1,)}", "lacks \"fortran_order\""),
        ("{'fortran_order': False, 'shape': (1,)}", "lacks \"descr\""),
        ("{'descr': '<f4', 'shape': (-1,)}", "no tuple of lengths"),
        ("{'descr': '<f4', 'shape': (1.5,)}", "is missing"),
        ("{'descr': '<f4', 'shape': (1 2)}", "is missing"),
        (
            "{'descr': '<f4', 'shape': (99999999999999999999,)}",
            "no tuple of lengths",
        ),
        (
            "{'descr': '<f4', 'fortran_order': 0}",
            "neither True nor False",
        ),
        ("{'descr': '<f4', 'more': 0}", "\"more\" has no meaning"),
        ("{'descr': 'é4'}", "not of a type that is read"),
        ("{'descr': ''}", "not of a type that is read"),
        ("{'descr", "text in quotes"),
    ] {
        let error = error(&with_header(header, &[]));
        assert!(error.contains(expected), "{header}: {error}");
    }
    let shaped = |shape: &str, elements: &[u8]| {
        let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
        with_header(&header, elements)
    };
    assert!(error(&shaped("(1000000000000,)", &[0; 8])).contains("8 of 4000000000000 bytes"));
    for absurd in [
        "(4294967296, 4294967296)",
        "(18446744073709551615,)",
        "(0, 18446744073709551615, 2)",
    ] {
        assert!(
            error(&shaped(absurd, &[])).contains("than memory can address"),
            "{absurd}"
        );
    }
    assert!(error(&shaped(&format!("({})", "1, ".repeat(65)), &[0; 4])).contains("64 axes"));
    assert_eq!(of_bytes(&shaped("(2L, 0L)", &[])).unwrap().shape(), [2, 0]);
    assert_eq!(
        of_bytes(&shaped("(1, 1,)", &[0; 4])).unwrap().shape(),
        [1, 1]
    );
}

#[test]
fn damaged_archives_are_refused() {
    for name in ["stored.npz", "packed.npz"] {
        let whole = fs::read(path(name)).unwrap();
        for end in [0, 1, 40, whole.len() / 2, whole.len() - 1] {
            let error = of_npz_bytes(&whole[..end]).unwrap_err().to_string();
            assert!(error.contains("no complete .npz file"), "{end}: {error}");
        }
        // Every byte in turn: an error, or (in names, dates and unused fields) other names.
        let original = of_npz_bytes(&whole).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x55;
            if let Ok(arrays) = of_npz_bytes(&bytes) {
                let same = arrays.iter().zip(&original).all(|(a, b)| a.1 == b.1);
                assert!(same, "byte {at} of {name} changes values unnoticed");
            }
        }
    }
}
