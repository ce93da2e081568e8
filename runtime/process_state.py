"""States of processes, as the system tells them."""

from __future__ import annotations

from pathlib import Path


def process_state(pid: int) -> str:
    """Linux's letter for a process, such as ``"R"`` (runs) or ``"T"`` (stopped by a signal); "" if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].strip()[:1]


class StoppedProcesses:
    """Tells processes that a signal has stopped from those that it stops for a moment, as Ctrl-Z and ``fg`` do."""

    LOOKS = 3
    """So many looks in a row find such a process stopped; whoever looks waits a part of a second between two."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def look(self, pid: int) -> bool:
        """Look at a process; True if it is stopped, as it was at the last looks."""
        self._looks[pid] = self._looks.get(pid, 0) + 1 if process_state(pid) == "T" else 0
        return self._looks[pid] >= self.LOOKS
