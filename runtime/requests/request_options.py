"""Terms of a request beside what it asks: whose it is, how urgent, how long it may take."""

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
    """Terms of one request.

    Attributes:
        priority: lower comes first under ``policy="priority"``, as in vLLM. Below 0 it also gets neighbouring blocks
            where that can be had.
        client: whose request it is, for ``policy="fair"``.
        deadline: seconds after it was handed in at which it ends with "timeout", whatever it has by then.
        cache_salt: it shares cached blocks only with requests of the same salt.

    Raises:
        ValueError: a value is of the wrong kind or out of range.
    """

    priority: int = 0
    client: str = ""
    deadline: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, Integral):
            raise ValueError(f"priority={shown(self.priority)} is not a whole number; use one, lower for more urgent")
        if abs(self.priority) > MAX_PRIORITY:
            raise ValueError(
                f"priority={shown(self.priority)} is not between {-MAX_PRIORITY} and {MAX_PRIORITY}; use one that is"
            )
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
        """A request on these terms that was handed in at ``arrival_time``."""
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
    """The options of ``count`` requests.

    Args:
        count: how many.
        values: each of ``RequestOptions``' attributes as one value for all, or a list or tuple with one for each.

    Raises:
        ValueError: a list of another length, or a value that ``RequestOptions`` refuses.
    """
    columns: dict[str, Sequence[Any]] = {}
    for name, value in values.items():
        each = value if isinstance(value, list | tuple) else [value] * count
        if len(each) != count:
            raise ValueError(f"{name} has {len(each)} entries for {count} prompts; give one for each, or one for all")
        columns[name] = each
    return [RequestOptions(**{name: column[i] for name, column in columns.items()}) for i in range(count)]
