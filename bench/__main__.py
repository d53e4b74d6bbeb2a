"""`python -m bench`: the operators beside torch, onnxruntime, SciPy and NumPy."""

from functools import partial

from bench import command, instruction_sets, tables
from bench.command import QUICK_LIMIT, BenchOptions, told
from bench.run import measured
from opgrad.base.terminal import console

# Seconds that a cell takes beside those of --seconds, on two cores: arrays, compiling, the reference.
CELL, SWEEP_CELL = 3.5, 0.4


def bench(options: BenchOptions) -> None:
    """Measure the operators beside torch, onnxruntime, SciPy and NumPy.

    Everybody uses the same arrays and number of threads, and takes turns, in the two ways in which users work: with
    results in memory that is given, after "given", and in new memory, after "new". GB/s of the first count each input
    and each result once; "of copy" compares that with a copy of as many bytes; "ratio" is the best peer's time over
    ours; "ulp" is the worst error against float64. Other work on the machine spoils the figures. On CUDA times are the
    device's, and "host" is that of our call.

    With --sweep softmax, log_softmax and their gradients, or --ops, on rows of 1 to 4 million elements and along inner
    axes: time per element. With --isa for another instruction set.

    Example: python -m bench --ops relu,softmax_grad --json result.json
    """
    options.check()
    instruction_sets.hold(options.isa, "bench")
    each = (SWEEP_CELL if options.sweep else CELL) + (options.seconds or 0.0)
    with told(each, QUICK_LIMIT if options.quick else None) as progress:
        result, written = measured(options, progress)
    tables.show(console(), tables.parts(result))
    if options.plot is not None:
        from bench.plots import drawing, save

        save(drawing(written), options.plot)


main = partial(command.run, bench)

if __name__ == "__main__":
    main()
