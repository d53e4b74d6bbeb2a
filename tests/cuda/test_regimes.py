"""Every operator's CUDA kernels in every regime and dtype, against the float64 reference.

The interpreter takes milliseconds for a program: shapes are small, and limits between regimes are lowered.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from guards import Placed
from relayouts import relaid, spaced_rows
from samples import bits, elements, in_place_calls, packed, sample

from opgrad.contract import FLOATS
from opgrad.ops import operators

pytest.importorskip("triton", reason="needs Triton")

import triton
from cuda_backend import FROM_PTX, ON_GPU, call, check, for_kernels, has_kernel, has_own_kernels, limits, program, some

from opgrad.cuda import regimes

pytestmark = [pytest.mark.gpu] if ON_GPU else []


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes that reach a regime of these operators once the limits are lowered.

    limits: replaces those of opgrad.cuda.regimes. attributes: of the operators, and options of `sample`. clusters:
    as if Triton and the device had them; the interpreter takes a cluster for one program.
    """

    regime: str
    operators: str
    shapes: list
    limits: dict = dataclasses.field(default_factory=dict)
    attributes: dict = dataclasses.field(default_factory=dict)
    clusters: bool = False


NEVER = 1 << 30
SMALL = {"row": 128, "tile": 32, "step": 64, "peel": 32}
SMALL_COLUMNS = {"row": 512, "tile": 128, "step": 256}  # whose number is odd: they take four times the registers
REDUCING = "softmax log_softmax softmax_grad log_softmax_grad softmax_cross_entropy_loss "
REDUCING += "softmax_cross_entropy_loss_only softmax_cross_entropy_loss_and_grad"
ACROSS = {"axis": 1}
CASES = [
    Case("short rows", REDUCING, [(9, 7), (35, 33), (67, 2)]),
    Case("one row", REDUCING, [(3, 33), (5, 24), (3, 25)], {"tile": 16, "peel": 24}),
    Case("long rows", REDUCING, [(2, 129), (1, 259)], {**SMALL, "share": NEVER}),
    Case("cluster", REDUCING, [(3, 129), (2, 200)], {**SMALL, "share": NEVER}, clusters=True),
    Case("few rows", REDUCING, [(2, 131), (1, 259)], {**SMALL, "share": 64}),
    Case("columns", REDUCING, [(2, 5, 33), (3, 7, 4), (70, 3, 2)], {}, ACROSS),
    Case("long columns", REDUCING, [(2, 35, 5), (1, 41, 9)], {**SMALL_COLUMNS, "share": NEVER}, ACROSS),
    Case("few columns", REDUCING, [(1, 131, 3), (1, 40, 9)], {**SMALL_COLUMNS, "share": 64}, ACROSS),
    Case("whole slices", "gather", [(5, 7), (40, 33)]),
    Case("parts of slices", "gather", [(3, 5000)]),
    Case("few indices", "gather_grad", [(5, 7), (40, 33)]),
    Case("one run", "gather_grad", [(5, 7), (40, 33)], {}, {"indices": (300,)}),
    Case("merged runs", "gather_grad", [(2, 3), (150, 9)], {}, {"indices": (1030,)}),
]


@pytest.fixture
def case(request):
    """A case, whose shapes reach its regime meanwhile."""
    if request.param.clusters and not triton.knobs.runtime.interpret and not regimes.clusters():
        pytest.skip("needs a device with clusters, and Triton 3.9")
    with limits(request.param.clusters, **request.param.limits):
        yield request.param


@pytest.mark.parametrize("case", CASES, indirect=True, ids=lambda case: case.regime)
@pytest.mark.one_in(2)
def test_regimes(case, rng):
    chosen = [operators()[name] for name in case.operators.split() if has_kernel(operators()[name])]
    for place, op in enumerate(chosen):
        shapes = some(case.shapes, case.regime, len(case.shapes), place)
        for dtype, shape in itertools.product(some(FLOATS, case.regime, 4, place), shapes):
            arguments = sample(op, shape, dtype, rng, **case.attributes)
            assert program(op, arguments).regime == case.regime, f"{op.name}, {shape}"
            check(op, arguments, f"{shape}, {dtype}, {case.regime}")


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("case", CASES[:8], indirect=True, ids=lambda case: case.regime)
def test_logits_of_ignored_samples_may_be_nan(case, rng):
    """Their loss and gradient are 0, in rows of which nothing is read then, and in columns."""
    op, shape = operators()["softmax_cross_entropy_loss_and_grad"], case.shapes[0]
    arguments = sample(op, shape, "float32", rng, reduction="none", ignore_index=2)
    arguments["labels"] = np.where(arguments["labels"] == 2, 1, arguments["labels"])
    arguments["labels"][0], arguments["logits"][0] = 2, np.nan
    losses, slopes = call(op, arguments)
    assert not losses[0].any()
    assert not slopes[0].any()
    assert np.isfinite(slopes).all()


@pytest.mark.parametrize("shape", [(4, 7), (4, 5, 3)], ids=["rows", "columns"])
def test_what_comes_for_ignored_samples_may_be_nan(shape, rng):
    op = operators()["softmax_cross_entropy_loss_grad"]
    arguments = sample(op, shape, "float32", rng, reduction="none", ignore_index=2)
    arguments["labels"] = np.where(arguments["labels"] == 2, 1, arguments["labels"])
    arguments["labels"][0], arguments["log_prob"][0], arguments["dy"][0] = 2, np.nan, np.nan
    (slopes,) = check(op, arguments)
    assert np.isfinite(slopes[1:]).all()


@pytest.fixture
def shared_rows():
    with limits(False, **SMALL, share=32):
        yield


@for_kernels(lambda op: op.name in REDUCING.split() and has_own_kernels(op), ["float32", "bfloat16"])
@pytest.mark.usefixtures("shared_rows")
def test_few_odd_rows_in_place_and_apart(op, dtype, rng):
    """Programs share rows that each begin at another distance from an aligned address: each end has one writer."""
    arguments = sample(op, (5, 67), dtype, rng, reduction="none", ignore_index=2)
    assert program(op, arguments).regime == "few rows"
    expected = check(op, arguments)
    for argument, own, outputs in in_place_calls(op, arguments, expected):
        results = call(op, own, out=packed(outputs))
        assert [bits(array) for array in results] == [bits(array) for array in expected], argument
    guards = [Placed(result.shape, result.dtype, offset=result.itemsize) for result in expected]
    check(op, relaid(arguments, spaced_rows, elements(op, arguments)), out=packed([each.array for each in guards]))
    assert all(guard.untouched() for guard in guards)


LENGTHS = [(4096, 1000), (3, 32768), (2, 50257), (140, 65539), (1, 131072), (150, 131072), (2, 262144)]


@pytest.mark.skipif(not (FROM_PTX or ON_GPU), reason="the interpreter takes minutes")
@for_kernels(lambda op: op.name in REDUCING.split() and has_own_kernels(op), ["float32", "bfloat16"])
def test_limits_as_they_are(op, dtype, rng):
    """Rows as long as in training, whatever regime they belong to."""
    for shape in LENGTHS:
        check(op, sample(op, shape, dtype, rng), str(shape))


def test_regimes_are_those_of_the_current_device(monkeypatch):
    """Not of the first one, nor of what was supposed before a driver was there."""
    from types import SimpleNamespace

    from opgrad.cuda import execute, triton_private

    def driver(current):
        sizes = [{"multiprocessor_count": 10 * (i + 1), "max_shared_mem": 1000 * (i + 1)} for i in range(2)]
        methods = {
            "utils": SimpleNamespace(get_device_properties=sizes.__getitem__),
            "get_current_device": lambda _: current[0],
            "get_current_target": lambda _: SimpleNamespace(arch=(80, 90)[current[0]]),
        }
        return type("Driver", (), methods)()

    class NoDriver:
        def __getattr__(self, name):
            raise RuntimeError("0 active drivers")

    current = [0]
    for active, index, wanted in [
        (NoDriver(), 0, execute.Device()),
        (driver(current), 0, execute.Device(10, 1000, 80)),
        (None, 1, execute.Device(20, 2000, 90)),
        (None, 0, execute.Device(10, 1000, 80)),
    ]:
        current[0] = index
        if active is not None:
            fake = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
            monkeypatch.setattr(triton_private, "triton", fake)
        assert execute.device() == wanted
        assert regimes.clusters() == (wanted.architecture >= 90 and regimes._release() >= regimes.CLUSTERS_SINCE)
