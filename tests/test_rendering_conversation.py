"""The record in the making: exact tokens, each sampled one masked once, cost of what is added."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rendering_models as small
from sostenuto.errors import EngineError
from sostenuto.records import Producer, Trajectory, validate
from sostenuto.runtime.engines.wire import FinishReason
from sostenuto.runtime.rendering.conversation import Conversation
from sostenuto.runtime.rendering.demonstration import demonstrate
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.template_renderer import TemplateRenderer
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.types import GroupId, Message, ProgramId, Purpose, StopReason, ToolCall

USER = (Message("user", "hello world"),)
CALL = Message("assistant", "I look.", (ToolCall("find", '{"city": "x"}'),), "because")


def open_small(path: Path, template: str) -> tuple[TemplateRenderer, Vocabulary]:
    folder = ModelFolder.open(small.write_folder(path, template))
    vocabulary = Vocabulary(folder.tokenizer_json)
    return TemplateRenderer(folder, vocabulary), vocabulary


def record(conversation: Conversation) -> Trajectory:
    return Trajectory(
        ProgramId("p"), GroupId("g"), "t", Purpose.TRAIN, conversation.sequences(), 1.0, StopReason.ANSWERED
    )


def ids_of_last_sequence(conversation: Conversation) -> list[int]:
    return [int(id_) for span in conversation.sequences()[-1] for id_ in span.token_ids]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_spans_are_what_was_sent_and_returned_whatever_is_sampled(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = data.draw(st.sampled_from([small.CHATML, small.DEFAULT_SYSTEM, small.THINKING]))
    renderer, vocabulary = open_small(tmp_path_factory.mktemp("m"), template)
    conversation = Conversation(renderer)
    conversation.begin(USER, (small.TOOL,))
    sampled_in_all = 0
    for _ in range(data.draw(st.integers(1, 4))):
        sent = list(conversation.token_ids)
        returned = data.draw(st.lists(st.integers(0, vocabulary.size + 5), max_size=12))
        finish = data.draw(st.sampled_from(FinishReason))
        if finish is FinishReason.STOP:
            returned.append(renderer.stop_token_ids[0])
        conversation.sampled(small.reply(returned, finish), started_s=0.0, ended_s=1.0)
        sampled_in_all += len(returned)
        assert ids_of_last_sequence(conversation) == conversation.token_ids == sent + returned
        branches = conversation.branches
        conversation.observe((Message(data.draw(st.sampled_from(["tool", "user"])), data.draw(st.text())),))
        assert ids_of_last_sequence(conversation) == conversation.token_ids
        if conversation.branches == branches:
            assert conversation.token_ids[: len(sent) + len(returned)] == sent + returned
    finished = record(conversation)
    validate(finished)
    assert finished.trained_tokens == conversation.generated_tokens == sampled_in_all


def test_a_tool_loop_is_one_sequence_and_a_new_question_branches(tmp_path: Path) -> None:
    renderer, _ = open_small(tmp_path, small.THINKING)
    conversation = Conversation(renderer)
    conversation.begin(USER, (small.TOOL,))
    for observation in (Message("tool", "a result", name="find"), Message("user", "why?")):
        ids = renderer.write(conversation.messages, CALL, (small.TOOL,))
        turn = conversation.sampled(small.reply(ids), started_s=0.0, ended_s=1.0)
        assert turn.message == CALL
        conversation.observe((observation,))
    assert conversation.branches == 1
    closed, current = conversation.sequences()
    assert not any(span.mask.any() for span in current)
    assert sum(int(span.mask.sum()) for span in closed) == conversation.generated_tokens
    validate(record(conversation))


def test_a_record_ends_with_what_an_engine_has_seen(tmp_path: Path) -> None:
    renderer, _ = open_small(tmp_path, small.THINKING)
    conversation = Conversation(renderer)
    conversation.begin(USER, (small.TOOL,))
    assert conversation.seen_sequences() == ()
    conversation.sent()
    (prompt,) = conversation.seen_sequences()
    assert [id_ for span in prompt for id_ in span.token_ids] == conversation.token_ids
    ids = renderer.write(conversation.messages, CALL, (small.TOOL,))
    conversation.sampled(small.reply(ids), started_s=0.0, ended_s=1.0)
    seen = conversation.seen_sequences()
    conversation.observe((Message("tool", "a result", name="find"),))
    assert conversation.seen_sequences() == seen != conversation.sequences()
    conversation.sent()
    assert conversation.seen_sequences() == conversation.sequences()
    conversation.sampled(small.reply(ids), started_s=1.0, ended_s=2.0)
    branch = conversation.seen_sequences()
    conversation.observe((Message("user", "why?"),))
    assert conversation.branches == 1
    assert conversation.seen_sequences() == branch


def test_only_a_sampled_terminator_is_trained(tmp_path: Path) -> None:
    renderer, _ = open_small(tmp_path, small.CHATML)
    end = renderer.stop_token_ids[0]
    conversation = Conversation(renderer)
    conversation.begin(USER)
    conversation.sampled(small.reply([40, 41], FinishReason.LENGTH), started_s=0.0, ended_s=1.0)
    conversation.observe((Message("user", "go on"),))
    conversation.sampled(small.reply([42, end]), started_s=1.0, ended_s=2.0)
    policy = [span for span in conversation.sequences()[0] if span.producer is Producer.POLICY]
    assert [span.token_ids.tolist() for span in policy] == [[40, 41], [42, end]]
    after = conversation.sequences()[0][conversation.sequences()[0].index(policy[0]) + 1]
    assert after.producer is Producer.TEMPLATE
    assert after.token_ids[0] == end
    assert not after.mask.any()


def test_tokens_that_no_tokenizer_would_choose_are_kept(tmp_path: Path) -> None:
    renderer, vocabulary = open_small(tmp_path, small.CHATML)
    odd = [vocabulary.encode(char)[0] for char in "hello"]
    assert vocabulary.encode("hello") != odd
    conversation = Conversation(renderer)
    conversation.begin(USER)
    begun = len(conversation.token_ids)
    turn = conversation.sampled(small.reply([*odd, renderer.stop_token_ids[0]]), started_s=0.0, ended_s=1.0)
    conversation.observe((Message("tool", "x"),))
    assert turn.message.content == "hello"
    assert conversation.token_ids[begun : begun + 5] == odd


def test_an_aborted_generation_goes_on_as_the_same_turn(tmp_path: Path) -> None:
    renderer, _ = open_small(tmp_path, small.CHATML)
    ids = renderer.write(USER, CALL, ())
    conversation = Conversation(renderer)
    conversation.begin(USER)
    conversation.sampled(small.reply(ids[:5], FinishReason.ABORT), started_s=0.0, ended_s=1.0)
    turn = conversation.sampled(small.reply(ids[5:], version="0.2"), started_s=2.0, ended_s=3.0)
    assert turn.message == CALL
    assert len(conversation.messages) == 2
    assert [str(v.version) for v in record(conversation).version_spans] == ["0.1", "0.2"]


def test_an_engine_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    renderer, _ = open_small(tmp_path, small.CHATML)
    conversation = Conversation(renderer)
    conversation.begin(USER)
    short = small.reply([40, 41]).model_copy(update={"logprobs": [-0.1]})
    with pytest.raises(EngineError, match="2 tokens and 1 log-prob"):
        conversation.sampled(short, started_s=0.0, ended_s=1.0)
    bare = small.reply([40, 41]).model_copy(update={"versions": []})
    with pytest.raises(EngineError, match="versions"):
        conversation.sampled(bare, started_s=0.0, ended_s=1.0)


class CountingVocabulary(Vocabulary):
    """Counts the characters that go through the tokenizer."""

    characters = 0

    def encode_parts(self, text: str, *args: object, **options: object) -> list[tuple[int, list[int]]]:
        self.characters += len(text)
        return super().encode_parts(text, *args, **options)  # type: ignore[arg-type]


def test_a_turn_tokenises_what_is_new_and_nothing_else(tmp_path: Path) -> None:
    folder = ModelFolder.open(small.write_folder(tmp_path, small.DEFAULT_SYSTEM))
    vocabulary = CountingVocabulary(folder.tokenizer_json)
    renderer = TemplateRenderer(folder, vocabulary)
    conversation = Conversation(renderer)
    conversation.begin(USER)
    costs: list[int] = []
    for _ in range(40):
        conversation.sampled(small.reply([40, 41, renderer.stop_token_ids[0]]), started_s=0.0, ended_s=1.0)
        before = vocabulary.characters
        conversation.observe((Message("tool", "a result"),))
        costs.append(vocabulary.characters - before)
    assert len(set(costs)) == 1
    assert costs[0] < 80


def test_a_demonstration_is_what_a_rollout_would_have_recorded(tmp_path: Path) -> None:
    renderer, vocabulary = open_small(tmp_path, small.DEFAULT_SYSTEM)
    script = [*USER, CALL, Message("tool", "r"), Message("assistant", "It is x.")]
    (shown,) = demonstrate(renderer, script, (small.TOOL,))
    conversation = Conversation(renderer)
    conversation.begin(USER, (small.TOOL,))
    for index in (1, 3):
        ids = renderer.write(script[:index], script[index], (small.TOOL,))
        conversation.sampled(small.reply(ids), started_s=0.0, ended_s=1.0)
        if index == 1:
            conversation.observe((script[2],))
    assert shown.token_ids.tolist() == conversation.token_ids
    assert shown.mask.tolist() == [bool(m) for span in conversation.sequences()[0] for m in span.mask]
    assert shown.token_ids.dtype == np.int32
    trained = vocabulary.decode([int(id_) for id_ in shown.token_ids[shown.mask]])
    assert trained.endswith("It is x.<|im_end|>")
    assert trained.count("<|im_end|>") == 2


def test_a_demonstration_branches_where_the_template_rewrites(tmp_path: Path) -> None:
    renderer, _ = open_small(tmp_path, small.THINKING)
    turn = Message("assistant", "yes", reasoning="because")
    shown = demonstrate(renderer, [*USER, turn, Message("user", "why?"), turn])
    assert len(shown) == 2
    assert all(part.mask.any() and part.mask[-1] for part in shown)
    with pytest.raises(ValueError, match="an assistant's message"):
        demonstrate(renderer, USER)
