"""TemplateSpec: what chatmask must know about one chat template, as data.

A spec claims things (this header, that end token, this thinking option); compiling it *probes* the tokenizer's own template for
each claim before any data is read (`probe.py`). A spec never contains code, and nothing in it can switch on trust in remote code.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Treatment = Literal["train", "mask", "reject"]
PRESERVES = "preserves thinking: not what a server with the stock template sends"

# fields that cannot change a mask: names, words, and where tokenizers are to be had
_NOT_IN_HASH = {"name", "extends", "description", "note", "family", "verified", "reference", "tokenizer", "demo_template"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TokenizerRef(_Strict):
    """Where the tokenizer is to be had when `--tokenizer` does not say."""

    id: str | None = Field(None, description="Hugging Face repository id")
    revision: str | None = Field(None, description="commit, tag or branch; null takes the default branch")


class Reference(_Strict):
    """On what the snapshots were taken, for the tests, which lay this tokenizer out from public packages."""

    vocabulary: str = Field(description="a real vocabulary, by the name that tests/vocabularies.py gives it")
    template: str | None = Field(
        None, description="public template, `package/name`; null takes the one that comes with the vocabulary"
    )
    own: bool = Field(
        True, description="false: another model's vocabulary stands in, with the template's control tokens added to it"
    )


class SpecForge(_Strict):
    """SpecForge's way to find spans, for `specforge/*`: a header, then all text up to an end, tool results included.

    Source of the rules: SpecForge, `specforge/data/parse.py` and `template.py` (August 2026), described in docs/specforge.md.
    """

    parser: Literal["general", "thinking", "glm", "openai-harmony"] = Field(
        description="`general` drops reasoning fields; `thinking` and `glm` keep them; `openai-harmony` writes the text itself"
    )
    until: str | list[str] | None = Field(
        None, description="text that ends a span in place of `end_of_turn`; it stays outside. `{n}` stands for digits"
    )
    until_included: bool = Field(False, description="the text of `until` is supervised too (longcat)")
    ignore: list[str] = Field(default_factory=list, description="text that is not supervised wherever the template writes it")


class AfterTool(_Strict):
    """How a turn begins behind a tool's result, where the template writes it otherwise than behind a question."""

    header: str = Field(description="generation prompt behind a tool's result; may be empty")
    history_header: str | None = Field(None, description="header of an earlier such turn, where the template writes it otherwise")


class Assistant(_Strict):
    """How an assistant turn begins and ends in the rendered text."""

    header: str = Field(description="text of the generation prompt: what `add_generation_prompt=True` adds; never supervised")
    history_header: str | None = Field(None, description="header of an earlier turn, where the template writes it otherwise")
    after_tool: AfterTool | None = Field(
        None, description="headers of turns behind a tool's result (DeepSeek: no role header there)"
    )
    results_in_turn: bool = Field(
        False,
        description="the template writes a call's results behind its end token, within the same turn (Gemma 4); not supervised",
    )
    end_of_turn: str | list[str] = Field(
        description="token that the model ends a turn with; supervised. A list where several do; an empty one needs allow_untrained_stop"
    )
    history_end: str | None = Field(
        None, description="token that history writes in place of the end of turn (harmony: <|end|>); not supervised, counted"
    )
    end_owner: Literal["self", "next"] = Field(
        "self", description="`next`: the stop token is the header of the following message (GLM)"
    )
    trailing: str | None = Field(None, description="text behind the end token, not sampled; null allows white space only")
    supervise_trailing: bool = Field(False, description="also train `trailing`, as SpecForge does")
    final_stop: Literal["none", "add"] = Field("none", description="`add` writes the stop token after a last turn that lacks one")

    allow_untrained_stop: bool = Field(
        False, description="accept turns behind which the template writes no end token; the model does not learn to stop there"
    )

    @property
    def ends(self) -> tuple[str, ...]:
        """The end-of-turn literals, always as a tuple."""
        return (self.end_of_turn,) if isinstance(self.end_of_turn, str) else tuple(self.end_of_turn)

    def headers_of(self, after_tool: bool) -> tuple[str, ...]:
        """Header and history header of a turn, longest first, so that a header is never taken for its own prefix."""
        of = self._of(after_tool)
        both = {of.header, of.header if of.history_header is None else of.history_header}
        return tuple(sorted(both, key=len, reverse=True))

    @property
    def headers(self) -> tuple[str, ...]:
        """All headers, behind tools' results too, longest first."""
        return tuple(sorted({*self.headers_of(False), *self.headers_of(True)}, key=len, reverse=True))

    def served_header(self, after_tool: bool) -> str:
        """The generation prompt before a turn."""
        return self._of(after_tool).header

    def _of(self, after_tool: bool) -> Assistant | AfterTool:
        return self.after_tool if after_tool and self.after_tool is not None else self

    @model_validator(mode="after")
    def _some_end(self) -> Assistant:
        if not all(self.ends) or (not self.ends and not self.allow_untrained_stop):
            raise ValueError("end_of_turn: name at least one token, or say `allow_untrained_stop: true`")
        for of in (self, self.after_tool):
            if of is not None and of.history_header is not None and of.header and of.history_header.startswith(of.header):
                raise ValueError(
                    "history_header begins with header: leave it out, what follows the header is the model's own text"
                )
        return self


class Thinking(_Strict):
    """The template's thinking option and what happens to reasoning."""

    mode: Literal["none", "on", "off", "auto"] = Field(
        "none", description="none: the template knows no reasoning; auto: on for a sample in which any assistant turn thinks"
    )
    open: str | None = Field(None, description="tag before the reasoning")
    close: str | None = Field(None, description="tag behind the reasoning")
    inline: Literal["split", "keep"] = Field("split", description="split: tags inside content become `reasoning_content`")
    join: str | None = Field(
        None,
        description="for templates that know reasoning only inside content: how it is put there, with {reasoning} and {content}, "
        "in the model's own form and without what the header already opens",
    )
    strip: bool = Field(False, description="remove all reasoning from the data")
    conflict: Literal["reject", "allow"] = Field("reject", description="what to do when the system text sets the other option")
    in_history: Literal["kept", "dropped"] = Field("kept", description="does the template keep the reasoning of earlier turns")
    option_text: dict[Literal["on", "off"], str] = Field(
        default_factory=dict, description="system text by which the template's users set the option, by mode"
    )

    @model_validator(mode="after")
    def _tags_for_modes(self) -> Thinking:
        if self.mode in ("on", "auto") and not (self.open and self.close):
            raise ValueError(f"mode `{self.mode}` needs `open` and `close`")
        if self.join is not None and (self.join.count("{reasoning}"), self.join.count("{content}")) != (1, 1):
            raise ValueError("join: name {reasoning} and {content} once each")
        return self


class Rewritten(_Strict):
    """What to do with a turn that the template renders otherwise than it was served (docs/rules.md)."""

    context: Treatment = Field("train", description="the turn is whole, what precedes it differs from the served prompt")
    emission: Treatment = Field("mask", description="a part of the turn itself is gone")


class TemplateSpec(_Strict):
    """One chat template's claims. Fields, defaults and allowed values are also what `chatmask specs schema` prints."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")
    extends: str | None = Field(
        None, description="spec (name, or file beside this one) whose fields hold where this one is silent"
    )
    description: str = ""
    family: str = ""
    note: str = Field("", description="what a user must know before choosing this spec")
    verified: list[str] = Field(default_factory=list, description="what the spec was checked against, in words")
    reference: Reference | None = Field(None, description="on what the snapshots were taken")
    tokenizer: TokenizerRef = TokenizerRef(id=None, revision=None)
    template: str = Field("tokenizer", description="`tokenizer`, a packaged .jinja name, or a .jinja file beside the spec")
    demo_template: str | None = Field(
        None, description="packaged .jinja that stands in for the tokenizer's template under --demo"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="template variables, always passed")
    preserve_thinking: bool = Field(
        False,
        description="rewrite the template so that the reasoning of every turn is written as that of the last one (docs/preserve.md); "
        "breaks parity with a server that has the stock template; implies `thinking.in_history: kept`",
    )
    roles: dict[str, str] = Field(default_factory=dict, description="role in the data -> system, user, assistant or tool")
    system: str | None = Field(None, description="system text where the data has none; `none` adds nothing")
    assistant: Assistant
    thinking: Thinking = Thinking.model_validate({})
    off: dict[str, Any] | None = Field(None, description="mode auto: fields that change for a sample without reasoning")
    sort_tools: bool = Field(False, description="sort the keys of tool schemas, as the model's own tokenizer code does (Kimi K2)")
    tool_call_ids: str | None = Field(
        None,
        description="form of call ids that the template relies on, with {name} and {index} (Kimi K2); other ids are rewritten",
    )
    tool_arguments: Literal["dict", "json"] = Field("dict", description="form in which the template wants tool arguments")
    drops: list[Literal["content_with_tool_calls", "content", "reasoning", "tool_calls", "system", "user", "tool", "tools"]] = (
        Field(default_factory=list, description="what the template is known to leave out")
    )
    prefix_stable: bool = Field(True, description="every served prompt is a prefix of the training text")
    rewritten: Rewritten = Rewritten(context="train", emission="mask")
    straddle: Literal["exclude", "include"] = Field("exclude", description="a token that straddles the start of a span")
    special_in_content: Literal["text", "reject", "allow"] = Field("text", description="control tokens quoted in content")
    specforge: SpecForge | None = Field(None, description="spans by SpecForge's rules in place of ours; only for `specforge/*`")
    date: str | None = Field(None, description="YYYY-MM-DD that `strftime_now` returns, for templates that print the date")

    @model_validator(mode="before")
    @classmethod
    def _preserved_is_kept(cls, data: Any) -> Any:
        # also over an inherited `dropped`: the rewritten template keeps reasoning, and the probe checks that it does
        if isinstance(data, dict) and data.get("preserve_thinking") is True and isinstance(data.get("thinking", {}), dict):
            return {**data, "thinking": {**data.get("thinking", {}), "in_history": "kept"}}
        return data

    @field_validator("system")
    @classmethod
    def _none_is_none(cls, value: str | None) -> str | None:
        return None if value == "none" else value

    @field_validator("date")
    @classmethod
    def _is_a_date(cls, value: str | None) -> str | None:
        if value is not None:
            datetime.date.fromisoformat(value)
        return value

    @field_validator("kwargs")
    @classmethod
    def _no_reserved(cls, value: dict[str, Any]) -> dict[str, Any]:
        reserved = {"messages", "tools", "add_generation_prompt", "documents"} & set(value)
        if reserved:
            raise ValueError(f"{', '.join(sorted(reserved))} is set by chatmask and cannot be a kwarg")
        return value

    @field_validator("roles")
    @classmethod
    def _known_roles(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = set(value.values()) - {"system", "user", "assistant", "tool"}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: roles map to system, user, assistant or tool")
        return value

    @model_validator(mode="after")
    def _auto_has_off(self) -> TemplateSpec:
        if (self.thinking.mode == "auto") != (self.off is not None):
            raise ValueError("`thinking.mode: auto` and `off:` (the fields of a sample without reasoning) go together")
        return self

    def for_sample(self, thinks: bool) -> TemplateSpec:
        """The concrete spec of one sample: itself, or under `auto` its on or off form."""
        if self.thinking.mode != "auto":
            return self
        return self._forms[0] if thinks else self._forms[1]

    @cached_property
    def _forms(self) -> tuple[TemplateSpec, TemplateSpec]:
        """Under `auto`: the on and the off form."""
        data = self.model_dump(exclude={"off"})
        on, off = (merge(data, {"thinking": {"mode": mode}}) for mode in ("on", "off"))
        return TemplateSpec.model_validate(on), TemplateSpec.model_validate(merge(off, self.off or {}))

    @property
    def warning(self) -> str:
        """What a user must be told wherever the spec is shown; empty for most."""
        return PRESERVES if self.preserve_thinking else ""

    @property
    def sha256(self) -> str:
        """Hash of everything that can change a mask (not of names, descriptions or where the tokenizer is to be had)."""
        data = self.model_dump(exclude=_NOT_IN_HASH)
        return hashlib.sha256(json.dumps(data, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: mappings field by field, everything else replaced."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
