"""What ``pagoda`` does where nothing is asked of it, and where its output cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from torch_pagoda.cli.errors import one_line_errors

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", [(), ("npu",)], ids=["pagoda", "pagoda npu"])
def test_a_command_alone_prints_its_help(run: Run, command: tuple[str, ...]) -> None:
    status, out, err = run(*command)
    assert status == 2 and err == ""
    assert out.lstrip().startswith(f"Usage: {' '.join(('pagoda', *command))}") and "Commands" in out


def _run(arguments: list[str], stdout: Any, **environment: str) -> tuple[int, str]:
    code = f"from torch_pagoda import cli; cli.main({arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["plan", "--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_stdout_ends_in_one_line(arguments: list[str], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        status, err = _run(arguments, full, PYTHONUNBUFFERED=unbuffered)
    assert (status, err) == (1, f"pagoda: error: could not write the output: {os.strerror(errno.ENOSPC)}\n")


@pytest.mark.parametrize("arguments", [["--version"], ["plan", "--help"]], ids=" ".join)
def test_a_reader_that_is_gone_is_no_error_worth_a_word(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        status, err = _run(arguments, writer)
    finally:
        os.close(writer)
    assert (status, err) == (1, "")


def test_commands_leave_errors_of_output_to_the_end_and_report_those_of_input() -> None:
    with pytest.raises(OSError, match="no room"), one_line_errors(debug=False):
        raise OSError(errno.ENOSPC, "no room")
    with pytest.raises(Exception) as ended, one_line_errors(debug=False):
        raise OSError(errno.ENOSPC, "no room", "a_file_that_is_named")
    assert getattr(ended.value, "exit_code", None) == 2
