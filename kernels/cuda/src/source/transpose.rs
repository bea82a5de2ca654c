//! Elementwise loops with operands that are contiguous along another axis than the result: tiles of
//! them go through shared memory, so that both reads and writes are contiguous.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::size::Env;

use super::SharedLoop;
use super::params::{Number, Params};
use super::space::{Point, Space, Via, pointers};
use crate::abi::{Dispatch, Function, Target};
use crate::code::Code;
use crate::lowered::Lowered;

/// Sides of a tile.
const SIDE: i64 = 32;
/// Threads of a block: rows of a tile that are moved concurrently, times its side.
const THREADS: u32 = 256;
/// Axes shorter than this waste most of a tile.
const SHORTEST: i64 = 8;
/// Most operands whose tiles fit in static shared memory.
const OPERANDS: usize = 8;

/// The axis along which such operands are contiguous, and the operands.
pub struct Across {
    axis: usize,
    operands: Vec<u16>,
}

/// The operands that should go through tiles.
pub fn across(code: &Code, space: &Space, bounds: &Env) -> Option<Across> {
    let last = space.dims.len() - 1;
    let long = |axis: usize| space.dims[axis].at(bounds) >= SHORTEST;
    let runs_along = |k: u16, axis: usize| {
        let along = space.stride(k, last);
        space.stride(k, axis).is(1) && !along.is(0) && !along.is(1)
    };
    let loads = code.loads();
    let axis = (0..last)
        .filter(|&axis| long(axis))
        .max_by_key(|&axis| loads.iter().filter(|&&k| runs_along(k, axis)).count())?;
    let operands: Vec<u16> = loads.into_iter().filter(|&k| runs_along(k, axis)).collect();
    (long(last) && (1..=OPERANDS).contains(&operands.len())).then_some(Across { axis, operands })
}

/// A loop over tiles of `across.axis` and the last axis.
pub fn lower(
    code: &Code,
    space: &Space,
    mut params: Params,
    across: Across,
    target: &Target,
) -> Lowered {
    let (function, count) = tiles("transpose", code, space, &mut params, across);
    let target = *target;
    Lowered::new(vec![function], 0, move |env| {
        let blocks = super::elementwise::blocks(count(env), 1, &target);
        vec![Dispatch::new(0, blocks, THREADS, params.words(env))]
    })
}

/// The same loop as a function that several specs may share.
pub fn lower_shared(
    code: &Code,
    space: &Space,
    params: Params,
    across: Across,
    target: &Target,
) -> SharedLoop {
    let mut params = params.shared();
    let (function, count) = tiles("transpose_many", code, space, &mut params, across);
    let target = *target;
    SharedLoop {
        function,
        params,
        threads: THREADS,
        shared_bytes: 0,
        blocks: Box::new(move |env| super::elementwise::blocks(count(env), 1, &target)),
    }
}

/// The function of this kind for a loop, and the number of tiles.
fn tiles(
    kind: &str,
    code: &Code,
    space: &Space,
    params: &mut Params,
    across: Across,
) -> (Function, Number) {
    let last = space.dims.len() - 1;
    let (rows, columns) = (space.dims[across.axis], space.dims[last]);
    // The other axes, then the tiles along the two.
    let others: Vec<usize> = (0..last).filter(|&axis| axis != across.axis).collect();
    let tiles_of = move |size: slabwise_kernels::size::Size| -> Number {
        Arc::new(move |env: &Env| size.at(env).max(0).saturating_add(SIDE - 1) / SIDE)
    };
    let (row_tiles, column_tiles) = (tiles_of(rows), tiles_of(columns));
    let outer: Vec<_> = others.iter().map(|&axis| space.dims[axis]).collect();
    let count: Number = {
        let (row_tiles, column_tiles) = (row_tiles.clone(), column_tiles.clone());
        Arc::new(move |env| {
            super::space::points(&outer, env)
                .saturating_mul(row_tiles(env))
                .saturating_mul(column_tiles(env))
        })
    };

    let mut body = pointers(code, params);
    let (row_count, column_count) = (params.size(rows), params.size(columns));
    let mut sizes: Vec<String> = others
        .iter()
        .map(|&axis| params.size(space.dims[axis]))
        .collect();
    sizes.extend([params.number(&row_tiles), params.number(&column_tiles)]);
    let (text, at) = Params::split("tile", &sizes, "t");
    for &k in &across.operands {
        let _ = writeln!(
            body,
            "__shared__ {} tile{k}[{SIDE}][{}];",
            code.storage(k).ty,
            SIDE + 1
        );
    }
    let _ = writeln!(
        body,
        "const int tx = threadIdx.x % {SIDE}, ty = threadIdx.x / {SIDE};\nconst idx count = {};",
        params.number(&count)
    );
    let _ = writeln!(
        body,
        "for (idx tile = blockIdx.x; tile < count; tile += gridDim.x) {{\n{text}"
    );
    let _ = writeln!(
        body,
        "const idx row = {} * {SIDE}, column = {} * {SIDE};",
        at[others.len()],
        at[others.len() + 1]
    );
    let mut coordinates = vec![String::new(); space.dims.len()];
    others
        .iter()
        .zip(&at)
        .for_each(|(&axis, at)| coordinates[axis] = at.clone());
    (coordinates[across.axis], coordinates[last]) = ("r".into(), "c".into());
    let point = Point::new(space, params, &coordinates, "");
    let turns = format!(
        "#pragma unroll\nfor (int u = ty; u < {SIDE}; u += {}) {{\n",
        i64::from(THREADS) / SIDE
    );
    let inside = format!("if (r < {row_count} && c < {column_count}) {{\n");
    let _ = write!(
        body,
        "{turns}const idx r = row + tx, c = column + u;\n{inside}"
    );
    for &k in &across.operands {
        let _ = writeln!(body, "tile{k}[u][tx] = a{k}[{}];", point.element(k));
    }
    let _ = write!(
        body,
        "}}\n}}\n__syncthreads();\n{turns}const idx r = row + u, c = column + tx;\n{inside}"
    );
    let through = |k: u16| {
        across
            .operands
            .contains(&k)
            .then(|| format!("tile{k}[tx][u]"))
    };
    body += &code.point(&Via {
        point,
        read: &through,
        write: &|_| None,
    });
    // The next tile must not overwrite data that is still being read.
    body += "}\n}\n__syncthreads();\n}\n";
    (params.function(kind, THREADS, &body), count)
}
