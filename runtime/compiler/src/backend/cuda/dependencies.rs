//! Dependencies between the steps of a program, by the bytes that they read and write.
//!
//! A recorded run is a graph whose edges are these dependencies: a step depends on the writers of
//! the bytes that it reads or writes, and on the readers of the bytes that it writes. Steps without
//! a conflict may run side by side. Because offsets stay as planned, a step that reuses memory
//! depends on its earlier users even if no value connects them.

use std::collections::{BTreeMap, HashMap};

use slabwise_kernels::spec::{Access, Body};

use super::fusion::Group;
use crate::backend::{Extent, LoadRequest, LoadStep};

/// The most steps that are visited to find that one dependency follows from another.
const WALK_MAX: usize = 2000;

/// A memory that a step reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Memory {
    Slab,
    Variable(usize),
    Sizes,
    /// The record of values out of range.
    Faults,
}

/// Bytes that a step reads or writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touched {
    memory: Memory,
    from: u64,
    to: u64,
    written: bool,
}

impl Touched {
    pub(super) fn conflicts(&self, other: &Touched) -> bool {
        let shared = self.from.max(other.from)..self.to.min(other.to);
        (self.written || other.written) && self.memory == other.memory && !shared.is_empty()
    }
}

/// The guarded steps of a program, which read the fault record before they write: if some step
/// checks values, those that assign variables.
#[derive(Clone, Copy, Debug)]
pub(super) struct Guarded {
    checked: bool,
}

impl Guarded {
    pub fn of(steps: &[LoadStep<'_>]) -> Guarded {
        Guarded {
            checked: steps.iter().any(|step| {
                let spec = step.kernel.map(|kernel| kernel.spec());
                spec.is_some_and(|spec| matches!(spec.body, Body::BoundsCheck(_)))
            }),
        }
    }

    /// Whether this step is guarded.
    pub fn step(self, step: &LoadStep<'_>) -> bool {
        let Some(kernel) = step.kernel else {
            return false;
        };
        let assigns = |(extent, access): (&Extent, Access)| {
            matches!(extent, Extent::Variable(_)) && access != Access::Read
        };
        let accesses = kernel.spec().accesses();
        self.checked && step.arguments.iter().zip(accesses).any(assigns)
    }
}

/// The memory that a step reads and writes.
pub(super) fn touched(step: &LoadStep<'_>, guarded: Guarded) -> Vec<Touched> {
    let guarded = guarded.step(step);
    let slab = |from, to, written| Touched {
        memory: Memory::Slab,
        from,
        to,
        written,
    };
    let Some(kernel) = step.kernel else {
        return vec![slab(0, u64::MAX, true)];
    };
    let mut list = vec![slab(step.workspace.0, step.workspace.1, true)];
    if guarded || matches!(kernel.spec().body, Body::BoundsCheck(_)) {
        list.push(Touched {
            memory: Memory::Faults,
            from: 0,
            to: 1,
            written: !guarded,
        });
    }
    for (extent, access) in step.arguments.iter().zip(kernel.spec().accesses()) {
        let written = access != Access::Read;
        list.push(match *extent {
            Extent::Slab(from, to) => slab(from, to, written),
            Extent::Variable(v) => Touched {
                memory: Memory::Variable(v),
                from: 0,
                to: 1,
                written,
            },
            Extent::Sizes => Touched {
                memory: Memory::Sizes,
                from: 0,
                to: 1,
                written,
            },
        });
    }
    list
}

/// The launches that each launch of a recorded run depends on, by their numbers in the order of the
/// run; a group of steps is one launch. `None` if the program copies
/// to or from the host while it runs. Then launches run one after the other, and the copies beside
/// them.
pub(super) fn dependencies(request: &LoadRequest<'_>, groups: &[Group]) -> Option<Vec<Vec<u32>>> {
    if request.has_copies {
        return None;
    }
    let guarded = Guarded::of(&request.steps);
    let group_of = |step: usize| groups.iter().find(|group| group.members.contains(&step));
    let own = |step: &usize| touched(&request.steps[*step], guarded);
    let mut order = Order::default();
    for step in 0..request.steps.len() {
        match group_of(step) {
            None => order.push(&own(&step)),
            Some(group) if group.turn == step => {
                order.push(&group.members.iter().flat_map(own).collect::<Vec<_>>());
            }
            Some(_) => {}
        }
    }
    Some(order.after)
}

/// Launches in their order, and the earlier ones that each depends on.
#[derive(Default)]
struct Order {
    /// The memory touched so far: by its kind, then by the first byte of a range.
    memories: HashMap<Memory, BTreeMap<u64, Range>>,
    after: Vec<Vec<u32>>,
}

/// A range of bytes that the same launches touched.
#[derive(Clone, Debug)]
struct Range {
    to: u64,
    /// The launch that wrote them last.
    writer: Option<u32>,
    /// The launches that read them since.
    readers: Vec<u32>,
}

impl Order {
    /// Adds the next launch, which touches these bytes.
    fn push(&mut self, touched: &[Touched]) {
        let at = self.after.len() as u32;
        let mut waits: Vec<u32> = Vec::new();
        // Reads come first, so that a launch does not depend on itself.
        for one in touched
            .iter()
            .filter(|one| !one.written && one.from < one.to)
        {
            self.read(one, at, &mut waits);
        }
        for one in touched
            .iter()
            .filter(|one| one.written && one.from < one.to)
        {
            self.write(one, at, &mut waits);
        }
        waits.retain(|&earlier| earlier != at);
        waits.sort_unstable();
        waits.dedup();
        self.reduce(&mut waits);
        self.after.push(waits);
    }

    /// The ranges of a memory, split so that some of them are exactly these bytes. Bytes that no
    /// launch touched become ranges too.
    fn cut(&mut self, bytes: &Touched) -> &mut BTreeMap<u64, Range> {
        let ranges = self.memories.entry(bytes.memory).or_default();
        for end in [bytes.from, bytes.to] {
            let over = ranges
                .range_mut(..end)
                .next_back()
                .filter(|(_, range)| range.to > end);
            if let Some((_, range)) = over {
                let rest = range.clone();
                range.to = end;
                ranges.insert(end, rest);
            }
        }
        let mut from = bytes.from;
        let mut gaps = Vec::new();
        for (&start, range) in ranges.range(bytes.from..bytes.to) {
            if from < start {
                gaps.push((from, start));
            }
            from = range.to;
        }
        if from < bytes.to {
            gaps.push((from, bytes.to));
        }
        ranges.extend(gaps.into_iter().map(|(from, to)| {
            (
                from,
                Range {
                    to,
                    writer: None,
                    readers: Vec::new(),
                },
            )
        }));
        ranges
    }

    fn read(&mut self, bytes: &Touched, at: u32, waits: &mut Vec<u32>) {
        for (_, range) in self.cut(bytes).range_mut(bytes.from..bytes.to) {
            waits.extend(range.writer);
            if range.readers.last() != Some(&at) {
                range.readers.push(at);
            }
        }
    }

    fn write(&mut self, bytes: &Touched, at: u32, waits: &mut Vec<u32>) {
        let ranges = self.cut(bytes);
        let covered: Vec<u64> = ranges
            .range(bytes.from..bytes.to)
            .map(|(&from, _)| from)
            .collect();
        for range in covered.iter().filter_map(|from| ranges.remove(from)) {
            waits.extend(range.writer.into_iter().chain(range.readers));
        }
        ranges.insert(
            bytes.from,
            Range {
                to: bytes.to,
                writer: Some(at),
                readers: Vec::new(),
            },
        );
    }

    /// Removes launches that another of them depends on, directly or not, as far as visiting
    /// [`WALK_MAX`] steps tells.
    fn reduce(&self, waits: &mut Vec<u32>) {
        let Some(&first) = waits.first() else { return };
        let mut seen = std::collections::HashSet::new();
        let mut open: Vec<u32> = waits.clone();
        while let Some(next) = open.pop() {
            for &earlier in &self.after[next as usize] {
                if earlier >= first && seen.len() < WALK_MAX && seen.insert(earlier) {
                    open.push(earlier);
                }
            }
        }
        waits.retain(|wait| !seen.contains(wait));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random launches on few bytes: each pair that conflicts is connected, and any other pair only
    /// through pairs that conflict.
    #[test]
    fn launches_depend_on_those_they_conflict_with_and_no_others() {
        arbtest::arbtest(|u| {
            let count = u.int_in_range(1..=12usize)?;
            let mut launches: Vec<Vec<Touched>> = Vec::new();
            for _ in 0..count {
                let mut own = Vec::new();
                for _ in 0..u.int_in_range(0..=3)? {
                    let from = u.int_in_range(0..=11u64)?;
                    let to = from + u.int_in_range(0..=4u64)?;
                    let memory = if u.ratio(1, 4)? {
                        Memory::Variable(1)
                    } else {
                        Memory::Slab
                    };
                    own.push(Touched {
                        memory,
                        from,
                        to,
                        written: u.arbitrary()?,
                    });
                }
                launches.push(own);
            }
            let mut order = Order::default();
            launches.iter().for_each(|own| order.push(own));
            let conflict = |a: usize, b: usize| {
                launches[a]
                    .iter()
                    .any(|x| launches[b].iter().any(|y| x.conflicts(y)))
            };
            // By the definition: the transitive closures are the same.
            let closure = |waits: &dyn Fn(usize, usize) -> bool| {
                let mut after: Vec<Vec<bool>> = Vec::with_capacity(count);
                for b in 0..count {
                    let mut own = vec![false; count];
                    for a in (0..b).rev().filter(|&a| waits(a, b)) {
                        own[a] = true;
                        own.iter_mut()
                            .zip(&after[a])
                            .for_each(|(own, earlier)| *own |= earlier);
                    }
                    after.push(own);
                }
                after
            };
            let found = closure(&|a, b| order.after[b].contains(&(a as u32)));
            assert_eq!(found, closure(&conflict), "{launches:?}: {:?}", order.after);
            // None of the dependencies follows from the others.
            for (b, waits) in order.after.iter().enumerate() {
                for &a in waits {
                    let without = closure(&|x, y| {
                        order.after[y].contains(&(x as u32)) && (x, y) != (a as usize, b)
                    });
                    assert!(!without[b][a as usize], "{launches:?}: {:?}", order.after);
                }
            }
            Ok(())
        });
    }
}
