"""litellm against a server: ``python with_litellm.py URL``; prints what it was given, as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # not from the network

import litellm

MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Return the absolute value of the argument."},
]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}}


def main(url: str) -> None:
    asked = {"temperature": 0, "max_tokens": 32, "num_retries": 0, "api_base": f"{url}/v1", "api_key": "none"}

    def ask(provider="hosted_vllm", **options):
        return litellm.completion(**{"model": f"{provider}/tiny", "messages": MESSAGES, **asked, **options})

    def chunks_of(**options):
        chunks = list(ask(stream=True, stream_options={"include_usage": True}, **options))
        return litellm.stream_chunk_builder(chunks, messages=MESSAGES)

    found = {"version": version("litellm")}
    for provider in ("hosted_vllm", "openai"):
        answer = ask(provider)
        found[f"completion {provider}"] = answer.choices[0].message.content
        found[f"stream {provider}"] = chunks_of(provider=provider).choices[0].message.content
    found["usage"] = answer.usage.model_dump()
    found["stream_usage"] = chunks_of().usage.model_dump()
    found["finish_reason"] = answer.choices[0].finish_reason

    async def together():
        return await asyncio.gather(
            *(litellm.acompletion(model="hosted_vllm/tiny", messages=MESSAGES, **asked) for _ in range(4))
        )

    async def streamed():
        chunks = await litellm.acompletion(model="hosted_vllm/tiny", messages=MESSAGES, stream=True, **asked)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    found["acompletion"] = [each.choices[0].message.content for each in asyncio.run(together())]
    found["acompletion, streamed"] = asyncio.run(streamed())
    text = litellm.text_completion(model="hosted_vllm/tiny", prompt="Return the", **asked)
    found["text_completion"] = text.choices[0].text

    form = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
    found["response_format"] = ask(response_format=form, max_tokens=200).choices[0].message.content
    # Of "hosted_vllm" it takes additionalProperties out of the schemas of tools.
    named = {"type": "function", "function": {"name": "get_weather"}}
    tools = {"provider": "openai", "tools": [TOOL], "tool_choice": named, "max_tokens": 200}
    for name, message in (("tool", ask(**tools)), ("tool, streamed", chunks_of(**tools))):
        (call,) = message.choices[0].message.tool_calls
        found[name] = [call.function.name, json.loads(call.function.arguments)]

    found["errors"] = []
    for wrong in ({"messages": [{"role": "user", "content": "word " * 5000}]}, {"temperature": -1}, {"model": "x/y"}):
        wrong = {"model": "hosted_vllm/nobody"} if "model" in wrong else wrong
        try:
            ask(**wrong)
        except Exception as error:
            found["errors"].append(type(error).__name__)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
