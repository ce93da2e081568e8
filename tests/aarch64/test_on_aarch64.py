"""The operators' tests and the quickstart on an emulated aarch64, with the kernels for each of its builds."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import BUILDS, ROOT, CannotEmulate, Emulated, set_up
from operator_files import FILES, operator_files

QUICK = operator_files(
    "packed_linear weight_panels quantized_linear stored_weight float8_linear shared_steps rms_norm gated_rms_norm"
)
OF_QUICK = (
    "(not quantized_linear or (test_the_kernel_equals_the_reference and shape2 and float32))"
    " and (not float8_linear or every_code or (dense and shape1))"
    " and (not gated_rms_norm or (test_kernel_is_the_reference and 100 and bfloat16))"
    " and (not shared_steps or every_code or (dense and shape1))"
    " and (not stored_weight or kernel_packs or (kernel_unpacks and float16))"
)
"""A minute's worth: of rounded weights, each width and layout with inputs that fill no step."""
OF_THE_HOST = "native kernel_cache prebuilt sanitizers operators_in_graphs".split()
"""Files that build kernels, or have inductor build them, which an emulated Python does not."""
NOT_COMPILED = "not compiled_graph_with_every_operator"
"""A test of another file that has inductor build its graph."""
OTHERS = [path for name, path in FILES.items() if path not in QUICK and name not in OF_THE_HOST]
START = "import cross_built_kernels, runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"

pytestmark = pytest.mark.aarch64


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    try:
        return set_up(tmp_path_factory.mktemp("kernels"))
    except CannotEmulate as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("build", BUILDS)
def test_products(emulated: Emulated, build: str, tmp_path: Path) -> None:
    _run_tests(emulated, build, QUICK, tmp_path, "-k", OF_QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_all_products(emulated: Emulated, build: str, tmp_path: Path) -> None:
    _run_tests(emulated, build, QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_products_of_real_sizes(emulated: Emulated, build: str, tmp_path: Path) -> None:
    _run_tests(emulated, build, QUICK, tmp_path, which="slow")


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_other_operators(emulated: Emulated, build: str, tmp_path: Path) -> None:
    _run_tests(emulated, build, OTHERS, tmp_path, "-k", NOT_COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS)
def test_quickstart(emulated: Emulated, build: str, tmp_path: Path) -> None:
    done = emulated.run(BUILDS[build], ["-c", START, str(ROOT / "examples/quickstart.py")], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "exact: 512/512 tokens equal transformers" in done.stdout


def _run_tests(
    emulated: Emulated,
    build: str,
    paths: list[Path],
    scratch: Path,
    *only: str,
    which: str = "not slow and not sanitize",
) -> None:
    options = ["-q", "-p", "cross_built_kernels", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    settings = ["-c", str(ROOT / "pyproject.toml"), "-o", "addopts=--import-mode=importlib"]
    arguments = ["-m", "pytest", *options, *settings, "-m", which, *only, *map(str, paths)]
    done = emulated.run(BUILDS[build], arguments, scratch)
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    print(said)
    assert done.returncode == 0 and " passed" in done.stdout, said
