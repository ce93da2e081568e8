"""Options of ``pagoda serve`` up to where a server would start."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_pagoda.cli import serving
from torch_pagoda.cli.serve import _one_thread
from torch_pagoda.cli.serve_options import KEY_VARIABLE, api_keys, served_names

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What would be served, instead of serving it."""
    threads = torch.get_num_threads()
    made: list[Any] = []

    class Glue:
        def __init__(self, *values: Any) -> None:
            made.extend(values)

        def run(self, say: Callable[[str], None]) -> int:
            return 0

    monkeypatch.setattr(serving, "Glue", Glue)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    yield made
    torch.set_num_threads(threads)


def test_what_is_missing_of_the_extra_is_named_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else original(name))
    status, out, err = run("serve", "somewhere")
    assert (status, out) == (2, "")
    assert err == "pagoda: error: pagoda serve needs uvicorn; install them: pip install 'torch-pagoda[serve]'\n"


def test_options_become_settings(run: Run, glue: list[Any], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the team\nann=sk-a\nsk-b\n")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    status, _, err = run(
        *("serve", "org/model", "--port", "0", "--api-key-file", tmp_path / "keys", "--max-queue", "7"),
        *("--chat-template", tmp_path / "t.jinja", "--default-chat-template-kwargs", '{"a": 1}', "--no-ui"),
        *("--max-num-seqs", "3", "--generation-config", "none", "--allowed-origins", "http://a", "--sse-ping", "2.5"),
    )
    assert status == 0, err
    model, options, settings, own = glue
    assert (model, own.tokenizer) == ("org/model", None)
    assert options["max_num_seqs"] == 3 and options["generation_config"] == "vllm" and "max_queue" not in options
    assert settings.served_model_names == ("org/model",)
    assert [(key.name, key.key) for key in settings.api_keys] == [("ann", "sk-a"), ("key2", "sk-b")]
    assert settings.chat_template == "{{ messages }}" and settings.chat_template_kwargs == {"a": 1}
    assert (settings.max_queue, settings.sse_ping, settings.enable_ui) == (7, 2.5, False)
    assert settings.allowed_origins == ("http://a",)
    assert settings.system_fingerprint.startswith("fp_")


def test_vllms_name_of_the_queue(run: Run, glue: list[Any]) -> None:
    assert run("serve", "m", "--max-num-queued-reqs", "5")[0] == 0
    assert glue[2].max_queue == 5


@pytest.mark.parametrize(
    ("name", "text"), [("c.json", '{"port": 9, "max-num-seqs": 2}'), ("c.yaml", "port: 9\nmax_num_seqs: 2")]
)
def test_a_file_gives_defaults(run: Run, glue: list[Any], tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    status, _, err = run("serve", "m", "--config", tmp_path / name, "--max-num-seqs", "4")
    assert status == 0, err
    assert glue[2].port == 9 and glue[1]["max_num_seqs"] == 4


@pytest.mark.parametrize("text", ["[]", "{", '{"prot": 9}', '{"port": "x"}'])
def test_a_file_that_cannot_be_used(run: Run, glue: list[Any], tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    status, _, err = run("serve", "m", "--config", tmp_path / "c.json")
    assert status == 2 and err.count("\n") == 1 and not glue


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "port=70000"),
        (["--ssl-certfile", "x"], "--ssl-keyfile"),
        (["--ssl-ca-certs", "x"], "--ssl-certfile"),
        (["--chat-template", "/nowhere/t.jinja"], "--chat-template /nowhere/t.jinja could not be read"),
        (["--api-key", "a b"], "key1' is invalid"),
        (["--api-key", "a=1", "--api-key", "a=2"], "a unique name"),
        (["--default-chat-template-kwargs", "[1]"], "--default-chat-template-kwargs"),
        (["--shutdown-timeout", "-1"], "shutdown_timeout=-1"),
        (["--root-path", "x"], "root_path"),
        (["--enable-prefix-caching", "--no-enable-prefix-caching"], "mutually exclusive"),
    ],
)
def test_a_mistake_is_one_line(run: Run, glue: list[Any], options: list[str], said: str) -> None:
    status, out, err = run("serve", "m", *options)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1, err
    assert "a b" not in err
    assert not glue


def test_an_address_that_is_taken_is_one_line(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, _, err = run("serve", "m", "--port", port)
    assert status == 2 and f"--port {port}" in err and "--port 0" in err and err.count("\n") == 1


@pytest.mark.parametrize(("options", "warns"), [([], True), (["--api-key", "k"], False)])
def test_an_open_door_is_warned_of(run: Run, glue: list[Any], options: list[str], warns: bool) -> None:
    status, _, err = run("serve", "m", "--host", "0.0.0.0", *options)
    assert status == 0 and ("warning" in err and "--api-key" in err) is warns
    assert "warning" not in run("serve", "m")[2]


@pytest.mark.parametrize(
    ("entry", "name", "key"),
    [
        ("sk-1", "key1", "sk-1"),
        ("ann=sk-1", "ann", "sk-1"),
        ("YWJjZA==", "key1", "YWJjZA=="),
        ("a b=c", "key1", "a b=c"),
        ("ann=a=b", "ann", "a=b"),
    ],
)
def test_keys_may_have_names(entry: str, name: str, key: str) -> None:
    if " " in entry:
        with pytest.raises(ValueError, match="key1' is invalid"):
            _checked(api_keys([entry], None, None))
        return
    (found,) = api_keys([entry], None, None)
    assert (found.name, found.key) == (name, key)
    assert api_keys([], None, entry) == (found,)


def test_a_folder_is_known_by_its_name_and_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert served_names(str(folder), None) == ("my-model", str(folder))
    assert served_names(str(folder), ["a", "b", "a"]) == ("a", "b")
    assert served_names("org/name", None) == ("org/name",)


def test_one_thread_is_for_the_imports_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for before in (None, "5"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if before is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", before)
        with _one_thread():
            assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.environ.get("OMP_NUM_THREADS") == before


def _checked(keys: Any) -> None:
    from torch_pagoda.serving.settings import Settings

    Settings(api_keys=keys)
