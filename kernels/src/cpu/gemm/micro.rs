//! The innermost loops: a small block of the result held in registers, one instruction set and
//! block shape each.
//!
//! A micro-kernel multiplies `R` rows of the left operand with one or two vectors of columns of the
//! right one over a part of the contracted axis, as in Goto and van de Geijn, "Anatomy of
//! High-Performance Matrix Multiplication" (2008), and BLIS (Van Zee and van de Geijn, 2015). Every
//! element of the result is one sequence of fused multiply-adds in the order of the contracted
//! axis, so that the blocking into rows and columns never changes a bit of it.

use super::super::Isa;
use super::few_rows;
use super::pack;
use super::planes;
use super::quantized;
use super::simd::{Portable, Simd};
use super::winograd;
use crate::cpu::tile::prefetch;

/// How the elements of a panel of the left operand are found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum LeftLayout {
    /// They are packed.
    Packed,
    /// Tables hold the offsets of rows and of steps.
    Indirect,
    /// Rows are equally far apart, and steps are neighbours. Later ones are requested.
    Strided,
}

/// A panel of the left operand: element (row i, step k) at `base + k·R + i` if it is packed in
/// panels of R rows, at `base + rows[i] + steps[k]` if it is indirect, and at `base + i·stride + k`
/// if it is strided.
#[derive(Clone, Copy)]
pub(in super::super) struct Left {
    pub base: *const f32,
    pub rows: *const i32,
    pub steps: *const i32,
    pub stride: isize,
    /// The base of the panel that is multiplied next, for [`LeftLayout::Strided`].
    pub next: *const f32,
}

/// Steps of a row in a cache line.
const LINE_STEPS: usize = 16;
/// Steps from the ones that are multiplied to the ones that are requested.
const REQUEST_AHEAD: usize = 64;

impl Left {
    /// A packed panel.
    pub fn packed(base: *const f32) -> Left {
        Left::indirect(base, std::ptr::null(), std::ptr::null())
    }

    /// An indirect one.
    pub fn indirect(base: *const f32, rows: *const i32, steps: *const i32) -> Left {
        Left {
            base,
            rows,
            steps,
            stride: 0,
            next: std::ptr::null(),
        }
    }

    /// One whose rows are `stride` elements apart; `next`: the base of the next.
    pub fn strided(base: *const f32, stride: isize, next: *const f32) -> Left {
        Left {
            stride,
            next,
            ..Left::packed(base)
        }
    }

    /// The same panel of `rows` rows from a later step on.
    #[inline(always)]
    pub unsafe fn from(mut self, step: usize, rows: usize, layout: LeftLayout) -> Left {
        // SAFETY: the caller's panel has this step.
        unsafe {
            match layout {
                LeftLayout::Indirect => self.steps = self.steps.add(step),
                LeftLayout::Packed => self.base = self.base.add(step * rows),
                LeftLayout::Strided => self.base = self.base.add(step),
            }
        }
        self
    }
}

/// A micro-panel of the right operand: vector c of step k at `at + k·stride + c·lanes` or, if there
/// are `steps`, at `at + steps[k] + c·stride`, inside a tile that is not packed. If there are
/// `steps` beside an indirect left panel, the sums run over these steps of both.
#[derive(Clone, Copy)]
pub(in super::super) struct Right {
    pub at: *const f32,
    pub stride: usize,
    pub steps: *const i32,
    /// Copied while this one is multiplied.
    pub ahead: Ahead,
}

/// Steps of the next right micro-panel, two vectors each, packed at `to`; column c of step k is read
/// at `from + k·stride + c·across`, and one of these distances is 1. A kernel that copies them
/// between its sums hides the misses of these loads, which no prefetcher foresees, and the work of
/// transposing.
#[derive(Clone, Copy)]
pub(in super::super) struct Ahead {
    pub from: *const f32,
    pub stride: usize,
    pub across: usize,
    pub to: *mut f32,
    pub steps: usize,
}

/// Steps of a column that are copied at a time if columns are apart: neighbours in a cache line.
const GROUP: usize = 4;
/// Steps from the one that is copied to the one that is requested: its copy follows after the latency
/// of memory.
const COPY_AHEAD: usize = 4;
/// Steps of a column from those that are transposed to those that are requested: a cache line.
const TRANSPOSE_AHEAD: usize = 16;

impl Ahead {
    pub const NOTHING: Ahead = Ahead {
        from: std::ptr::null(),
        stride: 0,
        across: 1,
        to: std::ptr::null_mut(),
        steps: 0,
    };

    /// The steps that each of `parts` kernels copies.
    pub fn share(&self, parts: usize) -> usize {
        let steps = self.steps.div_ceil(parts);
        match self.across {
            1 => steps,
            _ => steps.next_multiple_of(GROUP),
        }
    }

    /// At most `most` of the steps; the others remain.
    pub fn take(&mut self, most: usize, width: usize) -> Ahead {
        let steps = self.steps.min(most);
        let first = Ahead { steps, ..*self };
        self.from = self.from.wrapping_add(steps * self.stride);
        self.to = self.to.wrapping_add(steps * width);
        self.steps -= steps;
        first
    }
}

impl Right {
    /// A micro-panel of steps that are `stride` apart.
    pub fn packed(at: *const f32, stride: usize) -> Right {
        Right {
            at,
            stride,
            steps: std::ptr::null(),
            ahead: Ahead::NOTHING,
        }
    }
}

/// The role of the values in `acc` before a kernel runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Before {
    /// Unused: sums start from 0 and overwrite them.
    Nothing,
    /// A term: sums start from 0 and are added to them.
    Term,
    /// Partial sums: the kernel continues them as if they had never been stored.
    Sums,
}

/// `acc[i·acc_stride + j] = Σₖ left(i, k) · right(k, j)`, for k below `depth`, combined with the
/// previous values as [`Before`] says.
type Kernel = unsafe fn(
    depth: usize,
    left: Left,
    right: Right,
    acc: *mut f32,
    acc_stride: usize,
    before: Before,
);

/// The micro-kernels and packing of one instruction set.
pub(in super::super) struct Micro {
    /// Most rows of a block.
    pub mr: usize,
    /// Columns of one vector; a block has one or two vectors.
    pub lanes: usize,
    packed: &'static [[Kernel; 2]],
    indirect: &'static [[Kernel; 2]],
    strided: &'static [[Kernel; 2]],
    /// For packed left panels and right ones in a tile.
    tiled: &'static [[Kernel; 2]],
    /// For indirect left panels and some steps of packed right ones.
    listed: &'static [[Kernel; 2]],
    /// For packed and strided left panels, while the next right panel is copied, and for packed
    /// ones, while it is transposed; by rows − 1.
    copying: [&'static [Kernel]; 2],
    transposing: &'static [Kernel],
    pub pack: pack::Pack,
    pub gather: pack::Gather,
    pub fill: pack::Fill,
    pub decode: quantized::Decode,
    pub dots: few_rows::ComputeDots,
    pub convolve: planes::Convolve,
    pub correlate: planes::Correlate,
    pub convolve_whole: planes::ConvolveWhole,
    pub correlate_whole: planes::CorrelateWhole,
    /// The transforms of F(2×2, 3×3), F(4×4, 3×3) and F(2×2, 5×5).
    transforms: [winograd::Transforms; 3],
    pub transform_gradients: winograd::TransformGradients,
    pub transform_sums: winograd::TransformSums,
    /// A loop of [`PEAK_SUMS`] independent fused multiply-adds of vectors, so many times.
    pub peak: unsafe fn(rounds: usize) -> f32,
}

/// Sums of the loop that measures the peak: more than any CPU's latency times its units, and few
/// enough for 16 registers.
pub(in super::super) const PEAK_SUMS: usize = 12;

/// The addressing of the elements of a left panel.
trait LeftAccess: Copy {
    /// The layout of the panels that are read so.
    const LAYOUT: LeftLayout;
    /// The address of a step, to which the rows are relative.
    unsafe fn step<const R: usize>(left: &Left, step: usize) -> *const f32;
    /// The offsets of the rows from it, in bytes, which are added to addresses without scaling.
    unsafe fn rows<const R: usize>(left: &Left) -> [isize; R];
    /// Prefetches a later cache line of each row, when this many steps remain.
    #[inline(always)]
    unsafe fn request<const R: usize>(_left: &Left, _remaining: usize) {}
}

#[derive(Clone, Copy)]
struct Packed;

#[derive(Clone, Copy)]
struct Indirect;

#[derive(Clone, Copy)]
struct Strided;

/// Bytes of an element.
const ELEMENT_BYTES: isize = size_of::<f32>() as isize;

impl LeftAccess for Packed {
    const LAYOUT: LeftLayout = LeftLayout::Packed;

    #[inline(always)]
    unsafe fn step<const R: usize>(left: &Left, step: usize) -> *const f32 {
        // SAFETY: the caller stays inside the panel.
        unsafe { left.base.add(step * R) }
    }
    #[inline(always)]
    unsafe fn rows<const R: usize>(_left: &Left) -> [isize; R] {
        std::array::from_fn(|row| row as isize * ELEMENT_BYTES)
    }
}

impl LeftAccess for Indirect {
    const LAYOUT: LeftLayout = LeftLayout::Indirect;

    #[inline(always)]
    unsafe fn step<const R: usize>(left: &Left, step: usize) -> *const f32 {
        // SAFETY: the tables cover every row and step, and name elements of the tile at `base`.
        unsafe { left.base.offset(*left.steps.add(step) as isize) }
    }
    #[inline(always)]
    unsafe fn rows<const R: usize>(left: &Left) -> [isize; R] {
        // SAFETY: as above.
        std::array::from_fn(|row| unsafe { *left.rows.add(row) as isize * ELEMENT_BYTES })
    }
}

impl LeftAccess for Strided {
    const LAYOUT: LeftLayout = LeftLayout::Strided;

    #[inline(always)]
    unsafe fn step<const R: usize>(left: &Left, step: usize) -> *const f32 {
        // SAFETY: the caller stays inside the panel.
        unsafe { left.base.add(step) }
    }
    #[inline(always)]
    unsafe fn rows<const R: usize>(left: &Left) -> [isize; R] {
        std::array::from_fn(|row| row as isize * left.stride * ELEMENT_BYTES)
    }
    #[inline(always)]
    unsafe fn request<const R: usize>(left: &Left, remaining: usize) {
        let from = match REQUEST_AHEAD.checked_sub(remaining) {
            None => left.base.wrapping_add(REQUEST_AHEAD),
            Some(step) => left.next.wrapping_add(step),
        };
        (0..R as isize).for_each(|row| prefetch(from.wrapping_offset(row * left.stride).cast()));
    }
}

/// The addressing of the vectors of a right panel.
trait RightAccess: Copy {
    /// The step of both operands that is the k-th of the sum.
    #[inline(always)]
    unsafe fn step(_right: &Right, k: usize) -> usize {
        k
    }
    /// Whether [`Right::steps`] lists the steps of both operands.
    const LISTS: bool = false;
    /// The panel after its first steps.
    #[inline(always)]
    unsafe fn after(right: Right, steps: usize) -> Right {
        Right {
            at: right.at.wrapping_add(steps * right.stride),
            ..right
        }
    }
    /// The address of vector `c` of a step; of a panel unless it is given.
    #[inline(always)]
    unsafe fn vector<S: Simd>(right: &Right, step: usize, c: usize) -> *const f32 {
        // SAFETY: the caller stays inside the panel.
        unsafe { right.at.add(step * right.stride + c * S::LANES) }
    }
    /// Whether [`Right::ahead`] is copied.
    const COPIES: bool = false;
    /// Calls of [`RightAccess::copy`] for all of it.
    fn copies<S: Simd, const C: usize>(_ahead: &Ahead) -> usize {
        0
    }
    /// Copies a part of it; `column`: the first column that has not been copied of its first steps.
    unsafe fn copy<S: Simd, const C: usize>(_ahead: &mut Ahead, _column: &mut usize) {}
}

#[derive(Clone, Copy)]
struct Panel;

/// [`Panel`], while the next one is copied.
#[derive(Clone, Copy)]
struct Copying;

/// [`Panel`], while the next one, whose columns are apart, is copied.
#[derive(Clone, Copy)]
struct Transposing;

#[derive(Clone, Copy)]
struct Tile;

#[derive(Clone, Copy)]
struct Listed;

impl RightAccess for Listed {
    const LISTS: bool = true;

    #[inline(always)]
    unsafe fn step(right: &Right, k: usize) -> usize {
        // SAFETY: the list has this entry.
        unsafe { *right.steps.add(k) as usize }
    }
    #[inline(always)]
    unsafe fn after(right: Right, steps: usize) -> Right {
        // SAFETY: as for `Tile`.
        unsafe { Tile::after(right, steps) }
    }
    #[inline(always)]
    unsafe fn vector<S: Simd>(right: &Right, step: usize, c: usize) -> *const f32 {
        // SAFETY: as for `Panel`.
        unsafe { Panel::vector::<S>(right, step, c) }
    }
}

impl RightAccess for Copying {
    const COPIES: bool = true;

    #[inline(always)]
    fn copies<S: Simd, const C: usize>(ahead: &Ahead) -> usize {
        ahead.steps
    }
    #[inline(always)]
    unsafe fn copy<S: Simd, const C: usize>(ahead: &mut Ahead, _column: &mut usize) {
        // SAFETY: the caller's promise.
        unsafe { copy_step::<S, C>(ahead) };
    }
}

impl RightAccess for Transposing {
    const COPIES: bool = true;

    #[inline(always)]
    fn copies<S: Simd, const C: usize>(ahead: &Ahead) -> usize {
        ahead.steps.div_ceil(GROUP) * C * S::LANES
    }
    #[inline(always)]
    unsafe fn copy<S: Simd, const C: usize>(ahead: &mut Ahead, column: &mut usize) {
        // SAFETY: the caller's promise.
        unsafe { copy_column::<S, C>(ahead, column) };
    }
}

impl RightAccess for Panel {}

impl RightAccess for Tile {
    #[inline(always)]
    unsafe fn after(right: Right, steps: usize) -> Right {
        Right {
            // SAFETY: the table has so many entries.
            steps: unsafe { right.steps.add(steps) },
            ..right
        }
    }
    #[inline(always)]
    unsafe fn vector<S: Simd>(right: &Right, step: usize, c: usize) -> *const f32 {
        // SAFETY: the table covers every step, and names elements of the tile around `at`.
        unsafe {
            right
                .at
                .offset(*right.steps.add(step) as isize)
                .add(c * right.stride)
        }
    }
}

/// Steps that a kernel takes between two checks of its loop and of its copies. Multiply-adds hide one
/// check for each step on a quiet core, but not where another thread shares the core, perhaps that of
/// another virtual machine, because both then share the instructions that the core can start.
const STEPS: usize = 4;

#[inline(always)]
unsafe fn kernel<S: Simd, W: LeftAccess, F: RightAccess, const R: usize, const C: usize>(
    depth: usize,
    left: Left,
    right: Right,
    acc: *mut f32,
    acc_stride: usize,
    before: Before,
) {
    // SAFETY: the caller enables S's instruction set and gives panels and a block of these shapes.
    unsafe {
        let mut sum = [[S::zero(); C]; R];
        if before == Before::Sums {
            for (r, sum) in sum.iter_mut().enumerate() {
                for (c, sum) in sum.iter_mut().enumerate() {
                    *sum = S::load(acc.add(r * acc_stride + c * S::LANES));
                }
            }
        }
        let rows = W::rows::<R>(&left);
        let mut ahead = right.ahead;
        let mut column = 0;
        let (every, mut next) = match F::COPIES {
            true => ((depth / F::copies::<S, C>(&ahead).max(1)).max(1), 0),
            false => (0, usize::MAX),
        };
        let (mut left, mut right) = (left, right);
        let mut taken = 0;
        for group in 0..depth / STEPS {
            if group % (LINE_STEPS / STEPS) == 0 {
                W::request::<R>(&left, depth - taken);
            }
            while F::COPIES && taken >= next && ahead.steps > 0 {
                F::copy::<S, C>(&mut ahead, &mut column);
                next += every;
            }
            for step in 0..STEPS {
                add_step::<S, W, F, R, C>(step, &left, &right, &rows, &mut sum);
            }
            (left, right) = rest::<W, F, R>(left, right, STEPS);
            taken += STEPS;
        }
        for _ in taken..depth {
            add_step::<S, W, F, R, C>(0, &left, &right, &rows, &mut sum);
            (left, right) = rest::<W, F, R>(left, right, 1);
        }
        while F::COPIES && ahead.steps > 0 {
            F::copy::<S, C>(&mut ahead, &mut column);
        }
        // By reference: arrays that are moved into iterators are copied to the stack.
        for (r, sum) in sum.iter().enumerate() {
            for (c, &sum) in sum.iter().enumerate() {
                let to = acc.add(r * acc_stride + c * S::LANES);
                S::store(
                    to,
                    if before == Before::Term {
                        S::add(S::load(to), sum)
                    } else {
                        sum
                    },
                );
            }
        }
    }
}

/// Both panels without their first steps.
#[inline(always)]
unsafe fn rest<W: LeftAccess, F: RightAccess, const R: usize>(
    left: Left,
    right: Right,
    steps: usize,
) -> (Left, Right) {
    // SAFETY: the caller's panels have these steps.
    unsafe {
        let left = match F::LISTS {
            true => left,
            false => left.from(steps, R, W::LAYOUT),
        };
        (left, F::after(right, steps))
    }
}

/// Adds the products of the step that is the k-th of those that remain to the sums.
#[inline(always)]
unsafe fn add_step<S: Simd, W: LeftAccess, F: RightAccess, const R: usize, const C: usize>(
    k: usize,
    left: &Left,
    right: &Right,
    rows: &[isize; R],
    sums: &mut [[S::V; C]; R],
) {
    // SAFETY: as for `kernel`, whose panels have this step.
    unsafe {
        let step = F::step(right, k);
        let mut b = [S::zero(); C];
        for (c, b) in b.iter_mut().enumerate() {
            *b = S::load(F::vector::<S>(right, step, c));
        }
        let at = W::step::<R>(left, step);
        for (sums, &row) in sums.iter_mut().zip(rows) {
            let a = S::splat(at.byte_offset(row));
            for (sum, b) in sums.iter_mut().zip(b) {
                // In this order, because the compiler would load all rows first and spill the sums.
                *sum = S::in_order(S::fma(a, b, *sum));
            }
        }
    }
}

/// Copies the first of the steps.
#[inline(always)]
unsafe fn copy_step<S: Simd, const C: usize>(ahead: &mut Ahead) {
    let Ahead { from, to, .. } = ahead.take(1, C * S::LANES);
    let later = from.wrapping_add(COPY_AHEAD * ahead.stride);
    (0..C).for_each(|c| prefetch(later.wrapping_add(c * S::LANES).cast()));
    // SAFETY: the caller enables S's instruction set and gives steps to read and to write.
    unsafe {
        let step: [S::V; C] = std::array::from_fn(|c| S::load(from.add(c * S::LANES)));
        for (c, &v) in step.iter().enumerate() {
            S::store(to.add(c * S::LANES), v);
        }
    }
}

/// Copies a column of the first steps, one element after another: the sums leave no vector register
/// for more, and the loads and stores run beside them.
#[inline(always)]
unsafe fn copy_column<S: Simd, const C: usize>(ahead: &mut Ahead, column: &mut usize) {
    let width = C * S::LANES;
    let count = ahead.steps.min(GROUP);
    // SAFETY: the caller gives steps to read and to write. (Volatile, because the compiler would
    // gather vectors.)
    unsafe {
        let from = ahead.from.add(*column * ahead.across);
        let to = ahead.to.add(*column);
        prefetch(from.wrapping_add(TRANSPOSE_AHEAD).cast());
        let copy = |k: usize| {
            to.add(k * width)
                .cast::<u32>()
                .write_volatile(from.add(k).cast::<u32>().read_volatile())
        };
        match count {
            GROUP => (0..GROUP).for_each(copy),
            _ => (0..count).for_each(copy),
        }
    }
    *column += 1;
    if *column == width {
        *column = 0;
        ahead.take(count, width);
    }
}

/// See [`Micro::peak`]; returns a sum, so that none of them is left out.
#[inline(always)]
unsafe fn multiply_add<S: Simd>(rounds: usize) -> f32 {
    let (factors, mut out) = ([0.5f32; 16], [0.0f32; 16]);
    // SAFETY: the caller enables S's instruction set, and a vector has at most 16 elements.
    unsafe {
        let factor = S::load(std::hint::black_box(&factors).as_ptr());
        let mut sums = [S::zero(); PEAK_SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = S::fma(*sum, factor, factor);
            }
        }
        let total = sums
            .into_iter()
            .fold(S::zero(), |total, sum| S::add(total, sum));
        S::store(out.as_mut_ptr(), total);
    }
    out[0]
}

/// The table of kernels by rows − 1 and vectors − 1.
macro_rules! table {
    ($function:ident, $left:ty, $right:ty, $($rows:literal)+) => {
        &[$([$function::<$left, $right, $rows, 1>, $function::<$left, $right, $rows, 2>]),+]
    };
}

/// The [`Micro`] of one instruction set: the shared code, compiled with its features enabled.
macro_rules! micro {
    ($name:ident, $simd:ty, [$($feature:literal)?], $($rows:literal)+) => {
        static $name: Micro = {
            $(#[target_feature(enable = $feature)])?
            unsafe fn run<W: LeftAccess, F: RightAccess, const R: usize, const C: usize>(
                depth: usize, left: Left, right: Right, acc: *mut f32, acc_stride: usize, before: Before,
            ) {
                // SAFETY: this function's caller keeps the same promises, and its features are S's.
                unsafe { kernel::<$simd, W, F, R, C>(depth, left, right, acc, acc_stride, before) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn pack(from: pack::Source, count: usize, depth: usize, to: *mut f32, width: usize) {
                // SAFETY: as above.
                unsafe { pack::pack::<$simd>(from, count, depth, to, width) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn gather(base: *const f32, steps: &[i32], pieces: &[pack::Piece], vectors: &[u16], to: *mut f32) {
                // SAFETY: as above.
                unsafe { pack::gather::<$simd>(base, steps, pieces, vectors, to) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn fill(lines: &pack::Lines) {
                // SAFETY: as above.
                unsafe { pack::fill::<$simd>(lines) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn decode(part: &quantized::Part) {
                // SAFETY: as above.
                unsafe { quantized::decode::<$simd>(part) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn dots(dots: &few_rows::Dots) {
                // SAFETY: as above.
                unsafe { few_rows::dots::<$simd>(dots) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn convolve(planes: &planes::Planes) {
                // SAFETY: as above.
                unsafe { planes::convolve::<$simd>(planes) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn correlate(planes: &planes::Planes) {
                // SAFETY: as above.
                unsafe { planes::correlate::<$simd>(planes) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn convolve_whole(planes: &planes::WholePlanes) {
                // SAFETY: as above.
                unsafe { planes::convolve_whole::<$simd>(planes) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn correlate_whole(planes: &planes::WholePlanes) {
                // SAFETY: as above.
                unsafe { planes::correlate_whole::<$simd>(planes) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn transform_tiles<const P: usize, const M: usize>(tiles: &winograd::Tiles) {
                // SAFETY: as above.
                unsafe { winograd::tiles::<$simd, P, M>(tiles) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn transform_kernels<const P: usize, const R: usize>(kernels: &winograd::Kernels) {
                // SAFETY: as above.
                unsafe { winograd::kernels::<$simd, P, R>(kernels) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn transform_products<const P: usize, const M: usize>(products: &winograd::Products) {
                // SAFETY: as above.
                unsafe { winograd::products::<$simd, P, M>(products) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn transform_gradients(gradients: &winograd::Gradients) {
                // SAFETY: as above.
                unsafe { winograd::gradients::<$simd>(gradients) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn transform_sums(sums: &winograd::Sums) {
                // SAFETY: as above.
                unsafe { winograd::sums::<$simd>(sums) }
            }
            $(#[target_feature(enable = $feature)])?
            unsafe fn peak(rounds: usize) -> f32 {
                // SAFETY: as above.
                unsafe { multiply_add::<$simd>(rounds) }
            }
            Micro {
                mr: [$($rows),+].len(),
                lanes: <$simd>::LANES,
                packed: table!(run, Packed, Panel, $($rows)+),
                indirect: table!(run, Indirect, Panel, $($rows)+),
                strided: table!(run, Strided, Panel, $($rows)+),
                tiled: table!(run, Packed, Tile, $($rows)+),
                listed: table!(run, Indirect, Listed, $($rows)+),
                copying: [
                    &[$(run::<Packed, Copying, $rows, 2>),+],
                    &[$(run::<Strided, Copying, $rows, 2>),+],
                ],
                transposing: &[$(run::<Packed, Transposing, $rows, 2>),+],
                pack,
                gather,
                fill,
                decode,
                dots,
                convolve,
                correlate,
                convolve_whole,
                correlate_whole,
                transforms: [
                    winograd::Transforms {
                        tiles: transform_tiles::<4, 2>,
                        kernels: transform_kernels::<4, 3>,
                        products: transform_products::<4, 2>,
                    },
                    winograd::Transforms {
                        tiles: transform_tiles::<6, 4>,
                        kernels: transform_kernels::<6, 3>,
                        products: transform_products::<6, 4>,
                    },
                    winograd::Transforms {
                        tiles: transform_tiles::<6, 2>,
                        kernels: transform_kernels::<6, 5>,
                        products: transform_products::<6, 2>,
                    },
                ],
                transform_gradients,
                transform_sums,
                peak,
            }
        };
    };
}

micro!(PORTABLE, Portable, [], 1 2 3 4);
#[cfg(target_arch = "x86_64")]
micro!(AVX2, super::simd::Avx2, ["avx2,fma,f16c"], 1 2 3 4 5 6);
#[cfg(target_arch = "x86_64")]
micro!(AVX512, super::simd::Avx512, ["avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"], 1 2 3 4 5 6 7 8 9 10 11 12 13 14);

impl Micro {
    /// The kernels of an instruction set, which must be available.
    pub fn of(isa: Isa) -> &'static Micro {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &AVX2,
            _ => &PORTABLE,
        }
    }

    /// The transforms of a filtering.
    pub fn transforms(&self, filtering: winograd::Filtering) -> &winograd::Transforms {
        &self.transforms[match filtering {
            winograd::Filtering::F2_3 => 0,
            winograd::Filtering::F4_3 => 1,
            _ => 2,
        }]
    }

    /// Columns of the widest block.
    pub fn nr(&self) -> usize {
        2 * self.lanes
    }

    /// The width of the block that covers `columns` columns, or as many as one block may have.
    pub fn width(&self, columns: usize) -> usize {
        if columns <= self.lanes {
            self.lanes
        } else {
            self.nr()
        }
    }

    /// The kernel for a left panel of `rows` rows, and a right one `width` wide, which is packed
    /// unless the left one is. If steps of the next right panel are to be copied, this one is also
    /// two vectors wide, and the left one not indirect; only beside a packed one are they
    /// transposed.
    pub fn kernel(&self, left: LeftLayout, rows: usize, right: &Right, width: usize) -> Kernel {
        let table = match (left, right.steps.is_null()) {
            (LeftLayout::Indirect, true) => self.indirect,
            (LeftLayout::Indirect, false) => self.listed,
            (LeftLayout::Strided, _) => self.strided,
            (LeftLayout::Packed, true) => self.packed,
            (LeftLayout::Packed, false) => self.tiled,
        };
        match (right.ahead.steps, right.ahead.across) {
            (0, _) => table[rows - 1][width / self.lanes - 1],
            (_, 1) => self.copying[usize::from(left == LeftLayout::Strided)][rows - 1],
            _ => self.transposing[rows - 1],
        }
    }
}
