//! Bindings to the parts of cuDNN that slabwise uses: convolutions of tensors in the caller's
//! memory, with a workspace of the caller.
//!
//! The library describes operands by host objects: they are created and destroyed for each call,
//! which costs microseconds where a run is captured, and nothing where it is replayed. Only
//! algorithms are used that give the same bits on every run and add the products of the convolution
//! directly; algorithms by Fourier or Winograd transforms round far more than sums do.

mod calls;

use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::{Mutex, PoisonError};

use slabwise_kernels::dtype::DType;
use slabwise_kernels::spec::ConvKind;

use crate::driver::Stream;
use crate::libraries::{Library, LibraryError};
use calls::{Calls, Kind, Objects, Performance, Raw};

type Result<T> = std::result::Result<T, LibraryError>;

/// Constants of the library's header.
const CROSS_CORRELATION: i32 = 1;
const DETERMINISTIC: i32 = 1;
/// Layouts of a weight: rows and columns last, or channels last.
const ROWS_LAST: i32 = 0;
const CHANNELS_LAST: i32 = 1;
/// Tensor cores multiply numbers as they are stored, f32 rounded to tf32.
const TENSOR_CORES: i32 = 1;
/// Products of f32 are not rounded.
const PLAIN: i32 = 3;
/// The first of 1000 statuses that say that the library does not support the request.
const NOT_SUPPORTED: i32 = 3000;

/// Locates and opens the library, and returns its version: 92801 for 9.28.1.
///
/// # Errors
/// If there is none, or it lacks a function.
pub fn version() -> Result<usize> {
    Ok(Calls::bound()?.version())
}

/// An algorithm of the library for a kind of convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Algorithm {
    /// The library's number of it.
    pub number: i32,
    /// The library's number of the rounding mode of products.
    pub math: i32,
    /// The workspace that it needs, bytes.
    pub workspace: u64,
}

/// The shape of a tensor of images (number, channels, rows and columns) and its strides, in
/// elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Images {
    pub dtype: DType,
    pub dims: [i32; 4],
    pub strides: [i32; 4],
}

/// The shape of a dense weight: output channels, input channels of a group, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Weight {
    pub dtype: DType,
    pub dims: [i32; 4],
    /// Whether channels are the last axis, rather than columns.
    pub channels_last: bool,
}

/// A convolution or one of its gradients, times `alpha`; sums are in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Convolution {
    pub kind: ConvKind,
    /// The image or its gradient.
    pub image: Images,
    /// The weight or its gradient.
    pub weight: Weight,
    /// The result or its gradient.
    pub result: Images,
    pub pad: [i32; 2],
    pub stride: [i32; 2],
    pub dilation: [i32; 2],
    pub groups: i32,
    pub alpha: f32,
    /// Whether f32 may be rounded to tf32.
    pub tf32: bool,
}

/// The addresses of a convolution's tensors: the operands, in the order of the spec's, and the
/// result.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Addresses {
    pub a: u64,
    pub b: u64,
    pub to: u64,
    pub workspace: u64,
}

/// The library's handle for one device: used by one thread at a time.
pub(crate) struct Handle {
    calls: &'static Calls,
    raw: Mutex<OnStream>,
}

/// The handle's object, and the stream that was set last.
struct OnStream {
    object: Object,
    stream: *mut c_void,
}

// SAFETY: the library takes an object from any thread, one at a time; the stream is only compared.
unsafe impl Send for OnStream {}

/// An object of the library, with its destructor.
struct Object {
    raw: Raw,
    destroy: unsafe extern "C" fn(Raw) -> i32,
}

// SAFETY: the library takes an object from any thread, one at a time.
unsafe impl Send for Object {}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed only here.
        unsafe { (self.destroy)(self.raw) };
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

/// The library's number of a stored type. Convolutions of other types are never requested.
fn stored(dtype: DType) -> Result<i32> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(2),
        DType::BF16 => Ok(9),
        other => Err(LibraryError::Failed {
            library: Library::Cudnn,
            call: "a convolution",
            status: format!("{other}: not a float"),
        }),
    }
}

impl Calls {
    fn object(&self, call: &'static str, objects: &Objects) -> Result<Object> {
        let mut raw = null_mut();
        // SAFETY: the pointer is valid for writing.
        self.check(call, unsafe { (objects.create)(&mut raw) })?;
        Ok(Object {
            raw,
            destroy: objects.destroy,
        })
    }

    fn images(&self, images: &Images) -> Result<Object> {
        let object = self.object("cudnnCreateTensorDescriptor", &self.tensor)?;
        let (dims, strides) = (images.dims.as_ptr(), images.strides.as_ptr());
        // SAFETY: the object lives, and there are as many numbers as axes.
        let set = unsafe { (self.set_tensor)(object.raw, stored(images.dtype)?, 4, dims, strides) };
        self.check("cudnnSetTensorNdDescriptor", set)
            .map(|()| object)
    }

    fn weight(&self, weight: &Weight) -> Result<Object> {
        let object = self.object("cudnnCreateFilterDescriptor", &self.filter)?;
        let format = if weight.channels_last {
            CHANNELS_LAST
        } else {
            ROWS_LAST
        };
        // SAFETY: the object lives, and there are as many numbers as axes.
        let set = unsafe {
            (self.set_filter)(
                object.raw,
                stored(weight.dtype)?,
                format,
                4,
                weight.dims.as_ptr(),
            )
        };
        self.check("cudnnSetFilterNdDescriptor", set)
            .map(|()| object)
    }
}

/// The library's description of a convolution: both operands and the result in the order of its
/// calls.
struct Described {
    a: Object,
    b: Object,
    to: Object,
    convolution: Object,
}

impl Convolution {
    fn described(&self, calls: &Calls, math: i32) -> Result<Described> {
        let convolution = calls.object("cudnnCreateConvolutionDescriptor", &calls.convolution)?;
        // SAFETY: the object lives, there are as many numbers as axes, and sums are in f32.
        let set = unsafe {
            let [pad, stride, dilation] =
                [&self.pad, &self.stride, &self.dilation].map(|pair| pair.as_ptr());
            (calls.set_convolution)(
                convolution.raw,
                2,
                pad,
                stride,
                dilation,
                CROSS_CORRELATION,
                stored(DType::F32)?,
            )
        };
        calls.check("cudnnSetConvolutionNdDescriptor", set)?;
        // SAFETY: the object lives.
        calls.check("cudnnSetConvolutionGroupCount", unsafe {
            (calls.set_groups)(convolution.raw, self.groups)
        })?;
        // SAFETY: as above.
        calls.check("cudnnSetConvolutionMathType", unsafe {
            (calls.set_math)(convolution.raw, math)
        })?;
        let (image, weight, result) = (
            calls.images(&self.image)?,
            calls.weight(&self.weight)?,
            calls.images(&self.result)?,
        );
        let [a, b, to] = match self.kind {
            ConvKind::Forward => [image, weight, result],
            ConvKind::InputGrad => [weight, result, image],
            ConvKind::WeightGrad => [image, result, weight],
        };
        Ok(Described {
            a,
            b,
            to,
            convolution,
        })
    }

    fn calls<'a>(&self, calls: &'a Calls) -> &'a Kind {
        match self.kind {
            ConvKind::Forward => &calls.forward,
            ConvKind::InputGrad => &calls.input_grad,
            ConvKind::WeightGrad => &calls.weight_grad,
        }
    }

    /// Whether its products are those of f32, unrounded.
    fn is_plain(&self) -> bool {
        self.image.dtype == DType::F32 && !self.tf32
    }

    /// The number of algorithms that the library has for it, and those that add products without a
    /// transform.
    fn known(&self) -> (usize, &'static [i32]) {
        match self.kind {
            // By implicit products, with precomputed indices, with an image written out, directly.
            ConvKind::Forward => (8, &[0, 1, 2, 3]),
            ConvKind::InputGrad => (6, &[0, 1]),
            ConvKind::WeightGrad => (7, &[0, 1, 3]),
        }
    }
}

impl Handle {
    /// A handle for the current context's device.
    pub fn new() -> Result<Handle> {
        let calls = Calls::bound()?;
        Ok(Handle {
            calls,
            raw: Mutex::new(OnStream {
                object: calls.object("cudnnCreate", &calls.handle)?,
                stream: null_mut(),
            }),
        })
    }

    /// Sets the default stream in place of this one, which is about to be destroyed.
    pub fn leave(&self, stream: &Stream) {
        let mut raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        if raw.stream == stream.raw() {
            raw.stream = null_mut();
            // SAFETY: the handle lives, and the default stream always does.
            let status = unsafe { (self.calls.set_stream)(raw.object.raw, null_mut()) };
            // If the device is lost, so is the handle.
            let _ = self.calls.check("cudnnSetStream", status);
        }
    }

    /// The library's algorithms for a convolution, the best estimate first: at most `count`
    /// algorithms that need at most so many bytes of workspace and give the same bits on every run.
    /// Empty where it has no algorithm for the convolution.
    pub fn algorithms(
        &self,
        convolution: &Convolution,
        workspace_max: u64,
        count: usize,
    ) -> Result<Vec<Algorithm>> {
        let plain = convolution.is_plain();
        let described =
            convolution.described(self.calls, if plain { PLAIN } else { TENSOR_CORES })?;
        let (most, sums) = convolution.known();
        let mut found = vec![Performance::default(); most];
        let mut returned = 0;
        let (call, heuristics) = convolution.calls(self.calls).heuristics;
        let Described {
            a,
            b,
            to,
            convolution: shape,
        } = &described;
        let raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: all objects live, and there is space for as many results as are requested.
        let status = unsafe {
            heuristics(
                raw.object.raw,
                a.raw,
                b.raw,
                shape.raw,
                to.raw,
                most as i32,
                &mut returned,
                found.as_mut_ptr(),
            )
        };
        drop(raw);
        if status / 1000 * 1000 == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        self.calls.check(call, status)?;
        found.truncate(usize::try_from(returned).unwrap_or(0));
        let mut algorithms: Vec<Algorithm> = Vec::new();
        for one in found {
            log::debug!(
                "cuDNN lists algorithm {} for {call}: status {}, determinism {}, math {}, {} bytes of workspace",
                one.algorithm,
                one.status,
                one.determinism,
                one.math,
                one.workspace
            );
            // The library lists algorithms with rounding modes that were not requested (those on
            // tensor cores as ones that round f32 to halves): only the mode that is set counts.
            let math = if plain { PLAIN } else { TENSOR_CORES };
            if one.status != 0 || one.determinism != DETERMINISTIC || !sums.contains(&one.algorithm)
            {
                continue;
            }
            let same = |known: &Algorithm| (known.number, known.math) == (one.algorithm, math);
            if algorithms.len() < count
                && !algorithms.iter().any(same)
                && let Ok(algorithm) = self.checked(
                    convolution,
                    &Algorithm {
                        number: one.algorithm,
                        math,
                        workspace: 0,
                    },
                )
                && algorithm.workspace <= workspace_max
            {
                algorithms.push(algorithm);
            }
        }
        Ok(algorithms)
    }

    /// The same algorithm for a convolution of other sizes, with the workspace that it needs there.
    pub fn checked(&self, convolution: &Convolution, algorithm: &Algorithm) -> Result<Algorithm> {
        let described = convolution.described(self.calls, algorithm.math)?;
        let (call, workspace) = convolution.calls(self.calls).workspace;
        let Described {
            a,
            b,
            to,
            convolution: shape,
        } = &described;
        let mut bytes = 0;
        let raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: all objects live, and the pointer is valid for writing.
        let status = unsafe {
            workspace(
                raw.object.raw,
                a.raw,
                b.raw,
                shape.raw,
                to.raw,
                algorithm.number,
                &mut bytes,
            )
        };
        self.calls.check(call, status)?;
        Ok(Algorithm {
            workspace: bytes as u64,
            ..*algorithm
        })
    }

    /// Submits a convolution to a stream, which stays set until [`Handle::leave`].
    ///
    /// # Safety
    /// The addresses are memory of the device as large as the tensors say; the workspace is as
    /// large as the algorithm says.
    pub unsafe fn convolve(
        &self,
        convolution: &Convolution,
        algorithm: &Algorithm,
        at: &Addresses,
        stream: &Stream,
    ) -> Result<()> {
        let described = convolution.described(self.calls, algorithm.math)?;
        let (call, run) = convolution.calls(self.calls).run;
        let Described {
            a,
            b,
            to,
            convolution: shape,
        } = &described;
        // The library's first operand of the gradient of the image is the weight.
        let [first, second] = if convolution.kind == ConvKind::InputGrad {
            [at.b, at.a]
        } else {
            [at.a, at.b]
        };
        let (alpha, beta) = (convolution.alpha, 0.0f32);
        let mut raw = self.raw.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the handle lives, and so does the stream.
        self.calls.check("cudnnSetStream", unsafe {
            (self.calls.set_stream)(raw.object.raw, stream.raw())
        })?;
        raw.stream = stream.raw();
        // SAFETY: all objects live; scales are read before the call returns; the rest is the
        // caller's promise.
        let status = unsafe {
            run(
                raw.object.raw,
                from_ref(&alpha).cast(),
                a.raw,
                first as *const c_void,
                b.raw,
                second as *const c_void,
                shape.raw,
                algorithm.number,
                at.workspace as *mut c_void,
                algorithm.workspace as usize,
                from_ref(&beta).cast(),
                to.raw,
                at.to as *mut c_void,
            )
        };
        self.calls.check(call, status)
    }
}
