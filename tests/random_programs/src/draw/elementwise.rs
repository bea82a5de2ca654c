//! Steps that draw elementwise statements.

use slabwise::DType;

use super::Maker;
use super::steps::float;
use crate::case::{Binary, Op, Unary};
use crate::facts::Fact;

/// Numbers that decide special cases.
pub(super) const ODD: [f32; 6] = [f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40, 3e38, -2e-38];

impl Maker<'_> {
    /// The operand, mapped to a range where a function is defined and not steep.
    pub(super) fn positive(&mut self, x: usize) -> Option<usize> {
        if self.fact(x).low >= 0.5 {
            return Some(x);
        }
        let size = self.push(Op::Unary(Unary::Abs), &[x])?;
        self.push(Op::Number(Binary::Add, 0.5), &[size])
    }

    /// The operand, scaled by a power of two to magnitudes of at most `most`.
    fn within(&mut self, x: usize, most: f64) -> Option<usize> {
        let bound = self.fact(x).bound();
        if bound <= most {
            return Some(x);
        }
        let scale = (most / bound).log2().floor().exp2() as f32;
        self.push(Op::Number(Binary::Mul, scale), &[x])
    }

    pub(super) fn unary(&mut self) -> Option<usize> {
        let op = self.rng.pick(Unary::ALL);
        let mut x = match op {
            Unary::Not => self.find(|f| f.dtype == DType::Bool)?,
            Unary::BitNot => self.find(|f| f.lane() == DType::I32)?,
            Unary::Neg | Unary::Abs | Unary::Sign | Unary::Square => {
                self.find(|f| f.dtype != DType::Bool)?
            }
            _ => self.find(float)?,
        };
        match op {
            Unary::Ln | Unary::Log1p | Unary::Sqrt | Unary::Rsqrt | Unary::Recip => {
                x = self.positive(x)?
            }
            Unary::Log2 | Unary::Log10 | Unary::Lgamma | Unary::Digamma => x = self.positive(x)?,
            Unary::Exp | Unary::Exp2 | Unary::Expm1 | Unary::Sinh | Unary::Cosh => {
                x = self.within(x, 2.0)?
            }
            Unary::Tan => x = self.within(x, 1.25)?,
            Unary::Asin | Unary::Acos | Unary::Atanh | Unary::Erfinv => x = self.within(x, 0.75)?,
            Unary::Acosh => {
                x = self.positive(x)?;
                x = self.push(Op::Number(Binary::Add, 1.0), &[x])?;
            }
            Unary::Logit => {
                x = self.within(x, 0.375)?;
                x = self.push(Op::Number(Binary::Add, 0.5), &[x])?;
            }
            _ => {}
        }
        self.push(Op::Unary(op), &[x])
    }

    pub(super) fn binary(&mut self) -> Option<usize> {
        let op = self.rng.pick(Binary::ALL);
        let logic = matches!(op, Binary::And | Binary::Or | Binary::Xor);
        let of_integers = matches!(
            op,
            Binary::BitAnd
                | Binary::BitOr
                | Binary::BitXor
                | Binary::ShiftLeft
                | Binary::ShiftRight
        );
        let x = self.find(|f| match of_integers {
            true => f.lane() == DType::I32,
            false => {
                (f.dtype == DType::Bool) == logic || matches!(op, Binary::Equal | Binary::NotEqual)
            }
        })?;
        let (lane, dims) = (self.fact(x).lane(), self.fact(x).dims.clone());
        let mut y =
            self.find(|f| f.lane() == lane && crate::facts::broadcast(&f.dims, &dims).is_some())?;
        let exact = self.fact(x).exact && self.fact(y).exact;
        let near_zero =
            op == Binary::Div || (matches!(op, Binary::Atan2 | Binary::Hypot) && !exact);
        if lane == DType::F32 && near_zero {
            y = self.positive(y)?;
        }
        if op == Binary::Pow {
            let base = self.positive(x)?;
            let exponent = self.rng.pick(&[0.0, 0.5, 1.0, 2.0, -1.0]);
            return self.push(Op::Number(Binary::Pow, exponent), &[base]);
        }
        self.push(Op::Binary(op), &[x, y])
    }

    pub(super) fn number(&mut self) -> Option<usize> {
        let op = self.rng.pick(&[
            Binary::Add,
            Binary::Sub,
            Binary::Mul,
            Binary::Div,
            Binary::Maximum,
            Binary::Gt,
            Binary::Equal,
            Binary::Minimum,
            Binary::Fmod,
            Binary::Remainder,
            Binary::DivFloor,
            Binary::ShiftRight,
            Binary::BitXor,
        ]);
        let x = self.find(|f| f.dtype != DType::Bool)?;
        let mut number = self.rng.pick(&[0.0, 1.0, 2.0, -1.0, 0.5, 3.0, -0.25]);
        if self.scope.case.odd_numbers && float(self.fact(x)) && self.rng.one_in(2) {
            number = self.rng.pick(&ODD);
        }
        if op == Binary::Div && number == 0.0 {
            return None;
        }
        self.push(Op::Number(op, number), &[x])
    }

    pub(super) fn select(&mut self) -> Option<usize> {
        let x = self.find(|_| true)?;
        let (lane, dims) = (self.fact(x).lane(), self.fact(x).dims.clone());
        let fits = |f: &Fact| crate::facts::broadcast(&f.dims, &dims).is_some();
        let y = self.find(|f| f.lane() == lane && fits(f))?;
        let c = match self.find(|f| f.dtype == DType::Bool && fits(f)) {
            Some(c) => c,
            None if self.fact(x).exact => self.push(Op::Number(Binary::Gt, 0.0), &[x])?,
            None => return None,
        };
        self.push(Op::Select, &[c, x, y])
    }

    pub(super) fn clamp(&mut self) -> Option<usize> {
        let x = self.find(|f| f.dtype != DType::Bool)?;
        let (low, high) = self
            .rng
            .pick(&[(0.0, 1.0), (-1.0, 1.0), (0.0, 6.0), (1.0, 1.0)]);
        self.push(Op::Clamp(low, high), &[x])
    }

    pub(super) fn cast(&mut self) -> Option<usize> {
        let to = self.rng.pick(&[
            DType::F32,
            DType::F32,
            DType::F16,
            DType::BF16,
            DType::I32,
            DType::U8,
            DType::Bool,
        ]);
        let x = self.find(|f| f.dtype != to && (f.exact || to == DType::F32))?;
        self.push(Op::Cast(to), &[x])
    }
}
