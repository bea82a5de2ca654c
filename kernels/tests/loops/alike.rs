//! Loops with only some of the stores of others: wherever [`has_same_sums`] is true, the stores of
//! both have the same bits.

use slabwise_kernels::cpu::{Config, Isa, Kernel, Team, has_same_sums};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::{Env, Size, Symbol};
use slabwise_kernels::spec::{ReduceOp, Spec, ValueId};

use crate::builder::Builder;
use crate::support::{Bytes, Choices};

/// The definition of a value.
enum Source {
    /// A tensor with these strides.
    Load(Vec<i64>),
    Op(ScalarOp, usize, usize),
    Fold(ReduceOp, usize),
}

/// A program from which kernels with all or some of its stores are built.
struct Recipe {
    dims: Vec<i64>,
    reduced: usize,
    values: Vec<Source>,
    /// A value, and the strides of the operand it is stored to.
    stores: Vec<(usize, Vec<i64>)>,
}

/// Axes in any order.
fn shuffled(c: &mut Choices, axes: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..axes).collect();
    (1..axes).rev().for_each(|i| order.swap(i, c.below(i + 1)));
    order
}

/// Strides of a tensor that repeats along some axes, the others in the order that most tensors have
/// or in another one, now and then with a gap.
fn strides(c: &mut Choices, dims: &[i64], usual: &[usize], repeats: &[bool]) -> Vec<i64> {
    let order = if c.once_in(3) {
        shuffled(c, dims.len())
    } else {
        usual.to_vec()
    };
    let mut strides = vec![0; dims.len()];
    let mut next = 1;
    for &axis in order.iter().rev().filter(|&&axis| !repeats[axis]) {
        strides[axis] = next;
        next = next * dims[axis] + i64::from(c.once_in(8));
    }
    strides
}

impl Recipe {
    /// A few tensors, sums of values computed from them (once in a while from another sum), and
    /// stores of some values.
    fn random(c: &mut Choices) -> Recipe {
        let (dims, reduced) = loop {
            let (kept, reduced) = (1 + c.below(3), 1 + c.below(3));
            let few = c.once_in(2);
            let sizes = |c: &mut Choices, from: &[i64], axes: usize| {
                (0..axes).map(|_| *c.pick(from)).collect::<Vec<i64>>()
            };
            let mut dims = sizes(
                c,
                if few {
                    &[1, 2, 3, 5]
                } else {
                    &[2, 3, 7, 16, 40, 70, 300]
                },
                kept,
            );
            dims.extend(sizes(
                c,
                if few {
                    &[2, 9, 16, 64, 300, 1100, 5000]
                } else {
                    &[1, 2, 7, 16, 33, 64, 130]
                },
                reduced,
            ));
            if (2_000..150_000).contains(&dims.iter().product::<i64>()) {
                break (dims, reduced);
            }
        };
        let (axes, kept) = (dims.len(), dims.len() - reduced);
        // Row-major, with the kept axes innermost, or in any order.
        let usual = match c.below(3) {
            0 => (0..axes).collect(),
            1 => (kept..axes).chain(0..kept).collect(),
            _ => shuffled(c, axes),
        };
        let mut values: Vec<Source> = Vec::new();
        for _ in 0..3 + c.below(3) {
            let broadcast = c.once_in(2);
            let repeats: Vec<bool> = (0..axes).map(|_| broadcast && c.once_in(3)).collect();
            values.push(Source::Load(strides(c, &dims, &usual, &repeats)));
        }
        let loads = values.len();
        let ops = [ScalarOp::Add, ScalarOp::Sub, ScalarOp::Mul];
        for _ in 0..2 + c.below(4) {
            let numbers: Vec<usize> = (0..values.len())
                .filter(|&v| !matches!(values[v], Source::Fold(ReduceOp::ArgMax, _)))
                .collect();
            // Other values than tensors, sums among them, which are used in a later pass, now and
            // then.
            let x = if c.once_in(3) {
                *c.pick(&numbers)
            } else {
                c.below(loads)
            };
            let y = c.below(loads);
            values.push(Source::Op(*c.pick(&ops), x, y));
            if !c.once_in(3) {
                let op = if c.once_in(6) {
                    *c.pick(&[ReduceOp::Max, ReduceOp::ArgMax])
                } else {
                    ReduceOp::Sum
                };
                values.push(Source::Fold(op, values.len() - 1));
            }
        }
        values.push(Source::Fold(ReduceOp::Sum, values.len() - 1));
        let mut recipe = Recipe {
            dims,
            reduced,
            values,
            stores: Vec::new(),
        };
        for (v, varies) in recipe.varies().into_iter().enumerate() {
            let is_sum = matches!(recipe.values[v], Source::Fold(..));
            if is_sum || !matches!(recipe.values[v], Source::Load(_)) && c.once_in(2) {
                let repeats: Vec<bool> = (0..axes).map(|axis| axis >= kept && !varies).collect();
                let strides = strides(c, &recipe.dims, &usual, &repeats);
                recipe.stores.push((v, strides));
            }
        }
        recipe
    }

    /// For each value whether it varies along the reduced axes.
    fn varies(&self) -> Vec<bool> {
        let kept = self.dims.len() - self.reduced;
        let mut varies: Vec<bool> = Vec::new();
        for value in &self.values {
            varies.push(match value {
                Source::Load(strides) => strides[kept..].iter().any(|&s| s != 0),
                Source::Op(_, x, y) => varies[*x] || varies[*y],
                Source::Fold(..) => false,
            });
        }
        varies
    }

    /// The kernel with these stores and the values they need; and for each operand the value that
    /// is loaded from it, or the store.
    fn kernel(&self, stores: &[usize]) -> (Spec, Vec<Result<usize, usize>>) {
        let mut needed = vec![false; self.values.len()];
        stores.iter().for_each(|&s| needed[self.stores[s].0] = true);
        for v in (0..self.values.len()).rev() {
            match self.values[v] {
                Source::Op(_, x, y) if needed[v] => (needed[x], needed[y]) = (true, true),
                Source::Fold(_, x) if needed[v] => needed[x] = true,
                _ => {}
            }
        }
        let mut b = Builder::new(&self.dims, self.reduced);
        let mut operands = Vec::new();
        let mut made: Vec<ValueId> = vec![0; self.values.len()];
        for v in (0..self.values.len()).filter(|&v| needed[v]) {
            made[v] = match &self.values[v] {
                Source::Load(strides) => {
                    operands.push(Ok(v));
                    b.load(strides)
                }
                Source::Op(op, x, y) => b.op(*op, &[made[*x], made[*y]]),
                Source::Fold(op, x) => b.reduce(*op, made[*x]),
            };
        }
        for &s in stores {
            let (value, strides) = &self.stores[s];
            let is_position = matches!(self.values[*value], Source::Fold(ReduceOp::ArgMax, _));
            let operand = b.typed(if is_position { DType::I32 } else { DType::F32 }, strides);
            b.store(made[*value], operand);
            operands.push(Err(s));
        }
        (b.spec, operands)
    }

    /// The results of these stores, from the same tensors every time.
    fn run(&self, stores: &[usize], isa: Isa, team: &Team) -> Vec<Vec<u32>> {
        let (spec, operands) = self.kernel(stores);
        let mut bytes = Bytes::new();
        for ((operand, space, _), source) in spec.arguments().iter().zip(&operands) {
            let elements = operand.extent(space, &Env::default()) as usize;
            let mut c = Choices::new(source.map_or(0, |v| v as u32 + 1));
            bytes.push_f32(
                &(0..elements)
                    .map(|_| if source.is_ok() { c.unit() } else { 0.0 })
                    .collect::<Vec<_>>(),
            );
        }
        let kernel = Kernel::new(
            spec,
            &Env::default(),
            &Config {
                threads: team.threads(),
                isa,
            },
        )
        .expect("a valid spec");
        bytes.run(&kernel, &Env::default(), team);
        let bits = |k: usize| bytes.f32s(k).iter().map(|x| x.to_bits()).collect();
        (0..operands.len())
            .filter(|&k| operands[k].is_err())
            .map(bits)
            .collect()
    }

    /// Whether the kernel with all stores, run by one team, and that with some of them, run by
    /// another, write the same bits to those.
    fn same_bits(&self, some: &[usize], isa: Isa, [one, other]: [&Team; 2]) -> bool {
        let all: Vec<usize> = (0..self.stores.len()).collect();
        let (whole, part) = (self.run(&all, isa, one), self.run(some, isa, other));
        some.iter().zip(&part).all(|(&s, bits)| whole[s] == *bits)
    }
}

fn alike(a: &Spec, b: &Spec) -> Option<bool> {
    let config = Config {
        threads: 2,
        isa: Isa::Portable,
    };
    let alike = has_same_sums(a, b, &Env::default(), &config);
    assert_eq!(alike, has_same_sums(b, a, &Env::default(), &config));
    alike
}

#[test]
fn loops_that_sum_alike_have_the_same_bits() {
    let teams = [1, 3].map(Team::new);
    let (mut same, mut other, mut differ) = (0, 0, 0);
    for seed in 0..400 {
        let mut c = Choices::new(seed);
        let recipe = Recipe::random(&mut c);
        let all: Vec<usize> = (0..recipe.stores.len()).collect();
        let some: Vec<usize> = all.iter().copied().filter(|_| c.once_in(3)).collect();
        if some.is_empty() || some.len() == all.len() {
            continue;
        }
        let is_alike =
            alike(&recipe.kernel(&all).0, &recipe.kernel(&some).0).expect("sizes are fixed");
        let isas = if is_alike {
            Isa::available()
        } else {
            vec![Isa::detect()]
        };
        for isa in isas {
            let equal = recipe.same_bits(&some, isa, [&teams[0], &teams[1]]);
            assert!(
                equal || !is_alike,
                "seed {seed}, {isa}: {:?} and {:?}",
                recipe.kernel(&all).0,
                recipe.kernel(&some).0
            );
            differ += usize::from(!equal);
        }
        (same, other) = (same + usize::from(is_alike), other + usize::from(!is_alike));
    }
    // Otherwise the test shows nothing: some pairs must be alike, and some of the others must
    // differ in bits.
    assert!(
        same >= 60 && other >= 60 && 2 * differ >= other,
        "{same} alike, {other} not, {differ} with other bits"
    );
}

/// A kernel that stores two values, of which the first is kept.
fn first_of_two(
    dims: &[i64],
    reduced: usize,
    values: Vec<Source>,
    stores: [(usize, &[i64]); 2],
) -> Recipe {
    Recipe {
        dims: dims.to_vec(),
        reduced,
        values,
        stores: stores
            .map(|(value, strides)| (value, strides.to_vec()))
            .to_vec(),
    }
}

/// The decisive properties, one at a time.
#[test]
fn some_dropped_stores_change_the_order_of_sums() {
    use Source::{Fold, Load, Op};
    let load = |strides: &[i64]| Load(strides.to_vec());
    let mul = |x, y| Op(ScalarOp::Mul, x, y);
    let sum = |x| Fold(ReduceOp::Sum, x);
    // A gradient that is uniform over an image; an activation is computed in the same kernel as its
    // sums.
    let image = [64, 1024, 8, 1];
    let values = vec![
        load(&image),
        load(&[1, 16, 0, 0]),
        mul(0, 1),
        sum(2),
        mul(0, 0),
    ];
    let norm = first_of_two(
        &[16, 48, 8, 8],
        3,
        values,
        [(3, &[1, 0, 0, 0]), (4, &image)],
    );
    // One of the tensors decides the order of iteration (the other has gaps, or it would be one
    // long row); the layout of other sums decides how many sums are computed side by side; another
    // tensor decides the length of rows; and a sum of a sum decides the number of passes, because
    // sums in parts take one pass.
    let values = vec![load(&[4200, 65, 1]), load(&[4200, 1, 65]), sum(0), sum(1)];
    let order = first_of_two(&[20, 64, 64], 2, values, [(2, &[1, 0, 0]), (3, &[1, 0, 0])]);
    let values = vec![load(&[64, 1, 256]), sum(0), mul(1, 1)];
    let side = first_of_two(
        &[4, 64, 1000],
        1,
        values,
        [(1, &[64, 1, 0]), (2, &[1, 4, 0])],
    );
    let values = vec![load(&[900, 30, 1]), load(&[30, 0, 1]), sum(0), sum(1)];
    let rows = first_of_two(&[40, 30, 30], 2, values, [(2, &[1, 0, 0]), (3, &[1, 0, 0])]);
    let values = vec![load(&[100_000, 1]), sum(0), mul(0, 1), sum(2)];
    let passes = first_of_two(&[2, 100_000], 1, values, [(1, &[1, 0]), (3, &[1, 0])]);
    let team = Team::new(2);
    for (recipe, is_alike) in [
        (norm, true),
        (order, false),
        (side, false),
        (rows, false),
        (passes, false),
    ] {
        let (whole, part) = (recipe.kernel(&[0, 1]).0, recipe.kernel(&[0]).0);
        assert_eq!(alike(&whole, &part), Some(is_alike), "{whole:?}");
        assert_eq!(
            recipe.same_bits(&[0], Isa::detect(), [&team; 2]),
            is_alike,
            "{whole:?}"
        );
    }
}

#[test]
fn nothing_is_said_where_sizes_are_not_known() {
    let kernel = |rows: Size| {
        let mut b = Builder::new(&[0, 30], 1);
        b.spec.dims[0] = rows;
        let x = b.load(&[30, 1]);
        let (sum, to) = (b.reduce(ReduceOp::Sum, x), b.operand(&[1, 0]));
        b.store(sum, to);
        b.spec
    };
    let (seven, eight, batch) = (
        kernel(Size::fixed(7)),
        kernel(Size::fixed(8)),
        kernel(Size::symbol(Symbol(0))),
    );
    assert_eq!(
        [
            alike(&seven, &seven),
            alike(&seven, &eight),
            alike(&seven, &batch)
        ],
        [Some(true), Some(false), Some(false)]
    );
    assert_eq!(alike(&batch, &batch), None);
    let nothing = kernel(Size::ZERO);
    assert_eq!(alike(&nothing, &nothing), Some(true));
    let no_kernel = Spec {
        code: vec![],
        ..seven
    };
    assert_eq!(alike(&no_kernel, &no_kernel), None);
}
