//! temporary
#![allow(missing_docs)]
use slabwise_kernels::memory::{Memory, OutOfMemory, Region};
#[derive(Default)]
pub struct Pool {
    live: Vec<Region>,
    free: Vec<Region>,
    s: Statistics,
}
#[derive(Default, Clone, Copy, Debug)]
pub struct Statistics {
    pub bytes_in_use: u64,
    pub peak_bytes_in_use: u64,
    pub pool_bytes: u64,
    pub peak_pool_bytes: u64,
}
#[derive(Debug, thiserror::Error)]
#[error("pool")]
pub struct PoolError;
impl Pool {
    pub fn new() -> Self {
        Self::default()
    }
    pub fn allocate(&mut self, memory: &mut Memory, bytes: u64) -> Result<Region, OutOfMemory> {
        let bytes = bytes.next_multiple_of(512).max(512);
        let r = match self.free.iter().position(|f| f.bytes == bytes) {
            Some(i) => self.free.swap_remove(i),
            None => memory.reserve(bytes)?,
        };
        self.live.push(r);
        self.s.bytes_in_use += bytes;
        self.s.peak_bytes_in_use = self.s.peak_bytes_in_use.max(self.s.bytes_in_use);
        Ok(r)
    }
    pub fn free(&mut self, r: Region) -> Result<(), PoolError> {
        let i = self.live.iter().position(|l| *l == r).ok_or(PoolError)?;
        self.live.swap_remove(i);
        self.free.push(r);
        self.s.bytes_in_use -= r.bytes;
        Ok(())
    }
    pub fn statistics(&self) -> Statistics {
        self.s
    }
    pub fn empty_cache(&mut self, memory: &mut Memory) {
        for r in self.free.drain(..) {
            memory.release(r.arena);
        }
    }
}
