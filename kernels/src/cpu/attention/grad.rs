//! The gradients of queries, keys and values.
//!
//! For a block of some panels of queries, the weights P and the gradients of the scores,
//! `dS = P∘(dY·Vᵀ − δ)·scale` with δ the sum of dY∘Y along a row, are computed again, of the keys
//! that a query of the panel sees; then `dQᵀ = Kᵀ·dSᵀ` panel by panel, and `dV += Pᵀ·dY` and
//! `dK += dSᵀ·Q` for the whole block. A head is computed by one thread, in the order of its queries.

use std::ops::Range;

use super::rows::{Rows, is_contiguous};
use super::softmax::{self, Exponentials, ScoreGradients};
use super::{Matrix, Panels, Parts, ROWS, Shared, Sizes};
use crate::cpu::gemm::micro::{Before, Left, Micro, Right};
use crate::cpu::pointwise::{OperandView, Space};
use crate::cpu::{Config, Launch, SpecError};
use crate::size::{Env, Size};
use crate::spec::{self, Body, Operand, Scores, Spec};

/// Panels of a block, and its most queries.
const PANELS: usize = 4;
const QUERIES: usize = PANELS * softmax::LANES;

/// See [`Body::AttentionGrad`].
pub(crate) struct AttentionGrad {
    shared: Shared,
}

impl AttentionGrad {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        let Body::AttentionGrad(body) = &spec.body else {
            unreachable!("prepared by its body")
        };
        let shared = Shared::new(bound, spec, config, |micro, env| {
            let mut parts = Parts::counting();
            Memory::new(body, &sizes(body, env), micro, &mut parts);
            parts
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
        let env = launch.env;
        let axis = spec.dims.len() - 2;
        let heads = Space::new(&spec.dims[..axis], env);
        let sizes = sizes(body, env);
        if sizes.width == 0 {
            return;
        }
        let view = |i: usize, operand: &Operand| OperandView::new(operand, launch.args[i], env);
        let views = [
            view(0, &body.of.q),
            view(1, &body.of.k),
            view(2, &body.of.v),
            view(3, &body.of.result),
            view(4, &body.dy),
            view(5, &body.result),
        ];
        let task = |number: usize, memory: *mut u8| {
            let at = heads.point(number);
            let rows = |i: usize| Rows::new(&views[i], &at, axis, sizes.width);
            let memory = Memory::new(body, &sizes, self.shared.micro, &mut Parts::of(memory));
            let result = rows(5);
            // SAFETY: the operands may be read, the rows of the result are this task's own, and
            // the memory has room for keys, values and their gradients.
            unsafe {
                let [dk, dv] = [memory.dk, memory.dv].map(|sums| {
                    let sums = std::slice::from_raw_parts_mut(sums, sizes.keys * memory.stride);
                    sums.fill(0.0);
                    sums
                });
                let head = Head {
                    shared: &self.shared,
                    scores: body.of.scores,
                    sizes,
                    q: rows(0),
                    k: rows(1).matrix(sizes.keys, memory.k),
                    v: rows(2).matrix(sizes.keys, memory.v),
                    y: rows(3),
                    dy: rows(4),
                    dq: result,
                    memory: &memory,
                };
                let block = PANELS * head.shared.micro.nr();
                for first in (0..sizes.queries).step_by(block) {
                    head.block(first..sizes.queries.min(first + block));
                }
                for (part, sums) in [(0, dk), (1, dv)] {
                    let to = result.from(sizes.queries + part * sizes.keys);
                    for (key, row) in sums.chunks_exact(memory.stride).enumerate() {
                        to.write(key, row.as_ptr());
                    }
                }
            }
        };
        let count = heads.points();
        self.shared.tasks(launch, count, sizes.work(count), task);
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

/// The parts of a worker's memory.
struct Memory {
    /// Keys and values, where they are copied.
    k: Option<*mut f32>,
    v: Option<*mut f32>,
    /// Their gradients, `stride` elements a row.
    dk: *mut f32,
    dv: *mut f32,
    stride: usize,
    /// A panel of queries, of dY, and of dQ.
    panel: *mut f32,
    /// The result of a panel, then the rows of its dQ.
    rows: *mut f32,
    /// Queries and dY of a block, `stride` elements a row.
    q: *mut f32,
    dy: *mut f32,
    /// P and dS of a block, panel by panel, for every key.
    weights: *mut f32,
    scores: *mut f32,
}

impl Memory {
    fn new(body: &spec::AttentionGrad, sizes: &Sizes, micro: &Micro, parts: &mut Parts) -> Memory {
        let of = |a: usize, b: usize| a.saturating_mul(b);
        let (keys, width, nr) = (sizes.keys, sizes.width, micro.nr());
        let stride = width.next_multiple_of(micro.lanes);
        let panels = sizes.queries.div_ceil(nr).min(PANELS);
        let mut copy = |operand: &Operand, row: Size| {
            (!is_contiguous(operand, row)).then(|| parts.floats(of(keys, width)))
        };
        let k = copy(&body.of.k, body.of.width);
        let v = copy(&body.of.v, body.of.width);
        let mut floats = |a: usize, b: usize| parts.floats(of(a, b));
        Memory {
            k,
            v,
            dk: floats(keys, stride),
            dv: floats(keys, stride),
            stride,
            panel: floats(nr, width),
            rows: floats(nr, width),
            q: floats(panels * nr, stride),
            dy: floats(panels * nr, stride),
            weights: floats(panels * nr, keys),
            scores: floats(panels * nr, keys),
        }
    }
}

/// A head under way.
struct Head<'a> {
    shared: &'a Shared,
    scores: Scores,
    sizes: Sizes,
    q: Rows,
    k: Matrix,
    v: Matrix,
    y: Rows,
    dy: Rows,
    dq: Rows,
    memory: &'a Memory,
}

impl Head<'_> {
    /// The gradients of a block of queries, and their terms of those of keys and values.
    ///
    /// # Safety
    /// The operands may be read, the rows of dQ written, and the memory is the caller's.
    unsafe fn block(&self, queries: Range<usize>) {
        let (micro, memory) = (self.shared.micro, self.memory);
        let (width, nr) = (self.sizes.width, micro.nr());
        // SAFETY: the caller's promise; the memory has room for the block.
        unsafe {
            for (i, row) in queries.clone().enumerate() {
                for (from, to) in [(&self.q, memory.q), (&self.dy, memory.dy)] {
                    let to = to.wrapping_add(i * memory.stride);
                    from.read(row, to);
                    to.add(width).write_bytes(0, memory.stride - width);
                }
            }
            let mut seen: [Range<usize>; PANELS] = std::array::from_fn(|_| 0..0);
            for (number, seen) in seen.iter_mut().enumerate() {
                let first = queries.start + number * nr;
                if first < queries.end {
                    *seen = self.panel(number, first..queries.end.min(first + nr));
                }
            }
            let count = queries.len();
            self.add(&seen, count, memory.weights, memory.dy, memory.dv);
            self.add(&seen, count, memory.scores, memory.q, memory.dk);
        }
    }

    /// The weights, the gradients of the scores and the gradients of the queries of a panel; the
    /// keys that it sees.
    ///
    /// # Safety
    /// As [`Head::block`].
    unsafe fn panel(&self, number: usize, queries: Range<usize>) -> Range<usize> {
        let (micro, memory, sizes) = (self.shared.micro, self.memory, &self.sizes);
        let (nr, keys) = (micro.nr(), sizes.keys);
        let panels = Panels::new(micro, nr);
        let seen = self.scores.visible_to(queries.clone(), keys);
        let [weights, scores] =
            [memory.weights, memory.scores].map(|block| block.wrapping_add(number * nr * keys));
        let [p, ds] = [weights, scores].map(|panel| panel.wrapping_add(seen.start * nr));
        let mut sums = [0.0; softmax::LANES];
        // SAFETY: the caller's promise; the memory has room for the panel.
        unsafe {
            panels.pack(&self.q, queries.clone(), memory.panel);
            self.y.request(queries.clone());
            panels.rows(self.k, seen.clone(), memory.panel, p);
            (self.shared.routines.exponentials)(&Exponentials {
                at: p,
                width: nr,
                queries: queries.clone(),
                keys,
                seen: seen.clone(),
                scores: self.scores,
                sums: sums.as_mut_ptr(),
            });
            panels.pack(&self.dy, queries.clone(), memory.panel);
            panels.rows(self.v, seen.clone(), memory.panel, ds);
            panels.pack(&self.y, queries.clone(), memory.rows);
            (self.shared.routines.score_gradients)(&ScoreGradients {
                weights: p,
                gradients: ds,
                width: nr,
                keys: seen.len(),
                sums: sums.as_ptr(),
                y: memory.rows,
                dy: memory.panel,
                columns: sizes.width,
                scale: self.scores.scale,
            });
            panels.columns(self.k, seen.clone(), ds, memory.panel);
            panels.unpack(memory.panel, &self.dq, queries, memory.rows);
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
        seen
    }

    /// Adds `Σ_q block(q, key) · rows(q)` to the sums of every key, for the first `count` queries q of
    /// the block.
    ///
    /// # Safety
    /// The memory is the caller's, and has values of the keys that a panel sees.
    unsafe fn add(
        &self,
        seen: &[Range<usize>; PANELS],
        count: usize,
        block: *const f32,
        rows: *const f32,
        sums: *mut f32,
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
        let last = all.map(|seen| seen.end).max().unwrap_or(0);
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
                let left = Left {
                    base: block.wrapping_add(from / nr * panel + key * nr),
                    rows: offsets.as_ptr(),
                    steps: steps.as_ptr(),
                };
                let right = Right::packed(rows.wrapping_add(from * stride + column), stride);
                let to_sums = sums.wrapping_add(key * stride + column);
                let kernel = micro.kernel(true, keys.len(), &right, width);
                // SAFETY: the caller's promise; the tables cover these rows and steps.
                unsafe { kernel(to - from, left, right, to_sums, stride, Before::Term) };
            }
        }
    }
}
