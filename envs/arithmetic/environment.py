"""Sums with Python at hand: one tool that runs whatever code the policy writes, inside its sandbox.

What the policy writes reaches the sandbox as a file, never as part of a command.  A traceback is an
observation, like any output.
"""

import re
from decimal import Decimal
from random import Random

from sostenuto.envs.arithmetic.demonstrations import demonstrate
from sostenuto.envs.arithmetic.tasks import SumTask
from sostenuto.envs.environment import Environment
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import SandboxError, ToolError
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode, Message, StopReason

RUN_S = 5.0
_NUMBER = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")

_RUNNER = """\
import ast, sys, traceback

try:
    tree = ast.parse(open("code.py", encoding="utf-8").read(), "code.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names = {"__name__": "__main__"}
    exec(compile(tree, "code.py", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "code.py", "eval"), names) if last else None
    if value is not None:
        print(value)
except Exception as error:
    own = error.__traceback__
    while own and own.tb_frame.f_code.co_filename != "code.py":
        own = own.tb_next
    traceback.print_exception(error.with_traceback(own))
    sys.exit(1)
"""
"""Runs code.py and shows the value of a last expression, as a notebook does.  Of a traceback, the frames
before the policy's own code are left out."""


class ChainSum(Environment[SumTask]):
    """Answer an arithmetic question, with Python or without."""

    system = "Answer with one number."
    sandbox = SandboxSpec(files={"run.py": _RUNNER}, memory_bytes=256 << 20, processes=32)

    async def reset(self, task: SumTask) -> str:
        if not await self.sandbox.shell("command -v python3 || true"):
            raise SandboxError("no python3 can be run in the sandbox; apt install python3")
        return task.question

    @tool(timeout_s=RUN_S, output_bytes=1024)
    async def python(self, code: str) -> str:
        """Run Python code. Shows what it prints and the value of its last line."""
        try:
            await self.sandbox.write("code.py", code.encode())
        except UnicodeEncodeError:
            raise ToolError("code must be text without lone surrogates") from None
        # -I -S: no variables and no packages of the machine; the start is twice as fast.
        said = await self.sandbox.shell("python3 -I -S run.py", timeout_s=RUN_S)
        return said.strip() or "(no output)"

    def reward(self, episode: Episode) -> float:
        """1 for an answer whose one number is right, else 0."""
        if episode.stop_reason is not StopReason.ANSWERED:
            return 0.0
        numbers = _NUMBER.findall(episode.answer)
        return float(len(numbers) == 1 and Decimal(numbers[0].replace(",", "")) == self.task.answer)

    @classmethod
    def demonstrate(cls, task: SumTask, rng: Random) -> list[Message]:
        """The teacher's way: always right, and mostly without the tool, which the student cannot."""
        return demonstrate(task, rng)
