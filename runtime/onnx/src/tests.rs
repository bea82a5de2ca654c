//! Tests of small models that are written here, node by node.

mod bytes;
mod fold;
mod help;
mod open;
mod operators;
mod order;

use prost::Message;
use slabwise::shape::Dim;

use crate::array::{Array, Data};
use crate::check::{CheckOptions, run};
use crate::element::Element;
use crate::model::OnnxModel;
use crate::proto::{
    AttributeProto, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, TensorShapeProto, TensorTypeProto, TypeProto, ValueInfoProto,
};

const FLOAT: i32 = 1;
const INT: i32 = 7;

/// A node of the default domain, named after its operator and first result.
fn node(operator: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect();
    NodeProto {
        input: names(inputs),
        output: names(outputs),
        name: format!("{operator}_{}", outputs[0]),
        op_type: operator.into(),
        ..NodeProto::default()
    }
}

/// A node with one more attribute.
fn with(mut node: NodeProto, name: &str, attribute: AttributeProto) -> NodeProto {
    node.attribute.push(AttributeProto {
        name: name.into(),
        ..attribute
    });
    node
}

fn graph_attribute(graph: GraphProto) -> AttributeProto {
    AttributeProto {
        g: Some(graph),
        ..AttributeProto::default()
    }
}

fn int(i: i64) -> AttributeProto {
    AttributeProto {
        i: Some(i),
        ..AttributeProto::default()
    }
}

fn int_list(ints: &[i64]) -> AttributeProto {
    AttributeProto {
        ints: ints.to_vec(),
        ..AttributeProto::default()
    }
}

fn text(text: &str) -> AttributeProto {
    AttributeProto {
        s: Some(text.into()),
        ..AttributeProto::default()
    }
}

/// An input or output of floats; a length is a number or a name.
fn floats(name: &str, lengths: &[&str]) -> ValueInfoProto {
    let dim = |length: &&str| match length.parse() {
        Ok(n) => DimensionProto {
            dim_value: Some(n),
            dim_param: None,
        },
        Err(_) => DimensionProto {
            dim_value: None,
            dim_param: Some(length.to_string()),
        },
    };
    let tensor = TensorTypeProto {
        elem_type: FLOAT,
        shape: Some(TensorShapeProto {
            dim: lengths.iter().map(dim).collect(),
        }),
    };
    ValueInfoProto {
        name: name.into(),
        r#type: Some(TypeProto {
            tensor_type: Some(tensor),
        }),
    }
}

fn weight(name: &str, shape: &[i64], values: &[f32]) -> TensorProto {
    TensorProto {
        dims: shape.to_vec(),
        data_type: FLOAT,
        float_data: values.to_vec(),
        name: name.into(),
        ..TensorProto::default()
    }
}

fn ints(name: &str, values: &[i64]) -> TensorProto {
    TensorProto {
        dims: vec![values.len() as i64],
        data_type: INT,
        int64_data: values.to_vec(),
        name: name.into(),
        ..TensorProto::default()
    }
}

fn bools(name: &str, value: bool) -> TensorProto {
    TensorProto {
        data_type: 9,
        int32_data: vec![value.into()],
        name: name.into(),
        ..TensorProto::default()
    }
}

/// A graph of an input `x`, unless it has no lengths, and an output `y`.
fn graph(lengths: &[&str], nodes: Vec<NodeProto>) -> GraphProto {
    let input = (!lengths.is_empty()).then(|| floats("x", lengths));
    GraphProto {
        node: nodes,
        input: input.into_iter().collect(),
        output: vec![floats("y", &[])],
        ..GraphProto::default()
    }
}

fn bytes(graph: GraphProto, opset: i64) -> Vec<u8> {
    let import = |domain: &str, version| OperatorSetIdProto {
        domain: domain.into(),
        version,
    };
    let model = ModelProto {
        ir_version: 9,
        graph: Some(graph),
        opset_import: vec![import("", opset), import("com.microsoft", 1)],
        ..ModelProto::default()
    };
    model.encode_to_vec()
}

fn model(graph: GraphProto, opset: i64) -> OnnxModel {
    OnnxModel::of_bytes(&bytes(graph, opset)).expect("a model")
}

/// The message of a model that cannot be read or imported.
fn failure(graph: GraphProto, opset: i64, dims: &[(&str, Dim)]) -> String {
    let model = OnnxModel::of_bytes(&bytes(graph, opset));
    let traced = model.and_then(|model| {
        let model = dims
            .iter()
            .fold(model, |model, &(name, dim)| model.with_dim(name, dim));
        let trace = slabwise::Trace::inference();
        let inputs = model.declare(&trace)?;
        let params = slabwise::Params::seeded(0);
        model.values(&trace, &params.root(), &inputs).map(|_| ())
    });
    traced.expect_err("it is refused").to_string()
}

/// The array of these lengths that counts up from 0, in units that no operator treats alike.
fn counted(shape: &[usize]) -> Array {
    let n: usize = shape.iter().product();
    let value = |i: usize| f64::from(((i * 37 % 101) as f32 - 50.0) / 16.0);
    Array {
        element: Element::F32,
        shape: shape.to_vec(),
        data: Data::Float((0..n).map(value).collect()),
    }
}

/// The results of a model.
fn results(model: OnnxModel, inputs: &[Array]) -> Vec<Array> {
    let all = run(model, inputs, &CheckOptions::default()).expect("it runs");
    all.into_iter().map(|(_, array)| array).collect()
}
