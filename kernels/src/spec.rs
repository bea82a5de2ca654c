//! The kernel contract: the description of one kernel as plain data, the same for every back end.
//!
//! A kernel computes over an iteration space `dims`. Its [`Body`] is the *anchor*: a plain loop, or
//! an operation such as a matrix product that yields one value per point ([`Inst::Acc`]). The
//! anchor is surrounded by a straight-line program, `code`: loads of further operands, scalar
//! operations, reductions, and the values to store. Fusion moves more of the graph into one
//! kernel's code: an elementwise chain, softmax with its three passes over a row, a bias and an
//! activation after a convolution, a whole optimizer update after a weight gradient.

pub mod analysis;
mod attention;
mod collective;
mod conv2d;
mod custom;
mod error;
mod quantized;
mod scan;
mod select;
mod verify;

pub use attention::{Attention, AttentionGrad, Scores};
pub use collective::{Collective, CollectiveOp};
pub use custom::{CUSTOM_INPUTS_MAX, Custom};
pub use error::{PrologueError, SpecError};
pub use quantized::{Quantization, QuantizedMatmul};
pub use scan::{Argument, Call, Located, Place, Scan, Scratch, Slot};
pub use select::{NonMaxSuppression, Nonzero, Sort};
use smallvec::SmallVec;
pub(crate) use verify::check_lengths;
pub use verify::check_operand;

use crate::dtype::{DType, Lane};
use crate::scalar::{ScalarOp, Value};
use crate::size::{Env, Size};

/// Sizes or strides, one per axis.
pub type Dims = SmallVec<[Size; 6]>;

/// The strided access of a kernel to one buffer: element `offset + Σ coordinateᵢ · stridesᵢ`. A
/// stride of 0 repeats (broadcasts).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// The stored type.
    pub dtype: DType,
    /// Elements before the first one read or written.
    pub offset: Size,
    /// Elements between neighbours along each axis of the operand's space.
    pub strides: Dims,
}

/// The maximum number of arguments of a kernel that compilers emit; its launch allocates nothing.
pub const MAX_ARGUMENTS: usize = 40;
/// The maximum number of axes of a spec.
pub const MAX_AXES: usize = 8;
/// The maximum number of operands and indices of a spec's code. With [`MAX_AXES`], this lets a
/// launch resolve all strides without allocating.
pub const MAX_ACCESSES: usize = 48;

/// A value of a program: the index of the instruction that computes it.
pub type ValueId = u16;

/// The operation that combines values along the reduced axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Σ
    Sum,
    /// Π
    Prod,
    /// The largest; NaN if any is.
    Max,
    /// The smallest; NaN if any is.
    Min,
    /// True if any is (of truth values).
    Any,
    /// True if all are (of truth values).
    All,
    /// The first position (i32, in the row-major order of the reduced axes) of the largest; NaN
    /// counts as largest.
    ArgMax,
    /// The first position of the smallest; NaN counts as smallest.
    ArgMin,
    /// Σ of the squared distances from the mean, in the epilogue of a product alone.
    SquaredDeviations,
}

/// One instruction of a kernel's straight-line program; its position names its value.
#[derive(Clone, Debug, PartialEq)]
pub enum Inst {
    /// `operands[k]` at this point, widened to its lane.
    Load(u16),
    /// The anchor's value at this point (f32; `Body::Pool2d` with an i32/u8 result and
    /// `Body::Gather` have the lane of their source, `Body::Scatter` that of its values).
    Acc,
    /// The same number everywhere.
    Const(Value),
    /// The integer `Σ coordinateᵢ · indices[k]ᵢ`.
    Index(u16),
    /// Uniform in [0, 1): Philox4x32-10 keyed by the seed and step in `operands[state]` (three i32:
    /// seed low, seed high, step) and by `stream`; element `index` (an i32 value) of that stream.
    Uniform {
        /// The operand that holds seed and step.
        state: u16,
        /// Which random operation of the program this is.
        stream: u32,
        /// The value that holds the element's index.
        index: ValueId,
    },
    /// An elementwise operation; unused arguments are 0.
    Op(ScalarOp, [ValueId; 3]),
    /// Conversion between lanes (see [`Value::cast`]).
    Cast(ValueId, Lane),
    /// A reduction along the reduced axes. The result has one value per point of the kept axes and
    /// may be used beside values of every point, where it repeats.
    Reduce(ReduceOp, ValueId),
}

/// Writes `value` to `operands[operand]`, narrowed to its stored type (f32 → u8 saturates).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Store {
    /// The value.
    pub value: ValueId,
    /// The operand it is stored to.
    pub operand: u16,
}

/// A kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// The anchor.
    pub body: Body,
    /// The iteration space of `code`, row-major; for anchors other than `Loop` the anchor's own
    /// result space.
    pub dims: Dims,
    /// The number of axes that [`Inst::Reduce`] reduces, 0 without reductions: in a loop the last
    /// ones, in a product all but one (see [`Spec::is_reduced`]).
    pub reduced: usize,
    /// The operands that `code` loads and stores, each with one stride per axis of `dims`.
    pub operands: Vec<Operand>,
    /// Integer functions of the coordinates, for [`Inst::Index`].
    pub indices: Vec<Dims>,
    /// The program.
    pub code: Vec<Inst>,
    /// The stored values and the operands they are stored to.
    pub stores: Vec<Store>,
}

/// The anchor of a kernel. Its operands come before those of `code` in the argument list, in the
/// order of the fields.
#[derive(Clone, Debug, PartialEq)]
pub enum Body {
    /// No anchor: `code` alone.
    Loop,
    /// `dims = batch… , m, n`: Σₖ a[batch…, m, k] · b[batch…, k, n], f32.
    Matmul(Matmul),
    /// `dims = m, n`: Σₖ a[m, k] · weight[n, k], f32, with quantized weights.
    QuantizedMatmul(Box<QuantizedMatmul>),
    /// A convolution or one of its two gradients, f32.
    Conv2d(Conv2d),
    /// `dims = n, c, oh, ow`: one window each.
    Pool2d(Pool2d),
    /// `dims = n, c, h, w`: the gradient that reaches each input of a pooling.
    Pool2dGrad(Pool2dGrad),
    /// `Acc = source[coordinate with the gathered axis replaced by index]`.
    Gather(Gather),
    /// Reduces values into indexed places of a result that starts as the reduction's identity, in a
    /// fixed order. `dims` is the space of the *result*.
    Scatter(Scatter),
    /// A tensor with a part of it replaced; `dims` is its space.
    SliceAssign(Box<SliceAssign>),
    /// Prefix reductions, such as running sums, along the last axis of `dims`.
    PrefixReduce(PrefixReduce),
    /// Attention of queries to keys and values, and its gradients.
    Attention(Box<Attention>),
    /// See [`Body::Attention`].
    AttentionGrad(Box<AttentionGrad>),
    /// Stores nothing: fails the run if any index lies outside `0..limit`.
    BoundsCheck(BoundsCheck),
    /// The positions of the true elements of a mask, in row-major order; `dims` is one axis, as
    /// long as there are such elements.
    Nonzero(Nonzero),
    /// The order of the elements along the last axis of `dims`.
    Sort(Sort),
    /// Whether each box is kept by non-maximum suppression; `dims` is one axis, of boxes in order
    /// of preference.
    NonMaxSuppression(NonMaxSuppression),
    /// A function of the user.
    Custom(Box<Custom>),
    /// Calls of kernels in a loop over steps. Writes its results itself: there is no `code`, and
    /// `dims` has no axes.
    Scan(Box<Scan>),
    /// Bytes that move between the ranks of a group; `dims` is the space of the result, whose first
    /// axis is as long as there are ranks.
    Collective(Collective),
}

/// See [`Body::Matmul`].
#[derive(Clone, Debug, PartialEq)]
pub struct Matmul {
    /// Length of the contracted axis.
    pub k: Size,
    /// Whether every element is summed in the order of the contracted axis, so that rows have the
    /// same bits in products of any number of rows, if the left operand's rows are contiguous (else
    /// a long axis is split on the CPU, by the number of rows). Otherwise products of few rows on
    /// the CPU are summed in another order, which is faster.
    pub in_order: bool,
    /// Strides over `batch…, m, k`.
    pub a: Operand,
    /// Strides over `batch…, k, n`.
    pub b: Operand,
}

/// Which of the three products a [`Conv2d`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvKind {
    /// `dims = n, co, oh, ow`; `a` is the image (n, ci, h, w), `b` the weight (co, ci/groups, kh,
    /// kw).
    Forward,
    /// `dims = n, ci, h, w`; `a` is the output gradient (n, co, oh, ow), `b` the weight.
    InputGrad,
    /// `dims = co, ci/groups, kh, kw`; `a` is the image, `b` the output gradient.
    WeightGrad,
}

/// A two-dimensional cross-correlation (a convolution in the terms of deep learning).
#[derive(Clone, Debug, PartialEq)]
pub struct Conv2d {
    /// Which product.
    pub kind: ConvKind,
    /// Images.
    pub n: Size,
    /// Input channels, all groups together.
    pub ci: Size,
    /// Output channels, all groups together.
    pub co: Size,
    /// Image height and width.
    pub hw: [Size; 2],
    /// Result height and width.
    pub ohw: [Size; 2],
    /// Kernel height and width.
    pub k: [usize; 2],
    /// Stride, rows and columns.
    pub stride: [usize; 2],
    /// Zero padding before the first row and column (the padding after the last follows from
    /// `ohw`).
    pub pad: [usize; 2],
    /// Distance between kernel elements.
    pub dilation: [usize; 2],
    /// Channel groups.
    pub groups: usize,
    /// See [`ConvKind`].
    pub a: Operand,
    /// See [`ConvKind`].
    pub b: Operand,
    /// The code that computes `a` point by point as it is packed, if `a` is not in memory: a loop
    /// over its space, without reductions, whose one store is its last operand. The operands before
    /// that one are arguments in the place of `a`.
    pub prologue: Option<Box<Spec>>,
    /// Whether every product of an element and a weight is a term of the sums, rather than of
    /// Winograd's transforms of them, which round more often.
    pub exact: bool,
}

/// The value of a pooling window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// The largest element; NaN if any is.
    Max,
    /// The position `kh · kernel width + kw` of the first largest element in its window (an
    /// integer).
    ArgMax,
    /// The mean of the elements inside the image and, with `count_pad`, the zeros around it.
    Avg {
        /// Whether padding counts in the divisor.
        count_pad: bool,
    },
}

/// The geometry of a pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    /// Window height and width.
    pub k: [usize; 2],
    /// Stride.
    pub stride: [usize; 2],
    /// Padding before the first row and column.
    pub pad: [usize; 2],
}

/// See [`Body::Pool2d`].
#[derive(Clone, Debug, PartialEq)]
pub struct Pool2d {
    /// The value of a window.
    pub kind: PoolKind,
    /// The geometry.
    pub window: Window,
    /// Image height and width.
    pub hw: [Size; 2],
    /// The image, strides over (n, c, h, w).
    pub x: Operand,
    /// With `PoolKind::Max`: also store the position of the maximum here (strides over n, c, oh,
    /// ow), for the gradient.
    pub arg: Option<Operand>,
}

/// See [`Body::Pool2dGrad`].
#[derive(Clone, Debug, PartialEq)]
pub struct Pool2dGrad {
    /// `Max` or `Avg`.
    pub kind: PoolKind,
    /// The geometry.
    pub window: Window,
    /// Result height and width.
    pub ohw: [Size; 2],
    /// The gradient of the result, strides over (n, c, oh, ow).
    pub dy: Operand,
    /// With `PoolKind::Max`: the stored positions.
    pub arg: Option<Operand>,
}

/// See [`Body::Gather`].
#[derive(Clone, Debug, PartialEq)]
pub struct Gather {
    /// The source: strides over `dims`, 0 on the gathered axis.
    pub source: Operand,
    /// The index, strides over `dims` (u8 or i32).
    pub index: Operand,
    /// Elements of the source between neighbours along the gathered axis.
    pub axis_stride: Size,
    /// Length of the gathered axis of the source.
    pub axis_len: Size,
}

/// See [`Body::Scatter`]: `result[c with c[axis] := index] ⊕= value`, over all points of
/// `space`.
#[derive(Clone, Debug, PartialEq)]
pub struct Scatter {
    /// Which axis of `dims` the index replaces.
    pub axis: usize,
    /// ⊕: a sum, product, maximum or minimum.
    pub reduce: ReduceOp,
    /// The space of the values: `dims` with another length at `axis`.
    pub space: Dims,
    /// The values, strides over `space`, f32 or i32.
    pub value: Operand,
    /// The index, strides over `space` (u8 or i32).
    pub index: Operand,
}

/// See [`Body::SliceAssign`]: `result[start + c · step + place] = value[c]` over all points `c` of
/// `space`, and `result = base` elsewhere. Writes its result itself: there is no `code`.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceAssign {
    /// The tensor before, strides over `dims`; `None` if the result holds it already, so that only
    /// the part is touched. It may be the result's region: then nothing is copied.
    pub base: Option<Operand>,
    /// The space of the values.
    pub space: Dims,
    /// The values, strides over `space`.
    pub value: Operand,
    /// The place of the first value, per axis.
    pub start: Dims,
    /// The distance between places, per axis; at least 1.
    pub step: SmallVec<[u32; 6]>,
    /// An axis, and the number that is added to places along it, strides over `space` (i32), 0
    /// along the axis itself. A part that would lie outside of the axis is moved into it.
    pub place: Option<(usize, Operand)>,
    /// The result, strides over `dims`.
    pub result: Operand,
}

/// The operator of a [`PrefixReduce`], over the elements up to each one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrefixOp {
    /// Their sum (f32 or i32).
    Sum,
    /// `state = factor · state + element` (f32 or i32), a linear recurrence. The first state is the
    /// first element, whatever its factor.
    Linear,
    /// The logarithm of the sum of their exponentials (f32); −∞ of none.
    LogSumExp,
    /// The last position (i32) of the largest; a NaN is above every number.
    ArgMax,
    /// The last position (i32) of the smallest; a NaN is below every number.
    ArgMin,
}

/// See [`Body::PrefixReduce`]. Writes its result itself: there is no `code`.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixReduce {
    /// The reduction.
    pub op: PrefixOp,
    /// Each result excludes its own element; not for reductions that give positions.
    pub exclusive: bool,
    /// From the last element to the first.
    pub reverse: bool,
    /// The elements, strides over `dims`.
    pub source: Operand,
    /// The factors of a linear recurrence, strides over `dims`, of the type of the elements.
    pub factor: Option<Operand>,
    /// The result, strides over `dims`.
    pub result: Operand,
}

/// See [`Body::BoundsCheck`]. `dims` is the space of the index.
#[derive(Clone, Debug, PartialEq)]
pub struct BoundsCheck {
    /// The indices (u8 or i32).
    pub index: Operand,
    /// One more than the largest index allowed.
    pub limit: Size,
}

/// How a kernel uses an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read only.
    Read,
    /// Written only.
    Write,
    /// Both: each element is read before it is written, at the same place.
    ReadWrite,
}

impl Operand {
    /// A contiguous row-major operand over `dims`; `None` if a stride overflows or has no form as a
    /// [`Size`].
    pub fn contiguous(dtype: DType, dims: &[Size]) -> Option<Operand> {
        Some(Operand {
            dtype,
            offset: Size::ZERO,
            strides: analysis::contiguous_strides(dims)?,
        })
    }

    /// One more than the highest element touched over `dims`, or 0 when `dims` has no points;
    /// `u64::MAX` when an element before the buffer's first is touched, which no buffer holds.
    pub fn extent(&self, dims: &[Size], env: &Env) -> u64 {
        let (mut first, mut last) = (self.offset.at(env), self.offset.at(env));
        for (dim, stride) in dims.iter().zip(&self.strides) {
            let n = dim.at(env);
            if n <= 0 {
                return 0;
            }
            let span = (n - 1).saturating_mul(stride.at(env));
            (first, last) = (
                first.saturating_add(span.min(0)),
                last.saturating_add(span.max(0)),
            );
        }
        if first < 0 { u64::MAX } else { last as u64 + 1 }
    }
}

impl Operand {
    /// Whether no element is reached from two points of `dims`, as writing requires: ordered by
    /// stride, each axis steps over all elements that the axes before it reach. (Layouts that
    /// interleave without overlapping are refused too; no lowering makes them.)
    pub fn is_injective(&self, dims: &[Size], env: &Env) -> bool {
        if dims.iter().any(|d| d.at(env) <= 0) {
            return true;
        }
        let mut axes: SmallVec<[(i64, i64); 8]> = dims
            .iter()
            .zip(&self.strides)
            .map(|(d, s)| (s.at(env), d.at(env)))
            .filter(|&(_, n)| n > 1)
            .collect();
        axes.sort_unstable();
        let mut reach = 0i64;
        axes.iter().all(|&(stride, n)| {
            let clear = stride > reach;
            reach = reach.saturating_add((n - 1).saturating_mul(stride));
            clear
        })
    }

    /// Whether the offset and all strides are nonnegative, so that memory is accessed forwards.
    pub fn is_forward(&self, env: &Env) -> bool {
        self.offset.at(env) >= 0 && self.strides.iter().all(|s| s.at(env) >= 0)
    }
}

impl Body {
    /// The anchor's operands, each with its space, in argument order.
    pub fn operands(&self, dims: &Dims) -> SmallVec<[(Operand, Dims, Access); 3]> {
        let mut list = SmallVec::new();
        let of = |sizes: &[Size]| Dims::from_slice(sizes);
        match self {
            Body::Loop => {}
            Body::Matmul(p) => {
                let (batch, mn) = dims.split_at(dims.len() - 2);
                let with = |r, c| batch.iter().copied().chain([r, c]).collect::<Dims>();
                list.push((p.a.clone(), with(mn[0], p.k), Access::Read));
                list.push((p.b.clone(), with(p.k, mn[1]), Access::Read));
            }
            Body::QuantizedMatmul(p) => list = p.operands(dims),
            Body::Conv2d(conv) => list = conv.operands(),
            Body::Pool2d(p) => {
                list.push((
                    p.x.clone(),
                    of(&[dims[0], dims[1], p.hw[0], p.hw[1]]),
                    Access::Read,
                ));
                list.extend(
                    p.arg
                        .iter()
                        .map(|arg| (arg.clone(), dims.clone(), Access::Write)),
                );
            }
            Body::Pool2dGrad(p) => {
                let result = of(&[dims[0], dims[1], p.ohw[0], p.ohw[1]]);
                list.push((p.dy.clone(), result.clone(), Access::Read));
                list.extend(
                    p.arg
                        .iter()
                        .map(|arg| (arg.clone(), result.clone(), Access::Read)),
                );
            }
            Body::Gather(g) => {
                let mut source = g.source.clone();
                let mut space = dims.clone();
                source.strides.push(g.axis_stride);
                space.push(g.axis_len);
                list.push((source, space, Access::Read));
                list.push((g.index.clone(), dims.clone(), Access::Read));
            }
            Body::Scatter(s) => {
                list.push((s.value.clone(), s.space.clone(), Access::Read));
                list.push((s.index.clone(), s.space.clone(), Access::Read));
            }
            Body::BoundsCheck(c) => list.push((c.index.clone(), dims.clone(), Access::Read)),
            Body::Nonzero(c) => {
                list.push((c.mask.clone(), c.space.clone(), Access::Read));
                list.push((c.positions.clone(), dims.clone(), Access::Write));
            }
            Body::SliceAssign(s) => {
                let base = s.base.iter();
                list.extend(base.map(|base| (base.clone(), dims.clone(), Access::Read)));
                list.push((s.value.clone(), s.space.clone(), Access::Read));
                let place = s.place.iter();
                list.extend(place.map(|(_, at)| (at.clone(), s.space.clone(), Access::Read)));
                let access = match s.base {
                    Some(_) => Access::Write,
                    None => Access::ReadWrite,
                };
                list.push((s.result.clone(), dims.clone(), access));
            }
            Body::PrefixReduce(s) => {
                list.push((s.source.clone(), dims.clone(), Access::Read));
                let factor = s.factor.iter();
                list.extend(factor.map(|factor| (factor.clone(), dims.clone(), Access::Read)));
                list.push((s.result.clone(), dims.clone(), Access::Write));
            }
            Body::Sort(s) => {
                let mut space = dims.clone();
                if let Some(last) = space.last_mut() {
                    *last = s.len;
                }
                list.push((s.source.clone(), space, Access::Read));
                list.push((s.positions.clone(), dims.clone(), Access::Write));
            }
            Body::NonMaxSuppression(s) => {
                let corners = dims.iter().copied().chain([Size::fixed(4)]).collect();
                list.push((s.boxes.clone(), corners, Access::Read));
                list.push((s.keep.clone(), dims.clone(), Access::Write));
            }
            Body::Custom(custom) => list = custom.operands(dims),
            Body::Attention(attention) => list = attention.operands(dims),
            Body::AttentionGrad(grad) => list = grad.operands(dims),
            Body::Scan(scan) => list = scan.operands(),
            Body::Collective(c) => {
                list.push((c.source.clone(), c.source_space(dims), Access::Read));
                list.push((c.result.clone(), dims.clone(), Access::Write));
            }
        }
        list
    }
}

impl Spec {
    /// Every argument of the kernel in order: the anchor's operands, then `operands`, each with its
    /// space.
    pub fn arguments(&self) -> Vec<(Operand, Dims, Access)> {
        let mut list = self.body.operands(&self.dims).into_vec();
        let per_row = self.per_row();
        let uses = self.uses();
        for ((k, operand), (access, random)) in (0..).zip(&self.operands).zip(uses) {
            let store = self.stores.iter().find(|s| s.operand == k);
            let mut operand = operand.clone();
            let mut space = self.dims.clone();
            // A per-row value is stored, and an operand that is uniform along the reduced axes is
            // read, once per point of the kept axes, even when the reduced axes have no points.
            let is_kept = store.is_some_and(|s| per_row[usize::from(s.value)]);
            if is_kept || self.is_uniform(&operand.strides) {
                (space, operand.strides) = (0..space.len())
                    .filter(|&axis| !self.is_reduced(axis))
                    .map(|axis| (space[axis], operand.strides[axis]))
                    .unzip();
            }
            // Seed and step: three elements at each point of the operand.
            if random {
                space.push(Size::fixed(3));
                operand.strides.push(Size::ONE);
            }
            list.push((operand, space, access));
        }
        list
    }
}
