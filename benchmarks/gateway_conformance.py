"""What suites of others find: recorded outputs with tool calls, and whether an endpoint can be trained on.

The outputs are canitoolcall's, read by the renderers of their families over a small tokenizer that has their
control tokens, at once and while they are sampled.  OpenEnv's `validate_llm` asks a gateway on a real engine
with random weights.  Both suites are installed in the environment of `gateway_environment`.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, cast

import anyio
from tokenizers import Tokenizer

import sostenuto as so
from benchmarks.engine_suites import make_model
from benchmarks.figure import Tell
from benchmarks.gateway_environment import clients_folder
from sostenuto.runtime.gateway.unfolding import Unfolding
from sostenuto.runtime.quickstart.folder import ModelShape, write_folder
from sostenuto.runtime.quickstart.tokenizer import tokenizer_material, train_tokenizer
from sostenuto.runtime.rendering.folder import ModelFolder
from sostenuto.runtime.rendering.library import family_renderer
from sostenuto.runtime.rendering.renderer import Renderer
from sostenuto.runtime.rendering.template_renderer import TemplateRenderer
from sostenuto.runtime.rendering.vocabulary import Vocabulary
from sostenuto.tools.wire import ToolSchema

FAMILIES = {
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-4B-Instruct-2507": "",
    "Qwen/Qwen3-4B-Thinking-2507": "",
    "Qwen/Qwen3.5-9B": "qwen3.5",
    "Qwen/Qwen3.8-27B": "qwen3.8",
    "zai-org/GLM-4.5": "glm-4.5",
    "zai-org/GLM-4.7": "glm-5",
    "zai-org/GLM-5.3": "glm-5.3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "moonshotai/Kimi-K2-Instruct-0905": "kimi-k2",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3",
}
"""Of the library, by the model of a record; empty: the model's own template, with Hermes' calls."""
DOCUMENTED = {
    "glm/glm45-marker-in-arguments": "a control token inside of an argument ends the call",
    "glm/glm47-marker-in-arguments": "a control token inside of an argument ends the call",
    "qwen3-xml/q38-tool-call-token-in-arguments": "a control token inside of an argument ends the call",
    "llama/l3-marker-in-arguments": "a control token inside of an argument ends the call",
    "glm/glm45-vllm-newline-format-content-before": "after a prompt without reasoning; ours has it",
    "glm/glm47-vllm-content-before-no-space": "after a prompt without reasoning; ours has it",
    "qwen3-xml/q38-thinking-disabled-no-call": "after a prompt without reasoning; ours has it",
    "glm/glm47-missing-last-close-arg-value": "a call that is not whole does not run",
    "qwen3-hermes/truncated-second-parallel-call": "of a turn that was cut no call runs",
    "kimi/k2i-vllm-content-after-tool-section": "text behind the calls is left out",
}
"""Why these are read otherwise."""
_CONTROLS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|im_system|>",
    "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[BOS]", "[EOS]",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<|end_of_text|>",
)  # fmt: skip
_DEEPSEEK = (
    "begin_of_sentence end_of_sentence User Assistant tool_sep tool_calls_begin tool_calls_end "
    "tool_call_begin tool_call_end tool_outputs_begin tool_outputs_end tool_output_begin tool_output_end"
)
_BAR, _BLANK = "\uff5c", "\u2581"
_GROUPS = {"token": 1, "rand:1:8": 5, "one": 1 << 20}
"""Tokens that come together, by the suite's names."""
_SHAPE = ModelShape(layers=2, hidden=64, heads=4, feed_forward=128, context_tokens=4096)

_TURN_TOKENS = 1024
"""Of a reply; random weights seldom end one."""
_PEAKED = 50.0
"""Times the output layer's weights."""


def measure_conformance(tell: Tell, *, quick: bool) -> None:
    del quick
    commands = clients_folder()
    _tell_records(tell, commands)
    report, forced = anyio.run(_asked, commands)
    for line in report["findings"]:
        print(f"# {line}", file=sys.stderr)
    level = float(report["capture_level"] == "tokens" and report["ok"])
    tell("OpenEnv's validate_llm: tokens with aligned log-probabilities", level, "bool", ">= 1")
    tell("canitoolcall's probe of a forced call, random weights, checks passed", forced, "count", ">= 3")
    processed = float(report["logprobs_mode"] == "processed")
    tell("OpenEnv's validate_llm: log-probabilities are processed", processed, "bool", ">= 1")


def _tell_records(tell: Tell, commands: Path) -> None:
    (packages,) = commands.parent.glob("lib/python3*/site-packages")
    sys.path.append(str(packages))
    suite = _Suite()
    for family, total in sorted(suite.total.items()):
        passed = suite.passed[family]
        tell(f"canitoolcall's recorded outputs of {family}, read as expected", passed, "count", f">= {total}")
    tell("of all of them, read otherwise for a documented reason", len(suite.otherwise), "count")


@dataclass
class _Suite:
    """Runs the records through the suite's own checks when it is made."""

    total: Counter[str] = field(default_factory=Counter[str])
    passed: Counter[str] = field(default_factory=Counter[str])
    otherwise: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        fixtures, checks, results = (
            cast("Any", import_module(f"canitoolcall.{name}")) for name in ("fixtures", "checks", "results")
        )
        families, fine = fixtures.load_families(), {"pass", "soft_pass"}
        with tempfile.TemporaryDirectory(prefix="sostenuto-records-") as place:
            readers = _Readers(Path(place))
            for record in fixtures.load_fixtures():
                if record.models[0] not in FAMILIES:
                    continue
                seen = readers.of(record).observed(record, results)
                rows = checks.run_checks(record, families[record.family], seen)
                is_fine = checks.case_status(rows).value in fine
                if record.id in DOCUMENTED and not is_fine:
                    self.otherwise.append(record.id)
                    continue
                self.total[record.family] += 1
                self.passed[record.family] += is_fine
                for row in () if is_fine else rows:
                    if row.status.value not in fine:
                        print(f"# {record.id}: {row.check} {row.strategy}: {row.detail}", file=sys.stderr)


class _Readers:
    """By family, made once each."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._made: dict[str, _Reader] = {}

    def of(self, record: Any) -> "_Reader":  # noqa: ANN401 - the suite's Fixture
        family = FAMILIES[record.models[0]]
        opens = str(record.generation_prompt).rstrip().endswith("<think>")
        key = family or f"template {opens}"
        if key not in self._made:
            folder = self._folder(self._place / str(len(self._made)), opens=opens)
            renderer = (
                family_renderer(folder, family) if family else TemplateRenderer(folder, vocabulary(folder))
            )
            self._made[key] = _Reader(renderer, vocabulary(folder))
        return self._made[key]

    def _folder(self, place: Path, *, opens: bool) -> ModelFolder:
        place.mkdir()
        write_folder(place, train_tokenizer(tokenizer_material(1)), _SHAPE)
        tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
        deepseek = [f"<{_BAR}{name.replace('_', _BLANK)}{_BAR}>" for name in _DEEPSEEK.split()]
        known = tokenizer.get_vocab()
        cast("Any", tokenizer).add_tokens([text for text in (*_CONTROLS, *deepseek) if text not in known])
        tokenizer.save(str(place / "tokenizer.json"))
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps({**config, "vocab_size": tokenizer.get_vocab_size()}))
        begun = "<think>\n" if opens else ""
        (place / "chat_template.jinja").write_text(
            "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + "
            "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
            + begun
            + "' }}{% endif %}"
        )
        return ModelFolder.open(place)


def vocabulary(folder: ModelFolder) -> Vocabulary:
    return Vocabulary(folder.tokenizer_json)


@dataclass(frozen=True)
class _Reader:
    renderer: Renderer
    vocabulary: Vocabulary

    def observed(self, record: Any, results: Any) -> Any:  # noqa: ANN401 - the suite's types
        """As a client gets it, whole and in streams."""
        ids = self.vocabulary.encode(record.raw_output, continues=True)
        ids += [] if record.truncated else [self.renderer.stop_token_ids[0]]
        tools = [_tool(tool["function"]) for tool in record.tools]
        turn = self.renderer.parse(ids, finished=not record.truncated, tools=tools)
        message = turn.message
        calls = tuple(results.ParsedToolCall(call.name, call.arguments) for call in message.tool_calls)
        streams: dict[str, Any] = {}
        for name, size in _GROUPS.items():
            clock = count()
            text = Unfolding(self.renderer, tools, lambda clock=clock: float(next(clock)))
            told = [text.feed(ids[at : at + size]) for at in range(0, len(ids), size)] + [text.end(turn)]
            content, reasoning = (
                "".join(getattr(d, part) for d in told) for part in ("content", "reasoning")
            )
            streams[name] = results.ParseResult(content or None, reasoning or None, calls)
        whole = results.ParseResult(message.content or None, message.reasoning or None, calls)
        return results.Observation(nonstream=whole, streams=streams)


def _tool(function: Mapping[str, Any]) -> ToolSchema:
    return ToolSchema(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters") or {},
        timeout_s=1.0,
    )


def _peaked_model(folder: Path) -> Path:
    """Random weights that prefer some tokens: of a flat distribution nobody can tell how it was tempered."""
    make_model(folder, 1, _SHAPE)
    library, file = cast("Any", import_module("safetensors.numpy")), folder / "model.safetensors"
    tensors = library.load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * _PEAKED
    library.save_file(tensors, file, metadata={"format": "pt"})
    return folder


async def _asked(commands: Path) -> tuple[dict[str, Any], int]:
    """What `validate_llm` says of a gateway, and the checks of a forced call that pass there."""
    with tempfile.TemporaryDirectory(prefix="sostenuto-validate-") as name:
        place = Path(name)
        model = await anyio.to_thread.run_sync(_peaked_model, place / "model")
        config = so.RuntimeConfig(
            directory=place / "run", gateway=so.GatewaySettings(turn_tokens=_TURN_TOKENS)
        )
        async with so.Runtime(config) as runtime, runtime.serve(so.ServeJob(model=str(model))) as gateway:
            script = str(Path(__file__).with_name("gateway_validate_side.py"))
            said = await _printed([str(commands / "python"), script, gateway.url, model.name])
            probe = [str(commands / "canitoolcall"), "probe", "--base-url", f"{gateway.url}/v1"]
            probed = json.loads(await _printed([*probe, "--model", model.name, "--json", "-"]))
        outcomes = [one for one in probed["outcomes"] if one["scenario_id"] == "forced-tool-choice"]
        for outcome in outcomes:
            print(f"# {outcome}", file=sys.stderr)
        return json.loads(said.splitlines()[-1]), sum(one["status"] == "pass" for one in outcomes)


async def _printed(command: Sequence[str]) -> str:
    ended = await anyio.run_process(command, check=False, env={**os.environ, "OPENAI_API_KEY": "none"})
    print(ended.stderr.decode()[-4000:], file=sys.stderr)
    return ended.stdout.decode()
