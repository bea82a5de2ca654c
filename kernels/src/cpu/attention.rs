//! Attention of queries to keys and values, whose scores exist for a few queries at a time, as in
//! Dao et al., "FlashAttention" (2022).
//!
//! The queries of a head are taken in *panels* of as many as a micro-kernel has columns. For a
//! panel all of its visible scores are computed, keys along rows and queries along the lanes of
//! vectors, so that a softmax is a reduction of whole vectors, and that neither keys nor values are
//! packed: `Sᵀ = K·Qᵀ`, then `Yᵀ = Vᵀ·Pᵀ`. Micro-panels of keys that no query of the panel sees are
//! left out.
//!
//! Each thread computes heads as a whole, as many as are a multiple of the threads. The rest are
//! cut into panels, and in the backward pass into ranges of keys, in steps that all threads take
//! together. Neither changes the order of a sum, so that the number of threads changes no bit.

mod grad;
mod rows;
mod softmax;

pub(crate) use grad::AttentionGrad;

use std::ops::Range;

use super::gemm::KC;
use super::gemm::drive::SERIAL_WORK;
use super::gemm::micro::{Before, Left, LeftLayout, Micro, Right};
use super::gemm::pack::Source;
use super::pointwise::{OperandView, Scratch, Space, aligned, check_rank};
use super::{Config, Launch, SpecError};
use crate::dtype::DType;
use crate::size::{Env, Size};
use crate::spec::{self, Body, Operand, Scores, Spec};
use rows::{Rows, is_contiguous};
use softmax::{Exponentials, Quotients, Routines, Terms};

/// Tasks for each thread, if heads are split among threads.
const TASKS_PER_THREAD: usize = 4;
/// Most rows of a micro-kernel of any instruction set.
const ROWS: usize = 16;
/// Columns of rows that are converted at a time before they are transposed.
const COLUMNS: usize = 64;
/// Elements of rows whose columns are summed at a time: they stay in L1, where every micro-kernel
/// reads a part of each row.
const ROW_BLOCK_ELEMENTS: usize = 4 << 10;
/// 0, 1, …: the offsets of steps or rows that are neighbours.
static NEIGHBOUR_OFFSETS: [i32; KC] = {
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

/// The fields that attention and its gradient share.
struct Shared {
    micro: &'static Micro,
    routines: Routines,
    threads: usize,
    /// Bytes of a worker, and of a head in progress.
    worker: usize,
    head: usize,
    /// The number of heads in progress that there is memory for.
    heads: usize,
}

/// The sizes of a launch.
#[derive(Clone, Copy)]
struct Sizes {
    queries: usize,
    keys: usize,
    /// The width of queries and keys.
    width: usize,
    /// The width of values.
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

/// Takes parts of a worker's memory, one after the other; without memory it counts them.
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
    /// `parts` counts the bytes of a worker and of a head, of which at most so many are in
    /// progress.
    fn new(
        bound: &Env,
        spec: &Spec,
        config: &Config,
        heads: usize,
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
            heads: heads.clamp(1, threads),
        })
    }

    fn workspace(&self) -> u64 {
        (self.worker * self.threads + self.head * self.heads) as u64
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

    /// Runs `task(head, part, memory)` for all parts of fewer heads than threads. They share the
    /// memory of all heads in progress equally.
    fn split(
        &self,
        launch: &Launch,
        heads: &Range<usize>,
        parts: usize,
        task: impl Fn(usize, usize, Slot) + Sync,
    ) {
        let (slots, share) = (self.slots(launch), self.heads / heads.len().max(1));
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

/// A workspace: the memory of workers, then that of heads in progress.
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

/// A part of some rows, which are cut into `parts` of a multiple of `unit` rows.
fn part_of(rows: Range<usize>, part: usize, parts: usize, unit: usize) -> Range<usize> {
    let each = rows.len().div_ceil(parts).next_multiple_of(unit);
    let first = rows.end.min(rows.start + part * each);
    first..rows.end.min(first + each)
}

/// The operands that are read, without results and their gradients.
struct Views {
    q: OperandView,
    k: OperandView,
    v: OperandView,
    mask: Option<OperandView>,
    past: Option<OperandView>,
    /// How many they are.
    count: usize,
}

impl Views {
    fn new(body: &spec::Attention, launch: &Launch) -> Views {
        let mut count = 0;
        let mut next = |operand: &Operand| {
            count += 1;
            OperandView::new(operand, launch.args[count - 1], launch.env)
        };
        Views {
            q: next(&body.q),
            k: next(&body.k),
            v: next(&body.v),
            mask: body.mask.as_ref().map(&mut next),
            past: body.past.as_ref().map(&mut next),
            count,
        }
    }

    /// The rows of a head.
    ///
    /// # Safety
    /// The operands may be read.
    unsafe fn sources(&self, scores: Scores, at: &[usize], sizes: &Sizes) -> Sources {
        let rows = |view: &OperandView, width: usize| Rows::new(view, at, at.len(), width);
        Sources {
            scores: match &self.past {
                // SAFETY: the caller's promise.
                Some(past) => scores.after(unsafe { past.load(past.offset(at)) } as i32),
                None => scores,
            },
            q: rows(&self.q, sizes.width),
            k: rows(&self.k, sizes.width),
            v: rows(&self.v, sizes.columns),
            mask: self.mask.as_ref().map(|mask| rows(mask, sizes.keys)),
        }
    }
}

/// A head of the operands.
struct Sources {
    scores: Scores,
    q: Rows,
    k: Rows,
    v: Rows,
    mask: Option<Rows>,
}

impl Sources {
    /// The terms of the scores of a panel: those of the keys that it sees, in this memory or where
    /// the mask lies.
    ///
    /// # Safety
    /// The mask may be read, and the memory of the terms written.
    unsafe fn terms(
        &self,
        panels: Panels,
        queries: Range<usize>,
        seen: Range<usize>,
        memory: *mut f32,
    ) -> Terms {
        let Some(mask) = &self.mask else {
            return Terms::None;
        };
        let mask = mask.columns(seen);
        if mask.stride != 0 {
            // SAFETY: the caller's promise.
            unsafe { panels.pack(&mask, queries, memory) };
            return Terms::OfPairs(memory);
        }
        if mask.dtype == DType::F32 && mask.step == 1 {
            return Terms::OfKeys(mask.floats(0));
        }
        // SAFETY: the caller's promise.
        unsafe { mask.read(0, memory) };
        Terms::OfKeys(memory)
    }
}

/// Elements of the memory of [`Sources::terms`], for panels of so many queries.
fn terms(body: &spec::Attention, sizes: &Sizes, panel: usize) -> usize {
    let queries = body.mask.as_ref().map_or(0, |mask| {
        let [.., stride, _] = mask.strides.as_slice() else {
            return panel;
        };
        if stride.is(0) { 1 } else { panel }
    });
    sizes.keys.saturating_mul(queries)
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
                let left = Left::indirect(
                    rows.at.wrapping_add(row * rows.stride + first),
                    offsets.as_ptr(),
                    NEIGHBOUR_OFFSETS.as_ptr(),
                );
                let right = Right::packed(right.wrapping_add(first * self.width), self.width);
                let before = if first == 0 {
                    Before::Nothing
                } else {
                    Before::Term
                };
                let kernel = self
                    .micro
                    .kernel(LeftLayout::Indirect, count, &right, self.width);
                // SAFETY: the caller's promise; the tables cover these rows and steps.
                unsafe { kernel(steps, left, right, to, self.width, before) };
            }
        }
    }

    /// `to[c] = Σ_r rows(r, c) · right(r)` for rows r of a range: a vector of a panel of queries
    /// for each column. `right` is that of the first row.
    ///
    /// # Safety
    /// See [`Panels::rows`].
    unsafe fn columns(&self, rows: Matrix, range: Range<usize>, right: *const f32, to: *mut f32) {
        let height = self.micro.mr;
        let block = (ROW_BLOCK_ELEMENTS / rows.width.max(1)).clamp(1, KC);
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
                let left = Left::indirect(
                    rows.at.wrapping_add(first * rows.stride + column),
                    NEIGHBOUR_OFFSETS.as_ptr(),
                    steps.as_ptr(),
                );
                let to = to.wrapping_add(column * self.width);
                let kernel = self
                    .micro
                    .kernel(LeftLayout::Indirect, columns, &right, self.width);
                // SAFETY: the caller's promise; the tables cover these rows and steps.
                unsafe { kernel(count, left, right, to, self.width, before) };
            }
        }
    }

    /// Packs rows as the lanes of a panel: a vector for each element of a row; zeros in the lanes
    /// after the last row.
    ///
    /// # Safety
    /// The rows may be read, and a vector for each of their elements written.
    unsafe fn pack(&self, rows: &Rows, range: Range<usize>, to: *mut f32) {
        let pack = |from: Source, depth: usize, to: *mut f32| {
            // SAFETY: the caller's promise.
            unsafe { (self.micro.pack)(from, range.len(), depth, to, self.width) }
        };
        if rows.dtype == DType::F32 {
            let from = Source {
                at: rows.floats(range.start),
                stride: rows.stride,
                step: rows.step,
            };
            return pack(from, rows.width, to);
        }
        let mut some = [0.0; COLUMNS * softmax::PANEL_QUERIES];
        for first in (0..rows.width).step_by(COLUMNS) {
            let columns = rows.columns(first..rows.width.min(first + COLUMNS));
            for (i, row) in range.clone().enumerate() {
                // SAFETY: the caller's promise; a panel has as many rows as lanes at most.
                unsafe { columns.read(row, some[i * COLUMNS..].as_mut_ptr()) };
            }
            let from = Source {
                at: some.as_ptr(),
                stride: COLUMNS as isize,
                step: 1,
            };
            pack(from, columns.width, to.wrapping_add(first * self.width));
        }
    }

    /// Writes the lanes of a panel as rows: the inverse of [`Panels::pack`], by way of as many
    /// elements.
    ///
    /// # Safety
    /// As for [`Panels::pack`], and the rows may be written.
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
        let heads = Space::new(&spec.dims[..spec.dims.len() - 2], bound).points();
        let shared = Shared::new(bound, spec, config, heads, |micro, env| {
            let (mut worker, mut head) = (Parts::counting(), Parts::counting());
            let sizes = sizes(body, spec, env);
            Panel::new(body, &sizes, micro, &mut worker);
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
        let views = Views::new(body, launch);
        let result = OperandView::new(&body.result, launch.args[views.count], env);
        let nr = shared.micro.nr();
        let head = |number: usize, slot: Slot| {
            let at = heads.point(number);
            let columns = spec.dims[rank - 1];
            Head {
                shared,
                sizes,
                // SAFETY: the operands may be read.
                sources: unsafe { views.sources(body.scores, &at[..rank - 2], &sizes) },
                y: Rows::new(&result, &at, rank - 2, sizes.columns),
                copies: Copies::new(body, &sizes, columns, &mut Parts::of(slot.head)),
                panel: Panel::new(body, &sizes, shared.micro, &mut Parts::of(slot.worker)),
            }
        };
        let (count, panels) = (heads.points(), sizes.queries.div_ceil(nr));
        let rest = shared.whole(launch, count, sizes.work(count), |number, slot| {
            let head = head(number, slot);
            // SAFETY: the operands may be read, and the rows of the result are this task's own.
            unsafe {
                head.copies.fill(&head.sources, head.seen());
                (0..panels).for_each(|panel| head.panel(panel));
            }
        });
        if rest.is_empty() {
            return;
        }
        let parts = TASKS_PER_THREAD * shared.share(&rest);
        if Copies::needed(body, spec.dims[rank - 1]) {
            shared.split(launch, &rest, parts, |number, part, slot| {
                let head = head(number, slot);
                let keys = part_of(head.seen(), part, parts, 1);
                // SAFETY: as above; the copies of these rows are this task's own.
                unsafe { head.copies.fill(&head.sources, keys) };
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

/// Copies in f32 of the keys and values of a head, unless their rows follow each other in it.
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

    /// Copies some keys and values.
    ///
    /// # Safety
    /// The operands may be read, and the copies of these rows written.
    unsafe fn fill(&self, from: &Sources, keys: Range<usize>) {
        for (rows, copy) in [(&from.k, self.k), (&from.v, self.v)] {
            if let Some(to) = copy {
                // SAFETY: the caller's promise.
                unsafe { rows.copy(keys.clone(), to, rows.width) };
            }
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
    /// See [`Sources::terms`].
    terms: *mut f32,
}

impl Panel {
    fn new(body: &spec::Attention, sizes: &Sizes, micro: &Micro, parts: &mut Parts) -> Panel {
        let of = |a: usize, b: usize| a.saturating_mul(b);
        let panel = micro.width(sizes.queries.min(micro.nr()));
        Panel {
            q: parts.floats(of(panel, sizes.width)),
            y: parts.floats(of(panel, sizes.columns)),
            rows: parts.floats(of(panel, sizes.columns)),
            scores: parts.floats(of(panel, sizes.keys)),
            terms: parts.floats(terms(body, sizes, panel)),
        }
    }
}

/// A head in progress.
struct Head<'a> {
    shared: &'a Shared,
    sizes: Sizes,
    sources: Sources,
    y: Rows,
    copies: Copies,
    panel: Panel,
}

impl Head<'_> {
    /// The keys that some query sees.
    fn seen(&self) -> Range<usize> {
        let Sizes { queries, keys, .. } = self.sizes;
        self.sources.scores.visible_to(0..queries, keys)
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
        let Sources {
            scores, q, k, v, ..
        } = &self.sources;
        let seen = scores.visible_to(queries.clone(), sizes.keys);
        let mut sums = [0.0; softmax::PANEL_QUERIES];
        // SAFETY: the caller's promise; the memory has room for the panel.
        unsafe {
            panels.pack(q, queries.clone(), memory.q);
            q.request(queries.end..sizes.queries.min(queries.end + micro.nr()));
            let k = k.matrix(self.copies.k);
            panels.rows(k, seen.clone(), memory.q, memory.scores);
            (self.shared.routines.exponentials)(&Exponentials {
                at: memory.scores,
                width: panels.width,
                queries: queries.clone(),
                keys: sizes.keys,
                seen: seen.clone(),
                scores: *scores,
                mask: self
                    .sources
                    .terms(panels, queries.clone(), seen.clone(), memory.terms),
                slopes: std::ptr::null_mut(),
                sums: sums.as_mut_ptr(),
            });
            let v = v.matrix(self.copies.v);
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
