"""The tool server under kill -9, with real processes."""

from benchmarks.tools_torture import torture


async def test_nothing_is_left_and_nothing_runs_twice_when_server_and_workers_are_killed_in_their_midst():
    told: dict[str, tuple[float, str | None]] = {}

    def tell(name: str, value: float, unit: str, target: str | None) -> None:
        told[name] = (value, target)

    # The backend without isolation has the least that ends its processes for it.
    await torture(tell, cycles=20, settings={"unsafe": True})
    missed = {name: value for name, (value, target) in told.items() if target == "== 0" and value}
    assert not missed
    assert told["torture_server_kills"][0] >= 1
    assert told["torture_worker_kills"][0] >= 1
    assert told["torture_calls"][0] >= 10
