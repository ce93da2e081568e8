"""What is written down of an architecture that is served: exact, or refused with a reason."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

_PROTOTYPE = """
    afmoe apertus arcee aria_text axk1 bart beam bert bert-generation big_bird bigbird_pegasus biogpt
    bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe
    cohere_compass_text cwm data2vec-text deepseek_v2 deepseek_v3 diffllama dots1 electra emu3 ernie
    ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
    got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite granitemoe granitemoeshared
    helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe
    kolibri1 laguna lfm2 llama llama4 llama4_text marian mbart megatron-bert mellum mimo_v2_flash
    minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi moss_transcribe_diarize mpt mvp nanochat nemotron olmo olmo2 olmo3 olmoe
    opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart qwen2 qwen2_moe qwen3 qwen3_moe rembert
    roberta roberta-prelayernorm roc_bert roformer seed_oss smollm3 solar_open stablelm starcoder2 trocr
    vaultgemma xglm xlm-roberta xlm-roberta-xl xmod youtu
"""
_SINK_GATES = "granite_swa granitemoe_swa"
_INDEXERS = "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4"
_STATE = """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling_text jamba kimi_linear lfm2_moe lfm3 mamba
    mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next zamba zamba2
    zaya
"""
_BUFFERS_ASSIGNED = "ctrl"
_TEXT_PARTS = "git gpt_neox_japanese whisper"
EXPECTED_EXACT = frozenset(
    " ".join((_PROTOTYPE, _SINK_GATES, _INDEXERS, _STATE, _BUFFERS_ASSIGNED, _TEXT_PARTS)).split()
)
"""Architectures that must be exact: those that a first prototype of the graph rewriting served exactly, and those
that were added by what they need."""


@dataclasses.dataclass
class Row:
    """What happened to one architecture."""

    name: str
    result: str
    model_class: str = ""
    traces: bool | None = None
    attention_recognized: int | None = None
    attention_total: int | None = None
    logprob_error: float | None = None
    dropped_passes: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    reason: str = ""


def markdown(rows: list[Row]) -> str:
    """The table of all rows, with a heading line of counts."""
    lines = [
        summary(rows),
        "",
        "| architecture | result | traces | attention | log-prob error | seconds | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        traces = "" if row.traces is None else "yes" if row.traces else "no"
        attention = "" if row.attention_total is None else f"{row.attention_recognized}/{row.attention_total}"
        error = "" if row.logprob_error is None else f"{row.logprob_error:.1e}"
        reason = row.reason.replace("|", "\\|")
        lines.append(f"| {row.name} | {row.result} | {traces} | {attention} | {error} | {row.seconds} | {reason} |")
    return "\n".join(lines) + "\n"


def refused_markdown(rows: list[Row]) -> str:
    """The table of the architectures that are not served, with the reason in short."""
    lines = ["| architecture | reason |", "|---|---|"]
    for row in rows:
        if row.result in ("refused", "build failed") and "/" not in row.name:
            lines.append(f"| `{row.name}` | {short_reason(row)} |")
    return "\n".join(lines) + "\n"


def short_reason(row: Row) -> str:
    """The reason without the names of the model's class and of nodes of its graph, and without the remedy."""
    if row.result == "build failed":
        return "cannot be built with a tiny configuration"
    text = row.reason.rpartition("cannot be served: ")[2].partition("; use transformers' own generate")[0]
    text = re.sub(rf"\b{row.model_class}:? ", "", text)
    text = re.sub(r" Consider annotating your code using torch\._check\*\(\)\.", "", text)
    return text.partition(" (")[0].rstrip(".")


def summary(rows: list[Row]) -> str:
    """One line of counts, architectures and variants apart."""
    parts = []
    for kind, members in (
        ("architectures", [row for row in rows if "/" not in row.name]),
        ("variants", [row for row in rows if "/" in row.name]),
    ):
        if members:
            counts = Counter(row.result for row in members)
            counted = ", ".join(f"{count} {result}" for result, count in counts.most_common())
            parts.append(f"{len(members)} {kind}: {counted}")
    return "; ".join(parts)
