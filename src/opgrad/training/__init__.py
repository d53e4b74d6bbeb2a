"""Train the artifact sets of onnxruntime-training in stock onnxruntime."""

from opgrad.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer, Parameter
from opgrad.training.artifact_set import ArtifactSet, TensorSpec
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
