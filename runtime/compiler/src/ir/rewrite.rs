//! The rewriter, which builds a program from another one.

use super::{CallId, KernelCall, MicroBatches, Program, Transfer, Value, ValueId};

/// A new program under construction, and which of its calls do the work of the old ones.
///
/// Control dependencies of the calls that are added name calls of the old program. In the end each
/// becomes a dependency on all new calls that do the work of the old one.
pub struct Rewriter<'a> {
    old: &'a Program,
    values: Vec<Value>,
    kernels: Vec<KernelCall>,
    /// For each old call, the new ones that do its work.
    done_by: Vec<Vec<CallId>>,
}

impl<'a> Rewriter<'a> {
    /// A program with the values of an old one, and none of its calls.
    pub fn new(old: &'a Program) -> Self {
        Rewriter {
            values: old.values.clone(),
            ..Rewriter::without_values(old)
        }
    }

    /// A program with neither values nor calls.
    pub fn without_values(old: &'a Program) -> Self {
        Rewriter {
            old,
            values: Vec::new(),
            kernels: Vec::with_capacity(old.kernels.len()),
            done_by: vec![Vec::new(); old.kernels.len()],
        }
    }

    /// Adds a value.
    pub fn add_value(&mut self, value: Value) -> ValueId {
        self.values.push(value);
        ValueId(self.values.len() as u32 - 1)
    }

    /// Adds a call that does the work of an old one, or part of it.
    pub fn add_call(&mut self, of: CallId, call: KernelCall) -> CallId {
        let id = CallId(self.kernels.len() as u32);
        self.kernels.push(call);
        self.done_by[of.index()].push(id);
        id
    }

    /// Adds a call of the old program as it is.
    pub fn keep(&mut self, call: CallId) -> CallId {
        self.add_call(call, self.old.call(call).clone())
    }

    /// Has new calls that are there already do the work of an old one.
    pub fn replace(&mut self, old: CallId, by: impl IntoIterator<Item = CallId>) {
        self.done_by[old.index()].extend(by);
    }

    /// The new calls that do the work of an old one.
    pub fn done_by(&self, old: CallId) -> &[CallId] {
        &self.done_by[old.index()]
    }

    /// The new program. Its calls are in the order in which they were added.
    pub fn finish(self, micro_batches: Option<MicroBatches>) -> Program {
        let Rewriter {
            old,
            values,
            mut kernels,
            done_by,
        } = self;
        for (at, call) in (0..).zip(&mut kernels) {
            let before = call.after.iter().flat_map(|a| &done_by[a.index()]).copied();
            let mut after: Vec<CallId> = before.filter(|a| *a != CallId(at)).collect();
            after.sort_unstable();
            after.dedup();
            call.after = after;
        }
        let mut new = Program {
            graph: old.graph.clone(),
            values,
            kernels,
            micro_batches,
            guard: old.guard,
            ..Program::new(old.graph.clone())
        };
        new.renumber(0..new.values.len() as u32);
        new
    }
}

impl Program {
    /// The program with its calls in another order, in which they can run.
    pub fn in_order(&self, order: impl IntoIterator<Item = CallId>) -> Program {
        let mut rewriter = Rewriter::new(self);
        for call in order {
            rewriter.keep(call);
        }
        rewriter.finish(self.micro_batches)
    }

    /// Drops the values that no call touches, and numbers the others in the order in which calls
    /// name them first.
    pub fn renumber_by_use(&mut self) {
        let mut seen = vec![false; self.values.len()];
        let mut order = Vec::with_capacity(self.values.len());
        for arg in self.kernels.iter().flat_map(|call| &call.args) {
            if !std::mem::replace(&mut seen[arg.index()], true) {
                order.push(arg.0);
            }
        }
        self.renumber(order);
    }

    /// Numbers values anew, in this order and those that the planner places first; those that are
    /// left out are dropped.
    fn renumber(&mut self, order: impl IntoIterator<Item = u32>) {
        let (mut order, unplanned): (Vec<u32>, Vec<u32>) = order
            .into_iter()
            .partition(|&v| self.values[v as usize].is_planned());
        order.extend(unplanned);
        let mut number = vec![ValueId(u32::MAX); self.values.len()];
        for (new, &old) in (0..).zip(&order) {
            number[old as usize] = ValueId(new);
        }
        let mut values: Vec<Option<Value>> = self.values.drain(..).map(Some).collect();
        self.values = order
            .iter()
            .filter_map(|&old| values[old as usize].take())
            .collect();
        let mut of = |value: ValueId| number[value.index()];
        self.kernels
            .iter_mut()
            .for_each(|call| call.rename(&mut of));
        for transfer in &mut self.transfers {
            if let Transfer::Host(copy) = transfer {
                (copy.from, copy.to) = (of(copy.from), of(copy.to));
            }
        }
    }
}
