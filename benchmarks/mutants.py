"""How many small faults of the product's code do the tests find?

Draws faults with a seed, spread over all folders: a comparison flipped, an integer one off, a call left out, two
arguments exchanged. Runs the tests of each tier once with all sites marked, which tells the tests that reach each
site; then puts in one fault at a time and runs these tests until one fails. A fault that a tier does not find goes on
to the next tier. What was found is kept in ``--work``, and a run that was cut off goes on from there.

    python benchmarks/mutants.py --work /tmp/mutants --count 100 --seed 1 --jobs 2

A fault that makes the tests run for more than ``--limit`` seconds counts as found. So does one that stops collection.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "passes", "runtime", "torch_pagoda")
TIERS = ("quick", "process or whole or npu or grid")
FLIPPED = {
    **{ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
SITES = "_mutant_sites"
MARKED = f"(__import__('torch_pagoda.{SITES}', fromlist=['reached']).reached({{number}}) or ({{code}}))"
REACHED = """
import os
_seen = set()
def reached(site):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (site, test) not in _seen:
        _seen.add((site, test))
        with open(os.path.join(os.environ["MUTANT_SITES"], str(os.getpid())), "a") as file:
            file.write(f"{site} {test}\\n")
"""
PLUGIN = """
import os
def pytest_runtest_logreport(report):
    if report.failed:
        with open(os.path.join(os.environ["MUTANT_SITES"], "failed"), "a") as file:
            file.write(report.nodeid + "\\n")
"""


@dataclass(frozen=True)
class Mutant:
    """One fault: the text from ``start`` to ``end`` of a file, in characters, becomes ``code``.

    Attributes:
        number: its place among those drawn.
        kind: what was done.
        line: of the file, from 1.
    """

    number: int
    path: str
    kind: str
    line: int
    start: int
    end: int
    code: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.code + source[self.end :]


def faults(path: Path) -> Iterator[Mutant]:
    """Every fault of the functions of a file, all with the number 0."""
    source = path.read_text("utf-8")
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    encoded = source.encode()

    def offset(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    def fault(node: ast.expr, kind: str, code: str) -> Mutant:
        start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno or 0, node.end_col_offset or 0)
        return Mutant(0, str(path.relative_to(ROOT)), kind, node.lineno, start, end, code)

    def text(node: ast.expr) -> str:
        return ast.get_source_segment(source, node) or ""

    for node in _expressions(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = FLIPPED[type(node.ops[0])]
            yield fault(node, "comparison flipped", f"({text(node.left)}) {operator} ({text(node.comparators[0])})")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield fault(node, "constant + 1", f"({node.value + 1})")
            yield fault(node, "constant - 1", f"({node.value - 1})")
        elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[0], ast.Starred):
            if isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
                continue  # the same function
            first, second = map(text, node.args[:2])
            if not isinstance(node.args[1], ast.Starred) and first != second:
                whole, at = text(node), node.args[0]
                begin = offset(at.lineno, at.col_offset) - offset(node.lineno, node.col_offset)
                last = node.args[1]
                stop = offset(last.end_lineno or 0, last.end_col_offset or 0) - offset(node.lineno, node.col_offset)
                yield fault(node, "arguments exchanged", f"{whole[:begin]}{second}, {first}{whole[stop:]}")
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Call):
                    yield fault(inner.value, "call left out", "None")


def _expressions(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions in bodies of functions, but for annotations, messages of errors, and f-strings."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from _within(statement)
        elif isinstance(node, ast.ClassDef):
            yield from _expressions(node)


def _within(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments | ast.match_case):
        return
    if isinstance(node, ast.expr):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _within(child)


def draw(count: int, seed: int) -> list[Mutant]:
    """``count`` faults: one after another from each folder, and there of each kind in turn."""
    chance = random.Random(seed)
    rooms: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for mutant in faults(path):
                rooms[str(Path(mutant.path).parent)][mutant.kind].append(mutant)
    order = sorted(rooms)
    chance.shuffle(order)
    drawn: list[Mutant] = []
    lines: set[tuple[str, int]] = set()
    while len(drawn) < count:
        for room in order[: count - len(drawn)]:
            of_kind = rooms[room]
            kind = chance.choice(sorted(of_kind))
            mutant = chance.choice(of_kind[kind])
            if (mutant.path, mutant.line) not in lines:
                lines.add((mutant.path, mutant.line))
                drawn.append(Mutant(**{**asdict(mutant), "number": len(drawn)}))
    return drawn


class Tree:
    """A copy of this tree whose product is what its tests import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "tree")], check=True)
        for name in FOLDERS[:3]:  # found here before the finder of an editable install is asked
            (folder / "tree" / "torch_pagoda" / name).symlink_to(folder / "tree" / name)
        (folder / "tree" / "torch_pagoda" / f"{SITES}.py").write_text(REACHED)
        (folder / "tree" / "mutant_plugin.py").write_text(PLUGIN)

    def write(self, path: str, source: str) -> None:
        (self.folder / "tree" / path).write_text(source, "utf-8")

    def pytest(self, *arguments: str, limit: float, sites: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run pytest; the exit status is 124 where it took longer than ``limit`` seconds."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "tree"), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["MUTANT_SITES"] = str(sites or self.folder)
        environment["PYTHONPYCACHEPREFIX"] = str(self.folder / "cache")
        with open(self.folder / "said", "w+", encoding="utf-8") as said:
            try:
                done = subprocess.run(
                    command, cwd=self.folder / "tree", env=environment, stdout=said, stderr=said, timeout=limit
                )
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = 124
            said.seek(0)
            return subprocess.CompletedProcess(command, status, said.read())


def tests_by_site(mutants: list[Mutant], tier: str, work: Path, limit: float) -> dict[int, list[str]]:
    """For each mutant the tests of a tier that reach its site and pass without it.

    A site that only importing reaches gets every test that reaches one.
    """
    kept = work / f"sites {tier}.json"
    if kept.exists():
        return {int(number): tests for number, tests in json.loads(kept.read_text()).items()}
    tree = Tree(work / "marked")
    of_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        of_file[mutant.path].append(mutant)
    for path, inside in of_file.items():
        tree.write(path, _marked((ROOT / path).read_text("utf-8"), inside))
    sites = work / "reached"
    shutil.rmtree(sites, ignore_errors=True)
    sites.mkdir()
    done = tree.pytest("-p", "mutant_plugin", "-m", tier, limit=limit, sites=sites)
    print(done.stdout.splitlines()[-1], flush=True)
    failed = set((sites / "failed").read_text().splitlines()) if (sites / "failed").exists() else set()
    found: dict[int, dict[str, None]] = defaultdict(dict)
    imported = set()
    for file in sites.glob("[0-9]*"):
        for line in file.read_text().splitlines():
            number, _, test = line.partition(" ")
            if not test:
                imported.add(int(number))
            elif test not in failed:
                found[int(number)][test] = None
    if not found:
        raise RuntimeError(f"no test of {tier!r} passes on the marked tree: {done.stdout[-2000:]}")
    every = {test: None for tests in found.values() for test in tests}
    for number in imported - found.keys():
        found[number] = every
    result = {mutant.number: sorted(found[mutant.number]) for mutant in mutants}
    kept.write_text(json.dumps(result))
    return result


def _marked(source: str, mutants: list[Mutant]) -> str:
    """The source that says when it gets to a site. Of two sites that lie in each other the outer one comes last."""
    grown: list[tuple[int, int]] = []
    for mutant in sorted(mutants, key=lambda m: (m.start, -m.end), reverse=True):
        end = mutant.end + sum(more for start, more in grown if start < mutant.end)
        marked = MARKED.format(number=mutant.number, code=source[mutant.start : end])
        grown.append((mutant.start, len(marked) - (end - mutant.start)))
        source = source[: mutant.start] + marked + source[end:]
    return source


def verdict(mutant: Mutant, tests: list[str], tree: Tree, limit: float) -> str:
    """The first test that fails, or "" where all pass."""
    source = (ROOT / mutant.path).read_text("utf-8")
    tree.write(mutant.path, mutant.applied(source))
    try:
        near = Path(mutant.path).with_suffix("").parts
        order = sorted(tests, key=lambda test: -sum(part in test for part in near))
        listed = tree.folder / "tests.txt"
        listed.write_text("\n".join(order))
        done = tree.pytest("-x", "-n", "0", f"@{listed}", limit=limit)
    finally:
        tree.write(mutant.path, source)
    if done.returncode == 0:
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit status {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for copies of the tree and for results")
    parser.add_argument("--count", type=int, default=100, help="faults to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="faults to try at the same time")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of one fault")
    parser.add_argument("--tiers", nargs="+", default=TIERS, help="expressions for -m, one after another")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    mutants = draw(args.count, args.seed)
    results = args.work / "results.json"
    found: dict[str, dict[str, str]] = json.loads(results.read_text()) if results.exists() else {}
    trees: SimpleQueue[Tree] = SimpleQueue()
    for job in range(args.jobs):
        trees.put(Tree(args.work / f"job {job}"))
    left = mutants
    for tier in args.tiers:
        reached = tests_by_site(left, tier, args.work, 60 * args.limit)
        of_tier = found.setdefault(tier, {})

        def judge(mutant: Mutant, reached: dict[int, list[str]] = reached, of_tier: dict[str, str] = of_tier) -> None:
            if str(mutant.number) in of_tier:
                return
            tests = reached[mutant.number]
            tree = trees.get()
            said = verdict(mutant, tests, tree, args.limit) if tests else ""
            trees.put(tree)
            of_tier[str(mutant.number)] = said
            results.write_text(json.dumps(found, indent=1))
            where = f"{mutant.path}:{mutant.line} {mutant.kind}"
            print(f"{where}, {len(tests)} tests: {said or 'NOT FOUND'}\n", end="", flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(judge, left))
        left = [mutant for mutant in left if not of_tier[str(mutant.number)]]
        kinds = Counter(mutant.kind for mutant in left)
        print(f"\n{tier}: {len(mutants) - len(left)} of {len(mutants)} found; left: {dict(kinds)}\n", flush=True)
    for mutant in left:
        print(f"not found: {mutant.path}:{mutant.line} {mutant.kind}: {mutant.code}")


if __name__ == "__main__":
    main()
