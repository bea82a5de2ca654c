//! Matrix products.

pub(super) mod drive;
mod few_rows;
mod k_blocks;
mod matrix;
pub(super) mod micro;
pub(super) mod pack;
pub(super) mod planes;
mod product;
pub(super) mod quantized;
mod share;
pub(super) mod simd;
pub(super) mod small;
mod strided;
pub(super) mod winograd;
pub(super) mod workspace;

use super::tile::TileCode;
use super::{Config, Isa, Launch, MicroBatchLimits, SpecError};
use crate::dtype::DType;
use crate::size::{Env, Size};
use crate::spec::{Body, MAX_AXES, Operand, Spec, check_operand};
use drive::{Blocking, Carry, KBlocks, SERIAL_WORK, drive_some};
use matrix::Matrix;
use micro::Micro;
pub(super) use product::Product;
use quantized::Weights;
use share::{balanced, equal_rows};
pub(super) use share::{share_rows, split_blocks, splits, wanted};
use strided::Strided;
use workspace::{Resources, Space};

// Names as in BLIS: a packed left panel of MC rows by KC steps, a block of NC columns, and
// micro-kernels that compute MR rows by NR columns.

/// Most steps of the contracted axis in a k-block: a right micro-panel of so many steps stays in L2
/// beside the left panels.
pub(super) const KC: usize = 512;
/// Most rows of a block of the result; a multiple of every micro-kernel's rows.
pub(super) const MC: usize = 168;
/// Elements of a tile of an image above which a smaller part of it is taken, if there is one.
pub(super) const IMAGE_TILE_ELEMENTS: usize = 32 << 10;
/// Most elements of a packed left operand, kept for the whole contracted axis.
pub(super) const LEFT_PACKED_ELEMENTS: usize = 96 << 10;
/// Most elements of a block of the result while the left operand stays packed: the epilogue finds
/// them in L2.
pub(super) const ACC_ELEMENTS: usize = 32 << 10;
/// Most elements of a block of a convolution when the left operand is packed anew for every block of
/// columns, which favours a large NC.
pub(super) const ACC_ELEMENTS_REPACKED_CONV: usize = 64 << 10;
/// The same for a matrix product; the size of a slab depends on fewer of these.
const ACC_ELEMENTS_REPACKED_PRODUCT: usize = 256 << 10;

/// Upper bounds on the packed panels and sums of a worker. No bit of a result depends on them.
#[derive(Debug)]
pub(super) struct Limits {
    /// Rows of a block.
    pub mc: usize,
    /// Elements of a left operand that stays packed.
    pub left: usize,
    /// Elements of a block, and of one of a convolution for which the left operand is packed anew.
    pub acc: [usize; 2],
    /// Elements of a block of a product for which the left operand is packed anew.
    acc_product: usize,
    /// Steps of a sub-block of the contracted axis.
    pub kc: usize,
    /// Elements of a tile of an image.
    pub tile: usize,
    /// Estimated run time relative to the first limits: products, convolutions, and their weights'
    /// gradients.
    pub slower: [f64; 3],
}

/// From the fastest to the smallest.
static LIMITS: [Limits; 5] = [
    Limits {
        mc: MC,
        left: LEFT_PACKED_ELEMENTS,
        acc: [ACC_ELEMENTS, ACC_ELEMENTS_REPACKED_CONV],
        acc_product: ACC_ELEMENTS_REPACKED_PRODUCT,
        kc: KC,
        tile: IMAGE_TILE_ELEMENTS,
        slower: [1.0; 3],
    },
    Limits {
        mc: MC / 2,
        left: LEFT_PACKED_ELEMENTS / 3,
        acc: [ACC_ELEMENTS / 4; 2],
        acc_product: ACC_ELEMENTS / 4,
        kc: KC / 2,
        tile: IMAGE_TILE_ELEMENTS / 2,
        slower: [1.05, 1.1, 1.02],
    },
    Limits {
        mc: MC / 3,
        left: LEFT_PACKED_ELEMENTS / 12,
        acc: [ACC_ELEMENTS / 8; 2],
        acc_product: ACC_ELEMENTS / 8,
        kc: KC / 4,
        tile: IMAGE_TILE_ELEMENTS / 4,
        slower: [1.15, 1.2, 1.1],
    },
    Limits {
        mc: MC / 6,
        left: LEFT_PACKED_ELEMENTS / 48,
        acc: [ACC_ELEMENTS / 16; 2],
        acc_product: ACC_ELEMENTS / 16,
        kc: KC / 8,
        tile: IMAGE_TILE_ELEMENTS / 8,
        slower: [1.3, 1.3, 1.5],
    },
    Limits {
        mc: MC / 12,
        left: LEFT_PACKED_ELEMENTS / 192,
        acc: [ACC_ELEMENTS / 64; 2],
        acc_product: ACC_ELEMENTS / 64,
        kc: KC / 16,
        tile: IMAGE_TILE_ELEMENTS / 16,
        slower: [1.6, 1.4, 2.6],
    },
];

/// The fastest limits, but with sub-blocks of a contracted axis that is at most a k-block.
pub(super) static SHORT_K_LIMITS: Limits = Limits {
    kc: KC / 4,
    ..LIMITS[0]
};

/// Fewest rows for which the next right micro-panel is copied while one is multiplied: beside so many
/// rows, a second micro-panel is little memory.
const AHEAD_ROWS_MIN: usize = 256;
/// Elements between rows at which their cache lines share a set: of the panels of wide vectors, which
/// have more rows than a set has lines, none stays in the cache then.
const SAME_SET_STRIDE: i64 = 1 << 10;
/// Blocks of rows beside each block of columns of a product with swapped operands, at least.
const SWAPPED_ROW_BLOCKS_MIN: usize = 4;
/// Most columns of such a block.
const SWAPPED_COLUMNS_MAX: usize = 512;
/// Most elements of a block of columns of the right operand that stays packed; twice as many if the
/// fewest columns need that.
const RIGHT_PACKED_ELEMENTS: usize = 64 << 10;
/// Most columns of a product of several blocks of rows for which its left operand is not worth
/// packing. A single block of rows is packed by every worker.
const NARROW_COLUMNS_MAX: usize = 768;
/// The types of operands.
const OPERAND_DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// NC when the contracted axis is split.
pub(super) const SPLIT_NC: usize = 128;

/// How the matrices of a product lie in memory, as far as its buffers depend on it.
#[derive(Clone, Copy)]
struct Layout {
    /// Whether the left operand is read where it lies rather than packed.
    left_stays: bool,
    /// Whether blocks are summed where the result is stored.
    sums_stay: bool,
    /// Whether the product is computed transposed although it has several columns.
    swaps: bool,
}

/// A product that is computed by blocks of its result.
pub(crate) struct Matmul {
    code: TileCode,
    isa: Isa,
    micro: &'static Micro,
    threads: usize,
    /// See [`blocks`].
    blocks: usize,
    limits: &'static Limits,
    layout: Layout,
    /// Whether [`small`] computes it.
    small: bool,
    space: Space,
}

impl Matmul {
    /// Prepared for sizes up to `bound`, of slices of a run of sizes up to `whole`, with a worker's
    /// part of the workspace of no more than `most` bytes where that is possible.
    pub fn new(
        spec: &Spec,
        [bound, whole]: [&Env; 2],
        config: &Config,
        most: usize,
    ) -> Result<Self, SpecError> {
        let Some(body) = &product(spec) else {
            return Err(SpecError::unsupported("not a matrix product"));
        };
        let rank = spec.dims.len();
        if !(2..=MAX_AXES).contains(&rank) {
            return Err(SpecError::unsupported(format!("a product of rank {rank}")));
        }
        check_operand("the left operand", &body.a, rank, &OPERAND_DTYPES)?;
        if !is_quantized(spec) {
            check_operand("the right operand", &body.b, rank, &OPERAND_DTYPES)?;
        }
        let code = TileCode::new(spec, bound, config)?;
        let micro = Micro::of(config.isa);
        let size = |s: Size| s.usize_at(bound);
        let (m, n) = (size(spec.dims[rank - 2]), size(spec.dims[rank - 1]));
        let k = [size(body.k), body.k.usize_at(whole)];
        let groups = spec.dims[..rank - 2]
            .iter()
            .fold(1usize, |p, &d| p.saturating_mul(size(d)));
        let threads = workers([groups, m, n, k[1]], config);
        let blocks = blocks(spec, body, [groups, m, n]);
        let sums_stay = code.only_stores() && sums_stay(spec, body, micro);
        let is_whole = splits(blocks, k[1].div_ceil(KC)) == 1;
        let layout = |limits: &Limits, swaps: bool| Layout {
            left_stays: swaps
                || (groups == 1
                    && (n <= NARROW_COLUMNS_MAX || m <= limits.mc)
                    && left_stays(spec, body)),
            // Sub-blocks of a k-block have sums of their own.
            sums_stay: !swaps && sums_stay && is_whole && limits.is_fastest(),
            swaps,
        };
        let space = |small: bool, limits: &Limits, swaps: bool| {
            let of = |m: usize, n: usize| {
                if small {
                    return small::space([m, n, k[0]], micro);
                }
                let layout = (limits, layout(limits, swaps));
                space([groups, m, n], k, blocks, threads, micro, layout)
            };
            // See `run` for the cases of a single column and of swapped operands.
            let space = match spec.dims[rank - 1].as_fixed() {
                Some(1) if !is_quantized(spec) => of(1, m),
                Some(_) if swaps => of(n, m),
                Some(_) => of(m, n),
                None => of(m, n).max(&of(1, m)),
            };
            let transposed = if swaps { 4 * space.acc } else { 0 };
            Space {
                scratch: code.scratch_bytes() + transposed,
                ..space
            }
        };
        let most = most.saturating_mul(config.threads.max(1) / threads);
        let swapped = (groups == 1
            && is_whole
            && (micro.lanes..n).contains(&m)
            && k[0] <= 2 * RIGHT_PACKED_ELEMENTS / micro.nr()
            && swaps(spec, body))
        .then(|| space(false, &LIMITS[0], true))
        .filter(|space| space.bytes(threads) <= most.saturating_mul(threads) as u64);
        let (limits, packed) = match swapped {
            Some(space) => (&LIMITS[0], space),
            None => Limits::within(most, |limits| space(false, limits, false)),
        };
        let shape = match spec.dims[rank - 1].is(1) {
            true => [1, m, k[1]],
            false => [m, n, k[1]],
        };
        let unpacked = space(true, &LIMITS[0], false);
        let short = packed.part() > unpacked.part() && !limits.is_fastest();
        let packs = !body.b.strides[rank - 1].is(1);
        let is_fast = small::is_fast(shape, packs, micro);
        let small = small(spec, body, [m, n, k[0]]) && (is_fast || short);
        let (limits, space) = match small {
            true => (&LIMITS[0], unpacked),
            false => (limits, packed),
        };
        Ok(Matmul {
            code,
            isa: config.isa,
            micro,
            threads,
            blocks,
            limits,
            layout: layout(limits, swapped.is_some() && !small),
            small,
            space,
        })
    }

    /// The sums of a product over a batch, which slices may cut anywhere; `None` if sizes of the
    /// result vary.
    pub fn micro_batch_limits(&self, spec: &Spec, bound: &Env) -> Option<MicroBatchLimits> {
        let Body::Matmul(body) = &spec.body else {
            return None;
        };
        let dims: Vec<usize> = spec
            .dims
            .iter()
            .map(|d| d.as_fixed().and_then(|d| usize::try_from(d).ok()))
            .collect::<Option<_>>()?;
        let [groups @ .., m, n] = &dims[..] else {
            return None;
        };
        let groups = groups.iter().fold(1usize, |p, &d| p.saturating_mul(d));
        let (m, n) = if *n == 1 { (1, *m) } else { (*m, *n) };
        // A longer contracted axis makes no fewer splits.
        let k_blocks = body.k.usize_at(bound).div_ceil(KC);
        let open = usize::from(k_blocks > 1);
        let parts = splits(self.blocks, k_blocks) * (1 + open);
        Some(MicroBatchLimits {
            unit: 1,
            sums: drive::sums(groups, m, n, parts, self.micro),
        })
    }

    pub fn workspace(&self) -> u64 {
        self.space.bytes(self.threads)
    }

    pub fn slower(&self) -> f64 {
        self.limits.slower[0]
    }

    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let env = launch.env;
        let (length, mut a, mut b) = factors(spec, launch);
        let (batch, sizes) = spec.dims.split_at(spec.dims.len() - 2);
        let groups = batch.iter().map(|d| d.usize_at(env)).product();
        let (mut m, mut n, k) = (
            sizes[0].usize_at(env),
            sizes[1].usize_at(env),
            length.usize_at(env),
        );
        // A matrix times a vector: the vector's one column would fill a lane of each vector
        // register, so the product is computed transposed, which changes neither a sum nor, with
        // one column, its position in the block.
        let transposed = n == 1 && !is_quantized(spec) || self.layout.swaps;
        if transposed {
            (m, n) = (n, m);
            (a, b) = (b.transposed(), a.transposed());
        }
        let resources = Resources {
            workspace: launch.workspace,
            space: &self.space,
            threads: self.threads,
            team: launch.team,
        };
        let k_blocks = KBlocks::new(k, even(k, KC, 1), self.limits.kc);
        let threads = self.threads.min(launch.team.threads());
        if self.small {
            let product = Strided {
                spec,
                env,
                a,
                b,
                weights: None,
                transposed,
                sizes: [groups, m, n, k],
                mc: m,
                nc: small::columns([groups, m, n, k], threads, self.micro),
                k_blocks,
                slice: 0..k,
                two_panels: false,
                left_stays: false,
                keeps_right: false,
                micro: self.micro,
                code: self.code.bind(spec, launch),
            };
            // SAFETY: `space` covers sizes up to the bound; operands are valid by the contract of
            // `run`.
            return unsafe { small::run(&product, &resources) };
        }
        let folded = launch.part.filter(|part| part.micro_batching.folds);
        let slice = folded.map_or(0..k, |part| {
            let steps = length
                .checked_div_size(Size::symbol(part.micro_batching.batch))
                .map_or(1, |steps| steps.usize_at(env));
            part.examples.start * steps..part.examples.end * steps
        });
        let carry = folded.map(|part| Carry {
            k_blocks: if slice.is_empty() {
                0..0
            } else {
                slice.start / k_blocks.size()..slice.end.div_ceil(k_blocks.size())
            },
            begun: !slice.start.is_multiple_of(k_blocks.size()),
            open: slice.end < k && !slice.end.is_multiple_of(k_blocks.size()),
            sums: part.sums.cast(),
            last: part.last,
        });
        let splits = splits(self.blocks, k_blocks.count());
        // The workspace is that of so many workers, even if the system has given fewer.
        let blocking = blocking(
            [m, n, slice.len()],
            groups,
            splits,
            self.threads,
            self.micro,
            (self.limits, self.layout),
        );
        let blocking = match self.layout.sums_stay || self.layout.swaps {
            true => blocking,
            false => blocking.within(self.space.acc, self.micro),
        };
        let steps = slice.len().min(self.limits.kc);
        let two_panels = 2 * steps * self.micro.nr() <= self.space.micro_panel;
        let product = Strided {
            spec,
            env,
            a,
            b,
            weights: Weights::of(spec, launch, self.isa),
            transposed,
            sizes: [groups, m, n, k],
            mc: blocking.mc,
            nc: blocking.nc,
            k_blocks,
            slice,
            two_panels,
            left_stays: self.layout.left_stays,
            keeps_right: self.layout.swaps,
            micro: self.micro,
            code: self.code.bind(spec, launch),
        };
        // SAFETY: `space` covers every blocking of sizes up to the bound; operands are valid by the
        // contract of `run`.
        unsafe { drive_some(&product, self.micro, &blocking, &resources, carry) };
    }
}

/// The length of the contracted axis and the operands of a launch. The right operand of one with
/// quantized weights stands for their packed numbers, which are only accessed by [`Weights`].
fn factors<'a>(spec: &'a Spec, launch: &Launch) -> (Size, Matrix<'a>, Matrix<'a>) {
    let [first, second] = [launch.args[0], launch.args[1]];
    let matrix = |operand, at| Matrix::new(operand, at, launch.env);
    match &spec.body {
        Body::Matmul(p) => (p.k, matrix(&p.a, first), matrix(&p.b, second)),
        Body::QuantizedMatmul(p) => {
            let numbers = matrix(&p.numbers, second);
            (p.k, matrix(&p.a, first), numbers.transposed())
        }
        _ => unreachable!("checked when it was prepared"),
    }
}

/// The product that a spec computes. The right operand of one with quantized weights stands for their
/// packed numbers, which are only accessed by [`Weights`].
fn product(spec: &Spec) -> Option<crate::spec::Matmul> {
    match &spec.body {
        Body::Matmul(product) => Some(product.clone()),
        Body::QuantizedMatmul(product) => Some(crate::spec::Matmul {
            k: product.k,
            a: product.a.clone(),
            in_order: true,
            b: Operand {
                strides: product.numbers.strides.iter().rev().copied().collect(),
                ..product.numbers.clone()
            },
        }),
        _ => None,
    }
}

fn is_quantized(spec: &Spec) -> bool {
    matches!(spec.body, Body::QuantizedMatmul(_))
}

/// The blocks of the result by whose number the contracted axis is split; so many that it is not
/// where it must not be. Their number follows from that of the rows: of one that varies it would
/// differ from run to run, and where sums are in order, a row has the same bits beside any number of
/// others. So only the gradient of a weight is split then: its rows are inputs of the layer, and
/// examples lie along the contracted axis, apart in the left operand.
fn blocks(spec: &Spec, body: &crate::spec::Matmul, [groups, m, n]: [usize; 3]) -> usize {
    let is_fixed = spec.dims.iter().all(|d| d.as_fixed().is_some());
    let of_weight = spec.dims.len() == 2 && !body.a.strides[1].is(1);
    match n {
        _ if !is_fixed || body.in_order && !of_weight => usize::MAX,
        // A product of one column is computed transposed.
        1 if !is_quantized(spec) => split_blocks(groups, 1, m),
        _ => split_blocks(groups, m, n),
    }
}

/// Whether [`small`] computes a product of up to `[m, n, k]`. A contracted axis that varies may be
/// cut into slices, whose sums it does not continue.
fn small(spec: &Spec, body: &crate::spec::Matmul, [m, n, k]: [usize; 3]) -> bool {
    let stride = |operand: &Operand, axis: usize| operand.strides[axis].as_fixed();
    let rank = spec.dims.len();
    let m = if spec.dims[rank - 1].is(1) { 1 } else { m };
    // The left operand is read in place: the other one if there is one column.
    let read_in_place = match spec.dims[rank - 1].as_fixed() {
        Some(1) => &[&body.b][..],
        Some(_) => &[&body.a],
        None => &[&body.a, &body.b],
    };
    if read_in_place.iter().any(|o| o.dtype != DType::F32) || is_quantized(spec) {
        return false;
    }
    let strides = [&body.a, &body.b].map(|o| [stride(o, rank - 2), stride(o, rank - 1)]);
    let [[Some(a), Some(b)], [Some(c), Some(d)]] = strides else {
        return false;
    };
    body.k.as_fixed().is_some() && small::applies([m, n, k], [a, b, c, d])
}

/// Whether kernels can read the left operand of a product where it lies, and about as fast as
/// packed: the steps of a row are neighbours, and the rows of a panel have their cache lines in
/// several sets of a cache. The right operand needs no transposing, which kernels do beside packed
/// left panels only.
fn left_stays(spec: &Spec, body: &crate::spec::Matmul) -> bool {
    let rank = spec.dims.len();
    let [stride, step] = [rank - 2, rank - 1].map(|axis| body.a.strides[axis].as_fixed());
    let right_step = &body.b.strides[rank - 1];
    // A product of one column is computed transposed.
    spec.dims[rank - 1].as_fixed().is_some_and(|n| n > 1)
        && body.a.dtype == DType::F32
        && !is_quantized(spec)
        && step == Some(1)
        && right_step.is(1)
        && stride.is_some_and(|stride| small::fits(stride) && stride % SAME_SET_STRIDE != 0)
}

/// Whether a product may be computed transposed, so that its right operand is read where it lies:
/// the steps of a column are neighbours in both operands. One of them has to be transposed as it is
/// packed, which had better be the smaller one.
fn swaps(spec: &Spec, body: &crate::spec::Matmul) -> bool {
    let rank = spec.dims.len();
    let step = |operand: &Operand, axis: usize| operand.strides[axis].as_fixed();
    let apart = body.b.strides[rank - 1].as_fixed();
    spec.dims[rank - 1].as_fixed().is_some_and(|n| n > 1)
        && body.k.as_fixed().is_some()
        && [&body.a, &body.b].map(|operand| operand.dtype) == [DType::F32; 2]
        && [step(&body.a, rank - 1), step(&body.b, rank - 2)] == [Some(1); 2]
        && apart.is_some_and(|apart| small::fits(apart) && apart % SAME_SET_STRIDE != 0)
}

/// Whether every block of a product whose code only stores it, and whose contracted axis is not
/// split, has a [`drive::Product::target`].
fn sums_stay(spec: &Spec, body: &crate::spec::Matmul, micro: &Micro) -> bool {
    let rank = spec.dims.len();
    let columns = spec.dims[rank - 1].as_fixed();
    let [stride, step] = [rank - 2, rank - 1].map(|axis| spec.operands[0].strides[axis].as_fixed());
    // Slices of a contracted axis that varies pass their sums on.
    body.k.as_fixed().is_some()
        && columns.is_some_and(|n| n > 1 && n % micro.lanes as i64 == 0)
        && step == Some(1)
        && stride.is_some_and(|stride| stride >= 0)
}

/// The workers of a product of up to so many multiply-adds, which need a part of the workspace each:
/// one if the work is not worth sharing.
pub(super) fn workers(sizes: [usize; 4], config: &Config) -> usize {
    let work = sizes.into_iter().fold(1, usize::saturating_mul);
    if work < SERIAL_WORK {
        1
    } else {
        config.threads.max(1)
    }
}

/// The size of each part but the last when `total` is cut evenly into parts of at most `most`; a
/// multiple of `multiple`.
pub(super) fn even(total: usize, most: usize, multiple: usize) -> usize {
    total
        .div_ceil(total.div_ceil(most.max(1)).max(1))
        .next_multiple_of(multiple)
        .max(multiple)
}

/// The blocking of a product, or of a slice of it. Only `splits` (and the k-blocks) decide in which
/// order an element is summed, and they follow from the sizes alone; the other fields may depend on
/// the number of threads and on the memory.
fn blocking(
    [m, n, k]: [usize; 3],
    groups: usize,
    splits: usize,
    threads: usize,
    micro: &Micro,
    (limits, layout): (&Limits, Layout),
) -> Blocking {
    let width = micro.nr();
    if layout.swaps {
        // Each worker packs a block of columns, but reads rows of its own: those of weights that it
        // has updated before. Blocks of rows need no packing and may be many; they become columns.
        let nc = even(n, swapped_columns([n, k], micro), micro.lanes);
        let mc = (limits.acc(true) / nc).min(swapped_rows([m, n], nc, threads));
        return Blocking {
            mc: even(
                m,
                (mc / micro.lanes * micro.lanes).max(micro.lanes),
                micro.lanes,
            ),
            nc,
            resident: true,
            by_columns: true,
            splits,
        };
    }
    if splits > 1 {
        return Blocking {
            mc: even(m, MC, 1),
            nc: SPLIT_NC.min(n.next_multiple_of(width)),
            resident: false,
            by_columns: false,
            splits,
        };
    }
    // Saturating, because bounds of sizes may be absurd.
    let beside = |nc: usize| groups.saturating_mul(n.div_ceil(nc));
    let mut mc = limits.rows(m, micro);
    let resident = layout.left_stays || limits.resident(mc, k);
    let acc = match layout.sums_stay && !resident {
        // The left operand is packed once, and the sums need no memory.
        true => usize::MAX,
        false => limits.acc(resident),
    };
    let mut nc = even(n, (acc / mc / width * width).max(width), width);
    // Enough blocks for every thread to have several: first by a smaller NC, which needs no more
    // packing of the left operand, then by a smaller MC.
    let blocks = groups.saturating_mul(m.div_ceil(mc));
    if threads > 1 && blocks.saturating_mul(n.div_ceil(nc)) < wanted(threads) {
        // Each block of columns packs a left operand that does not stay packed.
        let wanted = match resident {
            true => wanted(threads),
            false => 2 * threads,
        };
        nc = nc.min(even(n, n.div_ceil(wanted.div_ceil(blocks.max(1))), width));
        mc = share_rows(m, mc, beside(nc), threads);
    }
    if resident && threads > 1 {
        nc = balanced(n, nc, groups.saturating_mul(m.div_ceil(mc)), threads, width);
    }
    mc = mc.min(equal_rows(m, mc, beside(nc), threads));
    Blocking {
        mc,
        nc,
        resident,
        by_columns: false,
        splits,
    }
}

/// Most columns of a block of a product with swapped operands; no fewer for more columns.
fn swapped_columns([n, k]: [usize; 2], micro: &Micro) -> usize {
    let width = micro.nr();
    let most = (RIGHT_PACKED_ELEMENTS / k.max(1)).min(SWAPPED_COLUMNS_MAX) / width * width;
    most.max(width).min(n.max(1).next_multiple_of(micro.lanes))
}

/// Most rows of such a block, of which every thread has several; no fewer for more columns.
fn swapped_rows([m, n]: [usize; 2], nc: usize, threads: usize) -> usize {
    m.div_ceil(SWAPPED_ROW_BLOCKS_MIN * threads.div_ceil(n.div_ceil(nc).max(1)))
}

/// Elements that the sums of splits may need with sizes up to these; `fewest`: the least value of
/// [`split_blocks`].
pub(super) fn partial_space(
    rows: usize,
    columns: usize,
    fewest: usize,
    k_blocks: usize,
    micro: &Micro,
) -> usize {
    // There are at most `SPLIT_BLOCKS` splits of blocks, all blocks together.
    let columns = SPLIT_NC.min(columns.next_multiple_of(micro.nr()));
    if splits(fewest, k_blocks) > 1 {
        share::SPLIT_BLOCKS * MC.min(rows) * columns
    } else {
        0
    }
}

impl Limits {
    /// The fastest limits for which a worker's part of the workspace is at most `most` bytes, or
    /// those with the smallest part.
    pub fn within(most: usize, space: impl Fn(&Limits) -> Space) -> (&'static Limits, Space) {
        let all = LIMITS.iter().map(|limits| (limits, space(limits)));
        let fits = all.clone().find(|(_, space)| space.part() <= most);
        fits.or_else(|| all.min_by_key(|(_, space)| space.part()))
            .expect("there are limits")
    }

    pub fn is_fastest(&self) -> bool {
        std::ptr::eq(self, &LIMITS[0])
    }

    /// Elements of a block of a product; `resident`: whether its left operand stays packed.
    fn acc(&self, resident: bool) -> usize {
        match resident {
            true => self.acc[0],
            false => self.acc_product,
        }
    }

    /// Rows of each block of a product but the last: whole left panels, if there are several blocks.
    fn rows(&self, rows: usize, micro: &Micro) -> usize {
        if rows <= self.mc {
            rows.max(1)
        } else {
            even(rows, self.mc / micro.mr * micro.mr, micro.mr)
        }
    }

    /// Whether a left operand of `rows` rows and `steps` steps stays packed.
    pub fn resident(&self, rows: usize, steps: usize) -> bool {
        steps <= self.kc || rows.saturating_mul(steps) <= self.left
    }
}

/// The buffers of sizes up to these; `k` of a slice and of the whole run; `blocks`:
/// see [`blocks`]. Smaller sizes, of which a block could have more columns, keep to
/// [`Blocking::within`].
fn space(
    [groups, m, n]: [usize; 3],
    [k, whole]: [usize; 2],
    blocks: usize,
    threads: usize,
    micro: &Micro,
    (limits, layout): (&Limits, Layout),
) -> Space {
    let width = micro.nr();
    let (columns, steps) = (n.saturating_add(width), k.min(limits.kc));
    // In place of a left operand, a micro-panel is no more memory.
    let rows_ahead = match layout.left_stays {
        true => width,
        false => AHEAD_ROWS_MIN,
    };
    let copies_ahead = limits.is_fastest() && m >= rows_ahead;
    let block = |rows: usize, left: usize, acc: usize| Space {
        left: match layout.left_stays {
            true => 0,
            false => rows
                .saturating_mul(k)
                .min(left.max(rows.saturating_mul(steps))),
        },
        micro_panel: steps * width * if copies_ahead { 2 } else { 1 },
        acc: rows
            .saturating_mul(columns)
            .min(acc.max(rows.saturating_mul(width))),
        ..Space::default()
    };
    if layout.swaps {
        let nc = swapped_columns([n, k], micro);
        let mc = swapped_rows([m, n], nc, threads).next_multiple_of(micro.lanes);
        return Space {
            right: nc.saturating_mul(k),
            // Fewer columns make no higher blocks beyond the limit.
            acc: limits.acc(true).max(micro.lanes * nc).min(mc * nc),
            ..Space::default()
        };
    }
    let (rows, k_blocks) = (m.min(limits.mc), whole.div_ceil(KC));
    if layout.sums_stay {
        return Space {
            acc: 0,
            ..block(rows, limits.left, 0)
        };
    }
    let resident = layout.left_stays || limits.resident(rows, k);
    let mut space = block(rows, limits.left, limits.acc(resident));
    if splits(blocks, k_blocks) > 1 {
        let rows = m.min(MC);
        space = space.max(&block(rows, 0, rows * SPLIT_NC));
        // These sums pass from slice to slice.
        space.shared = if k < whole {
            0
        } else {
            partial_space(m, n, blocks, k_blocks, micro)
        };
    } else {
        // Threads share the result in blocks that may be smaller than the limit.
        let blocking = blocking([m, n, k], groups, 1, threads, micro, (limits, layout));
        let block = blocking.mc.saturating_mul(blocking.nc);
        space.acc = space.acc.min(block.max(rows.saturating_mul(width)));
    }
    if k_blocks > 1 && limits.kc < KC {
        space.k_block = space.acc;
    }
    space
}
