//! Loops over steps: the launches of every call in every step, with the addresses of that step.

use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Argument, Call, Located, Place, Scan, SpecError};

use crate::abi::{Dispatch, Target, Word};
use crate::lowered::Lowered;

/// Kernels rely on arguments that begin at multiples of this.
const ALIGN: i64 = 16;

/// The launches of all steps, one after the other.
pub(super) fn lower(scan: &Scan, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
    check_alignment(scan)?;
    let mut functions = Vec::new();
    let mut calls: Vec<(Call, Lowered, usize)> = Vec::with_capacity(scan.calls.len());
    for call in &scan.calls {
        let mut lowered = super::lower(&call.spec, bounds, target)?;
        if lowered.workspace > call.workspace_bytes {
            return Err(SpecError::Scan(format!(
                "a call needs a workspace of {} bytes and has {}",
                lowered.workspace, call.workspace_bytes
            )));
        }
        let first = functions.len();
        functions.append(&mut lowered.functions);
        calls.push((call.clone(), lowered, first));
    }
    let scan = scan.clone();
    let workspace = scan.scratch;
    // Calls run one after the other, and each leaves its counters at zero.
    let counters = calls.iter().map(|call| call.1.counters).max();
    let lowered = Lowered::new(functions, workspace, move |env| {
        let mut launches = Vec::new();
        let each: Vec<Vec<Dispatch>> = calls.iter().map(|call| call.1.launches(env)).collect();
        for step in 0..scan.steps {
            for ((call, _, first), each) in calls.iter().zip(&each) {
                launches.extend(each.iter().map(|dispatch| {
                    let mut dispatch = dispatch.clone();
                    dispatch.function += first;
                    for word in &mut dispatch.words {
                        *word = place(&scan, call, step, env, *word);
                    }
                    dispatch
                }));
            }
        }
        launches
    });
    Ok(lowered.with_counters(counters.unwrap_or(0)))
}

/// A word of a call's launch as one of the loop's in a step.
fn place(scan: &Scan, call: &Call, step: u32, env: &Env, word: Word) -> Word {
    let argument = |at: u16, more: u64| {
        let place = &call.places[usize::from(at)];
        match scan.locate(place, step, env) {
            Located::Argument {
                argument, offset, ..
            } => Word::Part(argument, offset + more),
            Located::Scratch(scratch) => Word::Workspace(scratch.offset + more),
        }
    };
    match word {
        Word::Argument(at) => argument(at, 0),
        Word::Part(at, offset) => argument(at, offset),
        Word::Workspace(offset) => Word::Workspace(call.workspace + offset),
        other => other,
    }
}

/// Fails unless every part of an argument begins at a multiple of [`ALIGN`] bytes.
fn check_alignment(scan: &Scan) -> Result<(), SpecError> {
    let aligned = |at: u16, parts: bool| {
        let Argument { operand, .. } = &scan.arguments[usize::from(at)];
        let stride = operand.strides.first().filter(|_| parts);
        [Some(&operand.offset), stride]
            .into_iter()
            .flatten()
            .all(|size| {
                let bytes = size.as_fixed().map(|n| n * operand.dtype.bytes() as i64);
                bytes.is_some_and(|bytes| bytes % ALIGN == 0)
            })
    };
    let places = scan.calls.iter().flat_map(|call| &call.places);
    for place in places {
        let fits = match place {
            Place::Whole(at) => aligned(*at, false),
            Place::Step(at) => aligned(*at, true),
            Place::Neighbour { of, first, .. } => aligned(*of, true) && aligned(*first, false),
            Place::Found { first, .. } => aligned(*first, false),
            Place::Left(_) | Place::Scratch(_) => true,
        };
        if !fits {
            return Err(SpecError::unsupported(format!(
                "a scan on a CUDA device needs slices of fixed length whose bytes are a multiple \
                 of {ALIGN}"
            )));
        }
    }
    Ok(())
}
