"""PDF, in tsdoc's own process: from the reader process's pages to sections."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tsdoc.errors import InputError
from tsdoc.ingest.document import PageStart
from tsdoc.ingest.extract import Extract, Part, Problem, say_problems, starts_within
from tsdoc.ingest.frames import Message
from tsdoc.ingest.headings import MAX_DEPTH, Heading, split_at
from tsdoc.ingest.options import LAST_PAGE, IngestOptions
from tsdoc.ingest.pdf_quality import num_private
from tsdoc.ingest.pdf_words import fold, join_hyphens
from tsdoc.ingest.worker import Reading, Worker

_MOSTLY = 0.5
_NUMBERING = (
    r"(?:(?:chapter|section|part|appendix|§)?[ \t]*(?:[\dA-Z]{1,3}(?:\.\d+)*\.?)[ \t:.–—-]*)?"
)


def read_pdf(
    path: Path,
    options: IngestOptions,
    worker: Worker,
    on_page: Callable[[int, int], None],
) -> Extract:
    """Reads a PDF into sections along its outline; without an outline it is one section.

    Args:
        path: The file.
        options: `pages` and `password` are heeded here.
        worker: The reader process.
        on_page: Told (pages done, pages to read) after each page.

    Raises:
        InputError: not a PDF, encrypted, damaged beyond reading, without any text, or without
            the pages asked for.
    """
    with path.open("rb") as file:
        if b"%PDF-" not in file.read(1024):
            raise InputError("is not a PDF, whatever its name says")
    request: Message = {
        "reader": "tsdoc.ingest.pdf_child:read_pdf",
        "path": str(path),
        "password": options.password,
        "pages": options.pages,
    }
    reading = worker.read(request, _progress(options, on_page))
    if not reading.messages:
        raise InputError(f"cannot be read: {reading.incomplete}")
    head, pages = reading.messages[0], reading.messages[1:]
    if not head["num_pages"]:
        raise InputError("has no pages")
    if not pages and reading.incomplete is None:
        raise _no_such_page(head["num_pages"], options)
    for page in pages:
        page["text"] = fold(_without_noise(page))
    texts = join_hyphens([page["text"] for page in pages])
    problems = (*_beyond_end(head["num_pages"], options), *_problems(reading, head, pages))
    if not any(text.strip() for text in texts):
        detail = f" ({say_problems(problems)})" if problems else ": its pages are blank"
        raise InputError(f"holds no text that can be read{detail}")
    return Extract(parts=_sections(head, pages, texts), problems=problems)


def _progress(
    options: IngestOptions, on_page: Callable[[int, int], None]
) -> Callable[[Message], None]:
    done = total = 0

    def on_message(message: Message) -> None:
        nonlocal done, total
        if "num_pages" in message:
            total = int(message["num_pages"])
            if options.pages is not None:
                total = sum(min(high, total) - low + 1 for low, high in options.pages)
        else:
            done += 1
            on_page(done, max(done, total))

    return on_message


def _no_such_page(num_pages: int, options: IngestOptions) -> InputError:
    return InputError(
        f"has {num_pages} pages, none of those asked for ({_asked(options)})",
        hint="--pages counts physical pages from 1.",
    )


def _beyond_end(num_pages: int, options: IngestOptions) -> Iterator[Problem]:
    """Yields a problem where some of the pages asked for lie behind the last one."""
    if any(low > num_pages or num_pages < high < LAST_PAGE for low, high in options.pages or ()):
        message = f"ends with page {num_pages:,}; --pages asks for {_asked(options)}"
        yield Problem(code="pages_beyond_end", message=message)


def _asked(options: IngestOptions) -> str:
    ends = [(low, "" if high >= LAST_PAGE else f"{high}") for low, high in options.pages or ()]
    return ", ".join(f"{low}" if high == f"{low}" else f"{low}-{high}" for low, high in ends)


def _without_noise(page: Message) -> str:
    """Returns the page's text; one U+FFFD in place of words that no reader could decode."""
    text: str = page.get("text", "")
    if page.get("undecodable", 0.0) > _MOSTLY:
        return re.sub(r"[^\n]+", "\ufffd", text)
    return text


def _sections(head: Message, pages: Sequence[Message], texts: Sequence[str]) -> tuple[Part, ...]:
    starts: list[int] = []
    whole: list[str] = []
    at = 0
    for text in texts:
        starts.append(at)
        ended = text if not text or text.endswith("\n") else text + "\n"
        whole.append(ended)
        at += len(ended)
    text = "".join(whole)
    numbers = [int(page["page"]) for page in pages]
    labels = head["labels"] or [None] * head["num_pages"]
    marks = [
        PageStart(start=start, number=number, label=labels[number - 1])
        for start, number, page_text in zip(starts, numbers, whole, strict=True)
        if page_text
    ]
    parts = split_at(text, place_outline(head["outline"], numbers, [*starts, at], text))
    done = 0
    result = []
    for part in parts:
        end = done + len(part.text)
        result.append(
            Part(titles=part.titles, text=part.text, pages=starts_within(marks, done, end))
        )
        done = end
    return tuple(result)


def place_outline(
    outline: Sequence[Sequence[object]], numbers: list[int], starts: list[int], text: str
) -> list[Heading]:
    """Returns where each outline entry begins in the text of the pages that were read.

    An entry begins at the line that holds its title on its page, after the entry before it; where
    the title is not found, at the top of its page, unless the entry before it already began on
    that page: then its text stays there. An entry on a page that was not read begins with the
    next page that was.

    Args:
        outline: (depth, title, page index) per entry.
        numbers: Physical numbers of the pages read, ascending.
        starts: Offset of each of these pages in `text`, then the end.
        text: The pages' text, joined.
    """
    headings: list[Heading] = []
    last = 0
    for depth, title, index in outline:
        assert isinstance(depth, int) and isinstance(index, int)  # noqa: S101 - own format
        name = " ".join(str(title).split())
        if depth > MAX_DEPTH or not name:
            continue
        at = bisect.bisect_left(numbers, index + 1)
        low = starts[at]
        read = at < len(numbers) and numbers[at] == index + 1
        found = _find_title(name, text, max(low, last), starts[at + 1]) if read else None
        if found is None and low < last:
            continue
        last = low if found is None else found
        headings.append(Heading(start=last, depth=depth, title=name))
    return headings


def _find_title(title: str, text: str, low: int, high: int) -> int | None:
    """Returns the start of the line where a heading stands between `low` and `high`."""
    words = r"\s+".join(re.escape(word) for word in fold(title).split())
    for end in (r"[ \t.\d]*$", ""):
        pattern = rf"^[ \t]*{_NUMBERING}{words}{end}"
        found = re.compile(pattern, re.MULTILINE | re.IGNORECASE).search(text, low, high)
        if found is not None:
            return found.start()
    return None


def _problems(reading: Reading, head: Message, pages: Sequence[Message]) -> tuple[Problem, ...]:
    found = []
    if head["encrypted"]:
        message = "is encrypted; its text is kept unencrypted in tsdoc's store unless --no-store"
        found.append(Problem(code="decrypted", message=message))
    if head["repaired"]:
        found.append(Problem(code="repaired", message="is damaged and was repaired on reading"))
    for key in ("outline", "labels"):
        if f"{key}_failed" in head or key in reading.failed:
            why = head.get(f"{key}_failed") or f"{key}: {reading.failed[key]}"
            found.append(Problem(code="repaired", message=why))
    found.extend(_failed_pages(reading, pages))
    silent = [p["page"] for p in pages if not p.get("blank", True) and not p["text"].strip()]
    if silent:
        has = "have" if len(silent) > 1 else "has"
        found.append(
            Problem(
                code="page_without_text",
                message=f"{has} no text; OCR needed",
                place=name_pages(silent),
            )
        )
    garbled = [p["page"] for p in pages if p.get("undecodable", 0.0) > _MOSTLY]
    if garbled:
        message = "text cannot be decoded (a font has no Unicode map); OCR needed"
        found.append(Problem(code="page_undecodable", message=message, place=name_pages(garbled)))
    private = [p["page"] for p in pages if num_private(p["text"])]
    if private:
        has = "have" if len(private) > 1 else "has"
        message = f"{has} private-use characters: letters may be missing"
        found.append(Problem(code="private_characters", message=message, place=name_pages(private)))
    return tuple(found)


def _failed_pages(reading: Reading, pages: Sequence[Message]) -> list[Problem]:
    found = []
    for page in pages:
        if "failed" in page:
            where = f"page {page['page']}"
            crash = reading.failed.get(f"{where} (pdfium)") or reading.failed.get(
                f"{where} (pypdf)"
            )
            why = page["failed"] if crash is None else f"{page['failed']}; {crash}"
            found.append(Problem(code="page_failed", message=why, place=where))
    if reading.incomplete is not None:
        after = f"after page {pages[-1]['page']}" if pages else "from the first page on"
        message = f"the rest was given up {after}: {reading.incomplete}"
        found.append(Problem(code="page_failed", message=message))
    return found


def name_pages(numbers: Sequence[int]) -> str:
    """Returns `page 4`, `pages 2–3`, `pages 1, 4–6` for ascending page numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    names = ", ".join("–".join(map(str, run)) for run in runs)
    return f"pages {names}" if len(numbers) > 1 else f"page {names}"
