"""Specs: strict YAML, inheritance, overrides, and errors that say where and what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import chatmask
from chatmask.cli import main
from chatmask.templates.registry import list_specs, load_spec
from chatmask.templates.spec import TemplateSpec, merge

BASE = "name: own\nassistant:\n  header: 'A:'\n  end_of_turn: '<e>'\n"


def spec_file(folder: Path, text: str | bytes) -> Path:
    """A spec file with some text."""
    path = folder / "own.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("name", list_specs())
def test_packaged_specs_load_and_survive_a_round_trip(name: str) -> None:
    """Every packaged spec validates, and equals what its own dump validates to."""
    spec = load_spec(name)
    assert spec.name == name
    assert TemplateSpec.model_validate(spec.model_dump()) == spec
    assert spec.description
    assert spec.verified or "nothing of this was tried" in spec.note


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (BASE + "trust_remote_code: true\n", 5, "unknown field"),
        (BASE + "asistant: {}\n", 5, "did you mean `assistant`"),
        (BASE + "thinking: {mode: yes}\n", 5, "thinking.mode"),
        (BASE + "thinking: {mode: on}\n", 5, "needs `open` and `close`"),
        (BASE + "name: twice\n", 5, "stands twice"),
        (BASE + "kwargs: &a {x: 1}\n", 5, "anchors"),
        (BASE + "kwargs: {<<: {x: 1}}\n", 5, "merge"),
        (BASE + "kwargs: !!python/object:os.system {}\n", 5, "tag"),
        (BASE + "---\nname: b\n", 5, "second YAML document"),
        (BASE + "kwargs: {messages: []}\n", 5, "set by chatmask"),
        (BASE + "roles: {critic: boss}\n", 5, "roles map to"),
        (BASE + "straddle: maybe\n", 5, "'exclude' or 'include'"),
        (BASE + "prefix_stable: 'true'\n", 5, "prefix_stable"),
        (BASE + "kwargs: " + "[" * 40 + "]" * 40 + "\n", 5, "nested deeper"),
        ("name: own\n", None, "assistant"),
        ("- a\n", 1, "mapping"),
        ("a: [\n", 2, "not valid YAML"),
        (BASE.encode("utf-16"), None, "UTF-8"),
        (b"#" * (2 << 20), None, "at most"),
        (BASE + "extends: nowhere\n", None, "no spec named"),
        (BASE + "extends: own.yaml\n", None, "circle"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, text: str | bytes, line: int | None, says: str) -> None:
    """A bad spec is refused with the file, the line, and what is wrong."""
    path = spec_file(tmp_path, text)
    with pytest.raises(chatmask.SpecError) as caught:
        load_spec(path)
    assert says in str(caught.value)
    assert "own.yaml" in str(caught.value) or "no spec named" in says
    if line is not None:
        assert f"own.yaml:{line}:" in str(caught.value)


def test_on_and_off_are_words() -> None:
    """`mode: on` is the word, as in YAML 1.2, not a truth value."""
    assert load_spec("ling-3.0-thinking").thinking.mode == "on"
    assert load_spec("ling-3.0").thinking.mode == "off"
    assert load_spec("ling-3.0").kwargs == {"enable_thinking": False}


def test_extends_merges_fields_and_not_names(tmp_path: Path) -> None:
    """A child keeps what it does not say, mapping by mapping; description and verification stay the parent's own."""
    path = spec_file(tmp_path, "name: child\nextends: ling-3.0-thinking\nthinking: {strip: true}\n")
    child, parent = load_spec(path), load_spec("ling-3.0-thinking")
    assert child.thinking == parent.thinking.model_copy(update={"strip": True})
    assert child.assistant == parent.assistant
    assert (child.description, child.verified) == ("", [])


def test_set_overrides_like_a_file(tmp_path: Path) -> None:
    """`--set` reaches every field with the rules and errors of a file."""
    assert load_spec("ling-3.0", ["thinking.strip=true"]).thinking.strip is True
    for bad, says in (
        ("thinking.strip=maybe", "thinking.strip"),
        ("nonsense", "KEY=VALUE"),
        ("trust_remote_code=true", "unknown field"),
    ):
        with pytest.raises(chatmask.SpecError, match=says):
            load_spec("ling-3.0", [bad])


def test_the_hash_moves_with_meaning_only(tmp_path: Path) -> None:
    """Fields that can change a mask change the hash; names and descriptions do not."""
    spec = load_spec("ling-3.0")
    assert spec.model_copy(update={"description": "x", "name": "y"}).sha256 == spec.sha256
    assert load_spec("ling-3.0", ["straddle=include"]).sha256 != spec.sha256


def test_auto_is_on_and_off_of_its_parts() -> None:
    """`ling-3.0-auto` behaves as `ling-3.0-thinking` for a thinking sample and as `ling-3.0` else."""
    auto = load_spec("ling-3.0-auto")
    for thinks, name in ((True, "ling-3.0-thinking"), (False, "ling-3.0")):
        assert auto.for_sample(thinks).sha256 == load_spec(name).sha256


_VALUES = st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3))
_MAPS = st.dictionaries(st.text(max_size=2), _VALUES, max_size=3)


@given(_MAPS, _MAPS, _MAPS)
def test_merging_is_associative_and_the_later_wins(a: dict[str, object], b: dict[str, object], c: dict[str, object]) -> None:
    """`extends` may be resolved from either end."""
    if all(isinstance(a.get(k, {}), dict) == isinstance(b.get(k, {}), dict) for k in {*a, *b}):
        assert merge(merge(a, b), {}) == merge(a, b)
    assert merge(a, a) == a
    assert set(merge(a, c)) == {*a, *c}


class TestCommands:
    def test_list_shows_every_spec(self) -> None:
        """`specs list` names family, mode, history and verification; --json carries the same."""
        result = CliRunner().invoke(main, ["specs", "list", "--json"])
        value = json.loads(result.stdout)
        assert [entry["name"] for entry in value["specs"]] == list_specs()
        assert all(name in result.stderr for name in list_specs())

    def test_show_prints_yaml_that_loads_to_the_same_spec(self, tmp_path: Path) -> None:
        """`specs show` is a complete spec file."""
        text = CliRunner().invoke(main, ["specs", "show", "ling-3.0-auto"]).stdout
        shown = spec_file(tmp_path, "\n".join(line for line in text.splitlines() if not line.startswith("extends:")))
        assert load_spec(shown).sha256 == load_spec("ling-3.0-auto").sha256

    def test_schema_is_json_schema(self) -> None:
        """`specs schema` describes every field, for editors."""
        schema = json.loads(CliRunner().invoke(main, ["specs", "schema"]).stdout)
        assert schema["additionalProperties"] is False
        assert set(schema["properties"]) == set(TemplateSpec.model_fields)

    def test_probe_shows_expected_beside_found(self) -> None:
        """`specs probe` lists each claim and exits 2 when one fails."""
        good = CliRunner().invoke(main, ["specs", "probe", "ling-3.0-thinking", "--demo"])
        assert good.exit_code == 0
        assert "FAIL" not in good.stdout
        bad = CliRunner().invoke(
            main, ["specs", "probe", "ling-3.0-thinking", "--demo", "--set", 'assistant.header="<role>ASSISTANT</role>"']
        )
        assert bad.exit_code == 2
        assert "FAIL" in bad.stdout
        assert r"found     '<role>ASSISTANT</role>\n<think>'" in bad.stdout


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        (['assistant.header="<role>ASSISTANT</role>"'], "header is the generation prompt"),
        (['assistant.header="<role>ASSISTANT</role>\\n<think></think>"'], "header is the generation prompt"),
        (['assistant.header="<|assistant|>\\n"'], "header is the generation prompt"),
        (["assistant.end_of_turn='<|im_end|>'"], "end_not_found"),
        (["assistant.end_of_turn='no such token'"], "end_not_found"),
        (['assistant.trailing="\\n"'], "end_not_found"),
        (["thinking.in_history=dropped"], "thinking.in_history"),
        (['assistant.history_header="<role>X</role>"'], "history_header"),
        (["kwargs.enable_thinking=false"], "header is the generation prompt"),
    ],
)
def test_claims_that_do_not_hold_fail_the_probe(changes: list[str], claim: str) -> None:
    """A header one tag short or long, a wrong end token, trailing text or history claim: compile fails before any data (B02, B03)."""
    with pytest.raises(chatmask.SpecError) as caught:
        chatmask.load_parser("ling-3.0-thinking", demo=True, overrides=changes)
    assert claim in str(caught.value)
    assert "expected" in str(caught.value)
    assert "found" in str(caught.value)


def test_undeclared_history_rewriting_fails_the_probe() -> None:
    """A template that rewrites history needs `prefix_stable: false`."""
    with pytest.raises(chatmask.SpecError, match="prefixes of the training text"):
        chatmask.load_parser("qwen3-thinking", demo=True, overrides=["prefix_stable=true"])


@pytest.mark.parametrize("name", ["ling-3.0", "qwen3-thinking", "qwen3-instruct"])
def test_a_system_text_of_the_spec_holds_its_probe(name: str) -> None:
    """A spec with a system text of its own compiles, and a row without one gets it."""
    parser = chatmask.load_parser(name, demo=True, overrides=["system=Be brief."])
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "A."}]
    assert "Be brief." in parser.parse({"messages": turns}).text
