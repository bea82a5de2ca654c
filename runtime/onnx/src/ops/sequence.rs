//! Sequences of tensors, and optional values: their elements, number and presence are known when a
//! model is imported, so that none of them is a value of the program.

use super::Run;
use crate::array::{Array, lengths};
use crate::call::{Call, Results, length};
use crate::element::Element;
use crate::value::Value;

pub const OPERATORS: &[(&str, Run)] = &[
    ("ConcatFromSequence", |c| {
        let parts = elements(c, 0)?;
        let first = parts.first().ok_or("a sequence of no elements")?;
        let (element, rank) = (first.element(), first.traced(c.trace)?.rank());
        let parts = parts.iter().map(|part| part.traced(c.trace));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let axis = c.int("axis", 0);
        c.typed(
            element,
            match c.flag("new_axis") {
                true => c.trace.stack(&parts, crate::call::resolve(axis, rank + 1)?),
                false => c.trace.concat(&parts, crate::call::resolve(axis, rank)?),
            },
        )
    }),
    ("Optional", |c| match c.value(0) {
        Some(value) => Ok(vec![value.clone()]),
        None => Err("an optional value that is absent".into()),
    }),
    ("OptionalGetElement", |c| Ok(vec![c.required(0)?.clone()])),
    ("OptionalHasElement", |c| {
        let has = Array::ints(Vec::new(), vec![i64::from(c.value(0).is_some())]);
        Ok(vec![Value::constant(has.cast(Element::Bool))])
    }),
    ("SequenceAt", |c| {
        let all = elements(c, 0)?;
        Ok(vec![all[place(c, 1, all.len(), false)?].clone()])
    }),
    ("SequenceConstruct", |c| {
        let all = (0..c.len()).map(|at| c.required(at).cloned());
        sequence(all.collect::<Result<_, _>>()?)
    }),
    ("SequenceEmpty", |_| sequence(Vec::new())),
    ("SequenceErase", |c| {
        let mut all = elements(c, 0)?.to_vec();
        let last = all
            .len()
            .checked_sub(1)
            .ok_or("a sequence of no elements")?;
        let at = match c.value(1) {
            Some(_) => place(c, 1, all.len(), false)?,
            None => last,
        };
        all.remove(at);
        sequence(all)
    }),
    ("SequenceInsert", |c| {
        let mut all = elements(c, 0)?.to_vec();
        let at = match c.value(2) {
            Some(_) => place(c, 2, all.len(), true)?,
            None => all.len(),
        };
        all.insert(at, c.required(1)?.clone());
        sequence(all)
    }),
    ("SequenceLength", |c| {
        let n = elements(c, 0)?.len() as i64;
        Ok(vec![Value::constant(Array::ints(Vec::new(), vec![n]))])
    }),
    ("SplitToSequence", split),
];

/// The elements of an input that is a sequence.
fn elements<'c, 't>(call: &'c Call<'_, 't>, at: usize) -> Result<&'c [Value<'t>], String> {
    let value = call.required(at)?;
    value
        .sequence()
        .ok_or_else(|| format!("its input {at} is no sequence"))
}

fn sequence<'t>(all: Vec<Value<'t>>) -> Results<'t> {
    Ok(vec![Value::of_sequence(all)])
}

/// A position among `n` elements that may count from the end, or behind the last one.
fn place(call: &Call<'_, '_>, at: usize, n: usize, behind: bool) -> Result<usize, String> {
    let position = call.number(at)?.ok_or("its position is missing")? as i64;
    let found = if position < 0 {
        position.saturating_add(n as i64)
    } else {
        position
    };
    let end = n + usize::from(behind);
    usize::try_from(found)
        .ok()
        .filter(|&found| found < end)
        .ok_or_else(|| format!("position {position} of {n} elements"))
}

/// Most parts of a tensor.
const PARTS_MAX: usize = 1 << 16;

fn split<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let (x, element) = (call.x(0)?, call.element(0)?);
    let axis = call.axis("axis", 0)?;
    let n = length(x, axis)?;
    let many = |parts: usize| match parts > PARTS_MAX {
        true => Err(format!("{parts} parts; up to {PARTS_MAX} can be expressed")),
        false => Ok(()),
    };
    let (parts, keep) = match call.ints(1)? {
        None => {
            many(n)?;
            (vec![1; n], call.int("keepdims", 1) != 0)
        }
        // One length for all parts, of which the last may be shorter.
        Some(each) if call.rank(1)? == 0 => {
            let each = each.first().and_then(|&n| usize::try_from(n).ok());
            let each = each.filter(|&n| n > 0).ok_or("parts of no length")?;
            many(n.div_ceil(each))?;
            let parts = (0..n).step_by(each).map(|start| each.min(n - start));
            (parts.collect(), true)
        }
        Some(parts) => {
            let given = lengths(&parts).ok_or("a part has a negative length")?;
            let whole = given.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
            if whole != Some(n) {
                return Err(format!("its parts {parts:?} do not make up {n}"));
            }
            (given, true)
        }
    };
    let mut start = 0;
    let parts = parts.into_iter().map(|n| {
        start += n;
        let part = x.slice(axis, start - n..start);
        let part = if keep { part } else { part.squeeze(axis) };
        Value::tensor(element, part)
    });
    sequence(parts.collect())
}
