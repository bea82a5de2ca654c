//! More rules: views, joins, selection by index and by value, losses, attention.

use slabwise::DType;

use crate::case::{Axis, Op, Statement};
use crate::facts::{Fact, Len, Scope, broadcast};
use crate::rules::{floats_alike, open_at};

/// Facts about a statement's value; `None` if it is not valid.
pub fn infer(
    at: usize,
    statement: &Statement,
    args: &[&Fact],
    scope: &mut Scope<'_>,
) -> Option<Fact> {
    let op = &statement.op;
    let viewed = |x: &Fact, dims: Vec<Len>| Fact { dims, ..x.clone() };
    let is_index = |x: &Fact, limit: Len| {
        // In range at every length, that is, at the smallest one.
        matches!(x.dtype, DType::I32 | DType::U8)
            && x.exact
            && x.low >= 0.0
            && x.high < limit.least() as f64
    };
    Some(match (op, args) {
        (Op::Reshape(shape), [x]) => viewed(x, reshaped(shape, &x.dims, scope)?),
        (Op::Flatten(from), [x]) => {
            let joined = x.dims.get(*from..).filter(|j| !j.is_empty())?;
            let one = joined.iter().try_fold(Len::fixed(1), |n, &d| n.by(d))?;
            let mut dims = x.dims[..*from].to_vec();
            dims.push(one);
            viewed(x, dims)
        }
        (
            Op::Unflatten {
                axis,
                lengths: [a, b],
            },
            [x],
        ) => {
            let mut dims = x.dims.clone();
            (dims.get(*axis)?.as_fixed()? == a * b).then_some(())?;
            dims.splice(axis..=axis, [Len::fixed(*a), Len::fixed(*b)]);
            viewed(x, dims)
        }
        (Op::Permute(axes), [x]) => {
            let mut sorted = axes.clone();
            sorted.sort_unstable();
            sorted.iter().copied().eq(0..x.rank()).then_some(())?;
            viewed(x, axes.iter().map(|&a| x.dims[a]).collect())
        }
        (Op::T, [x]) => {
            let mut dims = x.dims.clone();
            let n = dims.len();
            (n >= 2).then_some(())?;
            dims.swap(n - 2, n - 1);
            viewed(x, dims)
        }
        (Op::Expand(shape), [x]) => {
            let own = |i: usize| (i + x.rank()).checked_sub(shape.len()).map(|i| x.dims[i]);
            let dim = |(i, &axis): (usize, &Axis)| {
                if axis == Axis::Open {
                    own(i)
                } else {
                    scope.len(axis)
                }
            };
            let dims: Vec<Len> = shape.iter().enumerate().map(dim).collect::<Option<_>>()?;
            (broadcast(&x.dims, &dims)? == dims).then(|| viewed(x, dims))?
        }
        (Op::Squeeze(axis), [x]) => {
            let mut dims = x.dims.clone();
            dims.get(*axis)?.is(1).then_some(())?;
            dims.remove(*axis);
            viewed(x, dims)
        }
        (Op::Unsqueeze(axis), [x]) => {
            let mut dims = x.dims.clone();
            (*axis <= dims.len()).then(|| dims.insert(*axis, Len::fixed(1)))?;
            viewed(x, dims)
        }
        (
            Op::Slice {
                axis,
                start,
                end,
                step,
            },
            [x],
        ) => {
            let mut dims = x.dims.clone();
            let len = dims.get_mut(*axis)?;
            let count = match end {
                Some(end) => {
                    (start <= end && *end <= len.least()).then(|| Len::fixed(end - start))?
                }
                None => len.less(*start)?,
            };
            *len = match step {
                0 => return None,
                1 => count,
                step => Len::fixed(count.as_fixed()?.div_ceil(*step)),
            };
            viewed(x, dims)
        }
        (Op::Split { axis, parts, which }, [x]) => {
            let mut dims = x.dims.clone();
            let len = dims.get_mut(*axis)?;
            *len = len.part(*parts).filter(|_| which < parts)?;
            viewed(x, dims)
        }
        (Op::Pad { pads, value }, [x]) => {
            let v = f64::from(*value);
            let holds = match x.dtype {
                DType::F32 | DType::F16 | DType::BF16 => true,
                DType::Bool => v == 0.0 || v == 1.0,
                DType::I32 | DType::U8 => v.fract() == 0.0 && (0.0..256.0).contains(&v),
            };
            (pads.len() == x.rank() && holds).then_some(())?;
            let padded = x
                .dims
                .iter()
                .zip(pads)
                .map(|(d, (a, b))| d.plus(Len::fixed(a + b)))
                .collect::<Option<_>>()?;
            viewed(x, padded).within(x.low.min(v), x.high.max(v))
        }
        (Op::Concat(axis), [first, rest @ ..]) => {
            let mut dims = first.dims.clone();
            dims.get(*axis)?;
            for other in rest {
                let alike = other.dtype == first.dtype && other.rank() == dims.len();
                (alike && (0..dims.len()).all(|i| i == *axis || other.dims[i] == dims[i]))
                    .then_some(())?;
                dims[*axis] = dims[*axis].plus(other.dims[*axis])?;
            }
            joined(args, dims)
        }
        (Op::Stack(axis), [first, rest @ ..]) => {
            let mut dims = first.dims.clone();
            let alike = rest
                .iter()
                .all(|o| o.dtype == first.dtype && o.dims == dims);
            (alike && *axis <= dims.len()).then(|| dims.insert(*axis, Len::fixed(args.len())))?;
            joined(args, dims)
        }
        (Op::Gather(axis), [x, index]) => {
            let limit = *x.dims.get(*axis)?;
            let alike = index.rank() == x.rank()
                && (0..x.rank()).all(|i| i == *axis || index.dims[i] == x.dims[i]);
            (alike && is_index(index, limit)).then(|| viewed(x, index.dims.clone()))?
        }
        (Op::IndexSelect(axis), [x, index]) => {
            let mut dims = x.dims.clone();
            let len = dims.get_mut(*axis)?;
            let ok = index.rank() == 1 && is_index(index, *len);
            *len = *index.dims.first()?;
            ok.then(|| viewed(x, dims))?
        }
        (Op::Embed, [table, index]) => {
            let ok = table.rank() == 2 && is_index(index, table.dims[0]);
            let flat = index.dims.iter().try_fold(Len::fixed(1), |n, d| n.by(*d));
            let mut dims = index.dims.clone();
            dims.push(*table.dims.get(1)?);
            flat.filter(|_| ok).map(|_| viewed(table, dims))?
        }
        (Op::OneHot(n), [x]) => {
            let mut dims = x.dims.clone();
            dims.push(Len::fixed(*n));
            is_index(x, Len::fixed(*n))
                .then(|| Fact::new(DType::F32, dims).within(0.0, 1.0).exact(true))?
        }
        (Op::Softmax(axis), [x]) => {
            float_axis(x, *axis).map(|_| Fact::new(DType::F32, x.dims.clone()).within(0.0, 1.0))?
        }
        (Op::LogSoftmax(axis), [x]) => {
            let bound = 2.0 * x.bound() + 6.0;
            float_axis(x, *axis)
                .map(|_| Fact::new(DType::F32, x.dims.clone()).within(-bound, 0.0))?
        }
        (Op::LogSumExp(axis), [x]) => {
            float_axis(x, *axis)?;
            let mut dims = x.dims.clone();
            dims.remove(*axis);
            Fact::new(DType::F32, dims).within(x.low, x.high + 6.0)
        }
        (Op::Normalize { axes, .. }, [x]) => {
            let mut sorted = axes.clone();
            sorted.sort_unstable();
            sorted.dedup();
            let lengths: Vec<Len> = sorted
                .iter()
                .map(|&a| x.dims.get(a).copied())
                .collect::<Option<_>>()?;
            let ok = sorted.len() == axes.len()
                && x.dtype == DType::F32
                && lengths.iter().all(|n| n.least() > 0);
            ok.then(|| Fact::new(DType::F32, x.dims.clone()).within(-16.0, 16.0))?
        }
        (Op::GroupNormalize { groups, .. }, [x]) => {
            let channels = x.dims.get(1)?.as_fixed()?;
            let filled = x.dims.iter().skip(1).all(|n| n.least() > 0);
            let ok = x.rank() > 2
                && x.dtype == DType::F32
                && *groups > 0
                && channels % groups == 0
                && filled;
            ok.then(|| Fact::new(DType::F32, x.dims.clone()).within(-16.0, 16.0))?
        }
        (Op::CrossEntropy(_), [x, labels]) => {
            let (classes, batch) = x.dims.split_last()?;
            let ok = batch == labels.dims.as_slice()
                && x.dtype == DType::F32
                && is_index(labels, *classes);
            (ok && batch.iter().all(|d| d.least() > 0)).then(|| loss(2.0 * x.bound() + 6.0))?
        }
        (Op::BinaryCrossEntropy | Op::BinaryCrossEntropyWithLogits, [x, target]) => {
            let ok = x.dtype == DType::F32
                && target.dtype == DType::F32
                && x.dims == target.dims
                && x.dims.iter().all(|d| d.least() > 0);
            ok.then(|| loss(90.0))?
        }
        (Op::Huber(_) | Op::Mse, [x, target]) => {
            let ok = x.dtype == DType::F32
                && target.dtype == DType::F32
                && x.dims == target.dims
                && x.dims.iter().all(|d| d.least() > 0);
            ok.then(|| loss((x.bound() + target.bound()).powi(2)))?
        }
        (Op::Attention { causal, tiles }, [q, k, v, mask @ ..]) => {
            let &[.., queries, w] = q.dims.as_slice() else {
                return None;
            };
            let (&[.., of_keys, wk], &[.., of_values, n]) = (k.dims.as_slice(), v.dims.as_slice())
            else {
                return None;
            };
            let alike = floats_alike(q, k)
                && q.dtype == DType::F32
                && v.dtype == DType::F32
                && w == wk
                && of_keys == of_values;
            let filled = w.as_fixed().is_some_and(|n| n > 0) && of_keys.least() > 0;
            // Tiles slice each operand as it is, so that shapes must not broadcast.
            let batch = &q.dims[..q.rank() - 2];
            let same = batch == &k.dims[..k.rank() - 2] && batch == &v.dims[..v.rank() - 2];
            (alike && filled && same && *tiles != Some(0)).then_some(())?;
            let mut scores = batch.to_vec();
            scores.extend([queries, of_keys]);
            scope.elements(&scores)?;
            if let [mask] = mask {
                let ok = matches!(mask.dtype, DType::Bool | DType::F32)
                    && broadcast(&scores, &mask.dims)? == scores;
                // With both, all keys of a query may be masked.
                (ok && !(*causal && mask.dtype == DType::Bool)).then_some(())?;
            }
            let mut dims = batch.to_vec();
            dims.extend([queries, n]);
            Fact::new(DType::F32, dims).within(v.low, v.high)
        }
        (Op::SelfAttention { heads, .. }, [x]) => {
            let (&width, rest) = x.dims.split_last()?;
            let ok = width
                .as_fixed()
                .is_some_and(|n| n > 0 && *heads > 0 && n % (3 * heads) == 0)
                && x.dtype == DType::F32
                && x.rank() > 1;
            (ok && rest.last()?.least() > 0).then_some(())?;
            let mut dims = x.dims.clone();
            *dims.last_mut()? = width.part(3)?;
            let mut scores = rest.to_vec();
            scores.extend([Len::fixed(*heads), *rest.last()?]);
            scope.elements(&scores)?;
            Fact::new(DType::F32, dims).within(x.low, x.high)
        }
        (Op::Nonzero, [x]) => {
            let most = scope.elements(&x.dims)?;
            let len = scope.found(
                if x.dtype == DType::Bool {
                    statement.args[0]
                } else {
                    at
                },
                most,
            )?;
            let longest = x.dims.iter().map(|d| scope.most(*d)).max().unwrap_or(1);
            let fact = Fact::new(DType::I32, vec![len, Len::fixed(x.rank())])
                .within(0.0, longest as f64 - 1.0);
            x.exact.then(|| fact.exact(true))?
        }
        (Op::MaskedSelect, [x, mask]) => {
            let dims = broadcast(&x.dims, &mask.dims)?;
            let most = scope.elements(&dims)?;
            let key = if dims == mask.dims {
                statement.args[1]
            } else {
                at
            };
            (mask.dtype == DType::Bool && mask.exact).then_some(())?;
            viewed(x, vec![scope.found(key, most)?])
        }
        (Op::Compress(axis), [x, mask]) => {
            let mut dims = x.dims.clone();
            let len = dims.get_mut(*axis)?;
            (mask.dtype == DType::Bool && mask.exact && mask.dims == [*len]).then_some(())?;
            *len = scope.found(statement.args[1], scope.most(*len))?;
            viewed(x, dims)
        }
        (Op::Unique, [x]) => {
            let most = scope.elements(&x.dims)?;
            (x.dtype != DType::Bool && x.exact).then_some(())?;
            viewed(x, vec![scope.found(at, most)?])
        }
        (Op::DynamicSlice(axis), [x, start, length]) => {
            let scalar =
                |s: &Fact| s.dtype == DType::I32 && s.rank() == 0 && s.exact && s.low >= 0.0;
            let mut dims = x.dims.clone();
            let len = dims.get_mut(*axis)?;
            let inside = start.high + length.high <= len.least() as f64;
            (scalar(start) && scalar(length) && inside).then_some(())?;
            *len = scope.found(at, scope.most(*len))?;
            viewed(x, dims)
        }
        (Op::SliceFrom { axis, length }, [x, start]) => {
            let mut dims = x.dims.clone();
            let len = dims.get_mut(*axis)?;
            let scalar =
                start.dtype == DType::I32 && start.rank() == 0 && start.exact && start.low >= 0.0;
            (scalar && start.high + *length as f64 <= len.least() as f64).then_some(())?;
            *len = Len::fixed(*length);
            viewed(x, dims)
        }
        (Op::Nms(_), [boxes, scores]) => {
            let ok = boxes.dtype == DType::F32
                && scores.dtype == DType::F32
                && boxes.exact
                && scores.exact;
            let shaped = boxes.rank() == 2 && boxes.dims[1].is(4) && scores.dims == boxes.dims[..1];
            (ok && shaped).then_some(())?;
            let most = scope.most(boxes.dims[0]);
            Fact::new(DType::I32, vec![scope.found(at, most)?])
                .within(0.0, most as f64 - 1.0)
                .exact(true)
        }
        _ => return None,
    })
}

fn joined(args: &[&Fact], dims: Vec<Len>) -> Fact {
    let low = args.iter().map(|a| a.low).fold(f64::INFINITY, f64::min);
    let high = args
        .iter()
        .map(|a| a.high)
        .fold(f64::NEG_INFINITY, f64::max);
    Fact::new(args[0].dtype, dims)
        .within(low, high)
        .exact(args.iter().all(|a| a.exact))
}

fn loss(bound: f64) -> Fact {
    Fact::new(DType::F32, Vec::new()).within(-bound, bound)
}

/// An axis of floats that has an element at every length.
fn float_axis(x: &Fact, axis: usize) -> Option<Len> {
    x.dims
        .get(axis)
        .copied()
        .filter(|n| x.dtype == DType::F32 && n.least() > 0)
}

fn reshaped(shape: &[Axis], from: &[Len], scope: &Scope<'_>) -> Option<Vec<Len>> {
    let product = |dims: &[Len]| {
        let fixed: usize = dims.iter().filter_map(|d| d.as_fixed()).product();
        let mut open: Vec<Len> = dims
            .iter()
            .copied()
            .filter(|d| d.as_fixed().is_none())
            .collect();
        // One unknown length can be joined with fixed ones; several cannot.
        if let [one] = open[..] {
            open = vec![one.by(Len::fixed(fixed))?];
            return Some((1, open));
        }
        Some((fixed, open))
    };
    let (fixed, open) = product(from)?;
    let Some(at) = open_at(shape) else {
        let to = scope.shape(shape)?;
        return (product(&to)? == (fixed, open)).then_some(to);
    };
    if shape.iter().filter(|a| **a == Axis::Open).count() > 1 {
        return None;
    }
    let rest: Vec<Axis> = shape
        .iter()
        .enumerate()
        .filter(|(i, _)| *i != at)
        .map(|(_, a)| *a)
        .collect();
    let rest = scope.shape(&rest)?;
    let (known, unknown) = product(&rest)?;
    let missing = match (open.as_slice(), unknown.as_slice()) {
        ([], []) if known > 0 && fixed % known == 0 => Len::fixed(fixed / known),
        ([one], []) if known > 0 => one.part(known)?,
        // The unknown length stays, as many times as before.
        ([one], [same]) => {
            let n = (1..=64).find(|&n| same.by(Len::fixed(n)) == Some(*one))?;
            Len::fixed(n)
        }
        _ => return None,
    };
    let mut dims = rest;
    dims.insert(at, missing);
    Some(dims)
}
