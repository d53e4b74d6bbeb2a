"""Cross-entropy over the last axis, with dense and with sparse labels."""

import re

import numpy as np
import pytest
from accuracy import differences

import opgrad

INF, NAN = np.inf, np.nan
LOGITS = np.array([[1, 2, 3, 4], [0, -1, 2, 0.5], [-3, 1, 1, 1]], np.float32)
DENSE = np.array([[0.2, 0.3, 0.5, 0], [1, 0, 0, 0], [0, 0, 0, 1]], np.float32)
LABELS, WEIGHT = np.array([0, 3, 1]), np.array([1, 2, 0.5], np.float32)
LOG_PROB = opgrad.log_softmax(LOGITS)
TWO = np.array(2, np.float32)
# What onnxruntime-training 1.19.2 gave for these.
LOSSES = {
    ("dense", "mean"): 1.8624128103256226, ("dense", "sum"): 5.587238311767578,
    ("sparse", "mean"): 2.129079580307007, ("sparse", "sum"): 6.387238502502441,
    ("weighted", "mean"): 2.1934969425201416, ("weighted", "sum"): 7.677238941192627,
}  # fmt: skip
SLOPES = {  # of the sum, for dy = 2
    "dense": [
        -0.3358827829360962, -0.42571139335632324, -0.5262343883514404, 1.2878284454345703,
        -1.807796835899353, 0.07070757448673248, 1.4201997518539429, 0.3168894052505493,
        0.012136328965425491, 0.662621259689331, 0.662621259689331, -1.337378740310669,
    ],
    "sparse": [
        -1.935882806777954, 0.17428861558437347, 0.47376561164855957, 1.2878284454345703,
        0.19220316410064697, 0.07070757448673248, 1.4201997518539429, -1.6831105947494507,
        0.012136328965425491, -1.337378740310669, 0.662621259689331, 0.662621259689331,
    ],
    "weighted": [
        -1.935882806777954, 0.17428861558437347, 0.47376561164855957, 1.2878284454345703,
        0.38440632820129395, 0.14141514897346497, 2.8403995037078857, -3.3662211894989014,
        0.006068164482712746, -0.6686893701553345, 0.3313106298446655, 0.3313106298446655,
    ],
}  # fmt: skip
DIVISORS = {"dense": 3, "sparse": 3, "weighted": 3.5}


def of(kind):
    """The forward function, the gradient, and what both take behind the logits."""
    if kind == "dense":
        return opgrad.softmax_cross_entropy, opgrad.softmax_cross_entropy_grad, (DENSE,)
    more = (LABELS, WEIGHT) if kind == "weighted" else (LABELS,)
    return opgrad.sparse_softmax_cross_entropy, opgrad.sparse_softmax_cross_entropy_grad, more


@pytest.mark.parametrize("kind", SLOPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_agrees_with_the_original(kind, reduction):
    forward, backward, more = of(kind)
    loss, log_prob = forward(LOGITS, *more, reduction=reduction)
    np.testing.assert_allclose(loss, LOSSES[kind, reduction], rtol=1e-6)
    np.testing.assert_allclose(log_prob, LOG_PROB, rtol=1e-6)
    slope = backward(TWO, log_prob, *more, reduction=reduction)
    divisor = DIVISORS[kind] if reduction == "mean" else 1
    np.testing.assert_allclose(slope.ravel(), np.divide(SLOPES[kind], divisor), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", SLOPES)
def test_no_reduction(kind):
    """A loss, and a dy, for each sample, where the original adds them up and takes the first."""
    forward, backward, more = of(kind)
    losses, _ = forward(LOGITS, *more, reduction="none")
    assert losses.shape == (3,)
    np.testing.assert_allclose(losses.sum(), LOSSES[kind, "sum"], rtol=1e-6)
    dy = np.array([2, -4, 0], np.float32)
    slope = backward(dy, LOG_PROB, *more, reduction="none")
    np.testing.assert_allclose(slope, np.reshape(SLOPES[kind], (3, 4)) * dy[:, None] / 2, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", SLOPES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_gradient_is_the_derivative(kind, reduction, rng):
    forward, backward, more = of(kind)
    more = [array.astype("f8") if array.dtype.kind == "f" else array for array in more]
    x, dy = rng.normal(size=(3, 4)), rng.normal(size=3 if reduction == "none" else ())
    exact = differences(lambda moved: forward(moved, *more, reduction=reduction)[0], x, dy, 1e-5)
    slope = backward(dy, opgrad.log_softmax(x), *more, reduction=reduction)
    np.testing.assert_allclose(slope, exact, atol=1e-9)


@pytest.mark.parametrize("shape", [(40_000, 10), (3, 200_001), (600, 700), (50, 7, 300)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sparse_labels_are_one_hot_dense_ones(shape, reduction, rng):
    logits, labels = rng.normal(0, 3, shape), rng.integers(0, shape[-1], shape[:-1])
    onehot = (labels[..., None] == np.arange(shape[-1])).astype("f8")
    sparse = opgrad.sparse_softmax_cross_entropy(logits, labels, reduction=reduction)
    dense = opgrad.softmax_cross_entropy(logits, onehot, reduction=reduction)
    np.testing.assert_allclose(dense[0], sparse[0], rtol=1e-12)
    np.testing.assert_allclose(dense[1], sparse[1], rtol=1e-12)
    dy = rng.normal(size=sparse[0].shape)
    slopes = [
        opgrad.sparse_softmax_cross_entropy_grad(dy, sparse[1], labels, reduction=reduction),
        opgrad.softmax_cross_entropy_grad(dy, sparse[1], onehot, reduction=reduction),
    ]
    np.testing.assert_allclose(*slopes, rtol=1e-12, atol=1e-300)


def test_sparse_labels_agree_with_the_loss_over_axis_1(rng):
    logits, labels = rng.normal(size=(60, 300)).astype("f4"), rng.integers(0, 300, 60)
    for got, expected in zip(
        opgrad.sparse_softmax_cross_entropy(logits, labels),
        opgrad.softmax_cross_entropy_loss(logits, labels),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


def test_masked_classes_and_nan():
    logits = np.array([[0, -INF, 0], [NAN, 0, 0]], np.float32)
    dense = np.array([[0.5, 0, 0.5], [0, 0, 1]], np.float32)
    losses, log_prob = opgrad.softmax_cross_entropy(logits, dense, reduction="none")
    np.testing.assert_allclose(losses, [np.log(2), NAN], rtol=1e-6)
    np.testing.assert_array_equal(log_prob[0, 1], -INF)
    losses, _ = opgrad.sparse_softmax_cross_entropy(logits, np.array([1, 2]), reduction="none")
    np.testing.assert_array_equal(losses, [INF, NAN])


def test_nothing_to_divide_by():
    zero = np.zeros(3, np.float32)
    loss, log_prob = opgrad.sparse_softmax_cross_entropy(LOGITS, LABELS, zero)
    assert loss == 0
    np.testing.assert_array_equal(opgrad.sparse_softmax_cross_entropy_grad(TWO, log_prob, LABELS, zero), 0)
    empty = LOGITS[:0]
    assert opgrad.sparse_softmax_cross_entropy(empty, LABELS[:0])[0] == 0
    assert opgrad.softmax_cross_entropy(empty, empty)[0] == 0
    assert opgrad.softmax_cross_entropy(empty, empty, reduction="none")[0].shape == (0,)
    no_class = LOGITS[:, :0]
    np.testing.assert_array_equal(opgrad.softmax_cross_entropy(no_class, no_class, reduction="none")[0], [0, 0, 0])
    assert opgrad.softmax_cross_entropy_grad(TWO, no_class, no_class).shape == (3, 0)


def test_in_place():
    for kind in ("dense", "weighted"):
        forward, backward, more = of(kind)
        x, loss = LOGITS.copy(), np.empty((), np.float32)
        expected = forward(LOGITS, *more)
        assert forward(x, *more, out=(loss, x))[1] is x
        np.testing.assert_array_equal(x, expected[1])
        np.testing.assert_array_equal(loss, expected[0])
        slope = backward(TWO, x, *more)
        np.testing.assert_array_equal(backward(TWO, x, *more, out=x), slope)


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_a_wrong_label_is_named_before_anything_is_written(wrong):
    labels = np.array([[0, 1, 2], [3, wrong, -7]])
    logits = np.zeros((2, 3, 4), np.float32)
    out = np.full_like(logits, 7)
    text = f"labels[1, 1] is {wrong}, expected 0 to 3"
    with pytest.raises(ValueError, match=f"^sparse_softmax_cross_entropy: {re.escape(text)}$"):
        opgrad.sparse_softmax_cross_entropy(logits, labels, out=(np.empty((), np.float32), out))
    with pytest.raises(ValueError, match=f"^sparse_softmax_cross_entropy_grad: {re.escape(text)}$"):
        opgrad.sparse_softmax_cross_entropy_grad(TWO, logits, labels, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda f, s: s(LOGITS, LABELS[:2]), ValueError, "labels has shape (2,), expected (3,), that of the logits"),
        (lambda f, s: s(LOGITS, LABELS, WEIGHT[:2]), ValueError, "weight has shape (2,), expected (3,), the shape of"),
        (lambda f, s: s(LOGITS, DENSE[:, 0]), TypeError, "labels has dtype float32, expected one of int32, int64"),
        (lambda f, s: s(LOGITS, LABELS, reduction="all"), ValueError, "reduction is 'all', expected one of none, mean"),
        (lambda f, s: f(LOGITS, DENSE[:2]), ValueError, "labels has shape (2, 4), expected (3, 4), that of the logits"),
        (lambda f, s: f(LOGITS[0, 0], DENSE), ValueError, "logits has 0 dimensions, expected at least 1"),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=f"softmax_cross_entropy: {re.escape(text)}"):
        call(opgrad.softmax_cross_entropy, opgrad.sparse_softmax_cross_entropy)


def test_errors_of_dy():
    text = re.escape("dy has shape (3,), expected (), what the reduction gives")
    with pytest.raises(ValueError, match=f"^softmax_cross_entropy_grad: {text}"):
        opgrad.softmax_cross_entropy_grad(WEIGHT, LOG_PROB, DENSE)
    with pytest.raises(ValueError, match=f"^sparse_softmax_cross_entropy_grad: {text}"):
        opgrad.sparse_softmax_cross_entropy_grad(WEIGHT, LOG_PROB, LABELS)
