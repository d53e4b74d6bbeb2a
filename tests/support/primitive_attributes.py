"""Attributes of softmax's general form, and any mix of them."""

import numpy as np
import pytest
from primitive_cases import numbers, step_of
from samples import bits, cast, several

import opgrad
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import TYPES

FORMS = [("softmax", False), ("softmax", True), ("log_softmax", False)]
NAMES = [name + " inf_as_zero" * flag for name, flag in FORMS]
forms = pytest.mark.parametrize(("name", "inf_as_zero"), FORMS, ids=NAMES)

# Shape and axis: last, first, middle, adjacent ones, all.
AXES = [
    ((3, 40), -1), ((3, 70), 1), ((33, 5), 0), ((7, 3, 5), 0), ((4, 9, 6), 1), ((2, 5, 19), -2), ((2, 3, 4, 5), (1, 2)),
    ((3, 4, 30), (1, 2)), ((5, 7, 3), (0, 1)), ((6, 11), (0, 1)), ((50,), 0), ((2, 1, 9, 1, 4), 2), ((1, 130), -1),
]  # fmt: skip


# Numbers that are put among others.
SPECIAL = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "denormal": 1e-40, "largest": 3e38, "smallest": -3e38}
specials = pytest.mark.parametrize("bad", SPECIAL.values(), ids=SPECIAL)


def flag(inf_as_zero):
    return {"inf_as_zero": True} if inf_as_zero else {}


def some_where(rng, shape):
    """A mask of the shape, or one that broadcasts to it."""
    kept = [size if rng.random() < 0.7 else 1 for size in shape][int(rng.integers(0, 2)) :]
    return rng.random(kept) < 0.7


def seeds(rng):
    """A seed and an offset, of either sign."""
    return int(rng.integers(-(2**63), 2**63)), int(rng.integers(-(2**63), 2**63))


def some_attributes(rng, shape, target):
    """Each attribute in half the calls; none in some, all in some."""
    often = rng.choice([0.0, 0.25, 0.5, 1.0])
    choices = {
        "where": lambda: some_where(rng, shape),
        "logit_scale": lambda: float(rng.choice([0, *rng.uniform(-2, 2, 3)])),
        "result_scale": lambda: float(rng.choice([-3.5, 0.0, 0.3, 1000.0])),
        "dropout": lambda: Dropout(float(rng.choice([0, 1, *rng.random(3)])), *seeds(rng), bool(rng.integers(2))),
        "out_scale": lambda: float(rng.choice([-3, *rng.uniform(0.01, 2, 3)])),
        "accumulation": lambda: str(rng.choice(["strict", "relaxed", "any"])),
        "stats": lambda: True,
        "save": lambda: True,
    }
    chosen = {key: choose() for key, choose in choices.items() if rng.random() < often}
    return {"out_scale": step_of(target)} | chosen


# --- one call for all libraries of arrays: each form has a kernel of its own ------------------------------------------

SHARED = (3, 4, 33)  # the shape of x


def every_attribute(rng):
    """Attributes of a call of softmax on float32, with operands of many kinds, which broadcast in many ways."""
    return {
        "where": rng.random((4, 1)) < 0.6,
        "inf_as_zero": True,
        "result_scale": 0.3,
        "dropout": Dropout(0.4, 2**63 + 5, -7, mask=True),
        "post_ops": operands_of_many_kinds(rng, "float32"),
        "stats": True,
        "save": True,
        "out_dtype": "float16",
    }


def operands_of_many_kinds(rng, dtype):
    return [
        post_ops.mul(cast(rng.normal(size=(4, 1)), dtype)),
        post_ops.add(cast(rng.normal(size=SHARED), "bfloat16")),
        post_ops.max(rng.integers(-9, 0, 33).astype("int8")),
        post_ops.sub(0.25),
        post_ops.swish(1.5),
        post_ops.select(rng.random((3, 1, 1)) < 0.5, cast(rng.normal(size=33), dtype)),
    ]


def typed_call(number, rng, shape=(4, 33)):
    """x of one of the eight dtypes, and attributes with which softmax gives another one, always scaled."""
    source, target = TYPES[number], TYPES[(number + 3) % len(TYPES)]
    return numbers(rng, shape, source), {"out_dtype": target, "out_scale": min(step_of(target), 0.25)}


def moved(options, move):
    """Attributes with `move(array)` for NumPy arrays, those of post-ops too."""

    def each(value):
        if isinstance(value, list):
            return [post_ops.PostOp(op.name, op.alpha, op.beta, tuple(map(each, op.operands))) for op in value]
        return move(value) if isinstance(value, np.ndarray) else value

    return {name: each(value) for name, value in options.items()}


def same_as_numpys(kind, move, back, name, *args, **options):
    """The results of a call with a library's arrays: bits, shapes and dtypes are those of the call with NumPy's.

    kind: the type of the library's arrays; `move` makes one of NumPy's, `back` one of NumPy's of it.
    """
    expected = several(getattr(opgrad, name)(*args, **options))
    found = several(getattr(opgrad, name)(*map(move, args), **moved(options, move)))
    assert all(isinstance(each, kind) for each in found)
    arrays = [back(each) for each in found]
    assert [(each.dtype, each.shape) for each in arrays] == [(each.dtype, each.shape) for each in expected]
    assert [bits(each) for each in arrays] == [bits(each) for each in expected]
    return found
