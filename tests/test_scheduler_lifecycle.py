import pytest
from hypothesis import given
from hypothesis import strategies as st

from sostenuto.errors import InvalidTransition
from sostenuto.scheduler.lifecycle import TRANSITIONS, Move, Phase, after

MOVES = st.lists(st.sampled_from(Move))


def test_every_phase_has_a_row():
    assert set(TRANSITIONS) == set(Phase)


@given(MOVES)
def test_a_program_moves_only_along_the_table(moves: list[Move]):
    phase = Phase.QUEUED
    for move in moves:
        if move in TRANSITIONS[phase]:
            phase = after(phase, move)
        else:
            with pytest.raises(InvalidTransition, match=f"p1: {move} while {phase}"):
                after(phase, move, program="p1")


def test_every_phase_but_done_can_be_finished_and_done_is_for_ever():
    assert all(
        row.get(Move.FINISH) is Phase.DONE for phase, row in TRANSITIONS.items() if phase is not Phase.DONE
    )
    assert TRANSITIONS[Phase.DONE] == {}


def test_only_a_runnable_phase_begins_to_decode():
    assert {phase for phase, row in TRANSITIONS.items() if Move.DECODE in row} == {
        phase for phase in Phase if phase.is_runnable
    }


def test_giving_up_kv_leads_to_a_phase_without_it():
    for phase, row in TRANSITIONS.items():
        for move in (Move.EVICT, Move.LOSE_ENGINE):
            if move in row:
                assert phase.holds_kv
                assert not row[move].holds_kv
