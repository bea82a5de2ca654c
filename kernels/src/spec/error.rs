//! The reasons why a spec is invalid, or has no kernel on a back end.

use super::{
    Inst, MAX_ACCESSES, MAX_ARGUMENTS, MAX_AXES, PoolKind, PrefixOp, Quantization, ReduceOp, Window,
};
use crate::dtype::DType;
use crate::size::Size;

/// The reason why a spec cannot be prepared. A lowering never makes such a spec; the message is for
/// its author.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// More axes than [`MAX_AXES`], or more operands and indices than [`MAX_ACCESSES`].
    #[error("invalid kernel: at most {MAX_AXES} axes and {MAX_ACCESSES} operands and indices")]
    TooLarge,
    /// More reduced axes than there are, or reduced axes beside an anchor that has none, or of a product
    /// not all but one.
    #[error("invalid kernel: {reduced} reduced of {axes} axes")]
    Reduced {
        /// [`Spec::reduced`](super::Spec::reduced).
        reduced: usize,
        /// The number of axes.
        axes: usize,
    },
    /// An operand or index of `code` whose strides do not match the axes.
    #[error("invalid kernel: an operand or index has not one stride per axis")]
    Strides,
    /// An instruction that uses its own value or a later one.
    #[error("invalid kernel: value {value} uses a later value")]
    LaterValue {
        /// The instruction.
        value: usize,
    },
    /// An instruction whose operand, index, anchor or reduced axes do not exist.
    #[error("invalid kernel: value {value}, {inst:?}, has nothing to work on")]
    Dangling {
        /// The instruction's position.
        value: usize,
        /// The instruction.
        inst: Inst,
    },
    /// An operation that is not defined on its arguments' lanes.
    #[error("invalid kernel: an operation does not take its arguments' lanes")]
    Lanes,
    /// A reduction or random number of an argument in the wrong lane.
    #[error("invalid kernel: value {value}, {inst:?}, does not take its argument's lane")]
    ArgumentLane {
        /// The instruction's position.
        value: usize,
        /// The instruction.
        inst: Inst,
    },
    /// A store whose value or operand does not exist.
    #[error("invalid kernel: store {store} names no value or no operand")]
    DanglingStore {
        /// The position of the store.
        store: usize,
    },
    /// Two stores to one operand.
    #[error("invalid kernel: operand {operand} is stored to twice")]
    StoredTwice {
        /// The operand.
        operand: u16,
    },
    /// An anchor's operand whose strides do not match the axes.
    #[error("invalid kernel: {operand} has {strides} strides for {axes} axes")]
    OperandRank {
        /// The operand's name.
        operand: &'static str,
        /// The number of strides it has.
        strides: usize,
        /// The number of axes of its space.
        axes: usize,
    },
    /// An anchor's operand of an unsupported type.
    #[error("invalid kernel: {operand} is {dtype}, which this kernel does not take")]
    OperandType {
        /// The operand's name.
        operand: &'static str,
        /// Its type.
        dtype: DType,
    },
    /// An anchor with a result of one axis over a space of another rank.
    #[error("invalid kernel: {results} have one axis, not {axes}")]
    OneAxis {
        /// The name of the results.
        results: &'static str,
        /// The number of axes.
        axes: usize,
    },
    /// A product over another space than two axes, of which the columns and the contracted axis are
    /// known, with weights that are not rows of whole blocks of 2, 4 or 8 bits.
    #[error("invalid kernel: a product over {dims:?} of {k:?} numbers in {format:?}")]
    Quantized {
        /// The format of the weights.
        format: Quantization,
        /// The length of the contracted axis.
        k: Size,
        /// The space of the result.
        dims: Vec<Size>,
    },
    /// Attention over a space without rows and columns.
    #[error("invalid kernel: attention over {axes} axes")]
    AttentionRank {
        /// The number of axes.
        axes: usize,
    },
    /// Gradients of unlike numbers of queries and keys cannot take turns.
    #[error("invalid kernel: gradients of attention take turns, of other keys than queries")]
    AttentionTurns,
    /// A sort over a space of rank 0.
    #[error("invalid kernel: a sort without an axis")]
    SortedScalar,
    /// A scatter whose values' space differs from `dims` outside the scattered axis.
    #[error("invalid kernel: values over {space:?} scattered along axis {axis} of {dims:?}")]
    Scatter {
        /// The space of the values.
        space: Vec<Size>,
        /// The scattered axis.
        axis: usize,
        /// The space of the result.
        dims: Vec<Size>,
    },
    /// A scatter by another reduction than a sum, product, maximum or minimum.
    #[error("invalid kernel: a scatter by {0:?}")]
    ScatterReduce(ReduceOp),
    /// A part and a tensor of different ranks, a step of 0, or a place that differs along its axis.
    #[error("invalid kernel: a part of {space:?} written into {dims:?}")]
    SliceAssign {
        /// The space of the values.
        space: Vec<Size>,
        /// The space of the result.
        dims: Vec<Size>,
    },
    /// A prefix reduction of a scalar, with factors where there are none, or of exclusive positions.
    #[error("invalid kernel: a prefix reduction by {op:?} over {axes} axes")]
    PrefixReduce {
        /// The reduction.
        op: PrefixOp,
        /// The number of axes.
        axes: usize,
    },
    /// A collective of no ranks, of parts that are not contiguous, or of another number of parts
    /// than there are ranks.
    #[error("invalid kernel: a collective of {ranks} ranks over {dims:?}, or not contiguous")]
    Collective {
        /// The number of ranks.
        ranks: u32,
        /// The space of the result.
        dims: Vec<Size>,
    },
    /// Pooling over a space of another rank than 4.
    #[error("invalid kernel: pooling over {axes} axes instead of 4")]
    PoolRank {
        /// The number of axes.
        axes: usize,
    },
    /// A pooling window with a side or stride of 0, or too large a one.
    #[error("invalid kernel: pooling with {0:?}")]
    Window(Window),
    /// Positions of another pooling than [`PoolKind::Max`].
    #[error("invalid kernel: {0:?} pooling stores no positions")]
    PoolPositions(PoolKind),
    /// A pooling gradient whose positions do not go with its kind.
    #[error(
        "invalid kernel: the gradient of {kind:?} pooling {} positions",
        if *.positions { "with" } else { "without" }
    )]
    PoolGradPositions {
        /// The pooling.
        kind: PoolKind,
        /// Whether there are positions.
        positions: bool,
    },
    /// A window with more elements than a position in u8 can name.
    #[error("invalid kernel: positions in a window of {}×{} do not fit in u8", .k[0], .k[1])]
    WindowPositions {
        /// Window height and width.
        k: [usize; 2],
    },
    /// An invalid prologue of a convolution.
    #[error("invalid kernel: a prologue {0}")]
    Prologue(PrologueError),
    /// A loop over steps whose calls cannot find their arguments, and why.
    #[error("invalid kernel: a loop over steps: {0}")]
    Scan(String),
    /// A valid spec that a back end has no kernel for, and the reason.
    #[error("invalid kernel: {0}")]
    Unsupported(String),
}

impl SpecError {
    /// [`SpecError::Unsupported`], for this reason.
    pub fn unsupported(reason: impl Into<String>) -> SpecError {
        SpecError::Unsupported(reason.into())
    }
}

/// The reason why the prologue of a convolution is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PrologueError {
    /// A prologue of [`ConvKind::InputGrad`](super::ConvKind::InputGrad).
    #[error("of an input gradient, which takes no image")]
    NoImage,
    /// Another body than a loop.
    #[error("with an anchor of its own")]
    Anchor,
    /// Another space than the image's.
    #[error("over {dims:?} for an image of {image:?}")]
    Space {
        /// The prologue's space.
        dims: Vec<Size>,
        /// The image's space.
        image: Vec<Size>,
    },
    /// Reduced axes.
    #[error("that reduces {0} axes")]
    Reduces(usize),
    /// Other than one store, or no operands.
    #[error("with {stores} stores and {operands} operands")]
    Stores {
        /// The number of stores.
        stores: usize,
        /// The number of operands.
        operands: usize,
    },
    /// A store to another operand than the last.
    #[error("that makes operand {operand} of {operands}, not the last")]
    NotLast {
        /// The operand that is stored.
        operand: u16,
        /// The number of operands.
        operands: usize,
    },
    /// A load of the image.
    #[error("that reads what it makes")]
    ReadsImage,
    /// More arguments than [`MAX_ARGUMENTS`] of prologue and convolution together.
    #[error("of a kernel of {0} arguments, of which there may be {MAX_ARGUMENTS}")]
    Arguments(usize),
}
