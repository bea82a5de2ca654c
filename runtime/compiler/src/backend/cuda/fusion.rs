//! Horizontal fusion: independent steps of a program are grouped into one launch.
//!
//! The updates of an optimizer are the same small loop over many parameters, and so are the sums
//! over a batch that make the gradients of biases: loops that lower to the same function
//! ([`slabwise_cuda::lower_fused`]); so are conversions of weights to halves. In the plan's order
//! they are far apart, because each runs as soon as its gradient exists, or as late as its result
//! is needed, so that bytes can be reused. This pass groups them without another plan: a step moves
//! to the turn of an earlier or a later one only past steps that touch none of the bytes it writes
//! and write none of the bytes it reads. Therefore every step computes the same value, and offsets
//! and peak stay as planned.

use slabwise_cuda::{Lowered, Target};

use super::dependencies::{Guarded, Touched, touched};
use crate::backend::{Kernel, LoadRequest};
use crate::error::{Error, Result};

/// The most steps of a group, because their arguments are counted in 16 bits.
const MEMBERS_MAX: usize = 1000;

/// Steps of a program that a recorded run does by one launch.
pub(crate) struct Group {
    /// The steps, ascending.
    pub members: Vec<usize>,
    /// The step at whose turn they run.
    pub turn: usize,
    /// The fused kernel: its arguments are those of one step after those of the other.
    pub kernel: Lowered,
}

/// The groups of a program's steps.
pub(crate) fn groups(request: &LoadRequest<'_>, target: Target) -> Result<Vec<Group>> {
    if request.is_dynamic {
        // Runs of such programs are not recorded.
        return Ok(Vec::new());
    }
    let invalid = |e: slabwise_kernels::cpu::SpecError| Error::Internal(e.to_string());
    let bounds = request.bounds;
    let steps = &request.steps;
    let specs: Vec<_> = steps
        .iter()
        .map(|step| step.kernel.map(|kernel| Kernel::spec(kernel)))
        .collect();
    let is_guarded = Guarded::of(steps);
    let guarded = |at: usize| is_guarded.step(&steps[at]);
    let all: Vec<Vec<Touched>> = steps.iter().map(|step| touched(step, is_guarded)).collect();
    let clear = |a: usize, b: usize| {
        all[a]
            .iter()
            .all(|x| all[b].iter().all(|y| !x.conflicts(y)))
    };
    // Steps of one function, in their order.
    let mut kinds: Vec<(String, Vec<usize>)> = Vec::new();
    for (at, spec) in specs.iter().enumerate() {
        let Some(spec) = spec else { continue };
        let Some(name) = slabwise_cuda::fused_name(
            spec,
            &bounds,
            &Target {
                guarded: guarded(at),
                ..target
            },
        )
        .map_err(invalid)?
        else {
            continue;
        };
        match kinds.iter_mut().find(|(known, _)| *known == name) {
            Some((_, steps)) => steps.push(at),
            None => kinds.push((name, vec![at])),
        }
    }
    let kinds: Vec<Vec<usize>> = kinds.into_iter().map(|(_, steps)| steps).collect();
    let mut groups = Vec::new();
    for Together { turn, members } in grouped(steps.len(), &kinds, &clear) {
        let own: Vec<_> = members.iter().filter_map(|&at| specs[at]).collect();
        let target = Target {
            guarded: guarded(turn),
            ..target
        };
        let mut lowered = slabwise_cuda::lower_fused(&own, &bounds, &target).map_err(invalid)?;
        // Others have moved past its members, so that there is no way back.
        let (Some(one), true) = (lowered.pop(), lowered.is_empty()) else {
            let several = format!("steps {members:?} of one function are not one launch");
            return Err(Error::Internal(several));
        };
        groups.push(Group {
            members,
            turn,
            kernel: one.lowered,
        });
    }
    Ok(groups)
}

/// Steps that run together.
#[derive(Debug, PartialEq)]
struct Together {
    /// The member at whose turn they run.
    turn: usize,
    /// The steps, ascending.
    members: Vec<usize>,
}

/// A step, and the turns from the first to the last to which it can move.
struct Reach {
    step: usize,
    first: usize,
    last: usize,
}

/// The groups of two and more of `count` steps, each of steps of one kind; `clear` tells whether
/// two steps may be exchanged. Kinds are grouped one after the other. A group is at the last turn
/// that the first step to be left behind can move to, which makes the fewest groups of a kind.
fn grouped(
    count: usize,
    kinds: &[Vec<usize>],
    clear: &dyn Fn(usize, usize) -> bool,
) -> Vec<Together> {
    // The steps that run at each turn.
    let mut turns: Vec<Vec<usize>> = (0..count).map(|step| vec![step]).collect();
    let mut found = Vec::new();
    for steps in kinds {
        let [Some(&least), Some(&most)] = [steps.first(), steps.last()] else {
            continue;
        };
        let reach = |&step: &usize| {
            let passes = |turn: &usize| turns[*turn].iter().all(|&other| clear(step, other));
            let before = (least..step).rev().take_while(passes).last();
            let behind = (step + 1..=most).take_while(passes).last();
            Reach {
                step,
                first: before.unwrap_or(step),
                last: behind.unwrap_or(step),
            }
        };
        let mut open: Vec<Reach> = steps.iter().map(reach).collect();
        while let Some(end) = open.iter().map(|reach| reach.last).min() {
            let Some(turn) = open.iter().map(|r| r.step).filter(|&at| at <= end).max() else {
                break;
            };
            // Those before the turn move past each other; those after it may conflict with them.
            let mut members: Vec<usize> = Vec::new();
            open.retain(|reach| {
                let fits = (reach.first..=reach.last).contains(&turn)
                    && members.len() < MEMBERS_MAX
                    && members.iter().all(|&other| clear(reach.step, other));
                if fits {
                    members.push(reach.step);
                }
                !fits
            });
            for reach in &mut open {
                // Others have to pass all that run at this turn now.
                if members.iter().any(|&member| !clear(reach.step, member)) {
                    if reach.step > turn {
                        reach.first = reach.first.max(turn + 1);
                    } else {
                        reach.last = reach.last.min(turn - 1);
                    }
                }
            }
            for &member in &members {
                turns[member].clear();
            }
            turns[turn].clone_from(&members);
            if members.len() > 1 {
                found.push(Together { turn, members });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Random steps on few bytes: groups leave the order of reads and writes of each byte as it
    /// was, and there are no fewer launches.
    #[test]
    fn steps_move_past_no_step_that_they_conflict_with() {
        arbtest::arbtest(|u| {
            let count = u.int_in_range(1..=9usize)?;
            let mut bytes: Vec<Vec<(u8, bool)>> = Vec::new();
            let mut kinds: Vec<Vec<usize>> = vec![Vec::new(); 3];
            for at in 0..count {
                let mut own = Vec::new();
                for _ in 0..u.int_in_range(0..=3)? {
                    own.push((u.int_in_range(0..=9u8)?, u.arbitrary()?));
                }
                bytes.push(own);
                if let Some(kind) = kinds.get_mut(u.int_in_range(0..=3usize)?) {
                    kind.push(at);
                }
            }
            let clear = |a: usize, b: usize| {
                bytes[a]
                    .iter()
                    .all(|x| bytes[b].iter().all(|y| x.0 != y.0 || !(x.1 || y.1)))
            };
            let groups = grouped(count, &kinds, &clear);
            let turn = |at: usize| {
                groups
                    .iter()
                    .find(|group| group.members.contains(&at))
                    .map_or(at, |group| group.turn)
            };
            for a in 0..count {
                for b in a + 1..count {
                    let swapped = turn(a) >= turn(b);
                    assert!(
                        !swapped || clear(a, b),
                        "{a} and {b} of {bytes:?} in {groups:?}"
                    );
                }
            }
            let members: Vec<usize> = groups.iter().flat_map(|g| g.members.clone()).collect();
            assert_eq!(members.iter().collect::<HashSet<_>>().len(), members.len());
            for group in &groups {
                assert!(group.members.len() > 1 && group.members.contains(&group.turn));
                assert!(group.members.is_sorted());
            }
            // The kind that is grouped first has at most as many launches as any choice of turns
            // would make: from both sides, or, as steps of the kind that conflict cannot meet, from
            // before them.
            let steps = &kinds[0];
            let taken: HashSet<usize> = steps.iter().map(|&at| turn(at)).collect();
            let fewest = |reaches: &dyn Fn(usize, usize) -> bool| {
                let enough = |turns: &u32| {
                    let chosen = |at: &usize| turns >> at & 1 != 0;
                    steps.iter().all(|&at| {
                        let mut chosen = steps.iter().filter(|to| chosen(to));
                        chosen.any(|&to| reaches(at, to))
                    })
                };
                let counts = (0u32..1 << count).filter(enough).map(u32::count_ones);
                counts.min().unwrap_or_default() as usize
            };
            let reaches = |at: usize, to: usize| {
                (at.min(to)..=at.max(to)).all(|other| other == at || clear(at, other))
            };
            let conflicts = |&a: &usize| steps.iter().any(|&b| a != b && !clear(a, b));
            let most = match steps.iter().any(conflicts) {
                true => fewest(&|at, to| at <= to && reaches(at, to)),
                false => fewest(&reaches),
            };
            assert!(taken.len() <= most, "{steps:?} of {bytes:?} in {groups:?}");
            Ok(())
        });
    }
}
