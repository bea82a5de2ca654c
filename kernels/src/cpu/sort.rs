//! The order of elements along the last axis.
//!
//! Each element becomes a number of 64 bits: its value as an integer of the same order in the upper
//! half, its position in the lower. Therefore equal values keep their order, and one sort of
//! integers serves every type and both directions.

use super::pointwise::{OperandView, Scratch, Space, aligned, check_rank};
use super::{Config, Launch, SpecError};
use crate::dtype::Lane;
use crate::size::Env;
use crate::spec::{Body, Spec};

/// See [`Body::Sort`]. Rows are shared among threads; one row is sorted by one thread.
pub(crate) struct Sort {
    row_max: usize,
    workers: usize,
}

impl Sort {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        check_rank(&spec.dims, 1)?;
        let Body::Sort(sort) = &spec.body else {
            return Err(SpecError::unsupported("not a sort"));
        };
        let rows = Space::new(&spec.dims[..spec.dims.len() - 1], bound).points();
        Ok(Sort {
            row_max: sort.len.usize_at(bound),
            workers: if rows <= 1 { 1 } else { config.threads.max(1) },
        })
    }

    fn worker_bytes(&self) -> usize {
        aligned(self.row_max * size_of::<u64>())
    }

    pub fn workspace(&self) -> u64 {
        (self.worker_bytes() * self.workers) as u64
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::Sort(sort) = &spec.body else {
            unreachable!("checked by new")
        };
        let (outer, last) = spec.dims.split_at(spec.dims.len() - 1);
        let (outer, len) = (Space::new(outer, launch.env), sort.len.usize_at(launch.env));
        let wanted = last[0].usize_at(launch.env).min(len);
        let source = OperandView::new(&sort.source, launch.args[0], launch.env);
        let positions = OperandView::new(&sort.positions, launch.args[1], launch.env);
        let axis = spec.dims.len() - 1;
        let scratch = Scratch::new(launch, self.worker_bytes());
        let flip = if sort.descending { u32::MAX } else { 0 };
        launch.team.run(outer.points(), &|row, worker| {
            let at = outer.point(row);
            let (from, to) = (source.offset(&at[..axis]), positions.offset(&at[..axis]));
            let own = if self.workers == 1 { 0 } else { worker };
            // SAFETY: the worker's part of the workspace holds the longest row, and is its own.
            let keys =
                unsafe { std::slice::from_raw_parts_mut(scratch.of(own).cast::<u64>(), len) };
            for (k, key) in keys.iter_mut().enumerate() {
                // SAFETY: an element of the row.
                let bits = unsafe { source.load(from + k as isize * source.strides[axis]) };
                *key = u64::from(rank(bits, source.dtype.lane()) ^ flip) << 32 | k as u64;
            }
            // Of a few, only these are put in order: selection, then a sort of them.
            if wanted < len {
                keys.select_nth_unstable(wanted);
            }
            let keys = &mut keys[..wanted];
            keys.sort_unstable();
            for (k, key) in keys.iter().enumerate() {
                // SAFETY: an element of the row of positions, which no other worker writes.
                unsafe {
                    positions
                        .element::<i32>(to + k as isize * positions.strides[axis])
                        .write(*key as u32 as i32)
                };
            }
        });
    }
}

/// An integer of the same order as the value: −0 is 0, and every NaN is the same, above all
/// numbers.
fn rank(bits: u32, lane: Lane) -> u32 {
    match lane {
        Lane::F32 => {
            let value = f32::from_bits(bits);
            let bits = if value.is_nan() {
                f32::NAN.to_bits() & (u32::MAX >> 1)
            } else {
                (value + 0.0).to_bits()
            };
            if bits >> 31 == 0 {
                bits | 1 << 31
            } else {
                !bits
            }
        }
        Lane::I32 | Lane::Bool => bits ^ 1 << 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_keep_the_order_of_values() {
        let floats = [
            f32::NEG_INFINITY,
            -3.0,
            -1e-40,
            -0.0,
            1e-40,
            2.5,
            f32::MAX,
            f32::INFINITY,
            f32::NAN,
        ];
        let ranks: Vec<u32> = floats
            .iter()
            .map(|f| rank(f.to_bits(), Lane::F32))
            .collect();
        assert!(ranks.is_sorted_by(|a, b| a < b), "{ranks:?}");
        assert_eq!(rank((-0.0f32).to_bits(), Lane::F32), rank(0, Lane::F32));
        assert_eq!(
            rank((-f32::NAN).to_bits(), Lane::F32),
            rank(f32::NAN.to_bits() | 1, Lane::F32)
        );
        assert!([i32::MIN, -1, 0, 7, i32::MAX].is_sorted_by_key(|&i| rank(i as u32, Lane::I32)));
    }
}
