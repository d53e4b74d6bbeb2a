"""What all blocks have in common."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import onnx

from opgrad.base.arguments import naming
from opgrad.training.make.blocks.accessor import ModelAccessor, current
from opgrad.training.make.checks import check_built
from opgrad.training.make.outputs import inferred_model, set_outputs


class Block(ABC):
    """A part of a model: `build` writes it behind the values that it is given the names of.

    base: the model that is being built.
    """

    base: onnx.ModelProto

    def __init_subclass__(cls) -> None:
        """Let errors about arguments of a constructor name the class that was called."""
        if "__init__" in vars(cls):
            cls.__init__ = _naming_class(cls.__init__)  # type: ignore[method-assign]

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write into `self.base` and return the name of the result, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build on the model of `base` or `empty_base`, and return the name of the result, or several.

        Raises what `build` raises, RuntimeError without a model, ValueError if the model is wrong then.
        """
        return self._built(current(), args, kwargs)

    def _built(self, accessor: ModelAccessor, args: Any, kwargs: Any) -> Any:
        """Build, and check the model unless this block is built inside of another one, which is checked as a whole."""
        self.base = accessor.model
        accessor.blocks.append(self._who)
        try:
            with naming(self._who):
                output = self.build(*args, **kwargs)
        finally:
            accessor.blocks.pop()
        if not accessor.blocks:
            check_built(accessor.model, self._who)
        return output

    @property
    def _who(self) -> str:
        """The name of the block, for messages."""
        return type(self).__name__


class ForwardBlock(Block):
    """A block that makes a whole model; what it returns are the model's outputs."""

    _model: onnx.ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Write into `self.base` and return the names of the model's outputs: one, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build, and let the results be the only outputs of the model."""
        accessor = current()
        output = self._built(accessor, args, kwargs)
        self._model = inferred_model(self.base)
        set_outputs(self._model, names_of(output, self._who), self._who)
        accessor.model.CopyFrom(self._model)
        accessor.forget()
        return output

    def to_model_proto(self) -> onnx.ModelProto:
        """The model. Raises RuntimeError before it is built."""
        if self._model is None:
            raise RuntimeError(f"{self._who}: the model is not built yet; call the block first")
        return self._model


def _naming_class(constructor: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def construct(self: Block, *args: Any, **kwargs: Any) -> None:
        with naming(type(self).__name__):
            constructor(self, *args, **kwargs)

    return construct


def names_of(output: Any, who: str) -> list[str]:
    """What a block returned, as a list of names. Raises TypeError for anything else."""
    names = [output] if isinstance(output, str) else list(output) if isinstance(output, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{who}: build returned {output!r}, expected the name of a value, or several")
    return names
