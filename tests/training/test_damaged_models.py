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
from onnx import TensorProto, helper, numpy_helper
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
    command = [sys.executable, "-W", "ignore", str(folder / "damage.py"), "--count", str(COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 of {COUNT} raised what is no refusal\n"


def _linear(folder, change):
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


def _model(nodes, *arrays, functions=()):
    """A model with the constants c0, c1, …, and a weight."""
    held = [numpy_helper.from_array(each, f"c{place}") for place, each in enumerate(arrays)]
    held.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    graph = helper.make_graph(
        [*nodes, helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "sum"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        held,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("twice", [True, False])
def test_constants_that_double_are_not_computed(twice):
    nodes, last = [], ["c0", "c1"]
    for step in range(41):
        new = [f"a{step}", f"b{step}"]
        for name, read in zip(new, (last, last[::-1]), strict=True):
            nodes.append(helper.make_node("Concat", [read[0], read[0 if twice else 1]], [name], axis=0))
        last = new
    nodes += [helper.make_node("ReduceSum", [last[0]], ["a"]), helper.make_node("ReduceSum", [last[1]], ["b"])]
    model = _model([*nodes, helper.make_node("Add", ["a", "b"], ["sum"])], *np.ones((2, 4), np.float32))
    assert prepare(model).ByteSize() < 1 << 16


HUGE = np.array([1 << 40])
ONE = np.ones(1, np.float32)
LARGE = {
    "Concat": ([helper.make_node("Concat", [f"c{step}"] * 2, [f"c{step + 1}"], axis=0) for step in range(41)], [ONE]),
    "ConstantOfShape": ([helper.make_node("ConstantOfShape", ["c0"], ["huge"])], [HUGE]),
    "Expand": ([helper.make_node("Expand", ["c1", "c0"], ["huge"])], [HUGE, ONE]),
    "Tile": ([helper.make_node("Tile", ["c1", "c0"], ["huge"])], [HUGE, ONE]),
    "Range": (
        [helper.make_node("Range", ["c0", "c1", "c2"], ["huge"])],
        [np.array(each, np.float32) for each in (0, 1 << 40, 1)],
    ),
    "Pad": ([helper.make_node("Pad", ["x", "c0"], ["huge"])], [np.array([0, 0, 0, 1 << 40])]),
    "OneHot": ([helper.make_node("OneHot", ["c0", "c1", "c2"], ["huge"])], [HUGE, HUGE, np.float32([0, 1])]),
    "Pow": (
        [
            helper.make_node("Pow", ["c0", "c1"], ["power"]),
            helper.make_node("ConstantOfShape", ["power"], ["huge"]),
        ],
        [np.array([1 << 10]), np.array([4])],
    ),
    "Mul": (
        [
            helper.make_node("Shape", ["x"], ["size"], start=1),
            helper.make_node("Mul", ["size", "c0"], ["product"]),
            helper.make_node("ConstantOfShape", ["product"], ["huge"]),
        ],
        [HUGE],
    ),
}  # fmt: skip


def _large(name):
    nodes, arrays = LARGE[name]
    return _model([*nodes, helper.make_node("ReduceSum", [nodes[-1].output[0]], ["sum"])], *arrays)


@pytest.mark.parametrize("name", LARGE)
def test_a_value_without_a_bound_is_refused_by_name(name, tmp_path):
    path, trained = tmp_path / "large.onnx", tmp_path / "set"
    trained.mkdir()
    onnx.save(_large(name), path)
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
    nodes = [helper.make_node("ConstantOfShape", ["c0"], [f"n{place}"]) for place in range(5)]
    nodes.append(helper.make_node("Concat", [f"n{place}" for place in range(5)], ["sum"], axis=0))
    assert check_sizes(_model(nodes, np.array([1 << 24])))
    assert not check_sizes(_model(nodes, np.array([1 << 25])))


def test_a_run_that_fails_names_the_model(tmp_path):
    model = _model(
        [helper.make_node("Reshape", ["x", "c0"], ["r"]), helper.make_node("ReduceSum", ["r"], ["sum"])],
        np.array([3, 7]),
    )
    trainer = Trainer(set_of(model, tmp_path, LossType.MSELoss, requires_grad=["w"]))
    batch = {"x": np.ones((2, 4), np.float32), "target": np.ones((2, 3), np.float32)}
    with pytest.raises(ValueError, match=rf"^Trainer: {tmp_path}/training_model.onnx: .*Reshape") as raised:
        trainer.step(batch)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=rf"^Evaluator: {tmp_path}/eval_model.onnx: .*Reshape"):
        trainer.evaluator.evaluate(Dataset(batch, {"x": 0, "target": 0}), trainer.parameters, 2)


def _functions(depth, calls):
    """Functions that each call the next one so often."""
    found = []
    for level in range(depth):
        names = ["a", *(f"t{place}" for place in range(calls - 1)), "b"]
        made = [
            helper.make_node("Relu" if level == 0 else f"F{level - 1}", [read], [name], domain="own" if level else "")
            for read, name in pairwise(names)
        ]
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        found.append(helper.make_function("own", f"F{level}", ["a"], ["b"], made, opsets))
    return found


def _calls_itself():
    made = [helper.make_node("F1", ["a"], ["b"], domain="own")]
    return [
        helper.make_function("own", f"F{each}", ["a"], ["b"], made, [helper.make_opsetid("own", 1)]) for each in (0, 1)
    ]


HOSTILE = {
    "calls": (
        lambda: _model([helper.make_node("F29", ["x"], ["sum"], domain="own")], functions=_functions(30, 2)),
        r"its functions have \d+ nodes with all their calls, expected at most 1048576",
    ),
    "depth": (
        lambda: _model([helper.make_node("F999", ["x"], ["sum"], domain="own")], functions=_functions(1000, 1)),
        "functions call functions 1000 deep, expected at most 100",
    ),
    "recursion": (
        lambda: _model([helper.make_node("F0", ["x"], ["sum"], domain="own")], functions=_calls_itself()),
        "the function 'own:F1' calls itself",
    ),
    "softmax": (
        lambda: _model([helper.make_node("Softmax", ["c0"], ["sum"], axis=2**62)], np.ones(3, np.float32)),
        "the attribute 'axis' is 4611686018427387904, expected an axis",
    ),
    "norm": (
        lambda: _model(
            [helper.make_node("SimplifiedLayerNormalization", ["c0", "c0"], ["sum"], axis=-(2**40))],
            np.ones(3, np.float32),
        ),
        "the attribute 'axis' is -1099511627776, expected an axis",
    ),
    "empty": (
        lambda: _model([helper.make_node("ReduceSum", ["e"], ["sum"])], np.ones(3, np.float32)),
        "the tensor 'e' has no values, expected 1099511627776",
    ),
    "opset": (lambda: _model([helper.make_node("Neg", ["c0"], ["sum"])], np.ones(3, np.float32)), "imports opset 1099"),
}


@pytest.mark.parametrize("read", [read_model, lower, generate_artifacts], ids=lambda read: read.__name__)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_small_file_may_not_ask_for(read, name, tmp_path):
    make, message = HOSTILE[name]
    model = make()
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
        model = _model([helper.make_node("ReduceSum", ["e"], ["sum"])])
        model.graph.initializer.append(values)
        onnx.save(model, tmp_path / "model.onnx")
        with pytest.raises(ValueError, match=r"model.onnx is damaged, the tensor 'e' has [24] values, expected 3"):
            read_model(tmp_path / "model.onnx")


def test_numbers_that_an_attribute_asks_for():
    node = helper.make_node("RoiAlign", ["x4", "regions", "places"], ["u"], output_height=2**40)
    shape = helper.make_node("Unsqueeze", ["x", "axes"], ["x4"])
    model = _model([shape, node, helper.make_node("ReduceSum", ["u"], ["sum"])])
    constants = {"axes": np.array([0, 1]), "regions": np.zeros((1, 4), np.float32), "places": np.zeros(1, np.int64)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    with pytest.raises(
        ValueError, match=r"RoiAlign .* an attribute asks for 1099511627776 numbers, expected at most 1048576"
    ):
        gradients(model, "y", "x")


def test_inputs_that_are_texts(tmp_path):
    """inspect tells it, artifacts refuse it, and so does a set that others have made."""
    labels = helper.make_node("LabelEncoder", ["s"], ["i"], domain="ai.onnx.ml", keys_strings=["a"], values_int64s=[0])
    model = _model([labels, helper.make_node("Gather", ["c0", "i"], ["sum"])], np.ones((2, 3), np.float32))
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
