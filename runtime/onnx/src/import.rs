//! The walk over a graph's nodes: what is constant is folded, all else becomes part of a trace.

mod help;
mod loops;
mod steps;

use std::collections::HashMap;
use std::rc::Rc;

use slabwise::Trace;

use crate::call::{Call, Results};
use crate::error::Refusal;
use crate::lengths;
use crate::ops;
use crate::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto};
use crate::value::{Known, Unknown, Value};

/// Most levels of graphs and functions inside of each other.
const DEEPEST: usize = 64;
/// Most nodes that loops and functions may be unrolled into.
const MOST_NODES: usize = 500_000;

/// Values by name; `None` for results of nodes that were refused.
#[derive(Default)]
pub struct Names<'o, 't> {
    own: HashMap<String, Option<Value<'t>>>,
    /// Those around an inner graph.
    outer: Option<&'o Names<'o, 't>>,
}

impl<'t> Names<'_, 't> {
    /// The value of a name; `None` if nothing defines it.
    pub fn get(&self, name: &str) -> Option<&Option<Value<'t>>> {
        self.own
            .get(name)
            .or_else(|| self.outer.and_then(|outer| outer.get(name)))
    }

    /// Gives a name its value.
    pub fn insert(&mut self, name: String, value: Option<Value<'t>>) {
        self.own.insert(name, value);
    }
}

/// The state of an import.
pub struct Import<'m, 't> {
    pub trace: &'t Trace,
    pub narrow: bool,
    pub functions: &'m [FunctionProto],
    pub opsets: HashMap<String, i64>,
    pub refusals: Vec<Refusal>,
    /// Nodes so far, those of unrolled loops and functions counted each time.
    pub nodes: usize,
    /// The number of scans around the present node, whose bodies are being imported as a step.
    pub scans: usize,
    /// Mistakes that the trace has recorded so far.
    pub mistakes: usize,
    /// The names of dimensions whose lengths a run decides.
    pub open: Vec<String>,
}

/// The default domain has two names.
pub fn domain(name: &str) -> &str {
    match name {
        "ai.onnx" => "",
        other => other,
    }
}

impl<'m, 't> Import<'m, 't> {
    fn refuse(&mut self, node: &NodeProto, reason: String) {
        let name = name_of(node).to_string();
        let operator = match domain(&node.domain) {
            "" => node.op_type.clone(),
            domain => format!("{domain}.{}", node.op_type),
        };
        self.refusals.push(Refusal {
            node: name,
            operator,
            opset: self.opset(&node.domain),
            reason,
        });
    }

    fn opset(&self, name: &str) -> i64 {
        self.opsets.get(domain(name)).copied().unwrap_or(1)
    }

    /// Imports nodes in their order. What they name is added to `names`.
    pub fn nodes(&mut self, nodes: &[NodeProto], names: &mut Names<'_, 't>, depth: usize) {
        for node in nodes {
            let results = self.node(node, names, depth);
            let results = match results {
                Ok(results) => results.map(|all| all.into_iter().map(Some).collect()),
                Err(reason) => {
                    self.refuse(node, reason);
                    None
                }
            };
            let results: Vec<_> =
                results.unwrap_or_else(|| node.output.iter().map(|_| None).collect());
            for (at, name) in node.output.iter().enumerate() {
                if !name.is_empty() {
                    names.insert(name.clone(), results.get(at).cloned().flatten());
                }
            }
        }
    }

    /// Counts a node, or an iteration of a loop, whose body may have none.
    fn count_node(&mut self) -> Result<(), String> {
        self.nodes += 1;
        match self.nodes > MOST_NODES {
            true => Err(format!("unrolls into more than {MOST_NODES} nodes")),
            false => Ok(()),
        }
    }

    /// The results of a node; `None` if an input was refused before.
    fn node(
        &mut self,
        node: &NodeProto,
        names: &Names<'_, 't>,
        depth: usize,
    ) -> Result<Option<Vec<Value<'t>>>, String> {
        self.count_node()?;
        if depth > DEEPEST {
            return Err(format!("lies more than {DEEPEST} graphs deep"));
        }
        let mut inputs = Vec::with_capacity(node.input.len());
        for name in &node.input {
            match names.get(name) {
                _ if name.is_empty() => inputs.push(None),
                Some(Some(value)) => inputs.push(Some(value.clone())),
                Some(None) => return Ok(None),
                None => return Err(format!("reads \"{name}\", which nothing defines")),
            }
        }
        while matches!(inputs.last(), Some(None)) {
            inputs.pop();
        }
        let outputs = node.output.len();
        let of_model = self.functions.iter().find(|function| {
            function.name == node.op_type
                && domain(&function.domain) == domain(&node.domain)
                && function.overload == node.overload
        });
        if let Some(function) = of_model {
            return self.function(function, node, inputs, depth);
        }
        let call = Call {
            trace: self.trace,
            operator: &node.op_type,
            opset: self.opset(&node.domain),
            outputs,
            narrow: self.narrow,
            inputs,
            attributes: &node.attribute,
        };
        match (domain(&node.domain), &*node.op_type) {
            ("", "If") => return self.branch(&call, names, depth).map(Some),
            ("", "Loop") => return self.repeat(&call, names, depth).map(Some),
            ("", "Scan") => return self.scan(&call, names, depth).map(Some),
            _ => {}
        }
        let known = match domain(&node.domain) {
            "" => self.known(&call),
            _ => None,
        };
        if let Some((Known::Constant, arrays)) = known {
            return Ok(Some(arrays.into_iter().map(Value::constant).collect()));
        }
        let of_lengths = match (&known, domain(&node.domain)) {
            (None, "") => lengths::fold(&call),
            _ => None,
        };
        let unknown = match of_lengths {
            Some(Ok(all)) => return Ok(Some(all.into_iter().map(Value::of_lengths).collect())),
            Some(Err(reason)) => Some(Rc::new(Unknown {
                reason: format!("is computed from lengths: {reason}"),
                by_lengths: true,
            })),
            None if known.is_none() => unknown_of(&call, node),
            None => None,
        };
        let run: Option<ops::Run> = match self.scans > 0 && loops::may_fail(&call) {
            true => Some(|call| {
                let made = steps::at_step(call);
                made.unwrap_or_else(|| Err("a step reads or writes where it may fail".into()))
            }),
            false => ops::find(domain(&node.domain), &node.op_type),
        };
        let made = self.trace.in_layer(name_of(node), || match run {
            Some(run) => run(&call),
            None => Err("this operator is not known".into()),
        });
        let made = self.without_mistakes(made);
        let range = steps::range_of(&call);
        let made = made.map(|mut values| match (range, values.pop()) {
            (Some(range), Some(value)) if values.is_empty() => vec![value.with_step(range)],
            (_, last) => values.into_iter().chain(last).collect(),
        });
        let made = made.map_err(|reason| match run {
            Some(run) => self.with_help(&call, run, reason),
            None => reason,
        });
        let made = match &unknown {
            Some(reason) => made.and_then(|values| {
                let values = values.into_iter();
                values
                    .map(|value| value.unknown(self.trace, reason))
                    .collect()
            }),
            None => made,
        };
        // A value that the caller gave: both the tensor and its value, where both can be had.
        match (known, made) {
            (Some((known, arrays)), Ok(values)) => {
                let all = values.into_iter().zip(arrays);
                let both = all
                    .map(|(value, array)| Ok(Value::both(value.traced(self.trace)?, known, array)));
                both.collect::<Results<'t>>().map(Some)
            }
            (Some((_, arrays)), Err(_)) => {
                Ok(Some(arrays.into_iter().map(Value::constant).collect()))
            }
            (None, made) => made.map(Some),
        }
    }

    /// The folded results, if all inputs are constants or given.
    fn known(&self, call: &Call<'_, 't>) -> Option<(Known, Vec<crate::array::Array>)> {
        let mut most = Known::Constant;
        // A shape is known without the elements, a type without the array that has it.
        let read = match call.operator {
            "Shape" | "Size" => 0,
            "CastLike" => 1,
            _ => call.inputs.len(),
        };
        for value in call.inputs.iter().take(read).flatten() {
            most = most.max(value.why_known()?);
        }
        if most == Known::Parameter {
            return None;
        }
        let arrays = crate::fold::fold(call)?;
        Some((most, arrays))
    }

    /// Turns mistakes that the trace has recorded since into the reason of a refusal.
    fn without_mistakes(&mut self, made: Results<'t>) -> Results<'t> {
        let all = self.trace.mistakes();
        let new = all
            .get(self.mistakes)
            .map(|mistake| mistake.message.clone());
        self.mistakes = all.len();
        match (made, new) {
            (Ok(_), Some(message)) => Err(message),
            (made, _) => made,
        }
    }

    /// A function of the model, inlined.
    fn function(
        &mut self,
        function: &FunctionProto,
        node: &NodeProto,
        inputs: Vec<Option<Value<'t>>>,
        depth: usize,
    ) -> Result<Option<Vec<Value<'t>>>, String> {
        let mut inner = Names::default();
        let mut inputs = inputs.into_iter();
        let mut nodes = function.node.clone();
        for name in &function.input {
            match inputs.next().flatten() {
                Some(value) => {
                    inner.insert(name.clone(), Some(value));
                }
                None => forget(&mut nodes, name),
            }
        }
        let given = |name: &str| node.attribute.iter().find(|a| a.name == name);
        let default = |name: &str| function.attribute_proto.iter().find(|a| a.name == name);
        for inner in &mut nodes {
            substitute(inner, &|name| given(name).or_else(|| default(name)));
        }
        let mut opsets: HashMap<String, i64> = self.opsets.clone();
        for import in &function.opset_import {
            opsets.insert(domain(&import.domain).into(), import.version);
        }
        let outer = std::mem::replace(&mut self.opsets, opsets);
        let before = self.refusals.len();
        self.nodes(&nodes, &mut inner, depth + 1);
        self.opsets = outer;
        if self.refusals.len() > before {
            return Ok(None);
        }
        self.named(&function.output, &inner)
    }

    /// The values of these names.
    fn named(
        &self,
        names: &[String],
        of: &Names<'_, 't>,
    ) -> Result<Option<Vec<Value<'t>>>, String> {
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            match of.get(name) {
                Some(Some(value)) => all.push(value.clone()),
                Some(None) => return Ok(None),
                None => return Err(format!("its result \"{name}\" is defined nowhere")),
            }
        }
        Ok(Some(all))
    }

    /// The results of a graph inside of a node, which sees the names around it.
    fn graph(
        &mut self,
        graph: &GraphProto,
        names: &Names<'_, 't>,
        given: Vec<(String, Value<'t>)>,
        depth: usize,
    ) -> Results<'t> {
        let mut inner = Names {
            outer: Some(names),
            ..Names::default()
        };
        for tensor in &graph.initializer {
            let external = |_: &_| Err("an inner graph's tensor lies in another file".into());
            let stored = crate::array::Stored::of_proto(tensor, &external)?;
            inner.insert(tensor.name.clone(), Some(Value::stored(stored)));
        }
        for (name, value) in given {
            inner.insert(name, Some(value));
        }
        self.nodes(&graph.node, &mut inner, depth + 1);
        let outputs: Vec<String> = graph.output.iter().map(|o| o.name.clone()).collect();
        self.named(&outputs, &inner)?
            .ok_or_else(|| "a node inside of it cannot be expressed".into())
    }

    /// `If` with a condition that is known.
    fn branch(&mut self, call: &Call<'_, 't>, names: &Names<'_, 't>, depth: usize) -> Results<'t> {
        let condition = call.known(0).map_err(|_| {
            "its condition is computed from the inputs; only constant conditions can be expressed"
        })?;
        let taken = match condition.as_ints()?.first() {
            Some(0) => "else_branch",
            Some(_) => "then_branch",
            None => return Err("its condition has no element".into()),
        };
        let graph = call.graph(taken).ok_or("a branch is missing")?;
        self.graph(graph, names, Vec::new(), depth)
    }
}

/// The reason why the results of a node are not known: lengths that an operand is computed from or,
/// if no input of a run is the cause, another reason of an operand, or that the node itself is not
/// evaluated.
fn unknown_of(call: &Call<'_, '_>, node: &NodeProto) -> Option<Rc<Unknown>> {
    let inputs = || call.inputs.iter().flatten();
    let is_known = |v: &Value<'_>| v.why_known().is_some() || v.lengths().is_some();
    let reasons = || inputs().filter_map(Value::reason);
    if let Some(by_lengths) = reasons().find(|why| why.by_lengths) {
        return Some(by_lengths.clone());
    }
    if !inputs().all(|v| is_known(v) || v.reason().is_some()) {
        return None;
    }
    reasons().next().cloned().or_else(|| {
        let lengths = inputs().filter_map(Value::lengths).flat_map(|l| &l.values);
        let open = lengths.filter(|size| size.as_fixed().is_none());
        let open: Vec<String> = open.map(|&size| call.trace.show_size(size)).collect();
        let node = format!("{} \"{}\"", node.op_type, name_of(node));
        let reason = match &open[..] {
            [] => format!(
                "is computed by {node}, which is not evaluated before a run: store its result in \
                 the file"
            ),
            open => format!("is computed from lengths: {} in {node}", open.join(", ")),
        };
        Some(Rc::new(Unknown {
            reason,
            by_lengths: !open.is_empty(),
        }))
    })
}

/// The name of a node, or that of its first output.
pub fn name_of(node: &NodeProto) -> &str {
    match (&*node.name, node.output.first()) {
        ("", Some(output)) => output,
        (name, _) => name,
    }
}

/// Makes nodes read an absent input where they read this name.
fn forget(nodes: &mut [NodeProto], name: &str) {
    for node in nodes {
        for input in node.input.iter_mut().filter(|input| *input == name) {
            input.clear();
        }
    }
}

/// Replaces the attributes of a function's node that refer to those of the function; one that the
/// call does not give is left out.
fn substitute<'a>(node: &mut NodeProto, given: &dyn Fn(&str) -> Option<&'a AttributeProto>) {
    let attributes = std::mem::take(&mut node.attribute);
    for mut attribute in attributes {
        if let Some(graph) = &mut attribute.g {
            for inner in &mut graph.node {
                substitute(inner, given);
            }
        }
        if attribute.ref_attr_name.is_empty() {
            node.attribute.push(attribute);
        } else if let Some(value) = given(&attribute.ref_attr_name) {
            node.attribute.push(AttributeProto {
                name: attribute.name,
                ..value.clone()
            });
        }
    }
}
