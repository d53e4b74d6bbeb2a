"""Training of ONNX models: artifact sets, and their training in stock onnxruntime. Imports `onnxruntime` and below."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrad.training.engine.trainer import Trainer
    from opgrad.training.files.artifact_set import AdamWRule, ArtifactSet, SGDRule
    from opgrad.training.files.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
    from opgrad.training.files.dataset import Dataset, TensorSpec, load_named

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
    from opgrad.training.engine import trainer
    from opgrad.training.files import artifact_set, checkpoint, dataset

    homes = (trainer, artifact_set, checkpoint, dataset)
    return globals().setdefault(name, next(vars(home)[name] for home in homes if name in vars(home)))
