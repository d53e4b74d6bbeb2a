"""Helpers of pattern recognition: products in any order, powers, sums with a number, approximate numbers."""

import functools
import math
from collections.abc import Callable, Sequence

import onnx
from onnx import TensorProto

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import domain_of
from opgrad.onnx.graph.nodes import FAILURES, attributes_of, refusal

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FAR, FAR_NARROW = 2e-5, 4e-3  # relative tolerances: for numbers written with few digits, and for 16-bit types


def is_near(graph: Graph, name: str, number: float) -> bool:
    """Whether a value is a constant near this number, within the tolerance of its type."""
    found = graph.scalar(name)
    far = FAR_NARROW if graph.element_type(name) in NARROW else FAR
    return found is not None and math.isclose(found, number, rel_tol=far)


def factors(graph: Graph, node: onnx.NodeProto) -> list[str]:
    """The factors of a product; a factor that is itself a product, which nothing else reads, is split up, too."""
    found: list[str] = []
    for name in node.input:
        maker = graph.maker(name, "Mul") if graph.inner(name) else None
        found += factors(graph, maker) if maker is not None and maker is not node else [name]
    return found


def without(names: Sequence[str], name: str) -> list[str]:
    """The names without the first occurrence of one of them."""
    rest = list(names)
    rest.remove(name)
    return rest


def power(graph: Graph, name: str, exponent: float) -> str | None:
    """x if the value is x ** exponent, as Pow or as a product of equal factors, and one node reads it; else None."""
    node = graph.maker(name, "Pow", "Mul") if graph.inner(name) else None
    if node is None:
        return None
    if node.op_type == "Pow":
        return node.input[0] if is_near(graph, node.input[1], exponent) else None
    all_of = factors(graph, node)
    return all_of[0] if len(all_of) == exponent and len(set(all_of)) == 1 else None


def plus(graph: Graph, name: str) -> tuple[str, float] | None:
    """(x, number) if the value is x + number and one node reads it; else None."""
    node = graph.maker(name, "Add") if graph.inner(name) else None
    for a, b in [] if node is None else [tuple(node.input), tuple(node.input)[::-1]]:
        number = graph.scalar(b)
        if number is not None and graph.scalar(a) is None:
            return a, number
    return None


def mean_axes(graph: Graph, node: onnx.NodeProto) -> int | None:
    """-k if the node is a mean over the last k axes that keeps these axes; else None."""
    given, sizes = attributes_of(node), graph.sizes(node.input[0])
    if not given.get("keepdims", 1) or sizes is None:
        return None
    axes = given.get("axes")
    if axes is None and len(node.input) > 1 and node.input[1]:
        value = graph.constant(node.input[1])
        axes = None if value is None else value.reshape(-1).tolist()
    if not axes:
        return None
    places = sorted(axis - len(sizes) if axis >= 0 else axis for axis in axes)
    return places[0] if places == list(range(-len(places), 0)) else None


def same_shape(graph: Graph, name: str, other: str) -> bool:
    """Whether a result and an operand have the same rank as far as is known: scalars have not added an axis."""
    a, b = graph.sizes(name), graph.sizes(other)
    return a is None or b is None or len(a) == len(b)


# --- passes that look at one node at a time ---------------------------------------------------------------------------


Change = Callable[[Graph, onnx.NodeProto], bool]


def at_each(*operators: str) -> Callable[[Change], Callable[[Graph], bool]]:
    """Make a pass of a function that changes a graph at one node and tells whether it did.

    It is called for every node of these operators of ai.onnx, or of all, that the graph has when the pass begins.
    """

    def decorate(change: Change) -> Callable[[Graph], bool]:
        @functools.wraps(change)
        def run(graph: Graph) -> bool:
            nodes = [each for each in graph.nodes() if not domain_of(each)]
            changed = False
            for node in nodes:  # without `naming`, which would take 0.7 µs for each
                if not operators or node.op_type in operators:
                    try:
                        changed |= change(graph, node)
                    except FAILURES as error:
                        raise refusal(node, error) from error
            return changed

        return run

    return decorate
