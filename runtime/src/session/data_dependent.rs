//! Memory for values of data-dependent size.
//!
//! The rest of a program is planned, and so is its order. Therefore the steps between which such a
//! value lives are known at compile time, and its size is known at its first step. It is then
//! allocated in a gap of the slab that the plan leaves unused for as long, if there is one, else in
//! a block of the pool. After its last step the memory is given back.

use slabwise_kernels::cpu::Fault;
use slabwise_kernels::memory::Region;
use slabwise_kernels::size::Env;
use slabwise_planner::{ALIGN, Bytes};

use crate::error::{Error, Result};
use crate::memory::{Handle, Stream};
use crate::program::gaps::fit;
use crate::program::{Binds, Compiled, Planned, lengths};
use crate::shape::Extent;

use super::{Memory, Session, Variables};

/// The memory of a run's values of data-dependent size.
#[derive(Default)]
pub(crate) struct DataDependent {
    /// The piece of each buffer of the program; outputs are kept until the next run.
    held: Vec<Option<Piece>>,
    /// Bytes of the slab and of the pool in use, and the most of each in this run.
    lent: u64,
    lent_max: u64,
    pooled: u64,
    pooled_max: u64,
}

#[derive(Clone, Copy)]
enum Piece {
    Slab(Planned),
    Pool(Handle, u64),
}

impl DataDependent {
    fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Slab(part) => self.lent += part.bytes,
            Piece::Pool(_, bytes) => self.pooled += bytes,
        }
        (self.lent_max, self.pooled_max) = (
            self.lent_max.max(self.lent),
            self.pooled_max.max(self.pooled),
        );
    }

    /// The most bytes in gaps of the slab, and of the pool, that values took at once in the last
    /// run.
    pub fn most(&self) -> (u64, u64) {
        (self.lent_max, self.pooled_max)
    }

    /// Gives back the outputs of the last run.
    pub fn clear(&mut self, memory: &mut Memory) -> Result<()> {
        (0..self.held.len()).try_for_each(|at| self.free_piece(at, memory))
    }

    /// Gives back the outputs of the last run, and resets the counts.
    pub fn begin(&mut self, inner: &Compiled, memory: &mut Memory) -> Result<()> {
        self.clear(memory)?;
        *self = DataDependent {
            held: std::mem::take(&mut self.held),
            ..DataDependent::default()
        };
        self.held.clear();
        if inner.has_data_dependent {
            self.held.resize(inner.buffers.len(), None);
        }
        Ok(())
    }

    /// Allocates the values of data-dependent size that a step is the first to write.
    pub fn allocate(
        &mut self,
        inner: &Compiled,
        at: usize,
        env: &Env,
        slab: Region,
        (variables, memory): (&Variables, &mut Memory),
    ) -> Result<()> {
        for &b in inner.steps[at]
            .begins
            .iter()
            .filter(|&&b| inner.buffers[b].data_dependent)
        {
            let buffer = &inner.buffers[b];
            let elements: usize = lengths(&buffer.dims, env).iter().product();
            let bytes = elements as u64 * buffer.dtype.bytes() as u64;
            let piece = match self.gap_for(inner, b, bytes, slab) {
                Some(part) => Piece::Slab(part),
                None => {
                    self.check_budget(inner, b, bytes, variables, memory)?;
                    let tag = memory.tag_ids(inner)[b];
                    let source = memory.backend.source();
                    let taken = memory.pool.allocate(source, bytes, Stream::default(), tag);
                    let handle = taken.map_err(|report| Error::Memory {
                        program: inner.name.to_string(),
                        report,
                    })?;
                    Piece::Pool(handle, bytes)
                }
            };
            self.add(piece);
            self.held[b] = Some(piece);
        }
        Ok(())
    }

    /// Fails if a block exceeds the budget, which weights, state, slab and such blocks share.
    fn check_budget(
        &self,
        inner: &Compiled,
        b: usize,
        bytes: u64,
        variables: &Variables,
        memory: &Memory,
    ) -> Result<()> {
        let planned = variables.bytes().saturating_add(memory.slab_bytes());
        match memory.budget.bytes() {
            Some(budget)
                if planned.saturating_add(self.pooled).saturating_add(bytes) > budget.0 =>
            {
                Err(Error::Room {
                    program: inner.name.to_string(),
                    what: inner.tags[b].name.to_string(),
                    bytes: Bytes(bytes),
                    budget,
                    planned: Bytes(planned),
                    pool: Bytes(self.pooled),
                })
            }
            _ => Ok(()),
        }
    }

    /// A part of the slab that neither the plan nor another such value uses while a buffer lives.
    fn gap_for(&self, inner: &Compiled, b: usize, bytes: u64, slab: Region) -> Option<Planned> {
        let gaps = inner.gaps.get(b).filter(|gaps| !gaps.is_empty())?;
        let mut taken: Vec<Planned> = self
            .held
            .iter()
            .filter_map(|p| {
                if let Some(Piece::Slab(part)) = p {
                    Some(*part)
                } else {
                    None
                }
            })
            .collect();
        taken.sort_unstable_by_key(|part| part.offset);
        fit(
            gaps,
            &taken,
            bytes.max(1).next_multiple_of(ALIGN),
            slab.bytes,
        )
    }

    /// The region of a value of data-dependent size; empty before its first step.
    pub fn region(&self, b: usize, slab: Region, memory: &Memory) -> Result<Region> {
        match self.held.get(b).copied().flatten() {
            Some(Piece::Slab(part)) => Ok(slab.part(part.offset, part.bytes)),
            Some(Piece::Pool(handle, _)) => memory
                .pool
                .region(handle)
                .map_err(|e| Error::Internal(e.to_string())),
            None => Ok(Region::default()),
        }
    }

    /// Gives back the memory of the values that a step is the last to use.
    pub fn free(&mut self, inner: &Compiled, at: usize, memory: &mut Memory) -> Result<()> {
        for &b in inner.steps[at]
            .ends
            .iter()
            .filter(|&&b| inner.buffers[b].data_dependent && !inner.outputs.contains(&b))
        {
            self.free_piece(b, memory)?;
        }
        Ok(())
    }

    fn free_piece(&mut self, b: usize, memory: &mut Memory) -> Result<()> {
        match self.held[b].take() {
            Some(Piece::Slab(part)) => self.lent = self.lent.saturating_sub(part.bytes),
            Some(Piece::Pool(handle, bytes)) => {
                self.pooled = self.pooled.saturating_sub(bytes);
                memory
                    .pool
                    .free(memory.backend.source(), handle)
                    .map_err(|e| Error::Internal(e.to_string()))?;
            }
            None => {}
        }
        Ok(())
    }
}

impl Session {
    /// Reads the length that a step computed and binds it for the rest of the run.
    pub(crate) fn bind_length(
        &mut self,
        inner: &Compiled,
        at: usize,
        scalar: Option<&Region>,
        env: &mut Env,
    ) -> Result<()> {
        let (Some(Binds { symbol, offset }), Some(scalar)) = (inner.steps[at].binds, scalar) else {
            return Ok(());
        };
        let part = scalar.part(4 * offset.at(env).max(0) as u64, 4);
        let length = self.memory.backend.read_i32(&part)?;
        // The step's kernel has checked it, but a device does not stop the run when a check fails.
        let most = if let Extent::DataDependent(most) = inner.symbols.extent(symbol) {
            most.at(env)
        } else {
            0
        };
        let found = u32::try_from(length).ok().filter(|&n| i64::from(n) <= most);
        let Some(found) = found else {
            let limit = u64::try_from(most).unwrap_or(0) + 1;
            return Err(inner.fault(
                at,
                Fault::Index {
                    position: 0,
                    value: i64::from(length),
                    limit,
                },
            ));
        };
        env.0[usize::from(symbol.0)] = found;
        inner.check_needed(Some(at), env)?;
        let sizes = self.memory.sizes();
        self.memory.backend.begin_inputs()?;
        self.memory.backend.publish(&sizes, env)?;
        self.memory.backend.end_inputs()
    }
}
