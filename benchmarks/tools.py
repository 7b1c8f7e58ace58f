"""The figures of the tool server and its sandboxes, one JSON object a line: name, value, unit, target.

python benchmarks/tools.py [--only NAME ...] [--quick]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from benchmarks.tools_command import main

    main()
