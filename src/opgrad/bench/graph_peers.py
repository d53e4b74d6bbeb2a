"""PyTorch on the operators of training graphs: for each that it has, or that a few of its calls make up, the call."""

from collections.abc import Sequence

from opgrad.bench.graph_arrays import ARRAYS
from opgrad.bench.graph_case import GraphCase
from opgrad.bench.graph_layers import LAYERS
from opgrad.bench.graph_tensors import Call, Setups, Tensors

TORCH: Setups = {**LAYERS, **ARRAYS}


def calls(case: GraphCase, peers: Sequence[str]) -> dict[str, Call]:
    """The call of torch, if it is among the peers and can take the arguments."""
    if "torch" not in peers or case.op.name not in TORCH:
        return {}
    call = TORCH[case.op.name](Tensors(case))
    return {} if call is None else {"torch": call}
