"""`make gpu` without a device: it begins, writes lines, keeps its limits and ends with a table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


def run(folder, *words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OPGRAD_", "TRITON_"))}
    environment["TRITON_CACHE_DIR"] = str(folder / "kernels")
    command = [sys.executable, "tools/gpu", "--dry", "--out", folder, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    path = folder / "gpu.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return done, lines


def of(what, lines):
    return [line for line in lines if line["what"] == what]


def test_a_dry_run(tmp_path):
    done, lines = run(tmp_path, "--steps", "facts,smoke,ceilings,figures,regimes")
    assert done.returncode == 0, (done.stdout, (tmp_path / "log").read_text()[-3000:])
    assert [line["end"] for line in of("step", lines)] == ["0"] * 5
    assert len(of("smoke", lines)) == 4
    assert not any(line["said"] for line in of("smoke", lines))
    assert of("facts", lines)[0]["missing in Triton"] == []
    measured = json.loads((tmp_path / "bench.json").read_text())["cells"]
    assert {line["cell"].split()[0] for line in of("cell", lines)} == {cell["operator"] for cell in measured}
    table = done.stdout.splitlines()
    assert len(table) <= 60 + 5
    assert sum(line.startswith("softmax") for line in table) == len(measured)


def test_training_graphs(tmp_path):
    done, lines = run(tmp_path, "--steps", "training")
    assert done.returncode == 0, (done.stdout, (tmp_path / "log").read_text()[-3000:])
    assert [(line["set"], line["apart"]) for line in of("training", lines)] == [("digits", 0), ("digits_attention", 0)]


def test_a_limit_ends_a_step_and_what_was_seen_is_kept(tmp_path):
    done, lines = run(tmp_path, "--seconds", "11", "--steps", "compile,ceilings")
    ends = {line["step"]: line["end"] for line in of("step", lines)}
    assert ends == {"compile": "at its limit", "ceilings": "not begun"}, done.stdout
    assert "compile at its limit" in done.stdout


def test_unknown_steps_are_named(tmp_path):
    done, _ = run(tmp_path, "--steps", "fact")
    assert done.returncode == 2
    assert "--steps: 'fact', expected some of facts, smoke" in done.stderr
