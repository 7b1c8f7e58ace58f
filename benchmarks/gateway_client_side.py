# ruff: noqa: ANN401
# Its libraries are those of another environment, and not here when types are checked.
"""Agents on the libraries of others; runs in the environment of `gateway_environment`.

    python gateway_client_side.py LIBRARY URL MODEL PROGRAM...

Each program has a conversation of its own in every way that the library has: it looks for a key with a tool,
in two rooms.  Prints how many found it, by way, as one JSON object.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

TASK = "Where is the key?"
ANSWER = "The key is in the cellar."
ROOMS = {"attic": "An arrow points to the cellar.", "cellar": "The key lies here."}
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION = {"name": "look", "description": "Look at a place.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION, "strict": False}
SYSTEM = "You help."

Agent = Callable[[str], str]
"""From the base URL of a program, without `/v1`, to the last text."""


def look(arguments: str | dict[str, Any]) -> str:
    return ROOMS[(json.loads(arguments) if isinstance(arguments, str) else arguments)["place"]]


def openai_agents(model: str) -> dict[str, Agent]:
    openai: Any = import_module("openai")

    def client(url: str) -> Any:
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)

    def chat_stream(made: Any, **body: Any) -> Any:
        with made.chat.completions.stream(**body) as stream:
            return stream.get_final_completion()

    def responses_stream(made: Any, **body: Any) -> Any:
        with made.responses.stream(**body) as stream:
            return stream.get_final_response()

    return {
        "chat": lambda url: chat_agent(client(url).chat.completions.create, model=model),
        "chat_stream": lambda url: chat_agent(partial(chat_stream, client(url)), model=model),
        "responses": lambda url: items_agent(client(url).responses.create, model=model),
        "responses_stream": lambda url: items_agent(partial(responses_stream, client(url)), model=model),
        "responses_by_id": lambda url: by_id_agent(client(url).responses.create, model=model),
    }


def chat_agent(create: Callable[..., Any], **fixed: Any) -> str:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    while True:
        message = create(messages=messages, tools=[TOOL], **fixed).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": look(call.function.arguments)}
            for call in message.tool_calls
        ]


def items_agent(create: Callable[..., Any], **fixed: Any) -> str:
    items: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        reply = create(input=items, instructions=SYSTEM, tools=[FLAT], **fixed)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        given = results(reply.output)
        if not given:
            return reply.output_text
        items += given


def by_id_agent(create: Callable[..., Any], **fixed: Any) -> str:
    """Sends what is new alone."""
    given: Any = TASK
    previous = None
    while True:
        after = {"input": given, "previous_response_id": previous}
        reply = create(instructions=SYSTEM, tools=[FLAT], **after, **fixed)
        given, previous = results(reply.output), reply.id
        if not given:
            return reply.output_text


def results(output: list[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": look(item.arguments)}
        for item in output
        if item.type == "function_call"
    ]


def anthropic_agents(model: str) -> dict[str, Agent]:
    anthropic: Any = import_module("anthropic")

    tool = {"name": "look", "description": "Look at a place.", "input_schema": SCHEMA}

    def agent(url: str, *, streams: bool, counts: bool = False) -> str:
        client = anthropic.Anthropic(base_url=url, api_key="none", timeout=120)
        messages: list[Any] = [{"role": "user", "content": TASK}]
        while True:
            body: dict[str, Any] = {"model": model, "system": SYSTEM, "messages": messages, "tools": [tool]}
            counted = client.messages.count_tokens(**body).input_tokens if counts else None
            if streams:
                with client.messages.stream(max_tokens=400, **body) as stream:
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(max_tokens=400, **body)
            read = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
            # What the program has said before may be longer than the client knows: reasoning is left out.
            if len(messages) == 1 and counted not in {None, read}:
                return f"{counted} tokens were counted, and {read} read"
            uses = [block for block in reply.content if block.type == "tool_use"]
            if not uses:
                return "".join(block.text for block in reply.content if block.type == "text")
            messages.append({"role": "assistant", "content": reply.content})
            given = [
                {"type": "tool_result", "tool_use_id": use.id, "content": look(use.input)} for use in uses
            ]
            messages.append({"role": "user", "content": given})

    return {
        "messages": lambda url: agent(url, streams=False),
        "messages_stream": lambda url: agent(url, streams=True),
        "messages_counted": lambda url: agent(url, streams=True, counts=True),
    }


def litellm_agents(model: str) -> dict[str, Agent]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    litellm: Any = import_module("litellm")

    def whole(**body: Any) -> Any:
        return litellm.stream_chunk_builder(list(litellm.completion(stream=True, **body)))

    def fixed(url: str) -> dict[str, Any]:
        return {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "timeout": 120}

    def claude(url: str) -> dict[str, Any]:
        return {"model": f"anthropic/{model}", "api_base": url, "api_key": "none", "max_tokens": 400}

    return {
        "chat": lambda url: chat_agent(litellm.completion, **fixed(url)),
        "chat_stream": lambda url: chat_agent(whole, **fixed(url)),
        "responses": lambda url: items_agent(litellm.responses, **fixed(url)),
        "messages": lambda url: chat_agent(litellm.completion, **claude(url)),
        "messages_stream": lambda url: chat_agent(whole, **claude(url)),
    }


AGENTS = {"openai": openai_agents, "anthropic": anthropic_agents, "litellm": litellm_agents}


def found(agent: Agent, url: str) -> bool:
    """Why not, on the other stream."""
    try:
        said = agent(url)
    except Exception:  # noqa: BLE001 - whatever a library makes of our answer is what is measured
        traceback.print_exc()
        return False
    if said != ANSWER:
        print(f"{url}: {said!r}", file=sys.stderr)
    return said == ANSWER


def main() -> None:
    library, url, model, *programs = sys.argv[1:]
    told: dict[str, int] = {}
    with ThreadPoolExecutor(len(programs)) as pool:
        for way, agent in AGENTS[library](model).items():
            urls = [f"{url}/p/{library}-{way}-{name}" for name in programs]
            told[way] = sum(pool.map(partial(found, agent), urls))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
