//! The kernels for products: the shapes of their tiles, and their use of threads and shared memory.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{Body, Quantization, Spec, SpecError};

use super::problem::Problem;

/// The element type of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elem {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
    /// Bytes of packed numbers, see [`Body::QuantizedMatmul`].
    Packed(Quantization),
}

impl Elem {
    /// The element type that corresponds to a type.
    pub fn of(dtype: DType) -> Result<Elem, SpecError> {
        match dtype {
            DType::F32 => Ok(Elem::F32),
            DType::F16 => Ok(Elem::F16),
            DType::BF16 => Ok(Elem::Bf16),
            other => Err(SpecError::unsupported(format!("a product of {other}"))),
        }
    }

    /// The element types of both operands of a spec's product.
    pub fn of_both(spec: &Spec, problem: &Problem) -> Result<[Elem; 2], SpecError> {
        let right = match &spec.body {
            Body::QuantizedMatmul(product) => Elem::Packed(product.format),
            _ => Elem::of(problem.right.dtype)?,
        };
        Ok([Elem::of(problem.left.dtype)?, right])
    }

    /// Bytes of one element, of packed numbers those of the smallest unit in memory.
    pub fn bytes(self) -> i64 {
        match self {
            Elem::F32 => 4,
            Elem::F16 | Elem::Bf16 => 2,
            Elem::Packed(_) => 1,
        }
    }

    /// Bytes from which a number of the operand is read, with its share of the scale of a block.
    pub fn width(self) -> f64 {
        match self {
            Elem::Packed(format) => {
                f64::from(format.bits) / 8.0 + 4.0 / f64::from(format.block.max(1))
            }
            _ => self.bytes() as f64,
        }
    }

    /// Its name in CUDA.
    pub fn name(self) -> &'static str {
        match self {
            Elem::F32 => "float",
            Elem::F16 => "f16",
            Elem::Bf16 => "bf16",
            Elem::Packed(_) => "unsigned char",
        }
    }
}

/// A tile whose threads keep their part of the result in registers (`RegisterTile` in
/// `registers.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegisterTile {
    /// Rows of the result per block.
    pub rows: i64,
    /// Columns of the result per block.
    pub columns: i64,
    /// Steps along the contracted axis per iteration.
    pub deep: i64,
    /// Rows per thread.
    pub high: i64,
    /// Columns per thread.
    pub wide: i64,
    /// Tiles in shared memory.
    pub stages: i64,
    /// Blocks that a multiprocessor's registers must hold.
    pub blocks: i64,
}

/// A tile for tensor cores (`TensorTile` in `tensor.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorTile {
    /// Rows of the result per block.
    pub rows: i64,
    /// Columns of the result per block.
    pub columns: i64,
    /// Bytes along the contracted axis per iteration.
    pub deep_bytes: i64,
    /// Rows per warp.
    pub high: i64,
    /// Columns per warp.
    pub wide: i64,
    /// Tiles in shared memory.
    pub stages: i64,
    /// Blocks that a multiprocessor's registers must hold.
    pub blocks: i64,
}

const fn registers(shape: [i64; 5], stages: i64, blocks: i64) -> RegisterTile {
    let [rows, columns, deep, high, wide] = shape;
    RegisterTile {
        rows,
        columns,
        deep,
        high,
        wide,
        stages,
        blocks,
    }
}

const fn tensor(shape: [i64; 5], stages: i64, blocks: i64) -> TensorTile {
    let [rows, columns, deep_bytes, high, wide] = shape;
    TensorTile {
        rows,
        columns,
        deep_bytes,
        high,
        wide,
        stages,
        blocks,
    }
}

/// Tiles for single precision: rows, columns, steps, rows and columns per thread.
pub const REGISTER_TILES: [RegisterTile; 9] = [
    registers([128, 128, 8, 8, 8], 4, 2),
    registers([128, 64, 8, 8, 8], 4, 3),
    registers([64, 128, 8, 8, 8], 4, 3),
    registers([64, 64, 8, 8, 4], 4, 4),
    registers([32, 128, 8, 4, 8], 4, 4),
    registers([128, 32, 8, 8, 4], 4, 4),
    registers([32, 32, 16, 4, 4], 4, 8),
    registers([16, 64, 16, 4, 4], 4, 8),
    registers([256, 16, 8, 8, 4], 4, 4),
];

/// Tiles for tensor cores: rows, columns, bytes along the contracted axis, rows and columns per
/// warp.
pub const TENSOR_TILES: [TensorTile; 10] = [
    tensor([128, 256, 64, 64, 64], 4, 1),
    tensor([128, 128, 64, 64, 64], 4, 2),
    tensor([128, 64, 64, 64, 32], 4, 2),
    tensor([64, 128, 64, 32, 64], 4, 2),
    tensor([64, 64, 128, 32, 32], 3, 3),
    // For images of few channels, and their weights' gradients.
    tensor([256, 16, 64, 64, 16], 4, 3),
    tensor([128, 32, 64, 32, 32], 4, 4),
    tensor([32, 64, 128, 16, 32], 3, 5),
    tensor([32, 32, 128, 16, 16], 3, 5),
    tensor([16, 64, 128, 16, 16], 3, 6),
];

impl RegisterTile {
    /// Threads of a block.
    pub fn threads(&self) -> i64 {
        self.rows / self.high * (self.columns / self.wide)
    }

    /// Bytes of shared memory: the tiles being loaded, later a slice of the result.
    pub fn shared_bytes(&self) -> i64 {
        let tiles = self.stages * self.deep * (self.rows + 4 + self.columns + 4);
        let slice = self.rows / self.high * (self.columns + 16);
        4 * tiles.max(slice)
    }

    fn source(&self) -> String {
        let RegisterTile {
            rows,
            columns,
            deep,
            high,
            wide,
            stages,
            ..
        } = self;
        format!("RegisterTile<{rows}, {columns}, {deep}, {high}, {wide}, {stages}>")
    }
}

impl TensorTile {
    /// Threads of a block.
    pub fn threads(&self) -> i64 {
        32 * (self.rows / self.high) * (self.columns / self.wide)
    }

    /// Like [`RegisterTile::shared_bytes`].
    pub fn shared_bytes(&self) -> i64 {
        // `DeepRows` shifts the second half of rows of 128 bytes.
        let shifted = if self.deep_bytes > 64 { 2 * 128 } else { 0 };
        let tiles = self.stages * (self.deep_bytes * (self.rows + self.columns) + shifted);
        let slice = 4 * 16 * (self.rows / self.high) * (self.columns + 8);
        tiles.max(slice)
    }

    /// The tile for operands of which a thread moves `single` ones one element at a time, if it
    /// leaves registers for that. `places` says for which operands a thread moves elements from
    /// many rows (or columns), whose addresses it keeps.
    pub fn one_by_one(self, single: [bool; 2], places: [bool; 2]) -> Option<TensorTile> {
        let few = [self.rows, self.columns]
            .into_iter()
            .zip(places)
            .all(|(n, kept)| n <= 64 || !kept);
        let blocks = if single == [true; 2] {
            self.blocks.min(2)
        } else {
            self.blocks
        };
        (few && self.high * self.wide < 64 * 64).then_some(TensorTile { blocks, ..self })
    }

    /// Whether it is for few rows or columns: its loaders move vectors only.
    pub fn is_narrow(&self) -> bool {
        self.rows.min(self.columns) < 64
    }

    fn source(&self, elem: Elem) -> String {
        let TensorTile {
            rows,
            columns,
            deep_bytes,
            high,
            wide,
            stages,
            ..
        } = self;
        format!(
            "TensorTile<{}, {rows}, {columns}, {deep_bytes}, {high}, {wide}, {stages}>",
            elem.name()
        )
    }
}

/// Warps of a block of the kernels for few rows or columns.
pub const VECTOR_WARPS: i64 = 8;

/// A kernel for a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Tiles in registers.
    Registers(RegisterTile),
    /// Tiles on tensor cores, for operands that both have this type.
    Tensor(TensorTile, Elem),
    /// At most `few` rows (or columns, if `transposed`); a warp sums along the contracted axis, for
    /// `large` vectors at a time.
    Dots {
        /// Most rows or columns.
        few: i64,
        /// Vectors of the large operand per warp.
        large: i64,
        /// Whether the columns are few, not the rows.
        transposed: bool,
    },
    /// As `Dots`, but lanes run along the vectors, `each` per lane.
    Columns {
        /// Most rows or columns.
        few: i64,
        /// Vectors of the large operand per lane.
        each: i64,
        /// Whether the columns are few, not the rows.
        transposed: bool,
    },
    /// `few` rows at a time, and weights that are decoded as they are read: a warp sums along the
    /// contracted axis, for `large` columns at a time.
    Quantized {
        /// Rows per block.
        few: i64,
        /// Columns per warp.
        large: i64,
        /// The format of the weights.
        format: Quantization,
    },
    /// A depthwise window: each channel separately, with a thread per position.
    Window {
        /// Height and width of the window.
        window: [i64; 2],
        /// Whether the image is the left operand, and its positions are rows.
        transposed: bool,
    },
}

impl Kernel {
    /// Threads of a block.
    pub fn threads(&self) -> i64 {
        match self {
            Kernel::Registers(t) => t.threads(),
            Kernel::Tensor(t, _) => t.threads(),
            Kernel::Dots { .. }
            | Kernel::Columns { .. }
            | Kernel::Quantized { .. }
            | Kernel::Window { .. } => 32 * VECTOR_WARPS,
        }
    }

    /// Blocks that a multiprocessor should hold at once.
    pub fn blocks(&self) -> i64 {
        match self {
            Kernel::Registers(t) => t.blocks,
            Kernel::Tensor(t, _) => t.blocks,
            // Sixteen sums or more occupy registers.
            Kernel::Dots { few, large, .. } => {
                if few * large > 16 {
                    2
                } else {
                    4
                }
            }
            Kernel::Columns { few, each, .. } => {
                if few * each > 16 {
                    2
                } else {
                    4
                }
            }
            // Their decoded weights occupy registers beside the sums, those of two bits twice as many.
            Kernel::Quantized { few, large, format } => {
                match few * large * if format.bits < 4 { 2 } else { 1 } {
                    ..=2 => 4,
                    3..=4 => 3,
                    _ => 2,
                }
            }
            Kernel::Window { .. } => 5,
        }
    }

    /// Blocks that a multiprocessor's registers must hold where the contracted axis is split: fewer
    /// than [`Kernel::blocks`] for tiles in registers, because such a product often ends with the
    /// update of a weight, which needs registers beside those of the sums.
    pub fn blocks_if_split(&self) -> i64 {
        match self {
            Kernel::Registers(t) => (t.blocks * 3 / 4).max(1),
            other => other.blocks(),
        }
    }

    /// Bytes of dynamic shared memory.
    pub fn shared_bytes(&self) -> i64 {
        match self {
            Kernel::Registers(t) => t.shared_bytes(),
            Kernel::Tensor(t, _) => t.shared_bytes(),
            Kernel::Columns { few, each, .. } => 4 * VECTOR_WARPS * few * each * 32,
            Kernel::Dots { .. } | Kernel::Quantized { .. } | Kernel::Window { .. } => 0,
        }
    }

    /// Whether a block has registers to add the sums of other blocks: not where its own, with the
    /// values that its epilogue needs, take all of the 128 registers of a thread.
    pub fn can_be_split(&self) -> bool {
        match self {
            Kernel::Registers(t) => t.high * t.wide < 64 || t.threads() * t.blocks < 512,
            Kernel::Window { .. } => false,
            Kernel::Tensor(..)
            | Kernel::Dots { .. }
            | Kernel::Columns { .. }
            | Kernel::Quantized { .. } => true,
        }
    }

    /// Floats that a block stores where the contracted axis is split: the sums of its threads.
    pub fn partial_sums(&self) -> i64 {
        match self {
            Kernel::Registers(t) => t.rows * t.columns,
            Kernel::Tensor(t, _) => t.rows * t.columns,
            Kernel::Columns { few, each, .. } => (32 * few * each).max(self.threads()),
            Kernel::Dots { .. } | Kernel::Quantized { .. } | Kernel::Window { .. } => {
                self.threads()
            }
        }
    }

    /// Rows and columns of the result per block.
    pub fn tile(&self) -> [i64; 2] {
        let turn = |transposed: bool, [few, many]: [i64; 2]| {
            if transposed { [many, few] } else { [few, many] }
        };
        match *self {
            Kernel::Registers(t) => [t.rows, t.columns],
            Kernel::Tensor(t, _) => [t.rows, t.columns],
            Kernel::Dots {
                few,
                large,
                transposed,
            } => turn(transposed, [few, VECTOR_WARPS * large]),
            Kernel::Columns {
                few,
                each,
                transposed,
            } => turn(transposed, [few, 32 * each]),
            Kernel::Quantized { few, large, .. } => [few, VECTOR_WARPS * large],
            Kernel::Window { transposed, .. } => turn(transposed, [1, 32 * VECTOR_WARPS]),
        }
    }

    /// The granularity of parts of the contracted axis.
    pub fn deep(&self) -> i64 {
        match self {
            Kernel::Registers(t) => t.deep,
            Kernel::Tensor(t, elem) => t.deep_bytes / elem.bytes(),
            Kernel::Dots { .. } => 128,
            Kernel::Columns { .. } | Kernel::Window { .. } => 32,
            // A word for each lane.
            Kernel::Quantized { format, .. } => 32 * i64::from(32 / format.bits),
        }
    }

    /// Whether threads that load neighbours along the contracted axis move whole vectors of 16
    /// bytes.
    pub fn vectors_by_deep(&self) -> bool {
        !matches!(self, Kernel::Registers(_))
    }

    /// The CUDA type of its tile.
    pub fn source(&self) -> String {
        match self {
            Kernel::Registers(t) => t.source(),
            Kernel::Tensor(t, elem) => t.source(*elem),
            Kernel::Dots { .. }
            | Kernel::Columns { .. }
            | Kernel::Quantized { .. }
            | Kernel::Window { .. } => String::new(),
        }
    }

    /// The prefix of its functions' names.
    pub fn name(&self) -> String {
        match self {
            Kernel::Registers(t) => format!("gemm_{}x{}", t.rows, t.columns),
            Kernel::Tensor(t, Elem::F32) => format!("gemm_tf32_{}x{}", t.rows, t.columns),
            Kernel::Tensor(t, elem) => format!("gemm_{}_{}x{}", elem.name(), t.rows, t.columns),
            Kernel::Dots { few, large, .. } => format!("gemv_dots_{few}x{large}"),
            Kernel::Columns { few, each, .. } => format!("gemv_columns_{few}x{each}"),
            Kernel::Quantized { few, large, format } => {
                format!("gemv_{}bits_{few}x{large}", format.bits)
            }
            Kernel::Window { window, .. } => format!("depthwise_{}x{}", window[0], window[1]),
        }
    }
}
