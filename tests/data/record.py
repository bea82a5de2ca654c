"""Records results of PyTorch for small versions of the built-in models, for tests/torch/.

Needs torch and numpy. Run in this folder: python record.py. It writes two safetensors files for each model into torch/:
NAME.weights.safetensors, the first weights as state_dict() names them, and NAME.case.safetensors:
    x, y          the inputs (in half precision, which holds them) and labels of ten steps, one behind the other
    losses        the loss of each training step, before its update
    logits        output of the first step in training mode
    eval          output of the trained model for the first input in evaluation mode
    grad.NAME     the gradients of the first step
    end.NAME      running statistics after the ten steps

points.safetensors has single operations and losses at special numbers (NaN, infinities, zeros, denormals, bounds, ties, saturation),
with rows one by one: NAME/x0, x1 the arguments, NAME/value, and NAME/d0, d1 the gradients of Σ (i + 1)·valueᵢ; where
NAME/value is of no float, there are none.

optimizers.safetensors has the weights of a small model after each of ten steps of an optimizer, and the rates of schedules over
forty steps. Lion, LAMB and Muon (whose products PyTorch rounds to bf16) follow the formulas of their papers, written out below.

models.safetensors has the same of small transformers, diffusion models and autoencoders, with the weights, inputs and noise of that
formula. The transformers are those of the transformers library; the image models follow its sister library diffusers.

Of the built-in models as they are, too large to keep, full.safetensors has the losses, logits and gradients; weights, inputs
and labels are those of a formula (`noise`), and of each tensor it keeps some numbers at equal distances (`some`).
"""
import json, os, struct
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F

STEPS = 10


class Block(nn.Module):
    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        out = 4 * width if bottleneck else width
        plan = [(1, 1, width), (3, stride, width), (1, 1, out)] if bottleneck else [(3, stride, width), (3, 1, width)]
        self.count, last = len(plan), inputs
        for i, (k, s, to) in enumerate(plan, 1):
            setattr(self, f"conv{i}", nn.Conv2d(last, to, k, s, k // 2, bias=False))
            setattr(self, f"bn{i}", nn.BatchNorm2d(to))
            last = to
        self.out = out
        self.downsample = nn.Sequential(nn.Conv2d(inputs, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if stride != 1 or inputs != out else None

    def forward(self, x):
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(F.relu(y) if i > 1 else y))
        return F.relu(y + (self.downsample(x) if self.downsample else x))


class ResNet(nn.Module):
    def __init__(self, large, bottleneck, depths, width, classes):
        super().__init__()
        k, s, p = (7, 2, 3) if large else (3, 1, 1)
        self.large, self.stages = large, len(depths)
        self.conv1, self.bn1 = nn.Conv2d(3, width, k, s, p, bias=False), nn.BatchNorm2d(width)
        channels = width
        for stage, depth in enumerate(depths):
            blocks = []
            for b in range(depth):
                blocks.append(Block(channels, width << stage, 2 if stage and b == 0 else 1, bottleneck))
                channels = blocks[-1].out
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(x.mean((2, 3)))


def unit(i, o, k, s, g=1):
    return nn.Sequential(nn.Conv2d(i, o, k, s, k // 2, groups=g, bias=False), nn.BatchNorm2d(o), nn.ReLU6())


class Inverted(nn.Module):
    def __init__(self, i, o, stride, factor):
        super().__init__()
        wide = i * factor
        layers = ([unit(i, wide, 1, 1)] if factor != 1 else []) + [unit(wide, wide, 3, stride, wide)]
        self.conv = nn.Sequential(*layers, nn.Conv2d(wide, o, 1, bias=False), nn.BatchNorm2d(o))
        self.residual = stride == 1 and i == o

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, stem, stages, last, classes):
        super().__init__()
        layers, channels = [unit(3, stem, 3, 2)], stem
        for factor, to, blocks, stride in stages:
            for b in range(blocks):
                layers.append(Inverted(channels, to, stride if b == 0 else 1, factor))
                channels = to
        self.features = nn.Sequential(*layers, unit(channels, last, 1, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(last, classes))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class Vgg(nn.Module):
    def __init__(self, stages, places, hidden, classes):
        super().__init__()
        layers, channels = [], 3
        for to, count in stages:
            for _ in range(count):
                layers += [nn.Conv2d(channels, to, 3, padding=1), nn.ReLU()]
                channels = to
            layers.append(nn.MaxPool2d(2))
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(places)
        self.classifier = nn.Sequential(
            nn.Linear(channels * places * places, hidden), nn.ReLU(), nn.Dropout(0.0),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.0), nn.Linear(hidden, classes))

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class FullMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden1, self.hidden2, self.head = nn.Linear(784, 512), nn.Linear(512, 256), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(F.relu(self.hidden2(F.relu(self.hidden1(x)))))


class FullCnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = nn.Conv2d(1, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)
        self.hidden, self.head = nn.Linear(64 * 7 * 7, 512), nn.Linear(512, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = F.max_pool2d(F.relu(self.body(x)), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


class Double(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(),
            nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.up, self.conv = nn.ConvTranspose2d(i, i // 2, 2, 2), Double(i, i // 2)

    def forward(self, x, beside):
        return self.conv(torch.cat([beside, self.up(x)], 1))


class Out(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 1)


class Down(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), Double(i, o))


class UNet(nn.Module):
    def __init__(self, inputs, width, levels, classes):
        super().__init__()
        self.levels, self.inc = levels, Double(inputs, width)
        for i in range(1, levels + 1):
            setattr(self, f"down{i}", Down(width << (i - 1), width << i))
            setattr(self, f"up{i}", Up(width << (levels + 1 - i)))
        self.outc = Out(width, classes)

    def forward(self, x):
        kept = [self.inc(x)]
        for i in range(1, self.levels + 1):
            kept.append(getattr(self, f"down{i}").maxpool_conv(kept[-1]))
        x = kept.pop()
        for i in range(1, self.levels + 1):
            x = getattr(self, f"up{i}")(x, kept.pop())
        return self.outc.conv(x)


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.heads, D // self.heads).transpose(1, 2) for t in self.c_attn(x).split(D, 2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))


class Mlp(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class GptBlock(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(d), Attention(d, heads), nn.LayerNorm(d), Mlp(d)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, layers, d, heads, length, vocabulary):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocabulary, d), wpe=nn.Embedding(length, d),
            h=nn.ModuleList([GptBlock(d, heads) for _ in range(layers)]), ln_f=nn.LayerNorm(d)))
        self.lm_head = nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens):
        t = self.transformer
        x = t.wte(tokens) + t.wpe.weight
        for block in t.h:
            x = block(x)
        return self.lm_head(t.ln_f(x))


class Lstm(nn.Module):
    def __init__(self, vocabulary, width, hidden):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, vocabulary)

    def forward(self, tokens):
        return self.fc(self.lstm(self.embedding(tokens))[0])


class Layers(nn.Module):
    """Norms and attention of this library that no built-in model uses."""

    def __init__(self):
        super().__init__()
        self.group, self.rms = nn.GroupNorm(2, 6), nn.RMSNorm(10, eps=1e-6)
        self.attention, self.fc = nn.MultiheadAttention(10, 2, batch_first=True), nn.Linear(10, 4)

    def forward(self, x):
        x = self.rms(self.group(x))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.fc(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0].mean(1))


def cases():
    """Name, model, shape of an example, kinds of tokens (0: images), classes, shape of the labels, batch, optimizer."""
    sgd = lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9)
    adam = lambda ps: torch.optim.Adam(ps, 1e-2)
    adamw = lambda ps: torch.optim.AdamW(ps, 3e-3, weight_decay=0.1)
    yield "resnet20", lambda: ResNet(False, False, [2, 2], 4, 5), (3, 8, 8), 0, 5, (), 4, sgd
    yield "resnet18", lambda: ResNet(True, False, [1, 2], 4, 5), (3, 32, 32), 0, 5, (), 3, sgd
    yield "resnet50", lambda: ResNet(True, True, [1, 1], 4, 5), (3, 32, 32), 0, 5, (), 3, sgd
    yield "mobilenetv2", lambda: MobileNetV2(4, [[1, 4, 1, 1], [3, 6, 2, 2]], 12, 5), (3, 16, 16), 0, 5, (), 4, sgd
    yield "vgg16", lambda: Vgg([[4, 1], [8, 2]], 2, 16, 5), (3, 12, 12), 0, 5, (), 4, sgd
    yield "unet", lambda: UNet(3, 4, 2, 2), (3, 12, 12), 0, 2, (12, 12), 2, adam
    yield "gpt", lambda: Gpt(2, 16, 2, 8, 32), (8,), 32, 32, (8,), 3, adamw
    yield "lstm", lambda: Lstm(16, 8, 12), (6,), 16, 16, (6,), 3, adam
    yield "layers", Layers, (6, 10), 0, 4, (), 4, sgd


def full():
    """Name, model, shape of an example, kinds of tokens (0: images), classes, shape of the labels, batch, optimizer.

    The residual networks learn slowly: at the usual rate of 0.01 PyTorch's own losses in single and in double precision part by
    one in a thousand within seven steps, at these by one in a hundred thousand within ten, and the updates still change losses
    by more than ten times the tolerance of the test.
    """
    sgd = lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9)
    slow = lambda rate: lambda ps: torch.optim.SGD(ps, rate, momentum=0.9)
    adam = lambda ps: torch.optim.Adam(ps, 1e-3)
    adamw = lambda ps: torch.optim.AdamW(ps, 3e-4, weight_decay=0.1)
    yield "mlp", FullMlp, (784,), 0, 10, (), 8, sgd
    yield "cnn", FullCnn, (1, 28, 28), 0, 10, (), 4, adam
    yield "resnet20", lambda: ResNet(False, False, [3, 3, 3], 16, 10), (3, 32, 32), 0, 10, (), 4, slow(1e-4)
    yield "resnet18", lambda: ResNet(True, False, [2, 2, 2, 2], 64, 200), (3, 64, 64), 0, 200, (), 4, slow(2e-5)
    yield "gpt", lambda: Gpt(4, 256, 4, 128, 1024), (128,), 1024, 1024, (128,), 1, adamw


def noise(count, seed):
    """Numbers in 0..1 on a grid of 2**-24, from the mixing of MurmurHash3."""
    h = np.arange(count, dtype=np.uint32) + np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h = h ^ (h >> np.uint32(16))
    return (h >> np.uint32(8)).astype(np.float32) / np.float32(1 << 24)


def noisy(shape, seed, kinds=0):
    x = noise(int(np.prod(shape)), seed).reshape(shape)
    return torch.from_numpy((x * np.float32(kinds)).astype(np.int64)) if kinds else torch.from_numpy(x)


def hub(name):
    """A parameter's name in published files, where the transformers library has come to use another."""
    if not name.startswith("vit."):
        return name
    parts = {"vit.layers.": "vit.encoder.layer.", "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense", "o_proj": "output.dense"}
    parts |= {f"{part[0]}_proj": f"attention.{part}" for part in ("query", "key", "value")}
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def fill(model):
    """First weights: products evenly in ±1/√(inputs), scales 1, shifts evenly in ±0.1."""
    for seed, (name, p) in enumerate(sorted((hub(n), p) for n, p in model.named_parameters())):
        with torch.no_grad():
            even = 2 * noisy(tuple(p.shape), seed) - 1
            if p.dim() > 1:
                p.copy_(even * float(np.float32(1 / np.sqrt(p[0].numel()))))
            else:
                p.copy_(torch.ones_like(p) if name.endswith("weight") else even * float(np.float32(0.1)))


def some(t, most=64):
    flat = t.detach().reshape(-1)
    return flat[:: -(-flat.numel() // most)].clone()


def record_full():
    kept = {}
    for name, build, example, tokens, classes, label, batch, optimizer in full():
        model = build()
        fill(model)
        update, losses = optimizer(model.parameters()), []
        for step in range(STEPS):
            x, y = noisy((batch, *example), 1000 + step, tokens), noisy((batch, *label), 2000 + step, classes)
            logits = model(x)
            loss = F.cross_entropy(logits.reshape(-1, classes), y.reshape(-1))
            update.zero_grad()
            loss.backward()
            if step == 0:
                kept[f"{name}/logits"] = some(logits, 1024)
                kept |= {f"{name}/grad.{n}": some(p.grad) for n, p in model.named_parameters()}
            losses.append(loss.item())
            update.step()
        kept[f"{name}/losses"] = torch.tensor(losses)
        print(f"{name:12} losses {losses[0]:.4f} … {losses[-1]:.4f}")
    save("torch/full.safetensors", kept)


def points():
    """Name, function, lists of the rows of each argument."""
    inf, nan = float("inf"), float("nan")
    numbers = [nan, -inf, -3.4e38, -100, -20.5, -1.5, -1, -0.5, -1e-40, -0.0, 0, 1e-40, 0.5, 1, 1.5, 6, 20.5, 100, 3.4e38, inf]
    one = [[x] for x in numbers]
    few = [nan, -inf, -1.5, -1, -0.0, 0, 1e-40, 0.5, 1, 2.5, inf]
    left, right = [[x] for x in few for _ in few], [[y] for _ in few for y in few]
    for name in ["relu", "abs", "exp", "exp2", "expm1", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "sin", "cos", "square", "neg"]:
        yield name, getattr(torch, name), one
    yield "recip", torch.reciprocal, one
    yield "ln", torch.log, one
    for name in ["sign", "floor", "ceil", "round"]:
        yield name, getattr(torch, name), one
    yield "clamp", lambda x: x.clamp(-1, 1), one
    yield "relu6", F.relu6, one
    yield "gelu", F.gelu, one
    yield "gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), one
    yield "silu", F.silu, one
    yield "softplus", F.softplus, one
    yield "plus_zero", lambda x: x + 0.0, one
    for name, exponent in [("pow_0", 0.0), ("pow_half", 0.5), ("pow_1", 1.0), ("pow_2", 2.0), ("pow_3", 3.0), ("pow_minus_1", -1.0)]:
        yield name, lambda x, exponent=exponent: x**exponent, one
    for name in ["maximum", "minimum", "add", "sub", "mul", "div", "pow"]:
        yield name, getattr(torch, name), left, right
    yield "maximum_of_same", lambda x: torch.maximum(x, x), one
    yield "select", lambda x, y: torch.where(x > 0, x * y, y), left, right
    for name in ["lt", "le", "gt", "ge", "eq", "ne"]:
        yield name, lambda x, y, name=name: getattr(torch, name)(x, y).float(), left, right
    yield "mse", F.mse_loss, left, right
    yield "huber", lambda x, t: F.huber_loss(x, t, delta=0.5), left, right
    chances, targets = [0, 1e-40, 1e-13, 1e-3, 0.5, 0.999, 1 - 6e-8, 1], [0, 0.25, 1]
    yield "bce", F.binary_cross_entropy, [[p] for p in chances for _ in targets], [[t] for _ in chances for t in targets]
    yield "bce_with_logits", F.binary_cross_entropy_with_logits, [[x] for x in numbers for _ in targets], [[t] for _ in numbers for t in targets]
    rows = [[1, -2, 0.5, 3], [2, 1, 2, 2], [0, -0.0, 0, -0.0], [nan, 1, 2, 3], [inf, 1, 2, 3], [-inf, 1, 2, 3], [inf, -inf, 0, 1],
            [-inf] * 4, [3.4e38] * 4, [3.4e38, -3.4e38, 0, 0], [1e20, -1e20, 1e20, -1e20], [1e7, 1e7 + 1, 1e7 + 2, 1e7 + 3],
            [1e4, 1e4, -1e4, 0], [0, 0, 2, 3], [0, 5, 2, 3], [nan, 1, 0, 2]]
    for name in ["sum", "mean", "prod"]:
        yield name, lambda x, name=name: getattr(torch, name)(x, 0), rows
    yield "max", lambda x: torch.amax(x, 0), rows
    yield "min", lambda x: torch.amin(x, 0), rows
    yield "cumsum", lambda x: torch.cumsum(x, 0), rows
    yield "softmax", lambda x: torch.softmax(x, 0), rows
    yield "log_softmax", lambda x: torch.log_softmax(x, 0), rows
    yield "logsumexp", lambda x: torch.logsumexp(x, 0), rows
    yield "cross_entropy", lambda x: F.cross_entropy(x.reshape(1, 4), torch.tensor([1])), rows
    yield "layer_norm", lambda x: F.layer_norm(x, (4,)), rows
    yield "rms_norm", lambda x: F.rms_norm(x, (4,), eps=1e-6), rows
    yield "group_norm", lambda x: F.group_norm(x.reshape(1, 2, 2), 1).reshape(4), rows
    yield "batch_norm", lambda x: F.batch_norm(x.reshape(4, 1), torch.zeros(1), torch.ones(1), training=True).reshape(4), rows


def record_points():
    kept = {}
    for name, f, *arguments in points():
        arguments = [torch.tensor(rows, dtype=torch.float32) for rows in arguments]
        values, slopes = [], []
        for row in zip(*arguments):
            xs = [x.clone().requires_grad_() for x in row]
            y = f(*xs).reshape(-1)
            values.append(y.detach())
            if y.requires_grad:
                (y * torch.arange(1.0, len(y) + 1)).sum().backward()
                slopes.append([x.grad for x in xs])
        kept |= {f"{name}/x{i}": x for i, x in enumerate(arguments)} | {f"{name}/value": torch.stack(values)}
        kept |= {f"{name}/d{i}": torch.stack(d) for i, d in enumerate(zip(*slopes))}
    save("torch/points.safetensors", kept)


class Residual(nn.Module):
    def __init__(self, i, o, groups, eps, time):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, i, eps), nn.Conv2d(i, o, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, o, eps), nn.Conv2d(o, o, 3, padding=1)
        if time:
            self.time_emb_proj = nn.Linear(time, o)
        if i != o:
            self.conv_shortcut = nn.Conv2d(i, o, 1)
        self.same = i == o

    def forward(self, x, time=None):
        y = self.conv1(F.silu(self.norm1(x)))
        if time is not None:
            y = y + self.time_emb_proj(F.silu(time))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return (x if self.same else self.conv_shortcut(x)) + y


class Places(nn.Module):
    def __init__(self, d, groups, eps, heads):
        super().__init__()
        self.heads, self.group_norm = heads, nn.GroupNorm(groups, d, eps)
        self.to_q, self.to_k, self.to_v, self.to_out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), nn.ModuleList([nn.Linear(d, d)])

    def forward(self, x):
        n, d, h, w = x.shape
        rows = self.group_norm(x).flatten(2).transpose(1, 2)
        q, k, v = (part(rows).view(n, h * w, self.heads, d // self.heads).transpose(1, 2) for part in (self.to_q, self.to_k, self.to_v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, d)
        return self.to_out[0](y).transpose(1, 2).reshape(n, d, h, w) + x


class Conv(nn.Module):
    def __init__(self, d, stride, padding):
        super().__init__()
        self.conv = nn.Conv2d(d, d, 3, stride, padding)


class Level(nn.Module):
    def __init__(self, blocks, groups, eps, time=0, heads=0, down=None, up=None, padding=1):
        super().__init__()
        self.resnets = nn.ModuleList([Residual(i, o, groups, eps, time) for i, o in blocks])
        self.attentions = nn.ModuleList([Places(o, groups, eps, heads) for _, o in blocks] if heads else [])
        if down:
            self.downsamplers = nn.ModuleList([Conv(down, 2, padding)])
        if up:
            self.upsamplers = nn.ModuleList([Conv(up, 1, 1)])


class Middle(nn.Module):
    def __init__(self, d, groups, eps, time, heads):
        super().__init__()
        self.attentions = nn.ModuleList([Places(d, groups, eps, heads)])
        self.resnets = nn.ModuleList([Residual(d, d, groups, eps, time) for _ in range(2)])

    def forward(self, x, time=None):
        return self.resnets[1](self.attentions[0](self.resnets[0](x, time)), time)


def twice(x):
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


class Denoiser(nn.Module):
    def __init__(self, inputs, width, levels, blocks, attention, heads, groups, classes, steps):
        super().__init__()
        time, widths = 4 * width, [width << i for i in range(levels)]
        self.width, self.steps, self.conv_in = width, steps, nn.Conv2d(inputs, width, 3, padding=1)
        self.time_embedding = nn.ModuleDict(dict(linear_1=nn.Linear(width, time), linear_2=nn.Linear(time, time)))
        self.class_embedding = nn.Embedding(classes, time)
        skips, i, self.down_blocks, self.up_blocks = [width], width, nn.ModuleList(), nn.ModuleList()
        for l, o in enumerate(widths):
            pairs = [(i if b == 0 else o, o) for b in range(blocks)]
            self.down_blocks.append(Level(pairs, groups, 1e-5, time, heads * (l + attention >= levels), down=o if l < levels - 1 else None))
            skips, i = skips + [o] * blocks + ([o] if l < levels - 1 else []), o
        self.mid_block = Middle(i, groups, 1e-5, time, heads)
        for l, o in reversed(list(enumerate(widths))):
            pairs = []
            for _ in range(blocks + 1):
                pairs.append((i + skips.pop(), o))
                i = o
            self.up_blocks.append(Level(pairs, groups, 1e-5, time, heads * (l + attention >= levels), up=o if l else None))
        self.conv_norm_out, self.conv_out = nn.GroupNorm(groups, width), nn.Conv2d(width, inputs, 3, padding=1)

    def forward(self, x, time, label):
        half = self.width // 2
        angle = time[:, None].double() * torch.exp(-np.log(10000) * torch.arange(half).double() / half)
        waves = torch.cat([angle.cos(), angle.sin()], 1).float()
        time = self.time_embedding["linear_2"](F.silu(self.time_embedding["linear_1"](waves))) + self.class_embedding(label)
        x = self.conv_in(x)
        skips = [x]
        for level in self.down_blocks:
            for b, block in enumerate(level.resnets):
                x = block(x, time)
                if len(level.attentions):
                    x = level.attentions[b](x)
                skips.append(x)
            if hasattr(level, "downsamplers"):
                x = level.downsamplers[0].conv(x)
                skips.append(x)
        x = self.mid_block(x, time)
        for level in self.up_blocks:
            for b, block in enumerate(level.resnets):
                x = block(torch.cat([x, skips.pop()], 1), time)
                if len(level.attentions):
                    x = level.attentions[b](x)
            if hasattr(level, "upsamplers"):
                x = level.upsamplers[0].conv(twice(x))
        return self.conv_out(F.silu(self.conv_norm_out(x)))

    def error(self, x, label, time, noise):
        signal = torch.cumprod(1 - torch.linspace(1e-4, 0.02, self.steps, dtype=torch.float64), 0)[time.long()][:, None, None, None]
        noisy = (x * signal.sqrt() + noise * (1 - signal).sqrt()).float()
        out = self(noisy, time, label)
        return out, F.mse_loss(out, noise)


class Coder(nn.Module):
    """The encoder or decoder of an autoencoder."""

    def __init__(self, inputs, first, outputs, levels, groups, up):
        super().__init__()
        lowest, eps = levels[0][-1][1] if up else levels[-1][-1][1], 1e-6
        self.conv_in, self.mid_block = nn.Conv2d(inputs, first, 3, padding=1), Middle(lowest, groups, eps, 0, 1)
        last = len(levels) - 1
        if up:
            self.up_blocks = nn.ModuleList([Level(b, groups, eps, up=b[-1][1] if l < last else None) for l, b in enumerate(levels)])
        else:
            self.down_blocks = nn.ModuleList(
                [Level(b, groups, eps, down=b[-1][1] if l < last else None, padding=0) for l, b in enumerate(levels)])
        self.conv_norm_out = nn.GroupNorm(groups, levels[-1][-1][1], eps)
        self.conv_out = nn.Conv2d(levels[-1][-1][1], outputs, 3, padding=1)

    def forward(self, x):
        x = self.conv_in(x)
        if hasattr(self, "up_blocks"):
            x = self.mid_block(x)
            for level in self.up_blocks:
                for block in level.resnets:
                    x = block(x)
                if hasattr(level, "upsamplers"):
                    x = level.upsamplers[0].conv(twice(x))
        else:
            for level in self.down_blocks:
                for block in level.resnets:
                    x = block(x)
                if hasattr(level, "downsamplers"):
                    x = level.downsamplers[0].conv(F.pad(x, (0, 1, 0, 1)))
            x = self.mid_block(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class Vae(nn.Module):
    def __init__(self, inputs, width, levels, blocks, latent, groups):
        super().__init__()
        widths = [width << i for i in range(levels)]
        chain = lambda i, o, n: [(i if b == 0 else o, o) for b in range(n)]
        downs = [chain(widths[max(l - 1, 0)], o, blocks) for l, o in enumerate(widths)]
        back = widths[::-1]
        ups = [chain(back[max(l - 1, 0)], o, blocks + 1) for l, o in enumerate(back)]
        self.encoder = Coder(inputs, width, 2 * latent, downs, groups, False)
        self.decoder = Coder(latent, back[0], inputs, ups, groups, True)
        self.quant_conv, self.post_quant_conv = nn.Conv2d(2 * latent, 2 * latent, 1), nn.Conv2d(latent, latent, 1)

    def bound(self, x, noise):
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, 1)
        logvar = logvar.clamp(-30, 20)
        out = self.decoder(self.post_quant_conv(mean + (0.5 * logvar).exp() * noise))
        divergence = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum((1, 2, 3))
        return out, 0.5 * F.mse_loss(out, x) + divergence.mean() / x[0].numel()


def models():
    """Name, model, and a function of the step that gives output and loss; the optimizer."""
    import transformers as t

    adam, adamw = lambda ps: torch.optim.Adam(ps, 1e-3), lambda ps: torch.optim.AdamW(ps, 1e-3, weight_decay=0.1)

    def tokens(model, length, vocabulary, batch=3):
        def run(step):
            x, y = (noisy((batch, length), at + step, vocabulary) for at in (1000, 2000))
            logits = model(x).logits
            return logits, F.cross_entropy(logits.reshape(-1, vocabulary), y.reshape(-1))

        return run

    bert = t.BertForMaskedLM(t.BertConfig(
        vocab_size=40, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=36, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    yield "bert", bert, tokens(bert, 9, 40), adamw
    llama = t.LlamaForCausalLM(t.LlamaConfig(
        vocab_size=40, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=32,
        max_position_embeddings=64, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    yield "llama", llama, tokens(llama, 11, 40), adamw
    vit = t.ViTForImageClassification(t.ViTConfig(
        image_size=12, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=36, num_labels=7,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

    def images(step):
        x, y = noisy((3, 3, 12, 12), 1000 + step), noisy((3,), 2000 + step, 7)
        logits = vit(x).logits
        return logits, F.cross_entropy(logits, y)

    yield "vit", vit, images, adamw
    net = Denoiser(3, 8, 2, 1, 1, 2, 4, 5, 1000)

    def noised(step):
        x, label = noisy((3, 3, 8, 8), 1000 + step), noisy((3,), 2000 + step, 5)
        time, noise = noisy((3,), 3000 + step, 1000), 2 * noisy((3, 3, 8, 8), 4000 + step) - 1
        return net.error(x, label, time, noise)

    yield "diffusion", net, noised, adam
    vae = Vae(3, 8, 2, 1, 2, 4)
    yield "vae", vae, lambda step: vae.bound(noisy((3, 3, 8, 8), 1000 + step), 2 * noisy((3, 2, 4, 4), 4000 + step) - 1), adam


def record_models():
    kept = {}
    for name, model, run, optimizer in models():
        model.eval()
        fill(model)
        update, losses = optimizer(model.parameters()), []
        for step in range(STEPS):
            out, loss = run(step)
            update.zero_grad()
            loss.backward()
            if step == 0:
                kept[f"{name}/logits"] = some(out, 512)
                kept |= {f"{name}/grad.{hub(n)}": some(p.grad, 32) for n, p in model.named_parameters()}
            losses.append(loss.item())
            update.step()
        kept[f"{name}/losses"] = torch.tensor(losses)
        print(f"{name:12} losses {losses[0]:.4f} … {losses[-1]:.4f}")
    save("torch/models.safetensors", kept)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2."""

    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    def step(self):
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(b1 * m + (1 - b1) * p.grad)
                p.data -= lr * (update + group["weight_decay"] * p.data)
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, algorithm 2, with the norm itself as φ."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.t = 0

    def step(self):
        self.t += 1
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                v = self.state[p].setdefault("v", torch.zeros_like(p))
                m.mul_(b1).add_(p.grad, alpha=1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                u = m / (1 - b1**self.t) / ((v / (1 - b2**self.t)).sqrt() + group["eps"]) + group["weight_decay"] * p.data
                w, change = p.data.norm(), u.norm()
                p.data -= group["lr"] * (w / change if w > 0 and change > 0 else 1.0) * u


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024, in f32: matrices alone."""

    def __init__(self, params, lr, momentum=0.95, nesterov=True, weight_decay=0.1, match=False):
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, match=match))

    def step(self):
        for group in self.param_groups:
            lr, mu = group["lr"], group["momentum"]
            for p in group["params"]:
                b = self.state[p].setdefault("b", torch.zeros_like(p))
                b.lerp_(p.grad, 1 - mu)
                x = p.grad.lerp(b, mu) if group["nesterov"] else b.clone()
                n, m = x.shape
                x = x.T if n > m else x
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
                x = x.T if n > m else x
                p.data *= 1 - lr * group["weight_decay"]
                p.data -= lr * (0.2 * max(n, m) ** 0.5 if group["match"] else max(1, n / m) ** 0.5) * x


class Several:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()


def optimizers():
    """Name, and the optimizer of a list of a matrix, a bias, and a matrix."""
    o = torch.optim
    yield "rmsprop", lambda ps: o.RMSprop(ps, 0.01)
    yield "rmsprop_all", lambda ps: o.RMSprop(ps, 0.01, alpha=0.9, eps=1e-6, weight_decay=0.1, momentum=0.8, centered=True)
    yield "adagrad", lambda ps: o.Adagrad(ps, 0.05)
    yield "adagrad_all", lambda ps: o.Adagrad(ps, 0.05, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1, eps=1e-6)
    yield "adadelta", lambda ps: o.Adadelta(ps, 1.0)
    yield "adadelta_all", lambda ps: o.Adadelta(ps, 5.0, rho=0.8, eps=1e-4, weight_decay=0.1)
    yield "adamax", lambda ps: o.Adamax(ps, 0.02)
    yield "adamax_all", lambda ps: o.Adamax(ps, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    yield "nadam", lambda ps: o.NAdam(ps, 0.02)
    yield "nadam_all", lambda ps: o.NAdam(ps, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, momentum_decay=0.1)
    yield "nadam_decoupled", lambda ps: o.NAdam(ps, 0.02, weight_decay=0.1, decoupled_weight_decay=True)
    yield "radam", lambda ps: o.RAdam(ps, 0.02)
    yield "radam_all", lambda ps: o.RAdam(ps, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    yield "radam_decoupled", lambda ps: o.RAdam(ps, 0.02, weight_decay=0.1, decoupled_weight_decay=True)
    yield "radam_short", lambda ps: o.RAdam(ps, 0.02, betas=(0.8, 0.5))
    yield "adam_amsgrad", lambda ps: o.Adam(ps, 0.05, betas=(0.9, 0.7), amsgrad=True)
    yield "adamw_amsgrad", lambda ps: o.AdamW(ps, 0.05, betas=(0.9, 0.7), weight_decay=0.1, amsgrad=True)
    yield "sgd_maximize", lambda ps: o.SGD(ps, 0.05, momentum=0.9, weight_decay=0.1, maximize=True)
    yield "adam_maximize", lambda ps: o.Adam(ps, 0.05, maximize=True)
    yield "adafactor", lambda ps: o.Adafactor(ps, 0.1)
    yield "adafactor_all", lambda ps: o.Adafactor(ps, 0.5, beta2_decay=-0.5, eps=(1e-5, 1e-2), d=1.5, weight_decay=0.1)
    yield "lion", lambda ps: Lion(ps, 0.01)
    yield "lion_all", lambda ps: Lion(ps, 0.01, betas=(0.8, 0.95), weight_decay=0.1)
    yield "lamb", lambda ps: Lamb(ps, 0.05)
    yield "lamb_all", lambda ps: Lamb(ps, 0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.0)
    matrices = lambda ps: [p for p in ps if p.dim() == 2]
    others = lambda ps: o.AdamW([p for p in ps if p.dim() != 2], 0.02)
    yield "muon", lambda ps: Several(Muon(matrices(ps), 0.02), others(ps))
    yield "muon_all", lambda ps: Several(Muon(matrices(ps), 0.02, 0.8, False, 0.5, True), others(ps))


def schedules():
    """Name, first rate, and the scheduler of an optimizer."""
    s = torch.optim.lr_scheduler
    yield "multistep", 0.1, lambda o: s.MultiStepLR(o, [3, 10, 11], 0.5)
    yield "exponential", 0.1, lambda o: s.ExponentialLR(o, 0.9)
    yield "linear", 0.1, lambda o: s.LinearLR(o, 0.25, 0.8, 12)
    yield "polynomial", 0.1, lambda o: s.PolynomialLR(o, 25, 1.5)
    yield "one_cycle", 0.1, lambda o: s.OneCycleLR(o, 0.1, 40, cycle_momentum=False)
    yield "one_cycle_all", 0.1, lambda o: s.OneCycleLR(
        o, 0.1, 40, pct_start=0.35, anneal_strategy="linear", cycle_momentum=False, div_factor=10, final_div_factor=100, three_phase=True)
    yield "restarts", 0.1, lambda o: s.CosineAnnealingWarmRestarts(o, 7)
    yield "restarts_all", 0.1, lambda o: s.CosineAnnealingWarmRestarts(o, 4, 2, 0.01)
    yield "cyclic", 0.01, lambda o: s.CyclicLR(o, 0.01, 0.1, 5, 8, "triangular", cycle_momentum=False)
    yield "cyclic_halving", 0.01, lambda o: s.CyclicLR(o, 0.01, 0.1, 5, mode="triangular2", cycle_momentum=False)
    yield "cyclic_shrinking", 0.01, lambda o: s.CyclicLR(o, 0.01, 0.1, 5, 3, "exp_range", 0.95, cycle_momentum=False)
    yield "chain", 0.1, lambda o: s.SequentialLR(
        o, [s.ConstantLR(o, 0.5, 100), s.ExponentialLR(o, 0.9), s.StepLR(o, 4, 0.5)], [6, 20])
    yield "noam", 1.0, lambda o: s.LambdaLR(o, lambda t: 2.0 * 64**-0.5 * min((t + 1) ** -0.5, (t + 1) * 9**-1.5))
    yield "plateau", 0.1, lambda o: s.ReduceLROnPlateau(o, "min", 0.5, 2, 0.01, cooldown=1, min_lr=0.01)
    yield "plateau_larger", 0.1, lambda o: s.ReduceLROnPlateau(o, "max", 0.1, 1)


def record_optimizers():
    torch.manual_seed(11)
    first = {"first.weight": torch.randn(5, 4) * 0.5, "first.bias": torch.randn(5) * 0.1, "last.weight": torch.randn(2, 5) * 0.5}
    kept = {"x": torch.randn(STEPS * 6, 4), "y": torch.randn(STEPS * 6, 2)} | {f"start.{n}": w for n, w in first.items()}
    for name, build in optimizers():
        weights = [w.clone().requires_grad_() for w in first.values()]
        optimizer, path = build(weights), []
        for step in range(STEPS):
            x, y = (kept[k][6 * step : 6 * step + 6] for k in "xy")
            loss = (torch.tanh(x @ weights[0].T + weights[1]) @ weights[2].T - y).square().mean()
            grads = torch.autograd.grad(loss, weights)
            for w, g in zip(weights, grads):
                w.grad = g
            optimizer.step()
            path.append(torch.cat([w.detach().reshape(-1) for w in weights]))
        kept[f"optimizer.{name}"] = torch.stack(path)
    kept["measures"] = torch.tensor([1 / (1 + i) if i < 8 else 2.0 if i == 21 else 0.15 + 0.05 * (i * 7 % 5) - 0.002 * i for i in range(40)])
    for name, rate, build in schedules():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], rate)
        schedule, rates = build(optimizer), []
        for i in range(40):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if name.startswith("plateau"):
                schedule.step(float(kept["measures"][i]))
            elif i < 39:
                schedule.step()
        kept[f"schedule.{name}"] = torch.tensor(rates)
    save("torch/optimizers.safetensors", kept)


def save(path, tensors):
    header, data = {}, b""
    for name, t in tensors.items():
        a = t.detach().cpu().contiguous().numpy()
        kind = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64"}[str(a.dtype)]
        header[name] = {"dtype": kind, "shape": list(a.shape), "data_offsets": [len(data), len(data) + a.nbytes]}
        data += a.tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def main():
    torch.use_deterministic_algorithms(True)
    os.makedirs("torch", exist_ok=True)
    for seed, (name, build, example, tokens, classes, label, batch, optimizer) in enumerate(cases()):
        torch.manual_seed(seed)
        model = build()
        shape = (STEPS * batch, *example)
        x = torch.randint(tokens, shape) if tokens else torch.randn(shape).half().float()
        y = torch.randint(classes, (STEPS * batch, *label))
        save(f"torch/{name}.weights.safetensors", model.state_dict())
        case = {"x": x.int() if tokens else x.half(), "y": y.int()}
        update, losses = optimizer(model.parameters()), []
        for step in range(STEPS):
            part = slice(step * batch, (step + 1) * batch)
            logits = model(x[part])
            by_class = logits.movedim(1, -1) if name == "unet" else logits
            loss = F.cross_entropy(by_class.reshape(-1, classes), y[part].reshape(-1))
            update.zero_grad()
            loss.backward()
            if step == 0:
                case["logits"] = logits.detach().clone()
                case |= {f"grad.{n}": p.grad.clone() for n, p in model.named_parameters()}
            losses.append(loss.item())
            update.step()
        case |= {f"end.{n}": b for n, b in model.named_buffers() if "running" in n}
        case["losses"] = torch.tensor(losses)
        model.eval()
        with torch.no_grad():
            case["eval"] = model(x[:batch])
        save(f"torch/{name}.case.safetensors", case)
        print(f"{name:12} losses {losses[0]:.4f} … {losses[-1]:.4f}")
    record_full()
    record_models()
    record_optimizers()
    record_points()


if __name__ == "__main__":
    main()
