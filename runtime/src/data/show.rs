//! Arrays as text, as NumPy and PyTorch print them.

use std::fmt;

use slabwise_kernels::dtype::DType;

use super::{HostArray, with_array};

/// Arrays with more elements are summarised.
const WHOLE_MAX: usize = 1000;
/// The elements shown at each end of an axis that is summarised.
const EDGE: usize = 3;
/// Columns of a line.
const COLUMNS: usize = 80;

/// A number in five significant digits, without trailing zeros.
pub(crate) fn short(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let size = value.abs();
    if !(1e-4..1e6).contains(&size) {
        let text = format!("{value:.4e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{exponent}", without_zeros(digits));
    }
    if value.fract() == 0.0 {
        return format!("{value}");
    }
    let decimals = (4 - size.log10().floor() as i32).max(0) as usize;
    without_zeros(&format!("{value:.decimals$}")).to_owned()
}

fn without_zeros(digits: &str) -> &str {
    match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.'),
        false => digits,
    }
}

/// How the numbers of an array are written, chosen for all that are shown.
#[derive(Clone, Copy)]
enum Style {
    /// With so many decimals.
    Fixed(usize),
    /// With an exponent, and so many decimals before it.
    Exponent(usize),
    Truth,
}

impl Style {
    /// As PyTorch chooses it: four decimals at most, none where all numbers are whole, an exponent
    /// where numbers are very large, very small or too far apart.
    fn of(dtype: DType, shown: &[f64]) -> Style {
        if dtype == DType::Bool {
            return Style::Truth;
        }
        if !dtype.is_float() {
            return Style::Fixed(0);
        }
        let sizes = || {
            shown
                .iter()
                .map(|v| v.abs())
                .filter(|v| *v > 0.0 && v.is_finite())
        };
        let (least, most) = (
            sizes().fold(f64::INFINITY, f64::min),
            sizes().fold(0.0, f64::max),
        );
        if sizes().all(|size| size.fract() == 0.0) {
            return if most < 1e8 {
                Style::Fixed(0)
            } else {
                Style::Exponent(4)
            };
        }
        if most >= 1e8 || least < 1e-4 || most / least > 1e3 && least < 1e-3 {
            return Style::Exponent(4);
        }
        let exact = |decimals: &usize| {
            let unit = 10f64.powi(*decimals as i32);
            shown
                .iter()
                .filter(|v| v.is_finite())
                .all(|v| (v * unit - (v * unit).round()).abs() <= 1e-6 * unit.min(10.0) * v.abs())
        };
        Style::Fixed((1..4).find(exact).unwrap_or(4))
    }

    fn write(self, value: f64) -> String {
        match self {
            Style::Truth => (value != 0.0).to_string(),
            _ if value.is_nan() => "NaN".into(),
            _ if value.is_infinite() => format!("{value}"),
            // Whole numbers of floats end in a point, as in NumPy.
            Style::Fixed(decimals) => format!("{value:.decimals$}"),
            Style::Exponent(decimals) => format!("{value:.decimals$e}"),
        }
    }
}

/// The text of an array of which `at` gives the elements, in row-major order.
pub(crate) fn format(
    f: &mut fmt::Formatter<'_>,
    dtype: DType,
    shape: &[usize],
    at: impl Fn(usize) -> f64,
) -> fmt::Result {
    let count: usize = shape.iter().product();
    if count > 0 {
        let text = Text::new(dtype, shape, &at);
        let mut lines = String::new();
        text.write(&mut lines, 0, 0);
        f.write_str(&lines)?;
    } else {
        f.write_str("[]")?;
    }
    write!(f, " {dtype} {shape:?}")
}

/// An array that is being written.
struct Text<'a> {
    shape: &'a [usize],
    strides: Vec<usize>,
    summarised: bool,
    style: Style,
    /// Columns of an element.
    width: usize,
    is_float: bool,
    at: &'a dyn Fn(usize) -> f64,
}

impl<'a> Text<'a> {
    fn new(dtype: DType, shape: &'a [usize], at: &'a dyn Fn(usize) -> f64) -> Self {
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        let count: usize = shape.iter().product();
        let mut text = Text {
            shape,
            strides,
            summarised: count > WHOLE_MAX,
            style: Style::Fixed(0),
            width: 0,
            is_float: dtype.is_float(),
            at,
        };
        let mut shown = Vec::new();
        text.visit(0, 0, &mut shown);
        text.style = Style::of(dtype, &shown);
        text.width = shown
            .iter()
            .map(|&value| text.element(value).len())
            .max()
            .unwrap_or(0);
        text
    }

    fn element(&self, value: f64) -> String {
        let text = self.style.write(value);
        match (self.style, self.is_float && value.is_finite()) {
            (Style::Fixed(0), true) => text + ".",
            _ => text,
        }
    }

    /// The positions along an axis that are shown; `None` for the gap.
    fn positions(&self, axis: usize) -> Vec<Option<usize>> {
        let length = self.shape[axis];
        if !self.summarised || length <= 2 * EDGE {
            return (0..length).map(Some).collect();
        }
        let ends = |range: std::ops::Range<usize>| range.map(Some);
        ends(0..EDGE)
            .chain([None])
            .chain(ends(length - EDGE..length))
            .collect()
    }

    /// Collects the elements that are shown.
    fn visit(&self, axis: usize, offset: usize, shown: &mut Vec<f64>) {
        if axis == self.shape.len() {
            return shown.push((self.at)(offset));
        }
        for position in self.positions(axis).into_iter().flatten() {
            self.visit(axis + 1, offset + position * self.strides[axis], shown);
        }
    }

    fn write(&self, out: &mut String, axis: usize, offset: usize) {
        if axis == self.shape.len() {
            *out += &self.element((self.at)(offset));
            return;
        }
        out.push('[');
        let innermost = axis + 1 == self.shape.len();
        let indent = " ".repeat(axis + 1);
        let per_line = (COLUMNS.saturating_sub(axis + 1) / (self.width + 2)).max(1);
        for (k, position) in self.positions(axis).into_iter().enumerate() {
            match (k, innermost) {
                (0, _) => {}
                (_, true) if k % per_line != 0 => *out += ", ",
                // One more blank line for every axis above the last two, as in NumPy.
                (_, false) => {
                    out.push(',');
                    out.extend(std::iter::repeat_n('\n', self.shape.len() - axis - 1));
                    *out += &indent;
                }
                (_, true) => {
                    *out += ",\n";
                    *out += &indent;
                }
            }
            match position {
                None => *out += "...",
                Some(at) if innermost => {
                    let text = self.element((self.at)(offset + at));
                    *out += &format!("{text:>width$}", width = self.width);
                }
                Some(at) => self.write(out, axis + 1, offset + at * self.strides[axis]),
            }
        }
        out.push(']');
    }
}

impl fmt::Display for HostArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dtype, shape) = (self.dtype(), self.shape());
        with_array!(self, array => {
            let array = array.as_standard_layout();
            let elements = array.as_slice().unwrap_or_default();
            format(f, dtype, shape, |at| f64::from(elements[at]))
        })
    }
}
