"""Federated averaging of examples/federated/flower.py: five simulated clients, which send what is trained alone."""

import json
import os
import re
import subprocess

import numpy as np
import onnx
import pytest
from artifact_sets import EXAMPLES
from portable_steps import batches, client

from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.portable import export_step

PYTHON, TIMEOUT = os.environ.get("FLOWER", ""), 300
pytestmark = pytest.mark.skipif(not PYTHON, reason="FLOWER names no Python with flwr[simulation]")


@pytest.mark.parametrize("trained", ["everything", "the last layer"])
def test_five_clients(tmp_path, trained):
    folder = EXAMPLES / "digits"
    if trained != "everything":
        model = onnx.load(folder / "forward.onnx")
        weights = [each.name for each in model.graph.initializer]
        own = weights[-2:]
        kinds = {"loss": LossType.CrossEntropyLoss, "optimizer": OptimType.AdamW}
        folder = tmp_path / "set"
        folder.mkdir()
        frozen = [name for name in weights if name not in own]
        generate_artifacts(model, own, frozen, artifact_directory=folder, **kinds)
    export_step(folder, tmp_path / "step.onnx", flat=True, evaluation=True, accuracy=True)
    (rows,) = batches("digits", 1, rows=500)
    step = client().Step(tmp_path / "step.json")
    names = [entry["name"] for entry in step.manifest["batch"]]
    np.savez(tmp_path / "data.npz", **dict(zip(names, rows.values(), strict=True)))
    words = [PYTHON, EXAMPLES / "federated" / "flower.py", "step.json", "data.npz", "--rounds", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [*map(str, words), "--output", "trained.safetensors"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    size = json.loads((tmp_path / "step.json").read_text())["state"][0]["bytes"]
    assert f"round 3 of 3: {size:,} bytes go to each of 5 clients" in found.stdout
    assert f"{10 * size:,} bytes in this round: {5 * size:,} to the clients, {5 * size:,} back" in found.stdout
    losses = [float(each) for each in re.findall(r"loss ([0-9.]+), accuracy .* rows that no client has", found.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    step.load((tmp_path / "trained.safetensors").read_bytes())
