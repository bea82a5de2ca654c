//! Non-maximum suppression: boxes are processed in order of preference, and a box is kept unless a
//! kept box before it overlaps it too much.
//!
//! Boxes are processed in panels. For each panel one kernel computes, as bits, whether each box of
//! the panel overlaps each later box too much; a second kernel, of one block, iterates over the
//! panel in order and suppresses the boxes that kept boxes overlap. The result is that of the
//! sequential algorithm.

use std::fmt::Write as _;

use slabwise_kernels::scalar::Value;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{NonMaxSuppression, Spec, SpecError};

use super::THREADS;
use super::params::Params;
use crate::abi::{Dispatch, Function, Target, Word};
use crate::code::constant;
use crate::lowered::Lowered;

/// Boxes whose bits form one word.
const WORD: i64 = 64;
/// Boxes of a panel.
const PANEL: i64 = 1024;
/// A placeholder for the first box of a launch's panel.
const FIRST: Word = Word::Number(-1);

/// Declares the number of boxes, the number of bit words, and the first box of the panel.
fn declare(spec: &Spec, params: &mut Params, bits: Word) -> String {
    let first = params.word(FIRST);
    let count = params.size(spec.dims[0]);
    let bits = params.address(bits);
    format!(
        "const idx count = {count}, words = (count + {}) / {WORD}, first = idx(p.w[{first}]);\n\
         u64* const bits = reinterpret_cast<u64*>({bits});\nconst int t = threadIdx.x;\n",
        WORD - 1
    )
}

/// The bits of one box and 64 later ones per thread: whether they overlap too much.
fn overlaps(
    spec: &Spec,
    suppress: &NonMaxSuppression,
    params: &mut Params,
    bits: Word,
) -> Function {
    let mut body = params.pointer("corners", "const float", 0) + &declare(spec, params, bits);
    let boxes = &suppress.boxes;
    let mut load = |at: &str| {
        let side = |params: &mut Params, k: usize| {
            format!(
                "corners[{}]",
                params.dot(
                    &boxes.strides,
                    &[at.to_string(), k.to_string()],
                    boxes.offset
                )
            )
        };
        let sides: Vec<String> = (0..4).map(|k| side(params, k)).collect();
        format!("box_of({})", sides.join(", "))
    };
    let (own, other) = (load("i"), load("j"));
    let _ = writeln!(
        body,
        "const idx row = first + idx(blockIdx.y) * {WORD}, word = first / {WORD} + blockIdx.x;"
    );
    // A box is compared only with later ones.
    let _ = writeln!(
        body,
        "if (word * {WORD} < row) return;\n__shared__ Box others[{WORD}];\nconst idx i = row + t, j = word * {WORD} + t;"
    );
    let _ = writeln!(
        body,
        "if (j < count) others[t] = {other};\n__syncthreads();\nif (i >= count) return;\nconst Box own = {own};"
    );
    let _ = writeln!(
        body,
        "const int many = int(min(idx({WORD}), idx(count - word * {WORD})));\nu64 found = 0;"
    );
    let threshold = constant(Value::F32(suppress.threshold));
    let _ = writeln!(
        body,
        "for (int b = int(max(idx(0), idx(i + 1 - word * {WORD}))); b < many; ++b)"
    );
    let _ = writeln!(
        body,
        "if (box_overlap(own, others[b]) > {threshold}) found |= u64(1) << b;"
    );
    body += "bits[(i - first) * words + word] = found;\n";
    params.function("nms_overlaps", WORD, &body)
}

/// Processes a panel in order, by one block. `gone` has a bit for each box that a better one has
/// suppressed.
fn strike(
    spec: &Spec,
    suppress: &NonMaxSuppression,
    params: &mut Params,
    bits: Word,
    gone: Word,
) -> Function {
    let mut body = params.pointer("keep", "unsigned char", 1) + &declare(spec, params, bits);
    let keep = params.dot(
        &suppress.keep.strides,
        &["i".to_string()],
        suppress.keep.offset,
    );
    let _ = writeln!(
        body,
        "u64* const gone = reinterpret_cast<u64*>({});",
        params.address(gone)
    );
    let _ = writeln!(body, "__shared__ u64 own[{WORD}];\n__shared__ u64 stays;");
    let _ = writeln!(
        body,
        "if (first == 0)\nfor (idx w = t; w < words; w += {THREADS}) gone[w] = 0;\n__syncthreads();"
    );
    let _ = writeln!(
        body,
        "const idx end = min(count, idx(first + {PANEL}));\nfor (idx from = first; from < end; from += {WORD}) {{"
    );
    let _ = writeln!(
        body,
        "const idx word = from / {WORD}, i = from + t;\nconst int many = int(min(idx({WORD}), idx(end - from)));"
    );
    body += "if (t < many) own[t] = bits[(i - first) * words + word];\n__syncthreads();\n";
    body += "if (t == 0) {\nu64 struck = gone[word], left = 0;\nfor (int b = 0; b < many; ++b)\nif (!(struck >> b & 1)) {\n";
    body += "left |= u64(1) << b;\nstruck |= own[b];\n}\nstays = left;\n}\n__syncthreads();\n";
    let _ = writeln!(
        body,
        "if (t < many) keep[{keep}] = (unsigned char)(stays >> t & 1);"
    );
    let _ = writeln!(
        body,
        "for (idx w = word + 1 + t; w < words; w += {THREADS}) {{\nu64 struck = gone[w];"
    );
    body += "for (int b = 0; b < many; ++b)\nif (stays >> b & 1) struck |= bits[(from - first + b) * words + w];\ngone[w] = struck;\n}\n";
    body += "__syncthreads();\n}\n";
    params.function("nms_strike", THREADS, &body)
}

pub fn lower(
    spec: &Spec,
    suppress: &NonMaxSuppression,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let count = spec.dims[0];
    let words = move |env: &Env| (count.at(env).max(0) as u64).div_ceil(WORD as u64);
    let gone_bytes = (words(bounds) * 8).next_multiple_of(256);
    let (gone, bits) = (Word::Workspace(0), Word::Workspace(gone_bytes));
    let workspace = gone_bytes + words(bounds) * 8 * count.at(bounds).clamp(0, PANEL) as u64;
    let mut pairs = Params::new(spec, bounds, target);
    let mut panel = pairs.clone();
    let functions = vec![
        overlaps(spec, suppress, &mut pairs, bits),
        strike(spec, suppress, &mut panel, bits, gone),
    ];
    let first_at = [pairs.word(FIRST), panel.word(FIRST)];
    Ok(Lowered::new(functions, workspace, move |env| {
        let (boxes, mut launches) = (count.at(env), Vec::new());
        let dispatch = |function: usize, first: i64, grid, threads, params: &Params| {
            let mut words = params.words(env);
            words[first_at[function]] = Word::Number(first);
            Dispatch {
                grid,
                ..Dispatch::new(function, 0, threads, words)
            }
        };
        let mut first = 0;
        while first < boxes {
            let rows = (boxes - first).min(PANEL).div_euclid(WORD)
                + i64::from((boxes - first).min(PANEL) % WORD > 0);
            let columns = words(env) as u32 - (first / WORD) as u32;
            launches.push(dispatch(
                0,
                first,
                [columns, rows as u32, 1],
                WORD as u32,
                &pairs,
            ));
            launches.push(dispatch(1, first, [1, 1, 1], THREADS, &panel));
            first += PANEL;
        }
        launches
    }))
}
