"""What an optimizer model says: the rule by which a step changes the parameters, AdamW or gradient descent."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import onnx
from onnx.helper import get_attribute_value

CLIP = "InplaceClipGradNorm"


@dataclass(frozen=True)
class SGDRule:
    """Gradient descent: `p -= learning_rate * g` (SGDOptimizerV2).

    max_norm: the largest norm that all gradients together may have, larger ones are scaled down to it; None: any.
    """

    max_norm: float | None = None


@dataclass(frozen=True)
class AdamWRule:
    """The attributes of AdamWOptimizer, with the operator's defaults.

    alpha, beta: the decay rates of the first and second moment.
    epsilon: what keeps the denominator from 0.
    weight_decay: the decay of the parameters, times the learning rate.
    adam_mode: 0 is PyTorch's order of operations, 1 that of Hugging Face; see `AdamW`.
    correct_bias: whether the moments' start at 0 is made up for.
    max_norm: the largest norm that all gradients together may have, larger ones are scaled down to it; None: any.
    """

    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    adam_mode: int = 0
    correct_bias: int = 1
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.adam_mode not in (0, 1):
            raise ValueError(f"AdamWOptimizer: adam_mode is {self.adam_mode}, expected 0 or 1")
        if self.adam_mode == 0 and not self.correct_bias:
            raise ValueError("AdamWOptimizer: correct_bias is 0, expected 1 with adam_mode 0")


Rule = SGDRule | AdamWRule
ADAMW = tuple(field.name for field in fields(AdamWRule) if field.name != "max_norm")


def read_rule(model: onnx.ModelProto) -> Rule:
    """The rule that an optimizer model applies.

    model: one node, AdamWOptimizer or SGDOptimizerV2, as in optimizer_model.onnx, and before it InplaceClipGradNorm
        if the gradients shall be clipped.
    Raises NotImplementedError if it has another node, ValueError if an attribute has no meaning.
    """
    nodes = list(model.graph.node)
    found = ", ".join(node.op_type for node in nodes) or "none"
    clip: dict[str, Any] = {}
    if nodes and nodes[0].op_type == CLIP:
        clip = {"max_norm": 1.0, **_attributes(nodes.pop(0), ("max_norm",))}
    kinds = [node.op_type for node in nodes]
    if kinds == ["SGDOptimizerV2"]:
        return SGDRule(**clip)
    if kinds == ["AdamWOptimizer"]:
        return AdamWRule(**_attributes(nodes[0], ADAMW), **clip)
    raise NotImplementedError(
        f"optimizer model: it has the nodes {found}, expected one AdamWOptimizer or SGDOptimizerV2, "
        f"or one {CLIP} and one of these"
    )


def _attributes(node: onnx.NodeProto, known: Collection[str]) -> dict[str, Any]:
    """The attributes of a node, which must be numbers of these names."""
    found = {item.name: get_attribute_value(item) for item in node.attribute}
    for name, value in found.items():
        if name not in known or not isinstance(value, int | float):
            what = f"{value!r}" if name in known else f"in the node {node.op_type}"
            expected = "a number" if name in known else f"none but {', '.join(known)}"
            raise ValueError(f"optimizer model: the attribute {name!r} is {what}, expected {expected}")
    return found
