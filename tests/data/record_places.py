"""Records results of PyTorch for operations that write to places or run along an axis, for tests/indexed_writes.rs.

Needs torch and numpy. Run in this folder: python record_places.py. It writes torch/places.safetensors: of each case NAME
NAME/x0, x1, … the arguments, NAME/value the result, NAME/positions where there are some, and NAME/d0, d1, … the gradients of
Σ (i + 1)·valueᵢ by the arguments that are floats. Values that are set to one place several times are those of NumPy, where
the last one stays.
"""
import json, struct
import numpy as np, torch

torch.manual_seed(0)
rng = np.random.default_rng(0)
tensors = {}


def floats(*shape):
    return (np.round(rng.normal(size=shape) * 4) / 4).astype(np.float32)


def keep(name, array):
    array = np.ascontiguousarray(array.detach().numpy() if isinstance(array, torch.Tensor) else array)
    tensors[name] = array.astype(np.int32) if array.dtype == np.int64 else array


def case(name, arguments, run, differentiate=True):
    given = [torch.tensor(a.astype(np.int64) if a.dtype == np.int32 else a) for a in arguments]
    for g in given:
        g.requires_grad_(differentiate and g.is_floating_point())
    out = run(*given)
    value, positions = out if isinstance(out, tuple) else (out, None)
    for i, a in enumerate(arguments):
        keep(f"{name}/x{i}", a)
    keep(f"{name}/value", value)
    if positions is not None:
        keep(f"{name}/positions", positions)
    if differentiate:
        weights = torch.arange(1, value.numel() + 1, dtype=torch.float32).reshape(value.shape)
        (value * weights).sum().backward()
        for i, g in enumerate(given):
            if g.requires_grad:
                keep(f"{name}/d{i}", g.grad)


def assigned(x, v):
    y = x.clone()
    y[:, 1:6:2] = v
    return y


def numpy_set(x, index, values):
    y = x.numpy().copy()
    np.put_along_axis(y, index.numpy(), values.numpy(), 1)
    return torch.tensor(y)


index = np.array([[0, 2], [4, 4], [1, 0]], np.int32)
apart = np.array([[0, 2], [4, 1], [1, 0]], np.int32)
rows = np.array([3, 0, 3], np.int32)
x, v = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(3, 2)).astype(np.float32)
case("scatter_add", [x, index, v], lambda x, i, v: x.scatter_add(1, i, v))
case("scatter_set", [x, apart, v], lambda x, i, v: x.scatter(1, i, v))
case("scatter_set_twice", [x, index, v], numpy_set, False)
for name, how in [("prod", "prod"), ("max", "amax"), ("min", "amin")]:
    case(f"scatter_{name}", [x, index, v], lambda x, i, v: x.scatter_reduce(1, i, v, how))
x, v = floats(4, 3), floats(3, 3)
case("index_add", [x, rows, v], lambda x, i, v: x.index_add(0, i, v))
case("index_copy", [x, np.array([3, 0, 2], np.int32), v], lambda x, i, v: x.index_copy(0, i, v))
i, j = np.array([[1], [3]], np.int32), np.array([0, 2, 2], np.int32)
case("index_put_add", [x, i, j, floats(2, 3)], lambda x, i, j, v: x.index_put((i, j), v, accumulate=True))
case("index", [floats(4, 3, 2), i, j], lambda x, i, j: x[i, j])
case("take_along_axis", [floats(4, 1), np.array([[3, 0, 1]], np.int32)], lambda x, i: torch.take_along_dim(x, i, 0))
case("slice_assign", [floats(2, 7), floats(2, 3)], assigned)
x = floats(3, 6)
x[1, 2] = 0
for axis in (0, 1):
    case(f"cumsum_{axis}", [x], lambda x: x.cumsum(axis))
    case(f"cumprod_{axis}", [x], lambda x: x.cumprod(axis))
    case(f"cummax_{axis}", [x], lambda x: tuple(x.cummax(axis)))
    case(f"cummin_{axis}", [x], lambda x: tuple(x.cummin(axis)))
    case(f"logcumsumexp_{axis}", [x], lambda x: x.logcumsumexp(axis))
    case(f"sort_{axis}", [x], lambda x: tuple(x.sort(dim=axis, descending=True, stable=True)))
odd = np.array([1, 3, 3, np.nan, 5, np.nan, -np.inf], np.float32)
case("cummax_odd", [odd], lambda x: tuple(x.cummax(0)), False)
case("cummin_odd", [odd], lambda x: tuple(x.cummin(0)), False)
case("logcumsumexp_odd", [np.array([-np.inf, -np.inf, 1, 1000, np.inf, 2], np.float32)], lambda x: x.logcumsumexp(0), False)
distinct = rng.permutation(40).astype(np.float32).reshape(8, 5) / 8
case("topk", [distinct], lambda x: tuple(x.topk(3, 0)))
case("bottomk", [distinct], lambda x: tuple(x.topk(4, 1, largest=False)))

header, at = {}, 0
names = {np.dtype("float32"): "F32", np.dtype("int32"): "I32"}
for name, array in tensors.items():
    header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
    at += array.nbytes
text = json.dumps(header, separators=(",", ":")).encode()
text += b" " * (-len(text) % 8)
with open("torch/places.safetensors", "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for a in tensors.values()))
