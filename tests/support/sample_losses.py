"""Cases of the losses with options, by samples, and how far their results may be off."""

import numpy as np

from opgrad.cli.examples.arguments import error_in_ulp, reference, roundings, tolerance
from opgrad.contract import DTYPES
from opgrad.ops import loss_operators

LOSSES, WITH_GRADIENT = loss_operators().values()
UPSTREAM = ("dloss", "dlse", "dlse_square", "dlog_prob", "dentropy")
# What is left out, what is given, and each branch of the kernels.
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1, "ignore_index": 1, "weight": True, "upstream": True},
    "probabilities": {"label_smoothing": 0.2, "weight": True, "upstream": True, "probabilities": True},
    "softcap": {"softcap": 3.0, "temperature": 0.7, "upstream": True, "ignore_index": 1},
}


def arguments(shape, dtype, rng, *, weight=False, probabilities=False, upstream=False, integer="int64", **options):
    """Keyword arguments of the two operators, with upstream gradients for the second alone."""
    samples = (shape[0], *shape[2:])
    given = {"logits": 2 * rng.normal(size=shape), "labels": rng.integers(0, shape[1], samples).astype(integer)}
    if weight:
        given["weight"] = rng.uniform(0.5, 2, shape[1])
    if probabilities:
        q = rng.uniform(size=shape)
        given["probabilities"] = q / q.sum(1, keepdims=True)
    if upstream:
        given |= {name: rng.normal(size=samples) for name in UPSTREAM}
    cast = {name: value.astype(DTYPES[dtype]) if value.dtype == float else value for name, value in given.items()}
    return cast | options


def of(op, given):
    """The arguments that an operator has."""
    return {name: value for name, value in given.items() if name in op.inputs or name in op.attributes}


def check(op, given, results):
    """Hold results against the reference in float64."""
    expected = reference(op, given)
    classes = given["logits"].shape[1]
    for (name, exact), result in zip(expected.items(), results, strict=True):
        if name == "predicted":
            np.testing.assert_array_equal(result, exact)
            continue
        # Sums of products with the upstream gradients cancel: each of the five has roundings of its own.
        allowed = (
            tolerance(result.dtype.name, classes) if result.dtype.itemsize == 2 else len(UPSTREAM) * roundings(classes)
        )
        assert error_in_ulp(np.asarray(result), exact) <= allowed, (name, result.dtype)
