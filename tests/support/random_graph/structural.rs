//! Steps of structural operations.

use slabwise::params::Init;
use slabwise::shape::{Dims, Env, Extent, Size, elements};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::ops::{Axes, Checked, ConvGeometry, GraphBuilder, NodeId, Op, attention};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::{PoolKind, Quantization, Scores, Window};

use super::{BOUND, Known, LIMIT, Maker};
use crate::support::{select_by, variable};

impl Maker {
    pub(super) fn matmul(&mut self) -> Option<()> {
        let a = self.find(|g, id, _| g.dtype(id).is_float() && g.dims(id).len() >= 2)?;
        let rank = self.g.dims(a).len();
        if rank > 2 && self.rng.one_in(2) {
            return self.layer(a);
        }
        let (batch, k) = (
            Dims::from_slice(&self.g.dims(a)[..rank - 2]),
            self.g.dims(a)[rank - 1],
        );
        let fits = |g: &Graph, id: NodeId| {
            let d = g.dims(id);
            g.dtype(id) == g.dtype(a)
                && d.len() == rank
                && d[..rank - 2] == batch[..]
                && d[rank - 2] == k
        };
        let b = match self.find(|g, id, _| fits(g, id)) {
            Some(b) => b,
            None => self.g.transpose(a),
        };
        let node = self.g.matmul(a, b);
        let bound = self.of(a).bound
            * self.of(b).bound.max(self.of(a).bound)
            * k.at(&self.g.symbols.bounds()) as f64;
        self.keep(node, bound, false);
        Some(())
    }

    /// The product of all rows of a value, as one matrix, and a weight, with the axes of the value.
    fn layer(&mut self, a: NodeId) -> Option<()> {
        let mut dims = self.g.dims(a).clone();
        let k = dims.pop()?;
        let rows = elements(&dims)?;
        let width = Size::fixed(1 + self.rng.below(4) as i64);
        dims.push(width);
        let flat = self.g.reshape(a, &Dims::from_slice(&[rows, k]));
        let of_weight = Dims::from_slice(&[k, width]);
        let strides = Dims::from_slice(&[width, Size::ONE]);
        let place = self.g.emit(Op::Index(strides), &[], DType::I32, of_weight);
        let place = self.g.cast(place, DType::F32);
        let weight = self.g.scalar(ScalarOp::Cos, &[place]);
        let weight = self.g.cast(weight, self.g.dtype(a));
        let product = self.g.matmul(flat, weight);
        let node = self.g.reshape(product, &dims);
        let bound = self.of(a).bound * k.at(&self.g.symbols.bounds()) as f64;
        self.keep(node, bound, false);
        Some(())
    }

    /// The product of all rows of a value, repeated to whole blocks, and quantized weights, or these
    /// weights alone.
    pub(super) fn quantized(&mut self) -> Option<()> {
        let a = self.find(|g, id, _| g.dtype(id) == DType::F32 && !g.dims(id).is_empty())?;
        let mut dims = self.g.dims(a).clone();
        let k = dims.pop()?;
        let (rows, length) = (elements(&dims)?, k.as_fixed().filter(|&k| k > 0)?);
        // With the last of them, weights have no kernel.
        let choices = [(8, 8), (8, 4), (4, 16), (4, 8), (2, 4)];
        let (bits, block) = self.rng.pick(&choices);
        let format = Quantization { bits, block };
        let columns = length * i64::from(block);
        let n = 1 + self.rng.below(4) as i64;
        let number = |g: &mut Graph, length: i64, by: [i64; 2]| {
            let strides = by.map(Size::fixed);
            let dims = Dims::from_slice(&[n, length].map(Size::fixed));
            g.emit(Op::Index(Dims::from_slice(&strides)), &[], DType::I32, dims)
        };
        let bytes = |g: &mut Graph, numbers: i64| {
            let index = number(g, format.bytes(numbers), [37, 101]);
            let dims = g.dims(index).clone();
            let limit = g.full(256.0, DType::I32, &dims);
            let byte = g.scalar(ScalarOp::Fmod, &[index, limit]);
            g.cast(byte, DType::U8)
        };
        let per_block = |g: &mut Graph, by: [i64; 2]| {
            let index = number(g, length, by);
            let index = g.cast(index, DType::F32);
            g.scalar(ScalarOp::Cos, &[index])
        };
        let scales = per_block(&mut self.g, [3, 7]);
        let scales = self.scaled(scales, 0.5 / f64::from(format.mask()));
        let mut inputs = vec![bytes(&mut self.g, columns), scales];
        match self.rng.below(3) {
            0 => inputs.push(bytes(&mut self.g, length)),
            1 => inputs.push(per_block(&mut self.g, [5, 1])),
            _ => {}
        }
        let of_weights = Dims::from_slice(&[n, columns].map(Size::fixed));
        let op = Op::Dequantize(format);
        let weights = self.g.emit(op, &inputs, DType::F32, of_weights);
        if self.rng.one_in(4) {
            self.keep(weights, 1.0, false);
            return Some(());
        }
        let each = Dims::from_slice(&[rows, Size::ONE, k]);
        let repeated = Dims::from_slice(&[rows, Size::fixed(i64::from(block)), k]);
        let x = self.g.reshape(a, &each);
        let x = self.g.broadcast(x, &repeated);
        let x = self
            .g
            .reshape(x, &Dims::from_slice(&[rows, Size::fixed(columns)]));
        let x = self.scaled(x, 1.0 / columns as f64);
        let weights = self.g.transpose(weights);
        let product = self.g.matmul(x, weights);
        dims.push(Size::fixed(n));
        let node = self.g.reshape(product, &dims);
        let bound = self.of(a).bound;
        self.keep(node, bound, false);
        Some(())
    }

    /// Attention of a value's rows to themselves, and sometimes its gradient.
    pub(super) fn attention(&mut self) -> Option<()> {
        let x = self.find(|g, id, _| g.dtype(id) == DType::F32 && g.dims(id).len() >= 2)?;
        let (mut dims, bound) = (self.g.dims(x).clone(), self.of(x).bound.max(1.0));
        if dims.len() == 2 {
            dims.insert(0, Size::ONE);
        }
        let v = self.g.reshape(x, &dims);
        // Scores of at most the width.
        let [q, k] = [1.0, -1.0].map(|sign| self.scaled(v, sign / bound));
        let scores = Scores {
            scale: self.rng.pick(&[1.0, 0.5, -1.0]),
            soft_cap: self.rng.pick(&[None, None, Some(0.5)]),
            causal: self.rng.one_in(2),
            window: self.rng.pick(&[None, Some(1), Some(3)]),
            past: 0,
            step: 1,
        };
        let mut operands = vec![q, k, v];
        if self.rng.one_in(2) {
            // Of all pairs, or the same for all queries or heads; no truth value hides a query's
            // own key, so that each has a weight.
            let [.., rows, _] = dims.as_slice() else {
                return None;
            };
            let mut pairs = dims.clone();
            pairs[dims.len() - 1] = *rows;
            let along = |g: &mut Graph, axis: usize, dims: &Dims| {
                let mut strides = Dims::from_elem(Size::ZERO, dims.len());
                strides[axis] = Size::ONE;
                g.emit(Op::Index(strides), &[], DType::I32, dims.clone())
            };
            let mut own = pairs.clone();
            let rank = pairs.len();
            if self.rng.one_in(2) {
                own[..rank - 2].fill(Size::ONE);
            }
            let mask = if self.rng.one_in(2) {
                let [row, key] = [rank - 2, rank - 1].map(|axis| along(&mut self.g, axis, &own));
                let same = self.g.scalar(ScalarOp::Eq, &[row, key]);
                let other = along(&mut self.g, rank - 1, &own);
                let two = self.g.full(2.0, DType::I32, &own);
                let odd = self.g.scalar(ScalarOp::Fmod, &[other, two]);
                let none = self.g.full(0.0, DType::I32, &own);
                let even = self.g.scalar(ScalarOp::Eq, &[odd, none]);
                self.g.scalar(ScalarOp::Or, &[same, even])
            } else {
                if self.rng.one_in(2) {
                    own[rank - 2] = Size::ONE;
                }
                let key = along(&mut self.g, rank - 1, &own);
                let key = self.g.cast(key, DType::F32);
                self.g.scalar(ScalarOp::Cos, &[key])
            };
            operands.push(self.g.broadcast(mask, &pairs));
        }
        let y = attention(&mut self.g, scores, &operands, DType::F32);
        self.keep(y, bound, false);
        if self.rng.one_in(2) {
            let square = self.g.mul(y, y);
            self.differentiate(square, &[x]);
        }
        Some(())
    }

    /// A float image with fixed channels, height and width.
    fn image(&mut self, exact: bool) -> Option<(NodeId, [i64; 4])> {
        let fixed = |g: &Graph, id: NodeId| {
            let d = g.dims(id);
            let sizes = [
                d[0].at(&g.symbols.bounds()),
                d[1].as_fixed()?,
                d[2].as_fixed()?,
                d[3].as_fixed()?,
            ];
            Some(sizes)
        };
        let short = self.short;
        let fixed = |g: &Graph, id: NodeId| {
            fixed(g, id).filter(|sizes| short || sizes.iter().all(|&n| n > 0))
        };
        let id = self.find(|g, id, known| {
            g.dtype(id) == DType::F32
                && g.dims(id).len() == 4
                && fixed(g, id).is_some()
                && (known.exact || !exact)
        })?;
        Some((id, fixed(&self.g, id)?))
    }

    pub(super) fn conv2d(&mut self) -> Option<()> {
        let (x, [_, channels, h, w]) = self.image(false)?;
        let groups = if channels % 2 == 0 {
            self.rng.pick(&[1, 2])
        } else {
            1
        };
        let geometry = ConvGeometry {
            stride: [self.rng.pick(&[1, 2]), 1],
            pad: [self.rng.below(2), self.rng.below(3)],
            dilation: [1, self.rng.pick(&[1, 2])],
            groups: groups as usize,
        };
        let k = [self.rng.pick(&[1, 2]), self.rng.pick(&[1, 3])];
        let size = |i: usize, n: i64| {
            (n + 2 * geometry.pad[i] as i64 - (geometry.dilation[i] * (k[i] - 1)) as i64 - 1)
                .div_euclid(geometry.stride[i] as i64)
                + 1
        };
        let (oh, ow) = (size(0, h), size(1, w));
        if oh < 1 || ow < 1 {
            return None;
        }
        // More or fewer zeros after the last row and column than before the first.
        let (oh, ow) = (
            oh + self.rng.below(2) as i64,
            (ow - self.rng.below(2) as i64).max(1),
        );
        let results = if self.short {
            self.rng.pick(&[0, 2])
        } else {
            2
        };
        let lengths = [results, (channels / groups) as usize, k[0], k[1]];
        let weight = variable(
            &mut self.g,
            DType::F32,
            &crate::support::dims(&lengths),
            Init::Constant(0.0),
        );
        let dims = Dims::from_slice(&[
            self.g.dims(x)[0],
            Size::fixed(results as i64),
            Size::fixed(oh),
            Size::fixed(ow),
        ]);
        let node = self
            .g
            .emit(Op::Conv2d(geometry), &[x, weight], DType::F32, dims);
        let bound = self.of(x).bound * 3.0 * lengths[1..].iter().product::<usize>() as f64;
        self.keep(node, bound, false);
        Some(())
    }

    pub(super) fn pool2d(&mut self) -> Option<()> {
        let count_pad = self.rng.one_in(2);
        let kind = self.rng.pick(&[
            PoolKind::Max,
            PoolKind::Max,
            PoolKind::ArgMax,
            PoolKind::Avg { count_pad },
        ]);
        let jumps = matches!(kind, PoolKind::Max | PoolKind::ArgMax);
        let (mut x, [_, _, h, w]) = self.image(jumps)?;
        let Known { bound, exact } = self.of(x);
        let window = self.rng.pick(&[
            Window {
                k: [2, 2],
                stride: [2, 2],
                pad: [0, 0],
            },
            Window {
                k: [3, 2],
                stride: [1, 2],
                pad: [1, 0],
            },
            Window {
                k: [2, 3],
                stride: [2, 1],
                pad: [1, 1],
            },
        ]);
        let size = |i: usize, n: i64| {
            (n + 2 * window.pad[i] as i64 - window.k[i] as i64).div_euclid(window.stride[i] as i64)
                + 1
        };
        let (oh, ow) = (size(0, h), size(1, w));
        if oh < 1 || ow < 1 || h < 1 || w < 1 {
            return None;
        }
        // A last window that reaches past the padding, if it begins in the image.
        let more = |i: usize, n: i64, count: i64| {
            let begin = count * window.stride[i] as i64 - window.pad[i] as i64;
            count + i64::from(begin < n)
        };
        let (oh, ow) = match self.rng.one_in(2) {
            true => (more(0, h, oh), more(1, w, ow)),
            false => (oh, ow),
        };
        let before = x;
        if self.rng.one_in(2) {
            x = self.g.scalar(ScalarOp::Relu, &[x]);
        }
        let dtype = if kind == PoolKind::ArgMax {
            DType::U8
        } else {
            DType::F32
        };
        let dims = Dims::from_slice(&[
            self.g.dims(x)[0],
            self.g.dims(x)[1],
            Size::fixed(oh),
            Size::fixed(ow),
        ]);
        let node = self.g.emit(Op::Pool2d(kind, window), &[x], dtype, dims);
        self.keep(node, bound.max(9.0_f64.min(BOUND)), exact && jumps);
        if self.g.dtype(node).is_float() && self.rng.one_in(2) {
            self.differentiate(node, &[before]);
        }
        Some(())
    }

    /// The elements of a tensor selected by a mask, of data-dependent length.
    pub(super) fn select(&mut self) -> Option<()> {
        const FOUND_MAX: usize = 2;
        let is_data_dependent = |extent: Extent| matches!(extent, Extent::DataDependent(_));
        if self
            .g
            .symbols
            .iter()
            .filter(|(_, _, extent)| is_data_dependent(*extent))
            .count()
            >= FOUND_MAX
        {
            return None;
        }
        let x = self.any()?;
        let (dims, known) = (self.g.dims(x).clone(), self.of(x));
        let mask = self
            .find(|g, id, known| g.dtype(id) == DType::Bool && known.exact && *g.dims(id) == dims);
        let mask = match mask {
            Some(mask) => mask,
            None => {
                // Every second or third element.
                let every = self.rng.below(2) as f32 + 1.0;
                let (index, _) = self.index(&dims);
                let index = self.g.cast(index, DType::I32);
                let every = self.g.full(every, DType::I32, &dims);
                self.g.scalar(ScalarOp::Ge, &[index, every])
            }
        };
        let dtype = self.g.dtype(x);
        let chosen = select_by(&mut self.g, x, mask)?;
        self.keep(chosen, known.bound, known.exact);
        if dtype.is_float() && self.rng.one_in(2) {
            self.differentiate(chosen, &[x]);
        }
        Some(())
    }

    /// The order of elements along the last axis.
    pub(super) fn order(&mut self) -> Option<()> {
        let x = self.find(|g, id, known| {
            known.exact && !g.dims(id).is_empty() && g.dtype(id) != DType::Bool
        })?;
        let dims = self.g.dims(x).clone();
        let most = dims.last()?.at(&self.g.symbols.bounds());
        let op = Op::Sort {
            descending: self.rng.one_in(2),
        };
        // All of them, or the first few.
        let mut dims = dims;
        if let Some(last) = dims.last_mut()
            && let Some(n) = last.as_fixed().filter(|_| self.rng.one_in(2))
        {
            *last = Size::fixed(self.rng.below(n as usize + 1) as i64);
        }
        let order = self.g.emit(op, &[x], DType::I32, dims);
        self.keep(order, most as f64, true);
        Some(())
    }

    /// Boxes that stay. Corners in any order, because the overlap of such boxes is defined as well.
    pub(super) fn suppress(&mut self) -> Option<()> {
        let fits = |g: &Graph, id: NodeId, known: Known| {
            known.exact && g.dtype(id) == DType::F32 && g.dims(id).len() == 2 && g.dims(id)[1].is(4)
        };
        let boxes = self.find(fits)?;
        let dims = Dims::from_slice(&self.g.dims(boxes)[..1]);
        let op = Op::NonMaxSuppression {
            threshold: self.rng.pick(&[0.0, 0.25, 0.5]),
        };
        let keep = self.g.emit(op, &[boxes], DType::Bool, dims);
        self.keep(keep, 1.0, true);
        Some(())
    }

    /// An index into an axis of length `LIMIT` at least, in range, of a shape.
    pub(super) fn index(&mut self, dims: &Dims) -> (NodeId, u32) {
        let strides = (0..dims.len()).map(|i| Size::fixed(i as i64 + 1)).collect();
        let at = self
            .g
            .emit(Op::Index(strides), &[], DType::I32, dims.clone());
        // at − at / LIMIT · LIMIT
        let limit = self.g.full(LIMIT as f32, DType::I32, dims);
        let whole = self.g.scalar(ScalarOp::Div, &[at, limit]);
        let whole = self.g.mul(whole, limit);
        let index = self.g.scalar(ScalarOp::Sub, &[at, whole]);
        let index = if self.rng.one_in(2) {
            self.g.cast(index, DType::U8)
        } else {
            index
        };
        (index, LIMIT as u32)
    }

    /// An axis of a node with length `LIMIT` at least, and the shape with another length on that
    /// axis.
    pub(super) fn indexed(&mut self, x: NodeId) -> Option<(usize, Dims)> {
        let long = |d: &Size| {
            d.as_fixed()
                .is_some_and(|n| n >= LIMIT as i64 || (self.short && n == 0))
        };
        let axes: Vec<usize> = (0..self.g.dims(x).len())
            .filter(|&i| long(&self.g.dims(x)[i]))
            .collect();
        let axis = *axes.get(self.rng.below(axes.len().max(1)))?;
        let mut dims = self.g.dims(x).clone();
        let none = dims[axis].is(0) || (self.short && self.rng.one_in(3));
        dims[axis] = Size::fixed(if none {
            0
        } else {
            1 + self.rng.below(5) as i64
        });
        Some((axis, dims))
    }

    pub(super) fn gather(&mut self) -> Option<()> {
        let x = self.any()?;
        let (axis, dims) = self.indexed(x)?;
        let (index, limit) = self.index(&dims);
        self.g.emit(
            Op::BoundsCheck {
                limit: Size::from(limit),
                of: Checked::Index,
            },
            &[index],
            self.g.dtype(index),
            dims.clone(),
        );
        let node = self
            .g
            .emit(Op::Gather { axis }, &[x, index], self.g.dtype(x), dims);
        let Known { bound, exact } = self.of(x);
        self.keep(node, bound, exact);
        Some(())
    }

    /// A view of another node.
    fn view(&mut self, x: NodeId, node: NodeId) {
        let Known { bound, exact } = self.of(x);
        self.keep(node, bound, exact);
    }

    pub(super) fn reshape(&mut self) -> Option<()> {
        let x = self.any()?;
        let mut dims = self.g.dims(x).clone();
        if self.short && dims.iter().any(|d| d.is(0)) && self.rng.one_in(2) {
            // Without elements it may have any shape without elements.
            let at = self.rng.below(4);
            dims = (0..4)
                .map(|i| Size::fixed(if i == at { 0 } else { self.rng.below(4) as i64 }))
                .collect();
        } else if self.rng.one_in(3) || dims.len() < 2 {
            dims.insert(self.rng.below(dims.len() + 1), Size::ONE);
        } else {
            let at = self.rng.below(dims.len() - 1);
            let both = dims[at].checked_mul(dims[at + 1])?;
            dims.remove(at);
            dims[at] = both;
        }
        if dims.len() > 5 {
            return None;
        }
        let node = self.g.reshape(x, &dims);
        self.view(x, node);
        Some(())
    }

    pub(super) fn permute(&mut self) -> Option<()> {
        let x = self.any()?;
        let mut axes: Vec<usize> = (0..self.g.dims(x).len()).collect();
        for i in (1..axes.len()).rev() {
            axes.swap(i, self.rng.below(i + 1));
        }
        let dims = axes.iter().map(|&a| self.g.dims(x)[a]).collect();
        let node = self.g.emit(
            Op::Permute(Axes::from_slice(&axes)),
            &[x],
            self.g.dtype(x),
            dims,
        );
        self.view(x, node);
        Some(())
    }

    pub(super) fn expand(&mut self) -> Option<()> {
        let x = self.find(|g, id, _| g.dims(id).iter().any(|d| d.is(1)) || g.dims(id).len() < 3)?;
        let mut dims = self.g.dims(x).clone();
        for d in dims.iter_mut().filter(|d| d.is(1)) {
            *d = Size::fixed(if self.short {
                self.rng.below(4)
            } else {
                1 + self.rng.below(3)
            } as i64);
        }
        if dims.len() < 3 {
            dims.insert(
                0,
                Size::fixed(if self.short {
                    self.rng.below(3) as i64
                } else {
                    2
                }),
            );
        }
        let node = self.g.broadcast(x, &dims);
        self.view(x, node);
        Some(())
    }

    /// A slice of a node: per axis the whole, or every `step`th element from a random start.
    fn part(&mut self, x: NodeId) -> NodeId {
        let (mut start, mut step, mut dims) = (Dims::new(), Vec::new(), Dims::new());
        for d in self.g.dims(x).clone() {
            if self.short && d.as_fixed().is_some() && self.rng.one_in(6) {
                // An empty range with a random start up to the end.
                start.push(Size::fixed(
                    self.rng.below(d.at(&Env::default()) as usize + 1) as i64,
                ));
                step.push(1);
                dims.push(Size::ZERO);
                continue;
            }
            let n = d.as_fixed().filter(|&n| n > 1 && !self.rng.one_in(3));
            let from = n.map_or(0, |n| self.rng.below(n as usize) as i64);
            let by = n.map_or(1, |_| 1 + self.rng.below(2) as i64);
            start.push(Size::fixed(from));
            step.push(by as u32);
            dims.push(n.map_or(d, |n| {
                Size::fixed(1 + self.rng.below(((n - from - 1) / by + 1) as usize) as i64)
            }));
        }
        let op = Op::Slice {
            start,
            step: step.into_iter().collect(),
        };
        self.g.emit(op, &[x], self.g.dtype(x), dims)
    }

    pub(super) fn slice(&mut self) -> Option<()> {
        let x = self.any()?;
        let node = self.part(x);
        self.view(x, node);
        if self.rng.one_in(2) {
            let node = self.part(node);
            self.view(x, node);
        }
        Some(())
    }

    pub(super) fn concat(&mut self) -> Option<()> {
        let x = self.find(|g, id, _| !g.dims(id).is_empty())?;
        let axis = self.rng.below(self.g.dims(x).len());
        let (dtype, dims) = (self.g.dtype(x), self.g.dims(x).clone());
        let mut parts = vec![x];
        for _ in 0..self.rng.below(3) {
            let alike = |g: &Graph, id: NodeId| {
                let d = g.dims(id);
                g.dtype(id) == dtype
                    && d.len() == dims.len()
                    && (0..d.len()).all(|i| i == axis || d[i] == dims[i])
            };
            parts.extend(self.find(|g, id, _| alike(g, id)));
        }
        let mut whole = dims;
        whole[axis] = parts
            .iter()
            .try_fold(Size::ZERO, |n, &p| n.checked_add(self.g.dims(p)[axis]))?;
        // Such as [batch, batch + 4], whose count of elements is not expressible as a size.
        elements(&whole)?;
        let node = self.g.emit(Op::Concat { axis }, &parts, dtype, whole);
        let bound = parts.iter().map(|&p| self.of(p).bound).fold(0.0, f64::max);
        let exact = parts.iter().all(|&p| self.of(p).exact);
        self.keep(node, bound, exact);
        // A slice of it, perhaps of another slice.
        let node = self.part(node);
        self.keep(node, bound, exact);
        Some(())
    }

    pub(super) fn pad(&mut self) -> Option<()> {
        let x = self.find(|g, id, _| !g.dims(id).is_empty())?;
        let (mut start, mut step, mut dims) = (Dims::new(), Vec::new(), Dims::new());
        for d in self.g.dims(x).clone() {
            let n = d
                .as_fixed()
                .filter(|&n| (n > 0 || self.short) && n < 6 && self.rng.one_in(2));
            let (from, by, after) = n.map_or((0, 1, 0), |_| {
                (self.rng.below(2), 1 + self.rng.below(2), self.rng.below(2))
            });
            start.push(Size::fixed(from as i64));
            step.push(by as u32);
            dims.push(n.map_or(d, |n| {
                Size::fixed(
                    from as i64
                        + ((n - 1) * by as i64 + 1).max(0).min(n * by as i64)
                        + after as i64,
                )
            }));
        }
        let dtype = self.g.dtype(x);
        let value = Value::I32(self.rng.below(3) as i32).cast(dtype.lane());
        let op = Op::Pad {
            start: start.clone(),
            step: step.iter().copied().collect(),
            value,
        };
        let node = self.g.emit(op, &[x], dtype, dims);
        let Known { bound, exact } = self.of(x);
        self.keep(node, bound.max(3.0), exact);
        if self.rng.one_in(2) {
            let op = Op::Slice {
                start,
                step: step.into_iter().collect(),
            };
            let back = self.g.emit(op, &[node], dtype, self.g.dims(x).clone());
            self.view(x, back);
        }
        Some(())
    }
}
