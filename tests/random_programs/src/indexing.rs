//! Methods that read or write elements at places, and parts of lengths of the run: as calls, as
//! text, their rules.

use slabwise::{DType, Dim, Scatter, Tensor};

use crate::axis::Axis;
use crate::case::Fold;
use crate::facts::{Fact, Len, Scope, broadcast};

/// A method that reads or writes elements at places.
#[derive(Clone, Debug, PartialEq)]
pub enum Indexing {
    /// Elements along an axis at places that broadcast along the others.
    Take(usize),
    /// A fold of the slices of each of so many segments, limited where a segment has none.
    Segment(Fold, usize),
    /// Slices of an axis, combined with others.
    Slices(usize, Scatter),
    /// Elements at rows and columns, combined with others.
    Put(Scatter),
    /// The part of an axis from the first length on, of the second length.
    Narrow(usize, [Axis; 2]),
    /// Padding at the end of an axis to a length.
    PadTo(usize, usize),
}

/// The limit of the folds of segments.
const LIMIT: f32 = 8.0;

impl Indexing {
    /// The lengths that it writes down.
    pub fn shape(&self) -> &[Axis] {
        match self {
            Indexing::Narrow(_, part) => part,
            _ => &[],
        }
    }

    /// [`Indexing::shape`], to change it.
    pub fn shape_mut(&mut self) -> &mut [Axis] {
        match self {
            Indexing::Narrow(_, part) => part,
            _ => &mut [],
        }
    }

    pub(crate) fn apply<'t>(&self, args: &[Tensor<'t>], dim: impl Fn(Axis) -> Dim) -> Tensor<'t> {
        let x = args[0];
        match *self {
            Indexing::Take(axis) => x.take_along_axis(axis, args[1]),
            Indexing::Segment(fold, count) => match fold {
                Fold::Prod => x.segment_prod(args[1], count),
                Fold::Max => x.segment_max(args[1], count),
                Fold::Min => x.segment_min(args[1], count),
                _ => x.segment_sum(args[1], count),
            }
            .clamp(-LIMIT, LIMIT),
            Indexing::Slices(axis, how) => x.index_scatter(axis, args[1], args[2], how),
            Indexing::Put(how) => x.index_put(&args[2..], args[1], how),
            Indexing::Narrow(axis, [start, length]) => x.narrow(axis, dim(start), dim(length)),
            Indexing::PadTo(axis, length) => x.pad_to(axis, length, 1.0),
        }
    }

    pub(crate) fn text(&self, args: &[String]) -> String {
        let x = &args[0];
        let length = |axis: &Axis| match axis {
            Axis::Named(at) => format!("dim{at}"),
            Axis::Fixed(n) => n.to_string(),
            Axis::Open => "-1".into(),
        };
        match self {
            Indexing::Take(axis) => format!("{x}.take_along_axis({axis}, {})", args[1]),
            Indexing::Segment(fold, count) => {
                let method = match fold {
                    Fold::Prod | Fold::Max | Fold::Min => fold.text(),
                    _ => "sum",
                };
                let limits = format!(".clamp(-{LIMIT:?}, {LIMIT:?})");
                format!("{x}.segment_{method}({}, {count}){limits}", args[1])
            }
            Indexing::Slices(axis, how) => {
                let [index, values] = [&args[1], &args[2]];
                format!("{x}.index_scatter({axis}, {index}, {values}, slabwise::Scatter::{how:?})")
            }
            Indexing::Put(how) => {
                let (index, values) = (args[2..].join(", "), &args[1]);
                format!("{x}.index_put(&[{index}], {values}, slabwise::Scatter::{how:?})")
            }
            Indexing::Narrow(axis, [start, count]) => {
                format!("{x}.narrow({axis}, {}, {})", length(start), length(count))
            }
            Indexing::PadTo(axis, n) => format!("{x}.pad_to({axis}, {n}, 1.0)"),
        }
    }

    pub(crate) fn infer(&self, args: &[&Fact], scope: &Scope<'_>) -> Option<Fact> {
        let (x, rest) = args.split_first()?;
        match (self, rest) {
            (&Indexing::Take(axis), [index]) => {
                within(index, *x.dims.get(axis)?)?;
                let (mut of, mut by) = (x.dims.clone(), index.dims.clone());
                (of.len() == by.len()).then_some(())?;
                let count = by[axis];
                (of[axis], by[axis]) = (Len::fixed(1), Len::fixed(1));
                let mut dims = broadcast(&of, &by)?;
                scope.elements(&dims)?;
                dims[axis] = count;
                Some(Fact {
                    dims,
                    ..(*x).clone()
                })
            }
            (&Indexing::Segment(fold, count), [segments]) => {
                within(segments, Len::fixed(count))?;
                let (&n, _) = x.dims.split_first()?;
                let chooses = matches!(fold, Fold::Max | Fold::Min);
                let takes = matches!(x.dtype, DType::F32 | DType::I32) && segments.dims == [n];
                // Products and sums as large as those of integers are exact only below 2²⁴.
                (takes && scope.most(n) <= 12 && x.bound() <= 8.0).then_some(())?;
                let mut dims = x.dims.clone();
                dims[0] = Len::fixed(count);
                let limit = f64::from(LIMIT);
                let exact = x.exact && (chooses || x.dtype == DType::I32);
                Some(Fact {
                    smooth: exact,
                    ..Fact::new(x.dtype, dims).within(-limit, limit).exact(exact)
                })
            }
            (&Indexing::Slices(axis, how), [index, values]) => {
                within(index, *x.dims.get(axis)?)?;
                let mut dims = x.dims.clone();
                dims[axis] = *index.dims.first()?;
                (index.rank() == 1 && values.dims == dims).then_some(())?;
                written(x, values, how, scope.most(dims[axis]))
            }
            (&Indexing::Put(how), [values, rows, columns]) => {
                let [a, b, ..] = x.dims[..] else {
                    return None;
                };
                within(rows, a)?;
                within(columns, b)?;
                let mut dims = broadcast(&rows.dims, &columns.dims)?;
                let count: usize = dims.iter().map(|d| scope.most(*d)).product();
                dims.extend(&x.dims[2..]);
                (values.dims == dims && dims.iter().all(|d| d.as_fixed().is_some()))
                    .then_some(())?;
                written(x, values, how, count)
            }
            (&Indexing::Narrow(axis, part), []) => {
                let mut dims = x.dims.clone();
                let whole = dims.get_mut(axis)?;
                let [start, count] = [scope.len(part[0])?, scope.len(part[1])?];
                let names = |d: Len| d.as_fixed().is_none();
                // What remains is a number.
                let room = match (names(start), names(count)) {
                    (true, true) => return None,
                    (false, false) => whole.less(0).map(|_| whole.least())?,
                    _ => whole.without(if names(start) { start } else { count })?,
                };
                let fixed = start.least() + count.least();
                (fixed <= room).then_some(())?;
                *whole = count;
                Some(Fact {
                    dims,
                    ..(*x).clone()
                })
            }
            (&Indexing::PadTo(axis, n), []) => {
                let mut dims = x.dims.clone();
                let len = dims.get_mut(axis)?;
                // Bounds of named dimensions do not hold where they are declared as unbounded.
                let known = len.as_fixed().is_some() || scope.case.dims.is_empty();
                (known && scope.most(*len) <= n).then_some(())?;
                *len = Len::fixed(n);
                let fact = Fact {
                    dims,
                    ..(*x).clone()
                };
                Some(fact.within(x.low.min(1.0), x.high.max(1.0)))
            }
            _ => None,
        }
    }
}

/// Whether an index names places of an axis at every length.
fn within(index: &Fact, limit: Len) -> Option<()> {
    let integers = matches!(index.dtype, DType::I32 | DType::U8);
    let inside = index.low >= 0.0 && index.high < limit.least() as f64;
    (integers && index.exact && inside).then_some(())
}

/// A value with at most so many others combined with each element.
fn written(x: &Fact, v: &Fact, how: Scatter, count: usize) -> Option<Fact> {
    let n = count.max(1) as f64;
    let takes = how == Scatter::Set || matches!(x.dtype, DType::F32 | DType::I32);
    let most = match how {
        Scatter::Add => x.bound() + n * v.bound(),
        Scatter::Mul => x.bound() * v.bound().max(1.0).powf(n),
        _ => x.bound().max(v.bound()),
    };
    let sums = matches!(how, Scatter::Add | Scatter::Mul);
    let exact = x.exact && v.exact && (!sums || x.dtype == DType::I32);
    let kinks = matches!(how, Scatter::Max | Scatter::Min) && !exact;
    (takes && x.dtype == v.dtype && most < 1e6).then(|| Fact {
        smooth: !kinks,
        ..Fact::new(x.dtype, x.dims.clone())
            .within(-most, most)
            .exact(exact)
    })
}
