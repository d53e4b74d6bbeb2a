"""The native task that launches a kernel on a CUDA device: a step of a plan, as the CPU's kernels are."""

from opgrad.cpu.compiler.decorators import native
from opgrad.cpu.compiler.structures import Structure, at, behind, structure
from opgrad.cpu.compiler.words import call_address, stack_words, store_word
from opgrad.cpu.runtime.plan import MAX_ARGUMENTS


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
    entry: int  # of the driver: cuLaunchKernelEx
    report: int
    number: int  # of the launch in its plan
    parameters: int


@native(2)
def launch(arguments: int, part: int) -> int:
    """Launch a kernel; what the driver says of a launch that fails goes to the report."""
    head, pointers = at(Head, arguments), stack_words(MAX_ARGUMENTS)
    for i in range(head.parameters):
        store_word(pointers, i, behind(head) + 8 * i)
    status = call_address(head.entry, arguments, head.function, pointers, 0) & 0xFFFFFFFF
    if status != 0:
        store_word(head.report, 0, 1)
        store_word(head.report, 1, head.number)
        store_word(head.report, 2, status)
    return 0
