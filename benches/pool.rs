//! The host side of the caching pool: `cargo bench -p slabwise-benches --bench pool`. The device is
//! a counter, so that only the pool is measured; one item is an allocation or a free.

use divan::Bencher;
use divan::counter::ItemsCount;
use slabwise::memory::{FakeDevice, Handle, MemoryConfig, Policy, Pool, Stream, TagId};

fn main() {
    divan::main();
}

/// The number of blocks that are always in use.
const LIVE: usize = 1000;
const POLICIES: [Policy; 5] = [
    Policy::Tlsf,
    Policy::Bfc,
    Policy::Naive,
    Policy::Round,
    Policy::Vmm,
];

fn open(policy: Policy) -> (Pool, FakeDevice) {
    let config = MemoryConfig {
        fraction: Some(1.0),
        ..MemoryConfig::with_policy(policy)
    };
    let device = FakeDevice::new(64 << 30)
        .with_pages(2 << 20)
        .with_preallocation(false);
    (
        Pool::new(&config).expect("settings that make sense"),
        device,
    )
}

/// Sizes like those of tensors: from bytes to megabytes, small ones more often. Each call returns
/// the next.
struct Sizes(u64);

impl Sizes {
    fn next(&mut self) -> u64 {
        // Marsaglia's xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) >> (8 + self.0 % 20)
    }
}

fn take(pool: &Pool, mut device: &FakeDevice, bytes: u64) -> Handle {
    pool.allocate(&mut device, bytes, Stream(0), TagId::default())
        .expect("room")
}

fn give(pool: &Pool, mut device: &FakeDevice, handle: Handle) {
    pool.free(&mut device, handle).expect("a block in use");
}

/// Allocates the same size repeatedly, in a pool with many other blocks in use.
#[divan::bench(args = POLICIES)]
fn hit(bencher: Bencher<'_, '_>, policy: Policy) {
    let (pool, device) = open(policy);
    let mut sizes = Sizes(0x9e37_79b9_7f4a_7c15);
    let _live: Vec<Handle> = (0..LIVE)
        .map(|_| take(&pool, &device, sizes.next()))
        .collect();
    bencher.counter(ItemsCount::new(2u32)).bench_local(|| {
        let handle = take(&pool, &device, 100_000);
        give(&pool, &device, handle);
    });
}

/// A block that is freed when it is dropped, which is not timed.
struct Held<'a>(&'a Pool, &'a FakeDevice, Handle);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        give(self.0, self.1, self.2);
    }
}

/// A pool with cached memory for many blocks of one size, and others in use.
fn warm(policy: Policy) -> (Pool, FakeDevice, Vec<Handle>) {
    let (pool, device) = open(policy);
    let mut sizes = Sizes(0x9e37_79b9_7f4a_7c15);
    let live = (0..LIVE)
        .map(|_| take(&pool, &device, sizes.next()))
        .collect();
    let many: Vec<Handle> = (0..2 * LIVE)
        .map(|_| take(&pool, &device, 100_000))
        .collect();
    many.into_iter().for_each(|one| give(&pool, &device, one));
    (pool, device, live)
}

/// An allocation alone, from cached memory.
#[divan::bench(args = POLICIES, sample_size = 1000)]
fn allocate(bencher: Bencher<'_, '_>, policy: Policy) {
    let (pool, device, _live) = warm(policy);
    bencher.bench_local(|| Held(&pool, &device, take(&pool, &device, 100_000)));
}

/// A free alone.
#[divan::bench(args = POLICIES, sample_size = 1000)]
fn free(bencher: Bencher<'_, '_>, policy: Policy) {
    let (pool, device, _live) = warm(policy);
    bencher
        .with_inputs(|| take(&pool, &device, 100_000))
        .bench_local_values(|one| give(&pool, &device, one));
}

/// Frees one block of a thousand and allocates another size, like a program without a pattern.
#[divan::bench(args = POLICIES)]
fn mix(bencher: Bencher<'_, '_>, policy: Policy) {
    let (pool, device) = open(policy);
    let mut sizes = Sizes(0x9e37_79b9_7f4a_7c15);
    let mut live: Vec<Handle> = (0..LIVE)
        .map(|_| take(&pool, &device, sizes.next()))
        .collect();
    let mut exchange = || {
        let bytes = sizes.next();
        let at = (bytes as usize).wrapping_mul(31) % LIVE;
        let new = take(&pool, &device, bytes);
        give(&pool, &device, std::mem::replace(&mut live[at], new));
    };
    (0..100 * LIVE).for_each(|_| exchange());
    bencher.counter(ItemsCount::new(2u32)).bench_local(exchange);
}

/// The same size by several threads at once, in one pool.
#[divan::bench(args = [Policy::Tlsf], threads = [1, 2, 4])]
fn threads(bencher: Bencher<'_, '_>, policy: Policy) {
    let (pool, device) = open(policy);
    bencher.counter(ItemsCount::new(2u32)).bench(|| {
        let handle = take(&pool, &device, 100_000);
        give(&pool, &device, handle);
    });
}
