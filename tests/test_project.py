"""The files that hosts and registries read agree with the Makefile and with each other."""

import re
from pathlib import Path

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
