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
    /// the letters that occur once, in alphabetical order. A letter twice in an operand is its
    /// diagonal, as in `"ii->i"`; `...` stands for all further axes, which broadcast from the last
    /// one on, and are first in a result without `->`.
    ///
    /// Operands are combined from left to right, each by one matrix product. A letter has one
    /// length.
    #[track_caller]
    pub fn einsum<'t>(&'t self, equation: &str, operands: &[Tensor<'t>]) -> Tensor<'t> {
        self.record(Location::caller(), operands, |g, ids| {
            let say = |why: String| format!("einsum \"{equation}\": {why}");
            let (operands, mut result) = parse(equation).map_err(say)?;
            let operands = label(g, operands, &mut result, ids).map_err(say)?;
            contract(g, operands, &result, self.precision()).map_err(say)
        })
    }
}

/// Stands for `...`, the further axes of an operand.
const FURTHER: char = '…';

/// The letter of a further axis, numbered from the last one on.
fn further(from_last: usize) -> char {
    // A shape has few axes; the private letters are more.
    char::from_u32(0xE000 + from_last.min(1 << 10) as u32).unwrap_or(FURTHER)
}

/// The letters of each operand, and of the result.
fn parse(equation: &str) -> Result<(Vec<Vec<char>>, Vec<char>), String> {
    let repeated = |letters: &[char], only: Option<char>| {
        let places = letters.iter().enumerate();
        let mut again = places.filter(|(i, c)| letters[..*i].contains(c));
        again
            .find(|(_, c)| only.is_none_or(|only| only == **c))
            .map(|(_, c)| *c)
    };
    let letters = |text: &str, only: Option<char>| -> Result<Vec<char>, String> {
        let text = text.trim();
        let letters = text.replace("...", "…");
        let letters: Vec<char> = letters.chars().filter(|c| !c.is_whitespace()).collect();
        let is_known = |c: &char| c.is_ascii_alphabetic() || *c == FURTHER;
        if let Some(other) = letters.iter().find(|c| !is_known(c)) {
            return Err(format!("{other:?} is not a letter"));
        }
        match repeated(&letters, only) {
            Some(FURTHER) => Err(format!("... occurs twice in \"{text}\"")),
            Some(twice) => Err(format!("{twice} occurs twice in \"{text}\"")),
            None => Ok(letters),
        }
    };
    let (left, right) = equation
        .split_once("->")
        .map_or((equation, None), |(left, right)| (left, Some(right)));
    let operands = left
        .split(',')
        .map(|operand| letters(operand, Some(FURTHER)))
        .collect::<Result<Vec<_>, _>>()?;
    let result = match right {
        Some(right) => letters(right, None)?,
        None => {
            let mut once: Vec<char> = operands.iter().flatten().copied().collect();
            once.retain(|c| {
                let same = operands.iter().flatten().filter(|other| *other == c);
                *c != FURTHER && same.count() == 1
            });
            once.sort_unstable();
            if operands.iter().any(|o| o.contains(&FURTHER)) {
                once.insert(0, FURTHER);
            }
            once
        }
    };
    match result
        .iter()
        .find(|c| !operands.iter().any(|o| o.contains(c)))
    {
        Some(&FURTHER) => Err("... is in no operand".into()),
        Some(unknown) => Err(format!("{unknown} is in no operand")),
        None => Ok((operands, result)),
    }
}

/// The operands with their letters, if ranks, types and lengths agree; `...` becomes letters in
/// them and in the result.
fn label(
    g: &mut Graph,
    letters: Vec<Vec<char>>,
    result: &mut Vec<char>,
    ids: &[NodeId],
) -> Result<Vec<Labelled>, String> {
    if letters.len() != ids.len() {
        return Err(format!(
            "{} operands are named, {} given",
            letters.len(),
            ids.len()
        ));
    }
    let mut lengths: Vec<(char, Size)> = Vec::new();
    let (mut operands, mut most) = (Vec::new(), 0);
    for (i, (mut letters, &id)) in letters.into_iter().zip(ids).enumerate() {
        let dims = g.dims(id).clone();
        let named = letters.iter().filter(|c| **c != FURTHER).count();
        let rest = dims.len().checked_sub(named);
        let rest = rest.filter(|&n| n == 0 || named < letters.len());
        let rest = rest.ok_or_else(|| {
            format!(
                "operand {i} is {} and has {named} letters",
                g.symbols.show(&dims)
            )
        })?;
        if g.dtype(id) != DType::F32 {
            return Err(format!("operand {i} is {}, not f32", g.dtype(id)));
        }
        spell_out(&mut letters, rest);
        most = most.max(rest);
        for (&letter, &len) in letters.iter().zip(&dims) {
            let is_further = !letter.is_ascii_alphabetic();
            match lengths.iter_mut().find(|(known, _)| *known == letter) {
                Some((_, other)) if is_further && other.is(1) => *other = len,
                Some((_, other)) if *other != len && !(is_further && len.is(1)) => {
                    let show = |n: Size| n.show(|s| g.symbols.name(s));
                    return Err(match is_further {
                        true => format!("axes of ... are {} and {}", show(*other), show(len)),
                        false => format!("{letter} is {} and {}", show(*other), show(len)),
                    });
                }
                Some(_) => {}
                None => lengths.push((letter, len)),
            }
        }
        operands.push(Labelled { node: id, letters });
    }
    spell_out(result, most);
    for operand in &mut operands {
        operand.take_diagonals(g)?;
        operand.drop_ones(g, &lengths);
    }
    Ok(operands)
}

/// The sum of products over pairs of axes of two tensors.
pub(super) fn over_pairs(
    g: &mut Graph,
    a: NodeId,
    b: NodeId,
    axes: &[(usize, usize)],
    precision: Precision,
) -> Result<NodeId, String> {
    let ranks = [g.dims(a).len(), g.dims(b).len()];
    let mut letters = [0, ranks[0]].map(|from| (from..).map(further));
    let mut operands: Vec<Vec<char>> = letters
        .iter_mut()
        .zip(ranks)
        .map(|(letters, rank)| letters.by_ref().take(rank).collect())
        .collect();
    for (i, &(left, right)) in axes.iter().enumerate() {
        let named = operands[0].get(left).copied().filter(|_| right < ranks[1]);
        let letter = named.ok_or_else(|| format!("the ranks are {} and {}", ranks[0], ranks[1]))?;
        let earlier = &axes[..i];
        if earlier.iter().any(|&(l, r)| l == left || r == right) {
            return Err("an axis occurs twice".into());
        }
        let (n, m) = (g.dims(a)[left], g.dims(b)[right]);
        if n != m {
            let show = |n: Size| n.show(|s| g.symbols.name(s));
            return Err(format!("the lengths {} and {} differ", show(n), show(m)));
        }
        operands[1][right] = letter;
    }
    let (mut left, right) = (operands[0].clone(), &operands[1]);
    let mut result: Vec<char> = right
        .iter()
        .copied()
        .filter(|c| !left.contains(c))
        .collect();
    left.retain(|c| !right.contains(c));
    result.splice(0..0, left);
    for id in [a, b] {
        if g.dtype(id) != DType::F32 {
            return Err(format!("an operand is {}, not f32", g.dtype(id)));
        }
    }
    let operands = operands.into_iter().zip([a, b]);
    let labelled = operands.map(|(letters, node)| Labelled { node, letters });
    contract(g, labelled.collect(), &result, precision)
}

/// Replaces `...` by letters for so many axes.
fn spell_out(letters: &mut Vec<char>, axes: usize) {
    if let Some(at) = letters.iter().position(|c| *c == FURTHER) {
        letters.splice(at..=at, (0..axes).rev().map(further));
    }
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
    /// One axis for each letter that occurs several times: the diagonal.
    fn take_diagonals(&mut self, g: &mut Graph) -> Result<(), String> {
        let again = |letters: &[char]| {
            let mut pairs = (0..letters.len()).flat_map(|j| (0..j).map(move |i| (i, j)));
            pairs.find(|&(i, j)| letters[i] == letters[j])
        };
        while let Some((i, j)) = again(&self.letters) {
            let others = (0..self.letters.len()).filter(|&axis| axis != i && axis != j);
            let axes: Axes = others.chain([i, j]).collect();
            let node = g.permute(self.node, &axes);
            self.node = super::statistics::diagonal(g, node, 0)?;
            self.letters = axes[..axes.len() - 1]
                .iter()
                .map(|&a| self.letters[a])
                .collect();
        }
        Ok(())
    }

    /// Removes axes of length 1 that other operands have with more.
    fn drop_ones(&mut self, g: &mut Graph, lengths: &[(char, Size)]) {
        let dims = g.dims(self.node).clone();
        let stays_one = |letter: char| lengths.contains(&(letter, Size::ONE));
        let kept: Vec<usize> = (0..dims.len())
            .filter(|&axis| !dims[axis].is(1) || stays_one(self.letters[axis]))
            .collect();
        if kept.len() < dims.len() {
            let dims: Dims = kept.iter().map(|&axis| dims[axis]).collect();
            self.node = g.reshape(self.node, &dims);
            self.letters = kept.iter().map(|&axis| self.letters[axis]).collect();
        }
    }

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
