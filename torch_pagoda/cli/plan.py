"""``pagoda plan``: how much of a model's serving memory fits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import one_line_errors
from .format_table import format_table
from .memory_table import GB, GIB, block_line, memory_table
from .number_table import number_table
from .with_options import json_object

if TYPE_CHECKING:
    import torch

    from ..checkpoint.format_bytes import FormatBytes
    from ..compiler.costs.requirements import Requirements
    from ..reports.block_size_plan import BlockSizePlan
    from ..reports.memory_plan import MemoryPlan

DOES_NOT_FIT = 1


def plan(
    model: Annotated[
        str,
        typer.Argument(help="Checkpoint folder, hub id, or a folder with a config.json alone.", metavar="MODEL"),
    ],
    memory: Annotated[
        str | None,
        typer.Option(help="Memory to plan for, e.g. 64GiB; by default what is free here. That of each rank."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the model's) or int8.")] = "auto",
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences at the same time.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens per step.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens per sequence, prompt included; by default the model's.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per KV-cache block; by default what LLM takes, or the cheapest one.")
    ] = None,
    mean_length: Annotated[
        float | None,
        typer.Option(help="Expected tokens of a sequence, prompt included: compare block sizes for it."),
    ] = None,
    sigma: Annotated[
        float, typer.Option(help="Their spread: standard deviation of the logarithm (log-normal).")
    ] = 0.8,
    target: Annotated[str, typer.Option(help="auto, cpu or npu.")] = "auto",
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "-tp", help="Ranks that hold each layer together: plan the memory of each."
        ),
    ] = 1,
    pipeline_parallel_size: Annotated[
        int,
        typer.Option(
            "--pipeline-parallel-size", "-pp", help="Stages of these ranks: plan the memory of the fullest."
        ),
    ] = 1,
    expert_parallel_size: Annotated[
        int | None, typer.Option(help="Groups of them that hold different experts, each cut within its group.")
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(help='Count a draft model or a head, e.g. {"method": "mtp"}.', metavar="JSON"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, sizes in bytes.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done, to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show how a memory divides into weights, activations and KV cache, and how many sequences fit at once.

    It reads only the configuration, and the weights of a quantized checkpoint for their formats. It compares the
    paged cache with contiguous allocation, where each sequence reserves --max-model-len tokens. Exit status: 0, 1
    when the model does not fit, 2 for a mistake in the arguments or a model that cannot be served.
    """
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(name)s: %(message)s")
    with one_line_errors(debug):
        # Imported here, so that --help answers at once.
        from ..checkpoint.format_bytes import served_change
        from ..checkpoint.loading import resolve_dtype, without_quantization
        from ..compiler.costs.requirements import requirements
        from ..compiler.options import CompileOptions
        from ..device import resolve_device
        from ..reports.draft_needs import draft_needs
        from ..reports.memory_plan import plan_memory
        from ..runtime.cache.kv_cache import UNSTATED_MODEL_LEN, available_memory
        from ..runtime.engine.engine_options import EngineOptions, parse_memory

        limits = EngineOptions(
            block_size=block_size,
            max_num_seqs=EngineOptions.max_num_seqs if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens=(
                EngineOptions.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
            ),
            max_model_len=max_model_len,
        )
        _block_sizes(mean_length, sigma, 1, for_npu=False)  # refuses what is no length before the model is looked at
        options = CompileOptions(
            target=target,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            expert_parallel_size=expert_parallel_size,
        ).for_device(resolve_device("auto").type)
        ranks = options.tensor_parallel_size
        total = available_memory() // options.world_size if memory is None else parse_memory(memory, "memory")
        kind, config, name = _kind_and_config(model)
        wanted = resolve_dtype(dtype)
        formats = _formats(kind, name, config, wanted, options.target)
        needs = requirements(kind, without_quantization(config), wanted, options)
        served = needs.weight_bytes + (0 if formats is None else served_change(formats) // ranks)
        smaller, needs = served / needs.weight_bytes, replace(needs, weight_bytes=served)
        longest = needs.max_model_len
        if max_model_len is not None and longest is not None and max_model_len > longest:
            raise ValueError(f"max_model_len={max_model_len} exceeds the model's {longest}; lower it")
        longest = max_model_len or longest or UNSTATED_MODEL_LEN
        sizes = _block_sizes(mean_length, sigma, longest, for_npu=options.target == "npu")
        if block_size is None:
            block_size = sizes.block_size if sizes is not None else _default_block_size(options.target)
        options = replace(options, block_size=block_size) if options.target == "npu" else options
        shares = [] if needs.stages is None else needs.stages.stages
        plan = partial(
            plan_memory,
            memory=total,
            activation_bytes=needs.activation_bytes(limits.max_num_batched_tokens, limits.max_num_seqs, longest),
            block_size=block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=longest,
            # As the engine does it: on an NPU all layers share one block table.
            by_window=options.target == "cpu",
        )
        given = None if speculative_config is None else json_object("--speculative-config", speculative_config)
        drafts = draft_needs(given, model, wanted, options, needs.caches)
        # The first rank drafts.
        added, added_bytes = ((), 0) if drafts is None else (drafts.caches, drafts.weight_bytes)
        plans = [
            plan(
                [*share.caches, *(added if share is shares[0] else ())],
                weight_bytes=int(share.weight_bytes * smaller) + (added_bytes if share is shares[0] else 0),
            )
            for share in shares
        ]
        found = min(plans, key=_room) if plans else plan([*needs.caches, *added], weight_bytes=served + added_bytes)
    if as_json:
        said = {**_as_dict(found, needs, sizes, kv_cache_dtype), "tensor_parallel_size": ranks}
        said |= {"pipeline_parallel_size": pipeline_parallel_size}
        said |= {"stages": None if needs.stages is None else needs.stages.to_dict()}
        said["experts"] = {} if needs.shares is None else needs.shares.experts
        said["formats"] = None if formats is None else [asdict(one) for one in formats]
        said["drafts"] = None if drafts is None else drafts.to_dict()
        print(json.dumps(said, indent=1, allow_nan=False))
    else:
        where = f", on each of {ranks} ranks" if ranks > 1 else ""
        if plans:
            number, share = plans.index(found), shares[plans.index(found)]
            fullest = f"stage {number + 1} of {len(plans)} (layers {share.first} to {share.last}), the fullest"
            where = f"{where} of {fullest}" if where else f", in {fullest}"
        for count, (held, over) in ({} if needs.shares is None else needs.shares.experts).items():
            where += f": {held} of {count} experts{f', 1/{over} of each' if over > 1 else ''}"
        _print(found, needs, sizes, kv_cache_dtype, where)
        if drafts is not None:
            Console().print(f"{drafts} They are counted above.", highlight=False)
        if formats is not None:
            console = Console()
            console.print()
            console.print(format_table(formats))
    if found.missing_bytes:
        raise typer.Exit(DOES_NOT_FIT)


def _room(found: MemoryPlan) -> tuple[int, int]:
    """Of plans the least is that of the fullest rank."""
    return -found.missing_bytes, found.limits[-1].running


def _kind_and_config(model: str) -> tuple[Any, Any, str]:
    """Class and configuration of a causal LM that transformers knows, and the folder or hub id."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from ..checkpoint.configs import load_config

    name, config = load_config(model, trust_remote_code=False)
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, name


def _formats(kind: Any, name: str, config: Any, dtype: torch.dtype | None, target: str) -> list[FormatBytes] | None:
    """The formats of a quantized checkpoint, where it has no weights as its config states them; None for an
    unquantized one."""
    import torch

    from ..checkpoint.format_bytes import formats_of, formats_of_files
    from ..checkpoint.quantized import quantization_method
    from ..checkpoint.source import lacks_weights
    from ..reports.stated_formats import stated_model

    method = quantization_method(config, name) if lacks_weights(name) else None
    if method is not None:
        model = stated_model(kind, config, method, name, dtype)
        tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
        return formats_of(model.named_parameters(), model.dtype, tied=tied, target=target)
    stated = getattr(config.get_text_config(), "dtype", None)
    return formats_of_files(name, config, dtype or stated or torch.bfloat16, target=target)


def _default_block_size(target: str) -> int:
    """The default block size of ``LLM``."""
    from ..runtime.engine.engine_options import DEFAULT_BLOCK_SIZE
    from ..runtime.npu_target import DEFAULT_BLOCK_SIZE as NPU_BLOCK_SIZE

    return NPU_BLOCK_SIZE if target == "npu" else DEFAULT_BLOCK_SIZE


def _block_sizes(mean: float | None, sigma: float, longest: int, *, for_npu: bool) -> BlockSizePlan | None:
    """Block sizes compared for the expected lengths; None if no lengths are given."""
    from ..reports.block_size_plan import CANDIDATES, LogNormalLengths, plan_block_size

    if mean is None:
        return None
    candidates = [size for size in CANDIDATES if size % 16 == 0] if for_npu else CANDIDATES
    return plan_block_size(LogNormalLengths(mean, sigma, longest), candidates)


def _as_dict(
    found: MemoryPlan, needs: Requirements, sizes: BlockSizePlan | None, kv_cache_dtype: str
) -> dict[str, Any]:
    """All printed values, and more; sizes in bytes."""
    block_sizes = None
    if sizes is not None:
        block_sizes = {
            "chosen": sizes.block_size,
            "mean_tokens": sizes.mean_tokens,
            "candidates": [{**asdict(cost), "cost": cost.cost} for cost in sizes.costs],
        }
    return {
        "model": needs.model,
        "dtype": needs.weight_dtype,
        "parameters": needs.parameters,
        "kv_cache_dtype": kv_cache_dtype,
        **found.to_dict(),
        "block_sizes": block_sizes,
    }


def _print(
    found: MemoryPlan, needs: Requirements, sizes: BlockSizePlan | None, kv_cache_dtype: str, where: str
) -> None:
    console = Console()
    stored = "" if kv_cache_dtype == "auto" else f", KV cache in {kv_cache_dtype}"
    console.print(
        f"{needs.model} in {needs.weight_dtype}{stored}{where}, {needs.parameters:,} parameters", highlight=False
    )
    for table in (memory_table(found), _limits(found), *([] if sizes is None else [_sizes(sizes)])):
        console.print()
        console.print(table)
    console.print()
    for line in _words(found):
        console.print(line, highlight=False)


def _limits(found: MemoryPlan) -> Table:
    """Concurrent sequences by length, in blocks and contiguous."""
    table = number_table("tokens each", "KV GiB", "KV GB", "paged", "used", "contiguous", "used", "run at once")
    for limit in found.limits:
        table.add_row(
            str(limit.tokens),
            _number(limit.sequence_bytes / GIB),
            _number(limit.sequence_bytes / GB),
            str(limit.paged),
            f"{100 * limit.paged_utilization:.0f} %",
            str(limit.contiguous),
            f"{100 * limit.contiguous_utilization:.0f} %",
            str(limit.running),
        )
    return table


def _sizes(sizes: BlockSizePlan) -> Table:
    """Costs of block sizes, in tokens per sequence."""
    table = number_table("block size", "blocks", "wasted", "share", "overhead", "cost", "")
    for cost in sizes.costs:
        table.add_row(
            str(cost.block_size),
            f"{cost.blocks:.1f}",
            f"{cost.wasted_tokens:.1f}",
            f"{100 * cost.fragmentation:.1f} %",
            f"{cost.overhead_tokens:.1f}",
            f"{cost.cost:.1f}",
            "cheapest" if cost.block_size == sizes.block_size else "",
        )
    return table


def _words(found: MemoryPlan) -> Iterator[str]:
    """The scalar values."""
    if found.pools:
        block = _exactly(found.block_bytes)
        yield f"KV per token: {_exactly(found.token_bytes)}; a block of {found.block_size}: {block}"
    if found.state_bytes:
        yield f"State per sequence: {_exactly(found.state_bytes)}"
    if found.missing_bytes:
        first = "a first block" if not found.state_bytes else "the first sequence's state"
        yield f"It does not fit: {first} needs {_size(found.missing_bytes)} more."
        return
    yield block_line(found)
    yield f"Longest sequence: {found.longest_sequence} tokens; contiguous: {found.contiguous_longest_sequence}."
    yield f"At most {found.max_num_seqs} sequences run at once (max_num_seqs)."
    yield "Activations are the tensors alone. What malloc keeps can double them on a CPU."


def _number(amount: float) -> str:
    """At least three digits."""
    return f"{amount:.2f}" if amount >= 1 or not amount else f"{amount:.3g}"


def _size(size: int) -> str:
    """Bytes in a suitable binary unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.2f} {unit}"
    return f"{size} bytes"


def _exactly(size: int) -> str:
    """Bytes in a suitable binary unit, and exactly."""
    return f"{_size(size)} ({size:,} bytes)" if size >= 1 << 10 else _size(size)
