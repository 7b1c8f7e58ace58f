"""Agents that talk plain HTTP to their base URL; workers import them by name."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import aiohttp
from pydantic import BaseModel

import sostenuto as so

Json = dict[str, Any]


class Riddle(BaseModel):
    question: str
    answer: str = ""
    how: str = ""
    notes: str = ""
    """A folder in which an agent says how far it came."""

    def note(self, name: str, text: str = "") -> None:
        if self.notes:
            (Path(self.notes) / name).write_text(text)


async def chat(base_url: str, api_key: str, messages: list[Json], **more: object) -> Json:
    """The message of the reply; what is no 200 is raised."""
    body = {"model": "default", "messages": messages, **more}
    headers = {"Authorization": f"Bearer {api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as http,
        http.post(f"{base_url}/chat/completions", json=body) as response,
    ):
        return (await response.json())["choices"][0]["message"]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


@so.agent
async def two_turns(task: Riddle, *, base_url: str, api_key: str) -> dict[str, float]:
    """Ask, and ask whether it is sure."""
    messages = [user(task.question)]
    messages.append(await chat(base_url, api_key, messages))
    messages.append(user("Are you sure?"))
    last = await chat(base_url, api_key, messages)
    task.note("key", json.dumps({"base_url": base_url, "api_key": api_key}))
    return {"reward": float(last["content"] == task.answer), "length": float(len(last["content"]))}


@so.agent
def in_a_thread(task: Riddle, *, base_url: str, api_key: str) -> float:
    """Blocking calls of a plain function."""
    body = json.dumps({"model": "default", "messages": [user(task.question)]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=30) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    return float(said == task.answer)


@so.agent(sandbox=so.SandboxSpec())
async def with_sandbox(task: Riddle, *, base_url: str, api_key: str, sandbox: Any) -> float:  # noqa: ANN401 - a Workspace
    """Run what the model says."""
    said = await chat(base_url, api_key, [user(task.question)])
    return float((await sandbox.shell(said["content"])).strip() == task.answer)


@so.agent
async def ends_badly(task: Riddle, *, base_url: str, api_key: str) -> float:
    """In the way that its task says."""
    if task.how == "silent":
        return 1.0
    try:
        said = await chat(base_url, api_key, [user(task.question)])
    except aiohttp.ClientResponseError:
        if task.how == "swallows":
            return 0.0
        raise
    match task.how:
        case "raises":
            raise ValueError("no such riddle")
        case "sleeps":
            await sleep_long(task)
        case "never stops":
            messages = [user(task.question), said]
            while True:
                messages.append(user("Go on."))
                messages.append(await chat(base_url, api_key, messages))
        case _:
            pass
    return float("nan") if task.how == "not a number" else 0.5


async def sleep_long(task: Riddle) -> None:
    task.note("sleeping", str(os.getpid()))
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        task.note("cancelled")
        raise


@so.agent
def blocks(task: Riddle, *, base_url: str, api_key: str) -> float:
    """A thread that goes on for as long as its key opens the gateway."""
    while True:
        body = json.dumps({"model": "default", "messages": [user(task.question)]}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        try:
            with urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=30) as response:
                response.read()
        except OSError as error:
            task.note("ended", str(error))
            raise
        time.sleep(0.05)
