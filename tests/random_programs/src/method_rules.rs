//! The shape rules of methods with options, written from the documentation.

use slabwise::tensor::{Beyond, Sampling};
use slabwise::tensor::{ConvOptions, Interpolate, PadMode, Padding, PoolOptions, Reduction};
use slabwise::{DType, Quantization};

use crate::facts::{Fact, Len, Scope};
use crate::method::{Loss, Method, Numbers, Pool};

/// Facts about the result; `None` if the call is not valid.
pub fn infer(method: &Method, args: &[&Fact], scope: &mut Scope<'_>) -> Option<Fact> {
    match (method, args) {
        (Method::AttentionWith { .. }, [q, k, v, mask @ ..]) => {
            attention(method, [q, k, v], mask.first().copied(), scope)
        }
        (Method::Conv1d(options), [x, w]) => convolved(options, x, w),
        (Method::Conv2d(options), [x, w]) => convolved(options, x, w),
        (Method::Conv3d(options), [x, w]) => convolved(options, x, w),
        (Method::ConvTranspose1d(options), [x, w]) => transposed(options, x, w),
        (Method::ConvTranspose2d(options), [x, w]) => transposed(options, x, w),
        (Method::Pool1d(pool, options), [x]) => pooled(*pool, options, x),
        (Method::Pool2d(pool, options), [x]) => pooled(*pool, options, x),
        (Method::AdaptiveMaxPool(size), [x]) => {
            let fits = |i: usize| {
                let n = x.dims.get(2 + i)?.as_fixed()?;
                (n > 0 && size[i] > 0).then(|| Len::fixed(size[i]))
            };
            let dims = vec![*x.dims.first()?, *x.dims.get(1)?, fits(0)?, fits(1)?];
            let fact = Fact::new(DType::F32, dims).within(x.low, x.high);
            let fact = Fact {
                smooth: x.exact,
                ..fact.exact(x.exact)
            };
            (x.rank() == 4 && x.dtype == DType::F32).then_some(fact)
        }
        (Method::Interpolate(how, size), [x]) => interpolated(*how, size, x),
        (
            Method::GridSample {
                sampling, beyond, ..
            },
            [x, grid],
        ) => sampled(*sampling, *beyond, x, grid),
        (Method::LocalResponseNorm(size), [x]) => {
            let places = x.dims.get(2..).filter(|p| !p.is_empty())?;
            let fixed = x.dims[1..].iter().all(|d| d.least() > 0);
            let ok = x.dtype == DType::F32
                && *size > 0
                && fixed
                && x.dims[1].as_fixed().is_some()
                && places.iter().all(|d| d.as_fixed().is_some());
            ok.then(|| like(x, x.bound()))
        }
        (Method::L2Normalize(axes), [x]) => {
            filled_axes(axes, x)?;
            Some(Fact {
                smooth: x.exact,
                ..like(x, 1.0 + 2.0 * x.bound().min(0.5))
            })
        }
        (Method::Variance(axes), [x]) => {
            filled_axes(axes, x)?;
            let mut dims = x.dims.clone();
            axes.iter().for_each(|&a| dims[a] = Len::fixed(1));
            Some(Fact::new(DType::F32, dims).within(0.0, x.bound() * x.bound()))
        }
        (Method::Loss(loss, by), [x, y]) => compared(*loss, *by, x, y, scope),
        (
            Method::CrossEntropyWith {
                axis,
                ignore,
                smoothing,
                reduction,
            },
            [x, labels, weights @ ..],
        ) => {
            let classes = *x.dims.get(*axis)?;
            let mut rest = x.dims.clone();
            rest.remove(*axis);
            let within = matches!(labels.dtype, DType::I32 | DType::U8)
                && labels.exact
                && labels.low >= 0.0
                && labels.high < classes.least() as f64;
            let filled = x.dims.iter().all(|d| d.least() > 0);
            let spreads = *smoothing == 0.0 || classes.as_fixed().is_some();
            let weighs = match weights {
                [w] => {
                    w.dtype == DType::F32 && w.dims == [classes] && w.low > 0.25 && w.high <= 8.0
                }
                _ => true,
            };
            // The mean over no labels is no number.
            let counts = *reduction != Reduction::Mean || ignore.is_none_or(|i| i < 0);
            (x.dtype == DType::F32 && labels.dims == rest && within).then_some(())?;
            (filled && weighs && counts && spreads).then_some(())?;
            let weight = weights.first().map_or(1.0, |w| w.high);
            let bound = (2.0 * x.bound() + 6.0) * weight;
            let fact = Fact::new(DType::F32, rest).within(-bound, bound);
            reduced(fact, *reduction, scope)
        }
        (Method::Keyed { numbers, shape, .. }, []) => {
            let dims = scope.shape(shape)?;
            let (dtype, low, high) = match numbers {
                Numbers::Uniform => (DType::F32, 0.0, 1.0),
                Numbers::Normal => (DType::F32, -6.0, 6.0),
                Numbers::Bernoulli => (DType::Bool, 0.0, 1.0),
                Numbers::Randint => (DType::I32, 0.0, 2.0),
                Numbers::Exponential => (DType::F32, 0.0, 17.0),
                Numbers::Gumbel => (DType::F32, -3.0, 18.0),
            };
            let exact = matches!(
                numbers,
                Numbers::Uniform | Numbers::Bernoulli | Numbers::Randint
            );
            Some(Fact::new(dtype, dims).within(low, high).exact(exact))
        }
        (Method::Flip(axes), [x]) => {
            distinct(axes, x)?;
            Some((*x).clone())
        }
        (Method::Roll(axis, _), [x]) => {
            x.dims.get(*axis)?.as_fixed()?;
            Some((*x).clone())
        }
        (Method::RepeatInterleave(axis, times), [x]) => {
            let mut fact = (*x).clone();
            let len = fact.dims.get_mut(*axis)?;
            *len = len.by(Len::fixed(*times))?;
            Some(fact)
        }
        (Method::PadWith(mode, pads), [x]) => padded(*mode, pads, x),
        (Method::Triangle { .. }, [x]) => (x.rank() > 1).then(|| {
            let (low, high) = (x.low.min(0.0), x.high.max(0.0));
            (*x).clone().within(low, high)
        }),
        (Method::LinearRecurrence { axis, .. }, [x, factors]) => {
            let n = scope.most(*x.dims.get(*axis)?).max(1) as f64;
            let alike = x.dtype == factors.dtype && x.dims == factors.dims;
            let bound = n * x.bound() * factors.bound().max(1.0).powf(n);
            let ok = alike && matches!(x.dtype, DType::F32 | DType::I32) && bound < 1e6;
            let exact = x.exact && factors.exact && x.dtype == DType::I32;
            ok.then(|| {
                Fact::new(x.dtype, x.dims.clone())
                    .within(-bound, bound)
                    .exact(exact)
            })
        }
        (Method::Scan(l), args) => l.infer(args),
        (Method::Index(method), args) => method.infer(args, scope),
        (&Method::Ctc { blank, reduction }, [x, labels]) => {
            let [time, n, classes] = x.dims[..] else {
                return None;
            };
            let time = time.as_fixed().filter(|&n| n > 0)? as f64;
            let &[of, count] = &labels.dims[..] else {
                return None;
            };
            let count = count.as_fixed().filter(|&n| n > 0)?;
            let types = x.dtype == DType::F32 && labels.dtype == DType::I32 && labels.exact;
            let within = labels.low >= 0.0 && labels.high < f64::from(blank);
            let known = blank >= 0 && classes.least() > blank as usize;
            (types && within && known && of == n && n.least() > 0).then_some(())?;
            (reduction != Reduction::BatchMean).then_some(())?;
            // There are at most so many alignments, each with one logarithm for each step.
            let states = (2 * count + 1) as f64;
            let bound = time * (x.bound() + 2.0) + states.ln();
            let fact = Fact::new(DType::F32, vec![n]).within(-bound, bound);
            reduced(fact, reduction, scope)
        }
        (&Method::Dequantize(format), [numbers, scales, zeros @ ..]) => {
            dequantized(format, [numbers, scales], zeros.first().copied())
        }
        _ => None,
    }
}

/// Weights that packed numbers stand for.
fn dequantized(
    Quantization { bits, block }: Quantization,
    [numbers, scales]: [&Fact; 2],
    zeros: Option<&Fact>,
) -> Option<Fact> {
    (matches!(bits, 2 | 4 | 8) && block > 0).then_some(())?;
    let (per_byte, block) = (8 / bits as usize, block as usize);
    let [rows, bytes] = numbers.dims[..] else {
        return None;
    };
    let columns = bytes.as_fixed()? * per_byte;
    (numbers.dtype == DType::U8 && columns.is_multiple_of(block)).then_some(())?;
    let blocks = columns / block;
    let fits = |x: &Fact, columns: usize| x.dims == [rows, Len::fixed(columns)];
    (scales.dtype == DType::F32 && fits(scales, blocks)).then_some(())?;
    let most = f64::from((1 << bits) - 1);
    let (low, high) = match zeros {
        None => (-(most + 1.0) / 2.0, (most - 1.0) / 2.0),
        Some(zeros) if zeros.dtype == DType::U8 => {
            fits(zeros, blocks.div_ceil(per_byte)).then_some((-most, most))?
        }
        Some(zeros) => (zeros.dtype == DType::F32 && fits(zeros, blocks))
            .then_some((-zeros.high, most - zeros.low))?,
    };
    let bound = low.abs().max(high.abs()) * scales.bound();
    let dims = vec![rows, Len::fixed(columns)];
    Some(Fact::new(DType::F32, dims).within(-bound, bound))
}

/// A value of the shape of another, of this largest magnitude.
fn like(x: &Fact, bound: f64) -> Fact {
    Fact::new(DType::F32, x.dims.clone()).within(-bound, bound)
}

fn distinct(axes: &[usize], x: &Fact) -> Option<()> {
    let mut sorted = axes.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    (sorted.len() == axes.len() && sorted.iter().all(|&a| a < x.rank())).then_some(())
}

fn filled_axes(axes: &[usize], x: &Fact) -> Option<()> {
    distinct(axes, x)?;
    (x.dtype == DType::F32 && axes.iter().all(|&a| x.dims[a].least() > 0)).then_some(())
}

fn attention(
    method: &Method,
    [q, k, v]: [&Fact; 3],
    mask: Option<&Fact>,
    scope: &Scope<'_>,
) -> Option<Fact> {
    let Method::AttentionWith {
        past,
        window,
        tiles,
        ..
    } = *method
    else {
        return None;
    };
    let rank = q.rank();
    let floats = [q, k, v].iter().all(|f| f.dtype == DType::F32);
    (rank >= 3 && rank == k.rank() && rank == v.rank() && floats).then_some(())?;
    let (queries, width) = (q.dims[rank - 2], q.dims[rank - 1]);
    let keys = k.dims[rank - 2];
    let filled = width.as_fixed().is_some_and(|w| w > 0) && keys.least() > 0;
    let alike = k.dims[rank - 1] == width && v.dims[rank - 2] == keys;
    let batch = |f: &Fact| f.dims[..rank - 3].to_vec();
    let same = batch(q) == batch(k) && batch(q) == batch(v) && k.dims[rank - 3] == v.dims[rank - 3];
    let (heads, of_keys) = (q.dims[rank - 3], k.dims[rank - 3]);
    let shared = heads == of_keys
        || heads
            .as_fixed()
            .zip(of_keys.as_fixed())
            .is_some_and(|(all, few)| few > 0 && all > 0 && all % few == 0);
    (filled && alike && same && shared && tiles != Some(0)).then_some(())?;
    if let Some(window) = window {
        // The last query must see the last key, so that each query sees one.
        let (queries, keys) = (scope.most(queries), keys.as_fixed()?);
        (window > 0 && past + queries < keys + window).then_some(())?;
    }
    let mut scores = q.dims[..rank - 1].to_vec();
    scores.push(keys);
    scope.elements(&scores)?;
    if let Some(mask) = mask {
        let types = mask.dtype == DType::F32 || (mask.dtype == DType::Bool && mask.exact);
        let ok = types && mask.rank() == rank;
        let broadcasts = (0..rank).all(|i| mask.dims[i] == scores[i] || mask.dims[i].is(1));
        (ok && broadcasts).then_some(())?;
    }
    let mut dims = q.dims.clone();
    dims[rank - 1] = v.dims[rank - 1];
    Some(Fact::new(DType::F32, dims).within(v.low, v.high))
}

/// The lengths of the last `N` axes, which are fixed and not 0.
fn places<const N: usize>(x: &Fact) -> Option<[usize; N]> {
    let last = x.dims.get(2..).filter(|last| last.len() == N)?;
    let mut lengths = [0; N];
    for (length, d) in lengths.iter_mut().zip(last) {
        *length = d.as_fixed().filter(|&n| n > 0)?;
    }
    Some(lengths)
}

/// Padding before and after an axis of `n` elements.
fn sides<const N: usize>(
    padding: &Padding<N>,
    axis: usize,
    [n, span, stride]: [usize; 3],
) -> (usize, usize) {
    let all = ((n.div_ceil(stride) - 1) * stride + span).saturating_sub(n);
    match padding {
        Padding::Sides(sides) => sides[axis],
        Padding::Same => (all / 2, all.div_ceil(2)),
        Padding::SameLower => (all.div_ceil(2), all / 2),
        Padding::Causal => (span - 1, 0),
    }
}

/// Batch, channels and places of an image, and the weight's lengths.
type Shapes<const N: usize> = ([usize; N], usize, [usize; 2], [usize; N]);

fn shapes<const N: usize>(options: &ConvOptions<N>, x: &Fact, w: &Fact) -> Option<Shapes<N>> {
    let floats = x.dtype.is_float() && x.dtype == w.dtype;
    let channels = x.dims.get(1)?.as_fixed().filter(|&c| c > 0)?;
    let of = w.fixed()?;
    let (image, kernel) = (places(x)?, places(w)?);
    let steps = options.stride.iter().chain(&options.dilation);
    (floats && options.groups > 0 && steps.into_iter().all(|&n| n > 0)).then_some(())?;
    Some((image, channels, [of[0], of[1]], kernel))
}

fn convolved<const N: usize>(options: &ConvOptions<N>, x: &Fact, w: &Fact) -> Option<Fact> {
    let (image, channels, [out, per], kernel) = shapes(options, x, w)?;
    let groups = options.groups;
    (channels == per * groups && out % groups == 0 && out > 0).then_some(())?;
    (options.output_padding == [0; N]).then_some(())?;
    let mut dims = vec![x.dims[0], Len::fixed(out)];
    for axis in 0..N {
        let span = options.dilation[axis] * (kernel[axis] - 1) + 1;
        let (n, stride) = (image[axis], options.stride[axis]);
        let (before, after) = sides(&options.padding, axis, [n, span, stride]);
        let room = (n + before + after).checked_sub(span)?;
        dims.push(Len::fixed(room / stride + 1));
    }
    let terms = per * kernel.iter().product::<usize>();
    let bound = x.bound() * w.bound() * terms as f64;
    Some(Fact::new(DType::F32, dims).within(-bound, bound))
}

fn transposed<const N: usize>(options: &ConvOptions<N>, x: &Fact, w: &Fact) -> Option<Fact> {
    let (image, channels, [of, per], kernel) = shapes(options, x, w)?;
    let groups = options.groups;
    let Padding::Sides(sides) = options.padding else {
        return None;
    };
    (channels == of && channels % groups == 0 && per > 0).then_some(())?;
    let mut dims = vec![x.dims[0], Len::fixed(per * groups)];
    for axis in 0..N {
        let (stride, dilation) = (options.stride[axis], options.dilation[axis]);
        let more = options.output_padding[axis];
        (more < stride.max(dilation)).then_some(())?;
        let whole = (image[axis] - 1) * stride + dilation * (kernel[axis] - 1) + 1 + more;
        let n = whole.checked_sub(sides[axis].0 + sides[axis].1)?;
        dims.push(Len::fixed(Some(n).filter(|&n| n > 0)?));
    }
    let terms = channels / groups * kernel.iter().product::<usize>();
    let bound = x.bound() * w.bound() * terms as f64;
    Some(Fact::new(DType::F32, dims).within(-bound, bound))
}

fn pooled<const N: usize>(pool: Pool, options: &PoolOptions<N>, x: &Fact) -> Option<Fact> {
    let image: [usize; N] = places(x)?;
    (x.dtype == DType::F32).then_some(())?;
    let mut dims = vec![x.dims[0], x.dims[1]];
    for axis in 0..N {
        let [k, stride, dilation] =
            [options.window, options.stride, options.dilation].map(|n| n[axis]);
        (k > 0 && stride > 0 && dilation > 0).then_some(())?;
        let (n, span) = (image[axis], dilation * (k - 1) + 1);
        let (before, after) = sides(&options.padding, axis, [n, span, stride]);
        // A window must have an element of the image.
        let inside = 2 * before.max(after) <= k && (dilation == 1 || before + after == 0);
        let room = (n + before + after).checked_sub(span).filter(|_| inside)?;
        let mut count = room / stride + 1;
        if options.ceil {
            count = room.div_ceil(stride) + 1;
            count -= usize::from((count - 1) * stride >= n + before);
        }
        dims.push(Len::fixed(count));
    }
    let exact = x.exact && pool != Pool::Avg;
    let fact = match pool {
        Pool::Positions => {
            Fact::new(DType::I32, dims).within(0.0, image.iter().product::<usize>() as f64 - 1.0)
        }
        Pool::Max => Fact::new(DType::F32, dims).within(x.low, x.high),
        Pool::Avg => Fact::new(DType::F32, dims).within(x.low.min(0.0), x.high.max(0.0)),
    };
    Some(Fact {
        smooth: pool != Pool::Max || x.exact,
        ..fact.exact(exact)
    })
}

fn interpolated(how: Interpolate, size: &[usize], x: &Fact) -> Option<Fact> {
    let nearest = matches!(how, Interpolate::Nearest | Interpolate::NearestExact);
    let from = x.dims.get(2..).filter(|from| from.len() == size.len())?;
    let filled = from.iter().all(|d| d.as_fixed().is_some_and(|n| n > 0));
    (filled && !size.is_empty() && (nearest || x.dtype == DType::F32)).then_some(())?;
    let mut dims = x.dims[..2].to_vec();
    dims.extend(size.iter().map(|&n| Len::fixed(n)));
    let fact = Fact { dims, ..x.clone() };
    if nearest {
        return Some(fact);
    }
    let bound = match how {
        // The sum of the magnitudes of four weights is 1.375 at most.
        Interpolate::Cubic { .. } => x.bound() * 1.375f64.powi(size.len() as i32),
        _ => x.bound(),
    };
    Some(fact.within(-bound, bound).exact(false))
}

fn sampled(sampling: Sampling, beyond: Beyond, x: &Fact, grid: &Fact) -> Option<Fact> {
    let [_, _]: [usize; 2] = places(x)?;
    let floats = x.dtype == DType::F32 && grid.dtype == DType::F32 && grid.exact;
    let fits = grid.rank() == 4 && grid.dims[3].is(2) && grid.dims[0] == x.dims[0];
    (floats && fits).then_some(())?;
    let dims = vec![x.dims[0], x.dims[1], grid.dims[1], grid.dims[2]];
    let grows = match sampling {
        Sampling::Bicubic => 1.375 * 1.375,
        _ => 1.0,
    };
    let bound = x.bound() * grows;
    let exact = x.exact && sampling == Sampling::Nearest && beyond == Beyond::Border;
    Some(
        Fact::new(DType::F32, dims)
            .within(-bound, bound)
            .exact(exact),
    )
}

fn compared(loss: Loss, by: Reduction, x: &Fact, y: &Fact, scope: &Scope<'_>) -> Option<Fact> {
    let floats = x.dtype == DType::F32 && y.dtype == DType::F32;
    let filled = x.dims == y.dims && x.dims.iter().all(|d| d.least() > 0);
    (floats && filled).then_some(())?;
    let apart = x.bound() + y.bound();
    let share = |f: &Fact| f.low >= 0.0 && f.high <= 1.0;
    let bound = match loss {
        Loss::L1 | Loss::SmoothL1 => apart,
        Loss::PoissonNll => (x.bound() <= 2.0).then(|| 8.0 + x.bound() * y.bound())?,
        Loss::SoftMargin => x.bound() * y.bound() + 1.0,
        Loss::Focal => share(y).then(|| x.bound() + 1.0)?,
        Loss::Dice => (share(x) && share(y) && x.rank() > 0).then_some(1.0)?,
        Loss::KlDivergenceOfLogs => (y.bound() <= 2.0).then_some(8.0 * apart)?,
    };
    let dims = match loss {
        Loss::Dice => x.dims[..1].to_vec(),
        _ => x.dims.clone(),
    };
    let fact = Fact::new(DType::F32, dims).within(-bound, bound);
    let fact = reduced(fact, by, scope)?;
    Some(Fact {
        smooth: loss != Loss::L1 || (x.exact && y.exact),
        ..fact
    })
}

/// The loss of elements as one.
fn reduced(fact: Fact, by: Reduction, scope: &Scope<'_>) -> Option<Fact> {
    let count = scope.elements(&fact.dims)? as f64;
    let times = match by {
        Reduction::None => return Some(fact),
        Reduction::Mean => 1.0,
        Reduction::Sum => count,
        Reduction::BatchMean => {
            fact.dims.first()?;
            count
        }
    };
    let (low, high) = (fact.low * times, fact.high * times);
    Some(Fact::new(DType::F32, Vec::new()).within(low, high))
}

fn padded(mode: PadMode, pads: &[(i64, i64)], x: &Fact) -> Option<Fact> {
    (pads.len() == x.rank()).then_some(())?;
    let mut fact = x.clone();
    for (len, &(before, after)) in fact.dims.iter_mut().zip(pads) {
        let (more, less) = (before.max(0) + after.max(0), before.min(0) + after.min(0));
        if more > 0 && !matches!(mode, PadMode::Constant(_)) {
            len.as_fixed().filter(|&n| n as i64 + less > 0)?;
        }
        *len = len.less(less.unsigned_abs() as usize)?;
        *len = len.plus(Len::fixed(more as usize))?;
    }
    if let PadMode::Constant(value) = mode {
        let value = f64::from(value);
        (x.dtype.is_float() || value == 0.0).then_some(())?;
        fact = fact.within(x.low.min(value), x.high.max(value));
    }
    Some(fact)
}
