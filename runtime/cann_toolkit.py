"""The CANN toolkit that a machine has: its folder and its version. No torch is imported."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path

CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Variables of the environment that CANN's ``set_env.sh`` sets to the toolkit's folder."""
# Where CANN lies by default, for root and for a user; 9.x calls the folder cann, older ones ascend-toolkit/latest.
_USUAL = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
_VERSION = re.compile(r"^\s*version\s*=\s*\[?([\w.]{1,40})", re.IGNORECASE | re.MULTILINE)
_NUMBERED = re.compile(r"\d+(\.\w+){1,4}")
_MOST_BYTES = 65536


def _read(name: str) -> str | None:
    try:
        return Path(name).read_bytes()[:_MOST_BYTES].decode(errors="replace")
    except OSError:
        return None


def toolkit_folder(environment: Mapping[str, str], is_folder: Callable[[str], bool] = os.path.isdir) -> str | None:
    """Find the toolkit's folder: the one that was sourced, else one of the usual folders; None if there is none."""
    home = environment.get("HOME", "/root")
    usual = (*_USUAL, f"{home}/Ascend/cann", f"{home}/Ascend/ascend-toolkit/latest")
    named = [environment.get(name, "") for name in CANN_VARIABLES]
    folders = [folder for folder in (*named, *usual) if folder.startswith("/") and "\0" not in folder]
    return next((folder for folder in folders if is_folder(folder)), None)


def toolkit_version(
    folder: str | None, read: Callable[[str], str | None] = _read, machine: str = platform.machine()
) -> str | None:
    """The version that the toolkit's installer left in ``folder``, such as "9.1.0"; None where it left none."""
    if folder is None:
        return None
    names = (f"{machine}-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.info")
    found = (version_in(read(f"{folder}/{name}")) for name in names)
    return next((version for version in found if version is not None), None)


def version_in(text: str | None) -> str | None:
    """The version that a file of Ascend's installers says, ``version=[9.1.0]``."""
    found = _VERSION.search(text) if text else None
    return found[1] if found and _NUMBERED.fullmatch(found[1]) else None
