"""Stages of a selftest that need no torch: their items fail in every way that a process can."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch_pagoda.npu_tools.selftest.worker import Items, Progress


def stage(kinds: list[str], folder: str = "") -> Items:
    """An item of each kind; each notes in ``folder`` that it ran."""

    def item(kind: str, progress: Progress) -> dict[str, Any]:
        if folder:
            with open(Path(folder, "ran"), "a", encoding="utf-8") as file:
                file.write(f"{kind}\n")
        progress({"reached": kind})
        return _ITEMS[kind](progress)

    if "prepare" in kinds:
        raise RuntimeError("NPU out of memory. Tried to allocate 9.00 GiB")
    return {kind: lambda progress, kind=kind: item(kind, progress) for kind in kinds}  # type: ignore[misc]


def device(folder: str, model: str) -> Items:
    """A device, and a model, whose stage can be prepared as long as ``folder`` has a file "device"; the item "lost"
    removes it and dies."""
    file = Path(folder, "device")
    if not file.exists():
        raise ValueError("there is no device")

    def lose(progress: Progress) -> dict[str, Any]:
        file.unlink()
        return _exit(progress)

    items: Items = {"device": lambda progress: {"wrong": "", "facts": {}}}
    return {**items, "lost": lose, "model": items["device"]} if model == "a thief" else items


def _die(progress: Progress) -> dict[str, Any]:
    print("Fatal: stack smashed in /home/somebody/driver.so", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)
    return {}


def _hang(progress: Progress) -> dict[str, Any]:
    time.sleep(600)
    return {}


def _raise(progress: Progress) -> dict[str, Any]:
    raise TypeError("no such tiling")


def _lost(progress: Progress) -> dict[str, Any]:
    raise RuntimeError("synchronize: device is lost, error code is 507010")


def _no_memory(progress: Progress) -> dict[str, Any]:
    raise RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0)")


def _exit(progress: Progress) -> dict[str, Any]:
    os._exit(7)


def _fork(progress: Progress) -> dict[str, Any]:
    """It ends, and a process that holds its pipes does not."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(7)


def _slow(progress: Progress) -> dict[str, Any]:
    for done in range(6):
        time.sleep(0.5)
        progress({"done": done, "doing": f"part {done}"})
    return {"wrong": ""}


def _noise(progress: Progress) -> dict[str, Any]:
    print("a library prints")
    os.write(1, b"\0\0\0\2{}" * 20000)
    return {"wrong": "", "printed": True}


def _rubbish(progress: Progress) -> dict[str, Any]:
    os.write(int(sys.argv[1]), b"\0\0\0\3{}}")
    return {"wrong": ""}


def _text(progress: Progress) -> dict[str, Any]:
    os.write(int(sys.argv[1]), b"Fatal: no such file descriptor\n")
    return {"wrong": ""}


def _machine(progress: Progress) -> dict[str, Any]:
    """The process of the test dies with the device."""
    time.sleep(1)  # what was said before is on disk then
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    return {}


_ITEMS = {
    "right": lambda progress: {"wrong": "", "number": 1},
    "other": lambda progress: {"wrong": ""},
    "wrong": lambda progress: {"wrong": "it differs by 3"},
    "raise": _raise,
    "lost": _lost,
    "no memory": _no_memory,
    "die": _die,
    "exit": _exit,
    "fork": _fork,
    "hang": _hang,
    "slow": _slow,
    "noise": _noise,
    "rubbish": _rubbish,
    "text": _text,
    "machine": _machine,
}
