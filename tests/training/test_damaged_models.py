"""Damaged models and checkpoints are refused with a ValueError of one line, whatever is tried with them."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifact_sets import optimizer_model, write_linear_set
from differences import build
from onnx import TensorProto, helper
from small_models import set_of

from opgrad.cli.inspection import inspect
from opgrad.gradients import gradients
from opgrad.onnx.graph.loading import check_sizes, read_model
from opgrad.onnx.passes import prepare
from opgrad.onnxruntime import lower
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.api import CheckpointState, Module
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.engine import evaluation
from opgrad.training.files.artifact_set import read_rule
from opgrad.training.files.dataset import Dataset

COUNT = 40


def test_seeded_damage():
    """In a process of its own, each try in a child: onnxruntime may end it."""
    folder = Path(__file__).parents[1] / "support"
    command = [sys.executable, "-W", "ignore", str(folder / "damage.py"), str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 of {COUNT} raised what is no refusal\n"


CHANGES = {
    "type": lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", 36),
    "no type": lambda graph: setattr(graph.input[0].type.tensor_type, "elem_type", 0),
    "attribute": lambda graph: graph.node[0].attribute.add(name="x"),
    "initializer": lambda graph: graph.initializer.add(name="c", data_type=99),
    "shape": lambda graph: graph.initializer.add(name="c", data_type=1, dims=[-3]),
    "outputs": lambda graph: graph.ClearField("output"),
    "node outputs": lambda graph: graph.node[-1].ClearField("output"),
    "node inputs": lambda graph: graph.node[-1].ClearField("input"),
    "unknown input": lambda graph: graph.node[1].input.__setitem__(0, "nowhere"),
}


def _linear(folder, change):
    """A small artifact set whose training model is damaged in one way."""
    write_linear_set(folder)
    path = folder / "training_model.onnx"
    model = onnx.load(path)
    if change == "text":
        path.write_bytes(path.read_bytes().replace(b"InPlaceAccumulatorV2", b"InPlaceAccumulatorV\xff"))
        return path
    CHANGES[change](model.graph)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("change", ["text", *CHANGES])
def test_each_way_of_being_damaged(tmp_path, change):
    path = _linear(tmp_path, change)
    one_line = r"^(ArtifactSet|Trainer|Module): [^\n]+$"
    with pytest.raises(ValueError, match=one_line):
        Trainer(ArtifactSet.load(tmp_path))
    if change == "outputs":
        return  # a module may have no results
    with pytest.raises(ValueError, match=one_line):
        Module(path, CheckpointState.load_checkpoint(tmp_path / "checkpoint"))


def test_what_onnxruntime_refuses_is_named_by_file(tmp_path):
    path = _linear(tmp_path, "unknown input")
    with pytest.raises(ValueError, match=rf"^Trainer: {path}: onnxruntime cannot load the model: .*nowhere"):
        Trainer(ArtifactSet.load(tmp_path))
    with pytest.raises(ValueError, match=r"^Module: the model: onnxruntime cannot load the model: "):
        Module(path.read_bytes(), CheckpointState.load_checkpoint(tmp_path / "checkpoint"))


def test_attributes_of_optimizers():
    for attributes, message in (
        ({"speed": 1.0}, "the attribute 'speed' is in the node AdamWOptimizer, expected none but alpha, beta"),
        ({"alpha": "fast"}, "the attribute 'alpha' is b'fast', expected a number"),
    ):
        with pytest.raises(ValueError, match=f"^optimizer model: {message}"):
            read_rule(optimizer_model("AdamWOptimizer", **attributes))


def _outside(folder, **entries):
    tensor = helper.make_tensor("w", TensorProto.FLOAT, (2,), np.zeros(2))
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    node = helper.make_node("Add", ["w", "w"], ["y"])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [], [], [tensor])), folder / "model.onnx")
    (folder / "values").write_bytes(bytes(8))
    return folder / "model.onnx"


def test_tensors_in_other_files(tmp_path):
    assert read_model(_outside(tmp_path, location="values")).graph.initializer[0].raw_data == bytes(8)
    for entries, kind, message in (
        ({"location": "values", "length": str(1 << 60)}, ValueError, f"has 8 bytes, expected at least {1 << 60}"),
        ({"location": "values", "offset": "-1"}, ValueError, ""),
        ({"location": "values", "offset": "many"}, ValueError, ""),
        ({"location": "../outside"}, (ValueError, FileNotFoundError), ""),
        ({"location": "none"}, FileNotFoundError, ""),
    ):
        path = _outside(tmp_path, **entries)
        with pytest.raises(kind, match=rf"^{path} keeps tensors in another file: .*{message}"):
            read_model(path)


# --- small files that ask for much ---


def _model(body, *arrays, functions=(), **named):
    """A model with the constants c0, c1, …, others by their names, and a weight; it adds what the body calls sum."""
    held = {f"c{place}": each for place, each in enumerate(arrays)} | {"w": np.ones((4, 3), np.float32)} | named
    text = f"g (float[n, 4] x) => (float[n, 3] y) {{ {body} h = MatMul (x, w) y = Add (h, sum) }}"
    return build(" ".join([text, *functions]), 17, held, '"own": 1, "com.microsoft": 1')


@pytest.mark.parametrize("twice", [True, False])
def test_constants_that_double_are_not_computed(twice):
    body, last = "", ["c0", "c1"]
    for step in range(41):
        new = [f"a{step}", f"b{step}"]
        for name, read in zip(new, (last, last[::-1]), strict=True):
            body += f"{name} = Concat <axis = 0> ({read[0]}, {read[0 if twice else 1]}) "
        last = new
    body += f"a = ReduceSum ({last[0]}) b = ReduceSum ({last[1]}) sum = Add (a, b)"
    assert prepare(_model(body, *np.ones((2, 4), np.float32))).ByteSize() < 1 << 16


HUGE = np.array([1 << 40])
ONE = np.ones(1, np.float32)
DOUBLED = " ".join(f"c{step + 1} = Concat <axis = 0> (c{step}, c{step})" for step in range(40))
LARGE = {
    "Concat": (f"{DOUBLED} huge = Concat <axis = 0> (c40, c40)", [ONE]),
    "ConstantOfShape": ("huge = ConstantOfShape (c0)", [HUGE]),
    "Expand": ("huge = Expand (c1, c0)", [HUGE, ONE]),
    "Tile": ("huge = Tile (c1, c0)", [HUGE, ONE]),
    "Range": ("huge = Range (c0, c1, c2)", [np.array(each, np.float32) for each in (0, 1 << 40, 1)]),
    "Pad": ("huge = Pad (x, c0)", [np.array([0, 0, 0, 1 << 40])]),
    "OneHot": ("huge = OneHot (c0, c1, c2)", [HUGE, HUGE, np.float32([0, 1])]),
    "Pow": ("power = Pow (c0, c1) huge = ConstantOfShape (power)", [np.array([1 << 10]), np.array([4])]),
    "Mul": ("size = Shape <start = 1> (x) many = Mul (size, c0) huge = ConstantOfShape (many)", [HUGE]),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_value_without_a_bound_is_refused_by_name(name, tmp_path):
    path, trained = tmp_path / "large.onnx", tmp_path / "set"
    trained.mkdir()
    body, arrays = LARGE[name]
    onnx.save(_model(f"{body} sum = ReduceSum (huge)", *arrays), path)
    message = r"{}: \w+ \(the node that makes '\w+'\) computes \d+ bytes( from constants)?, expected at most \d+$"
    assert re.search(message.format(path), inspect(path).problem or "")
    generate_artifacts(onnx.load(path), ["w"], None, LossType.MSELoss, OptimType.SGD, trained)
    with pytest.raises(ValueError, match=message.format(trained / "training_model.onnx")):
        Trainer(ArtifactSet.load(trained))
    with pytest.raises(ValueError, match=message.format(trained / "training_model.onnx")):
        Module(trained / "training_model.onnx", CheckpointState.load_checkpoint(trained / "checkpoint"))
    with pytest.raises(ValueError, match=message.format("exported_accuracy: " + str(path))):
        evaluation._stock(path, f"exported_accuracy: {path}")


def test_many_constants_that_are_large_together_are_not_computed_ahead():
    body = " ".join(f"n{place} = ConstantOfShape (c0)" for place in range(5))
    body += " sum = Concat <axis = 0> (n0, n1, n2, n3, n4)"
    assert check_sizes(_model(body, np.array([1 << 24])))
    assert not check_sizes(_model(body, np.array([1 << 25])))


def test_a_run_that_fails_names_the_model(tmp_path):
    model = _model("r = Reshape (x, c0) sum = ReduceSum (r)", np.array([3, 7]))
    trainer = Trainer(set_of(model, tmp_path, LossType.MSELoss, requires_grad=["w"]))
    batch = {"x": np.ones((2, 4), np.float32), "target": np.ones((2, 3), np.float32)}
    with pytest.raises(ValueError, match=rf"^Trainer: {tmp_path}/training_model.onnx: .*Reshape") as raised:
        trainer.step(batch)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=rf"^Evaluator: {tmp_path}/eval_model.onnx: .*Reshape"):
        trainer.evaluator.evaluate(Dataset(batch, {"x": 0, "target": 0}), trainer.parameters, 2)


FUNCTION = '<domain: "own", opset_import: ["": 17, "own": 1]> F{} (a) => (b) {{ {} }}'


def _functions(depth, calls):
    """Functions that each call the next one so often."""
    names = ["a", *(f"t{place}" for place in range(calls - 1)), "b"]
    for level in range(depth):
        called = f"own.F{level - 1}" if level else "Relu"
        yield FUNCTION.format(level, " ".join(f"{name} = {called} ({read})" for read, name in pairwise(names)))


HOSTILE = {  # a body, functions, and what is said
    "calls": (
        "sum = own.F29 (x)",
        [*_functions(30, 2)],
        r"its functions have \d+ nodes with all their calls, expected at most 1048576",
    ),
    "depth": ("sum = own.F999 (x)", [*_functions(1000, 1)], "functions call functions 1000 deep, expected at most 100"),
    "recursion": (
        "sum = own.F0 (x)",
        [FUNCTION.format(each, "b = own.F1 (a)") for each in (0, 1)],
        "the function 'own:F1' calls itself",
    ),
    "softmax": (f"sum = Softmax <axis = {2**62}> (c0)", (), f"the attribute 'axis' is {2**62}, expected an axis"),
    "norm": (
        f"sum = SimplifiedLayerNormalization <axis = {-(2**40)}> (c0, c0)",
        (),
        "the attribute 'axis' is -1099511627776, expected an axis",
    ),
    "empty": ("sum = ReduceSum (e)", (), "the tensor 'e' has no values, expected 1099511627776"),
    "opset": ("sum = Neg (c0)", (), "imports opset 1099"),
    "names": ("c0 = Neg (x)  sum = Neg (c0)", (), "2 values have the name 'c0'"),
}


@pytest.mark.parametrize("read", [read_model, lower, generate_artifacts], ids=lambda read: read.__name__)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_small_file_may_not_ask_for(read, name, tmp_path):
    body, functions, message = HOSTILE[name]
    model = _model(body, np.ones(3, np.float32), functions=functions)
    if name == "empty":
        model.graph.initializer.add(name="e", data_type=TensorProto.FLOAT, dims=[2**20, 2**20])
    elif name == "opset":
        model.opset_import[0].version = 2**40
    onnx.save(model, tmp_path / "model.onnx")
    arguments = {read_model: [], lower: []}.get(read, [None, None, LossType.MSELoss, None, tmp_path])
    with pytest.raises(ValueError, match=rf"model\.onnx is damaged, .*{message}"):
        read(tmp_path / "model.onnx", *arguments)


def test_tensors_with_fewer_or_more_values_than_they_say(tmp_path):
    for values in (
        TensorProto(name="e", data_type=TensorProto.FLOAT, dims=[3], raw_data=bytes(8)),
        TensorProto(name="e", data_type=TensorProto.FLOAT, dims=[3], float_data=[1.0, 2.0]),
        TensorProto(name="e", data_type=TensorProto.FLOAT16, dims=[3], int32_data=[1, 2, 3, 4]),
    ):
        model = _model("sum = ReduceSum (e)")
        model.graph.initializer.append(values)
        onnx.save(model, tmp_path / "model.onnx")
        with pytest.raises(ValueError, match=r"model.onnx is damaged, the tensor 'e' has [24] values, expected 3"):
            read_model(tmp_path / "model.onnx")


def test_numbers_that_an_attribute_asks_for():
    body = f"x4 = Unsqueeze (x, axes) u = RoiAlign <output_height = {2**40}> (x4, regions, at) sum = ReduceSum (u)"
    model = _model(body, axes=np.array([0, 1]), regions=np.zeros((1, 4), np.float32), at=np.zeros(1, np.int64))
    message = "RoiAlign .* an attribute asks for 1099511627776 numbers, expected at most 1048576"
    with pytest.raises(ValueError, match=message):
        gradients(model, "y", "x")


def test_inputs_that_are_texts(tmp_path):
    """inspect tells it, artifacts refuse it, and so does a set that others have made."""
    labels = 'i = ai.onnx.ml.LabelEncoder <keys_strings = ["a"], values_int64s = [0]> (s)'
    model = _model(f"{labels} sum = Gather (c0, i)", np.ones((2, 3), np.float32))
    model.opset_import.add(domain="ai.onnx.ml", version=2)
    model.graph.input.append(helper.make_tensor_value_info("s", TensorProto.STRING, ["n"]))
    onnx.save(model, tmp_path / "model.onnx")
    message = "the input 's' is text, expected numbers"
    found = inspect(tmp_path / "model.onnx")
    assert found.training is not None
    assert [each for each in found.training.problems if message in each]
    with pytest.raises(ValueError, match=f"^generate_artifacts: {message}"):
        generate_artifacts(tmp_path / "model.onnx", loss=LossType.MSELoss, artifact_directory=tmp_path)
    write_linear_set(tmp_path)
    path = tmp_path / "training_model.onnx"
    damaged = onnx.load(path)
    damaged.graph.input.append(helper.make_tensor_value_info("s", TensorProto.STRING, ["n"]))
    onnx.save(damaged, path)
    with pytest.raises(ValueError, match=rf"^ArtifactSet: {path}: the graph's 's' is text, expected numbers"):
        ArtifactSet.load(tmp_path)
