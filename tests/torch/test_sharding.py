"""DTensor: two processes compute every operator in shards, forward and backward, as one computes the whole."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from samples import OF_KINDS, sample

import opgrad
from opgrad.ops import operators

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch without torch.distributed", allow_module_level=True)

import opgrad.torch  # noqa: E402
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
    return OPERATORS[op.name].arguments(
        {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    )


def listed(results):
    return results if isinstance(results, tuple | list) else (results,)


class Shards:
    """One process of two: what it finds wrong, in words."""

    def __init__(self, rank):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

        self.mesh, self.rank, self.faults = init_device_mesh("cpu", (WORLD,)), rank, []
        self.whole, self.shard, self.distribute = Replicate(), Shard, distribute_tensor

    def placements(self, tensor):
        return [self.whole, *[self.shard(axis) for axis in range(tensor.dim())]]

    def compare(self, what, ours, theirs):
        for mine, other in zip(listed(ours), listed(theirs), strict=True):
            full = mine.full_tensor()
            if full.shape != other.shape or not torch.allclose(full, other, atol=1e-5, rtol=1e-5):
                self.faults.append(f"{what}: {full} is not {other}")

    def expect(self, what, tensor, placement):
        if tensor.placements != (placement,):
            self.faults.append(f"{what}: {tensor.placements} is not {placement}")

    def operator(self, op, layout, **options):
        """Every argument in turn whole and along each of its axes, the others whole or likewise, where they can be."""
        arguments, call = tensors(op, SHAPES[layout], **options), OPERATORS[op.name]
        expected = call(*arguments)
        places = [place for place, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
        for chosen in places:
            for placement in self.placements(arguments[chosen]):
                for others in (self.whole, placement) if layout == "uneven" else (placement,):
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


def work(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    opgrad.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    shards = Shards(rank)
    shards.kept()
    for layout, several in (("uneven", operators().values()), ("even", OF_KINDS)):
        for op in several:
            for reduction in ("none", "sum", "mean") if "reduction" in op.attributes else ("",):
                shards.operator(op, layout, reduction=reduction)
    for name in FUNCTIONS:
        shards.function(name, torch.randn(5, 7))
    with open(f"{folder}/faults{rank}.json", "w") as file:
        json.dump(shards.faults, file)
    torch.distributed.barrier()
    # DTensor's caches keep the group to the end of the process, where a thread of gloo's that still runs aborts it.
    os._exit(0)


def test_shards_are_what_the_whole_is(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), WORLD)
    for rank in range(WORLD):
        assert json.loads((tmp_path / f"faults{rank}.json").read_text()) == []


# --- rules of operators that only graphs and layers have --------------------------------------------------------------


def check_rules(name, **given):
    """The whole results; every placement that DTensor may choose on a mesh of two gives their parts."""
    from opgrad.torch.sharding import RULES

    operator = REGISTERED[name]
    given = {**operator.op.attributes, **dict.fromkeys(operator.op.inputs), **given}
    shapes = {key: tuple(each.shape) for key, each in given.items() if isinstance(each, torch.Tensor)}
    mesh = SimpleNamespace(mesh=SimpleNamespace(size=lambda: 2))
    whole = listed(operator(*operator.arguments(given)))
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
                operator.op.results, listed(operator(*operator.arguments(own))), whole, strict=True
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
