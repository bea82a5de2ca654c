//! Elementwise operations as loops over tiles.

use std::marker::PhantomData;

use super::VECTOR;
use crate::cpu::Isa;
use crate::cpu::simd::{Entry, Routine, entry};
use crate::dtype::Lane;
use crate::math::{self, Arith};
use crate::random;
use crate::scalar::{Joined, Lanewise, ScalarOp, Visit, Word, visit_cast, visit_joined};

/// The location of the values of a tile: a register, an operand's memory, or a constant.
#[derive(Clone, Copy)]
pub(crate) struct View {
    /// The value of the first row and column.
    pub ptr: *const u32,
    /// Elements from one row to the next; 0 when all rows are the same.
    pub rs: isize,
    /// Elements from one column to the next: 1, or 0 when all columns are the same. (A number
    /// rather than a flag: views are copied at every step, and padding is copied byte by byte.)
    pub cs: usize,
}

impl View {
    /// Whether all columns are the same: one value per row.
    pub fn is_invariant(&self) -> bool {
        self.cs == 0
    }
}

/// The work of one operation on one tile: `rows` lines of `lanes` elements.
pub(crate) struct Call {
    pub rows: usize,
    pub lanes: usize,
    pub args: [View; 3],
    pub out: *mut u32,
    pub out_rs: usize,
    /// The further inputs of a random operation: seed (two words), step, stream.
    pub context: [u32; 4],
}

impl Call {
    /// Row `r` of argument `k`: one element if bit `k` of `invariant` is set, none if the operation has
    /// fewer arguments.
    ///
    /// # Safety
    /// The argument must be readable, and the slice must not outlive it.
    #[inline(always)]
    unsafe fn line<'l>(&self, k: usize, r: usize, arity: usize, invariant: u32) -> &'l [u32] {
        let view = self.args[k];
        let len = match (k < arity, invariant >> k & 1) {
            (false, _) => 0,
            (true, 0) => self.lanes,
            (true, _) => 1,
        };
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(view.ptr.offset(r as isize * view.rs), len) }
    }
}

/// An operation's loops, indexed by which arguments are invariant along columns (bit k for argument
/// k).
#[derive(Clone, Copy)]
pub(crate) struct OpCode(pub [Entry<Call>; 8]);

impl OpCode {
    /// The loops of a scalar operation whose last argument has the given lane.
    pub fn op(op: ScalarOp, lane: Lane, isa: Isa) -> OpCode {
        let halves = isa != Isa::Portable;
        match op {
            ScalarOp::Tanh if halves => OpCode([entry::<InHalves<Tanh>>(isa); 8]),
            // All constants of the error function fit into the registers of AVX-512.
            ScalarOp::Erf if isa == Isa::Avx2 => OpCode([entry::<InHalves<Erf>>(isa); 8]),
            ScalarOp::Sigmoid if halves => OpCode([entry::<InHalves<Sigmoid>>(isa); 8]),
            _ => op.visit(lane, Loops(isa)),
        }
    }

    /// The loops of a conversion.
    pub fn cast(from: Lane, to: Lane, isa: Isa) -> OpCode {
        visit_cast(from, to, Loops(isa))
    }

    /// The loops of operations that are computed together, if there are any.
    pub fn joined(joined: Joined, isa: Isa) -> Option<OpCode> {
        visit_joined(joined, Loops(isa))
    }

    /// The loop of [`crate::spec::Inst::Uniform`].
    pub fn uniform(isa: Isa) -> OpCode {
        OpCode([entry::<Uniform>(isa); 8])
    }
}

struct Loops(Isa);

impl Visit for Loops {
    type Output = OpCode;
    fn visit<O: Lanewise>(self) -> OpCode {
        let isa = self.0;
        let all = entry::<Sweep<O, 0>>(isa);
        // Where every argument is invariant, the tile calls the loop without invariant arguments on
        // one value per row.
        OpCode(match O::ARITY {
            1 => [all; 8],
            2 => [
                all,
                entry::<Sweep<O, 1>>(isa),
                entry::<Sweep<O, 2>>(isa),
                all,
                all,
                all,
                all,
                all,
            ],
            _ => [
                all,
                entry::<Sweep<O, 1>>(isa),
                entry::<Sweep<O, 2>>(isa),
                entry::<Sweep<O, 3>>(isa),
                entry::<Sweep<O, 4>>(isa),
                entry::<Sweep<O, 5>>(isa),
                entry::<Sweep<O, 6>>(isa),
                all,
            ],
        })
    }
}

/// An operation applied to every lane; bit k of `INVARIANT` says that argument k is invariant.
struct Sweep<O, const INVARIANT: u32>(PhantomData<O>);

impl<O: Lanewise, const INVARIANT: u32> Routine for Sweep<O, INVARIANT> {
    type Args = Call;

    /// The views must be readable for `rows` lines, `out` writable, and `out` must overlap no view.
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &Call) {
        for r in 0..call.rows {
            // SAFETY: the caller promises readable views; unused arguments have no length.
            let (x, y, z) = unsafe {
                (
                    call.line(0, r, O::ARITY, INVARIANT),
                    call.line(1, r, O::ARITY, INVARIANT),
                    call.line(2, r, O::ARITY, INVARIANT),
                )
            };
            // SAFETY: the caller promises that `out` is writable and overlaps no view.
            let out = unsafe {
                std::slice::from_raw_parts_mut(call.out.add(r * call.out_rs), call.lanes)
            };
            sweep_line::<O, A, INVARIANT>(x, y, z, out);
        }
    }
}

#[inline(always)]
fn sweep_line<O: Lanewise, A: Arith, const INVARIANT: u32>(
    x: &[u32],
    y: &[u32],
    z: &[u32],
    out: &mut [u32],
) {
    // No closures and no array functions here: each would be compiled for every operation, instruction
    // set and set of invariant arguments.
    let n = out.len();
    let (x, y, z) = (
        line_of(x, varies::<O, INVARIANT>(0), n),
        line_of(y, varies::<O, INVARIANT>(1), n),
        line_of(z, varies::<O, INVARIANT>(2), n),
    );
    let repeated = [
        O::In::of(first_of(x)),
        O::In::of(first_of(y)),
        O::In::of(first_of(z)),
    ];
    for i in 0..n {
        let mut args = repeated;
        if varies::<O, INVARIANT>(0) {
            args[0] = O::In::of(x[i]);
        }
        if varies::<O, INVARIANT>(1) {
            args[1] = O::In::of(y[i]);
        }
        if varies::<O, INVARIANT>(2) {
            args[2] = O::In::of(z[i]);
        }
        out[i] = O::apply::<A>(args).bits();
    }
}

/// Whether argument `k` exists and varies along columns.
const fn varies<O: Lanewise, const INVARIANT: u32>(k: usize) -> bool {
    k < O::ARITY && INVARIANT >> k & 1 == 0
}

/// The first `n` elements of a line that varies; all of another, which has one element or none.
#[inline(always)]
fn line_of(line: &[u32], varies: bool, n: usize) -> &[u32] {
    if varies { &line[..n] } else { line }
}

/// The value of an invariant argument; 0 of an argument that does not exist.
#[inline(always)]
fn first_of(line: &[u32]) -> u32 {
    line.first().copied().unwrap_or(0)
}

/// A function of one float that is computed in two halves.
trait Halves: 'static {
    /// The first half, of the argument.
    fn begin<A: Arith>(x: f32) -> f32;
    /// The second half, of the argument and the first half's result.
    fn end<A: Arith>(x: f32, begun: f32) -> f32;
}

struct Tanh;

impl Halves for Tanh {
    #[inline(always)]
    fn begin<A: Arith>(x: f32) -> f32 {
        math::tanh_begin::<A>(x)
    }
    #[inline(always)]
    fn end<A: Arith>(x: f32, begun: f32) -> f32 {
        math::tanh_end::<A>(x, begun)
    }
}

struct Sigmoid;

impl Halves for Sigmoid {
    #[inline(always)]
    fn begin<A: Arith>(x: f32) -> f32 {
        math::sigmoid_begin::<A>(x)
    }
    #[inline(always)]
    fn end<A: Arith>(x: f32, begun: f32) -> f32 {
        math::sigmoid_end::<A>(x, begun)
    }
}

struct Erf;

impl Halves for Erf {
    #[inline(always)]
    fn begin<A: Arith>(x: f32) -> f32 {
        math::erf_begin::<A>(x)
    }
    #[inline(always)]
    fn end<A: Arith>(x: f32, begun: f32) -> f32 {
        math::erf_end::<A>(x, begun)
    }
}

/// A loop for each half of a function. Instructions of such a function wait for one another for
/// longer than a CPU looks ahead; those of a half overlap with the next vectors', and its constants
/// fit into registers.
struct InHalves<F>(PhantomData<F>);

impl<F: Halves> Routine for InHalves<F> {
    type Args = Call;

    /// Like [`Sweep`]; the argument varies along columns.
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &Call) {
        for r in 0..call.rows {
            let x = call.args[0];
            // SAFETY: the caller promises readable views.
            let x =
                unsafe { std::slice::from_raw_parts(x.ptr.offset(r as isize * x.rs), call.lanes) };
            // SAFETY: the caller promises that `out` is writable and overlaps no view.
            let out = unsafe {
                std::slice::from_raw_parts_mut(call.out.add(r * call.out_rs), call.lanes)
            };
            for (out, &x) in out.iter_mut().zip(x) {
                *out = F::begin::<A>(f32::of(x)).bits();
            }
            for (out, &x) in out.iter_mut().zip(x) {
                *out = F::end::<A>(f32::of(x), f32::of(*out)).bits();
            }
        }
    }
}

/// Random numbers by index.
struct Uniform;

impl Routine for Uniform {
    type Args = Call;

    /// Like [`Sweep`]; the argument varies along columns.
    #[inline(always)]
    unsafe fn run<A: Arith>(call: &Call) {
        let [low, high, step, stream] = call.context;
        let block = |first| random::philox_lanes::<VECTOR>(first, [stream, step, 0], [low, high]);
        for r in 0..call.rows {
            let index = call.args[0];
            // SAFETY: the caller promises readable views.
            let index = unsafe {
                std::slice::from_raw_parts(index.ptr.offset(r as isize * index.rs), call.lanes)
            };
            // SAFETY: the caller promises that `out` is writable and overlaps no view.
            let out = unsafe {
                std::slice::from_raw_parts_mut(call.out.add(r * call.out_rs), call.lanes)
            };
            // Neighbours in order share their blocks: a quarter of the work.
            let (indices, outs) = (
                index.as_chunks::<{ 4 * VECTOR }>(),
                out.as_chunks_mut::<{ 4 * VECTOR }>(),
            );
            for (index, out) in indices.0.iter().zip(outs.0) {
                let first = index[0];
                let expected = (0..).map(|k| first.wrapping_add(k));
                let apart = index
                    .iter()
                    .zip(expected)
                    .fold(first & 3, |bits, (&i, expected)| bits | (i ^ expected));
                if apart == 0 {
                    let words = block(std::array::from_fn(|l| {
                        (first >> 2).wrapping_add(l as u32) & (u32::MAX >> 2)
                    }));
                    for l in 0..VECTOR {
                        for (w, word) in words.iter().enumerate() {
                            out[4 * l + w] = random::unit(word[l] as u32).to_bits();
                        }
                    }
                } else {
                    uniform_by_index(index, out, block);
                }
            }
            uniform_by_index(indices.1, outs.1, block);
        }
    }
}

/// The elements at any indices.
#[inline(always)]
fn uniform_by_index(
    index: &[u32],
    out: &mut [u32],
    block: impl Fn([u32; VECTOR]) -> [[u64; VECTOR]; 4],
) {
    for (index, out) in index
        .as_chunks::<VECTOR>()
        .0
        .iter()
        .zip(out.as_chunks_mut::<VECTOR>().0)
    {
        let words = block(index.map(|i| i >> 2));
        for l in 0..VECTOR {
            let word = match index[l] & 3 {
                0 => words[0][l],
                1 => words[1][l],
                2 => words[2][l],
                _ => words[3][l],
            };
            out[l] = random::unit(word as u32).to_bits();
        }
    }
}
