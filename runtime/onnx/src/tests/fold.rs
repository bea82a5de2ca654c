//! Constants that are computed when the program is built, and the reasons why others are not.

use super::*;

/// A model that expands `one` to the shape that these nodes compute as the scalar `n`, with vectors
/// `f` of floats and `i` of integers.
fn expanded(mut nodes: Vec<NodeProto>) -> GraphProto {
    let cast = with(node("Cast", &["n"], &["whole"]), "to", int(INT.into()));
    let lift = node("Unsqueeze", &["whole", "zero"], &["shape"]);
    let expand = node("Expand", &["x", "shape"], &["y"]);
    nodes.extend([cast, lift, expand]);
    GraphProto {
        initializer: vec![ints("zero", &[0]), ints("i", &[3, 2, 4])],
        ..graph(&["1"], nodes)
    }
}

fn shape_of_result(nodes: Vec<NodeProto>) -> Vec<usize> {
    let one = counted(&[1]);
    results(model(expanded(nodes), 14), &[one])[0].shape.clone()
}

/// The vector `i`, as floats.
fn as_floats() -> NodeProto {
    with(node("Cast", &["i"], &["f"]), "to", int(FLOAT.into()))
}

fn reduced(operator: &str, of: &str) -> NodeProto {
    with(node(operator, &[of], &["n"]), "keepdims", int(0))
}

/// A node with another result.
fn into(node: NodeProto, output: &str) -> NodeProto {
    NodeProto {
        output: vec![output.into()],
        ..node
    }
}

#[test]
fn reductions_of_vectors() {
    for (operator, n) in [
        ("ReduceMax", 4),
        ("ReduceMin", 2),
        ("ReduceProd", 24),
        ("ReduceSum", 9),
        ("ReduceMean", 3),
    ] {
        let of_floats = vec![as_floats(), reduced(operator, "f")];
        assert_eq!(shape_of_result(of_floats), [n], "{operator}");
        if operator != "ReduceMean" {
            assert_eq!(
                shape_of_result(vec![reduced(operator, "i")]),
                [n],
                "{operator}"
            );
        }
    }
}

/// An array without elements may have lengths that no loop ends at.
#[test]
fn arrays_of_absurd_lengths_without_elements_are_folded() {
    let hollow = TensorProto {
        dims: vec![1 << 62, 1, 0],
        ..ints("hollow", &[])
    };
    let scalar = |name: &str, value: i64| TensorProto {
        dims: Vec::new(),
        ..ints(name, &[value])
    };
    for (operator, inputs, attribute) in [
        ("Gather", &["hollow", "zero"][..], Some(("axis", 1))),
        ("Concat", &["hollow", "hollow"], Some(("axis", 1))),
        ("Slice", &["hollow", "zeros", "ones", "axes"], None),
    ] {
        let mut first = node(operator, inputs, &["empty"]);
        if let Some((name, value)) = attribute {
            first = with(first, name, int(value));
        }
        let nodes = vec![
            first,
            node("Shape", &["empty"], &["lengths"]),
            node("Gather", &["lengths", "last"], &["n"]),
            node("Add", &["n", "one"], &["m"]),
            node("Reshape", &["m", "ones"], &["shape"]),
            node("Expand", &["x", "shape"], &["y"]),
        ];
        let graph = GraphProto {
            initializer: vec![
                hollow.clone(),
                scalar("zero", 0),
                scalar("one", 1),
                scalar("last", -1),
                ints("zeros", &[0]),
                ints("ones", &[1]),
                ints("axes", &[1]),
            ],
            ..graph(&["1"], nodes)
        };
        let y = results(model(graph, 14), &[counted(&[1])]);
        assert_eq!(y[0].shape, [1], "{operator}");
    }
}

/// A constant that is not a number is the extreme, as it is in a kernel.
#[test]
fn extremes_of_numbers_that_are_none() {
    for operator in ["Max", "Min", "ReduceMax", "ReduceMin"] {
        for values in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            let nodes = match operator.starts_with("Reduce") {
                true => vec![
                    with(node("Concat", &["a", "b"], &["both"]), "axis", int(0)),
                    reduced(operator, "both"),
                ],
                false => vec![node(operator, &["a", "b"], &["n"])],
            };
            let add = node("Add", &["x", "n"], &["y"]);
            let graph = GraphProto {
                initializer: vec![
                    weight("a", &[1], &values[..1]),
                    weight("b", &[1], &values[1..]),
                ],
                ..graph(&["1"], nodes.into_iter().chain([add]).collect())
            };
            let y = results(model(graph, 14), &[counted(&[1])]);
            assert!(y[0].to_floats()[0].is_nan(), "{operator} {values:?}");
        }
    }
}

/// Integers are kept as i64.
#[test]
fn integers_beyond_i64_are_refused() {
    let of = |tensor: TensorProto| {
        let cast = with(node("Cast", &["large"], &["f"]), "to", int(FLOAT.into()));
        GraphProto {
            initializer: vec![tensor],
            ..graph(&["1"], vec![cast, node("Add", &["x", "f"], &["y"])])
        }
    };
    let large = |value: u64| TensorProto {
        dims: vec![1],
        data_type: 13,
        uint64_data: vec![value],
        name: "large".into(),
        ..TensorProto::default()
    };
    let raw = |value: u64| TensorProto {
        uint64_data: Vec::new(),
        raw_data: Some(value.to_le_bytes().to_vec().into()),
        ..large(0)
    };
    for tensor in [large(u64::MAX), raw(u64::MAX)] {
        let error = failure(of(tensor), 14, &[]);
        let wanted = "tensor \"large\" of uint64 [1] has the value 18446744073709551615, beyond the largest i64";
        assert!(error.contains(wanted), "{error}");
    }
    for tensor in [large(1 << 40), raw(1 << 40)] {
        let y = results(model(of(tensor), 14), &[counted(&[1])]);
        assert!(y[0].to_floats()[0] > 1e12);
    }
}

#[test]
fn reciprocals() {
    // 24 · (1/3 + 1/2 + 1/4) = 26.
    let nodes = vec![
        as_floats(),
        node("Reciprocal", &["f"], &["parts"]),
        into(reduced("ReduceProd", "f"), "all"),
        into(reduced("ReduceSum", "parts"), "sum"),
        node("Mul", &["all", "sum"], &["product"]),
        node("Round", &["product"], &["n"]),
    ];
    assert_eq!(shape_of_result(nodes), [26]);
}

#[test]
fn the_node_that_is_not_folded_is_named() {
    let nodes = vec![
        as_floats(),
        node("Sin", &["f"], &["waves"]),
        node("Neg", &["waves"], &["more"]),
        reduced("ReduceSum", "more"),
    ];
    let error = failure(expanded(nodes), 14, &[]);
    let wanted = "must be known when the program is built, and is computed by Sin \"Sin_waves\"";
    assert!(error.contains(wanted), "{error}");
    assert!(!error.contains("--input"), "{error}");
}

#[test]
fn lengths_that_are_not_folded_are_named_with_the_node() {
    let nodes = vec![
        node("Shape", &["x"], &["lengths"]),
        with(node("Cast", &["lengths"], &["f"]), "to", int(FLOAT.into())),
        reduced("ReduceSum", "f"),
    ];
    let mut whole = expanded(nodes);
    whole.input = vec![floats("x", &["batch"])];
    let error = failure(whole, 14, &[("batch", Dim::bounded("batch", 8))]);
    let wanted = "is computed from lengths: batch in Cast \"Cast_f\"";
    assert!(error.contains(wanted), "{error}");
    assert!(error.ends_with("(--dim batch=N)"), "{error}");
}

#[test]
fn an_input_without_a_value_is_suggested() {
    let nodes = vec![
        node("Sin", &["x"], &["waves"]),
        reduced("ReduceSum", "waves"),
    ];
    let error = failure(expanded(nodes), 14, &[]);
    assert!(error.contains("(--input)"), "{error}");
}
