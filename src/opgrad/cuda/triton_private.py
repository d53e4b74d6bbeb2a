"""The private names of Triton that opgrad uses, looked up here alone.

What a release of Triton lacks costs speed or the feature that needed it, with one warning when it is first needed:
neither the import nor a call fails. `missing` names it, for a test.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import triton

WARP_SIZE = 32
# Below the module `triton`; a driver's names and a kernel's are looked up when there is one.
LAUNCHING = (
    "runtime.jit.JITFunction.warmup",
    "compiler.CompiledKernel.__getitem__",
    "compiler.CompiledKernel.run",
    "knobs.runtime.launch_enter_hook.calls",
    "knobs.runtime.launch_exit_hook.calls",
)
NAMES = (
    "knobs.runtime.interpret",
    "knobs.nvidia.cuobjdump.path",
    "runtime.driver.set_active",
    "runtime.jit.create_function_from_signature",
    "runtime.jit.JITFunction._pack_args",
    "compiler.ASTSource",
    "compiler.compile",
    "compiler.make_backend",
    "backends.compiler.GPUTarget",
    "backends.backends",
    *LAUNCHING,
)
OF_DRIVERS = ("get_current_device", "get_current_target", "utils.get_device_properties")


def missing() -> list[str]:
    """The names that this Triton has not."""
    return [name for name in NAMES if not _has(triton, name)]


def _has(owner: Any, name: str) -> bool:
    try:
        attrgetter(name)(owner)
    except AttributeError:
        return False
    return True


@cache
def _warn(costs: str) -> None:
    """Say once what a missing name costs."""
    warnings.warn(f"opgrad: Triton {triton.__version__} is unknown: {costs}", RuntimeWarning, stacklevel=3)


def version() -> str:
    """The release of Triton."""
    return str(triton.__version__)


def is_interpreting() -> bool:
    """Whether kernels are interpreted."""
    if _has(triton, "knobs.runtime.interpret"):
        return bool(triton.knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0") != "0"


# --- launching -------------------------------------------------------------------------------------------------------


def launcher(
    kernel: Any, values: Sequence[Any], grid: tuple[int, ...], options: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """What launches a kernel, compiled for these arguments, with addresses as integers; None if there is no such way.

    Triton's own dispatch is taken then, which looks at every argument at every call.
    """
    if not all(_has(triton, name) for name in LAUNCHING):
        _warn("each call of a CUDA kernel takes tens of microseconds more")
        return None
    return _launch(kernel.warmup(*values, grid=grid, **options), grid)


def _launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches a compiled kernel, past Triton's hooks where nobody has hooked in: 3 microseconds instead of 10."""
    hooked, run = kernel[grid], kernel.run  # the former loads the kernel
    (x, y, z), runtime = grid, triton.knobs.runtime
    of_kernel = kernel.function, kernel.packed_metadata, None, None, None

    def launch(*arguments: Any, stream: int | None) -> None:
        if stream is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            hooked(*arguments, stream=stream)
        else:
            run(x, y, z, stream, *of_kernel, *arguments)

    return launch


# --- devices ---------------------------------------------------------------------------------------------------------


def device_properties() -> Mapping[str, int] | None:
    """What the current device can do; None where there is no driver, and where Triton does not tell."""
    try:
        driver = triton.runtime.driver.active
        index = driver.get_current_device()
    except RuntimeError:  # there is no device here
        return None
    except AttributeError:
        _warn("plans of CUDA kernels are those for an H200")
        return None
    return _properties(driver, index)


@cache
def _properties(driver: Any, index: int) -> Mapping[str, int] | None:
    """Of the device of this number, which is the current one."""
    if not all(_has(driver, name) for name in OF_DRIVERS):
        _warn("plans of CUDA kernels are those for an H200")
        return None
    found = driver.utils.get_device_properties(index)
    return {
        "multiprocessors": found["multiprocessor_count"],
        "shared_memory": found["max_shared_mem"],
        "architecture": driver.get_current_target().arch,
    }


# --- compiling for devices that are not here --------------------------------------------------------------------------


def compiled_for(arch: int, kernel: Any, values: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The kernel, compiled for these arguments and an architecture, as `warmup` does it for the device that is here.

    No driver is asked, so that another thread may launch meanwhile. Raises RuntimeError where this Triton lacks a name
    that is needed.
    """
    if lacking := missing():
        raise RuntimeError(f"opgrad.cuda: Triton {triton.__version__} has no {', '.join(lacking)}")
    target = triton.backends.compiler.GPUTarget("cuda", arch, WARP_SIZE)
    backend = triton.compiler.make_backend(target)
    binder = triton.runtime.jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, excess = binder(*values, **options)
    chosen, signature, constants, attributes = kernel._pack_args(backend, excess, bound, specialization, excess)
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compiler.compile(source, target=target, options=chosen.__dict__)


def disassembler() -> str:
    """The program that comes with Triton and says what resources a kernel takes."""
    return str(triton.knobs.nvidia.cuobjdump.path)


def use_own_driver() -> Callable[[], None]:
    """Make a driver that asks PyTorch for nothing; what is returned makes it the one that Triton uses."""
    own = triton.backends.backends["nvidia"].driver()
    return lambda: triton.runtime.driver.set_active(own)
