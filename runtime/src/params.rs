//! Declarations of named parameters: nothing is allocated here.

/// What a variable holds before it is first written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// One value everywhere.
    Constant(f32),
    /// Uniform in `low..high`, keyed by the seed and the variable's name.
    Uniform {
        /// The least value.
        low: f32,
        /// The bound above.
        high: f32,
    },
    /// Normal, keyed by the seed and the variable's name.
    Normal {
        /// The mean.
        mean: f32,
        /// The standard deviation.
        std: f32,
    },
    /// The random state: seed low, seed high, step 0 (i32 `[3]`).
    RandomState,
}
