"""The losses of onnxblock and their gradients, batches in which no label counts, and what a loss compares."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from small_models import build, gradients_of, normal, perceptron, run, set_of

from opgrad.onnxruntime import lower
from opgrad.training import Dataset, Trainer, onnxblock, read_checkpoint
from opgrad.training.api import CheckpointState, Module
from opgrad.training.artifacts import LossType, generate_artifacts
from opgrad.training.files.artifact_set import Objective, find_objective, note_outputs
from opgrad.training.onnxblock import blocks, loss
from opgrad.training.onnxblock.loss import CrossEntropyLoss, NLLLoss

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
    made = generate_artifacts(model, ["x", "w"], loss=block, artifact_directory=folder, precision="model")
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
    made = generate_artifacts(model, loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path)
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
    made = generate_artifacts(build(text, {"w": np.ones(5, np.float32)}), loss=Kept(), artifact_directory=tmp_path)
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


X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
IGNORED_WEIGHT = np.array([1, 2, 0.5], np.float32)
IGNORED = -7
NOTHING = np.array([0, 1, 0.5], np.float32)  # of the weights of classes
ALL = np.full(6, IGNORED)


def of_log_probabilities(function):
    """Log-probabilities by LogSoftmax, which training joins with the loss, or by other nodes."""
    text = f"g (float[batch, 4] x) => (float[batch, 3] scores) {{ h = Gemm(x, w0, b0)  m = MatMul(h, w1)  {function} }}"
    return build(text, normal(w0=(4, 5), b0=(5,), w1=(5, 3)))


LOSSES = {
    "cross-entropy": (perceptron, CrossEntropyLoss(ignore_index=IGNORED)),
    "weighted": (perceptron, CrossEntropyLoss(IGNORED_WEIGHT, ignore_index=IGNORED)),
    "smoothed": (perceptron, CrossEntropyLoss(ignore_index=IGNORED, label_smoothing=0.1)),
    "weighted, smoothed": (perceptron, CrossEntropyLoss(IGNORED_WEIGHT, ignore_index=IGNORED, label_smoothing=0.1)),
    "nll": (lambda: of_log_probabilities("scores = LogSoftmax(m)"), NLLLoss(ignore_index=IGNORED)),
    "nll of others": (
        lambda: of_log_probabilities("p = Softmax(m) scores = Log(p)"),
        NLLLoss(IGNORED_WEIGHT, ignore_index=IGNORED),
    ),
}


WITHOUT_WEIGHT = {  # labels 0 have the weight 0
    "of weight 0": (perceptron, CrossEntropyLoss(NOTHING)),
    "of weight 0, smoothed": (perceptron, CrossEntropyLoss(NOTHING, label_smoothing=0.1)),
    "nll of weight 0": (LOSSES["nll"][0], NLLLoss(NOTHING)),
    "nll of others of weight 0": (LOSSES["nll of others"][0], NLLLoss(NOTHING)),
}


@pytest.mark.parametrize("name", [*LOSSES, *WITHOUT_WEIGHT])
def test_no_label_counts(name, tmp_path):
    (model, loss), labels = (LOSSES | WITHOUT_WEIGHT)[name], ALL if name in LOSSES else np.zeros_like(ALL)
    artifacts, batch = set_of(model(), tmp_path, loss), {"x": X, "labels": labels}
    trainer, values = Trainer(artifacts, 0.5), read_checkpoint(tmp_path / "checkpoint").parameters
    found = [trainer.step(batch), trainer.evaluate(Dataset(batch, artifacts.axes)).loss]
    for key, array in values.items():
        np.testing.assert_array_equal(trainer.parameters[key], array)
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    for mode in (module.train, module.eval):
        mode()
        found.append(np.asarray(module(X, labels)).item())
    feeds = {**batch, **values}
    found.append(onnxruntime.InferenceSession(tmp_path / "eval_model.onnx").run(None, feeds)[0].item())
    lowered = lower(tmp_path / "eval_model.onnx").SerializeToString()
    found.append(onnxruntime.InferenceSession(lowered).run(None, feeds)[0].item())
    assert found == [0.0] * 6


def test_a_label_that_int32_does_not_hold(tmp_path):
    text = """g (float[n, 4] x, int32[n] labels) => (float loss) {
        s = MatMul(x, w)  loss = SoftmaxCrossEntropyLoss<ignore_index = 4294967296>(s, labels)
    }"""
    artifacts = set_of(build(text, normal(w=(4, 3))), tmp_path, None)
    labels = np.arange(len(X)).astype(np.int32) % 3
    batch, w = {"x": X, "labels": labels}, read_checkpoint(tmp_path / "checkpoint").parameters["w"]
    scores = (X @ w).astype(np.float64)
    exact = np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(X)), labels])
    found = [Trainer(artifacts, 0.0).step(batch), Trainer(artifacts, 0.0).evaluate(Dataset(batch, artifacts.axes)).loss]
    np.testing.assert_allclose(found, exact, rtol=1e-5)


def objective(text, inputs, noted=(), weights=(), **more):
    model = build(text, {**normal(w=(4, 3)), **dict(weights)}, **more)
    if noted:
        note_outputs(model, noted)
    return find_objective(model, model.graph.output[0].name, inputs)


INSIDE = """g (int64[n, 6] ids, int64[n, 6] labels, float[4, 3] table) => (float loss{outputs}) {{
    e = Gather(table, ids)  logits = Relu(e)  {before}
    loss = SoftmaxCrossEntropyLoss<ignore_index = -100>(flat, target)
}}"""
SHIFTED = """one = Constant<value_ints = [1]>()  end = Constant<value_ints = [6]>()  axis = Constant<value_ints = [1]>()
    start = Constant<value_ints = [0]>()  last = Constant<value_ints = [5]>()  rows = Constant<value_ints = [-1, 3]>()
    all = Constant<value_ints = [-1]>()
    s = Slice(logits, start, last, axis)  flat = Reshape(s, rows)
    t = Slice(labels, one, end, axis)  target = Reshape(t, all)"""
FLAT = """rows = Constant<value_ints = [-1, 3]>()  all = Constant<value_ints = [-1]>()
    flat = Reshape(logits, rows)  target = Reshape(labels, all)"""


@pytest.mark.parametrize(("before", "every"), [(SHIFTED, False), (FLAT, True)])
@pytest.mark.parametrize("outputs", ["", ", float[n, 6, 3] logits"])
def test_a_loss_inside_the_model(before, every, outputs):
    """GPT-2's, of labels that it shifts; the scores are exported as they were before the loss took them."""
    found = objective(INSIDE.format(before=before, outputs=outputs), ["ids", "labels"])
    assert found == Objective("flat", "labels", "target", -100, every, ("logits",))


def test_labels_that_are_the_data():
    """A language model whose only input is text."""
    text = INSIDE.format(before=SHIFTED, outputs="").replace("int64[n, 6] labels, ", "").replace("labels", "ids")
    found = objective(text, ["ids"])
    assert (found.label, found.classes, found.every, found.outputs) == (None, "target", False, ("logits",))


def test_a_label_that_is_not_the_last_input():
    text = """g (float[n, 4] x, int64[n] y, float[n, 3] mask, float[4, 3] v) => (float loss) {
        m = MatMul(x, v)  s = Mul(m, mask)  p = LogSoftmax(s)  loss = NegativeLogLikelihoodLoss(p, y)
    }"""
    found = objective(text, ["x", "y", "mask"])
    assert found == Objective("p", "y", "y", None, True, ("p",))
    assert objective(text, ["x", "y", "mask"], noted=["s"]).outputs == ("s",)


def test_what_a_loss_writes_itself_is_not_exported():
    """BCEWithLogitsLoss of 1.19.2 begins with a sigmoid, and calls its values onnx::…::n."""
    model = build(
        """g (float[n, 4] x, float[n, 3] t, float[4, 3] v) => (float loss) {
            score = MatMul(x, v)  p = Sigmoid(score)  d = Sub(p, t)  q = Mul(d, d)  loss = ReduceMean<keepdims = 0>(q)
        }"""
    )
    assert find_objective(model, "loss", ["x", "t"]).outputs == ("p",)
    model.graph.node[1].output[0] = model.graph.node[2].input[0] = "onnx::sigmoid_output::5"
    found = find_objective(model, "loss", ["x", "t"])
    assert (found.scores, found.classes, found.outputs) == ("onnx::sigmoid_output::5", None, ("score",))


def test_whole_numbers_are_no_scores():
    """The last that all ways pass before the label may be a shape."""
    text = """g (float[n, 4] x, float[n, 4] t, float[4, 4] v) => (float loss) {
        m = MatMul(x, v)  shape = Shape(x)  r = Reshape(t, shape)  d = Sub(m, r)  loss = ReduceMean<keepdims = 0>(d)
    }"""
    assert objective(text, ["x", "t"]).scores == "m"


def test_no_scores():
    """Two things are compared whose likeness is the label; what the model had as outputs is exported, or the loss."""
    text = """g (float[n, 4] a, float[n, 4] b, float[n, 1] t, float[4, 3] v) => (float loss) {
        e = MatMul(a, v)  f = MatMul(b, v)  et = Mul(e, t)  ft = Mul(f, t)
        d = Sub(et, ft)  loss = ReduceMean<keepdims = 0>(d)
    }"""
    found = objective(text, ["a", "b", "t"])
    assert found == Objective(None, "t", None, None, False, ("loss",))
    assert objective(text, ["a", "b", "t"], noted=["e", "f", "et", "loss"]).outputs == ("e", "f")
    assert objective(text, ["a"]).scores is None


def test_the_ignored_class_may_be_an_input():
    text = """g (float[n, 3] x, int64[n] y) => (float loss) {
        s = MatMul(x, v)  loss, p = com.microsoft.SoftmaxCrossEntropyLossInternal(s, y, , ignored)
    }"""
    model = build(text, normal(v=(3, 3)))
    model.graph.initializer.append(onnx.helper.make_tensor("ignored", onnx.TensorProto.INT64, (), [7]))
    assert find_objective(model, "loss", ["x", "y"]).ignored == 7


def test_damaged_graphs():
    """A circle, a loss without labels, notes that are none."""
    model = build(
        """g (float[n, 3] x, int64[n] y) => (float loss) {
            s = Reshape(s, shape)  loss = SoftmaxCrossEntropyLoss(s, y)
        }"""
    )
    model.metadata_props.add(key="opgrad.outputs", value="{")
    assert find_objective(model, "loss", ["x", "y"]).outputs == ("s",)
    model.metadata_props[0].value = "3"
    del model.graph.node[1].input[1:]
    assert find_objective(model, "loss", ["x", "y"]).scores is None


@pytest.mark.parametrize(
    ("noted", "outputs"), [(["p"], ("s",)), (["h"], ("s",)), (["h", "p"], ("s",)), (["s", "p"], ("s",))]
)
def test_scores_that_no_output_determines_are_exported(noted, outputs):
    """Such as what a softmax at the end takes, or what a weight makes of an output."""
    text = """g (float[n, 4] x, int64[n] labels, float[4, 3] v) => (float loss) {
        h = Relu(x)  s = MatMul(h, v)  p = Softmax(s)  loss = SoftmaxCrossEntropyLoss(s, labels)
    }"""
    assert objective(text, ["x", "labels"], noted).outputs == outputs
