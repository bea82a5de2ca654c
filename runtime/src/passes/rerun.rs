//! What a kernel is when it runs again to make its buffers a second time: without the variables that it assigns.
//!
//! A norm over a batch moves its running statistics where it computes the batch's; computed again, it may not move them again. So
//! the stores to variables go, with the code and the operands that only they need. What is left gives the same bits: it is cut into tiles
//! and its sums into parts as before.

use std::collections::HashSet;

use slabwise_kernels::spec::{Access, Body, Inst, Spec, Store, ValueId};

use super::lower::{Arg, Task};

/// The task as it runs again: itself if it assigns no variable, less if it does. `None` if it may run only once.
pub(super) fn rerun(task: &Task) -> Option<Task> {
    if matches!(task.spec.body, Body::CheckIndex(_)) {
        return None;
    }
    let arguments = task.spec.arguments();
    let written = |(arg, (_, _, access)): &(&Arg, &(_, _, Access))| matches!(arg, Arg::Variable(_)) && *access != Access::Read;
    let assigned: HashSet<Arg> = task.args.iter().zip(&arguments).filter(written).map(|(arg, _)| *arg).collect();
    if assigned.is_empty() {
        return Some(task.clone());
    }
    // The anchors' own loops are not looked into.
    if task.spec.body != Body::Loop {
        return None;
    }
    let stores: Vec<Store> =
        task.spec.stores.iter().copied().filter(|s| matches!(task.args[usize::from(s.operand)], Arg::Buffer(_))).collect();
    let needed = needed(&task.spec, &stores);
    if stores.is_empty() || !sums_alike(&task.spec, &needed) {
        return None;
    }
    let lean = without(task, stores, &needed);
    // What it assigned by then it cannot take as it was.
    (!lean.args.iter().any(|arg| assigned.contains(arg))).then_some(lean)
}

/// For each instruction whether something that is stored needs it.
fn needed(spec: &Spec, stores: &[Store]) -> Vec<bool> {
    let mut needed = vec![false; spec.code.len()];
    stores.iter().for_each(|s| needed[usize::from(s.value)] = true);
    // Instructions come behind their arguments.
    for at in (0..spec.code.len()).rev() {
        if needed[at] {
            arguments(&spec.code[at]).iter().for_each(|&a| needed[usize::from(a)] = true);
        }
    }
    needed
}

fn arguments(inst: &Inst) -> &[ValueId] {
    match inst {
        Inst::Load(_) | Inst::Acc | Inst::Const(_) | Inst::Index(_) => &[],
        Inst::Uniform { index, .. } => std::slice::from_ref(index),
        Inst::Op(op, args) => &args[..op.arity()],
        Inst::Cast(a, _) | Inst::Reduce(_, a) => std::slice::from_ref(a),
    }
}

/// Whether sums are split as before without the rest: where something is folded, only values of the kept points may go, and
/// something must be read at all points, for how these lie in memory tells how they are walked.
fn sums_alike(spec: &Spec, needed: &[bool]) -> bool {
    let folded = spec.folded();
    let mut code = spec.code.iter().enumerate();
    let reads_points = spec.code.iter().enumerate().any(|(at, inst)| needed[at] && !folded[at] && matches!(inst, Inst::Load(_)));
    spec.reduced == 0 || reads_points && code.all(|(at, inst)| needed[at] || folded[at] && !matches!(inst, Inst::Reduce(..)))
}

/// The task with these stores and the instructions they need, both numbered anew.
fn without(task: &Task, stores: Vec<Store>, needed: &[bool]) -> Task {
    let old = &task.spec;
    let mut used = vec![false; old.operands.len()];
    stores.iter().for_each(|s| used[usize::from(s.operand)] = true);
    for (inst, _) in old.code.iter().zip(needed).filter(|(_, needed)| **needed) {
        match inst {
            Inst::Load(k) => used[usize::from(*k)] = true,
            Inst::Uniform { state, .. } => used[usize::from(*state)] = true,
            _ => {}
        }
    }
    let number = |kept: &[bool]| {
        let next = |next: &mut u16, &kept: &bool| {
            *next += u16::from(kept);
            Some(*next - u16::from(kept))
        };
        kept.iter().scan(0, next).collect::<Vec<u16>>()
    };
    let (operand, value) = (number(&used), number(needed));
    let (operand, value) = (|k: u16| operand[usize::from(k)], |v: ValueId| value[usize::from(v)]);
    let renamed = |inst: &Inst| match *inst {
        Inst::Load(k) => Inst::Load(operand(k)),
        Inst::Uniform { state, stream, index } => Inst::Uniform { state: operand(state), stream, index: value(index) },
        Inst::Op(op, args) => {
            let mut new = [0; 3];
            (0..op.arity()).for_each(|i| new[i] = value(args[i]));
            Inst::Op(op, new)
        }
        Inst::Cast(a, lane) => Inst::Cast(value(a), lane),
        Inst::Reduce(op, a) => Inst::Reduce(op, value(a)),
        Inst::Acc | Inst::Const(_) | Inst::Index(_) => inst.clone(),
    };
    let spec = Spec {
        operands: old.operands.iter().zip(&used).filter(|(_, used)| **used).map(|(o, _)| o.clone()).collect(),
        code: old.code.iter().zip(needed).filter(|(_, needed)| **needed).map(|(inst, _)| renamed(inst)).collect(),
        stores: stores.iter().map(|s| Store { value: value(s.value), operand: operand(s.operand) }).collect(),
        ..old.clone()
    };
    let args: Vec<Arg> = task.args.iter().zip(&used).filter(|(_, used)| **used).map(|(arg, _)| *arg).collect();
    let in_place = task.in_place.iter().copied().filter(|(from, _)| args.contains(&Arg::Buffer(*from))).collect();
    Task { spec, args, in_place, ..task.clone() }
}
