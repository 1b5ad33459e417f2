"""Tokenizers: where they come from, what counts as a control token, and ids that equal the whole text's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chatmask
from chatmask.encoding import Encoder, control_tokens
from chatmask.tokenizers import demo_tokenizer, fingerprint_of, load_tokenizer
from tests import assets

DEMO = Path(chatmask.__file__).parent / "templates" / "demo"
TEMPLATE = "{% for m in messages %}<role>{{ m.role }}</role>{{ m.content }}<|role_end|>{% endfor %}<think>"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """An encoder of the demo tokenizer."""
    tokenizer = demo_tokenizer(TEMPLATE)
    return Encoder(tokenizer, control_tokens(tokenizer, TEMPLATE))


def edited(folder: Path, change: Any) -> Path:
    """A copy of the demo tokenizer's directory with its tokenizer.json changed."""
    target = folder / "tokenizer"
    shutil.copytree(DEMO, target)
    data = json.loads((target / "tokenizer.json").read_text())
    change(data)
    (target / "tokenizer.json").write_text(json.dumps(data))
    return target


class TestSources:
    def test_directory_hub_cache_and_loaded_object_agree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A directory, the same files in the local hub cache, and the transformers object give one fingerprint."""
        directory = assets.ling3()
        snapshot = tmp_path / "models--inclusionAI--Ling-3.0-tiny" / "snapshots" / ("0" * 40)
        shutil.copytree(directory, snapshot)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
        import huggingface_hub.constants
        import huggingface_hub.file_download

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        cached = chatmask.load_parser("ling-3.0-thinking")
        by_folder = chatmask.load_parser("ling-3.0-thinking", tokenizer=str(directory))
        by_object = chatmask.load_parser("ling-3.0-thinking", tokenizer=by_folder.tokenizer)

        assert fingerprint_of(cached.loaded) == fingerprint_of(str(directory)) == fingerprint_of(by_object.loaded)
        record = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}]}
        assert cached.parse(record).input_ids == by_folder.parse(record).input_ids == by_object.parse(record).input_ids

    @pytest.mark.parametrize("directory", [assets.qwen3, assets.ling3])
    def test_the_transformers_tokenizer_gives_the_same_ids_and_text(self, directory: Any) -> None:
        """`parser.tokenizer` is the transformers tokenizer: same ids for the text, same text for the messages (B44)."""
        spec = "qwen3-thinking" if directory is assets.qwen3 else "ling-3.0-thinking"
        parser = chatmask.load_parser(spec, tokenizer=str(directory()))
        messages = [{"role": "user", "content": "été 日本語?"}, {"role": "assistant", "content": "ok", "reasoning_content": "so"}]
        example = parser.parse({"messages": messages})
        ids = parser.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **parser.spec.kwargs)
        assert list(ids) == example.input_ids
        assert len(example.loss_mask) == len(example.input_ids)
        assert parser.tokenizer(example.text, add_special_tokens=False)["input_ids"] == example.input_ids

    @pytest.mark.parametrize(
        ("source", "says"),
        [("./nowhere", "not a directory"), ("/nowhere/at/all", "not a directory"), ("a b c!", "neither a folder nor a hub id")],
    )
    def test_wrong_sources_are_named(self, source: str, says: str) -> None:
        """A path that is no folder and a string that is no id are told apart."""
        with pytest.raises(chatmask.TokenizerError, match=says):
            load_tokenizer(source)

    def test_a_folder_without_tokenizer_json_says_how_to_make_one(self, tmp_path: Path) -> None:
        """The error names save_pretrained."""
        with pytest.raises(chatmask.TokenizerError, match="save_pretrained"):
            load_tokenizer(tmp_path)

    def test_a_tokenizer_without_a_template_is_refused_by_name(self, tmp_path: Path) -> None:
        """A spec with `template: tokenizer` needs one."""
        with pytest.raises(chatmask.SpecError, match="no chat template"):
            chatmask.load_parser("ling-3.0", tokenizer=str(edited(tmp_path, lambda data: None)))

    def test_one_demo_or_real_never_both(self) -> None:
        """`demo=True` with a tokenizer is an error, not a choice made in silence."""
        with pytest.raises(chatmask.SpecError, match="leave --tokenizer out"):
            chatmask.load_parser("ling-3.0", tokenizer=str(DEMO), demo=True)


class TestControlTokens:
    def test_special_or_written_by_the_template(self) -> None:
        """Tokens flagged special always count; unflagged ones count when the template can write them."""
        tokenizer = demo_tokenizer(TEMPLATE)
        control = control_tokens(tokenizer, TEMPLATE)
        assert {"<role>", "</role>", "<|role_end|>", "<|im_start|>", "<think>"} <= set(control)
        assert "<tool_call>" not in control
        assert "<tool_call>" in control_tokens(tokenizer, TEMPLATE + "<tool_call>")

    @given(
        st.lists(
            st.sampled_from(["<role>", "<think>", "<|role_end|>", "<tool_call>", " a", "\n", "\n\n", "é", "日", "12", "<|", "|>"])
        )
    )
    def test_pieces_give_the_ids_of_the_whole(self, encoder: Encoder, parts: list[str]) -> None:
        """Text cut at control tokens has the ids that the tokenizer gives the whole text, borders or none."""
        text = "".join(parts)
        whole = encoder.tokenizer.whole.encode(text, add_special_tokens=False)
        borders = range(0, len(text), 2)
        ids, starts, ends = encoder.with_offsets(text, encoder.cut(text), borders)
        assert ids.tolist() == whole.ids
        assert len(starts) == len(ends) == len(ids)
        for k, (start, end) in enumerate(whole.offsets):
            assert starts[k] <= start
            assert end <= ends[k]

    def test_quoted_literals_never_become_ids(self, encoder: Encoder) -> None:
        """Text that is not marked as control is encoded without control tokens, whatever it quotes."""
        text = "a <role> b <|role_end|><|im_end|> c"
        ids = encoder.encode(text, []).ids
        assert encoder.foreign_control_ids(ids, []) == 0
        assert encoder.tokenizer.decode(ids) == text


def test_a_tokenizer_that_cannot_be_cut_is_encoded_whole(tmp_path: Path) -> None:
    """Where cutting at control tokens changes ids (an lstrip token), ids are the whole text's and quoted tokens a named reject."""

    def strip_left(data: dict[str, Any]) -> None:
        next(t for t in data["added_tokens"] if t["content"] == "<|role_end|>")["lstrip"] = True

    source = edited(tmp_path, strip_left)
    (source / "chat_template.jinja").write_text((DEMO.parent / "ling-3.0.jinja").read_text())
    parser = chatmask.load_parser("ling-3.0", tokenizer=str(source))
    assert parser.encoder.whole_only
    example = parser.parse({"messages": [{"role": "user", "content": "q "}, {"role": "assistant", "content": "It is 4.  "}]})
    assert example.input_ids == parser.loaded.whole.encode(example.text, add_special_tokens=False).ids
    with pytest.raises(chatmask.RejectedRow) as caught:
        parser.parse({"messages": [{"role": "user", "content": "say <|role_end|>"}, {"role": "assistant", "content": "no"}]})
    assert caught.value.reason == "control_text"
