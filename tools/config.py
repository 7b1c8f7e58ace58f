"""What the tool server is told when it starts."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

OUTPUT_BYTES = 16384
"""Of an observation whose tool has no cap of its own."""


class ServerConfig(BaseModel):
    """Frozen; the values of secrets are not in it, only their names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0: a free one."""

    token: str = Field(min_length=16, repr=False)
    """Bearer token that every request carries."""

    metrics_token: str | None = Field(default=None, min_length=16, repr=False)
    """Bearer token that opens /metrics and nothing else; `token` opens it, too."""

    tls_certificate: Path | None = None
    """PEM file with the server's certificate; with it the server speaks TLS only."""

    tls_key: Path | None = None
    """PEM file with the certificate's private key."""

    insecure: bool = False
    """Listen beyond this machine without TLS: whoever sees the traffic has the token."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    sandbox_root: str | None = None
    """Folder for workspaces, for whoever makes the backend; None: the backend's own choice."""

    lease_s: float = Field(default=30.0, gt=0)
    """How long a program lives without a heartbeat of its owner, unless the heartbeat says otherwise."""

    longest_lease_s: float = Field(default=3600.0, gt=0)
    idle_s: float = Field(default=4 * 3600.0, ge=1)
    """How long a program lives without a request."""

    max_s: float = Field(default=24 * 3600.0, gt=0)
    """How long a program lives at all."""

    scoring_s: float = Field(default=120.0, ge=0)
    """Given to a program beyond the deadline of its reward, whatever its age."""

    state_dir: Path | None = None
    """Folder for what has to survive this process, such as results of calls.  None: nothing does."""

    takeover_s: float = Field(default=10.0, ge=0)
    """How long a server waits for the one before it, which may be ending, to leave `state_dir`."""

    results_kept_s: float = Field(default=600.0, gt=0)
    """After a restart, how long results of programs that ended with the last process can be fetched."""

    snapshot_idle_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A sandbox that was not used for so long is snapshotted as it runs, so that its program can go on after
    the death of this process.  None: only those are that step down so far."""

    starts_at_once: int = Field(default=4, gt=0)
    """Sandboxes that may be starting at the same time."""

    warm: int = Field(default=0, ge=0)
    """Sandboxes of each kind that was asked for lately that are started ahead; 0 for backends that start in
    no time, or that have a pool of their own."""

    warm_idle_s: float = Field(default=300.0, gt=0)
    """How long one that was started ahead waits for a program."""

    layer_bytes: int | None = Field(default=None, ge=0)
    """Disk for what set-up commands have made; what is in use may take more.  None: half of what is free."""

    keep_layers: bool = False
    """Leave them on disk when the server ends in order, too, for the next one on `state_dir`."""

    cpus: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What running calls may claim of processors together; None: all that this machine lets us have."""

    memory_bytes: int | None = Field(default=None, gt=0)
    """What running calls may claim of memory together; None: all that this machine lets us have."""

    sandbox_memory_bytes: int | None = Field(default=None, gt=0)
    """What sandboxes may take together, each counted with its limit; None: no bound.

    Told to those who ask for it, and kept by them.
    """

    queue_limit: int = Field(default=1000, gt=0)
    """Calls that may wait at one queue; more are refused, with a time to try again."""

    queue_patience_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Waiting so long makes up for one step of priority, and ends being passed for want of memory."""

    release_s: float = Field(default=10.0, gt=0)
    """Given to each of the two steps of a release: closing the environment, stopping the sandbox."""

    output_bytes: int = Field(default=OUTPUT_BYTES, ge=64)
    """Cap of an observation whose tool has none of its own."""

    results_bytes: int = Field(default=1 << 20, gt=0)
    """Text of recorded results kept for one program."""

    body_bytes: int = Field(default=64 << 20, gt=0)
    """The largest request: a task, a pickled environment or a file."""

    archive_bytes: int = Field(default=1 << 30, gt=0)
    """The largest archive that goes into a sandbox or comes out of one; it lies on disk meanwhile."""

    secret_names: tuple[str, ...] = ()
    """Environment variables of the server's process whose values never leave it."""

    parent_pid: int | None = None
    """The server ends when this process is no longer its parent."""
