"""The files that hosts and registries read, the lowest versions, and tests in several processes."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import opgrad

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DEFINED = re.compile(r"^([a-z][\w-]*)\s*:(?!=)", re.M)


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_workflows_call_targets_that_exist():
    targets = set(DEFINED.findall(read("Makefile")))
    for path in WORKFLOWS:
        runs = re.findall(r"^\s*- run: (.*\bmake .*)$", path.read_text(encoding="utf-8"), re.M)
        assert runs, path.name
        for line in runs:
            words = line.partition(" make " if " make " in line else "make ")[2].split()
            (target,) = [word for word in re.sub(r'"[^"]*"', "", " ".join(words)).split() if "=" not in word]
            assert target in targets, (path.name, line)


def test_workflows_take_actions_by_their_commit():
    for path in WORKFLOWS:
        for action in re.findall(r"uses: (.*)$", path.read_text(encoding="utf-8"), re.M):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), (path.name, action)


def test_make_help_names_every_target():
    text = read("Makefile")
    phony = set(re.search(r"\.PHONY: ((?:.*\\\n)*.*)", text)[1].replace("\\\n", " ").split())
    assert phony == set(DEFINED.findall(text)) - {"examples"}
    said = re.findall(r"(?<![\w-])[a-z]+(?:-\w+)*", "".join(re.findall(r'^\t@echo "(.*)"', text, re.M)))
    assert phony - {"help", *said} == set()


def test_the_version_is_one():
    (version,) = re.findall(r'^version = "(.*)"$', read("pyproject.toml"), re.M)
    assert version == opgrad.__version__
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert re.search(rf"^## {re.escape(version)}\b", read("CHANGELOG.md"), re.M)
    assert f"dist/opgrad-{version}-py3-none-any.whl" in read("docs/start/install.md")


def test_one_place_says_where_opgrad_comes_from():
    """A release changes docs/start/install.md; everything else leads there."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")]
    documents += [path for path in ROOT.glob("examples/**/*.md") if "node_modules" not in path.parts]
    named = {
        path.relative_to(ROOT).as_posix(): re.findall(r"pip install [^`\n]*opgrad", path.read_text(encoding="utf-8"))
        for path in documents
    }
    assert [name for name, found in named.items() if found] == ["docs/start/install.md"]


def test_every_dependency_has_a_floor_and_a_constraint():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    every = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    outside = [each for each in every if not each.startswith("opgrad[")]
    command = [sys.executable, ROOT / "tools" / "minimum.py"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", line) for line in printed)
    assert [line.partition("==")[0] for line in printed] == [re.match(r"[\w.-]+", each)[0] for each in outside]


pytest_plugins = ["pytester"]
MAKEFILE = Path(__file__).parents[1] / "Makefile"
OPTIONS = re.compile(r"^PARALLEL := ((?:.*\\\n)*.*)", re.MULTILINE)
ENDINGS = {
    "dies": "os.abort()",
    "waits": pytest.param("time.sleep(600)", marks=pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 8")),
}


@pytest.mark.any_cpu
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_process_that_does_not_end_its_test(pytester, ending):
    options = OPTIONS.search(MAKEFILE.read_text(encoding="utf-8"))[1].replace("\\\n", "")
    assert "faulthandler_timeout=900" in options
    pytester.makepyfile(
        test_first="def test_passes(): pass\ndef test_passes_too(): pass",
        test_second=f"import os, time\ndef test_ends(): {ending}\ndef test_after(): pass",
    )
    options = options.replace("=900", "=3").replace("--numprocesses auto", "--numprocesses 1").split()
    done = pytester.runpytest_subprocess(*options, "--dist", "loadfile", timeout=600)
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["worker 'gw0' crashed while running 'test_second.py::test_ends'"])
    assert "test_second.py" in done.stderr.str(), "the traceback"
