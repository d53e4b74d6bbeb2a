"""Launches on a CUDA device: plans, in the words of the CPU's plans, whose steps' task is `compute.launch`; and passes.

Kernels are compiled by Triton when the first signature needs them, or come from the cache. Then a run of a plan is
native code: it fills in the addresses and calls the driver, without Python and without the interpreter's lock.
"""

import ctypes
import functools
import glob
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from typing import Any

from opgrad import cuda
from opgrad.base.locks import settling
from opgrad.contract import Attributes, Operator, Spec
from opgrad.contract.signature import Operand, Problem, prepare
from opgrad.cpu.compiler import sources, target
from opgrad.cpu.compiler.cache import ObjectCache, directory
from opgrad.cpu.compiler.target import PackedObjects, Packing
from opgrad.cpu.compiler.words import words
from opgrad.cpu.plans import Plan
from opgrad.cpu.runtime.plan import REPORT, SCRATCH, STATUS_WORDS, Patch, call_words, joined, overlap_words
from opgrad.cuda import ahead, driver, triton_private, without_triton
from opgrad.cuda.ahead import Machine
from opgrad.cuda.execute import DEVICES, Device, Launch, Program, planning
from opgrad.onnxruntime.abi import forever
from opgrad.onnxruntime.compute import STREAM, WORKING, Head, launch

CLUSTER, SCHEDULING, SPREAD = 4, 5, 1  # CUlaunchAttributeID, and a CUclusterSchedulingPolicy
ATTRIBUTE_WORDS = 9  # of a CUlaunchAttribute
ADVICE = 'pip install "opgrad[cuda]" compiles them here, `opgrad compile --for sm_…` where it is installed'

_functions: dict[tuple[int, str, str], int] = {}  # by context, architecture's cache and kernel
_kept: list[Any] = forever([])  # what words point to


def plan_on_device(op: Operator, specs: Sequence[Spec | None], attributes: Attributes) -> Plan:
    """The plan of a signature for the current device. Raises what `prepare` raises, RuntimeError if a kernel lacks."""
    problem = prepare(op, specs, attributes, any_stride=True)
    context, device = driver.current(), this_device()
    program, found = compiled(op, problem, device, kernels(device.architecture))
    steps = [_step(i, *each, _function(op.name, *each, device, context)) for i, each in enumerate(found)]
    code = joined(steps, 8 * STATUS_WORDS, *overlap_words(problem))

    def explain(number: int, status: int) -> Exception:
        return _launch_error(op.name, found[number][0], status)

    return Plan(problem, words(code), program.scratch_bytes, explain, program.regime)


def this_device() -> Device:
    """What decides about regimes, of the current device."""
    own = driver.attributes()
    return DEVICES.get(own["architecture"], Device(**own))


def _launch_error(what: str, of: Launch, status: int) -> Exception:
    return RuntimeError(f"{what}: {driver.error(status)}, in the launch of {of.kernel.__name__}")


def _head(number: int, of: Launch, found: Machine, function: int) -> tuple[Head, list[ahead.Parameter]]:
    """The words of a launch of a function before its parameters, without a stream; and these."""
    x, y, z = (*of.grid, 1, 1)[:3]
    attributes = _cluster(of.ctas)
    config = x * of.ctas | y << 32, z | found.threads << 32, 1 | 1 << 32, found.shared, 0, *attributes
    parameters = list(ahead.parameters(of, found))
    return Head(*config, function, driver.address(driver.LAUNCH), 0, number, len(parameters)), parameters


def _step(number: int, of: Launch, found: Machine, function: int) -> list[int]:
    head, parameters = _head(number, of, found, function)
    patches = [Patch(Head._fields.index("stream"), STREAM), Patch(Head._fields.index("report"), SCRATCH)]
    for index, (_, array) in enumerate(parameters, len(head.words)):
        if array is not None:
            patches.append(Patch(index, array.number if isinstance(array, Operand) else WORKING))
    return call_words(launch.address, 1, [*head.words, *(word for word, _ in parameters)], patches)


@functools.cache
def _cluster(ctas: int) -> tuple[int, int]:
    """The address of the attributes of a launch in clusters of so many thread blocks, and how many there are."""
    if ctas == 1:
        return 0, 0
    cluster, scheduling = [CLUSTER, ctas | 1 << 32, 1], [SCHEDULING, SPREAD]
    filled = words(word for each in (cluster, scheduling) for word in (*each, *[0] * (ATTRIBUTE_WORDS - len(each))))
    _kept.append(filled)
    return ctypes.addressof(filled), 2


def _function(what: str, of: Launch, found: Machine, device: Device, context: int) -> int:
    """The function of a launch's kernel, loaded on the device of this context."""
    environment = kernels(device.architecture).environment
    key = context, environment, ahead.key(of)
    with settling:
        if key not in _functions:
            try:
                _functions[key] = driver.function(found.code, found.name, found.shared, of.ctas)
            except driver.DriverError as error:
                raise RuntimeError(
                    f"{what}: the driver, which knows CUDA {driver.version()}, does not load a kernel for "
                    f"{environment}: {error}; update the driver, or compile with an older Triton"
                ) from None
    return _functions[key]


class Pass:
    """Launches over arrays that stay where they are, on one stream, with other numbers in each run.

    what: for messages. launches: their operands lie at the addresses of their numbers. kept: what lives as long.
    Raises RuntimeError if a kernel lacks, as `plan_on_device` does, and in a run if the driver refuses a launch.
    """

    def __init__(self, what: str, launches: Sequence[Launch], addresses: Sequence[int], stream: int):
        context, device = driver.current(), this_device()
        self._what, self._report = what, words([0] * REPORT)
        self.kept: Any = ()
        self._launches: list[tuple[Launch, Any]] = []
        self._numbers: dict[str, list[tuple[Any, int]]] = {}  # by argument: the words in which it stands
        for number, of in enumerate(each for each in launches if all(each.grid)):
            found = _machine(what, of, device, kernels(device.architecture))
            head, parameters = _head(number, of, found, _function(what, of, found, device, context))
            head.stream, head.report = stream, ctypes.addressof(self._report)
            values = [
                word + (addresses[array.number] if isinstance(array, Operand) else 0) for word, array in parameters
            ]
            filled = words([*head.words, *values])
            self._launches.append((of, filled))
            for index, (path, dtype) in enumerate(found.parameters, len(head.words)):
                if dtype == "fp32":
                    self._numbers.setdefault(of.kernel.arg_names[path[0]], []).append((filled, index))

    def __call__(self, **numbers: float) -> None:
        """Launch. numbers: arguments by name; those that no kernel has are left out."""
        for name, value in numbers.items():
            for filled, index in self._numbers.get(name, ()):
                filled[index] = ahead.bits("fp32", value)
        for of, filled in self._launches:
            launch.call(ctypes.addressof(filled), 0)
            if self._report[0]:
                self._report[0] = 0
                raise _launch_error(self._what, of, self._report[2])


# --- machine code ----------------------------------------------------------------------------------------------------


@functools.cache
def kernels(architecture: int) -> ObjectCache:
    """Where machine code for an architecture is kept: the user's cache, and before it the pack that serves kernels.

    Raises RuntimeError if Triton is not installed and no pack has any.
    """
    served = target.served()
    names = served[0].names if served else {}
    here = f"sm_{architecture}-triton-"
    if find_spec("triton") is not None:
        own = here + triton_private.version()
        return PackedObjects(served[0], own, (own, directory())) if served else ObjectCache(own, directory())
    fitting = [name for name in names if name.startswith(here)]
    if served is None or not fitting:
        what = f"{served[0].path} has kernels for {', '.join(names)}" if served else "no pack of kernels is named"
        raise RuntimeError(f"the device is sm_{architecture}, but {what}, and Triton is not installed; {ADVICE}")
    without_triton.release = fitting[-1].removeprefix(here)
    return PackedObjects(served[0], fitting[-1])


def compile_ahead(
    op: Operator, specs: Sequence[Spec | None], attributes: Attributes, architecture: int, folder: str
) -> None:
    """Compile the kernels of a signature for an architecture into a folder of folders, such as packs are made of.

    Raises RuntimeError if Triton is not installed.
    """
    with _packing(architecture, folder) as cache:
        compiled(op, prepare(op, specs, attributes, any_stride=True), DEVICES[architecture], cache)


def compile_engine(count: int, architecture: int, folder: str) -> None:
    """Compile the kernels of optimizers over so many parameters, as `compile_ahead` does those of a signature."""
    with _packing(architecture, folder) as cache:
        from opgrad.cuda import optimizer

        for each in optimizer.every(count):
            _machine("optimizer", each, DEVICES[architecture], cache)


@contextmanager
def _packing(architecture: int, folder: str) -> Iterator[ObjectCache]:
    """A cache for an architecture that writes into a folder, too; without the warnings of its compilations."""
    if find_spec("triton") is None:
        raise RuntimeError(f"CUDA kernels for sm_{architecture} are compiled by Triton, which is not installed")
    environment = f"sm_{architecture}-triton-{triton_private.version()}"
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        yield Packing(environment, directory(), ObjectCache(environment, folder))


def compiled(
    op: Operator, problem: Problem, device: Device, cache: ObjectCache
) -> tuple[Program, list[tuple[Launch, Machine]]]:
    """A problem's program for a device, and its launches with their kernels, as the cache has them or compiled now."""
    with without_triton.importing():
        make = op.kernel(cuda.__name__)
    with planning(device):
        program = make(problem)
    launches = [each for each in program.launches if all(each.grid)]
    return program, [(each, _machine(op.name, each, device, cache)) for each in launches]


def _machine(what: str, of: Launch, device: Device, cache: ObjectCache) -> Machine:
    """The kernel of a launch, from the cache, or compiled with a warning that says so."""
    name = sha256((_sources() + ahead.key(of)).encode()).hexdigest()[:32]
    data = cache.read(name)
    if data is not None:
        return ahead.from_bytes(data)
    if isinstance(cache, PackedObjects) and not cache.compiles:
        kernel = f"{cache.pack.path} lacks the kernel {of.kernel.__name__} for {cache.environment}"
        raise RuntimeError(f"{what}: {kernel}, and Triton is not installed; {ADVICE}")
    start = time.perf_counter()
    found = ahead.machine(of, device.architecture)
    cache.write(name, found.to_bytes())
    seconds = f"{time.perf_counter() - start:.1f} s"
    text = f"{what}: its CUDA kernel {found.name} was compiled in {seconds}, and is kept for later runs"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return found


@functools.cache
def _sources() -> str:
    """A digest of the files that kernels are compiled from."""
    files = sorted(glob.glob(os.path.join(os.path.dirname(cuda.__file__), "*.py")))
    return sha256(b"".join(sources.of_file(file) or b"" for file in files)).hexdigest()
