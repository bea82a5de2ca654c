//! Draws cases: small programs of every kind of statement, and the ways to run them.

mod choices;
mod elementwise;
mod methods;
mod patterns;
mod steps;

use slabwise::{DType, Precision};

use crate::case::{
    Axis, Case, Fold, Learn, Named, Op, Param, Program, Rule, Scale, State, Statement, Unary,
};
use crate::facts::{Fact, Len, Scope, Unknown};
use crate::method::Method;
use crate::numbers::jumps;
use crate::rng::Rng;
use crate::rules::infer;
use crate::run::OUTPUTS_MAX;
use crate::setup::{Feed, Setup, Switch};

/// Most elements of a value, and of a value of a large case.
const ELEMENTS_MAX: [usize; 2] = [400, 20_000];
/// The longest axis, and that of a large case.
const LENGTH_MAX: [usize; 2] = [100, 3600];
/// The longest axis of which each pair of elements has a number.
const PAIRS_MAX: usize = 130;
/// Lengths beside those of vectors, of 8 and of 16 lanes, and beside the block of a product's sums.
const EDGES: [usize; 13] = [1, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 129];
/// Lengths of sums that products split.
const DEEP: [usize; 5] = [512, 513, 600, 1030, 3600];
/// One of so many cases is large, because these take long.
const LARGE: usize = 40;
/// Most statements of a large case, about.
const LARGE_SIZE: usize = 5;
/// Floats that may be larger are scaled down before further statements use them.
const BOUND: f64 = 8.0;

/// The case of a seed, of at most about so many statements.
pub fn case(seed: u64, size_max: usize) -> Case {
    let mut rng = Rng::new(seed);
    let mut lengths = vec![
        1,
        2 + rng.below(3),
        2 + rng.below(6),
        rng.pick(&[1, 3, 4, 4, 6, 8, 12]),
    ];
    if rng.one_in(4) {
        lengths.push(0);
    }
    if rng.one_in(40) {
        lengths.push(rng.pick(&[17, 33, 65]));
    }
    let large = rng.one_in(LARGE);
    if large {
        lengths = vec![rng.pick(&EDGES), rng.pick(&EDGES), rng.pick(&EDGES)];
        if rng.one_in(2) {
            lengths.push(rng.pick(&DEEP));
        }
    }
    let mut case = Case {
        seed,
        odd_numbers: rng.one_in(15),
        ..Case::default()
    };
    for name in ["batch", "time"] {
        if rng.one_in(if name == "batch" { 2 } else { 8 }) {
            let max = rng.pick(&[1, 2, 3, 4, 4, 5, 8]);
            let free = rng.one_in(6);
            let least = u32::from(free || !rng.one_in(6));
            let length = |rng: &mut Rng| {
                if rng.one_in(2) {
                    max
                } else {
                    least + rng.below((max - least + 1) as usize) as u32
                }
            };
            let lengths = vec![length(&mut rng), length(&mut rng), length(&mut rng)];
            case.dims.push(Named {
                name,
                max,
                free,
                lengths,
            });
        }
    }
    let shapes = 1 + rng.below(2);
    for _ in 0..shapes {
        let rank = rng
            .weighted(&[1, 3, 5, 2, 1])
            .min(if large { 2 } else { 4 });
        let dims = (0..rank).map(|_| rng.pick(&lengths)).collect();
        let value = rng.one_in(4).then(|| rng.pick(&[0.0, 1.0, -0.5]));
        case.params.push(Param { dims, value });
    }
    if rng.one_in(6) {
        let rank = rng.below(3);
        let dims = (0..rank).map(|_| rng.pick(&lengths)).collect();
        case.states.push(State {
            dtype: rng.pick(&[DType::F32, DType::F32, DType::I32]),
            dims,
        });
    }
    let plain = case.odd_numbers && rng.one_in(2);
    let count = if rng.one_in(5) { 2 } else { 1 };
    for at in 0..count {
        let training = rng.one_in(2);
        let learns = training && !case.programs.iter().any(|p: &Program| p.learn.is_some());
        let most = (size_max / count).max(3);
        let most = if large { most.min(LARGE_SIZE) } else { most };
        // Small ones are likelier, because they are quick and findings in them are easy to
        // understand.
        let size = (1 + rng.below(most)).min(1 + rng.below(most));
        let scratch = case.clone();
        let mut maker = Maker::new(&scratch, &mut rng, lengths.clone(), training, at * 100);
        maker.large = large;
        maker.plain = plain;
        maker.fill(size);
        let program = maker.finish(learns);
        case.programs.push(program);
    }
    let runs = 1 + rng.below(3);
    case.runs = (0..count)
        .chain((0..runs - 1).map(|_| rng.below(count)))
        .collect();
    case.runs.truncate(4);
    // Weights that a step changes are rounded, and values that differ in their last bit may be
    // rounded to different halves.
    if case.programs.iter().all(|p| p.learn.is_none()) && rng.one_in(3) {
        case.stored = Some(rng.pick(&[DType::F16, DType::BF16]));
    }
    if rng.one_in(4) {
        case.precision = rng.pick(&[Precision::F16, Precision::Bf16]);
    }
    case
}

/// A few ways to run a case beside the default.
pub fn setups(case: &Case, rng: &mut Rng) -> Vec<Setup> {
    let count = 1 + rng.below(2) + usize::from(rng.one_in(6));
    (0..count).map(|_| setup(case, rng)).collect()
}

fn setup(case: &Case, rng: &mut Rng) -> Setup {
    let mut setup = Setup::default();
    let has_dims = !case.dims.is_empty();
    let filled = case.dims.iter().all(|d| d.lengths.iter().all(|&n| n > 0));
    let kinds = 1 + usize::from(rng.one_in(3));
    for _ in 0..kinds {
        match rng.weighted(&[8, 3, 4, 4, 3, 3, 2, 1, 2]) {
            0 => {
                let several = 1 + rng.below(2);
                for _ in 0..several {
                    let switch = rng.pick(Switch::ALL);
                    if !setup.switches.contains(&switch) {
                        setup.switches.push(switch);
                    }
                }
            }
            1 => setup.threads = rng.pick(&[2, 2, 3, 4]),
            2 => setup.dynamic = true,
            3 => {
                setup.budget = Some(rng.pick(&[95, 80, 80, 60, 40]));
                setup.offload = rng
                    .one_in(2)
                    .then(|| rng.pick(&[1_000_000, 1_000_000_000, 100_000_000_000]));
            }
            4 => setup.feed = rng.pick(&[Feed::Resident, Feed::Donated]),
            5 => setup.swap_dims = has_dims && filled,
            6 => setup.anew = true,
            7 => setup.reload = case.runs.len() > 1,
            _ => {
                setup.alone =
                    case.programs.len() > 1 && !case.programs.iter().any(Program::has_effects)
            }
        }
    }
    // A session loaded from a file has other buffers.
    if setup.reload {
        setup.alone = false;
    }
    if setup.alone {
        setup.anew = false;
    }
    if setup == Setup::default() {
        setup.dynamic = true;
    }
    setup
}

/// Whether it computes a number for each pair of elements of an axis.
fn pairs(op: &Op) -> bool {
    match op {
        Op::Attention { .. } | Op::SelfAttention { .. } | Op::Layer { .. } | Op::Nms(_) => true,
        Op::Method(method) => matches!(method, Method::AttentionWith { .. } | Method::Ctc { .. }),
        _ => false,
    }
}

/// A partly drawn program.
pub(crate) struct Maker<'a> {
    scope: Scope<'a>,
    rng: &'a mut Rng,
    lengths: Vec<usize>,
    program: Program,
    facts: Vec<Fact>,
    /// Statements that others may use as operands.
    open: Vec<usize>,
    data: usize,
    found: usize,
    large: bool,
    /// Whether it has elementwise statements only, so that its results with odd numbers are known.
    plain: bool,
}

impl<'a> Maker<'a> {
    fn new(
        case: &'a Case,
        rng: &'a mut Rng,
        lengths: Vec<usize>,
        training: bool,
        data: usize,
    ) -> Maker<'a> {
        let scope = Scope::new(case, training);
        let program = Program {
            training,
            ..Program::default()
        };
        Maker {
            scope,
            rng,
            lengths,
            program,
            facts: Vec::new(),
            open: Vec::new(),
            data,
            found: 0,
            large: false,
            plain: false,
        }
    }

    /// Adds a statement if it is valid, not too large, and continuous in every rounded operand.
    pub(crate) fn push(&mut self, op: Op, args: &[usize]) -> Option<usize> {
        if jumps(&op) && args.iter().any(|&a| !self.facts[a].exact) {
            return None;
        }
        let most = |&a: &usize| self.facts[a].dims.iter().map(|d| self.scope.most(*d)).max();
        if pairs(&op) && args.iter().filter_map(most).any(|n| n > PAIRS_MAX) {
            return None;
        }
        let statement = Statement {
            op,
            args: args.to_vec(),
        };
        let at = self.facts.len();
        let fact = infer(at, &statement, &self.facts, &mut self.scope)?;
        let small = self
            .scope
            .elements(&fact.dims)
            .is_some_and(|n| n <= ELEMENTS_MAX[usize::from(self.large)])
            && fact.rank() <= 5;
        let tame = fact.low <= fact.high
            && fact.bound() < 1e6
            && (fact.dtype.is_float() || fact.bound() < 1e5);
        // Numbers far from 1 lose digits when they are subtracted.
        let longest = LENGTH_MAX[usize::from(self.large)];
        let short = fact.dims.iter().all(|d| self.scope.most(*d) <= longest);
        if !small || !tame || !short {
            return None;
        }
        if matches!(statement.op, Op::Gradient) && !args.iter().all(|&a| self.facts[a].smooth) {
            return None;
        }
        let large = fact.dtype.is_float() && fact.bound() > BOUND;
        let scale = (4.0 / fact.bound()) as f32;
        self.program.statements.push(statement);
        self.facts.push(fact);
        if large {
            // A power of two changes no digit.
            return self.push(
                Op::Number(crate::case::Binary::Mul, scale.log2().floor().exp2()),
                &[at],
            );
        }
        self.open.push(at);
        Some(at)
    }

    /// A statement that others may use and that satisfies `fits`; later ones are likelier, so that
    /// programs grow deep.
    pub(crate) fn find(&mut self, fits: impl Fn(&Fact) -> bool) -> Option<usize> {
        self.find_at(|_, fact| fits(fact))
    }

    /// [`Maker::find`] by the statement and its facts.
    pub(crate) fn find_at(&mut self, fits: impl Fn(usize, &Fact) -> bool) -> Option<usize> {
        let list: Vec<usize> = self
            .open
            .iter()
            .copied()
            .filter(|&i| fits(i, &self.facts[i]))
            .collect();
        let late = self.rng.below(list.len()).max(self.rng.below(list.len()));
        list.get(late).copied()
    }

    /// The statements that a value depends on.
    pub(crate) fn above(&self, at: usize) -> Vec<usize> {
        let (mut open, mut seen) = (vec![at], Vec::new());
        while let Some(at) = open.pop() {
            let new = |a: &&usize| !seen.contains(*a);
            let args = self.program.statements[at].args.iter().filter(new);
            open.extend(args.copied().collect::<Vec<_>>());
            seen.push(at);
        }
        seen
    }

    pub(crate) fn fact(&self, at: usize) -> &Fact {
        &self.facts[at]
    }

    /// A length as it is written; `None` if it cannot be written.
    pub(crate) fn axis(&self, len: Len) -> Option<Axis> {
        let named = |dim: &usize| Len::unknown(Unknown::Named(*dim)) == len;
        let known = (0..self.scope.case.dims.len()).find(named).map(Axis::Named);
        len.as_fixed().map(Axis::Fixed).or(known)
    }

    pub(crate) fn shape(&self, dims: &[Len]) -> Option<Vec<Axis>> {
        dims.iter().map(|&d| self.axis(d)).collect()
    }

    fn any_shape(&mut self) -> Vec<Axis> {
        let rank = self.rng.weighted(&[1, 4, 6, 4, 2]);
        let named = self.scope.case.dims.len();
        let mut shape: Vec<Axis> = (0..rank)
            .map(|_| Axis::Fixed(self.rng.pick(&self.lengths)))
            .collect();
        if rank == 4 {
            // Small images.
            shape[2] = Axis::Fixed(self.rng.pick(&[1, 2, 3, 4, 5]));
            shape[3] = Axis::Fixed(self.rng.pick(&[1, 2, 3, 4]));
        }
        if rank > 0 && named > 0 && self.rng.one_in(2) {
            let at = if self.rng.one_in(4) {
                self.rng.below(rank)
            } else {
                0
            };
            shape[at] = Axis::Named(self.rng.below(named));
        }
        shape
    }

    /// An input of this type and shape, if there may be one more.
    pub(crate) fn input(&mut self, dtype: DType, shape: Vec<Axis>) -> Option<usize> {
        if self.program.inputs().count() >= 6 {
            return None;
        }
        self.data += 1;
        let data = self.data as u32;
        self.push(Op::Input { dtype, shape, data }, &[])
    }

    fn fill(&mut self, size: usize) {
        let types = [
            DType::F32,
            DType::F32,
            DType::F32,
            DType::F32,
            DType::I32,
            DType::U8,
            DType::Bool,
            DType::F16,
            DType::BF16,
        ];
        for _ in 0..1 + self.rng.below(2) {
            let (dtype, shape) = (self.rng.pick(&types), self.any_shape());
            self.input(dtype, shape);
        }
        // An unbounded length must be that of an input.
        for dim in 0..self.scope.case.dims.len() {
            let has = self.program.statements.iter().any(
                |s| matches!(&s.op, Op::Input { shape, .. } if shape.contains(&Axis::Named(dim))),
            );
            if !has {
                let n = self.rng.pick(&self.lengths);
                let wide = self.input(DType::F32, vec![Axis::Named(dim), Axis::Fixed(n)]);
                if wide.is_none() {
                    self.input(DType::F32, vec![Axis::Named(dim)]);
                }
            }
        }
        if !self.rng.one_in(3) {
            let at = self.rng.below(self.scope.case.params.len());
            self.push(Op::Param(at), &[]);
        }
        if !self.scope.case.states.is_empty() && self.rng.one_in(2) {
            self.push(Op::State(0), &[]);
        }
        let mut tries = 0;
        let (start, most) = (self.facts.len(), size * 6);
        while self.facts.len() < start + size && tries < most {
            tries += 1;
            let before = self.found;
            if self.step().is_some() && self.found == before {
                continue;
            }
        }
    }

    fn finish(mut self, learns: bool) -> Program {
        if learns && !self.rng.one_in(3) {
            self.learn();
        }
        self.set_states();
        self.outputs();
        self.donate();
        self.program
    }

    fn learn(&mut self) {
        let empty_batch = self.scope.case.dims.iter().any(|d| d.lengths.contains(&0));
        let fits = |f: &Fact| {
            let learns = f.dtype == DType::F32 && f.learns != 0 && f.smooth;
            let filled = |d: &Len| d.least() > 0 || (!empty_batch && d.as_fixed().is_none());
            learns && f.dims.iter().all(filled)
        };
        let Some(value) = self.find(fits) else {
            return;
        };
        let learns = self.facts[value].learns;
        let rule = self.rng.pick(Rule::ALL);
        let mut scale = match self.rng.one_in(4) {
            true => Some(self.rng.pick(Scale::ALL)),
            false => None,
        };
        let other = self.find(|f| fits(f) && f.learns & learns == 0);
        let also = match other.filter(|_| self.rng.one_in(2)) {
            Some(other) => self.scalar_loss(other),
            None => None,
        };
        if also.is_some() {
            scale = scale.map(|_| Scale::Fixed);
        }
        let n = self.facts[value].dims.first().and_then(|d| d.as_fixed());
        let n = n.unwrap_or(0);
        let parts = [2, 3, 4].into_iter();
        let mut parts = parts.filter(|p| n > 0 && n.is_multiple_of(*p));
        let parts = parts.next().filter(|_| self.rng.one_in(2));
        let loss = match parts {
            Some(_) => Some(value),
            None => self.scalar_loss(value),
        };
        self.program.learn = loss.map(|loss| Learn {
            loss,
            rule,
            parts,
            also,
            scale,
        });
    }

    /// The mean of a value's squares, or the value if it is a scalar.
    fn scalar_loss(&mut self, value: usize) -> Option<usize> {
        let fact = &self.facts[value];
        if fact.rank() == 0 {
            return Some(value);
        }
        // A mean over a data-dependent length is no number if the length is 0.
        let fold = match fact.dims.iter().all(|d| d.least() > 0) {
            true => Fold::Mean,
            false => Fold::Sum,
        };
        let square = self
            .push(Op::Unary(Unary::Square), &[value])
            .unwrap_or(value);
        let (axes, keep) = (None, false);
        self.push(Op::Fold { fold, axes, keep }, &[square])
    }

    fn set_states(&mut self) {
        for (at, state) in self.scope.case.states.iter().enumerate() {
            let dims: Vec<Len> = state.dims.iter().map(|&n| Len::fixed(n)).collect();
            let fits = |f: &Fact| {
                f.dtype == state.dtype
                    && f.dims == dims
                    && (f.exact || f.dtype.is_float())
                    && f.bound() <= 8.0
            };
            if let Some(value) = self.find(fits).filter(|_| self.rng.one_in(2)) {
                self.program.sets.push((at, value));
            }
        }
    }

    fn outputs(&mut self) {
        let used: Vec<usize> = self
            .program
            .statements
            .iter()
            .flat_map(|s| s.args.clone())
            .collect();
        for at in 0..self.facts.len() {
            let is_source = self.program.statements[at].args.is_empty();
            let loose = !used.contains(&at) && (!is_source || self.rng.one_in(4));
            if (loose || self.rng.one_in(10)) && self.program.outputs.len() < OUTPUTS_MAX - 1 {
                self.program.outputs.push(at);
            }
        }
        if self.program.outputs.is_empty() && self.program.learn.is_none() {
            self.program.outputs.extend(self.open.last());
        }
        if self.rng.one_in(30)
            && let Some(&first) = self.program.outputs.first()
            && self.program.outputs.len() < OUTPUTS_MAX - 1
        {
            self.program.outputs.push(first);
        }
    }

    fn donate(&mut self) {
        let inputs: Vec<usize> = self.program.inputs().collect();
        for (position, &output) in self.program.outputs.iter().enumerate() {
            let alike = |&i: &usize| {
                self.facts[i].dtype == self.facts[output].dtype
                    && self.facts[i].dims == self.facts[output].dims
            };
            if let Some(&input) = inputs
                .iter()
                .find(|i| alike(i) && self.facts[**i].dtype != DType::Bool)
                && self.rng.one_in(3)
            {
                self.program.donate = Some((input, position));
                return;
            }
        }
    }
}
