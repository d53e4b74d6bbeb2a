"""Training of ONNX models: artifact sets, and their training in stock onnxruntime. Imports `onnxruntime` and below."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrad.training.names import (
        AdamWRule,
        ArtifactSet,
        Checkpoint,
        Dataset,
        SGDRule,
        TensorSpec,
        Trainer,
        load_named,
        read_checkpoint,
        write_checkpoint,
    )

__all__ = [
    "AdamWRule",
    "ArtifactSet",
    "Checkpoint",
    "Dataset",
    "SGDRule",
    "TensorSpec",
    "Trainer",
    "load_named",
    "read_checkpoint",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    """Load onnx and onnxruntime with the first name that is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from opgrad.training import names

    return globals().setdefault(name, getattr(names, name))
