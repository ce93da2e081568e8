"""What a terminal shows of a compilation, and a pipe does not."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import torch_pagoda as pagoda
from torch_pagoda.cli.phases import show_phases
from torch_pagoda.compiler import CompileOptions
from torch_pagoda.compiler.build import build_program
from torch_pagoda.runtime import phases
from torch_pagoda.runtime.phases import logged, note, phase, timed, watched

from tiny_models import build_tiny_model

Run = Callable[..., tuple[int, str, str]]


class Terminal:
    """A pseudo-terminal of 80 columns."""

    def __init__(self) -> None:
        self._reader, writer = os.openpty()
        os.set_blocking(self._reader, False)
        self.stream = os.fdopen(writer, "w")

    def sent(self) -> str:
        """What was written to it since the last call."""
        self.stream.flush()
        parts = []
        with suppress(BlockingIOError):
            while part := os.read(self._reader, 1 << 16):
                parts.append(part)
        return b"".join(parts).decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self._reader)


@contextmanager
def stderr_on_a_terminal() -> Iterator[Terminal]:
    """Makes stderr a terminal. Not a fixture: pytest puts its own stderr back before a test begins."""
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal()
        patch.setattr(sys, "stderr", terminal.stream)
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "80")
        yield terminal
    terminal.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\u00a0", " ")


def test_phases_are_told_and_nest() -> None:
    told: list[str] = []
    with watched(told.append), phase("passes"):
        with phase("verify"), phase("verify"), phase("kernels"):
            pass
        with pytest.raises(ValueError), phase("aten"):
            raise ValueError
    with phase("nobody watches"):
        pass
    assert told == ["passes", "verify", "kernels", "verify", "passes", "aten", "passes", ""]


def test_notes_go_to_the_innermost_reader() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with watched(lambda name: None, outer.append):
        note("1 of 3")
        with watched(lambda name: None, inner.append):
            note("2 of 3")
        note("3 of 3")
    note("nobody reads")
    assert (outer, inner) == (["1 of 3", "3 of 3"], ["2 of 3"])


def test_seconds_count_as_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    told: list[str] = []

    def work(seconds: float) -> None:
        now[0] += seconds

    seconds = {"passes": 100.0}
    with watched(told.append), timed(seconds):
        work(50)  # of no phase
        with phase("passes"):
            work(1)
            with phase("verify"):
                work(2)
                with phase("kernels"):  # whoever waits for them
                    work(4)
            work(8)
        with pytest.raises(ValueError), phase("aten"):
            work(16)
            raise ValueError
    with phase("aten"):
        work(32)  # nobody's
    assert seconds == {"passes": 109.0, "verify": 6.0, "aten": 16.0}
    outside: dict[str, float] = {}
    inside: dict[str, float] = {}
    with timed(outside), phase("load"):
        work(1)
        with timed(inside), phase("verify"):
            work(2)
        work(4)
    assert (outside, inside) == ({"load": 5.0, "verify": 2.0}, {"verify": 2.0})
    assert told == ["passes", "verify", "kernels", "verify", "passes", "", "aten", ""]


def test_compiling_tells_its_phases() -> None:
    told: list[str] = []
    with watched(told.append):
        program = build_program(build_tiny_model("llama"), CompileOptions(codegen="none", pack_weights=True))
    named = [name for name in told if name and name != "kernels"]
    assert set(named) == {"reference", "capture", "passes", "aten", "verify", "pack"} == set(program.report.seconds)
    assert named[:2] == ["reference", "capture"] and named.index("passes") < named.index("aten")
    assert told[-1] == ""


def test_a_start_is_all_phases() -> None:
    llm = pagoda.LLM(build_tiny_model("llama"), codegen="none", num_blocks=8)
    assert list(llm.compile_report.seconds)[:3] == ["imports", "load", "reference"]
    assert list(llm.compile_report.seconds)[-1] == "cache"


def test_a_terminal_shows_phases_and_seconds_and_is_left_clear() -> None:
    with stderr_on_a_terminal() as terminal:
        handler = logging.StreamHandler(sys.stderr)
        logging.getLogger().addHandler(handler)
        try:
            with show_phases():
                with phase("capture"):
                    pass
                with phase("verify"):
                    note("3 of 12 sizes, 40 s left")
                    logging.getLogger().warning("look here")
            assert handler.stream is terminal.stream
        finally:
            logging.getLogger().removeHandler(handler)
        text = terminal.sent()
    shown = plain(text)
    assert re.search(r"compiling, seconds: capture \d+\.\d", shown)
    assert re.search(r"capture \d+\.\d verify \d+\.\d", shown)
    assert re.search(r"verify \d+\.\d \(3 of 12 sizes, 40 s left\)", shown)
    assert "look here" in shown.replace("\r", "\n").splitlines()  # on a line of its own
    assert text.endswith("\x1b[2K")  # the line is wiped


def test_nothing_is_shown_before_the_first_phase() -> None:
    with stderr_on_a_terminal() as terminal:
        with show_phases():
            pass
        assert terminal.sent() == ""


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is logged to a stderr that is not a terminal, with the levels that commands set."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colors, and makes no terminal of a pipe
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    root.addHandler(handler)
    yield stream
    root.removeHandler(handler)
    root.setLevel(level)


def test_a_pipe_has_a_line_as_each_phase_begins(piped: io.StringIO) -> None:
    with show_phases("some/model"):
        assert piped.getvalue() == "INFO loading some/model\n"
        with phase("passes"):
            assert piped.getvalue().splitlines()[1:] == ["INFO rewriting its graph"]
            note("3 of 12 sizes")
            with phase("verify"), logged():
                pass
        with phase("verify"), phase("of a plugin"):
            pass
    said = [line.removeprefix("INFO ") for line in piped.getvalue().splitlines()]
    assert said[2:] == ["comparing the program with the model", "of a plugin"]  # each once
    with logged(), phase("capture"):
        pass
    assert len(piped.getvalue().splitlines()) == 4  # no more where nobody asks


def test_every_phase_has_words() -> None:
    found = {
        name
        for folder in ("compiler", "passes", "runtime", "torch_pagoda")
        for file in Path(folder).rglob("*.py")
        for name in re.findall(r'phase\("([^"]+)"\)', file.read_text(encoding="utf-8"))
    }
    assert found == set(phases._DOING)


def test_generate_shows_them_on_a_terminal(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", checkpoint, "-p", "the", "--max-tokens", "1", "--verify", "off", "--codegen", "none")
    with stderr_on_a_terminal() as terminal:
        # A pass is left out so that the program is not one that another test has compiled.
        status, out, _ = run(*arguments, "--skip-pass", "hoist_gather")
        shown = plain(terminal.sent())
    assert status == 0 and out.startswith("the") and "compiling" not in out
    assert re.search(r"compiling, seconds: load \d+\.\d capture \d+\.\d", shown) and re.search(
        r"passes \d+\.\d", shown
    )
