"""Optimizers of parameters in CPU memory: of the rows of a table that a batch has named, and of bfloat16 weights.

The steps are those of `opgrad.optim`, in PyTorch's own memory.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opgrad.call import optim
from opgrad.call.libraries.torch_tensors import PLAIN_DTYPES, view_of

Group = dict[str, Any]
Array = np.ndarray[Any, Any]


class _CheckedOptimizer(torch.optim.Optimizer):
    """A step that looks at all gradients before it changes a parameter."""

    def __init__(self, params: Any, **defaults: Any):
        for name, value in defaults.items():
            if name == "betas":
                if not all(0 <= each < 1 for each in value):
                    raise ValueError(f"{type(self).__name__}: betas is {value}, expected two numbers from 0, below 1")
            elif not 0 <= value < math.inf:
                raise ValueError(f"{type(self).__name__}: {name} is {value}, expected a number of at least 0")
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                self._check_parameter(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters that have a gradient, in place; returns what `closure` does, which computes them.

        Raises TypeError, ValueError for parameters and gradients of another kind, before any is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(group, each) for group in self.param_groups for each in group["params"] if each.grad is not None]
        for _, parameter in found:
            self._check_parameter(parameter)
            self._check_gradient(parameter.grad)
        for group, parameter in found:
            self._update(group, parameter, parameter.grad)
            torch.autograd.graph.increment_version(parameter)
        return loss

    def _check_parameter(self, parameter: Tensor) -> None:
        kind = type(parameter)
        if kind not in (torch.Tensor, torch.nn.Parameter) or parameter.device.type != "cpu":
            what = f"{kind.__name__} on {parameter.device}"
            raise TypeError(f"{type(self).__name__}: a parameter is a {what}, expected a plain tensor on the CPU")
        if parameter.dtype not in self._dtypes:
            expected = ", ".join(sorted(map(str, self._dtypes)))
            raise TypeError(f"{type(self).__name__}: a parameter is {parameter.dtype}, expected {expected}")
        if parameter.layout != torch.strided or not parameter.is_contiguous():
            raise ValueError(f"{type(self).__name__}: a parameter is strided or sparse, expected a contiguous one")

    _dtypes: frozenset[torch.dtype]

    def _check_gradient(self, gradient: Tensor) -> None:
        raise NotImplementedError

    def _update(self, group: Group, parameter: Tensor, gradient: Tensor) -> None:
        raise NotImplementedError


# --- rows of a table -------------------------------------------------------------------------------------------------


class _Sparse(_CheckedOptimizer):
    """Steps along gradients that name rows, with states like the table, of which the other rows are left alone."""

    _dtypes = PLAIN_DTYPES
    _states: tuple[str, ...] = ()

    def _check_gradient(self, gradient: Tensor) -> None:
        if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
            what = f"{type(self).__name__}: a gradient is {gradient.layout}"
            raise ValueError(f"{what}, expected a sparse one of rows, as embedding(..., sparse=True) gives")

    def _update(self, group: Group, parameter: Tensor, gradient: Tensor) -> None:
        gradient, state = gradient.coalesce(), self.state[parameter]
        if not state:
            state["step"] = 0
            state.update({name: self._first(name, group, parameter) for name in self._states})
        state["step"] += 1
        states = [view_of(state[name]) for name in self._states]
        rows, values = gradient.indices()[0].contiguous(), gradient.values().contiguous()
        self._run(group, state["step"], view_of(parameter), states, view_of(rows), view_of(values))

    def _first(self, name: str, group: Group, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)

    def _run(self, group: Group, step: int, table: Array, states: list[Array], rows: Array, values: Array) -> None:
        raise NotImplementedError


class SparseSGD(_Sparse):
    """Gradient descent of tables whose gradients are sparse, as torch.optim.SGD on them.

    params: parameters or groups of them, shape (V, D1, …); float32, float64, float16 or bfloat16, contiguous, on the
        CPU. lr: the learning rate.

    Raises TypeError, ValueError for other parameters.

    Formula: table[rows] -= lr * values.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3):
        super().__init__(params, lr=lr)

    def _run(self, group: Group, step: int, table: Array, states: list[Array], rows: Array, values: Array) -> None:
        optim.sgd_rows(table, rows, values, float(group["lr"]))


class SparseAdagrad(_Sparse):
    """Adagrad of tables whose gradients are sparse, as torch.optim.Adagrad on them.

    params, lr: as for SparseSGD. initial_accumulator_value: that of the sums of squares. eps: what keeps the
        denominator from 0.

    Raises what SparseSGD raises.

    Formula: sum[rows] += values**2; table[rows] -= lr * values / (sqrt(sum[rows]) + eps).
    Source: Adaptive Subgradient Methods, Duchi et al. 2011.
    """

    _states = ("sum",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, initial_accumulator_value: float = 0.0, eps: float = 1e-10
    ):
        super().__init__(params, lr=lr, initial_accumulator_value=initial_accumulator_value, eps=eps)

    def _first(self, name: str, group: Group, parameter: Tensor) -> Tensor:
        return super()._first(name, group, parameter).fill_(group["initial_accumulator_value"])

    def _run(self, group: Group, step: int, table: Array, states: list[Array], rows: Array, values: Array) -> None:
        (sums,) = states
        optim.adagrad_rows(table, sums, rows, values, float(group["lr"]), group["eps"])


class SparseAdam(_Sparse):
    """Adam of tables whose gradients are sparse, as torch.optim.SparseAdam: other rows' moments stand still.

    params, lr: as for SparseSGD. betas: the decay rates of the moments. eps: what keeps the denominator from 0.

    Raises what SparseSGD raises.

    Formula: m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g**2, each of rows;
        table[rows] -= lr * sqrt(1 - b2**step) / (1 - b1**step) * m / (sqrt(v) + eps).
    Source: torch.optim.SparseAdam; Adam, arXiv 1412.6980.
    """

    _states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps)

    def _run(self, group: Group, step: int, table: Array, states: list[Array], rows: Array, values: Array) -> None:
        (first, second), (alpha, beta) = states, group["betas"]
        epsilon = group["eps"] / math.sqrt(1 - beta**step)  # adam_rows adds it to sqrt(v) after the bias correction
        optim.adam_rows(table, first, second, rows, values, float(group["lr"]), step, alpha, beta, epsilon)


# --- bfloat16 weights ------------------------------------------------------------------------------------------------


class _SplitOptimizer(_CheckedOptimizer):
    """Steps of `opgrad.optim`'s split optimizers, whose arrays are the tensors of the state."""

    _dtypes = frozenset({torch.bfloat16})
    _states: tuple[tuple[str, str], ...] = (("low", "low"),)  # their names here, and as attributes of a split optimizer

    def weights(self, parameter: Tensor) -> Tensor:
        """The float32 weights of a parameter of this optimizer, a copy of the same shape."""
        if not self.state.get(parameter):
            return parameter.detach().float()
        (group,) = (group for group in self.param_groups if any(each is parameter for each in group["params"]))
        split = self._split(group, parameter, torch.empty_like(parameter))
        return torch.from_numpy(split.weights()).reshape(parameter.shape)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings and the state of another such optimizer.

        PyTorch gives every state the parameter's dtype: what was saved is put back in its own.
        """
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            self.state[parameter].update(state_dict["state"].get(number, {}))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._splits: dict[Tensor, tuple[Any, Any]] = {}  # the old ones belong to states that are replaced

    def _check_gradient(self, gradient: Tensor) -> None:
        if gradient.layout != torch.strided or gradient.dtype not in (torch.bfloat16, torch.float32):
            what = f"{type(self).__name__}: a gradient is {gradient.dtype}, {gradient.layout}"
            raise TypeError(f"{what}, expected a dense one of torch.bfloat16 or torch.float32")

    def _update(self, group: Group, parameter: Tensor, gradient: Tensor) -> None:
        gradient = gradient.contiguous()  # stays until the step is done: a view holds no memory
        split = self._split(group, parameter, gradient)
        split.step()
        self.state[parameter]["step"] = split.steps

    def _split(self, group: Group, parameter: Tensor, gradient: Tensor) -> Any:
        """The split optimizer of a parameter, on its memory of today; a new one where the group's rule has changed.

        gradient: contiguous, kept by the caller.
        """
        arrays = view_of(parameter).reshape(-1), view_of(gradient).reshape(-1)
        rule, known = self._rule(group), self.__dict__.setdefault("_splits", {})
        if parameter not in known or known[parameter][0] != rule:
            known[parameter] = rule, self._begin(parameter, *arrays, rule)
        split = known[parameter][1]
        split.rebind(*arrays)
        split.learning_rate = float(group["lr"])
        return split

    def _begin(self, parameter: Tensor, high: Any, gradients: Any, rule: dict[str, float]) -> Any:
        split, state = self._make(high, gradients, rule), self.state[parameter]
        for name, attribute in self._states:
            memory = torch.from_numpy(getattr(split, attribute)).reshape(parameter.shape)
            if name in state:
                memory.copy_(state[name])
            state[name] = memory
        split.steps = state.setdefault("step", 0)
        return split

    def _rule(self, group: Group) -> dict[str, float]:
        return {}

    def _make(self, high: Any, gradients: Any, rule: dict[str, float]) -> Any:
        raise NotImplementedError


class SplitSGD(_SplitOptimizer):
    """Gradient descent of bfloat16 parameters, bit by bit that of float32 ones: the state has the lower 16 bits.

    params: bfloat16 parameters or groups of them, contiguous, on the CPU; their gradients are bfloat16 or float32.
    lr: the learning rate.

    weights(parameter): its float32 weights. Raises TypeError, ValueError for other parameters.

    Formula: w -= lr * g, for w = parameter and `low` together. Source: split SGD, arXiv 2005.04680.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3):
        super().__init__(params, lr=lr)

    def _make(self, high: Any, gradients: Any, rule: dict[str, float]) -> Any:
        return optim.SplitSGD(high, gradients, 0.0)


class SplitAdamW(_SplitOptimizer):
    """AdamW of bfloat16 parameters, bit by bit that of float32 ones: the state has the lower 16 bits.

    params, lr: as for SplitSGD. betas: the decay rates of the moments, which are float32. eps: what keeps the
        denominator from 0. weight_decay: the decay of the weights, times lr.

    weights(parameter): its float32 weights. Raises what SplitSGD raises.

    Formula: that of torch.optim.AdamW, for weights that are parameter and `low` together.
    Source: Decoupled Weight Decay Regularization, arXiv 1711.05101; split SGD, arXiv 2005.04680.
    """

    _states = (("low", "low"), ("exp_avg", "first_moment"), ("exp_avg_sq", "second_moment"))

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _rule(self, group: Group) -> dict[str, float]:
        alpha, beta = group["betas"]
        return {"alpha": alpha, "beta": beta, "epsilon": group["eps"], "weight_decay": group["weight_decay"]}

    def _make(self, high: Any, gradients: Any, rule: dict[str, float]) -> Any:
        return optim.SplitAdamW(high, gradients, 0.0, **rule)
