"""The figures of scheduling, one JSON object a line: name, value, unit, target.

python benchmarks/scheduling.py [--only NAME ...] [--quick] [--workers 2]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.scheduling_command import main

    main()
