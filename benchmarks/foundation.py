"""The figures of the foundation, one JSON object a line: name, value, unit, target.

python benchmarks/foundation.py [--only NAME ...] [--quick] [--quickstart] [--seeds 1 2 3]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Not this folder but the one above: environments travel to their hosts as `benchmarks.environments:...`.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.command import main

    main()
