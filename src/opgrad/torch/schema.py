"""Every declared operator as PyTorch's dispatcher knows it: its name and the schema of its arguments.

What is registered for others to find, exporters and DTensor, needs no more of an operator than this.
"""

import inspect
import typing
from collections.abc import Sequence
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
        self.schema = _schema_arguments(op, self.dtypes)
        self.names = tuple(self.schema)
        results = ", ".join(["Tensor"] * len(op.results))
        LIBRARY.define(f"{op.name}({', '.join(self.schema.values())}) -> ({results})", tags=TAGS)
        self.overload: Any = getattr(torch.ops.opgrad, op.name).default
        REGISTERED[op.name] = self


REGISTERED: dict[str, Registered] = {}  # by name, once `opgrad.torch.operators` is imported


def _schema_arguments(op: Operator, dtypes: Sequence[str]) -> dict[str, str]:
    """The schema's arguments, as it writes them, by name."""
    hints = typing.get_type_hints(op.reference)
    written: dict[str, str] = {}
    for name in op.parameters:
        if name in op.inputs:
            written[name] = f"Tensor? {name}=None" if name in op.optional else f"Tensor {name}"
        elif name == "out_dtype":
            written |= {each: f"{NAMED_TYPES[name]} {each}=None" for each in dtypes}
        elif name != "out":
            default = op.attributes[name]
            written_type = NAMED_TYPES.get(name) or TYPES[hints[name]]
            quoted = f'"{default}"' if isinstance(default, str) else default
            written[name] = (
                f"{written_type} {name}" if default is inspect.Parameter.empty else f"{written_type} {name}={quoted}"
            )
    return written


def is_recording() -> bool:
    """Whether torch.jit.trace is at work."""
    return not torch.compiler.is_dynamo_compiling() and torch_private.is_tracing()
