"""A local Hugging Face model folder, read without transformers.

Only what rendering and the engine's limits need: tokenizer, chat template, end tokens, context
length.  Whatever is missing or broken is a ConfigError that names the file and the remedy.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from sostenuto.errors import ConfigError

Json = Mapping[str, Any]

_SAVE_TOKENIZER = (
    "save one there with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)"
)
_SAVE_MODEL = "save the model there with transformers' save_pretrained(FOLDER)"
_ADD_TEMPLATE = "put the model's Jinja chat template into that file, or into tokenizer_config.json"
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a folder says about its model.  The weights are not looked at."""

    path: Path
    config: Json
    tokenizer_json: str
    chat_template: str
    special_tokens: Mapping[str, str]
    """By their names in templates, such as `eos_token`."""
    eos_token_ids: tuple[int, ...]
    """Of generation_config.json, else of config.json; the tokenizer's own end token is not added."""
    vocabulary_size: int
    """Rows of the output layer; may be padded beyond the tokenizer."""
    tokenizer_size: int
    """One more than the highest id with a text."""
    context_tokens: int | None

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read the folder, or raise ConfigError naming the file and the remedy."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such model folder; give the path of a local Hugging Face folder")
        config = _read_json(folder / "config.json", _SAVE_MODEL)
        settings = _read_json(folder / "tokenizer_config.json")
        tokenizer_path = folder / "tokenizer.json"
        tokenizer = _read_json(tokenizer_path, _SAVE_TOKENIZER)
        model: Json = {**config, **_section(config, "text_config")}
        vocabulary_size = _vocabulary_size(model, folder / "config.json")
        return cls(
            path=folder,
            config=config,
            tokenizer_json=_read_text(tokenizer_path),
            chat_template=_chat_template(folder, settings),
            special_tokens=_special_tokens(folder, settings),
            eos_token_ids=_end_ids(_read_json(folder / "generation_config.json"), model),
            vocabulary_size=vocabulary_size,
            tokenizer_size=_tokenizer_size(tokenizer, tokenizer_path, vocabulary_size),
            context_tokens=_first_int(model, _CONTEXT_NAMES),
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read ({exc}); save the model folder again") from exc


def _read_json(path: Path, remedy_if_missing: str | None = None) -> Json:
    """An object; a missing file is empty unless it is needed."""
    if not path.is_file():
        if remedy_if_missing is None:
            return {}
        raise ConfigError(f"{path}: missing; {remedy_if_missing}")
    try:
        value = json.loads(_read_text(path))
    except ValueError as exc:
        raise ConfigError(f"{path}: broken JSON ({exc}); save the model folder again") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object; save the model folder again")
    return cast("Json", value)


def _section(values: Json, name: str) -> Json:
    inner = values.get(name)
    return cast("Json", inner) if isinstance(inner, dict) else {}


def _first_int(values: Json, names: tuple[str, ...]) -> int | None:
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)


def _vocabulary_size(model: Json, path: Path) -> int:
    size = model.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{path}: vocab_size is {size!r}; {_SAVE_MODEL}")
    return size


def _tokenizer_size(tokenizer: Json, path: Path, vocabulary_size: int) -> int:
    model = _section(tokenizer, "model")
    vocabulary: object = model.get("vocab", {})
    added = cast("list[Json]", tokenizer.get("added_tokens") or [])
    highest = max((int(token["id"]) for token in added), default=-1)
    if isinstance(vocabulary, dict):
        highest = max(highest, max(cast("dict[str, int]", vocabulary).values(), default=-1))
    elif isinstance(vocabulary, list):
        highest = max(highest, len(cast("list[object]", vocabulary)) - 1)
    if highest < 0:
        raise ConfigError(f"{path}: holds no vocabulary; {_SAVE_TOKENIZER}")
    if highest >= vocabulary_size:
        raise ConfigError(
            f"{path}: has token id {highest}, but the model's vocab_size is {vocabulary_size}; "
            "use the tokenizer that belongs to the model, or resize its embeddings"
        )
    return highest + 1


def _chat_template(folder: Path, settings: Json) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    value: object = settings.get("chat_template")
    if isinstance(value, list):
        named = {str(item["name"]): str(item["template"]) for item in cast("list[Json]", value)}
        value = named.get("default") or next(iter(named.values()), None)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: the folder has no chat template; {_ADD_TEMPLATE}")
    return value


def _special_tokens(folder: Path, settings: Json) -> dict[str, str]:
    named: Json = {**_read_json(folder / "special_tokens_map.json"), **settings}
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value: object = named.get(name)
        if isinstance(value, dict):
            value = cast("Json", value).get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _end_ids(generation: Json, model: Json) -> tuple[int, ...]:
    value: object = generation.get("eos_token_id", model.get("eos_token_id"))
    if isinstance(value, int):
        return (value,)
    return tuple(cast("list[int]", value)) if isinstance(value, list) else ()
