"""Artifact sets of small models; artifacts/generate.py made them, and says how."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ARTIFACTS = Path(__file__).parents[1] / "artifacts"


@dataclass(frozen=True)
class ModelSet:
    """An artifact set with its data and the losses of its reference.

    name: of its folder. outputs: of the model that is exported after training.
    axes: of inputs whose examples do not lie along the first axis.
    classes: whether the loss compares with classes, so that there is an accuracy.
    lowered: whether all of its operators have a form in plain ONNX.
    """

    name: str
    outputs: tuple[str, ...]
    axes: tuple[tuple[str, int], ...] = ()
    classes: bool = True
    lowered: bool = True

    @property
    def folder(self):
        return ARTIFACTS / self.name

    @property
    def reference(self):
        return json.loads((self.folder / "reference.json").read_text())

    def batches(self):
        """The inputs of the steps, and of the evaluations behind them, each a dictionary."""
        steps = len(self.reference["loss_per_step"])
        with np.load(self.folder / "data.npz") as data:
            arrays = dict(data)
        every = [{name: each[k] for name, each in arrays.items()} for k in range(len(next(iter(arrays.values()))))]
        return every[:steps], every[steps:]

    def rows(self):
        """The same as arrays in which all examples are one behind the other."""
        steps, evaluations = self.batches()
        every, axes = [*steps, *evaluations], dict(self.axes)
        return {name: np.concatenate([each[name] for each in every], axes.get(name, 0)) for name in every[0]}


SETS = (
    ModelSet("batch_norm_net", ("scores",)),
    ModelSet("language_model", ("logits",)),
    ModelSet("token_classes", ("scores",)),
    ModelSet("tied_weights", ("output",), classes=False),
    ModelSet("several_inputs", ("score",), classes=False),
    ModelSet("sequence_first", ("scores",), (("steps", 1),)),
    ModelSet("resizing_unet", ("scores",), classes=False),
    ModelSet("transposed_convolution", ("output",), classes=False),
    ModelSet("lstm", ("scores",), (("steps", 1),)),
    ModelSet("gru", ("scores",)),
)
