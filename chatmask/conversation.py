"""A parsed record becomes a `Conversation`: OpenAI-shaped messages, tools, and what the data says about training.

Shapes, in the order in which they are looked for (`turns` below is a list of messages):

===========================================  ===========================================================================
`{"messages": turns}`                        OpenAI chat; also mini-swe-agent trajectories, whose `exit` at the end goes
`{"conversations": turns}`                   ShareGPT, with `from`/`value` (or `role`/`content`)
`{"conversations": [{"messages", "tools"}]}` a log of requests: the last is used, the others are counted
`{"history": turns}`                         SWE-agent `.traj`
`{"trajectory": {...} or turns}`             one of the above, one level down
`{"prompt", "completion"}`                   each a string or turns; assistant turns of the prompt are context
===========================================  ===========================================================================

`messages`, `conversations` and `history` may be JSON text of such a list, as tables have them.

`messages`, `conversations` and `prompt`/`completion` each claim to be the whole conversation: a record in which two of them
differ is rejected, one in which they agree, or all but one are empty, is not. `history` and `trajectory` beside one of those
are the log it was made from, and are not looked at. A `system` text beside the turns becomes the first message.

Nothing is guessed and nothing of the input is changed; nested values (arguments, tools) are shared with it, so treat them as
read-only. Inline think tags, the order of roles, and the form of tool arguments are left to later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chatmask.errors import RejectedRow, RejectReason
from chatmask.records import loads

MAX_MESSAGES = 10_000

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
FLAG_KEYS = ("train", "training", "trainable", "loss", "loss_mask", "weight")
OFFSET_KEYS = ("train_detail", "training_detail")  # flags by character offsets, as axolotl reads them; refused, not overlooked
BOOKKEEPING_KEYS = frozenset({"agent", "message_type", "is_demo", "thought", "action", "cache_control", "tags", "tool_call_ids"})

# Set on an assistant message that was read from a rendered text, where the template would have left its reasoning out.
REASONING_UNKNOWN = "reasoning_unknown"

# Lists of messages that may be given as JSON text, which is how tables keep the nulls of arguments. A prompt is text by itself.
_TEXT_KEYS = frozenset({"messages", "conversations", "history"})

# What mini-swe-agent hangs on a message for itself: costs and raw responses, the time, and what litellm adds.
_MINI_KEYS = frozenset({"extra", "timestamp", "provider_specific_fields"})

# `function_call` is no role of OpenAI's: it marks a ShareGPT turn whose value is a call, and becomes `assistant`.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}

_READ_KEYS = frozenset(
    {
        "role",
        "content",
        "tool_calls",
        "function_call",
        "tool_call_id",
        "name",
        REASONING_UNKNOWN,
        *REASONING_KEYS,
        *FLAG_KEYS,
        *BOOKKEEPING_KEYS,
    }
)


# What the parts of a content say about training: start, end (in characters of the joined content) and whether to train.
PartFlags = tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True)
class Conversation:
    """What was said, in OpenAI's shape.

    Attributes:
        messages: keys `role`, `content` (string or None) and, where given, `reasoning_content`, `tool_calls`, `tool_call_id`,
            `name`, `is_error` (of a tool message, as a boolean) and keys that chatmask does not know. Arguments of calls stand
            as given: a dict or JSON text.
        tools: `{"type": "function", "function": {...}}` each, or None.
        flags: for each message, whether the data says it may be trained; None where it says nothing.
        notes: counts of what was set aside on the way (`conversations_ignored`, `exit_messages`, `system_from_record`).
        part_flags: empty if no part of a content has a flag of its own. Else for each message the ranges whose parts have one,
            in order, not empty and without overlap; neighbours that say the same are one range. A message's own flag never
            contradicts them; its place in `prompt` or `completion` may, and then the part is nearer to the text.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    flags: tuple[bool | None, ...]
    notes: dict[str, int] = field(default_factory=dict)
    part_flags: tuple[PartFlags, ...] = ()

    def parts_of(self, index: int) -> PartFlags:
        """What the parts of a message's content say about training; empty where they say nothing."""
        return self.part_flags[index] if self.part_flags else ()

    def first(self, count: int) -> Conversation:
        """The conversation up to its first `count` messages, without notes."""
        return Conversation(self.messages[:count], self.tools, self.flags[:count], {}, self.part_flags[:count])

    def excluded(self, index: int, answer: int | None = None) -> str:
        """Why the data keeps a whole assistant message from training: `flag`, `part_flag` (all that it says is content, and all of
        that has flags against it), `history_rewritten` (read from a rendered text, which does not tell whether it had reasoning),
        or '' where it does not.

        Args:
            index: the message.
            answer: where its answer begins in content, if its reasoning is not trained; None if that is.
        """
        parts, message = self.parts_of(index), self.messages[index]
        if self.flags[index] is False and not any(train for _, _, train in parts):
            return "flag"
        if message.get(REASONING_UNKNOWN):
            return "history_rewritten"
        if not parts:
            return ""
        content = message.get("content") or ""
        thinks = answer is None and (message.get("reasoning_content") or "").strip()
        if message.get("tool_calls") or thinks or not content[answer or 0 :].strip():
            return ""
        against = {i for start, end, train in parts if not train for i in range(start, end)}
        return "part_flag" if all(i in against or char.isspace() for i, char in enumerate(content) if i >= (answer or 0)) else ""


def flags_within(flags: PartFlags, start: int, end: int) -> PartFlags:
    """The flags of a stretch of content, counted from where it begins."""
    cut = ((max(a, start) - start, min(b, end) - start, train) for a, b, train in flags)
    return tuple((a, b, train) for a, b, train in cut if b > a)


@dataclass(frozen=True)
class _Turns:
    """Raw messages with what their place in the record says about training (None: nothing), and where tools are looked for."""

    items: list[Any]
    implied: list[bool | None]
    owner: Mapping[str, Any]
    notes: dict[str, int] = field(default_factory=dict)


def normalise(data: Mapping[str, Any], roles: Mapping[str, str] | None = None, max_messages: int = MAX_MESSAGES) -> Conversation:
    """Turn a parsed record into a conversation.

    Args:
        data: the JSON object of one record; not changed.
        roles: more names of roles, or other meanings of known ones, such as `{"critic": "user"}`.
        max_messages: most messages allowed.

    Raises:
        RejectedRow: with the message index and the field in the text. See the section "the conversation" of `RejectReason`.
    """
    plain = _plain_chat(data, roles, max_messages)
    if plain is not None:
        return plain
    names = {**ROLES, **(roles or {})}
    found = [turns for turns in _candidates(data) if turns.items]
    if not found:
        _refuse_absent(data)
    tellings = [_converse(turns, data, names, max_messages) for turns in found]
    first, others = tellings[0], tellings[1:]
    if any(other.messages != first.messages or other.tools != first.tools for other in others):
        present = [key for key in ("messages", "conversations", "prompt") if data.get(key)]
        raise RejectedRow(RejectReason.AMBIGUOUS_RECORD, f"{' and '.join(f'`{key}`' for key in present)} differ")
    flags = tuple(
        _agreed(index, column) for index, column in enumerate(zip(first.flags, *(o.flags for o in others), strict=True))
    )
    return replace(first, flags=flags, part_flags=_agreed_parts(tellings))


_NOT_PLAIN = frozenset(
    {
        "conversations",
        "prompt",
        "completion",
        "history",
        "trajectory",
        "trajectory_format",
        "system",
        "tools",
        "functions",
        "text",
        *FLAG_KEYS,
    }
)


def _plain_chat(data: Mapping[str, Any], roles: Mapping[str, str] | None, max_messages: int) -> Conversation | None:
    """A conversation that is in OpenAI's shape already and holds nothing but text; None for any other. It is most of what is read."""
    items = data.get("messages")
    if type(items) is not list or len(items) > max_messages or not _NOT_PLAIN.isdisjoint(data):
        return None
    answered = False
    for item in items:
        if type(item) is not dict or len(item) != 2:
            return None
        role, content = item.get("role"), item.get("content")
        if type(content) is not str or type(role) is not str or role not in _OPENAI_ROLES or (roles and role in roles):
            return None
        answered = answered or role == "assistant"
    return Conversation(list(items), None, (None,) * len(items), {}) if answered else None


_OPENAI_ROLES = frozenset({"system", "user", "assistant", "tool"})


def _agreed(index: int, flags: tuple[bool | None, ...]) -> bool | None:
    """What several tellings of one message say about training."""
    said = {flag for flag in flags if flag is not None}
    if len(said) > 1:
        raise RejectedRow(RejectReason.FLAG_CONFLICT, "stands twice in the record, once to be trained and once not", index)
    return next(iter(said), None)


def _agreed_parts(tellings: list[Conversation]) -> tuple[PartFlags, ...]:
    """What several tellings of one conversation say about its parts; one that says nothing does not contradict."""
    spoken = [telling.part_flags for telling in tellings if telling.part_flags]
    if not spoken:
        return ()
    agreed: list[PartFlags] = []
    for index, column in enumerate(zip(*spoken, strict=True)):
        said = {parts for parts in column if parts}
        flags = {flag for parts in said for _, _, flag in parts}
        # Within one telling this was looked at before, and there the flag of a place in the prompt gives way.
        other = {t.flags[index] for t in tellings if not (t.part_flags and t.part_flags[index])} - {None}
        if len(said) > 1 or any(flag != one for flag in flags for one in other):
            raise RejectedRow(RejectReason.FLAG_CONFLICT, "stands twice in the record, and its parts differ in flags", index)
        agreed.append(next(iter(said), ()))
    return tuple(agreed)


# --- where the messages are -------------------------------------------------------------------------------------------


def _candidates(data: Mapping[str, Any]) -> list[_Turns]:
    """All that claims to be the whole conversation; if nothing does, the log of a run."""
    found: list[_Turns] = []
    if data.get("messages") is not None:
        found.append(_messages(data))
    if data.get("conversations") is not None:
        found.append(_conversations(data))
    if data.get("prompt") is not None and data.get("completion") is not None:
        found.append(_prompt_completion(data))
    if any(turns.items for turns in found):
        return found
    if data.get("history") is not None:
        return [_plain(_list(data, "history"), data)]
    log = data.get("trajectory")
    if isinstance(log, Mapping):
        inner = _candidates(log)
        return [_Turns(turns.items, turns.implied, _over(data, turns.owner), turns.notes) for turns in inner]
    # SWE-agent's own `trajectory` is a list of steps, which are no messages; there `history` has them.
    if isinstance(log, list) and log and all(isinstance(item, Mapping) and "role" in item for item in log):
        return [_plain(log, data)]
    return found


def _plain(items: list[Any], owner: Mapping[str, Any], notes: dict[str, int] | None = None) -> _Turns:
    return _Turns(items, [None] * len(items), owner, notes or {})


def _over(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of an inner record before those of the outer one; a null says nothing."""
    return {**outer, **{key: value for key, value in inner.items() if value is not None}}


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data[key]
    if isinstance(value, str) and key in _TEXT_KEYS:
        try:
            value = loads(value.encode("utf-8", "surrogatepass"))
        except RejectedRow as error:
            raise RejectedRow(RejectReason.NO_MESSAGES, f"the text of `{key}` is no JSON: {error.detail}") from None
    if not isinstance(value, list):
        raise RejectedRow(RejectReason.NO_MESSAGES, f"`{key}` is {_kind(value)}, not a list")
    return value


def _messages(data: Mapping[str, Any]) -> _Turns:
    items = _list(data, "messages")
    if not str(data.get("trajectory_format", "")).startswith("mini-swe-agent"):
        return _plain(items, data)
    # mini-swe-agent 2 ends its log with an entry of role `exit`, which no model saw. Up to version 1 the log ends with a user
    # message instead, which is left: it follows all that is trained.
    shown = len(items)
    while shown and isinstance(items[shown - 1], Mapping) and items[shown - 1].get("role") == "exit":
        shown -= 1
    ended = len(items) - shown
    kept = [
        {key: value for key, value in item.items() if key not in _MINI_KEYS} if isinstance(item, Mapping) else item
        for item in items[:shown]
    ]
    return _plain(kept, data, {"exit_messages": ended} if ended else None)


def _conversations(data: Mapping[str, Any]) -> _Turns:
    items = _list(data, "conversations")
    nested = [isinstance(item, Mapping) and "messages" in item for item in items]
    if not any(nested):
        return _plain(items, data)
    if not all(nested):
        where = nested.index(False)
        raise RejectedRow(RejectReason.BAD_MESSAGE, f"`conversations[{where}]` has no `messages`, others have")
    notes = {"conversations_ignored": len(items) - 1} if len(items) > 1 else None
    return _plain(_list(items[-1], "messages"), _over(data, items[-1]), notes)


def _prompt_completion(data: Mapping[str, Any]) -> _Turns:
    sides: list[list[Any]] = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = data[key]
        sides.append([{"role": role, "content": value}] if isinstance(value, str) else _list(data, key))
    prompt, completion = sides
    implied: list[bool | None] = [place == 1 for place, side in enumerate(sides) for _ in side]
    return _Turns(prompt + completion, implied, data)


def _refuse_absent(data: Mapping[str, Any]) -> None:
    # A text that is here was read already, as an empty list.
    kinds = {key: (list, str) if key in _TEXT_KEYS else list for key in ("messages", "conversations", "history", "prompt")}
    empty = [key for key, kind in kinds.items() if isinstance(data.get(key), kind)]
    if empty:
        raise RejectedRow(RejectReason.EMPTY_MESSAGES, f"`{empty[0]}` is an empty list")
    keys = ", ".join(sorted(str(key)[:40] for key in data)[:10]) or "none"
    raise RejectedRow(RejectReason.NO_MESSAGES, f"found no conversation; the keys are: {keys}")


# --- the whole --------------------------------------------------------------------------------------------------------


def _converse(turns: _Turns, data: Mapping[str, Any], roles: Mapping[str, str], max_messages: int) -> Conversation:
    if len(turns.items) > max_messages:
        raise RejectedRow(RejectReason.TOO_MANY_MESSAGES, f"{len(turns.items):,} messages; the limit is {max_messages:,}")
    refuse_flags_of_record(turns.owner)
    messages: list[dict[str, Any]] = []
    flags: list[bool | None] = []
    part_flags: list[PartFlags] = []
    for index, (item, implied) in enumerate(zip(turns.items, turns.implied, strict=True)):
        if type(item) is not dict and not isinstance(item, Mapping):
            raise RejectedRow(RejectReason.BAD_MESSAGE, f"is {_kind(item)}, not an object", index)
        plain = _plain_message(item, roles, index)
        if plain is not None:
            flags.append(implied if plain["role"] == "assistant" else None)
            messages.append(plain)
            part_flags.append(())
            continue
        message, parts = _message(item, roles, index)
        flag = _flag(item, index)
        against = next((part for part in parts if flag is not None and part[2] != flag), None)
        if against is not None:
            says = "train" if flag else "do not train"
            detail = f"says {says}, and its part at characters {against[0]} to {against[1]} says the opposite"
            raise RejectedRow(RejectReason.FLAG_CONFLICT, detail, index)
        # A message's own flag is nearer to it than its place in `prompt` or `completion`, so it counts first.
        flags.append(implied if flag is None and message["role"] == "assistant" else flag)
        messages.append(message)
        part_flags.append(parts)
    if not any(message["role"] == "assistant" for message in messages):
        raise RejectedRow(RejectReason.NO_ASSISTANT, f"none of the {len(messages)} messages is the assistant's")
    notes = dict(turns.notes)
    system = turns.owner.get("system")
    if system is not None and system != "" and system != []:
        text, parts = _content(system, "system", None)
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": text})
            flags.insert(0, None)
            part_flags.insert(0, parts)
            notes["system_from_record"] = 1
        elif messages[0]["content"] != text:
            raise RejectedRow(RejectReason.AMBIGUOUS_RECORD, "`system` and the first message are different system texts", 0)
    said_of_parts = tuple(part_flags) if any(part_flags) else ()
    return Conversation(messages, _tools(turns.owner), tuple(flags), notes, said_of_parts)


def refuse_flags_of_record(owner: Mapping[str, Any]) -> None:
    """A record that says of itself, beside its messages, that it is not to be trained, or which tokens are.

    A positive number under these names may be anything (a loss that was measured, a weight of a mixture) and says nothing here.

    Raises:
        RejectedRow: `bad_flag`.
    """
    for key in FLAG_KEYS:
        value = owner.get(key)
        if isinstance(value, list) or (isinstance(value, (bool, int, float)) and not value):
            raise RejectedRow(
                RejectReason.BAD_FLAG,
                f"`{key}` stands beside the messages ({_kind(value)}); give it to each message that it is about, or leave the record out",
            )


# --- one message ------------------------------------------------------------------------------------------------------


_PLAIN_KEYS = frozenset({"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"})
_CALL_KEYS = {"id", "type", "function"}
_FUNCTION_KEYS = {"name", "arguments"}


def _plain_message(item: Mapping[str, Any], roles: Mapping[str, str], index: int) -> dict[str, Any] | None:
    """A message that is in OpenAI's shape already and says nothing about training, as `_message` gives it; None for any other."""
    if type(item) is not dict or not item.keys() <= _PLAIN_KEYS:
        return None
    role, content, calls = item.get("role"), item.get("content"), item.get("tool_calls")
    if type(role) is not str or role not in _OPENAI_ROLES or roles.get(role) != role:
        return None
    if type(content) is not str and (content is not None or not calls):
        return None
    message: dict[str, Any] = {"role": role, "content": content}
    reasoning = item.get("reasoning_content")
    if role != "assistant" and (calls or reasoning is not None):
        return None
    for key in ("reasoning_content", "tool_calls", "tool_call_id", "name"):
        value = item.get(key)
        if value is None:
            continue
        if key == "tool_calls":
            if type(value) is not list or not value:
                return None
            value = [_call(call, f"tool_calls[{k}]", index) for k, call in enumerate(value)]
        elif type(value) is not str:
            return None
        message[key] = value
    return message


def _message(item: Mapping[str, Any], roles: Mapping[str, str], index: int) -> tuple[dict[str, Any], PartFlags]:
    sharegpt = "from" in item and item.get("role") is None
    if item.get("from") is not None and item.get("role") is not None:
        said = [roles.get(str(item[key]), item[key]) for key in ("role", "from")]
        if said[0] != said[1] or (None not in (texts := (item.get("value"), item.get("content"))) and texts[0] != texts[1]):
            raise RejectedRow(RejectReason.BAD_MESSAGE, "`role`/`content` and `from`/`value` differ", index)
    role = _role(item["from"] if sharegpt else item.get("role"), roles, index)
    given = item.get("value") if item.get("from") is not None and item.get("content") is None else item.get("content")
    if sharegpt and item.get("value") is not None and given != item["value"]:
        raise RejectedRow(RejectReason.BAD_MESSAGE, "`value` and `content` differ", index)
    calls = _tool_calls(item, index)
    if role == "function_call":
        if calls is not None:
            raise RejectedRow(RejectReason.BAD_TOOL_CALL, "has both a function_call text and `tool_calls`", index)
        role, calls, given = "assistant", _calls_of_text(given, index), None
    reasoning = _reasoning(item, index)
    if role != "assistant":
        for what, value in (("tool_calls", calls), ("reasoning", reasoning)):
            if value:
                raise RejectedRow(RejectReason.BAD_MESSAGE, f"has `{what}`, but its role is {role}", index)
    content, parts = _content(given, "value" if sharegpt else "content", index)
    if content is None and not (role == "assistant" and (calls or reasoning)):
        raise RejectedRow(RejectReason.NULL_CONTENT, f"`content` of this {role} message is null or missing", index)

    message: dict[str, Any] = {"role": role, "content": content}
    said = item["from"] if sharegpt else item["role"]
    if said not in ROLES:
        message["role_in_data"] = said  # a name that only the spec knows: its template may write such roles otherwise
    if reasoning is not None and role == "assistant":
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    result_of = _tool_call_id(item, index)
    if result_of is not None:
        message["tool_call_id"] = result_of
    name = item.get("name")
    if name is not None:
        message["name"] = name
    for key, value in item.items():
        if value is not None and key not in _READ_KEYS and not ("from" in item and key in ("from", "value")):
            message[key] = value
    if role == "tool" and "is_error" in message:
        message["is_error"] = _is_error(message["is_error"], index)
    return message, parts


def _is_error(value: Any, index: int) -> bool:
    """What a tool result says about its call; text such as "false" is no answer, since it would count as true."""
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        shown = str(value)[:40] if isinstance(value, (int, float)) else _kind(value)
        raise RejectedRow(RejectReason.BAD_MESSAGE, f"`is_error` is {shown}; it must be true, false, 0 or 1", index)
    return bool(value)


def _role(role: Any, roles: Mapping[str, str], index: int) -> str:
    if not isinstance(role, str):
        raise RejectedRow(RejectReason.BAD_MESSAGE, f"`role` is {_kind(role)}, not a string", index)
    if role not in roles:
        raise RejectedRow(RejectReason.UNKNOWN_ROLE, f"`role` is {role[:60]!r}", index)
    return roles[role]


def _content(value: Any, name: str, index: int | None) -> tuple[str | None, PartFlags]:
    """Content as one string (text parts are joined without anything between them), or None where it is null; flags of parts."""
    if value is None or isinstance(value, str):
        return value, ()
    if not isinstance(value, list):
        raise RejectedRow(RejectReason.BAD_CONTENT, f"`{name}` is {_kind(value)}, not a string or a list of parts", index)
    texts: list[str] = []
    flags: list[tuple[int, int, bool]] = []
    end = 0
    for k, part in enumerate(value):
        text, flag = part, None
        if isinstance(part, Mapping):
            if part.get("type") != "text":
                raise RejectedRow(RejectReason.UNSUPPORTED_PART, f"`{name}[{k}]` has type {str(part.get('type'))[:60]!r}", index)
            text, flag = part.get("text"), _flag(part, index, f"{name}[{k}].")
        if not isinstance(text, str):
            raise RejectedRow(RejectReason.BAD_CONTENT, f"the text of `{name}[{k}]` is {_kind(text)}", index)
        texts.append(text)
        begin, end = end, end + len(text)
        if flag is None or begin == end:
            continue
        if flags and flags[-1][1:] == (begin, flag):
            begin = flags.pop()[0]
        flags.append((begin, end, flag))
    return "".join(texts), tuple(flags)


def _reasoning(item: Mapping[str, Any], index: int) -> str | None:
    """The one reasoning text under any of its names; an empty one says nothing against a filled one."""
    given: dict[str, str] = {}
    for key in REASONING_KEYS:
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise RejectedRow(RejectReason.BAD_MESSAGE, f"`{key}` is {_kind(value)}, not a string", index)
        given[key] = value
    for key in ("reasoning_details", "thinking_blocks"):
        if item.get(key) not in (None, [], "") and not any(given.values()):
            raise RejectedRow(
                RejectReason.BAD_MESSAGE,
                f"`{key}` is reasoning in a form that is not read; give its text as `reasoning_content`",
                index,
            )
    filled = {key: value for key, value in given.items() if value}
    if len(set(filled.values())) > 1:
        raise RejectedRow(RejectReason.REASONING_CONFLICT, f"{' and '.join(f'`{key}`' for key in filled)} differ", index)
    return next(iter(filled.values()), "" if given else None)


def _flag(item: Mapping[str, Any], index: int | None, where: str = "") -> bool | None:
    """Whether a message or part itself says that it may be trained. A demonstration (`is_demo`) says no."""
    for key in OFFSET_KEYS:
        if item.get(key) not in (None, []):
            raise RejectedRow(
                RejectReason.BAD_FLAG,
                f"`{where}{key}`: flags by offsets are not read; give content as text parts, each with its own `train`",
                index,
            )
    given: dict[str, bool] = {}
    for key in (*FLAG_KEYS, "is_demo"):
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            shown = str(value)[:40] if isinstance(value, (int, float)) else _kind(value)
            raise RejectedRow(RejectReason.BAD_FLAG, f"`{where}{key}` is {shown}", index)
        if key != "is_demo":
            given[key] = bool(value)
        elif value:
            given[key] = False
    if len(set(given.values())) > 1:
        shown = ", ".join(f"`{where}{key}` says {'train' if value else 'do not train'}" for key, value in given.items())
        raise RejectedRow(RejectReason.FLAG_CONFLICT, shown, index)
    return next(iter(given.values()), None)


def _tool_call_id(item: Mapping[str, Any], index: int) -> str | None:
    """`tool_call_id`, or the only one of SWE-agent's `tool_call_ids`."""
    many = item.get("tool_call_ids")
    ids = {item["tool_call_id"]} if isinstance(item.get("tool_call_id"), str) else set()
    if item.get("tool_call_id") is not None and not ids:
        raise RejectedRow(RejectReason.BAD_MESSAGE, f"`tool_call_id` is {_kind(item['tool_call_id'])}, not a string", index)
    if many is not None:
        if not isinstance(many, list) or not all(isinstance(one, str) for one in many):
            raise RejectedRow(RejectReason.BAD_MESSAGE, "`tool_call_ids` is not a list of strings", index)
        ids.update(many)
    if len(ids) > 1:
        raise RejectedRow(RejectReason.BAD_MESSAGE, "`tool_call_ids` names several calls; give one message a call", index)
    return next(iter(ids), None)


# --- tool calls and tools ---------------------------------------------------------------------------------------------


def _tool_calls(item: Mapping[str, Any], index: int) -> list[dict[str, Any]] | None:
    """`tool_calls`, or the older `function_call`; None where there is no call."""
    value = item.get("tool_calls")
    if value is not None and not isinstance(value, list):
        raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`tool_calls` is {_kind(value)}, not a list", index)
    calls = [_call(call, f"tool_calls[{k}]", index) for k, call in enumerate(value or [])]
    older = item.get("function_call")
    if older is not None:
        call = _call(older, "function_call", index)
        if calls and [one["function"] for one in calls] != [call["function"]]:
            raise RejectedRow(RejectReason.BAD_TOOL_CALL, "`tool_calls` and `function_call` differ", index)
        calls = calls or [call]
    return calls or None


def _calls_of_text(value: Any, index: int) -> list[dict[str, Any]]:
    """The calls of a ShareGPT `function_call` turn, whose value is JSON text of one call or a list of them."""
    if isinstance(value, str):
        try:
            value = loads(value.encode("utf-8", "surrogatepass"))
        except RejectedRow as error:
            raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"the function_call text is no JSON: {error.detail}", index) from None
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise RejectedRow(RejectReason.BAD_TOOL_CALL, "the function_call text is an empty list", index)
    return [_call(call, f"function_call[{k}]", index) for k, call in enumerate(calls)]


def _call(call: Any, name: str, index: int) -> dict[str, Any]:
    """One call as `{"id"?, "type", "function": {"name", "arguments"}}`; no arguments are an empty object."""
    if type(call) is dict and call.keys() == _CALL_KEYS and type(call["function"]) is dict and call["type"] == "function":
        plain = call["function"]
        usual = plain.keys() == _FUNCTION_KEYS and type(plain["arguments"]) in (dict, str)
        if usual and type(plain["name"]) is str and plain["name"] and type(call["id"]) is str:
            return {"id": call["id"], "type": "function", "function": {key: plain[key] for key in ("name", "arguments")}}
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`{name}` is no object with a function", index)
    if call.get("type") not in (None, "function"):
        raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`{name}.type` is {str(call['type'])[:60]!r}, not 'function'", index)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`{name}` has no function name", index)
    for key in FLAG_KEYS:
        if call.get(key) is not None or function.get(key) is not None:
            raise RejectedRow(
                RejectReason.BAD_FLAG, f"`{name}` has `{key}`: a call is trained with its turn; flag the message instead", index
            )
    arguments = function.get("arguments")
    outer = call.get("arguments") if function is not call else None
    if outer is not None:
        if arguments is not None and arguments != outer:
            raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`{name}` has arguments twice, and they differ", index)
        arguments = outer
    twice = [key for key in ("parameters", "args", "input", "kwargs") if arguments is not None and function.get(key) is not None]
    if twice:
        raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`{name}` has both `arguments` and `{twice[0]}`; keep one", index)
    if arguments is None:
        other = [key for key in ("parameters", "args", "input", "kwargs") if function.get(key) is not None]
        if other:
            raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`{name}` has `{other[0]}`; call it `arguments`", index)
        arguments = {}
    if not isinstance(arguments, (Mapping, str)):
        raise RejectedRow(RejectReason.BAD_TOOL_ARGUMENTS, f"`{name}` has arguments that are {_kind(arguments)}", index)
    identity = call.get("id")
    if identity is not None and not isinstance(identity, str):
        raise RejectedRow(RejectReason.BAD_TOOL_CALL, f"`{name}.id` is {_kind(identity)}, not a string", index)
    head = {} if identity is None else {"id": identity}
    return {**head, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(owner: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a record, from `tools` or the older `functions`; None where it has none."""
    found = [tools for key in ("tools", "functions") if (tools := _tool_list(owner.get(key), key))]
    if len(found) == 2 and found[0] != found[1]:
        raise RejectedRow(RejectReason.BAD_TOOLS, "`tools` and `functions` differ; keep one")
    return found[0] if found else None


def _tool_list(value: Any, name: str) -> list[dict[str, Any]]:
    if isinstance(value, str) and value.strip():
        try:
            value = loads(value.encode("utf-8", "surrogatepass"))
        except RejectedRow as error:
            raise RejectedRow(RejectReason.BAD_TOOLS, f"the text of `{name}` is no JSON: {error.detail}") from None
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return []
    if not isinstance(value, list):
        raise RejectedRow(RejectReason.BAD_TOOLS, f"`{name}` is {_kind(value)}, not a list")
    return [_tool(tool, f"{name}[{k}]") for k, tool in enumerate(value)]


def _tool(tool: Any, name: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RejectedRow(RejectReason.BAD_TOOLS, f"`{name}` is {_kind(tool)}, not an object")
    if tool.get("type") not in (None, "function"):
        raise RejectedRow(RejectReason.BAD_TOOLS, f"`{name}.type` is {str(tool['type'])[:60]!r}, not 'function'")
    wrapped = tool.get("function")
    function = wrapped if wrapped is not None else {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RejectedRow(RejectReason.BAD_TOOLS, f"`{name}` has no function name")
    if "input_schema" in function:
        raise RejectedRow(RejectReason.BAD_TOOLS, f"`{name}` has `input_schema`; call it `parameters`")
    rest = {key: value for key, value in tool.items() if key not in ("type", "function")} if wrapped is not None else {}
    return {"type": "function", "function": dict(function), **rest}


def _kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
