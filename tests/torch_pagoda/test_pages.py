"""README, CONTRIBUTING.md and docs/: code runs, commands are ones that exist, links and paths lead somewhere."""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer
from mtp_checkpoints import make_head, save_with_head
from page_text import PAGES, ROOT, anchors, code_blocks, links, section
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import torch_pagoda as pagoda
from torch_pagoda import cli
from torch_pagoda.compiler.link.linker import LinkedProgram
from torch_pagoda.compiler.user_passes import registered_passes, unregister_pass

SERVER = "http://127.0.0.1:8000"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PATH = re.compile(r"`((?:torch_pagoda|compiler|passes|runtime|tests|benchmarks|examples|docs|\.ci)/[\w./-]*)`")
LINES = [
    (page, line.partition("#")[0].strip())
    for page, text in PAGES.items()
    for block in code_blocks(text, "bash")
    for line in block.splitlines()
]
"""Of all blocks for a shell; each can be run as it is."""

MENTIONS = [
    (page, command)
    for page, text in PAGES.items()
    for command in re.findall(r"`((?:pagoda|python benchmarks/|pytest) ?[^`\n]*)`", text)
]
"""Commands within sentences, which may leave arguments out."""

RunPage = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of the shipped model that knows conversations."""
    command = [str(Path(sys.executable).with_name("pagoda")), "serve", str(ROOT / "examples/tiny-pydoc")]
    command += ["--port", "0", "--chat-template", str(ROOT / "examples/chatml.jinja"), "--log-requests", "none"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture
def run_page(
    checkpoint: Path,
    tokenizer: PreTrainedTokenizerFast,
    llama: PreTrainedModel,
    fast: dict[str, Any],
    programs: dict[Any, LinkedProgram],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[RunPage]:
    """Runs the Python blocks of a page in order, as one session; returns its names."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, folder := tmp_path / "checkpoint")
    own = copy.deepcopy(tokenizer)
    own.chat_template = TEMPLATE
    own.save_pretrained(folder)
    before = registered_passes()

    def run(page: str) -> dict[str, Any]:
        if "register_pass(" in page:
            programs.clear()  # they were compiled without the pass
        if '"mtp"' in page:
            save_with_head(llama, make_head(llama), folder)
        public = {name: getattr(pagoda, name) for name in pagoda.__all__}
        quick: dict[str, Any] = {name: partial(public[name], **fast) for name in ("LLM", "AsyncLLM", "compile")}
        inputs = tokenizer(["the cat", "one two three"], return_tensors="pt", padding=True)
        names: dict[str, Any] = {"model": llama, "tokenizer": tokenizer, "inputs": dict(inputs)}
        quick["explain"] = partial(pagoda.explain, verify="off")
        names["pagoda"] = SimpleNamespace(**public | quick)
        for block in code_blocks(page, "python"):
            source = block.replace("import torch_pagoda as pagoda\n", "")
            source = source.replace("path-or-hub-id", str(folder)).replace("1GiB", "1MiB")
            if SERVER in source:
                source = source.replace(SERVER, request.getfixturevalue("server"))
            code = compile(source, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waiting = eval(code, names)
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(waiting)
        return names

    yield run
    for name in set(registered_passes()) - set(before):
        unregister_pass(name)
        programs.clear()


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if code_blocks(text, "python")])
def test_code_runs(page: str, run_page: RunPage) -> None:
    names = run_page(PAGES[page])
    if page == "docs/serving.md":
        assert names["outputs"][1].num_cached_tokens > 0 and len(names["outputs"][1].outputs) == 2
        assert names["found"][0].sequences[0].token_ids
        assert Path("trace.json").stat().st_size > 0
    if page == "docs/passes.md":
        records = {record.name: record for record in names["llm"].compile_report.passes}
        assert records["mine"].rejections
        assert Path("report.html").stat().st_size > 0
    if page == "docs/server.md":
        assert names["thing"]["kind"] in ("function", "class") and names["chosen"] in ("yes", "no")


def requests_of(page: str) -> list[tuple[str, str]]:
    """URL and body of each ``curl`` in a page's blocks."""
    found = []
    for block in code_blocks(PAGES[page], "bash"):
        for line in block.splitlines():
            words = shlex.split(line.partition("  #")[0])
            if words[:1] == ["curl"]:
                (url,) = (word for word in words if word.startswith("http"))
                found.append((url, words[words.index("-d") + 1]))
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/server.md"])
def test_requests_are_answered(page: str, server: str) -> None:
    requests = requests_of(page)
    assert requests
    for url, body in requests:
        answer = httpx.post(url.replace(SERVER, server), content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("pagoda.LLM(", "pagoda.LMM("), ("max_tokens=", "max_token="), ("llm.generate(", "llm.complete(")],
)
def test_broken_code_is_found(right: str, wrong: str, run_page: RunPage) -> None:
    page = section(PAGES["README.md"], "Five ways to use it")
    assert right in page
    with pytest.raises((AttributeError, TypeError)):
        run_page(page.replace(right, wrong))


def check_command(command: str, *, is_whole: bool = True) -> None:
    """Raise where a line of a shell names a script, an option, a value or a mark that does not exist."""
    for part in re.split(r"&&|;", command):
        words = shlex.split(part.partition(">")[0])
        if words[:1] == ["pagoda"]:
            _check_pagoda(words[1:], is_whole)
        elif words[:1] == ["python"]:
            _check_script(words[1:])
        elif words[:2] == ["pytest", "-m"]:
            marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
            asked = set(re.findall(r"\w+", words[2])) - {"and", "or", "not"}
            assert asked and asked <= {mark.partition(":")[0] for mark in marks}, command
        elif words[:1] == ["bash"]:
            assert (ROOT / words[1]).is_file(), command


def _check_pagoda(words: list[str], is_whole: bool) -> None:
    command: Any = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if re.match(r"--?[a-z]", word)} <= known | {"--help"}, words
    if is_whole and "--help" not in words and not hasattr(command, "commands"):
        # Files that the reader has.
        words = [str(ROOT / "LICENSE") if word.endswith(".txt") else word for word in words]
        command.make_context(command.name, words)


def _check_script(words: list[str]) -> None:
    script = ROOT / words[0]
    assert script.is_file(), words
    sources = script.read_text() + (ROOT / "benchmarks" / "report.py").read_text()
    known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', sources))
    assert {word for word in words if word.startswith("--")} <= known, words


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    for of_page, command in LINES:
        if of_page == page:
            check_command(command)
    for of_page, command in MENTIONS:
        if of_page == page:
            check_command(command, is_whole=False)


def test_commands_are_found_in_the_pages() -> None:
    assert ("docs/models.md", "python benchmarks/coverage.py --fusions") in LINES
    assert ("docs/npu-evidence.md", "pagoda bisect MODEL --target npu --codegen none") in MENTIONS
    found = [command for page, command in LINES if page == "docs/usage.md"]
    assert 'pagoda generate examples/tiny-pydoc --prompt "Return the" --max-tokens 64' in found


@pytest.mark.parametrize(
    "command",
    [
        "pagoda server MODEL",
        "pagoda serve MODEL --prot 1",
        "pagoda generate MODEL --polcy sjf",
        "pagoda generate",
        "pagoda npu install",
        "pagoda quantize MODEL OUT --text sample.txt --group-size many",
        "python benchmarks/faster.py",
        "python benchmarks/coverage.py --fusion-passes",
        "pytest -m quickly",
        "bash .ci/walk",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises((AssertionError, typer.BadParameter)):
        check_command(command)


def dead_ends(page: str, text: str) -> list[str]:
    """Links of a page that lead to no file or no heading."""
    found = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        is_there = path.exists()
        if is_there and anchor:
            is_there = anchor in anchors(path.read_text(encoding="utf-8") if name else text)
        if not is_there:
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert dead_ends(page, PAGES[page]) == []


@pytest.mark.parametrize(
    "text", ["[x](options.md#no-such-heading)", "[x](nowhere.md)", "[x](#nowhere)", '<img src="figures/none.svg">']
)
def test_a_dead_end_is_found(text: str) -> None:
    assert len(dead_ends("docs/usage.md", text + " [y](options.md#samplingparams) [z](https://example.org)")) == 1


@pytest.mark.parametrize("page", PAGES)
def test_every_path_is_there(page: str) -> None:
    named = PATH.findall(PAGES[page])
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_paths_are_found_in_the_pages() -> None:
    for page in ("README.md", "CONTRIBUTING.md", "docs/benchmarks.md", "docs/how-it-works.md"):
        assert len(PATH.findall(PAGES[page])) >= 2, page


def test_every_page_is_reached_from_readme() -> None:
    reached = {target.partition("#")[0] for target in links(PAGES["README.md"])}
    assert set(PAGES) - {"README.md"} <= reached
