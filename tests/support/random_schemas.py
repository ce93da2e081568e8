"""JSON schemas drawn at random, whose outputs end soon."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of which a model with random weights finishes an instance within some hundred characters."""
    scalars = [_integer, _number, _string, _enum, _pattern, _format, _constant]
    makers = scalars if depth == 0 else [*scalars, _object, _object, _object, _array, _any_of]
    return rng.choice(makers)(rng, depth)


def random_object(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """The same, of an object."""
    return _object(rng, depth + 1)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    if rng.random() < 0.5:
        schema["minimum"] = rng.randint(-300, 20)
        schema["maximum"] = schema["minimum"] + rng.randint(1, 5000)
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([2, 5, 7])
        schema["maximum"] = schema.get("minimum", 0) + 10_000
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number"} if rng.random() < 0.7 else {"type": "number", "exclusiveMinimum": 0, "maximum": 99.5}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([1, -2.5, None, True, "a", "é\n", 'q"\\', [1, {"b": 2}], {"k": [None]}], 3)}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"const": rng.choice(["x/y", 12, None, {"a": [1, 2]}, "\u2028"])}


def _pattern(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(ab|c)+d$", "^\\d{3}-[A-Z]$", '^[^"x]{3}$'])}


def _format(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(["date", "time", "ipv4", "uuid"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b", "name", "é", 'q"', "a/b", "x y"], rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    more = rng.random()
    if more < 0.7:
        schema["additionalProperties"] = False
    elif more < 0.9:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        schema["required"], schema["maxProperties"] = names, len(names) + 1
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = random_schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}


def spelling_schema(rng: random.Random, texts: Sequence[str]) -> dict[str, Any]:
    """A random object whose names, constants, choices and patterns hold some of these texts."""
    schema = random_object(rng, depth=1)
    properties, required = schema["properties"], schema["required"]
    for text in rng.sample(texts, rng.randint(1, 3)):
        name = rng.choice([text, f"of {text}", "plain"])
        around = rng.choice([text, f"a{text}b", f"see {text}", f"{text} {rng.choice(texts)}"])
        properties[name] = rng.choice(
            [
                {"const": around},
                {"enum": [around, rng.choice(texts), "other"]},
                {"type": "string", "pattern": f"^x?{re.escape(around)}[a-c]{{1,3}}$"},
                {"const": [around, {text: None}]},
            ]
        )
        if name not in required:
            required.append(name)
    if isinstance(schema.get("additionalProperties"), dict):
        required[:], schema["maxProperties"] = list(properties), len(properties) + 1
    return schema
