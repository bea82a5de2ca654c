//! Order of nodes, and names that have two definitions.

use super::*;

/// `y` is -x, for positive x, through two nodes.
fn negated() -> [NodeProto; 2] {
    [node("Relu", &["x"], &["z"]), node("Neg", &["z"], &["y"])]
}

fn is_negated(graph: GraphProto) {
    let x = Array {
        element: Element::F32,
        shape: vec![2],
        data: Data::Float(vec![3.0, -4.0]),
    };
    let y = results(model(graph, 17), &[x]);
    assert_eq!(y[0].to_floats(), [-3.0, 0.0]);
}

/// A condition that holds, and a branch of these nodes for it.
fn branch(nodes: Vec<NodeProto>) -> (TensorProto, NodeProto) {
    let inner = |nodes| GraphProto {
        output: vec![floats("inner", &[])],
        ..graph(&[], nodes)
    };
    let other = inner(vec![node("Abs", &["x"], &["inner"])]);
    let chosen = with(
        node("If", &["true"], &["y"]),
        "then_branch",
        graph_attribute(inner(nodes)),
    );
    let chosen = with(chosen, "else_branch", graph_attribute(other));
    (bools("true", true), chosen)
}

#[test]
fn nodes_are_imported_after_those_they_read() {
    let [first, last] = negated();
    is_negated(graph(&["2"], vec![first.clone(), last.clone()]));
    is_negated(graph(&["2"], vec![last, first]));
}

#[test]
fn an_order_that_is_valid_is_kept() {
    let nodes = [
        node("Relu", &["x"], &["b"]),
        node("Abs", &["x"], &["a"]),
        node("Neg", &["b"], &["c"]),
        node("Add", &["a", "c"], &["y"]),
    ];
    let mut model = ModelProto {
        graph: Some(graph(&["2"], nodes.to_vec())),
        ..ModelProto::default()
    };
    crate::order::sort_model(&mut model).expect("a valid order");
    assert_eq!(model.graph.expect("a graph").node, nodes);
}

#[test]
fn long_chains_are_sorted() {
    let name = |at: usize| {
        if at == 0 {
            "y".into()
        } else {
            format!("n{at}")
        }
    };
    let many = 30_000;
    let read = |at: usize| {
        if at + 1 == many {
            "x".into()
        } else {
            name(at + 1)
        }
    };
    let nodes = (0..many).map(|at| node("Abs", &[&read(at)], &[&name(at)]));
    let mut model = ModelProto {
        graph: Some(graph(&["2"], nodes.collect())),
        ..ModelProto::default()
    };
    crate::order::sort_model(&mut model).expect("a chain");
    let sorted = model.graph.expect("a graph").node;
    assert_eq!(sorted[0].input, ["x"]);
    assert_eq!(sorted[many - 1].output, ["y"]);
}

#[test]
fn a_graph_inside_of_a_node_is_sorted_and_counts_as_a_reader() {
    let inner = vec![
        node("Neg", &["w"], &["inner"]),
        node("Identity", &["z"], &["w"]),
    ];
    let (condition, chosen) = branch(inner);
    let outer = vec![chosen, node("Relu", &["x"], &["z"])];
    is_negated(GraphProto {
        initializer: vec![condition],
        ..graph(&["2"], outer)
    });
}

#[test]
fn a_cycle_is_an_error_that_names_a_node() {
    let nodes = vec![
        node("Add", &["x", "b"], &["a"]),
        node("Relu", &["a"], &["b"]),
        node("Neg", &["b"], &["y"]),
    ];
    let error = failure(graph(&["2"], nodes), 17, &[]);
    assert!(
        error.contains("Relu \"Relu_b\" reads \"a\"") && error.contains("cycle"),
        "{error}"
    );
}

#[test]
fn a_tensor_that_nothing_defines_is_refused_by_name() {
    let nodes = vec![node("Relu", &["lost"], &["y"])];
    let error = failure(graph(&["2"], nodes), 17, &[]);
    let wanted = "Relu \"Relu_y\" (opset 17): reads \"lost\", which nothing defines";
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn a_name_of_two_nodes_is_an_error_that_names_both() {
    let nodes = vec![node("Relu", &["x"], &["y"]), node("Neg", &["x"], &["y"])];
    let error = failure(graph(&["2"], nodes), 17, &[]);
    let wanted = "\"y\" is defined by Relu \"Relu_y\" and by Neg \"Neg_y\"";
    assert!(error.contains(wanted), "{error}");
    let nodes = vec![node("Split", &["x"], &["y", "y"])];
    let error = failure(graph(&["2"], nodes), 17, &[]);
    assert!(error.contains("\"y\" is defined by Split"), "{error}");
}

#[test]
fn a_name_of_a_node_and_of_a_graph_is_an_error() {
    let nodes = vec![node("Relu", &["true"], &["x"]), node("Neg", &["x"], &["y"])];
    let error = failure(graph(&["2"], nodes), 17, &[]);
    let wanted = "\"x\" is defined by the graph's inputs and by Relu \"Relu_x\"";
    assert!(error.contains(wanted), "{error}");
    let weighted = GraphProto {
        initializer: vec![bools("z", true)],
        ..graph(&["2"], negated().to_vec())
    };
    let error = failure(weighted, 17, &[]);
    let wanted = "\"z\" is defined by an initializer and by Relu \"Relu_z\"";
    assert!(error.contains(wanted), "{error}");
}

#[test]
fn a_node_inside_of_a_node_may_not_define_a_name_that_it_sees() {
    let inner = |name: &str| {
        vec![
            node("Neg", &["x"], &[name]),
            node("Identity", &[name], &["inner"]),
        ]
    };
    let (condition, chosen) = branch(inner("z"));
    let outer = vec![node("Relu", &["x"], &["z"]), chosen];
    let whole = GraphProto {
        initializer: vec![condition],
        ..graph(&["2"], outer)
    };
    let error = failure(whole.clone(), 17, &[]);
    let wanted = "\"z\" is defined by Relu \"Relu_z\" and by Neg \"Neg_z\"";
    assert!(error.contains(wanted), "{error}");
    // Two branches do not see each other's names.
    let (_, apart) = branch(inner("v"));
    let mut other = whole;
    other.node[1] = apart;
    model(other, 17);
}
