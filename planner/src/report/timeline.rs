//! A plan as an interactive page: one HTML file without external resources, drawn from JSON data
//! that it contains.
//!
//! All contents of the page are computed here, where they can be tested; the script only positions,
//! hides and shows them. Names reach the page as JSON and are inserted as text, never as markup.

use super::svg::{colours, escaped};
use crate::bytes::Bytes;
use crate::dag::{BufferId, Dag, Kind, TaskId};
use crate::plan::{Holder, Plan, live_bytes, peak};
use serde_json::{Value, json};

/// The page around the data, with the marks `%TITLE%` and `%DATA%`.
const PAGE: &str = include_str!("timeline/page.html");

/// Bytes that a kernel received in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedBytes {
    /// The buffer, or the workspace.
    pub holder: Holder,
    /// The actual offset in the slab; `None` if the bytes were elsewhere, like inputs that stay on
    /// the device.
    pub offset: Option<u64>,
    /// The number of bytes.
    pub bytes: u64,
}

/// A step of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunStep {
    /// The start of its kernel, in nanoseconds since the start of the run.
    pub start_ns: u64,
    /// The duration of its kernel.
    pub ns: u64,
    /// The bytes that it received.
    pub received: Vec<ReceivedBytes>,
}

/// The bytes that each step's kernel received in an observed run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// The steps, in the plan's order.
    pub steps: Vec<RunStep>,
}

impl Run {
    /// The end of the highest byte of the slab that a kernel received.
    pub fn peak_bytes(&self) -> u64 {
        let ends = self
            .received()
            .filter_map(|(_, h)| Some(h.offset?.saturating_add(h.bytes)));
        ends.max().unwrap_or(0)
    }

    /// The bytes received at another offset than planned, or at a step where the plan has none for
    /// the holder.
    pub fn strays(&self, plan: &Plan) -> Vec<(usize, ReceivedBytes)> {
        let astray = |step: usize, h: &ReceivedBytes| {
            let Some(offset) = h.offset.filter(|_| h.bytes > 0) else {
                return false;
            };
            match h.holder {
                Holder::Buffer(b) => {
                    !plan.lifetimes[b.index()].contains(step as u64)
                        || plan.offsets[b.index()] != offset
                }
                Holder::Workspace(t) => {
                    plan.order.get(step) != Some(&t) || plan.workspace_offsets[t.index()] != offset
                }
            }
        };
        self.received()
            .filter(|(step, h)| astray(*step, h))
            .collect()
    }

    fn received(&self) -> impl Iterator<Item = (usize, ReceivedBytes)> {
        self.steps
            .iter()
            .enumerate()
            .flat_map(|(at, step)| step.received.iter().map(move |h| (at, *h)))
    }
}

/// A page that shows a plan: steps to the right, bytes upwards, each buffer and workspace a
/// rectangle. Pointing at one shows its name, layer, bytes, place, steps, source and the reason why
/// it is alive at the peak; a slider selects a step and lists the holders of its bytes; a field
/// searches names. A `run` is drawn over the plan; without one, the page shows the reason.
///
/// The part of the address after `#` is the view, as
/// `step=12&hover=stem.relu&find=conv&measured=0`.
///
/// # Panics
/// If the plan, or the run, is not one of this dag.
pub fn html(dag: &Dag, plan: &Plan, title: &str, run: Result<&Run, &str>) -> String {
    // In a script element, only `</script` and `<!--` have a meaning, and both contain `<`.
    let data = data(dag, plan, title, run)
        .to_string()
        .replace('<', "\\u003c");
    let (head, rest) = PAGE
        .split_once("%TITLE%")
        .expect("the page has a place for its title");
    let (middle, tail) = rest
        .split_once("%DATA%")
        .expect("the page has a place for its data");
    [head, &escaped(title), middle, &data, tail].concat()
}

fn data(dag: &Dag, plan: &Plan, title: &str, run: Result<&Run, &str>) -> Value {
    let live = live_bytes(dag, plan);
    let (peak_step, peak_bytes) = peak(dag, plan);
    let name = |step: usize| plan.order.get(step).map_or("", |&task| dag.task_name(task));
    let steps = live
        .iter()
        .enumerate()
        .map(|(step, &bytes)| json!({ "name": name(step), "live": bytes }));
    let kinds = Kind::ALL.into_iter().map(|kind| {
        let (fill, stroke) = colours(kind);
        json!([kind.label(), fill, stroke])
    });
    json!({
        "title": title,
        "slab": plan.height,
        "bound": plan.lower_bound,
        "apart": plan.without_reuse,
        "peak": { "step": peak_step, "bytes": peak_bytes },
        "kinds": kinds.collect::<Value>(),
        "steps": steps.collect::<Value>(),
        "items": items(dag, plan),
        "run": run.map_or_else(|why| json!({ "why": why }), |run| measured(dag, plan, run)),
    })
}

/// The buffers in their order, then the workspaces of all tasks in theirs: an item's index is its
/// id in the page.
fn items(dag: &Dag, plan: &Plan) -> Value {
    let uses = uses(dag, plan);
    let (peak, _) = peak(dag, plan);
    let mut step_of = vec![0; dag.tasks.len()];
    plan.order
        .iter()
        .enumerate()
        .for_each(|(step, task)| step_of[task.index()] = step);
    let kind = |kind: Kind| Kind::ALL.iter().position(|k| *k == kind);
    let pair = |at: &dyn Fn(&crate::dag::MayReuse) -> BufferId, i: usize| {
        plan.reused.iter().find(|p| at(p).index() == i)
    };
    let buffers = dag.buffers.iter().enumerate().map(|(i, buffer)| {
        let (life, id) = (plan.lifetimes[i], BufferId(i as u32));
        let [made, read]: [Vec<usize>; 2] = [true, false].map(|writes| {
            uses[i]
                .iter()
                .filter(|u| u.1 == writes)
                .map(|u| u.0)
                .collect()
        });
        json!({
            "name": buffer.name,
            "kind": kind(buffer.kind),
            "layer": buffer.layer,
            "source": buffer.source,
            "bytes": buffer.bytes,
            "takes": buffer.occupied_on_device(),
            "offset": plan.offsets[i],
            "start": life.start,
            "end": life.end,
            "over": pair(&|p| p.to, i).map(|p| p.from.0),
            "under": pair(&|p| p.from, i).map(|p| p.to.0),
            "made": made,
            "read": read,
            "in": buffer.live_in,
            "out": buffer.live_out,
            "why": why_at(dag, plan, peak, id),
        })
    });
    let workspaces = dag.tasks.iter().enumerate().map(|(t, task)| {
        let step = step_of[t];
        json!({
            "name": format!("workspace of {}", task.name),
            "kind": kind(Kind::Workspace),
            "layer": "",
            "source": "",
            "bytes": task.workspace,
            "takes": task.workspace_occupied(),
            "offset": plan.workspace_offsets[t],
            "start": step,
            "end": step + usize::from(task.workspace > 0),
            "over": null,
            "under": null,
            "made": [step],
            "read": [],
            "in": false,
            "out": false,
            "why": (step == peak && task.workspace > 0).then_some("this kernel needs it while it runs"),
        })
    });
    buffers.chain(workspaces).collect()
}

/// For each buffer, the steps at which it is touched, and whether it is written there.
fn uses(dag: &Dag, plan: &Plan) -> Vec<Vec<(usize, bool)>> {
    let mut uses: Vec<Vec<(usize, bool)>> = vec![Vec::new(); dag.buffers.len()];
    for (step, task) in plan.order.iter().map(|t| &dag.tasks[t.index()]).enumerate() {
        for (list, writes) in [(&task.reads, false), (&task.writes, true)] {
            for b in list {
                if uses[b.index()].last() != Some(&(step, writes)) {
                    uses[b.index()].push((step, writes));
                }
            }
        }
    }
    uses
}

/// The reason why a buffer holds bytes at the step with the most live bytes: a kernel that uses it
/// there, its next use, or that it is an output. `None` if it holds no bytes there.
///
/// # Panics
/// If the plan is not one of this dag.
pub fn why_at_peak(dag: &Dag, plan: &Plan, buffer: BufferId) -> Option<String> {
    why_at(dag, plan, peak(dag, plan).0, buffer)
}

fn why_at(dag: &Dag, plan: &Plan, step: usize, buffer: BufferId) -> Option<String> {
    let (life, of) = (plan.lifetimes[buffer.index()], &dag.buffers[buffer.index()]);
    if !life.contains(step as u64) {
        return None;
    }
    let touches = |list: &[BufferId]| list.contains(&buffer);
    let next = |writes: bool| {
        let later = plan.order.iter().enumerate().skip(step + 1);
        let found = later
            .map(|(at, t)| (at, &dag.tasks[t.index()]))
            .find(|(_, t)| touches(if writes { &t.writes } else { &t.reads }));
        found.map(|(at, task)| format!("step {at} {}", task.name))
    };
    let mut reasons = Vec::new();
    if let Some(task) = plan.order.get(step).map(|t| &dag.tasks[t.index()]) {
        let here = [
            (touches(&task.reads), "this kernel reads it"),
            (touches(&task.writes), "this kernel writes it"),
        ];
        reasons.extend(
            here.into_iter()
                .filter(|(is, _)| *is)
                .map(|(_, text)| text.to_string()),
        );
    }
    if let Some(pair) = plan
        .reused
        .iter()
        .find(|p| p.to == buffer && life.start == step as u64)
    {
        reasons.push(format!("on the bytes of {}", dag.buffer_name(pair.from)));
    }
    match (next(false), next(true), of.live_out) {
        (Some(reader), ..) => reasons.push(format!("{reader} reads it next")),
        (None, Some(writer), _) => reasons.push(format!("{writer} writes it next")),
        (None, None, true) => reasons.push("it is handed out at the end".into()),
        (None, None, false) => {}
    }
    if reasons.is_empty() {
        // A buffer that exists from the start is live for a step, even without a use.
        reasons.push("it is there from the start".into());
    }
    Some(reasons.join("; "))
}

/// A run as data of the page: the bytes that each kernel received, by item number.
fn measured(dag: &Dag, plan: &Plan, run: &Run) -> Value {
    let item = |holder: Holder| match holder {
        Holder::Buffer(b) => b.index(),
        Holder::Workspace(t) => dag.buffers.len() + t.index(),
    };
    let step = |step: &RunStep| {
        let received = step
            .received
            .iter()
            .filter_map(|h| Some(json!([item(h.holder), h.offset?, h.bytes])));
        json!({ "us": step.ns as f64 / 1e3, "received": received.collect::<Value>() })
    };
    let strays = run.strays(plan);
    let stray = |(step, h): &(usize, ReceivedBytes)| {
        let name = match h.holder {
            Holder::Buffer(b) => dag.buffer_name(b).to_string(),
            Holder::Workspace(TaskId(t)) => format!("workspace of {}", dag.tasks[t as usize].name),
        };
        format!(
            "step {step}: {name} at {}",
            h.offset
                .map_or("no offset".into(), |at| Bytes(at).to_string())
        )
    };
    json!({
        "peak": run.peak_bytes(),
        "steps": run.steps.iter().map(step).collect::<Value>(),
        "strays": strays.iter().map(stray).collect::<Value>(),
    })
}

#[cfg(test)]
mod tests;
