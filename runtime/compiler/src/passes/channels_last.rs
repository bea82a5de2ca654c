//! The layout of images: channels innermost (NHWC) on devices on which convolutions are then
//! faster.
//!
//! The kernels of a GPU move neighbouring channels of a position as one vector, also inside a
//! window, while the positions of a row lie in vectors only where no window moves over them. A
//! value internal to the program may therefore be stored as positions × channels instead of
//! channels × positions. Its kernels get other strides and are otherwise unchanged; inputs, outputs
//! and variables keep their layout, and the kernels that read or write them convert between the
//! layouts.
//!
//! Values that a loop or a pooling reads and writes at the same positions have one layout and form
//! a region. A region with a convolution is stored with its channels innermost if all accesses to
//! its values permit that. This is done for all regions of a program or for none, so that other
//! kernels for the same program have the same sums: where the model that ranks products predicts a
//! larger gain in convolutions than the loss of the kernels that change the layout. Sums over
//! images and over the channels of a window are computed in another order, so that results differ
//! in rounding.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Dims, Operand, Spec};

use super::error::PassError;
use super::pad::{groups, joined};
use super::pipeline::Pass;
use super::{EpilogueSums, SumInEpilogues};
use crate::backend::Target;
use crate::ir::{KernelCall, Piece, Program, Source, Value};

/// Which values are stored with their channels innermost, on a device that gains by it. Results
/// differ in the rounding of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ChannelsLast {
    /// All in regions with a convolution that can be stored so, if convolutions and the sums in
    /// their epilogues gain more, by the model that ranks kernels, than changing layouts costs.
    #[default]
    Worthwhile,
    /// All of these in any case.
    All,
    /// None.
    Off,
}

/// The pass.
pub struct StoreChannelsLast<'a> {
    /// Which values.
    choice: ChannelsLast,
    /// The sums that will be in epilogues.
    sums: EpilogueSums,
    /// The device.
    target: &'a Target,
    /// Bytes that its memory moves per cycle.
    bytes_per_cycle: f64,
}

impl Pass for StoreChannelsLast<'_> {
    const NAME: &'static str = "channels_last";
    type Input = Program;
    type Output = Program;

    fn run(&self, program: &Program) -> Result<Program, PassError> {
        Ok(Chooser::new(self, program).stored())
    }
}

impl<'a> StoreChannelsLast<'a> {
    /// The pass for a device; `None` if that gains nothing, or if nothing is to be changed.
    pub fn on(
        target: &'a Target,
        choice: ChannelsLast,
        sums: EpilogueSums,
    ) -> Option<StoreChannelsLast<'a>> {
        let sectors = target.sectors().filter(|_| choice != ChannelsLast::Off)?;
        Some(StoreChannelsLast {
            choice,
            sums,
            target,
            bytes_per_cycle: sectors.bytes_per_cycle,
        })
    }
}

/// The part of the convolutions' cycles that is gained at least, because the model does not tell
/// smaller differences.
const LEAST_GAIN: f64 = 0.05;

/// The images of a value: so many channels of so many positions each.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Image {
    channels: i64,
    positions: i64,
}

/// Bytes of the vectors that kernels move.
const VECTOR_BYTES: i64 = 16;

impl Image {
    /// The images of a value; `None` if they must keep their layout or gain nothing by another.
    fn of(value: &Value) -> Option<Image> {
        let own = value.source == Source::Computed && value.piece == Piece::Whole;
        if !own || value.output || value.data_dependent || value.row_padding > 0 {
            return None;
        }
        let [_, channels, rows, columns] = &value.dims[..] else {
            return None;
        };
        let channels = channels.as_fixed()?;
        let positions = rows.as_fixed()?.checked_mul(columns.as_fixed()?)?;
        let is_whole = channels.checked_mul(value.dtype.bytes() as i64)? % VECTOR_BYTES == 0;
        (is_whole && channels > 1 && positions > 1).then_some(Image {
            channels,
            positions,
        })
    }

    /// The same access to images whose channels are innermost; `None` if it does not move by whole
    /// images, by channels or by positions along each axis, or leaves a channel or an image on the
    /// way.
    fn access(self, operand: &Operand, dims: &[Size]) -> Option<Operand> {
        let Image {
            channels,
            positions,
        } = self;
        let size = channels.checked_mul(positions)?;
        let mut stored = operand.clone();
        // The first and the last channel and position of an image that the access touches.
        let (mut channel, mut position) = ([0i64; 2], [0i64; 2]);
        if operand.offset.checked_div(size).is_none() {
            let offset = operand.offset.as_fixed()?;
            let within = offset.rem_euclid(size);
            (channel, position) = ([within / positions; 2], [within % positions; 2]);
            let moved = within / positions + within % positions * channels;
            stored.offset = Size::fixed(offset - within + moved);
        }
        for (stride, dim) in stored.strides.iter_mut().zip(dims) {
            if dim.is(1) || stride.is(0) || stride.checked_div(size).is_some() {
                continue;
            }
            let steps = dim.as_fixed()? - 1;
            let step = stride.as_fixed()?;
            let (step, factor, ends) = if step % positions == 0 {
                (step / positions, 1, &mut channel)
            } else {
                (step, channels, &mut position)
            };
            let span = step.checked_mul(steps)?;
            *ends = [
                ends[0].checked_add(span.min(0))?,
                ends[1].checked_add(span.max(0))?,
            ];
            *stride = Size::fixed(step.checked_mul(factor)?);
        }
        let is_within = |[first, last]: [i64; 2], count: i64| first >= 0 && last < count;
        (is_within(channel, channels) && is_within(position, positions)).then_some(stored)
    }
}

/// The choice of values.
struct Chooser<'a> {
    pass: &'a StoreChannelsLast<'a>,
    program: &'a Program,
    bounds: Env,
    /// For each value that may be stored so, its images.
    images: Vec<Option<Image>>,
    /// For each value, the number of its region.
    region: Vec<usize>,
    /// The calls that touch values of a region, in order.
    calls: FxHashMap<usize, Vec<usize>>,
    /// The regions with a convolution.
    chosen: BTreeSet<usize>,
}

impl<'a> Chooser<'a> {
    fn new(pass: &'a StoreChannelsLast<'a>, program: &'a Program) -> Self {
        let mut chooser = Chooser {
            pass,
            program,
            bounds: program.graph.symbols.bounds(),
            images: program.values.iter().map(Image::of).collect(),
            region: (0..program.values.len()).collect(),
            calls: FxHashMap::default(),
            chosen: BTreeSet::new(),
        };
        chooser.drop_others();
        chooser.find_regions();
        chooser
    }

    /// Drops the values that some call accesses in another way, with those that may be computed in
    /// place of them.
    fn drop_others(&mut self) {
        let group = groups(self.program);
        let mut images: FxHashMap<usize, Option<Image>> = FxHashMap::default();
        for (image, group) in self.images.iter().zip(&group) {
            let known = images.entry(*group).or_insert(*image);
            if *known != *image {
                *known = None;
            }
        }
        for call in &self.program.kernels {
            let accesses = accesses(&call.spec);
            for (k, (operand, space)) in accesses.iter().enumerate() {
                let image = images.get_mut(&group[call.args[k].index()]);
                let Some(image) = image.filter(|image| image.is_some()) else {
                    continue;
                };
                let anchors = call.spec.body.operands(&call.spec.dims).len();
                let is_mutable = k >= anchors || anchor(&mut call.spec.body.clone(), k).is_some();
                *image = image.filter(|i| is_mutable && i.access(operand, space).is_some());
            }
            // Sums of micro-batches follow the arguments.
            for value in call.args.iter().skip(accesses.len()) {
                images.insert(group[value.index()], None);
            }
        }
        for (value, image) in self.images.iter_mut().enumerate() {
            *image = images[&group[value]];
        }
    }

    /// Joins the values of each call but convolutions, which change the layout at no cost, and
    /// finds the regions that a convolution reads or writes.
    fn find_regions(&mut self) {
        let images = &self.images;
        let of = |call: &KernelCall| -> Vec<usize> {
            let values = call.args.iter().map(|value| value.index());
            values.filter(|&value| images[value].is_some()).collect()
        };
        let others = self.program.kernels.iter().filter(|c| !is_convolution(c));
        let pairs = others.flat_map(|call| {
            let touched = of(call);
            let next = touched.clone().into_iter().skip(1);
            touched.into_iter().zip(next).map(|(a, b)| [a, b])
        });
        self.region = joined(groups(self.program), pairs);
        for (at, call) in self.program.kernels.iter().enumerate() {
            let regions: BTreeSet<usize> = of(call).iter().map(|&v| self.region[v]).collect();
            for region in regions {
                self.calls.entry(region).or_default().push(at);
                if is_convolution(call) {
                    self.chosen.insert(region);
                }
            }
        }
    }

    /// The spec of a call if the chosen regions are stored with their channels innermost.
    fn spec(&self, call: &KernelCall) -> Spec {
        let mut spec = call.spec.clone();
        let anchors = spec.body.operands(&spec.dims).len();
        for (k, (operand, space)) in accesses(&call.spec).iter().enumerate() {
            let value = call.args[k].index();
            let image = self.images[value].filter(|_| self.is_chosen(value));
            let Some(stored) = image.and_then(|image| image.access(operand, space)) else {
                continue;
            };
            if k >= anchors {
                spec.operands[k - anchors] = stored;
            } else if let Some(anchor) = anchor(&mut spec.body, k) {
                *anchor = stored;
            }
        }
        spec
    }

    /// The modelled cycles of a call, as far as they depend on layouts: of a convolution all, of
    /// another kernel those of operands that lie in another order than the result, and those of the
    /// launches that compute a sum.
    fn cycles(&self, call: &KernelCall, is_stored: bool) -> f64 {
        let spec = match is_stored {
            true => self.spec(call),
            false => call.spec.clone(),
        };
        let target = self.pass.target;
        let modelled = || target.cycles(&spec, &self.bounds).unwrap_or(0.0);
        if is_convolution(call) {
            return modelled();
        }
        let moved = self.transposed_bytes(&spec) / self.pass.bytes_per_cycle;
        moved + if spec.reduced > 0 { modelled() } else { 0.0 }
    }

    /// The bytes of operands of a kernel that lie in another order than its result.
    fn transposed_bytes(&self, spec: &Spec) -> f64 {
        let innermost = |operand: &Operand, space: &[Size]| {
            let axes = operand.strides.iter().zip(space).enumerate();
            let moving = axes.filter(|(_, (stride, dim))| !stride.is(0) && !dim.is(1));
            let moving: Vec<(usize, i64)> = moving
                .map(|(axis, (stride, _))| (axis, stride.at(&self.bounds).abs()))
                .collect();
            let inner = moving.iter().min_by_key(|(_, stride)| *stride)?;
            (moving.len() > 1).then_some(inner.0)
        };
        let accesses = accesses(spec);
        let orders: Vec<Option<usize>> = accesses
            .iter()
            .map(|(operand, space)| innermost(operand, space).filter(|_| space.len() == 4))
            .collect();
        let result = orders.iter().flatten().next_back().copied();
        let others = accesses.iter().zip(&orders);
        let others = others.filter(|(_, order)| order.is_some() && **order != result);
        others
            .map(|((operand, space), _)| {
                let points = space.iter().map(|dim| dim.at(&self.bounds).max(0) as f64);
                points.product::<f64>() * operand.dtype.bytes() as f64
            })
            .sum()
    }

    /// Whether the convolutions, and the sums in their epilogues, gain more than the other kernels
    /// lose in the program with this layout.
    fn is_worthwhile(&self, stored: &Program) -> bool {
        let calls: BTreeSet<usize> = (self.chosen.iter())
            .flat_map(|region| self.calls[region].iter().copied())
            .collect();
        let (mut before, mut after, mut cost) = (0.0, 0.0, 0.0);
        for call in calls.iter().map(|&at| &self.program.kernels[at]) {
            let [without, with] = [false, true].map(|is_stored| self.cycles(call, is_stored));
            if is_convolution(call) {
                before += without;
                after += with;
            } else {
                cost += with - without;
            }
        }
        let sums = SumInEpilogues::on(self.pass.target, self.pass.sums);
        let summed = sums.map_or(0.0, |pass| pass.saved(stored) - pass.saved(self.program));
        before - after + summed > cost + LEAST_GAIN * before
    }

    fn is_chosen(&self, value: usize) -> bool {
        self.chosen.contains(&self.region[value])
    }

    fn stored(self) -> Program {
        let mut program = self.program.clone();
        for call in &mut program.kernels {
            call.spec = self.spec(call);
        }
        for (at, value) in program.values.iter_mut().enumerate() {
            value.channels_last = self.images[at].is_some() && self.is_chosen(at);
        }
        if self.pass.choice == ChannelsLast::Worthwhile && !self.is_worthwhile(&program) {
            return self.program.clone();
        }
        program
    }
}

/// The operands of a kernel's anchor and of its code, each with the space that it is accessed over.
fn accesses(spec: &Spec) -> Vec<(Operand, Dims)> {
    let anchors = spec.body.operands(&spec.dims).into_iter();
    let anchors = anchors.map(|(operand, space, _)| (operand, space));
    let operands = spec.operands.iter().cloned();
    anchors
        .chain(operands.map(|operand| (operand, spec.dims.clone())))
        .collect()
}

fn is_convolution(call: &KernelCall) -> bool {
    matches!(call.spec.body, Body::Conv2d(_))
}

/// Operand `k` of an anchor whose kernels take images of any strides.
fn anchor(body: &mut Body, k: usize) -> Option<&mut Operand> {
    match body {
        Body::Conv2d(conv) if conv.prologue.is_none() => match k {
            0 => Some(&mut conv.a),
            1 => Some(&mut conv.b),
            _ => None,
        },
        Body::Pool2d(pool) => match k {
            0 => Some(&mut pool.x),
            _ => pool.arg.as_mut(),
        },
        Body::Pool2dGrad(pool) => match k {
            0 => Some(&mut pool.dy),
            _ => pool.arg.as_mut(),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use slabwise_kernels::dtype::DType;
    use slabwise_kernels::size::Symbol;

    use super::*;

    /// Images of 4 channels of 2 × 3 positions.
    const IMAGE: Image = Image {
        channels: 4,
        positions: 6,
    };

    /// The access to the stored images, as its offset and strides.
    fn stored(offset: i64, strides: &[i64], dims: &[i64]) -> Option<(i64, Vec<i64>)> {
        let sizes = |list: &[i64]| list.iter().map(|&n| Size::fixed(n)).collect::<Dims>();
        let access = Operand {
            dtype: DType::F32,
            offset: Size::fixed(offset),
            strides: sizes(strides),
        };
        let access = IMAGE.access(&access, &sizes(dims))?;
        let fixed = |size: Size| size.as_fixed().expect("no symbol takes part");
        let strides = access.strides.into_iter().map(fixed).collect();
        Some((fixed(access.offset), strides))
    }

    /// The places of an access, in the order of its points.
    fn places(offset: i64, strides: &[i64], dims: &[i64]) -> Vec<i64> {
        dims.iter()
            .zip(strides)
            .fold(vec![offset], |places, (&dim, stride)| {
                let along = |place| (0..dim).map(move |i| place + i * stride);
                places.into_iter().flat_map(along).collect()
            })
    }

    #[test]
    fn accesses_visit_the_same_elements() {
        let accesses: [(i64, &[i64], &[i64]); 9] = [
            // All of it, with rows and columns as one axis, transposed, and from its end.
            (0, &[24, 6, 3, 1], &[5, 4, 2, 3]),
            (0, &[24, 6, 1], &[5, 4, 6]),
            (0, &[1, 3, 6, 24], &[3, 2, 4, 5]),
            (119, &[-24, -6, -3, -1], &[5, 4, 2, 3]),
            // A part of the images, channels, rows and columns; every other channel and column.
            (24 + 6 + 3 + 1, &[24, 6, 3, 1], &[3, 2, 1, 2]),
            (6, &[24, 12, 3, 2], &[5, 2, 2, 2]),
            // One position of each channel, repeated.
            (4, &[24, 6, 0], &[5, 4, 7]),
            // One image, and one element.
            (48, &[6, 3, 1], &[4, 2, 3]),
            (77, &[1], &[1]),
        ];
        for (offset, strides, dims) in accesses {
            let (to, new) = stored(offset, strides, dims).expect("it moves by axes");
            let moved = |place: i64| {
                let within = place % 24;
                place - within + within / 6 + within % 6 * 4
            };
            let expected: Vec<i64> = places(offset, strides, dims)
                .into_iter()
                .map(moved)
                .collect();
            assert_eq!(
                places(to, &new, dims),
                expected,
                "{offset} {strides:?} {dims:?}"
            );
        }
    }

    #[test]
    fn accesses_that_leave_an_axis_have_no_other_form() {
        // Flat, images and channels as one axis, channels and rows, the diagonal, out of a channel,
        // out of an image.
        assert_eq!(stored(0, &[1], &[120]), None);
        assert_eq!(stored(0, &[6, 1], &[20, 6]), None);
        assert_eq!(stored(0, &[24, 3, 1], &[5, 8, 3]), None);
        assert_eq!(stored(0, &[7], &[4]), None);
        assert_eq!(stored(4, &[24, 6, 1], &[5, 4, 3]), None);
        assert_eq!(stored(12, &[24, 6, 1], &[5, 3, 6]), None);
    }

    #[test]
    fn batches_of_unknown_size_are_whole_images() {
        let batch = Size::symbol(Symbol(0));
        let [image, half] = [24, 12].map(|n| Size::fixed(n).checked_mul(batch).expect("a size"));
        let access = |offset, first| Operand {
            dtype: DType::F32,
            offset,
            strides: [first, Size::fixed(24), Size::fixed(6), Size::ONE]
                .into_iter()
                .collect(),
        };
        let dims = [Size::fixed(2), batch, Size::fixed(4), Size::fixed(6)];
        let moved = IMAGE
            .access(&access(image, image), &dims)
            .expect("whole images");
        assert_eq!(moved.offset, image);
        assert_eq!(moved.strides[..2], [image, Size::fixed(24)]);
        assert_eq!(moved.strides[2..], [Size::ONE, Size::fixed(4)]);
        // The middle of an image is at no known channel.
        assert_eq!(IMAGE.access(&access(half, image), &dims), None);
        assert_eq!(IMAGE.access(&access(image, half), &dims), None);
    }
}
