//! Structural operations, each by its definition.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::{PoolKind, PrefixOp, Quantization, ReduceOp, Scores, Window};

use super::{Array, OutOfRange, each, flat};
use crate::ops::{Axes, ConvGeometry, Operands, split_last};

/// An element as an index, or the fault if it is not in `0..limit`.
pub(super) fn in_range(index: f64, limit: usize) -> Result<usize, OutOfRange> {
    let index = index as i64;
    usize::try_from(index)
        .ok()
        .filter(|&i| i < limit)
        .ok_or((index, limit))
}

/// `start + c · step`, per axis.
pub(super) fn placed(c: &[usize], start: &[usize], step: &[u32]) -> Vec<usize> {
    c.iter()
        .zip(start)
        .zip(step)
        .map(|((&c, &from), &step)| from + c * step as usize)
        .collect()
}

pub(super) fn reduce(op: ReduceOp, axes: &Axes, x: &Array, dtype: DType, dims: &[usize]) -> Array {
    let folded: Vec<usize> = (0..dims.len())
        .map(|i| if axes.contains(&i) { x.dims[i] } else { 1 })
        .collect();
    Array::from_fn(dtype, dims, |c| {
        let mut list = Vec::new();
        each(&folded, |r| {
            let at: Vec<usize> = c.iter().zip(r).map(|(c, r)| c + r).collect();
            list.push(x.at(&at));
        });
        fold(op, &list, dtype)
    })
}

fn fold(op: ReduceOp, list: &[f64], dtype: DType) -> f64 {
    let integer = dtype == DType::I32;
    match op {
        ReduceOp::Sum if integer => {
            f64::from(list.iter().fold(0i32, |sum, &v| sum.wrapping_add(v as i32)))
        }
        ReduceOp::Prod if integer => f64::from(
            list.iter()
                .fold(1i32, |product, &v| product.wrapping_mul(v as i32)),
        ),
        ReduceOp::Sum => list.iter().sum(),
        ReduceOp::Prod => list.iter().product(),
        ReduceOp::Max | ReduceOp::Min if list.is_empty() => match (op, integer) {
            (ReduceOp::Max, true) => f64::from(i32::MIN),
            (ReduceOp::Max, false) => f64::NEG_INFINITY,
            (_, true) => f64::from(i32::MAX),
            (_, false) => f64::INFINITY,
        },
        ReduceOp::Max => list[first_extreme(list, |a, b| a > b)],
        ReduceOp::Min => list[first_extreme(list, |a, b| a < b)],
        ReduceOp::Any => f64::from(u8::from(list.iter().any(|&v| v != 0.0))),
        ReduceOp::All => f64::from(u8::from(list.iter().all(|&v| v != 0.0))),
        ReduceOp::ArgMax => first_extreme(list, |a, b| a > b) as f64,
        ReduceOp::ArgMin => first_extreme(list, |a, b| a < b) as f64,
        ReduceOp::SquaredDeviations => {
            let mean = list.iter().sum::<f64>() / list.len() as f64;
            list.iter().map(|x| (x - mean) * (x - mean)).sum()
        }
    }
}

/// The first position with the extreme value; NaN beats every number. 0 for an empty list.
fn first_extreme(list: &[f64], beats: impl Fn(f64, f64) -> bool) -> usize {
    let mut best = 0;
    for (i, &v) in list.iter().enumerate() {
        if beats(v, list[best]) || (v.is_nan() && !list[best].is_nan()) {
            best = i;
        }
    }
    best
}

pub(super) fn matmul(a: &Array, b: &Array, dims: &[usize]) -> Array {
    let rank = dims.len();
    let inner = a.dims[rank - 1];
    Array::from_fn(DType::F32, dims, |c| {
        let (mut left, mut right) = (c.to_vec(), c.to_vec());
        (0..inner)
            .map(|k| {
                (left[rank - 1], right[rank - 2]) = (k, k);
                a.at(&left) * b.at(&right)
            })
            .sum()
    })
}

pub(super) fn dequantize(format: Quantization, args: &[&Array], dims: &[usize]) -> Array {
    let (numbers, scales) = (args[0], args[1]);
    let (bits, block) = (format.bits as usize, format.block as usize);
    let packed = |x: &Array, row: usize, number: usize| {
        let byte = x.at(&[row, number * bits / 8]) as u32;
        f64::from(byte >> (number * bits % 8) & ((1 << bits) - 1))
    };
    Array::from_fn(DType::F32, dims, |c| {
        let (row, block) = (c[0], c[1] / block);
        let zero = match args.get(2) {
            None => f64::from(1 << (bits - 1)),
            Some(zeros) if zeros.dtype == DType::U8 => packed(zeros, row, block),
            Some(zeros) => zeros.at(&[row, block]),
        };
        (packed(numbers, row, c[1]) - zero) * scales.at(&[row, block])
    })
}

/// A head of attention: its weights, and how its coordinates become those of an operand.
struct Head<'a> {
    scores: Scores,
    of: Operands<&'a Array>,
    /// The axes before rows and columns.
    at: Vec<usize>,
}

/// A key that a query sees.
struct Seen {
    key: usize,
    weight: f64,
    /// The derivative of its limited score.
    slope: f64,
}

impl<'a> Head<'a> {
    /// The head of an element of a result.
    fn new(scores: &Scores, args: &[&'a Array], c: &[usize]) -> Head<'a> {
        let at = [&c[..1], &c[2..c.len() - 1]].concat();
        let of = Operands::of(args, |x| x.dtype).expect("checked by the rule");
        let past = of.past.map_or(0, |past| past.at(&at) as i32);
        Head {
            scores: scores.after(past),
            of,
            at,
        }
    }

    /// An element of an operand.
    fn operand(&self, x: &Array, row: usize, column: usize) -> f64 {
        x.at(&[&self.at[..], &[row, column]].concat())
    }

    /// An element of the result or its gradient, whose rows are after the first axis.
    fn result(&self, x: &Array, row: usize, column: usize) -> f64 {
        x.at(&[&self.at[..1], &[row], &self.at[1..], &[column]].concat())
    }

    /// Rows and columns of queries, keys or values.
    fn shape(x: &Array) -> [usize; 2] {
        [x.dims[x.dims.len() - 2], x.dims[x.dims.len() - 1]]
    }

    /// The keys that a query sees.
    fn weights(&self, row: usize) -> Vec<Seen> {
        let ([keys, width], scale) = (Head::shape(self.of.k), f64::from(self.scores.scale));
        let score = |key| {
            let products = (0..width)
                .map(|c| self.operand(self.of.q, row, c) * self.operand(self.of.k, key, c));
            let (score, slope) = match self.scores.soft_cap.map(f64::from) {
                Some(cap) => {
                    let part = (products.sum::<f64>() * scale / cap).tanh();
                    (part * cap, 1.0 - part * part)
                }
                None => (products.sum::<f64>() * scale, 1.0),
            };
            let term = match self.of.mask {
                Some(mask) if mask.dtype == DType::Bool => match self.operand(mask, row, key) {
                    0.0 => f64::NEG_INFINITY,
                    _ => 0.0,
                },
                Some(mask) => self.operand(mask, row, key),
                None => 0.0,
            };
            let seen = term != f64::NEG_INFINITY;
            seen.then_some(Seen {
                key,
                weight: score + term,
                slope,
            })
        };
        let visible = self.scores.visible(row, keys);
        let mut all: Vec<Seen> = visible.filter_map(score).collect();
        let largest = all
            .iter()
            .fold(f64::NEG_INFINITY, |most, seen| most.max(seen.weight));
        for seen in &mut all {
            seen.weight = (seen.weight - largest).exp();
        }
        let sum: f64 = all.iter().map(|seen| seen.weight).sum();
        for seen in &mut all {
            seen.weight /= sum;
        }
        all
    }

    /// The gradient of the product of a query and a key.
    fn of_product(&self, [y, dy]: [&Array; 2], query: usize, seen: &Seen) -> f64 {
        let dot = |f: &dyn Fn(usize) -> f64| {
            (0..Head::shape(self.of.v)[1])
                .map(|c| self.result(dy, query, c) * f(c))
                .sum::<f64>()
        };
        let delta = dot(&|c| self.result(y, query, c));
        let centred = dot(&|c| self.operand(self.of.v, seen.key, c)) - delta;
        seen.weight * seen.slope * centred * f64::from(self.scores.scale)
    }
}

pub(super) fn attention(scores: &Scores, args: &[&Array], dtype: DType, dims: &[usize]) -> Array {
    Array::from_fn(dtype, dims, |c| {
        let head = Head::new(scores, args, c);
        let (row, column) = (c[1], c[c.len() - 1]);
        let weights = head.weights(row);
        if weights.is_empty() {
            return f64::NAN;
        }
        weights
            .into_iter()
            .map(|seen| seen.weight * head.operand(head.of.v, seen.key, column))
            .sum()
    })
}

pub(super) fn attention_grad(
    scores: &Scores,
    in_turns: bool,
    args: &[&Array],
    dims: &[usize],
) -> Array {
    let (args, results) = split_last(args).expect("checked by the rule");
    Array::from_fn(DType::F32, dims, |c| {
        let head = Head::new(scores, args, c);
        let ([queries, _], [keys, _]) = (Head::shape(head.of.q), Head::shape(head.of.k));
        let column = c[c.len() - 1];
        let (part, row) = match (c[1], in_turns) {
            (row, true) => (row % 3, row / 3),
            (row, false) if row < queries => (0, row),
            (row, false) => (1 + (row - queries) / keys, (row - queries) % keys),
        };
        if part == 0 {
            let terms = head.weights(row).into_iter().map(|seen| {
                let key = head.operand(head.of.k, seen.key, column);
                head.of_product(results, row, &seen) * key
            });
            return terms.sum();
        }
        let key = row;
        let terms = (0..queries).filter_map(|query| {
            let seen = head
                .weights(query)
                .into_iter()
                .find(|seen| seen.key == key)?;
            Some(match part == 1 {
                true => {
                    head.of_product(results, query, &seen) * head.operand(head.of.q, query, column)
                }
                false => seen.weight * head.result(results[1], query, column),
            })
        });
        terms.sum()
    })
}

/// Calls `f(image, weight, result)` with the flat positions of the three factors of every product
/// in a convolution.
fn products(
    g: &ConvGeometry,
    image: &[usize],
    weight: &[usize],
    result: &[usize],
    mut f: impl FnMut(usize, usize, usize),
) {
    let per_group = result[1] / g.groups;
    let inside = |o: usize, k: usize, axis: usize| {
        (o * g.stride[axis] + k * g.dilation[axis])
            .checked_sub(g.pad[axis])
            .filter(|&i| i < image[2 + axis])
    };
    each(result, |o| {
        each(&weight[1..], |w| {
            let (Some(row), Some(col)) = (inside(o[2], w[1], 0), inside(o[3], w[2], 1)) else {
                return;
            };
            let channel = o[1] / per_group * weight[1] + w[0];
            f(
                flat(image, &[o[0], channel, row, col]),
                flat(weight, &[o[1], w[0], w[1], w[2]]),
                flat(result, o),
            );
        });
    });
}

pub(super) fn conv2d(g: &ConvGeometry, x: &Array, w: &Array, dims: &[usize]) -> Array {
    let mut y = Array::zeros(DType::F32, dims);
    products(g, &x.dims, &w.dims, dims, |i, k, o| {
        y.values[o] += x.values[i] * w.values[k]
    });
    y
}

pub(super) fn conv2d_input_grad(g: &ConvGeometry, dy: &Array, w: &Array, dims: &[usize]) -> Array {
    let mut dx = Array::zeros(DType::F32, dims);
    products(g, dims, &w.dims, &dy.dims, |i, k, o| {
        dx.values[i] += dy.values[o] * w.values[k]
    });
    dx
}

pub(super) fn conv2d_weight_grad(g: &ConvGeometry, x: &Array, dy: &Array, dims: &[usize]) -> Array {
    let mut dw = Array::zeros(DType::F32, dims);
    products(g, &x.dims, dims, &dy.dims, |i, k, o| {
        dw.values[k] += x.values[i] * dy.values[o]
    });
    dw
}

/// Calls `f(position in the window, flat position in the image)` for the elements of a window that
/// lie inside of the image.
fn window(w: &Window, image: &[usize], c: &[usize], mut f: impl FnMut(usize, usize)) {
    each(&w.k, |k| {
        let inside = |axis: usize| {
            (c[2 + axis] * w.stride[axis] + k[axis])
                .checked_sub(w.pad[axis])
                .filter(|&i| i < image[2 + axis])
        };
        if let (Some(row), Some(col)) = (inside(0), inside(1)) {
            f(flat(&w.k, k), flat(image, &[c[0], c[1], row, col]));
        }
    });
}

/// The divisor of the mean over a window; 1 for an empty window.
fn divisor(w: &Window, inside: usize, count_pad: bool) -> f64 {
    (if count_pad {
        w.k[0] * w.k[1]
    } else {
        inside.max(1)
    }) as f64
}

pub(super) fn pool2d(kind: PoolKind, w: &Window, x: &Array, dtype: DType, dims: &[usize]) -> Array {
    Array::from_fn(dtype, dims, |c| {
        let (mut positions, mut list) = (Vec::new(), Vec::new());
        window(w, &x.dims, c, |position, place| {
            positions.push(position);
            list.push(x.values[place]);
        });
        match kind {
            PoolKind::Max => fold(ReduceOp::Max, &list, DType::F32),
            PoolKind::ArgMax => positions
                .get(first_extreme(&list, |a, b| a > b))
                .map_or(0.0, |&p| p as f64),
            PoolKind::Avg { count_pad } => {
                list.iter().sum::<f64>() / divisor(w, list.len(), count_pad)
            }
        }
    })
}

pub(super) fn pool2d_grad(kind: PoolKind, w: &Window, args: &[&Array], dims: &[usize]) -> Array {
    let dy = args[0];
    let mut dx = Array::zeros(DType::F32, dims);
    each(&dy.dims, |c| {
        let mut places = Vec::new();
        window(w, dims, c, |position, place| places.push((position, place)));
        match kind {
            PoolKind::Max | PoolKind::ArgMax => {
                let chosen = args[1].at(c) as usize;
                places
                    .iter()
                    .filter(|(position, _)| *position == chosen)
                    .for_each(|&(_, place)| dx.values[place] += dy.at(c));
            }
            PoolKind::Avg { count_pad } => {
                let share = dy.at(c) / divisor(w, places.len(), count_pad);
                places
                    .iter()
                    .for_each(|&(_, place)| dx.values[place] += share);
            }
        }
    });
    dx
}

pub(super) fn gather(axis: usize, source: &Array, index: &Array) -> Result<Array, OutOfRange> {
    for &i in &index.values {
        in_range(i, source.dims[axis])?;
    }
    Ok(Array::from_fn(source.dtype, &index.dims, |c| {
        let mut from = c.to_vec();
        from[axis] = index.at(c) as usize;
        source.at(&from)
    }))
}

pub(super) fn scatter(
    (axis, reduce): (usize, ReduceOp),
    value: &Array,
    index: &Array,
    dims: &[usize],
) -> Result<Array, OutOfRange> {
    for &i in &index.values {
        in_range(i, dims[axis])?;
    }
    let count = dims.iter().product();
    let mut lists: Vec<Vec<f64>> = vec![Vec::new(); count];
    each(&index.dims, |c| {
        let mut to = c.to_vec();
        to[axis] = index.at(c) as usize;
        lists[flat(dims, &to)].push(value.at(c));
    });
    Ok(Array {
        dtype: value.dtype,
        dims: dims.to_vec(),
        values: lists.iter().map(|l| fold(reduce, l, value.dtype)).collect(),
    })
}

/// The base, with the values written over it one by one.
pub(super) fn slice_assign(
    (start, step, axis): (&[usize], &[u32], Option<usize>),
    args: &[&Array],
    dims: &[usize],
) -> Result<Array, OutOfRange> {
    let mut result = args[0].clone();
    let mut fault = Ok(());
    each(&args[1].dims, |c| {
        let mut to = placed(c, start, step);
        if let Some(axis) = axis {
            let own: Vec<usize> = c
                .iter()
                .zip(&args[2].dims)
                .map(|(&c, &n)| if n == 1 { 0 } else { c })
                .collect();
            let place = args[2].at(&own) as i64 + to[axis] as i64;
            match in_range(place as f64, dims[axis]) {
                Ok(place) => to[axis] = place,
                Err(why) => {
                    fault = Err(why);
                    return;
                }
            }
        }
        result.values[flat(dims, &to)] = args[1].at(c);
    });
    fault.map(|()| result)
}

/// Along the last axis: each result from the list of the elements that it is of.
pub(super) fn prefix_reduce(
    op: PrefixOp,
    (exclusive, reverse): (bool, bool),
    args: &[&Array],
    dtype: DType,
) -> Array {
    let x = args[0];
    let len = x.dims.last().copied().unwrap_or(1);
    let mut values = vec![0.0; x.values.len()];
    for first in (0..x.values.len()).step_by(len.max(1)) {
        for at in 0..len {
            let range = match (reverse, exclusive) {
                (false, false) => 0..at + 1,
                (false, true) => 0..at,
                (true, false) => at..len,
                (true, true) => at + 1..len,
            };
            let mut order: Vec<usize> = range.collect();
            if reverse {
                order.reverse();
            }
            let list: Vec<f64> = order.iter().map(|&k| x.values[first + k]).collect();
            values[first + at] = match op {
                PrefixOp::Sum => fold(ReduceOp::Sum, &list, dtype),
                PrefixOp::Linear => order.iter().enumerate().fold(0.0, |state, (i, &k)| {
                    let (x, factor) = (x.values[first + k], args[1].values[first + k]);
                    if i == 0 {
                        x
                    } else if dtype == DType::I32 {
                        let scaled = (factor as i32).wrapping_mul(state as i32);
                        f64::from(scaled.wrapping_add(x as i32))
                    } else {
                        factor * state + x
                    }
                }),
                PrefixOp::LogSumExp => {
                    let most = fold(ReduceOp::Max, &list, DType::F32);
                    if most.is_finite() {
                        most + list.iter().map(|x| (x - most).exp()).sum::<f64>().ln()
                    } else {
                        most
                    }
                }
                // Among equal elements, the last one visited.
                PrefixOp::ArgMax | PrefixOp::ArgMin => {
                    let backward: Vec<f64> = list.iter().rev().copied().collect();
                    let best = if op == PrefixOp::ArgMax {
                        fold(ReduceOp::ArgMax, &backward, DType::F32)
                    } else {
                        fold(ReduceOp::ArgMin, &backward, DType::F32)
                    };
                    order[list.len() - 1 - best as usize] as f64
                }
            };
        }
    }
    Array {
        dtype,
        dims: x.dims.clone(),
        values,
    }
}

pub(super) fn concat(axis: usize, parts: &[&Array], dtype: DType, dims: &[usize]) -> Array {
    let mut whole = Array::zeros(dtype, dims);
    let mut start = 0;
    for part in parts {
        each(&part.dims, |c| {
            let mut to = c.to_vec();
            to[axis] += start;
            whole.values[flat(dims, &to)] = part.at(c);
        });
        start += part.dims[axis];
    }
    whole
}

/// The positions of true elements, one after the other.
pub(super) fn compact(mask: &Array, dims: &[usize]) -> Array {
    let mut values: Vec<f64> = mask
        .values
        .iter()
        .enumerate()
        .filter(|(_, v)| **v != 0.0)
        .map(|(i, _)| i as f64)
        .collect();
    values.resize(dims[0], 0.0);
    Array {
        dtype: DType::I32,
        dims: dims.to_vec(),
        values,
    }
}

/// Along the last axis: selects the first element that no other remaining element precedes,
/// repeatedly.
pub(super) fn sort(x: &Array, descending: bool, dims: &[usize]) -> Array {
    let len = x.dims.last().copied().unwrap_or(1);
    // NaN is above every number.
    let above = |a: f64, b: f64| if a.is_nan() { !b.is_nan() } else { a > b };
    let before = |a: f64, b: f64| if descending { above(a, b) } else { above(b, a) };
    let wanted = dims.last().copied().unwrap_or(1);
    let mut values = Vec::with_capacity(x.values.len());
    for row in x.values.chunks(len.max(1)) {
        let mut row_positions = Vec::with_capacity(row.len());
        let mut left: Vec<usize> = (0..row.len()).collect();
        while !left.is_empty() {
            let next = (0..left.len())
                .find(|&k| left.iter().all(|&other| !before(row[other], row[left[k]])))
                .unwrap_or(0);
            row_positions.push(left.remove(next) as f64);
        }
        values.extend(&row_positions[..wanted]);
    }
    Array {
        dtype: DType::I32,
        dims: dims.to_vec(),
        values,
    }
}

/// Box by box: the best remaining one is selected, and those that overlap it by more than the
/// threshold are removed. In single precision, in which overlaps are defined, so that comparisons
/// with the threshold do not depend on rounding.
pub(super) fn suppress(boxes: &Array, threshold: f32) -> Array {
    let corners: Vec<[f32; 4]> = boxes
        .values
        .chunks(4)
        .map(|b| [b[0] as f32, b[1] as f32, b[2] as f32, b[3] as f32])
        .collect();
    let area = |b: &[f32; 4]| (b[2] - b[0]) * (b[3] - b[1]);
    let share = |a: &[f32; 4], b: &[f32; 4]| {
        let side = |k: usize| (a[k + 2].min(b[k + 2]) - a[k].max(b[k])).max(0.0);
        let both = side(0) * side(1);
        both / (area(a) + area(b) - both)
    };
    let mut stays = vec![true; corners.len()];
    for i in 0..corners.len() {
        for j in i + 1..corners.len() {
            if stays[i] && share(&corners[i], &corners[j]) > threshold {
                stays[j] = false;
            }
        }
    }
    Array {
        dtype: DType::Bool,
        dims: vec![corners.len()],
        values: stays.iter().map(|&s| f64::from(u8::from(s))).collect(),
    }
}
