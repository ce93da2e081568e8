"""Scheduling options of a request: its priority, client, deadline and cache salt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .checks import is_finite, shown
from .request import Request
from .request_limits import MAX_PRIORITY
from .sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestOptions:
    """Scheduling options of one request.

    Attributes:
        priority: lower comes first under ``policy="priority"``, as in vLLM. A request below 0 also gets neighboring
            blocks if possible.
        client: owner of the request, for ``policy="fair"``.
        deadline: seconds from submission after which an unfinished request ends with "timeout"; it keeps its output.
        cache_salt: the request shares cached blocks only with requests of the same salt.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """

    priority: int = 0
    client: str = ""
    deadline: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, Integral):
            raise ValueError(f"priority={shown(self.priority)} is not an integer; use one (lower is more urgent)")
        if abs(self.priority) > MAX_PRIORITY:
            limits = f"between {-MAX_PRIORITY} and {MAX_PRIORITY}"
            raise ValueError(f"priority={shown(self.priority)} is out of range; use an integer {limits}")
        for name in ("client", "cache_salt"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={shown(getattr(self, name))} is not text; use a string")
        seconds = self.deadline
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, Real) or not is_finite(seconds) or seconds <= 0
        ):
            raise ValueError(
                f"deadline={shown(seconds)} is not a positive number of seconds; use None for no deadline"
            )

    def request(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, arrival_time: float
    ) -> Request:
        """Return a request with these options that was submitted at ``arrival_time``."""
        return Request(
            request_id,
            prompt_token_ids,
            params,
            priority=self.priority,
            client=self.client,
            deadline=None if self.deadline is None else arrival_time + self.deadline,
            cache_salt=self.cache_salt,
            in_one_run=self.priority < 0,
            arrival_time=arrival_time,
        )


def options_for(count: int, **values: Any) -> list[RequestOptions]:
    """Return the options of ``count`` requests.

    Args:
        count: number of requests.
        values: each attribute of ``RequestOptions``, one value for all or a list or tuple with one per request.

    Raises:
        ValueError: a list of another length, or a value that ``RequestOptions`` rejects.
    """
    columns: dict[str, Sequence[Any]] = {}
    for name, value in values.items():
        each = value if isinstance(value, list | tuple) else [value] * count
        if len(each) != count:
            raise ValueError(f"{name} has {len(each)} entries for {count} prompts; pass one each, or one for all")
        columns[name] = each
    return [RequestOptions(**{name: column[i] for name, column in columns.items()}) for i in range(count)]
