"""`python -m bench --isa`: a process held to an instruction set, and what is said of results of several."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import report
from bench_command import run_bench
from bench_results import made_up_result
from benchmark_tables import short_table

from bench import instruction_sets
from bench.command import BenchOptions
from bench.figures import machine_line, read

TINY = ["--ops", "relu", "--dtypes", "float32", "--shapes", "8x9", "--seconds", "0"]


@pytest.fixture
def of_width(monkeypatch):
    """As on a processor with vectors of so many bytes."""
    return lambda width: monkeypatch.setattr(instruction_sets, "vector_bytes", lambda: width)


def result_of(width, ratios, name="avx2", **more):
    made = made_up_result(ratios)
    made["machine"] |= {"vector_bits": width, "instruction_set": name, **more}
    return made


def test_what_a_processor_lacks_is_refused_in_a_sentence(of_width):
    of_width(32)
    done = run_bench("--isa", "avx512")
    expected = "bench: isa is 'avx512', but this processor has no AVX-512"
    assert (done.exit_code, done.output) == (1, expected)
    of_width(16)
    for name in instruction_sets.TITLES:
        with pytest.raises(ValueError, match=f"isa is '{name}', but this processor has no AVX"):
            instruction_sets.hold(name, "bench")
    with pytest.raises(ValueError, match=r"isa is 'sse', expected of avx2, avx512$"):
        instruction_sets.hold("sse", "bench")
    with pytest.raises(ValueError, match=r"isa is of processors, but the device is 'cuda'$"):
        BenchOptions(isa="avx2", device="cuda").check()


def test_a_process_begins_anew_with_what_was_asked_for(of_width, monkeypatch):
    begun = []
    monkeypatch.setattr(instruction_sets.os, "execve", lambda *given: begun.append(given))
    of_width(64)
    for name in ("", "avx512"):
        instruction_sets.hold(name, "bench")
    assert not begun
    monkeypatch.setattr(sys, "argv", ["bench", "--isa", "avx2", "--ops", "relu"])
    instruction_sets.hold("avx2", "bench")
    ((program, command, environment),) = begun
    assert program == sys.executable
    assert command == [sys.executable, "-m", "bench", "--isa", "avx2", "--ops", "relu"]
    assert {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}.items() <= environment.items()
    assert environment["NUMBA_CPU_NAME"] == "haswell"
    assert environment["TORCHINDUCTOR_CACHE_DIR"].endswith("-torch-avx2")
    assert environment[instruction_sets.PROCESSOR] == "avx512"
    of_width(32)
    instruction_sets.hold("avx2", "bench")
    assert len(begun) == 1


def test_make_holds_kernels_down_in_the_same_way():
    """`make test-avx2` tests the kernels that `--isa avx2` measures."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    words = [f"{name}={value}" for name, value in instruction_sets.HELD.items() if name.startswith("NUMBA")]
    assert f"HELD_DOWN := {' '.join(words)}\n" in makefile


def test_a_result_names_its_set(monkeypatch):
    assert [instruction_sets.of({"vector_bits": bits}) for bits in (512, 256, 128)] == ["avx512", "avx2", "128 bits"]
    monkeypatch.delenv(instruction_sets.PROCESSOR, raising=False)
    assert instruction_sets.describe({"vector_bits": 512})["instruction_set"] == "avx512"
    monkeypatch.setenv(instruction_sets.PROCESSOR, "avx512")
    machine = instruction_sets.describe({"vector_bits": 256})
    assert machine == {"vector_bits": 256, "instruction_set": "avx2", "processor_has": "avx512"}
    legend = "Held to AVX2 on a processor with AVX-512, but for onnxruntime and SciPy, which use all it has."
    assert machine_line(result_of(256, [], processor_has="avx512")).endswith(legend)
    assert "Held" not in machine_line(result_of(512, [], "avx512"))


@pytest.mark.skipif(instruction_sets.vector_bytes() < 32, reason="no AVX2 here")
def test_a_process_held_to_avx2_measures(tmp_path):
    """The file and everybody who can be told are of AVX2."""
    path = tmp_path / "held.json"
    command = [sys.executable, "-m", "bench", *TINY, "--peers", "numpy", "--isa", "avx2", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    machine = read(path)["machine"]
    assert (machine["instruction_set"], machine["vector_bits"]) == ("avx2", 256)
    assert ("processor_has" in machine) == (instruction_sets.vector_bytes() == 64)


def test_tables_set_them_side_by_side():
    results = [result_of(256, [2.0, 0.5]), result_of(512, [4.0, 3.0], "avx512")]
    short = short_table(results, [("softmax", "0x7"), ("relu", "9")])
    assert "| AVX2: memory that is given | AVX2: new memory | AVX-512: memory that is given |" in short
    assert "| `softmax` 0x7 | 2 ms, no peer | 1 ms, 2.00x torch | 2 ms, no peer | 1 ms, 4.00x torch |" in short


def test_documents_have_one_set_or_both(tmp_path):
    folder = tmp_path / report.RESULTS
    folder.mkdir(parents=True)
    made = result_of(512, [4.0], "avx512")
    (folder / "wide.json").write_text(json.dumps(made))
    assert "| AVX-512 | no peer | **4.0 times**, slower in none | 2 |" in report.speed(tmp_path, tmp_path)
    assert report.CAUSE in report.speed(tmp_path, tmp_path)
    (folder / "wide-avx2.json").write_text(json.dumps(result_of(256, [2.0], processor_has="avx512")))
    first, second = report.speed(tmp_path, tmp_path).splitlines()[2:4]
    assert first.startswith("| AVX2 | no peer | **2.0 times**")
    assert second.startswith("| AVX-512 | no peer | **4.0 times**")
    text = report.benchmark(tmp_path, tmp_path)
    assert text.index("### AVX2\n\nOver 2 cells, 2.00 times") < text.index("### AVX-512\n\nOver 2 cells, 4.00 times")
    assert "Held to AVX2" in text
