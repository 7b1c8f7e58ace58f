"""What a user says about learning.  Frozen, checked once, passed in parts.

`LearnerSettings` hold for a whole job; an algorithm (`algorithms`) is an argument of each step, so that a
recipe may change from one to the other.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Schedule(Section):
    """Learning rate by optimizer step: linear warm-up, then a decay that ends at `total_steps`."""

    learning_rate: float = Field(default=5e-4, gt=0)
    """The highest one, reached after the warm-up."""

    final_learning_rate: float = Field(default=0.0, ge=0)
    """Where linear and cosine decay end; it stays there afterwards."""

    shape: Literal["constant", "linear", "cosine"] = "constant"

    warmup_steps: int = Field(default=0, ge=0)
    """The first step of a warm-up of n already moves, with 1/(n+1) of the rate."""

    total_steps: int | None = Field(default=None, gt=0)
    """Steps until the decay ends, warm-up included.  Needed by linear and cosine."""

    @model_validator(mode="after")
    def _decay_needs_an_end(self) -> Self:
        if self.shape == "constant":
            return self
        if self.total_steps is None or self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule: shape {self.shape!r} needs total_steps above warmup_steps "
                f"({self.warmup_steps}), not {self.total_steps}"
            )
        if self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"schedule: final_learning_rate {self.final_learning_rate} is above "
                f"learning_rate {self.learning_rate}"
            )
        return self


class LoraSettings(Section):
    """Learn small matrices beside linear layers that stay as they are.  Needs `sostenuto[lora]`."""

    rank: int = Field(default=16, gt=0)

    alpha: float = Field(default=32.0, gt=0)
    """What is learnt counts alpha / rank times."""

    dropout: Literal[0] = 0
    """None: a log-probability would be another than the engine's."""

    targets: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of linear layers, such as q_proj; None: all but the output layer and routers."""


class Receivers(Section):
    """The engines of a job, as far as publication is concerned."""

    count: int = Field(default=1, gt=0)
    local: bool = True
    """All are on the trainer's machine."""

    files_alone: bool = False
    """One of them takes weights from files, and not over the network of this project's own."""

    quantized: bool = False


class PublicationSettings(Section):
    """How new weights get to the engines."""

    transport: Literal["shared_memory", "disk", "disk_delta", "broadcast", "point_to_point", "auto"] = (
        "shared_memory"
    )
    """shared_memory: engines on this machine serve what the trainer wrote into memory.  disk: a file in
    `directory`, for engines on machines that share it.  disk_delta: what changed since the version before,
    and a full file now and then.  broadcast: over the network, to all engines together.
    point_to_point: over the network, from every rank of the trainer to every engine.  auto: the one that
    should be the fastest by what is measured at the start; the log says why.
    """

    directory: str | None = None
    """Of disk, the folder that trainer and engines share.  Of shared_memory, where weights go when memory
    has no room; None: the system's temporary folder.
    """

    keep: int = Field(default=2, ge=2)
    """Versions that stay in `directory`."""

    deltas: int = Field(default=8, ge=1)
    """Of disk_delta: how many there are between two full versions, at most."""

    host: str = "127.0.0.1"
    """Address of the trainer's machine where engines call for weights that go over the network."""

    gather_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Of broadcast: how long an engine that is ready waits for the others of the last time."""

    deadline_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """How long one engine may keep the sender, and with broadcast the other engines, waiting."""

    expected_change: float = Field(default=0.05, ge=0, le=1)
    """Share of the elements that a step changes, as far as auto is concerned."""

    engines: Receivers = Receivers()
    """Whom auto counts on.  Jobs say it of their own engines, unless you do."""

    @model_validator(mode="after")
    def _disk_has_a_folder(self) -> Self:
        if self.transport.startswith("disk") and self.directory is None:
            raise ValueError(
                f"publication: transport {self.transport!r} needs directory; name a folder that trainer and "
                "engines share"
            )
        return self


class LearnerSettings(Section):
    """How the trainer's model is kept and moved, whatever the loss."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the model that runs and is published.  bfloat16 keeps float32 master weights."""

    schedule: Schedule = Schedule()

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""

    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's denominator floor."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; matrices only, never norms and biases."""

    clip_norm: float = Field(default=1.0, gt=0)
    """Bound on the global norm of a step's gradient."""

    microbatch_tokens: int = Field(default=4096, gt=0)
    """Tokens that go through the model at once.  No effect on the gradient; bounds memory."""

    lora: LoraSettings | None = None
    """None: all weights learn."""

    activation_checkpointing: Literal["auto", "always", "never"] = "auto"
    """Compute layers again in the backward pass instead of keeping what is inside of them.

    auto: in passes above `microbatch_tokens`, which a sequence that is longer than that has for itself.
    """

    quantization: Literal["int8", "fp8", "nvfp4"] | None = None
    """Compute with matrices as an engine of this quantization has them; what is published stays whole.

    None: compute with what is learnt; a quantized engine then differs, and `correction` weighs that.
    """

    routing_replay: bool = False
    """Run the experts that each token was routed to when it was generated, in place of a new choice.

    For mixture-of-experts models.  Their weights are of the present router, which learns from them.
    """

    draft_learning_rate: float | None = Field(default=None, gt=0)
    """Teach the engines' draft model what the policy samples, at this rate, and publish it with the policy.

    None: it stays as it is.
    """

    publication: PublicationSettings = PublicationSettings()

    keep_checkpoints: int = Field(default=3, ge=1)
    """Older ones are removed after a save."""

    @model_validator(mode="after")
    def _betas_are_shares(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: each must be in [0, 1), not {self.betas}")
        return self

    @model_validator(mode="after")
    def _lora_is_whole(self) -> Self:
        if self.lora is not None and self.quantization is not None:
            raise ValueError(
                "lora: an engine quantizes the merged weights, which training would not compute with; leave "
                "lora or quantization out, or quantize the engine alone and correct for it"
            )
        return self


class TrainerProcessSettings(Section):
    """The process that a job's model learns in."""

    threads: int = Field(default=1, gt=0)

    processes: int = Field(default=1, gt=0)
    """They share the model's weights, gradients and moments (FSDP2), and the sequences of each batch."""

    restarts: int = Field(default=3, ge=0)
    """How often one that dies is started again within ten minutes; the job goes on from its checkpoint."""
