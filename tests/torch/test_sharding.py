"""Gloo processes compute operators on DTensor's shards, and cross-entropy over shares of the classes, as one does."""

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from processes import run_processes
from samples import OF_KINDS, sample, several

import opgrad
from opgrad.ops import operators

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

from tensors import on_tensors  # noqa: E402

import opgrad.torch  # noqa: E402
from opgrad.torch import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy  # noqa: E402
from opgrad.torch.operators import OPERATORS  # noqa: E402
from opgrad.torch.schema import REGISTERED  # noqa: E402

WORLD = 2
SHAPES = {"even": (4, 6, 2), "uneven": (5, 7, 3)}
LABELS = torch.tensor([3, 1, -100, 0, 2])
INDICES = torch.tensor([[0, 1, -1], [5, 5, 2]])
FUNCTIONS = {
    "softmax": lambda x, labels, indices: opgrad.torch.softmax(x),
    "log_softmax": lambda x, labels, indices: opgrad.torch.log_softmax(x, 0),
    "quick_gelu": lambda x, labels, indices: opgrad.torch.quick_gelu(x),
    "leaky_relu": lambda x, labels, indices: opgrad.torch.leaky_relu(x),
    "mean": lambda x, labels, indices: opgrad.torch.cross_entropy(x, labels),
    "sum": lambda x, labels, indices: opgrad.torch.cross_entropy(x, labels, reduction="sum"),
    "none": lambda x, labels, indices: opgrad.torch.cross_entropy(x, labels, reduction="none"),
    "embedding": lambda x, labels, indices: opgrad.torch.embedding(indices, x.mT),
    "padding": lambda x, labels, indices: opgrad.torch.embedding(indices, x.mT, padding_idx=5),
    "gather": lambda x, labels, indices: opgrad.torch.gather(x, indices, 1),
}


def tensors(op, shape, **options):
    given = sample(op, shape, "float32", np.random.default_rng(len(op.name)), axis=1, **options)
    return OPERATORS[op.name].arguments(on_tensors(given))


class Shards:
    """One process of two: what it finds wrong, in words."""

    def __init__(self, rank):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

        self.mesh, self.rank, self.faults = init_device_mesh("cpu", (WORLD,)), rank, []
        self.whole, self.shard, self.distribute = Replicate(), Shard, distribute_tensor

    def placements(self, tensor):
        return [self.whole, *[self.shard(axis) for axis in range(tensor.dim())]]

    def compare(self, what, ours, theirs):
        for mine, other in zip(several(ours), several(theirs), strict=True):
            full = mine.full_tensor()
            if full.shape != other.shape or not torch.allclose(full, other, atol=1e-5, rtol=1e-5):
                self.faults.append(f"{what}: {full} is not {other}")

    def expect(self, what, tensor, placement):
        if tensor.placements != (placement,):
            self.faults.append(f"{what}: {tensor.placements} is not {placement}")

    def operator(self, op, layout, **options):
        """Every argument in turn whole and along each of its axes, the others whole.

        Beside the first, and in the even layout, also likewise, where they can be.
        """
        arguments, call = tensors(op, SHAPES[layout], **options), OPERATORS[op.name]
        expected = call(*arguments)
        places = [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
        for chosen in places:
            for placement in self.placements(arguments[chosen]):
                whole, likewise = layout == "uneven", layout == "even" or chosen == places[0]
                for others in [self.whole] * whole + [placement] * likewise:
                    given = list(arguments)
                    for place in places:
                        wanted = placement if place == chosen else others
                        if wanted not in self.placements(arguments[place]):
                            wanted = self.whole
                        given[place] = self.distribute(arguments[place], self.mesh, [wanted])
                    what = f"{op.name} {layout} {options}, {call.names[chosen]} {placement}, others {others}"
                    self.compare(what, call(*given), expected)

    def function(self, name, x):
        """Forward and backward, through autograd."""
        classes = LABELS[: x.shape[0]].clamp(max=x.shape[1] - 1)
        plain = x.clone().requires_grad_()
        y = FUNCTIONS[name](plain, classes, INDICES)
        y.square().sum().backward()
        for placement in self.placements(x):
            for others in (self.whole, self.shard(0)):
                shared = self.distribute(x, self.mesh, [placement]).requires_grad_()
                indices = [self.distribute(each, self.mesh, [others]) for each in (classes, INDICES)]
                result = FUNCTIONS[name](shared, *indices)
                result.square().sum().backward()
                self.compare(f"{name} {tuple(x.shape)} {placement}, others {others}", result, y)
                self.compare(f"gradient of {name} {tuple(x.shape)} {placement}", shared.grad, plain.grad)

    def kept(self):
        """Nothing is put together that can stay apart."""
        from torch.distributed.tensor import Partial

        x, labels = torch.randn(5, 6), LABELS
        rows, columns = (self.distribute(x, self.mesh, [self.shard(axis)]) for axis in (0, 1))
        shared = self.distribute(labels, self.mesh, [self.shard(0)])
        self.expect("relu", torch.ops.opgrad.relu(columns), self.shard(1))
        self.expect("softmax over columns", torch.ops.opgrad.softmax(columns, 0), self.shard(1))
        self.expect("softmax over rows", torch.ops.opgrad.softmax(columns, 1), self.whole)
        self.expect("losses", opgrad.torch.cross_entropy(rows, shared, reduction="none"), self.shard(0))
        self.expect("sum", opgrad.torch.cross_entropy(rows, shared, reduction="sum"), Partial("sum"))
        table = torch.randn(9, 6)
        indices = self.distribute(INDICES, self.mesh, [self.shard(1)])
        self.expect("tokens", opgrad.torch.embedding(indices, self.distribute(table, self.mesh)), self.shard(1))
        indices = self.distribute(INDICES, self.mesh, [self.whole])
        table = self.distribute(table, self.mesh, [self.shard(1)]).requires_grad_()
        found = opgrad.torch.embedding(indices, table)
        self.expect("features", found, self.shard(2))
        found.square().sum().backward()
        self.expect("gradient of the table", table.grad, self.shard(1))


def work(rank):
    torch.manual_seed(0)
    shards = Shards(rank)
    shards.kept()
    for layout, ops in (("uneven", operators().values()), ("even", OF_KINDS)):
        for op in ops:
            for reduction in ("none", "sum", "mean") if "reduction" in op.attributes else ("",):
                shards.operator(op, layout, reduction=reduction)
    for name in FUNCTIONS:
        shards.function(name, torch.randn(5, 7))
    return shards.faults


def test_shards_are_what_the_whole_is(tmp_path):
    assert run_processes(work, WORLD, str(tmp_path)) == [[]] * WORLD


# --- rules of operators that only graphs and layers have --------------------------------------------------------------


def check_rules(name, **given):
    """The whole results; every placement that DTensor may choose on a mesh of two gives their parts."""
    from opgrad.torch.sharding import RULES

    operator = REGISTERED[name]
    given = {**operator.op.attributes, **dict.fromkeys(operator.op.inputs), **given}
    shapes = {key: tuple(each.shape) for key, each in given.items() if isinstance(each, torch.Tensor)}
    mesh = SimpleNamespace(mesh=SimpleNamespace(size=lambda: 2))
    whole = several(operator(*operator.arguments(given)))
    rules = list(
        RULES[operator.op.forward or operator.op.name](
            operator.op, shapes, {**given, operator.names[0]: mesh, "q": mesh}
        )
    )
    assert rules
    for placements in rules:
        for part in range(2):
            own = {
                key: each.chunk(2, placements[key].dim)[part] if key in placements and each is not None else each
                for key, each in given.items()
            }
            for result, mine, other in zip(
                operator.op.results, several(operator(*operator.arguments(own))), whole, strict=True
            ):
                torch.testing.assert_close(
                    mine, other.chunk(2, placements[result].dim)[part], msg=f"{name} {placements}"
                )
    return whole


ROTARY = [
    ((2, 3, 4, 6), (4, 3), {}),
    ((2, 3, 4, 6), (2, 4, 3), {"interleaved": True}),
    ((2, 4, 3, 8), (5, 2), {"rotary_embedding_dim": 4, "layout": "BLHD"}),
    ((2, 4, 12), (7, 3), {"num_heads": 2, "position_ids": torch.tensor([[0, 6, 3, 1], [2, 2, 5, 4]])}),
]


@pytest.mark.parametrize(("shape", "table", "options"), ROTARY, ids=str)
def test_rules_of_rotary_embedding(shape, table, options):
    cos, sin = torch.rand(2, *table)
    for name, array in (("rotary_embedding", "x"), ("rotary_embedding_grad", "dy")):
        check_rules(name, **{array: torch.randn(shape)}, cos_cache=cos, sin_cache=sin, **options)


@pytest.mark.parametrize("mask", [None, (2, 4, 1, 6), (4, 5, 6)], ids=str)
def test_rules_of_attention(mask):
    given = {"q": torch.randn(2, 4, 5, 8), "k": torch.randn(2, 2, 6, 8), "v": torch.randn(2, 2, 6, 8)}
    given |= {"mask": mask and torch.randn(mask), "scale": None, "causal": "", "dropout": 0.0, "seed": None}
    y, lse = check_rules("attention", **given)
    check_rules("attention_grad", dy=torch.randn_like(y), y=y, lse=lse, **given)


# --- classes that are split over processes ---

CLASSES, HIDDEN, IGNORED = 37, 6, -100
RANGES = {1: (0, 37), 2: (0, 12, 37), 3: (0, 20, 20, 37), 5: (0, 1, 9, 9, 30, 37)}  # uneven, and empty
WEIGHT = torch.linspace(0.5, 2.0, CLASSES)
OPTIONS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "label_smoothing": 0.2},
    {"weight": WEIGHT},
    {"weight": WEIGHT, "label_smoothing": 0.1, "reduction": "none"},
    {"label_smoothing": 0.1, "smoothing_formula": "megatron"},
    {"lse_square_scale": 0.01, "weight": WEIGHT},
    {"softcap": 2.0, "temperature": 0.7, "label_smoothing": 0.3},
    {"shift": 1, "num_items": 11},
    {"ignore_index": 5, "reduction": "none", "lse_square_scale": 0.1},
]
NAMES = ("loss", "lse", "z_loss", "log_prob", "entropy")
EXTRA = {"return_lse": True, "return_z_loss": True, "return_log_prob": True, "return_entropy": True}


def of_all_classes(x, target, smoothing_formula="torch", **options):
    """The same loss on one process, in float64, and what else a call may ask for."""
    if smoothing_formula == "megatron":
        options["label_smoothing"] *= CLASSES / (CLASSES - 1)
    found = opgrad.torch.cross_entropy(x.double().movedim(-1, 1), target, **options, **EXTRA)
    return [getattr(found, name) for name in NAMES]


def upstream(results):
    """A gradient of every result, another for each token."""
    generator = torch.Generator().manual_seed(7)
    return sum((each * torch.rand(each.shape, generator=generator)).sum() for each in results)


class Cases:
    """One process: what it finds wrong, and a digest of all that has to be the same on every process."""

    def __init__(self, rank, count):
        self.rank, self.count, self.faults, self.digest = rank, count, [], hashlib.sha256()
        generator = torch.Generator().manual_seed(1)
        self.x = 3 * torch.randn(2, 7, CLASSES, generator=generator)
        self.target = torch.randint(CLASSES, (2, 7), generator=generator)
        self.target[0, 3] = IGNORED
        self.first, self.last = RANGES[count][rank : rank + 2]
        self.hidden = torch.randn(2, 7, HIDDEN, generator=generator)
        self.layer = torch.randn(CLASSES, HIDDEN, generator=generator)
        self.bias = torch.randn(CLASSES, generator=generator)

    def targets(self, options):
        return self.target.where(self.target != IGNORED, options.get("ignore_index", IGNORED))

    def close(self, what, ours, theirs, tolerance):
        scale = theirs.abs().max().item() if theirs.numel() else 0
        if ours.shape != theirs.shape or not torch.allclose(
            ours.double(), theirs, rtol=0, atol=tolerance * (1 + scale)
        ):
            self.faults.append(f"{what}: {ours} is not {theirs}")

    def logits(self, options, dtype):
        whole = self.x.to(dtype, copy=True).requires_grad_()
        own = self.x.to(dtype)[..., self.first : self.last].clone().requires_grad_()
        found = vocab_parallel_cross_entropy(
            own, self.targets(options), vocab_range=(self.first, self.last), **options, **EXTRA
        )
        wanted = of_all_classes(whole, self.targets(options), **options)
        step = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
        for name, theirs in zip(NAMES, wanted, strict=True):
            ours = getattr(found, name)
            rounded = dtype == torch.bfloat16 and name in ("loss", "z_loss")
            self.close(f"{name} {options} {dtype}", ours, theirs, step if rounded else min(step, 1e-6))
            self.digest.update(ours.detach().double().numpy().tobytes())
        upstream([getattr(found, name) for name in NAMES]).backward()
        upstream(wanted).backward()
        if own.grad.dtype != dtype:
            self.faults.append(f"the gradient is {own.grad.dtype}")
        self.close(f"gradient {options} {dtype}", own.grad, whole.grad[..., self.first : self.last].double(), step * 3)

    def linear(self, options):
        x, layer, bias = (each.clone().requires_grad_() for each in (self.hidden, self.layer, self.bias))
        target = self.targets(options)
        wanted = of_all_classes(
            torch.nn.functional.linear(x.double(), layer.double(), bias.double()), target, **options
        )
        upstream(wanted).backward()
        own = [each[self.first : self.last].detach().clone().requires_grad_() for each in (layer, bias)]
        y = self.hidden.clone().requires_grad_()
        found = vocab_parallel_linear_cross_entropy(
            y, own[0], target, linear_bias=own[1], vocab_range=(self.first, self.last), **options, **EXTRA
        )
        upstream([getattr(found, name) for name in NAMES]).backward()
        for name, ours, theirs in (("loss", found.loss, wanted[0]), ("dx", y.grad, x.grad.double())):
            self.close(f"linear {name} {options}", ours, theirs, 3e-6)
            self.digest.update(ours.detach().double().numpy().tobytes())
        for name, ours, theirs in zip(("weight", "bias"), own, (layer, bias), strict=True):
            self.close(f"linear d{name} {options}", ours.grad, theirs.grad[self.first : self.last].double(), 3e-6)

    def silent(self):
        """What does not count has a gradient of 0, whatever its logits are; NaN stays in its row."""
        own = self.x[0, :, self.first : self.last].clone()
        own[3] = torch.nan
        own[4] = torch.inf
        own[5] = -torch.inf
        own.requires_grad_()
        losses = vocab_parallel_cross_entropy(
            own, self.target[0], reduction="none", vocab_range=(self.first, self.last), lse_square_scale=0.1
        )
        losses.sum().backward()
        if not (losses[3] == 0 and losses[4].isnan() and losses[5].isnan() and losses[[0, 1, 2, 6]].isfinite().all()):
            self.faults.append(f"losses of rows without numbers: {losses}")
        if own.grad[3].any() or not own.grad[[0, 1, 2, 6]].isfinite().all():
            self.faults.append(f"gradients of rows without numbers: {own.grad}")

    def refused(self):
        own, target = self.x[0, :, self.first : self.last], self.target[0].clone()
        target[2] = CLASSES
        for what, call in {
            "target[2] is 37, expected 0 to": lambda: vocab_parallel_cross_entropy(
                own, target, vocab_range=(self.first, self.last)
            ),
            "expected one that begins with 0": lambda: vocab_parallel_cross_entropy(
                own, self.target[0], vocab_range=(self.first + 1, self.last + 1)
            ),
            "expected a finite number above 0": lambda: vocab_parallel_cross_entropy(own, target, temperature=0.0),
            "target has shape": lambda: vocab_parallel_cross_entropy(own, target[1:]),
        }.items():
            try:
                call()
                self.faults.append(f"not refused: {what}")
            except ValueError as error:
                if what not in str(error):
                    self.faults.append(f"{error} does not say {what}")

    def predicted(self):
        """The first of the largest classes, among equal ones of several shards, too, as one process has it."""
        names = ("predicted_tokens", "token_accuracy")
        wanted_of = {f"return_{name}": True for name in names}
        for options in ({}, {"softcap": 1.0, "temperature": 3.0}, {"label_smoothing": 0.1, "return_entropy": True}):
            whole = (4 * self.x.reshape(-1, CLASSES)).round() / 8  # many are equal
            whole[1], whole[2, 30], whole[3] = torch.nan, torch.inf, -torch.inf
            whole[4, 5], whole[4, -1], whole[5, 1], whole[5, -2] = 99, torch.nan, torch.inf, torch.nan
            target = self.target.reshape(-1)
            ours = vocab_parallel_cross_entropy(
                whole[:, self.first : self.last], target, vocab_range=(self.first, self.last), **options, **wanted_of
            )
            theirs = opgrad.torch.cross_entropy(whole, target, **options, **wanted_of)
            for name in names:
                self.same(f"{name} {options}", getattr(ours, name), getattr(theirs, name))
            self.same("argmax", ours.predicted_tokens, torch.where(target == -100, -1, whole.argmax(1)))
            weight, x = self.layer[self.first : self.last], self.hidden
            ours = vocab_parallel_linear_cross_entropy(
                x, weight, self.target, vocab_range=(self.first, self.last), **options, **wanted_of
            )
            theirs = opgrad.torch.linear_cross_entropy(x, self.layer, self.target, **options, **wanted_of)
            self.same(f"linear {options}", ours.predicted_tokens, theirs.predicted_tokens)

    def same(self, what, ours, theirs):
        if not torch.equal(ours, theirs):
            self.faults.append(f"{what}: {ours} is not {theirs}")

    def dense(self):
        """Target probabilities, with gradients of their own."""
        part = slice(self.first, self.last)
        q = torch.rand(14, CLASSES, generator=torch.Generator().manual_seed(2)).softmax(1)
        x = self.x.reshape(-1, CLASSES)
        for options in ({}, {"weight": WEIGHT, "label_smoothing": 0.1, "lse_square_scale": 0.1, "softcap": 3.0}):
            for reduction in ("mean", "none"):
                whole = [each.clone().requires_grad_() for each in (x, q)]
                own = [each[:, part].clone().requires_grad_() for each in (x, q)]
                more = {"reduction": reduction, "return_entropy": True, "return_predicted_tokens": True, **options}
                theirs = opgrad.torch.cross_entropy(*whole, **more)
                ours = vocab_parallel_cross_entropy(*own, vocab_range=(self.first, self.last), **more)
                for found in (ours, theirs):
                    upstream([found.loss, found.entropy]).backward()
                self.same("predicted", ours.predicted_tokens, theirs.predicted_tokens)
                for name, a, b in (
                    ("loss", ours.loss, theirs.loss),
                    ("entropy", ours.entropy, theirs.entropy),
                    *((f"gradient {at}", own[at].grad, whole[at].grad[:, part]) for at in (0, 1)),
                ):
                    self.close(f"probabilities: {name} {options}", a, b.double(), 2e-6)
        layer = self.layer[part].clone().requires_grad_()
        hidden, again, whole = (each.clone().requires_grad_() for each in (self.hidden, self.hidden, self.layer))
        ours = vocab_parallel_linear_cross_entropy(
            hidden, layer, q[:, part].view(2, 7, -1), vocab_range=(self.first, self.last)
        )
        theirs = opgrad.torch.linear_cross_entropy(again, whole, q.view(2, 7, -1))
        ours.backward()
        theirs.backward()
        for name, a, b in (
            ("loss", ours, theirs),
            ("dx", hidden.grad, again.grad),
            ("dw", layer.grad, whole.grad[part]),
        ):
            self.close(f"linear with probabilities: {name}", a, b.double(), 2e-6)

    def twice(self):
        """Gradients of gradients: of a function of the shards' gradients, whose values the processes add up."""
        options = {"label_smoothing": 0.2, "softcap": 4.0, "lse_square_scale": 0.1, **EXTRA}
        generator = torch.Generator().manual_seed(3)
        v = torch.randn(14, CLASSES, generator=generator).double()
        u = torch.randn(14, HIDDEN, generator=generator).double()
        x, target, part = self.x.reshape(-1, CLASSES).double(), self.target.reshape(-1), slice(self.first, self.last)

        ranged = {**options, "vocab_range": (self.first, self.last)}

        def second(loss, v, *given):
            given = [each.clone().requires_grad_() for each in given]
            found = loss(*given)
            first = upstream([getattr(found, name) for name in NAMES])
            (slope,) = torch.autograd.grad(first, given[:1], create_graph=True)
            return torch.autograd.grad((slope * v).sum(), given)

        (wanted,) = second(lambda x: opgrad.torch.cross_entropy(x, target, **options), v, x)
        own = v[:, part], x[:, part]
        (found,) = second(lambda x: vocab_parallel_cross_entropy(x, target, **ranged), *own)
        self.close("second derivative", found, wanted[:, part], 1e-12)
        layer, hidden = self.layer.double(), self.hidden.reshape(-1, HIDDEN).double()
        wanted = second(lambda *each: opgrad.torch.linear_cross_entropy(*each, target, **options), u, hidden, layer)
        own = u, hidden, layer[part]
        dx, dw = second(lambda *each: vocab_parallel_linear_cross_entropy(*each, target, **ranged), *own)
        self.close("second derivative by input", dx, wanted[0], 1e-12)
        self.close("second derivative by weight", dw, wanted[1][part], 1e-12)

    def dtensor(self):
        """Classes along one axis of a mesh, rows along another or not at all; by the plain functions' names, too."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

        rows, target = self.x[0, :5].clone(), self.target[0, :5]
        meshes = [((self.count,), [Shard(1)]), ((1, self.count), [Shard(0), Shard(1)])]
        meshes += [((1, self.count), [Replicate(), Shard(1)])]
        meshes += [((self.count, 1), [Shard(0), Shard(1)])] if self.count > 1 else []
        for place, (shape, placements) in enumerate(meshes):
            mesh = init_device_mesh("cpu", shape)
            shared = distribute_tensor(rows.clone(), mesh, placements).requires_grad_()
            whole = rows.clone().requires_grad_()
            run = opgrad.torch.cross_entropy if place % 2 else vocab_parallel_cross_entropy
            for reduction in ("mean", "sum", "none"):
                options = {"reduction": reduction, "label_smoothing": 0.1}
                found = run(shared, target, **options, return_entropy=True, return_token_accuracy=True)
                wanted = opgrad.torch.cross_entropy(whole, target, **options, return_token_accuracy=True)
                self.close(f"DTensor {shape} {reduction}", found.loss.full_tensor(), wanted.loss.double(), 1e-6)
                self.same(f"accuracy {shape}", found.token_accuracy, wanted.token_accuracy)
                shared.grad = whole.grad = None
                found.loss.sum().backward()
                wanted.loss.sum().backward()
                self.close(f"gradient of DTensor {shape}", shared.grad.full_tensor(), whole.grad.double(), 1e-6)
            if shared.grad.placements != tuple(placements):
                self.faults.append(f"the gradient lies as {shared.grad.placements}")
            loss = opgrad.torch.CrossEntropyLoss(WEIGHT)(shared, target)
            self.close("module", loss.full_tensor(), of_all_classes(rows, target, weight=WEIGHT)[0], 1e-6)
            self.dtensor_layer(mesh, placements, target)

    def dtensor_layer(self, mesh, placements, target):
        """A layer whose rows are sharded where the classes are, and input that is sharded where the rows are."""
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        lies = [Replicate() if each == Shard(1) else each for each in placements]
        of_layer = [Shard(0) if each == Shard(1) else Replicate() for each in placements]
        whole = [each.clone().requires_grad_() for each in (self.hidden[0, :5], self.layer, self.bias)]
        loss = opgrad.torch.linear_cross_entropy(*whole[:2], target, linear_bias=whole[2], softcap=2.0)
        loss.backward()
        x = distribute_tensor(self.hidden[0, :5].clone(), mesh, lies).requires_grad_()
        linear = torch.nn.Linear(HIDDEN, CLASSES)
        for name, value in (("weight", self.layer), ("bias", self.bias)):
            setattr(linear, name, torch.nn.Parameter(distribute_tensor(value.clone(), mesh, of_layer)))
        found = opgrad.torch.LinearCrossEntropyLoss(linear=linear, softcap=2.0)(x, target)
        found.backward()
        self.close("linear module", found.full_tensor(), loss.double(), 1e-6)
        for name, ours, theirs in zip(("x", "w", "b"), (x, linear.weight, linear.bias), whole, strict=True):
            self.close(f"linear DTensor d{name} {placements}", ours.grad.full_tensor(), theirs.grad.double(), 3e-6)


def work_on_classes(rank, count):
    cases = Cases(rank, count)
    for options in OPTIONS:
        cases.logits(options, torch.float32)
        cases.linear(options)
    for dtype in (torch.float64, torch.bfloat16):
        cases.logits(OPTIONS[4], dtype)
    cases.silent()
    cases.refused()
    cases.predicted()
    cases.dense()
    cases.twice()
    cases.dtensor()
    return {"faults": cases.faults, "digest": cases.digest.hexdigest()}


def lost(rank, folder):
    """The last process ends without a word once all have joined the group: what the others are told."""
    joined = Path(folder) / "joined"
    if rank == 1:
        (Path(folder) / "found1.json").write_text('""')
        while not joined.exists():  # while it connects, gloo has words of its own
            time.sleep(0.01)
        os._exit(0)
    joined.touch()
    try:
        vocab_parallel_cross_entropy(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
    except RuntimeError as error:
        torch.distributed.destroy_process_group = lambda: None  # it would wait for the one that has ended
        return str(error)
    return ""


COUNTS = (1, 2, 3, 5) if "OPGRAD_PROCESSES" in os.environ else (3,)


@pytest.mark.parametrize("count", COUNTS)
def test_shares_of_classes_are_what_the_whole_is(count, tmp_path):
    """On every process the same bits."""
    found = run_processes(work_on_classes, count, str(tmp_path), count)
    assert [each["faults"] for each in found] == [[]] * count
    assert len({each["digest"] for each in found}) == 1


def test_a_lost_process_is_an_error(tmp_path):
    assert "one of which may have ended" in run_processes(lost, 2, str(tmp_path), str(tmp_path))[0]


@pytest.fixture
def alone(monkeypatch):
    """A group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD.group_name
    torch.distributed.destroy_process_group()


def test_compiled_without_a_graph_break(alone):
    def losses(x, hidden, layer, target):
        options = {"lse_square_scale": 0.1, "return_entropy": True}
        found = vocab_parallel_cross_entropy(x, target, **options)
        other = vocab_parallel_linear_cross_entropy(hidden, layer, target, **options)
        dense = vocab_parallel_cross_entropy(x, x.detach().softmax(-1))
        return found.loss + found.entropy.sum() + other.loss + dense

    cases = Cases(0, 1)
    results = []
    for run in (losses, torch.compile(losses, fullgraph=True, backend="aot_eager")):
        own = [each.clone().requires_grad_() for each in (cases.x, cases.hidden, cases.layer)]
        value = run(*own, cases.target)
        value.backward()
        results.append([value.detach(), *(each.grad for each in own)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_opcheck(alone):
    operators, check = torch.ops.opgrad, torch.library.opcheck
    generator = torch.Generator().manual_seed(5)
    x, w, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 7), (5, 7), (5,))
    )
    labels, parts = torch.tensor([2, -100, 0, 4]), torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    classes = (labels, None, 0, 3.0, 0.7, True, True)
    check(operators.shard_statistics, (x, *classes))
    check(operators.layer_statistics, (x, w, b, *classes, -100, None, alone))
    statistics = operators.shard_statistics(x.detach(), *classes)
    check(operators.shard_statistics_grad, (x.detach(), *classes, statistics, torch.ones_like(statistics)))
    own = [each.detach() for each in (x, w, b)]
    statistics = operators.layer_statistics(*own, *classes, -100, None, alone)
    given = (*classes, -100, None, alone, statistics, torch.ones_like(statistics))
    check(operators.layer_statistics_grad, (*own, *given))
    place = (0, 1, alone)
    check(operators.shard_gather, (parts[0].detach(), labels[[0, 2, 3]], 0, 5, -100, *place, "a loss"))
    check(operators.shard_part, (parts, *place))
    check(operators.shard_parts, (parts[0].detach().requires_grad_(), *place))
    check(operators.shard_copy, (x, alone))
    check(operators.shard_sum, (x, alone))
