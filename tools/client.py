"""The runtime's side of the tool server.

- Every request has a deadline, and ends in an answer or in an exception of sostenuto.errors.
- A request that may be repeated without harm is repeated, for a bounded time, when its connection is lost.
- Once `give_up` was told that the server is gone, every request says so at once.
- Cancelling a `prepare` releases the program; cancelling a `call` leaves it running under its id.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

import anyio
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError

from sostenuto.errors import Overloaded, ToolServerError
from sostenuto.tools.exposure import client_tls
from sostenuto.tools.sending import REPEAT_PAUSE_S, Ask, Sender, strange
from sostenuto.tools.wire import (
    OWNER,
    CallRequest,
    EnvironmentRef,
    ExecRequest,
    Heartbeat,
    Moved,
    Prepared,
    PrepareRequest,
    ResumeRequest,
    Reward,
    RewardRequest,
    RungRequest,
    ShellReply,
    ShellRequest,
    State,
    Supply,
)
from sostenuto.types import CallId, Episode, ProgramId, SandboxRung, ToolCall, ToolResult

_TOOL_RESULT = TypeAdapter(ToolResult)
M = TypeVar("M", bound=BaseModel)


class ToolServerClient:
    """An async context manager; any number of requests may run at the same time."""

    def __init__(
        self,
        url: str,
        token: str,
        owner: str,
        *,
        lease_s: float = 30.0,
        repeat_s: float = 10.0,
        slack_s: float = 30.0,
        ca_file: Path | None = None,
    ) -> None:
        """`slack_s` is how much longer than its own deadline the server may take to answer.

        An owner NAME/EPOCH fences those of lower epochs.  `ca_file` names, as PEM, who may vouch for a server
        that speaks TLS; without it the system's authorities do.
        """
        headers = {"Authorization": f"Bearer {token}", OWNER: quote(owner, safe="")}
        self._sender = Sender(url.rstrip("/"), headers, client_tls(ca_file))
        self._owner = owner
        self._lease_s = lease_s
        self._repeat_s = repeat_s
        self._slack_s = slack_s

    async def __aenter__(self) -> Self:
        await self._sender.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._sender.close()

    async def prepare(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> Prepared:
        """Prepare the program's environment; when this raises, nothing of it is left."""
        body = PrepareRequest(
            owner=self._owner, environment=environment, task=task, seed=seed, timeout_s=timeout_s
        )
        return await self._ask_model(program_id, "prepare", body, Prepared, timeout_s=timeout_s, repeat_s=0)

    async def resume(
        self,
        program_id: ProgramId,
        environment: EnvironmentRef,
        task: dict[str, JsonValue],
        *,
        seen: Collection[str] = (),
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> Prepared:
        """Go on with a program whose server died, when its last snapshot is what the last result has left.

        `seen` are the calls whose results are known here.  ToolServerError, with the reason, when it is not.
        """
        body = ResumeRequest(
            owner=self._owner, environment=environment, task=task, seed=seed, timeout_s=timeout_s,
            seen=tuple(seen),
        )  # fmt: skip
        return await self._ask_model(
            program_id, "resume", body, Prepared, timeout_s=timeout_s, repeat_s=self._repeat_s
        )

    async def call(
        self,
        program_id: ProgramId,
        call_id: CallId,
        call: ToolCall,
        *,
        timeout_s: float = 300.0,
        priority: int = 0,
    ) -> ToolResult:
        """Run a tool at most once under this id, whatever happens to the connection.

        Where too many wait it is asked again, each time after the time that was named, as long as that is
        within `timeout_s`; Overloaded when it is not.
        """
        body = CallRequest(
            call_id=call_id, name=call.name, arguments=call.arguments, timeout_s=timeout_s, priority=priority
        )
        refused_s = 0.0
        while True:
            try:
                result = await self._call_once(program_id, body)
            except Overloaded as error:
                pause_s = error.retry_after_s or REPEAT_PAUSE_S
                if body.timeout_s <= pause_s:
                    raise
            else:
                return replace(result, queued_s=result.queued_s + refused_s)
            await anyio.sleep(pause_s)
            refused_s += pause_s
            body = body.model_copy(update={"timeout_s": body.timeout_s - pause_s})

    async def _call_once(self, program_id: ProgramId, body: CallRequest) -> ToolResult:
        ask = self._post(program_id, "call", body, timeout_s=body.timeout_s, repeat_s=self._repeat_s)
        answer = await self._sender.send(ask)
        try:
            return _TOOL_RESULT.validate_json(answer)
        except ValidationError as error:
            raise strange(ask, error) from error

    async def reward(
        self, program_id: ProgramId, call_id: CallId, episode: Episode, *, timeout_s: float = 60.0
    ) -> Reward:
        """Score the episode at most once under this id."""
        body = RewardRequest(call_id=call_id, episode=episode, timeout_s=timeout_s)
        return await self._ask_model(
            program_id, "reward", body, Reward, timeout_s=timeout_s, repeat_s=self._repeat_s
        )

    async def release(self, program_id: ProgramId) -> None:
        """Return when the program holds nothing any more on the server."""
        await self._sender.send(self._post(program_id, "release", repeat_s=self._repeat_s))

    async def move(self, program_id: ProgramId, rung: SandboxRung, *, timeout_s: float = 120.0) -> Moved:
        """Bring the program's sandbox to a rung, or as near to it as it can come back from."""
        body = RungRequest(rung=rung)
        return await self._ask_model(
            program_id, "rung", body, Moved, timeout_s=timeout_s, repeat_s=self._repeat_s
        )

    async def shell(
        self, program_id: ProgramId, command: str, *, timeout_s: float = 30.0, output_bytes: int = 65536
    ) -> ShellReply:
        """Run a command in the program's sandbox; it ends when this is cancelled."""
        body = ShellRequest(command=command, timeout_s=timeout_s, output_bytes=output_bytes)
        return await self._ask_model(program_id, "shell", body, ShellReply, timeout_s=timeout_s, repeat_s=0)

    async def read(self, program_id: ProgramId, path: str) -> bytes:
        """Content of a workspace file; PathError when there is none at this path."""
        target = _path(program_id, f"files/{quote(path)}")
        return await self._sender.send(Ask("GET", target, repeat_s=self._repeat_s))

    async def write(self, program_id: ProgramId, path: str, data: bytes) -> None:
        """Create or replace a workspace file; PathError when the path cannot be one."""
        target = _path(program_id, f"files/{quote(path)}")
        await self._sender.send(Ask("PUT", target, data, repeat_s=self._repeat_s))

    async def exec(
        self,
        program_id: ProgramId,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout_s: float = 30.0,
        output_bytes: int = 65536,
    ) -> ShellReply:
        """Run a program beside the shell of the program's sandbox; it ends when this is cancelled.

        Like a command it is never asked for twice: when the connection is lost, nobody knows how far it came.
        """
        body = ExecRequest(argv=tuple(argv), stdin=stdin, timeout_s=timeout_s, output_bytes=output_bytes)
        return await self._ask_model(program_id, "exec", body, ShellReply, timeout_s=timeout_s, repeat_s=0)

    async def upload(
        self, program_id: ProgramId, archive: bytes | Path, path: str = ".", *, timeout_s: float = 300.0
    ) -> None:
        """Unpack a tar (plain, gzip or bzip2), of any size when it is a file, into a workspace folder.

        PathError, and nothing is written, for one that leads out of it or is larger than allowed.
        """
        target = _path(program_id, f"archive/{quote(path)}")
        await self._sender.send(Ask("PUT", target, archive, timeout_s, self._repeat_s))

    async def download(
        self, program_id: ProgramId, path: str = ".", *, max_bytes: int = 64 << 20, timeout_s: float = 300.0
    ) -> bytes:
        """A tar of a workspace file or folder; PathError when it is missing or larger."""
        target = _path(program_id, f"archive/{quote(path)}?max_bytes={max_bytes}")
        return await self._sender.send(Ask("GET", target, b"", timeout_s, self._repeat_s))

    async def download_to(
        self,
        program_id: ProgramId,
        target: Path,
        path: str = ".",
        *,
        max_bytes: int = 1 << 30,
        timeout_s: float = 300.0,
    ) -> None:
        """`download` of any size into a file, which is there when all of it is."""
        source = _path(program_id, f"archive/{quote(path)}?max_bytes={max_bytes}")
        await self._sender.send(Ask("GET", source, b"", timeout_s, self._repeat_s, into=target))

    async def state(self) -> State:
        """What the server holds now."""
        ask = Ask("GET", "/v1/state", repeat_s=self._repeat_s)
        return _parsed(ask, await self._sender.send(ask), State)

    async def supply(self) -> Supply:
        """What the server has for programs."""
        ask = Ask("GET", "/v1/limits", repeat_s=self._repeat_s)
        return _parsed(ask, await self._sender.send(ask), Supply)

    async def heartbeats(self) -> None:
        """Keep the owner's lease, until cancelled; ToolServerError when it could not be renewed in its time.

        To be run in a task of the caller's group.
        """
        path = f"/v1/owners/{quote(self._owner, safe='')}/heartbeat"
        body = Heartbeat(lease_s=self._lease_s).model_dump_json().encode()
        ask = Ask("POST", path, body, timeout_s=self._lease_s, repeat_s=self._lease_s)
        while not self._sender.gone:
            try:
                await self._sender.send(ask)
            except ToolServerError:
                if not self._sender.gone:
                    raise
            await anyio.sleep(self._lease_s / 3)

    def give_up(self, reason: str) -> None:
        """For whoever knows that the server is gone: requests, those under way too, fail with this reason."""
        self._sender.gone = reason

    async def _ask_model(
        self,
        program_id: ProgramId,
        action: str,
        body: BaseModel,
        model: type[M],
        *,
        timeout_s: float,
        repeat_s: float,
    ) -> M:
        ask = self._post(program_id, action, body, timeout_s=timeout_s, repeat_s=repeat_s)
        return _parsed(ask, await self._sender.send(ask), model)

    def _post(
        self,
        program_id: ProgramId,
        action: str,
        body: BaseModel | None = None,
        *,
        timeout_s: float = 0.0,
        repeat_s: float,
    ) -> Ask:
        data = b"" if body is None else body.model_dump_json().encode()
        return Ask("POST", _path(program_id, action), data, timeout_s + self._slack_s, repeat_s)


def _path(program_id: ProgramId, rest: str) -> str:
    return f"/v1/programs/{quote(program_id, safe='')}/{rest}"


def _parsed(ask: Ask, answer: bytes, model: type[M]) -> M:
    try:
        return model.model_validate_json(answer)
    except ValidationError as error:
        raise strange(ask, error) from error
