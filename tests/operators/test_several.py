"""Operators on lists of arrays: what their examples do not show."""

import numpy as np
import pytest
from onnx_models import one_node, run

import opgrad

ONES = [np.ones((2, 3), np.float32), np.ones(4, np.float32)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: opgrad.reduce_all_l2([]), ValueError, "reduce_all_l2: arrays is empty, expected at least one array"),
        (lambda: opgrad.reduce_all_l2(ONES[0]), TypeError, "reduce_all_l2: arrays is ndarray, expected a list"),
        (
            lambda: opgrad.reduce_all_l2([ONES[0], ONES[1].astype("f8")]),
            TypeError,
            r"reduce_all_l2: arrays\[1\] has dtype float64, expected float32, the dtype of arrays\[0\]",
        ),
        (
            lambda: opgrad.concat_training([ONES[0], np.ones((2, 4), np.float32)]),
            ValueError,
            r"concat_training: arrays\[1\] has shape \(2, 4\), expected \(2, 3\)",
        ),
        (lambda: opgrad.concat_training(ONES), ValueError, r"concat_training: arrays\[1\] has shape \(4,\)"),
        (lambda: opgrad.concat_training([ONES[0]], axis=2), ValueError, "concat_training: axis is 2"),
        (
            lambda: opgrad.split_training(ONES[0], (1, 2)),
            ValueError,
            r"split_training: split is \(1, 2\), expected sizes of at least 0 that add up to 2",
        ),
        (lambda: opgrad.split_training(ONES[0], (3, -1)), ValueError, "split_training: split is"),
        (
            lambda: opgrad.is_all_finite(ONES, isinf_only=True, isnan_only=True),
            ValueError,
            "is_all_finite: isinf_only and isnan_only are both set",
        ),
        (
            lambda: opgrad.mixed_precision_scale(np.ones(2, np.float32), ONES),
            ValueError,
            r"mixed_precision_scale: scale has shape \(2,\)",
        ),
        (
            lambda: opgrad.sgd_optimizer(np.float32(0.1), ONES, ONES[:1]),
            ValueError,
            "sgd_optimizer: gradients has 1 arrays, expected 2, as many as weights",
        ),
        (
            lambda: opgrad.sgd_optimizer(np.float32(0.1), ONES, ONES[::-1]),
            ValueError,
            r"sgd_optimizer: gradients\[0\] has shape \(4,\), expected \(2, 3\), the shape in weights",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_adamw_is_refused_without_a_step_and_writes_nothing():
    lists = [[array.copy() for array in ONES] for _ in range(4)]
    weights, _, first, second = lists
    for options, message in (
        ({"step": 0}, "step is 0, expected at least 1"),
        ({"adam_mode": 2}, "adam_mode is 2, expected 0 or 1"),
        ({"correct_bias": False}, "correct_bias is False, expected True with adam_mode 0"),
        ({"beta": 1.5}, "beta is 1.5, expected 0 to 1"),
    ):
        step = np.int64(options.pop("step", 1))
        with pytest.raises(ValueError, match=f"^adamw_optimizer: {message}"):
            opgrad.adamw_optimizer(np.float32(0.1), step, *lists, **options, out=(weights, first, second))
    for array, ones in zip([*weights, *first, *second], ONES * 3, strict=True):
        np.testing.assert_array_equal(array, ones)


def test_an_optimizer_step_in_place():
    weights, gradients = [array.copy() for array in ONES], [2 * array for array in ONES]
    moments = [[np.zeros_like(array) for array in ONES] for _ in range(2)]
    expected = opgrad.adamw_optimizer(np.float32(0.1), np.int64(1), weights, gradients, *moments)
    out = (weights, *moments)
    returned = opgrad.adamw_optimizer(np.float32(0.1), np.int64(1), weights, gradients, *moments, out=out)
    for got, same, wanted in zip(out, returned, expected, strict=True):
        for a, b, c in zip(got, same, wanted, strict=True):
            assert a is b
            np.testing.assert_array_equal(a, c)


def test_clipping_scales_to_the_norm_and_spreads_nan():
    clipped = opgrad.clip_grad_norm([np.full(9, 4, np.float32), np.full(7, 4, np.float32)], max_norm=2.0)
    assert float(opgrad.reduce_all_l2(clipped)) == pytest.approx(2.0, rel=1e-6)
    assert all(np.isnan(each).all() for each in opgrad.clip_grad_norm([np.array([np.nan, 1.0]), np.ones(3)]))


def test_the_norm_of_large_numbers_does_not_overflow():
    assert float(opgrad.reduce_all_l2([np.full(4, 1e30, np.float32)])) == pytest.approx(2e30)
    assert float(opgrad.reduce_all_l2([np.full(4, 60000, np.float16)])) == pytest.approx(1.2e5, rel=1e-3)


def test_arrays_of_other_libraries_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(NotImplementedError, match=r"^reduce_all_l2: no kernel for other arrays than NumPy's"):
        opgrad.reduce_all_l2([torch.ones(3)])


def test_hundreds_of_inputs_of_a_node():
    names = [f"array{i}" for i in range(400)]
    feeds = {name: np.full((2, 3, 1), i, np.float32) for i, name in enumerate(names)}
    (norm,) = run(one_node("ReduceAllL2", [(name, "float32") for name in names], [("norm", "float32")]), feeds)
    assert float(norm) == pytest.approx(np.sqrt(6 * np.sum(np.square(np.arange(400.0)))), rel=1e-6)
    many = {"array0": np.ones((1,) * 9, np.float32)}
    with pytest.raises(Exception, match="has 9 dimensions, expected at most 8"):
        run(one_node("ReduceAllL2", [(name, "float32") for name in names], [("norm", "float32")]), feeds | many)


def test_a_split_that_does_not_fit_the_node():
    x, split = np.ones((3, 2), np.float32), np.array([1, 2])
    inputs = [("x", "float32"), ("split", "int64")]
    with pytest.raises(Exception, match="split has 2 entries, expected 1, one for each result"):
        run(one_node("SplitTraining", inputs, [("piece", "float32")]), {"x": x, "split": split})
    with pytest.raises(Exception, match="expected sizes of at least 0 that add up to 3"):
        run(one_node("SplitTraining", inputs, [("a", "float32"), ("b", "float32")]), {"x": x, "split": split + 1})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_])
def test_long_rows_are_copied_past_the_cache_bit_by_bit(monkeypatch, dtype):
    """Rows that start anywhere, signalling NaN among them; rows of no whole words are copied as any other."""
    monkeypatch.setattr("opgrad.cpu.runtime.program.streams", lambda size: True)
    size, split = np.dtype(dtype).itemsize, (601, 1200, 0, 3)
    memory = np.random.default_rng(0).integers(0, 2 if dtype == np.bool_ else 256, 5 * 1804 * size + size, np.uint8)
    if dtype == np.float32:
        memory[: 400 * size] = np.tile(np.array([1, 0, 0xA0, 0x7F], np.uint8), 400)
    x = memory[size:].view(dtype).reshape(5, 1804)
    pieces = opgrad.split_training(x, split, axis=1)
    expected = np.split(x, np.cumsum(split)[:-1], axis=1)
    assert [each.tobytes() for each in pieces] == [each.tobytes() for each in expected]
    out = np.empty_like(memory)[size:].view(dtype).reshape(5, 1804), np.empty(4, np.int64)
    joined, _ = opgrad.concat_training(pieces, axis=1, out=out)
    assert joined.tobytes() == x.tobytes()
