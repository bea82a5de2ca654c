//! The transfers of a program: bytes that move while kernels run, to the host and back or between
//! ranks.

use std::sync::Arc;

use super::{Compiled, Place, Planned, Step, Work};
use crate::backend::Kernel;
use crate::ir::{self, KernelCall, Source, ValueId};
use crate::passes::micro_batch_range;

/// Bytes that move while kernels run.
#[derive(Clone)]
pub(crate) enum Transfer {
    /// A copy between slab and host: from a buffer of the program to another.
    Host {
        /// The source.
        from: usize,
        /// The destination.
        to: usize,
    },
    /// Between ranks: from the first place to the second.
    Ranks(Arc<Kernel>, [Place; 2]),
}

impl Transfer {
    /// The planned buffers that it moves bytes between.
    pub fn buffers(&self) -> impl Iterator<Item = usize> {
        let places = match self {
            Transfer::Host { from, to } => [*from, *to].map(Place::Planned),
            Transfer::Ranks(_, places) => *places,
        };
        places.into_iter().filter_map(|place| place.buffer())
    }
}

impl Compiled {
    /// Whether it exchanges bytes with other ranks.
    pub fn exchanges(&self) -> bool {
        let is_exchange = |t: &Transfer| matches!(t, Transfer::Ranks(..));
        self.transfers.iter().any(is_exchange)
    }

    /// The number of copies to the host and back.
    pub fn copies(&self) -> usize {
        let is_copy = |t: &&Transfer| matches!(t, Transfer::Host { .. });
        self.transfers.iter().filter(is_copy).count()
    }
}

/// The parts of a step that the plan decides.
pub(super) struct Moment {
    pub name: String,
    pub workspace: u64,
    pub begins: Vec<usize>,
    pub ends: Vec<usize>,
}

/// The place of an argument of a call.
pub(super) fn place(
    program: &ir::Program,
    call: &KernelCall,
    (at, value): (usize, ValueId),
    variables: &[usize],
) -> Place {
    match program.value(value).source {
        Source::Variable(v) => Place::Variable(variables[v as usize]),
        Source::Sizes => Place::Sizes,
        Source::Input(_) | Source::Computed => match micro_batch_range(program, call, at) {
            Some(micro_batch_range) => Place::MicroBatch(value.index(), micro_batch_range),
            None => Place::Planned(value.index()),
        },
    }
}

/// A transfer, with where its bytes lie.
pub(super) fn transfer(
    program: &ir::Program,
    transfer: &ir::Transfer,
    variables: &[usize],
) -> Transfer {
    match *transfer {
        ir::Transfer::Host(ir::HostCopy { from, to }) => Transfer::Host {
            from: from.index(),
            to: to.index(),
        },
        ir::Transfer::Ranks(call) => {
            let call = program.call(call);
            let kernel = call.kernel.clone().expect("a planned call is prepared");
            let [from, to] = call.sides();
            let places = [(0, from), (1, to)].map(|side| place(program, call, side, variables));
            Transfer::Ranks(kernel, places)
        }
    }
}

/// The step that starts or finishes a transfer.
pub(super) fn transfer_step(
    program: &ir::Program,
    transfer: u32,
    work: Work,
    moment: Moment,
) -> Step {
    let origin = match program.transfers[transfer as usize] {
        ir::Transfer::Host(copy) => {
            let node = program.value(copy.from).node;
            node.map(|node| program.graph.origin(node).clone())
        }
        ir::Transfer::Ranks(call) => Some(program.origin(program.call(call)).clone()),
    };
    Step {
        workspace: Planned {
            offset: moment.workspace,
            bytes: 0,
        },
        work,
        places: Vec::new(),
        slice: None,
        name: moment.name,
        origin: origin.expect("only values of nodes are copied"),
        ends: moment.ends,
        begins: moment.begins,
        binds: None,
        finite: false,
    }
}
