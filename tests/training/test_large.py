"""Large weights: written once, mapped by both graphs, and in memory no more than once, however they were named."""

import tracemalloc
from contextlib import contextmanager

import numpy as np
import onnx
import onnxruntime
import pytest
from small_models import build, normal

from opgrad.cli.inspection import inspect
from opgrad.training import ArtifactSet, Checkpoint, Dataset, Trainer, read_checkpoint
from opgrad.training.api import CheckpointState, Module, Optimizer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts
from opgrad.training.files import mapped_files, tensor_values
from opgrad.training.make import artifacts

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
    folder.mkdir(exist_ok=True)
    generate_artifacts(
        model, ["w7"], loss=LossType.MSELoss, optimizer=OptimType.SGD, artifact_directory=folder, **options
    )
    return ArtifactSet.load(folder)


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
        monkeypatch.setattr("opgrad.training.engine.export.LARGEST_MODEL", MODEL // 2)
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
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
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


def _outside_of(location):
    def change(path):
        model = onnx.load(path, load_external_data=False)
        model.graph.initializer[0].external_data[0].value = location
        path.write_bytes(model.SerializeToString())

    return change


@pytest.mark.parametrize("location", ["../model.data", "/etc/hostname", "link", "folder/model.data"])
@pytest.mark.usefixtures("small")
def test_files_elsewhere_are_not_read(location, tmp_path):
    (tmp_path / "inner").mkdir()
    path = in_two_files(tmp_path / "inner")
    (tmp_path / "model.data").write_bytes(bytes(MODEL))
    (tmp_path / "inner" / "link").symlink_to(tmp_path / "model.data")
    (tmp_path / "inner" / "folder").symlink_to(tmp_path)
    _outside_of(location)(path)
    with pytest.raises((ValueError, FileNotFoundError), match="keeps tensors in another file"):
        made(path, tmp_path / "set")
