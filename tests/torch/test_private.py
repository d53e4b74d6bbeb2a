"""Without names that PyTorch does not document, opgrad.torch is imported and plain calls work."""

import ast
import re
import sys

import pytest
from lacking import SOURCE, looked_for, nodes, run_without

torch = pytest.importorskip("torch")

from opgrad.call.libraries import torch_private  # noqa: E402

# PyTorch itself registers no operator without these.
PATHS = [path for path in looked_for(torch_private) if path not in ("torch:_C.TensorType", "torch:_C.OptionalType")]
# What native code looks for, and PyTorch's own code does not need.
NATIVE = (
    "torch:_C._dispatch_keys",
    "torch:_neg_view",
    "torch:_C._storage_Use_Count",
    "torch:_C._len_torch_dispatch_stack",
)

# What importing opgrad.torch does not load.
HEAVY = ("torch.onnx", "torch.distributed.tensor", "onnxscript", "opgrad.torch.export", "opgrad.torch.sharding")
# PyTorch's own code needs some of the other names when it is called, so they are back by then: what opgrad found stays.
# A child is a second: each lacks several names that have nothing to do with each other, since neighbours are apart.
CHILD = """
GROUPS = 5
import importlib, warnings
import torch, torch.utils._python_dispatch, torch._functorch.pyfunctorch, torch.autograd.forward_ad
import torch.func, opgrad, opgrad.cpu.plans  # once, for all children

def same(ours, theirs):  # torch.testing would load torch.distributed.tensor in each child
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)

def calls():
    import opgrad.torch as o
    x, target = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, -100, 4, 3])
    w = torch.randn(9, 5, requires_grad=True)
    losses = torch.nn.functional
    for ours, theirs in [
        (o.softmax(x), x.softmax(-1)), (o.tanh(x), x.tanh()),
        (o.cross_entropy(x, target), losses.cross_entropy(x, target)),
        (o.cross_entropy(x, target, label_smoothing=0.1), losses.cross_entropy(x, target, label_smoothing=0.1)),
        (o.linear_cross_entropy(x, w, target), losses.cross_entropy(x @ w.t(), target)),
    ]:
        same(ours, theirs)
        dy = torch.randn_like(ours)
        same(*[torch.autograd.grad(each, x, dy, create_graph=True)[0] for each in (ours, theirs)])
    same(torch.ops.opgrad.tanh(x), x.tanh())
    torch.autograd.grad(torch.ops.opgrad.tanh(x).sum(), x)
    o.softmax(x.detach())

known, native = sys.argv[1].split(), sys.argv[2].split()

def taken_away(path):
    module, _, name = path.rpartition(":")
    *owners, last = name.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    kept = getattr(owner, last, None)
    if kept is not None:
        try:
            delattr(owner, last)
        except (TypeError, AttributeError):
            return None
    return owner, last, kept

def child(paths):
    taken = {path: found for path in paths if (found := taken_away(path))}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import opgrad.torch
        from opgrad.call.libraries import torch_private
    assert not [name for name in sys.argv[3].split() if name in sys.modules]
    for path, (owner, last, kept) in taken.items():
        if kept is not None and path not in native:
            setattr(owner, last, kept)
        if kept is not None and path in known:
            assert path in torch_private.MISSING, torch_private.MISSING
            lacking = [str(each.message) for each in told if " lacks " in str(each.message)]
            assert any(path.replace(":", ".") in each for each in lacking), lacking
    calls()

every = list(dict.fromkeys(known + native))
fork_for([every[first::GROUPS] for first in range(GROUPS)], child)
"""


@pytest.mark.skipif(not hasattr(sys, "getrefcount") or sys.platform == "win32", reason="forks")
def test_without_some_of_them_and_what_is_not_loaded():
    assert len(PATHS) > 12
    run_without(CHILD, PATHS, NATIVE, HEAVY)


def test_this_release_has_them_all():
    """What goes missing with a new release of PyTorch is noticed here, before users do."""
    assert set(torch_private.MISSING) <= torch_private._of_builds
    assert torch_private.watchers()
    describe, propagator = torch_private.sharding_tables()
    assert describe(0)
    assert propagator.op_to_schema_info
    assert propagator.op_to_shape_and_stride_idx


def test_another_dtensor_costs_its_rules_alone(monkeypatch):
    from opgrad.torch import operators

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor._op_schema", None)
    operators._register_shardings.cache_clear()
    with pytest.warns(RuntimeWarning, match="has another DTensor than the known ones"):
        operators._register_shardings()
    operators._register_shardings.cache_clear()


def test_an_unknown_key_of_the_dispatcher_costs_transformations_alone(monkeypatch):
    class Refusing:
        def impl(self, *arguments):
            raise RuntimeError("could not parse dispatch key")

    monkeypatch.setattr(torch_private, "MISSING", [])
    with pytest.warns(UserWarning, match="lacks FuncTorchDynamicLayerFrontMode"):
        torch_private.implement_transform(Refusing(), "tanh", print)
    torch_private.implement_transform(Refusing(), "relu", print)  # warns once


def test_they_stand_in_one_file():
    for name, node in nodes(*(SOURCE / "torch").rglob("*.py"), *(SOURCE / "call" / "libraries").glob("torch*.py")):
        if name == "call/libraries/torch_private.py":
            continue
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            assert not re.match(r"(torch|forward_ad|DTensor)\._[^_]", text), f"{name}: {text}"
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            private = parts[0] == "torch" and any(part.startswith("_") for part in parts)
            assert not private, f"{name}: {node.module}"
