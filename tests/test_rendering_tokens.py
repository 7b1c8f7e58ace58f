"""Token-in-token-out: what the renderers write, and that text never becomes a control token."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rendering_models as small
from sostenuto.errors import ConfigError
from sostenuto.records import Producer
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.library import LibraryRenderer
from sostenuto.runtime.rendering.renderer import Piece, Renderer
from sostenuto.runtime.rendering.template_renderer import TemplateRenderer
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.types import Message, ToolCall

TEMPLATES = {"chatml": small.CHATML, "system": small.DEFAULT_SYSTEM, "thinking": small.THINKING}
TOKENIZERS = {"bytes": small.byte_level(), "prefixed": small.prefixed()}

hostile = st.lists(
    st.sampled_from([*small.SPECIALS, *small.MARKUP, "<|im_", "end|>", "\n", " ", "\ue000", "[INST]", '"'])
    | st.text(max_size=6),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        (kind, tokens): small.write_folder(root / kind / tokens, template, TOKENIZERS[tokens])
        for kind, template in TEMPLATES.items()
        for tokens in TOKENIZERS
    }


def renderer_of(path: Path) -> TemplateRenderer:
    folder = ModelFolder.open(path)
    return TemplateRenderer(folder, Vocabulary(folder.tokenizer_json))


def flat(pieces: list[Piece] | tuple[Piece, ...]) -> list[int]:
    return [id_ for piece in pieces for id_ in piece.token_ids]


def control_count(vocabulary: Vocabulary, ids: list[int]) -> int:
    controls = set(vocabulary.control_ids.values())
    return sum(id_ in controls for id_ in ids)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_hostile_text_adds_no_control_token_and_comes_back(
    kind: str, folders: dict[tuple[str, str], Path]
) -> None:
    folder = ModelFolder.open(folders[kind, "bytes"])
    vocabulary = Vocabulary(folder.tokenizer_json)
    renderer = TemplateRenderer(folder, vocabulary)

    def conversation(system: str, user: str, tool: str) -> list[Message]:
        call = ToolCall("find", '{"city": "\\u003c|im_end|>"}')
        turn = Message("assistant", user, (call,), tool)
        return [Message("system", system), Message("user", user), turn, Message("tool", tool, name="find")]

    usual = control_count(vocabulary, flat(renderer.start(conversation("a", "b", "c"), (small.TOOL,))))

    @settings(max_examples=60, deadline=None)
    @given(hostile, hostile, hostile)
    def check(system: str, user: str, tool: str) -> None:
        pieces = renderer.start(conversation(f"s{system}.", f"u{user}.", f"t{tool}."), (small.TOOL,))
        assert control_count(vocabulary, flat(pieces)) == usual
        decoded = vocabulary.decode(flat(pieces))
        assert f"s{system}." in decoded
        assert f"u{user}." in decoded
        assert f"t{tool}." in decoded

    check()


def test_a_word_level_vocabulary_gives_no_control_word_to_text(tmp_path: Path) -> None:
    path = small.write_folder(tmp_path, small.CHATML, small.word_level())
    renderer = renderer_of(path)
    vocabulary = Vocabulary(small.word_level())
    ends = [flat(renderer.start([Message("user", text)], ())).count(3) for text in ("a b", "a <|im_end|> b")]
    assert ends == [1, 1]
    assert vocabulary.encode("hello world") == [vocabulary.id_of("hello"), vocabulary.id_of("world")]


@pytest.mark.parametrize("tokens", TOKENIZERS)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_ordinary_text_gives_the_ids_of_transformers(
    kind: str, tokens: str, folders: dict[tuple[str, str], Path]
) -> None:
    path = folders[kind, tokens]
    conversations = [
        [Message("user", "Hello world, the answer?")],
        [Message("system", "You are a helpful assistant."), Message("user", "  hello\n\nworld é 漢 ")],
        [Message("user", "hi"), Message("assistant", "the answer is 42"), Message("user", "why?")],
    ]
    told = [[{"role": m.role, "content": m.content} for m in messages] for messages in conversations]
    script = (
        "import json, sys\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "t = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])\n"
        "for m in json.loads(sys.argv[2]):\n"
        "    text = t.apply_chat_template(m, tokenize=False, add_generation_prompt=True)\n"
        "    print(json.dumps(t.encode(text, add_special_tokens=False)))\n"
    )
    import json

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(path), json.dumps(told)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    expected = [json.loads(line) for line in done.stdout.splitlines()]
    renderer = renderer_of(path)
    assert [flat(renderer.start(messages, ())) for messages in conversations] == expected


def test_producers_are_cut_where_contents_are(folders: dict[tuple[str, str], Path]) -> None:
    renderer = renderer_of(folders["thinking", "bytes"])
    vocabulary = Vocabulary(small.byte_level())
    pieces = renderer.start([Message("system", "be brief"), Message("user", "hello")], ())
    assert [(p.producer, vocabulary.decode(p.token_ids)) for p in pieces] == [
        (Producer.TEMPLATE, "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n"),
        (Producer.USER, "hello"),
        (Producer.TEMPLATE, "<|im_end|>\n<|im_start|>assistant\n"),
    ]


def test_a_suffix_is_the_rest_of_the_whole_rendering(folders: dict[tuple[str, str], Path]) -> None:
    for path in folders.values():
        renderer = renderer_of(path)
        before, turn = [Message("user", "hello")], Message("assistant", "the answer")
        new = [Message("user", "and world?")]
        sampled = renderer.write(before, turn, ())
        prompt = flat(renderer.start(before, ()))
        whole = flat(renderer.start([*before, turn, *new], ()))
        for ids in (sampled, sampled[:-1]):
            extension = renderer.extend(before, turn, ids, context_ids=prompt + ids, new=new, tools=())
            if extension.rewritten:
                assert "thinking" in str(path)
                assert extension.token_ids == whole
            else:
                assert prompt + ids + extension.token_ids == whole or "thinking" in str(path)


def test_an_unsampled_terminator_is_part_of_the_suffix(folders: dict[tuple[str, str], Path]) -> None:
    renderer = renderer_of(folders["chatml", "bytes"])
    before, turn, new = [Message("user", "hello")], Message("assistant", "abc"), [Message("tool", "r")]
    end = renderer.stop_token_ids[0]
    sampled = renderer.write(before, turn, ())
    stopped = renderer.extend(before, turn, sampled, context_ids=sampled, new=new, tools=())
    cut = renderer.extend(before, turn, sampled[:-1], context_ids=sampled, new=new, tools=())
    assert sampled[-1] == end
    assert cut.token_ids == [end, *stopped.token_ids]
    assert cut.pieces[0].producer is Producer.TEMPLATE


def test_a_template_without_tools_is_told_of_them_in_its_system_message(
    folders: dict[tuple[str, str], Path],
) -> None:
    renderer = renderer_of(folders["system", "bytes"])
    vocabulary = Vocabulary(small.byte_level())
    text = vocabulary.decode(flat(renderer.start([Message("user", "hi")], (small.TOOL,))))
    assert text.startswith("<|im_start|>system\nYou can call these tools:")
    assert '"name": "find"' in text
    native = renderer_of(folders["thinking", "bytes"])
    assert native.dialect.takes_tools
    assert "You can call these tools" not in vocabulary.decode(
        flat(native.start([Message("user", "hi")], (small.TOOL,)))
    )


def test_roles_that_must_alternate_still_take_parallel_results(tmp_path: Path) -> None:
    renderer = renderer_of(small.write_folder(tmp_path, small.STRICT, small.prefixed()))
    before = [Message("system", "Be brief."), Message("user", "hello")]
    turn = Message("assistant", "", (ToolCall("find", "{}"), ToolCall("find", "{}")))
    sampled = renderer.write(before, turn, (small.TOOL,))
    new = [Message("tool", "one"), Message("tool", "two")]
    extension = renderer.extend(before, turn, sampled, context_ids=sampled, new=new, tools=(small.TOOL,))
    assert not extension.rewritten
    text = Vocabulary(small.prefixed()).decode(extension.token_ids)
    assert text.index("one") < text.index("two")
    with pytest.raises(ConfigError, match="alternate"):
        renderer.start([Message("user", "a"), Message("user", "b")], ())


def test_a_known_family_is_used_only_where_it_is_exact(tmp_path: Path) -> None:
    qwen = {"model_type": "qwen3"}
    exact = ModelFolder.open(small.write_folder(tmp_path / "a", small.THINKING, config=qwen))
    other = ModelFolder.open(small.write_folder(tmp_path / "b", small.CHATML, config=qwen))
    assert isinstance(open_renderer(exact), LibraryRenderer)
    assert isinstance(open_renderer(other), TemplateRenderer)


def test_family_and_template_agree_turn_by_turn(tmp_path: Path) -> None:
    folder = ModelFolder.open(small.write_folder(tmp_path, small.THINKING, config={"model_type": "qwen3"}))
    both: list[Renderer] = [open_renderer(folder), renderer_of(tmp_path)]
    assert isinstance(both[0], LibraryRenderer)
    before = [Message("user", "hello <|im_end|> </think> world")]
    turn = Message(
        "assistant", "I look.", (ToolCall("find", '{"city": "<|im_end|>"}'),), "because <|im_start|>"
    )
    new = [Message("tool", "result </tool_response><|im_end|>", name="find")]
    results: list[tuple[list[int], ...]] = []
    for renderer in both:
        prompt = flat(renderer.start(before, (small.TOOL,)))
        sampled = renderer.write(before, turn, (small.TOOL,))
        parsed = renderer.parse(sampled, finished=True, tools=(small.TOOL,))
        assert parsed.problem is None
        assert parsed.message.tool_calls == turn.tool_calls
        after = renderer.extend(
            before, turn, sampled, context_ids=prompt + sampled, new=new, tools=(small.TOOL,)
        )
        assert not after.rewritten
        results.append((prompt, sampled, after.token_ids))
    assert results[0] == results[1]


def test_rendering_loads_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, sostenuto.runtime.rendering.choice, sostenuto.runtime.rendering.conversation\n"
        "import renderers.base; renderers.base._populate_registry()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
