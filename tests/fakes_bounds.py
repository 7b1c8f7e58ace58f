"""An environment that uses what it is told to; workers import this module by name."""

import importlib
import subprocess
import sys
import time

from pydantic import BaseModel

from sostenuto.envs.environment import Environment
from sostenuto.errors import ToolError
from sostenuto.tools.decorator import tool
from sostenuto.types import Episode

_EAT = "import sys, time; block = bytearray(int(sys.argv[1]) << 20); time.sleep(5)"
_RUN_AWAY = "sleep 60 >/dev/null 2>&1 & echo $!"


class HungryTask(BaseModel):
    how: str = ""


class Hungry(Environment[HungryTask]):
    """Takes memory, itself or in a child, and leaves processes behind."""

    def reset(self, task: HungryTask) -> str:
        return "eat"

    @tool(timeout_s=20)
    def eat(self, megabytes: int, in_child: bool = False) -> str:
        """Hold so much memory for a while if it is much."""
        if in_child:
            subprocess.run([sys.executable, "-c", _EAT, str(megabytes)], check=False)
        block = b"" if in_child else bytearray(megabytes << 20)
        time.sleep(5 if in_child or len(block) > 100 << 20 else 0)
        return "eaten"

    @tool
    def run_away(self) -> int:
        """Start a process that leaves the worker's process group."""
        ran = subprocess.run(["setsid", "sh", "-c", _RUN_AWAY], stdout=subprocess.PIPE, check=True)
        return int(ran.stdout)

    def reward(self, episode: Episode) -> float:
        return 1.0


class Needy(Environment[HungryTask]):
    """Uses a package that the server does not have."""

    def reset(self, task: HungryTask) -> str:
        return "ask"

    @tool
    def version(self) -> str:
        """Of the package, and where the interpreter is."""
        try:
            tiny = importlib.import_module("sostenuto_tiny")
        except ModuleNotFoundError as error:
            raise ToolError(str(error)) from error
        return f"{tiny.VERSION} {sys.prefix}"

    def reward(self, episode: Episode) -> float:
        return 1.0
