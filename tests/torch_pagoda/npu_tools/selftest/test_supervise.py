"""Processes of stages that die, hang and raise, and the journal that a later run goes on with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_pagoda import cli
from torch_pagoda.cli.selftest import run_and_write
from torch_pagoda.device import npu_available
from torch_pagoda.npu_tools.selftest import selftest as selftest_file
from torch_pagoda.npu_tools.selftest.journal import CRASHED, FAILED, HUNG, NOT_RUN, RIGHT, WRONG, Journal, Outcome
from torch_pagoda.npu_tools.selftest.report import Report
from torch_pagoda.npu_tools.selftest.selftest import run_selftest
from torch_pagoda.npu_tools.selftest.supervise import PREPARE, Stage, run_stage

SUPPORT = Path(__file__).parents[3] / "support"


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))


def stage(*kinds: str, folder: Path | str = "") -> Stage:
    return Stage("toys", "selftest_toys:stage", {"kinds": list(kinds), "folder": str(folder)})


def journal(folder: Path, subject: str = "a") -> Journal:
    return Journal(folder / "journal", {"subject": subject})


def test_every_failure_is_noted_and_the_rest_goes_on(tmp_path: Path) -> None:
    kinds = ("right", "wrong", "raise", "die", "no memory", "hang", "exit", "noise", "lost", "other")
    found = run_stage(stage(*kinds, folder=tmp_path), journal(tmp_path), 3)
    by_item = {outcome.item: outcome for outcome in found}
    assert list(by_item) == list(kinds)
    assert by_item["right"] == Outcome(
        "right", RIGHT, "", by_item["right"].seconds, {"reached": "right", "number": 1}
    )
    assert (by_item["wrong"].status, by_item["wrong"].reason) == (WRONG, "it differs by 3")
    assert (by_item["raise"].status, by_item["raise"].reason) == (FAILED, "TypeError: no such tiling")
    died = by_item["die"]
    assert died.status == CRASHED and "killed by SIGSEGV" in died.reason and "stack smashed" in died.reason
    assert died.found == {"reached": "die"}, "what it said before is kept"
    memory = by_item["no memory"]
    assert memory.status == FAILED and "memory" in memory.reason and "; " in memory.reason, "with its remedy"
    assert "Tried to allocate 2.00 GiB" in memory.reason
    hung = by_item["hang"]
    assert hung.status == HUNG and "no message for 3 s" in hung.reason and "--timeout" in hung.reason
    assert by_item["exit"].status == CRASHED and "status 7" in by_item["exit"].reason
    assert by_item["noise"].status == RIGHT, "what libraries print is no answer"
    assert by_item["lost"].status == FAILED and "the device is lost" in by_item["lost"].reason
    assert by_item["other"].status == RIGHT, "it ran in another process than the one that lost the device"
    assert (tmp_path / "ran").read_text().split("\n")[:-1] == list(kinds), "nothing ran twice"


def test_what_says_something_does_not_hang(tmp_path: Path) -> None:
    (found,) = run_stage(stage("slow"), journal(tmp_path), 2)
    assert found.status == RIGHT and found.seconds > 2
    assert found.found["done"] == 5 and "doing" not in found.found, "nothing is under way any more"


def test_a_process_that_leaves_another_behind_has_crashed(tmp_path: Path) -> None:
    (found,) = run_stage(stage("fork"), journal(tmp_path), 60)
    assert found.status == CRASHED and "ended with status 7" in found.reason and found.seconds < 20


def test_a_process_that_writes_rubbish_to_its_supervisor_has_crashed(tmp_path: Path) -> None:
    found = run_stage(stage("rubbish", "text", "right"), journal(tmp_path), 60)
    assert [outcome.status for outcome in found] == [CRASHED, CRASHED, RIGHT]
    assert "sent an invalid message" in found[0].reason


def test_a_stage_that_cannot_be_prepared(tmp_path: Path) -> None:
    (found,) = run_stage(stage("prepare"), journal(tmp_path), 5)
    assert found.item == PREPARE and found.status == FAILED and "NPU out of memory" in found.reason


def test_a_device_that_does_not_recover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_pagoda.npu_tools.selftest.supervise._MOST_LOSSES", 2)
    found = run_stage(stage("die", "exit", "right"), journal(tmp_path), 5)
    assert [outcome.status for outcome in found] == [CRASHED, CRASHED, NOT_RUN]
    assert "was lost 2 times" in found[2].reason


def test_a_run_that_dies_is_gone_on_with(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from torch_pagoda.npu_tools.selftest.journal import Journal; "
        "from torch_pagoda.npu_tools.selftest.supervise import Stage, run_stage; folder = sys.argv[1]; "
        "kinds = ['right', 'machine', 'other']; "
        "run_stage(Stage('toys', 'selftest_toys:stage', {'kinds': kinds, 'folder': folder}), "
        "Journal(Path(folder, 'journal'), {'subject': 'a'}), 9)"
    )
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert died.returncode == -signal.SIGKILL
    for again in range(2):
        taken = journal(tmp_path)
        assert taken.resumed
        found = run_stage(stage("right", "machine", "other", folder=tmp_path), taken, 9)
        assert [outcome.status for outcome in found] == [RIGHT, CRASHED, RIGHT], again
        assert "not retried" in found[1].reason and found[1].found == {"reached": "machine"}
        assert (tmp_path / "ran").read_text().split() == ["right", "machine", "other"], "each ran once"
        taken.close(finished=False)


def test_a_finished_run_and_another_subject_begin_anew(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.end("toys", Outcome("right", RIGHT))
    first.close(finished=False)
    other = journal(tmp_path, "b")
    assert not other.resumed and not other.outcomes("toys")
    other.end("toys", Outcome("right", RIGHT))
    other.close(finished=True)
    assert not journal(tmp_path, "b").resumed


def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.note("toys", begin="right")
    for again in (False, True):
        with pytest.raises(ValueError, match=f"another run writes to {tmp_path}; wait for it, or use another --out"):
            Journal(tmp_path / "journal", {"subject": "a"}, again=again)
    first.end("toys", Outcome("right", RIGHT))
    first.close(finished=False)
    second = journal(tmp_path)
    assert second.outcomes("toys") == {"right": Outcome("right", RIGHT)}, "what the first noted is left alone"
    second.close(finished=False)
    assert not Journal(tmp_path / "journal", {"subject": "a"}, again=True).resumed


def test_an_item_that_the_user_stopped_is_tried_again(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.note("toys", begin="right")
    first.note("toys", interrupted="right")
    first.close(finished=False)
    assert journal(tmp_path).outcomes("toys") == {}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[1]",
        '{"stage": 3, "begin": "x"}',
        '{"stage": "toys", "end": {"item": "x", "status": "splendid", "reason": "", "seconds": 1, "found": {}}}',
        '{"stage": "toys", "end": {"item": ["x"], "status": "right", "reason": "", "seconds": 1, "found": {}}}',
        '{"stage": "toys", "end": {"item": "x", "status": "right", "reason": "", "seconds": "1", "found": {}}}',
        '{"stage": "toys", "end": [], "plan": [1, 2], "progress": "x", "found": []}',
        "[" * 100000,
    ],
)
def test_what_is_no_event_is_passed_over(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    first = journal(tmp_path)
    first.end("toys", Outcome("right", RIGHT))
    first.close(finished=False)
    with open(tmp_path / "journal", "a", encoding="utf-8") as file:
        file.write(line)  # the last line may be cut off
    taken = journal(tmp_path)
    assert taken.resumed and list(taken.outcomes("toys")) == ["right"] and taken.plan("toys") is None
    assert [r.getMessage().partition(": ")[0] for r in caplog.records] == [
        "ignoring an invalid line of the journal"
    ] * (line != "")
    taken.end("toys", Outcome("other", RIGHT))
    taken.close(finished=False)
    assert list(journal(tmp_path).outcomes("toys")) == ["right", "other"], "what comes behind it can be read"


def test_the_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    journal(tmp_path).close(finished=False)
    assert (tmp_path / "journal").stat().st_mode & 0o077 == 0
    assert json.loads((tmp_path / "journal").read_text().splitlines()[0]) == {"subject": {"subject": "a"}}


# The whole run


@pytest.fixture
def selftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Report]:
    """Runs the first stage on a toy."""
    monkeypatch.setitem(selftest_file._FUNCTIONS, "device", "selftest_toys:device")

    def run(model: str = "a model") -> Report:
        asked = {"model": model, "folder": str(tmp_path)}
        return run_selftest(tmp_path / "out", asked, stages=["device"], seconds=9)

    return run


def test_a_device_that_was_not_there_is_looked_for_again(selftest: Callable[..., Report], tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="there is no device"):
            selftest()
    (tmp_path / "device").touch()
    assert selftest().is_right


def test_a_device_that_is_lost_in_the_first_stage_is_reported(
    selftest: Callable[..., Report], tmp_path: Path
) -> None:
    (tmp_path / "device").touch()
    found = selftest("a thief").data["stages"]["device"]
    assert [(each["item"], each["status"]) for each in found] == [
        (PREPARE, FAILED),
        ("device", RIGHT),
        ("lost", CRASHED),
        ("model", NOT_RUN),
    ]
    assert (tmp_path / "out" / "report.html").exists()


def test_a_run_whose_report_cannot_be_made_is_gone_on_with(
    selftest: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").touch()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Report, "write_html", full)
        with pytest.raises(OSError, match="No space left"):
            selftest()
    assert selftest().data["resumed"] is True
    assert json.loads((tmp_path / "out" / "report.json").read_text())["resumed"] is True
    assert selftest().data["resumed"] is False, "the second has finished"


# The command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Calls ``pagoda npu selftest`` and gives its exit status and what it wrote to stderr."""

    def call(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["npu", "selftest", *map(str, arguments)])
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--comparison", "nz"), "comparison 'nz' is unknown; use one of graph engine, captured graphs"),
        (("--stage", "all"), "stage 'all' is unknown; use one of device, operators, passes, graphs, ranks"),
        (("--stage", "ranks"), "the stage ranks needs several of them; add -tp 2 or more"),
        (
            ("-tp", 2, "--simulate", "--stage", "graphs"),
            "stage 'graphs' needs an NPU; --simulate is for the stage ranks",
        ),
        (("-tp", 0), "tensor_parallel_size=0"),
        (("--max-num-seqs", 0), "max_num_seqs=0"),
        (("--timeout", 0), "timeout=0"),
    ],
)
def test_mistakes_in_the_arguments(
    run: Callable[..., tuple[int, str]], tmp_path: Path, arguments: tuple[object, ...], words: str
) -> None:
    status, err = run("nowhere", "--out", tmp_path / "report", *arguments)
    assert status == 2 and words in err and err.count("\n") == 1
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("by_nohup", [False, True])
def test_a_terminal_that_goes_away_stops_the_run_as_the_user_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_nohup: bool
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    seen = {}

    def note(*_: object, **__: object) -> None:
        seen.update({number: signal.getsignal(number) for number in before})
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_pagoda.npu_tools.selftest.run_selftest", note)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt):
            run_and_write({}, tmp_path, ["device"], 9, again=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen[signal.SIGTERM] is signal.default_int_handler
    assert seen[signal.SIGHUP] is (signal.SIG_IGN if by_nohup else signal.default_int_handler)


@pytest.mark.skipif(npu_available(), reason="there is an NPU")
def test_a_machine_without_a_device(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, err = run("nowhere", "--out", tmp_path)
    assert status == 2
    assert "torch_npu reports no NPU on this machine; run pagoda npu doctor" in err
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"], "no report of nothing"
