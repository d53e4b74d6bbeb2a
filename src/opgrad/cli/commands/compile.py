"""The command `opgrad compile`."""

from pathlib import Path
from typing import Annotated

import typer

from opgrad.base.terminal import folders_argument


def compile_kernels(
    folders: Annotated[
        list[Path] | None, folders_argument("Artifact sets: the kernels of their graphs and optimizers.")
    ] = None,
    model: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="A set, as DIR; default: none.")] = None,
    ops: Annotated[
        str, typer.Option(metavar="NAME,…", help="The operators; default: all, or with DIR those of the graphs.")
    ] = "",
    dtypes: Annotated[
        str, typer.Option(metavar="NAME,…", help="Dtypes of operators; default: float32,float64,float16,bfloat16.")
    ] = "",
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="How many processes compile; default: one for each CPU.")
    ] = None,
    processors: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="NAME,…",
            help="Make a pack for x86-64-v2, x86-64-v3, x86-64-v4, x86-64-v4-bf16, aarch64; sm_80, sm_90, sm_100: "
            "for CUDA devices; default: no pack.",
        ),
    ] = "",
    program: Annotated[
        str,
        typer.Option("--run", metavar="'PROGRAM.py ARG…'", help="Program of a pack; default: none."),
    ] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the pack; default: none.")
    ] = None,
) -> None:
    """Compile kernels into the cache, so that no later process has to.

    Without arguments the kernels that plain calls of all operators take;
    with DIR those that training and evaluation of artifact sets take. Meant
    for images of containers, which then start warm: docs/guides/cache.md. Kernels
    fit the kind of CPU that they are compiled on.

    With --for they go into one file for other machines, which need no
    compiler then: docs/guides/packs.md.

    Example: opgrad compile examples/digits
    Example: opgrad compile --for x86-64-v3,aarch64 examples/digits -o kernels.pack
    """
    from opgrad.cli.compile import compile_all

    compile_all([*(folders or []), *(model or [])], ops, dtypes, jobs, processors, program, output)
