"""An agent that runs as a service elsewhere, against our gateway.

    researcher = so.remote_agent("http://agents:9000/run", task=Question)

    POST URL     {"run_id", "task", "base_url", "api_key", "deadline_s"}
      -> 200     {"reward": number, more numbers}
      -> 202     {"status_url"}, or a Location of the same origin, to be asked again
    GET STATUS   {"status": "running"}, {"status": "done", "reward"} or {"status": "failed", "error"}
    DELETE STATUS, or URL/run_id where there is none: nobody waits for the run any more

A run is begun anew only where none can have begun: its program has made no model call.
"""

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from pydantic import BaseModel
from yarl import URL

from sostenuto.envs.agent import Agent, agent
from sostenuto.envs.environment import Score
from sostenuto.envs.remote_runs import Run, Service
from sostenuto.errors import ConfigError

Write = Callable[[Any, dict[str, Any]], dict[str, Any]]
"""`(task, body)`: what is posted instead of `body`."""


def remote_agent(
    url: str,
    *,
    task: type[BaseModel],
    key_env: str = "",
    body: Write | None = None,
    retries: int = 3,
    poll_s: float = 1.0,
    name: str = "",
) -> type[Agent[Any]]:
    """Make of a service what a job takes as its `env`; each program is one run of it.

    `key_env`: an environment variable of the tool server, whose value goes along as a bearer token.
    `body`: for services with a form of their own.  `retries`: how often a service that does not work is
    asked again.  `poll_s`: between questions after a 202, unless it says Retry-After.  `name`: in errors.
    ConfigError for what cannot be asked.
    """
    _check(url, task, body)
    if retries < 0 or not 0 < poll_s < float("inf"):
        raise ConfigError(
            f"remote_agent: retries is {retries} and poll_s {poll_s}; give 0 or more, and above 0"
        )
    service = Service(url, key_env, retries, poll_s)

    async def run(task: BaseModel, *, base_url: str, api_key: str, wall_s: float) -> Score:
        said: dict[str, Any] = {
            "task": task.model_dump(mode="json"),
            "base_url": base_url,
            "api_key": api_key,
            "deadline_s": wall_s,
        }
        ours = Run(service, base_url, api_key)
        asked = {"run_id": ours.id, **said}
        return await ours.reward(body(task, asked) if body else asked)

    run.__name__ = name or re.sub(r"\W", "_", URL(url).host or "remote")
    run.__annotations__["task"] = task
    return agent(run)


def _check(url: object, task: object, body: object) -> None:
    try:
        read = URL(url) if isinstance(url, str) else URL()
    except ValueError:
        read = URL()
    if read.scheme not in {"http", "https"} or not read.host or read.user is not None:
        raise ConfigError(
            f"remote_agent: url is {url!r:.120}; give the http(s) address that runs are posted to, without "
            "credentials, which go into the variable that key_env names"
        )
    if not (isinstance(task, type) and issubclass(cast("type[object]", task), BaseModel)):
        raise ConfigError(f"remote_agent: task is {task!r:.80}; give the pydantic model of its tasks")
    if body is not None and not isinstance(body, FunctionType):
        raise ConfigError(f"remote_agent: body is {body!r:.80}; give a function (task, body) -> dict")
