//! The execution of steps on tiles.

use std::ops::Range;

use super::bind::{Bound, LINE, prefetch_run};
use super::chain::ChainCall;
use super::compile::{Apply, ChainStep, Hoisted, Place, Step, StoreStep};
use super::copy::{self, Block};
use super::ops::{Call, View};
use super::{MAX_ROWS, VECTOR};
use crate::dtype::DType;
use crate::spec::ValueId;

/// The current position of a strided access.
#[derive(Clone, Copy)]
pub(super) struct Cursor {
    /// The address of the first point; of an index, its value there.
    first: *mut u8,
    /// Elements from row to row and from column to column.
    rs: isize,
    cs: isize,
    /// Bytes of an element; 1 for an index.
    bytes: isize,
}

impl Cursor {
    /// The first point of a tile.
    fn at(&self, tile: &Tile) -> *mut u8 {
        self.first.wrapping_offset(
            (tile.row as isize * self.rs + tile.col as isize * self.cs) * self.bytes,
        )
    }
}

/// Part of the block that the cursors stand at.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Columns of a row in a register: `cols` rounded up to whole vectors.
    pub(super) pad: usize,
    /// The first row and column, counted from the cursors.
    row: usize,
    col: usize,
    /// Lanes from the start of the buffers of kept values to this tile's part.
    kept_at: usize,
    /// Position of the first point among all that are reduced to the same value.
    pub(super) position: usize,
}

impl Tile {
    /// `rows × cols` points where the cursors stand; at most [`super::TILE`] with columns rounded
    /// up to whole vectors.
    pub fn new(rows: usize, cols: usize) -> Tile {
        Tile {
            rows,
            cols,
            pad: cols.next_multiple_of(VECTOR),
            row: 0,
            col: 0,
            kept_at: 0,
            position: 0,
        }
    }

    /// The tile that begins at another row and column.
    pub fn at(self, row: usize, col: usize) -> Tile {
        Tile { row, col, ..self }
    }

    /// The tile at a position of its reduction, with its part of kept values.
    pub fn reducing(self, position: usize, kept_at: usize) -> Tile {
        Tile {
            position,
            kept_at,
            ..self
        }
    }
}

/// Most operands whose next elements are requested.
const RUNS: usize = 4;

/// Elements that are read soon: runs of so many bytes.
struct Next {
    runs: [*const u8; RUNS],
    count: usize,
    bytes: usize,
    /// Bytes of each run that belong to one step.
    part: usize,
}

impl Next {
    /// Requests the part of the elements that belongs to step `k`: few at a time, because a core
    /// waits for no more than some twenty lines at once.
    #[inline(always)]
    fn send(&self, k: usize) {
        let start = k * self.part;
        for run in &self.runs[..self.count] {
            prefetch_run(
                run.wrapping_add(start),
                self.part.min(self.bytes.saturating_sub(start)),
            );
        }
    }
}

/// The direction in which a tile is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Along {
    /// Each row gives a value: columns are the reduced axis.
    Columns,
    /// Each column gives a value: rows are the reduced axis.
    Rows,
}

/// The interpreter of one caller: the program, and the memory it works in.
pub(crate) struct Machine<'a> {
    pub(super) bound: &'a Bound<'a>,
    cursors: *mut Cursor,
    views: *mut View,
    pub(super) lanes: *mut u32,
    pub(super) along: Along,
    acc: View,
    /// The anchor's values lie in memory that is also stored to.
    acc_aliased: bool,
}

impl<'a> Machine<'a> {
    /// # Safety
    /// `scratch` must point to `scratch_bytes()` bytes, 64-byte aligned, that no other thread uses
    /// while the machine lives.
    pub unsafe fn new(bound: &'a Bound<'a>, along: Along, scratch: *mut u8) -> Machine<'a> {
        let code = bound.code;
        // SAFETY: the offsets lie inside the scratch memory.
        let (views, lanes) = unsafe {
            (
                scratch.add(code.views_at).cast::<View>(),
                scratch.add(code.lanes_at).cast(),
            )
        };
        for (value, bits) in &code.program.constants {
            // SAFETY: there is a view for each value.
            unsafe {
                views.add(usize::from(*value)).write(View {
                    ptr: bits,
                    rs: 0,
                    cs: 0,
                })
            };
        }
        let acc = View {
            ptr: std::ptr::null(),
            rs: 0,
            cs: 1,
        };
        Machine {
            bound,
            cursors: scratch.cast(),
            views,
            lanes,
            along,
            acc,
            acc_aliased: false,
        }
    }

    /// Moves the cursors to the point `at`, with rows and columns along the given axes; without a
    /// column axis, columns go along the trailing axes that all accesses iterate as one.
    pub fn seek(&mut self, at: &[usize], row_axis: Option<usize>, col_axis: Option<usize>) {
        for (k, access) in self.bound.accesses().iter().enumerate() {
            let offset = at
                .iter()
                .zip(&access.strides)
                .fold(access.offset, |sum, (&i, &stride)| {
                    sum + i as isize * stride
                });
            let rs = row_axis.map_or(0, |axis| access.strides[axis]);
            let cs = col_axis.map_or(access.inner, |axis| access.strides[axis]);
            let first = access.base.wrapping_offset(offset * access.bytes);
            // SAFETY: there is a cursor for each access.
            unsafe {
                self.cursors.add(k).write(Cursor {
                    first,
                    rs,
                    cs,
                    bytes: access.bytes,
                })
            };
        }
    }

    /// Redirects the stores of the last operand, f32, to other addresses.
    pub fn store_last_to(&mut self, to: *mut f32, stride: usize) {
        let last = self.bound.code.dtypes.len() - 1;
        // SAFETY: there is a cursor for each access, and operands are the first of them.
        unsafe {
            self.cursors.add(last).write(Cursor {
                first: to.cast(),
                rs: stride as isize,
                cs: 1,
                bytes: 4,
            })
        };
    }

    /// Sets the address of the anchor's values of the block at the cursors.
    pub fn set_acc(&mut self, acc: *const u32, stride: usize, rows: usize, cols: usize) {
        self.acc = View {
            ptr: acc,
            rs: stride as isize,
            cs: 1,
        };
        let span = |ptr: *const u8, rs: isize, cs: isize, bytes: usize| {
            let last = (rows as isize - 1) * rs + (cols as isize - 1) * cs;
            let start = ptr.addr();
            start..start.wrapping_add_signed((last + 1) * bytes as isize)
        };
        let held = span(acc.cast(), self.acc.rs, 1, 4);
        self.acc_aliased = self.bound.code.program.per_element_stores.iter().any(|s| {
            let block = self.block(s.access, &Tile::new(rows, cols));
            let written = span(block.ptr, block.rs, block.cs, block.dtype.bytes());
            written.start < held.end && held.start < written.end
        });
    }

    pub(super) fn view(&self, value: ValueId) -> View {
        self.view_at(value.into())
    }

    pub(super) fn set_view(&self, value: ValueId, view: View) {
        self.set_view_at(value.into(), view);
    }

    // Views are read and written field by field. A copy by vectors of several fields, whose stores
    // are narrower and still in progress, waits for these stores and so for all results before
    // them, instead of overlapping the next step with this one.

    fn view_at(&self, at: usize) -> View {
        // SAFETY: there is a view for each value, and after those one for each hoisted value,
        // written by the step that made the value.
        unsafe {
            let view = self.views.add(at);
            View {
                ptr: (&raw const (*view).ptr).read_volatile(),
                rs: (&raw const (*view).rs).read_volatile(),
                cs: (&raw const (*view).cs).read_volatile(),
            }
        }
    }

    fn set_view_at(&self, at: usize, View { ptr, rs, cs }: View) {
        // SAFETY: as above.
        unsafe {
            let view = self.views.add(at);
            (&raw mut (*view).ptr).write_volatile(ptr);
            (&raw mut (*view).rs).write_volatile(rs);
            (&raw mut (*view).cs).write_volatile(cs);
        }
    }

    fn cursor(&self, access: u16) -> Cursor {
        // SAFETY: there is a cursor for each access, written by `seek`.
        unsafe { *self.cursors.add(usize::from(access)) }
    }

    /// A tile of an operand.
    fn block(&self, access: u16, tile: &Tile) -> Block {
        let cursor = self.cursor(access);
        let dtype = self.bound.code.dtypes[usize::from(access)];
        Block {
            ptr: cursor.at(tile),
            dtype,
            rows: tile.rows,
            cols: tile.cols,
            rs: cursor.rs,
            cs: cursor.cs,
        }
    }

    fn place(&self, place: Place, tile: &Tile) -> *mut u32 {
        let program = &self.bound.code.program;
        let at = if place.kept {
            program.lanes + place.at * self.bound.code.kept_lanes + tile.kept_at
        } else {
            place.at
        };
        // SAFETY: the register file and the buffers lie inside the scratch memory.
        unsafe { self.lanes.add(at) }
    }

    /// The program's steps with those of invariant values apart, if columns go along the axis along
    /// which these are invariant.
    pub(super) fn hoisted(&self) -> Option<&'a Hoisted> {
        let along = |hoisted: &&Hoisted| {
            hoisted
                .accesses
                .iter()
                .all(|&access| self.cursor(access).cs == 0)
        };
        self.bound.code.program.hoisted.as_ref().filter(along)
    }

    /// Computes invariant values for some rows, and records their addresses.
    ///
    /// # Safety
    /// The rows, at most [`MAX_ROWS`], must be part of the space at the cursors.
    pub(super) unsafe fn compute_invariant(&self, hoisted: &Hoisted, rows: Range<usize>) {
        // SAFETY: the caller's promise; registers have a lane for each row.
        unsafe {
            self.steps(
                &hoisted.invariant,
                &Tile::new(rows.len(), 1).at(rows.start, 0),
            )
        };
        for (k, &value) in hoisted.values.iter().enumerate() {
            self.set_view_at(self.bound.code.values + k, self.view(value));
        }
    }

    /// Computes the varying values of a tile that starts `row` rows after the first row of the
    /// invariant values.
    ///
    /// # Safety
    /// As for [`Machine::compute_per_element`]; the tile's rows must be among those.
    pub(super) unsafe fn compute_varying(&self, hoisted: &Hoisted, row: usize, tile: &Tile) {
        for (k, &value) in hoisted.values.iter().enumerate() {
            let view = self.view_at(self.bound.code.values + k);
            self.set_view(
                value,
                View {
                    ptr: view.ptr.wrapping_offset(row as isize * view.rs),
                    ..view
                },
            );
        }
        // SAFETY: the caller's promise.
        unsafe { self.steps(&hoisted.varying, tile) }
    }

    /// Computes the per-row values of a level. In `tile`, only the axis that is kept counts.
    ///
    /// # Safety
    /// The tile must be part of the space at the cursors, and all values of lower levels must have
    /// been computed.
    pub unsafe fn compute_per_row(&self, level: usize, tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { self.steps(&self.bound.code.program.levels[level].per_row, tile) }
    }

    /// Computes the per-element values of a level and adds them to its accumulators.
    ///
    /// # Safety
    /// See [`Machine::compute_per_row`].
    pub unsafe fn compute_per_element(&self, level: usize, tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { self.steps(&self.bound.code.program.levels[level].per_element, tile) }
    }

    /// # Safety
    /// See [`Machine::compute_per_row`].
    unsafe fn steps(&self, steps: &[Step], tile: &Tile) {
        let next = self.next(steps, tile);
        for (k, step) in steps.iter().enumerate() {
            next.send(k);
            // SAFETY: the caller's promise; steps come after those that compute their arguments.
            unsafe {
                match step {
                    Step::Load {
                        value,
                        access,
                        place,
                        stored,
                    } => {
                        let keep = *stored && self.bound.overwrites;
                        self.set_view(*value, self.load(*access, *place, keep, tile));
                    }
                    Step::Acc {
                        value,
                        place,
                        stored,
                    } => self.set_view(
                        *value,
                        self.load_acc(*place, *stored && self.acc_aliased, tile),
                    ),
                    Step::Index {
                        value,
                        access,
                        place,
                    } => self.set_view(*value, self.index(*access, *place, tile)),
                    Step::Apply(apply) => {
                        self.set_view(apply.value, self.apply(apply, [0; 4], tile))
                    }
                    Step::Chain(chain) => self.set_view(chain.value, self.chain(chain, tile)),
                    Step::Random(apply, state, stream) => {
                        self.set_view(
                            apply.value,
                            self.apply(apply, self.random_state(*state, *stream), tile),
                        );
                    }
                    Step::Restore { value, place } => {
                        self.set_view(
                            *value,
                            View {
                                ptr: self.place(*place, tile),
                                rs: tile.pad as isize,
                                cs: 1,
                            },
                        );
                    }
                    Step::Reduce(k) => self.reduce(*k, tile),
                }
            }
        }
    }

    /// The elements that the next tile reads in place, if tiles follow one another in memory beyond
    /// the caches. The CPU's own prefetchers stop at the end of a page, which is as long as a tile.
    /// For a single operand these are the elements of the tile after the next one, because the last
    /// lines of the next tile would arrive too late; with several operands they arrive in time.
    fn next(&self, steps: &[Step], tile: &Tile) -> Next {
        let bytes = tile.rows * tile.cols * 4;
        let mut next = Next {
            runs: [std::ptr::null(); RUNS],
            count: 0,
            bytes,
            part: 0,
        };
        if !self.bound.streams || steps.is_empty() {
            return next;
        }
        next.part = bytes.div_ceil(steps.len()).next_multiple_of(LINE);
        for step in steps {
            let Step::Load { access, .. } = step else {
                continue;
            };
            let cursor = self.cursor(*access);
            let follows = cursor.bytes == 4
                && cursor.cs == 1
                && (tile.rows == 1 || cursor.rs == tile.cols as isize);
            if follows && next.count < RUNS {
                next.runs[next.count] = cursor.at(tile).wrapping_add(bytes);
                next.count += 1;
            }
        }
        if next.count == 1 {
            next.runs[0] = next.runs[0].wrapping_add(bytes);
        }
        next
    }

    /// With `copied`, values that could be read in place are copied too, because they are stored
    /// later, when their memory may have changed.
    ///
    /// # Safety
    /// See [`Machine::compute_per_row`].
    unsafe fn load(&self, access: u16, place: Place, copied: bool, tile: &Tile) -> View {
        let cursor = self.cursor(access);
        let whole = tile.cols == tile.pad;
        if cursor.bytes == 4 && !copied && (cursor.cs == 0 || (cursor.cs == 1 && whole)) {
            return View {
                ptr: cursor.at(tile).cast(),
                rs: cursor.rs,
                cs: usize::from(cursor.cs != 0),
            };
        }
        let mut block = self.block(access, tile);
        // Repeated values are copied once.
        if block.rs == 0 {
            block.rows = 1;
        }
        let (width, invariant) = if block.cs == 0 {
            (1, true)
        } else {
            (tile.pad, false)
        };
        block.cols = if invariant { 1 } else { block.cols };
        let to = self.place(place, tile);
        // SAFETY: the block lies inside its argument, and a register holds a tile.
        unsafe { copy::load(&block, to, width) };
        View {
            ptr: to,
            rs: if block.rs == 0 { 0 } else { width as isize },
            cs: usize::from(!invariant),
        }
    }

    /// # Safety
    /// The anchor's values must be readable where `set_acc` said.
    unsafe fn load_acc(&self, place: Place, copied: bool, tile: &Tile) -> View {
        let ptr = self
            .acc
            .ptr
            .wrapping_offset(tile.row as isize * self.acc.rs + tile.col as isize);
        if tile.cols == tile.pad && !copied {
            return View { ptr, ..self.acc };
        }
        // The lane does not matter: four bytes are copied as they are.
        let block = Block {
            ptr: ptr.cast_mut().cast(),
            dtype: DType::I32,
            rows: tile.rows,
            cols: tile.cols,
            rs: self.acc.rs,
            cs: 1,
        };
        let to = self.place(place, tile);
        // SAFETY: the caller's promise, and a register holds a tile.
        unsafe { copy::load(&block, to, tile.pad) };
        View {
            ptr: to,
            rs: tile.pad as isize,
            cs: 1,
        }
    }

    /// # Safety
    /// See [`Machine::compute_per_row`].
    unsafe fn index(&self, access: u16, place: Place, tile: &Tile) -> View {
        let Cursor { rs, cs, .. } = self.cursor(access);
        let first = self.cursor(access).at(tile).addr() as isize;
        let invariant = cs == 0;
        let rows = if rs == 0 { 1 } else { tile.rows };
        let width = if invariant { 1 } else { tile.pad };
        let to = self.place(place, tile);
        for r in 0..rows {
            // SAFETY: a register holds a tile.
            let line = unsafe { std::slice::from_raw_parts_mut(to.add(r * width), width) };
            let start = (first + r as isize * rs) as u32;
            for (c, out) in line.iter_mut().enumerate() {
                *out = start.wrapping_add((c as u32).wrapping_mul(cs as u32));
            }
        }
        View {
            ptr: to,
            rs: if rs == 0 { 0 } else { width as isize },
            cs: usize::from(!invariant),
        }
    }

    /// Seed, step and stream of a random operation.
    ///
    /// # Safety
    /// The operand must be readable.
    unsafe fn random_state(&self, access: u16, stream: u32) -> [u32; 4] {
        let state = self.block(access, &Tile::new(1, 1)).ptr.cast::<u32>();
        // SAFETY: the caller's promise; `Spec::arguments` counts three elements.
        unsafe { [*state, *state.add(1), *state.add(2), stream] }
    }

    /// Applies an operation where its arguments vary: to a whole tile, to one row if all rows are
    /// the same, to one value per row if all columns are.
    ///
    /// # Safety
    /// See [`Machine::compute_per_row`].
    #[inline(always)]
    unsafe fn apply(&self, step: &Apply, context: [u32; 4], tile: &Tile) -> View {
        let [x, y, z] = step.args.map(|arg| self.view(arg));
        let which = (usize::from(x.is_invariant())
            | usize::from(y.is_invariant()) << 1
            | usize::from(z.is_invariant()) << 2)
            & step.used;
        let by_row = x.rs | y.rs | z.rs != 0;
        let place = self.place(step.place, tile);
        if which == step.used || !(by_row || tile.rows == 1) {
            // SAFETY: the caller's promise.
            return unsafe { self.apply_repeated(step, [x, y, z], context, tile) };
        }
        let (mut out, mut out_rs) = (place, tile.pad);
        if let Some(access) = step.direct
            && let Some(operand) = self.direct(access, step.unread, tile)
        {
            (out, out_rs) = (operand.at(tile).cast(), operand.rs as usize);
        }
        let (mut rows, mut lanes) = (tile.rows, tile.pad);
        if rows > 1 {
            // Contiguous rows are one long row.
            let pad = tile.pad as isize;
            if out_rs == tile.pad
                && [x, y, z]
                    .iter()
                    .all(|v| v.rs == if v.is_invariant() { 0 } else { pad })
            {
                (rows, lanes) = (1, rows * tile.pad);
            }
        }
        let call = Call {
            rows,
            lanes,
            args: [x, y, z],
            out,
            out_rs,
            context,
        };
        // SAFETY: views hold whole vectors of every row; the result is a register, or memory that
        // overlaps no view.
        unsafe { step.code.0[which](&call) };
        // (A per-row value has one row here, and repeats where it is used.)
        View {
            ptr: out,
            rs: if by_row { out_rs as isize } else { 0 },
            cs: 1,
        }
    }

    /// Computes a chain, in place of its first argument if that is where the result is stored.
    ///
    /// # Safety
    /// See [`Machine::compute_per_row`].
    unsafe fn chain(&self, step: &ChainStep, tile: &Tile) -> View {
        let args = step.found.args.map(|arg| self.view(arg));
        let mut call = ChainCall {
            rows: tile.rows,
            lanes: tile.pad,
            args,
            out: self.place(step.place, tile),
            out_rs: tile.pad,
        };
        let direct = |unread| self.direct(step.direct?, unread, tile);
        let mut in_place = false;
        if let Some(operand) = direct(step.unread) {
            let (to, rs) = (operand.at(tile).cast::<u32>(), operand.rs as usize);
            let first = args[0];
            in_place =
                first.ptr == to && first.cs == 1 && (tile.rows == 1 || first.rs == operand.rs);
            if in_place || direct(step.unread | step.first).is_some() {
                (call.out, call.out_rs) = (to, rs);
            }
        }
        let pad = tile.pad as isize;
        let is_one_line = |v: &View| v.rs == if v.is_invariant() { 0 } else { pad };
        if call.out_rs == tile.pad && args.iter().all(is_one_line) {
            (call.rows, call.lanes) = (1, tile.rows * tile.pad);
        }
        // SAFETY: views hold whole vectors of every row; the result is a register, or memory that
        // overlaps no other view than the first, in place.
        unsafe { step.chain.run(&call, in_place) };
        View {
            ptr: call.out,
            rs: call.out_rs as isize,
            cs: 1,
        }
    }

    /// [`Machine::apply`] where all rows or all columns are the same.
    ///
    /// # Safety
    /// See [`Machine::compute_per_row`].
    #[cold]
    #[inline(never)]
    unsafe fn apply_repeated(
        &self,
        step: &Apply,
        args: [View; 3],
        context: [u32; 4],
        tile: &Tile,
    ) -> View {
        let place = self.place(step.place, tile);
        // A value that is kept for later passes is written out per element.
        let out = if step.place.kept { self.spare() } else { place };
        let which = args
            .iter()
            .enumerate()
            .fold(0, |bits, (k, v)| bits | usize::from(v.is_invariant()) << k)
            & step.used;
        let by_row = args.iter().any(|v| v.rs != 0);
        let mut call = Call {
            rows: 1,
            lanes: tile.pad,
            args,
            out,
            out_rs: 0,
            context,
        };
        let mut view = View {
            ptr: out,
            rs: 0,
            cs: usize::from(which != step.used),
        };
        let mut columns = [[0u32; MAX_ROWS]; 3];
        if view.is_invariant() {
            // One value per row, computed side by side.
            let rows = if by_row { tile.rows } else { 1 };
            for (view, column) in call.args.iter_mut().zip(&mut columns) {
                for (r, x) in column[..rows].iter_mut().enumerate() {
                    // SAFETY: the view holds a value for each row.
                    *x = unsafe { *view.ptr.offset(r as isize * view.rs) };
                }
                *view = View {
                    ptr: column.as_ptr(),
                    rs: 0,
                    cs: 1,
                };
            }
            call.lanes = rows.next_multiple_of(VECTOR);
            view.rs = isize::from(by_row);
        }
        // SAFETY: the columns and registers hold as many lanes as a tile may have rows, the views
        // one row.
        unsafe { step.code.0[if view.is_invariant() { 0 } else { which }](&call) };
        if step.place.kept {
            // SAFETY: the buffer of a kept value holds the tile.
            return unsafe { self.spread(view, place, tile) };
        }
        view
    }

    /// Writes a value that repeats out to whole rows.
    ///
    /// # Safety
    /// `to` must hold a tile and not overlap the view.
    pub(super) unsafe fn spread(&self, view: View, to: *mut u32, tile: &Tile) -> View {
        for r in 0..tile.rows {
            // SAFETY: the view holds each row, and `to` a tile.
            unsafe {
                let from = view.ptr.offset(r as isize * view.rs);
                let line = std::slice::from_raw_parts_mut(to.add(r * tile.pad), tile.pad);
                if view.is_invariant() {
                    line.fill(*from);
                } else {
                    line.copy_from_slice(std::slice::from_raw_parts(from, tile.pad));
                }
            }
        }
        View {
            ptr: to,
            rs: tile.pad as isize,
            cs: 1,
        }
    }

    pub(super) fn spare(&self) -> *mut u32 {
        // SAFETY: the spare tile lies inside the scratch memory.
        unsafe { self.lanes.add(self.bound.code.program.spare) }
    }

    /// The cursor of a stored operand into which a value can be computed directly: it must hold
    /// whole vectors of lanes, and no bytes that may still be read.
    fn direct(&self, access: u16, unread: u64, tile: &Tile) -> Option<Cursor> {
        let cursor = self.cursor(access);
        let overwrites = self.bound.accesses[usize::from(access)].overwrites;
        let free = overwrites & unread == 0 && !self.acc_aliased;
        (free && cursor.cs == 1 && tile.cols == tile.pad && (tile.rows == 1 || cursor.rs > 0))
            .then_some(cursor)
    }

    /// Stores the per-element values, if `level` is the last with such values, so that all have
    /// been computed and no overwritten operand is read again.
    ///
    /// # Safety
    /// As for [`Machine::compute_per_row`]; no other thread may touch the same points.
    pub unsafe fn store_per_element(&self, level: usize, tile: &Tile) {
        if level == self.bound.code.program.top {
            // SAFETY: the caller's promise.
            unsafe { self.store(&self.bound.code.program.per_element_stores, tile) }
        }
    }

    /// Stores the per-row values. In `tile`, the reduced axis has one point.
    ///
    /// # Safety
    /// See [`Machine::store_per_element`].
    pub unsafe fn store_per_row(&self, tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { self.store(&self.bound.code.program.per_row_stores, tile) }
    }

    /// # Safety
    /// See [`Machine::store_per_element`].
    unsafe fn store(&self, stores: &[StoreStep], tile: &Tile) {
        for store in stores {
            let view = self.view(store.value);
            // The value was computed in place, or would be copied onto itself.
            if store.same_bits && view.ptr == self.cursor(store.access).at(tile).cast() {
                continue;
            }
            let block = self.block(store.access, tile);
            // SAFETY: the block lies inside its argument; a view in place overlaps it only if it is
            // the same.
            unsafe { copy::store(view, store.lane, &block) };
        }
    }
}
