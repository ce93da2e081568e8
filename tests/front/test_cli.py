from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_pagoda import __version__, cli

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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "x", "--max-tokens", "0"], ["max_tokens=0"]),
        (["-p", "x", "--temperature", "-1"], ["temperature=-1"]),
        (["-p", "x", "--top-p", "1.5"], ["top_p=1.5"]),
        (["-p", "x", "--device", "cuda"], ["device='cuda'"]),
        (["-p", "x", "--dtype", "int4"], ["dtype='int4'"]),
        (["-p", "x", "--kv-cache-memory", "lots"], ["kv_cache_memory='lots'"]),
        (["-p", "x", "--skip-pass", "nope"], ["nope"]),
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
    assert "holds no prompt" in run("generate", checkpoint, "-f", empty)[2]
    assert "not UTF-8" in run("generate", checkpoint, "-f", binary)[2]


def test_no_arguments_show_the_help(run: Callable[..., tuple[int, str, str]]) -> None:
    _, out, err = run()
    assert "generate" in out + err and "Usage" in out + err
