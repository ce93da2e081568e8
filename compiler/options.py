"""The options that LLM(...), pagoda.compile(...) and torch.compile(options={...}) share."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..passes import PASSES, Pass
from .user_passes import Pattern, with_user_passes

VERIFY = ("model", "off", "every-pass")
CODEGEN = ("inductor", "none", "auto")
TARGETS = ("auto", "cpu")
OPT_LEVELS = (0, 1, 2, 3)
AUTO_CODEGEN_PARAMETERS = 50_000_000


@dataclass(frozen=True)
class CompileOptions:
    """How a model is compiled.

    Attributes:
        opt_level: 0 swaps attention only; 1 adds rewrites that are bitwise equal to level 0 when the graph runs as
            it is (``codegen="none"``); 2 adds the fusions; 3 all passes.
        passes: ``{"skip": [names]}`` or ``{"only": [names]}``; {} runs all of the level.
        verify: "model" compares the finished program with the model on a few tokens; "every-pass" also after
            each pass; "off" trusts.
        codegen: "inductor"; "none" runs the rewritten graph as it is; "auto" takes inductor above 50 M parameters
            where the passes left it something to fuse.
        target: "cpu", or "auto" for what the model's device asks for.
        pack_weights: keep the matrices of a paged program in the layout of the CPU's matrix kernels, beside the
            model's own (``LLM(path)`` lets go of those).
        patterns: rewrites of the user's own, see ``Pattern``.
    """

    opt_level: int = 2
    passes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    verify: str = "model"
    codegen: str = "inductor"
    target: str = "auto"
    pack_weights: bool = False
    patterns: Sequence[Pattern] = ()

    def __post_init__(self) -> None:
        _one_of("opt_level", self.opt_level, OPT_LEVELS)
        _one_of("verify", self.verify, VERIFY)
        _one_of("codegen", self.codegen, CODEGEN)
        _one_of("target", self.target, TARGETS)
        _one_of("pack_weights", self.pack_weights, (True, False))
        if not isinstance(self.passes, Mapping) or len(self.passes) > 1 or set(self.passes) - {"skip", "only"}:
            raise ValueError(
                f'passes={self.passes!r} is not understood; give {{"skip": [names]}} or {{"only": [names]}}'
            )
        for pattern in self.patterns:
            if not isinstance(pattern, Pattern):
                raise ValueError(f"patterns holds {pattern!r}; give torch_pagoda.Pattern(search, replace, inputs)")
        known = [p.name for p in with_user_passes(PASSES, self.patterns)]
        for names in self.passes.values():
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise ValueError(f"passes={self.passes!r} needs a list of pass names")
            for name in names:
                if name not in known:
                    raise ValueError(f"passes names an unknown pass {name!r}{_hint(str(name), known)}")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | None) -> CompileOptions:
        """Options from a plain dict.

        Raises:
            ValueError: an unknown key or a value that an option does not take.
        """
        options = dict(options or {})
        known = [f.name for f in fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(f"unknown option {key!r} (given {options[key]!r}){_hint(str(key), known)}")
        if options.get("passes") is None:
            options.pop("passes", None)
        return cls(**options)

    def selects(self, entry: Pass) -> bool:
        """Whether a pass is to run."""
        if entry.option and not getattr(self, entry.option):
            return False
        if "only" in self.passes:
            return entry.name in self.passes["only"]
        if entry.level > self.opt_level:
            return False
        return entry.name not in self.passes.get("skip", ())

    def uses_inductor(self, parameters: int, fusible: bool) -> bool:
        """Whether a model goes through inductor.

        Args:
            parameters: how many it has.
            fusible: its lowered graph holds operators of which inductor makes fewer (see ``is_fusible``).
        """
        if self.codegen == "auto":
            return fusible and parameters > AUTO_CODEGEN_PARAMETERS
        return self.codegen == "inductor"


def _one_of(option: str, given: object, allowed: Sequence[str]) -> None:
    if given not in allowed:
        hint = " (the npu target is not built yet; run on cpu)" if option == "target" and given == "npu" else ""
        raise ValueError(f"{option}={given!r} is not one of {', '.join(map(repr, allowed))}{hint}")


def _hint(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
