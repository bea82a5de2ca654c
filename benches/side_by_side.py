#!/usr/bin/env python3
"""Times training steps of slabwise and of PyTorch on the CPU in turn, on one machine.

benches/side_by_side.py [--slabwise PATH] [--python PATH] [--rounds N] [--seconds S] [--threads N]
                        [--json] [MODEL:BATCH ...]

Each round runs slabwise, then each setting of the peer, one after another, so that all of them meet
the same state of the machine; a peer that is not installed is skipped by name. For each: the median
of the rounds' medians, the fastest step of all, and the peak of resident memory. The ratio is the
time of the fastest peer divided by that of slabwise: above 1, slabwise is ahead.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEER = HERE / "peers" / "torch_step.py"
STEPS = ["mlp:64", "mlp:256", "cnn:64", "resnet20:64", "resnet18:16"]
IMAGES = {"cnn", "resnet20", "resnet18", "resnet50"}


def run(command):
    """The JSON that a program prints, or why there is none."""
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return dict(skipped=f"{command[0]} failed: {last}")
    return json.loads(lines[-1])


def ours(args, model, batch):
    threads = ["--threads", str(args.threads)]
    # As many steps as fit into the time, by a first run of few.
    base = [args.slabwise, "bench", model, "--batch", batch, "--json", *threads, "--steps"]
    found = run([*base, "5"])
    if "skipped" not in found:
        found = run([*base, str(max(5, int(1e3 * args.seconds / found["step_ms_median"])))])
    if "skipped" in found:
        return found
    return dict(ms=found["step_ms_median"], ms_min=found["step_ms_min"], rss_peak_bytes=found["rss_peak_bytes"])


def peer(args, layout, model, batch):
    return run([args.python, str(PEER), "cpu", layout, model, batch, str(args.seconds), str(args.threads)])


def joined(runs):
    """The rounds of one program."""
    good = [one for one in runs if "skipped" not in one]
    if not good:
        return dict(skipped=runs[-1]["skipped"])
    return dict(ms=statistics.median(one["ms"] for one in good), ms_min=min(one["ms_min"] for one in good),
                rounds=[one["ms"] for one in good], rss_peak_bytes=max(one["rss_peak_bytes"] for one in good))


def compare(args, model, batch):
    programs = {"slabwise": lambda: ours(args, model, batch)}
    for layout in ["eager", "channels-last"] if model in IMAGES else ["eager"]:
        programs[f"torch {layout}"] = lambda layout=layout: peer(args, layout, model, batch)
    runs = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            runs[name].append(program())
    found = {name: joined(list_) for name, list_ in runs.items()}
    own, peers = found["slabwise"], [one for name, one in found.items() if name != "slabwise" and "ms" in one]
    report = dict(model=model, batch=int(batch), programs=found)
    if "ms" in own and peers:
        report["ratio"] = min(one["ms"] for one in peers) / own["ms"]
        report["ratio_min"] = min(one["ms_min"] for one in peers) / own["ms_min"]
    return report


def show(report):
    print(f"{report['model']}, batch {report['batch']}")
    for name, one in report["programs"].items():
        if "skipped" in one:
            print(f"  {name:22} skipped: {one['skipped']}")
            continue
        print(f"  {name:22} {one['ms']:9.2f} ms, fastest {one['ms_min']:9.2f}, resident {one['rss_peak_bytes'] / 2**20:7.0f} MiB")
    if "ratio" in report:
        print(f"  fastest peer ÷ slabwise: {report['ratio']:.2f} of medians, {report['ratio_min']:.2f} of fastest steps")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slabwise", default=str(HERE.parent / "target" / "release" / "slabwise"))
    parser.add_argument("--python", default=sys.executable, help="the Python that has PyTorch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each program in each round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("steps", nargs="*", default=STEPS, metavar="MODEL:BATCH")
    args = parser.parse_args()
    if not Path(args.slabwise).is_file():
        sys.exit(f"there is no {args.slabwise}: cargo build --release -p slabwise-cli, or --slabwise PATH")
    load = os.getloadavg()[0]
    reports = []
    for step in args.steps:
        model, _, batch = step.partition(":")
        reports.append(compare(args, model, batch or "64"))
        if not args.json:
            show(reports[-1])
    result = dict(threads=args.threads, rounds=args.rounds, load_before=load, steps=reports)
    print(json.dumps(result) if args.json else f"load before: {load:.1f}")


main()
