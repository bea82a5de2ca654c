//! Any bytes: a graph that is read from them in the format `remat-graph-v1` is sound, can be
//! ordered, and keeps its numbers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use slabwise_planner::remat_graph::RematGraph;

fuzz_target!(|bytes: &[u8]| {
    let Ok(graph) = RematGraph::read(bytes) else { return };
    let known = |ids: &[u32]| ids.iter().all(|&id| (id as usize) < graph.nodes.len());
    assert!(known(&graph.outputs));
    assert!(graph.nodes.iter().all(|n| known(&n.inputs) && known(&n.inplace) && known(&n.mutates)));
    for in_place in [false, true] {
        assert_eq!(graph.to_dag(in_place).dag.verify(), Ok(()));
    }
    let _ = (graph.fixed_bytes(), graph.base_cost());
});
