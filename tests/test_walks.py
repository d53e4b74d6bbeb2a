"""The walks of CONTRIBUTING.md: each step is a function that a real run enters, in this order."""

import inspect
import json
import re
import sys
import traceback
from pathlib import Path

import numpy as np
import onnx
import pytest
from language_models import WORDS, make_folder
from small_models import build, perceptron
from subprocesses import run_python
from typer.testing import CliRunner

import opgrad
from opgrad.cli.app import app
from opgrad.gradients import gradients
from opgrad.training import ArtifactSet, Trainer, load_named

ROOT = Path(__file__).parents[1]
PACKAGE = f"{Path(opgrad.__file__).parent}/"
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` \(`([\w.]+)`\)", re.MULTILINE)


def call():
    opgrad.softmax(np.ones((3, 7919), np.float32))  # a shape that nothing else in this process has a plan of


def rule():
    gradients(build("g (float[2, 3] x) => (float[2, 3] y) { y = Softmax (x) }"), "y", "x")


def step():
    artifacts = ArtifactSet.load(ROOT / "examples" / "digits")
    data = load_named("digits", artifacts.inputs)
    Trainer(artifacts).step({name: array[:7] for name, array in data.arrays.items()})


@pytest.mark.parametrize(("title", "run"), [("NumPy call", call), ("gradient rule", rule), ("training step", step)])
def test_every_step_is_taken(title, run):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = STEP.findall(text.split(f"### The walk of a {title}\n")[1].split("\n#")[0])
    assert len(steps) > 5
    entered = []

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            entered.append((code.co_filename.removeprefix(PACKAGE), code.co_qualname.split(".<locals>")[0]))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    taken = iter(entered)
    for place in steps:
        assert place in taken, place  # what is left of the iterator comes behind the steps before


def entered_files(package, run):
    """The files of a package that a call enters, but for those that only its imports enter."""
    files, importing = set(), 0

    def profile(frame, event, argument):
        nonlocal importing
        if frame.f_code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not importing and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename.removeprefix(package))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sorted(files)


MOST_ENTERED = {"first call": 26, "first of a shape": 20}  # files; the first call of a process loads the kernels, too


def test_a_call_enters_few_files():
    call()  # the kernels are in the cache then
    code = f"""
import json, sys
import numpy as np, opgrad
{inspect.getsource(entered_files)}
package = opgrad.__file__.removesuffix("__init__.py")
opgrad.softmax
arrays = {{"first call": np.ones((3, 7919), np.float32), "first of a shape": np.ones((5, 7927), np.float32)}}
print(json.dumps({{name: entered_files(package, lambda: opgrad.softmax(x)) for name, x in arrays.items()}}))
"""
    for name, files in json.loads(run_python(code)).items():
        assert len(files) <= MOST_ENTERED[name], (name, files)


ROOMS = ("cli/", "training/", "tune/", "onnx/", "onnxruntime/")  # whose files count; kernels have walks of their own


def train(folder):
    onnx.save(perceptron(), folder / "m.onnx")
    np.savez(folder / "d.npz", x=np.ones((20, 4), np.float32), labels=np.arange(20) % 3)
    return ["train", str(folder / "m.onnx"), "--data", str(folder / "d.npz"), "--loss", "cross-entropy"]


def tune(folder):
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    (folder / "d.jsonl").write_text(json.dumps({"text": " ".join(WORDS[:6])}) + "\n")
    return ["tune", str(make_folder(folder, width=64)), "--data", str(folder / "d.jsonl"), "--max-length", "16"]


@pytest.mark.parametrize(("command", "most_files"), [(train, 65), (tune, 90)])
def test_the_commands_step_soon(command, most_files, tmp_path):
    """From the command to the running step: the files that are entered, and those that one call leads through."""
    entered, hops, words = set(), set(), command(tmp_path)

    def profile(frame, event, argument):
        code = frame.f_code
        if event != "call" or hops or not code.co_filename.startswith(PACKAGE) or code.co_name == "<module>":
            return
        entered.add(code.co_filename.removeprefix(PACKAGE))
        if code.co_qualname == "BoundGraph.__call__":
            files = {each.f_code.co_filename for each, _ in traceback.walk_stack(frame)}
            hops.update(each for each in files if each.startswith(PACKAGE))

    sys.setprofile(profile)
    try:
        done = CliRunner().invoke(app, [*words, "--epochs", "1", "--output", str(tmp_path / "out")])
    finally:
        sys.setprofile(None)
    assert done.exit_code == 0, done.output
    assert len(hops) <= 10
    counted = sorted(each for each in entered if each.startswith(ROOMS))
    assert len(counted) <= most_files, counted
