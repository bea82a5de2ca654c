"""Records GGUF files and the values that they stand for, for tests/hub/gguf.rs.

Needs numpy and gguf (0.17.1). Run in this folder: python record_gguf.py. It writes into gguf/:
    types.gguf              a tensor of each type that is read, named after it, and `unread`, of a type that is not
    types.safetensors       their values as f32, as gguf decodes them
    llama.gguf              a Llama of two layers with a tied head, in Q4_0, Q8_0, F16 and F32, rows of queries and keys as llama.cpp's converter orders them
    llama.safetensors       its weights under the names and in the order of Hugging Face's files, tokens `x` and their `logits`
    gpt2.gguf               the model of hub/gpt2 in F32, products as llama.cpp's converter transposes them, with a head of its own
Types that gguf decodes but does not encode have random blocks, whose scales are finite halves.
"""
import json, os, struct
import gguf, numpy as np
from gguf import GGMLQuantizationType as T

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gguf")
os.makedirs(HERE, exist_ok=True)
random = np.random.default_rng(0)


def safetensors(name, tensors):
    header, data = {}, b""
    for key, value in tensors.items():
        value = np.ascontiguousarray(value)
        header[key] = {"dtype": {"float32": "F32", "int32": "I32"}[str(value.dtype)], "shape": list(value.shape), "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    with open(os.path.join(HERE, name), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def finished(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# The types that gguf encodes, and the places of the halves in the blocks of the others.
encoded = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.BF16, T.F16, T.F32]
halves = {T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0]}
writer = gguf.GGUFWriter(os.path.join(HERE, "types.gguf"), "none")
writer.add_custom_alignment(64)
writer.add_name("types")
writer.add_float32("test.float", 0.5)
writer.add_int16("test.negative", -3)
writer.add_bool("test.bool", True)
writer.add_array("test.tokens", ["<s>", "a", "é"])
writer.add_array("test.scores", [0.5, -1.0])
expected = {}
for kind in encoded:
    values = random.standard_normal((3, 64)).astype(np.float32)
    values[1, :32] = 0
    raw = gguf.quantize(values, kind)
    writer.add_tensor(kind.name, raw, raw_dtype=kind)
    expected[kind.name] = gguf.dequantize(raw, kind).reshape(3, 64)
for kind, places in halves.items():
    block, size = gguf.GGML_QUANT_SIZES[kind]
    shape = (3, 2 * block) if block == 32 else (2, block)
    raw = random.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    for at in places:
        raw[..., at : at + 2] = random.standard_normal(raw.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    raw = raw.reshape(shape[0], -1)
    writer.add_tensor(kind.name, raw, raw_dtype=kind)
    expected[kind.name] = gguf.dequantize(raw, kind)
for dtype in [np.float64, np.int8, np.int16, np.int32, np.int64]:
    values = (100 * random.standard_normal((2, 3, 5))).astype(dtype)
    name = {"float64": "F64", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"}[np.dtype(dtype).name]
    writer.add_tensor(name, values)
    expected[name] = values.astype(np.float32)
writer.add_tensor("unread", np.zeros((1, 66), np.uint8), raw_dtype=T.IQ2_XXS)
finished(writer)
safetensors("types.safetensors", expected)

LAYERS, WIDTH, HEADS, KEY_HEADS, INNER, VOCABULARY, EPS = 2, 32, 4, 2, 96, 23, 1e-5
EACH = WIDTH // HEADS
writer = gguf.GGUFWriter(os.path.join(HERE, "llama.gguf"), "llama")
writer.add_block_count(LAYERS)
writer.add_context_length(6)
writer.add_embedding_length(WIDTH)
writer.add_feed_forward_length(INNER)
writer.add_head_count(HEADS)
writer.add_head_count_kv(KEY_HEADS)
writer.add_layer_norm_rms_eps(EPS)
writer.add_rope_freq_base(10000.0)
writer.add_tokenizer_model("llama")
writer.add_token_list([f"t{i}" for i in range(VOCABULARY)])
weights = {}


def weight(name, hub, shape, kind, heads=0):
    """A weight in both files: quantized, and, for queries and keys, with the rows of each head interleaved."""
    one = len(shape) == 1
    values = (1 + 0.1 * random.random(shape) if one else 0.3 * random.standard_normal(shape)).astype(np.float32)
    stored = values
    if heads:
        stored = values.reshape(heads, 2, shape[0] // heads // 2, shape[1]).swapaxes(1, 2).reshape(shape)
    writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
    weights[hub] = gguf.dequantize(gguf.quantize(values, kind), kind).reshape(shape)


weight("token_embd.weight", "model.embed_tokens.weight", (VOCABULARY, WIDTH), T.F16)
weight("output_norm.weight", "model.norm.weight", (WIDTH,), T.F32)
for i in range(LAYERS):
    of = f"model.layers.{i}"
    weight(f"blk.{i}.attn_norm.weight", f"{of}.input_layernorm.weight", (WIDTH,), T.F32)
    weight(f"blk.{i}.ffn_norm.weight", f"{of}.post_attention_layernorm.weight", (WIDTH,), T.F32)
    weight(f"blk.{i}.attn_q.weight", f"{of}.self_attn.q_proj.weight", (WIDTH, WIDTH), T.Q4_0, HEADS)
    weight(f"blk.{i}.attn_k.weight", f"{of}.self_attn.k_proj.weight", (KEY_HEADS * EACH, WIDTH), T.Q8_0 if i else T.Q4_0, KEY_HEADS)
    weight(f"blk.{i}.attn_v.weight", f"{of}.self_attn.v_proj.weight", (KEY_HEADS * EACH, WIDTH), T.F16)
    weight(f"blk.{i}.attn_output.weight", f"{of}.self_attn.o_proj.weight", (WIDTH, WIDTH), T.Q4_0)
    weight(f"blk.{i}.ffn_gate.weight", f"{of}.mlp.gate_proj.weight", (INNER, WIDTH), T.Q4_0)
    weight(f"blk.{i}.ffn_up.weight", f"{of}.mlp.up_proj.weight", (INNER, WIDTH), T.Q8_0)
    weight(f"blk.{i}.ffn_down.weight", f"{of}.mlp.down_proj.weight", (WIDTH, INNER), T.Q4_0)
writer.add_tensor("rope_freqs.weight", np.ones(EACH // 2, np.float32))
finished(writer)


def logits(tokens):
    """A Llama in double precision, with the weights in the order of Hugging Face's files."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    norm = lambda x, g: x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * g
    n = tokens.shape[1]
    angles = np.arange(n)[:, None] * 10000.0 ** (-2 * np.arange(EACH // 2) / EACH)
    cos, sin = (np.concatenate([f(angles)] * 2, -1) for f in [np.cos, np.sin])
    rotated = lambda x: x * cos + np.concatenate([-x[..., EACH // 2 :], x[..., : EACH // 2]], -1) * sin
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        at = lambda name: w[f"model.layers.{i}.{name}.weight"]
        heads = lambda name, count: (y @ at(f"self_attn.{name}").T).reshape(len(tokens), n, count, EACH).swapaxes(1, 2)
        y = norm(x, at("input_layernorm"))
        q = rotated(heads("q_proj", HEADS))
        k, v = (np.repeat(part, HEADS // KEY_HEADS, 1) for part in [rotated(heads("k_proj", KEY_HEADS)), heads("v_proj", KEY_HEADS)])
        scores = q @ k.swapaxes(2, 3) / np.sqrt(EACH) + np.triu(np.full((n, n), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + (shares @ v).swapaxes(1, 2).reshape(len(tokens), n, WIDTH) @ at("self_attn.o_proj").T
        y = norm(x, at("post_attention_layernorm"))
        gate = y @ at("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


tokens = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]], np.int32)
safetensors("llama.safetensors", weights | {"x": tokens, "logits": logits(tokens).astype(np.float32)})

with open(os.path.join(HERE, "..", "hub", "gpt2", "model.safetensors"), "rb") as file:
    (length,) = struct.unpack("<Q", file.read(8))
    header, data = json.loads(file.read(length)), file.read()
writer = gguf.GGUFWriter(os.path.join(HERE, "gpt2.gguf"), "gpt2")
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
for name, of in header.items():
    if name != "__metadata__":
        begin, end = of["data_offsets"]
        values = np.frombuffer(data[begin:end], np.float32).reshape(of["shape"])
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            values = np.ascontiguousarray(values.T)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), values)
        if name == "transformer.wte.weight" and "lm_head.weight" not in header:
            writer.add_tensor("output.weight", values)
finished(writer)
