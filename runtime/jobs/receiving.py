"""What the trainer is told of the engines that its weights go to."""

from sostenuto.errors import ConfigError
from sostenuto.runtime.config import RuntimeConfig
from sostenuto.trainer.settings import LearnerSettings, Receivers

_NETWORK = ("broadcast", "point_to_point")


def with_receivers(learner: LearnerSettings, config: RuntimeConfig) -> LearnerSettings:
    """`learner` with the engines of the job, unless it names them.

    ConfigError for a transport that one of them cannot take.
    """
    publication = learner.publication
    foreign = [entry for entry in config.engines if entry.kind != "embedded"]
    if foreign and publication.transport in _NETWORK:
        raise ConfigError(
            f"learner.publication.transport: {publication.transport!r} is for embedded engines, and one of "
            f"kind {foreign[0].kind!r} reads files; give shared_memory, disk, disk_delta or auto"
        )
    if "engines" in publication.model_fields_set:
        return learner
    engines = Receivers(
        count=len(config.engines) or config.engine.replicas,
        files_alone=bool(foreign),
        quantized=config.engine.quantization is not None,
    )
    return learner.model_copy(update={"publication": publication.model_copy(update={"engines": engines})})
