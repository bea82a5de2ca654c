"""Writes the test cases of the `onnx` package as files: a folder for each case, with `model.onnx`
and folders `test_data_set_N` with `input_M.pb` and `output_M.pb`, below the folder that the only
argument names. A folder `done` says that all were written.

The cases of single nodes are computed by the package; those converted from PyTorch, simple models
and light networks come with it.
"""

import pathlib
import shutil
import sys

import numpy as np
import onnx
from onnx import numpy_helper
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


def ramp(kind):
    """What the package feeds to its light networks: elements from 0 to 1 in their order."""
    shape = [dim.dim_value or 1 for dim in kind.shape.dim]
    n = int(np.prod(shape))
    return (np.arange(n).reshape(shape) / n).astype(np.float32)


def main():
    into = pathlib.Path(sys.argv[1])
    if (into / "done").exists():
        return
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    nodes(into)
    bundled(into)
    light(into)
    (into / "done").mkdir()


if __name__ == "__main__":
    main()
