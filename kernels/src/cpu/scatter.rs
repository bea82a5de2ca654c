//! Deterministic scatter.
//!
//! The result is cut into blocks, and each block searches the values for those reduced into it, in
//! their order. Therefore no atomics are needed, and the sums do not depend on how the blocks are
//! shared among threads.

use std::ops::Range;

use super::pointwise::{Block, BlockCode, OperandView, Space};
use super::{Config, Launch, SpecError};
use crate::dtype::{DType, Lane};
use crate::size::Env;
use crate::spec::{Body, Dims, ReduceOp, Spec};

/// Most points of a block. Every block reads all indices that may lead to it, so blocks are as
/// large as fits comfortably into the second-level cache.
const BLOCK: usize = 1 << 14;

/// Indices that are compared at once with those of a block: most groups of so many have none of them.
const AT_ONCE: usize = 16;

/// See [`Body::Scatter`]. Values whose index lies outside the axis go nowhere;
/// [`super::gather::BoundsCheck`] reports them.
pub(crate) struct Scatter {
    code: BlockCode,
    /// The scatter along the last axis that is computed instead.
    along_last: Option<Box<Spec>>,
}

impl Scatter {
    pub fn new(spec: &Spec, bound: &Env, config: &Config) -> Result<Self, SpecError> {
        let along_last = along_last(spec, bound).map(Box::new);
        let code = BlockCode::new(along_last.as_deref().unwrap_or(spec), bound, config, BLOCK)?;
        Ok(Scatter { code, along_last })
    }

    pub fn workspace(&self) -> u64 {
        self.code.workspace()
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let spec = self.along_last.as_deref().unwrap_or(spec);
        let Body::Scatter(scatter) = &spec.body else {
            unreachable!("checked by new")
        };
        let (env, axis) = (launch.env, scatter.axis);
        let sums = Sums {
            value: OperandView::new(&scatter.value, launch.args[0], env),
            index: OperandView::new(&scatter.index, launch.args[1], env),
            axis,
            outer: Space::new(&spec.dims[..axis], env),
            inner: Space::new(&spec.dims[axis + 1..], env),
            len: spec.dims[axis].usize_at(env),
            values: scatter.space[axis].usize_at(env),
        };
        let fill = |_: &Space, block: &Block, values: &mut [u32]| {
            let range = block.from..block.from + block.points;
            // SAFETY: the operands are accessed inside their spaces.
            unsafe { sums.reduce_by(scatter.reduce, range, values) };
        };
        // SAFETY: the caller's promise.
        unsafe { self.code.run(spec, launch, fill) };
    }
}

/// The same scatter with its axis last, if an index belongs to one element rather than to all inner
/// ones and blocks are smaller than the result of an outer index: each block would search the indices
/// of all inner elements, and then searches those of some. Values are reduced in the same order.
fn along_last(spec: &Spec, bound: &Env) -> Option<Spec> {
    let Body::Scatter(scatter) = &spec.body else {
        return None;
    };
    let axis = scatter.axis;
    let varies =
        |inner: usize| !scatter.index.strides[inner].is(0) && scatter.space[inner].at(bound) > 1;
    let of_outer = spec.dims[axis..]
        .iter()
        .fold(1usize, |n, size| n.saturating_mul(size.usize_at(bound)));
    if of_outer <= BLOCK || !(axis + 1..spec.dims.len()).any(varies) {
        return None;
    }
    let mut moved = spec.clone();
    let last = |sizes: &mut Dims| {
        let size = sizes.remove(axis);
        sizes.push(size);
    };
    last(&mut moved.dims);
    moved.operands.iter_mut().for_each(|o| last(&mut o.strides));
    moved.indices.iter_mut().for_each(last);
    if let Body::Scatter(scatter) = &mut moved.body {
        last(&mut scatter.space);
        last(&mut scatter.value.strides);
        last(&mut scatter.index.strides);
        scatter.axis = spec.dims.len() - 1;
    }
    Some(moved)
}

/// A scatter at launch: result `outer × len × inner`, values `outer × values × inner`.
struct Sums {
    value: OperandView,
    index: OperandView,
    axis: usize,
    outer: Space,
    inner: Space,
    len: usize,
    values: usize,
}

impl Sums {
    /// The row-major `range` of the result.
    ///
    /// # Safety
    /// The operands may be read over the values' space.
    unsafe fn reduce_by(&self, op: ReduceOp, range: Range<usize>, row: &mut [u32]) {
        let float = |bits: u32| f32::from_bits(bits);
        let integer = |bits: u32| bits as i32;
        // SAFETY: the caller's promise.
        unsafe {
            match (self.value.dtype.lane(), op) {
                (Lane::F32, ReduceOp::Sum) => {
                    self.reduce(0f32.to_bits(), range, row, |a, b| {
                        (float(a) + float(b)).to_bits()
                    });
                }
                (Lane::F32, ReduceOp::Prod) => {
                    self.reduce(1f32.to_bits(), range, row, |a, b| {
                        (float(a) * float(b)).to_bits()
                    });
                }
                (Lane::F32, ReduceOp::Max) => {
                    self.reduce(f32::NEG_INFINITY.to_bits(), range, row, |a, b| {
                        let stays = float(a) >= float(b) || float(a).is_nan();
                        if stays { a } else { b }
                    });
                }
                (Lane::F32, _) => {
                    self.reduce(f32::INFINITY.to_bits(), range, row, |a, b| {
                        let stays = float(a) <= float(b) || float(a).is_nan();
                        if stays { a } else { b }
                    });
                }
                (_, ReduceOp::Sum) => self.reduce(0, range, row, u32::wrapping_add),
                (_, ReduceOp::Prod) => self.reduce(1, range, row, u32::wrapping_mul),
                (_, ReduceOp::Max) => self.reduce(i32::MIN as u32, range, row, |a, b| {
                    integer(a).max(integer(b)) as u32
                }),
                _ => self.reduce(i32::MAX as u32, range, row, |a, b| {
                    integer(a).min(integer(b)) as u32
                }),
            }
        }
    }

    /// The same by a function of bits, starting at the identity of the reduction.
    ///
    /// # Safety
    /// See [`Sums::reduce_by`].
    #[inline(always)]
    unsafe fn reduce(
        &self,
        nothing: u32,
        range: Range<usize>,
        sums: &mut [u32],
        join: impl Fn(u32, u32) -> u32,
    ) {
        sums.fill(nothing);
        let inner = self.inner.points();
        let per_outer = self.len * inner;
        let (index_axis, index_inner) = self.index.strides[self.axis..]
            .split_first()
            .expect("the axis exists");
        let value_inner = &self.value.strides[self.axis + 1..];
        let along = |strides: &[isize], at: &[usize]| -> isize {
            at.iter().zip(strides).map(|(&c, &s)| c as isize * s).sum()
        };
        let last = self.inner.sizes().len().saturating_sub(1);
        let step = |strides: &[isize]| {
            if self.inner.sizes().is_empty() {
                0
            } else {
                strides[last]
            }
        };
        let (value_step, index_step) = (step(value_inner), step(index_inner));
        let repeats = index_inner.iter().all(|&s| s == 0);
        let is_row = repeats && *index_axis == 1 && self.index.dtype == DType::I32;
        // SAFETY: called for points of the values' space only.
        let index = |offset: isize| unsafe { self.index.load(offset) } as i32;
        // SAFETY: as above.
        let value = |offset: isize| unsafe { self.value.element::<u32>(offset).read() };
        for outer in range.start / per_outer..range.end.div_ceil(per_outer) {
            let (from, to) = (
                range.start.max(outer * per_outer),
                range.end.min((outer + 1) * per_outer),
            );
            // The part of this outer index's `len × inner` that is in the range.
            let (here, wanted) = (
                from - range.start,
                from - outer * per_outer..to - outer * per_outer,
            );
            let at = self.outer.point(outer);
            let (index_from, value_from) = (
                self.index.offset(&at[..self.axis]),
                self.value.offset(&at[..self.axis]),
            );
            // The indices whose parts are in the range are searched in groups.
            let own = wanted.start / inner..wanted.end.div_ceil(inner);
            // SAFETY: the indices of this outer index, which nothing writes meanwhile.
            let indices = is_row.then(|| unsafe {
                let first = self.index.element::<i32>(index_from);
                std::slice::from_raw_parts(first, self.values)
            });
            let group = |first: usize| first..(first + AT_ONCE).min(self.values);
            let groups = (0..self.values).step_by(AT_ONCE).map(group);
            let some = groups
                .filter(|group| indices.is_none_or(|all| any_of(&all[group.clone()], &own)))
                .flatten();
            for s in some {
                let index_at = index_from + s as isize * index_axis;
                let value_at = value_from + s as isize * self.value.strides[self.axis];
                if repeats {
                    let Some(place) = self.place(index(index_at), inner) else {
                        continue;
                    };
                    let (first, end) = (place.max(wanted.start), (place + inner).min(wanted.end));
                    if first >= end {
                        continue;
                    }
                    let to = &mut sums[here + first - wanted.start..here + end - wanted.start];
                    self.inner
                        .rows(first - place, end - first, |at, len, done| {
                            let first = value_at + along(value_inner, at);
                            for (k, sum) in to[done..done + len].iter_mut().enumerate() {
                                let along = if value_step == 1 {
                                    k as isize
                                } else {
                                    k as isize * value_step
                                };
                                *sum = join(*sum, value(first + along));
                            }
                        });
                } else {
                    self.inner.rows(0, inner, |at, len, done| {
                        let (index_at, value_at) = (
                            index_at + along(index_inner, at),
                            value_at + along(value_inner, at),
                        );
                        for k in 0..len {
                            let place = self
                                .place(index(index_at + k as isize * index_step), inner)
                                .map(|place| place + done + k);
                            if let Some(place) = place.filter(|place| wanted.contains(place)) {
                                let sum = &mut sums[here + place - wanted.start];
                                *sum = join(*sum, value(value_at + k as isize * value_step));
                            }
                        }
                    });
                }
            }
        }
    }

    /// Where the part of an index begins in `len × inner`, if it is in range.
    fn place(&self, index: i32, inner: usize) -> Option<usize> {
        usize::try_from(index)
            .ok()
            .filter(|&index| index < self.len)
            .map(|index| index * inner)
    }
}

/// Whether one of the indices is in a range.
fn any_of(indices: &[i32], range: &Range<usize>) -> bool {
    let Ok(first) = i32::try_from(range.start) else {
        return false;
    };
    let count = u32::try_from(range.len()).unwrap_or(u32::MAX);
    // Without a branch for each, so that the compiler compares vectors.
    let is_in = |&index: &i32| index.wrapping_sub(first).cast_unsigned() < count;
    indices.iter().fold(false, |any, index| any | is_in(index))
}
