//! The loop over the channels after a product with sums, moved into the product: the blocks that
//! add the last sums of some channels execute the loop for these channels.

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, Dims, Inst, MAX_ARGUMENTS, Operand, Store, ValueId as InstId};

use super::channels;
use crate::ir::{CallId, KernelCall, Source};
use crate::passes::merge_calls::CallMerger;

/// An operand of the loop in the product.
#[derive(Clone, Copy)]
enum Place {
    /// A sum that the product computes.
    Sum(InstId),
    /// An operand of this number.
    Operand(u16),
}

/// A product with the work of a loop over its channels; `None` if the loop needs anything that is
/// there only after the product.
pub(super) fn with_loop(merger: &CallMerger, [product, at]: [usize; 2]) -> Option<KernelCall> {
    let (call, mut new) = (&merger.calls()[at], merger.calls()[product].clone());
    let spec = &call.spec;
    if spec.body != Body::Loop || spec.reduced != 0 || !spec.indices.is_empty() {
        return None;
    }
    let count = new.spec.dims[channels(&new.spec)?];
    // A loop over one channel may have no axis.
    let mut long = (0..spec.dims.len()).filter(|&axis| !spec.dims[axis].is(1));
    let axis = long.next();
    if long.next().is_some() || axis.map_or(Size::ONE, |axis| spec.dims[axis]) != count {
        return None;
    }
    // Where the product reads a variable at points that the loop writes, it has read all elements
    // of a channel before it does the loop's work for it.
    let after: Vec<usize> = call.after.iter().map(|call| merger.mover(*call)).collect();
    let others = || after.iter().copied().filter(|&before| before != product);
    if others().next().is_some() && merger.any_behind(product, others()) {
        return None;
    }
    let mut places: Vec<Place> = Vec::with_capacity(spec.operands.len());
    for k in 0..spec.operands.len() as u16 {
        places.push(place(merger, &mut new, product, call, k, axis)?);
    }
    let mut made: Vec<InstId> = Vec::with_capacity(spec.code.len());
    for inst in &spec.code {
        let mut inst = inst.clone();
        inst.map_arguments(|a| made[usize::from(a)]);
        match inst.operand().map(|k| places[usize::from(k)]) {
            Some(Place::Sum(sum)) if matches!(inst, Inst::Load(_)) => {
                made.push(sum);
                continue;
            }
            Some(Place::Sum(_)) => return None,
            Some(Place::Operand(k)) => inst.map_operand(|_| k),
            None => {}
        }
        made.push(new.spec.code.len() as InstId);
        new.spec.code.push(inst);
    }
    for store in &spec.stores {
        let Place::Operand(operand) = places[usize::from(store.operand)] else {
            return None;
        };
        new.spec.stores.push(Store {
            value: made[usize::from(store.value)],
            operand,
        });
    }
    new.name = format!("{} & {}", new.name, call.name);
    new.after
        .extend(others().map(|before| CallId(before as u32)));
    (new.args.len() <= MAX_ARGUMENTS).then_some(new)
}

/// An operand of a loop in a product, which is added to the product's unless it has it.
fn place(
    merger: &CallMerger,
    new: &mut KernelCall,
    product: usize,
    call: &KernelCall,
    k: u16,
    axis: Option<usize>,
) -> Option<Place> {
    let (value, spec) = (call.operand(k), &call.spec);
    let is_stored = spec.stores.iter().any(|store| store.operand == k);
    let own = &spec.operands[usize::from(k)];
    let mut strides = Dims::from_elem(Size::ZERO, new.spec.dims.len());
    if let Some(axis) = axis {
        strides[channels(&new.spec)?] = own.strides[axis];
    }
    let operand = Operand {
        strides,
        ..own.clone()
    };
    let mut stores = new.spec.stores.iter();
    if let Some(store) = stores.find(|store| new.operand(store.operand) == value) {
        // Its sums are there, values that it stores at points are not.
        let is_sum = new.spec.code[usize::from(store.value)].is_reduce();
        let same = new.spec.operands[usize::from(store.operand)] == operand;
        return (is_sum && same && !is_stored).then_some(Place::Sum(store.value));
    }
    // Variables keep their values until all calls that read them are done.
    let is_variable = matches!(merger.values[value.index()].source, Source::Variable(_));
    let is_there = || {
        let written = merger.around.writers.get(&value);
        written.is_none_or(|list| list.iter().all(|&writer| writer < product))
    };
    if spec.reads(k) && !is_variable && !is_there() {
        return None;
    }
    let first = new.args.len() - new.spec.operands.len();
    let known = (0..new.spec.operands.len())
        .find(|&k| new.args[first + k] == value && new.spec.operands[k] == operand);
    // An argument that is accessed in two ways is not computed in place.
    if known.is_none() && new.args.contains(&value) {
        return None;
    }
    let k = known.unwrap_or_else(|| {
        new.spec.operands.push(operand);
        new.args.push(value);
        new.spec.operands.len() - 1
    });
    Some(Place::Operand(k as u16))
}
