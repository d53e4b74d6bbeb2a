"""Example arguments for the operators of opgrad.ops.attention."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from opgrad.cli.examples import Example
from opgrad.contract import reference

LARGE = (4, 16, 256, 256)  # samples, heads, queries, keys: 16 MiB of float32
# The shapes of scores and bias, the axis, and is_inner_broadcast.
BIASES = (
    ((37,), (37,), 0, False),
    ((0, 3), (3,), -1, False),
    ((3, 0), (3, 0), -1, True),
    ((6, 5), (5,), -1, False),
    ((6, 65), (2, 65), 1, True),
    ((6, 65), (2, 65), 1, False),
    ((2, 3, 4, 33), (2, 1, 1, 33), 3, True),
    ((2, 3, 4, 33), (1, 1, 4, 33), 3, False),
    ((2, 3, 4, 33), (4, 33), 2, False),
    ((2, 3, 1, 2, 40), (2, 1, 1, 1, 40), -1, True),
)
SHAPES = (((37,), 0), ((0, 3), -1), ((6, 1), -1), ((6, 65), 1), ((2, 3, 4, 33), 3), ((2, 3, 4, 33), 1))


def bias_softmax(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    cases = [(LARGE, (LARGE[0], 1, 1, LARGE[3]), 3, True)] if large else BIASES
    return [
        Example(
            {
                "x": rng.normal(0, 2, shape),
                "bias": rng.normal(size=bias),
                "axis": axis,
                "is_inner_broadcast": inner,
            },
            terms=np.prod(shape[axis:], dtype=int),
        )
        for shape, bias, axis, inner in cases
    ]


def softmax_dropout_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    cases = [(LARGE, 3)] if large else SHAPES
    found = []
    for place, (shape, axis) in enumerate(cases):
        e = np.exp(rng.normal(size=shape))
        axes = tuple(range(axis % len(shape), len(shape)))
        arguments = {
            "dy": rng.normal(size=shape),
            "mask": rng.random(shape) > 0.1,
            "y": e / e.sum(axes, keepdims=True),
            "ratio": (0.1, 0.0, 0.5, 1.0)[place % 4],
            "axis": axis,
        }
        found.append(Example(arguments, terms=np.prod(shape[axis:], dtype=int)))
    return found


# --- attention: sizes as (batch, heads of q, heads of k, length of q, length of k, size of a head, size of v's) -------

LARGE_ATTENTION = (1, 12, 12, 1024, 1024, 64, 64)
SEQUENCES = {"cu_seqlens_q": np.array([0, 3, 3, 20]), "cu_seqlens_k": np.array([2, 9, 10, 40])}
LENGTHS = np.array([9, 0])
# The sizes, the shape of the mask and whether it is bool, the other options. Together they take all ways of the kernel.
ATTENTIONS: tuple[tuple[tuple[int, ...], Any, bool, dict[str, Any]], ...] = (
    ((2, 2, 2, 7, 9, 8, 8), None, False, {}),
    ((1, 4, 2, 65, 70, 16, 5), None, False, {"causal": "bottom_right", "sink": True}),
    ((2, 2, 1, 5, 11, 3, 1), (2, 1, 5, 11), False, {"scale": 0.25, "softcap": 2.0, "key_lengths": LENGTHS}),
    ((1, 2, 2, 9, 9, 1, 65), (1, 9), True, {"causal": "top_left", "layout": "BLHD", "window": (4, 0)}),
    ((1, 4, 1, 20, 40, 17, 17), None, False, {"causal": "top_left", "dropout": 0.25, "seed": 7, **SEQUENCES}),
    ((1, 1, 1, 3, 300, 8, 8), (300,), False, {"window": (100, 150), "dropout": 0.5, "seed": 3, "offset": 5}),
    ((1, 2, 2, 3, 0, 4, 4), None, False, {}),
)


def _of_attention(rng: np.random.Generator, large: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """The arguments of attention, and the length of the longest sum."""
    cases = [(LARGE_ATTENTION, None, False, {"causal": True})] if large else ATTENTIONS
    for (batch, heads, kv_heads, queries, keys, size, v_size), mask, is_bool, options in cases:
        shapes = {"q": (batch, heads, queries, size)}
        shapes |= {"k": (batch, kv_heads, keys, size), "v": (batch, kv_heads, keys, v_size)}
        given: dict[str, Any] = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        if "cu_seqlens_q" in options:
            given = {name: each[0].swapaxes(0, 1).copy() for name, each in given.items()}
        elif options.get("layout") == "BLHD":
            given = {name: each.swapaxes(1, 2).copy() for name, each in given.items()}
        if mask is not None:
            given["mask"] = rng.random(mask) > 0.3 if is_bool else rng.normal(size=mask)
        given |= options
        if "sink" in options:
            given["sink"] = rng.normal(size=heads)
        # Each term of a sum over queries or keys is made of products, which are sums over the numbers of a head.
        yield given, max(keys, heads // kv_heads * queries) * (size + v_size)


def attention(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    needs = ("y",) if large else ("y", "lse")
    return [Example(given | {"needs": needs}, terms) for given, terms in _of_attention(rng, large)]


def attention_grad(rng: np.random.Generator, large: bool) -> Sequence[Example]:
    found = []
    for given, terms in _of_attention(rng, large):
        y, lse = reference("attention")(**given, needs=("y", "lse"))
        more = {"dmask": given.get("mask"), "dsink": given.get("sink")}
        needs = ("dq", "dk", "dv", *(name for name, each in more.items() if each is not None and each.dtype != bool))
        kept = {"y": y, "lse": lse} | ({} if large else {"dlse": rng.normal(size=lse.shape)})
        found.append(Example({"dy": rng.normal(size=y.shape), **given, **kept, "needs": needs}, terms))
    return found
