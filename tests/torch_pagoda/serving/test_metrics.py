"""A server's metrics add up to what happened, and nobody outside can make labels."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Route
from toy_state_program import ToyStateProgram

from torch_pagoda.runtime.block_store.traffic import FIGURES
from torch_pagoda.runtime.requests.sampling_params import SamplingParams
from torch_pagoda.serving.engine_process.wire import RequestTimes
from torch_pagoda.serving.monitoring.histogram import Histogram, one_two_five
from torch_pagoda.serving.monitoring.metrics import MAX_HANDLERS, ServerMetrics, metrics_endpoint
from torch_pagoda.serving.monitoring.request_record import PromptRecord, RequestRecord

from toy_client import toy_engine


class Client:
    """The engine's figures, as far as metrics read them."""

    def __init__(self, **stats: float) -> None:
        self.stats = stats

    @property
    def stats_of_engines(self) -> dict[str, dict[str, float]]:
        return {"0": self.stats}


def served(**stats: float) -> ServerMetrics:
    return ServerMetrics(Client(**stats), "tiny", 1000)


def record(*prompts: PromptRecord, **fields) -> RequestRecord:
    given = {"request_id": "r", "endpoint": "/v1/completions", "model": "tiny", "status": 200, "arrival": 0.0}
    return RequestRecord(**{**given, "seconds": 9.0, "prompts": prompts, **fields})


def values(metrics: ServerMetrics) -> dict[tuple[str, frozenset], float]:
    families = text_string_to_metric_families(metrics.render()[0].decode())
    common = {"model_name", "engine"}
    return {
        (s.name, frozenset(item for item in s.labels.items() if item[0] not in common)): s.value
        for family in families
        for s in family.samples
    }


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    return values(metrics)[name, frozenset(labels.items())]


def test_sums_and_counts_are_those_of_the_records():
    metrics = served()
    metrics.observe(
        record(
            PromptRecord(100, 64, (5, 9), ("stop", "length"), RequestTimes(0.25, 0.5, 1.5, 14, 1)),
            PromptRecord(1, 0, (1, 1), ("stop", "error"), RequestTimes(0.75, 0.25, 0.0, 2, 0)),
            n=2,
            max_tokens=9,
            first_token_seconds=0.8,
        )
    )
    metrics.observe(record(PromptRecord(7, 0, (3,), (None,)), status=499, disconnected=True, seconds=4.0))
    metrics.observe_inter_token_latency(0.02)
    metrics.observe_inter_token_latency(0.5, 3)
    expected = {
        "vllm:request_prompt_tokens": (3, 108),
        "vllm:request_generation_tokens": (5, 19),
        "vllm:request_max_num_generation_tokens": (3, 13),
        "vllm:request_params_n": (3, 5),
        "vllm:request_params_max_tokens": (2, 18),
        "vllm:request_queue_time_seconds": (2, 1.0),
        "vllm:request_prefill_time_seconds": (2, 0.75),
        "vllm:request_decode_time_seconds": (2, 1.5),
        "vllm:request_inference_time_seconds": (2, 2.25),
        "vllm:time_to_first_token_seconds": (2, 1.75),
        "vllm:e2e_request_latency_seconds": (3, 2.25 + 1.0 + 4.0),
        "vllm:request_time_per_output_token_seconds": (2, 1.5 * 2 / 12),
        "vllm:inter_token_latency_seconds": (4, 1.52),
        "pagoda:http_ttft_seconds": (1, 0.8),
    }
    found = {
        name: (value(metrics, f"{name}_count"), pytest.approx(value(metrics, f"{name}_sum"))) for name in expected
    }
    assert found == expected
    reasons = {
        r: value(metrics, "vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "error")
    }
    assert reasons == {"stop": 2, "length": 1, "error": 1}
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "pagoda:disconnects_total") == 1


def test_what_was_refused_is_no_finished_request():
    metrics = served()
    metrics.observe(record(PromptRecord(5, 0, (0,), (None,)), status=429, error_code="queue_full"))
    metrics.observe(record(status=400))
    metrics.refused("queue_full")
    assert value(metrics, "vllm:request_prompt_tokens_count") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(metrics, "pagoda:requests_refused_total", reason="queue_full") == 1


def test_a_bucket_holds_what_lies_at_its_bound():
    histogram = Histogram((0.1, 1))
    for seconds, count in ((0.05, 1), (0.1, 2), (0.5, 1), (1.0, 1), (7.0, 4)):
        histogram.observe(seconds, count)
    assert histogram.buckets() == [("0.1", 3.0), ("1.0", 5.0), ("+Inf", 9.0)]
    assert histogram.sum == pytest.approx(29.75)


@pytest.mark.parametrize(
    "maximum, bounds",
    [(1, (1,)), (4, (1, 2)), (10, (1, 2, 5, 10)), (100, (1, 2, 5, 10, 20, 50, 100)), (7, (1, 2, 5))],
)
def test_bounds_for_numbers_of_tokens(maximum, bounds):
    assert one_two_five(maximum) == bounds


def test_the_engines_figures_are_read_at_the_scrape():
    metrics = served(
        running=3,
        queue_length=5,
        blocks_total=10,
        blocks_used=4,
        blocks_cached=1,
        prefix_query_tokens=50,
        prefix_hit_tokens=20,
        prompt_tokens=60,
        cached_tokens=20,
        generated_tokens=17,
        preemptions=2,
        steps=6,
        steps_up_to_1=1,
        steps_up_to_16=3,
        steps_up_to_16384=5,
        computed_tokens=77,
        model_seconds=1.5,
        total_seconds=2.0,
        restarts=1,
    )
    expected = {
        "vllm:num_requests_running": 3,
        "pagoda:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.4,
        "vllm:prefix_cache_queries_total": 50,
        "vllm:prefix_cache_hits_total": 20,
        "vllm:prompt_tokens_total": 60,
        "vllm:generation_tokens_total": 17,
        "vllm:num_preemptions_total": 2,
        "vllm:iteration_tokens_total_count": 6,
        "vllm:iteration_tokens_total_sum": 77,
        "pagoda:engine_restarts_total": 1,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 40
    sizes = {"1.0": 1, "16.0": 3, "16384.0": 5, "+Inf": 6}
    bucket = "vllm:iteration_tokens_total_bucket"
    assert {bound: value(metrics, bucket, le=bound) for bound in sizes} == sizes
    bounds = {float(dict(labels)["le"]) for name, labels in values(metrics) if name == bucket}
    assert bounds == {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, float("inf")}
    assert value(metrics, "pagoda:blocks", state="cached") == 1
    assert value(metrics, "pagoda:engine_step_seconds_sum", phase="other") == 0.5
    metrics._client.stats = {"running": 0}
    assert value(metrics, "vllm:num_requests_running") == 0


def test_ranks_are_counted_where_there_are_several():
    found = values(served(ranks=2, rank_restarts=3, collective_seconds=1.5))
    names = {name: amount for (name, _), amount in found.items() if "rank" in name or "collective" in name}
    of_ranks = {"pagoda:ranks": 2, "pagoda:rank_restarts_total": 3}
    assert names == {**of_ranks, "pagoda:collective_seconds_total": 1.5}
    assert not [name for name, _ in values(served(**toy_engine().stats())) if "rank" in name]


def test_a_kv_store_is_counted_where_there_is_one():
    figures = dict.fromkeys(FIGURES, 0) | {"kv_store_hits": 5, "kv_store_read_bytes": 7}
    found = {name: amount for (name, _), amount in values(served(**figures)).items() if "kv_store" in name}
    assert found == {f"pagoda:{name}_total": amount for name, amount in figures.items()}
    assert not [name for name, _ in values(served(**toy_engine().stats())) if "kv_store" in name]


def test_drafts_are_counted_by_vllms_names():
    figures = {"spec_decode_num_drafts": 3, "spec_decode_num_draft_tokens": 9, "spec_decode_num_accepted_tokens": 5}
    places = {f"spec_decode_num_accepted_tokens_pos_{i}": count for i, count in enumerate([3, 2, 0, 0, 0, 0, 0])}
    found = values(served(**figures, **places))
    drafts = {
        (name, dict(labels).get("position")): amount for (name, labels), amount in found.items() if "spec_" in name
    }
    assert drafts.pop(("vllm:spec_decode_num_drafts_total", None)) == 3
    assert drafts.pop(("vllm:spec_decode_num_draft_tokens_total", None)) == 9
    assert drafts.pop(("vllm:spec_decode_num_accepted_tokens_total", None)) == 5
    by_place = [drafts.pop(("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i))) for i in range(7)]
    assert by_place == [3, 2, 0, 0, 0, 0, 0] and not drafts
    assert not [
        name for name, _ in values(served(**toy_engine(draft_forced_tokens=False).stats())) if "spec_" in name
    ]


def test_slots_of_states_are_gauges_of_models_that_have_them():
    engine = toy_engine(ToyStateProgram(), max_num_seqs=4)

    def samples() -> dict[str, float]:
        found = values(served(**engine.stats()))
        names = {" ".join([name, *dict(labels).values()]): v for (name, labels), v in found.items()}
        return {name.removeprefix("pagoda:state_slots"): v for name, v in names.items() if "state_slots" in name}

    total = engine.stats()["state_slots_total"]
    for _ in range(2):
        engine.submit(list(range(1, 10)), SamplingParams(max_tokens=9, ignore_eos=True))
    while engine.stats()["state_slots_used"] < 2:
        engine.step()
    during = samples()
    assert during[" used"] == 2 and during["_usage_perc"] == 2 / total
    assert sum(during[f" {state}"] for state in ("used", "cached", "free")) == total
    while engine.has_unfinished():
        engine.step()
    after = samples()
    assert after[" used"] == after["_usage_perc"] == after["_evicted_total"] == 0
    assert not [name for name, _ in values(served(**toy_engine().stats())) if "state_slots" in name]


@pytest.mark.parametrize("prefix", ["both", "vllm", "pagoda"])
def test_names_have_the_prefix_that_was_asked_for(prefix):
    metrics = ServerMetrics(Client(), "tiny", 100, prefix)
    names = {name for name, _ in values(metrics)}
    vllm = {name for name in names if name.startswith("vllm:")}
    assert bool(vllm) == (prefix != "pagoda")
    assert ("pagoda:kv_cache_usage_perc" in names) == (prefix != "vllm")
    assert ("pagoda:request_prompt_tokens_sum" in names) == (prefix == "pagoda")
    assert {"pagoda:disconnects_total", "pagoda:event_loop_lag_seconds_count"} <= names


def test_an_unknown_prefix_is_refused():
    with pytest.raises(ValueError, match=r"prefix='sglang': use one of \('both', 'vllm', 'pagoda'\)"):
        ServerMetrics(Client(), "tiny", 100, "sglang")


def test_labels_stay_few_and_the_text_whole_under_hostile_input():
    metrics = served()
    hostile = 'x"} 1\nvllm:prompt_tokens_total 99\n'
    before = len(values(metrics))
    for i in range(2000):
        metrics.observe_http(f"/{hostile}{i}", f"{hostile}{i}", 200 + i, 0.01)
        metrics.refused(f"{hostile}{i}")
        metrics.observe(record(PromptRecord(1, 0, (1,), (f"{hostile}{i}",)), model=hostile, request_id=hostile))
    after = values(metrics)
    # Of each route: a count for each of five classes of status, and five lines of a histogram.
    assert len(after) - before <= (MAX_HANDLERS + 1) * (6 + 6)
    assert value(metrics, "vllm:prompt_tokens_total") == 0
    assert value(metrics, "pagoda:requests_refused_total", reason="other") == 2000
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 2000
    assert sum(v for (name, _), v in after.items() if name == "http_requests_total") == 2000


def test_responses_are_counted_by_route_method_and_class_of_status():
    metrics = served()
    for status in (200, 201, 404, 503):
        metrics.observe_http("/v1/models/{id}", "GET", status, 0.25)
    metrics.observe_http(None, "BREW", 404, 0.25)
    route = {"handler": "/v1/models/{id}", "method": "GET"}
    assert value(metrics, "http_requests_total", status="2xx", **route) == 2
    assert value(metrics, "http_requests_total", status="5xx", **route) == 1
    assert value(metrics, "http_request_duration_seconds_sum", **route) == 1.0
    assert value(metrics, "http_requests_total", status="4xx", handler="none", method="other") == 1


class TestRoute:
    ACCEPT: ClassVar = {
        "": "text/plain; version=0.0.4; charset=utf-8",
        "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1": (
            "application/openmetrics-text; version=1.0.0; charset=utf-8"
        ),
    }

    @pytest.mark.parametrize("accept", ACCEPT)
    def test_both_formats_parse_and_keep_the_colons(self, accept):
        app = Starlette(routes=[Route("/metrics", metrics_endpoint(served(prompt_tokens=12)))])

        async def get() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
                return await client.get("/metrics", headers={"accept": accept})

        response = asyncio.run(get())
        assert response.status_code == 200 and response.headers["content-type"] == self.ACCEPT[accept]
        parse = open_metrics if accept else text_string_to_metric_families
        samples = {s.name: s.value for family in parse(response.text) for s in family.samples}
        assert samples["vllm:prompt_tokens_total"] == 12

    def test_only_work_that_is_counted_has_a_name(self):
        metrics = served()
        metrics.observe_grammar(0.5)
        parts = {key: v for key, v in values(metrics).items() if key[0] == "pagoda:grammar_seconds_sum"}
        assert parts == {("pagoda:grammar_seconds_sum", frozenset({("part", "compile")})): 0.5}

    def test_servers_count_apart(self):
        first, second = served(), served()
        first.refused("draining")
        assert value(first, "pagoda:requests_refused_total", reason="draining") == 1
        assert value(second, "pagoda:requests_refused_total", reason="draining") == 0


def test_a_blocked_event_loop_shows():
    metrics = served()

    async def block() -> None:
        sampler = asyncio.create_task(metrics.sample_event_loop_lag(0.01))
        await asyncio.sleep(0.005)
        time.sleep(0.3)
        await asyncio.sleep(0.05)
        sampler.cancel()

    asyncio.run(block())
    assert value(metrics, "pagoda:event_loop_lag_seconds_sum") > 0.2
