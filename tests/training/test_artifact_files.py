"""The files of generate_artifacts: names, equal bytes, large values written and mapped once, nothing half-written."""

import subprocess
import sys
import tracemalloc
from contextlib import contextmanager

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from small_models import LABELS, build, gradients_of, normal, perceptron, run, set_of
from training_sets import load

from opgrad.cli.inspection import inspect
from opgrad.training import ArtifactSet, Checkpoint, Dataset, Trainer, read_checkpoint
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.files import checkpoint_tables, mapped_files, tensor_values
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
        _, *found = run(gradients_of(tmp_path / "training_model.onnx"), feeds)
        assert [each.dtype.name for each in found] == [dtype] * 2
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


SIZE, COUNT = 256, 8
TENSOR = SIZE * SIZE * 4  # bytes
MODEL = COUNT * TENSOR
ROOM = 200_000  # bytes for graphs and for what tests do
NAMES = [f"w{index}" for index in range(COUNT)]
X = np.random.default_rng(1).standard_normal((6, SIZE)).astype(np.float32)
BATCH = {"x": X, "target": X}


@pytest.fixture
def small(monkeypatch):
    """Let tensors of 256 KiB be large."""
    for module, name in (
        (artifacts, "OUTSIDE_FROM"),
        (tensor_values, "HUGE"),
        (tensor_values, "SHARED_FROM"),
        (mapped_files, "LEAST"),
    ):
        monkeypatch.setattr(module, name, TENSOR // 2)


def products():
    nodes = "  ".join(f"h{i + 1} = MatMul(h{i}, w{i})" for i in range(COUNT))
    text = f"g (float[batch, {SIZE}] x) => (float[batch, {SIZE}] h{COUNT}) {{ h0 = Identity(x)  {nodes} }}"
    return build(text, {name: array / 8 for name, array in normal(**dict.fromkeys(NAMES, (SIZE, SIZE))).items()})


def in_two_files(folder):
    path = folder / "model.onnx"
    onnx.save(products(), path, save_as_external_data=True, location="model.data", size_threshold=1024)
    return path


def made(model, folder, **options):
    return set_of(model, folder, LossType.MSELoss, requires_grad=["w7"], **options)


def losses(artifacts, steps=3):
    trainer = Trainer(artifacts, 0.1)
    return [trainer.step(BATCH) for _ in range(steps)]


@contextmanager
def at_most(count):
    """Python's memory grows by so many bytes at most; what is mapped is none."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= count + ROOM, (peak - count) / TENSOR


WAYS = {"constants": {}, "frozen": {"frozen_params": NAMES[:-1]}, "some": {
    "frozen_params": NAMES[2:4]}}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small")
def test_weights_are_on_disk_once(way, tmp_path):
    path = in_two_files(tmp_path)
    made(path, tmp_path / "warm", **WAYS[way])
    with at_most(2 * TENSOR):
        made(path, tmp_path / "set", **WAYS[way])
    on_disk = sum(file.stat().st_size for file in (tmp_path / "set").iterdir())
    assert MODEL <= on_disk <= MODEL + ROOM
    assert not any(".tmp" in file.name for file in tmp_path.rglob("*"))


def test_losses_are_those_of_small_models(tmp_path):
    """In one file or in two, as constants or as frozen parameters, mapped or read."""
    model = products()
    expected = losses(made(model, tmp_path / "plain"))
    with pytest.MonkeyPatch.context() as patch:
        small.__wrapped__(patch)
        for name, given in {"proto": model, "file": in_two_files(tmp_path)}.items():
            for way, options in WAYS.items():
                found = losses(made(given, tmp_path / f"{name}-{way}", **options))
                assert found == pytest.approx(expected, rel=1e-6)
        one, two = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
                    for name in ("proto-some", "file-some"))  # fmt: skip
        assert one == two


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small")
def test_training_has_one_copy_of_what_it_does_not_train(way, tmp_path):
    artifacts = made(in_two_files(tmp_path), tmp_path / "set", **WAYS[way])
    losses(artifacts)  # what is loaded and compiled once
    with at_most(2 * TENSOR + 2 * X.nbytes):  # parameters and gradients
        trainer = Trainer(ArtifactSet.load(tmp_path / "set"), 0.1)
        trainer.step(BATCH)
        trainer.evaluate(Dataset(BATCH))
    held = trainer._graph._fixed
    kept = {**trainer.artifacts.constants, **trainer.artifacts.frozen}
    assert sorted(kept) == NAMES[:-1]
    for name, array in kept.items():
        assert np.shares_memory(held[name], array)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.usefixtures("small")
def test_an_export_takes_no_more_than_a_tensor(way, files, tmp_path, monkeypatch):
    trainer = Trainer(made(in_two_files(tmp_path), tmp_path / "set", **WAYS[way]), 0.1)
    trainer.step(BATCH)
    if files == 2:
        monkeypatch.setattr("opgrad.training.files.tensor_values.LARGEST_MODEL", MODEL // 2)
    trainer.export(tmp_path / "warm.onnx")
    with at_most(TENSOR):
        trainer.export(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").exists() == (files == 2)
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    expected = X
    for name in NAMES:
        expected = expected @ {**trainer.artifacts.constants, **trainer.parameters}[name]
    np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small")
def test_the_api_trains_them_too(way, tmp_path):
    folder = tmp_path / "set"
    expected = losses(made(in_two_files(tmp_path), folder, **WAYS[way]))
    state, module, optimizer = load(folder)
    optimizer.set_learning_rate(0.1)
    found = []
    for _ in range(3):
        found.append(float(module(X, X)))
        optimizer.step()
        module.lazy_reset_grad()
    assert found == pytest.approx(expected, rel=1e-6)
    before = {name: array.copy() for name, array in read_checkpoint(folder / "checkpoint").frozen.items()}
    for name in before:
        state.parameters[name].data[...] = 0
    assert all((state.parameters[name].data == 0).all() for name in before)
    for name, array in read_checkpoint(folder / "checkpoint").frozen.items():
        np.testing.assert_array_equal(array, before[name])  # the file is as it was
    module.export_model_for_inferencing(tmp_path / "out.onnx", ["h8"])
    onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    assert inspect(folder).runs


@pytest.mark.usefixtures("small")
def test_other_frozen_values_are_restored(tmp_path):
    artifacts = made(in_two_files(tmp_path), tmp_path / "set", frozen_params=NAMES[:-1])
    one, other = Trainer(artifacts, 0.0), Trainer(artifacts, 0.0)
    state = one.checkpoint()
    changed = {**state.frozen, "w0": state.frozen["w0"] * np.float32(0.5)}
    before = one.step(BATCH)
    one.restore(Checkpoint(state.trainable, changed, state.optimizers))
    assert one.step(BATCH) != before
    assert one.evaluate(Dataset(BATCH)).loss != other.evaluate(Dataset(BATCH)).loss
    assert other.step(BATCH) == before
    one.restore(state)
    assert one.step(BATCH) == before


@pytest.mark.usefixtures("small")
def test_files_that_are_too_short(tmp_path):
    path = in_two_files(tmp_path)
    with open(tmp_path / "model.data", "r+b") as file:
        file.truncate(MODEL - 4)
    with pytest.raises(ValueError, match=r"keeps tensors in another file: model.data has \d+ bytes, expected"):
        made(path, tmp_path / "set")
    made(in_two_files(tmp_path), tmp_path / "set")
    with open(tmp_path / "set" / "weights.data", "r+b") as file:
        file.truncate(TENSOR)
    with pytest.raises(ValueError, match=r"^ArtifactSet: .*weights.data has"):
        ArtifactSet.load(tmp_path / "set")


@pytest.mark.parametrize("location", ["../model.data", "/etc/hostname", "link", "folder/model.data"])
@pytest.mark.usefixtures("small")
def test_files_elsewhere_are_not_read(location, tmp_path):
    (tmp_path / "inner").mkdir()
    path = in_two_files(tmp_path / "inner")
    (tmp_path / "model.data").write_bytes(bytes(MODEL))
    (tmp_path / "inner" / "link").symlink_to(tmp_path / "model.data")
    (tmp_path / "inner" / "folder").symlink_to(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises((ValueError, FileNotFoundError), match="keeps tensors in another file"):
        made(path, tmp_path / "set")
