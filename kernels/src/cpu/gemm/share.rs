//! How many blocks the result of a product is cut into, so that threads can share them.

use super::{MC, SPLIT_NC, even};

/// Blocks for each thread from which on it does not matter whether they are equal.
const EQUAL_BLOCKS: usize = 24;

/// Blocks of the result below which a long contracted axis is split.
pub(super) const SPLIT_BLOCKS: usize = 8;
/// Fewest k-blocks in a split.
pub(super) const SPLIT_K_BLOCKS: usize = 4;

/// NC, or less where `threads` finish sooner with narrower blocks, because these can be shared more
/// evenly; `others`: blocks of the same columns.
pub(super) fn balanced(n: usize, nc: usize, others: usize, threads: usize, width: usize) -> usize {
    let columns = |nc: usize| {
        let blocks = others.saturating_mul(n.div_ceil(nc));
        blocks.div_ceil(threads.max(1)).saturating_mul(nc)
    };
    let blocks = n.div_ceil(nc);
    let narrower =
        (blocks + 1..=blocks + threads).map(|blocks| even(n, n.div_ceil(blocks), width).min(nc));
    // Narrow blocks take longer each.
    narrower
        .min_by_key(|&nc| columns(nc))
        .filter(|&narrow| columns(narrow).saturating_mul(16) <= columns(nc).saturating_mul(15))
        .unwrap_or(nc)
}

/// The desired number of blocks of the result: enough that other threads can take some from threads
/// that fall behind.
pub(in super::super) fn wanted(threads: usize) -> usize {
    3 * threads
}

/// Fewer than `rows` rows in a block, if there are fewer blocks than threads; `others`: blocks side
/// by side.
pub(in super::super) fn share_rows(m: usize, rows: usize, others: usize, threads: usize) -> usize {
    if others.saturating_mul(m.div_ceil(rows)) < threads {
        rows.min(even(m, m.div_ceil(threads.div_ceil(others.max(1))), 1))
    } else {
        rows
    }
}

/// Rows of a block that give each thread the same number of equal blocks, if blocks are so few that
/// one more of them for one thread, or a smaller last one, would be felt; `others`: blocks side by
/// side.
pub(super) fn equal_rows(m: usize, rows: usize, others: usize, threads: usize) -> usize {
    let count = m.div_ceil(rows);
    let blocks = others.saturating_mul(count);
    if threads == 1 || count == 0 || blocks >= EQUAL_BLOCKS * threads {
        return rows;
    }
    let shared = match blocks.is_multiple_of(threads) {
        true => count,
        false => count.next_multiple_of(threads),
    };
    match m.div_ceil(shared) {
        equal if equal >= MC / 3 => equal,
        _ => rows,
    }
}

/// Blocks of a result whose contracted axis is split.
pub(in super::super) fn split_blocks(groups: usize, rows: usize, columns: usize) -> usize {
    groups
        .saturating_mul(rows.div_ceil(MC))
        .saturating_mul(columns.div_ceil(SPLIT_NC))
        .max(1)
}

/// The number of parts into which a contracted axis of `k_blocks` k-blocks is split: more than one
/// when the result alone has too few blocks to share.
pub(in super::super) fn splits(blocks: usize, k_blocks: usize) -> usize {
    (SPLIT_BLOCKS / blocks)
        .min(k_blocks / SPLIT_K_BLOCKS)
        .max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrower_blocks_where_threads_share_them_more_evenly() {
        // With six blocks the last has 32 columns, and with fifteen one thread has eight.
        assert_eq!(balanced(512, 96, 1, 2, 32), 64);
        assert_eq!(balanced(512, 192, 5, 2, 32), 128);
        // Two blocks each.
        assert_eq!(balanced(256, 64, 1, 2, 32), 64);
        for (n, nc, others, threads) in [(0, 32, 1, 2), (7, 32, 3, 5), (1000, 992, 1, 3)] {
            let narrow = balanced(n, nc, others, threads, 32);
            assert!((32..=nc).contains(&narrow) && narrow.is_multiple_of(32));
        }
    }

    #[test]
    fn blocks_are_equal_where_one_more_would_cost_time() {
        // Four blocks of 128 rows instead of three of 168 and a small one; three become four.
        assert_eq!(equal_rows(512, 168, 1, 2), 128);
        assert_eq!(equal_rows(500, 168, 1, 2), 125);
        // Thirteen blocks, of which the last is small, become fourteen, and twice so many stay.
        assert_eq!(equal_rows(2048, 168, 1, 2), 147);
        assert_eq!(equal_rows(2048, 168, 2, 2), 158);
        // Too small blocks, no rows, and one thread.
        assert_eq!(equal_rows(60, 60, 1, 2), 60);
        assert_eq!(equal_rows(0, 1, 1, 2), 1);
        assert_eq!(equal_rows(512, 168, 1, 1), 168);
    }

    /// A bound of sizes may be absurd where another one is 0.
    #[test]
    fn more_blocks_than_can_be_counted() {
        assert_eq!(balanced(512, 96, usize::MAX, 2, 32), 96);
        assert_eq!(share_rows(512, 168, usize::MAX, 2), 168);
        assert_eq!(equal_rows(512, 168, usize::MAX, 2), 168);
    }
}
