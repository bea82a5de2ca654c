//! Elements copied from one tensor to another, cast where no value is lost.

use std::io;

use half::{bf16, f16};
use safetensors::tensor::Dtype;

use super::assembly::{Piece, strides};

/// Elements cast at a time.
const BLOCK: usize = 256;

/// The most bytes that are read at a time.
pub(super) const WINDOW: usize = 1 << 20;

/// The bytes of a tensor, read in ascending order.
pub(super) trait Bytes {
    /// The bytes from `at` on, `length` of them, counted from the tensor's first.
    ///
    /// # Errors
    /// The system's.
    fn read(&mut self, at: u64, length: usize) -> io::Result<&[u8]>;
}

impl Bytes for &[u8] {
    fn read(&mut self, at: u64, length: usize) -> io::Result<&[u8]> {
        let at = usize::try_from(at).map_err(io::Error::other)?;
        let end = at.checked_add(length);
        end.and_then(|end| self.get(at..end))
            .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

/// Why elements were not copied.
#[derive(Debug)]
pub(super) enum Fault {
    Read(io::Error),
    /// The target's type does not have this value, that of the source's element `at`.
    Value {
        at: u64,
        value: String,
    },
}

/// The kinds of numbers. Within a kind, types differ in range and digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Float,
    Integer,
    Bool,
}

fn kind(dtype: Dtype) -> Option<Kind> {
    Some(match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => Kind::Float,
        Dtype::I64
        | Dtype::I32
        | Dtype::I16
        | Dtype::I8
        | Dtype::U64
        | Dtype::U32
        | Dtype::U16
        | Dtype::U8 => Kind::Integer,
        Dtype::BOOL => Kind::Bool,
        _ => return None,
    })
}

/// Whether a type is cast to another: within a kind, and between kinds where a rule permits it.
pub(super) fn is_cast(from: Dtype, to: Dtype, permitted: bool) -> bool {
    match (kind(from), kind(to)) {
        (Some(from), Some(to)) => permitted || from == to,
        _ => false,
    }
}

/// Whether a value of one type may be missing in another, so that the values have to be looked at.
pub(super) fn may_fail(from: Dtype, to: Dtype) -> bool {
    let is_wider = matches!((from, to), (Dtype::F16 | Dtype::BF16, Dtype::F32));
    from == Dtype::BOOL || (from != to && !is_wider)
}

/// The bytes of one element.
pub(super) fn size(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// A number between two types, during a conversion.
#[derive(Clone, Copy)]
enum Number {
    Float(f64),
    Integer(i128),
}

/// Copies a box of elements from a tensor to a row-major one of the shape `shape`, or, without a
/// target, only looks at the values.
///
/// # Errors
/// The first element that the target's type does not have, or the system's error.
pub(super) fn copy(
    piece: &Piece,
    from: Dtype,
    to: Dtype,
    shape: &[u64],
    source: &mut dyn Bytes,
    mut target: Option<&mut [u8]>,
) -> Result<(), Fault> {
    if piece.lengths.contains(&0) {
        return Ok(());
    }
    let (wide, narrow) = (size(from) as u64, size(to));
    let plain = strides(shape);
    let first: u64 = plain.iter().zip(&piece.start).map(|(s, at)| s * at).sum();
    let mut axes: Vec<Axis> = (0..shape.len())
        .map(|axis| Axis {
            length: piece.lengths[axis],
            source: piece.strides[axis],
            target: plain[axis],
        })
        .collect();
    join_axes(&mut axes);
    let run = axes.pop().unwrap_or(Axis {
        length: 1,
        source: 1,
        target: 1,
    });
    let mut index = vec![0u64; axes.len()];
    loop {
        let (mut at, mut to_at) = (piece.at, first);
        for (axis, i) in axes.iter().zip(&index) {
            at += axis.source * i;
            to_at += axis.target * i;
        }
        // As many as are read at once.
        let most = (WINDOW as u64 / (run.source.max(1) * wide)).clamp(1, run.length);
        let mut done = 0;
        while done < run.length {
            let n = most.min(run.length - done);
            let begin = at + done * run.source;
            let length = ((n - 1) * run.source + 1) * wide;
            let bytes = source
                .read(begin * wide, length as usize)
                .map_err(Fault::Read)?;
            let strided = Strided {
                bytes,
                stride: run.source as usize,
                count: n as usize,
                first: begin,
            };
            let place = target.as_deref_mut().map(|target| {
                let start = (to_at + done * run.target) as usize * narrow;
                (
                    target.get_mut(start..).unwrap_or_default(),
                    run.target as usize,
                )
            });
            strided.cast(from, to, place)?;
            done += n;
        }
        // The next outer index.
        let mut axis = axes.len();
        loop {
            let Some(inner) = axis.checked_sub(1) else {
                return Ok(());
            };
            axis = inner;
            index[axis] += 1;
            if index[axis] < axes[axis].length {
                break;
            }
            index[axis] = 0;
        }
    }
}

/// An axis of a box: how many elements, and their distance on both sides.
#[derive(Clone, Copy)]
struct Axis {
    length: u64,
    source: u64,
    target: u64,
}

/// Sorts axes so that the source is read in ascending order, and joins those that are as one.
fn join_axes(axes: &mut Vec<Axis>) {
    axes.retain(|axis| axis.length != 1);
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.source));
    axes.dedup_by(|inner, outer| {
        let same = |outer: u64, step: u64| outer == inner.length * step;
        let joined = same(outer.source, inner.source) && same(outer.target, inner.target);
        if joined {
            *outer = Axis {
                length: outer.length * inner.length,
                ..*inner
            };
        }
        joined
    });
}

/// Elements of a source at equal distances.
struct Strided<'b> {
    bytes: &'b [u8],
    stride: usize,
    count: usize,
    /// The index of the first in its tensor.
    first: u64,
}

impl Strided<'_> {
    fn cast(
        &self,
        from: Dtype,
        to: Dtype,
        target: Option<(&mut [u8], usize)>,
    ) -> Result<(), Fault> {
        let (wide, narrow) = (size(from), size(to));
        let step = self.stride * wide;
        if !may_fail(from, to) {
            let Some((target, apart)) = target else {
                return Ok(());
            };
            let apart = apart * narrow;
            if from == to && self.stride == 1 && apart == narrow {
                let bytes = self.count * wide;
                target[..bytes].copy_from_slice(&self.bytes[..bytes]);
                return Ok(());
            }
            match (from, to) {
                (Dtype::BF16, Dtype::F32) => self.each(step, target, apart, |b: [u8; 2]| {
                    bf16::from_le_bytes(b).to_f32().to_le_bytes()
                }),
                (Dtype::F16, Dtype::F32) => self.each(step, target, apart, |b: [u8; 2]| {
                    f16::from_le_bytes(b).to_f32().to_le_bytes()
                }),
                _ => match wide {
                    1 => self.each(step, target, apart, |b: [u8; 1]| b),
                    2 => self.each(step, target, apart, |b: [u8; 2]| b),
                    4 => self.each(step, target, apart, |b: [u8; 4]| b),
                    _ => self.each(step, target, apart, |b: [u8; 8]| b),
                },
            }
            return Ok(());
        }
        // The usual narrowings are rounded at once.
        let place = |target: Option<_>| target.map(|(target, apart)| (target, apart * narrow));
        match (from, to) {
            (Dtype::F32, Dtype::F16) => {
                return self.narrow(from, place(target), |b: [u8; 4]| {
                    let (x, y) = (f32::from_le_bytes(b), f16::from_f32(f32::from_le_bytes(b)));
                    (y.is_finite() || !x.is_finite()).then(|| y.to_le_bytes())
                });
            }
            (Dtype::F32, Dtype::BF16) => {
                return self.narrow(from, place(target), |b: [u8; 4]| {
                    let (x, y) = (f32::from_le_bytes(b), bf16::from_f32(f32::from_le_bytes(b)));
                    (y.is_finite() || !x.is_finite()).then(|| y.to_le_bytes())
                });
            }
            (Dtype::F64, Dtype::F32) => {
                return self.narrow(from, place(target), |b: [u8; 8]| {
                    let (x, y) = (f64::from_le_bytes(b), f64::from_le_bytes(b) as f32);
                    (y.is_finite() || !x.is_finite()).then(|| y.to_le_bytes())
                });
            }
            _ => {}
        }
        let mut block = [Number::Float(0.0); BLOCK];
        let mut target = target;
        for start in (0..self.count).step_by(BLOCK) {
            let n = BLOCK.min(self.count - start);
            for (k, slot) in block[..n].iter_mut().enumerate() {
                *slot = decode(from, &self.bytes[(start + k) * step..]);
            }
            for (k, &number) in block[..n].iter().enumerate() {
                let Some(encoded) = encode(to, number).filter(|_| is_sound(from, number)) else {
                    return Err(self.fault(start + k, number));
                };
                if let Some((target, apart)) = &mut target {
                    let place = (start + k) * *apart * narrow;
                    target[place..place + narrow].copy_from_slice(&encoded[..narrow]);
                }
            }
        }
        Ok(())
    }

    /// The element at a place, which the target's type does not have.
    fn fault(&self, place: usize, number: Number) -> Fault {
        Fault::Value {
            at: self.first + (place * self.stride) as u64,
            value: match number {
                Number::Float(x) => format!("{x:?}"),
                Number::Integer(i) => i.to_string(),
            },
        }
    }

    /// Writes each element, turned by `turn`, at equal distances, or only looks at them; fails at
    /// the first that `turn` refuses.
    fn narrow<const A: usize, const B: usize>(
        &self,
        from: Dtype,
        mut target: Option<(&mut [u8], usize)>,
        turn: impl Fn([u8; A]) -> Option<[u8; B]>,
    ) -> Result<(), Fault> {
        let elements = self.bytes.chunks((self.stride * A).max(1));
        for (k, bytes) in elements.take(self.count).enumerate() {
            let Some(turned) = bytes.first_chunk().and_then(|element| turn(*element)) else {
                return Err(self.fault(k, decode(from, bytes)));
            };
            if let Some((target, apart)) = &mut target
                && let Some(place) = target.get_mut(k * *apart..)
                && let Some(place) = place.first_chunk_mut()
            {
                *place = turned;
            }
        }
        Ok(())
    }

    /// Writes each element, turned by `turn`, at equal distances.
    fn each<const A: usize, const B: usize>(
        &self,
        step: usize,
        target: &mut [u8],
        apart: usize,
        turn: impl Fn([u8; A]) -> [u8; B],
    ) {
        let places = target.chunks_mut(apart.max(1));
        for (from, to) in self.bytes.chunks(step.max(1)).zip(places).take(self.count) {
            if let (Some(element), Some(to)) = (from.first_chunk::<A>(), to.first_chunk_mut::<B>())
            {
                *to = turn(*element);
            }
        }
    }
}

/// Whether a bool is stored as 0 or 1.
fn is_sound(from: Dtype, number: Number) -> bool {
    from != Dtype::BOOL || matches!(number, Number::Integer(0 | 1))
}

/// The number that begins these bytes.
fn decode(dtype: Dtype, bytes: &[u8]) -> Number {
    fn take<const N: usize>(bytes: &[u8]) -> [u8; N] {
        bytes.first_chunk().copied().unwrap_or([0; N])
    }
    match dtype {
        Dtype::F64 => Number::Float(f64::from_le_bytes(take(bytes))),
        Dtype::F32 => Number::Float(f32::from_le_bytes(take(bytes)).into()),
        Dtype::F16 => Number::Float(f16::from_le_bytes(take(bytes)).to_f64()),
        Dtype::BF16 => Number::Float(bf16::from_le_bytes(take(bytes)).to_f64()),
        Dtype::I64 => Number::Integer(i64::from_le_bytes(take(bytes)).into()),
        Dtype::I32 => Number::Integer(i32::from_le_bytes(take(bytes)).into()),
        Dtype::I16 => Number::Integer(i16::from_le_bytes(take(bytes)).into()),
        Dtype::I8 => Number::Integer(i8::from_le_bytes(take(bytes)).into()),
        Dtype::U64 => Number::Integer(u64::from_le_bytes(take(bytes)).into()),
        Dtype::U32 => Number::Integer(u32::from_le_bytes(take(bytes)).into()),
        Dtype::U16 => Number::Integer(u16::from_le_bytes(take(bytes)).into()),
        _ => Number::Integer(take::<1>(bytes)[0].into()),
    }
}

/// A number as the first bytes of the result; `None` if the type does not have it. A float goes to
/// the nearest one of a narrower type, a tie to the even one, and is missing if that is infinite.
fn encode(dtype: Dtype, number: Number) -> Option<[u8; 8]> {
    fn first<const N: usize>(bytes: [u8; N]) -> [u8; 8] {
        let mut eight = [0; 8];
        eight[..N].copy_from_slice(&bytes);
        eight
    }
    let encoded = match (kind(dtype)?, number) {
        (Kind::Float, Number::Float(x)) => {
            let (encoded, finite) = match dtype {
                Dtype::F64 => (first(x.to_le_bytes()), true),
                Dtype::F32 => (first((x as f32).to_le_bytes()), (x as f32).is_finite()),
                Dtype::F16 => {
                    let y = f16::from_f32(odd(x));
                    (first(y.to_le_bytes()), y.is_finite())
                }
                _ => {
                    let y = bf16::from_f32(odd(x));
                    (first(y.to_le_bytes()), y.is_finite())
                }
            };
            return (finite || !x.is_finite()).then_some(encoded);
        }
        (Kind::Float, Number::Integer(i)) => {
            let encoded = encode(dtype, Number::Float(i as f64))?;
            let same = matches!(decode(dtype, &encoded), Number::Float(x) if x as i128 == i);
            return same.then_some(encoded);
        }
        (_, Number::Float(x)) if x.fract() == 0.0 && x.abs() < 2f64.powi(64) => x as i128,
        (_, Number::Float(_)) => return None,
        (_, Number::Integer(i)) => i,
    };
    Some(match dtype {
        Dtype::I64 => first(i64::try_from(encoded).ok()?.to_le_bytes()),
        Dtype::I32 => first(i32::try_from(encoded).ok()?.to_le_bytes()),
        Dtype::I16 => first(i16::try_from(encoded).ok()?.to_le_bytes()),
        Dtype::I8 => first(i8::try_from(encoded).ok()?.to_le_bytes()),
        Dtype::U64 => first(u64::try_from(encoded).ok()?.to_le_bytes()),
        Dtype::U32 => first(u32::try_from(encoded).ok()?.to_le_bytes()),
        Dtype::U16 => first(u16::try_from(encoded).ok()?.to_le_bytes()),
        Dtype::U8 => first(u8::try_from(encoded).ok()?.to_le_bytes()),
        _ => first([u8::try_from(encoded).ok().filter(|&bit| bit <= 1)?]),
    })
}

/// The f32 at a number, or the odd one of its two neighbours: rounding it to a half gives the half
/// that is nearest to the number itself (Boldo and Melquiond 2005).
fn odd(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) == x || x.is_nan() {
        return near;
    }
    let below = near.to_bits() - u32::from(f64::from(near).abs() > x.abs());
    f32::from_bits(below | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_the_nearest_to_the_number_itself() {
        // Between two halves, and a little more: by way of a float it would be a tie.
        let above = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(f16::from_f32(above as f32), f16::ONE);
        let half = |x| match encode(Dtype::F16, Number::Float(x)) {
            Some(bytes) => decode(Dtype::F16, &bytes),
            None => Number::Integer(0),
        };
        assert!(matches!(half(above), Number::Float(x) if x == 1.0 + 2f64.powi(-10)));
        assert!(matches!(half(-above), Number::Float(x) if x == -1.0 - 2f64.powi(-10)));
        assert!(
            matches!(half(1.0 + 2f64.powi(-11)), Number::Float(1.0)),
            "a tie is even"
        );
        assert!(matches!(half(f64::INFINITY), Number::Float(f64::INFINITY)));
        assert!(matches!(half(f64::NAN), Number::Float(x) if x.is_nan()));
        assert!(
            matches!(half(1e300), Number::Integer(0)),
            "it would be infinite"
        );
        assert!(
            matches!(half(65520.0), Number::Integer(0)),
            "it would be infinite"
        );
        assert!(matches!(half(65519.0), Number::Float(65504.0)));
        assert!(matches!(half(1e-300), Number::Float(0.0)));
    }

    #[test]
    fn casts_between_kinds_keep_the_value() {
        let whole = |dtype, number| encode(dtype, number).map(|bytes| decode(dtype, &bytes));
        let integer = |i| Number::Integer(i);
        assert!(
            matches!(whole(Dtype::F32, integer(1 << 24)), Some(Number::Float(x)) if x == 16_777_216.0)
        );
        assert!(whole(Dtype::F32, integer((1 << 24) + 1)).is_none());
        assert!(whole(Dtype::F16, integer(2049)).is_none());
        assert!(matches!(
            whole(Dtype::I32, Number::Float(-3.0)),
            Some(Number::Integer(-3))
        ));
        assert!(whole(Dtype::I32, Number::Float(0.5)).is_none());
        assert!(whole(Dtype::I32, Number::Float(f64::NAN)).is_none());
        assert!(whole(Dtype::I32, Number::Float(2f64.powi(31))).is_none());
        assert!(whole(Dtype::I32, integer(1 << 31)).is_none());
        assert!(whole(Dtype::U8, integer(-1)).is_none());
        assert!(whole(Dtype::BOOL, integer(2)).is_none());
        assert!(matches!(
            whole(Dtype::BOOL, Number::Float(1.0)),
            Some(Number::Integer(1))
        ));
    }
}
