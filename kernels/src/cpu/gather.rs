//! Gather, and the check that keeps its indices in range.

use std::sync::atomic::{AtomicU64, Ordering};

use super::pointwise::{Block, BlockCode, OperandView, Space, check_rank};
use super::{Config, Fault, Launch, SpecError};
use crate::size::Env;
use crate::spec::{Body, Spec};

/// Most points of a block: the values stay in the first-level cache until the epilogue has used
/// them.
const BLOCK: usize = 2048;

/// See [`Body::Gather`]. An index outside the axis reads the nearest element, or 0 from an empty
/// axis: the run is memory-safe for all indices, and [`BoundsCheck`] reports those outside.
pub(crate) struct Gather(BlockCode);

impl Gather {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        BlockCode::new(spec, bound, config, BLOCK).map(Gather)
    }

    pub fn workspace(&self) -> u64 {
        self.0.workspace()
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::Gather(gather) = &spec.body else {
            unreachable!("checked by new")
        };
        let lookup = Lookup {
            source: OperandView::new(&gather.source, launch.args[0], launch.env),
            index: OperandView::new(&gather.index, launch.args[1], launch.env),
            axis_stride: gather.axis_stride.at(launch.env) as isize,
            axis_len: gather.axis_len.at(launch.env),
            last: spec.dims.len() - 1,
        };
        let fill = |space: &Space, block: &Block, values: &mut [u32]| {
            space.rows(block.from, block.points, |at, len, done| {
                // SAFETY: the row lies inside the space of the operands.
                unsafe { lookup.row(at, &mut values[done..done + len]) };
            });
        };
        // SAFETY: the caller's promise.
        unsafe { self.0.run(spec, launch, fill) };
    }
}

/// A gather at launch.
struct Lookup {
    source: OperandView,
    index: OperandView,
    axis_stride: isize,
    axis_len: i64,
    last: usize,
}

impl Lookup {
    /// The values of a row that begins at a point.
    ///
    /// # Safety
    /// The row lies inside the space of the operands.
    unsafe fn row(&self, at: &[usize], row: &mut [u32]) {
        if self.axis_len <= 0 {
            row.fill(0);
            return;
        }
        let (source, index) = (self.source.offset(at), self.index.offset(at));
        let (source_step, index_step) = (
            self.source.strides[self.last],
            self.index.strides[self.last],
        );
        let place = |k: usize| {
            // SAFETY: the caller's promise.
            let index = unsafe { self.index.load(index + k as isize * index_step) } as i32;
            source + i64::from(index).clamp(0, self.axis_len - 1) as isize * self.axis_stride
        };
        // SAFETY: the caller's promise; `place` has brought the index into the axis.
        let load = |offset: isize| unsafe { self.source.load(offset) };
        if index_step != 0 {
            row.iter_mut()
                .enumerate()
                .for_each(|(k, to)| *to = load(place(k) + k as isize * source_step));
        } else if source_step == 1 && self.source.dtype.bytes() == 4 {
            // SAFETY: the row's elements are neighbours in the source; scratch and operands do not
            // overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.source.element::<u32>(place(0)),
                    row.as_mut_ptr(),
                    row.len(),
                )
            };
        } else {
            let first = place(0);
            row.iter_mut()
                .enumerate()
                .for_each(|(k, to)| *to = load(first + k as isize * source_step));
        }
    }
}

/// See [`Body::BoundsCheck`].
pub(crate) struct BoundsCheck;

impl BoundsCheck {
    /// Indices that one worker checks at a time.
    const CHUNK: usize = 1 << 14;

    pub fn new(spec: &Spec, _bound: &Env, _config: &Config) -> Result<Self, SpecError> {
        check_rank(&spec.dims, 0)?;
        Ok(BoundsCheck)
    }

    pub fn workspace(&self) -> u64 {
        0
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) -> Result<(), Fault> {
        let Body::BoundsCheck(check) = &spec.body else {
            unreachable!("checked by new")
        };
        let (space, limit) = (
            Space::new(&spec.dims, launch.env),
            check.limit.at(launch.env),
        );
        let index = OperandView::new(&check.index, launch.args[0], launch.env);
        let step = index.strides[spec.dims.len().saturating_sub(1)];
        // SAFETY: called for points of the operand's space.
        let load = |offset: isize| i64::from(unsafe { index.load(offset) } as i32);
        let points = space.points();
        // The least position wins, for any order in which chunks finish.
        let first = AtomicU64::new(u64::MAX);
        launch.team.run(points.div_ceil(Self::CHUNK), &|chunk, _| {
            let from = chunk * Self::CHUNK;
            if first.load(Ordering::Relaxed) < from as u64 {
                return;
            }
            space.rows(from, Self::CHUNK.min(points - from), |at, len, done| {
                let row = index.offset(at);
                let is_bad = |k: &usize| !(0..limit).contains(&load(row + *k as isize * step));
                if let Some(k) = (0..len).find(is_bad) {
                    first.fetch_min((from + done + k) as u64, Ordering::Relaxed);
                }
            });
        });
        match first.into_inner() {
            u64::MAX => Ok(()),
            position => {
                let value = load(index.offset(&space.point(position as usize)));
                Err(Fault::Index {
                    position,
                    value,
                    limit: limit.max(0) as u64,
                })
            }
        }
    }
}
