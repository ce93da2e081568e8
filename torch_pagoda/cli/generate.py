"""``pagoda generate``."""

from __future__ import annotations

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

from .beams import beam_params, best_texts
from .engine_options import (
    AsyncScheduling,
    BatchInvariant,
    BlockSize,
    Codegen,
    Device,
    Dtype,
    EnablePrefixCaching,
    GroupSize,
    InputBits,
    KvCacheDtype,
    KvCacheMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MinKvCacheMemory,
    NoAsyncScheduling,
    NoEnablePrefixCaching,
    NpuOptions,
    NpuWarmup,
    NumBlocks,
    OnlyPass,
    Policy,
    Preemption,
    Quantization,
    Schedule,
    SkipPass,
    StaticDecode,
    SwapSpace,
    Tokenizer,
    TrustRemoteCode,
    Verify,
    check_engine_options,
    llm_options,
)
from .errors import REQUEST_FAILED, one_line_errors
from .phases import show_phases
from .printing import print_outputs, print_summary, stats_table

if TYPE_CHECKING:
    from ..runtime.requests.outputs import Progress as EngineProgress

_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "bad_words", "allowed_token_ids", "seed", "n", "best_of", "stop", "ignore_eos"),
    *("logprobs", "prompt_logprobs"),
)
"""Options that go to ``SamplingParams`` as they are."""

_REPEATABLE = ("bad_words", "allowed_token_ids", "stop")

_NOT_GIVEN = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What sampling options are when they are not given; the others are None."""

_NOT_RECOMMENDED = {"max_tokens": 64, "temperature": 0.0}
"""What is used where neither the options nor the checkpoint say anything; else ``SamplingParams``' own defaults."""


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
    max_tokens: Annotated[
        int | None,
        typer.Option(help="New tokens per prompt at most; else the model's, or 64.", rich_help_panel="Sampling"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token; else the model's, or 0.", rich_help_panel="Sampling"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="0: off; else the model's.", rich_help_panel="Sampling")] = None,
    top_p: Annotated[float | None, typer.Option(help="1: off; else the model's.", rich_help_panel="Sampling")] = None,
    min_p: Annotated[float | None, typer.Option(help="0: off; else the model's.", rich_help_panel="Sampling")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="1: off; else the model's.", rich_help_panel="Sampling")
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Where the model's own values are: auto (its checkpoint), a folder, or vllm (nowhere).",
            rich_help_panel="Sampling",
        ),
    ] = "auto",
    presence_penalty: Annotated[
        float, typer.Option(help="-2 to 2, off each token the output holds; 0: off.", rich_help_panel="Sampling")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="-2 to 2, off each token per occurrence; 0: off.", rich_help_panel="Sampling")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID:BIAS", help="Add -100 to 100 to a token; repeatable.", rich_help_panel="Sampling"),
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option(help="Never generate this text; repeatable.", rich_help_panel="Sampling")
    ] = None,
    allowed_token_ids: Annotated[
        list[int] | None, typer.Option(help="Generate no other tokens; repeatable.", rich_help_panel="Sampling")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel="Sampling")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Completions per prompt.", rich_help_panel="Sampling")] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Run so many, show the likeliest --n.", rich_help_panel="Sampling")
    ] = None,
    beam_width: Annotated[
        int | None,
        typer.Option(help="Beam search with so many beams; shows the best --n.", rich_help_panel="Sampling"),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(help="Of beams; 0: none, 1: the default, more favours long texts.", rich_help_panel="Sampling"),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.", rich_help_panel="Sampling")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end token.", rich_help_panel="Sampling")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: per token, and so many likely ones.", rich_help_panel="Sampling"),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="With --json: the same of the prompt.", rich_help_panel="Sampling")
    ] = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    kv_cache_memory: KvCacheMemory = None,
    min_kv_cache_memory: MinKvCacheMemory = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    quantization: Quantization = None,
    group_size: GroupSize = None,
    input_bits: InputBits = None,
    batch_invariant: BatchInvariant = False,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    no_enable_prefix_caching: NoEnablePrefixCaching = False,
    enable_prefix_caching: EnablePrefixCaching = False,
    policy: Policy = "fcfs",
    preemption: Preemption = "auto",
    swap_space: SwapSpace = "0",
    async_scheduling: AsyncScheduling = False,
    no_async_scheduling: NoAsyncScheduling = False,
    npu_warmup: NpuWarmup = "full",
    max_queue: Annotated[
        int | None, typer.Option(help="Refuse to start with more prompts.", rich_help_panel="Scheduling")
    ] = None,
    priority: Annotated[
        list[int] | None,
        typer.Option(help="Lower comes first; once, or once for each prompt.", rich_help_panel="Scheduling"),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(help="Whose prompt it is; once, or once for each.", rich_help_panel="Scheduling"),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds after which prompts end as they are.", rich_help_panel="Scheduling"),
    ] = None,
    verify: Verify = "model",
    codegen: Codegen = "auto",
    npu_options: NpuOptions = None,
    static_decode: StaticDecode = False,
    schedule: Schedule = None,
    skip_pass: SkipPass = None,
    only_pass: OnlyPass = None,
    trust_remote_code: TrustRemoteCode = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="Write a trace for Perfetto there, and print where the time went.", metavar="FILE"),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print figures of the KV cache, the queue and the steps.")
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
    given = dict(locals())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s")
    sampling = {name: given[name] or None if name in _REPEATABLE else given[name] for name in _SAMPLING}
    asked = {"priority": _one_or_each(priority), "client": _one_or_each(client), "deadline": deadline}
    terms: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    with one_line_errors(debug):
        check_engine_options(given)
        prompts = _read_prompts(prompt, prompts_file)
        for name, count in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
            if count is not None and not as_json:
                raise ValueError(f"{name} {count} has nowhere to go; add --json")
        bias = _read_biases(logit_bias)
        length = {"max_tokens": _NOT_RECOMMENDED["max_tokens"] if max_tokens is None else max_tokens}
        beams = beam_params(beam_width, length_penalty, {**sampling, **length, "logit_bias": bias}, _NOT_GIVEN)
        # Imported here, so that --help and --version answer at once.
        from transformers.utils import logging as transformers_logging

        from ..llm import LLM
        from ..runtime.requests.request_options import options_for
        from ..runtime.requests.sampling_params import SamplingParams

        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        asked_for: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        SamplingParams(logit_bias=bias, **asked_for)  # a mistake in them is found before the model is loaded
        options_for(len(prompts), **terms)
        options = llm_options(given)
        with show_phases(model):
            llm = LLM(model, tokenizer, **options)
        params = SamplingParams(logit_bias=bias, **_NOT_RECOMMENDED | llm.recommended_params | asked_for)
        scores: list[list[float]] | None = None
        begin = time.perf_counter()
        with _progress_bar(len(prompts)) as advance:
            if beams is None:
                outputs = llm.generate(prompts, params, on_progress=advance, **terms)
            else:
                found = llm.beam_search(prompts, beams, on_progress=advance, **terms)
                best = [best_texts(output, n) for output in found]
                outputs, scores = [texts for texts, _ in best], [values for _, values in best]
        seconds = time.perf_counter() - begin
        found_profile = None
        if profile is not None:
            found_profile = llm.profile()
            found_profile.save_trace(profile)
    print_outputs(outputs, as_json, scores)
    print_summary(outputs, seconds)
    if stats:
        Console(stderr=True).print(stats_table(llm.stats()))
    if found_profile is not None:
        from .profile_table import profile_table

        Console(stderr=True).print(profile_table(found_profile))
        typer.echo(f"written: {profile}", err=True)
    if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
        raise typer.Exit(REQUEST_FAILED)


def _one_or_each(values: list[Any] | None) -> Any:
    """The value of a repeatable option: a single value is for all prompts."""
    return values[0] if values and len(values) == 1 else values or None


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


def _read_biases(entries: Sequence[str] | None) -> dict[int, float] | None:
    """Biases from what ``--logit-bias`` was given, by token id.

    Raises:
        ValueError: an entry is not ``ID:BIAS``.
    """
    biases = {}
    for entry in entries or ():
        token, _, bias = entry.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {entry} is not ID:BIAS; write for example 42:-100") from None
    return biases or None


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
