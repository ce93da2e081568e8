"""``pagoda serve`` for ``serving.py``, writing down of each streamed token when the engine's step was made."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torch_pagoda.cli import main
from torch_pagoda.serving.engine_process.socket_client import SocketClient
from torch_pagoda.serving.engine_process.wire import Step, Submit


def watch(path: str) -> None:
    """Append a line for each delta with text: the beginning of its prompt, its characters, and ``Step.time``.

    Lines are written when the engine falls idle; a step costs no more than it takes to note its numbers.
    """
    prompts: dict[str, list[int]] = {}
    noted: list[tuple[float, str, int]] = []
    submit, take = SocketClient.submit, SocketClient._take_step

    def submit_and_note(self: SocketClient, message: Submit) -> Any:
        prompts[message.request_id] = message.prompts[0][:8]
        return submit(self, message)

    def take_and_note(self: SocketClient, step: Step) -> None:
        noted.extend([(step.time, delta.request_id, len(delta.text)) for delta in step.deltas if delta.text])
        take(self, step)
        if step.stats is not None and not self._streams:
            with open(path, "a") as log:
                for made, request_id, characters in noted:
                    row = {"prompt": json.dumps(prompts[request_id]), "characters": characters, "time": made}
                    log.write(json.dumps(row) + "\n")
            noted.clear()

    SocketClient.submit = submit_and_note  # type: ignore[method-assign]
    SocketClient._take_step = take_and_note  # type: ignore[method-assign]


if __name__ == "__main__":
    watch(os.environ["PAGODA_BENCHMARK_STEPS"])
    main(["serve", *sys.argv[1:]])
