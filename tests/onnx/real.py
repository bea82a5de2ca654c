"""Writes models of published wheels as test cases: a folder for each model, with `model.onnx` and
folders `test_data_set_N` with `input_M.pb` and the results of onnxruntime as `output_M.pb`, below
the folder that the only argument names. A folder `done` says that all were written.

The wheels are those of `wheels.txt`, 28 MB, downloaded by pip, which checks their hashes. Needs the
packages onnx, onnxruntime and numpy. The inputs are made by a seeded generator: tones with noise
for models of sound, text and other bytes for the model of file types.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time
import zipfile

import numpy as np
import onnxruntime
from onnx import numpy_helper

HERE = pathlib.Path(__file__).parent
# Times that a download is tried.
TRIES = 3


def sound(samples, rate, seed):
    """A voice of a few harmonics that swells and fades, with noise."""
    at = np.arange(samples) / rate
    pitch = 140 + 30 * np.sin(2 * np.pi * 0.7 * at)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(n * phase) / n for n in range(1, 8))
    noise = np.random.default_rng(seed).normal(size=samples)
    swell = np.sin(2 * np.pi * 3 * at) ** 2
    return (0.1 * voice * swell + 0.01 * noise).astype(np.float32)


def silero_sequence(windows):
    """Windows of 512 samples at 16 kHz, each with the 64 before it, and the state so far."""
    wave = sound(64 + 512 * windows, 16_000, windows)
    rows = [wave[512 * at : 512 * at + 576] for at in range(windows)]
    state = np.random.default_rng(3).normal(size=(2, 1, 1, 128)).astype(np.float32)
    return {"input": np.stack(rows), "h": 0.1 * state[0], "c": 0.1 * state[1]}


def silero(batch, rate):
    length = {16_000: 576, 8_000: 288}[rate]
    state = np.random.default_rng(rate).normal(size=(2, batch, 128)).astype(np.float32)
    return {
        "input": sound(batch * length, rate, batch).reshape(batch, length),
        "sr": np.array(rate, np.int64),
        "state": 0.1 * state,
    }


def basic_pitch():
    return {"serving_default_input_2:0": sound(43_844, 22_050, 1).reshape(1, 43_844, 1)}


def magika():
    """The first and last 1,024 bytes of files; 256 stands where a short file has none."""
    text = (HERE / "real.py").read_bytes()
    rng = np.random.default_rng(7)
    files = [
        text,
        b'{"name": "slabwise", "sizes": [1, 2, 3]}\n',
        b"\x89PNG\r\n\x1a\n" + rng.integers(0, 256, 4000, np.uint8).tobytes(),
    ]
    rows = np.full((len(files), 2048), 256, np.int32)
    for row, file in zip(rows, files):
        first, last = file[:1024], file[-1024:]
        row[: len(first)] = list(first)
        row[2048 - len(last) :] = list(last)
    return {"bytes": rows}


# The name of a case, the file in its wheel, and the inputs of its runs.
MODELS = [
    (
        "basic_pitch",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        [basic_pitch()],
    ),
    ("magika", "magika/models/standard_v3_3/model.onnx", [magika()]),
    (
        "silero_sequence",
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        [silero_sequence(1), silero_sequence(8)],
    ),
    (
        "silero_opset18",
        "silero_vad/data/silero_vad_op18_ifless.onnx",
        [silero(1, 16_000), silero(3, 16_000), silero(1, 8_000)],
    ),
]


def download(into):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--require-hashes"]
    # The same files on every machine; nothing of them is run.
    command += ["--platform=manylinux_2_28_x86_64", "--python-version=3.12"]
    command += ["--dest", str(into), "--requirement", str(HERE / "wheels.txt")]
    for left in reversed(range(TRIES)):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if left == 0:
            sys.exit(f"pip cannot download the wheels: {done.stderr}")
        time.sleep(3)


def main():
    into = pathlib.Path(sys.argv[1])
    if (into / "done").exists():
        return
    # Made aside, so that two processes do not disturb each other.
    aside = into.with_name(f"{into.name}.{os.getpid()}")
    wheels = aside / "wheels"
    wheels.mkdir(parents=True)
    try:
        download(wheels)
        files = [zipfile.ZipFile(wheel) for wheel in sorted(wheels.glob("*.whl"))]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        for name, path, runs in MODELS:
            target = aside / name
            target.mkdir()
            [wheel] = [file for file in files if path in file.namelist()]
            (target / "model.onnx").write_bytes(wheel.read(path))
            session = onnxruntime.InferenceSession(
                target / "model.onnx", options, ["CPUExecutionProvider"]
            )
            for number, inputs in enumerate(runs):
                data = target / f"test_data_set_{number}"
                data.mkdir()
                results = session.run(None, inputs)
                for kind, infos, arrays in [
                    ("input", session.get_inputs(), [inputs[i.name] for i in session.get_inputs()]),
                    ("output", session.get_outputs(), results),
                ]:
                    for at, (info, array) in enumerate(zip(infos, arrays)):
                        tensor = numpy_helper.from_array(np.asarray(array), info.name)
                        (data / f"{kind}_{at}.pb").write_bytes(tensor.SerializeToString())
        for file in files:
            file.close()
        shutil.rmtree(wheels)
        (aside / "done").mkdir()
        shutil.rmtree(into, ignore_errors=True)
        aside.rename(into)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    main()
