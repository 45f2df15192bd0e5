"""The one transition table."""

from __future__ import annotations

from service.domain.delivery import TERMINAL, TRANSITIONS, State, Transition


def test_every_transition_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(Transition)


def test_terminal_states_are_left_by_nothing() -> None:
    assert not [source for source, _ in TRANSITIONS.values() if source in TERMINAL]


def test_every_other_state_is_reached_and_left() -> None:
    sources = {source for source, _ in TRANSITIONS.values()}
    targets = {target for _, target in TRANSITIONS.values()}
    assert sources == set(State) - TERMINAL
    assert targets == set(State)
