//! The anchor of a kernel and its arguments.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{
    Access, Argument, Attention, AttentionGrad, Body, BoundsCheck, Collective, Conv2d, ConvKind,
    Custom, Dims, Gather, Matmul, NonMaxSuppression, Nonzero, Operand, Pool2d, Pool2dGrad,
    PoolKind, PrefixReduce, QuantizedMatmul, Scan, Scatter, Scores, SliceAssign, Sort,
};

use super::{Arg, Lowering};
use crate::graph::Kept;
use crate::ops::{ConvGeometry, NodeId, Op, Operands, rows_last, split_last};
use crate::passes::layout::View;
use crate::shape::Extent;

impl<'a> Lowering<'a> {
    /// The anchor and its arguments.
    pub(super) fn body(&self) -> Option<(Body, Vec<Arg>)> {
        let c = &self.clusters.list[self.cluster];
        let Some(anchor) = c.anchor else {
            return Some((Body::Loop, vec![]));
        };
        let node = self.graph.node(anchor);
        if let Op::Scan(_) = node.op {
            return self.scan(anchor);
        }
        let operand = |k: usize| {
            let input = *node.inputs.get(k)?;
            let v = self.around.views.view(self.graph, input)?;
            Some((
                Operand {
                    dtype: self.graph.node(input).dtype,
                    offset: v.offset,
                    strides: v.strides,
                },
                self.around.base(self.graph, v.base),
            ))
        };
        let dims_of = |k: usize| &self.graph.node(node.inputs[k]).dims;
        let (first, first_arg) = operand(0)?;
        let mut args = vec![first_arg];
        let body = match &node.op {
            Op::Matmul => {
                let (b, arg) = operand(1)?;
                args.push(arg);
                Body::Matmul(Matmul {
                    k: *dims_of(0).last()?,
                    in_order: self.graph.is_training,
                    a: first,
                    b,
                })
            }
            Op::QuantizedMatmul(format) => {
                let (numbers, numbers_arg) = operand(1)?;
                let (scales, scales_arg) = operand(2)?;
                args.extend([numbers_arg, scales_arg]);
                let zeros = match node.inputs.len() {
                    3 => None,
                    _ => {
                        let (zeros, arg) = operand(3)?;
                        args.push(arg);
                        Some(zeros)
                    }
                };
                Body::QuantizedMatmul(Box::new(QuantizedMatmul {
                    k: *dims_of(0).last()?,
                    a: first,
                    format: *format,
                    numbers,
                    scales,
                    in_order: self.graph.is_training,
                    zeros,
                }))
            }
            Op::Conv2d(g) | Op::Conv2dInputGrad(g) | Op::Conv2dWeightGrad(g) => {
                let (b, arg) = operand(1)?;
                args.push(arg);
                let (kind, image, result, weight) = match &node.op {
                    Op::Conv2d(_) => (ConvKind::Forward, dims_of(0), &node.dims, dims_of(1)),
                    Op::Conv2dInputGrad(_) => {
                        (ConvKind::InputGrad, &node.dims, dims_of(0), dims_of(1))
                    }
                    _ => (ConvKind::WeightGrad, dims_of(0), dims_of(1), &node.dims),
                };
                Body::Conv2d(conv(kind, g, image, result, weight, first, b)?)
            }
            Op::Pool2d(kind, window) => {
                let image = dims_of(0);
                let mut arg = None;
                if let Some(positions) = c.positions {
                    arg = Some(Operand::contiguous(
                        self.graph.node(positions).dtype,
                        &self.graph.node(positions).dims,
                    )?);
                    args.push(Arg::Buffer(positions));
                }
                Body::Pool2d(Pool2d {
                    kind: *kind,
                    window: *window,
                    hw: [image[2], image[3]],
                    x: first,
                    arg,
                })
            }
            Op::Pool2dGrad(kind, window) => {
                let result = dims_of(0);
                let mut arg = None;
                if *kind == PoolKind::Max {
                    let (positions, from) = operand(1)?;
                    arg = Some(positions);
                    args.push(from);
                }
                Body::Pool2dGrad(Pool2dGrad {
                    kind: *kind,
                    window: *window,
                    ohw: [result[2], result[3]],
                    dy: first,
                    arg,
                })
            }
            Op::Gather { axis } => {
                let (index, from) = operand(1)?;
                args.push(from);
                let mut source = first;
                let axis_stride = std::mem::replace(&mut source.strides[*axis], Size::ZERO);
                Body::Gather(Gather {
                    source,
                    index,
                    axis_stride,
                    axis_len: dims_of(0)[*axis],
                })
            }
            Op::Scatter { axis, reduce } => {
                let (index, from) = operand(1)?;
                args.push(from);
                Body::Scatter(Scatter {
                    axis: *axis,
                    reduce: *reduce,
                    space: dims_of(0).clone(),
                    value: first,
                    index,
                })
            }
            Op::BoundsCheck { limit, .. } => Body::BoundsCheck(BoundsCheck {
                index: first,
                limit: *limit,
            }),
            Op::Bind { symbol } => {
                let Extent::DataDependent(most) = self.graph.symbols.extent(*symbol) else {
                    return None;
                };
                Body::BoundsCheck(BoundsCheck {
                    index: first,
                    limit: most.checked_add(Size::ONE)?,
                })
            }
            op if op.is_opaque() => {
                let own = Operand::contiguous(node.dtype, &node.dims)?;
                for k in 1..node.inputs.len() {
                    args.push(operand(k)?.1);
                }
                args.push(self.around.base(self.graph, anchor));
                match op {
                    Op::SliceAssign { start, step, axis } => {
                        let place = axis.and_then(|axis| {
                            let (mut place, _) = operand(2)?;
                            for (stride, dim) in place.strides.iter_mut().zip(dims_of(2)) {
                                if dim.is(1) {
                                    *stride = Size::ZERO;
                                }
                            }
                            Some((axis, place))
                        });
                        let in_place = self.around.in_place.contains_key(&anchor);
                        if in_place {
                            args.remove(0);
                        }
                        Body::SliceAssign(Box::new(SliceAssign {
                            base: (!in_place).then_some(first),
                            space: dims_of(1).clone(),
                            value: operand(1)?.0,
                            start: start.clone(),
                            step: step.clone(),
                            place,
                            result: own,
                        }))
                    }
                    Op::PrefixReduce {
                        op,
                        exclusive,
                        reverse,
                    } => Body::PrefixReduce(PrefixReduce {
                        op: *op,
                        exclusive: *exclusive,
                        reverse: *reverse,
                        source: first,
                        factor: match node.inputs.len() {
                            1 => None,
                            _ => Some(operand(1)?.0),
                        },
                        result: own,
                    }),
                    &Op::Attention(scores) => {
                        let of = self.attention(scores, &node.inputs, with_rows_last(own))?;
                        Body::Attention(Box::new(of))
                    }
                    &Op::AttentionGrad { scores, in_turns } => {
                        let count = node.inputs.len();
                        let (list, _) = split_last(&node.inputs)?;
                        let y = with_rows_last(operand(count - 2)?.0);
                        Body::AttentionGrad(Box::new(AttentionGrad {
                            of: self.attention(scores, list, y)?,
                            queries: dims_of(0)[node.dims.len() - 2],
                            dy: with_rows_last(operand(count - 1)?.0),
                            in_turns,
                            gradients: with_rows_last(own),
                        }))
                    }
                    Op::Nonzero => Body::Nonzero(Nonzero {
                        space: dims_of(0).clone(),
                        mask: first,
                        positions: own,
                    }),
                    Op::Sort { descending } => Body::Sort(Sort {
                        descending: *descending,
                        len: *dims_of(0).last()?,
                        source: first,
                        positions: own,
                    }),
                    Op::NonMaxSuppression { threshold } => {
                        Body::NonMaxSuppression(NonMaxSuppression {
                            threshold: *threshold,
                            boxes: first,
                            keep: own,
                        })
                    }
                    Op::Custom(kernel) => {
                        let input = |k: usize| Some((operand(k)?.0, dims_of(k).clone()));
                        let inputs = (0..node.inputs.len()).map(input);
                        Body::Custom(Box::new(Custom {
                            kernel: kernel.clone(),
                            inputs: inputs.collect::<Option<_>>()?,
                            result: own,
                        }))
                    }
                    Op::Collective { op, group } => Body::Collective(Collective {
                        op: *op,
                        group: *group,
                        source: first,
                        result: own,
                    }),
                    _ => return None,
                }
            }
            _ => return None,
        };
        Some((body, args))
    }
}

/// An operand `[b, rows, …, columns]` as `[b, …, rows, columns]`.
fn with_rows_last(operand: Operand) -> Operand {
    let axes = rows_last(operand.strides.len());
    Operand {
        strides: axes.iter().map(|&axis| operand.strides[axis]).collect(),
        ..operand
    }
}

impl Lowering<'_> {
    /// Attention of these nodes with this result.
    fn attention(&self, scores: Scores, list: &[NodeId], result: Operand) -> Option<Attention> {
        let of = Operands::of(list, |id| self.graph.node(id).dtype)?;
        let operand = |id: NodeId| {
            let View {
                offset, strides, ..
            } = self.around.views.view(self.graph, id)?;
            Some(Operand {
                dtype: self.graph.node(id).dtype,
                offset,
                strides,
            })
        };
        let last = |id: NodeId| self.graph.node(id).dims.iter().rev();
        Some(Attention {
            scores,
            width: *last(of.k).next()?,
            keys: *last(of.k).nth(1)?,
            q: operand(of.q)?,
            k: operand(of.k)?,
            v: operand(of.v)?,
            mask: match of.mask {
                Some(mask) => Some(operand(mask)?),
                None => None,
            },
            past: match of.past {
                Some(past) => Some(operand(past)?),
                None => None,
            },
            result,
        })
    }

    /// A loop over steps and its arguments.
    fn scan(&self, scan: NodeId) -> Option<(Body, Vec<Arg>)> {
        let body = self.graph.body(scan)?;
        let planned = body.planned.as_ref()?;
        let (mut arguments, mut args) = (Vec::new(), Vec::new());
        let mut add = |operand: Operand, dims: &Dims, access: Access, arg: Arg| {
            arguments.push(Argument {
                operand,
                dims: dims.clone(),
                access,
            });
            args.push(arg);
        };
        for &input in &self.graph.node(scan).inputs {
            let node = self.graph.node(input);
            let view = self.around.views.view(self.graph, input)?;
            let operand = Operand {
                dtype: node.dtype,
                offset: view.offset,
                strides: view.strides,
            };
            let arg = self.around.base(self.graph, view.base);
            add(operand, &node.dims, Access::Read, arg);
        }
        if planned.sizes {
            let dims = Dims::from_slice(&[Size::fixed(self.graph.symbols.iter().count() as i64)]);
            let operand = Operand::contiguous(DType::I32, &dims)?;
            add(operand, &dims, Access::Read, Arg::Sizes);
        }
        let mut in_place = Vec::new();
        for (result, _) in (0..).zip(&planned.kept).filter(|(_, k)| **k != Kept::None) {
            let members = &self.clusters.list[self.cluster].members;
            let is_result = |m: &&NodeId| self.graph.node(**m).op == Op::ScanResult(result);
            let member = *members.iter().find(is_result)?;
            let node = self.graph.node(member);
            let operand = Operand::contiguous(node.dtype, &node.dims)?;
            let pairs = planned.in_place.iter();
            let from = pairs.filter(|(_, to)| *to == result as usize);
            in_place.extend(from.map(|(from, _)| (*from as u16, arguments.len() as u16)));
            arguments.push(Argument {
                operand,
                dims: node.dims.clone(),
                access: Access::Write,
            });
            args.push(Arg::Buffer(member));
        }
        in_place.retain(|&(from, _)| {
            let Argument { operand, dims, .. } = &arguments[usize::from(from)];
            Operand::contiguous(operand.dtype, dims).as_ref() == Some(operand)
        });
        let scan = Scan {
            steps: body.steps,
            reverse: body.reverse,
            arguments,
            calls: planned.calls.clone(),
            in_place,
            scratch: planned.scratch,
        };
        Some((Body::Scan(Box::new(scan)), args))
    }
}

fn conv(
    kind: ConvKind,
    g: &ConvGeometry,
    image: &Dims,
    result: &Dims,
    weight: &Dims,
    a: Operand,
    b: Operand,
) -> Option<Conv2d> {
    let fixed = |s: Size| s.as_fixed().and_then(|n| usize::try_from(n).ok());
    Some(Conv2d {
        kind,
        n: image[0],
        ci: image[1],
        co: weight[0],
        hw: [image[2], image[3]],
        ohw: [result[2], result[3]],
        k: [fixed(weight[2])?, fixed(weight[3])?],
        stride: g.stride,
        pad: g.pad,
        dilation: g.dilation,
        groups: g.groups,
        a,
        b,
        prologue: None,
        exact: false,
    })
}
