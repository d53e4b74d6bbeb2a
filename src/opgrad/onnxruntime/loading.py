"""Opens ONNX models in onnxruntime; every fault of a model raises a ValueError of one line with the model's name."""

import os
from pathlib import Path

import onnxruntime

from opgrad.base.files import check_regular
from opgrad.onnx.graph.loading import Source
from opgrad.onnxruntime.private import reason
from opgrad.onnxruntime.sessions import InferenceSession, register

# onnxruntime's optimizer also takes out Dropout in training mode where nothing reads its mask.
DISABLED = ("EliminateDropout",)


def open_session(
    model: Source, options: onnxruntime.SessionOptions, what: str, stock: bool = False, folds: bool = True
) -> onnxruntime.InferenceSession:
    """A session on the CPU, with opgrad's operators or, for `stock`, without them.

    what: the caller and the model's name, for messages. folds: whether onnxruntime computes constants ahead, which has
    no limit of memory.
    Raises ValueError for whatever onnxruntime finds wrong with the model.
    """
    if not stock:
        register(options)
    make = onnxruntime.InferenceSession if stock else InferenceSession
    if stock and not isinstance(model, bytes):
        check_regular(Path(model), f"{what}: {os.fspath(model)}")
    try:
        disabled = DISABLED if folds else (*DISABLED, "ConstantFolding")
        return make(model, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)
    except Exception as error:  # onnxruntime's exceptions have no common base class, and others come from its C++ part
        notes = getattr(error, "__notes__", ())
        raise ValueError(f"{what}: onnxruntime cannot load the model: {' '.join([reason(error), *notes])}") from None
