"""Public reports on other model families, each on the real tokenizer or template that it was about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import chatmask
from chatmask.parsers.parser import Parser
from chatmask.templates.registry import load_spec
from chatmask.tokenizers import load_tokenizer
from tests import references


def parser(name: str) -> Parser:
    """A spec on its reference tokenizer."""
    return chatmask.load_parser(name, tokenizer=references.for_spec(load_spec(name)))


def talk(*texts: str) -> dict[str, Any]:
    """Question, answer, question, ..."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def spans(built: Parser, record: dict[str, Any]) -> list[str]:
    """Text of each trained span, from its token ids."""
    example = built.parse(record)
    return [built.loaded.decode(example.input_ids[s.start : s.end]) for s in example.spans if s.trained]


def test_the_turn_terminator_is_trained() -> None:
    """B10 (axolotl #3754): Gemma's last target is `<end_of_turn>`, which is not the tokenizer's eos, and answers keep their lines."""
    built = parser("gemma3")
    example = built.parse(talk("hi", "hello\n\n- a\n- b"))
    assert built.loaded.decode([example.input_ids[k] for k, bit in enumerate(example.loss_mask) if bit][-1:]) == "<end_of_turn>"
    assert spans(built, talk("hi\nthere", "hello\n\n- a\n- b")) == ["hello\n\n- a\n- b<end_of_turn>"]


@pytest.mark.parametrize("end", ["<eos>", "<end_of_turn", "<|im_end|>", "hello"])
def test_an_end_that_the_template_does_not_write_is_refused(tmp_path: Path, end: str) -> None:
    """B10, B12 (trl #7230): a wrong or missing stop token fails when the spec is compiled, before any data is read."""
    path = tmp_path / "own.yaml"
    path.write_text(f'name: own\nextends: gemma3\nassistant: {{end_of_turn: "{end}"}}\n')
    with pytest.raises(chatmask.SpecError, match="end"):
        chatmask.load_parser(path, tokenizer=references.for_spec(load_spec("gemma3")))


def test_no_stop_token_needs_a_word() -> None:
    """B12: a template that writes no end token compiles only with `allow_untrained_stop: true`, and such turns are counted."""
    spec = load_spec("ling-lite-1.5")
    folder = references.for_spec(spec)
    assistant = spec.assistant.model_copy(update={"final_stop": "none"})
    with pytest.raises(chatmask.SpecError):
        Parser(spec.model_copy(update={"assistant": assistant}), load_tokenizer(folder))
    allowed = spec.assistant.model_copy(update={"final_stop": "none", "allow_untrained_stop": True})
    built = Parser(spec.model_copy(update={"assistant": allowed}), load_tokenizer(folder))
    assert built.parse(talk("hi", "hello")).notes["untrained_stops"] == 1


@pytest.mark.parametrize("name", ["llama3.1", "gemma3", "mistral-7b", "command-r7b"])
def test_exactly_one_bos(name: str) -> None:
    """B27 (OpenRLHF #393): where template and tokenizer both add a BOS, one is in the ids."""
    built = parser(name)
    bos = built.control[built.loaded.special_tokens["bos_token"]]
    assert built.parse(talk("test", "ok")).input_ids.count(bos) == 1


@pytest.mark.parametrize("name", ["mistral-7b", "mistral-nemo", "phi3.5", "phi4-mini"])
@pytest.mark.parametrize("answer", ["[", "/INST", "]ok", "ok", "\nok", " ok", "Ok\n\nok"])
def test_spans_are_where_the_text_is(name: str, answer: str) -> None:
    """B25 (axolotl #2089, #1916): content whose first word could merge with the header, and a last turn, are found by position."""
    built = parser(name)
    example = built.parse(talk("q", answer, "q", answer))
    end = built.spec.assistant.ends[0]
    for span, turn in zip(example.spans, example.turns, strict=True):
        text = example.text[turn.start : turn.end]
        assert text.endswith(end)
        assert text.removesuffix(end).strip() == answer.strip()
        decoded = built.loaded.decode(example.input_ids[span.start : span.end])
        assert text.endswith(decoded.lstrip()) or decoded.strip() == text.strip()
    assert len(example.spans) == 2


@pytest.mark.parametrize("name", ["qwen3.5", "nemotron-3", "glm-4.5"])
def test_an_empty_think_block_of_the_prompt_is_not_trained(name: str) -> None:
    """B20, B29 (trl #5213, Automodel #3738): what the prompt supplies is trained in no turn; the answer and its end are."""
    built = parser(name)
    assert spans(built, talk("This is a test.", "ok", "Again.", "yes"))[0].lstrip().startswith("ok")
    for text in spans(built, talk("This is a test.", "ok", "Again.", "yes")):
        assert "think" not in text
