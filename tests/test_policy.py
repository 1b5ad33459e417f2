"""Policies: strict YAML, `extends`, overrides, and the two that ship."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatmask.errors import SpecError
from chatmask.policy import DEFAULT, Policy, list_policies, load_policy


def _write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def _refusal(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_policy(_write(folder, text))
    return str(caught.value)


def test_the_defaults_change_nothing() -> None:
    """Without a policy a record is one sample with every turn trained, and nothing is removed, added or set apart."""
    policy = load_policy()
    assert policy is DEFAULT
    assert (policy.split, policy.train_on, policy.strip_thinking, policy.empty_think) == ("trajectory", "all", "none", "none")
    assert {policy.tool_error, policy.empty_tool_call, policy.bare_text_tool_call} == {"train"}
    assert (policy.variants, policy.strip_probability, policy.validation, policy.max_no_thinking_ratio) == (1, 0.0, 0.0, None)
    assert not (policy.dedup or policy.shuffle or policy.require_spans or policy.truncate_at_notification)


def test_every_field_is_described() -> None:
    """Each field of a policy says in words what it does, but for its name and words."""
    undescribed = [name for name, field in Policy.model_fields.items() if not field.description]
    assert undescribed == ["name", "description"]


def test_the_shipped_policies_say_areal_in_their_own_fields() -> None:
    """The two shipped policies load by name and hold AReaL's defaults."""
    assert list_policies() == ["areal-pair", "areal-trajectory"]
    pair, whole = map(load_policy, list_policies())
    assert (pair.split, pair.tool_error, pair.strip_thinking, pair.empty_think) == ("per_turn", "drop", "context", "target")
    assert (whole.split, whole.tool_error, whole.strip_thinking, whole.empty_think) == ("trajectory", "mask", "none", "all")
    for policy in (pair, whole):
        assert (policy.mask_from, policy.inline_conflict, policy.overlength) == ("role_header", "inline", "drop")
        assert (policy.empty_tool_call, policy.bare_text_tool_call, policy.variants) == ("train", "train", 1)
    assert not pair.require_spans
    assert whole.require_spans


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("name: a\nsplitt: exact\n", ":2: splitt: unknown field; did you mean `split`?"),
        ("name: a\nsplit: pairs\n", ":2: split: Input should be 'trajectory', 'per_turn', 'exact' or 'pre_split', found 'pairs'"),
        ("name: a\n\nseed: 1.5\n", ":3: seed: "),
        ("name: a\nseed: true\n", ":2: seed: Input should be a valid integer, found True"),
        ("name: a\nvalidation: 1\n", ":2: validation: Input should be less than 1, found 1"),
        ("name: a\nlast_n: 2\n", "`train_on: last_n` and `last_n: N` go together"),
        ("name: a\ntrain_on: last_n\n", "`train_on: last_n` and `last_n: N` go together"),
        ("name: a\nvariants: 3\n", "variants: without `strip_probability` all variants are equal"),
        ("name: a\nsplit: exact\nstrip_thinking: context\n", "take `per_turn`"),
        ("name: a\nthink_tags:\n- [a, b]\n- [a]\n", ":4: think_tags.1: "),
        ("name: a\nthink_tags: [[x, x]]\n", "two different tags"),
        ("split: exact\n", "name: Field required"),
        ("name: a\nname: b\n", ":2: the key `name` stands twice"),
        ("name: a\nextends: nowhere\n", "there is no policy named 'nowhere'"),
        ("name: a\nextends: [b]\n", ":2: extends: one policy name or file"),
    ],
)
def test_a_bad_policy_is_refused_with_file_line_and_field(tmp_path: Path, text: str, found: str) -> None:
    """What is wrong with a policy file is said with the file, the line, the field and what was found."""
    said = _refusal(tmp_path, text)
    assert found in said
    assert "mine.yaml" in said or "nowhere" in said


def test_extends_takes_what_is_not_said(tmp_path: Path) -> None:
    """A policy has its parent's fields where it is silent, and none of its words."""
    policy = load_policy(_write(tmp_path, "name: mine\nextends: areal-pair\ntool_error: mask\n"))
    pair = load_policy("areal-pair")
    assert policy.tool_error == "mask"
    assert policy.description == policy.note == ""
    same = set(Policy.model_fields) - {"name", "extends", "description", "note", "tool_error"}
    assert all(getattr(policy, name) == getattr(pair, name) for name in same)


def test_a_fault_of_the_parent_is_found_in_the_parents_file(tmp_path: Path) -> None:
    """An inherited bad value is reported with the file and line in which it stands."""
    _write(tmp_path, "name: base\nseed: many\n", "base.yaml")
    assert "base.yaml:2: seed" in _refusal(tmp_path, "name: mine\nextends: base\n")


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    """Policies that extend each other are refused by name."""
    _write(tmp_path, "name: base\nextends: mine\n", "base.yaml")
    assert "circle: mine -> base -> mine" in _refusal(tmp_path, "name: mine\nextends: base\n")


def test_a_policy_may_extend_the_packaged_one_of_its_own_name(tmp_path: Path) -> None:
    """A file called like a packaged policy can build on that one."""
    path = _write(tmp_path, "name: areal-pair\nextends: areal-pair\nseed: 7\n", "areal-pair.yaml")
    assert load_policy(path).seed == 7
    assert load_policy(path).split == "per_turn"


def test_overrides_are_read_like_the_file(tmp_path: Path) -> None:
    """An override has a file's types and is refused under its own name."""
    policy = load_policy("areal-pair", ["seed=5", "max_no_thinking_ratio=1.5", "shuffle=true"])
    assert (policy.seed, policy.max_no_thinking_ratio, policy.shuffle) == (5, 1.5, True)
    assert load_policy(policy, {"max_no_thinking_ratio": "null"}).max_no_thinking_ratio is None
    for override, said in (("seed=x", "policy option seed: seed"), ("seed", "write KEY=VALUE"), ("sed=1", "did you mean `seed`")):
        with pytest.raises(SpecError, match=said):
            load_policy("areal-pair", [override])


def test_near_names_are_shown(tmp_path: Path) -> None:
    """An unknown policy name is answered with near ones, a missing file with its path."""
    with pytest.raises(SpecError, match="did you mean areal-pair"):
        load_policy("areal-pairs")
    with pytest.raises(SpecError, match="no such policy file"):
        load_policy(tmp_path / "none.yaml")


def test_the_hash_is_of_what_changes_samples(tmp_path: Path) -> None:
    """Two policies hash alike if they differ in words only, and otherwise if any other field differs."""
    first = load_policy(_write(tmp_path, "name: a\ndescription: one\n"))
    assert first.sha256 == DEFAULT.sha256
    assert load_policy(DEFAULT, ["seed=1"]).sha256 != DEFAULT.sha256
