"""A step of onnxruntime-training, or of opgrad, turn by turn, run as a script by a Python that has the package.

    python api_step.py MEASURE API FOLDER BATCH.npz THREADS

MEASURE is opgrad's measure.py, API `onnxruntime.training.api` or `opgrad.training.api`, FOLDER an artifact set,
BATCH.npz has the graph's inputs in their order. The first line that is printed says that the API is there, the second
has the loss of the batch, the third says what runs; then every line read, `step` or `optimizer`, is answered by one
with the seconds of some calls, and `resident` by the bytes of memory that the process has. For onnxruntime-training
nothing of opgrad is imported but that file.
"""

import json
import os
import platform
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = ("onnxruntime-training", "onnxruntime-training-cpu")


def main() -> None:
    """Answer until the input ends."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]  # our files are no libraries
    file, name, folder, batch, threads = sys.argv[1:]
    measure, api = SimpleNamespace(**runpy.run_path(file)), import_module(name)
    _answer({"api": name})
    arrays = list(import_module("numpy").load(batch).values())
    step, optimizer_step = calls(api, Path(folder), arrays, int(threads))
    _answer({"loss": float(step())})
    found = {each.metadata["Name"]: each.version for each in distributions() if each.metadata["Name"] in NAMES}
    _answer({"versions": {"python": platform.python_version(), **found}})
    turns = {"step": measure.hot_turns(step), "optimizer": measure.hot_turns(optimizer_step), "resident": _resident}
    for line in sys.stdin:
        found = turns[line.strip()]()
        measure.settle()
        _answer(found)


def _resident() -> int | None:
    """Bytes of this process in memory, where the system tells."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else None


def _answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def calls(
    api: Any, folder: Path, arrays: Sequence[Any], threads: int, **more: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A whole step on these inputs with a learning rate of 0, and the optimizer's alone. more: for the module."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what is logged stands in exceptions
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    models = str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx")
    module = api.Module(*models, session_options=options, **more)
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(0.0)
    module.train()

    def step() -> Any:
        loss = module(*arrays)
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    return step, optimizer.step


if __name__ == "__main__":
    main()
