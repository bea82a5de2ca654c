//! The trace format of Chrome, which Perfetto opens: kernels, lifetimes of blocks, counters,
//! failures.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::MemoryProfile;
use slabwise_pool::Action;

/// The recorded events as `{"traceEvents": […]}`: a span for each block (`b` and `e` with the
/// number of the allocation as id) and each kernel (`X`), counters of the bytes in use and
/// reserved, instants where requests failed. Times are microseconds.
pub fn trace_events_json(memory: impl Into<MemoryProfile>) -> String {
    let memory = memory.into();
    let mut rows = vec![
        json!({"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "slabwise"}}),
        json!({"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": format!("memory: {}", memory.manager)}}),
    ];
    if !memory.kernels.is_empty() {
        rows.push(json!({"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "kernels"}}));
    }
    let us = |ns: u64| ns as f64 / 1000.0;
    let kernel = |k: &super::Kernel| json!({"ph": "X", "pid": 1, "tid": 2, "cat": "kernel", "name": k.name, "ts": us(k.start_ns), "dur": us(k.ns)});
    rows.extend(memory.kernels.iter().map(kernel));
    let mut open = HashSet::new();
    for event in &memory.events {
        let tag = memory.tag(event.tag);
        let ts = us(event.time_ns);
        let row = |ph: &str, name: &str| json!({"ph": ph, "pid": 1, "tid": 1, "ts": ts, "name": name, "cat": "memory"});
        let span = |ph: &str| {
            let mut span = row(ph, &tag.name);
            span["id"] = json!(event.allocation);
            span
        };
        match event.action {
            Action::Alloc => {
                open.insert(event.allocation);
                let mut begin = span("b");
                let line = tag
                    .location
                    .map(|at| format!("{}:{}", at.file(), at.line()));
                begin["args"] = json!({"bytes": event.region.bytes, "layer": &*tag.layer, "line": line, "stream": event.stream.0});
                rows.push(begin);
            }
            Action::Free if open.remove(&event.allocation) => rows.push(span("e")),
            Action::Oom => {
                let mut instant = row("i", "out of memory");
                (instant["s"], instant["args"]) = (
                    json!("p"),
                    json!({"bytes": event.region.bytes, "for": &*tag.name}),
                );
                rows.push(instant);
            }
            Action::MoveTo => {
                let mut instant = row("i", "moved");
                (instant["s"], instant["args"]) = (
                    json!("t"),
                    json!({"bytes": event.region.bytes, "what": &*tag.name}),
                );
                rows.push(instant);
            }
            // A block allocated before the first event kept has no beginning; a move away is no
            // end.
            Action::Free | Action::MoveFrom | Action::SegmentAlloc | Action::SegmentFree => {}
        }
        let mut counters = row("C", "bytes");
        counters["args"] = json!({"in use": event.bytes_in_use, "reserved": event.pool_bytes});
        rows.push(counters);
    }
    Value::from_iter([
        ("traceEvents", Value::Array(rows)),
        ("displayTimeUnit", json!("ns")),
    ])
    .to_string()
}
