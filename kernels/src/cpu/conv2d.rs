//! Convolution and its gradients, as matrix products whose image side is never written out as a
//! matrix.
//!
//! All three products read one operand (the image, or for the input gradient the output gradient)
//! shifted by each element of the kernel. A block of the product needs a small part of it: that
//! part is copied, with its zero padding, into a [`tile`] in the workspace, where the element for
//! any output position and kernel element is found by adding one offset each. The forward product
//! and the input gradient pack micro-panels from the tile ([`columns`]); the weight gradient reads
//! the tile in place ([`weight_grad`]). Where every channel is a separate group there is no
//! product, but loops over the tile's rows ([`depthwise`]), or over whole planes of the image
//! ([`in_place`]). 3×3 and 5×5 kernels of enough channels
//! are computed with fewer multiplications ([`winograd`]), also of many over small images
//! ([`winograd_panels`]). A few output positions are the rows of a product with the transposed
//! weights, and neither operand is packed ([`few`]). Vectors along images skip the padding of small
//! ones ([`vertical`]). The idea of lowering inside the packing is that of cuDNN's implicit GEMM
//! (Chetlur et al., 2014), the addressing by offsets that of the indirect convolution (Dukhan, 2019).

mod columns;
mod depthwise;
mod few;
mod image;
mod in_place;
mod inside;
mod phases;
mod pieces;
mod stretches;
mod tile;
mod vertical;
mod weight_grad;
mod winograd;
mod winograd_panels;
mod winograd_weight;

use super::gemm::micro::Micro;
use super::gemm::winograd::Filtering;
use super::gemm::workspace::{Resources, Space};
use super::gemm::{Limits, SHORT_K_LIMITS, workers};
use super::simd::{Entry, entry};
use super::tile::TileCode;
use super::{Config, Launch, MicroBatchLimits, SpecError};
use crate::dtype::DType;
use crate::size::{Env, Size};
use crate::spec::{self, Body, ConvKind, Operand, Spec, check_operand};
use image::Prologue;
use in_place::InPlace;
use phases::Interleave;
use tile::{Axis, Source};

/// [`Body::Conv2d`], prepared.
pub(crate) struct Conv2d {
    code: TileCode,
    micro: &'static Micro,
    /// Interleaves the phases of an input gradient.
    interleave: Entry<Interleave>,
    threads: usize,
    limits: &'static Limits,
    space: Space,
    /// Whether every channel is a separate group.
    depthwise: bool,
    /// The masks of a depthwise convolution that reads images where they are.
    in_place: Option<InPlace>,
    /// The filtering by which [`winograd`] computes it, if it does.
    winograd: Option<Filtering>,
    /// Whether [`few`] computes it.
    few: bool,
    /// Whether [`vertical`] computes it for some numbers of images.
    vertical: bool,
    prologue: Option<Box<Prologue>>,
}

impl Conv2d {
    /// Prepared for sizes up to `bound`, with a worker's part of the workspace of no more than
    /// `most` bytes where that is possible.
    pub fn new(spec: &Spec, bound: &Env, config: &Config, most: usize) -> Result<Self, SpecError> {
        let body = body(spec)?;
        check(spec, body, bound)?;
        let code = TileCode::new(spec, bound, config)?;
        let micro = Micro::of(config.isa);
        let sizes = Sizes::new(body, bound);
        let depthwise = sizes.fixed && sizes.groups > 1 && sizes.source == 1 && sizes.other == 1;
        let in_place = depthwise
            .then(|| InPlace::new(spec, body, &sizes, &code, micro))
            .flatten();
        let winograd = winograd::of(body, &sizes, micro);
        let few = !depthwise && winograd.is_none() && few::applies(body, &sizes);
        let strides = weight_strides(body, bound);
        let counts = [sizes.other, sizes.source, body.k[0], body.k[1]];
        let vertical = sizes.fixed
            && ![depthwise, winograd.is_some(), few].contains(&true)
            && columns::reach_fits(counts, strides)
            && vertical::applies(body, bound, &sizes);
        let indirect = columns::always_indirect(&sizes, strides);
        let prologue = Prologue::new(body, bound, config)?;
        if depthwise && prologue.is_some() {
            return Err(SpecError::unsupported(
                "a prologue of a convolution whose channels are groups of their own",
            ));
        }
        // As much as stays in the cache until it is packed, at least a tile's part of a channel;
        // filtering reads the computed image where it is.
        let elements = |limits: &Limits| match body.kind {
            _ if winograd.is_some() => 0,
            ConvKind::WeightGrad => {
                weight_grad::most_of_channel(&sizes, limits).max(limits.tile / 2)
            }
            _ => columns::most_of_channel(&sizes, micro, limits).max(limits.tile / 2),
        };
        let is_copied = prologue.is_some() || body.a.strides[3].as_fixed() != Some(1);
        let is_stored = code.only_stores() && spec.operands[0].strides[3].is(1);
        let threads = workers([few::work(&sizes), 1, 1, 1], config);
        let most = most.saturating_mul(config.threads.max(1) / threads);
        let space = |limits: &Limits| {
            let buffer = prologue
                .as_ref()
                .map_or(0, |prologue| prologue.buffer(elements(limits)));
            let copied = is_copied.then_some(buffer);
            let space = match (body.kind, winograd) {
                _ if depthwise => depthwise::space(&sizes, micro, body.kind, in_place.as_ref()),
                (ConvKind::WeightGrad, Some(_)) => {
                    winograd_weight::space(&sizes, micro, limits, copied)
                }
                (ConvKind::WeightGrad, None) => weight_grad::space(&sizes, micro, limits, buffer),
                (_, Some(filtering)) => {
                    winograd::space(&sizes, filtering, micro, limits, copied, is_stored)
                }
                _ if few => few::space(body, &sizes, micro),
                _ => columns::space(&sizes, micro, limits, buffer, indirect),
            };
            let space = match vertical {
                true => space.max(&vertical::space(body, bound, &sizes, micro, limits, buffer)),
                false => space,
            };
            Space {
                scratch: space.scratch + code.scratch_bytes(),
                ..space
            }
        };
        let (mut limits, mut parts) = Limits::within(most, space);
        // Packed panels of few positions take more memory than the operands.
        if limits.is_fastest() && body.kind != ConvKind::WeightGrad && columns::is_small(&sizes) {
            (limits, parts) = (&SHORT_K_LIMITS, space(&SHORT_K_LIMITS));
        }
        let space = parts;
        let prologue = prologue.map(|prologue| Box::new(prologue.with_buffer(elements(limits))));
        if space.right.max(space.left) > i32::MAX as usize {
            return Err(SpecError::unsupported(format!(
                "a convolution that needs a tile of {} elements",
                space.right.max(space.left)
            )));
        }
        Ok(Conv2d {
            code,
            micro,
            interleave: entry::<Interleave>(config.isa),
            threads,
            limits,
            space,
            depthwise,
            in_place,
            winograd,
            few,
            vertical,
            prologue,
        })
    }

    /// Where slices of a weight gradient may end, and its partial sums; `None` if more than the
    /// number of images varies.
    pub fn micro_batch_limits(&self, spec: &Spec, bound: &Env) -> Option<MicroBatchLimits> {
        let sizes = Sizes::new(body(spec).ok()?, bound);
        sizes.fixed.then(|| {
            if self.depthwise {
                depthwise::micro_batch_limits(&sizes, self.micro)
            } else if self.winograd.is_some() {
                winograd_weight::micro_batch_limits(&sizes, self.micro)
            } else {
                weight_grad::micro_batch_limits(&sizes, self.micro)
            }
        })
    }

    pub fn workspace(&self) -> u64 {
        self.space.bytes(self.threads)
    }

    pub fn slower(&self, spec: &Spec) -> f64 {
        let is_gradient = body(spec).is_ok_and(|body| body.kind == ConvKind::WeightGrad);
        self.limits.slower[if is_gradient { 2 } else { 1 }]
    }

    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Ok(body) = body(spec) else {
            unreachable!("checked by new")
        };
        let sizes = Sizes::new(body, launch.env);
        let call = Call {
            spec,
            body,
            launch,
            sizes: &sizes,
            kernel: self,
        };
        // SAFETY: by the contract of `run`.
        unsafe {
            match (body.kind, self.winograd) {
                (ConvKind::WeightGrad, _) if self.depthwise => depthwise::weight_grad(&call),
                _ if self.depthwise => match &self.in_place {
                    Some(in_place) => in_place.run(&call),
                    None => depthwise::run(&call),
                },
                (ConvKind::WeightGrad, Some(_)) => winograd_weight::run(&call),
                (ConvKind::WeightGrad, None) => weight_grad::run(&call),
                (_, Some(filtering)) => winograd::run(&call, filtering),
                _ if self.few => few::run(&call),
                _ if self.vertical && vertical::has_images(&call) => vertical::run(&call),
                _ => columns::run(&call),
            }
        }
    }
}

/// One run.
struct Call<'a> {
    spec: &'a Spec,
    body: &'a spec::Conv2d,
    launch: &'a Launch<'a>,
    sizes: &'a Sizes,
    kernel: &'a Conv2d,
}

impl Call<'_> {
    /// The memory and threads of the run.
    fn resources(&self) -> Resources<'_> {
        Resources {
            workspace: self.launch.workspace,
            space: &self.kernel.space,
            threads: self.kernel.threads,
            team: self.launch.team,
        }
    }
}

fn body(spec: &Spec) -> Result<&spec::Conv2d, SpecError> {
    match &spec.body {
        Body::Conv2d(body) => Ok(body),
        _ => Err(SpecError::unsupported("not a convolution")),
    }
}

/// Checks the sizes at the bound, so that the index arithmetic stays inside the operands.
fn check(spec: &Spec, body: &spec::Conv2d, bound: &Env) -> Result<(), SpecError> {
    let fail = |what: String| Err(SpecError::unsupported(what));
    if spec.dims.len() != 4 {
        return fail("a convolution has four axes".into());
    }
    check_operand("the first operand", &body.a, 4, &[DType::F32])?;
    check_operand("the second operand", &body.b, 4, &[DType::F32])?;
    let positive = body
        .k
        .iter()
        .chain(&body.stride)
        .chain(&body.dilation)
        .all(|&x| x > 0 && x <= 1 << 16);
    if !positive || body.groups == 0 || body.pad.iter().any(|&p| p > 1 << 16) {
        return fail(format!(
            "kernel {:?}, stride {:?}, dilation {:?}, pad {:?}, groups {}",
            body.k, body.stride, body.dilation, body.pad, body.groups
        ));
    }
    for (name, channels) in [("input", body.ci), ("output", body.co)] {
        if !channels.usize_at(bound).is_multiple_of(body.groups) {
            return fail(format!(
                "{} {name} channels in {} groups",
                channels.usize_at(bound),
                body.groups
            ));
        }
    }
    let dims = match body.kind {
        ConvKind::Forward => [
            Some(body.n),
            Some(body.co),
            Some(body.ohw[0]),
            Some(body.ohw[1]),
        ],
        ConvKind::InputGrad => [
            Some(body.n),
            Some(body.ci),
            Some(body.hw[0]),
            Some(body.hw[1]),
        ],
        ConvKind::WeightGrad => [
            Some(body.co),
            body.ci.checked_div(body.groups as i64),
            Some(Size::fixed(body.k[0] as i64)),
            Some(Size::fixed(body.k[1] as i64)),
        ],
    };
    if spec
        .dims
        .iter()
        .zip(dims)
        .any(|(&is, should)| Some(is) != should)
    {
        return fail(format!(
            "a {:?} convolution over {:?}",
            body.kind, spec.dims
        ));
    }
    Ok(())
}

/// The sizes of one run.
struct Sizes {
    images: usize,
    groups: usize,
    /// Channels of the shifted operand and of the other side, per group.
    source: usize,
    other: usize,
    /// Rows and columns of the product's view of the image.
    axes: [Axis; 2],
    /// Whether only the number of images may vary.
    fixed: bool,
}

impl Sizes {
    fn new(body: &spec::Conv2d, env: &Env) -> Sizes {
        let (ci, co) = (
            body.ci.usize_at(env) / body.groups,
            body.co.usize_at(env) / body.groups,
        );
        let axis = |i: usize| {
            let (image, result) = (body.hw[i].usize_at(env), body.ohw[i].usize_at(env));
            let geometry = [body.k[i], body.stride[i], body.dilation[i], body.pad[i]];
            let make = if body.kind == ConvKind::InputGrad {
                Axis::backward
            } else {
                Axis::forward
            };
            make(image, result, geometry)
        };
        let (source, other) = if body.kind == ConvKind::InputGrad {
            (co, ci)
        } else {
            (ci, co)
        };
        let fixed = [body.ci, body.co]
            .iter()
            .chain(&body.hw)
            .chain(&body.ohw)
            .all(|s| s.as_fixed().is_some());
        Sizes {
            images: body.n.usize_at(env),
            groups: body.groups,
            source,
            other,
            axes: [axis(0), axis(1)],
            fixed,
        }
    }

    /// Elements of the kernel.
    fn taps(&self) -> usize {
        self.axes[0].taps * self.axes[1].taps
    }
}

impl Call<'_> {
    /// Images of each example of a batch in slices.
    fn per_example(&self) -> usize {
        let batch = self.launch.part.and_then(|part| {
            self.body
                .n
                .checked_div_size(Size::symbol(part.micro_batching.batch))
        });
        batch.map_or(1, |images| images.usize_at(self.launch.env))
    }
}

/// Like [`source`], of an argument that holds one slice of a batch, with images counted through the
/// whole batch.
fn part_source(call: &Call, operand: &Operand, argument: usize) -> Source {
    let source = source(operand, call.launch.args[argument], call.launch.env);
    let before = call
        .launch
        .part
        .map_or(0, |part| part.examples.start * call.per_example());
    Source {
        at: source
            .at
            .wrapping_offset(-(before as isize * source.strides[0])),
        ..source
    }
}

/// Strides of the weight along the rows of a product, its source channels, and the kernel's rows and
/// columns.
fn weight_strides(body: &spec::Conv2d, env: &Env) -> [isize; 4] {
    let mut strides = [0; 4];
    for (to, from) in strides.iter_mut().zip(&body.b.strides) {
        *to = from.at(env) as isize;
    }
    let [co, ci, row, column] = strides;
    match body.kind {
        ConvKind::InputGrad => [ci, co, row, column],
        _ => [co, ci, row, column],
    }
}

/// An operand's address under an environment.
fn source(operand: &Operand, at: *mut u8, env: &Env) -> Source {
    let mut strides = [0; 4];
    for (to, from) in strides.iter_mut().zip(&operand.strides) {
        *to = from.at(env) as isize;
    }
    Source {
        at: at
            .cast::<f32>()
            .wrapping_offset(operand.offset.at(env) as isize),
        strides,
    }
}
