//! Sums of products in Einstein's notation, composed of permutations, reshapes and matrix products.

use std::panic::Location;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, ReduceOp};

use super::Tensor;
use crate::graph::Graph;
use crate::ops::{Axes, GraphBuilder, NodeId};
use crate::shape::elements;
use crate::trace::{Precision, Trace};

/// A tensor with a letter for each axis.
#[derive(Clone)]
struct Labelled {
    node: NodeId,
    letters: Vec<char>,
}

impl Trace {
    /// A sum of products: `"bij,bjk->bik"` names the axes of each f32 operand and of the result by
    /// a letter, and sums over every letter that is not in the result. Without `->` the result has
    /// the letters that occur once, in alphabetical order.
    ///
    /// Operands are combined from left to right, each by one matrix product. A letter has one
    /// length and occurs once in an operand.
    #[track_caller]
    pub fn einsum<'t>(&'t self, equation: &str, operands: &[Tensor<'t>]) -> Tensor<'t> {
        self.record(Location::caller(), operands, |g, ids| {
            let say = |why: String| format!("einsum \"{equation}\": {why}");
            let (operands, result) = parse(equation).map_err(say)?;
            let operands = label(g, operands, ids).map_err(say)?;
            contract(g, operands, &result, self.precision()).map_err(say)
        })
    }
}

/// The letters of each operand, and of the result.
fn parse(equation: &str) -> Result<(Vec<Vec<char>>, Vec<char>), String> {
    let letters = |text: &str| -> Result<Vec<char>, String> {
        let letters: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
        if let Some(other) = letters.iter().find(|c| !c.is_ascii_alphabetic()) {
            return Err(format!("{other:?} is not a letter"));
        }
        match letters
            .iter()
            .enumerate()
            .find(|(i, c)| letters[..*i].contains(c))
        {
            Some((_, twice)) => Err(format!("{twice} occurs twice in \"{}\"", text.trim())),
            None => Ok(letters),
        }
    };
    let (left, right) = equation
        .split_once("->")
        .map_or((equation, None), |(left, right)| (left, Some(right)));
    let operands = left
        .split(',')
        .map(letters)
        .collect::<Result<Vec<_>, _>>()?;
    let result = match right {
        Some(right) => letters(right)?,
        None => {
            let mut once: Vec<char> = operands.iter().flatten().copied().collect();
            once.retain(|c| {
                operands
                    .iter()
                    .flatten()
                    .filter(|other| *other == c)
                    .count()
                    == 1
            });
            once.sort_unstable();
            once
        }
    };
    match result
        .iter()
        .find(|c| !operands.iter().any(|o| o.contains(c)))
    {
        Some(unknown) => Err(format!("{unknown} is in no operand")),
        None => Ok((operands, result)),
    }
}

/// The operands with their letters, if ranks, types and lengths agree.
fn label(g: &Graph, letters: Vec<Vec<char>>, ids: &[NodeId]) -> Result<Vec<Labelled>, String> {
    if letters.len() != ids.len() {
        return Err(format!(
            "{} operands are named, {} given",
            letters.len(),
            ids.len()
        ));
    }
    let mut lengths: Vec<(char, Size)> = Vec::new();
    for (i, (letters, &id)) in letters.iter().zip(ids).enumerate() {
        let dims = g.dims(id);
        if letters.len() != dims.len() {
            return Err(format!(
                "operand {i} is {} and has {} letters",
                g.symbols.show(dims),
                letters.len()
            ));
        }
        if g.dtype(id) != DType::F32 {
            return Err(format!("operand {i} is {}, not f32", g.dtype(id)));
        }
        for (&letter, &len) in letters.iter().zip(dims) {
            match lengths.iter().find(|(known, _)| *known == letter) {
                Some(&(_, other)) if other != len => {
                    let show = |n: Size| n.show(|s| g.symbols.name(s));
                    return Err(format!("{letter} is {} and {}", show(other), show(len)));
                }
                Some(_) => {}
                None => lengths.push((letter, len)),
            }
        }
    }
    Ok(letters
        .into_iter()
        .zip(ids)
        .map(|(letters, &node)| Labelled { node, letters })
        .collect())
}

fn contract(
    g: &mut Graph,
    operands: Vec<Labelled>,
    result: &[char],
    precision: Precision,
) -> Result<NodeId, String> {
    let mut rest = operands.into_iter();
    let mut joined = rest.next().ok_or("no operand is named")?;
    while let Some(right) = rest.next() {
        // The axes that the result or a later operand still names.
        let needed =
            |c: char| result.contains(&c) || rest.as_slice().iter().any(|o| o.letters.contains(&c));
        let left = joined.sum(g, |c| needed(c) || right.letters.contains(&c));
        let right = right.sum(g, |c| needed(c) || left.letters.contains(&c));
        joined = product(g, &left, &right, needed, precision)?;
    }
    let joined = joined.sum(g, |c| result.contains(&c));
    Ok(joined.arrange(g, result))
}

impl Labelled {
    /// The sum over every axis whose letter is not kept.
    fn sum(&self, g: &mut Graph, keep: impl Fn(char) -> bool) -> Labelled {
        let axes: Axes = (0..self.letters.len())
            .filter(|&i| !keep(self.letters[i]))
            .collect();
        let folded = g.reduce(ReduceOp::Sum, self.node, &axes);
        let dims: Dims = g
            .dims(folded)
            .iter()
            .enumerate()
            .filter(|(i, _)| !axes.contains(i))
            .map(|(_, d)| *d)
            .collect();
        Labelled {
            node: g.reshape(folded, &dims),
            letters: self.letters.iter().copied().filter(|&c| keep(c)).collect(),
        }
    }

    /// Permutes the axes into the order of `letters`, which are this tensor's.
    fn arrange(&self, g: &mut Graph, letters: &[char]) -> NodeId {
        let axes: Vec<usize> = letters
            .iter()
            .filter_map(|c| self.letters.iter().position(|own| own == c))
            .collect();
        g.permute(self.node, &axes)
    }

    /// As matrices: the axes of each group joined into one, except those of `batch`; the groups
    /// together are all axes.
    fn matrices(
        &self,
        g: &mut Graph,
        batch: &[char],
        rows: &[char],
        columns: &[char],
    ) -> Result<NodeId, String> {
        let node = self.arrange(g, &[batch, rows, columns].concat());
        let dims = g.dims(node).clone();
        let (batch, rest) = dims.split_at(batch.len());
        let (rows, columns) = rest.split_at(rows.len());
        let joined = |lengths: &[Size]| {
            elements(lengths).ok_or("a product of bounded lengths has no form as one size")
        };
        let mut dims = Dims::from_slice(batch);
        dims.extend([joined(rows)?, joined(columns)?]);
        Ok(g.reshape(node, &dims))
    }
}

/// The sum over axes that both operands have and nothing else needs.
fn product(
    g: &mut Graph,
    left: &Labelled,
    right: &Labelled,
    needed: impl Fn(char) -> bool,
    precision: Precision,
) -> Result<Labelled, String> {
    let both = |c: &&char| right.letters.contains(c);
    let (shared, rows): (Vec<char>, Vec<char>) = left.letters.iter().partition(both);
    let (batch, inner): (Vec<char>, Vec<char>) = shared.into_iter().partition(|c| needed(*c));
    let columns: Vec<char> = right
        .letters
        .iter()
        .copied()
        .filter(|c| !left.letters.contains(c))
        .collect();
    let a = left.matrices(g, &batch, &rows, &inner)?;
    let b = right.matrices(g, &batch, &inner, &columns)?;
    let [a, b] = [a, b].map(|id| precision.round(g, id));
    let product = g.matmul(a, b);
    let letters = [batch, rows, columns].concat();
    let length = |c: &char| {
        let of = |o: &Labelled| {
            o.letters
                .iter()
                .position(|own| own == c)
                .map(|axis| g.dims(o.node)[axis])
        };
        of(left).or_else(|| of(right)).unwrap_or(Size::ONE)
    };
    let dims: Dims = letters.iter().map(length).collect();
    Ok(Labelled {
        node: g.reshape(product, &dims),
        letters,
    })
}
