"""The loss and its gradient where the original kernels differ, fail or crash; and over the last axis."""

import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from accuracy import check
from samples import bits, call, cast, for_operators, losses_and_gradients, positive_zeros, sample

import opgrad
from opgrad.contract import DTYPES, FLOATS, Spec
from opgrad.cpu.plans import plan
from opgrad.ops import operators

LOSS, LOSS_ONLY, LOSS_GRAD, FUSED = (
    operators()[f"softmax_cross_entropy_loss{end}"] for end in ("", "_only", "_grad", "_and_grad")
)
CLASSES = for_operators(lambda op: op.kind == "classes")
one_dtype = pytest.mark.one_case  # of one operator, whose every dtype is tried in test_ops
REDUCTIONS = ("none", "mean", "sum")


# --- ignored samples and divisors of 0 -------------------------------------------------------------------------


@CLASSES
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_samples_ignored(op, reduction, dtype, rng):
    arguments = sample(op, (4, 3, 5), dtype, rng, reduction=reduction, ignore_index=9)
    arguments["labels"][...] = 9
    arguments.pop("bias", None)
    loss, gradient = losses_and_gradients(op, check(op, arguments))
    assert loss is None or positive_zeros(loss)
    assert gradient is None or positive_zeros(gradient)


@CLASSES
@pytest.mark.parametrize("weights", [(0, 0, 0), (1, -1, 0)], ids=["zeros", "cancelling"])
def test_weights_that_sum_to_0(op, weights, dtype, rng):
    arguments = sample(op, (4, 3), dtype, rng, reduction="mean")
    arguments |= {"labels": np.array([0, 1, 2, 2]), "weight": cast(weights, dtype)}
    arguments.pop("bias", None)
    loss, gradient = losses_and_gradients(op, check(op, arguments))
    assert loss is None or float(loss) == 0
    assert gradient is None or positive_zeros(gradient)


@CLASSES
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_that_are_no_finite_numbers(op, reduction, dtype, rng):
    """An infinite divisor is not 0: what the formula says of it, NaN or 0, is what comes out."""
    for shape in [(6, 3), (6, 130), (2, 3, 40)]:
        arguments = sample(op, shape, dtype, rng, reduction=reduction, ignore_index=1)
        arguments.pop("bias", None)
        arguments["labels"].flat = np.arange(arguments["labels"].size) % 3
        for weights in itertools.product((1, 0, -np.inf, np.inf, np.nan), (1, np.inf), (1, 0, np.inf)):
            arguments["weight"] = cast([*weights, *[1] * (shape[1] - 3)], dtype)
            check(op, arguments, f"{shape}, weights {weights}")


@pytest.mark.parametrize("upstream", [np.inf, np.nan, 0])
def test_upstream_gradients_that_are_no_finite_numbers(upstream, rng):
    for shape, reduction in itertools.product([(6, 130), (2, 3, 40)], REDUCTIONS):
        arguments = sample(LOSS_GRAD, shape, "float32", rng, reduction=reduction, ignore_index=1)
        arguments["labels"].flat = np.arange(arguments["labels"].size) % 3
        arguments["dy"][...] = upstream
        for weight in (1, 0, np.inf):
            arguments["weight"][0] = weight
            check(LOSS_GRAD, arguments, f"{shape}, {reduction}, weight {weight}")


@CLASSES
def test_weights_of_0_do_not_hide_a_sample(op, rng):
    """Only samples that are ignored, or a mean's divisor of 0, make 0 of NaN."""
    for shape, reduction in itertools.product([(6, 3), (6, 130), (2, 3, 40)], REDUCTIONS):
        arguments = sample(op, shape, "float32", rng, reduction=reduction)
        arguments["logits" if "logits" in arguments else "log_prob"][0] = np.nan
        arguments["weight"][...] = 0
        check(op, arguments, f"{shape}, {reduction}")


def test_weights_whose_sum_has_no_inverse_in_float32(rng):
    for shape in [(6, 3), (6, 130), (2, 3, 40)]:
        arguments = sample(LOSS_GRAD, shape, "float32", rng, reduction="mean")
        arguments.pop("bias")
        arguments["weight"][...] = 1e-41
        check(LOSS_GRAD, arguments, f"{shape}")
        logits, labels, weight = arguments["log_prob"], arguments["labels"], arguments["weight"]
        _, found = opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, weight)
        _, expected = opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, np.ones_like(weight))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_large_factors_of_a_row_meet_in_float64(rng):
    """The weight times dy would overflow before it is divided by the sum of the weights."""
    arguments = sample(LOSS_GRAD, (6, 130), "float32", rng)
    arguments["weight"][...], arguments["dy"][...] = 1e-40, 1e38
    arguments.pop("bias")
    assert np.isfinite(check(LOSS_GRAD, arguments)[0]).all()


@CLASSES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_ignored_samples_may_hold_anything(op, bad, dtype, rng):
    for shape in [(6, 3), (6, 3, 40), (6, 130)]:
        for reduction in REDUCTIONS:
            arguments = sample(op, shape, dtype, rng, reduction=reduction, ignore_index=-100)
            arguments.pop("bias", None)
            rows = arguments["logits" if "logits" in arguments else "log_prob"]
            rows[1] = bad
            arguments["labels"][1] = -100
            loss, gradient = losses_and_gradients(op, check(op, arguments, f"{shape}, {reduction}"))
            assert gradient is None or positive_zeros(gradient[1])
            assert loss is None or np.isfinite(loss.astype("float64")).all()
            assert loss is None or reduction != "none" or positive_zeros(loss[1])


@one_dtype
def test_bias_is_added_to_ignored_samples_and_where_the_divisor_is_0(dtype, rng):
    for labels in (np.full(6, -1), np.array([0, 1, -1, 2, -1, 1])):
        arguments = sample(LOSS_GRAD, (6, 3), dtype, rng, ignore_index=-1) | {"labels": labels}
        (gradient,) = check(LOSS_GRAD, arguments)
        assert bits(gradient[labels == -1]) == bits(arguments["bias"][labels == -1])


@CLASSES
def test_ignore_index_inside_and_outside_the_classes(op, dtype, rng):
    for ignored in (0, 2, -1, 3, -100, 2**31, 2**62, -(2**63)):
        arguments = sample(op, (8, 3), dtype, rng, ignore_index=ignored)
        arguments["labels"][::3] = ignored
        check(op, arguments, f"ignore_index {ignored}")


def test_nothing_is_ignored_by_default(rng):
    logits = rng.normal(size=(2, 3)).astype("float32")
    with pytest.raises(ValueError, match=r"labels\[1\] is -1, expected 0 to 2"):
        opgrad.softmax_cross_entropy_loss(logits, np.array([0, -1]))


# --- loss ------------------------------------------------------------------------------------------------------


@CLASSES
@pytest.mark.parametrize("integer", ["int32", "int64"])
def test_every_option(op, integer, dtype, rng):
    shapes = [(7, 5), (3, 40, 2), (2, 5, 3, 4), (2, 3, 2, 2, 2)]
    for shape, reduction, optional in itertools.product(shapes, REDUCTIONS, (False, True)):
        for ignored in (None, 1, -1):
            options = {"integer": integer, "reduction": reduction, "optional": optional, "ignore_index": ignored}
            arguments = sample(op, shape, dtype, rng, **options)
            if ignored is not None:
                arguments["labels"].flat[::4] = ignored
            check(op, arguments, f"{shape}, ignore_index {ignored}")


@CLASSES
@pytest.mark.parametrize("result", FLOATS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(7, 5), (3, 40, 9)], ids=["rows", "columns"])
def test_out_dtype(op, result, dtype, shape, rng):
    spellings = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.dtype("f2")}
    arguments = sample(op, shape, dtype, rng, ignore_index=1)
    for each in check(op, arguments | {"out_dtype": result}, f"{shape} to {result}"):
        assert each.dtype == DTYPES[result]
    same = call(op, arguments | {"out_dtype": spellings.get(result, result)})
    assert [bits(each) for each in same] == [bits(each) for each in call(op, arguments | {"out_dtype": result})]


@for_operators(lambda op: "out_dtype" in op.attributes and len(op.results) > 1)
@pytest.mark.parametrize(
    "wanted", [("float32", "bfloat16"), ("float64", np.float16), (None, "float32"), (np.dtype("f2"), None)], ids=str
)
@pytest.mark.parametrize("shape", [(9, 5), (7, 130), (3, 40, 9)], ids=str)
def test_out_dtype_of_each_result(op, wanted, shape, rng):
    """A tuple has a dtype for each result; None stands for that of the logits."""
    for reduction in ("none", "mean"):
        arguments = sample(op, shape, "bfloat16", rng, reduction=reduction, ignore_index=1)
        results = check(op, arguments | {"out_dtype": wanted}, f"{shape} to {wanted}")
        named = [DTYPES["bfloat16"] if each is None else np.dtype(each) for each in wanted]
        assert [result.dtype for result in results] == named
        out = tuple(np.empty_like(result) for result in results)
        again = call(op, arguments | {"out_dtype": wanted, "out": out})
        assert [bits(each) for each in again] == [bits(each) for each in results]


def test_out_dtype_of_the_loss_with_the_gradient_in_place(rng):
    arguments = sample(FUSED, (9, 37), "bfloat16", rng) | {"out_dtype": ("float32", None)}
    loss, gradient = call(FUSED, arguments)
    own = arguments | {"logits": arguments["logits"].copy()}
    call(FUSED, own | {"out": (np.empty_like(loss), own["logits"])})
    assert bits(own["logits"]) == bits(gradient)
    with pytest.raises(TypeError, match="out for loss has dtype bfloat16, expected float32"):
        call(FUSED, arguments | {"out": (loss.astype(gradient.dtype), gradient)})


@CLASSES
@pytest.mark.parametrize(("dtype", "other"), [("float16", "float32"), ("float32", "float64")])
def test_other_arrays_of_another_dtype(op, dtype, other, rng):
    """Weights, dy and bias may have a dtype of their own: mixed precision with class weights can be trained."""
    arguments = sample(op, (7, 5), dtype, rng)
    names = {"weight", "dy", "bias"} & set(arguments)
    check(op, arguments | {name: arguments[name].astype(other) for name in names})


@one_dtype
def test_bias_keeps_its_place_behind_spatial_axes(dtype, rng):
    arguments = sample(LOSS_GRAD, (2, 3, 4, 5), dtype, rng, ignore_index=7)
    arguments["labels"][...] = 7
    (gradient,) = call(LOSS_GRAD, arguments)
    assert bits(gradient) == bits(arguments["bias"])


@one_dtype
def test_dy_of_one_number_has_shape_0_or_1(dtype, rng):
    arguments = sample(LOSS_GRAD, (4, 3), dtype, rng)
    expected = bits(call(LOSS_GRAD, arguments)[0])
    assert bits(call(LOSS_GRAD, arguments | {"dy": arguments["dy"].reshape(1)})[0]) == expected
    for shape in [(4,), (1, 1), (3,)]:
        with pytest.raises(ValueError, match=r"dy has shape .*, expected \(\), what the reduction gives"):
            call(LOSS_GRAD, arguments | {"dy": cast(np.ones(shape), dtype)})


def test_divisor_of_the_mean_is_summed_in_float64():
    count = 200_000
    logits = np.zeros((count, 2), np.float32)
    labels, weight = np.zeros(count, np.int64), np.full(2, 0.1, np.float32)
    loss, _ = opgrad.softmax_cross_entropy_loss(logits, labels, weight)
    np.testing.assert_allclose(loss, np.log(2), rtol=3e-7)
    loss, gradient = opgrad.softmax_cross_entropy_loss_and_grad(logits, labels, weight)
    np.testing.assert_allclose(loss, np.log(2), rtol=3e-7)
    np.testing.assert_allclose(gradient[-1], [-0.5 / count, 0.5 / count], rtol=3e-7)


def test_half_precision_mean_of_many_samples():
    """Dividing and rounding each sample's loss before the sum would lose it below float16's range."""
    count = 100_000
    logits = np.zeros((count, 2), np.float16)
    loss, _ = opgrad.softmax_cross_entropy_loss(logits, np.zeros(count, np.int32))
    assert loss == np.float16(np.log(2))


def test_half_precision_products_do_not_overflow():
    arguments = {
        "dy": np.array(60000, np.float16),
        "log_prob": np.log(np.array([[0.5, 0.5]])).astype(np.float16),
        "labels": np.array([0]),
        "weight": np.array([2, 2], np.float16),
    }
    assert np.isfinite(check(LOSS_GRAD, arguments)[0]).all()


@one_dtype
def test_log_prob_is_complete_for_ignored_samples(dtype, rng):
    arguments = sample(LOSS, (6, 5), dtype, rng, ignore_index=0)
    arguments["labels"][:3] = 0
    log_prob = call(LOSS, arguments)[1]
    assert bits(log_prob) == bits(opgrad.log_softmax(arguments["logits"], 1))


@pytest.mark.parametrize("shape", [(2, 100_000), (2, 300, 17)], ids=["row", "column"])
def test_loss_alone_of_logits_that_come_in_blocks(shape, dtype, rng):
    """What a block holds decides about the row as in one piece: -inf adds nothing, NaN and +inf make it NaN."""
    last = shape[1] - 1
    for part, value in [
        (slice(0, last), -np.inf), (slice(1, None), -np.inf), (slice(None), -np.inf), (slice(0, 1), np.nan),
        (slice(last, None), np.nan), (slice(last, None), np.inf), (slice(0, 1), 300.0), (slice(last, None), 300.0),
    ]:  # fmt: skip
        arguments = sample(LOSS_ONLY, shape, dtype, rng, reduction="none")
        arguments["logits"][0, part] = value
        arguments["labels"][0] = last
        check(LOSS_ONLY, arguments, f"{part}, {value}")
    arguments["logits"][0] = -np.inf
    arguments["logits"][0, 0] = np.nan
    assert np.isnan(check(LOSS_ONLY, arguments)[0][0].astype("float64")).all()


def test_loss_without_a_gradient_takes_no_room_for_rows():
    for op in (LOSS, LOSS_ONLY):
        specs = [Spec((64, 50_000), DTYPES["float32"]), Spec((64,), DTYPES["int64"]), None]
        assert plan(op, specs, {}).scratch_bytes < 1 << 13


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
