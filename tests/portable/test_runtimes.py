"""Every artifact set with every optimizer, 20 steps in other runtimes: losses are opgrad's."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from artifact_sets import EXAMPLES
from portable_cases import differences, write_cases
from portable_steps import batches, client

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
    folder, told = cases
    found = {}
    for case in told:
        step = client().Step(folder / case["name"] / "step.json")
        found[case["name"]] = [step.train(batch, case["rate"]) for batch in batches(case["set"], len(case["losses"]))]
    assert_close(told, found)


@pytest.mark.parametrize("kind", ["node", "web"])
def test_node(cases, kind):
    folder, told = cases
    command = ["node", str(HERE / "node_cases.mjs"), str(EXAMPLES), str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert_close(told, json.loads(done.stdout.splitlines()[-1])["losses"])


def test_browser(cases, chromium, serving):
    folder, told = cases
    for file in (HERE / "cases.html", HERE / "cases.mjs", HERE / "page_cases.mjs", EXAMPLES / "browser" / "step.mjs"):
        shutil.copy(file, folder)
    for name in ("ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"):
        shutil.copy(EXAMPLES / "browser" / "node_modules" / "onnxruntime-web" / "dist" / name, folder)
    with chromium() as context:
        page = context.new_page()
        page.goto(serving(folder) + "cases.html")
        page.locator("#found", has_text="losses").wait_for(timeout=600_000)
        assert_close(told, json.loads(page.inner_text("#found"))["losses"])


@pytest.mark.parametrize("kind", ["node", "web"])
def test_the_example_learns_and_its_weights_open_in_opgrad(kind, site, tmp_path):
    from opgrad.training import ArtifactSet, Recipe, Trainer, load_named, read_checkpoint

    output = tmp_path / "trained.safetensors"
    command = ["node", "train.mjs", str(site / "step.json"), str(site / "digits.json"), str(output), kind]
    done = subprocess.run(command, cwd=EXAMPLES / "node", capture_output=True, text=True, check=True, timeout=300)
    accuracy = float(done.stdout.split()[-1])
    assert accuracy > 0.95
    artifacts = ArtifactSet.load(EXAMPLES / "digits")
    trainer = Trainer(artifacts)
    trainer.restore(read_checkpoint(output))
    data = load_named("digits", artifacts.inputs, Recipe.load(artifacts.directory).divide)
    _, test = data.split(297, 1)
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
    wrong = subprocess.run(
        [*command[:2], tmp_path / "none", *files[2:], "1"], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stderr) == (1, f"train: there is no file {tmp_path / 'none'}\n")
