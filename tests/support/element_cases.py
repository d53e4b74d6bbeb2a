"""Calls of the operators on single elements with each of the options that only they have."""

import itertools

import numpy as np
from samples import cast, sample

from opgrad.contract import DTYPES, FLOATS
from opgrad.ops import operators

FACTORS = [np.array(3), np.array([-7], "i4"), np.array(0.7, "f4"), np.array(0.7), cast([1.5], "bfloat16")]


def optional_calls(dtype, rng):
    """An operator, its arguments and a note of each; what is overwritten does not count, whatever it is."""
    known = operators()
    for op in (op for op in known.values() if "alpha" in op.attributes):
        for alpha in (0, 1, -0.5, 3.25, np.float32(0.1)):
            yield op, sample(op, (5, 33), dtype, rng, alpha=alpha), f"alpha {alpha}"
    op, others = known["in_place_accumulator"], FLOATS if dtype in ("float32", "bfloat16") else (dtype,)
    for other, overwrite in itertools.product(others, (False, True)):
        given = sample(op, (5, 33), dtype, rng, overwrite=overwrite)
        given["buffer"][...] = np.nan if overwrite else given["buffer"]
        yield op, given | {"value": given["value"].astype(DTYPES[other])}, f"{other}, {overwrite}"
    for factor, down in itertools.product(FACTORS, (False, True)):
        given = {"x": cast(rng.normal(size=(5, 7)), dtype), "factor": factor, "scale_down": down}
        yield known["scale"], given, f"{factor}, {down}"
