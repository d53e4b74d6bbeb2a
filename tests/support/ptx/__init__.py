"""PTX, executed on the CPU: what Triton compiles a kernel to runs over the host's memory, under a sanitizer.

parser.py       text to instructions            types.py        types, and operands as NumPy arrays
program.py      instructions to blocks of steps flow.py         their order
machine.py      a launch: lanes, masks, barriers
memory.py       global and shared memory        sanitizer.py    what no kernel may do
opcodes/        what each opcode does, a family a file
driver/         a stand-in for the driver's library, so that Triton's launcher runs

It lies among what tests share, and not in `opgrad`: no user needs it, and the wheel stays as small as it is.
"""
