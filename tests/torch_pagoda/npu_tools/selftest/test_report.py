"""What a report says first, what it does not tell, and the page."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from torch_pagoda.npu_tools.selftest.journal import CRASHED, FAILED, HUNG, NOT_RUN, RIGHT, WRONG, Outcome
from torch_pagoda.npu_tools.selftest.redact import redacted
from torch_pagoda.npu_tools.selftest.report import Report, make_report
from torch_pagoda.npu_tools.selftest.selftest import _secrets

EVIL = '<script>alert(1)</script>"><img src="http://example.invalid/x.png" onerror=alert(1)>'
MODEL = "/srv/secret-models/our-new-model"


def operator(name: str, status: str = RIGHT, reason: str = "", **found: Any) -> Outcome:
    data = {
        "operator": name,
        "shapes": "bfloat16[8, 64]",
        "step": "decode of 8",
        "module": "model.layers.0",
        "calls": 4,
        "fractal_nz": False,
        "largest": 0.01,
        "of_limit": 0.25,
        "beyond": 0.0,
        "where": "",
        "microseconds": 12.0,
        **found,
    }
    nz = ", FRACTAL_NZ" if data["fractal_nz"] else ""
    return Outcome(f"{name}(bfloat16[8, 64]{nz}), decode of 8, first", status, reason, 0.1, data)


def side(milliseconds: float, *reasons: str) -> dict[str, Any]:
    sizes = [{"name": f"steps of {n}", "error": 0.001, "reason": r, "seconds": 2.5} for n, r in enumerate(reasons)]
    return {"sizes": sizes, "limits": [], "milliseconds": milliseconds}


def report(
    stand_in: str = "",
    secrets: Mapping[str, str] = {MODEL: "[model]"},
    devices: Sequence[Outcome] = (),
    **stages: list[Outcome],
) -> Report:
    first = [
        Outcome(
            "device",
            RIGHT,
            found={"facts": {"device": "Ascend910B3", "lowered for": "Ascend910B3"}, "stand_in": stand_in},
        ),
        Outcome("model", RIGHT, found={"facts": {"architecture": "llama", "layers": "32"}}),
    ]
    facts = {
        "when": "2026-11-25 13:00 UTC",
        "versions": {"torch": "2.12.0"},
        "options": {"block_size": 128},
        "doctor": [{"status": "ok", "check": "CANN", "text": "9.1.0 in /usr/local/Ascend/cann", "remedy": ""}],
        "resumed": False,
    }
    return make_report({"device": devices or first, **stages}, facts=facts, secrets=secrets)


@pytest.fixture
def full() -> Report:
    return report(
        operators=[
            operator("npu_swiglu"),
            operator("npu_linear", WRONG, f"result differs by 3 {EVIL}", of_limit="infinite"),
            operator("npu_linear", fractal_nz=True),
            Outcome("npu_rms_norm(...)", HUNG, "nothing was heard of it for 900 s"),
        ],
        passes=[
            Outcome(
                "pass by pass",
                CRASHED,
                "its process died of SIGSEGV",
                found={"checks": [{"name": "recognize_rms_norm", "error": 0.01, "reason": ""}], "limit": 0.3},
            )
        ],
        graphs=[
            Outcome("graph engine", FAILED, "NPU out of memory; lower --max-num-seqs"),
            Outcome(
                "captured graphs",
                RIGHT,
                found={
                    "off": side(10.0),
                    "on": side(4.0, "", "its logits differ"),
                    "times": 2.5,
                    "same_tokens": 8,
                    "sequences": 8,
                },
            ),
            *(Outcome(f"blocks of {n} tokens", NOT_RUN, "the process was lost 5 times") for n in (256, 512)),
        ],
    )


def test_the_first_that_is_not_right_is_said_first(full: Report) -> None:
    assert full.data["first_wrong"]["item"].startswith("npu_linear(") and not full.is_right
    assert full.verdict.startswith("first failure, in stage operators: npu_linear(bfloat16[8, 64])")
    assert full.data["counts"] == {RIGHT: 5, WRONG: 1, HUNG: 1, CRASHED: 1, FAILED: 1, NOT_RUN: 2}
    assert full.title == "Selftest of Ascend910B3 on llama"
    everything = report(operators=[operator("npu_swiglu")])
    assert everything.is_right and everything.verdict == "all 3 items that ran are right"


def test_questions_are_answered(full: Report) -> None:
    answers = {each["question"]: each for each in full.data["answers"]}
    computes = answers["Do the operators match their CPU semantics?"]
    assert computes["status"] == WRONG
    assert computes["answer"].startswith(
        "1 of 3 calls are right; a result is not a number, or has the wrong shape. First failure: "
        "npu_linear(bfloat16[8, 64]), decode of 8, first: wrong, result differs by 3"
    )
    assert answers["Are products with matrices in FRACTAL_NZ right?"]["status"] == RIGHT
    captures = answers["Are captures right, and how many fit?"]["answer"]
    assert captures == (
        "captured graphs: 1 of 2 sizes are right, a decode step takes 4 ms with it, 10 ms without: a speedup of 2.50"
        "; 8 of 8 sequences have the same tokens"
    )
    assert (
        "out of memory; lower --max-num-seqs"
        in answers["Does GE compile the planned graphs, and are they right?"]["answer"]
    )
    assert answers["Which block size is fastest?"]["answer"].startswith("blocks of 256 tokens: not run, the process")
    assert (
        "passes compared: 1; the largest error: 0.01 of 0.3"
        in answers["Is the model right on the device, pass by pass?"]["answer"]
    )
    assert "Are the decays of gated delta rules right?" not in answers, "nothing was run for it"


@pytest.mark.parametrize(
    ("operator", "shapes", "question"),
    [
        ("npu_grouped_matmul", "int8[8, 64], int32[4, 64, 4]", "Are packed weights of 4 and 8 bits read"),
        ("npu_grouped_matmul", "bfloat16[8, 64], bfloat16[4, 64, 32]", ""),
        ("npu_quant_matmul", "int8[8, 64], int8[64, 32]", "Are packed weights of 4 and 8 bits read"),
        ("npu_recurrent_gated_delta_rule", "bfloat16[8, 2, 64]", "Are the decays of gated delta rules right?"),
    ],
)
def test_which_operators_answer_a_question(operator: str, shapes: str, question: str) -> None:
    made = report(operators=[Outcome(f"{operator}({shapes}), decode of 8, first", CRASHED, "its process died")])
    first, *others = made.data["answers"]
    assert [each["question"].startswith(question) for each in others] == [True] * bool(question)
    assert first["answer"].startswith("0 of 1 calls are right. First failure: "), "there are no differences"


def test_a_device_that_was_not_opened_is_not_named() -> None:
    made = report(devices=[Outcome("prepare", CRASHED, "its process died")])
    assert made.first_line == "Run on a device that could not be opened, 2026-11-25 13:00 UTC."


def test_a_stand_in_is_said_before_all_else() -> None:
    made = report("a toy ran it", operators=[operator("npu_swiglu")])
    assert made.title.startswith("No Ascend device was used")
    assert made.first_line.startswith("No Ascend device was used: a toy ran it.")
    text = Text.of(made)
    assert text.title.startswith("No Ascend device was used") and text.lines[0].startswith(
        "No Ascend device was used"
    )
    assert next(iter(made.data)) == "format" and list(made.data)[1] == "stand_in"


class Text(HTMLParser):
    """Texts, tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.title = ""

    @classmethod
    def of(cls, made: Report) -> Text:
        from torch_pagoda.npu_tools.selftest.page import page

        reader = cls()
        reader.feed(page(made))
        return reader

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1][0] if self.tags else ""
        if tag == "title" and not self.title:
            self.title = data
        elif data.strip() and tag != "style":
            self.lines.append(data.strip())


def test_the_page_escapes_and_asks_nobody(full: Report) -> None:
    from torch_pagoda.npu_tools.selftest.page import page

    html, text = page(full), Text.of(full)
    assert not {tag for tag, _ in text.tags} & {"script", "img", "link", "iframe", "object", "form", "base"}
    assert not any(
        name in ("src", "href", "style") or name.startswith("on") for _, given in text.tags for name in given
    )
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "&lt;script&gt;alert(1)" in html
    assert any("Failures, in the order of the run" in line for line in text.lines)
    assert "npu_linear" in text.lines and "1 of 2" in text.lines


def test_files_are_written_whole(full: Report, tmp_path: Path) -> None:
    full.write_json(tmp_path / "report.json")
    full.write_html(tmp_path / "report.html")
    assert json.loads((tmp_path / "report.json").read_text()) == full.data
    assert sorted(os.listdir(tmp_path)) == ["report.html", "report.json"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"cannot read {MODEL}/config.json", "cannot read [model]/config.json"),
        ("File '/home/jane/venv/lib/x.py', line 3", "File '…/x.py', line 3"),
        ("see file:///home/jane/a.log", "see …/a.log"),
        ("~/models/llama is gone", "…/llama is gone"),
        ("error:/data/acme/x.so", "error:…/x.so"),
        (f"{Path.home()}/clients/acme/w.bin, {os.getcwd()}/a/b/c", "…/w.bin, …/c"),
        ("see https://git.corp.example/acme/x?y=1, s3://acme/w", "see [address] [address]"),
        ("jane@mail.example sent it to 10.1.2.3:8080", "[mail] sent it to [address]"),
        ("jane on box7 failed", "[user] on [host] failed"),
        ("3384 / 65536 MiB, 12 tokens/s, npu::npu_linear", "3384 / 65536 MiB, 12 tokens/s, npu::npu_linear"),
        ("aclnnSwiGlu failed, 2/3 done (507035)", "aclnnSwiGlu failed, 2/3 done (507035)"),
        ("model.layers.0.mlp, [8, 64] 0.26 %", "model.layers.0.mlp, [8, 64] 0.26 %"),
        ("firmware 7.8.0.5.216", "firmware 7.8.0.5.216"),
    ],
)
def test_what_does_not_leave(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "jane")
    monkeypatch.setattr("socket.gethostname", lambda: "box7.corp.example")
    found = redacted({"a": [text, 3, None, {"jane": text}]}, {MODEL: "[model]"})
    assert found == {"a": [shown, 3, None, {"jane": shown}]}, "names of fields stay"


def test_every_spelling_of_a_model_is_taken_out(tmp_path: Path) -> None:
    text = f"/cache/models--acme--secret-7b, acme/secret-7b, {Path.cwd()}/acme/secret-7b/w.bin"
    assert "secret-7b" not in redacted(text, _secrets("acme/secret-7b"))


@pytest.mark.parametrize("name", ["model", "device", "item"])
def test_a_model_whose_name_is_that_of_a_field(name: str) -> None:
    made = report(secrets={name: "[model]"}, operators=[Outcome(f"reads {name}", FAILED, f"no {name}")])
    assert made.title == "Selftest of Ascend910B3 on llama"
    assert made.data["first_wrong"]["reason"] == "no [model]"


def test_a_report_names_no_folder_user_host_or_model(full: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "jane")
    monkeypatch.setattr("socket.gethostname", lambda: "box7")
    reason = f"OSError: {MODEL}/weights.bin, by jane on box7, in {os.getcwd()} and {Path.home()}/x"
    made = report(operators=[Outcome(f"{MODEL} item", FAILED, reason, found={"note": reason})])
    text = json.dumps(made.data) + " ".join(Text.of(made).lines)
    assert not re.search("secret-models|our-new-model|jane|box7|/srv|/usr/local", text)
    assert os.getcwd() not in text and "weights.bin" in text
