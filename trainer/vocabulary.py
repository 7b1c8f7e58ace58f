"""What a model folder's tokens are, and whether another model has the same."""

from pathlib import Path

from tokenizers import Tokenizer

from sostenuto.errors import ConfigError


def read_vocabulary(directory: Path) -> dict[str, int]:
    """Ids by text, added tokens included.  ConfigError when there are none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"model {directory}: no tokenizer.json; save the tokenizer next to the weights")
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:
        raise ConfigError(f"model {directory}: tokenizer.json is not understood: {error}") from error
    if not vocabulary:
        raise ConfigError(f"model {directory}: tokenizer.json has no tokens; save the tokenizer again")
    return vocabulary


def tokenizer_size(directory: Path) -> int:
    """One more than the highest id that has a text."""
    return max(read_vocabulary(directory).values()) + 1


def refuse_other_tokens(role: str, directory: Path, policy: Path) -> None:
    """ConfigError unless every token of the `policy` folder is the same one for the model in `directory`."""
    ours, theirs = read_vocabulary(policy), read_vocabulary(directory)
    if ours == theirs:
        return
    texts = sorted(ours.keys() | theirs.keys(), key=lambda text: (ours.get(text, len(ours)), text))
    first = next(text for text in texts if ours.get(text) != theirs.get(text))
    raise ConfigError(
        f"{role}: the tokenizers of {directory} ({len(theirs)} tokens) and of the policy {policy} "
        f"({len(ours)} tokens) differ, first at {first!r}: {theirs.get(first, 'unknown')} and "
        f"{ours.get(first, 'unknown')}; give a model with the policy's tokenizer"
    )
