//! The slots of a prefetch queue, and the batch that each holds.

use std::collections::VecDeque;

/// A circular buffer of batches: batch `b` lies in slot `b` modulo their number, from when it is
/// filled until it is taken.
#[derive(Debug)]
pub(super) struct Slots<Held> {
    slots: u64,
    filled: u64,
    held: VecDeque<Held>,
}

impl<Held> Slots<Held> {
    pub fn new(slots: usize) -> Self {
        Slots {
            slots: slots as u64,
            filled: 0,
            held: VecDeque::with_capacity(slots),
        }
    }

    /// The slot of the next batch, if it is free.
    pub fn free(&self) -> Option<u64> {
        ((self.held.len() as u64) < self.slots).then(|| self.filled % self.slots)
    }

    /// The slot of the batch that is taken next, if there is one.
    pub fn first(&self) -> Option<u64> {
        let taken = self.filled - self.held.len() as u64;
        (!self.held.is_empty()).then(|| taken % self.slots)
    }

    /// Notes that the next slot is filled.
    pub fn fill(&mut self, held: Held) {
        debug_assert!(self.free().is_some(), "a slot is filled that is not free");
        self.filled += 1;
        self.held.push_back(held);
    }

    /// Takes the first batch; its slot is free from now on.
    pub fn take(&mut self) -> Option<Held> {
        self.held.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An access of a slot: the first write or the last read of a batch.
    #[derive(Clone, Copy, Debug)]
    enum Access {
        Write { batch: u64, slot: u64 },
        Read { batch: u64, slot: u64 },
    }

    /// Checks the definition on the accesses alone: each batch is read in its turn from the slot
    /// that it was written to, and no slot is written before the last read of the batch that it
    /// held.
    fn check(slots: u64, accesses: &[Access]) -> Result<(), String> {
        let mut holds: Vec<Option<u64>> = vec![None; slots as usize];
        let (mut written, mut read) = (0, 0);
        for access in accesses {
            match *access {
                Access::Write { batch, slot } => {
                    let there = holds
                        .get_mut(slot as usize)
                        .ok_or_else(|| format!("there is no slot {slot}"))?;
                    if let Some(held) = there.replace(batch) {
                        return Err(format!(
                            "batch {batch} is written to slot {slot} before the last read of batch {held}"
                        ));
                    }
                    if batch != written {
                        return Err(format!(
                            "batch {batch} is written when batch {written} is due"
                        ));
                    }
                    written += 1;
                }
                Access::Read { batch, slot } => {
                    let held = holds.get_mut(slot as usize).and_then(Option::take);
                    if held != Some(batch) {
                        return Err(format!(
                            "batch {batch} is read from slot {slot}, which holds {held:?}"
                        ));
                    }
                    if batch != read {
                        return Err(format!("batch {batch} is read when batch {read} is due"));
                    }
                    read += 1;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn no_slot_is_written_before_its_batch_was_read() {
        arbtest::arbtest(|u| {
            let slots = u.int_in_range(1..=4u64)?;
            let mut queue = Slots::new(slots as usize);
            let mut accesses = Vec::new();
            let mut batch = 0;
            for _ in 0..u.int_in_range(0..=30)? {
                if u.ratio(3, 5)? {
                    let Some(slot) = queue.free() else { continue };
                    assert_eq!(slot, batch % slots);
                    queue.fill(batch);
                    accesses.push(Access::Write { batch, slot });
                    batch += 1;
                } else {
                    let (first, taken) = (queue.first(), queue.take());
                    assert_eq!(first.is_some(), taken.is_some());
                    accesses.extend(
                        first
                            .zip(taken)
                            .map(|(slot, batch)| Access::Read { batch, slot }),
                    );
                }
            }
            check(slots, &accesses).expect("right");
            Ok(())
        });
    }

    #[test]
    fn errors_name_the_slot_and_the_batch() {
        let write = |batch, slot| Access::Write { batch, slot };
        let read = |batch, slot| Access::Read { batch, slot };
        let wrong = |slots, accesses: &[Access]| check(slots, accesses).expect_err("wrong");
        assert_eq!(
            wrong(1, &[write(0, 0), write(1, 0)]),
            "batch 1 is written to slot 0 before the last read of batch 0"
        );
        assert_eq!(
            wrong(2, &[write(0, 0), read(0, 1)]),
            "batch 0 is read from slot 1, which holds None"
        );
        assert_eq!(
            wrong(2, &[write(0, 0), write(1, 1), read(1, 1)]),
            "batch 1 is read when batch 0 is due"
        );
        assert_eq!(
            wrong(2, &[write(1, 1)]),
            "batch 1 is written when batch 0 is due"
        );
        assert_eq!(wrong(1, &[write(0, 1)]), "there is no slot 1");
        assert_eq!(check(1, &[write(0, 0), read(0, 0), write(1, 0)]), Ok(()));
    }
}
