//! The gradients of queries, keys and values.
//!
//! For a block of some panels of queries, the weights P and the gradients of the scores,
//! `dS = P∘(dY·Vᵀ − δ)·scale` with δ the sum of dY∘Y along a row, are recomputed, for the keys that
//! a query of the panel sees; then `dQᵀ = Kᵀ·dSᵀ` panel by panel, and `dV += Pᵀ·dY` and
//! `dK += dSᵀ·Q` for [`PANELS`] panels after the other. A head of which several threads compute
//! parts has larger blocks: first the threads take its panels, then ranges of its keys.

use std::ops::Range;

use super::rows::Rows;
use super::softmax::{self, Exponentials, ScoreGradients};
use super::{
    Copies, Panels, Parts, ROWS, Shared, Sizes, Slot, Sources, TASKS_PER_THREAD, Views, part_of,
    terms,
};
use crate::cpu::gemm::micro::{Before, Left, LeftLayout, Micro, Right};
use crate::cpu::pointwise::{OperandView, Space};
use crate::cpu::{Config, Launch, SpecError};
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::{self, Body, Spec};

/// Panels whose terms of the gradients of keys and values are one sum each, and their most queries.
const PANELS: usize = 4;
const QUERIES: usize = PANELS * softmax::PANEL_QUERIES;

/// See [`Body::AttentionGrad`].
pub(crate) struct AttentionGrad {
    shared: Shared,
}

impl AttentionGrad {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        let Body::AttentionGrad(body) = &spec.body else {
            unreachable!("prepared by its body")
        };
        // They are added where they are stored.
        if body.gradients.dtype != DType::F32 {
            return Err(SpecError::unsupported("gradients of attention in halves"));
        }
        let shared = Shared::new(bound, spec, config, usize::MAX, |micro, env| {
            let (mut worker, mut head) = (Parts::counting(), Parts::counting());
            let sizes = sizes(body, env);
            Panel::new(body, &sizes, micro, &mut worker);
            Memory::new(body, &sizes, micro, PANELS, &mut head);
            [worker, head]
        })?;
        Ok(AttentionGrad { shared })
    }

    pub fn workspace(&self) -> u64 {
        self.shared.workspace()
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::AttentionGrad(body) = &spec.body else {
            unreachable!("checked by new")
        };
        let (env, shared) = (launch.env, &self.shared);
        let axis = spec.dims.len() - 2;
        let heads = Space::new(&spec.dims[..axis], env);
        let sizes = sizes(body, env);
        if sizes.width == 0 {
            return;
        }
        let views = Views::new(&body.of, launch);
        let rest = [&body.of.result, &body.dy, &body.gradients];
        let rest: [OperandView; 3] =
            std::array::from_fn(|i| OperandView::new(rest[i], launch.args[views.count + i], env));
        let head = |number: usize, panels: usize, slot: Slot| {
            let at = heads.point(number);
            let [y, dy, result] = [0, 1, 2].map(|i| Rows::new(&rest[i], &at, axis, sizes.width));
            let memory = &mut Parts::of(slot.head);
            Head {
                shared,
                sizes,
                // SAFETY: the operands may be read.
                sources: unsafe { views.sources(body.of.scores, &at[..axis], &sizes) },
                y,
                dy,
                gradients: match body.in_turns {
                    true => [0, 1, 2].map(|part| result.every(3, part)),
                    false => [0, sizes.queries, sizes.queries + sizes.keys]
                        .map(|first| result.every(1, first)),
                },
                memory: Memory::new(body, &sizes, shared.micro, panels, memory),
                panel: Panel::new(body, &sizes, shared.micro, &mut Parts::of(slot.worker)),
            }
        };
        let (count, nr) = (heads.points(), shared.micro.nr());
        let all = sizes.queries.div_ceil(nr);
        let rest = shared.whole(launch, count, sizes.work(count), |number, slot| {
            let head = head(number, PANELS, slot);
            // SAFETY: the operands may be read, the rows of the result are this task's own, and
            // the memory has room for keys, values and their gradients.
            unsafe {
                head.memory.copies.fill(&head.sources, 0..sizes.keys);
                head.clear(0..sizes.keys);
                for first in (0..all).step_by(PANELS) {
                    let panels = first..all.min(first + PANELS);
                    panels.clone().for_each(|panel| head.panel(first, panel));
                    head.add(first, panels, 0..sizes.keys);
                }
                head.write(0..sizes.keys);
            }
        });
        if rest.is_empty() {
            return;
        }
        let share = shared.share(&rest);
        let (parts, panels) = (TASKS_PER_THREAD * share, PANELS * share);
        if Copies::needed(&body.of, body.of.width) {
            shared.split(launch, &rest, parts, |number, part, slot| {
                let head = head(number, panels, slot);
                let keys = part_of(0..sizes.keys, part, parts, 1);
                // SAFETY: as above; the copies of these rows are this task's own.
                unsafe { head.memory.copies.fill(&head.sources, keys) };
            });
        }
        // (Without queries the gradients of keys and values are 0.)
        for first in (0..all.max(1)).step_by(panels) {
            let block = first..all.min(first + panels);
            shared.split(launch, &rest, block.len(), |number, panel, slot| {
                // SAFETY: as above; the rows of dQ and the panel are this task's own.
                unsafe { head(number, panels, slot).panel(first, first + panel) };
            });
            shared.split(launch, &rest, parts, |number, part, slot| {
                let keys = part_of(0..sizes.keys, part, parts, shared.micro.mr);
                let head = head(number, panels, slot);
                // SAFETY: as above; the gradients of these keys are this task's own.
                unsafe {
                    if first == 0 {
                        head.clear(keys.clone());
                    }
                    for some in block.clone().step_by(PANELS) {
                        let some = some..block.end.min(some + PANELS);
                        head.add(first, some, keys.clone());
                    }
                    if block.end == all {
                        head.write(keys);
                    }
                }
            });
        }
    }
}

fn sizes(body: &spec::AttentionGrad, env: &Env) -> Sizes {
    let width = body.of.width.usize_at(env);
    Sizes {
        queries: body.queries.usize_at(env),
        keys: body.of.keys.usize_at(env),
        width,
        columns: width,
    }
}

/// The parts of the memory of a head.
struct Memory {
    copies: Copies,
    /// The gradients of keys and values, `stride` elements a row.
    dk: *mut f32,
    dv: *mut f32,
    stride: usize,
    /// Queries and dY of a block, `stride` elements a row.
    q: *mut f32,
    dy: *mut f32,
    /// P and dS of a block, panel by panel, for every key.
    weights: *mut f32,
    scores: *mut f32,
}

impl Memory {
    /// For blocks of so many panels.
    fn new(
        body: &spec::AttentionGrad,
        sizes: &Sizes,
        micro: &Micro,
        panels: usize,
        parts: &mut Parts,
    ) -> Memory {
        let (keys, width, nr) = (sizes.keys, sizes.width, micro.nr());
        let stride = width.next_multiple_of(micro.lanes);
        let queries = sizes.queries.div_ceil(nr).min(panels).saturating_mul(nr);
        let copies = Copies::new(&body.of, sizes, body.of.width, parts);
        let mut floats = |a: usize, b: usize| parts.floats(a.saturating_mul(b));
        Memory {
            copies,
            dk: floats(keys, stride),
            dv: floats(keys, stride),
            stride,
            q: floats(queries, stride),
            dy: floats(queries, stride),
            weights: floats(queries, keys),
            scores: floats(queries, keys),
        }
    }
}

/// The parts of a worker's memory.
struct Panel {
    /// A panel of queries, of dY, and of dQ.
    panel: *mut f32,
    /// The result of a panel, then the rows of its dQ.
    rows: *mut f32,
    /// See [`Sources::terms`].
    terms: *mut f32,
    /// The derivatives of limited scores.
    slopes: Option<*mut f32>,
}

impl Panel {
    fn new(body: &spec::AttentionGrad, sizes: &Sizes, micro: &Micro, parts: &mut Parts) -> Panel {
        let (nr, of) = (micro.nr(), &body.of);
        let count = nr.saturating_mul(sizes.width);
        Panel {
            panel: parts.floats(count),
            rows: parts.floats(count),
            terms: parts.floats(terms(of, sizes, nr)),
            slopes: (of.scores.soft_cap).map(|_| parts.floats(nr.saturating_mul(sizes.keys))),
        }
    }
}

/// A head in progress.
struct Head<'a> {
    shared: &'a Shared,
    sizes: Sizes,
    sources: Sources,
    y: Rows,
    dy: Rows,
    /// The gradients of queries, keys and values.
    gradients: [Rows; 3],
    memory: Memory,
    panel: Panel,
}

impl Head<'_> {
    /// Sets the gradients of some keys and values to 0.
    ///
    /// # Safety
    /// They may be written.
    unsafe fn clear(&self, keys: Range<usize>) {
        let stride = self.memory.stride;
        for sums in [self.memory.dk, self.memory.dv] {
            let at = sums.wrapping_add(keys.start * stride);
            // SAFETY: the caller's promise.
            unsafe { at.write_bytes(0, keys.len() * stride) };
        }
    }

    /// Writes the gradients of some keys and values to the result.
    ///
    /// # Safety
    /// They may be read, and their rows of the result written.
    unsafe fn write(&self, keys: Range<usize>) {
        let [_, dk, dv] = &self.gradients;
        for (rows, sums) in [(dk, self.memory.dk), (dv, self.memory.dv)] {
            for key in keys.clone() {
                let row = sums.wrapping_add(key * self.memory.stride);
                // SAFETY: the caller's promise.
                unsafe { rows.write(key, row) };
            }
        }
    }

    /// The queries of a panel, and the keys that they see.
    fn of_panel(&self, panel: usize) -> [Range<usize>; 2] {
        let nr = self.shared.micro.nr();
        let queries = panel * nr..self.sizes.queries.min((panel + 1) * nr);
        let seen = self
            .sources
            .scores
            .visible_to(queries.clone(), self.sizes.keys);
        [queries, seen]
    }

    /// The weights, the gradients of the scores and the gradients of the queries of a panel, of a
    /// block that begins with the panel `first`.
    ///
    /// # Safety
    /// The operands may be read, keys and values are copied, the rows of dQ and the block's memory
    /// of the panel may be written, and the worker's memory is the caller's.
    unsafe fn panel(&self, first: usize, number: usize) {
        let (micro, memory, sizes) = (self.shared.micro, &self.memory, &self.sizes);
        let (nr, keys, width) = (micro.nr(), sizes.keys, sizes.width);
        let panels = Panels::new(micro, nr);
        let [queries, seen] = self.of_panel(number);
        let at = (number - first) * nr;
        let [weights, scores] =
            [memory.weights, memory.scores].map(|block| block.wrapping_add(at * keys));
        let [p, ds] = [weights, scores].map(|panel| panel.wrapping_add(seen.start * nr));
        let Panel {
            panel,
            rows,
            terms,
            slopes,
        } = self.panel;
        let slopes = slopes.unwrap_or(std::ptr::null_mut());
        let Sources {
            scores: of,
            q,
            k,
            v,
            ..
        } = &self.sources;
        let mut sums = [0.0; softmax::PANEL_QUERIES];
        // SAFETY: the caller's promise; the memory has room for the panel.
        unsafe {
            for (i, row) in queries.clone().enumerate() {
                for (from, to) in [(q, memory.q), (&self.dy, memory.dy)] {
                    let to = to.wrapping_add((at + i) * memory.stride);
                    from.read(row, to);
                    to.add(width).write_bytes(0, memory.stride - width);
                }
            }
            panels.pack(q, queries.clone(), panel);
            self.y.request(queries.clone());
            let k = k.matrix(memory.copies.k);
            panels.rows(k, seen.clone(), panel, p);
            (self.shared.routines.exponentials)(&Exponentials {
                at: p,
                width: nr,
                queries: queries.clone(),
                keys,
                seen: seen.clone(),
                scores: *of,
                mask: self
                    .sources
                    .terms(panels, queries.clone(), seen.clone(), terms),
                slopes,
                sums: sums.as_mut_ptr(),
            });
            panels.pack(&self.dy, queries.clone(), panel);
            panels.rows(v.matrix(memory.copies.v), seen.clone(), panel, ds);
            panels.pack(&self.y, queries.clone(), rows);
            (self.shared.routines.score_gradients)(&ScoreGradients {
                weights: p,
                gradients: ds,
                width: nr,
                keys: seen.len(),
                sums: sums.as_ptr(),
                y: rows,
                dy: panel,
                columns: width,
                scale: of.scale,
                slopes,
            });
            panels.columns(k, seen.clone(), ds, panel);
            panels.unpack(panel, &self.gradients[0], queries, rows);
            // A micro-kernel of keys may begin before or end behind those of this panel.
            for edge in [
                seen.start.saturating_sub(micro.mr)..seen.start,
                seen.end..keys.min(seen.end + micro.mr),
            ] {
                for panel in [weights, scores] {
                    let at = panel.wrapping_add(edge.start * nr);
                    at.write_bytes(0, edge.len() * nr);
                }
            }
        }
    }

    /// Adds the terms of at most [`PANELS`] panels to the gradients of some keys and values, of
    /// which the first is that of a micro-kernel; the block begins with the panel `first`.
    ///
    /// # Safety
    /// The panels have been computed, and the gradients of these keys are the caller's.
    unsafe fn add(&self, first: usize, panels: Range<usize>, keys: Range<usize>) {
        let memory = &self.memory;
        let (nr, stride) = (self.shared.micro.nr(), memory.stride);
        let mut seen: [Range<usize>; PANELS] = std::array::from_fn(|_| 0..0);
        let mut count = 0;
        for (panel, of_panel) in panels.clone().zip(&mut seen) {
            let [queries, keys] = self.of_panel(panel);
            count += queries.len();
            *of_panel = keys;
        }
        let at = (panels.start - first) * nr;
        for (block, rows, sums) in [
            (memory.weights, memory.dy, memory.dv),
            (memory.scores, memory.q, memory.dk),
        ] {
            let block = block.wrapping_add(at * self.sizes.keys);
            let rows = rows.wrapping_add(at * stride);
            // SAFETY: the caller's promise.
            unsafe { self.add_products(&seen, count, block, rows, sums, keys.clone()) };
        }
    }

    /// Adds `Σ_q block(q, key) · rows(q)` to the sums of some keys, for the first `count` queries q
    /// of the block.
    ///
    /// # Safety
    /// The memory is the caller's, and has values of the keys that a panel sees.
    unsafe fn add_products(
        &self,
        seen: &[Range<usize>; PANELS],
        count: usize,
        block: *const f32,
        rows: *const f32,
        sums: *mut f32,
        keys: Range<usize>,
    ) {
        let (micro, stride) = (self.shared.micro, self.memory.stride);
        let (nr, height, panel) = (micro.nr(), micro.mr, micro.nr() * self.sizes.keys);
        let mut offsets = [0; ROWS];
        for (i, offset) in offsets.iter_mut().enumerate().take(height) {
            *offset = (i * nr) as i32;
        }
        let mut steps = [0; QUERIES];
        for (q, step) in steps.iter_mut().enumerate().take(count) {
            *step = (q / nr * panel + q % nr) as i32;
        }
        let all = seen.iter().filter(|seen| !seen.is_empty());
        let first = all.clone().map(|seen| seen.start).min().unwrap_or(0);
        let last = all.map(|seen| seen.end).max().unwrap_or(0).min(keys.end);
        // Micro-kernels begin at the same keys for every range.
        let first = (first / height * height).max(keys.start);
        for key in (first..last).step_by(height) {
            let keys = key..last.min(key + height);
            let sees = |seen: &Range<usize>| seen.start < keys.end && keys.start < seen.end;
            let (Some(from), Some(to)) = (seen.iter().position(sees), seen.iter().rposition(sees))
            else {
                continue;
            };
            let (from, to) = (from * nr, count.min((to + 1) * nr));
            for column in (0..stride).step_by(nr) {
                let width = micro.width(stride - column);
                let left = Left::indirect(
                    block.wrapping_add(from / nr * panel + key * nr),
                    offsets.as_ptr(),
                    steps.as_ptr(),
                );
                let right = Right::packed(rows.wrapping_add(from * stride + column), stride);
                let to_sums = sums.wrapping_add(key * stride + column);
                let kernel = micro.kernel(LeftLayout::Indirect, keys.len(), &right, width);
                // SAFETY: the caller's promise; the tables cover these rows and steps.
                unsafe { kernel(to - from, left, right, to_sums, stride, Before::Term) };
            }
        }
    }
}
