"""Times a step of PyTorch, to compare with slabwise.

Prints a line of JSON with the median milliseconds and the peak of reserved bytes.

torch_step.py cpu eager|channels-last MODEL BATCH sgd|adam|adamw|- SECONDS THREADS
torch_step.py cpu-product N SECONDS THREADS
torch_step.py cpu-chain sum|gradient N SECONDS THREADS
torch_step.py step MODE MODEL BATCH f32|tf32|bf16
torch_step.py product N f32|tf32|bf16
torch_step.py row N f32|bf16           one row times the weight of a layer
torch_step.py conv BATCH,INPUTS,OUTPUTS,IMAGE,WINDOW,STRIDE f32|tf32|bf16
torch_step.py copy
torch_step.py count MODEL          the number of its weights; needs no GPU

MODEL is mlp, cnn, resnet20, resnet18, resnet50 or gpt, which may have other sizes, as in
gpt:layers=6,width=384: the sizes, optimizers and rates of slabwise's built-in models. bf16 is
autocast over weights in f32. On the CPU, cpu-chain is the sum of tanh(1.5 x + 0.25) sigmoid(x) + x,
or its gradient.

MODE is eager, compile, reduce-overhead or graph, and for models of images also eager-channels-last,
compile-channels-last or graph-channels-last: the memory format of images and weights. Convolutions
have the fastest algorithms of cuDNN's own search.
"""

import contextlib
import json
import os
import resource
import statistics
import sys
import time


def end(**fields):
    print(json.dumps(fields))
    sys.exit(0)


try:
    import torch
    from torch import nn
except ImportError:
    end(skipped="torch is not installed")
F = nn.functional

QUICK = "SLABWISE_GPU_QUICK" in os.environ
WARM_UP, WARM_UP_LEAST = 20, 3
GROUP, PATIENCE, SAMPLES_LEAST = (1, 0.0, 2) if QUICK else (10, 1.0, 5)
# The end of a mode's name that says how images lie in memory.
CHANNELS_LAST = "-channels-last"


def set_precision(precision):
    allowed = precision != "f32"
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def measure(run, group=GROUP):
    """The fields of a result: the time of each run of a group."""
    began = time.perf_counter()
    for i in range(WARM_UP):
        if i >= WARM_UP_LEAST and time.perf_counter() - began >= PATIENCE:
            break
        run()
        torch.cuda.synchronize()
    # The peak is that of later runs: cuDNN's search for algorithms has taken more memory.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    times, began = [], time.perf_counter()
    while time.perf_counter() - began < PATIENCE or len(times) < SAMPLES_LEAST:
        start = time.perf_counter()
        for _ in range(group):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / group)
    times.sort()
    at = lambda part: times[round((len(times) - 1) * part)]
    return dict(ms=statistics.median(times), ms_low=at(0.1), ms_high=at(0.9), samples=len(times),
                bytes=torch.cuda.max_memory_reserved())


def report(**fields):
    versions = dict(torch=torch.__version__, cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version())
    end(peer_versions=versions, **fields)


def mlp():
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10))


def normed(inputs, outputs, k, stride=1):
    return nn.Sequential(nn.Conv2d(inputs, outputs, k, stride, k // 2, bias=False), nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = [normed(inputs, width, 1), nn.ReLU(), normed(width, width, 3, stride), nn.ReLU(), normed(width, outputs, 1)]
        else:
            layers = [normed(inputs, width, 3, stride), nn.ReLU(), normed(width, width, 3)]
        self.main = nn.Sequential(*layers)
        self.shortcut = normed(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else nn.Identity()

    def forward(self, x):
        return F.relu(self.main(x) + self.shortcut(x))


def resnet(depths, width, classes, large_stem, bottleneck):
    layers = [normed(3, width, 7, 2) if large_stem else normed(3, width, 3), nn.ReLU()]
    if large_stem:
        layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, depth in enumerate(depths):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(channels, width << stage, stride, bottleneck))
            channels = (width << stage) * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(n, length, width))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers=4, width=256, heads=4, length=128, vocabulary=1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.Sequential(*[GptBlock(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        return self.head(self.norm(self.blocks(x)))


# The constructor of the model, the shape of one example, the number of classes, its optimizer.
MODELS = {
    "mlp": (mlp, (784,), 10, "sgd"),
    "cnn": (cnn, (1, 28, 28), 10, "adam"),
    "resnet20": (lambda: resnet([3, 3, 3], 16, 10, False, False), (3, 32, 32), 10, "sgd"),
    "resnet18": (lambda: resnet([2, 2, 2, 2], 64, 200, True, False), (3, 64, 64), 200, "sgd"),
    "resnet50": (lambda: resnet([3, 4, 6, 3], 64, 1000, True, True), (3, 224, 224), 1000, "sgd"),
    "gpt": (Gpt, (128,), 1024, "adamw"),
}


def model_of(spec):
    """The row of a model, with the sizes that follow its name."""
    name, _, sizes = spec.partition(":")
    make, example, classes, kind = MODELS[name]
    if not sizes:
        return make, example, classes, kind
    sizes = {key: int(n) for key, n in (size.split("=") for size in sizes.split(","))}
    length, vocabulary = sizes.get("length", *example), sizes.get("vocabulary", classes)
    return lambda: make(**sizes), (length,), vocabulary, kind


def is_gpt(spec):
    return spec.partition(":")[0] == "gpt"


def optimizer_of(kind, model, capturable):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-3, fused=True, capturable=capturable)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True, capturable=capturable)


def data_of(name, batch):
    """The inputs and labels of a step."""
    _, example, classes, _ = model_of(name)
    if is_gpt(name):
        return tuple(torch.randint(0, classes, (batch, *example)) for _ in range(2))
    return torch.rand(batch, *example), torch.randint(0, classes, (batch,))


def step(mode, name, batch, precision):
    set_precision(precision)
    make, _, _, kind = model_of(name)
    inputs, labels = data_of(name, batch)
    model = make().cuda().train()
    if inputs.dim() == 4:
        torch.backends.cudnn.benchmark = True
        form = torch.channels_last if mode.endswith(CHANNELS_LAST) else torch.contiguous_format
        model, inputs = model.to(memory_format=form), inputs.to(memory_format=form)
    mode = mode.removesuffix(CHANNELS_LAST)
    captured = mode == "graph"
    optimizer = optimizer_of(kind, model, captured)
    host = inputs.pin_memory(), labels.pin_memory()
    half = lambda: torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()

    def loss_of(x, y):
        with half():
            logits = model(x)
            return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())

    if mode in ("compile", "reduce-overhead"):
        loss_of = torch.compile(loss_of, mode="default" if mode == "compile" else mode)

    def work(x, y):
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss

    if not captured:
        def run():
            optimizer.zero_grad(set_to_none=True)
            work(*(t.cuda(non_blocking=True) for t in host))
        report(**measure(run))
    static = [t.cuda() for t in host]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            work(*static)
    torch.cuda.current_stream().wait_stream(side)
    # If gradients are unset when the graph is recorded, it writes them instead of adding to them.
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(*static)

    def replay():
        for to, source in zip(static, host):
            to.copy_(source, non_blocking=True)
        graph.replay()

    report(**measure(replay))


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
        peer_versions=dict(torch=torch.__version__), **fields)


def step_on_cpu(layout, name, batch, kind, seconds):
    """A training step on the CPU: inputs from the host, the loss read."""
    make, _, _, own = model_of(name)
    model = make().train()
    form = torch.channels_last if layout == "channels-last" else torch.contiguous_format
    optimizer = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=1e-3, fused=True),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True),
    }[own if kind == "-" else kind]()
    inputs, labels = data_of(name, batch)
    if inputs.dim() == 4:
        model, inputs = model.to(memory_format=form), inputs.to(memory_format=form)

    def run():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    kept = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    on_cpu(run, seconds, weights=sum(p.numel() for p in kept))


def product_on_cpu(n, seconds):
    a, b = (torch.rand(n, n).sub(0.5) for _ in range(2))
    c = torch.empty_like(a)
    on_cpu(lambda: torch.mm(a, b, out=c), seconds)


def chain_on_cpu(part, n, seconds):
    x = torch.rand(n).mul(6).sub(3).requires_grad_(part == "gradient")

    def run():
        x.grad = None
        total = (torch.tanh(x * 1.5 + 0.25) * torch.sigmoid(x) + x).sum()
        return total.backward() if part == "gradient" else total.item()

    on_cpu(run, seconds)


def product(n, precision):
    set_precision(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.rand(n, n, device="cuda").sub(0.5).to(dtype) for _ in range(2))
    c = torch.empty_like(a)
    fields = measure(lambda: torch.matmul(a, b, out=c))
    report(tflops=2 * n ** 3 / fields["ms"] / 1e9, **fields)


def row(n, precision):
    set_precision(precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, weight = (torch.rand(rows, n, device="cuda").sub(0.5).to(dtype) for rows in (1, n))
    fields = measure(lambda: F.linear(x, weight))
    report(gb_per_s=weight.nbytes / fields["ms"] / 1e6, **fields)


def conv(sizes, precision):
    """The three parts in cuDNN's fastest layout, with the fastest algorithms of its own search."""
    set_precision(precision)
    torch.backends.cudnn.benchmark = True
    batch, inputs, outputs, image, k, stride = sizes
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    result = (image + 2 * (k // 2) - k) // stride + 1
    layouts = {}
    for layout, form in ("nchw", torch.contiguous_format), ("nhwc", torch.channels_last):
        made = lambda *dims: torch.rand(*dims, device="cuda").sub(0.5).to(dtype).to(memory_format=form)
        x, w, dy = made(batch, inputs, image, image), made(outputs, inputs, k, k), made(batch, outputs, result, result)
        backward = lambda mask: torch.ops.aten.convolution_backward(
            dy, x, w, None, [stride] * 2, [k // 2] * 2, [1, 1], False, [0, 0], 1, mask)
        layouts[layout] = dict(
            forward=measure(lambda: F.conv2d(x, w, None, stride, k // 2)),
            data=measure(lambda: backward([True, False, False])),
            weight=measure(lambda: backward([False, True, False])))
    parts = {part: min((layouts[layout][part] | dict(layout=layout) for layout in layouts), key=lambda f: f["ms"])
             for part in ("forward", "data", "weight")}
    report(ms=sum(part["ms"] for part in parts.values()), bytes=max(part["bytes"] for part in parts.values()), parts=parts)


def copy():
    x = torch.zeros(1 << 27, device="cuda")
    y = torch.empty_like(x)
    host = torch.zeros(1 << 27).pin_memory()
    moved = 4 * x.numel()
    rate = lambda fields, times: times * moved / fields["ms"] / 1e6
    device = measure(lambda: torch.add(x, 1.0, out=y))
    to_device, to_host = measure(lambda: y.copy_(host, non_blocking=True), 1), measure(lambda: host.copy_(y, non_blocking=True), 1)
    report(gb_per_s=rate(device, 2), to_device_gb_per_s=rate(to_device, 1), to_host_gb_per_s=rate(to_host, 1), **device)


def main(words):
    if words[0] == "count":
        end(weights=sum(p.numel() for p in model_of(words[1])[0]().parameters()))
    if words[0].startswith("cpu"):
        torch.manual_seed(0)
        torch.set_num_threads(int(words[-1]))
        seconds = float(words[-2])
        if words[0] == "cpu":
            step_on_cpu(words[1], words[2], int(words[3]), words[4], seconds)
        elif words[0] == "cpu-product":
            product_on_cpu(int(words[1]), seconds)
        elif words[0] == "cpu-chain":
            chain_on_cpu(words[1], int(words[2]), seconds)
        sys.exit(f"there is no {words[0]}")
    if not torch.cuda.is_available():
        end(skipped="torch sees no GPU")
    torch.manual_seed(0)
    if words[0] == "step":
        step(words[1], words[2], int(words[3]), words[4])
    elif words[0] == "product":
        product(int(words[1]), words[2])
    elif words[0] == "row":
        row(int(words[1]), words[2])
    elif words[0] == "conv":
        conv([int(n) for n in words[1].split(",")], words[2])
    elif words[0] == "copy":
        copy()
    else:
        sys.exit(f"there is no {words[0]}")


main(sys.argv[1:])
