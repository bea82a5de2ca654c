//! Operators of signals: Fourier transforms as products, windows and filter banks as constants.

use std::f64::consts::TAU;

use slabwise::Tensor;

use super::Run;
use crate::array::{Array, Data, round};
use crate::call::{Call, Results, resolve};
use crate::element::Element;
use crate::value::Value;

/// Most elements of the matrix of a transform, of a window or a filter bank.
const MOST: usize = 1 << 24;

pub const OPERATORS: &[(&str, Run)] = &[
    ("BlackmanWindow", |c| {
        window(c, |turn| {
            0.42 - 0.5 * turn.cos() + 0.08 * (2.0 * turn).cos()
        })
    }),
    ("DFT", dft),
    ("HammingWindow", |c| {
        window(c, |turn| 25.0 / 46.0 - 21.0 / 46.0 * turn.cos())
    }),
    ("HannWindow", |c| window(c, |turn| 0.5 - 0.5 * turn.cos())),
    ("MelWeightMatrix", mel),
    ("STFT", stft),
];

/// A constant of the type in `output_datatype`.
fn constant<'t>(call: &Call<'_, 't>, shape: Vec<usize>, values: Vec<f64>) -> Results<'t> {
    let number = i32::try_from(call.int("output_datatype", 1)).unwrap_or(0);
    let element = Element::of(number)?;
    let whole = Array {
        element: Element::F64,
        shape,
        data: Data::Float(values),
    };
    Ok(vec![Value::constant(whole.cast(element))])
}

/// A length that is known and fits.
fn size(call: &Call<'_, '_>, at: usize) -> Result<Option<usize>, String> {
    let Some(n) = call.number(at)? else {
        return Ok(None);
    };
    match n >= 0.0 && n <= MOST as f64 {
        true => Ok(Some(n as usize)),
        false => Err(format!(
            "input {at} is {n}, and must be a length up to {MOST}"
        )),
    }
}

/// A window that is a function of its angle in 0..2π.
fn window<'t>(call: &Call<'_, 't>, of: impl Fn(f64) -> f64) -> Results<'t> {
    let n = size(call, 0)?.ok_or("its size is missing")?;
    let period = match call.int("periodic", 1) {
        0 => n.saturating_sub(1),
        _ => n,
    };
    let values = (0..n).map(|i| of(TAU * i as f64 / period.max(1) as f64));
    constant(call, vec![n], values.collect())
}

/// The cosine and sine of 2π·j·k/n, exact at the quarters of a turn.
fn turn(j: usize, k: usize, n: usize) -> (f64, f64) {
    let step = j * k % n;
    match 4 * step {
        0 => (1.0, 0.0),
        quarter if quarter == n => (0.0, 1.0),
        quarter if quarter == 2 * n => (-1.0, 0.0),
        quarter if quarter == 3 * n => (0.0, -1.0),
        _ => {
            let angle = TAU * step as f64 / n as f64;
            (angle.cos(), angle.sin())
        }
    }
}

/// What a transform computes.
struct Transform {
    /// Its length: inputs beyond it are dropped, missing ones are 0.
    n: usize,
    inverse: bool,
    /// Only the frequencies 0 to n/2, of which the others are the conjugates.
    onesided: bool,
}

impl Transform {
    /// The transform along the last axis of real and imaginary parts; `None` is 0.
    fn of<'t>(
        &self,
        call: &Call<'_, 't>,
        real: Tensor<'t>,
        imaginary: Option<Tensor<'t>>,
    ) -> Result<(Tensor<'t>, Option<Tensor<'t>>), String> {
        let last = real.rank().saturating_sub(1);
        let half = self.n / 2 + 1;
        let real_result = self.inverse && self.onesided;
        let given = real.len(last).ok_or("the transformed axis is not fixed")?;
        let used = given.min(if real_result { half } else { self.n });
        let made = match self.onesided && !self.inverse {
            true => half,
            false => self.n,
        };
        if used * made > MOST {
            return Err(format!(
                "a transform of {used} elements to {made} as a product"
            ));
        }
        let matrix = |f: &dyn Fn(usize, usize) -> f64| -> Result<Tensor<'t>, String> {
            let places = (0..used).flat_map(|j| (0..made).map(move |k| (j, k)));
            let values = places.map(|(j, k)| round(f(j, k), Element::F32)).collect();
            let array = Array {
                element: Element::F32,
                shape: vec![used, made],
                data: Data::Float(values),
            };
            Ok(call.trace.constant(&array.to_host()?))
        };
        let n = self.n;
        // A one-sided spectrum stands for its conjugates too.
        let factor = |j: usize| match (self.inverse, real_result) {
            (false, _) => 1.0,
            (true, true) if j != 0 && 2 * j != n => 2.0 / n as f64,
            (true, _) => 1.0 / n as f64,
        };
        let cosine = matrix(&|j, k| factor(j) * turn(j, k, n).0)?;
        let sign = if self.inverse { 1.0 } else { -1.0 };
        let sine = matrix(&|j, k| sign * factor(j) * turn(j, k, n).1)?;
        let part = |x: Tensor<'t>| x.slice(last, 0..used);
        let real = part(real);
        let Some(imaginary) = imaginary.map(part) else {
            let imaginary = (!real_result).then(|| real.matmul(sine));
            return Ok((real.matmul(cosine), imaginary));
        };
        let first = real.matmul(cosine) - imaginary.matmul(sine);
        let second = (!real_result).then(|| real.matmul(sine) + imaginary.matmul(cosine));
        Ok((first, second))
    }
}

/// The real and, of complex numbers, the imaginary parts: the last axis.
fn parts<'t>(x: Tensor<'t>) -> Result<(Tensor<'t>, Option<Tensor<'t>>), String> {
    let last = x.rank().checked_sub(1).ok_or("a signal without axes")?;
    let part = |i: usize| x.slice(last, i..i + 1).squeeze(last);
    match x.len(last) {
        Some(1) => Ok((part(0), None)),
        Some(2) => Ok((part(0), Some(part(1)))),
        _ => Err("its last axis is of neither one nor two elements".into()),
    }
}

/// Parts as a last axis of numbers.
fn joined<'t>(
    call: &Call<'_, 't>,
    (real, imaginary): (Tensor<'t>, Option<Tensor<'t>>),
) -> Tensor<'t> {
    match imaginary {
        Some(imaginary) => call.trace.stack(&[real, imaginary], real.rank()),
        None => real.unsqueeze(real.rank()),
    }
}

fn dft<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let x = call.float(0)?;
    let axis = match call.opset >= 20 {
        true => call.number(2)?.map_or(-2, |axis| axis as i64),
        false => call.int("axis", 1),
    };
    let axis = resolve(axis, x.rank())?;
    if axis + 1 == x.rank() {
        return Err("the transformed axis is that of the parts of a number".into());
    }
    let given = x.len(axis).ok_or("the transformed axis is not fixed")?;
    let (inverse, onesided) = (call.flag("inverse"), call.flag("onesided"));
    let n = match size(call, 1)? {
        Some(n) => n,
        None if inverse && onesided => 2 * given.saturating_sub(1),
        None => given,
    };
    if n == 0 {
        return Err("a transform of length 0".into());
    }
    let (real, imaginary) = parts(x)?;
    let last = real.rank().saturating_sub(1);
    let swapped = |x: Tensor<'t>| {
        if axis == last {
            x
        } else {
            x.transpose(axis, last)
        }
    };
    let transform = Transform {
        n,
        inverse,
        onesided,
    };
    let (real, imaginary) = transform.of(call, swapped(real), imaginary.map(swapped))?;
    call.same(joined(call, (swapped(real), imaginary.map(swapped))))
}

fn stft<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let mut x = call.float(0)?;
    if x.rank() == 2 {
        x = x.unsqueeze(2);
    }
    if x.rank() != 3 {
        return Err(format!("a signal of {} axes", x.rank()));
    }
    let step = size(call, 1)?
        .filter(|&n| n > 0)
        .ok_or("its step is not positive")?;
    let window = call.optional_float(2)?;
    let of_window = window.map(|w| w.len(0).ok_or("its window is not fixed"));
    let length = match (size(call, 3)?, of_window) {
        (Some(n), _) => n,
        (None, Some(n)) => n?,
        (None, None) => return Err("neither window nor frame_length are given".into()),
    };
    let n = x.len(1).ok_or("its signal is not fixed")?;
    if length == 0 || length > n {
        return Err(format!("frames of {length} elements of a signal of {n}"));
    }
    let frames = 1 + (n - length) / step;
    if frames.checked_mul(length).is_none_or(|n| n > MOST) {
        return Err(format!(
            "{frames} frames of {length} elements; up to {MOST} elements can be expressed"
        ));
    }
    let (real, imaginary) = parts(x)?;
    let batch = real.len(0).ok_or("its batch is not fixed")?;
    let places: Vec<i32> = (0..frames)
        .flat_map(|frame| (0..length).map(move |i| (frame * step + i) as i32))
        .collect();
    let places = call.trace.constant(&places);
    let framed = |x: Tensor<'t>| {
        let x = x.index_select(1, places).reshape([batch, frames, length]);
        window.map_or(x, |w| x * w)
    };
    let transform = Transform {
        n: length,
        inverse: false,
        onesided: call.int("onesided", 1) != 0,
    };
    let both = transform.of(call, framed(real), imaginary.map(framed))?;
    call.same(joined(call, both))
}

/// Triangles at equal steps of the mel scale, 2595·log₁₀(1 + f/700).
fn mel<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let number = |at: usize| {
        call.number(at)?
            .ok_or_else(|| format!("input {at} is missing"))
    };
    let bins = size(call, 0)?.ok_or("its number of bins is missing")?;
    let length = size(call, 1)?.ok_or("its length is missing")?;
    let (rate, low, high) = (number(2)?, number(3)?, number(4)?);
    let rows = length / 2 + 1;
    if rows.saturating_mul(bins) > MOST {
        return Err(format!("a matrix of {rows} × {bins} elements"));
    }
    let to_mel = |f: f64| 2595.0 * (f / 700.0).ln_1p() / 10f64.ln();
    let to_hertz = |m: f64| 700.0 * (m / 2595.0 * 10f64.ln()).exp_m1();
    let step = (to_mel(high) - to_mel(low)) / (bins + 2) as f64;
    let place =
        |i: usize| ((length + 1) as f64 * to_hertz(i as f64 * step + to_mel(low)) / rate).floor();
    let places: Vec<f64> = (0..bins + 2).map(place).collect();
    // (A NaN is outside, too.)
    let inside = |p: &f64| *p >= 0.0 && *p < rows as f64;
    if let Some(outside) = places.iter().find(|p| !inside(p)) {
        return Err(format!("an edge lies at row {outside} of {rows}"));
    }
    let mut values = vec![0.0; rows * bins];
    for (bin, edges) in places.windows(3).enumerate() {
        let [left, center, right] = [edges[0], edges[1], edges[2]].map(|p| p as usize);
        if left == center {
            values[center * bins + bin] = 1.0;
        }
        for row in left..=center {
            if left < center {
                values[row * bins + bin] = (row - left) as f64 / (center - left) as f64;
            }
        }
        for row in center..right {
            values[row * bins + bin] = (right - row) as f64 / (right - center) as f64;
        }
    }
    constant(call, vec![rows, bins], values)
}
