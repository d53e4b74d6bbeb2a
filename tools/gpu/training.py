"""Training graphs in sessions of onnxruntime, on the device and on the CPU: losses, milliseconds, copies between nodes.

Gradients come back to the host, where plain steps down the gradient change the parameters. Exits with 1 if losses are
further apart than 1e-4.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime
import results

from opgrad.onnxruntime import InferenceSession
from opgrad.training import ArtifactSet
from opgrad.training.run.job import sample_batch

EXAMPLES = Path(__file__).parents[2] / "examples"
SETS = ("digits", "digits_attention")
ROWS, STEPS, RATE, APART = 64, 50, 0.1, 1e-4
ON_CPU = "CPUExecutionProvider"


def train(artifacts: ArtifactSet, provider: str, steps: int) -> tuple[list[float], float, dict[str, int]]:
    """The losses, the milliseconds of the fastest step, and how many copies between host and device a step has."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(results.folder() / "profile")
    session = InferenceSession(artifacts.training_model.SerializeToString(), options, providers=[provider])
    wanted = [artifacts.loss, *artifacts.gradients.values()]
    parameters = {name: array.copy() for name, array in artifacts.trainable.items()}
    feeds = {**artifacts.frozen, **artifacts.constants, **sample_batch(artifacts, ROWS), **parameters}
    losses, fastest = [], float("inf")
    for _ in range(steps):
        begin = time.perf_counter()
        loss, *gradients = session.run(wanted, feeds)
        fastest = min(fastest, time.perf_counter() - begin)
        losses.append(float(loss))
        for name, gradient in zip(artifacts.gradients, gradients, strict=True):
            parameters[name] -= RATE * gradient
    profile = json.loads(Path(session.end_profiling()).read_text())
    copies = Counter(event["args"]["op_name"] for event in profile if event.get("args", {}).get("op_name"))
    return losses, 1e3 * fastest, {name: count // steps for name, count in copies.items() if "Memcpy" in name}


def main() -> int:
    wrong, steps = 0, 3 if results.is_dry() else STEPS
    for name in SETS:
        artifacts = ArtifactSet.load(EXAMPLES / name)
        expected, _, _ = train(artifacts, ON_CPU, steps)
        found, milliseconds, copies = train(artifacts, ON_CPU if results.is_dry() else "CUDAExecutionProvider", steps)
        apart = float(np.abs(np.subtract(found, expected)).max())
        wrong += not apart <= APART
        about = {"set": name, "apart": apart, "losses": [found[0], found[-1]], "ms": milliseconds, "copies": copies}
        results.append("training", about)
        print(about, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
