"""The ``pagoda`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from .bench import app as bench
from .errors import INTERRUPTED, OUTPUT_FAILED, USER_ERROR, give_up_output, is_of_output
from .fleet import fleet
from .generate import generate
from .help_text import join_lines
from .npu import app as npu
from .plan import plan
from .quantize import quantize
from .reports import bisect, inspect
from .serve import serve

app = typer.Typer(
    name="pagoda",
    help=(
        "Serve unmodified HuggingFace causal LMs: compiled, with a paged KV cache, many prompts in a batch."
        "\n\n"
        "The model is traced, rewritten and checked against the original before it produces a token; it runs "
        "on an Ascend NPU where torch_npu finds one, else on the CPU."
    ),
    epilog="Start with:  pagoda generate examples/tiny-pydoc --prompt 'Return the'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagoda {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


app.command(
    epilog=(
        "Examples:\n"
        "pagoda generate ./my-model --prompt 'Once upon a time'\n"
        "pagoda generate ./my-model --prompts-file prompts.txt --json > out.jsonl"
    )
)(generate)
app.command(
    epilog=(
        "Examples:\n"
        "pagoda serve examples/tiny-pydoc\n"
        "pagoda serve ./my-model --host 0.0.0.0 --api-key team=SECRET --max-num-seqs 32"
    )
)(serve)
app.command(epilog="Example:  pagoda fleet ./my-model --replicas 2")(fleet)
app.command(epilog="Example:  pagoda inspect examples/tiny-pydoc --html report.html")(inspect)
app.command(epilog="Example:  pagoda bisect examples/tiny-pydoc --codegen none")(bisect)
app.command(epilog="Example:  pagoda plan examples/tiny-pydoc --memory 64MiB")(plan)
app.command(epilog="Example:\npagoda quantize ./my-model ./my-model-int4 --text sample.txt --group-size 64")(quantize)
app.add_typer(bench)
app.add_typer(npu)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; ``arguments`` default to the process's own. Always raises :class:`SystemExit`."""
    command = typer.main.get_command(app)
    join_lines(command)
    try:
        status = command.main(
            args=None if arguments is None else list(arguments), prog_name="pagoda", standalone_mode=False
        )
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("pagoda: interrupted", err=True)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, OSError) and is_of_output(error):
            give_up_output(error)
            raise SystemExit(OUTPUT_FAILED) from None
        # A wrong option is click's own exception, which knows its text; typer brings its own copy of click,
        # so it is told by what it can do and not by its class.
        if not hasattr(error, "format_message"):
            raise
        text = error.format_message()
        if text:  # without arguments there is none: the help has been printed
            typer.echo(f"pagoda: error: {text} (see pagoda --help)", err=True)
        raise SystemExit(USER_ERROR) from None
    raise SystemExit(status if isinstance(status, int) else 0)
