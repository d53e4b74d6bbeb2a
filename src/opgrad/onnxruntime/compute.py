"""The native function that onnxruntime calls to run a node; it is the same for every operator.

It looks up the plan for the inputs' shapes among the node's plans. For new shapes it calls Python to prepare a plan.
Then onnxruntime allocates the outputs, and the plan is executed on the arrays where they lie, without copies.
"""

from opgrad.cpu.compiler.decorators import inline, native
from opgrad.cpu.compiler.words import (
    call_address,
    load_i32,
    load_u8,
    load_word,
    stack_words,
    store_u8,
    store_word,
)
from opgrad.cpu.keyed import OWN, PARTS, PLAN, find_keyed
from opgrad.cpu.runtime.overlap import SPANS, may_overlap
from opgrad.cpu.runtime.plan import APART, NO_MEMORY, REPORT
from opgrad.cpu.runtime.scratch import STACK_WORDS, give, take
from opgrad.onnxruntime.abi import (
    GET_DIMENSIONS,
    GET_DIMENSIONS_COUNT,
    GET_TENSOR_MUTABLE_DATA,
    GET_TENSOR_TYPE_AND_SHAPE,
    KERNEL_CONTEXT_GET_INPUT,
    KERNEL_CONTEXT_GET_INPUT_COUNT,
    KERNEL_CONTEXT_GET_OUTPUT,
    KERNEL_CONTEXT_PARALLEL_FOR,
    RELEASE_TENSOR_TYPE_AND_SHAPE_INFO,
)

# The words of a node. OVERWRITES is the number of results that are written over an input. BUFFERS is the address of
# three operands for each of them: the result, the input, and an output that gets a copy.
API, PLANS, CLOSED, INPUTS, OVERWRITES, BUFFERS = range(6)
PREPARE, REFUSE, EXECUTE, SPREAD, COPY_BYTES, OPERANDS, MOST_DIMENSIONS, KINDS = range(6, 14)
# A node's own words of a keyed plan. SPARE_BYTES is the size of the memory for results without an output of the
# node, and SPARE_FROM the source of this memory, see `scratch.source`. At OUTPUTS there is the number of outputs, with
# operand, rank and dimensions of each. Behind them there is the number of results that may have no output, with the
# operand of each and its place in the spare memory.
SPARE_BYTES, SPARE_FROM, BUFFER_BYTES, OUTPUTS, KEY = range(OWN, OWN + 5)

LIMIT = 64  # the most dimensions of an input, or values of an input that is read as an attribute
FEW_INPUTS, MOST_INPUTS = 10, 1024
MANY_LIMIT = 8  # the most dimensions of an input if the node has more than FEW_INPUTS inputs
MOST_OPERANDS = 2 * MOST_INPUTS + 3
# The operands of outputs that are no results: the flag "done", and copies of overwritten inputs.
FLAG, *COPIES = SPECIAL = tuple(range(2 * MOST_INPUTS, MOST_OPERANDS))
KEY_WORDS = 1 + MOST_INPUTS * (1 + MANY_LIMIT)  # also enough for FEW_INPUTS inputs of LIMIT dimensions or values
ALIGNMENT = 64
OVERLAPS = 1  # in place of a report: outputs lie where other arrays lie
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
    call_address(load_word(api, GET_DIMENSIONS_COUNT), value, slot)
    rank = load_word(slot, 0)
    append(key, rank)
    if rank > most:
        return -rank
    used = load_word(key, 0)
    dimensions = key + 8 * used
    call_address(load_word(api, GET_DIMENSIONS), value, dimensions, rank)
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
def read_input(node: int, context: int, i: int, key: int, operands: int, slot: int) -> int:
    """Add input i to the key and, if it is an array, to the operands; 0 or a status."""
    api, kind = load_word(node, API), load_word(node, KINDS + i)
    store_word(slot, 0, 0)
    status = call_address(load_word(api, KERNEL_CONTEXT_GET_INPUT), context, i, slot)
    value = load_word(slot, 0)
    if status != 0:
        return status
    if value == 0:
        append(key, ABSENT)
        return 0
    status = call_address(load_word(api, GET_TENSOR_TYPE_AND_SHAPE), value, slot)
    if status != 0:
        return status
    info = load_word(slot, 0)
    elements = append_shape(api, info, key, slot, load_word(node, MOST_DIMENSIONS))
    call_address(load_word(api, RELEASE_TENSOR_TYPE_AND_SHAPE_INFO), info)
    call_address(load_word(api, GET_TENSOR_MUTABLE_DATA), value, slot)
    data = load_word(slot, 0)
    if kind >= 0:
        store_word(operands, kind, data)
    elif 0 <= elements <= LIMIT:
        append_values(key, data, elements, -kind)
    return 0


@inline
def read_inputs(node: int, context: int, key: int, operands: int, slot: int) -> int:
    """Fill the key and the operands; 0 or a status."""
    call_address(load_word(load_word(node, API), KERNEL_CONTEXT_GET_INPUT_COUNT), context, slot)
    given = load_word(slot, 0)
    store_word(key, 0, 1)
    for i in range(load_word(node, INPUTS)):
        if i < given:
            status = read_input(node, context, i, key, operands, slot)
            if status != 0:
                return status
        else:
            append(key, ABSENT)
    return 0


@inline
def take_outputs(node: int, context: int, keyed: int, operands: int, slot: int) -> int:
    """Have onnxruntime allocate the outputs and put them among the operands; 0 or a status."""
    api, outputs = load_word(node, API), load_word(keyed, OUTPUTS)
    at = 1
    for i in range(load_word(outputs, 0)):
        operand, rank, dimensions = load_word(outputs, at), load_word(outputs, at + 1), outputs + 8 * (at + 2)
        status = call_address(load_word(api, KERNEL_CONTEXT_GET_OUTPUT), context, i, dimensions, rank, slot)
        if status != 0:
            return status
        if load_word(slot, 0) != 0:
            call_address(load_word(api, GET_TENSOR_MUTABLE_DATA), load_word(slot, 0), slot)
            store_word(operands, operand, load_word(slot, 0))
        at += 2 + rank
    return 0


@inline
def rest_of(keyed: int) -> int:
    """The address of a keyed plan's words about results that may have no output."""
    outputs = load_word(keyed, OUTPUTS)
    at = 1
    for _ in range(load_word(outputs, 0)):
        at += 2 + load_word(outputs, at + 1)
    return outputs + 8 * at


@inline
def is_complete(rest: int, operands: int) -> bool:
    """Whether every result has an output."""
    complete = True
    for i in range(load_word(rest, 0)):
        complete &= load_word(operands, load_word(rest, 1 + 2 * i)) != 0
    return complete


@inline
def place_rest(rest: int, operands: int, spare: int) -> int:
    """Set the addresses of results without an output to their places in spare memory."""
    for i in range(load_word(rest, 0)):
        operand = load_word(rest, 1 + 2 * i)
        if load_word(operands, operand) == 0:
            store_word(operands, operand, spare + load_word(rest, 2 + 2 * i))
    return 0


@inline
def run_plan(node: int, context: int, keyed: int, operands: int, slot: int) -> int:
    """Run the plan on the operands, in onnxruntime's threads if it has several parts; returns 0 or a status."""
    store_word(slot, 0, load_word(load_word(node, API), KERNEL_CONTEXT_PARALLEL_FOR))
    store_word(slot, 1, context)
    run = load_word(node, SPREAD) if load_word(keyed, PARTS) > 1 else 0
    rest, size, spare = rest_of(keyed), load_word(keyed, SPARE_BYTES), stack_words(STACK_WORDS)
    source = 0 if is_complete(rest, operands) else load_word(keyed, SPARE_FROM)
    if source:
        spare = take(source, size)
        if spare == 0:
            return call_address(load_word(node, REFUSE), node, keyed, 0)
    place_rest(rest, operands, spare)
    apart = load_word(keyed, PLAN) + 8 * APART
    if not load_word(apart, SPANS) and may_overlap(apart, operands, 0):  # a caller has bound outputs there
        if source:
            give(source, spare, size)
        return call_address(load_word(node, REFUSE), node, keyed, OVERLAPS)
    report = stack_words(REPORT)
    status = call_address(load_word(node, EXECUTE), load_word(keyed, PLAN), operands, 0, 0, 1, run, slot, report)
    if status != 0:
        status = call_address(load_word(node, REFUSE), node, keyed, 0 if status == NO_MEMORY else report)
    if source:
        give(source, spare, size)
    return status


@inline
def overwrite(node: int, operands: int) -> int:
    """Set the address of each result that is written over an input to that of the input."""
    pairs = load_word(node, BUFFERS)
    for i in range(load_word(node, OVERWRITES)):
        store_word(operands, load_word(pairs, 3 * i), load_word(operands, load_word(pairs, 3 * i + 1)))
    return 0


@inline
def finish(node: int, keyed: int, operands: int) -> int:
    """Write the outputs that are not results of the plan."""
    flag, pairs, sizes = load_word(operands, FLAG), load_word(node, BUFFERS), load_word(keyed, BUFFER_BYTES)
    if flag != 0:
        store_u8(flag, 0, 1)
    for i in range(load_word(node, OVERWRITES)):
        copy = load_word(operands, load_word(pairs, 3 * i + 2))
        if copy != 0:
            buffer = load_word(operands, load_word(pairs, 3 * i + 1))
            call_address(load_word(node, COPY_BYTES), copy, buffer, load_word(sizes, i))
    return 0


@native(2)
def compute(node: int, context: int) -> int:
    """KernelComputeV2: run a node; 0 or a status."""
    key, operands, slot = stack_words(KEY_WORDS), stack_words(MOST_OPERANDS), stack_words(2)
    for i in range(load_word(node, OPERANDS)):
        store_word(operands, i, 0)
    for i in SPECIAL:
        store_word(operands, i, 0)
    status = read_inputs(node, context, key, operands, slot)
    if status != 0:
        return status
    keyed = find_keyed(node + 8 * PLANS, key, KEY)
    if keyed == 0:
        store_word(slot, 0, 0)
        status = call_address(load_word(node, PREPARE), node, key, slot)
        keyed = load_word(slot, 0)
        if keyed == 0:
            return status
    status = take_outputs(node, context, keyed, operands, slot)
    if status != 0:
        return status
    overwrite(node, operands)
    status = run_plan(node, context, keyed, operands, slot)
    if status != 0:
        return status
    return finish(node, keyed, operands)


@native(4)
def parallel_for(pool: int, task: int, arguments: int, parts: int) -> int:
    """Call task(arguments, part) for every part in onnxruntime's threads."""
    return call_address(load_word(pool, 0), load_word(pool, 1), task, parts, 0, arguments)


@native(1)
def close(node: int) -> int:
    """KernelDestroy. It only marks the node, as it may be called when the interpreter has ended already."""
    store_word(node, CLOSED, 1)
    return 0
