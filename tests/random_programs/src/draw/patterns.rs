//! Steps of several statements that are near each other in models: two poolings of one value,
//! paddings and concatenations in a row, parts of parts, products of transposed operands.

use slabwise::DType;
use slabwise::tensor::PoolOptions;

use super::Maker;
use super::steps::{float, single};
use crate::case::{Axis, Binary, Fold, Op, Unary};
use crate::facts::{Fact, Len};
use crate::method::{Method, Pool};

impl Maker<'_> {
    /// A value, perhaps of a function that poolings and joins may move across.
    fn rectified(&mut self, x: usize) -> Option<usize> {
        match self.rng.below(6) {
            0 | 1 => self.push(Op::Unary(Unary::Relu), &[x]),
            2 => self.push(Op::Number(Binary::Mul, -0.5), &[x]),
            _ => Some(x),
        }
    }

    /// Two poolings of one value, whose windows are equal or differ in one respect.
    pub(super) fn pools(&mut self) -> Option<usize> {
        let x = self.field(2)?;
        let x = self.rectified(x)?;
        let first: PoolOptions<2> = self.windows();
        let (mut second, other) = (first, self.windows());
        match self.rng.below(9) {
            0 => second.window = other.window,
            1 => second.stride = other.stride,
            2 => second.padding = other.padding,
            3 | 5 => second.ceil = !first.ceil,
            4 => second = other,
            _ => {}
        }
        let mut pooled = Vec::new();
        for options in [first, second] {
            let pool = self
                .rng
                .pick(&[Pool::Max, Pool::Max, Pool::Avg, Pool::Positions]);
            let one = self.call(Method::Pool2d(pool, options), &[x])?;
            let is_float = pool != Pool::Positions;
            pooled.push(if is_float { self.rectified(one)? } else { one });
        }
        let joined = self.join_two(pooled[0], pooled[1], 1)?;
        if self.fact(joined).smooth && single(self.fact(joined)) && self.rng.one_in(2) {
            return self.push(Op::Gradient, &[joined, x]);
        }
        Some(joined)
    }

    /// A sum of two values that are padded beside each other, as gradients of parts are; their
    /// types may differ.
    pub(super) fn meet(&mut self) -> Option<usize> {
        let x = self.find(|f| float(f) && f.rank() > 0)?;
        let axis = self.an_axis(x)?;
        let dims = self.fact(x).dims.clone();
        let alike = |f: &Fact| {
            let same = |i: usize| i == axis || f.dims[i] == dims[i];
            float(f) && f.rank() == dims.len() && (0..dims.len()).all(same)
        };
        let y = self.find(|f| alike(f) && f.dims[axis].as_fixed().is_some())?;
        let y = match self.rng.one_in(3) && self.fact(y).exact {
            true => {
                let to = self.rng.pick(&[DType::F16, DType::BF16, DType::F32]);
                self.push(Op::Cast(to), &[y])?
            }
            false => y,
        };
        let [n, m] = [dims[axis].as_fixed()?, self.fact(y).dims[axis].as_fixed()?];
        let gap = self.rng.below(4) / 3;
        let value = self.rng.pick(&[0.0, 0.0, 0.0, -0.0]);
        let padded = |sides: (usize, usize)| {
            let mut pads = vec![(0, 0); dims.len()];
            pads[axis] = sides;
            Op::Pad { pads, value }
        };
        let first = self.push(padded((0, m + gap)), &[x])?;
        let second = self.push(padded((n + gap, 0)), &[y])?;
        self.push(Op::Binary(Binary::Add), &[first, second])
    }

    /// Both in one value where their types and shapes allow it, else the second.
    fn join_two(&mut self, x: usize, y: usize, axis: usize) -> Option<usize> {
        let op = match self.rng.below(4) {
            0 => Op::Concat(axis),
            1 => Op::Stack(0),
            2 => Op::Binary(Binary::Sub),
            _ => return Some(y),
        };
        let [x, y] = [x, y].map(|at| match self.fact(at).dtype {
            DType::I32 => self.push(Op::Cast(DType::F32), &[at]).unwrap_or(at),
            _ => at,
        });
        self.push(op, &[x, y]).or(Some(y))
    }

    /// A concatenation that grows: each part is computed from all before.
    pub(super) fn grow(&mut self) -> Option<usize> {
        let mut whole = self.find(|f| float(f) && f.rank() > 0)?;
        let axis = self.an_axis(whole)?;
        for _ in 0..2 + self.rng.below(3) {
            let len = self.fact(whole).dims[axis].least();
            let part = match self.rng.below(4) {
                0 if len > 0 => {
                    let start = self.rng.below(len);
                    let end = Some(start + 1 + self.rng.below((len - start).min(3)));
                    let step = 1;
                    self.push(
                        Op::Slice {
                            axis,
                            start,
                            end,
                            step,
                        },
                        &[whole],
                    )?
                }
                1 => {
                    let fold = self.rng.pick(&[Fold::Max, Fold::Sum]);
                    let (axes, keep) = (Some(vec![axis]), true);
                    self.push(Op::Fold { fold, axes, keep }, &[whole])?
                }
                _ => whole,
            };
            let part = match self.fact(part).lane() == self.fact(whole).dtype {
                true => {
                    let op = self.rng.pick(&[Unary::Tanh, Unary::Relu, Unary::Neg]);
                    self.push(Op::Unary(op), &[part])?
                }
                false => part,
            };
            let mut parts = vec![whole, part];
            if self.rng.one_in(3) {
                parts.swap(0, 1);
            }
            if self.rng.one_in(4) {
                parts.push(part);
            }
            whole = self.push(Op::Concat(axis), &parts)?;
        }
        Some(whole)
    }

    /// Paddings, parts and joins of one value in a row, most of them along one axis.
    pub(super) fn edges(&mut self) -> Option<usize> {
        let mut x = self.find(|f| f.rank() > 0)?;
        let usual = self.an_axis(x)?;
        let mut before = x;
        for _ in 0..2 + self.rng.below(3) {
            let axis = match self.rng.one_in(4) {
                true => self.an_axis(x)?,
                false => usual,
            };
            let least = self.fact(x).dims[axis].least();
            let next = match self.rng.below(8) {
                0..=2 => {
                    let mut pads = vec![(0, 0); self.fact(x).rank()];
                    pads[axis] = (self.rng.below(3), self.rng.below(3));
                    let value = self.rng.pick(&[0.0, 0.0, 1.0]);
                    self.push(Op::Pad { pads, value }, &[x])
                }
                3 | 4 => {
                    let start = self.rng.below(least + 1).min(self.rng.below(least + 1));
                    let end = self
                        .rng
                        .one_in(2)
                        .then(|| start + self.rng.below(least - start + 1));
                    let step = 1 + self.rng.below(5) / 3;
                    self.push(
                        Op::Slice {
                            axis,
                            start,
                            end,
                            step,
                        },
                        &[x],
                    )
                }
                5 => self.push(Op::Concat(axis), &[x, before]),
                6 => self.call(Method::Flip(vec![axis]), &[x]),
                _ if float(self.fact(x)) => self.rectified(x),
                _ => Some(x),
            };
            if let Some(next) = next {
                (before, x) = (x, next);
            }
        }
        Some(x)
    }

    /// Two parts of one value, and what they make together: differences of neighbours, columns.
    pub(super) fn parts(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0 && f.dtype != DType::Bool)?;
        let axis = self.an_axis(x)?;
        let least = self.fact(x).dims[axis].least();
        let count = self.rng.below(least) + 1;
        let mut parts = Vec::new();
        for _ in 0..2 {
            let start = self.rng.below((least + 1).checked_sub(count)?);
            let slice = Op::Slice {
                axis,
                start,
                end: Some(start + count),
                step: 1,
            };
            let mut part = self.push(slice, &[x])?;
            if count == 1 && self.rng.one_in(2) {
                part = self.push(Op::Squeeze(axis), &[part])?;
            }
            parts.push(part);
        }
        let op = self.rng.pick(&[
            Binary::Sub,
            Binary::Mul,
            Binary::Maximum,
            Binary::Add,
            Binary::Lt,
        ]);
        self.push(Op::Binary(op), &[parts[0], parts[1]])
    }

    /// A product of operands of which any may be transposed, and perhaps an epilogue.
    pub(super) fn turned(&mut self) -> Option<usize> {
        let a = self.find(|f| float(f) && f.rank() > 1)?;
        let turn = [self.rng.one_in(2), self.rng.one_in(2)];
        let (dtype, dims) = (self.fact(a).dtype, self.fact(a).dims.clone());
        let rank = dims.len();
        let k = dims[rank - 1 - usize::from(turn[0])];
        let at = |f: &Fact| f.dims[f.rank() - 2 + usize::from(turn[1])];
        let fits = |f: &Fact| f.dtype == dtype && f.rank() > 1 && f.rank() <= rank && at(f) == k;
        let b = match self.find(fits).filter(|_| self.rng.one_in(2)) {
            Some(b) => b,
            None => {
                let named = !self.scope.case.dims.is_empty() && self.rng.one_in(3);
                let n = match named {
                    true => Axis::Named(0),
                    false => Axis::Fixed(self.rng.pick(&self.lengths)),
                };
                let mut shape = vec![self.axis(k)?, n];
                if turn[1] {
                    shape.swap(0, 1);
                }
                self.input(dtype, shape)?
            }
        };
        let mut args = [a, b];
        for (arg, turn) in args.iter_mut().zip(turn) {
            if turn {
                *arg = self.push(Op::T, &[*arg])?;
            }
        }
        let product = self.push(Op::Matmul, &args)?;
        if self.rng.one_in(2) {
            return Some(product);
        }
        let n: Vec<Len> = self
            .fact(product)
            .dims
            .last()
            .copied()
            .into_iter()
            .collect();
        let bias = self.of_shape(&n)?;
        let sum = self.push(Op::Binary(Binary::Add), &[product, bias])?;
        let op = self.rng.pick(&[Unary::Relu, Unary::Tanh, Unary::Gelu]);
        self.push(Op::Unary(op), &[sum])
    }

    /// Elements at computed places, and a statement of them: the length is known in the run only.
    pub(super) fn computed(&mut self) -> Option<usize> {
        if self.found >= 3 {
            return None;
        }
        self.found += 1;
        let x = self.find(|f| single(f) && f.rank() > 0)?;
        let dims = self.fact(x).dims.clone();
        let mask = self.mask(&dims[..1])?;
        let chosen = match self.rng.below(3) {
            0 => {
                let places = self.push(Op::Nonzero, &[mask])?;
                let places = self.push(Op::Squeeze(1), &[places])?;
                self.push(Op::IndexSelect(0), &[x, places])?
            }
            1 => {
                let labels = self.push(Op::Cast(DType::I32), &[mask])?;
                let places = self.push(Op::Unique, &[labels])?;
                self.push(Op::OneHot(2), &[places])?
            }
            _ => self.push(Op::Compress(0), &[x, mask])?,
        };
        let last = self.fact(chosen).rank() - 1;
        let op = match self.rng.below(6) {
            0 if last > 0 => {
                let turned = self.push(Op::T, &[chosen])?;
                return self.push(Op::Matmul, &[turned, chosen]);
            }
            1 if last > 0 => Op::Softmax(last),
            2 => Op::Fold {
                fold: Fold::Sum,
                axes: Some(vec![0]),
                keep: self.rng.one_in(2),
            },
            3 => Op::CumSum(0),
            4 => Op::Pad {
                pads: (0..=last).map(|i| (usize::from(i == 0), 1)).collect(),
                value: 1.0,
            },
            _ => Op::Concat(0),
        };
        let done = self.push(op, &[chosen]).unwrap_or(chosen);
        if self.fact(done).dims != self.fact(chosen).dims || self.rng.one_in(2) {
            return Some(done);
        }
        self.push(Op::Concat(0), &[done, chosen])
    }
}
