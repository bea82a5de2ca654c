//! Reductions over tiles.
//!
//! A tile is reduced along its columns (each row gives one value) or along its rows (each column
//! gives one). Along the columns, a row has [`VECTOR`] accumulators, one for the columns of each
//! residue, that are combined at the end as a tree. A tile's values are reduced first and the
//! result is then added to the accumulators, so that the rounding error of a long sum grows with
//! the number of tiles rather than of elements.

use std::marker::PhantomData;

use super::VECTOR;
use super::ops::View;
use crate::cpu::Isa;
use crate::cpu::simd::{Entry, Routine, entry};
use crate::dtype::Lane;
use crate::math::Arith;
use crate::scalar::{Joined, Lanewise, Negation, Product, ProductSum, ScalarOp, Sum, Word, code};
use crate::spec::ReduceOp;

/// The work of one reduction on one tile.
pub(super) struct ReduceCall {
    /// The value that is reduced, or the arguments of the operation whose results are; the last one
    /// repeats.
    pub args: [View; 3],
    pub rows: usize,
    /// Columns that count; reads are rounded up to whole vectors.
    pub cols: usize,
    pub acc: *mut u32,
    /// The destination of the finished values: `words` lines, `stride` lanes apart.
    pub out: *mut u32,
    pub stride: usize,
    pub identity: u32,
    /// Position of the tile's first element among all that are reduced to the same value.
    pub position: u32,
}

/// The loops of one reduction.
#[derive(Clone, Copy)]
pub(super) struct ReduceCode {
    /// Reduces the columns of a tile: row `r` into `acc[r · VECTOR ..][.. VECTOR]`. Bit k of the
    /// index says that argument k is invariant.
    pub columns: [Entry<ReduceCall>; 8],
    /// Reduces the rows of a tile: column `c` into `acc[c]`.
    pub rows: [Entry<ReduceCall>; 8],
    /// Whether it computes the elements that it sums.
    pub joined: bool,
    /// Combines the accumulators of each row: `out[r]`, where `out` may be `acc` itself.
    pub finish: Entry<ReduceCall>,
    /// Combines `acc` (laid out as `out`) into `out`.
    pub merge: Entry<ReduceCall>,
    /// The accumulator of nothing.
    pub identity: u32,
    /// Words of an accumulator: a value, or a key and a position.
    pub words: usize,
}

impl ReduceCode {
    pub fn new(op: ReduceOp, lane: Lane, isa: Isa) -> ReduceCode {
        let float = lane == Lane::F32;
        match op {
            ReduceOp::Sum if float => loops::<code::Add<f32>>(isa, 0.0f32.to_bits()),
            ReduceOp::Sum => loops::<code::Add<i32>>(isa, 0),
            ReduceOp::Prod if float => loops::<code::Mul<f32>>(isa, 1.0f32.to_bits()),
            ReduceOp::Prod => loops::<code::Mul<i32>>(isa, 1),
            ReduceOp::Max if float => loops::<code::Max<f32>>(isa, f32::NEG_INFINITY.to_bits()),
            ReduceOp::Max => loops::<code::Max<i32>>(isa, i32::MIN as u32),
            ReduceOp::Min if float => loops::<code::Min<f32>>(isa, f32::INFINITY.to_bits()),
            ReduceOp::Min => loops::<code::Min<i32>>(isa, i32::MAX as u32),
            ReduceOp::Any => loops::<code::Or<bool>>(isa, 0),
            ReduceOp::All => loops::<code::And<bool>>(isa, 1),
            ReduceOp::ArgMax if float => position_loops::<LargestFloat>(isa),
            ReduceOp::ArgMin if float => position_loops::<SmallestFloat>(isa),
            ReduceOp::ArgMax => position_loops::<LargestInt>(isa),
            ReduceOp::ArgMin => position_loops::<SmallestInt>(isa),
            ReduceOp::SquaredDeviations => unreachable!("no loop has {op:?}"),
        }
    }

    /// The loops that sum the results of a float operation without storing them, if there are any.
    pub fn sum_of(op: ScalarOp, isa: Isa) -> Option<ReduceCode> {
        match op {
            ScalarOp::Mul => Some(ReduceCode::sums_of::<Product>(isa)),
            ScalarOp::Neg => Some(ReduceCode::sums_of::<Negation>(isa)),
            _ => None,
        }
    }

    /// The same for joined operations.
    pub fn sum_of_joined(joined: Joined, isa: Isa) -> Option<ReduceCode> {
        match joined {
            Joined::Pair {
                inner: ScalarOp::Mul,
                outer: ScalarOp::Add,
                ..
            } => Some(ReduceCode::sums_of::<ProductSum>(isa)),
            _ => None,
        }
    }

    fn sums_of<I: Lanewise<In = f32, Out = f32>>(isa: Isa) -> ReduceCode {
        let columns = [
            entry::<Columns<Sum, Results<I, 0>>>(isa),
            entry::<Columns<Sum, Results<I, 1>>>(isa),
            entry::<Columns<Sum, Results<I, 2>>>(isa),
            entry::<Columns<Sum, Results<I, 3>>>(isa),
        ];
        let rows = [
            entry::<Rows<Sum, Results<I, 0>>>(isa),
            entry::<Rows<Sum, Results<I, 1>>>(isa),
            entry::<Rows<Sum, Results<I, 2>>>(isa),
            entry::<Rows<Sum, Results<I, 3>>>(isa),
        ];
        let (last_columns, last_rows) = if const { I::ARITY > 2 } {
            (
                [
                    entry::<Columns<Sum, Results<I, 4>>>(isa),
                    entry::<Columns<Sum, Results<I, 5>>>(isa),
                    entry::<Columns<Sum, Results<I, 6>>>(isa),
                    entry::<Columns<Sum, Results<I, 7>>>(isa),
                ],
                [
                    entry::<Rows<Sum, Results<I, 4>>>(isa),
                    entry::<Rows<Sum, Results<I, 5>>>(isa),
                    entry::<Rows<Sum, Results<I, 6>>>(isa),
                    entry::<Rows<Sum, Results<I, 7>>>(isa),
                ],
            )
        } else {
            (columns, rows)
        };
        let both = |first: [Entry<ReduceCall>; 4], last: [Entry<ReduceCall>; 4]| {
            std::array::from_fn(|k| if k < 4 { first[k] } else { last[k - 4] })
        };
        ReduceCode {
            columns: both(columns, last_columns),
            rows: both(rows, last_rows),
            joined: true,
            ..ReduceCode::new(ReduceOp::Sum, Lane::F32, isa)
        }
    }
}

/// The loops that combine values by `O`, for which `identity` is the accumulator of nothing.
fn loops<O: Lanewise>(isa: Isa, identity: u32) -> ReduceCode {
    ReduceCode {
        columns: [entry::<Columns<O, Values>>(isa); 8],
        rows: [entry::<Rows<O, Values>>(isa); 8],
        joined: false,
        finish: entry::<Finish<O>>(isa),
        merge: entry::<Merge<O>>(isa),
        identity,
        words: 1,
    }
}

#[inline(always)]
fn join<O: Lanewise, A: Arith>(x: u32, y: u32) -> u32 {
    O::apply::<A>([O::In::of(x), O::In::of(y), O::In::of(y)]).bits()
}

type Vector = [u32; VECTOR];

/// Combines one vector into another, lane by lane.
#[inline(always)]
fn join_all<O: Lanewise, A: Arith>(into: &mut Vector, from: &Vector) {
    for (x, &y) in into.iter_mut().zip(from) {
        *x = join::<O, A>(*x, y);
    }
}

/// `n` accumulators that lie one after another.
///
/// # Safety
/// They must be writable and not be accessed otherwise meanwhile.
#[inline(always)]
unsafe fn lanes<'a>(start: *mut u32, n: usize) -> &'a mut [u32] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(start, n) }
}

/// Line `r` of argument `k` in whole vectors.
///
/// # Safety
/// The view must be readable there.
#[inline(always)]
unsafe fn line(call: &ReduceCall, k: usize, r: usize) -> *const Vector {
    // SAFETY: the caller's promise; an array of words is aligned as a word.
    unsafe { call.args[k].ptr.offset(r as isize * call.args[k].rs).cast() }
}

/// The elements that a reduction combines.
trait Elements: 'static {
    /// Combines a vector of a tile, of this row and number, into `sum`, as `masked` returns it.
    ///
    /// # Safety
    /// The views must be readable there.
    unsafe fn join<O: Lanewise, A: Arith>(
        call: &ReduceCall,
        at: [usize; 2],
        sum: &mut Vector,
        masked: impl Fn(&Vector) -> Vector,
    );
}

/// The values themselves.
struct Values;

impl Elements for Values {
    #[inline(always)]
    unsafe fn join<O: Lanewise, A: Arith>(
        call: &ReduceCall,
        [r, v]: [usize; 2],
        sum: &mut Vector,
        masked: impl Fn(&Vector) -> Vector,
    ) {
        // SAFETY: the caller's promise.
        join_all::<O, A>(sum, &masked(unsafe { &*line(call, 0, r).add(v) }));
    }
}

/// The results of an operation; bit k of `INVARIANT` says that argument k is invariant.
struct Results<I, const INVARIANT: u32>(PhantomData<I>);

impl<I: Lanewise<In = f32, Out = f32>, const INVARIANT: u32> Elements for Results<I, INVARIANT> {
    #[inline(always)]
    unsafe fn join<O: Lanewise, A: Arith>(
        call: &ReduceCall,
        [r, v]: [usize; 2],
        sum: &mut Vector,
        masked: impl Fn(&Vector) -> Vector,
    ) {
        let argument = |k: usize| {
            // SAFETY: the caller's promise.
            unsafe {
                let line = line(call, k, r);
                if INVARIANT >> k & 1 == 1 {
                    [*line.cast::<u32>(); VECTOR]
                } else {
                    *line.add(v)
                }
            }
        };
        // Arguments beyond those that count repeat the last.
        let [x, y, z] = [0, 1, 2].map(|k: usize| argument(k.min(I::ARITY - 1)));
        let mut results = [0; VECTOR];
        for (l, result) in results.iter_mut().enumerate() {
            *result = I::apply::<A>([x[l], y[l], z[l]].map(f32::of)).bits();
        }
        join_all::<O, A>(sum, &masked(&results));
    }
}

struct Columns<O, E>(PhantomData<(O, E)>);

/// Vectors reduced side by side, so that one addition need not wait for the one before.
const UNROLLED_VECTORS: usize = 4;

impl<O: Lanewise, E: Elements> Routine for Columns<O, E> {
    type Args = ReduceCall;

    /// The arguments must be readable and vary along columns as `E` says, the accumulators
    /// writable.
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        let (whole, rest) = (call.cols / VECTOR, call.cols % VECTOR);
        // The columns of the last, broken vector that count, as a mask.
        let counts: Vector = std::array::from_fn(|l| if l < rest { u32::MAX } else { 0 });
        let masked = |v: &Vector| {
            let mut masked = [0; VECTOR];
            for l in 0..VECTOR {
                masked[l] = (v[l] & counts[l]) | (call.identity & !counts[l]);
            }
            masked
        };
        for r in 0..call.rows {
            // SAFETY: the caller's promise.
            let acc = unsafe { &mut *call.acc.add(r * VECTOR).cast::<Vector>() };
            let join = |v: usize, sum: &mut Vector| {
                // SAFETY: the caller's promise.
                unsafe { E::join::<O, A>(call, [r, v], sum, |x| *x) }
            };
            let join_rest = |sum: &mut Vector| {
                // SAFETY: the caller's promise.
                unsafe { E::join::<O, A>(call, [r, whole], sum, masked) }
            };
            if whole == 0 {
                join_rest(acc);
                continue;
            }
            let mut sums = [[call.identity; VECTOR]; UNROLLED_VECTORS];
            for block in 0..whole / UNROLLED_VECTORS {
                for (side, sum) in sums.iter_mut().enumerate() {
                    join(block * UNROLLED_VECTORS + side, sum);
                }
            }
            for (side, sum) in sums.iter_mut().enumerate().take(whole % UNROLLED_VECTORS) {
                join(whole / UNROLLED_VECTORS * UNROLLED_VECTORS + side, sum);
            }
            if rest > 0 {
                join_rest(&mut sums[UNROLLED_VECTORS - 1]);
            }
            let [mut a, b, mut c, d] = sums;
            join_all::<O, A>(&mut a, &b);
            join_all::<O, A>(&mut c, &d);
            join_all::<O, A>(&mut a, &c);
            join_all::<O, A>(acc, &a);
        }
    }
}

struct Rows<O, E>(PhantomData<(O, E)>);

impl<O: Lanewise, E: Elements> Routine for Rows<O, E> {
    type Args = ReduceCall;

    /// Like [`Columns`].
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        for v in 0..call.cols.div_ceil(VECTOR) {
            let mut sum = [call.identity; VECTOR];
            for r in 0..call.rows {
                // SAFETY: the caller's promise.
                unsafe { E::join::<O, A>(call, [r, v], &mut sum, |x| *x) };
            }
            // SAFETY: the caller's promise.
            let acc = unsafe { lanes(call.acc.add(v * VECTOR), VECTOR) };
            for (x, y) in acc.iter_mut().zip(sum) {
                *x = join::<O, A>(*x, y);
            }
        }
    }
}

struct Finish<O>(PhantomData<O>);

impl<O: Lanewise> Routine for Finish<O> {
    type Args = ReduceCall;

    /// `acc` and `out` must be writable.
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        for r in 0..call.rows {
            // Row r of the results lies at or before the accumulators of row r, so nothing unread
            // is overwritten. SAFETY: the caller's promise.
            let acc: Vector = unsafe { *call.acc.add(r * VECTOR).cast() };
            let mut eight = [0; 8];
            for l in 0..8 {
                eight[l] = join::<O, A>(acc[l], acc[l + 8]);
            }
            let mut four = [0; 4];
            for l in 0..4 {
                four[l] = join::<O, A>(eight[l], eight[l + 4]);
            }
            let two = [
                join::<O, A>(four[0], four[2]),
                join::<O, A>(four[1], four[3]),
            ];
            // SAFETY: the caller's promise.
            unsafe { *call.out.add(r) = join::<O, A>(two[0], two[1]) };
        }
    }
}

struct Merge<O>(PhantomData<O>);

impl<O: Lanewise> Routine for Merge<O> {
    type Args = ReduceCall;

    /// `acc` and `out` must be writable for `cols` lanes and not overlap.
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        // SAFETY: the caller's promise.
        let (into, from) = unsafe { (lanes(call.out, call.cols), lanes(call.acc, call.cols)) };
        for (x, &mut y) in into.iter_mut().zip(from) {
            *x = join::<O, A>(*x, y);
        }
    }
}

/// The ranking of values: integers, larger for better values.
trait Rank: 'static {
    fn key(bits: u32) -> i32;
}

struct LargestFloat;
struct SmallestFloat;
struct LargestInt;
struct SmallestInt;

/// Floats in ascending order as integers, both zeros the same.
#[inline(always)]
fn ordered(x: f32) -> i32 {
    let bits = (x + 0.0).to_bits() as i32;
    bits ^ ((bits >> 31) & i32::MAX)
}

impl Rank for LargestFloat {
    #[inline(always)]
    fn key(bits: u32) -> i32 {
        let x = f32::of(bits);
        if x.is_nan() { i32::MAX } else { ordered(x) }
    }
}
impl Rank for SmallestFloat {
    #[inline(always)]
    fn key(bits: u32) -> i32 {
        let x = f32::of(bits);
        if x.is_nan() { i32::MAX } else { !ordered(x) }
    }
}
impl Rank for LargestInt {
    #[inline(always)]
    fn key(bits: u32) -> i32 {
        bits as i32
    }
}
impl Rank for SmallestInt {
    #[inline(always)]
    fn key(bits: u32) -> i32 {
        !(bits as i32)
    }
}

/// The position of no element: after all others, so that every element wins against it.
pub(super) const NOWHERE: u32 = i32::MAX as u32;

fn position_loops<K: Rank>(isa: Isa) -> ReduceCode {
    ReduceCode {
        columns: [entry::<RankColumns<K>>(isa); 8],
        rows: [entry::<RankRows<K>>(isa); 8],
        joined: false,
        finish: entry::<RankFinish>(isa),
        merge: entry::<RankMerge>(isa),
        identity: i32::MIN as u32,
        words: 2,
    }
}

impl ReduceCode {
    /// Makes the accumulators in `lanes` lanes of each word, `stride` lanes apart, hold the
    /// identity.
    ///
    /// # Safety
    /// `acc` must be writable.
    pub unsafe fn clear(&self, acc: *mut u32, lanes: usize, stride: usize) {
        for (word, bits) in [self.identity, NOWHERE]
            .into_iter()
            .enumerate()
            .take(self.words)
        {
            // SAFETY: the caller's promise.
            unsafe { self::lanes(acc.add(word * stride), lanes) }.fill(bits);
        }
    }
}

/// Replaces the best element so far by a better one, or an equal one further ahead.
#[inline(always)]
fn improve(key: &mut u32, position: &mut u32, new_key: i32, new_position: u32) {
    let old = *key as i32;
    let better = new_key > old || (new_key == old && new_position < *position);
    *key = if better { new_key as u32 } else { *key };
    *position = if better { new_position } else { *position };
}

struct RankColumns<K>(PhantomData<K>);

impl<K: Rank> Routine for RankColumns<K> {
    type Args = ReduceCall;

    /// Like [`Columns`].
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        for r in 0..call.rows {
            // SAFETY: the caller's promise.
            let line =
                unsafe { std::slice::from_raw_parts(line(call, 0, r), call.cols.div_ceil(VECTOR)) };
            // SAFETY: the caller's promise.
            let (keys, positions) = unsafe {
                (
                    lanes(call.acc.add(r * VECTOR), VECTOR),
                    lanes(call.acc.add(call.stride + r * VECTOR), VECTOR),
                )
            };
            for (v, vector) in line.iter().enumerate() {
                for l in 0..VECTOR {
                    let c = v * VECTOR + l;
                    // A column that does not count ranks as nothing.
                    let counts = c < call.cols;
                    let key = if counts { K::key(vector[l]) } else { i32::MIN };
                    let position = if counts {
                        call.position.wrapping_add(c as u32)
                    } else {
                        NOWHERE
                    };
                    improve(&mut keys[l], &mut positions[l], key, position);
                }
            }
        }
    }
}

struct RankRows<K>(PhantomData<K>);

impl<K: Rank> Routine for RankRows<K> {
    type Args = ReduceCall;

    /// Like [`Columns`].
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        for v in 0..call.cols.div_ceil(VECTOR) {
            // SAFETY: the caller's promise.
            let (keys, positions) = unsafe {
                (
                    lanes(call.acc.add(v * VECTOR), VECTOR),
                    lanes(call.acc.add(call.stride + v * VECTOR), VECTOR),
                )
            };
            for r in 0..call.rows {
                // SAFETY: the caller's promise.
                let vector = unsafe { &*line(call, 0, r).add(v) };
                for l in 0..VECTOR {
                    improve(
                        &mut keys[l],
                        &mut positions[l],
                        K::key(vector[l]),
                        call.position.wrapping_add(r as u32),
                    );
                }
            }
        }
    }
}

struct RankFinish;

impl Routine for RankFinish {
    type Args = ReduceCall;

    /// Like [`Finish`].
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        for r in 0..call.rows {
            // SAFETY: the caller's promise.
            let (keys, positions): (Vector, Vector) = unsafe {
                (
                    *call.acc.add(r * VECTOR).cast(),
                    *call.acc.add(call.stride + r * VECTOR).cast(),
                )
            };
            let (mut key, mut position) = (keys[0], positions[0]);
            for l in 1..VECTOR {
                improve(&mut key, &mut position, keys[l] as i32, positions[l]);
            }
            // SAFETY: the caller's promise.
            unsafe {
                *call.out.add(r) = key;
                *call.out.add(call.stride + r) = position;
            }
        }
    }
}

struct RankMerge;

impl Routine for RankMerge {
    type Args = ReduceCall;

    /// Like [`Merge`], for two words.
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &ReduceCall) {
        for l in 0..call.cols {
            // SAFETY: the caller's promise.
            unsafe {
                let (key, position) = (&mut *call.out.add(l), &mut *call.out.add(call.stride + l));
                improve(
                    key,
                    position,
                    *call.acc.add(l) as i32,
                    *call.acc.add(call.stride + l),
                );
            }
        }
    }
}
