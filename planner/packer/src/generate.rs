//! Synthetic problems whose optimum is known, for tests, fuzzing and benches.
//!
//! A problem is made by cutting up a rectangle of time × bytes; its pieces are the items. In their
//! original places they fill the rectangle, so its height is both the lower bound and the optimum,
//! and packing them is a jigsaw puzzle.

use crate::lifetime::Lifetime;
use crate::problem::{Item, Problem};
use crate::random::Random;

/// How a piece is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cuts {
    /// In two, by one straight cut (guillotine cuts).
    Straight,
    /// In five, four around one in the middle like the sails of a windmill; this is not a
    /// guillotine cut.
    Spiral,
    /// Either, at random.
    Mixed,
}

/// A packing problem with a known optimal packing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The packing problem.
    pub problem: Problem,
    /// Offsets that reach `height`.
    pub offsets: Vec<u64>,
    /// The optimal height, which is also the lower bound.
    pub height: u64,
}

/// Cuts a rectangle of `time` × `height` into about `items` pieces (fewer if the rectangle is too
/// small for that many, up to three more with [`Cuts::Spiral`]), in random order. The same seed
/// gives the same problem.
pub fn tiling(seed: u64, items: usize, time: u64, height: u64, cuts: Cuts) -> Known {
    let mut random = Random(seed);
    let mut pieces = Vec::with_capacity(items.saturating_add(3).min(1 << 24));
    if items > 0 && time > 0 && height > 0 {
        pieces.push(Piece {
            start: 0,
            end: time,
            bottom: 0,
            top: height,
        });
    }
    let mut failures = 0;
    while !pieces.is_empty() && pieces.len() < items && failures < 1000 {
        // The largest of three, so that sizes vary but no piece stays uncut while others become
        // tiny.
        let at = (0..3)
            .map(|_| random.below(pieces.len() as u64) as usize)
            .max_by_key(|&i| pieces[i].area())
            .unwrap_or(0);
        let spiral = match cuts {
            Cuts::Straight => false,
            Cuts::Spiral => true,
            Cuts::Mixed => random.below(2) == 0,
        };
        let cut = if spiral {
            pieces[at].spiral(&mut random)
        } else {
            pieces[at].halves(&mut random)
        };
        if cut.is_empty() {
            failures += 1;
            continue;
        }
        failures = 0;
        pieces.swap_remove(at);
        pieces.extend(cut);
    }
    for i in (1..pieces.len()).rev() {
        pieces.swap(i, random.below(i as u64 + 1) as usize);
    }
    let item = |p: &Piece| Item {
        life: Lifetime::new(p.start, p.end),
        size: p.top - p.bottom,
        align: 1,
    };
    let height = pieces.iter().map(|p| p.top).max().unwrap_or(0);
    Known {
        problem: Problem::new(pieces.iter().map(item).collect()),
        offsets: pieces.iter().map(|p| p.bottom).collect(),
        height,
    }
}

/// A tiling of which only one instant is full: elsewhere about one piece in `one_in` is missing, so
/// that there are gaps, as on the heap of a real program. The height is still the optimum.
pub fn with_holes(seed: u64, known: Known, one_in: u64) -> Known {
    let mut random = Random(seed);
    let end = known
        .problem
        .items
        .iter()
        .map(|item| item.life.end)
        .max()
        .unwrap_or(0);
    let full = random.below(end.max(1));
    let kept = |item: &Item| item.life.contains(full) || random.below(one_in.max(1)) > 0;
    let keep: Vec<bool> = known.problem.items.iter().map(kept).collect();
    let mut problem = known.problem;
    let mut offsets = known.offsets;
    let (mut at_item, mut at_offset) = (keep.iter(), keep.iter());
    problem.items.retain(|_| at_item.next() == Some(&true));
    offsets.retain(|_| at_offset.next() == Some(&true));
    Known {
        problem,
        offsets,
        height: known.height,
    }
}

/// A position to cut an interval: inside it, and not too close to its ends if it is long
/// enough.
fn cut(random: &mut Random, from: u64, to: u64) -> Option<u64> {
    let length = to - from;
    let margin = (length / 8).max(1);
    (length >= 2).then(|| from + margin + random.below((length - 2 * margin).max(1)))
}

#[derive(Clone, Copy)]
struct Piece {
    start: u64,
    end: u64,
    bottom: u64,
    top: u64,
}

impl Piece {
    fn area(&self) -> u128 {
        u128::from(self.end - self.start) * u128::from(self.top - self.bottom)
    }

    /// Two pieces, or none if this one is too small.
    fn halves(self, random: &mut Random) -> Vec<Piece> {
        let across = random.below(2) == 0;
        for across in [across, !across] {
            if across {
                if let Some(at) = cut(random, self.start, self.end) {
                    return vec![Piece { end: at, ..self }, Piece { start: at, ..self }];
                }
            } else if let Some(at) = cut(random, self.bottom, self.top) {
                return vec![Piece { top: at, ..self }, Piece { bottom: at, ..self }];
            }
        }
        Vec::new()
    }

    /// Five pieces, or none if this one is too small.
    fn spiral(self, random: &mut Random) -> Vec<Piece> {
        let two_cuts = |random: &mut Random, from: u64, to: u64| {
            let first = cut(random, from, to)?;
            let second = cut(random, from, to)?;
            (first != second).then(|| (first.min(second), first.max(second)))
        };
        let (Some((left, right)), Some((low, high))) = (
            two_cuts(random, self.start, self.end),
            two_cuts(random, self.bottom, self.top),
        ) else {
            return Vec::new();
        };
        let (clockwise, outer) = (random.below(2) == 0, self);
        let middle = Piece {
            start: left,
            end: right,
            bottom: low,
            top: high,
        };
        let sails = if clockwise {
            [
                Piece {
                    end: right,
                    top: low,
                    ..outer
                },
                Piece {
                    start: right,
                    top: high,
                    ..outer
                },
                Piece {
                    start: left,
                    bottom: high,
                    ..outer
                },
                Piece {
                    end: left,
                    bottom: low,
                    ..outer
                },
            ]
        } else {
            [
                Piece {
                    start: left,
                    top: low,
                    ..outer
                },
                Piece {
                    start: right,
                    bottom: low,
                    ..outer
                },
                Piece {
                    end: right,
                    bottom: high,
                    ..outer
                },
                Piece {
                    end: left,
                    top: high,
                    ..outer
                },
            ]
        };
        sails.into_iter().chain([middle]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces cover the rectangle exactly: areas add up and no two overlap.
    #[test]
    fn pieces_fill_the_rectangle() {
        for cuts in [Cuts::Straight, Cuts::Spiral, Cuts::Mixed] {
            for (seed, items) in [(1, 1), (2, 7), (3, 40), (4, 200)] {
                let known = tiling(seed, items, 1000, 5000, cuts);
                assert!(
                    (items..items + 4).contains(&known.problem.items.len()),
                    "{cuts:?} {items}"
                );
                let area: u64 = known
                    .problem
                    .items
                    .iter()
                    .map(|item| item.life.steps() * item.size)
                    .sum();
                assert_eq!((area, known.height), (1000 * 5000, 5000));
                let placed: Vec<(&Item, u64)> = known
                    .problem
                    .items
                    .iter()
                    .zip(known.offsets.iter().copied())
                    .collect();
                for (i, (a, a_at)) in placed.iter().enumerate() {
                    assert!(a_at + a.size <= 5000 && a.life.end <= 1000);
                    let apart = |(b, b_at): &(&Item, u64)| {
                        a_at + a.size <= *b_at || b_at + b.size <= *a_at || !a.life.overlaps(b.life)
                    };
                    assert!(placed[..i].iter().all(apart), "{cuts:?} {items}");
                }
                assert_eq!(known.problem.lower_bound(), 5000);
            }
        }
    }

    #[test]
    fn the_seed_decides_and_tiny_rectangles_end() {
        assert_eq!(
            tiling(5, 50, 100, 100, Cuts::Mixed),
            tiling(5, 50, 100, 100, Cuts::Mixed)
        );
        assert_ne!(
            tiling(5, 50, 100, 100, Cuts::Mixed),
            tiling(6, 50, 100, 100, Cuts::Mixed)
        );
        assert_eq!(tiling(1, 50, 2, 3, Cuts::Straight).problem.items.len(), 6);
        assert_eq!(tiling(1, 50, 0, 3, Cuts::Straight).problem.items.len(), 0);
        assert_eq!(tiling(1, 0, 9, 9, Cuts::Straight).height, 0);
    }

    #[test]
    fn holes_leave_the_optimum_as_it_was() {
        let known = with_holes(3, tiling(9, 300, 10_000, 10_000, Cuts::Mixed), 3);
        assert!(
            known.problem.items.len() < 300 && known.problem.items.len() == known.offsets.len()
        );
        assert_eq!(known.problem.lower_bound(), 10_000);
    }
}
