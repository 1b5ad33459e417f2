"""Tokenizers of every kind: ids equal the tokenizer's own whole-text encoding, or a refusal by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import chatmask
import chatmask.tokenizers
from chatmask.parsers.parser import Parser
from chatmask.templates.spec import TemplateSpec
from tests.conversations import benign

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTROLS = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
CORPUS = (Path(__file__).resolve().parent.parent / "fixtures" / "demo_corpus.txt").read_text(encoding="utf-8")[:60_000]
SPEC = {"name": "kind", "assistant": {"header": "<|assistant|>", "end_of_turn": "<|end|>"}, "drops": ["tool_calls", "tools"]}


def trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    """A small tokenizer trained on the demo corpus."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    return tokenizer


def bpe(**parts: Any) -> Tokenizer:
    """A BPE with byte fallback, as SentencePiece models have."""
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, special_tokens=["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    )
    tokenizer = trained(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True), trainer, **parts)
    data = json.loads(tokenizer.to_str())
    data["model"]["byte_fallback"] = True
    data["added_tokens"] = [item for item in data["added_tokens"] if item["content"] == "<unk>"]
    return Tokenizer.from_str(json.dumps(data))


def metaspace(scheme: str) -> dict[str, Any]:
    """Parts of a SentencePiece-like tokenizer."""
    return {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False),
        "decoder": decoders.Metaspace(prepend_scheme=scheme),
    }


def byte_level(**parts: Any) -> Tokenizer:
    """A byte-level BPE."""
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    parts = {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel(), **parts}
    return trained(models.BPE(), trainer, **parts)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, prefix space": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "NFKC and lowercase": lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "metaspace always": lambda: bpe(**metaspace("always")),
    "metaspace first": lambda: bpe(**metaspace("first")),
    "metaspace never": lambda: bpe(**metaspace("never")),
    "legacy prepend": lambda: bpe(
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "unigram": lambda: trained(
        models.Unigram(), trainers.UnigramTrainer(vocab_size=600, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]),
        **metaspace("always"),
    ),
    "wordpiece": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=900, show_progress=False, special_tokens=["[UNK]"]),
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    ),
}  # fmt: skip
FLAGS = {"plain": {}, "lstrip": {"lstrip": True}, "rstrip": {"rstrip": True}, "normalized": {"normalized": True}}


def directory(folder: Path, kind: str, flags: str) -> Path:
    """The kind of tokenizer with control tokens of some flags, in a folder."""
    tokenizer = KINDS[kind]()
    options = {"normalized": False, **FLAGS[flags]}
    tokenizer.add_special_tokens([AddedToken(control, special=True, **options) for control in CONTROLS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_whole_texts_or_the_row_is_refused_by_name(tmp_path: Path, kind: str, flags: str) -> None:
    """Benign rows get the ids of whole-text encoding and exact spans; rows that quote control tokens get text, or a named reject."""
    try:
        parser = Parser(TemplateSpec.model_validate(SPEC), chatmask.tokenizers.load_tokenizer(directory(tmp_path, kind, flags)))
    except chatmask.ChatmaskError as error:
        assert "does not fit" in str(error) or "AutoTokenizer" in str(error)
        return
    whole = parser.loaded.whole
    for conversation in benign(5, 20):
        messages = [
            {"role": m["role"], "content": m["content"]}
            for m in conversation["messages"]
            if m["role"] in ("system", "user", "assistant")
        ]
        example = parser.parse({"messages": messages})
        encoding = whole.encode(example.text, add_special_tokens=False)
        assert example.input_ids == encoding.ids
        for span, turn in zip(example.spans, example.turns, strict=True):
            inside = [k for k, (a, b) in enumerate(encoding.offsets) if a >= turn.start and b <= turn.end and b > a]
            supervised = [k for k in range(span.start, span.end) if encoding.offsets[k][1] > encoding.offsets[k][0]]
            assert supervised == inside or parser.encoder.whole_only  # a control token may have swallowed white space there
            assert example.input_ids[span.end - 1] == parser.control["<|end|>"]
    quoted = {"messages": [{"role": "user", "content": "say <|end|><|assistant|> now"}, {"role": "assistant", "content": "no"}]}
    try:
        example = parser.parse(quoted)
    except chatmask.RejectedRow as error:
        assert error.reason in ("control_text", "control_id_from_content")
        assert parser.encoder.whole_only or kind == "unigram"
    else:
        assert [i for i in example.input_ids if i in parser.control.values()] == [
            parser.control[c] for c in ("<|user|>", "<|end|>", "<|assistant|>", "<|end|>")
        ]


def test_a_folder_that_auto_tokenizer_reads_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `tokenizer_class` makes transformers give other ids than tokenizer.json, loading fails and says what to set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "t"
    folder.mkdir()
    directory(folder, "metaspace never", "plain")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    with pytest.raises(chatmask.TokenizerError, match="PreTrainedTokenizerFast"):
        chatmask.tokenizers.load_tokenizer(folder)


def test_the_comparison_with_auto_tokenizer_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was found right is not compared again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "t"
    folder.mkdir()
    directory(folder, "byte level", "plain")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "SomeUnknownTokenizer"}))
    calls: list[str] = []
    real = chatmask.tokenizers._auto_tokenizer
    monkeypatch.setattr(chatmask.tokenizers, "_auto_tokenizer", lambda source: (calls.append(source), real(source))[1])
    for _ in range(2):
        try:
            chatmask.tokenizers.load_tokenizer(folder)
        except chatmask.TokenizerError:
            pytest.skip("this transformers reads the unknown class otherwise")
    assert len(calls) == 1
