"""What a docstring tells the model: what a tool does, and what each argument means.

Read are Google sections (`Args:` with indented `name (type): text`) and Sphinx fields
(`:param type name: text`).  Everything before the first section or field describes the tool.
"""

import inspect
import re
from dataclasses import dataclass

_ARGUMENTS = {"args", "arguments", "parameters", "params"}
_OTHER = {"returns", "return", "raises", "yields", "examples", "example", "note", "notes"}
_SECTION = re.compile(r"^(\w+):\s*$")
_ENTRY = re.compile(r"^(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^:(\w+)(?:\s+([^:]*))?:\s*(.*)$")


@dataclass(frozen=True, slots=True)
class Docstring:
    description: str
    arguments: dict[str, str]


def read_docstring(text: str) -> Docstring:
    """Split a docstring; paragraphs of the description stay, lines within them are joined."""
    lines = inspect.cleandoc(text).splitlines()
    end = next((i for i, line in enumerate(lines) if _starts_section(line)), len(lines))
    paragraphs = "\n".join(lines[:end]).split("\n\n")
    description = "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
    return Docstring(description, _google(lines[end:]) | _sphinx(lines[end:]))


def _starts_section(line: str) -> bool:
    section = _SECTION.match(line)
    return bool(_FIELD.match(line) or (section and section[1].lower() in _ARGUMENTS | _OTHER))


def _google(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name, inside, entry_indent = "", False, 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            section = _SECTION.match(line)
            name, inside, entry_indent = "", bool(section and section[1].lower() in _ARGUMENTS), 0
            continue
        entry_indent = entry_indent or indent
        entry = _ENTRY.match(line.strip()) if inside and indent == entry_indent else None
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif inside and name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _sphinx(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        field = _FIELD.match(line)
        if field:
            name = (
                (field[2] or "").split()[-1] if field[1] in {"param", "parameter", "arg"} and field[2] else ""
            )
            if name:
                found[name] = field[3]
        elif name and line[:1].isspace():
            found[name] = f"{found[name]} {line.strip()}".strip()
        else:
            name = ""
    return found
