"""The tool server's small parts: phases, leases, results, cuts, secrets, errors on the wire."""

import json
import logging
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes_tools import SECRET
from sostenuto.errors import (
    Blame,
    ConfigError,
    EnvironmentFailure,
    InvalidTransition,
    PathError,
    SandboxError,
    SostenutoError,
    ToolServerError,
)
from sostenuto.tools.cut import cut_middle
from sostenuto.tools.edge import Edge
from sostenuto.tools.journal import Journal, Kind, Left
from sostenuto.tools.keeping import Keeping
from sostenuto.tools.leases import Leases
from sostenuto.tools.phases import TRANSITIONS, Event, Phase, accepts, advance
from sostenuto.tools.refused import Refused, raised, refusal, status_of
from sostenuto.tools.results import ResultLog
from sostenuto.tools.secrets import Secrets, redacted_logs, secrets_from_environment
from sostenuto.tools.wire import Prepared, Refusal
from sostenuto.types import Message, ToolResult, ToolStatus


@given(st.lists(st.sampled_from(Event)))
def test_no_event_leads_out_of_releasing(events: list[Event]):
    phase = advance(Phase.READY, Event.RELEASE)
    for event in filter(lambda event: accepts(phase, event), events):
        phase = advance(phase, event)
    assert phase is Phase.RELEASING


def test_every_phase_is_in_the_table_and_can_be_released():
    assert set(TRANSITIONS) == set(Phase)
    assert all(advance(phase, Event.RELEASE) is Phase.RELEASING for phase in Phase)


def test_a_move_that_the_table_lacks_is_a_bug():
    with pytest.raises(InvalidTransition, match="call while scoring"):
        advance(Phase.SCORING, Event.CALL)


def test_a_prepare_never_shortens_a_lease_and_a_heartbeat_sets_it():
    leases = Leases(longest_s=100)
    leases.renew("a", 50, now_s=0)
    leases.begin("a", 10, now_s=0)
    assert leases.left_s(now_s=1) == {"a": 49}
    leases.renew("a", 5, now_s=1)
    assert leases.next_expiry_s == 6
    leases.renew("b", 1e9, now_s=0)
    assert leases.left_s(now_s=0)["b"] == 100
    assert leases.expire(now_s=6) == ["a"]
    assert leases.expire(now_s=7) == []


@given(st.text(), st.integers(0, 200))
def test_a_cut_text_keeps_within_its_cap_and_says_exactly_what_is_gone(text: str, cap_bytes: int):
    cut = cut_middle(text, cap_bytes)
    whole = len(text.encode())
    if whole <= cap_bytes:
        assert cut.text == text
        assert cut.cut_bytes == 0
        return
    line = f"\n[... {cut.cut_bytes} bytes cut ...]\n"
    head, tail = cut.text.split(line, 1)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + len(tail.encode()) + cut.cut_bytes == whole
    assert len(cut.text.encode()) <= max(cap_bytes, len(line))


def repr_bytes(error: SostenutoError) -> bytes:
    return repr(error).encode()


def test_a_result_is_found_until_newer_ones_push_its_text_out_and_never_runs_again():
    journal = Journal(None, Left())
    nowhere: Keeping[str] = Keeping(journal, "p", Kind.CALL, str.encode, bytes.decode, repr_bytes)
    log = ResultLog[str](10, lambda outcome: len(str(outcome)), nowhere)
    for call_id in "abc":
        log.open(call_id)
    for call_id in "abc":
        log.close(call_id, call_id * 4)
    assert log.find("d") is None
    assert log.find("b") is not None
    with pytest.raises(Refused, match=r"'a' ran, and its result is no longer kept"):
        log.find("a")


@given(st.text(), st.text(), st.integers(0, len(SECRET)))
def test_no_secret_and_no_long_piece_of_one_survives_redaction(before: str, after: str, length: int):
    secrets = Secrets({"KEY": SECRET, "NAME": "[secret KEY]!"})
    assert SECRET not in secrets.redact(before + SECRET + after)
    text = secrets.redact_cut(
        f"{before}{SECRET[:length]}\n[cut]\n{SECRET[-length:] if length else ''}{after}"
    )
    assert SECRET[:6] not in text
    assert SECRET[-6:] not in text


def test_secrets_are_refused_when_short_and_named_when_missing():
    with pytest.raises(ConfigError, match="secret A: its value has 3 characters"):
        Secrets({"A": "abc"})
    with pytest.raises(ConfigError, match="secret_names: B not set"):
        secrets_from_environment(("A", "B"), {"A": "a-secret-value"})


def test_a_secret_is_replaced_in_keys_values_and_errors_whatever_json_does_to_it():
    edge = Edge(Secrets({"KEY": SECRET, "PIN": "123456"}), 16384)
    prepared = Prepared(messages=(Message("user", f"<{SECRET}>"),), tools=(), elapsed_s=0.123456)
    body = json.loads(edge.json(prepared))
    assert body["messages"][0]["content"] == "<[secret KEY]>"
    assert body["elapsed_s"] == 0.123456
    assert edge.refusal(EnvironmentFailure(SECRET)).message == "[secret KEY]"


def test_a_secret_is_replaced_before_an_observation_is_cut_through_it():
    edge = Edge(Secrets({"KEY": SECRET}), 100)
    result = edge.observation(ToolResult(ToolStatus.OK, "x" * 30 + SECRET + "y" * 200), None)
    assert "sk-" not in result.content
    assert len(result.content.encode()) <= 100
    assert result.cut_bytes > 0


def test_text_that_utf8_cannot_carry_still_leaves():
    edge = Edge(Secrets({}), 16384)
    assert edge.observation(ToolResult(ToolStatus.OK, "a\udc80b"), None).content == "a?b"
    prepared = Prepared(messages=(Message("user", "a\udc80b"),), tools=(), elapsed_s=0)
    assert json.loads(edge.json(prepared))["messages"][0]["content"] == "a?b"


def test_logs_and_their_tracebacks_carry_no_secret():
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("anything")
    logger.addHandler(handler)
    with redacted_logs(Secrets({"KEY": SECRET})):
        try:
            raise ValueError(SECRET)
        except ValueError:
            logger.exception("failed with %s", SECRET)
    logger.removeHandler(handler)
    assert SECRET not in stream.getvalue()
    assert stream.getvalue().count("[secret KEY]") == 2


@pytest.mark.parametrize(
    ("error", "status", "blame"),
    [
        (ConfigError("a"), 400, None),
        (EnvironmentFailure("b"), 422, Blame.ENVIRONMENT),
        (SandboxError("c"), 503, Blame.INFRASTRUCTURE),
        (PathError("p"), 400, None),
        (Refused("d", status=409), 409, Blame.INFRASTRUCTURE),
    ],
)
def test_an_error_comes_out_of_the_wire_as_the_nearest_public_kind(
    error: SostenutoError, status: int, blame: Blame | None
):
    wired = refusal(error)
    back = raised(wired)
    assert status_of(error) == status
    assert wired.blame == blame
    assert isinstance(error, type(back))
    assert str(back) == str(error)


def test_an_unknown_error_is_raised_by_its_blame():
    later = Refusal(error="SomethingNew", message="m", blame=Blame.ENVIRONMENT)
    assert type(raised(later)) is EnvironmentFailure
    assert type(raised(later.model_copy(update={"blame": None}))) is ToolServerError
