//! Counter-based random numbers: Philox4x32-10.
//!
//! A counter-based generator is a function from (key, counter) to bits, so that any element of any
//! stream can be computed independently: by any thread, in any order, and again when a value is
//! recomputed instead of stored. The function is Philox4x32 with ten rounds of Salmon, Moraes, Dror
//! and Shaw, *Parallel random numbers: as easy as 1, 2, 3* (SC 2011).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Philox4x32-10: 128 random bits for a counter under a key.
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [first, rest @ ..] = counter;
    philox_lanes([first], rest, key).map(|[word]| word as u32)
}

/// [`philox`] of counters that differ only in their first word: for each word of the results, the
/// words of all counters, each in the low half of its lane. (Vectors multiply in lanes as wide as
/// the products; words that stay in them need not be moved from one width to the other and back in
/// each round.)
#[inline(always)]
pub(crate) fn philox_lanes<const N: usize>(
    first: [u32; N],
    rest: [u32; 3],
    key: [u32; 2],
) -> [[u64; N]; 4] {
    let low = |x: u64| x & u64::from(u32::MAX);
    let mut c0 = first.map(u64::from);
    let [mut c1, mut c2, mut c3] = rest.map(|word| [u64::from(word); N]);
    let mut k = key;
    for _ in 0..ROUNDS {
        for l in 0..N {
            let p0 = u64::from(MULTIPLIERS[0]) * low(c0[l]);
            let p1 = u64::from(MULTIPLIERS[1]) * low(c2[l]);
            c0[l] = (p1 >> 32) ^ c1[l] ^ u64::from(k[0]);
            c1[l] = p1;
            c2[l] = (p0 >> 32) ^ c3[l] ^ u64::from(k[1]);
            c3[l] = p0;
        }
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    [c0, c1, c2, c3]
}

/// Random bits as a float in [0, 1): a multiple of 2⁻²⁴, so that 1 is never reached by rounding.
#[inline(always)]
pub fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Element `index` of a stream of uniform numbers in [0, 1), as [`crate::spec::Inst::Uniform`]
/// computes it.
///
/// Four neighbouring elements share one block: the counter is `[index / 4, stream, step, 0]`, the
/// key is the seed (low word first), and the element is word `index mod 4`.
pub fn uniform(seed: u64, step: u32, stream: u32, index: u32) -> f32 {
    unit(
        philox(
            [index >> 2, stream, step, 0],
            [seed as u32, (seed >> 32) as u32],
        )[(index & 3) as usize],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the reference implementation (Random123, `kat_vectors`).
    #[test]
    fn philox_gives_the_published_answers() {
        let f = u32::MAX;
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([f; 4], [f; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_fills_the_unit_interval() {
        let n = 1 << 16;
        let (mut sum, mut squares, mut buckets) = (0.0f64, 0.0f64, [0u32; 16]);
        for i in 0..n {
            let u = uniform(0x0123_4567_89ab_cdef, 3, 7, i);
            assert!((0.0..1.0).contains(&u));
            sum += f64::from(u);
            squares += f64::from(u) * f64::from(u);
            buckets[(u * 16.0) as usize] += 1;
        }
        let (mean, second) = (sum / f64::from(n), squares / f64::from(n));
        // Five standard deviations of the two estimates and of a bucket's count.
        assert!(
            (mean - 0.5).abs() < 5.0 * (1.0f64 / 12.0 / f64::from(n)).sqrt(),
            "{mean}"
        );
        assert!(
            (second - 1.0 / 3.0).abs() < 5.0 * (4.0f64 / 45.0 / f64::from(n)).sqrt(),
            "{second}"
        );
        let spread = 5.0 * (f64::from(n) / 16.0 * 15.0 / 16.0).sqrt();
        assert!(
            buckets
                .iter()
                .all(|&b| (f64::from(b) - f64::from(n) / 16.0).abs() < spread),
            "{buckets:?}"
        );
    }

    #[test]
    fn streams_steps_and_seeds_differ() {
        let first = |seed, step, stream| {
            (0..8)
                .map(|i| uniform(seed, step, stream, i).to_bits())
                .collect::<Vec<_>>()
        };
        let all = [
            first(1, 0, 0),
            first(2, 0, 0),
            first(1 << 32, 0, 0),
            first(1, 1, 0),
            first(1, 0, 1),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b));
        }
    }
}
