//! The softmax of a panel of queries: its queries are the lanes of vectors, one vector for each key.

use std::ops::Range;

use crate::cpu::Isa;
use crate::cpu::simd::{Entry, Routine, entry};
use crate::math::{Arith, exp, tanh};
use crate::spec::Scores;

/// Most queries of a panel.
pub(super) const PANEL_QUERIES: usize = 32;

/// Replaces the products of queries and keys in a panel by the exponentials of their scores, relative
/// to the largest score of the query, and sums them.
pub(super) struct Exponentials {
    /// The products of the first key.
    pub at: *mut f32,
    /// Elements between two keys: 4, 8, 16 or 32.
    pub width: usize,
    /// The queries of the panel, of which there are at most as many as lanes.
    pub queries: Range<usize>,
    /// The number of keys, and those of the panel.
    pub keys: usize,
    pub seen: Range<usize>,
    pub scores: Scores,
    /// Terms of the scores, of which −∞ hides a key.
    pub mask: Terms,
    /// The derivatives of the limited scores, a vector for each key; null if they are not needed.
    pub slopes: *mut f32,
    /// The sums, one for each lane.
    pub sums: *mut f32,
}

/// Terms that are added to the scores of the keys of a panel.
#[derive(Clone, Copy)]
pub(super) enum Terms {
    /// None.
    None,
    /// One for each key.
    OfKeys(*const f32),
    /// A vector for each key.
    OfPairs(*const f32),
}

/// The routines for an instruction set.
pub(super) struct Routines {
    pub exponentials: Entry<Exponentials>,
    pub quotients: Entry<Quotients>,
    pub score_gradients: Entry<ScoreGradients>,
}

impl Routines {
    pub fn new(isa: Isa) -> Routines {
        Routines {
            exponentials: entry::<Exponentials>(isa),
            quotients: entry::<Quotients>(isa),
            score_gradients: entry::<ScoreGradients>(isa),
        }
    }
}

impl Routine for Exponentials {
    type Args = Exponentials;

    /// # Safety
    /// The products may be read and written, and `width` sums written.
    #[inline(always)]
    unsafe fn run<A: Arith>(args: &Exponentials) {
        // SAFETY: the caller's promise.
        unsafe {
            match args.width {
                4 => args.exponentials::<A, 4>(),
                8 => args.exponentials::<A, 8>(),
                16 => args.exponentials::<A, 16>(),
                _ => args.exponentials::<A, 32>(),
            }
        }
    }
}

impl Exponentials {
    /// # Safety
    /// As for [`Exponentials::run`], for N lanes.
    #[inline(always)]
    unsafe fn exponentials<A: Arith, const N: usize>(&self) {
        // SAFETY: the caller's promise.
        let (rows, sums) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.at.cast::<[f32; N]>(), self.seen.len()),
                &mut *self.sums.cast::<[f32; N]>(),
            )
        };
        // The keys that each lane sees, relative to the first of the panel; a lane without a query
        // sees as much as the last one.
        let (mut from, mut to) = ([0i32; N], [0i32; N]);
        for (lane, (from, to)) in from.iter_mut().zip(&mut to).enumerate() {
            let query = (self.queries.start + lane).min(self.queries.end.saturating_sub(1));
            let seen = self.scores.visible(query, self.keys);
            *from = seen.start.saturating_sub(self.seen.start) as i32;
            *to = seen.end.saturating_sub(self.seen.start) as i32;
        }
        // All lanes see the keys in the middle.
        let start = from.iter().copied().max().unwrap_or(0).max(0) as usize;
        let end = to.iter().copied().min().unwrap_or(0).max(0) as usize;
        let (start, end) = (start.min(rows.len()), end.min(rows.len()));
        let start = start.min(end);
        let plain = self.scores.soft_cap.is_none() && matches!(self.mask, Terms::None);
        let scale = if plain {
            self.scores.scale
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.adjust::<A, N>(rows) };
            1.0
        };
        let mut lanes = Lanes {
            scale,
            from,
            to,
            largest: [f32::NEG_INFINITY; N],
            sum: [0.0; N],
        };
        let parts = [
            (0..start, true),
            (start..end, false),
            (end..rows.len(), true),
        ];
        for (keys, masked) in &parts {
            match masked {
                true => lanes.scores::<true>(rows, keys.clone()),
                false => lanes.scores::<false>(rows, keys.clone()),
            }
        }
        // A query that sees no key has exponentials of 0.
        for largest in &mut lanes.largest {
            *largest = if *largest == f32::NEG_INFINITY {
                0.0
            } else {
                *largest
            };
        }
        for (keys, masked) in &parts {
            for first in keys.clone().step_by(KEY_BLOCK) {
                let keys = first..keys.end.min(first + KEY_BLOCK);
                match masked {
                    true => lanes.powers::<A, true>(rows, keys),
                    false => lanes.powers::<A, false>(rows, keys),
                }
            }
        }
        *sums = lanes.sum;
    }

    /// Makes scores of products: scales and limits them, and adds the terms of the mask.
    ///
    /// # Safety
    /// As for [`Exponentials::run`], for N lanes.
    #[inline(always)]
    unsafe fn adjust<A: Arith, const N: usize>(&self, rows: &mut [[f32; N]]) {
        let scale = self.scores.scale;
        for (key, row) in rows.iter_mut().enumerate() {
            for score in row.iter_mut() {
                *score *= scale;
            }
            if let Some(cap) = self.scores.soft_cap {
                let mut slopes = [0.0; N];
                for lane in 0..N {
                    let part = tanh::<A>(row[lane] / cap);
                    row[lane] = part * cap;
                    slopes[lane] = 1.0 - part * part;
                }
                if !self.slopes.is_null() {
                    // SAFETY: the caller's promise.
                    unsafe { *self.slopes.cast::<[f32; N]>().add(key) = slopes };
                }
            }
            // SAFETY: there is a term, or a vector of them, for each key.
            let terms = unsafe {
                match self.mask {
                    Terms::None => continue,
                    Terms::OfKeys(at) => [*at.add(key); N],
                    Terms::OfPairs(at) => *at.cast::<[f32; N]>().add(key),
                }
            };
            for lane in 0..N {
                let hidden = terms[lane] == f32::NEG_INFINITY;
                let score = row[lane] + terms[lane];
                row[lane] = if hidden { f32::NEG_INFINITY } else { score };
            }
        }
    }
}

/// Keys whose exponentials are summed before their sum is added to the others.
const KEY_BLOCK: usize = 64;

/// The state of the lanes.
struct Lanes<const N: usize> {
    scale: f32,
    /// The keys that each lane sees.
    from: [i32; N],
    to: [i32; N],
    largest: [f32; N],
    sum: [f32; N],
}

impl<const N: usize> Lanes<N> {
    #[inline(always)]
    fn sees(&self, key: usize, lane: usize) -> bool {
        (self.from[lane] <= key as i32) & ((key as i32) < self.to[lane])
    }

    /// Scales products, hides those of keys that a lane does not see, and finds the largest.
    #[inline(always)]
    fn scores<const MASKED: bool>(&mut self, rows: &mut [[f32; N]], keys: Range<usize>) {
        let mut largest = self.largest;
        for key in keys {
            let row = &mut rows[key];
            for lane in 0..N {
                let score = row[lane] * self.scale;
                let hidden = MASKED && !self.sees(key, lane);
                let score = if hidden { f32::NEG_INFINITY } else { score };
                row[lane] = score;
                // (A NaN is no largest, and makes its exponential and the sum NaN.)
                let above = score > largest[lane];
                largest[lane] = if above { score } else { largest[lane] };
            }
        }
        self.largest = largest;
    }

    /// Computes and sums exponentials.
    #[inline(always)]
    fn powers<A: Arith, const MASKED: bool>(&mut self, rows: &mut [[f32; N]], keys: Range<usize>) {
        let mut sum = [0.0; N];
        for key in keys {
            let row = &mut rows[key];
            for lane in 0..N {
                let power = exp::<A>(row[lane] - self.largest[lane]);
                let hidden = MASKED && !self.sees(key, lane);
                let power = if hidden { 0.0 } else { power };
                row[lane] = power;
                sum[lane] += power;
            }
        }
        for (total, sum) in self.sum.iter_mut().zip(sum) {
            *total += sum;
        }
    }
}

/// Divides the vectors of a panel by those of the sums.
pub(super) struct Quotients {
    pub at: *mut f32,
    /// Elements of a vector: 4, 8, 16 or 32, and the number of vectors.
    pub width: usize,
    pub count: usize,
    pub sums: *const f32,
}

impl Routine for Quotients {
    type Args = Quotients;

    /// # Safety
    /// The vectors may be read and written, and `width` sums read.
    #[inline(always)]
    unsafe fn run<A: Arith>(args: &Quotients) {
        // SAFETY: the caller's promise.
        unsafe {
            match args.width {
                4 => args.quotients::<4>(),
                8 => args.quotients::<8>(),
                16 => args.quotients::<16>(),
                _ => args.quotients::<32>(),
            }
        }
    }
}

impl Quotients {
    /// # Safety
    /// As for [`Quotients::run`], for N lanes.
    #[inline(always)]
    unsafe fn quotients<const N: usize>(&self) {
        // SAFETY: the caller's promise.
        let (rows, sums) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.at.cast::<[f32; N]>(), self.count),
                *self.sums.cast::<[f32; N]>(),
            )
        };
        for row in rows {
            for lane in 0..N {
                row[lane] /= sums[lane];
            }
        }
    }
}

/// Turns the exponentials of a panel into weights, and the gradients of the weights into those of the
/// scores.
pub(super) struct ScoreGradients {
    /// Exponentials and gradients of the first key.
    pub weights: *mut f32,
    pub gradients: *mut f32,
    /// Elements of a vector: 8, 16 or 32, and the number of keys.
    pub width: usize,
    pub keys: usize,
    /// The sums of the exponentials.
    pub sums: *const f32,
    /// Panels of the result and of its gradient, and the number of their vectors.
    pub y: *const f32,
    pub dy: *const f32,
    pub columns: usize,
    pub scale: f32,
    /// A vector of factors for each key, or null.
    pub slopes: *const f32,
}

impl Routine for ScoreGradients {
    type Args = ScoreGradients;

    /// # Safety
    /// Weights and gradients may be read and written, and sums and panels read.
    #[inline(always)]
    unsafe fn run<A: Arith>(args: &ScoreGradients) {
        // SAFETY: the caller's promise.
        unsafe {
            match args.width {
                8 => args.gradients::<8>(),
                16 => args.gradients::<16>(),
                _ => args.gradients::<32>(),
            }
        }
    }
}

impl ScoreGradients {
    /// # Safety
    /// As for [`ScoreGradients::run`], for N lanes.
    #[inline(always)]
    unsafe fn gradients<const N: usize>(&self) {
        // SAFETY: the caller's promise.
        let (weights, gradients, sums, y, dy) = unsafe {
            (
                std::slice::from_raw_parts_mut(self.weights.cast::<[f32; N]>(), self.keys),
                std::slice::from_raw_parts_mut(self.gradients.cast::<[f32; N]>(), self.keys),
                *self.sums.cast::<[f32; N]>(),
                std::slice::from_raw_parts(self.y.cast::<[f32; N]>(), self.columns),
                std::slice::from_raw_parts(self.dy.cast::<[f32; N]>(), self.columns),
            )
        };
        let (mut delta, mut inverse) = ([0.0f32; N], [0.0f32; N]);
        for (y, dy) in y.iter().zip(dy) {
            for lane in 0..N {
                delta[lane] += y[lane] * dy[lane];
            }
        }
        for lane in 0..N {
            // A query that sees no key has no weights, and a result of NaN.
            let none = sums[lane] == 0.0;
            inverse[lane] = if none { 0.0 } else { 1.0 / sums[lane] };
            delta[lane] = if none { 0.0 } else { delta[lane] };
        }
        for (weight, gradient) in weights.iter_mut().zip(&mut *gradients) {
            for lane in 0..N {
                weight[lane] *= inverse[lane];
                let centred = gradient[lane] - delta[lane];
                gradient[lane] = weight[lane] * centred * self.scale;
            }
        }
        if self.slopes.is_null() {
            return;
        }
        // SAFETY: the caller's promise.
        let slopes =
            unsafe { std::slice::from_raw_parts(self.slopes.cast::<[f32; N]>(), self.keys) };
        for (gradient, slope) in gradients.iter_mut().zip(slopes) {
            for lane in 0..N {
                gradient[lane] *= slope[lane];
            }
        }
    }
}
