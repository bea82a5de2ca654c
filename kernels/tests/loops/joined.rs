//! Operations and sums that kernels compute together, and results in place of operands, in tiles of
//! every shape. Numbers are small integers, so that every operation and every sum is exact.

use slabwise_kernels::scalar::ScalarOp;
use slabwise_kernels::size::Env;
use slabwise_kernels::spec::{Inst, ReduceOp, ValueId};

use crate::builder::Builder;
use crate::reference;
use crate::support::{Bytes, Choices, run_all};

/// Rows, columns, and whether rows are contiguous.
const SHAPES: [(i64, i64, bool); 12] = [
    (1, 1, true),
    (3, 16, true),
    (2, 1024, true),
    (5, 1100, true),
    (70, 48, true),
    (7, 33, true),
    (90, 4, true),
    (33, 8, true),
    (20, 9, true),
    (48, 70, false),
    (1100, 5, false),
    (520, 64, false),
];

/// A program over rows and columns, and the contents of its operands.
struct Case {
    b: Builder,
    c: Choices,
    bytes: Bytes,
    dims: [i64; 2],
    full: [i64; 2],
}

impl Case {
    fn new((rows, cols, by_rows): (i64, i64, bool), reduced: usize) -> Case {
        Case {
            b: Builder::new(&[rows, cols], reduced),
            c: Choices::new((rows * 10_000 + cols) as u32),
            bytes: Bytes::new(),
            dims: [rows, cols],
            full: if by_rows { [cols, 1] } else { [1, rows] },
        }
    }

    /// The strides of an operand that varies over everything, along columns or along rows only.
    fn strides(&self, kind: usize) -> [i64; 2] {
        [self.full, [0, 1], [1, 0]][kind]
    }

    fn load(&mut self, kind: usize) -> ValueId {
        let len = [self.dims[0] * self.dims[1], self.dims[1], self.dims[0]][kind];
        let contents: Vec<f32> = (0..len).map(|_| self.c.below(9) as f32 - 4.0).collect();
        let strides = self.strides(kind);
        self.load_these(&contents, &strides)
    }

    fn load_these(&mut self, contents: &[f32], strides: &[i64]) -> ValueId {
        self.bytes.push_f32(contents);
        self.b.load(strides)
    }

    fn store(&mut self, value: ValueId, strides: &[i64], len: i64) {
        self.bytes.push_f32(&vec![0.5; len as usize]);
        let operand = self.b.operand(strides);
        self.b.store(value, operand);
    }

    /// Stores to the memory of an operand that is read.
    fn store_over(&mut self, value: ValueId, read: ValueId) {
        let Inst::Load(k) = self.b.spec.code[usize::from(read)] else {
            panic!("no load");
        };
        self.bytes.push_same(usize::from(k));
        let full = self.full;
        let operand = self.b.operand(&full);
        self.b.store(value, operand);
    }

    fn check(self, label: &str) {
        let env = Env::default();
        let expected = reference::run(&self.b.spec, &env, &self.bytes);
        for (isa, run) in run_all(&self.b.spec, &env, &env, &self.bytes) {
            let at = (0..expected.len()).find(|&i| expected[i] != run.all[i]);
            assert_eq!(at, None, "{isa}, {:?}, {label}", self.dims);
        }
    }
}

#[test]
fn sums_of_products_of_values_that_vary_along_any_axes() {
    for shape in SHAPES {
        for kinds in (0..9).map(|n| [n / 3, n % 3]) {
            let mut case = Case::new(shape, 1);
            let x = case.load(kinds[0]);
            let y = case.load(kinds[1]);
            let product = case.b.op(ScalarOp::Mul, &[x, y]);
            let sum = case.b.reduce(ReduceOp::Sum, product);
            let square = case.b.op(ScalarOp::Mul, &[x, x]);
            let squares = case.b.reduce(ReduceOp::Sum, square);
            let negated = case.b.op(ScalarOp::Neg, &[y]);
            let negations = case.b.reduce(ReduceOp::Sum, negated);
            case.store(sum, &[1, 0], shape.0);
            case.store(negations, &[1, 0], shape.0);
            case.store(squares, &[1, 0], shape.0);
            case.check(&format!("factors {kinds:?}"));
        }
    }
}

#[test]
fn sums_of_products_and_summands_that_vary_along_any_axes() {
    for shape in SHAPES {
        for kinds in (0..27).map(|n| [n / 9, n / 3 % 3, n % 3]) {
            let mut case = Case::new(shape, 1);
            let [x, y, z] = kinds.map(|kind| case.load(kind));
            let product = case.b.op(ScalarOp::Mul, &[x, y]);
            let shifted = case.b.op(ScalarOp::Add, &[product, z]);
            let square = case.b.op(ScalarOp::Mul, &[y, y]);
            let other = case.b.op(ScalarOp::Add, &[x, square]);
            for value in [shifted, other] {
                let sum = case.b.reduce(ReduceOp::Sum, value);
                case.store(sum, &[1, 0], shape.0);
            }
            case.check(&format!("factors and summand {kinds:?}"));
        }
    }
}

#[test]
fn products_that_are_summed_and_needed_otherwise() {
    for shape in SHAPES {
        let mut case = Case::new(shape, 1);
        let (x, y) = (case.load(0), case.load(2));
        let product = case.b.op(ScalarOp::Mul, &[x, y]);
        let sum = case.b.reduce(ReduceOp::Sum, product);
        let centred = case.b.op(ScalarOp::Sub, &[product, sum]);
        let full = case.full;
        case.store(centred, &full, shape.0 * shape.1);
        case.check("centred products");
    }
}

/// A batch norm's relu and its gradient: both written over the operands that they are computed
/// from, over the other's operand, or apart.
#[test]
fn joined_operations_in_place() {
    for shape in SHAPES {
        for reduced in 0..2 {
            for places in 0..6 {
                let mut case = Case::new(shape, reduced);
                let (x, dy) = (case.load(0), case.load(0));
                let (scale, bias) = (case.load(2), case.load(1));
                let zero = case.b.number(0.0);
                let scaled = case.b.op(ScalarOp::Mul, &[x, scale]);
                let shifted = case.b.op(ScalarOp::Add, &[bias, scaled]);
                let relu = case.b.op(ScalarOp::Relu, &[shifted]);
                let off = case.b.op(ScalarOp::Le, &[relu, zero]);
                let gradient = case.b.op(ScalarOp::Select, &[off, zero, dy]);
                let back = case.b.op(ScalarOp::Mul, &[gradient, scale]);
                if reduced == 1 {
                    let product = case.b.op(ScalarOp::Mul, &[gradient, x]);
                    for value in [gradient, product] {
                        let sum = case.b.reduce(ReduceOp::Sum, value);
                        case.store(sum, &[1, 0], shape.0);
                    }
                }
                let full = case.full;
                let apart = |case: &mut Case, value| {
                    case.store(value, &full, shape.0 * shape.1);
                };
                let over = |case: &mut Case, value, read| case.store_over(value, read);
                match places {
                    0 => {
                        over(&mut case, relu, x);
                        over(&mut case, back, dy);
                    }
                    1 => {
                        over(&mut case, relu, dy);
                        over(&mut case, back, x);
                    }
                    2 => {
                        apart(&mut case, relu);
                        over(&mut case, back, dy);
                    }
                    3 => {
                        apart(&mut case, relu);
                        over(&mut case, back, x);
                    }
                    4 => {
                        over(&mut case, relu, dy);
                        apart(&mut case, back);
                    }
                    _ => {
                        apart(&mut case, dy);
                        over(&mut case, relu, x);
                        over(&mut case, back, dy);
                    }
                }
                case.check(&format!("{reduced} reduced, places {places}"));
            }
        }
    }
}

/// A momentum, Adam's averages and the weight that they change, written over what they were, over
/// one another's, or apart; the factors are numbers or operands, the gradient varies along both
/// axes or along one.
#[test]
fn updates_of_optimizers() {
    for shape in SHAPES {
        for (rule, gradient) in (0..12).map(|n| (n / 3, n % 3)) {
            for (places, loaded) in (0..6).map(|n| (n / 2, n % 2 == 1)) {
                let mut case = Case::new(shape, 0);
                let (w, m, g) = (case.load(0), case.load(0), case.load(gradient));
                let squares: Vec<f32> = (0..shape.0 * shape.1)
                    .map(|_| case.c.below(9) as f32)
                    .collect();
                let full = case.full;
                let v = case.load_these(&squares, &full);
                let factor = |case: &mut Case, x: f32| match loaded {
                    true => case.load_these(&[x], &[0, 0]),
                    false => case.b.number(x),
                };
                let [beta, rest, eps, rate, kept] =
                    [0.9, 0.1, 0.01, 0.3, 0.99].map(|x| factor(&mut case, x));
                let op = |case: &mut Case, op, args: &[ValueId]| case.b.op(op, args);
                let c = &mut case;
                let new = if rule < 2 {
                    // A momentum; with Nesterov's form of the change.
                    let old = op(c, ScalarOp::Mul, &[m, beta]);
                    let new = op(c, ScalarOp::Add, &[old, g]);
                    let change = if rule == 1 {
                        let next = op(c, ScalarOp::Mul, &[new, beta]);
                        op(c, ScalarOp::Add, &[g, next])
                    } else {
                        new
                    };
                    let change = op(c, ScalarOp::Mul, &[change, rate]);
                    vec![new, op(c, ScalarOp::Sub, &[w, change])]
                } else {
                    // Adam; with decay of the weight.
                    let square = op(c, ScalarOp::Mul, &[g, g]);
                    let averages = [(m, g), (v, square)].map(|(old, term)| {
                        let old = op(c, ScalarOp::Mul, &[old, beta]);
                        let term = op(c, ScalarOp::Mul, &[term, rest]);
                        op(c, ScalarOp::Add, &[old, term])
                    });
                    let root = op(c, ScalarOp::Sqrt, &[averages[1]]);
                    let root = op(c, ScalarOp::Div, &[root, kept]);
                    let divisor = op(c, ScalarOp::Add, &[root, eps]);
                    let change = op(c, ScalarOp::Div, &[averages[0], divisor]);
                    let change = op(c, ScalarOp::Mul, &[change, rate]);
                    let before = match rule {
                        2 => w,
                        _ => op(c, ScalarOp::Mul, &[w, kept]),
                    };
                    let w = op(c, ScalarOp::Sub, &[before, change]);
                    vec![averages[0], averages[1], w]
                };
                let old = if rule < 2 { vec![m, w] } else { vec![m, v, w] };
                for (i, &value) in new.iter().enumerate() {
                    match places {
                        0 => case.store_over(value, old[i]),
                        1 => case.store_over(value, old[(i + 1) % old.len()]),
                        _ => case.store(value, &full, shape.0 * shape.1),
                    }
                }
                case.check(&format!(
                    "rule {rule}, gradient {gradient}, places {places}"
                ));
            }
        }
    }
}
