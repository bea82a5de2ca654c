//! Rules applied to the tensors of a file, and backwards to those of a model.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::tensor::Dtype;
use slabwise_planner::brief;

use super::assembly::Assembly;
use super::pattern::{Captures, Pattern};
use super::rules::{Rule, Rules};

/// A tensor that rules are applied to.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
}

/// The tensors that rules made.
#[derive(Debug, Default)]
pub(super) struct Mapped {
    pub(super) tensors: BTreeMap<String, Assembly>,
    /// The names that were ignored.
    pub(super) ignored: Vec<String>,
    /// Tensors that must be equal, because one name stands for both.
    pub(super) equal: Vec<(Assembly, Assembly)>,
    /// Tensors that a rule could not be applied to.
    pub(super) problems: Vec<String>,
    /// Whether each rule was used.
    pub(super) used: Vec<bool>,
}

/// Applies rules to the tensors of a file; `wants` knows the model's names.
pub(super) fn forward(rules: &Rules, origins: &[Origin], wants: &dyn Fn(&str) -> bool) -> Mapped {
    let mut mapped = Mapped::of(origins, rules);
    for (at, rule) in rules.list.iter().enumerate() {
        match rule {
            Rule::Rename { from, to, .. } => mapped.rename(at, rule, from, to),
            Rule::Permute { name, axes } => mapped.permute(at, rule, name, axes.as_deref()),
            Rule::Deinterleave { name, heads } => mapped.deal(at, rule, name, *heads, |_| 2),
            Rule::Parts {
                whole,
                parts,
                axis,
                joins: true,
            } => mapped.join(at, rule, parts, whole, *axis),
            Rule::Parts {
                whole,
                parts,
                axis,
                joins: false,
            } => mapped.split(at, rule, whole, parts, *axis),
            Rule::Tied(one, other) => mapped.tie(at, rule, one, other, wants),
            Rule::Ignore(name) => {
                for (found, _) in mapped.matching(name) {
                    mapped.tensors.remove(&found);
                    mapped.used[at] = true;
                    mapped.ignored.push(found);
                }
            }
            Rule::IgnoreExtra(_) | Rule::AllowMissing(_) | Rule::Cast(_) => {}
        }
    }
    mapped
}

/// Applies rules backwards to the tensors of a model.
pub(super) fn backward(rules: &Rules, origins: &[Origin]) -> Mapped {
    let mut mapped = Mapped::of(origins, rules);
    for (at, rule) in rules.list.iter().enumerate().rev() {
        match rule {
            Rule::Rename {
                from,
                to,
                both_ways: true,
            } => mapped.rename(at, rule, to, from),
            Rule::Permute { name, axes: None } => mapped.permute(at, rule, name, None),
            Rule::Permute {
                name,
                axes: Some(axes),
            } => {
                let mut back = vec![0; axes.len()];
                for (to, &from) in axes.iter().enumerate() {
                    // Other lists are mistakes, which were reported before.
                    if let Some(slot) = back.get_mut(from) {
                        *slot = to;
                    }
                }
                mapped.permute(at, rule, name, Some(&back));
            }
            Rule::Deinterleave { name, heads } => {
                mapped.deal(at, rule, name, *heads, |rows| rows / 2);
            }
            Rule::Parts {
                whole,
                parts,
                axis,
                joins: true,
            } => mapped.split(at, rule, whole, parts, *axis),
            Rule::Parts {
                whole,
                parts,
                axis,
                joins: false,
            } => mapped.join(at, rule, parts, whole, *axis),
            _ => {}
        }
    }
    mapped
}

impl Mapped {
    fn of(origins: &[Origin], rules: &Rules) -> Mapped {
        let named = origins
            .iter()
            .enumerate()
            .map(|(at, origin)| (origin.name.clone(), Assembly::whole(at, &origin.shape)));
        Mapped {
            tensors: named.collect(),
            used: vec![false; rules.list.len()],
            ..Mapped::default()
        }
    }

    /// The names that a pattern matches, with their captures.
    fn matching(&self, pattern: &Pattern) -> Vec<(String, Vec<(String, String)>)> {
        let mut found = Vec::new();
        for name in self.tensors.keys() {
            if let Some(captures) = pattern.matches(name) {
                let owned = captures.into_iter().map(|(key, value)| (key, value.into()));
                found.push((name.clone(), owned.collect()));
            }
        }
        found
    }

    fn problem(&mut self, rule: &Rule, name: &str, detail: &str) {
        self.problems
            .push(format!("cannot {rule}: `{}` {detail}", brief(name)));
    }

    /// Adds a tensor that a rule made.
    fn insert(&mut self, at: usize, rule: &Rule, name: String, mut tensor: Assembly) {
        self.used[at] = true;
        if tensor.rules.last() != Some(&at) {
            tensor.rules.push(at);
        }
        if self.tensors.contains_key(&name) {
            self.problem(
                rule,
                &name,
                "is there already: two tensors would have one name",
            );
            return;
        }
        self.tensors.insert(name, tensor);
    }

    fn rename(&mut self, at: usize, rule: &Rule, from: &Pattern, to: &Pattern) {
        let found = self.matching(from);
        // All leave before the first arrives, so that names can be shifted by one.
        let moved: Vec<(String, Assembly)> = found
            .into_iter()
            .filter_map(|(name, captures)| {
                let tensor = self.tensors.remove(&name)?;
                Some((to.fill(&borrowed(&captures)), tensor))
            })
            .collect();
        for (name, tensor) in moved {
            self.insert(at, rule, name, tensor);
        }
    }

    fn permute(&mut self, at: usize, rule: &Rule, name: &Pattern, axes: Option<&[usize]>) {
        for (name, _) in self.matching(name) {
            let Some(tensor) = self.tensors.remove(&name) else {
                continue;
            };
            let rank = tensor.shape.len();
            let axes: Option<Vec<usize>> = match axes {
                None if rank >= 2 => Some((0..rank - 2).chain([rank - 1, rank - 2]).collect()),
                Some(axes) if axes.len() == rank => Some(axes.to_vec()),
                _ => None,
            };
            match axes {
                Some(axes) => self.insert(at, rule, name, tensor.permuted(&axes)),
                None => {
                    let detail = format!("has the shape {:?}", tensor.shape);
                    self.problem(rule, &name, &detail);
                    self.tensors.insert(name, tensor);
                }
            }
        }
    }

    /// Reorders the rows of each head, every `step`th first; the step is that for the rows of a head.
    fn deal(
        &mut self,
        at: usize,
        rule: &Rule,
        name: &Pattern,
        heads: u64,
        step: impl Fn(u64) -> u64,
    ) {
        for (name, _) in self.matching(name) {
            let Some(tensor) = self.tensors.remove(&name) else {
                continue;
            };
            let rows = tensor.shape.first().copied().unwrap_or(1);
            let pairs = heads.saturating_mul(2);
            if pairs == 0 || !rows.is_multiple_of(pairs) {
                let detail = format!(
                    "has the shape {:?}, whose rows are not pairs for {heads} heads",
                    tensor.shape
                );
                self.problem(rule, &name, &detail);
                self.tensors.insert(name, tensor);
                continue;
            }
            self.insert(at, rule, name, tensor.dealt(heads, step(rows / heads)));
        }
    }

    fn split(
        &mut self,
        at: usize,
        rule: &Rule,
        whole: &Pattern,
        parts: &[(Pattern, Option<u64>)],
        axis: usize,
    ) {
        for (name, captures) in self.matching(whole) {
            let Some(tensor) = self.tensors.remove(&name) else {
                continue;
            };
            let Some(&length) = tensor.shape.get(axis) else {
                let detail = format!("has the shape {:?}", tensor.shape);
                self.problem(rule, &name, &detail);
                continue;
            };
            let n = parts.len() as u64;
            let given: Option<Vec<u64>> = parts.iter().map(|(_, length)| *length).collect();
            let lengths = given.unwrap_or_else(|| vec![length / n.max(1); parts.len()]);
            let sum = lengths.iter().try_fold(0u64, |sum, n| sum.checked_add(*n));
            if sum != Some(length) {
                let detail = format!(
                    "has length {length} along axis {axis}, which is not that of {n} parts"
                );
                self.problem(rule, &name, &detail);
                continue;
            }
            let mut start = 0;
            for ((part, _), length) in parts.iter().zip(lengths) {
                let name = part.fill(&borrowed(&captures));
                self.insert(at, rule, name, tensor.part(axis, start, length));
                start += length;
            }
        }
    }

    fn join(
        &mut self,
        at: usize,
        rule: &Rule,
        parts: &[(Pattern, Option<u64>)],
        whole: &Pattern,
        axis: usize,
    ) {
        // The captures of every whole of which a part is there.
        let mut wholes: BTreeSet<Vec<(String, String)>> = BTreeSet::new();
        for (part, _) in parts {
            for (_, mut captures) in self.matching(part) {
                captures.sort();
                wholes.insert(captures);
            }
        }
        for captures in wholes {
            let captures = borrowed(&captures);
            let names: Vec<String> = parts.iter().map(|(part, _)| part.fill(&captures)).collect();
            let (mut found, mut missing) = (Vec::new(), Vec::new());
            for name in &names {
                match self.tensors.remove(name) {
                    Some(tensor) => found.push(tensor),
                    None => missing.push(format!("`{}`", brief(name))),
                }
            }
            let to = whole.fill(&captures);
            if !missing.is_empty() {
                let detail = format!("needs {}, which is not there", missing.join(", "));
                self.problem(rule, &to, &detail);
                continue;
            }
            let shapes: Vec<&[u64]> = found.iter().map(|part| &*part.shape).collect();
            let others = |shape: &[u64]| {
                let mut shape = shape.to_vec();
                (axis < shape.len())
                    .then(|| shape.remove(axis))
                    .map(|_| shape)
            };
            let first = others(shapes[0]);
            let lengths = parts.iter().zip(&shapes);
            let mut along = shapes.iter().filter_map(|shape| shape.get(axis));
            let sum = along.try_fold(0u64, |sum, &n| sum.checked_add(n));
            let alike = first.is_some()
                && sum.is_some()
                && shapes.iter().all(|shape| others(shape) == first)
                && lengths
                    .into_iter()
                    .all(|((_, n), shape)| n.is_none_or(|n| shape[axis] == n));
            if !alike {
                let detail = format!("cannot be made of {shapes:?}");
                self.problem(rule, &to, &detail);
                continue;
            }
            let joined = Assembly::joined(found, axis);
            self.insert(at, rule, to, joined);
        }
    }

    fn tie(
        &mut self,
        at: usize,
        rule: &Rule,
        one: &Pattern,
        other: &Pattern,
        wants: &dyn Fn(&str) -> bool,
    ) {
        let mut pairs: BTreeSet<(String, String)> = BTreeSet::new();
        for (name, captures) in self.matching(one) {
            pairs.insert((name, other.fill(&borrowed(&captures))));
        }
        for (name, captures) in self.matching(other) {
            pairs.insert((one.fill(&borrowed(&captures)), name));
        }
        for (one, other) in pairs {
            let wanted = [&one, &other].map(|name| wants(name));
            let there = [&one, &other].map(|name| self.tensors.get(name).cloned());
            let (mut keep, mut drop) = (Vec::new(), Vec::new());
            match there {
                [Some(a), Some(b)] if wanted[0] != wanted[1] => {
                    self.equal.push((a, b));
                    drop.push(if wanted[0] { &other } else { &one });
                }
                [Some(a), None] if wanted[1] => {
                    keep.push((&other, a));
                    drop.extend((!wanted[0]).then_some(&one));
                }
                [None, Some(b)] if wanted[0] => {
                    keep.push((&one, b));
                    drop.extend((!wanted[1]).then_some(&other));
                }
                _ => continue,
            }
            self.used[at] = true;
            for name in drop {
                self.tensors.remove(name);
            }
            for (name, tensor) in keep {
                self.insert(at, rule, name.clone(), tensor);
            }
        }
    }
}

/// Captures as patterns take them.
fn borrowed(captures: &[(String, String)]) -> Captures<'_> {
    captures
        .iter()
        .map(|(key, value)| (key.clone(), &**value))
        .collect()
}
