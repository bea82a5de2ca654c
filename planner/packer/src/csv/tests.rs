use super::*;
use crate::lifetime::Lifetime;
use crate::problem::{Gap, InPlace, Item, Space, Window};
use std::io::Write;

/// `benchmarks/examples/input.12.csv` of google/minimalloc (Apache-2.0, Copyright 2023 Google LLC);
/// its optimum is 12.
const MINIMALLOC_EXAMPLE: &str =
    "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n";

#[test]
fn a_public_instance_is_read_packed_and_written() {
    let mut table = read(MINIMALLOC_EXAMPLE).expect("a valid file");
    assert_eq!(write(&table), MINIMALLOC_EXAMPLE);
    let packing = table.problem.pack().expect("small");
    assert_eq!((packing.height, packing.lower_bound), (12, 12));
    table.set_offsets(&packing);
    assert_eq!(read(&write(&table)), Ok(table));
}

fn item(start: u64, end: u64, size: u64, align: u64) -> Item {
    Item {
        life: Lifetime::new(start, end),
        size,
        align,
    }
}

#[test]
fn every_column() {
    let text = "space,id,lower,upper,size,alignment,fixed,gaps,alias,follows,in_place,offset\n\
                sram,a b,0,9,64,16,,2-4 6-8@0:16,,,,\n\
                dram,\"c,\",0,9,32,1,32,,view,,,32\n\
                sram,d,8,12,64,16,,,,,a\\ b \\d,\n\
                dram,e,0,9,8,1,,,,\"c,\",,\n\
                dram,f,0,9,8,1,,,view,,,\n\
                sram,\\d,9,9,0,1,,,,e,,0\n";
    let error = read(text).map(|table| table.problem.verify());
    assert!(
        matches!(error, Ok(Err(_))),
        "d cannot be computed in the place of an item that never lives: {error:?}"
    );
    let table = read(&text.replace("a\\ b \\d,", "a\\ b,")).expect("a valid file");
    let at = |item, offset| Placement { item, offset };
    let expected = Problem {
        fixed: vec![at(1, 32)],
        gaps: vec![
            Gap {
                item: 0,
                life: Lifetime::new(2, 4),
                window: None,
            },
            Gap {
                item: 0,
                life: Lifetime::new(6, 8),
                window: Some(Window { low: 0, high: 16 }),
            },
        ],
        aliases: vec![vec![1, 4]],
        contiguous: vec![vec![1, 3, 5]],
        in_place: vec![InPlace { from: 0, to: 2 }],
        spaces: vec![
            Space {
                capacity: None,
                items: vec![0, 2, 5],
            },
            Space {
                capacity: None,
                items: vec![1, 3, 4],
            },
        ],
        start: vec![at(1, 32), at(5, 0)],
        ..Problem::new(vec![
            item(0, 9, 64, 16),
            item(0, 9, 32, 1),
            item(8, 12, 64, 16),
            item(0, 9, 8, 1),
            item(0, 9, 8, 1),
            item(9, 9, 0, 1),
        ])
    };
    assert_eq!(table.problem, expected);
    assert_eq!(table.spaces, ["sram", "dram"]);
    assert_eq!(
        (0..6).map(|item| table.id(item)).collect::<Vec<_>>(),
        ["a b", "c,", "d", "e", "f", "\\d"]
    );
    assert_eq!(read(&write(&table)), Ok(table));
}

#[test]
fn any_table_survives_writing_and_reading() {
    arbtest::arbtest(|u| {
        let (mut problem, mut ids) = (Problem::default(), Vec::new());
        let (aligned, solved, gapped, paired) = (
            u.arbitrary()?,
            u.arbitrary()?,
            u.arbitrary()?,
            u.arbitrary()?,
        );
        for item in 0..u.int_in_range(0..=6)? {
            let lower = u.int_in_range(0..=u64::MAX)?;
            let upper = u.int_in_range(lower..=u64::MAX)?;
            let size = u.arbitrary()?;
            let align = if aligned {
                1 << u.int_in_range(0..=63)?
            } else {
                1
            };
            problem.items.push(Item {
                life: Lifetime::new(lower, upper),
                size,
                align,
            });
            if solved && u.arbitrary()? {
                problem.start.push(Placement {
                    item,
                    offset: u.int_in_range(0..=u64::MAX - size)?,
                });
            }
            if gapped {
                let low = u.int_in_range(0..=size)?;
                let window = if u.arbitrary()? {
                    Some(Window {
                        low,
                        high: u.int_in_range(low..=size)?,
                    })
                } else {
                    None
                };
                problem.gaps.push(Gap {
                    item,
                    life: Lifetime::new(lower, upper),
                    window,
                });
            }
            if paired && item > 0 {
                problem.in_place.push(InPlace {
                    from: u.int_in_range(0..=item - 1)?,
                    to: item,
                });
            }
            let odd = *u.choose(&[
                "", ",", "\"", "\n", "\r\n", " x ", "\"\"", "é", "\r", "\\", "\u{a0}",
            ])?;
            ids.push(format!("{odd}{item}{odd}"));
        }
        let table = Table::new(problem, ids.iter().map(String::as_str));
        let text = write(&table);
        assert_eq!(read(&text), Ok(table), "{text}");
        Ok(())
    });
}

#[test]
fn columns_in_any_order_line_ends_and_blank_lines() {
    let text = "\u{feff}size, alignment,id,upper,lower\r\n\r\n64,16,\"a,\"\"b\",9,2\r\n\n1,,c,3,3";
    let table = read(text).expect("a valid file");
    assert_eq!(table.problem.items, [item(2, 9, 64, 16), item(3, 3, 1, 1)]);
    assert_eq!((table.id(0), table.id(1)), ("a,\"b", "c"));
}

#[test]
fn a_malformed_line_is_named() {
    let error = |text: &str| read(text).expect_err(text);
    let line = |text: &str| {
        error(&format!(
            "id,lower,upper,size,alignment,offset\n\"ok\n\",0,1,1,1,0\n\n{text}\n"
        ))
    };
    assert_eq!(error(""), CsvError::NoHeader);
    assert_eq!(error("\n\n"), CsvError::NoHeader);
    assert_eq!(error("id,lower,size\n"), CsvError::MissingColumn("upper"));
    assert_eq!(
        error("id,lower,upper,size,colour\n"),
        CsvError::BadColumn("colour".into())
    );
    assert_eq!(
        error("id,lower,upper,size,id\n"),
        CsvError::BadColumn("id".into())
    );
    // The quoted id spans lines 2 and 3, line 4 is blank.
    assert_eq!(
        line("a,1,2,3,4"),
        CsvError::Fields {
            line: 5,
            expected: 6,
            found: 5
        }
    );
    assert_eq!(
        line("a,1,2,3,4,5,6"),
        CsvError::Fields {
            line: 5,
            expected: 6,
            found: 7
        }
    );
    assert_eq!(
        line("a,1,2,,4,"),
        CsvError::Number {
            line: 5,
            column: "size",
            text: "".into()
        }
    );
    assert_eq!(
        line("a,1,2,-3,4,0"),
        CsvError::Number {
            line: 5,
            column: "size",
            text: "-3".into()
        }
    );
    assert_eq!(
        line("a,1.5,2,3,4,0"),
        CsvError::Number {
            line: 5,
            column: "lower",
            text: "1.5".into()
        }
    );
    assert_eq!(
        line("a,+1,2,3,4,0"),
        CsvError::Number {
            line: 5,
            column: "lower",
            text: "+1".into()
        }
    );
    let beyond = "18446744073709551616";
    assert_eq!(
        line(&format!("a,1,{beyond},3,4,0")),
        CsvError::Number {
            line: 5,
            column: "upper",
            text: beyond.into()
        }
    );
    assert_eq!(
        line("a,2,1,3,4,0"),
        CsvError::Lifetime {
            line: 5,
            lower: 2,
            upper: 1
        }
    );
    assert_eq!(
        line("a,1,2,3,48,0"),
        CsvError::Alignment { line: 5, align: 48 }
    );
    assert_eq!(
        line("a,1,2,3,0,0"),
        CsvError::Alignment { line: 5, align: 0 }
    );
    assert_eq!(
        line(&format!("a,1,2,3,1,{}", u64::MAX)),
        CsvError::End {
            line: 5,
            column: "offset",
            offset: u64::MAX,
            size: 3
        }
    );
    assert_eq!(
        line("\"ok\n\",0,1,1,1,0"),
        CsvError::Duplicate {
            line: 5,
            first: 2,
            id: "ok\n".into()
        }
    );
    assert_eq!(line("\"a\"b,0,1,1,1,0"), CsvError::Quote { line: 5 });
    assert_eq!(line("\"a,0,1,1,1,0"), CsvError::Quote { line: 5 });
    assert!(line("a,2,1,3,4,0").to_string().starts_with("line 5: "));
}

#[test]
fn malformed_rules_are_named() {
    let error = |column: &str, fields: &[&str]| {
        let rows = fields
            .iter()
            .enumerate()
            .map(|(row, field)| format!("{row},0,9,8,{field}\n"));
        read(&format!(
            "id,lower,upper,size,{column}\n{}",
            rows.collect::<String>()
        ))
        .expect_err("malformed")
    };
    for text in [
        "3",
        "-",
        "1-",
        "-2",
        "1-2-3",
        "4-3",
        "1-2@",
        "1-2@3",
        "1-2@5:4",
        "1-2@0:9",
        "1-x",
        "1-2@0:4:6",
    ] {
        assert_eq!(
            error("gaps", &["1-2", text]),
            CsvError::Gap {
                line: 3,
                text: text.into()
            },
            "{text}"
        );
    }
    assert_eq!(
        error("follows", &["7"]),
        CsvError::UnknownId {
            line: 2,
            column: "follows",
            id: "7".into()
        }
    );
    assert_eq!(
        error("in_place", &["", "0 7"]),
        CsvError::UnknownId {
            line: 3,
            column: "in_place",
            id: "7".into()
        }
    );
    assert_eq!(
        error("follows", &["", "0", "0"]),
        CsvError::Follows {
            line: 4,
            id: "0".into()
        }
    );
    assert_eq!(
        error("follows", &["0"]),
        CsvError::Follows {
            line: 2,
            id: "0".into()
        }
    );
    assert_eq!(
        error("follows", &["", "0", "3", "2"]),
        CsvError::Follows {
            line: 4,
            id: "3".into()
        }
    );
    assert_eq!(
        error("fixed", &["x"]),
        CsvError::Number {
            line: 2,
            column: "fixed",
            text: "x".into()
        }
    );
}

#[test]
fn files_gzipped_or_not_and_not_too_long() {
    let zip = |bytes: &[u8]| {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        packer.write_all(bytes).expect("in memory");
        packer.finish().expect("in memory")
    };
    let read_bytes = |bytes: &[u8], limit: u64| file::read_bytes("file.csv".as_ref(), bytes, limit);
    let length = MINIMALLOC_EXAMPLE.len() as u64;
    for bytes in [
        MINIMALLOC_EXAMPLE.as_bytes().to_vec(),
        zip(MINIMALLOC_EXAMPLE.as_bytes()),
    ] {
        assert_eq!(
            read_bytes(&bytes, length).ok(),
            read(MINIMALLOC_EXAMPLE).ok()
        );
        let error = read_bytes(&bytes, length - 1).expect_err("too long");
        assert!(
            matches!(error, FileError::TooLong { limit, .. } if limit == length - 1),
            "{error}"
        );
    }
    // Kilobytes that decompress to megabytes.
    let bomb = zip(&[b' '; 1 << 22]);
    assert!(
        bomb.len() < 1 << 14
            && matches!(read_bytes(&bomb, 1 << 20), Err(FileError::TooLong { .. }))
    );
    let no_text = read_bytes(b"id,lower,upper,size\na,0,1,\xff\n", TEXT_MAX).expect_err("no text");
    assert_eq!(no_text.to_string(), "file.csv: line 2 is not UTF-8");
    assert!(matches!(
        read_bytes(&[0x1f, 0x8b, 8, 0], TEXT_MAX),
        Err(FileError::Io { .. })
    ));
    assert!(matches!(
        read_bytes(b"", TEXT_MAX),
        Err(FileError::Csv {
            source: CsvError::NoHeader,
            ..
        })
    ));
    assert!(matches!(
        read_file("no/such/file.csv".as_ref()),
        Err(FileError::Io { .. })
    ));
}
