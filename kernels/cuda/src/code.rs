//! The straight-line program of a spec as CUDA statements for one point of its iteration space.
//!
//! The table gives the CUDA text of each operation ([`ScalarOp::cuda`]), and a row of [`Storage`]
//! that of loads and stores of each type. The loop around the program gives the addresses of
//! operands at a point: a [`Site`].

use std::collections::BTreeSet;
use std::fmt::Write as _;

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::spec::analysis::live_values;
use slabwise_kernels::spec::{Inst, ReduceOp, Spec, SpecError, Store, ValueId};

/// The representation of a type's elements in CUDA memory. In each text `{}` stands for the value.
#[derive(Clone, Copy, Debug)]
pub struct Storage {
    /// The type of an element.
    pub ty: &'static str,
    /// Converts an element to its lane.
    widen: &'static str,
    /// Converts a float to an element; narrow types saturate, and NaN becomes 0.
    from_float: &'static str,
    /// Converts an integer, or a truth value as 0 or 1, to an element; narrow types wrap.
    from_int: &'static str,
}

impl Storage {
    /// The representation of a type.
    pub fn of(dtype: DType) -> Storage {
        let row = |ty, widen, from_float, from_int| Storage {
            ty,
            widen,
            from_float,
            from_int,
        };
        match dtype {
            DType::F32 => row("float", "{}", "{}", "float({})"),
            DType::F16 => row(
                "f16",
                "widen({})",
                "narrow_f16({})",
                "narrow_f16(float({}))",
            ),
            DType::BF16 => row(
                "bf16",
                "widen({})",
                "narrow_bf16({})",
                "narrow_bf16(float({}))",
            ),
            DType::I32 => row("int", "{}", "__float2int_rz({})", "{}"),
            DType::U8 => row(
                "unsigned char",
                "int({})",
                "(unsigned char)min(__float2uint_rz({}), 255u)",
                "(unsigned char)({})",
            ),
            DType::Bool => row(
                "unsigned char",
                "({} != 0)",
                "(unsigned char)({} != 0.0f)",
                "(unsigned char)({} != 0)",
            ),
        }
    }

    /// The element `x` in its lane.
    pub fn widen(self, x: &str) -> String {
        self.widen.replace("{}", x)
    }

    /// The value `x` of a lane as an element.
    pub fn narrow(self, x: &str, lane: Lane) -> String {
        match lane {
            Lane::F32 => self.from_float.replace("{}", x),
            Lane::I32 => self.from_int.replace("{}", x),
            Lane::Bool => self.from_int.replace("{}", &format!("int({x})")),
        }
    }
}

/// The type of a lane's values.
pub fn lane_type(lane: Lane) -> &'static str {
    match lane {
        Lane::F32 => "float",
        Lane::I32 => "int",
        Lane::Bool => "bool",
    }
}

/// A number as an expression.
pub fn constant(value: Value) -> String {
    match value {
        Value::F32(x) if x.is_finite() => format!("{x:?}f"),
        Value::F32(x) => format!("__uint_as_float({:#x}u)", x.to_bits()),
        Value::I32(i32::MIN) => "(-2147483647 - 1)".into(),
        Value::I32(x) => x.to_string(),
        Value::Bool(x) => x.to_string(),
    }
}

/// A conversion between lanes, as [`Value::cast`] does it.
pub fn cast(x: &str, from: Lane, to: Lane) -> String {
    match (from, to) {
        (Lane::F32, Lane::I32) => format!("__float2int_rz({x})"),
        (Lane::F32, Lane::Bool) => format!("{x} != 0.0f"),
        (Lane::I32, Lane::F32) => format!("float({x})"),
        (Lane::I32, Lane::Bool) => format!("{x} != 0"),
        (Lane::Bool, Lane::F32) => format!("{x} ? 1.0f : 0.0f"),
        (Lane::Bool, Lane::I32) => format!("int({x})"),
        _ => x.into(),
    }
}

/// An operation on values that are names or numbers.
pub fn operation(op: ScalarOp, lane: Lane, args: &[String]) -> String {
    op.arguments()
        .iter()
        .zip(args)
        .fold(op.cuda(lane).to_string(), |text, (name, arg)| {
            text.replace(&format!("{{{name}}}"), arg)
        })
}

/// One point of the iteration space, named by the enclosing loop. Every method returns an
/// expression.
pub trait Site {
    /// The element of operand `k` to read, as stored.
    fn read(&self, k: u16) -> String;
    /// The element of operand `k` to write.
    fn write(&self, k: u16) -> String;
    /// The address of the seed and step in operand `k` (`const int*`).
    fn state(&self, k: u16) -> String;
    /// The integer of `Inst::Index(k)`.
    fn index(&self, k: u16) -> String;
    /// The anchor's value, in its lane.
    fn acc(&self) -> String {
        String::new()
    }
    /// The name of a value.
    fn value(&self, v: ValueId) -> String {
        format!("v{v}")
    }
}

/// The program of a spec.
pub struct Code<'a> {
    /// The spec.
    pub spec: &'a Spec,
    /// The lane of every value.
    pub lanes: Vec<Lane>,
    /// Whether a store depends on the value.
    pub needed: Vec<bool>,
    /// Whether the value exists once per point of the kept axes (per row, not per element).
    pub per_row: Vec<bool>,
}

impl<'a> Code<'a> {
    /// Validates the program.
    pub fn new(spec: &'a Spec) -> Result<Code<'a>, SpecError> {
        Ok(Code {
            spec,
            lanes: spec.check_code()?,
            needed: live_values(&spec.code, &spec.stores),
            per_row: spec.per_row(),
        })
    }

    /// The lane of a value.
    pub fn lane(&self, v: ValueId) -> Lane {
        self.lanes[usize::from(v)]
    }

    /// The storage of operand `k`.
    pub fn storage(&self, k: u16) -> Storage {
        Storage::of(self.spec.operands[usize::from(k)].dtype)
    }

    /// The instructions that stores depend on.
    pub fn needed(&self) -> impl Iterator<Item = usize> {
        (0..self.spec.code.len()).filter(|&i| self.needed[i])
    }

    /// Operands that are read per point, each once.
    pub fn loads(&self) -> Vec<u16> {
        self.distinct(|inst| match *inst {
            Inst::Load(k) => Some(k),
            _ => None,
        })
    }

    /// Indices that are needed, each once.
    pub fn indices(&self) -> Vec<u16> {
        self.distinct(|inst| match *inst {
            Inst::Index(k) => Some(k),
            _ => None,
        })
    }

    /// The numbers that `of` takes from the needed instructions, sorted, each once.
    fn distinct(&self, of: impl Fn(&Inst) -> Option<u16>) -> Vec<u16> {
        let numbers = self.needed().filter_map(|i| of(&self.spec.code[i]));
        numbers.collect::<BTreeSet<u16>>().into_iter().collect()
    }

    /// The expression of value `i`; not for reductions.
    pub fn expression(&self, i: usize, site: &dyn Site) -> String {
        match &self.spec.code[i] {
            Inst::Load(k) => self.storage(*k).widen(&site.read(*k)),
            Inst::Acc => site.acc(),
            Inst::Const(value) => constant(*value),
            Inst::Index(k) => site.index(*k),
            Inst::Uniform {
                state,
                stream,
                index,
            } => format!(
                "uniform({}, {stream}u, {})",
                site.state(*state),
                site.value(*index)
            ),
            Inst::Op(op, args) => {
                let names: Vec<String> =
                    args[..op.arity()].iter().map(|&a| site.value(a)).collect();
                operation(*op, self.lane(args[op.arity() - 1]), &names)
            }
            Inst::Cast(a, to) => cast(&site.value(*a), self.lane(*a), *to),
            Inst::Reduce(op, _) => unreachable!("{op:?} is not computed at a point"),
        }
    }

    /// The declaration of value `i`.
    pub fn statement(&self, i: usize, site: &dyn Site) -> String {
        format!(
            "const {} {} = {};\n",
            lane_type(self.lanes[i]),
            site.value(i as ValueId),
            self.expression(i, site)
        )
    }

    /// The statement of a store.
    pub fn store(&self, store: &Store, site: &dyn Site) -> String {
        let value = self
            .storage(store.operand)
            .narrow(&site.value(store.value), self.lane(store.value));
        format!("{} = {value};\n", site.write(store.operand))
    }

    /// The whole program at a point of a loop without reductions: every needed value, then the
    /// stores.
    pub fn point(&self, site: &dyn Site) -> String {
        let mut text = String::new();
        self.needed().for_each(|i| text += &self.statement(i, site));
        self.spec
            .stores
            .iter()
            .for_each(|s| text += &self.store(s, site));
        text
    }
}

/// A reduction in CUDA.
#[derive(Clone, Copy, Debug)]
pub struct Fold {
    op: ReduceOp,
    lane: Lane,
}

impl Fold {
    /// The reduction of values of a lane.
    pub fn new(op: ReduceOp, lane: Lane) -> Fold {
        Fold { op, lane }
    }

    /// Whether the result is a position.
    pub fn finds(self) -> bool {
        matches!(self.op, ReduceOp::ArgMax | ReduceOp::ArgMin)
    }

    /// The type of the accumulator.
    pub fn ty(self) -> &'static str {
        if self.finds() {
            "Rank"
        } else {
            lane_type(self.lane)
        }
    }

    /// The accumulator of zero elements.
    pub fn identity(self) -> String {
        let float = self.lane == Lane::F32;
        let of = |x: f32, i: i32| {
            if float {
                constant(Value::F32(x))
            } else {
                constant(Value::I32(i))
            }
        };
        match self.op {
            ReduceOp::Sum => of(0.0, 0),
            ReduceOp::Prod => of(1.0, 1),
            ReduceOp::Max => of(f32::NEG_INFINITY, i32::MIN),
            ReduceOp::Min => of(f32::INFINITY, i32::MAX),
            ReduceOp::Any => "false".into(),
            ReduceOp::All => "true".into(),
            ReduceOp::ArgMax | ReduceOp::ArgMin => "Rank{(-2147483647 - 1), 2147483647}".into(),
            ReduceOp::SquaredDeviations => unreachable!("no loop has {:?}", self.op),
        }
    }

    /// Combines two accumulators.
    pub fn join(self, a: &str, b: &str) -> String {
        let op = match self.op {
            ReduceOp::Sum => ScalarOp::Add,
            ReduceOp::Prod => ScalarOp::Mul,
            ReduceOp::Max => ScalarOp::Max,
            ReduceOp::Min => ScalarOp::Min,
            ReduceOp::Any => ScalarOp::Or,
            ReduceOp::All => ScalarOp::And,
            ReduceOp::ArgMax | ReduceOp::ArgMin => return format!("better({a}, {b})"),
            ReduceOp::SquaredDeviations => unreachable!("no loop has {:?}", self.op),
        };
        operation(op, self.lane, &[a.into(), b.into()])
    }

    /// The value `x` at `position` as an accumulator.
    pub fn lift(self, x: &str, position: &str) -> String {
        match self.op {
            ReduceOp::ArgMax => format!("Rank{{rank_largest({x}), int({position})}}"),
            ReduceOp::ArgMin => format!("Rank{{rank_smallest({x}), int({position})}}"),
            _ => x.into(),
        }
    }

    /// The result; for zero elements, the best one is reported at position 0.
    pub fn result(self, acc: &str) -> String {
        if self.finds() {
            format!("{acc}.position == 2147483647 ? 0 : {acc}.position")
        } else {
            acc.into()
        }
    }
}

/// The text with indented blocks, for reading.
pub fn indented(text: &str) -> String {
    let mut out = String::new();
    let mut depth = 0usize;
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let own = depth.saturating_sub(usize::from(line.starts_with('}')));
        let _ = writeln!(out, "{:1$}{line}", "", 4 * own);
        depth = (depth + line.matches('{').count()).saturating_sub(line.matches('}').count());
    }
    out
}
