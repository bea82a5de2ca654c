//! Copies between memory and registers: widening, narrowing, gathering strided elements.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::ops::View;
use crate::dtype::{DType, Lane};
use crate::scalar::{CastTo, Word};

/// A strided block of elements in an operand's memory.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub ptr: *mut u8,
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Elements from one row, and one column, to the next.
    pub rs: isize,
    pub cs: isize,
}

/// The stored type of an element, and its conversion to a lane.
trait Stored: Copy {
    fn widen(self) -> u32;

    /// The lanes of a row of contiguous elements.
    fn widen_row(row: &[Self], out: &mut [u32]) {
        for (out, &x) in out.iter_mut().zip(row) {
            *out = x.widen();
        }
    }
}
impl Stored for u32 {
    fn widen(self) -> u32 {
        self
    }
}
impl Stored for u8 {
    fn widen(self) -> u32 {
        u32::from(self)
    }
}
impl Stored for f16 {
    fn widen(self) -> u32 {
        self.to_f32().to_bits()
    }

    fn widen_row(row: &[Self], out: &mut [u32]) {
        // SAFETY: every `u32` is the bits of an f32 of the same size and alignment.
        let out = unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast(), out.len()) };
        row.convert_to_f32_slice(out);
    }
}
impl Stored for bf16 {
    fn widen(self) -> u32 {
        self.to_f32().to_bits()
    }
}
/// A stored truth value: the lane is 0 or 1 for every byte.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Truth(u8);
impl Stored for Truth {
    fn widen(self) -> u32 {
        u32::from(self.0 != 0)
    }
}

/// Reads a block into a register whose rows are `dst_rs` lanes apart.
///
/// # Safety
/// The block must be readable and `dst` writable for its rows and columns; they do not overlap.
pub(super) unsafe fn load(block: &Block, dst: *mut u32, dst_rs: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match block.dtype {
            DType::F32 | DType::I32 if block.cs == 1 => {
                let from = (block.ptr.cast::<u32>().cast_const(), block.rs);
                rows(from, (dst, dst_rs as isize), block.rows, block.cols);
            }
            DType::F32 | DType::I32 => gather::<u32>(block, dst, dst_rs),
            DType::F16 => gather::<f16>(block, dst, dst_rs),
            DType::BF16 => gather::<bf16>(block, dst, dst_rs),
            DType::U8 => gather::<u8>(block, dst, dst_rs),
            DType::Bool => gather::<Truth>(block, dst, dst_rs),
        }
    }
}

/// Copies rows of contiguous elements, each side given by its first element and the elements from
/// one row to the next.
///
/// # Safety
/// `from` must be readable and `to` writable for the rows; they do not overlap.
unsafe fn rows(from: (*const u32, isize), to: (*mut u32, isize), rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        // Images of few elements have short rows, whose copies are not worth a call.
        match cols {
            1 => fixed_rows::<1>(from, to, rows),
            4 => fixed_rows::<4>(from, to, rows),
            8 => fixed_rows::<8>(from, to, rows),
            9 => fixed_rows::<9>(from, to, rows),
            _ => {
                for r in 0..rows as isize {
                    std::ptr::copy_nonoverlapping(
                        from.0.offset(r * from.1),
                        to.0.offset(r * to.1),
                        cols,
                    );
                }
            }
        }
    }
}

/// # Safety
/// As for [`rows`], for rows of `COLS` elements.
unsafe fn fixed_rows<const COLS: usize>(
    from: (*const u32, isize),
    to: (*mut u32, isize),
    rows: usize,
) {
    for r in 0..rows as isize {
        // SAFETY: the caller's promise; an array of words is aligned as a word.
        unsafe {
            let row: [u32; COLS] = *from.0.offset(r * from.1).cast();
            *to.0.offset(r * to.1).cast() = row;
        }
    }
}

/// # Safety
/// See [`load`].
unsafe fn gather<T: Stored>(block: &Block, dst: *mut u32, dst_rs: usize) {
    let src = block.ptr.cast::<T>();
    // SAFETY: the caller's promise; every element lies at a coordinate inside the block.
    unsafe {
        if block.cs == 1 {
            for r in 0..block.rows {
                let line =
                    std::slice::from_raw_parts(src.offset(r as isize * block.rs), block.cols);
                let out = std::slice::from_raw_parts_mut(dst.add(r * dst_rs), block.cols);
                T::widen_row(line, out);
            }
        } else if block.rs.unsigned_abs() < block.cs.unsigned_abs() {
            if block.rs == 1 {
                return gather_columns::<T>(block, dst, dst_rs);
            }
            // The memory is contiguous along columns, so the inner loop runs along them.
            for c in 0..block.cols {
                let line = src.offset(c as isize * block.cs);
                for r in 0..block.rows {
                    *dst.add(r * dst_rs + c) = (*line.offset(r as isize * block.rs)).widen();
                }
            }
        } else {
            for r in 0..block.rows {
                let line = src.offset(r as isize * block.rs);
                for c in 0..block.cols {
                    *dst.add(r * dst_rs + c) = (*line.offset(c as isize * block.cs)).widen();
                }
            }
        }
    }
}

/// Rows and columns that are transposed together: as many as a vector of every CPU has lanes.
const SQUARE: usize = 4;

/// [`gather`] for columns of contiguous elements.
///
/// # Safety
/// See [`load`].
unsafe fn gather_columns<T: Stored>(block: &Block, dst: *mut u32, dst_rs: usize) {
    let mut from: Block = *block;
    let mut row = 0;
    while row < block.rows {
        let to = dst.wrapping_add(row * dst_rs);
        // SAFETY: the caller's promise for some of the rows.
        row += unsafe {
            match block.rows - row {
                1 => gather_some::<T, 1>(&from, to, dst_rs),
                2 => gather_some::<T, 2>(&from, to, dst_rs),
                3 => gather_some::<T, 3>(&from, to, dst_rs),
                _ => gather_some::<T, SQUARE>(&from, to, dst_rs),
            }
        };
        from.ptr = block.ptr.cast::<T>().wrapping_add(row).cast();
    }
}

/// Reads the first rows of such a block, and returns their number.
///
/// # Safety
/// See [`load`].
unsafe fn gather_some<T: Stored, const ROWS: usize>(
    block: &Block,
    dst: *mut u32,
    dst_rs: usize,
) -> usize {
    let column = |c: usize| -> [T; ROWS] {
        // SAFETY: the caller's promise; an array is aligned as its elements.
        unsafe { *block.ptr.cast::<T>().offset(c as isize * block.cs).cast() }
    };
    let whole = block.cols - block.cols % SQUARE;
    for c in (0..whole).step_by(SQUARE) {
        let columns: [_; SQUARE] = std::array::from_fn(|k| column(c + k));
        let rows: [[u32; SQUARE]; ROWS] =
            std::array::from_fn(|r| std::array::from_fn(|k| columns[k][r].widen()));
        for (r, row) in rows.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { *dst.add(r * dst_rs + c).cast() = row };
        }
    }
    for c in whole..block.cols {
        for (r, x) in column(c).into_iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { *dst.add(r * dst_rs + c) = x.widen() };
        }
    }
    ROWS
}

/// Writes a value of the given lane to a block.
///
/// # Safety
/// The view must be readable and the block writable for its rows and columns; they do not overlap.
pub(super) unsafe fn store(view: View, lane: Lane, block: &Block) {
    // SAFETY: the caller's promise.
    unsafe {
        match (lane, block.dtype) {
            (Lane::F32, DType::F32) | (Lane::I32, DType::I32) | (Lane::Bool, DType::I32)
                if block.cs == 1 && !view.is_invariant() =>
            {
                let to = (block.ptr.cast::<u32>(), block.rs);
                rows((view.ptr, view.rs), to, block.rows, block.cols);
            }
            (Lane::F32, DType::F32) | (Lane::I32, DType::I32) | (Lane::Bool, DType::I32) => {
                scatter(view, block, |x: u32| x)
            }
            (Lane::F32, DType::F16) if block.cs == 1 && !view.is_invariant() => {
                for r in 0..block.rows as isize {
                    let from = view.ptr.offset(r * view.rs).cast();
                    let to: *mut f16 = block.ptr.cast();
                    std::slice::from_raw_parts_mut(to.offset(r * block.rs), block.cols)
                        .convert_from_f32_slice(std::slice::from_raw_parts(from, block.cols));
                }
            }
            (Lane::F32, DType::F16) => scatter(view, block, |x| f16::from_f32(f32::of(x))),
            (Lane::F32, DType::BF16) => scatter(view, block, |x| bf16::from_f32(f32::of(x))),
            (Lane::I32 | Lane::Bool, DType::F16) => scatter(view, block, |x| {
                f16::from_f32(CastTo::<f32>::cast_to(i32::of(x)))
            }),
            (Lane::I32 | Lane::Bool, DType::BF16) => scatter(view, block, |x| {
                bf16::from_f32(CastTo::<f32>::cast_to(i32::of(x)))
            }),
            (Lane::F32, DType::I32) => scatter(view, block, |x| CastTo::<i32>::cast_to(f32::of(x))),
            // Saturating, as `as` is; NaN gives 0.
            (Lane::F32, DType::U8) => scatter(view, block, |x| f32::of(x) as u8),
            (Lane::I32 | Lane::Bool, DType::F32) => {
                scatter(view, block, |x| CastTo::<f32>::cast_to(i32::of(x)))
            }
            (Lane::I32 | Lane::Bool, DType::U8) => scatter(view, block, |x| x as u8),
            (Lane::F32, DType::Bool) => scatter(view, block, |x| {
                u8::from(CastTo::<bool>::cast_to(f32::of(x)))
            }),
            (Lane::I32 | Lane::Bool, DType::Bool) => scatter(view, block, |x| u8::from(x != 0)),
        }
    }
}

/// # Safety
/// See [`store`].
unsafe fn scatter<T: Copy>(view: View, block: &Block, narrow: impl Fn(u32) -> T + Copy) {
    let dst = block.ptr.cast::<T>();
    // SAFETY: the caller's promise; every element lies at a coordinate inside the block.
    unsafe {
        if block.cs != 1
            && !view.is_invariant()
            && block.rs.unsigned_abs() < block.cs.unsigned_abs()
        {
            if block.rs == 1 {
                return scatter_columns(view, block, narrow);
            }
            // The memory is contiguous along columns, so the inner loop runs along them.
            for c in 0..block.cols {
                let line = dst.offset(c as isize * block.cs);
                for r in 0..block.rows as isize {
                    *line.offset(r * block.rs) = narrow(*view.ptr.offset(r * view.rs).add(c));
                }
            }
            return;
        }
        for r in 0..block.rows {
            let line = dst.offset(r as isize * block.rs);
            let src = view.ptr.offset(r as isize * view.rs);
            if view.is_invariant() {
                let x = narrow(*src);
                for c in 0..block.cols {
                    *line.offset(c as isize * block.cs) = x;
                }
            } else if block.cs == 1 {
                let (src, line) = (
                    std::slice::from_raw_parts(src, block.cols),
                    std::slice::from_raw_parts_mut(line, block.cols),
                );
                for (to, &x) in line.iter_mut().zip(src) {
                    *to = narrow(x);
                }
            } else {
                for c in 0..block.cols {
                    *line.offset(c as isize * block.cs) = narrow(*src.add(c));
                }
            }
        }
    }
}

/// [`scatter`] to columns of contiguous elements.
///
/// # Safety
/// See [`store`].
unsafe fn scatter_columns<T: Copy>(view: View, block: &Block, narrow: impl Fn(u32) -> T + Copy) {
    let (mut to, mut from) = (*block, view);
    let mut row = 0;
    while row < block.rows {
        // SAFETY: the caller's promise for some of the rows.
        row += unsafe {
            match block.rows - row {
                1 => scatter_some::<T, 1>(from, &to, narrow),
                2 => scatter_some::<T, 2>(from, &to, narrow),
                3 => scatter_some::<T, 3>(from, &to, narrow),
                _ => scatter_some::<T, SQUARE>(from, &to, narrow),
            }
        };
        to.ptr = block.ptr.cast::<T>().wrapping_add(row).cast();
        from.ptr = view.ptr.wrapping_offset(row as isize * view.rs);
    }
}

/// Writes the first rows of such a block, and returns their number.
///
/// # Safety
/// See [`store`].
unsafe fn scatter_some<T: Copy, const ROWS: usize>(
    view: View,
    block: &Block,
    narrow: impl Fn(u32) -> T + Copy,
) -> usize {
    let line = |r: usize| view.ptr.wrapping_offset(r as isize * view.rs);
    let column = |c: usize| -> *mut [T; ROWS] {
        let first = block.ptr.cast::<T>();
        first.wrapping_offset(c as isize * block.cs).cast()
    };
    let whole = block.cols - block.cols % SQUARE;
    // SAFETY: the caller's promise; an array is aligned as its elements.
    unsafe {
        for c in (0..whole).step_by(SQUARE) {
            let rows: [[u32; SQUARE]; ROWS] = std::array::from_fn(|r| *line(r).add(c).cast());
            let columns: [[T; ROWS]; SQUARE] =
                std::array::from_fn(|k| std::array::from_fn(|r| narrow(rows[r][k])));
            for (k, values) in columns.into_iter().enumerate() {
                *column(c + k) = values;
            }
        }
        for c in whole..block.cols {
            *column(c) = std::array::from_fn(|r| narrow(*line(r).add(c)));
        }
    }
    ROWS
}
