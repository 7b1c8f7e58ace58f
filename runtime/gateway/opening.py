"""A gateway in front of a dispatcher, for as long as a block runs."""

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

import anyio

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.dispatcher import Dispatcher
from sostenuto.runtime.gateway.dialects.dialect import Served
from sostenuto.runtime.gateway.keys import Keys, Scope
from sostenuto.runtime.gateway.routes import Controls, routes
from sostenuto.runtime.gateway.server import Gateway, listening
from sostenuto.runtime.gateway.sessions import Books, Bounds, Lifetimes, Sessions
from sostenuto.runtime.gateway.texts import Texts
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.tools.exposure import listening_socket, server_tls

_SHORTEST_KEY = 16


@dataclass(frozen=True, slots=True)
class OpenGateway:
    """`url` is what clients take as their base URL, without `/v1`."""

    url: str
    sessions: Sessions
    keys: Keys


@asynccontextmanager
async def open_gateway(  # noqa: PLR0913 - one keyword for each thing that jobs and servers differ in
    dispatcher: Dispatcher,
    folder: ModelFolder,
    books: Books | None,
    settings: GatewaySettings,
    *,
    prefix: str,
    environment: Callable[[str], str | None] = os.environ.get,
    controls: Controls | None = None,
    roles: Mapping[str, Dispatcher | None] | None = None,
) -> AsyncGenerator[OpenGateway]:
    """Answer until the block is left; every program of the gateway is over then.

    `books`: None to answer nobody but programs that are opened here, each with a key minted for it.
    `prefix` begins the ids of its programs.  `controls`: what clients may change.
    `roles`: by name who speaks in them; None: whoever speaks in none.
    ConfigError for keys that are too short, or a port in use.
    """
    keys = Keys()
    is_guarded = books is None or _take_keys(keys, settings, environment)
    tls = server_tls(settings)
    async with anyio.create_task_group() as returning, anyio.create_task_group() as running:
        sessions = Sessions(
            dispatcher,
            running,
            returning,
            books,
            prefix=prefix,
            lifetimes=Lifetimes(
                hold_s=settings.hold_s, weak_hold_s=settings.weak_hold_s, forget_s=settings.forget_s
            ),
            roles={name: other for name, other in (roles or {}).items() if other is not None},
            bounds=Bounds(programs=settings.programs, turn_tokens=settings.turn_tokens),
        )
        gateway = Gateway(
            sessions,
            _served(dispatcher, folder, settings, frozenset(roles or ())),
            keys,
            body_bytes=settings.body_bytes,
            keep_alive_s=settings.keep_alive_s,
            is_guarded=is_guarded,
        )
        with listening_socket(settings) as sock:
            scheme, port = "https" if tls else "http", sock.getsockname()[1]
            running.start_soon(sessions.keep_expiring)
            async with listening(gateway.application(routes(gateway, controls or Controls())), sock, tls):
                yield OpenGateway(f"{scheme}://{settings.host}:{port}", sessions, keys)
        sessions.close()
        running.cancel_scope.cancel()


def _served(
    dispatcher: Dispatcher, folder: ModelFolder, settings: GatewaySettings, roles: frozenset[str]
) -> Served:
    renderer = dispatcher.around.renderer
    path = Path(folder.path)
    return Served(
        model=settings.model or path.resolve().name,
        aliases=frozenset({str(path), "default"}),
        context_tokens=dispatcher.around.context_tokens,
        stop_token_ids=renderer.stop_token_ids,
        texts=Texts(Vocabulary(folder.tokenizer_json)),
        created=time_ns() // 10**9,
        renderer=renderer,
        features=lambda: dispatcher.fleet.features,
        roles=roles,
        strict_tools=settings.strict_tools,
    )


def _take_keys(keys: Keys, settings: GatewaySettings, environment: Callable[[str], str | None]) -> bool:
    """Whether there are any."""
    for variable, scope in (
        (settings.admin_key_env, Scope.ADMIN),
        (settings.agent_key_env, Scope.AGENT),
        (settings.metrics_key_env, Scope.METRICS),
    ):
        key = (environment(variable) or "").strip()
        if key and len(key) < _SHORTEST_KEY:
            raise ConfigError(
                f"environment variable {variable}: a key has {_SHORTEST_KEY} characters or more; make one, "
                "for example with `openssl rand -hex 24`"
            )
        if key:
            keys.add(key, {scope})
    return len(keys) > 0
