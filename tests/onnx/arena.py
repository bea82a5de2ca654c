"""Measures the arena that onnxruntime's CPU provider allocates from, for models in the standard
layout, and writes `arena.txt`.

    python arena.py CASES REAL [MORE]

CASES is the folder that `cases.py` made, of which the light networks are run, REAL that of
`real.py`, MORE any folder of the same layout. Needs the packages onnx, onnxruntime and numpy.

The numbers are those of the arena itself (`AllocatorGetStats` of its C interface, called through
ctypes, because its Python interface lacks it), over three runs on one thread:

    loaded  bytes in use once the session is made: weights, as far as they are in the arena
    peak    the most bytes in use at once; inputs are the caller's and not counted
    taken   bytes that the arena has taken from the system
    exact   `peak` less `loaded` of an arena that gives each request the bytes it asks for. By
            default a request may take a larger free block whole.
"""

import ctypes
import multiprocessing
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

# Places of the functions in the table that `OrtGetApiBase()->GetApi` gives. The table only grows.
PLACES = {
    "GetErrorMessage": 2,
    "CreateEnv": 3,
    "CreateSession": 7,
    "Run": 9,
    "CreateSessionOptions": 10,
    "SetIntraOpNumThreads": 24,
    "CreateTensorWithDataAsOrtValue": 49,
    "CreateCpuMemoryInfo": 69,
    "ReleaseSession": 95,
    "ReleaseValue": 96,
    "AddSessionConfigEntry": 130,
    "CreateAllocator": 131,
    "CreateAndRegisterAllocator": 144,
    "CreateArenaCfg": 156,
    "GetKeyValue": 297,
    "AllocatorGetStats": 319,
}
# The first version of the interface that has the last of these.
VERSION = 23
RUNS = 3
TYPES = {
    np.dtype(np.float32): 1,
    np.dtype(np.int32): 6,
    np.dtype(np.int64): 7,
}


class Ort:
    """The C interface; a function's status becomes an exception."""

    def __init__(self):
        folder = pathlib.Path(onnxruntime.__file__).parent / "capi"
        [path] = folder.glob("libonnxruntime.so*")
        library = ctypes.CDLL(str(path))
        library.OrtGetApiBase.restype = ctypes.POINTER(ctypes.c_void_p)
        get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(library.OrtGetApiBase()[0])
        self.table = ctypes.cast(get(VERSION), ctypes.POINTER(ctypes.c_void_p))

    def of(self, name, result=ctypes.c_void_p):
        address = self.table[PLACES[name]]
        return lambda *args: ctypes.CFUNCTYPE(result, *[type(a) for a in args])(address)(*args)

    def call(self, name, *args):
        status = self.of(name)(*args)
        if status:
            message = self.of("GetErrorMessage", ctypes.c_char_p)(ctypes.c_void_p(status))
            raise RuntimeError(f"{name}: {message.decode()}")

    def make(self, name, *args):
        """A function whose last argument is a place for its result."""
        made = ctypes.c_void_p()
        self.call(name, *args, ctypes.pointer(made))
        return made


class Session:
    def __init__(self, ort, path, exact):
        self.ort = ort
        # Errors alone are shown.
        env = ort.make("CreateEnv", ctypes.c_int(3), ctypes.c_char_p(b"arena"))
        options = ort.make("CreateSessionOptions")
        ort.call("SetIntraOpNumThreads", options, ctypes.c_int(1))
        # The arena's: type 1 of allocators, type 0 of memory.
        self.info = ort.make("CreateCpuMemoryInfo", ctypes.c_int(1), ctypes.c_int(0))
        if exact:
            # Strategy 1 takes what a request needs; a block's rest of a byte is free again.
            numbers = [ctypes.c_size_t(0), *map(ctypes.c_int, (1, -1, 1))]
            arena = ort.make("CreateArenaCfg", *numbers)
            ort.call("CreateAndRegisterAllocator", env, self.info, arena)
            entry = [b"session.use_env_allocators", b"1"]
            ort.call("AddSessionConfigEntry", options, *map(ctypes.c_char_p, entry))
        self.session = ort.make("CreateSession", env, ctypes.c_char_p(str(path).encode()), options)
        self.allocator = ort.make("CreateAllocator", self.session, self.info)

    def stats(self, key):
        pairs = self.ort.make("AllocatorGetStats", self.allocator)
        get = self.ort.of("GetKeyValue", ctypes.c_char_p)
        return int(get(pairs, ctypes.c_char_p(key.encode())) or 0)

    def run(self, inputs, outputs):
        values = []
        for array in inputs.values():
            shape = (ctypes.c_int64 * array.ndim)(*array.shape)
            values.append(
                self.ort.make(
                    "CreateTensorWithDataAsOrtValue",
                    self.info,
                    ctypes.c_void_p(array.ctypes.data),
                    ctypes.c_size_t(array.nbytes),
                    ctypes.cast(shape, ctypes.c_void_p),
                    ctypes.c_size_t(array.ndim),
                    ctypes.c_int(TYPES[array.dtype]),
                )
            )
        fed = (ctypes.c_void_p * len(values))(*values)
        names = [(ctypes.c_char_p * len(n))(*[s.encode() for s in n]) for n in (inputs, outputs)]
        results = (ctypes.c_void_p * len(outputs))()
        void = ctypes.c_void_p
        self.ort.call(
            "Run",
            self.session,
            void(),
            ctypes.cast(names[0], void),
            ctypes.cast(fed, void),
            ctypes.c_size_t(len(values)),
            ctypes.cast(names[1], void),
            ctypes.c_size_t(len(outputs)),
            ctypes.cast(results, void),
        )
        for value in [*values, *map(void, results)]:
            self.ort.of("ReleaseValue", None)(value)


def array(path):
    tensor = onnx.TensorProto.FromString(path.read_bytes())
    return np.ascontiguousarray(numpy_helper.to_array(tensor))


def measure(model, data, exact):
    graph = onnx.load(model, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in weights]
    inputs = {name: array(data / f"input_{at}.pb") for at, name in enumerate(names)}
    session = Session(Ort(), model, exact)
    loaded = session.stats("InUse")
    for _ in range(RUNS):
        session.run(inputs, [value.name for value in graph.output])
    return loaded, session.stats("MaxInUse"), session.stats("TotalAllocated")


def alone(*args):
    """Measures in a process of its own, because sessions of a process may share an arena."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, args)


def main():
    cases, *others = map(pathlib.Path, sys.argv[1:])
    models = sorted((cases / "light").glob("*/model.onnx"))
    for folder in others:
        models += sorted(folder.glob("*/model.onnx"))
    lines = [
        f"# Bytes in the arena of onnxruntime {onnxruntime.__version__}, written by arena.py:",
        "# loaded peak taken exact",
    ]
    for model in models:
        for data in sorted(model.parent.glob("test_data_set_*")):
            usual = alone(model, data, False)
            least, most, _ = alone(model, data, True)
            name = f"{model.parent.name}/{data.name[-1]}"
            lines.append(" ".join([name, *map(str, [*usual, most - least])]))
            print(lines[-1], flush=True)
    pathlib.Path(__file__).with_name("arena.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
