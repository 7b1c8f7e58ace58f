"""How long programs waited for an engine, and how long an engine waited for programs."""


class Waits:
    """Two stop watches over the whole fleet, kept as counts change."""

    __slots__ = ("_open_engines", "_since_s", "_spare_s", "_waiting_s", "programs")

    def __init__(self) -> None:
        self.programs = 0
        """Nothing is missing to them but an engine."""
        self._open_engines = 0
        self._since_s = 0.0
        self._waiting_s = 0.0
        self._spare_s = 0.0

    def change(self, now_s: float, *, programs: int = 0, open_engines: int = 0) -> None:
        """`open_engines`: those with a free slot."""
        self._count(now_s)
        self.programs += programs
        self._open_engines += open_engines

    def waiting_s(self, now_s: float) -> float:
        """Time in which somebody waited for an engine."""
        self._count(now_s)
        return self._waiting_s

    def spare_s(self, now_s: float) -> float:
        """Time in which an engine had a free slot and nobody waited for one."""
        self._count(now_s)
        return self._spare_s

    def _count(self, now_s: float) -> None:
        if self.programs:
            self._waiting_s += now_s - self._since_s
        elif self._open_engines:
            self._spare_s += now_s - self._since_s
        self._since_s = now_s
