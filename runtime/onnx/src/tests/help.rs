//! Hints in refusals: the lengths that would have to be fixed.

use super::*;

const BATCH: (&str, Dim) = ("batch", Dim::bounded("batch", 8));
const TIME: (&str, Dim) = ("time", Dim::bounded("time", 100));

#[test]
fn an_unknown_operator_has_no_hint() {
    let fused = NodeProto {
        domain: "com.example".into(),
        ..node("Fused", &["x"], &["y"])
    };
    let error = failure(graph(&["batch", "4"], vec![fused]), 17, &[BATCH]);
    assert!(error.ends_with("this operator is not known"), "{error}");
}

#[test]
fn a_mistake_at_every_length_has_no_hint() {
    let whole = GraphProto {
        initializer: vec![weight("w", &[3, 2], &[1.0; 6])],
        ..graph(&["batch", "4"], vec![node("MatMul", &["x", "w"], &["y"])])
    };
    let error = failure(whole, 17, &[BATCH]);
    assert!(
        error.contains("MatMul") && !error.contains("--dim"),
        "{error}"
    );
}

#[test]
fn the_dimension_at_fault_is_named() {
    let conv = GraphProto {
        initializer: vec![weight("w", &[3, 1, 5], &[1.0; 15])],
        ..graph(
            &["batch", "1", "time"],
            vec![node("Conv", &["x", "w"], &["y"])],
        )
    };
    let error = failure(conv, 17, &[BATCH, TIME]);
    let hint = "; with a fixed length it may be expressed (--dim time=N)";
    assert!(error.ends_with(hint), "{error}");
    let scales = GraphProto {
        initializer: vec![weight("s", &[3], &[1.0, 1.0, 2.0])],
        ..graph(
            &["batch", "1", "time"],
            vec![node("Resize", &["x", "", "s"], &["y"])],
        )
    };
    let error = failure(scales, 17, &[BATCH, TIME]);
    assert!(error.contains("axis 2 is bounded"), "{error}");
    assert!(error.ends_with(hint), "{error}");
}

#[test]
fn all_dimensions_are_named_where_one_is_not_enough() {
    let conv = GraphProto {
        initializer: vec![weight("w", &[3, 1, 3, 3], &[1.0; 27])],
        ..graph(
            &["8", "1", "batch", "time"],
            vec![node("Conv", &["x", "w"], &["y"])],
        )
    };
    let error = failure(conv, 17, &[BATCH, TIME]);
    let hint = "; with fixed lengths it may be expressed (--dim batch=N --dim time=N)";
    assert!(error.ends_with(hint), "{error}");
}
