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
