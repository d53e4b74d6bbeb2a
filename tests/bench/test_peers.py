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
from bench.cells import DTYPES, GRAPH, Cell, Workload, large_cases
from bench.measure import GIVEN, LACKING, NEW, WAYS, NoSuchWay, only
from bench.torch_operators import fastest
from opgrad.cli.examples import examples, listed
from opgrad.cli.examples.arguments import error_in_ulp, reference
from opgrad.ops import graph_operators, operators

NOT_COMPARED = {"quick_gelu", "quick_gelu_grad"}  # SiLU is QuickGelu with alpha 1
NUMBERS = {"loss"}  # results that peers return, for which they need no memory
PEER_TOLERANCE = 8  # ulp
# By random numbers of the peer; LSTM's gradient is not given the bias with which its states were computed.
OTHER_NUMBERS = {"dropout", "lstm_grad"}
# PyTorch is off, too: by a rounded tanh, times up to 10, where all but rounding cancels, or in sums of 25,088 terms.
ROUNDED = {"gated_linear_unit_grad", "fast_gelu_grad", "bias_fast_gelu_grad_dx", "conv_grad", "conv_transpose_grad"}
OTHER_ORDER = {"batch_norm_internal"}  # of torch's results behind the first


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
@pytest.mark.one_in(2)
def test_our_call_computes_the_results(op, dtype, way):
    for cell in tiny_cells(op, dtype):
        case = Case(cell)
        assert set(run_into_results(case, case.call(way), way)) == set(case.results)
        assert case.error() < 64


@each_operator
@pytest.mark.one_in(3)
def test_operators_of_training_graphs(monkeypatch, op):
    monkeypatch.setattr("bench.case.examples", lambda *_, cases: examples(op, "float32"))
    case = GraphCase(Cell(op, Workload((), group=GRAPH), "float32"))
    case.call()()
    assert case.error() < 64
    assert case.traffic == sum(array.nbytes for array in arrays_of(case.values) + arrays_of(case.results))


def smaller(case):
    """With smaller sizes in place of large ones, the same for the same."""
    if isinstance(case, dict):
        return {name: smaller(each) for name, each in case.items()}
    if isinstance(case, tuple):
        return tuple(map(smaller, case))
    return case // 64 if isinstance(case, int) and case >= 200 else case


@pytest.mark.skipif("torch" not in peers.installed(), reason="needs PyTorch")
@pytest.mark.parametrize("name", [name for name in peers.TORCH if name in graph_operators()])
@pytest.mark.one_in(3)
def test_torch_computes_the_examples_of_training_graphs(monkeypatch, name):
    """We and torch compute the same of what is measured, in both ways, within the tolerance."""
    op = graph_operators()[name]
    cases = smaller(large_cases(name))
    every = examples(op, "float32", cases=cases)[: len(cases)]
    monkeypatch.setattr("bench.case.examples", lambda *_, cases: every)
    for place, example in enumerate(every):
        case = GraphCase(Cell(op, Workload((), group=GRAPH, example=place), "float32"))
        for way in WAYS:
            check_torch(case, example.terms, way)


def check_torch(case, terms, way):
    if case.op.family == IN_PLACE:
        case.share()  # earlier calls have changed the arguments
    case.call()()
    ours = {name: array.copy() for name, array in case.results.items()}
    if way == NEW:
        for mine, expected in zip(listed(case.call(NEW)()), ours.values(), strict=True):
            np.testing.assert_array_equal(mine, expected)
    found, notes = peers.calls(case, ["torch"], way)
    assert not notes or notes == {"torch": LACKING[way]}
    if not found:
        return
    if case.op.family == IN_PLACE:  # what was tried has changed its own weights
        found = {"torch": peers.SETUPS["torch"](case, way)}
    for array in case.results.values():
        array.fill(77)
    returned = [
        each.detach().numpy() if hasattr(each, "detach") else np.asarray(each) for each in listed(found["torch"]())
    ]
    written = {name: array for name, array in case.results.items() if not (array == 77).all()}  # truth values always
    assert way == GIVEN or all(array.dtype == bool for array in written.values())
    known = ours if len(returned) == len(ours) or case.op.name not in OTHER_ORDER else list(ours)[:1]
    found = dict(zip(known, returned, strict=False)) | (written if way == GIVEN else {})
    for name, theirs in found.items():
        if case.op.name not in OTHER_NUMBERS:
            got, expected = (each.ravel()[:: max(1, each.size >> 12)] for each in (theirs, ours[name]))
            check_close([got], [expected], terms, 2 if case.op.name in ROUNDED else 1)


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
    graph = GraphCase(Cell(graph_operators()["gelu_grad"], Workload((), group=GRAPH), "float32"))
    peers.calls(graph, ["torch.compile"], way)[0]["torch.compile"]()


def test_ways_and_the_faster_of_two_calls():
    only(NEW, NEW)
    with pytest.raises(NoSuchWay, match="has no way to write into memory that is given"):
        only(NEW, GIVEN)
    quick, slow = (lambda: 1), (lambda: sum(range(100000)))
    assert fastest(slow, quick) is quick


def test_torch_computes_every_operator():
    pytest.importorskip("torch")
    assert set(peers.TORCH) >= set(operators())


def test_unknown_peers_are_refused():
    with pytest.raises(ValueError, match=r"^bench: peer is .jax., expected one installed of "):
        peers.chosen(["jax"], peers.installed())
