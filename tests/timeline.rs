//! The page that shows a plan, in a browser: its texts agree with the planner, and it makes no
//! network request.
//!
//! `SLABWISE_BROWSER`, or else a Chromium on the path. Without one the tests are skipped, but on CI
//! they fail.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use slabwise::{Bytes, Device, Params, Plan, ReceivedBytes, Run, Session};
use slabwise_models::Model;
use slabwise_planner::{BufferId, Holder, Lifetime, live_bytes, peak, report::why_at_peak};

fn browser() -> Option<PathBuf> {
    let named = std::env::var_os("SLABWISE_BROWSER").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome"];
    let found = named.or_else(|| {
        std::env::split_paths(&path).find_map(|folder| {
            names
                .map(|n| folder.join(n))
                .into_iter()
                .find(|p| p.is_file())
        })
    });
    assert!(
        found.is_some() || std::env::var_os("CI").is_none(),
        "CI tests the page in a browser: install chromium"
    );
    if found.is_none() {
        eprintln!("skipped: there is no chromium, and SLABWISE_BROWSER names none");
    }
    found
}

/// Opens a page at a view (the part behind `#`), runs a script in it, and returns the script's
/// result and the URLs that the page requested.
fn visit(browser: &Path, page: &str, view: &str, script: &str) -> (Value, Vec<String>) {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, log) = (
        folder.path().join("plan.html"),
        folder.path().join("net.json"),
    );
    let script = format!(
        "<script>document.body.dataset.result = encodeURIComponent(JSON.stringify((() => {{ {script} }})()));</script></body>"
    );
    std::fs::write(&file, page.replace("</body>", &script)).expect("written");
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-component-update",
        ])
        .args([
            "--no-first-run",
            "--disable-sync",
            "--window-size=1400,800",
            "--virtual-time-budget=2000",
            "--dump-dom",
        ])
        .arg(format!("--log-net-log={}", log.display()))
        .arg(format!(
            "--user-data-dir={}",
            folder.path().join("profile").display()
        ))
        .arg(format!("file://{}#{view}", file.display()))
        .output()
        .expect("a browser that starts");
    let dom = String::from_utf8_lossy(&output.stdout);
    let result = dom
        .split_once("data-result=\"")
        .and_then(|(_, rest)| rest.split_once('"'))
        .map(|(result, _)| percent_decoded(result));
    let result = result.unwrap_or_else(|| {
        panic!(
            "the script did not end:\n{dom:.2000}\n{}",
            String::from_utf8_lossy(&output.stderr)
        )
    });
    let net: Value =
        serde_json::from_slice(&std::fs::read(&log).expect("a log of the network")).expect("JSON");
    // The browser's own requests have an initiator that is `not an origin`; requests of a page have
    // the page's.
    let of_page = |e: &&Value| {
        e["params"]["initiator"]
            .as_str()
            .is_some_and(|who| who != "not an origin")
    };
    let urls = net["events"]
        .as_array()
        .expect("events")
        .iter()
        .filter(of_page)
        .filter_map(|e| e["params"]["url"].as_str());
    let urls = urls.map(String::from).collect();
    (serde_json::from_str(&result).expect("JSON"), urls)
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let hex = |b: u8| char::from(b).to_digit(16).expect("a digit") as u8;
        bytes.push(if byte == b'%' {
            hex(rest.next().expect("two digits")) << 4 | hex(rest.next().expect("two digits"))
        } else {
            byte
        });
    }
    String::from_utf8(bytes).expect("UTF-8")
}

/// A step of the small convolutional network, as planned and as run.
fn recorded() -> (Plan, Run) {
    let params = Params::seeded(0);
    let network = Model::Cnn.build(&params);
    let mut session = Session::new(Device::Cpu, params)
        .expect("a session")
        .with_threads(1);
    let program = network
        .training(&mut session, 4, Model::Cnn.optimizer())
        .expect("a program");
    let (images, labels) = Model::Cnn.batch(4, 1);
    let run = session
        .record(&program, (&images, &labels))
        .expect("a step");
    assert_eq!(run.peak_bytes(), session.last_run().peak_slab_bytes);
    let params = Params::seeded(0);
    let network = Model::Cnn.build(&params);
    let plan = network.plan_training(
        &Session::new(Device::Cpu, params)
            .expect("a session")
            .with_threads(1),
        4,
        Model::Cnn.optimizer(),
    );
    (plan.expect("a plan"), run)
}

/// A buffer that is read after the peak and whose name is unique.
fn kept(plan: &Plan) -> (BufferId, Lifetime) {
    let (dag, offsets) = (plan.dag(), plan.offsets());
    let step = peak(dag, offsets).0 as u64;
    let only = |name: &str| dag.buffers.iter().filter(|b| b.name == name).count() == 1;
    let found = (0u32..)
        .zip(&dag.buffers)
        .zip(&offsets.lifetimes)
        .find(|((_, b), life)| {
            only(&b.name) && !b.layer.is_empty() && life.start < step && life.end > step + 1
        });
    let ((id, _), life) = found.expect("a step saves values for its backward pass");
    (BufferId(id), *life)
}

#[test]
fn a_run_touches_exactly_the_planned_bytes() {
    let (plan, run) = recorded();
    assert_eq!(
        (run.steps.len(), run.strays(plan.offsets())),
        (plan.kernels(), Vec::new())
    );
    assert_eq!(run.peak_bytes(), plan.slab_bytes());
    for (step, id) in run.steps.iter().zip(&plan.offsets().order) {
        let task = &plan.dag().tasks[id.index()];
        let touched = |b: &BufferId| {
            step.received
                .iter()
                .any(|h: &ReceivedBytes| h.holder == Holder::Buffer(*b))
        };
        assert!(
            task.reads.iter().chain(&task.writes).all(touched),
            "{}",
            task.name
        );
    }
    assert!(
        run.steps
            .windows(2)
            .all(|w| w[0].start_ns + w[0].ns <= w[1].start_ns),
        "one after the other"
    );
}

#[test]
fn interactions_show_the_planners_values() {
    let Some(browser) = browser() else { return };
    let (plan, run) = recorded();
    let (dag, offsets) = (plan.dag(), plan.offsets());
    let (id, life) = kept(&plan);
    let buffer = &dag.buffers[id.index()];
    let page = plan.html(Ok(&run));

    // By the URL.
    let step = life.start as usize;
    let view = format!("step={step}&hover={}", buffer.name);
    let read = "const tip = document.getElementById('tip'), at = document.getElementById('at');
        return { hidden: tip.hidden, tip: tip.textContent, live: at.dataset.live, text: at.textContent,
            rows: document.querySelectorAll('#holders tr').length, slider: document.getElementById('slider').value,
            outlines: document.querySelector('.given').getAttribute('d').length, asked: performance.getEntriesByType('resource').length,
            run: document.getElementById('run').textContent };";
    let (seen, urls) = visit(&browser, &page, &view, read);
    let text = |key: &str| seen[key].as_str().expect("a text").to_string();
    let live = live_bytes(dag, offsets);
    assert_eq!(
        (seen["hidden"].as_bool(), text("live"), text("slider")),
        (Some(false), live[step].to_string(), step.to_string())
    );
    assert!(
        text("text").contains(&Bytes(live[step]).to_string())
            && text("text").contains(dag.task_name(offsets.order[step]))
    );
    let why = why_at_peak(dag, offsets, id).expect("it is alive there");
    assert!(why.contains("reads it next"), "{why}");
    let kernel = |step: u64| {
        format!(
            "step {step} {}",
            dag.task_name(offsets.order[step as usize])
        )
    };
    let all = [
        buffer.name.clone(),
        format!("layer {}", buffer.layer),
        format!("{} bytes", buffer.bytes),
        format!("at offset {}", offsets.offsets[id.index()]),
        format!(
            "alive from {} to {}",
            kernel(life.start),
            kernel(life.end - 1)
        ),
        buffer.source.clone(),
        why,
        "as planned".into(),
    ];
    all.iter().for_each(|part| {
        assert!(
            text("tip").contains(part),
            "`{part}` is not in:\n{}",
            text("tip")
        )
    });
    let in_place = |b: usize| offsets.reused.iter().any(|pair| pair.to.index() == b);
    let holds = |b: &usize| {
        let (b, life) = (*b, offsets.lifetimes[*b]);
        dag.buffers[b].bytes > 0
            && life.start + u64::from(in_place(b)) <= step as u64
            && (step as u64) < life.end
    };
    let workspace = usize::from(dag.tasks[offsets.order[step].index()].workspace > 0);
    assert_eq!(
        seen["rows"].as_u64(),
        Some(((0..dag.buffers.len()).filter(holds).count() + workspace) as u64)
    );
    assert!(
        seen["outlines"].as_u64() > Some(0)
            && text("run").contains(&format!("{} of {}", run.peak_bytes(), plan.slab_bytes()))
    );
    assert_eq!((urls, seen["asked"].as_u64()), (Vec::new(), Some(0)));

    // By interaction: the mouse, the slider at every step, the search field, the check box; with a
    // name that is markup.
    let hostile = "<img src=x onerror=alert(1)></script>";
    let mut dag = dag.clone();
    dag.buffers[id.index()].name = hostile.into();
    let page = slabwise_planner::report::html(&dag, offsets, hostile, Ok(&run));
    let act = format!(
        "const rect = document.querySelector('#items rect[data-id=\"{}\"]'), tip = document.getElementById('tip');
        rect.dispatchEvent(new MouseEvent('mouseover', {{ bubbles: true, clientX: 300, clientY: 200 }}));
        const over = tip.textContent, name = tip.querySelector('b').textContent, on = rect.classList.contains('on');
        document.getElementById('svg').dispatchEvent(new MouseEvent('mouseleave'));
        const slider = document.getElementById('slider'), at = document.getElementById('at'), live = [], sums = [];
        for (let step = 0; step <= Number(slider.max); step++) {{
            slider.value = step;
            slider.dispatchEvent(new Event('input'));
            live.push(Number(at.dataset.live));
            sums.push(holders(step).reduce((sum, item) => sum + item.takes, 0));
        }}
        const find = document.getElementById('find');
        find.value = 'IMG SRC';
        find.dispatchEvent(new Event('input'));
        const found = document.getElementById('found').dataset.count, dim = document.querySelectorAll('.item.dim').length;
        const box = document.getElementById('measured');
        box.checked = false;
        box.dispatchEvent(new Event('change'));
        return {{ over, name, on, hidden: tip.hidden, live, sums, found, dim, all: document.querySelectorAll('.item').length,
            outlines: document.querySelector('.given').getAttribute('d').length, images: document.images.length,
            title: document.getElementById('title').textContent }};",
        id.0
    );
    let (seen, urls) = visit(&browser, &page, "", &act);
    assert_eq!(
        (&seen["name"], &seen["title"], &seen["images"]),
        (
            &Value::from(hostile),
            &Value::from(hostile),
            &Value::from(0)
        )
    );
    assert!(
        seen["over"]
            .as_str()
            .is_some_and(|t| t.contains(&kernel(life.end - 1))),
        "{}",
        seen["over"]
    );
    assert_eq!(
        (seen["on"].as_bool(), seen["hidden"].as_bool()),
        (Some(true), Some(true)),
        "shown while pointed at, hidden after"
    );
    assert_eq!(
        seen["live"],
        Value::from(live.clone()),
        "live bytes at each step"
    );
    assert_eq!(seen["sums"], Value::from(live), "who holds them adds up");
    assert_eq!(
        (seen["found"].as_str(), seen["dim"].as_u64()),
        (Some("1"), seen["all"].as_u64().map(|n| n - 1))
    );
    assert_eq!((seen["outlines"].as_u64(), urls), (Some(0), Vec::new()));

    // The test detects a page that makes a request.
    let (_, urls) = visit(
        &browser,
        "<html><body><img src='http://127.0.0.1:9/x.png'></body></html>",
        "",
        "return 0;",
    );
    assert_eq!(urls, ["http://127.0.0.1:9/x.png"]);

    // Without a run, the page says so, and draws none.
    let told = "return { run: document.getElementById('run').textContent, shown: !document.getElementById('showrun').hidden,
        outlines: document.querySelector('.given').getAttribute('d').length };";
    let (seen, _) = visit(&browser, &plan.html(Err("there was no time")), "", told);
    assert!(
        seen["run"]
            .as_str()
            .is_some_and(|t| t.contains("Nothing was run: there was no time")),
        "{seen}"
    );
    assert_eq!(
        (seen["shown"].as_bool(), seen["outlines"].as_u64()),
        (Some(false), Some(0))
    );
}
