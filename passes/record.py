"""What a pass says about what it did: matches, and for each near miss the reason."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rejection:
    """A place that looked like a match and was left alone.

    Attributes:
        node: name of the graph node.
        reason: one line, for a person.
        module: qualified name of the module that the node came from, "" when unknown.
    """

    node: str
    reason: str
    module: str = ""


@dataclass
class PassRecord:
    """The result of one pass over one graph.

    Attributes:
        name: the pass, as in the pipeline list.
        matches: rewritten places.
        rejections: near misses with their reasons.
        seconds: wall time.
    """

    name: str
    matches: int = 0
    rejections: list[Rejection] = field(default_factory=list)
    seconds: float = 0.0
