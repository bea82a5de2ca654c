//! Compares the results of a case, run in several ways and by the reference evaluator.

use slabwise_compiler::reference::{Array, Precision};

use crate::case::{Case, Fold, Op, Program, Scale};
use crate::facts::Scope;
use crate::rules::facts;
use crate::run::{Failure, Outcome, Witness, execute, reference};
use crate::setup::Setup;

/// The fault.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// An error that no valid program may have.
    Failed(Failure),
    /// The type or shape of an output differs from the rules.
    Shape(String),
    /// Two ways of running give different numbers.
    Differs(String),
    /// The reference evaluator gives other numbers.
    Reference(String),
}

/// A fault, and how to reproduce it.
#[derive(Clone, Debug)]
pub struct Finding {
    /// The fault.
    pub fault: Fault,
    /// The way of running that has the fault; the default if that has it.
    pub setup: Setup,
}

impl Finding {
    /// A text that is equal for findings with the same likely cause.
    pub fn signature(&self) -> String {
        // Numbers, and names in quotes, differ from case to case.
        let short = |text: &str| -> String {
            let bare: String = text.split('`').step_by(2).collect();
            bare.chars()
                .filter(|c| !c.is_ascii_digit())
                .take(80)
                .collect()
        };
        match &self.fault {
            Fault::Failed(Failure::Panic(text)) => {
                format!("panic {}", text.rsplit(" at ").next().unwrap_or_default())
            }
            Fault::Failed(Failure::Internal(text)) => {
                // The fault is at the end, behind the name of a task.
                let bare = short(text);
                let words: Vec<&str> = bare.split_whitespace().collect();
                format!(
                    "internal {}",
                    words[words.len().saturating_sub(3)..].join(" ")
                )
            }
            Fault::Failed(failure) => {
                let text = failure.text();
                format!(
                    "error {}",
                    short(text.split_once(".rs:").map_or(text, |(_, rest)| rest))
                )
            }
            Fault::Shape(_) => "shape".into(),
            Fault::Differs(_) => format!("differs {}", short(&self.setup.describe())),
            Fault::Reference(_) => "reference".into(),
        }
    }

    /// Whether another finding is of the same kind.
    pub fn is_like(&self, other: &Finding) -> bool {
        match (&self.fault, &other.fault) {
            (Fault::Failed(_), Fault::Failed(_)) => self.signature() == other.signature(),
            (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
        }
    }

    /// The fault as text.
    pub fn text(&self) -> String {
        let text = match &self.fault {
            Fault::Failed(Failure::Panic(text)) => format!("panic: {text}"),
            Fault::Failed(failure) => failure.text().to_string(),
            Fault::Shape(text) | Fault::Differs(text) | Fault::Reference(text) => text.clone(),
        };
        format!("{text} (with {})", self.setup.describe())
    }
}

/// Counts of the work done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Cases.
    pub graphs: u64,
    /// Ways in which they ran, the default included.
    pub variants: u64,
    /// Comparisons of all results of a case.
    pub comparisons: u64,
    /// Ways that were refused for a documented reason: a budget too small, data out of range.
    pub refused: u64,
}

impl Counts {
    /// The sum of both.
    pub fn add(&mut self, other: &Counts) {
        self.graphs += other.graphs;
        self.variants += other.variants;
        self.comparisons += other.comparisons;
        self.refused += other.refused;
    }
}

/// The result of running a case in a way: results, a documented refusal, or a finding.
enum Ran {
    Gave(Outcome),
    Refused,
    Found(Finding),
}

/// A change of results before they are compared: a planted bug, to test the judge and the shrinker
/// with.
pub type Plant<'a> = &'a (dyn Fn(&Case, &Setup, &mut Outcome) + Sync);

fn run(case: &Case, setup: &Setup, witness: Option<&mut Witness>, plant: Plant<'_>) -> Ran {
    match execute(case, setup, witness) {
        Ok(mut outcome) => {
            plant(case, setup, &mut outcome);
            Ran::Gave(outcome)
        }
        Err(failure) if documented(case, setup, &failure) => Ran::Refused,
        Err(failure) => Ran::Found(Finding {
            fault: Fault::Failed(failure),
            setup: setup.clone(),
        }),
    }
}

/// Whether no order of sums decides: a sum of huge numbers is infinite in one order and not in
/// another, and infinite or not a number.
fn is_without_sums(case: &Case) -> bool {
    let moves = |op: &Op| match op {
        Op::Input { .. } | Op::Full { .. } | Op::Arange(_) | Op::Unary(_) | Op::Select => true,
        Op::Binary(_) | Op::Number(..) | Op::Clamp(..) | Op::Cast(_) | Op::Keep => true,
        Op::Checkpoint(_) | Op::Reshape(_) | Op::Flatten(_) | Op::Unflatten { .. } => true,
        Op::Permute(_) | Op::T | Op::Expand(_) | Op::Squeeze(_) | Op::Unsqueeze(_) => true,
        Op::Slice { .. } | Op::Split { .. } | Op::Pad { .. } | Op::Concat(_) => true,
        Op::Stack(_) | Op::MaxPool(_) | Op::SliceAssign { .. } => true,
        Op::Fold { fold, .. } => matches!(fold, Fold::Max | Fold::Min | Fold::Any | Fold::All),
        _ => false,
    };
    let all = |p: &Program| p.learn.is_none() && p.statements.iter().all(|s| moves(&s.op));
    case.programs.iter().all(all)
}

/// Whether a valid program may fail in this way.
fn documented(case: &Case, setup: &Setup, failure: &Failure) -> bool {
    let empty = |text: &str| text.contains("no element") || text.contains("empty");
    match failure {
        Failure::Budget(_) => setup.budget.is_some(),
        // Infinity is no index, and the bounds of numbers do not cover it.
        Failure::Data(_) if case.odd_numbers => true,
        // A loss of gradients need not depend on any weight, where the value is linear in it.
        Failure::Refused(text) if text.contains("no gradient with respect to") => {
            let statements = |p: &Program| p.statements.iter().any(|s| s.op == Op::Gradient);
            case.programs.iter().any(statements)
        }
        // The maximum of no elements: a data-dependent length may be 0, and so may a batch.
        Failure::Data(text) | Failure::Refused(text) | Failure::Other(text) => {
            empty(text) && may_fold_nothing(case)
        }
        Failure::Panic(_) | Failure::Internal(_) => false,
    }
}

fn may_fold_nothing(case: &Case) -> bool {
    let folds = |p: &Program| {
        let mut scope = Scope::new(case, p.training);
        let known = facts(p, &mut scope).unwrap_or_default();
        let nothing = |at: usize| {
            known
                .get(at)
                .is_some_and(|f| f.dims.iter().any(|d| d.least() == 0))
        };
        let extreme = |op: &Op| {
            matches!(
                op,
                Op::Fold {
                    fold: Fold::Max | Fold::Min | Fold::ArgMax | Fold::ArgMin,
                    ..
                }
            )
        };
        p.statements
            .iter()
            .any(|s| extreme(&s.op) && s.args.iter().any(|&a| nothing(a)))
    };
    case.programs.iter().any(folds)
}

/// Whether a case is valid by the rules.
pub fn is_valid(case: &Case) -> bool {
    let valid = |p: &Program| {
        let mut scope = Scope::new(case, p.training);
        let Some(known) = facts(p, &mut scope) else {
            return false;
        };
        let has = |list: &[usize]| list.iter().all(|&i| i < p.statements.len());
        let learns = p.learn.as_ref().is_none_or(|l| {
            let Some(fact) = known.get(l.loss) else {
                return false;
            };
            let whole = l.parts.is_none_or(|n| {
                fact.dims
                    .first()
                    .and_then(|d| d.as_fixed())
                    .is_some_and(|len| n > 0 && len > 0 && len % n == 0)
            });
            let apart = l.also.is_none_or(|also| {
                let fits = |f: &&crate::facts::Fact| {
                    f.rank() == 0 && f.dtype == slabwise::DType::F32 && f.learns != 0
                };
                let other = known.get(also).filter(fits);
                other.is_some_and(|f| f.learns & fact.learns == 0)
            });
            // A scale that adapts is that of one loss.
            let scales = l.also.is_none() || l.scale.is_none_or(|s| s == Scale::Fixed);
            p.training
                && apart
                && scales
                && fact.learns != 0
                && fact.dtype == slabwise::DType::F32
                && whole
                && (l.parts.is_some() || fact.rank() == 0)
        });
        let sets = p.sets.iter().all(|&(state, value)| {
            case.states
                .get(state)
                .zip(known.get(value))
                .is_some_and(|(s, f)| s.dtype == f.dtype && f.fixed().as_ref() == Some(&s.dims))
        });
        let donates = p.donate.is_none_or(|(input, position)| {
            let output = p.outputs.get(position).and_then(|&o| known.get(o));
            let is_input = p
                .statements
                .get(input)
                .is_some_and(|s| matches!(s.op, Op::Input { .. }));
            is_input
                && known
                    .get(input)
                    .zip(output)
                    .is_some_and(|(a, b)| a.dtype == b.dtype && a.dims == b.dims)
        });
        // An unbounded dimension must be that of an input.
        let named = |dim: usize| {
            let mentions = |s: &crate::case::Statement| mentions(&s.op, dim);
            let has = |s: &crate::case::Statement| matches!(s.op, Op::Input { .. }) && mentions(s);
            !p.statements.iter().any(mentions) || p.statements.iter().any(has)
        };
        let alike = layers_alike(case);
        has(&p.outputs)
            && p.outputs.len() <= crate::run::OUTPUTS_MAX
            && learns
            && sets
            && donates
            && alike
            && (0..case.dims.len()).all(named)
    };
    !case.runs.is_empty()
        && case.runs.iter().all(|&r| r < case.programs.len())
        && case.programs.iter().all(valid)
}

/// Whether layers of one name are one layer.
fn layers_alike(case: &Case) -> bool {
    let mut known: Vec<(usize, crate::case::Layer, [usize; 2])> = Vec::new();
    case.programs
        .iter()
        .flat_map(|p| &p.statements)
        .all(|s| match s.op {
            Op::Layer { layer, name, sizes } => match known.iter().find(|k| k.0 == name) {
                Some(k) => (k.1, k.2) == (layer, sizes),
                None => {
                    known.push((name, layer, sizes));
                    true
                }
            },
            _ => true,
        })
}

/// Whether a statement writes a named dimension down.
pub fn mentions(op: &Op, dim: usize) -> bool {
    let named = crate::case::Axis::Named(dim);
    match op {
        Op::Input { shape, .. }
        | Op::Full { shape, .. }
        | Op::Uniform(shape)
        | Op::Reshape(shape)
        | Op::Expand(shape) => shape.contains(&named),
        Op::Arange(axis) | Op::Length(axis) => *axis == named,
        Op::Method(method) => method.shape().contains(&named),
        _ => false,
    }
}

/// The first fault of a case, run in these ways beside the default.
pub fn judge(case: &Case, setups: &[Setup], counts: &mut Counts) -> Option<Finding> {
    judge_planted(case, setups, counts, &|_, _, _| {})
}

/// [`judge`] of results that are changed before they are compared.
pub fn judge_planted(
    case: &Case,
    setups: &[Setup],
    counts: &mut Counts,
    plant: Plant<'_>,
) -> Option<Finding> {
    counts.graphs += 1;
    counts.variants += 1;
    let mut witness = Witness::default();
    let base = match run(case, &Setup::default(), Some(&mut witness), plant) {
        Ran::Gave(outcome) => outcome,
        Ran::Refused => {
            counts.refused += 1;
            return None;
        }
        Ran::Found(finding) => return Some(finding),
    };
    if let Some(what) = misshapen(case, &base) {
        return Some(Finding {
            fault: Fault::Shape(what),
            setup: Setup::default(),
        });
    }
    let mut oracle = Oracle {
        case,
        witness: &witness,
        double: None,
        single: None,
    };
    let decided = !case.odd_numbers || is_without_sums(case);
    if decided {
        counts.comparisons += 1;
        match oracle.differs(&base) {
            Ok(None) => {}
            Ok(Some(what)) => {
                return Some(Finding {
                    fault: Fault::Reference(what),
                    setup: Setup::default(),
                });
            }
            Err(fault) => {
                let what = format!("the reference fails where the program ran: {fault}");
                return Some(Finding {
                    fault: Fault::Reference(what),
                    setup: Setup::default(),
                });
            }
        }
    }
    for setup in setups {
        // Results that are rounded differently cannot be compared where a rounding decides.
        if setup.rounds() && !decided {
            continue;
        }
        counts.variants += 1;
        let other = match run(case, setup, None, plant) {
            Ran::Gave(outcome) => outcome,
            Ran::Refused => {
                counts.refused += 1;
                continue;
            }
            Ran::Found(finding) => return Some(finding),
        };
        counts.comparisons += 1;
        let rounds = setup.rounds();
        let same = |a: &Array, b: &Array| {
            if rounds {
                first_far(a, b)
            } else {
                first_other(a, b)
            }
        };
        if let Some(what) = compare(&base, &other, same)
            && !(rounds && oracle.allows(&base, &other))
        {
            return Some(Finding {
                fault: Fault::Differs(what),
                setup: setup.clone(),
            });
        }
    }
    None
}

/// Outputs whose shape differs from the rules.
fn misshapen(case: &Case, outcome: &Outcome) -> Option<String> {
    for (run, (&at, outputs)) in case.runs.iter().zip(&outcome.outputs).enumerate() {
        let program = &case.programs[at];
        // Bounds equal to the lengths of this run.
        let mut now = case.clone();
        for (dim, named) in now.dims.iter_mut().enumerate() {
            named.max = case.length(dim, run) as u32;
        }
        let mut scope = Scope::new(&now, program.training);
        let Some(known) = facts(program, &mut scope) else {
            continue;
        };
        for (position, (&output, array)) in program.outputs.iter().zip(outputs).enumerate() {
            let fact = &known[output];
            let fits = |(n, len): (&usize, &crate::facts::Len)| {
                if len.is_data_dependent() {
                    *n <= scope.most(*len)
                } else {
                    *n == scope.most(*len)
                }
            };
            if fact.dtype != array.dtype
                || fact.rank() != array.dims.len()
                || !array.dims.iter().zip(&fact.dims).all(fits)
            {
                let dims: Vec<usize> = fact.dims.iter().map(|d| scope.most(*d)).collect();
                let what = format!(
                    "run {run}, output {position} is {} {:?}, not {} {dims:?}",
                    array.dtype, array.dims, fact.dtype
                );
                return Some(what);
            }
        }
    }
    None
}

/// The first difference between two outcomes.
fn compare(
    a: &Outcome,
    b: &Outcome,
    first: impl Fn(&Array, &Array) -> Option<String>,
) -> Option<String> {
    for (run, (x, y)) in a.outputs.iter().zip(&b.outputs).enumerate() {
        for (at, (x, y)) in x.iter().zip(y).enumerate() {
            if let Some(what) = first(x, y) {
                return Some(format!("run {run}, output {at}, {what}"));
            }
        }
    }
    for (name, x) in &a.variables {
        if let Some(what) = b.variables.get(name).and_then(|y| first(x, y)) {
            return Some(format!("\"{name}\" in the end, {what}"));
        }
    }
    None
}

fn first_where(a: &Array, b: &Array, same: impl Fn(f64, f64) -> bool) -> Option<String> {
    if (a.dtype, &a.dims) != (b.dtype, &b.dims) {
        return Some(format!(
            "{} {:?} and {} {:?}",
            a.dtype, a.dims, b.dtype, b.dims
        ));
    }
    let at = a
        .values
        .iter()
        .zip(&b.values)
        .position(|(&x, &y)| !same(x, y))?;
    Some(format!(
        "element {at} of {:?}: {} and {}",
        a.dims, a.values[at], b.values[at]
    ))
}

/// The first element of which the bits differ; any NaN is the same as any other.
fn first_other(a: &Array, b: &Array) -> Option<String> {
    first_where(a, b, |x, y| {
        x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan())
    })
}

/// The largest difference that rounding explains between numbers near `x` and `y`.
fn slack(x: f64, y: f64) -> f64 {
    2e-4 * (1.0 + x.abs().max(y.abs()))
}

fn close(x: f64, y: f64) -> bool {
    let finite = x.is_finite() && y.is_finite();
    (x.is_nan() && y.is_nan()) || x == y || (finite && (x - y).abs() <= slack(x, y))
}

/// The first element that rounding does not explain.
fn first_far(a: &Array, b: &Array) -> Option<String> {
    first_where(a, b, close)
}

/// The reference evaluator, in both its precisions.
struct Oracle<'a> {
    case: &'a Case,
    witness: &'a Witness,
    single: Option<Outcome>,
    double: Option<Outcome>,
}

impl Oracle<'_> {
    fn single(&mut self) -> Result<&Outcome, slabwise_compiler::reference::Fault> {
        if self.single.is_none() {
            self.single = Some(reference(self.case, self.witness, Precision::Single)?);
        }
        Ok(self.single.get_or_insert_default())
    }

    /// The difference of an outcome from the reference, where that is well conditioned: where
    /// single and double precision of the reference itself differ, a difference means nothing.
    fn differs(
        &mut self,
        outcome: &Outcome,
    ) -> Result<Option<String>, slabwise_compiler::reference::Fault> {
        let single = self.single()?;
        if compare(outcome, single, first_far).is_none() {
            return Ok(None);
        }
        let single = single.clone();
        if self.double.is_none() {
            self.double = reference(self.case, self.witness, Precision::Double).ok();
        }
        let Some(double) = &self.double else {
            return Ok(None);
        };
        // Different data-dependent lengths are caused by different positions.
        if compare(&single, double, |a, b| (a.dims != b.dims).then(String::new)).is_some() {
            return Ok(None);
        }
        Ok(far_from_both(outcome, &single, double))
    }

    /// Whether two different outcomes are both as near to the reference as its own rounding allows.
    fn allows(&mut self, a: &Outcome, b: &Outcome) -> bool {
        [a, b]
            .into_iter()
            .all(|o| matches!(self.differs(o), Ok(None)))
    }
}

/// The first element that differs more from both precisions than they differ from each other.
fn far_from_both(outcome: &Outcome, single: &Outcome, double: &Outcome) -> Option<String> {
    let far = |x: &Array, s: &Array, d: &Array| {
        if x.dims != s.dims {
            return Some(format!("{:?} and {:?}", x.dims, s.dims));
        }
        let apart = |i: usize| {
            let (x, s, d) = (x.values[i], s.values[i], d.values[i]);
            let spread = if s == d { 0.0 } else { (s - d).abs() };
            // NaN in one precision and a number in the other: a rounding decided.
            let vague = s.is_nan() != d.is_nan() || spread.is_infinite();
            let finite = x.is_finite() && d.is_finite();
            let rounded = finite && (x - d).abs() <= slack(x, d) + 64.0 * spread;
            let near = close(x, s) || close(x, d) || rounded;
            !(near || vague)
        };
        let at = (0..x.values.len()).find(|&i| apart(i))?;
        Some(format!(
            "element {at} of {:?}: {}, the reference {} (in double precision {})",
            x.dims, x.values[at], s.values[at], d.values[at]
        ))
    };
    for (run, ((x, s), d)) in outcome
        .outputs
        .iter()
        .zip(&single.outputs)
        .zip(&double.outputs)
        .enumerate()
    {
        for (at, ((x, s), d)) in x.iter().zip(s).zip(d).enumerate() {
            if let Some(what) = far(x, s, d) {
                return Some(format!("run {run}, output {at}, {what}"));
            }
        }
    }
    for (name, x) in &outcome.variables {
        if let (Some(s), Some(d)) = (single.variables.get(name), double.variables.get(name))
            && let Some(what) = far(x, s, d)
        {
            return Some(format!("\"{name}\" in the end, {what}"));
        }
    }
    None
}
