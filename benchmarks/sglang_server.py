"""A real SGLang server on CPU with a tiny random model, and what becomes of it."""

import os
import signal
import socket
import string
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import anyio
from anyio.abc import Process

VOCABULARY = 80
_CHARACTERS = string.ascii_letters + string.digits + ".,\u0120"
_START_WITHIN_S = 900
_STOP_WITHIN_S = 30
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def make_model(folder: Path) -> None:
    """A Llama of two layers with random weights, and a tokenizer of single characters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=2048,
        tie_word_embeddings=False, initializer_range=0.2, bos_token_id=None, eos_token_id=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(_CHARACTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]


@asynccontextmanager
async def serve(python: Path, model: Path, log: Path) -> AsyncGenerator[str]:
    """Start it, give its address once it takes requests, and end it with everything that it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(python), "-m", "sglang.launch_server", "--model-path", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--grammar-backend", "llguidance", "--disable-cuda-graph", "--disable-overlap-schedule",
        "--max-total-tokens", "8192", "--mem-fraction-static", "0.2", "--sleep-on-idle",
        "--weight-version", "0.0", "--enable-metrics", "--enable-priority-scheduling",
        "--enable-session-radix-cache",
    ]  # fmt: skip
    environment = os.environ | _ENVIRONMENT
    with log.open("wb") as output:
        process = await anyio.open_process(
            command, env=environment, stdin=None, stdout=output, stderr=output, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        with anyio.fail_after(_START_WITHIN_S):
            await _ready(url, process, log)
        yield url
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)


async def _ready(url: str, process: Process, log: Path) -> None:
    async with aiohttp.ClientSession() as session:
        while process.returncode is None:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await anyio.sleep(1)
    said = await anyio.Path(log).read_text(errors="replace")
    last = "\n".join(said.splitlines()[-20:])
    raise RuntimeError(f"SGLang ended with {process.returncode} before it was ready; its last words:\n{last}")


async def _stop(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(_STOP_WITHIN_S):
            await process.wait()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    await process.wait()
