//! The positions of true elements: counted chunk by chunk, then written chunk by chunk.
//!
//! Chunks are cut by the size of the mask alone, and where a chunk's positions go follows from the
//! counts of those before it: the order is that of a sequential loop for any number of threads
//! (compaction by prefix sums; Blelloch 1990).

use std::sync::atomic::{AtomicU32, Ordering};

use super::pointwise::{OperandView, Space, aligned, check_rank};
use super::{Config, Launch, SpecError};
use crate::size::Env;
use crate::spec::{Body, Spec};

/// Elements of a chunk.
const CHUNK: usize = 1 << 12;

/// See [`Body::Nonzero`]. Positions beyond the end of the result are not written, and elements of
/// the result beyond the positions are 0: the run is memory-safe for any length of the result.
pub(crate) struct Nonzero {
    chunks_max: usize,
}

impl Nonzero {
    pub fn new(spec: &Spec, bound: &Env, _config: &Config) -> Result<Self, SpecError> {
        let Body::Nonzero(nonzero) = &spec.body else {
            return Err(SpecError::unsupported("not a compaction"));
        };
        check_rank(&nonzero.space, 0)?;
        Ok(Nonzero {
            chunks_max: Space::new(&nonzero.space, bound).points().div_ceil(CHUNK),
        })
    }

    pub fn workspace(&self) -> u64 {
        aligned(self.chunks_max * size_of::<u32>()) as u64
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::Nonzero(nonzero) = &spec.body else {
            unreachable!("checked by new")
        };
        let (space, capacity) = (
            Space::new(&nonzero.space, launch.env),
            spec.dims[0].usize_at(launch.env),
        );
        let mask = OperandView::new(&nonzero.mask, launch.args[0], launch.env);
        let positions = OperandView::new(&nonzero.positions, launch.args[1], launch.env);
        let points = space.points();
        let chunks = points.div_ceil(CHUNK);
        let step = mask.strides[nonzero.space.len().saturating_sub(1)];
        let each = |chunk: usize, visit: &mut dyn FnMut(usize)| {
            let from = chunk * CHUNK;
            space.rows(from, CHUNK.min(points - from), |at, len, done| {
                let first = mask.offset(at);
                for k in 0..len {
                    // SAFETY: a point of the mask's space.
                    if unsafe { mask.load(first + k as isize * step) } != 0 {
                        visit(from + done + k);
                    }
                }
            });
        };
        // SAFETY: the workspace has a counter for each chunk of the bound, and belongs to this
        // launch.
        let counts =
            unsafe { std::slice::from_raw_parts(launch.workspace.cast::<AtomicU32>(), chunks) };
        launch.team.run(chunks, &|chunk, _| {
            let mut count = 0;
            each(chunk, &mut |_| count += 1);
            counts[chunk].store(count, Ordering::Relaxed);
        });
        // From counts to where each chunk begins.
        let mut total = 0u32;
        for count in counts {
            let here = count.load(Ordering::Relaxed);
            count.store(total, Ordering::Relaxed);
            total += here;
        }
        let write = |at: usize, position: i32| {
            // SAFETY: inside the result, and no other chunk writes it: chunks begin where those
            // before end.
            unsafe {
                positions
                    .element::<i32>(at as isize * positions.strides[0])
                    .write(position)
            };
        };
        launch.team.run(chunks, &|chunk, _| {
            let mut to = counts[chunk].load(Ordering::Relaxed) as usize;
            each(chunk, &mut |position| {
                if to < capacity {
                    write(to, position as i32);
                }
                to += 1;
            });
        });
        (total as usize..capacity).for_each(|at| write(at, 0));
    }
}
