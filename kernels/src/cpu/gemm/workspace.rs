//! Workspaces of products and convolutions: the buffers of each worker, and those that all share.

use std::sync::atomic::{AtomicUsize, Ordering};

use smallvec::SmallVec;

use crate::cpu::Team;

/// Alignment of every buffer in a workspace, in bytes.
const ALIGN: usize = 64;

/// Elements (and bytes of epilogue scratch) of each buffer of a workspace.
#[derive(Clone, Copy, Debug, Default)]
pub(in super::super) struct Space {
    pub left: usize,
    pub right: usize,
    pub micro_panel: usize,
    pub acc: usize,
    /// Bytes.
    pub scratch: usize,
    /// Sums of a block over a k-block that are not yet added to those of the k-blocks before.
    pub k_block: usize,
    /// Elements that all workers share: sums of splits, transformed weights, or tables.
    pub shared: usize,
}

impl Space {
    /// The buffers that suffice for both.
    pub fn max(&self, other: &Space) -> Space {
        Space {
            left: self.left.max(other.left),
            right: self.right.max(other.right),
            micro_panel: self.micro_panel.max(other.micro_panel),
            acc: self.acc.max(other.acc),
            scratch: self.scratch.max(other.scratch),
            k_block: self.k_block.max(other.k_block),
            shared: self.shared.max(other.shared),
        }
    }

    /// Byte offsets of left, right, micro-panel, block, k-block sums and scratch in a worker's
    /// part, and the part's size.
    fn offsets(&self) -> [usize; 7] {
        let mut at = 0;
        [
            self.left * 4,
            self.right * 4,
            self.micro_panel * 4,
            self.acc * 4,
            self.k_block * 4,
            self.scratch,
            0,
        ]
        .map(|bytes| {
            let here = at;
            at += bytes.next_multiple_of(ALIGN);
            here
        })
    }

    /// Bytes of a worker's part.
    pub fn part(&self) -> usize {
        self.offsets()[6]
    }

    /// Bytes of the workspace for `threads` workers.
    pub fn bytes(&self, threads: usize) -> u64 {
        let part = self.part() as u64;
        part.saturating_mul(threads as u64)
            .saturating_add((self.shared as u64).saturating_mul(4))
            .next_multiple_of(ALIGN as u64)
    }
}

/// The memory and threads of one run.
pub(in super::super) struct Resources<'a> {
    pub workspace: *mut u8,
    pub space: &'a Space,
    /// Workers that the workspace has room for.
    pub threads: usize,
    pub team: &'a Team,
}

// SAFETY: workers use disjoint parts of the workspace, distinguished by the slot each task loop
// runs in.
unsafe impl Sync for Resources<'_> {}

/// One worker's part of the workspace.
pub(in super::super) struct Slot {
    pub left: *mut f32,
    pub right: *mut f32,
    pub micro_panel: *mut f32,
    pub acc: *mut f32,
    pub k_block: *mut f32,
    pub scratch: *mut u8,
}

impl Resources<'_> {
    /// # Safety
    /// `slot` is below `threads`, and no other thread uses it now.
    unsafe fn slot(&self, slot: usize) -> Slot {
        let at = self.space.offsets();
        // SAFETY: the workspace has room for `threads` parts of this size.
        let part = |k: usize| unsafe { self.workspace.add(slot * at[6] + at[k]) };
        let [left, right, micro_panel, acc, k_block] = [0, 1, 2, 3, 4].map(|k| part(k).cast());
        Slot {
            left,
            right,
            micro_panel,
            acc,
            k_block,
            scratch: part(5),
        }
    }

    /// The elements that all workers share, after the workers' parts.
    pub fn shared(&self) -> *mut f32 {
        // SAFETY: the workspace holds them after the parts.
        unsafe { self.workspace.add(self.threads * self.space.part()).cast() }
    }

    /// Runs `task(number, slot, resident)` for every task, those of neighbouring numbers mostly on
    /// one worker (`serial`: all on one). A worker's tasks share `resident`, which is `usize::MAX`
    /// at first.
    ///
    /// # Safety
    /// The workspace has the bytes of the space, and no other thread uses it.
    pub unsafe fn tasks(
        &self,
        tasks: usize,
        serial: bool,
        task: impl Fn(usize, &Slot, &mut usize) + Sync,
    ) {
        if serial || self.threads.min(self.team.threads()) == 1 {
            // SAFETY: the caller's promise.
            let slot = unsafe { self.slot(0) };
            let mut resident = usize::MAX;
            return (0..tasks).for_each(|number| task(number, &slot, &mut resident));
        }
        let residents: SmallVec<[AtomicUsize; 64]> = (0..self.threads)
            .map(|_| AtomicUsize::new(usize::MAX))
            .collect();
        self.team.run(tasks, &|number, worker| {
            // SAFETY: a worker runs one task at a time, and there are as many slots as workers.
            let slot = unsafe { self.slot(worker) };
            let mut resident = residents[worker].load(Ordering::Relaxed);
            task(number, &slot, &mut resident);
            residents[worker].store(resident, Ordering::Relaxed);
        });
    }
}
