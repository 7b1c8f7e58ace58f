"""A gateway in a process of its own, on an engine that listens on a socket already.

python -m benchmarks.gateway_server MODEL_FOLDER SOCKET POLICY SETTINGS

Prints the base URL.  `SETTINGS` is a [gateway] section as JSON.
"""

import sys
from pathlib import Path

import anyio

from sostenuto.runtime.config import GatewaySettings
from sostenuto.runtime.dispatcher import open_dispatcher
from sostenuto.runtime.engines.client import EngineClient
from sostenuto.runtime.gateway.opening import open_gateway
from sostenuto.runtime.jobs.serve import ServedBooks
from sostenuto.runtime.journal import open_journal
from sostenuto.runtime.ledger import Ledger
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.scheduler.policies import make_policy
from sostenuto.scheduler.settings import SchedulerSettings
from sostenuto.tools.client import ToolServerClient
from sostenuto.types import EngineId

_ENGINE = EngineId("engine")
_LIVE = 100_000


async def _serve(model: Path, socket: Path, policy: str, settings: GatewaySettings) -> None:
    folder = ModelFolder.open(model)
    renderer = open_renderer(folder)
    scheduling = SchedulerSettings(live_programs=_LIVE)
    async with (
        open_journal(socket.with_name("journal.db")) as journal,
        EngineClient(_ENGINE, socket) as engine,
        open_dispatcher(
            scheduling,
            {_ENGINE: engine},
            # Programs of a gateway have no environment: nothing is asked of it.
            ToolServerClient("http://127.0.0.1:9", "none", "none/0"),
            renderer,
            policy=make_policy(policy, scheduling),
        ) as dispatcher,
        open_gateway(dispatcher, folder, ServedBooks(Ledger(), journal), settings, prefix="g") as gateway,
    ):
        sys.stdout.write(gateway.url + "\n")
        sys.stdout.flush()
        await anyio.sleep_forever()


def main() -> None:
    model, socket, policy, settings = sys.argv[1:5]
    anyio.run(_serve, Path(model), Path(socket), policy, GatewaySettings.model_validate_json(settings))


if __name__ == "__main__":
    main()
