"""Names that a library does not document and opgrad looks for: processes that lack some of them."""

import ast
from pathlib import Path

from subprocesses import run_python

import opgrad

SOURCE = Path(opgrad.__file__).parent
# A child for each group of names, forked from one process that has imported what takes long.
FORKS = """
import os, sys, traceback
def fork_for(groups, child):
    for group in groups:
        pid = os.fork()
        if not pid:
            try:
                child(group)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"without {group}")
"""


def nodes(*files):
    """What stands in these files: the name below opgrad, and each node."""
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.relative_to(SOURCE).as_posix(), node


def looked_for(module):
    """The names that a module looks for."""
    found = [node for _, node in nodes(Path(module.__file__)) if isinstance(node, ast.Call)]
    return sorted(node.args[0].value for node in found if ast.unparse(node.func) == "_found")


def run_without(code, *names):
    run_python(FORKS + code, *map(" ".join, names))
