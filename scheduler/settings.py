"""What a user can set of the scheduler."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SchedulerSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    live_programs: int = Field(default=256, gt=0)
    """Programs with an environment at one time, prepared or being prepared; those without do not count."""

    reserved_programs: int = Field(default=0, ge=0)
    """Of these, places that only programs of an evaluation take."""

    prepare_ahead: int | None = Field(default=None, gt=0)
    """Environments that may be prepared before there is KV for them; None: as many as measurements say."""

    patience_s: float = Field(default=300.0, gt=0)
    """How long others may pass a program before an engine is kept clear for it."""

    queue_limit: int | None = Field(default=None, gt=0)
    """Programs that may wait for an environment; more are turned away.  None: no limit."""

    @model_validator(mode="after")
    def _leaves_room(self) -> Self:
        if self.reserved_programs >= self.live_programs:
            raise ValueError(
                f"reserved_programs {self.reserved_programs} leaves nothing of live_programs "
                f"{self.live_programs}; reserve fewer"
            )
        return self
