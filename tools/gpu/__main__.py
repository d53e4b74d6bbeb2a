"""What only a device can show, in one command of at most eight minutes: `make gpu`, or

    python tools/gpu [--out FOLDER] [--dry] [--seconds N] [--steps NAME,…]

Nothing is installed and nothing is fetched: opgrad is taken from this checkout; torch, Triton, pytest and pytest-xdist
are needed, Numba by the figures. A step has a deadline, and its end, however it comes, is followed by the next one.
What is seen is a line of JSON in FOLDER/gpu.jsonl at once, what is printed goes to FOLDER/log, the benchmark's result
to FOLDER/bench.json; a table of at most 60 lines comes last. Exits with 1 if something is wrong.

--dry: the same steps without a device: kernels are executed from their PTX, small arrays are timed on the CPU.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import results

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(__file__).resolve().parent
PATHS = (ROOT / "src", ROOT, OWN, ROOT / "tests" / "support")
SECONDS = 480
GRACE = 5  # seconds between the request to stop and the end of a step
PYTEST = (
    "-m", "pytest", "-q", "-W", "default", "-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "recorder",
    "--continue-on-collection-errors",
)  # fmt: skip
CUDA = (
    "tests/cuda/test_regimes.py", "tests/cuda/test_grid.py", "tests/cuda/test_elements.py", "tests/cuda/test_gather.py",
    "tests/cuda/test_sample_losses.py", "tests/cuda/test_vocab_parallel.py", "tests/cuda/test_primitive.py",
)  # fmt: skip
AROUND = (
    "tests/cuda/test_gpu.py", "tests/torch/test_functions.py", "tests/libraries/test_cupy.py",
    "tests/libraries/test_jax.py",
)  # fmt: skip
# Without what a device does not refuse, and a buffer that is not where the caller has it.
RUNTIME = ("tests/onnxruntime/test_softmax.py", "-k", "not 77 and not callers_buffer")
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "3")
PROCESSES = "OPGRAD_GATE_PROCESSES"
SHARE = {"OPGRAD_GATE": "share", PROCESSES: "3"}
FROM_PTX = {"OPGRAD_PTX": "90"}


@dataclass(frozen=True)
class Step:
    """words: behind the interpreter. dry: instead of them in a dry run, with other variables."""

    name: str
    seconds: int
    words: Sequence[str]
    dry: Sequence[str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    dry_variables: Mapping[str, str] = field(default_factory=dict)
    vital: bool = False  # whether nothing else is worth its time when it fails
    asked: bool = False  # whether it runs only where --steps names it


def tests(*words: str) -> Sequence[str]:
    """Tests on all cores."""
    return (*PYTEST, "-n", str(os.cpu_count()), "--dist", "worksteal", *words)


def script(name: str, *words: str) -> Sequence[str]:
    return (str(OWN / name), *words)


STEPS = (
    Step("facts", 20, script("facts.py")),
    Step("smoke", 30, script("smoke.py"), dry_variables=FROM_PTX, vital=True),
    Step(
        "compile", 60, tests("tests/cuda/test_compile.py", "-k", "every_kind_compiles"), variables=SHARE,
        dry_variables={PROCESSES: "1"},
    ),
    Step(
        "correctness", 130, tests(*CUDA), tests("tests/cuda/test_gather.py"), variables=SHARE,
        dry_variables=FROM_PTX | {"OPGRAD_SHARE": "6"},
    ),
    # Graphs, streams, more than 2^31 elements; PyTorch's autograd, CuPy, JAX.
    Step("around", 90, tests(*AROUND, "-m", "gpu"), tests(AROUND[0]), variables=SHARE, dry_variables=FROM_PTX),
    Step("ceilings", 25, script("ceilings.py")),
    Step("figures", 130, script("figures.py")),
    Step("torch.compile", 65, script("figures.py", "--compile")),
    Step("regimes", 120, script("regimes.py")),
    # Every operator in a session of onnxruntime-gpu, which has to be there.
    Step(
        "onnxruntime", 120, tests(*RUNTIME, "-p", "cuda_sessions"),
        tests(*RUNTIME[:-1], f"float32 and float64 and {RUNTIME[-1]}", "-p", "device_sessions"),
        dry_variables=FROM_PTX, asked=True,
    ),
    Step("training", 60, script("training.py"), asked=True),
    Step("sanitizer", 40, (*SANITIZER, sys.executable, str(OWN / "smoke.py")), ()),
    Step("every case", 480, tests(*CUDA), (), variables={"OPGRAD_GATE": "full"}),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="The folder of what is found.")
    parser.add_argument("--dry", action="store_true", help="Run the steps without a device.")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="The limit of all steps together.")
    parser.add_argument("--steps", default="", help="The names of steps to run; default: all.")
    options = parser.parse_args()
    wanted = [name for name in options.steps.split(",") if name]
    if unknown := set(wanted) - {step.name for step in STEPS}:
        parser.error(f"--steps: {unknown.pop()!r}, expected some of {', '.join(step.name for step in STEPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= _surroundings(options.out.resolve(), options.dry)
    end = time.monotonic() + options.seconds
    (options.out / results.LINES).unlink(missing_ok=True)
    with (options.out / "log").open("wb") as log:
        for step in STEPS:
            words = step.words if step.dry is None or not options.dry else step.dry
            if step.name not in (wanted or [each.name for each in STEPS if not each.asked]) or not words:
                continue
            left = end - time.monotonic() - GRACE
            if left < GRACE:
                results.append("step", {"step": step.name, "end": "not begun", "seconds": 0.0})
                continue
            if _run(step, words, min(step.seconds, left), options.dry, log) not in ("0", "at its limit") and step.vital:
                break
    return last_words(options.out / results.LINES)


def _surroundings(out: Path, dry: bool) -> dict[str, str]:
    """What all steps have in common. A folder of its own for Triton's kernels: others' would not be compiled here."""
    return {
        results.VARIABLE: str(out),
        results.DRY: str(int(dry)),
        "PYTHONPATH": os.pathsep.join(filter(None, (*map(str, PATHS), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir(), "opgrad-gpu-triton"))),
        "TRITON_INTERPRET": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _run(step: Step, words: Sequence[str], seconds: float, dry: bool, log) -> str:
    """How a step ended: its exit status, or that it was stopped at its limit."""
    begin = time.monotonic()
    command = words if words[0] == SANITIZER[0] else [sys.executable, *words]
    variables = {**os.environ, **step.variables, **(step.dry_variables if dry else {})}
    log.write(f"\n=== {step.name}: {' '.join(command)}\n".encode())
    log.flush()
    print(f"{step.name} …", flush=True)
    try:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=ROOT, start_new_session=True
        )
    except OSError as error:
        results.append("step", {"step": step.name, "end": str(error), "seconds": 0.0})
        return str(error)
    try:
        end = str(process.wait(seconds))
    except subprocess.TimeoutExpired:
        end = "at its limit"
        for number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(GRACE)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        with contextlib.suppress(ProcessLookupError):  # what the step has started goes with it
            os.killpg(process.pid, signal.SIGKILL)
    results.append("step", {"step": step.name, "end": end, "seconds": round(time.monotonic() - begin, 1)})
    return end


# --- the table -------------------------------------------------------------------------------------------------------

FAILURES = 14  # lines
CELLS = 34
COLUMNS = (
    "us",
    "GB/s",
    "share",
    "given us",
    "torch us",
    "torch.compile us",
    "liger us",
    "host us",
    "error ulp",
)


# Shares of the memory's published rate: the anchors, beside the copy.
PUBLISHED = (
    "published for an H100 (3350 GB/s), softmax in bfloat16: QuACK 79 % at 1024, 86 at 4096, 89 at 32768, 90 at 131072"
)


def last_words(path: Path) -> int:
    """Print what was found; whether something is wrong."""
    found = list(results.lines(path))
    steps = [line for line in found if line["what"] == "step"]
    every = [line for line in found if line["what"] == "test"]
    failed = [line for line in every if line["outcome"] == "failed"]
    smoke = [line for line in found if line["what"] == "smoke" and line["said"]]
    skipped: dict[str, int] = {}
    for line in every:
        if line["outcome"] == "skipped":
            skipped[line["said"]] = skipped.get(line["said"], 0) + 1
    print("\nsteps: " + ", ".join(f"{line['step']} {line['end']} ({line['seconds']} s)" for line in steps))
    passed = sum(line["outcome"] == "passed" for line in every)
    print(f"tests: {passed} passed, {len(failed)} failed; not shown: {sum(skipped.values())}")
    for reason, count in sorted(skipped.items(), key=lambda each: -each[1])[:4]:
        print(f"  {count} skipped: {reason[:120]}")
    for line in smoke:
        print(f"WRONG {line['call']} {line['dtype']}: {line['said'].splitlines()[0][:150]}")
    for line in failed[:FAILURES]:
        print(f"FAILED {line['test']}: {_reason(line['said'])}")
    if len(failed) > FAILURES:
        print(f"… and {len(failed) - FAILURES} more: see {path}")
    print(
        "; ".join(f"{line['name']} {line['value']:.4g} {line['unit']}" for line in found if line["what"] == "ceiling")
    )
    cells = list({line["cell"]: line for line in found if line["what"] == "cell"}.values())
    if cells:
        print(f"{PUBLISHED}\n{' | '.join(('cell', 'regime', *COLUMNS))}")
    for line in cells[:CELLS]:
        if "left_out" in line:
            print(f"{line['cell']} | left out: {line['left_out'][:120]}")
        else:
            print(" | ".join((line["cell"], line["regime"], *(_number(line.get(column)) for column in COLUMNS))))
    ends = [line for line in steps if line["end"] not in ("0", "at its limit", "not begun")]
    return int(bool(failed or smoke or ends or any("left_out" in cell for cell in cells)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _reason(said: str) -> str:
    """The line of a failure's report that says what is wrong."""
    lines = [line[1:].strip() for line in said.splitlines() if line.startswith("E ")]
    return (lines or said.strip().splitlines()[-1:] or ["no report"])[0][:150]


if __name__ == "__main__":
    sys.exit(main())
