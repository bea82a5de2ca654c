//! Running sums and the like along the last axis.
//!
//! A block walks along a row, tile by tile: the states of a tile are joined in shared memory in
//! log₂ steps (Hillis and Steele 1986), and the last one is carried to the next tile. How states
//! are joined follows from the length alone. States of a linear recurrence cannot be joined without
//! overflow of the products of factors, so a thread walks along its row.

use std::fmt::Write as _;

use slabwise_kernels::dtype::Lane;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Scan, ScanOp, Spec, SpecError};

use super::THREADS;
use super::elementwise::blocks;
use super::params::Params;
use super::space::{Space, points};
use crate::abi::{Dispatch, Target};
use crate::code::{Storage, lane_type};
use crate::lowered::Lowered;

pub fn lower(
    spec: &Spec,
    scan: &Scan,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let last = spec.dims.len() - 1;
    let mut params = Params::new(spec, bounds, target);
    let mut outer = Space::over(&spec.dims[..last]);
    let operands = [Some(&scan.source), scan.factor.as_ref(), Some(&scan.result)];
    let accesses = operands.map(|o| o.map(|o| outer.push(o.offset, &o.strides[..last])));
    let (rows, len) = (spec.dims[..last].to_vec(), spec.dims[last]);
    let storage = Storage::of(scan.source.dtype);
    let lane = lane_type(scan.source.dtype.lane());
    let linear = scan.op == ScanOp::Linear;
    let result = 1 + usize::from(linear);
    let mut body = params.pointer("source", &format!("const {}", storage.ty), 0);
    if linear {
        body += &params.pointer("factors", &format!("const {}", storage.ty), 1);
    }
    body += &params.pointer("result", Storage::of(scan.result.dtype).ty, result);
    let count: Vec<String> = rows.iter().map(|&d| params.size(d)).collect();
    let count = if count.is_empty() {
        "1".into()
    } else {
        count.join(" * ")
    };
    let _ = writeln!(
        body,
        "const idx rows = {count}, len = {};",
        params.size(len)
    );
    let (text, coordinates) = params.coordinates("row", &outer.dims, "c");
    let mut element = |name: &str, k: usize| {
        let first = accesses[k].map(|access| outer.place(&mut params, access, &coordinates));
        let strides = operands[k].map_or(Size::ZERO, |o| o.strides[last]);
        let along = params.dot(&[strides], &["at".to_string()], Size::ZERO);
        format!("{name}[{} + {along}]", first.unwrap_or_default())
    };
    let x = storage.widen(&element("source", 0));
    let to = element("result", 2);
    let at = if scan.reverse { "len - 1 - k" } else { "k" };
    if linear {
        let factor = storage.widen(&element("factors", 1));
        let _ = writeln!(
            body,
            "const idx threads = idx(gridDim.x) * {THREADS};\n\
             for (idx row = idx(blockIdx.x) * {THREADS} + threadIdx.x; row < rows; row += threads) {{\n\
             {text}{lane} state = 0;\nfor (idx k = 0; k < len; ++k) {{\nconst idx at = {at};\n\
             const {lane} next = step_linear(state, {factor}, {x});\n\
             {to} = {};\nstate = next;\n}}\n}}",
            if scan.exclusive { "state" } else { "next" }
        );
    } else {
        let (state, none, of) = match (scan.op, scan.source.dtype.lane()) {
            (ScanOp::LogSumExp, _) => (
                "ScanExponentials",
                "__int_as_float(0xff800000), 0.0f",
                "scan_exponential",
            ),
            (ScanOp::ArgMax, _) => ("ScanRank", "0, -1", "scan_largest"),
            (ScanOp::ArgMin, _) => ("ScanRank", "0, -1", "scan_smallest"),
            (_, Lane::F32) => ("ScanSum<float>", "0.0f", "scan_sum"),
            _ => ("ScanSum<int>", "0", "scan_sum"),
        };
        let (kept, before) = if scan.exclusive {
            let before = format!(
                "const {state} before = t == 0 ? carried : scan_join(carried, states[t - 1]);\n"
            );
            ("before", before)
        } else {
            ("own", String::new())
        };
        let _ = writeln!(
            body,
            "__shared__ {state} states[{THREADS}];\nconst int t = threadIdx.x;\n\
             for (idx row = blockIdx.x; row < rows; row += gridDim.x) {{\n{text}\
             {state} carried = {{{none}}};\n\
             for (idx base = 0; base < len; base += {THREADS}) {{\n\
             const idx k = base + t, at = {at};\n\
             if (k < len) states[t] = {of}({x}, int(at));\n\
             else states[t] = {state}{{{none}}};\n\
             scan_states<{THREADS}>(states);\n\
             const {state} own = scan_join(carried, states[t]);\n\
             {before}carried = scan_join(carried, states[{THREADS} - 1]);\n\
             if (k < len) {to} = scan_result({kept});\n__syncthreads();\n}}\n}}"
        );
    }
    let function = params.function("scan", THREADS, &body);
    let target = *target;
    Ok(Lowered::new(vec![function], 0, move |env| {
        let each = if linear { THREADS } else { 1 };
        let blocks = if len.at(env) > 0 {
            blocks(points(&rows, env), each, &target)
        } else {
            0
        };
        vec![Dispatch::new(0, blocks, THREADS, params.words(env))]
    }))
}
