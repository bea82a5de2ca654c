//! Statistics of a pool.

use super::block::{State, Table};

/// Statistics of a pool. Bytes, unless the name says that it counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Bytes of the blocks in use, rounding included.
    pub bytes_in_use: u64,
    /// The most that `bytes_in_use` has been.
    pub peak_bytes_in_use: u64,
    /// The most that the pool may take from the driver; 0 before its first use.
    pub bytes_limit: u64,
    /// Bytes taken from the driver, in use or kept.
    pub pool_bytes: u64,
    /// The most that `pool_bytes` has been.
    pub peak_pool_bytes: u64,
    /// Bytes of the largest free block.
    pub largest_free_block_bytes: u64,
    /// The largest request so far, in bytes.
    pub largest_alloc_bytes: u64,
    /// Bytes of the blocks in use beyond the requested ones: rounding, and rests too small to split
    /// off.
    pub rounding_waste_bytes: u64,
    /// Requests served.
    pub num_allocs: u64,
    /// Blocks given back.
    pub num_frees: u64,
    /// Requests that free memory could serve.
    pub cache_hits: u64,
    /// Requests that needed more.
    pub cache_misses: u64,
    /// Calls that took memory from the driver.
    pub driver_allocs: u64,
    /// Calls that gave memory back to the driver.
    pub driver_frees: u64,
    /// Searches repeated after memory had been returned, synchronized, or moved.
    pub retries: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// Times that blocks were moved.
    pub defrags: u64,
    /// Bytes copied by that.
    pub defrag_bytes: u64,
    /// Bytes of free pages that were mapped elsewhere instead, which copies nothing.
    pub remapped_bytes: u64,
    /// Nanoseconds that moving blocks took.
    pub defrag_ns: u64,
}

/// Measures of a pool's fragmentation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fragmentation {
    /// Bytes of all free blocks.
    pub free_bytes: u64,
    /// Bytes of the largest.
    pub largest_bytes: u64,
    /// 1 − largest / free: the part of the free memory that the largest request it can serve
    /// leaves. 0 if nothing is free.
    pub by_largest: f64,
    /// 1 − Σ free² / (Σ free)²: the chance that two free bytes lie in different blocks. 0 if
    /// nothing is free.
    pub by_squares: f64,
}

impl Fragmentation {
    /// The fragmentation of free blocks with these sizes.
    pub fn of(sizes: impl Iterator<Item = u64>) -> Fragmentation {
        let (mut sum, mut largest, mut squares) = (0u64, 0, 0.0);
        for bytes in sizes {
            sum += bytes;
            largest = largest.max(bytes);
            squares += bytes as f64 * bytes as f64;
        }
        if sum == 0 {
            return Fragmentation::default();
        }
        let part = |x: f64| (1.0 - x).clamp(0.0, 1.0);
        let all = sum as f64;
        Fragmentation {
            free_bytes: sum,
            largest_bytes: largest,
            by_largest: part(largest as f64 / all),
            by_squares: part(squares / (all * all)),
        }
    }

    pub(crate) fn of_table(table: &Table) -> Fragmentation {
        Fragmentation::of(
            table
                .iter()
                .filter(|(_, b)| b.state == State::Free)
                .map(|(_, b)| b.bytes),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragmentation_follows_its_formulas() {
        assert_eq!(
            Fragmentation::of(std::iter::empty()),
            Fragmentation::default()
        );
        let whole = Fragmentation::of([4096].into_iter());
        assert_eq!(
            (whole.free_bytes, whole.by_largest, whole.by_squares),
            (4096, 0.0, 0.0)
        );
        let two = Fragmentation::of([100, 300].into_iter());
        assert_eq!((two.largest_bytes, two.by_largest), (300, 0.25));
        assert_eq!(two.by_squares, 1.0 - (10_000.0 + 90_000.0) / 160_000.0);
    }
}
