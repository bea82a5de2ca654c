//! Random graphs: of every kind of operation and every type, with a bounded batch, whose values
//! stay near 1.
//!
//! Two implementations that round differently still agree closely, because discontinuous operations
//! (comparisons, rounding, positions) are applied only to values without rounding.

mod custom;
mod scan;
mod structural;
mod writes;

use slabwise::params::Init;
use slabwise::shape::{Dims, Env, Extent, Size, Symbols, elements};
use slabwise_compiler::graph::Graph;
use slabwise_compiler::ops::{GraphBuilder, NodeId, Op};
use slabwise_compiler::passes::autodiff::gradients;
use slabwise_compiler::reference::Array;
use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{Class, ScalarOp};
use slabwise_kernels::spec::ReduceOp;

use super::{Rng, array, graph, input, variable};

/// The largest batch of a random graph.
pub const BATCH: u32 = 4;
/// Elements of the largest value, at the largest batch.
const LARGEST: i64 = 400;
/// The largest magnitude a float may have.
const BOUND: f64 = 8.0;
/// Integer inputs lie in `0..LIMIT`.
const LIMIT: usize = 3;

/// A graph, and how to run it.
pub struct RandomGraph {
    pub graph: Graph,
    seed: u64,
}

impl RandomGraph {
    /// The graph of a seed: about `size` steps, each of one operation or of a few related ones.
    pub fn new(seed: u64, size: usize) -> RandomGraph {
        RandomGraph::made(seed, size, false)
    }

    /// The same where lengths of 0 and 1 are as likely as others: of inputs, parameters, slices and
    /// repeated values.
    pub fn short(seed: u64, size: usize) -> RandomGraph {
        RandomGraph::made(seed, size, true)
    }

    fn made(seed: u64, size: usize, short: bool) -> RandomGraph {
        let mut maker = Maker::new(Rng(seed.wrapping_mul(0x5851_F42D_4C95_7F2D)), short);
        for _ in 0..size {
            maker.step();
        }
        RandomGraph {
            graph: maker.finish(),
            seed,
        }
    }

    /// The lengths of a run.
    pub fn env(&self, batch: u32) -> Env {
        assert!(batch <= BATCH);
        let mut env = self.graph.symbols.bounds();
        env.0[0] = batch;
        env
    }

    /// Makes the batch, which is the first symbol, an unbounded dimension.
    pub fn free_batch(&mut self) {
        let mut symbols = Symbols::default();
        for (symbol, name, extent) in self.graph.symbols.iter() {
            let made = match extent {
                Extent::DataDependent(most) => symbols.data_dependent(most),
                _ => symbols.intern(name, Extent::Unbounded(1)),
            };
            assert_eq!(made, Ok(symbol));
        }
        self.graph.symbols = symbols;
    }

    /// Inputs and variables for a run.
    pub fn arguments(&self, env: &Env) -> (Vec<Array>, Vec<Array>) {
        let mut rng = Rng(self.seed);
        let mut draw = |dtype: DType, dims: &Dims| {
            let lengths: Vec<usize> = dims.iter().map(|d| d.usize_at(env)).collect();
            let mut drawn = array(&mut rng, dtype, &lengths, (-2.0, 2.0), LIMIT);
            if dtype.is_float() {
                // Contains zeros and equal numbers.
                drawn
                    .values
                    .iter_mut()
                    .filter(|v| v.abs() < 0.8)
                    .for_each(|v| *v = (*v * 4.0).round() / 4.0 + 0.0);
            }
            drawn
        };
        let inputs = self
            .graph
            .inputs
            .iter()
            .map(|i| draw(i.dtype, &i.dims))
            .collect();
        let variables = self
            .graph
            .variables
            .iter()
            .map(|v| draw(v.dtype, &v.dims))
            .collect();
        (inputs, variables)
    }
}

/// Facts about a node.
#[derive(Clone, Copy)]
struct Known {
    /// The largest magnitude.
    bound: f64,
    /// Whether every correct implementation computes the same bits.
    exact: bool,
}

struct Maker {
    g: Graph,
    rng: Rng,
    /// Facts about the nodes that further steps may use.
    known: Vec<(NodeId, Known)>,
    streams: u32,
    state: NodeId,
    /// Whether lengths of 0 and 1 are as likely as others.
    short: bool,
}

impl Maker {
    fn new(mut rng: Rng, short: bool) -> Maker {
        let mut g = graph();
        let batch = Size::symbol(
            g.symbols
                .intern("batch", Extent::Bounded(BATCH))
                .expect("the first symbol"),
        );
        let n = |n: i64| Size::fixed(n);
        let shapes: [(DType, Dims); 9] = [
            (DType::F32, Dims::from_slice(&[batch, n(3), n(4)])),
            (DType::F32, Dims::from_slice(&[batch, n(4)])),
            (DType::F32, Dims::from_slice(&[batch, n(2), n(6), n(5)])),
            (DType::F16, Dims::from_slice(&[batch, n(3), n(4)])),
            (DType::BF16, Dims::from_slice(&[batch, n(4)])),
            (DType::I32, Dims::from_slice(&[batch, n(4)])),
            (DType::U8, Dims::from_slice(&[batch, n(3), n(4)])),
            (DType::Bool, Dims::from_slice(&[batch, n(4)])),
            (DType::U8, Dims::from_slice(&[batch, n(4)])),
        ];
        let mut drawn = |dims: &Dims| -> Dims {
            let cut = |d: &Size, rng: &mut Rng| {
                if d.as_fixed().is_some() {
                    *rng.pick(&[d, &Size::ZERO, &Size::ONE, d])
                } else {
                    *d
                }
            };
            if short {
                dims.iter().map(|d| cut(d, &mut rng)).collect()
            } else {
                dims.clone()
            }
        };
        let mut inputs: Vec<NodeId> = shapes
            .iter()
            .map(|(dtype, dims)| input(&mut g, *dtype, &drawn(dims)))
            .collect();
        for lengths in [&[4, 3][..], &[2, 2, 3, 2], &[4], &[]] {
            inputs.push(variable(
                &mut g,
                DType::F32,
                &drawn(&super::dims(lengths)),
                Init::Uniform {
                    low: -1.0,
                    high: 1.0,
                },
            ));
        }
        let state = variable(&mut g, DType::I32, &super::dims(&[3]), Init::RandomState);
        let known = inputs
            .into_iter()
            .map(|id| {
                (
                    id,
                    Known {
                        bound: 3.0,
                        exact: true,
                    },
                )
            })
            .collect();
        Maker {
            g,
            rng,
            known,
            streams: 0,
            state,
            short,
        }
    }

    fn of(&self, id: NodeId) -> Known {
        self.known.iter().rev().find(|(k, _)| *k == id).map_or(
            Known {
                bound: BOUND,
                exact: false,
            },
            |(_, known)| *known,
        )
    }

    /// Lets further steps use a node; a float that may be large is scaled down first.
    fn keep(&mut self, id: NodeId, bound: f64, exact: bool) {
        let points = elements(self.g.dims(id)).and_then(|n| n.checked_at(&self.g.symbols.bounds()));
        if points.is_none_or(|n| n > LARGEST) || !bound.is_finite() {
            return;
        }
        if self.g.dtype(id).is_float() && bound > BOUND {
            let scaled = self.scaled(id, 2.0 / bound);
            self.known.push((
                scaled,
                Known {
                    bound: 2.0,
                    exact: false,
                },
            ));
        } else {
            self.known.push((id, Known { bound, exact }));
        }
    }

    fn scaled(&mut self, id: NodeId, factor: f64) -> NodeId {
        let dims = self.g.dims(id).clone();
        let factor = self.g.full(factor as f32, DType::F32, &dims);
        self.g.mul(id, factor)
    }

    /// A node that satisfies `fits`; later ones are likelier, so that graphs grow deep.
    fn find(&mut self, fits: impl Fn(&Graph, NodeId, Known) -> bool) -> Option<NodeId> {
        let list: Vec<NodeId> = self
            .known
            .iter()
            .filter(|(id, known)| fits(&self.g, *id, *known))
            .map(|(id, _)| *id)
            .collect();
        let late = self
            .rng
            .below(list.len().max(1))
            .max(self.rng.below(list.len().max(1)));
        list.get(late).copied()
    }

    fn any(&mut self) -> Option<NodeId> {
        self.find(|_, _, _| true)
    }

    fn float(&mut self) -> Option<NodeId> {
        self.find(|g, id, _| g.dtype(id).is_float())
    }

    /// One step; a step without suitable operands leaves the graph unchanged.
    fn step(&mut self) -> Option<()> {
        match self.rng.below(31) {
            0..=4 => self.scalar(),
            5 => self.cast(),
            6 => self.reduce(),
            7 => self.matmul(),
            8 => self.conv2d(),
            9 => self.pool2d(),
            10 => self.gather(),
            11 => self.scatter(),
            12 => self.reshape(),
            13 => self.permute(),
            14 => self.expand(),
            15 => self.slice(),
            16 => self.concat(),
            17 => self.pad(),
            18 => self.random(),
            19 => self.gradient(),
            20 => self.redundant(),
            21 => self.select(),
            22 => self.order(),
            23 => self.suppress(),
            24 => self.assign_part(),
            25 => self.prefix_reduce(),
            26 => self.scan(),
            27 => self.attention(),
            28 => self.quantized(),
            29 => self.custom(),
            _ => self.effect(),
        }
    }

    /// Another node of the same shape whose lane is `lane`, or a constant.
    fn partner(&mut self, dims: &Dims, lane: Lane, exact: bool) -> (NodeId, Known) {
        let found = self.find(|g, id, known| {
            g.dims(id) == dims && g.dtype(id).lane() == lane && (known.exact || !exact)
        });
        if let Some(id) = found.filter(|_| !self.rng.one_in(4)) {
            return (id, self.of(id));
        }
        let number = self.rng.pick(&[0.0, 1.0, 2.0, -1.0, 0.5, 3.0]);
        let dtype = match lane {
            Lane::F32 => DType::F32,
            Lane::I32 => DType::I32,
            Lane::Bool => DType::Bool,
        };
        if lane == Lane::I32 && self.rng.one_in(3) {
            // The length of the batch as a node.
            let batch = Size::symbol(self.g.symbols.find("batch").expect("made at the start"));
            let size = self.g.emit(Op::Size(batch), &[], DType::I32, Dims::new());
            return (
                self.g.broadcast(size, dims),
                Known {
                    bound: f64::from(BATCH),
                    exact: true,
                },
            );
        }
        (
            self.g.full(number, dtype, dims),
            Known {
                bound: f64::from(number).abs(),
                exact: true,
            },
        )
    }

    fn scalar(&mut self) -> Option<()> {
        let op = self.rng.pick(ScalarOp::ALL);
        let jumps = op.class() == Class::Compare
            || matches!(
                op,
                ScalarOp::Floor
                    | ScalarOp::Ceil
                    | ScalarOp::Round
                    | ScalarOp::Sign
                    | ScalarOp::Fmod
            );
        let lanes: &[Lane] = match op.class() {
            Class::Float => &[Lane::F32],
            // Powers of integers wrap, so that they have no small bound.
            Class::Num if op == ScalarOp::Pow => &[Lane::F32],
            Class::Int => &[Lane::I32],
            Class::Num => &[Lane::F32, Lane::F32, Lane::I32],
            Class::Compare | Class::Select => &[Lane::F32, Lane::I32, Lane::Bool],
            Class::Logic => &[Lane::Bool],
        };
        let lane = self.rng.pick(lanes);
        let first =
            self.find(|g, id, known| g.dtype(id).lane() == lane && (known.exact || !jumps))?;
        let dims = self.g.dims(first).clone();
        let mut args = vec![(first, self.of(first))];
        while args.len() < op.arity() {
            args.push(self.partner(&dims, lane, jumps));
        }
        if op.class() == Class::Select {
            args[0] = self.partner(&dims, Lane::Bool, false);
        }
        self.bring_into_domain(op, lane, &mut args);
        let ids: Vec<NodeId> = args.iter().map(|(id, _)| *id).collect();
        let node = self.g.scalar(op, &ids);
        let (x, y) = (args[0].1.bound, args.get(1).map_or(0.0, |a| a.1.bound));
        let bound = match op {
            ScalarOp::Add | ScalarOp::Sub => x + y,
            ScalarOp::Mul => x * y,
            // Divisors and bases of powers are 0.5 at least, exponents 2 at most.
            ScalarOp::Div => 2.0 * x,
            ScalarOp::Recip | ScalarOp::Rsqrt => 2.0,
            ScalarOp::Pow => x.powi(2).max(4.0),
            ScalarOp::Exp
            | ScalarOp::Exp2
            | ScalarOp::Expm1
            | ScalarOp::Sinh
            | ScalarOp::Cosh
            | ScalarOp::Tan => x.exp(),
            ScalarOp::Atan2 => 3.2,
            // Of 0.5 at least, and of orders up to 2.
            ScalarOp::Lgamma => 1.0 + x * (1.0 + x).ln(),
            ScalarOp::Polygamma => y.max(17.0),
            // The bits of both, and of −1, which has all.
            ScalarOp::BitAnd | ScalarOp::BitOr | ScalarOp::BitXor => {
                2.0 * x.max(y).max(1.0).log2().ceil().exp2()
            }
            // By at most 3 bits.
            ScalarOp::ShiftLeft => 8.0 * x,
            ScalarOp::Select => y.max(args[2].1.bound),
            _ => x.max(y).max(1.0),
        };
        let kept = [
            ScalarOp::Neg,
            ScalarOp::Abs,
            ScalarOp::Min,
            ScalarOp::Max,
            ScalarOp::Relu,
            ScalarOp::Select,
        ];
        let exact =
            args.iter().all(|(_, k)| k.exact) && (lane != Lane::F32 || jumps || kept.contains(&op));
        self.keep(node, bound, exact);
        Some(())
    }

    /// Maps arguments to a range where an operation is defined and not steep.
    fn bring_into_domain(&mut self, op: ScalarOp, lane: Lane, args: &mut [(NodeId, Known)]) {
        if let ScalarOp::ShiftLeft | ScalarOp::Fmod = op {
            // A remainder by 0 is NaN.
            let by = self.rng.pick(&[1.0, 2.0, 3.0]);
            let dims = self.g.dims(args[0].0).clone();
            let constant = self.g.full(by, lane.stored(), &dims);
            let known = Known {
                bound: f64::from(by),
                exact: true,
            };
            args[1] = (constant, known);
        }
        if lane != Lane::F32 {
            return;
        }
        if op == ScalarOp::Polygamma {
            let order = self.rng.pick(&[0.0, 1.0, 2.0]);
            let dims = self.g.dims(args[0].0).clone();
            let known = Known {
                bound: 2.0,
                exact: true,
            };
            args[0] = (self.g.full(order, DType::F32, &dims), known);
        }
        let positive = match op {
            ScalarOp::Lgamma
            | ScalarOp::Ln
            | ScalarOp::Log2
            | ScalarOp::Log10
            | ScalarOp::Log1p
            | ScalarOp::Sqrt
            | ScalarOp::Rsqrt
            | ScalarOp::Recip
            | ScalarOp::Pow => 0,
            ScalarOp::Div | ScalarOp::Atan2 | ScalarOp::Polygamma => 1,
            ScalarOp::Exp
            | ScalarOp::Exp2
            | ScalarOp::Expm1
            | ScalarOp::Sinh
            | ScalarOp::Cosh
            | ScalarOp::Tan => {
                // The pole of the tangent is at 1.57.
                let most = if op == ScalarOp::Tan { 1.0 } else { 2.0 };
                let (id, Known { bound, .. }) = args[0];
                if bound > most {
                    let scaled = Known {
                        bound: most,
                        exact: false,
                    };
                    args[0] = (self.scaled(id, most / bound), scaled);
                }
                return;
            }
            _ => return,
        };
        let (id, known) = args[positive];
        let dims = self.g.dims(id).clone();
        let size = self.g.scalar(ScalarOp::Abs, &[id]);
        let half = self.g.full(0.5, DType::F32, &dims);
        args[positive] = (
            self.g.add(size, half),
            Known {
                bound: known.bound + 0.5,
                exact: false,
            },
        );
        if op == ScalarOp::Pow {
            let exponent = self.rng.pick(&[0.0, 0.5, 1.0, 2.0, -1.0]);
            args[1] = (
                self.g.full(exponent, DType::F32, &dims),
                Known {
                    bound: 2.0,
                    exact: true,
                },
            );
        }
    }

    fn cast(&mut self) -> Option<()> {
        let to = self.rng.pick(&DType::ALL);
        // Rounding to a half is discontinuous, and the largest f16 is 65,504.
        let fits = |to: DType, known: &Known| {
            (known.exact || to == DType::F32) && (to != DType::F16 || known.bound < 1e4)
        };
        let from = self.find(|g, id, known| g.dtype(id) != to && fits(to, &known))?;
        let Known { bound, exact } = self.of(from);
        let bound = if self.g.dtype(from) == DType::I32 && !to.is_float() {
            bound.max(255.0)
        } else {
            bound
        };
        let node = self.g.cast(from, to);
        self.keep(node, bound, exact);
        // Casts to another type and back.
        if self.rng.one_in(2) {
            let back = self.rng.pick(&DType::ALL);
            if !fits(
                back,
                &Known {
                    bound: bound.max(255.0),
                    exact,
                },
            ) {
                return Some(());
            }
            let node = self.g.cast(node, back);
            self.keep(node, bound.max(1.0), exact);
        }
        Some(())
    }

    fn some_axes(&mut self, rank: usize) -> Vec<usize> {
        (0..rank).filter(|_| self.rng.one_in(2)).collect()
    }

    fn reduce(&mut self) -> Option<()> {
        use ReduceOp as R;
        let op = self.rng.pick(&[
            R::Sum,
            R::Sum,
            R::Prod,
            R::Max,
            R::Min,
            R::Any,
            R::All,
            R::ArgMax,
            R::ArgMin,
        ]);
        let logic = matches!(op, R::Any | R::All);
        let jumps = matches!(op, R::ArgMax | R::ArgMin);
        let types = if logic {
            &[DType::Bool][..]
        } else {
            &[DType::F32, DType::F16, DType::BF16, DType::I32]
        };
        let x =
            self.find(|g, id, known| types.contains(&g.dtype(id)) && (known.exact || !jumps))?;
        let mut axes = self.some_axes(self.g.dims(x).len());
        // No elements have no maximum; such reductions are refused before there is a graph.
        let identity = matches!(op, R::Sum | R::Prod | R::Any | R::All);
        axes.retain(|&axis| {
            identity || self.g.dims(x)[axis].as_fixed().is_some_and(|n| n > 0) || !self.short
        });
        let Known { bound, exact } = self.of(x);
        let mut node = self.g.reduce(op, x, &axes);
        // A reduction of a reduction.
        if self.rng.one_in(3) && !jumps {
            let mut more = self.some_axes(self.g.dims(node).len());
            more.retain(|&axis| {
                identity || self.g.dims(node)[axis].as_fixed().is_some_and(|n| n > 0) || !self.short
            });
            node = self.g.reduce(op, node, &more);
        }
        let points =
            |g: &Graph, id| elements(g.dims(id)).map_or(0, |n| n.at(&g.symbols.bounds())) as f64;
        let count = points(&self.g, x) / points(&self.g, node).max(1.0);
        let bound = match op {
            R::Sum => bound * count,
            R::Prod => bound.max(1.0).powf(count),
            _ => bound.max(count),
        };
        let exact = exact && (!matches!(op, R::Sum | R::Prod) || self.g.dtype(x) == DType::I32);
        // A longer product is most likely 0 or infinite.
        if bound < 1e9 {
            self.keep(node, bound, exact);
        }
        Some(())
    }

    fn random(&mut self) -> Option<()> {
        let like = self.any()?;
        let dims = self.g.dims(like).clone();
        let strides = (0..dims.len())
            .map(|i| Size::fixed(7 * i as i64 + 1))
            .collect();
        let index = self
            .g
            .emit(Op::Index(strides), &[], DType::I32, dims.clone());
        let node = self.g.emit(
            Op::Uniform {
                stream: self.streams,
            },
            &[self.state, index],
            DType::F32,
            dims,
        );
        // Sometimes reuses a stream, and so its numbers.
        self.streams += u32::from(!self.rng.one_in(3));
        self.keep(node, 1.0, true);
        Some(())
    }

    /// The gradient of the sum of a node with respect to some others.
    fn differentiate(&mut self, loss: NodeId, wrt: &[NodeId]) {
        for slope in gradients(&mut self.g, loss, wrt).into_iter().flatten() {
            // Gradients have no known bound, so that they are mapped into one.
            let tamed = self.g.scalar(ScalarOp::Tanh, &[slope]);
            self.keep(tamed, 1.0, false);
        }
    }

    fn gradient(&mut self) -> Option<()> {
        let loss = self.float()?;
        let leaves: Vec<NodeId> = self
            .g
            .ids()
            .filter(|id| matches!(self.g.node(*id).op, Op::Input(_) | Op::Variable(_)))
            .collect();
        self.differentiate(loss, &leaves);
        Some(())
    }

    /// A redundant expression that a person might write and a simplifier removes.
    fn redundant(&mut self) -> Option<()> {
        let x = self.float()?;
        let dims = self.g.dims(x).clone();
        let Known { bound, exact } = self.of(x);
        let node = match self.rng.below(8) {
            0 => {
                let zero = self.g.full(0.0, DType::F32, &dims);
                self.g.add(zero, x)
            }
            1 => {
                let one = self.g.full(1.0, DType::F32, &dims);
                self.g.mul(x, one)
            }
            2 => {
                let once = self.g.scalar(ScalarOp::Neg, &[x]);
                self.g.scalar(ScalarOp::Neg, &[once])
            }
            3 => self.g.emit(Op::Copy, &[x], self.g.dtype(x), dims),
            4 => {
                let back = self.g.scalar(ScalarOp::Neg, &[x]);
                let zero = self.g.full(0.0, DType::F32, &dims);
                let less = self.g.add(zero, back);
                self.g.scalar(ScalarOp::Abs, &[less])
            }
            5 => {
                let four = self.g.full(4.0, DType::F32, &dims);
                self.g.scalar(ScalarOp::Div, &[x, four])
            }
            6 => {
                let size = self.g.scalar(ScalarOp::Tanh, &[x]);
                let again = self.g.scalar(ScalarOp::Tanh, &[x]);
                self.g.scalar(ScalarOp::Max, &[size, again])
            }
            _ => {
                let (condition, _) = self.partner(&dims, Lane::Bool, true);
                let not = self.g.scalar(ScalarOp::Not, &[condition]);
                let negative = self.g.scalar(ScalarOp::Neg, &[x]);
                let inner = self.g.scalar(ScalarOp::Select, &[not, x, negative]);
                self.g.scalar(ScalarOp::Select, &[not, inner, x])
            }
        };
        self.keep(
            node,
            bound.max(1.0),
            exact
                && !matches!(
                    self.g.node(node).op,
                    Op::Scalar(ScalarOp::Div | ScalarOp::Max)
                ),
        );
        Some(())
    }

    /// Assigns a value to a variable that has no assignment yet.
    fn effect(&mut self) -> Option<()> {
        let x = self.find(|g, id, _| g.dims(id).iter().all(|d| d.as_fixed().is_some()))?;
        let (dtype, dims) = (self.g.dtype(x), self.g.dims(x).clone());
        variable(&mut self.g, dtype, &dims, Init::Constant(0.0));
        let at = self.g.variables.len() as u32 - 1;
        self.g.emit(Op::Assign(at), &[x], dtype, dims);
        Some(())
    }

    /// The outputs: some random nodes, and all unused ones.
    fn finish(mut self) -> Graph {
        let consumers = self.g.consumers();
        let mut outputs: Vec<NodeId> = Vec::new();
        for (id, _) in self.known.clone() {
            if consumers[id.at()].is_empty() || self.rng.one_in(8) {
                outputs.push(id);
            }
        }
        self.g.outputs = outputs;
        self.g
    }
}
