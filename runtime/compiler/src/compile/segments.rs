//! Scans of segments: under a budget, a scan keeps the carries at intervals of several steps for
//! its backward pass, which recomputes the steps between them.
//!
//! A scan and the scan of its gradient become scans over segments, each with a scan over the steps
//! of a segment inside. About the square root of the number of steps as their length keeps the
//! fewest carries (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). The same
//! steps run in the same order, so that no bit of a result changes.

use rustc_hash::FxHashMap;
use slabwise_kernels::size::Size;
use slabwise_kernels::spec::{Dims, MAX_ARGUMENTS};

use crate::graph::{Body, BodyBuilder, Feed, Graph};
use crate::ops::{GraphBuilder, NodeId, Op};

/// A scan, and the scan that reads its carries.
struct Pair {
    forward: NodeId,
    backward: NodeId,
    /// Steps in a segment.
    length: u32,
}

/// The graph with scans over segments, where a scan keeps carries for a backward pass alone; `None`
/// if it has none.
pub(super) fn segmented(graph: &Graph) -> Option<Graph> {
    let pairs = pairs(graph);
    if pairs.is_empty() {
        return None;
    }
    let mut rebuilt = Rebuilt {
        old: graph,
        out: Graph {
            nodes: Vec::with_capacity(graph.nodes.len()),
            ..graph.clone()
        },
        map: Vec::with_capacity(graph.nodes.len()),
        made: FxHashMap::default(),
    };
    for id in graph.ids() {
        rebuilt.out.current_origin = graph.node(id).origin;
        let of = |scan: fn(&Pair) -> NodeId| pairs.iter().find(|pair| scan(pair) == id);
        let mapped = if let Some(pair) = of(|pair| pair.forward) {
            rebuilt.forward(pair)?
        } else if let Some(pair) = of(|pair| pair.backward) {
            rebuilt.backward(pair)?
        } else {
            rebuilt.other(id)?
        };
        rebuilt.map.push(mapped);
    }
    let Rebuilt { mut out, map, .. } = rebuilt;
    out.outputs.iter_mut().for_each(|id| *id = map[id.at()]);
    out.kept.iter_mut().for_each(|id| *id = map[id.at()]);
    Some(out)
}

/// The scans that are divided.
fn pairs(graph: &Graph) -> Vec<Pair> {
    // The scans that read carries of each scan.
    let mut readers: FxHashMap<NodeId, Vec<Option<NodeId>>> = FxHashMap::default();
    for id in graph.ids() {
        let Some(back) = graph.body(id) else { continue };
        let inputs = &graph.node(id).inputs;
        for (feed, &at) in back.feeds.iter().zip(&back.first_operands()) {
            let Feed::Neighbour { later } = *feed else {
                continue;
            };
            let of = graph.node(inputs[at]);
            let Op::ScanResult(result) = of.op else {
                continue;
            };
            let scan = of.inputs[0];
            let fits = graph.body(scan).is_some_and(|body| {
                let first = first_of_carry(body, result as usize);
                let begins = first.map(|at| graph.node(scan).inputs[at]);
                body.feeds
                    .iter()
                    .all(|f| !matches!(f, Feed::Neighbour { .. }))
                    && begins == Some(inputs[at + 1])
                    && (body.steps, body.reverse) == (back.steps, !back.reverse)
                    && later == body.reverse
            });
            let list = readers.entry(scan).or_default();
            list.push(fits.then_some(id));
        }
    }
    let pair = |(forward, list): (NodeId, Vec<Option<NodeId>>)| {
        let backward = list.first().copied().flatten()?;
        let body = graph.body(backward)?;
        let neighbours = body
            .feeds
            .iter()
            .filter(|f| matches!(f, Feed::Neighbour { .. }));
        let alone = list.iter().all(|b| *b == Some(backward)) && neighbours.count() == list.len();
        let length = segment_length(body.steps).filter(|_| alone)?;
        Some(Pair {
            forward,
            backward,
            length,
        })
    };
    let mut pairs: Vec<Pair> = readers.into_iter().filter_map(pair).collect();
    pairs.sort_unstable_by_key(|pair| pair.forward);
    pairs
}

/// The divisor of a number of steps that is nearest to its square root, if there is one except for
/// 1 and itself.
fn segment_length(steps: u32) -> Option<u32> {
    let divisors =
        (2..=steps / 2).take_while(|n| u64::from(*n) * u64::from(*n) <= 16 * u64::from(steps));
    let root = f64::from(steps).sqrt();
    divisors
        .filter(|n| steps.is_multiple_of(*n))
        .min_by(|a, b| {
            let distance = |n: u32| (f64::from(n) / root).ln().abs();
            distance(*a).total_cmp(&distance(*b))
        })
}

/// The operand that a carry begins as.
fn first_of_carry(body: &Body, carry: usize) -> Option<usize> {
    let feeds = body.feeds.iter().zip(body.first_operands());
    let mut carries = feeds.filter(|(feed, _)| **feed == Feed::Carry);
    carries.nth(carry).map(|(_, at)| at)
}

/// A new scan over segments.
struct Made {
    scan: NodeId,
    carries: u32,
    /// The index of time that runs last, of the steps and of the segments.
    last: [i64; 2],
    steps: i64,
}

struct Rebuilt<'a> {
    old: &'a Graph,
    out: Graph,
    /// The new node of each old one.
    map: Vec<NodeId>,
    /// The scans over segments, by the old scan.
    made: FxHashMap<NodeId, Made>,
}

/// Operands of a scan over segments that its inner scans take: by feed and operand.
type Known = Vec<(Feed, NodeId, NodeId)>;

impl Rebuilt<'_> {
    /// Another node than a divided scan. Results of such scans are those of the segments, one
    /// behind the other; the last carry is that of the last segment.
    fn other(&mut self, id: NodeId) -> Option<NodeId> {
        let node = self.old.node(id);
        if let Op::ScanResult(result) = node.op
            && let Some(made) = self.made.get(&node.inputs[0])
        {
            let (scan, at) = (made.scan, made.carries + result);
            let parts = self.out.scan_result(scan, at)?;
            return Some(self.out.reshape(parts, &node.dims));
        }
        if let Op::Slice { start, .. } = &node.op
            && let Op::ScanResult(result) = self.old.node(node.inputs[0]).op
            && let Some(made) = self.made.get(&self.old.node(node.inputs[0]).inputs[0])
            && result < made.carries
            && start[0] == Size::fixed(made.last[0])
            && node.dims[0].is(1)
            && node.dims[1..] == self.old.node(node.inputs[0]).dims[1..]
            && made.steps > 1
        {
            let (scan, last) = (made.scan, made.last[1]);
            let all = self.out.scan_result(scan, result)?;
            let part = self.out.part_at(all, last);
            return Some(self.out.reshape(part, &node.dims));
        }
        let inputs: Vec<NodeId> = node.inputs.iter().map(|i| self.map[i.at()]).collect();
        let (dtype, dims) = (node.dtype, node.dims.clone());
        Some(self.out.emit(node.op.clone(), &inputs, dtype, dims))
    }

    /// An operand with its steps in segments.
    fn in_segments(&mut self, operand: NodeId, length: u32) -> NodeId {
        let dims = self.out.dims(operand).clone();
        let steps = dims[0].as_fixed().unwrap_or_default();
        let of = [steps / i64::from(length), i64::from(length)].map(Size::fixed);
        let new: Dims = of.into_iter().chain(dims[1..].iter().copied()).collect();
        self.out.reshape(operand, &new)
    }

    /// The input of a scan over segments for an operand of a scan over steps.
    fn input(
        &mut self,
        body: &mut BodyBuilder,
        known: &mut Known,
        feed: Feed,
        operand: NodeId,
        length: u32,
    ) -> NodeId {
        if let Some((.., node)) = known.iter().find(|k| (k.0, k.1) == (feed, operand)) {
            return *node;
        }
        let mut dims = self.out.dims(operand).clone();
        let mut given = operand;
        if feed == Feed::Step {
            given = self.in_segments(operand, length);
            dims[0] = Size::fixed(i64::from(length));
        }
        let of = (self.out.dtype(operand), dims);
        let node = body.input(feed, &[given], "operand", of);
        // Carries are never shared.
        if feed != Feed::Carry {
            known.push((feed, operand, node));
        }
        node
    }

    /// The scan inside, over the steps of a segment; its results.
    fn inner(
        body: &mut BodyBuilder,
        of: &Body,
        length: u32,
        operands: &[NodeId],
    ) -> Option<Vec<NodeId>> {
        let graph = &mut body.graph;
        graph.bodies.push(std::sync::Arc::new(Body {
            steps: length,
            ..of.clone()
        }));
        let op = Op::Scan(graph.bodies.len() as u32 - 1);
        let scan = graph.emit(
            op,
            operands,
            slabwise_kernels::dtype::DType::F32,
            Dims::new(),
        );
        let count = of.graph.outputs.len() as u32;
        (0..count)
            .map(|result| graph.scan_result(scan, result))
            .collect()
    }

    /// Ends a scan over segments: the carries after each, then all results of the steps in it.
    fn finish(
        &mut self,
        mut body: BodyBuilder,
        old: NodeId,
        of: &Body,
        length: u32,
        results: &[NodeId],
    ) -> Option<NodeId> {
        let carries = of.carries();
        let last = if of.reverse { 0 } else { i64::from(length) - 1 };
        let mut outputs: Vec<NodeId> = Vec::with_capacity(carries + results.len());
        for &all in &results[..carries] {
            outputs.push(body.graph.part_at(all, last));
        }
        outputs.extend(results);
        if body.operands.len() + outputs.len() >= MAX_ARGUMENTS {
            return None;
        }
        body.graph.outputs = outputs;
        let segments = of.steps / length;
        let scan = body.finish(&mut self.out, segments, of.reverse);
        let last_segment = if of.reverse {
            0
        } else {
            i64::from(segments) - 1
        };
        let made = Made {
            scan,
            carries: carries as u32,
            last: [of.last_time(), last_segment],
            steps: i64::from(of.steps),
        };
        self.made.insert(old, made);
        Some(scan)
    }

    fn forward(&mut self, pair: &Pair) -> Option<NodeId> {
        let of = self.old.body(pair.forward)?;
        let mut body = BodyBuilder::within(&self.out);
        let mut known = Known::new();
        let mut operands = Vec::new();
        for (feed, old) in of.feeds.iter().zip(&self.old.node(pair.forward).inputs) {
            let operand = self.map[old.at()];
            operands.push(self.input(&mut body, &mut known, *feed, operand, pair.length));
        }
        let results = Self::inner(&mut body, of, pair.length, &operands)?;
        self.finish(body, pair.forward, of, pair.length, &results)
    }

    fn backward(&mut self, pair: &Pair) -> Option<NodeId> {
        let (of, back) = (self.old.body(pair.forward)?, self.old.body(pair.backward)?);
        let segments = self.made.get(&pair.forward)?.scan;
        let mut body = BodyBuilder::within(&self.out);
        let mut known = Known::new();
        // The steps of the segment, computed once more from the carries that it begins with.
        let (mut starts, mut operands) = (Vec::new(), Vec::new());
        for (feed, old) in of.feeds.iter().zip(&self.old.node(pair.forward).inputs) {
            let operand = self.map[old.at()];
            if *feed != Feed::Carry {
                operands.push(self.input(&mut body, &mut known, *feed, operand, pair.length));
                continue;
            }
            let all = self.out.scan_result(segments, starts.len() as u32)?;
            let type_of = (self.out.dtype(operand), self.out.dims(operand).clone());
            let feed = Feed::Neighbour { later: of.reverse };
            let start = body.input(feed, &[all, operand], "segment", type_of);
            starts.push(start);
            operands.push(start);
        }
        let again = Self::inner(&mut body, of, pair.length, &operands)?;
        let mut operands = Vec::new();
        let inputs = &self.old.node(pair.backward).inputs;
        for (feed, &at) in back.feeds.iter().zip(&back.first_operands()) {
            if let Feed::Neighbour { .. } = feed {
                let Op::ScanResult(carry) = self.old.node(inputs[at]).op else {
                    return None;
                };
                operands.push(again[carry as usize]);
                operands.push(starts[carry as usize]);
                continue;
            }
            let operand = self.map[inputs[at].at()];
            operands.push(self.input(&mut body, &mut known, *feed, operand, pair.length));
        }
        let results = Self::inner(&mut body, back, pair.length, &operands)?;
        self.finish(body, pair.backward, back, pair.length, &results)
    }
}
