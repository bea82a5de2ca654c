//! The forward product and the input gradient: weights times columns of the image, packed from a
//! tile.
//!
//! The input gradient of a convolution with strides is one product per phase of output positions
//! (see [`Axis`]), each with the kernel elements that reach it. A block of the result holds the
//! same super-positions of all phases, one phase after another; its micro-panels take only the
//! steps of their phase, and the phases are interleaved again before the epilogue.

use std::ops::Range;

use super::image::Image;
use super::phases::Interleave;
use super::pieces::pieces;
use super::tile::{Axis, Parts, Shape, Source};
use super::{Call, Sizes, source};
use crate::cpu::gemm::drive::{Blocking, KBlocks, MicroPanel, Product, Span, drive};
use crate::cpu::gemm::micro::{Left, LeftLayout, Micro, Right};
use crate::cpu::gemm::pack;
use crate::cpu::gemm::workspace::Space;
use crate::cpu::gemm::{KC, Limits, MC, even, share_rows, wanted};
use crate::cpu::tile::Bound;
use crate::spec::ConvKind;

/// Elements that tables are rounded up to, no fewer than a vector's.
const LANES: usize = 16;
/// Columns that have to be multiplied with the weights before packing these pays.
pub(super) const PACKED_COLUMNS: usize = 512;
/// Most left panels that read vectors directly from the tile instead of packed: vectors across two
/// cache lines then cost little.
const TILED_PANELS: usize = 3;
/// Least limits on rows and steps of a block, because the work before each block dominates in small
/// blocks.
const MIN_MC: usize = MC / 2;
const MIN_KC: usize = KC / 4;

/// Channels of the source in k-blocks of the contracted axis and their sub-blocks.
pub(super) fn k_blocks(sizes: &Sizes, limits: &Limits) -> KBlocks {
    KBlocks::new(
        sizes.source,
        even(sizes.source, KC / sizes.taps(), 1),
        steps(limits) / sizes.taps(),
    )
}

/// Most steps of a sub-block.
fn steps(limits: &Limits) -> usize {
    limits.kc.max(MIN_KC)
}

/// Phases of output positions.
pub(super) fn phases(axes: &[Axis; 2]) -> usize {
    axes[0].phases * axes[1].phases
}

/// Whether the steps of phases differ. (A single phase may have its own steps too: that of a single
/// position.)
pub(super) fn is_phased(axes: &[Axis; 2]) -> bool {
    axes.iter().any(Axis::is_phased)
}

/// Columns that a phase of `positions` positions takes in a block: whole vectors, if there may be
/// other phases.
pub(super) fn columns(positions: usize, axes: &[Axis; 2], micro: &Micro) -> usize {
    if !is_phased(axes) {
        positions
    } else {
        positions.next_multiple_of(micro.lanes)
    }
}

/// Most elements of a channel of a tile.
pub(super) fn most_of_channel(sizes: &Sizes, micro: &Micro, limits: &Limits) -> usize {
    let (axes, [rows, columns]) = (&sizes.axes, [sizes.axes[0].out, sizes.axes[1].out]);
    let least = Shape::of_channel(axes, 1, micro.nr().min(columns));
    Shape::of_channel(axes, rows, columns).min(limits.tile.max(least))
}

/// Whether weights are read in place at every size up to these, whose weight has `strides` along the
/// rows of the product, its source channels, and the kernel's rows and columns.
pub(super) fn always_indirect(sizes: &Sizes, strides: [isize; 4]) -> bool {
    let positions = positions(sizes);
    let counts = [
        sizes.other,
        sizes.source,
        sizes.axes[0].taps,
        sizes.axes[1].taps,
    ];
    positions < PACKED_COLUMNS && reach_fits(counts, strides)
}

/// Whether a product has few positions, and sums of no more terms than a k-block has steps.
pub(super) fn is_small(sizes: &Sizes) -> bool {
    positions(sizes) <= 4 * LANES && sizes.source * sizes.taps() <= KC
}

/// Output positions of a phase, of all images.
pub(super) fn positions(sizes: &Sizes) -> usize {
    let [height, length] = [sizes.axes[0].out, sizes.axes[1].out];
    sizes.images.saturating_mul(height).saturating_mul(length)
}

/// Whether tables can hold the offsets of so many weights along each axis.
pub(super) fn reach_fits(counts: [usize; 4], strides: [isize; 4]) -> bool {
    let reach = counts.iter().zip(strides).try_fold(0usize, |sum, (&n, s)| {
        sum.checked_add(s.unsigned_abs().checked_mul(n)?)
    });
    reach.is_some_and(|reach| reach <= i32::MAX as usize)
}

/// The buffers for every blocking of sizes up to these, with `prologue_buffer` elements for a
/// prologue; `indirect`: weights are always read in place, and no panel of them is packed.
pub(super) fn space(
    sizes: &Sizes,
    micro: &Micro,
    limits: &Limits,
    prologue_buffer: usize,
    indirect: bool,
) -> Space {
    let (width, phases) = (micro.nr(), phases(&sizes.axes));
    let depth = sizes.source.saturating_mul(sizes.taps());
    let block = depth.min(steps(limits).max(sizes.taps()));
    let rows = sizes.other.min(limits.mc.max(MIN_MC));
    let [height, length] = [sizes.axes[0].out, sizes.axes[1].out];
    let positions = positions(sizes);
    let channels = (steps(limits) / sizes.taps()).max(1).min(sizes.source);
    let tile =
        |rows, columns, images| Shape::new(&sizes.axes, channels, rows, columns).elements(images);
    let tile =
        limits
            .tile
            .max(tile(1, width.min(length), 1))
            .min(tile(height, length, sizes.images));
    // Every phase of a block of all rows may have to be rounded up to a width.
    let rounded = rows.saturating_mul(phases).saturating_mul(2 * width);
    let acc = limits.acc[usize::from(!limits.resident(rows, depth))].saturating_add(rounded);
    let acc = match is_phased(&sizes.axes) {
        true => rows
            .saturating_mul(phases)
            .saturating_mul(positions.saturating_add(width)),
        // Rows of whole vectors; the epilogue may read one vector after the last image.
        false => rows
            .saturating_mul(positions.saturating_add(micro.lanes - 1) / micro.lanes * micro.lanes)
            .saturating_add(width),
    }
    .min(acc);
    let tables = rows.next_multiple_of(LANES) + block.next_multiple_of(LANES);
    Space {
        left: match indirect {
            true => tables,
            false => rows
                .saturating_mul(depth)
                .min(limits.left.max(rows.saturating_mul(block)))
                .max(tables),
        },
        right: (block
            .next_multiple_of(LANES)
            .saturating_add((phases + 1).next_multiple_of(LANES))
            .saturating_add(tile))
        .next_multiple_of(LANES)
        .saturating_add(prologue_buffer),
        micro_panel: block * micro.width(positions),
        acc,
        // The block with its phases interleaved, in front of the epilogue's scratch memory.
        scratch: if is_phased(&sizes.axes) {
            acc.saturating_mul(4).next_multiple_of(64)
        } else {
            0
        },
        k_block: if depth > KC && steps(limits) < KC {
            acc
        } else {
            0
        },
        shared: 0,
    }
}

/// Strides of the weight along the rows of a product, its source channels, and the kernel's rows
/// and columns, and the address of a group's first element.
pub(super) fn weight_strides(
    call: &Call,
    weight: &Source,
    group: usize,
) -> (*const f32, [isize; 4]) {
    let ([co, ci, row, column], sizes) = (weight.strides, call.sizes);
    let (first, strides) = match call.body.kind {
        ConvKind::InputGrad => (group * sizes.source, [ci, co, row, column]),
        _ => (group * sizes.other, [co, ci, row, column]),
    };
    (weight.at.wrapping_offset(first as isize * co), strides)
}

/// # Safety
/// By the contract of the kernel's `run`.
pub(super) unsafe fn run(call: &Call) {
    let Call {
        launch,
        sizes,
        kernel,
        ..
    } = *call;
    let (micro, limits) = (kernel.micro, kernel.limits);
    let (rows, depth) = (sizes.other, sizes.source * sizes.taps());
    let threads = kernel.threads.min(launch.team.threads());
    let (width, phases) = (micro.nr(), phases(&sizes.axes));
    let mut blocking = Blocking {
        mc: even(rows, limits.mc.max(MIN_MC), 1),
        nc: 0,
        resident: true,
        by_columns: false,
        splits: 1,
    };
    blocking.resident = limits.resident(blocking.mc, depth);
    let acc = limits.acc[usize::from(!blocking.resident)];
    let most = (acc / blocking.mc / phases / width * width).max(width);
    let parts = |most| {
        Parts::new(
            sizes.images,
            &sizes.axes,
            k_blocks(sizes, limits).range(0).len(),
            most,
            limits.tile,
            width,
        )
    };
    let mut column_blocks = parts(most);
    let others = sizes.groups * rows.div_ceil(blocking.mc);
    let positions = sizes.images * sizes.axes[0].out * sizes.axes[1].out;
    if threads > 1 && others * column_blocks.count() < wanted(threads) {
        column_blocks = parts(
            even(
                positions,
                positions.div_ceil(wanted(threads).div_ceil(others.max(1))),
                width,
            )
            .min(most),
        );
        blocking.mc = share_rows(
            rows,
            blocking.mc,
            sizes.groups * column_blocks.count(),
            threads,
        );
    }
    blocking.nc = phases * columns(column_blocks.most(), &sizes.axes, micro);
    let mut product = Columns::new(call, column_blocks);
    let met = if blocking.resident {
        positions
    } else {
        column_blocks.most()
    };
    if met < PACKED_COLUMNS && product.offsets_fit(blocking.mc) {
        (product.indirect, blocking.resident) = (true, false);
    }
    let resources = call.resources();
    // SAFETY: `space` covers every blocking of sizes up to the bound; operands are valid by the
    // contract of `run`.
    unsafe { drive(&product, micro, &blocking, &resources) };
}

pub(super) struct Columns<'a> {
    pub(super) call: &'a Call<'a>,
    weight: Source,
    pub(super) image: Image<'a>,
    pub(super) column_blocks: Parts,
    k_blocks: KBlocks,
    /// Whether weights are read in place, which saves packing them.
    indirect: bool,
    code: Bound<'a>,
}

// SAFETY: operands are only read, and blocks of the result are written by one worker each.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    pub fn new(call: &'a Call<'a>, column_blocks: Parts) -> Self {
        let Call {
            spec,
            body,
            launch,
            kernel,
            ..
        } = *call;
        Columns {
            call,
            weight: source(&body.b, launch.args[body.sources()], launch.env),
            image: Image::new(
                call,
                &call.sizes.axes,
                source(&body.a, launch.args[0], launch.env),
            ),
            column_blocks,
            k_blocks: k_blocks(call.sizes, kernel.limits),
            indirect: false,
            code: kernel.code.bind(spec, launch),
        }
    }

    fn axes(&self) -> &[Axis; 2] {
        &self.call.sizes.axes
    }

    /// Strides of the weight along the rows of the product, its source channels, and the kernel's
    /// rows and columns, and the address of a group's first element.
    pub(super) fn weight(&self, group: usize) -> (*const f32, [isize; 4]) {
        weight_strides(self.call, &self.weight, group)
    }

    /// Whether tables can hold the offsets of weights inside a block.
    fn offsets_fit(&self, rows: usize) -> bool {
        let (_, strides) = self.weight(0);
        let counts = [
            rows,
            self.channels(0).len(),
            self.axes()[0].taps,
            self.axes()[1].taps,
        ];
        reach_fits(counts, strides)
    }

    /// The source channels, counted inside the group, of a sub-block of the contracted axis.
    fn channels(&self, block: usize) -> Range<usize> {
        self.k_blocks.range(block)
    }

    fn shape(&self, block: usize, column_block: usize) -> Shape {
        let part = self.column_blocks.get(column_block);
        Shape::new(
            self.axes(),
            self.channels(block).len(),
            part.rows.len(),
            part.columns.len(),
        )
    }

    /// Columns of a phase in a block of columns.
    pub(super) fn phase_columns(&self, column_block: usize) -> usize {
        columns(
            self.column_blocks.get(column_block).len(),
            self.axes(),
            self.call.kernel.micro,
        )
    }

    /// The kernel elements of a phase, by row and column, in the order of its steps.
    fn taps(&self, phase: usize) -> impl Iterator<Item = [usize; 2]> {
        let axes = self.axes();
        let wanted = [phase / axes[1].phases, phase % axes[1].phases];
        let along =
            move |i: usize| (0..axes[i].taps).filter(move |&tap| axes[i].phase(tap) == wanted[i]);
        along(0).flat_map(move |row| along(1).map(move |column| [row, column]))
    }

    /// Writes `offset(row, column) + channel · stride` of every step of a block: phase, channel,
    /// kernel element.
    ///
    /// # Safety
    /// `to` has an entry for each step, `starts` for each phase and one more.
    pub(super) unsafe fn table(
        &self,
        channels: usize,
        stride: isize,
        offset: impl Fn([usize; 2]) -> isize,
        to: *mut i32,
        starts: Option<*mut i32>,
    ) {
        let mut step = 0;
        for phase in 0..phases(self.axes()) {
            // SAFETY: the caller's promise.
            unsafe {
                if let Some(starts) = starts {
                    *starts.add(phase) = step as i32;
                }
                let first = step;
                for tap in self.taps(phase) {
                    *to.add(step) = offset(tap) as i32;
                    step += 1;
                }
                let count = step - first;
                for _ in count..count * channels {
                    *to.add(step) = *to.add(step - count) + stride as i32;
                    step += 1;
                }
                if let Some(starts) = starts {
                    *starts.add(phase + 1) = step as i32;
                }
            }
        }
    }
}

impl Product for Columns<'_> {
    fn left_layout(&self) -> LeftLayout {
        match self.indirect {
            true => LeftLayout::Indirect,
            false => LeftLayout::Packed,
        }
    }

    fn groups(&self) -> usize {
        self.call.sizes.groups
    }

    fn left_group(&self, group: usize) -> usize {
        group
    }

    fn rows(&self) -> usize {
        self.call.sizes.other
    }

    fn column_blocks(&self) -> usize {
        self.column_blocks.count()
    }

    fn columns(&self, column_block: usize) -> Range<usize> {
        if !is_phased(self.axes()) {
            return self.column_blocks.range(column_block);
        }
        let phases = phases(self.axes());
        let first = column_block
            * phases
            * columns(
                self.column_blocks.most(),
                self.axes(),
                self.call.kernel.micro,
            );
        first..first + phases * self.phase_columns(column_block)
    }

    fn depth(&self, block: usize) -> Range<usize> {
        let (channels, taps) = (self.channels(block), self.call.sizes.taps());
        channels.start * taps..channels.end * taps
    }

    fn k_blocks(&self) -> usize {
        self.k_blocks.count()
    }

    fn blocks(&self, k_block: usize) -> Range<usize> {
        self.k_blocks.blocks(k_block)
    }

    unsafe fn left(
        &self,
        group: usize,
        rows: Range<usize>,
        panel: usize,
        block: usize,
        to: *mut f32,
    ) {
        let (channels, axes) = (self.channels(block), self.axes());
        let (at, [row_stride, channel, kernel_row, step]) = self.weight(group);
        let tap_offset =
            |[row, column]: [usize; 2]| row as isize * kernel_row + column as isize * step;
        if self.indirect {
            let table = to.cast::<i32>();
            // SAFETY: the tables have an entry for each row and step.
            unsafe {
                for row in 0..rows.len() {
                    *table.add(row) = (row as isize * row_stride) as i32;
                }
                self.table(
                    channels.len(),
                    channel,
                    tap_offset,
                    table.add(rows.len().next_multiple_of(LANES)),
                    None,
                );
            }
            return;
        }
        // Parts of the contracted axis that are contiguous in memory are packed at once.
        let taps = self.call.sizes.taps();
        let flat = !is_phased(axes) && kernel_row == step * axes[1].taps as isize;
        let whole = flat && channel == step * taps as isize;
        for row in rows.clone().step_by(panel) {
            let count = panel.min(rows.end - row);
            // SAFETY: panels fill the buffer one after another.
            let mut to = unsafe { to.add((row - rows.start) * self.depth(block).len()) };
            let mut run = |offset: isize, length: usize| {
                let from = pack::Source {
                    at: at.wrapping_offset(row as isize * row_stride + offset),
                    stride: row_stride,
                    step,
                };
                // SAFETY: these rows and steps lie inside the weight.
                unsafe {
                    (self.call.kernel.micro.pack)(from, count, length, to, count);
                    to = to.add(length * count);
                }
            };
            if whole {
                run(channels.start as isize * channel, channels.len() * taps);
                continue;
            }
            for phase in 0..phases(axes) {
                for c in channels.clone().map(|c| c as isize * channel) {
                    if flat {
                        run(c, taps);
                    } else {
                        self.taps(phase).for_each(|tap| run(c + tap_offset(tap), 1));
                    }
                }
            }
        }
    }

    unsafe fn panel(
        &self,
        group: usize,
        rows: &Range<usize>,
        row: usize,
        block: usize,
        left: *const f32,
    ) -> Left {
        if self.indirect {
            let (at, [row_stride, channel, ..]) = self.weight(group);
            let first =
                rows.start as isize * row_stride + self.channels(block).start as isize * channel;
            let table = left.cast::<i32>();
            // SAFETY: as laid out by `left`.
            let (rows, steps) = unsafe {
                (
                    table.add(row),
                    table.add(rows.len().next_multiple_of(LANES)),
                )
            };
            return Left::indirect(at.wrapping_offset(first), rows, steps);
        }
        // SAFETY: `row` rows are packed before it.
        Left::packed(unsafe { left.add(row * self.depth(block).len()) })
    }

    /// The first step of every phase, the offset of every step, then the tile.
    unsafe fn right(&self, group: usize, column_block: usize, block: usize, to: *mut f32) {
        let sizes = self.call.sizes;
        let (channels, shape, part) = (
            self.channels(block),
            self.shape(block, column_block),
            self.column_blocks.get(column_block),
        );
        let (starts, steps) = (to.cast::<i32>(), self.steps(to));
        let tap_offset = |[row, column]: [usize; 2]| shape.tap(&sizes.axes, row, column) as isize;
        let first = group * sizes.source;
        let wanted = first + channels.start..first + channels.end;
        // SAFETY: one entry for each phase and step of the block; these channels exist, and the
        // tile has room after the tables.
        unsafe {
            self.table(
                channels.len(),
                shape.channel as isize,
                tap_offset,
                steps.cast_mut(),
                Some(starts),
            );
            let end = to.add(self.call.kernel.space.right);
            self.image
                .fill(wanted, &part, &shape, self.tile(to, block).cast_mut(), end);
        }
    }

    unsafe fn span(
        &self,
        column_block: usize,
        column: usize,
        block: usize,
        right: *const f32,
    ) -> Span {
        let columns = self.columns(column_block);
        if !is_phased(self.axes()) {
            return Span {
                end: columns.end,
                next: columns.end,
                steps: 0..self.depth(block).len(),
            };
        }
        let (size, starts) = (self.phase_columns(column_block), right.cast::<i32>());
        let phase = (column - columns.start) / size;
        // SAFETY: `right` wrote them.
        let steps = unsafe { *starts.add(phase) as usize..*starts.add(phase + 1) as usize };
        let first = columns.start + phase * size;
        Span {
            end: first + self.column_blocks.get(column_block).len(),
            next: first + size,
            steps,
        }
    }

    unsafe fn micro_panel(&self, at: MicroPanel, right: *const f32, to: *mut f32) -> Right {
        let (axes, micro) = (self.axes(), self.call.kernel.micro);
        // Parts are looked up by divisions, and once here.
        let part = self.column_blocks.get(at.column_block);
        let shape = Shape::new(
            axes,
            self.channels(at.block).len(),
            part.rows.len(),
            part.columns.len(),
        );
        let first = match is_phased(axes) {
            true => {
                (at.columns.start - self.columns(at.column_block).start)
                    % columns(part.len(), axes, micro)
            }
            false => at.columns.start - self.column_blocks.positions(&part).start,
        };
        let found = pieces(&shape, axes, &part, first, at.columns.len(), micro);
        let pieces = found.all();
        let used = at.width / micro.lanes;
        // SAFETY: `right` made the table and the tile, in which every piece lies at every step.
        unsafe {
            let steps =
                std::slice::from_raw_parts(self.steps(right).add(at.steps.start), at.steps.len());
            let tile = self.tile(right, at.block);
            let whole = pieces.len() == used
                && pieces
                    .iter()
                    .all(|piece| piece.lanes.count_ones() as usize == micro.lanes);
            if whole && at.panels <= TILED_PANELS && !self.indirect {
                let stride = (pieces[used - 1].offset - pieces[0].offset) as usize;
                return Right {
                    steps: steps.as_ptr(),
                    ..Right::packed(tile.offset(pieces[0].offset as isize), stride)
                };
            }
            (micro.gather)(tile, steps, pieces, found.ends(used), to);
        }
        Right::packed(to, at.width)
    }

    unsafe fn finish(
        &self,
        group: usize,
        rows: Range<usize>,
        column_block: usize,
        acc: *mut f32,
        stride: usize,
        scratch: *mut u8,
    ) {
        let (part, spec) = (self.column_blocks.get(column_block), self.call.spec);
        let first = group * self.call.sizes.other + rows.start;
        let positions = part.rows.len() * part.columns.len();
        let size = |axis: usize| spec.dims[axis].usize_at(self.call.launch.env);
        let axes = self.axes();
        // The output positions of all phases.
        let [high, wide] = [(&part.rows, 0), (&part.columns, 1)].map(|(range, axis)| {
            (range.start * axes[axis].phases)..(range.end * axes[axis].phases).min(size(axis + 2))
        });
        for (i, image) in part.images.clone().enumerate() {
            let origin = [image, first, high.start, wide.start];
            // SAFETY: the block is this worker's, and so is the scratch memory, which begins with
            // room for a block.
            unsafe {
                if !is_phased(axes) {
                    self.code.block(
                        &origin,
                        1,
                        rows.len(),
                        positions,
                        acc.add(i * positions).cast(),
                        stride,
                        scratch,
                    );
                    continue;
                }
                let length = high.len() * wide.len();
                let joined = scratch.cast::<f32>();
                let phase = self.phase_columns(column_block);
                let mut phases = Interleave {
                    from: acc.add(i * positions),
                    from_strides: [stride, phase, part.columns.len()],
                    phases: axes.each_ref().map(|axis| axis.phases),
                    size: [rows.len(), high.len(), wide.len()],
                    to: joined,
                    to_strides: [length, wide.len()],
                };
                // Where they are the results, they are stored there at once.
                if let Some((to, &[_, channel, row, 1])) = self.code.stored(&origin)
                    && let (Ok(channel), Ok(row)) = (channel.try_into(), row.try_into())
                {
                    (phases.to, phases.to_strides) = (to, [channel, row]);
                    (self.call.kernel.interleave)(&phases);
                    continue;
                }
                (self.call.kernel.interleave)(&phases);
                let scratch = scratch
                    .add(self.call.kernel.space.scratch - self.call.kernel.code.scratch_bytes());
                // A part of a row of super-positions is a part of each of its rows.
                let whole = wide.len() == size(3);
                let (runs, cols) = if whole {
                    (1, length)
                } else {
                    (high.len(), wide.len())
                };
                for run in 0..runs {
                    let origin = [image, first, high.start + run, wide.start];
                    self.code.block(
                        &origin,
                        1,
                        rows.len(),
                        cols,
                        joined.add(run * cols).cast(),
                        length,
                        scratch,
                    );
                }
            }
        }
    }
}

impl Columns<'_> {
    /// The addresses of the offsets of steps, and of the tile, that `right` writes.
    fn steps(&self, right: *const f32) -> *const i32 {
        right
            .cast::<i32>()
            .wrapping_add((phases(self.axes()) + 1).next_multiple_of(LANES))
    }

    fn tile(&self, right: *const f32, block: usize) -> *const f32 {
        self.steps(right)
            .wrapping_add(self.depth(block).len().next_multiple_of(LANES))
            .cast()
    }
}
