"""The figures of recovery, one JSON object a line: name, value, unit, target.

python benchmarks/recovery.py [--only NAME ...] [--quick] [--kills 200] [--seed 7]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not this folder but the one above: tasks are found as `benchmarks.recovery_tasks:...`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.recovery_command import main

    main()
