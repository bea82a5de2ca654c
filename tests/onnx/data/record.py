"""Exports two small models from PyTorch as ONNX files, and records how PyTorch trains them: for
each, NAME.onnx, and NAME.safetensors with

    x, y        inputs and labels of all steps
    loss        the losses of STEPS steps of Adam, each before its update
    grad.NAME   the gradient of the first loss, by the initializer of the ONNX file; that of a
                weight which the exporter has transposed is transposed too

`cnn` is written by the exporter of TorchScript, `transformer` by that of torch.export.

digits.onnx is a classifier of MNIST's digits after an epoch of training, for the example of image
classification; it prints how many of the first 500 images of the test set it tells. seven.png is
the first of them.

Run in this folder: python record.py. Needs torch, onnx, onnxscript 0.7.2, safetensors,
pillow and numpy.
"""

import gzip
import pathlib

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from PIL import Image
from safetensors.numpy import save_file
from torch import nn
from torch.nn import functional as F

STEPS = 50
RATE = 0.01


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(2 * width)
        self.conv2 = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width, bias=False)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.short = nn.Conv2d(width, 2 * width, 1, 2)

    def forward(self, x):
        y = F.silu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.short(x))


class Cnn(nn.Module):
    """Convolutions of all kinds, normalized by running statistics as at inference."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.block = Block(8)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = F.max_pool2d(F.gelu(self.stem(x)), 2)
        x = self.block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        n, length, width = x.shape
        split = self.qkv(x).reshape(n, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder that tells the class of a text by its last token."""

    def __init__(self, vocabulary=24, width=16, length=10):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.1 * torch.randn(length, width))
        self.layers = nn.ModuleList([Layer(width, 4) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.tokens(x) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, -1])


def by_initializer(path, model):
    """The gradients of a model under the names of a file's initializers."""
    grads = {}
    left = dict(model.named_parameters())
    for tensor in onnx.load(path).graph.initializer:
        value = numpy_helper.to_array(tensor)
        for name, param in left.items():
            weight, grad = param.detach().numpy(), param.grad.numpy()
            if np.array_equal(weight, value):
                grads[f"grad.{tensor.name}"] = grad
            elif np.array_equal(weight.T, value):
                grads[f"grad.{tensor.name}"] = np.ascontiguousarray(grad.T)
            else:
                continue
            del left[name]
            break
    assert not left, f"{path} lacks {list(left)}"
    return grads


def record(name, model, x, y, **export):
    path = f"{name}.onnx"
    torch.onnx.export(model, (x,), path, input_names=["x"], output_names=["logits"], **export)
    kept = onnx.load(path)
    for node in kept.graph.node:
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
    kept.graph.ClearField("value_info")
    onnx.save(kept, path)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    losses, arrays = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if step == 0:
            arrays |= by_initializer(path, model)
        losses.append(loss.item())
        optimizer.step()
    arrays |= {"loss": np.array(losses, np.float32), "y": y.numpy().astype(np.int32)}
    arrays["x"] = x.numpy() if x.is_floating_point() else x.numpy().astype(np.int32)
    save_file(arrays, f"{name}.safetensors")
    print(name, losses[0], losses[-1], sorted(arrays))


def mnist(name, header):
    path = pathlib.Path(__file__).resolve().parents[3] / "data" / "mnist" / f"{name}-ubyte.gz"
    data = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)
    return torch.from_numpy(data[header:].copy())


def digits():
    """Trains and exports a classifier of digits; images are normalized by MNIST's mean."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, 2, 2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.MaxPool2d(2, 2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(256, 10),
    )

    def images(name):
        return (mnist(name, 16).reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081

    x, y = images("train-images-idx3"), mnist("train-labels-idx1", 8).long()
    steps = len(x) // 64
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for rows in torch.randperm(len(x))[: 64 * steps].split(64):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    names = dict(input_names=["image"], output_names=["logits"], dynamic_axes={"image": {0: "n"}})
    torch.onnx.export(model, (x[:1],), "digits.onnx", dynamo=False, opset_version=17, **names)
    Image.fromarray(mnist("t10k-images-idx3", 16)[:784].reshape(28, 28).numpy()).save("seven.png")
    told = model(images("t10k-images-idx3")[:500]).argmax(1) == mnist("t10k-labels-idx1", 8)[:500]
    print("digits", int(told.sum()), "of 500")


def trained(model):
    """A model with norms as after some training. The exporter would also merge equal weights."""
    for norm in model.modules():
        if isinstance(norm, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.2)
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, std=0.2)
            nn.init.uniform_(norm.running_var, 0.5, 2)
    return model.eval()


def main():
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    cnn, transformer = trained(Cnn()), trained(Transformer())
    # Neither are weights folded, nor statistics merged into them.
    options = dict(do_constant_folding=False, training=torch.onnx.TrainingMode.PRESERVE)
    x, y = torch.randn(6, 3, 10, 10), torch.tensor([0, 1, 2, 3, 4, 1])
    record("cnn", cnn, x, y, dynamo=False, opset_version=17, **options)
    x, y = torch.randint(24, (6, 10)), torch.tensor([0, 1, 2, 3, 4, 3])
    record("transformer", transformer, x, y, dynamo=True, external_data=False)
    digits()


if __name__ == "__main__":
    main()