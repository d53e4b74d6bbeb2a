"""Why a node cannot be differentiated."""

from collections.abc import Sequence

import onnx


class NoGradient(NotImplementedError):
    """This node has no gradient; the text says why, and what helps."""


class Instead(Exception):
    """A node is differentiated as other nodes that compute the same, and that replace it in the forward graph."""

    def __init__(self, nodes: Sequence[onnx.NodeProto]):
        self.nodes = list(nodes)


class NotKept(NoGradient):
    """A value that the gradient reads cannot be kept by the node that makes it."""
