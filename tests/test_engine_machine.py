"""The embedded engine's memory under anything that may happen to it, against plain recomputation."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_models import Desk, load, make_folder, prompt, publish
from sostenuto.runtime.engines.embedded.attention import Chunk, Step
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.embedded.lower import LowerTier
from sostenuto.runtime.engines.embedded.model import Model
from sostenuto.runtime.engines.embedded.pool import Pool
from sostenuto.runtime.engines.embedded.tensors import as_tensor
from sostenuto.runtime.engines.embedded.trie import Node, Trie
from sostenuto.runtime.engines.wire import CommitRequest, PauseMode
from sostenuto.types import Version
from test_engine_pause import assert_exact_by_version, pause

PROGRAMS = st.sampled_from("abcd")
SALTS = ("", "s")


class Material:
    """Two sets of weights, loaded once."""

    def __init__(self) -> None:
        self._place = TemporaryDirectory()
        self.folder = Path(self._place.name)
        folders = [make_folder(self.folder / name, seed=seed) for seed, name in enumerate(("even", "odd"))]
        self.modules = [load(folder).module for folder in folders]
        self.model: Model = load(folders[0])


class Machine(RuleBasedStateMachine):
    """Programs' contexts grow by what was sampled; some share a beginning."""

    material: Material | None = None

    @initialize(
        kv_tokens=st.sampled_from([70, 130, 600]),
        lower_tokens=st.sampled_from([400, 64, 0]),
        concurrency=st.sampled_from([1, 3, 8]),
    )
    def begin(self, kv_tokens: int, lower_tokens: int, concurrency: int) -> None:
        Machine.material = Machine.material or Material()
        self.modules = Machine.material.modules
        self.model = Machine.material.model
        self.place = Machine.material.folder
        self.lower = LowerTier(self.model.shape, lower_tokens, self.place) if lower_tokens else None
        self.core = Core(
            self.model, version=Version(0, 0), kv_tokens=kv_tokens, concurrency=concurrency, threads=1,
            lower=self.lower,
        )  # fmt: skip
        self.desk = Desk(self.core)
        self.asked: dict[str, list[int]] = {}
        self.last: dict[str, str] = {}
        """Each program's latest request."""
        self.updates = 0

    @property
    def pool(self) -> Pool:
        return self.core._pool  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    @property
    def trie(self) -> Trie:
        return self.pool.kept._trie  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    @rule(
        program=PROGRAMS, new=st.integers(1, 24), tokens=st.integers(1, 20), fresh=st.booleans(),
        hold=st.booleans(), priority=st.integers(0, 1),
    )  # fmt: skip
    def submit(self, program: str, new: int, tokens: int, fresh: bool, hold: bool, priority: int) -> None:
        name = f"{program}{len(self.asked)}"
        before = self.last.get(program)
        if before is not None and before not in self.desk.answers:
            return
        context = self._context(program, before, new, fresh=fresh)
        self.asked[name], self.last[program] = context, name
        self.desk.submit(
            name, context, program_id=program, max_new_tokens=tokens, hold=hold, priority=priority,
            salt=SALTS[program == "d"], sampling={"seed": len(self.asked)},
        )  # fmt: skip

    def _context(self, program: str, before: str | None, new: int, *, fresh: bool) -> list[int]:
        suffix = prompt(new, seed=len(self.asked))
        if before is not None and not fresh:
            context = [*self.asked[before], *self.desk.reply(before).token_ids, *suffix]
            if len(context) < min(self.pool.kv_tokens, 200):
                return context
        # All but one begin alike.
        return [*prompt(30, seed=program == "c"), *suffix]

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.core.busy:
                return
            self.core.step()
            self.check()

    @rule(programs=st.lists(PROGRAMS, min_size=1, max_size=4))
    def turns(self, programs: list[str]) -> None:
        """One more turn of each, to the end."""
        self.core.resume()
        for i, program in enumerate(programs):
            self.submit(program, 3 + i, 5, fresh=False, hold=True, priority=0)
        self.step(400)
        assert not self.core.busy

    @rule()
    def need_room(self) -> None:
        """Give up what nobody holds, as for a request that needs the room."""
        self.pool.kept.free(self.pool.kept.idle_tokens)

    @precondition(lambda self: self.lower is not None)
    @rule(programs=st.lists(PROGRAMS, min_size=1, max_size=4))
    def swap(self, programs: list[str]) -> None:
        """Programs go below all the way, and come back with their next turns."""
        for program in programs:
            self.core.offload(program)
        self.pool.kept.settle(wait=True)
        self.need_room()
        self.turns(programs)

    @rule(program=PROGRAMS)
    def release(self, program: str) -> None:
        self.core.release(program)

    @rule(program=PROGRAMS)
    def abort(self, program: str) -> None:
        self.core.abort(self.last.get(program, "nobody"))

    @precondition(lambda self: self.lower is not None)
    @rule(program=PROGRAMS)
    def offload(self, program: str) -> None:
        self.core.offload(program)

    @precondition(lambda self: self.lower is not None)
    @rule(program=PROGRAMS)
    def restore(self, program: str) -> None:
        self.core.restore(program)

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        pause(self.desk, mode)

    @rule()
    def resume(self) -> None:
        self.core.resume()

    @rule()
    def commit(self) -> None:
        self.updates += 1
        version = f"0.{self.updates}"
        self.core.weights.stage(publish(self.place, self.modules[self.updates % 2], version))
        self.core.commit(CommitRequest(version=version, running="recompute", held="drop"))

    @rule()
    def flush(self) -> None:
        self.core.flush()

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "core"):
            return
        pool, kept = self.pool, self.pool.kept
        assert pool.used + kept.idle_tokens <= pool.kv_tokens
        assert self.lower is None or self.lower.used_tokens <= self.lower.tokens
        nodes = _nodes(self.trie)
        held = [node for node in nodes if node.holders]
        idle = [node for node in nodes if not node.holders and not node.copies]
        assert self.trie.held_tokens == sum(len(node.tokens) for node in held)
        assert self.trie.idle_tokens == sum(len(node.tokens) for node in idle)
        lying = self.trie.held_tokens + self.trie.leaving_tokens + self.trie.idle_tokens
        assert lying == sum(len(node.tokens) for node in nodes)
        assert all(node.kv[0].shape[2] == node.kv[1].shape[2] == len(node.tokens) for node in nodes)
        self._check_holders(nodes)
        self._check_order(idle)

    def _check_holders(self, nodes: list[Node]) -> None:
        holders = self.pool.kept._held  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        counted = Counter(id(node) for leaf in holders.values() for node in leaf.path())
        assert all(node.holders == counted[id(node)] for node in nodes)

    def _check_order(self, idle: list[Node]) -> None:
        order = list(self.trie._idle)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        assert set(order) == set(idle)
        place = {id(node): i for i, node in enumerate(order)}
        for node in idle:
            assert all(place[id(child)] < place[id(node)] for child in node.children.values())

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.resume()
        self.step(5000)
        assert sorted(self.desk.order) == sorted(self.asked)
        for name, context in self.asked.items():
            assert_exact_by_version(self.desk, name, context, self.modules)
        for node in _nodes(self.trie):
            if not node.children:
                self._check_kv(node)
        if self.updates % 2:
            self.commit()

    @torch.no_grad()
    def _check_kv(self, leaf: Node) -> None:
        """What lies along the path to a leaf is what one plain pass computes."""
        path = leaf.path()
        token_ids = as_tensor(np.concatenate([node.tokens for node in path]).astype(np.int64))
        count = len(token_ids)
        keys, values = self.model.shape.empty(count)
        step = Step((), (Chunk(0, keys, values, 0, count),))
        self.model.forward(token_ids, torch.arange(count), torch.tensor([count - 1]), step)
        for part, plain in enumerate((keys, values)):
            lying = torch.cat([node.kv[part] for node in path], dim=2)
            torch.testing.assert_close(lying, plain, rtol=1e-4, atol=1e-4)


def _nodes(trie: Trie) -> list[Node]:
    roots = trie._roots  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    nodes = [node for below in roots.values() for node in below.values()]
    for node in nodes:  # grows while it is walked
        nodes.extend(node.children.values())
    return nodes


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
