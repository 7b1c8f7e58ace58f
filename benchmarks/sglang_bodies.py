"""Reads request bodies, and takes each as SGLang's own server would.  Runs in SGLang's environment.

Lines of JSON on standard input: [route, body].  A field that SGLang does not know would be ignored by its
server without a word; here it fails.
"""

import json
import sys
from collections import Counter
from importlib import import_module
from typing import Any, cast

_TYPES = {
    "/generate": "GenerateReqInput",
    "/abort_request": "AbortReq",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/weights_checker": "CheckWeightsReqInput",
    "/close_session": "CloseSessionReqInput",
}
_BODILESS = {"/flush_cache", "/model_info", "/server_info", "/ready", "/v1/loads"}


def main() -> None:
    seen: Counter[str] = Counter()
    for line in sys.stdin:
        route, body = cast("tuple[str, dict[str, Any] | None]", json.loads(line))
        if route in _BODILESS:
            assert body is None, f"{route} takes no body"
        else:
            _check(route, body or {})
        seen[route] += 1
    untried = sorted(_TYPES.keys() - seen.keys())
    assert not untried, f"no body was sent to {', '.join(untried)}"
    print(json.dumps({"bodies": sum(seen.values()), "routes": len(seen)}))


def _check(route: str, body: dict[str, Any]) -> None:
    adapter = import_module("pydantic").TypeAdapter
    kind = getattr(import_module("sglang.srt.managers.io_struct"), _TYPES[route])
    fields = set(getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__)
    assert body.keys() <= fields, f"{route}: SGLang does not know {sorted(body.keys() - fields)}"
    made = adapter(kind).validate_python(body)
    if route != "/generate":
        return
    made.normalize_batch_and_arguments()
    params = import_module("sglang.srt.sampling.sampling_params").SamplingParams
    unknown = body["sampling_params"].keys() - set(params.__struct_fields__)
    assert not unknown, f"sampling_params: SGLang does not know {sorted(unknown)}"
    params(**made.sampling_params).verify(1 << 20)
    contract = import_module("sglang.srt.entrypoints.api_contract").generate_contract_error(body)
    assert contract is None, contract


if __name__ == "__main__":
    main()
