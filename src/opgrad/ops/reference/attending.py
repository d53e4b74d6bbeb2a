"""Checks the attributes and shapes of attention and its gradient, and computes the sizes that follow from them.

Messages begin with the name of the operator that was called.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from opgrad.contract.attributes import (
    Attributes,
    Beside,
    Shape,
    Shapes,
    finite,
    flag,
    integer,
    number_that,
    one_of,
    shown,
)

LARGEST_HEAD: Final = 256
UNLIMITED: Final = -1  # of a window's sides
ALIGNED: Final = ("top_left", "bottom_right")
LAYOUTS: Final = ("BHLD", "BLHD")

layout = one_of(*LAYOUTS)
probability = number_that((lambda value: 0.0 <= value <= 1.0, "0 to 1"))
not_negative = number_that((lambda value: 0.0 <= value < float("inf"), "a finite number of at least 0"))


def scale(what: str, value: Any, beside: Beside) -> float | None:
    """The factor of the products of queries and keys; None stands for 1 / sqrt(size of a head)."""
    return None if value is None else finite(what, value, beside)


def causal(what: str, value: Any, beside: Beside) -> str:
    """How queries are aligned with keys if no query sees a later key; "" if every query sees every key."""
    if isinstance(value, str):
        if value not in ("", *ALIGNED):
            raise ValueError(f"{what} is {shown(value)}, expected a bool or one of {', '.join(ALIGNED)}")
        return str(value)
    return ALIGNED[0] if flag(what, value) else ""


def window(what: str, value: Any, beside: Beside) -> tuple[int, int]:
    """How many keys a query sees before the one that it is aligned with, and how many behind it."""
    if value is None:
        return UNLIMITED, UNLIMITED
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{what} is {shown(value)}, expected None or a tuple (left, right)")
    left, right = (UNLIMITED if each is None else integer(what, each) for each in value)
    if min(left, right) < UNLIMITED:
        raise ValueError(f"{what} is {shown(value)}, expected sizes of at least 0, or -1 or None for no limit")
    return left, right


class AttentionSizes(NamedTuple):
    """Sizes of a call: batch, heads of queries, heads of keys, lengths, the numbers of a head of q and k, and of v."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    v_size: int


def split(shape: Shape, shapes: Shapes, attributes: Attributes) -> tuple[int, int, int, int]:
    """Batch, heads, length and the numbers of a head of an array of queries, keys or values."""
    if "cu_seqlens_q" in shapes:
        length, heads, size = shape
        return 1, heads, length, size
    batch, heads, length, size = shape
    return (batch, heads, length, size) if attributes["layout"] == "BHLD" else (batch, length, heads, size)


def joined(batch: int, heads: int, length: int, size: int, shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of such an array."""
    if "cu_seqlens_q" in shapes:
        return length, heads, size
    return (batch, heads, length, size) if attributes["layout"] == "BHLD" else (batch, length, heads, size)


def sizes(shapes: Shapes, attributes: Attributes) -> AttentionSizes:
    """The sizes of a call whose arrays are checked."""
    batch, heads, queries, size = split(shapes["q"], shapes, attributes)
    _, kv_heads, keys, v_size = split(shapes["v"], shapes, attributes)
    return AttentionSizes(batch, heads, kv_heads, queries, keys, size, v_size)


def checked_q(operator: str) -> Callable[[Shapes, Attributes], Shape]:
    """The shape of q itself; ValueError if q or the arrays that decide about its form are not what they must be."""

    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        check_form(operator, shapes)
        size = shapes["q"][-1]
        if not 1 <= size <= LARGEST_HEAD:
            raise ValueError(f"{operator}: q has heads of {size} numbers, expected 1 to {LARGEST_HEAD}")
        return shapes["q"]

    return shape


def check_form(operator: str, shapes: Shapes) -> None:
    """Raise ValueError unless q, k and v have the dimensions of their form, and the others go with it."""
    rank = 3 if "cu_seqlens_q" in shapes else 4
    why = "as cu_seqlens_q is given" if rank == 3 else "as cu_seqlens_q is None"
    for name in ("q", "k", "v"):
        if len(shapes[name]) != rank:
            raise ValueError(f"{operator}: {name} has {len(shapes[name])} dimensions, expected {rank}, {why}")
    if rank == 4 and "cu_seqlens_k" in shapes:
        raise ValueError(f"{operator}: cu_seqlens_k is given, expected None, as cu_seqlens_q is None")
    for name in ("mask", "key_lengths"):
        if rank == 3 and name in shapes:
            raise ValueError(f"{operator}: {name} is given, expected None, {why}")
    if rank == 3 and "cu_seqlens_k" not in shapes and shapes["k"][0] != shapes["q"][0]:
        raise ValueError(
            f"{operator}: k has {shapes['k'][0]} places, expected {shapes['q'][0]}, those of q, as cu_seqlens_k is None"
        )


def checked_k(operator: str) -> Callable[[Shapes, Attributes], Shape]:
    """The shape that k must have: its own heads and length."""

    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        batch, heads, _, size = split(shapes["q"], shapes, attributes)
        _, kv_heads, keys, _ = split(shapes["k"], shapes, attributes)
        if heads % kv_heads if kv_heads else heads:
            raise ValueError(f"{operator}: k has {kv_heads} heads, expected a divisor of {heads}, the heads of q")
        return joined(batch, kv_heads, keys, size, shapes, attributes)

    return shape


def checked_v(operator: str) -> Callable[[Shapes, Attributes], Shape]:
    """The shape that v must have: that of k, but for the numbers of a head."""

    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        v_size = shapes["v"][-1]
        if not 1 <= v_size <= LARGEST_HEAD:
            raise ValueError(f"{operator}: v has heads of {v_size} numbers, expected 1 to {LARGEST_HEAD}")
        batch, kv_heads, keys, _ = split(shapes["k"], shapes, attributes)
        return joined(batch, kv_heads, keys, v_size, shapes, attributes)

    return shape


def of_result(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of y."""
    found = sizes(shapes, attributes)
    return joined(found.batch, found.heads, found.queries, found.v_size, shapes, attributes)


def checked_dy(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of the gradient of y, which is the first array of its operator."""
    check_form("attention_grad", shapes)
    return of_result(shapes, attributes)


def of_rows(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape of arrays with one number for each query of each head, such as lse."""
    found = sizes(shapes, attributes)
    rows = (found.heads, found.queries)
    return rows if "cu_seqlens_q" in shapes else (found.batch, *rows)


def of_mask(shapes: Shapes, attributes: Attributes) -> Shape:
    """The mask's own shape if it can be broadcast to the scores; else the shape of the scores, which it should have."""
    found, mask = sizes(shapes, attributes), shapes["mask"]
    scores = (found.batch, found.heads, found.queries, found.keys)
    fits = len(mask) <= 4 and all(size in (1, full) for size, full in zip(mask[::-1], scores[::-1], strict=False))
    return mask if fits else scores


def of_heads(shapes: Shapes, attributes: Attributes) -> Shape:
    return (sizes(shapes, attributes).heads,)


def of_batch(shapes: Shapes, attributes: Attributes) -> Shape:
    return shapes["q"][:1]


def of_starts(shapes: Shapes, attributes: Attributes) -> Shape:
    """The shape that cu_seqlens_q and cu_seqlens_k have: one number more than there are sequences."""
    return (max(shapes["cu_seqlens_q"][0], 1),)


def given(operator: str, result: str, name: str) -> Callable[[Shapes, Attributes], Shape]:
    """The shape of an optional argument, which the result that is its gradient has, too."""

    def shape(shapes: Shapes, attributes: Attributes) -> Shape:
        if name not in shapes:
            raise ValueError(f"{operator}: needs has {result}, expected it to have {name} as an argument")
        return shapes[name]

    return shape
