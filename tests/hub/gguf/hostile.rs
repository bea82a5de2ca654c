//! Damaged and hostile GGUF files: each is refused with its defect.

use super::*;

#[track_caller]
fn refused(bytes: &[u8], says: &str) {
    let at = tempfile::tempdir().expect("a folder");
    // The name's ending does not matter.
    let path = at.path().join("a.bin");
    std::fs::write(&path, bytes).expect("it is written");
    let error = Weights::open(&path).expect_err("it is hostile").to_string();
    assert!(error.contains(says), "{error}\n  does not say\n{says}");
    assert!(error.contains("a.bin") && error.len() < 2000, "{error}");
}

#[test]
fn hostile_headers_are_refused() {
    let (many, one) = (u64::MAX.to_le_bytes(), 1u64.to_le_bytes());
    let is_whole = "is not a complete GGUF file";
    refused(b"GGUF", is_whole);
    let mut big = file(3, &[], &[], &[]);
    big[4..8].reverse();
    refused(&big, "it is a big-endian GGUF file");
    refused(&file(1, &[], &[], &[]), "it is of version 1 of GGUF");
    refused(&file(4, &[], &[], &[]), "it is of version 4 of GGUF");
    for at in [8, 16] {
        let mut bytes = file(3, &[], &[], &[0; 64]);
        bytes[at..at + 8].copy_from_slice(&many);
        refused(&bytes, "would be 18446744073709551615");
    }
    let nested = |depth: usize| {
        // An array of one array of one array …
        let mut value = [&9u32.to_le_bytes()[..], &one].concat().repeat(depth);
        value.extend([&0u32.to_le_bytes()[..], &one, &[7]].concat());
        value
    };
    let string = |length: [u8; 8]| [&length[..], b"text"].concat();
    let array = |kind: u32, length: [u8; 8]| [&kind.to_le_bytes()[..], &length].concat();
    for (kind, value, says) in [
        (
            8,
            string(many),
            "`k` of metadata takes 18446744073709551615 bytes",
        ),
        (7, vec![2], "`k` of metadata is the bool 2"),
        (13, vec![0; 8], "`k` of metadata has the unknown type 13"),
        (
            9,
            array(4, many),
            "`k` of metadata would be 18446744073709551615",
        ),
        (
            9,
            array(4, (1u64 << 62).to_le_bytes()),
            "would be 4611686018427387904",
        ),
        (9, array(8, many), "would be 18446744073709551615"),
        (9, array(9, many), "would be 18446744073709551615"),
        (9, array(77, one), "has the unknown type 77"),
        (9, nested(8), "more than 8 deep"),
        (9, nested(10_000), "more than 8 deep"),
    ] {
        refused(&file(3, &[("k", kind, &value)], &[], &[]), says);
    }
    let seven = file(3, &[("k", 9, &nested(7))], &[], &[]);
    let at = tempfile::tempdir().expect("a folder");
    std::fs::write(at.path().join("a.gguf"), seven).expect("it is written");
    let weights = Weights::open(at.path()).expect("the only file of a folder");
    assert_eq!(weights.metadata()["k"], "[array; 1]");
    refused(
        &file(3, &[("k", 0, &[1]), ("k", 0, &[2])], &[], &[]),
        "the entry `k` of metadata twice",
    );
    for (kind, value) in [
        (4, &[0u8, 0, 0, 0][..]),
        (4, &[3, 0, 0, 0]),
        (0, &[8]),
        (8, &one),
    ] {
        let value = if kind == 8 {
            [value, b"8"].concat()
        } else {
            value.to_vec()
        };
        refused(
            &file(3, &[("general.alignment", kind, &value)], &[], &[]),
            "not a power of two",
        );
    }
    let most = 1 << 62;
    let cases: &[(&[Described<'_>], &str)] = &[
        (&[("w", &[4, 1, 1, 1, 1], 0, 0)], "tensor `w` has 5 axes"),
        (&[("w", &[4], 0, 0), ("w", &[4], 0, 32)], "tensor `w` twice"),
        (&[("w", &[4], 31, 0)], "tensor `w` has the unknown type 31"),
        (
            &[("w", &[33, 2], 2, 0)],
            "tensor `w` of the shape [2, 33] has rows of 33 elements",
        ),
        (&[("w", &[128], 12, 0)], "blocks of Q4_K, 256 elements each"),
        (
            &[("w", &[most, 4], 0, 0)],
            "more elements than can be counted",
        ),
        (&[("w", &[most], 0, 0)], "more elements than can be counted"),
        (
            &[("w", &[0, most, most], 0, 0)],
            "more elements than can be counted",
        ),
        (
            &[("w", &[4], 0, 8)],
            "the offset 8, which is not a multiple of the alignment 32",
        ),
        (
            &[("w", &[4], 0, 128)],
            "tensor `w` takes 16 bytes from the offset 128 on, but only 128",
        ),
        (&[("w", &[33], 0, 0)], "tensor `w` takes 132 bytes"),
        (
            &[("w", &[4], 0, u64::MAX - 31)],
            "tensor `w` takes 16 bytes",
        ),
        (
            &[("v", &[9], 0, 0), ("w", &[4], 0, 32)],
            "tensors `v` and `w` overlap",
        ),
        (
            &[("v", &[4], 0, 32), ("w", &[4], 0, 32)],
            "tensors `v` and `w` overlap",
        ),
    ];
    for (tensors, says) in cases {
        refused(&file(3, &[], tensors, &[0; 128]), says);
        refused(&file(2, &[], tensors, &[0; 128]), is_whole);
    }
    let mut name = file(3, &[], &[("w", &[4], 0, 0)], &[0; 16]);
    name[32] = 0xff;
    refused(&name, "the name of tensor 0 is not UTF-8");
}

/// Sparse files take no space, but their headers could claim it.
#[test]
fn a_large_header_of_nothing_is_refused() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.gguf");
    let value = [&(1u64 << 32).to_le_bytes()[..], b"text"].concat();
    std::fs::write(&path, file(3, &[("k", 8, &value)], &[], &[])).expect("it is written");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("mine");
    file.set_len(1 << 33).expect("sparse");
    let error = Weights::open(&path).expect_err("it is hostile").to_string();
    assert!(
        error.contains("its header has more than 268435456 bytes"),
        "{error}"
    );
}

#[test]
fn prefixes_and_flipped_bits_give_errors_or_readable_files() {
    let at = tempfile::tempdir().expect("a folder");
    let path = at.path().join("a.gguf");
    let text = [&2u64.to_le_bytes()[..], b"ab"].concat();
    let array = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &text].concat();
    let whole = file(
        3,
        &[
            ("general.alignment", 4, &32u32.to_le_bytes()),
            ("t", 8, &text),
            ("a", 9, &array),
        ],
        &[("v", &[32, 2], 2, 0), ("w", &[3], 0, 64)],
        &[0x11; 76],
    );
    let shapes = [("v".to_owned(), vec![2, 32]), ("w".to_owned(), vec![3])];
    let mut session = session(&declare(&shapes));
    let mut read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("it is written");
        let weights = match Weights::open(&path) {
            Ok(weights) => weights,
            Err(error) => {
                assert!(error.to_string().len() < 2000, "{error}");
                return false;
            }
        };
        for (name, ..) in weights.names() {
            assert!(weights.read(name).is_ok(), "{name}");
        }
        let _ = session.load_from(&weights, &Rules::new());
        true
    };
    for length in 0..whole.len() {
        assert!(!read(&whole[..length]), "{length} bytes");
    }
    assert!(read(&whole));
    let header = whole.len() - 76;
    let mut readable = 0;
    // Every value of every byte is tried in memory, by the unit test of the headers.
    for bit in (0..8 * header).step_by(3) {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        readable += usize::from(read(&bytes));
    }
    assert!(readable > 20 && readable < header, "{readable}");
}
