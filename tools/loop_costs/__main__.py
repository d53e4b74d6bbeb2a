"""What the innermost loops of the headline kernels cost on processors that need not be here.

    python tools/loop_costs [--sets NAME,…] [--ops NAME,…] [--out FILE]

The table in the documentation is made of bench/loops.json: `--out bench/loops.json`, then `make tables`.

For each loop of each kernel: its instructions, how many of them load from the stack, and the cycles of one iteration as
llvm-mca simulates them on each processor. Beside these the same formulas in C (`formulas.c`), compiled with
-O3. Needs llvm-mca and clang of LLVM 19 or newer, Debian's packages llvm-19 and clang-19; without clang there is no C.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assembly import Loop, innermost_loops

HERE = Path(__file__).parent
ITERATIONS = 100
X86, ARM64 = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


@dataclass(frozen=True)
class InstructionSet:
    """What a set is compiled for, and the processors on which its loops are simulated."""

    triple: str
    cpu: str
    features: str
    processors: tuple[str, ...]


SETS = {
    "avx2": InstructionSet(X86, "haswell", "+avx,+avx2,+fma,+f16c,+bmi,+bmi2", ("haswell", "alderlake", "znver3")),
    "avx512": InstructionSet(
        X86,
        "skylake-avx512",
        "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl",
        ("znver4", "znver5", "sapphirerapids"),
    ),
    "arm64": InstructionSet(ARM64, "neoverse-n1", "+neon,+fp-armv8,+fullfp16", ("neoverse-n1", "neoverse-v2")),
}


def newest(program: str) -> str | None:
    """The path of the program's newest version that is installed, such as llvm-mca-19."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = {
        int(path.name.rsplit("-", 1)[1]): str(path)
        for folder in folders
        for path in Path(folder).glob(f"{program}-[0-9]*")
    }
    return found[max(found)] if found else shutil.which(program)


def kernels(chosen: InstructionSet, operators: list[str]) -> dict[str, str]:
    """The assembly of our kernels by label."""
    architecture = chosen.triple.partition("-")[0]
    command = [sys.executable, str(HERE / "compiled.py"), architecture, chosen.cpu, chosen.features, *operators]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def formulas(chosen: InstructionSet) -> dict[str, str]:
    """The assembly of the functions in C by name; nothing without clang."""
    clang = newest("clang")
    if clang is None:
        return {}
    processor = f"-m{'arch' if chosen.triple == X86 else 'cpu'}={chosen.cpu}"
    options = ["-O3", "-ffast-math", "-ffreestanding", "-fno-asynchronous-unwind-tables", "-S", "-o", "-"]
    command = [clang, f"--target={chosen.triple}", processor, *options, str(HERE / "formulas.c")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = re.findall(r"^(\w+):", text, re.MULTILINE)
    return dict(zip(names, re.split(r"^\w+:", text, flags=re.MULTILINE)[1:], strict=True))


def cycles(loop: Loop, chosen: InstructionSet, processor: str) -> float | None:
    """The cycles of an iteration as llvm-mca simulates them; None for a processor that it does not know."""
    command = [newest("llvm-mca") or "llvm-mca", f"-mtriple={chosen.triple}", f"-mcpu={processor}"]
    command += [f"-iterations={ITERATIONS}", "-json", "-instruction-info=false", "-resource-pressure=false", "-"]
    run = subprocess.run(command, input="\n".join(loop.lines) + "\n", capture_output=True, text=True)
    if run.returncode or "not a recognized processor" in run.stderr:
        return None
    return json.loads(run.stdout)["CodeRegions"][0]["SummaryView"]["TotalCycles"] / ITERATIONS


def measured(text: str, chosen: InstructionSet) -> list[dict[str, Any]]:
    """What each innermost loop of a function costs."""
    return [
        {
            "instructions": len(loop.lines),
            "stack_loads": loop.stack_loads,
            "stored_bytes": loop.stored_bytes,
            "masked": loop.is_masked,
            "cycles": {processor: cycles(loop, chosen, processor) for processor in chosen.processors},
        }
        for loop in innermost_loops(text)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS), help="of " + ", ".join(SETS))
    parser.add_argument("--ops", default="", help="operators; all of the headline without it")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    result = {}
    for name in options.sets.split(","):
        texts = {**kernels(SETS[name], [each for each in options.ops.split(",") if each]), **formulas(SETS[name])}
        result[name] = {label: measured(text, SETS[name]) for label, text in texts.items()}
        show(name, result[name])
    if options.out:
        lines = [f"{json.dumps(name)}: {{\n{_by_line(costs)}\n}}" for name, costs in result.items()]
        options.out.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def _by_line(costs: dict[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(label)}: {json.dumps(loops)}" for label, loops in costs.items())


def show(name: str, costs: dict[str, list[dict[str, Any]]]) -> None:
    processors = SETS[name].processors
    print(f"\n{name}: instructions, loads from the stack, cycles an iteration on {', '.join(processors)}")
    for label, loops in costs.items():
        print(label)
        for loop in loops:
            simulated = "".join(
                "     ?" if loop["cycles"][each] is None else f"{loop['cycles'][each]:6.1f}" for each in processors
            )
            print(
                f"  {loop['instructions']:4} {loop['stack_loads']:3} {simulated}  {'masked' if loop['masked'] else ''}"
            )


if __name__ == "__main__":
    main()
