"""Every test is in one tier, and every shard has its part."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tiers import LARGE, TESTS, TIERS, group_of, left_to_grid, shard_of, tier_of, tier_of_file

TABLE = tomllib.loads((TESTS / "tiers.toml").read_text("utf-8"))


@pytest.mark.parametrize("tier", TABLE)
def test_the_table_names_what_there_is(tier: str) -> None:
    assert tier in TIERS
    for pattern, tests in TABLE[tier].items():
        paths = [path for path in TESTS.glob(pattern) if path.suffix == ".py"]
        assert paths, pattern
        functions = {
            node.name
            for path in paths
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert {name for test in tests if "*" not in (name := test.partition("[")[0])} <= functions, pattern


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("models/test_exactness.py::test_chunked_prefill[llama]", "quick"),
        ("models/test_exactness.py::test_chunked_prefill[qwen2]", "whole"),
        ("models/test_exactness.py::test_compiled_by_inductor[gemma2]", "process"),
        ("compiler/targets/npu/test_lowered_models.py::test_prefill_chunks_and_decode_are_exact[llama]", "quick"),
        ("compiler/targets/npu/test_lowered_models.py::test_prefill_chunks_and_decode_are_exact[qwen2]", "npu"),
        ("runtime/engine/test_engine.py::test_generate[ahead-1]", "grid"),
        ("runtime/engine/test_engine.py::test_generate[synchronous-1]", "quick"),
        ("benchmarks/test_peers.py::test_anything", "process"),
        ("runtime/ops/norm/test_rms_norm.py::test_anything[a]", "quick"),
    ],
)
def test_a_test_is_in_the_first_tier_that_names_it(name: str, tier: str) -> None:
    assert tier_of(name) == tier


def test_files_that_are_of_one_tier_need_no_import() -> None:
    assert tier_of_file(TESTS / "benchmarks/test_peers.py") == "process"
    assert tier_of_file(TESTS / "aarch64/test_on_aarch64.py") == "aarch64"
    assert tier_of_file(TESTS / "models/test_exactness.py") is None
    assert tier_of_file(TESTS / "runtime/ops/norm/test_rms_norm.py") is None


@dataclass(eq=False)
class Item:
    name: str
    params: dict[str, int] = field(default_factory=dict)

    @property
    def nodeid(self) -> str:
        return f"tests/test_a.py::{self.name}[{'-'.join(map(str, self.params.values()))}]"

    @property
    def callspec(self) -> SimpleNamespace:
        return SimpleNamespace(params=self.params)


def test_a_quarter_of_a_large_family_is_quick_and_the_ends_of_its_axes() -> None:
    family = [Item("test_large", {"rows": rows, "bits": bits}) for rows in range(100) for bits in (4, 8)]
    small = [Item("test_small", {"rows": rows}) for rows in range(LARGE)]
    left = left_to_grid([*family, *small])  # type: ignore[list-item]
    kept = [item for item in family if item not in left]
    assert len(family) / 5 < len(kept) < len(family) / 3
    assert {0, 99} <= {item.params["rows"] for item in kept} and {4, 8} == {item.params["bits"] for item in kept}
    assert not left & set(small)


def test_shards_share_out_the_groups() -> None:
    assert group_of("tests/models/test_exactness.py::test_chunked_prefill[qwen2]") == "qwen2"
    assert group_of("tests/a/test_b.py::test_c[float32-gemma3_text]") == "gemma3_text"
    assert (
        group_of("tests/a/test_b.py::test_c[float32]") == group_of("tests/a/test_b.py::test_d") == "tests/a/test_b.py"
    )
    names = [str(path.relative_to(TESTS.parent)) for path in TESTS.rglob("test_*.py")]
    shards = Counter(shard_of(name, 5) for name in names)
    assert set(shards) == {1, 2, 3, 4, 5} and max(shards.values()) < 2 * min(shards.values())


def test_tests_are_selected_by_tier_and_shard() -> None:
    """Together the shards of two tiers are the tests of both, and a file that is named runs whatever its tiers."""
    path = "tests/test_tiers.py"
    folder = "tests/runtime/engine"

    def collected(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, check=False)
        assert done.returncode in (0, 5), done.stdout
        return {line for line in done.stdout.splitlines() if "::" in line}

    assert any("test_tests_are_selected_by_tier_and_shard" in name for name in collected(path))
    both = collected("-m", "grid or whole", folder)
    parts = [collected("-m", "grid or whole", folder, "--shard", f"{k}/3") for k in (1, 2, 3)]
    assert sum(map(len, parts)) == len(both) == len(set().union(*parts)) and max(map(len, parts)) < len(both)
    assert not both & collected(folder)
    assert {name for name in both if "test_engine.py" in name} < collected(f"{folder}/test_engine.py")


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "a/b"])
def test_shards_that_are_none_are_refused(shard: str) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "--shard", shard, __file__]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and f"{shard!r} is not a shard" in done.stderr
