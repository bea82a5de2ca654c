//! Facts about a value before a program runs: its type, its shape, and bounds of its numbers.

use std::collections::HashMap;

use slabwise::DType;

use crate::case::{Axis, Case};

/// A length that is known when a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unknown {
    /// A named dimension.
    Named(usize),
    /// The data-dependent length of this statement: the number of true elements of a mask, or a
    /// length of its own.
    Found(usize),
}

/// A length: `times` of an unknown one, plus a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Len {
    times: i64,
    of: Option<Unknown>,
    plus: i64,
}

impl Len {
    /// A number.
    pub fn fixed(n: usize) -> Len {
        Len {
            times: 0,
            of: None,
            plus: n as i64,
        }
    }

    /// A length that is not known.
    pub fn unknown(of: Unknown) -> Len {
        Len {
            times: 1,
            of: Some(of),
            plus: 0,
        }
    }

    /// Its number, if it is fixed.
    pub fn as_fixed(self) -> Option<usize> {
        self.of.is_none().then_some(self.plus as usize)
    }

    /// Whether it is this number at every length.
    pub fn is(self, n: usize) -> bool {
        self.as_fixed() == Some(n)
    }

    /// The dimension, if the length is exactly one dimension.
    pub fn named(self) -> Option<usize> {
        match self {
            Len {
                times: 1,
                of: Some(Unknown::Named(dim)),
                plus: 0,
            } => Some(dim),
            _ => None,
        }
    }

    /// Whether it is data-dependent.
    pub fn is_data_dependent(self) -> bool {
        matches!(self.of, Some(Unknown::Found(_)))
    }

    /// Its smallest value.
    pub fn least(self) -> usize {
        self.plus as usize
    }

    fn normal(self) -> Len {
        if self.times == 0 {
            Len { of: None, ..self }
        } else {
            self
        }
    }

    /// The sum, if it has the form of a length.
    pub fn plus(self, other: Len) -> Option<Len> {
        let of = match (self.of, other.of) {
            (a, None) => a,
            (None, b) => b,
            (a, b) if a == b => a,
            _ => return None,
        };
        Some(
            Len {
                times: self.times + other.times,
                of,
                plus: self.plus + other.plus,
            }
            .normal(),
        )
    }

    /// The difference, if it is not negative at any length.
    pub fn less(self, n: usize) -> Option<Len> {
        let plus = self.plus - n as i64;
        (plus >= 0).then_some(Len { plus, ..self })
    }

    /// The number that remains of this length without an unknown one that is part of it.
    pub fn without(self, unknown: Len) -> Option<usize> {
        let rest = (self.of == unknown.of && self.times == unknown.times).then_some(self.plus);
        rest.and_then(|n| usize::try_from(n).ok())
    }

    /// The product, if it has the form of a length.
    pub fn by(self, other: Len) -> Option<Len> {
        let (a, b) = if self.of.is_none() {
            (other, self)
        } else {
            (self, other)
        };
        b.of.is_none().then(|| {
            Len {
                times: a.times * b.plus,
                of: a.of,
                plus: a.plus * b.plus,
            }
            .normal()
        })
    }

    /// The quotient by `n`, if it is exact.
    pub fn part(self, n: usize) -> Option<Len> {
        let n = n as i64;
        (n > 0 && self.times % n == 0 && self.plus % n == 0).then(|| Len {
            times: self.times / n,
            plus: self.plus / n,
            ..self
        })
    }
}

/// Facts about a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Fact {
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub dims: Vec<Len>,
    /// No element is smaller, as far as is known.
    pub low: f64,
    /// No element is larger, as far as is known.
    pub high: f64,
    /// Whether every correct implementation computes the same bits.
    pub exact: bool,
    /// The parameters that a gradient reaches, a bit for each; several layers may share one.
    pub learns: u64,
    /// Whether every gradient of it lacks jumps that rounding can cause.
    pub smooth: bool,
}

impl Fact {
    /// A value of a type and shape without further facts.
    pub fn new(dtype: DType, dims: Vec<Len>) -> Fact {
        Fact {
            dtype,
            dims,
            low: f64::NEG_INFINITY,
            high: f64::INFINITY,
            exact: false,
            learns: 0,
            smooth: true,
        }
    }

    /// The same with bounds.
    pub fn within(self, low: f64, high: f64) -> Fact {
        Fact { low, high, ..self }
    }

    /// The same with `exact` set.
    pub fn exact(self, exact: bool) -> Fact {
        Fact { exact, ..self }
    }

    /// The largest magnitude.
    pub fn bound(&self) -> f64 {
        self.low.abs().max(self.high.abs())
    }

    /// The number of axes.
    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// The result type of arithmetic on it.
    pub fn lane(&self) -> DType {
        lane(self.dtype)
    }

    /// Its shape, if it is fixed.
    pub fn fixed(&self) -> Option<Vec<usize>> {
        self.dims.iter().map(|d| d.as_fixed()).collect()
    }
}

/// The result type of arithmetic on a type.
pub fn lane(dtype: DType) -> DType {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => DType::F32,
        DType::I32 | DType::U8 => DType::I32,
        DType::Bool => DType::Bool,
    }
}

/// The dimensions that shapes refer to: named ones, and bounds of data-dependent ones.
pub struct Scope<'a> {
    /// The case, for its dimensions, parameters and states.
    pub case: &'a Case,
    /// Whether the trace is for training.
    pub training: bool,
    found: HashMap<usize, usize>,
}

/// The most lengths that are not fixed, of the 8 that a program may have.
const UNKNOWN_MAX: usize = 7;

impl<'a> Scope<'a> {
    /// The scope of a program of a case.
    pub fn new(case: &'a Case, training: bool) -> Scope<'a> {
        Scope {
            case,
            training,
            found: HashMap::new(),
        }
    }

    /// The largest value of a length.
    pub fn most(&self, len: Len) -> usize {
        let of = match len.of {
            None => 0,
            Some(Unknown::Named(dim)) => self.case.dims[dim].max as usize,
            Some(Unknown::Found(at)) => self.found.get(&at).copied().unwrap_or(0),
        };
        len.times as usize * of + len.plus as usize
    }

    /// The most elements of a shape; `None` if their number is not expressible as a size of
    /// slabwise.
    pub fn elements(&self, dims: &[Len]) -> Option<usize> {
        let open: Vec<&Len> = dims.iter().filter(|d| d.of.is_some()).collect();
        if open.len() > 3 || (open.len() > 1 && open.iter().any(|d| d.plus != 0)) {
            return None;
        }
        Some(dims.iter().map(|d| self.most(*d)).product())
    }

    /// The data-dependent length of a statement with this bound; `None` if there are too many of
    /// them.
    pub fn found(&mut self, key: usize, most: usize) -> Option<Len> {
        if !self.found.contains_key(&key) && self.found.len() + self.case.dims.len() >= UNKNOWN_MAX
        {
            return None;
        }
        self.found.insert(key, most);
        Some(Len::unknown(Unknown::Found(key)))
    }

    /// A length as written, unless it is open.
    pub fn len(&self, axis: Axis) -> Option<Len> {
        match axis {
            Axis::Fixed(n) => Some(Len::fixed(n)),
            Axis::Named(dim) => {
                (dim < self.case.dims.len()).then(|| Len::unknown(Unknown::Named(dim)))
            }
            Axis::Open => None,
        }
    }

    /// A shape as written, unless one of its lengths is open.
    pub fn shape(&self, shape: &[Axis]) -> Option<Vec<Len>> {
        shape.iter().map(|&axis| self.len(axis)).collect()
    }
}

/// The shape that two broadcast to.
pub fn broadcast(a: &[Len], b: &[Len]) -> Option<Vec<Len>> {
    let rank = a.len().max(b.len());
    let at = |d: &[Len], i: usize| {
        (i + d.len())
            .checked_sub(rank)
            .map_or(Len::fixed(1), |i| d[i])
    };
    let join = |i| match (at(a, i), at(b, i)) {
        (a, b) if a == b || b.is(1) => Some(a),
        (a, b) if a.is(1) => Some(b),
        _ => None,
    };
    (0..rank).map(join).collect()
}
