//! Prefix reductions (running sums and others) along the last axis.
//!
//! A block walks along a row, tile by tile: the states of a tile are joined in shared memory in
//! log₂ steps (Hillis and Steele 1986), and the last one is carried to the next tile. The order in
//! which states are combined depends on the length alone, except for a linear recurrence: where a
//! tile has factors above 1 and joined sums could cancel, one thread takes its steps one after the
//! other.

use std::fmt::Write as _;

use slabwise_kernels::dtype::Lane;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{PrefixOp, PrefixReduce, Spec, SpecError};

use super::THREADS;
use super::elementwise::blocks;
use super::params::Params;
use super::space::{Space, points};
use crate::abi::{Dispatch, Target};
use crate::code::{Storage, lane_type};
use crate::lowered::Lowered;

pub fn lower(
    spec: &Spec,
    scan: &PrefixReduce,
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
    let linear = scan.op == PrefixOp::Linear;
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
        let kept = if scan.exclusive {
            "t == 0 ? entering : scan_behind(carried, states[t - 1])"
        } else {
            "scan_behind(carried, states[t])"
        };
        // The first factor meets no state.
        let _ = writeln!(
            body,
            "__shared__ ScanLinear<{lane}> states[{THREADS}];\nconst int t = threadIdx.x;\n\
             for (idx row = blockIdx.x; row < rows; row += gridDim.x) {{\n{text}\
             {lane} carried = 0;\n\
             for (idx base = 0; base < len; base += {THREADS}) {{\n\
             const idx k = base + t, at = {at};\nconst {lane} entering = carried;\n\
             if (k >= len) states[t] = scan_linear({lane}(1), {lane}(0));\n\
             else if (k == 0) states[t] = scan_linear({lane}(0), {x});\n\
             else states[t] = scan_linear({factor}, {x});\n\
             if (scan_walks(states[t], k == 0)) {{\n\
             scan_walk<{THREADS}>(entering, states);\ncarried = 0;\n\
             }} else scan_states<{THREADS}>(states);\n\
             if (k < len) {to} = {kept};\n\
             carried = scan_behind(carried, states[{THREADS} - 1]);\n__syncthreads();\n}}\n}}"
        );
    } else {
        let (state, none, of) = match (scan.op, scan.source.dtype.lane()) {
            (PrefixOp::LogSumExp, _) => (
                "ScanExponentials",
                "__int_as_float(0xff800000), 0.0f",
                "scan_exponential",
            ),
            (PrefixOp::ArgMax, _) => ("ScanRank", "0, -1", "scan_largest"),
            (PrefixOp::ArgMin, _) => ("ScanRank", "0, -1", "scan_smallest"),
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
        let blocks = if len.at(env) > 0 {
            blocks(points(&rows, env), 1, &target)
        } else {
            0
        };
        vec![Dispatch::new(0, blocks, THREADS, params.words(env))]
    }))
}
