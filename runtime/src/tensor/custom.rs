//! Values of custom kernels.

use std::panic::Location;

use slabwise_kernels::custom::CustomKernel;

use super::{Tensor, checked_as};
use crate::ops::Op;
use crate::shape::Shape;
use crate::trace::{Trace, resolve};

impl Trace {
    /// The result of a kernel of the user for these inputs, of the kernel's type and of this shape.
    /// The plan gives it a place in the slab like any other value. No other operation is fused with
    /// it, and views that are not contiguous are copied for it.
    ///
    /// A custom kernel has no gradient, and a backward pass that needs it is a mistake:
    /// [`Trace::custom_gradient`] gives it one, which may be another custom kernel.
    ///
    /// ```
    /// # use slabwise::{CustomKernel, prelude::*};
    /// // The entropy of each row of probabilities.
    /// let entropy = CustomKernel::new("entropy", [F32], F32, |run| {
    ///     let (p, columns) = (run.input::<f32>(0), run.input_dims(0)[1]);
    ///     run.parts(1, |row, result| {
    ///         let p = &p[row * columns..][..columns];
    ///         result[0] = -p.iter().map(|p| p * p.ln()).sum::<f32>();
    ///     });
    /// });
    /// let trace = Trace::inference();
    /// let x = trace.input("x", F32, (2, 4));
    /// let y = trace.custom(&entropy, &[x.softmax(1)], [x.dim(0)]);
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let program = session.compile(&trace, [y])?;
    /// let [y] = session.run(&program, (ndarray::arr2(&[[0.0f32; 4]; 2]).into_dyn(),))?;
    /// assert!(y.array::<f32>()?.iter().all(|y| (y - 4f32.ln()).abs() < 1e-6));
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    ///
    /// Mistakes: another number or other types of inputs than the kernel takes, a result of bool. On
    /// CUDA a kernel without [code for CUDA](CustomKernel::with_cuda) is an error of
    /// [`Session::compile`](crate::Session::compile).
    #[track_caller]
    pub fn custom<'t>(
        &'t self,
        kernel: &CustomKernel,
        inputs: &[Tensor<'t>],
        shape: impl Into<Shape>,
    ) -> Tensor<'t> {
        let shape = shape.into();
        self.record(Location::caller(), inputs, |g, ids| {
            let name = kernel.name();
            let dims = resolve(&mut g.symbols, &shape).map_err(|why| format!("{name}: {why}"))?;
            checked_as(g, Op::Custom(kernel.clone()), ids, kernel.result(), &dims)
        })
    }
}
