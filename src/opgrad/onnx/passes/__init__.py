"""Passes that simplify a graph: before differentiation, so that fewer and faster nodes are differentiated, and after.

Imports `onnx/graph`.

Each pass is a function that changes a `Graph` in place and returns whether it changed anything. `simplify` and `tidy`
run lists of passes until nothing changes any more. Inputs, outputs and parameters keep their names.
"""

from collections.abc import Callable, Iterable, Sequence

import onnx

from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.graph.subgraphs import in_bodies
from opgrad.onnx.passes.patterns import fuse_cross_entropy, fuse_gelu, fuse_normalization, fuse_swish
from opgrad.onnx.passes.removal import (
    chain_sums,
    fold_constants,
    join_pairs,
    remove_dead,
    remove_no_ops,
    share_constants,
    share_nodes,
    transpose_products,
)
from opgrad.onnx.passes.sizes import simplify_shapes, split_parts

Pass = Callable[[Graph], bool]

CLEANING: tuple[Pass, ...] = (
    fold_constants,
    share_constants,
    simplify_shapes,
    remove_no_ops,
    join_pairs,
    share_nodes,
    remove_dead,
)
FUSIONS: tuple[Pass, ...] = (fuse_normalization, fuse_gelu, fuse_swish, fuse_cross_entropy, split_parts, remove_dead)
MOST_ROUNDS = 8  # of `clean`; each round finds less to do than the one before


def prepare(
    model: onnx.ModelProto, keep: Iterable[str] = (), *, variable: Iterable[str] = (), plain: bool = False
) -> onnx.ModelProto:
    """A simpler model for differentiation, whose backward part has to save fewer values.

    model: it is not changed. The new model has the same inputs and outputs, in names, types and order, and takes
    batches of any size if this one does.
    keep: names of other values that stay, such as additional outputs. variable: initializers that will be trained;
    they stay, too, and are not folded into constants.
    plain: write operators of ai.onnx alone. Otherwise layer normalization, Gelu and others become fused operators
    that onnxruntime or opgrad has in com.microsoft or in opsets older than ONNX's own.

    Returns the new model. Equal calls give equal bytes.
    """
    graph = Graph(copied(model), overridable(model).union(variable), {*keep, *variable}, plain)
    simplify(graph)
    graph.commit()
    return graph.model


def simplify(graph: Graph) -> None:
    """Run the passes that `prepare` runs, first in the bodies of loops and branches."""
    in_bodies(graph, simplify)
    clean(graph)
    if apply(graph, FUSIONS):
        graph.refresh()
        clean(graph)


def tidy(graph: Graph) -> None:
    """Simplify what the rules wrote, first in the bodies of loops and branches."""
    in_bodies(graph, tidy)
    clean(graph)
    if apply(graph, (chain_sums, transpose_products)):
        remove_dead(graph)


def clean(graph: Graph) -> None:
    """Run the passes that recognize no patterns, round after round, until all in succession change nothing."""
    unchanged = 0
    for each in CLEANING * MOST_ROUNDS:
        unchanged = 0 if each(graph) else unchanged + 1
        if unchanged == len(CLEANING):
            return
        if each is CLEANING[-1]:
            graph.refresh()


def apply(graph: Graph, passes: Sequence[Pass]) -> bool:
    """Run passes in their order; return whether one of them changed something."""
    changes = [each(graph) for each in passes]
    return any(changes)
