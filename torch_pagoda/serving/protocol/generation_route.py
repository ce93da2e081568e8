"""The path of every generation request: body, model, prompts, generation, response, record."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..generation.front import Front
from ..generation.generate import Ask, Generation
from ..generation.stream import GenerationResponse, Renderer
from ..http.errors import ApiError, clean_id, refuse
from ..http.json_body import read_body
from .fields import MAX_IGNORED_SHOWN, RequestBody

logger = logging.getLogger(__name__)

_Body = TypeVar("_Body", bound=RequestBody)


@dataclass(frozen=True)
class Prepared:
    """A request that can run.

    Attributes:
        ask: the generation.
        renderer: renders the response.
        warnings: unenforced parts of its schemas, in addition to those of the compiled grammar.
    """

    ask: Ask
    renderer: Callable[[Generation], Renderer]
    warnings: Sequence[str] = ()


async def respond(
    front: Front,
    request: Request,
    kind: type[_Body],
    prepare: Callable[[Front, Request, _Body, str], Awaitable[Prepared]],
) -> Response:
    """Answer a generation request, and always record it.

    Args:
        front: the server's state.
        request: passed by ``GateMiddleware``.
        kind: type of the body.
        prepare: called with the front, the request, its body, and the model name.

    Raises:
        ApiError: refusals.
    """
    state = request.scope["state"]
    watch = state["watch"]
    try:
        body = await read_body(request, kind)
        if body.request_id is not None:
            state["request_id"] = watch.request_id = _checked_id(body.request_id)
        model = watch.model = front.model_name(body.model)
        headers = _ignored_header(front, body)
        prepared = await prepare(front, request, body, model)
        if (constraint := prepared.ask.params.get("structured_outputs")) is not None:
            warnings = await front.grammars.check(constraint)
            headers |= _warnings_header([*prepared.warnings, *warnings])
        generation = Generation(front, prepared.ask, watch, state["place"])
        renderer = prepared.renderer(generation)
    except ApiError as error:
        front.ended(watch.finish(status=error.status_code, error_code=error.code))
        raise
    except Exception:
        front.ended(watch.finish(status=500, error_code="internal_error"))
        raise
    return GenerationResponse(generation, renderer, front.ended, headers)


def _checked_id(text: str) -> str:
    found = clean_id(text)
    if found is None:
        refuse("request_id", "request_id is not an id; use 1 to 128 printable ASCII characters without spaces")
    return found


def _warnings_header(warnings: list[str]) -> dict[str, str]:
    """The header with the parts of a schema that are not enforced."""
    text = "; ".join(" ".join(warning.split()) for warning in warnings)[:1000]
    return {"x-pagoda-schema-warnings": text.encode("ascii", "replace").decode()} if text else {}


def _ignored_header(front: Front, body: RequestBody) -> dict[str, str]:
    """The header with the ignored fields; each is logged once, up to a limit."""
    ignored = body.ignored_fields(front.settings.strict_fields)
    named = [
        name for name in ignored if len(name) <= 64 and name.isascii() and name.isprintable() and "," not in name
    ]
    for name in named:
        if name not in front.ignored_fields and len(front.ignored_fields) < 256:
            front.ignored_fields.add(name)
            logger.info("ignoring the unknown request field %r", name)
    return {"x-pagoda-ignored": ", ".join(named[:MAX_IGNORED_SHOWN])} if named else {}
