"""Agents on the libraries of others, unchanged, through the gateway, with and without pressure on KV.

The libraries are real, in an environment of their own; the model is played (`gateway_player`).  What crossed
the engine is compared with the records, token by token.
"""

import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from benchmarks.figure import Tell
from benchmarks.gateway_environment import CLIENTS, clients_folder
from benchmarks.gateway_lines import LINES, MINI_RESULT, MINI_TASK
from benchmarks.gateway_player import Player
from benchmarks.wiretap import Exchange, mismatches
from sostenuto.records import Trajectory
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.gateway.opening import open_gateway
from sostenuto.runtime.quickstart.folder import write_folder
from sostenuto.runtime.quickstart.recipe import ModelShape
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.client import ToolServerClient
from sostenuto.types import EngineId, GroupId, ProgramId

_SHAPE = ModelShape(layers=2, hidden=32, heads=2, feed_forward=64, context_tokens=1 << 14)
_LIBRARIES = ("openai", "anthropic", "litellm")
_AMPLE = 1 << 24
_TURN_TOKENS = 256
"""Of a reply; most agents set no limit."""
_PRESSURE = 3.0
"""Peak working set over the KV that there is."""
_CLIENT_S = 540.0
_PROBES = 27


@dataclass
class Kept:
    """The books of the gateway: every record of a program that was named."""

    records: list[Trajectory] = field(default_factory=list[Trajectory])

    def begun(self, program_id: ProgramId, group_id: GroupId) -> None:
        """Only what came of it counts here."""

    def ended(self, trajectory: Trajectory) -> None:
        self.records.append(trajectory)


@dataclass(frozen=True)
class Stage:
    url: str
    model: str
    commands: Path
    player: Player
    kept: Kept


def measure_clients(tell: Tell, *, quick: bool) -> None:
    anyio.run(_measure, tell, quick)


async def _measure(tell: Tell, quick: bool) -> None:
    commands = await to_thread.run_sync(clients_folder)
    print(f"# {' '.join(CLIENTS)}", file=sys.stderr)
    each = 2 if quick else 8
    async with staged(commands, _AMPLE) as stage:
        passed = await _probe(stage)
        told = await _all(stage, each)
    tell("canitoolcall's probe, checks passed", passed, "count", f">= {_PROBES}")
    _tell(tell, stage, told, each, "")
    pool = _scarce_tokens(stage.player, each)
    async with staged(commands, pool) as stage:
        told = await _all(stage, each)
    _tell(tell, stage, told, each, " under pressure")
    tell("tokens that were read again under pressure", stage.player.reread_tokens, "tokens")


def _tell(tell: Tell, stage: Stage, told: dict[str, int], each: int, where: str) -> None:
    for way, count in sorted(told.items()):
        tell(f"{way}: agents that did their task{where}", count, "count", f">= {each}")
    records = [record for record in stage.kept.records if record.metrics["turns"] > 1]
    tell(f"programs recorded{where}", len(records), "count", f">= {len(told) * each}")
    whole = sum(len(record.sequences) == 1 for record in records)
    tell(f"of them in one sequence{where}", whole / max(1, len(records)), "ratio", ">= 1")
    wrong = sum(mismatches(record, heard(stage.player, record.program_id)) for record in stage.kept.records)
    tell(f"tokens that differ between records and engine{where}", wrong, "count", "== 0")


def heard(player: Player, program: str) -> list[Exchange]:
    """Lane by lane, as records have them."""
    lanes = [id_ for id_ in player.exchanges if id_ == program or id_.startswith(f"{program}~")]
    return [exchange for id_ in lanes for exchange in player.exchanges[id_]]


def working_set(player: Player, programs: int) -> int:
    """Tokens of that many programs at the same time, the longest ones, at their end."""
    longest = [len(turns[-1].context) + len(turns[-1].sampled) for turns in player.exchanges.values()]
    return sum(sorted(longest)[-programs:])


def _scarce_tokens(player: Player, each: int) -> int:
    """KV that the longest call fits into, and not all agents at the same time."""
    peak = working_set(player, (len(_LIBRARIES) + 1) * each)
    return max(round(peak / _PRESSURE), working_set(player, 1) + 2 * _TURN_TOKENS)


async def _probe(stage: Stage) -> int:
    """How many checks pass; why others do not, on the other stream."""
    command = [str(stage.commands / "canitoolcall"), "probe", "--base-url", f"{stage.url}/v1"]
    told = await _run([*command, "--model", stage.model, "--json", "-"])
    outcomes = json.loads(told)["outcomes"]
    for outcome in outcomes:
        if outcome["status"] != "pass" or outcome["warnings"]:
            print(f"# {outcome}", file=sys.stderr)
    return sum(outcome["status"] == "pass" for outcome in outcomes)


async def _all(stage: Stage, each: int) -> dict[str, int]:
    """How many agents did their task, by library and way; all libraries at once."""
    told: dict[str, int] = {}

    async def library(name: str) -> None:
        script = str(Path(__file__).with_name("gateway_client_side.py"))
        programs = [str(number) for number in range(each)]
        said = await _run([str(stage.commands / "python"), script, name, stage.url, stage.model, *programs])
        counts: dict[str, int] = json.loads(said.splitlines()[-1])
        told.update({f"{name} {way}": count for way, count in counts.items()})

    async def minis() -> None:
        done = [False] * each
        async with anyio.create_task_group() as group:
            for number in range(each):
                group.start_soon(_mini, stage, number, done)
        told["mini-swe-agent"] = sum(done)

    async with anyio.create_task_group() as group:
        group.start_soon(minis)
        for name in _LIBRARIES:
            group.start_soon(library, name)
    return told


async def _mini(stage: Stage, number: int, done: list[bool]) -> None:
    with tempfile.TemporaryDirectory(prefix="sostenuto-mini-") as folder:
        base = f"model.model_kwargs.api_base={stage.url}/p/mini-{number}/v1"
        options = ["-y", "--exit-immediately", "-c", "mini", "-c", base, "-o", f"{folder}/trajectory.json"]
        command = [str(stage.commands / "mini"), "-m", f"openai/{stage.model}", "-t", MINI_TASK, *options]
        await _run(command, folder)
        result = anyio.Path(folder) / "result.txt"
        done[number] = await result.exists() and await result.read_text() == MINI_RESULT


async def _run(command: list[str], folder: str | None = None) -> bytes:
    """What it prints; what else it says is shown when it fails."""
    home = {"HOME": folder} if folder else {}
    environment = {
        **os.environ,
        **home,
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
    }
    with anyio.fail_after(_CLIENT_S):
        ended = await anyio.run_process(command, check=False, cwd=folder, env=environment)
    if ended.returncode or b"Traceback" in ended.stderr:
        print(ended.stderr.decode()[-4000:], ended.stdout.decode()[-1000:], file=sys.stderr)
    return ended.stdout


@asynccontextmanager
async def staged(commands: Path, kv_tokens: int) -> AsyncGenerator[Stage]:
    """A gateway on a played model with so much KV; its records are whole when the block is left."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-clients-") as name:
        write_folder(Path(name), train_tokenizer(tokenizer_material(1)), _SHAPE)
        folder = ModelFolder.open(Path(name))
        renderer, kept = open_renderer(folder), Kept()
        player = Player(renderer, Vocabulary(folder.tokenizer_json), LINES, kv_tokens)
        # Programs of a gateway have no environment: nothing is asked of it.
        tools = ToolServerClient("http://127.0.0.1:9", "none", "none/0")
        dispatching = partial(open_dispatcher, SchedulerSettings(), {EngineId("player"): player}, tools)
        settings = GatewaySettings(model="played", turn_tokens=_TURN_TOKENS)
        async with (
            dispatching(renderer) as dispatcher,
            open_gateway(dispatcher, folder, kept, settings, prefix="clients") as gateway,
        ):
            yield Stage(gateway.url, settings.model, commands, player, kept)
