//! Rectangles of time × bytes: the bytes that items need, their unions, and their overlaps.

use crate::lifetime::Lifetime;
use crate::problem::{Gap, Item, Problem, Window};
use std::collections::BTreeMap;

/// Bytes that an item needs for an interval of time; neither is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rect {
    /// The index of the item.
    pub item: usize,
    /// The first step.
    pub start: u64,
    /// The step after the last one.
    pub end: u64,
    /// The first byte.
    pub low: u64,
    /// The byte after the last one.
    pub high: u64,
}

impl Rect {
    /// The same rectangle, moved up.
    pub(crate) fn above(self, base: u64) -> Rect {
        Rect {
            low: self.low + base,
            high: self.high + base,
            ..self
        }
    }
}

impl Problem {
    /// The rectangles that the items need, bytes counted from the offset of each.
    pub fn rects(&self) -> Vec<Rect> {
        let mut gaps = self.gaps.clone();
        gaps.sort_by_key(|gap| gap.item);
        let mut gaps = gaps.chunk_by(|a, b| a.item == b.item).peekable();
        let mut rects = Vec::with_capacity(self.items.len());
        for (item, it) in self.items.iter().enumerate() {
            needed(
                item,
                it,
                0,
                gaps.next_if(|gaps| gaps[0].item == item).unwrap_or(&[]),
                &mut rects,
            );
        }
        rects
    }
}

/// Adds the rectangles that an item, placed at byte `above`, needs outside of its gaps and in their
/// windows.
pub(crate) fn needed(item: usize, it: &Item, above: u64, gaps: &[Gap], rects: &mut Vec<Rect>) {
    if !it.needs_space() {
        return;
    }
    let whole = Window {
        low: 0,
        high: it.size,
    };
    let mut add = |life: Lifetime, window: Window| {
        if life.is_empty() || window.low >= window.high {
            return;
        }
        let rect = Rect {
            item,
            start: life.start,
            end: life.end,
            low: above + window.low,
            high: above + window.high,
        };
        match rects.last_mut().filter(|last| {
            last.item == item
                && last.end == rect.start
                && (last.low, last.high) == (rect.low, rect.high)
        }) {
            Some(last) => last.end = rect.end,
            None => rects.push(rect),
        }
    };
    // Between two events the same gaps are open: their windows, sorted by either end.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * gaps.len());
    for (index, gap) in gaps.iter().enumerate() {
        let life = Lifetime::new(
            gap.life.start.max(it.life.start),
            gap.life.end.min(it.life.end),
        );
        if !life.is_empty() {
            events.extend([(life.start, true, index), (life.end, false, index)]);
        }
    }
    events.sort_unstable();
    let (mut lows, mut highs) = (BTreeMap::new(), BTreeMap::new());
    let mut since = it.life.start;
    for (time, opens, index) in events {
        if time > since {
            add(
                Lifetime::new(since, time),
                left(&lows, &highs).unwrap_or(whole),
            );
            since = time;
        }
        let window = gaps[index].window.unwrap_or(Window { low: 0, high: 0 });
        for (ends, end) in [(&mut lows, window.low), (&mut highs, window.high)] {
            let count = ends.entry(end).or_insert(0usize);
            *count = if opens { *count + 1 } else { *count - 1 };
            if *count == 0 {
                ends.remove(&end);
            }
        }
    }
    add(Lifetime::new(since, it.life.end), whole);
}

/// The intersection of all open windows.
fn left(lows: &BTreeMap<u64, usize>, highs: &BTreeMap<u64, usize>) -> Option<Window> {
    let (low, _) = lows.last_key_value()?;
    let (high, _) = highs.first_key_value()?;
    Some(Window {
        low: *low,
        high: *high,
    })
}

/// The same area as rectangles that do not overlap. Each carries the item of one of its sources.
pub(crate) fn union(rects: &[Rect]) -> Vec<Rect> {
    if rects.len() < 2 {
        return rects.to_vec();
    }
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * rects.len());
    for (index, rect) in rects.iter().enumerate() {
        events.extend([(rect.start, true, index), (rect.end, false, index)]);
    }
    events.sort_unstable();
    // If all begin at one byte, the highest covers the rest.
    let flat = rects.iter().all(|rect| rect.low == rects[0].low);
    let mut living: BTreeMap<(u64, u64, usize), ()> = BTreeMap::new();
    let mut open: Vec<Rect> = Vec::new();
    let mut done: Vec<Rect> = Vec::new();
    for at_once in events.chunk_by(|a, b| a.0 == b.0) {
        let time = at_once[0].0;
        for &(_, starts, index) in at_once {
            let key = (rects[index].low, rects[index].high, index);
            if starts {
                living.insert(key, ());
            } else {
                living.remove(&key);
            }
        }
        let mut covered: Vec<Rect> = Vec::new();
        let mut cover = |&(low, high, index): &(u64, u64, usize)| match covered
            .last_mut()
            .filter(|last| low <= last.high)
        {
            Some(last) => last.high = last.high.max(high),
            None => covered.push(Rect {
                item: rects[index].item,
                start: time,
                end: time,
                low,
                high,
            }),
        };
        if flat {
            living
                .last_key_value()
                .into_iter()
                .for_each(|(key, ())| cover(key));
        } else {
            living.keys().for_each(cover);
        }
        // A rectangle that continues unchanged is not split.
        for mut rect in std::mem::take(&mut open) {
            match covered
                .iter_mut()
                .find(|new| (new.low, new.high) == (rect.low, rect.high))
            {
                Some(new) => *new = rect,
                None => {
                    rect.end = time;
                    done.push(rect);
                }
            }
        }
        open = covered;
    }
    done
}

/// Two items that need a byte at the same time, and that time, if there are any. A sweep over time
/// with the live rectangles sorted by bytes: as long as nothing overlaps, a new rectangle can only
/// overlap its neighbours.
pub(crate) fn overlap(rects: &[Rect]) -> Option<(usize, usize, u64)> {
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * rects.len());
    for (index, rect) in rects.iter().enumerate() {
        events.extend([(rect.start, true, index), (rect.end, false, index)]);
    }
    events.sort_unstable();
    let mut living: BTreeMap<u64, usize> = BTreeMap::new();
    for (time, arrives, index) in events {
        let rect = &rects[index];
        if !arrives {
            living.remove(&rect.low);
            continue;
        }
        if let Some((_, &other)) = living
            .range(..rect.high)
            .next_back()
            .filter(|&(_, &other)| rects[other].high > rect.low)
        {
            return Some((rects[other].item, rect.item, time));
        }
        living.insert(rect.low, index);
    }
    None
}
