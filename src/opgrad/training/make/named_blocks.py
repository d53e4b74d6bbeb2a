"""The losses and optimizers that commands know by name; onnx is only imported when one of them is made."""

import inspect
from enum import StrEnum
from typing import Any


class Loss(StrEnum):
    """The losses of `onnxblock.loss`."""

    CrossEntropyLoss = "cross-entropy"
    NLLLoss = "nll"
    MSELoss = "mse"
    L1Loss = "l1"
    HuberLoss = "huber"
    SmoothL1Loss = "smooth-l1"
    BCEWithLogitsLoss = "bce-with-logits"
    KLDivLoss = "kl-div"


class Optimizer(StrEnum):
    """The optimizers of `onnxblock.optim`."""

    AdamW = "adamw"
    SGD = "sgd"


def block(kind: Loss | Optimizer, arguments: dict[str, Any]) -> Any:
    """The block of this kind with the arguments that are not None. Raises ValueError for one that it does not take."""
    from opgrad.training.make.blocks import loss, optim

    made = getattr(loss if isinstance(kind, Loss) else optim, kind.name)
    given = {name: value for name, value in arguments.items() if value is not None}
    taken = inspect.signature(made).parameters
    if wrong := [name for name in given if name not in taken]:
        known = ", ".join(name for name in taken if name in arguments)
        raise ValueError(f"{kind} takes no {', '.join(wrong)}, expected {known or 'no options'}")
    return made(**given)
