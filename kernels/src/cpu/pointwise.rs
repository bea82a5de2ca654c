//! Helpers of the kernels that access memory point by point: sizes and strides at launch,
//! per-worker scratch, and code compiled once per instruction set.

use super::tile::{Bound, TileCode};
use super::{Config, Isa, Launch, SpecError};
use crate::dtype::DType;
use crate::size::{Env, Size};
use crate::spec::{Dims, Operand, Spec};

/// Most axes of a space these kernels iterate over, so that sizes and strides live on the stack.
pub(super) const MAX_RANK: usize = 8;

/// Fails unless `dims` has a rank that these kernels support.
pub(super) fn check_rank(dims: &Dims, least: usize) -> Result<(), SpecError> {
    if (least..=MAX_RANK).contains(&dims.len()) {
        return Ok(());
    }
    Err(SpecError::unsupported(format!(
        "a space of rank {}; {least} to {MAX_RANK} axes are possible",
        dims.len()
    )))
}

/// The sizes of a space at launch.
#[derive(Clone, Copy)]
pub(super) struct Space {
    sizes: [usize; MAX_RANK],
    rank: usize,
}

/// Coordinates of a point; those past the rank are 0.
type Point = [usize; MAX_RANK];

impl Space {
    pub fn new(dims: &[Size], env: &Env) -> Space {
        let mut sizes = [1; MAX_RANK];
        for (size, dim) in sizes.iter_mut().zip(dims) {
            *size = dim.usize_at(env);
        }
        Space {
            sizes,
            rank: dims.len(),
        }
    }

    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.rank]
    }

    /// How many points the space has.
    pub fn points(&self) -> usize {
        product(self.sizes())
    }

    /// The point at a row-major position.
    pub fn point(&self, mut position: usize) -> Point {
        let mut at = [0; MAX_RANK];
        for (c, &n) in at.iter_mut().zip(self.sizes()).rev() {
            *c = position % n;
            position /= n;
        }
        at
    }

    /// Visits a run of points from a row-major position on, one row of the last axis (or the part
    /// of it in the run) at a time: `row(first point, length, points of the run before it)`.
    #[inline(always)]
    pub fn rows(&self, from: usize, points: usize, mut row: impl FnMut(&Point, usize, usize)) {
        if points == 0 {
            return;
        }
        let last = self.rank.saturating_sub(1);
        let (mut at, mut done) = (self.point(from), 0);
        loop {
            let len = (self.sizes[last] - at[last]).min(points - done);
            row(&at, len, done);
            done += len;
            if done == points {
                return;
            }
            at[last] = 0;
            for axis in (0..last).rev() {
                at[axis] += 1;
                if at[axis] < self.sizes[axis] {
                    break;
                }
                at[axis] = 0;
            }
        }
    }
}

/// A space cut into blocks of neighbouring points, none larger than a capacity: steps along one
/// axis, with all points of the axes after it. The cut depends on the sizes alone.
#[derive(Clone, Copy)]
struct Blocks {
    space: Space,
    axis: usize,
    /// Steps along the axis in a block, and in all.
    steps: (usize, usize),
    /// Points of one step.
    inner: usize,
}

/// Points of one block: `points` of them from the row-major position `from` on.
pub(super) struct Block {
    pub from: usize,
    pub points: usize,
}

impl Blocks {
    /// Cuts a space of at least one axis.
    fn new(dims: &[Size], capacity: usize, env: &Env) -> Blocks {
        let space = Space::new(dims, env);
        let inner = |axis: usize| product(&space.sizes()[axis + 1..]);
        let axis = (0..space.rank)
            .find(|&axis| inner(axis) <= capacity)
            .unwrap_or(0);
        let inner = inner(axis);
        let steps = (capacity / inner.max(1)).max(1);
        Blocks {
            space,
            axis,
            steps: (steps, space.sizes[axis]),
            inner,
        }
    }

    fn per_outer(&self) -> usize {
        self.steps.1.div_ceil(self.steps.0)
    }

    /// How many blocks there are.
    fn count(&self) -> usize {
        if self.inner == 0 {
            0
        } else {
            product(&self.space.sizes[..self.axis]) * self.per_outer()
        }
    }

    /// The block of an index below the count.
    fn block(&self, index: usize) -> Block {
        let (outer, step) = (
            index / self.per_outer(),
            index % self.per_outer() * self.steps.0,
        );
        let steps = self.steps.0.min(self.steps.1 - step);
        Block {
            from: (outer * self.steps.1 + step) * self.inner,
            points: steps * self.inner,
        }
    }

    /// Runs the epilogue over the values of a block.
    ///
    /// # Safety
    /// `acc` holds the block's values, `scratch` the epilogue's bytes for this worker.
    unsafe fn finish(&self, code: &Bound<'_>, block: &Block, acc: *const u32, scratch: *mut u8) {
        let origin = self.space.point(block.from);
        // Steps along the first axis are the block's rows; along a later one they are columns of
        // the axis before.
        let (axis, rows, cols) = match self.axis {
            0 => (0, block.points / self.inner, self.inner),
            axis => (axis - 1, 1, block.points),
        };
        // SAFETY: the caller's promise.
        unsafe {
            code.block(
                &origin[..self.space.rank],
                axis,
                rows,
                cols,
                acc,
                cols,
                scratch,
            )
        };
    }
}

/// A kernel that computes its values block by block into memory of each worker, where its epilogue
/// reads them.
pub(super) struct BlockCode {
    code: TileCode,
    threads: usize,
    /// Most points of a block.
    capacity: usize,
}

impl BlockCode {
    /// Prepares the epilogue of `spec` after blocks of `largest` points at most.
    pub fn new(
        spec: &Spec,
        bound: &Env,
        config: &Config,
        largest: usize,
    ) -> Result<Self, SpecError> {
        check_rank(&spec.dims, 1)?;
        Ok(BlockCode {
            code: TileCode::new(spec, bound, config)?,
            threads: config.threads,
            capacity: Space::new(&spec.dims, bound).points().clamp(1, largest),
        })
    }

    fn values_bytes(&self) -> usize {
        aligned(self.capacity * size_of::<u32>())
    }

    fn worker_bytes(&self) -> usize {
        self.values_bytes() + self.code.scratch_bytes()
    }

    pub fn workspace(&self) -> u64 {
        (self.worker_bytes() * self.threads) as u64
    }

    /// Computes all blocks: `fill` writes the values of one, and the epilogue follows.
    ///
    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(
        &self,
        spec: &Spec,
        launch: &Launch,
        fill: impl Fn(&Space, &Block, &mut [u32]) + Sync,
    ) {
        let blocks = Blocks::new(&spec.dims, self.capacity, launch.env);
        let scratch = Scratch::new(launch, self.worker_bytes());
        let code = self.code.bind(spec, launch);
        launch.team.run(blocks.count(), &|index, worker| {
            let (block, memory) = (blocks.block(index), scratch.of(worker));
            let values = memory.cast::<u32>();
            // SAFETY: the worker's values hold a block and are its own.
            let row = unsafe { std::slice::from_raw_parts_mut(values, block.points) };
            fill(&blocks.space, &block, row);
            // SAFETY: the epilogue's bytes follow the values.
            unsafe {
                let scratch = memory.wrapping_add(self.values_bytes());
                blocks.finish(&code, &block, values, scratch)
            };
        });
    }
}

/// The product of sizes; saturates.
pub(super) fn product(sizes: &[usize]) -> usize {
    sizes.iter().fold(1, |p, &n| p.saturating_mul(n))
}

/// An operand at launch.
#[derive(Clone, Copy)]
pub(super) struct OperandView {
    base: *mut u8,
    pub dtype: DType,
    pub strides: [isize; MAX_RANK],
}

// SAFETY: an `OperandView` is an address and strides; its methods make the caller responsible for
// accesses.
unsafe impl Sync for OperandView {}

impl OperandView {
    /// The operand whose region starts at `address`.
    pub fn new(operand: &Operand, address: *mut u8, env: &Env) -> OperandView {
        let mut strides = [0; MAX_RANK];
        for (slot, stride) in strides.iter_mut().zip(&operand.strides) {
            *slot = stride.at(env) as isize;
        }
        let offset = operand.offset.at(env) as isize * operand.dtype.bytes() as isize;
        OperandView {
            base: address.wrapping_offset(offset),
            dtype: operand.dtype,
            strides,
        }
    }

    /// Elements from the operand's first to the one at a point.
    pub fn offset(&self, at: &[usize]) -> isize {
        at.iter()
            .zip(&self.strides)
            .map(|(&c, &s)| c as isize * s)
            .sum()
    }

    /// Where an element lies.
    pub fn address(&self, offset: isize) -> *mut u8 {
        self.base
            .wrapping_offset(offset * self.dtype.bytes() as isize)
    }

    /// Where an element lies, as a pointer to `T`, whose size is that of the operand's type.
    pub fn element<T>(&self, offset: isize) -> *mut T {
        debug_assert_eq!(size_of::<T>(), self.dtype.bytes());
        self.base.cast::<T>().wrapping_offset(offset)
    }

    /// The element `offset` elements from the first, widened to its lane's bits.
    ///
    /// # Safety
    /// The element lies inside the operand's region, and nothing writes it meanwhile.
    #[inline(always)]
    pub unsafe fn load(&self, offset: isize) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::F32 | DType::I32 => self.element::<u32>(offset).read(),
                DType::F16 => half::f16::from_bits(self.element::<u16>(offset).read())
                    .to_f32()
                    .to_bits(),
                DType::BF16 => half::bf16::from_bits(self.element::<u16>(offset).read())
                    .to_f32()
                    .to_bits(),
                DType::U8 | DType::Bool => u32::from(self.element::<u8>(offset).read()),
            }
        }
    }
}

/// Per-worker parts of a launch's workspace.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    pub base: *mut u8,
    pub bytes: usize,
}

// SAFETY: an address and a length; the parts of different workers are disjoint.
unsafe impl Sync for Scratch {}

impl Scratch {
    pub fn new(launch: &Launch, bytes_per_worker: usize) -> Scratch {
        Scratch {
            base: launch.workspace,
            bytes: bytes_per_worker,
        }
    }

    /// The first byte of a worker's part.
    pub fn of(&self, worker: usize) -> *mut u8 {
        self.base.wrapping_add(worker * self.bytes)
    }
}

/// Bytes of scratch rounded up so that the next part is aligned as well.
pub(super) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

/// A piece of work compiled once per instruction set.
pub(super) trait Vectorized {
    /// Does the work. Implementations are `#[inline(always)]`, so that they take on the caller's
    /// instruction set.
    ///
    /// # Safety
    /// See the implementation.
    unsafe fn run(self);
}

/// Does the work with the instructions of `isa`, which this CPU has.
///
/// # Safety
/// The requirements of [`Vectorized::run`] for `work`.
pub(super) unsafe fn vectorized(isa: Isa, work: impl Vectorized) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2(work: impl Vectorized) {
            // SAFETY: the caller's promise.
            unsafe { work.run() }
        }
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn avx512(work: impl Vectorized) {
            // SAFETY: the caller's promise.
            unsafe { work.run() }
        }
        match isa {
            // SAFETY: the CPU has the level (a condition of `Config`); the rest is the caller's
            // promise.
            Isa::Avx512 => return unsafe { avx512(work) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { avx2(work) },
            Isa::Portable => {}
        }
    }
    let _ = isa;
    // SAFETY: the caller's promise.
    unsafe { work.run() }
}
