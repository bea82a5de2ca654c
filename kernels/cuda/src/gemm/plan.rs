//! The choice of a product's kernel and of the number of parts of its contracted axis, by estimates
//! of the time of every choice.
//!
//! The estimate counts, in cycles of a multiprocessor, the multiplications of a wave of blocks, the
//! bytes from memory, and the minimum time of a wave, at the rates of the target's description; only
//! their proportions matter, to an order of the choices that is right more often than not. Where a
//! device is available, the tuner times the first few.

use super::problem::View;
use super::tiles::{
    Elem, Kernel, REGISTER_TILES, RegisterTile, TENSOR_TILES, TensorTile, VECTOR_WARPS,
};
use super::totals;
use crate::abi::Target;

/// A plan for a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// The kernel.
    pub kernel: Kernel,
    /// The number of parts of the contracted axis, whose sums the last block of a tile adds.
    pub parts: i64,
    /// The estimate, cycles.
    pub cycles: f64,
}

/// The order in which a plan computes the sums of a product: those of equal orders have the same
/// bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumOrder {
    /// The order within a part of the contracted axis, which no size of a tile changes.
    pub method: Method,
    /// The parts of the contracted axis, if there are several: how many, and their length.
    pub part: Option<(i64, i64)>,
}

/// The order in which a kernel adds the products of a part of the contracted axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Method {
    /// Sequentially, in registers.
    Registers,
    /// Step by step on tensor cores.
    Tensor,
    /// By the lanes of a warp, each of which takes this many neighbours at once.
    Dots(i64),
    /// By the warps of a block.
    Columns,
    /// By the lanes of a warp, each of which decodes words of this many bits' numbers.
    Quantized(u32),
    /// Over the window.
    Window,
}

/// The sizes of a product: rows, columns, length of the contracted axis, products; for several
/// problems the largest of each.
pub type Sizes = [i64; 4];

/// The lowest compute capability of a device that products run on, times 10.
pub const SM_MIN: u32 = 80;

/// Instructions of a multiprocessor per cycle, all lanes counted.
const ISSUE_RATE: f64 = 128.0;
/// Cycles from the start of a kernel to its first multiplication and from its last to the end.
pub const START: f64 = 2000.0;
/// Cycles until the last block of a tile, or of a row, knows that the others have stored their sums.
pub const JOIN: f64 = 2500.0;
/// Cycles of an iteration on tensor cores beside its steps, to wait for a tile and read from it, and
/// of a step of 32 bytes along the contracted axis, whose sums the next one needs.
const ITERATION: f64 = 120.0;
const STEP: f64 = 35.0;
/// Most rows or columns for the kernels for few rows or columns.
const FEW: i64 = 8;
/// Most parts of the contracted axis.
const PARTS: i64 = 256;
/// Most parts whose sums one block adds.
pub const ALONE: i64 = 12;
/// The number of parts in a group if there are more: the last block of each group adds the sums of
/// its parts, and the last block of all adds the sums of the groups.
pub const GROUP: i64 = 8;

/// The number of rows or columns of a kernel for so many, if they are few.
fn few(count: i64) -> Option<i64> {
    [1, 2, 4, FEW].into_iter().find(|&n| count <= n)
}

/// The groups of so many parts, none if they are one.
fn groups(parts: i64) -> i64 {
    match parts > ALONE {
        true => (parts + GROUP - 1) / GROUP,
        false => 0,
    }
}

impl Plan {
    /// The workspace for the partial sums of so many tiles, bytes, and the number of their counters:
    /// one for each tile, and one for each group of its parts.
    pub fn shared_between_parts(&self, tiles: u64) -> (u64, usize) {
        if self.parts == 1 {
            return (0, 0);
        }
        let sums = (self.parts * self.kernel.partial_sums()) as u64;
        let counters = 1 + groups(self.parts) as usize;
        (tiles.saturating_mul(4 * sums), tiles as usize * counters)
    }
}

/// The input of the choice of a kernel.
pub struct ProductInfo<'a> {
    /// Its sizes at the bounds.
    pub sizes: Sizes,
    /// The elements of both operands that are read from memory.
    pub elements: [f64; 2],
    /// Both operands.
    pub views: [&'a View; 2],
    /// Their element types.
    pub elems: [Elem; 2],
    /// Floats of a column in the sums of its epilogue, 0 if it has none.
    pub totals: usize,
    /// The target device.
    pub target: &'a Target,
}

/// The estimate of a plan for several products, which run side by side and share the
/// multiprocessors.
pub fn cycles_of_all(products: &[ProductInfo<'_>], plan: &Plan) -> f64 {
    let work = |of: &ProductInfo<'_>| of.cycles(&plan.kernel, plan.parts) - START;
    START + products.iter().map(work).sum::<f64>()
}

impl ProductInfo<'_> {
    /// Every plan that computes the product, the one with the smallest estimate first.
    pub fn plans(&self) -> Vec<Plan> {
        let mut plans: Vec<Plan> = Vec::new();
        for kernel in self.kernels() {
            if kernel.shared_bytes() > i64::from(self.target.shared_bytes_max) {
                continue;
            }
            let mut of_kernel: Vec<Plan> = self
                .parts(&kernel)
                .into_iter()
                .map(|parts| Plan {
                    kernel,
                    parts,
                    cycles: self.cycles(&kernel, parts),
                })
                .collect();
            of_kernel.sort_by(|a, b| a.cycles.total_cmp(&b.cycles));
            // The best and the second best number of parts.
            plans.extend(of_kernel.into_iter().take(2));
        }
        plans.sort_by(|a, b| a.cycles.total_cmp(&b.cycles));
        plans
    }

    fn kernels(&self) -> Vec<Kernel> {
        let [left, right] = self.elems;
        let mut list = Vec::new();
        if let Elem::Packed(format) = right {
            let few = few(self.sizes[0].min(FEW));
            // Sixteen numbers of a word leave registers for fewer sums.
            let sums = if format.bits < 4 { 16 } else { 32 };
            let fits = |&large: &i64| few.is_some_and(|few| few * large <= sums);
            let of = |large| few.map(|few| Kernel::Quantized { few, large, format });
            return [1, 2, 4].into_iter().filter(fits).filter_map(of).collect();
        }
        // Instructions for tensor cores distribute tiles over 32 lanes.
        let tensor = self.target.wave_width == 32;
        if tensor && left == right && (left != Elem::F32 || self.target.tf32) {
            // Halves that are loaded one by one stay in registers while a tile is multiplied, and
            // so do their addresses: the largest tiles leave too few registers for that, and of the
            // smallest tile fewer blocks fit where both operands are loaded so.
            let single = self.views.map(|v| v.vector == 1);
            let one_by_one = left != Elem::F32 && single != [false; 2];
            let places = self.views.map(|v| v.vector == 1 && v.by_deep);
            // So do positions along several axes beside the sums of an epilogue: of no tile more
            // than four blocks fit then.
            let crowded = self.totals > 0 && self.views.iter().any(|v| v.free.len() > 1);
            let most = if crowded { 4 } else { i64::MAX };
            let fitting = |t: TensorTile| TensorTile {
                blocks: t.blocks.min(most),
                ..t
            };
            let tiles = TENSOR_TILES.into_iter().map(fitting).filter_map(|t| {
                if t.is_narrow() && single != [false; 2] {
                    None
                } else if one_by_one {
                    t.one_by_one(single, places)
                } else {
                    Some(t)
                }
            });
            list.extend(tiles.map(|t| Kernel::Tensor(t, left)));
        } else {
            // Positions in an image take registers: of the largest tile only one block fits beside
            // them without spills.
            let windowed = self.views.iter().any(|v| v.window.is_some());
            let fitting = |t: RegisterTile| RegisterTile {
                blocks: if windowed && t.blocks == 2 {
                    1
                } else {
                    t.blocks
                },
                ..t
            };
            list.extend(REGISTER_TILES.map(fitting).map(Kernel::Registers));
        }
        let [rows, columns, ..] = self.sizes;
        for (transposed, few, many) in [(false, rows, columns), (true, columns, rows)] {
            if few > FEW
                || (transposed && rows <= FEW && rows <= columns)
                || (!transposed && columns <= FEW && columns < rows)
            {
                continue;
            }
            let few = self::few(few).unwrap_or(FEW);
            let large = self.views[usize::from(!transposed)];
            if large.by_deep {
                list.extend(
                    [1, 4]
                        .into_iter()
                        // Two sums each of four vectors of eight halves take too many registers.
                        .filter(|n| *n == 1 || many >= 4 * 4 && (few, large.vector) != (2, 8))
                        .map(|large| Kernel::Dots {
                            few,
                            large,
                            transposed,
                        }),
                );
            } else {
                list.extend(
                    [1, 4]
                        .into_iter()
                        .filter(|n| *n == 1 || many >= 256)
                        .map(|each| Kernel::Columns {
                            few,
                            each,
                            transposed,
                        }),
                );
            }
        }
        list
    }

    /// The numbers of parts to consider: the contracted axis in a few long parts, while
    /// multiprocessors are idle.
    fn parts(&self, kernel: &Kernel) -> Vec<i64> {
        let [rows, columns, deep, products] = self.sizes;
        let blocks = self.blocks(kernel, 1);
        let slots = i64::from(self.target.multiprocessors.max(1)) * self.held(kernel);
        let points = rows.saturating_mul(columns).saturating_mul(products);
        let mut list = vec![1];
        if !kernel.can_be_split() {
            return list;
        }
        let mut parts = 2;
        while parts <= PARTS
            && blocks.saturating_mul(parts / 2) < slots
            && deep / parts >= 4 * kernel.deep()
            && points.saturating_mul(parts) < i64::from(i32::MAX)
        {
            list.push(parts);
            parts += (parts / 2).max(1);
        }
        list
    }

    /// Resident blocks of a multiprocessor: its shared memory is the maximum of one block and the
    /// bytes that the driver reserves in each block.
    fn held(&self, kernel: &Kernel) -> i64 {
        const OF_DRIVER: i64 = 1024;
        let all = i64::from(self.target.shared_bytes_max) + OF_DRIVER;
        (all / (kernel.shared_bytes() + OF_DRIVER)).clamp(1, kernel.blocks())
    }

    fn blocks(&self, kernel: &Kernel, parts: i64) -> i64 {
        let [rows, columns, _, products] = self.sizes;
        let [high, wide] = kernel.tile();
        [
            (rows + high - 1) / high,
            (columns + wide - 1) / wide,
            products,
            parts,
        ]
        .iter()
        .fold(1, |p: i64, &n| p.saturating_mul(n))
    }

    fn cycles(&self, kernel: &Kernel, parts: i64) -> f64 {
        let [rows, columns, deep, products] = self.sizes.map(|n| n as f64);
        let multiprocessors = f64::from(self.target.multiprocessors.max(1));
        let blocks = self.blocks(kernel, parts) as f64;
        let steps = (deep / parts as f64).max(1.0);
        let [high, wide] = kernel.tile().map(|n| n as f64);
        let [left, right] = self.elems.map(Elem::width);
        let speeds = self.target.speeds;
        let [memory_rate, cache_rate] = [speeds.memory, speeds.cache].map(|n| f64::from(n) / 1e3);
        // Each element is read once from memory, and once per tile from the cache.
        let memory = products
            * (self.elements[0] * left + self.elements[1] * right + rows * columns * 4.0)
            / (multiprocessors * memory_rate);
        let cache = blocks * steps * (high * left + wide * right) / (multiprocessors * cache_rate);
        let compute = match kernel {
            Kernel::Registers(t) => {
                // Reads of shared memory beside the multiplications of a step, and elements that
                // cannot be moved in vectors.
                let work = (t.high * t.wide) as f64;
                let reads = 2.0 * (t.high + t.wide) as f64 / 4.0;
                let moved = self.moved(kernel) * (high + wide) / t.threads() as f64;
                let each = (work + reads + moved) / work / f64::from(speeds.f32);
                self.waves(
                    blocks,
                    kernel,
                    high * wide * steps * each,
                    steps * work * 1.5,
                )
            }
            Kernel::Tensor(t, elem) => {
                let rate = f64::from(match elem {
                    Elem::F32 => speeds.tf32,
                    _ => speeds.half,
                });
                let moved = self.moved(kernel) * (high + wide) * steps / ISSUE_RATE;
                let warp = (t.high * t.wide) as f64 * steps * 4.0 / rate;
                let bytes = steps * elem.bytes() as f64;
                let latency = bytes / t.deep_bytes as f64 * ITERATION + bytes / 32.0 * STEP;
                // Small warps read each fragment for fewer multiplications.
                let each = 1.0 + 24.0 * (1.0 / t.high as f64 + 1.0 / t.wide as f64) / 2.0;
                self.waves(
                    blocks,
                    kernel,
                    high * wide * steps * each / rate + moved,
                    latency.max(2.0 * warp),
                )
            }
            Kernel::Dots { few, large, .. } => {
                let turns = steps
                    / 32.0
                    / self.views.map(|v| v.vector).into_iter().max().unwrap_or(1) as f64;
                let work =
                    VECTOR_WARPS as f64 * (steps / 32.0) * (few * large + few + large) as f64 / 4.0;
                self.waves(blocks, kernel, work, turns * 600.0)
            }
            Kernel::Columns { few, each, .. } => {
                let turns = steps / VECTOR_WARPS as f64;
                let work = steps * (few * each + 2 * few + each) as f64 / 4.0;
                self.waves(blocks, kernel, work, turns * 150.0)
            }
            Kernel::Quantized { few, large, .. } => {
                // A number is decoded in three cycles of a lane, whose logic has half the rate of
                // multiplications.
                let each = large * (few + 3) + few;
                let work = VECTOR_WARPS as f64 * (steps / 32.0) * each as f64 / 4.0;
                let turns = steps / kernel.deep() as f64;
                self.waves(blocks, kernel, work, turns * 600.0)
            }
            Kernel::Window { window, .. } => {
                let work = VECTOR_WARPS as f64 * (window[0] * window[1]) as f64 * 10.0 / 4.0;
                self.waves(blocks, kernel, work, work)
            }
        };
        // A block writes its own sums and, if it is the last, reads those of all.
        let join =
            |parts: i64| JOIN + 4.0 * ((parts + 1) * kernel.partial_sums()) as f64 / cache_rate;
        let sum = match groups(parts) {
            _ if parts == 1 => 0.0,
            0 => join(parts),
            groups => join(GROUP) + join(groups),
        };
        START + compute.max(memory).max(cache) + sum + self.totals_cycles(kernel)
    }

    /// The cycles in which the last blocks add the totals of all tiles of rows.
    fn totals_cycles(&self, kernel: &Kernel) -> f64 {
        let [high, wide] = kernel.tile();
        let down = (self.sizes[0] + high - 1) / high;
        if self.totals == 0 || down == 1 {
            return 0.0;
        }
        let cache_rate = f64::from(self.target.speeds.cache) / 1e3;
        let column = 4.0 * (self.totals as i64 * wide) as f64;
        let join = |tiles: i64| JOIN + column * (tiles + 1) as f64 / cache_rate;
        let members = totals::group(down).min(down);
        match (down + members - 1) / members {
            1 => join(down),
            groups => join(members) + join(groups),
        }
    }

    /// The instructions to move an element of a tile, all threads together, averaged over both
    /// operands.
    fn moved(&self, kernel: &Kernel) -> f64 {
        let each = self.views.map(|view| {
            let vector = if view.by_deep && !kernel.vectors_by_deep() {
                1
            } else {
                view.vector
            };
            // A table locates elements of an image in fewer instructions than a thread does others.
            let is_located = view.taps.is_some() && matches!(kernel, Kernel::Tensor(..));
            let locate = match view.window {
                _ if is_located => 3.0,
                // Positions of vectors across threads are located for each.
                Some(_) if !view.by_deep && view.vector > 1 => 29.0,
                Some(_) => 14.0,
                None => 5.0,
            };
            locate / vector as f64
        });
        (each[0] + each[1]) / 2.0
    }

    /// The cycles of blocks that keep a multiprocessor busy for `work` cycles each, and take
    /// `least` cycles at least.
    fn waves(&self, blocks: f64, kernel: &Kernel, work: f64, least: f64) -> f64 {
        let multiprocessors = f64::from(self.target.multiprocessors.max(1));
        let held = self.held(kernel) as f64;
        let warps = kernel.threads() as f64 / 32.0;
        // Eight warps hide each other's latencies; fewer do not.
        let of = |n: f64| {
            if n == 0.0 {
                0.0
            } else {
                (n * work / (n * warps / 8.0).min(1.0)).max(least)
            }
        };
        let waves = (blocks / (multiprocessors * held)).floor();
        let rest = ((blocks - waves * multiprocessors * held) / multiprocessors).ceil();
        waves * of(held) + of(rest)
    }
}
