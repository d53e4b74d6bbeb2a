"""JAX as a target of the benchmark: softmax and the losses in compiled functions on the CPU, beside jax.nn."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import opgrad
from bench.case import Case
from bench.cells import CLASSES, ROWS, Cell, Workload
from bench.cpu_target import Target, on_host
from bench.measure import NEW, Call

PEER = "jax.nn"


class Jax(Target):
    """Compiled functions of JAX on this machine's CPU; their results are in new memory."""

    workloads: Mapping[str, Sequence[Workload]] = {
        "elements": (), "rows": ROWS, "classes": (*CLASSES, Workload((1, 1000))), "slices": (),
    }  # fmt: skip
    packages: Sequence[str] = ("jax", "jaxlib")

    def __init__(self) -> None:
        if not importlib.util.find_spec("jax"):
            raise RuntimeError("bench: device is 'jax', but JAX is not installed")

    def installed(self) -> list[str]:
        return [PEER]

    def measure(self, cell: Cell, names: Sequence[str], seconds: float) -> dict[str, Any]:
        import jax

        theirs = _theirs(cell)
        if theirs is None:
            return {**cell.known, "left_out": f"{PEER} has nothing that computes it"}
        case = Case(cell)
        arrays = {name: jax.numpy.asarray(case.values[name]) for name in case.op.arrays if name in case.values}
        rest = {name: value for name, value in case.values.items() if name not in arrays}
        ours = jax.jit(lambda *given: getattr(opgrad, case.op.name)(**dict(zip(arrays, given, strict=True)), **rest))
        found = ours(*arrays.values())
        several = found if isinstance(found, tuple) else (found,)
        case.results = {name: np.asarray(each) for name, each in zip(case.results, several, strict=True)}
        given, functions = list(arrays.values()), {PEER: jax.jit(theirs)} if PEER in names else {}
        rivals = {name: _call(function, given) for name, function in functions.items()}
        return on_host(case, {NEW: _call(ours, given)}, lambda way: (rivals, {}), case.error(), seconds)


def _call(function: Callable[..., Any], arrays: Sequence[Any]) -> Call:
    """A call that waits for its results."""
    import jax

    wait: Any = jax.block_until_ready
    return lambda: wait(function(*arrays))


def _theirs(cell: Cell) -> Callable[..., Any] | None:
    """What a user of JAX writes, in terms of the operator's arrays; None if there is nothing."""
    import jax
    from jax import numpy as jnp

    axis = cell.workload.attributes.get("axis", -1)

    def loss(logits: Any, labels: Any) -> Any:
        log_prob = jax.nn.log_softmax(logits, 1)
        return -jnp.mean(jnp.take_along_axis(log_prob, labels[:, None], 1))

    found: Mapping[str, Callable[..., Any]] = {
        "softmax": lambda x: jax.nn.softmax(x, axis),
        "log_softmax": lambda x: jax.nn.log_softmax(x, axis),
        "softmax_grad": lambda dy, y: y * (dy - (y * dy).sum(axis, keepdims=True)),
        "log_softmax_grad": lambda dy, y: dy - jnp.exp(y) * dy.sum(axis, keepdims=True),
        "softmax_cross_entropy_loss": lambda x, labels: (loss(x, labels), jax.nn.log_softmax(x, 1)),
        "softmax_cross_entropy_loss_only": loss,
        "softmax_cross_entropy_loss_and_grad": jax.value_and_grad(loss),
    }
    return found.get(cell.op.name)
