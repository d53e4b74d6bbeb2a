"""The files of generate_artifacts: their names, equal bytes, values beside large models, nothing half-written."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper
from small_models import LABELS, build, gradients_of, normal, perceptron, run

from opgrad.training import ArtifactSet, Trainer, read_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.files import checkpoint_tables
from opgrad.training.make import artifacts

CE = LossType.CrossEntropyLoss


def wide():
    """A model with constants that are large enough to be kept apart: 65,536 numbers in w0."""
    text = "g (float[n, 64] x) => (float[n, 3] y) { h = MatMul(x, w0) a = Relu(h) y = MatMul(a, w1) }"
    return build(text, normal(w0=(64, 1024), w1=(1024, 3)))


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_names_and_equal_bytes(tmp_path):
    calls = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        made = generate_artifacts(
            perceptron(), None, ["b0"], CE, OptimType.AdamW, tmp_path / name, "p_",
            additional_output_names=("scores", "a"), nominal_checkpoint=True,
        )  # fmt: skip
        calls.append(contents(tmp_path / name))
    assert calls[0] == calls[1]
    assert made.files == ("p_training_model.onnx", "p_eval_model.onnx", "p_checkpoint", "p_nominal_checkpoint",
                          "p_optimizer_model.onnx")  # fmt: skip
    assert made.outputs == (made.loss, "scores", "a")
    nominal = read_checkpoint(tmp_path / "one" / "p_nominal_checkpoint")
    assert nominal.nominal
    assert (list(nominal.trainable), list(nominal.frozen)) == (["w0", "w1", "b1"], ["b0"])
    evaluation = onnx.load(tmp_path / "one" / "p_eval_model.onnx")
    onnx.checker.check_model(evaluation, full_check=True)
    assert [each.name for each in evaluation.graph.output] == [made.loss, "scores", "a"]


def test_values_outside_are_read_and_written(tmp_path, monkeypatch):
    source, folder, whole = tmp_path / "model.onnx", tmp_path / "made", tmp_path / "whole"
    onnx.save(wide(), source, save_as_external_data=True, location="weights", size_threshold=0)
    whole.mkdir()
    generate_artifacts(source, ["w1"], loss=CE, optimizer=OptimType.SGD, artifact_directory=whole)
    monkeypatch.setattr(artifacts, "OUTSIDE_FROM", 100_000)
    monkeypatch.setattr(checkpoint_tables, "LARGEST", 10_000)
    folder.mkdir()
    made = generate_artifacts(source, ["w1"], loss=CE, optimizer=OptimType.SGD, artifact_directory=folder)
    assert made.files == ("training_model.onnx", "eval_model.onnx", "weights.data", "checkpoint", "checkpoint.data",
                          "optimizer_model.onnx")  # fmt: skip
    assert (folder / "training_model.onnx").stat().st_size < 10_000
    assert (folder / "weights.data").stat().st_size == 64 * 1024 * 4
    feeds = {"x": np.ones((6, 64), np.float32), "labels": LABELS}
    found, expected = ([Trainer(ArtifactSet.load(each)).step(feeds)] for each in (folder, whole))
    assert found == expected
    monkeypatch.undo()
    generate_artifacts(source, ["w1"], loss=CE, optimizer=OptimType.SGD, artifact_directory=folder)
    assert contents(folder) == contents(whole)  # what lay beside the models is gone


def test_models_whose_values_are_elsewhere(tmp_path):
    onnx.save(wide(), tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    with pytest.raises(ValueError, match="model keeps 'w0', 'w1' in another file; give its path"):
        generate_artifacts(model, loss=CE, artifact_directory=tmp_path)
    (tmp_path / "weights").unlink()
    with pytest.raises(FileNotFoundError, match="keeps tensors in another file"):
        generate_artifacts(tmp_path / "model.onnx", loss=CE, artifact_directory=tmp_path)


def test_ort_format_is_refused_where_the_installed_package_lacks_operators(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # which the converter imports if it finds it
    with pytest.raises(
        NotImplementedError, match=r"cannot convert training_model.onnx to ORT format .*leave ORT format"
    ):
        generate_artifacts(perceptron(), loss=CE, artifact_directory=tmp_path, ort_format=True)
    assert not list(tmp_path.iterdir())


def test_a_training_graph_is_no_model(tmp_path):
    generate_artifacts(perceptron(), loss=CE, artifact_directory=tmp_path)
    with pytest.raises(ValueError, match="already: expected a model without gradients, no training graph"):
        generate_artifacts(tmp_path / "training_model.onnx", ["w0"], artifact_directory=tmp_path)


@pytest.mark.parametrize("opset", [7, 11, 13, 21])
def test_opsets(opset, tmp_path):
    made = generate_artifacts(perceptron(opset), loss=CE, artifact_directory=tmp_path)
    parameters = read_checkpoint(tmp_path / "checkpoint").trainable
    feeds = {"x": np.ones((6, 4), np.float32), "labels": LABELS, **parameters}
    found = run(gradients_of(tmp_path / "training_model.onnx"), feeds)
    np.testing.assert_allclose(run(tmp_path / "eval_model.onnx", feeds)[0], found[0], rtol=1e-6)
    assert [each.shape for each in found[1:]] == [parameters[name].shape for name in made.trainable]


@pytest.mark.parametrize(("kind", "dtype"), [("double", "float64"), ("float16", "float16"), ("bfloat16", "bfloat16")])
def test_models_of_other_types(kind, dtype, tmp_path):
    number = {"double": 11, "float16": 10, "bfloat16": 16}[kind]
    model = build(f"g ({kind}[n, 4] x) => ({kind}[n, 3] y) {{ h = MatMul(x, w) y = Add(h, b) }}")
    for name, array in normal(w=(4, 3), b=(3,)).items():
        values = array.astype(checkpoint_tables.ELEMENT_TYPES[number])
        model.graph.initializer.append(helper.make_tensor(name, number, array.shape, values.tobytes(), raw=True))
    made = generate_artifacts(model, loss=CE, optimizer=OptimType.AdamW, artifact_directory=tmp_path, precision="model")
    parameters = read_checkpoint(tmp_path / "checkpoint").trainable
    assert {array.dtype.name for array in parameters.values()} == {dtype}
    training = onnx.load(tmp_path / "training_model.onnx").graph
    assert training.output[0].type.tensor_type.elem_type == (11 if kind == "double" else 1)
    if kind != "bfloat16":  # onnxruntime has no MatMul of it
        feeds = {"x": np.ones((6, 4), dtype), "labels": LABELS, **parameters}
        assert [each.dtype.name for each in run(gradients_of(tmp_path / "training_model.onnx"), feeds)[1:]] == [
            dtype
        ] * 2
    assert made.sizes == {"w": 12, "b": 3}


def test_neither_onnxruntime_nor_numba_is_needed(tmp_path):
    onnx.save(perceptron(), tmp_path / "model.onnx")
    code = """
import sys
for name in ("onnxruntime", "numba", "llvmlite", "torch"):
    sys.modules[name] = None
from opgrad.training import artifacts
print(artifacts.generate_artifacts("model.onnx", loss=artifacts.LossType.MSELoss, optimizer=artifacts.OptimType.SGD))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [
        "batch: x, target",
        "outputs: onnx::reducemean_output::6",
        "trainable: 4 tensors, 43 numbers: w0, b0, w1, b1",
        "frozen: 0 tensors, 0 numbers: none",
    ]
