"""Train the steps of cases.json with onnxruntime and NumPy alone: python stock_cases.py EXAMPLES/python FOLDER"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

sys.modules["opgrad"] = None
sys.path.insert(0, sys.argv[1])
from step import Step  # noqa: E402


def batches(content, case):
    """The batches of a case, which lie behind each other."""
    start = 0
    for _ in case["losses"]:
        batch = {}
        for entry in case["batch"]:
            count = int(np.prod(entry["shape"]))
            values = np.frombuffer(content, entry["dtype"], count, start)
            batch[entry["name"]], start = values.reshape(entry["shape"]), start + values.nbytes
        yield batch


def main(folder):
    found = {"version": onnxruntime.__version__, "losses": {}, "times": {}}
    for case in json.loads((folder / "cases.json").read_text()):
        step = Step(folder / case["name"] / "step.json")
        losses, times = [], []
        for batch in batches((folder / case["name"] / "batches.bin").read_bytes(), case):
            before = time.perf_counter()
            losses.append(step.train(batch, case["rate"]))
            times.append(1000 * (time.perf_counter() - before))
        found["losses"][case["name"]], found["times"][case["name"]] = losses, float(np.median(times))
    print(json.dumps(found))


main(Path(sys.argv[2]))
