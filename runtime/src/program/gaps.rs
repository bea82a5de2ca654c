//! Gaps of the slab: bytes that a plan leaves free while a value lives.

use slabwise_planner::{ALIGN, Lifetime};

use super::Planned;

/// The gaps of the slab, ascending, that no planned buffer uses during a lifetime. The last has no
/// end, because the slab may be larger than the plan.
pub(crate) fn gaps(
    planned: impl Iterator<Item = (Planned, Lifetime)>,
    life: Lifetime,
) -> Vec<(u64, u64)> {
    let during = |other: &Lifetime| other.start < life.end && life.start < other.end;
    let mut taken: Vec<Planned> = planned
        .filter(|(p, other)| p.bytes > 0 && during(other))
        .map(|(p, _)| p)
        .collect();
    taken.sort_unstable_by_key(|p| p.offset);
    let (mut gaps, mut at) = (Vec::new(), 0);
    for part in taken {
        if part.offset > at {
            gaps.push((at, part.offset));
        }
        at = at.max((part.offset + part.bytes).next_multiple_of(ALIGN));
    }
    gaps.push((at, u64::MAX));
    gaps
}

/// The smallest free part of the gaps that is large enough; `taken` are the parts in use,
/// ascending.
pub(crate) fn fit(
    gaps: &[(u64, u64)],
    taken: &[Planned],
    bytes: u64,
    slab: u64,
) -> Option<Planned> {
    let mut best: Option<(u64, u64)> = None;
    let mut offer = |from: u64, to: u64| {
        let room = to.saturating_sub(from);
        if room >= bytes && best.is_none_or(|(_, smallest)| room < smallest) {
            best = Some((from, room));
        }
    };
    for &(from, to) in gaps {
        let (mut at, to) = (from, to.min(slab));
        for part in taken
            .iter()
            .filter(|p| p.offset < to && p.offset + p.bytes > from)
        {
            offer(at, part.offset);
            at = at.max(part.offset + part.bytes);
        }
        offer(at, to);
    }
    best.map(|(offset, _)| Planned { offset, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random rectangles over steps × bytes, and random requests: no part that was lent overlaps a
    /// planned or lent one at the same step, and a request is refused only if no offset would do.
    #[test]
    fn suballocated_parts_overlap_no_live_bytes() {
        arbtest::arbtest(|u| {
            let steps = u.int_in_range(1..=12u64)?;
            let life = |u: &mut arbtest::arbitrary::Unstructured<'_>| -> arbtest::arbitrary::Result<Lifetime> {
                let start = u.int_in_range(0..=steps - 1)?;
                Ok(Lifetime { start, end: u.int_in_range(start + 1..=steps)? })
            };
            let part = |u: &mut arbtest::arbitrary::Unstructured<'_>| -> arbtest::arbitrary::Result<Planned> {
                Ok(Planned { offset: ALIGN * u.int_in_range(0..=20u64)?, bytes: u.int_in_range(0..=5 * ALIGN)? })
            };
            let mut planned = Vec::new();
            for _ in 0..u.int_in_range(0..=8usize)? {
                planned.push((part(u)?, life(u)?));
            }
            let mut wanted = Vec::new();
            for _ in 0..u.int_in_range(1..=6usize)? {
                wanted.push((u.int_in_range(1..=6u64)? * ALIGN, life(u)?));
            }
            wanted.sort_by_key(|(_, life)| life.start);
            let slab = 24 * ALIGN;
            let mut lent: Vec<(Planned, Lifetime)> = Vec::new();
            for (bytes, life) in wanted {
                let mut now: Vec<Planned> = lent
                    .iter()
                    .filter(|(_, l)| l.end > life.start)
                    .map(|(p, _)| *p)
                    .collect();
                now.sort_unstable_by_key(|p| p.offset);
                let found = fit(&gaps(planned.iter().copied(), life), &now, bytes, slab);
                let clear = |offset: u64| {
                    let meets = |(p, l): &(Planned, Lifetime)| {
                        let in_time = l.start < life.end && life.start < l.end;
                        in_time
                            && p.bytes > 0
                            && p.offset < offset + bytes
                            && offset < p.offset + p.bytes
                    };
                    offset + bytes <= slab && !planned.iter().chain(&lent).any(meets)
                };
                match found {
                    Some(part) => {
                        assert!(
                            clear(part.offset)
                                && part.bytes == bytes
                                && part.offset.is_multiple_of(ALIGN)
                        );
                        lent.push((part, life));
                    }
                    None => assert!(
                        (0..=24).all(|k| !clear(k * ALIGN)),
                        "{bytes} bytes would fit"
                    ),
                }
            }
            Ok(())
        });
    }
}
