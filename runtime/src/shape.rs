//! Shapes as users write them: numbers and named, bounded dimensions.

use std::fmt;

pub use slabwise_kernels::size::{Env, MAX_SYMBOLS, Size, Symbol};
pub use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

/// One dimension of an input or a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// A known length. Negative lengths are reported by the call that uses them.
    Fixed(i64),
    /// Known by name and by the most it can be: planned at the bound, run at any length up to it.
    Bounded {
        /// Dimensions of one name have one length in a run.
        name: &'static str,
        /// The largest length.
        max: u32,
    },
}

impl Dim {
    /// A dimension of any length up to `max`; all dimensions of this name in a trace have the same length.
    pub const fn bounded(name: &'static str, max: u32) -> Self {
        Dim::Bounded { name, max }
    }
}

macro_rules! from_int {
    ($($int:ty),*) => {$(
        impl From<$int> for Dim {
            fn from(n: $int) -> Self {
                // A length beyond i64 is beyond any memory: saturate, and the byte count is refused later.
                Dim::Fixed(i64::try_from(n).unwrap_or(i64::MAX))
            }
        }
    )*};
}
from_int!(u32, i32, usize, u64, i64);

/// The dimensions of an input or a parameter; made from a tuple, an array or a slice of numbers and [`Dim`]s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape(pub(crate) SmallVec<[Dim; 6]>);

impl Shape {
    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[Dim] {
        &self.0
    }
}

macro_rules! from_tuple {
    ($($name:ident),*) => {
        impl<$($name: Into<Dim>),*> From<($($name,)*)> for Shape {
            #[allow(non_snake_case)]
            fn from(($($name,)*): ($($name,)*)) -> Self {
                Shape(SmallVec::from_iter([$($name.into()),*]))
            }
        }
    };
}
from_tuple!(A);
from_tuple!(A, B);
from_tuple!(A, B, C);
from_tuple!(A, B, C, D);
from_tuple!(A, B, C, D, E);
from_tuple!(A, B, C, D, E, F);

impl From<()> for Shape {
    fn from((): ()) -> Self {
        Shape::default()
    }
}

impl<D: Into<Dim> + Copy, const N: usize> From<[D; N]> for Shape {
    fn from(dims: [D; N]) -> Self {
        Shape(dims.into_iter().map(Into::into).collect())
    }
}

impl<D: Into<Dim> + Copy> From<&[D]> for Shape {
    fn from(dims: &[D]) -> Self {
        Shape(dims.iter().map(|&d| d.into()).collect())
    }
}

/// The symbols of a trace: name and bound of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Symbols(Vec<(&'static str, u32)>);

impl Symbols {
    /// The symbol of a name, made at its first use; an error if the name has another bound, or there are too many names.
    pub fn intern(&mut self, name: &'static str, max: u32) -> Result<Symbol, String> {
        if let Some(at) = self.0.iter().position(|(n, _)| *n == name) {
            let bound = self.0[at].1;
            return if bound == max {
                Ok(Symbol(at as u8))
            } else {
                Err(format!("dimension \"{name}\" is bounded by {bound} and by {max}"))
            };
        }
        if self.0.len() == MAX_SYMBOLS {
            return Err(format!("dimension \"{name}\" is one too many: a program has at most {MAX_SYMBOLS} bounded dimensions"));
        }
        self.0.push((name, max));
        Ok(Symbol(self.0.len() as u8 - 1))
    }

    /// The symbol of a name.
    pub fn find(&self, name: &str) -> Option<Symbol> {
        self.0.iter().position(|(n, _)| *n == name).map(|at| Symbol(at as u8))
    }

    /// The name of a symbol.
    pub fn name(&self, symbol: Symbol) -> &'static str {
        self.0[usize::from(symbol.0)].0
    }

    /// The bound of a symbol.
    pub fn bound(&self, symbol: Symbol) -> u32 {
        self.0[usize::from(symbol.0)].1
    }

    /// Names and bounds, in symbol order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u32)> {
        self.0.iter().copied()
    }

    /// Every symbol at its bound.
    pub fn bounds(&self) -> Env {
        let mut env = Env::default();
        for (slot, (_, max)) in env.0.iter_mut().zip(&self.0) {
            *slot = *max;
        }
        env
    }

    /// A shape as a user reads it, as in `[batch, 784]`.
    pub fn show<'a>(&'a self, dims: &'a [Size]) -> impl fmt::Display + 'a {
        struct Show<'a>(&'a Symbols, &'a [Size]);
        impl fmt::Display for Show<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("[")?;
                for (i, d) in self.1.iter().enumerate() {
                    let sep = if i > 0 { ", " } else { "" };
                    write!(f, "{sep}{}", d.show(|s| self.0.name(s)))?;
                }
                f.write_str("]")
            }
        }
        Show(self, dims)
    }
}

/// The number of elements, or `None` if it has no form as a [`Size`] or overflows.
pub fn elements(dims: &[Size]) -> Option<Size> {
    dims.iter().try_fold(Size::ONE, |n, &d| n.checked_mul(d))
}
