"""vLLM's Grafana dashboards ask for metrics that a scrape has, with the labels, values and types that they use.

The expressions have the forms of those in grafana.json, performance_statistics.json, query_statistics.json and
vllm_overview.json, with every metric, label and fixed value that occurs there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

from torch_pagoda.serving.monitoring.metrics import ServerMetrics

RATE = "[$__rate_interval]"
LATENCIES = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")


def grafana() -> Iterator[str]:
    model = '{model_name="$model_name"}'
    for name in LATENCIES:
        for q in ("0.99", "0.95", "0.9", "0.5"):
            yield f"histogram_quantile({q}, sum by(le) (rate(vllm:{name}_bucket{model}{RATE})))"
        yield f"rate(vllm:{name}_sum{model}{RATE})\n/\nrate(vllm:{name}_count{model}{RATE})"
    yield f"rate(vllm:prompt_tokens_total{model}{RATE})"
    yield f"rate(vllm:generation_tokens_total{model}{RATE})"
    yield f"vllm:num_requests_running{model}"
    yield f"vllm:num_requests_waiting{model}"
    yield f"vllm:kv_cache_usage_perc{model}"
    yield f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{model}{RATE}))"
    yield f"sum by(le) (increase(vllm:request_generation_tokens_bucket{model}{RATE}))"
    yield f"sum by(finished_reason) (increase(vllm:request_success_total{model}{RATE}))"
    yield f"rate(vllm:request_queue_time_seconds_sum{model}{RATE})"
    yield f"rate(vllm:request_prefill_time_seconds_sum{model}{RATE})"
    yield f"rate(vllm:request_decode_time_seconds_sum{model}{RATE})"
    yield f"rate(vllm:request_max_num_generation_tokens_sum{model}{RATE})"


def performance_statistics() -> Iterator[str]:
    for name in LATENCIES:
        yield f"rate(vllm:{name}_sum{RATE}) / rate(vllm:{name}_count{RATE})"
        yield f"(sum(increase(vllm:{name}_sum[$__range])) / sum(increase(vllm:{name}_count[$__range])))"
        for q in ("0.99", "0.90", "0.50"):
            yield f"histogram_quantile({q}, sum by(le) (rate(vllm:{name}_bucket[$__range])))"
    yield f"rate(vllm:generation_tokens_total{RATE})"
    yield f"rate(vllm:prompt_tokens_total{RATE})"
    yield f"rate(vllm:iteration_tokens_total_count{RATE})"


def query_statistics() -> Iterator[str]:
    model = '{model_name=~"$Deployment_id"}'
    yield f"sum by (model_name) (\n  rate(vllm:request_success_total{model}{RATE})\n)"
    yield f"sum(rate(vllm:request_success_total{model}{RATE}))"
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
        for q in ("0.50", "0.90", "0.99"):
            yield f"histogram_quantile({q}, sum by(le, model_name) (rate(vllm:{name}_bucket{model}{RATE})))"
    yield f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{model}{RATE}))"
    yield f"sum(rate(vllm:prompt_tokens_total{model}{RATE}))\n/\nsum(rate(vllm:request_success_total{model}{RATE}))"
    for name in ("prompt_tokens_total", "generation_tokens_total"):
        yield f"sum by (model_name) (rate(vllm:{name}{model}{RATE}))"
        yield f"sum(rate(vllm:{name}{model}{RATE}))"


def overview() -> Iterator[str]:
    at = 'job=~"$job", model_name=~"$model_name", instance=~"$instance"'
    place = 'job=~"$job", instance=~"$instance"'

    def ratio(above: str, below: str, by: str = "sum") -> str:
        return f"{by}(rate({above}{RATE})) / ({by}(rate({below}{RATE})) > 0)"

    for name in ("request_success_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"):
        yield f"sum(rate(vllm:{name}{{{at}}}{RATE}))"
        yield f"sum by (model_name) (rate(vllm:{name}{{{at}}}[$__range]))"
    yield (
        f'(sum(rate(http_requests_total{{{place}, status="5xx"}}{RATE})) or vector(0))'
        f" / (sum(rate(http_requests_total{{{place}}}{RATE})) > 0)"
    )
    for name in (
        *LATENCIES,
        "request_time_per_output_token_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
    ):
        for q in ("0.5", "0.95", "0.99"):
            yield f"histogram_quantile({q}, sum by (le) (rate(vllm:{name}_bucket{{{at}}}{RATE})))"
        yield f"histogram_quantile(0.95, sum by (le, model_name) (rate(vllm:{name}_bucket{{{at}}}[$__range])))"
        yield ratio(f"vllm:{name}_sum{{{at}}}", f"vllm:{name}_count{{{at}}}")
    for name in ("request_prefill_time_seconds", "request_decode_time_seconds"):
        yield ratio(f"vllm:{name}_sum{{{at}}}", f"vllm:{name}_count{{{at}}}")
    for name, slo in (("time_to_first_token_seconds", "$ttft_slo"), ("request_time_per_output_token_seconds", "$t")):
        yield ratio(f'vllm:{name}_bucket{{{at}, le="{slo}"}}', f"vllm:{name}_count{{{at}}}")
    yield f"count(vllm:num_requests_running{{{at}}})"
    for name in ("num_requests_running", "num_requests_waiting"):
        yield f"sum(vllm:{name}{{{at}}})"
    for reason in ("capacity", "deferred"):
        yield f'sum(vllm:num_requests_waiting_by_reason{{{at}, reason="{reason}"}})'
    for function in ("max", "avg", "min"):
        yield f"{function}(vllm:kv_cache_usage_perc{{{at}}})"
    yield f"max by (model_name) (max_over_time(vllm:kv_cache_usage_perc{{{at}}}[$__range]))"
    yield f"round(sum by (model_name) (increase(vllm:num_preemptions_total{{{at}}}[$__range])))"
    for cache in ("prefix_cache", "external_prefix_cache", "mm_cache"):
        yield ratio(f"vllm:{cache}_hits_total{{{at}}}", f"vllm:{cache}_queries_total{{{at}}}")
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        yield f'sum(rate(vllm:prompt_tokens_by_source_total{{{at}, source="{source}"}}{RATE}))'
    success = f"vllm:request_success_total{{{at}}}{RATE}"
    yield (
        f"sum by (finished_reason) (rate({success})) / ignoring (finished_reason) group_left () "
        f"(sum(rate({success})) > 0)"
    )
    error = f'vllm:request_success_total{{{at}, finished_reason="error"}}'
    yield ratio(error, f"vllm:request_success_total{{{at}}}", "sum by (model_name) ")
    for label in ("status", "handler"):
        yield f"sum by ({label}) (rate(http_requests_total{{{place}}}{RATE}))"
    seconds = "http_request_duration_seconds"
    yield ratio(f"{seconds}_sum{{{place}}}", f"{seconds}_count{{{place}}}", "sum by (handler) ")


DASHBOARDS = [*grafana(), *performance_statistics(), *query_statistics(), *overview()]

NOT_SERVED = {"vllm:external_prefix_cache", "vllm:mm_cache"}
"""There is no such cache; vLLM has these only where one is set up, and their lines stay empty."""

OF_PROMETHEUS = {"job", "instance"}
"""Labels that a scrape adds."""


@dataclass(frozen=True)
class Use:
    """A metric as an expression uses it: by its labels, with the value where one is fixed, and as a rate or not."""

    name: str
    labels: tuple[tuple[str, str | None], ...]
    is_rate: bool


def uses(expression: str) -> Iterator[Use]:
    """The metrics that a PromQL expression reads; what it groups by is a label of each of them."""
    grouping = r"\b(?:by|ignoring|on|group_left)\s*\(([^)]*)\)"
    grouped = {label.strip() for labels in re.findall(grouping, expression) for label in labels.split(",")} - {""}
    expression = re.sub(grouping, "", expression)
    functions: list[str] = []
    for token in re.finditer(r'([A-Za-z_:][\w:]*)(\s*\()?(?:\{([^}]*)\})?|"[^"]*"|\[[^\]]*\]|[()]', expression):
        name, call, matchers = token.groups()
        if token[0] == ")":
            functions.pop()
        elif token[0] == "(":
            functions.append("")
        elif call:
            functions.append(name)
        elif name and name not in ("or", "and", "unless"):
            fixed = {
                label: None if value.startswith("$") else value
                for label, value in re.findall(r'(\w+)\s*=~?\s*"([^"]*)"', matchers or "")
            }
            labels = {**dict.fromkeys(sorted(grouped)), **fixed}
            yield Use(name, tuple(labels.items()), bool(functions) and functions[-1] in ("rate", "increase"))


def missing(scrape: str) -> list[str]:
    """A line for each use of a metric that the scrape cannot answer."""
    types: dict[str, str] = {}
    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            types[sample.name] = family.type
            samples.setdefault(sample.name, []).append(sample.labels)
    lines = []
    for use in sorted({use for expression in DASHBOARDS for use in uses(expression)}, key=str):
        if any(use.name.startswith(name) for name in NOT_SERVED):
            continue
        if use.name not in samples:
            lines.append(f"{use.name} is not there")
        elif use.is_rate != (types[use.name] in ("counter", "histogram")):
            lines.append(f"{use.name} is a {types[use.name]}")
        labels = [(label, value) for label, value in use.labels if label not in OF_PROMETHEUS]
        if not any(
            all(label in has and value in (None, has[label]) for label, value in labels)
            for has in samples.get(use.name, [])
        ):
            lines.append(f"{use.name} has no sample with {labels}")
    return lines


def scraped(prefix: str = "both") -> str:
    class Client:
        stats = {"running": 1, "steps": 3}  # noqa: RUF012 -- of this one test
        stats_of_engines = {"0": stats}  # noqa: RUF012

    metrics = ServerMetrics(Client(), "tiny", 4096, prefix)
    metrics.observe_http("/v1/completions", "POST", 500, 0.1)
    return metrics.render()[0].decode()


def test_every_expression_of_the_dashboards_finds_its_metrics():
    assert missing(scraped()) == []
    assert len(DASHBOARDS) > 100 and missing(scraped("vllm")) == []


@pytest.mark.parametrize(
    "change, found",
    [
        (("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), "kv_cache_usage_perc is not there"),
        (("model_name=", "model="), "has no sample with [('model_name', None)]"),
        (("TYPE vllm:num_preemptions_total counter", "TYPE vllm:num_preemptions_total gauge"), "total is a gauge"),
        (('finished_reason="error"', 'finished_reason="failed"'), "('finished_reason', 'error')"),
        (('status="5xx"', 'status="500"'), "('status', '5xx')"),
        (
            ("inter_token_latency_seconds", "time_per_output_token_seconds"),
            "inter_token_latency_seconds_bucket is not",
        ),
    ],
)
def test_a_change_that_would_empty_a_panel_is_found(change, found):
    assert change[0] in scraped()
    assert any(found in line for line in missing(scraped().replace(*change)))


def test_own_names_leave_the_dashboards_empty():
    assert all("vllm:" in line for line in missing(scraped("pagoda"))) and len(missing(scraped("pagoda"))) > 50


def test_an_expression_is_read():
    expression = 'sum by(le) (rate(a:b_bucket{x="1", y=~"$z"}[$__rate_interval])) / (c_count > 0) or vector(0)'
    assert list(uses(expression)) == [
        Use("a:b_bucket", (("le", None), ("x", "1"), ("y", None)), True),
        Use("c_count", (("le", None),), False),
    ]
