"""Lines of PTX, run by one lane for each entry of their operands."""

import numpy as np
from ptx.machine import Launch
from ptx.memory import GlobalMemory
from ptx.program import Program

BITS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
KERNEL = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry lines({parameters})
.reqntid {threads}
{{
    .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %d<20>; .reg .b32 %tid; .reg .b64 %at<20>;
    .shared .align 16 .b8 buffer[{shared}];
    mov.u32 %tid, %tid.x;
{loads}
{code}
{stores}
    ret;
}}
"""


def kernel(code, arrays, written, threads, shared=1024):
    """The kernel that loads a lane's entry of arrays into registers of their names, and stores what is written."""
    names = [*arrays, *written]
    loads, stores = [], []
    for number, name in enumerate(names):
        array = {**arrays, **written}[name]
        width = array.dtype.itemsize
        place = f"ld.param.b64 %at{number}, [a{number}]; mad.wide.u32 %at{number}, %tid, {width}, %at{number};"
        loads.append(place)
        way = f"{BITS[width]} " + (f"[%at{number}], %{name};" if name in written else f"%{name}, [%at{number}];")
        (stores if name in written else loads).append(f"{'st' if name in written else 'ld'}.global.{way}")
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 a{number}" for number in range(len(names)))
    return KERNEL.format(
        parameters=parameters, threads=threads, loads="\n".join(loads), code=code, stores="\n".join(stores),
        shared=shared,
    )  # fmt: skip


def run(code, results, threads=None, **operands):
    """What registers hold behind the code, by name and dtype; operands: what they hold before it."""
    count = max(np.size(each) for each in operands.values()) if operands else 32
    threads = threads or -(-count // 32) * 32
    arrays = {name: np.resize(np.asarray(each), threads) for name, each in operands.items()}
    written = {name: np.zeros(threads, dtype) for name, dtype in results.items()}
    launch(kernel(code, arrays, written, threads), {**arrays, **written}, threads)
    return tuple(each[:count] for each in written.values())


def launch(text, arrays, threads, grid=(1, 1, 1), shared=0, written=(), **more):
    """Run a kernel whose parameters are these arrays; of those in `written` nothing is there yet."""
    memory = GlobalMemory()
    for name, array in arrays.items():
        memory.add(array, name, name not in written)
    arguments = [array.ctypes.data for array in arrays.values()]
    made = Launch(Program(text), grid, threads, arguments, memory, shared, **more)
    made.run()
    return made
