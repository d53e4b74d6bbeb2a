"""Several gloo processes train an artifact set: as one process with the whole batch does, and bit by bit alike."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_sets import SETS
from processes import run_processes

from opgrad.training import ArtifactSet
from opgrad.training.api import CheckpointState, Module, Optimizer
from opgrad.training.engine.distributed import OneProcess, Processes
from opgrad.training.files.artifact_set import AdamWRule, SGDRule
from opgrad.training.run import job
from opgrad.training.run.fit import Fit, Interrupted, step_rows
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import LAST, Resumption

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TABLES = ["items.weight", "users.weight", "places.weight"]
(ITEMS,) = (each for each in SETS if each.name == "several_inputs")
DIGITS = ROOT / "examples" / "digits"


@pytest.mark.parametrize(("size", "whole"), [(1, False), (3, False), (5, False), (2, True), (3, True)])
def test_parts_are_the_batches(size, whole):
    order, recipe, every = np.random.default_rng(0).permutation(47), Recipe(batch_size=10, accumulate=3), []
    for rank in range(size):
        process = OneProcess()
        process.rank, process.size = rank, size
        every.append(list(step_rows(order, recipe, process, whole)))
    for step in zip(*every, strict=True):
        assert len({(each.rows, each.batches) for each in step}) == 1
        for place in range(step[0].batches):
            parts = [part for each in step for part in each.parts if part.batch == place]
            assert sum(part.of_batch for part in parts) == pytest.approx(1)
            assert not whole or len(parts) == 1
    taken = [part.rows for steps in zip(*every, strict=True) for place in range(3) for each in steps
             for part in each.parts if part.batch == place]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(taken), order)


@pytest.mark.parametrize("fails", [False, True])
def test_collective_that_ends_as_the_wait_for_it_does(fails):
    processes: Any = Processes.__new__(Processes)
    waits = []
    processes._store, processes._group, processes.seconds = None, None, 0.0
    processes._torch = SimpleNamespace(from_numpy=lambda array: array)

    def wait(_):
        waits.append(len(waits))
        if len(waits) == 1 or fails:
            raise RuntimeError("timed out" if len(waits) == 1 else "broken")

    work = SimpleNamespace(wait=wait, is_completed=lambda: bool(waits))
    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        processes._communicate(lambda array, **given: work, np.zeros(1))
    assert waits == [0, 1]


def run_of(folder, accumulate, validation, progress, *processes):
    """A run of two epochs on the digits."""
    settings = {"epochs": 2, "batch_size": 50 // accumulate, "accumulate": accumulate, "validation": validation}
    recipe = replace(Recipe.load(DIGITS), **settings)
    return job.train(ArtifactSet.load(DIGITS), recipe, None, folder, progress, None, *processes)


def trained(rank, folder, accumulate, validation, stop):
    """A run of these processes: the losses of its epochs, how many steps there were, and the part of communication."""
    seen = []

    def progress(done, total, loss, validation_loss, speed):
        seen.append(done)
        if stop and rank == 1 and len(seen) == stop:
            signal.raise_signal(signal.SIGINT)

    try:
        run = run_of(Path(folder) / "run", accumulate, validation, progress, Processes())
    except Interrupted as interrupted:
        return {"steps": len(seen), "checkpoint": str(interrupted.checkpoint)}
    losses = [epoch.train_loss for epoch in run.state.history] if run else None
    return {"losses": losses, "steps": len(seen), "communication": run.communication if run else None}


def cases(rank, folder):
    """All that three processes are asked."""
    found = {}
    for name, arguments in {"plain": (1, None, 0), "again": (1, None, 0), "accumulated": (2, 100, 0)}.items():
        Path(folder, name).mkdir(exist_ok=True)
        found[name] = trained(rank, f"{folder}/{name}", *arguments)
    Path(folder, "stopped").mkdir(exist_ok=True)
    found["stopped"] = trained(rank, f"{folder}/stopped", 1, None, 5)
    found["module"] = module(rank, 3, process_group=torch.distributed.group.WORLD)
    found["done"], found["failed"] = started_after_the_end(rank, folder), failed(rank, folder)
    found["rows"] = {name: trained_by_rows(folder, rule, norm) for name, (rule, norm) in BY_ROWS.items()}
    found["ended"] = ended(rank, folder)  # the last, since one process takes part in fewer exchanges than the others
    return found


def ended(rank, folder):
    """What processes raise of which the second one fails after its third step, and after how many seconds."""
    seen = []

    def progress(*_):
        seen.append(time.perf_counter())
        if rank == 1 and len(seen) == 3:
            raise ValueError("its disk is\nfull")

    given = (ArtifactSet.load(DIGITS), Recipe.load(DIGITS), None, Path(folder) / "ended", progress)
    try:
        job.train(*given, None, Processes())
    except (ValueError, RuntimeError) as error:
        return {"error": str(error), "seconds": time.perf_counter() - seen[-1], "steps": len(seen)}
    return None


BY_ROWS = {"adamw": (AdamWRule(weight_decay=0.1), None), "sgd, clipped": (SGDRule(), 0.05)}


def trained_by_rows(folder, rule, norm, processes=None):
    """The training loss of the last epoch of a run whose tables are trained by rows."""
    artifacts = replace(ArtifactSet.load(ITEMS.folder), rule=rule)
    recipe = Recipe(epochs=2, batch_size=15, learning_rate=0.02, clip_norm=norm, row_wise=TABLES)
    file = Path(folder) / "items.npz"
    run = job.train(artifacts, recipe, file, Path(folder) / "items", lambda *_: None, None, processes or Processes())
    return run.state.history[-1].train_loss if run else None


def started_after_the_end(rank, folder):
    """What processes do that are started anew after one was lost behind the last checkpoint."""
    output = Path(folder, "plain", "run")
    done = Resumption.read(output / LAST, may_be_done=True)
    given = (ArtifactSet.load(DIGITS), done.state.recipe, None, output.parent / "anew", lambda *each: None)
    run = job.train(*given, done, Processes())
    return [epoch.train_loss for epoch in run.state.history] if run else None


def failed(rank, folder):
    """What each process raises where the first one cannot write."""
    Path(folder, "failed").mkdir(exist_ok=True)
    if not rank:
        Path(folder, "failed", "run").touch()
    torch.distributed.barrier()
    try:
        trained(rank, f"{folder}/failed", 1, None, 0)
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def module(rank=0, size=1, **given):
    """What a module's steps over the processes come to, or those of one with all batches."""
    state = CheckpointState.load_checkpoint(DIGITS / "checkpoint")
    if rank:  # the first one's are taken
        for _, parameter in state.parameters:
            parameter.data = parameter.data + 1
    model = Module(DIGITS / "training_model.onnx", state, DIGITS / "eval_model.onnx", **given)
    optimizer = Optimizer(DIGITS / "optimizer_model.onnx", model)
    rng, norms = np.random.default_rng(3), []
    for _ in range(3):
        pixels, digits = rng.random((30, 64), np.float32), rng.integers(0, 10, 30)
        model(pixels[rank::size], digits[rank::size])
        norms.append(model.clip_grad_norm(0.5))
        optimizer.step()
        model.lazy_reset_grad()
    return {"norms": norms, "sum": float(np.abs(model.get_contiguous_parameters().numpy()).sum(dtype=np.float64))}


def test_three_processes_train_as_one_does(tmp_path):
    np.savez(tmp_path / "items.npz", **ITEMS.rows())
    found = run_processes(cases, 3, str(tmp_path), str(tmp_path))
    for name, arguments in {"plain": (1, None), "accumulated": (2, 100)}.items():
        one = run_of(tmp_path / "alone", *arguments, lambda *_: None)
        np.testing.assert_allclose(found[0][name]["losses"], [e.train_loss for e in one.state.history], rtol=1e-6)
        assert 0 < found[0][name]["communication"] < 1
        assert [each[name]["losses"] for each in found[1:]] == [None, None]
    first, again = (Path(tmp_path, name, "run", "model.onnx").read_bytes() for name in ("plain", "again"))
    assert first == again
    assert [each["stopped"]["steps"] for each in found] == [found[0]["stopped"]["steps"]] * 3  # all after the same step
    assert Path(found[0]["stopped"]["checkpoint"]).is_file()
    assert [each["done"] for each in found] == [found[0]["plain"]["losses"], None, None]
    assert Path(tmp_path, "plain", "anew", "model.onnx").read_bytes() == first
    assert "run" in found[0]["failed"]
    assert [each["failed"] for each in found[1:]] == [f"train: process 0 of 3 has failed: {found[0]['failed']}"] * 2
    assert found[1]["ended"]["error"] == "its disk is\nfull"
    for each in (found[0]["ended"], found[2]["ended"]):
        assert each["error"] == "train: process 1 of 3 has failed: its disk is full"
        assert each["seconds"] < 30  # where the group's own timeout is half an hour
    for name, (rule, norm) in BY_ROWS.items():
        one = trained_by_rows(tmp_path, rule, norm, OneProcess())
        assert found[0]["rows"][name] == pytest.approx(one, rel=1e-5), name
    assert len({json.dumps(each["module"]) for each in found}) == 1
    for name, wanted in module().items():
        assert found[0]["module"][name] == pytest.approx(wanted, rel=1e-5)


def test_a_process_without_rows_adds_nothing():
    """Whatever an earlier batch has left in its gradients."""
    gradients = np.full(4, np.inf, np.float32)
    fit: Any = object.__new__(Fit)
    flat = SimpleNamespace(flat=gradients[:3], extended=gradients)
    fit.trainer = SimpleNamespace(gradients=flat, rows=None, optimizer=SimpleNamespace(), update=lambda: None)
    fit._mean, fit._processes = None, SimpleNamespace(is_group=True, add=lambda array: None)
    fit._schedule, fit.state = SimpleNamespace(at=lambda step: 0.1), SimpleNamespace(steps=0)
    fit._step(iter(()), SimpleNamespace(parts=(), batches=1), SimpleNamespace(requested=False))
    assert gradients.tolist() == [0, 0, 0, 0]


@pytest.mark.skipif("OPGRAD_PROCESSES" not in os.environ, reason="half a minute of torchrun: set OPGRAD_PROCESSES")
def test_a_killed_worker_costs_no_epoch(tmp_path):
    """torchrun starts all of them anew, and they go on from the last checkpoint to the result of an undisturbed run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command += ["-m", "opgrad", "train", str(DIGITS), "--epochs", "60", "--output", str(tmp_path / "run")]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OPGRAD_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = tmp_path / "run" / "metrics.csv"
    for _ in range(600):
        if metrics.is_file() and len(metrics.read_text().splitlines()) > 3:
            break
        time.sleep(0.1)
    listed = subprocess.run(["pgrep", "-P", str(running.pid)], capture_output=True, text=True, check=True)
    os.kill(int(listed.stdout.split()[-1]), signal.SIGKILL)
    output, _ = running.communicate(timeout=200)
    assert running.returncode == 0, output
    lines = metrics.read_text().splitlines()
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(1, 61))
    again = [*command[:-1], str(tmp_path / "whole")]
    whole = subprocess.run(again, env=environment, capture_output=True, text=True, check=True, timeout=200)
    assert "processes" in whole.stdout
    models = [(tmp_path / name / "model.onnx").read_bytes() for name in ("run", "whole")]
    assert models[0] == models[1]
