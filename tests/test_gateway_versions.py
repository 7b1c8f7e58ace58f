"""Which versions of the weights may answer a call, as its client says."""

from pathlib import Path

import anyio
import pytest

from gateways import HELLO, LOOK, always, fronted
from scripted import ScriptedEngine, calls, says, write_tokenizer_folder
from sostenuto.runtime.engines.wire import CommitReply, CommitRequest
from sostenuto.trainer.publication.manifest import Manifest

TOOL_THEN_TEXT = (calls(("look", '{"place": "attic"}')), says("It is dusty."))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("model"))


async def test_a_client_says_which_versions_may_answer_it(model: Path):
    async with fronted(model, always("yes")) as front:
        for requires in (">=0.0", "==0.0", "pinned"):
            reply = await front.chat(HELLO, headers={"X-Sostenuto-Requires": requires})
            assert (reply.status, reply.headers["X-Sostenuto-Version"]) == (200, "0.0")
        wrong = await front.chat(HELLO, headers={"X-Sostenuto-Requires": "0.0"})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "X-Sostenuto-Requires")
        gone = await front.chat(HELLO, headers={"X-Sostenuto-Requires": "==0.-1"})
        assert (gone.status, gone.json["error"]["code"]) == (409, "version_unavailable")
        assert gone.headers["Retry-After"] == "1"
        with anyio.move_on_after(0.2) as waiting:
            await front.chat(HELLO, headers={"X-Sostenuto-Requires": ">=0.1"})
        assert waiting.cancelled_caught, "it waits for the version"


class Updated(ScriptedEngine):
    """Takes every version as it comes."""

    async def prepare_update(self, manifest: Manifest) -> None:
        del manifest

    async def commit_update(self, request: CommitRequest) -> CommitReply:
        self.version = request.version
        return CommitReply(version=request.version, pause_s=0.0, recomputed_requests=0, dropped_programs=0)


async def test_a_pinned_conversation_is_not_continued_by_another_version(model: Path):
    async with fronted(model, lambda _: TOOL_THEN_TEXT, engine_type=Updated) as front:
        headers = {"X-Program-Id": "a", "X-Sostenuto-Requires": "pinned"}
        first = await front.chat(HELLO, headers=headers, tools=[LOOK])
        message = first.json["choices"][0]["message"]
        await front.dispatcher.publish(Manifest(version="0.1", path="/none", nbytes=0, tensors=()))
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "dust"}
        again = [*HELLO, message, result]
        refused = await front.chat(again, headers=headers, tools=[LOOK])
        assert (refused.status, refused.json["error"]["code"]) == (409, "version_unavailable")
        assert "version 0.0" in refused.json["error"]["message"]
        taken = await front.chat(again, headers={"X-Program-Id": "a"}, tools=[LOOK])
        assert (taken.status, taken.headers["X-Sostenuto-Version"]) == (200, "0.1")
