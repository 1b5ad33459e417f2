"""`chatmask check`: drift is caught, named, and accepted only with a reason."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from chatmask import snapshots
from chatmask.canonical import fingerprint
from chatmask.cases import CASES
from chatmask.cli import main
from chatmask.templates.registry import list_specs, load_spec, specs_dir
from tests import assets, references


def edited(folder: Path, name: str, *fields: str) -> Path:
    """A copy of a packaged spec with some lines added, its snapshots those of the packaged one."""
    path = folder / f"{name}.yaml"
    path.write_text(f"name: {name}\nextends: {name}\n" + "\n".join(fields) + "\n")
    shutil.copytree(specs_dir() / "snapshots" / name, folder / "snapshots" / name)
    return path


def drifts(path: Path) -> dict[str, tuple[str, ...]]:
    """Kinds of drift by case."""
    return {drift.case: drift.kinds for drift in snapshots.check([path]).drifts}


DEMO = [name for name in list_specs() if load_spec(name).demo_template is not None]


def test_all_demo_snapshots_hold() -> None:
    """Specs with a demo template hold anywhere, on every case; the others are listed as not checked, and exit 0 says no more."""
    result = CliRunner().invoke(main, ["check", "--json"])
    value = json.loads(result.stdout)
    assert (result.exit_code, value["ok"], value["specs"]) == (0, True, len(DEMO))
    assert value["cases"] == len(CASES) * value["specs"]
    assert value["skipped"] == [name for name in list_specs() if name not in DEMO]
    assert f"not at hand: {len(value['skipped'])} specs" in result.stderr


def test_a_folder_of_tokenizers_brings_the_others(tmp_path: Path) -> None:
    """`--tokenizers DIR` finds a spec's tokenizer by spec name or hub id, and then compares ids too."""
    spec = load_spec("qwen2.5")
    path = references.for_spec(spec)
    for name in (spec.name, str(spec.tokenizer.id)):
        link = tmp_path / name.replace("/", "-") / name
        link.parent.mkdir(parents=True)
        link.symlink_to(path)
        report = snapshots.check(["qwen2.5"], tokenizers=tmp_path / name.replace("/", "-"))
        assert (report.drifts, report.cases) == ((), len(CASES))


@pytest.mark.parametrize(
    ("spec", "edit", "kind"),
    [
        ("ling-3.0-thinking", 'assistant: {header: "<role>ASSISTANT</role>\\n"}', "boilerplate_supervised"),
        ("ling-3.0-thinking", 'assistant: {header: "<role>ASSISTANT</role>"}', "boilerplate_supervised"),
        ("ling-3.0", 'assistant: {header: "<role>ASSISTANT</role>\\n<think>"}', "boilerplate_supervised"),
        ("ling-3.0-thinking", 'assistant: {header: "<role>ASSISTANT</role>\\n<think></think>"}', "zero_supervision"),
        ("ling-3.0-thinking", 'assistant: {end_of_turn: "<|im_end|>"}', "zero_supervision"),
        ("ling-3.0-thinking", 'assistant: {header: "<|im_start|>assistant\\n"}', "zero_supervision"),
        ("ling-3.0-thinking", "thinking: {mode: off}", "zero_supervision"),
        ("ling-3.0-thinking", "thinking: {strip: true}", "text_changed"),
        ("ling-3.0-thinking", "kwargs: {enable_thinking: false}", "text_changed"),
        ("ling-3.0-thinking", "special_in_content: allow", "tokens_changed"),
        ("ling-3.0-thinking", "system: Be brief.", "text_changed"),
        ("qwen3-thinking", "assistant: {supervise_trailing: true}", "boilerplate_supervised"),
        ("qwen3-thinking", "rewritten: {emission: train}", "boilerplate_supervised"),
        ("qwen3-instruct", "rewritten: {context: mask}", "lost_supervision"),
        ("qwen3-instruct", "assistant: {history_header: null}", "zero_supervision"),
        ("qwen3-thinking", "straddle: include", "boilerplate_supervised"),
        ("qwen3-thinking", "prefix_stable: true", "parity_broken"),
        ("ling-3.0", "thinking: {conflict: allow, strip: true}", "refusal_changed"),
    ],
)
def test_an_edit_that_moves_a_mask_is_named(tmp_path: Path, spec: str, edit: str, kind: str) -> None:
    """Editing a spec so that a turn loses supervision, or boilerplate gains it, exits 1 and names the kind."""
    path = edited(tmp_path, spec, edit)
    found = drifts(path)
    assert any(kind in kinds for kinds in found.values()), found
    result = CliRunner().invoke(main, ["check", str(path)])
    assert result.exit_code == 1
    assert kind in result.stderr


def test_a_harmless_edit_does_not_drift(tmp_path: Path) -> None:
    """A description, or a field spelled out with its own value, changes nothing."""
    assert drifts(edited(tmp_path, "ling-3.0", "description: other words", "tool_arguments: dict")) == {}


def test_random_damage_to_snapshots_is_caught_with_its_class() -> None:
    """500 random single changes of snapshots (an id, a mask bit, a length, a span, a hash, the text) are all caught by class."""
    rng = random.Random(5)
    kept = {name: {p.stem: json.loads(p.read_text()) for p in (specs_dir() / "snapshots" / name).glob("*.json")} for name in DEMO}
    parsers = {name: snapshots._compile(spec := load_spec(name), snapshots._Tokenizers(None, None)(spec))[0] for name in kept}
    now = {(n, c): snapshots.take(parsers[n], c, s["conversation"]) for n, cases in kept.items() for c, s in cases.items()}
    trained = [key for key in now if "refused" not in now[key]]
    for _ in range(500):
        name, case = rng.choice(sorted(trained))
        before = copy.deepcopy(kept[name][case])
        want = damage(rng, before)
        before["sha256"] = fingerprint({k: v for k, v in before.items() if k != "sha256"})
        kinds, detail = snapshots.compare(before, now[name, case], parsers[name])
        assert set(kinds) & want, (name, case, kinds, want, detail)
        assert detail


def damage(rng: random.Random, snapshot: dict[str, Any]) -> set[str]:
    """Change one thing in a snapshot; the classes of which one must be named."""
    kind = rng.choice(["id", "bit", "length", "span", "hash", "text", "reason"])
    at = rng.randrange(len(snapshot["input_ids"]))
    if kind == "id":
        snapshot["input_ids"][at] += 1
        return {"tokens_changed"}
    if kind == "bit":
        snapshot["loss_mask"][at] ^= 1
        # the snapshot says 1, the parser 0: supervision was lost; the other way round: the parser trains more than it did
        return {"lost_supervision", "stop_token_lost"} if snapshot["loss_mask"][at] else {"boilerplate_supervised"}
    if kind == "length":
        key = rng.choice(["input_ids", "loss_mask"])
        snapshot[key] = snapshot[key][:-1] if rng.random() < 0.5 else [*snapshot[key], 0]
        return {"tokens_changed", "span_moved"}
    if kind == "span":
        snapshot["spans"][rng.randrange(len(snapshot["spans"]))][rng.choice(["start", "end"])] += 1
        return {"span_moved"}
    if kind == "reason":
        span = rng.choice(snapshot["spans"])
        span["trained"] = not span["trained"]
        return {"lost_supervision", "boilerplate_supervised"}
    if kind == "hash":
        key = rng.choice(sorted(snapshot["hashes"]))
        snapshot["hashes"][key] = "0" * 64
        return {"tokens_changed", "text_changed"}
    snapshot["text"] = snapshot["text"][:at] + "#" + snapshot["text"][at:]
    return {"text_changed"}


def test_a_snapshot_changed_by_hand_is_named(tmp_path: Path) -> None:
    """A change that no comparison could see (a reason, a version) breaks the snapshot's seal."""
    path = edited(tmp_path, "ling-3.0")
    file = tmp_path / "snapshots" / "ling-3.0" / "plain.json"
    file.write_text(file.read_text().replace("first snapshots", "silent snapshots"))
    assert drifts(path) == {"plain": ("snapshot_edited",)}


class TestAccept:
    def test_needs_a_reason_and_is_refused_in_ci(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`--accept` without --reason, or where CI is set, exits 2 and writes nothing."""
        monkeypatch.delenv("CI", raising=False)
        bare = CliRunner().invoke(main, ["check", "--accept"])
        monkeypatch.setenv("CI", "true")
        in_ci = CliRunner().invoke(main, ["check", "--accept", "--reason", "because"])
        assert (bare.exit_code, in_ci.exit_code) == (2, 2)
        assert "--reason" in bare.stderr
        assert "CI" in in_ci.stderr

    def test_keeps_the_reasons(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An accepted change holds from then on, and the file tells why and what drifted."""
        monkeypatch.delenv("CI", raising=False)
        path = edited(tmp_path, "qwen3-thinking", "assistant: {supervise_trailing: true}")
        assert drifts(path)
        report = snapshots.check([path], accept=True, reason="SpecForge trains the line break")
        assert report.accepted
        assert drifts(path) == {}
        before = json.loads((specs_dir() / "snapshots" / "qwen3-thinking" / "plain.json").read_text())["accepted"]
        history = json.loads((tmp_path / "snapshots" / "qwen3-thinking" / "plain.json").read_text())["accepted"]
        assert history[:-1] == before
        assert history[-1]["reason"] == "SpecForge trains the line break"
        assert "boilerplate_supervised" in history[-1]["drift"]

    def test_a_new_spec_gets_all_cases(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A spec without snapshots fails the check; --accept makes one for every case, refusals included."""
        monkeypatch.delenv("CI", raising=False)
        path = tmp_path / "mine.yaml"
        path.write_text("name: mine\nextends: ling-3.0\n")
        assert CliRunner().invoke(main, ["check", str(path)]).exit_code == 1
        assert CliRunner().invoke(main, ["check", str(path), "--accept", "--reason", "new"]).exit_code == 0
        assert {p.stem for p in (tmp_path / "snapshots" / "mine").glob("*.json")} == set(CASES)
        assert CliRunner().invoke(main, ["check", str(path)]).exit_code == 0


@pytest.mark.parametrize(
    ("names", "directory"),
    [
        (("ling-3.0", "ling-3.0-thinking", "ling-3.0-auto"), assets.ling3),
        (("ling-flash-2.0",), assets.ling_flash2),
        (("qwen3-thinking", "qwen3-instruct"), assets.qwen3),
    ],
)
def test_the_snapshots_hold_on_real_templates_and_vocabularies(names: tuple[str, ...], directory: Any) -> None:
    """Text and spans of every snapshot are the same under the real template and a real tokenizer."""
    report = snapshots.check(names, tokenizer=str(directory()))
    assert report.drifts == ()
    assert report.cases >= 6 * len(names)
