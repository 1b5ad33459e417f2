"""The benchmark's corpus, its guard against regressions, and the arithmetic of its tables."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import chatmask
from benchmarks import corpus, guard, run

POOL = corpus.Pool(0, files=40, standard=True)


@pytest.mark.parametrize("kind", corpus.KINDS)
def test_the_same_seed_gives_the_same_corpus(kind: str) -> None:
    """Two pools of one seed give equal records, another seed gives others, and a slice equals that part of the whole."""
    again = corpus.Pool(0, files=40, standard=True)
    made = list(corpus.records(kind, 2, pool=POOL))
    assert made == list(corpus.records(kind, 2, pool=again))
    assert made != list(corpus.records(kind, 2, seed=1, pool=POOL))
    assert list(corpus.records(kind, 1, pool=POOL, start=1)) == made[1:]


@pytest.mark.parametrize("kind", ["chat", "other", "curve"])
@pytest.mark.parametrize("reasoning", [False, True])
def test_a_build_keeps_every_line_of_the_corpus(kind: str, reasoning: bool, tmp_path: Path) -> None:
    """No record is rejected, dropped, or has a control token in its text."""
    corpus.write(tmp_path / "raw.jsonl", list(corpus.records(kind, 2 if kind == "curve" else 20, reasoning=reasoning, pool=POOL)))
    spec = "ling-3.0-thinking" if reasoning else "ling-3.0"
    result = chatmask.build(tmp_path / "raw.jsonl", spec, tmp_path / "d", demo=True, parity="off")
    assert result.ledger.kept == result.ledger.lines
    assert result.ledger.control_text == 0


def test_trajectories_are_as_described() -> None:
    """Turns, tool results, shared openings and their sizes are what the module says; arguments are objects."""
    record = corpus.trajectory(POOL, random.Random(3), 25)
    roles = [message["role"] for message in record["messages"]]
    assert roles.count("assistant") == 25
    assert roles.count("tool") == 24
    assert all(3_000 <= len(text.encode()) <= 5_200 for text in POOL.systems)
    assert len({json.dumps(tools) for tools in POOL.tools}) == 4
    assert all(6_000 <= len(json.dumps(tools)) <= 10_500 for tools in POOL.tools)
    calls = [call for message in record["messages"] for call in message.get("tool_calls", ())]
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    assert not any("reasoning_content" in message for message in record["messages"])


def test_an_unknown_kind_is_named() -> None:
    """The error says which kinds there are."""
    with pytest.raises(ValueError, match="monster"):
        list(corpus.records("nonsense", pool=POOL))


def test_calls_stay_flat_and_near_what_is_recorded() -> None:
    """A build does not call more functions a message in long conversations, nor more than recorded."""
    assert guard.problems(guard.measure(), guard.recorded()) == []


def test_the_guard_tells_growth() -> None:
    """More calls a message in long conversations, more calls than recorded, and an unknown figure are each named."""
    base = guard.recorded()
    assert guard.problems(base, base) == []
    grown = {**base, "calls_per_message_long": 2 * base["calls_per_message_long"]}
    assert len(guard.problems(grown, base)) == 2
    assert "nothing is recorded" in guard.problems({**base, "new": 1.0}, base)[0]


def test_ratios_are_paired() -> None:
    """A row's speed is divided by the base's in the same repetition, each by its own work."""
    base = [{"tokens": 100, "seconds": 1.0}, {"tokens": 100, "seconds": 2.0}]
    row = [{"tokens": 200, "seconds": 1.0}, {"tokens": 200, "seconds": 2.0}]
    assert run.ratios({run.ROWS[0].label: base, "x": row}, "x") == [2.0, 2.0]
