//! The plan of a program as its user sees it.

mod transfers;

use std::fmt;
use std::path::Path;
use std::time::Instant;

use serde_json::json;
use slabwise_planner::files;
use slabwise_planner::report::Run;
use slabwise_planner::{
    Buffer, BufferId, Bytes, Checked, Dag, Holder, Lifetime, Options, OrderPolicy, Plan as Offsets,
    Space, Task, TaskId,
};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::MemoryUse;
use crate::words::count;

pub use transfers::Communication;

/// Bytes that weights and state take for as long as the session lives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Persistent {
    /// Weights.
    pub weights: u64,
    /// Everything else: optimizer moments, counters, random state.
    pub state: u64,
    /// Slots for the inputs of the next steps, if there are any. They count as part of the slab,
    /// not of the weights and state.
    pub prefetch: u64,
    /// The staging buffer on a CUDA device for large inputs of the next run, which are copied there
    /// during the run before; programs of a session share it. It counts as part of the slab, too.
    pub staging: u64,
}

/// The measures that keep a program within its budget: recomputed kernels, prologues,
/// micro-batches, and values offloaded to the host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BudgetReport {
    /// The recomputed tasks of the plan's dag: every run of a kernel but its first.
    pub tasks: Vec<TaskId>,
    /// The values that leave the slab for the host, in order, over the
    /// [`Offload`](crate::memory::offload::Offload) that the session has.
    pub offloaded: Vec<OffloadedValue>,
    /// The additional time that they take, as a fraction of the step's modelled time, waiting for
    /// copies included.
    pub overhead: f64,
    /// The slab if every kernel ran once.
    pub once: u64,
    /// A lower bound of the slab, for any recomputation.
    pub floor: u64,
    /// The kernels that run on micro-batches.
    pub micro_batched: Option<MicroBatched>,
    /// Convolutions of the step that compute their image in a prologue, so that it is never in
    /// memory.
    pub prologues: usize,
}

/// The kernels that run on micro-batches because of a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatched {
    /// The number of kernels.
    pub kernels: usize,
    /// The number of micro-batches.
    pub count: u32,
    /// Examples of every micro-batch but the last.
    pub examples: u32,
}

impl fmt::Display for MicroBatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} kernels in {} micro-batches of {} examples",
            self.kernels, self.count, self.examples
        )
    }
}

/// A value of data-dependent size, which therefore has no place in the plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataDependentBuffer {
    /// Its name.
    pub name: String,
    /// Its type and shape.
    pub shape: String,
    /// Its data-dependent lengths, and the lines that determine them.
    pub why: String,
}

/// An offload interval: a value is copied to the host, and prefetched for its next use. Seconds are
/// modelled.
#[derive(Clone, Debug, PartialEq)]
pub struct OffloadedValue {
    /// Its name in the plan.
    pub name: String,
    /// The bytes of the slab that are free in between.
    pub bytes: Bytes,
    /// The kernel that uses it last before.
    pub used: String,
    /// The kernel that reads it next.
    pub read: String,
    /// The steps between in which its bytes are free.
    pub steps: u32,
    /// The time of the two copies, most of it while kernels run.
    pub copying_s: f64,
    /// A lower bound of the time to recompute it instead; none if that is not possible.
    pub computing_s: Option<f64>,
}

/// One stage of a compilation: how long it took, and how much came out of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompileStage {
    /// The name of the stage, as in `simplify`, `fuse`, `plan`.
    pub name: &'static str,
    /// How long it took.
    pub seconds: f64,
    /// The nodes of the graph that it gave, or the kernels from fusion on.
    pub count: usize,
}

/// Times the stages of a compilation, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    started: Instant,
    last: Instant,
    stages: Vec<CompileStage>,
}

impl Clock {
    /// The first stage began at this time.
    pub fn since(started: Instant) -> Self {
        Clock {
            started,
            last: started,
            stages: Vec::new(),
        }
    }

    /// A stage has ended, with this number of nodes or kernels; the next begins.
    pub fn ended(&mut self, name: &'static str, count: usize) {
        let now = Instant::now();
        self.stages.push(CompileStage {
            name,
            seconds: (now - self.last).as_secs_f64(),
            count,
        });
        self.last = now;
    }
}

/// The memory plan of a program.
pub struct Plan {
    dag: Dag,
    offsets: Checked<Offsets>,
    details: PlanDetails,
}

/// The parts of a plan beside the planner's problem and answer.
pub(crate) struct PlanDetails {
    pub name: String,
    pub device: Device,
    /// The bounds of named dimensions, as text.
    pub bounds: String,
    pub persistent: Persistent,
    pub budget_report: BudgetReport,
    pub clock: Clock,
    pub data_dependent: Vec<DataDependentBuffer>,
    /// The padded values, with the bytes of their padding.
    pub padding: Vec<(BufferId, u64)>,
    /// The number of values whose channels are innermost.
    pub channels_last: usize,
    pub communication: Option<Communication>,
}

/// The bytes between the rows of values that begin at whole sectors of a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaddingReport {
    /// The number of values with such rows.
    pub values: usize,
    /// The bytes of their padding, of all of them together.
    pub bytes: u64,
    /// The bytes of padding that are live at the peak.
    pub at_peak: u64,
}

impl Plan {
    pub(crate) fn new(dag: Dag, offsets: Checked<Offsets>, details: PlanDetails) -> Self {
        Plan {
            dag,
            offsets,
            details,
        }
    }

    /// Values of data-dependent size: they lie in the pool, or in bytes that the plan leaves free.
    pub fn data_dependent(&self) -> &[DataDependentBuffer] {
        &self.details.data_dependent
    }

    /// The number of images internal to the program that are stored with their channels innermost.
    pub fn channels_last(&self) -> usize {
        self.details.channels_last
    }

    /// The bytes of padding between rows.
    pub fn padding(&self) -> PaddingReport {
        let padding = &self.details.padding;
        let at_peak = slabwise_planner::holders_at_peak(&self.dag, &self.offsets);
        let is_live = |id: BufferId| {
            at_peak
                .iter()
                .any(|(holder, _)| matches!(holder, Holder::Buffer(b) if *b == id))
        };
        let live = padding.iter().filter(|(id, _)| is_live(*id));
        PaddingReport {
            values: padding.len(),
            bytes: padding.iter().map(|(_, bytes)| bytes).sum(),
            at_peak: live.map(|(_, bytes)| bytes).sum(),
        }
    }

    /// The error for a plan that exceeds the limit beside the memory that is in use.
    pub(crate) fn over_budget(&self, budget: Bytes, memory: &MemoryUse) -> Error {
        let ahead = self.details.persistent.prefetch;
        let beside = memory.persistent.saturating_add(memory.queues);
        let needed = self.bytes_beside(memory);
        let floor = memory.slab.max(self.details.budget_report.floor);
        let mut holders = self.holders(5);
        for (bytes, of) in [
            (memory.slab, "the slab"),
            (memory.queues, "prefetch queues"),
        ] {
            if bytes > 0 {
                holders = format!(
                    "{holders}; {of} of programs compiled before, {}",
                    Bytes(bytes)
                );
            }
        }
        Error::Budget {
            program: self.details.name.clone(),
            budget,
            needed: Bytes(needed),
            persistent: Bytes(memory.persistent),
            slab: Bytes(needed - beside),
            floor: Bytes(beside.saturating_add(ahead).saturating_add(floor)),
            holders,
        }
    }

    /// The bytes of a session with this program: weights and state, the largest slab, and all
    /// prefetch queues. Staging buffers are given up where memory is short.
    pub(crate) fn bytes_beside(&self, memory: &MemoryUse) -> u64 {
        let slab = memory.slab.max(self.offsets.height);
        [memory.queues, self.details.persistent.prefetch, slab]
            .into_iter()
            .fold(memory.persistent, u64::saturating_add)
    }

    /// The same error, with the largest buffers at the peak if it is about memory.
    #[doc(hidden)]
    pub fn with_holders(&self, error: Error) -> Error {
        match error {
            Error::OutOfMemory { what, bytes, more } => Error::OutOfMemory {
                what,
                bytes,
                more: format!("{more}; largest at the peak: {}", self.holders(5)),
            },
            other => other,
        }
    }

    /// The program's name.
    pub fn name(&self) -> &str {
        &self.details.name
    }

    /// Kernels in a step; starting a copy or a collective between ranks, or waiting for one, is
    /// none.
    pub fn kernels(&self) -> usize {
        let tasks = self.dag.tasks.iter();
        let halves = self.communication().map_or(0, |c| 2 * c.collectives);
        tasks.filter(|task| !self.copies(task)).count() - halves
    }

    /// The exchange of bytes between ranks, if there are several.
    pub fn communication(&self) -> Option<&Communication> {
        self.details.communication.as_ref()
    }

    fn copies(&self, task: &Task) -> bool {
        task.reads
            .iter()
            .chain(&task.writes)
            .any(|b| self.dag.buffers[b.index()].space == Space::Host)
    }

    /// Bytes of the host's memory for values that have left the slab.
    pub fn host_bytes(&self) -> u64 {
        self.offsets.host_height
    }

    /// Bytes of the slab: the plan's height, and the slots of the next inputs.
    pub fn slab_bytes(&self) -> u64 {
        self.offsets
            .height
            .saturating_add(self.details.persistent.prefetch)
            .saturating_add(self.details.persistent.staging)
    }

    /// The bytes that any assignment of offsets needs for this order: the largest sum of live
    /// buffers.
    pub fn lower_bound_bytes(&self) -> u64 {
        self.offsets.lower_bound
    }

    /// The bytes of a slab in which no two buffers share bytes.
    pub fn without_reuse_bytes(&self) -> u64 {
        self.offsets.without_reuse
    }

    /// The slab without in-place results, for which the planner runs again.
    pub fn without_in_place_bytes(&self) -> u64 {
        // The order of copies is not the planner's to choose.
        let order = if self.host_bytes() > 0 || self.communication().is_some() {
            OrderPolicy::Program
        } else {
            OrderPolicy::MinPeak
        };
        let options = Options {
            in_place: false,
            order,
            ..Options::default()
        };
        slabwise_planner::plan(&self.dag, &options).map_or(self.slab_bytes(), |p| p.height)
    }

    /// How many kernels write a result over an operand.
    pub fn in_place_count(&self) -> usize {
        self.offsets.reused.len()
    }

    /// Weights and state this program uses.
    pub fn persistent(&self) -> &Persistent {
        &self.details.persistent
    }

    /// The measures that keep the program within its budget.
    pub fn budget_report(&self) -> &BudgetReport {
        &self.details.budget_report
    }

    /// The recomputed kernels in order, each with the bytes that need not be live until then, and
    /// with the kernel that reads them next.
    pub fn recomputed(&self) -> Vec<(&str, Bytes, &str)> {
        let order = &self.offsets.order;
        let at = |task: &TaskId| order.iter().position(|t| t == task);
        let mut steps: Vec<usize> = self
            .details
            .budget_report
            .tasks
            .iter()
            .filter_map(at)
            .collect();
        steps.sort_unstable();
        let row = |step: usize| {
            let task = &self.dag.tasks[order[step].index()];
            let bytes = task
                .writes
                .iter()
                .map(|b| self.dag.buffers[b.index()].occupied())
                .sum();
            let reads = |next: &&TaskId| {
                self.dag.tasks[next.index()]
                    .reads
                    .iter()
                    .any(|b| task.writes.contains(b))
            };
            let reader = order[step + 1..]
                .iter()
                .find(reads)
                .map_or("nothing", |next| self.dag.task_name(*next));
            (task.name.as_str(), Bytes(bytes), reader)
        };
        steps.into_iter().map(row).collect()
    }

    /// Seconds the compilation took.
    pub fn compile_seconds(&self) -> f64 {
        (self.details.clock.last - self.details.clock.started).as_secs_f64()
    }

    /// The stages of the compilation in order, each with its time and the size of its output.
    pub fn compile_stages(&self) -> &[CompileStage] {
        &self.details.clock.stages
    }

    /// Drops the staging buffer of inputs, because the device has no memory for it.
    #[doc(hidden)]
    pub fn without_staging(&mut self) {
        self.details.persistent.staging = 0;
    }

    /// A stage after the plan has ended.
    #[doc(hidden)]
    pub fn stage_ended(&mut self, name: &'static str) {
        self.details.clock.ended(name, self.kernels());
    }

    /// The planner's problem: tasks and buffers.
    pub fn dag(&self) -> &Dag {
        &self.dag
    }

    /// The planner's answer, as checked.
    pub fn offsets(&self) -> &Checked<Offsets> {
        &self.offsets
    }

    /// The kernels in the order they run, and the copies that start or are waited for between them.
    pub fn steps(&self) -> impl Iterator<Item = &str> {
        self.offsets.order.iter().map(|&t| self.dag.task_name(t))
    }

    /// The largest holders of bytes at the peak, as text.
    pub fn holders(&self, most: usize) -> String {
        let all = slabwise_planner::holders_at_peak(&self.dag, &self.offsets);
        let name = |h: &Holder| match h {
            Holder::Buffer(b) => self.dag.buffer_name(*b).to_string(),
            Holder::Workspace(t) => format!("workspace of {}", self.dag.task_name(*t)),
        };
        let mut shown: Vec<String> = all
            .iter()
            .take(most)
            .map(|(h, bytes)| format!("{} {}", name(h), Bytes(*bytes)))
            .collect();
        if all.len() > most {
            shown.push(format!("{} more", all.len() - most));
        }
        shown.join(", ")
    }

    /// The plan as JSON: the order of the kernels, and where buffers and workspaces lie.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let Offsets {
            order,
            offsets,
            lifetimes,
            workspace_offsets,
            ..
        } = &*self.offsets;
        let buffers = self.dag.buffers.iter().zip(offsets).zip(lifetimes);
        let buffer = |((buffer, offset), life): ((&Buffer, &u64), &Lifetime)| {
            json!({
                "name": buffer.name,
                "offset": offset,
                "bytes": buffer.bytes,
                "start": life.start,
                "end": life.end,
            })
        };
        let step = |task: &TaskId| {
            json!({
                "name": self.dag.task_name(*task),
                "workspace_offset": workspace_offsets[task.index()],
                "workspace_bytes": self.dag.tasks[task.index()].workspace,
            })
        };
        json!({
            "program": self.details.name,
            "slab_bytes": self.slab_bytes(),
            "lower_bound_bytes": self.offsets.lower_bound,
            "steps": order.iter().map(step).collect::<Vec<_>>(),
            "buffers": buffers.map(buffer).collect::<Vec<_>>(),
        })
    }

    /// The plan as a picture: buffers as rectangles over steps × bytes.
    pub fn svg(&self) -> String {
        slabwise_planner::report::svg(&self.dag, &self.offsets, &self.details.name)
    }

    /// The plan as an interactive page, one HTML file without external resources: buffers as
    /// rectangles over steps × bytes, each with its name, layer, line and why it is alive at the
    /// peak. The measured use of a `run` is drawn over it; without one, the page shows `Err`'s
    /// reason why nothing was run.
    pub fn html(&self, run: std::result::Result<&Run, &str>) -> String {
        let bounds = if self.details.bounds.is_empty() {
            String::new()
        } else {
            format!(" · {}", self.details.bounds)
        };
        let title = format!("{} · {}{bounds}", self.details.name, self.details.device);
        slabwise_planner::report::html(&self.dag, &self.offsets, &title, run)
    }

    /// Writes [`Plan::svg`] to a file, which is replaced as a whole.
    ///
    /// # Errors
    /// An error of the system; an earlier file is unchanged then.
    pub fn write_svg(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        files::replace(path, self.svg().as_bytes()).map_err(|source| Error::Io {
            path: path.into(),
            source,
        })
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let o = &self.offsets;
        let bounds = if self.details.bounds.is_empty() {
            String::new()
        } else {
            format!(" · {}", self.details.bounds)
        };
        writeln!(
            f,
            "{} · {}{bounds} · {} kernels",
            self.details.name,
            self.details.device,
            self.kernels()
        )?;
        writeln!(
            f,
            "  persistent   weights {} · state {}",
            Bytes(self.details.persistent.weights),
            Bytes(self.details.persistent.state)
        )?;
        let above =
            o.height.saturating_sub(o.lower_bound) as f64 / o.lower_bound.max(1) as f64 * 100.0;
        writeln!(
            f,
            "  slab         {}   lower bound {} · above it {above:.1} % · without reuse {}",
            Bytes(o.height),
            Bytes(o.lower_bound),
            Bytes(o.without_reuse)
        )?;
        let in_place = slabwise_planner::saved_in_place(&self.dag, o);
        let reuse = o
            .without_reuse
            .saturating_sub(o.height)
            .saturating_sub(in_place);
        write!(
            f,
            "  saved by     reuse {} · in-place {} ({})",
            Bytes(reuse),
            Bytes(in_place),
            o.reused.len()
        )?;
        let BudgetReport {
            tasks,
            offloaded,
            micro_batched,
            overhead,
            once,
            prologues,
            ..
        } = &self.details.budget_report;
        let how = [
            ("recompute", tasks.len()),
            ("prologues", *prologues),
            ("offload", offloaded.len()),
        ];
        let how = how.map(|(how, count)| (count > 0).then(|| (how, count.to_string())));
        let slices = micro_batched.map(|slices| ("micro-batches", slices.to_string()));
        let (ways, counts): (Vec<&str>, Vec<String>) =
            slices.into_iter().chain(how.into_iter().flatten()).unzip();
        if !ways.is_empty() {
            let saved = Bytes(once.saturating_sub(o.height));
            write!(
                f,
                " · {} {saved} ({}, +{:.1} % time)",
                ways.join(" and "),
                counts.join(" and "),
                100.0 * overhead
            )?;
        }
        writeln!(f)?;
        if self.channels_last() > 0 {
            writeln!(
                f,
                "  channels     innermost in {}",
                count(self.channels_last(), "image")
            )?;
        }
        let padding = self.padding();
        if padding.values > 0 {
            writeln!(
                f,
                "  padded       rows of {} by {} in all, {} at the peak",
                count(padding.values, "value"),
                Bytes(padding.bytes),
                Bytes(padding.at_peak)
            )?;
        }
        if !self.details.data_dependent.is_empty() {
            writeln!(
                f,
                "  pool         {} of data-dependent size, in gaps of the slab where they fit:",
                self.details.data_dependent.len()
            )?;
            for DataDependentBuffer { name, shape, why } in &self.details.data_dependent {
                writeln!(f, "               {name} {shape}: {why}")?;
            }
        }
        self.write_host(f)?;
        if let Some(communication) = self.communication() {
            writeln!(f, "  ranks        {communication}")?;
        }
        let Persistent {
            prefetch, staging, ..
        } = self.details.persistent;
        let waiting = [
            (prefetch, "in slots ahead"),
            (staging, "on their way to the next run"),
        ];
        let waiting = waiting
            .iter()
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(bytes, how)| format!("{} {how}", Bytes(*bytes)));
        let waiting: Vec<String> = waiting.collect();
        if !waiting.is_empty() {
            writeln!(f, "  inputs       {}", waiting.join(" · "))?;
        }
        let (step, bytes) = slabwise_planner::peak(&self.dag, o);
        let task = o.order.get(step).map_or("", |&t| self.dag.task_name(t));
        write!(
            f,
            "  peak         {} at step {step} {task}: {}",
            Bytes(bytes),
            self.holders(4)
        )
    }
}
