//! The table of elementwise operations: one row per operation.
//!
//! A row is the only definition of an operation: its documentation, its name, the lanes it accepts,
//! its value (in Rust, and as an expression of CUDA C++ over `{argument}`s), and its derivative
//! with respect to each argument as a scalar expression (`none`: the derivative is zero almost
//! everywhere). Adding a row adds the tensor operation's kernels, its gradient and its gradient
//! test.

use std::marker::PhantomData;

use smallvec::SmallVec;

use crate::dtype::Lane;
use crate::expr::{Expr, call};
use crate::math::{self, Arith, Plain};

/// One scalar of a [`Lane`].
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// A float lane.
    F32(f32),
    /// An integer lane.
    I32(i32),
    /// A truth value.
    Bool(bool),
}

/// Numbers as they compare, and a NaN with the same bits: specs that hold one equal themselves.
impl PartialEq for Value {
    fn eq(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::F32(a), Value::F32(b)) => a == b || a.to_bits() == b.to_bits(),
            (Value::I32(a), Value::I32(b)) => a == b,
            (Value::Bool(a), Value::Bool(b)) => a == b,
            _ => false,
        }
    }
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

    /// The value as a lane holds it: 0 and −0 are equal numbers with different bits, and a NaN has
    /// the bits that it has.
    pub fn bits(self) -> u32 {
        match self {
            Value::F32(x) => x.bits(),
            Value::I32(x) => x.bits(),
            Value::Bool(x) => x.bits(),
        }
    }

    /// The value that a lane holds.
    pub(crate) fn of(bits: u32, lane: Lane) -> Value {
        match lane {
            Lane::F32 => Value::F32(Word::of(bits)),
            Lane::I32 => Value::I32(Word::of(bits)),
            Lane::Bool => Value::Bool(Word::of(bits)),
        }
    }

    /// Conversion between lanes, as a cast does it: floats truncate towards zero and saturate, NaN
    /// becomes 0; anything but zero is true.
    pub fn cast(self, to: Lane) -> Value {
        visit_cast(self.lane(), to, Eval([self.bits(), 0, 0], to))
    }
}

/// Conversion of one scalar, as a cast does it.
pub(crate) trait CastTo<T> {
    /// The converted value.
    fn cast_to(self) -> T;
}

macro_rules! casts {
    ($($from:ty => $to:ty: |$x:ident| $body:expr;)+) => {$(
        impl CastTo<$to> for $from {
            #[inline(always)]
            fn cast_to(self) -> $to {
                let $x = self;
                $body
            }
        }
    )+};
}
casts! {
    f32 => f32: |x| x;
    f32 => i32: |x| x as i32;
    f32 => bool: |x| x != 0.0;
    i32 => f32: |x| x as f32;
    i32 => i32: |x| x;
    i32 => bool: |x| x != 0;
    bool => f32: |x| f32::from(u8::from(x));
    bool => i32: |x| i32::from(x);
    bool => bool: |x| x;
}

/// The code of a cast.
struct Cast<T, U>(PhantomData<(T, U)>);

impl<T: Word + CastTo<U> + 'static, U: Word + 'static> Lanewise for Cast<T, U> {
    type In = T;
    type Out = U;
    const ARITY: usize = 1;
    #[inline(always)]
    fn apply<A: Arith>(args: [T; 3]) -> U {
        args[0].cast_to()
    }
}

/// The code of one operation applied to the result of another: `outer(inner(x, y), z)`, or with
/// `SWAPPED` arguments `outer(z, inner(x, y))`. Each rounds for itself, so the bits are those of
/// the two operations one after the other.
pub(crate) struct Pair<I, O, const SWAPPED: bool>(PhantomData<(I, O)>);

impl<T: Word + 'static, I, O, const SWAPPED: bool> Lanewise for Pair<I, O, SWAPPED>
where
    I: Lanewise<In = T, Out = T>,
    O: Lanewise<In = T, Out = T>,
{
    type In = T;
    type Out = T;
    const ARITY: usize = I::ARITY + O::ARITY - 1;
    #[inline(always)]
    fn apply<A: Arith>([x, y, z]: [T; 3]) -> T {
        let inner = I::apply::<A>([x, y, z]);
        O::apply::<A>(if SWAPPED {
            [z, inner, inner]
        } else {
            [inner, z, z]
        })
    }
}

/// The code of `select(x <= y, y, z)`: with y = 0, the gradient of `relu`.
struct AboveOr;

impl Lanewise for AboveOr {
    type In = f32;
    type Out = f32;
    const ARITY: usize = 3;
    #[inline(always)]
    fn apply<A: Arith>([x, y, z]: [f32; 3]) -> f32 {
        if x <= y { y } else { z }
    }
}

/// The code of a product.
pub(crate) type Product = code::Mul<f32>;

/// The code of a sum of a product and a number.
pub(crate) type ProductSum = Pair<code::Mul<f32>, code::Add<f32>, false>;

/// The code of a negation.
pub(crate) type Negation = code::Neg<f32>;

/// The code of a sum.
pub(crate) type Sum = code::Add<f32>;

/// Operations on floats that have code to be computed together, the first one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    /// One operation after another. `swapped` if the inner result is the second argument.
    Pair {
        /// The first operation.
        inner: ScalarOp,
        /// The second operation.
        outer: ScalarOp,
        /// Whether its second argument is the inner result.
        swapped: bool,
    },
    /// `relu(x · y + z)`
    ReluOfProductSum,
    /// `select(x <= y, y, z)`
    AboveOr,
}

/// Calls the visitor with the code of joined operations, where such code exists. Pairs have it for
/// sums, differences and products of sums, differences and products, and for `relu` of those.
pub(crate) fn visit_joined<V: Visit>(joined: Joined, visitor: V) -> Option<V::Output> {
    fn after<I: Lanewise<In = f32, Out = f32>, V: Visit>(
        outer: ScalarOp,
        swapped: bool,
        visitor: V,
    ) -> Option<V::Output> {
        Some(match (outer, swapped) {
            (ScalarOp::Add, _) => visitor.visit::<Pair<I, code::Add<f32>, false>>(),
            (ScalarOp::Mul, _) => visitor.visit::<Pair<I, code::Mul<f32>, false>>(),
            (ScalarOp::Sub, false) => visitor.visit::<Pair<I, code::Sub<f32>, false>>(),
            (ScalarOp::Sub, true) => visitor.visit::<Pair<I, code::Sub<f32>, true>>(),
            (ScalarOp::Relu, _) => visitor.visit::<Pair<I, code::Relu<f32>, false>>(),
            _ => return None,
        })
    }
    match joined {
        Joined::Pair {
            inner,
            outer,
            swapped,
        } => match inner {
            ScalarOp::Add => after::<code::Add<f32>, V>(outer, swapped, visitor),
            ScalarOp::Sub => after::<code::Sub<f32>, V>(outer, swapped, visitor),
            ScalarOp::Mul => after::<code::Mul<f32>, V>(outer, swapped, visitor),
            _ => None,
        },
        Joined::ReluOfProductSum => Some(visitor.visit::<Pair<
            Pair<code::Mul<f32>, code::Add<f32>, false>,
            code::Relu<f32>,
            false,
        >>()),
        Joined::AboveOr => Some(visitor.visit::<AboveOr>()),
    }
}

/// [`ScalarOp::visit`] for casts.
pub(crate) fn visit_cast<V: Visit>(from: Lane, to: Lane, visitor: V) -> V::Output {
    match (from, to) {
        (Lane::F32, Lane::F32) => visitor.visit::<Cast<f32, f32>>(),
        (Lane::F32, Lane::I32) => visitor.visit::<Cast<f32, i32>>(),
        (Lane::F32, Lane::Bool) => visitor.visit::<Cast<f32, bool>>(),
        (Lane::I32, Lane::F32) => visitor.visit::<Cast<i32, f32>>(),
        (Lane::I32, Lane::I32) => visitor.visit::<Cast<i32, i32>>(),
        (Lane::I32, Lane::Bool) => visitor.visit::<Cast<i32, bool>>(),
        (Lane::Bool, Lane::F32) => visitor.visit::<Cast<bool, f32>>(),
        (Lane::Bool, Lane::I32) => visitor.visit::<Cast<bool, i32>>(),
        (Lane::Bool, Lane::Bool) => visitor.visit::<Cast<bool, bool>>(),
    }
}

/// The lanes of an operation's arguments and result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// `f32 → f32`.
    Float,
    /// All `f32` or all `i32`, with a result of the same lane.
    Num,
    /// Two of one lane, with a truth value as result.
    Compare,
    /// `i32` only.
    Int,
    /// Truth values only.
    Logic,
    /// A truth value and two of one lane, with a result of that lane.
    Select,
}

/// A value as the 32 bits it is held in while a kernel runs.
pub(crate) trait Word: Copy {
    /// The value these bits stand for.
    fn of(bits: u32) -> Self;
    /// The bits of the value.
    fn bits(self) -> u32;
}

impl Word for f32 {
    #[inline(always)]
    fn of(bits: u32) -> Self {
        f32::from_bits(bits)
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }
}
impl Word for i32 {
    #[inline(always)]
    fn of(bits: u32) -> Self {
        bits as i32
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        self as u32
    }
}
impl Word for u32 {
    #[inline(always)]
    fn of(bits: u32) -> Self {
        bits
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        self
    }
}
impl Word for bool {
    #[inline(always)]
    fn of(bits: u32) -> Self {
        bits != 0
    }
    #[inline(always)]
    fn bits(self) -> u32 {
        u32::from(self)
    }
}

/// One operation on one lane type as code that a loop can be built around; a row of the table
/// compiles to such types.
pub(crate) trait Lanewise: 'static {
    /// The lane type of the arguments.
    type In: Word;
    /// The lane type of the result.
    type Out: Word;
    /// How many arguments count; the others are ignored.
    const ARITY: usize;
    /// The operation.
    fn apply<A: Arith>(args: [Self::In; 3]) -> Self::Out;
}

/// The code of a row of the table.
pub(crate) trait Named: Lanewise {
    /// The row.
    const OP: ScalarOp;
}

/// A consumer of the type of an operation's code; see [`ScalarOp::visit`].
pub(crate) trait Visit {
    /// The result of the visit.
    type Output;
    /// Called with the code.
    fn visit<O: Lanewise>(self) -> Self::Output;
}

macro_rules! scalar_ops {
    ($($(#[$doc:meta])* $name:ident $text:literal $class:ident($($arg:ident),+) { $($lane:ident: $body:expr, $cuda:literal;)+ } grad $grad:tt;)+) => {
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
                self.arguments().len()
            }

            /// The lanes of its arguments.
            pub const fn class(self) -> Class {
                match self { $(ScalarOp::$name => Class::$class),+ }
            }

            /// Calls `visitor` with the code for arguments of `lane` (of the last argument's lane,
            /// for `select`). The operation must accept them; see [`ScalarOp::lane`].
            pub(crate) fn visit<V: Visit>(self, lane: Lane, visitor: V) -> V::Output {
                match self { $(ScalarOp::$name => scalar_ops!(@visit $name lane visitor $($lane)+)),+ }
            }

            /// The operation as an expression of CUDA C++, for arguments as [`ScalarOp::lane`]
            /// accepts them with the last of `lane`; `{x}` stands for the argument that the row
            /// names so, see [`ScalarOp::arguments`].
            pub fn cuda(self, lane: Lane) -> &'static str {
                match self { $(ScalarOp::$name => scalar_ops!(@cuda lane $($lane: $cuda;)+)),+ }
            }

            /// The names of the arguments in its row.
            pub const fn arguments(self) -> &'static [&'static str] {
                match self { $(ScalarOp::$name => &[$(stringify!($arg)),+]),+ }
            }

            /// ∂out/∂argumentᵢ; `None` where it is zero almost everywhere.
            pub fn derivative(self) -> Vec<Option<Expr>> {
                #[allow(unused_imports)] // not every row's derivative names every argument
                use Expr::{Out, X, Y, Z};
                match self { $(ScalarOp::$name => scalar_ops!(@grad [$($arg),+] $grad)),+ }
            }
        }

        /// The rows as types: `Add<f32>` is the code of `add` on floats.
        pub(crate) mod code {
            use super::*;
            $(
                /// The code of the operation.
                pub(crate) struct $name<T>(PhantomData<T>);
                impl<T> Named for $name<T> where $name<T>: Lanewise {
                    const OP: ScalarOp = ScalarOp::$name;
                }
                scalar_ops!(@code $name $class [$($arg),+] $($lane: $body;)+);
            )+
        }
    };
    (@grad [$($arg:ident),+] none) => { vec![$({ let _ = stringify!($arg); None }),+] };
    (@grad [$($arg:ident),+] [$($grad:expr),+]) => { vec![$(Some(Expr::from($grad))),+] };
    (@cuda $of:ident f32: $float:literal; i32: $int:literal;) => { match $of { Lane::F32 => $float, Lane::I32 | Lane::Bool => $int } };
    (@cuda $of:ident $lane:ident: $cuda:literal;) => { $cuda };
    (@code $name:ident $class:ident [$($arg:ident),+]) => {};
    (@code $name:ident $class:ident [$($arg:ident),+] $lane:ident: $body:expr; $($rest:tt)*) => {
        impl Lanewise for $name<scalar_ops!(@type $lane)> {
            type In = scalar_ops!(@type $lane);
            type Out = scalar_ops!(@out $class $lane);
            const ARITY: usize = [$(stringify!($arg)),+].len();
            #[inline(always)]
            fn apply<A: Arith>([$($arg,)+ ..]: [Self::In; 3]) -> Self::Out {
                $body
            }
        }
        scalar_ops!(@code $name $class [$($arg),+] $($rest)*);
    };
    (@type any) => { u32 };
    (@type $lane:ident) => { $lane };
    (@out Compare $lane:ident) => { bool };
    (@out $class:ident $lane:ident) => { scalar_ops!(@type $lane) };
    // Truth values are held as 0 and 1, so integer code serves them where a row has no code for
    // them.
    (@visit $name:ident $of:ident $v:ident f32 i32) => {
        match $of { Lane::F32 => $v.visit::<code::$name<f32>>(), Lane::I32 | Lane::Bool => $v.visit::<code::$name<i32>>() }
    };
    (@visit $name:ident $of:ident $v:ident $lane:ident) => { $v.visit::<code::$name<scalar_ops!(@type $lane)>>() };
}

scalar_ops! {
    /// x + y
    Add "add" Num(x, y) { f32: x + y, "{x} + {y}"; i32: x.wrapping_add(y), "int(unsigned({x}) + unsigned({y}))"; } grad [1.0, 1.0];
    /// x − y
    Sub "sub" Num(x, y) { f32: x - y, "{x} - {y}"; i32: x.wrapping_sub(y), "int(unsigned({x}) - unsigned({y}))"; } grad [1.0, -1.0];
    /// x · y
    Mul "mul" Num(x, y) { f32: x * y, "{x} * {y}"; i32: x.wrapping_mul(y), "int(unsigned({x}) * unsigned({y}))"; } grad [Y, X];
    /// x / y; integers truncate, and give 0 for a division by 0 (as in NumPy)
    Div "div" Num(x, y) { f32: x / y, "{x} / {y}"; i32: if y == 0 { 0 } else { x.wrapping_div(y) }, "{y} == 0 ? 0 : {y} == -1 ? int(0u - unsigned({x})) : {x} / {y}"; } grad [Expr::from(1.0) / Y, -(Out / Y)];
    /// The remainder of a division that truncates, with the sign of x; that of integers by 0 is 0
    Fmod "fmod" Num(x, y) { f32: x % y, "fmodf({x}, {y})"; i32: if y == 0 { 0 } else { x.wrapping_rem(y) }, "{y} == 0 || {y} == -1 ? 0 : {x} % {y}"; } grad [1.0, -truncated(X / Y)];
    /// x, whose derivative with respect to y is z: where x is detached, the value of one formula
    /// with the slope of another
    WithSlope "with_slope" Num(x, y, z) { f32: first(x, y, z), "{x}"; i32: first(x, y, z), "{x}"; } grad [1.0, Z, 0.0];
    /// x itself, as a constant to derivatives
    Detach "detach" Num(x) { f32: x, "{x}"; i32: x, "{x}"; } grad none;
    /// A number on which results depend by rounding alone, so that any number near it serves as
    /// well.
    Near "near" Float(x) { f32: x, "{x}"; } grad none;
    /// −x
    Neg "neg" Num(x) { f32: -x, "-{x}"; i32: x.wrapping_neg(), "int(0u - unsigned({x}))"; } grad [-1.0];
    /// |x|
    Abs "abs" Num(x) { f32: x.abs(), "fabsf({x})"; i32: x.wrapping_abs(), "{x} < 0 ? int(0u - unsigned({x})) : {x}"; } grad [call(ScalarOp::Sign, [X])];
    /// −1, 0 or 1; NaN stays NaN
    Sign "sign" Num(x) { f32: if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x * 0.0 }, "{x} > 0.0f ? 1.0f : {x} < 0.0f ? -1.0f : {x} * 0.0f"; i32: x.signum(), "({x} > 0) - ({x} < 0)"; } grad none;
    /// The smaller; NaN if either is
    Min "min" Num(x, y) { f32: if x < y || x.is_nan() { x } else { y }, "{x} < {y} || {x} != {x} ? {x} : {y}"; i32: x.min(y), "{x} < {y} ? {x} : {y}"; } grad [share(ScalarOp::Gt), share(ScalarOp::Lt)];
    /// The larger; NaN if either is
    Max "max" Num(x, y) { f32: if x > y || x.is_nan() { x } else { y }, "{x} > {y} || {x} != {x} ? {x} : {y}"; i32: x.max(y), "{x} > {y} ? {x} : {y}"; } grad [share(ScalarOp::Lt), share(ScalarOp::Gt)];
    /// y where x < y, z where x > z, else x; NaN stays NaN; its derivative at a bound is that of
    /// the bound
    Clamp "clamp" Num(x, y, z) { f32: if x < y { y } else if x > z { z } else { x }, "{x} < {y} ? {y} : {x} > {z} ? {z} : {x}"; i32: if x < y { y } else if x > z { z } else { x }, "{x} < {y} ? {y} : {x} > {z} ? {z} : {x}"; } grad [when(call(ScalarOp::Le, [X, Y]), 0.0, when(call(ScalarOp::Ge, [X, Z]), 0.0, 1.0)), when(call(ScalarOp::Le, [X, Y]), 1.0, 0.0), when(call(ScalarOp::Ge, [X, Z]), 1.0, 0.0)];
    /// xʸ; x⁰ is 1 and has no slope, and neither has 0ʸ along y ≥ 0; integers wrap, and for y < 0
    /// give the integer part of the fraction, or 0 of 0
    Pow "pow" Num(x, y) { f32: math::pow(x, y), "powf({x}, {y})"; i32: math::integer_pow(x, y), "integer_pow({x}, {y})"; } grad [when(call(ScalarOp::Eq, [Y, Expr::from(0.0)]), 0.0, Y * call(ScalarOp::Pow, [X, Y - 1.0])), when(call(ScalarOp::And, [call(ScalarOp::Eq, [X, Expr::from(0.0)]), call(ScalarOp::Ge, [Y, Expr::from(0.0)])]), 0.0, Out * call(ScalarOp::Ln, [X]))];
    /// eˣ
    Exp "exp" Float(x) { f32: math::exp::<A>(x), "expf({x})"; } grad [Out];
    /// 2ˣ
    Exp2 "exp2" Float(x) { f32: math::exp2::<A>(x), "exp2f({x})"; } grad [Out * std::f32::consts::LN_2];
    /// eˣ − 1
    Expm1 "expm1" Float(x) { f32: math::expm1::<A>(x), "expm1f({x})"; } grad [Out + 1.0];
    /// ln x
    Ln "ln" Float(x) { f32: math::ln::<A>(x), "logf({x})"; } grad [Expr::from(1.0) / X];
    /// log₂ x
    Log2 "log2" Float(x) { f32: math::log2(x), "log2f({x})"; } grad [Expr::from(1.0) / (X * std::f32::consts::LN_2)];
    /// log₁₀ x
    Log10 "log10" Float(x) { f32: math::log10(x), "log10f({x})"; } grad [Expr::from(1.0) / (X * std::f32::consts::LN_10)];
    /// ln(1 + x)
    Log1p "log1p" Float(x) { f32: math::log1p::<A>(x), "log1pf({x})"; } grad [Expr::from(1.0) / (X + 1.0)];
    /// √x
    Sqrt "sqrt" Float(x) { f32: x.sqrt(), "sqrtf({x})"; } grad [Expr::from(0.5) / Out];
    /// 1/√x
    Rsqrt "rsqrt" Float(x) { f32: 1.0 / x.sqrt(), "rsqrtf({x})"; } grad [Expr::from(-0.5) * Out / X];
    /// 1/x
    Recip "recip" Float(x) { f32: 1.0 / x, "1.0f / {x}"; } grad [-(Out * Out)];
    /// tanh x
    Tanh "tanh" Float(x) { f32: math::tanh::<A>(x), "tanhf({x})"; } grad [Expr::from(1.0) - Out * Out];
    /// 1/(1 + e⁻ˣ)
    Sigmoid "sigmoid" Float(x) { f32: math::sigmoid::<A>(x), "1.0f / (1.0f + expf(-{x}))"; } grad [Out * (Expr::from(1.0) - Out)];
    /// max(x, 0); NaN stays NaN, and its derivative is 1
    Relu "relu" Num(x) { f32: if x < 0.0 { 0.0 } else { x }, "{x} < 0.0f ? 0.0f : {x}"; i32: x.max(0), "{x} < 0 ? 0 : {x}"; } grad [when(call(ScalarOp::Le, [Out, Expr::from(0.0)]), 0.0, 1.0)];
    /// The error function
    Erf "erf" Float(x) { f32: math::erf::<A>(x), "erff({x})"; } grad [call(ScalarOp::Exp, [-(X * X)]) * std::f32::consts::FRAC_2_SQRT_PI];
    /// x·Φ(x) with the normal distribution function Φ
    Gelu "gelu" Float(x) { f32: math::gelu::<A>(x), "{x} * 0.5f * (erff({x} * 0.70710678f) + 1.0f)"; } grad [call(ScalarOp::GeluSlope, [X])];
    /// The derivative of `gelu`
    GeluSlope "gelu_slope" Float(x) { f32: math::gelu_slope::<A>(x), "gelu_slope({x})"; } grad [(Expr::from(2.0) - X * X) * call(ScalarOp::Exp, [X * X * -0.5]) * math::INV_SQRT_2_PI];
    /// x·σ(√(8/π)·(x + 0.044715·x³)) with σ = `sigmoid`, which is ½x·(1 + tanh(√(2/π)·(x +
    /// 0.044715·x³))): an approximation of `gelu`
    GeluTanh "gelu_tanh" Float(x) { f32: math::gelu_tanh::<A>(x), "{x} / (1.0f + expf(-1.5957691f * ({x} * ({x} * {x} * 0.044715f + 1.0f))))"; } grad [call(ScalarOp::GeluTanhSlope, [X])];
    /// The derivative of `gelu_tanh`
    GeluTanhSlope "gelu_tanh_slope" Float(x) { f32: math::gelu_tanh_slope::<A>(x), "gelu_tanh_slope({x})"; } grad [gelu_tanh_curvature()];
    /// sin x, x in radians
    Sin "sin" Float(x) { f32: math::sin::<A>(x), "sinf({x})"; } grad [call(ScalarOp::Cos, [X])];
    /// cos x, x in radians
    Cos "cos" Float(x) { f32: math::cos::<A>(x), "cosf({x})"; } grad [-call(ScalarOp::Sin, [X])];
    /// tan x, x in radians
    Tan "tan" Float(x) { f32: math::tan(x), "tanf({x})"; } grad [Out * Out + 1.0];
    /// sinh x
    Sinh "sinh" Float(x) { f32: math::sinh::<A>(x), "sinhf({x})"; } grad [call(ScalarOp::Cosh, [X])];
    /// cosh x
    Cosh "cosh" Float(x) { f32: math::cosh::<A>(x), "coshf({x})"; } grad [call(ScalarOp::Sinh, [X])];
    /// The angle of the point (y, x), in −π..=π radians: x is its vertical coordinate; the origin
    /// has no slope
    Atan2 "atan2" Float(x, y) { f32: math::atan2(x, y), "atan2f({x}, {y})"; } grad [per_square(Y), -per_square(X)];
    /// ln |Γ(x)|; ∞ at the poles
    Lgamma "lgamma" Float(x) { f32: math::lgamma(x), "lgammaf({x})"; } grad [call(ScalarOp::Polygamma, [Expr::from(0.0), X])];
    /// The derivative of order x + 1 of ln Γ at y, for the whole number nearest to x, in 0..=100
    Polygamma "polygamma" Float(x, y) { f32: math::polygamma(x, y), "polygamma({x}, {y})"; } grad [0.0, call(ScalarOp::Polygamma, [X + 1.0, Y])];
    /// The largest integer ≤ x
    Floor "floor" Float(x) { f32: x.floor(), "floorf({x})"; } grad none;
    /// The smallest integer ≥ x
    Ceil "ceil" Float(x) { f32: x.ceil(), "ceilf({x})"; } grad none;
    /// The nearest integer, halves to even
    Round "round" Float(x) { f32: x.round_ties_even(), "rintf({x})"; } grad none;
    /// The nearest number that an IEEE half can hold, halves to even; its derivative is 1
    RoundF16 "round_f16" Float(x) { f32: math::round_f16(x), "widen(narrow_f16({x}))"; } grad [1.0];
    /// The nearest number that a bfloat16 can hold, halves to even; its derivative is 1
    RoundBf16 "round_bf16" Float(x) { f32: math::round_bf16(x), "widen(narrow_bf16({x}))"; } grad [1.0];
    /// x < y
    Lt "lt" Compare(x, y) { f32: x < y, "{x} < {y}"; i32: x < y, "{x} < {y}"; } grad none;
    /// x ≤ y
    Le "le" Compare(x, y) { f32: x <= y, "{x} <= {y}"; i32: x <= y, "{x} <= {y}"; } grad none;
    /// x > y
    Gt "gt" Compare(x, y) { f32: x > y, "{x} > {y}"; i32: x > y, "{x} > {y}"; } grad none;
    /// x ≥ y
    Ge "ge" Compare(x, y) { f32: x >= y, "{x} >= {y}"; i32: x >= y, "{x} >= {y}"; } grad none;
    /// x = y
    Eq "equal" Compare(x, y) { f32: x == y, "{x} == {y}"; i32: x == y, "{x} == {y}"; } grad none;
    /// x ≠ y
    Ne "not_equal" Compare(x, y) { f32: x != y, "{x} != {y}"; i32: x != y, "{x} != {y}"; } grad none;
    /// x and y
    And "and" Logic(x, y) { bool: x & y, "{x} && {y}"; } grad none;
    /// x or y
    Or "or" Logic(x, y) { bool: x | y, "{x} || {y}"; } grad none;
    /// x or y, not both
    Xor "xor" Logic(x, y) { bool: x ^ y, "{x} != {y}"; } grad none;
    /// not x
    Not "not" Logic(x) { bool: !x, "!{x}"; } grad none;
    /// The bits that x and y have
    BitAnd "bit_and" Int(x, y) { i32: x & y, "{x} & {y}"; } grad none;
    /// The bits that x or y has
    BitOr "bit_or" Int(x, y) { i32: x | y, "{x} | {y}"; } grad none;
    /// The bits that one of x and y has
    BitXor "bit_xor" Int(x, y) { i32: x ^ y, "{x} ^ {y}"; } grad none;
    /// x shifted left by y bits; 0 unless y is in 0..32
    ShiftLeft "shift_left" Int(x, y) { i32: if y as u32 > 31 { 0 } else { x.wrapping_shl(y as u32) }, "unsigned({y}) > 31u ? 0 : int(unsigned({x}) << ({y} & 31))"; } grad none;
    /// x shifted right by y bits, which copies the sign; −1 or 0, the sign alone, unless y is in
    /// 0..32
    ShiftRight "shift_right" Int(x, y) { i32: x >> if y as u32 > 31 { 31 } else { y }, "{x} >> (unsigned({y}) > 31u ? 31 : {y})"; } grad none;
    /// x where c, else y
    Select "select" Select(c, x, y) { any: if c != 0 { x } else { y }, "{c} ? {x} : {y}"; } grad [0.0, when(X, 1.0, 0.0), when(X, 0.0, 1.0)];
}

/// `x`; the others only matter to its derivative.
#[inline(always)]
fn first<T>(x: T, _: T, _: T) -> T {
    x
}

/// 0 where the arguments compare so, ½ where they are equal, else 1 (beside NaN as well): the
/// derivative of `min` and `max`.
fn share(loses: ScalarOp) -> Expr {
    let equal = call(ScalarOp::Eq, [Expr::X, Expr::Y]);
    when(call(loses, [Expr::X, Expr::Y]), 0.0, when(equal, 0.5, 1.0))
}

/// The second derivative of `gelu_tanh`: σ(1 − σ)·(2z′ + x·((1 − 2σ)·z′² + z″)) with σ = σ(z) and
/// z = √(8/π)·(x + 0.044715·x³).
fn gelu_tanh_curvature() -> Expr {
    const SCALE: f32 = math::SQRT_8_OVER_PI;
    const CUBIC: f32 = math::GELU_CUBIC;
    // Beyond ±11 the derivative is constant.
    let x = call(
        ScalarOp::Clamp,
        [Expr::X, Expr::from(-11.0), Expr::from(11.0)],
    );
    let square = x.clone() * x.clone();
    let z = x.clone() * (square.clone() * CUBIC + 1.0) * SCALE;
    let slope = (square * (3.0 * CUBIC) + 1.0) * SCALE;
    let curvature = x.clone() * (6.0 * CUBIC * SCALE);
    let s = call(ScalarOp::Sigmoid, [z]);
    let bend = (Expr::from(1.0) - s.clone() * 2.0) * slope.clone() * slope.clone() + curvature;
    s.clone() * (Expr::from(1.0) - s) * (slope * 2.0 + x * bend)
}

/// A coordinate divided by the square of the distance from the origin, where it is 0.
fn per_square(coordinate: Expr) -> Expr {
    let square = Expr::X * Expr::X + Expr::Y * Expr::Y;
    let origin = call(ScalarOp::Eq, [square.clone(), Expr::from(0.0)]);
    when(origin, 0.0, coordinate / square)
}

/// The integer part.
fn truncated(x: Expr) -> Expr {
    let below = call(ScalarOp::Lt, [x.clone(), Expr::from(0.0)]);
    when(
        below,
        call(ScalarOp::Ceil, [x.clone()]),
        call(ScalarOp::Floor, [x]),
    )
}

/// `a` where the condition holds, else `b`.
fn when(condition: Expr, a: impl Into<Expr>, b: impl Into<Expr>) -> Expr {
    call(ScalarOp::Select, [condition, a.into(), b.into()])
}

/// Evaluates an operation on single values.
struct Eval([u32; 3], Lane);

impl Visit for Eval {
    type Output = Value;
    fn visit<O: Lanewise>(self) -> Value {
        Value::of(O::apply::<Plain>(self.0.map(O::In::of)).bits(), self.1)
    }
}

impl ScalarOp {
    /// The operation on single values: the definition that kernels are tested against.
    ///
    /// # Panics
    /// If [`ScalarOp::lane`] does not accept the arguments.
    pub fn eval(self, args: &[Value]) -> Value {
        let lanes: SmallVec<[Lane; 3]> = args.iter().map(|a| a.lane()).collect();
        let Some(out) = self.lane(&lanes) else {
            panic!("{} does not take {args:?}", self.name())
        };
        let mut words = [0; 3];
        for (word, arg) in words.iter_mut().zip(args) {
            *word = arg.bits();
        }
        self.visit(lanes[lanes.len() - 1], Eval(words, out))
    }

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
            Class::Int => args.iter().all(|&l| l == Lane::I32).then_some(Lane::I32),
            Class::Logic => args.iter().all(|&l| l == Lane::Bool).then_some(Lane::Bool),
            Class::Select => (args[0] == Lane::Bool && same(&args[1..])).then_some(args[1]),
        }
    }
}
