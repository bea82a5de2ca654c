//! Two plans side by side, and the reasons why one is larger than the other.
//!
//! Plans are compared as files ([`PlanFile`]), which `slabwise plan --json` writes, so that
//! yesterday's plan can be held against today's. Buffers are the same if they have the same name,
//! and are the n-th of that name in both.

mod file;

use std::collections::{BTreeMap, HashMap};

pub use file::{FILE_MAX, FORMAT, Peak, PlanFile, PlanFileError, Row};

/// A buffer that both plans have, by its place in each file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Both {
    /// In [`PlanFile::buffers`] of the first.
    pub a: usize,
    /// Of the second.
    pub b: usize,
}

/// The causes of the difference of two peaks. Their sum is the difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Causes {
    /// Buffers at the second peak that the first plan does not have at all.
    pub new: i128,
    /// Buffers at the first peak that the second plan does not have at all.
    pub gone: i128,
    /// Buffers at both peaks whose sizes changed.
    pub resized: i128,
    /// Buffers of both plans that are live at the second peak alone.
    pub kept: i128,
    /// Buffers of both plans that were live at the first peak alone.
    pub dropped: i128,
}

impl Causes {
    /// The second peak less the first.
    pub fn sum(&self) -> i128 {
        self.new + self.gone + self.resized + self.kept + self.dropped
    }
}

/// A holder of bytes at either peak: a buffer of one plan or of both, with its bytes at each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The buffer, or the layer.
    pub name: String,
    /// At the first plan's peak.
    pub a: u64,
    /// At the second's.
    pub b: u64,
}

/// The differences between two plans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diff {
    /// The causes of the difference of the peaks.
    pub causes: Causes,
    /// The holders of bytes at either peak, the largest first.
    pub holders: Vec<Holding>,
    /// The same by layer, those that changed most first; layers without bytes at either are left
    /// out.
    pub layers: Vec<Holding>,
    /// Buffers that only the second plan has, the largest first: indices of its rows.
    pub new: Vec<usize>,
    /// Buffers that only the first plan has.
    pub gone: Vec<usize>,
    /// Buffers whose bytes differ, those that grew most first.
    pub resized: Vec<Both>,
    /// Buffers that live for more steps, those with the most bytes times added steps first.
    pub longer: Vec<Both>,
}

impl Diff {
    /// Compares two plans.
    pub fn of(a: &PlanFile, b: &PlanFile) -> Diff {
        let mut of_name: HashMap<(&str, usize), usize> = HashMap::new();
        numbered(a).for_each(|(at, key)| _ = of_name.insert(key, at));
        let (mut both, mut new, mut causes) = (Vec::new(), Vec::new(), Causes::default());
        let mut is_gone = vec![true; a.buffers.len()];
        for (at, key) in numbered(b) {
            match of_name.get(&key) {
                Some(&old) => {
                    both.push(Both { a: old, b: at });
                    is_gone[old] = false;
                }
                None => new.push(at),
            }
        }
        let gone: Vec<usize> = (0..a.buffers.len()).filter(|&at| is_gone[at]).collect();
        let mut holders: Vec<Holding> = Vec::new();
        let mut layers: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
        let mut hold = |name: &str, old: Option<&'_ Row>, now: Option<&'_ Row>| {
            let [a, b] = [old, now].map(|row| row.map_or(0, Row::at_peak_bytes));
            if a > 0 || b > 0 {
                holders.push(Holding {
                    name: name.into(),
                    a,
                    b,
                });
            }
        };
        for &Both { a: old, b: now } in &both {
            let (old, now) = (&a.buffers[old], &b.buffers[now]);
            hold(&now.name, Some(old), Some(now));
            let change = i128::from(now.at_peak_bytes()) - i128::from(old.at_peak_bytes());
            match (old.at_peak, now.at_peak) {
                (true, true) => causes.resized += change,
                (false, _) => causes.kept += change,
                (true, false) => causes.dropped += change,
            }
        }
        for row in new.iter().map(|&at| &b.buffers[at]) {
            hold(&row.name, None, Some(row));
            causes.new += i128::from(row.at_peak_bytes());
        }
        for row in gone.iter().map(|&at| &a.buffers[at]) {
            hold(&row.name, Some(row), None);
            causes.gone -= i128::from(row.at_peak_bytes());
        }
        for (side, file) in [a, b].into_iter().enumerate() {
            for row in &file.buffers {
                layers.entry(&row.layer).or_default()[side] += row.at_peak_bytes();
            }
        }
        let mut layers: Vec<Holding> = layers
            .into_iter()
            .map(|(layer, [a, b])| Holding {
                name: layer.into(),
                a,
                b,
            })
            .collect();
        layers.retain(|l| l.a > 0 || l.b > 0);
        layers.sort_by_key(|l| (std::cmp::Reverse(l.b.abs_diff(l.a)), std::cmp::Reverse(l.b)));
        holders.sort_by_key(|h| std::cmp::Reverse(h.a.max(h.b)));
        let bytes = |of: Both| (a.buffers[of.a].bytes, b.buffers[of.b].bytes);
        let mut resized: Vec<Both> = both
            .iter()
            .copied()
            .filter(|&of| bytes(of).0 != bytes(of).1)
            .collect();
        resized.sort_by_key(|&of| {
            std::cmp::Reverse(i128::from(bytes(of).1) - i128::from(bytes(of).0))
        });
        let added = |of: Both| {
            b.buffers[of.b]
                .steps()
                .saturating_sub(a.buffers[of.a].steps())
        };
        let mut longer: Vec<Both> = both.iter().copied().filter(|&of| added(of) > 0).collect();
        longer
            .sort_by_key(|&of| std::cmp::Reverse(u128::from(bytes(of).1) * u128::from(added(of))));
        let largest_first = |mut of: Vec<usize>, file: &PlanFile| {
            of.sort_by_key(|&at| std::cmp::Reverse(file.buffers[at].bytes));
            of
        };
        Diff {
            causes,
            holders,
            layers,
            new: largest_first(new, b),
            gone: largest_first(gone, a),
            resized,
            longer,
        }
    }

    /// Whether the plans have no difference of these kinds.
    pub fn is_empty(&self) -> bool {
        let same = |of: &[Holding]| of.iter().all(|h| h.a == h.b);
        self.new.is_empty()
            && self.gone.is_empty()
            && self.resized.is_empty()
            && self.longer.is_empty()
            && same(&self.holders)
    }
}

/// Rows with their names, and which of that name each is. The number of operations fused into a
/// kernel (`conv2d +3`) is no part of its workspace's name, because another optimizer changes it.
fn numbered(file: &PlanFile) -> impl Iterator<Item = (usize, (&str, usize))> {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    file.buffers.iter().enumerate().map(move |(at, row)| {
        let name = row
            .name
            .split_once(" +")
            .map_or(&*row.name, |(name, _)| name);
        let count = seen.entry(name).or_default();
        *count += 1;
        (at, (name, *count))
    })
}

#[cfg(test)]
mod tests;
