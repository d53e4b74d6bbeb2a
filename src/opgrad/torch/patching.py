"""opgrad's losses and layers in language models of Hugging Face's transformers, of which nothing is imported.

A model has a `loss_function` that can be set, and an output layer. In training with labels, a hook replaces the output
layer's input by `_LayerInput`. PyTorch passes every function that is called with it to its `__torch_function__`, where
`functional.linear` returns `Deferred` logits. Factors, sums of such logits and a softcap are recorded for the loss; any
other operation computes the logits first, as the model would have done.

Layers are known by their parts, and are replaced only if they compute the same on a few numbers.
"""

import dataclasses
import functools
import inspect
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries.torch_tensors import PLAIN
from opgrad.ops.reference.attending import LARGEST_HEAD
from opgrad.ops.reference.loss_options import LossOptions
from opgrad.torch.functions import narrows_products
from opgrad.torch.layers import geglu, gelu, rms_norm, scaled_dot_product_attention, swiglu
from opgrad.torch.losses import cross_entropy as losses
from opgrad.torch.losses.samples import read_options
from opgrad.torch.operators import wide


class LinearTerm(NamedTuple):
    """factor * linear(x, w, b)."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    factor: float = 1.0


class Deferred:
    """The sum of its terms or, with `after`, after * tanh(the sum), in this dtype; in the place of a tensor.

    modes: whether grad and autocast were on when the layer was called, and autocast's dtype; the layer is computed
    under the same. computed: the tensor, as soon as something has asked for it. From then on only it counts, since it
    may be changed in place.
    """

    def __init__(
        self,
        terms: Sequence[LinearTerm],
        after: float | None,
        dtype: torch.dtype,
        modes: tuple[bool, bool, torch.dtype],
    ):
        self.terms, self.after, self.dtype, self.modes = tuple(terms), after, dtype, modes
        self.computed: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, w: Tensor, b: Tensor | None = None) -> "Deferred":
        kind = x.device.type
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls([LinearTerm(x, w, b)], None, modes[2] if narrows_products(x) else x.dtype, modes)

    def tensor(self) -> Tensor:
        """The logits."""
        if self.computed is None:
            records, autocasts, dtype = self.modes
            with torch.set_grad_enabled(records), torch.autocast(self.device.type, dtype, enabled=autocasts):
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

    def layer(self) -> tuple[Tensor, Tensor, Tensor | None, float, float] | None:
        """The logits as one linear layer: x, w, b, softcap and temperature; None if they do not have this form."""
        first, after = self.terms[0], 1.0 if self.after is None else self.after
        if self.computed is not None or not (first.factor > 0 and after > 0):
            return None
        x, w, b, _ = first
        for term in self.terms[1:]:  # a sum of products x @ w.T is one product of the concatenated x and w
            x = torch.cat([x, term.x.to(x.dtype) * (term.factor / first.factor)], -1)
            w = torch.cat([w, term.w.to(w.dtype)], -1)
            if term.b is not None:
                more = term.b * (term.factor / first.factor)
                b = more.to(w.dtype) if b is None else b + more
        return x, w, b, 0.0 if self.after is None else 1 / first.factor, 1 / (after * first.factor)

    def weights_are_there(self) -> bool:
        """Whether the memory of the layer's weights still exists; sharded training frees it after the layer's call."""
        if torch.compiler.is_compiling():
            return True
        plain = [term.w for term in self.terms if type(term.w) in PLAIN and term.w.numel()]
        return all(w.untyped_storage().nbytes() for w in plain)

    # --- what is noted ---

    def __mul__(self, other: Any) -> Any:
        if self.computed is not None or type(other) not in (int, float):
            return self.tensor() * _computed(other)
        if self.after is not None:
            return Deferred(self.terms, self.after * other, self.dtype, self.modes)
        terms = [term._replace(factor=term.factor * other) for term in self.terms]
        return Deferred(terms, None, self.dtype, self.modes)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if self.computed is not None or type(other) not in (int, float) or not other:
            return self.tensor() / _computed(other)
        return self * (1 / other)

    def __add__(self, other: Any) -> Any:
        both = (self, other)
        if not all(isinstance(each, Deferred) and each.computed is None and each.after is None for each in both):
            return self.tensor() + _computed(other)
        dtype = torch.promote_types(self.dtype, other.dtype)
        return Deferred((*self.terms, *other.terms), None, dtype, self.modes)

    def tanh(self) -> Any:
        if self.computed is not None or self.after is not None:
            return self.tensor().tanh()
        return Deferred(self.terms, 1.0, self.dtype, self.modes)

    def to(self, *args: Any, **given: Any) -> Any:
        if self.computed is not None or given or len(args) != 1:
            return self.tensor().to(*args, **given)
        if args[0] in (self.device, self.dtype):
            return self
        if args[0] in {torch.promote_types(self.dtype, args[0]), *(term.w.dtype for term in self.terms)}:
            return Deferred(self.terms, self.after, args[0], self.modes)  # no digits are lost
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


CLOSE = 1e-4
Forward = Callable[[Any, Tensor], Tensor]


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
        for of_weight in (lambda w: w, lambda w: 1 + w):  # Gemma's weights are those beside 1
            yield functools.partial(_norm, of_weight), len(weight)
    elif all(
        isinstance(getattr(module, each, None), torch.nn.Module) for each in ("gate_proj", "up_proj", "down_proj")
    ):
        width = getattr(module.gate_proj, "in_features", 0)
        for unit in (swiglu, geglu, functools.partial(geglu, approximate="none")):
            yield functools.partial(_gated, unit), width
    elif "GELU" in name and next(module.children(), None) is None and not isinstance(module, torch.nn.GELU):
        for approximate in ("tanh", "none"):
            yield functools.partial(_activation, approximate), 64


def _norm(of_weight: Callable[[Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
    epsilon = float(self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps)
    return rms_norm(x, self.weight.shape, of_weight(self.weight), epsilon).to(x.dtype)


def _gated(unit: Callable[[Tensor, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.down_proj(unit(self.gate_proj(x), self.up_proj(x)))
    return found


def _activation(approximate: str, self: Any, input: Tensor) -> Tensor:
    return gelu(input, approximate=approximate)


# --- attention -------------------------------------------------------------------------------------------------------


SDPA = "sdpa"  # the name of PyTorch's function in transformers
MARK = "_opgrad_attends"  # of modules whose attention is ours
# What is read, and what models hand to any implementation, and "sdpa" makes nothing of: the mask has it, or it is not
# about attention.
UNUSED = {
    "dropout", "scaling", "is_causal",
    "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states",
    "output_router_logits", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx", "deterministic",
}  # fmt: skip


class _Attention:
    """The function that transformers calls for "sdpa". own: the library's own."""

    def __init__(self, own: Callable[..., Any]):
        self.own = own

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if more or not getattr(module, MARK, False) or not _is_known(query, key, value, attention_mask, named):
            return self.own(module, query, key, value, attention_mask, *more, **named)
        is_causal = named.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # A single query, and one with a mask, sees all keys that the mask has.
        causal = query.shape[2] > 1 and attention_mask is None and bool(is_causal)
        options: dict[str, Any] = {"scale": named.get("scaling"), "enable_gqa": query.shape[1] != key.shape[1]}
        dropout = named.get("dropout", 0.0)
        y = scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, **options)
        return y.transpose(1, 2).contiguous(), None


def _is_known(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: Mapping[str, Any]) -> bool:
    """Whether opgrad's attention computes the same."""
    if any(each is not None and each is not False and name not in UNUSED for name, each in named.items()):
        return False
    if not (query.device.type == "cpu" and query.dim() == key.dim() == value.dim() == 4):
        return False
    if max(query.shape[3], value.shape[3]) > LARGEST_HEAD or not query.dtype == key.dtype == value.dtype:
        return False
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        return False
    return mask is None or (mask.dim() == 4 and mask.dtype in (torch.bool, query.dtype, torch.float32))


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


def _replaced(model: torch.nn.Module) -> list[tuple[Any, Callable[..., Any]]]:
    """The modules that have opgrad's `forward` now, each with it."""
    found = []
    for module in model.modules():
        if "forward" not in module.__dict__ and (better := _replacement_of(module)) is not None:
            settable: Any = module
            settable.forward = types.MethodType(_in_place_of(type(module).forward, better), module)
            found.append((module, settable.forward))
    set_attention(model, True)
    return found


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
    if layers:
        changed.layers = _replaced(inner)
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
    that was set on the model before, as others do; forward: the one in its place. layers: modules and their new
    `forward`.
    """

    own_loss: Any
    heads: list[torch.nn.Linear]
    before: Any
    handles: list[Any] = dataclasses.field(default_factory=list)
    forward: Any = None
    layers: list[tuple[Any, Callable[..., Any]]] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, too, transformers' table has ours."""
        self.__dict__.update(state)
        if self.layers is not None:
            register()

    def undo(self, model: Any) -> None:
        for module, ours in self.layers or ():
            if module.__dict__.get("forward") is ours:  # others may have put theirs around it
                del module.__dict__["forward"]
        if self.layers is not None:
            set_attention(model, False)
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
        if isinstance(logits, Deferred):
            layer = logits.layer()
            if layer is not None and not (layer[3] and options.softcap):
                x, w, b, softcap, temperature = layer
                if not logits.weights_are_there():
                    raise RuntimeError(
                        "patch: the output layer's weights were given back before the loss (a sharded layer of its "
                        "own), expected them to be there: patch the model with linear=False"
                    )
                # The user's softcap applies to the logits that the model's factor has scaled.
                softcap = softcap or options.softcap * temperature
                bent = dataclasses.replace(options, softcap=softcap, temperature=options.temperature * temperature)
                return losses.of_linear_options(x.reshape(-1, x.shape[-1]), w, flat, b, None, bent)
            logits = logits.tensor()
        return losses.of_logits_options(logits.reshape(-1, vocab_size or logits.shape[-1]), flat, None, options)


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
    return (_LayerInput(args[0]),)


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
