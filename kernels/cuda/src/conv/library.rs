//! Convolutions by cuDNN: which convolutions it can compute, and how they are described to it.
//!
//! The library writes the result where a spec only scales its sums and stores them. In all other
//! cases an epilogue kernel of slabwise reads the sums from the workspace; it is the kernel that
//! also adds the partial sums of a split product. cuDNN rounds results of half-precision inputs to
//! halves: where a spec needs their sums in f32, kernels of slabwise compute them.

use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Conv2d, ConvKind, Operand, Spec, SpecError};

use crate::abi::Target;
use crate::cudnn::{self, Addresses, Algorithm, Images, Weight};
use crate::driver::{DriverError, Stream};
use crate::gemm::emit;
use crate::gemm::library::{ALIGN, linear, store_is_read};
use crate::gemm::problem::{Axis, Matrix, Problem};
use crate::handles::Handles;
use crate::libraries::{Library, LibraryError};
use crate::lowered::{LibraryCall, Lowered, RecentAlgorithms};

/// The workspace limit of one convolution, bytes, however much memory it touches itself: some
/// algorithms write out both images in another layout.
const WORKSPACE_MAX: u64 = 128 << 20;

/// The axes of a tensor in the order of memory.
type Order = [usize; 4];
const CHANNELS_FIRST: Order = [0, 1, 2, 3];
const CHANNELS_LAST: Order = [0, 2, 3, 1];

/// A tensor in an argument, or at the start of the workspace.
#[derive(Clone, Copy, Debug)]
struct TensorOperand {
    argument: Option<u16>,
    dtype: DType,
    /// Elements before the first.
    offset: Size,
    strides: [Size; 4],
}

/// A convolution that the library computes; the number of its images may still be symbolic.
#[derive(Clone, Debug)]
pub struct Convolution {
    body: Conv2d,
    a: TensorOperand,
    b: TensorOperand,
    to: TensorOperand,
    alpha: f32,
    tf32: bool,
    algorithm: Option<Algorithm>,
    /// The algorithms for sizes below the bounds.
    recent: RecentAlgorithms<Algorithm>,
    /// Bytes at the start of the workspace that hold the sums for the epilogue kernel; the
    /// library's own workspace follows.
    sums: u64,
}

/// A convolution at the sizes of one run.
enum Call {
    /// The convolution has no points.
    Empty,
    /// The sums have no terms: zeros, so many bytes at the result's address.
    Zeros(u64),
    /// A call of the library.
    Convolve(cudnn::Convolution, Algorithm),
}

/// The dense strides of axes in this order.
fn packed(dims: [i64; 4], order: Order) -> [i64; 4] {
    let (mut strides, mut stride) = ([0; 4], 1i64);
    for &axis in order.iter().rev() {
        strides[axis] = stride;
        stride = stride.saturating_mul(dims[axis]);
    }
    strides
}

/// Whether strides are dense in this order, ignoring axes of one index.
fn is_dense(strides: [i64; 4], dims: [i64; 4], order: Order) -> bool {
    let whole = packed(dims, order);
    (0..4).all(|axis| dims[axis] == 1 || strides[axis] == whole[axis])
}

fn small(numbers: [i64; 4]) -> Option<[i32; 4]> {
    let [a, b, c, d] = numbers.map(i32::try_from);
    Some([a.ok()?, b.ok()?, c.ok()?, d.ok()?])
}

impl TensorOperand {
    fn of(argument: u16, operand: &Operand) -> Option<TensorOperand> {
        let &[a, b, c, d] = &operand.strides[..] else {
            return None;
        };
        // Kernels for tensor cores load vectors.
        let aligned = operand.offset.as_fixed()? * operand.dtype.bytes() as i64 % ALIGN as i64 == 0;
        aligned.then_some(TensorOperand {
            argument: Some(argument),
            dtype: operand.dtype,
            offset: operand.offset,
            strides: [a, b, c, d],
        })
    }

    fn strides(&self, env: &Env) -> [i64; 4] {
        self.strides.map(|s| s.at(env))
    }
}

impl Convolution {
    /// The spec's convolution as the library could compute it; `None` if it could not.
    pub fn of(spec: &Spec, bounds: &Env, target: &Target) -> Option<Convolution> {
        let Body::Conv2d(body) = &spec.body else {
            return None;
        };
        // Sums of the epilogue need the channels of a position together.
        if spec.reduced > 0 && order(body, bounds) != CHANNELS_LAST {
            return None;
        }
        let fixed = [
            body.ci,
            body.co,
            body.hw[0],
            body.hw[1],
            body.ohw[0],
            body.ohw[1],
        ]
        .iter()
        .all(|size| size.as_fixed().is_some());
        if body.prologue.is_some() || !fixed || body.a.dtype != body.b.dtype || spec.dims.len() != 4
        {
            return None;
        }
        let (a, b) = (
            TensorOperand::of(0, &body.a)?,
            TensorOperand::of(1, &body.b)?,
        );
        let direct = direct(spec).filter(|(to, _)| !target.guarded && to.dtype == body.a.dtype);
        let written = |(to, alpha): (TensorOperand, f32)| {
            let convolution = Convolution {
                body: body.clone(),
                a,
                b,
                to,
                alpha,
                tf32: target.tf32,
                algorithm: None,
                recent: RecentAlgorithms::default(),
                sums: 0,
            };
            convolution
                .described(bounds)
                .is_some()
                .then_some(convolution)
        };
        if let Some(convolution) = direct.and_then(&written) {
            return Some(convolution);
        }
        if body.a.dtype != DType::F32 {
            return None;
        }
        // In the workspace the result is laid out as the images are.
        let dims = [0, 1, 2, 3].map(|axis| spec.dims[axis]);
        let mut strides = [Size::ONE; 4];
        let mut stride = Size::ONE;
        for axis in order(body, bounds).into_iter().rev() {
            strides[axis] = stride;
            stride = stride.checked_mul(dims[axis])?;
        }
        let to = TensorOperand {
            argument: None,
            dtype: DType::F32,
            offset: Size::ZERO,
            strides,
        };
        let sums = (4 * u64::try_from(stride.at(bounds)).ok()?).next_multiple_of(256);
        written((to, 1.0)).map(|convolution| Convolution {
            sums,
            ..convolution
        })
    }

    /// The same convolution, computed by this algorithm of the library.
    pub fn by(self, algorithm: Algorithm) -> Convolution {
        Convolution {
            algorithm: Some(algorithm),
            ..self
        }
    }

    /// The description of the convolution at these sizes; `None` if the library cannot express it.
    pub fn described(&self, env: &Env) -> Option<cudnn::Convolution> {
        let Conv2d {
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
            ..
        } = &self.body;
        let [n, ci, co, h, w, oh, ow] =
            [*n, *ci, *co, hw[0], hw[1], ohw[0], ohw[1]].map(|size| size.at(env));
        let groups = i64::try_from(*groups)
            .ok()
            .filter(|&groups| groups > 0 && ci % groups == 0 && co % groups == 0)?;
        let [k, stride, pad, dilation] = [k, stride, pad, dilation]
            .map(|pair| pair.map(|x| i64::try_from(x).unwrap_or(i64::MAX)));
        // Positions beyond the last one are left over because both borders have the same width.
        let whole = |i: usize, image: i64, result: i64| {
            let window = (k[i] - 1).checked_mul(dilation[i])?.checked_add(1)?;
            let room = pad[i]
                .checked_mul(2)?
                .checked_add(image)?
                .checked_sub(window)?;
            (room >= 0 && stride[i] > 0 && room / stride[i] + 1 == result).then_some(())
        };
        whole(0, h, oh).and(whole(1, w, ow))?;
        let (image, weight, result) = match kind {
            ConvKind::Forward => (&self.a, &self.b, &self.to),
            ConvKind::InputGrad => (&self.to, &self.b, &self.a),
            ConvKind::WeightGrad => (&self.a, &self.to, &self.b),
        };
        let images = |placed: &TensorOperand, dims: [i64; 4]| {
            let strides = placed.strides(env);
            // The stride of an axis of one index has no meaning, but the library might interpret it
            // as another layout.
            let order = [CHANNELS_FIRST, CHANNELS_LAST]
                .into_iter()
                .find(|&order| is_dense(strides, dims, order));
            let strides = order.map_or(strides.map(|s| s.max(1)), |order| packed(dims, order));
            let last = (0..4).try_fold(0i64, |last, axis| {
                last.checked_add((dims[axis] - 1).checked_mul(strides[axis])?)
            })?;
            let apart = placed
                .strides
                .iter()
                .zip(dims)
                .all(|(s, n)| n == 1 || s.at(env) > 0);
            let operand = Operand {
                dtype: placed.dtype,
                offset: Size::ZERO,
                strides: strides.map(Size::fixed).into_iter().collect(),
            };
            let sound = dims.iter().all(|&n| n > 0) && apart && last < i64::from(i32::MAX);
            (sound && operand.is_injective(&dims.map(Size::fixed), env)).then_some(Images {
                dtype: placed.dtype,
                dims: small(dims)?,
                strides: small(strides)?,
            })
        };
        let image = images(image, [n, ci, h, w])?;
        let result = images(result, [n, co, oh, ow])?;
        let dims = [co, ci / groups, k[0], k[1]];
        let strides = weight.strides(env);
        let [first, last] =
            [CHANNELS_FIRST, CHANNELS_LAST].map(|order| is_dense(strides, dims, order));
        let images_last = !is_dense(
            image.strides.map(i64::from),
            image.dims.map(i64::from),
            CHANNELS_FIRST,
        );
        if !first && !last
            || dims.iter().fold(1i64, |all, &n| all.saturating_mul(n)) > i64::from(i32::MAX)
        {
            return None;
        }
        let weight = Weight {
            dtype: weight.dtype,
            dims: small(dims)?,
            channels_last: last && (images_last || !first),
        };
        let pair =
            |pair: [i64; 2]| Some([i32::try_from(pair[0]).ok()?, i32::try_from(pair[1]).ok()?]);
        let (pad, stride, dilation) = (pair(pad)?, pair(stride)?, pair(dilation)?);
        let (groups, alpha, tf32) = (i32::try_from(groups).ok()?, self.alpha, self.tf32);
        Some(cudnn::Convolution {
            kind: *kind,
            image,
            weight,
            result,
            pad,
            stride,
            dilation,
            groups,
            alpha,
            tf32,
        })
    }

    /// The call for the sizes of a run.
    fn call(&self, env: &Env, library: &cudnn::Handle) -> Result<Call, LibraryError> {
        if self.body.n.at(env) == 0 {
            let Conv2d {
                kind,
                ci,
                co,
                k,
                groups,
                ..
            } = &self.body;
            // A weight has no gaps.
            let elements = ci.at(env) / *groups as i64 * co.at(env) * (k[0] * k[1]) as i64;
            return Ok(match kind {
                ConvKind::WeightGrad => {
                    Call::Zeros((elements * self.to.dtype.bytes() as i64) as u64)
                }
                ConvKind::Forward | ConvKind::InputGrad => Call::Empty,
            });
        }
        let planned = self.algorithm.map_or(0, |algorithm| algorithm.workspace);
        let none = || LibraryError::Failed {
            library: Library::Cudnn,
            call: "the choice of an algorithm",
            status: format!(
                "no way to convolve {} images within {planned} bytes",
                self.body.n.at(env)
            ),
        };
        let described = self.described(env).ok_or_else(&none)?;
        if self.body.n.as_fixed().is_some()
            && let Some(algorithm) = self.algorithm
        {
            return Ok(Call::Convolve(described, algorithm));
        }
        let choose = || {
            // The algorithm was chosen for the largest batch. It may not work for this one, or not
            // with the workspace that is available.
            if let Some(algorithm) = self.algorithm
                && let Ok(algorithm) = library.checked(&described, &algorithm)
                && algorithm.workspace <= planned
            {
                return Ok(algorithm);
            }
            let found = library.algorithms(&described, planned, 1)?;
            found.first().copied().ok_or_else(none)
        };
        let algorithm = self.recent.get_or(env, choose)?;
        Ok(Call::Convolve(described, algorithm))
    }

    /// The addresses of its tensors, given those of the arguments and of the workspace.
    fn addresses(&self, env: &Env, argument: &dyn Fn(u16) -> u64, workspace: u64) -> Addresses {
        let at = |placed: &TensorOperand| match placed.argument {
            Some(which) => argument(which)
                .wrapping_add_signed(placed.offset.at(env) * placed.dtype.bytes() as i64),
            None => workspace,
        };
        Addresses {
            a: at(&self.a),
            b: at(&self.b),
            to: at(&self.to),
            workspace: workspace + self.sums,
        }
    }

    /// The workspace limit offered to the library, bytes: as much as the convolution itself
    /// touches, so that no plan grows much because of it.
    pub fn workspace_max(&self, bounds: &Env) -> u64 {
        let Some(described) = self.described(bounds) else {
            return 0;
        };
        let elements = |dims: [i32; 4]| {
            dims.iter()
                .fold(1u64, |all, &n| all.saturating_mul(n as u64))
        };
        let bytes =
            |dims: [i32; 4], dtype: DType| elements(dims).saturating_mul(dtype.bytes() as u64);
        let images = [described.image, described.result]
            .iter()
            .map(|i| bytes(i.dims, i.dtype))
            .fold(0, u64::saturating_add);
        images
            .saturating_add(bytes(described.weight.dims, described.weight.dtype))
            .min(WORKSPACE_MAX)
    }

    /// The spec computed by the library: its convolution, then the epilogue kernel if one is
    /// needed.
    pub fn lower(self, spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
        let workspace = self.sums + self.algorithm.map_or(0, |algorithm| algorithm.workspace);
        let mut lowered = match self.to.argument {
            Some(_) => Lowered::new(Vec::new(), workspace, |_| Vec::new()),
            None => emit::library_epilogue(
                spec,
                &in_workspace(spec, &self.body, bounds),
                bounds,
                target,
                Arc::new(|_| 1),
                workspace,
            )?,
        };
        lowered.by_library = Some(Box::new(self));
        Ok(lowered)
    }
}

impl LibraryCall for Convolution {
    fn name(&self) -> String {
        self.algorithm.map_or("cuDNN".into(), |algorithm| {
            format!("cuDNN algorithm {}", algorithm.number)
        })
    }

    fn open(&self, libraries: &Handles) -> Result<(), LibraryError> {
        libraries.cudnn().map(|_| ())
    }

    fn check(&self, env: &Env, libraries: &Handles) -> Result<(), LibraryError> {
        self.call(env, libraries.cudnn()?).map(|_| ())
    }

    unsafe fn submit(
        &self,
        env: &Env,
        argument: &dyn Fn(u16) -> u64,
        workspace: u64,
        libraries: &Handles,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let library = libraries.cudnn()?;
        let at = self.addresses(env, argument, workspace);
        match self.call(env, library)? {
            Call::Empty => Ok(()),
            // SAFETY: a gradient of a weight is dense, and lies in its argument or in the
            // workspace.
            Call::Zeros(bytes) => unsafe { stream.fill(at.to, 0, bytes as usize) },
            Call::Convolve(described, algorithm) => {
                // SAFETY: the convolution is described by the strides of the arguments' operands,
                // which lie inside of the regions; the workspace is planned with the maximum that
                // the algorithm needs.
                let status = unsafe { library.convolve(&described, &algorithm, &at, stream) };
                status.map_err(DriverError::from)
            }
        }
    }
}

/// The layout in memory of a convolution's images.
fn order(body: &Conv2d, bounds: &Env) -> Order {
    let (channels, [height, width]) = match body.kind {
        ConvKind::Forward | ConvKind::WeightGrad => (body.ci, body.hw),
        ConvKind::InputGrad => (body.co, body.ohw),
    };
    let dims = [body.n, channels, height, width].map(|size| size.at(bounds));
    let strides = [0, 1, 2, 3].map(|axis| body.a.strides[axis].at(bounds));
    let last = !is_dense(strides, dims, CHANNELS_FIRST) && is_dense(strides, dims, CHANNELS_LAST);
    if last { CHANNELS_LAST } else { CHANNELS_FIRST }
}

/// The spec's result in the layout of the workspace, as if it were a product's.
fn in_workspace(spec: &Spec, body: &Conv2d, bounds: &Env) -> Problem {
    let axes = |dims: &[usize]| {
        dims.iter()
            .map(|&dim| Axis::whole(spec.dims[dim], dim))
            .collect::<Vec<Axis>>()
    };
    let [batch, row, inner @ ..] = order(body, bounds);
    let (batch, rows, columns) = match spec.reduced {
        0 => (axes(&[batch]), axes(&[row]), axes(&inner)),
        // All positions are rows.
        _ => (vec![], axes(&[batch, row, inner[0]]), axes(&inner[1..])),
    };
    Problem {
        batch,
        rows,
        columns,
        deep: vec![],
        left: Matrix::of(0, &body.a),
        right: Matrix::of(1, &body.b),
    }
}

/// The destination and scale where the library can write the result itself: a single store of sums
/// that are scaled.
fn direct(spec: &Spec) -> Option<(TensorOperand, f32)> {
    let [store] = spec.stores[..] else {
        return None;
    };
    let to = &spec.operands[usize::from(store.operand)];
    let alpha = linear(spec, store.value, to.dtype, &|_| None)?.alpha;
    let first = (spec.arguments().len() - spec.operands.len()) as u16;
    let placed = TensorOperand::of(first + store.operand, to)?;
    (!store_is_read(spec, store.operand, None)).then_some((placed, alpha))
}
