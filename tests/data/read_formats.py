"""Reads exports of slabwise with foreign readers: Python's pickle and json, a reader of protocol buffers that
knows the wire format alone, and, with `torch` as the last argument, PyTorch's own viewer of snapshots.

    python3 read_formats.py FOLDER IN_USE_BYTES RESERVED_BYTES BLOCKS PROFILE_BYTES [torch]

An assertion fails for each file that violates its format.
"""

import gzip
import json
import pickle
import sys


def lists(value):
    """JSON knows no tuples."""
    if isinstance(value, dict):
        return {key: lists(inner) for key, inner in value.items()}
    return [lists(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def snapshot(folder, in_use, reserved, blocks):
    with open(f"{folder}/memory.pickle", "rb") as file:
        data = pickle.load(file)
        assert file.read() == b"", "the pickle ends where the file ends"
    with open(f"{folder}/memory.json") as file:
        assert lists(data) == json.load(file), "pickle and JSON say the same"
    assert set(data) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    live, total = [], 0
    for segment in data["segments"]:
        at, allocated = segment["address"], 0
        for block in segment["blocks"]:
            assert block["address"] == at and block["size"] > 0, "blocks follow each other"
            assert block["state"] in ("active_allocated", "active_pending_free", "inactive")
            assert isinstance(block["frames"], list) and block["requested_size"] <= block["size"]
            if block["state"] == "active_allocated":
                allocated += block["size"]
                live.append((block["address"], block["size"]))
            at += block["size"]
        assert at == segment["address"] + segment["total_size"] and at < 1 << 53
        assert segment["allocated_size"] == segment["active_size"] == allocated
        assert segment["segment_type"] in ("small", "large") and len(segment["segment_pool_id"]) == 2
        total += segment["total_size"]
    assert (sum(size for _, size in live), total, len(live)) == (in_use, reserved, blocks)
    # The events lead to the blocks.
    held, requested, time = {}, set(), 0
    for event in data["device_traces"][0]:
        assert event["time_us"] >= time
        time, action = event["time_us"], event["action"]
        address = event["device_free" if action == "oom" else "addr"]
        assert all(set(frame) == {"name", "filename", "line"} for frame in event["frames"])
        if action == "alloc":
            assert address not in held, "an address is handed out once"
            held[address] = event["size"]
        elif action == "free_requested":
            assert address in held and address not in requested
            requested.add(address)
        elif action == "free_completed":
            assert address in requested, "a free that was not requested"
            requested.remove(address)
            del held[address]
        else:
            assert action in ("segment_alloc", "segment_free", "oom", "snapshot"), action
    assert sorted(held) == sorted(address for address, _ in live) and not requested


def fields(data):
    """Field numbers and values of a message: numbers, or bytes."""
    def varint(at):
        number = shift = 0
        while True:
            byte = data[at]
            at, number, shift = at + 1, number | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return number, at

    at = 0
    while at < len(data):
        key, at = varint(at)
        field, wire = key >> 3, key & 7
        assert wire in (0, 2), f"wire type {wire} is used by no field of a profile"
        value, at = varint(at)
        if wire == 2:
            assert at + value <= len(data)
            value, at = data[at:at + value], at + value
        yield field, value


def numbers(value):
    """A repeated number, packed or one at a time."""
    if isinstance(value, int):
        return [value]
    found, number, shift = [], 0, 0
    for byte in value:
        number, shift = number | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            found.append(number)
            number = shift = 0
    return found


def profile(folder, expected):
    with gzip.open(f"{folder}/memory.pb.gz") as file:
        message = list(fields(file.read()))
    strings = [value.decode() for field, value in message if field == 6]
    assert strings[0] == "" and len(set(strings)) == len(strings)
    types = [dict(fields(value)) for field, value in message if field == 1]
    assert [(strings[t[1]], strings[t[2]]) for t in types] == [("allocations", "count"), ("space", "bytes")]
    functions = {f[1]: f for f in (dict(fields(value)) for field, value in message if field == 5)}
    locations = {}
    for field, value in message:
        if field == 4:
            parts = list(fields(value))
            (number,) = [v for f, v in parts if f == 1]
            locations[number] = [dict(fields(v)) for f, v in parts if f == 4]
    assert 0 not in locations and 0 not in functions, "ids begin at 1"
    total = 0
    for value in (value for field, value in message if field == 2):
        parts = list(fields(value))
        stack = [n for f, v in parts if f == 1 for n in numbers(v)]
        count, size = [n for f, v in parts if f == 2 for n in numbers(v)]
        assert stack and count > 0
        for number in stack:
            for line in locations[number]:
                function = functions[line[1]]
                assert strings[function[2]] and function.get(4, 0) < len(strings)
        total += size
    assert total == expected, (total, expected)
    assert {field for field, _ in message} <= {1, 2, 3, 4, 5, 6, 9, 11, 13, 14}


def trace(folder):
    with open(f"{folder}/trace.json") as file:
        events = json.load(file)["traceEvents"]
    open_spans, seen, last, counters = {}, set(), 0, 0
    for event in events:
        phase = event["ph"]
        assert {"name", "ph", "pid", "tid"} <= set(event)
        if phase == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            continue
        assert event["ts"] >= 0
        if phase == "X":
            assert event["dur"] >= 0
            continue
        # Kernels have a thread of their own; on the other, time goes on.
        assert event["ts"] >= last
        last = event["ts"]
        if phase in "be":
            key = (event["cat"], event["id"], event["name"])
            if phase == "b":
                assert key not in open_spans and key not in seen, "an id opens once"
                open_spans[key] = event["ts"]
            else:
                assert event["ts"] >= open_spans.pop(key)
            seen.add(key)
        elif phase == "C":
            counters += 1
            assert all(isinstance(value, (int, float)) and value >= 0 for value in event["args"].values())
            assert event["args"]["in use"] <= event["args"]["reserved"]
        else:
            assert phase == "i" and event["s"] in "gpt", phase
    assert counters > 0 and seen


def torch_viewer(folder):
    from torch.cuda import _memory_viz

    with open(f"{folder}/memory.pickle", "rb") as file:
        data = pickle.load(file)
    for view in (_memory_viz.segsum, _memory_viz.trace):
        assert view(data), view.__name__
    for view in (_memory_viz.memory, _memory_viz.segments):
        # In the form of the input of flamegraph.pl, which it would fetch.
        assert isinstance(view(data, format_flamegraph=lambda lines: lines), str), view.__name__
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(data), plot.__name__


folder, numbers_given = sys.argv[1], [int(argument) for argument in sys.argv[2:6]]
snapshot(folder, *numbers_given[:3])
profile(folder, numbers_given[3])
trace(folder)
if sys.argv[6:] == ["torch"]:
    torch_viewer(folder)
print("read")
