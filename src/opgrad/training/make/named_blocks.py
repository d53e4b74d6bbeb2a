"""The losses and optimizers that commands know by name."""

from enum import StrEnum


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
