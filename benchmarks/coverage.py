"""Which causal LMs of transformers are served exactly: one tiny random model and one process each.

Every entry of transformers' MODEL_FOR_CAUSAL_LM_MAPPING, and the variants of ``tiny_models.LLAMA_VARIANTS``,
is built with a tiny configuration and served greedily: five prompts of different lengths in one continuous
batch, prompts cut into chunks, blocks of four tokens. Tokens and log-probabilities are compared with the
module run by transformers, each prompt alone.

    python benchmarks/coverage.py --json coverage.json --markdown coverage.md
    python benchmarks/coverage.py --refused refused.md                 # the table of docs/models.md
    python benchmarks/coverage.py --only 'llama,qwen*' --codegen inductor
    python benchmarks/coverage.py --fusions --markdown fusions.md      # what the fusion passes recognize instead
    python benchmarks/coverage.py --target npu --markdown npu.md       # what lowering for an Ascend NPU makes
    python benchmarks/coverage.py --tensor-parallel 2,4 --exact --markdown ranks.md   # what several ranks cut
    python benchmarks/coverage.py --pipeline-parallel 2 --exact                        # stages of a pipeline
    python benchmarks/coverage.py --quantization int8 --exact          # rounded weights, of the expected ones

Results: ``exact``; ``refused`` (``LLM(...)`` raised, before any token); ``silently wrong`` (other tokens, or
log-probabilities further off than 5e-4); ``failed`` (an error after ``LLM(...)`` had accepted the model);
``build failed`` (transformers cannot build it here); ``timeout``. The exit status is 1 if anything is
silently wrong or failed, or if an architecture of ``EXPECTED_EXACT`` is not exact.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import inspect
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from exact_coverage import EXPECTED_EXACT, Row, markdown, refused_markdown, summary
from fusions import FusionRow, fusion_tables, fusions_of, unmet
from npu_coverage import TARGET, NpuRow, npu_row, npu_tables
from rounded_coverage import RoundedRow, rounded_row, rounded_tables
from sharded_coverage import TARGET as SHARDED_TARGET
from sharded_coverage import ShardedRow, sharded_row, sharded_tables
from sharded_coverage import say as say_sharded
from staged_coverage import StagedRow, staged_row, staged_tables
from staged_coverage import say as say_staged

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

PROMPT_LENGTHS = (5, 9, 14, 40, 150)
"""The longest is beyond the chunks of every recurrence."""
MAX_TOKENS = 12
TOP_LOGPROBS = 5
TOLERANCE = 5e-4
"""Largest error of a float32 log-probability that counts as the same result."""

NPU_WINDOW = 4096
"""Tokens of windows, chunks and choices of keys where graphs are lowered for an NPU: those of real models are too
long to be run."""

PROCESSES = multiprocessing.get_context("forkserver")
"""Children are forked from a server that has the libraries loaded: nothing else is shared between them."""


def prompts(vocab_size: int) -> list[list[int]]:
    """The token ids of the five prompts, the same for all models of one vocabulary."""
    import torch

    high = min(200, vocab_size - 1)
    return [torch.randint(3, high, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in PROMPT_LENGTHS]


def one_line(error: BaseException) -> str:
    """``Type: message`` without line breaks, cut at 400 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


def traces_in_one_graph(model: Any) -> bool:
    """Whether Dynamo captures the forward pass of a flat batch as one graph with a dynamic length."""
    import torch

    inputs = {"input_ids": torch.randint(3, 200, (1, 40))}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.arange(40)[None]
    for tensor in inputs.values():
        torch._dynamo.mark_dynamic(tensor, 1)
    torch._dynamo.reset()
    try:
        with torch.no_grad(), torch._dynamo.config.patch(specialize_float=True):
            torch.compile(model, backend="eager", fullgraph=True, dynamic=True)(**inputs, use_cache=False)
    except Exception:
        return False
    return True


def examine(name: str, codegen: str, verify: str) -> Row:
    """Build, serve and judge one architecture or variant, in this process."""
    import torch

    from torch_pagoda import LLM, SamplingParams

    from hf_reference import greedy_with_cache, greedy_without_cache
    from tiny_models import LLAMA_VARIANTS, Variant, build_tiny_model

    torch.set_num_threads(1)
    row = Row(name, "build failed")
    variant = LLAMA_VARIANTS.get(name, Variant(name, {}))
    try:
        model = build_tiny_model(variant.model_type, **variant.overrides)
    except Exception as error:
        row.reason = one_line(error)
        return row
    row.model_class = type(model).__name__
    try:
        llm = LLM(
            model,
            codegen=codegen,
            verify=verify,
            block_size=4,
            num_blocks=96,
            max_num_seqs=3,
            max_num_batched_tokens=11,
        )
    except Exception as error:
        row.result, row.reason = "refused", one_line(error)
        row.traces = traces_in_one_graph(model)
        return row
    row.traces = True
    report = llm.compile_report
    row.attention_recognized, row.attention_total = report.attention_recognized, report.attention_total
    row.dropped_passes = [name for name, _ in report.dropped_passes]

    batch = prompts(int(model.config.get_text_config().vocab_size))
    row.result = "failed"
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP_LOGPROBS)
    try:
        completions = [output.outputs[0] for output in llm.generate(batch, params)]
    except Exception as error:
        row.reason = one_line(error)
        return row
    if errors := [c for c in completions if c.finish_reason != "length"]:
        row.reason = f"finish_reason={errors[0].finish_reason}: {errors[0].error}"[:200]
        return row

    reference = greedy_with_cache if variant.depends_on_length else greedy_without_cache
    row.logprob_error, wrong = 0.0, []
    for prompt, completion in zip(batch, completions, strict=True):
        try:  # a fresh model each time: rotary modules that follow the length keep state between calls
            expected = reference(build_tiny_model(variant.model_type, **variant.overrides), prompt, MAX_TOKENS)
        except Exception as error:
            row.reason = f"no reference: {one_line(error)}"
            return row
        served = list(completion.token_ids)
        assert completion.logprobs is not None
        row.logprob_error = max(row.logprob_error, expected.largest_error(served, completion.logprobs))
        if served != expected.tokens:
            pairs = enumerate(zip(served, expected.tokens, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), "count")
            wrong.append(f"prompt of {len(prompt)}: token {first} differs")
    row.result = "silently wrong" if wrong or row.logprob_error > TOLERANCE else "exact"
    if row.dropped_passes:
        wrong.append(f"without {', '.join(row.dropped_passes)}")
    row.reason = "; ".join(wrong)
    return row


def examine_rounded(name: str, args: argparse.Namespace) -> RoundedRow:
    """Serve one architecture with rounded weights, in this process."""
    import torch

    from torch_pagoda import LLM, SamplingParams

    from tiny_models import LLAMA_VARIANTS, Variant, build_tiny_model

    torch.set_num_threads(1)
    variant = LLAMA_VARIANTS.get(name, Variant(name, {}))
    try:
        model, copy = (build_tiny_model(variant.model_type, **variant.overrides) for _ in range(2))
    except Exception as error:
        return RoundedRow(name, "build failed", reason=one_line(error))

    def serve(model: Any, **options: Any) -> tuple[Any, Callable[[], Any]]:
        sizes = {"block_size": 4, "num_blocks": 96, "max_num_seqs": 3, "max_num_batched_tokens": 11}
        llm = LLM(model, codegen=args.codegen, verify=args.verify, **sizes, **options)
        batch = prompts(int(model.config.get_text_config().vocab_size))
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP_LOGPROBS)
        return llm, lambda: zip(batch, [o.outputs[0] for o in llm.generate(batch, params)], strict=True)

    return rounded_row(name, model, copy, args.quantization, serve)


def examine_fusions(name: str) -> FusionRow:
    """Explain one architecture or variant, in this process."""
    import torch

    from tiny_models import LLAMA_VARIANTS, Variant, build_tiny_model

    torch.set_num_threads(1)
    variant = LLAMA_VARIANTS.get(name, Variant(name, {}))
    try:
        model = build_tiny_model(variant.model_type, **variant.overrides)
    except Exception as error:
        return FusionRow(name, refused=f"build failed: {one_line(error)}")
    return fusions_of(name, model)


def examine_npu(name: str, graph_mode: str) -> NpuRow:
    """Lower one architecture for an Ascend NPU, in this process."""
    import torch

    from legal_models import build_legal_model
    from tiny_models import LLAMA_VARIANTS, Variant

    torch.set_num_threads(1)
    variant = LLAMA_VARIANTS.get(name, Variant(name, {}))
    try:
        model = build_legal_model(variant.model_type, window=NPU_WINDOW, **variant.overrides)
    except Exception as error:
        return NpuRow(name, refused=f"build failed: {one_line(error)}")
    return npu_row(name, model, graph_mode)


def examine_parts(name: str, count: int, row: Callable[[str, Any, int], Any]) -> Any:
    """Cut one architecture for several ranks, or part it into stages, in this process."""
    import torch

    from tiny_models import LLAMA_VARIANTS, Variant, build_tiny_model

    torch.set_num_threads(1)
    variant = LLAMA_VARIANTS.get(name, Variant(name, {}))
    try:
        model = build_tiny_model(variant.model_type, **variant.overrides)
    except Exception as error:
        return (StagedRow if row is staged_row else ShardedRow)(name, count, f"build failed: {one_line(error)}")
    return row(name, model, count)


def _child(name: str, args: argparse.Namespace, answer: Path, log: Path) -> None:
    """``examine`` or ``examine_fusions`` with all output in ``log`` and the row as JSON in ``answer``."""
    os.setsid()  # so that whatever this process starts can be killed with it
    with log.open("wb") as sink:
        os.dup2(sink.fileno(), sys.stdout.fileno())
        os.dup2(sink.fileno(), sys.stderr.fileno())
    warnings.filterwarnings("ignore")
    if args.target == "npu":
        row: Any = examine_npu(name, args.graph_mode)
    elif args.tensor_parallel or args.pipeline_parallel:
        architecture, _, count = name.partition("@")
        row = examine_parts(architecture, int(count), staged_row if args.pipeline_parallel else sharded_row)
    elif args.quantization is not None:
        row = examine_rounded(name, args)
    else:
        row = examine_fusions(name) if args.fusions else examine(name, args.codegen, args.verify)
    answer.write_text(json.dumps(dataclasses.asdict(row)))


def _kill(child: BaseProcess) -> None:
    """End a child and what it has started."""
    assert child.pid is not None
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to make a group of its own, or is gone
        child.kill()
    child.join()


def _failure(
    name: str, args: argparse.Namespace, result: str, why: str
) -> Row | RoundedRow | FusionRow | NpuRow | ShardedRow | StagedRow:
    """The row of an architecture that was not examined to the end."""
    if args.target == "npu":
        return NpuRow(name, why)
    if args.tensor_parallel or args.pipeline_parallel:
        architecture, _, count = name.partition("@")
        return (StagedRow if args.pipeline_parallel else ShardedRow)(architecture, int(count), why)
    if args.quantization is not None:
        return RoundedRow(name, result, reason=why)
    if args.fusions:
        return FusionRow(name, why)
    return Row(name, result, seconds=args.timeout if result == "timeout" else 0.0, reason=why)


def examine_in_subprocess(
    name: str, args: argparse.Namespace
) -> Row | RoundedRow | FusionRow | NpuRow | ShardedRow | StagedRow:
    """One of the examinations above in a process of its own that is killed after ``args.timeout`` seconds."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "row.json"), Path(folder, "log")
        child = PROCESSES.Process(target=_child, args=(name, args, answer, log))
        child.start()
        child.join(args.timeout)
        if child.exitcode is None:
            _kill(child)
            return _failure(name, args, "timeout", f"longer than {args.timeout:g} s")
        if not answer.exists():
            tail = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
            return _failure(name, args, "failed", f"exit status {child.exitcode}: {' '.join(tail)[:200]}")
        said = json.loads(answer.read_text())
    if args.target == "npu":
        return NpuRow(**said)
    if args.tensor_parallel:
        return ShardedRow(**said)
    if args.pipeline_parallel:
        return StagedRow(**said)
    if args.quantization is not None:
        return RoundedRow(**said)
    if args.fusions:
        return FusionRow(**said)
    row = Row(**said)
    row.seconds = round(time.perf_counter() - started, 1)
    return row


def selected_names(only: str | None, exact: bool = False) -> list[str]:
    """Architectures and variants whose names match one of the comma-separated patterns of ``only``; with ``exact``
    the architectures of ``EXPECTED_EXACT`` among them."""
    from tiny_models import LLAMA_VARIANTS, causal_lm_types

    names = [*causal_lm_types(), *LLAMA_VARIANTS]
    if exact:
        names = [name for name in names if name in EXPECTED_EXACT]
    if only is None:
        return names
    patterns = only.split(",")
    chosen = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not chosen:
        raise SystemExit(f"--only {only!r} matches no architecture; give names such as llama or llama/*")
    return chosen


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    from torch_pagoda.compiler.options import QUANTIZATIONS
    from torch_pagoda.runtime.npu_target import GRAPH_MODES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", help="comma-separated names or patterns, such as 'llama*,gpt2'")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--refused", type=Path, help="write the table of refused architectures there")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per architecture (default 120)")
    parser.add_argument("--codegen", default="none", help="as in LLM(...) (default none)")
    parser.add_argument("--verify", default="full", help="as in LLM(...) (default full)")
    parser.add_argument("--target", choices=("cpu", "npu"), default="cpu", help="npu: what lowering for it makes")
    parser.add_argument("--graph-mode", choices=GRAPH_MODES, default="ge", help="with --target npu (default ge)")
    parser.add_argument("--tensor-parallel", help="numbers of ranks, such as 2,4: what is cut for them")
    parser.add_argument("--pipeline-parallel", help="numbers of stages, such as 2: are they exact")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="round weights, as in LLM(...)")
    parser.add_argument("--exact", action="store_true", help="only the architectures of EXPECTED_EXACT")
    parser.add_argument("--fusions", action="store_true", help="count what the fusion passes recognize instead")
    return parser.parse_args()


def collect(
    names: list[str], args: argparse.Namespace, say: Callable[[Any], str], tables: Callable[[list[Any]], str]
) -> list[Any]:
    """Examine all selected architectures, and write what is known after each, so that a run that is cut off leaves
    something.

    Args:
        names: of architectures; the rows are in their order.
        args: the command line.
        say: what is printed of a row.
        tables: what is written of all.
    """
    rows: list[Any] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        try:
            for done in as_completed([pool.submit(examine_in_subprocess, name, args) for name in names]):
                row = done.result()
                rows.append(row)
                print(f"[{len(rows)}/{len(names)}] {row.name}: {say(row)}", flush=True)
                rows.sort(key=lambda row: names.index(getattr(row, "key", row.name)))
                if args.json:
                    args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
                if args.markdown:
                    args.markdown.write_text(tables(rows))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                _kill(child)
            raise SystemExit(130) from None
    return rows


def main_fusions(names: list[str], args: argparse.Namespace) -> int:
    """Explain all selected architectures; 1 if a target is missed."""

    def say(row: FusionRow) -> str:
        return row.refused or f"{row.layer_before} -> {row.layer_after} operators, {len(row.missed)} missed"

    rows = collect(names, args, say, fusion_tables)
    print(fusion_tables(rows))
    for short in unmet(rows):
        print("below target:", short)
    return 1 if unmet(rows) else 0


def main_npu(names: list[str], args: argparse.Namespace) -> int:
    """Lower all selected architectures; 1 if too few are clean, one breaks a limit or a pass is not right."""

    def say(row: NpuRow) -> str:
        counts = f"error {row.error:.1e}, {len(row.limited)} kept by limits, {len(row.gaps)} gaps"
        return row.refused or ", ".join([counts, *(f"without {dropped}: {why}" for dropped, why in row.dropped)])

    rows = collect(names, args, say, npu_tables)
    print(npu_tables(rows))
    enough = sum(row.clean for row in rows if "/" not in row.name) >= min(TARGET, len(names))
    return 0 if enough and not any(row.illegal or row.dropped for row in rows) else 1


def main_rounded(names: list[str], args: argparse.Namespace) -> int:
    """Serve all selected architectures with rounded weights; 1 if an expected one is refused, off or fails."""

    def say(row: RoundedRow) -> str:
        error = "" if row.median is None else f" {row.matrices} matrices, median error {row.median:.1e}"
        return f"{row.result}{error} {row.reason}"

    rows = collect(names, args, say, rounded_tables)
    print(rounded_tables(rows))
    return 1 if any(row.result != "served" and row.name in EXPECTED_EXACT for row in rows) else 0


def main_sharded(names: list[str], args: argparse.Namespace) -> int:
    """Cut all selected architectures; 1 if one is refused or too few are cut throughout."""
    numbers = [int(number) for number in args.tensor_parallel.split(",")]
    both = [f"{name}@{ranks}" for name in names for ranks in numbers]
    rows = collect(both, args, say_sharded, sharded_tables)
    print(sharded_tables(rows))
    enough = all(
        sum(row.cut for row in rows if row.ranks == ranks) >= min(SHARDED_TARGET, len(names)) for ranks in numbers
    )
    return 0 if enough and not any(row.refused for row in rows) else 1


def main_staged(names: list[str], args: argparse.Namespace) -> int:
    """Part all selected architectures into stages; 1 if one fails."""
    numbers = [int(number) for number in args.pipeline_parallel.split(",")]
    rows = collect([f"{name}@{stages}" for name in names for stages in numbers], args, say_staged, staged_tables)
    print(staged_tables(rows))
    return 1 if any("not exact" in row.refused for row in rows) else 0


def main_exactness(names: list[str], args: argparse.Namespace) -> int:
    """Serve all selected architectures; 1 if one is wrong, or an expected one not exact."""

    def say(row: Row) -> str:
        error = "" if row.logprob_error is None else f" error {row.logprob_error:.1e}"
        return f"{row.result}{error} {row.reason}"

    rows = collect(names, args, say, markdown)
    if args.refused:
        args.refused.write_text(refused_markdown(rows))
    bad = [row for row in rows if row.result in ("silently wrong", "failed")]
    lost = [row for row in rows if row.name in EXPECTED_EXACT and row.result != "exact"]
    gained = [row.name for row in rows if row.result == "exact" and "/" not in row.name]
    gained = sorted(set(gained) - EXPECTED_EXACT)
    if bad:
        print("wrong or failed:", ", ".join(row.name for row in bad))
    if lost:
        print("expected exact, but not:", ", ".join(f"{row.name} ({row.result})" for row in lost))
    if gained:
        print("exact beyond the expected ones:", ", ".join(gained))
    expected_here = EXPECTED_EXACT & set(names)
    print(f"{len(expected_here) - len(lost)} of {len(expected_here)} expected ones exact; {summary(rows)}")
    return 1 if bad or lost else 0


def main() -> int:
    """Run all selected architectures; the exit status."""
    args = parse_arguments()
    names = selected_names(args.only, args.exact)
    os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}  # for the children
    PROCESSES.set_forkserver_preload(["torch._dynamo", "transformers", "torch_pagoda", "tiny_models"])
    if args.target == "npu":
        return main_npu(names, args)
    if args.quantization is not None:
        return main_rounded(names, args)
    if args.tensor_parallel:
        return main_sharded(names, args)
    if args.pipeline_parallel:
        return main_staged(names, args)
    if args.fusions:
        return main_fusions(names, args)
    return main_exactness(names, args)


if __name__ == "__main__":
    raise SystemExit(main())
