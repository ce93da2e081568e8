"""Options shared by commands with an engine, and the keyword arguments of ``LLM`` they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..compiler.choices import Choices
from ..load_options import LoadOptions
from ..runtime.engine.engine_options import EngineOptions
from ..runtime.option import option

LLM_OPTIONS = (LoadOptions, EngineOptions, Choices)
"""The classes whose fields are keywords of ``LLM``."""

ENGINE_PANELS = (
    (
        "Engine",
        "tokenizer dtype device block_size num_blocks kv_cache_memory min_kv_cache_memory kv_cache_dtype "
        "quantization group_size input_bits batch_invariant tensor_parallel_size pipeline_parallel_size "
        "max_num_seqs max_num_batched_tokens max_model_len",
    ),
    (
        "Ranks",
        "expert_parallel_size enable_expert_parallel distributed_executor_backend worker_restarts step_timeout",
    ),
    (
        "Scheduling",
        "enable_prefix_caching policy preemption swap_space async_scheduling npu_warmup "
        "speculative_config draft_forced_tokens",
    ),
    ("KV store", "kv_store kv_store_size kv_store_key_file kv_store_wait kv_store_write"),
    ("Compiler", "verify codegen npu_options static_decode schedule skip_pass only_pass"),
    ("", "trust_remote_code"),
)


@dataclass(frozen=True)
class PassOptions:
    """Options of all commands that compile, in addition to the keyword arguments of ``LLM``."""

    skip_pass: list[str] | None = option(None, "Leave this pass out; repeatable.")
    only_pass: list[str] | None = option(None, "Of the optional passes run only this one; repeatable.")
    verbose: bool = option(False, "Log what is done, to stderr.", flags=("--verbose", "-v"))
    debug: bool = option(False, "Show the traceback of an error.")

    @property
    def passes(self) -> dict[str, list[str]] | None:
        """The keyword argument ``passes`` of ``LLM``."""
        selection = {"skip": self.skip_pass, "only": self.only_pass}
        return {name: passes for name, passes in selection.items() if passes} or None


@dataclass(frozen=True)
class EngineCommandOptions(PassOptions):
    """Options of all commands with an engine, in addition to the keyword arguments of ``LLM``."""

    tokenizer: str | None = option(None, "Folder or hub id; by default the model's.")
    generation_config: str = option(
        "auto", "Where the model's own values are: auto (its checkpoint), a folder, or vllm (nowhere)."
    )

    def llm_options(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of ``LLM`` that were given or have a default here."""
        keywords = {**engine, "passes": self.passes, "generation_config": self.generation_config}
        return {name: value for name, value in keywords.items() if value is not None}
