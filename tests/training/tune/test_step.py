"""The training of adapters as one plain model: stock onnxruntime computes opgrad's losses, quantized bases included."""

import hashlib

import numpy as np
import onnx
import onnxruntime
import pytest
from artifact_sets import EXAMPLES
from command import fails, succeeds
from language_models import make_folder, quantize, vary_attention
from onnx import TensorProto
from portable_cases import tuned_batches as batches
from portable_steps import client

from opgrad.onnx.graph.messages import MICROSOFT
from opgrad.training import Trainer
from opgrad.training.export import layout, plain
from opgrad.training.export.plain import STOCK
from opgrad.training.files.weights import decode_tensors
from opgrad.tune import Tuner

LORA = "rank=4, target=all-linear"
RATE = 0.01


def assert_learns_as(tuner, manifest, steps=5):
    """An exported step gives the losses and the adapters of opgrad's trainer."""
    step, trainer = client().Step(manifest), Trainer(tuner.adapted.setting().artifacts, RATE)
    for batch in batches(steps):
        assert step.train(batch, RATE) == pytest.approx(trainer.step(batch), rel=1e-5)
    for name in tuner.values:
        np.testing.assert_allclose(step.state[name], trainer.parameters[name], rtol=1e-3, atol=1e-5)


BASES = {
    "floats, without caches": None,
    "4 bits; window, softcap, sinks": {"bits": 4},
    "4 bits, zero points, odd number of blocks": {"bits": 4, "block": 64, "zeros": True},
    "8 bits, zero points": {"bits": 8, "zeros": True},
    "2 bits": {"bits": 2},
}


def quantized(folder, **given):
    """The folder of a language model with caches and products of four bits."""
    make_folder(folder, cached=True, layers=1)
    quantize(folder / "model.onnx", **given)
    return folder


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.one_in(2)
def test_losses_and_adapters_are_those_of_opgrad(tmp_path, kind):
    folder = make_folder(tmp_path / "model", cached="without caches" not in kind, layers=1)
    if "window" in kind:
        vary_attention(folder / "model.onnx")
    if BASES[kind] is not None:
        quantize(folder / "model.onnx", **BASES[kind])
    tuner = Tuner(folder, lora=LORA)
    made = tuner.export_step(tmp_path / "step.onnx")
    nodes = onnx.load(made.files["step"]).graph.node
    assert {each.op_type for each in nodes if each.domain == MICROSOFT} <= set(STOCK)
    assert_learns_as(tuner, made.files["manifest"], steps=10)


def test_weights_stay_in_the_files_of_the_base(tmp_path, monkeypatch):
    """They are copied once for all models, as they are, and not where they lie already."""
    monkeypatch.setattr(layout, "HUGE", 256)
    monkeypatch.setattr("opgrad.training.files.tensor_values.HUGE", 256)
    monkeypatch.setattr(plain, "LARGEST", 500)  # products are in pieces
    folder = quantized(tmp_path / "model", apart=True)
    tuner = Tuner(folder, lora=LORA)
    (tmp_path / "site").mkdir()
    made = tuner.export_step(tmp_path / "site" / "step.onnx", models=["eval"])
    data = folder / "model.onnx.data"
    assert (tmp_path / "site" / "model.onnx.data").read_bytes() == data.read_bytes()
    entry = {"name": data.name, "bytes": data.stat().st_size, "sha256": hashlib.sha256(data.read_bytes()).hexdigest()}
    assert made.manifest["data"] == [entry]
    stored = onnx.load(made.files["step"], load_external_data=False).graph.initializer
    assert {TensorProto.UINT4, TensorProto.UINT8} <= {each.data_type for each in stored if each.external_data}
    assert max(len(each.raw_data) for each in stored) <= 256
    assert_learns_as(tuner, made.files["manifest"])
    step, batch = client().Step(made.files["manifest"]), next(batches())
    found, counts = step.evaluate(batch), batch["labels"] >= 0
    assert found["loss"] == pytest.approx(step.train(batch, RATE), rel=1e-5)
    best = found["scores"].reshape(*counts.shape, -1).argmax(-1)
    assert found["accuracy"] == pytest.approx((best == batch["labels"])[counts].mean())
    with pytest.raises(ValueError, match="labels has -7, expected 0 to 24"):
        step.train({**batch, "labels": np.where(counts, batch["labels"], -7)}, RATE)
    tuner.export_step(folder / "step.onnx")
    assert {each.name for each in folder.iterdir() if each.suffix == ".data"} == {"model.onnx.data"}
    client().Step(folder / "step.json").train(batch, RATE)


def test_constants_that_lie_in_no_file_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "HUGE", 256)
    tuner = Tuner(quantized(tmp_path / "model"), lora=LORA)
    made = tuner.export_step(tmp_path / "step.onnx")
    assert [each["name"] for each in made.manifest["data"]] == ["step.data"]
    assert_learns_as(tuner, made.files["manifest"])


def test_another_file_of_the_same_name_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "HUGE", 256)
    monkeypatch.setattr("opgrad.training.files.tensor_values.HUGE", 256)
    folder = quantized(tmp_path / "model", apart=True)
    (tmp_path / "model.onnx.data").write_bytes(b"of another model")
    with pytest.raises(ValueError, match="another file than"):
        Tuner(folder, lora=LORA).export_step(tmp_path / "step.onnx")
    assert (tmp_path / "model.onnx.data").read_bytes() == b"of another model"
    assert not (tmp_path / "step.onnx").exists()


@pytest.mark.parametrize("bits", [2, 4])
def test_weights_are_not_unpacked_when_the_model_is_loaded(tmp_path, bits):
    """Nothing that a runtime computes once for all has as many floats as a weight."""
    folder = make_folder(tmp_path / "model", cached=True, layers=1, width=48, heads=3)
    quantize(folder / "model.onnx", bits=bits)
    made = Tuner(folder, lora=LORA).export_step(tmp_path / "step.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(made.files["step"], options, providers=["CPUExecutionProvider"])
    stored = onnx.load(tmp_path / "optimized.onnx").graph.initializer
    sizes = {int(np.prod(each.dims)) for each in stored if each.data_type == TensorProto.FLOAT}
    assert not sizes & {48 * 48, 48 * 96}


def test_adapter_of_the_state_is_that_of_a_fine_tuning(tmp_path):
    """The weights that a client writes become the adapter's files, by the command."""
    folder = quantized(tmp_path / "model")
    text = succeeds("step", folder, "--lora", "rank=4, alpha=6, target=q|v", "--flat", "-o", tmp_path / "step.onnx")
    tuner = Tuner(folder, lora="rank=4, alpha=6, target=q|v")
    step, trainer = client().Step(tmp_path / "step.json"), Trainer(tuner.adapted.setting().artifacts, RATE)
    for batch in batches():
        step.train(batch, RATE), trainer.step(batch)
    step.save(tmp_path / "trained.safetensors")
    text = succeeds("tune", folder, "--adapter", tmp_path / "trained.safetensors", "--output", tmp_path / "found")
    assert "adapter.onnx_adapter" in text
    tuner.adapted.use(trainer.parameters)
    tuner.save(tmp_path / "expected")
    for name in ("adapter_config.json", "tune.json"):
        assert (tmp_path / "found" / name).read_text() == (tmp_path / "expected" / name).read_text()
    found, expected = (
        decode_tensors((tmp_path / each / "adapter_model.safetensors").read_bytes())[0]
        for each in ("found", "expected")
    )
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-5)


def test_weights_of_a_step_that_do_not_fit(tmp_path):
    folder, other = (
        make_folder(tmp_path / name, cached=True, layers=1, seed=seed) for seed, name in enumerate(("a", "b"))
    )
    weights = Tuner(folder, lora=LORA).export_step(tmp_path / "step.onnx").files["weights"]
    with pytest.raises(ValueError, match="is of another base"):
        Tuner(other, adapter=weights)
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    with pytest.raises(ValueError, match="is damaged"):
        Tuner(folder, adapter=weights)
    made = Tuner(folder, train="*q_proj*").export_step(tmp_path / "step.onnx")
    with pytest.raises(ValueError, match="has no adapters"):
        Tuner(folder, adapter=made.files["weights"])
    assert "no model.onnx" in fails("step", EXAMPLES / "digits", "--lora", "rank=4", "-o", tmp_path / "other.onnx")
