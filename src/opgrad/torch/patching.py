"""opgrad's losses in causal language models of Hugging Face's transformers, through the model's own loss function.

Nothing of transformers is imported: a model has a `loss_function` that can be set, and an output layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opgrad.torch.linear_loss import linear_cross_entropy
from opgrad.torch.loss import cross_entropy

PATCHED = "_opgrad_patch"


def patch(model: torch.nn.Module, *, linear: bool = True, **options: Any) -> torch.nn.Module:
    """Give a causal language model opgrad's loss.

    model: a model of transformers with a `loss_function`, such as LlamaForCausalLM; it is changed and returned.
    linear: in training, compute loss and output layer in one: logits are not stored, and the output has none (None).
        A softcap that the configuration names is kept.
    options: keywords of opgrad.torch.cross_entropy: label_smoothing, lse_square_scale, temperature, softcap.

    Raises TypeError for a model without `loss_function` or without an output layer. A model that changes its logits
    otherwise, or has no output layer that is linear, takes linear=False; the first step of training says so by a
    RuntimeError.
    """
    if not hasattr(type(model), "loss_function") or not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"patch: model is {type(model).__name__}, expected a causal language model of transformers")
    unpatch(model)
    changed = _Patch(model, options)
    settable: Any = model
    settable.loss_function = changed.loss
    if linear:
        changed.take_output_layer()
    object.__setattr__(model, PATCHED, changed)
    return model


def unpatch(model: torch.nn.Module) -> torch.nn.Module:
    """Give a model back what `patch` replaced."""
    changed = model.__dict__.pop(PATCHED, None)
    if changed is not None:
        changed.undo()
    return model


def causal_lm_loss(
    logits: Tensor, labels: Tensor | None, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The mean loss of logits, of shape (…, S, vocab_size), for the next tokens; transformers' ForCausalLMLoss.

    labels: shape (…, S), compared with the logits one place before. shift_labels: the same, moved already.
    num_items_in_batch: what the sum is divided by; None: the number of labels that are not ignore_index.
    """
    target = shift_labels if labels is None or shift_labels is not None else labels
    if target is None:
        raise TypeError("causal_lm_loss: labels is None, expected labels or shift_labels")
    flat = _shifted(target, shift_labels is None, ignore_index).reshape(-1).to(logits.device)
    found: Tensor = cross_entropy(
        logits.reshape(-1, vocab_size), flat, ignore_index=ignore_index, num_items=num_items_in_batch, **options
    )
    return found


def _shifted(labels: Tensor, shifts: bool, ignore_index: int) -> Tensor:
    """Each place with the label of the next one."""
    return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shifts else labels


class _Patch:
    """What stands in a model's place: its loss function, and in training the forward of its output layer."""

    def __init__(self, model: torch.nn.Module, options: dict[str, Any]):
        self.model, self.options = model, options
        self.own_loss = model.__dict__.get("_loss_function")
        self.layer: Any = None
        self.forward: Callable[..., Any] = model.forward
        self.call: dict[str, Any] | None = None  # the labels of the call at work, then its loss

    def take_output_layer(self) -> None:
        self.layer = self.model.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(self.layer, torch.nn.Linear):
            kind = type(self.layer).__name__
            raise TypeError(f"patch: the output layer is {kind}, expected torch.nn.Linear: give linear=False")
        self.linear: Callable[..., Any] = self.layer.forward
        layer: Any = self.layer
        layer.forward = self.output_layer
        self.model.forward = self.model_forward

    def undo(self) -> None:
        self.model.__dict__.pop("_loss_function", None)
        if self.own_loss is not None:
            self.model.__dict__["_loss_function"] = self.own_loss
        if self.layer is not None:
            self.model.__dict__.pop("forward", None)
            self.layer.__dict__.pop("forward", None)

    def model_forward(self, *args: Any, **given: Any) -> Any:
        """The model's, with its labels at hand where the output layer is called."""
        labels = given.get("labels")
        if labels is None or not self.model.training:
            return self.forward(*args, **given)
        self.call = {name: given.get(name) for name in ("labels", "shift_labels", "num_items_in_batch")}
        try:
            found = self.forward(*args, **given)
        finally:
            call, self.call = self.call, None
        if hasattr(found, "logits") and found.logits is not None and "loss" in call:
            found.logits = None
        return found

    def output_layer(self, hidden: Tensor) -> Tensor:
        """The layer's logits; in training, where its loss is wanted, the loss, and one number in each place of them."""
        if self.call is None:
            logits: Tensor = self.linear(hidden)
            return logits
        labels, moved = self.call["labels"], self.call["shift_labels"]
        target = _shifted(labels if moved is None else moved, moved is None, -100).to(hidden.device)
        cap = getattr(getattr(self.model.config, "text_config", self.model.config), "final_logit_softcapping", None)
        options = {"softcap": cap, **self.options, "num_items": self.call["num_items_in_batch"]}
        self.call["caps"] = cap is not None
        self.call["loss"] = linear_cross_entropy(
            hidden, self.layer.weight, target, linear_bias=self.layer.bias, **options
        )
        self.call["logits"] = hidden.new_zeros((*hidden.shape[:-1], 1))
        return self.call["logits"]

    def loss(self, logits: Tensor, labels: Tensor | None, vocab_size: int, *args: Any, **given: Any) -> Tensor:
        """What the model calls."""
        if self.call is None or "loss" not in self.call:
            return causal_lm_loss(logits, labels, vocab_size, *args, **{**self.options, **_known(given)})
        if logits is not self.call["logits"] and not self.call["caps"]:
            kind = type(self.model).__name__
            raise RuntimeError(f"patch: {kind} changes what its output layer gives: patch it with linear=False")
        loss: Tensor = self.call["loss"]
        return loss


def _known(given: dict[str, Any]) -> dict[str, Any]:
    """What a loss function is told, of what models pass on."""
    return {name: given[name] for name in ("num_items_in_batch", "ignore_index", "shift_labels") if name in given}
