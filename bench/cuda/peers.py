"""Who else computes on CUDA what opgrad computes: torch, torch.compile, and where installed Liger-Kernel and QuACK.

A setup gets the copies of a case and the way in which to work, and returns a call for each. PyTorch's eager calls are
those of the CPU, in either way; the other peers return what they compute, in new memory alone.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench.case import Case
from bench.measure import NEW, Call, NoSuchWay, only
from bench.peers import tried
from bench.torch_peers import EXPRESSIONS, TORCH, compiled_for, with_grad
from bench.torch_tensors import Torch

PEERS = {"torch": "torch", "torch.compile": "torch", "liger": "liger_kernel", "quack": "quack"}  # name, module


def installed() -> list[str]:
    """The peers that this Python has."""
    return [name for name, module in PEERS.items() if importlib.util.find_spec(module)]


def calls(
    cases: Sequence[Case], names: Sequence[str], way: str, wait: Callable[[], None]
) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """The calls of those peers that compute this case in this way, and for others what keeps them from it.

    wait: waits for the device.
    """
    made: dict[str, list[Call]] = {}

    def setup(name: str) -> Call | None:
        made[name] = SETUPS[name](cases, way)
        return (lambda: [call() for call in made[name]]) if made[name] else None

    found, notes = tried(names, setup, {}, wait)
    return {name: made[name] for name in found}, notes


# --- torch ----------------------------------------------------------------------------------------------------------


def _torch(cases: Sequence[Case], way: str) -> list[Call]:
    setup = TORCH.get(cases[0].op.name)
    return [call for case in cases if setup and (call := setup(Torch(case, way)))]


# --- torch.compile --------------------------------------------------------------------------------------------------


def _compiled(cases: Sequence[Case], way: str) -> list[Call]:
    """The operator compiled for this shape alone; of the fused loss, what autograd makes of it."""
    if cases[0].op.name not in EXPRESSIONS:
        return []
    only(NEW, way)
    return compiled_for([Torch(case, way) for case in cases])


# --- Liger-Kernel and QuACK -----------------------------------------------------------------------------------------


def _liger(cases: Sequence[Case], way: str) -> list[Call]:
    """Its loss writes the gradient over the logits, which are therefore copies."""
    if not _reduces_rows(cases[0], way):
        return []
    liger = importlib.import_module("liger_kernel.transformers.functional")
    setup = ROWS_ONLY[cases[0].op.name]
    return [setup(liger.liger_softmax, liger.liger_cross_entropy, _copied(case)) for case in cases]


def _quack(cases: Sequence[Case], way: str) -> list[Call]:
    """Its fused loss gives each sample's loss and gradient; their mean is left out, to its advantage."""
    if not _reduces_rows(cases[0], way):
        return []
    name = cases[0].op.name
    quack = importlib.import_module("quack")
    if name == "softmax_cross_entropy_loss_and_grad":
        fused = importlib.import_module("quack.cross_entropy").cross_entropy_fwd
        return [partial(fused, t["logits"], t["labels"], return_dx=True) for t in map(Torch, cases)]
    return [ROWS_ONLY[name](quack.softmax, quack.cross_entropy, Torch(case)) for case in cases]


def _copied(case: Case) -> Torch:
    """The case's tensors, the logits in memory of their own."""
    t = Torch(case)
    if "logits" in t.values:
        t.values["logits"] = t["logits"].clone()
    return t


def _reduces_rows(case: Case, way: str) -> bool:
    """Whether these libraries have such an operator. Raises NoSuchWay for shapes that they do not take."""
    if case.op.name not in ROWS_ONLY:
        return False
    only(NEW, way)
    if len(case.shape) != 2 or (case.op.kind == "rows" and case.axis % 2 != 1):
        raise NoSuchWay("takes matrices alone, whose rows it reduces")
    return True


def _backward(function: Callable[[Any], Any], t: Torch) -> Call:
    """A gradient by autograd, of a forward call made beforehand, whose result is y again."""
    x = t["y"].log().requires_grad_()
    return partial(torch.autograd.grad, function(x), x, t["dy"], retain_graph=True)


ROWS_ONLY: Mapping[str, Callable[[Any, Any, Torch], Call]] = {
    "softmax": lambda softmax, _, t: partial(softmax, t["x"]),
    "softmax_grad": lambda softmax, _, t: _backward(softmax, t),
    "softmax_cross_entropy_loss_only": lambda _, loss, t: partial(loss, t["logits"], t["labels"]),
    "softmax_cross_entropy_loss_and_grad": lambda _, loss, t: with_grad(loss, t),
}

SETUPS: Mapping[str, Callable[[Sequence[Case], str], list[Call]]] = {
    "torch": _torch,
    "torch.compile": _compiled,
    "liger": _liger,
    "quack": _quack,
}
