"""opgrad's losses and layers in language models of Hugging Face's transformers.

Nothing of transformers is imported: a model has a `loss_function` that can be set, and an output layer.
"""

import dataclasses
import functools
import inspect
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.deferred import Deferred, deferred_input
from opgrad.torch.derivative import wide
from opgrad.torch.losses import linear as linear_loss
from opgrad.torch.losses import logits as logits_loss
from opgrad.torch.losses.options import read_options
from opgrad.torch.patched_layers import PatchedLayers

PATCHED = "_opgrad_patch"
OPTIONS = ("label_smoothing", "lse_square_scale", "temperature", "softcap")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def patch(model: torch.nn.Module, *, linear: bool = True, layers: bool = True, **options: Any) -> torch.nn.Module:
    """Give a language model opgrad's loss, and its layers.

    model: a causal or masked language model of transformers with a `loss_function`, such as LlamaForCausalLM, or a
        PeftModel of one; it is changed and returned. Whether each place is compared with its own label or with the
        next one is found out from the model's own loss.
    linear: in training, with labels, compute loss and output layer in one: logits are not stored, and the output has
        none (None). What the model does to its logits, a factor, a softcap or adapters of the output layer, is part of
        that; where it does anything else, where it returns a tuple and where the output layer has hooks of others,
        the logits are computed.
    layers: replace RMS normalization, gated layers, gelu of several operations and, in models of transformers that
        attend by "sdpa", attention, by opgrad's, on the CPU: each module only if it computes the same on a few numbers.
    options: keywords of opgrad.torch.cross_entropy: label_smoothing, lse_square_scale, temperature, softcap. They
        apply to the logits as the model gives them to its loss.

    Raises TypeError for a model without `loss_function`, for one whose own loss is another than cross-entropy of
    tokens, for one without a linear output layer unless linear=False, and for options of other names; ValueError for
    an option out of range.
    """
    inner = _inner(model)
    if not hasattr(type(inner), "loss_function") or not hasattr(inner, "get_output_embeddings"):
        raise TypeError(f"patch: model is {type(model).__name__}, expected a causal language model of transformers")
    for name in options:
        if name not in OPTIONS:
            raise TypeError(f"patch: {name} is no option, expected {', '.join(OPTIONS)}")
    chosen = read_options("patch", **options)
    unpatch(model)
    settable: Any = inner
    function = _LossFunction(_shift_of(inner), chosen)
    heads = _heads(inner) if linear else []
    own = inner.__dict__.get("_loss_function")
    settable.loss_function = function
    changed = _Patch(own, heads, inner.__dict__.get("forward"))
    if heads:
        changed.handles = [each.register_forward_pre_hook(_defer) for each in heads]
        changed.forward = types.MethodType(_forward_of(inner), inner)
        settable.forward = changed.forward
    changed.layers = PatchedLayers(inner) if layers else None
    object.__setattr__(inner, PATCHED, changed)
    return model


def unpatch(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model back what `patch` replaced."""
    inner = _inner(model)
    changed = inner.__dict__.pop(PATCHED, None)
    if changed is not None:
        changed.undo(inner)
    return model


def _inner(model: Any) -> Any:
    """The model itself, without peft's wrapper."""
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


@dataclasses.dataclass
class _Patch:
    """The changes to a patched model.

    own_loss: the loss function that was set before. heads: the linear layers that give logits. before: the `forward`
    that was set on the model before, as others do; forward: the one in its place. layers: those that were replaced.
    """

    own_loss: Any
    heads: list[torch.nn.Linear]
    before: Any
    handles: list[Any] = dataclasses.field(default_factory=list)
    forward: Any = None
    layers: PatchedLayers | None = None

    def undo(self, model: Any) -> None:
        if self.layers is not None:
            self.layers.undo(model)
        model.__dict__.pop("_loss_function", None)
        if self.own_loss is not None:
            model.__dict__["_loss_function"] = self.own_loss
        for handle in self.handles:
            handle.remove()
        if self.forward is not None and model.__dict__.get("forward") is self.forward:
            # A `forward` that others have put around ours stays, and ours passes on what it is given.
            model.__dict__.pop("forward")
            if self.before is not None:
                model.__dict__["forward"] = self.before


# --- the loss ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _LossFunction:
    """The loss function of a patched model. shift: the distance from logits to their labels. options: the user's."""

    shift: int
    options: LossOptions

    def __call__(
        self, logits: Any, labels: Tensor | None = None, vocab_size: int | None = None, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        shift_labels = shift_labels if self.shift else None
        target = labels if shift_labels is None else shift_labels
        if target is None:
            raise TypeError("patch: labels is None, expected labels or shift_labels")
        if self.shift and shift_labels is None:
            target = torch.nn.functional.pad(target, (0, 1), value=ignore_index)[..., 1:]
        flat, items = target.reshape(-1).to(logits.device), num_items_in_batch
        items = items.to(logits.device) if isinstance(items, Tensor) else items
        changed: dict[str, Any] = {"ignore_index": ignore_index, "num_items": items, "dtype": wide(logits.dtype)}
        options = dataclasses.replace(self.options, **changed)
        scope = _scope.__dict__.get("now")
        if scope is not None:
            scope.lost = True
        found = self._deferred(logits, flat, options) if isinstance(logits, Deferred) else None
        if found is None:
            logits = logits.tensor() if isinstance(logits, Deferred) else logits
            found = logits_loss.of_options(logits.reshape(-1, vocab_size or logits.shape[-1]), flat, None, options)
        return found

    @staticmethod
    def _deferred(logits: Deferred, target: Tensor, options: LossOptions) -> Tensor | None:
        """The loss of deferred logits, which are not computed; None if they have to be."""
        layer = logits.layer()
        if layer is None or (layer.softcap and options.softcap):
            return None
        if not logits.weights_are_there():
            raise RuntimeError(
                "patch: the output layer's weights were given back before the loss (a sharded layer of its own), "
                "expected them to be there: patch the model with linear=False"
            )
        # The user's softcap applies to the logits that the model's factor has scaled.
        softcap = layer.softcap or options.softcap * layer.temperature
        options = dataclasses.replace(options, softcap=softcap, temperature=options.temperature * layer.temperature)
        found: Tensor = linear_loss.of_options(
            layer.x.reshape(-1, layer.x.shape[-1]), layer.w, target, layer.b, None, options
        )
        return found


def _shift_of(model: Any) -> int:
    """The distance from logits to their labels in a model's own loss: 1 in causal models, 0 in masked ones."""
    logits = torch.sin(torch.arange(30, dtype=torch.float32, device="cpu")).reshape(1, 5, 6)
    labels = torch.tensor([[2, 5, -100, 0, 3]], device="cpu")
    try:
        with torch.no_grad():
            found = [model.loss_function(logits=logits, labels=labels, vocab_size=6, **more) for more in TRIALS]
    except Exception:
        found = []
    for shift in (1, 0):
        ours = _LossFunction(shift, LossOptions())
        expected = [ours(logits, labels, 6, **more) for more in TRIALS]
        pairs = zip(found, expected, strict=False)
        if found and all(isinstance(a, Tensor) and torch.allclose(a, b, rtol=1e-4) for a, b in pairs):
            return shift
    raise TypeError(
        f"patch: the loss of {type(model).__name__} is another than cross-entropy of tokens, "
        "expected a causal language model of transformers, or a masked one"
    )


TRIALS: tuple[dict[str, Any], ...] = ({}, {"num_items_in_batch": 7})


# --- the output layer ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Scope:
    """A forward pass whose logits are deferred. heads: where. lost: whether the loss was computed."""

    heads: list[torch.nn.Linear]
    lost: bool = False


_scope = threading.local()


def _heads(model: Any) -> list[torch.nn.Linear]:
    """The linear layers that give logits: the output layer or, where an adapter wraps it, its and the adapter's."""
    layer = model.get_output_embeddings()
    linears = [] if layer is None else [each for each in layer.modules() if isinstance(each, torch.nn.Linear)]
    if not linears:
        raise TypeError(
            f"patch: the output layer is {type(layer).__name__}, expected torch.nn.Linear: give linear=False"
        )
    classes = max(each.out_features for each in linears)
    return [each for each in linears if each.out_features == classes]


def _defer(layer: Any, args: tuple[Any, ...]) -> Any:
    """The hook of an output layer that defers its logits."""
    scope = _scope.__dict__.get("now")
    if scope is None or len(args) != 1 or not any(each is layer for each in scope.heads):
        return None
    return (deferred_input(args[0]),)


def _is_watched(model: Any, heads: list[torch.nn.Linear]) -> bool:
    """Whether hooks of others look at the output layer, or at all modules."""
    every = torch.nn.modules.module
    if any(getattr(every, f"_global{name}", None) for name in HOOKS):
        return True
    for module in model.get_output_embeddings().modules():
        hooks = sum(len(module.__dict__.get(name) or ()) for name in HOOKS)
        if hooks > any(each is module for each in heads):
            return True
    return False


def _forward_of(model: Any) -> Callable[..., Any]:
    """The model's `forward`, with `self` for its first argument, during which logits are deferred."""
    own = model.forward
    if getattr(own, "__self__", None) is model:
        inner = own.__func__
    else:  # set on the model by others, without its first argument

        @functools.wraps(own)
        def inner(self: Any, *args: Any, **given: Any) -> Any:
            return own(*args, **given)

    names = list(inspect.signature(own).parameters)
    place = names.index("labels") if "labels" in names else len(names)

    @functools.wraps(inner)
    def forward(self: Any, *args: Any, **given: Any) -> Any:
        changed = self.__dict__.get(PATCHED)
        labels = args[place] if place < len(args) else given.get("labels")
        if changed is None or labels is None or not self.training or _is_watched(self, changed.heads):
            return inner(self, *args, **given)
        before, _scope.now = _scope.__dict__.get("now"), _Scope(changed.heads)
        try:
            return _settled(self, inner(self, *args, **given), _scope.now.lost)
        finally:
            _scope.now = before

    return forward


def _settled(model: Any, found: Any, lost: bool) -> Any:
    """A forward pass's results: None for the logits of an output whose loss is known, else logits."""
    if isinstance(found, tuple):
        settled = [each.tensor() if isinstance(each, Deferred) else each for each in found]
        return type(found)(*settled) if hasattr(found, "_fields") else tuple(settled)
    fields = found.__dict__ if hasattr(found, "__dict__") else {}
    deferred = {name: each for name, each in fields.items() if isinstance(each, Deferred)}
    if deferred and not lost:
        kind = type(model).__name__
        warnings.warn(f"patch: {kind} has computed its loss by itself, which is unchanged", stacklevel=4)
    changes = {name: None if lost else each.tensor() for name, each in deferred.items()}
    if dataclasses.is_dataclass(found):
        return dataclasses.replace(found, **changes)  # type: ignore[type-var]
    for name, each in changes.items():
        setattr(found, name, each)
    return found
