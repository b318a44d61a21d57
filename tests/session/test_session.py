"""Cold and warm answers, interruptions, damage, and limits, on a tiny random model."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.ingest.making import lines, make_pdf, make_tree
from tests.session.conftest import TEXT, Recorder
from tsdoc.errors import PartialInputError, ResourceError, StoreError, UsageError
from tsdoc.home import Home
from tsdoc.ingest.options import IngestOptions
from tsdoc.session import Answer, Session
from tsdoc.session.engines import Engines
from tsdoc.store import Store

Start = Callable[..., Session]
QUESTION = "What does locker 7 hold?"


def ask(session: Session, question: str = QUESTION) -> Answer:
    with session:
        return session.ask(question, lambda text: None)


def files_below(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.is_file()]


def test_a_second_session_reuses_every_token_and_answers_alike(start: Start) -> None:
    first, second = start(), start()
    cold, warm = ask(first), ask(second)
    assert cold.reused_tokens == 0
    assert cold.generated_tokens > 0
    assert warm.text == cold.text
    question_len = warm.prompt_tokens - warm.reused_tokens
    assert 0 < question_len < 40
    assert {"ingest", "prefill"} <= first.times_s.keys()
    assert "prefill" not in second.times_s


def test_answers_do_not_depend_on_the_order_of_questions(start: Start) -> None:
    with start() as session:
        first = session.ask(QUESTION, lambda text: None)
        session.ask("Something else entirely?", lambda text: None)
        again = session.ask(QUESTION, lambda text: None)
    assert again.text == first.text
    assert first.reused_tokens == 0
    assert again.reused_tokens == len(session.prompt.ids)


def test_streamed_text_is_the_answer(start: Start) -> None:
    pieces: list[str] = []
    with start() as session:
        answer = session.ask(QUESTION, pieces.append)
    assert "".join(pieces) == answer.text


def test_without_a_store_the_answer_is_the_same_and_nothing_is_written(
    start: Start, home: Home
) -> None:
    kept = ask(start())
    before = set(files_below(home.root))
    unkept = ask(start(store={"enabled": False}))
    assert unkept.text == kept.text
    assert unkept.reused_tokens == 0
    assert set(files_below(home.root)) == before


def test_an_interrupted_prefill_goes_on_from_the_last_committed_block(start: Start) -> None:
    with pytest.raises(KeyboardInterrupt), start(Recorder(interrupt_at=512)) as session:
        session.prepare()
    with start() as session:
        assert session.estimate().reused_tokens == 512
        prepared = session.prepare()
        answer = session.ask(QUESTION, lambda text: None)
    assert prepared.reused_tokens == 512
    assert prepared.computed_tokens == prepared.prompt_tokens - 512
    assert answer.text == ask(start(store={"enabled": False})).text


@pytest.mark.parametrize("store", [True, False])
def test_a_prefill_tells_how_far_it_is_inside_of_a_block(start: Start, store: bool) -> None:
    said: list[tuple[str, int]] = []

    class Follower(Recorder):
        def advance(self, done: int) -> None:
            if self.stages[-1] == "prefill":
                said.append(("done", done))

        def working(self, units: int) -> None:
            said.append(("working", units))

    with start(Follower(), store={"enabled": store}) as session:
        session.prepare()
    ends = [number for number, (word, units) in enumerate(said) if word == "done" and units > 0]
    block = said[ends[0]][1]
    for first, last in itertools.pairwise([0, *ends[:2]]):
        inside = [units for word, units in said[first:last] if word == "working"]
        assert inside == sorted(set(inside))
        assert 0 < inside[0] <= inside[-1] < block


def test_an_interrupt_before_the_first_block_leaves_nothing(start: Start, home: Home) -> None:
    with pytest.raises(KeyboardInterrupt), start(Recorder(interrupt_at=0)) as session:
        session.prepare()
    assert Store(home.store).list() == []
    assert not list(home.store.rglob("kv.bin"))


def test_appended_text_is_all_that_is_computed(start: Start, document: Path) -> None:
    ask(start())
    document.write_text(TEXT + "Fact 120: the last locker is empty.\n", encoding="utf-8")
    with start() as session:
        prepared = session.prepare()
        answer = session.ask(QUESTION, lambda text: None)
    assert 0 < prepared.computed_tokens < 400
    assert prepared.reused_tokens % 128 == 0
    assert answer.text == ask(start(store={"enabled": False})).text


def test_a_file_of_equal_size_and_time_is_read_again(start: Start, document: Path) -> None:
    with start() as session:
        before = session.prepare()
    info = document.stat()
    document.write_text(TEXT.replace("locker 119", "locker 911"), encoding="utf-8")
    os.utime(document, ns=(info.st_atime_ns, info.st_mtime_ns))
    with start() as session:
        assert "locker 911" in session.document.sections[0].text
        after = session.prepare()
    assert before.entry_id != after.entry_id


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_is_named_and_its_block_recomputed(
    start: Start, home: Home, seed: int
) -> None:
    cold = ask(start())
    (kv,) = [p for p in files_below(home.store) if p.name == "kv.bin"]
    with kv.open("r+b") as file:
        file.seek((seed + 1) * kv.stat().st_size // 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x40]))
    reporter = Recorder()
    repaired = ask(start(reporter))
    assert repaired.text == cold.text
    if reporter.warnings:  # bytes that are not used need no repair
        assert {code for code, _, _ in reporter.warnings} == {"page_repaired"}
        assert 0 < repaired.reused_tokens <= ask(start()).reused_tokens - 256
        again = Recorder()
        assert ask(start(again)).text == cold.text
        assert again.warnings == []


def test_a_page_that_never_stays_ends_the_question(
    start: Start, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(start())
    (kv,) = [p for p in files_below(home.store) if p.name == "kv.bin"]
    kv.write_bytes(bytes(byte ^ 1 for byte in kv.read_bytes()))

    @contextlib.contextmanager
    def nothing_stays(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(num_committed=1, ids=[0], commit=None)

    monkeypatch.setattr(Store, "repair", nothing_stays)
    reporter = Recorder()
    with pytest.raises(StoreError, match="though computed again 3 times: the disk fails") as caught:
        ask(start(reporter))
    assert caught.value.hint is not None
    assert "--no-store" in caught.value.hint
    assert [code for code, _, _ in reporter.warnings] == 3 * ["page_repaired"]


def test_a_full_disk_is_a_warning_while_memory_suffices(
    start: Start, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ask(start(store={"enabled": False}))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    reporter = Recorder()
    answer = ask(start(reporter))
    assert answer.text == kept.text
    assert [code for code, _, _ in reporter.warnings] == ["not_kept"]
    assert not [p for p in files_below(home.store) if p.name == "kv.bin" and p.stat().st_size]


def test_a_document_beyond_the_budget_is_answered_from_memory(start: Start, home: Home) -> None:
    kept = ask(start(store={"enabled": False}))
    reporter = Recorder()
    answer = ask(start(reporter, store={"max_bytes": 1000}))
    assert answer.text == kept.text
    ((code, _, message),) = reporter.warnings
    assert code == "not_kept"
    assert "store.max_bytes allows 1.0 kB; going on in memory, nothing is kept" in message
    with pytest.raises(ResourceError, match=r"store\.max_bytes"):
        start(store={"max_bytes": 1000}).prepare(must_keep=True)
    assert not [p for p in files_below(home.store) if p.name == "kv.bin"]


def test_a_device_without_room_is_said_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device lacks is no reason to try again without a store."""
    asked = []

    def no_room(*_: object) -> None:
        asked.append(True)
        raise ResourceError("the weights need 9.9 GB of device memory")

    monkeypatch.setattr(Engines, "make", no_room)
    reporter = Recorder()
    with pytest.raises(ResourceError, match="device memory"), start(reporter) as session:
        session.prepare()
    assert (len(asked), reporter.warnings) == (1, [])


def test_what_must_be_kept_fails_on_a_full_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError), start() as session:
        session.prepare(must_keep=True)


def test_neither_disk_nor_memory_is_one_clear_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(store={"enabled": False})
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(ResourceError, match=r"1\.0 kB free") as caught, session:
        session.prepare()
    assert caught.value.exit_code == 6


def test_a_prompt_that_is_too_long_is_refused_before_any_prefill(
    start: Start, tmp_path: Path, home: Home
) -> None:
    folder = tmp_path / "project"
    for name, factor in (("small", 1), ("huge", 6)):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text(TEXT * factor, encoding="utf-8")
    with pytest.raises(ResourceError) as caught:
        start(sources=[str(folder)], prompt={"max_prompt_tokens": 5000})
    assert "limit is 5,000" in caught.value.message
    assert caught.value.hint is not None
    assert "--exclude 'huge/'" in caught.value.hint
    assert not home.store.exists()


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("a.txt", TEXT, "Read a part of it, or raise"),
        ("a.md", f"# One\n{TEXT}# Two\n{TEXT}", "Read less with --section, or raise"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_what_can_make_it_shorter(
    start: Start, tmp_path: Path, name: str, text: str, advice: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ResourceError) as caught:
        start(sources=[str(tmp_path / name)], prompt={"max_prompt_tokens": 500})
    assert caught.value.hint is not None
    assert advice in caught.value.hint
    assert "--pages" not in caught.value.hint


def test_a_question_counts_towards_the_limit(start: Start) -> None:
    with start() as session:
        limit = len(session.prompt.ids) + 20
    with (
        pytest.raises(ResourceError, match="limit is"),
        start(prompt={"max_prompt_tokens": limit}) as session,
    ):
        session.ask("why " * 200, lambda text: None)


def test_a_budget_beyond_the_window_is_a_usage_error(start: Start, document: Path) -> None:
    document.write_text(TEXT * 6, encoding="utf-8")
    with (
        pytest.raises(UsageError, match="trained window"),
        start(selection={"top_k": 4096}) as session,
    ):
        session.prepare()


def test_strict_makes_a_warning_an_error_also_from_the_record(start: Start, document: Path) -> None:
    document.write_bytes(TEXT.encode("utf-16") + b"\x00\xd8\n\x00")  # half a surrogate pair
    assert ask(start()).generated_tokens > 0
    for _ in range(2):
        with pytest.raises(PartialInputError):
            start(ingest=IngestOptions(strict=True))


def test_what_a_narrowing_option_did_is_said_again_from_the_record(
    start: Start, tmp_path: Path
) -> None:
    tree = {"a.md": "# Facts\n" + TEXT, "b.md": "# Other\nx\n"}
    folder = make_tree(tmp_path / "project", {**tree, "c.pdf": make_pdf([lines("one")])})
    ingest = IngestOptions(pages=((1, 2),), section="facts", exclude=("*.rst",))
    said = []
    for _ in range(2):
        reporter = Recorder()
        session = start(reporter, sources=[str(folder)], ingest=ingest)
        assert ask(session).generated_tokens > 0
        said.append(reporter.warnings)
    assert "ingest" not in session.times_s
    assert said[0] == said[1]
    assert session.part == "pages 1-2; section facts; without *.rst"
    assert [code for code, _, _ in said[0]] == [
        "pattern_without_match",
        "file_without_pages",
        "pages_beyond_end",
        "file_without_section",
    ]


def test_another_model_setting_reuses_nothing(start: Start) -> None:
    ask(start())
    with start(selection={"top_k": 65}) as session:
        assert session.estimate().reused_tokens == 0
    with start(engine={"theta": None, "question_chunk_size": 8, "prefill_block": 512}) as session:
        assert session.estimate().prefill_tokens == 0


def test_a_question_restricted_to_parts_selects_only_there(start: Callable[..., Session]) -> None:
    with start() as session:
        end = len(session.prompt.ids)
        free = session.ask("Which item?", lambda text: None)
        whole = session.ask("Which item?", lambda text: None, allowed=[(0, end)])
        part = session.ask("Which item?", lambda text: None, allowed=[(200, 264)])
        same = session.ask("Which item?", lambda text: None, allowed=[(200, 230), (230, 264)])
    assert whole.text == free.text
    assert part.text == same.text != free.text


def cut_at_token(home: Home, at: int) -> Callable[[str], None]:
    """Returns a reader of an answer that cuts the store's pages to a half once it has come far."""
    seen: list[str] = []

    def read(piece: str) -> None:
        seen.append(piece)
        if len(seen) == at:
            for path in home.store.rglob("kv.bin"):
                os.truncate(path, path.stat().st_size // 2)

    return read


def test_a_file_that_is_cut_during_an_answer_is_computed_again(start: Start, home: Home) -> None:
    whole = ask(start())
    reporter = Recorder()
    with start(reporter) as session:
        cut = session.ask(QUESTION, cut_at_token(home, 3))
        again = session.ask(QUESTION, lambda text: None)
    assert cut.text == again.text == whole.text
    assert reporter.warnings[0][0] == "damaged_store"
    assert "while in use; computing it again" in reporter.warnings[0][2]
    assert cut.reused_tokens == 0
    fresh = Recorder()
    assert ask(start(fresh)).text == whole.text
    assert fresh.warnings == []


def test_a_file_that_is_cut_during_the_prefill_is_computed_again(start: Start, home: Home) -> None:
    class Cutter(Recorder):
        done = False

        def advance(self, done: int) -> None:
            if done >= 512 and not self.done and self.stages[-1] == "prefill":
                self.done = True
                (path,) = home.store.rglob("kv.bin")
                os.truncate(path, 4096)

    reporter = Cutter()
    with start(reporter) as session:
        answer = session.ask(QUESTION, lambda text: None)
        assert session.prepare().kept
    assert reporter.warnings[0][0] == "damaged_store"
    assert answer.text == ask(start(store={"enabled": False})).text
    assert len(list(home.store.rglob("kv.bin"))) == 1


def test_sources_in_another_order_are_recognised(start: Start, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in paths:
        path.write_text(f"{path.name}\n{TEXT}", encoding="utf-8")
    cold = ask(start(sources=[str(p) for p in paths]))
    reporter = Recorder()
    warm = ask(start(reporter, sources=[str(p) for p in reversed(paths)]))
    assert warm.text == cold.text
    assert 0 < warm.prompt_tokens - warm.reused_tokens < 40
    assert any("read before as a.txt, b.txt" in note for note in reporter.notes)


def test_an_entry_names_the_record_of_its_text(start: Start, home: Home) -> None:
    with start() as session:
        session.prepare()
        (record,) = (home.records / "sources").iterdir()
        assert record.name == session.record
        entry = Store(home.store).list()[0]
    assert entry.meta["record"] == record.name
    assert entry.meta["part"] == ""


@pytest.mark.parametrize(
    ("engine", "narrow"),
    [
        ({}, True),
        ({"decode_weights": "float32"}, False),
        ({"compute_dtype": "float32"}, False),
        ({"compute_dtype": "float32", "decode_weights": "bfloat16"}, True),
        ({"compute_dtype": "bfloat16"}, False),
    ],
)
def test_generated_tokens_read_bfloat16_weights_unless_float32_was_asked_for(
    start: Start, engine: dict[str, str], narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.kernels.devices.processor_line", lambda name: "")
    with start(engine={"device": "cpu", **engine}) as session:
        assert (session._engines.make(100).runner.steps is not None) is narrow


def test_files_lie_where_they_were_found_though_equal_ones_were_read_before(
    start: Start, document: Path, tmp_path: Path
) -> None:
    with start() as session:
        assert session.document.files[0].path == document
    moved = tmp_path / "elsewhere" / document.name
    moved.parent.mkdir()
    document.rename(moved)
    with start(sources=[str(moved)]) as session:
        assert session.document.files[0].path == moved
        assert "tokenise" not in session.prepare().times_s
