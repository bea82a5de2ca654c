//! The planner's answers, applied to a program.

use rustc_hash::FxHashSet;
use slabwise_kernels::spec::Access;
use slabwise_planner::{BufferId, Dag, Offloaded, Overlapped, Repeated, TaskId, Work};

use super::{
    CallId, HostCopy, KernelCall, Program, Recompute, Rewriter, Source, Transfer, TransferStep,
    Value, ValueId,
};

impl Program {
    /// The program with some calls recomputed, as the planner decided: every run is a call, and
    /// writes values that are its own.
    pub fn repeated(&self, repeated: &Repeated) -> Program {
        let recomputed: FxHashSet<TaskId> = repeated.recomputed_tasks().into_iter().collect();
        let work: Vec<Work> = repeated
            .task_of
            .iter()
            .map(|&task| Work::Run(task))
            .collect();
        let new = self.applied(&repeated.dag, &work, &repeated.buffer_of, |run| {
            recomputed.contains(&run)
        });
        #[cfg(debug_assertions)]
        assert_eq!(settled(&new.to_dag()), settled(&repeated.dag));
        new
    }

    /// The program with values that leave for the host and come back, as the planner decided.
    pub fn offloaded(&self, offloaded: &Offloaded) -> Program {
        let mut new = self.applied(
            &offloaded.dag,
            &offloaded.work,
            &offloaded.buffer_of,
            |_| false,
        );
        let copies = offloaded.copies.iter().map(|copy| {
            Transfer::Host(HostCopy {
                from: copy.from.into(),
                to: copy.to.into(),
            })
        });
        new.transfers = copies.collect();
        #[cfg(debug_assertions)]
        assert_eq!(settled(&new.to_dag()), settled(&offloaded.dag));
        new
    }

    /// The program with its collectives as transfers, as the planner decided: its calls in another
    /// order, and an end for each collective.
    pub fn overlapped(&self, overlapped: &Overlapped) -> Program {
        let old = self.work();
        let mut rewriter = Rewriter::new(self);
        let mut transfers = self.transfers.clone();
        let mut steps: Vec<TransferStep> = Vec::new();
        let mut old_steps = self.transfer_steps.iter();
        let mut position = 0;
        // The transfers that there are already are copies to the host, which keep their numbers.
        let first = transfers.len() as u32;
        for (task, work) in overlapped.dag.tasks.iter().zip(&overlapped.work) {
            let of = match *work {
                Work::Run(of) => of,
                Work::Start(k) => overlapped.collectives[k as usize],
                Work::Finish(k) => {
                    steps.push(TransferStep {
                        name: task.name.clone(),
                        transfer: first + k,
                        finishes: true,
                        position,
                    });
                    continue;
                }
            };
            let Work::Run(call) = old[of.index()] else {
                steps.extend(old_steps.next().map(|step| TransferStep {
                    position,
                    ..step.clone()
                }));
                continue;
            };
            let new = rewriter.keep(CallId(call.0));
            if let Work::Start(_) = work {
                transfers.push(Transfer::Ranks(new));
            }
            position += 1;
        }
        let mut new = rewriter.finish(self.micro_batches);
        (new.transfers, new.transfer_steps) = (transfers, steps);
        #[cfg(debug_assertions)]
        assert_eq!(settled(&new.to_dag()), settled(&overlapped.dag));
        new
    }

    /// The program that a dag of the planner is: `work` says which call each of its tasks runs,
    /// `buffer_of` which value each of its buffers holds a copy of.
    fn applied(
        &self,
        dag: &Dag,
        work: &[Work],
        buffer_of: &[BufferId],
        recomputes: impl Fn(TaskId) -> bool,
    ) -> Program {
        let mut new = Program {
            micro_batches: self.micro_batches,
            guard: self.guard,
            ..Program::new(self.graph.clone())
        };
        for (buffer, of) in dag.buffers.iter().zip(buffer_of) {
            let old = self.value((*of).into());
            new.values.push(Value {
                name: buffer.name.clone(),
                source: if buffer.live_in {
                    old.source
                } else {
                    Source::Computed
                },
                space: buffer.space,
                output: buffer.live_out,
                ..old.clone()
            });
        }
        // Variables and sizes stay one value each.
        let (old_planned, planned) = (self.planned() as u32, dag.buffers.len() as u32);
        new.values
            .extend(self.values[old_planned as usize..].iter().cloned());
        let mut call_of = vec![None; dag.tasks.len()];
        for (at, (task, work)) in (0u32..).zip(dag.tasks.iter().zip(work)) {
            let run = match *work {
                Work::Run(run) => run,
                Work::Start(copy) | Work::Finish(copy) => {
                    new.transfer_steps.push(TransferStep {
                        name: task.name.clone(),
                        transfer: copy,
                        finishes: matches!(work, Work::Finish(_)),
                        position: new.kernels.len() as u32,
                    });
                    continue;
                }
            };
            let old = self.call(CallId(run.0));
            let of = match &old.recompute {
                Recompute::Clone(clone) if recomputes(TaskId(at)) => clone,
                _ => old,
            };
            let find = |lists: [&[BufferId]; 2], value: ValueId| {
                lists
                    .into_iter()
                    .flatten()
                    .find(|b| ValueId::from(buffer_of[b.index()]) == value)
                    .map_or(value, |&b| b.into())
            };
            let renamed = |(value, access): (ValueId, Access)| match access {
                _ if value.0 >= old_planned => ValueId(value.0 - old_planned + planned),
                Access::Read => find([&task.reads, &task.writes], value),
                Access::Write | Access::ReadWrite => find([&task.writes, &task.reads], value),
            };
            let is_own = |pair: &&slabwise_planner::MayReuse| pair.task == TaskId(at);
            let first = dag.may_reuse.partition_point(|pair| pair.task < TaskId(at));
            let pairs = dag.may_reuse[first..].iter().take_while(is_own);
            let call = KernelCall {
                name: task.name.clone(),
                spec: of.spec.clone(),
                args: of.accesses().map(renamed).collect(),
                after: task
                    .after
                    .iter()
                    .filter_map(|a| call_of[a.index()])
                    .collect(),
                in_place: pairs
                    .map(|pair| (pair.from.into(), pair.to.into()))
                    .collect(),
                node: of.node,
                kernel: of.kernel.clone(),
                cost: of.cost,
                recompute: match old.recompute {
                    Recompute::Same => Recompute::Same,
                    Recompute::Never | Recompute::Clone(_) => Recompute::Never,
                },
                micro_batch: of.micro_batch,
            };
            call_of[at as usize] = Some(CallId(new.kernels.len() as u32));
            new.kernels.push(call);
        }
        new
    }
}

/// The dag without permissions to recompute, which a program that is applied has used, and with
/// control dependencies and pairs in a fixed order.
#[cfg(debug_assertions)]
fn settled(dag: &Dag) -> Dag {
    let mut dag = dag.clone();
    for task in &mut dag.tasks {
        (task.repeatable, task.rerun) = (false, None);
        task.after.sort_unstable();
        task.after.dedup();
    }
    dag.may_reuse.sort_unstable();
    dag
}
