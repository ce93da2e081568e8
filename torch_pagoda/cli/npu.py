"""``pagoda npu``: checks of an installation for an Ascend NPU, and the offline toolchain for machines without one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import one_line_errors
from .selftest import selftest

app = typer.Typer(
    name="npu",
    help=(
        "Check an installation for an Ascend NPU, or run the real torch_npu and torchair without one."
        "\n\n"
        "The latter convert and check what is compiled for the NPU; they compute nothing there."
    ),
    no_args_is_help=True,
)

_STYLES = {"ok": "green", "problem": "red", "not known": "yellow"}

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
        from ..npu_tools.offline.toolchain import set_up_toolchain
        from ..npu_tools.offline.wheels import TRIED

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


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Say what is wrong with the installation for an Ascend NPU, and what to do.

    Looks at versions of torch, torch_npu, CANN and the driver, the environment, devices, memory and the container.
    Exit status: 0, or 1 when something stops serving.
    """
    from ..npu_tools.doctor import System, examine

    findings = examine(System())
    stops = any(finding.stops for finding in findings)
    if as_json:
        typer.echo(json.dumps({"serves": not stops, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        rows = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for finding in findings:
            text = Text(finding.text)
            if finding.remedy:
                text.append(f"\n→ {finding.remedy}", style="bold")
            rows.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.check), text)
        console = Console(highlight=False)
        console.print(rows)
        console.print("something stops serving on an NPU" if stops else "nothing was found that stops serving")
    raise typer.Exit(1 if stops else 0)


app.command(epilog="Example:  pagoda npu selftest MODEL --out report")(selftest)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    epilog="Example:  pagoda npu python -c 'import torch, torch_npu, torchair'",
)
def python(context: typer.Context) -> None:
    """Start Python with the toolchain; all ARGS are Python's, and its exit status is passed on."""
    with one_line_errors(debug=False):
        from ..npu_tools.offline.run import run_python

        status = run_python(context.args)
    raise typer.Exit(status)
