//! Strides and addresses of one launch.

use std::ops::Range;

use smallvec::SmallVec;

use super::exec::{Along, Machine};
use super::{AXES, TILE, TileCode};
use crate::cpu::{Launch, Team};
use crate::micro_batch::Part;
use crate::size::Env;
use crate::spec::{Dims, MAX_ACCESSES, Spec};

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Requests a cache line into L2, where the instruction set can.
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is without effect but on caches.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Requests a run of bytes.
pub(super) fn prefetch_run(at: *const u8, bytes: usize) {
    for byte in (0..bytes).step_by(LINE) {
        prefetch(at.wrapping_add(byte));
    }
}

/// Requests a cache line to be written, where the instruction set can.
fn prefetch_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is without effect but on caches.
    unsafe {
        std::arch::asm!("prefetchw [{0}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// The strided access to one operand or index in one launch.
#[derive(Clone, Copy)]
pub(crate) struct StridedAccess {
    /// The first byte of the argument; null for an index.
    pub base: *mut u8,
    /// Bytes of an element; 1 for an index, which counts up from null.
    pub bytes: isize,
    /// Elements before the first.
    pub offset: isize,
    /// Elements between neighbours along each axis.
    pub strides: [isize; AXES],
    /// The same along the trailing axes that are iterated as one.
    pub inner: isize,
    /// The operands that are read from memory that this one is stored to, by bit.
    pub overwrites: u64,
}

impl StridedAccess {
    /// The address of a point.
    fn at(&self, point: &[usize]) -> *mut u8 {
        let elements = point
            .iter()
            .zip(&self.strides)
            .fold(self.offset, |sum, (&i, &stride)| sum + i as isize * stride);
        self.base.wrapping_offset(elements * self.bytes)
    }
}

/// Most operands that are requested: more of them than updates of weights have, and few enough to be
/// moved at little cost.
const REQUESTS: usize = 8;

/// The fewest points of a space whose operands do not fit into the caches of a core.
const STREAMED: usize = 1 << 18;

/// The elements of one operand, of which the columns of a row are neighbours.
#[derive(Clone, Copy)]
struct Request {
    first: *const u8,
    row_bytes: isize,
    element_bytes: usize,
    /// Whether they are read, or only written.
    read: bool,
}

/// Operands' elements at the points of a block of rows and columns.
#[derive(Default)]
pub(crate) struct Requests(SmallVec<[Request; REQUESTS]>);

impl Requests {
    /// Requests the elements at a part of the points.
    #[inline]
    pub fn send(&self, rows: Range<usize>, columns: Range<usize>) {
        for request in &self.0 {
            let bytes = columns.len() * request.element_bytes;
            for row in rows.clone() {
                let row = request
                    .first
                    .wrapping_offset(row as isize * request.row_bytes)
                    .wrapping_add(columns.start * request.element_bytes);
                for byte in (0..bytes).step_by(LINE) {
                    match request.read {
                        true => prefetch(row.wrapping_add(byte)),
                        false => prefetch_write(row.wrapping_add(byte)),
                    }
                }
            }
        }
    }
}

/// [`TileCode`] with the sizes and addresses of one launch.
pub(crate) struct Bound<'a> {
    pub(super) code: &'a TileCode,
    /// One for each operand and index: they always fit without the heap.
    pub(super) accesses: SmallVec<[StridedAccess; MAX_ACCESSES]>,
    /// Whether memory is written from which an operand is read.
    pub(super) overwrites: bool,
    /// Whether operands are read from beyond the caches of a core.
    pub(super) streams: bool,
    axes: usize,
    dims: [usize; AXES],
    /// The first of the trailing axes that all accesses can iterate as one.
    inner_axis: usize,
}

// SAFETY: the addresses belong to the launch, which hands disjoint blocks to its threads.
unsafe impl Sync for Bound<'_> {}

impl<'a> Bound<'a> {
    /// A value in which nothing is resolved yet.
    #[inline(always)]
    pub fn new(code: &'a TileCode) -> Bound<'a> {
        Bound {
            code,
            accesses: SmallVec::new(),
            overwrites: false,
            streams: false,
            axes: 0,
            dims: [1; AXES],
            inner_axis: 0,
        }
    }

    /// Resolved for the sizes and strides alone.
    pub fn sizes(code: &'a TileCode, spec: &Spec, env: &Env, order: &[usize]) -> Bound<'a> {
        let args: SmallVec<[*mut u8; MAX_ACCESSES]> =
            SmallVec::from_elem(std::ptr::null_mut(), spec.operands.len());
        let mut bound = Bound::new(code);
        bound.resolve(
            spec,
            &Launch {
                args: &args,
                workspace: std::ptr::null_mut(),
                env,
                team: &Team::new(1),
                part: None,
            },
            order,
        );
        bound
    }

    /// Resolves a launch over the axes of the spec in the given order. (In place, because a `Bound`
    /// is too large to move around.)
    pub fn resolve(&mut self, spec: &Spec, launch: &Launch, order: &[usize]) {
        self.axes = order.len();
        for (dim, &axis) in self.dims.iter_mut().zip(order) {
            *dim = spec.dims[axis].usize_at(launch.env);
        }
        let args = &launch.args[launch.args.len() - spec.operands.len()..];
        let operands = spec
            .operands
            .iter()
            .zip(args)
            .map(|(o, &base)| (base, o.dtype.bytes(), o.offset.at(launch.env), &o.strides));
        let indices = spec
            .indices
            .iter()
            .map(|strides| (std::ptr::null_mut(), 1, 0, strides));
        for (base, bytes, offset, strides) in operands.chain(indices) {
            let mut access = StridedAccess {
                base,
                bytes: bytes as isize,
                offset: offset as isize,
                strides: [0; AXES],
                inner: 0,
                overwrites: 0,
            };
            for (stride, &axis) in access.strides.iter_mut().zip(order) {
                *stride = strides[axis].at(launch.env) as isize;
            }
            self.accesses.push(access);
        }
        if let Some(part) = launch.part {
            self.shift(spec, part);
        }
        // A per-row value is stored once per point of the kept axes; its operand's other strides do
        // not count.
        let kept = spec.dims.len() - spec.reduced;
        for store in &self.code.program.per_row_stores {
            for (stride, _) in self.accesses[usize::from(store.access)]
                .strides
                .iter_mut()
                .zip(order)
                .filter(|(_, axis)| **axis >= kept)
            {
                *stride = 0;
            }
        }
        for store in spec.stores.iter().map(|s| usize::from(s.operand)) {
            let read = (0..args.len())
                .filter(|&k| self.code.read >> k & 1 == 1 && args[k] == args[store])
                .fold(0, |bits, k| bits | 1 << k);
            self.accesses[store].overwrites = read;
            self.overwrites |= read != 0;
        }
        self.streams = self.dims().iter().product::<usize>() >= STREAMED;
        self.find_inner();
    }

    /// Shifts accesses to a slice, whose operands hold only its examples. A sum over the batch
    /// counts examples through the whole batch, so operands begin before their first byte; all
    /// other kernels count the slice's examples, so indices begin at the number of examples before
    /// it.
    fn shift(&mut self, spec: &Spec, part: &Part) {
        let first = part.first(spec.dims.len());
        let by = |strides: &Dims| {
            strides
                .iter()
                .zip(&first)
                .map(|(s, n)| s.at(part.whole) as isize * n)
                .sum::<isize>()
        };
        let per_row = |k: usize| {
            self.code
                .program
                .per_row_stores
                .iter()
                .any(|store| usize::from(store.access) == k)
        };
        let (reductions, operands) = (
            part.micro_batching.folds,
            spec.operands.iter().map(|o| &o.strides),
        );
        let moves: SmallVec<[isize; MAX_ACCESSES]> = operands
            .enumerate()
            .map(|(k, strides)| {
                if reductions && !per_row(k) {
                    -by(strides)
                } else {
                    0
                }
            })
            .chain(
                spec.indices
                    .iter()
                    .map(|strides| if reductions { 0 } else { by(strides) }),
            )
            .collect();
        self.accesses
            .iter_mut()
            .zip(moves)
            .for_each(|(access, by)| access.offset += by);
    }

    /// Sizes of the axes.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.axes]
    }

    /// The strided access to each operand and index.
    pub fn accesses(&self) -> &[StridedAccess] {
        &self.accesses
    }

    /// Joins neighbouring axes of `self.dims()[from..to]` that all accesses can iterate as one, and
    /// drops those of one point; returns the number of remaining axes, at least one.
    pub fn collapse(&mut self, from: usize, to: usize) -> usize {
        let mut write = from;
        for read in from..to {
            if self.dims[read] == 1 {
                continue;
            }
            let dim = self.dims[read] as isize;
            let joins = write > from
                && self
                    .accesses
                    .iter()
                    .all(|w| w.strides[write - 1] == w.strides[read] * dim);
            let into = if joins { write - 1 } else { write };
            for access in &mut self.accesses {
                access.strides[into] = access.strides[read];
            }
            self.dims[into] = if joins {
                self.dims[into] * self.dims[read]
            } else {
                self.dims[read]
            };
            write = into + 1;
        }
        let removed = to - write;
        if removed > 0 {
            self.dims.copy_within(to..self.axes, write);
            for access in &mut self.accesses {
                access.strides.copy_within(to..self.axes, write);
            }
            self.axes -= removed;
        }
        if write == from {
            self.insert_axis(from);
        }
        (write - from).max(1)
    }

    /// Inserts an axis of one point. There must be fewer than [`AXES`] axes.
    pub fn insert_axis(&mut self, at: usize) {
        debug_assert!(self.axes < AXES);
        self.dims.copy_within(at..self.axes, at + 1);
        self.dims[at] = 1;
        for access in &mut self.accesses {
            access.strides.copy_within(at..self.axes, at + 1);
            access.strides[at] = 0;
        }
        self.axes += 1;
    }

    /// Exchanges two axes.
    pub fn swap_axes(&mut self, a: usize, b: usize) {
        self.dims.swap(a, b);
        for access in &mut self.accesses {
            access.strides.swap(a, b);
        }
    }

    fn find_inner(&mut self) {
        let mut len = 1;
        self.inner_axis = self.axes;
        for axis in (0..self.axes).rev() {
            if self.dims[axis] != 1 {
                let joins = len == 1
                    || self
                        .accesses
                        .iter()
                        .all(|w| w.strides[axis] == w.inner * len);
                if !joins {
                    return;
                }
                if len == 1 {
                    self.accesses
                        .iter_mut()
                        .for_each(|w| w.inner = w.strides[axis]);
                }
                len *= self.dims[axis] as isize;
            }
            self.inner_axis = axis;
        }
    }

    /// The operands' elements at the points from `origin` on, of rows along an axis and columns along
    /// all axes after it, which a later [`Bound::block`] reads or writes, where each row has elements
    /// of its own.
    pub fn requests(&self, origin: &[usize], row_axis: usize) -> Requests {
        let joined = self.inner_axis <= row_axis + 1;
        let column = origin.len() - 1;
        let operands = (0..self.code.dtypes.len()).filter_map(|k| {
            let access = &self.accesses[k];
            let apart = match row_axis + 1 == column {
                true => access.strides[column],
                false if joined => access.inner,
                false => 0,
            };
            let own = apart == 1 && access.strides[row_axis] != 0;
            own.then(|| Request {
                first: access.at(origin),
                row_bytes: access.strides[row_axis] * access.bytes,
                element_bytes: access.bytes as usize,
                read: self.code.read >> k & 1 == 1,
            })
        });
        Requests(operands.take(REQUESTS).collect())
    }

    /// The address of the result at a point and the elements from row to row, if the code only
    /// stores the anchor's values unchanged, with contiguous columns.
    pub fn target(&self, origin: &[usize]) -> Option<(*mut f32, usize)> {
        let (at, strides) = self.stored(origin)?;
        let (row, column) = (origin.len() - 2, origin.len() - 1);
        let apart = usize::try_from(strides[row]).ok()?;
        (strides[column] == 1).then_some((at, apart))
    }

    /// See [`TileCode::scratch_bytes`].
    pub fn scratch_bytes(&self) -> usize {
        self.code.scratch_bytes()
    }

    /// The address of the result at a point and its strides, if the code only stores the anchor's
    /// values unchanged.
    pub fn stored(&self, origin: &[usize]) -> Option<(*mut f32, &[isize])> {
        let access = self.accesses.first().filter(|_| self.code.only_stores)?;
        Some((access.at(origin).cast(), &access.strides[..origin.len()]))
    }

    /// Runs the code on a block of `rows × cols` points. Point (r, c) has the coordinates of
    /// `origin` (one per axis of `spec.dims`), with `origin[row_axis] + r`, and c steps in
    /// row-major order through the axes after `row_axis`, starting at their coordinates in `origin`
    /// and never past their end.
    ///
    /// `acc` holds the anchor's values as lane bits, row r from `acc + r · acc_stride` elements. It
    /// is the memory of a stored operand at the same points, or overlaps none. Stores happen after
    /// all loads of the same points.
    ///
    /// # Safety
    /// The block must lie inside the space, and no other thread may touch the same points. `acc`
    /// must be readable for the block, if the code has [`crate::spec::Inst::Acc`]. `scratch` must
    /// point to [`TileCode::scratch_bytes`] bytes, 64-byte aligned, that no other thread uses
    /// during the call.
    #[allow(clippy::too_many_arguments)] // the shape of a block and the addresses of its values differ between calls
    pub unsafe fn block(
        &self,
        origin: &[usize],
        row_axis: usize,
        rows: usize,
        cols: usize,
        acc: *const u32,
        acc_stride: usize,
        scratch: *mut u8,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            self.blocks(
                origin,
                row_axis,
                [rows, cols],
                (acc, acc_stride),
                None,
                scratch,
            )
        }
    }

    /// Runs code without an anchor on such a block, and stores the last operand at `to`, row r from
    /// `to + r · stride` elements, rather than at its own address.
    ///
    /// # Safety
    /// As for [`Bound::block`]; `to` must have room for the block, and overlap no memory that is
    /// read.
    pub unsafe fn make(
        &self,
        origin: &[usize],
        row_axis: usize,
        size: [usize; 2],
        to: *mut f32,
        stride: usize,
        scratch: *mut u8,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            self.blocks(
                origin,
                row_axis,
                size,
                (std::ptr::null(), 0),
                Some((to, stride)),
                scratch,
            )
        }
    }

    /// # Safety
    /// As for [`Bound::block`] or [`Bound::make`].
    unsafe fn blocks(
        &self,
        origin: &[usize],
        row_axis: usize,
        [rows, cols]: [usize; 2],
        (acc, acc_stride): (*const u32, usize),
        to: Option<(*mut f32, usize)>,
        scratch: *mut u8,
    ) {
        // SAFETY: the caller's promise.
        let mut machine = unsafe { Machine::new(self, Along::Columns, scratch) };
        let mut at = [0; AXES];
        at[..origin.len()].copy_from_slice(origin);
        // Columns are processed in runs along axes that all accesses iterate as one.
        let first = self.inner_axis.max(row_axis + 1);
        let run_len: usize = self.dims[first..self.axes].iter().product();
        let start = (first..self.axes).fold(0, |p, axis| p * self.dims[axis] + at[axis]);
        let mut done = 0;
        let mut run = (run_len - start).min(cols);
        while done < cols {
            machine.seek(&at[..self.axes], Some(row_axis), None);
            match to {
                Some((to, stride)) => machine.store_last_to(to.wrapping_add(done), stride),
                None => machine.set_acc(acc.wrapping_add(done), acc_stride, rows, run),
            }
            // SAFETY: the run is part of the block.
            unsafe { machine.sweep(rows, run, TILE) };
            done += run;
            run = run_len.min(cols - done);
            at[first..self.axes].fill(0);
            for axis in (row_axis + 1..first).rev() {
                at[axis] += 1;
                if at[axis] < self.dims[axis] {
                    break;
                }
                at[axis] = 0;
            }
        }
    }
}
