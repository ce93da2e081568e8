"""The functions that transformers offers to kernel packages: found, compared, replaced while tracing, restored."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from torch_pagoda.compiler.capture import kernel_functions as subject
from torch_pagoda.compiler.capture.kernel_counterparts import COUNTERPARTS
from torch_pagoda.compiler.capture.kernel_functions import (
    has_kernel_functions,
    kernel_functions,
    operators_in_place_of_kernels,
)
from torch_pagoda.passes import UnsupportedModel

MODELS = Path(transformers.__file__).parent / "models"
DECORATOR = "use_kernel_func_from_hub_with_fallback"
WITHOUT_COUNTERPART = {
    *("causal_conv1d_update", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda", "selective_state_update"),
    *("mamba_inner_fn", "mamba_split_conv1d_scan_combined"),
}
"""Called with a cache, and in training."""


def module_in(name: str) -> nn.Module:
    """A module whose class says that it comes from a Python module."""
    return type("Layer", (nn.Module,), {"__module__": name})()


def offering_modules() -> Iterator[str]:
    """Python modules of transformers that offer functions to kernel packages."""
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        if f"@{DECORATOR}" in path.read_text(encoding="utf-8"):
            yield f"transformers.models.{path.parent.name}.{path.stem}"


def test_every_function_that_transformers_offers_is_known_and_right() -> None:
    """Fails where a new version of transformers offers more, or something else under a name."""
    names = list(offering_modules())
    assert len(names) >= 20
    offered = set()
    for name in names:
        importlib.import_module(name)
        module = module_in(name)
        found = kernel_functions(module)
        assert found, name
        offered |= {known for known, _ in found.values()}
        with operators_in_place_of_kernels(module):  # compares each
            pass
    assert offered - set(COUNTERPARTS) == WITHOUT_COUNTERPART
    assert set(COUNTERPARTS) <= offered


def test_functions_without_the_decorator() -> None:
    modeling_lfm3 = pytest.importorskip("transformers.models.lfm3.modeling_lfm3")
    found = [name for name, _ in kernel_functions(module_in(modeling_lfm3.__name__)).values()]
    # Releases of transformers differ in whether decoding has a function of its own.
    assert found in (["causal_conv1d_fn"], ["causal_conv1d_update", "causal_conv1d_fn"])
    assert has_kernel_functions(modeling_lfm3.Lfm3ForCausalLM)
    assert not has_kernel_functions(transformers.LlamaForCausalLM)


def test_a_class_of_no_module() -> None:
    assert kernel_functions(module_in("no.such.module")) == {}
    with operators_in_place_of_kernels(module_in("no.such.module")):
        pass


def test_what_is_seen_meanwhile_and_afterwards() -> None:
    before = dict(vars(qwen3_next))
    with operators_in_place_of_kernels(module_in(qwen3_next.__name__)):
        assert qwen3_next.causal_conv1d_fn is COUNTERPARTS["causal_conv1d_fn"].traced
        with pytest.raises(NotImplementedError, match="fused_recurrent_gated_delta_rule is not supported"):
            qwen3_next.torch_recurrent_gated_delta_rule()
    assert dict(vars(qwen3_next)) == before


def test_an_error_while_tracing_restores_all() -> None:
    before = dict(vars(qwen3_next))
    with pytest.raises(KeyError), operators_in_place_of_kernels(module_in(qwen3_next.__name__)):
        raise KeyError("of the model")
    assert dict(vars(qwen3_next)) == before


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> nn.Module:
    """A module that sees ``function`` as its own under a name."""
    monkeypatch.setattr(qwen3_next, name, function, raising=False)
    return module_in(qwen3_next.__name__)


def test_other_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal_conv1d_fn(hidden_states: torch.Tensor, weight: torch.Tensor, dilation: int = 1) -> torch.Tensor:
        return hidden_states

    module = replaced(monkeypatch, "causal_conv1d_fn", causal_conv1d_fn)
    with (
        pytest.raises(UnsupportedModel, match=r"takes \(hidden_states, weight, dilation\), not \(hidden_states, w"),
        operators_in_place_of_kernels(module),
    ):
        pass
    assert qwen3_next.causal_conv1d_fn is causal_conv1d_fn


@pytest.mark.parametrize("wrong", ["scale", "last token", "beyond a chunk", "NaN", "shape", "dtype", "fails"])
def test_other_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    own = subject._offered(qwen3_next.torch_chunk_gated_delta_rule)[1]

    def chunk_gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Any:
        result, state = own(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        if wrong == "scale":
            result = result * 1.02
        elif wrong == "last token":
            result[:, -1] = result[:, -2]
        elif wrong == "NaN":
            result[:, -1] = torch.nan
        elif wrong == "shape":
            result = result.flatten(2)
        elif wrong == "dtype":
            result = result.double()
        elif wrong == "fails":
            raise RuntimeError("of its own")
        elif query.shape[1] > chunk_size:
            result[:, chunk_size:] *= 1.01
        return result, state

    module = replaced(monkeypatch, "chunk_gated_delta_rule", chunk_gated_delta_rule)
    with (
        pytest.raises(UnsupportedModel, match="does not compute what its name says"),
        operators_in_place_of_kernels(module),
    ):
        pass


@pytest.mark.parametrize("given", [{"seq_idx": 1}, {"initial_state": 1}, {"output_final_state": True}])
def test_what_a_flat_step_has_no_counterpart_for(given: dict[str, Any]) -> None:
    arguments = COUNTERPARTS["chunk_gated_delta_rule"].sample(7)
    with pytest.raises(NotImplementedError, match=f"with {next(iter(given))} has no counterpart"):
        COUNTERPARTS["chunk_gated_delta_rule"].traced(**arguments, **given)


def test_installed_packages_change_nothing(tmp_path: Path) -> None:
    """Stand-ins of the packages offer functions of their own, which transformers then calls; graphs are the same."""
    for package, function in (("fla", "chunk_gated_delta_rule"), ("causal_conv1d", "causal_conv1d_fn")):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text(f"def {function}(*args, **kwargs):\n    raise SystemExit('called')\n")
    code = (
        "from transformers.models.qwen3_next import modeling_qwen3_next as m\n"
        "from torch import nn\n"
        "from torch_pagoda.compiler.capture.kernel_counterparts import COUNTERPARTS\n"
        "from torch_pagoda.compiler.capture.kernel_functions import kernel_functions, operators_in_place_of_kernels\n"
        "found = kernel_functions(type('L', (nn.Module,), {'__module__': m.__name__})())\n"
        "with operators_in_place_of_kernels(type('L', (nn.Module,), {'__module__': m.__name__})()):\n"
        "    same = m.causal_conv1d_fn is COUNTERPARTS['causal_conv1d_fn'].traced\n"
        "print(sorted(name for name, _ in found.values()), same)\n"
        "try:\n    m.causal_conv1d_fn()\nexcept SystemExit as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    names = ["causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
    assert result.stdout.splitlines() == [f"{names} True", "called"]
