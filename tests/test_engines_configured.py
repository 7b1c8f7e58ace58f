"""Which engines a configuration names, and what is wrong with it."""

from pathlib import Path
from typing import Any

import pytest

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import EngineEntry, EngineSettings, RuntimeConfig, load_toml, parse
from sostenuto.runtime.engines.opened import entries_of


def named(config: RuntimeConfig) -> list[str]:
    return [entry.id for entry in entries_of(config)]


def test_without_entries_there_are_as_many_embedded_engines_as_replicas():
    assert named(RuntimeConfig()) == ["engine"]
    three = RuntimeConfig(engine=EngineSettings(replicas=3))
    assert named(three) == ["engine-0", "engine-1", "engine-2"]
    assert {entry.kind for entry in entries_of(three)} == {"embedded"}


def test_entries_without_an_id_get_one_that_nobody_else_has():
    entries = (
        EngineEntry(),
        EngineEntry(id="embedded-1"),
        EngineEntry(),
        EngineEntry(kind="vllm", url="http://a:1"),
    )
    assert named(RuntimeConfig(engines=entries)) == ["embedded-0", "embedded-1", "embedded-2", "vllm-0"]


def test_engines_are_read_from_a_file(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[engine]\nthreads = 2\n[[engines]]\nid = "a"\nkv_tokens = 4096\n'
        '[[engines]]\nkind = "sglang"\nurl = "https://gpu-1:30000"\napi_key_env = "KEY"\nconcurrency = 64\n'
    )
    config = load_toml(file, RuntimeConfig)
    a, sglang = entries_of(config)
    assert (a.id, a.kind, a.kv_tokens, config.engine.threads) == ("a", "embedded", 4096, 2)
    assert (sglang.id, sglang.url, sglang.concurrency) == ("sglang-0", "https://gpu-1:30000", 64)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"engines": [{"kind": "vlm"}]}, "engines.0.kind: Input should be 'embedded', 'vllm' or 'sglang'"),
    ({"engines": [{"kind": "vllm"}]}, "engines.0: url is missing; say where the vllm engine listens"),
    ({"engines": [{"kind": "vllm", "url": "gpu:1"}]}, "engines.0.url: String should match"),
    ({"engines": [{"ulr": "http://a"}]}, "unknown key 'engines.0.ulr'; did you mean 'url'"),
    (
        {"engines": [{"url": "http://a"}]},
        "engines.0: url is nothing that an engine of kind 'embedded' is told; give kind = 'vllm'",
    ),
    (
        {"engines": [{"kind": "vllm", "url": "http://a", "threads": 2}]},
        "engines.0: threads is nothing that an engine of kind 'vllm' is told; start the engine so",
    ),
    (
        {"engines": [{"kind": "vllm", "url": "http://a", "api_key_env": "A", "api_key_file": "b"}]},
        "engines.0: api_key_env and api_key_file both name the key; give one of them",
    ),
    ({"engines": [{"id": "a"}, {"id": "a"}]}, "engines: id a is there twice; give each engine its own"),
    (
        {"engines": [{"kind": "vllm", "url": "http://a"}] * 2},
        "engines: url http://a is there twice; give each engine its own",
    ),
    (
        {"engine": {"replicas": 2}, "engines": [{}]},
        "engine.replicas and engines both say which engines there are; give one of them",
    ),
    (
        {"engine": {"kv_tokens": 9}, "engines": [{"kind": "vllm", "url": "http://a"}]},
        "engine.kv_tokens is of embedded engines, and engines names none; leave it out, or add an entry",
    ),
    ({"engine": {"replicas": 0}}, "engine.replicas: Input should be greater than 0"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_what_is_wrong_is_named_with_its_place_and_the_remedy(values: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as refused:
        parse(values, RuntimeConfig, where="run.toml")
    assert said in str(refused.value)
