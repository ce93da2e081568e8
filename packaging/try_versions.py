"""The oldest and the newest torch and transformers that this project takes: does it run with them?

    python packaging/try_versions.py [--folder DIR] [--only oldest|newest] [TEST ...]

For each it makes an environment (kept in DIR, and taken up again), runs the quickstart and some test files, or those
given, and prints a table in markdown. The oldest are the lower bounds in ``pyproject.toml``; the newest are what the
index has. Torch's build is whatever the index gives, on Linux often one with CUDA (6 GB in an environment). Pip's own
environment variables say where else to look: ``PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu``.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/compiler/test_backend.py",  # torch.compile(backend="pagoda")
    "tests/compiler/test_build.py",  # capture, passes, comparison, code
    "tests/compiler/test_compile.py",  # the program store
    "tests/models/test_int8_cache.py",
    "tests/passes/lower/cpu/test_pack_linears.py",  # oneDNN's weights, with inductor's code around
    "tests/passes/lower/cpu/test_quantize_linears.py",
    "tests/runtime/ops/test_operators_in_graphs.py",
    "tests/runtime/ops/test_fused_operators_in_graphs.py",
)
"""What leans most on torch's and transformers' inner workings, within minutes."""
VERSIONS = (
    "import platform, torch, transformers as t; print(torch.__version__, t.__version__, platform.python_version())"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ran in one environment.

    Attributes:
        name: ``oldest`` or ``newest``.
        versions: of torch, transformers and Python.
        quickstart: its last line, or how it failed.
        tests: pytest's last line.
        failed: names of tests that failed.
        seconds: of CPU that quickstart and tests took.
    """

    name: str
    versions: tuple[str, str, str]
    quickstart: str
    tests: str
    failed: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether all of it ran, and nothing failed; a run that found no tests says so in its last line."""
        return not self.failed and self.quickstart.startswith("exact") and " passed" in self.tests


def requirements(name: str) -> list[str]:
    """What pip is asked for: the lower bounds as exact releases, or no bounds at all."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    bounds = dict(text.split(">=") for text in settings["project"]["dependencies"] if ">=" in text)
    return [f"{package}=={bound}.*" if name == "oldest" else package for package, bound in bounds.items()]


def make_environment(name: str, folder: Path) -> Path:
    """The Python of an environment with this tree in it."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
    command = [python, "-m", "pip", "install", "--quiet", "--upgrade", *requirements(name), "-e", f"{ROOT}[test]"]
    subprocess.run(command, check=True)
    return python


def try_environment(name: str, python: Path, tests: list[str]) -> Outcome:
    """Run the quickstart and tests, with caches of their own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCH_PAGODA_CACHE": cache, "PYTHONNOUSERSITE": "1"}
        versions = _run(python, "-c", VERSIONS, environment=environment).split()
        quickstart = _run(python, "examples/quickstart.py", environment=environment)
        said = _run(python, "-m", "pytest", "-q", "-rfE", "-n", "0", *tests, environment=environment)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?", said, re.MULTILINE)
    return Outcome(
        name,
        (versions[0], versions[1], versions[2]),
        _last_line(quickstart),
        re.sub(r" in [\d.]+s.*", "", _last_line(said)),
        tuple(f"`{test}`: {why}" for test, why in failed),
        seconds,
    )


def _run(python: Path, *arguments: str, environment: dict[str, str]) -> str:
    command = [str(python), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.stdout if done.stdout.strip() else done.stderr


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing"])[-1].strip("= ")


def table(outcomes: list[Outcome]) -> str:
    """Outcomes as a table in markdown, and below it the tests that failed."""
    lines = ["| | torch | transformers | Python | quickstart | tests | CPU s |", "|---|---|---|---|---|---|---:|"]
    for outcome in outcomes:
        cells = (outcome.name, *outcome.versions, outcome.quickstart, outcome.tests, f"{outcome.seconds:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"- {outcome.name}: {failure}" for outcome in outcomes for failure in outcome.failed]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="test files, instead of a selection")
    parser.add_argument("--folder", type=Path, help="keeps the environments; by default they are thrown away")
    parser.add_argument("--only", choices=("oldest", "newest"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        names = [arguments.only] if arguments.only else ["oldest", "newest"]
        outcomes = [try_environment(name, make_environment(name, folder), arguments.tests) for name in names]
    print(table(outcomes))
    sys.exit(not all(outcome.ok for outcome in outcomes))


if __name__ == "__main__":
    main()
