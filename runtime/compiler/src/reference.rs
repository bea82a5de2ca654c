//! The reference evaluator, slow and simple: the oracle of all tests.
//!
//! It computes every node of a graph separately, point by point, in plain loops: no fusion, no
//! planning, no kernels, no in-place updates. Sums accumulate in double precision and are rounded
//! once.

mod custom;
mod double;
mod scan;
mod structural;

use std::fmt;

use half::{bf16, f16};
use rustc_hash::FxHashMap;
use slabwise_kernels::collective::Group;
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::random;
use slabwise_kernels::scalar::Value;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::CollectiveOp;

use crate::graph::{Graph, Needed, Node};
use crate::ops::{NodeId, Op};
use crate::shape::Extent;
use structural as s;

/// A value of the reference: every element as an `f64`, which holds each element type exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// The type.
    pub dtype: DType,
    /// The length of each axis.
    pub dims: Vec<usize>,
    /// The elements, row-major; truth values are 0 and 1.
    pub values: Vec<f64>,
}

/// How floats are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// By the definitions in the scalar table, every value rounded to `f32`.
    Single,
    /// In `f64` by independent formulas, so that finite differences are meaningful; integers as in
    /// `Single`.
    Double,
}

/// The result of a run of the reference.
#[derive(Clone, Debug)]
pub struct Evaluated {
    /// The value of every node.
    pub values: Vec<Array>,
    /// The requested values.
    pub outputs: Vec<Array>,
    /// The value of each variable after the step, if the step assigns it.
    pub assigned: Vec<Option<Array>>,
}

/// Why a graph has no value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {
    /// An index outside of its range.
    #[error("node {node}: index {index} is not in 0..{limit}")]
    Index {
        /// The node that detected it.
        node: u32,
        /// The index.
        index: i64,
        /// One more than the largest index.
        limit: usize,
    },
    /// An input or a variable that is missing or of another type or shape.
    #[error("node {node}: {what} is missing or has another type or shape than in the graph")]
    Argument {
        /// The node that refers to it.
        node: u32,
        /// Which.
        what: &'static str,
    },
    /// A length of 0 where elements are needed.
    #[error("{why}")]
    Empty {
        /// The message for a length of 0.
        why: String,
    },
}

impl Array {
    /// An array whose element at each coordinate is given by a function.
    pub fn from_fn(dtype: DType, dims: &[usize], mut f: impl FnMut(&[usize]) -> f64) -> Array {
        let mut values = Vec::with_capacity(dims.iter().product());
        each(dims, |c| values.push(f(c)));
        Array {
            dtype,
            dims: dims.to_vec(),
            values,
        }
    }

    /// The element at a coordinate.
    pub fn at(&self, coordinate: &[usize]) -> f64 {
        self.values[flat(&self.dims, coordinate)]
    }

    fn zeros(dtype: DType, dims: &[usize]) -> Array {
        Array {
            dtype,
            dims: dims.to_vec(),
            values: vec![0.0; dims.iter().product()],
        }
    }

    fn lane(&self, at: usize) -> Value {
        to_value(self.values[at], self.dtype.lane())
    }
}

/// Equal up to the sign of zeros and the bits of NaNs.
pub fn same(a: &Array, b: &Array) -> bool {
    let equal = |(x, y): (&f64, &f64)| x == y || (x.is_nan() && y.is_nan());
    a.dtype == b.dtype && a.dims == b.dims && a.values.iter().zip(&b.values).all(equal)
}

/// Equal bit by bit; NaNs equal each other.
pub fn same_bits(a: &Array, b: &Array) -> bool {
    let sign = |x: &Array| {
        x.values
            .iter()
            .map(|v| !v.is_nan() && v.is_sign_negative())
            .collect::<Vec<_>>()
    };
    same(a, b) && sign(a) == sign(b)
}

/// Calls `f` with every coordinate of a shape, in row-major order.
fn each(dims: &[usize], mut f: impl FnMut(&[usize])) {
    let mut c = vec![0; dims.len()];
    for _ in 0..dims.iter().product() {
        f(&c);
        for (x, &n) in c.iter_mut().zip(dims).rev() {
            *x += 1;
            if *x < n {
                break;
            }
            *x = 0;
        }
    }
}

fn flat(dims: &[usize], coordinate: &[usize]) -> usize {
    dims.iter()
        .zip(coordinate)
        .fold(0, |at, (&n, &c)| at * n + c)
}

fn to_value(x: f64, lane: Lane) -> Value {
    match lane {
        Lane::F32 => Value::F32(x as f32),
        Lane::I32 => Value::I32(x as i32),
        Lane::Bool => Value::Bool(x != 0.0),
    }
}

fn from_value(value: Value) -> f64 {
    match value {
        Value::F32(x) => f64::from(x),
        Value::I32(x) => f64::from(x),
        Value::Bool(x) => f64::from(u8::from(x)),
    }
}

/// Conversion to a stored type: floats truncate and saturate, NaN becomes 0, integers saturate at a
/// byte, anything but zero is true.
fn convert(x: f64, from: DType, to: DType) -> f64 {
    match (from, to) {
        (_, DType::Bool) => f64::from(u8::from(x != 0.0)),
        (from, DType::I32) if from.is_float() => f64::from(x as i32),
        (from, DType::U8) if from.is_float() => f64::from(x as u8),
        (DType::I32, DType::U8) => x.clamp(0.0, 255.0),
        _ => x,
    }
}

/// A number rounded to a float type.
fn single(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F32 | DType::I32 | DType::U8 | DType::Bool => f64::from(x as f32),
    }
}

/// The value of every node of a graph, with `env` giving the bounded dimensions and one array per
/// input and per variable.
pub fn evaluate(
    graph: &Graph,
    env: &Env,
    inputs: &[Array],
    variables: &[Array],
    precision: Precision,
) -> Result<Evaluated, Fault> {
    let alone = |op: CollectiveOp, _: Group, value: &Array| {
        let mut value = value.clone();
        match op {
            CollectiveOp::AllToAll => {}
            CollectiveOp::AllGather => value.dims.insert(0, 1),
            CollectiveOp::ReduceScatter => drop(value.dims.remove(0)),
        }
        value
    };
    evaluate_rank(graph, env, inputs, variables, precision, &alone)
}

/// The value of every node of a graph on one of several ranks, as [`evaluate`]; `exchange` gives
/// the result of a collective in its group for this rank's operand, and all ranks call it in the
/// same order.
pub fn evaluate_rank(
    graph: &Graph,
    env: &Env,
    inputs: &[Array],
    variables: &[Array],
    precision: Precision,
    exchange: &dyn Fn(CollectiveOp, Group, &Array) -> Array,
) -> Result<Evaluated, Fault> {
    let mut env = *env;
    let mut loops: FxHashMap<NodeId, Vec<Array>> = FxHashMap::default();
    let mut values: Vec<Array> = Vec::with_capacity(graph.nodes.len());
    let mut assigned = vec![None; graph.variables.len()];
    // Lengths that a node finds are known after it; the others are now.
    let needs = |env: &Env, found: Option<Symbol>| {
        let known = |n: &&Needed| {
            found.map_or(!graph.symbols.any_data_dependent(&[n.length]), |s| {
                n.length.symbols().any(|other| other == s)
            })
        };
        let empty = graph
            .needed
            .iter()
            .filter(known)
            .find(|n| n.length.at(env) == 0);
        empty.map_or(Ok(()), |n| Err(Fault::Empty { why: n.why.clone() }))
    };
    needs(&env, None)?;
    for id in graph.ids() {
        let node = graph.node(id);
        let dims: Vec<usize> = node.dims.iter().map(|d| d.usize_at(&env)).collect();
        let args: Vec<&Array> = node.inputs.iter().map(|i| &values[i.at()]).collect();
        let argument = |from: &[Array], at: u32, what| match from.get(at as usize) {
            Some(a)
                if a.dtype == node.dtype
                    && a.dims == dims
                    && a.values.len() == dims.iter().product::<usize>() =>
            {
                Ok(a.clone())
            }
            _ => Err(Fault::Argument { node: id.0, what }),
        };
        let mut value = match &node.op {
            Op::Input(i) => argument(inputs, *i, "an input")?,
            Op::Variable(v) => argument(variables, *v, "a variable")?,
            Op::Assign(v) => {
                let slot = assigned.get_mut(*v as usize).ok_or(Fault::Argument {
                    node: id.0,
                    what: "a variable",
                })?;
                *slot = Some(args[0].clone());
                args[0].clone()
            }
            Op::Bind { symbol } => {
                let Extent::DataDependent(most) = graph.symbols.extent(*symbol) else {
                    return Err(Fault::Argument {
                        node: id.0,
                        what: "a data-dependent length",
                    });
                };
                let length = s::in_range(args[0].values[0], most.usize_at(&env) + 1);
                let length = length.map_err(|(index, limit)| Fault::Index {
                    node: id.0,
                    index,
                    limit,
                })?;
                env.0[usize::from(symbol.0)] = length as u32;
                needs(&env, Some(*symbol))?;
                args[0].clone()
            }
            Op::Scan(_) => {
                let missing = Fault::Argument {
                    node: id.0,
                    what: "the body of a scan",
                };
                let body = graph.body(id).ok_or(missing)?;
                loops.insert(id, scan::results(body, &args, &env, precision)?);
                Array::zeros(node.dtype, &dims)
            }
            Op::ScanResult(result) => {
                let results = loops.get(&node.inputs[0]);
                let missing = Fault::Argument {
                    node: id.0,
                    what: "a result of a scan",
                };
                let found = results.and_then(|r| r.get(*result as usize)).cloned();
                found.ok_or(missing)?
            }
            Op::Collective { op, group } => exchange(*op, *group, args[0]),
            op => compute(op, node, &args, &dims, &env, precision).map_err(|(index, limit)| {
                Fault::Index {
                    node: id.0,
                    index,
                    limit,
                }
            })?,
        };
        if precision == Precision::Single && node.dtype.is_float() {
            value
                .values
                .iter_mut()
                .for_each(|v| *v = single(*v, node.dtype));
        }
        values.push(value);
    }
    let outputs = graph
        .outputs
        .iter()
        .map(|o| values[o.at()].clone())
        .collect();
    Ok(Evaluated {
        values,
        outputs,
        assigned,
    })
}

/// An index that is out of range, and the range's end.
type OutOfRange = (i64, usize);

fn compute(
    op: &Op,
    node: &Node,
    args: &[&Array],
    dims: &[usize],
    env: &Env,
    precision: Precision,
) -> Result<Array, OutOfRange> {
    let fixed = |sizes: &[Size]| -> Vec<usize> { sizes.iter().map(|d| d.usize_at(env)).collect() };
    let pointwise = |f: &dyn Fn(usize) -> f64| Array {
        dtype: node.dtype,
        dims: dims.to_vec(),
        values: (0..dims.iter().product()).map(f).collect(),
    };
    Ok(match op {
        // These are the caller's.
        Op::Input(_)
        | Op::Variable(_)
        | Op::Assign(_)
        | Op::Bind { .. }
        | Op::Scan(_)
        | Op::ScanResult(_)
        | Op::Placeholder
        | Op::NoGradient(_)
        | Op::Collective { .. } => args
            .first()
            .map_or_else(|| Array::zeros(node.dtype, dims), |a| (*a).clone()),
        Op::Const(value) => pointwise(&|_| from_value(*value)),
        Op::Size(size) => pointwise(&|_| size.at(env) as f64),
        Op::Index(strides) => {
            let strides: Vec<i64> = strides.iter().map(|s| s.at(env)).collect();
            let index = |c: &[usize]| {
                c.iter()
                    .zip(&strides)
                    .map(|(&c, &s)| c as i64 * s)
                    .sum::<i64>()
            };
            Array::from_fn(DType::I32, dims, |c| f64::from(index(c) as i32))
        }
        Op::Uniform { stream } => {
            let word = |i: usize| args[0].values[i] as i32 as u32;
            let seed = u64::from(word(0)) | u64::from(word(1)) << 32;
            pointwise(&|at| {
                f64::from(random::uniform(
                    seed,
                    word(2),
                    *stream,
                    args[1].values[at] as i32 as u32,
                ))
            })
        }
        Op::Scalar(op)
            if precision == Precision::Double && args.iter().any(|a| a.dtype.is_float()) =>
        {
            pointwise(&|at| {
                let x: Vec<f64> = args.iter().map(|a| a.values[at]).collect();
                double::scalar(*op, &x)
            })
        }
        Op::Scalar(op) => pointwise(&|at| {
            let x: Vec<Value> = args.iter().map(|a| a.lane(at)).collect();
            from_value(op.eval(&x))
        }),
        Op::Cast(to) => pointwise(&|at| convert(args[0].values[at], args[0].dtype, *to)),
        Op::Copy | Op::Reshape => pointwise(&|at| args[0].values[at]),
        Op::BoundsCheck { limit, .. } => {
            let limit = limit.usize_at(env);
            args[0]
                .values
                .iter()
                .try_for_each(|&v| s::in_range(v, limit).map(drop))?;
            args[0].clone()
        }
        Op::Reduce(op, axes) => s::reduce(*op, axes, args[0], node.dtype, dims),
        Op::Matmul => s::matmul(args[0], args[1], dims),
        Op::Dequantize(format) => s::dequantize(*format, args, dims),
        Op::QuantizedMatmul(format) => {
            let (n, k) = (args[1].dims[0], args[0].dims[1]);
            let weights = s::dequantize(*format, &args[1..], &[n, k]);
            let transposed = Array::from_fn(DType::F32, &[k, n], |c| weights.at(&[c[1], c[0]]));
            s::matmul(args[0], &transposed, dims)
        }
        Op::Conv2d(geometry) => s::conv2d(geometry, args[0], args[1], dims),
        Op::Conv2dInputGrad(geometry) => s::conv2d_input_grad(geometry, args[0], args[1], dims),
        Op::Conv2dWeightGrad(geometry) => s::conv2d_weight_grad(geometry, args[0], args[1], dims),
        Op::Pool2d(kind, window) => s::pool2d(*kind, window, args[0], node.dtype, dims),
        Op::Pool2dGrad(kind, window) => s::pool2d_grad(*kind, window, args, dims),
        Op::Gather { axis } => s::gather(*axis, args[0], args[1])?,
        Op::Scatter { axis, reduce } => s::scatter((*axis, *reduce), args[0], args[1], dims)?,
        Op::SliceAssign { start, step, axis } => {
            s::slice_assign((&fixed(start), step, *axis), args, dims)?
        }
        Op::PrefixReduce {
            op,
            exclusive,
            reverse,
        } => s::prefix_reduce(*op, (*exclusive, *reverse), args, node.dtype),
        Op::Attention(scores) => s::attention(scores, args, node.dtype, dims),
        Op::AttentionGrad { scores, in_turns } => s::attention_grad(scores, *in_turns, args, dims),
        Op::Permute(axes) => Array::from_fn(node.dtype, dims, |c| {
            let mut from = vec![0; c.len()];
            axes.iter().zip(c).for_each(|(&a, &c)| from[a] = c);
            args[0].at(&from)
        }),
        Op::Expand => Array::from_fn(node.dtype, dims, |c| {
            let from: Vec<usize> = c
                .iter()
                .zip(&args[0].dims)
                .map(|(&c, &n)| if n == 1 { 0 } else { c })
                .collect();
            args[0].at(&from)
        }),
        Op::Slice { start, step } => {
            let start = fixed(start);
            Array::from_fn(node.dtype, dims, |c| {
                args[0].at(&s::placed(c, &start, step))
            })
        }
        Op::Pad { start, step, value } => {
            let start = fixed(start);
            let mut canvas = pointwise(&|_| from_value(*value));
            each(&args[0].dims, |c| {
                canvas.values[flat(dims, &s::placed(c, &start, step))] = args[0].at(c)
            });
            canvas
        }
        Op::Custom(kernel) => custom::run(kernel, args, dims),
        Op::Nonzero => s::compact(args[0], dims),
        Op::Sort { descending } => s::sort(args[0], *descending, dims),
        Op::NonMaxSuppression { threshold } => s::suppress(args[0], *threshold),
        Op::Concat { axis } => s::concat(*axis, args, node.dtype, dims),
    })
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.dtype, self.dims, self.values)
    }
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::scalar::ScalarOp;
    use slabwise_kernels::spec::{Dims, PoolKind, ReduceOp, Window};

    use super::*;
    use crate::graph::InputInfo;
    use crate::ops::Checked;
    use crate::ops::{ConvGeometry, GraphBuilder, NodeId};

    fn sizes(lengths: &[usize]) -> Dims {
        lengths.iter().map(|&n| Size::fixed(n as i64)).collect()
    }

    /// The value of a node over these inputs.
    fn value(
        arrays: &[Array],
        build: impl FnOnce(&mut Graph, &[NodeId]) -> NodeId,
    ) -> Result<Vec<f64>, Fault> {
        let mut g = Graph::default();
        let mut ids = Vec::new();
        for (i, a) in arrays.iter().enumerate() {
            g.inputs.push(InputInfo {
                name: "x".into(),
                dtype: a.dtype,
                dims: sizes(&a.dims),
                donated_to: None,
            });
            ids.push(g.emit(Op::Input(i as u32), &[], a.dtype, sizes(&a.dims)));
        }
        let last = build(&mut g, &ids);
        let run = evaluate(&g, &Env::default(), arrays, &[], Precision::Single)?;
        Ok(run.values[last.at()].values.clone())
    }

    fn floats(dims: &[usize], values: &[f64]) -> Array {
        Array {
            dtype: DType::F32,
            dims: dims.to_vec(),
            values: values.to_vec(),
        }
    }

    #[test]
    fn numbers_worked_out_by_hand() {
        let image = floats(&[1, 1, 2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let weight = floats(&[1, 1, 2, 2], &[1.0, 10.0, 100.0, 1000.0]);
        let conv = value(&[image.clone(), weight], |g, x| {
            g.emit(
                Op::Conv2d(ConvGeometry::default()),
                x,
                DType::F32,
                sizes(&[1, 1, 1, 2]),
            )
        });
        assert_eq!(conv, Ok(vec![5421.0, 6532.0]));
        let window = Window {
            k: [2, 2],
            stride: [1, 2],
            pad: [1, 0],
        };
        let pool = |kind| {
            value(std::slice::from_ref(&image), |g, x| {
                g.emit(
                    Op::Pool2d(kind, window),
                    x,
                    DType::F32,
                    sizes(&[1, 1, 3, 1]),
                )
            })
        };
        assert_eq!(pool(PoolKind::Max), Ok(vec![2.0, 5.0, 5.0]));
        assert_eq!(
            pool(PoolKind::Avg { count_pad: true }),
            Ok(vec![0.75, 3.0, 2.25])
        );
        assert_eq!(
            pool(PoolKind::Avg { count_pad: false }),
            Ok(vec![1.5, 3.0, 4.5])
        );
        assert_eq!(pool(PoolKind::ArgMax), Ok(vec![3.0, 3.0, 1.0]));
        let product = value(
            &[
                floats(&[1, 2], &[2.0, 3.0]),
                floats(&[2, 2], &[1.0, 10.0, 100.0, 1000.0]),
            ],
            |g, x| g.matmul(x[0], x[1]),
        );
        assert_eq!(product, Ok(vec![302.0, 3020.0]));
        let first = value(&[floats(&[4], &[1.0, f64::NAN, 7.0, f64::NAN])], |g, x| {
            g.reduce(ReduceOp::ArgMax, x[0], &[0])
        });
        assert_eq!(first, Ok(vec![1.0]));
    }

    #[test]
    fn conversions_saturate_and_round() {
        let cast = |from: DType, x: f64, to: DType| {
            value(
                &[Array {
                    dtype: from,
                    dims: vec![],
                    values: vec![x],
                }],
                |g, a| g.cast(a[0], to),
            )
            .map(|v| v[0])
        };
        assert_eq!(cast(DType::F32, 300.7, DType::U8), Ok(255.0));
        assert_eq!(cast(DType::I32, 300.0, DType::U8), Ok(255.0));
        assert_eq!(cast(DType::I32, -1.0, DType::U8), Ok(0.0));
        assert_eq!(cast(DType::F32, -2.9, DType::I32), Ok(-2.0));
        assert_eq!(cast(DType::F32, f64::NAN, DType::I32), Ok(0.0));
        assert_eq!(cast(DType::I32, 16_777_217.0, DType::F32), Ok(16_777_216.0));
        assert_eq!(cast(DType::F32, -0.5, DType::Bool), Ok(1.0));
    }

    #[test]
    fn doubles_agree_with_the_scalar_table() {
        for &op in ScalarOp::ALL {
            for (x, y, z) in [
                (0.3, 1.7, -0.4),
                (1.0, 1.0, 0.0),
                (0.0, 2.5, 1.0),
                (2.5, 0.5, 3.0),
                (1.0, 0.0, 8.0),
            ] {
                let arguments: Vec<f64> = [x, y, z][..op.arity()].to_vec();
                let lanes = [Lane::F32, Lane::Bool, Lane::I32];
                let typed = |first: Lane, rest: Lane| -> Vec<Value> {
                    arguments
                        .iter()
                        .enumerate()
                        .map(|(i, &v)| to_value(v, if i == 0 { first } else { rest }))
                        .collect()
                };
                let mut choices = lanes
                    .iter()
                    .flat_map(|&a| lanes.iter().map(move |&b| (a, b)));
                let of = |v: &[Value]| v.iter().map(|v| v.lane()).collect::<Vec<_>>();
                let values = choices
                    .find_map(|(a, b)| Some(typed(a, b)).filter(|v| op.lane(&of(v)).is_some()))
                    .expect("some lanes fit");
                // Storage is not rounded in double precision: an f16 and a bf16 are off by half of
                // their last place.
                let rounding = if matches!(op, ScalarOp::RoundF16 | ScalarOp::RoundBf16) {
                    2f64.powi(-8)
                } else {
                    1e-6
                };
                let (single, double) =
                    (from_value(op.eval(&values)), double::scalar(op, &arguments));
                let close = (single - double).abs() <= rounding * (1.0 + double.abs())
                    || single == double
                    || (single.is_nan() && double.is_nan());
                assert!(
                    close,
                    "{} of {arguments:?}: {single} and {double}",
                    op.name()
                );
            }
        }
    }

    #[test]
    fn faults_name_the_node() {
        let index = Array {
            dtype: DType::I32,
            dims: vec![3],
            values: vec![0.0, 4.0, 2.0],
        };
        let checked = value(std::slice::from_ref(&index), |g, x| {
            g.emit(
                Op::BoundsCheck {
                    limit: Size::fixed(4),
                    of: Checked::Index,
                },
                x,
                DType::I32,
                sizes(&[3]),
            )
        });
        assert_eq!(
            checked,
            Err(Fault::Index {
                node: 1,
                index: 4,
                limit: 4
            })
        );
        let gathered = value(&[floats(&[2], &[1.0, 2.0]), index], |g, x| {
            g.emit(Op::Gather { axis: 0 }, x, DType::F32, sizes(&[3]))
        });
        assert_eq!(
            gathered,
            Err(Fault::Index {
                node: 2,
                index: 4,
                limit: 2
            })
        );
        let mut g = Graph::default();
        g.emit(Op::Input(0), &[], DType::F32, Dims::new());
        let missing = evaluate(&g, &Env::default(), &[], &[], Precision::Single).map(|e| e.outputs);
        assert_eq!(
            missing,
            Err(Fault::Argument {
                node: 0,
                what: "an input"
            })
        );
    }
}
