"""Example arguments for the operators of opgrad.ops.optimizer."""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from opgrad.cli.examples import Example
from opgrad.contract import Array

SHAPES = ((0,), (), (7,), (16, 3), (1000,), (3, 0), (33, 65))
LARGE = ((1 << 19,),) * 6


def _lists(rng: Generator, shapes: Sequence[tuple[int, ...]]) -> dict[str, list[Array]]:
    weights, gradients = ([np.asarray(rng.normal(size=shape)) for shape in shapes] for _ in range(2))
    return {"weights": weights, "gradients": gradients}


def _rate(rate: float) -> Array:
    return np.array(rate, np.float32)


def sgd_optimizer(rng: Generator, large: bool) -> Sequence[Example]:
    if large:
        return [Example({"lr": _rate(0.1), **_lists(rng, LARGE)})]
    return [
        Example({"lr": _rate(0.1), **_lists(rng, SHAPES)}),
        Example({"lr": _rate(3).reshape(1), **_lists(rng, [(70001,)])}),
    ]


def adamw_optimizer(rng: Generator, large: bool) -> Sequence[Example]:
    def example(shapes: Sequence[tuple[int, ...]], rate: float, step: int, **rest: float) -> Example:
        arrays = _lists(rng, shapes)
        arrays["momentums_1"] = [np.asarray(0.1 * each) for each in _lists(rng, shapes)["weights"]]
        arrays["momentums_2"] = [np.asarray(each * each) for each in _lists(rng, shapes)["weights"]]
        return Example({"lr": _rate(rate), "step": np.array(step), **arrays, **rest})

    if large:
        return [example(LARGE, 1e-3, 10)]
    return [
        example(SHAPES, 1e-3, 1),
        example([(70001,)], 0.5, 7, alpha=0.8, beta=0.99, epsilon=1e-4, weight_decay=0.1),
        example(SHAPES, 0.1, 1000, adam_mode=1),
        example([(5,)], 0.1, 2, adam_mode=1, correct_bias=False),
    ]


def clip_grad_norm(rng: Generator, large: bool) -> Sequence[Example]:
    def example(shapes: Sequence[tuple[int, ...]], **rest: float) -> Example:
        gradients = _lists(rng, shapes)["gradients"]
        return Example({"gradients": gradients, **rest}, sum(each.size for each in gradients))

    if large:
        return [example(LARGE)]
    return [example(SHAPES), example([(70001,)], max_norm=0.5), example([(3,)], max_norm=100.0), example([(0,)])]
