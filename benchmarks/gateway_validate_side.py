# Its library is one of another environment, and not here when types are checked.
"""OpenEnv's `validate_llm` on an endpoint; runs in the environment of `gateway_environment`.

    python gateway_validate_side.py URL MODEL

Prints its report as one JSON object.  The packages around it load a web framework and more that it does not
need, so they are entered without being run.
"""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def main(url: str, model: str) -> None:
    found = find_spec("openenv")
    assert found is not None
    assert found.submodule_search_locations is not None
    (root,) = found.submodule_search_locations
    for name in ("openenv", "openenv.core", "openenv.core.harness", "openenv.core.harness.capture"):
        package = ModuleType(name)
        package.__path__ = [root + name.removeprefix("openenv").replace(".", "/")]
        sys.modules[name] = package
    library: Any = import_module("openenv.core.harness.capture.validate_llm")
    print(json.dumps(asdict(library.validate_llm(f"{url}/v1", model)), default=str))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
