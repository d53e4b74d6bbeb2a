"""Whom the benchmark compares with, in both ways, on tiny arrays: they compute what opgrad computes."""

import importlib
import itertools
from functools import partial

import numpy as np
import pytest
from bench_cells import tiny_cells
from graph_cases import arrays_of, check_close, each_operator

from bench import peers
from bench.case import IN_PLACE, Case, GraphCase
from bench.cells import DTYPES, EXAMPLE, Cell
from bench.measure import GIVEN, LACKING, NEW, WAYS, NoSuchWay, only
from bench.torch_operators import fastest
from opgrad.cli.examples import examples, listed
from opgrad.cli.examples.arguments import error_in_ulp, reference
from opgrad.ops import graph_operators, operators

NOT_COMPARED = {"quick_gelu", "quick_gelu_grad"}  # SiLU is QuickGelu with alpha 1
NUMBERS = {"loss"}  # results that peers return, for which they need no memory
PEER_TOLERANCE = 8  # ulp
DRAWN_ANEW = {"dropout"}  # by random numbers of the peer
# PyTorch's slope of gelu by tanh has 1 - tanh**2 of a rounded tanh, times up to 10, where all but rounding cancels.
ROUNDED = {"gated_linear_unit_grad"}
CANCELLING = {"layer_normalization_grad"}  # in rows of one number, where peers leave what rounding does


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """What torch.compile makes of calls is not waited for."""
    if "torch" in peers.installed():
        monkeypatch.setattr("torch.compile", lambda function, **_: function)


def numpy_of(value, like):
    """What a peer returned as an array: a tensor, onnxruntime's value, or an array."""
    if hasattr(value, "untyped_storage"):
        torch = importlib.import_module("torch")
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return flat.view(like.dtype).reshape(value.shape)
    if like.dtype.name == "bfloat16" and hasattr(value, "data_ptr"):
        return numpy_of(importlib.import_module("torch").from_dlpack(value), like)
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def run_into_results(case, call, way):
    """Call, with the case's results cleared before; what was computed stands in them afterwards, by name."""
    for array in case.results.values():
        array.fill(77)
    returned = listed(call())
    written = {name: array for name, array in case.results.items() if not (array == 77).all()}  # truth values always
    if way == GIVEN:
        return written
    assert all(array.dtype == bool for array in written.values())
    for (name, array), value in zip(case.results.items(), returned, strict=False):
        computed = numpy_of(value, array)
        assert computed.shape == array.shape, name
        array[...] = computed
    return dict(list(case.results.items())[: len(returned)])


@pytest.mark.parametrize("way", WAYS)
def test_our_call_computes_the_results(op, dtype, way):
    for cell in tiny_cells(op, dtype):
        case = Case(cell)
        assert set(run_into_results(case, case.call(way), way)) == set(case.results)
        assert case.error() < 64


@each_operator
def test_operators_of_training_graphs_and_their_peers(monkeypatch, op):
    for place, example in enumerate(examples(op, "float32")):
        monkeypatch.setattr("bench.case.examples", lambda *_, only=example, large: [only])
        case = GraphCase(Cell(op, EXAMPLE, "float32"))
        case.call()()
        sizes = [array.size for array in arrays_of(case.values)]
        if place == 0:
            assert case.error() < 64
            assert case.traffic == sum(array.nbytes for array in arrays_of(case.values) + arrays_of(case.results))
        # Peers may refuse what is empty, and round what cancels where a single number is normalized.
        if min(sizes, default=0) and max(sizes) > 1:
            for way in WAYS:
                check_peers(case, example.terms, way)


def check_peers(case, terms, way):
    """We and the peers compute the same, within the tolerance, as far as their results have our form."""
    if case.op.family == IN_PLACE:
        case.share()  # earlier calls have changed the arguments
    case.call()()
    ours = {name: array.copy() for name, array in case.results.items()}
    if way == NEW:
        for mine, expected in zip(listed(case.call(NEW)()), ours.values(), strict=True):
            np.testing.assert_array_equal(mine, expected)
    rivals, notes = peers.calls(case, peers.installed(), way)
    assert set(rivals) <= {"torch", "torch.compile"}
    assert set(notes.values()) <= {LACKING[way]}
    if case.op.family == IN_PLACE:  # what was tried has changed its own weights
        rivals = {name: peers.SETUPS[name](case, way) for name in rivals}
    for call in rivals.values():
        for array in case.results.values():
            array.fill(77)
        for name, theirs in computed(case, call(), way).items():
            cancels = case.op.name in CANCELLING and not ours[name].any()
            if case.op.name not in DRAWN_ANEW and not cancels:
                check_close([theirs], [ours[name]], terms, 2 if case.op.name in ROUNDED else 1)


def computed(case, returned, way):
    """What a peer's call returned in the form of a result, or else wrote into the case's arrays, by name."""
    found = {name: array for name, array in case.results.items() if not (array == 77).all()}  # truth values always
    if way == NEW:
        assert all(array.dtype == bool for array in found.values())
        found = {}
    each = [array.numpy() if hasattr(array, "numpy") else np.asarray(array) for array in listed(returned)]
    like = dict(list(case.results.items())[: len(each)]) if len(each) == len(case.results) else case.results
    returned_too = {
        name: theirs.reshape(ours.shape)  # gather_nd's peer counts the slices along one axis
        for (name, ours), theirs in zip(like.items(), each, strict=False)
        if theirs.size == ours.size
    }
    assert found or returned_too
    return found | (returned_too if len(each) == len(case.results) else {})


@pytest.mark.parametrize("peer", peers.installed())
@pytest.mark.parametrize("dtype", DTYPES)
def test_peers_compute_the_same(op, dtype, peer):
    for cell, way in itertools.product(tiny_cells(op, dtype), WAYS):
        case = Case(cell)
        found, notes = peers.calls(case, [peer], way)
        assert not notes or (notes == {peer: LACKING[GIVEN]} and way == GIVEN and peer in ("numpy", "scipy"))
        if peer not in found:
            continue
        written = run_into_results(case, found[peer], way)
        assert set(written) | NUMBERS >= set(case.results)
        exact = reference(op, case.values)
        for name, array in written.items():
            limit = PEER_TOLERANCE + cell.workload.indices  # so many addends at most
            assert op.name in NOT_COMPARED or error_in_ulp(array, exact[name]) < limit, (cell.name, way)


@pytest.mark.parametrize("way", WAYS)
def test_torch_compile_takes_calls_whole(monkeypatch, way):
    """Traced as for the compiler, without what would then be compiled."""
    torch = pytest.importorskip("torch")
    monkeypatch.undo()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for name in ("softmax_cross_entropy_loss_and_grad", "softmax_grad", "relu", "gather_grad"):
        op = operators()[name]
        case = Case(tiny_cells(op)[0])
        written = run_into_results(case, peers.calls(case, ["torch.compile"], way)[0]["torch.compile"], way)
        assert set(written) | NUMBERS >= set(case.results)
        assert case.error() < 64 or NUMBERS & set(case.results)
    graph = GraphCase(Cell(graph_operators()["gelu_grad"], EXAMPLE, "float32"))
    peers.calls(graph, ["torch.compile"], way)[0]["torch.compile"]()


def test_ways_and_the_faster_of_two_calls():
    only(NEW, NEW)
    with pytest.raises(NoSuchWay, match="has no way to write into memory that is given"):
        only(NEW, GIVEN)
    quick, slow = (lambda: 1), (lambda: sum(range(100000)))
    assert fastest(slow, quick) is quick


def test_torch_computes_every_operator():
    pytest.importorskip("torch")
    assert set(peers.TORCH) == set(operators())


def test_unknown_peers_are_refused():
    with pytest.raises(ValueError, match=r"^bench: peer is .jax., expected one installed of "):
        peers.chosen(["jax"], peers.installed())
