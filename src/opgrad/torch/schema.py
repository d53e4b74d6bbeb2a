"""Every declared operator as PyTorch's dispatcher knows it: its name and the schema of its arguments.

What is registered for others to find, exporters and DTensor, needs no more of an operator than this.
"""

import inspect
import typing
from typing import Any

import torch

from opgrad.call.libraries import torch_private
from opgrad.contract import Operator

TYPES: dict[Any, str] = {
    bool: "bool",
    float: "float",
    int: "SymInt",
    float | None: "float?",
    str: "str",
    int | None: "SymInt?",
    int | tuple[int, ...]: "int[1]",
}
NAMED_TYPES = {"shape": "SymInt[]", "out_dtype": "ScalarType?", "causal": "str"}
# Inductor may lay out intermediate tensors anew; the results' strides follow those of the inputs, so it must not here.
TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))

LIBRARY = torch.library.Library("opgrad", "DEF")


class Registered:
    """A declared operator as `torch.ops.opgrad.NAME`.

    `names` are those of the schema's arguments, `schema` has each as it is written there, `overload` is the operator.
    """

    def __init__(self, op: Operator):
        self.op = op
        self.dtypes = tuple(f"{name}_dtype" for name in op.results) if len(op.results) > 1 else ("out_dtype",)
        self.schema: dict[str, str] = {}
        hints = typing.get_type_hints(op.reference)
        for name in op.parameters:
            if name in op.inputs:
                self.schema[name] = f"Tensor? {name}=None" if name in op.optional else f"Tensor {name}"
            elif name == "out_dtype":
                self.schema |= {each: f"{NAMED_TYPES[name]} {each}=None" for each in self.dtypes}
            elif name != "out":
                default, written = op.attributes[name], NAMED_TYPES.get(name) or TYPES[hints[name]]
                quoted = f'"{default}"' if isinstance(default, str) else default
                ending = "" if default is inspect.Parameter.empty else f"={quoted}"
                self.schema[name] = f"{written} {name}{ending}"
        self.names = tuple(self.schema)
        results = ", ".join(["Tensor"] * len(op.results))
        LIBRARY.define(f"{op.name}({', '.join(self.schema.values())}) -> ({results})", tags=TAGS)
        self.overload: Any = getattr(torch.ops.opgrad, op.name).default
        REGISTERED[op.name] = self


REGISTERED: dict[str, Registered] = {}  # by name, once `opgrad.torch.operators` is imported


def is_recording() -> bool:
    """Whether torch.jit.trace is at work."""
    return not torch.compiler.is_dynamo_compiling() and torch_private.is_tracing()
