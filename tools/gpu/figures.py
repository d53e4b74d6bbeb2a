"""The benchmark's cells that a short time on a device is for, beside PyTorch and Liger; or a few with torch.compile.

    python tools/gpu/figures.py [--compile]

Cells are added to a file of the benchmark's results, which is written after each.
"""

import argparse
from collections.abc import Sequence

import results
from target import target

from bench.cells import Cell, select
from bench.command import BenchOptions
from bench.cuda import Cuda
from bench.figures import key, medians
from bench.measure import COPY, NEW, OURS
from bench.peers import COMPILE
from bench.run import previous, run, store

FILE = "bench.json"
SECONDS = 0.5  # of measuring a cell
REDUCING = ("softmax", "softmax_grad", "softmax_cross_entropy_loss_and_grad")
ROWS = ("524288x1024", "131072x4096", "16384x32768", "10672x50257", "4096x131072")
OTHERS = (
    ("softmax_grad", "4096x131072", "float32"),
    ("quick_gelu_grad", "268435456", "bfloat16"),
    ("gather_grad", "128256x4096, 16384 indices", "bfloat16"),
    ("softmax", "16x1000x56x56, axis 1", "bfloat16"),
    ("softmax", "1x1000", "float32"),
)
# First what the goals are about, then the same in float32, then the rest of the operators, as far as time goes.
FIGURES = (
    *((op, shape, "bfloat16") for op in REDUCING for shape in ROWS),
    *OTHERS,
    *((op, shape, "float32") for op in REDUCING for shape in ROWS if (op, shape, "float32") not in OTHERS),
    ("softmax_grad", "16x1000x56x56, axis 1", "bfloat16"),
    ("softmax_grad", "1x1000", "float32"),
    ("log_softmax", "131072x4096", "bfloat16"),
    ("log_softmax_grad", "131072x4096", "bfloat16"),
    ("softmax_cross_entropy_loss", "131072x4096", "bfloat16"),
    ("softmax_cross_entropy_loss_only", "10672x50257", "bfloat16"),
    ("softmax_cross_entropy_loss_grad", "131072x4096", "bfloat16"),
    ("gather_grad", "128256x4096, 16384 indices", "float32"),
    ("gather_grad", "128256x4096, 16384 indices, all equal", "bfloat16"),
    ("gather_grad", "1000x256, 65536 indices", "bfloat16"),
    ("gather", "128256x4096, 16384 indices", "bfloat16"),
    ("quick_gelu_grad", "268435456", "float32"),
    ("quick_gelu", "268435456", "bfloat16"),
    ("relu", "268435456", "bfloat16"),
    ("tanh_grad", "268435456", "bfloat16"),
)
COMPILED = tuple((op, shape, "bfloat16") for op in REDUCING for shape in ("131072x4096", "10672x50257"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    compiling = parser.parse_args().compile
    chosen = target()
    names = [name for name in chosen.installed() if (compiling and not results.is_dry()) or name != COMPILE]
    cells = _cells(chosen, COMPILED if compiling else FIGURES)
    path = results.folder() / FILE
    old = previous(path, path.exists())
    options = BenchOptions(device="cuda", seconds=SECONDS).kept()
    told: list[str] = []

    def keep(result: dict) -> None:
        store(path, result, old)
        found = [*result["cells"], *result["left_out"]]
        (cell,) = [each for each in found if (name := " ".join(key(each))) not in told and not told.append(name)]
        line = _line(cell)
        results.append("cell", line)
        print(" ".join(f"{key} {value}" for key, value in line.items()), flush=True)

    run(chosen, cells, names, 0.02 if results.is_dry() else SECONDS, options, lambda *_: None, keep)


def _cells(chosen: Cuda, wanted: Sequence[tuple[str, str, str]]) -> list[Cell]:
    """The cells of these operators, workloads and dtypes; in a dry run of two operators that are among them."""
    every = select((), ("float32", "bfloat16"), (), False, chosen.workloads)
    if results.is_dry():
        return [cell for cell in every if cell.op.name in REDUCING[:2] and cell.dtype == "float32"][::3]
    known = {(cell.op.name, cell.workload.label, cell.dtype): cell for cell in every}
    return [known[key] for key in wanted if key in known]


def _line(cell: dict) -> dict[str, object]:
    """What the last table says of a cell."""
    if "left_out" in cell:
        return {"cell": " ".join(key(cell)), "left_out": cell["left_out"]}
    times = medians(cell["ways"][NEW])
    copy = cell["copied_bytes"] / cell["copy"]["median"]
    return {
        "cell": " ".join(key(cell)), "regime": cell["regime"],
        "us": 1e6 * times[OURS], "GB/s": cell["bytes"] / times[OURS] / 1e9,
        "share": cell["bytes"] / times[OURS] / copy, "given us": 1e6 * medians(cell["ways"]["given"])[OURS],
        "host us": 1e6 * cell["ways"][NEW]["times"][OURS]["host"], "error ulp": cell["error_ulp"],
        **{f"{name} us": 1e6 * value for name, value in times.items() if name not in (OURS, COPY)},
        "notes": cell["ways"][NEW]["notes"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
