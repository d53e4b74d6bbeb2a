"""Federated averaging of examples/federated/flower.py: five simulated clients, which send what is trained alone."""

import json
import os
import re
import subprocess

import numpy as np
import pytest
from artifact_sets import EXAMPLES
from language_models import make_folder, quantize
from portable_cases import tuned_batches
from portable_steps import batches, client

from opgrad.training.export import export_step
from opgrad.tune import Tuner

# A Python with flwr[simulation].
PYTHON = os.path.abspath(os.environ["FLOWER"]) if os.environ.get("FLOWER") else ""
TIMEOUT = 300
pytestmark = pytest.mark.skipif(not PYTHON, reason="flwr is not installed: FLOWER names no Python that has it")


def run(folder):
    """What the example says of three rounds with the step and the data in a folder."""
    words = [PYTHON, EXAMPLES / "federated" / "flower.py", "step.json", "data.npz", "--rounds", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [*map(str, words), "--output", "trained.safetensors"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_five_clients(tmp_path):
    export_step(EXAMPLES / "digits", tmp_path / "step.onnx", flat=True, models=["eval"], outputs=["accuracy"])
    (rows,) = batches("digits", 1, rows=500)
    step = client().Step(tmp_path / "step.json")
    names = [entry["name"] for entry in step.manifest["batch"]]
    np.savez(tmp_path / "data.npz", **dict(zip(names, rows.values(), strict=True)))
    text = run(tmp_path)
    size = json.loads((tmp_path / "step.json").read_text())["state"][0]["bytes"]
    assert f"round 3 of 3: {size:,} bytes go to each of 5 clients" in text
    assert f"{10 * size:,} bytes in this round: {5 * size:,} to the clients, {5 * size:,} back" in text
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+), accuracy .* rows that no client has", text)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    step.load((tmp_path / "trained.safetensors").read_bytes())


def test_adapters_of_a_language_model(tmp_path):
    """They alone travel, and what they became is an adapter."""
    model = make_folder(tmp_path / "model", cached=True)
    quantize(model / "model.onnx")
    tuner = Tuner(model, lora="rank=4, target=q|v")
    tuner.export_step(tmp_path / "step.onnx", flat=True, models=["eval"])
    given = list(tuned_batches())
    np.savez(tmp_path / "data.npz", **{name: np.concatenate([each[name] for each in given]) for name in given[0]})
    text = run(tmp_path)
    size = 4 * sum(each.size for each in tuner.values.values())
    assert f"round 3 of 3: {size:,} bytes go to each of 5 clients" in text
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+), accuracy .* rows that no client has", text)]
    assert len(losses) == 4
    found = Tuner(model, adapter=tmp_path / "trained.safetensors").values
    assert all(np.abs(found[each.b]).max() > 0 for each in tuner.adapters)
