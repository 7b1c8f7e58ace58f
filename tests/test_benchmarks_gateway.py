"""The played model of the clients' benchmark, and that its figures would show what they are to show."""

from dataclasses import replace
from pathlib import Path

import aiohttp
import anyio
from benchmarks.gateway_client_side import ANSWER, SYSTEM, TASK, TOOL, look
from benchmarks.gateway_clients import Stage, heard, staged, working_set
from benchmarks.wiretap import mismatches

_NO_COMMANDS = Path("/nonexistent")


async def _find_key(stage: Stage, http: aiohttp.ClientSession, name: str) -> str:
    """As the agents of the benchmark do it."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    while True:
        body = {"messages": messages, "tools": [TOOL]}
        async with http.post(f"{stage.url}/p/{name}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            message = (await response.json())["choices"][0]["message"]
        if not message.get("tool_calls"):
            return message["content"]
        messages.append(message)
        for call in message["tool_calls"]:
            result = look(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def test_agents_find_the_key_and_every_token_of_theirs_is_in_the_records():
    async with staged(_NO_COMMANDS, 1 << 20) as stage, aiohttp.ClientSession() as http:
        assert await _find_key(stage, http, "a") == ANSWER
    (record,) = stage.kept.records
    exchanges = heard(stage.player, record.program_id)
    assert len(exchanges) == 3
    assert mismatches(record, exchanges) == 0
    assert working_set(stage.player, 1) == len(exchanges[-1].context) + len(exchanges[-1].sampled)
    other = replace(exchanges[1], sampled=[*exchanges[1].sampled[:-1], exchanges[1].sampled[-1] + 1])
    assert mismatches(record, [exchanges[0], other, exchanges[2]]) > 0


async def test_where_kv_is_for_one_agent_alone_all_find_it_with_every_token_recorded():
    found: list[str] = []
    async with staged(_NO_COMMANDS, 1 << 20) as ample, aiohttp.ClientSession() as http:
        await _find_key(ample, http, "a")
    pool = working_set(ample.player, 1) + 300
    async with staged(_NO_COMMANDS, pool) as stage, aiohttp.ClientSession() as http:

        async def one(name: str) -> None:
            found.append(await _find_key(stage, http, name))

        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(one, str(number))
    assert found == [ANSWER] * 6
    assert sum(mismatches(r, heard(stage.player, r.program_id)) for r in stage.kept.records) == 0
