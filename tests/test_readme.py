"""What the README shows, run."""

import re
from pathlib import Path
from typing import Any

import sostenuto as so

README = Path(__file__).parents[1] / "README.md"


def example() -> dict[str, Any]:
    """The names that the README's Python defines."""
    names: dict[str, Any] = {"__name__": "readme"}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(compile(block, str(README), "exec"), names)
    return names


async def test_the_environment_of_the_readme_answers_in_a_real_sandbox():
    names = example()
    await names["test_the_sum_is_found"]()
    async with so.so_test(names["Ledger"], names["TASKS"][0]) as trial:
        assert (await trial.call("bash", {"command": "cat ledger.csv"})).content == "fuel,12\nrent,30\n"
        assert await trial.reward(answer="41") == 0.0


def test_the_commands_of_the_readme_exist():
    from sostenuto.runtime.cli import app

    shown = set(re.findall(r"^sostenuto (\w+)", README.read_text(), re.MULTILINE))
    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    assert shown == commands | {group.name for group in app.registered_groups}
