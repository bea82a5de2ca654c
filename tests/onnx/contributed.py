"""Writes models with operators of com.microsoft, onnxruntime's own domain: a model for each operator
and its options, models that onnxruntime's optimizers and quantizers have rewritten, and models whose
weights of four bits this script makes. Each is a folder in the layout of ONNX's tests, with the
results of onnxruntime, below the folder that the only argument names. A file `done` says that this
script has written all of them.
"""

import tempfile

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
from onnxruntime.quantization import quantize_dynamic, quantize_static
from onnxruntime.transformers.optimizer import optimize_model

from open import (
    FLOAT,
    INT,
    MODELS,
    MOST,
    Graph,
    record,
    results,
    write,
)

DOMAIN = "com.microsoft"
INT32, BYTE, SIGNED = TensorProto.INT32, TensorProto.UINT8, TensorProto.INT8
KINDS = {np.dtype(np.float32): FLOAT, np.dtype(np.int64): INT, np.dtype(np.int32): INT32}
KINDS |= {np.dtype(np.uint8): BYTE, np.dtype(np.int8): SIGNED, np.dtype(bool): TensorProto.BOOL}
RNG = np.random.default_rng(17)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def integers(low, high, *shape, kind=np.int32):
    return RNG.integers(low, high, shape).astype(kind)


def fixed(value, kind=np.float32):
    """A constant of the model."""
    return ("constant", np.asarray(value, kind))


def one(operator, inputs, outputs=1, **attributes):
    """A model of one node, with these arrays as its inputs; None is an input that is absent."""
    g, fed, names = Graph(0), {}, []
    for at, value in enumerate(inputs):
        if value is None:
            names.append("")
        elif isinstance(value, tuple):
            g.weights.append(numpy_helper.from_array(value[1], f"c{at}"))
            names.append(f"c{at}")
        else:
            fed[f"x{at}"] = value
            names.append(f"x{at}")
    made = g.add(operator, *names, outputs=outputs, domain=DOMAIN, **attributes)
    made = [made] if outputs == 1 else made
    kinds = {name: (KINDS[array.dtype], array.shape) for name, array in fed.items()}
    results = {f"y{at}": name for at, name in enumerate(made)}
    return g.model(kinds, results, opset=21, domains=[DOMAIN]), [fed]


def scale(value):
    return fixed(value)


def zero(value, kind=np.uint8):
    return fixed(value, kind)


def quantized(*shape, kind=np.uint8):
    info = np.iinfo(kind)
    return integers(info.min, info.max + 1, *shape, kind=kind)


def fused():
    x = normal(2, 3, 6, 6)
    weight, bias = fixed(normal(4, 3, 3, 3)), fixed(normal(4))
    pads = dict(kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    for name, numbers in [
        ("Relu", []),
        ("LeakyRelu", [0.2]),
        ("Clip", [-0.5, 1.5]),
        ("Sigmoid", []),
        ("Tanh", []),
        ("HardSigmoid", [0.3, 0.4]),
    ]:
        more = dict(activation_params=numbers) if numbers else {}
        yield f"conv_{name}", one("FusedConv", [x, weight, bias], activation=name, **more, **pads)
    sum_of = normal(2, 4, 6, 6)
    yield "conv_sum", one("FusedConv", [x, weight, bias, sum_of], activation="Relu", **pads)

    a, b, c = normal(3, 5), normal(5, 4), normal(4)
    yield "gemm", one("FusedGemm", [a, b, c], activation="Relu", alpha=0.5, beta=2.0)
    turned = [normal(5, 3), normal(4, 5), c]
    leaky = dict(activation="LeakyRelu", activation_alpha=0.3)
    yield "gemm_turned", one("FusedGemm", turned, transA=1, transB=1, **leaky)
    # onnxruntime wants both numbers; the first has the default of HardSigmoid.
    hard = dict(activation="HardSigmoid", activation_beta=0.1)
    expected = results(*one("FusedGemm", [a, b, c], **hard, activation_alpha=0.2))
    yield "gemm_beta", (*one("FusedGemm", [a, b, c], **hard), expected)

    yield "matmul", one("FusedMatMul", [normal(2, 3, 5), normal(5, 4)], alpha=0.25)
    both = [normal(2, 5, 3), normal(2, 4, 5)]
    yield "matmul_turned", one("FusedMatMul", both, transA=1, transB=1)
    batched = [normal(3, 2, 7, 5), normal(2, 7, 5, 4)]
    yield "matmul_batch", one("FusedMatMul", batched, transBatchA=1)
    batched = [normal(2, 7, 3, 5), normal(4, 2, 7, 5)]
    yield "matmul_batches", one("FusedMatMul", batched, transB=1, transBatchB=1)
    yield "transpose_matmul", one("TransposeMatMul", both, transA=1, transB=1, alpha=2.0)

    yield "bias_gelu", one("BiasGelu", [normal(2, 3, 8), normal(8)])
    yield "fast_gelu", one("FastGelu", [normal(2, 3, 8)])
    yield "fast_gelu_bias", one("FastGelu", [normal(2, 3, 8), normal(8)])
    yield "gelu", one("Gelu", [normal(2, 3, 8)])
    yield "quick_gelu", one("QuickGelu", [normal(2, 3, 8)])
    yield "quick_gelu_alpha", one("QuickGelu", [normal(2, 3, 8)], alpha=1.0)


def norms():
    x, skip, scale_of, bias = normal(2, 5, 8), normal(2, 5, 8), normal(8), normal(8)
    skips = "SkipLayerNormalization"
    yield "skip", one(skips, [x, skip, scale_of, bias], epsilon=1e-5)
    yield "skip_default", one(skips, [x, skip, scale_of])
    more = [x, skip, scale_of, bias, normal(8)]
    # Mean and deviation are results of training alone.
    yield "skip_sum", named(one(skips, more, 4, epsilon=1e-3), [0, 3])
    yield "skip_shared", one(skips, [x, normal(1, 5, 8), scale_of, bias])
    yield "skip_flat", one(skips, [x, normal(5, 8), scale_of, bias])
    simple = "SkipSimplifiedLayerNormalization"
    yield "simple", one(simple, [x, skip, scale_of], epsilon=1e-5)
    yield "simple_sum", named(one(simple, [x, skip, scale_of, bias], 4), [0, 3])

    ids, kinds = integers(0, 20, 2, 5), integers(0, 2, 2, 5)
    tables = [normal(20, 8), normal(7, 8), normal(2, 8)]
    embed = "EmbedLayerNormalization"
    inputs = [ids, kinds, *tables, scale_of, bias]
    yield "embed", one(embed, inputs, 2, epsilon=1e-5)
    mask = (np.arange(5) < np.array([[3], [5]])).astype(np.int32)
    yield "embed_mask", one(embed, [*inputs, mask], 3)
    alone = [ids, None, *tables[:2], None, scale_of, bias, None, integers(0, 7, 2, 5)]
    yield "embed_places", named(one(embed, alone, 3), [0, 2])
    yield "embed_shared", one(embed, [*alone[:8], integers(0, 7, 1, 5)], 2)


def shown(case):
    """A case whose model has the first result of its node alone as an output."""
    model, runs = case
    del model.graph.output[1:]
    return model, runs


def named(case, kept):
    """A case whose node names only these of its results."""
    model, runs = case
    outputs = [model.graph.output[at] for at in kept]
    names = {output.name for output in outputs}
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    (main,) = [node for node in model.graph.node if node.domain == DOMAIN]
    for node in [n for n in model.graph.node if n.op_type == "Identity"]:
        if node.output[0] not in names:
            at = list(main.output).index(node.input[0])
            main.output[at] = ""
            model.graph.node.remove(node)
    while main.output and not main.output[-1]:
        main.output.pop()
    return model, runs


HEADS, EACH, BATCH, LENGTH = 2, 4, 2, 5
WIDTH = HEADS * EACH


def attentions():
    x, weight, bias = normal(BATCH, LENGTH, 6), normal(6, 3 * WIDTH), normal(3 * WIDTH)
    of = dict(num_heads=HEADS)
    yield "plain", one("Attention", [x, weight, bias], **of)
    yield "no_bias", one("Attention", [x, weight], **of, scale=0.3)
    yield "causal", one("Attention", [x, weight, bias], **of, unidirectional=1)
    rows = (np.arange(LENGTH) < np.array([[3], [5]])).astype(np.int32)
    yield "padded", one("Attention", [x, weight, bias, rows], **of)
    low = dict(unidirectional=1, mask_filter_value=-100.0)
    yield "padded_causal", one("Attention", [x, weight, bias, rows], **of, **low)
    ends = np.array([4, 5], np.int32)
    yield "ended", one("Attention", [x, weight, bias, ends], **of)
    starts = np.array([5, 5, 2, 0], np.int32)
    yield "started", one("Attention", [x, weight, bias, starts], **of)
    square = integers(0, 2, BATCH, LENGTH, LENGTH)
    square[:, :, 0] = 1
    yield "square", one("Attention", [x, weight, bias, square], **of)
    past, past_length = normal(2, BATCH, HEADS, 3, EACH), 3
    more = [x, weight, bias, None, past]
    yield "past", one("Attention", more, 2, **of, unidirectional=1)
    rows = integers(0, 2, BATCH, past_length + LENGTH)
    rows[:, -1] = 1
    more = [x, weight, bias, rows, past]
    yield "past_masked", one("Attention", more, 2, **of, unidirectional=1)
    added = normal(1, HEADS, LENGTH, LENGTH)
    yield "added", one("Attention", [x, weight, bias, None, None, added], **of)
    parts = [x, normal(6, 2 * WIDTH + 6), normal(2 * WIDTH + 6)]
    yield "widths", one("Attention", parts, **of, qkv_hidden_sizes=[WIDTH, WIDTH, 6])

    multi = "MultiHeadAttention"
    q, k, v = normal(BATCH, 3, WIDTH), normal(BATCH, LENGTH, WIDTH), normal(BATCH, LENGTH, 6)
    yield "multi", one(multi, [q, k, v], **of)
    yield "multi_bias", one(multi, [q, k, v, normal(2 * WIDTH + 6)], **of)
    rows = (np.arange(LENGTH) < np.array([[2], [5]])).astype(np.int32)
    yield "multi_padded", one(multi, [q, k, v, None, rows], **of)
    yield "multi_ended", one(multi, [q, k, v, None, np.array([2, 5], np.int32)], **of)
    added = normal(1, HEADS, 3, LENGTH)
    yield "multi_added", one(multi, [q, k, v, None, None, added], **of, scale=0.4)
    heads = [q, normal(BATCH, HEADS, LENGTH, EACH), normal(BATCH, HEADS, LENGTH, EACH)]
    yield "multi_heads", one(multi, heads, **of)
    same = [normal(BATCH, LENGTH, WIDTH) for _ in range(3)]
    yield "multi_causal", one(multi, same, **of, unidirectional=1)
    old = [normal(BATCH, HEADS, 3, EACH) for _ in range(2)]
    yield "multi_past", one(multi, [*same, None, None, None, *old], 3, **of, unidirectional=1)

    # Packed tensors have no kernel on the CPU; their parts give the same.
    parts = [normal(BATCH, LENGTH, HEADS, EACH) for _ in range(3)]
    flat = [part.reshape(BATCH, LENGTH, WIDTH) for part in parts]
    expected = results(*one(multi, flat, **of))
    yield "multi_packed", (*one(multi, [np.stack(parts, 3)], **of), expected)
    packed = [flat[0], np.stack(parts[1:], 3)]
    yield "multi_packed_keys", (*one(multi, packed, **of), expected)

    tables = [normal(16, EACH // 2), normal(16, EACH // 2)]
    turn = "RotaryEmbedding"
    first, places = np.array([3], np.int64), integers(0, 16, BATCH, LENGTH, kind=np.int64)
    flat, four = normal(BATCH, LENGTH, WIDTH), normal(BATCH, HEADS, LENGTH, EACH)
    yield "turn", one(turn, [flat, first, *tables])
    yield "turn_places", one(turn, [flat, places, *tables], interleaved=1)
    yield "turn_four", one(turn, [four, places, *tables])
    less = [normal(16, 1), normal(16, 1)]
    part = dict(num_heads=HEADS, rotary_embedding_dim=2)
    yield "turn_part", one(turn, [flat, places, *less], **part)

    yield from grouped()


def grouped():
    name, each, queries = "GroupQueryAttention", 16, 4
    of = dict(num_heads=queries, kv_num_heads=2)
    tables = [normal(32, each // 2), normal(32, each // 2)]

    def inputs(length, lengths, past, total=None, packed=False):
        q, k, v = [normal(2, length, n * each) for n in (queries, 2, 2)]
        first = [np.concatenate([q, k, v], 2), None, None] if packed else [q, k, v]
        old = [normal(2, 2, past, each) for _ in range(2)]
        used = np.array(lengths, np.int32) - 1
        return [*first, *old, used, fixed(total or past + length, np.int32)]

    turned = dict(do_rotary=1, **of)
    yield "first", one(name, inputs(6, [6, 6], 0), 3, **of)
    yield "first_turned", one(name, [*inputs(6, [6, 6], 0), *tables], 3, **turned)
    yield "first_packed", one(name, [*inputs(6, [6, 6], 0, packed=True), *tables], 3, **turned)
    yield "next", one(name, [*inputs(1, [6, 6], 5), *tables], 3, **turned)
    between = dict(rotary_interleaved=1, scale=0.2, softcap=3.0)
    yield "next_options", one(name, [*inputs(1, [6, 6], 5), *tables], 3, **turned, **between)
    # Sequences of different lengths, behind whose rows the present has others.
    yield "ragged", shown(one(name, [*inputs(1, [4, 6], 5), *tables], 3, **turned))
    room = [*inputs(1, [5, 5], 8, total=5), *tables]
    yield "room", shown(one(name, room, 3, **turned))
    yield "window", one(name, inputs(1, [12, 12], 11), 3, **of, local_window_size=4)
    yield "first_window", one(name, inputs(9, [9, 9], 0), 3, **of, local_window_size=3)
    added = [*inputs(1, [6, 6], 5), *tables, None, normal(2, queries, 1, 6)]
    yield "next_added", one(name, added, 3, **turned)


def few_bits():
    name = "MatMulNBits"
    for bits in (2, 4, 8):
        k, n, block = 70, 5, 16
        blocks = -(-k // block)
        weights = fixed(quantized(n, blocks, block * bits // 8), np.uint8)
        scales = fixed(0.1 * normal(n, blocks))
        of = dict(K=k, N=n, bits=bits, block_size=block, accuracy_level=1)
        a = normal(2, 3, k)
        yield f"bits{bits}", one(name, [a, weights, scales], **of)
        zeros = fixed(quantized(n, -(-blocks * bits // 8)), np.uint8)
        yield f"bits{bits}_zeros", one(name, [a, weights, scales, zeros], **of)
        biased = [a, weights, scales, None, None, fixed(normal(n))]
        yield f"bits{bits}_bias", one(name, biased, **of)
    floats = fixed(integers(4, 12, n, blocks, kind=np.float32))
    weights = fixed(quantized(n, blocks, block // 2), np.uint8)
    of = dict(K=k, N=n, bits=4, block_size=block, accuracy_level=1)
    yield "bits4_floats", one(name, [a, weights, scales, floats], **of)

    rows, blocks, block = 9, 3, 16
    ids = integers(0, rows, 2, 4, kind=np.int64)
    for bits in (4, 8):
        table = fixed(quantized(rows, blocks * block * bits // 8), np.uint8)
        scales = fixed(0.1 * normal(rows, blocks))
        of = dict(bits=bits, block_size=block, gather_axis=0, quantize_axis=1)
        yield f"rows{bits}", one("GatherBlockQuantized", [table, ids, scales], **of)
        zeros = fixed(quantized(rows, -(-blocks * bits // 8)), np.uint8)
        yield f"rows{bits}_zeros", one("GatherBlockQuantized", [table, ids, scales, zeros], **of)


def integer_products():
    # Without VNNI, onnxruntime adds two products in 16 bits, which hold no more than these.
    small = integers(-60, 61, 7, 4, kind=np.int8)
    a, b = normal(2, 3, 7), fixed(small, np.int8)
    one_scale, each = scale(0.02), fixed(0.01 + 0.01 * np.arange(4))
    name = "DynamicQuantizeMatMul"
    yield "dynamic", one(name, [a, b, one_scale])
    zeros = zero([3, 0, -4, 1], np.int8)
    yield "dynamic_each", one(name, [a, b, each, zeros, fixed(normal(4))])
    name = "MatMulIntegerToFloat"
    bytes_of = integers(0, 120, 2, 3, 7, kind=np.uint8)
    yield "to_float", one(name, [bytes_of, b, scale(0.1), one_scale])
    more = [bytes_of, b, scale(0.1), each, zero(60), zeros, fixed(normal(4))]
    yield "to_float_each", one(name, more)
    name = "QGemm"
    a = integers(0, 120, 3, 7, kind=np.uint8)
    bias = fixed(integers(-500, 500, 4), np.int32)
    to = [scale(0.9), zero(100)]
    inputs = [a, scale(0.1), zero(50), b, one_scale, zero(2, np.int8), bias]
    yield "gemm_bytes", one(name, [*inputs, *to], alpha=0.75)
    turned = fixed(np.ascontiguousarray(small.T), np.int8)
    inputs = [a, scale(0.1), zero(50), turned, each, zeros, None]
    yield "gemm_floats", one(name, inputs, transB=1)


def bytes_arithmetic():
    # The scales make many results lie halfway between two numbers.
    for kind in (np.uint8, np.int8):
        label, mid = kind.__name__, 0 if kind is np.int8 else 128
        a, b = quantized(4, 6, 8, kind=kind), quantized(6, 1, kind=kind)
        by_a, by_b = [scale(0.0625), zero(mid + 3, kind)], [scale(0.125), zero(mid - 7, kind)]
        to = [scale(0.25), zero(mid + 1, kind)]
        for op in ("QLinearAdd", "QLinearMul"):
            yield f"{op}_{label}", one(op, [a, *by_a, b, *by_b, *to])
        to_unit = [scale(1 / 256), zero(mid - 128, kind)]
        yield f"sigmoid_{label}", one("QLinearSigmoid", [a, *by_a, *to_unit])
        yield f"leaky_{label}", one("QLinearLeakyRelu", [a, *by_a, *to], alpha=0.5)
        image = quantized(2, 3, 6, 6, kind=kind)
        small = quantized(2, 8, 2, 2, kind=kind)
        yield f"global_{label}", one("QLinearGlobalAveragePool", [small, *by_a, *by_a])
        pool = dict(kernel_shape=[2, 2], strides=[2, 2])
        yield f"pool_{label}", one("QLinearAveragePool", [image, *by_a, *by_a], **pool)
        rest = [a, *by_a, quantized(4, 1, 8, kind=kind), *by_b]
        yield f"concat_{label}", one("QLinearConcat", [*to, *rest], axis=1)
        softmax = dict(axis=-1, opset=13)
        yield f"softmax_{label}", one("QLinearSoftmax", [a, *by_a, *to_unit], **softmax)
        yield f"real_{label}", one("DequantizeLinear", [a, *by_a])
        yield f"bytes_{label}", one("QuantizeLinear", [np.round(32 * normal(2, 3, 5)) / 32, *by_a])


FAMILIES = {
    "attention": attentions,
    "bytes": bytes_arithmetic,
    "few_bits": few_bits,
    "fused": fused,
    "norm": norms,
    "product": integer_products,
}


def bert():
    """An encoder as PyTorch's exporter writes it, whose patterns the optimizers look for."""
    g = Graph(21)
    words, width, heads = 40, 32, 2
    each = width // heads

    def linear(x, columns, rows=width):
        return g.add("Add", g.add("MatMul", x, g.weight(rows, columns)), g.weight(columns))

    def norm(a, b):
        scale, bias = g.weight(width), g.weight(width)
        return g.add("LayerNormalization", g.add("Add", a, b), scale, bias, axis=-1)

    def head(x, perm):
        x = g.add("Reshape", linear(x, width), g.number([0, 0, heads, each]))
        return g.add("Transpose", x, perm=perm)

    length = g.length("ids", 1)
    end = g.add("Unsqueeze", length, g.number([0]))
    rows = g.number([list(range(MOST))])
    places = g.add("Slice", rows, g.number([0]), end, g.number([1]))
    x = g.add("Gather", g.weight(words, width), "ids")
    x = g.add("Add", x, g.add("Gather", g.weight(2, width), "kinds"))
    x = norm(x, g.add("Gather", g.weight(MOST, width), places))
    mask = g.add("Unsqueeze", g.add("Unsqueeze", "mask", g.number([1])), g.number([2]))
    mask = g.add("Sub", g.number(1.0), g.add("Cast", mask, to=FLOAT))
    mask = g.add("Mul", mask, g.number(-10000.0))
    for _ in range(2):
        q = head(x, [0, 2, 1, 3])
        k = head(x, [0, 2, 3, 1])
        v = head(x, [0, 2, 1, 3])
        scores = g.add("Div", g.add("MatMul", q, k), g.number(float(each) ** 0.5))
        mixed = g.add("MatMul", g.add("Softmax", g.add("Add", scores, mask), axis=-1), v)
        mixed = g.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = g.add("Reshape", mixed, g.number([0, 0, width]))
        x = norm(linear(mixed, width), x)
        inner = linear(x, 2 * width)
        bell = g.add("Erf", g.add("Div", inner, g.number(2.0**0.5)))
        inner = g.add("Mul", g.add("Mul", inner, g.add("Add", bell, g.number(1.0))), g.number(0.5))
        x = norm(linear(inner, width, 2 * width), x)
    kind = (INT, ["batch", "length"])
    return g.model({"ids": kind, "mask": kind, "kinds": kind}, {"states": x})


def llama():
    """A decoder with a cache, as builders of models for onnxruntime write it: weights of four bits,
    positions by the number of words before."""
    g = Graph(22)
    words, width, heads, each = 40, 32, 4, 16

    def linear(x, rows, columns):
        return g.add("MatMul", x, g.weight(rows, columns))

    # The default domain, although the operator is onnxruntime's own.
    def norm(x):
        return g.add("SimplifiedLayerNormalization", x, g.weight(width), axis=-1, epsilon=1e-5)

    def skip_norm(a, b):
        made = [f"skip_{len(g.nodes)}", f"sum_{len(g.nodes)}"]
        name, scale = "SkipSimplifiedLayerNormalization", g.weight(width)
        outputs = [made[0], "", "", made[1]]
        g.nodes.append(
            helper.make_node(name, [a, b, scale], outputs, domain=DOMAIN, epsilon=1e-5)
        )
        return made

    used = g.add("ReduceSum", "mask", g.number([1]), keepdims=0)
    used = g.add("Cast", g.add("Sub", used, g.number(1)), to=INT32)
    total = g.add("Cast", g.length("mask", 1), to=INT32)
    tables = [g.weight(64, each // 2, scale=1.0) for _ in range(2)]
    rest = g.add("Gather", g.weight(words, width, scale=1.0), "ids")
    x, kept = norm(rest), {}
    for layer in range(2):
        q = linear(x, width, heads * each)
        k, v = [linear(x, width, 2 * each) for _ in range(2)]
        past = [f"past_keys_{layer}", f"past_values_{layer}"]
        of = dict(num_heads=heads, kv_num_heads=2, do_rotary=1, domain=DOMAIN)
        inputs = [q, k, v, *past, used, total, *tables]
        mixed, keys, values = g.add("GroupQueryAttention", *inputs, outputs=3, **of)
        kept |= {f"keys_{layer}": keys, f"values_{layer}": values}
        x, rest = skip_norm(rest, linear(mixed, heads * each, width))
        gate = linear(x, width, 2 * width)
        gate = g.add("Mul", gate, g.add("Sigmoid", gate))
        inner = g.add("Mul", gate, linear(x, width, 2 * width))
        x, rest = skip_norm(rest, linear(inner, 2 * width, width))
    cache = (FLOAT, ["batch", 2, "past", each])
    inputs = {"ids": (INT, ["batch", "length"]), "mask": (INT, ["batch", "past + length"])}
    for layer in range(2):
        inputs |= {f"past_keys_{layer}": cache, f"past_values_{layer}": cache}
    return g.model(inputs, {"logits": linear(x, width, words), **kept})


def continued(rng, batch, length, past):
    caches = [f"past_{of}_{layer}" for layer in range(2) for of in ("keys", "values")]
    return {
        "ids": rng.integers(0, 40, (batch, length)),
        "mask": np.ones((batch, past + length), np.int64),
        **{name: rng.normal(size=(batch, 2, past, 16)).astype(np.float32) for name in caches},
    }


def sentences(rng, batch, length):
    used = rng.integers(1, length + 1, (batch, 1))
    return {
        "ids": rng.integers(0, 40, (batch, length)),
        "mask": (np.arange(length) < used).astype(np.int64),
        "kinds": rng.integers(0, 2, (batch, length)),
    }


def optimized(model):
    """A model as onnxruntime's optimizer writes it: with operators of its own domain."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        extended = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.graph_optimization_level = extended
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        providers = ["CPUExecutionProvider"]
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers)
        return onnx.load(f"{folder}/optimized.onnx")


class Runs(CalibrationDataReader):
    """The inputs of runs, one after the other."""

    def __init__(self, runs):
        self.runs = iter(runs)

    def get_next(self):
        return next(self.runs, None)


def rewritten(model, quantize):
    """A model that a quantizer reads from a file and writes to another."""
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, f"{folder}/model.onnx")
        quantize(f"{folder}/model.onnx", f"{folder}/quantized.onnx")
        return onnx.load(f"{folder}/quantized.onnx")


def fused_by_pattern(before, after):
    """By the optimizer of transformers, which is a program of its own."""
    made = optimize_model(before, "bert", num_heads=2, hidden_size=32, opt_level=0)
    made.save_model_to_file(after)


def in_four_bits(model, block=16):
    """A model whose products with weights are MatMulNBits."""
    weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
    for node in [n for n in model.graph.node if n.op_type == "MatMul"]:
        if node.input[1] not in weights:
            continue
        columns = weights[node.input[1]].T
        n, k = columns.shape
        blocks = columns.reshape(n, -1, block)
        low = np.minimum(blocks.min(2), 0)
        scales = np.maximum((np.maximum(blocks.max(2), 0) - low) / 15, 1e-6).astype(np.float32)
        zeros = np.round(-low / scales).astype(np.uint8)
        numbers = np.clip(np.round(blocks / scales[..., None]) + zeros[..., None], 0, 15)
        numbers = numbers.astype(np.uint8)
        packed = numbers[..., ::2] | numbers[..., 1::2] << 4
        zeros = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
        made = {"q": packed, "s": scales, "z": zeros[:, ::2] | zeros[:, 1::2] << 4}
        names = [f"{node.input[1]}_{node.output[0]}_{of}" for of in made]
        for name, array in zip(names, made.values()):
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        node.CopyFrom(
            helper.make_node(
                "MatMulNBits",
                [node.input[0], *names],
                list(node.output),
                domain=DOMAIN,
                K=k,
                N=n,
                bits=4,
                block_size=block,
                accuracy_level=1,
            )
        )
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    used = {name for node in model.graph.node for name in node.input}
    kept = [w for w in model.graph.initializer if w.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def in_bytes(before, after):
    quantize_dynamic(before, after, weight_type=QuantType.QInt8, reduce_range=True)


def whole():
    """Models as the optimizers and the quantizers write them, and two with weights of four bits."""
    rng = np.random.default_rng(9)
    image, feed = MODELS["cnn"]
    images = [feed(rng, batch, 0) for batch in (1, 4, 3)]
    yield "optimized_cnn", (optimized(image), images)

    def to_bytes(before, after):
        quantize_static(
            before,
            after,
            Runs(images),
            quant_format=QuantFormat.QOperator,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QUInt8,
            reduce_range=True,
        )

    yield "static_cnn", (rewritten(image, to_bytes), images)

    text, feed = MODELS["encoder"]
    runs = [feed(rng, *lengths) for lengths in [(1, 1), (4, MOST), (3, 7)]]
    yield "optimized_encoder", (optimized(text), runs)
    yield "dynamic_encoder", (optimized(rewritten(text, in_bytes)), runs)
    runs = [sentences(rng, *lengths) for lengths in [(1, 1), (4, MOST), (3, 7)]]
    yield "optimized_bert", (optimized(bert()), runs)
    fused_bert = rewritten(bert(), fused_by_pattern)
    yield "fused_bert", (fused_bert, [narrowed(fused_bert, run) for run in runs])
    yield "dynamic_bert", (optimized(rewritten(bert(), in_bytes)), runs)
    yield "four_bit_bert", (in_four_bits(bert()), runs)
    runs = [continued(rng, *of) for of in [(2, 5, 0), (4, 1, 8), (1, 3, 4), (4, MOST, 0)]]
    yield "four_bit_llama", (in_four_bits(llama()), runs)


def narrowed(model, run):
    """The inputs of a run in the integer types that a model has now."""
    kinds = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    return {
        name: array.astype(helper.tensor_dtype_to_np_dtype(kinds[name]))
        for name, array in run.items()
    }


def fill(into):
    for family, cases in FAMILIES.items():
        for name, case in cases():
            record(into / "node" / f"{family}_{name}", *case)
    for name, (model, runs) in whole():
        assert any(node.domain == DOMAIN for node in model.graph.node), name
        record(into / "whole" / name, model, runs)


if __name__ == "__main__":
    write([__file__, __file__.replace("contributed.py", "open.py")], fill)
