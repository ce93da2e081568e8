"""Metric families of the engine, from its statistics at a scrape, and helpers to build and name families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from ...runtime.block_store.traffic import FIGURES as STORE_FIGURES
from ...runtime.engine.step_sizes import FIGURES
from ...runtime.speculation.drafting import ACCEPTED_BY_PLACE
from .histogram import Histogram

MetricsPrefix = Literal["both", "vllm", "pagoda"]
"""See ``ServerMetrics``."""

Labels = Mapping[str, str]
Stats = Mapping[str, int | float]

AUTOSCALER_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Gauges that autoscalers read; they may have two names."""

_GAUGES = {
    "num_requests_running": ("running", "Running sequences."),
    "num_requests_waiting": ("queue_length", "Waiting sequences."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens, cached ones included."),
    "generation_tokens": ("generated_tokens", "Tokens generated."),
    "num_preemptions": ("preemptions", "Preemptions of sequences."),
    "prefix_cache_queries": ("prefix_query_tokens", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hit_tokens", "Tokens found in the prefix cache."),
}

_DRAFT_COUNTERS = {
    "spec_decode_num_drafts": ("spec_decode_num_drafts", "Drafts that steps verified."),
    "spec_decode_num_draft_tokens": ("spec_decode_num_draft_tokens", "Tokens of these drafts."),
    "spec_decode_num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
}

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


def engine_families(stats_of_engines: Mapping[str, Stats], model_name: str) -> list[Metric]:
    """Families with vLLM's names, with a sample for each engine.

    Args:
        stats_of_engines: ``EngineClient.stats`` of each by its name; zeros are assumed before it is ready.
        model_name: a label.
    """
    families: dict[str, Metric] = {}
    for name, stats in stats_of_engines.items():
        for family in _engine_families(stats, {"model_name": model_name, "engine": name}):
            families.setdefault(family.name, family)
            if families[family.name] is not family:
                families[family.name].samples += family.samples
    return list(families.values())


def _engine_families(stats: Stats, labels: Labels) -> Iterable[Metric]:
    for name, (key, text) in _GAUGES.items():
        yield labeled(GaugeMetricFamily, f"vllm:{name}", text, [(labels, stats.get(key, 0))])
    total = stats.get("blocks_total", 0)
    usage = stats.get("blocks_used", 0) / total if total else 0.0
    yield labeled(GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Blocks in use, 0 to 1.", [(labels, usage)])
    yield labeled(
        GaugeMetricFamily,
        "vllm:num_requests_waiting_by_reason",
        "Waiting sequences by reason; the only reason is capacity.",
        [({**labels, "reason": "capacity"}, stats.get("queue_length", 0)), ({**labels, "reason": "deferred"}, 0)],
    )
    cached = stats.get("cached_tokens", 0)
    yield labeled(
        CounterMetricFamily,
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by source.",
        [
            ({**labels, "source": "local_compute"}, max(0, stats.get("prompt_tokens", 0) - cached)),
            ({**labels, "source": "local_cache_hit"}, cached),
            ({**labels, "source": "external_kv_transfer"}, 0),
        ],
    )
    for name, (key, text) in _COUNTERS.items():
        yield labeled(CounterMetricFamily, f"vllm:{name}", text, [(labels, stats.get(key, 0))])
    steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens per step.", labels=tuple(labels))
    buckets = [(str(float(bound)), float(stats.get(figure, 0))) for bound, figure in FIGURES.items()]
    buckets.append(("+Inf", float(stats.get("steps", 0))))
    steps.add_metric(tuple(labels.values()), buckets, float(stats.get("computed_tokens", 0)))
    yield steps
    yield from _draft_families(stats, labels)
    config = {
        **labels,
        "block_size": str(int(stats.get("block_size", 0))),
        "num_gpu_blocks": str(int(total)),
        "num_cpu_blocks": str(int(stats.get("host_blocks_total", 0))),
    }
    yield labeled(GaugeMetricFamily, "vllm:cache_config_info", "Configuration of the KV cache.", [(config, 1)])


def _draft_families(stats: Stats, labels: Labels) -> Iterable[Metric]:
    """Families of drafts; none where nothing drafts."""
    if "spec_decode_num_drafts" not in stats:
        return
    for name, (key, text) in _DRAFT_COUNTERS.items():
        yield labeled(CounterMetricFamily, f"vllm:{name}", text, [(labels, stats.get(key, 0))])
    by_place = [({**labels, "position": str(i)}, stats.get(key, 0)) for i, key in enumerate(ACCEPTED_BY_PLACE)]
    text = "Accepted draft tokens by their position in the draft."
    yield labeled(CounterMetricFamily, "vllm:spec_decode_num_accepted_tokens_per_pos", text, by_place)


def own_families(stats: Stats) -> Iterable[Metric]:
    """Families of the project's own, summed over the engines."""
    seconds = SummaryMetricFamily("pagoda:engine_step_seconds", "Duration of engine steps.", labels=("phase",))
    model = float(stats.get("model_seconds", 0.0))
    for phase, spent in (("model", model), ("other", float(stats.get("total_seconds", 0.0)) - model)):
        seconds.add_metric((phase,), count_value=int(stats.get("steps", 0)), sum_value=max(0.0, spent))
    yield seconds
    yield labeled(
        GaugeMetricFamily,
        "pagoda:blocks",
        "KV-cache blocks by content.",
        [({"state": state}, stats.get(f"blocks_{state}", 0)) for state in ("used", "cached", "free")],
    )
    if total := stats.get("state_slots_total", 0):
        yield from _state_families(stats, total)
    yield labeled(
        CounterMetricFamily,
        "pagoda:engine_restarts",
        "Restarts of the engine.",
        [({}, stats.get("restarts", 0))],
    )
    for name, text in STORE_FIGURES.items() if "kv_store_hits" in stats else ():
        yield labeled(CounterMetricFamily, f"pagoda:{name}", text, [({}, stats[name])])
    if ranks := stats.get("ranks", 0):
        yield labeled(GaugeMetricFamily, "pagoda:ranks", "Processes that run the model together.", [({}, ranks)])
        yield labeled(
            CounterMetricFamily,
            "pagoda:rank_restarts",
            "Restarts of the ranks without the engine's.",
            [({}, stats.get("rank_restarts", 0))],
        )
        yield labeled(
            CounterMetricFamily,
            "pagoda:collective_seconds",
            "Seconds that the first rank spent in exchanges with the others, waits for them among these.",
            [({}, stats.get("collective_seconds", 0))],
        )


def _state_families(stats: Stats, total: int | float) -> Iterable[Metric]:
    """Families of models with recurrent or convolution states; vLLM counts these states as KV-cache blocks."""
    usage = stats.get("state_slots_used", 0) / total
    yield labeled(GaugeMetricFamily, "pagoda:state_slots_usage_perc", "State slots in use, 0 to 1.", [({}, usage)])
    yield labeled(
        GaugeMetricFamily,
        "pagoda:state_slots",
        "State slots by content: a sequence's state, a snapshot, nothing.",
        [({"state": state}, stats.get(f"state_slots_{state}", 0)) for state in ("used", "cached", "free")],
    )
    yield labeled(
        CounterMetricFamily,
        "pagoda:state_slots_evicted",
        "Evicted state snapshots.",
        [({}, stats.get("state_slots_evicted", 0))],
    )


def labeled(family: type[Family], name: str, text: str, samples: Sequence[tuple[Labels, int | float]]) -> Family:
    """One family of ``name`` and its samples, which have the same label names."""
    result = family(name, text, labels=tuple(samples[0][0]) if samples else ())
    for labels, value in samples:
        result.add_metric(tuple(labels.values()), value)
    return result


def histogram_family(name: str, text: str, samples: Sequence[tuple[Labels, Histogram]]) -> HistogramMetricFamily:
    """One family of histograms, which have the same label names."""
    result = HistogramMetricFamily(name, text, labels=tuple(samples[0][0]) if samples else ())
    for labels, histogram in samples:
        result.add_metric(tuple(labels.values()), histogram.buckets(), histogram.sum)
    return result


def renamed(families: Iterable[Metric], prefix: MetricsPrefix) -> Iterable[Metric]:
    """``families``, vLLM's names replaced according to ``prefix``; see ``ServerMetrics``."""
    for family in families:
        name = family.name.removeprefix("vllm:")
        own = prefix == "pagoda" or (prefix == "both" and name in AUTOSCALER_GAUGES)
        if prefix != "pagoda" or name == family.name:
            yield family
        if own and name != family.name:
            yield _named(family, f"pagoda:{name}")


def _named(family: Metric, name: str) -> Metric:
    result = Metric(name, family.documentation, family.type)
    result.samples = [s._replace(name=name + s.name.removeprefix(family.name)) for s in family.samples]
    return result
