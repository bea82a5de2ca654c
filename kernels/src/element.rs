//! Bytes as elements.

use crate::dtype::DType;

/// Element types that bytes may be viewed as: every bit pattern is a value.
pub trait Element: Copy + sealed::Sealed {
    /// The storage type.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for u8 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}

/// Bytes as elements, if they are whole and aligned ones.
pub(crate) fn as_elements<T: Element>(bytes: &[u8]) -> Option<&[T]> {
    // SAFETY: every bit pattern is a `T` (`Element` is sealed); the middle is aligned by `align_to`.
    let (head, elements, tail) = unsafe { bytes.align_to::<T>() };
    (head.is_empty() && tail.is_empty()).then_some(elements)
}

/// [`as_elements`], to write.
pub(crate) fn as_elements_mut<T: Element>(bytes: &mut [u8]) -> Option<&mut [T]> {
    // SAFETY: as in `as_elements`; the bytes are borrowed exclusively.
    let (head, elements, tail) = unsafe { bytes.align_to_mut::<T>() };
    (head.is_empty() && tail.is_empty()).then_some(elements)
}
