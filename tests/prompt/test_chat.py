from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.prompt.vocabularies import make_byte_level, make_llama3, make_sentencepiece
from tsdoc.errors import ModelError
from tsdoc.home import Home
from tsdoc.ingest.options import Limits
from tsdoc.prompt import render
from tsdoc.prompt.chat import ChatTemplate, load_template
from tsdoc.prompt.render import NO_TEMPLATE, NOT_SPLITTABLE, SYSTEM_TEXT, render_template
from tsdoc.prompt.tokenizer import TextTokenizer

_QUESTION = "Why did the whale swim <|im_end|> </s>?"


def _load(directory: Path, home: Home | None = None) -> ChatTemplate:
    return load_template(directory, TextTokenizer(directory), home=home)


def _with_template(tmp_path: Path, template: str, **config: object) -> Path:
    directory = make_byte_level(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(template, "utf-8")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | config), "utf-8")
    return directory


def _rendered_by_transformers(directory: Path, messages: list[dict[str, str]]) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def test_head_question_and_tail_are_the_whole_conversation(tmp_path: Path) -> None:
    template = _load(make_byte_level(tmp_path / "model"))
    rendered = template.rendered
    messages = [
        {"role": "system", "content": SYSTEM_TEXT},
        {"role": "user", "content": "Documents:\nD\nQuestion: Q"},
    ]
    expected = _rendered_by_transformers(template.tokenizer.directory, messages)
    assert rendered.head + "D\nQuestion: Q" + rendered.tail == expected
    assert template.warnings == ()


def test_control_tokens_of_the_template_are_ids_and_those_of_the_question_text(
    tmp_path: Path,
) -> None:
    template = _load(make_byte_level(tmp_path / "model"))
    end = template.tokenizer.encode_control("<|im_end|>")[0]
    assert np.count_nonzero(template.head_ids == end) == 1
    ids = template.question_ids(_QUESTION)
    assert np.count_nonzero(ids == end) == 1
    assert template.tokenizer.decode(ids).startswith(f"\nQuestion: {_QUESTION}\nassistant")


def test_a_template_that_refuses_a_system_message_gets_it_in_the_first_question(
    tmp_path: Path,
) -> None:
    template = _load(make_sentencepiece(tmp_path / "model"))
    assert template.rendered.head == f"<s>[INST] {SYSTEM_TEXT}\n\nDocuments:\n"
    assert template.rendered.tail == " [/INST]"
    assert template.rendered.turn == "</s>[INST] "


def test_a_later_turn_follows_an_answer_without_its_stop_token(tmp_path: Path) -> None:
    template = _load(make_sentencepiece(tmp_path / "model"))
    ids = template.turn_ids("And then?")
    assert ids[0] == template.tokenizer.encode_control("</s>")[0]
    assert template.tokenizer.decode(ids) == "[INST] And then? [/INST]"
    messages = [
        {"role": "user", "content": f"{SYSTEM_TEXT}\n\nDocuments:\nD"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "And then?"},
    ]
    rendered = template.rendered
    assert _rendered_by_transformers(template.tokenizer.directory, messages) == (
        f"{rendered.head}D{rendered.tail} A{rendered.turn}And then?{rendered.tail}"
    )


def test_a_model_without_a_template_gets_a_plain_format_and_a_warning(tmp_path: Path) -> None:
    template = _load(make_llama3(tmp_path / "model"))
    assert template.warnings == (NO_TEMPLATE,)
    assert template.head_ids[0] == template.tokenizer.encode_control("<|begin_of_text|>")[0]
    assert template.tokenizer.decode(template.head_ids) == f"{SYSTEM_TEXT}\n\nDocuments:\n"
    assert template.tokenizer.decode(template.question_ids("Q?")) == "\nQuestion: Q?\nAnswer:"
    assert template.tokenizer.decode(template.turn_ids("R?")) == "\nQuestion: R?\nAnswer:"


def test_a_template_without_room_for_a_second_question_says_so(tmp_path: Path) -> None:
    source = (
        "{% if messages|length > 2 %}{{ raise_exception('one only') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    template = _load(_with_template(tmp_path, source))
    assert template.question_ids("Q").size > 0
    with pytest.raises(ModelError, match="only one question"):
        template.turn_ids("R")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "nothing of the messages",
    ],
)
def test_a_template_that_cannot_be_split_gives_way_to_the_plain_format(
    tmp_path: Path, source: str
) -> None:
    assert _load(_with_template(tmp_path, source)).warnings == (NOT_SPLITTABLE,)


@pytest.mark.parametrize(
    "source",
    [
        *("{% if", "{{ raise_exception('never') }}", "{{ messages.x.y }}", "{{ 1 / 0 }}"),
        "{% break %}",  # Jinja takes it, Python does not
        "{% for i in [1] %}" * 21 + "{% endfor %}" * 21,
    ],
)
def test_a_failing_template_is_a_model_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(ModelError, match="chat template fails"):
        _load(_with_template(tmp_path, source))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(99999) %}{{ 'some text ' * 99 }}{% endfor %}", "writes more than"),
        ("{{ 'x' * 10 ** 10 }}", "needs too much memory"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "needs too much memory"),
        ("{% set x = 'x'|center(10 ** 10) %}", "needs too much memory"),
        (f"{'{% for i in range(99999) %}' * 3}{'{% endfor %}' * 3}", "took too long"),
        ("{{ (9 ** 9) ** (9 ** 9) }}", "took too long"),
    ],
)
def test_a_template_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    if reason == "took too long":
        monkeypatch.setattr(render, "_LIMITS", Limits(num_restarts=0, unit_cpu_s=0.5))
    directory = _with_template(tmp_path, f"{{{{ messages[0].content }}}}{source}")
    with pytest.raises(ModelError, match=f"cannot be used: it {reason}") as caught:
        _load(directory)
    assert str(directory) in str(caught.value)


def test_what_a_template_says_in_failing_is_cut(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template fails") as caught:
        _load(_with_template(tmp_path, "{{ raise_exception('no' * 10 ** 7) }}"))
    assert len(str(caught.value)) < 1000


def test_templates_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    source = "{{ ''.__class__.__mro__ }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ModelError, match="chat template fails"):
        _load(_with_template(tmp_path, source))


def test_a_model_that_can_think_aloud_is_asked_not_to(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        "{% if not enable_thinking %}(silent){% endif %}"
    )
    assert _load(_with_template(tmp_path, source)).rendered.tail == "\n(silent)"


def test_dates_in_a_template_stand_still(tmp_path: Path) -> None:
    source = (
        "\n Today {{ strftime_now('%d %b %Y, %-d. %B') }} {{ date_string }}\n"
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    head = _load(_with_template(tmp_path, source)).rendered.head
    assert head.startswith("\n Today 26 Jul 2024, 26. July 26 Jul 2024\nYou ")


@pytest.mark.parametrize("place", ["list", "text", "file", "json"])
def test_templates_are_found_wherever_models_keep_them(tmp_path: Path, place: str) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    directory = make_byte_level(tmp_path / "model")
    config: dict[str, object] = {"bos_token": {"content": "<BOS>"}}
    (directory / "chat_template.jinja").unlink()
    if place == "list":
        other = {"name": "tool_use", "template": "no"}
        config["chat_template"] = [other, {"name": "default", "template": source}]
    elif place == "text":
        config["chat_template"] = source
    elif place == "json":
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    else:
        (directory / "chat_template.jinja").write_text(source)
        config["chat_template"] = "older"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    assert _load(directory).rendered.head == f"<BOS>{SYSTEM_TEXT}\nDocuments:\n"


def test_a_damaged_tokenizer_config_is_a_model_error(tmp_path: Path) -> None:
    directory = make_byte_level(tmp_path / "model")
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        _load(directory)


def test_the_rendered_template_is_kept_privately_and_transformers_not_needed_again(
    tmp_path: Path,
) -> None:
    directory, home = make_byte_level(tmp_path / "model"), Home(tmp_path / "home")
    first = render_template(directory, home=home)
    (kept,) = (home.records / "templates").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    script = (
        "import sys; from pathlib import Path; from tsdoc.home import Home;"
        "from tsdoc.prompt.chat import load_template; from tsdoc.prompt.tokenizer import *;"
        "d = Path(sys.argv[1]);"
        "t = load_template(d, TextTokenizer(d), home=Home(Path(sys.argv[2])));"
        "t.head_ids; t.question_ids('Q'); t.turn_ids('R');"
        "loaded = {'transformers', 'torch', 'jinja2', 'pydantic', 'pypdf'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script, directory, home.root], check=True)
    assert render_template(directory, home=home) == first


@pytest.mark.parametrize("damage", ["truncate", "change", "garbage", "link"])
def test_a_damaged_kept_template_is_rendered_again(tmp_path: Path, damage: str) -> None:
    directory, home = make_byte_level(tmp_path / "model"), Home(tmp_path / "home")
    first = render_template(directory, home=home)
    (kept,) = (home.records / "templates").iterdir()
    data = kept.read_bytes()
    if damage == "truncate":
        kept.write_bytes(data[:-1])
    elif damage == "change":
        kept.write_bytes(data.replace(b"documents", b"d0cuments"))
    elif damage == "garbage":
        kept.write_bytes(b"\xff")
    else:
        shutil.move(kept, tmp_path / "elsewhere")
        kept.symlink_to(tmp_path / "elsewhere")
    assert render_template(directory, home=home) == first
    assert kept.read_bytes() == data
    assert not kept.is_symlink()


def test_a_changed_template_is_not_taken_from_what_is_kept(tmp_path: Path) -> None:
    directory, home = make_byte_level(tmp_path / "model"), Home(tmp_path / "home")
    first = load_template(directory, TextTokenizer(directory), home=home)
    path = directory / "chat_template.jinja"
    path.write_text("!" + path.read_text("utf-8"), "utf-8")
    second = load_template(directory, TextTokenizer(directory), home=home)
    assert second.rendered.head == "!" + first.rendered.head
    assert second.fingerprint != first.fingerprint


def test_a_home_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    template = _load(make_byte_level(tmp_path / "model"), Home(tmp_path / "home"))
    assert template.head_ids.size > 0


_LLAMA3 = (
    "{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + "
    "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_SYSTEM_WITH_LAST_QUESTION = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_SYSTEM_DROPPED = "{% for m in messages if m.role != 'system' %}<{{ m.content }}>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "head", "tail", "turn"),
    [
        (
            _LLAMA3,
            "<s><|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nDocuments:\n",
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n",
        ),
        (
            _SYSTEM_WITH_LAST_QUESTION,
            "<s>[INST] {system}\n\nDocuments:\n",
            "[/INST]",
            "</s>[INST] {system}\n\n",
        ),
        (_SYSTEM_DROPPED, "<{system}\n\nDocuments:\n", ">", "><"),
    ],
)
def test_templates_of_other_families_are_split(
    tmp_path: Path, source: str, head: str, tail: str, turn: str
) -> None:
    rendered = _load(_with_template(tmp_path, source, bos_token="<s>", eos_token="</s>")).rendered
    assert rendered.head == head.format(system=SYSTEM_TEXT)
    assert rendered.tail == tail
    assert rendered.turn == turn.format(system=SYSTEM_TEXT)
