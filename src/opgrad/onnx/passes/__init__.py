"""Passes that simplify a graph: before differentiation, so that fewer and faster nodes are differentiated, and after.

Imports `onnx/graph`.

Each pass is a function that changes a `Graph` in place and returns whether it changed anything. `prepare` and `finish`
run lists of passes over a copy of a model until nothing changes any more. Inputs, outputs and parameters keep their
names.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import onnx

from opgrad.onnx.graph.graph import Graph, overridable
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.graph.subgraphs import in_bodies
from opgrad.onnx.passes.activation import fuse_gelu, fuse_swish
from opgrad.onnx.passes.dead import remove_dead
from opgrad.onnx.passes.folding import fold_constants
from opgrad.onnx.passes.losses import fuse_cross_entropy
from opgrad.onnx.passes.normalization import fuse_layer_normalization, fuse_rms_normalization
from opgrad.onnx.passes.order import order_ends
from opgrad.onnx.passes.products import transpose_products
from opgrad.onnx.passes.recompute import checkpoint
from opgrad.onnx.passes.removal import join_pairs, remove_no_ops
from opgrad.onnx.passes.segments import WHO
from opgrad.onnx.passes.shapes import simplify_shapes
from opgrad.onnx.passes.sharing import share_constants, share_nodes
from opgrad.onnx.passes.splitting import split_parts
from opgrad.onnx.passes.sums import chain_sums

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
FUSIONS: tuple[Pass, ...] = (
    fuse_layer_normalization,
    fuse_rms_normalization,
    fuse_gelu,
    fuse_swish,
    fuse_cross_entropy,
    split_parts,
    remove_dead,
)
MOST_ROUNDS = 8  # of `clean`; each round finds less to do than the one before


@dataclass(frozen=True)
class Cuts:
    """Values at which a graph may be cut into segments, and what decides at which of them.

    choose: is given a function that makes the finished model of some of the names, and returns one such model.
    """

    names: Sequence[str]
    choose: Callable[[Callable[[Sequence[str]], onnx.ModelProto]], onnx.ModelProto]


Segmentation = int | Sequence[str] | Cuts | None


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
    return graph.model


def simplify(graph: Graph) -> None:
    """Run the passes that `prepare` runs, first in the bodies of loops and branches."""
    in_bodies(graph, simplify)
    clean(graph)
    if apply(graph, FUSIONS):
        graph.refresh()
        clean(graph)


def finish(
    model: onnx.ModelProto,
    forward: Iterable[str],
    *,
    keep: Iterable[str] = (),
    variable: Iterable[str] = (),
    checkpoint_segments: Segmentation = None,
) -> onnx.ModelProto:
    """A model with gradients among its outputs, simplified and with its nodes in an order that needs little memory.

    model: it is not changed; its inputs and outputs stay. The gradients are outputs that are not yet accumulated.
    forward: the values that the model computed before it was differentiated: the loss, and other outputs.
    keep, variable: as for `prepare`.
    checkpoint_segments: the number of segments of the forward part, or the names of values with whose nodes a segment
    ends. For the backward part only the values between segments and those of the last segment are kept; it computes
    all others again, which saves memory and costs about one more forward run. Random masks are kept. None: keep
    every value. `Cuts`: what these decide.

    Returns the new model. Equal calls give equal bytes.
    Raises TypeError and ValueError for other segments, and for names that no node of the forward part makes.
    """
    segments = checked_segments(checkpoint_segments)
    forward = list(forward)
    graph = Graph(copied(model), overridable(model).union(variable), {*keep, *forward, *named(segments), *variable})
    _tidy(graph)
    if not isinstance(segments, Cuts):
        return _cut(graph, forward, segments)
    graph.commit()
    return segments.choose(
        lambda names: _cut(Graph(copied(graph.model), graph.variable, graph.kept), forward, list(names))
    )


def _cut(graph: Graph, forward: Sequence[str], segments: int | Sequence[str]) -> onnx.ModelProto:
    """The model of a graph that was tidied, whose backward part computes values inside of segments again."""
    if segments not in (1, []):
        checkpoint(graph, forward, segments)
    order_ends(graph)
    graph.commit()
    return graph.model


def _tidy(graph: Graph) -> None:
    """Simplify what the rules wrote, first in the bodies of loops and branches."""
    in_bodies(graph, _tidy)
    clean(graph)
    if apply(graph, (chain_sums, transpose_products)):
        apply(graph, (remove_dead,))


def named(segments: int | list[str] | Cuts) -> Sequence[str]:
    """The values with whose nodes a segment may end."""
    if isinstance(segments, Cuts):
        return segments.names
    return [] if isinstance(segments, int) else segments


def checked_segments(given: Segmentation) -> int | list[str] | Cuts:
    """The number of segments (1 for None), or the names. Raises TypeError and ValueError for anything else."""
    if given is None:
        return 1
    if isinstance(given, Cuts):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise ValueError(f"{WHO}: the number of segments is {given}, expected at least 1")
        return given
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{WHO} is {given!r}, expected a number of segments or names of values")
    return names


def clean(graph: Graph) -> None:
    """Run the passes that recognize no patterns, until nothing changes."""
    for _ in range(MOST_ROUNDS):
        changed = apply(graph, CLEANING)
        graph.refresh()
        if not changed:
            return


def apply(graph: Graph, passes: Sequence[Pass]) -> bool:
    """Run passes in their order; return whether one of them changed something."""
    changes = [each(graph) for each in passes]
    return any(changes)
