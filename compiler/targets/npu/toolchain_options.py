"""Options of npugraph_ex and torchair that users may give, by the names that these have.

Names and values are checked when an engine is made, against the configuration of the wheel where it is loaded, else
against the table below, which is that of torch_npu 2.13.0. What a route sets itself is refused.

- "aclgraph": fields of ``npugraph_ex.CompilerConfig``, such as ``static_kernel_compile`` (torchair's repository,
  ``docs/zh/npugraph_ex``).
- "ge": paths in ``torchair.CompilerConfig``, such as ``ge_config.enable_single_stream`` (likewise, ``docs/zh``).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ....passes.schedule.super_kernel_operators import SUPER_KERNEL_CHIPS, SUPER_KERNEL_PRODUCTS
from ....runtime.npu_target import Product

_BOOL = (True, False)

Allowed = Sequence[Any] | None
"""Values of an option; None where they are not listed."""

_OF_ACLGRAPH: dict[str, Allowed] = {
    **dict.fromkeys(("static_kernel_compile", "disable_static_kernel_compile_cache"), _BOOL),
    "super_kernel_optimize": _BOOL,
    **dict.fromkeys(("super_kernel_optimize_options", "super_kernel_debug_options"), None),
    **dict.fromkeys(
        ("clone_output", "remove_noop_ops", "remove_cat_ops", "inplace_pass", "input_inplace_pass"), _BOOL
    ),
    **dict.fromkeys(("deadlock_check", "record_statistics_debug_info", "dump_tensor_data"), _BOOL),
    "unsafe_skip_npugraph_capture_validation": _BOOL,
    "capture_error_mode": ("global", "thread_local", "relaxed"),
    "data_dump_stage": ("original", "optimized"),
    "data_dump_dir": None,
}
_OF_GE: dict[str, Allowed] = {
    **dict.fromkeys(("ge_config.enable_single_stream", "ge_config.oo_constant_folding"), _BOOL),
    "ge_config.oo_dead_code_elimination": _BOOL,
    "ge_config.oo_level": ("O1", "O3"),
    "ge_config.export_compile_stat": ("0", "1", "2"),
    **dict.fromkeys(("ge_config.aicore_num", "ge_config.optimization_switch"), None),
    "ge_config.multistream_parallel_mode": None,
    **dict.fromkeys(("experimental_config.cc_parallel_enable", "experimental_config.memory_efficiency"), _BOOL),
    **dict.fromkeys(("experimental_config.enable_ref_data", "experimental_config.enable_view_optimize"), _BOOL),
    **dict.fromkeys(("experimental_config.remove_noop_ops", "experimental_config.tiling_schedule_optimize"), _BOOL),
    "experimental_config.npu_fx_pass": _BOOL,
    "experimental_config.topology_sorting_strategy": ("BFS", "DFS", "RDFS", "StableRDFS"),
    "experimental_config.static_model_ops_lower_limit": None,
    "experimental_config.jit_compile": ("auto",),
    "fusion_config.fusion_switch_file": None,
    **dict.fromkeys(("dump_config.enable_dump", "dump_config.quant_dumpable"), _BOOL),
    "dump_config.dump_mode": ("input", "output", "all"),
    "dump_config.dump_data": ("tensor", "stats"),
    "dump_config.data_dump_stage": ("original", "optimized"),
    **dict.fromkeys(("dump_config.dump_path", "dump_config.dump_step", "dump_config.dump_layer"), None),
    "dump_config.dump_config_path": None,
    "debug.graph_dump.type": ("txt", "pbtxt", "py"),
    "debug.data_dump.type": ("npy",),
    "debug.fx_summary.type": ("csv",),
    "debug.fx_summary.skip_compile": _BOOL,
    "debug.deadlock_check": _BOOL,
    "aoe_config.aoe_mode": ("2",),
    **dict.fromkeys(("aoe_config.work_path", "aoe_config.aoe_config_file"), None),
}
KNOWN: dict[str, dict[str, Allowed]] = {"aclgraph": _OF_ACLGRAPH, "ge": _OF_GE}
"""By ``codegen``, the options of torch_npu 2.13.0 that may be given."""

_FUSES = "its fusions follow lowering, and were not checked against the operators' limits"
_ADDRESSES = "weights and steps keep their addresses"
_OURS: dict[str, dict[str, str]] = {
    "aclgraph": {
        "capture_limit": "sizes are planned from the chip's streams and events",
        **dict.fromkeys(("clone_input", "frozen_parameter", "force_recapture"), _ADDRESSES),
        **dict.fromkeys(("use_graph_pool", "reuse_graph_pool_in_same_fx"), "captures share their memory"),
        "pattern_fusion_pass": _FUSES,
        **dict.fromkeys(("post_grad_custom_pre_pass", "post_grad_custom_post_pass"), "writes are put in place there"),
        "force_eager": "give codegen='none'",
        "mode": "give codegen",
    },
    "ge": {
        "experimental_config.frozen_parameter": _ADDRESSES,
        "experimental_config.pattern_fusion_pass": _FUSES,
        "experimental_config.keep_inference_input_mutations": "caches are written where they lie",
        "experimental_config.aot_config_enable_joint_graph": "graphs are for inference",
        "experimental_config.aot_config_output_loss_index": "graphs are for inference",
        **dict.fromkeys(("post_grad_custom_pre_pass", "post_grad_custom_post_pass"), "writes are put in place there"),
        "debug.run_eagerly": "give codegen='none'",
        "mode": "give codegen",
    },
}
"""What a route sets itself, and why."""
_ELSEWHERE = ("export.", "debug.aclgraph.", "aclgraph_config.", "npugraphex_config.", "inference_config.")
"""Parts of torchair's configuration that its graphs for GE do not read, or that write files instead."""

SUPER_KERNEL_OPTIONS: dict[str, dict[str, type]] = {
    "super_kernel_optimize_options": {
        **dict.fromkeys(("preload_code", "split_mode", "stream_fusion", "constant_codegen", "auto_op_parallel"), int),
        "opt_extend": str,
        **dict.fromkeys(("dcci_before_kernel_start", "dcci_after_kernel_end", "dcci_disable_on_kernel"), list),
        "aggressive_opt_strategies": dict,
        "ubuf_lock_ignore_kernel": list,
        "early_start": int,
    },
    "super_kernel_debug_options": {
        **dict.fromkeys(("debug_sync_all", "debug_op_exec_trace", "debug_cross_core_sync_check"), int),
        "debug_extend": str,
    },
}
"""What these two dictionaries may hold (``torch_npu/npu/graphs.py`` of 2.13.0, ``NPUGraph._validate_options``)."""


def check_options(options: Mapping[str, Any], codegen: str, product: Product) -> None:
    """Check what a user gives to a toolchain.

    Args:
        options: by name.
        codegen: "ge" or "aclgraph"; another where nothing is given.
        product: family of the chip.

    Raises:
        ValueError: a name that there is not, one that is not the user's to set, or a value that it does not take.
    """
    if not options:
        return
    known = known_options(codegen)
    for name, value in options.items():
        if name in _OURS[codegen]:
            raise ValueError(f"npu_options[{name!r}] is set internally: {_OURS[codegen][name]}; omit it")
        if name not in known:
            raise ValueError(f"npu_options[{name!r}] is not an option of codegen={codegen!r}; {_remedy(name, known)}")
        allowed = known[name]
        if allowed is not None and not any(
            value is each or (value == each and value not in _BOOL) for each in allowed
        ):
            raise ValueError(f"npu_options[{name!r}]={value!r} is not one of {', '.join(map(repr, allowed))}")
    if codegen == "aclgraph":
        _check_super_kernels(options, product)
    if is_loaded():
        (_set_on_npugraph_ex if codegen == "aclgraph" else _set_on_torchair)(options)


def _remedy(name: str, known: Mapping[str, Allowed]) -> str:
    close = [each for each in known if each.endswith(f".{name}")] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(sorted(known))}"


def _check_super_kernels(options: Mapping[str, Any], product: Product) -> None:
    if options.get("super_kernel_optimize"):
        if product not in SUPER_KERNEL_PRODUCTS:
            raise ValueError(
                f"npu_options['super_kernel_optimize'] is documented for {SUPER_KERNEL_CHIPS}, but the chip is "
                f"{product.value}*; omit it"
            )
        if not options.get("static_kernel_compile"):
            raise ValueError(
                "npu_options['super_kernel_optimize'] fuses static kernels; set 'static_kernel_compile': True too"
            )
    for name, known in SUPER_KERNEL_OPTIONS.items():
        given = options.get(name)
        if given is None:
            continue
        if not options.get("super_kernel_optimize"):
            raise ValueError(f"npu_options[{name!r}] is for super kernels; set 'super_kernel_optimize': True too")
        if not isinstance(given, Mapping):
            raise ValueError(f"npu_options[{name!r}]={given!r} is not a dictionary")
        for key, value in given.items():
            if key not in known:
                raise ValueError(f"npu_options[{name!r}] has no {key!r}; {_remedy(str(key), dict.fromkeys(known))}")
            if not isinstance(value, known[key]):
                raise ValueError(f"npu_options[{name!r}][{key!r}]={value!r} is not a {known[key].__name__}")


def is_loaded() -> bool:
    """True if this process has loaded torch_npu, whose configuration can be read then."""
    return "torch_npu" in sys.modules


def known_options(codegen: str) -> dict[str, Allowed]:
    """The options that may be given, with their values: those of the wheel that is loaded, else ``KNOWN``."""
    if not is_loaded():
        return KNOWN[codegen]
    found = _options_of_npugraph_ex() if codegen == "aclgraph" else _options_of_torchair()
    return {name: allowed for name, allowed in found.items() if name not in _OURS[codegen]}


def _options_of_npugraph_ex() -> dict[str, Allowed]:
    import npugraph_ex

    config = npugraph_ex.CompilerConfig()
    names = [name for name in vars(config) if not name.startswith("_")]
    return {name: getattr(getattr(config, name), "optional", None) for name in names}


def _options_of_torchair() -> dict[str, Allowed]:
    import torchair

    found: dict[str, Allowed] = {}

    def walk(config: Any, path: str) -> None:
        for name, value in vars(config).items():
            if name.startswith("_") or f"{path}{name}.".startswith(_ELSEWHERE):
                continue
            if hasattr(value, "optional"):
                found[path + name] = value.optional
            elif hasattr(value, "__dict__"):
                walk(value, f"{path}{name}.")

    walk(torchair.CompilerConfig(), "")
    return found


def _set_on_npugraph_ex(options: Mapping[str, Any]) -> None:
    """Set options on a configuration, to see whether it takes their values."""
    import npugraph_ex

    config = npugraph_ex.CompilerConfig()
    for name, value in options.items():
        _set(config, name, name, value)


def _set_on_torchair(options: Mapping[str, Any]) -> None:
    import torchair

    set_ge_options(torchair.CompilerConfig(), options)


def set_ge_options(config: Any, options: Mapping[str, Any]) -> None:
    """Set options on a ``torchair.CompilerConfig``, by their paths in it.

    Raises:
        ValueError: it does not take a value.
    """
    for name, value in options.items():
        *path, last = name.split(".")
        part = config
        for step in path:
            part = getattr(part, step)
        _set(part, last, name, value)


def _set(config: Any, attribute: str, name: str, value: Any) -> None:
    try:
        setattr(config, attribute, value)
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"npu_options[{name!r}]={value!r} was rejected: {first.strip()}") from None
