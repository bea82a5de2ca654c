"""Times a jitted step of JAX, to compare with slabwise.

Prints a line of JSON with the median milliseconds and the peak of bytes in use.

jax_step.py step MODEL BATCH f32|tf32|bf16
jax_step.py cpu MODEL BATCH sgd|adam|adamw|- SECONDS THREADS
jax_step.py cpu-product N SECONDS THREADS
jax_step.py cpu-chain sum|gradient N SECONDS THREADS
jax_step.py count MODEL          the number of its weights; needs no GPU

MODEL is mlp, cnn, resnet20, resnet18, resnet50 or gpt, which may have other sizes, as in
gpt:layers=6,width=384: the sizes, optimizers and rates of slabwise's built-in models. bf16 is
computed in bf16 over weights in f32; norms and the loss are computed in f32. On a GPU, attention of
bf16 is computed by cuDNN, or by XLA if cuDNN refuses it; the result says which. On the CPU, images
have their channels last, which its convolutions take, and cpu-chain is the sum of tanh(1.5 x + 0.25)
sigmoid(x) + x, or its gradient.
"""

import functools
import json
import os
import resource
import statistics
import sys
import time

ON_CPU = sys.argv[1:2] != [] and sys.argv[1].startswith("cpu")
if ON_CPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA has a thread for each core that it may run on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[-1])])
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def end(**fields):
    print(json.dumps(fields))
    sys.exit(0)


try:
    import jax
    import jax.numpy as jnp
except ImportError:
    end(skipped="jax is not installed")
tree = jax.tree_util.tree_map

QUICK = "SLABWISE_GPU_QUICK" in os.environ
WARM_UP, WARM_UP_LEAST = 20, 3
GROUP, PATIENCE, SAMPLES_LEAST = (1, 0.0, 2) if QUICK else (10, 1.0, 5)


class Weights:
    """Draws trained weights and running statistics of norms, both in the order of the layers."""

    def __init__(self):
        self.key = jax.random.PRNGKey(0)

    def draw(self, dims, scale):
        self.key, key = jax.random.split(self.key)
        return jax.random.normal(key, dims) * scale

    def dense(self, n, m, bias=True):
        w = self.draw((n, m), n ** -0.5)
        return (w, jnp.zeros(m)) if bias else (w,)

    def conv(self, n, m, k, bias):
        w = self.draw((k, k, n, m) if ON_CPU else (m, n, k, k), (2 / (k * k * n)) ** 0.5)
        return (w, jnp.zeros(m)) if bias else (w,)

    def norm(self, n):
        return jnp.ones(n), jnp.zeros(n)


def dense(x, layer):
    y = x @ layer[0].astype(x.dtype)
    return y + layer[1].astype(x.dtype) if len(layer) > 1 else y


# The axes of images, and those of a value for each channel beside them.
FORM = ("NHWC", "HWIO", "NHWC") if ON_CPU else ("NCHW", "OIHW", "NCHW")
PLACES = (1, 2) if ON_CPU else (2, 3)


def per_channel(v):
    return v if ON_CPU else v[:, None, None]


def conv(x, layer, stride=1):
    pad = layer[0].shape[0 if ON_CPU else -1] // 2
    y = jax.lax.conv_general_dilated(x, layer[0].astype(x.dtype), (stride, stride), [(pad, pad)] * 2, dimension_numbers=FORM)
    return y + per_channel(layer[1].astype(x.dtype)) if len(layer) > 1 else y


def max_pool(x, k, stride, pad):
    along = lambda value, rest: tuple(value if axis in PLACES else rest for axis in range(4))
    pads = tuple((pad, pad) if axis in PLACES else (0, 0) for axis in range(4))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, along(k, 1), along(stride, 1), pads)


def mlp():
    draw = Weights()

    def forward(weights, running, x):
        for layer in weights[:-1]:
            x = jax.nn.relu(dense(x, layer))
        return dense(x, weights[-1]), running

    return [draw.dense(784, 512), draw.dense(512, 256), draw.dense(256, 10)], [], forward


def cnn():
    draw = Weights()

    def forward(weights, running, x):
        for layer in weights[:2]:
            x = max_pool(jax.nn.relu(conv(x, layer)), 2, 2, 0)
        x = jax.nn.relu(dense(x.reshape(x.shape[0], -1), weights[2]))
        return dense(x, weights[3]), running

    return [draw.conv(1, 32, 5, True), draw.conv(32, 64, 5, True), draw.dense(64 * 7 * 7, 512), draw.dense(512, 10)], [], forward


def resnet(depths, width, classes, large_stem, bottleneck):
    draw, plan, weights, running = Weights(), [], [], []

    def normed(inputs, outputs, k, stride=1):
        weights.append(draw.conv(inputs, outputs, k, False) + draw.norm(outputs))
        running.append((jnp.zeros(outputs), jnp.ones(outputs)))
        return len(weights) - 1, stride

    stem = normed(3, width, 7, 2) if large_stem else normed(3, width, 3)
    channels = width
    for stage, depth in enumerate(depths):
        inner = width << stage
        outputs = 4 * inner if bottleneck else inner
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            if bottleneck:
                main = [normed(channels, inner, 1), normed(inner, inner, 3, stride), normed(inner, outputs, 1)]
            else:
                main = [normed(channels, inner, 3, stride), normed(inner, inner, 3)]
            shortcut = normed(channels, outputs, 1, stride) if stride != 1 or channels != outputs else None
            plan.append((main, shortcut))
            channels = outputs
    weights.append(draw.dense(channels, classes))

    def forward(weights, running, x):
        running = list(running)

        def apply(x, layer):
            at, stride = layer
            w, scale, shift = weights[at]
            y = conv(x, (w,), stride).astype(jnp.float32)
            mean, var = y.mean((0, *PLACES)), y.var((0, *PLACES))
            count = y.size // mean.size
            old = running[at]
            running[at] = (0.9 * old[0] + 0.1 * mean, 0.9 * old[1] + 0.1 * var * (count / (count - 1)))
            factor = scale * jax.lax.rsqrt(var + 1e-5)
            return (y * per_channel(factor) + per_channel(shift - mean * factor)).astype(x.dtype)

        x = jax.nn.relu(apply(x, stem))
        if large_stem:
            x = max_pool(x, 3, 2, 1)
        for main, shortcut in plan:
            y = x
            for i, layer in enumerate(main):
                y = apply(jax.nn.relu(y) if i > 0 else y, layer)
            x = jax.nn.relu(y + (x if shortcut is None else apply(x, shortcut)))
        return dense(x.mean(PLACES), weights[-1]), running

    return weights, running, forward


def gpt(layers=4, width=256, heads=4, length=128, vocabulary=1024):
    draw = Weights()
    blocks = [(draw.norm(width), draw.dense(width, 3 * width), draw.dense(width, width),
               draw.norm(width), draw.dense(width, 4 * width), draw.dense(4 * width, width)) for _ in range(layers)]
    weights = (draw.draw((vocabulary, width), 0.02), draw.draw((length, width), 0.02), blocks,
               draw.norm(width), draw.dense(width, vocabulary, False))

    def norm(x, layer):
        y = x.astype(jnp.float32)
        y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
        return (y * layer[0] + layer[1]).astype(x.dtype)

    def forward(weights, running, tokens, dtype, attention):
        embedding, places, blocks, last, head = weights
        x = (embedding[tokens] + places).astype(dtype)
        for norm1, qkv, joined, norm2, wide, narrow in blocks:
            q, k, v = jnp.split(dense(norm(x, norm1), qkv), 3, -1)
            split = lambda t: t.reshape(*t.shape[:2], heads, width // heads)
            attended = jax.nn.dot_product_attention(split(q), split(k), split(v), is_causal=True, implementation=attention)
            x = x + dense(attended.reshape(x.shape), joined)
            x = x + dense(jax.nn.gelu(dense(norm(x, norm2), wide), approximate=True), narrow)
        return dense(norm(x, last), head), running

    return weights, [], forward


# The constructor of the model, the shape of one example, the number of classes, its optimizer.
MODELS = {
    "mlp": (mlp, (784,), 10, "sgd"),
    "cnn": (cnn, (1, 28, 28), 10, "adam"),
    "resnet20": (lambda: resnet([3, 3, 3], 16, 10, False, False), (3, 32, 32), 10, "sgd"),
    "resnet18": (lambda: resnet([2, 2, 2, 2], 64, 200, True, False), (3, 64, 64), 200, "sgd"),
    "resnet50": (lambda: resnet([3, 4, 6, 3], 64, 1000, True, True), (3, 224, 224), 1000, "sgd"),
    "gpt": (gpt, (128,), 1024, "adamw"),
}


def model_of(spec):
    """The row of a model, with the sizes that follow its name."""
    name, _, sizes = spec.partition(":")
    make, example, classes, kind = MODELS[name]
    if ON_CPU and len(example) == 3:
        example = (*example[1:], example[0])
    if not sizes:
        return make, example, classes, kind
    sizes = {key: int(n) for key, n in (size.split("=") for size in sizes.split(","))}
    length, vocabulary = sizes.get("length", *example), sizes.get("vocabulary", classes)
    return lambda: make(**sizes), (length,), vocabulary, kind


def is_gpt(spec):
    return spec.partition(":")[0] == "gpt"


def count(weights):
    return sum(w.size for w in jax.tree_util.tree_leaves(weights))


def updated(kind, weights, state, gradients):
    """Weights and the optimizer's state after a step."""
    if kind == "sgd":
        state = tree(lambda v, g: 0.9 * v + g, state, gradients)
        return tree(lambda w, v: w - 0.01 * v, weights, state), state
    rate, decay = (1e-3, 0.0) if kind == "adam" else (3e-4, 0.1)
    m, v, t = state
    t = t + 1
    m = tree(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = tree(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradients)
    move = lambda w, m, v: w * (1 - rate * decay) - rate * (m / (1 - 0.9 ** t)) / (jnp.sqrt(v / (1 - 0.999 ** t)) + 1e-8)
    return tree(move, weights, m, v), (m, v, t)


def training(name, batch, kind, dtype, attention="xla"):
    """A compiled step that takes its state in place, the state, and data on the host."""
    make, example, classes, own = model_of(name)
    kind = own if kind == "-" else kind
    weights, running, forward = make()
    tokens = is_gpt(name)
    if tokens:
        forward = functools.partial(forward, dtype=dtype, attention=attention)
    zeros = lambda: tree(jnp.zeros_like, weights)
    state = zeros() if kind == "sgd" else (zeros(), zeros(), jnp.zeros(()))

    def loss_of(weights, running, x, labels):
        logits, running = forward(weights, running, x if tokens else x.astype(dtype))
        chances = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(chances, labels[..., None], -1)), running

    def train(weights, running, state, x, labels):
        (loss, running), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, running, x, labels)
        weights, state = updated(kind, weights, state, gradients)
        return weights, running, state, loss

    train = jax.jit(train, donate_argnums=(0, 1, 2))
    keys = jax.random.split(jax.random.PRNGKey(1), 2)
    x = jax.random.randint(keys[0], (batch, *example), 0, classes) if tokens else jax.random.uniform(keys[0], (batch, *example))
    labels = jax.random.randint(keys[1], (batch, *example) if tokens else (batch,), 0, classes)
    return train, [weights, running, state], (jax.device_get(x), jax.device_get(labels))


def step(name, batch, precision):
    jax.config.update("jax_default_matmul_precision", {"f32": "highest", "tf32": "tensorfloat32", "bf16": "default"}[precision])
    used = {}

    def prepared(attention):
        train, held, host = training(name, batch, "-", jnp.bfloat16 if precision == "bf16" else jnp.float32, attention)
        if is_gpt(name):
            used["attention"] = attention

        def group(n):
            for _ in range(n):
                *held[:], loss = train(*held, *host)
            loss.block_until_ready()
            return float(loss)

        first = time.perf_counter()
        loss = group(1)
        return group, loss, time.perf_counter() - first

    # cuDNN computes attention of halves only, and not on every device.
    try:
        group, loss, first = prepared("cudnn" if is_gpt(name) and precision == "bf16" else "xla")
    except Exception as refusal:
        if used.get("attention") != "cudnn":
            raise
        used["attention_refused"] = str(refusal)[:500]
        group, loss, first = prepared("xla")
    began = time.perf_counter()
    for i in range(WARM_UP):
        if i >= WARM_UP_LEAST and time.perf_counter() - began >= PATIENCE:
            break
        group(1)
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < PATIENCE or len(times) < SAMPLES_LEAST:
        start = time.perf_counter()
        group(GROUP)
        times.append((time.perf_counter() - start) * 1e3 / GROUP)
    times.sort()
    at = lambda part: times[round((len(times) - 1) * part)]
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    end(ms=statistics.median(times), ms_low=at(0.1), ms_high=at(0.9), samples=len(times), bytes=peak, first_loss=loss,
        first_step_s=first, peer_versions=dict(jax=jax.__version__), **used)


def on_cpu(run, seconds, **fields):
    """Ends with the times of single runs on the CPU."""
    for _ in range(WARM_UP_LEAST):
        run()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < SAMPLES_LEAST:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    end(ms=statistics.median(times), ms_min=min(times), samples=len(times), rss_peak_bytes=resident,
        peer_versions=dict(jax=jax.__version__), **fields)


def step_on_cpu(name, batch, kind, seconds):
    """A training step on the CPU: inputs from the host, the loss read."""
    train, held, host = training(name, batch, kind, jnp.float32)

    def run():
        *held[:], loss = train(*held, *host)
        return float(loss)

    on_cpu(run, seconds, weights=count(held[:2]))


def product_on_cpu(n, seconds):
    a, b = (jax.random.uniform(key, (n, n)) - 0.5 for key in jax.random.split(jax.random.PRNGKey(0), 2))
    product = jax.jit(jnp.matmul)
    on_cpu(lambda: product(a, b).block_until_ready(), seconds)


def chain_on_cpu(part, n, seconds):
    x = 6 * jax.random.uniform(jax.random.PRNGKey(0), (n,)) - 3
    total = lambda x: (jnp.tanh(x * 1.5 + 0.25) * jax.nn.sigmoid(x) + x).sum()
    compiled = jax.jit(jax.grad(total) if part == "gradient" else total)
    on_cpu(lambda: compiled(x).block_until_ready(), seconds)


def main(words):
    if words[0] == "count":
        end(weights=count(model_of(words[1])[0]()[0]))
    if words[0] == "cpu":
        step_on_cpu(words[1], int(words[2]), words[3], float(words[4]))
    if words[0] == "cpu-product":
        product_on_cpu(int(words[1]), float(words[2]))
    if words[0] == "cpu-chain":
        chain_on_cpu(words[1], int(words[2]), float(words[3]))
    if words[0] != "step":
        sys.exit(f"there is no {words[0]}")
    if jax.default_backend() != "gpu":
        end(skipped="jax sees no GPU")
    step(words[1], int(words[2]), words[3])


main(sys.argv[1:])
