//! Interleaves the phases of an input gradient.

use crate::cpu::simd::Routine;
use crate::math::Arith;

/// Neighbouring elements of a phase that are moved together.
const RUN: usize = 8;

/// Channels of one image in all output positions, row-major, made of the sums of their phases.
pub(super) struct Interleave {
    /// The first sum of the first phase.
    pub from: *const f32,
    /// Elements between channels, phases and rows of the sums.
    pub from_strides: [usize; 3],
    /// Phases of rows and of columns.
    pub phases: [usize; 2],
    /// Channels, rows and columns of the result.
    pub size: [usize; 3],
    pub to: *mut f32,
    /// Elements between channels and rows of the result.
    pub to_strides: [usize; 2],
}

impl Routine for Interleave {
    type Args = Interleave;

    /// # Safety
    /// The sums of all positions may be read and the results written; they do not overlap.
    #[inline(always)]
    unsafe fn run<A: Arith>(args: &Interleave) {
        let [channels, rows, columns] = args.size;
        let ([from_channel, from_phase, from_row], [high, wide]) = (args.from_strides, args.phases);
        for channel in 0..channels {
            for row in 0..rows {
                let first =
                    channel * from_channel + row % high * wide * from_phase + row / high * from_row;
                // SAFETY: the caller's promise; a phase has an element for each of its columns.
                unsafe {
                    let to = std::slice::from_raw_parts_mut(
                        args.to
                            .add(channel * args.to_strides[0] + row * args.to_strides[1]),
                        columns,
                    );
                    let phase = |k: usize| {
                        let length = columns.saturating_sub(k).div_ceil(wide);
                        std::slice::from_raw_parts(args.from.add(first + k * from_phase), length)
                    };
                    if wide == 2 {
                        interleave(phase(0), phase(1), to);
                        continue;
                    }
                    for k in 0..wide.min(columns) {
                        for (to, &from) in to[k..].iter_mut().step_by(wide).zip(phase(k)) {
                            *to = from;
                        }
                    }
                }
            }
        }
    }
}

/// The elements of `even` and `odd` in turns.
#[inline(always)]
fn interleave(even: &[f32], odd: &[f32], to: &mut [f32]) {
    let (evens, odds) = (even.as_chunks::<RUN>(), odd.as_chunks::<RUN>());
    let runs = evens.0.iter().zip(odds.0);
    for ((even, odd), to) in runs.zip(to.as_chunks_mut::<{ 2 * RUN }>().0) {
        *to = std::array::from_fn(|i| [even, odd][i % 2][i / 2]);
    }
    let done = odds.0.len() * RUN;
    let (even, odd, to) = (&even[done..], &odd[done..], &mut to[2 * done..]);
    for ((&even, &odd), to) in even.iter().zip(odd).zip(to.as_chunks_mut::<2>().0) {
        *to = [even, odd];
    }
    if let (true, Some(&even), Some(to)) = (even.len() > odd.len(), even.last(), to.last_mut()) {
        *to = even;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::cpu::simd::entry;

    #[test]
    fn results_lie_where_their_phases_say() {
        let sizes: [usize; 9] = [1, 2, 5, 15, 16, 17, 32, 33, 48];
        for (isa, columns) in Isa::available()
            .into_iter()
            .flat_map(|isa| sizes.map(|columns| (isa, columns)))
        {
            for [high, wide] in [[1, 2], [2, 2], [2, 1], [3, 3], [2, 4]] {
                let (channels, rows) = (2, 3usize);
                let from_row = columns.div_ceil(wide);
                let from_phase = rows.div_ceil(high) * from_row + 1;
                let from_channel = high * wide * from_phase + 3;
                let from: Vec<f32> = (0..channels * from_channel).map(|i| i as f32).collect();
                let to_strides = [rows * (columns + 2), columns + 2];
                let mut to = vec![-1.0; channels * to_strides[0]];
                let args = Interleave {
                    from: from.as_ptr(),
                    from_strides: [from_channel, from_phase, from_row],
                    phases: [high, wide],
                    size: [channels, rows, columns],
                    to: to.as_mut_ptr(),
                    to_strides,
                };
                // SAFETY: the buffers have these sizes.
                unsafe { entry::<Interleave>(isa)(&args) };
                for (i, &got) in to.iter().enumerate() {
                    let (channel, row) = (i / to_strides[0], i % to_strides[0] / to_strides[1]);
                    let column = i % to_strides[1];
                    let phase = row % high * wide + column % wide;
                    let at = channel * from_channel
                        + phase * from_phase
                        + row / high * from_row
                        + column / wide;
                    let expected = if column < columns { at as f32 } else { -1.0 };
                    assert_eq!(got, expected, "{isa}: element {i} of {columns} columns");
                }
            }
        }
    }
}
