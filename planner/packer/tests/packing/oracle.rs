//! The definition of a packing, byte by byte and step by step where that is simplest.

use slabwise_packer::{InPlace, Packing, Problem};

/// The bytes of the item (from, to) that belong to it at a step.
pub fn needed(problem: &Problem, item: usize, step: u64) -> (u64, u64) {
    let it = &problem.items[item];
    if !it.life.contains(step) {
        return (0, 0);
    }
    let open = problem
        .gaps
        .iter()
        .filter(|gap| gap.item == item && gap.life.contains(step));
    let left = open.map(|gap| {
        gap.window
            .map_or((0, 0), |window| (window.low, window.high))
    });
    let (low, high) = left.fold((0, it.size), |(low, high), (from, to)| {
        (low.max(from), high.min(to))
    });
    if low < high { (low, high) } else { (0, 0) }
}

/// The step after the last one at which an item lives.
pub fn end(problem: &Problem) -> u64 {
    problem
        .items
        .iter()
        .map(|item| item.life.end)
        .max()
        .unwrap_or(0)
}

pub fn space(problem: &Problem, item: usize) -> usize {
    problem
        .spaces
        .iter()
        .position(|space| space.items.contains(&item))
        .unwrap_or(0)
}

fn aliases(problem: &Problem, a: usize, b: usize) -> bool {
    problem
        .aliases
        .iter()
        .any(|group| group.contains(&a) && group.contains(&b))
}

/// Whether two items may share bytes.
fn may_share(problem: &Problem, in_place: &[InPlace], a: usize, b: usize) -> bool {
    let pair = |from, to| in_place.contains(&InPlace { from, to });
    aliases(problem, a, b) || pair(a, b) || pair(b, a)
}

/// Whether offsets and pairs are valid, checked for each pair of items.
pub fn is_valid(problem: &Problem, offsets: &[u64], in_place: &[InPlace]) -> bool {
    let items = &problem.items;
    let aligned = items
        .iter()
        .zip(offsets)
        .all(|(item, offset)| offset % item.align == 0);
    let fixed = problem.fixed.iter().all(|at| offsets[at.item] == at.offset);
    let together = problem
        .aliases
        .iter()
        .all(|group| group.iter().all(|&item| offsets[item] == offsets[group[0]]));
    let follows = |two: &[usize]| offsets[two[0]] + items[two[0]].size == offsets[two[1]];
    let contiguous = problem
        .contiguous
        .iter()
        .all(|group| group.windows(2).all(follows));
    let pairs = in_place.iter().enumerate().all(|(at, pair)| {
        let others = || {
            in_place
                .iter()
                .enumerate()
                .filter(move |(other, _)| *other != at)
                .map(|(_, other)| other)
        };
        let once = others().all(|other| other.from != pair.from && other.to != pair.to);
        let passed_on =
            items[pair.to].life.steps() == 1 && others().any(|other| other.from == pair.to);
        problem.in_place.contains(pair)
            && once
            && !passed_on
            && offsets[pair.from] == offsets[pair.to]
    });
    aligned
        && fixed
        && together
        && contiguous
        && pairs
        && (0..items.len()).all(|a| (0..a).all(|b| apart(problem, offsets, in_place, a, b)))
}

fn apart(problem: &Problem, offsets: &[u64], in_place: &[InPlace], a: usize, b: usize) -> bool {
    if space(problem, a) != space(problem, b) || may_share(problem, in_place, a, b) {
        return true;
    }
    (0..end(problem)).all(|step| {
        let ((a_low, a_high), (b_low, b_high)) =
            (needed(problem, a, step), needed(problem, b, step));
        let empty = a_low == a_high || b_low == b_high;
        empty
            || offsets[a] + a_high <= offsets[b] + b_low
            || offsets[b] + b_high <= offsets[a] + a_low
    })
}

/// Whether an item needs bytes at any step.
pub fn needs_bytes(problem: &Problem, item: usize) -> bool {
    (0..end(problem)).any(|step| needed(problem, item, step) != (0, 0))
}

/// The height of each space.
pub fn heights(problem: &Problem, offsets: &[u64]) -> Vec<u64> {
    let mut heights = vec![0; problem.spaces.len().max(1)];
    for item in (0..problem.items.len()).filter(|&item| needs_bytes(problem, item)) {
        let height: &mut u64 = &mut heights[space(problem, item)];
        *height = (*height).max(offsets[item] + problem.items[item].size);
    }
    heights
}

/// Whether a packing is valid; its lower bounds only have to be no more than the heights.
pub fn accepts(problem: &Problem, packing: &Packing) -> bool {
    let heights = heights(problem, &packing.offsets);
    is_valid(problem, &packing.offsets, &packing.in_place)
        && packing
            .spaces
            .iter()
            .map(|extent| extent.height)
            .eq(heights.iter().copied())
        && packing
            .spaces
            .iter()
            .all(|extent| extent.lower_bound <= extent.height)
        && packing.height == heights.iter().sum::<u64>()
}
