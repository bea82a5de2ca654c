//! Loops with reductions.
//!
//! A *row* is a point of the kept axes; a *team* of threads computes it, in one pass over the
//! reduced axes for each level of its reductions ([`levels`]). Where the reduced axes are
//! contiguous in memory, the threads of a team are neighbours: some lanes of a warp, or a whole
//! block for long rows. Where the kept axes are contiguous, neighbouring threads belong to
//! neighbouring rows. Values that later passes use stay in registers or shared memory if they fit,
//! otherwise they are recomputed.
//!
//! If there are few long rows, they are split into parts, one block per part, which writes partial
//! results to the workspace; the last block of a row combines them. The split depends only on the
//! bounds and the target, and partial results are combined in a fixed order, so the same sizes give
//! the same bits.

mod emit;
mod levels;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Inst, Spec, SpecError};

use self::emit::{Emitter, Joins, Part};
use self::levels::Levels;
use super::SharedLoop;
use super::THREADS;
use super::params::Params;
use super::space::{Space, memory_order, points, touched, vector_width};
use crate::abi::{Dispatch, Target};
use crate::code::{Code, Fold};
use crate::lowered::Lowered;

/// Longer rows use a block each; shorter rows use no more than a warp.
const WARP_ROW: i64 = 1024;
/// The least number of points per thread of a row's part: where rows are contiguous in memory, and
/// where they are not.
const PART: [i64; 2] = [8, 16];
/// Shorter contiguous rows are not split: a block reads one in less time than its parts would take
/// to find out which is the last, and that one to combine them.
const CUT: i64 = 16_384;
/// Most parts of a row: as many as one warp combines in a few iterations.
const PARTS: i64 = 1024;
/// Most values a thread keeps in registers between passes, by threads of its block.
const KEPT: [(u32, i64); 3] = [(256, 64), (512, 40), (1024, 16)];

/// The storage of values that are live across passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    /// None: they are recomputed.
    Recompute,
    /// Registers, so many per thread.
    Registers(i64),
    /// Shared memory, in arrays of so many elements.
    Shared(i64),
}

/// The assignment of rows to threads.
#[derive(Clone, Debug)]
struct Mapping {
    /// Threads of a block.
    threads: u32,
    /// Threads per row.
    team: u32,
    /// Lanes of a wave.
    wave: u32,
    /// Whether the threads of a team are neighbours (otherwise neighbours are rows).
    adjacent: bool,
    /// Neighbouring elements that a thread processes as a vector.
    vector: i64,
    /// Iterations of the team over a row or its part.
    turns: i64,
    keep: Keep,
    /// Parts of a row, if rows are split.
    parts: i64,
}

impl Mapping {
    /// Rows that a block computes concurrently.
    fn rows(&self) -> u32 {
        self.threads / self.team
    }
}

/// A spec's rows, and their assignment to threads.
struct RowPlan<'a> {
    code: Code<'a>,
    /// The axes of the spec that have more than one point, in the order of iteration.
    order: Vec<usize>,
    levels: Levels,
    space: Space,
    kept: usize,
    mapping: Mapping,
}

impl<'a> RowPlan<'a> {
    fn new(spec: &'a Spec, bounds: &Env, target: &Target) -> Result<RowPlan<'a>, SpecError> {
        let code = Code::new(spec)?;
        let finds = code.needed().any(|i| matches!(&spec.code[i], Inst::Reduce(op, a) if Fold::new(*op, code.lane(*a)).finds()));
        let reduced_points = points(&spec.dims[spec.dims.len() - spec.reduced..], bounds);
        if finds && reduced_points >= i64::from(i32::MAX) {
            return Err(SpecError::unsupported(format!(
                "a position among {reduced_points} elements does not fit in an i32"
            )));
        }
        let (space, kept, order) = ordered(&code, bounds, finds);
        let levels = Levels::new(&code);
        let mapping = mapping(&code, &levels, &space, kept, bounds, target);
        Ok(RowPlan {
            code,
            order,
            levels,
            space,
            kept,
            mapping,
        })
    }

    fn emitter(&self) -> Emitter<'_> {
        Emitter {
            code: &self.code,
            levels: &self.levels,
            space: &self.space,
            kept: self.kept,
            mapping: &self.mapping,
        }
    }

    /// The number of blocks over which whole rows are distributed.
    fn blocks(&self, target: &Target) -> impl Fn(&Env) -> u32 + Send + Sync + 'static {
        let (rows, each, target) = (
            self.space.dims[..self.kept].to_vec(),
            self.mapping.rows(),
            *target,
        );
        move |env| super::elementwise::blocks(points(&rows, env), each, &target)
    }
}

pub fn lower(spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    if spec.stores.is_empty() {
        return Ok(Lowered::new(vec![], 0, |_| vec![]));
    }
    let plan = RowPlan::new(spec, bounds, target)?;
    let mut params = Params::new(spec, bounds, target);
    if plan.mapping.parts > 1 {
        let rows = plan.space.dims[..plan.kept].to_vec();
        return Ok(split(&plan.emitter(), params, points(&rows, bounds), rows));
    }
    let function = plan.emitter().whole(&mut params);
    let (threads, shared_bytes, blocks) = (
        plan.mapping.threads,
        plan.emitter().shared_bytes(),
        plan.blocks(target),
    );
    Ok(Lowered::new(vec![function], 0, move |env| {
        vec![Dispatch {
            shared_bytes,
            ..Dispatch::new(0, blocks(env), threads, params.words(env))
        }]
    }))
}

/// The row loop as a function that several specs may share; `None` if rows are split.
pub fn lower_shared(
    spec: &Spec,
    bounds: &Env,
    target: &Target,
) -> Result<Option<SharedLoop>, SpecError> {
    let plan = RowPlan::new(spec, bounds, target)?;
    if plan.mapping.parts > 1 {
        return Ok(None);
    }
    let mut params = Params::new(spec, bounds, target).shared();
    let function = plan.emitter().whole(&mut params);
    let (threads, shared_bytes, blocks) = (
        plan.mapping.threads,
        plan.emitter().shared_bytes(),
        Box::new(plan.blocks(target)),
    );
    Ok(Some(SharedLoop {
        function,
        params,
        threads,
        shared_bytes,
        blocks,
    }))
}

/// Whether two loops over the same space compute their common reductions in the same order for all
/// sizes of a run, so that the results have the same bits.
///
/// # Errors
/// If one of them cannot be lowered.
pub fn has_same_sums(a: &Spec, b: &Spec, bounds: &Env, target: &Target) -> Result<bool, SpecError> {
    if a.body != Body::Loop || b.body != Body::Loop || a.dims != b.dims || a.reduced != b.reduced {
        return Ok(false);
    }
    let folds = |spec| {
        let RowPlan { order, mapping, .. } = RowPlan::new(spec, bounds, target)?;
        let reduced = order
            .into_iter()
            .filter(|&axis| axis >= spec.dims.len() - spec.reduced);
        Ok((
            reduced.collect::<Vec<_>>(),
            [mapping.threads, mapping.team],
            mapping.adjacent,
            [mapping.vector, mapping.parts],
        ))
    };
    Ok(folds(a)? == folds(b)?)
}

/// The space with its axes in memory order and merged, the number of its kept axes (at least one
/// axis of each kind), and that order.
fn ordered(code: &Code, bounds: &Env, finds: bool) -> (Space, usize, Vec<usize>) {
    let spec = code.spec;
    let (axes, kept) = (spec.dims.len(), spec.dims.len() - spec.reduced);
    let mut space = Space::new(spec);
    let mut order: Vec<usize> = (0..axes).collect();
    // Reductions read more than they write, so the operand that varies most determines the order.
    let varied = |k: &u16| {
        let along = spec
            .dims
            .iter()
            .zip(&spec.operands[usize::from(*k)].strides)
            .filter(|(_, s)| !s.is(0));
        along.fold(1i64, |p, (d, _)| p.saturating_mul(d.at(bounds)))
    };
    if let Some(guide) = code.loads().into_iter().max_by_key(varied) {
        let strides = &spec.operands[usize::from(guide)].strides;
        order = memory_order(strides, 0, kept, bounds);
        // Positions are counted in the order of the axes.
        order.extend(if finds {
            (kept..axes).collect()
        } else {
            memory_order(strides, kept, axes, bounds)
        });
        space.permute(&order);
    }
    order.retain(|&axis| !spec.dims[axis].is(1));
    let left = space.merge(0, kept);
    let reduced = space.merge(left, space.dims.len());
    if reduced == 0 {
        space.insert(left);
    }
    if left == 0 {
        space.insert(0);
    }
    (space, left.max(1), order)
}

/// Whether most of the memory is contiguous along the reduced axes.
fn runs_along_rows(code: &Code, space: &Space, kept: usize, bounds: &Env) -> bool {
    let (kept_axis, reduced_axis) = (kept - 1, space.dims.len() - 1);
    if space.dims[kept_axis].is(1) {
        return true;
    }
    let mut votes = 0;
    for k in code
        .loads()
        .into_iter()
        .chain(code.spec.stores.iter().map(|s| s.operand))
    {
        let (row, along) = (
            space.stride(k, kept_axis).at(bounds),
            space.stride(k, reduced_axis).at(bounds),
        );
        // An operand that is invariant along one of the axes is little memory, and has little
        // weight.
        let weight = if row == 0 || along == 0 { 1 } else { 16 };
        votes += match (row, along) {
            (_, 1) => weight,
            (1, _) => -weight,
            _ => 0,
        };
    }
    votes >= 0
}

fn power_of_two(n: i64, most: u32) -> u32 {
    u32::try_from(n.max(1))
        .unwrap_or(most)
        .checked_next_power_of_two()
        .unwrap_or(most)
        .min(most)
}

fn mapping(
    code: &Code,
    levels: &Levels,
    space: &Space,
    kept: usize,
    bounds: &Env,
    target: &Target,
) -> Mapping {
    let (rows, len) = (
        points(&space.dims[..kept], bounds),
        points(&space.dims[kept..], bounds),
    );
    let adjacent = runs_along_rows(code, space, kept, bounds);
    let multiprocessors = i64::from(target.multiprocessors.max(1));
    let wave = target.wave_width;
    let (mut threads, mut team) = (THREADS, 0);
    if adjacent {
        // The warps that rows alone would fill, compared with the device's capacity.
        let few = rows < 8 * multiprocessors;
        if len <= WARP_ROW && !(few && len > 256) {
            team = power_of_two(len, wave);
        } else {
            threads = if len <= 4096 {
                256
            } else if len <= 8192 {
                512
            } else {
                1024
            };
            // About one row per multiprocessor: more threads, each with at least one vector.
            while threads < 1024
                && rows.saturating_mul(threads.into()) < 1024 * multiprocessors
                && len >= 8 * i64::from(threads)
            {
                threads *= 2;
            }
            team = threads;
        }
    } else {
        // At least a warp of neighbouring rows, if there are so many.
        team = power_of_two(len.saturating_add(3) / 4, 8).max(team);
        while i64::from(threads / team) > rows && team < wave {
            team *= 2;
        }
    }
    let groups = rows.max(1).div_euclid(i64::from(threads / team)).max(1);
    let mut parts = 1;
    // A row is split where blocks are too few and each part has enough points.
    let (part, least) = match adjacent {
        true => (PART[0] * i64::from(THREADS), CUT),
        false => (PART[1] * i64::from(team), 2 * PART[1] * i64::from(team)),
    };
    if groups < 2 * multiprocessors && len >= least {
        parts = (4 * multiprocessors / groups)
            .min(len / part)
            .clamp(1, PARTS);
        if parts > 1 && adjacent {
            (threads, team) = (THREADS, THREADS);
        }
    }
    let crossing = levels.crossing.iter().filter(|c| **c).count() as i64;
    let vector = match adjacent {
        true if len >= 4 * i64::from(team) => {
            vector_width(space, &touched(code), space.dims.len() - 1, false).min(8)
        }
        _ => 1,
    };
    let each = (len.max(1) as u64).div_ceil(team as u64 * vector as u64) as i64 * vector;
    let turns = (each / vector + parts - 1) / parts;
    let registers = KEPT
        .iter()
        .find(|(t, _)| threads <= *t)
        .map_or(0, |(_, n)| *n);
    let shared = len.saturating_mul(crossing).saturating_mul(4);
    let keep = if crossing == 0 || parts > 1 {
        Keep::Recompute
    } else if each.saturating_mul(crossing) <= registers {
        Keep::Registers(each)
    } else if adjacent && team == threads && shared <= i64::from(target.shared_bytes_max) - 4096 {
        Keep::Shared(len)
    } else {
        Keep::Recompute
    };
    Mapping {
        threads,
        team,
        wave,
        adjacent,
        vector,
        turns,
        keep,
        parts,
    }
}

/// Rows that are split into parts: a kernel for each pass.
fn split(emitter: &Emitter, params: Params, row_bound: i64, rows: Vec<Size>) -> Lowered {
    let mapping = emitter.mapping;
    let (threads, each, parts) = (mapping.threads, u64::from(mapping.rows()), mapping.parts);
    let groups = move |rows: i64| (rows as u64).div_ceil(each);
    let part = Part::new(emitter, row_bound);
    let passes = emitter.levels.passes(emitter.code);
    let last = passes.last().copied().unwrap_or(0);
    let (mut functions, mut words) = (Vec::new(), Vec::new());
    for &l in &passes {
        let folds = emitter.levels.folds(emitter.code, l).next().is_some();
        let joins = match l == last {
            true if emitter.stores_folded() => Joins::Stores,
            false if folds => Joins::Results,
            _ => Joins::Nothing,
        };
        let mut own = params.clone();
        functions.push(emitter.part(&mut own, l, joins, &part));
        words.push(own);
    }
    let lowered = Lowered::new(functions, part.bytes(), move |env| {
        let blocks = groups(points(&rows, env)) * parts as u64;
        let dispatch = |(function, params): (usize, &Params)| {
            Dispatch::new(function, blocks as u32, threads, params.words(env))
        };
        words.iter().enumerate().map(dispatch).collect()
    });
    lowered.with_counters(groups(row_bound) as usize)
}
