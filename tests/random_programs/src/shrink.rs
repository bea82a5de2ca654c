//! Makes a case smaller while it has the same fault.

use std::time::Instant;

use slabwise::{DType, Precision};

use crate::case::{Axis, Case, Op, Program};
use crate::facts::Scope;
use crate::judge::is_valid;
use crate::rules::facts;
use crate::setup::{Feed, Setup, Switch};

/// A case, and the way of running it, beside the default, that has the fault.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// The case.
    pub case: Case,
    /// The way of running it.
    pub setup: Setup,
}

impl Trial {
    /// Smaller is better: programs, statements, outputs, elements, then differences from the
    /// default.
    fn weight(&self) -> (usize, usize, usize) {
        let case = &self.case;
        let extras: usize = case
            .programs
            .iter()
            .map(|p| p.outputs.len() + p.sets.len() + usize::from(p.donate.is_some()))
            .sum();
        let learns = case.programs.iter().filter(|p| p.learn.is_some()).count();
        let learn = case.programs.iter().filter_map(|p| p.learn.as_ref());
        let more: usize = learn
            .map(|l| usize::from(l.also.is_some()) + usize::from(l.scale.is_some()))
            .sum();
        let lines = case.size() * 4
            + case.params.len()
            + case.states.len()
            + case.dims.len()
            + case.runs.len()
            + extras
            + 4 * learns
            + more;
        let elements: usize = case
            .programs
            .iter()
            .flat_map(|p| &p.statements)
            .map(|s| written(&s.op))
            .sum();
        let of_params: usize = case
            .params
            .iter()
            .map(|p| p.dims.iter().sum::<usize>() + 1)
            .sum();
        let of_dims: usize = case
            .dims
            .iter()
            .map(|d| d.max as usize + d.lengths.iter().sum::<u32>() as usize + d.lengths.len())
            .sum();
        let setup = &self.setup;
        let ways = setup.switches.len()
            + setup.threads
            + usize::from(setup.dynamic)
            + usize::from(setup.budget.is_some())
            + usize::from(setup.offload.is_some())
            + usize::from(setup.feed != Feed::Host)
            + usize::from(setup.swap_dims)
            + usize::from(setup.anew)
            + usize::from(setup.reload)
            + usize::from(setup.alone)
            + usize::from(case.odd_numbers)
            + case.programs.iter().filter(|p| p.training).count();
        (lines, elements + of_params + of_dims, ways)
    }
}

/// A measure of the numbers in a statement.
fn written(op: &Op) -> usize {
    let axis = |a: &Axis| if let Axis::Fixed(n) = a { *n + 1 } else { 1 };
    match op {
        Op::Input { shape, dtype, .. } | Op::Full { shape, dtype, .. } => {
            shape.iter().map(axis).sum::<usize>() + 2 * usize::from(*dtype != DType::F32)
        }
        Op::Uniform(shape) | Op::Reshape(shape) | Op::Expand(shape) => shape.iter().map(axis).sum(),
        Op::Arange(n) | Op::Length(n) => axis(n),
        Op::Method(method) => 4 + method.shape().iter().map(axis).sum::<usize>(),
        Op::Slice {
            start, end, step, ..
        } => start + end.unwrap_or(0) + step,
        Op::Pad { pads, .. } => pads.iter().map(|(a, b)| a + b).sum(),
        Op::Unflatten { lengths, .. } => lengths.iter().sum(),
        Op::Checkpoint(list) => list.len(),
        Op::OneHot(n) => *n,
        Op::Layer { sizes, .. } => sizes.iter().sum(),
        _ => 0,
    }
}

/// The smallest trial found for which `holds` is true, until `deadline`.
pub fn shrink(mut best: Trial, deadline: Instant, holds: impl Fn(&Trial) -> bool) -> Trial {
    loop {
        let before = best.weight();
        for pass in PASSES {
            let mut from = 0;
            loop {
                let list = pass(&best);
                let next = list.into_iter().enumerate().skip(from).find(|(_, trial)| {
                    Instant::now() < deadline
                        && trial.weight() < best.weight()
                        && is_valid(&trial.case)
                        && holds(trial)
                });
                let Some((at, trial)) = next else { break };
                // Steps that were refused before will most likely be refused again.
                from = at;
                best = trial;
            }
        }
        if best.weight() >= before || Instant::now() >= deadline {
            return best;
        }
    }
}

type Pass = fn(&Trial) -> Vec<Trial>;

/// Coarse changes first.
const PASSES: &[Pass] = &[
    runs, programs, extras, blocks, statements, bypasses, sources, setups, kinds, lengths, numbers,
];

fn with(trial: &Trial, change: impl FnOnce(&mut Trial)) -> Trial {
    let mut changed = trial.clone();
    change(&mut changed);
    changed
}

fn runs(trial: &Trial) -> Vec<Trial> {
    let n = trial.case.runs.len();
    let first = with(trial, |t| t.case.runs.truncate(1));
    std::iter::once(first)
        .chain((0..n).map(|i| {
            with(trial, |t| {
                t.case.runs.remove(i);
            })
        }))
        .collect()
}

fn programs(trial: &Trial) -> Vec<Trial> {
    let n = trial.case.programs.len();
    if n < 2 {
        return Vec::new();
    }
    let without = |at: usize| {
        with(trial, |t| {
            t.case.programs.remove(at);
            t.case.runs.retain(|&r| r != at);
            t.case
                .runs
                .iter_mut()
                .filter(|r| **r > at)
                .for_each(|r| *r -= 1);
        })
    };
    (0..n).map(without).collect()
}

/// Each change of each program.
fn each(trial: &Trial, mut change: impl FnMut(&mut Program, usize) -> bool) -> Vec<Trial> {
    let mut list = Vec::new();
    for at in 0..trial.case.programs.len() {
        for i in 0.. {
            let mut changed = trial.clone();
            if !change(&mut changed.case.programs[at], i) {
                break;
            }
            list.push(changed);
        }
    }
    list
}

fn extras(trial: &Trial) -> Vec<Trial> {
    let mut list = each(trial, |p, i| match i {
        0 => {
            p.learn = None;
            true
        }
        1 => {
            p.donate = None;
            true
        }
        2 => {
            p.sets.clear();
            true
        }
        3 => {
            p.training = false;
            p.learn = None;
            true
        }
        4 => {
            if let Some(learn) = &mut p.learn {
                learn.also = None;
            }
            true
        }
        5 => {
            if let Some(learn) = &mut p.learn {
                learn.scale = None;
            }
            true
        }
        i => {
            let at = i - 6;
            if at >= p.outputs.len() {
                return false;
            }
            p.outputs.remove(at);
            p.donate = p
                .donate
                .filter(|(_, position)| *position != at)
                .map(|(input, position)| (input, position - usize::from(position > at)));
            true
        }
    });
    if trial.case.odd_numbers {
        list.push(with(trial, |t| t.case.odd_numbers = false));
    }
    list
}

/// Removes these statements and all that depend on them.
fn without(p: &mut Program, gone: impl Fn(usize) -> bool) {
    let n = p.statements.len();
    let mut to: Vec<Option<usize>> = vec![None; n];
    let mut kept = Vec::new();
    for (i, statement) in p.statements.iter().enumerate() {
        let args: Option<Vec<usize>> = statement.args.iter().map(|&a| to[a]).collect();
        if let Some(args) = args.filter(|_| !gone(i)) {
            to[i] = Some(kept.len());
            kept.push(crate::case::Statement {
                args,
                ..statement.clone()
            });
        }
    }
    p.statements = kept;
    let donated = p
        .donate
        .and_then(|(input, position)| Some((to[input]?, *p.outputs.get(position)?)));
    p.outputs = p.outputs.iter().filter_map(|&o| to[o]).collect();
    p.donate = donated.and_then(|(input, output)| {
        Some((
            input,
            p.outputs.iter().position(|&o| Some(o) == to[output])?,
        ))
    });
    p.sets = p
        .sets
        .iter()
        .filter_map(|&(state, value)| Some((state, to[value]?)))
        .collect();
    p.learn = p.learn.take().and_then(|l| {
        Some(crate::case::Learn {
            loss: to[l.loss]?,
            also: l.also.and_then(|also| to[also]),
            ..l
        })
    });
}

/// Removes consecutive statements, long runs first.
fn blocks(trial: &Trial) -> Vec<Trial> {
    let mut list = Vec::new();
    for (at, program) in trial.case.programs.iter().enumerate() {
        let n = program.statements.len();
        let mut length = n / 2;
        while length > 1 {
            for start in (0..n).step_by(length) {
                list.push(with(trial, |t| {
                    without(&mut t.case.programs[at], |i| {
                        (start..start + length).contains(&i)
                    })
                }));
            }
            length /= 2;
        }
        // Removes unused statements.
        list.push(with(trial, |t| {
            without(&mut t.case.programs[at], |i| !needed(program).contains(&i))
        }));
    }
    list
}

fn needed(p: &Program) -> Vec<usize> {
    let mut open: Vec<usize> = p
        .outputs
        .iter()
        .copied()
        .chain(p.sets.iter().map(|s| s.1))
        .chain(
            p.learn
                .iter()
                .flat_map(|l| [Some(l.loss), l.also].into_iter().flatten()),
        )
        .collect();
    let mut seen = Vec::new();
    while let Some(at) = open.pop() {
        if !seen.contains(&at) {
            seen.push(at);
            open.extend(&p.statements[at].args);
        }
    }
    seen
}

fn statements(trial: &Trial) -> Vec<Trial> {
    each(trial, |p, i| {
        let Some(at) = p.statements.len().checked_sub(i + 1) else {
            return false;
        };
        without(p, |s| s == at);
        true
    })
}

/// Removes a statement; its users read an earlier value of its type and shape, or its operand.
fn bypasses(trial: &Trial) -> Vec<Trial> {
    let mut list = Vec::new();
    for (at, program) in trial.case.programs.iter().enumerate() {
        let known =
            facts(program, &mut Scope::new(&trial.case, program.training)).unwrap_or_default();
        for i in (0..program.statements.len()).rev() {
            let alike = |&e: &usize| {
                known
                    .get(e)
                    .zip(known.get(i))
                    .is_some_and(|(a, b)| a.dtype == b.dtype && a.dims == b.dims)
            };
            let same: Vec<usize> = (0..i).filter(alike).collect();
            let mut instead: Vec<usize> = program.statements[i].args.clone();
            instead.extend(same.first());
            instead.extend(same.last());
            instead.dedup();
            for other in instead {
                list.push(with(trial, |t| {
                    let p = &mut t.case.programs[at];
                    redirect(p, i, other);
                    without(p, |s| s == i);
                }));
            }
        }
    }
    list
}

fn redirect(p: &mut Program, from: usize, to: usize) {
    let change = |v: &mut usize| {
        if *v == from {
            *v = to;
        }
    };
    p.statements
        .iter_mut()
        .flat_map(|s| &mut s.args)
        .for_each(change);
    p.outputs.iter_mut().for_each(change);
    p.sets.iter_mut().for_each(|s| change(&mut s.1));
    p.learn.iter_mut().for_each(|l| {
        change(&mut l.loss);
        l.also.iter_mut().for_each(change);
    });
}

/// Replaces a statement by an input of its type and shape; removes the other contents of the case.
fn sources(trial: &Trial) -> Vec<Trial> {
    let mut list = Vec::new();
    for (at, program) in trial.case.programs.iter().enumerate() {
        let known =
            facts(program, &mut Scope::new(&trial.case, program.training)).unwrap_or_default();
        let inputs = program.inputs().count();
        for i in (0..program.statements.len()).rev().filter(|_| inputs < 7) {
            let Some(fact) = known
                .get(i)
                .filter(|_| !program.statements[i].args.is_empty())
            else {
                continue;
            };
            let shape: Option<Vec<Axis>> = fact
                .dims
                .iter()
                .map(|d| d.as_fixed().map(Axis::Fixed).or(d.named().map(Axis::Named)))
                .collect();
            let Some(shape) = shape else { continue };
            list.push(with(trial, |t| {
                let p = &mut t.case.programs[at];
                let op = Op::Input {
                    dtype: fact.dtype,
                    shape,
                    data: 900 + i as u32,
                };
                p.statements[i] = crate::case::Statement {
                    op,
                    args: Vec::new(),
                };
                let kept = needed(p);
                without(p, |s| !kept.contains(&s));
            }));
        }
    }
    let used = |n: usize, uses: &dyn Fn(&Op) -> Option<usize>| {
        let ops = trial
            .case
            .programs
            .iter()
            .flat_map(|p| &p.statements)
            .filter_map(|s| uses(&s.op));
        ops.max().map_or(0, |most| most + 1).min(n)
    };
    let params = used(trial.case.params.len(), &|op| {
        if let Op::Param(at) = op {
            Some(*at)
        } else {
            None
        }
    });
    let sets = trial
        .case
        .programs
        .iter()
        .flat_map(|p| &p.sets)
        .map(|s| s.0 + 1)
        .max()
        .unwrap_or(0);
    let states = used(trial.case.states.len(), &|op| {
        if let Op::State(at) = op {
            Some(*at)
        } else {
            None
        }
    })
    .max(sets);
    list.push(with(trial, |t| t.case.params.truncate(params)));
    list.push(with(trial, |t| t.case.stored = None));
    list.push(with(trial, |t| t.case.precision = Precision::F32));
    list.push(with(trial, |t| t.case.states.truncate(states)));
    for dim in 0..trial.case.dims.len() {
        list.push(with(trial, |t| fix(&mut t.case, dim)));
    }
    list
}

/// Replaces a named dimension by its largest length.
fn fix(case: &mut Case, dim: usize) {
    let n = case.dims[dim].max as usize;
    let change = |axis: &mut Axis| {
        *axis = match *axis {
            Axis::Named(at) if at == dim => Axis::Fixed(n),
            Axis::Named(at) if at > dim => Axis::Named(at - 1),
            other => other,
        };
    };
    for statement in case.programs.iter_mut().flat_map(|p| &mut p.statements) {
        axes(&mut statement.op).into_iter().for_each(change);
    }
    case.dims.remove(dim);
}

fn axes(op: &mut Op) -> Vec<&mut Axis> {
    match op {
        Op::Input { shape, .. }
        | Op::Full { shape, .. }
        | Op::Uniform(shape)
        | Op::Reshape(shape)
        | Op::Expand(shape) => shape.iter_mut().collect(),
        Op::Arange(axis) | Op::Length(axis) => vec![axis],
        Op::Method(method) => method.shape_mut().iter_mut().collect(),
        _ => Vec::new(),
    }
}

fn setups(trial: &Trial) -> Vec<Trial> {
    let default = Setup::default();
    let mut list: Vec<Trial> = vec![
        with(trial, |t| t.setup = Setup::default()),
        with(trial, |t| t.setup.threads = default.threads),
        with(trial, |t| t.setup.threads = 2),
        with(trial, |t| t.setup.dynamic = false),
        with(trial, |t| (t.setup.budget, t.setup.offload) = (None, None)),
        with(trial, |t| t.setup.offload = None),
        with(trial, |t| t.setup.feed = Feed::Host),
        with(trial, |t| t.setup.swap_dims = false),
        with(trial, |t| t.setup.anew = false),
        with(trial, |t| t.setup.reload = false),
        with(trial, |t| t.setup.alone = false),
    ];
    let n = trial.setup.switches.len();
    list.extend((0..n).map(|i| {
        with(trial, |t| {
            t.setup.switches.remove(i);
        })
    }));
    if trial.setup.switches.contains(&Switch::Nothing) {
        for one in Switch::ALL
            .iter()
            .filter(|s| s.text().contains("options.fuse."))
        {
            list.push(with(trial, |t| t.setup.switches = vec![*one]));
        }
    }
    list
}

/// Simpler types.
fn kinds(trial: &Trial) -> Vec<Trial> {
    each(trial, |p, i| {
        let Some(statement) = p.statements.get_mut(i) else {
            return false;
        };
        match &mut statement.op {
            Op::Input { dtype, .. } | Op::Full { dtype, .. } => *dtype = DType::F32,
            Op::Checkpoint(list) => drop(list.pop()),
            _ => {}
        }
        true
    })
}

/// Reduces every written length, in all places together and in each by itself: smaller, 1, and 0.
fn lengths(trial: &Trial) -> Vec<Trial> {
    let mut list = Vec::new();
    let mut numbers: Vec<usize> = Vec::new();
    let mut copy = trial.clone();
    for statement in copy
        .case
        .programs
        .iter_mut()
        .flat_map(|p| &mut p.statements)
    {
        numbers.extend(axes(&mut statement.op).iter().filter_map(|a| {
            if let Axis::Fixed(n) = a {
                Some(*n)
            } else {
                None
            }
        }));
    }
    numbers.extend(trial.case.params.iter().flat_map(|p| &p.dims));
    numbers.sort_unstable();
    numbers.dedup();
    for &n in numbers.iter().rev() {
        for less in smaller(n) {
            list.push(with(trial, |t| {
                for statement in t.case.programs.iter_mut().flat_map(|p| &mut p.statements) {
                    replace(&mut statement.op, n, less);
                }
                t.case
                    .params
                    .iter_mut()
                    .flat_map(|p| &mut p.dims)
                    .filter(|d| **d == n)
                    .for_each(|d| *d = less);
                t.case
                    .states
                    .iter_mut()
                    .flat_map(|p| &mut p.dims)
                    .filter(|d| **d == n)
                    .for_each(|d| *d = less);
            }));
        }
    }
    for at in 0..trial.case.programs.len() {
        for i in 0..trial.case.programs[at].statements.len() {
            let mut probe = trial.case.programs[at].statements[i].op.clone();
            for (k, axis) in axes(&mut probe).iter().enumerate() {
                let Axis::Fixed(n) = **axis else { continue };
                for less in smaller(n) {
                    list.push(with(trial, |t| {
                        *axes(&mut t.case.programs[at].statements[i].op)[k] = Axis::Fixed(less)
                    }));
                }
                list.push(with(trial, |t| {
                    if let Op::Input { shape, .. } = &mut t.case.programs[at].statements[i].op {
                        shape.remove(k);
                    }
                }));
            }
        }
    }
    for dim in 0..trial.case.dims.len() {
        for less in smaller(trial.case.dims[dim].max as usize) {
            list.push(with(trial, |t| {
                let named = &mut t.case.dims[dim];
                named.max = less as u32;
                named
                    .lengths
                    .iter_mut()
                    .for_each(|n| *n = (*n).min(less as u32));
            }));
        }
        list.push(with(trial, |t| t.case.dims[dim].lengths.truncate(1)));
        list.push(with(trial, |t| {
            let named = &mut t.case.dims[dim];
            named.lengths = vec![1; named.lengths.len()];
        }));
    }
    list
}

fn smaller(n: usize) -> Vec<usize> {
    let mut list = vec![0, 1, 2, n / 2, n.saturating_sub(1)];
    list.retain(|&m| m < n);
    list.dedup();
    list
}

/// Replaces a length everywhere in a statement.
fn replace(op: &mut Op, n: usize, less: usize) {
    for axis in axes(op) {
        if *axis == Axis::Fixed(n) {
            *axis = Axis::Fixed(less);
        }
    }
    let change = |m: &mut usize| {
        if *m == n {
            *m = less;
        }
    };
    match op {
        Op::Slice { start, end, .. } => {
            change(start);
            end.iter_mut().for_each(change);
        }
        Op::Unflatten { lengths, .. } => lengths.iter_mut().for_each(change),
        Op::OneHot(k) => change(k),
        Op::Layer { sizes, .. } => sizes.iter_mut().for_each(change),
        _ => {}
    }
}

/// Numbers of statements other than lengths.
fn numbers(trial: &Trial) -> Vec<Trial> {
    let mut list = Vec::new();
    for at in 0..trial.case.programs.len() {
        for i in 0..trial.case.programs[at].statements.len() {
            let mut change = |change: &dyn Fn(&mut Op)| {
                list.push(with(trial, |t| {
                    change(&mut t.case.programs[at].statements[i].op)
                }))
            };
            change(&|op| {
                if let Op::Slice { start, .. } = op {
                    *start = start.saturating_sub(1)
                }
            });
            change(&|op| {
                if let Op::Slice { step, .. } = op {
                    *step = 1
                }
            });
            change(&|op| {
                if let Op::Slice { end: Some(end), .. } = op {
                    *end = end.saturating_sub(1)
                }
            });
            change(&|op| {
                if let Op::Slice { end, .. } = op {
                    *end = None
                }
            });
            change(&|op| {
                if let Op::Pad { pads, .. } = op {
                    pads.iter_mut().for_each(|p| p.0 = p.0.min(1))
                }
            });
            change(&|op| {
                if let Op::Pad { pads, .. } = op {
                    pads.iter_mut().for_each(|p| p.1 = 0)
                }
            });
            change(&|op| {
                if let Op::Pad { pads, .. } = op {
                    pads.iter_mut().for_each(|p| p.0 = 0)
                }
            });
            change(&|op| {
                if let Op::OneHot(n) = op {
                    *n = n.saturating_sub(1)
                }
            });
        }
    }
    list
}
