"""``pagoda generate``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..runtime.option import option
from .beams import beam_params, best_texts
from .engine_options import ENGINE_PANELS, LLM_OPTIONS, EngineCommandOptions
from .errors import REQUEST_FAILED, one_line_errors
from .phases import show_phases
from .printing import print_outputs, print_summary, stats_table
from .with_options import Model, with_options

if TYPE_CHECKING:
    from ..runtime.requests.outputs import Progress as EngineProgress

_SAMPLING = (
    "max_tokens temperature top_k top_p min_p repetition_penalty generation_config presence_penalty "
    "frequency_penalty logit_bias bad_words allowed_token_ids seed n best_of beam_width length_penalty stop "
    "ignore_eos logprobs prompt_logprobs"
)
_PANELS = (
    ("", "prompt prompts_file"),
    ("Sampling", _SAMPLING),
    *ENGINE_PANELS,
    ("Scheduling", "max_queue priority client deadline"),
    ("", "profile stats as_json verbose debug"),
)
_NOT_OF_PARAMS = ("generation_config", "logit_bias", "beam_width", "length_penalty")
"""Options of sampling that do not go to ``SamplingParams`` as they are."""

_DEFAULT_MAX_TOKENS = 64
_NOT_RECOMMENDED = {"max_tokens": _DEFAULT_MAX_TOKENS, "temperature": 0.0}
"""What is used where neither the options nor the checkpoint say anything; else ``SamplingParams``' own defaults."""


@dataclass(frozen=True)
class GenerateOptions(EngineCommandOptions):
    """Options of ``pagoda generate``, in addition to the keyword arguments of ``LLM``."""

    prompt: list[str] | None = option(
        None, "A prompt; give it several times for several prompts.", flags=("--prompt", "-p")
    )
    prompts_file: Path | None = option(
        None, "UTF-8 text, one prompt per line, blank lines skipped; '-': stdin.", flags=("--prompts-file", "-f")
    )
    max_tokens: int | None = option(None, "New tokens per prompt at most; else the model's, or 64.")
    temperature: float | None = option(None, "0 takes the likeliest token; else the model's, or 0.")
    top_k: int | None = option(None, "0: off; else the model's.")
    top_p: float | None = option(None, "1: off; else the model's.")
    min_p: float | None = option(None, "0: off; else the model's.")
    repetition_penalty: float | None = option(None, "1: off; else the model's.")
    presence_penalty: float = option(0.0, "-2 to 2, off each token the output holds; 0: off.")
    frequency_penalty: float = option(0.0, "-2 to 2, off each token per occurrence; 0: off.")
    logit_bias: list[str] | None = option(None, "Add -100 to 100 to a token; repeatable.", metavar="ID:BIAS")
    bad_words: list[str] | None = option(None, "Never generate this text; repeatable.")
    allowed_token_ids: list[int] | None = option(None, "Generate no other tokens; repeatable.")
    seed: int | None = option(None, "Makes sampling repeatable.")
    n: int = option(1, "Completions per prompt.", flags=("--n", "-n"))
    best_of: int | None = option(None, "Run so many, show the likeliest --n.")
    beam_width: int | None = option(None, "Beam search with so many beams; shows the best --n.")
    length_penalty: float | None = option(None, "Of beams; 0: none, 1: the default, more favors long texts.")
    stop: list[str] | None = option(None, "Stop before this text; repeatable.")
    ignore_eos: bool = option(False, "Go on after the end token.")
    logprobs: int | None = option(None, "With --json: per token, and so many likely ones.")
    prompt_logprobs: int | None = option(None, "With --json: the same of the prompt.")
    priority: list[int] | None = option(None, "Lower comes first; once, or once for each prompt.")
    client: list[str] | None = option(None, "Whose prompt it is; once, or once for each.")
    deadline: float | None = option(None, "Seconds after which prompts end as they are.")
    profile: Path | None = option(
        None, "Write a trace for Perfetto there, and print where the time went.", metavar="FILE"
    )
    stats: bool = option(False, "Print figures of the KV cache, the queue and the steps.")
    as_json: bool = option(
        False, "One JSON object per prompt and line, token ids and times included.", flags=("--json",)
    )


@with_options(GenerateOptions, _PANELS, LLM_OPTIONS)
def generate(model: Model, own: GenerateOptions, engine: dict[str, Any]) -> None:
    """Continue one prompt or many, all in one continuous batch.

    Text goes to stdout; a progress bar (on a terminal only), the summary and errors go to stderr. Exit
    status: 0, 1 if a prompt failed while it ran, 2 for a mistake in the arguments.
    """
    logging.basicConfig(level=logging.INFO if own.verbose else logging.WARNING, format="%(name)s: %(message)s")
    sampling = {name: getattr(own, name) for name in _SAMPLING.split() if name not in _NOT_OF_PARAMS}
    asked = {"priority": _one_or_each(own.priority), "client": _one_or_each(own.client), "deadline": own.deadline}
    terms: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    with one_line_errors(own.debug):
        prompts = _read_prompts(own.prompt, own.prompts_file)
        for name, count in (("--logprobs", own.logprobs), ("--prompt-logprobs", own.prompt_logprobs)):
            if count is not None and not own.as_json:
                raise ValueError(f"{name} requires --json")
        bias = _read_biases(own.logit_bias)
        max_tokens = _DEFAULT_MAX_TOKENS if own.max_tokens is None else own.max_tokens
        beams = beam_params(own, max_tokens, [*sampling, "logit_bias"])
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
        options = own.llm_options(engine)
        with show_phases(model):
            llm = LLM(model, own.tokenizer, **options)
        params = SamplingParams(logit_bias=bias, **_NOT_RECOMMENDED | llm.recommended_params | asked_for)
        scores: list[list[float]] | None = None
        begin = time.perf_counter()
        with _progress_bar(len(prompts)) as advance:
            if beams is None:
                outputs = llm.generate(prompts, params, on_progress=advance, **terms)
            else:
                found = llm.beam_search(prompts, beams, on_progress=advance, **terms)
                best = [best_texts(output, own.n) for output in found]
                outputs, scores = [texts for texts, _ in best], [values for _, values in best]
        seconds = time.perf_counter() - begin
        found_profile = None
        if own.profile is not None:
            found_profile = llm.profile()
            found_profile.save_trace(own.profile)
    print_outputs(outputs, own.as_json, scores)
    print_summary(outputs, seconds)
    if own.stats:
        Console(stderr=True).print(stats_table(llm.stats()))
    if found_profile is not None:
        from .profile_table import profile_table

        Console(stderr=True).print(profile_table(found_profile))
        typer.echo(f"written: {own.profile}", err=True)
    if any(c.finish_reason == "error" for output in outputs for c in output.outputs):
        raise typer.Exit(REQUEST_FAILED)


def _one_or_each(values: list[Any] | None) -> Any:
    """The value of a repeatable option: a single value applies to all prompts."""
    return values[0] if values and len(values) == 1 else values or None


def _read_prompts(prompts: Sequence[str] | None, file: Path | None) -> list[str]:
    """The prompts of both options, in that order.

    Raises:
        ValueError: there is no prompt, or a file is not UTF-8 text.
    """
    found = list(prompts or [])
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompts-file {file} is not UTF-8 text: {error}") from error
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"--prompts-file {file} has no prompts; write one per line")
        found += lines
    if not found:
        raise ValueError("no prompt given; use --prompt TEXT or --prompts-file FILE")
    return found


def _read_biases(entries: Sequence[str] | None) -> dict[int, float] | None:
    """Parse ``--logit-bias`` to biases by token id.

    Raises:
        ValueError: an entry is not ``ID:BIAS``.
    """
    biases = {}
    for entry in entries or ():
        token, _, bias = entry.partition(":")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias {entry} is not ID:BIAS; for example 42:-100") from None
    return biases or None


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[EngineProgress], None] | None]:
    """A callback for ``LLM.generate`` that draws a bar on stderr; None if stderr is not a terminal."""
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
