"""The engine process of ``pagoda serve``, with a real model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from torch_pagoda import LLM, SamplingParams
from torch_pagoda.cli.engine_process import engine_argv
from torch_pagoda.runtime.restart_limit import RestartLimit
from torch_pagoda.serving.engine_process.client import EngineDied
from torch_pagoda.serving.engine_process.process_client import ProcessClient
from torch_pagoda.serving.engine_process.supervisor import EngineProcess
from torch_pagoda.serving.engine_process.wire import Start, Submit

from toy_client import ClientLoop, merged, read_all

MODEL = str(Path(__file__).resolve().parents[2] / "examples/tiny-pydoc")
OPTIONS: dict[str, Any] = {"num_blocks": 128, "max_num_seqs": 8, "verify": "off", "codegen": "none", "max_queue": 16}
PROMPTS = ["def read(self, size=-1):\n", "Return the", "naïve 🙂 text"]


class Served(ClientLoop):
    """A client, and an engine of the same model in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.client = ProcessClient(engine_argv(), Start(MODEL, None, OPTIONS), restarts=RestartLimit(1))
        self.run(self.client.start())
        self.llm = LLM(MODEL, **OPTIONS)  # the same in this process, while the other loads
        self.run(self.client.wait_ready())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with closing(Served()) as served:
        yield served


def test_it_says_what_it_serves(served: Served) -> None:
    llm, hello = served.llm, served.client.hello
    assert hello.model == MODEL and hello.device == "cpu" and hello.max_num_seqs == 8 and hello.max_queue == 16
    assert hello.max_model_len == llm.max_model_len and hello.vocab_size == 2048
    assert hello.default_params == llm.recommended_params
    assert hello.stats["blocks_total"] == 128


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0, "max_tokens": 40},
        {"temperature": 1.2, "seed": 5, "n": 2, "max_tokens": 30, "stop": ["\n", " the"]},
        {"temperature": 1.0, "seed": 1, "max_tokens": 12, "allowed_token_ids": list(range(90, 200))},
    ],
)
def test_text_is_that_of_generate(served: Served, params: dict[str, Any], streams: bool) -> None:
    outputs = served.llm.generate(PROMPTS, SamplingParams(**params))
    prompts = [output.prompt_token_ids for output in outputs]

    async def use() -> list[Any]:
        return await read_all(served.client.submit(Submit("r", prompts, params, {}, streams)))

    assert merged(served.run(use())) == {
        (i, completion.index): (completion.text, completion.token_ids, completion.finish_reason)
        for i, output in enumerate(outputs)
        for completion in output.outputs
    }


def test_a_terminal_does_not_end_it(served: Served) -> None:
    client = served.client
    assert client.pid is not None and os.getsid(client.pid) == client.pid
    os.kill(client.pid, signal.SIGINT)
    os.kill(client.pid, signal.SIGTERM)
    served.run(client.ask("ping", timeout=60))


def test_a_model_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    async def use() -> None:
        client = ProcessClient(engine_argv(), Start("/no/such/model", None, {}))
        await client.start()
        with pytest.raises(EngineDied):
            await asyncio.wait_for(client.wait_ready(), 120)
        await client.close()

    asyncio.run(use())
    out, err = capfd.readouterr()
    assert "pagoda: error:" in err and "/no/such/model" in err and "Traceback" not in err and out == ""


@pytest.mark.parametrize(
    "said, status", [(b"", 0), (b"\xff" * 8, 65), (b"\x00\x00\x00\x01\xc1", 65), (b"\x00\x00\x00\x08\x94", 0)]
)
def test_what_it_is_not_told(said: bytes, status: int) -> None:
    async def use() -> None:
        process = EngineProcess(engine_argv())
        process.sock.sendall(said)
        if status == 0:
            process.sock.close()
        assert await asyncio.wait_for(process.wait(), 60) == status
        process.sock.close()

    asyncio.run(use())


def test_it_ends_in_whatever_it_does_when_the_other_side_is_gone() -> None:
    """It loads, or is in a long step: nobody reads the socket then."""
    code = (
        "import sys, time, torch_pagoda.cli.engine_process as it\n"
        "it._read_start = lambda sock: time.sleep(100)\n"
        "it.main(int(sys.argv[1]))"
    )

    async def use() -> None:
        process = EngineProcess([sys.executable, "-c", code])
        await asyncio.sleep(0.5)
        process.sock.close()
        assert await asyncio.wait_for(process.wait(), 60) == 0

    asyncio.run(use())
