//! THE table of elementwise operations: one row per operation.
//!
//! A row says what the project knows about an operation: its documentation, its name, the lanes it accepts, what it
//! computes, and its derivative with respect to each argument as a scalar expression (`none`: the derivative is zero
//! almost everywhere). Adding a row adds the tensor operation's kernel, its gradient and its gradient test.

use crate::dtype::Lane;
use crate::expr::{Expr, call};

/// One scalar of a [`Lane`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A float lane.
    F32(f32),
    /// An integer lane.
    I32(i32),
    /// A truth value.
    Bool(bool),
}

impl Value {
    /// The lane this value belongs to.
    pub fn lane(self) -> Lane {
        match self {
            Value::F32(_) => Lane::F32,
            Value::I32(_) => Lane::I32,
            Value::Bool(_) => Lane::Bool,
        }
    }

    /// Conversion between lanes, as a cast does it: floats truncate towards zero and saturate, NaN becomes 0; anything but zero is true.
    pub fn cast(self, to: Lane) -> Value {
        match (self, to) {
            (Value::F32(x), Lane::I32) => Value::I32(x as i32),
            (Value::F32(x), Lane::Bool) => Value::Bool(x != 0.0),
            (Value::I32(x), Lane::F32) => Value::F32(x as f32),
            (Value::I32(x), Lane::Bool) => Value::Bool(x != 0),
            (Value::Bool(x), Lane::F32) => Value::F32(f32::from(u8::from(x))),
            (Value::Bool(x), Lane::I32) => Value::I32(i32::from(x)),
            (same, _) => same,
        }
    }
}

/// Which lanes an operation takes and gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// `f32 → f32`.
    Float,
    /// All `f32` or all `i32`, giving the same.
    Num,
    /// Two of one lane, giving a truth value.
    Compare,
    /// Truth values only.
    Logic,
    /// A truth value and two of one lane, giving that lane.
    Select,
}

macro_rules! scalar_ops {
    ($($(#[$doc:meta])* $name:ident $text:literal $class:ident($($arg:ident),+) { $($lane:ident: $body:expr;)+ } grad $grad:tt;)+) => {
        /// Every elementwise operation.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum ScalarOp { $($(#[$doc])* $name),+ }

        impl ScalarOp {
            /// Every operation, in table order.
            pub const ALL: &[ScalarOp] = &[$(ScalarOp::$name),+];

            /// The name it has in the tensor API and in plans.
            pub const fn name(self) -> &'static str {
                match self { $(ScalarOp::$name => $text),+ }
            }

            /// How many arguments it takes.
            pub const fn arity(self) -> usize {
                match self { $(ScalarOp::$name => [$(stringify!($arg)),+].len()),+ }
            }

            /// Which lanes it takes.
            pub const fn class(self) -> Class {
                match self { $(ScalarOp::$name => Class::$class),+ }
            }

            /// The operation on single values: the definition that kernels are tested against.
            ///
            /// # Panics
            /// If [`ScalarOp::lane`] does not accept the arguments.
            pub fn eval(self, args: &[Value]) -> Value {
                match self { $(ScalarOp::$name => scalar_ops!(@eval args, $class($($arg),+) $($lane: $body;)+)),+ }
            }

            /// ∂out/∂argumentᵢ; `None` where it is zero almost everywhere.
            pub fn derivative(self) -> Vec<Option<Expr>> {
                #[allow(unused_imports)]
                use Expr::{Out, X, Y, Z};
                match self { $(ScalarOp::$name => scalar_ops!(@grad [$($arg),+] $grad)),+ }
            }
        }
    };
    (@grad [$($arg:ident),+] none) => { vec![$({ let _ = stringify!($arg); None }),+] };
    (@grad [$($arg:ident),+] [$($grad:expr),+]) => { vec![$(Some(Expr::from($grad))),+] };
    (@eval $args:ident, Select($c:ident, $x:ident, $y:ident) any: $body:expr;) => {{
        let [Value::Bool($c), $x, $y] = *$args else { panic!("select takes a truth value and two values, not {:?}", $args) };
        $body
    }};
    (@eval $args:ident, Compare($($arg:ident),+) f32: $f:expr; i32: $i:expr;) => {
        match *$args {
            [$(Value::F32($arg)),+] => Value::Bool($f),
            [$(Value::I32($arg)),+] => Value::Bool($i),
            [$(Value::Bool($arg)),+] => { $(let $arg = i32::from($arg);)+ Value::Bool($i) }
            _ => panic!("lanes differ: {:?}", $args),
        }
    };
    (@eval $args:ident, $class:ident($($arg:ident),+) f32: $f:expr; i32: $i:expr;) => {
        match *$args {
            [$(Value::F32($arg)),+] => Value::F32($f),
            [$(Value::I32($arg)),+] => Value::I32($i),
            _ => panic!("lanes differ: {:?}", $args),
        }
    };
    (@eval $args:ident, Float($($arg:ident),+) f32: $f:expr;) => {{
        let [$(Value::F32($arg)),+] = *$args else { panic!("takes f32, not {:?}", $args) };
        Value::F32($f)
    }};
    (@eval $args:ident, Logic($($arg:ident),+) bool: $b:expr;) => {{
        let [$(Value::Bool($arg)),+] = *$args else { panic!("takes truth values, not {:?}", $args) };
        Value::Bool($b)
    }};
}

scalar_ops! {
    /// x + y
    Add "add" Num(x, y) { f32: x + y; i32: x.wrapping_add(y); } grad [1.0, 1.0];
    /// x − y
    Sub "sub" Num(x, y) { f32: x - y; i32: x.wrapping_sub(y); } grad [1.0, -1.0];
    /// x · y
    Mul "mul" Num(x, y) { f32: x * y; i32: x.wrapping_mul(y); } grad [Y, X];
    /// x / y; integers truncate, and give 0 for a division by 0
    Div "div" Num(x, y) { f32: x / y; i32: if y == 0 { 0 } else { x.wrapping_div(y) }; } grad [Expr::from(1.0) / Y, -(Out / Y)];
    /// −x
    Neg "neg" Num(x) { f32: -x; i32: x.wrapping_neg(); } grad [-1.0];
    /// |x|
    Abs "abs" Num(x) { f32: x.abs(); i32: x.wrapping_abs(); } grad [call(ScalarOp::Sign, [X])];
    /// −1, 0 or 1; NaN stays NaN
    Sign "sign" Num(x) { f32: if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x * 0.0 }; i32: x.signum(); } grad none;
    /// The smaller; NaN if either is
    Min "min" Num(x, y) { f32: if x < y || x.is_nan() { x } else { y }; i32: x.min(y); } grad [pick(ScalarOp::Le), pick(ScalarOp::Gt)];
    /// The larger; NaN if either is
    Max "max" Num(x, y) { f32: if x > y || x.is_nan() { x } else { y }; i32: x.max(y); } grad [pick(ScalarOp::Ge), pick(ScalarOp::Lt)];
    /// xʸ
    Pow "pow" Float(x, y) { f32: x.powf(y); } grad [Y * call(ScalarOp::Pow, [X, Y - 1.0]), Out * call(ScalarOp::Ln, [X])];
    /// eˣ
    Exp "exp" Float(x) { f32: x.exp(); } grad [Out];
    /// 2ˣ
    Exp2 "exp2" Float(x) { f32: x.exp2(); } grad [Out * std::f32::consts::LN_2];
    /// eˣ − 1
    Expm1 "expm1" Float(x) { f32: x.exp_m1(); } grad [Out + 1.0];
    /// ln x
    Ln "ln" Float(x) { f32: x.ln(); } grad [Expr::from(1.0) / X];
    /// ln(1 + x)
    Log1p "log1p" Float(x) { f32: x.ln_1p(); } grad [Expr::from(1.0) / (X + 1.0)];
    /// √x
    Sqrt "sqrt" Float(x) { f32: x.sqrt(); } grad [Expr::from(0.5) / Out];
    /// 1/√x
    Rsqrt "rsqrt" Float(x) { f32: 1.0 / x.sqrt(); } grad [Expr::from(-0.5) * Out / X];
    /// 1/x
    Recip "recip" Float(x) { f32: 1.0 / x; } grad [-(Out * Out)];
    /// tanh x
    Tanh "tanh" Float(x) { f32: x.tanh(); } grad [Expr::from(1.0) - Out * Out];
    /// 1/(1 + e⁻ˣ)
    Sigmoid "sigmoid" Float(x) { f32: 1.0 / (1.0 + (-x).exp()); } grad [Out * (Expr::from(1.0) - Out)];
    /// max(x, 0); NaN stays NaN
    Relu "relu" Num(x) { f32: if x < 0.0 { 0.0 } else { x }; i32: x.max(0); } grad [call(ScalarOp::Select, [call(ScalarOp::Gt, [Out, Expr::from(0.0)]), Expr::from(1.0), Expr::from(0.0)])];
    /// The error function
    Erf "erf" Float(x) { f32: erf_reference(x); } grad [call(ScalarOp::Exp, [-(X * X)]) * std::f32::consts::FRAC_2_SQRT_PI];
    /// sin x, x in radians
    Sin "sin" Float(x) { f32: x.sin(); } grad [call(ScalarOp::Cos, [X])];
    /// cos x, x in radians
    Cos "cos" Float(x) { f32: x.cos(); } grad [-call(ScalarOp::Sin, [X])];
    /// The largest integer ≤ x
    Floor "floor" Float(x) { f32: x.floor(); } grad none;
    /// The smallest integer ≥ x
    Ceil "ceil" Float(x) { f32: x.ceil(); } grad none;
    /// The nearest integer, halves to even
    Round "round" Float(x) { f32: x.round_ties_even(); } grad none;
    /// x < y
    Lt "lt" Compare(x, y) { f32: x < y; i32: x < y; } grad none;
    /// x ≤ y
    Le "le" Compare(x, y) { f32: x <= y; i32: x <= y; } grad none;
    /// x > y
    Gt "gt" Compare(x, y) { f32: x > y; i32: x > y; } grad none;
    /// x ≥ y
    Ge "ge" Compare(x, y) { f32: x >= y; i32: x >= y; } grad none;
    /// x = y
    Eq "equal" Compare(x, y) { f32: x == y; i32: x == y; } grad none;
    /// x ≠ y
    Ne "not_equal" Compare(x, y) { f32: x != y; i32: x != y; } grad none;
    /// x and y
    And "and" Logic(x, y) { bool: x & y; } grad none;
    /// x or y
    Or "or" Logic(x, y) { bool: x | y; } grad none;
    /// x or y, not both
    Xor "xor" Logic(x, y) { bool: x ^ y; } grad none;
    /// not x
    Not "not" Logic(x) { bool: !x; } grad none;
    /// x where c, else y
    Select "select" Select(c, x, y) { any: if c { x } else { y }; } grad [0.0, choose(1.0, 0.0), choose(0.0, 1.0)];
}

/// 1 where the arguments compare so, else 0: the derivative of `min` and `max`; ties go to the first.
fn pick(op: ScalarOp) -> Expr {
    call(ScalarOp::Select, [call(op, [Expr::X, Expr::Y]), Expr::from(1.0), Expr::from(0.0)])
}

/// `a` where the condition holds, else `b`: the derivative of `select`.
fn choose(a: f32, b: f32) -> Expr {
    call(ScalarOp::Select, [Expr::X, Expr::from(a), Expr::from(b)])
}

impl ScalarOp {
    /// The lane of the result, or `None` if the operation does not take these lanes.
    pub fn lane(self, args: &[Lane]) -> Option<Lane> {
        let same = |lanes: &[Lane]| lanes.windows(2).all(|w| w[0] == w[1]);
        if args.len() != self.arity() {
            return None;
        }
        match self.class() {
            Class::Float => args.iter().all(|&l| l == Lane::F32).then_some(Lane::F32),
            Class::Num => (same(args) && args[0] != Lane::Bool).then_some(args[0]),
            Class::Compare => same(args).then_some(Lane::Bool),
            Class::Logic => args.iter().all(|&l| l == Lane::Bool).then_some(Lane::Bool),
            Class::Select => (args[0] == Lane::Bool && same(&args[1..])).then_some(args[1]),
        }
    }
}

/// erf in double precision by its series and continued fraction (Abramowitz & Stegun 7.1.6 and 7.1.14), rounded once.
fn erf_reference(x: f32) -> f32 {
    let x = f64::from(x);
    let a = x.abs();
    if a.is_nan() {
        return f32::NAN;
    }
    let erf = if a < 3.0 {
        // erf x = 2/√π · e^{−x²} · Σ 2ⁿ x^{2n+1} / (1·3·…·(2n+1))
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term > sum * 1e-17 {
            n += 1.0;
            term *= 2.0 * a * a / (2.0 * n + 1.0);
            sum += term;
        }
        sum * (-a * a).exp() * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let mut f = 0.0;
        for k in (1..60).rev() {
            f = f64::from(k) / 2.0 / (a + f);
        }
        1.0 - (-a * a).exp() / (a + f) / std::f64::consts::PI.sqrt()
    };
    (erf * x.signum()) as f32
}
