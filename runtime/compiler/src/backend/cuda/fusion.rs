//! Horizontal fusion: independent steps of a program that a device runs by one launch.
//!
//! The updates of an optimizer are the same small loop over many parameters, and so are the sums
//! over a batch that make the gradients of biases: loops that lower to the same function
//! ([`slabwise_cuda::lower_fused`]). In the plan's order they are apart, because each runs as soon
//! as its gradient is there, so that the gradient's bytes can be reused. Here they are grouped
//! without another plan: a step moves to the turn of a later one only past steps that touch none of
//! the bytes it writes and write none of the bytes it reads. Therefore every step computes the same
//! value, and offsets and peak stay as planned.

use slabwise_cuda::{Lowered, Target};

use super::dependencies::{Guarded, Touched, touched};
use crate::backend::{Kernel, LoadRequest};
use crate::error::{Error, Result};

/// The most steps of a group, because their arguments are counted in 16 bits.
const MEMBERS_MAX: usize = 1000;

/// Steps of a program that a recorded run does by one launch, at the turn of the last of them.
pub(super) struct Group {
    /// The steps, ascending.
    pub members: Vec<usize>,
    /// The fused kernel: its arguments are those of one step after those of the other.
    pub kernel: Lowered,
}

/// The groups of a program's steps.
pub(super) fn groups(request: &LoadRequest<'_>, target: Target) -> Result<Vec<Group>> {
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
    let mut groups = Vec::new();
    for (_, steps) in kinds {
        for members in group_steps(&steps, &clear) {
            let own: Vec<_> = members.iter().filter_map(|&at| specs[at]).collect();
            let target = Target {
                guarded: guarded(members[0]),
                ..target
            };
            let mut lowered =
                slabwise_cuda::lower_fused(&own, &bounds, &target).map_err(invalid)?;
            if let (Some(one), true) = (lowered.pop(), lowered.is_empty()) {
                groups.push(Group {
                    members,
                    kernel: one.lowered,
                });
            }
        }
    }
    Ok(groups)
}

/// The groups of two and more of these steps, ascending, that can run at the turn of their last
/// step; `clear` tells whether two steps may be exchanged. A group is closed when one of its steps
/// cannot move further, which makes the fewest groups.
fn group_steps(steps: &[usize], clear: &dyn Fn(usize, usize) -> bool) -> Vec<Vec<usize>> {
    let (mut found, mut open) = (Vec::new(), Vec::<usize>::new());
    for &next in steps {
        let from = open.last().map_or(0, |last| last + 1);
        let moves = |&at: &usize| (from..=next).all(|other| clear(at, other));
        if open.len() == MEMBERS_MAX || !open.iter().all(moves) {
            found.push(std::mem::take(&mut open));
        }
        open.push(next);
    }
    found.push(open);
    found.retain(|group| group.len() > 1);
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
            let groups: Vec<Vec<usize>> = kinds
                .iter()
                .flat_map(|steps| group_steps(steps, &clear))
                .collect();
            // When each step runs, by the definition: with the last of its group.
            let turn = |at: usize| {
                groups
                    .iter()
                    .find(|g| g.contains(&at))
                    .map_or(at, |g| g[g.len() - 1])
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
            let members: Vec<usize> = groups.concat();
            assert_eq!(members.iter().collect::<HashSet<_>>().len(), members.len());
            // As few launches as any choice of turns could have: every step has one in its reach.
            for steps in kinds.iter().filter(|steps| !steps.is_empty()) {
                let reaches =
                    |at: usize, to: usize| at <= to && (at + 1..=to).all(|other| clear(at, other));
                let enough = |turns: &u32| {
                    let chosen = |at: &usize| turns >> at & 1 != 0;
                    steps.iter().all(|&at| {
                        steps
                            .iter()
                            .filter(|to| chosen(to))
                            .any(|&to| reaches(at, to))
                    })
                };
                let fewest = (1u32..1 << count).filter(enough).map(u32::count_ones).min();
                let taken: HashSet<usize> = steps.iter().map(|&at| turn(at)).collect();
                assert_eq!(
                    Some(taken.len() as u32),
                    fewest,
                    "{steps:?} of {bytes:?} in {groups:?}"
                );
            }
            Ok(())
        });
    }
}
