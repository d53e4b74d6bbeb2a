"""The block that makes a training model and an eval model of a loss."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import TensorProto

from opgrad.base.arguments import naming
from opgrad.training.make import forms
from opgrad.training.make.blocks import Block, current, names_of
from opgrad.training.make.models import FLOAT32, TrainingModels, training_models


class TrainingBlock(Block):
    """A block whose first result is a loss: calling it makes a training model and an eval model.

    Training model: inputs are those of the model, what its losses compare with, parameters, buffers of gradients
    and `lazy_reset_grad`; outputs are what `build` returned, then one of every gradient's accumulation.

    checkpoint_segments: an attribute that may be set before, as for `opgrad.gradients.gradients`.
    precision: another one: "float32", in which the training model computes what the model computes in float16 or
    bfloat16, with float32 parameters, or "model", for the model's own types.
    """

    checkpoint_segments: int | Sequence[str] | None = None
    precision: str = FLOAT32
    _models: TrainingModels | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Say of an initializer that it is trained, or, with False, that it is a parameter that stays as it is.

        Inputs of the graph may be named, too: they get a gradient.
        """
        self._grad_names[argument_name] = bool(value)

    @property
    def _grad_names(self) -> dict[str, bool]:
        """By name, whether there is a gradient; subclasses need not call `super().__init__`."""
        found: dict[str, bool] = self.__dict__.setdefault("_grad_by_name", {})
        return found

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write into `self.base` and return the name of the loss, or several names, of which the first is the loss."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build, and make both models of it; that of `base` becomes the training model.

        Raises what `build` raises; ValueError, LookupError and NotImplementedError, see `generate_artifacts`.
        """
        accessor = current()
        forms.normalize(accessor.model, self._who)
        accessor.forget()
        output = self._built(accessor, args, kwargs)
        trainable, frozen = (
            [name for name, grad in self._grad_names.items() if grad is kind] for kind in (True, False)
        )
        outputs, segments = names_of(output, self._who), self.checkpoint_segments
        with naming(self._who):
            self._models = training_models(
                accessor.model,
                outputs,
                trainable,
                frozen,
                self._who,
                segments,
                accessor.apart,
                self.precision,
                accessor.graph(),
            )
        accessor.model.CopyFrom(self._models.whole()[0])
        accessor.forget()
        return output

    def _trained(self) -> TrainingModels:
        if self._models is None:
            raise RuntimeError(f"{self._who}: nothing is built yet; call the block first")
        return self._models

    def parameters(self) -> tuple[list[TensorProto], list[TensorProto]]:
        """The trainable and the frozen parameters, in the order of the initializers. Raises RuntimeError before."""
        return self._trained().parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the eval model. Raises RuntimeError before they are built."""
        return self._trained().whole()
