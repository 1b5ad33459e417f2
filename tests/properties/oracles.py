"""What the package must produce, worked out a second time by other means.

Nothing here asks chatmask where a turn begins: expected turns are written out by hand for each model family, expected masks come
from the whole-text encoding's own offsets, and served prompts come from transformers. The checks are plain functions that raise
AssertionError, so that both pytest and the mutant checker can run them.
"""

from __future__ import annotations

import copy
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import chatmask
from chatmask.conversation import Conversation, normalise
from chatmask.tokenizers import Tokenizer, load_tokenizer
from tests import assets
from tests.conversations import benign, hostile

SPECS = ("ling-3.0", "ling-3.0-thinking", "ling-3.0-auto", "ling-flash-2.0", "qwen3-instruct", "qwen3-thinking")
SOURCES = ("demo", "real")
NO_REASONING = frozenset({"ling-3.0", "ling-flash-2.0", "qwen3-instruct"})

# what may be refused when only user, system and tool texts are hostile
REFUSALS = frozenset({"content_steers_template", "thinking_option_conflict", "template_drops_content"})
# and what more when the assistant's own texts are: think tags in the wrong place
INLINE_REFUSALS = frozenset({"inline_thinking_unclear", "reasoning_conflict", "reasoning_in_no_think_spec"})


@cache
def parser_of(spec: str, source: str) -> Any:
    """Return a compiled parser, over the demo tokenizer or over the family's real template and vocabulary."""
    if source == "demo":
        return chatmask.load_parser(spec, demo=True)
    folder = assets.qwen3() if spec.startswith("qwen3") else assets.ling_flash2() if "flash" in spec else assets.ling3()
    return chatmask.load_parser(spec, tokenizer=_tokenizer(folder))


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    """Specs of one family share it: reading a real vocabulary takes a second."""
    return load_tokenizer(folder)


def fitting(conversation: dict[str, Any], spec: str) -> dict[str, Any]:
    """Return a copy that the spec accepts: without reasoning where it knows none."""
    found = copy.deepcopy(conversation)
    if spec in NO_REASONING:
        for message in found["messages"]:
            message.pop("reasoning_content", None)
    return {"messages": found["messages"], "tools": found["tools"]}


def good(spec: str, seed: int, n: int) -> list[dict[str, Any]]:
    """Return `n` good conversations for a spec."""
    return [fitting(conversation, spec) for conversation in benign(seed, n)]


# --- expected turns -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """One assistant turn as it must stand in the text: header, then what the model sampled, and whether it is trained."""

    message: int
    header: str
    emission: str
    trained: bool = True


def expected_turns(spec: str, messages: Sequence[dict[str, Any]]) -> list[Expected]:
    """Write out the assistant turns of well-formed messages by hand, after the format blocks of each family."""
    question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=len(messages) - 1)
    thinks = spec == "ling-3.0-thinking" or (
        spec == "ling-3.0-auto" and any((m.get("reasoning_content") or "").strip() for m in messages)
    )
    turns = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content, reasoning = message["content"] or "", message.get("reasoning_content") or ""
        calls = message.get("tool_calls") or []
        if spec.startswith("ling-3.0"):
            header = "<role>ASSISTANT</role>\n<think>" + ("" if thinks else "</think>")
            body = content.lstrip("\n") if reasoning else content
            emission = (reasoning.strip("\n") + "</think>" if thinks else "") + body + _tagged_calls(calls, content)
            turns.append(Expected(i, header, emission + "<|role_end|>"))
        elif spec == "ling-flash-2.0":
            turns.append(Expected(i, "<role>ASSISTANT</role>", content + _json_calls(calls, content) + "<|role_end|>"))
        else:
            block = i > question and (i == len(messages) - 1 or bool(reasoning))
            header, emission = "<|im_start|>assistant\n", content
            if block and spec == "qwen3-thinking":
                emission = "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")
            elif block:
                header += "<think>\n\n</think>\n\n"
                emission = content.lstrip("\n")
            trained = block or not reasoning
            turns.append(Expected(i, header, emission + _json_calls(calls, content) + "<|im_end|>", trained))
    return turns


def _tagged_calls(calls: Sequence[dict[str, Any]], content: str) -> str:
    text = ""
    for n, call in enumerate(calls):
        text += "\n" if content or n else ""
        text += f"<tool_call>{call['function']['name']}\n"
        for key, value in call["function"]["arguments"].items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{shown}</arg_value>"
        text += "\n</tool_call>"
    return text


def _json_calls(calls: Sequence[dict[str, Any]], content: str) -> str:
    text = ""
    for n, call in enumerate(calls):
        text += "\n" if content or n else ""
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        text += f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text


def expected_mask(parser: Any, text: str, turns: Sequence[Expected]) -> tuple[list[int], list[int], int]:
    """Ids, mask and straddles of a text without quoted control tokens, from the offsets of its whole-text encoding."""
    encoding = parser.loaded.whole.encode(text, add_special_tokens=False)
    mask, position, straddles = [0] * len(encoding.ids), 0, 0
    for turn in turns:
        start = text.index(turn.header + turn.emission, position) + len(turn.header)
        position = start + len(turn.emission)
        for k, (a, b) in enumerate(encoding.offsets):
            straddles += a < start < b
            if turn.trained and start <= a and b <= position:
                mask[k] = 1
    return encoding.ids, mask, straddles


# --- checks on one conversation -------------------------------------------------------------------------------------------


def check_turns(parser: Any, conversation: dict[str, Any]) -> Any:
    """A good conversation: ids, mask, spans, headers and straddles are the expected ones. Returns the example."""
    spec = parser.spec.name
    example = parser.parse(conversation)
    turns = expected_turns(spec, conversation["messages"])
    ids, mask, straddles = expected_mask(parser, example.text, turns)
    assert example.input_ids == ids, "ids differ from the whole-text encoding"
    assert example.loss_mask == mask, (
        f"supervised {_trained_text(parser, example)!r}, expected {[t.emission for t in turns if t.trained]!r}"
    )
    assert example.straddles == straddles, f"{example.straddles} straddles counted, {straddles} found"
    check_shape(example)
    assert [s.message for s in example.spans] == [t.message for t in turns]
    assert [s.trained for s in example.spans] == [t.trained for t in turns]
    ends = {parser.control[end] for end in parser.spec.assistant.ends}
    for span, turn in zip(example.spans, turns, strict=True):
        inside = example.input_ids[span.start : span.end]
        assert inside[-1] in ends, "the end token is not in the span"
        assert sum(i in ends for i in inside) == 1, "the end token stands more than once in a span"
        if not straddles:
            assert same_text(parser, inside, turn.emission)
            before = parser.loaded.decode(example.ids[: span.start])
            assert before.endswith(turn.header), f"before the span: {before[-60:]!r}, expected {turn.header!r}"
    return example


def check_shape(example: Any) -> None:
    """Lengths, types, order of spans, and the mask as the union of the trained ones."""
    assert str(example.ids.dtype) == "int32"
    assert str(example.mask.dtype) == "uint8"
    assert len(example.ids) == len(example.mask) == len(example.input_ids) == len(example.loss_mask)
    union, position = [0] * len(example.ids), 0
    for span in example.spans:
        assert position <= span.start <= span.end <= len(example.ids)
        assert span.trained == (span.reason == "")
        position = span.end
        if span.trained:
            union[span.start : span.end] = [1] * (span.end - span.start)
    assert example.loss_mask == union, "the mask is not the union of the trained spans"


def same_text(parser: Any, ids: Sequence[int], text: str) -> bool:
    """Do ids decode to a text, under the tokenizer's own normaliser."""
    return bool(parser.loaded.decode(ids) == normalised(parser, text))


def normalised(parser: Any, text: str) -> str:
    """The text as the tokenizer normalises it; added tokens are taken out of the text before, so NFC cannot reach over them."""
    normaliser = parser.loaded.data.get("normalizer")
    if normaliser is None:
        return text
    assert normaliser == {"type": "NFC"}, normaliser
    pieces = re.split(f"({parser.encoder.pattern.pattern})", text)
    return "".join(unicodedata.normalize("NFC", piece) for piece in pieces)


def _trained_text(parser: Any, example: Any) -> list[str]:
    return [parser.loaded.decode(example.ids[s.start : s.end]) for s in example.spans if s.trained]


def supervised(example: Any) -> list[list[int]]:
    """The ids of each trained span."""
    return [example.input_ids[s.start : s.end] for s in example.spans if s.trained]


def controls(parser: Any, ids: Sequence[int], markers: bool = True) -> list[int]:
    """The control ids among ids, in order; `markers=False` leaves emission markers out."""
    wanted = {i for text, i in parser.control.items() if markers or text not in parser.markers}
    return [i for i in ids if i in wanted]


def agent_steps() -> dict[str, Any]:
    """Two questions with agent steps between, of which some think: what Qwen3 rewrites in history, in every order."""
    messages: list[dict[str, Any]] = []
    for n in range(3):
        messages.append({"role": "user", "content": f"Question {n}."})
        for k in range(3):
            function = {"name": "look", "arguments": {"n": k}}
            step: dict[str, Any] = {
                "role": "assistant",
                "content": f"Step {k}.",
                "tool_calls": [{"type": "function", "function": function}],
            }
            if (n + k) % 2:
                step["reasoning_content"] = f"Thought {k}."
            messages += [step, {"role": "tool", "content": f"Result {k}."}]
        messages.append({"role": "assistant", "content": f"Answer {n}."})
    return {"messages": messages, "tools": None}


# --- hostile texts --------------------------------------------------------------------------------------------------------


def literals_of(parser: Any) -> list[str]:
    """What an attacker would quote: control tokens, whole headers and ends, and the thinking option."""
    spec = parser.spec.for_sample(True)
    found = [
        *parser.control,
        *spec.assistant.headers,
        *spec.assistant.ends,
        "<tool_response>",
        "</tool_response>",
        "zq0q0z",
        "zq1q",
    ]
    return [*found, *spec.thinking.option_text.values()]


def poisoned(conversation: dict[str, Any], parser: Any, rng: random.Random) -> dict[str, Any]:
    """Replace all user, system and tool texts (and tool descriptions) of a conversation by hostile ones."""
    texts = iter(_hostile_texts(parser, rng, 64))
    found = copy.deepcopy(conversation)
    for message in found["messages"]:
        if message["role"] != "assistant":
            message["content"] = next(texts)
            message["name"] = next(texts)
            if rng.random() < 0.02:  # Qwen and Ling templates take such a user turn for a tool result
                message["content"] = f"<tool_response>{message['content']}</tool_response>"
    for tool in found["tools"] or ():
        tool["function"]["description"] = next(texts)
        tool["function"]["parameters"]["properties"][next(texts)] = {"type": "string", "description": next(texts)}
    return found


def _hostile_texts(parser: Any, rng: random.Random, n: int) -> list[str]:
    texts: list[str] = []
    while len(texts) < n:
        for conversation in hostile(rng.randrange(10**9), 8, literals_of(parser)):
            texts += [m["content"] for m in conversation["messages"] if m["role"] != "assistant"]
    return texts[:n]


def check_poison(parser: Any, conversation: dict[str, Any], rng: random.Random, refused: Counter[str]) -> None:
    """Hostile user, system and tool texts change neither what is supervised nor which control ids there are."""
    plain = parser.parse(conversation)
    attack = poisoned(conversation, parser, rng)
    try:
        example = parser.parse(attack)
    except chatmask.RejectedRow as error:
        refused[error.reason.value] += 1
        assert error.reason.value in REFUSALS, error
        return
    check_unmoved(parser, plain, example)
    for message in attack["messages"]:
        if message["role"] != "assistant":
            assert message["content"] in example.text, "a text was changed"


def check_unmoved(parser: Any, plain: Any, example: Any) -> None:
    """The second example supervises the same ids, holds the same control ids, and decodes to its own text."""
    assert supervised(example) == supervised(plain), (_trained_text(parser, plain), _trained_text(parser, example))
    assert controls(parser, example.input_ids) == controls(parser, plain.input_ids), "a control id came from content"
    check_shape(example)
    check_decodes(parser, example)


def check_decodes(parser: Any, example: Any) -> None:
    """Decoding gives the text back. Under NFC only comparable where the quoted literals do not part what it would compose."""
    if parser.loaded.data.get("normalizer") is None:
        assert parser.loaded.decode(example.ids) == example.text, "the ids do not decode to the text"
    else:
        found, wanted = (unicodedata.normalize("NFC", t) for t in (parser.loaded.decode(example.ids), example.text))
        assert found == wanted, "the ids do not decode to the text"


def check_hostile(parser: Any, conversation: dict[str, Any], refused: Counter[str]) -> None:
    """Hostile texts everywhere, the assistant's included: structure stays, and only markers that the model wrote are markers."""
    try:
        example = parser.parse(conversation)
    except chatmask.RejectedRow as error:
        refused[error.reason.value] += 1
        assert error.reason.value in REFUSALS | INLINE_REFUSALS, error
        return
    shown = parser.sample(chatmask_conversation(conversation)).prepared.messages
    plain = parser.parse(harmless({"messages": shown, "tools": conversation["tools"]}))
    found, wanted = (controls(parser, e.input_ids, markers=False) for e in (example, plain))
    assert found == wanted, "structure was forged or lost"
    quoted = Counter(
        literal
        for message in shown
        if message["role"] == "assistant" and message["content"]
        for literal in parser.encoder.pattern.findall(message["content"])
        if literal in parser.markers
    )
    for marker in parser.markers:
        count = Counter(example.input_ids)[parser.control[marker]] - Counter(plain.input_ids)[parser.control[marker]]
        assert count == quoted[marker], (
            f"{marker} has {count} more ids than without quoted text, and {quoted[marker]} were sampled"
        )
    check_shape(example)
    check_decodes(parser, example)
    ends = {parser.control[end] for end in parser.spec.assistant.ends}
    for span in example.spans:
        inside = example.input_ids[span.start : span.end]
        assert inside[-1] in ends
        assert sum(i in ends for i in inside) == 1


def chatmask_conversation(record: dict[str, Any]) -> Conversation:
    """The record as the parser sees it."""
    return normalise(record)


def harmless(conversation: dict[str, Any]) -> dict[str, Any]:
    """The same conversation with `x` for every text that a person or a model wrote."""
    found = copy.deepcopy(conversation)
    for message in found["messages"]:
        for field in ("content", "reasoning_content", "thinking"):
            if field in message:
                message[field] = "x"
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = {k: "x" if isinstance(v, str) else v for k, v in arguments.items()}
    return found


def hostile_for(parser: Any, seed: int, n: int) -> list[dict[str, Any]]:
    """Return `n` conversations for the parser's spec that are hostile in every role."""
    return [fitting(c, parser.spec.name) for c in hostile(seed, n, literals_of(parser))]


# --- what the server sends ------------------------------------------------------------------------------------------------


def served_prefixes(parser: Any, conversation: dict[str, Any], render: Callable[..., str]) -> list[tuple[int, str]]:
    """(message, prompt) of every assistant turn, as a server would send it before sampling that turn."""
    sample = parser.sample(chatmask_conversation(conversation))
    prepared = sample.prepared
    return [
        (i, render(prepared.messages[:i], tools=prepared.tools, add_generation_prompt=True, **prepared.spec.kwargs))
        for i, message in enumerate(prepared.messages)
        if message["role"] == "assistant"
    ]


def check_parity(parser: Any, conversation: dict[str, Any], render: Callable[..., str]) -> Counter[str]:
    """Served ids are the training ids up to the span, except on the turns that are declared rewritten."""
    example = parser.parse(conversation)
    exact = parser.example(chatmask_conversation(conversation), oracle=True)
    assert dict(example.rewritten) == dict(exact.rewritten), f"predicted {example.rewritten}, the oracle says {exact.rewritten}"
    assert all(found.declared for found in exact.parity), exact.parity
    counts: Counter[str] = Counter()
    for (message, prompt), span in zip(served_prefixes(parser, conversation, render), example.spans, strict=True):
        assert message == span.message
        ids = parser.loaded.whole.encode(prompt, add_special_tokens=False).ids
        kept = ids == example.input_ids[: span.start]
        kind = example.rewritten.get(message, "")
        counts[kind or "served"] += 1
        if parser.spec.prefix_stable:
            assert kept, f"turn {message}: the served prompt is no prefix of the training ids"
        elif kind == "context":
            assert not kept, f"turn {message} is called rewritten, but its prefix is the served one"
        elif not kind:
            assert kept, f"turn {message}: the prefix is not the served one and nothing says so"
    if parser.spec.prefix_stable:
        assert not example.rewritten
    return counts


# --- flags and borders ---


def check_flags(parser: Any, conversation: dict[str, Any], off: set[int]) -> None:
    """Turns flagged off keep span and ids and lose their mask; when no trained turn is left the row is refused by name."""
    flagged = copy.deepcopy(conversation)
    for i in off:
        flagged["messages"][i]["train"] = False
    plain = parser.parse(conversation)
    kept = [s for s in plain.spans if s.trained and s.message not in off]
    try:
        example = parser.parse(flagged)
    except chatmask.RejectedRow as error:
        assert error.reason.value == "zero_supervision", error
        assert not kept, "a row with a trained turn was refused"
        return
    assert kept, "a row without a trained turn was kept"
    assert example.input_ids == plain.input_ids
    assert [s for s in example.spans if s.trained] == kept
    assert {s.message for s in example.spans if s.reason == "flag"} == off
    check_shape(example)


def check_lead(parser: Any, lead: str) -> None:
    """Answers that begin (and end) with characters that may merge with the header: straddles are counted and stay untrained."""
    messages = []
    for n in range(3):
        messages += [{"role": "user", "content": "Go."}, {"role": "assistant", "content": f"{lead}Answer {n}.{lead}"}]
    example = parser.parse({"messages": messages})
    found = (example.input_ids, example.loss_mask, example.straddles)
    assert found == expected_mask(parser, example.text, expected_turns(parser.spec.name, messages))
    check_shape(example)
