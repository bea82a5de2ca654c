//! Hints in refusals: the lengths that would have to be fixed.

use slabwise::Trace;
use slabwise::shape::{Dim, Size};

use super::Import;
use crate::array::Array;
use crate::call::{Call, sizes};
use crate::lengths::Lengths;
use crate::ops::Run;
use crate::value::Value;

impl<'t> Import<'_, 't> {
    /// The reason of a refusal, with the option that fixes the length at fault, if a fixed one
    /// would help.
    pub(super) fn with_help(&self, call: &Call<'_, 't>, run: Run, reason: String) -> String {
        let fixed = self.to_be_fixed(call, run, &reason);
        let options: Vec<String> = fixed.iter().map(|name| format!("--dim {name}=N")).collect();
        match (reason.contains("--dim"), &options[..]) {
            (true, _) | (_, []) => reason,
            (_, [_]) => format!(
                "{reason}; with a fixed length it may be expressed ({})",
                options[0]
            ),
            (_, all) => format!(
                "{reason}; with fixed lengths it may be expressed ({})",
                all.join(" ")
            ),
        }
    }

    /// The dimension that has to be fixed so that a refused call can be expressed, or all open ones
    /// of its inputs if one is not enough.
    fn to_be_fixed(&self, call: &Call<'_, 't>, run: Run, reason: &str) -> Vec<&String> {
        let mut unknown = call.inputs.iter().flatten().filter_map(Value::reason);
        if let Some(why) = unknown.find(|why| reason.contains(&why.reason)) {
            // The trial has no value that is computed from lengths: the reason names them.
            let mut open = self.open.iter().filter(|_| why.by_lengths);
            return open
                .find(|name| mentions(reason, name))
                .into_iter()
                .collect();
        }
        let shown: String = (0..call.len())
            .flat_map(|at| {
                let own = call.value(at).and_then(Value::lengths);
                let own = own.map(|lengths| lengths.values.clone());
                let axes = own.is_none().then(|| call.dims(at).unwrap_or_default());
                own.into_iter().chain(axes).flatten()
            })
            .map(|size| format!("{} ", call.trace.show_size(size)))
            .collect();
        let all = self.open.iter().filter(|name| mentions(&shown, name));
        let all: Vec<&String> = all.collect();
        let is_enough = |fixed: &[&String]| is_expressed(call, run, &self.open, fixed);
        match all.iter().find(|name| is_enough(&[name])) {
            Some(name) => vec![*name],
            None if all.len() > 1 && is_enough(&all) => all,
            None => Vec::new(),
        }
    }
}

/// Whether a call can be expressed in a trace of its own, where some of the open dimensions are
/// fixed at their bounds.
fn is_expressed(call: &Call<'_, '_>, run: Run, open: &[String], fixed: &[&String]) -> bool {
    let trace = Trace::inference();
    let dim = |size: Size| {
        let shown = call.trace.show_size(size);
        let most = u32::try_from(call.trace.range_of(size).1).unwrap_or(u32::MAX);
        let is_open = |name: &String| mentions(&shown, name) && !fixed.contains(&name);
        match size.as_fixed() {
            Some(n) => Dim::Fixed(n),
            None if open.iter().any(is_open) => Dim::bounded(Dim::name(&shown), most),
            None => Dim::Fixed(most.into()),
        }
    };
    let declared = |name: String, dtype, sizes: &[Size]| {
        let dims: Vec<Dim> = sizes.iter().map(|&size| dim(size)).collect();
        trace.input(&name, dtype, &dims[..])
    };
    let copied = |at: usize| -> Option<Value<'_>> {
        let value = call.value(at)?;
        if let Some((_, array)) = value.known() {
            return Some(Value::constant(Array::clone(array)));
        }
        if let Some(lengths) = value.lengths() {
            let axes = declared(
                format!("lengths {at}"),
                slabwise::DType::F32,
                &lengths.values,
            );
            return Some(Value::of_lengths(Lengths {
                values: sizes(axes),
                ..lengths.clone()
            }));
        }
        let x = value.traced(call.trace).ok()?;
        let x = declared(format!("input {at}"), x.dtype(), &sizes(x));
        Some(Value::tensor(value.element(), x))
    };
    let inputs: Vec<Option<Value<'_>>> = (0..call.len()).map(copied).collect();
    let is_whole = (0..call.len()).all(|at| call.value(at).is_none() || inputs[at].is_some());
    let copy = Call {
        trace: &trace,
        operator: call.operator,
        opset: call.opset,
        outputs: call.outputs,
        narrow: call.narrow,
        inputs,
        attributes: call.attributes,
    };
    is_whole && run(&copy).is_ok() && trace.mistakes().is_empty()
}

/// Whether a text has this name, not only as a part of a longer one.
fn mentions(text: &str, name: &str) -> bool {
    let is_letter = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(name).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + name.len()..]);
        !before.ends_with(is_letter) && !after.starts_with(is_letter)
    })
}
