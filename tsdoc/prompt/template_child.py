"""Runs a chat template, in the reader process: it may loop for ever, or ask for all memory."""

from __future__ import annotations

from collections.abc import Iterator

from tsdoc.ingest.frames import Begin, Message

_SHOWN = 500  # characters of what a template says has failed


def run_template(request: Message, begin: Begin) -> Iterator[Message]:
    """Yields {"text"}: `messages` as `template` writes them, or {"failed"}: why it does not.

    Args:
        request: `template`, `messages`, and `variables` that the template may name.
        begin: Starts the clock.
    """
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    begin("chat template", 0)
    try:
        rendered, _ = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
    except (
        ArithmeticError,
        AttributeError,
        ImportError,
        LookupError,
        RecursionError,
        SyntaxError,  # of the Python that Jinja writes: a break outside a loop, loops too deep
        TemplateError,
        TypeError,
        ValueError,
    ) as error:
        yield {"failed": str(error)[:_SHOWN]}
    else:
        yield {"text": str(rendered[0])[: request["num_chars"]]}
