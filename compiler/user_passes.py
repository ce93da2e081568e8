"""Passes that users bring: functions that they register, and pattern and replacement pairs."""

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
        search: function of tensors; what it does is looked for. Numbers in it have to be equal in the graph.
        replace: function of the same tensors; what it does takes that place.
        example_inputs: tensors to trace both with; their dtypes matter, their sizes hardly do.
        extra_check: further condition on a match (``match.kwargs`` maps argument names to nodes).
        name: that reports and ``passes={"skip": [name]}`` call it by.
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
    """Add a pass to the pipeline of everything that is compiled from now on.

    It is an optional pass like any other: ``passes={"skip": [name]}`` leaves it out, the self-check drops it with a
    warning when it breaks the numbers, and reports show what it matched. Registering a name again replaces it.

    Args:
        name: of the pass; not that of a pass of ours.
        apply: edits the graph in place and returns a ``PassRecord``. See ``passes/`` for what a pass may do.
        stage: "aten" for the graph that AOTAutograd traced, "dynamo" for the one before.
        level: the lowest ``opt_level`` that runs it.
        before: name of the pass that it is to run in front of, of the same stage; by default the first that lowers
            for an NPU.

    Raises:
        ValueError: a name that is taken, or a stage, level or ``before`` that there is not.
    """
    if any(p.name == name for p in PASSES):
        raise ValueError(f"name={name!r} is a pass of torch-pagoda's; take another name")
    if stage not in ("aten", "dynamo"):
        raise ValueError(f"stage={stage!r} is neither 'aten' nor 'dynamo'")
    if level not in OPT_LEVELS:
        raise ValueError(f"level={level!r} is not one of {', '.join(map(str, OPT_LEVELS))}")
    if not any(p.name == before and p.stage == stage for p in PASSES):
        known = ", ".join(dict.fromkeys(p.name for p in PASSES if p.stage == stage))
        raise ValueError(f"before={before!r} is not a pass of stage {stage!r}; known are {known}")
    unregister_pass(name)
    _registered.append((Pass(name, apply, stage, level, required=False), before))


def unregister_pass(name: str) -> None:
    """Take a registered pass out again; one that is not registered is no error."""
    _registered[:] = [(entry, before) for entry, before in _registered if entry.name != name]


def registered_passes() -> list[str]:
    """Names of the passes that are registered now."""
    return [entry.name for entry, _ in _registered]


def with_user_passes(passes: Sequence[Pass], patterns: Sequence[Pattern] = ()) -> list[Pass]:
    """``passes`` with the registered ones in their places, and ``patterns`` on the ATen graph.

    A pattern runs twice: before anything is recognized, for patterns over torch's own operators, and at the end, for
    patterns over ``pagoda::`` operators.
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
