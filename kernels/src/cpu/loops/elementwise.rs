//! Loops without reductions.

use super::{CHUNK_POINTS_MAX, CHUNK_POINTS_MIN, Loop, chunk};
use crate::cpu::Launch;
use crate::cpu::tile::{AXES, Along, Bound, MAX_ROWS, Machine, TILE, VECTOR};
use crate::spec::Spec;

impl Loop {
    /// # Safety
    /// See [`Loop::run`].
    pub(super) unsafe fn elementwise(&self, spec: &Spec, launch: &Launch) {
        let mut bound = Bound::new(&self.code);
        bound.resolve(spec, launch, &self.order);
        let mut axes = bound.collapse(0, bound.dims().len());
        if bound.dims().contains(&0) {
            return;
        }
        if axes == 1 {
            bound.insert_axis(0);
            axes = 2;
        }
        let (row, col) = (axes - 2, axes - 1);
        if bound.dims()[col] < VECTOR / 2 && bound.dims()[row] >= 4 * bound.dims()[col] {
            // A short last axis would leave most of each vector empty.
            bound.swap_axes(row, col);
        }
        let bound = &bound;
        let dims = bound.dims();
        let transposes = |cs: isize, rs: isize| {
            rs != 0 && cs.unsigned_abs() > 1 && rs.unsigned_abs() < cs.unsigned_abs()
        };
        // Tall tiles where memory is transposed: it is read in runs of several cache lines, and
        // written in whole ones.
        let tall = dims[row] > 1
            && bound
                .accesses()
                .iter()
                .any(|w| transposes(w.strides[col], w.strides[row]));
        let wide = dims[col].min(if tall { VECTOR } else { TILE });
        let each = chunk(dims.iter().product(), CHUNK_POINTS_MIN);
        // Blocks of rows that share values which are invariant along them, of a chunk at most; a
        // long row is several blocks. Tall tiles need the largest possible number of rows.
        let high = if tall {
            MAX_ROWS
        } else {
            (each / dims[col]).clamp(1, MAX_ROWS)
        }
        .min(dims[row]);
        let most = if tall { CHUNK_POINTS_MAX } else { each };
        let long = dims[col].min((most / high / wide).max(1) * wide);
        let (across, down) = (dims[col].div_ceil(long), dims[row].div_ceil(high));
        let strips = dims[..row].iter().product::<usize>() * down * across;
        let per_chunk = (each / (long * high)).max(1);
        let work = |chunk: usize, worker: usize| {
            // SAFETY: the worker's own scratch memory.
            let mut machine =
                unsafe { Machine::new(bound, Along::Columns, self.scratch(launch, worker)) };
            for index in chunk * per_chunk..strips.min((chunk + 1) * per_chunk) {
                let mut at = [0; AXES];
                at[col] = index % across * long;
                at[row] = index / across % down * high;
                let mut rest = index / across / down;
                for axis in (0..row).rev() {
                    at[axis] = rest % dims[axis];
                    rest /= dims[axis];
                }
                machine.seek(&at[..axes], Some(row), Some(col));
                // SAFETY: the block of rows lies inside the space and belongs to this chunk alone.
                unsafe {
                    machine.sweep(
                        high.min(dims[row] - at[row]),
                        long.min(dims[col] - at[col]),
                        wide,
                    )
                };
            }
        };
        launch.team.run(strips.div_ceil(per_chunk), &work);
    }
}
