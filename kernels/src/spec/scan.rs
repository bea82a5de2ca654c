//! A loop over steps: the same calls of kernels in every one, planned once.

use smallvec::SmallVec;

use super::{Access, Body, Dims, MAX_ARGUMENTS, Operand, Spec, SpecError};
use crate::size::{Env, Size};

/// See [`Body::Scan`]. The calls run in their order, `steps` times. Step *s* works at the index
/// *t* = *s* of time, or `steps` − 1 − *s* if the loop runs in reverse.
#[derive(Clone, Debug, PartialEq)]
pub struct Scan {
    /// The number of steps; at least 1.
    pub steps: u32,
    /// From the last index of time to the first.
    pub reverse: bool,
    /// The arguments. Of those with an axis of time, which is the first, all other axes are
    /// contiguous; the others are contiguous.
    pub arguments: Vec<Argument>,
    /// The calls of a step.
    pub calls: Vec<Call>,
    /// Pairs of arguments that may share memory: a step reads each element of the first before it
    /// writes the second at the same place.
    pub in_place: Vec<(u16, u16)>,
    /// Bytes of the workspace: values of a step, carries and the workspaces of calls.
    pub scratch: u64,
}

/// An argument of a [`Scan`].
#[derive(Clone, Debug, PartialEq)]
pub struct Argument {
    /// Where its elements are.
    pub operand: Operand,
    /// Its space, the axis of time included.
    pub dims: Dims,
    /// How the loop uses it. A written one may be read by later steps.
    pub access: Access,
}

/// A call of a kernel in each step of a [`Scan`].
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The kernel.
    pub spec: Spec,
    /// Where its arguments are, in the order of [`Spec::arguments`].
    pub places: Vec<Place>,
    /// The offset of its workspace in that of the loop.
    pub workspace: u64,
    /// The bytes of its workspace.
    pub workspace_bytes: u64,
}

/// Bytes of a loop's workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scratch {
    /// The offset.
    pub offset: u64,
    /// How many, at the bounds of the sizes.
    pub bytes: u64,
}

/// Where an argument of a [`Call`] is.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// An argument of the loop as a whole.
    Whole(u16),
    /// The part of an argument at the index of time.
    Step(u16),
    /// The part of an argument at the index before that of time, or after it if `later`; where
    /// there is none, another argument as a whole.
    Neighbour {
        /// The argument with an axis of time.
        of: u16,
        /// The argument in place of the part that does not exist.
        first: u16,
        /// Whether it is the part after.
        later: bool,
    },
    /// A carry at the start of a step: `first` in the first step, else the value that the previous
    /// step has written.
    Found {
        /// The argument that it begins as.
        first: u16,
        /// Where steps leave it, as in [`Place::Left`].
        slots: [Slot; 2],
    },
    /// A carry as a step leaves it: the last step in the first slot, the one before it in the
    /// second, and so on in turns.
    Left([Slot; 2]),
    /// A value of the step.
    Scratch(Scratch),
}

/// One of two places that a carry lies in by turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// An argument of the loop.
    Argument(u16),
    /// In the loop's workspace.
    Scratch(Scratch),
}

/// The place of an argument in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Located {
    /// A part of an argument.
    Argument {
        /// Which argument.
        argument: u16,
        /// The first byte of the part.
        offset: u64,
        /// How many bytes.
        bytes: u64,
    },
    /// In the workspace.
    Scratch(Scratch),
}

impl Scan {
    /// The argument of a call in step `step`, at these sizes.
    pub fn locate(&self, place: &Place, step: u32, env: &Env) -> Located {
        let time = if self.reverse {
            self.steps - 1 - step
        } else {
            step
        };
        match place {
            Place::Whole(argument) => self.whole(*argument, env),
            Place::Step(argument) => self.part(*argument, time, env),
            Place::Neighbour { of, first, later } => {
                let other = if *later {
                    Some(time + 1).filter(|&t| t < self.steps)
                } else {
                    time.checked_sub(1)
                };
                match other {
                    Some(other) => self.part(*of, other, env),
                    None => self.whole(*first, env),
                }
            }
            Place::Found { first, slots } => match step.checked_sub(1) {
                Some(before) => self.left(slots, before, env),
                None => self.whole(*first, env),
            },
            Place::Left(slots) => self.left(slots, step, env),
            Place::Scratch(scratch) => Located::Scratch(*scratch),
        }
    }

    fn left(&self, slots: &[Slot; 2], step: u32, env: &Env) -> Located {
        match slots[(self.steps - 1 - step) as usize % 2] {
            Slot::Argument(argument) => self.whole(argument, env),
            Slot::Scratch(scratch) => Located::Scratch(scratch),
        }
    }

    /// All of an argument.
    fn whole(&self, argument: u16, env: &Env) -> Located {
        let Argument { operand, dims, .. } = &self.arguments[usize::from(argument)];
        let size = operand.dtype.bytes() as u64;
        Located::Argument {
            argument,
            offset: operand.offset.at(env).max(0) as u64 * size,
            bytes: points(dims, env) * size,
        }
    }

    /// The part of an argument at an index of time.
    fn part(&self, argument: u16, time: u32, env: &Env) -> Located {
        let Argument { operand, dims, .. } = &self.arguments[usize::from(argument)];
        let size = operand.dtype.bytes() as u64;
        let stride = operand.strides[0].at(env).max(0) as u64;
        let first = operand.offset.at(env).max(0) as u64;
        Located::Argument {
            argument,
            offset: (first + stride * u64::from(time)) * size,
            bytes: points(&dims[1..], env) * size,
        }
    }

    /// The operands of the loop, each with its space.
    pub(super) fn operands(&self) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let of = |argument: &Argument| {
            let Argument {
                operand,
                dims,
                access,
            } = argument;
            (operand.clone(), dims.clone(), *access)
        };
        self.arguments.iter().map(of).collect()
    }

    /// Fails unless every call can find its arguments.
    pub(super) fn check(&self, spec: &Spec) -> Result<(), SpecError> {
        let invalid = |why: String| Err(SpecError::Scan(why));
        if self.steps == 0 || !spec.code.is_empty() || !spec.dims.is_empty() {
            return invalid("it has no steps, or code or axes of its own".into());
        }
        if self.arguments.len() > MAX_ARGUMENTS {
            let count = self.arguments.len();
            return invalid(format!("{count} arguments, of {MAX_ARGUMENTS} at most"));
        }
        for (at, argument) in self.arguments.iter().enumerate() {
            if argument.operand.strides.len() != argument.dims.len() {
                return invalid(format!("argument {at} has not one stride per axis"));
            }
        }
        let steps = Size::fixed(i64::from(self.steps));
        let exists = |argument: u16| usize::from(argument) < self.arguments.len();
        let timed = |argument: u16| {
            let found = self.arguments.get(usize::from(argument));
            found.is_some_and(|a| a.dims.first() == Some(&steps))
        };
        let holds = |scratch: &Scratch| {
            let end = scratch.offset.checked_add(scratch.bytes);
            end.is_some_and(|end| end <= self.scratch)
        };
        let slot = |slot: &Slot| match slot {
            Slot::Argument(argument) => exists(*argument),
            Slot::Scratch(scratch) => holds(scratch),
        };
        for call in &self.calls {
            if matches!(call.spec.body, Body::BoundsCheck(_) | Body::Collective(_)) {
                return invalid("a step checks no indices and exchanges nothing".into());
            }
            call.spec.check_anchor()?;
            if call.places.len() != call.spec.arguments().len() {
                return invalid("a call has not one place per argument".into());
            }
            let found = call.places.iter().all(|place| match place {
                Place::Whole(argument) => exists(*argument),
                Place::Step(argument) => timed(*argument),
                Place::Neighbour { of, first, .. } => timed(*of) && exists(*first),
                Place::Found { first, slots } => exists(*first) && slots.iter().all(slot),
                Place::Left(slots) => slots.iter().all(slot),
                Place::Scratch(scratch) => holds(scratch),
            });
            let workspace = Scratch {
                offset: call.workspace,
                bytes: call.workspace_bytes,
            };
            if !found || !holds(&workspace) {
                return invalid("a call has an argument that does not exist".into());
            }
        }
        Ok(())
    }
}

fn points(dims: &[Size], env: &Env) -> u64 {
    dims.iter().map(|d| d.at(env).max(0) as u64).product()
}
