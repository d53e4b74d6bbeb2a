"""Plans of launches on a CUDA device, in the words of the CPU's plans: a step's task is `launch`.

Kernels are compiled by Triton when the first signature needs them, or come from the cache. Then a run of a plan is
native code: it fills in the addresses and calls the driver, without Python and without the interpreter's lock.
"""

import ctypes
import functools
import glob
import os
import time
import warnings
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from opgrad import cuda
from opgrad.base.locks import settling
from opgrad.contract import Attributes, Operator, Spec
from opgrad.contract.problem import Operand
from opgrad.contract.signature import prepare
from opgrad.cpu.compiler import sources
from opgrad.cpu.compiler.cache import ObjectCache, directory
from opgrad.cpu.compiler.decorators import native
from opgrad.cpu.compiler.structures import Structure, at, behind, structure, words
from opgrad.cpu.compiler.words import call_address, stack_words, store_word
from opgrad.cpu.plans import Plan
from opgrad.cpu.runtime import overlap
from opgrad.cpu.runtime.plan import MAX_ARGUMENTS, SCRATCH, Patch, call_words, joined
from opgrad.cpu.runtime.workspace import STATUS_WORDS
from opgrad.cuda import ahead, driver
from opgrad.cuda.ahead import Machine
from opgrad.cuda.execute import DEVICES, Device, Launch, planning
from opgrad.onnxruntime.abi import forever
from opgrad.onnxruntime.compute import STREAM, WORKING

CLUSTER, SCHEDULING, SPREAD = 4, 5, 1  # CUlaunchAttributeID, and a CUclusterSchedulingPolicy
ATTRIBUTE_WORDS = 9  # of a CUlaunchAttribute

_functions: dict[tuple[int, str, str], int] = {}  # by context, architecture's cache and kernel
_kept: list[Any] = forever([])  # what words point to


@structure
class Head(Structure):
    """The words before a kernel's parameters; the first seven are a CUlaunchConfig."""

    grid: int  # along x and y
    grid_block: int  # the grid along z, the threads of a block along x
    block: int
    shared: int
    stream: int
    attributes: int
    attribute_count: int
    function: int
    launch: int  # cuLaunchKernelEx
    report: int
    number: int  # of the launch in its plan
    parameters: int


@native(2)
def launch(arguments: int, part: int) -> int:
    """Launch a kernel; what the driver says of a launch that fails goes to the report."""
    head, pointers = at(Head, arguments), stack_words(MAX_ARGUMENTS)
    for i in range(head.parameters):
        store_word(pointers, i, behind(head) + 8 * i)
    status = call_address(head.launch, arguments, head.function, pointers, 0) & 0xFFFFFFFF
    if status != 0:
        store_word(head.report, 0, 1)
        store_word(head.report, 1, head.number)
        store_word(head.report, 2, status)
    return 0


def plan_on_device(op: Operator, specs: Sequence[Spec | None], attributes: Attributes) -> Plan:
    """The plan of a signature for the current device. Raises what `prepare` raises, RuntimeError if a kernel lacks."""
    prepared = prepare(op, specs, attributes, any_stride=True)
    context, own = driver.current(), driver.attributes()
    device = DEVICES.get(own["architecture"], Device(**own))
    with planning(device):
        program = op.kernel(cuda.__name__)(prepared.problem)
    launches = [each for each in program.launches if all(each.grid)]
    steps = [_step(i, each, _function(op, each, device, context)) for i, each in enumerate(launches)]
    code = joined(steps, 8 * STATUS_WORDS, *overlap.checked(prepared))

    def explain(number: int, status: int) -> Exception:
        return RuntimeError(f"{op.name}: {driver.error(status)}, in the launch of {launches[number].kernel.__name__}")

    return Plan(
        op,
        tuple(prepared.results.values()),
        prepared.copies,
        program.scratch_bytes,
        1,
        words(code),
        explain,
        program.regime,
        prepared.problem.bytes,
        (),
    )


def _step(number: int, of: Launch, loaded: tuple[Machine, int]) -> list[int]:
    """The words of a launch of a function."""
    found, function = loaded
    x, y, z = (*of.grid, 1, 1)[:3]
    attributes = _cluster(of.ctas)
    config = x * of.ctas | y << 32, z | found.threads << 32, 1 | 1 << 32, found.shared, 0, *attributes
    parameters = list(ahead.parameters(of, found))
    head = Head(*config, function, driver.address(driver.LAUNCH), 0, number, len(parameters))
    patches = [Patch(Head._fields.index("stream"), STREAM), Patch(Head._fields.index("report"), SCRATCH)]
    for place, (_, array) in enumerate(parameters, len(head.words)):
        if array is not None:
            patches.append(Patch(place, array.number if isinstance(array, Operand) else WORKING))
    return call_words(launch.address, 1, [*head.words, *(word for word, _ in parameters)], patches)


def _cluster(ctas: int) -> tuple[int, int]:
    """The address of the attributes of a launch in clusters of so many thread blocks, and how many there are."""
    if ctas == 1:
        return 0, 0
    cluster, scheduling = [CLUSTER, ctas | 1 << 32, 1], [SCHEDULING, SPREAD]
    filled = words(word for each in (cluster, scheduling) for word in (*each, *[0] * (ATTRIBUTE_WORDS - len(each))))
    _kept.append(filled)
    return ctypes.addressof(filled), 2


def _function(op: Operator, of: Launch, device: Device, context: int) -> tuple[Machine, int]:
    """The kernel of a launch, loaded on the device of this context."""
    cache, name = kernels(device.architecture), ahead.key(of)
    found = compiled(op, of, device, cache)
    key = context, cache.environment, name
    with settling:
        if key not in _functions:
            try:
                _functions[key] = driver.function(found.code, found.name, found.shared, of.ctas)
            except driver.DriverError as error:
                raise RuntimeError(
                    f"{op.name}: the driver, which knows CUDA {driver.version()}, does not load a kernel for "
                    f"{cache.environment}: {error}; update the driver, or install an older Triton"
                ) from None
    return found, _functions[key]


# --- machine code ----------------------------------------------------------------------------------------------------


@functools.cache
def kernels(architecture: int) -> ObjectCache:
    """Where machine code for an architecture is kept."""
    return ObjectCache(f"sm_{architecture}-triton-{version('triton')}", directory())


def compiled(op: Operator, of: Launch, device: Device, cache: ObjectCache) -> Machine:
    """The kernel of a launch, from the cache, or compiled with a warning that says so."""
    name = _name(of)
    data = cache.read(name)
    if data is not None:
        return ahead.from_bytes(data)
    start = time.perf_counter()
    found = ahead.machine(of, device.architecture)
    cache.write(name, found.to_bytes())
    seconds = time.perf_counter() - start
    text = f"{op.name}: its CUDA kernel {found.name} was compiled in {seconds:.1f} s, and is kept for later runs"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found


def _name(of: Launch) -> str:
    """The name of a launch's machine code in the cache."""
    return sha256((_sources() + ahead.key(of)).encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """A digest of the files that kernels are compiled from."""
    files = sorted(glob.glob(os.path.join(os.path.dirname(cuda.__file__), "*.py")))
    return sha256(b"".join(sources.of_file(file) or b"" for file in files)).hexdigest()
