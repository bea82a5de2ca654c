"""Writes the test cases of the `onnx` package as files: a folder for each case, with `model.onnx`
and folders `test_data_set_N` with `input_M.pb` and `output_M.pb`, below the folder that the only
argument names. A folder `done` says that all were written.

The cases of single nodes are computed by the package; those converted from PyTorch, simple models
and light networks come with it. Two models of `trained` are made here.
"""

import os
import pathlib
import shutil
import sys

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.backend.test.loader import load_model_tests


def write(path, message):
    path.write_bytes(message.SerializeToString())


def values(folder, kind, arrays, types):
    """Arrays, or what is none (sequences, optionals), as `kind_M.pb`."""
    for at, (array, info) in enumerate(zip(arrays, types)):
        if isinstance(array, onnx.TensorProto):
            write(folder / f"{kind}_{at}.pb", array)
            continue
        if info.type.WhichOneof("value") != "tensor_type":
            (folder / f"{kind}_{at}.pb").write_bytes(b"")
            continue
        tensor = numpy_helper.from_array(np.asarray(array), info.name)
        write(folder / f"{kind}_{at}.pb", tensor)


def nodes(into):
    for case in load_model_tests(kind="node"):
        target = into / "node" / case.name
        target.mkdir(parents=True)
        if case.model is not None:
            write(target / "model.onnx", case.model)
            graph = case.model.graph
            for number, (inputs, outputs) in enumerate(case.data_sets):
                data = target / f"test_data_set_{number}"
                data.mkdir()
                values(data, "input", inputs, graph.input)
                values(data, "output", outputs, graph.output)
        else:
            shutil.copytree(case.model_dir, target, dirs_exist_ok=True)


def bundled(into):
    root = pathlib.Path(onnx.__file__).parent / "backend" / "test" / "data"
    for kind in ("pytorch-converted", "pytorch-operator", "simple"):
        shutil.copytree(root / kind, into / kind)


def light(into):
    root = pathlib.Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for model in sorted(root.glob("*.onnx")):
        target = into / "light" / model.stem
        data = target / "test_data_set_0"
        data.mkdir(parents=True)
        shutil.copy(model, target / "model.onnx")
        graph = onnx.load(model).graph
        weights = {tensor.name for tensor in graph.initializer}
        fed = [value for value in graph.input if value.name not in weights]
        for at, value in enumerate(fed):
            array = ramp(value.type.tensor_type)
            write(data / f"input_{at}.pb", numpy_helper.from_array(array, value.name))
        for at, output in enumerate(sorted(root.glob(f"{model.stem}_output_*.pb"))):
            shutil.copy(output, data / f"output_{at}.pb")


def trained(into):
    """Two small models with weights and a named batch, to be trained."""
    rng = np.random.default_rng(0)

    def weight(name, *shape):
        values = rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
        return numpy_helper.from_array(values.astype(np.float32), name)

    def save(name, nodes, weights, shape, classes):
        values = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes,
            name,
            [values("x", onnx.TensorProto.FLOAT, ["batch", *shape])],
            [values("logits", onnx.TensorProto.FLOAT, ["batch", classes])],
            weights,
        )
        opsets = [helper.make_opsetid("", 17)]
        (into / "trained").mkdir(exist_ok=True)
        onnx.save(helper.make_model(graph, opset_imports=opsets), into / "trained" / f"{name}.onnx")

    node = helper.make_node
    save(
        "mlp",
        [
            node("Gemm", ["x", "w1", "b1"], ["h"], transB=1),
            node("Relu", ["h"], ["r"]),
            node("Gemm", ["r", "w2", "b2"], ["logits"], transB=1),
        ],
        [weight("w1", 16, 8), weight("b1", 16), weight("w2", 3, 16), weight("b2", 3)],
        [8],
        3,
    )
    save(
        "cnn",
        [
            node("Conv", ["x", "w1", "b1"], ["c"], pads=[1, 1, 1, 1]),
            node("Relu", ["c"], ["r"]),
            node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
            node("Flatten", ["p"], ["f"]),
            node("Gemm", ["f", "w2", "b2"], ["logits"], transB=1),
        ],
        [weight("w1", 4, 1, 3, 3), weight("b1", 4), weight("w2", 3, 64), weight("b2", 3)],
        [1, 8, 8],
        3,
    )


def ramp(kind):
    """What the package feeds to its light networks: elements from 0 to 1 in their order."""
    shape = [dim.dim_value or 1 for dim in kind.shape.dim]
    n = int(np.prod(shape))
    return (np.arange(n).reshape(shape) / n).astype(np.float32)


def main():
    into = pathlib.Path(sys.argv[1])
    if (into / "done").exists():
        return
    # Made aside, so that two processes do not disturb each other.
    aside = into.with_name(f"{into.name}.{os.getpid()}")
    aside.mkdir(parents=True)
    nodes(aside)
    bundled(aside)
    light(aside)
    trained(aside)
    (aside / "done").mkdir()
    shutil.rmtree(into, ignore_errors=True)
    aside.rename(into)


if __name__ == "__main__":
    main()
