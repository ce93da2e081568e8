"""User-defined passes: registered functions, and pairs of pattern and replacement."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..passes import FIRST_OF_LOWERING, PASSES, Pass, PassRecord, TracedGraph
from ..passes.graph.fx_nodes import value

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match, PatternMatcherPass

log = logging.getLogger(__name__)

OPT_LEVELS = (0, 1, 2)

_registered: list[tuple[Pass, str]] = []


@dataclass(frozen=True, eq=False)
class Pattern:
    """A rewrite given by two functions, as for ``torch._inductor.pattern_matcher.register_replacement``.

    Attributes:
        search: function of tensors; the pattern. Numbers in it must be equal in the graph.
        replace: function of the same tensors; the replacement.
        example_inputs: tensors to trace both with; their dtypes matter, their sizes hardly.
        extra_check: additional condition on a match (``match.kwargs`` maps argument names to nodes).
        name: for reports and ``passes={"skip": [name]}``.
    """

    search: Callable[..., Any]
    replace: Callable[..., Any]
    example_inputs: Sequence[torch.Tensor]
    extra_check: Callable[[Match], bool] | None = None
    name: str = "pattern"


def register_pass(
    name: str,
    apply: Callable[[TracedGraph], PassRecord],
    *,
    stage: str = "aten",
    level: int = 2,
    before: str = FIRST_OF_LOWERING,
) -> None:
    """Register a pass for all later compilations.

    It is an optional pass like any other: ``passes={"skip": [name]}`` skips it, the self-check drops it with a
    warning if it changes the logits, and reports show its matches. Registering a name again replaces the pass.

    Args:
        name: name of the pass; not that of a built-in one.
        apply: modifies the graph in place and returns a ``PassRecord``. See ``passes/`` for the rules.
        stage: "aten" for the graph of AOTAutograd, "dynamo" for the one before.
        level: the lowest ``opt_level`` that runs it.
        before: name of the pass of the same stage to run before; by default the first one that lowers for an NPU.

    Raises:
        ValueError: a name that is taken, or an unknown stage, level or ``before``.
    """
    if any(p.name == name for p in PASSES):
        raise ValueError(f"name={name!r} is the name of a built-in pass; use another")
    if stage not in ("aten", "dynamo"):
        raise ValueError(f"stage={stage!r} is invalid; use 'aten' or 'dynamo'")
    if level not in OPT_LEVELS:
        raise ValueError(f"level={level!r} is invalid; use one of {', '.join(map(str, OPT_LEVELS))}")
    if not any(p.name == before and p.stage == stage for p in PASSES):
        known = ", ".join(dict.fromkeys(p.name for p in PASSES if p.stage == stage))
        raise ValueError(f"before={before!r} is not a pass of stage {stage!r}; use one of {known}")
    unregister_pass(name)
    _registered.append((Pass(name, apply, stage, level, required=False), before))


def unregister_pass(name: str) -> None:
    """Unregister a pass; a no-op for an unknown name."""
    _registered[:] = [(entry, before) for entry, before in _registered if entry.name != name]


def registered_passes() -> list[str]:
    """Names of the registered passes."""
    return [entry.name for entry, _ in _registered]


def with_user_passes(passes: Sequence[Pass], patterns: Sequence[Pattern] = ()) -> list[Pass]:
    """``passes`` with the registered ones inserted, and ``patterns`` on the ATen graph.

    A pattern runs twice: before recognition, for patterns over torch's own operators, and at the end, for patterns
    over ``pagoda::`` operators.
    """
    result: list[Pass] = []
    of_patterns = [Pass(p.name, _PatternPass(p), "aten", 0, required=False) for p in patterns]
    placed = False
    for entry in passes:
        if entry.stage == "aten" and not placed:
            result += of_patterns
            placed = True
        if entry.name == FIRST_OF_LOWERING:
            result += of_patterns
        if entry.name not in {other.name for other in result}:  # of entries of one name the first
            result += [mine for mine, before in _registered if before == entry.name]
        result.append(entry)
    return result


class _PatternPass:
    """A pattern as a pass."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def __call__(self, traced: TracedGraph) -> PassRecord:
        record = PassRecord(self.pattern.name)
        matcher = _matcher(self.pattern)
        nodes = list(traced.graph.nodes)
        for node in nodes:
            node.meta["val"] = value(node)  # the matcher's name for it
        with traced.fake_mode:
            record.matches = matcher.apply(traced.module)
        for node in traced.graph.nodes:
            found = node.meta.pop("val", None)
            if "example_value" not in node.meta and node.op == "call_function":
                node.meta["example_value"] = found
                traced.propagate(node)
        return record


@functools.lru_cache(maxsize=256)
def _matcher(pattern: Pattern) -> PatternMatcherPass:
    # Imported here: it brings all of inductor, which a process that finds its program in the store never needs.
    from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement

    matcher = PatternMatcherPass(pattern.name)
    # Nothing is decomposed, as in the graph; linears are one node there and views around a product when traced.
    trace = functools.partial(fwd_only, get_decomp_fn=dict)
    check = pattern.extra_check or (lambda match: True)
    with unset_fake_temporarily(), torch.no_grad():
        register_replacement(
            pattern.search,
            pattern.replace,
            [x.detach().clone() for x in pattern.example_inputs],  # one object twice would trace as one argument
            trace,  # type: ignore[arg-type]
            matcher,  # type: ignore[arg-type]
            extra_check=check,
            get_decomp_fn=dict,
        )
    return matcher
