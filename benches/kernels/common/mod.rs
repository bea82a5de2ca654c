//! Products and convolutions as specs, for the benches that time them.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::{Memory, Region};
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Body, Conv2d, ConvKind, Dims, Inst, Operand, Spec, Store};

pub fn dims(sizes: &[usize]) -> Dims {
    sizes.iter().map(|&s| Size::fixed(s as i64)).collect()
}

pub fn contiguous(sizes: &[usize]) -> Operand {
    Operand::contiguous(DType::F32, &dims(sizes)).expect("small sizes")
}

/// A kernel that stores its anchor's values.
pub fn plain(body: Body, result: &[usize]) -> Spec {
    let store = vec![Store {
        value: 0,
        operand: 0,
    }];
    Spec {
        body,
        dims: dims(result),
        reduced: 0,
        operands: vec![contiguous(result)],
        indices: vec![],
        code: vec![Inst::Acc],
        stores: store,
    }
}

/// Regions of `sizes` elements of `f32`, filled with numbers between −½ and ½.
pub fn filled(memory: &mut Memory, sizes: &[usize]) -> Vec<Region> {
    let args: Vec<Region> = sizes
        .iter()
        .map(|&s| memory.reserve(4 * s as u64).expect("memory"))
        .collect();
    for arg in &args {
        memory
            .elements_mut::<f32>(arg)
            .iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x = (i % 1013) as f32 / 1013.0 - 0.5);
    }
    args
}

/// A convolution of square images with a square kernel, padded by half of it.
#[derive(Clone, Copy)]
pub struct Convolution {
    pub kind: ConvKind,
    pub n: usize,
    pub ci: usize,
    pub co: usize,
    pub hw: usize,
    pub k: usize,
    pub stride: usize,
    pub groups: usize,
}

impl std::fmt::Display for Convolution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Convolution {
            kind,
            n,
            ci,
            co,
            hw,
            k,
            stride,
            groups,
        } = self;
        write!(
            f,
            "{n}×{ci}×{hw}² {k}² → {co}, stride {stride}, {groups} groups, {kind:?}"
        )
    }
}

impl Convolution {
    /// Rows and columns of the result.
    pub fn out(&self) -> usize {
        (self.hw + self.k / 2 * 2 - self.k) / self.stride + 1
    }

    /// Multiplications.
    pub fn work(&self) -> usize {
        self.n * self.co * self.out().pow(2) * (self.ci / self.groups) * self.k * self.k
    }

    /// The kernel, and the elements of its operands and result.
    pub fn spec(&self) -> (Spec, [usize; 3]) {
        let (image, result) = (
            [self.n, self.ci, self.hw, self.hw],
            [self.n, self.co, self.out(), self.out()],
        );
        let weight = [self.co, self.ci / self.groups, self.k, self.k];
        let [a, b, to] = match self.kind {
            ConvKind::Forward => [image, weight, result],
            ConvKind::InputGrad => [result, weight, image],
            ConvKind::WeightGrad => [image, result, weight],
        };
        let size = |x: usize| Size::fixed(x as i64);
        let body = Conv2d {
            kind: self.kind,
            n: size(self.n),
            ci: size(self.ci),
            co: size(self.co),
            hw: [size(self.hw); 2],
            ohw: [size(self.out()); 2],
            k: [self.k; 2],
            stride: [self.stride; 2],
            pad: [self.k / 2; 2],
            dilation: [1; 2],
            groups: self.groups,
            a: contiguous(&a),
            b: contiguous(&b),
            prologue: None,
            exact: false,
        };
        (
            plain(Body::Conv2d(body), &to),
            [a, b, to].map(|d| d.iter().product()),
        )
    }
}
