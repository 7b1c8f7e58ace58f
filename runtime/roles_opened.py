"""The roles of a job's agents at work: those with a model of their own have engines and a scheduler."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio.to_thread

from sostenuto.errors import ConfigError
from sostenuto.runtime.dispatcher import Dispatcher, open_dispatcher
from sostenuto.runtime.gateway.terms import RoleTerms
from sostenuto.runtime.jobs.premises import Premises
from sostenuto.runtime.jobs.roles import Role
from sostenuto.runtime.lone_engine import open_lone_engine
from sostenuto.runtime.program import Timeouts
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.types import EngineId


def terms_of(roles: Sequence[Role]) -> dict[str, RoleTerms]:
    """What holds for calls in them."""
    return {role.name: RoleTerms(trained=role.trained, temperature=role.temperature) for role in roles}


@asynccontextmanager
async def open_roles(
    roles: Sequence[Role], premises: Premises, renderer: Renderer, *, job: str, policy: ModelFolder
) -> AsyncGenerator[Mapping[str, Dispatcher | None]]:
    """By the name of the role who speaks in it; None: the policy.  ConfigError for another tokenizer."""
    async with AsyncExitStack() as stack:
        yield {
            role.name: None
            if role.model is None
            else await stack.enter_async_context(_opened(role, premises, renderer, job, policy))
            for role in roles
        }


@asynccontextmanager
async def _opened(
    role: Role, premises: Premises, renderer: Renderer, job: str, policy: ModelFolder
) -> AsyncGenerator[Dispatcher]:
    assert role.model is not None
    folder = await anyio.to_thread.run_sync(ModelFolder.open, role.model)
    _check(role, folder, policy)
    config, name = premises.config, f"role-{role.name}"
    timeouts = Timeouts(engine_return_s=config.engine_return_s)
    async with (
        open_lone_engine(
            folder.path, role.engine, premises, job=job, name=name, kv_tokens=config.engine.kv_tokens
        ) as engine,
        open_dispatcher(
            config.scheduler, {EngineId(f"{job}-{name}"): engine}, premises.tools, renderer, timeouts=timeouts
        ) as dispatcher,
    ):
        yield dispatcher


def _check(role: Role, folder: ModelFolder, policy: ModelFolder) -> None:
    for what, theirs, ours in (
        ("tokenizer.json", folder.tokenizer_json, policy.tokenizer_json),
        ("chat template", folder.chat_template, policy.chat_template),
    ):
        if theirs != ours:
            raise ConfigError(
                f"roles: {role.name}: the {what} of {folder.path} is another than that of the policy, "
                f"{policy.path}; give a model with the policy's, or let the agent call that model itself"
            )
