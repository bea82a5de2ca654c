//! The library's calls. Their statuses are numbers: a newer library than the bindings may return one
//! that the bindings' enumeration lacks.
#![expect(
    non_snake_case,
    clippy::too_many_arguments,
    reason = "the library's own names and arguments"
)]

use std::ffi::{c_int, c_void};

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulAlgoConfigAttributes_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t,
    cublasLtMatrixLayoutAttribute_t, cublasStatus_t, cudaDataType_t,
};

/// What a call returns; 0 is success.
pub(super) type Status = c_int;

/// The library's estimate for an algorithm: `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Estimate {
    pub algorithm: cublasLtMatmulAlgo_t,
    pub workspace: usize,
    pub state: Status,
    pub waves: f32,
    pub reserved: [c_int; 4],
}

/// A call of the library, if it has one of this name.
///
/// # Safety
/// The library is open, and its call has this type.
unsafe fn find<C: Copy>(name: &str) -> Option<C> {
    // SAFETY: the library is open.
    let library = unsafe { sys::culib() };
    // SAFETY: the caller's promise.
    let found = unsafe { library.get::<C>(name.as_bytes()) };
    found.ok().map(|call| *call)
}

crate::by_name::calls! {
    cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
    cublasLtCreate(handle: *mut cublasLtHandle_t);
    cublasLtDestroy(handle: cublasLtHandle_t);
    cublasLtMatrixLayoutCreate(
        layout: *mut cublasLtMatrixLayout_t,
        dtype: cudaDataType_t,
        rows: u64,
        columns: u64,
        stride: i64
    );
    cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t);
    cublasLtMatrixLayoutSetAttribute(
        layout: cublasLtMatrixLayout_t,
        attribute: cublasLtMatrixLayoutAttribute_t,
        value: *const c_void,
        bytes: usize
    );
    cublasLtMatmulDescCreate(
        product: *mut cublasLtMatmulDesc_t,
        compute: cublasComputeType_t,
        scale: cudaDataType_t
    );
    cublasLtMatmulDescDestroy(product: cublasLtMatmulDesc_t);
    cublasLtMatmulDescSetAttribute(
        product: cublasLtMatmulDesc_t,
        attribute: cublasLtMatmulDescAttributes_t,
        value: *const c_void,
        bytes: usize
    );
    cublasLtMatmulPreferenceCreate(preference: *mut cublasLtMatmulPreference_t);
    cublasLtMatmulPreferenceDestroy(preference: cublasLtMatmulPreference_t);
    cublasLtMatmulPreferenceSetAttribute(
        preference: cublasLtMatmulPreference_t,
        attribute: cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize
    );
    cublasLtMatmulAlgoGetHeuristic(
        handle: cublasLtHandle_t,
        product: cublasLtMatmulDesc_t,
        a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t,
        c: cublasLtMatrixLayout_t,
        d: cublasLtMatrixLayout_t,
        preference: cublasLtMatmulPreference_t,
        wanted: c_int,
        estimates: *mut Estimate,
        returned: *mut c_int
    );
    cublasLtMatmulAlgoCheck(
        handle: cublasLtHandle_t,
        product: cublasLtMatmulDesc_t,
        a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t,
        c: cublasLtMatrixLayout_t,
        d: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t,
        estimate: *mut Estimate
    );
    cublasLtMatmulAlgoConfigGetAttribute(
        algorithm: *const cublasLtMatmulAlgo_t,
        attribute: cublasLtMatmulAlgoConfigAttributes_t,
        value: *mut c_void,
        bytes: usize,
        written: *mut usize
    );
    cublasLtMatmul(
        handle: cublasLtHandle_t,
        product: cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        layout_a: cublasLtMatrixLayout_t,
        b: *const c_void,
        layout_b: cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        layout_c: cublasLtMatrixLayout_t,
        d: *mut c_void,
        layout_d: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: sys::cudaStream_t
    );
}
