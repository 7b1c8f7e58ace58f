"""An agent on the openai SDK, which takes its time to import; workers import it by name."""

import asyncio
from typing import Any, cast

from openai import AsyncOpenAI

import sostenuto as so
from fakes_agents import Riddle, user

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


@so.agent
async def with_openai(task: Riddle, *, base_url: str, api_key: str) -> float:
    """As people write it: the SDK, a loop, tools of its own."""
    messages: list[Any] = [user(task.question)]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            reply = await client.chat.completions.create(
                model="default", messages=messages, tools=cast("Any", [LOOK])
            )
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return float(message.content == task.answer)
            for call in message.tool_calls:
                await asyncio.sleep(0.05)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "dust"})
