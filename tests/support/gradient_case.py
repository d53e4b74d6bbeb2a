"""One case that a gradient rule is checked with."""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

MICROSOFT = "com.microsoft"
NEWEST = onnx.defs.onnx_opset_version()


def alone(case, results, imports, constants=(), ir_version=8):
    """A model of a case's node alone, whose inputs are what feeds it, and constants."""
    names = ["" if array is None else f"x{place}" for place, array in enumerate(case.arrays)]
    made = [f"y{place}" for place in range(case.outputs)]
    node = helper.make_node(case.op, names, made, domain=case.domain, **case.attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in case.feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=each) for each in made[:results]]
    graph = helper.make_graph([node], "graph", inputs, outputs, constants)
    opsets = [helper.make_opsetid(*each) for each in imports.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


@dataclass(frozen=True)
class Case:
    """A node in one opset.

    arrays: its inputs; None for one that is left out. wanted: the places of those to differentiate with respect to.
    outputs: how many the node has. form: in a few words, what is special.
    """

    op: str
    opset: int
    arrays: tuple
    attributes: dict = field(default_factory=dict)
    wanted: tuple = (0,)
    outputs: int = 1
    domain: str = ""
    form: str = ""

    def __str__(self):
        return f"{self.op}-{self.opset}-{self.form}".rstrip("-").replace(" ", "_")

    @property
    def feeds(self):
        """The inputs by name."""
        return {f"x{place}": array for place, array in enumerate(self.arrays) if array is not None}

    def model(self):
        """A model of this node alone, in float64, with its first output."""
        return alone(self, 1, {"": self.opset, MICROSOFT: 1})


def numbers(*shape, low=-2.0, high=2.0, seed=0):
    """Numbers without ties, none of them close to a whole number of halves."""
    random = np.random.default_rng([seed, *shape])
    values = random.permutation(np.linspace(low, high, max(int(np.prod(shape)), 1)))
    return (values + 1e-3 * random.uniform(0.2, 1, values.shape))[: int(np.prod(shape))].reshape(shape)


def ints(*values):
    """An int64 array."""
    return np.array(values, np.int64)


def floats(*values):
    """A float32 array, as scales are."""
    return np.array(values, np.float32)


CASES = []


def add(op, opsets, *arrays, form="", wanted=None, outputs=1, domain="", **attributes):
    """A case for each of the opsets; by default all floats are differentiated, but for those of float32, as scales."""
    floats = tuple(place for place, array in enumerate(arrays) if array is not None and array.dtype == np.float64)
    for opset in [opsets] if isinstance(opsets, int) else opsets:
        CASES.append(Case(op, opset, arrays, attributes, wanted or floats, outputs, domain, form))


def contrib(op, *arrays, **given):
    """A case of an operator of com.microsoft."""
    add(op, 17, *arrays, domain=MICROSOFT, **given)
