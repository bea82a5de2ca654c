//! A tensor with a part of it replaced.
//!
//! First the tensor is copied, unless the result is its memory already, then the part is written.
//! In place, the work is that of the part alone.

use super::pointwise::{OperandView, Space, check_rank};
use super::{Config, Launch, SpecError};
use crate::dtype::DType;
use crate::size::Env;
use crate::spec::{Body, Spec};

/// Points that one worker copies at a time.
const CHUNK: usize = 1 << 14;

/// See [`Body::SliceAssign`].
pub(crate) struct SliceAssign;

impl SliceAssign {
    pub fn new(spec: &Spec, _bound: &Env, _config: &Config) -> Result<Self, SpecError> {
        check_rank(&spec.dims, 0)?;
        Ok(SliceAssign)
    }

    pub fn workspace(&self) -> u64 {
        0
    }

    /// # Safety
    /// The addresses must be as [`Launch`] promises, except that the base may be the result, with
    /// the same strides.
    pub unsafe fn run(&self, spec: &Spec, launch: &Launch) {
        let Body::SliceAssign(assign) = &spec.body else {
            unreachable!("checked by new")
        };
        // SAFETY: the caller's promise; the type has the elements' size.
        unsafe {
            match assign.result.dtype {
                DType::F32 | DType::I32 => self.write::<u32>(spec, launch),
                DType::F16 | DType::BF16 => self.write::<u16>(spec, launch),
                DType::U8 | DType::Bool => self.write::<u8>(spec, launch),
            }
        }
    }

    /// # Safety
    /// As for [`SliceAssign::run`], of elements of this size.
    unsafe fn write<T: Copy>(&self, spec: &Spec, launch: &Launch) {
        let Body::SliceAssign(assign) = &spec.body else {
            unreachable!("checked by new")
        };
        let (env, rank) = (launch.env, spec.dims.len());
        let mut args = launch.args.iter().copied();
        let mut next = || args.next().expect("one address per operand");
        let base = assign.base.as_ref().map(|base| (base, next()));
        let value = OperandView::new(&assign.value, next(), env);
        let place = assign
            .place
            .as_ref()
            .map(|(axis, at)| (*axis, OperandView::new(at, next(), env)));
        let to = next();
        let result = OperandView::new(&assign.result, to, env);
        let last = rank.saturating_sub(1);
        if let Some((base, from)) = base.filter(|(_, from)| *from != to) {
            let base = OperandView::new(base, from, env);
            let space = Space::new(&spec.dims, env);
            let points = space.points();
            launch.team.run(points.div_ceil(CHUNK), &|chunk, _| {
                let from = chunk * CHUNK;
                space.rows(from, CHUNK.min(points - from), |at, len, _| {
                    let (from, to) = (base.offset(&at[..rank]), result.offset(&at[..rank]));
                    let steps = [base.strides[last], result.strides[last]];
                    // SAFETY: a row of both, which overlap nothing else that is written.
                    unsafe { copy_row::<T>(&base, &result, [from, to], steps, len) };
                });
            });
        }
        let space = Space::new(&assign.space, env);
        // Where the first value lies, and the steps of the result along the axes of the values.
        let start: PerAxis = per_axis(rank, |a| assign.start[a].at(env) as isize);
        let step: PerAxis = per_axis(rank, |a| assign.step[a] as isize);
        let first: isize = (0..rank).map(|a| start[a] * result.strides[a]).sum();
        let strides: PerAxis = per_axis(rank, |a| step[a] * result.strides[a]);
        let offset = |at: &[usize]| -> isize {
            let inner = at.iter().zip(&strides);
            first + inner.map(|(&c, &s)| c as isize * s).sum::<isize>()
        };
        // Places along the axis that keep the whole part in it.
        let room = place.as_ref().map_or(0, |(axis, _)| {
            let span = (space.sizes()[*axis] as i64 - 1) * step[*axis] as i64;
            spec.dims[*axis].at(env) - 1 - span - start[*axis] as i64
        });
        if room < 0 {
            return;
        }
        let points = space.points();
        launch.team.run(points.div_ceil(CHUNK), &|chunk, _| {
            let from = chunk * CHUNK;
            space.rows(from, CHUNK.min(points - from), |at, len, _| {
                let at = &at[..rank];
                let from = value.offset(at);
                let shift = |along: isize| {
                    place.as_ref().map_or(0, |(axis, place)| {
                        let place_at = place.offset(at) + along * place.strides[last];
                        // SAFETY: a point of the values' space.
                        let place = i64::from(unsafe { place.load(place_at) } as i32);
                        place.clamp(0, room) as isize * result.strides[*axis]
                    })
                };
                let to = offset(at);
                let steps = [value.strides[last], strides.get(last).copied().unwrap_or(0)];
                let one_place = place.as_ref().is_none_or(|(_, p)| p.strides[last] == 0);
                // SAFETY: inside both by the rules of the spec and the limit of the place; no
                // other point has these elements of the result.
                unsafe {
                    if one_place {
                        copy_row::<T>(&value, &result, [from, to + shift(0)], steps, len);
                    } else {
                        for k in 0..len as isize {
                            let to = to + k * steps[1] + shift(k);
                            copy_row::<T>(&value, &result, [from + k * steps[0], to], steps, 1);
                        }
                    }
                }
            });
        });
    }
}

/// A number for each axis.
type PerAxis = smallvec::SmallVec<[isize; super::pointwise::MAX_RANK]>;

fn per_axis(rank: usize, of: impl Fn(usize) -> isize) -> PerAxis {
    (0..rank).map(of).collect()
}

/// Copies a row from one operand to another.
///
/// # Safety
/// The elements lie in the operands' memory, which does not overlap there, and nothing else
/// accesses those that are written.
unsafe fn copy_row<T: Copy>(
    source: &OperandView,
    result: &OperandView,
    [from, to]: [isize; 2],
    steps: [isize; 2],
    len: usize,
) {
    let (from, to) = (source.element::<T>(from), result.element::<T>(to));
    // SAFETY: the caller's promise.
    unsafe {
        if steps == [1, 1] {
            std::ptr::copy_nonoverlapping(from, to, len);
        } else {
            for k in 0..len as isize {
                *to.offset(k * steps[1]) = *from.offset(k * steps[0]);
            }
        }
    }
}
