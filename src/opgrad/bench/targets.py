"""What is measured: the CPU, a CUDA device, or JAX, each with its workloads, peers and way to take time."""

from opgrad import machine
from opgrad.bench.cpu_target import Target as Target

TARGETS = ("cpu", "cuda", "jax")


def target(name: str) -> Target:
    """The target of this name. Raises ValueError for another one, RuntimeError where there is no such device."""
    if name not in TARGETS:
        raise ValueError(f"bench: device is {name!r}, expected one of {', '.join(TARGETS)}")
    if name == "cpu":
        return Target()
    if name == "jax":
        from opgrad.bench import jax_target

        return jax_target.Jax()
    if problem := machine.cuda_problem():
        raise RuntimeError(f"bench: device is 'cuda', but {problem}")
    from opgrad.bench.cuda.target import Cuda

    return Cuda.current()
