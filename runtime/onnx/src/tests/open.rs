//! Operators that a batch of bounded length passes through: the numbers are those of a fixed batch.

use super::*;

const BOUND: u32 = 4;

/// Runs a model at several batches, bounded and fixed.
fn is_same_bounded(graph: &GraphProto, opset: i64, inputs: impl Fn(usize) -> Vec<Array>) {
    for batch in [1, 3, BOUND as usize] {
        let with = |dim: Dim| {
            let model = model(graph.clone(), opset).with_dim("batch", dim);
            results(model, &inputs(batch))
        };
        let fixed = with(Dim::from(batch));
        assert_eq!(fixed[0].shape[0], batch);
        let values = fixed[0].to_floats();
        assert!(values.iter().any(|&v| v != values[0]), "{values:?}");
        assert_eq!(with(Dim::bounded("batch", BOUND)), fixed);
    }
}

/// [`is_same_bounded`] for one node that reads `x`, of these lengths behind the batch, and weights.
fn passes(node: NodeProto, opset: i64, rest: &[usize], weights: Vec<TensorProto>) {
    let names: Vec<String> = rest.iter().map(usize::to_string).collect();
    let lengths: Vec<&str> = ["batch"]
        .into_iter()
        .chain(names.iter().map(|n| &**n))
        .collect();
    let graph = GraphProto {
        initializer: weights,
        ..graph(&lengths, vec![node])
    };
    let x = |batch: usize| vec![counted(&[&[batch], rest].concat())];
    is_same_bounded(&graph, opset, x);
}

#[test]
fn softmax_before_opset_13() {
    for operator in ["Softmax", "LogSoftmax", "Hardmax"] {
        for axis in [1, 2, 3] {
            let softmax = with(node(operator, &["x"], &["y"]), "axis", int(axis));
            passes(softmax, 11, &[4, 3, 5], vec![]);
        }
    }
    passes(node("Hardmax", &["x"], &["y"]), 13, &[4, 3, 5], vec![]);
}

#[test]
fn resize() {
    let scales = weight("s", &[4], &[1.0, 1.0, 2.0, 1.5]);
    for (mode, coordinates) in [
        ("linear", "half_pixel"),
        ("nearest", "asymmetric"),
        ("linear", "align_corners"),
    ] {
        let resize = with(node("Resize", &["x", "", "s"], &["y"]), "mode", text(mode));
        let resize = with(resize, "coordinate_transformation_mode", text(coordinates));
        passes(resize, 17, &[2, 5, 6], vec![scales.clone()]);
    }
    let upsample = node("Upsample", &["x", "s"], &["y"]);
    passes(upsample, 9, &[2, 5, 6], vec![scales]);
}

#[test]
fn resize_to_sizes_that_follow_from_the_input() {
    let shape = with(node("Shape", &["x"], &["lead"]), "end", int(2));
    let all = with(
        node("Concat", &["lead", "image"], &["sizes"]),
        "axis",
        int(0),
    );
    let resize = node("Resize", &["x", "", "", "sizes"], &["y"]);
    let graph = GraphProto {
        initializer: vec![ints("image", &[7, 3])],
        ..graph(&["batch", "2", "5", "6"], vec![shape, all, resize])
    };
    is_same_bounded(&graph, 17, |batch| vec![counted(&[batch, 2, 5, 6])]);
}

#[test]
fn transposed_convolution() {
    let w = counted(&[4, 3, 2, 2]).to_floats();
    let w: Vec<f32> = w.into_iter().map(|v| v as f32).collect();
    let weights = vec![weight("w", &[4, 3, 2, 2], &w)];
    let plain = || {
        let conv = node("ConvTranspose", &["x", "w"], &["y"]);
        with(conv, "strides", int_list(&[2, 2]))
    };
    passes(plain(), 17, &[4, 5, 6], weights.clone());
    let same = with(plain(), "auto_pad", text("SAME_UPPER"));
    passes(same, 17, &[4, 5, 6], weights.clone());
    let wanted = with(plain(), "output_shape", int_list(&[9, 11]));
    passes(wanted, 17, &[4, 5, 6], weights);
}

#[test]
fn transposed_convolution_of_volumes() {
    let taps = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let conv = node("ConvTranspose", &["x", "w", "b"], &["y"]);
    let conv = with(conv, "strides", int_list(&[2, 2, 2]));
    let weights = vec![
        weight("w", &[1, 1, 2, 2, 2], &taps),
        weight("b", &[1], &[0.5]),
    ];
    passes(conv.clone(), 17, &[1, 2, 3, 2], weights.clone());
    // Windows do not overlap: each element scales a copy of the kernel.
    let whole = GraphProto {
        initializer: weights,
        ..graph(&["1", "1", "2", "3", "2"], vec![conv])
    };
    let x = counted(&[1, 1, 2, 3, 2]);
    let y = results(model(whole, 17), std::slice::from_ref(&x));
    assert_eq!(y[0].shape, [1, 1, 4, 6, 4]);
    let x = x.to_floats();
    let expected = (0..4 * 6 * 4).map(|i| {
        let (d, h, w) = (i / 24, i / 4 % 6, i % 4);
        let tap = taps[d % 2 * 4 + h % 2 * 2 + w % 2];
        x[d / 2 * 6 + h / 2 * 2 + w / 2] * f64::from(tap) + 0.5
    });
    assert_eq!(y[0].to_floats(), expected.collect::<Vec<f64>>());
}

#[test]
fn pools_of_volumes() {
    for operator in ["MaxPool", "AveragePool"] {
        let pool = with(
            node(operator, &["x"], &["y"]),
            "kernel_shape",
            int_list(&[2, 2, 2]),
        );
        let pool = with(pool, "strides", int_list(&[2, 1, 2]));
        passes(pool, 17, &[3, 4, 5, 6], vec![]);
    }
}

#[test]
fn group_normalization() {
    let group = with(
        node("GroupNormalization", &["x", "s", "b"], &["y"]),
        "num_groups",
        int(2),
    );
    let weights = vec![
        weight("s", &[4], &[1.0, 2.0, 0.5, 1.5]),
        weight("b", &[4], &[0.0, 0.25, 0.5, 1.0]),
    ];
    passes(group, 21, &[4, 5, 6], weights);
}

#[test]
fn gather_nd_of_examples() {
    // Of each example, and across examples: the last index counts from the end of the batch.
    let inside = with(node("GatherND", &["x", "i"], &["y"]), "batch_dims", int(1));
    let rows = node("GatherND", &["x", "j"], &["picked"]);
    let sum = node("ReduceSum", &["picked"], &["sum"]);
    let lift = node("Add", &["inside", "sum"], &["y"]);
    let inside = NodeProto {
        output: vec!["inside".into()],
        ..inside
    };
    let mut index = floats("i", &["batch", "2", "1"]);
    if let Some(tensor) = index.r#type.as_mut().and_then(|t| t.tensor_type.as_mut()) {
        tensor.elem_type = INT;
    }
    let mut whole = GraphProto {
        initializer: vec![ints("j", &[0, 1, -1, -2])],
        ..graph(&["batch", "4"], vec![inside, rows, sum, lift])
    };
    whole.initializer[0].dims = vec![2, 2];
    whole.input.push(index);
    is_same_bounded(&whole, 17, |batch| {
        let places = (0..2 * batch as i64).map(|i| -i % 4);
        let index = Array::ints(vec![batch, 2, 1], places.collect());
        vec![counted(&[batch, 4]), index]
    });
}

#[test]
fn attention_with_a_mask() {
    let whole = GraphProto {
        input: vec![
            floats("x", &["batch", "4", "3", "8"]),
            floats("m", &["batch", "1", "3", "3"]),
        ],
        ..graph(&[], vec![node("Attention", &["x", "x", "x", "m"], &["y"])])
    };
    is_same_bounded(&whole, 23, |batch| {
        vec![counted(&[batch, 4, 3, 8]), counted(&[batch, 1, 3, 3])]
    });
    let flat = with(
        node("Attention", &["x", "x", "x", "m"], &["y"]),
        "q_num_heads",
        int(4),
    );
    let flat = with(flat, "kv_num_heads", int(4));
    let whole = GraphProto {
        input: vec![
            floats("x", &["batch", "3", "8"]),
            floats("m", &["batch", "1", "3", "3"]),
        ],
        ..graph(&[], vec![flat])
    };
    is_same_bounded(&whole, 23, |batch| {
        vec![counted(&[batch, 3, 8]), counted(&[batch, 1, 3, 3])]
    });
}

#[test]
fn rotary_embedding() {
    let [cos, sin] = ["cos", "sin"].map(|name| {
        let table: Vec<f32> = (0..12).map(|i| (i as f32).cos()).collect();
        weight(name, &[6, 2], &table)
    });
    let rotary = node("RotaryEmbedding", &["x", "cos", "sin", "places"], &["y"]);
    let mut places = floats("places", &["batch", "3"]);
    if let Some(tensor) = places.r#type.as_mut().and_then(|t| t.tensor_type.as_mut()) {
        tensor.elem_type = INT;
    }
    let mut whole = GraphProto {
        initializer: vec![cos, sin],
        ..graph(&["batch", "2", "3", "4"], vec![rotary])
    };
    whole.input.push(places);
    is_same_bounded(&whole, 23, |batch| {
        let places = (0..3 * batch as i64).map(|i| i % 6);
        let places = Array::ints(vec![batch, 3], places.collect());
        vec![counted(&[batch, 2, 3, 4]), places]
    });
}

#[test]
fn linear_attention_and_its_convolution() {
    let linear = with(
        node("LinearAttention", &["x", "x", "x"], &["y"]),
        "update_rule",
        text("linear"),
    );
    let linear = with(linear, "q_num_heads", int(2));
    let linear = with(linear, "kv_num_heads", int(2));
    passes(linear, 27, &[3, 8], vec![]);
    let taps: Vec<f32> = (0..6u8).map(f32::from).collect();
    let conv = node("CausalConvWithState", &["x", "w"], &["y", "state"]);
    passes(conv, 27, &[2, 5], vec![weight("w", &[2, 1, 3], &taps)]);
}

#[test]
fn the_mask_of_dropout() {
    let drop = node("Dropout", &["x"], &["y", "mask"]);
    let mut whole = graph(&["batch", "40"], vec![drop]);
    whole.output.push(floats("mask", &[]));
    is_same_bounded(&whole, 13, |batch| vec![counted(&[batch, 40])]);
}
