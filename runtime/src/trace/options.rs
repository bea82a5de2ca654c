//! The options of a trace: sampling, averaged weights, precision, name.

use super::Trace;
use super::precision::Precision;

impl Trace {
    /// The same with new random numbers in each run, for sampling from a model: they depend on the
    /// seed of the session's parameters and on the number of earlier runs of such programs, which
    /// is the last element of the state "sampling" (i32 `[3]`: seed low, seed high, runs). It is
    /// saved with the weights, so that a resumed session draws the same numbers as an uninterrupted
    /// one; [`Session::value_as`](crate::Session::value_as) `::<i32>` reads it, and
    /// [`Session::set_value`](crate::Session::set_value) sets it anew. Training draws from another
    /// state, which sampling leaves alone.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// let trace = Trace::inference().sampling();
    /// let noise = trace.normal((4, 2));
    /// # let mut session = Session::new(Device::Cpu, Params::seeded(0))?;
    /// let sample = session.compile(&trace, [noise])?;
    /// let first = session.run(&sample, ())?[0].array::<f32>()?;
    /// assert_ne!(session.run(&sample, ())?[0].array::<f32>()?, first);
    /// # Ok::<(), slabwise::Error>(())
    /// ```
    #[must_use]
    pub fn sampling(mut self) -> Self {
        self.sampling = true;
        self
    }

    /// The same on averaged weights: parameters are read as the averages that
    /// [`Optimizer::ema`](crate::optim::Optimizer::ema) keeps of them, statistics as they are. An
    /// average before the first step is the weight's value, and so is that of a weight that no
    /// program of the session changes, such as a frozen one. Where programs of the session change a
    /// weight and none of them keeps its average, compiling the program is an error.
    pub fn averaged(mut self) -> Self {
        self.averaged = true;
        self
    }

    /// The same in mixed precision, in which the model is written as usual. Matrix products,
    /// convolutions and attention take operands of this precision and sum in f32, in the backward
    /// pass too. Their operands and results (with a bias that is added), and the gradients of both,
    /// are rounded, each once for all its readers, and take two bytes where they are stored; their
    /// [type](crate::Tensor::dtype) stays f32. Everything else is f32: weights, their gradients and
    /// optimizer states, statistics of norms, softmax, losses, and sums that no product reads, such
    /// as those of a residual stream. In a [scan](Trace::scan), only operands are rounded.
    ///
    /// On a CUDA device tensor cores multiply halves many times as fast as other cores multiply
    /// f32, and most kernels move half of the bytes; on the CPU results are the same, and only
    /// memory is saved.
    ///
    /// Mixed precision: Micikevicius et al., "Mixed Precision Training" (2018). `docs/numerics.md`
    /// lists the differences from PyTorch's `autocast`.
    ///
    /// ```
    /// # use slabwise::prelude::*;
    /// # use slabwise::Precision;
    /// let params = Params::seeded(0);
    /// let weight = params.root().param("weight", (8, 1), Init::Constant(0.5));
    /// let trace = Trace::inference().with_precision(Precision::Bf16);
    /// let y = trace.input("x", F32, (4, 8)).matmul(trace.param(&weight));
    /// assert_eq!(y.dtype(), F32);
    /// ```
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// The precision of matrix products, convolutions and the values between them.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The same with the name that reports show.
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.into();
        self
    }

    /// The name that reports show: "train" or "infer" unless it was [named](Trace::named).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether this is a [training](Trace::training) trace.
    pub fn is_training(&self) -> bool {
        self.training
    }
}
