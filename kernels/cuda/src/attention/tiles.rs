//! The tiles of attention: their shapes, their use of threads and shared memory, and the choice
//! among them.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{Attention, SpecError};

use crate::abi::Target;
use crate::code::Storage;

/// The kernels of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// The results of tiles of queries.
    Forward,
    /// The gradients of tiles of queries, and the statistics of their softmax.
    Queries,
    /// The gradients of tiles of keys and values.
    KeysAndValues,
    /// The gradients of tiles of keys alone, and of values alone.
    Keys,
    Values,
}

/// The operands of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// f32, in single precision.
    Single,
    /// f32 rounded to tf32, on tensor cores.
    Tf32,
    /// Halves of this type, on tensor cores.
    Halves(DType),
}

impl Products {
    /// The products of attention: of halves if queries, keys and values have one half type, else of
    /// f32, which holds every operand.
    pub fn of(attention: &Attention, target: &Target) -> Products {
        let operands = [&attention.q, &attention.k, &attention.v];
        Products::of_types(operands.map(|operand| operand.dtype), target)
    }

    /// The products for queries, keys and values of these types.
    pub fn of_types([dtype, k, v]: [DType; 3], target: &Target) -> Products {
        match dtype.is_half() && [k, v] == [dtype; 2] {
            true => Products::Halves(dtype),
            false if target.tf32 => Products::Tf32,
            false => Products::Single,
        }
    }

    /// The widest rows that there are tiles for: shared memory has too little room for wider ones.
    pub fn widest(self) -> i64 {
        match self {
            Products::Halves(_) => 256,
            Products::Single | Products::Tf32 => 128,
        }
    }

    /// The type of operands in shared memory.
    fn dtype(self) -> DType {
        match self {
            Products::Halves(dtype) => dtype,
            Products::Single | Products::Tf32 => DType::F32,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Products::Single => "f32",
            Products::Tf32 => "tf32",
            Products::Halves(dtype) => dtype.name(),
        }
    }
}

/// The units that multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Single precision; so many threads share a row (`AttentionFma` in `tiles.cuh`).
    Fma(i64),
    /// Tensor cores, operands rounded to tf32; a warp has so many times 16 rows (`AttentionMma`).
    Tf32(i64),
    /// Tensor cores, operands of halves; the same.
    Half(i64),
}

impl Unit {
    fn multiplies(self, products: Products) -> bool {
        matches!(
            (self, products),
            (Unit::Fma(_), Products::Single)
                | (Unit::Tf32(_), Products::Tf32)
                | (Unit::Half(_), Products::Halves(_))
        )
    }
}

/// The tile of a block: its own rows, against rows of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    unit: Unit,
    /// Own rows.
    pub rows: i64,
    /// Rows of the other side at a time.
    columns: i64,
    /// Elements of a row, of which some may be padding.
    width: i64,
    /// Blocks that a multiprocessor's registers must hold.
    blocks: i64,
    /// Whether its registers suffice for scores with a limit or a mask.
    adjusts: bool,
}

const fn tile(unit: Unit, [rows, columns, width, _]: [i64; 4], blocks: i64) -> Tile {
    Tile {
        unit,
        rows,
        columns,
        width,
        blocks,
        adjusts: true,
    }
}

/// A tile for scores without a limit or a mask, whose derivatives and terms need registers as well.
const fn plain(tile: Tile) -> Tile {
    Tile {
        adjusts: false,
        ..tile
    }
}

const fn fma(sizes: [i64; 4], blocks: i64) -> Tile {
    tile(Unit::Fma(sizes[3]), sizes, blocks)
}

const fn tf32(sizes: [i64; 4], blocks: i64) -> Tile {
    tile(Unit::Tf32(sizes[3]), sizes, blocks)
}

const fn half(sizes: [i64; 4], blocks: i64) -> Tile {
    tile(Unit::Half(sizes[3]), sizes, blocks)
}

/// The tiles of forward passes: rows, rows of the other side, width, and threads of a row, or 16
/// rows of a warp.
const FORWARD: [Tile; 26] = [
    fma([128, 64, 32, 8], 2),
    fma([64, 64, 32, 8], 4),
    fma([32, 64, 32, 8], 4),
    fma([128, 64, 64, 8], 2),
    fma([128, 32, 64, 8], 2),
    fma([64, 32, 64, 8], 4),
    fma([32, 32, 64, 16], 4),
    fma([64, 32, 128, 16], 2),
    fma([32, 32, 128, 16], 4),
    tf32([128, 64, 32, 2], 2),
    tf32([64, 64, 32, 1], 3),
    tf32([128, 64, 64, 2], 2),
    tf32([64, 64, 64, 1], 3),
    tf32([128, 32, 128, 2], 2),
    tf32([64, 32, 128, 1], 3),
    tf32([32, 32, 128, 1], 4),
    half([128, 64, 32, 2], 2),
    half([64, 64, 32, 1], 4),
    half([128, 64, 64, 2], 2),
    half([64, 64, 64, 1], 3),
    half([32, 64, 64, 1], 4),
    half([128, 64, 128, 1], 1),
    half([64, 64, 128, 1], 2),
    half([32, 64, 128, 1], 4),
    half([64, 32, 256, 1], 2),
    half([32, 32, 256, 1], 2),
];

/// The tiles of gradients of queries.
const QUERIES: [Tile; 20] = [
    plain(fma([128, 32, 32, 8], 2)),
    fma([32, 32, 32, 8], 4),
    plain(fma([64, 64, 64, 16], 2)),
    fma([64, 32, 64, 16], 3),
    fma([32, 32, 64, 16], 4),
    fma([32, 32, 128, 16], 2),
    tf32([128, 32, 32, 2], 2),
    tf32([64, 32, 32, 1], 3),
    tf32([128, 32, 64, 2], 2),
    tf32([64, 32, 64, 1], 3),
    tf32([64, 16, 128, 1], 2),
    plain(half([128, 64, 32, 2], 2)),
    half([64, 64, 32, 1], 3),
    half([128, 32, 64, 2], 2),
    half([64, 64, 64, 1], 3),
    half([32, 64, 64, 1], 4),
    half([64, 32, 128, 1], 2),
    half([32, 32, 128, 1], 4),
    half([64, 16, 256, 1], 1),
    half([32, 16, 256, 1], 2),
];

/// The tiles of gradients of keys and values.
const KEYS: [Tile; 18] = [
    fma([64, 32, 32, 8], 3),
    fma([32, 32, 32, 8], 4),
    plain(fma([64, 64, 64, 16], 2)),
    plain(fma([64, 32, 64, 16], 2)),
    fma([32, 32, 64, 16], 4),
    fma([32, 32, 128, 16], 2),
    tf32([128, 32, 32, 2], 2),
    tf32([64, 32, 32, 1], 3),
    tf32([64, 64, 64, 1], 2),
    tf32([64, 32, 64, 1], 2),
    tf32([64, 16, 128, 1], 2),
    half([128, 32, 32, 2], 2),
    half([64, 64, 32, 1], 2),
    plain(half([64, 64, 64, 1], 2)),
    half([64, 32, 64, 1], 2),
    half([32, 32, 64, 1], 4),
    half([64, 32, 128, 1], 2),
    half([32, 32, 128, 1], 4),
];

/// The tiles of gradients of keys alone or values alone, which are so wide that registers do not
/// hold both.
const PARTS: [Tile; 2] = [half([64, 16, 256, 1], 1), half([32, 16, 256, 1], 2)];

impl Pass {
    /// The kernels of the gradients of heads of so many elements.
    pub fn of_gradients(width: i64) -> &'static [Pass] {
        match width <= 128 {
            true => &[Pass::Queries, Pass::KeysAndValues],
            false => &[Pass::Queries, Pass::Keys, Pass::Values],
        }
    }

    fn tiles(self) -> &'static [Tile] {
        match self {
            Pass::Forward => &FORWARD,
            Pass::Queries => &QUERIES,
            Pass::KeysAndValues => &KEYS,
            Pass::Keys | Pass::Values => &PARTS,
        }
    }

    /// Tiles of the own side and of the other, and other floats, in shared memory.
    fn buffers(self, tile: &Tile) -> [i64; 3] {
        match self {
            Pass::Forward => [1, 2, 0],
            Pass::Queries => [2, 3, 0],
            // Three numbers for each query, in two places.
            Pass::KeysAndValues | Pass::Keys | Pass::Values => [2, 3, 6 * tile.columns],
        }
    }

    /// The name of the function in CUDA.
    pub fn function(self) -> &'static str {
        match self {
            Pass::Forward => "attention",
            Pass::Queries => "attention_query_gradients",
            Pass::KeysAndValues | Pass::Keys | Pass::Values => "attention_key_gradients",
        }
    }

    /// The arguments of its template after the tile.
    pub fn arguments(self) -> &'static str {
        match self {
            Pass::Forward | Pass::Queries => "",
            Pass::KeysAndValues => ", true, true",
            Pass::Keys => ", true, false",
            Pass::Values => ", false, true",
        }
    }

    /// The tile with the smallest estimated time for heads of so many rows of at most `width`
    /// elements, and for scores that are limited or have a mask if they are adjusted.
    pub fn tile(
        self,
        products: Products,
        is_adjusted: bool,
        [heads, rows, width]: [i64; 3],
        target: &Target,
    ) -> Result<Tile, SpecError> {
        let padded = [32, 64, 128, 256].into_iter().find(|&all| width <= all);
        let fits = |tile: &&Tile| {
            Some(tile.width) == padded
                && tile.unit.multiplies(products)
                && (tile.adjusts || !is_adjusted)
                && tile.shared_bytes(self) <= i64::from(target.shared_bytes_max)
        };
        let cost = |tile: &Tile| tile.cost(self, heads, rows, target);
        let best = self.tiles().iter().filter(fits);
        best.min_by(|a, b| cost(a).total_cmp(&cost(b)))
            .map(|&tile| match is_adjusted {
                // More blocks leave a thread too few registers.
                true => Tile {
                    blocks: tile.blocks.min(2),
                    ..tile
                },
                false => tile,
            })
            .ok_or_else(|| {
                SpecError::unsupported(format!("attention of heads of {width} elements"))
            })
    }
}

impl Tile {
    /// Threads of a block.
    pub fn threads(&self) -> i64 {
        match self.unit {
            Unit::Fma(across) => self.rows / 8 * across,
            Unit::Tf32(down) | Unit::Half(down) => self.rows / (16 * down) * 32,
        }
    }

    /// Bytes of shared memory.
    pub fn shared_bytes(&self, pass: Pass) -> i64 {
        let [own, other, more] = pass.buffers(self);
        let scratch = match self.unit {
            Unit::Fma(across) => self.threads() / 32 * self.columns.min(32) * (32 / across * 8 + 4),
            Unit::Tf32(_) | Unit::Half(_) => 0,
        };
        let row = 16 + self.width * if let Unit::Half(_) = self.unit { 2 } else { 4 };
        (own * self.rows + other * self.columns) * row + 4 * (more + scratch)
    }

    /// Its type for operands that its unit multiplies, and the bounds of its launches.
    pub fn source(&self, products: Products) -> (String, String) {
        let (name, last) = match self.unit {
            Unit::Fma(across) => ("AttentionFma<".into(), across),
            Unit::Tf32(down) | Unit::Half(down) => {
                let element = Storage::of(products.dtype()).ty;
                (format!("AttentionMma<{element}, "), down)
            }
        };
        (
            format!(
                "{name}{}, {}, {}, {last}>",
                self.rows, self.columns, self.width
            ),
            format!("{}, {}", self.threads(), self.blocks),
        )
    }

    /// The prefix of the names of its functions.
    pub fn name(&self, pass: Pass, products: Products) -> String {
        let [pass, products] = [pass.function(), products.name()];
        format!("{pass}_{products}_{}x{}", self.rows, self.columns)
    }

    /// An estimate of the time, only for comparing tiles of one unit.
    fn cost(&self, pass: Pass, heads: i64, rows: i64, target: &Target) -> f64 {
        let blocks = (heads * ((rows + self.rows - 1) / self.rows)) as f64;
        let room = i64::from(target.shared_bytes_max) / self.shared_bytes(pass);
        let held = room.clamp(1, self.blocks) as f64;
        // Eight warps hide each other's latencies; fewer do not.
        let busy = |held: f64| (held * self.threads() as f64 / 256.0).min(1.0);
        let multiprocessors = f64::from(target.multiprocessors.max(1));
        let waves = (blocks / (multiprocessors * held)).floor();
        let rest = (blocks / multiprocessors - waves * held).ceil();
        let of = |held: f64| match held > 0.0 {
            true => held * self.rows as f64 / busy(held),
            false => 0.0,
        };
        // Reads of shared memory for each multiplication.
        let reads = match self.unit {
            Unit::Fma(across) => {
                let (scores, result) = (self.columns / across, self.width / across);
                1.0 + 1.0 / scores as f64 + 1.0 / result as f64
            }
            Unit::Tf32(down) | Unit::Half(down) => {
                1.0 + 1.0 / down as f64 + 4.0 / self.columns as f64
            }
        };
        (waves * of(held) + of(rest)) * reads
    }
}
