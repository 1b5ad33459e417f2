"""The tests notice wrong code: every hand-made mutant of the mask-relevant modules is caught, and the code as it is passes."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.runner import NOTICED, mutated, run, run_all


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_no_mutant_is_stale(mutant: Mutant) -> None:
    """Each mutant's text occurs exactly once, the change changes something, and the result is still Python."""
    assert mutant.old != mutant.new
    compile(mutated(mutant), mutant.file, "exec")


def test_the_unchanged_package_passes() -> None:
    """The checker has nothing to say against the code as it is."""
    outcome = run(None)
    assert outcome.code == 0, outcome.words


def _unnoticed(mutants: tuple[Mutant, ...]) -> list[str]:
    return [f"{o.name} (exit {o.code}): {o.words[-300:]}" for o in run_all(mutants) if o.code != NOTICED]


def test_mutants_are_noticed() -> None:
    """Every fourth mutant is caught by the checker; the others follow in the long run."""
    assert _unnoticed(MUTANTS[::4]) == []


@pytest.mark.long
def test_the_other_mutants_are_noticed() -> None:
    """The other three quarters are caught too."""
    assert _unnoticed(tuple(m for n, m in enumerate(MUTANTS) if n % 4)) == []
