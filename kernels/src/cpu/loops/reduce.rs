//! Loops with reductions: rows that are reduced, and possibly read again together with the results.
//!
//! A *group* is a few points of the kept axes whose reductions are computed together, tile after
//! tile over the reduced axes; the program may need several passes over them. Where memory runs
//! along a reduced axis, rows are kept points and columns are reduced (a softmax over the last
//! axis); where it runs along a kept axis, columns are kept points and rows are reduced (the
//! gradient of a bias). Rows shorter than a vector are transposed, and reduced as the latter. If one pass suffices and the reduced axes are long, the tiles of a group are
//! shared by several chunks whose results are merged as a tree: where there are few groups, and
//! where the first reduced axis lies outside of the kept ones, as the batch does in a batch norm.
//! Chunks are numbered part by part, so that a thread reads the examples that it has written in the
//! kernels before.

use std::ops::Range;

use smallvec::SmallVec;

use super::{CHUNK_POINTS_MAX, CHUNK_POINTS_MIN, Loop, chunk};
use crate::cpu::MicroBatchLimits;
use crate::cpu::tile::{AXES, Along, Bound, Machine, TILE, Tile, TileCode, VECTOR};
use crate::cpu::{Launch, SpecError};
use crate::micro_batch::Part;
use crate::size::Env;
use crate::spec::{Inst, ReduceOp, Spec};

/// Columns of a group where columns are kept points.
const GROUP_COLUMNS: usize = 256;
/// Most parts that all groups together are split into, and the fewest groups that are not split.
const PARTS_MAX: usize = 64;
const WHOLE_GROUPS_MIN: usize = 16;
/// Most parts of the first reduced axis where it lies outside of the kept ones, and the fewest
/// points of a group in a part.
const OUTER_PARTS_MAX: usize = 8;
const OUTER_POINTS_MIN: usize = 1 << 12;
/// Lanes that each value kept between passes may take beyond need, so that several points are
/// processed side by side.
const KEPT_LANES: usize = 1 << 14;
/// Rows of fewer elements leave most of the vectors of a reduction along columns empty: several of
/// them are reduced side by side.
const SHORT_ROW: usize = VECTOR;
/// Short rows that are reduced side by side. They are one tile, so that a row has the same bits
/// beside any number of others.
const SHORT_COLUMNS: usize = TILE / SHORT_ROW;
/// The least points of a chunk, times the instructions of the code: some microseconds of work.
const CHUNK_WORK_MIN: usize = 1 << 15;

/// The choices made about a reduction when it is prepared.
pub(super) struct Reduction {
    along: Along,
    /// Whether rows are shorter than [`SHORT_ROW`], and contiguous.
    is_short: bool,
    kept: usize,
    kept_lanes: usize,
    keeps: bool,
    /// Words of all accumulators, if the reduction may be split.
    split_words: usize,
}

/// The partition of a launch into groups and tiles.
struct Cut {
    row: usize,
    col: usize,
    /// The axis, row or column, that is kept, its points in a group and its groups.
    kept_axis: usize,
    group_len: usize,
    groups_across: usize,
    groups: usize,
    /// The axis that is reduced, its points in a tile and its tiles.
    reduced_axis: usize,
    tile_len: usize,
    tiles_across: usize,
    tiles: usize,
    /// The first reduced axis.
    reduced: usize,
}

/// The order in which the points of the reduced axes are combined into one result. The other fields
/// of a [`Cut`] decide only which results are computed together, and when.
#[derive(PartialEq)]
pub(super) struct ReductionOrder {
    along: Along,
    /// Sizes of the reduced axes, in the order of iteration. (They show which neighbours were
    /// joined.)
    dims: SmallVec<[usize; AXES]>,
    tile_len: usize,
    parts: usize,
}

impl Reduction {
    pub fn new(
        spec: &Spec,
        bound: &Env,
        order: &[usize],
        code: &mut TileCode,
    ) -> Result<Reduction, SpecError> {
        let kept = spec.dims.len() - spec.reduced;
        let size = |axis: usize| spec.dims[axis].usize_at(bound);
        let points = order[kept..]
            .iter()
            .fold(1usize, |p, &a| p.saturating_mul(size(a)));
        let finds = spec
            .code
            .iter()
            .any(|i| matches!(i, Inst::Reduce(ReduceOp::ArgMax | ReduceOp::ArgMin, _)));
        if finds && points >= i32::MAX as usize {
            return Err(SpecError::unsupported(format!(
                "a position among {points} elements does not fit in an i32"
            )));
        }
        let contiguous = contiguous_along_kept(spec, bound, order, kept);
        let is_one_axis = order[kept..]
            .iter()
            .filter(|&&axis| size(axis) != 1)
            .count()
            == 1;
        let is_short = contiguous < 0 && is_one_axis && points < SHORT_ROW;
        let along = if is_short || contiguous > 0 || points == 1 {
            Along::Rows
        } else {
            Along::Columns
        };
        let all = order[..kept]
            .iter()
            .fold(points, |p, &a| p.saturating_mul(size(a)));
        let (passes, kept_values) = (
            code.levels().filter(|&full| full).count(),
            code.kept_values(),
        );
        let kept_lanes = match along {
            Along::Columns => {
                let last = order.last().map_or(1, |&axis| size(axis).max(1));
                points
                    .div_ceil(last)
                    .saturating_mul(last.next_multiple_of(VECTOR))
                    .max(code.register())
            }
            Along::Rows if is_short => (points * SHORT_COLUMNS).max(code.register()),
            // A vector for every point of the space holds all columns.
            Along::Rows => points
                .saturating_mul(VECTOR)
                .max(all.saturating_mul(VECTOR).min(KEPT_LANES)),
        };
        if kept_values > 0 {
            if kept_lanes.saturating_mul(kept_values) > isize::MAX as usize / 64 {
                return Err(SpecError::unsupported(format!(
                    "rows of {points} elements cannot be kept"
                )));
            }
            code.keep(kept_lanes);
        }
        let split_words = if passes == 1 && !is_short && all >= 2 * CHUNK_POINTS_MAX {
            code.reduction_words()
        } else {
            0
        };
        Ok(Reduction {
            along,
            is_short,
            kept,
            kept_lanes,
            keeps: kept_values > 0,
            split_words,
        })
    }

    /// Bytes of the results of parts, for all sizes up to the bound.
    pub fn partial_bytes(&self) -> usize {
        PARTS_MAX * self.split_words * GROUP_COLUMNS * 4
    }

    /// The same for a space that has these sizes in every run.
    pub fn partial_bytes_at(&self, bound: &mut Bound) -> usize {
        if bound.dims().contains(&0) {
            return 0;
        }
        let cut = self.cut(bound);
        match self.parts(&cut, bound) {
            1 => 0,
            parts => cut.groups * parts * self.partial_words(&cut) * 4,
        }
    }

    /// The order in which each value is reduced in a space that has these sizes in every run;
    /// `None` if the space has no points.
    pub fn reduction_order(&self, bound: &mut Bound) -> Option<ReductionOrder> {
        if bound.dims().contains(&0) {
            return None;
        }
        let cut = self.cut(bound);
        let parts = self.parts(&cut, bound);
        Some(ReductionOrder {
            along: self.along,
            dims: bound.dims()[cut.reduced..].into(),
            tile_len: cut.tile_len,
            parts,
        })
    }

    /// Where slices of a sum over the batch may end, and the sums, for a space resolved at the
    /// bound; `None` if the sums cannot be continued: tiles do not iterate over the batch
    /// outermost, or other values than sums would have to be kept.
    pub fn micro_batch_limits(
        &self,
        examples: usize,
        bound: &mut Bound,
        code: &TileCode,
    ) -> Option<MicroBatchLimits> {
        let mut levels = code.levels();
        let plain = levels.next() == Some(true)
            && levels.all(|full| !full)
            && !self.keeps
            && code.reduces_independently();
        if !plain || examples < 2 {
            return None;
        }
        let cut = self.cut(bound);
        let unit = cut.unit(self, bound, examples)?;
        let parts = self.parts(&cut, bound);
        Some(MicroBatchLimits {
            unit,
            sums: cut.groups * parts * code.reduction_words() * cut.lanes(self.along),
        })
    }

    /// Words of the results of a part of a group.
    fn partial_words(&self, cut: &Cut) -> usize {
        self.split_words * cut.result_lanes()
    }

    /// Into how many parts the tiles of each group are split.
    fn parts(&self, cut: &Cut, bound: &Bound) -> usize {
        let points: usize = bound.dims().iter().product();
        if self.split_words == 0 {
            return 1;
        }
        if cut.groups >= WHOLE_GROUPS_MIN {
            let outer = match cut.reduced < cut.reduced_axis && self.along == Along::Columns {
                true => bound.dims()[cut.reduced],
                false => 1,
            };
            return OUTER_PARTS_MAX
                .min(outer)
                .min(points / cut.groups / OUTER_POINTS_MIN)
                .min(PARTS_MAX * GROUP_COLUMNS / cut.groups.saturating_mul(cut.result_lanes()))
                .max(1);
        }
        cut.tiles
            .min(PARTS_MAX / cut.groups.max(1))
            .min(points / CHUNK_POINTS_MAX)
            .max(1)
    }

    fn cut(&self, bound: &mut Bound) -> Cut {
        let reduced = bound.collapse(0, self.kept);
        let axes = reduced + bound.collapse(reduced, bound.dims().len());
        let (kept_axis, reduced_axis) = (reduced - 1, axes - 1);
        if self.is_short {
            let longest = (0..reduced).max_by_key(|&axis| bound.dims()[axis]);
            if let Some(longest) = longest.filter(|&axis| {
                let (short, long) = (bound.dims()[kept_axis], bound.dims()[axis]);
                short < SHORT_ROW && long >= 4 * short
            }) {
                bound.swap_axes(longest, kept_axis);
            }
        }
        let dims = bound.dims();
        let (row, col) = match self.along {
            Along::Columns => (kept_axis, reduced_axis),
            Along::Rows => (reduced_axis, kept_axis),
        };
        let outer: usize = dims[reduced..reduced_axis].iter().product();
        let (group_len, tile_len) = match self.along {
            Along::Columns => {
                let wide = dims[col].clamp(1, TILE);
                let kept_per_row = (outer * dims[col].next_multiple_of(VECTOR)).max(1);
                let most = if self.keeps {
                    (self.kept_lanes / kept_per_row).max(1)
                } else {
                    usize::MAX
                };
                (
                    (TILE / wide.next_multiple_of(VECTOR))
                        .min(most)
                        .min(dims[row]),
                    wide,
                )
            }
            Along::Rows => {
                let per_column = (outer * dims[row]).max(1);
                let most = if self.keeps {
                    self.kept_lanes / per_column / VECTOR * VECTOR
                } else {
                    usize::MAX
                };
                let columns = if self.is_short {
                    SHORT_COLUMNS
                } else {
                    GROUP_COLUMNS
                };
                let wide = dims[col].clamp(1, columns).min(most.max(VECTOR));
                (
                    wide,
                    (TILE / wide.next_multiple_of(VECTOR)).min(dims[row]).max(1),
                )
            }
        };
        // An axis without elements has no groups, or no tiles; their width is at least 1 even so.
        let (group_len, tile_len) = (group_len.max(1), tile_len.max(1));
        let groups_across = dims[kept_axis].div_ceil(group_len);
        let tiles_across = dims[reduced_axis].div_ceil(tile_len);
        let groups = dims[..kept_axis].iter().product::<usize>() * groups_across;
        Cut {
            row,
            col,
            kept_axis,
            group_len,
            groups_across,
            groups,
            reduced_axis,
            tile_len,
            tiles_across,
            tiles: outer * tiles_across,
            reduced,
        }
    }
}

/// Partial sums over a batch that pass from slice to slice: the accumulators of each part of each
/// group, before they are finished.
struct Carry {
    /// Examples of the slice, and of the whole.
    examples: Range<usize>,
    whole: usize,
    last: bool,
    sums: *mut u32,
    parts: usize,
    /// Reductions of a group.
    reductions: usize,
}

// SAFETY: workers use the sums of different parts or groups.
unsafe impl Sync for Carry {}

impl Carry {
    fn new(part: &Part, parts: usize, code: &TileCode) -> Self {
        let whole = part.whole.0[usize::from(part.micro_batching.batch.0)] as usize;
        Carry {
            examples: part.examples.clone(),
            whole,
            last: part.last,
            sums: part.sums.cast(),
            parts,
            reductions: code.reduction_words(),
        }
    }
}

impl Cut {
    /// Takes over the tiles of the reduced axes of another launch, which differs only by longer
    /// kept axes.
    fn reduce_as(&mut self, other: &Cut, bound: &Bound) {
        self.tile_len = other.tile_len;
        self.tiles_across = bound.dims()[self.reduced_axis].div_ceil(self.tile_len);
        self.tiles = bound.dims()[self.reduced..self.reduced_axis]
            .iter()
            .product::<usize>()
            * self.tiles_across;
    }

    /// Lanes of a group's results of one reduction.
    fn result_lanes(&self) -> usize {
        self.group_len.next_multiple_of(VECTOR)
    }

    /// Lanes of a group's accumulators of one reduction.
    fn lanes(&self, along: Along) -> usize {
        match along {
            Along::Columns => self.group_len * VECTOR,
            Along::Rows => self.group_len.next_multiple_of(VECTOR),
        }
    }

    /// Examples whose tiles are whole, if the batch is the first of the reduced axes; `None` where
    /// its length may change the tiles.
    fn unit(&self, reduction: &Reduction, bound: &Bound, examples: usize) -> Option<usize> {
        if self.reduced < self.reduced_axis {
            return Some(1);
        }
        if reduction.along == Along::Columns || reduction.is_short {
            return None;
        }
        let rows = bound.dims()[self.reduced_axis] / examples;
        Some(self.tile_len / gcd(self.tile_len, rows.max(1)))
    }

    /// Tiles of the examples before this one, of so many; tiles end there, or there are no more
    /// examples.
    fn tiles_before(&self, example: usize, examples: usize, bound: &Bound) -> usize {
        match example {
            0 => 0,
            _ if example >= examples => self.tiles,
            _ if self.reduced < self.reduced_axis => self.tiles / examples * example,
            _ => bound.dims()[self.reduced_axis] / examples * example / self.tile_len,
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// How much of the memory is contiguous along the kept axes, in operands, if positive, and along the
/// reduced axes if negative.
fn contiguous_along_kept(spec: &Spec, bound: &Env, order: &[usize], kept: usize) -> i64 {
    let last = |axes: &[usize]| {
        axes.iter()
            .rev()
            .copied()
            .find(|&axis| spec.dims[axis].at(bound) != 1)
    };
    let (kept_axis, reduced_axis) = (last(&order[..kept]), last(&order[kept..]));
    let operands = spec
        .operands
        .iter()
        .filter(|o| !o.strides[kept..].iter().all(|s| s.is(0)));
    let votes = operands.map(|operand| {
        let stride = |axis: Option<usize>| {
            axis.map_or(0, |axis| operand.strides[axis].at(bound).unsigned_abs())
        };
        let (k, f) = (stride(kept_axis), stride(reduced_axis));
        // An operand that is uniform along the other axis is little memory, and therefore counts
        // little.
        let weight = if k == 0 || f == 0 { 1 } else { 16 };
        match (k, f) {
            (_, 1) => -weight,
            (1, _) => weight,
            _ => 0,
        }
    });
    votes.sum()
}

impl Loop {
    /// # Safety
    /// See [`Loop::run`].
    pub(super) unsafe fn reduce(&self, reduction: &Reduction, spec: &Spec, launch: &Launch) {
        let mut bound = Bound::new(&self.code);
        bound.resolve(spec, launch, &self.order);
        // Without kept points nothing is stored. Without reduced points each reduction is its
        // identity.
        if self.order[..reduction.kept]
            .iter()
            .any(|&axis| spec.dims[axis].usize_at(launch.env) == 0)
        {
            return;
        }
        let mut cut = reduction.cut(&mut bound);
        let mut parts = reduction.parts(&cut, &bound);
        let bound = &bound;
        let points: usize = bound.dims().iter().product();
        if let Some(part) = launch.part.filter(|part| !part.micro_batching.folds) {
            // Tiles and parts are those of the whole batch, so that a group of a slice is reduced
            // in the same order.
            let mut whole = Bound::new(&self.code);
            whole.resolve(
                spec,
                &Launch {
                    env: part.whole,
                    part: None,
                    ..*launch
                },
                &self.order,
            );
            let whole_cut = reduction.cut(&mut whole);
            parts = reduction.parts(&whole_cut, &whole);
            cut.reduce_as(&whole_cut, bound);
        }
        let carry = launch
            .part
            .filter(|part| part.micro_batching.folds)
            .map(|part| Carry::new(part, parts, &self.code));
        let run = Run {
            bound,
            cut: &cut,
            along: reduction.along,
            code: &self.code,
            carry,
        };
        if let Some(carry) = &run.carry {
            let work = |chunk: usize, worker: usize| {
                // SAFETY: the worker's own scratch memory; parts are disjoint, and so are their
                // sums.
                unsafe {
                    let mut machine =
                        Machine::new(bound, reduction.along, self.scratch(launch, worker));
                    run.go_on(&mut machine, carry, chunk % cut.groups, chunk / cut.groups);
                }
            };
            launch.team.run(cut.groups * parts, &work);
            if !carry.last {
                return;
            }
        }
        if parts == 1 {
            let least = (CHUNK_WORK_MIN / spec.code.len().max(1)).min(CHUNK_POINTS_MIN);
            let per_chunk = (chunk(points, least) / (points / cut.groups).max(1)).max(1);
            let work = |chunk: usize, worker: usize| {
                // SAFETY: the worker's own scratch memory; groups are disjoint.
                unsafe {
                    let mut machine =
                        Machine::new(bound, reduction.along, self.scratch(launch, worker));
                    for group in chunk * per_chunk..cut.groups.min((chunk + 1) * per_chunk) {
                        run.group(&mut machine, group);
                    }
                }
            };
            launch.team.run(cut.groups.div_ceil(per_chunk), &work);
            return;
        }
        let (size, lanes) = (reduction.partial_words(&cut), cut.result_lanes());
        let partial = |group: usize, part: usize| {
            self.scratch(launch, self.threads)
                .wrapping_add((group * parts + part) * size * 4)
                .cast::<u32>()
        };
        let reduce_part = |chunk: usize, worker: usize| {
            let (group, part) = (chunk % cut.groups, chunk / cut.groups);
            // SAFETY: the worker's own scratch memory; parts are disjoint, and so are their
            // results.
            unsafe {
                let mut machine =
                    Machine::new(bound, reduction.along, self.scratch(launch, worker));
                let (at, tile) = run.start(&mut machine, group);
                machine.compute_per_row(0, &tile);
                run.pass(
                    &mut machine,
                    0,
                    at,
                    &tile,
                    (group, part),
                    part * cut.tiles / parts..(part + 1) * cut.tiles / parts,
                );
                machine.exchange(0, &tile, partial(group, part), lanes, true);
            }
        };
        launch.team.run(cut.groups * parts, &reduce_part);
        let merge = |group: usize, worker: usize| {
            // SAFETY: the worker's own scratch memory; groups are disjoint.
            unsafe {
                let mut machine =
                    Machine::new(bound, reduction.along, self.scratch(launch, worker));
                let (_, tile) = run.start(&mut machine, group);
                let mut step = 1;
                while step < parts {
                    for part in (0..parts - step).step_by(2 * step) {
                        machine.merge(
                            0,
                            &tile,
                            partial(group, part),
                            partial(group, part + step),
                            lanes,
                        );
                    }
                    step *= 2;
                }
                machine.compute_per_row(0, &tile);
                machine.exchange(0, &tile, partial(group, 0), lanes, false);
                machine.publish(0, &tile);
                for level in 1..self.code.levels().len() {
                    machine.compute_per_row(level, &tile);
                }
                machine.store_per_row(&tile);
            }
        };
        launch.team.run(cut.groups, &merge);
    }
}

/// The state of one launch that its threads share.
struct Run<'a> {
    bound: &'a Bound<'a>,
    cut: &'a Cut,
    along: Along,
    code: &'a TileCode,
    carry: Option<Carry>,
}

impl Run<'_> {
    fn tile(&self, kept: usize, reduced: usize) -> Tile {
        match self.along {
            Along::Columns => Tile::new(kept, reduced),
            Along::Rows => Tile::new(reduced, kept),
        }
    }

    /// Moves the machine to a group; returns the group's coordinates and its tile of kept points.
    fn start(&self, machine: &mut Machine, group: usize) -> ([usize; AXES], Tile) {
        let (cut, dims) = (self.cut, self.bound.dims());
        let mut at = [0; AXES];
        at[cut.kept_axis] = group % cut.groups_across * cut.group_len;
        let mut rest = group / cut.groups_across;
        for axis in (0..cut.kept_axis).rev() {
            at[axis] = rest % dims[axis];
            rest /= dims[axis];
        }
        machine.seek(&at[..dims.len()], Some(cut.row), Some(cut.col));
        (
            at,
            self.tile(
                cut.group_len.min(dims[cut.kept_axis] - at[cut.kept_axis]),
                1,
            ),
        )
    }

    /// # Safety
    /// No other thread may touch the group, or the machine's scratch memory.
    unsafe fn group(&self, machine: &mut Machine, group: usize) {
        let (at, tile) = self.start(machine, group);
        // SAFETY: the caller's promise.
        unsafe {
            for (level, full) in self.code.levels().enumerate() {
                machine.compute_per_row(level, &tile);
                if full {
                    self.pass(machine, level, at, &tile, (group, 0), 0..self.cut.tiles);
                    machine.publish(level, &tile);
                }
            }
            machine.store_per_row(&tile);
        }
    }

    /// One pass over some tiles of the group at `at`, and the end of its reductions; only the
    /// latter after the last slice of a batch. The machine is left at the group.
    ///
    /// # Safety
    /// See [`Run::group`].
    unsafe fn pass(
        &self,
        machine: &mut Machine,
        level: usize,
        at: [usize; AXES],
        tile: &Tile,
        (group, part): (usize, usize),
        tiles: Range<usize>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(carry) = &self.carry {
                machine.carry(
                    level,
                    tile,
                    self.sums(carry, group, part),
                    self.cut.lanes(self.along),
                    false,
                );
                machine.finish(level, tile);
                return;
            }
            machine.clear(level, tile);
            self.tiles(machine, level, at, tiles);
            machine.finish(level, tile);
            self.home(machine, at);
        }
    }

    /// Moves the machine back to the group at `at` after some of its tiles.
    fn home(&self, machine: &mut Machine, mut at: [usize; AXES]) {
        let axes = self.bound.dims().len();
        if self.cut.tiles > 1 {
            at[self.cut.reduced..axes].fill(0);
            machine.seek(&at[..axes], Some(self.cut.row), Some(self.cut.col));
        }
    }

    /// The accumulators of a part of a group between slices.
    fn sums(&self, carry: &Carry, group: usize, part: usize) -> *mut u32 {
        carry.sums.wrapping_add(
            (group * carry.parts + part) * carry.reductions * self.cut.lanes(self.along),
        )
    }

    /// Adds the tiles that a slice has of a part of a group to its sums.
    ///
    /// # Safety
    /// As for [`Run::group`], and for the part's sums.
    unsafe fn go_on(&self, machine: &mut Machine, carry: &Carry, group: usize, part: usize) {
        let (tiles, lanes, sums) = (
            self.cut.tiles,
            self.cut.lanes(self.along),
            self.sums(carry, group, part),
        );
        let before = |example| self.cut.tiles_before(example, carry.whole, self.bound);
        let from = before(carry.examples.start).max(part * tiles / carry.parts);
        let to = before(carry.examples.end).min((part + 1) * tiles / carry.parts);
        let first = carry.examples.start == 0;
        if from >= to && !first {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let (at, tile) = self.start(machine, group);
            machine.compute_per_row(0, &tile);
            if first {
                machine.clear(0, &tile);
            } else {
                machine.carry(0, &tile, sums, lanes, false);
            }
            self.tiles(machine, 0, at, from..to);
            machine.carry(0, &tile, sums, lanes, true);
        }
    }

    /// Reduces some tiles of the group at `at` into the accumulators of a level.
    ///
    /// # Safety
    /// See [`Run::group`].
    unsafe fn tiles(
        &self,
        machine: &mut Machine,
        level: usize,
        mut at: [usize; AXES],
        tiles: Range<usize>,
    ) {
        let (cut, dims) = (self.cut, self.bound.dims());
        // SAFETY: the caller's promise; tiles lie inside the space.
        unsafe {
            for index in tiles {
                let first = index % cut.tiles_across * cut.tile_len;
                let outer = index / cut.tiles_across;
                at[cut.reduced_axis] = first;
                let mut rest = outer;
                for axis in (cut.reduced..cut.reduced_axis).rev() {
                    at[axis] = rest % dims[axis];
                    rest /= dims[axis];
                }
                if cut.tiles > 1 {
                    machine.seek(&at[..dims.len()], Some(cut.row), Some(cut.col));
                }
                let len = dims[cut.reduced_axis];
                let kept_at = match self.along {
                    Along::Columns => {
                        (outer * len.next_multiple_of(VECTOR) + first) * cut.group_len
                    }
                    Along::Rows => (outer * len + first) * cut.group_len.next_multiple_of(VECTOR),
                };
                let kept = cut.group_len.min(dims[cut.kept_axis] - at[cut.kept_axis]);
                let tile = self
                    .tile(kept, cut.tile_len.min(len - first))
                    .reducing(outer * len + first, kept_at);
                machine.compute_per_element(level, &tile);
                machine.store_per_element(level, &tile);
            }
        }
    }
}
