"""Training on the device and on the CPU: losses of artifact sets, milliseconds of a step, copies between its nodes.

Of a GPT-2 of two layers, 256 wide, a step is timed beside torch eager's. Exits with 1 if losses are further apart than
1e-4. In a dry run the CPU stands in for the device, and there is no GPT-2.
"""

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import results

from opgrad.training import ArtifactSet, Trainer
from opgrad.training.engine.training_graph import session_options
from opgrad.training.run.job import sample_batch
from opgrad.training.run.recipe import Recipe

EXAMPLES = Path(__file__).parents[2] / "examples"
SETS = ("digits", "digits_attention")
ROWS, STEPS, APART = 64, 50, 1e-4


def fastest(step: Callable[[], Any], wait: Callable[[Any], Any], steps: int) -> float:
    """The milliseconds of a step, of the fastest five in a row, which begin before the one before has ended."""
    found = float("inf")
    for _ in range(steps):
        begin = time.perf_counter()
        wait([step() for _ in range(5)][-1])
        found = min(found, (time.perf_counter() - begin) / 5)
    return 1e3 * found


def copies(artifacts: ArtifactSet, batch: dict[str, np.ndarray], device: str) -> dict[str, int]:
    """How many copies between host and device the nodes of a step need."""
    options = session_options(1)
    options.enable_profiling, options.profile_file_prefix = True, str(results.folder() / "profile")
    trainer = Trainer(artifacts, 0.0, options, device=device)
    trainer.step(batch)
    profile = json.loads(Path(trainer._graph._session.end_profiling()).read_text())
    found = Counter(event["args"]["op_name"] for event in profile if event.get("args", {}).get("op_name"))
    return {name: count for name, count in found.items() if "Memcpy" in name}


def of_set(name: str, device: str, steps: int) -> bool:
    """Train a set on both; whether the losses are too far apart."""
    artifacts = ArtifactSet.load(EXAMPLES / name)
    batch, rate = sample_batch(artifacts, ROWS), Recipe.load(artifacts.directory).learning_rate
    trainers = [Trainer(artifacts, rate, device=on) for on in ("cpu", device)]
    expected, found = ([each.step(batch) for _ in range(steps)] for each in trainers)
    apart = float(np.abs(np.subtract(found, expected)).max())
    about = {
        "set": name, "apart": apart, "losses": [found[0], found[-1]], "copies": copies(artifacts, batch, device),
        "ms": fastest(lambda: trainers[1].step_ahead(batch), lambda loss: loss(), steps),
    }  # fmt: skip
    results.append("training", about)
    print(about, flush=True)
    return not apart <= APART


def of_gpt2(device: str) -> None:
    """Time a step of GPT-2, and torch's."""
    import torch

    from bench.steps import models

    with tempfile.TemporaryDirectory() as folder:
        artifacts, rows, batch, _, _ = models.architecture("GPT-2", Path(folder))
        trainer = Trainer(artifacts, device=device)
        mine = fastest(lambda: trainer.step_ahead(batch), lambda loss: loss(), STEPS)
        needed = copies(artifacts, batch, device)
    make, rows, draw = models.MODELS["GPT-2"]
    module, (x, labels) = make().to(device), (each.to(device) for each in draw(rows))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    other = fastest(models.torch_step(module, x, labels, 1, optimizer), lambda loss: loss.item(), STEPS)
    about = {"set": "GPT-2", "ms": mine, "torch ms": other, "copies": needed}
    results.append("training", about)
    print(about, flush=True)


def main() -> int:
    device, steps = ("cpu", 3) if results.is_dry() else ("cuda", STEPS)
    wrong = [of_set(name, device, steps) for name in SETS]
    if not results.is_dry():
        of_gpt2(device)
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
