//! `slabwise replay`.

use super::*;

const REPLAY: &str = "policy peak_live_bytes peak_reserved_bytes fragmentation ns_per_op driver_calls defrags defrag_bytes";

#[test]
fn replay_runs_a_trace_under_all_policies() {
    let (_folder, path) = table(TABLE);
    let report = json(&format!("replay {path}"));
    assert_keys(&report, REPLAY);
    assert_eq!(
        (
            report["policy"].as_str(),
            report["peak_live_bytes"].as_u64()
        ),
        (Some("tlsf"), Some(12))
    );
    let all = json(&format!("replay {path} --all"));
    let names: Vec<&str> = all
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|report| report["policy"].as_str())
        .collect();
    assert_eq!(names.join(" "), POLICIES);
    assert_eq!(
        json(&format!("replay {path} --policy round"))["peak_reserved_bytes"].as_u64(),
        Some(3 * 4096)
    );
    let shown = text(&format!(
        "replay {path} --all --capacity 1MiB --no-defragment"
    ));
    assert!(
        shown.contains("peak live 12 B")
            && POLICIES
                .split_whitespace()
                .all(|policy| shown.contains(policy)),
        "{shown}"
    );
    // The written file is itself a trace, up to the peak.
    let folder = tempfile::tempdir().unwrap();
    let [json_file, pickle, perfetto] =
        ["s.json", "s.pickle", "p.json"].map(|name| folder.path().join(name).display().to_string());
    for file in [&json_file, &pickle] {
        text(&format!(
            "replay {path} --snapshot {file} --perfetto {perfetto}"
        ));
        assert_eq!(
            json(&format!("replay {file}"))["peak_live_bytes"].as_u64(),
            Some(12)
        );
    }
    let events: Value = serde_json::from_str(&std::fs::read_to_string(perfetto).unwrap()).unwrap();
    assert!(
        events["traceEvents"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["ph"] == "b")
            .count()
            >= 3
    );
    // Another format, recognized from the file.
    let (_folder, log) = table(
        "Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,0x10,300,0x0\n1,0,free,0x10,300,0x0\n",
    );
    assert_eq!(
        json(&format!("replay {log} --policy unpooled"))["peak_reserved_bytes"].as_u64(),
        Some(512)
    );
}

#[test]
fn replay_distinguishes_bad_traces_from_too_little_memory() {
    let (_folder, path) = table("id,lower,upper,size\na,0,2,600\nb,1,3,600\n");
    let report = failure(&format!("replay {path} --capacity 1024"), 1);
    assert!(
        report.contains("operation 1") && report.contains("600 B") && report.contains("tlsf"),
        "{report}"
    );
    assert_eq!(
        json(&format!("replay {path} --capacity 2x"))["peak_live_bytes"].as_u64(),
        Some(1200)
    );
    let (_folder, log) = table("Thread,Time,Action,Pointer,Size,Stream\n1,0,free,0x10,300,0x0\n");
    let error = failure(&format!("replay {log}"), 2);
    assert!(
        error.contains("line 2") && error.contains("0x10"),
        "{error}"
    );
    assert!(failure("replay nowhere.csv", 2).contains("nowhere.csv"));
    assert!(failure(&format!("replay {path} --policy best"), 2).contains("tlsf, bfc"));
    assert!(failure(&format!("replay {path} --capacity=-1x"), 2).contains("-1x"));
    assert!(failure(&format!("replay {path} --capacity=0x"), 2).contains("0x"));
    // A policy without a limit names none.
    let report = failure(&format!("replay {path} --policy platform --capacity 1B"), 1);
    assert!(
        report.contains("0 B of all that the device gives are in use") && !report.contains("iB"),
        "{report}"
    );
}
