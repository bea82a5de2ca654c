//! Sums of rows in the memory of different ranks.

use std::ptr;

/// The elements that are added at a time, so that sums on the way stay in the nearest cache.
const BLOCK: usize = 1024;

/// Adds up `rows` rows of f32, of `bytes` bytes each: the element at a place of the result is the sum
/// of the elements at this place of all rows, in a tree over the rows whose fan-ins are the prime
/// factors of their number, ascending from the leaves. Addresses need not be aligned.
///
/// # Safety
/// `row` gives addresses at which so many bytes may be read, and `sum` is one at which so many may
/// be written; nothing else writes the rows or accesses the sum meanwhile, and they do not overlap.
pub unsafe fn add_in_tree(
    rows: usize,
    row: &dyn Fn(usize) -> *const u8,
    sum: *mut u8,
    bytes: usize,
) {
    let mut block = [0.0; BLOCK];
    for start in (0..bytes).step_by(BLOCK * size_of::<f32>()) {
        let end = bytes.min(start + BLOCK * size_of::<f32>());
        let own = &mut block[..(end - start) / size_of::<f32>()];
        let from = |at| row(at).wrapping_add(start).cast();
        // SAFETY: the block lies in the rows and in the sum, by the caller's promise.
        unsafe {
            add_subtree(0..rows, &from, own);
            ptr::copy_nonoverlapping(
                own.as_ptr().cast(),
                sum.wrapping_add(start),
                size_of_val(own),
            );
        }
    }
}

/// Adds up the rows of a subtree.
///
/// # Safety
/// As many elements as `sum` has may be read at the address of each row.
unsafe fn add_subtree(
    rows: std::ops::Range<usize>,
    row: &dyn Fn(usize) -> *const f32,
    sum: &mut [f32],
) {
    let fan_in = largest_prime_factor(rows.len());
    let each = rows.len() / fan_in;
    for child in 0..fan_in {
        let first = rows.start + child * each;
        let from = row(first);
        match (child, each) {
            // SAFETY: the caller's promise; a slice may be written as bytes.
            (0, 1) => unsafe {
                ptr::copy_nonoverlapping(
                    from.cast::<u8>(),
                    sum.as_mut_ptr().cast::<u8>(),
                    size_of_val(sum),
                );
            },
            (_, 1) => {
                for (at, sum) in sum.iter_mut().enumerate() {
                    // SAFETY: the element lies in the row, by the caller's promise.
                    *sum += unsafe { from.add(at).read_unaligned() };
                }
            }
            // SAFETY: the caller's promise, of fewer rows.
            (0, _) => unsafe { add_subtree(first..first + each, row, sum) },
            _ => {
                let mut other = [0.0; BLOCK];
                let other = &mut other[..sum.len()];
                // SAFETY: as above.
                unsafe { add_subtree(first..first + each, row, other) };
                sum.iter_mut().zip(other).for_each(|(a, b)| *a += *b);
            }
        }
    }
}

/// The largest prime factor of a number; 1 of 0 and 1.
fn largest_prime_factor(number: usize) -> usize {
    let (mut rest, mut factor) = (number.max(1), 2);
    while factor * factor <= rest {
        if rest.is_multiple_of(factor) {
            rest /= factor;
        } else {
            factor += 1;
        }
    }
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_added_in_the_tree_of_their_number() {
        let value = |row: usize, at: usize| ((row * 37 + at * 11) % 101) as f32 * 0.1 - 5.0;
        for elements in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3] {
            for rows in 1..=12 {
                let all: Vec<Vec<f32>> = (0..rows)
                    .map(|row| (0..elements).map(|at| value(row, at)).collect())
                    .collect();
                let mut sum = vec![f32::NAN; elements];
                let row = |row: usize| all[row].as_ptr().cast();
                // SAFETY: rows and sum have so many elements.
                unsafe { add_in_tree(rows, &row, sum.as_mut_ptr().cast(), elements * 4) };
                let x = |at: usize| move |row: usize| value(row, at);
                for (at, sum) in sum.into_iter().enumerate() {
                    let x = x(at);
                    let pair = |i: usize| x(2 * i) + x(2 * i + 1);
                    let four = |i: usize| pair(2 * i) + pair(2 * i + 1);
                    let wanted = match rows {
                        4 => four(0),
                        6 => pair(0) + pair(1) + pair(2),
                        8 => four(0) + four(1),
                        10 => pair(0) + pair(1) + pair(2) + pair(3) + pair(4),
                        12 => four(0) + four(1) + four(2),
                        9 => {
                            let three = |i: usize| x(3 * i) + x(3 * i + 1) + x(3 * i + 2);
                            three(0) + three(1) + three(2)
                        }
                        primes => (1..primes).fold(x(0), |sum, row| sum + x(row)),
                    };
                    assert_eq!(sum.to_bits(), wanted.to_bits(), "{rows} rows at {at}");
                }
            }
        }
    }
}
