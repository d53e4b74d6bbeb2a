"""What `opgrad.training` names."""

from opgrad.training.engine.trainer import Trainer as Trainer
from opgrad.training.files.artifact_set import AdamWRule as AdamWRule
from opgrad.training.files.artifact_set import ArtifactSet as ArtifactSet
from opgrad.training.files.artifact_set import SGDRule as SGDRule
from opgrad.training.files.checkpoint import Checkpoint as Checkpoint
from opgrad.training.files.checkpoint import read_checkpoint as read_checkpoint
from opgrad.training.files.checkpoint import write_checkpoint as write_checkpoint
from opgrad.training.files.dataset import Dataset as Dataset
from opgrad.training.files.dataset import TensorSpec as TensorSpec
from opgrad.training.files.dataset import load_named as load_named
