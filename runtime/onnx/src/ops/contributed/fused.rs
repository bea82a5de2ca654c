//! Activations with a bias, and products and convolutions with an activation.

use slabwise::Tensor;

use super::super::elementwise::float;
use super::super::product::{conv, gemm, product};
use super::Run;
use crate::call::{Call, Results};

pub const OPERATORS: &[(&str, Run)] = &[
    ("BiasGelu", |c| c.same((c.float(0)? + c.float(1)?).gelu())),
    ("FastGelu", |c| {
        let x = c.float(0)?;
        let x = c.optional_float(1)?.map_or(x, |bias| x + bias);
        c.same(x.gelu_tanh())
    }),
    ("FusedConv", |c| {
        let y = conv(c)?;
        let [y] = &y[..] else {
            return Err("a convolution of one result is needed".into());
        };
        let y = y.traced(c.trace)?;
        let y = c.optional_float(3)?.map_or(y, |sum| y + sum);
        let numbers = c.float_list("activation_params").unwrap_or_default();
        c.same(activated(c, y, [0, 1].map(|at| numbers.get(at).copied()))?)
    }),
    ("FusedGemm", |c| {
        let y = gemm(c)?;
        let [y] = &y[..] else {
            return Err("a product of one result is needed".into());
        };
        let numbers = ["activation_alpha", "activation_beta"];
        let numbers = numbers.map(|name| c.has(name).then(|| c.f(name, 0.0)));
        c.same(activated(c, y.traced(c.trace)?, numbers)?)
    }),
    ("FusedMatMul", fused_product),
    ("Gelu", |c| float(c, Tensor::gelu)),
    ("QuickGelu", |c| {
        let alpha = c.f("alpha", 1.702);
        float(c, |x| x * (x * alpha).sigmoid())
    }),
    ("TransposeMatMul", fused_product),
];

/// The attribute `activation` of a call applied to its result. `numbers` are alpha and beta of the
/// activation where they are given, or the bounds of `Clip`.
fn activated<'t>(
    call: &Call<'_, 't>,
    x: Tensor<'t>,
    numbers: [Option<f32>; 2],
) -> Result<Tensor<'t>, String> {
    let number = |at: usize, default: f32| numbers[at].unwrap_or(default);
    Ok(match &*call.text("activation", "") {
        "" => x,
        "Clip" => x.clamp(number(0, f32::MIN), number(1, f32::MAX)),
        "Elu" => x.elu(number(0, 1.0)),
        "HardSigmoid" => (x * number(0, 0.2) + number(1, 0.5)).clamp(0.0, 1.0),
        "LeakyRelu" => x.leaky_relu(number(0, 0.01)),
        "Relu" => x.relu(),
        "Sigmoid" => x.sigmoid(),
        "Softplus" => x.softplus(),
        "Softsign" => x.softsign(),
        "Tanh" => x.tanh(),
        "ThresholdedRelu" => x.gt(number(0, 1.0)).select(x, 0.0),
        other => return Err(format!("activation \"{other}\"")),
    })
}

/// A product of operands that may be transposed, by a factor.
fn fused_product<'t>(call: &Call<'_, 't>) -> Results<'t> {
    let operand = |at: usize, last: &str, batch: &str| -> Result<Tensor<'t>, String> {
        let mut x = call.float(at)?;
        let rank = x.rank();
        if call.flag(batch) && rank > 2 {
            // The axis of the rows lies before those of the batch.
            x = x.movedim(0, rank - 2);
        }
        Ok(match call.flag(last) && rank > 1 {
            true => x.transpose(rank - 2, rank - 1),
            false => x,
        })
    };
    let a = operand(0, "transA", "transBatchA")?;
    let b = operand(1, "transB", "transBatchB")?;
    let alpha = call.f("alpha", 1.0);
    let y = product(a, b);
    call.same(if alpha == 1.0 { y } else { y * alpha })
}
