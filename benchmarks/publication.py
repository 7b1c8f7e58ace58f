"""The figures of publication, one JSON object a line: name, value, unit, target.

python benchmarks/publication.py [--only NAME ...] [--quick]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.parts import measure_parts

    measure_parts("publication")
