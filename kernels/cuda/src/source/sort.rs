//! The sort order (argsort) of elements along the last axis.
//!
//! As on the CPU, an element becomes a 64-bit number: an order-preserving integer image of its
//! value in the upper half, its position in the lower half. No two keys are equal, so every sort of
//! them is stable. Rows of one chunk are sorted in shared memory, several per block if they are
//! short. The chunks of longer rows are merged pairwise, alternating between two halves of the
//! workspace.

use std::fmt::Write as _;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Sort, Spec, SpecError};

use super::THREADS;
use super::elementwise::blocks;
use super::params::Params;
use super::space::{Space, points};
use crate::abi::{Dispatch, Function, Target, Word};
use crate::code::Storage;
use crate::lowered::Lowered;

/// Most keys that a block sorts: two for each thread of the largest block.
const CHUNK: i64 = 2048;
/// Keys that a thread merges.
const ITEMS: i64 = 8;

struct Rows<'a> {
    sort: &'a Sort,
    /// The axes except the last, with accesses to the source and the positions.
    outer: Space,
    len: Size,
    /// How many of the elements in their order are wanted.
    wanted: Size,
}

/// The destination of a pass.
#[derive(Clone, Copy, PartialEq)]
enum Destination {
    Workspace(Word),
    /// The result, as positions: the last pass.
    Positions,
}

impl Rows<'_> {
    /// Declares `rows`, `len` and the pointers to the destination of the pass.
    fn declare(&self, params: &mut Params, to: Destination) -> String {
        let rows: Vec<String> = self.outer.dims.iter().map(|&d| params.size(d)).collect();
        let rows = if rows.is_empty() {
            "1".into()
        } else {
            rows.join(" * ")
        };
        let mut text = format!(
            "const idx rows = {rows}, len = {};\n",
            params.size(self.len)
        );
        match to {
            Destination::Workspace(word) => {
                let _ = writeln!(
                    text,
                    "u64* const sorted = reinterpret_cast<u64*>({});",
                    params.address(word)
                );
            }
            Destination::Positions => text += &params.pointer("positions", "int", 1),
        }
        text
    }

    /// Stores key `key` at position `at` of row `row`, whose coordinates are declared.
    fn leave(
        &self,
        params: &mut Params,
        to: Destination,
        coordinates: &[String],
        at: &str,
        key: &str,
    ) -> String {
        match to {
            Destination::Workspace(_) => format!("sorted[row * len + {at}] = {key};\n"),
            Destination::Positions => {
                let (row, last) = (
                    self.outer.place(params, 1, coordinates),
                    self.outer.dims.len(),
                );
                let along = params.dot(
                    &self.sort.positions.strides[last..],
                    &[at.to_string()],
                    Size::ZERO,
                );
                // All of them, or the first ones.
                let when = if self.wanted == self.len {
                    String::new()
                } else {
                    format!("if ({at} < {}) ", params.size(self.wanted))
                };
                format!("{when}positions[{row} + {along}] = int({key});\n")
            }
        }
    }

    /// Sorts chunks of rows, `each` of them concurrently, of `count` keys at most.
    fn chunks(&self, params: &mut Params, count: i64, each: i64, to: Destination) -> Function {
        let (storage, team) = (Storage::of(self.sort.source.dtype), count / 2);
        let mut body = params.pointer("source", &format!("const {}", storage.ty), 0)
            + &self.declare(params, to);
        let chunks = if to == Destination::Positions {
            "1".to_string()
        } else {
            format!("(len + {}) / {CHUNK}", CHUNK - 1)
        };
        let _ = writeln!(
            body,
            "const idx chunks = {chunks}, parts = rows * chunks;\n__shared__ u64 keys[{}];",
            count * each
        );
        let _ = writeln!(
            body,
            "const int local = threadIdx.x / {team}, m = threadIdx.x % {team};\nu64* const own = keys + local * {count};"
        );
        let _ = writeln!(
            body,
            "for (idx base = idx(blockIdx.x) * {each}; base < parts; base += idx(gridDim.x) * {each}) {{"
        );
        body += "const bool live = base + local < parts;\nconst idx part = live ? base + local : parts - 1;\n";
        let _ = writeln!(
            body,
            "const idx row = part / chunks, first = part % chunks * {CHUNK};"
        );
        let (text, coordinates) = params.coordinates("row", &self.outer.dims, "c");
        let (from, last) = (
            self.outer.place(params, 0, &coordinates),
            self.outer.dims.len(),
        );
        let along = params.dot(
            &self.sort.source.strides[last..],
            &["k".to_string()],
            Size::ZERO,
        );
        let flip = if self.sort.descending {
            "0xffffffffu"
        } else {
            "0u"
        };
        let value = storage.widen(&format!("source[from + {along}]"));
        let _ = writeln!(
            body,
            "{text}const idx from = {from};\n#pragma unroll\nfor (int half = 0; half < 2; ++half) {{"
        );
        let _ = writeln!(
            body,
            "const int at = m + half * {team};\nconst idx k = first + at;"
        );
        let _ = writeln!(
            body,
            "own[at] = k < len ? sort_key({value}, int(k), {flip}) : ~0ull;\n}}\nsort_bitonic<{count}>(own, m);"
        );
        let leave = self.leave(params, to, &coordinates, "k", "own[at]");
        let _ = writeln!(
            body,
            "if (live) {{\n#pragma unroll\nfor (int half = 0; half < 2; ++half) {{"
        );
        let _ = writeln!(
            body,
            "const int at = m + half * {team};\nconst idx k = first + at;\nif (k < len) {leave}}}\n}}"
        );
        // The next part must not overwrite data that is still being read.
        body += "__syncthreads();\n}\n";
        params.function("sort_chunks", team * each, &body)
    }

    /// Merges neighbouring runs pairwise; the length of a run is a word of the launch.
    fn merge(&self, params: &mut Params, from: Word, to: Destination) -> Function {
        let mut body = self.declare(params, to);
        let _ = writeln!(
            body,
            "const u64* const keys = reinterpret_cast<const u64*>({});",
            params.address(from)
        );
        let run = params.word(RUN);
        let _ = writeln!(
            body,
            "const idx run = idx(p.w[{run}]), tiles = (len + {}) / {ITEMS}, items = rows * tiles;",
            ITEMS - 1
        );
        let _ = writeln!(body, "const idx threads = idx(gridDim.x) * {THREADS};");
        let _ = writeln!(
            body,
            "for (idx item = idx(blockIdx.x) * {THREADS} + threadIdx.x; item < items; item += threads) {{"
        );
        let _ = writeln!(
            body,
            "const idx row = item / tiles, first = item % tiles * {ITEMS}, pair = first / (2 * run) * (2 * run);"
        );
        let (text, coordinates) = params.coordinates("row", &self.outer.dims, "c");
        body += &text;
        body += "const idx a_len = min(run, idx(len - pair)), b_len = min(run, idx(len - pair - a_len)), diagonal = first - pair;\n";
        body += "const u64 *const a = keys + row * len + pair, *const b = a + a_len;\n";
        body += "idx i = merge_split<idx>(a, a_len, b, b_len, diagonal), j = diagonal - i;\n";
        let _ = writeln!(
            body,
            "for (idx k = first; k < min(idx(first + {ITEMS}), len); ++k) {{"
        );
        body += "const bool left = j >= b_len || (i < a_len && a[i] < b[j]);\nconst u64 key = left ? a[i] : b[j];\n";
        body += "i += left;\nj += !left;\n";
        body += &self.leave(params, to, &coordinates, "k", "key");
        body += "}\n}\n";
        params.function("sort_merge", THREADS, &body)
    }
}

/// A placeholder for the length of the runs that a pass merges.
const RUN: Word = Word::Number(-1);

pub fn lower(
    spec: &Spec,
    sort: &Sort,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let last = spec.dims.len() - 1;
    let mut outer = Space::over(&spec.dims[..last]);
    for operand in [&sort.source, &sort.positions] {
        outer.push(operand.offset, &operand.strides[..last]);
    }
    let (rows, len) = (spec.dims[..last].to_vec(), sort.len);
    let own = Rows {
        sort,
        outer,
        len,
        wanted: spec.dims[last],
    };
    let longest = len.at(bounds).max(1);
    let count = (longest.min(CHUNK) as u64).next_power_of_two().max(2) as i64;
    let each = (i64::from(THREADS) / (count / 2)).max(1);
    let threads = (count / 2 * each) as u32;
    let mut short = Params::new(spec, bounds, target);
    let fresh = short.clone();
    let mut functions = vec![own.chunks(&mut short, count, each, Destination::Positions)];
    let target = *target;
    if longest <= CHUNK {
        return Ok(Lowered::new(functions, 0, move |env| {
            let blocks = if len.at(env) > 0 {
                blocks(points(&rows, env), each as u32, &target)
            } else {
                0
            };
            vec![Dispatch::new(0, blocks, threads, short.words(env))]
        }));
    }
    let half = (points(&rows, bounds)
        .saturating_mul(longest)
        .saturating_mul(8) as u64)
        .next_multiple_of(256);
    let halves = [Word::Workspace(0), Word::Workspace(half)];
    let (mut chunks, mut merge, mut merge_last) = (fresh.clone(), fresh.clone(), fresh);
    functions.push(own.chunks(&mut chunks, count, each, Destination::Workspace(halves[0])));
    functions.push(own.merge(&mut merge, halves[0], Destination::Workspace(halves[1])));
    functions.push(own.merge(&mut merge_last, halves[0], Destination::Positions));
    let (run_at, last_run_at) = (merge.word(RUN), merge_last.word(RUN));
    Ok(Lowered::new(
        functions,
        half.saturating_mul(2),
        move |env| {
            let (rows, len) = (points(&rows, env), len.at(env).max(0));
            let parts = rows.saturating_mul((len as u64).div_ceil(CHUNK as u64) as i64);
            if len <= CHUNK {
                let blocks = if len > 0 { blocks(rows, 1, &target) } else { 0 };
                return vec![Dispatch::new(0, blocks, threads, short.words(env))];
            }
            let mut launches = vec![Dispatch::new(
                1,
                blocks(parts, 1, &target),
                threads,
                chunks.words(env),
            )];
            let items = rows.saturating_mul((len as u64).div_ceil(ITEMS as u64) as i64);
            let (mut run, mut turn) = (CHUNK, 0);
            while run < len {
                let is_last = 2 * run >= len;
                let (mut words, run_at) = if is_last {
                    (merge_last.words(env), last_run_at)
                } else {
                    (merge.words(env), run_at)
                };
                words[run_at] = Word::Number(run);
                if turn == 1 {
                    // Each pass reads the output of the previous one.
                    let other = |word: Word| {
                        halves
                            .iter()
                            .position(|half| *half == word)
                            .map_or(word, |at| halves[1 - at])
                    };
                    words.iter_mut().for_each(|word| *word = other(*word));
                }
                launches.push(Dispatch::new(
                    if is_last { 3 } else { 2 },
                    blocks(items, THREADS, &target),
                    THREADS,
                    words,
                ));
                (run, turn) = (2 * run, 1 - turn);
            }
            launches
        },
    ))
}
