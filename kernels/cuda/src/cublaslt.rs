//! Bindings to the parts of cuBLASLt that slabwise uses: products of matrices in the caller's
//! memory, with a workspace of the caller.
//!
//! Calls go to the library of cudarc's bindings, which load it by its name; therefore the library is
//! located first, and its absence is an error. It describes a product by host objects: they are
//! created and destroyed for each call, which costs a microsecond where a run is captured, and
//! nothing where it is replayed.

mod calls;

use std::ffi::c_void;
use std::mem::size_of;
use std::ptr::{from_ref, null_mut};

use cudarc::cublaslt::sys::{self, cublasStatus_t as Known};
use slabwise_kernels::dtype::DType;

use crate::driver::{self, Stream};
use crate::libraries::{Library, LibraryError};
use calls::{Estimate, Status};

type Result<T> = std::result::Result<T, LibraryError>;

const SUCCESS: Status = Known::CUBLAS_STATUS_SUCCESS as Status;
const NOT_SUPPORTED: Status = Known::CUBLAS_STATUS_NOT_SUPPORTED as Status;

/// The statuses that have a name here.
const KNOWN: [Known; 9] = [
    Known::CUBLAS_STATUS_NOT_INITIALIZED,
    Known::CUBLAS_STATUS_ALLOC_FAILED,
    Known::CUBLAS_STATUS_INVALID_VALUE,
    Known::CUBLAS_STATUS_ARCH_MISMATCH,
    Known::CUBLAS_STATUS_MAPPING_ERROR,
    Known::CUBLAS_STATUS_EXECUTION_FAILED,
    Known::CUBLAS_STATUS_INTERNAL_ERROR,
    Known::CUBLAS_STATUS_NOT_SUPPORTED,
    Known::CUBLAS_STATUS_LICENSE_ERROR,
];

fn check(call: &'static str, status: Status) -> Result<()> {
    if status == SUCCESS {
        return Ok(());
    }
    let known = KNOWN.iter().find(|known| **known as Status == status);
    Err(LibraryError::Failed {
        library: Library::CublasLt,
        call,
        status: known.map_or_else(|| format!("status {status}"), |known| format!("{known:?}")),
    })
}

/// Locates and opens the library, and returns its version: 130002 for 13.0.2.
///
/// # Errors
/// If there is none, or it is of a newer major version than the driver.
pub fn version() -> Result<usize> {
    // The file that is found depends on the driver, if there is one.
    let _ = driver::start();
    // SAFETY: initialisers of the library may run at any time, and it is found before it is used.
    Library::CublasLt.bind_by_name([c"cublasLtGetVersion"], || unsafe {
        let found = sys::is_culib_present().then(|| sys::culib())?;
        let call = found.get::<*const c_void>(b"cublasLtGetVersion\0");
        call.ok().map(|call| *call)
    })?;
    // SAFETY: the library is open, and the call may be made at any time.
    let version = unsafe { sys::cublasLtGetVersion() };
    Library::CublasLt.suits_driver(version / 10_000)?;
    Ok(version)
}

/// A configured kernel of the library: 64 bytes that have a meaning only in the version of the
/// library that returned them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Algorithm {
    /// The library's description of it.
    pub words: [u64; 8],
    /// The workspace that it needs, bytes.
    pub workspace: u64,
}

/// The layout of a matrix stored by columns, or of several at a fixed distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub dtype: DType,
    pub rows: i64,
    pub columns: i64,
    /// Elements from column to column.
    pub stride: i64,
    /// The number of matrices.
    pub products: i64,
    /// Elements from matrix to matrix.
    pub apart: i64,
    /// The alignment of its address, bytes.
    pub align: u32,
}

/// `D = alpha · op(A) · op(B) + C + bias`, by columns; sums are in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Product {
    pub a: Layout,
    pub b: Layout,
    /// The layout of the result and of C.
    pub d: Layout,
    /// Whether A and B are stored transposed.
    pub transposed: [bool; 2],
    pub alpha: f32,
    /// Whether there is a C.
    pub adds: bool,
    /// The type of the bias per row, if there is one: that of the result.
    pub bias: Option<DType>,
    /// Whether f32 may be rounded to tf32.
    pub tf32: bool,
}

/// The addresses of a product's operands.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Addresses {
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub d: u64,
    pub bias: u64,
    pub workspace: u64,
}

/// The library's handle for one device.
#[derive(Debug)]
pub(crate) struct Handle(sys::cublasLtHandle_t);

// SAFETY: the library takes calls for a handle from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The library's type of a stored one. Products of other types are never requested.
fn stored(dtype: DType) -> Result<sys::cudaDataType_t> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::F16 => Ok(sys::cudaDataType_t::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        other => Err(LibraryError::Failed {
            library: Library::CublasLt,
            call: "a product",
            status: format!("{other}: not a float"),
        }),
    }
}

/// An object of the library, with its destructor.
struct Object<T> {
    raw: *mut T,
    destroy: unsafe fn(*mut T) -> Status,
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed only here.
        unsafe { (self.destroy)(self.raw) };
    }
}

/// The library's description of a product.
struct Described {
    product: Object<sys::cublasLtMatmulDescOpaque_t>,
    a: Object<sys::cublasLtMatrixLayoutOpaque_t>,
    b: Object<sys::cublasLtMatrixLayoutOpaque_t>,
    d: Object<sys::cublasLtMatrixLayoutOpaque_t>,
}

impl Layout {
    fn described(&self) -> Result<Object<sys::cublasLtMatrixLayoutOpaque_t>> {
        use sys::cublasLtMatrixLayoutAttribute_t as A;
        let mut raw = null_mut();
        let (rows, columns) = (self.rows as u64, self.columns as u64);
        // SAFETY: the library is open, and the pointer is valid for writing.
        let made = unsafe {
            calls::cublasLtMatrixLayoutCreate(
                &mut raw,
                stored(self.dtype)?,
                rows,
                columns,
                self.stride,
            )
        };
        check("cublasLtMatrixLayoutCreate", made)?;
        let layout = Object {
            raw,
            destroy: calls::cublasLtMatrixLayoutDestroy,
        };
        if self.products > 1 {
            let count = i32::try_from(self.products).unwrap_or(i32::MAX);
            // SAFETY: the object lives, and the attributes are of these types.
            unsafe {
                let set = "cublasLtMatrixLayoutSetAttribute";
                let (batch, offset) = (
                    A::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                    A::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                );
                check(
                    set,
                    calls::cublasLtMatrixLayoutSetAttribute(
                        raw,
                        batch,
                        from_ref(&count).cast(),
                        size_of::<i32>(),
                    ),
                )?;
                check(
                    set,
                    calls::cublasLtMatrixLayoutSetAttribute(
                        raw,
                        offset,
                        from_ref(&self.apart).cast(),
                        size_of::<i64>(),
                    ),
                )?;
            }
        }
        Ok(layout)
    }
}

impl Product {
    /// `bias` is the address of the bias per row. Where nothing is computed, only its alignment
    /// matters.
    fn described(&self, bias: u64) -> Result<Described> {
        use sys::cublasLtMatmulDescAttributes_t as A;
        let compute = match self.tf32 && self.a.dtype == DType::F32 {
            true => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let mut raw = null_mut();
        // SAFETY: the library is open, and the pointer is valid for writing.
        let made = unsafe {
            calls::cublasLtMatmulDescCreate(&mut raw, compute, sys::cudaDataType_t::CUDA_R_32F)
        };
        check("cublasLtMatmulDescCreate", made)?;
        let product = Object {
            raw,
            destroy: calls::cublasLtMatmulDescDestroy,
        };
        let set = |attribute: A, value: *const c_void, bytes: usize| {
            // SAFETY: the object lives; below, each attribute is given a value of its type.
            check("cublasLtMatmulDescSetAttribute", unsafe {
                calls::cublasLtMatmulDescSetAttribute(raw, attribute, value, bytes)
            })
        };
        for (attribute, transposed) in [
            A::CUBLASLT_MATMUL_DESC_TRANSA,
            A::CUBLASLT_MATMUL_DESC_TRANSB,
        ]
        .into_iter()
        .zip(self.transposed)
        {
            // CUBLAS_OP_N and CUBLAS_OP_T.
            set(
                attribute,
                from_ref(&i32::from(transposed)).cast(),
                size_of::<i32>(),
            )?;
        }
        if let Some(dtype) = self.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            set(
                A::CUBLASLT_MATMUL_DESC_EPILOGUE,
                from_ref(&epilogue).cast(),
                size_of::<u32>(),
            )?;
            let stored = stored(dtype)? as i32;
            set(
                A::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                from_ref(&stored).cast(),
                size_of::<i32>(),
            )?;
            set(
                A::CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                from_ref(&bias).cast(),
                size_of::<u64>(),
            )?;
        }
        Ok(Described {
            product,
            a: self.a.described()?,
            b: self.b.described()?,
            d: self.d.described()?,
        })
    }

    /// The same product whose operands are aligned no better than those of another.
    pub fn aligned_as(mut self, other: &Product) -> Product {
        let pairs = [
            (&mut self.a, &other.a),
            (&mut self.b, &other.b),
            (&mut self.d, &other.d),
        ];
        for (own, other) in pairs {
            own.align = own.align.min(other.align);
        }
        self
    }

    /// A dummy address with the alignment that the bias of a run will have.
    fn sample_bias(&self) -> u64 {
        u64::from(self.d.align)
    }
}

impl Handle {
    /// A handle for the current context's device.
    pub fn new() -> Result<Handle> {
        version()?;
        let mut raw = null_mut();
        // SAFETY: the library is open, and the pointer is valid for writing.
        check("cublasLtCreate", unsafe { calls::cublasLtCreate(&mut raw) })?;
        Ok(Handle(raw))
    }

    /// The library's kernels for a product, the best estimate first: at most `count` kernels that
    /// need at most so many bytes of workspace and give the same bits on every run. Empty where it
    /// has no kernel for the product.
    pub fn algorithms(
        &self,
        product: &Product,
        workspace_max: u64,
        count: usize,
    ) -> Result<Vec<Algorithm>> {
        use sys::cublasLtMatmulPreferenceAttributes_t as P;
        let described = product.described(product.sample_bias())?;
        let mut raw = null_mut();
        // SAFETY: the library is open, and the pointer is valid for writing.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            calls::cublasLtMatmulPreferenceCreate(&mut raw)
        })?;
        let preference = Object {
            raw,
            destroy: calls::cublasLtMatmulPreferenceDestroy,
        };
        let set = |attribute: P, value: *const c_void, bytes: usize| {
            // SAFETY: the object lives; below, each attribute is given a value of its type.
            check("cublasLtMatmulPreferenceSetAttribute", unsafe {
                calls::cublasLtMatmulPreferenceSetAttribute(preference.raw, attribute, value, bytes)
            })
        };
        set(
            P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            from_ref(&workspace_max).cast(),
            size_of::<u64>(),
        )?;
        // Partial sums stay f32 and are added by a separate kernel, so that the result does not
        // depend on their order of arrival.
        let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        set(
            P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            from_ref(&schemes).cast(),
            size_of::<u32>(),
        )?;
        let aligned = [
            (
                P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                product.a.align,
            ),
            (
                P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                product.b.align,
            ),
            (
                P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                product.d.align,
            ),
            (
                P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                product.d.align,
            ),
        ];
        for (attribute, align) in aligned {
            set(attribute, from_ref(&align).cast(), size_of::<u32>())?;
        }
        let mut found = vec![no_result(); count];
        let mut returned = 0;
        let Described { product, a, b, d } = &described;
        // SAFETY: all objects live, and there is space for as many results as are requested.
        let status = unsafe {
            let (wanted, results) = (count as i32, found.as_mut_ptr());
            calls::cublasLtMatmulAlgoGetHeuristic(
                self.0,
                product.raw,
                a.raw,
                b.raw,
                d.raw,
                d.raw,
                preference.raw,
                wanted,
                results,
                &mut returned,
            )
        };
        if status == NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check("cublasLtMatmulAlgoGetHeuristic", status)?;
        found.truncate(usize::try_from(returned).unwrap_or(0));
        let fits = |r: &Estimate| r.state == SUCCESS && r.workspace as u64 <= workspace_max;
        let algorithms = found.into_iter().filter(fits).map(|r| Algorithm {
            words: r.algorithm.data,
            workspace: r.workspace as u64,
        });
        Ok(algorithms.filter(Algorithm::is_ordered).collect())
    }

    /// The same kernel for a product of other sizes, with the workspace that it needs there.
    pub fn checked(&self, product: &Product, algorithm: &Algorithm) -> Result<Algorithm> {
        let described = product.described(product.sample_bias())?;
        let Described { product, a, b, d } = &described;
        let mut result = no_result();
        // SAFETY: all objects live. The words come from the library or are arbitrary; arbitrary
        // ones are reported as invalid.
        let checked = unsafe {
            let raw = algorithm.raw();
            calls::cublasLtMatmulAlgoCheck(
                self.0,
                product.raw,
                a.raw,
                b.raw,
                d.raw,
                d.raw,
                &raw,
                &mut result,
            )
        };
        check("cublasLtMatmulAlgoCheck", checked)?;
        check("cublasLtMatmulAlgoCheck", result.state)?;
        Ok(Algorithm {
            workspace: result.workspace as u64,
            ..*algorithm
        })
    }

    /// Submits a product to a stream.
    ///
    /// # Safety
    /// The addresses are memory of the device as large as the layouts say, each with the alignment
    /// that they say; the workspace is as large as the algorithm says.
    pub unsafe fn multiply(
        &self,
        product: &Product,
        algorithm: &Algorithm,
        at: &Addresses,
        stream: &Stream,
    ) -> Result<()> {
        let described = product.described(at.bias)?;
        let (alpha, beta) = (product.alpha, f32::from(u8::from(product.adds)));
        let added = if product.adds { at.c } else { at.d };
        let Described { product, a, b, d } = &described;
        let raw = algorithm.raw();
        // SAFETY: all objects live; scales are read before the call returns; the rest is the
        // caller's promise.
        let status = unsafe {
            calls::cublasLtMatmul(
                self.0,
                product.raw,
                from_ref(&alpha).cast(),
                at.a as *const c_void,
                a.raw,
                at.b as *const c_void,
                b.raw,
                from_ref(&beta).cast(),
                added as *const c_void,
                d.raw,
                at.d as *mut c_void,
                d.raw,
                &raw,
                at.workspace as *mut c_void,
                algorithm.workspace as usize,
                stream.raw().cast(),
            )
        };
        check("cublasLtMatmul", status)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed only here.
        unsafe { calls::cublasLtDestroy(self.0) };
    }
}

impl Algorithm {
    /// The library's number of the kernel.
    pub fn id(&self) -> u32 {
        self.number(sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_ID)
            .unwrap_or(0)
    }

    /// A setting of the kernel, if the library reports it.
    fn number(&self, attribute: sys::cublasLtMatmulAlgoConfigAttributes_t) -> Option<u32> {
        version().ok()?;
        let (mut value, mut written) = (0u32, 0);
        let raw = self.raw();
        // SAFETY: the library is open, the requested settings are of this type, and the pointers
        // are valid for writing.
        let status = unsafe {
            calls::cublasLtMatmulAlgoConfigGetAttribute(
                &raw,
                attribute,
                (&raw mut value).cast(),
                size_of::<u32>(),
                &mut written,
            )
        };
        (status == SUCCESS).then_some(value)
    }

    fn raw(&self) -> sys::cublasLtMatmulAlgo_t {
        sys::cublasLtMatmulAlgo_t { data: self.words }
    }

    /// Whether partial sums are added in a fixed order, not in their order of arrival.
    fn is_ordered(&self) -> bool {
        let in_place = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_INPLACE as u32;
        let scheme = self.number(
            sys::cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
        );
        scheme.is_some_and(|scheme| scheme & in_place == 0)
    }
}

/// An empty record for the library to fill.
fn no_result() -> Estimate {
    Estimate {
        algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        workspace: 0,
        state: NOT_SUPPORTED,
        waves: 0.0,
        reserved: [0; 4],
    }
}
