"""Train the artifact sets of onnxruntime-training in stock onnxruntime.

Each name is imported when it is first used, so that making artifacts needs onnx alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrad.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer, Parameter
    from opgrad.training.artifact_set import ArtifactSet
    from opgrad.training.batches import TensorSpec
    from opgrad.training.checkpoint import Checkpoint, OptimizerGroup, read_checkpoint, write_checkpoint
    from opgrad.training.data import Dataset, load_file, load_named
    from opgrad.training.evaluation import Evaluation
    from opgrad.training.loop import Trainer
    from opgrad.training.optimizer import SGD, AdamW, AdamWRule, SGDRule, read_rule
    from opgrad.training.recipe import Recipe

__all__ = [
    "SGD",
    "AdamW",
    "AdamWRule",
    "ArtifactSet",
    "Checkpoint",
    "CheckpointState",
    "Dataset",
    "Evaluation",
    "LinearLRScheduler",
    "Module",
    "Optimizer",
    "OptimizerGroup",
    "Parameter",
    "Recipe",
    "SGDRule",
    "TensorSpec",
    "Trainer",
    "load_file",
    "load_named",
    "read_checkpoint",
    "read_rule",
    "write_checkpoint",
]

PLACES = {
    "api": ("CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter"),
    "artifact_set": ("ArtifactSet",),
    "checkpoint": ("Checkpoint", "OptimizerGroup", "read_checkpoint", "write_checkpoint"),
    "data": ("Dataset", "load_file", "load_named"),
    "evaluation": ("Evaluation",),
    "batches": ("TensorSpec",),
    "loop": ("Trainer",),
    "optimizer": ("SGD", "AdamW", "AdamWRule", "SGDRule", "read_rule"),
    "recipe": ("Recipe",),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    for place, names in PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
