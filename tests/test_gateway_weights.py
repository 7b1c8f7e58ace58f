"""Weight control of a gateway, as trainers that know vLLM or SGLang ask for it, over HTTP."""

import mmap
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from gateways import HELLO, Front, Json, always, fronted
from hosts import until
from scripted import ScriptedEngine, write_tokenizer_folder
from sostenuto.errors import EngineError
from sostenuto.runtime.engines.wire import CommitReply, CommitRequest, Feature, PauseMode
from sostenuto.runtime.gateway.weights_routes import REFUSED
from sostenuto.trainer.publication.manifest import Manifest

A = {"X-Program-Id": "a"}


def mapped(manifest: Manifest) -> dict[str, bytes]:
    """Every tensor of a publication, checked."""
    found: dict[str, bytes] = {}
    with (
        Path(manifest.path).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as source,
    ):
        for entry in manifest.tensors:
            found[entry.name] = source[entry.offset : entry.offset + entry.nbytes]
            assert entry.offset % 64 == 0
            assert zlib.crc32(found[entry.name]) == entry.checksum
    return found


@dataclass
class WeighedEngine(ScriptedEngine):
    """Takes weights as a real one does: it maps the file, checks every tensor and then swaps."""

    features: frozenset[Feature] = frozenset({Feature.PAUSE, Feature.UPDATE})
    mode: PauseMode | None = None
    weights: dict[str, bytes] = field(default_factory=dict[str, bytes])
    staged: Manifest | None = None
    unfit: str = ""

    async def pause(self, mode: PauseMode) -> None:
        if self.unfit:
            raise EngineError(self.unfit)
        self.mode = mode

    async def resume(self) -> None:
        self.mode = None

    async def prepare_update(self, manifest: Manifest) -> None:
        if self.unfit:
            raise EngineError(self.unfit)
        self.weights, self.staged = mapped(manifest), manifest

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        self.version = request.version
        return CommitReply(version=request.version, pause_s=0.0, recomputed_requests=0, dropped_programs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


def tensors(seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    shapes = {"a.weight": (3, 5), "b.weight": (7,)}
    return {name: random.random(shape, dtype=np.float32) for name, shape in shapes.items()}


def saved(folder: Path, seed: int = 0) -> Path:
    """A checkpoint in two files."""
    folder.mkdir()
    for name, tensor in tensors(seed).items():
        save_file({name: tensor}, folder / f"{name}.safetensors")
    return folder


def weighed(model: Path, tmp_path: Path):
    return fronted(model, always("yes"), published=tmp_path / "published", engine_type=WeighedEngine)


def engine_of(front: Front) -> WeighedEngine:
    assert isinstance(front.engine, WeighedEngine)
    return front.engine


async def test_a_folder_of_weights_is_served_after_it_was_verified(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        before = await front.chat(HELLO, headers=A)
        folder = saved(tmp_path / "new")
        reply = await front.post("/update_weights", {"weight_dir": str(folder), "weight_version": 17})
        assert (reply.json["status"], reply.json["weight_version"]) == ("updated", "0.17")
        assert engine_of(front).weights == {name: t.tobytes() for name, t in tensors(0).items()}
        assert (await front.get("/weight_info")).json == {"weight_version": "0.17"}
        after = await front.chat(HELLO, headers={"X-Program-Id": "b"})
        assert [one.headers["X-Sostenuto-Version"] for one in (before, after)] == ["0.0", "0.17"]
    assert not (tmp_path / "published").exists()


async def test_only_the_file_of_the_deployed_version_stays(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        for seed in (1, 2):
            folder = saved(tmp_path / f"new{seed}", seed)
            told = await front.post("/update_weights_from_disk", {"model_path": str(folder)})
            assert (told.json["success"], told.json["weight_version"]) == (True, f"0.{seed}")
        (file,) = (tmp_path / "published").iterdir()
        assert str(file) == engine_of(front).staged.path  # pyright: ignore[reportOptionalMemberAccess]


async def test_an_update_in_three_calls_is_published_by_the_last(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        body = {"update_info": {"path": str(saved(tmp_path / "new"))}}
        early = await front.post("/finish_weight_update", None, data=b"")
        assert (early.status, early.json["error"]["code"]) == (409, "no_update")
        assert (await front.post("/start_weight_update", None, data=b"")).json == {"status": "started"}
        assert (await front.post("/update_weights", body)).json == {"status": "staged"}
        assert front.engine.version == "0.0"
        told = await front.post("/finish_weight_update", {"weight_version": "0.3"})
        assert told.json["weight_version"] == front.engine.version == "0.3"


async def test_engines_stand_still_as_the_mode_says_until_they_are_resumed(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        for path, body, mode in (
            ("/pause", None, PauseMode.ABORT),
            ("/pause?mode=wait&clear_cache=true", None, PauseMode.FINISH),
            ("/pause?mode=keep", None, PauseMode.KEEP),
            ("/pause_generation", {"mode": "in_place"}, PauseMode.KEEP),
            ("/pause_generation", {"mode": "retract"}, PauseMode.RETRACT),
        ):
            assert (await front.post(path, body)).json == {"status": "paused"}
            assert engine_of(front).mode is mode
            assert (await front.get("/is_paused")).json == {"is_paused": True}
            resume = "/resume" if path.startswith("/pause?") else "/continue_generation"
            assert (await front.post(resume, None)).status == 200
            assert engine_of(front).mode is None
        assert (await front.get("/is_paused")).json == {"is_paused": False}


async def test_a_pause_that_fails_leaves_nobody_standing_still(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        engine_of(front).unfit = "it will not stop"
        reply = await front.post("/pause", None)
        assert (reply.status, "will not stop" in reply.json["error"]["message"]) == (503, True)
        assert (await front.get("/is_paused")).json == {"is_paused": False}


async def test_engines_that_cannot_be_paused_say_so(model: Path, tmp_path: Path):
    async with fronted(model, always("yes"), published=tmp_path / "published") as front:
        reply = await front.post("/pause", None)
        assert (reply.status, reply.json["error"]["code"]) == (501, "unsupported")


async def test_a_version_that_no_engine_takes_is_an_engine_failure(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        engine_of(front).unfit = "a tensor is missing"
        reply = await front.post("/update_weights", {"weight_dir": str(saved(tmp_path / "new"))})
        assert (reply.status, "a tensor is missing" in reply.json["error"]["message"]) == (503, True)
        assert list((tmp_path / "published").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/update_weights", {}, 400),
        ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]]}}, 400),
        ("/update_weights", {"weight_dir": "/nowhere"}, 400),
        ("/update_weights", {"weight_dir": 7}, 400),
        ("/update_weights", {"weight_dir": "a\0b"}, 400),
        ("/update_weights_from_disk", {"model_path": "."}, 400),
        ("/pause?mode=sometimes", None, 400),
        ("/pause_generation", {"mode": "sometimes"}, 400),
    ],
)
async def test_bad_input_is_named(model: Path, tmp_path: Path, path: str, body: Json, status: int):
    async with weighed(model, tmp_path) as front:
        reply = await front.post(path, body)
        assert reply.status == status
        assert front.engine.version == "0.0"


@pytest.mark.parametrize("label", ["0.0", "0", "default", "1", "-1", "0.x"])
async def test_a_label_that_is_not_above_what_is_deployed_is_refused(model: Path, tmp_path: Path, label: str):
    async with weighed(model, tmp_path) as front:
        folder = str(saved(tmp_path / "new"))
        await front.post("/update_weights", {"weight_dir": folder, "weight_version": "0.1"})
        reply = await front.post("/update_weights", {"weight_dir": folder, "weight_version": label})
        assert (reply.status, reply.json["error"]["param"]) == (400, "weight_version")


async def test_what_has_no_meaning_here_says_what_to_do_instead(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        for path, remedy in REFUSED.items():
            reply = await front.post(path, {})
            assert (reply.status, reply.json["error"]["code"]) == (501, "not_supported")
            assert remedy in reply.json["error"]["message"]


async def test_the_weights_of_a_job_are_not_changed_from_outside(model: Path):
    async with fronted(model, always("yes")) as front:
        for path in ("/pause", "/update_weights", "/resume"):
            assert (await front.post(path, {})).status == 501


async def test_weight_control_is_for_the_one_who_runs_the_gateway(model: Path, tmp_path: Path):
    keys = {"SOSTENUTO_AGENT_KEY": "a" * 24, "SOSTENUTO_ADMIN_KEY": "b" * 24}
    async with fronted(
        model,
        always("yes"),
        environment=keys,
        published=tmp_path / "published",
        engine_type=WeighedEngine,
    ) as front:
        for path in ("/pause", "/update_weights", "/sleep"):
            assert (await front.post(path, {}, {"Authorization": "Bearer " + "a" * 24})).status == 403
        info = await front.get("/server_info", {"Authorization": "Bearer " + "b" * 24})
        assert (info.json["engines"], info.json["weight_version"]) == (1, "0.0")


async def test_two_updates_at_once_follow_each_other(model: Path, tmp_path: Path):
    async with weighed(model, tmp_path) as front:
        folder = {"weight_dir": str(saved(tmp_path / "new"))}
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(lambda: front.post("/update_weights", folder))
        await until(lambda: front.engine.version == "0.3")
