"""Anthropic's client against ``/v1/messages``: ``python with_anthropic.py URL``; prints what it got, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import anthropic

SYSTEM = "You are brief."
MESSAGES = [{"role": "user", "content": "Return the absolute value of the argument."}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
OTHER = {**TOOL, "name": "get_time"}
ASKED = {"model": "tiny", "system": SYSTEM, "messages": MESSAGES, "max_tokens": 32, "extra_body": {"temperature": 0}}


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    found = {"version": anthropic.__version__}

    message = client.messages.create(**ASKED)
    found["create"] = "".join(block.text for block in message.content)
    found["usage"], found["stop_reason"] = message.usage.model_dump(), message.stop_reason
    with client.messages.stream(**ASKED) as stream:
        found["text_stream"] = list(stream.text_stream)
        final = stream.get_final_message()
    found["stream"] = "".join(block.text for block in final.content)
    found["stream_usage"], found["stream_stop_reason"] = final.usage.model_dump(), final.stop_reason
    found["events"] = [event.type for event in client.messages.create(**ASKED, stream=True)]
    stopped = client.messages.create(**ASKED, stop_sequences=[found["create"][5:9]])
    found["stopped"] = [
        stopped.content[0].text if stopped.content else "",
        stopped.stop_reason,
        stopped.stop_sequence,
    ]

    async def together():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(many.messages.create(**ASKED) for _ in range(4)))

    found["async"] = [each.content[0].text for each in asyncio.run(together())]

    for name, choice in (
        ("any", {"type": "any", "disable_parallel_tool_use": True}),
        ("tool", {"type": "tool", "name": "get_time"}),
    ):
        tools = {"tools": [TOOL, OTHER], "tool_choice": choice, "max_tokens": 200}
        message = client.messages.create(**{**ASKED, **tools})
        (call,) = [block for block in message.content if block.type == "tool_use"]
        found[f"tool_choice {name}"] = [call.name, call.input, message.stop_reason]
        with client.messages.stream(**{**ASKED, **tools}) as stream:
            final = stream.get_final_message()
        (streamed,) = [block for block in final.content if block.type == "tool_use"]
        found[f"tool_choice {name}, streamed"] = [streamed.name, streamed.input, final.stop_reason]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    after = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    found["after_a_tool"] = client.messages.create(**{**ASKED, "messages": after}).content[0].text

    asked = {name: ASKED[name] for name in ("model", "system", "messages")}
    found["count_tokens"] = client.messages.count_tokens(**asked).input_tokens
    found["models"] = [model.id for model in client.models.list()]

    found["errors"] = []
    for wrong in (
        {"model": "nobody"},
        {"messages": [{"role": "user", "content": "word " * 5000}]},
        {"extra_body": {"temperature": -1}},
    ):
        try:
            client.messages.create(**{**ASKED, **wrong})
        except anthropic.APIStatusError as error:
            found["errors"].append([type(error).__name__, error.type])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
