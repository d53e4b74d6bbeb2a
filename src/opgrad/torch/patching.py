"""opgrad's losses and layers in language models of Hugging Face's transformers, of which nothing is imported.

A model has a `loss_function` that can be set, and an output layer. In training with labels, a hook replaces the output
layer's input by `_LayerInput`. PyTorch passes every function that is called with it to its `__torch_function__`, where
`functional.linear` returns `Deferred` logits. Factors, sums of such logits and a softcap are recorded for the loss; any
other operation computes the logits first, as the model would have done.

Layers are known by their parts, and are replaced only if they compute the same on a few numbers.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries.torch_tensors import PLAIN
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.functions import narrows_products
from opgrad.torch.layers import geglu, gelu, rms_norm, scaled_dot_product_attention, swiglu
from opgrad.torch.losses import cross_entropy as linear_loss
from opgrad.torch.losses import cross_entropy as logits_loss
from opgrad.torch.losses.samples import read_options
from opgrad.torch.operators import wide


@dataclass(frozen=True)
class LinearTerm:
    """factor * linear(x, w, b)."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    factor: float = 1.0


@dataclass(frozen=True)
class LayerLogits:
    """softcap * tanh(y / softcap) / temperature for y = linear(x, w, b); without a softcap y / temperature."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    softcap: float
    temperature: float


@dataclass(frozen=True)
class _Surroundings:
    """The modes in force when the layer was called, such as autocast and grad; the layer is computed under the same."""

    records: bool
    autocasts: bool
    autocast_dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "_Surroundings":
        kind = x.device.type
        return cls(torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @contextlib.contextmanager
    def again(self, x: Tensor) -> Iterator[None]:
        with (
            torch.set_grad_enabled(self.records),
            torch.autocast(x.device.type, self.autocast_dtype, enabled=self.autocasts),
        ):
            yield


class Deferred:
    """The sum of its terms or, with `after`, after * tanh(the sum), in this dtype; in the place of a tensor.

    computed: the tensor, as soon as something has asked for it. From then on only it counts, since it may be changed in
    place.
    """

    def __init__(
        self, terms: Sequence[LinearTerm], after: float | None, dtype: torch.dtype, surroundings: _Surroundings
    ):
        self.terms, self.after, self.dtype, self.surroundings = tuple(terms), after, dtype, surroundings
        self.computed: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, w: Tensor, b: Tensor | None = None) -> "Deferred":
        around = _Surroundings.of(x)
        return cls([LinearTerm(x, w, b)], None, around.autocast_dtype if narrows_products(x) else x.dtype, around)

    def tensor(self) -> Tensor:
        """The logits."""
        if self.computed is None:
            with self.surroundings.again(self.terms[0].x):
                found = self._of_term(self.terms[0])
                for term in self.terms[1:]:
                    found = found + self._of_term(term)
                found = found if self.after is None else torch.tanh(found) * self.after
                self.computed = found.to(self.dtype)
        return self.computed

    @staticmethod
    def _of_term(term: LinearTerm) -> Tensor:
        found = functional.linear(term.x, term.w, term.b)
        return found if term.factor == 1.0 else found * term.factor

    def layer(self) -> LayerLogits | None:
        """The logits as one linear layer with a softcap and a temperature; None if they do not have this form."""
        first, after = self.terms[0], 1.0 if self.after is None else self.after
        if self.computed is not None or not (first.factor > 0 and after > 0):
            return None
        x, w, b = first.x, first.w, first.b
        for term in self.terms[1:]:  # a sum of products x @ w.T is one product of the concatenated x and w
            x = torch.cat([x, term.x.to(x.dtype) * (term.factor / first.factor)], -1)
            w = torch.cat([w, term.w.to(w.dtype)], -1)
            if term.b is not None:
                more = term.b * (term.factor / first.factor)
                b = more.to(w.dtype) if b is None else b + more
        softcap = 0.0 if self.after is None else 1 / first.factor
        return LayerLogits(x, w, b, softcap, 1 / (after * first.factor))

    def weights_are_there(self) -> bool:
        """Whether the memory of the layer's weights still exists; sharded training frees it after the layer's call."""
        if torch.compiler.is_compiling():
            return True
        plain = [term.w for term in self.terms if type(term.w) in PLAIN and term.w.numel()]
        return all(w.untyped_storage().nbytes() for w in plain)

    # --- what is noted ---

    def _noted(self, terms: Sequence[LinearTerm], after: float | None) -> "Deferred":
        return Deferred(terms, after, self.dtype, self.surroundings)

    def __mul__(self, other: Any) -> Any:
        if self.computed is not None or type(other) not in (int, float):
            return self.tensor() * _computed(other)
        if self.after is not None:
            return self._noted(self.terms, self.after * other)
        return self._noted([replace(term, factor=term.factor * other) for term in self.terms], None)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if self.computed is not None or type(other) not in (int, float) or not other:
            return self.tensor() / _computed(other)
        return self * (1 / other)

    def __add__(self, other: Any) -> Any:
        both = (self, other)
        if not all(isinstance(each, Deferred) and each.computed is None and each.after is None for each in both):
            return self.tensor() + _computed(other)
        return Deferred(
            (*self.terms, *other.terms), None, torch.promote_types(self.dtype, other.dtype), self.surroundings
        )

    def tanh(self) -> Any:
        if self.computed is not None or self.after is not None:
            return self.tensor().tanh()
        return self._noted(self.terms, 1.0)

    def to(self, *args: Any, **given: Any) -> Any:
        if self.computed is not None or given or len(args) != 1:
            return self.tensor().to(*args, **given)
        if args[0] in (self.device, self.dtype):
            return self
        if args[0] in {torch.promote_types(self.dtype, args[0]), *(term.w.dtype for term in self.terms)}:
            return Deferred(self.terms, self.after, args[0], self.surroundings)  # no digits are lost
        return self.tensor().to(*args)

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> Any:
        return self if self.computed is None else self.computed.contiguous()

    # --- a tensor for everybody else ---

    @property
    def device(self) -> torch.device:
        return self.terms[0].x.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.terms[0].x.shape[:-1], self.terms[0].w.shape[0]))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and isinstance(args[0], Deferred) and not kwargs:
            return args[0].tanh()
        return function(*map(_computed, args), **{name: _computed(each) for name, each in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def _computed(value: Any) -> Any:
    """The value with computed tensors in place of all deferred ones, also inside lists."""
    if isinstance(value, Deferred):
        return value.tensor()
    if isinstance(value, _LayerInput):
        return value.x
    return type(value)(map(_computed, value)) if type(value) in (list, tuple) else value


def _by_tensor(name: str) -> Callable[..., Any]:
    def method(self: Deferred, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*map(_computed, args))

    return method


# Python looks special methods up in the class. The special methods above record what they can.
for _name in (
    "getitem", "setitem", "len", "iter", "bool", "float", "int", "neg", "abs", "invert", "contains", "array", "sub",
    "rsub", "radd", "rtruediv", "floordiv", "mod", "pow", "rpow", "matmul", "rmatmul", "and", "or", "xor", "eq", "ne",
    "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(Deferred, f"__{_name}__", _by_tensor(f"__{_name}__"))
setattr(Deferred, "__hash__", object.__hash__)  # noqa: B010


class _LayerInput:
    """Stands for the input of a linear layer whose result shall be deferred."""

    def __init__(self, x: Tensor):
        self.x = x

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear and not kwargs and isinstance(args[0], _LayerInput):
            return Deferred.of(args[0].x, *args[1:])
        return function(*map(_computed, args), **{name: _computed(each) for name, each in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.x, name)


def deferred_input(x: Tensor) -> Any:
    """The object to pass to a linear layer in place of x."""
    return _LayerInput(x)


CLOSE = 1e-4
Forward = Callable[[Any, Tensor], Tensor]


class PatchedLayers:
    """The layers of a model that were replaced, and how the model gets them back."""

    def __init__(self, model: torch.nn.Module):
        self.forwards: list[tuple[Any, Callable[..., Any]]] = []
        for module in model.modules():
            if "forward" not in module.__dict__ and (found := _replacement_of(module)) is not None:
                settable: Any = module
                settable.forward = types.MethodType(_in_place_of(type(module).forward, found), module)
                self.forwards.append((module, settable.forward))
        set_attention(model, True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, too, transformers' table has ours."""
        self.__dict__.update(state)
        register()

    def undo(self, model: torch.nn.Module) -> None:
        for module, ours in self.forwards:
            if module.__dict__.get("forward") is ours:  # others may have put theirs around it
                del module.__dict__["forward"]
        set_attention(model, False)


def _in_place_of(own: Callable[..., Any], found: Forward) -> Callable[..., Any]:
    """`found` for calls with one argument, as its name and signature the module's own, which answers all others.

    A normalization that has no use for its weight may be given other sizes than that has.
    """

    @functools.wraps(own)
    def forward(self: Any, *given: Any, **named: Any) -> Any:
        weight = getattr(self, "weight", None)
        if named or len(given) != 1 or (weight is not None and weight.shape[-1] != given[0].shape[-1]):
            return own(self, *given, **named)
        return found(self, given[0])

    return forward


# --- normalization, gated layers, activations -------------------------------------------------------------------------


def _replacement_of(module: torch.nn.Module) -> Forward | None:
    """The first candidate that computes what the module computes; None if none does."""
    for forward, width in _candidates(module):
        parameter = next(module.parameters(), None)
        if parameter is not None and parameter.device.type != "cpu":
            return None
        dtype = torch.float32 if parameter is None else parameter.dtype
        x = torch.sin(torch.arange(3 * width, dtype=torch.float32)).reshape(3, width).to(dtype) * 4
        try:
            with torch.no_grad():
                expected, found = module(x), forward(module, x)
        except Exception:
            continue
        close = CLOSE if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps
        if isinstance(expected, Tensor) and torch.allclose(found, expected, rtol=close, atol=close):
            return forward
    return None


def _candidates(module: Any) -> Iterator[tuple[Forward, int]]:
    """The functions that may replace a module, and the width of its input."""
    name, weight = type(module).__name__, getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if name.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(epsilon, float):
        yield _norm, len(weight)
        yield _norm_beside_one, len(weight)
    elif all(
        isinstance(getattr(module, each, None), torch.nn.Module) for each in ("gate_proj", "up_proj", "down_proj")
    ):
        width = getattr(module.gate_proj, "in_features", 0)
        for unit in (swiglu, geglu, functools.partial(geglu, approximate="none")):
            yield functools.partial(_gated, unit), width
    elif "GELU" in name and next(module.children(), None) is None and not isinstance(module, torch.nn.GELU):
        for approximate in ("tanh", "none"):
            yield functools.partial(_activation, approximate), 64


def _epsilon(module: Any) -> float:
    return float(module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps)


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight.shape, self.weight, _epsilon(self)).to(hidden_states.dtype)


def _norm_beside_one(self: Any, hidden_states: Tensor) -> Tensor:
    """Gemma's weights are those beside 1."""
    return rms_norm(hidden_states, self.weight.shape, 1 + self.weight, _epsilon(self)).to(hidden_states.dtype)


def _gated(unit: Callable[[Tensor, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.down_proj(unit(self.gate_proj(x), self.up_proj(x)))
    return found


def _activation(approximate: str, self: Any, input: Tensor) -> Tensor:
    return gelu(input, approximate=approximate)


# --- attention -------------------------------------------------------------------------------------------------------


SDPA = "sdpa"  # the name of PyTorch's function in transformers
MARK = "_opgrad_attends"  # of modules whose attention is ours
# What models hand to any implementation, and "sdpa" makes nothing of: the mask has it, or it is not about attention.
UNUSED = {
    "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states",
    "output_router_logits", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx", "deterministic",
}  # fmt: skip
LARGEST_HEAD = 256


class _Attention:
    """The function that transformers calls for "sdpa". own: the library's own."""

    def __init__(self, own: Callable[..., Any]):
        self.own = own

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if getattr(module, MARK, False) and not more and _is_known(query, key, value, attention_mask, **named):
            return _attend(module, query, key, value, attention_mask, **named)
        return self.own(module, query, key, value, attention_mask, *more, **named)


def _is_known(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, **others: Any,
) -> bool:  # fmt: skip
    """Whether opgrad's attention computes the same."""
    if any(each is not None and each is not False and name not in UNUSED for name, each in others.items()):
        return False
    if not (query.device.type == "cpu" and query.dim() == key.dim() == value.dim() == 4):
        return False
    if max(query.shape[3], value.shape[3]) > LARGEST_HEAD or not query.dtype == key.dtype == value.dtype:
        return False
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        return False
    return mask is None or (mask.dim() == 4 and mask.dtype in (torch.bool, query.dtype, torch.float32))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as transformers calls it; a single query, and one with a mask, sees all keys that the mask has."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = query.shape[2] > 1 and mask is None and bool(is_causal)
    shared = query.shape[1] != key.shape[1]
    y = scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=shared
    )  # fmt: skip
    return y.transpose(1, 2).contiguous(), None


def register() -> None:
    """Put ours into the table of a transformers that is loaded and has one."""
    table: Any = getattr(sys.modules.get("transformers"), "AttentionInterface", None)
    own = table().get(SDPA) if table is not None else None
    if own is not None and not isinstance(own, _Attention):
        table.register(SDPA, _Attention(own))


def set_attention(model: torch.nn.Module, ours: bool) -> None:
    """Mark the modules of a model that may attend, those that have a configuration, or take the marks away."""
    register()
    for module in model.modules():
        if ours and "config" in module.__dict__:
            module.__dict__[MARK] = True
        else:
            module.__dict__.pop(MARK, None)


# --- patch ----------------------------------------------------------------------------------------------------------


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
            found = logits_loss.of_logits_options(
                logits.reshape(-1, vocab_size or logits.shape[-1]), flat, None, options
            )
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
        found: Tensor = linear_loss.of_linear_options(
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
