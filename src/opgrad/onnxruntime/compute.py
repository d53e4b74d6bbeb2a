"""The native function that onnxruntime calls to run a node; it is the same for every operator.

It looks up the plan for the inputs' shapes among the node's plans. For new shapes it calls Python to prepare a plan.
Then onnxruntime allocates the outputs, and the plan is executed on the arrays where they lie, without copies.
"""

from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    Structure,
    at,
    behind,
    call_address,
    load_i32,
    load_u8,
    load_word,
    place,
    stack_words,
    store_word,
    structure,
)
from opgrad.cpu.plans import Keyed, find_keyed
from opgrad.cpu.runtime.plan import MAX_ARGUMENTS, NO_MEMORY, REPORT, Plan, may_overlap
from opgrad.cpu.runtime.pool import STACK_WORDS, give, take
from opgrad.onnxruntime import abi


@structure
class Node(Structure):
    """The first words of a node; the kinds of its inputs follow."""

    api: int
    plans: int  # the first of its keyed plans
    closed: int
    inputs: int
    overwrites: int  # how many results are written over an input
    overwritten: int  # the address of an `Overwritten` for each of them
    prepare: int  # functions
    refuse: int
    execute: int
    spread: int
    copy_bytes: int  # of C, or of CUDA's driver, which take the stream besides
    set_bytes: int
    operands: int
    most_dimensions: int
    allocator: int  # the OrtAllocator of a CUDA device and its OrtMemoryInfo; 0 on the CPU
    memory: int


@structure
class Overwritten(Structure):
    """Three operands: a result, the input over which it is written, and an output that gets a copy."""

    result: int
    input: int
    copy: int


@structure
class Outputs(Structure):
    """What a node knows of a keyed plan."""

    spare_bytes: int  # the size of the memory for results without an output of the node
    spare_from: int  # the source of this memory, see `scratch.source`
    overwritten_bytes: int  # the address of the sizes of results that are written over an input
    count: int
    first: int  # the address of the outputs, each an `Output` with its dimensions behind it
    may_lack: int  # how many results may have no output
    lacking: int  # the address of a `Lacking` for each of them


@structure
class Output(Structure):
    operand: int
    rank: int


@structure
class Lacking(Structure):
    operand: int
    place: int  # in the spare memory


LIMIT = 64  # the most dimensions of an input, or values of an input that is read as an attribute
FEW_INPUTS, MOST_INPUTS = 10, 1024
MANY_LIMIT = 8  # the most dimensions of an input if the node has more than FEW_INPUTS inputs
MOST_OPERANDS = 2 * MOST_INPUTS + 3
# The operands of outputs that are no results: the flag "done", and copies of overwritten inputs.
FLAG, *COPIES = SPECIAL = tuple(range(2 * MOST_INPUTS, MOST_OPERANDS))
KEY_WORDS = 1 + MOST_INPUTS * (1 + MANY_LIMIT)  # also enough for FEW_INPUTS inputs of LIMIT dimensions or values
ALIGNMENT = 64
ALL_OPERANDS = MOST_OPERANDS + 2
STREAM, WORKING = range(MOST_OPERANDS, ALL_OPERANDS)  # on a device: no arrays, but filled into launches like these
OVERLAPS, MISALIGNED = 1, 2  # in place of a report: outputs lie where other arrays lie; see `is_aligned`
ABSENT = -1


def dimensions_of(inputs: int) -> int:
    """The most dimensions of an input of a node with so many inputs."""
    return LIMIT if inputs <= FEW_INPUTS else MANY_LIMIT


@inline
def append(key: int, word: int) -> int:
    """Add a word to a key; its word 0 counts the words, itself included."""
    used = load_word(key, 0)
    store_word(key, used, word)
    store_word(key, 0, used + 1)
    return 0


@inline
def append_shape(api: int, value: int, key: int, slot: int, most: int) -> int:
    """Add rank and dimensions of an array to the key; its number of elements, or -rank if that is more than `most`."""
    call_address(load_word(api, abi.GET_DIMENSIONS_COUNT), value, slot)
    rank = load_word(slot, 0)
    append(key, rank)
    if rank > most:
        return -rank
    used = load_word(key, 0)
    dimensions = key + 8 * used
    call_address(load_word(api, abi.GET_DIMENSIONS), value, dimensions, rank)
    store_word(key, 0, used + rank)
    elements = 1
    for i in range(rank):
        elements *= load_word(dimensions, i)
    return elements


@inline
def append_values(key: int, data: int, elements: int, size: int) -> int:
    """Add the values of an input to the key, `size` bytes each, as unsigned numbers."""
    for i in range(elements):
        if size == 8:
            append(key, load_word(data, i))
        elif size == 4:
            append(key, load_i32(data, i) & 0xFFFFFFFF)
        elif size == 2:
            append(key, load_u8(data, 2 * i) | load_u8(data, 2 * i + 1) << 8)
        else:
            append(key, load_u8(data, i))
    return 0


@inline
def read_input(node: Node, context: int, i: int, key: int, operands: int, slot: int) -> int:
    """Add input i to the key and, if it is an array, to the operands; 0 or a status."""
    api, kind = node.api, load_word(behind(node), i)
    store_word(slot, 0, 0)
    status = call_address(load_word(api, abi.KERNEL_CONTEXT_GET_INPUT), context, i, slot)
    value = load_word(slot, 0)
    if status != 0:
        return status
    if value == 0:
        append(key, ABSENT)
        return 0
    status = call_address(load_word(api, abi.GET_TENSOR_TYPE_AND_SHAPE), value, slot)
    if status != 0:
        return status
    info = load_word(slot, 0)
    elements = append_shape(api, info, key, slot, node.most_dimensions)
    call_address(load_word(api, abi.RELEASE_TENSOR_TYPE_AND_SHAPE_INFO), info)
    call_address(load_word(api, abi.GET_TENSOR_MUTABLE_DATA), value, slot)
    data = load_word(slot, 0)
    if kind >= 0:
        store_word(operands, kind, data)
    elif 0 <= elements <= LIMIT:
        append_values(key, data, elements, -kind)
    return 0


@inline
def read_inputs(node: Node, context: int, key: int, operands: int, slot: int) -> int:
    """Fill the key and the operands; 0 or a status."""
    call_address(load_word(node.api, abi.KERNEL_CONTEXT_GET_INPUT_COUNT), context, slot)
    given = load_word(slot, 0)
    store_word(key, 0, 1)
    for i in range(node.inputs):
        if i < given:
            status = read_input(node, context, i, key, operands, slot)
            if status != 0:
                return status
        else:
            append(key, ABSENT)
    return 0


@inline
def take_outputs(node: Node, context: int, outputs: Outputs, operands: int, slot: int) -> int:
    """Have onnxruntime allocate the outputs and put them among the operands; 0 or a status."""
    api, following = node.api, outputs.first
    for i in range(outputs.count):
        output = at(Output, following)
        dimensions, rank = behind(output), output.rank
        status = call_address(load_word(api, abi.KERNEL_CONTEXT_GET_OUTPUT), context, i, dimensions, rank, slot)
        if status != 0:
            return status
        if load_word(slot, 0) != 0:
            call_address(load_word(api, abi.GET_TENSOR_MUTABLE_DATA), load_word(slot, 0), slot)
            store_word(operands, output.operand, load_word(slot, 0))
        following = dimensions + 8 * rank
    return 0


@inline
def is_complete(outputs: Outputs, operands: int) -> bool:
    """Whether every result has an output."""
    complete = True
    for i in range(outputs.may_lack):
        complete &= load_word(operands, at(Lacking, outputs.lacking, i).operand) != 0
    return complete


@inline
def place_rest(outputs: Outputs, operands: int, spare: int) -> int:
    """Set the addresses of results without an output to their places in spare memory."""
    for i in range(outputs.may_lack):
        lacking = at(Lacking, outputs.lacking, i)
        if load_word(operands, lacking.operand) == 0:
            store_word(operands, lacking.operand, spare + lacking.place)
    return 0


@inline
def take_on_device(node: Node, context: int, size: int, operands: int, slot: int) -> int:
    """Put the stream, and so many bytes of the device's memory, among the operands; 0 or a status."""
    store_word(slot, 0, 0)
    status = call_address(load_word(node.api, abi.KERNEL_CONTEXT_GET_GPU_COMPUTE_STREAM), context, slot)
    store_word(operands, STREAM, load_word(slot, 0))
    store_word(slot, 0, 0)
    if status == 0 and size:
        # Its allocator knows the stream: what is given back before the launches have run, no other stream gets.
        take_memory = load_word(node.api, abi.KERNEL_CONTEXT_GET_SCRATCH_BUFFER)
        status = call_address(take_memory, context, node.memory, size, slot)
    store_word(operands, WORKING, load_word(slot, 0))
    return status


@inline
def is_aligned(node: Node, operands: int) -> bool:
    """Whether all arrays begin at multiples of 16 bytes, as kernels on a device are compiled for."""
    bits = 0
    for i in range(node.operands):
        bits |= load_word(operands, i)
    return bits & 15 == 0


@inline
def run_on_device(node: Node, context: int, keyed: Keyed, operands: int, slot: int) -> int:
    """Launch the plan's kernels on onnxruntime's stream; returns 0 or a status."""
    plan, outputs, report = at(Plan, keyed.plan), at(Outputs, keyed.own), stack_words(REPORT)
    status = take_on_device(node, context, outputs.spare_bytes, operands, slot)
    if status != 0:
        return status
    place_rest(outputs, operands, load_word(operands, WORKING))
    if not is_aligned(node, operands):
        status = call_address(node.refuse, node.address, keyed.address, MISALIGNED)
    elif plan.spans == 0 and may_overlap(plan.couples, 0, behind(plan), operands, 0):
        status = call_address(node.refuse, node.address, keyed.address, OVERLAPS)
    elif call_address(node.execute, keyed.plan, operands, 0, 0, 1, 0, 0, report) != 0:
        status = call_address(node.refuse, node.address, keyed.address, report)
    if load_word(operands, WORKING) != 0:
        call_address(load_word(node.allocator, abi.ALLOCATOR_FREE), node.allocator, load_word(operands, WORKING))
    return status


@inline
def run_plan(node: Node, context: int, keyed: Keyed, operands: int, slot: int) -> int:
    """Run the plan on the operands, in onnxruntime's threads if it has several parts; returns 0 or a status."""
    store_word(slot, 0, load_word(node.api, abi.KERNEL_CONTEXT_PARALLEL_FOR))
    store_word(slot, 1, context)
    plan, outputs, spare = at(Plan, keyed.plan), at(Outputs, keyed.own), stack_words(STACK_WORDS)
    run, size = node.spread if keyed.parts > 1 else 0, outputs.spare_bytes
    source = 0 if is_complete(outputs, operands) else outputs.spare_from
    if source:
        spare = take(source, size)
        if spare == 0:
            return call_address(node.refuse, node.address, keyed.address, 0)
    place_rest(outputs, operands, spare)
    # a caller may have bound outputs there
    if plan.spans == 0 and may_overlap(plan.couples, 0, behind(plan), operands, 0):
        if source:
            give(source, spare, size)
        return call_address(node.refuse, node.address, keyed.address, OVERLAPS)
    report = stack_words(REPORT)
    status = call_address(node.execute, keyed.plan, operands, 0, 0, 1, run, slot, report)
    if status != 0:
        status = call_address(node.refuse, node.address, keyed.address, 0 if status == NO_MEMORY else report)
    if source:
        give(source, spare, size)
    return status


@inline
def overwrite(node: Node, operands: int) -> int:
    """Set the address of each result that is written over an input to that of the input."""
    for i in range(node.overwrites):
        overwritten = at(Overwritten, node.overwritten, i)
        store_word(operands, overwritten.result, load_word(operands, overwritten.input))
    return 0


@inline
def finish(node: Node, outputs: Outputs, operands: int) -> int:
    """Write the outputs that are not results of the plan."""
    flag, stream = load_word(operands, FLAG), load_word(operands, STREAM)
    if flag != 0:
        call_address(node.set_bytes, flag, 1, 1, stream)
    for i in range(node.overwrites):
        overwritten = at(Overwritten, node.overwritten, i)
        copy = load_word(operands, overwritten.copy)
        if copy != 0:
            size = load_word(outputs.overwritten_bytes, i)
            call_address(node.copy_bytes, copy, load_word(operands, overwritten.input), size, stream)
    return 0


@native(2)
def compute(address: int, context: int) -> int:
    """KernelComputeV2: run the node at this address; 0 or a status."""
    node, key = at(Node, address), stack_words(KEY_WORDS)
    operands, slot = stack_words(ALL_OPERANDS), stack_words(2)
    for i in range(node.operands):
        store_word(operands, i, 0)
    for i in SPECIAL:
        store_word(operands, i, 0)
    store_word(operands, STREAM, 0)
    status = read_inputs(node, context, key, operands, slot)
    if status != 0:
        return status
    found = find_keyed(place(node, "plans"), key)
    if found == 0:
        store_word(slot, 0, 0)
        status = call_address(node.prepare, address, key, slot, operands)
        found = load_word(slot, 0)
        if found == 0:
            return status
    keyed = at(Keyed, found)
    status = take_outputs(node, context, at(Outputs, keyed.own), operands, slot)
    if status != 0:
        return status
    overwrite(node, operands)
    if node.allocator != 0:
        status = run_on_device(node, context, keyed, operands, slot)
    else:
        status = run_plan(node, context, keyed, operands, slot)
    if status != 0:
        return status
    return finish(node, at(Outputs, keyed.own), operands)


@native(4)
def parallel_for(pool: int, task: int, arguments: int, parts: int) -> int:
    """Call task(arguments, part) for every part in onnxruntime's threads."""
    return call_address(load_word(pool, 0), load_word(pool, 1), task, parts, 0, arguments)


@native(1)
def close(address: int) -> int:
    """KernelDestroy. It only marks the node, as it may be called when the interpreter has ended already."""
    node = at(Node, address)
    node.closed = 1
    if node.allocator != 0:
        call_address(load_word(node.api, abi.RELEASE_ALLOCATOR), node.allocator)
    return 0


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
