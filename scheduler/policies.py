"""Every policy by its name."""

from collections.abc import Callable
from types import MappingProxyType

from sostenuto.errors import ConfigError, nearest
from sostenuto.scheduler.baselines.aimd import Aimd
from sostenuto.scheduler.baselines.autellix import Las
from sostenuto.scheduler.baselines.continuum import Continuum
from sostenuto.scheduler.baselines.fixed_cap import FixedCap
from sostenuto.scheduler.baselines.infercept import InferCept
from sostenuto.scheduler.baselines.request_level import RequestHash, RequestRoundRobin, RequestSticky
from sostenuto.scheduler.baselines.thunderagent import ThunderAgent
from sostenuto.scheduler.baselines.thunderagent_paper import ThunderAgentPaper
from sostenuto.scheduler.frame import Frame
from sostenuto.scheduler.scheduler import Scheduler
from sostenuto.scheduler.settings import SchedulerSettings

POLICIES = MappingProxyType(
    {
        "sostenuto": "ours",
        "request-round-robin": "every turn at once, on the next engine; the engine's LRU decides on KV",
        "request-hash": "every turn at once, on the engine of the session's hash",
        "request-sticky": "every turn at once; a session stays on the engine that was least loaded at first",
        "cap:N": "at most N programs on the fleet at one time, first come first served",
        "aimd": "an admission window by additive increase, multiplicative decrease on KV use (CONCUR)",
        "ttl": "KV is pinned for a time to live by tool (Continuum)",
        "ttl:N": "KV is pinned for N seconds",
        "infercept": "preserve, swap or discard by the least waste (InferCept)",
        "las": "the program that has been served least goes first (Autellix)",
        "thunderagent": "pause and resume by its published code, without decay",
        "thunderagent-decay": "by its published code, with --use-acting-token-decay",
        "thunderagent-paper": "by its paper's equations",
    }
)
"""What each does, in a line.  N stands for a number."""

_FIXED: dict[str, Callable[[SchedulerSettings], Frame]] = {
    "sostenuto": Scheduler,
    "request-round-robin": RequestRoundRobin,
    "request-hash": RequestHash,
    "request-sticky": RequestSticky,
    "aimd": Aimd,
    "ttl": Continuum,
    "infercept": InferCept,
    "las": Las,
    "thunderagent": ThunderAgent,
    "thunderagent-decay": lambda settings: ThunderAgent(settings, decay=True),
    "thunderagent-paper": ThunderAgentPaper,
}


def make_policy(name: str, settings: SchedulerSettings | None = None) -> Frame:
    """A policy that knows no program and no engine yet.  ConfigError for a name that is none."""
    settings = settings or SchedulerSettings()
    kind, colon, number = name.partition(":")
    if kind == "cap":
        return FixedCap(_cap(name, number, settings), settings)
    if kind == "ttl" and colon:
        return Continuum(settings, ttl_s=_seconds(name, number))
    if colon or name not in _FIXED:
        raise ConfigError(f"policy {name!r}: {nearest(name, list(POLICIES))}")
    return _FIXED[name](settings)


def _cap(name: str, number: str, settings: SchedulerSettings) -> int:
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"policy {name!r}: a cap is a whole number from 1 on, such as 'cap:16'")
    if int(number) > settings.live_programs:
        raise ConfigError(
            f"policy {name!r}: never reached, as live_programs is {settings.live_programs};"
            " lower the cap or raise live_programs"
        )
    return int(number)


def _seconds(name: str, number: str) -> float:
    try:
        seconds = float(number)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"policy {name!r}: a time to live is seconds from 0 on, such as 'ttl:10'")
    return seconds
