//! Attention of queries to keys and values, whose scores exist for a few queries at a time, as in
//! Dao et al., "FlashAttention" (2022).
//!
//! The queries of a head are taken in *panels* of as many as a micro-kernel has columns. For a panel
//! all of its visible scores are computed, keys along rows and queries along the lanes of vectors,
//! so that a softmax is a reduction of whole vectors, and that neither keys nor values are packed:
//! `Sᵀ = K·Qᵀ`, then `Yᵀ = Vᵀ·Pᵀ`. Micro-panels of keys that no query of the panel sees are left
//! out.
//!
//! Each thread computes heads as a whole, as many as are a multiple of the threads. The rest are cut
//! into panels, and in the backward pass into ranges of keys, in steps that all threads take
//! together. Neither changes the order of a sum, so that the number of threads changes no bit.

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
    /// Bytes of a worker, and of a head under way.
    worker: usize,
    head: usize,
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
    /// `parts` counts the bytes of a worker and of a head.
    fn new(
        bound: &Env,
        spec: &Spec,
        config: &Config,
        parts: impl FnOnce(&Micro, &Env) -> [Parts; 2],
    ) -> Result<Shared, SpecError> {
        check_rank(&spec.dims, 2)?;
        let micro = Micro::of(config.isa);
        let threads = config.threads.max(1);
        let [worker, head] = parts(micro, bound).map(|parts| parts.bytes);
        let bytes = worker.saturating_add(head);
        // Offsets into the memory of a block are of 32 bits.
        if bytes > i32::MAX as usize || bytes.saturating_mul(threads) > isize::MAX as usize / 64 {
            return Err(SpecError::unsupported(format!(
                "attention that needs {bytes} bytes of each thread, more than 2 GiB"
            )));
        }
        Ok(Shared {
            micro,
            routines: Routines::new(config.isa),
            threads,
            worker,
            head,
        })
    }

    fn workspace(&self) -> u64 {
        ((self.worker + self.head) * self.threads) as u64
    }

    /// Runs `whole(head, memory)` for as many heads as are a multiple of the threads, or for all if
    /// there is little work, and gives the heads that remain.
    fn whole(
        &self,
        launch: &Launch,
        heads: usize,
        work: usize,
        whole: impl Fn(usize, Slot) + Sync,
    ) -> Range<usize> {
        let slots = self.slots(launch);
        if work < SERIAL_WORK || self.threads == 1 {
            (0..heads).for_each(|head| whole(head, slots.of(0, 0)));
            return heads..heads;
        }
        let rest = heads % self.threads;
        launch.team.run(heads - rest, &|head, worker| {
            whole(head, slots.of(worker, worker));
        });
        heads - rest..heads
    }

    /// Runs `task(head, part, memory)` for all parts of fewer heads than threads. A head has the
    /// memory of [`Shared::share`] heads.
    fn split(
        &self,
        launch: &Launch,
        heads: &Range<usize>,
        parts: usize,
        task: impl Fn(usize, usize, Slot) + Sync,
    ) {
        let (slots, share) = (self.slots(launch), self.share(heads));
        launch.team.run(heads.len() * parts, &|number, worker| {
            let head = number / parts;
            task(
                heads.start + head,
                number % parts,
                slots.of(worker, head * share),
            );
        });
    }

    /// Threads for each of fewer heads than threads.
    fn share(&self, heads: &Range<usize>) -> usize {
        self.threads / heads.len().max(1)
    }

    fn slots(&self, launch: &Launch) -> Slots {
        Slots {
            workers: Scratch::new(launch, self.worker),
            heads: Scratch {
                base: launch.workspace.wrapping_add(self.worker * self.threads),
                bytes: self.head,
            },
        }
    }
}

/// A workspace: the memory of workers, then that of heads under way.
struct Slots {
    workers: Scratch,
    heads: Scratch,
}

impl Slots {
    fn of(&self, worker: usize, head: usize) -> Slot {
        Slot {
            worker: self.workers.of(worker),
            head: self.heads.of(head),
        }
    }
}

/// The memory of a task.
#[derive(Clone, Copy)]
struct Slot {
    worker: *mut u8,
    head: *mut u8,
}

/// The part of a number of rows, cut into `parts` of a multiple of `unit`.
fn part_of(rows: usize, part: usize, parts: usize, unit: usize) -> Range<usize> {
    let each = rows.div_ceil(parts.max(1)).next_multiple_of(unit.max(1));
    let first = (part * each).min(rows);
    first..rows.min(first + each)
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
            let (mut worker, mut head) = (Parts::counting(), Parts::counting());
            let sizes = sizes(body, spec, env);
            Panel::new(&sizes, micro.nr(), &mut worker);
            Copies::new(body, &sizes, spec.dims[spec.dims.len() - 1], &mut head);
            [worker, head]
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
        let nr = shared.micro.nr();
        let head = |number: usize, slot: Slot| {
            let at = heads.point(number);
            let rows = |i: usize, width: usize| Rows::new(&views[i], &at, rank - 2, width);
            let columns = spec.dims[rank - 1];
            Head {
                shared,
                scores: body.scores,
                sizes,
                q: rows(0, sizes.width),
                k: rows(1, sizes.width),
                v: rows(2, sizes.columns),
                y: rows(3, sizes.columns),
                copies: Copies::new(body, &sizes, columns, &mut Parts::of(slot.head)),
                panel: Panel::new(&sizes, nr, &mut Parts::of(slot.worker)),
            }
        };
        let (count, panels) = (heads.points(), sizes.queries.div_ceil(nr));
        let rest = shared.whole(launch, count, sizes.work(count), |number, slot| {
            let head = head(number, slot);
            // SAFETY: the operands may be read, and the rows of the result are this task's own.
            unsafe {
                head.copy(0..sizes.keys);
                (0..panels).for_each(|panel| head.panel(panel));
            }
        });
        if rest.is_empty() {
            return;
        }
        let parts = TASKS * shared.share(&rest);
        if Copies::needed(body, spec.dims[rank - 1]) {
            shared.split(launch, &rest, parts, |number, part, slot| {
                // SAFETY: as above; the copies of these rows are this task's own.
                unsafe { head(number, slot).copy(part_of(sizes.keys, part, parts, 1)) };
            });
        }
        shared.split(launch, &rest, panels, |number, panel, slot| {
            // SAFETY: as above.
            unsafe { head(number, slot).panel(panel) };
        });
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

/// Copies of the keys and values of a head, unless their rows follow each other.
struct Copies {
    k: Option<*mut f32>,
    v: Option<*mut f32>,
}

impl Copies {
    fn new(body: &spec::Attention, sizes: &Sizes, columns: Size, parts: &mut Parts) -> Copies {
        let mut copy = |operand: &Operand, width: Size, columns: usize| {
            let count = sizes.keys.saturating_mul(columns);
            (!is_contiguous(operand, width)).then(|| parts.floats(count))
        };
        Copies {
            k: copy(&body.k, body.width, sizes.width),
            v: copy(&body.v, columns, sizes.columns),
        }
    }

    /// Whether there are any.
    fn needed(body: &spec::Attention, columns: Size) -> bool {
        !is_contiguous(&body.k, body.width) || !is_contiguous(&body.v, columns)
    }
}

/// The parts of a worker's memory.
struct Panel {
    /// A panel of queries, and of results.
    q: *mut f32,
    y: *mut f32,
    /// The results of a panel by rows.
    rows: *mut f32,
    scores: *mut f32,
}

impl Panel {
    fn new(sizes: &Sizes, panel: usize, parts: &mut Parts) -> Panel {
        let of = |a: usize, b: usize| a.saturating_mul(b);
        Panel {
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
    k: Rows,
    v: Rows,
    y: Rows,
    copies: Copies,
    panel: Panel,
}

impl Head<'_> {
    /// Copies some keys and values.
    ///
    /// # Safety
    /// The operands may be read, and the copies of these rows written.
    unsafe fn copy(&self, keys: Range<usize>) {
        for (rows, copy) in [(&self.k, self.copies.k), (&self.v, self.copies.v)] {
            if let Some(to) = copy {
                // SAFETY: the caller's promise.
                unsafe { rows.copy(keys.clone(), to, rows.width) };
            }
        }
    }

    /// The results of a panel of queries.
    ///
    /// # Safety
    /// The operands may be read, keys and values are copied, the rows of the result may be written,
    /// and the memory is the caller's.
    unsafe fn panel(&self, number: usize) {
        let (micro, sizes, memory) = (self.shared.micro, &self.sizes, &self.panel);
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
            let k = self.k.matrix(self.copies.k);
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
            let v = self.v.matrix(self.copies.v);
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
