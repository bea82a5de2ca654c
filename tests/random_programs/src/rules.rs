//! The shape rules of the statements, written from the documentation: the valid statements, and
//! facts about their results.
//!
//! They judge slabwise too: a program that they accept and `compile` refuses is a finding, and so
//! is an output of another shape.

use slabwise::{DType, Window};

use crate::case::{Axis, Fold, Layer, Op, Program, Run, Statement, Unary};
use crate::facts::{Fact, Len, Scope, broadcast};
use crate::numbers;

/// Facts about each statement of a program; `None` if the program is not valid.
pub fn facts(program: &Program, scope: &mut Scope<'_>) -> Option<Vec<Fact>> {
    let mut facts: Vec<Fact> = Vec::with_capacity(program.statements.len());
    for (at, statement) in program.statements.iter().enumerate() {
        if statement.args.iter().any(|&a| a >= at) {
            return None;
        }
        let fact = infer(at, statement, &facts, scope)?;
        scope.elements(&fact.dims)?;
        facts.push(fact);
    }
    Some(facts)
}

/// Facts about a statement's value; `None` if it is not valid.
pub fn infer(
    at: usize,
    statement: &Statement,
    facts: &[Fact],
    scope: &mut Scope<'_>,
) -> Option<Fact> {
    let args: Vec<&Fact> = statement.args.iter().map(|&a| &facts[a]).collect();
    let args = args.as_slice();
    let op = &statement.op;
    let fact = match (op, args) {
        (
            Op::Input { .. }
            | Op::Param(_)
            | Op::State(_)
            | Op::Full { .. }
            | Op::Arange(_)
            | Op::Length(_)
            | Op::Uniform(_),
            [],
        ) => source(op, scope)?,
        (Op::UniformLike, [x]) => Fact::new(DType::F32, x.dims.clone())
            .within(0.0, 1.0)
            .exact(true),
        (Op::Unary(_) | Op::Number(..) | Op::Clamp(..) | Op::Cast(_) | Op::Checkpoint(_), [x]) => {
            numbers::of_one(op, x)?
        }
        (Op::Checkpoint(_), [x, w]) => {
            let product = inherit(matmul(x, w, scope)?, &Op::Matmul, args);
            numbers::of_one(op, &product)?
        }
        (Op::Binary(op), [x, y]) => Fact {
            dims: broadcast(&x.dims, &y.dims)?,
            ..numbers::of_two(*op, x, y)?
        },
        (Op::Select, [c, x, y]) => {
            let ok = c.dtype == DType::Bool && x.lane() == y.lane();
            let dims = broadcast(&broadcast(&c.dims, &x.dims)?, &y.dims)?;
            ok.then(|| {
                Fact::new(x.lane(), dims)
                    .within(x.low.min(y.low), x.high.max(y.high))
                    .exact(c.exact && x.exact && y.exact)
            })?
        }
        (Op::Fold { fold, axes, keep }, [x]) => folded(*fold, axes.as_deref(), *keep, x, scope)?,
        (Op::CumSum(axis), [x]) => {
            let n = scope.most(*x.dims.get(*axis)?) as f64;
            let ok = matches!(x.dtype, DType::F32 | DType::I32);
            let n = n.max(1.0);
            ok.then(|| {
                Fact::new(x.dtype, x.dims.clone())
                    .within(x.low.min(n * x.low), x.high.max(n * x.high))
                    .exact(x.dtype == DType::I32)
            })?
        }
        (Op::Run { run, axis, by }, [x]) => running(*run, *axis, *by, x, scope)?,
        (Op::Scatter(axis, how), [x, index, v]) => scattered(*axis, *how, [x, index, v], scope)?,
        (Op::SliceAssign { axis, start }, [x, v]) => {
            let len = x.dims.get(*axis)?.as_fixed()?;
            replaced(x, v, *axis)
                .filter(|_| start + v.dims[*axis].as_fixed().unwrap_or(len) <= len)?
        }
        (Op::UpdateSlice(axis), [x, v, start]) => {
            let (len, part) = (
                x.dims.get(*axis)?.as_fixed()?,
                v.dims.get(*axis)?.as_fixed()?,
            );
            let scalar =
                start.dtype == DType::I32 && start.rank() == 0 && start.exact && start.low >= 0.0;
            let inside = start.high + part as f64 <= len as f64;
            replaced(x, v, *axis).filter(|_| scalar && inside)?
        }
        (Op::TopK { k, axis, positions }, [x]) => {
            let n = x.dims.get(*axis)?.least();
            let most = scope.most(x.dims[*axis]);
            let mut dims = x.dims.clone();
            dims[*axis] = Len::fixed(*k);
            let ok = x.dtype != DType::Bool && (1..=n).contains(k);
            let fact = if *positions {
                Fact::new(DType::I32, dims).within(0.0, most as f64 - 1.0)
            } else {
                Fact {
                    dims,
                    ..(*x).clone()
                }
            };
            ok.then(|| fact.exact(x.exact))?
        }
        (Op::Argsort(_), [x]) => {
            let n = scope.most(*x.dims.last()?);
            (x.dtype != DType::Bool).then(|| {
                Fact::new(DType::I32, x.dims.clone())
                    .within(0.0, n as f64 - 1.0)
                    .exact(x.exact)
            })?
        }
        (Op::Sort(_), [x]) => (x.dtype != DType::Bool && x.rank() > 0).then(|| (*x).clone())?,
        (Op::Matmul, [a, b]) => matmul(a, b, scope)?,
        (Op::Einsum(text), _) => einsum(text, args, scope)?,
        (Op::Conv2d(g), [x, w]) => {
            let (image, weight) = (fixed_from(x, 1)?, w.fixed()?);
            let ([c, h, wd], [out, per, kh, kw]) = (
                image.as_slice().try_into().ok()?,
                weight.as_slice().try_into().ok()?,
            );
            let ok = floats_alike(x, w)
                && g.groups > 0
                && c == per * g.groups
                && out % g.groups == 0
                && c > 0
                && out > 0;
            let axis =
                |n: usize, k: usize, i: usize| windows(n, k, g.stride[i], g.pad[i], g.dilation[i]);
            let (oh, ow) = (axis(h, kh, 0)?, axis(wd, kw, 1)?);
            let dims = vec![x.dims[0], Len::fixed(out), Len::fixed(oh), Len::fixed(ow)];
            let bound = x.bound() * w.bound() * (per * kh * kw) as f64;
            ok.then(|| Fact::new(DType::F32, dims).within(-bound, bound))?
        }
        (Op::ConvTranspose2d(g), [x, w]) => {
            let (image, weight) = (fixed_from(x, 1)?, w.fixed()?);
            let ([c, h, wd], [of, per, kh, kw]) = (
                image.as_slice().try_into().ok()?,
                weight.as_slice().try_into().ok()?,
            );
            let ok = floats_alike(x, w)
                && g.groups > 0
                && c == of
                && c > 0
                && c % g.groups == 0
                && per > 0
                && h * wd * kh * kw > 0;
            let axis = |n: usize, k: usize, i: usize| {
                ((n - 1) * g.stride[i] + g.dilation[i] * (k - 1) + 1)
                    .checked_sub(2 * g.pad[i])
                    .filter(|&n| n > 0)
            };
            if !ok {
                return None;
            }
            let dims = vec![
                x.dims[0],
                Len::fixed(per * g.groups),
                Len::fixed(axis(h, kh, 0)?),
                Len::fixed(axis(wd, kw, 1)?),
            ];
            let bound = x.bound() * w.bound() * (c / g.groups * kh * kw) as f64;
            Fact::new(DType::F32, dims).within(-bound, bound)
        }
        (Op::MaxPool(window), [x]) => {
            let fact = pooled(window, x)?.within(x.low, x.high).exact(x.exact);
            Fact {
                smooth: x.exact,
                ..fact
            }
        }
        (Op::AvgPool(window), [x]) => pooled(window, x)?.within(x.low.min(0.0), x.high.max(0.0)),
        (Op::GlobalAvgPool, [x]) => {
            folded(Fold::Mean, Some(&[2, 3]), false, x, scope).filter(|_| x.rank() == 4)?
        }
        (Op::AdaptiveAvgPool(size), [x]) => {
            let ok = x.rank() == 4
                && x.dtype == DType::F32
                && (0..2).all(|i| x.dims[2 + i].as_fixed().is_some_and(|n| n > 0) && size[i] > 0);
            ok.then(|| {
                let dims = vec![
                    x.dims[0],
                    x.dims[1],
                    Len::fixed(size[0]),
                    Len::fixed(size[1]),
                ];
                Fact::new(DType::F32, dims).within(x.low, x.high)
            })?
        }
        (Op::Dropout(p), [x]) => {
            let bound = if scope.training && *p < 1.0 {
                x.bound() / f64::from(1.0 - p)
            } else {
                x.bound()
            };
            (x.dtype == DType::F32).then(|| {
                Fact::new(DType::F32, x.dims.clone())
                    .within(-bound, bound)
                    .exact(x.exact && !scope.training)
            })?
        }
        (Op::Keep, [x]) => (*x).clone(),
        (Op::Gradient, [of, wrt, others @ ..]) => {
            // The mean of no elements is not a number.
            let filled = |f: &Fact| f.dims.iter().all(|d| d.as_fixed().is_some_and(|n| n > 0));
            let others = others.iter().all(|f| f.dtype == DType::F32 && filled(f));
            (others && args.len() <= 3).then_some(())?;
            (of.dtype == DType::F32 && wrt.dtype.is_float()).then(|| {
                // The gradient of a mean over no elements is not a number.
                Fact::new(DType::F32, wrt.dims.clone()).within(-8.0, 8.0)
            })?
        }
        (Op::Method(method), _) => crate::method_rules::infer(method, args, scope)?,
        (Op::Layer { layer, sizes, .. }, [x]) => layered(scope, *layer, *sizes, x)?,
        _ => {
            return crate::shapes::infer(at, statement, args, scope)
                .map(|fact| inherit(fact, op, args));
        }
    };
    Some(inherit(fact, op, args))
}

/// Whether a gradient flows through a statement to its operands.
fn flows(op: &Op) -> bool {
    let stops = |u: &Unary| {
        matches!(
            u,
            Unary::Detach | Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round | Unary::Not
        )
    };
    match op {
        Op::Unary(u) => !stops(u),
        Op::Checkpoint(list) => !list.iter().any(stops),
        // The gradient of a linear function depends on nothing.
        Op::Gradient
        | Op::Unique
        | Op::UniformLike
        | Op::OneHot(_)
        | Op::Nonzero
        | Op::Fold {
            fold: Fold::Any | Fold::All | Fold::ArgMax | Fold::ArgMin,
            ..
        }
        | Op::Run {
            run: Run::ArgMax, ..
        } => false,
        _ => true,
    }
}

/// Adds the facts that follow from the operands of any statement.
fn inherit(mut fact: Fact, op: &Op, args: &[&Fact]) -> Fact {
    let through = fact.dtype.is_float() && flows(op);
    let makes = match op {
        Op::Param(at) => 1 << (at % 8),
        Op::Layer { name, .. } => 1 << (8 + name % 56),
        _ => 0,
    };
    let floats = args.iter().filter(|a| through && a.dtype.is_float());
    fact.learns = floats.fold(makes, |all, a| all | a.learns);
    fact.smooth = fact.smooth && args.iter().all(|a| a.smooth);
    if !fact.dtype.is_float() {
        fact.smooth = true;
    }
    fact
}

/// A running result along an axis.
fn running(
    run: Run,
    axis: usize,
    [exclusive, _]: [bool; 2],
    x: &Fact,
    scope: &mut Scope<'_>,
) -> Option<Fact> {
    let n = (scope.most(*x.dims.get(axis)?) as f64).max(1.0);
    let bound = x.bound();
    let (takes, fact) = match run {
        Run::Sum => (
            matches!(x.dtype, DType::F32 | DType::I32),
            Fact::new(x.dtype, x.dims.clone()).within(-n * bound, n * bound),
        ),
        Run::Product => {
            let most = bound.max(1.0).powf(n);
            (
                matches!(x.dtype, DType::F32 | DType::I32) && most < 1e6,
                Fact::new(x.dtype, x.dims.clone()).within(-most, most),
            )
        }
        Run::LogSumExp => (
            // Of no elements it is −∞.
            x.dtype == DType::F32 && !exclusive,
            Fact::new(x.dtype, x.dims.clone()).within(-bound, bound + n.ln()),
        ),
        Run::Max | Run::Min => (x.dtype != DType::Bool && !exclusive, (*x).clone()),
        Run::ArgMax => (
            x.dtype != DType::Bool && !exclusive,
            Fact::new(DType::I32, x.dims.clone()).within(0.0, n - 1.0),
        ),
    };
    let chooses = matches!(run, Run::Max | Run::Min | Run::ArgMax);
    takes.then(|| fact.exact(x.exact && (chooses || x.dtype == DType::I32)))
}

fn scattered(
    axis: usize,
    how: slabwise::Scatter,
    [x, index, v]: [&Fact; 3],
    scope: &mut Scope<'_>,
) -> Option<Fact> {
    use slabwise::Scatter;
    let limit = x.dims.get(axis)?.least() as f64;
    let alike = index.dims == v.dims
        && index.rank() == x.rank()
        && (0..x.rank()).all(|i| i == axis || index.dims[i] == x.dims[i]);
    let indexes = matches!(index.dtype, DType::I32 | DType::U8)
        && index.exact
        && index.low >= 0.0
        && index.high < limit;
    let n = (scope.most(*index.dims.get(axis)?) as f64).max(1.0);
    let takes = how == Scatter::Set || matches!(x.dtype, DType::F32 | DType::I32);
    let hull = (x.low.min(v.low), x.high.max(v.high));
    let (low, high) = match how {
        Scatter::Add => (-x.bound() - n * v.bound(), x.bound() + n * v.bound()),
        Scatter::Mul => {
            let most = x.bound() * v.bound().max(1.0).powf(n);
            (-most, most)
        }
        _ => hull,
    };
    let sums = matches!(how, Scatter::Add | Scatter::Mul);
    let exact = x.exact && v.exact && (!sums || x.dtype == DType::I32);
    (alike && indexes && takes && x.dtype == v.dtype && high < 1e6).then(|| {
        Fact::new(x.dtype, x.dims.clone())
            .within(low, high)
            .exact(exact)
    })
}

/// A tensor of which a part has other values.
fn replaced(x: &Fact, v: &Fact, axis: usize) -> Option<Fact> {
    let alike = v.rank() == x.rank()
        && x.dtype == v.dtype
        && (0..x.rank()).all(|i| i == axis || v.dims[i] == x.dims[i]);
    v.dims.get(axis)?.as_fixed()?;
    alike.then(|| {
        Fact::new(x.dtype, x.dims.clone())
            .within(x.low.min(v.low), x.high.max(v.high))
            .exact(x.exact && v.exact)
    })
}

fn source(op: &Op, scope: &Scope<'_>) -> Option<Fact> {
    let of_type = |dtype: DType| match dtype {
        DType::F32 | DType::F16 | DType::BF16 => (-2.0, 2.0),
        DType::I32 | DType::U8 => (0.0, 2.0),
        DType::Bool => (0.0, 1.0),
    };
    let made = |dtype: DType, dims: Vec<Len>| {
        let (low, high) = of_type(dtype);
        Fact::new(dtype, dims).within(low, high).exact(true)
    };
    let fixed = |dims: &[usize]| dims.iter().map(|&n| Len::fixed(n)).collect();
    Some(match op {
        Op::Input { dtype, shape, .. } => made(*dtype, scope.shape(shape)?),
        Op::Param(at) => {
            let param = scope.case.params.get(*at)?;
            let fact = made(DType::F32, fixed(&param.dims));
            // Statistics, averages and weights change from step to step.
            param
                .value
                .map_or(fact.clone(), |v| fact.within(f64::from(v), f64::from(v)))
                .exact(false)
                .within(-3.0, 3.0)
        }
        Op::State(at) => {
            let state = scope.case.states.get(*at)?;
            made(state.dtype, fixed(&state.dims))
                .exact(!state.dtype.is_float())
                .within(-8.0, 8.0)
        }
        Op::Full {
            value,
            dtype,
            shape,
        } => {
            let v = numbers::known(*value);
            Fact::new(*dtype, scope.shape(shape)?)
                .within(v, v)
                .exact(true)
        }
        Op::Arange(axis) => {
            let n = scope.len(*axis)?;
            Fact::new(DType::I32, vec![n])
                .within(0.0, scope.most(n).max(1) as f64 - 1.0)
                .exact(true)
        }
        Op::Length(axis) => {
            let n = scope.len(*axis)?;
            Fact::new(DType::I32, Vec::new())
                .within(n.least() as f64, scope.most(n) as f64)
                .exact(true)
        }
        Op::Uniform(shape) => Fact::new(DType::F32, scope.shape(shape)?)
            .within(0.0, 1.0)
            .exact(true),
        _ => return None,
    })
}

fn folded(
    fold: Fold,
    axes: Option<&[usize]>,
    keep: bool,
    x: &Fact,
    scope: &Scope<'_>,
) -> Option<Fact> {
    let all: Vec<usize> = (0..x.rank()).collect();
    let given = axes.unwrap_or(&all);
    let mut sorted = given.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() != given.len()
        || sorted.last().is_some_and(|&a| a >= x.rank())
        || (keep && axes.is_none())
    {
        return None;
    }
    let lengths: Vec<Len> = sorted.iter().map(|&a| x.dims[a]).collect();
    let count = scope.elements(&lengths)?;
    let may_be_empty = lengths.iter().any(|n| n.least() == 0);
    let logic = matches!(fold, Fold::Any | Fold::All);
    let takes = match fold {
        Fold::Mean => true,
        _ => logic == (x.dtype == DType::Bool) && x.dtype != DType::U8,
    };
    // No elements have no maximum, and the mean of no elements differs between libraries.
    let needs_one = matches!(
        fold,
        Fold::Max | Fold::Min | Fold::ArgMax | Fold::ArgMin | Fold::Mean
    );
    if !takes || (needs_one && may_be_empty) {
        return None;
    }
    let n = count as f64;
    let power = x.bound().max(1.0).powf(n);
    let (dtype, low, high) = match fold {
        Fold::Sum => (
            x.lane(),
            (n * x.low).min(x.low).min(0.0),
            (n * x.high).max(x.high).max(0.0),
        ),
        Fold::Prod => (x.lane(), -power, power),
        Fold::Max | Fold::Min => (x.lane(), x.low, x.high),
        Fold::Mean => (DType::F32, x.low, x.high),
        Fold::Any | Fold::All => (DType::Bool, 0.0, 1.0),
        Fold::ArgMax | Fold::ArgMin => (DType::I32, 0.0, n - 1.0),
    };
    let rounds = match fold {
        Fold::Mean => true,
        Fold::Sum | Fold::Prod => x.lane() == DType::F32,
        _ => false,
    };
    let dims = x
        .dims
        .iter()
        .enumerate()
        .filter(|(i, _)| keep || !sorted.contains(i));
    let dims = dims
        .map(|(i, &d)| {
            if sorted.contains(&i) {
                Len::fixed(1)
            } else {
                d
            }
        })
        .collect();
    let smooth = x.exact || !matches!(fold, Fold::Max | Fold::Min | Fold::Prod);
    Some(Fact {
        smooth,
        ..Fact::new(dtype, dims)
            .within(low, high)
            .exact(x.exact && !rounds)
    })
}

pub(crate) fn floats_alike(a: &Fact, b: &Fact) -> bool {
    a.dtype.is_float() && a.dtype == b.dtype
}

/// The lengths from an axis on, if they are fixed.
fn fixed_from(x: &Fact, axis: usize) -> Option<Vec<usize>> {
    x.dims.get(axis..)?.iter().map(|d| d.as_fixed()).collect()
}

/// The number of positions of a window along an axis, at least one.
fn windows(n: usize, k: usize, stride: usize, pad: usize, dilation: usize) -> Option<usize> {
    let span = dilation * k.checked_sub(1)? + 1;
    (stride > 0 && n > 0).then_some(())?;
    Some((n + 2 * pad).checked_sub(span)? / stride + 1)
}

fn pooled(window: &Window, x: &Fact) -> Option<Fact> {
    let image = fixed_from(x, 2).filter(|i| i.len() == 2 && x.dtype == DType::F32)?;
    if window.pad.iter().zip(window.k).any(|(&p, k)| 2 * p > k) {
        return None;
    }
    let axis = |i: usize| windows(image[i], window.k[i], window.stride[i], window.pad[i], 1);
    Some(Fact::new(
        DType::F32,
        vec![
            x.dims[0],
            x.dims[1],
            Len::fixed(axis(0)?),
            Len::fixed(axis(1)?),
        ],
    ))
}

fn matmul(a: &Fact, b: &Fact, scope: &Scope<'_>) -> Option<Fact> {
    if !floats_alike(a, b) || a.rank() == 0 || b.rank() == 0 {
        return None;
    }
    let (mut da, mut db) = (a.dims.clone(), b.dims.clone());
    let (row, column) = (da.len() == 1, db.len() == 1);
    if row {
        da.insert(0, Len::fixed(1));
    }
    if column {
        db.push(Len::fixed(1));
    }
    let (ra, rb) = (da.len(), db.len());
    let k = da[ra - 1];
    if k != db[rb - 2] {
        return None;
    }
    let mut dims = broadcast(&da[..ra - 2], &db[..rb - 2])?;
    let (mut left, mut right) = (dims.clone(), dims.clone());
    left.extend(&da[ra - 2..]);
    right.extend(&db[rb - 2..]);
    scope.elements(&left)?;
    scope.elements(&right)?;
    if !row {
        dims.push(da[ra - 2]);
    }
    if !column {
        dims.push(db[rb - 1]);
    }
    let bound = a.bound() * b.bound() * scope.most(k) as f64;
    Some(Fact::new(DType::F32, dims).within(-bound, bound))
}

fn einsum(text: &str, args: &[&Fact], scope: &Scope<'_>) -> Option<Fact> {
    let (left, right) = text.split_once("->")?;
    let mut known: Vec<(char, Len)> = Vec::new();
    let operands: Vec<&str> = left.split(',').collect();
    if operands.len() != args.len() {
        return None;
    }
    let mut bound = 1.0;
    for (letters, x) in operands.iter().zip(args) {
        // Of two letters joined into one axis, at least one needs a fixed length.
        if letters.chars().count() != x.rank() || x.dtype != DType::F32 || x.fixed().is_none() {
            return None;
        }
        bound *= x.bound();
        for (letter, &len) in letters.chars().zip(&x.dims) {
            match known.iter().find(|(l, _)| *l == letter) {
                Some((_, other)) if *other != len => return None,
                Some(_) => {}
                None => known.push((letter, len)),
            }
        }
    }
    let summed: f64 = known
        .iter()
        .filter(|(l, _)| !right.contains(*l))
        .map(|(_, n)| scope.most(*n) as f64)
        .product();
    let dims = right
        .chars()
        .map(|c| known.iter().find(|(l, _)| *l == c).map(|(_, n)| *n))
        .collect::<Option<Vec<_>>>()?;
    Some(Fact::new(DType::F32, dims).within(-bound * summed, bound * summed))
}

fn layered(scope: &Scope, layer: Layer, [inputs, outputs]: [usize; 2], x: &Fact) -> Option<Fact> {
    let last = x.dims.last().copied();
    let float = x.dtype == DType::F32;
    let with_last = |n: usize| {
        let mut dims = x.dims.clone();
        *dims.last_mut()? = Len::fixed(n);
        Some(dims)
    };
    let like = |ok: bool, bound: f64| {
        ok.then(|| Fact::new(DType::F32, x.dims.clone()).within(-bound, bound))
    };
    let ends = float && inputs > 0 && last.is_some_and(|n| n.is(inputs));
    let channels = |rank: usize| float && x.rank() == rank && inputs > 0 && x.dims[1].is(inputs);
    // There are no statistics of an empty batch.
    let filled = x.dims.iter().all(|d| d.least() > 0);
    match layer {
        Layer::Linear => {
            let bound = x.bound() * 2.0 * inputs as f64 + 2.0;
            (ends && outputs > 0)
                .then(|| with_last(outputs))?
                .map(|dims| Fact::new(DType::F32, dims).within(-bound, bound))
        }
        Layer::LayerNorm | Layer::RmsNorm => like(ends, 8.0),
        Layer::BatchNorm1d => like((channels(2) || channels(3)) && filled, 8.0),
        Layer::BatchNorm2d => like(channels(4) && filled, 8.0),
        Layer::Lstm | Layer::Gru | Layer::Rnn | Layer::Deep => {
            let ok = ends
                && x.rank() == 3
                && outputs > 0
                && x.dims[1].as_fixed().is_some_and(|n| (1..=4).contains(&n));
            let sides = if layer == Layer::Deep { 2 } else { 1 };
            ok.then(|| with_last(sides * outputs))?
                .map(|dims| Fact::new(DType::F32, dims).within(-1.0, 1.0))
        }
        Layer::Embedding => {
            let index = matches!(x.dtype, DType::I32 | DType::U8)
                && x.low >= 0.0
                && x.high < inputs as f64
                && outputs > 0;
            let mut dims = x.dims.clone();
            dims.push(Len::fixed(outputs));
            // Rows are looked up along one axis.
            let flat = x.dims.iter().try_fold(Len::fixed(1), |n, d| n.by(*d));
            flat.filter(|_| index)
                .map(|_| Fact::new(DType::F32, dims).within(-2.0, 2.0))
        }
        Layer::InstanceNorm | Layer::GroupNorm => {
            let groups = if layer == Layer::GroupNorm {
                outputs
            } else {
                1
            };
            let divides = groups > 0 && inputs % groups == 0;
            let image = channels(3) || channels(4);
            like(image && divides && filled, 16.0)
        }
        Layer::MultiHeadAttention | Layer::GroupedQueryAttention | Layer::Encoder => {
            let ok = ends && x.rank() == 3 && outputs > 0 && inputs % outputs == 0;
            (ok && filled).then_some(())?;
            let (batch, length) = (x.dims[0], x.dims[1]);
            scope.elements(&[batch, Len::fixed(outputs), length, length])?;
            like(true, 8.0)
        }
    }
}

/// The position of the open (`-1`) length of a shape.
pub(crate) fn open_at(shape: &[Axis]) -> Option<usize> {
    shape.iter().position(|a| *a == Axis::Open)
}
