"""One server, and each client in an environment of its own; what cannot be installed is skipped with pip's reason.

Environments are made once, in ``$TORCH_PAGODA_CACHE/clients``. To see what each client did::

    pytest -m acceptance -n 0 tests/acceptance/clients
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_pagoda.runtime.private_folder import cache_folder

from served import PATIENCE, ROOT, Served

# Last: benchmarks/coverage.py must not hide the package of that name.
sys.path.append(str(ROOT / "benchmarks"))

from environments import CommandFailed, python_of

PROGRAMS = Path(__file__).with_name("programs")
CLIENTS = {
    "langchain-openai": ["langchain-openai==1.7.4"],
    "litellm": ["litellm==1.110.2"],
    "anthropic": ["anthropic==2.13.0"],
    "lm-eval": ["lm-eval[api]==0.4.13"],
}
NEED_TORCH = {"lm-eval"}
Client = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    # In float32, texts do not depend on what else runs or is cached.
    options = ("--dtype", "float32", "--served-model-name", "tiny", "--tool-call-parser", "hermes")
    served = Served(*options, "--chat-template", str(ROOT / "examples" / "chatml.jinja"))
    yield served
    served.kill()


@pytest.fixture(scope="session")
def run_client() -> Client:
    """``run_client(client, *arguments)`` runs the Python of a client's environment; it must end with status 0."""

    def run(client: str, *arguments: str, cwd: Path | None = None, **variables: str) -> Any:
        try:
            python = python_of(cache_folder() / "clients" / client, _requirements(client))
        except CommandFailed as error:
            pytest.skip(str(error))
        unwanted = ("OPENAI_", "ANTHROPIC_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        env |= {"NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
        command = [str(python), "-I", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5 * PATIENCE, cwd=cwd, env=env)
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-4_000:]
        return done

    return run


@pytest.fixture
def found_by(run_client: Client, server: Served) -> Callable[[str, str], Any]:
    """``found_by(client, program)`` runs a program of ``programs/`` against the server; what it says it was given."""

    def found(client: str, program: str) -> Any:
        done = run_client(client, str(PROGRAMS / program), server.url)
        return json.loads(done.stdout.splitlines()[-1])

    return found


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``report(client, version, did, result)``: a row of the table at the end."""

    def row(*cells: str) -> None:
        record_property("acceptance", cells)

    return row


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        value
        for passed in terminalreporter.stats.get("passed", [])
        for name, value in passed.user_properties
        if name == "acceptance"
    ]
    for cells in [("client", "version", "did", "result"), ("---",) * 4, *rows] if rows else []:
        terminalreporter.write_line(f"| {' | '.join(cells)} |")


def _requirements(client: str) -> list[str]:
    """With the releases of the project where a client needs torch."""
    if client not in NEED_TORCH:
        return CLIENTS[client]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    return [*CLIENTS[client], *(pin for pin in pins if pin.startswith(("torch==", "transformers==", "accelerate==")))]
