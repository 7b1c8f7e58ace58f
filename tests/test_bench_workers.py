"""Workers of a sweep are real processes: none of them outlives whoever sent it cells."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

_SWEEP = textwrap.dedent(
    """
    import time
    from sostenuto.runtime.bench.sweep import run_cells
    if __name__ == "__main__":
        run_cells([0, 1, 2, 3], workers=2, run=time.sleep, say=lambda _: print("one is over", flush=True))
        time.sleep(60)
    """
)


def test_workers_end_when_the_sweep_is_killed(tmp_path: Path):
    script = tmp_path / "sweep.py"
    script.write_text(_SWEEP.replace("[0, 1, 2, 3]", "[0, 0, 60, 60]"))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as sweep:
        assert sweep.stdout is not None
        sweep.stdout.readline()
        workers = psutil.Process(sweep.pid).children(recursive=True)
        assert len(workers) >= 2
        sweep.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
    assert len(gone) == len(workers)
