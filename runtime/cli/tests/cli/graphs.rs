//! `slabwise order` and `slabwise remat`.

use super::*;

const ORDER: &str = "graph ops in_place fixed peak lower_bound optimal gap_pct method seconds";
const REMAT: &str = "graph fixed_bytes budget_bytes met peak_bytes no_remat_peak_bytes floor_bytes computes base_cost cost overhead_pct \
                     lower_bound_pct seconds";

/// A graph that comes with the project.
fn graph(name: &str) -> String {
    format!(
        "{}/../../data/graphs/{name}.json.gz",
        env!("CARGO_MANIFEST_DIR")
    )
}

fn written(path: &std::path::Path) -> Value {
    let content = std::fs::read(path).unwrap();
    let text = if path.extension().is_some_and(|e| e == "gz") {
        std::io::read_to_string(flate2::read::GzDecoder::new(&content[..])).unwrap()
    } else {
        String::from_utf8(content).unwrap()
    };
    serde_json::from_str(&text).unwrap()
}

#[test]
fn order_finds_the_smallest_peak_and_writes_the_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let path = graph("unet_d2_c16_b4_grads");
    for (flag, peak, file, key) in [
        ("", 49_807_500, "o.json", "order"),
        ("--in-place", 46_137_476, "o.json.gz", "steps"),
    ] {
        let out = folder.path().join(file);
        let report = json(&format!("order {path} {flag} -o {}", out.display()));
        assert_keys(&report, ORDER);
        assert_eq!(
            (report["peak"].as_u64(), report["lower_bound"].as_u64()),
            (Some(peak), Some(peak))
        );
        assert_eq!(
            (report["optimal"].as_bool(), report["ops"].as_u64()),
            (Some(true), Some(86))
        );
        assert!(written(&out)[key].as_array().unwrap().len() >= 86);
    }
    assert!(text(&format!("order {path} --time-limit 1")).contains("no order is better"));
}

#[test]
fn remat_meets_a_budget_or_reports_the_lower_bound() {
    let folder = tempfile::tempdir().unwrap();
    let path = graph("unet_d2_c16_b4_grads");
    let out = folder.path().join("r.json");
    let report = json(&format!(
        "remat {path} --budget 75% --time-limit 0.2 -o {}",
        out.display()
    ));
    assert_keys(&report, REMAT);
    assert_eq!(
        (report["met"].as_bool(), report["budget_bytes"].as_u64()),
        (Some(true), Some(37_355_625))
    );
    assert!(report["peak_bytes"].as_u64() <= report["budget_bytes"].as_u64());
    assert!(report["lower_bound_pct"].as_f64() <= report["overhead_pct"].as_f64());
    assert_eq!(
        written(&out)["order"].as_array().unwrap().len() as u64,
        report["computes"].as_u64().unwrap()
    );

    let report = json(&format!(
        "remat {path} --budget 38MB --offload 300 --slab --time-limit 0.2 -o {}",
        out.display()
    ));
    assert_keys(
        &report,
        &format!("{REMAT} time time_overhead_pct offloaded_bytes slab_bytes"),
    );
    assert!(report["slab_bytes"].as_u64() <= Some(38_000_000));
    assert!(written(&out)["steps"][0]["off"].is_u64());

    let args = format!("remat {path} --budget 1000 --time-limit 0.1 --json");
    let output = slabwise(&args);
    assert_eq!(output.status.code(), Some(1));
    let why = String::from_utf8(output.stderr).unwrap();
    assert!(
        why.starts_with("error: the budget of 1000 bytes is not met")
            && why.contains("no schedule needs less than"),
        "{why}"
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["floor_bytes"].as_u64() > Some(1000) && report["met"] == false);
}

#[test]
fn bad_graphs_and_budgets_are_wrong_usage() {
    let folder = tempfile::tempdir().unwrap();
    let bad = |nodes: &str| {
        let path = folder.path().join("g.json");
        std::fs::write(
            &path,
            format!(r#"{{"format":"remat-graph-v1","nodes":[{nodes}],"outputs":[]}}"#),
        )
        .unwrap();
        let order = failure(&format!("order {}", path.display()), 2);
        assert_eq!(
            failure(&format!("remat {} --budget 50%", path.display()), 2),
            order
        );
        assert!(order.contains("g.json"), "{order}");
        order
    };
    let cycle = bad(r#"{"name":"a","inputs":[1],"bytes":1},{"name":"b","inputs":[0],"bytes":1}"#);
    assert!(cycle.contains("depend on each other in a cycle"), "{cycle}");
    let negative = bad(r#"{"name":"a","inputs":[],"bytes":-4}"#);
    assert!(negative.contains("\"bytes\" is -4"), "{negative}");
    let huge = bad(&format!(
        r#"{{"name":"a","inputs":[],"bytes":{0}}},{{"name":"b","inputs":[],"bytes":{0}}}"#,
        u64::MAX
    ));
    assert!(huge.contains("64 bits"), "{huge}");
    assert!(bad(r#"{"name":"a""#).contains("line 1"));
    assert!(failure("order no/such.json", 2).contains("no/such.json"));
    let path = graph("randwire12_inf");
    for usage in [
        "",
        "--budget lots",
        "--budget -1",
        "--budget -5%",
        "--budget 50% --offload -1",
        "--budget 50% --offload 1e302",
        "--budget 50% --time-limit x",
    ] {
        failure(&format!("remat {path} {usage}"), 2);
    }
}
