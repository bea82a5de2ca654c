//! The values of variables before they are first written.

/// The value of a variable before it is first written.
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

impl Init {
    /// Uniform in ±1/√`fan_in`: Kaiming's uniform initialisation (He et al. 2015) with a = √5, the
    /// usual start of linear and convolution layers. `fan_in` is the number of inputs that each
    /// result sums over; with 0 there are no elements.
    pub fn kaiming_uniform(fan_in: usize) -> Self {
        Init::within(1.0 / (fan_in.max(1) as f64).sqrt())
    }

    /// Normal with standard deviation √(2/`fan_in`), for layers followed by relu (He et al. 2015).
    pub fn kaiming_normal(fan_in: usize) -> Self {
        Init::Normal {
            mean: 0.0,
            std: (2.0 / fan_in.max(1) as f64).sqrt() as f32,
        }
    }

    /// Uniform in ±√(6/(`fan_in` + `fan_out`)) (Glorot & Bengio 2010).
    pub fn xavier_uniform(fan_in: usize, fan_out: usize) -> Self {
        Init::within((6.0 / (fan_in as f64 + fan_out as f64).max(1.0)).sqrt())
    }

    /// Normal with standard deviation √(2/(`fan_in` + `fan_out`)) (Glorot & Bengio 2010).
    pub fn xavier_normal(fan_in: usize, fan_out: usize) -> Self {
        Init::Normal {
            mean: 0.0,
            std: (2.0 / (fan_in as f64 + fan_out as f64).max(1.0)).sqrt() as f32,
        }
    }

    fn within(bound: f64) -> Self {
        Init::Uniform {
            low: -bound as f32,
            high: bound as f32,
        }
    }

    /// The mistake in these numbers, if there is one.
    #[doc(hidden)]
    pub fn fault(&self) -> Option<String> {
        match *self {
            Init::Uniform { low, high }
                if !(low.is_finite() && high.is_finite() && low <= high) =>
            {
                Some(format!("cannot be uniform between {low} and {high}"))
            }
            Init::Normal { mean, std } if !(mean.is_finite() && std.is_finite() && std >= 0.0) => {
                Some(format!(
                    "cannot be normal with mean {mean} and standard deviation {std}"
                ))
            }
            _ => None,
        }
    }
}
