use super::*;

fn row(name: &str, layer: &str, bytes: u64, start: u64, end: u64, at_peak: bool) -> Row {
    let text = String::new;
    let (name, layer) = (name.into(), layer.into());
    Row {
        name,
        layer,
        bytes,
        occupied_bytes: bytes,
        offset: 0,
        start,
        end,
        at_peak,
        kind: text(),
        source: text(),
        first: text(),
        last: text(),
    }
}

fn file(buffers: Vec<Row>) -> PlanFile {
    let bytes = buffers.iter().map(Row::at_peak_bytes).sum();
    let peak = Peak {
        step: 2,
        kernel: "conv".into(),
        bytes,
    };
    PlanFile {
        format: FORMAT,
        slab_bytes: bytes,
        lower_bound_bytes: bytes,
        without_reuse_bytes: bytes,
        peak,
        buffers,
    }
}

#[test]
fn a_difference_is_the_sum_of_its_causes() {
    let a = file(vec![
        row("x", "", 10, 0, 3, true),
        row("h", "stem", 100, 1, 3, true),
        row("h", "stem", 5, 4, 6, false),
        row("old", "head", 7, 1, 4, true),
        row("late", "head", 30, 5, 6, false),
        row("early", "head", 3, 2, 3, true),
    ]);
    let b = file(vec![
        row("x", "", 10, 0, 3, true),
        row("h", "stem", 160, 1, 9, true),
        row("h", "stem", 5, 4, 6, false),
        row("late", "head", 30, 1, 6, true),
        row("new", "head", 4, 1, 4, true),
        row("early", "head", 3, 0, 1, false),
    ]);
    let diff = Diff::of(&a, &b);
    assert_eq!(
        diff.causes,
        Causes {
            new: 4,
            gone: -7,
            resized: 60,
            kept: 30,
            dropped: -3
        }
    );
    assert_eq!(
        diff.causes.sum(),
        i128::from(b.peak.bytes) - i128::from(a.peak.bytes)
    );
    let named = |of: &[Holding]| {
        of.iter()
            .map(|h| (h.name.clone(), h.a, h.b))
            .collect::<Vec<_>>()
    };
    let holder = |name: &str, a, b| (name.to_string(), a, b);
    let holders = [
        holder("h", 100, 160),
        holder("late", 0, 30),
        holder("x", 10, 10),
        holder("old", 7, 0),
        holder("new", 0, 4),
        holder("early", 3, 0),
    ];
    assert_eq!(named(&diff.holders), holders);
    assert_eq!(
        named(&diff.layers),
        [
            holder("stem", 100, 160),
            holder("head", 10, 34),
            holder("", 10, 10)
        ]
    );
    assert_eq!((&diff.new[..], &diff.gone[..]), (&[4][..], &[3][..]));
    assert_eq!(diff.resized, [Both { a: 1, b: 1 }]);
    assert_eq!(
        diff.longer,
        [Both { a: 1, b: 1 }, Both { a: 4, b: 3 }],
        "6 steps of 160 bytes before 4 of 30"
    );
    assert!(!diff.is_empty() && Diff::of(&a, &a).is_empty());
}

#[test]
fn kernels_are_matched_regardless_of_fusion() {
    let plan = |name: &str| {
        file(vec![row(
            &format!("workspace of {name}"),
            "",
            10,
            0,
            1,
            true,
        )])
    };
    assert!(
        Diff::of(&plan("conv +3 & update"), &plan("conv +12 & update"))
            .new
            .is_empty()
    );
    assert_eq!(Diff::of(&plan("conv +3"), &plan("conv.grad +3")).new, [0]);
}

#[test]
fn the_sum_holds_for_any_two_plans() {
    let random = |u: &mut arbtest::arbitrary::Unstructured<'_>| {
        let mut rows = Vec::new();
        for _ in 0..u.int_in_range(0..=12)? {
            let start = u.int_in_range(0..=9)?;
            let name = *u.choose(&["a", "b", "c", "d"])?;
            rows.push(row(
                name,
                u.choose(&["", "l", "m"])?,
                u.int_in_range(0..=99)?,
                start,
                u.int_in_range(start..=12)?,
                u.arbitrary()?,
            ));
        }
        Ok(file(rows))
    };
    arbtest::arbtest(|u| {
        let (a, b) = (random(u)?, random(u)?);
        let (diff, back) = (Diff::of(&a, &b), Diff::of(&b, &a));
        assert_eq!(
            diff.causes.sum(),
            i128::from(b.peak.bytes) - i128::from(a.peak.bytes)
        );
        assert_eq!(diff.causes.sum(), -back.causes.sum());
        assert_eq!(
            (diff.new.len(), diff.gone.len()),
            (back.gone.len(), back.new.len())
        );
        for of in [&diff.holders, &diff.layers] {
            let sums = of.iter().fold((0, 0), |(x, y), h| (x + h.a, y + h.b));
            assert_eq!(sums, (a.peak.bytes, b.peak.bytes));
        }
        assert!(Diff::of(&a, &a).is_empty());
        Ok(())
    })
    .budget_ms(200);
}

#[test]
fn files_are_read_as_they_were_written_and_mistakes_name_their_line() {
    let plan = file(vec![
        row("x", "stem", 10, 0, 3, true),
        row("y", "", 7, 1, 2, false),
    ]);
    let text = serde_json::to_string_pretty(&plan).expect("JSON");
    // The first format had no number.
    let unnumbered = text.replacen("\"format\": 1,", "", 1);
    assert_eq!(PlanFile::read(&unnumbered).as_ref(), Ok(&plan));
    assert_eq!(PlanFile::read(&text), Ok(plan));
    let wrong = |from: &str, to: &str, says: &[&str]| {
        assert!(text.contains(from), "{from}");
        let error = PlanFile::read(&text.replacen(from, to, 1)).expect_err(to);
        assert!(says.iter().all(|s| error.contains(s)), "{error}");
    };
    wrong(
        "\"slab_bytes\": 10",
        "\"slab_bytes\": -10",
        &["line 3", "-10"],
    );
    wrong(
        "\"format\": 1",
        "\"format\": 2",
        &["a plan of format 2", "formats up to 1"],
    );
    wrong("\"name\": \"x\",", "", &["`name`", "line"]);
    wrong(
        "\"start\": 0",
        "\"start\": 4",
        &[
            "buffer `x` ends at step 3, before it begins at step 4",
            "line",
        ],
    );
    wrong(
        "\"occupied_bytes\": 10",
        "\"occupied_bytes\": 9",
        &["buffer `x` has 10 bytes, but occupies 9", "line"],
    );
    wrong(
        "\"offset\": 0",
        "\"offset\": 18446744073709551615",
        &["buffer `x` ends behind 2^64 bytes"],
    );
    wrong(
        "\"at_peak\": true",
        "\"at_peak\": false",
        &["the peak has 10 bytes", "have 0"],
    );
    wrong("{", "[", &["line"]);
}
