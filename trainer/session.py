"""The trainer process's state and what each command does to it.  Synchronous; torch lives here."""

from dataclasses import replace
from pathlib import Path
from typing import assert_never

from pydantic import TypeAdapter
from torch import Tensor

from sostenuto.errors import TrainerError
from sostenuto.trainer.algorithms import SFT, Algorithm, AnyAlgorithm
from sostenuto.trainer.checkpoint import restore_checkpoint, save_checkpoint, weight_bytes
from sostenuto.trainer.critic import Critic, open_critic
from sostenuto.trainer.drafter import Drafter, open_drafter
from sostenuto.trainer.learner import Learner
from sostenuto.trainer.model import Policy, load_reference, open_policy, shared_policy
from sostenuto.trainer.parts import Critic as CriticPart
from sostenuto.trainer.publication.auto import resolved
from sostenuto.trainer.publication.manifest import Manifest
from sostenuto.trainer.publication.sender import Sender, open_sender
from sostenuto.trainer.publication.snapshot import unique_tensors
from sostenuto.trainer.ranks import ALONE, Ranks
from sostenuto.trainer.reports import Exactness, ScorerFacts, StepReport, TrainerFacts
from sostenuto.trainer.samples import Sample
from sostenuto.trainer.scorer import Scorer
from sostenuto.trainer.settings import LearnerSettings, Schedule
from sostenuto.trainer.wire import (
    Close,
    Command,
    Exact,
    Fit,
    Learn,
    Logprobs,
    Open,
    OpenScorer,
    Publish,
    ResetOptimizer,
    Restore,
    Save,
    Score,
    Values,
    sample_from_wire,
)
from sostenuto.types import Version

Facts = TrainerFacts | ScorerFacts
Result = Facts | StepReport | Exactness | str | list[list[float]] | list[bytes] | bytes | None

_ALGORITHM: TypeAdapter[Algorithm] = TypeAdapter(AnyAlgorithm)
_CRITIC: TypeAdapter[CriticPart] = TypeAdapter(CriticPart)


class Session:
    """One model, one learner, one sender, and the draft model that learns beside it."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        """`ranks`: those that carry out the same commands; the first one alone writes and publishes."""
        self._ranks = ranks
        self._learner: Learner | None = None
        self._drafter: Drafter | None = None
        self._scorer: Scorer | None = None
        self._sender: Sender | None = None
        self._sends_shares = False
        self._source = Path()

    def carry_out(self, command: Command) -> Result:
        """Do what `command` asks; errors of this project are for the caller, anything else is a crash."""
        match command:
            case Open() | OpenScorer():
                return self._load(command)
            case Fit() | Learn() | Exact() | Logprobs() | Values():
                return self._compute(command, [sample_from_wire(sample) for sample in command.samples])
            case Publish():
                manifest = self._publish(command)
                return manifest and manifest.model_dump_json().encode()
            case Save() | Restore() | ResetOptimizer():
                return self._keep(command)
            case Score():
                return self._scores(command.texts)
            case Close():
                return self.close()
            case _:
                assert_never(command)

    def close(self) -> None:
        """Remove what was published.  Idempotent."""
        if self._sender:
            self._sender.close()

    @property
    def _ready(self) -> Learner:
        if self._learner is None:
            raise TrainerError("the trainer has no model yet; call open first")
        return self._learner

    def _load(self, command: Open | OpenScorer) -> Facts:
        if isinstance(command, Open):
            return self._open(command)
        self._scorer = Scorer(Path(command.directory), command.dtype, command.device)
        return self._scorer.facts()

    def _scores(self, texts: list[list[int]]) -> list[list[float]]:
        if self._scorer is None:
            raise TrainerError("there is no model that scores; call open_scorer first")
        return self._scorer.score(texts)

    def _open(self, command: Open) -> TrainerFacts:
        settings = LearnerSettings.model_validate_json(command.settings)
        self._source = Path(command.model_directory)
        policy = open_policy(self._source, settings, seed=command.seed)
        # Before the learner, which seeds what is drawn at random.
        self._drafter = open_drafter(command.draft_directory, policy, settings)
        folder = command.reference_directory
        if self._ranks.count > 1:
            policy = shared_policy(policy)
        reference = None if folder is None else load_reference(Path(folder), policy, settings.dtype)
        teachers = {
            name: load_reference(Path(folder), policy, settings.dtype, role=f"teacher {name}")
            for name, folder in command.teacher_directories.items()
        }
        self._learner = Learner(
            policy,
            settings,
            seed=command.seed,
            version=command.version,
            reference=reference,
            teachers=teachers,
            critic=self._open_critic(command, policy, settings),
            ranks=self._ranks,
        )
        self.close()
        publication = resolved(settings.publication, weight_bytes(self._learner), self._ranks)
        self._sends_shares = publication.transport == "point_to_point"
        if self._sends_shares or not self._ranks.index:
            self._sender = open_sender(publication, self._ranks)
        return self._facts()

    def _open_critic(self, command: Open, policy: Policy, settings: LearnerSettings) -> Critic | None:
        if command.critic is None:
            return None
        directory = command.critic_directory
        part = _CRITIC.validate_json(command.critic)
        return open_critic(
            part, policy, settings, None if directory is None else Path(directory), self._ranks
        )

    def _facts(self) -> TrainerFacts:
        learner = self._ready
        policy = learner.policy
        return TrainerFacts(
            parameters=policy.parameters,
            dtype=policy.dtype,
            architecture=policy.architecture,
            vocabulary_size=policy.vocabulary_size,
            tokenizer_size=policy.tokenizer_size,
            context_tokens=policy.context_tokens,
            weight_bytes=weight_bytes(learner),
            version=learner.version,
            step=learner.step,
        )

    def _compute(self, command: Fit | Learn | Exact | Logprobs | Values, samples: list[Sample]) -> Result:
        learner = self._ready
        match command:
            case Fit():
                return self._drafted(
                    learner.fit(samples, SFT.model_validate_json(command.algorithm)), samples, 1.0
                )
            case Learn():
                algorithm = _ALGORITHM.validate_json(command.algorithm)
                return self._drafted(learner.learn(samples, algorithm), samples, algorithm.temperature)
            case Exact():
                return learner.exact(samples)
            case Logprobs():
                found = learner.logprobs(samples, command.temperature, of=command.of)
                return [array.tobytes() for array in found]
            case Values():
                return [array.tobytes() for array in learner.values(samples)]

    def _drafted(self, report: StepReport, samples: list[Sample], temperature: float) -> StepReport:
        """The draft model learns from the same tokens."""
        drafter = self._drafter
        return replace(report, draft_loss=drafter.learn(samples, temperature)) if drafter else report

    def _publish(self, command: Publish) -> Manifest | None:
        """None but for the first rank."""
        learner = self._ready
        learner.check_name(command.version)
        tensors = (
            list(learner.policy.shares().items())
            if self._sends_shares
            else unique_tensors(learner.policy.state())
        )
        manifest = None if self._sender is None else self._sent(self._sender, command.version, tensors)
        learner.name(command.version)
        return None if self._ranks.index else manifest

    def _sent(self, sender: Sender, version: Version, tensors: list[tuple[str, Tensor]]) -> Manifest:
        if self._drafter and not self._ranks.index:
            return sender.publish(version, [*tensors, *self._drafter.named()], selector="all")
        return sender.publish(version, tensors)

    def _keep(self, command: Save | Restore | ResetOptimizer) -> TrainerFacts | str:
        learner = self._ready
        match command:
            case Save():
                root = Path(command.root)
                return str(
                    save_checkpoint(
                        learner,
                        root,
                        command.version,
                        source=self._source,
                        drafter=self._drafter,
                        notes=command.notes,
                    )
                )
            case Restore():
                restore_checkpoint(learner, Path(command.path), drafter=self._drafter)
            case ResetOptimizer():
                learner.optimizer.reset(Schedule.model_validate_json(command.schedule))
        return self._facts()
