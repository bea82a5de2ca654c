//! The positions of true elements: counts per chunk, their prefix sums, then the positions of each
//! chunk (compaction by prefix sums; Blelloch 1990). A mask of one chunk takes one kernel.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Nonzero, Spec, SpecError};

use super::THREADS;
use super::elementwise::blocks;
use super::params::{Number, Params};
use super::space::Space;
use crate::abi::{Dispatch, Function, Target, Word};
use crate::code::Storage;
use crate::lowered::Lowered;

/// Elements of a chunk.
const CHUNK: i64 = 8 * THREADS as i64;

/// A mask in the order of its positions.
struct Mask<'a> {
    nonzero: &'a Nonzero,
    space: Space,
    access: usize,
}

fn chunks(points: i64) -> i64 {
    (points as u64).div_ceil(CHUNK as u64) as i64
}

impl<'a> Mask<'a> {
    fn new(nonzero: &'a Nonzero) -> Mask<'a> {
        let mut space = Space::over(&nonzero.space);
        let access = space.push(nonzero.mask.offset, &nonzero.mask.strides);
        if space.merge(0, space.dims.len()) == 0 {
            space.insert(0);
        }
        Mask {
            nonzero,
            space,
            access,
        }
    }

    /// Declares the mask, `count`, `chunks` and, with a workspace, `starts`.
    fn declare(&self, params: &mut Params, starts: bool) -> String {
        let all = self.space.clone();
        let count: Number = Arc::new(move |env| all.points(env));
        let mut text = params.pointer(
            "mask",
            &format!("const {}", Storage::of(self.nonzero.mask.dtype).ty),
            0,
        );
        let _ = writeln!(
            text,
            "const idx count = {}, chunks = (count + {}) / {CHUNK};",
            params.number(&count),
            CHUNK - 1
        );
        if starts {
            let _ = writeln!(
                text,
                "int* const starts = reinterpret_cast<int*>({});",
                params.address(Word::Workspace(0))
            );
        }
        text
    }

    /// The iterations over a chunk: in each, a thread has the element `i`, and `flag` says whether
    /// it is true.
    fn rounds(&self, params: &mut Params, each: &str) -> String {
        let (text, coordinates) = params.coordinates("i", &self.space.dims, "c");
        let value = format!(
            "mask[{}]",
            self.space.place(params, self.access, &coordinates)
        );
        format!(
            "for (int round = 0; round < {}; ++round) {{\nconst idx i = chunk * {CHUNK} + round * {THREADS} + threadIdx.x;\n\
             bool flag = false;\nif (i < count) {{\n{text}flag = {} != 0;\n}}\n{each}}}\n",
            CHUNK / i64::from(THREADS),
            value
        )
    }

    fn count(&self, params: &mut Params) -> Function {
        let mut body = self.declare(params, true);
        body +=
            "for (idx chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {\nint found = 0;\n";
        body += &self.rounds(params, "found += __syncthreads_count(flag);\n");
        body += "if (threadIdx.x == 0) starts[chunk] = found;\n}\n";
        params.function("nonzero_count", THREADS, &body)
    }

    fn scan(&self, params: &mut Params) -> Function {
        let mut body = self.declare(params, true);
        let _ = writeln!(
            body,
            "__shared__ int sums[{THREADS}];\nscan_counts<{THREADS}>(starts, chunks, 0, sums);"
        );
        params.function("nonzero_scan", THREADS, &body)
    }

    /// Positions beyond the result's length are not written, and elements without a position are 0.
    fn write(&self, params: &mut Params, room: Size, alone: bool) -> Function {
        let mut body = self.declare(params, !alone);
        body += &params.pointer("positions", "int", 1);
        let positions = &self.nonzero.positions;
        let _ = writeln!(
            body,
            "const idx room = {};\n__shared__ int ends[{THREADS} / WAVE];",
            params.size(room)
        );
        let mut place = |at: &str| {
            format!(
                "positions[{}]",
                params.dot(&positions.strides, &[at.to_string()], positions.offset)
            )
        };
        let (written, cleared) = (place("idx(to)"), place("i"));
        let each = format!(
            "const int to = place_true<{THREADS}>(flag, next, ends);\nif (flag && to < room) {written} = int(i);\n"
        );
        if alone {
            body += "int next = 0;\nfor (idx chunk = 0; chunk < chunks; ++chunk) {\n";
        } else {
            body += "for (idx chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {\nint next = starts[chunk];\n";
        }
        body += &self.rounds(params, &each);
        let total = if alone { "next" } else { "starts[chunks]" };
        let _ = writeln!(
            body,
            "}}\nconst idx thread = idx(blockIdx.x) * {THREADS} + threadIdx.x, threads = idx(gridDim.x) * {THREADS};"
        );
        let _ = writeln!(
            body,
            "for (idx i = {total} + thread; i < room; i += threads) {cleared} = 0;"
        );
        params.function("nonzero_write", THREADS, &body)
    }
}

pub fn lower(
    spec: &Spec,
    nonzero: &Nonzero,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let mask = Mask::new(nonzero);
    let mut write = Params::new(spec, bounds, target);
    let (mut count, mut scan) = (write.clone(), write.clone());
    let dispatch = |function, blocks, params: &Params, env: &Env| {
        Dispatch::new(function, blocks, THREADS, params.words(env))
    };
    let most = chunks(mask.space.points(bounds));
    if most <= 1 {
        let function = mask.write(&mut write, spec.dims[0], true);
        return Ok(Lowered::new(vec![function], 0, move |env| {
            vec![dispatch(0, 1, &write, env)]
        }));
    }
    let functions = vec![
        mask.count(&mut count),
        mask.scan(&mut scan),
        mask.write(&mut write, spec.dims[0], false),
    ];
    let workspace = (most as u64 + 1) * 4;
    let (target, space) = (*target, mask.space.clone());
    Ok(Lowered::new(functions, workspace, move |env| {
        let blocks = blocks(chunks(space.points(env)), 1, &target);
        vec![
            dispatch(0, blocks, &count, env),
            dispatch(1, 1, &scan, env),
            dispatch(2, blocks.max(1), &write, env),
        ]
    }))
}
