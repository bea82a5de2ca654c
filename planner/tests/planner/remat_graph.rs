//! Graph files: accepted content, rejected content with its error texts, and the planner's problem
//! of a graph.

use slabwise_planner::DagError;
use slabwise_planner::remat_graph::{
    GraphError, RematGraph, Step, order_json, steps_in_place, steps_json,
};

/// A graph of nodes, each the inside of a JSON object.
fn graph(nodes: &[&str], outputs: &str) -> Result<RematGraph, GraphError> {
    let nodes: Vec<String> = nodes
        .iter()
        .enumerate()
        .map(|(i, node)| format!("{{\"name\":\"n{i}\",{node}}}"))
        .collect();
    let text = format!(
        "{{\"format\":\"remat-graph-v1\",\"name\":\"g\",\"nodes\":[{}],\"outputs\":{outputs}}}",
        nodes.join(",")
    );
    RematGraph::read(text.as_bytes())
}

fn refused(nodes: &[&str], outputs: &str) -> String {
    graph(nodes, outputs).expect_err("refused").to_string()
}

#[test]
fn a_graph_is_read_whole() {
    let nodes = [
        r#""inputs":[],"bytes":400,"persistent":true"#,
        r#""inputs":[0],"bytes":100,"flops":3,"cost":5.0,"workspace":7"#,
        r#""inputs":[1,1,0],"bytes":100,"cost":2,"inplace":[1,0],"phase":"bwd","other":null"#,
        r#""inputs":[0,2],"bytes":0,"mutates":[0],"recompute":false"#,
    ];
    let graph = graph(&nodes, "[2,0,2]").expect("a valid graph");
    assert_eq!(
        (graph.name.as_str(), graph.fixed_bytes(), graph.base_cost()),
        ("g", 400, 7)
    );
    assert_eq!(graph.outputs, [0, 2]);
    assert_eq!(graph.nodes[2].inputs, [0, 1]);
    assert_eq!(
        graph.nodes[2].inplace,
        [1],
        "a persistent buffer is never taken over"
    );
    assert_eq!(
        (
            graph.nodes[1].workspace,
            graph.nodes[1].recompute,
            graph.nodes[3].recompute
        ),
        (7, true, false)
    );
    assert_eq!(graph.mutation_order(), [(1, 3), (2, 3)]);
    let in_place = graph.to_dag(true);
    assert_eq!(
        (in_place.dag.tasks.len(), in_place.dag.may_reuse.len()),
        (3, 1)
    );
    assert_eq!(
        (in_place.node_of_task, in_place.task_of_node[0]),
        (vec![1, 2, 3], None)
    );
    assert!(graph.to_dag(false).dag.may_reuse.is_empty());
    let reuse = Step::Compute {
        node: 2,
        reuse: Some(1),
    };
    let plain = |node| Step::Compute { node, reuse: None };
    let steps = steps_in_place(&graph, &[1, 2, 3]);
    assert_eq!(steps, [plain(1), reuse, plain(3), Step::Free(3)]);
    assert_eq!(
        steps_json(&steps),
        r#"{"steps":[{"c":1},{"c":2,"reuse":1},{"c":3},{"f":3}]}"#
    );
    assert_eq!(order_json(&[1, 2, 3]), r#"{"order":[1,2,3]}"#);
}

#[test]
fn each_kind_of_invalid_file_has_its_error() {
    let read = |text: &str| {
        RematGraph::read(text.as_bytes())
            .expect_err(text)
            .to_string()
    };
    assert!(read("").starts_with("not JSON") && read("{\"nodes\":[").contains("line 1"));
    assert_eq!(read("[]"), "a graph is a JSON object");
    assert!(read("{}").contains("there is no \"format\""));
    assert!(
        read(r#"{"format":"remat-graph-v2"}"#)
            .contains("\"remat-graph-v2\", not \"remat-graph-v1\"")
    );
    assert!(read(r#"{"format":"remat-graph-v1"}"#).contains("\"nodes\""));
    assert!(read(r#"{"format":"remat-graph-v1","nodes":[]}"#).contains("\"outputs\""));
    assert!(read(r#"{"format":"remat-graph-v1","nodes":[3],"outputs":[]}"#).contains("node 0"));
    assert!(
        read(&"[".repeat(1000)).starts_with("not JSON"),
        "nesting is bounded"
    );
    assert!(matches!(
        RematGraph::read(&[0x1f, 0x8b, 8, 0]),
        Err(GraphError::Gzip(_))
    ));
    let empty = graph(&[], "[]").expect("nothing is a graph");
    assert!(empty.nodes.is_empty());
}

#[test]
fn a_faulty_node_is_named() {
    let fine = r#""bytes":1,"inputs":[]"#;
    for (node, says) in [
        (r#""inputs":[]"#, "node 1 `n1`: there is no \"bytes\""),
        (r#""bytes":-4"#, "node 1 `n1`: \"bytes\" is -4"),
        (r#""bytes":1.5"#, "\"bytes\" is 1.5"),
        (
            r#""bytes":18446744073709551616"#,
            "not a whole number from 0 to 2^64-1",
        ),
        (r#""bytes":1,"workspace":"4""#, "\"workspace\" is \"4\""),
        (r#""bytes":1,"cost":-1"#, "\"cost\" is -1"),
        (r#""bytes":1,"inputs":3"#, "\"inputs\" is not a list"),
        (
            r#""bytes":1,"inputs":[0,9]"#,
            "\"inputs\" names 9, which is none of the 3 nodes",
        ),
        (r#""bytes":1,"inputs":[-1]"#, "\"inputs\" names -1"),
        (r#""bytes":1,"inplace":[5]"#, "\"inplace\" names 5"),
        (r#""bytes":1,"persistent":1"#, "\"persistent\" is 1"),
        (
            r#""bytes":1,"mutates":[0]"#,
            "it changes node 0 `n0`, which is not persistent",
        ),
        (
            r#""bytes":1,"persistent":true,"mutates":[1]"#,
            "it is persistent and never runs",
        ),
        (
            r#""bytes":1,"inputs":[2]"#,
            "node 1 `n1`: it reads node 2 `n2`, which stands after it",
        ),
        (
            r#""bytes":18446744073709551615"#,
            "node 1 `n1`: with its 18446744073709551615, the sum of bytes",
        ),
        (
            r#""bytes":1,"workspace":18446744073709551615"#,
            "node 1 `n1`: with its 18446744073709551615",
        ),
        (
            r#""bytes":1,"cost":18446744073709551615"#,
            "node 2 `n2`: with its 7, the sum of costs",
        ),
    ] {
        let why = refused(&[fine, node, r#""bytes":1,"inputs":[],"cost":7"#], "[]");
        assert!(why.contains(says), "{why}\nlacks {says}");
    }
    assert!(refused(&[fine], "[1]").contains("output 1 is none of the 1 nodes"));
}

#[test]
fn cycles_are_named() {
    let cycle = |error: GraphError| match error {
        GraphError::Dag(DagError::Cycle { tasks }) => tasks,
        other => panic!("{other}"),
    };
    let read = graph(
        &[r#""bytes":1,"inputs":[1]"#, r#""bytes":1,"inputs":[0]"#],
        "[]",
    );
    assert_eq!(cycle(read.expect_err("a cycle")).len(), 2);
    // The third reads the buffer that the second changes, and the second must be last.
    let weight = r#""bytes":1,"persistent":true"#;
    let update = r#""bytes":0,"inputs":[0],"mutates":[0]"#;
    let after = graph(&[weight, update, r#""bytes":1,"inputs":[0,1]"#], "[2]");
    assert_eq!(cycle(after.expect_err("no order is possible")).len(), 2);
    let twice = cycle(
        graph(&[weight, update, update], "[]")
            .expect_err("each reads a buffer that the other has changed"),
    );
    assert!(
        twice.len() == 2 && ["n1", "n2"].iter().all(|n| twice.contains(&n.to_string())),
        "{twice:?}"
    );
    let own = refused(&[r#""bytes":1,"inputs":[0]"#], "[]");
    assert_eq!(own, "node 0 `n0`: it reads its own result");
    // One node reads and changes it, the other only overwrites it afterwards.
    let both = graph(
        &[weight, r#""bytes":0,"inputs":[],"mutates":[0]"#, update],
        "[]",
    )
    .expect("an order exists");
    assert_eq!(both.mutation_order(), [(2, 1)]);
}

/// The largest number of bytes that this process has had in memory, if the system tells.
fn most_bytes_in_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[test]
fn small_files_take_no_gigabytes() {
    let in_memory = || {
        if let Some(most) = most_bytes_in_memory() {
            assert!(most < 1 << 30, "{most} bytes");
        }
    };
    // The largest text there may be, of the values that take the most memory for their length. It
    // compresses to less than 100 kB.
    let file = |start: &str, item: &str, most: usize| {
        let items = most.min((64 << 20) / item.len() - 32);
        [start, &item.repeat(items), "0]}"].concat()
    };
    let start = r#"{"format":"remat-graph-v1","outputs":[],"nodes":["#;
    let labels = file(&format!(r#"{start}],"x":["#), r#"{"":0},"#, usize::MAX);
    let graph = RematGraph::read(labels.as_bytes()).expect("labels are ignored");
    assert!(graph.nodes.is_empty());
    in_memory();
    for item in [r#"{"bytes":0},"#, "0,"] {
        let nodes = file(start, item, 1_000_001);
        let why = RematGraph::read(nodes.as_bytes()).expect_err("too many nodes");
        assert_eq!(
            why.to_string(),
            "there are more than 1000000 nodes, which is the most a graph may have"
        );
    }
    in_memory();
}
