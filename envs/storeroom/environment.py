"""The storeroom as an environment: three small tools over files in a sandbox.

What the policy writes reaches the shell only after it was matched against a closed form; everything
else is a ToolError that says what is asked for.
"""

import re
import shlex
from random import Random

from sostenuto.envs.environment import Environment
from sostenuto.envs.storeroom.demonstrations import demonstrate
from sostenuto.envs.storeroom.world import FILE_NAME, StoreroomTask
from sostenuto.envs.workspace import SandboxSpec
from sostenuto.errors import SandboxError, ToolError
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode, Message, StopReason

_WORD = re.compile(r"[A-Za-z]{1,32}")
# At most 3 numbers of 6 digits: their product fits the shell's 64 bits.  No leading zero: it would be octal.
_EXPRESSION = re.compile(r" ?(0|[1-9][0-9]{0,5})( ?[-+*] ?(0|[1-9][0-9]{0,5})){1,2} ?")
_NUMBER = re.compile(r"-?[0-9]+")


class Storeroom(Environment[StoreroomTask]):
    """Answer how many of something there are, by finding its file, reading it and adding."""

    sandbox = SandboxSpec()

    async def reset(self, task: StoreroomTask) -> str:
        """Put the files into the sandbox, in one shell command of builtins, and ask the question."""
        writes = (
            f"printf '%s\\n' {shlex.quote(record.line)} >{shlex.quote(name)}"
            for name, record in task.files.items()
        )
        complaint = await self.sandbox.shell(" && ".join(writes))
        if complaint:
            raise SandboxError(f"writing the files of the storeroom: {complaint}")
        return task.question

    @tool(timeout_s=10)
    async def find(self, word: str) -> str:
        """Name the file that has a word."""
        if not _WORD.fullmatch(word):
            raise ToolError("word must be one word of letters")
        return await self._show(f"grep -lw -- {word} *.txt || true", "no file has that word")

    @tool(timeout_s=10)
    async def read(self, file: str) -> str:
        """Show what is in a file."""
        if not FILE_NAME.fullmatch(file):
            raise ToolError("file must be a name such as oak.txt")
        return await self._show(f"if [ -f {file} ]; then cat {file}; fi", "there is no such file")

    @tool(timeout_s=10)
    async def calc(self, expr: str) -> str:
        """Work out a sum such as 14+23."""
        if not _EXPRESSION.fullmatch(expr):
            raise ToolError("expr must be two or three whole numbers with +, - or * between them")
        return await self._show(f"echo $(({expr}))", "there is no result")

    async def _show(self, command: str, if_empty: str) -> str:
        """What the command says, without the line's end; ToolError when it says nothing."""
        text = (await self.sandbox.shell(command)).strip()
        if not text:
            raise ToolError(if_empty)
        return text

    async def reward(self, episode: Episode) -> float:
        """1 for an answer whose one number is right, else 0."""
        if episode.stop_reason is not StopReason.ANSWERED:
            return 0.0
        return float(_NUMBER.findall(episode.answer) == [str(self.task.answer)])

    @classmethod
    def demonstrate(cls, task: StoreroomTask, rng: Random) -> list[Message]:
        """The teacher's way, which is right and takes shortcuts that the student cannot."""
        return demonstrate(task, rng)
