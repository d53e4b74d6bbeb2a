"""Loss scaling, for training graphs that compute in float16.

Small gradients are 0 in float16. So the backward part begins with a factor in the place of 1, and each gradient is
divided by it in float32. Where a factor is too large, gradients are infinite: that step is skipped.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from opgrad.base.arguments import ArgumentError
from opgrad.onnx.graph.conversion import has_halves
from opgrad.onnx.graph.messages import copied, keep
from opgrad.onnx.graph.nodes import rename_inputs

DYNAMIC = "dynamic"
FACTOR, INVERSE = "opgrad.loss_scale", "opgrad.loss_scale.inverse"  # inputs of the graph; the first is a property, too
FIRST, LARGEST = 2.0**15, 2.0**24  # factors; float16 holds no larger power of 2 than the first
PATIENCE = 2000  # steps without an overflow after which a dynamic factor is doubled
MOST_SKIPPED = 30  # steps in a row; then it is not the factor, and the step shows what is wrong
UNSCALED_SUFFIX = "_grad.unscaled"  # behind a parameter's name: its gradient in float32


class LossScale:
    """The factor of the loss, and the steps that were skipped.

    given: the factor, or "dynamic": it begins with 2 ** 15, is halved where gradients overflow, and doubled after 2,000
        steps in which none did.

    skipped: how many steps were skipped. factor: the present one.
    Raises ValueError for anything else.
    """

    def __init__(self, given: float | str):
        number = isinstance(given, int | float) and not isinstance(given, bool) and 2.0**-24 <= given <= LARGEST
        if not number and given != DYNAMIC:
            raise ArgumentError("loss_scale", f"is {given!r}, expected {DYNAMIC!r} or a number from 2**-24 to 2**24")
        self.dynamic, self.skipped = given == DYNAMIC, 0
        self._good = self._in_a_row = 0
        self._arrays, self._most = dict[str, np.ndarray](), FIRST
        self.factor = FIRST if self.dynamic else float(given)

    def inputs(self, kind: "np.dtype[Any]", shape: tuple[int, ...]) -> Mapping[str, np.ndarray]:
        """The memory of the graph's inputs. kind, shape: those of the loss."""
        self._most = FIRST if kind == np.float16 else LARGEST
        if self.factor > self._most:
            raise ArgumentError(
                "loss_scale", f"is {self.factor:g}, expected at most {self._most:g}: the loss is {kind}"
            )
        self._arrays = {FACTOR: np.empty(shape, kind), INVERSE: np.empty((), np.float32)}
        self._set(self.factor)
        return self._arrays

    def _set(self, factor: float) -> None:
        self.factor = factor
        if self._arrays:
            self._arrays[FACTOR][...], self._arrays[INVERSE][...] = factor, 1 / factor

    def takes(self, finite: bool) -> bool:
        """Whether a step shall be made, whose gradients are finite or not; sets the factor of the next one."""
        if finite:
            self._in_a_row, self._good = 0, self._good + 1
            if self.dynamic and self._good >= PATIENCE and self.factor < self._most:
                self._good = 0
                self._set(self.factor * 2)
            return True
        self._good, self._in_a_row = 0, self._in_a_row + 1
        if self._in_a_row > MOST_SKIPPED:
            return True
        self.skipped += 1
        if self.dynamic:
            self._set(self.factor / 2)
        return False

    def to_text(self) -> str:
        """The state as a line of JSON."""
        return json.dumps([self.factor, self.skipped, self._good, self._in_a_row])

    def check(self, text: object, who: str) -> None:
        """Raise ValueError for a text that `to_text` does not write."""
        if _numbers(text) is None:
            raise ValueError(f"{who}: {FACTOR} is {text!r}, expected the state of a loss scale")

    def restore(self, text: object) -> None:
        """Go on from the state in a text that was checked."""
        factor, *counts = _numbers(text) or []
        self.skipped, self._good, self._in_a_row = map(int, counts)
        self._set(factor if self.dynamic else self.factor)


def _numbers(text: object) -> list[float] | None:
    """The factor and three counts in a text of `to_text`; None for another."""
    try:
        factor, *counts = json.loads(text)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError):
        return None
    right = len(counts) == 3 and all(type(each) is int and each >= 0 for each in counts)
    return [factor, *counts] if right and isinstance(factor, float) and 2.0**-64 < factor <= LARGEST else None


def scaled(model: onnx.ModelProto, gradients: dict[str, str], scale: LossScale) -> Mapping[str, np.ndarray]:
    """Let a training graph that computes in float16 take float32 parameters and give float32 gradients.

    model: changed. Its parameters are rounded to float16 where they are read; the gradient of the loss is an input.
    gradients: names of the gradients by parameter, changed, too.
    Returns the memory of the new inputs. Raises ValueError for a graph that does not compute in float16.
    """
    graph, first = model.graph, f"{model.graph.output[0].name}_grad"
    kinds = {each.name: each.type.tensor_type for each in graph.input}
    halves = [name for name in gradients if kinds[name].elem_type == TensorProto.FLOAT16]
    seed = next((copied(each) for each in graph.initializer if each.name == first), None)
    if not halves or has_halves(model, (TensorProto.BFLOAT16,)):
        raise ArgumentError("loss_scale", "is for graphs that compute in float16, expected none for this one")
    if seed is None:
        raise ArgumentError(
            "loss_scale", f"scales the gradient of the loss, but the graph has no initializer {first!r}"
        )
    keep(graph.initializer, [each for each in graph.initializer if each.name != first])
    names = {name: f"{name}.float16" for name in halves} | {first: FACTOR}
    for node in graph.node:
        rename_inputs(node, names)
    to = TensorProto.FLOAT16
    casts = [helper.make_node("Cast", [name], [names[name]], f"{names[name]}/Cast", to=to) for name in halves]
    keep(graph.node, [*casts, *graph.node])
    outputs = {each.name: each for each in graph.output}
    for name, gradient in list(gradients.items()):
        wide, unscaled = f"{name}{UNSCALED_SUFFIX}.scaled", f"{name}{UNSCALED_SUFFIX}"
        graph.node.append(helper.make_node("Cast", [gradient], [wide], f"{wide}/Cast", to=TensorProto.FLOAT))
        graph.node.append(helper.make_node("Mul", [wide, INVERSE], [unscaled], f"{unscaled}/Mul"))
        gradients[name] = outputs[gradient].name = unscaled
        outputs[gradient].type.tensor_type.elem_type = TensorProto.FLOAT
    for name in halves:
        kinds[name].elem_type = TensorProto.FLOAT
    graph.input.append(helper.make_tensor_value_info(FACTOR, seed.data_type, seed.dims))
    graph.input.append(helper.make_tensor_value_info(INVERSE, TensorProto.FLOAT, []))
    return scale.inputs(helper.tensor_dtype_to_np_dtype(seed.data_type), tuple(seed.dims))
