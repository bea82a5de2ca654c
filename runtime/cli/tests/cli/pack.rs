//! `slabwise pack`.

use super::*;

#[test]
fn pack_places_buffers_and_writes_them() {
    let (folder, path) = table(TABLE);
    let report = json(&format!("pack {path}"));
    assert_keys(&report, PACK);
    let numbers = ["buffers", "lower_bound", "height"].map(|key| report[key].as_u64());
    assert_eq!(numbers, [Some(5), Some(12), Some(12)]);
    assert_eq!(
        (report["ratio"].as_f64(), report["optimal"].as_bool()),
        (Some(1.0), Some(true))
    );
    let shown = text(&format!("pack {path} --capacity 12 --threads 1 --seed 3"));
    assert!(
        shown.contains("12 (12 B)") && shown.contains("yes: the height is the lower bound"),
        "{shown}"
    );

    for name in ["out.csv", "out.csv.gz"] {
        let (out, svg) = (folder.path().join(name), folder.path().join("out.svg"));
        text(&format!(
            "pack {path} -o {} --svg {}",
            out.display(),
            svg.display()
        ));
        // The written file can be read again, with its offsets, which are the start of the next
        // run.
        let again = json(&format!("pack {}", out.display()));
        assert_eq!(
            (again["height"].as_u64(), again["method"].as_str()),
            (Some(12), Some("given start"))
        );
        assert!(std::fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    }
    let written = std::fs::read_to_string(folder.path().join("out.csv")).unwrap();
    assert!(
        written.starts_with("id,lower,upper,size,offset\nb1,0,3,4,"),
        "{written}"
    );
    // Offsets at multiples of 16: four bytes at the top are enough, below it sixteen.
    assert_eq!(
        json(&format!("pack {path} --align 16"))["height"].as_u64(),
        Some(36)
    );
}

#[test]
fn pack_of_nothing() {
    let (_folder, path) = table("id,lower,upper,size\n");
    let report = json(&format!("pack {path} --capacity 0"));
    assert_eq!(
        (
            report["height"].as_u64(),
            report["ratio"].as_f64(),
            report["optimal"].as_bool()
        ),
        (Some(0), Some(1.0), Some(true))
    );
}

#[test]
fn a_capacity_that_is_not_met_fails_with_the_best_packing() {
    let (folder, path) = table(TABLE);
    let out = folder.path().join("best.csv");
    let output = slabwise(&format!(
        "pack {path} --capacity 11 --time-limit 0.1 --json -o {}",
        out.display()
    ));
    assert_eq!(output.status.code(), Some(1));
    let reason = String::from_utf8(output.stderr).unwrap();
    let expected = "error: the capacity of 11 bytes is not met: the best packing found needs 12; no packing needs less than 12\n";
    assert_eq!(reason, expected);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["height"].as_u64(), Some(12));
    assert_eq!(std::fs::read_to_string(out).unwrap().lines().count(), 6);
}

#[test]
fn pack_knows_every_rule_and_several_memories() {
    let (_folder, path) = table(
        "id,lower,upper,size,alignment,fixed,gaps,alias,follows,in_place,space\n\
         a,0,4,64,16,,,,,,dram\nb,3,8,64,16,,,,,a,dram\nwhole,0,8,64,16,,4-6@0:32,v,,,dram\nview,2,6,32,16,,,v,,,dram\n\
         left,0,8,32,16,,,,,,dram\nright,0,8,30,16,,,,left,,dram\npinned,1,7,16,16,0,,,,,dram\nfar,0,8,48,1,,,,,,sram\n",
    );
    let report = json(&format!("pack {path} --capacity 1KiB --capacity sram=48"));
    assert_keys(&report, &format!("{PACK} spaces"));
    let space = |at: usize| {
        (
            report["spaces"][at]["space"].as_str(),
            report["spaces"][at]["height"].as_u64(),
        )
    };
    assert_eq!(space(1), (Some("sram"), Some(48)));
    assert_eq!(space(0).1.map(|dram| dram + 48), report["height"].as_u64());
    assert!(text(&format!("pack {path}")).contains("in place     1 of 1 pairs"));
    let unmet = slabwise(&format!("pack {path} --capacity sram=40"));
    assert_eq!(unmet.status.code(), Some(1));
    assert!(
        String::from_utf8(unmet.stderr)
            .unwrap()
            .contains("40 bytes of space `sram`")
    );
    assert!(failure(&format!("pack {path} --capacity rom=40"), 2).contains("`dram`, `sram`"));
}

#[test]
fn bad_input_of_pack_is_named() {
    let bad = |content: &str| {
        let (_folder, path) = table(content);
        failure(&format!("pack {path}"), 2)
    };
    assert!(bad("id,lower,upper,size\na,0,1,1\nb,0,1,x\n").contains("table.csv: line 3: size `x`"));
    assert!(bad("").contains("line 1"));
    let both = bad("id,lower,upper,size,fixed\na,0,2,8,0\nb,1,3,8,4\n");
    assert!(
        both.contains("items 0 and 1 would share bytes")
            && both.contains("item 0 is `a`, item 1 is `b`"),
        "{both}"
    );
    assert!(
        bad(&format!(
            "id,lower,upper,size\na,0,1,{0}\nb,0,1,{0}\n",
            u64::MAX
        ))
        .contains("64 bits")
    );
    assert!(failure("pack no/such/file.csv", 2).contains("no/such/file.csv"));
    let (_folder, path) = table(TABLE);
    for usage in [
        "--align 12",
        "--time-limit -1",
        "--effort 5 --time-limit 1",
        "--threads 0",
        "--capacity lots",
        "--capacity 5x",
    ] {
        failure(&format!("pack {path} {usage}"), 2);
    }
    let nowhere = failure_with_report(&format!("pack {path} -o {path}/none.csv"), 1);
    assert!(nowhere.contains("none.csv"), "{nowhere}");
}

/// An effort in place of a time gives the same offsets every time, with any number of threads.
#[test]
fn an_effort_is_repeatable() {
    let known = slabwise_planner::generate::tiling(
        5,
        60,
        40,
        1000,
        slabwise_planner::generate::Cuts::Mixed,
    );
    let rows = known
        .problem
        .items
        .iter()
        .enumerate()
        .map(|(id, it)| format!("{id},{},{},{}\n", it.life.start, it.life.end, it.size));
    let (folder, path) = table(&format!(
        "id,lower,upper,size\n{}",
        rows.collect::<String>()
    ));
    let packed = |options: &str| {
        let out = folder.path().join("out.csv");
        text(&format!(
            "pack {path} --effort 20000 {options} -o {}",
            out.display()
        ));
        std::fs::read_to_string(out).unwrap()
    };
    let first = packed("--threads 1");
    assert!(
        ["--threads 1", "--threads 2", "--threads 5", ""]
            .iter()
            .all(|options| packed(options) == first)
    );
}
