"""Writes models with lengths that a run decides, with the nodes that PyTorch's exporter writes for
them: shapes taken apart and put together again, positions by Range, masks by ConstantOfShape. Each is
a folder in the layout of ONNX's tests, with the results of onnxruntime for several lengths, below the
folder that the only argument names. A file `done` says that this script has written all of them.
"""

import hashlib
import os
import pathlib
import shutil
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
WORDS, WIDTH, HEADS, MOST, PAST = 40, 16, 4, 32, 8


class Graph:
    """Nodes and weights under construction; methods give the name of what they add."""

    def __init__(self, seed):
        self.nodes, self.weights, self.rng = [], [], np.random.default_rng(seed)

    def add(self, operator, *inputs, outputs=1, **attributes):
        names = [f"{operator}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def number(self, value):
        array = np.asarray(value, np.float32 if isinstance(value, float) else np.int64)
        return self.add("Constant", value=numpy_helper.from_array(array))

    def weight(self, *shape, scale=0.3):
        name = f"w{len(self.weights)}"
        array = (scale * self.rng.normal(size=shape)).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def length(self, x, axis):
        return self.add("Gather", self.add("Shape", x), self.number(axis), axis=0)

    def shape(self, *lengths):
        """A shape of scalars, which are names, and numbers."""
        zero = self.number([0])
        parts = [
            self.add("Unsqueeze", n, zero) if isinstance(n, str) else self.number([n])
            for n in lengths
        ]
        return self.add("Concat", *parts, axis=0)

    def linear(self, x, width, to):
        return self.add("Add", self.weight(to), self.add("MatMul", x, self.weight(width, to)))

    def norm(self, x):
        return self.add("LayerNormalization", x, self.weight(WIDTH), self.weight(WIDTH), axis=-1)

    def attention(self, x, batch, length, mask):
        joined = self.linear(x, WIDTH, 3 * WIDTH)
        # As chunk(3, -1): the parts' ends are computed from the shape.
        whole = self.length(joined, 2)
        part = self.add("Div", self.add("Add", whole, self.number(2)), self.number(3))
        ends = [self.number([0])]
        for i in range(1, 4):
            end = self.add("Mul", part, self.number(i))
            ends.append(self.add("Unsqueeze", end, self.number([0])))
        parts = []
        for start, end in zip(ends, ends[1:]):
            one = self.add("Slice", joined, start, end, self.number([2]))
            to = self.shape(batch, length, HEADS, -1)
            parts.append(self.add("Transpose", self.add("Reshape", one, to), perm=[0, 2, 1, 3]))
        query, key, value = parts
        scale = self.add("Sqrt", self.add("Cast", self.length(query, 3), to=FLOAT))
        scores = self.add("MatMul", query, self.add("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.add("Add", self.add("Div", scores, scale), mask)
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), value)
        mixed = self.add("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.linear(self.add("Reshape", mixed, self.shape(batch, length, -1)), WIDTH, WIDTH)

    def block(self, x, batch, length, mask):
        x = self.norm(self.add("Add", x, self.attention(x, batch, length, mask)))
        inner = self.add("Relu", self.linear(x, WIDTH, 2 * WIDTH))
        return self.norm(self.add("Add", x, self.linear(inner, 2 * WIDTH, WIDTH)))

    def model(self, inputs, outputs, opset=17, domains=()):
        self.nodes += [
            helper.make_node("Identity", [made], [name]) for name, made in outputs.items()
        ]
        graph = helper.make_graph(
            self.nodes,
            "open",
            [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            self.weights,
        )
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def encoder():
    """Of BERT's form: words, positions by Range, a mask of attention, and the first word's state."""
    g = Graph(1)
    batch, length = g.length("ids", 0), g.length("ids", 1)
    places = g.add("Range", g.number(0), g.add("Cast", length, to=INT), g.number(1))
    places = g.add("Gather", g.weight(MOST, WIDTH), places)
    places = g.add("Unsqueeze", places, g.number([0]))
    x = g.norm(g.add("Add", g.add("Gather", g.weight(WORDS, WIDTH), "ids"), places))
    mask = g.add("Unsqueeze", g.add("Unsqueeze", "mask", g.number([1])), g.number([2]))
    # As expand(batch, 1, length, length), whose lengths of -1 the exporter replaces by 1.
    wide = g.shape(batch, 1, length, length)
    ones = g.add("ConstantOfShape", g.number([4]), value=numpy_helper.from_array(np.array([1])))
    kept = g.add("Equal", wide, g.add("Mul", ones, g.number([-1])))
    mask = g.add("Expand", g.add("Cast", mask, to=FLOAT), g.add("Where", kept, ones, wide))
    mask = g.add("Mul", g.add("Sub", g.number(1.0), mask), g.number(-10000.0))
    for _ in range(2):
        x = g.block(x, batch, length, mask)
    first = g.add("Gather", x, g.number(0), axis=1)
    pooled = g.add("Tanh", g.linear(first, WIDTH, WIDTH))
    kinds = {"ids": (INT, ["batch", "length"]), "mask": (INT, ["batch", "length"])}
    return g.model(kinds, {"states": x, "pooled": pooled})


def decoder():
    """Of GPT's form: a table of positions cut to the length, a causal mask, and the last word."""
    g = Graph(2)
    batch, length = g.length("ids", 0), g.length("ids", 1)
    end = g.add("Unsqueeze", length, g.number([0]))
    places = g.add("Slice", g.weight(1, MOST, WIDTH), g.number([0]), end, g.number([1]))
    x = g.add("Add", g.add("Gather", g.weight(WORDS, WIDTH), "ids"), places)
    low = numpy_helper.from_array(np.array([-np.inf], np.float32))
    mask = g.add("ConstantOfShape", g.shape(length, length), value=low)
    mask = g.add("Trilu", mask, g.number(1), upper=1)
    # As tile, of rows that are equal.
    mask = g.add("Unsqueeze", mask, g.number([0]))
    mask = g.add("Tile", mask, g.shape(batch, 1, 1))
    mask = g.add("Unsqueeze", mask, g.number([1]))
    x = g.block(x, batch, length, mask)
    last = g.add("Gather", x, g.number(-1), axis=1)
    number = g.add("Cast", g.add("Size", "ids"), to=FLOAT)
    return g.model(
        {"ids": (INT, ["batch", "length"])},
        {"logits": g.linear(last, WIDTH, WORDS), "words": number},
    )


def cached():
    """A decoder's block with a cache: keys and values of the past before those of the new words, and
    a mask over both, whose length the file writes as a sum."""
    g = Graph(11)
    batch, length, past = g.length("ids", 0), g.length("ids", 1), g.length("past_keys", 2)
    whole = g.add("Add", past, length)
    x = g.add("Gather", g.weight(WORDS, WIDTH), "ids")
    to = g.shape(batch, length, HEADS, WIDTH // HEADS)
    parts = [
        g.add("Transpose", g.add("Reshape", g.linear(x, WIDTH, WIDTH), to), perm=[0, 2, 1, 3])
        for _ in range(3)
    ]
    keys = g.add("Concat", "past_keys", parts[1], axis=2)
    values = g.add("Concat", "past_values", parts[2], axis=2)
    row = g.add("Unsqueeze", g.add("Range", past, whole, g.number(1)), g.number([1]))
    column = g.add("Range", g.number(0), g.length(keys, 2), g.number(1))
    seen = g.add("LessOrEqual", g.add("Unsqueeze", column, g.number([0])), row)
    kept = g.add("Cast", "mask", to=TensorProto.BOOL)
    kept = g.add("Unsqueeze", kept, g.number([1, 2]))
    kept = g.add("And", g.add("Unsqueeze", seen, g.number([0, 1])), kept)
    low = g.add("Where", kept, g.number(0.0), g.number(-10000.0))
    scores = g.add("MatMul", parts[0], g.add("Transpose", keys, perm=[0, 1, 3, 2]))
    mixed = g.add("MatMul", g.add("Softmax", g.add("Add", scores, low), axis=-1), values)
    mixed = g.add("Transpose", mixed, perm=[0, 2, 1, 3])
    y = g.linear(g.add("Reshape", mixed, g.shape(batch, length, WIDTH)), WIDTH, 5)
    # The new part of the keys, found again by its place.
    ends = [g.add("Unsqueeze", n, g.number([0])) for n in (past, whole)]
    fresh = g.add("Slice", keys, *ends, g.number([2]))
    cache = (FLOAT, ["batch", HEADS, "past", WIDTH // HEADS])
    return g.model(
        {
            "ids": (INT, ["batch", "length"]),
            "mask": (INT, ["batch", "past + length"]),
            "past_keys": cache,
            "past_values": cache,
        },
        {"y": y, "keys": keys, "values": values, "fresh": fresh},
    )


def shifted():
    """Neighbours of a sequence, and all but its ends: x[:, :-1], x[:, 1:] and x[:, 2:-1]."""
    g = Graph(12)
    one, axis, most = g.number([1]), g.number([1]), g.number([2**63 - 1])
    ahead = g.add("Slice", "x", one, most, axis)
    behind = g.add("Slice", "x", g.number([0]), g.number([-1]), axis)
    steps = g.add("Sub", ahead, behind)
    inner = g.add("Slice", "x", g.number([2]), g.number([-1]), axis)
    y = g.linear("x", 3, 4)
    outputs = {"steps": steps, "inner": g.add("Neg", inner), "y": y}
    return g.model({"x": (FLOAT, ["batch", "length", 3])}, outputs)


def ended():
    """The last elements of a sequence that may be shorter: x[:, -3:], x[:, -5:-2], and the same with
    a start that is computed, as max(length - 3, 0) and as length - min(length, 3)."""
    g = Graph(14)
    axis, most = g.number([1]), g.number([2**63 - 1])
    last = g.add("Slice", "x", g.number([-3]), most, axis)
    before = g.add("Slice", "x", g.number([-5]), g.number([-2]), axis)
    length = g.add("Unsqueeze", g.length("x", 1), g.number([0]))
    start = g.add("Max", g.add("Sub", length, g.number([3])), g.number([0]))
    rest = g.add("Slice", "x", g.number([0]), start, axis)
    first = g.add("Slice", "x", g.number([0]), g.add("Min", length, g.number([3])), axis)
    total = g.add("ReduceSum", last, g.number([1]), keepdims=0)
    outputs = {
        "last": g.add("Relu", last),
        "before": g.add("Neg", before),
        "rest": g.add("Neg", rest),
        "both": g.add("Mul", last, first),
        "total": total,
        "y": g.linear("x", 3, 4),
    }
    return g.model({"x": (FLOAT, ["batch", "length", 3])}, outputs, opset=17)


def cnn():
    """Flattened as x.view(x.size(0), -1)."""
    g = Graph(3)
    pads = dict(kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = g.add("Relu", g.add("Conv", "x", g.weight(4, 3, 3, 3), g.weight(4), **pads))
    x = g.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.add("Relu", g.add("Conv", x, g.weight(6, 4, 3, 3), g.weight(6), strides=[2, 2], **pads))
    x = g.add("Reshape", x, g.shape(g.length(x, 0), -1))
    y = g.add("Gemm", x, g.weight(5, 24), g.weight(5), transB=1)
    return g.model({"x": (FLOAT, ["batch", 3, 8, 8])}, {"logits": y})


def recurrent(operator, gates):
    """Two layers in both directions over sequences of any length, states of zeros by Expand."""
    g = Graph(4)
    hidden = 6
    x = g.add("Gather", g.weight(WORDS, WIDTH), "ids")
    batch = g.length(x, 0)
    zeros = g.add("Expand", g.number(0.0), g.shape(4, batch, hidden))
    x, width, last = g.add("Transpose", x, perm=[1, 0, 2]), WIDTH, []
    for layer in range(2):
        rows = [g.number([2 * layer]), g.number([2 * layer + 2]), g.number([0])]
        start = g.add("Slice", zeros, *rows)
        states = [start, start] if operator == "LSTM" else [start]
        weights = [g.weight(2, gates * hidden, width), g.weight(2, gates * hidden, hidden)]
        bias = g.weight(2, 2 * gates * hidden)
        made = g.add(
            operator,
            *[x, *weights, bias, "", *states],
            outputs=len(states) + 1,
            direction="bidirectional",
            hidden_size=hidden,
        )
        x = g.add("Transpose", made[0], perm=[0, 2, 1, 3])
        x = g.add("Reshape", x, g.number([0, 0, -1]))
        last.append(made[1])
        width = 2 * hidden
    y = g.linear(g.add("Transpose", x, perm=[1, 0, 2]), width, 3)
    ids = {"ids": (INT, ["batch", "length"])}
    return g.model(ids, {"scores": y, "last": g.add("Concat", *last, axis=0)})


def quantized():
    """As onnxruntime quantizes a model: inputs of products when it runs, weights before. The sums
    have more terms than float holds exactly at once."""
    g = Graph(10)

    def integers(*shape):
        # Without VNNI, onnxruntime adds two products in 16 bits, which hold no more than these.
        array = g.rng.integers(-64, 65, shape).astype(np.int8)
        g.weights.append(numpy_helper.from_array(array, f"w{len(g.weights)}"))
        return g.weights[-1].name

    def scaled(sums, scale):
        return g.add("Mul", g.add("Cast", sums, to=FLOAT), g.add("Mul", scale, g.number(0.01)))

    x, scale, zero = g.add("DynamicQuantizeLinear", "x", outputs=3)
    sums = g.add("ConvInteger", x, integers(10, 40, 3, 3), zero, pads=[1, 1, 1, 1])
    x = g.add("Flatten", g.add("Relu", scaled(sums, scale)))
    x, scale, zero = g.add("DynamicQuantizeLinear", x, outputs=3)
    logits = scaled(g.add("MatMulInteger", x, integers(360, 5), zero), scale)
    return g.model({"x": (FLOAT, ["batch", 40, 6, 6])}, {"sums": sums, "logits": logits})


STEPS = 1024


def body(nodes, inputs, outputs):
    def infos(names):
        return [helper.make_tensor_value_info(n, kind, shape) for n, kind, shape in names]

    return helper.make_graph(nodes, "body", infos(inputs), infos(outputs))


def scanned():
    """A weighted sum along the second axis, from the end: Scan over a length that a run decides."""
    g = Graph(7)
    weight, start = g.weight(3, 3), g.weight(3)
    nodes = [
        helper.make_node("MatMul", ["h", weight], ["m"]),
        helper.make_node("Add", ["m", "part"], ["n"]),
        helper.make_node("Tanh", ["n"], ["next"]),
        helper.make_node("Mul", ["next", "part"], ["row"]),
    ]
    vector = (FLOAT, [3])
    step = body(
        nodes, [("h", *vector), ("part", *vector)], [("next", *vector), ("row", *vector)]
    )
    last, rows = g.add(
        "Scan",
        start,
        "x",
        outputs=2,
        body=step,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_input_directions=[1],
        scan_output_directions=[1],
        scan_output_axes=[1],
    )
    return g.model({"x": (FLOAT, [3, "length"])}, {"last": last, "rows": rows})


def long_loop():
    """A state that each of many steps changes by its own number."""
    g = Graph(8)
    weight, rate = g.weight(3, 3), g.number(0.01)
    scalar, state = (INT, []), (FLOAT, [2, 3])
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], to=FLOAT),
        helper.make_node("Mul", ["f", rate], ["phase"]),
        helper.make_node("Sin", ["phase"], ["wave"]),
        helper.make_node("MatMul", ["h", weight], ["m"]),
        helper.make_node("Add", ["m", "wave"], ["n"]),
        helper.make_node("Tanh", ["n"], ["next"]),
        helper.make_node("ReduceSum", ["next"], ["row"], keepdims=0),
        helper.make_node("Identity", ["go"], ["on"]),
    ]
    step = body(
        nodes,
        [("i", *scalar), ("go", TensorProto.BOOL, []), ("h", *state)],
        [("on", TensorProto.BOOL, []), ("next", *state), ("row", FLOAT, [])],
    )
    last, rows = g.add("Loop", g.number(STEPS), "", "x", outputs=2, body=step)
    return g.model({"x": (FLOAT, [2, 3])}, {"last": last, "rows": rows})


def long_places():
    """Reads and writes at the step: a row of x and one of a table from its end, the state's element
    of the step before, and rows written by each operator that can."""
    g = Graph(15)
    scalar, truth = (INT, []), (TensorProto.BOOL, [])
    rows, column = (FLOAT, [STEPS, 3]), (FLOAT, [3, STEPS])
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "minus": np.array(-1),
        "axis": np.array([0]),
        "axes": np.array([0, 1]),
        "tall": np.array([3, 1]),
    }
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
        for name, array in constants.items()
    ]
    table = g.weight(STEPS, 3)
    make = helper.make_node
    nodes += [
        make("Gather", ["x", "i"], ["row"], axis=0),
        make("Mul", ["i", "minus"], ["back"]),
        make("Sub", ["back", "one"], ["end"]),
        make("Gather", [table, "end"], ["other"], axis=0),
        # The row before, of the first step the last.
        make("Sub", ["i", "one"], ["before"]),
        make("Gather", ["h", "before"], ["old"], axis=0),
        make("Add", ["row", "other"], ["sum"]),
        make("Add", ["sum", "old"], ["all"]),
        make("Tanh", ["all"], ["new"]),
        make("Unsqueeze", ["i", "axes"], ["place"]),
        make("Unsqueeze", ["new", "axis"], ["update"]),
        make("ScatterND", ["h", "place", "update"], ["h_next"]),
        make("Expand", ["place", "tall"], ["index"]),
        make("Reshape", ["new", "tall"], ["standing"]),
        make("ScatterElements", ["c", "index", "standing"], ["c_next"], axis=1, reduction="add"),
        make("GatherElements", ["c", "index"], ["read"], axis=1),
        make("Squeeze", ["read"], ["flat"]),
        make("Gather", ["x", "zero"], ["first"], axis=0),
        make("Mul", ["flat", "first"], ["shown"]),
        make("Identity", ["go"], ["on"]),
    ]
    step = body(
        nodes,
        [("i", *scalar), ("go", *truth), ("h", *rows), ("c", *column)],
        [("on", *truth), ("h_next", *rows), ("c_next", *column), ("shown", FLOAT, [3])],
    )
    h, c, shown = g.add("Loop", g.number(STEPS), "", "h0", "c0", outputs=3, body=step)
    kinds = {"x": rows, "h0": rows, "c0": column}
    return g.model(kinds, {"h": h, "c": c, "shown": shown}, opset=18)


def long_layer(operator, gates):
    """A layer in both directions over many steps, of sequences of their own lengths."""
    g = Graph(9)
    hidden = 4
    made = g.add(
        operator,
        "x",
        g.weight(2, gates * hidden, 3),
        g.weight(2, gates * hidden, hidden),
        g.weight(2, 2 * gates * hidden),
        "used",
        outputs=2,
        direction="bidirectional",
        hidden_size=hidden,
    )
    kinds = {"x": (FLOAT, [STEPS, 2, 3]), "used": (TensorProto.INT32, [2])}
    return g.model(kinds, {"rows": made[0], "last": made[1]})


def lengthened():
    """A token before each sequence: batch sequences of length + 1, whose elements have no form."""
    g = Graph(13)
    first = g.add("Expand", g.weight(1, 1, 3), g.shape(g.length("x", 0), 1, 3))
    y = g.add("Concat", first, "x", axis=1)
    return g.model({"x": (FLOAT, ["batch", "length", 3])}, {"y": y})


def halves():
    """Pairs of neighbours: of a length that may be odd."""
    g = Graph(5)
    half = g.add("Div", g.length("x", 0), g.number(2))
    y = g.add("Reshape", "x", g.shape(half, 2))
    return g.model({"x": (FLOAT, ["length"])}, {"y": y})


def doubled():
    """A shape that depends on what an input holds."""
    g = Graph(6)
    y = g.add("Expand", "x", g.add("Add", g.add("Shape", "x"), g.add("ReduceMax", "n")))
    return g.model({"x": (FLOAT, ["length"]), "n": (INT, [3])}, {"y": y})


LENGTHS = [(1, 1), (3, 7), (4, MOST), (2, 13)]


def words(rng, batch, length):
    return rng.integers(0, WORDS, (batch, length))


def masked(rng, batch, length):
    used = rng.integers(1, length + 1, (batch, 1))
    return {
        "ids": words(rng, batch, length),
        "mask": (np.arange(length) < used).astype(np.int64),
    }


def remembered(rng, batch, length):
    past = min(length // 2, PAST)
    cache = (batch, HEADS, past, WIDTH // HEADS)
    mask = rng.integers(0, 2, (batch, past + length))
    mask[:, -1] = 1
    return {
        "ids": words(rng, batch, length),
        "mask": mask,
        "past_keys": rng.normal(size=cache).astype(np.float32),
        "past_values": rng.normal(size=cache).astype(np.float32),
    }


MODELS = {
    "cached": (cached(), remembered),
    "shifted": (
        shifted(),
        lambda rng, b, n: {"x": rng.normal(size=(b, n, 3)).astype(np.float32)},
    ),
    "ended": (ended(), lambda rng, b, n: {"x": rng.normal(size=(b, n, 3)).astype(np.float32)}),
    "encoder": (encoder(), masked),
    "decoder": (decoder(), lambda rng, b, n: {"ids": words(rng, b, n)}),
    "cnn": (cnn(), lambda rng, b, n: {"x": rng.normal(size=(b, 3, 8, 8)).astype(np.float32)}),
    "lstm": (recurrent("LSTM", 4), lambda rng, b, n: {"ids": words(rng, b, n)}),
    "gru": (recurrent("GRU", 3), lambda rng, b, n: {"ids": words(rng, b, n)}),
    "quantized": (
        quantized(),
        # A batch of one is of zeros alone, which have no range to be scaled.
        lambda rng, b, n: {"x": (rng.normal(size=(b, 40, 6, 6)) * (b > 1)).astype(np.float32)},
    ),
    "scan": (scanned(), lambda rng, b, n: {"x": rng.normal(size=(3, n)).astype(np.float32)}),
}
LONG = {
    "long_loop": (long_loop(), lambda rng: {"x": rng.normal(size=(2, 3)).astype(np.float32)}),
    "long_places": (
        long_places(),
        lambda rng: {
            "x": rng.normal(size=(STEPS, 3)).astype(np.float32),
            "h0": rng.normal(size=(STEPS, 3)).astype(np.float32),
            "c0": rng.normal(size=(3, STEPS)).astype(np.float32),
        },
    ),
    **{
        f"long_{name.lower()}": (
            long_layer(name, gates),
            lambda rng: {
                "x": rng.normal(size=(STEPS, 2, 3)).astype(np.float32),
                "used": np.array([STEPS, 700], np.int32),
            },
        )
        for name, gates in [("GRU", 3), ("LSTM", 4), ("RNN", 1)]
    },
}
REFUSED = {"halves": halves(), "doubled": doubled(), "lengthened": lengthened()}


def results(model, runs):
    """onnxruntime's results for the inputs of runs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers)
    return [session.run(None, inputs) for inputs in runs]


def record(target, model, runs, outputs=None):
    """A model with the inputs of runs and their results, which are onnxruntime's unless given."""
    target.mkdir(parents=True)
    onnx.save(model, target / "model.onnx")
    outputs = outputs or results(model, runs)
    for number, (inputs, given) in enumerate(zip(runs, outputs)):
        data = target / f"test_data_set_{number}"
        data.mkdir()
        for kind, arrays in [("input", inputs.values()), ("output", given)]:
            for at, array in enumerate(arrays):
                tensor = numpy_helper.from_array(np.asarray(array))
                (data / f"{kind}_{at}.pb").write_bytes(tensor.SerializeToString())


def write(scripts, fill):
    """Calls `fill` with the folder that the only argument names, unless it is of these scripts."""
    into = pathlib.Path(sys.argv[1])
    version = hashlib.sha256(b"".join(pathlib.Path(s).read_bytes() for s in scripts)).hexdigest()
    done = into / "done"
    if done.is_file() and done.read_text() == version:
        return
    # Made aside, so that two processes do not disturb each other.
    aside = into.with_name(f"{into.name}.{os.getpid()}")
    fill(aside)
    (aside / "done").write_text(version)
    shutil.rmtree(into, ignore_errors=True)
    aside.rename(into)


def fill(into):
    for name, model in REFUSED.items():
        (into / name).mkdir(parents=True)
        onnx.save(model, into / name / "model.onnx")
    for name, (model, feed) in MODELS.items():
        rng = np.random.default_rng(9)
        record(into / name, model, [feed(rng, *lengths) for lengths in LENGTHS])
    for name, (model, feed) in LONG.items():
        record(into / name, model, [feed(np.random.default_rng(9))])


if __name__ == "__main__":
    write([__file__], fill)
