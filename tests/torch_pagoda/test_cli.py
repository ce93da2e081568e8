from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torch_pagoda import LLM, RequestOutput, __version__, cli

FAST = [
    "--verify",
    "off",
    "--codegen",
    "none",
    "--block-size",
    "4",
    "--num-blocks",
    "64",
    "--max-tokens",
    "5",
]


def test_version_and_help(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("--version") == (0, f"pagoda {__version__}\n", "")
    status, out, _ = run("--help")
    assert status == 0 and "generate" in out and "paged KV cache" in " ".join(out.split())
    status, out, _ = run("generate", "--help")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert status == 0
    for option in (
        "--prompt",
        "--prompts-file",
        "--max-tokens",
        "--temperature",
        "--json",
        "--kv-cache-memory",
    ):
        assert option in plain


def test_text_of_prompts_and_a_summary_without_a_bar(
    run: Callable[..., tuple[int, str, str]], checkpoint: Path
) -> None:
    status, out, err = run("generate", checkpoint, "--prompt", "the cat", "-p", "one [two]", *FAST)
    assert status == 0
    assert out.startswith("the cat") and "one [two]" in out
    assert re.fullmatch(r"2 prompts, 10 tokens in [\d.]+ s \([\d.]+ tok/s\)", err.strip())


def test_json_lines_from_a_file(run: Callable[..., tuple[int, str, str]], checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("the cat\n\nthe mat\n", encoding="utf-8")
    status, out, _ = run("generate", checkpoint, "--prompts-file", file, "--json", "-n", "2", "--seed", "3", *FAST)
    assert status == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == ["the cat", "the mat"]
    for line in lines:
        assert len(line["outputs"]) == 2 and line["time_to_first_token"] > 0
        assert all(len(o["token_ids"]) == 5 and o["finish_reason"] == "length" for o in line["outputs"])


def test_sampling_with_a_seed_repeats(run: Callable[..., tuple[int, str, str]], checkpoint: Path) -> None:
    call = ("generate", checkpoint, "-p", "the", "--temperature", "2", "--seed", "5", *FAST)
    first, second, other = run(*call)[1], run(*call)[1], run(*call, "--seed", "6")[1]
    assert first == second != other


def test_rules_for_tokens_reach_the_sampler(run: Callable[..., tuple[int, str, str]], checkpoint: Path) -> None:
    def tokens(*options: str) -> list[int]:
        status, out, err = run("generate", checkpoint, "-p", "the", "--json", *options, *FAST)
        assert status == 0, err
        ids: list[int] = json.loads(out)["outputs"][0]["token_ids"]
        return ids

    plain = tokens()
    assert tokens("--allowed-token-ids", "5", "--allowed-token-ids", "6", "--ignore-eos") != plain
    assert set(tokens("--allowed-token-ids", "5", "--allowed-token-ids", "6", "--ignore-eos")) <= {5, 6}
    assert tokens("--logit-bias", "7:100", "--logit-bias", "8:-3.5", "--ignore-eos") == [7] * 5
    penalized = ["--frequency-penalty", "2", "--presence-penalty", "2", "--allowed-token-ids", "5"]
    assert set(tokens("--logit-bias", "7:1", *penalized, "--allowed-token-ids", "6", "--ignore-eos")) == {5, 6}


def test_logprobs_come_with_json(run: Callable[..., tuple[int, str, str]], checkpoint: Path) -> None:
    _, out, _ = run("generate", checkpoint, "-p", "the", "--json", "--logprobs", "2", *FAST)
    completion = json.loads(out)["outputs"][0]
    assert len(completion["logprobs"]) == len(completion["token_ids"])
    for token, entry in zip(completion["token_ids"], completion["logprobs"], strict=True):
        assert entry[str(token)]["rank"] == 1 and entry[str(token)]["logprob"] < 0


def test_figures_are_printed_when_asked_for(run: Callable[..., tuple[int, str, str]], checkpoint: Path) -> None:
    same = ["-p", "the cat sat on the mat", "-p", "the cat sat on the mat"]
    status, out, err = run("generate", checkpoint, *same, "--max-num-seqs", "1", "--json", "--stats", *FAST)
    assert status == 0, err
    cached = [json.loads(line)["cached_tokens"] for line in out.splitlines()]
    assert cached[0] == 0 < cached[1]
    rows = dict(line.rsplit(maxsplit=1) for line in err.splitlines() if re.fullmatch(r"\w+ +[\d.]+ *", line))
    assert int(rows["prefix_hit_tokens"]) == cached[1]
    assert rows["blocks_total"] == "64"
    assert sum(int(rows[f"blocks_{state}"]) for state in ("used", "cached", "free")) == 64
    assert re.search(r"^prefix_hit_rate +[\d.]+ %", err, re.MULTILINE)

    _, out, err = run("generate", checkpoint, *same, "--no-enable-prefix-caching", "--json", "--stats", *FAST)
    assert [json.loads(line)["cached_tokens"] for line in out.splitlines()] == [0, 0]
    assert re.search(r"^blocks_cached +0", err, re.MULTILINE)


def test_scheduling_options_reach_the_engine(
    run: Callable[..., tuple[int, str, str]], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    make, generate = LLM.__init__, LLM.generate

    def noted_make(self: LLM, *arguments: Any, **options: Any) -> None:
        seen.update(options)
        make(self, *arguments, **options)

    def noted_generate(self: LLM, *arguments: Any, **options: Any) -> list[RequestOutput]:
        seen.update(options)
        return generate(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", noted_make)
    monkeypatch.setattr(LLM, "generate", noted_generate)
    wanted = {
        "policy": "priority",
        "preemption": "swap",
        "npu_warmup": "lazy",
        "swap_space": "1MiB",
        "max_queue": 2,
        "min_kv_cache_memory": "16KiB",
        "priority": [1, 0],
        "client": "me",
        "deadline": 60.0,
    }
    options = ["--async-scheduling"]
    for name, value in wanted.items():
        for each in value if isinstance(value, list) else [value]:
            options += [f"--{name.replace('_', '-')}", str(each)]
    status, _, err = run("generate", checkpoint, "-p", "the", "-p", "a", *options, "--batch-invariant", *FAST)
    assert status == 0, err
    assert {name: seen[name] for name in wanted} == wanted
    assert seen["batch_invariant"] is True and seen["async_scheduling"] is True
    assert run("generate", checkpoint, "-p", "the", "--swap-space", "0", *FAST)[0] == 0
    status, _, err = run("generate", checkpoint, "-p", "the", "--static-decode", *FAST)
    assert status == 2 and "static_decode=True cannot be used with codegen='none'" in " ".join(err.split())
    status, _, err = run("generate", checkpoint, "-p", "the", "--schedule", '{"streams": true}', *FAST)
    assert status == 2 and "schedule={'streams': True} cannot be used with target='cpu'" in " ".join(err.split())


def test_first_in_the_order_of_priority_comes_first(
    run: Callable[..., tuple[int, str, str]], checkpoint: Path
) -> None:
    order = ["--policy", "priority", "--max-num-seqs", "1", "--priority", "5", "--priority", "1"]
    status, out, _ = run("generate", checkpoint, "-p", "the", "-p", "a", "--json", *order, *FAST)
    late, early = (json.loads(line)["latency"] for line in out.splitlines())
    assert status == 0 and early < late


def test_a_prompt_at_its_deadline_is_named(run: Callable[..., tuple[int, str, str]], checkpoint: Path) -> None:
    status, _, err = run("generate", checkpoint, "-p", "the", "--deadline", "1e-9", *FAST)
    assert status == 0 and "prompt 0 reached its deadline" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "x", "--policy", "lifo"], ["policy='lifo'", "'fcfs'", "'sjf'"]),
        (["-p", "x", "--preemption", "kill"], ["preemption='kill'", "'recompute'", "'swap'"]),
        (["-p", "x", "--preemption", "swap"], ["preemption='swap'", "swap_space=0", "raise it"]),
        (["-p", "x", "--swap-space", "much"], ["swap_space='much'", "512MiB"]),
        (["-p", "x", "--max-queue", "0"], ["max_queue=0", "at least 1"]),
        (["-p", "the", "-p", "a", "--max-queue", "1"], ["max_queue=1", "raise max_queue"]),
        (["-p", "x", "--min-kv-cache-memory", "little"], ["min_kv_cache_memory='little'"]),
        (
            ["-p", "the", "--min-kv-cache-memory", "4GiB"],
            ["min_kv_cache_memory='4GiB'", "the KV cache", "lower it"],
        ),
        (["-p", "x", "--kv-cache-dtype", "int2"], ["kv_cache_dtype='int2'", "int8"]),
        (["-p", "x", "--deadline", "0"], ["deadline=0", "seconds"]),
        (["-p", "x", "--deadline", "nan"], ["deadline=nan", "seconds"]),
        (["-p", "x", "--priority", "1", "--priority", "2"], ["priority has 2 entries for 1 prompts"]),
        (["-p", "x", "--client", "a", "--client", "b"], ["client has 2 entries for 1 prompts"]),
        (["-p", "x", "--max-tokens", "-1"], ["max_tokens=-1"]),
        (["-p", "x", "--temperature", "-1"], ["temperature=-1"]),
        (["-p", "x", "--top-p", "1.5"], ["top_p=1.5"]),
        (["-p", "x", "--presence-penalty", "3"], ["presence_penalty=3"]),
        (["-p", "x", "--frequency-penalty", "-3"], ["frequency_penalty=-3"]),
        (["-p", "x", "--logit-bias", "5=3"], ["--logit-bias 5=3", "ID:BIAS"]),
        (["-p", "x", "--logit-bias", "5:300"], ["logit_bias[5]=300"]),
        (["-p", "x", "--logit-bias", "99999:1"], ["99999", "vocabulary"]),
        (["-p", "x", "--allowed-token-ids", "99999"], ["99999", "vocabulary"]),
        (["-p", "x", "--bad-words", ""], ["bad_words"]),
        (["-p", "x", "--logprobs", "2"], ["--logprobs requires --json"]),
        (["-p", "x", "--prompt-logprobs", "2"], ["--prompt-logprobs requires --json"]),
        (["-p", "x", "--device", "cuda"], ["device='cuda'"]),
        (["-p", "x", "--dtype", "int4"], ["dtype='int4'"]),
        (["-p", "x", "--kv-cache-memory", "lots"], ["kv_cache_memory='lots'"]),
        (["-p", "x", "--skip-pass", "nope"], ["nope"]),
        (["-p", "x", "--npu-warmup", "later"], ["npu_warmup='later'", "'full' or 'lazy'"]),
        (["-p", "x", "--npu-options", "{"], ["--npu-options is not JSON"]),
        (["-p", "x", "--npu-options", "[1]"], ["--npu-options is not a JSON object"]),
        (["-p", "x", "--npu-options", '{"static_kernel": true}'], ["npu_options={'static_kernel': True}", "npu"]),
        (["-p", "x", "--max-tokens", "many"], ["--max-tokens"]),
        (["-p", "x", "--no-such-option"], ["--no-such-option"]),
        (["-p", ""], ["prompt"]),
        ([], ["--prompt"]),
        (["--prompts-file", "/no/such/file"], ["/no/such/file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_mistakes_are_one_line_on_stderr(
    run: Callable[..., tuple[int, str, str]], checkpoint: Path, arguments: list[str], words: list[str]
) -> None:
    fast = FAST[:-2] if "--max-tokens" in arguments else FAST
    status, out, err = run("generate", checkpoint, *fast, *arguments)
    assert status == 2 and out == ""
    assert err.startswith("pagoda: error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def test_missing_model_is_one_line_and_debug_shows_the_traceback(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    status, _, err = run("generate", tmp_path / "nothing", "-p", "x")
    assert status == 2 and "does not exist" in err and err.count("\n") == 1
    with pytest.raises(ValueError, match="does not exist"):
        cli.main(["generate", str(tmp_path / "nothing"), "-p", "x", "--debug"])


def test_a_file_without_prompts_and_one_that_is_no_text(
    run: Callable[..., tuple[int, str, str]], checkpoint: Path, tmp_path: Path
) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary"
    empty.write_text("\n \n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert "has no prompts" in run("generate", checkpoint, "-f", empty)[2]
    assert "not UTF-8" in run("generate", checkpoint, "-f", binary)[2]


def test_no_arguments_show_the_help(run: Callable[..., tuple[int, str, str]]) -> None:
    _, out, err = run()
    assert "generate" in out + err and "Usage" in out + err
