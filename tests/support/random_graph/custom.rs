//! Kernels of the user.

use half::{bf16, f16};
use slabwise_compiler::ops::{GraphBuilder, Op};
use slabwise_kernels::custom::CustomKernel;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::scalar::ScalarOp;

use super::Maker;

/// The elements from the last to the first.
pub fn reversed(dtype: DType) -> CustomKernel {
    CustomKernel::new("reversed", [dtype], dtype, move |run| {
        macro_rules! reverse {
            ($ty:ty) => {{
                let x = run.input::<$ty>(0);
                run.parts(7, |part, to: &mut [$ty]| {
                    for (k, to) in to.iter_mut().enumerate() {
                        *to = x[x.len() - 1 - (7 * part + k)];
                    }
                });
            }};
        }
        match dtype {
            DType::F32 => reverse!(f32),
            DType::F16 => reverse!(f16),
            DType::BF16 => reverse!(bf16),
            DType::I32 => reverse!(i32),
            DType::U8 | DType::Bool => reverse!(u8),
        }
    })
    .with_cuda("for (idx i = thread; i < out_count; i += threads) out[i] = in0[out_count - 1 - i];")
}

impl Maker {
    pub(super) fn custom(&mut self) -> Option<()> {
        let x = self.find(|g, id, _| g.dtype(id) != DType::Bool)?;
        let (of, dtype, dims) = (self.of(x), self.g.dtype(x), self.g.dims(x).clone());
        let y = self.g.emit(Op::Custom(reversed(dtype)), &[x], dtype, dims);
        // It has no gradient.
        let y = match dtype.is_float() {
            true => self.g.scalar(ScalarOp::Detach, &[y]),
            false => y,
        };
        self.keep(y, of.bound, of.exact);
        Some(())
    }
}
