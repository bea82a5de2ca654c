#!/usr/bin/env python3
"""Times slabwise, PyTorch and JAX on the CPU in turn, on one machine.

benches/side_by_side.py [--slabwise PATH] [--python PATH] [--rounds N] [--seconds S] [--threads N]
                        [--json] [ITEM ...]

An item is a training step, MODEL@BATCH or MODEL@BATCH@OPTIMIZER, as in mlp@64, mlp@256@adam,
gpt:layers=6,width=384@8; gemm@N, a product of square matrices; or chain and chain@gradient, the sum
of an elementwise function of 2^24 numbers, and its gradient.

Each round runs slabwise, then each setting of the peers, one after another, so that all of them meet
the same state of the machine. PyTorch runs eagerly with its fused optimizers and its fused attention,
images also with their channels last; JAX runs a jitted step whose state is donated. A peer that is
not installed, or whose model has another number of weights, is skipped by name. For each: the median
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
TORCH, JAX = (HERE / "peers" / name for name in ("torch_step.py", "jax_step.py"))
STEPS = ["mlp@64", "mlp@256", "mlp@64@adam", "mlp@256@adam", "cnn@64", "resnet20@64", "resnet18@16", "gpt@8"]
ITEMS = [*STEPS, "chain", "chain@gradient", "gemm@1024", "gemm@2048"]
IMAGES = {"cnn", "resnet20", "resnet18", "resnet50"}
CHAIN = str(1 << 24)


# glibc's allocator keeps large blocks for the next step: returned to the system, as they are by
# default, their pages would be cleared in each step (chain: 168 ms instead of 90).
KEEP = dict(MALLOC_MMAP_THRESHOLD_=str(1 << 32), MALLOC_TRIM_THRESHOLD_=str(1 << 33))


def run(command):
    """The JSON that a program prints, or why there is none."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | KEEP)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return dict(skipped=f"{command[0]} failed: {last}")
    return json.loads(lines[-1])


def ours(args, words):
    # As many steps as fit into the time, by a first run of few.
    base = [args.slabwise, "bench", *words, "--json", "--threads", str(args.threads), "--steps"]
    found = run([*base, "5"])
    if "skipped" not in found:
        found = run([*base, str(max(5, int(1e3 * args.seconds / found["step_ms_median"])))])
    if "skipped" in found:
        return found
    fields = dict(ms=found["step_ms_median"], ms_min=found["step_ms_min"])
    if "rss_peak_bytes" in found:
        fields |= dict(rss_peak_bytes=found["rss_peak_bytes"], weights=found["params_bytes"] // 4)
    return fields


def programs(args, item):
    """The words of each program: those of slabwise's bench, and the script and words of peers."""
    what, *rest = item.split("@")
    if what == "gemm":
        n = rest[0] if rest else "1024"
        words = ["cpu-product", n]
        return ["gemm", "--n", n], {"torch": [TORCH, *words], "jax": [JAX, *words]}
    if what == "chain":
        words = ["cpu-chain", rest[0] if rest else "sum", CHAIN]
        own = ["chain", "--n", CHAIN, *(["--grad"] if rest else [])]
        return own, {"torch": [TORCH, *words], "jax": [JAX, *words]}
    batch, optimizer = rest[0] if rest else "64", rest[1] if len(rest) > 1 else "-"
    own = [what, "--batch", batch, *(["--optimizer", optimizer] if optimizer != "-" else [])]
    words = [what, batch, optimizer]
    layouts = ["eager", "channels-last"] if what in IMAGES else ["eager"]
    peers = {f"torch {layout}": [TORCH, "cpu", layout, *words] for layout in layouts}
    return own, peers | {"jax": [JAX, "cpu", *words]}


def joined(runs):
    """The rounds of one program."""
    good = [one for one in runs if "skipped" not in one]
    if not good:
        return dict(skipped=runs[-1]["skipped"])
    fields = dict(ms=statistics.median(one["ms"] for one in good), ms_min=min(one["ms_min"] for one in good),
                  rounds=[one["ms"] for one in good])
    resident = [one["rss_peak_bytes"] for one in good if "rss_peak_bytes" in one]
    return fields | (dict(rss_peak_bytes=max(resident)) if resident else {})


def compare(args, item):
    words, peers = programs(args, item)
    runs = {name: [] for name in ["slabwise", *peers]}
    for _ in range(args.rounds):
        runs["slabwise"].append(ours(args, words))
        weights = runs["slabwise"][-1].get("weights")
        for name, (script, *rest) in peers.items():
            if any("skipped" in one for one in runs[name]):
                continue
            one = run([args.python, str(script), *rest, str(args.seconds), str(args.threads)])
            if weights != one.get("weights") and "ms" in one and weights is not None:
                one = dict(skipped=f"its model has {one.get('weights')} weights, not {weights}")
            runs[name].append(one)
    found = {name: joined(list_) for name, list_ in runs.items()}
    own, others = found["slabwise"], [one for name, one in found.items() if name != "slabwise" and "ms" in one]
    report = dict(item=item, programs=found)
    if "ms" in own and others:
        report["ratio"] = min(one["ms"] for one in others) / own["ms"]
        report["ratio_min"] = min(one["ms_min"] for one in others) / own["ms_min"]
    return report


def show(report):
    print(report["item"])
    for name, one in report["programs"].items():
        if "skipped" in one:
            print(f"  {name:20} skipped: {one['skipped']}")
            continue
        resident = f", resident {one['rss_peak_bytes'] / 2**20:6.0f} MiB" if "rss_peak_bytes" in one else ""
        print(f"  {name:20} {one['ms']:9.3f} ms, fastest {one['ms_min']:9.3f}{resident}")
    if "ratio" in report:
        print(f"  fastest peer ÷ slabwise: {report['ratio']:.2f} of medians, {report['ratio_min']:.2f} of fastest steps", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slabwise", default=str(HERE.parent / "target" / "release" / "slabwise"))
    parser.add_argument("--python", default=sys.executable, help="the Python that has PyTorch and JAX")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each program in each round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("items", nargs="*", default=ITEMS, metavar="ITEM")
    args = parser.parse_args()
    if not Path(args.slabwise).is_file():
        sys.exit(f"there is no {args.slabwise}: cargo build --release -p slabwise-cli, or --slabwise PATH")
    load = os.getloadavg()[0]
    reports = []
    for item in args.items:
        reports.append(compare(args, item))
        if not args.json:
            show(reports[-1])
    result = dict(threads=args.threads, rounds=args.rounds, load_before=load, items=reports)
    print(json.dumps(result) if args.json else f"load before: {load:.1f}")


main()
