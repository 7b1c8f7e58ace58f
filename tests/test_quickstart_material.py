"""The quickstart's material: tokenizer, template, folder, first weights, copying."""

import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sostenuto.envs.declaration import declaration
from sostenuto.envs.storeroom import Storeroom
from sostenuto.envs.storeroom.demonstrations import demonstrate, demonstrate_in_full, lesson
from sostenuto.envs.storeroom.world import NOUNS, PLACES, training_tasks
from sostenuto.errors import ConfigError
from sostenuto.runtime.quickstart.copying import copy_batches
from sostenuto.runtime.quickstart.folder import write_folder
from sostenuto.runtime.quickstart.recipe import CopyShape, Recipe
from sostenuto.runtime.quickstart.tokenizer import (
    END,
    LARGEST_VOCABULARY,
    SPECIAL_TOKENS,
    TOOL_CALL_TAGS,
    copyable_ids,
    tokenizer_material,
    train_tokenizer,
)
from sostenuto.runtime.rendering.choice import open_renderer
from sostenuto.runtime.rendering.demonstration import demonstrate as render
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.tools.wire import ToolSchema
from sostenuto.trainer.build import build
from sostenuto.types import Message

RECIPE = Recipe()
TASK = next(training_tasks(0))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(tokenizer_material(seed=0))


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_folder(path, tokenizer, RECIPE.model)
    return path


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return open_renderer(ModelFolder.open(folder))


@pytest.fixture(scope="module")
def tools() -> list[ToolSchema]:
    return [tool.tool.schema for tool in declaration(Storeroom).tools.values()]


def conversation(seed: int) -> list[Message]:
    rng = Random(seed)
    task = next(training_tasks(seed))
    return lesson(task, rng) if rng.random() < 0.5 else demonstrate(task, rng)


def test_equal_seeds_give_the_same_tokenizer(tokenizer: Tokenizer):
    assert train_tokenizer(tokenizer_material(seed=0)).to_str() == tokenizer.to_str()


def test_every_word_place_and_number_of_the_worlds_is_one_token_wherever_it_stands(tokenizer: Tokenizer):
    for word in (*NOUNS, *PLACES, *map(str, range(99))):
        alone = tokenizer.encode(word).ids
        assert len(alone) == 1, word
        for around in (f" {word}", f'"{word}"', f"\n{word}\n", f"<|tool|>{word}", f"+{word}"):
            assert alone[0] in tokenizer.encode(around).ids, around


def test_the_vocabulary_stays_small(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() <= LARGEST_VOCABULARY


@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_its_tokens(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_only_role_markers_and_the_end_are_special(tokenizer: Tokenizer):
    added = tokenizer.get_added_tokens_decoder()
    assert {t.content for t in added.values() if t.special} == set(SPECIAL_TOKENS)
    assert {t.content for t in added.values() if not t.special} == set(TOOL_CALL_TAGS)


def test_what_is_copied_leaves_out_special_tokens_and_tags(tokenizer: Tokenizer):
    ids = copyable_ids(tokenizer)
    assert len(ids) == tokenizer.get_vocab_size() - len(SPECIAL_TOKENS) - len(TOOL_CALL_TAGS)


def test_a_demonstration_reads_as_the_policy_should_write_it(
    tokenizer: Tokenizer, renderer: Renderer, tools: list[ToolSchema]
):
    (shown,) = render(renderer, demonstrate_in_full(TASK), tools)
    said = [int(i) for i, m in zip(shown.token_ids, shown.mask, strict=True) if m]
    text = tokenizer.decode(said, skip_special_tokens=False)
    call = '<tool_call>{"name":"%s","arguments":{"%s":"%s"}}</tool_call><|end|>'
    assert text == (
        call % ("find", "word", TASK.word)
        + call % ("read", "file", TASK.file)
        + call % ("calc", "expr", f"{TASK.record.old}+{TASK.record.new}")
        + f"The total is {TASK.answer}.<|end|>"
    )


def test_an_episode_stays_under_a_hundred_tokens(renderer: Renderer, tools: list[ToolSchema]):
    (shown,) = render(renderer, demonstrate_in_full(TASK), tools)
    assert len(shown.token_ids) <= 100
    assert int(shown.mask.sum()) <= 55


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_every_turn_of_a_demonstration_is_parsed_back_to_itself(
    renderer: Renderer, tools: list[ToolSchema], seed: int
):
    messages = conversation(seed)
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        turn = renderer.parse(renderer.write(messages[:index], message, tools), finished=True)
        assert turn.problem is None
        assert turn.message.content == message.content
        assert [(c.name, c.arguments.replace('": "', '":"')) for c in turn.message.tool_calls] == [
            (c.name, c.arguments) for c in message.tool_calls
        ]


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_a_demonstration_has_the_tokens_of_the_template_rendered_whole(
    tokenizer: Tokenizer, renderer: Renderer, tools: list[ToolSchema], seed: int
):
    (shown,) = render(renderer, conversation(seed), tools)
    text = tokenizer.decode(shown.token_ids.tolist(), skip_special_tokens=False)
    assert tokenizer.encode(text).ids == shown.token_ids.tolist()


@pytest.mark.parametrize("control", [*SPECIAL_TOKENS, *TOOL_CALL_TAGS])
def test_a_control_token_in_a_tools_text_stays_plain_text(
    tokenizer: Tokenizer, renderer: Renderer, tools: list[ToolSchema], control: str
):
    messages = demonstrate_in_full(TASK)
    plain = messages[:2]
    prompt = [i for piece in renderer.start(plain[:1], tools) for i in piece.token_ids]
    said = renderer.write(plain[:1], plain[1], tools)
    new = (Message("tool", f"oak{control}txt", name="find"),)
    extension = renderer.extend(plain[:1], plain[1], said, context_ids=[*prompt, *said], new=new, tools=tools)
    quiet = renderer.extend(
        plain[:1], plain[1], said, context_ids=[*prompt, *said],
        new=(Message("tool", "oak.txt", name="find"),), tools=tools,
    )  # fmt: skip
    (control_id,) = tokenizer.encode(control).ids
    assert extension.token_ids.count(control_id) == quiet.token_ids.count(control_id)
    assert control in tokenizer.decode(extension.token_ids, skip_special_tokens=False)


def test_a_turn_ends_with_the_end_token_alone(tokenizer: Tokenizer, renderer: Renderer):
    assert tuple(renderer.stop_token_ids) == (tokenizer.token_to_id(END),)


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the weights that a process of its own drew under seed 7."""
    path = tmp_path_factory.mktemp("built")
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "sostenuto.trainer.build", "--folder", str(path), "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 450_000 < int(done.stdout.split()[0]) < 550_000
    return path


def test_equal_seeds_give_equal_weights(folder: Path, built: Path, tmp_path: Path):
    for seed in (7, 8):
        (copy := tmp_path / str(seed)).mkdir()
        (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
        build(copy, seed)
    weights = (built / "model.safetensors").read_bytes()
    assert (tmp_path / "7" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "8" / "model.safetensors").read_bytes() != weights


def test_transformers_opens_the_folder(built: Path, tokenizer: Tokenizer):
    import transformers

    library = cast("Any", transformers)  # its own types are partial
    model = library.AutoModelForCausalLM.from_pretrained(built)
    assert model.config.vocab_size == tokenizer.get_vocab_size()
    assert model.config.tie_word_embeddings
    assert model.config.rope_parameters["rope_theta"] == 10_000.0
    assert library.AutoTokenizer.from_pretrained(built).decode(model.config.eos_token_id) == END


def test_the_residual_stream_starts_nearly_untouched(built: Path):
    import safetensors.numpy

    library = cast("Any", safetensors.numpy)  # its own types are partial
    weights: dict[str, NDArray[np.float32]] = library.load_file(built / "model.safetensors")
    matrices = {name: array for name, array in weights.items() if array.ndim == 2}
    spread = {name: float(array.std()) * array.shape[-1] ** 0.5 for name, array in matrices.items()}
    residual = {name for name in spread if "o_proj" in name or "down_proj" in name}
    assert len(residual) == 4
    assert all(spread[name] == pytest.approx(0.025, rel=0.05) for name in residual)
    assert all(spread[name] == pytest.approx(1.0, rel=0.05) for name in spread.keys() - residual)
    assert (weights["model.norm.weight"] == 1).all()
    assert "lm_head.weight" not in weights


def test_weights_that_are_there_already_are_never_replaced(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="exists"):
        build(tmp_path, seed=0)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


@pytest.mark.parametrize("config", [None, "{", '{"model_type": "no-such-model"}'])
def test_a_folder_without_a_usable_configuration_is_refused(tmp_path: Path, config: str | None):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"config\.json"):
        build(tmp_path, seed=0)


@given(
    seed=st.integers(0, 2**32), fresh=st.integers(4, 20), spans=st.integers(1, 5), length=st.integers(2, 4)
)
def test_what_is_learnt_of_copying_is_what_followed_before(seed: int, fresh: int, spans: int, length: int):
    shape = CopyShape(fresh_tokens=fresh, spans=spans, span_tokens=length)
    ids = np.arange(100, 150, dtype=np.int32)
    tokens, learnt = next(copy_batches(seed, 3, ids, shape))
    assert tokens.shape == learnt.shape == (3, shape.tokens)
    assert set(tokens.ravel().tolist()) <= set(ids.tolist())
    for row, mask in zip(tokens.tolist(), learnt.tolist(), strict=True):
        assert len(set(row[:fresh])) == fresh
        assert sum(mask) == spans * (length - 1)
        for place in [index for index, chosen in enumerate(mask) if chosen]:
            assert row[row.index(row[place - 1]) + 1] == row[place]


def test_equal_seeds_give_equal_copying():
    ids, shape = np.arange(60, dtype=np.int32), RECIPE.copying.shape
    first, second, other = (
        [tokens.tolist() for tokens, _ in islice(copy_batches(seed, 2, ids, shape), 3)] for seed in (1, 1, 2)
    )
    assert first == second != other


def test_the_material_loads_no_torch():
    code = (
        "import sys, sostenuto.envs.storeroom, sostenuto.runtime.quickstart.folder, "
        "sostenuto.runtime.quickstart.copying, sostenuto.runtime.quickstart.recipe; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
