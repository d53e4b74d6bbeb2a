"""Rotary position embedding: pairs of a head's elements turned by angles that belong to the token's position."""

from typing import Annotated

import numpy as np

from opgrad.contract import ON_CPU, OnnxName, Tensor, like, one_of, operator, shaped_like
from opgrad.contract.attributes import FLOATS, INTEGERS, Array, Attributes, Shape, Shapes
from opgrad.ops.reference.rotary import LAYOUTS, PACKED, Rotation, rotation

FORWARD, BACKWARD = "rotary_embedding", "rotary_embedding_grad"
ARRAYS = {FORWARD: "x", BACKWARD: "dy"}
TABLE = "half of the turned elements of a head for each token, or for each position"
NODE_ATTRIBUTES = {"interleaved": 0, "rotary_embedding_dim": 0, "num_heads": 0, "layout": LAYOUTS[0]}
NODE_INPUTS = ("cos_cache", "sin_cache", "position_ids?")

Layout = Annotated[str, one_of(*LAYOUTS)]


def _sizes(name: str, shapes: Shapes, attributes: Attributes) -> Rotation:
    return rotation(name, ARRAYS[name], shapes, attributes)


def _cos(name: str) -> Tensor:
    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        return _sizes(name, shapes, attributes).table

    return Tensor(FLOATS, shape, TABLE, dtype_of=ARRAYS[name], ranks=range(2, 4))


def _sin(name: str) -> Tensor:
    return shaped_like("cos_cache", dtype_of=ARRAYS[name])


def _positions(name: str) -> Tensor:
    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        sizes = _sizes(name, shapes, attributes)
        return sizes.batch, sizes.tokens

    return Tensor(INTEGERS, shape, f"batch and tokens of {ARRAYS[name]}", ranks=range(2, 3))


def _of_tokens(x: Array, sizes: Rotation) -> Array:
    """The array as [B, L, H, D]."""
    if sizes.heads_first:
        return x.swapaxes(1, 2)
    return x.reshape(sizes.batch, sizes.tokens, sizes.heads, sizes.size)


def _turned(x: Array, sizes: Rotation, cos: Array, sin: Array, positions: Array | None, interleaved: bool) -> Array:
    """Every pair (a, b) as (a * cos - b * sin, b * cos + a * sin)."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    elif cos.ndim < PACKED:
        cos, sin = cos[: sizes.tokens], sin[: sizes.tokens]
    cos, sin = cos[..., None, :], sin[..., None, :]
    whole, half = 2 * sizes.half, sizes.half
    first, second = (slice(0, whole, 2), slice(1, whole, 2)) if interleaved else (slice(half), slice(half, whole))
    y = np.array(x)
    before, after = _of_tokens(x, sizes), _of_tokens(y, sizes)
    after[..., first] = before[..., first] * cos - before[..., second] * sin
    after[..., second] = before[..., second] * cos + before[..., first] * sin
    return y


@operator(
    "y = (a * cos - b * sin, b * cos + a * sin) for each pair (a, b) of x",
    support=ON_CPU,
    results={"y": like("x")},
    in_place={"y": ("x",)},
    onnx=OnnxName("RotaryEmbeddingTraining", ("x", *NODE_INPUTS), ("y",), NODE_ATTRIBUTES),
)
def rotary_embedding(
    x: Annotated[Array, Tensor(FLOATS, ranks=range(3, 5))], cos_cache: Annotated[Array, _cos(FORWARD)],
    sin_cache: Annotated[Array, _sin(FORWARD)], position_ids: Annotated[Array, _positions(FORWARD)] | None = None,
    interleaved: bool = False, rotary_embedding_dim: int = 0, num_heads: int = 0, layout: Layout = "BHLD",
    *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Rotary position embedding: turns pairs of each head's elements by angles that belong to the token's position.

    x: queries or keys, shape [B, H, L, D], or [B, L, H, D] as layout says, or [B, L, H * D]; float32, float64, float16
        or bfloat16. With R = rotary_embedding_dim or D elements of a head that are turned:
    cos_cache, sin_cache: cosine and sine of the angles, of the dtype of x. With position_ids shape [P, R / 2], a row
        for each position; without them [B, L, R / 2] or [1, L, R / 2], or [P, R / 2] with P >= L, whose first L rows
        are taken.
    position_ids: the position of each token, shape [B, L]; int32 or int64 in [-P, P), where negative ones count from
        the end.
    interleaved: which elements a and b are a pair: 2i and 2i + 1; by default i and i + R / 2.
    rotary_embedding_dim: R, an even number up to D; elements from R on stay as they are. 0: D.
    num_heads: H, for x of three dimensions; otherwise it need not be given.
    layout: "BHLD" or "BLHD", the axes of x if it has four.
    out: where to write; may be x.

    Returns y, of the shape and dtype of x. Raises TypeError, ValueError, the latter for a position out of range, too,
    naming the first one, before anything is written.

    Formula: y[a] = x[a] * cos - x[b] * sin; y[b] = x[b] * cos + x[a] * sin. Source: ONNX RotaryEmbedding, of which
    RotaryEmbeddingTraining is the node in com.microsoft here.

    Example:
    >>> x = np.array([[[[1.0, 0.0], [1.0, 0.0]]]], np.float32)
    >>> angle = np.array([[0.0], [np.pi / 2]])
    >>> cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    >>> opgrad.rotary_embedding(x, cos, sin).round(3) + 0.0
    array([[[[1., 0.],
             [0., 1.]]]], dtype=float32)
    """
    given = {"num_heads": num_heads, "layout": layout, "rotary_embedding_dim": rotary_embedding_dim}
    sizes = _sizes(FORWARD, {"x": x.shape, "cos_cache": cos_cache.shape}, given)
    return _turned(x, sizes, cos_cache, sin_cache, position_ids, interleaved)


@operator(
    "dx = (a * cos + b * sin, b * cos - a * sin) for each pair (a, b) of dy",
    support=ON_CPU,
    forward=FORWARD,
    results={"dx": like("dy")},
    in_place={"dx": ("dy",)},
    onnx=OnnxName("RotaryEmbeddingGrad", ("dy", *NODE_INPUTS), ("dx",), NODE_ATTRIBUTES),
)
def rotary_embedding_grad(
    dy: Annotated[Array, Tensor(FLOATS, ranks=range(3, 5))], cos_cache: Annotated[Array, _cos(BACKWARD)],
    sin_cache: Annotated[Array, _sin(BACKWARD)], position_ids: Annotated[Array, _positions(BACKWARD)] | None = None,
    interleaved: bool = False, rotary_embedding_dim: int = 0, num_heads: int = 0, layout: Layout = "BHLD",
    *, out: Array | None = None,
) -> Array:  # fmt: skip
    """Gradient of rotary_embedding with respect to x: the rotation by the same angles the other way round.

    dy: gradient with respect to the output, of the shape of x; float32, float64, float16 or bfloat16.
    cos_cache, sin_cache, position_ids, interleaved, rotary_embedding_dim, num_heads, layout: as given to
        rotary_embedding, the tables of the dtype of dy.
    out: where to write; may be dy.

    Returns dx, of the shape and dtype of dy. Raises TypeError, ValueError, as rotary_embedding.

    Formula: dx[a] = dy[a] * cos + dy[b] * sin; dx[b] = dy[b] * cos - dy[a] * sin. Source: the gradient of ONNX
    RotaryEmbedding, of which RotaryEmbeddingGrad is the node in com.microsoft here.

    Example:
    >>> dy = np.array([[[[1.0, 0.0], [1.0, 0.0]]]], np.float32)
    >>> angle = np.array([[0.0], [np.pi / 2]])
    >>> cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    >>> opgrad.rotary_embedding_grad(dy, cos, sin).round(3) + 0.0
    array([[[[ 1.,  0.],
             [ 0., -1.]]]], dtype=float32)
    """
    given = {"num_heads": num_heads, "layout": layout, "rotary_embedding_dim": rotary_embedding_dim}
    sizes = _sizes(BACKWARD, {"dy": dy.shape, "cos_cache": cos_cache.shape}, given)
    return _turned(dy, sizes, cos_cache, -sin_cache, position_ids, interleaved)
