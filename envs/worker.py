"""The worker process: runs the environments of some programs for the tool server that started it.

    python -P -m sostenuto.envs.worker SOCKET_FD PAGE_FD PARENT_PID

It serves frames until the socket closes, and ends then at once, with its process group.  What environments
print goes to stderr.  A bug of ours ends the process with a traceback; an author's never does.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from pydantic import TypeAdapter

from sostenuto.envs.cancellation import Cancellable
from sostenuto.envs.declaration import declaration
from sostenuto.envs.environment import GivenSecrets
from sostenuto.envs.frames import (
    Call,
    Cancel,
    Channel,
    Declared,
    Hello,
    Load,
    Ping,
    Prepare,
    Release,
    Request,
    Save,
    Score,
)
from sostenuto.envs.occupancy import Page, current
from sostenuto.envs.program import SETTLE_S, Program, start
from sostenuto.envs.registry import LoadedEnvironment, load_environment
from sostenuto.envs.remote_sandbox import RemoteSandbox
from sostenuto.errors import EnvironmentFailure, ProgramError, SostenutoError, ToolServerError
from sostenuto.tools.remote.declared import Remote
from sostenuto.tools.wire import EnvironmentRef, ToolSchema

_PR_SET_PDEATHSIG = 1
_TOOLS = TypeAdapter(tuple[ToolSchema, ...])
_REMOTE = TypeAdapter(tuple[Remote, ...])


class Worker:
    """Serves the frames of one server.  Programs and loaded classes change only in its own tasks."""

    def __init__(self, group: TaskGroup, page: Page) -> None:
        self._group = group
        self._page = page
        self._secrets: Mapping[str, str] = GivenSecrets({})
        self._environments: dict[int, LoadedEnvironment] = {}
        self._programs: dict[str, Program] = {}
        self._active: dict[int, Cancellable] = {}
        self.channel = Channel(self._begin, on_lost=_end_process_group)

    def _begin(self, frame: Request | Cancel) -> None:
        """Start the work that a frame asks for, in the order of arrival."""
        if isinstance(frame, Cancel):
            if active := self._active.get(frame.id):
                active.cancel()
            return
        self._page.begun = max(self._page.begun, frame.id)
        if isinstance(frame, Ping):
            self.channel.reply(frame.id, None)
        elif isinstance(frame, Hello):
            self._greet(frame)
        else:
            active = self._active[frame.id] = Cancellable(getattr(frame, "program_id", ""))
            self._group.start_soon(self._work, frame, active)

    def _greet(self, hello: Hello) -> None:
        self._secrets = GivenSecrets(hello.secrets)
        sys.path.extend(path for path in hello.import_paths if path not in sys.path)

    async def _work(self, frame: Request, active: Cancellable) -> None:
        current.set((self._page, frame.id))
        try:
            with active.scope() as scope:
                await self._answer(frame)
            if scope.cancelled_caught:
                self.channel.fail(frame.id, ToolServerError("cancelled by the one who asked"))
        finally:
            del self._active[frame.id]
            active.ended.set()

    async def _answer(self, frame: Request) -> None:
        try:
            self.channel.reply(frame.id, await self._serve(frame))
        except SostenutoError as error:
            self.channel.fail(frame.id, error)
        except UnicodeEncodeError as error:
            what = f"{type(frame).__name__}: a text that UTF-8 cannot carry: {error}"
            self.channel.fail(frame.id, EnvironmentFailure(what))

    async def _serve(self, frame: Request) -> object:
        match frame:
            case Load():
                return await self._load(frame)
            case Prepare():
                return await self._prepare(frame)
            case Save():
                return await self._program(frame.program_id).save(frame.timeout_s)
            case Call():
                return await self._program(frame.program_id).call(frame.name, frame.arguments)
            case Score():
                return await self._program(frame.program_id).score(frame.episode, frame.timeout_s)
            case Release():
                return await self._release(frame)
            case _:
                raise ToolServerError(f"a worker does not answer {type(frame).__name__}")

    async def _load(self, frame: Load) -> Declared:
        ref = EnvironmentRef.model_validate_json(frame.ref_json)
        # In a thread: importing can take seconds, and other programs go on meanwhile.
        loaded = await anyio.to_thread.run_sync(load_environment, ref)
        declared = declaration(loaded.cls)
        schemas = tuple(tool.tool.schema for tool in declared.tools.values())
        blueprint = declared.blueprint()
        self._environments[frame.environment] = loaded
        return Declared(
            blueprint,
            _TOOLS.dump_json(schemas),
            _REMOTE.dump_json(declared.remote),
            declared.blocking(),
            declared.setup(),
        )

    async def _prepare(self, frame: Prepare) -> object:
        if frame.program_id in self._programs:
            raise ToolServerError(f"program {frame.program_id} is in this worker already; release it first")
        program = await start(
            frame.program_id,
            self._environments[frame.environment],
            frame.task_json,
            seed=frame.seed,
            secrets=self._secrets,
            sandbox=RemoteSandbox(self.channel, frame.program_id) if frame.has_sandbox else None,
        )
        self._programs[frame.program_id] = program
        if frame.state_json is None:
            return await program.reset(frame.timeout_s)
        await program.resume(frame.state_json, frame.timeout_s)
        return ()

    async def _release(self, frame: Release) -> str:
        """Cancel what the program still runs, close its environment and forget it; say what failed in it."""
        program_id = frame.program_id
        program = self._programs.pop(program_id, None)
        running = [a for id_, a in self._active.items() if a.program_id == program_id and id_ != frame.id]
        for active in running:
            active.cancel()
        with anyio.move_on_after(SETTLE_S):
            for active in running:
                await active.ended.wait()
        if program is None:
            return ""
        try:
            await program.close()
        except ProgramError as error:
            return str(error)
        return ""

    def _program(self, program_id: str) -> Program:
        try:
            return self._programs[program_id]
        except KeyError:
            raise ToolServerError(f"program {program_id} is not in this worker; prepare it first") from None


async def serve(socket_fd: int, page: Page) -> None:
    """Serve until the process ends, which it does when the socket closes."""
    async with anyio.create_task_group() as group:
        worker = Worker(group, page)
        connection = socket.socket(fileno=socket_fd)
        await asyncio.get_running_loop().create_unix_connection(lambda: worker.channel, sock=connection)
        await anyio.sleep_forever()


def main() -> None:
    socket_fd, page_fd, parent_pid = (int(argument) for argument in sys.argv[1:4])
    _die_with_parent(parent_pid)
    # What an environment starts must not keep the socket open after us.
    os.set_inheritable(socket_fd, False)
    os.set_inheritable(page_fd, False)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    anyio.run(serve, socket_fd, Page(page_fd))


def _die_with_parent(parent_pid: int) -> None:
    """A loop that is blocked sees no socket close; the kernel then ends the process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def _end_process_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
