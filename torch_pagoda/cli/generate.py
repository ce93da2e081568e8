"""``pagoda generate``."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .errors import REQUEST_FAILED, one_line_errors

if TYPE_CHECKING:
    from ..runtime.outputs import Progress as EngineProgress
    from ..runtime.outputs import RequestOutput


def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or hub id.", metavar="MODEL")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="A prompt; give it several times for several prompts."),
    ] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts-file", "-f", help="UTF-8 text, one prompt per line, blank lines skipped; '-': stdin."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt at most.", rich_help_panel="Sampling")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", rich_help_panel="Sampling")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="0: off.", rich_help_panel="Sampling")] = 0,
    top_p: Annotated[float, typer.Option(help="1: off.", rich_help_panel="Sampling")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0: off.", rich_help_panel="Sampling")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: off.", rich_help_panel="Sampling")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel="Sampling")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Completions per prompt.", rich_help_panel="Sampling")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.", rich_help_panel="Sampling")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end token.", rich_help_panel="Sampling")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub id; by default the model's.", rich_help_panel="Engine")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel="Engine")
    ] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or npu.", rich_help_panel="Engine")] = "auto",
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per KV-cache block.", rich_help_panel="Engine")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks in the KV cache.", rich_help_panel="Engine")] = None,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="The same as memory, e.g. 4GiB.", rich_help_panel="Engine")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Sequences at the same time.", rich_help_panel="Engine")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens per step.", rich_help_panel="Engine")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens per sequence, prompt included.", rich_help_panel="Engine")
    ] = None,
    verify: Annotated[str, typer.Option(help="model, every-pass or off.", rich_help_panel="Compiler")] = "model",
    codegen: Annotated[
        str, typer.Option(help="auto, none, inductor, ge or aclgraph.", rich_help_panel="Compiler")
    ] = "auto",
    skip_pass: Annotated[
        list[str] | None, typer.Option(help="Leave this pass out; repeatable.", rich_help_panel="Compiler")
    ] = None,
    only_pass: Annotated[
        list[str] | None, typer.Option(help="Run only this pass; repeatable.", rich_help_panel="Compiler")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object per prompt and line, token ids and times included."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done, to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Continue one prompt or many, all in one continuous batch.

    Text goes to stdout; a progress bar (on a terminal only), the summary and errors go to stderr. Exit
    status: 0, 1 if a prompt failed while it ran, 2 for a mistake in the arguments.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")
    engine_options = {
        "tokenizer": tokenizer,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "kv_cache_memory": kv_cache_memory,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "verify": verify,
        "codegen": codegen,
        "passes": pass_selection(skip_pass, only_pass),
    }
    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "n": n,
        "stop": list(stop) if stop else None,
        "ignore_eos": ignore_eos,
    }
    with one_line_errors(debug):
        prompts = _read_prompts(prompt, prompts_file)
        # Imported here, so that --help and --version answer at once.
        from transformers.utils import logging as transformers_logging

        from ..llm import LLM
        from ..runtime.sampling_params import SamplingParams

        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        given: dict[str, Any] = {name: value for name, value in engine_options.items() if value is not None}
        llm = LLM(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code, **given)
        begin = time.perf_counter()
        with _progress_bar(len(prompts)) as advance:
            outputs = llm.generate(prompts, params, on_progress=advance)
        seconds = time.perf_counter() - begin
    _print_outputs(outputs, as_json)
    _print_summary(outputs, seconds)
    if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
        raise typer.Exit(REQUEST_FAILED)


def pass_selection(skip: list[str] | None, only: list[str] | None) -> dict[str, list[str]] | None:
    """The option ``passes`` from what ``--skip-pass`` and ``--only-pass`` were given."""
    selection = {name: list(passes) for name, passes in (("skip", skip), ("only", only)) if passes}
    return selection or None


def _read_prompts(prompts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The prompts of both options, in that order.

    Raises:
        ValueError: none at all, or a file that is not UTF-8 text.
    """
    found = list(prompts or [])
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompts-file {file} is not UTF-8 text: {error}") from error
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"--prompts-file {file} holds no prompt; write one per line")
        found += lines
    if not found:
        raise ValueError("no prompt given; use --prompt TEXT or --prompts-file FILE")
    return found


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[EngineProgress], None] | None]:
    """A callback for ``LLM.generate`` that draws a bar on stderr; None where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts  {task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("generating", total=total, tokens=0)

        def advance(done: EngineProgress) -> None:
            bar.update(task, completed=done.finished, total=done.total, tokens=done.generated_tokens)

        yield advance


def _print_outputs(outputs: Sequence[RequestOutput], as_json: bool) -> None:
    if as_json:
        for index, output in enumerate(outputs):
            print(json.dumps(_as_dict(index, output), ensure_ascii=False))
        return
    for index, output in enumerate(outputs):
        if index:
            print()
        for completion in output.outputs:
            prompt = output.prompt or ""
            print((typer.style(prompt, dim=True) if sys.stdout.isatty() else prompt) + completion.text)
            if completion.finish_reason == "error":
                typer.echo(f"pagoda: prompt {index} failed: {completion.error}", err=True)


def _as_dict(index: int, output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "index": index,
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "error": completion.error,
            }
            for completion in output.outputs
        ],
        "time_to_first_token": metrics.ttft,
        "latency": metrics.e2e_latency,
    }


def _print_summary(outputs: Sequence[RequestOutput], seconds: float) -> None:
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    rate = tokens / seconds if seconds else 0.0
    noun = "prompt" if len(outputs) == 1 else "prompts"
    typer.echo(f"{len(outputs)} {noun}, {tokens} tokens in {seconds:.1f} s ({rate:.1f} tok/s)", err=True)
