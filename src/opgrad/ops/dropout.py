"""Dropout and its gradient, and the gradient of a rounding that limits its values: masks choose what passes."""

from functools import partial
from typing import Annotated

import numpy as np

from opgrad.contract import IN_GRAPHS, OnnxName, Tensor, like, one_number, operator, shaped_like
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes
from opgrad.ops.reference.dropout import keep_mask, kept_scale


def ratio_checked(operator: str, model: str, shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of argument `model`; ValueError for a ratio that is no probability."""
    ratio = attributes["ratio"]
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"{operator}: ratio is {ratio}, expected 0 to 1")
    return shapes[model]


# Where elements are counted in C order, no other order of the axes will do.
X = Annotated[Array, Tensor(FLOATS)]
Seed = Annotated[Array, one_number("seed", INTEGERS)]
Grad = Annotated[Array, Tensor(FLOATS)]
Mask = Annotated[Array, shaped_like("dy", ("bool",))]


@operator(
    support=IN_GRAPHS,
    results={
        "y": Tensor(FLOATS, partial(ratio_checked, "dropout", "x"), "the shape of x", dtype_of="x"),
        "mask": shaped_like("x", ("bool",)),
    },
    in_place={"y": ("x",)},
    onnx=OnnxName(
        "DropoutTraining",
        ("x", "seed", "ratio?", "training_mode?"),
        ("y", "mask?"),
        types={"seed": ("int64", "int32"), "training_mode": ("bool",)},
    ),
)
def dropout(
    x: X, ratio: float = 0.5, training_mode: bool = True, *, seed: Seed, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Drop each element with a given probability, by its own decision, and scale the others up.

    x: any shape; float32, float64, float16 or bfloat16.
    ratio: the probability of being dropped, from 0 (nothing is) to 1 (everything is: y is 0).
    training_mode: False gives y = x, whatever ratio is.
    seed: an int, or an array of one int64 or int32. Decisions depend on it and on an element's place in C order alone,
        not on layout or threads: give each call its own. They are those of opgrad.Dropout(ratio, seed).

    Returns (y, mask): y of the shape and dtype of x, mask of its shape, True where an element was kept. NaN and
    infinity are dropped like all else.

    Formula: y = where(mask, x / (1 - ratio), 0). Source: ONNX Dropout-13, which onnxruntime has, with a seed that is an
    attribute; DropoutTraining, whose seed is an input, is the node in com.microsoft here. Random numbers are those of
    Philox-4x32-10.

    Example:
    >>> x = np.arange(1, 7, dtype=np.float32)
    >>> opgrad.dropout(x, 0.5, seed=7)
    (array([ 2.,  4.,  0.,  0., 10., 12.], dtype=float32), array([ True,  True, False, False,  True,  True]))
    """
    number = int(np.asarray(seed).reshape(()))
    mask = keep_mask(x.shape, ratio if training_mode else 0.0, number, 0)
    return np.where(mask, x * kept_scale(ratio) if training_mode else x, 0.0), mask


@operator(
    forward="dropout",
    kind="elements",
    support=IN_GRAPHS,
    results={"dx": Tensor(FLOATS, partial(ratio_checked, "dropout_grad", "dy"), "the shape of dy", dtype_of="dy")},
    in_place={"dx": ("dy",)},
    onnx=OnnxName(
        "DropoutGrad", ("dy", "mask", "ratio?", "training_mode?"), ("dx",), types={"training_mode": ("bool",)}
    ),
)
def dropout_grad(
    dy: Grad, mask: Mask, ratio: float = 0.5, training_mode: bool = True, *, out: Array | None = None
) -> Array:
    """Gradient of dropout.

    dy: gradient with respect to y, any shape; float32, float64, float16 or bfloat16.
    mask: bool, of the shape of dy; True where an element was kept.
    ratio, training_mode: as given to dropout. With training_mode=False, or ratio 0, nothing was dropped: dx = dy,
        whatever mask holds.

    Returns dx, of the shape and dtype of dy; 0 where mask is False, even if dy is NaN there, and with ratio 1.

    Formula: dx = where(mask, dy / (1 - ratio), 0). Source: com.microsoft DropoutGrad, which scales without
    training_mode, too.

    Example:
    >>> dy = np.ones(4, np.float32)
    >>> mask = np.array([True, False, True, True])
    >>> opgrad.dropout_grad(dy, mask, 0.5)
    array([2., 0., 2., 2.], dtype=float32)
    """
    if not training_mode or ratio == 0.0:
        return dy.copy()
    return np.where(mask, dy * kept_scale(ratio), 0.0)


@operator(
    kind="elements",
    support=IN_GRAPHS,
    results={"dx": like("dy")},
    in_place={"dx": ("dy",)},
    onnx=OnnxName("FakeQuantGrad"),
)
def fake_quant_grad(dy: Grad, mask: Mask, *, out: Array | None = None) -> Array:
    """Gradient of rounding to a few levels, which counts as the identity between the lowest and the highest.

    dy: gradient with respect to y, any shape; float32, float64, float16 or bfloat16.
    mask: bool, of the shape of dy; True where x was between the levels.

    Returns dx, of the shape and dtype of dy; 0 where mask is False, even if dy is NaN there.

    Formula: dx = where(mask, dy, 0). Source: com.microsoft FakeQuantGrad; the straight-through estimator of Bengio,
    Léonard and Courville, 2013.

    Example:
    >>> opgrad.fake_quant_grad(np.ones(3, np.float32), np.array([True, False, True]))
    array([1., 0., 1.], dtype=float32)
    """
    return np.where(mask, dy, 0.0)
