"""A graph with its gradients, of which models are made that keep every value or compute some of them again."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.passes.order import order_ends
from opgrad.onnx.passes.recompute import checkpoint
from opgrad.onnx.passes.segments import WHO

Segments = int | Sequence[str] | None


@dataclass(frozen=True)
class Differentiated:
    """A graph with its gradients, before its nodes are ordered and values of segments computed again.

    graph: its last outputs are the gradients. forward: the values that it computed before it was differentiated: the
    loss, and other outputs. gradients: for each parameter the value that is its gradient.
    """

    graph: Graph
    forward: tuple[str, ...]
    gradients: Mapping[str, str]

    def model(self, segments: Segments = None) -> onnx.ModelProto:
        """A model with its nodes in an order that needs little memory.

        segments: the number of segments of the forward part, or the names of values with whose nodes a segment ends.
        For the backward part only the values between segments and those of the last segment are kept; it computes all
        others again, which saves memory and costs about one more forward run. Random masks are kept. None: every value
        is kept.

        Raises TypeError and ValueError for other segments, and for names that no node of the forward part makes.
        """
        cuts, graph = checked_segments(segments), self.graph.copy()
        if cuts != 1:
            checkpoint(graph, self.forward, cuts)
        order_ends(graph)
        graph.commit()
        return graph.model


def checked_segments(given: Segments) -> int | list[str]:
    """The number of segments (1 for None), or the names. Raises TypeError and ValueError for anything else."""
    if given is None:
        return 1
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise ValueError(f"{WHO}: the number of segments is {given}, expected at least 1")
        return given
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{WHO} is {given!r}, expected a number of segments or names of values")
    return names


def names_in(segments: Segments) -> list[str]:
    """The values with whose nodes a segment ends, which passes keep. Raises TypeError and ValueError, too."""
    checked = checked_segments(segments)
    return [] if isinstance(checked, int) else checked
