"""Runs Python with the offline Ascend toolchain: whole programs, or single functions with JSON results.

``torch_npu`` and ``torchair`` can only be imported if the loader knows the stand-in libraries when the process
begins, so an ordinary process starts another one for them.
"""

from __future__ import annotations

import importlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...compiler.targets.npu.without_device import is_offline
from .toolchain import Toolchain, environment, find_toolchain, set_up_toolchain

_logger = logging.getLogger(__name__)


class OfflineCallError(RuntimeError):
    """A function failed in a Python with the toolchain.

    Attributes:
        traceback: text of the traceback there; "" if the process died.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def run_python(arguments: Sequence[str], toolchain: Toolchain | None = None) -> int:
    """Run Python with ``arguments`` and the toolchain; returns its exit status, 128 + n if signal n ended it.

    Args:
        arguments: command-line arguments of ``python``.
        toolchain: by default the installed one; it is not built.

    Raises:
        ToolchainError: the toolchain is not installed.
    """
    toolchain = toolchain or find_toolchain()
    with subprocess.Popen([sys.executable, *arguments], env=environment(toolchain)) as process:
        while True:
            try:
                status = process.wait()
                return status if status >= 0 else 128 - status
            except KeyboardInterrupt:  # the child got it too, and decides
                continue


def call_offline(function: str, /, **arguments: Any) -> Any:
    """Call a function in a Python with the toolchain, set up if needed; returns its result.

    In such a Python, the function is called directly.

    Args:
        function: ``module:name``, importable there.
        arguments: keyword arguments; they and the result are passed as JSON, so tuples become lists.

    Raises:
        ToolchainError: the toolchain is not available.
        OfflineCallError: the function raised, or its process died.
        TypeError: an argument is not JSON.
    """
    request = json.dumps({"function": function, "arguments": arguments})
    if is_offline():
        return json.loads(json.dumps(_call(**json.loads(request))))
    toolchain = set_up_toolchain()
    with tempfile.TemporaryDirectory(prefix="pagoda_npu_") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "answer.json")
        asked.write_text(request, encoding="utf-8")
        code = f"from {__name__} import _answer; _answer(*__import__('sys').argv[1:])"
        command = [sys.executable, "-c", code, str(asked), str(answered)]
        # What libraries print must not end up between the lines of a tool that prints results.
        result = subprocess.run(command, env=environment(toolchain), stdout=subprocess.PIPE, text=True)
        _logger.debug("%s printed: %s", function, result.stdout)
        if not answered.exists():
            raise OfflineCallError(
                f"{function} returned nothing: its process ended with {_status(result.returncode)}"
            )
        answer = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in answer:
        _logger.debug("%s failed: %s", function, answer["traceback"])
        raise OfflineCallError(answer["error"], answer["traceback"])
    return answer["result"]


def _answer(asked: str, answered: str) -> None:
    """The callee's side of ``call_offline``."""
    import torch_npu  # noqa: F401  before anything defines operators of its namespace, or the process aborts

    try:
        answer = {"result": _call(**json.loads(Path(asked).read_text(encoding="utf-8")))}
        text = json.dumps(answer)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        text = json.dumps({"error": told, "traceback": traceback.format_exc()})
    Path(answered).write_text(text, encoding="utf-8")


def _call(function: str, arguments: dict[str, Any]) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
