//! Transfers: bytes that move while kernels run, to the host and back or between ranks.

use rustc_hash::FxHashMap;
use slabwise_kernels::spec::{Access, Body};
use slabwise_planner::{TaskId, Work};

use super::{CallId, KernelCall, Program, Source, ValueId};

/// Bytes that move while kernels run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// Between the slab and the host's memory.
    Host(HostCopy),
    /// Between ranks, by this call of a collective, which starts it at its place among the calls.
    Ranks(CallId),
}

/// A copy between the slab and the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCopy {
    /// The value that is copied.
    pub from: ValueId,
    /// The value that holds the same data after it.
    pub to: ValueId,
}

/// The start or the end of a transfer. That of a collective is its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferStep {
    /// Shown in plans.
    pub name: String,
    /// The index of the transfer in [`Program::transfers`].
    pub transfer: u32,
    /// Whether it waits for the transfer to end, rather than starts it.
    pub finishes: bool,
    /// The number of kernels before it.
    pub position: u32,
}

impl KernelCall {
    /// Whether it moves bytes between ranks.
    pub fn is_collective(&self) -> bool {
        matches!(self.spec.body, Body::Collective(_))
    }

    /// The values that a collective sends and receives.
    pub fn sides(&self) -> [ValueId; 2] {
        [self.args[0], self.args[1]]
    }
}

impl Program {
    /// The work of the tasks of its dag, in order: to run a call, or to start or end a transfer.
    pub fn work(&self) -> Vec<Work> {
        let mut work = Vec::with_capacity(self.kernels.len() + self.transfer_steps.len());
        let mut steps = self.transfer_steps.iter().peekable();
        let between = (0..).zip(&self.transfers);
        let starts: FxHashMap<CallId, u32> = between
            .filter_map(|(k, transfer)| match transfer {
                Transfer::Ranks(call) => Some((*call, k)),
                Transfer::Host(_) => None,
            })
            .collect();
        for at in 0..=self.kernels.len() as u32 {
            while let Some(step) = steps.next_if(|step| step.position == at) {
                work.push(match step.finishes {
                    true => Work::Finish(step.transfer),
                    false => Work::Start(step.transfer),
                });
            }
            if (at as usize) < self.kernels.len() {
                work.push(match starts.get(&CallId(at)) {
                    Some(&transfer) => Work::Start(transfer),
                    None => Work::Run(TaskId(at)),
                });
            }
        }
        work
    }

    /// The call that runs, or starts a collective, in a task of this work.
    pub fn begun_by(&self, work: Work) -> Option<&KernelCall> {
        match work {
            Work::Run(call) => self.kernels.get(call.index()),
            Work::Start(transfer) => match self.transfers[transfer as usize] {
                Transfer::Ranks(call) => Some(self.call(call)),
                Transfer::Host(_) => None,
            },
            Work::Finish(_) => None,
        }
    }

    /// The most ranks that a collective moves bytes between, and the bytes that each of them sends
    /// to others at the bounds of the symbols.
    pub fn sent_by_ranks(&self) -> (u32, u64) {
        let sizes = self.graph.symbols.bounds();
        let collectives = self
            .kernels
            .iter()
            .filter_map(|call| match &call.spec.body {
                Body::Collective(collective) => Some((call, collective)),
                _ => None,
            });
        collectives.fold((1, 0), |(ranks, sum), (call, collective)| {
            let each = collective.part_space(&call.spec.dims).iter();
            let each: u64 = each.map(|d| d.at(&sizes).max(0) as u64).product();
            let part = each * collective.result.dtype.bytes() as u64;
            // A part comes from each other rank, and as much goes to each.
            let own = collective.group.ranks;
            (ranks.max(own), sum + u64::from(own - 1) * part)
        })
    }

    /// The first call that touches a variable which a collective in flight uses, if the program runs
    /// in this order: one that writes its source, or touches its destination. The planner does not
    /// know variables.
    pub fn disturbed_in_flight(&self, order: &[TaskId]) -> Option<&KernelCall> {
        let work = self.work();
        let mut in_flight: Vec<(u32, [ValueId; 2])> = Vec::new();
        let is_variable = |value| matches!(self.value(value).source, Source::Variable(_));
        for task in order {
            let work = work[task.index()];
            if let Work::Finish(transfer) = work {
                in_flight.retain(|(other, _)| *other != transfer);
            }
            let Some(call) = self.begun_by(work) else {
                continue;
            };
            let disturbs = call.accesses().any(|(value, access)| {
                let reads = access == Access::Read;
                let conflicts = |(_, [from, to]): &(u32, [ValueId; 2])| {
                    *to == value || (*from == value && !reads)
                };
                is_variable(value) && in_flight.iter().any(conflicts)
            });
            if disturbs {
                return Some(call);
            }
            if let Work::Start(transfer) = work {
                in_flight.push((transfer, call.sides()));
            }
        }
        None
    }
}
