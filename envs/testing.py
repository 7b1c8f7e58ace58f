"""Try an environment in this process, without server or worker: for its author's own tests.

async with so_test(Ledger, LedgerTask(...)) as program:
    result = await program.call("bash", {"command": "ls"})
    assert await program.reward(answer="42") == 1.0
"""

import json
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from pydantic import BaseModel, JsonValue

from sostenuto.envs.declaration import Declaration, declaration
from sostenuto.envs.environment import Environment, GivenSecrets
from sostenuto.envs.program import Program, start
from sostenuto.envs.registry import LoadedEnvironment
from sostenuto.envs.verdict import Verdict
from sostenuto.sandbox.choose import choose_backend
from sostenuto.sandbox.protocol import Blueprint, Sandbox
from sostenuto.tools.config import OUTPUT_BYTES
from sostenuto.tools.edge import Edge
from sostenuto.tools.remote.services import Services
from sostenuto.tools.remote.tool import RemoteTool
from sostenuto.tools.secrets import Secrets
from sostenuto.tools.setup import Setup, check_health, run_setup
from sostenuto.tools.wire import ToolSchema
from sostenuto.types import Episode, Message, StopReason, ToolCall, ToolResult

TRIAL_S = 60.0
"""Given to `reset` and to `reward`."""


class Trial:
    """One program under test.  It keeps the conversation that its calls make."""

    def __init__(
        self, program: Program, messages: tuple[Message, ...], seed: int, remote: "_Remote | None" = None
    ) -> None:
        self._program = program
        self._remote = remote or _Remote()
        self._seed = seed
        self._results: list[ToolResult] = []
        self.messages = list(messages)

    @property
    def environment(self) -> Environment[Any]:
        return self._program.environment

    @property
    def tools(self) -> dict[str, ToolSchema]:
        own = {name: declared.tool.schema for name, declared in self._program.tools.items()}
        return own | {name: tool.schema for name, tool in self._remote.tools.items()}

    async def call(self, name: str, arguments: Mapping[str, JsonValue] | str = "{}") -> ToolResult:
        """Call a tool as the policy would, with arguments or with their JSON text.

        ToolServerError when the service behind a remote one does not work.
        """
        text = arguments if isinstance(arguments, str) else json.dumps(dict(arguments))
        is_remote = name in self._remote.tools
        result = await (self._remote if is_remote else self._program).call(name, text)
        self._results.append(result)
        self.messages.append(Message("assistant", "", (ToolCall(name, text),)))
        self.messages.append(Message("tool", result.content, name=name))
        return result

    async def reward(self, answer: str = "", stop_reason: StopReason = StopReason.ANSWERED) -> float | None:
        """End the conversation with `answer` and score it; None: its reward is given later."""
        return (await self.verdict(answer, stop_reason)).value

    async def verdict(self, answer: str = "", stop_reason: StopReason = StopReason.ANSWERED) -> Verdict:
        """Like `reward`, with the metrics."""
        messages = (*self.messages, Message("assistant", answer))
        turns = sum(message.role == "assistant" for message in messages)
        episode = Episode(messages, stop_reason, tuple(self._results), turns, self._seed)
        return await self._program.score(episode, TRIAL_S)


@dataclass(frozen=True, slots=True)
class _Remote:
    """The tools of the services that an environment declares."""

    tools: Mapping[str, RemoteTool] = field(default_factory=dict[str, RemoteTool])
    secrets: Secrets = field(default_factory=lambda: Secrets({}))

    async def call(self, name: str, arguments: str) -> ToolResult:
        """As the tool server lets it through: without secrets, within the tool's cap."""
        tool = self.tools[name]
        edge = Edge(self.secrets, OUTPUT_BYTES)
        return edge.observation(await tool.call(arguments), tool.schema.output_bytes)


@asynccontextmanager
async def so_test(
    environment: type[Environment[Any]],
    task: BaseModel,
    sandbox: Sandbox | None = None,
    *,
    seed: int = 0,
    secrets: Mapping[str, str] | None = None,
    **options: JsonValue,
) -> AsyncGenerator[Trial]:
    """Prepare one program of the environment; it is closed when the block is left.

    An environment that declares a sandbox gets the one that is given, else a real one of its own.  Its remote
    tools speak to their services.
    """
    async with AsyncExitStack() as stack:
        blueprint = declaration(environment).blueprint()
        if blueprint is not None and sandbox is None:
            sandbox = await stack.enter_async_context(
                _own_sandbox(blueprint, declaration(environment).setup())
            )
        remote = await stack.enter_async_context(_services(declaration(environment), secrets or {}))
        program = await start(
            "trial",
            LoadedEnvironment(environment, options),
            task.model_dump_json().encode(),
            seed=seed,
            secrets=GivenSecrets(secrets or {}),
            sandbox=sandbox,
        )
        stack.push_async_callback(program.close)
        yield Trial(program, await program.reset(TRIAL_S), seed, remote)


@asynccontextmanager
async def _services(declared: Declaration, values: Mapping[str, str]) -> AsyncGenerator[_Remote]:
    if not declared.remote:
        yield _Remote()
        return
    failed: Exception | None = None
    async with anyio.create_task_group() as group:
        secrets = Secrets(values)
        try:
            tools = await Services(secrets, group).tools(declared.remote, declared.tools)
            yield _Remote({tool.schema.name: tool for tool in tools}, secrets)
        except Exception as error:  # noqa: BLE001 - raised below as it is, and not in a group
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed


@asynccontextmanager
async def _own_sandbox(blueprint: Blueprint, setup: Setup) -> AsyncGenerator[Sandbox]:
    """The best sandbox that works here, in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-trial-") as folder:
        root = Path(folder)
        # Sandboxes may run as another user, who has to reach their workspace.
        root.chmod(0o711)  # noqa: ASYNC240
        sandbox = await (await choose_backend(root)).start("trial", blueprint)
        try:
            await run_setup(sandbox, setup)
            await check_health(sandbox, setup)
            yield sandbox
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox.stop()
