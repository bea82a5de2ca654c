//! The inputs of a run: host arrays, slices, and buffers that stay on the device.
//!
//! Programs compute with 32-bit integers and floats. Arrays of `i64`, a common type of indices and
//! labels, are narrowed to i32, and arrays of `f64` to the nearest f32; a value out of range is an
//! error that names the input, the element and the value, before anything runs.

use std::fmt;
use std::panic::Location;

use ndarray::{ArrayBase, ArrayRef, Data, Dimension};
use slabwise_kernels::dtype::DType;
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use crate::buffer::{Buffer, Donated};
use crate::data::{HostArray, with_array};
use crate::tensor::Tensor;
use crate::trace::Trace;

/// The lengths of an array's axes.
pub type Lengths = SmallVec<[usize; 6]>;

/// Where the bytes of one input come from.
pub enum Source<'a> {
    /// Copied from the host.
    Host {
        /// The element type, after narrowing.
        dtype: DType,
        /// The lengths of the axes; `None` for a flat slice, which takes the shape of the input.
        lengths: Option<Lengths>,
        /// How many elements.
        elements: usize,
        /// The first element that `dtype` does not have.
        misfit: &'a dyn Fn() -> Option<Misfit>,
        /// Writes the elements in row-major order, as bytes. Those that do not fit become any
        /// value.
        copy: &'a dyn Fn(&mut [u8]),
    },
    /// Read in place.
    Resident(&'a Buffer),
    /// Read in place, and then reused for an output.
    Donated(&'a Donated),
}

/// An element that is out of the range of the type that its array is narrowed to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    /// Its index in row-major order.
    pub at: usize,
    /// Its value, as text.
    pub value: String,
}

impl Misfit {
    /// The message of an error: the element of an array of these lengths, its value, and the type.
    pub(crate) fn message(&self, dtype: DType, lengths: Option<&[usize]>) -> String {
        format!(
            "{}; programs compute with 32 bits, so shift or scale such values first",
            self.of(dtype, lengths.unwrap_or(&[usize::MAX]))
        )
    }

    /// The same without advice.
    pub(crate) fn of(&self, dtype: DType, lengths: &[usize]) -> String {
        let mut rest = self.at;
        let mut index: Vec<usize> = lengths
            .iter()
            .rev()
            .map(|&n| {
                let i = rest % n.max(1);
                rest /= n.max(1);
                i
            })
            .collect();
        index.reverse();
        format!(
            "element {index:?} is {}, which {dtype} cannot hold",
            self.value
        )
    }
}

/// One input of a run.
pub trait Input {
    /// Shows the input to `visit`.
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>));
}

fn write<T: ToBytes>(values: impl Iterator<Item = T>, bytes: &mut [u8]) {
    for (slot, value) in bytes.chunks_exact_mut(T::STORED.bytes()).zip(values) {
        value.put(slot);
    }
}

/// The first element that is out of range.
pub(crate) fn misfit<T: ToBytes>(values: impl Iterator<Item = T>) -> Option<Misfit> {
    if !T::NARROWED {
        return None;
    }
    let mut values = values.enumerate();
    values
        .find(|(_, value)| !value.fits())
        .map(|(at, value)| Misfit {
            at,
            value: format!("{value:?}"),
        })
}

/// An element of a host array: of a type that programs compute with, or of a wider one that is
/// narrowed to it.
pub trait ToBytes: Copy + fmt::Debug {
    /// The type it has in a program.
    const STORED: DType;
    /// Whether that is narrower, so that not every value fits.
    const NARROWED: bool = false;
    /// Whether the value is within the range of the narrower type.
    #[inline]
    fn fits(&self) -> bool {
        true
    }
    /// Writes the element's native-endian bytes in its type in a program.
    fn put(self, slot: &mut [u8]);
    /// Writes the bytes of elements in a row, as many as there is room for.
    fn put_all(values: &[Self], bytes: &mut [u8]) {
        write(values.iter().copied(), bytes);
    }
}

macro_rules! to_bytes {
    ($($t:ty: $stored:ident),*) => {$(
        impl ToBytes for $t {
            const STORED: DType = DType::$stored;
            #[inline]
            fn put(self, slot: &mut [u8]) {
                slot.copy_from_slice(self.as_bytes());
            }
            fn put_all(values: &[Self], bytes: &mut [u8]) {
                let from = values.as_bytes();
                let count = from.len().min(bytes.len());
                bytes[..count].copy_from_slice(&from[..count]);
            }
        }
    )*};
}
to_bytes!(f32: F32, i32: I32, u8: U8, bool: Bool, half::f16: F16, half::bf16: BF16);

impl ToBytes for i64 {
    const STORED: DType = DType::I32;
    const NARROWED: bool = true;
    #[inline]
    fn fits(&self) -> bool {
        i32::try_from(*self).is_ok()
    }
    #[inline]
    fn put(self, slot: &mut [u8]) {
        (self as i32).put(slot);
    }
}

impl ToBytes for f64 {
    const STORED: DType = DType::F32;
    const NARROWED: bool = true;
    #[inline]
    fn fits(&self) -> bool {
        (*self as f32).is_finite() || !self.is_finite()
    }
    #[inline]
    fn put(self, slot: &mut [u8]) {
        (self as f32).put(slot);
    }
}

fn visit_array<T: ToBytes, D: Dimension>(
    array: &ArrayRef<T, D>,
    dtype: DType,
    visit: &mut dyn FnMut(Source<'_>),
) {
    let lengths = Lengths::from_slice(array.shape());
    let copy = |bytes: &mut [u8]| match array.as_slice() {
        Some(slice) => T::put_all(slice, bytes),
        None => write(array.iter().copied(), bytes),
    };
    visit(Source::Host {
        dtype,
        lengths: Some(lengths),
        elements: array.len(),
        misfit: &|| misfit(array.iter().copied()),
        copy: &copy,
    });
}

impl<T: ToBytes, S: Data<Elem = T>, D: Dimension> Input for ArrayBase<S, D, T> {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        visit_array(self, T::STORED, visit);
    }
}

impl<T: ToBytes> Input for [T] {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        let copy = |bytes: &mut [u8]| T::put_all(self, bytes);
        visit(Source::Host {
            dtype: T::STORED,
            lengths: None,
            elements: self.len(),
            misfit: &|| misfit(self.iter().copied()),
            copy: &copy,
        });
    }
}

impl<T: ToBytes> Input for Vec<T> {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        self.as_slice().visit(visit);
    }
}

impl<T: ToBytes, const N: usize> Input for [T; N] {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        self.as_slice().visit(visit);
    }
}

impl Input for HostArray {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        with_array!(self, array => visit_array(array, self.dtype(), visit));
    }
}

impl Input for Buffer {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        visit(Source::Resident(self));
    }
}

impl Input for Donated {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        visit(Source::Donated(self));
    }
}

impl<I: Input + ?Sized> Input for &I {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        (**self).visit(visit);
    }
}

/// The inputs of a run, in the order in which the trace declared them: one by itself, a tuple of up
/// to eight, a slice of `&dyn Input` of any number, or none as `()`.
///
/// ```
/// # use slabwise::prelude::*;
/// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
/// let trace = Trace::inference();
/// let x = trace.input("x", F32, (3,));
/// let program = session.compile(&trace, [x.sum()])?;
/// let [sum] = session.run(&program, &[1.0f32, 2.0, 3.0])?;
/// assert_eq!(sum.item(), 6.0);
/// # Ok::<(), slabwise::Error>(())
/// ```
pub trait Feed {
    /// Shows each input, with its position.
    fn each(&self, visit: &mut dyn FnMut(usize, Source<'_>));
    /// How many there are.
    fn count(&self) -> usize;
}

impl Feed for () {
    fn each(&self, _: &mut dyn FnMut(usize, Source<'_>)) {}

    fn count(&self) -> usize {
        0
    }
}

macro_rules! feed_tuple {
    ($($name:ident $at:tt),+) => {
        impl<$($name: Input),+> Feed for ($($name,)+) {
            fn each(&self, visit: &mut dyn FnMut(usize, Source<'_>)) {
                $(self.$at.visit(&mut |source| visit($at, source));)+
            }

            fn count(&self) -> usize {
                [$($at),+].len()
            }
        }
    };
}
feed_tuple!(A 0);
feed_tuple!(A 0, B 1);
feed_tuple!(A 0, B 1, C 2);
feed_tuple!(A 0, B 1, C 2, D 3);
feed_tuple!(A 0, B 1, C 2, D 3, E 4);
feed_tuple!(A 0, B 1, C 2, D 3, E 4, F 5);
feed_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
feed_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

macro_rules! feed_one {
    ($([$($generics:tt)*] $input:ty),+ $(,)?) => {$(
        impl<$($generics)*> Feed for $input {
            fn each(&self, visit: &mut dyn FnMut(usize, Source<'_>)) {
                self.visit(&mut |source| visit(0, source));
            }

            fn count(&self) -> usize {
                1
            }
        }
    )+};
}
feed_one!(
    [] HostArray,
    [T: ToBytes, S: Data<Elem = T>, D: Dimension] ArrayBase<S, D, T>,
    [T: ToBytes] [T],
    [T: ToBytes] Vec<T>,
    [T: ToBytes, const N: usize] [T; N],
    [] Buffer,
    [] Donated,
);

/// Any number of inputs, when they are not known by type.
impl Feed for [&dyn Input] {
    fn each(&self, visit: &mut dyn FnMut(usize, Source<'_>)) {
        for (i, input) in self.iter().enumerate() {
            input.visit(&mut |source| visit(i, source));
        }
    }

    fn count(&self) -> usize {
        self.len()
    }
}

impl Trace {
    /// An array of the host as part of the program, in the array's shape; a slice or a `Vec` has
    /// one axis. f32, i32, u8, halves and truth values keep their type, i64 becomes i32 (a number
    /// outside of its range is a mistake) and f64 becomes f32. Use it for tables that are not
    /// weights, such as frequencies or masks. The session holds the bytes once for all programs
    /// with equal constants; checkpoints do not contain them.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (2, 3));
    /// let scaled = x * trace.constant(&[1.0f32, 10.0, 100.0]);
    /// let columns = x.index_select(1, trace.constant(&[2i64, 0]));
    /// ```
    #[track_caller]
    pub fn constant(&self, values: &(impl Input + ?Sized)) -> Tensor<'_> {
        let at = Location::caller();
        let mut constant = None;
        values.visit(&mut |source| {
            constant = Some(match source {
                Source::Host {
                    dtype,
                    lengths,
                    elements,
                    misfit,
                    copy,
                } => match misfit() {
                    Some(misfit) => {
                        let why = misfit.message(dtype, lengths.as_deref());
                        self.fail(at, "", format!("constant: {why}"))
                    }
                    None => {
                        let mut bytes = vec![0; elements * dtype.bytes()];
                        copy(&mut bytes);
                        let flat = [elements];
                        self.constant_of(at, dtype, lengths.as_deref().unwrap_or(&flat), bytes)
                    }
                },
                Source::Resident(buffer) | Source::Donated(Donated(buffer)) => {
                    let message = format!(
                        "constant: the buffer \"{}\" lies on a device; make it an input, or \
                         download it",
                        buffer.name
                    );
                    self.fail(at, "", message)
                }
            });
        });
        constant.unwrap_or_else(|| self.fail(at, "", "constant: it has no values".into()))
    }
}

impl<F: Feed + ?Sized> Feed for &F {
    fn each(&self, visit: &mut dyn FnMut(usize, Source<'_>)) {
        (**self).each(visit);
    }

    fn count(&self) -> usize {
        (**self).count()
    }
}
