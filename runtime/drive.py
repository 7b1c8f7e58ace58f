"""The life of one program, from its prompt to its reward, as one coroutine that reads top to bottom.

Invariants:
- It decodes only on a grant of the scheduler, and reports every change of phase as it happens.
- Whatever ends it, `close` gives back its environment and its KV.
- A failure of one part is this program's outcome; only a bug or a cancellation leaves as an exception.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace

import anyio

from sostenuto.errors import (
    EnvironmentFailure,
    Overloaded,
    PolicyError,
    ProgramError,
    ToolServerError,
    VersionUnavailable,
    lone_error,
)
from sostenuto.records import Trajectory
from sostenuto.runtime.engines.wire import FinishReason, GenerateReply, GenerateRequest, Sampling
from sostenuto.runtime.program import ProgramSpec, Timeouts, ToolServer
from sostenuto.runtime.prompts import Prompts
from sostenuto.runtime.rendering.conversation import Conversation
from sostenuto.runtime.rendering.renderer import Renderer, Turn
from sostenuto.runtime.turn_costs import cost_of, queued_s_of, used_by
from sostenuto.runtime.turn_stream import Generate, TurnSpans, TurnStream, unserved, versions_of
from sostenuto.scheduler.actions import Decode, Prepare, Refuse, TurnAway, Unserved
from sostenuto.scheduler.events import Answered, Event, Interrupted, Prepared, ToolReturned, TurnEnded
from sostenuto.scheduler.kv import Footprint
from sostenuto.tools.wire import Reward, ToolSchema
from sostenuto.types import (
    CallId,
    EngineId,
    Episode,
    Message,
    ProgramId,
    StopReason,
    ToolCall,
    ToolResult,
    ToolStatus,
    Usage,
)

Grant = Prepare | Decode | Refuse | Unserved | TurnAway

_REWARD = CallId("reward")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a program is driven with."""

    tools: ToolServer
    renderer: Renderer
    generate: Generate
    """None: the engine was lost, and the scheduler will say where to send the same tokens again."""
    release: Callable[[EngineId, ProgramId], Awaitable[None]]
    context_tokens: Callable[[], int]
    report: Callable[[Event], None]
    now_s: Callable[[], float]
    timeouts: Timeouts
    prompts: Prompts


class Drive:
    """One program.  `run` once, then `close`.  `grant` waits for the scheduler's next word on it.

    `spans` is called with the tokens of each turn as they come.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        around: Surroundings,
        grant: Callable[[], Awaitable[Grant]],
        spans: TurnSpans | None = None,
    ) -> None:
        self.spec = spec
        self._around = around
        self._grant = grant
        self._stream = TurnStream(spans, around.now_s)
        self._conversation = Conversation(around.renderer)
        self._tools: dict[str, ToolSchema] = {}
        self._results: list[ToolResult] = []
        self._prompt_tokens = 0
        self._turns = 0
        self._calls = 0
        self._usage = Usage()
        sampling = Sampling(
            temperature=spec.temperature, seed=spec.seed, stop_token_ids=around.renderer.stop_token_ids,
            **asdict(spec.truncation),
        )  # fmt: skip
        self._blank_request = GenerateRequest(
            request_id=spec.id, program_id=spec.id, token_ids=[], max_new_tokens=1, sampling=sampling,
            routed_experts=spec.routed_experts,
        )  # fmt: skip
        """Checked once; those that are sent differ in what `_request` writes."""
        self._engine_ids: set[EngineId] = set()
        """Where KV of it may be."""
        self._needs_release = False

    async def run(self) -> Trajectory:
        """Drive the program to its reward; ProgramError when it fails."""
        stop = await self._until_stopped()
        self._around.prompts.remove(self.spec.id)
        self._around.report(Answered(self.spec.id))
        reward = await self._score(stop)
        return replace(self.record(stop, reward.value, reward.metrics), turn_rewards=reward.turns)

    def record(
        self, stop: StopReason, reward: float | None = None, metrics: dict[str, float] | None = None
    ) -> Trajectory:
        """The record as it stands; also of a program that failed half way."""
        return Trajectory(
            program_id=self.spec.id,
            group_id=self.spec.group_id,
            task_id=self.spec.task_id,
            purpose=self.spec.purpose,
            sequences=self._conversation.seen_sequences(),
            reward=reward,
            stop_reason=stop,
            usage=self._usage,
            metrics={
                "turns": float(self._turns),
                "tool_calls": float(self._calls),
                "branches": float(self._conversation.branches),
                **(metrics or {}),
            },
            experts=self._conversation.seen_experts(),
        )

    async def close(self) -> None:
        """Give back environment and KV.  Shielded, bounded, idempotent."""
        self._around.prompts.remove(self.spec.id)
        with anyio.move_on_after(self._around.timeouts.release_s, shield=True):
            async with anyio.create_task_group() as group:
                if self._needs_release:
                    group.start_soon(self._release_environment)
                group.start_soon(self._release_kv)

    async def _until_stopped(self) -> StopReason:
        await self._prepare()
        with anyio.move_on_after(self.spec.limits.wall_s):
            while True:
                stop = await self._turn()
                if stop is not None:
                    return stop
        return StopReason.DEADLINE

    async def _prepare(self) -> None:
        """Make the environment and render the prompt; EnvironmentFailure when that alone is too much."""
        grant = await self._granted()
        if isinstance(grant, TurnAway):
            raise Overloaded(
                f"too many programs wait for an environment; submit it again in {grant.retry_after_s:.0f} s, "
                "or raise scheduler.queue_limit"
            )
        await self._begin()
        room = self._room()
        if room <= 0:
            raise self._prompt_too_long(f"{self._most_tokens()} tokens are allowed in all")
        self._prompt_tokens = len(self._conversation.token_ids)
        self._add_prompt()
        self._around.report(Prepared(self.spec.id, self._footprint(), room))

    async def _begin(self) -> None:
        began_s, spec = self._around.now_s(), self.spec
        self._needs_release = True
        ready = await self._around.tools.prepare(
            spec.id, spec.environment, spec.task,
            seed=spec.environment_seed, timeout_s=self._around.timeouts.prepare_s,
        )  # fmt: skip
        self._tools = {tool.name: tool for tool in ready.tools}
        self._conversation.begin(ready.messages, ready.tools, at_s=self._around.now_s())
        self._usage += Usage(environment_s=self._around.now_s() - began_s)

    async def _turn(self) -> StopReason | None:
        """Decode once and act on it; a reason when the program is over.

        A turn whose engine is lost leaves no trace: the next one begins with the same tokens, and with
        those that were told.  One that was interrupted goes on behind the tokens that it has.
        """
        grant = await self._granted()
        if isinstance(grant, Refuse) and not self._turns:
            raise self._prompt_too_long(
                f"its first turn needs KV of {grant.needed_tokens}, not {grant.largest_tokens}"
            )
        if isinstance(grant, Unserved):
            raise VersionUnavailable(unserved(grant))
        if not isinstance(grant, Decode):
            return StopReason.CONTEXT_FULL
        decoded = await self._decode(grant)
        if decoded is None:
            return None
        reply, turn = decoded
        self._turns += 1
        if stop := self._over(reply, turn):
            return stop
        tools = self._called(turn)
        self._around.report(TurnEnded(self.spec.id, grant.turn, self._footprint(), tools, cost_of(reply)))
        results = await self._act(turn)
        if any(result.done for result in results):
            return StopReason.ENVIRONMENT_DONE
        room = self._room()
        if room <= 0:
            return self._which_limit()
        queued_s = queued_s_of(results)
        self._around.report(ToolReturned(self.spec.id, grant.turn, self._footprint(), room, queued_s))
        return None

    async def _decode(self, grant: Decode) -> tuple[GenerateReply, Turn] | None:
        began_s = self._around.now_s()
        self._engine_ids.add(grant.engine_id)
        request = self._request(grant)
        self._conversation.sent()
        parts = await self._stream.sampled(grant.engine_id, request, self._around.generate)
        if not parts:
            if (tokens := self._stream.interrupted) is not None:
                self._around.report(Interrupted(self.spec.id, grant.turn, tokens))
            return None
        if not any(part.token_ids for part in parts):
            raise PolicyError(f"turn {grant.turn} came back empty ({parts[-1].finish_reason})")
        self._usage += sum(map(used_by, parts), Usage(prompt_tokens=len(request.token_ids)))
        ended_s = self._around.now_s()
        turns = [self._conversation.sampled(part, started_s=began_s, ended_s=ended_s) for part in parts]
        return parts[-1], turns[-1]

    def _request(self, grant: Decode) -> GenerateRequest:
        changes = {
            "request_id": f"{self.spec.id}/{grant.turn}",
            "token_ids": self._conversation.token_ids.copy(),
            "max_new_tokens": self._room(),
            "routed_experts_from": self._conversation.routed_tokens,
            **versions_of(grant.requires),
        }
        return self._blank_request.model_copy(update=changes)

    def _over(self, reply: GenerateReply, turn: Turn) -> StopReason | None:
        """Whether the turn was the last one."""
        if reply.finish_reason is FinishReason.LENGTH:
            return self._which_limit()
        wants = len(turn.message.tool_calls)
        if not wants and turn.problem is None:
            return StopReason.ANSWERED
        if self._turns >= self.spec.limits.turns:
            return StopReason.TURN_LIMIT
        allowed = self.spec.limits.tool_calls
        if allowed is not None and self._calls + wants > allowed:
            return StopReason.TOOL_CALL_LIMIT
        return None

    def _called(self, turn: Turn) -> tuple[str, ...]:
        """The tools that the turn calls.  What the policy made up is none."""
        if turn.problem is not None:
            return ()
        return tuple(call.name for call in turn.message.tool_calls if call.name in self._tools)

    async def _act(self, turn: Turn) -> list[ToolResult]:
        """Run the turn's calls together and put the results into the context, in call order."""
        if turn.problem is not None:
            self._observe((Message("tool", turn.problem),), self._around.now_s())
            return []
        calls = turn.message.tool_calls
        began_s = self._around.now_s()
        results = await self._call_all(calls)
        ended_s = self._around.now_s()
        self._calls += len(calls)
        self._usage += Usage(tool_s=ended_s - began_s)
        self._results += results
        observations = tuple(
            Message("tool", result.content, name=call.name)
            for call, result in zip(calls, results, strict=True)
        )
        self._observe(observations, ended_s)
        return results

    def _observe(self, new: tuple[Message, ...], now_s: float) -> None:
        branches = self._conversation.branches
        self._conversation.observe(new, at_s=now_s)
        if self._conversation.branches > branches:
            self._add_prompt()

    async def _call_all(self, calls: tuple[ToolCall, ...]) -> list[ToolResult]:
        if len(calls) == 1:
            return [await self._call(0, calls[0])]
        results: list[ToolResult | None] = [None] * len(calls)

        async def call(index: int) -> None:
            results[index] = await self._call(index, calls[index])

        with lone_error():
            async with anyio.create_task_group() as group:
                for index in range(len(calls)):
                    group.start_soon(call, index)
        return [result for result in results if result is not None]

    async def _call(self, index: int, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        deadline_s = tool.timeout_s if tool else 0.0
        result = await self._around.tools.call(
            self.spec.id,
            CallId(f"{self._turns}.{index}"),
            call,
            timeout_s=deadline_s + self._around.timeouts.call_margin_s,
            priority=self.spec.priority,
        )
        match result.status:
            case ToolStatus.ENVIRONMENT_FAILURE:
                raise EnvironmentFailure(f"tool {call.name}: {result.content}")
            case ToolStatus.INFRASTRUCTURE_FAILURE:
                raise ToolServerError(f"tool {call.name}: {result.content}")
            case _:
                return result

    async def _score(self, stop: StopReason) -> Reward:
        began_s = self._around.now_s()
        episode = Episode(
            messages=self._conversation.messages,
            stop_reason=stop,
            tool_results=tuple(self._results),
            turns=self._turns,
            seed=self.spec.environment_seed,
        )
        await self._release_kv()
        reward = await self._around.tools.reward(
            self.spec.id, _REWARD, episode, timeout_s=self._around.timeouts.reward_s
        )
        self._usage += Usage(environment_s=self._around.now_s() - began_s)
        return reward

    async def _release_kv(self) -> None:
        for engine_id in tuple(self._engine_ids):
            await self._around.release(engine_id, self.spec.id)
            # Only now: a release that was cancelled half way is done again by `close`.
            self._engine_ids.discard(engine_id)

    async def _release_environment(self) -> None:
        try:
            await self._around.tools.release(self.spec.id)
        except ProgramError as error:
            # It comes back when its lease ends.
            _log.warning("environment of %s was not given back: %s", self.spec.id, error)
        self._needs_release = False

    async def _granted(self) -> Grant:
        began_s = self._around.now_s()
        grant = await self._grant()
        self._usage += Usage(queue_s=self._around.now_s() - began_s)
        return grant

    def _add_prompt(self) -> None:
        """A context begins; no more of it than the first prompt had can be another's, too."""
        self._around.prompts.add(self.spec.id, self._conversation.token_ids[: self._prompt_tokens])

    def _footprint(self) -> Footprint:
        is_first = not self._turns and self.spec.group_size > 1
        return self._around.prompts.footprint(
            self.spec.id, len(self._conversation.token_ids), expects_more=is_first
        )

    def _room(self) -> int:
        """Tokens that the next turn may sample."""
        length = len(self._conversation.token_ids)
        return min(self.spec.limits.turn_tokens, self._most_tokens() - length)

    def _most_tokens(self) -> int:
        total, context = self.spec.limits.total_tokens, self._around.context_tokens()
        return context if total is None else min(total, context)

    def _prompt_too_long(self, why: str) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"the prompt alone has {len(self._conversation.token_ids)} tokens: {why}; shorten it, or raise "
            "limits.total_tokens, engine.kv_tokens or the model's context"
        )

    def _which_limit(self) -> StopReason:
        length, total = len(self._conversation.token_ids), self.spec.limits.total_tokens
        if total is not None and length >= total:
            return StopReason.TOTAL_TOKENS
        if length >= self._around.context_tokens():
            return StopReason.CONTEXT_FULL
        return StopReason.TURN_TOKENS
