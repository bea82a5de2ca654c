//! Plans of copies compared with the best of all plans, for short schedules.

use super::{Engines, IdleInterval};
use crate::offload::Transfer;
use slabwise_packer::random::Random;

struct Case {
    costs: Vec<u64>,
    /// With all intervals applied.
    need: Vec<i64>,
    budget: i64,
    intervals: Vec<IdleInterval>,
    link: f64,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let mut below = |n: u64| random.below(n);
        let steps = 4 + below(5);
        let costs: Vec<u64> = (0..steps).map(|_| below(7)).collect();
        let need: Vec<i64> = (0..steps).map(|_| below(9) as i64).collect();
        let mut intervals: Vec<IdleInterval> = Vec::new();
        for _ in 0..1 + below(3) {
            let used = below(steps - 2) as u32;
            let read = used + 2 + below(steps - 2 - u64::from(used)) as u32;
            let value = below(u64::from(used) + 1) as u32;
            if intervals.iter().all(|a| a.value != value) {
                intervals.push(IdleInterval {
                    value,
                    made: value,
                    used,
                    read,
                    bytes: 1 + below(5) as i64,
                    is_on_host: false,
                });
            }
        }
        intervals.sort_by_key(|a| a.used);
        let budget = need.iter().copied().max().unwrap_or(0) + below(6) as i64;
        Case {
            costs,
            need,
            budget,
            intervals,
            link: [0.0, 0.5, 1.0, 2.0][below(4) as usize],
        }
    }

    /// The least time of all choices of copy steps, if all intervals must be applied.
    fn best(&self, engines: &mut Engines, chosen: &mut Vec<Transfer>) -> f64 {
        let Some(a) = self.intervals.get(chosen.len()) else {
            if !self.fits(chosen) {
                return f64::INFINITY;
            }
            engines.transfers.clone_from(chosen);
            return engines.time(&self.costs, &self.intervals);
        };
        let IdleInterval {
            value, used, read, ..
        } = *a;
        let mut best = f64::INFINITY;
        for gone in used + 1..read {
            for sent in value + 1..=gone {
                for back in gone + 1..=read {
                    chosen.push(Transfer {
                        value,
                        sent,
                        used,
                        gone,
                        back,
                        read,
                    });
                    best = best.min(self.best(engines, chosen));
                    chosen.pop();
                }
            }
        }
        best
    }

    fn fits(&self, transfers: &[Transfer]) -> bool {
        let present = |t: &Transfer, p: u32| t.used < p && p < t.gone || t.back <= p && p < t.read;
        (0u32..).zip(&self.need).all(|(p, need)| {
            let bytes = transfers
                .iter()
                .zip(&self.intervals)
                .filter(|(t, _)| present(t, p))
                .map(|(_, a)| a.bytes);
            need + bytes.sum::<i64>() <= self.budget
        })
    }
}

#[test]
fn copies_are_planned_about_as_well_as_they_can_be() {
    let mut random = Random(7);
    let (mut planned, mut best, mut lost) = (0, 0, 0.0);
    for _ in 0..600 {
        let case = Case::random(&mut random);
        let mut engines = Engines::new(case.link);
        let time = engines
            .plan(
                &case.costs,
                &case.need,
                case.budget,
                &case.intervals,
                f64::INFINITY,
            )
            .expect("no limit");
        if !engines.infeasible.is_empty() {
            continue;
        }
        assert!(
            case.fits(&engines.transfers) && engines.peak <= case.budget,
            "{:?}",
            engines.transfers
        );
        let least = case.best(&mut engines.clone(), &mut Vec::new());
        assert!(time >= least - 1e-9, "{time} {least}");
        let base: u64 = case.costs.iter().sum();
        planned += 1;
        best += u32::from(time < least + 1e-9);
        lost += (time - least) / base.max(1) as f64;
        // With `most` below the time, the result is `None` or still the correct time.
        let asked = engines.plan(
            &case.costs,
            &case.need,
            case.budget,
            &case.intervals,
            time - 0.5,
        );
        assert!(asked.is_none_or(|again| again == time));
    }
    assert!(
        planned > 200 && best * 10 >= planned * 9 && lost < 0.02 * f64::from(planned),
        "{best} of {planned}, {lost}"
    );
}

/// Times indistinguishable from infinity end the traversals as others do.
#[test]
fn any_rate_comes_to_an_end() {
    for link in [1e15, 1e300, f64::MAX, f64::INFINITY, -1.0, f64::NAN] {
        let mut engines = Engines::new(link);
        let intervals = [(0, 1 << 40), (1, 1 << 61)].map(|(used, bytes)| IdleInterval {
            value: used,
            made: used,
            used,
            read: 5,
            bytes,
            is_on_host: false,
        });
        let time = engines.plan(
            &[1, u64::MAX, 1, 1, 1, 1],
            &[0; 6],
            1 << 40,
            &intervals,
            f64::MAX,
        );
        assert!(
            time.is_some_and(|time| time >= u64::MAX as f64),
            "{link}: {time:?}"
        );
        assert!(
            // The copy that a step waits for begins and ends before that step.
            engines.transfers.iter().all(|t| t.used < t.sent
                && t.sent <= t.gone
                && t.gone <= t.back
                && t.back <= t.read),
            "{link}: {:?}",
            engines.transfers
        );
    }
}
