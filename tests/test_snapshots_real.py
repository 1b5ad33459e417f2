"""The snapshots of every spec, on the tokenizer that its `reference` names."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmask import snapshots
from chatmask.cases import CASES
from chatmask.templates.registry import list_specs, load_spec, specs_dir
from chatmask.tokenizers import load_tokenizer
from tests import references

# the text and the spans of demo snapshots are also held against the real template; those specs name it too
WITH_REFERENCE = [name for name in list_specs() if load_spec(name).reference is not None]
UNTRIED = {"specforge/inkling-thinking"}  # its template is in no public package


def test_every_spec_says_what_it_was_tried_on() -> None:
    """Each spec names a reference tokenizer (`reference:`) and has a snapshot for each case, or stands in the list of untried ones."""
    for name in list_specs():
        kept = {path.stem for path in (specs_dir() / "snapshots" / name).glob("*.json")}
        if name in UNTRIED:
            assert not kept
            assert "nothing of this was tried" in load_spec(name).note
        else:
            assert load_spec(name).reference is not None, f"{name}: add `reference:` (CONTRIBUTING, step 3)"
            assert kept == set(CASES), f"{name}: chatmask check {name} --tokenizer DIR --accept --reason TEXT"


GROUPS: dict[str, list[str]] = {}
for _name in WITH_REFERENCE:
    _reference = load_spec(_name).reference
    assert _reference is not None
    GROUPS.setdefault(f"{_reference.vocabulary} {_reference.template or 'own template'}", []).append(_name)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "+".join(GROUPS[group]))
def test_snapshots_hold(group: str) -> None:
    """Text, spans and, where the snapshots were taken on this tokenizer, ids and masks are as they were."""
    tokenizer = load_tokenizer(references.for_spec(load_spec(GROUPS[group][0])))
    report = snapshots.check(GROUPS[group], tokenizer=tokenizer)
    assert not report.drifts, "\n".join(snapshots.drift_lines(report))
    assert report.cases == len(CASES) * len(GROUPS[group])


def test_no_snapshot_holds_a_path_of_a_machine() -> None:
    """What is kept is the same on every machine: a refusal names no folder of the one that it was taken on."""
    kept = {path: path.read_text(encoding="utf-8") for path in (specs_dir() / "snapshots").rglob("*.json")}
    assert kept
    assert [str(path) for path, text in kept.items() if str(Path.home()) in text or ".cache/" in text] == []
