//! Reproducible damage to files.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::splitmix::Rng;

/// The number of damaged files of each kind.
pub const FILES: u64 = 100;

fn seeded(n: u64) -> Rng {
    Rng(n.wrapping_mul(0xd134_2543_de82_ef95))
}

/// Texts in the place of a number.
const VALUES: [&str; 22] = [
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775808",
    "4294967295",
    "99999999999999999999999999999999",
    "1e999",
    "1e300",
    "-1",
    "-0",
    "0.5",
    "NaN",
    "inf",
    "null",
    "true",
    "\"7\"",
    "[]",
    "{}",
    "",
    "0x10",
    "\u{1b}[31m",
    "\u{202e}7",
    "７",
];

/// A text file with the `n`-th damage.
pub fn text(file: &[u8], n: u64) -> Vec<u8> {
    let random = &mut seeded(n);
    let mut bytes = file.to_vec();
    match n % 10 {
        // Numbers in place of others.
        0..=3 => {
            for _ in 0..=random.below(2) {
                let number = numbers(&bytes);
                if let Some(range) = number.get(random.below(number.len())) {
                    bytes.splice(range.clone(), VALUES[random.below(VALUES.len())].bytes());
                }
            }
        }
        // Bytes inserted between two others: depth, length, invalid text, invisible characters.
        4 | 5 => {
            let at = random.below(bytes.len());
            let added = [
                "[".repeat(100_000).into_bytes(),
                "{\"a\":".repeat(50_000).into_bytes(),
                vec![b'x'; 300_000],
                vec![0xff, 0xfe],
                vec![0; 5_000],
                b"\x1b]0;title\x07".to_vec(),
                ",".repeat(10_000).into_bytes(),
                b"\"".to_vec(),
            ];
            bytes.splice(at..at, added[random.below(added.len())].iter().copied());
        }
        // A line or a word lost or repeated.
        6 => {
            let lines: Vec<&[u8]> = file
                .split_inclusive(|b| matches!(b, b'\n' | b',' | b'}'))
                .collect();
            let at = random.below(lines.len());
            let again = if random.below(2) == 0 { 0 } else { 2 };
            bytes = lines
                .iter()
                .enumerate()
                .flat_map(|(i, line)| line.repeat(if i == at { again } else { 1 }))
                .collect();
        }
        // Nothing of the file is left.
        7 => {
            let whole: [Vec<u8>; 8] = [
                Vec::new(),
                vec![b'['; 2_000_000],
                vec![0; 1_000_000],
                b"\n\n\n".to_vec(),
                b"{}".to_vec(),
                b"\xef\xbb\xbf".to_vec(),
                "{\"".repeat(100_000).into_bytes(),
                vec![0xff; 4096],
            ];
            bytes = whole[random.below(whole.len())].clone();
        }
        _ => bytes = binary(file, n),
    }
    bytes
}

/// A file of any kind with the `n`-th damage.
pub fn binary(file: &[u8], n: u64) -> Vec<u8> {
    let random = &mut seeded(n ^ 0xb17);
    let mut bytes = file.to_vec();
    let length = bytes.len();
    match random.below(7) {
        0 => bytes.truncate(random.below(length)),
        1 => (0..=random.below(4)).for_each(|_| {
            if let Some(byte) = bytes.get_mut(random.below(length)) {
                *byte ^= 1 << random.below(8);
            }
        }),
        // Lengths, in the head most of all.
        2 | 3 => {
            let words = [
                u64::MAX,
                1 << 63,
                1 << 31,
                u64::from(u32::MAX),
                1 << 40,
                0,
                0xffff,
            ];
            let (word, width) = (
                words[random.below(words.len())].to_le_bytes(),
                [1, 2, 4, 8][random.below(4)],
            );
            let at = random.below(length.min(64));
            bytes.splice(at..(at + width).min(length), word[..width].iter().copied());
        }
        4 => {
            let (at, gone) = (random.below(length), 1 + random.below(40));
            bytes.drain(at..(at + gone).min(length));
        }
        5 => bytes.extend((0..1 + random.below(50)).map(|i| (i * 37) as u8)),
        _ => {
            let (at, many) = (random.below(length), 1 + random.below(40));
            let end = (at + many).min(length);
            bytes[at..end]
                .iter_mut()
                .enumerate()
                .for_each(|(i, byte)| *byte = (i as u8).wrapping_mul(n as u8 | 1));
        }
    }
    bytes
}

/// A gzipped file with the `n`-th damage, to its content or to the file itself.
pub fn packed(file: &[u8], n: u64) -> Vec<u8> {
    if n.is_multiple_of(2) {
        gzip(&text(file, n / 2))
    } else {
        binary(&gzip(file), n)
    }
}

/// A file compressed by gzip.
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
    packer
        .write_all(bytes)
        .and_then(|()| packer.finish())
        .expect("in memory")
}

/// The ranges of numbers in a text.
fn numbers(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut ranges: Vec<std::ops::Range<usize>> = Vec::new();
    for at in (0..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()) {
        match ranges.last_mut() {
            Some(last) if last.end == at => last.end = at + 1,
            _ => ranges.push(at..at + 1),
        }
    }
    ranges
}
