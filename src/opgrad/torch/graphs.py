"""The two graphs that PyTorch's ONNX exporters build, with one way to add a node to either.

The exporter of exported programs (dynamo=True) records `torch.onnx.ops.symbolic` while a model is captured, the one of
traced modules (dynamo=False) calls symbolic functions when the trace is there already.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.onnx

from opgrad.call.libraries import torch_private

Value = Any  # a tensor in the first graph, a value of TorchScript in the second
Shape = Sequence[Any]
Results = Sequence[tuple[torch.dtype, Shape]]

EXPORTER: Any = torch.onnx  # typed as Any, because some public names are missing in the module's `__all__`
SCALAR_TYPES = EXPORTER.JitScalarType


class ExportGraph:
    """The graph of an exported program: nodes of ONNX stand between the operators of PyTorch."""

    def nodes(self, name: str, inputs: Sequence[Value | None], results: Results, **attributes: Any) -> Sequence[Value]:
        """Add a node, of the default domain or as "domain::name"; its results have these dtypes and shapes."""
        dtypes, shapes = zip(*results, strict=True)
        values = torch.onnx.ops.symbolic_multi_out(name, inputs, attributes, dtypes=dtypes, shapes=shapes)
        device = next(x.device for x in inputs if x is not None)
        return [value.to(device) for value in values]  # they are always made on the CPU

    def dtype(self, x: Value) -> torch.dtype:
        """The dtype of a value."""
        found: torch.dtype = x.dtype
        return found

    def shape(self, x: Value) -> Shape:
        """The shape of a value; sizes that are known at run time only are symbols, or None."""
        return tuple(x.shape)

    def rank(self, x: Value) -> int:
        """The number of dimensions of a value."""
        return len(x.shape)

    def numbers(self, values: Any, dtype: torch.dtype) -> Value:
        """A constant: one number, or a list of them, some of which may be known at run time only."""
        if isinstance(values, list | tuple):
            return torch.stack([torch.scalar_tensor(value, dtype=dtype) for value in values])
        return torch.scalar_tensor(values, dtype=dtype)

    def ones(self, like: Value) -> Value:
        """1 for every element of a value."""
        return torch.ones_like(like)

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        """A value in this dtype."""
        return x.to(dtype)

    def merged(self, x: Value, axes: Sequence[int]) -> Value:
        """A value with adjacent axes as one."""
        return x.flatten(axes[0], axes[-1])

    def reshaped(self, x: Value, like: Value) -> Value:
        """A value in the shape of another."""
        return x.reshape(like.shape)


class Trace(ExportGraph):
    """The graph of a traced module, as a symbolic function is given it."""

    def __init__(self, context: Any):
        self.context = context

    def nodes(self, name: str, inputs: Sequence[Value | None], results: Results, **attributes: Any) -> Sequence[Value]:
        given = [self._nothing() if value is None else value for value in inputs]
        marked = {f"{key}_{_mark(value)}": value for key, value in attributes.items()}
        made = self.context.op(name, *given, outputs=len(results), **marked)
        values: Sequence[Value] = made if len(results) > 1 else (made,)
        for value, (dtype, shape) in zip(values, results, strict=True):
            value.setType(_typed(dtype, shape))
        return values

    def _nothing(self) -> Value:
        none = self.context.op("prim::Constant")
        none.setType(torch_private.optional_type.ofTensor())
        return none

    def _constant(self, value: Any, dtype: torch.dtype) -> Value:
        return self.context.op("Constant", value_t=torch.tensor(value, dtype=dtype))

    def dtype(self, x: Value) -> torch.dtype:
        found: torch.dtype = SCALAR_TYPES.from_value(x).dtype()
        return found

    def shape(self, x: Value) -> Shape:
        sizes: Shape = x.type().varyingSizes()
        return sizes

    def rank(self, x: Value) -> int:
        found: int = x.type().dim()
        return found

    def numbers(self, values: Any, dtype: torch.dtype) -> Value:
        return self._constant(values, dtype)

    def ones(self, like: Value) -> Value:
        one = torch.ones(1, dtype=self.dtype(like))
        return self.context.op("ConstantOfShape", self.context.op("Shape", like), value_t=one)

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        if self.dtype(x) == dtype:
            return x
        made = self.context.op("Cast", x, to_i=SCALAR_TYPES.from_dtype(dtype).onnx_type())
        made.setType(x.type().with_dtype(dtype))
        return made

    def merged(self, x: Value, axes: Sequence[int]) -> Value:
        sizes = self.context.op("Shape", x)
        pieces = [self._sizes(sizes, 0, axes[0]), self._constant([-1], torch.int64)]
        pieces.append(self._sizes(sizes, axes[-1] + 1, self.rank(x)))
        shape = self.shape(x)
        left = [*shape[: axes[0]], None, *shape[axes[-1] + 1 :]]
        return self._viewed(x, self.context.op("Concat", *pieces, axis_i=0), left)

    def _sizes(self, sizes: Value, start: int, stop: int) -> Value:
        bounds = (self._constant([start], torch.int64), self._constant([stop], torch.int64))
        return self.context.op("Slice", sizes, *bounds)

    def reshaped(self, x: Value, like: Value) -> Value:
        return self._viewed(x, self.context.op("Shape", like), self.shape(like))

    def _viewed(self, x: Value, sizes: Value, shape: Shape) -> Value:
        made = self.context.op("Reshape", x, sizes)
        made.setType(_typed(self.dtype(x), shape))
        return made


def _typed(dtype: torch.dtype, shape: Shape) -> Any:
    """The type of a tensor in a trace."""
    return torch_private.tensor_type.get().with_dtype(dtype).with_sizes(list(shape))


def _mark(value: Any) -> str:
    """The letter by which a symbolic function tells the type of an attribute."""
    return "s" if isinstance(value, str) else "f" if isinstance(value, float) else "i"
