"""Every artifact set with every optimizer, 20 steps in other runtimes: losses are opgrad's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from artifact_sets import EXAMPLES
from portable_cases import differences, write_cases
from portable_steps import batches, client
from training_sets import training_and_test_data

from opgrad.training import ArtifactSet, Trainer, read_checkpoint

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # relative


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    return folder, write_cases(folder)


def assert_close(told, found):
    off = differences(told, found)
    assert not {name: each for name, each in off.items() if isinstance(each, str) or each > TOLERANCE}


def test_stock_onnxruntime(cases):
    """In a process that cannot import opgrad. OLDEST names another Python, such as one with onnxruntime 1.18."""
    folder, told = cases
    for python in {sys.executable, os.environ.get("OLDEST", sys.executable)}:
        assert_close(told, last_line(python, HERE / "stock_cases.py", EXAMPLES / "python", folder)["losses"])


def last_line(*command):
    """The last line that a command prints, of JSON."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["node", "web"])
def test_node(cases, kind):
    folder, told = cases
    assert_close(told, last_line("node", HERE / "node_cases.mjs", EXAMPLES, folder, kind)["losses"])


@pytest.fixture(scope="session")
def cases_page(cases, site, serving):
    """The address of a page that runs the cases."""
    folder, _ = cases
    own = (HERE / name for name in ("cases.html", "cases.mjs", "page_cases.mjs"))
    for file in (*own, *site.glob("ort*"), site / "step.mjs"):
        shutil.copy(file, folder)
    return serving(folder) + "cases.html"


def losses_of(page, address):
    page.goto(address)
    page.locator("#found", has_text="losses").wait_for(timeout=900_000)
    return json.loads(page.inner_text("#found"))["losses"]


def test_browser(cases, chromium, cases_page):
    with chromium() as context:
        assert_close(cases[1], losses_of(context.new_page(), cases_page))


def test_webgpu(cases, chromium, cases_page):
    """By a software adapter, which compiles for seconds: one set is enough to see that the way is right."""
    only = "digits-adamw"
    with chromium(webgpu=True) as context:
        found = losses_of(context.new_page(), f"{cases_page}?runtime=webgpu&only={only}")
    assert_close([case for case in cases[1] if case["name"] == only], found)


@pytest.mark.parametrize("kind", ["node", "web"])
def test_what_does_not_fit_is_said(kind, site):
    """Wrong batches, labels out of range, damaged models and weights, told by examples/browser/step.mjs."""
    found = last_line("node", HERE / "refusals.mjs", EXAMPLES, site, kind)
    assert found.pop("kept") == [True] * len(found)
    for name, message in {
        "width": "pixels has shape [2,63], expected float32 of shape [batch,64]",
        "dtype": "pixels has shape [2,64], expected float32 of shape [batch,64]",
        "data": "pixels has 5 numbers, expected 128",
        "missing": "labels has shape [none], expected int64 of shape [batch]",
        "high": "labels has 10, expected 0 to 9",
        "negative": "labels has -2, expected 0 to 9",
        "model": "step.onnx is damaged, or of another export: its SHA-256 is another",
        "weights": "the weights are damaged, or of another model: their SHA-256 or size is another",
        "short": "the weights are damaged: no header",
        "manifest": "step.json is no manifest of a step",
    }.items():
        assert message in found.pop(name), name
    assert not found


@pytest.mark.parametrize("kind", ["node", "web"])
def test_the_example_learns_and_its_weights_open_in_opgrad(kind, site, tmp_path):
    output = tmp_path / "trained.safetensors"
    command = ["node", "train.mjs", str(site / "step.json"), str(site / "digits.json"), str(output), kind]
    done = subprocess.run(command, cwd=EXAMPLES / "node", capture_output=True, text=True, check=True, timeout=300)
    accuracy = float(done.stdout.split()[-1])
    assert accuracy > 0.95
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    trainer = Trainer(artifacts)
    trainer.restore(read_checkpoint(output))
    _, test = training_and_test_data(artifacts)
    assert trainer.evaluate(test).accuracy == pytest.approx(accuracy, abs=1e-4)


def test_cpp(site, tmp_path):
    """The C API of the library in the onnxruntime wheel."""
    folder = EXAMPLES / "cpp"
    subprocess.run(["sh", folder / "build.sh", sys.executable, tmp_path], check=True, timeout=300)
    files = [site / name for name in ("step.onnx", "step.safetensors", "digits.bin")]
    command = [tmp_path / "train", *files, "10"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    first, *_, last = (float(line.split()[-1]) for line in done.stdout.splitlines())
    assert last < 0.2 * first
    step = client().Step(site / "step.json")
    step.state["parameters"] = np.fromfile(tmp_path / "trained.bin", np.float32)
    assert step.evaluate(next(batches("digits", 1, rows=400)))["accuracy"] > 0.9
    command[2:] = [tmp_path / "none", *files[2:], "1"]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr) == (1, f"train: there is no file {tmp_path / 'none'}\n")
