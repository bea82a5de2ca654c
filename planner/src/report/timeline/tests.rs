use super::*;
use crate::dag::{Buffer, MayReuse, Task};
use crate::{Options, OrderPolicy, plan};

const HOSTILE: &str = "</script><script>alert(1)</script><!-- \u{2028} \"' & é";

/// A forward and backward pass: `h` is kept from `stem` for `stem.grad`, `r` is computed in place.
fn sample() -> (Dag, Plan) {
    let mut dag = Dag::new();
    let x = dag.add_buffer(Buffer {
        live_in: true,
        ..Buffer::new("images", Kind::Input, 1000)
    });
    let h = dag.add_buffer(Buffer {
        layer: "stem".into(),
        source: "model.rs:7".into(),
        ..Buffer::new("stem.conv", Kind::Activation, 4096)
    });
    let r = dag.add_buffer(Buffer::new("stem.relu", Kind::Activation, 2048));
    let s = dag.add_buffer(Buffer::new(HOSTILE, Kind::Activation, 2048));
    let y = dag.add_buffer(Buffer {
        live_out: true,
        ..Buffer::new("loss", Kind::Output, 4)
    });
    dag.add_task(Task::new("stem", &[x], &[h]));
    dag.add_task(Task {
        workspace: 512,
        ..Task::new("relu", &[h], &[r])
    });
    let scale = dag.add_task(Task::new("scale", &[r], &[s]));
    dag.add_task(Task::new("stem.grad", &[s, h], &[y]));
    dag.may_reuse.push(MayReuse {
        task: scale,
        from: r,
        to: s,
    });
    let plan = plan(
        &dag,
        &Options {
            order: OrderPolicy::Program,
            ..Options::default()
        },
    )
    .expect("a valid dag");
    (dag, plan)
}

/// The data that a page contains.
fn data_of(page: &str) -> Value {
    let (_, rest) = page.split_once("id=\"data\">").expect("the data's element");
    let (data, _) = rest.split_once("</script>").expect("its end");
    serde_json::from_str(data).expect("JSON")
}

#[test]
fn the_page_holds_the_planners_numbers() {
    let (dag, plan) = sample();
    let data = data_of(&html(&dag, &plan, "train", Err("there was no time")));
    assert_eq!(data["slab"], plan.height);
    let live: Vec<u64> = data["steps"]
        .as_array()
        .expect("steps")
        .iter()
        .filter_map(|s| s["live"].as_u64())
        .collect();
    assert_eq!(live, live_bytes(&dag, &plan));
    assert_eq!(
        (
            data["peak"]["step"].as_u64(),
            data["peak"]["bytes"].as_u64()
        ),
        (Some(1), Some(4096 + 2048 + 512))
    );
    let items = data["items"].as_array().expect("items");
    assert_eq!(items.len(), dag.buffers.len() + dag.tasks.len());
    for (i, life) in plan.lifetimes.iter().enumerate() {
        assert_eq!(
            [&items[i]["start"], &items[i]["end"], &items[i]["offset"]],
            [life.start, life.end, plan.offsets[i]]
        );
    }
    assert_eq!(
        (items[3]["over"].as_u64(), items[2]["under"].as_u64()),
        (Some(2), Some(3)),
        "computed in place"
    );
    assert_eq!(
        items[1]["made"].to_string() + &items[1]["read"].to_string(),
        "[0][1,3]"
    );
    assert_eq!(
        [&items[1]["layer"], &items[1]["source"]],
        ["stem", "model.rs:7"]
    );
    assert_eq!(data["run"]["why"], "there was no time");
}

#[test]
fn names_cannot_leave_the_data() {
    let (mut dag, plan) = sample();
    dag.tasks[0].name = HOSTILE.into();
    let page = html(&dag, &plan, HOSTILE, Err(HOSTILE));
    let plain = html(&sample().0, &plan, "t", Err("w"));
    for mark in ["<script", "</script", "<!--"] {
        assert_eq!(
            page.matches(mark).count(),
            plain.matches(mark).count(),
            "{mark}"
        );
    }
    let data = data_of(&page);
    assert_eq!(
        [
            &data["title"],
            &data["steps"][0]["name"],
            &data["items"][3]["name"],
            &data["run"]["why"]
        ],
        [HOSTILE; 4]
    );
}

#[test]
fn the_page_needs_no_network() {
    let (dag, plan) = sample();
    let page = html(&dag, &plan, "train", Err("w"));
    let page = page.replace("url(#clip)", "");
    for outside in [
        "http:",
        "https:",
        "src=",
        "@import",
        "url(",
        "<link",
        "fetch(",
        "XMLHttpRequest",
        "import(",
    ] {
        assert!(!page.contains(outside), "{outside}");
    }
    assert!(
        page.contains("default-src 'none'"),
        "the page forbids network access"
    );
}

#[test]
fn buffers_alive_at_the_peak_have_a_reason() {
    let (dag, plan) = sample();
    let why: Vec<Option<String>> = (0..5)
        .map(|b| why_at_peak(&dag, &plan, BufferId(b)))
        .collect();
    let expected = [
        None,
        Some("this kernel reads it; step 3 stem.grad reads it next"),
        Some("this kernel writes it; step 2 scale reads it next"),
        None,
        None,
    ];
    assert_eq!(
        why.iter().map(Option::as_deref).collect::<Vec<_>>(),
        expected
    );
    // Only buffers that are inputs, outputs or both.
    let mut dag = Dag::new();
    for (live_in, live_out) in [(true, false), (true, true)] {
        dag.add_buffer(Buffer {
            live_in,
            live_out,
            ..Buffer::new("b", Kind::Other, 64)
        });
    }
    let empty = crate::plan(&dag, &Options::default()).expect("a valid dag");
    let why = [0, 1].map(|b| why_at_peak(&dag, &empty, BufferId(b)).expect("alive"));
    assert_eq!(
        why,
        ["it is there from the start", "it is handed out at the end"]
    );
    data_of(&html(&dag, &empty, "empty", Ok(&Run::default())));
}

#[test]
fn differences_of_a_run_from_its_plan_are_listed() {
    let (dag, plan) = sample();
    let received = |holder, offset, bytes| ReceivedBytes {
        holder,
        offset,
        bytes,
    };
    let buffer = |b: u32| Holder::Buffer(BufferId(b));
    let step = |received| RunStep {
        start_ns: 0,
        ns: 1500,
        received,
    };
    let mut run = Run {
        steps: vec![
            step(vec![
                received(buffer(0), None, 1000),
                received(buffer(1), Some(plan.offsets[1]), 4096),
            ]),
            step(vec![
                received(buffer(1), Some(plan.offsets[1]), 4096),
                received(
                    Holder::Workspace(TaskId(1)),
                    Some(plan.workspace_offsets[1]),
                    512,
                ),
            ]),
        ],
    };
    assert_eq!(
        (run.strays(&plan), run.peak_bytes()),
        (
            Vec::new(),
            (plan.offsets[1] + 4096).max(plan.workspace_offsets[1] + 512)
        )
    );
    let data = data_of(&html(&dag, &plan, "train", Ok(&run)));
    assert_eq!(
        data["run"]["steps"][0]["received"].to_string(),
        format!("[[1,{},4096]]", plan.offsets[1]),
        "buffers outside the slab are not drawn"
    );
    assert_eq!(
        data["run"]["steps"][1]["received"][1][0].as_u64(),
        Some(5 + 1),
        "a workspace"
    );
    assert_eq!(
        (
            data["run"]["steps"][0]["us"].as_f64(),
            data["run"]["strays"].to_string()
        ),
        (Some(1.5), "[]".into())
    );

    // At another offset, and at a step where it is dead.
    run.steps[0].received[1].offset = Some(plan.offsets[1] + 64);
    run.steps[1]
        .received
        .push(received(buffer(4), Some(plan.offsets[4]), 4));
    assert_eq!(
        run.strays(&plan)
            .iter()
            .map(|(step, h)| (*step, h.holder))
            .collect::<Vec<_>>(),
        [(0, buffer(1)), (1, buffer(4))]
    );
    let strays = &data_of(&html(&dag, &plan, "train", Ok(&run)))["run"]["strays"];
    assert_eq!(strays.as_array().map(Vec::len), Some(2));
    assert!(
        strays[0]
            .as_str()
            .is_some_and(|s| s.starts_with("step 0: stem.conv at ")),
        "{strays}"
    );
}
