"""Damaged models and checkpoints are refused with a ValueError of one line, whatever is tried with them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_sets import optimizer_model, write_linear_set
from onnx import TensorProto, helper

from opgrad.graph.loading import read_model
from opgrad.onnxruntime import lower
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.api import CheckpointState, Module
from opgrad.training.engine.optimizer import read_rule

COUNT = 40


def test_seeded_damage() -> None:
    """In a process of its own, each try in a child: onnxruntime may end it."""
    folder = Path(__file__).parents[1] / "support"
    command = [sys.executable, "-W", "ignore", str(folder / "damage.py"), "--count", str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 of {COUNT} raised what is no refusal\n"


def _linear(folder: Path, change: str) -> Path:
    """A small artifact set whose training model is damaged in one way."""
    write_linear_set(folder)
    path = folder / "training_model.onnx"
    model = onnx.load(path)
    if change == "text":
        path.write_bytes(path.read_bytes().replace(b"InPlaceAccumulatorV2", b"InPlaceAccumulatorV\xff"))
        return path
    if change == "type":
        model.graph.input[0].type.tensor_type.elem_type = 36
    elif change == "no type":
        model.graph.input[0].type.tensor_type.elem_type = 0
    elif change == "attribute":
        model.graph.node[0].attribute.add(name="x")
    elif change == "initializer":
        model.graph.initializer.add(name="c", data_type=99)
    elif change == "shape":
        model.graph.initializer.add(name="c", data_type=1, dims=[-3])
    elif change == "outputs":
        del model.graph.output[:]
    elif change == "node outputs":
        del model.graph.node[-1].output[:]
    elif change == "node inputs":
        del model.graph.node[-1].input[:]
    elif change == "unknown input":
        model.graph.node[1].input[0] = "nowhere"
    onnx.save(model, path)
    return path


CHANGES = ("text", "type", "no type", "attribute", "initializer", "shape", "outputs", "node outputs", "node inputs")


@pytest.mark.parametrize("change", [*CHANGES, "unknown input"])
def test_each_way_of_being_damaged(tmp_path: Path, change: str) -> None:
    path = _linear(tmp_path, change)
    one_line = r"^(ArtifactSet|Trainer|Module): [^\n]+$"
    with pytest.raises(ValueError, match=one_line):
        Trainer(ArtifactSet.load(tmp_path))
    if change == "outputs":
        return  # a module may have no results
    with pytest.raises(ValueError, match=one_line):
        Module(path, CheckpointState.load_checkpoint(tmp_path / "checkpoint"))


def test_what_onnxruntime_refuses_is_named_by_file(tmp_path: Path) -> None:
    path = _linear(tmp_path, "unknown input")
    with pytest.raises(ValueError, match=rf"^Trainer: {path}: onnxruntime cannot load the model: .*nowhere"):
        Trainer(ArtifactSet.load(tmp_path))
    with pytest.raises(ValueError, match=r"^Module: the model: onnxruntime cannot load the model: "):
        Module(path.read_bytes(), CheckpointState.load_checkpoint(tmp_path / "checkpoint"))


def test_models_given_as_objects_are_looked_at_too() -> None:
    model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [], []))
    model.graph.initializer.add(name="c", data_type=99)
    with pytest.raises(ValueError, match="lower: the model is damaged, the tensor 'c' has the unknown element type 99"):
        lower(model)


def test_attributes_of_another_kind() -> None:
    for attributes in ({"alpha": [1.0, 2.0]}, {"alpha": "steep"}):
        node = helper.make_node("LeakyReluGrad", ["dy", "y"], ["dx"], domain="com.microsoft", **attributes)
        model = helper.make_model(helper.make_graph([node], "g", [], []), opset_imports=[helper.make_opsetid("", 17)])
        with pytest.raises(NotImplementedError, match=r"^lower: LeakyReluGrad .*: its attribute alpha is of type"):
            lower(model)


def test_attributes_of_optimizers() -> None:
    for attributes, message in (
        ({"speed": 1.0}, "the attribute 'speed' is in the node AdamWOptimizer, expected none but alpha, beta"),
        ({"alpha": "fast"}, "the attribute 'alpha' is b'fast', expected a number"),
    ):
        with pytest.raises(ValueError, match=f"^optimizer model: {message}"):
            read_rule(optimizer_model("AdamWOptimizer", **attributes))


def _outside(folder: Path, **entries: str) -> Path:
    tensor = helper.make_tensor("w", TensorProto.FLOAT, (2,), np.zeros(2))
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    node = helper.make_node("Add", ["w", "w"], ["y"])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], [], [tensor])), folder / "model.onnx")
    (folder / "values").write_bytes(bytes(8))
    return folder / "model.onnx"


def test_tensors_in_other_files(tmp_path: Path) -> None:
    assert read_model(_outside(tmp_path, location="values"), "inspect").graph.initializer[0].raw_data == bytes(8)
    for entries, kind, message in (
        ({"location": "values", "length": str(1 << 60)}, ValueError, f"has 8 bytes, expected at least {1 << 60}"),
        ({"location": "values", "offset": "-1"}, ValueError, ""),
        ({"location": "values", "offset": "many"}, ValueError, ""),
        ({"location": "../outside"}, (ValueError, FileNotFoundError), ""),
        ({"location": "none"}, FileNotFoundError, ""),
    ):
        path = _outside(tmp_path, **entries)
        with pytest.raises(kind, match=rf"^inspect: {path} keeps tensors in another file: .*{message}"):
            read_model(path, "inspect")
