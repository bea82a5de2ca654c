//! The contracted axis of a product in blocks.

use std::ops::Range;

use super::even;

/// A contracted axis in k-blocks, and these in sub-blocks.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct KBlocks {
    total: usize,
    /// The size of a k-block but the last, of a sub-block but the last, and the sub-blocks of a
    /// k-block.
    k_block: usize,
    block: usize,
    blocks: usize,
}

impl KBlocks {
    /// `total` in k-blocks of `k_block`, in sub-blocks of at most `block`.
    pub fn new(total: usize, k_block: usize, block: usize) -> KBlocks {
        let block = even(k_block, block, 1);
        KBlocks {
            total,
            k_block,
            block,
            blocks: k_block.div_ceil(block),
        }
    }

    /// The size of every k-block but the last.
    pub fn size(&self) -> usize {
        self.k_block
    }

    pub fn count(&self) -> usize {
        self.total.div_ceil(self.k_block)
    }

    pub fn blocks(&self, k_block: usize) -> Range<usize> {
        k_block * self.blocks..(k_block + 1) * self.blocks
    }

    /// The steps of a sub-block; it may be empty in the last k-block.
    pub fn range(&self, block: usize) -> Range<usize> {
        // Usually a k-block has one sub-block.
        let (k_block, at) = if self.blocks == 1 {
            (block, 0)
        } else {
            (block / self.blocks, block % self.blocks)
        };
        let of = |at: usize| {
            (k_block * self.k_block + (at * self.block).min(self.k_block)).min(self.total)
        };
        of(at)..of(at + 1)
    }
}
