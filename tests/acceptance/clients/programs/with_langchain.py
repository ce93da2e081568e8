"""langchain-openai against a server: ``python with_langchain.py URL``; prints what it was given, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

MESSAGES = [SystemMessage("You are brief."), HumanMessage("Return the absolute value of the argument.")]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(min_length=1, max_length=12)
    unit: Literal["celsius", "fahrenheit"]
    days: list[int] = Field(min_length=1, max_length=2)


def main(url: str) -> None:
    def model(**options):
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 32, "max_retries": 0, "stream_usage": True}
        return ChatOpenAI(base_url=f"{url}/v1", api_key="none", **{**asked, **options})

    plain, long = model(), model(max_tokens=300)
    found = {"version": version("langchain-openai")}

    answer = plain.invoke(MESSAGES)
    found["invoke"], found["usage"] = answer.content, answer.usage_metadata
    found["finish_reason"] = answer.response_metadata["finish_reason"]
    chunks = list(plain.stream(MESSAGES))
    streamed = reduce(add, chunks)
    found["stream"], found["stream_usage"] = streamed.content, streamed.usage_metadata
    found["stream_chunks"] = sum(bool(chunk.content) for chunk in chunks)
    found["ainvoke"] = asyncio.run(plain.ainvoke(MESSAGES)).content
    found["batch"] = [each.content for each in plain.batch([MESSAGES, MESSAGES])]
    found["responses"] = model(use_responses_api=True).invoke(MESSAGES).text
    found["responses_stream"] = reduce(add, model(use_responses_api=True).stream(MESSAGES)).text

    for method in ("json_schema", "function_calling"):
        thing = long.with_structured_output(Weather, method=method, strict=True).invoke(MESSAGES)
        assert isinstance(thing, Weather), thing
        found[method] = thing.model_dump()

    for choice in ("any", "required", "Weather"):
        tools = long.bind_tools([Weather], tool_choice=choice, strict=True)
        call = tools.invoke(MESSAGES)
        found[f"tool_choice {choice}"] = call.tool_calls
        found[f"tool_choice {choice}, streamed"] = reduce(add, tools.stream(MESSAGES)).tool_calls
    found["after_a_tool"] = plain.invoke(
        [*MESSAGES, call, ToolMessage("sunny", tool_call_id=call.tool_calls[0]["id"])]
    )
    found["after_a_tool"] = found["after_a_tool"].content
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
