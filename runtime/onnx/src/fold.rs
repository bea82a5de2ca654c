//! Evaluation of operators whose inputs are known: shape arithmetic, and constants that exporters
//! write as nodes. Integers are i64, as in ONNX.

use crate::array::{Array, Data, count, lengths, round, wrap};
use crate::call::{Call, resolve, resolve_all};
use crate::element::Element;

/// The most elements of a folded result; larger constants are computed by the program.
const MOST: usize = 1 << 20;

/// The results of a call whose inputs are known; `None` if the operator is not folded, or not for
/// these inputs.
pub fn fold(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let fold = FOLDS.iter().find(|(name, _)| *name == call.operator)?.1;
    let results = fold(call)?;
    results.iter().all(|a| a.len() <= MOST).then_some(results)
}

type Fold = fn(&Call<'_, '_>) -> Option<Vec<Array>>;

const FOLDS: &[(&str, Fold)] = &[
    ("Abs", |c| unary(c, i64::wrapping_abs, f64::abs)),
    ("Add", |c| {
        binary(c, |a, b| Some(a.wrapping_add(b)), |a, b| a + b)
    }),
    ("And", |c| compare(c, |a, b| a != 0.0 && b != 0.0)),
    ("Cast", |c| {
        let to = Element::of(i32::try_from(c.int("to", 0)).ok()?).ok()?;
        one(c.known(0).ok()?.cast(to))
    }),
    ("CastLike", |c| {
        one(c.known(0).ok()?.cast(c.element(1).ok()?))
    }),
    ("Ceil", |c| unary(c, |a| a, f64::ceil)),
    ("Concat", concat),
    ("Constant", constant),
    ("ConstantOfShape", constant_of_shape),
    ("Div", |c| binary(c, divide, |a, b| a / b)),
    ("Equal", |c| compare(c, |a, b| a == b)),
    ("Expand", expand),
    ("Floor", |c| unary(c, |a| a, f64::floor)),
    ("Gather", gather),
    ("Greater", |c| compare(c, |a, b| a > b)),
    ("GreaterOrEqual", |c| compare(c, |a, b| a >= b)),
    ("Identity", |c| one(c.known(0).ok()?.clone())),
    ("Less", |c| compare(c, |a, b| a < b)),
    ("LessOrEqual", |c| compare(c, |a, b| a <= b)),
    ("Max", |c| all(c, |a, b| Some(a.max(b)), larger)),
    ("Min", |c| all(c, |a, b| Some(a.min(b)), smaller)),
    ("Mod", |c| {
        let truncated = c.flag("fmod");
        let whole = move |a: i64, b: i64| match (truncated, a.checked_rem(b)?) {
            (false, rest) if rest != 0 && (rest < 0) != (b < 0) => Some(rest + b),
            (_, rest) => Some(rest),
        };
        binary(c, whole, |a, b| a % b)
    }),
    ("Mul", |c| {
        binary(c, |a, b| Some(a.wrapping_mul(b)), |a, b| a * b)
    }),
    ("Neg", |c| unary(c, i64::wrapping_neg, |a| -a)),
    ("Not", |c| {
        let a = c.known(0).ok()?;
        let values = a.as_ints().ok()?.iter().map(|&v| i64::from(v == 0));
        made(Element::Bool, a.shape.clone(), Data::Int(values.collect()))
    }),
    ("NonZero", nonzero),
    ("Or", |c| compare(c, |a, b| a != 0.0 || b != 0.0)),
    ("Pow", |c| {
        let whole = |a: i64, b: i64| a.checked_pow(u32::try_from(b).ok()?);
        binary(c, whole, f64::powf)
    }),
    ("Range", range),
    ("Reciprocal", |c| match c.element(0).ok()?.is_float() {
        true => unary(c, |a| a, f64::recip),
        false => None,
    }),
    ("ReduceMax", |c| reduce(c, |a, b| Some(a.max(b)), larger)),
    ("ReduceMean", |c| match c.element(0).ok()?.is_float() {
        true => reduce(c, |_, _| None, |a, b| a + b),
        false => None,
    }),
    ("ReduceMin", |c| reduce(c, |a, b| Some(a.min(b)), smaller)),
    ("ReduceProd", |c| reduce(c, i64::checked_mul, |a, b| a * b)),
    ("ReduceSum", |c| reduce(c, i64::checked_add, |a, b| a + b)),
    ("Reshape", reshape),
    ("Round", |c| unary(c, |a| a, f64::round_ties_even)),
    ("Shape", shape),
    ("Size", |c| {
        let n = count(&c.shape(0).ok()?)?;
        one(Array::ints(Vec::new(), vec![i64::try_from(n).ok()?]))
    }),
    ("Slice", slice),
    ("Split", split),
    ("Sqrt", |c| unary(c, |a| a, f64::sqrt)),
    ("Squeeze", squeeze),
    ("Sub", |c| {
        binary(c, |a, b| Some(a.wrapping_sub(b)), |a, b| a - b)
    }),
    ("Tile", tile),
    ("Transpose", transpose),
    ("Unsqueeze", unsqueeze),
    ("Where", choose),
];

fn one(array: Array) -> Option<Vec<Array>> {
    Some(vec![array])
}

fn made(element: Element, shape: Vec<usize>, data: Data) -> Option<Vec<Array>> {
    one(Array {
        element,
        shape,
        data,
    })
}

/// The larger of two numbers; NaN if one of them is.
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}

/// The smaller of two numbers; NaN if one of them is.
fn smaller(a: f64, b: f64) -> f64 {
    if a < b || a.is_nan() { a } else { b }
}

fn divide(a: i64, b: i64) -> Option<i64> {
    a.checked_div(b)
}

fn unary(call: &Call<'_, '_>, int: fn(i64) -> i64, float: fn(f64) -> f64) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let data = match &a.data {
        Data::Int(values) => Data::Int(values.iter().map(|&v| wrap(int(v), a.element)).collect()),
        Data::Float(values) => {
            Data::Float(values.iter().map(|&v| round(float(v), a.element)).collect())
        }
    };
    made(a.element, a.shape.clone(), data)
}

/// The shape of two broadcast against each other.
pub fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |shape: &[usize], axis: usize| {
        (axis + shape.len())
            .checked_sub(rank)
            .map_or(1, |axis| shape[axis])
    };
    (0..rank)
        .map(|axis| match (at(a, axis), at(b, axis)) {
            (a, b) if a == b => Some(a),
            (1, n) | (n, 1) => Some(n),
            _ => None,
        })
        .collect()
}

/// For each element of `shape`, the element of an array of shape `of` that is broadcast to it.
pub fn places(of: &[usize], shape: &[usize]) -> Option<Vec<usize>> {
    let n = count(shape).filter(|&n| n <= MOST)?;
    let lead = shape.len() - of.len();
    let strides = strides(of);
    let place = |mut flat: usize| {
        let mut at = 0;
        for axis in (0..shape.len()).rev() {
            let i = flat % shape[axis];
            flat /= shape[axis];
            if axis >= lead && of[axis - lead] != 1 {
                at += i * strides[axis - lead];
            }
        }
        at
    };
    Some((0..n).map(place).collect())
}

fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis]);
    }
    strides
}

/// An array with the elements at these places.
fn pick(a: &Array, shape: Vec<usize>, places: &[usize]) -> Option<Vec<Array>> {
    let data = match &a.data {
        Data::Int(values) => Data::Int(at(values, places)?),
        Data::Float(values) => Data::Float(at(values, places)?),
    };
    made(a.element, shape, data)
}

fn at<T: Copy>(values: &[T], places: &[usize]) -> Option<Vec<T>> {
    places.iter().map(|&p| values.get(p).copied()).collect()
}

fn spread(a: &Array, shape: &[usize]) -> Option<Array> {
    if a.shape == shape {
        return Some(a.clone());
    }
    pick(a, shape.to_vec(), &places(&a.shape, shape)?)?.pop()
}

fn pair(a: &Array, b: &Array) -> Option<(Array, Array)> {
    let shape = broadcast(&a.shape, &b.shape)?;
    Some((spread(a, &shape)?, spread(b, &shape)?))
}

fn combine(
    a: &Array,
    b: &Array,
    int: impl Fn(i64, i64) -> Option<i64>,
    float: impl Fn(f64, f64) -> f64,
) -> Option<Array> {
    let element = a.element;
    let (a, b) = pair(a, b)?;
    let data = match (&a.data, &b.data) {
        (Data::Int(x), Data::Int(y)) => {
            let all = x
                .iter()
                .zip(y)
                .map(|(&a, &b)| Some(wrap(int(a, b)?, element)));
            Data::Int(all.collect::<Option<_>>()?)
        }
        _ => {
            let all = a.to_floats().into_iter().zip(b.to_floats());
            Data::Float(all.map(|(a, b)| round(float(a, b), element)).collect())
        }
    };
    let shape = a.shape;
    // A power of integers by a float is of integers.
    match (&data, element.is_float()) {
        (Data::Float(_), false) => None,
        _ => Some(Array {
            element,
            shape,
            data,
        }),
    }
}

fn binary(
    call: &Call<'_, '_>,
    int: impl Fn(i64, i64) -> Option<i64>,
    float: impl Fn(f64, f64) -> f64,
) -> Option<Vec<Array>> {
    one(combine(
        call.known(0).ok()?,
        call.known(1).ok()?,
        int,
        float,
    )?)
}

fn all(
    call: &Call<'_, '_>,
    int: fn(i64, i64) -> Option<i64>,
    float: fn(f64, f64) -> f64,
) -> Option<Vec<Array>> {
    let mut result = call.known(0).ok()?.clone();
    for at in 1..call.len() {
        result = combine(&result, call.known(at).ok()?, int, float)?;
    }
    one(result)
}

fn compare(call: &Call<'_, '_>, holds: fn(f64, f64) -> bool) -> Option<Vec<Array>> {
    let (a, b) = pair(call.known(0).ok()?, call.known(1).ok()?)?;
    let exact = |array: &Array| match &array.data {
        Data::Int(values) => values.iter().all(|v| v.unsigned_abs() <= 1 << 53),
        Data::Float(_) => true,
    };
    if !exact(&a) || !exact(&b) {
        return None;
    }
    let values = a.to_floats().into_iter().zip(b.to_floats());
    let values = values.map(|(a, b)| i64::from(holds(a, b))).collect();
    made(Element::Bool, a.shape, Data::Int(values))
}

fn choose(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let (condition, a, b) = (
        call.known(0).ok()?,
        call.known(1).ok()?,
        call.known(2).ok()?,
    );
    let shape = broadcast(&broadcast(&condition.shape, &a.shape)?, &b.shape)?;
    let (condition, a, b) = (
        spread(condition, &shape)?,
        spread(a, &shape)?,
        spread(b, &shape)?,
    );
    let taken = condition.as_ints().ok()?;
    fn merge<T: Copy>(taken: &[i64], a: &[T], b: &[T]) -> Vec<T> {
        let all = taken.iter().zip(a.iter().zip(b));
        all.map(|(&c, (&a, &b))| if c != 0 { a } else { b })
            .collect()
    }
    let data = match (&a.data, &b.data) {
        (Data::Int(x), Data::Int(y)) => Data::Int(merge(taken, x, y)),
        (Data::Float(x), Data::Float(y)) => Data::Float(merge(taken, x, y)),
        _ => return None,
    };
    made(a.element, shape, data)
}

fn constant(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    if let Some(array) = call.array("value").ok()? {
        return one(array);
    }
    if call.has("value_int") {
        return one(Array::ints(Vec::new(), vec![call.int("value_int", 0)]));
    }
    if let Some(values) = call.int_list("value_ints") {
        return one(Array::ints(vec![values.len()], values));
    }
    let floats = |shape, values: Vec<f32>| {
        let values = values.into_iter().map(f64::from).collect();
        made(Element::F32, shape, Data::Float(values))
    };
    if call.has("value_float") {
        return floats(Vec::new(), vec![call.f("value_float", 0.0)]);
    }
    let values = call.float_list("value_floats")?;
    floats(vec![values.len()], values)
}

fn constant_of_shape(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let shape = lengths(call.known(0).ok()?.as_ints().ok()?)?;
    let n = count(&shape).filter(|&n| n <= MOST)?;
    match call.array("value").ok()? {
        Some(value) => pick(&value, shape, &vec![0; n]),
        None => made(Element::F32, shape, Data::Float(vec![0.0; n])),
    }
}

/// The number of rows before an axis, none if the array has no elements: its other lengths may be
/// beyond any loop then.
fn rows(shape: &[usize], axis: usize) -> Option<usize> {
    match shape.contains(&0) {
        true => Some(0),
        false => count(&shape[..axis]),
    }
}

fn concat(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let parts: Vec<&Array> = (0..call.len())
        .map(|at| call.known(at).ok())
        .collect::<Option<_>>()?;
    let first = *parts.first()?;
    let default = if call.opset < 4 { 1 } else { 0 };
    let axis = resolve(call.int("axis", default), first.shape.len()).ok()?;
    let mut shape = first.shape.clone();
    shape[axis] = parts
        .iter()
        .map(|p| p.shape.get(axis))
        .sum::<Option<usize>>()?;
    let outer = rows(&shape, axis)?;
    let mut ints = Vec::new();
    let mut floats = Vec::new();
    for o in 0..outer {
        for part in &parts {
            if part.shape.len() != shape.len() {
                return None;
            }
            let n = count(&part.shape[axis..])?;
            match &part.data {
                Data::Int(values) => ints.extend_from_slice(values.get(o * n..(o + 1) * n)?),
                Data::Float(values) => floats.extend_from_slice(values.get(o * n..(o + 1) * n)?),
            }
        }
    }
    let data = match first.element.is_float() {
        true => Data::Float(floats),
        false => Data::Int(ints),
    };
    let whole = Array {
        element: first.element,
        shape,
        data,
    };
    (count(&whole.shape)? == whole.len()).then(|| vec![whole])
}

fn expand(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let to = lengths(call.known(1).ok()?.as_ints().ok()?)?;
    one(spread(a, &broadcast(&a.shape, &to)?)?)
}

fn gather(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let (a, index) = (call.known(0).ok()?, call.known(1).ok()?);
    let axis = resolve(call.int("axis", 0), a.shape.len()).ok()?;
    let shape = [&a.shape[..axis], &index.shape, &a.shape[axis + 1..]].concat();
    let (outer, n, inner) = (
        rows(&shape, axis)?,
        a.shape[axis],
        count(&a.shape[axis + 1..])?,
    );
    let index_values = index
        .as_ints()
        .ok()?
        .iter()
        .map(|&i| resolve(i, n).ok())
        .collect::<Option<Vec<_>>>()?;
    count(&shape).filter(|&n| n <= MOST)?;
    let mut places = Vec::new();
    for o in 0..outer {
        for &i in &index_values {
            let start = (o * n + i) * inner;
            places.extend(start..start + inner);
        }
    }
    pick(a, shape, &places)
}

fn nonzero(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let values = a.to_floats();
    let found: Vec<usize> = (0..a.len()).filter(|&i| values[i] != 0.0).collect();
    let strides = strides(&a.shape);
    let rows = (0..a.shape.len()).flat_map(|axis| {
        let (stride, n) = (strides[axis], a.shape[axis]);
        found.iter().map(move |&i| (i / stride % n) as i64)
    });
    one(Array::ints(
        vec![a.shape.len(), found.len()],
        rows.collect(),
    ))
}

fn range(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let (start, end, step) = (
        call.known(0).ok()?,
        call.known(1).ok()?,
        call.known(2).ok()?,
    );
    let (a, b, by) = (
        *start.to_floats().first()?,
        *end.to_floats().first()?,
        *step.to_floats().first()?,
    );
    let n = ((b - a) / by).ceil().max(0.0);
    if n.is_nan() || n > MOST as f64 {
        return None;
    }
    let n = n as usize;
    let data = match start.as_ints() {
        Ok(first) => {
            let by = *step.as_ints().ok()?.first()?;
            let value = |i: i64| first[0].wrapping_add(i.wrapping_mul(by));
            Data::Int((0..n as i64).map(value).collect())
        }
        Err(_) => Data::Float(
            (0..n)
                .map(|i| round(a + i as f64 * by, start.element))
                .collect(),
        ),
    };
    made(start.element, vec![n], data)
}

/// A reduction of a whole vector; that of `ReduceMean` is divided by the number of elements.
fn reduce(
    call: &Call<'_, '_>,
    int: fn(i64, i64) -> Option<i64>,
    float: fn(f64, f64) -> f64,
) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let keep = call.int("keepdims", 1) != 0;
    let since = if call.operator == "ReduceSum" { 13 } else { 18 };
    let axes = call.axes(since, 1).ok()?.unwrap_or_default();
    // All of a vector, the case of shape arithmetic.
    if a.shape.len() != 1 || axes.iter().any(|&axis| axis != 0 && axis != -1) {
        return None;
    }
    if axes.is_empty() && call.flag("noop_with_empty_axes") {
        return None;
    }
    let data = match &a.data {
        Data::Int(values) => {
            let (first, rest) = values.split_first()?;
            let result = rest.iter().try_fold(*first, |a, &b| int(a, b))?;
            Data::Int(vec![wrap(result, a.element)])
        }
        Data::Float(values) => {
            let result = values.iter().copied().reduce(float)?;
            let result = match call.operator {
                "ReduceMean" => result / values.len() as f64,
                _ => result,
            };
            Data::Float(vec![round(result, a.element)])
        }
    };
    let shape = if keep { vec![1] } else { Vec::new() };
    made(a.element, shape, data)
}

/// The shape that Reshape asks for, of an array of this shape.
pub fn reshaped(of: &[usize], to: &[i64], allow_zero: bool) -> Option<Vec<usize>> {
    let mut free = None;
    let mut shape = Vec::with_capacity(to.len());
    for (axis, &n) in to.iter().enumerate() {
        shape.push(match n {
            0 if !allow_zero => *of.get(axis)?,
            -1 => {
                if free.replace(axis).is_some() {
                    return None;
                }
                1
            }
            n => usize::try_from(n).ok()?,
        });
    }
    if let Some(axis) = free {
        let (n, rest) = (count(of)?, count(&shape)?);
        shape[axis] = n.checked_div(rest)?;
    }
    (count(&shape)? == count(of)?).then_some(shape)
}

fn reshape(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let to = match call.opset >= 5 {
        true => call.known(1).ok()?.as_ints().ok()?.to_vec(),
        false => call.int_list("shape")?,
    };
    let shape = reshaped(&a.shape, &to, call.flag("allowzero"))?;
    made(a.element, shape, a.data.clone())
}

fn shape(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let shape = call.shape(0).ok()?;
    let n = shape.len() as i64;
    let bound = |name: &str, default: i64| {
        let at = call.int(name, default);
        (if at < 0 { at + n } else { at }).clamp(0, n) as usize
    };
    let (start, end) = (bound("start", 0), bound("end", n));
    let part = shape.get(start..end.max(start))?;
    let values = part.iter().map(|&n| i64::try_from(n).ok());
    one(Array::ints(
        vec![part.len()],
        values.collect::<Option<_>>()?,
    ))
}

/// First place, step and number of elements of one axis of Slice.
pub fn steps(n: usize, start: i64, end: i64, step: i64) -> Option<(i64, i64, usize)> {
    let n = n as i64;
    if step == 0 {
        return None;
    }
    if n == 0 {
        return Some((0, step, 0));
    }
    let from_end = |at: i64| if at < 0 { at.saturating_add(n) } else { at };
    let (start, end) = (from_end(start), from_end(end));
    let (start, end) = match step > 0 {
        true => (start.clamp(0, n), end.clamp(0, n)),
        false => (start.clamp(0, n - 1), end.clamp(-1, n - 1)),
    };
    let span = if step > 0 { end - start } else { start - end };
    let size = step.unsigned_abs();
    let number = if span > 0 {
        (span as u64).div_ceil(size)
    } else {
        0
    };
    Some((start, step, number as usize))
}

/// The start, end and step of each axis of Slice.
pub fn slices(call: &Call<'_, '_>, rank: usize) -> Result<Vec<(usize, i64, i64, i64)>, String> {
    let (starts, ends, axes, steps) = match call.opset >= 10 {
        true => (
            call.ints(1)?.ok_or("its starts are missing")?,
            call.ints(2)?.ok_or("its ends are missing")?,
            call.ints(3)?,
            call.ints(4)?,
        ),
        false => (
            call.int_list("starts").ok_or("its starts are missing")?,
            call.int_list("ends").ok_or("its ends are missing")?,
            call.int_list("axes"),
            None,
        ),
    };
    let axes = match axes {
        Some(axes) => resolve_all(&axes, rank)?,
        None => (0..starts.len()).collect(),
    };
    let steps = steps.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        return Err("its starts, ends, axes and steps are not of one length".into());
    }
    Ok((0..starts.len())
        .map(|i| (axes[i], starts[i], ends[i], steps[i]))
        .collect())
}

fn slice(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let mut a = call.known(0).ok()?.clone();
    for (axis, start, end, step) in slices(call, a.shape.len()).ok()? {
        let (start, step, number) = steps(*a.shape.get(axis)?, start, end, step)?;
        let mut shape = a.shape.clone();
        shape[axis] = number;
        let (outer, n, inner) = (
            rows(&shape, axis)?,
            a.shape[axis],
            count(&a.shape[axis + 1..])?,
        );
        let mut places = Vec::new();
        for o in 0..outer {
            for i in 0..number {
                let at = usize::try_from(start + step * i as i64).ok()?;
                let first = (o * n + at) * inner;
                places.extend(first..first + inner);
            }
        }
        a = pick(&a, shape, &places)?.pop()?;
    }
    one(a)
}

fn split(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    if a.shape.len() != 1 {
        return None;
    }
    let parts = split_lengths(call, a.shape[0]).ok()?;
    let mut start = 0;
    let mut all = Vec::new();
    for n in parts {
        let places: Vec<usize> = (start..start + n).collect();
        all.push(pick(a, vec![n], &places)?.pop()?);
        start += n;
    }
    Some(all)
}

/// The lengths of the parts of Split along an axis of `n`.
pub fn split_lengths(call: &Call<'_, '_>, n: usize) -> Result<Vec<usize>, String> {
    let given = match call.opset >= 13 {
        true => call.ints(1)?,
        // An input or an attribute in the first version.
        false if call.value(1).is_some() => call.ints(1)?,
        false => call.int_list("split"),
    };
    if let Some(given) = given {
        let given = lengths(&given).ok_or("a part has a negative length")?;
        let whole = given.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        return match whole == Some(n) {
            true => Ok(given),
            false => Err(format!("its parts {given:?} do not make up {n}")),
        };
    }
    let parts = call.outputs;
    if call.opset >= 18 && call.int("num_outputs", parts as i64) != parts as i64 {
        let number = call.int("num_outputs", 0);
        return Err(format!(
            "num_outputs is {number}, and it has {parts} results"
        ));
    }
    if parts == 0 {
        return Err("it has no part".into());
    }
    let size = n.div_ceil(parts);
    Ok((0..parts)
        .map(|i| size.min(n.saturating_sub(i * size)))
        .collect())
}

fn squeeze(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let drop = match call.axes(13, 1).ok()? {
        Some(axes) => resolve_all(&axes, a.shape.len()).ok()?,
        None => (0..a.shape.len()).filter(|&i| a.shape[i] == 1).collect(),
    };
    drop.iter().all(|&axis| a.shape[axis] == 1).then_some(())?;
    let kept = (0..a.shape.len()).filter(|i| !drop.contains(i));
    made(
        a.element,
        kept.map(|i| a.shape[i]).collect(),
        a.data.clone(),
    )
}

/// The shape with axes of length 1 at these places of the result.
pub fn unsqueezed(of: &[usize], axes: &[i64]) -> Result<Vec<usize>, String> {
    let rank = of.len() + axes.len();
    let new = resolve_all(axes, rank)?;
    let mut rest = of.iter();
    let shape = (0..rank).map(|axis| match new.contains(&axis) {
        true => Some(1),
        false => rest.next().copied(),
    });
    shape
        .collect::<Option<_>>()
        .ok_or_else(|| format!("its axes {axes:?} name one twice"))
}

fn unsqueeze(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let shape = unsqueezed(&a.shape, &call.axes(13, 1).ok()??).ok()?;
    made(a.element, shape, a.data.clone())
}

fn tile(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let times = lengths(call.known(1).ok()?.as_ints().ok()?)?;
    if a.shape.len() != 1 || times.len() != 1 {
        return None;
    }
    let n = a.shape[0];
    let places: Vec<usize> = (0..n.checked_mul(times[0])?.min(MOST + 1))
        .map(|i| i % n)
        .collect();
    pick(a, vec![places.len()], &places)
}

fn transpose(call: &Call<'_, '_>) -> Option<Vec<Array>> {
    let a = call.known(0).ok()?;
    let rank = a.shape.len();
    let order = match call.sizes("perm").ok()? {
        Some(order) => order,
        None => (0..rank).rev().collect(),
    };
    if order.len() != rank || order.iter().any(|&axis| axis >= rank) {
        return None;
    }
    let shape: Vec<usize> = order.iter().map(|&axis| a.shape[axis]).collect();
    let strides = strides(&a.shape);
    let n = count(&shape).filter(|&n| n <= MOST)?;
    let place = |mut flat: usize| {
        let mut at = 0;
        for axis in (0..rank).rev() {
            at += flat % shape[axis] * strides[order[axis]];
            flat /= shape[axis];
        }
        at
    };
    let places: Vec<usize> = (0..n).map(place).collect();
    pick(a, shape, &places)
}
