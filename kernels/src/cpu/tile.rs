//! The tile interpreter (element by element, until the real one takes its place).

use super::{Config, Launch, SpecError};
use crate::dtype::DType;
use crate::scalar::Value;
use crate::spec::{Inst, Spec};

/// Compiled code of a spec.
pub(crate) struct TileCode;

/// Code with its strides resolved.
pub(crate) struct Bound<'a> {
    spec: &'a Spec,
    launch: &'a Launch<'a>,
    first: usize,
}

// SAFETY: callers give disjoint blocks.
unsafe impl Sync for Bound<'_> {}

impl TileCode {
    pub fn new(spec: &Spec, _config: &Config) -> Result<TileCode, SpecError> {
        spec.lanes().map(|_| TileCode).ok_or_else(|| SpecError("lanes".into()))
    }
    pub fn scratch_bytes(&self) -> usize {
        0
    }
    pub fn bind<'a>(&'a self, spec: &'a Spec, launch: &'a Launch<'a>) -> Bound<'a> {
        Bound { spec, launch, first: spec.body.operands(&spec.dims).len() }
    }
}

impl Bound<'_> {
    /// # Safety
    /// See the contract.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn block(&self, origin: &[usize], row_axis: usize, rows: usize, cols: usize, acc: *const u32, acc_stride: usize, _scratch: *mut u8) {
        let spec = self.spec;
        let env = self.launch.env;
        if let ([Inst::Acc], [s]) = (&spec.code[..], &spec.stores[..]) {
            let o = &spec.operands[usize::from(s.operand)];
            let rank = origin.len();
            if o.strides[rank - 1].is(1) && row_axis == rank - 2 {
                let e = o.offset.at(env) + o.strides.iter().zip(origin).map(|(s, &c)| c as i64 * s.at(env)).sum::<i64>();
                let to = self.launch.args[self.first].cast::<u32>().wrapping_offset(e as isize);
                for r in 0..rows {
                    // SAFETY: inside the operand.
                    unsafe { to.wrapping_offset(r as isize * o.strides[row_axis].at(env) as isize).copy_from_nonoverlapping(acc.add(r * acc_stride), cols) };
                }
                return;
            }
        }
        let mut values = [Value::F32(0.0); 64];
        for r in 0..rows {
            let mut at = [0usize; 16];
            at[..origin.len()].copy_from_slice(origin);
            at[row_axis] += r;
            for c in 0..cols {
                let address = |k: u16| {
                    let o = &spec.operands[usize::from(k)];
                    let mut e = o.offset.at(env);
                    for (axis, s) in o.strides.iter().enumerate() {
                        e += at[axis] as i64 * s.at(env);
                    }
                    self.launch.args[self.first + usize::from(k)].wrapping_offset(e as isize * o.dtype.bytes() as isize)
                };
                for (i, inst) in spec.code.iter().enumerate() {
                    values[i] = match inst {
                        // SAFETY: inside the operand.
                        Inst::Load(k) => unsafe {
                            let p = address(*k);
                            match spec.operands[usize::from(*k)].dtype {
                                DType::F32 => Value::F32(p.cast::<f32>().read()),
                                DType::I32 => Value::I32(p.cast::<i32>().read()),
                                DType::U8 => Value::I32(p.read().into()),
                                DType::Bool => Value::Bool(p.read() != 0),
                            }
                        },
                        // SAFETY: inside the block.
                        Inst::Acc => Value::F32(f32::from_bits(unsafe { *acc.add(r * acc_stride + c) })),
                        Inst::Const(v) => *v,
                        Inst::Op(op, args) => {
                            let a = args.map(|a| values[usize::from(a)]);
                            op.eval(&a[..op.arity()])
                        }
                        Inst::Cast(a, lane) => values[usize::from(*a)].cast(*lane),
                        _ => unreachable!(),
                    };
                }
                for s in &spec.stores {
                    let p = address(s.operand);
                    // SAFETY: inside the operand.
                    unsafe {
                        match values[usize::from(s.value)] {
                            Value::F32(x) => p.cast::<f32>().write(x),
                            Value::I32(x) => p.cast::<i32>().write(x),
                            Value::Bool(x) => p.write(x.into()),
                        }
                    }
                }
                for axis in (row_axis + 1..origin.len()).rev() {
                    at[axis] += 1;
                    if at[axis] < spec.dims[axis].usize_at(env) {
                        break;
                    }
                    at[axis] = 0;
                }
            }
        }
    }
}
