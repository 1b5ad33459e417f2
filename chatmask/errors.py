"""Everything that chatmask raises, and every reason for which it sets a row aside.

::

    ChatmaskError
    ├── SpecError            a spec that cannot be read, or whose claims the tokenizer's template does not bear out
    ├── TemplateError        a chat template that cannot be compiled or traced
    ├── TokenizerError       a tokenizer that cannot be found, or that chatmask refuses to trust
    ├── InputError           an input path that cannot be read at all
    ├── RejectedRow          one conversation that cannot be turned into an example; carries a RejectReason
    ├── TooManyRejects       rejected rows above the limit (exit code 3)
    ├── CheckFailed          drift, zero supervision, parity or verification (exit code 1)
    │   └── DamagedDataset   a dataset that is missing, unfinished or not what its manifest says
    ├── StorageError         the output cannot be written: full disk, no permission (exit code 1)
    ├── OptionError          an argument with a value that chatmask does not know
    ├── MissingPackage       an optional package that is needed is not installed
    └── BuildLocked          another build holds the directory (exit code 75)

Each class also inherits the standard exception that it stands in for, so callers may catch either. A message says where, what
is wrong, and what to do about it. The command line turns a class into an exit code in one place (`exit_code` below).
"""

from __future__ import annotations

from enum import StrEnum


class ChatmaskError(Exception):
    """Root of all errors that chatmask raises on purpose. `exit_code` is what the command line exits with."""

    exit_code = 2


class SpecError(ChatmaskError, ValueError):
    """A spec that cannot be read, or that does not fit the tokenizer that it is used with."""


class TemplateError(ChatmaskError, ValueError):
    """A chat template that cannot be compiled, rendered or traced."""


class TokenizerError(ChatmaskError, OSError):
    """A tokenizer that cannot be found, or that does not tokenize as its own file says."""


class InputError(ChatmaskError, OSError):
    """An input that cannot be read at all (missing file, broken compression, unknown format)."""


class RejectedRow(ChatmaskError, ValueError):
    """One conversation that cannot become an example.

    Attributes:
        reason: why, as a `RejectReason` (a string enum).
        detail: what was found, in one or a few lines.
        message: index of the message at fault, or None.
    """

    exit_code = 3

    def __init__(self, reason: RejectReason, detail: str, message: int | None = None) -> None:
        where = "" if message is None else f"message {message}: "
        super().__init__(f"{reason.value}: {where}{detail} ({reason.advice})")
        self.reason = reason
        self.detail = detail
        self.message = message

    def __reduce__(self) -> tuple[type[RejectedRow], tuple[RejectReason, str, int | None]]:
        """Rebuild from the three parts, so that a worker process can hand the error to its parent."""
        return (type(self), (self.reason, self.detail, self.message))


class TooManyRejects(ChatmaskError, ValueError):
    """More rows were rejected than allowed; nothing was written. `ledger` holds the counts."""

    exit_code = 3

    def __init__(self, text: str, ledger: dict[str, object] | None = None) -> None:
        super().__init__(text)
        self.ledger = ledger or {}

    def __reduce__(self) -> tuple[type[TooManyRejects], tuple[str, dict[str, object]]]:
        """Rebuild from message and ledger."""
        return (type(self), (str(self), self.ledger))


class CheckFailed(ChatmaskError, AssertionError):
    """A check did not hold: snapshot drift, zero supervision, serve parity."""

    exit_code = 1

    def __init__(self, text: str, ledger: dict[str, object] | None = None) -> None:
        super().__init__(text)
        self.ledger = ledger or {}

    def __reduce__(self) -> tuple[type[CheckFailed], tuple[str, dict[str, object]]]:
        """Rebuild from message and ledger."""
        return (type(self), (str(self), self.ledger))


class DamagedDataset(CheckFailed):
    """A directory that is no finished chatmask dataset, or no longer the one that was built."""


class StorageError(ChatmaskError, OSError):
    """The output could not be written. The message names the path and the bytes; `errno` is the system's code."""


class OptionError(ChatmaskError, ValueError):
    """An argument with a value that chatmask does not know; the message lists the known ones."""


class MissingPackage(ChatmaskError, ImportError):
    """An optional package that is needed is not installed; the message holds the install line."""


class BuildLocked(ChatmaskError, BlockingIOError):
    """Another process is building into the same directory."""

    exit_code = 75


class RejectReason(StrEnum):
    """Why a row was set aside. The value is what stands in `rejects.jsonl`; `advice` says what to do."""

    # the line
    INVALID_JSON = "invalid_json"
    INVALID_UTF8 = "invalid_utf8"
    LONE_SURROGATE = "lone_surrogate"
    DUPLICATE_KEY = "duplicate_key"
    NOT_FINITE = "not_finite"
    TOO_DEEP = "too_deep"
    LINE_TOO_LONG = "line_too_long"
    NOT_AN_OBJECT = "not_an_object"
    # the conversation
    NO_MESSAGES = "no_messages"
    AMBIGUOUS_RECORD = "ambiguous_record"
    EMPTY_MESSAGES = "empty_messages"
    TOO_MANY_MESSAGES = "too_many_messages"
    BAD_MESSAGE = "bad_message"
    UNKNOWN_ROLE = "unknown_role"
    BAD_CONTENT = "bad_content"
    NULL_CONTENT = "null_content"
    UNSUPPORTED_PART = "unsupported_part"
    NO_ASSISTANT = "no_assistant"
    BAD_TOOLS = "bad_tools"
    BAD_TOOL_CALL = "bad_tool_call"
    BAD_TOOL_ARGUMENTS = "bad_tool_arguments"
    REASONING_CONFLICT = "reasoning_conflict"
    FLAG_CONFLICT = "flag_conflict"
    BAD_FLAG = "bad_flag"
    INLINE_THINKING_UNCLEAR = "inline_thinking_unclear"
    # the spec against the conversation
    REASONING_IN_NO_THINK_SPEC = "reasoning_in_no_think_spec"
    THINKING_OPTION_CONFLICT = "thinking_option_conflict"
    CONTROL_TEXT = "control_text"
    # the rendering
    TEMPLATE_REFUSED = "template_refused"
    TEMPLATE_DROPS_CONTENT = "template_drops_content"
    CONTENT_STEERS_TEMPLATE = "content_steers_template"
    NO_ASSISTANT_SPAN = "no_assistant_span"
    HEADER_NOT_FOUND = "header_not_found"
    END_NOT_FOUND = "end_not_found"
    HISTORY_REWRITTEN = "history_rewritten"
    FOREIGN_TEXT = "foreign_text"
    PART_NOT_FOUND = "part_not_found"
    TEXT_NOT_REPRODUCED = "text_not_reproduced"
    # the tokens
    ZERO_SUPERVISION = "zero_supervision"
    OVERLENGTH = "overlength"
    CONTROL_ID_FROM_CONTENT = "control_id_from_content"

    @property
    def advice(self) -> str:
        """One sentence that says what to do about a row with this reason."""
        return _ADVICE[self]


_ADVICE: dict[RejectReason, str] = {
    RejectReason.INVALID_JSON: "write one complete JSON object per line",
    RejectReason.INVALID_UTF8: "save the file as UTF-8",
    RejectReason.LONE_SURROGATE: "remove the unpaired \\ud800 to \\udfff escape; it is no character and has no tokens",
    RejectReason.DUPLICATE_KEY: "keep one of the two keys; readers disagree on which one counts",
    RejectReason.NOT_FINITE: "NaN, Infinity and overflowing numbers are not JSON; use null or a string",
    RejectReason.TOO_DEEP: "flatten the record, or raise --max-depth",
    RejectReason.LINE_TOO_LONG: "split the record, or raise --max-line-bytes",
    RejectReason.NOT_AN_OBJECT: "each line must be a JSON object that holds a conversation",
    RejectReason.NO_MESSAGES: "give `messages`, `conversations` or a trajectory",
    RejectReason.AMBIGUOUS_RECORD: "the record holds two different conversations; keep one",
    RejectReason.EMPTY_MESSAGES: "give at least one message",
    RejectReason.TOO_MANY_MESSAGES: "split the conversation, or raise --max-messages",
    RejectReason.BAD_MESSAGE: "each message must be an object with a role and content",
    RejectReason.UNKNOWN_ROLE: "map the role under `roles:` in the spec, or rename it",
    RejectReason.BAD_CONTENT: "content must be a string or a list of text parts",
    RejectReason.NULL_CONTENT: "only an assistant message with tool calls or reasoning may have null content",
    RejectReason.UNSUPPORTED_PART: "only text parts are supported",
    RejectReason.NO_ASSISTANT: "there is nothing to train on; remove the row or add the answer",
    RejectReason.BAD_TOOLS: "`tools` must be a list of JSON objects (or JSON text of one)",
    RejectReason.BAD_TOOL_CALL: "each tool call needs a function name",
    RejectReason.BAD_TOOL_ARGUMENTS: "arguments must be a JSON object, or JSON text of one, encoded once",
    RejectReason.REASONING_CONFLICT: "two reasoning fields, or a field and inline tags, differ; keep one",
    RejectReason.FLAG_CONFLICT: "two training flags of one message disagree; keep one",
    RejectReason.BAD_FLAG: "a training flag must be true, false, 0 or 1",
    RejectReason.INLINE_THINKING_UNCLEAR: "give the reasoning in `reasoning_content`, or set thinking.inline=keep",
    RejectReason.REASONING_IN_NO_THINK_SPEC: "use a spec with thinking, if the model has one, or --set thinking.strip=true to remove the reasoning",
    RejectReason.THINKING_OPTION_CONFLICT: "the system text sets the other thinking option; fix it, or --set thinking.conflict=allow",
    RejectReason.CONTROL_TEXT: "content quotes a control token and special_in_content is `reject`",
    RejectReason.TEMPLATE_REFUSED: "the chat template raises on this conversation",
    RejectReason.TEMPLATE_DROPS_CONTENT: "the template leaves out part of a message; declare it under `drops:` to allow it",
    RejectReason.CONTENT_STEERS_TEMPLATE: "the template reads control text in content as structure; remove the quoted token",
    RejectReason.NO_ASSISTANT_SPAN: "the rendering has no text for this assistant message",
    RejectReason.HEADER_NOT_FOUND: "the template did not write the spec's header before this assistant message",
    RejectReason.END_NOT_FOUND: "the template did not write the spec's end-of-turn token after this assistant message",
    RejectReason.HISTORY_REWRITTEN: "the template renders this turn otherwise than it was served and `rewritten` is `reject`",
    RejectReason.FOREIGN_TEXT: "the template writes another message's text inside this turn; it cannot be trained as the model's",
    RejectReason.TEXT_NOT_REPRODUCED: "give the conversation as `messages`, or the very text that this spec's template renders",
    RejectReason.PART_NOT_FOUND: "flag the whole message, or make the part longer, so that its place in the turn is known",
    RejectReason.ZERO_SUPERVISION: "no token of the row would be trained",
    RejectReason.OVERLENGTH: "longer than --max-length; raise it, or say with --overlength what becomes of such samples",
    RejectReason.CONTROL_ID_FROM_CONTENT: "the tokenizer turned quoted text into a control token; set special_in_content: reject",
}
