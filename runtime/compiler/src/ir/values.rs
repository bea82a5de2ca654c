//! The values of nodes, of variables, and of the sizes of a run.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::Dims;
use slabwise_planner::{BufferId, Kind, Space};

use super::{Piece, Program, Source, Value};
use crate::graph::{Graph, Phase};
use crate::ops::{NodeId, Op};
use crate::shape::elements;

impl Value {
    /// The dimensions that it has in memory: those of its shape, with padded rows.
    pub fn stored_dims(&self) -> Dims {
        let mut dims = self.dims.clone();
        if let Some(last) = dims.last_mut().filter(|_| self.row_padding > 0) {
            let padded = last.checked_add(Size::fixed(self.row_padding));
            *last = padded.unwrap_or(*last);
        }
        dims
    }

    /// The bytes of all its rows' padding at these sizes, were it so many elements a row.
    pub(crate) fn padding_bytes(&self, row_padding: i64, sizes: &Env) -> Option<u64> {
        let (_, outer) = self.dims.split_last()?;
        let rows = u64::try_from(elements(outer)?.checked_at(sizes)?).ok()?;
        let row = u64::try_from(row_padding).ok()? * self.dtype.bytes() as u64;
        rows.checked_mul(row)
    }

    /// Pads its rows.
    pub(crate) fn pad(&mut self, row_padding: i64, bounds: &Env) {
        if let Some(bytes) = self.padding_bytes(row_padding, bounds) {
            self.row_padding = row_padding;
            self.bytes += bytes;
        }
    }
}

impl Program {
    /// The value that holds all of a node's value.
    pub(crate) fn value_of_node(graph: &Graph, node: NodeId, output: bool) -> Option<Value> {
        let Op::Input(input) = graph.node(node).op else {
            return Self::computed(graph, node, Source::Computed, output);
        };
        Self::computed(graph, node, Source::Input(input), output)
    }

    /// A value of a node; `None` if its byte count overflows.
    fn computed(graph: &Graph, id: NodeId, source: Source, output: bool) -> Option<Value> {
        let node = graph.node(id);
        let kind = match graph.origin(id).phase {
            _ if matches!(source, Source::Input(_)) => Kind::Input,
            _ if output => Kind::Output,
            Phase::Forward | Phase::Recompute => Kind::Activation,
            Phase::Backward | Phase::Update => Kind::Gradient,
        };
        let data_dependent = graph.symbols.any_data_dependent(&node.dims);
        let size = if data_dependent {
            Some(Size::ZERO)
        } else {
            elements(&node.dims)
        };
        let bytes = size
            .and_then(|n| n.checked_at(&graph.symbols.bounds()))
            .and_then(|n| u64::try_from(n).ok())
            .and_then(|n| n.checked_mul(node.dtype.bytes() as u64))?;
        Some(Value {
            name: graph.name(id),
            source,
            node: Some(id),
            piece: Piece::Whole,
            dtype: node.dtype,
            dims: node.dims.clone(),
            row_padding: 0,
            channels_last: false,
            bytes,
            data_dependent,
            kind,
            space: Space::Device,
            output,
        })
    }

    /// The number of values whose channels are innermost.
    pub(crate) fn channels_last(&self) -> usize {
        let last = self.values.iter().filter(|value| value.channels_last);
        last.count()
    }

    /// The padded values, with the bytes of their padding.
    pub(crate) fn padding(&self) -> Vec<(BufferId, u64)> {
        let bounds = self.graph.symbols.bounds();
        let padded = self
            .values
            .iter()
            .zip(0..)
            .filter(|(value, _)| value.row_padding > 0);
        padded
            .map(|(value, at)| {
                let bytes = value.padding_bytes(value.row_padding, &bounds);
                (BufferId(at), bytes.unwrap_or(0))
            })
            .collect()
    }

    /// The value of a variable.
    pub(crate) fn variable(graph: &Graph, variable: u32) -> Value {
        let info = &graph.variables[variable as usize];
        Value {
            name: info.name.to_string(),
            source: Source::Variable(variable),
            node: None,
            piece: Piece::Whole,
            dtype: info.dtype,
            dims: info.dims.clone(),
            row_padding: 0,
            channels_last: false,
            bytes: 0,
            data_dependent: false,
            kind: if info.is_param {
                Kind::Weight
            } else {
                Kind::State
            },
            space: Space::Device,
            output: false,
        }
    }

    /// The value of the sizes of a run.
    pub(crate) fn sizes(graph: &Graph) -> Value {
        let symbols = graph.symbols.iter().count() as i64;
        Value {
            name: "sizes".into(),
            source: Source::Sizes,
            node: None,
            piece: Piece::Whole,
            dtype: DType::I32,
            dims: Dims::from_slice(&[Size::fixed(symbols)]),
            row_padding: 0,
            channels_last: false,
            bytes: 0,
            data_dependent: false,
            kind: Kind::State,
            space: Space::Device,
            output: false,
        }
    }
}
