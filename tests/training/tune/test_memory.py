"""Layers that are computed again so that a step takes no more memory than it may."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from language_models import make_folder
from onnx import TensorProto, helper, numpy_helper

from opgrad.training.engine.trainer import Trainer
from opgrad.training.files import tensor_values
from opgrad.tune import Tuner
from opgrad.tune import trained_set as plans
from opgrad.tune.language_model import read
from opgrad.tune.trained_set import Room, ends_of_layers, limit_of, plan, step_bytes


def chain(lengths):
    """A graph of one node behind the other, with results of so many numbers, and with a loss behind the last one."""
    lengths = [*lengths, 1]
    names = [f"v{place}" for place in range(len(lengths) + 1)]
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in pairwise(names)]
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [n]) for name, n in zip(names[1:], lengths, strict=True)
    ]
    x = helper.make_tensor_value_info("v0", TensorProto.FLOAT, [1])
    return helper.make_model(helper.make_graph(nodes, "g", [x], infos[-1:], value_info=infos[:-1]))


def test_values_live_from_their_maker_to_their_last_reader():
    assert step_bytes(chain([3, 5, 2]), {}) == 4 * (3 + 5)
    assert step_bytes(chain(["batch", 5, "length"]), {"batch": 2, "length": 9}) == 4 * (5 + 9)
    model = chain([3, 5, 2])
    model.graph.node.append(helper.make_node("Relu", ["v1"], ["late"]))
    assert step_bytes(model, {}) == 4 * (3 + 5 + 2)


def test_axes_without_a_name_that_is_known():
    """The first of several is the batch; any other counts as the longest."""
    model = chain([1])
    shape = model.graph.value_info[0].type.tensor_type.shape
    for given, numbers in ((["unk__1", 1, "unk__2"], 2 * 9), (["unk__2"], 9), (["length", "unk__1"], 9 * 9)):
        shape.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, given).tensor_type.shape)
        assert step_bytes(model, {"batch": 2, "length": 9}) == 4 * numbers


def test_chooses_as_few_layers_as_the_limit_permits(monkeypatch):
    monkeypatch.setattr(plans, "WORKING", 0)
    monkeypatch.setattr(plans, "PROCESS", 0)
    monkeypatch.setattr(plans, "SPARE", 1)
    layers, asked = list("abcdef"), []

    class Made:
        def model(self, segments):
            asked.append(len(segments or ()))
            return chain([100 - 10 * len(segments or ())])

    def chosen(limit, is_given=True):
        found, model = plan(Made(), Room(layers, {}, 1000, limit, is_given))
        assert step_bytes(model, {}) == found.values
        return found

    assert chosen(1400).segments == ()
    assert asked == [0]
    for limit, count in ((1399, 1), (1360, 1), (1359, 2), (1280, 3), (1200, 5)):
        found = chosen(limit)
        assert (len(found.segments), found.bytes) == (count, 1400 - 40 * count)
    with pytest.raises(ValueError, match="memory is 0 MB, expected at least 1 MB for batches of this size"):
        chosen(1199)
    assert len(chosen(1199, is_given=False).segments) == 5  # as near as it comes


def test_limit(monkeypatch):
    """It follows from the base and the batch, unless the machine has less."""
    monkeypatch.setattr(plans, "free_memory", lambda: None)
    assert limit_of(1000, 8) == limit_of(1000, 512) == 1500 + 10**9
    assert limit_of(1000, 4 * 512) == 1500 + 4 * 10**9
    monkeypatch.setattr(plans, "free_memory", lambda: 10**8)
    assert limit_of(1000, 8) == 10**8


def test_ends_of_layers(tmp_path):
    base = read(make_folder(tmp_path) / "model.onnx")
    downs = [each.output for each in base.products if each.role == "down"]
    assert list(ends_of_layers(base.products)) == downs


def test_bytes_of_the_base(tmp_path, monkeypatch):
    """A table and the last product that share their memory count once."""
    model = onnx.load(make_folder(tmp_path) / "model.onnx")
    stored = sum(numpy_helper.to_array(each).nbytes for each in model.graph.initializer)
    assert read(tmp_path / "model.onnx").bytes == stored
    table = next(each for each in model.graph.initializer if "embed" in each.name)
    flat = numpy_helper.from_array(numpy_helper.to_array(table).reshape(-1), "flat")
    shape = numpy_helper.from_array(np.array([-1, 32]), "shape")
    table.CopyFrom(flat)
    model.graph.initializer.append(shape)
    names = ["model.embed_tokens.weight", "again"]
    for place, name in enumerate(names):
        model.graph.node.insert(place, helper.make_node("Reshape", ["flat", "shape"], [name]))
    head = next(node for node in model.graph.node if node.name == "/lm_head/MatMul")
    model.graph.node.insert(2, helper.make_node("Transpose", ["again"], ["turned"], perm=[1, 0]))
    head.input[1] = "turned"
    monkeypatch.setattr(tensor_values, "HUGE", 1000)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="values", size_threshold=0)
    base = read(tmp_path / "model.onnx")
    assert {"flat", "again"} <= base.values.keys()
    assert base.bytes == stored - 32 * base.vocabulary * 4


def test_less_memory_gives_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "WORKING", 0)
    monkeypatch.setattr(plans, "PROCESS", 0)
    folder = make_folder(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 20, (2, 40))
    losses, sizes = [], []
    whole = Tuner(folder).adapted.setting(2, 40)
    plan = whole.plan
    for memory in (None, plan.bytes - plan.values * 3 // 100):
        setting = Tuner(folder, memory=memory).adapted.setting(2, 40)
        sizes.append(len(setting.artifacts.training_model.graph.node))
        trainer = Trainer(setting.artifacts, learning_rate=0.1)
        names = [each.name for each in setting.artifacts.inputs]
        losses.append([trainer.step(dict.fromkeys(names, tokens)) for _ in range(3)])
    assert sizes[1] > sizes[0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
