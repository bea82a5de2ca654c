//! Collectives of random sizes, checked against the values that each byte must have.

use slabwise_comm::{Header, Kind, Result, World};

/// A generator of numbers that is the same on all ranks.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
}

/// The byte at an index of the bytes that one rank sends to another in a round.
fn byte(round: u64, sender: usize, receiver: usize, at: usize) -> u8 {
    let mixed = round
        .wrapping_mul(31)
        .wrapping_add(sender as u64 * 7 + receiver as u64 * 13 + at as u64);
    (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn bytes(round: u64, sender: usize, receiver: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|at| byte(round, sender, receiver, at))
        .collect()
}

/// The addends of a rank in a round, one chunk of `len` numbers for each rank. Their sums are exact.
fn numbers_of(round: u64, rank: usize, size: usize, len: usize) -> Vec<f32> {
    let of = |to| bytes(round, rank, to, len).into_iter().map(f32::from);
    (0..size).flat_map(of).collect()
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Adds up numbers over the ranks, which must refuse it if they do not read each other's memory.
fn add(world: &World, round: u64, len: usize) -> Result<u64> {
    let (rank, size) = (world.rank(), world.size());
    let own = bytes_of(&numbers_of(round, rank, size, len));
    let mut sum = vec![0xaa; 4 * len];
    let added = world.reduce_scatter("sum", &own, &mut sum);
    if !world.sums_in_place() {
        let why = added.expect_err("it is refused").to_string();
        assert!(why.contains("use all-to-all"), "{why}");
        return Ok(0);
    }
    added?;
    let mut want = vec![0.0; len];
    for from in 0..size {
        let theirs = numbers_of(round, from, size, len);
        let chunk = theirs[rank * len..].iter();
        want.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x);
    }
    assert!(sum == bytes_of(&want), "sums of {len}, round {round}");
    Ok((size as u64 - 1) * 4 * len as u64)
}

/// Runs random collectives and panics at the first wrong byte or count.
pub fn exercise(world: &World, seed: u64, rounds: u64, longest: u64) -> Result<()> {
    let (rank, size) = (world.rank(), world.size());
    let mut numbers = Numbers(seed);
    let before = Kind::ALL.map(|kind| world.sent(kind).bytes);
    let mut sent = [0_u64; Kind::ALL.len()];
    let others = size as u64 - 1;
    for round in 0..rounds {
        world.begin_step(round);
        let kind = numbers.next() % 8;
        // Every fourth is empty.
        let len =
            (numbers.next() % longest) as usize * usize::from(!numbers.next().is_multiple_of(4));
        let pick = numbers.next() as usize;
        match kind {
            0 => {
                let source: Vec<u8> = (0..size)
                    .flat_map(|to| bytes(round, rank, to, len))
                    .collect();
                let mut all = vec![0xaa; size * len];
                world.all_to_all("exchange", &source, &mut all)?;
                let want: Vec<u8> = (0..size)
                    .flat_map(|from| bytes(round, from, rank, len))
                    .collect();
                assert!(
                    all == want,
                    "all-to-all of {len} bytes, seed {seed}, round {round}"
                );
                sent[Kind::AllToAll as usize] += others * len as u64;
            }
            1 => {
                let mut all = vec![0xaa; size * len];
                world.all_gather("gather", &bytes(round, rank, 0, len), &mut all)?;
                let want: Vec<u8> = (0..size)
                    .flat_map(|from| bytes(round, from, 0, len))
                    .collect();
                assert!(
                    all == want,
                    "all-gather of {len} bytes, seed {seed}, round {round}"
                );
                sent[Kind::AllGather as usize] += others * len as u64;
            }
            2 => {
                let root = pick % size;
                let mut own = bytes(round, rank, 0, len);
                world.broadcast("copy", root, &mut own)?;
                assert!(
                    own == bytes(round, root, 0, len),
                    "broadcast, seed {seed}, round {round}"
                );
                sent[Kind::Broadcast as usize] +=
                    if rank == root { others * len as u64 } else { 0 };
            }
            3 => {
                let by = (pick % (2 * size + 1)) as isize - size as isize;
                let mut got = vec![0xaa; len];
                world.shift("shift", by, &bytes(round, rank, 0, len), &mut got)?;
                let from = (rank as isize - by).rem_euclid(size as isize) as usize;
                assert!(
                    got == bytes(round, from, 0, len),
                    "shift by {by}, seed {seed}"
                );
                sent[Kind::Shift as usize] += if from == rank { 0 } else { len as u64 };
            }
            4 => world.barrier("barrier")?,
            6 => sent[Kind::ReduceScatter as usize] += add(world, round, len)?,
            5 => {
                let own = bytes(round, rank, 0, len % 100 + rank);
                let all = world.gather_values("values", &own)?;
                for (from, value) in all.iter().enumerate() {
                    assert_eq!(*value, bytes(round, from, 0, len % 100 + from));
                }
                sent[Kind::Control as usize] += others * (8 + (len % 100 + size - 1) as u64);
            }
            _ => {
                let header = Header {
                    program: seed,
                    step: round,
                    ..Header::default()
                };
                let of = |rank: usize| Header {
                    fault: rank as u32,
                    ..header
                };
                let mut headers = Vec::new();
                world.header(&of(rank), |h| headers.push(h))?;
                for (from, got) in headers.iter().enumerate() {
                    assert_eq!(*got, of(from));
                }
                sent[Kind::Control as usize] += others * 20;
            }
        }
    }
    for (kind, (before, sent)) in Kind::ALL.into_iter().zip(before.into_iter().zip(sent)) {
        assert_eq!(
            world.sent(kind).bytes - before,
            sent,
            "bytes sent by {kind:?}"
        );
    }
    Ok(())
}
