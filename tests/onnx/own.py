"""Writes models of our own: those whose weights lie in files beside them, and those with functions,
each as a folder in the layout of ONNX's tests, with results computed by NumPy; and classifiers of
images. They lie below the folder that the only argument names. A folder `done` says that all were
written.
"""

import os
import pathlib
import shutil
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

node = helper.make_node
RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 4)).astype(np.float32)


def info(name, shape):
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def save(folder, model, y, **options):
    data = folder / "test_data_set_0"
    data.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx", **options)
    for name, array in [("input", X), ("output", y)]:
        tensor = numpy_helper.from_array(np.asarray(array, np.float32), name)
        (data / f"{name}_0.pb").write_bytes(tensor.SerializeToString())


def model(nodes, weights=(), functions=(), shape=(3, 4), domains=(), opset=17):
    graph = helper.make_graph(nodes, "own", [info("x", (3, 4))], [info("y", shape)], weights)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


# Weights in other files.
WEIGHTS = {
    "w": RNG.normal(size=(4, 18)).astype(np.float32),
    "b": RNG.normal(size=(18,)).astype(np.float32),
    "lengths": np.array([2, 27], np.int64),
}
PRODUCT = (X @ WEIGHTS["w"] + WEIGHTS["b"]).reshape(2, 27)


def product(weights):
    nodes = [node("Gemm", ["x", "w", "b"], ["h"]), node("Reshape", ["h", "lengths"], ["y"])]
    return model(nodes, weights, shape=(2, 27))


def inside():
    return [numpy_helper.from_array(array, name) for name, array in WEIGHTS.items()]


def outside(name, **entries):
    """A weight whose data is described by these entries."""
    array = WEIGHTS[name]
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def external(into):
    split = dict(save_as_external_data=True, size_threshold=0)
    save(into / "one_file", product(inside()), PRODUCT, location="weights.bin", **split)
    several = dict(all_tensors_to_one_file=False, **split)
    save(into / "several_files", product(inside()), PRODUCT, **several)

    # A folder further down; an offset without a length, a length without an offset, a checksum.
    parts = into / "places" / "parts"
    parts.mkdir(parents=True)
    w, b, lengths = (WEIGHTS[name].tobytes() for name in ("w", "b", "lengths"))
    (parts / "w.bin").write_bytes(b"\xff" * 7 + w)
    (parts / "more.bin").write_bytes(b + b"\xff" * 5 + lengths + b"\xff")
    placed = [
        outside("w", location="parts/w.bin", offset=7, checksum="0" * 40),
        outside("b", location="./parts/more.bin", length=len(b)),
        outside("lengths", location="parts/more.bin", offset=len(b) + 5, length=len(lengths)),
    ]
    save(into / "places", product(placed), PRODUCT)

    # Each of these has one weight with a mistake.
    (into / "beside.bin").write_bytes(w)
    for name, entries in {
        "missing": dict(location="gone.bin"),
        "short": dict(location="w.bin", offset=8, length=len(w)),
        "behind": dict(location="w.bin", offset=10**6),
        "less": dict(location="w.bin", length=len(w) - 4),
        "more": dict(location="long.bin"),
        "above": dict(location="../beside.bin"),
        "around": dict(location="parts/../../beside.bin"),
        "absolute": dict(location=str(into.resolve() / "beside.bin")),
        "no_number": dict(location="w.bin", offset="many"),
        "negative": dict(location="w.bin", offset=-1),
        "no_place": dict(offset=0),
    }.items():
        weights = [outside("w", **entries), *inside()[1:]]
        save(into / f"bad_{name}", product(weights), PRODUCT)
        (into / f"bad_{name}" / "w.bin").write_bytes(w)
        (into / f"bad_{name}" / "long.bin").write_bytes(w + b"\0" * 4)
    # The same for an array that shapes are computed with.
    weights = [*inside()[:2], outside("lengths", location="gone.bin")]
    save(into / "bad_lengths", product(weights), PRODUCT)


def function(name, inputs, outputs, nodes, opset=17, overload="", **more):
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function(
        "own", name, inputs, outputs, nodes, opsets, overload=overload, **more
    )


def constant(into, attribute, of):
    """A constant whose value is an attribute of the function around it."""
    made = node("Constant", [], [into])
    made.attribute.add(name=attribute, ref_attr_name=of, type=onnx.AttributeProto.FLOAT)
    return made


def call(name, inputs, outputs, overload="", **attributes):
    return node(name, inputs, outputs, domain="own", overload=overload, **attributes)


def functions(into):
    def write(name, nodes, all_functions, y):
        save(into / name, model(nodes, functions=all_functions, domains=["own"]), y)

    scaled = function(
        "Scaled",
        ["x"],
        ["y"],
        # Its names are those of the graph around it, with other values.
        [constant("s", "value_float", "alpha"), node("Mul", ["x", "s"], ["y"])],
        attribute_protos=[helper.make_attribute("alpha", 2.5)],
    )
    write(
        "default_attribute",
        [
            call("Scaled", ["x"], ["s"]),
            call("Scaled", ["s"], ["t"], alpha=-3.0),
            node("Add", ["s", "t"], ["y"]),
        ],
        [scaled],
        X * 2.5 + X * 2.5 * -3,
    )

    # An attribute that is handed on, under another name, and an inner function two levels down.
    inner = call("Scaled", ["a"], ["s"])
    inner.attribute.add(name="alpha", ref_attr_name="beta", type=onnx.AttributeProto.FLOAT)
    middle = function(
        "Shifted", ["a", "b"], ["y"], [inner, node("Add", ["s", "b"], ["y"])], attributes=["beta"]
    )
    outer = function(
        "Outer",
        ["x"],
        ["y", "z"],
        [
            node("Neg", ["x"], ["n"]),
            call("Shifted", ["n", "x"], ["y"], beta=4.0),
            call("Scaled", ["n"], ["z"]),
        ],
    )
    write(
        "nested",
        [call("Outer", ["x"], ["p", "q"]), node("Sub", ["p", "q"], ["y"])],
        # In an order in which callers come first.
        [outer, middle, scaled],
        (-X * 4 + X) - (-X * 2.5),
    )

    # Functions of one name, told apart by `overload`.
    plus, times = (
        function("Both", ["a", "b"], ["y"], [node(op, ["a", "b"], ["y"])], overload=overload)
        for op, overload in (("Add", ""), ("Mul", "times"))
    )
    write(
        "overloads",
        [
            call("Both", ["x", "x"], ["h"], overload="times"),
            call("Both", ["h", "x"], ["y"]),
        ],
        [plus, times],
        X * X + X,
    )

    # The axes of ReduceSum were an attribute before opset 13 and are an input since.
    old = function(
        "Old", ["x"], ["y"], [node("ReduceSum", ["x"], ["y"], axes=[1], keepdims=1)], opset=11
    )
    new = function(
        "New",
        ["x"],
        ["y"],
        [
            node("Constant", [], ["axes"], value_ints=[0]),
            node("ReduceSum", ["x", "axes"], ["y"], keepdims=1),
        ],
        opset=13,
    )
    write(
        "opsets",
        [
            call("Old", ["x"], ["rows"]),
            call("New", ["x"], ["columns"]),
            node("Add", ["rows", "columns"], ["y"]),
        ],
        [old, new],
        X.sum(1, keepdims=True) + X.sum(0, keepdims=True),
    )

    # An input that the call leaves out is one that the inner node has not.
    clip = node("Clip", ["x", "low", "high"], ["y"])
    lower = function("Bounded", ["x", "low", "high"], ["y"], [clip])
    zero = node("Constant", [], ["zero"], value_float=0.0)
    write(
        "absent_inputs",
        [
            zero,
            call("Bounded", ["x", "zero"], ["p"]),
            call("Bounded", ["x", "", "zero"], ["n"]),
            node("Sub", ["p", "n"], ["y"]),
        ],
        [lower],
        np.abs(X),
    )

    # A graph inside of a function's node reads its attribute too.
    branch = helper.make_graph(
        [constant("s", "value_float", "alpha"), node("Mul", ["x", "s"], ["r"])],
        "then",
        [],
        [info("r", (3, 4))],
    )
    other = helper.make_graph([node("Neg", ["x"], ["r"])], "else", [], [info("r", (3, 4))])
    guarded = function(
        "Guarded",
        ["x", "c"],
        ["y"],
        [node("If", ["c"], ["y"], then_branch=branch, else_branch=other)],
        attributes=["alpha"],
    )
    truth = [
        node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.BOOL, [], [value]))
        for name, value in (("yes", True), ("no", False))
    ]
    write(
        "inner_graphs",
        [
            *truth,
            call("Guarded", ["x", "yes"], ["p"], alpha=6.0),
            call("Guarded", ["x", "no"], ["q"], alpha=6.0),
            node("Add", ["p", "q"], ["y"]),
        ],
        [guarded],
        5 * X,
    )

    # These are refused.
    again = function("Again", ["x"], ["y"], [call("Again", ["x"], ["y"])])
    write("bad_recursion", [call("Again", ["x"], ["y"])], [again], X)
    write("bad_overload", [call("Both", ["x", "x"], ["y"], overload="minus")], [plus, times], X)
    write("bad_attribute", [call("Shifted", ["x", "x"], ["y"])], [middle, needs_alpha()], X)
    write("bad_name", [call("Scald", ["x"], ["y"])], [scaled], X)


def classifiers(into):
    """Of three classes: which color there is most of."""
    into.mkdir()
    pool = [node("GlobalAveragePool", ["c"], ["p"]), node("Flatten", ["p"], ["f"])]
    first = [node("Identity", ["x"], ["c"])]
    last = [node("Transpose", ["x"], ["c"], perm=[0, 3, 1, 2])]
    for name, shape, begin, end in [
        ("logits", ["n", 3, 8, 6], first, node("Identity", ["f"], ["y"])),
        ("probabilities", [1, 8, 6, 3], last, node("Softmax", ["f"], ["y"])),
        ("open", ["n", 3, "h", "w"], first, node("Identity", ["f"], ["y"])),
        ("many", [4, 3, 8, 6], first, node("Identity", ["f"], ["y"])),
        ("deep", ["n", 7, 8, 6], first, node("Identity", ["f"], ["y"])),
        ("flat", ["n", 3], first, node("Identity", ["x"], ["y"])),
    ]:
        graph = helper.make_graph([*begin, *pool, end], name, [info("x", shape)], [info("y", None)])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        onnx.save(made, into / f"{name}.onnx")


def needs_alpha():
    return function(
        "Scaled",
        ["x"],
        ["y"],
        [constant("s", "value_float", "alpha"), node("Mul", ["x", "s"], ["y"])],
        attributes=["alpha"],
    )


def main():
    into = pathlib.Path(sys.argv[1])
    if (into / "done").exists():
        return
    # Made aside, so that two processes do not disturb each other.
    aside = into.with_name(f"{into.name}.{os.getpid()}")
    external(aside / "external")
    functions(aside / "functions")
    classifiers(aside / "classifiers")
    (aside / "done").mkdir()
    shutil.rmtree(into, ignore_errors=True)
    aside.rename(into)


if __name__ == "__main__":
    main()
