"""What the played model says to the agents and probes of others, by what it was told last."""

import json

from sostenuto.types import Message, ToolCall

MINI_TASK = "Write the word done into the file result.txt."
MINI_RESULT = "done\n"


def _calls(*calls: tuple[str, dict[str, object]], content: str = "", reasoning: str = "") -> Message:
    made = tuple(ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls)
    return Message("assistant", content, made, reasoning)


def _bash(command: str) -> Message:
    return _calls(("bash", {"command": command}), content="Next step.")


_KEY = {
    "Where is the key?": _calls(("look", {"place": "attic"}), reasoning="Upstairs first."),
    "An arrow points to the cellar.": _calls(("look", {"place": "cellar"}), content="I follow it."),
    "The key lies here.": Message("assistant", "The key is in the cellar."),
}
_MINI = {
    f"Please solve this issue: {MINI_TASK}": _bash("echo done > result.txt"),
    '"output": ""': _bash("cat result.txt"),
    '"output": "done': _bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
}
_EVENT: dict[str, object] = {
    "title": "Design review",
    "start": "2026-10-01T15:00:00Z",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
_NOTE: dict[str, object] = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
_PROBE = {
    "What's the weather in Paris right now?": _calls(("get_weather", {"city": "Paris"})),
    "Get the current weather in Paris and in Tokyo.": _calls(
        ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Tokyo"})
    ),
    "What is 17 + 25?": Message("assistant", "42"),
    "Create an event titled 'Design review'": _calls(("create_event", _EVENT)),
    "Save a note titled": _calls(("save_note", _NOTE)),
    "What time is it on the server?": _calls(("get_server_time", {})),
    "Tell me something about Lisbon.": _calls(("get_weather", {"city": "Lisbon"})),
    '"sky": "clear"': Message("assistant", "It is 18 degrees in Paris, with a clear sky."),
    "which number is larger, 9.11 or 9.9?": _calls(
        ("record_answer", {"answer": "9.9"}), reasoning="0.9 is more than 0.11, so 9.9 is the larger one."
    ),
}
LINES = _KEY | _MINI | _PROBE
