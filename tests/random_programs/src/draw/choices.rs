//! Steps that select elements by index and by value.

use slabwise::{DType, Scatter};

use super::Maker;
use super::steps::single;
use crate::case::{Axis, Binary, Fold, Op};
use crate::facts::{Fact, Len};
use crate::indexing::Indexing;
use crate::method::Method;

impl Maker<'_> {
    /// An index of a shape into `limit` places.
    pub(super) fn index(&mut self, dims: &[Len], limit: usize) -> Option<usize> {
        let shape = self.shape(dims)?;
        if limit == 0 {
            return None;
        }
        let dtype = self.rng.pick(&[DType::I32, DType::U8]);
        let fits = |f: &Fact| {
            matches!(f.dtype, DType::I32 | DType::U8) && f.dims == dims && f.exact && f.low >= 0.0
        };
        let x = match self.find(fits) {
            Some(x) => x,
            None => self.input(dtype, shape)?,
        };
        if self.fact(x).high < limit as f64 {
            return Some(x);
        }
        self.push(Op::Clamp(0.0, limit as f32 - 1.0), &[x])
    }

    pub(super) fn choose(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0)?;
        let axis = self.an_axis(x)?;
        let mut dims = self.fact(x).dims.clone();
        let limit = dims[axis].least();
        let n = Len::fixed(self.rng.pick(&self.lengths));
        match self.rng.below(7) {
            4 | 5 => {
                dims[axis] = n;
                let dtype = self.fact(x).dtype;
                let values = self.find(|f| f.dtype == dtype && f.dims == dims)?;
                let index = self.index(&dims, limit)?;
                let how = self.rng.pick(&[
                    Scatter::Set,
                    Scatter::Add,
                    Scatter::Mul,
                    Scatter::Min,
                    Scatter::Max,
                ]);
                self.push(Op::Scatter(axis, how), &[x, index, values])
            }
            6 => {
                let (dtype, whole) = (self.fact(x).dtype, dims.clone());
                let values = self.find(|f| {
                    let alike = |i: usize| i == axis || f.dims[i] == whole[i];
                    f.dtype == dtype && f.rank() == whole.len() && (0..whole.len()).all(alike)
                })?;
                let part = self.fact(values).dims[axis].as_fixed()?;
                let room = dims[axis].as_fixed()?.checked_sub(part)?;
                if self.rng.one_in(2) {
                    let start = self.rng.below(room + 1);
                    return self.push(Op::SliceAssign { axis, start }, &[x, values]);
                }
                let start = self.scalar_index(room)?;
                self.push(Op::UpdateSlice(axis), &[x, values, start])
            }
            0 => {
                dims[axis] = n;
                let index = self.index(&dims, limit)?;
                self.push(Op::Gather(axis), &[x, index])
            }
            1 => {
                let index = self.index(&[n], limit)?;
                self.push(Op::IndexSelect(axis), &[x, index])
            }
            2 => {
                let table = self.find(|f| f.rank() == 2)?;
                let limit = self.fact(table).dims[0].least();
                let shape = if self.rng.one_in(2) {
                    vec![n]
                } else {
                    vec![n, Len::fixed(2)]
                };
                let index = self.index(&shape, limit)?;
                self.push(Op::Embed, &[table, index])
            }
            _ => {
                let index = self.find(|f| {
                    matches!(f.dtype, DType::I32 | DType::U8)
                        && f.exact
                        && f.low >= 0.0
                        && f.high < 6.0
                })?;
                let n = self.fact(index).high as usize + 1 + self.rng.below(2);
                self.push(Op::OneHot(n), &[index])
            }
        }
    }

    /// A method of [`Indexing`].
    pub(super) fn places(&mut self) -> Option<usize> {
        let x = self.find(|f| f.rank() > 0)?;
        let axis = self.an_axis(x)?;
        let fact = self.fact(x).clone();
        let mut dims = fact.dims.clone();
        let n = Len::fixed(self.rng.pick(&self.lengths));
        let ways = [
            Scatter::Set,
            Scatter::Add,
            Scatter::Mul,
            Scatter::Min,
            Scatter::Max,
        ];
        let how = self.rng.pick(&ways);
        let call = |method: Indexing| Op::Method(Method::Index(method));
        match self.rng.below(7) {
            0 => {
                let limit = dims[axis].least();
                dims[axis] = n;
                for (i, len) in dims.iter_mut().enumerate() {
                    if i != axis && self.rng.one_in(3) {
                        *len = Len::fixed(1);
                    }
                }
                let index = self.index(&dims, limit)?;
                self.push(call(Indexing::Take(axis)), &[x, index])
            }
            1 | 2 => {
                let x =
                    self.find(|f| f.rank() > 0 && matches!(f.dtype, DType::F32 | DType::I32))?;
                let count = 1 + self.rng.below(4);
                let first = self.fact(x).dims[0];
                let segments = self.index(&[first], count)?;
                let folds = [Fold::Sum, Fold::Prod, Fold::Max, Fold::Min];
                let fold = self.rng.pick(&folds);
                self.push(call(Indexing::Segment(fold, count)), &[x, segments])
            }
            3 => {
                let index = self.index(&[n], dims[axis].least())?;
                dims[axis] = n;
                let values = self.alike(fact.dtype, &dims)?;
                self.push(call(Indexing::Slices(axis, how)), &[x, index, values])
            }
            4 => {
                let &[a, b, ..] = &dims[..] else {
                    return None;
                };
                let m = Len::fixed(self.rng.pick(&self.lengths));
                let rows = self.index(&[n, Len::fixed(1)], a.least())?;
                let columns = self.index(&[m], b.least())?;
                let space: Vec<Len> = [n, m].into_iter().chain(dims.into_iter().skip(2)).collect();
                let values = self.alike(fact.dtype, &space)?;
                self.push(call(Indexing::Put(how)), &[x, values, rows, columns])
            }
            5 => {
                let least = dims[axis].least();
                let named = Axis::Named(0);
                let start = self.rng.below(least + 1);
                let count = Axis::Fixed(self.rng.below(least - start + 1));
                let part = match self.rng.below(4) {
                    0 => [named, count],
                    1 => [Axis::Fixed(start), named],
                    _ => [Axis::Fixed(start), count],
                };
                self.push(call(Indexing::Narrow(axis, part)), &[x])
            }
            _ => {
                let open = |f: &Fact| f.dims.iter().any(|d| d.as_fixed().is_none());
                let x = self.find(open).unwrap_or(x);
                let dims = self.fact(x).dims.clone();
                let open = dims.iter().position(|d| d.as_fixed().is_none());
                let axis = open.unwrap_or(0);
                let most = self.scope.most(*dims.get(axis)?) + self.rng.below(3);
                self.push(call(Indexing::PadTo(axis, most)), &[x])
            }
        }
    }

    /// A value of this type and shape, or an input.
    fn alike(&mut self, dtype: DType, dims: &[Len]) -> Option<usize> {
        match self.find(|f| f.dtype == dtype && f.dims == dims) {
            Some(x) => Some(x),
            None => {
                let shape = self.shape(dims)?;
                self.input(dtype, shape)
            }
        }
    }

    pub(super) fn scalar_index(&mut self, most: usize) -> Option<usize> {
        let x = match self
            .find(|f| f.dtype == DType::I32 && f.rank() == 0 && f.exact && f.low >= 0.0)
        {
            Some(x) => x,
            None => self.input(DType::I32, Vec::new())?,
        };
        if self.fact(x).high <= most as f64 {
            Some(x)
        } else {
            self.push(Op::Clamp(0.0, most as f32), &[x])
        }
    }

    pub(super) fn found(&mut self) -> Option<usize> {
        if self.found >= 3 {
            return None;
        }
        self.found += 1;
        let x = self.find(|_| true)?;
        let fact = self.fact(x).clone();
        match self.rng.below(7) {
            0 => self.push(Op::Nonzero, &[x]),
            1 | 2 => {
                let mask = self.mask(&fact.dims)?;
                self.push(Op::MaskedSelect, &[x, mask])
            }
            3 => {
                let axis = self.an_axis(x)?;
                let mask = self.mask(&fact.dims[axis..=axis])?;
                self.push(Op::Compress(axis), &[x, mask])
            }
            4 => self.push(Op::Unique, &[x]),
            5 => {
                let axis = self.an_axis(x)?;
                let n = fact.dims[axis].least();
                let most = self.rng.below(n + 1);
                let start = self.scalar_index(most)?;
                let rest = n - self.fact(start).high as usize;
                if self.rng.one_in(2) {
                    let length = self.rng.below(rest + 1);
                    return self.push(Op::SliceFrom { axis, length }, &[x, start]);
                }
                let length = self.scalar_index(rest)?;
                self.push(Op::DynamicSlice(axis), &[x, start, length])
            }
            _ => {
                let boxes =
                    self.find(|f| single(f) && f.exact && f.rank() == 2 && f.dims[1].is(4))?;
                let n = self.fact(boxes).dims[0];
                let scores = self.find(|f| single(f) && f.exact && f.dims == [n])?;
                let threshold = self.rng.pick(&[0.0, 0.25, 0.5]);
                self.push(Op::Nms(threshold), &[boxes, scores])
            }
        }
    }

    pub(super) fn mask(&mut self, dims: &[Len]) -> Option<usize> {
        if let Some(mask) = self.find(|f| f.dtype == DType::Bool && f.exact && f.dims == dims) {
            return Some(mask);
        }
        if let Some(x) = self.find(|f| f.dtype != DType::Bool && f.exact && f.dims == dims) {
            return self.push(Op::Number(Binary::Gt, 0.0), &[x]);
        }
        let shape = self.shape(dims)?;
        self.input(DType::Bool, shape)
    }
}
