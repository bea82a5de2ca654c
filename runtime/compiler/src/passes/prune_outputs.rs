//! Pruning outputs: a call with only some of its stores, and only the code and operands that these
//! need, so that it writes the same bits with less work.
//!
//! Values computed per element do not depend on the rest of a kernel. Neither do sums, as long as
//! they are split into the same parts, and products, as long as the device has the same kernel for
//! them; [`prune_outputs`] gives up where that is not certain (`super::sums`).

use slabwise_kernels::spec::{Body, Inst, Spec, Store, ValueId as InstId};

use super::sums::{has_same_products, has_same_sums};
use crate::backend::Target;
use crate::ir::{KernelCall, Program, Recompute};

/// The call with these of its stores, at least one, neither prepared nor recomputable; `None` if a
/// bit of their values could differ on the device.
pub(super) fn prune_outputs(
    program: &Program,
    target: &Target,
    call: &KernelCall,
    stores: &[Store],
) -> Option<KernelCall> {
    let spec = &call.spec;
    let needed = needed(spec, stores);
    let folded = spec.per_row();
    let needs = |which: fn(&Inst) -> bool| {
        spec.code
            .iter()
            .zip(&needed)
            .any(|(inst, needed)| *needed && which(inst))
    };
    let folds = needs(|inst| matches!(inst, Inst::Reduce(..)));
    let points_only = !folds && stores.iter().all(|s| !folded[usize::from(s.value)]);
    // Without its values an anchor has no purpose.
    let possible =
        !stores.is_empty() && (spec.body == Body::Loop || needs(|inst| *inst == Inst::Acc));
    if !possible {
        return None;
    }
    let mut fewer = without(call, stores, &needed);
    if points_only {
        fewer.spec.reduced = 0;
    }
    let bounds = program.graph.symbols.bounds();
    let is_product = spec.body.is_product();
    let same_bits = match (points_only, is_product) {
        _ if spec.reduced == 0 => true,
        (true, false) => true,
        (true, true) => has_same_products(target, spec, &fewer.spec, &bounds),
        (false, _) => has_same_sums(target, spec, &fewer.spec, &bounds),
    };
    same_bits.then_some(fewer)
}

/// For each instruction whether one of the stores needs it.
fn needed(spec: &Spec, stores: &[Store]) -> Vec<bool> {
    let mut needed = vec![false; spec.code.len()];
    stores
        .iter()
        .for_each(|s| needed[usize::from(s.value)] = true);
    // Instructions come after their arguments.
    for at in (0..spec.code.len()).rev() {
        if needed[at] {
            spec.code[at]
                .arguments()
                .iter()
                .for_each(|&a| needed[usize::from(a)] = true);
        }
    }
    needed
}

/// The call with these stores and the instructions they need, both renumbered.
fn without(call: &KernelCall, stores: &[Store], needed: &[bool]) -> KernelCall {
    let old = &call.spec;
    let mut used = vec![false; old.operands.len()];
    stores
        .iter()
        .for_each(|s| used[usize::from(s.operand)] = true);
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
    let (operand, value) = (
        |k: u16| operand[usize::from(k)],
        |v: InstId| value[usize::from(v)],
    );
    let renamed = |inst: &Inst| match *inst {
        Inst::Load(k) => Inst::Load(operand(k)),
        Inst::Uniform {
            state,
            stream,
            index,
        } => Inst::Uniform {
            state: operand(state),
            stream,
            index: value(index),
        },
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
        operands: old
            .operands
            .iter()
            .zip(&used)
            .filter(|(_, used)| **used)
            .map(|(o, _)| o.clone())
            .collect(),
        code: old
            .code
            .iter()
            .zip(needed)
            .filter(|(_, needed)| **needed)
            .map(|(inst, _)| renamed(inst))
            .collect(),
        stores: stores
            .iter()
            .map(|s| Store {
                value: value(s.value),
                operand: operand(s.operand),
            })
            .collect(),
        ..old.clone()
    };
    let (anchors, own) = call.args.split_at(call.args.len() - old.operands.len());
    let mut args = anchors.to_vec();
    args.extend(
        own.iter()
            .zip(&used)
            .filter(|(_, used)| **used)
            .map(|(arg, _)| *arg),
    );
    let stay = |(from, to): &(_, _)| args.contains(from) && args.contains(to);
    let in_place = call.in_place.iter().copied().filter(stay).collect();
    KernelCall {
        spec,
        args,
        in_place,
        kernel: None,
        recompute: Recompute::Never,
        ..call.clone()
    }
}
