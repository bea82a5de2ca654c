use super::*;
use crate::dag::{Buffer, Kind, Task};
use crate::{Options, plan};

/// `benchmarks/examples/input.12.csv` of google/minimalloc (Apache-2.0, Copyright 2023 Google LLC); its optimum is 12.
const MINIMALLOC_EXAMPLE: &str = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n";

#[test]
fn a_public_instance_is_read_packed_and_written() {
    let mut rows = read(MINIMALLOC_EXAMPLE).expect("a valid file");
    assert_eq!(write(&rows), MINIMALLOC_EXAMPLE);
    let packing = problem(&rows).pack().expect("small");
    assert_eq!((packing.height, packing.lower_bound), (12, 12));
    set_offsets(&mut rows, &packing);
    assert_eq!(read(&write(&rows)), Ok(rows));
}

#[test]
fn any_rows_survive_writing_and_reading() {
    arbtest::arbtest(|u| {
        let mut rows: Vec<Row> = Vec::new();
        let (aligned, solved) = (u.arbitrary::<bool>()?, u.arbitrary::<bool>()?);
        for i in 0..u.int_in_range(0..=6)? {
            let lower = u.int_in_range(0..=u64::MAX - 1)?;
            let upper = u.int_in_range(lower + 1..=u64::MAX)?;
            let size = u.arbitrary()?;
            let align = if aligned { 1 << u.int_in_range(0..=63)? } else { 1 };
            let offset = if solved { Some(u.int_in_range(0..=u64::MAX - size)?) } else { None };
            let odd = *u.choose(&["", ",", "\"", "\n", "\r\n", " x ", "\"\"", "é", "\r"])?;
            rows.push(Row { id: format!("{odd}{i}{odd}"), item: Item { life: Lifetime::new(lower, upper), size, align }, offset });
        }
        let text = write(&rows);
        assert_eq!(read(&text), Ok(rows), "{text}");
        Ok(())
    });
}

#[test]
fn columns_in_any_order_line_ends_and_blank_lines() {
    let text = "\u{feff}size, alignment,id,upper,lower\r\n\r\n64,16,\"a,\"\"b\",9,2\r\n\n1,1,c,3,0";
    let rows = read(text).expect("a valid file");
    assert_eq!(rows[0], Row { id: "a,\"b".into(), item: Item { life: Lifetime::new(2, 9), size: 64, align: 16 }, offset: None });
    assert_eq!(rows[1].id, "c");
}

#[test]
fn a_malformed_line_is_named() {
    let error = |text: &str| read(text).expect_err(text);
    let line = |text: &str| error(&format!("id,lower,upper,size,alignment,offset\n\"ok\n\",0,1,1,1,0\n\n{text}\n"));
    assert_eq!(error(""), CsvError::NoHeader);
    assert_eq!(error("id,lower,size\n"), CsvError::MissingColumn("upper"));
    assert_eq!(error("id,lower,upper,size,gaps\n"), CsvError::BadColumn("gaps".into()));
    assert_eq!(error("id,lower,upper,size,id\n"), CsvError::BadColumn("id".into()));
    // The quoted id spans lines 2 and 3, line 4 is blank.
    assert_eq!(line("a,1,2,3,4"), CsvError::Fields { line: 5, expected: 6, found: 5 });
    assert_eq!(line("a,1,2,3,4,5,6"), CsvError::Fields { line: 5, expected: 6, found: 7 });
    assert_eq!(line("a,1,2,3,4,"), CsvError::Number { line: 5, column: "offset", text: "".into() });
    assert_eq!(line("a,1,2,-3,4,0"), CsvError::Number { line: 5, column: "size", text: "-3".into() });
    assert_eq!(line("a,1.5,2,3,4,0"), CsvError::Number { line: 5, column: "lower", text: "1.5".into() });
    assert_eq!(line("a,+1,2,3,4,0"), CsvError::Number { line: 5, column: "lower", text: "+1".into() });
    let beyond = "18446744073709551616";
    assert_eq!(line(&format!("a,1,{beyond},3,4,0")), CsvError::Number { line: 5, column: "upper", text: beyond.into() });
    assert_eq!(line("a,2,2,3,4,0"), CsvError::Lifetime { line: 5, lower: 2, upper: 2 });
    assert_eq!(line("a,1,2,3,48,0"), CsvError::Alignment { line: 5, align: 48 });
    assert_eq!(line("a,1,2,3,0,0"), CsvError::Alignment { line: 5, align: 0 });
    assert_eq!(line(&format!("a,1,2,3,1,{}", u64::MAX)), CsvError::End { line: 5, offset: u64::MAX, size: 3 });
    assert_eq!(line("\"ok\n\",0,1,1,1,0"), CsvError::Duplicate { line: 5, first: 2, id: "ok\n".into() });
    assert_eq!(line("\"a\"b,0,1,1,1,0"), CsvError::Quote { line: 5 });
    assert_eq!(line("\"a,0,1,1,1,0"), CsvError::Quote { line: 5 });
    assert!(line("a,2,2,3,4,0").to_string().starts_with("line 5: "));
}

#[test]
fn the_problem_of_a_plan_has_its_height() {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer { live_in: true, ..Buffer::new("x", Kind::Input, 1000) });
    let same = dag.add_buffer(Buffer::new("x", Kind::Activation, 1000));
    let y = dag.add_buffer(Buffer { live_out: true, ..Buffer::new("y", Kind::Output, 64) });
    let task = dag.add_task(Task { workspace: 100, ..Task::new("f", &[x], &[same]) });
    dag.add_task(Task::new("g", &[same], &[y]));
    dag.may_reuse.push(crate::MayReuse { task, from: x, to: same });
    for in_place in [true, false] {
        let plan = plan(&dag, &Options { in_place, ..Options::default() }).expect("a valid dag");
        let rows = of_plan(&dag, &plan);
        let mut ids: Vec<&str> = rows.iter().map(|row| row.id.as_str()).collect();
        ids.sort_unstable();
        let expected: &[&str] = if in_place { &["f.workspace", "x", "y"] } else { &["f.workspace", "x", "x#1", "y"] };
        assert_eq!(ids, expected);
        let height = rows.iter().map(|row| row.offset.expect("placed") + row.item.size).max();
        assert_eq!(height, Some(plan.height));
        assert_eq!(read(&write(&rows)), Ok(rows));
    }
}
