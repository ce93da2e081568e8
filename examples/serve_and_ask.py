"""Start ``pagoda serve`` on a free port, ask it with OpenAI's client, and shut it down.

    python examples/serve_and_ask.py [--model FOLDER_OR_HUB_ID] [--chat-template FILE]

Four questions: plain, streamed, as JSON of a schema, and with a tool that has to be called. The small model of this
project continues documentation and knows no conversations; a grammar keeps its JSON and its call valid all the same.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI

HERE = Path(__file__).resolve().parent
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["function", "class", "module"]},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "kind", "arguments"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def start(model: str, template: Path) -> tuple[subprocess.Popen[str], str]:
    """The server's process, and its address once it takes requests."""
    command = [str(Path(sys.executable).with_name("pagoda")), "serve", model, "--port", "0"]
    command += ["--chat-template", str(template), "--tool-call-parser", "hermes", "--log-requests", "none"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if " on http" not in line:
        raise SystemExit(f"the server did not start; exit status {process.wait()}")
    print(line, end="")
    return process, line.rsplit(" ", 1)[1].strip()


def ask(client: OpenAI, model: str) -> None:
    """Ask the four questions."""
    messages: Any = [{"role": "user", "content": "Return the absolute value of the argument."}]

    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
    print(f"plain:    {answer.choices[0].message.content!r}")

    print("streamed: ", end="")
    chunks = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0, stream=True)
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=200, temperature=0, response_format=form
    )
    found = json.loads(answer.choices[0].message.content or "")
    print(f"schema:   {found}")

    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=200, temperature=0, tools=[WEATHER], tool_choice="required"
    )
    call: Any = (answer.choices[0].message.tool_calls or [None])[0]
    print(f"tool:     {call.function.name}({json.loads(call.function.arguments)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE / "tiny-pydoc"))
    parser.add_argument("--chat-template", type=Path, default=HERE / "chatml.jinja")
    arguments = parser.parse_args()
    process, address = start(arguments.model, arguments.chat_template)
    try:
        client = OpenAI(base_url=f"{address}/v1", api_key="none is needed")
        ask(client, client.models.list().data[0].id)
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    print(f"the server has ended with status {status}")


if __name__ == "__main__":
    main()
