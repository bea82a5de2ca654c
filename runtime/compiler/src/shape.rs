//! Shapes as users write them: numbers and named dimensions, bounded or unbounded.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use slabwise_kernels::collective::Group;
pub use slabwise_kernels::size::{Env, MAX_SYMBOLS, Size, Symbol};
pub use slabwise_kernels::spec::Dims;
use smallvec::SmallVec;

mod computed;

pub use computed::Computed;

/// One dimension of an input or a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// A known length. Negative lengths are reported by the call that uses them.
    Fixed(i64),
    /// A bounded dimension, known by name and maximum: planned at the bound, run at any length up
    /// to it.
    Bounded {
        /// Dimensions of the same name have the same length in a run.
        name: &'static str,
        /// The largest length.
        max: u32,
    },
    /// An unbounded dimension, known by name alone: planned for the lengths of runs (see
    /// [`DynamicShapes`](crate::shapes::DynamicShapes)).
    Unbounded {
        /// Dimensions of the same name have the same length in a run.
        name: &'static str,
    },
    /// The length of an axis of a trace, or one computed from such lengths, in terms of the
    /// symbols of that trace. It is never negative and does not fall where a symbol grows.
    Computed(Size),
}

impl Dim {
    /// A bounded dimension of any length up to `max`, 0 included; all dimensions of this name in a
    /// trace have the same length. A training trace refuses a run whose loss is a mean over no
    /// elements; elsewhere such a mean is NaN.
    pub const fn bounded(name: &'static str, max: u32) -> Self {
        Dim::Bounded { name, max }
    }

    /// A static name for a dimension whose name is only known at run time, for instance from a
    /// model file. Each different name is kept once, for the lifetime of the process.
    ///
    /// ```
    /// # use slabwise_compiler::shape::Dim;
    /// let side = "query";
    /// let dim = Dim::bounded(Dim::name(&format!("{side}_length")), 128);
    /// ```
    pub fn name(text: &str) -> &'static str {
        static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        match names.get(text) {
            Some(name) => name,
            None => {
                let name: &'static str = String::from(text).leak();
                names.insert(name);
                name
            }
        }
    }

    /// An unbounded dimension of any length; all dimensions of this name in a trace have the same
    /// length in a run. A program with such dimensions is planned when a run has lengths for which
    /// there is no plan yet, according to
    /// [`CompileOptions::shapes`](crate::compile::CompileOptions::shapes).
    pub const fn unbounded(name: &'static str) -> Self {
        Dim::Unbounded { name }
    }
}

macro_rules! from_int {
    ($($int:ty),*) => {$(
        impl From<$int> for Dim {
            fn from(n: $int) -> Self {
                // A length beyond i64 is beyond any memory: saturate, and the byte count is refused
                // later.
                Dim::Fixed(i64::try_from(n).unwrap_or(i64::MAX))
            }
        }
    )*};
}
from_int!(u32, i32, usize, u64, i64);

/// The dimensions of an input or a parameter; converted from a tuple, an array or a slice of
/// numbers and [`Dim`]s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape(#[doc(hidden)] pub SmallVec<[Dim; 6]>);

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

/// The knowledge of a symbol's length before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The most it can be.
    Bounded(u32),
    /// Unbounded: the number is the length that the program is planned for; 1 while it is traced.
    Unbounded(u32),
    /// Data-dependent: a kernel computes it in the run, at most this.
    DataDependent(Size),
    /// The place of the rank that runs the program in its group.
    Rank(Group),
    /// The rows of some parts of a batch.
    Share(Share),
    /// Computed from the lengths of earlier symbols.
    Computed(Computed),
}

/// Consecutive parts of a batch that is cut into parts as even as possible, the longer ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The number of rows.
    pub rows: Symbol,
    /// The number of parts.
    pub parts: u32,
    /// The first part.
    pub from: u32,
    /// The part after the last one.
    pub to: u32,
}

impl Share {
    /// The number of rows of these parts.
    pub fn at(self, env: &Env) -> u32 {
        let rows = env.0[usize::from(self.rows.0)];
        start_of_part(self.to, self.parts, rows) - start_of_part(self.from, self.parts, rows)
    }
}

/// The row at which a part of a batch begins that is cut as in [`Share`].
pub fn start_of_part(part: u32, parts: u32, rows: u32) -> u32 {
    part * (rows / parts) + part.min(rows % parts)
}

/// The symbols of a trace: the name and the known extent of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Symbols(Vec<(&'static str, Extent)>);

impl Symbols {
    /// The symbol of a bounded or unbounded dimension, created at the first use of its name; an
    /// error if the name is already declared otherwise, or there are too many names.
    pub fn intern(&mut self, name: &'static str, extent: Extent) -> Result<Symbol, String> {
        let Some(at) = self.0.iter().position(|(n, e)| {
            *n == name && matches!(e, Extent::Bounded(_) | Extent::Unbounded(_))
        }) else {
            return self.add(name, extent);
        };
        match (self.0[at].1, extent) {
            (known, extent) if known == extent => Ok(Symbol(at as u8)),
            (Extent::Bounded(a), Extent::Bounded(b)) => {
                Err(format!("dimension \"{name}\" is bounded by {a} and by {b}"))
            }
            (Extent::Bounded(bound), _) | (_, Extent::Bounded(bound)) => Err(format!(
                "dimension \"{name}\" is bounded by {bound} and free"
            )),
            // Unbounded dimensions of one name are one, whichever length the program is planned
            // for.
            _ => Ok(Symbol(at as u8)),
        }
    }

    /// A new symbol for a data-dependent length.
    pub fn data_dependent(&mut self, most: Size) -> Result<Symbol, String> {
        const NAMES: [&str; MAX_SYMBOLS] = [
            "found1", "found2", "found3", "found4", "found5", "found6", "found7", "found8",
        ];
        let number = self
            .0
            .iter()
            .filter(|(_, extent)| matches!(extent, Extent::DataDependent(_)))
            .count();
        self.add(
            NAMES[number.min(MAX_SYMBOLS - 1)],
            Extent::DataDependent(most),
        )
    }

    /// The symbol of the place in its group of the rank that runs the program.
    pub fn rank(&mut self, group: Group) -> Result<Symbol, String> {
        const NAMES: [&str; 4] = ["rank", "rank2", "rank3", "rank4"];
        let ranks = self
            .0
            .iter()
            .filter(|(_, e)| matches!(e, Extent::Rank(_)))
            .count();
        match self.0.iter().position(|(_, e)| *e == Extent::Rank(group)) {
            Some(at) => Ok(Symbol(at as u8)),
            None => self.add(NAMES[ranks.min(3)], Extent::Rank(group)),
        }
    }

    /// The symbol of a share of a batch, if it has one.
    pub fn find_share(&self, share: Share) -> Option<Symbol> {
        let at = self.0.iter().position(|(_, e)| *e == Extent::Share(share));
        at.map(|at| Symbol(at as u8))
    }

    /// The lengths that are cut into this number of shares, each of which has a symbol of its own.
    pub fn cut_into_shares(&self, parts: u32) -> Vec<Symbol> {
        let first = |(_, extent): &(_, Extent)| match extent {
            Extent::Share(share) => {
                ([share.parts, share.from, share.to] == [parts, 0, 1]).then_some(share.rows)
            }
            _ => None,
        };
        self.0.iter().filter_map(first).collect()
    }

    /// The symbol of a share of a batch.
    pub fn share(&mut self, share: Share) -> Result<Symbol, String> {
        const NAMES: [&str; MAX_SYMBOLS] = [
            "share1", "share2", "share3", "share4", "share5", "share6", "share7", "share8",
        ];
        let number = self.0.len().min(MAX_SYMBOLS - 1);
        match self.find_share(share) {
            Some(symbol) => Ok(symbol),
            None => self.add(NAMES[number], Extent::Share(share)),
        }
    }

    fn add(&mut self, name: &'static str, extent: Extent) -> Result<Symbol, String> {
        if self.0.len() == MAX_SYMBOLS {
            return Err(format!(
                "dimension \"{name}\" is one too many: a program has at most {MAX_SYMBOLS} lengths that are not fixed"
            ));
        }
        self.0.push((name, extent));
        Ok(Symbol(self.0.len() as u8 - 1))
    }

    /// The symbol of a name.
    pub fn find(&self, name: &str) -> Option<Symbol> {
        self.0
            .iter()
            .position(|(n, _)| *n == name)
            .map(|at| Symbol(at as u8))
    }

    /// The name of a symbol.
    pub fn name(&self, symbol: Symbol) -> &'static str {
        self.0[usize::from(symbol.0)].0
    }

    /// The known extent of a symbol.
    pub fn extent(&self, symbol: Symbol) -> Extent {
        self.0[usize::from(symbol.0)].1
    }

    /// Symbols, names and extents, in order.
    pub fn iter(&self) -> impl Iterator<Item = (Symbol, &'static str, Extent)> {
        self.0
            .iter()
            .enumerate()
            .map(|(at, &(name, extent))| (Symbol(at as u8), name, extent))
    }

    /// Whether the length is data-dependent.
    pub fn is_data_dependent(&self, symbol: Symbol) -> bool {
        matches!(self.extent(symbol), Extent::DataDependent(_))
    }

    /// Whether lengths or strides depend on a data-dependent length.
    pub fn any_data_dependent(&self, sizes: &[Size]) -> bool {
        sizes
            .iter()
            .any(|size| size.symbols().any(|s| self.is_data_dependent(s)))
    }

    /// The unbounded symbols.
    pub fn unbounded(&self) -> impl Iterator<Item = Symbol> {
        self.iter()
            .filter(|(_, _, extent)| matches!(extent, Extent::Unbounded(_)))
            .map(|(symbol, ..)| symbol)
    }

    /// The same with unbounded symbols planned for these lengths.
    pub fn planned_for(&self, lengths: &Env) -> Symbols {
        let mut symbols = self.clone();
        for (at, (_, extent)) in symbols.0.iter_mut().enumerate() {
            if let Extent::Unbounded(length) = extent {
                *length = lengths.0[at];
            }
        }
        symbols
    }

    /// The known extent of each symbol, as reports say it.
    pub fn describe(&self) -> String {
        let one = |(_, name, extent): (Symbol, &str, Extent)| match extent {
            Extent::Bounded(max) => format!("{name} ≤ {max}"),
            Extent::Unbounded(planned) => format!("{name} unbounded, planned up to {planned}"),
            Extent::DataDependent(most) => {
                format!("{name} found, ≤ {}", most.show(|s| self.name(s)))
            }
            Extent::Rank(group) => format!("{name} of {group}"),
            Extent::Share(Share {
                rows,
                parts,
                from,
                to,
            }) => format!(
                "{name} the parts {from} to {to} of {parts} of {}",
                self.name(rows)
            ),
            Extent::Computed(_) => name.to_string(),
        };
        self.iter().map(one).collect::<Vec<_>>().join(", ")
    }

    /// The least and the most that a size can be in a run.
    pub fn range_of(&self, size: Size) -> (i64, i64) {
        let mut largest = self.bounds();
        for (symbol, _, extent) in self.iter() {
            let most = match extent {
                Extent::Unbounded(_) => u32::MAX,
                Extent::Computed(formula) => formula.at(&largest),
                Extent::DataDependent(most) => {
                    u32::try_from(most.at(&largest).max(0)).unwrap_or(u32::MAX)
                }
                _ => continue,
            };
            largest.0[usize::from(symbol.0)] = most;
        }
        // A size is monotonic in its symbols, all of which grow from 0.
        let (a, b) = (size.at(&Env::default()), size.at(&largest));
        (a.min(b), a.max(b))
    }

    /// Every symbol at its planned maximum.
    pub fn bounds(&self) -> Env {
        let mut env = Env::default();
        for (at, (_, extent)) in self.0.iter().enumerate() {
            env.0[at] = match extent {
                Extent::Bounded(max) | Extent::Unbounded(max) => *max,
                Extent::Rank(group) => group.ranks.saturating_sub(1),
                Extent::Share(share) => share.at(&env),
                Extent::Computed(formula) => formula.at(&env),
                // Computed from earlier symbols.
                Extent::DataDependent(most) => u32::try_from(most.at(&env))
                    .unwrap_or(if most.at(&env) < 0 { 0 } else { u32::MAX }),
            };
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
