"""What a user can set of the scheduler."""

from pydantic import BaseModel, ConfigDict, Field


class SchedulerSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    live_programs: int = Field(default=256, gt=0)
    """Programs with an environment at one time, prepared or being prepared; those without do not count."""

    prepare_ahead: int | None = Field(default=None, gt=0)
    """Environments that may be prepared before there is KV for them; None: as many as measurements say."""

    patience_s: float = Field(default=300.0, gt=0)
    """How long others may pass a program before an engine is kept clear for it."""

    queue_limit: int | None = Field(default=None, gt=0)
    """Programs that may wait for an environment; more are turned away.  None: no limit."""
