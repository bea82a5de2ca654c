//! The cost model: the estimated time of a kernel, by which the planner decides whether to
//! recompute a value or to keep it live.
//!
//! A roofline (Williams, Waterman, Patterson, 2009): the time of the arithmetic or that of moving
//! operands and results through memory once, whichever is longer. The unit is the time of one
//! floating-point operation of a matrix product.

use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Access, Body, Conv2d, Inst, PrefixOp, Spec};

/// Operations of a matrix product in the time of moving one byte.
const PER_BYTE: u64 = 12;
/// The same in the time of sending a byte to another rank, about: 1 GB/s.
const PER_BYTE_SENT: u64 = 120;
/// The same in the time of one instruction of a kernel's code, for one element.
const PER_INSTRUCTION: u64 = 8;
/// And in that of an exponential, a logarithm or the like.
const PER_FUNCTION: u64 = 24;
/// The time of an operation of a convolution.
const PER_CONVOLVED: u64 = 2;
/// Products that writing a sum of products takes the time of: short sums cost more for each of
/// theirs.
const PER_SUM: u64 = 30;
/// Output channels that a convolution packs its image for at a time, about.
const CHANNELS: u64 = 128;

/// How many units a second has, about: with [`PER_BYTE`] of them to a byte, memory moves 10 GB/s.
pub(crate) const UNITS_PER_SECOND: f64 = 1.2e11;

/// The time of a kernel at these sizes.
pub(super) fn cost(spec: &Spec, sizes: &Env) -> u64 {
    let count = |dims: &[Size]| {
        dims.iter()
            .map(|d| d.at(sizes).max(0) as u64)
            .fold(1, u64::saturating_mul)
    };
    let at = |size: &Size| size.at(sizes).max(0) as u64;
    let points = count(&spec.dims);
    let per_point = match &spec.body {
        Body::Loop | Body::BoundsCheck(_) => 0,
        Body::Matmul(m) => 2 * (at(&m.k) + PER_SUM),
        Body::QuantizedMatmul(m) => 2 * (at(&m.k) + PER_SUM),
        Body::Conv2d(c) => 2 * PER_CONVOLVED * (convolved(c, sizes) / points.max(1) + PER_SUM),
        Body::Pool2d(p) => PER_INSTRUCTION * (p.window.k[0] * p.window.k[1]) as u64,
        Body::Pool2dGrad(p) => PER_INSTRUCTION * (p.window.k[0] * p.window.k[1]) as u64,
        Body::Gather(_) | Body::Scatter(_) => PER_INSTRUCTION,
        // Moves of bytes alone.
        Body::SliceAssign(_) => 0,
        Body::Collective(_) => {
            let bytes = moved(spec, sizes) / 2;
            return bytes.saturating_mul(PER_BYTE_SENT).clamp(1, 1 << 50);
        }
        Body::PrefixReduce(reduction) => match reduction.op {
            PrefixOp::LogSumExp => 2 * PER_FUNCTION,
            _ => 2 * PER_INSTRUCTION,
        },
        Body::Attention(_) | Body::AttentionGrad(_) => {
            let pairs = 2 * attended(spec, sizes) + PER_FUNCTION * pairs(spec, sizes);
            pairs / points.max(1)
        }
        Body::Nonzero(c) => 2 * PER_INSTRUCTION.saturating_mul(count(&c.space)) / points.max(1),
        // A comparison for each halving of the row.
        Body::Sort(sort) => PER_INSTRUCTION * u64::from(64 - at(&sort.len).leading_zeros()),
        Body::NonMaxSuppression(_) => PER_INSTRUCTION.saturating_mul(points),
        Body::Custom(_) => PER_FUNCTION,
        Body::Scan(scan) => {
            let calls = scan.calls.iter().map(|call| cost(&call.spec, sizes));
            calls
                .fold(0, u64::saturating_add)
                .saturating_mul(u64::from(scan.steps))
        }
    };
    // An image made in a prologue is not moved, but its code runs over it, for each block of output
    // channels.
    let prologue = match &spec.body {
        Body::Conv2d(Conv2d {
            prologue: Some(prologue),
            co,
            ..
        }) => code(prologue, sizes).saturating_mul(at(co).div_ceil(CHANNELS)),
        _ => 0,
    };
    let arithmetic = points
        .saturating_mul(per_point)
        .saturating_add(code(spec, sizes))
        .saturating_add(prologue);
    // The sum of all kernels' times has to fit as well.
    arithmetic
        .max(moved(spec, sizes).saturating_mul(PER_BYTE))
        .clamp(1, 1 << 50)
}

/// Bytes that a kernel reads, and bytes that it writes; those of an argument in place are both.
pub fn moved(spec: &Spec, sizes: &Env) -> u64 {
    // In place, an assignment to a part touches as many elements of the result as it has values.
    let part = match &spec.body {
        Body::SliceAssign(assign) if assign.base.is_none() => Some(&assign.space),
        _ => None,
    };
    spec.arguments()
        .iter()
        .fold(0u64, |sum, (operand, dims, access)| {
            let dims = part.filter(|_| *access != Access::Read).unwrap_or(dims);
            // An operand that is repeated along an axis is moved once.
            let own = dims
                .iter()
                .zip(&operand.strides)
                .filter(|(_, stride)| stride.at(sizes) != 0);
            let elements = own
                .map(|(d, _)| d.at(sizes).max(0) as u64)
                .fold(1, u64::saturating_mul);
            let ways = match access {
                Access::ReadWrite => 2,
                Access::Read | Access::Write => 1,
            };
            sum.saturating_add(elements.saturating_mul(ways * operand.dtype.bytes() as u64))
        })
}

/// Multiplications of a convolution, those of padding too: each joins an image, a weight and a
/// result, and the space of the kernel is one of these.
fn convolved(c: &Conv2d, sizes: &Env) -> u64 {
    let at = |size: &Size| size.at(sizes).max(0) as u64;
    let products = [
        at(&c.n),
        at(&c.co),
        at(&c.ohw[0]),
        at(&c.ohw[1]),
        at(&c.ci),
        c.k[0] as u64,
        c.k[1] as u64,
    ];
    products.iter().fold(1, |n: u64, &m| n.saturating_mul(m)) / c.groups.max(1) as u64
}

/// Pairs of a query and a key that it sees, of all heads.
fn pairs(spec: &Spec, sizes: &Env) -> u64 {
    let [batch @ .., rows, _] = spec.dims.as_slice() else {
        return 0;
    };
    let (attention, queries) = match &spec.body {
        Body::Attention(attention) => (attention.as_ref(), rows),
        Body::AttentionGrad(grad) => (&grad.of, &grad.queries),
        _ => return 0,
    };
    let heads = batch.iter().map(|d| d.at(sizes).max(0) as u64);
    let [queries, keys] = [*queries, attention.keys].map(|n| n.usize_at(sizes));
    let pairs = match &attention.past {
        // All pairs, if the past length is not known.
        Some(_) => (queries as u64).saturating_mul(keys as u64),
        None => attention.scores.pairs(queries, keys),
    };
    heads.fold(pairs, u64::saturating_mul)
}

/// Multiplications of attention, or of its gradient, which computes the scores again.
fn attended(spec: &Spec, sizes: &Env) -> u64 {
    let at = |size: &Size| size.at(sizes).max(0) as u64;
    let each = match &spec.body {
        Body::Attention(a) => at(&a.width).saturating_add(spec.dims.last().map_or(0, at)),
        Body::AttentionGrad(grad) => 5u64.saturating_mul(at(&grad.of.width)),
        _ => 0,
    };
    pairs(spec, sizes).saturating_mul(each)
}

/// Arithmetic operations of a kernel: of its product, where a multiplication and an addition
/// are two, and of its code, one for each instruction at each point.
pub fn operations(spec: &Spec, sizes: &Env) -> [u64; 2] {
    if let Body::Scan(scan) = &spec.body {
        let steps = u64::from(scan.steps);
        let calls = scan.calls.iter().map(|c| operations(&c.spec, sizes));
        let sum = calls.fold([0u64; 2], |[a, b], [c, d]| {
            [a.saturating_add(c), b.saturating_add(d)]
        });
        return sum.map(|count| count.saturating_mul(steps));
    }
    let points = spec
        .dims
        .iter()
        .map(|d| d.at(sizes).max(0) as u64)
        .fold(1, u64::saturating_mul);
    let product = match &spec.body {
        Body::Matmul(m) => points.saturating_mul(m.k.at(sizes).max(0) as u64),
        Body::QuantizedMatmul(m) => points.saturating_mul(m.k.at(sizes).max(0) as u64),
        Body::Conv2d(c) => convolved(c, sizes),
        Body::Attention(_) | Body::AttentionGrad(_) => attended(spec, sizes),
        _ => 0,
    };
    let counted = spec.code.iter().filter(|inst| work(inst) > 0).count() as u64;
    [product.saturating_mul(2), points.saturating_mul(counted)]
}

/// The time of a kernel's code. A reduced value is computed once for all the points that it is
/// reduced over.
fn code(spec: &Spec, sizes: &Env) -> u64 {
    let count = |dims: &[Size]| {
        dims.iter()
            .map(|d| d.at(sizes).max(0) as u64)
            .fold(1, u64::saturating_mul)
    };
    let kept: Vec<Size> = (0..spec.dims.len())
        .filter(|&axis| !spec.is_reduced(axis))
        .map(|axis| spec.dims[axis])
        .collect();
    let (points, kept) = (count(&spec.dims), count(&kept));
    spec.code
        .iter()
        .zip(spec.per_row())
        .fold(0u64, |sum, (inst, folded)| {
            let once = folded && !matches!(inst, Inst::Reduce(..));
            sum.saturating_add(work(inst).saturating_mul(if once { kept } else { points }))
        })
}

/// The time of an instruction, for one element.
fn work(inst: &Inst) -> u64 {
    use ScalarOp::{
        Atan2, Cos, Cosh, Erf, Exp, Exp2, Expm1, Fmod, Lgamma, Ln, Log1p, Log2, Log10, Polygamma,
        Pow, Sigmoid, Sin, Sinh, Tan, Tanh,
    };
    match inst {
        Inst::Op(
            Atan2 | Cos | Cosh | Erf | Exp | Exp2 | Expm1 | Fmod | Lgamma | Ln | Log1p | Log2
            | Log10 | Polygamma | Pow | Sigmoid | Sin | Sinh | Tan | Tanh,
            _,
        )
        | Inst::Uniform { .. } => PER_FUNCTION,
        Inst::Op(..) | Inst::Cast(..) | Inst::Reduce(..) => PER_INSTRUCTION,
        Inst::Load(_) | Inst::Acc | Inst::Const(_) | Inst::Index(_) => 0,
    }
}
