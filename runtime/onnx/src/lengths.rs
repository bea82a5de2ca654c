//! Shape arithmetic over lengths that a run decides: integers as [`Size`]s, which are exact for
//! every length up to the bounds.

use slabwise::shape::{Computed, Size};
use slabwise::{Tensor, Trace};

use crate::array::{Array, Data, count};
use crate::call::{Call, dim, resolve};
use crate::element::Element;
use crate::fold::{broadcast, places, reshaped, slices, split_lengths, steps, unsqueezed};

/// The most elements of an array of lengths: those of shapes.
const MOST: usize = 64;

/// An array of integers that are computed from lengths of a run.
#[derive(Clone, Debug)]
pub struct Lengths {
    /// The element type, of integers or truth values.
    pub element: Element,
    /// The lengths of its axes.
    pub shape: Vec<usize>,
    /// Its elements, in row-major order.
    pub values: Vec<Size>,
}

/// The results of a call, the reason why they have no form, or `None` if the call is not of
/// lengths.
type Folded = Option<Result<Vec<Lengths>, String>>;

impl Lengths {
    /// A vector of lengths.
    pub fn list(values: Vec<Size>) -> Lengths {
        Lengths {
            element: Element::I64,
            shape: vec![values.len()],
            values,
        }
    }

    /// The array of numbers, if all are.
    pub fn as_array(&self) -> Option<Array> {
        let values = self.values.iter().map(|size| size.as_fixed());
        Some(Array {
            element: self.element,
            shape: self.shape.clone(),
            data: Data::Int(values.collect::<Option<_>>()?),
        })
    }

    /// The integers as a tensor.
    pub fn traced<'t>(&self, trace: &'t Trace) -> Tensor<'t> {
        let parts: Vec<Tensor<'t>> = self
            .values
            .iter()
            .map(|&size| trace.length(dim(size)))
            .collect();
        match &parts[..] {
            [one] => one.reshape(&self.shape[..]),
            parts => trace.stack(parts, 0).reshape(&self.shape[..]),
        }
    }

    /// Its elements at these places, as an array of this shape.
    fn pick(&self, shape: Vec<usize>, places: &[usize]) -> Option<Lengths> {
        let values = places.iter().map(|&at| self.values.get(at).copied());
        let values = values.collect::<Option<_>>()?;
        let element = self.element;
        Some(Lengths {
            element,
            shape,
            values,
        })
    }

    fn spread(&self, shape: &[usize]) -> Option<Lengths> {
        count(shape).filter(|&n| n <= MOST)?;
        self.pick(shape.to_vec(), &places(&self.shape, shape)?)
    }
}

/// An input as lengths: a constant of integers, or lengths of the run.
pub fn of(call: &Call<'_, '_>, at: usize) -> Option<Lengths> {
    let value = call.value(at)?;
    if let Some(lengths) = value.lengths() {
        return Some(lengths.clone());
    }
    let array = call.constant(at)?;
    let values = array.as_ints().ok()?;
    (values.len() <= MOST).then(|| Lengths {
        element: array.element,
        shape: array.shape.clone(),
        values: values.iter().map(|&n| Size::fixed(n)).collect(),
    })
}

/// The results of a call that computes with lengths of a run.
pub fn fold(call: &Call<'_, '_>) -> Folded {
    match call.operator {
        "Shape" => return shape(call).map(Ok),
        "Size" => {
            let dims = call.dims(0).ok()?;
            let times = |n: Size, &d: &Size| call.trace.computed_size(Computed::Product(n, d));
            let all = dims.iter().try_fold(Size::ONE, times);
            let no_form = |why| format!("the number of elements has no form as one size: {why}");
            return Some(all.map_err(no_form).map(|n| {
                vec![Lengths {
                    shape: vec![],
                    ..Lengths::list(vec![n])
                }]
            }));
        }
        _ => {}
    }
    if !(0..call.len()).any(|at| call.value(at).is_some_and(|v| v.lengths().is_some())) {
        return None;
    }
    let show = |size: Size| call.trace.show_size(size);
    let range = |size: Size| call.trace.range_of(size);
    // Which of two sizes is at least the other in every run.
    let is_least = |a: Size, b: Size| call.trace.is_at_most(a, b);
    let open = |text: String| format!("{text} is not the same at every length");
    match call.operator {
        "Add" => pairs(call, |a, b| joint(call, a, "+", b)),
        "Sub" => pairs(call, |a, b| {
            let rest = call.trace.difference_of_sizes(a, b);
            rest.ok_or_else(|| no_form(call, a, "-", b))
        }),
        "Mul" => pairs(call, |a, b| joint(call, a, "*", b)),
        "Div" => pairs(call, |a, b| match (a.as_fixed(), b.as_fixed()) {
            (Some(a), Some(b)) => a
                .checked_div(b)
                .map(Size::fixed)
                .ok_or("a division by 0".into()),
            _ => call
                .trace
                .quotient_of_sizes(a, b)
                .ok_or_else(|| format!("{} / {} is not exact at every length", show(a), show(b))),
        }),
        "Mod" => pairs(call, |a, b| {
            let (scale, offset) = a.parts();
            match b.as_fixed() {
                Some(b) if b > 0 && scale % b == 0 => Ok(Size::fixed(offset.rem_euclid(b))),
                _ => Err(open(format!("{} mod {}", show(a), show(b)))),
            }
        }),
        "Neg" => each(call, |a| {
            a.checked_mul(Size::fixed(-1))
                .ok_or_else(|| format!("-({})", show(a)))
        }),
        "Abs" => each(call, |a| match range(a).0 >= 0 {
            true => Ok(a),
            false => Err(open(format!("|{}|", show(a)))),
        }),
        "Max" | "Min" => pairs(call, |a, b| {
            let largest = call.operator == "Max";
            match (is_least(a, b), is_least(b, a)) {
                (true, _) => Ok(if largest { b } else { a }),
                (_, true) => Ok(if largest { a } else { b }),
                _ => {
                    let formula = match (largest, a.is(0), b.is(0)) {
                        (false, ..) => Some(Computed::Least(a, b)),
                        (_, true, _) => Some(Computed::Rest(b)),
                        (_, _, true) => Some(Computed::Rest(a)),
                        _ => None,
                    };
                    let size = formula.and_then(|f| call.trace.computed_size(f).ok());
                    size.ok_or_else(|| {
                        let of = format!("{} of {} and {}", call.operator, show(a), show(b));
                        open(format!("the {of}"))
                    })
                }
            }
        }),
        "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" => pairs(call, |a, b| {
            let (low, high) = (range(a), range(b));
            let one = Size::ONE;
            let below = |a: Size, b: Size| a.checked_add(one).is_some_and(|a| is_least(a, b));
            let found = match call.operator {
                _ if a == b => Some(!matches!(call.operator, "Greater" | "Less")),
                "Equal" if low.1 < high.0 || high.1 < low.0 || below(a, b) || below(b, a) => {
                    Some(false)
                }
                "Greater" => decided(below(b, a), is_least(a, b)),
                "GreaterOrEqual" => decided(is_least(b, a), below(a, b)),
                "Less" => decided(below(a, b), is_least(b, a)),
                "LessOrEqual" => decided(is_least(a, b), below(b, a)),
                _ => None,
            };
            found
                .map(|holds| Size::fixed(holds.into()))
                .ok_or_else(|| open(format!("{} of {} and {}", call.operator, show(a), show(b))))
        }),
        "Cast" => match Element::of(i32::try_from(call.int("to", 0)).ok()?).ok()? {
            element @ (Element::I64 | Element::I32) => {
                one(of(call, 0).map(|a| Lengths { element, ..a }))
            }
            _ => None,
        },
        "Identity" => one(of(call, 0)),
        "Concat" => {
            let mut values = Vec::new();
            for at in 0..call.len() {
                let part = of(call, at)?;
                if part.shape.len() != 1 {
                    return None;
                }
                values.extend(part.values);
            }
            one(Some(Lengths::list(values)).filter(|all| all.values.len() <= MOST))
        }
        "Expand" => {
            let (a, to) = (
                of(call, 0)?,
                crate::array::lengths(call.constant(1)?.as_ints().ok()?)?,
            );
            one(a.spread(&broadcast(&a.shape, &to)?))
        }
        "Gather" => {
            let (a, index) = (of(call, 0)?, call.constant(1)?);
            let axis = resolve(call.int("axis", 0), a.shape.len()).ok()?;
            if a.shape.len() != 1 || axis != 0 {
                return None;
            }
            let index_values = index.as_ints().ok()?.iter();
            let found = index_values.map(|&i| resolve(i, a.values.len()).ok());
            one(a.pick(index.shape.clone(), &found.collect::<Option<Vec<_>>>()?))
        }
        "ReduceProd" | "ReduceSum" => {
            let a = of(call, 0)?;
            let since = if call.operator == "ReduceSum" { 13 } else { 18 };
            let axes = call.axes(since, 1).ok()?.unwrap_or_default();
            let whole = a.shape.len() == 1 && axes.iter().all(|&axis| axis == 0 || axis == -1);
            if !whole || (axes.is_empty() && call.flag("noop_with_empty_axes")) {
                return None;
            }
            let mut rest = a.values.iter();
            let sign = if call.operator == "ReduceSum" {
                "+"
            } else {
                "*"
            };
            let join = |all: Size, n: &Size| joint(call, all, sign, *n);
            let first = *rest.next()?;
            let joined = rest.try_fold(first, join);
            let shape = if call.int("keepdims", 1) != 0 {
                vec![1]
            } else {
                vec![]
            };
            Some(joined.map(|all| {
                vec![Lengths {
                    shape,
                    ..Lengths::list(vec![all])
                }]
            }))
        }
        "Reshape" => {
            let (a, to) = (of(call, 0)?, call.constant(1)?);
            let shape = reshaped(&a.shape, to.as_ints().ok()?, call.flag("allowzero"))?;
            one(Some(Lengths { shape, ..a }))
        }
        "Slice" => {
            let a = of(call, 0)?;
            let [(0, start, end, step)] = slices(call, a.shape.len()).ok()?[..] else {
                return None;
            };
            let (start, step, number) = steps(a.values.len(), start, end, step)?;
            let at = (0..number as i64).map(|i| usize::try_from(start + step * i).ok());
            one(a.pick(vec![number], &at.collect::<Option<Vec<_>>>()?))
        }
        "Split" => {
            let a = of(call, 0)?;
            if a.shape.len() != 1 {
                return None;
            }
            let mut rest = a.values.into_iter();
            let parts = split_lengths(call, rest.len()).ok()?.into_iter();
            Some(Ok(parts
                .map(|n| Lengths::list(rest.by_ref().take(n).collect()))
                .collect()))
        }
        "Squeeze" => {
            let a = of(call, 0)?;
            (a.values.len() == 1
                && call
                    .axes(13, 1)
                    .ok()?
                    .is_none_or(|axes| axes.len() == a.shape.len()))
            .then(|| Ok(vec![Lengths { shape: vec![], ..a }]))
        }
        "Unsqueeze" => {
            let a = of(call, 0)?;
            let shape = unsqueezed(&a.shape, &call.axes(13, 1).ok()??).ok()?;
            one(Some(Lengths { shape, ..a }))
        }
        "Where" => {
            let (condition, a, b) = (of(call, 0)?, of(call, 1)?, of(call, 2)?);
            let shape = broadcast(&broadcast(&condition.shape, &a.shape)?, &b.shape)?;
            let (condition, a, b) = (
                condition.spread(&shape)?,
                a.spread(&shape)?,
                b.spread(&shape)?,
            );
            let parts = condition.values.iter().zip(a.values.iter().zip(&b.values));
            let values = parts
                .map(|(c, (a, b))| Some(if c.as_fixed()? != 0 { *a } else { *b }))
                .collect::<Option<_>>()?;
            one(Some(Lengths {
                element: a.element,
                shape,
                values,
            }))
        }
        _ => None,
    }
}

/// A truth value from what implies it and what implies its opposite.
fn decided(holds: bool, fails: bool) -> Option<bool> {
    match (holds, fails) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

fn one(lengths: Option<Lengths>) -> Folded {
    Some(Ok(vec![lengths?]))
}

/// The sum or the product of two sizes, as a length of its own where it has no other form.
fn joint(call: &Call<'_, '_>, a: Size, sign: &str, b: Size) -> Result<Size, String> {
    let (plain, formula) = match sign {
        "+" => (a.checked_add(b), Computed::Sum(a, b)),
        _ => (a.checked_mul(b), Computed::Product(a, b)),
    };
    let computed = || call.trace.computed_size(formula);
    plain
        .map_or_else(computed, Ok)
        .map_err(|why| format!("{}: {why}", no_form(call, a, sign, b)))
}

fn no_form(call: &Call<'_, '_>, a: Size, sign: &str, b: Size) -> String {
    let show = |size: Size| call.trace.show_size(size);
    format!("({}) {sign} ({}) has no form as one size", show(a), show(b))
}

fn shape(call: &Call<'_, '_>) -> Option<Vec<Lengths>> {
    let dims = call.dims(0).ok()?;
    let n = dims.len() as i64;
    let bound = |name: &str, default: i64| {
        let at = call.int(name, default);
        (if at < 0 { at.saturating_add(n) } else { at }).clamp(0, n) as usize
    };
    let (start, end) = (bound("start", 0), bound("end", n));
    Some(vec![Lengths::list(
        dims.get(start..end.max(start))?.to_vec(),
    )])
}

fn each(call: &Call<'_, '_>, f: impl Fn(Size) -> Result<Size, String>) -> Folded {
    let a = of(call, 0)?;
    let values = a.values.iter().map(|&a| f(a)).collect::<Result<_, _>>();
    Some(values.map(|values| {
        vec![Lengths {
            values,
            ..a.clone()
        }]
    }))
}

fn pairs(call: &Call<'_, '_>, f: impl Fn(Size, Size) -> Result<Size, String>) -> Folded {
    if call.len() != 2 {
        return None;
    }
    let (a, b) = (of(call, 0)?, of(call, 1)?);
    let shape = broadcast(&a.shape, &b.shape)?;
    let (a, b) = (a.spread(&shape)?, b.spread(&shape)?);
    let values = a.values.iter().zip(&b.values).map(|(&a, &b)| f(a, b));
    let element = match call.operator {
        "Equal" | "Greater" | "GreaterOrEqual" | "Less" | "LessOrEqual" => Element::Bool,
        _ => a.element,
    };
    let made = |values| {
        vec![Lengths {
            element,
            shape,
            values,
        }]
    };
    Some(values.collect::<Result<_, _>>().map(made))
}
