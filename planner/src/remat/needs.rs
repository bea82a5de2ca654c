//! The bytes that each step of a schedule needs, with the largest of each block of steps for fast
//! range queries.

use std::ops::Deref;

/// The number of steps in a block.
const BLOCK: usize = 64;

/// Numbers by position, read as a slice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    all: Vec<i64>,
    /// The largest of each block; the last block may be shorter.
    tops: Vec<i64>,
}

impl Deref for Needs {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        &self.all
    }
}

/// The largest; a very small number if there is none.
fn top(of: &[i64]) -> i64 {
    of.iter().copied().fold(i64::MIN / 2, i64::max)
}

impl Needs {
    /// Resets the numbers to `len` zeros that `fill` changes.
    pub fn load(&mut self, len: usize, fill: impl FnOnce(&mut Vec<i64>)) {
        self.all.clear();
        self.all.resize(len, 0);
        fill(&mut self.all);
        self.tops.clear();
        self.tops.extend(self.all.chunks(BLOCK).map(top));
    }

    /// The largest of all.
    pub fn most(&self) -> i64 {
        top(&self.tops)
    }

    /// The largest in `from..to`; a very small number if that is empty.
    #[inline]
    pub fn most_in(&self, from: usize, to: usize) -> i64 {
        if from >= to {
            return i64::MIN / 2;
        }
        let (first, last) = (from.div_ceil(BLOCK), to / BLOCK);
        if first >= last {
            return top(&self.all[from..to]);
        }
        let (before, behind) = (
            top(&self.all[from..first * BLOCK]),
            top(&self.all[last * BLOCK..to]),
        );
        before.max(top(&self.tops[first..last])).max(behind)
    }

    /// Adds to all in `from..to`.
    #[inline]
    pub fn add(&mut self, from: usize, to: usize, amount: i64) {
        if from >= to || amount == 0 {
            return;
        }
        self.all[from..to]
            .iter_mut()
            .for_each(|need| *need += amount);
        let (first, last) = (from.div_ceil(BLOCK), to / BLOCK);
        if first < last {
            self.tops[first..last]
                .iter_mut()
                .for_each(|top| *top += amount);
        }
        for block in [from / BLOCK, (to - 1) / BLOCK] {
            if block < first || block >= last {
                self.refresh(block);
            }
        }
    }

    fn refresh(&mut self, block: usize) {
        let end = self.all.len().min((block + 1) * BLOCK);
        self.tops[block] = top(&self.all[block * BLOCK..end]);
    }

    /// Inserts a number before position `at`.
    pub fn insert(&mut self, at: usize, need: i64) {
        self.all.insert(at, need);
        if self.tops.len() * BLOCK < self.all.len() {
            self.tops.push(i64::MIN / 2);
        }
        self.refresh(at / BLOCK);
        // Each later block has received one from the block before and given one to the next.
        for block in at / BLOCK + 1..self.tops.len() {
            let came = self.all[block * BLOCK];
            let went = self.all.get((block + 1) * BLOCK).copied();
            if went.is_some_and(|went| went == self.tops[block]) {
                self.refresh(block);
            } else {
                self.tops[block] = self.tops[block].max(came);
            }
        }
    }

    /// Removes the number at a position.
    pub fn remove(&mut self, at: usize) {
        let mut gone = self.all.remove(at);
        for block in at / BLOCK..self.tops.len() {
            let came = self.all.get((block + 1) * BLOCK - 1).copied();
            if gone == self.tops[block] && came.is_none_or(|came| came < gone) {
                self.refresh(block);
            } else {
                self.tops[block] = came.map_or(self.tops[block], |came| came.max(self.tops[block]));
            }
            // The number that entered this block has left the next.
            gone = came.unwrap_or(gone);
        }
        if (self.tops.len() - 1) * BLOCK >= self.all.len() {
            self.tops.pop();
        }
    }

    /// The positions, ascending, of all numbers above `most`.
    pub fn over(&self, most: i64) -> impl Iterator<Item = (u32, i64)> + '_ {
        let blocks = self
            .tops
            .iter()
            .enumerate()
            .filter(move |&(_, &top)| top > most);
        blocks.flat_map(move |(block, _)| {
            let from = block * BLOCK;
            let needs = self.all[from..self.all.len().min(from + BLOCK)].iter();
            (from as u32..)
                .zip(needs.copied())
                .filter(move |&(_, need)| need > most)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slabwise_packer::random::Random;

    #[test]
    fn block_maxima_follow_every_change() {
        let mut random = Random(5);
        for len in [1, 63, 64, 65, 128, 400] {
            let mut needs = Needs::default();
            needs.load(len, |all| {
                all.iter_mut()
                    .for_each(|need| *need = random.below(50) as i64)
            });
            for _ in 0..400 {
                let (p, q) = (
                    random.below(needs.len() as u64) as usize,
                    random.below(needs.len() as u64 + 1) as usize,
                );
                match random.below(3) {
                    0 => needs.insert(q, random.below(60) as i64),
                    1 if needs.len() > 1 => needs.remove(p),
                    _ => needs.add(p.min(q), p.max(q), random.below(9) as i64 - 4),
                }
                let (p, q) = (p.min(needs.len()), q.min(needs.len()));
                let naive = |from: usize, to: usize| {
                    needs[from..to]
                        .iter()
                        .copied()
                        .max()
                        .unwrap_or(i64::MIN / 2)
                };
                assert_eq!(needs.most_in(p.min(q), p.max(q)), naive(p.min(q), p.max(q)));
                assert_eq!(needs.most(), naive(0, needs.len()));
                let mut anew = Needs::default();
                anew.load(needs.len(), |all| all.copy_from_slice(&needs));
                assert_eq!(anew, needs, "the largest of each block");
                let over: Vec<(u32, i64)> = (0u32..)
                    .zip(needs.iter().copied())
                    .filter(|&(_, need)| need > 25)
                    .collect();
                assert_eq!(needs.over(25).collect::<Vec<_>>(), over);
            }
        }
    }
}
