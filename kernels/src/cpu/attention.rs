//! Attention of queries to keys and values, whose scores exist for a few queries at a time, as in
//! Dao et al., "FlashAttention" (2022).
//!
//! The queries of a head are taken in *panels* of as many as a micro-kernel has columns. For a panel
//! all of its visible scores are computed, keys along rows and queries along the lanes of vectors,
//! so that a softmax is a reduction of whole vectors, and that neither keys nor values are packed:
//! `Sᵀ = K·Qᵀ`, then `Yᵀ = Vᵀ·Pᵀ`. Micro-panels of keys that no query of the panel sees are left
//! out. A head, or some panels of it, are computed by one thread, so that the number of threads
//! changes no bit.

mod grad;
mod rows;
mod softmax;

pub(crate) use grad::AttentionGrad;

use std::ops::Range;

use super::gemm::KC;
use super::gemm::drive::SERIAL_WORK;
use super::gemm::micro::{Before, Left, Micro, Right};
use super::gemm::pack::Source;
use super::pointwise::{OperandView, Scratch, Space, aligned, check_rank};
use super::{Config, Launch, SpecError};
use crate::size::{Env, Size};
use crate::spec::{self, Body, Operand, Scores, Spec};
use rows::{Rows, is_contiguous};
use softmax::{Exponentials, Quotients, Routines};

/// Tasks for each thread, if heads are split among threads.
const TASKS: usize = 4;
/// Most rows of a micro-kernel of any instruction set.
const ROWS: usize = 16;
/// Elements of rows whose columns are summed at a time: they stay in L1, where every micro-kernel reads
/// a part of each row.
const BLOCK: usize = 4 << 10;
/// 0, 1, …: the offsets of steps or rows that are neighbours.
static COUNTS: [i32; KC] = {
    let (mut counts, mut i) = ([0; KC], 0);
    while i < KC {
        counts[i] = i as i32;
        i += 1;
    }
    counts
};

/// See [`Body::Attention`].
pub(crate) struct Attention {
    shared: Shared,
}

/// What attention and its gradient have in common.
struct Shared {
    micro: &'static Micro,
    routines: Routines,
    threads: usize,
    /// Bytes of a worker.
    bytes: usize,
}

/// The sizes of a launch.
#[derive(Clone, Copy)]
struct Sizes {
    queries: usize,
    keys: usize,
    /// Of queries and keys.
    width: usize,
    /// Of values.
    columns: usize,
}

impl Sizes {
    /// Multiply-adds of one product of all pairs.
    fn work(&self, heads: usize) -> usize {
        [self.keys, self.width.max(self.columns), heads]
            .into_iter()
            .fold(self.queries, usize::saturating_mul)
    }
}

/// Takes parts of a worker's memory, one behind the other; without memory it counts them.
struct Parts {
    at: *mut u8,
    bytes: usize,
}

impl Parts {
    fn counting() -> Parts {
        Parts::of(std::ptr::null_mut())
    }

    fn of(at: *mut u8) -> Parts {
        Parts { at, bytes: 0 }
    }

    /// Room for so many elements of f32.
    fn floats(&mut self, count: usize) -> *mut f32 {
        let at = self.at.wrapping_add(self.bytes).cast();
        let bytes = count
            .saturating_mul(size_of::<f32>())
            .min(isize::MAX as usize / 64);
        self.bytes = self.bytes.saturating_add(aligned(bytes));
        at
    }
}

impl Shared {
    fn new(
        bound: &Env,
        spec: &Spec,
        config: &Config,
        parts: impl FnOnce(&Micro, &Env) -> Parts,
    ) -> Result<Shared, SpecError> {
        check_rank(&spec.dims, 2)?;
        let micro = Micro::of(config.isa);
        let threads = config.threads.max(1);
        let bytes = parts(micro, bound).bytes;
        // Offsets into a worker's memory are of 32 bits.
        if bytes > i32::MAX as usize || bytes.saturating_mul(threads) > isize::MAX as usize / 64 {
            return Err(SpecError::unsupported(format!(
                "attention that needs {bytes} bytes of each thread, more than 2 GiB"
            )));
        }
        Ok(Shared {
            micro,
            routines: Routines::new(config.isa),
            threads,
            bytes,
        })
    }

    fn workspace(&self) -> u64 {
        (self.bytes * self.threads) as u64
    }

    /// Runs tasks with the memory of a worker each, all by the calling thread if there is little
    /// work.
    fn tasks(
        &self,
        launch: &Launch,
        count: usize,
        work: usize,
        task: impl Fn(usize, *mut u8) + Sync,
    ) {
        let scratch = Scratch::new(launch, self.bytes);
        if work < SERIAL_WORK {
            return (0..count).for_each(|number| task(number, scratch.of(0)));
        }
        launch
            .team
            .run(count, &|number, worker| task(number, scratch.of(worker)));
    }
}

/// The micro-kernels of products with a panel of queries.
#[derive(Clone, Copy)]
struct Panels {
    micro: &'static Micro,
    /// Elements between the vectors of two steps of a panel.
    width: usize,
}

/// A left operand: rows of `width` elements, `stride` apart.
#[derive(Clone, Copy)]
struct Matrix {
    at: *const f32,
    stride: usize,
    width: usize,
}

impl Panels {
    fn new(micro: &'static Micro, width: usize) -> Panels {
        Panels { micro, width }
    }

    /// `to[r] = Σ_c rows(r, c) · right(c)` for rows r of a range: vectors of a panel of queries.
    ///
    /// # Safety
    /// The rows and `rows.width` steps of the right panel may be read, and as many vectors as there
    /// are rows written.
    unsafe fn rows(&self, rows: Matrix, range: Range<usize>, right: *const f32, to: *mut f32) {
        let height = self.micro.mr;
        let mut offsets = [0; ROWS];
        for (i, offset) in offsets.iter_mut().enumerate().take(height) {
            *offset = (i * rows.stride) as i32;
        }
        for row in range.clone().step_by(height) {
            let count = height.min(range.end - row);
            let to = to.wrapping_add((row - range.start) * self.width);
            for first in (0..rows.width.max(1)).step_by(KC) {
                let steps = KC.min(rows.width - first);
                let left = Left {
                    base: rows.at.wrapping_add(row * rows.stride + first),
                    rows: offsets.as_ptr(),
                    steps: COUNTS.as_ptr(),
                };
                let right = Right::packed(right.wrapping_add(first * self.width), self.width);
                let before = if first == 0 {
                    Before::Nothing
                } else {
                    Before::Term
                };
                let kernel = self.micro.kernel(true, count, &right, self.width);
                // SAFETY: the caller's promise; the tables cover these rows and steps.
                unsafe { kernel(steps, left, right, to, self.width, before) };
            }
        }
    }

    /// `to[c] = Σ_r rows(r, c) · right(r)` for rows r of a range: a vector of a panel of queries for
    /// each column. `right` is that of the first row.
    ///
    /// # Safety
    /// As [`Panels::rows`].
    unsafe fn columns(&self, rows: Matrix, range: Range<usize>, right: *const f32, to: *mut f32) {
        let height = self.micro.mr;
        let block = (BLOCK / rows.width.max(1)).clamp(1, KC);
        let mut steps = [0; KC];
        for (i, step) in steps.iter_mut().enumerate().take(block) {
            *step = (i * rows.stride) as i32;
        }
        // (Without rows the sums are 0.)
        for first in range
            .clone()
            .step_by(block)
            .chain(range.is_empty().then_some(range.start))
        {
            let count = block.min(range.end - first);
            let before = if first == range.start {
                Before::Nothing
            } else {
                Before::Term
            };
            let right = Right::packed(
                right.wrapping_add((first - range.start) * self.width),
                self.width,
            );
            for column in (0..rows.width).step_by(height) {
                let columns = height.min(rows.width - column);
                let left = Left {
                    base: rows.at.wrapping_add(first * rows.stride + column),
                    rows: COUNTS.as_ptr(),
                    steps: steps.as_ptr(),
                };
                let to = to.wrapping_add(column * self.width);
                let kernel = self.micro.kernel(true, columns, &right, self.width);
                // SAFETY: the caller's promise; the tables cover these rows and steps.
                unsafe { kernel(count, left, right, to, self.width, before) };
            }
        }
    }

    /// Packs rows as the lanes of a panel: a vector for each element of a row; zeros in the lanes
    /// behind the last row.
    ///
    /// # Safety
    /// The rows may be read, and a vector for each of their elements written.
    unsafe fn pack(&self, rows: &Rows, range: Range<usize>, to: *mut f32) {
        let from = Source {
            at: rows.at(range.start),
            stride: rows.stride,
            step: rows.step,
        };
        // SAFETY: the caller's promise.
        unsafe { (self.micro.pack)(from, range.len(), rows.width, to, self.width) };
    }

    /// Writes the lanes of a panel as rows: the inverse of [`Panels::pack`], by way of as many
    /// elements.
    ///
    /// # Safety
    /// As [`Panels::pack`], and the rows may be written.
    unsafe fn unpack(&self, from: *const f32, rows: &Rows, range: Range<usize>, by: *mut f32) {
        let panel = Source {
            at: from,
            stride: self.width as isize,
            step: 1,
        };
        // SAFETY: the caller's promise.
        unsafe {
            (self.micro.pack)(panel, rows.width, range.len(), by, rows.width);
            for (i, row) in range.enumerate() {
                rows.write(row, by.wrapping_add(i * rows.width));
            }
        }
    }
}

impl Attention {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        let Body::Attention(body) = &spec.body else {
            unreachable!("prepared by its body")
        };
        let shared = Shared::new(bound, spec, config, |micro, env| {
            let mut parts = Parts::counting();
            Memory::new(body, spec, &sizes(body, spec, env), micro.nr(), &mut parts);
            parts
        })?;
        Ok(Attention { shared })
    }

    pub fn workspace(&self) -> u64 {
        self.shared.workspace()
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::Attention(body) = &spec.body else {
            unreachable!("checked by new")
        };
        let (env, shared) = (launch.env, &self.shared);
        let rank = spec.dims.len();
        let heads = Space::new(&spec.dims[..rank - 2], env);
        let sizes = sizes(body, spec, env);
        if sizes.queries == 0 || sizes.columns == 0 {
            return;
        }
        let view = |i: usize, operand: &Operand| OperandView::new(operand, launch.args[i], env);
        let views = [
            view(0, &body.q),
            view(1, &body.k),
            view(2, &body.v),
            view(3, &body.result),
        ];
        let (micro, count) = (shared.micro, heads.points());
        let panels = sizes.queries.div_ceil(micro.nr());
        // Every task of a head copies its keys and values.
        let split = match count >= 2 * shared.threads {
            true => 1,
            false => (TASKS * shared.threads).div_ceil(count.max(1)).min(panels),
        };
        let task = |number: usize, memory: *mut u8| {
            let at = heads.point(number / split);
            let rows = |i: usize, width: usize| Rows::new(&views[i], &at, rank - 2, width);
            let memory = Memory::new(body, spec, &sizes, micro.nr(), &mut Parts::of(memory));
            let head = Head {
                shared,
                scores: body.scores,
                sizes,
                q: rows(0, sizes.width),
                y: rows(3, sizes.columns),
            };
            // SAFETY: the operands may be read, and the rows of the result are this task's own.
            unsafe {
                let k = rows(1, sizes.width).matrix(sizes.keys, memory.k);
                let v = rows(2, sizes.columns).matrix(sizes.keys, memory.v);
                for panel in (number % split..panels).step_by(split) {
                    head.panel(panel, k, v, &memory);
                }
            }
        };
        shared.tasks(launch, count * split, sizes.work(count), task);
    }
}

fn sizes(body: &spec::Attention, spec: &Spec, env: &Env) -> Sizes {
    let [.., queries, columns] = spec.dims.as_slice() else {
        unreachable!("of two axes at least")
    };
    Sizes {
        queries: queries.usize_at(env),
        keys: body.keys.usize_at(env),
        width: body.width.usize_at(env),
        columns: columns.usize_at(env),
    }
}

/// The parts of a worker's memory.
struct Memory {
    /// Keys and values, where they are copied.
    k: Option<*mut f32>,
    v: Option<*mut f32>,
    /// A panel of queries, and of results.
    q: *mut f32,
    y: *mut f32,
    /// The results of a panel by rows.
    rows: *mut f32,
    scores: *mut f32,
}

impl Memory {
    fn new(
        body: &spec::Attention,
        spec: &Spec,
        sizes: &Sizes,
        panel: usize,
        parts: &mut Parts,
    ) -> Memory {
        let of = |a: usize, b: usize| a.saturating_mul(b);
        let mut copy = |operand: &Operand, width: Size, columns| {
            (!is_contiguous(operand, width)).then(|| parts.floats(of(sizes.keys, columns)))
        };
        let k = copy(&body.k, body.width, sizes.width);
        let v = copy(&body.v, spec.dims[spec.dims.len() - 1], sizes.columns);
        Memory {
            k,
            v,
            q: parts.floats(of(panel, sizes.width)),
            y: parts.floats(of(panel, sizes.columns)),
            rows: parts.floats(of(panel, sizes.columns)),
            scores: parts.floats(of(panel, sizes.keys)),
        }
    }
}

/// A head under way.
struct Head<'a> {
    shared: &'a Shared,
    scores: Scores,
    sizes: Sizes,
    q: Rows,
    y: Rows,
}

impl Head<'_> {
    /// The results of a panel of queries.
    ///
    /// # Safety
    /// The operands may be read, the rows of the result written, and the memory is the caller's.
    unsafe fn panel(&self, number: usize, k: Matrix, v: Matrix, memory: &Memory) {
        let (micro, sizes) = (self.shared.micro, &self.sizes);
        let first = number * micro.nr();
        let queries = first..sizes.queries.min(first + micro.nr());
        let panels = Panels::new(micro, micro.width(queries.len()));
        let seen = self.scores.visible_to(queries.clone(), sizes.keys);
        let mut sums = [0.0; softmax::LANES];
        // SAFETY: the caller's promise; the memory has room for the panel.
        unsafe {
            panels.pack(&self.q, queries.clone(), memory.q);
            self.q
                .request(queries.end..sizes.queries.min(queries.end + micro.nr()));
            panels.rows(k, seen.clone(), memory.q, memory.scores);
            (self.shared.routines.exponentials)(&Exponentials {
                at: memory.scores,
                width: panels.width,
                queries: queries.clone(),
                keys: sizes.keys,
                seen: seen.clone(),
                scores: self.scores,
                sums: sums.as_mut_ptr(),
            });
            panels.columns(v, seen, memory.scores, memory.y);
            (self.shared.routines.quotients)(&Quotients {
                at: memory.y,
                width: panels.width,
                count: sizes.columns,
                sums: sums.as_ptr(),
            });
            panels.unpack(memory.y, &self.y, queries, memory.rows);
        }
    }
}
