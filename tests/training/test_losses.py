"""The losses of onnxblock and their gradients, as PyTorch computes them."""

import numpy as np
import pytest
import torch
from small_models import build, gradients_of, run

from opgrad.training import artifacts, onnxblock
from opgrad.training.onnxblock import blocks, loss

F = torch.nn.functional
RANDOM = np.random.default_rng(0)
SCORES, TARGET, SHARES = 3 * RANDOM.standard_normal((6, 5)), RANDOM.standard_normal((6, 5)), RANDOM.random((6, 5))
DIVISION = SHARES / SHARES.sum(1, keepdims=True) * (np.arange(5) > 0)
CLASSES, TEXT, IMAGE = RANDOM.integers(0, 5, 6), RANDOM.standard_normal((2, 3, 5)), RANDOM.standard_normal((2, 5, 3, 4))
WEIGHT, MORE = torch.arange(5) / 4 + 0.5, torch.arange(5) / 2
HUGE = np.array([[200, -200, 0, 90, -90]])
TYPES = {"float32": ("float", 2e-5), "float64": ("double", 1e-9), "float16": ("float16", 2e-3)}


class Summed(onnxblock.Block):
    """A loss of each element, summed, as a user's own block would."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def build(self, name):
        return blocks.ReduceSum(keepdims=False)(self.inner(name))


def check(block, expected, scores, target, folder, dtype="float32"):
    kind, tolerance = TYPES[dtype]
    scores, ones = scores.astype(dtype), np.ones(scores.shape[-1:], dtype)
    target = target if target.dtype.kind == "i" else target.astype("float32" if dtype == "float16" else dtype)
    shape = ", ".join(map(str, scores.shape))
    model = build(f"g ({kind}[{shape}] x) => ({kind}[{shape}] y) {{ y = Mul(x, w) }}", {"w": ones})
    made = artifacts.generate_artifacts(model, ["x", "w"], loss=block, artifact_directory=folder, precision="model")
    feeds = {"x": scores, made.inputs[1]: target, "w": ones}
    (evaluated,) = run(folder / "eval_model.onnx", feeds)
    found, dx, _ = run(gradients_of(folder / "training_model.onnx"), feeds)
    exact = torch.tensor(scores.astype("float64"), requires_grad=True)
    value = expected(exact, torch.tensor(target if target.dtype.kind == "i" else target.astype("float64"))).sum()
    value.backward()
    np.testing.assert_allclose([evaluated.item(), found.item()], value.item(), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(dx, exact.grad.numpy(), rtol=tolerance, atol=tolerance)


PAIRS = {
    "mse": (loss.MSELoss(), F.mse_loss, TARGET),
    "l1 sum": (loss.L1Loss("sum"), lambda x, t: F.l1_loss(x, t, reduction="sum"), TARGET),
    "huber": (loss.HuberLoss(delta=0.7), lambda x, t: F.huber_loss(x, t, delta=0.7), TARGET),
    "smooth l1": (loss.SmoothL1Loss(beta=0.7), lambda x, t: F.smooth_l1_loss(x, t, beta=0.7), TARGET),
    "smooth l1 of 0": (loss.SmoothL1Loss(beta=0), F.l1_loss, TARGET),
    "bce": (
        loss.BCEWithLogitsLoss(WEIGHT.numpy(), "mean", MORE.numpy()),
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, WEIGHT, pos_weight=MORE),
        SHARES,
    ),
    "kl": (loss.KLDivLoss("batchmean"), lambda x, t: F.kl_div(x, t, reduction="batchmean"), DIVISION),
    "kl of logarithms": (
        loss.KLDivLoss("sum", log_target=True),
        lambda x, t: F.kl_div(x, t, reduction="sum", log_target=True),
        TARGET,
    ),
    "mse of elements": (Summed(loss.MSELoss("none")), lambda x, t: F.mse_loss(x, t, reduction="sum"), TARGET),
}


@pytest.mark.parametrize("name", PAIRS)
def test_losses_of_numbers(name, tmp_path):
    block, expected, target = PAIRS[name]
    check(block, expected, SCORES, target, tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("name", ["huber", "bce", "kl"])
def test_losses_of_other_types(name, dtype, tmp_path):
    block, expected, target = PAIRS[name]
    check(block, expected, SCORES, target, tmp_path, dtype)


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1), ("float64", 4)])
def test_no_score_makes_the_binary_cross_entropy_infinite(dtype, factor, tmp_path):
    target = np.array([[0, 1, 1, 0, 1]])
    check(
        loss.BCEWithLogitsLoss(),
        F.binary_cross_entropy_with_logits,
        HUGE * factor,
        target.astype(dtype),
        tmp_path,
        dtype,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_cross_entropy(reduction, weight, smoothing, tmp_path):
    ignored = 2 if reduction == "mean" else None
    block = loss.CrossEntropyLoss(None if weight is None else weight.numpy(), reduction, ignored, smoothing)
    more = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -100 if ignored is None else ignored}
    own = None if weight is None else weight.double()
    block = Summed(block) if reduction == "none" else block
    check(block, lambda x, y: F.cross_entropy(x, y, own, **more), SCORES, CLASSES, tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_cross_entropy_of_other_types(dtype, tmp_path):
    check(loss.CrossEntropyLoss(WEIGHT.numpy()), lambda x, y: F.cross_entropy(x, y, WEIGHT.double()), SCORES, CLASSES,
          tmp_path, dtype)  # fmt: skip


@pytest.mark.parametrize("smoothing", [0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_classes_of_texts_are_last_and_those_of_images_second(smoothing, reduction, tmp_path):
    more = {"reduction": reduction, "label_smoothing": smoothing}
    block = loss.CrossEntropyLoss(**more)
    block = Summed(block) if reduction == "none" else block
    labels = RANDOM.integers(0, 5, (2, 3))
    check(block, lambda x, y: F.cross_entropy(x.transpose(1, 2), y, **more), TEXT, labels, tmp_path)
    labels = RANDOM.integers(0, 5, (2, 3, 4))
    check(block, lambda x, y: F.cross_entropy(x, y, **more), IMAGE, labels, tmp_path)


def test_the_axis_of_the_classes_can_be_given(tmp_path):
    labels, scores = RANDOM.integers(0, 5, (2, 3)), np.ascontiguousarray(TEXT.transpose(0, 2, 1))
    check(loss.CrossEntropyLoss(class_axis=1), F.cross_entropy, scores, labels, tmp_path)
    moved = np.ascontiguousarray(np.moveaxis(IMAGE, 1, 2))
    labels = RANDOM.integers(0, 5, (2, 3, 4))
    check(
        loss.CrossEntropyLoss(class_axis=2), lambda x, y: F.cross_entropy(x.movedim(2, 1), y), moved, labels, tmp_path
    )


def test_the_labels_shape_tells_the_axis_of_the_classes(tmp_path):
    text = "g (float[2, 5, 3] x, int64[2, 3] labels) => (float[2, 5, 3] y) { y = Mul(x, w) }"
    model = build(text, {"w": np.ones((1, 5, 1), np.float32)})
    made = artifacts.generate_artifacts(model, loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path)
    assert made.inputs == ("x", "labels")
    x, labels = TEXT.transpose(0, 2, 1).astype(np.float32), RANDOM.integers(0, 5, (2, 3))
    (found,) = run(tmp_path / "eval_model.onnx", {"x": x, "labels": labels, "w": np.ones((1, 5, 1), np.float32)})
    np.testing.assert_allclose(found, F.cross_entropy(torch.tensor(x), torch.tensor(labels)).item(), rtol=1e-5)


def test_negative_log_likelihood(tmp_path):
    logarithms = F.log_softmax(torch.tensor(SCORES), 1).numpy()
    block = loss.NLLLoss(WEIGHT.numpy(), ignore_index=2)
    check(block, lambda x, y: F.nll_loss(x, y, WEIGHT.double(), ignore_index=2), logarithms, CLASSES, tmp_path)


def test_a_loss_of_shape_1(tmp_path):
    class Kept(onnxblock.Block):
        def build(self, name):
            return blocks.ReduceMean(keepdims=True)(blocks.Pow(3.0)(name))

    text = "g (float[n, 5] x) => (float[n, 5] y) { y = Mul(x, w) }"
    made = artifacts.generate_artifacts(
        build(text, {"w": np.ones(5, np.float32)}), loss=Kept(), artifact_directory=tmp_path
    )
    feeds = {"x": SCORES.astype(np.float32), "w": np.ones(5, np.float32)}
    found, dw = run(gradients_of(tmp_path / "training_model.onnx"), feeds)
    assert (found.shape, made.loss) == ((1, 1), "onnx::reducemean_output::4")
    np.testing.assert_allclose(dw, 3 * (SCORES**3).sum(0) / SCORES.size, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: loss.MSELoss("avg"), "MSELoss: reduction is 'avg', expected one of 'mean', 'sum', 'none'"),
        (lambda: loss.HuberLoss(delta=0), "HuberLoss: delta is 0, expected a number above 0"),
        (lambda: loss.CrossEntropyLoss(np.ones((2, 2))), "one number for each class"),
        (lambda: loss.CrossEntropyLoss([1, np.nan]), "weight has values that are not finite"),
        (lambda: loss.CrossEntropyLoss(label_smoothing=2), "label_smoothing is 2, expected 0 to 1"),
        (lambda: onnxblock.optim.AdamW(betas=(0.9, 1.0)), "AdamW: betas is"),
        (lambda: onnxblock.optim.AdamW(adam_mode=0, bias_correction=False), "AdamW: adam_mode is 0"),
        (lambda: onnxblock.optim.ClipGradNorm(0), "ClipGradNorm: max_norm is 0"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()
