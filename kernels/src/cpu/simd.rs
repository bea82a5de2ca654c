//! One piece of code, compiled for each instruction set.

use super::Isa;
use crate::math::{Arith, Plain};

/// Code that is worth compiling for wide vectors: `run` is inlined into one function per [`Isa`].
pub(crate) trait Routine: 'static {
    /// Its arguments.
    type Args;

    /// The code, to be marked `#[inline(always)]`: only then does it take on the caller's
    /// instruction set.
    ///
    /// # Safety
    /// The routine's requirements on its arguments.
    unsafe fn run<A: Arith>(args: &Self::Args);
}

/// A compiled [`Routine`].
pub(crate) type Entry<T> = unsafe fn(&T);

/// The routine compiled for `isa`, which must be available on this CPU.
pub(crate) fn entry<R: Routine>(isa: Isa) -> Entry<R::Args> {
    #[cfg(target_arch = "x86_64")]
    match isa {
        Isa::Portable => portable::<R>,
        Isa::Avx2 => x86::avx2::<R>,
        Isa::Avx512 => x86::avx512::<R>,
    }
    #[cfg(not(target_arch = "x86_64"))]
    match isa {
        Isa::Portable | Isa::Avx2 | Isa::Avx512 => portable::<R>,
    }
}

/// # Safety
/// See [`Routine::run`].
unsafe fn portable<R: Routine>(args: &R::Args) {
    // SAFETY: the caller's promise.
    unsafe { R::run::<Plain>(args) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Routine;
    use crate::math::Fused;

    /// # Safety
    /// As for [`Routine::run`], on a CPU with AVX2 and FMA.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn avx2<R: Routine>(args: &R::Args) {
        // SAFETY: the caller's promise.
        unsafe { R::run::<Fused>(args) }
    }

    /// # Safety
    /// As for [`Routine::run`], on a CPU with AVX-512 F, BW, DQ and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn avx512<R: Routine>(args: &R::Args) {
        // SAFETY: the caller's promise.
        unsafe { R::run::<Fused>(args) }
    }
}
