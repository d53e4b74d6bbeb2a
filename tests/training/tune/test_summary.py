"""What is told of a fine-tuning before it begins: by `opgrad inspect`, and by `opgrad tune`."""

import json

import onnx
import pytest
from command import succeeds
from language_models import make_folder, write_lines
from onnx import TensorProto, helper
from small_models import perceptron

from opgrad.cli.inspection import inspect
from opgrad.tune import Tuner
from opgrad.tune.adapted_model import megabytes, summary

NUMBERS = 2 * 8 * (64 + 48 + 48 + 64)  # of adapters of rank 8 beside q, k, v and o of two layers
# Of products: both tables of 25 words, and in two layers q, k, v, o and three of 32 x 64.
WEIGHTS = 2 * 25 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


def test_inspection_of_a_language_model(folder):
    """By its folder or its file."""
    for path in (folder, folder / "model.onnx"):
        found = inspect(path).tuning
        assert [tuple(each[name] for name in ("role", "layer", "inputs", "outputs")) for each in found.adapters] == [
            (role, layer, 32, outputs)
            for layer in (0, 1)
            for role, outputs in (("q", 32), ("k", 16), ("v", 16), ("o", 32))
        ]
        assert (found.trained, found.numbers) == (NUMBERS, WEIGHTS)
        assert sum(each["numbers"] for each in found.adapters) == NUMBERS
        stored = onnx.load(folder / "model.onnx").graph.initializer
        assert found.base == sum(len(each.raw_data) for each in stored)
        assert (found.rows, found.length, found.again) == (4, 2048, 0)
        assert found.step > found.base


def test_commands_tell_the_same(tmp_path, folder):
    """The data decides how long a step's rows are."""
    data = write_lines(tmp_path / "data.jsonl", [{"prompt": "hello", "completion": " you"}] * 8)
    rows = [("q", "32 x 32", 2 * 8 * 64), ("v", "32 x 16", 2 * 8 * 48)]
    trained = f"{NUMBERS:,} numbers, {NUMBERS / WEIGHTS:.2%} of the {WEIGHTS:,} in products"
    for words, length in (
        (["inspect", folder], "2,048"),
        (["tune", folder, "--data", data, "--output", tmp_path / "out"], "16"),
    ):
        text = succeeds(*words)
        lines = [[part.strip() for part in line.split("\u2502")[1:-1]] for line in text.splitlines()]
        for role, sizes, numbers in rows:
            assert [role, "0-1", "MatMul", "32", sizes, "8", "2", f"{numbers:,}"] in lines
        assert trained in text
        assert f"MB for a step of 4 rows of up to {length} tokens" in text


def test_layers_that_are_computed_again(tmp_path, folder, monkeypatch):
    whole = summary(Tuner(folder).adapted, 2, 40)
    limited = Tuner(folder, memory=whole.step - 2000).adapted
    found = summary(limited, 2, 40)
    assert found.step <= whole.step - 2000
    assert found.again == 1
    told = f"for a step of 2 rows of up to 40 tokens; 1 layer computed again for a limit of {megabytes(found.limit)}"
    assert found.facts()["memory"].endswith(told)
    weights = summary(Tuner(folder, train="*mlp*").adapted, 1, 8)
    assert (weights.adapters, weights.trained) == ([], 2 * 3 * 32 * 64)


def test_json(folder):
    text = succeeds("inspect", "--json", folder)
    found = json.loads(text)["tuning"]
    assert (found["trained"], found["adapters"][0]["role"], len(found["adapters"])) == (NUMBERS, "q", 8)


def test_other_models_and_those_that_cannot_be_tuned(tmp_path, folder):
    onnx.save(perceptron(), tmp_path / "other.onnx")
    found = inspect(tmp_path / "other.onnx")
    assert (found.tuning, found.tuning_problem) == (None, None)
    model = onnx.load(folder / "model.onnx")
    model.graph.input.append(helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1]))
    model.graph.node.append(helper.make_node("Add", ["logits", "pixels"], ["mixed"]))
    model.graph.output[0].name = "mixed"
    onnx.save(model, tmp_path / "model.onnx")
    text = succeeds("inspect", tmp_path / "model.onnx")
    assert "cannot be tuned: " in text
    assert "has the input 'pixels', expected tokens, masks" in text


@pytest.mark.parametrize(("count", "text"), [(80_768, "0.08 MB"), (9_990_000, "9.99 MB"), (1_234_567_890, "1,235 MB")])
def test_megabytes(count, text):
    assert megabytes(count) == text
