//! Convolutions given by their shapes.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, Conv2d, ConvKind, Operand, Spec};

use super::super::common::{Case, Choices};
use super::{contiguous, plain, typed};

/// A convolution and both of its gradients.
pub const KINDS: [ConvKind; 3] = [ConvKind::Forward, ConvKind::InputGrad, ConvKind::WeightGrad];

/// The shape of a convolution.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub n: usize,
    pub ci: usize,
    pub co: usize,
    pub hw: [usize; 2],
    pub k: [usize; 2],
    pub stride: [usize; 2],
    pub pad: [usize; 2],
    pub dilation: [usize; 2],
    pub groups: usize,
    /// Rows and columns that the result lacks compared with the largest possible one.
    pub cut: [usize; 2],
    pub dtype: DType,
}

impl Shape {
    pub fn simple(n: usize, ci: usize, co: usize, hw: usize, k: usize, pad: usize) -> Shape {
        let (hw, k, pad, one) = ([hw; 2], [k; 2], [pad; 2], [1; 2]);
        Shape {
            n,
            ci,
            co,
            hw,
            k,
            stride: one,
            pad,
            dilation: one,
            groups: 1,
            cut: [0; 2],
            dtype: DType::F32,
        }
    }

    pub fn out(&self, i: usize) -> usize {
        let span = (self.k[i] - 1) * self.dilation[i] + 1;
        ((self.hw[i] + 2 * self.pad[i] - span) / self.stride[i] + 1)
            .saturating_sub(self.cut[i])
            .max(1)
    }

    pub fn image(&self) -> [usize; 4] {
        [self.n, self.ci, self.hw[0], self.hw[1]]
    }

    pub fn weight(&self) -> [usize; 4] {
        [self.co, self.ci / self.groups, self.k[0], self.k[1]]
    }

    pub fn result(&self) -> [usize; 4] {
        [self.n, self.co, self.out(0), self.out(1)]
    }

    /// The spaces of both operands and the result.
    pub fn spaces(&self, kind: ConvKind) -> [[usize; 4]; 3] {
        match kind {
            ConvKind::Forward => [self.image(), self.weight(), self.result()],
            ConvKind::InputGrad => [self.result(), self.weight(), self.image()],
            ConvKind::WeightGrad => [self.image(), self.result(), self.weight()],
        }
    }

    pub fn spec(&self, kind: ConvKind, [a, b, out]: [Operand; 3]) -> Spec {
        let size = |x: usize| Size::fixed(x as i64);
        let Shape {
            k,
            stride,
            pad,
            dilation,
            groups,
            ..
        } = *self;
        let (n, ci, co) = (size(self.n), size(self.ci), size(self.co));
        let (hw, ohw) = (self.hw.map(size), [size(self.out(0)), size(self.out(1))]);
        let body = Conv2d {
            kind,
            n,
            ci,
            co,
            hw,
            ohw,
            k,
            stride,
            pad,
            dilation,
            groups,
            a,
            b,
            prologue: None,
            exact: false,
        };
        plain(Body::Conv2d(body), &self.spaces(kind)[2], out)
    }

    /// With every operand contiguous.
    pub fn contiguous(&self, kind: ConvKind) -> Spec {
        let [a, b, out] = self.spaces(kind).map(|space| contiguous(&space));
        self.spec(
            kind,
            [
                typed(self.dtype, 0, &a),
                typed(self.dtype, 0, &b),
                typed(DType::F32, 0, &out),
            ],
        )
    }

    /// With the channels of images innermost, and those of weights as well if `weights_too`.
    pub fn channels_last(&self, kind: ConvKind, weights_too: bool) -> Spec {
        let is_weight = [
            [false, true, false],
            [false, true, false],
            [false, false, true],
        ][kind as usize];
        let spaces = self.spaces(kind);
        let operand = |i: usize| {
            let [a, b, c, d] = spaces[i];
            let strides = if is_weight[i] && !weights_too {
                contiguous(&spaces[i])
            } else {
                let [a, c, d, b] = contiguous(&[a, c, d, b])[..] else {
                    panic!("four axes");
                };
                vec![a, b, c, d]
            };
            typed(if i < 2 { self.dtype } else { DType::F32 }, 0, &strides)
        };
        self.spec(kind, [0, 1, 2].map(operand))
    }

    pub fn case(&self, kind: ConvKind, choices: &mut Choices) -> Case {
        let mut case = Case::new(format!("{kind:?} {self:?}"), self.contiguous(kind), choices);
        case.target.shared_bytes_max = 164 << 10;
        case
    }
}
