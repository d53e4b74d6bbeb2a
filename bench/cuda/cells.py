"""What is measured on CUDA: arrays far beyond the L2 cache, as large as the device's memory suggests."""

from collections.abc import Sequence

from bench.cells import Workload, Workloads

LARGEST = 1 << 29  # elements of an array: 1 GiB in bfloat16, which an H200 softmaxes in half a millisecond
AT_ONCE = 64  # bytes of memory for each of them: 8 arrays of float64, as a cell and its peers keep at once
ELEMENTWISE = 1 << 28
LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
NEIGHBOURS = {1000: 1024, 1001: 1024, 50256: 50304, 50257: 50304, 50304: 50304}  # as many rows as the latter has
HEADLINES = (1024, 4096, 32768, 131072, 50257)
QUICK = 4096
COLUMNS = (Workload((16, 1000, 56, 56), {"axis": 1}, headline=True), Workload((16, 21, 512, 512), {"axis": 1}))
SHAPES = ((1_000_000, 10), (16, 128_256), (100, 10), (1, 1000))  # short rows, few rows, small calls
VOCABULARY, TABLE = (128_256, 4096), (1000, 256)


def workloads(memory: int) -> Workloads:
    """The workloads of each kind of operator for a device with so many bytes of memory."""
    size = min(LARGEST, 1 << max(0, (memory // AT_ONCE).bit_length() - 1))
    rows = _rows(size)
    return {
        "elements": (Workload((min(size, ELEMENTWISE),), headline=True, quick=True), Workload((1000,))),
        "rows": (*rows, *COLUMNS),
        "classes": (*rows, *(Workload(each.shape, headline=each.headline) for each in COLUMNS)),
        "slices": _slices(),
    }


def _rows(size: int) -> Sequence[Workload]:
    found = []
    for length in sorted({*LENGTHS, *NEIGHBOURS}):
        count = max(1, size // NEIGHBOURS.get(length, length))
        found.append(Workload((count, length), headline=length in HEADLINES, quick=length == QUICK))
    return (*found, *map(Workload, SHAPES))


def _slices() -> Sequence[Workload]:
    """Tokens of a language model, then a small table whose rows are asked for many times."""
    return (
        Workload(VOCABULARY, indices=16384, headline=True),
        Workload(VOCABULARY, indices=16384, equal=True),
        Workload(TABLE, indices=65536, headline=True, quick=True),
        Workload(TABLE, indices=65536, equal=True),
    )
