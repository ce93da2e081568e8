"""What is tried with the oldest and the newest torch and transformers exists, and a run of nothing is no success."""

from __future__ import annotations

from dataclasses import replace

from try_versions import ROOT, TESTS, Outcome, requirements

DONE = Outcome("oldest", ("2.11.0", "5.17.0", "3.11.7"), "exact: 512/512 tokens", "239 passed, 1 skipped", (), 1.0)


def test_the_files_exist():
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []


def test_the_oldest_are_the_lower_bounds():
    assert requirements("oldest") == ["torch==2.11.*", "transformers==5.17.*"]
    assert requirements("newest") == ["torch", "transformers"]


def test_what_counts_as_run():
    assert DONE.ok
    assert not replace(DONE, tests="no tests ran").ok
    assert not replace(DONE, quickstart="ImportError: no module").ok
    assert not replace(DONE, tests="1 failed, 238 passed", failed=("`test_x`: AssertionError",)).ok
