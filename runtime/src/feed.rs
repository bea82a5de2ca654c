//! The inputs of a run: host arrays, slices, and buffers that stay on the device.

use ndarray::{ArrayBase, ArrayRef, Data, Dimension};
use slabwise_kernels::dtype::DType;
use slabwise_kernels::memory::Element;
use smallvec::SmallVec;

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
        /// The element type.
        dtype: DType,
        /// The lengths of the axes; `None` for a flat slice, which takes the shape of the input.
        lengths: Option<Lengths>,
        /// How many elements.
        elements: usize,
        /// Writes the elements in row-major order, as bytes.
        copy: &'a dyn Fn(&mut [u8]),
    },
    /// Read where it is.
    Resident(&'a Buffer),
    /// Read where it is, and then an output's.
    Donated(&'a Donated),
}

/// One input of a run.
pub trait Input {
    /// Shows the input to `visit`.
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>));
}

fn write<T: Element + ToBytes>(values: impl Iterator<Item = T>, bytes: &mut [u8]) {
    for (slot, value) in bytes.chunks_exact_mut(size_of::<T>()).zip(values) {
        value.put(slot);
    }
}

/// Native-endian bytes of an element.
pub trait ToBytes: Copy {
    /// Writes the element's bytes.
    fn put(self, slot: &mut [u8]);
}

macro_rules! to_bytes {
    ($($t:ty),*) => {$(
        impl ToBytes for $t {
            fn put(self, slot: &mut [u8]) {
                slot.copy_from_slice(&self.to_ne_bytes());
            }
        }
    )*};
}
to_bytes!(f32, i32, u8, half::f16, half::bf16);

fn visit_array<T: Element + ToBytes, D: Dimension>(
    array: &ArrayRef<T, D>,
    dtype: DType,
    visit: &mut dyn FnMut(Source<'_>),
) {
    let lengths = Lengths::from_slice(array.shape());
    let copy = |bytes: &mut [u8]| match array.as_slice() {
        Some(slice) => write(slice.iter().copied(), bytes),
        None => write(array.iter().copied(), bytes),
    };
    visit(Source::Host {
        dtype,
        lengths: Some(lengths),
        elements: array.len(),
        copy: &copy,
    });
}

impl<T: Element + ToBytes, S: Data<Elem = T>, D: Dimension> Input for ArrayBase<S, D, T> {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        visit_array(self, T::DTYPE, visit);
    }
}

impl<T: Element + ToBytes> Input for [T] {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        let copy = |bytes: &mut [u8]| write(self.iter().copied(), bytes);
        visit(Source::Host {
            dtype: T::DTYPE,
            lengths: None,
            elements: self.len(),
            copy: &copy,
        });
    }
}

impl<T: Element + ToBytes> Input for Vec<T> {
    fn visit(&self, visit: &mut dyn FnMut(Source<'_>)) {
        self.as_slice().visit(visit);
    }
}

impl<T: Element + ToBytes, const N: usize> Input for [T; N] {
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
    [T: Element + ToBytes, S: Data<Elem = T>, D: Dimension] ArrayBase<S, D, T>,
    [T: Element + ToBytes] [T],
    [T: Element + ToBytes] Vec<T>,
    [T: Element + ToBytes, const N: usize] [T; N],
    [] HostArray,
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

impl<F: Feed + ?Sized> Feed for &F {
    fn each(&self, visit: &mut dyn FnMut(usize, Source<'_>)) {
        (**self).each(visit);
    }

    fn count(&self) -> usize {
        (**self).count()
    }
}
