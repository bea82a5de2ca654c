//! Types and bounds of the results of elementwise statements.

use slabwise::{DType, Scatter};

use crate::case::{Binary, Op, Run, Unary};
use crate::facts::{Fact, lane};

/// Whether the result is discontinuous in an operand.
pub fn jumps(op: &Op) -> bool {
    let rounds = |u: &Unary| {
        matches!(u, Unary::Floor | Unary::Ceil | Unary::Round | Unary::Sign)
            || matches!(u, Unary::Trunc | Unary::Fract | Unary::IsNan)
            || matches!(u, Unary::IsInfinite | Unary::IsFinite)
    };
    match op {
        Op::Unary(u) => rounds(u),
        Op::Checkpoint(list) => list.iter().any(rounds),
        Op::Binary(b) | Op::Number(b, _) => compares(*b) || divides(*b),
        Op::Cast(to) => *to != DType::F32,
        Op::TopK { positions, .. } => *positions,
        Op::Method(method) => method.jumps(),
        Op::Run { run, .. } => *run == Run::ArgMax,
        Op::Argsort(_) | Op::Unique | Op::Nonzero | Op::Nms(_) => true,
        Op::Fold { fold, .. } => {
            matches!(fold, crate::case::Fold::ArgMax | crate::case::Fold::ArgMin)
        }
        _ => false,
    }
}

/// Whether its gradient is discontinuous where its value is continuous.
pub fn has_kinks(op: &Op) -> bool {
    let kink = |u: &Unary| bends(*u);
    match op {
        Op::Unary(u) => kink(u),
        Op::Checkpoint(list) => list.iter().any(kink),
        Op::Binary(b) | Op::Number(b, _) => matches!(b, Binary::Minimum | Binary::Maximum),
        Op::Clamp(..) | Op::Huber(_) | Op::Sort(_) | Op::TopK { .. } => true,
        Op::Run { run, .. } => matches!(run, Run::Max | Run::Min),
        Op::Scatter(_, how) => matches!(how, Scatter::Max | Scatter::Min),
        _ => false,
    }
}

fn bends(op: Unary) -> bool {
    use Unary as U;
    matches!(
        op,
        U::Abs | U::Relu | U::LeakyRelu | U::Elu | U::Selu | U::Softshrink
    ) || matches!(op, U::Hardsigmoid | U::Hardswish | U::Hardtanh)
}

/// Whether it is a remainder or a quotient that is an integer.
fn divides(op: Binary) -> bool {
    matches!(op, Binary::Fmod | Binary::Remainder | Binary::DivFloor)
}

fn compares(op: Binary) -> bool {
    matches!(
        op,
        Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge | Binary::Equal | Binary::NotEqual
    )
}

/// A constant; one that is infinite, tiny or huge counts as a number near 1, as such elements of
/// inputs do.
pub fn known(number: f32) -> f64 {
    match number.abs() {
        1e-6..=1e6 | 0.0 => f64::from(number),
        _ => 1.0,
    }
}

/// The facts of a statement with one operand.
pub fn of_one(op: &Op, x: &Fact) -> Option<Fact> {
    let mut fact = match op {
        Op::Unary(u) => unary(*u, x)?,
        Op::Checkpoint(list) => list.iter().try_fold(x.clone(), |x, u| unary(*u, &x))?,
        Op::Number(op, number) => {
            let number = known(*number);
            let whole = number.fract() == 0.0 && number.abs() < 1e6;
            let holds = match x.lane() {
                DType::F32 => true,
                DType::Bool => number == 0.0 || number == 1.0,
                _ => whole,
            };
            let right = Fact::new(x.lane(), Vec::new())
                .within(number, number)
                .exact(true);
            holds.then(|| of_two(*op, x, &right))??
        }
        Op::Clamp(low, high) => {
            let (low, high) = (f64::from(*low), f64::from(*high));
            let ok = low <= high
                && (x.lane() == DType::F32
                    || (x.lane() == DType::I32 && low.fract() == 0.0 && high.fract() == 0.0));
            ok.then(|| {
                Fact {
                    dtype: x.lane(),
                    ..x.clone()
                }
                .within(x.low.clamp(low, high), x.high.clamp(low, high))
            })?
        }
        Op::Cast(to) => cast(*to, x),
        _ => return None,
    };
    if has_kinks(op) && !x.exact {
        fact.smooth = false;
    }
    Some(fact)
}

fn cast(to: DType, x: &Fact) -> Fact {
    let fact = Fact {
        dtype: to,
        ..x.clone()
    };
    match to {
        DType::F32 | DType::F16 | DType::BF16 => {
            let rounds = to != DType::F32 && (x.bound() > 256.0 || x.dtype.is_float());
            // Rounding an exact number is exact; its bounds widen a little.
            if rounds {
                fact.within(x.low - x.bound() * 0.01, x.high + x.bound() * 0.01)
            } else {
                fact
            }
        }
        DType::I32 => fact.within(x.low.trunc().min(0.0), x.high.trunc().max(0.0)),
        DType::U8 => fact.within(
            x.low.trunc().clamp(0.0, 255.0),
            x.high.trunc().clamp(0.0, 255.0),
        ),
        DType::Bool => fact.within(0.0, 1.0),
    }
}

fn unary(op: Unary, x: &Fact) -> Option<Fact> {
    use Unary as U;
    let (low, high, lane) = (x.low, x.high, x.lane());
    let numeric = matches!(op, U::Neg | U::Abs | U::Sign | U::Square);
    let takes = match lane {
        DType::F32 => !matches!(op, U::Not | U::BitNot),
        DType::I32 => numeric || op == U::BitNot,
        _ => op == U::Not,
    };
    // Outside of these ranges a function is not defined, or steep.
    let inside = match op {
        U::Asin | U::Acos | U::Atanh | U::Erfinv => x.bound() <= 0.75,
        U::Acosh => low >= 1.25,
        U::Logit => low >= 0.125 && high <= 0.875,
        U::Tan => x.bound() <= 1.25,
        U::Log2 | U::Log10 | U::Lgamma | U::Digamma => low >= 0.5,
        _ => true,
    };
    inside.then_some(())?;
    let (most, least) = (x.bound(), if low > 0.0 { low } else { 0.0 });
    let (low, high) = match op {
        U::Neg => (-high, -low),
        U::Abs => (least, most),
        U::Sign | U::Tanh | U::Erf | U::Sin | U::Cos => (-1.0, 1.0),
        U::Exp => (0.0, high.exp()),
        U::Exp2 => (0.0, high.exp2()),
        U::Expm1 => (-1.0, high.exp_m1()),
        U::Ln => (low.ln(), high.ln()),
        U::Log1p => (low.ln_1p(), high.ln_1p()),
        U::Sqrt => (0.0, high.sqrt()),
        U::Rsqrt => (0.0, 1.0 / low.sqrt()),
        U::Recip => (1.0 / high, 1.0 / low),
        U::Sigmoid | U::Not => (0.0, 1.0),
        U::Relu => (0.0, high.max(0.0)),
        U::Square => (0.0, most * most),
        U::Gelu | U::GeluTanh | U::Silu => (-1.0, high.max(0.0)),
        U::Softplus => (0.0, high.max(0.0) + 1.0),
        U::Detach => (low, high),
        U::Floor | U::Ceil | U::Round | U::Trunc => (low.floor(), high.ceil()),
        U::Log2 => (low.log2(), high.log2()),
        U::Log10 => (low.log10(), high.log10()),
        U::Lgamma => (-0.2, high * high + 1.0),
        U::Digamma => (-2.0, high + 1.0),
        U::Tan => (-most.tan(), most.tan()),
        U::Sinh => (-most.sinh(), most.sinh()),
        U::Cosh => (1.0, most.cosh()),
        U::Atan | U::Asin | U::Fract | U::Softsign => (-1.6, 1.6),
        U::Acos => (0.0, 3.2),
        U::Asinh => (-most.asinh(), most.asinh()),
        U::Acosh => (0.0, high.acosh()),
        U::Atanh | U::Erfinv | U::Logit => (-2.0, 2.0),
        U::IsNan | U::IsInfinite | U::IsFinite | U::Hardsigmoid => (0.0, 1.0),
        U::BitNot => (-1.0 - high, -1.0 - low),
        U::LeakyRelu | U::Softshrink => (low, high.max(0.0)),
        U::Elu | U::Selu => (-2.0, 1.1 * high.max(0.0)),
        U::Hardswish | U::Mish | U::QuickGelu => (-1.0, high.max(0.0)),
        U::Hardtanh => (-1.0, 1.0),
        U::LogSigmoid => (low.min(0.0) - 1.0, 0.0),
    };
    let tests = matches!(op, U::IsNan | U::IsInfinite | U::IsFinite);
    let jumps = matches!(op, U::Floor | U::Ceil | U::Round | U::Sign);
    let jumps = jumps || tests || matches!(op, U::Trunc | U::Fract);
    let keeps = matches!(
        op,
        U::Neg | U::Abs | U::Relu | U::Detach | U::Not | U::Hardtanh
    );
    let exact = x.exact && (lane != DType::F32 || jumps || keeps);
    let smooth = x.smooth && (x.exact || !bends(op));
    let fact = Fact {
        dtype: if tests { DType::Bool } else { lane },
        smooth,
        ..x.clone()
    };
    takes.then(|| fact.within(low, high).exact(exact))
}

/// The facts of a statement with two operands, in the shape of the first.
pub fn of_two(op: Binary, x: &Fact, y: &Fact) -> Option<Fact> {
    use Binary as B;
    let both = lane(x.dtype);
    let logic = matches!(op, B::And | B::Or | B::Xor);
    let bits = matches!(
        op,
        B::BitAnd | B::BitOr | B::BitXor | B::ShiftLeft | B::ShiftRight
    );
    let of_floats = matches!(op, B::Pow | B::Atan2 | B::Hypot | B::LogAddExp);
    let takes = both == y.lane()
        && match both {
            DType::F32 => !logic && !bits,
            DType::I32 => !logic && !of_floats,
            _ => logic || compares(op),
        };
    let both_exact = x.exact && y.exact;
    let inside = match op {
        // The angle jumps where the sign of a zero or of a small number decides.
        B::Atan2 => both_exact || y.low > 0.0,
        B::Fmod | B::Remainder | B::DivFloor => both == DType::I32 || (both_exact && y.low >= 0.5),
        _ => true,
    };
    inside.then_some(())?;
    let products = [
        x.low * y.low,
        x.low * y.high,
        x.high * y.low,
        x.high * y.high,
    ];
    let (low, high) = match op {
        B::Add => (x.low + y.low, x.high + y.high),
        B::Sub => (x.low - y.high, x.high - y.low),
        B::Mul => (
            products.iter().copied().fold(f64::INFINITY, f64::min),
            products.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        ),
        B::Div if both == DType::F32 => {
            let bound = x.bound() / y.low.abs().min(y.high.abs());
            (-bound, bound)
        }
        B::Div => (-x.bound(), x.bound()),
        B::Pow => {
            let bound = x.high.max(1.0 / x.low).powf(y.bound());
            (0.0, bound)
        }
        B::Atan2 => (-3.2, 3.2),
        B::Fmod | B::Remainder => (-x.bound() - y.bound(), x.bound() + y.bound()),
        B::DivFloor if both == DType::F32 => (-x.bound() / y.low - 1.0, x.bound() / y.low + 1.0),
        B::DivFloor => (-x.bound() - 1.0, x.bound() + 1.0),
        B::BitAnd | B::BitOr | B::BitXor => {
            let least = if x.low >= 0.0 && y.low >= 0.0 {
                0.0
            } else {
                -2.0
            };
            let most = x.bound().max(y.bound()).max(1.0);
            (least * most, 2.0 * most)
        }
        B::ShiftLeft | B::ShiftRight => {
            let places = if op == B::ShiftLeft {
                y.high.clamp(0.0, 31.0)
            } else {
                0.0
            };
            let most = (x.bound() + 1.0) * places.exp2();
            (if x.low < 0.0 { -most } else { 0.0 }, most)
        }
        B::Hypot => (0.0, x.bound() + y.bound()),
        B::LogAddExp => (x.low.max(y.low), x.high.max(y.high) + 1.0),
        B::Minimum => (x.low.min(y.low), x.high.min(y.high)),
        B::Maximum => (x.low.max(y.low), x.high.max(y.high)),
        _ => (0.0, 1.0),
    };
    let dtype = if compares(op) { DType::Bool } else { both };
    let exact = x.exact
        && y.exact
        && (both != DType::F32
            || compares(op)
            || matches!(op, B::Minimum | B::Maximum | B::Fmod | B::Remainder));
    let kink = matches!(op, B::Minimum | B::Maximum) && !both_exact;
    // Slopes are steep near the origin, or jump.
    let steep = matches!(op, B::Atan2 | B::Hypot) && y.low < 0.25;
    let kink = kink || steep || (divides(op) && both == DType::F32);
    let fact = Fact {
        dtype,
        smooth: x.smooth && y.smooth && !kink,
        ..x.clone()
    };
    takes.then(|| fact.within(low, high).exact(exact))
}
