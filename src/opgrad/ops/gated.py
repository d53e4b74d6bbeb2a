"""Gated linear units, an activation of one array times another, and their gradients."""

from typing import Annotated

from opgrad.contract import IN_GRAPHS, Tensor, like, one_of, operator
from opgrad.contract.attributes import FLOATS, Array
from opgrad.ops.reference.post_ops import SLOPES, VALUES

# By name the post-op whose formula the activation has, and its first number.
ACTIVATIONS = {"silu": ("swish", 1.0), "gelu": ("gelu_erf", 0.0), "gelu_tanh": ("gelu_tanh", 0.0)}

Gate = Annotated[Array, Tensor(FLOATS)]
Up = Annotated[Array, like("gate")]
Dy = Annotated[Array, Tensor(FLOATS)]
Saved = Annotated[Array, like("dy")]
Activation = Annotated[str, one_of(*ACTIVATIONS)]


@operator(
    "y = activation(gate) * up",
    kind="elements",
    support=IN_GRAPHS,
    results={"y": like("gate")},
    in_place={"y": ("gate", "up")},
)
def gated_linear_unit(gate: Gate, up: Up, activation: Activation = "silu", *, out: Array | None = None) -> Array:
    """An activation of one array times another, as the gated layers of language models have it: SwiGLU, GEGLU.

    gate: any shape; float32, float64, float16 or bfloat16. up: of the shape and dtype of gate.
    activation: "silu" (SwiGLU), "gelu", or "gelu_tanh", its approximation by tanh.
    out: where to write; may be gate or up.

    Returns y, of the shape and dtype of gate. Raises TypeError, ValueError.

    Formula: y = activation(gate) * up; silu(x) = x / (1 + exp(-x)).
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.

    Example:
    >>> gate, up = np.array([-1.0, 0.0, 2.0], np.float32), np.array([1.0, 2.0, 3.0], np.float32)
    >>> opgrad.gated_linear_unit(gate, up)
    array([-0.2689,  0.    ,  5.2848], dtype=float32)
    """
    name, alpha = ACTIVATIONS[activation]
    return VALUES[name](gate, alpha, 0.0) * up


@operator(
    "dgate = dy * up * activation'(gate), dup = dy * activation(gate)",
    forward="gated_linear_unit",
    support=IN_GRAPHS,
    results={"dgate": like("dy"), "dup": like("dy")},
    in_place={"dgate": ("gate",), "dup": ("up",)},
)
def gated_linear_unit_grad(
    dy: Dy, gate: Saved, up: Saved, activation: Activation = "silu", *, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Gradients of gated_linear_unit with respect to gate and up, in one pass.

    dy: gradient with respect to y, any shape; float32, float64, float16 or bfloat16.
    gate, up: as given to gated_linear_unit, of the shape and dtype of dy. activation: likewise.
    out: where to write dgate and dup; may be (gate, up).

    Returns (dgate, dup), of the shape and dtype of dy. Raises TypeError, ValueError.

    Formula: dgate = dy * up * activation'(gate); dup = dy * activation(gate). Source: that of gated_linear_unit.

    Example:
    >>> gate, up = np.array([-1.0, 0.0, 2.0], np.float32), np.array([1.0, 2.0, 3.0], np.float32)
    >>> opgrad.gated_linear_unit_grad(np.ones_like(up), gate, up)
    (array([0.0723, 1.    , 3.2724], dtype=float32), array([-0.2689,  0.    ,  1.7616], dtype=float32))
    """
    name, alpha = ACTIVATIONS[activation]
    return dy * up * SLOPES[name](gate, alpha, 0.0), dy * VALUES[name](gate, alpha, 0.0)
