//! Single operators: their numbers, and what they refuse.

use super::*;

/// An array of integers.
fn whole(shape: &[usize], values: &[i64]) -> Array {
    Array::ints(shape.to_vec(), values.to_vec())
}

/// An array of floats.
fn real(shape: &[usize], values: &[f64]) -> Array {
    Array {
        element: Element::F32,
        shape: shape.to_vec(),
        data: Data::Float(values.to_vec()),
    }
}

fn of(element: Element, array: Array) -> Array {
    Array { element, ..array }
}

fn float(f: f32) -> AttributeProto {
    AttributeProto {
        f: Some(f),
        ..AttributeProto::default()
    }
}

fn tensor(tensor: TensorProto) -> AttributeProto {
    AttributeProto {
        t: Some(tensor),
        ..AttributeProto::default()
    }
}

/// An operator with attributes, of some results.
fn call(operator: &str, attributes: &[(&str, AttributeProto)], outputs: usize) -> NodeProto {
    let names: Vec<String> = (0..outputs).map(|at| format!("y{at}")).collect();
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    let all = attributes.iter().cloned();
    all.fold(node(operator, &[], &names), |node, (name, value)| {
        with(node, name, value)
    })
}

/// An input of this element type.
fn typed(name: &str, element: Element, lengths: &[&str]) -> ValueInfoProto {
    let mut info = floats(name, lengths);
    let tensor = info.r#type.as_mut().and_then(|t| t.tensor_type.as_mut());
    let number = |&n: &i32| Element::of(n) == Ok(element);
    tensor.expect("a tensor").elem_type = (1..=16).find(number).expect("a type");
    info
}

/// A graph of one node, of inputs of these types and lengths; absent where there is no length.
fn alone(mut node: NodeProto, inputs: &[(Element, &[&str])]) -> GraphProto {
    let mut given = Vec::new();
    for (at, (element, lengths)) in inputs.iter().enumerate() {
        let is_absent = *lengths == ["absent"];
        let name = if is_absent {
            String::new()
        } else {
            format!("x{at}")
        };
        if !is_absent {
            given.push(typed(&name, *element, lengths));
        }
        node.input.push(name);
    }
    let outputs = node.output.iter();
    GraphProto {
        input: given,
        output: outputs
            .map(|name| ValueInfoProto {
                name: name.clone(),
                r#type: None,
            })
            .collect(),
        node: vec![node],
        ..GraphProto::default()
    }
}

/// The results of a node of these inputs.
fn applied(node: NodeProto, opset: i64, inputs: &[Array]) -> Vec<Array> {
    let lengths: Vec<Vec<String>> = inputs
        .iter()
        .map(|x| x.shape.iter().map(usize::to_string).collect())
        .collect();
    let lengths: Vec<Vec<&str>> = lengths
        .iter()
        .map(|all| all.iter().map(|n| &**n).collect())
        .collect();
    let all: Vec<(Element, &[&str])> = inputs
        .iter()
        .zip(&lengths)
        .map(|(x, lengths)| (x.element, &lengths[..]))
        .collect();
    results(model(alone(node, &all), opset), inputs)
}

#[track_caller]
fn gives(node: NodeProto, opset: i64, inputs: &[Array], expected: &[Array]) {
    let name = node.name.clone();
    let results = applied(node, opset, inputs);
    assert_eq!(results.len(), expected.len(), "{name}");
    for (result, expected) in results.iter().zip(expected) {
        let options = CheckOptions::default();
        let found = crate::check::difference(result, expected, &options);
        assert_eq!(found, None, "{name}: {result:?}");
    }
}

#[test]
fn sums_of_many_parts_of_a_tensor() {
    let x = counted(&[60, 4]);
    let parts: Vec<String> = (0..60).map(|at| format!("p{at}")).collect();
    let parts: Vec<&str> = parts.iter().map(|name| &**name).collect();
    let split = node("Split", &["x"], &parts);
    for operator in ["Sum", "Max"] {
        let nodes = vec![split.clone(), node(operator, &parts, &["y"])];
        let y = results(
            model(graph(&["60", "4"], nodes), 13),
            std::slice::from_ref(&x),
        );
        let values = x.to_floats();
        for column in 0..4 {
            let of_column = (0..60).map(|row| values[row * 4 + column]);
            let expected = match operator {
                "Sum" => of_column.sum::<f64>(),
                _ => of_column.fold(f64::NEG_INFINITY, f64::max),
            };
            let found = y[0].to_floats()[column];
            assert!((found - expected).abs() < 1e-4, "{operator}: {found}");
        }
    }
    // A window over more channels than there are.
    let size = ("size", int(49));
    let ones = real(&[1, 60, 1, 1], &[1.0; 60]);
    let beta = [size, ("alpha", float(49.0)), ("beta", float(1.0))];
    let y = &applied(call("LRN", &beta, 1), 13, &[ones])[0].to_floats();
    for (at, &value) in y.iter().enumerate() {
        let window = at.min(24) + 1 + (59 - at).min(24);
        let expected = 1.0 / (1.0 + window as f64);
        assert!(
            (value - expected).abs() < 1e-6,
            "{at}: {value}, not {expected}"
        );
    }
}

/// A sequence that is unrolled, and one that is not.
#[test]
fn linear_attention_of_long_sequences() {
    for steps in [60, 200] {
        let x = |from: usize| {
            let values =
                (0..steps * 4).map(|i| f64::from(((i + from) * 7 % 11) as f32) / 8.0 - 0.5);
            real(&[1, steps, 4], &values.collect::<Vec<_>>())
        };
        let [q, k, v] = [x(0), x(3), x(5)];
        let heads = [
            ("q_num_heads", int(2)),
            ("kv_num_heads", int(2)),
            ("update_rule", text("linear")),
            ("scale", float(1.0)),
        ];
        let node = call("LinearAttention", &heads, 2);
        let found = applied(node, 27, &[q.clone(), k.clone(), v.clone()]);
        let (q, k, v) = (q.to_floats(), k.to_floats(), v.to_floats());
        let mut state = [[[0.0; 2]; 2]; 2];
        let mut y = vec![0.0; steps * 4];
        for step in 0..steps {
            for (head, state) in state.iter_mut().enumerate() {
                let at = |i: usize| step * 4 + head * 2 + i;
                for (i, row) in state.iter_mut().enumerate() {
                    for (j, sum) in row.iter_mut().enumerate() {
                        *sum += k[at(i)] * v[at(j)];
                        y[at(j)] += q[at(i)] * *sum;
                    }
                }
            }
        }
        let state: Vec<f64> = state.as_flattened().as_flattened().to_vec();
        let expected = [real(&[1, steps, 4], &y), real(&[1, 2, 2, 2], &state)];
        for (found, expected) in found.iter().zip(&expected) {
            let options = CheckOptions::default();
            let different = crate::check::difference(found, expected, &options);
            assert_eq!(different, None, "{steps} positions");
        }
    }
}

/// Align the corners of one element with the first one.
#[test]
fn a_resize_to_one_element() {
    let x = real(&[1, 1, 5, 5], &(0..25).map(f64::from).collect::<Vec<_>>());
    let sizes = GraphProto {
        initializer: vec![ints("sizes", &[1, 1, 1, 1])],
        ..GraphProto::default()
    };
    for mode in ["nearest", "linear", "cubic"] {
        let resize = with(
            node("Resize", &["x", "", "", "sizes"], &["y"]),
            "mode",
            text(mode),
        );
        let aligned = ("coordinate_transformation_mode", text("align_corners"));
        let resize = with(resize, aligned.0, aligned.1);
        let graph = GraphProto {
            initializer: sizes.initializer.clone(),
            ..graph(&["1", "1", "5", "5"], vec![resize])
        };
        let y = results(model(graph, 13), std::slice::from_ref(&x));
        assert_eq!(y, [real(&[1, 1, 1, 1], &[0.0])], "{mode}");
    }
}

#[test]
fn integers_keep_their_numbers() {
    let power = |x: &[i64], by: &[f64], y: &[i64]| {
        let inputs = [whole(&[x.len()], x), real(&[by.len()], by)];
        gives(call("Pow", &[], 1), 13, &inputs, &[whole(&[x.len()], y)]);
    };
    power(&[1, 2, 3, 4, 5, 6, 7, 8], &[0.5], &[1, 1, 1, 2, 2, 2, 2, 2]);
    power(&[3, 2], &[0.5, 1.9], &[1, 3]);
    power(&[3, 5, -7], &[3.0], &[27, 125, -343]);
    power(&[3, 10, -7], &[5.0, 6.0, 3.0], &[243, 1_000_000, -343]);
    let large = [100_000_001, 100_000_002, 5];
    let large = of(Element::I32, whole(&[3], &large));
    let sorted = of(Element::I32, whole(&[3], &[5, 100_000_001, 100_000_002]));
    gives(call("Unique", &[], 1), 13, &[large], &[sorted]);
    let odd = (1 << 24) + 1;
    let pads = [whole(&[1], &[7]), whole(&[2], &[1, 0]), whole(&[], &[odd])];
    gives(call("Pad", &[], 1), 13, &pads, &[whole(&[2], &[odd, 7])]);
    let value = TensorProto {
        dims: vec![1],
        ..ints("value", &[odd])
    };
    let node = call("ConstantOfShape", &[("value", tensor(value))], 1);
    let x = counted(&[3, 1]);
    let mut node = node;
    node.input = vec!["shape".into()];
    let nodes = vec![self::node("Shape", &["x"], &["shape"]), node];
    let mut graph = graph(&["n", "1"], nodes);
    graph.output[0].name = "y0".into();
    let open = model(graph, 13).with_dim("n", Dim::bounded("n", 8));
    assert_eq!(results(open, &[x]), [whole(&[3, 1], &[odd; 3])]);
}

#[test]
fn gathered_elements_of_fewer_rows() {
    let x = real(&[3, 4], &(0..12).map(f64::from).collect::<Vec<_>>());
    let index = whole(&[2, 1], &[2, 0]);
    let axis = [("axis", int(1))];
    let y = real(&[2, 1], &[2.0, 4.0]);
    gives(call("GatherElements", &axis, 1), 13, &[x, index], &[y]);
}

/// Attributes and inputs that only first versions have.
#[test]
fn first_versions() {
    let pixels = real(&[1, 2, 2, 2], &(0..8).map(f64::from).collect::<Vec<_>>());
    let parameter = |value: f64| real(&[2, 2, 2], &[value; 8]);
    let inputs = [
        pixels.clone(),
        real(&[2, 2, 2], &(1..9).map(f64::from).collect::<Vec<_>>()),
        parameter(1.0),
        parameter(0.0),
        parameter(1.0),
    ];
    let attributes = [("spatial", int(0)), ("epsilon", float(0.0))];
    let y: Vec<f64> = (0..8).map(|i| f64::from(i * (i + 1) + 1)).collect();
    let y = real(&[1, 2, 2, 2], &y);
    let norm = call("BatchNormalization", &attributes, 1);
    gives(norm, 7, &inputs, &[y]);

    let inputs = [counted(&[4, 2]), whole(&[2], &[1, 3])];
    let values = inputs[0].to_floats();
    let parts = [real(&[1, 2], &values[..2]), real(&[3, 2], &values[2..])];
    gives(call("Split", &[], 2), 1, &inputs, &parts);

    let window = [("kernel_shape", int_list(&[2])), ("p", float(3.0))];
    let y: Vec<f64> = [9.0f64, 35.0, 91.0].map(f64::cbrt).to_vec();
    let x = real(&[1, 1, 4], &[1.0, 2.0, 3.0, 4.0]);
    gives(call("LpPool", &window, 1), 1, &[x], &[real(&[1, 1, 3], &y)]);

    let x = real(&[2], &[f64::NEG_INFINITY, 1.0]);
    let y = real(&[2], &[f64::from(f32::MIN), 1.0]);
    let most = [("max", float(3.0))];
    gives(call("Clip", &most, 1), 6, &[x], &[y]);

    // Constants are concatenated along the same axis as tensors.
    let square = |name: &str| TensorProto {
        dims: vec![2, 2],
        ..ints(name, &[1, 2, 3, 4])
    };
    let concat = GraphProto {
        initializer: vec![square("a"), square("b")],
        output: vec![ValueInfoProto {
            name: "c".into(),
            r#type: None,
        }],
        ..graph(&[], vec![node("Concat", &["a", "b"], &["c"])])
    };
    let y = results(model(concat, 1), &[]);
    assert_eq!(y, [whole(&[2, 4], &[1, 2, 1, 2, 3, 4, 3, 4])]);

    let cast = with(node("Cast", &["x"], &["y"]), "to", text("INT32"));
    let error = failure(graph(&["2"], vec![cast]), 1, &[]);
    assert!(error.contains("Cast before opset 6"), "{error}");
}

#[test]
fn a_squeezed_constant_keeps_its_elements() {
    let nodes = vec![
        with(node("Squeeze", &["c"], &["s"]), "axes", int_list(&[0])),
        node("Add", &["x", "s"], &["y"]),
    ];
    let graph = GraphProto {
        initializer: vec![ints("c", &[7, 9])],
        input: vec![typed("x", Element::I64, &["1"])],
        ..graph(&["1"], nodes)
    };
    let error = failure(graph, 11, &[]);
    assert!(error.contains("Squeeze_s"), "{error}");
    assert!(error.contains("axis 0 is of length 2"), "{error}");
}

/// Operator, opset, attribute, value, lengths of the inputs, and an attribute that is needed.
type Case<'a> = (
    &'a str,
    i64,
    &'a str,
    &'a str,
    &'a [&'a [&'a str]],
    Option<(&'a str, AttributeProto)>,
);

/// Values that an enumeration does not have are no other value of it.
#[test]
fn unknown_values_of_enumerations() {
    const F: Element = Element::F32;
    let image: &[&str] = &["1", "4", "4", "4"];
    let kernel: &[&str] = &["1", "4", "3", "3"];
    let sequence: &[&str] = &["2", "1", "3"];
    let weights: &[&str] = &["1", "4", "3"];
    let recurrent: &[&str] = &["1", "4", "4"];
    let block = ("blocksize", int(2));
    let hidden = ("hidden_size", int(4));
    let scales = AttributeProto {
        floats: vec![1.0, 1.0, 2.0, 2.0],
        ..AttributeProto::default()
    };
    let cases: [Case<'_>; 8] = [
        ("Conv", 13, "auto_pad", "SAME", &[image, kernel], None),
        (
            "MaxPool",
            13,
            "auto_pad",
            "SAME",
            &[image],
            Some(("kernel_shape", int_list(&[2, 2]))),
        ),
        (
            "Upsample",
            7,
            "mode",
            "cubic",
            &[image],
            Some(("scales", scales)),
        ),
        (
            "DepthToSpace",
            13,
            "mode",
            "RCD",
            &[image],
            Some(block.clone()),
        ),
        ("SpaceToDepth", 28, "mode", "RCD", &[image], Some(block)),
        ("Gelu", 20, "approximate", "tan", &[image], None),
        (
            "RNN",
            14,
            "direction",
            "backward",
            &[sequence, weights, recurrent],
            Some(hidden),
        ),
        ("TensorScatter", 24, "mode", "ring", &[image, image], None),
    ];
    for (operator, opset, name, value, inputs, other) in cases {
        let mut node = call(operator, &[(name, text(value))], 1);
        if let Some((name, attribute)) = other {
            node = with(node, name, attribute);
        }
        let inputs: Vec<(Element, &[&str])> = inputs.iter().map(|&n| (F, n)).collect();
        let error = failure(alone(node, &inputs), opset, &[]);
        assert!(error.contains(&format!("{name} \"{value}\"")), "{error}");
    }
}

/// Numbers of hostile files: lengths and counts that no program has.
#[test]
fn absurd_numbers_are_refused() {
    const F: Element = Element::F32;
    const I: Element = Element::I64;
    let many = "1073741824";
    let number = |name: &str, value: i64| TensorProto {
        dims: Vec::new(),
        ..ints(name, &[value])
    };
    let refused = |node: NodeProto,
                   opset: i64,
                   inputs: &[(Element, &[&str])],
                   constants: Vec<TensorProto>,
                   wanted: &str| {
        let mut graph = alone(node, inputs);
        graph
            .input
            .retain(|input| constants.iter().all(|c| c.name != input.name));
        graph.initializer = constants;
        let error = failure(graph, opset, &[]);
        assert!(error.contains(wanted), "{error}");
    };
    for parts in [1 << 60, 1_000_000_000] {
        let split = call("Split", &[("num_outputs", int(parts))], 2);
        refused(split, 18, &[(F, &["8"])], vec![], "num_outputs");
        let split = call("Split", &[("num_outputs", int(parts))], 2);
        refused(
            split,
            18,
            &[(I, &[])],
            vec![ints("x0", &[1, 2])],
            "num_outputs",
        );
    }
    let stft = call("STFT", &[], 1);
    let constants = vec![number("x1", 1), number("x3", 4096)];
    let inputs: [(Element, &[&str]); 4] =
        [(F, &["1", many, "1"]), (I, &[]), (F, &["absent"]), (I, &[])];
    refused(stft, 17, &inputs, constants, "frames");
    let sequence = vec![
        node("SplitToSequence", &["x"], &["s"]),
        node("SequenceLength", &["s"], &["y"]),
    ];
    let error = failure(graph(&[many], sequence), 17, &[]);
    assert!(error.contains("1073741824 parts"), "{error}");
    let size = [("size", int(65536))];
    refused(
        call("LRN", &size, 1),
        13,
        &[(F, &["1", "70000", "1"])],
        vec![],
        "a size of 65536",
    );
    let window = [("kernel_shape", int_list(&[1 << 62, 1 << 62]))];
    refused(
        call("LpPool", &window, 1),
        13,
        &[(F, &["1", "1", "4", "4"])],
        vec![],
        "LpPool",
    );
    let inputs: [(Element, &[&str]); 2] = [(F, &["4"]), (I, &["1"])];
    for to in [i64::MIN, -1] {
        let crop = call("CenterCropPad", &[], 1);
        refused(crop, 18, &inputs, vec![ints("x1", &[to])], "a length of");
    }
}

/// An operator of the standard that is not expressed is not unknown.
#[test]
fn operators_that_are_not_expressed() {
    for operator in ["RoiAlign", "DeformConv", "MaxRoiPool", "Det", "BitCast"] {
        let error = failure(graph(&["4"], vec![node(operator, &["x"], &["y"])]), 22, &[]);
        assert!(
            error.ends_with("this operator is not expressed yet"),
            "{error}"
        );
    }
}

/// Inputs of later versions are not ignored.
#[test]
fn the_lengths_of_chunks_are_refused() {
    let heads = [("num_heads", int(1)), ("kv_num_heads", int(1))];
    let node = NodeProto {
        domain: "com.microsoft".into(),
        ..call("GroupQueryAttention", &heads, 1)
    };
    let mut inputs: Vec<(Element, &[&str])> = vec![(Element::F32, &["1", "2", "4"]); 3];
    inputs.resize(17, (Element::F32, &["absent"]));
    inputs[5] = (Element::I32, &["1"]);
    inputs[6] = (Element::I32, &["1"]);
    inputs[16] = (Element::I32, &["1"]);
    let error = failure(alone(node, &inputs), 17, &[]);
    assert!(error.contains("query_seqlens"), "{error}");
}
