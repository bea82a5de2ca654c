//! Scalar expressions: how the table writes an operation's derivative.

use crate::scalar::{ScalarOp, Value};

/// An expression over an operation's arguments and its result.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// The first argument.
    X,
    /// The second argument.
    Y,
    /// The third argument.
    Z,
    /// The operation's own result.
    Out,
    /// A number.
    Const(f32),
    /// An operation applied to expressions.
    Op(ScalarOp, Vec<Expr>),
}

impl Expr {
    /// The value for given arguments and result.
    pub fn eval(&self, args: &[Value], out: Value) -> Value {
        match self {
            Expr::X => args[0],
            Expr::Y => args[1],
            Expr::Z => args[2],
            Expr::Out => out,
            Expr::Const(c) => Value::F32(*c),
            Expr::Op(op, operands) => {
                let values: Vec<Value> = operands.iter().map(|e| e.eval(args, out)).collect();
                op.eval(&values)
            }
        }
    }
}

impl From<f32> for Expr {
    fn from(c: f32) -> Self {
        Expr::Const(c)
    }
}

macro_rules! infix {
    ($($trait:ident $method:ident $op:ident),*) => {$(
        impl<R: Into<Expr>> std::ops::$trait<R> for Expr {
            type Output = Expr;
            fn $method(self, rhs: R) -> Expr {
                Expr::Op(ScalarOp::$op, vec![self, rhs.into()])
            }
        }
    )*};
}
infix!(Add add Add, Sub sub Sub, Mul mul Mul, Div div Div);

impl std::ops::Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        Expr::Op(ScalarOp::Neg, vec![self])
    }
}

/// `op(x)` as an expression.
pub(crate) fn call<const N: usize>(op: ScalarOp, args: [Expr; N]) -> Expr {
    Expr::Op(op, args.to_vec())
}
