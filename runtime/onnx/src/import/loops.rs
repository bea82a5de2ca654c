//! `Loop` and `Scan`: short ones are unrolled, the bodies of long ones are imported once.

use slabwise::shape::Size;
use slabwise::{DType, Tensor};

use super::{Import, Names, steps};
use crate::array::Array;
use crate::call::{Call, Results, dim, resolve, sizes};
use crate::element::Element;
use crate::ops::UNROLLED_MAX;
use crate::proto::GraphProto;
use crate::value::Value;

/// A loop whose body is imported once.
struct Once<'b> {
    body: &'b GraphProto,
    steps: Size,
    /// Whether the body takes the number of the step and a condition, and returns a condition, as
    /// that of `Loop` does.
    counts: bool,
    /// The number of results of which each step gives a part.
    scanned: usize,
}

/// Operators whose run may fail, which a step cannot, or that draw random numbers, which would be
/// the same in every step.
fn needs_unrolling(operator: &str) -> bool {
    operator.starts_with("Random")
        || matches!(
            operator,
            "Bernoulli"
                | "Compress"
                | "Dropout"
                | "GatherND"
                | "Multinomial"
                | "NonMaxSuppression"
                | "NonZero"
                | "Unique"
        )
}

/// Whether a call in a step may fail: it reads or writes at places, and they are no constants.
pub fn may_fail(call: &Call<'_, '_>) -> bool {
    let places = match call.operator {
        "Gather" | "GatherElements" | "Scatter" | "ScatterElements" | "ScatterND" => 1,
        "TensorScatter" => 2,
        _ => return false,
    };
    call.value(places).is_some() && call.constant(places).is_none()
}

impl<'m, 't> Import<'m, 't> {
    /// The states after all steps and the stacked results of a loop, as a scan of the trace; `None`
    /// if its steps have to be unrolled.
    fn once(
        &mut self,
        once: &Once<'_>,
        names: &Names<'_, 't>,
        state: &[Value<'t>],
        inputs: &[(Element, Tensor<'t>)],
        depth: usize,
    ) -> Result<Option<Vec<Value<'t>>>, String> {
        let body = once.body;
        if !self.is_scannable(body) || state.iter().any(|value| value.sequence().is_some()) {
            return Ok(None);
        }
        let trace = self.trace;
        let most = trace.range_of(once.steps).1;
        let all = usize::try_from(most).ok().filter(|&n| n > 0 && n < 1 << 31);
        let Some(all) = all else { return Ok(None) };
        // Constants become tensors before the body, because one of the body is none outside of it.
        self.trace_outer(body, names);
        let elements: Vec<Element> = state.iter().map(Value::element).collect();
        let initial = state.iter().map(|value| value.traced(trace));
        let initial = initial.collect::<Result<Vec<_>, _>>()?;
        let mut parts = vec![trace.arange(all).cast(DType::I32)];
        parts.extend(inputs.iter().map(|(_, x)| x.pad_to(0, all, 0.0)));
        let open = once.steps.as_fixed().is_none();
        let end = open.then(|| trace.length(dim(once.steps)));
        let refused = self.refusals.len();
        let (mut failure, mut kinds) = (None, Vec::new());
        let step = |carries: &[Tensor<'t>], parts: &[Tensor<'t>]| {
            let mut given = Vec::new();
            let mut targets = body.input.iter().map(|input| input.name.clone());
            if once.counts {
                let truth = Array::ints(Vec::new(), vec![1]).cast(Element::Bool);
                let number = steps::number(parts[0], most);
                given.extend(targets.next().map(|name| (name, number)));
                given.extend(targets.next().map(|name| (name, Value::constant(truth))));
            }
            let values = carries
                .iter()
                .zip(&elements)
                .map(|(&x, &element)| (element, x));
            let read = parts[1..]
                .iter()
                .zip(inputs)
                .map(|(&x, (element, _))| (*element, x));
            for ((element, x), name) in values.chain(read).zip(targets) {
                given.push((name, Value::tensor(element, x)));
            }
            self.scans += 1;
            let made = self.graph(body, names, given, depth);
            self.scans -= 1;
            let made = made.and_then(|mut results| {
                if once.counts {
                    let condition = results.first().ok_or("its body has no condition")?;
                    let running = condition.known().map(|(_, array)| array.as_ints());
                    match running {
                        Some(Ok(&[truth])) if truth != 0 => drop(results.remove(0)),
                        _ => return Err("its condition is not always true".into()),
                    }
                }
                if results.len() < carries.len() + once.scanned {
                    return Err("its body has too few results".into());
                }
                let mut tensors = Vec::new();
                for value in &results {
                    tensors.push(value.traced(trace)?);
                }
                let rows = tensors.split_off(carries.len());
                let same = |(new, old): (&Tensor<'t>, &Tensor<'t>)| {
                    new.dtype() == old.dtype() && sizes(*new) == sizes(*old)
                };
                let types = results
                    .iter()
                    .zip(&elements)
                    .all(|(v, e)| v.element() == *e);
                if !types || !tensors.iter().zip(carries).all(same) {
                    return Err("a state changes its type or shape".into());
                }
                if let Some(end) = end {
                    let inside = parts[0].lt(end);
                    for (new, &old) in tensors.iter_mut().zip(carries) {
                        *new = inside.select(*new, old);
                    }
                }
                kinds = results[carries.len()..]
                    .iter()
                    .map(Value::element)
                    .collect();
                Ok((tensors, rows))
            });
            made.unwrap_or_else(|reason| {
                failure = Some(reason);
                (carries.to_vec(), Vec::new())
            })
        };
        let (last, rows) = trace.scan_many(slabwise::Scan::default(), &initial, &parts, step);
        let mistakes = trace.mistakes();
        if let Some(mistake) = mistakes.get(self.mistakes) {
            let reason = mistake.message.clone();
            self.mistakes = mistakes.len();
            return Err(reason);
        }
        if failure.is_some() {
            self.refusals.truncate(refused);
            return Ok(None);
        }
        let states = last.into_iter().zip(elements);
        let mut results: Vec<Value<'t>> = states.map(|(x, e)| Value::tensor(e, x)).collect();
        for (row, element) in rows.into_iter().zip(kinds).take(once.scanned) {
            let row = row.narrow(0, 0, dim(once.steps));
            results.push(Value::tensor(element, row));
        }
        Ok(Some(results))
    }

    /// Whether a body may be imported once: none of its operators has to be unrolled.
    fn is_scannable(&self, body: &GraphProto) -> bool {
        body.node.iter().all(|node| {
            let is_function = self.functions.iter().any(|f| f.name == node.op_type);
            let mut inner = node.attribute.iter().filter_map(|a| a.g.as_ref());
            !is_function && !needs_unrolling(&node.op_type) && inner.all(|g| self.is_scannable(g))
        })
    }

    /// Makes tensors of the values around a body that it names.
    fn trace_outer(&self, body: &GraphProto, names: &Names<'_, 't>) {
        for node in &body.node {
            for name in &node.input {
                if let Some(Some(value)) = names.get(name) {
                    // One that cannot be held is refused where it is read.
                    let _ = value.traced(self.trace);
                }
            }
            for inner in node.attribute.iter().filter_map(|a| a.g.as_ref()) {
                self.trace_outer(inner, names);
            }
        }
    }

    /// `Loop` with a known trip count and condition.
    pub(super) fn repeat(
        &mut self,
        call: &Call<'_, 't>,
        names: &Names<'_, 't>,
        depth: usize,
    ) -> Results<'t> {
        let body = call.graph("body").ok_or("its body is missing")?.clone();
        let most = match call.known_optional(0)? {
            Some(array) => *array
                .as_ints()?
                .first()
                .ok_or("a trip count without element")?,
            None => i64::MAX,
        };
        let mut running = match call.value(1) {
            Some(_) => call.known(1)?.as_ints()?.first() != Some(&0),
            None => true,
        };
        let carried = call.len().saturating_sub(2);
        let mut state = Vec::new();
        for at in 0..carried {
            state.push(call.required(at + 2)?.clone());
        }
        let scanned = call.outputs.saturating_sub(carried);
        if running && most > UNROLLED_MAX as i64 && most != i64::MAX {
            let once = Once {
                body: &body,
                steps: Size::fixed(most),
                counts: true,
                scanned,
            };
            if let Some(results) = self.once(&once, names, &state, &[], depth)? {
                return Ok(results);
            }
        }
        let mut rows: Vec<Vec<Tensor<'t>>> = vec![Vec::new(); scanned];
        let mut elements = vec![None; scanned];
        let mut step = 0;
        while running && step < most {
            self.count_node()?;
            let mut given = Vec::new();
            let scalar = |values: i64| Array::ints(Vec::new(), vec![values]);
            if let Some(name) = body.input.first() {
                given.push((name.name.clone(), Value::constant(scalar(step))));
            }
            if let Some(name) = body.input.get(1) {
                let truth = scalar(1).cast(Element::Bool);
                given.push((name.name.clone(), Value::constant(truth)));
            }
            for (name, value) in body.input.iter().skip(2).zip(&state) {
                given.push((name.name.clone(), value.clone()));
            }
            let results = self.graph(&body, names, given, depth)?;
            let condition = results.first().ok_or("its body has no condition")?;
            running = match condition.known() {
                Some((_, array)) => array.as_ints()?.first() != Some(&0),
                None => return Err("its condition is computed from the inputs".into()),
            };
            state = results.iter().skip(1).take(carried).cloned().collect();
            for (at, value) in results.iter().skip(1 + carried).enumerate().take(scanned) {
                elements[at] = Some(value.element());
                rows[at].push(value.traced(self.trace)?);
            }
            step += 1;
        }
        for (rows, element) in rows.iter().zip(elements) {
            let element = element.ok_or("it runs no iteration, so a result has no shape")?;
            state.push(Value::tensor(element, self.trace.stack(rows, 0)));
        }
        Ok(state)
    }

    /// `Scan`.
    pub(super) fn scan(
        &mut self,
        call: &Call<'_, 't>,
        names: &Names<'_, 't>,
        depth: usize,
    ) -> Results<'t> {
        if call.opset < 9 {
            return Err("Scan before opset 9 is not expressed".into());
        }
        let body = call.graph("body").ok_or("its body is missing")?.clone();
        let sequences = usize::try_from(call.int("num_scan_inputs", 0)).unwrap_or(0);
        let carried = call.len().checked_sub(sequences).ok_or("too few inputs")?;
        let list = |name: &str, at: usize| {
            call.int_list(name)
                .and_then(|all| all.get(at).copied())
                .unwrap_or(0)
        };
        let mut state = Vec::new();
        for at in 0..carried {
            state.push(call.required(at)?.clone());
        }
        let mut inputs = Vec::new();
        for at in 0..sequences {
            let x = call.x(carried + at)?;
            let axis = resolve(list("scan_input_axes", at), x.rank())?;
            inputs.push((call.element(carried + at)?, x, axis));
        }
        let (_, first, axis) = *inputs.first().ok_or("it scans nothing")?;
        let length = sizes(first)[axis];
        let scanned = call.outputs.saturating_sub(carried);
        if length.as_fixed().is_none_or(|n| n > UNROLLED_MAX as i64) {
            let once = Once {
                body: &body,
                steps: length,
                counts: false,
                scanned,
            };
            let parts: Vec<(Element, Tensor<'t>)> = inputs
                .iter()
                .enumerate()
                .map(|(at, (element, x, axis))| {
                    let x = match list("scan_input_directions", at) {
                        0 => *x,
                        _ => x.flip(*axis),
                    };
                    (*element, x.movedim(*axis, 0))
                })
                .collect();
            if let Some(mut results) = self.once(&once, names, &state, &parts, depth)? {
                for (at, result) in results.iter_mut().skip(carried).enumerate() {
                    let rows = result.traced(self.trace)?;
                    let rows = match list("scan_output_directions", at) {
                        0 => rows,
                        _ => rows.flip(0),
                    };
                    let axis = resolve(list("scan_output_axes", at), rows.rank())?;
                    *result = Value::tensor(result.element(), rows.movedim(0, axis));
                }
                return Ok(results);
            }
        }
        let steps = first
            .len(axis)
            .ok_or("its body can only be unrolled, and the length it scans is not fixed")?;
        let mut rows: Vec<Vec<_>> = vec![Vec::new(); scanned];
        let mut elements = vec![None; scanned];
        for step in 0..steps {
            self.count_node()?;
            let mut given = Vec::new();
            let mut targets = body.input.iter();
            for (value, name) in state.iter().zip(&mut targets) {
                given.push((name.name.clone(), value.clone()));
            }
            for (at, ((element, x, axis), name)) in inputs.iter().zip(&mut targets).enumerate() {
                let place = match list("scan_input_directions", at) {
                    0 => step,
                    _ => steps - 1 - step,
                };
                let row = x.slice(*axis, place..place + 1).squeeze(*axis);
                given.push((name.name.clone(), Value::tensor(*element, row)));
            }
            let results = self.graph(&body, names, given, depth)?;
            state = results.iter().take(carried).cloned().collect();
            for (at, value) in results.iter().skip(carried).enumerate().take(scanned) {
                elements[at] = Some(value.element());
                rows[at].push(value.traced(self.trace)?);
            }
        }
        for (at, (mut rows, element)) in rows.into_iter().zip(elements).enumerate() {
            let element = element.ok_or("it scans no element, so a result has no shape")?;
            if list("scan_output_directions", at) != 0 {
                rows.reverse();
            }
            let rank = rows[0].rank() + 1;
            let axis = resolve(list("scan_output_axes", at), rank)?;
            state.push(Value::tensor(element, self.trace.stack(&rows, axis)));
        }
        Ok(state)
    }
}
