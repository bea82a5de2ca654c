//! The order of elements along the last axis.
//!
//! Each element becomes a number of 64 bits: its value as an integer of the same order in the upper
//! half, its position in the lower. Therefore equal values keep their order, and one sort of
//! integers serves every type and both directions. No two keys are equal, so that their order is the
//! same however a row is divided.
//!
//! If only a few first keys are wanted, only these are sorted: a key is kept if it is below a
//! limit, and whenever the buffer of keys is full, the first ones are selected and the limit falls.
//! The buffer is a constant factor larger than the result, so that the time is linear even if every
//! key is below the limit.
//!
//! Threads share rows, or each row if there are fewer rows than threads: each sorts a part of it,
//! then each merges a range of the result.

use std::ops::Range;

use smallvec::SmallVec;

use super::pointwise::{OperandView, Scratch, Space, aligned, check_rank};
use super::{Config, Launch, SpecError};
use crate::dtype::{DType, Lane};
use crate::size::Env;
use crate::spec::{Body, Spec};

/// Elements that a thread takes at least: it sorts as many in 40 µs and selects a few of them in 3,
/// and a region costs one.
const THREAD_ELEMENTS_MIN: usize = 4096;
/// Parts of a row at most.
const ROW_PARTS_MAX: usize = 16;
/// Elements whose ranks are computed at once.
const RANK_BLOCK: usize = 64;

/// See [`Body::Sort`].
pub(crate) struct Sort {
    /// The most keys of a row that are held.
    held: usize,
    /// The most rows that are sorted at once.
    rows: usize,
    threads: usize,
}

impl Sort {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        check_rank(&spec.dims, 1)?;
        let Body::Sort(sort) = &spec.body else {
            return Err(SpecError::unsupported("not a sort"));
        };
        let (outer, last) = spec.dims.split_at(spec.dims.len() - 1);
        let threads = config.threads.max(1);
        Ok(Sort {
            held: (room(last[0].usize_at(bound)) * threads.min(ROW_PARTS_MAX))
                .min(sort.len.usize_at(bound)),
            rows: Space::new(outer, bound).points().min(threads),
            threads,
        })
    }

    fn row_bytes(&self) -> usize {
        aligned(self.held * size_of::<u64>())
    }

    pub fn workspace(&self) -> u64 {
        (self.row_bytes() * self.rows) as u64
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
        let scratch = Scratch::new(launch, self.row_bytes());
        let flip = if sort.descending { u32::MAX } else { 0 };
        let rows = outer.points();
        let parts = match rows < self.threads {
            true => share(len, self.threads.min(ROW_PARTS_MAX)),
            false => 1,
        };
        // The keys of a part of a row, of as many as are held of it.
        let keys = |slot: usize, part: usize| {
            let start = (len * part / parts).min(part * room(wanted));
            let count = range(len, part, parts).len().min(room(wanted));
            (scratch.of(slot).cast::<u64>().wrapping_add(start), count)
        };
        let to = |row| positions.offset(&outer.point(row)[..axis]);
        let put = |to: isize, k: usize, key: u64| {
            // SAFETY: an element of the row of positions, which no other worker writes.
            unsafe {
                positions
                    .element::<i32>(to + k as isize * positions.strides[axis])
                    .write(key as u32 as i32)
            };
        };
        launch.team.run(rows * parts, &|chunk, worker| {
            let (row, part) = (chunk / parts, chunk % parts);
            let from = source.offset(&outer.point(row)[..axis]);
            let slot = if rows < self.threads { row } else { worker };
            let (own, count) = keys(slot, part);
            // SAFETY: a slot of the workspace has room for a row's keys, and those of its parts are
            // disjoint; a slot is that of one row, or of one worker.
            let own = unsafe { std::slice::from_raw_parts_mut(own, count) };
            let mut selection = Selection::new(own, wanted);
            let part = range(len, part, parts);
            let mut ranks = [0; RANK_BLOCK];
            for first in part.clone().step_by(RANK_BLOCK) {
                let ranks = &mut ranks[..(part.end - first).min(RANK_BLOCK)];
                // SAFETY: elements of the row.
                unsafe { load_ranks(&source, from, axis, first, ranks) };
                for (k, &rank) in (first..).zip(&*ranks) {
                    selection.add(u64::from(rank ^ flip) << 32 | k as u64);
                }
            }
            let sorted = selection.sorted();
            if parts == 1 {
                let to = to(row);
                sorted
                    .iter()
                    .enumerate()
                    .for_each(|(k, &key)| put(to, k, key));
            }
        });
        if parts == 1 {
            return;
        }
        let shares = share(wanted, parts);
        launch.team.run(rows * shares, &|chunk, _| {
            let (row, ranks) = (chunk / shares, range(wanted, chunk % shares, shares));
            let runs: SmallVec<[&[u64]; ROW_PARTS_MAX]> = (0..parts)
                .map(|part| {
                    let (run, count) = keys(row, part);
                    // SAFETY: the keys that were sorted above, which nothing writes any more.
                    unsafe { std::slice::from_raw_parts(run, count.min(wanted)) }
                })
                .collect();
            let to = to(row);
            merge(&runs, ranks, |k, key| put(to, k, key));
        });
    }
}

/// How many keys are held while the first `wanted` of more are selected.
fn room(wanted: usize) -> usize {
    2 * wanted + 256
}

/// How many parts `count` elements are divided into, at most `most`.
fn share(count: usize, most: usize) -> usize {
    (count / THREAD_ELEMENTS_MIN).clamp(1, most)
}

/// The elements of a part.
fn range(count: usize, part: usize, parts: usize) -> Range<usize> {
    count * part / parts..count * (part + 1) / parts
}

/// The first `wanted` of the keys that are added, or all.
struct Selection<'a> {
    /// Room for all keys, or for more than are wanted.
    held: &'a mut [u64],
    count: usize,
    wanted: usize,
    /// Keys from here on are not among the first ones.
    limit: u64,
}

impl<'a> Selection<'a> {
    fn new(held: &'a mut [u64], wanted: usize) -> Self {
        Selection {
            held,
            count: 0,
            wanted,
            // No key is the largest number, because no position is.
            limit: u64::MAX,
        }
    }

    #[inline(always)]
    fn add(&mut self, key: u64) {
        if key < self.limit {
            if self.count == self.held.len() {
                self.limit = *self.held.select_nth_unstable(self.wanted).1;
                self.count = self.wanted;
            }
            self.held[self.count] = key;
            self.count += 1;
        }
    }

    /// The first keys in their order.
    fn sorted(self) -> &'a mut [u64] {
        let (held, wanted) = (&mut self.held[..self.count], self.wanted);
        if wanted < held.len() {
            held.select_nth_unstable(wanted);
        }
        let first = held.len().min(wanted);
        let first = &mut held[..first];
        first.sort_unstable();
        first
    }
}

/// Merges sorted runs: calls `put(rank, key)` for the keys of these ranks.
fn merge(runs: &[&[u64]], ranks: Range<usize>, mut put: impl FnMut(usize, u64)) {
    // Bisects for the key below which there are as many as the first rank.
    let (mut low, mut high) = (0, u64::MAX);
    let below = |run: &[u64], limit| run.partition_point(|&key| key < limit);
    while low < high {
        let middle = low + (high - low) / 2;
        let count: usize = runs.iter().map(|run| below(run, middle)).sum();
        if count < ranks.start {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    let mut next = [0; ROW_PARTS_MAX];
    // The next key of each run; the largest number at its end.
    let mut heads = [u64::MAX; ROW_PARTS_MAX];
    let head = |run: usize, at: usize| runs[run].get(at).copied().unwrap_or(u64::MAX);
    for (run, keys) in runs.iter().enumerate() {
        next[run] = below(keys, low);
        heads[run] = head(run, next[run]);
    }
    let heads = &mut heads[..runs.len()];
    for rank in ranks {
        // Selected, not branched over: the order of two runs cannot be predicted.
        let (mut first, mut key) = (0, heads[0]);
        for (run, &head) in heads.iter().enumerate().skip(1) {
            first = if head < key { run } else { first };
            key = key.min(head);
        }
        next[first] += 1;
        heads[first] = head(first, next[first]);
        put(rank, key);
    }
}

/// The ranks of consecutive elements of a row whose first element is at `from`, from element `first`
/// on.
///
/// # Safety
/// They are elements of the operand, which nothing writes meanwhile.
unsafe fn load_ranks(
    source: &OperandView,
    from: isize,
    axis: usize,
    first: usize,
    ranks: &mut [u32],
) {
    let stride = source.strides[axis];
    let from = from + first as isize * stride;
    let mut load = |dtype: DType| {
        // The type as a constant, for a loop of its own.
        let mut source = *source;
        source.dtype = dtype;
        for (k, slot) in ranks.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            let bits = unsafe { source.load(from + k as isize * stride) };
            *slot = rank(bits, dtype.lane());
        }
    };
    match source.dtype {
        DType::F32 => load(DType::F32),
        DType::I32 => load(DType::I32),
        dtype => load(dtype),
    }
}

/// An integer of the same order as the value: −0 is 0, and every NaN is the same, above all
/// numbers.
fn rank(bits: u32, lane: Lane) -> u32 {
    const SIGN: u32 = 1 << 31;
    match lane {
        Lane::F32 => {
            let value = f32::from_bits(bits);
            let bits = if value.is_nan() {
                f32::NAN.to_bits() & !SIGN
            } else {
                (value + 0.0).to_bits()
            };
            // Without a branch: signs are as good as random.
            bits ^ ((bits.cast_signed() >> 31).cast_unsigned() | SIGN)
        }
        Lane::I32 | Lane::Bool => bits ^ SIGN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_keys_are_selected_in_any_order_of_all() {
        let keys = |n: u64| (0..n).map(|i| i << 32 | i);
        let orders: [Vec<u64>; 3] = [
            keys(3000).collect(),
            keys(3000).rev().collect(),
            (0..3000)
                .map(|i| i * 1877 % 3000)
                .map(|i| i << 32 | i)
                .collect(),
        ];
        for order in orders {
            for wanted in [0, 1, 7, 1000, 2999, 3000, 4000] {
                let mut held = vec![0; room(wanted).min(order.len())];
                let mut selection = Selection::new(&mut held, wanted);
                order.iter().for_each(|&key| selection.add(key));
                let expected: Vec<u64> = keys(3000).take(wanted).collect();
                assert_eq!(selection.sorted(), expected);
            }
        }
    }

    #[test]
    fn runs_merge_from_any_rank_on() {
        // Runs without keys, of one value, and of the whole range; no two keys are equal.
        let mut runs: Vec<Vec<u64>> = vec![vec![]; 5];
        for i in 0..200u64 {
            runs[(i * i % 7 % 4) as usize].push((i / 50) << 32 | i);
        }
        runs[1].push(u64::MAX - 1);
        runs[2].insert(0, 0);
        runs[0].retain(|&key| key != 0);
        let mut expected = runs.concat();
        expected.sort_unstable();
        let runs: Vec<&[u64]> = runs.iter().map(Vec::as_slice).collect();
        for first in 0..=expected.len() {
            for count in [0, 1, 50, expected.len()] {
                let end = (first + count).min(expected.len());
                let mut merged = vec![];
                merge(&runs, first..end, |rank, key| merged.push((rank, key)));
                let ranks = first..end;
                let wanted: Vec<_> = ranks.clone().zip(expected[ranks].iter().copied()).collect();
                assert_eq!(merged, wanted);
            }
        }
    }

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
