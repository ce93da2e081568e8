"""``pagoda serve`` for ``serving.py``, writing down of each streamed token when the engine's step was made."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torch_pagoda.cli import main
from torch_pagoda.runtime.serving.engine_process.socket_client import SocketClient
from torch_pagoda.runtime.serving.engine_process.wire import Step, Submit


def watch(path: str) -> None:
    """Append a line for each delta with text: the beginning of its prompt, its characters, and ``Step.time``."""
    log = open(path, "a", buffering=1 << 20)  # noqa: SIM115
    prompts: dict[str, list[int]] = {}
    submit, take = SocketClient.submit, SocketClient._take_step

    def submit_and_note(self: SocketClient, message: Submit) -> Any:
        prompts[message.request_id] = message.prompts[0][:8]
        return submit(self, message)

    def take_and_note(self: SocketClient, step: Step) -> None:
        for delta in step.deltas:
            if delta.text:
                row = {"prompt": json.dumps(prompts[delta.request_id]), "characters": len(delta.text)}
                log.write(json.dumps(row | {"time": step.time}) + "\n")
        if step.stats is not None:  # now and then, and when the engine falls idle
            log.flush()
        take(self, step)

    SocketClient.submit = submit_and_note  # type: ignore[method-assign]
    SocketClient._take_step = take_and_note  # type: ignore[method-assign]


if __name__ == "__main__":
    watch(os.environ["PAGODA_BENCHMARK_STEPS"])
    main(["serve", *sys.argv[1:]])
