//! The options of convolutions and poolings: how windows and kernels move over images and
//! sequences.

use slabwise_kernels::spec::Window;

use super::Tensor;
use crate::ops::{ConvGeometry, GraphBuilder};
use crate::trace::Line;

/// A number for each of `N` axes: one for all of them, or an array.
pub trait PerAxis<const N: usize> {
    /// The numbers.
    fn per_axis(self) -> [usize; N];
}

impl<const N: usize> PerAxis<N> for usize {
    fn per_axis(self) -> [usize; N] {
        [self; N]
    }
}

impl<const N: usize> PerAxis<N> for [usize; N] {
    fn per_axis(self) -> [usize; N] {
        self
    }
}

/// The padding of a convolution or pooling over `N` axes: zeros, or for a maximum −∞. A number or
/// an array gives the padding on both sides, an array of pairs the padding before and after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding<const N: usize> {
    /// The elements before the first and after the last element of each axis.
    Sides([(usize, usize); N]),
    /// The padding that makes the result ⌈length/stride⌉ long; if it is odd, the extra element
    /// follows the last one ("SAME" of TensorFlow, "SAME_UPPER" of ONNX, "same" of PyTorch).
    Same,
    /// [`Padding::Same`], but the extra element precedes the first one ("SAME_LOWER" of ONNX).
    SameLower,
    /// Causal padding, only before the first element, so that no result depends on a later element:
    /// dilation·(window − 1).
    Causal,
}

impl<const N: usize> From<usize> for Padding<N> {
    fn from(both: usize) -> Self {
        Padding::Sides([(both, both); N])
    }
}

impl<const N: usize> From<[usize; N]> for Padding<N> {
    fn from(both: [usize; N]) -> Self {
        Padding::Sides(both.map(|n| (n, n)))
    }
}

impl<const N: usize> From<[(usize, usize); N]> for Padding<N> {
    fn from(sides: [(usize, usize); N]) -> Self {
        Padding::Sides(sides)
    }
}

/// One axis that windows move along.
#[derive(Clone, Copy)]
pub(super) struct Track {
    /// Its length.
    pub n: usize,
    /// Elements of a window.
    pub k: usize,
    pub stride: usize,
    pub dilation: usize,
}

impl Track {
    /// The positions from the first to the last element of a window.
    pub fn span(self) -> Option<usize> {
        self.k
            .checked_sub(1)?
            .checked_mul(self.dilation)?
            .checked_add(1)
    }
}

impl<const N: usize> Padding<N> {
    /// The elements before and after an axis; `None` if the numbers have none.
    pub(super) fn along(self, axis: usize, track: Track) -> Option<(usize, usize)> {
        let total = || {
            let results = track.n.checked_add(track.stride.checked_sub(1)?)? / track.stride;
            let last = results.saturating_sub(1).checked_mul(track.stride)?;
            Some(last.checked_add(track.span()?)?.saturating_sub(track.n))
        };
        match self {
            Padding::Sides(sides) => Some(sides[axis]),
            Padding::Same => total().map(|all| (all / 2, all - all / 2)),
            Padding::SameLower => total().map(|all| (all - all / 2, all / 2)),
            Padding::Causal => Some((track.span()? - 1, 0)),
        }
    }

    /// The padding of an image of which this is that of the rows.
    fn of_rows(self) -> Padding<2>
    where
        Self: Copy,
    {
        match self {
            Padding::Sides(sides) => Padding::Sides([(0, 0), sides[0]]),
            Padding::Same => Padding::Same,
            Padding::SameLower => Padding::SameLower,
            Padding::Causal => Padding::Causal,
        }
    }
}

/// The options of a convolution over `N` axes: stride 1, no padding, dilation 1 and one group,
/// unless they are changed. A [`ConvGeometry`] is one of two axes.
///
/// ```
/// use slabwise::tensor::{ConvOptions, Padding};
/// # use slabwise::prelude::*;
/// # let trace = Trace::inference();
/// # let x = trace.input("x", F32, (2, 8, 100));
/// # let weight = trace.input("weight", F32, (16, 8, 3));
/// let causal = ConvOptions::new().dilation(4).padding(Padding::Causal);
/// let y = x.conv1d_with(weight, causal);
/// assert_eq!(y.len(2), Some(100));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvOptions<const N: usize> {
    /// Distance between neighbouring results.
    pub stride: [usize; N],
    /// Zeros around the image.
    pub padding: Padding<N>,
    /// Distance between kernel elements.
    pub dilation: [usize; N],
    /// The number of channel groups; channels of different groups do not mix.
    pub groups: usize,
    /// For a transposed convolution: elements added at the end of each axis, less than the stride
    /// or the dilation.
    pub output_padding: [usize; N],
}

impl<const N: usize> Default for ConvOptions<N> {
    fn default() -> Self {
        ConvOptions {
            stride: [1; N],
            padding: Padding::Sides([(0, 0); N]),
            dilation: [1; N],
            groups: 1,
            output_padding: [0; N],
        }
    }
}

impl From<ConvGeometry> for ConvOptions<2> {
    fn from(geometry: ConvGeometry) -> Self {
        ConvOptions {
            stride: geometry.stride,
            padding: geometry.pad.into(),
            dilation: geometry.dilation,
            groups: geometry.groups,
            output_padding: [0; 2],
        }
    }
}

impl<const N: usize> ConvOptions<N> {
    /// Stride 1, no padding, dilation 1, one group.
    pub fn new() -> Self {
        ConvOptions::default()
    }

    /// With this distance between results.
    pub fn stride(mut self, stride: impl PerAxis<N>) -> Self {
        self.stride = stride.per_axis();
        self
    }

    /// With this padding.
    pub fn padding(mut self, padding: impl Into<Padding<N>>) -> Self {
        self.padding = padding.into();
        self
    }

    /// With this distance between kernel elements.
    pub fn dilation(mut self, dilation: impl PerAxis<N>) -> Self {
        self.dilation = dilation.per_axis();
        self
    }

    /// With this number of channel groups, which do not mix.
    pub fn groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// With this number of extra elements at the end of each axis of a transposed convolution, for
    /// a result as large as the image whose strided convolution has this tensor's size.
    pub fn output_padding(mut self, more: impl PerAxis<N>) -> Self {
        self.output_padding = more.per_axis();
        self
    }
}

impl ConvOptions<1> {
    /// The same over an image of one row.
    pub(super) fn of_rows(self) -> ConvOptions<2> {
        ConvOptions {
            stride: [1, self.stride[0]],
            padding: self.padding.of_rows(),
            dilation: [1, self.dilation[0]],
            groups: self.groups,
            output_padding: [0, self.output_padding[0]],
        }
    }
}

/// The options of a pooling over `N` axes: windows side by side without padding, unless they are
/// changed. A [`Window`] is one of two axes.
///
/// ```
/// use slabwise::tensor::PoolOptions;
/// # use slabwise::prelude::*;
/// # let trace = Trace::inference();
/// # let x = trace.input("x", F32, (1, 64, 112, 112));
/// let y = x.max_pool2d_with(PoolOptions::new(3).stride(2).ceil());
/// assert_eq!(y.len(2), Some(56));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOptions<const N: usize> {
    /// Elements of a window along each axis.
    pub window: [usize; N],
    /// Distance between neighbouring windows.
    pub stride: [usize; N],
    /// Elements around the image: at most half a window on each side; less than a window if the
    /// sides differ, elements of a window have a distance, or an incomplete last window counts.
    pub padding: Padding<N>,
    /// Distance between the elements of a window.
    pub dilation: [usize; N],
    /// Whether an incomplete last window counts, if it begins in the image or before it.
    pub ceil: bool,
    /// Whether a mean counts zeros of the padding.
    pub count_padding: bool,
}

impl From<Window> for PoolOptions<2> {
    fn from(window: Window) -> Self {
        PoolOptions::new(window.k)
            .stride(window.stride)
            .padding(window.pad)
    }
}

impl<const N: usize> PoolOptions<N> {
    /// Windows of this size, side by side.
    pub fn new(window: impl PerAxis<N>) -> Self {
        let window = window.per_axis();
        PoolOptions {
            window,
            stride: window,
            padding: Padding::Sides([(0, 0); N]),
            dilation: [1; N],
            ceil: false,
            count_padding: true,
        }
    }

    /// With this distance between windows.
    pub fn stride(mut self, stride: impl PerAxis<N>) -> Self {
        self.stride = stride.per_axis();
        self
    }

    /// With this padding.
    pub fn padding(mut self, padding: impl Into<Padding<N>>) -> Self {
        self.padding = padding.into();
        self
    }

    /// With this distance between the elements of a window.
    pub fn dilation(mut self, dilation: impl PerAxis<N>) -> Self {
        self.dilation = dilation.per_axis();
        self
    }

    /// With an incomplete last window, if it begins in the image or in the padding before it
    /// (`ceil_mode` of PyTorch).
    pub fn ceil(mut self) -> Self {
        self.ceil = true;
        self
    }

    /// With means over the elements of the image alone (`count_include_pad=False` of PyTorch).
    pub fn without_padding_in_means(mut self) -> Self {
        self.count_padding = false;
        self
    }
}

impl PoolOptions<1> {
    /// The same over an image of one row.
    pub(super) fn of_rows(self) -> PoolOptions<2> {
        PoolOptions {
            window: [1, self.window[0]],
            stride: [1, self.stride[0]],
            padding: self.padding.of_rows(),
            dilation: [1, self.dilation[0]],
            ceil: self.ceil,
            count_padding: self.count_padding,
        }
    }
}

impl<'t> Tensor<'t> {
    /// A sequence `[n, channels, length]` as an image of one row.
    pub(super) fn as_row(self, at: Line, what: &str) -> Tensor<'t> {
        let shape = if what.contains("weight") {
            "[out, in/groups, k]"
        } else {
            "[n, channels, length]"
        };
        let x = self.require(at, |g, x| match g.dims(x).len() {
            3 => Ok(()),
            _ => Err(format!(
                "{what} {}: {shape} is needed",
                g.symbols.show(g.dims(x))
            )),
        });
        self.trace.on_behalf(at, || x.unsqueeze(2))
    }
}
