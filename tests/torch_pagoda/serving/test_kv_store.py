"""``pagoda serve --kv-store``: a second server takes the blocks of the first."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import openai

from served import PATIENCE, Served

PROMPT = "Return a list of all names that the module defines, " * 6
TERMS: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}


def ask(served: Served) -> tuple[str, int]:
    """The text, and the cached tokens of the prompt."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", timeout=PATIENCE, max_retries=0) as client:
        answer = client.completions.create(prompt=PROMPT, **TERMS)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_second_server_reads_what_the_first_has_computed(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    # A slow machine may take longer than the default to read a block: the answer waits, or nothing is compared.
    store = ("--kv-store", f"folder://{folder}", "--kv-store-write", "all", "--kv-store-wait", "60")
    options = (*store, "--dtype", "float32", "--block-size", "4", "--served-model-name", "tiny")
    first = Served(*options)
    try:
        text, cached = ask(first)
        assert cached == 0 and first.figure("pagoda:kv_store_hits_total") == 0
        end = time.monotonic() + PATIENCE
        while not first.figure("pagoda:kv_store_written_bytes_total"):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert first.stop() == 0
    finally:
        first.kill()
    assert any(os.scandir(folder))
    second = Served(*options)
    try:
        again, cached = ask(second)
        assert again == text
        hits = second.figure("pagoda:kv_store_hits_total")
        assert cached == 4 * hits > 0
        assert second.figure("pagoda:kv_store_read_bytes_total") > 0
        assert second.figure("pagoda:kv_store_damaged_total") == 0
        assert second.stop() == 0
    finally:
        second.kill()
