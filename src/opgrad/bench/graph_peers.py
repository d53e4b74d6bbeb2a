"""PyTorch on the operators of training graphs: for each that it has, or that a few of its calls make up, the call."""

from opgrad.bench.graph_arrays import ARRAYS
from opgrad.bench.graph_case import GraphCase
from opgrad.bench.graph_layers import LAYERS
from opgrad.bench.graph_tensors import Setups, Tensors
from opgrad.bench.ways import Call

TORCH: Setups = {**LAYERS, **ARRAYS}


def call(case: GraphCase, way: str) -> Call | None:
    """The call of torch, if it has the operator and can take the arguments. Raises NoSuchWay."""
    setup = TORCH.get(case.op.name)
    return setup(Tensors(case, way)) if setup else None
