"""Training on a CUDA device, on the stand-in for one (tests/support/device_sessions.py), and what is said without one.

The stand-in makes a process of its own, which the first test starts; the CPU's losses are computed before.
"""

import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from artifact_sets import EXAMPLES, write_linear_set
from command import cli
from cuda_gate import environment as compiling
from halved_models import halved
from onnx import TensorProto
from small_models import build, normal, set_of
from training_sets import DIGITS, batch, load, values

from opgrad.cuda import driver
from opgrad.training import AdamWRule, ArtifactSet, Dataset, SGDRule, Trainer, read_checkpoint
from opgrad.training.api import CheckpointState, Module
from opgrad.training.artifacts import OptimType
from opgrad.training.files.checkpoint import write_checkpoint
from opgrad.training.run import job
from opgrad.training.run.recipe import Recipe
from opgrad.training.run.state import LAST, Resumption

INSIDE = "device_sessions" in sys.modules
inside = pytest.mark.skipif(not INSIDE, reason="runs in the process that the first test starts")
outside = pytest.mark.skipif(INSIDE, reason="ran in the process that started this one")
ROOT, EXPECTED = Path(__file__).parents[2], "OPGRAD_EXPECTED"  # a file of the CPU's losses and parameters
ROWS = 8
# Every node of the stand-in's sessions is said to be the CPU's.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*run on the CPU"),
    pytest.mark.filterwarnings("ignore:.*was compiled"),
]

if INSIDE:
    from device_sessions import DEVICE, arrays


def digits():
    return ArtifactSet.load(DIGITS)


def batches(count=20):
    data = job.load_data(digits(), Recipe.load(DIGITS), None)
    return [data.take(np.arange(ROWS * step, ROWS * step + ROWS)).arrays for step in range(count)]


def trained(trainer, given):
    return [trainer.step(each) for each in given]


def same(one, other, **tolerance):
    for name in one.artifacts.trainable:
        np.testing.assert_allclose(one.parameters[name], other.parameters[name], err_msg=name, **tolerance)


@outside
@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="needs a C compiler")
def test_training_on_a_device(tmp_path):
    pytest.importorskip("triton", reason="needs Triton")
    trainer = Trainer(digits(), 1e-2)
    losses = trained(trainer, batches())
    np.savez(tmp_path / "cpu.npz", losses=losses, **trainer.parameters)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "device_sessions", __file__]
    variables = {"OPGRAD_PTX": "90", EXPECTED: str(tmp_path / "cpu.npz"), **compiling()}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


# --- Trainer ---------------------------------------------------------------------------------------------------------


@inside
def test_twenty_steps_are_those_of_the_cpu():
    expected, trainer = np.load(os.environ[EXPECTED]), Trainer(digits(), 1e-2, device="cuda")
    assert trainer.on_device
    DEVICE.launches.clear()
    np.testing.assert_allclose(trained(trainer, batches()), expected["losses"], rtol=1e-5)
    assert sum(each.kernel == "_adamw" for each in DEVICE.launches) == 20
    for name in trainer.artifacts.trainable:
        np.testing.assert_allclose(trainer.parameters[name], expected[name], atol=1e-5)
    evaluation = trainer.evaluate(Dataset(batches(1)[0]))
    alone = Trainer(digits())
    alone.restore(trainer.checkpoint())
    assert evaluation.loss == pytest.approx(alone.evaluate(Dataset(batches(1)[0])).loss)


@inside
@pytest.mark.parametrize("rule", [SGDRule(), SGDRule(max_norm=0.1), AdamWRule(max_norm=0.1, adam_mode=1)])
def test_rules_and_clipping(rule):
    artifacts = replace(digits(), rule=rule)
    one, other = Trainer(artifacts, 0.05, device="cuda:0"), Trainer(artifacts, 0.05)
    np.testing.assert_allclose(trained(one, batches(3)), trained(other, batches(3)), rtol=1e-6)
    # Where moments cancel, the last digits of a gradient are a part of AdamW's step.
    same(one, other, rtol=1e-5, atol=1e-5)
    for name in one.gradients:
        np.testing.assert_allclose(one.gradients[name], other.gradients[name], rtol=1e-5, atol=1e-7)


@inside
def test_losses_are_read_when_they_are_asked_for():
    trainer, given = Trainer(digits(), 1e-2, device="cuda"), batches(3)
    before = len(DEVICE.recorded)
    later = [trainer.step_ahead(each) for each in given]
    found = [loss() for loss in later]
    np.testing.assert_allclose(found, np.load(os.environ[EXPECTED])["losses"][:3], rtol=1e-5)
    copied = list(DEVICE.recorded)[before:]  # one copy for each input of a step, on the stream of the launches
    assert copied == [DEVICE.launches[-1].stream] * len(given) * len(trainer.artifacts.inputs)


@inside
def test_a_checkpoint_of_the_cpu_goes_on_on_the_device_and_back(tmp_path):
    path, given = tmp_path / "checkpoint", batches(6)
    cpu, whole = Trainer(digits(), 1e-2), Trainer(digits(), 1e-2)
    trained(whole, given)
    trained(cpu, given[:2])
    for device, part in (("cuda", given[2:4]), ("cpu", given[4:])):
        write_checkpoint(cpu.checkpoint(), path)
        cpu = Trainer(digits(), 1e-2, device=device)
        cpu.restore(read_checkpoint(path))
        trained(cpu, part)
    assert cpu.optimizer.steps == 6
    same(cpu, whole, atol=1e-6)


@inside
def test_what_is_exported(tmp_path):
    trainer = Trainer(digits(), 1e-2, device="cuda")
    trained(trainer, batches(1))
    trainer.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.run(None, {"pixels": batches(1)[0]["pixels"]})[0].shape == (ROWS, 10)


@inside
def test_memory_is_given_back():
    before = len(arrays)
    trainer = Trainer(digits(), 1e-2, device="cuda")
    trained(trainer, batches(1))
    del trainer
    assert len(arrays) == before


@inside
def test_values_that_are_read_are_copies():
    trainer = Trainer(digits(), 1e-2, device="cuda")
    for of in (trainer.parameters, trainer.gradients):
        with pytest.raises(ValueError, match="read-only"):
            of["W1"][...] = 0


@inside
def test_float16_with_a_scaled_loss(tmp_path):
    """The factor changes between steps. Gradients of normalization and Gelu are ONNX's operators in their place."""
    text = """g (float[n, 4] x) => (float[n, 3] y) {
        a = Gemm(x, w, b)  h = Gelu<approximate = "tanh">(a)  l = LayerNormalization(h, scale)  y = MatMul(l, v)
    }"""
    model = halved(
        build(text, {**normal(w=(4, 6), b=(6,), v=(6, 3)), "scale": np.ones(6, "f4")}, 20), TensorProto.FLOAT16
    )
    artifacts = set_of(model, tmp_path, optimizer=OptimType.AdamW, precision="model")
    random = np.random.default_rng(5)
    x, labels = random.normal(size=(8, 4)).astype("f2"), random.integers(0, 3, 8)
    given = dict(zip((each.name for each in artifacts.inputs), (x, labels), strict=True))
    trainers = [Trainer(artifacts, 0.01, loss_scale="dynamic", device=device) for device in ("cpu", "cuda")]
    for each in trainers:
        each.loss_scale.restore([2.0**24, 0, 0, 0])
        each._bind_scale()
    cpu, device = (trained(each, [given] * 8) for each in trainers)
    np.testing.assert_allclose(device, cpu, rtol=1e-2)
    assert trainers[0].loss_scale.to_text() == trainers[1].loss_scale.to_text()
    assert trainers[0].loss_scale.skipped > 2
    assert len(set(cpu[-2:])) == len(set(device[-2:])) == 2  # the last steps were made


@inside
def test_a_run_with_accumulated_batches_goes_on(tmp_path):
    """Two epochs on the device are those of the CPU, and of one on each."""
    write_linear_set(tmp_path)
    x = np.random.default_rng(0).normal(size=(40, 2)).astype("f4")
    np.savez(tmp_path / "data.npz", x=x, y=x.sum(1, keepdims=True))
    artifacts, recipe = ArtifactSet.load(tmp_path), Recipe(epochs=2, batch_size=4, accumulate=3, clip_norm=0.5)

    def run(epochs, name, device, resumption=None):
        given = replace(recipe, epochs=epochs), tmp_path / "data.npz", tmp_path / name, lambda *_: None, resumption
        found = job.train(artifacts, *given, device=device)
        return read_checkpoint(tmp_path / name / LAST).trainable, found.state.history[-1].train_loss

    (expected, loss), (found, other) = run(2, "cpu", "cpu"), run(2, "device", "cuda")
    run(1, "half", "cpu")
    rest, last = run(2, "rest", "cuda", Resumption.read(tmp_path / "half" / LAST))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)
        np.testing.assert_allclose(rest[name], array, atol=1e-6)
    assert loss == pytest.approx(other, rel=1e-5) == pytest.approx(last, rel=1e-5)


# --- the interface of onnxruntime.training.api -----------------------------------------------------------------------


@inside
def test_a_module_is_that_of_the_cpu(tmp_path):
    modules = [load(), load(device="cuda")]
    for state, module, optimizer in modules:
        module.lazy_reset_grad()
        for seed in (0, 1):  # the second call adds to the gradients of the first
            module(*batch(ROWS, seed))
        assert module.clip_grad_norm(0.5) > 0.5
        optimizer.step()
        state.parameters["b1"] = np.full(state.parameters["b1"].data.shape, 0.25, "f4")
        module.copy_buffer_to_parameters(module.get_contiguous_parameters())
        module.eval()
    (one, _, _), (other, on_device, _) = modules
    for name, array in values(one).items():
        np.testing.assert_allclose(other.parameters[name].data, array, atol=1e-6)
        np.testing.assert_allclose(other.parameters[name].grad, one.parameters[name].grad, atol=1e-6)
    np.testing.assert_allclose(on_device(*batch(ROWS)), modules[0][1](*batch(ROWS)), rtol=1e-5)
    CheckpointState.save_checkpoint(other, tmp_path / "checkpoint", include_optimizer_state=True)
    found = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    for name, array in values(other).items():
        np.testing.assert_array_equal(found.parameters[name].data, array)


@inside
def test_ortvalues_give_ortvalues():
    _, module, _ = load(device="cuda")
    given = [onnxruntime.OrtValue.ortvalue_from_numpy(each) for each in batch(ROWS)]
    found = module(*given)
    assert isinstance(found, onnxruntime.OrtValue)
    np.testing.assert_allclose(found.numpy(), module(*batch(ROWS)), rtol=1e-6)


@inside
def test_a_state_stays_where_its_first_module_is():
    state, _, _ = load(device="cuda")
    with pytest.raises(ValueError, match="device is 'cpu', expected that of the module which the state has already"):
        Module(DIGITS / "training_model.onnx", state)


# --- what is told and refused ----------------------------------------------------------------------------------------


@inside
def test_nodes_on_the_cpu_are_named_before_the_first_step():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Trainer(digits(), device="cuda")
    text = str(told[0].message)
    assert text.startswith("Trainer: ")
    assert "nodes that have no CUDA kernel run on the CPU, and their arrays are copied: Gemm (" in text


@inside
def test_what_does_not_train_on_a_device():
    with pytest.raises(NotImplementedError, match="'emb' is trained by rows"):
        Trainer(ArtifactSet.load(EXAMPLES / "digits_attention"), row_wise=["emb"], device="cuda")
    with pytest.raises(NotImplementedError, match="device is 'cuda', expected 'cpu' with a process_group"):
        load(device="cuda", process_group=object())
    packed = replace(digits(), frozen={"packed": np.zeros(3, np.uint8)})
    with pytest.raises(
        NotImplementedError, match="'packed' is a weight of uint8, which is not trained on a CUDA device"
    ):
        Trainer(packed, device="cuda")


def no_device():
    try:
        return not driver.library()
    except driver.DriverError:
        return True


@outside
@pytest.mark.skipif(not no_device(), reason="there is a device")
def test_without_a_device(tmp_path):
    has_provider = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    lacks = (
        "there is no .*, CUDA's driver; expected an NVIDIA GPU" if has_provider else "has no CUDA provider, expected"
    )
    for make in (lambda: Trainer(digits(), device="cuda:0"), lambda: load(device="cuda:0")):
        with pytest.raises(RuntimeError, match=f"device is 'cuda:0', but .*{lacks}.*; or device 'cpu'"):
            make()
    status, said = cli("train", DIGITS, "--device", "cuda", "--output", tmp_path / "run")
    assert status == 1
    assert "train: device is 'cuda', but " in " ".join(said.split())
    assert not (tmp_path / "run").exists()


@outside
@pytest.mark.parametrize("name", ["cuda:x", "metal", "cpu:", "cuda:"])
def test_devices_of_other_names(name):
    with pytest.raises(NotImplementedError, match=f"device is {name!r}, expected 'cpu', 'cuda' or 'cuda:0'"):
        Trainer(digits(), device=name)
