//! Offloading: dags in which idle buffers are moved to the host.
//!
//! Offloading a buffer is a rewriting of the dag, as recomputing it is (see
//! [`Repeated`](crate::Repeated)). The copy on the host is a separate buffer in the host's space,
//! and the prefetched copy is a separate buffer in the slab. Each copy operation is two tasks: one
//! starts it and one waits for its end. Both touch source and destination. Therefore the rules for
//! all tasks cover copies too: the source lives until the copy has ended, the destination lives
//! from its start, and each reader of the destination depends on its end. The result is planned and
//! checked like any other dag; in addition, [`check_offload`](crate::check_offload) verifies that
//! it does the work of the original dag.
//!
//! Sources of the ideas: Rhu et al., *vDNN* (2016), for copies on separate engines while kernels
//! run; Peng et al., *Capuchin* (2020), for choosing between copying and recomputing by the cost of
//! each for the bytes it frees; Beaumont et al., *Efficient Combination of Rematerialization and
//! Offloading for Training DNNs* (2021).

mod engines;

pub use engines::Transfer;
pub(crate) use engines::{Engines, Event, IdleInterval, events};

use crate::dag::{Buffer, BufferId, Dag, MayReuse, Space, Task, TaskId};
use rustc_hash::FxHashMap;

/// The link between device and host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// The time to copy a byte, in the unit of [`Task::cost`]. Copies in both directions at once do
    /// not slow each other down.
    pub cost_per_byte: f64,
    /// The most bytes that may lie on the host; unlimited if `None`.
    pub host_bytes: Option<u64>,
}

/// The role of a task in a dag with copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// It runs this task of the dag without copies.
    Run(TaskId),
    /// It starts the copy of this index.
    Start(u32),
    /// It waits until the copy of this index has ended.
    Finish(u32),
}

/// A copy between the slab and the host's space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferCopy {
    /// The source.
    pub from: BufferId,
    /// The destination: it holds the same bytes afterwards.
    pub to: BufferId,
}

/// A dag derived from another by offloading buffers to the host and prefetching them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offloaded {
    /// The tasks in the order they were scheduled, including copies, and their buffers.
    pub dag: Dag,
    /// For each task, its role.
    pub work: Vec<Work>,
    /// For each buffer, the one whose data it holds.
    pub buffer_of: Vec<BufferId>,
    /// The copies, in the order they start.
    pub copies: Vec<BufferCopy>,
}

/// The current locations of an offloaded value.
#[derive(Clone, Copy)]
struct Location {
    /// The buffer that holds it in the slab.
    device: BufferId,
    /// The buffer that holds it on the host, and the copy that wrote it.
    host: Option<(BufferId, u32)>,
    /// The copy that prefetches it.
    fetch: u32,
}

impl Offloaded {
    /// The dag whose tasks run in `order`, with `transfers` of these buffers, which
    /// [`Transfer::value`] indexes.
    pub(crate) fn new(
        dag: &Dag,
        order: &[TaskId],
        buffers: &[BufferId],
        transfers: &[Transfer],
    ) -> Self {
        let own = (0..dag.buffers.len() as u32).map(BufferId).collect();
        let bare = Dag {
            tasks: Vec::with_capacity(dag.tasks.len()),
            buffers: dag.buffers.clone(),
            may_reuse: Vec::new(),
        };
        let mut new = Offloaded {
            dag: bare,
            work: Vec::new(),
            buffer_of: own,
            copies: Vec::new(),
        };
        let mut at: Vec<Location> = (0..dag.buffers.len() as u32)
            .map(|b| Location::new(BufferId(b)))
            .collect();
        let mut first_use: FxHashMap<u32, u32> = FxHashMap::default();
        for transfer in transfers {
            let first = first_use.entry(transfer.value).or_insert(transfer.used);
            *first = transfer.used.min(*first);
        }
        let mut events = events(transfers).into_iter().peekable();
        let mut pairs = dag.may_reuse.clone();
        pairs.sort_unstable();
        let mut id_of = vec![None; dag.tasks.len()];
        for (step, &run) in (0u32..).zip(order) {
            while let Some((_, what, k)) = events.next_if(|event| event.0 == step) {
                let transfer = transfers[k as usize];
                let buffer = buffers[transfer.value as usize];
                // A value that already has a copy on the host is not copied again; its bytes are
                // only freed.
                let is_first = first_use.get(&transfer.value) == Some(&transfer.used);
                match what {
                    Event::Send if is_first => new.send(buffer, &mut at[buffer.index()]),
                    Event::Sent if is_first => new.finish_sending(&at[buffer.index()]),
                    Event::Fetch => new.fetch(buffer, &mut at[buffer.index()]),
                    Event::Fetched => new.finish(at[buffer.index()].fetch, "fetched"),
                    _ => {}
                }
            }
            let task = &dag.tasks[run.index()];
            let now = |b: &BufferId| at[b.index()].device;
            let after = task
                .after
                .iter()
                .filter_map(|before| id_of[before.index()])
                .collect();
            let (reads, writes) = (
                task.reads.iter().map(now).collect(),
                task.writes.iter().map(now).collect(),
            );
            let id = new.dag.add_task(Task {
                reads,
                writes,
                after,
                rerun: None,
                ..task.clone()
            });
            new.work.push(Work::Run(run));
            id_of[run.index()] = Some(id);
            let first = pairs.partition_point(|pair| pair.task < run);
            let own = pairs[first..].iter().take_while(|pair| pair.task == run);
            new.dag.may_reuse.extend(own.map(|pair| MayReuse {
                task: id,
                from: now(&pair.from),
                to: now(&pair.to),
            }));
        }
        new
    }

    /// Adds a buffer for a copy of another's data.
    fn add_copy_of(&mut self, of: BufferId, name: &str, space: Space) -> BufferId {
        let original = &self.dag.buffers[of.index()];
        let name = format!("{} {name}", original.name);
        let copy_buffer = Buffer {
            name,
            space,
            live_in: false,
            live_out: false,
            ..original.clone()
        };
        self.buffer_of.push(of);
        self.dag.add_buffer(copy_buffer)
    }

    fn start(&mut self, from: BufferId, to: BufferId, verb: &str) -> u32 {
        let copy = self.copies.len() as u32;
        self.copies.push(BufferCopy { from, to });
        self.dag.add_task(Task::new(
            format!("{verb} {}", self.dag.buffer_name(from)),
            &[from],
            &[to],
        ));
        self.work.push(Work::Start(copy));
        copy
    }

    fn finish(&mut self, copy: u32, verb: &str) {
        let BufferCopy { from, to } = self.copies[copy as usize];
        self.dag.add_task(Task::new(
            format!("{verb} {}", self.dag.buffer_name(from)),
            &[from],
            &[to],
        ));
        self.work.push(Work::Finish(copy));
    }

    fn send(&mut self, buffer: BufferId, at: &mut Location) {
        let host = self.add_copy_of(buffer, "on the host", Space::Host);
        at.host = Some((host, self.start(at.device, host, "send")));
    }

    fn finish_sending(&mut self, at: &Location) {
        if let Some((_, copy)) = at.host {
            self.finish(copy, "sent");
        }
    }

    fn fetch(&mut self, buffer: BufferId, at: &mut Location) {
        if let Some((host, _)) = at.host {
            let back = self.add_copy_of(buffer, "fetched", Space::Device);
            // The output of the program is the copy that exists at the end.
            let handed_out = std::mem::take(&mut self.dag.buffers[at.device.index()].live_out);
            self.dag.buffers[back.index()].live_out = handed_out;
            at.fetch = self.start(host, back, "fetch");
            at.device = back;
        }
    }

    /// The run of a task of the dag without copies.
    pub fn run_of(&self, task: TaskId) -> Option<TaskId> {
        self.work
            .iter()
            .position(|work| *work == Work::Run(task))
            .map(|run| TaskId(run as u32))
    }

    /// The number of bytes that are copied to the host.
    pub fn bytes(&self) -> u64 {
        let sent = self
            .copies
            .iter()
            .map(|copy| &self.dag.buffers[copy.to.index()])
            .filter(|to| to.space == Space::Host);
        sent.map(|to| to.bytes).sum()
    }
}

impl Location {
    fn new(device: BufferId) -> Self {
        Location {
            device,
            host: None,
            fetch: 0,
        }
    }
}
