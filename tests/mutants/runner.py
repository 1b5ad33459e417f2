"""Applies mutants to copies of the package and runs the checker on each.

`python -m tests.mutants.runner` runs all of them and prints which check noticed which mutant.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
WORKERS = 2
NOTICED = 1


class StaleMutant(AssertionError):
    """The text that a mutant changes is gone from its file, or stands there more than once."""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant: the checker's exit code (1: noticed) and its last lines."""

    name: str
    code: int
    words: str


def mutated(mutant: Mutant) -> str:
    """Return the mutant's file with the change in it; raises StaleMutant."""
    source = (ROOT / "chatmask" / mutant.file).read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise StaleMutant(
            f"{mutant.name}: {mutant.old!r} stands {source.count(mutant.old)} times in {mutant.file}; update the mutant"
        )
    return source.replace(mutant.old, mutant.new)


def run(mutant: Mutant | None) -> Outcome:
    """Run the checker on a copy of the package with the mutant's change, or unchanged for None."""
    with tempfile.TemporaryDirectory(prefix="chatmask-mutant-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "chatmask", folder / "chatmask", ignore=shutil.ignore_patterns("__pycache__"))
        for shared in ("specs", "tests", "fixtures"):
            (folder / shared).symlink_to(ROOT / shared, target_is_directory=True)
        if mutant is not None:
            (folder / "chatmask" / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "tests.mutants.checker", str(folder / "chatmask")]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=120, check=False
        )
    return Outcome(mutant.name if mutant else "unchanged", done.returncode, (done.stderr + done.stdout)[-1500:])


def run_all(mutants: Sequence[Mutant | None]) -> list[Outcome]:
    """Run several, two at a time; outcomes in the order given."""
    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(run, mutants))


def main() -> int:
    """Run everything, print one line a mutant, and return 1 if one went unnoticed."""
    whole, *outcomes = run_all([None, *MUTANTS])
    if whole.code:
        print(f"the unchanged package fails:\n{whole.words}")
        return 1
    for outcome in outcomes:
        last = outcome.words.strip().splitlines()[-1:] if outcome.code == NOTICED else ["NOT NOTICED"]
        print(f"{outcome.name}: {''.join(last)}")
    return int(any(outcome.code != NOTICED for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
