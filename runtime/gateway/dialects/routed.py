"""Which experts the tokens of a reply were routed to, as engines tell it to their clients."""

import base64
import io

import numpy as np

from sostenuto.records import Experts
from sostenuto.runtime.engines.wire import GenerateReply
from sostenuto.runtime.rendering.experts import decoded


def as_npy(reply: GenerateReply, start: int) -> str | None:
    """vLLM's form: a `.npy` file in base64, of the tokens from position `start` of the context on."""
    found = _from(reply, start)
    if found is None:
        return None
    file = io.BytesIO()
    np.save(file, found)
    return base64.b64encode(file.getvalue()).decode()


def as_int32(reply: GenerateReply, start: int) -> str | None:
    """SGLang's form: the numbers alone, little-endian, in base64."""
    found = _from(reply, start)
    return None if found is None else base64.b64encode(found.astype("<i4").tobytes()).decode()


def _from(reply: GenerateReply, start: int) -> Experts | None:
    """(tokens, layers, experts a token); None where the engine does not know."""
    told = reply.routed_experts
    return None if told is None else decoded(told)[max(0, start - told.start) :]
