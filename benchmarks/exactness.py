"""Is what the trainer sees true?  Log-probabilities, tokens, and what a held program prefills."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks import models
from benchmarks.bench import Bench
from benchmarks.environments import MarkedStoreroom
from benchmarks.episodes import Episodes, sample
from benchmarks.wiretap import excess_prefill, mismatches, never_sent
from sostenuto.records import Producer, Span, Trajectory
from sostenuto.runtime.quickstart.tokenizer import SPECIAL_TOKENS, TOOL_CALL_TAGS
from sostenuto.trainer.client import TrainerClient
from sostenuto.trainer.samples import Sample, trajectory_samples
from sostenuto.trainer.settings import LearnerSettings

_MARKS = (*SPECIAL_TOKENS, *TOOL_CALL_TAGS)
_SCARCE_KV_TOKENS = 512


async def measure_logprobs(bench: Bench) -> None:
    """Engine against trainer at equal weights, in float32, over every sampled token."""
    # The competent model is so sure of itself that most of its log-probabilities are zero.
    model = await models.warm(bench)
    episodes = await sample(bench, model, bench.size(50, 10))
    samples = [part for record in episodes.records for part in trajectory_samples(record, advantage=0.0)]
    async with TrainerClient() as trainer:
        await trainer.open(model, LearnerSettings(), seed=0)
        largest = await _largest_difference(trainer, samples, temperature=1.0)
        of_another = await _largest_difference(trainer, samples, temperature=1.01)
    bench.tell("dlogp_episodes", len(episodes.records), "episodes", f">= {bench.size(50, 10)}")
    bench.tell("dlogp_turns_mean", float(np.mean(_turns(episodes))), "turns", ">= 2")
    bench.tell("dlogp_tokens", sum(part.masked_tokens for part in samples), "tokens")
    bench.tell("dlogp_max", largest, "nats", "<= 1e-4")
    bench.tell("dlogp_max_at_another_temperature", of_another, "nats", "> 1e-4")


async def measure_prefill(bench: Bench) -> None:
    """The next turn of a held program prefills what is new, and nothing else."""
    model = await models.competent(bench)
    tasks = bench.size(50, 10)
    held = _excess(await sample(bench, model, tasks))
    # So little room that programs give up their KV: then the same count has to show it.
    scarce = _excess(await sample(bench, model, tasks, kv_tokens=_SCARCE_KV_TOKENS))
    bench.tell("later_turns", len(held), "turns", f">= {tasks}")
    bench.tell("prefill_beyond_suffix", sum(map(abs, held)), "tokens", "== 0")
    bench.tell("prefill_beyond_suffix_without_room", sum(map(abs, scarce)), "tokens", ">= 1")


async def measure_tokens(bench: Bench) -> None:
    """Records against the bytes on the engine's socket, with text that looks like control tokens."""
    model = await models.competent(bench)
    temperatures = (1.0, 1.5)
    episodes = await sample(
        bench,
        model,
        bench.size(1000, 60) // len(temperatures),
        environment=MarkedStoreroom,
        options={"marks": list(_MARKS)},
        temperatures=temperatures,
    )
    _tell_what_was_hard(bench, episodes, model)
    bench.tell("token_mismatches", _mismatches(episodes.records, episodes), "tokens", "== 0")
    unsent = sum(map(never_sent, episodes.records))
    bench.tell("tokens_never_sent", unsent, "tokens", "== 0")
    corrupted = with_one_token_changed(episodes.records[-1])
    found = _mismatches([corrupted], episodes)
    bench.tell("token_mismatches_of_a_corrupted_record", found, "tokens", ">= 1")


def with_one_token_changed(record: Trajectory) -> Trajectory:
    """A copy in which the first sampled token is another one."""
    *before, sequence = record.sequences
    spans = list(sequence)
    place = next(index for index, span in enumerate(spans) if span.mask.any())
    token_ids = spans[place].token_ids.copy()
    token_ids[0] ^= 1
    spans[place] = replace(spans[place], token_ids=token_ids)
    return replace(record, sequences=(*before, tuple(spans)))


def _tell_what_was_hard(bench: Bench, episodes: Episodes, model: Path) -> None:
    tokenizer: Tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    records = episodes.records
    tool, user = _texts(records, Producer.ENVIRONMENT), _texts(records, Producer.USER)
    sampled = [span.token_ids.tolist() for record in records for span in record.spans() if span.mask.any()]
    odd = sum(not is_canonical(ids, tokenizer) for ids in sampled)
    controls = [id_ for mark in _MARKS if (id_ := tokenizer.token_to_id(mark)) is not None]
    given = [span for record in (*tool, *user) for span in record]
    opened = sum(int(np.isin(span.token_ids, controls).sum()) for span in given)
    bench.tell("token_episodes", len(records), "episodes", f">= {bench.size(1000, 60)}")
    bench.tell("token_turns_noncanonical", odd, "turns", ">= 1")
    bench.tell("token_turns", len(sampled), "turns")
    bench.tell("token_episodes_marked_by_tools", _marked(tool, tokenizer), "episodes", ">= 1")
    bench.tell("token_episodes_marked_by_user", _marked(user, tokenizer), "episodes", ">= 1")
    bench.tell("control_tokens_from_text", opened, "tokens", "== 0")


def is_canonical(token_ids: list[int], tokenizer: Tokenizer) -> bool:
    """Whether encoding the text of the tokens gives these tokens."""
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False)
    return tokenizer.encode(text, add_special_tokens=False).ids == token_ids


def _texts(records: list[Trajectory], producer: Producer) -> list[list[Span]]:
    """What `producer` put into each record."""
    return [[span for span in record.spans() if span.producer is producer] for record in records]


def _marked(records: list[list[Span]], tokenizer: Tokenizer) -> int:
    """Records with the text of a control token that is not that token."""

    def shows(span: Span) -> bool:
        text: str = tokenizer.decode(span.token_ids.tolist(), skip_special_tokens=True)
        return any(mark in text for mark in SPECIAL_TOKENS)

    return sum(any(map(shows, record)) for record in records)


def _mismatches(records: Sequence[Trajectory], episodes: Episodes) -> int:
    return sum(mismatches(record, episodes.exchanges.get(record.program_id, [])) for record in records)


def _excess(episodes: Episodes) -> list[int]:
    return [tokens for exchanges in episodes.exchanges.values() for tokens in excess_prefill(exchanges)]


def _turns(episodes: Episodes) -> list[int]:
    return [len(exchanges) for exchanges in episodes.exchanges.values()]


async def _largest_difference(trainer: TrainerClient, samples: list[Sample], temperature: float) -> float:
    found = await trainer.logprobs(samples, temperature)
    return max(
        float(np.abs(theirs - part.logprobs)[part.mask].max())
        for part, theirs in zip(samples, found, strict=True)
    )
