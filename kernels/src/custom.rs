//! Custom kernels: operations that are computed by functions of the user.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::dtype::DType;
use crate::element::{Element, as_elements, as_elements_mut};
use crate::team::Team;

/// An operation that is computed by a function of the user: a name, the types of the inputs and of
/// the result, a function for the CPU and, for CUDA, the body of a kernel.
///
/// It must be pure: equal inputs give equal results, nothing else is read or changed. A run may
/// compute it more than once (a value may be recomputed to save memory), or not at all, and calls
/// of one kernel with the same inputs are merged. Clones are the same kernel; kernels from two
/// calls of [`CustomKernel::new`] are different ones.
#[derive(Clone)]
pub struct CustomKernel(Arc<Definition>);

#[derive(Clone)]
struct Definition {
    name: String,
    inputs: Vec<DType>,
    result: DType,
    cpu: Arc<dyn Fn(&mut CustomRun<'_>) + Send + Sync>,
    cuda: Option<String>,
}

impl CustomKernel {
    /// A kernel for the CPU. `name` appears in plans, profiles and errors; `inputs` are the types of
    /// the inputs, and `result` is that of the result.
    ///
    /// The function writes every element of the result. It runs in the middle of a step, so that it
    /// cannot fail: for data that it has no result for it writes NaN. A panic reaches the caller of
    /// the run, and leaves weights that the step has already updated.
    pub fn new(
        name: impl Into<String>,
        inputs: impl Into<Vec<DType>>,
        result: DType,
        cpu: impl Fn(&mut CustomRun<'_>) + Send + Sync + 'static,
    ) -> CustomKernel {
        CustomKernel(Arc::new(Definition {
            name: name.into(),
            inputs: inputs.into(),
            result,
            cpu: Arc::new(cpu),
            cuda: None,
        }))
    }

    /// The kernel with code for CUDA: the body of a function that a grid of one-dimensional blocks
    /// runs, about one thread for each element of the result, fewer of large ones. Its names are
    ///
    /// - `in0`, `in1`, …: pointers to the inputs, `const float*` of [`DType::F32`], `const int*`,
    ///   `const unsigned char*` (of bool too, 0 or 1), `const f16*` and `const bf16*` (which
    ///   `widen(x)` makes a float, and `narrow_f16(x)` and `narrow_bf16(x)` are made of one);
    /// - `out`: the pointer to the result, which the body writes;
    /// - `in0_dims[axis]`, …, `out_dims[axis]`: the lengths, and `in0_count`, …, `out_count`: the
    ///   numbers of elements, of the type `idx` (an integer of 32 or 64 bits);
    /// - `thread` and `threads`: the number of this thread, and how many there are.
    ///
    /// All tensors are contiguous and row-major. Blocks have 256 threads. A body may `#include`
    /// files, by an absolute path or one from the current folder; it is then compiled whenever a
    /// program is loaded, and not cached, because the files may have changed.
    #[must_use]
    pub fn with_cuda(self, body: impl Into<String>) -> CustomKernel {
        CustomKernel(Arc::new(Definition {
            cuda: Some(body.into()),
            ..Definition::clone(&self.0)
        }))
    }

    /// The name that plans, profiles and errors show.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The types of the inputs.
    pub fn inputs(&self) -> &[DType] {
        &self.0.inputs
    }

    /// The type of the result.
    pub fn result(&self) -> DType {
        self.0.result
    }

    /// The body of the kernel for CUDA.
    pub fn cuda(&self) -> Option<&str> {
        self.0.cuda.as_deref()
    }

    /// Computes the result on the CPU.
    ///
    /// # Panics
    /// If the function does.
    pub fn run(&self, inputs: &[CustomInput<'_>], result: &mut [u8], dims: &[usize], team: &Team) {
        (self.0.cpu)(&mut CustomRun {
            kernel: self,
            inputs,
            result,
            dims,
            team,
        });
    }
}

// The state of the user's functions is not the runtime's, so that a panic breaks no promise of it.
impl UnwindSafe for CustomKernel {}
impl RefUnwindSafe for CustomKernel {}

impl PartialEq for CustomKernel {
    fn eq(&self, other: &CustomKernel) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The name and the types: equal programs of two processes have the same text.
impl fmt::Debug for CustomKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Definition {
            name,
            inputs,
            result,
            ..
        } = &*self.0;
        write!(f, "{name:?} of {inputs:?} to {result:?}")
    }
}

/// An input of a custom kernel: its type, its shape, and its contiguous row-major bytes.
pub struct CustomInput<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The shape.
    pub dims: SmallVec<[usize; 6]>,
    /// The elements, aligned to their type.
    pub bytes: &'a [u8],
}

/// One run of a custom kernel on the CPU: its inputs, and its result to be written. All tensors are
/// contiguous and row-major.
pub struct CustomRun<'a> {
    kernel: &'a CustomKernel,
    inputs: &'a [CustomInput<'a>],
    result: &'a mut [u8],
    dims: &'a [usize],
    team: &'a Team,
}

impl<'a> CustomRun<'a> {
    /// The elements of an input: `u8` for bool too, 0 or 1.
    ///
    /// # Panics
    /// If there is no such input, or `T` is not its type.
    pub fn input<T: Element>(&self, input: usize) -> &'a [T] {
        let (kernel, found) = (self.kernel, self.given(input));
        let is_byte = found.dtype == DType::Bool && T::DTYPE == DType::U8;
        assert!(
            is_byte || found.dtype == T::DTYPE,
            "input {input} of {kernel:?} is read as {}",
            T::DTYPE
        );
        as_elements(found.bytes)
            .unwrap_or_else(|| panic!("input {input} of {kernel:?} is not whole {}", T::DTYPE))
    }

    /// The shape of an input.
    ///
    /// # Panics
    /// If there is no such input.
    pub fn input_dims(&self, input: usize) -> &'a [usize] {
        &self.given(input).dims
    }

    fn given(&self, input: usize) -> &'a CustomInput<'a> {
        let (kernel, count) = (self.kernel, self.inputs.len());
        let found = self.inputs.get(input);
        found.unwrap_or_else(|| panic!("{kernel:?} has no input {input}, because it has {count}"))
    }

    /// The shape of the result.
    pub fn dims(&self) -> &'a [usize] {
        self.dims
    }

    /// The elements of the result, which have any values before they are written.
    ///
    /// # Panics
    /// If `T` is not its type.
    pub fn result<T: Element>(&mut self) -> &mut [T] {
        let kernel = self.kernel;
        let dtype = kernel.result();
        assert!(
            dtype == T::DTYPE,
            "the result of {kernel:?} is written as {}",
            T::DTYPE
        );
        as_elements_mut(self.result)
            .unwrap_or_else(|| panic!("the result of {kernel:?} is not whole {}", T::DTYPE))
    }

    /// Calls `write(part, elements)` for each part of `len` elements of the result, such as its rows;
    /// the last part has the rest. The threads of the session share the parts.
    ///
    /// # Panics
    /// If `T` is not the type of the result, `len` is 0, or `write` panics.
    pub fn parts<T: Element + Send + Sync>(
        &mut self,
        len: usize,
        write: impl Fn(usize, &mut [T]) + Sync,
    ) {
        assert!(len > 0, "parts of no elements of {:?}", self.kernel);
        let team = self.team;
        let result = self.result::<T>();
        let (start, count) = (Shared(result.as_mut_ptr()), result.len());
        team.run(count.div_ceil(len), &|part, _| {
            let from = part * len;
            // SAFETY: the team runs each part once, and parts are disjoint ranges of the result,
            // which is borrowed exclusively until they have ended.
            let elements =
                unsafe { std::slice::from_raw_parts_mut(start.at(from), len.min(count - from)) };
            write(part, elements);
        });
    }
}

/// The address of elements that threads share.
struct Shared<T>(*mut T);

impl<T> Shared<T> {
    fn at(&self, element: usize) -> *mut T {
        self.0.wrapping_add(element)
    }
}

// SAFETY: an address; those who dereference it say why they may. The elements can be sent and
// shared.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}
