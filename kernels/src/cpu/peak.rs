//! The speed of the machine, measured: the upper limits that kernels are compared with.

use std::hint::black_box;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::gemm::micro::{Micro, PEAK_SUMS};
use super::{Isa, Team};

/// Elements of each of the two arrays that are read and copied: 64 MiB, more than most caches.
const ELEMENTS: usize = 16 << 20;
/// Rounds of the arithmetic loop in one timed run, some tenths of a millisecond.
const ROUNDS: usize = 1 << 15;
/// The time for which each measurement is repeated; the fastest run counts.
const REPEAT_TIME: Duration = Duration::from_millis(80);

/// The peak arithmetic and memory rates of a team of threads, measured on this machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peak {
    /// Threads of the team.
    pub threads: usize,
    /// Additions and multiplications of f32 in a second, by fused multiply-adds of registers.
    pub flops: f64,
    /// Bytes in a second that are read from memory.
    pub read: f64,
    /// Bytes in a second that are read and written while memory is copied, both counted.
    pub copy: f64,
}

impl Peak {
    /// Measures a team's peak with an instruction set, which must be available; takes some tenths
    /// of a second and 128 MiB.
    ///
    /// # Panics
    /// If this CPU does not have the instruction set.
    pub fn measure(isa: Isa, team: &Team) -> Peak {
        assert!(isa <= Isa::detect(), "this CPU has no {isa}");
        let (threads, micro) = (team.threads(), Micro::of(isa));
        let arithmetic = fastest(|| {
            team.run(threads, &|_, _| {
                // SAFETY: the instruction set is available.
                black_box(unsafe { (micro.peak)(black_box(ROUNDS)) });
            });
        });
        let each = ELEMENTS.div_ceil(threads);
        let (mut from, mut to) = (vec![1u32; ELEMENTS], vec![0u32; ELEMENTS]);
        let parts: Vec<_> = from
            .chunks_mut(each)
            .zip(to.chunks_mut(each))
            .map(Mutex::new)
            .collect();
        let lock = |part: usize| parts[part].lock().unwrap_or_else(PoisonError::into_inner);
        let read = fastest(|| {
            team.run(parts.len(), &|part, _| {
                black_box(
                    lock(part)
                        .0
                        .iter()
                        .fold(0u32, |sum, &x| sum.wrapping_add(x)),
                );
            });
        });
        let copy = fastest(|| {
            team.run(parts.len(), &|part, _| {
                let (from, to) = &mut *lock(part);
                to.copy_from_slice(from);
                black_box(to);
            });
        });
        let bytes = (ELEMENTS * size_of::<u32>()) as f64;
        Peak {
            threads,
            flops: (2 * threads * ROUNDS * PEAK_SUMS * micro.lanes) as f64 / arithmetic,
            read: bytes / read,
            copy: 2.0 * bytes / copy,
        }
    }
}

/// Seconds of the fastest run.
fn fastest(mut run: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed() < REPEAT_TIME || best.is_infinite() {
        let before = Instant::now();
        run();
        best = best.min(before.elapsed().as_secs_f64());
    }
    best
}
