"""The record of a pass: its matches, and the reason of each near miss."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from .fx_nodes import module_path


class NoMatch(Exception):
    """Raised by what looks like a match and is left alone. The message is the reason, one line for a person."""


@dataclass(frozen=True)
class Rejection:
    """A site that looked like a match but was left alone.

    Attributes:
        node: name of the graph node.
        reason: one line, for a person.
        module: qualified name of the module that the node came from, "" when unknown.
    """

    node: str
    reason: str
    module: str = ""


@dataclass(frozen=True)
class Route:
    """The lowering of one operator.

    Attributes:
        node: name of the graph node that it was.
        module: as in ``Rejection``.
        operator: the canonical operator, ``pagoda.rms_norm``.
        chosen: operators that stand for it now.
        refused: better ones that were not taken, each with the reason.
    """

    node: str
    module: str
    operator: str
    chosen: tuple[str, ...]
    refused: tuple[tuple[str, str], ...] = ()


def titled(name: str, place: str) -> str:
    """Return a pass's title in reports: its name, and ``place`` in parentheses if several entries share the name."""
    return f"{name} ({place})" if place else name


@dataclass
class PassRecord:
    """The result of one pass over one graph.

    Attributes:
        name: the pass, as in the pipeline list.
        matches: number of rewritten sites.
        rejections: near misses with their reasons.
        routes: what a lowering pass chose, site by site.
        remarks: what a person should know about the rewritten sites, one line each.
        seconds: wall time.
        place: ``Pass.place`` of its entry, for a pass that is listed several times; "" for others.
    """

    name: str
    matches: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0
    place: str = ""

    @property
    def title(self) -> str:
        """The pass's title in reports; see ``titled``."""
        return titled(self.name, self.place)

    def reject(self, node: fx.Node, reason: str) -> None:
        """Note why ``node``, which looked like a match, is left alone."""
        self.rejections.append(Rejection(node.name, reason, module_path(node)))
