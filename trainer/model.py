"""The policy as the trainer holds it: any causal language model of transformers, from a local folder.

- Ids beyond the tokenizer have no text; they are cut out of every distribution, as the engine does.
- Dropout is off: a log-probability is the one that the engine would give.
- Sequences run packed, one after the other, where a probe shows that none of them sees another; else padded.

Suffixes: N = tokens of all sequences, M = the positions asked for.
"""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from sostenuto.errors import ConfigError, RecordError, Unsupported
from sostenuto.trainer import packing
from sostenuto.trainer.head import Head
from sostenuto.trainer.loading import load_folder
from sostenuto.trainer.lora import Adapter
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.quantization import Format, compute_with, fake_quantize, quantized_weights
from sostenuto.trainer.ranks import as_shared, inside, reshard, shard, whole
from sostenuto.trainer.recomputation import Recomputation
from sostenuto.trainer.routing import UNKNOWN, Routers, find_routers
from sostenuto.trainer.settings import LearnerSettings
from sostenuto.trainer.tensors import split
from sostenuto.trainer.vocabulary import refuse_other_tokens, tokenizer_size

_PROBE_TOKENS = 8
_PROBE_LENGTHS = (5, 3, 3)
# Relative difference that the order of sums explains; a sequence that saw another is far beyond.
_ROUNDING = {torch.bfloat16: 5e-2}
_ROUNDING_ELSE = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A model and how its next-token distribution is read.

    `plain_head`: logits are the output layer applied to the decoder's last hidden states, and nothing more.
    """

    module: PreTrainedModel
    tokenizer_size: int
    plain_head: bool
    packs: bool = False
    """Whether `features` runs sequences without padding."""
    routers: Routers | None = None
    """Of a mixture-of-experts model whose experts can be replayed."""
    recomputation: Recomputation | None = None
    """None: every layer keeps all that its backward pass needs."""
    adapter: Adapter | None = None
    """What learns in place of all weights."""
    source: Path = Path()
    """The folder it was read from."""
    shared: bool = False
    """Whether several ranks hold it together; then `inside` is where it runs."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def dtype(self) -> str:
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def architecture(self) -> str:
        # FSDP makes a class of its own of the model's.
        return type(self.module).__name__.removeprefix("FSDP")

    @property
    def decoder(self) -> nn.Module:
        """What gives hidden states."""
        return _decoder(self.module)

    @property
    def context_tokens(self) -> int:
        return int(getattr(self.module.config, "max_position_embeddings", 0) or 0)

    @property
    def vocabulary_size(self) -> int:
        return _rows(self.module)

    def save(self, directory: Path, state: dict[str, Tensor] | None = None) -> None:
        """Write config.json and safetensors as transformers does.  `state`: what `state` has given."""
        cast("Any", self.module).save_pretrained(str(directory), state_dict=state or self.state())

    def state(self) -> dict[str, Tensor]:
        """The weights by the names of the architecture, with what an adapter adds; all ranks ask, or none."""
        if self.adapter is not None:
            return self.adapter.merged()
        if not self.shared:
            return self.module.state_dict()
        named = cast("dict[str, Tensor]", self.module.state_dict(keep_vars=True))
        # A parameter of two names is gathered once.
        gathered = {id(tensor): whole(tensor.detach()) for tensor in named.values()}
        return {name: gathered[id(tensor)] for name, tensor in named.items()}

    def shares(self) -> dict[str, Tensor]:
        """As `state`, but of each tensor this rank's share; one of two names is there once."""
        if self.adapter is not None or not self.shared:
            return dict(unique_tensors(self.state()))
        named = cast("dict[str, Tensor]", self.module.state_dict(keep_vars=True))
        first: dict[int, str] = {}
        for name, tensor in named.items():
            first.setdefault(id(tensor), name)
        return {name: named[name].detach() for name in first.values()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over whole weights.  RuntimeError for those of another model."""
        if not self.shared:
            self.module.load_state_dict(state)
            return
        own = cast("dict[str, Tensor]", self.module.state_dict(keep_vars=True))
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise RuntimeError("names or shapes differ")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(as_shared(state[name], tensor))

    def inside(self, compute: Callable[[], Tensor]) -> Tensor:
        """compute(), which runs this model; all ranks at once where they share it."""
        return inside(self.module, compute) if self.shared else compute()

    def give_up(self) -> None:
        """After a pass `inside` whose gradient nobody asks for."""
        if self.shared:
            reshard(self.module)

    def features(
        self,
        token_ids: Tensor,
        lengths: tuple[int, ...],
        positions: Tensor,
        *,
        experts: Tensor | None = None,
    ) -> Tensor:
        """What `logits` needs at `positions` (M,) of `token_ids` (N,), sequences of `lengths`; (M, ...).

        `experts` (N, layers with a router, experts of a token) are run in place of the model's choice.
        """
        run = self._packed if self.packs else self._padded
        return run(token_ids, lengths, experts)[positions]

    @property
    def head(self) -> Head | None:
        """What `logits` applies, where that is a matrix and nothing more."""
        part = _head(self.module) if self.plain_head else None
        if type(part) is not nn.Linear:
            return None
        return Head(part.weight, cast("Tensor | None", part.bias), self.tokenizer_size)

    def recompute(self, above_tokens: float) -> None:
        """From now on, keep only each layer's input in passes of more tokens.  ConfigError if it cannot."""
        found = self.recomputation
        if found is None or not found.layers:
            if above_tokens < 1:
                raise ConfigError(
                    f"activation_checkpointing: transformers marks no layers of {self.architecture} for it; "
                    "use auto or never"
                )
            return
        found.above_tokens = above_tokens

    def _packed(self, token_ids: Tensor, lengths: tuple[int, ...], experts: Tensor | None) -> Tensor:
        with self._running(token_ids, experts):
            return _states(self._model, token_ids.unsqueeze(0), **_boundaries(lengths))[0]

    def _padded(self, token_ids: Tensor, lengths: tuple[int, ...], experts: Tensor | None) -> Tensor:
        """No attention mask: padding is to the right of every real token, and attention is causal."""
        rows = pad_sequence(_sequences(token_ids, lengths), batch_first=True)
        real = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]
        if experts is not None:
            experts = pad_sequence(
                _sequences(experts, lengths), batch_first=True, padding_value=UNKNOWN
            ).flatten(0, 1)
        with self._running(rows, experts):
            return _states(self._model, rows)[real.to(rows.device)]

    @property
    def _model(self) -> nn.Module:
        """What `features` runs."""
        return _decoder(self.module) if self.plain_head else self.module

    @contextmanager
    def _running(self, token_ids: Tensor, experts: Tensor | None) -> Generator[None]:
        recomputation = self.recomputation
        replaying = partial(self._replaying, experts)
        kept = recomputation.of_pass(token_ids.numel(), replaying) if recomputation else nullcontext()
        with kept, replaying():
            yield

    def _replaying(self, experts: Tensor | None) -> AbstractContextManager[None]:
        if experts is None:
            return nullcontext()
        routers = self.routers
        if routers is None:
            raise RecordError(f"experts: {self.architecture} has no routers that can replay; leave them out")
        found, needed = list(experts.shape[1:]), [routers.layers, routers.top_k]
        if found != needed:
            raise RecordError(f"experts: {found} layers and experts of a token, the model has {needed}")
        return routers.replaying(experts)

    def logits(self, features: Tensor) -> Tensor:
        """Logits (M, tokenizer size) of `features`, float32 or better."""
        rows: Tensor = _head(self.module)(features) if self.plain_head else features
        return rows[:, : self.tokenizer_size].to(torch.promote_types(rows.dtype, torch.float32))


def load_policy(directory: Path, dtype: str, quantization: Format | None = None) -> Policy:
    """Read a Hugging Face folder.  ConfigError names what is missing or does not fit."""
    size = tokenizer_size(directory)
    module = _load_module(directory, dtype)
    module.eval()
    # A tokenizer may know more ids than the model has rows; those can be neither sampled nor trained.
    if quantization is not None:
        for weight in quantized_weights(module):
            compute_with(weight, partial(fake_quantize, weight.tensor, quantization))
    plain = _has_plain_head(module)
    packs = _learns_to_pack(module)
    routers, recomputation = find_routers(module), Recomputation(module)
    return Policy(module, min(size, _rows(module)), plain, packs, routers, recomputation, source=directory)


def load_beside(role: str, directory: Path, policy: Policy, dtype: str) -> Policy:
    """A model that reads what the policy writes.

    ConfigError, which begins with `role`, for one with other tokens, or too few rows for them.
    """
    refuse_other_tokens(role, directory, policy.source)
    try:
        other = load_policy(directory, dtype)
    except ConfigError as error:
        raise ConfigError(f"{role}: {error}") from error
    if other.tokenizer_size < policy.tokenizer_size:
        raise ConfigError(
            f"{role} {directory}: it has rows for {other.tokenizer_size} tokens, the policy {policy.source} "
            f"samples from {policy.tokenizer_size}; give a model of the same family"
        )
    return other


def open_policy(directory: Path, settings: LearnerSettings, *, seed: int) -> Policy:
    """What learns under `settings`.  `seed`: of the small matrices of LoRA."""
    policy = load_policy(directory, settings.dtype, settings.quantization)
    if settings.lora is None:
        return policy
    return replace(policy, adapter=Adapter(policy.module, settings.lora, seed))


def shared_policy(policy: Policy) -> Policy:
    """`policy`, of which every rank keeps a share.  ConfigError where that cannot be."""
    shard(policy.module, _layers_to_share(policy, "trainer.processes"))
    return replace(policy, shared=True)


def shared_decoder(policy: Policy) -> Policy:
    """As `shared_policy`, of a model whose hidden states alone are asked for: it runs where it is called."""
    shard(policy.decoder, _layers_to_share(policy, "trainer.processes: critic"))
    return replace(policy, shared=True)


def _layers_to_share(policy: Policy, role: str) -> Sequence[nn.Module]:
    layers = policy.recomputation.layers if policy.recomputation else ()
    if not policy.plain_head or not layers:
        raise ConfigError(f"{role}: {policy.architecture}: its layers are not known; train it in one process")
    return layers


def load_reference(directory: Path, policy: Policy, dtype: str, *, role: str = "reference") -> Policy:
    """A model to compare the policy with; nothing of it is learnt.  ConfigError as `load_beside`."""
    reference = load_beside(role, directory, policy, dtype)
    reference.module.requires_grad_(False)
    return reference


def _load_module(directory: Path, dtype: str) -> PreTrainedModel:
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model {directory}: no config.json; a folder saved by transformers is needed")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model {directory}: no *.safetensors; save the model with safe serialization")
    module, wrong = load_folder(AutoModelForCausalLM, directory, dtype)
    if wrong:
        raise ConfigError(f"model {directory}: weights do not fit config.json: {wrong}; save both again")
    return module


def _rows(module: PreTrainedModel) -> int:
    head = cast("Any", module.get_output_embeddings())
    return int(module.config.vocab_size if head is None else head.weight.shape[0])


def _decoder(module: PreTrainedModel) -> nn.Module:
    return module.base_model


def _head(module: PreTrainedModel) -> nn.Module:
    return cast("nn.Module", module.get_output_embeddings())


def _states(model: nn.Module, token_ids: Tensor, **boundaries: object) -> Tensor:
    """Last hidden states, or logits where `model` has an output layer, of `token_ids` (B, T); (B, T, ...)."""
    output: Any = model(input_ids=token_ids, use_cache=False, **boundaries)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def _boundaries(lengths: tuple[int, ...]) -> dict[str, object]:
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"position_ids": positions.unsqueeze(0), "sequence_lengths": lengths}


def _sequences(packed: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    return list(split(packed, list(lengths)))


def _learns_to_pack(module: PreTrainedModel) -> bool:
    """Give `module` the packed attention if sequences in one row then come out as each alone does.

    Otherwise, say for one that adds a bias by distance or carries a state from token to token, it stays as it
    is.
    """
    default = _attention(module)
    token_ids = torch.arange(sum(_PROBE_LENGTHS)) % _rows(module)
    with torch.no_grad():
        alone = [_states(_decoder(module), part[None])[0] for part in _sequences(token_ids, _PROBE_LENGTHS)]
        try:
            _use_attention(module, packing.NAME)
            packed = _probe_packed(module, token_ids)
        except (Unsupported, TypeError):
            packed = None
    if packed is not None and _agree(packed, torch.cat(alone)):
        return True
    _use_attention(module, default)
    return False


def _probe_packed(module: PreTrainedModel, token_ids: Tensor) -> Tensor | None:
    decoder = _decoder(module)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        return None
    return _states(decoder, token_ids[None], **_boundaries(_PROBE_LENGTHS))[0]


def _agree(found: Tensor, expected: Tensor) -> bool:
    difference = (found - expected).double().square().sum() / expected.double().square().sum()
    return float(difference) ** 0.5 <= _ROUNDING.get(found.dtype, _ROUNDING_ELSE)


def _attention(module: PreTrainedModel) -> str:
    return str(cast("Any", module.config)._attn_implementation)  # noqa: SLF001 - it has no public name


def _use_attention(module: PreTrainedModel, name: str) -> None:
    cast("Any", module).set_attn_implementation(name)


def _has_plain_head(module: PreTrainedModel) -> bool:
    """Compare with the model's own logits once: some scale or cap them after the output layer."""
    if module.get_output_embeddings() is None or _decoder(module) is module:
        return False
    probe = torch.arange(_PROBE_TOKENS).unsqueeze(0) % _rows(module)
    with torch.no_grad():
        expected: Tensor = module(input_ids=probe, use_cache=False).logits
        states: Tensor = _decoder(module)(input_ids=probe, use_cache=False).last_hidden_state
        found: Tensor = _head(module)(states)
    return found.shape == expected.shape and bool(torch.allclose(found, expected, rtol=1e-4, atol=1e-5))
