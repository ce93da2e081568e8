"""Pattern properties that match declared properties only, which llguidance would wait for: they join these."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from .vocabulary import load_llguidance

MAX_PROBES = 500
"""Questions to llguidance about one schema, of a millisecond each."""

_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_DATA = ("const", "default")


class CoveredPatterns:
    """Looks for them in one schema.

    Args:
        options: llguidance's ``JsonCompileOptions``.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._left = MAX_PROBES

    def written_out(self, schema: Any) -> Any:
        """The schema without them.

        ``{"properties": {"a": A}, "patternProperties": {"^a$": B}, "additionalProperties": false}`` becomes
        ``{"properties": {"a": {"allOf": [A, B]}}, "additionalProperties": false}``.

        Args:
            schema: plain JSON; objects are looked at wherever a schema may stand.

        Raises:
            ValueError: that takes too many questions.
        """
        if not isinstance(schema, dict):
            return schema
        result = dict(schema)
        for word, value in schema.items():
            if isinstance(value, dict) and word in _NAMED:
                result[word] = {name: self.written_out(inner) for name, inner in value.items()}
            elif isinstance(value, list) and word in _LISTED:
                result[word] = [self.written_out(inner) for inner in value]
            elif word not in _DATA:
                result[word] = self.written_out(value)
        names, patterns = result.get("properties"), result.get("patternProperties")
        if (
            names
            and patterns
            and isinstance(names, dict)
            and isinstance(patterns, dict)
            and result.get("additionalProperties") is False
            and self._are_covered(patterns, names)
        ):
            del result["patternProperties"]
            result["properties"] = {name: self._merged(name, inner, patterns) for name, inner in names.items()}
        return result

    def _are_covered(self, patterns: dict[str, Any], names: dict[str, Any]) -> bool:
        probe = {
            "type": "object",
            "properties": {name: {"type": "null"} for name in names},
            "required": list(names),
            "patternProperties": {pattern: {"type": "null"} for pattern in patterns},
            "additionalProperties": False,
        }
        written = json.dumps(dict.fromkeys(names), ensure_ascii=False)
        return self._takes(probe, written) and not self._takes(probe, written[:-1] + ", ")

    def _merged(self, name: str, schema: Any, patterns: dict[str, Any]) -> Any:
        quoted = json.dumps(name, ensure_ascii=False)
        also = [
            inner
            for pattern, inner in patterns.items()
            if self._takes({"type": "string", "pattern": pattern}, quoted)
        ]
        return {"allOf": [schema, *also]} if also else schema

    def _takes(self, schema: dict[str, Any], text: str) -> bool:
        """Whether JSON for a schema may begin with a text."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(
                "has too many patternProperties where additionalProperties is false; use properties in their place"
            )
        written = f"start: %json {json.dumps({**schema, 'x-guidance': self._options})}"
        matcher = load_llguidance().LLMatcher(_bytes(), written, log_level=0)
        tokens = list(text.encode())
        if matcher.is_error() or matcher.try_consume_tokens(tokens) < len(tokens):
            return False
        return bool(matcher.is_stopped() or (any(matcher.compute_bitmask()) and not matcher.is_error()))


@cache
def _bytes() -> Any:
    """Bytes as tokens."""
    return load_llguidance().LLTokenizer("byte")
