"""``pagoda npu``: the offline Ascend toolchain, for machines without an Ascend NPU."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import one_line_errors

app = typer.Typer(
    name="npu",
    help=(
        "Run the real torch_npu and torchair without an Ascend NPU."
        "\n\n"
        "They convert and check what is compiled for the NPU; they compute nothing there."
    ),
    no_args_is_help=True,
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command(epilog="Then:  pagoda npu python my_script.py")
def setup(debug: Debug = False) -> None:
    """Put torch_npu and stand-ins for the CANN libraries into the cache folder; nothing goes into the environment.

    Needs, the first time, a package index, a C compiler and binutils. The wheels are checked against pinned
    checksums. What is there already is kept. Exit status: 0, or 2 when the toolchain cannot be had here.
    """
    console = Console(highlight=False)
    start = time.perf_counter()
    steps: list[str] = []

    def show(step: str) -> None:
        steps.append(step)
        console.print(Text(f"{step} …"))

    with one_line_errors(debug):
        from ..compiler.targets.npu.offline.toolchain import set_up_toolchain
        from ..compiler.targets.npu.offline.wheels import TRIED

        toolchain = set_up_toolchain(show)
        manifest = toolchain.manifest()
    rows = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for requirement in toolchain.requirements:
        rows.add_row(requirement.name, Text(requirement.version))
    rows.add_row("for", Text(f"torch {manifest['torch']}, Python {manifest['python']}"))
    if not toolchain.tried:
        release, machine = TRIED
        rows.add_row(
            "not tried", Text(f"the tests convert with torch {release} on {machine}: run pytest -m torchair")
        )
    rows.add_row("stand-ins", Text(f"{len(manifest['stand_ins'])} libraries, {manifest['symbols']} symbols"))
    console.print(rows)
    console.print(f"ready in {time.perf_counter() - start:.1f} s" if steps else "was there already")
    typer.echo(toolchain.folder)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    epilog="Example:  pagoda npu python -c 'import torch, torch_npu, torchair'",
)
def python(context: typer.Context) -> None:
    """Start Python with the toolchain; all ARGS are Python's, and its exit status is passed on."""
    with one_line_errors(debug=False):
        from ..compiler.targets.npu.offline.run import run_python

        status = run_python(context.args)
    raise typer.Exit(status)
