"""JSON schemas as llguidance is given them."""

from __future__ import annotations

import json
from typing import Any

_ANNOTATIONS = frozenset(
    "$schema $id $comment $defs definitions title description default examples deprecated readOnly writeOnly".split()
)
"""Keywords that constrain nothing."""


def schema_grammar(llguidance: Any, name: str, schema: Any, whitespace: str, *, lenient: bool) -> str:
    """The grammar of a schema, in llguidance's JSON.

    A schema that constrains nothing stands for a JSON object: a number of any length would be an answer to it, and
    that is what weak models write.

    Args:
        llguidance: the module.
        name: of the field, for the message.
        schema: plain JSON.
        whitespace: as in ``AskedOutput``.
        lenient: leave out what cannot be enforced, and read ``oneOf`` as ``anyOf``.

    Raises:
        ValueError: the schema holds llguidance's own options.
    """
    result: str = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(checked_schema(name, schema)), overrides=json_options(whitespace, lenient=lenient)
    )
    return result


def checked_schema(name: str, schema: Any) -> Any:
    """The schema, or ``{"type": "object"}`` for one that constrains nothing.

    Raises:
        ValueError: as ``schema_grammar``.
    """
    if schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS):
        return {"type": "object"}
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ValueError(f"{name} holds x-guidance, which is not taken; use strict and whitespace beside it")
    return schema


def json_options(whitespace: str, *, lenient: bool) -> dict[str, Any]:
    """llguidance's ``JsonCompileOptions``."""
    spaced = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    free = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": True}
    return {**(free if whitespace == "any" else spaced), "lenient": lenient, "coerce_one_of": lenient}
