"""Converts every spelling of an output constraint to ``structured_outputs`` of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...runtime.requests.checks import shown
from ...runtime.structured.asked import KINDS
from ..http.errors import refuse

if TYPE_CHECKING:
    from .fields import GenerationBody

MAX_BYTES = 256 * 1024
"""Maximum bytes of a schema or grammar."""

_OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields of other servers → kind."""


def structured_outputs(body: GenerationBody) -> dict[str, Any] | None:
    """The requested constraint, ``{kind: value}`` and options, not validated further; None: unconstrained.

    ``{"json": schema}`` is accompanied by ``"strict"``: whether every keyword must be enforced.

    Raises:
        ApiError: 400; two constraints, or a malformed one.
    """
    found: dict[str, dict[str, Any]] = {}
    if (constraint := _of_response_format(body.response_format)) is not None:
        found["response_format"] = constraint
    if body.structured_outputs is not None and (constraint := _of_own(body.structured_outputs)) is not None:
        found["structured_outputs"] = constraint
    for name, kind in _OTHER_NAMES.items():
        if (value := getattr(body, name)) is not None:
            found[name] = {"json": _schema(value, name), "strict": False} if kind == "json" else {kind: value}
    if len(found) > 1:
        refuse(list(found)[1], f"{' and '.join(found)} constrain the same text; send one of them")
    for name, constraint in found.items():
        try:
            size = len(msgspec.msgpack.encode(constraint))  # as the engine gets it
        except (OverflowError, RecursionError, UnicodeEncodeError) as error:
            refuse(name, f"{name} has a value that cannot be serialized: {str(error)[:200]}", "invalid_schema")
        if size > MAX_BYTES:
            refuse(name, f"{name} exceeds the limit of {MAX_BYTES} bytes; send a smaller one", "invalid_schema")
        return constraint
    return None


def _of_response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value.get("type") == "text":
        return None
    kind = value.get("type")
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, dict) or not isinstance(wrapped.get("schema"), dict | bool):
            refuse("response_format.json_schema", "response_format.json_schema.schema is missing; send a JSON schema")
        return {"json": wrapped["schema"], "strict": wrapped.get("strict") is True}
    if kind == "structural_tag":
        return {"structural_tag": {key: inner for key, inner in value.items() if key != "type"}}
    refuse(
        "response_format.type",
        f"response_format.type={shown(kind)} is not supported; use text, json_object, json_schema or structural_tag",
    )


def _of_own(value: dict[str, Any]) -> dict[str, Any] | None:
    off = ("json_object", False)
    given = {key: inner for key, inner in value.items() if inner is not None and (key, inner) != off}
    if not given:
        return None
    kinds = [key for key in given if key in KINDS]
    if len(kinds) != 1:
        refuse(
            "structured_outputs", f"structured_outputs={shown(sorted(given))}: use exactly one of {', '.join(KINDS)}"
        )
    if "json" in given:
        given["json"] = _schema(given["json"], "structured_outputs.json")
        given.setdefault("strict", False)
    return given


def _schema(value: Any, name: str) -> Any:
    """A schema, which some clients send as text."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (ValueError, RecursionError) as error:
        refuse(name, f"{name} is not valid JSON: {str(error)[:200]}", "invalid_schema")
