"""Engines that run elsewhere, as their entries in the configuration name them.

Nothing is taken on trust from a server that others have started: whatever weights it has and whatever
they are labelled, it samples nothing for a job until it was given that job's.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import EngineEntry
from sostenuto.runtime.engines.folder import WeightFolders
from sostenuto.runtime.engines.sglang.engine import Keys, SGLangEngine
from sostenuto.runtime.engines.sglang.transports import Disk as SGLangDisk
from sostenuto.runtime.engines.terms import Terms
from sostenuto.runtime.engines.vllm.engine import Served, VllmEngine
from sostenuto.runtime.engines.vllm.transports import Disk as VllmDisk
from sostenuto.types import EngineId


def key_of(entry: EngineEntry) -> str:
    """What the server asks for; empty where it asks for nothing.  ConfigError when it is not there."""
    where = f"engines: {entry.id}"
    if entry.api_key_env is not None:
        key = os.environ.get(entry.api_key_env, "").strip()
        if not key:
            raise ConfigError(f"{where}: api_key_env: {entry.api_key_env} is not set; set it to the key")
        return key
    if entry.api_key_file is None:
        return ""
    try:
        key = entry.api_key_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: api_key_file: {entry.api_key_file}: {error}; name a text file"
        ) from error
    if not key:
        raise ConfigError(f"{where}: api_key_file: {entry.api_key_file} is empty; write the key into it")
    return key


@asynccontextmanager
async def reach(
    engine_id: EngineId,
    entry: EngineEntry,
    key: str,
    model: Path,
    weights: Path,
    *,
    as_started: bool = False,
) -> AsyncGenerator[VllmEngine | SGLangEngine]:
    """`model`: the folder of the job's model.  `weights`: where versions are written for the server.

    Both are absolute: the server finds them under the same path.  `as_started`: what it serves is taken to be
    the model of the folder, and it is given nothing.
    """
    assert entry.url is not None, "EngineEntry says so"
    terms = Terms(start_is_known=as_started, kv_tokens=entry.kv_tokens, concurrency=entry.concurrency)
    if entry.kind == "vllm":
        engine = VllmEngine(
            engine_id, entry.url,
            model=model, transport=VllmDisk(weights, model), api_key=key, served=Served(terms=terms),
        )  # fmt: skip
    else:
        folders = WeightFolders(weights, model)
        engine = SGLangEngine(
            engine_id, entry.url,
            model=model, transport=SGLangDisk(folders), keys=Keys(api=key), terms=terms,
        )  # fmt: skip
    async with engine:
        yield engine
