"""The state of a training in memory: parameters and gradients as arrays at fixed addresses, and the optimizer."""

from collections.abc import Mapping

import numpy as np
import onnxruntime

from opgrad.training.engine.flat_tensors import FlatTensors
from opgrad.training.engine.optimizer import SGD, AdamW, Rule
from opgrad.training.formats import mapped_files
from opgrad.training.formats.checkpoint import Checkpoint, OptimizerGroup

GROUP = "group0"
LEARNING_RATE = 1e-3


class Memory:
    """Parameters, gradients and optimizer of a `CheckpointState`; modules and optimizers share it.

    checkpoint: the initial values. owned: whether no other object refers to its arrays, so that they need no copy.

    parameters, gradients: the trainable ones by name.
    frozen: the other parameters by name.
    nominal: whether the parameters have no values yet; until `shape` is called they then have no memory either.
    bound: whether a module computes the gradients.
    computed: whether a module has computed gradients yet.
    """

    def __init__(self, checkpoint: Checkpoint, owned: bool = False):
        for name, array in checkpoint.trainable.items():
            if array.dtype != np.float32:
                raise NotImplementedError(
                    f"CheckpointState: the trainable parameter {name!r} is {array.dtype}, expected float32"
                )
        self.nominal = checkpoint.nominal
        take = mapped_files.own if owned else np.copy
        self.frozen = {name: take(array) for name, array in checkpoint.frozen.items()}
        self.bound = self.computed = False
        self.optimizer: SGD | AdamW | None = None
        self._loaded = checkpoint.optimizers.get(GROUP)
        self.shape({name: array.shape for name, array in checkpoint.trainable.items()})
        for name, array in checkpoint.trainable.items():
            self.parameters[name][...] = array
            if owned:
                mapped_files.release(array)

    def shape(self, trainable: Mapping[str, tuple[int, ...]]) -> None:
        """Make new memory for trainable parameters of these shapes."""
        self.parameters, self.gradients = FlatTensors(trainable), FlatTensors(trainable)

    @property
    def all_parameters(self) -> dict[str, np.ndarray]:
        """Every parameter by name, in the order of the names."""
        found = {**self.parameters, **self.frozen}
        return {name: found[name] for name in sorted(found)}

    def start_optimizer(self, rule: Rule) -> SGD | AdamW:
        """The optimizer with this rule: the present one, or a new one that goes on from the checkpoint's state.

        Raises ValueError if the checkpoint's moments do not fit the rule or the parameters.
        """
        if self.optimizer is None or self.optimizer.rule != rule:
            group = self.group()
            learning_rate = LEARNING_RATE if group is None else group.learning_rate
            optimizer = rule.start(self.parameters.flat, self.gradients.flat, float(np.float32(learning_rate)))
            if group is not None:
                self._restore(optimizer, group)
            self.optimizer = optimizer
        return self.optimizer

    def _restore(self, optimizer: SGD | AdamW, group: OptimizerGroup) -> None:
        moments = {kind: self.parameters.views_of(flat) for kind, flat in optimizer.moments.items()}
        for kind, views in moments.items():
            for name, view in views.items():
                found = group.moments.get(name, {}).get(kind)
                if found is None or found.shape != view.shape or found.dtype != view.dtype:
                    what = "nothing" if found is None else f"{found.dtype} of shape {found.shape}"
                    raise ValueError(
                        f"Optimizer: the checkpoint has {what} for {kind} of {name!r}, expected {view.dtype} of "
                        f"shape {view.shape}: it was saved with another optimizer or model"
                    )
        for kind, views in moments.items():
            for name, view in views.items():
                view[...] = group.moments[name][kind]
        optimizer.steps = group.step

    def group(self) -> OptimizerGroup | None:
        """The state of the optimizer or, without an optimizer, that of the checkpoint; None if there is neither."""
        if self.optimizer is None:
            return self._loaded
        # onnxruntime-training 1.19.2 only loads the state of SGD if it has a moment for every parameter; SGD never
        # changes them.
        flats = self.optimizer.moments or {"momentum0": np.zeros(self.parameters.flat.shape, np.float32)}
        kinds = {kind: self.parameters.views_of(flat) for kind, flat in flats.items()}
        moments = {name: {kind: views[name] for kind, views in kinds.items()} for name in self.parameters}
        return OptimizerGroup(self.optimizer.steps, self.optimizer.learning_rate, moments)

    def checkpoint(self, properties: Mapping[str, int | float | str], include_optimizer_state: bool) -> Checkpoint:
        """The present state as a checkpoint."""
        group = self.group() if include_optimizer_state else None
        groups = {} if group is None else {GROUP: group}
        return Checkpoint(dict(self.parameters), dict(self.frozen), groups, dict(properties), self.nominal)


def copy_into(target: np.ndarray, value: np.ndarray | onnxruntime.OrtValue, what: str) -> None:
    """Copy a value of the same dtype and shape to the target.

    what: the target's name, for messages.
    Raises TypeError for another type or dtype, ValueError for another shape.
    """
    if isinstance(value, onnxruntime.OrtValue):
        value = value.numpy()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{what} is {type(value).__name__}, expected a NumPy array of {target.dtype}")
    if value.dtype != target.dtype:
        raise TypeError(f"{what} is {value.dtype}, expected {target.dtype}")
    if value.shape != target.shape:
        raise ValueError(f"{what} has shape {value.shape}, expected {target.shape}")
    np.copyto(target, value)
