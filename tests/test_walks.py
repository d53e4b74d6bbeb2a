"""The walks of CONTRIBUTING.md: each step is a function that a real run enters, in this order."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import opgrad
from opgrad.gradients import gradients
from opgrad.training import ArtifactSet, Trainer, load_named

ROOT = Path(__file__).parents[1]
PACKAGE = Path(opgrad.__file__).parent
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` \(`([\w.]+)`\)", re.MULTILINE)


def call():
    opgrad.softmax(np.ones((3, 7919), np.float32))  # a shape that nothing else in this process has a plan of


def rule():
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "g", values[:1], values[1:])
    gradients(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), "y", "x")


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
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            entered.append((file.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname.split(".<locals>")[0]))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    taken = iter(entered)
    for place in steps:
        assert place in taken, place  # what is left of the iterator comes behind the steps before
