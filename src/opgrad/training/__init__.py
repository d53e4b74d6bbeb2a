"""Train the artifact sets of onnxruntime-training in stock onnxruntime.

Each name is imported when it is first used, so that making artifacts needs onnx alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opgrad.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer, Parameter
    from opgrad.training.data.batches import TensorSpec
    from opgrad.training.data.dataset import Dataset, load_file, load_named
    from opgrad.training.engine.evaluation import Evaluation
    from opgrad.training.engine.optimizer import SGD, AdamW, AdamWRule, SGDRule, read_rule
    from opgrad.training.engine.trainer import Trainer
    from opgrad.training.formats.artifact_set import ArtifactSet
    from opgrad.training.formats.checkpoint import Checkpoint, OptimizerGroup, read_checkpoint, write_checkpoint
    from opgrad.training.run.recipe import Recipe
    from opgrad.training.tune.lora import Lora
    from opgrad.training.tune.tuner import Tuner

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
    "Lora",
    "Module",
    "Optimizer",
    "OptimizerGroup",
    "Parameter",
    "Recipe",
    "SGDRule",
    "TensorSpec",
    "Trainer",
    "Tuner",
    "load_file",
    "load_named",
    "read_checkpoint",
    "read_rule",
    "write_checkpoint",
]

PLACES = {
    "api": ("CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter"),
    "formats.artifact_set": ("ArtifactSet",),
    "formats.checkpoint": ("Checkpoint", "OptimizerGroup", "read_checkpoint", "write_checkpoint"),
    "data.dataset": ("Dataset", "load_file", "load_named"),
    "engine.evaluation": ("Evaluation",),
    "data.batches": ("TensorSpec",),
    "engine.trainer": ("Trainer",),
    "engine.optimizer": ("SGD", "AdamW", "AdamWRule", "SGDRule", "read_rule"),
    "run.recipe": ("Recipe",),
    "tune.lora": ("Lora",),
    "tune.tuner": ("Tuner",),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used."""
    for place, names in PLACES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
