"""The losses with options on CUDA: every branch of the kernel, interpreted; and compiled for an architecture."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton")

import sample_losses as cases
from cuda_backend import FROM_PTX, ON_GPU, call
from sample_losses import LOSSES, OPTIONS, WITH_GRADIENT
from subprocesses import run_python

import opgrad
from opgrad.cuda import cross_entropy as kernels

pytestmark = [pytest.mark.gpu] if ON_GPU else []
SHAPES = {"short rows": (5, 33), "long rows, ends": (2, 301), "columns": (2, 7, 5)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels(name, shape, rng, monkeypatch):
    monkeypatch.setattr(kernels, "STEP", 64)
    dtype = {"smoothed": "float64", "softcap": "float16"}.get(name, "float32")
    given = cases.arguments(shape, dtype, rng, **OPTIONS[name])
    cases.check(WITH_GRADIENT, given, call(WITH_GRADIENT, given))
    alone = cases.of(LOSSES, given)
    cases.check(LOSSES, alone, call(LOSSES, alone))


def test_a_wrong_label_makes_nan():
    logits, labels = np.zeros((3, 4), np.float32), np.array([0, 7, 1])
    *results, _, dlogits = call(WITH_GRADIENT, {"logits": logits, "labels": labels})
    for each in (results[0], dlogits):
        assert np.isnan(each[1]).all()
        assert np.isfinite(each[[0, 2]]).all()


@pytest.mark.parametrize("n", [70])
def test_a_linear_layer_in_chunks_of_rows(n, rng, monkeypatch):
    """As opgrad.torch does it on a GPU: the gradient of a chunk's logits takes their place."""
    monkeypatch.setattr(kernels, "STEP", 64)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((7, 5), (n, 5)))
    labels, options = np.array([3, 1, 0, n - 1, 8, 1, 2]), {"ignore_index": 1, "label_smoothing": 0.1, "softcap": 3.0}
    output, *expected, _ = opgrad.linear_cross_entropy_and_grad(x, w, labels, reduction="sum", **options)
    every = [np.empty(len(x), dtype) for dtype in ("f4", "f4", "f4", "f4", "i8")]
    buffer, dx, dw = np.empty((3, n), np.float32), np.empty_like(x), np.zeros_like(w)
    for start in range(0, len(x), len(buffer)):
        rows = slice(start, start + len(buffer))
        logits = np.matmul(x[rows], w.T, out=buffer[: len(x[rows])])
        call(WITH_GRADIENT, {"logits": logits, "labels": labels[rows], **options,
                             "out": (*[each[rows] for each in every], logits)})  # fmt: skip
        dx[rows] = logits @ w
        dw += logits.T @ x[rows]
    for found, exact in ((every[0].sum(), output.loss), (every[1], output.lse), (dx, expected[0]), (dw, expected[1])):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)


COMPILE = """
import numpy as np
from opgrad.contract import DTYPES, Spec
from opgrad.ops import loss_operators
from opgrad.contract.signature import prepare
from opgrad.cuda.inspect import compiled
dtype, n, inner, options = CASE
for op in loss_operators().values():
    shape, samples = (64, n, *inner), (64, *inner)
    specs = {"logits": Spec(shape, DTYPES[dtype]), "labels": Spec(samples, DTYPES["int64"])}
    if "probabilities" in options:
        specs["probabilities"] = specs["logits"]
        specs["weight"] = Spec((n,), DTYPES[dtype])
    if "dentropy" in op.inputs:
        specs["dentropy"] = Spec(samples, DTYPES["float32"])
    attributes = {name: value for name, value in options.items() if name != "probabilities"}
    problem = prepare(op, [specs.get(name) for name in op.inputs], attributes, any_stride=True)
    for report in compiled(op.kernel("opgrad.cuda")(problem)):
        assert report.spilled == 0, (op.name, dtype, n, report.name, report.spilled)
        assert report.registers <= 255
"""
CASES = [
    ("bfloat16", 50257, (), {"softcap": 30.0, "label_smoothing": 0.1}),
    ("float32", 128256, (), {"probabilities": True}),
    ("float64", 1000, (), {"label_smoothing": 0.1}),
    ("float16", 19, (32,), {"temperature": 0.7}),
]


@pytest.mark.skipif(ON_GPU or bool(FROM_PTX), reason="the kernels run there")
@pytest.mark.one_case
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_kernels_compile_without_spills(case):
    run_python(COMPILE.replace("CASE", repr(case)), TRITON_INTERPRET="0")
