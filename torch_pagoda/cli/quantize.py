"""``pagoda quantize``: calibrates a checkpoint so that 4-bit weights lose little."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .errors import one_line_errors

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from ..compiler.calibrate.grid import GridWeight


def quantize(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or hub id.", metavar="MODEL")],
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.", metavar="OUT")],
    text: Annotated[
        list[Path],
        typer.Option(help="UTF-8 text of the kind that the model will see; repeatable.", metavar="FILE"),
    ],
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale, a multiple of 64; 0: all.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to use at most, spread over all of it.")] = 65536,
    window: Annotated[int, typer.Option(help="Tokens that are computed as one sequence.")] = 512,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="compressed-tensors: write packed numbers and scales, as vLLM reads them, instead of floats.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the computation and of what is written: auto, float32, bfloat16 or float16.")
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every matrix, to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Calibrate a model for 4 bits on sample text, and write it as an ordinary checkpoint.

    Its numbers lie on a 4-bit grid already: --quantization int4 (or int4-weight-only) reads the group size from its
    config.json and finds the very same integers again, and transformers loads it as any other. The head is not
    rounded here; int4 keeps 8 bits of it.

    With --format compressed-tensors it is written as a quantized checkpoint instead (pack-quantized, W4A16), which
    vLLM, transformers and LLM serve as it is.

    Takes memory for the float model and the hidden states of the text, and runs the text through each decoder layer
    twice for each group of matrices that read the same, and three times more.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")
    with one_line_errors(debug):
        texts = [_read(path) for path in text]
        _check_sizes(tokens, window)
        if form not in (None, "compressed-tensors"):
            raise ValueError(f"--format {form!r} is not supported; use compressed-tensors, or leave it out")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"OUT={str(out)!r} is not an empty folder; use a new one")
        from transformers.utils import logging as transformers_logging

        from ..checkpoint.compressed_writer import check_writable, write_compressed
        from ..checkpoint.configs import load_config, load_tokenizer
        from ..checkpoint.loading import load_model
        from ..checkpoint.quantized import check_float
        from ..compiler.calibrate import calibrate
        from ..device import resolve_device
        from ..runtime.ops.linear.quantized_weight import check_group_size

        check_group_size(group_size)
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        name, config = load_config(model, trust_remote_code)
        check_float(config, name, "what is rounded")
        tokenizer = load_tokenizer(model, trust_remote_code, required=True)
        assert tokenizer is not None
        windows = _windows(tokenizer, texts, tokens, window)
        module = load_model(model, dtype, trust_remote_code, resolve_device("cpu"))
        if form is not None:
            check_writable(module, group_size)
        weights: dict[str, GridWeight] = {}
        columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("layers", total=None)
            found = calibrate(
                module,
                windows,
                group_size,
                on_layer=lambda done, total: bar.update(task, completed=done, total=total),
                on_matrix=None if form is None else weights.__setitem__,
            )
        if form is None:
            module.save_pretrained(out)
        else:
            write_compressed(module, out, weights)
        tokenizer.save_pretrained(out)
    error, nearest = (sum(getattr(m, name) for m in found) / len(found) for name in ("error", "nearest_error"))
    typer.echo(
        f"{len(found)} matrices on {windows.numel()} tokens: outputs change by {error:.2%} of their square, "
        f"rounded to nearest by {nearest:.2%}",
        err=True,
    )
    loaded = "load it with --quantization int4" if form is None else "load it as it is"
    typer.echo(f"written: {out}; {loaded}", err=True)


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"--text {path} is empty; use text like the model's inputs")
    return text


def _check_sizes(tokens: int, window: int) -> None:
    if window < 2:
        raise ValueError(f"--window {window} is too short; use at least 2")
    if tokens < window:
        raise ValueError(f"--tokens {tokens} is below --window {window}; raise it")


def _windows(tokenizer: PreTrainedTokenizerBase, texts: list[str], tokens: int, window: int) -> torch.Tensor:
    """``[N, window]`` token ids: windows of the texts, evenly spaced if there are too many."""
    import torch

    ids = [token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]]
    count = len(ids) // window
    if not count:
        raise ValueError(f"--text has {len(ids)} tokens, fewer than --window {window}; add text")
    every = torch.tensor(ids[: count * window]).view(count, window)
    wanted = min(count, tokens // window)
    return every[torch.linspace(0, count - 1, wanted).round().long()]
