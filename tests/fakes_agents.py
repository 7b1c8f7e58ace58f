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


@so.agent
async def says_something_even(task: Riddle, *, base_url: str, api_key: str) -> float:
    """Two turns; a model without any skill is right half of the time."""
    messages = [user(task.question)]
    messages += [await chat(base_url, api_key, messages), user("Once more.")]
    last = await chat(base_url, api_key, messages, seed=7)
    return float(len(last["content"]) % 2 == 0)


@so.agent
async def debates(task: Riddle, *, base_url: str, api_key: str) -> dict[str, float]:
    """A proposer, who is the policy; a critic, an editor and a rival, whatever those are; and him again."""
    proposed = [user(task.question)]
    proposed.append(await chat(base_url, api_key, proposed))
    said: dict[str, str] = {}
    for role in ("critic", "editor", "rival"):
        # Each sees the same words, and is another conversation all the same.
        top_p = 0.9 if role == "critic" else 1.0
        reply = await chat(base_url, api_key, [user(task.question)], model=role, top_p=top_p)
        said[role] = reply["content"]
    proposed.append(user(" ".join(said.values())))
    last = await chat(base_url, api_key, proposed)
    return {"reward": float(len(last["content"]) % 2 == 0), "rival_said": float(len(said["rival"]))}


def questions(count: int) -> list[Riddle]:
    return [Riddle(question=f"What is {number}?") for number in range(count)]


COMMAND = """\
import json, os, sys, urllib.error, urllib.request

def post(url, key, body):
    head = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)

base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == base
try:
    post("http://127.0.0.1:9/elsewhere", key, {})
except urllib.error.HTTPError as error:
    print("elsewhere:", error.code)
body = {"model": "default", "messages": [{"role": "user", "content": sys.argv[1]}]}
said = post(base + "/chat/completions", key, body)["choices"][0]["message"]["content"]
open("answer", "w").write(said)
"""


async def answer_is_right(task: Riddle, *, sandbox: Any, result: Any) -> dict[str, float]:  # noqa: ANN401
    """Reads what the command has left, and that it reached nothing else."""
    assert result.exit_code == 0, result.output
    return {
        "reward": float(await sandbox.read("answer") == task.answer),
        "refused": float("elsewhere: 403" in result.output),
    }


script = so.command_agent(
    ["python3", "agent.py", "{question}"],
    reward=answer_is_right,
    sandbox=so.SandboxSpec(files={"agent.py": COMMAND}),
)
missing = so.command_agent(["no-such-agent", "{question}"], reward=answer_is_right)
