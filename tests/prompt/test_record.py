from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.prompt.strategies import documents, make_document
from tests.prompt.test_tokenmap import build
from tsdoc.errors import ResourceError
from tsdoc.home import Home
from tsdoc.ingest.document import Document, IngestWarning, SkippedFile
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.record import load_record, prune_records, record_key, save_record
from tsdoc.prompt.render import RenderedTemplate
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.prompt.tokenmap import MapArrays

KEY = "ab" * 32


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def _save(home: Home, tokenizer: TextTokenizer, text: str = "text", key: str = KEY) -> Path:
    document = make_document([text, "</document>"])
    save_record(home, key, document, build(document, tokenizer))
    return home.records / "sources" / key


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=20,
    deadline=None,
)
@given(document=documents())
def test_a_record_gives_back_document_and_prompt(
    home: Home, byte_level: TextTokenizer, document: Document
) -> None:
    path = document.files[0]
    document = replace(
        document,
        files=(replace(path, path=Path(os.fsdecode(b"/x/\xff"))), *document.files[1:]),
        warnings=(IngestWarning(code="c", where="w", message="m\udc80"),),
        skipped=(SkippedFile(name="s", reason="r", num_bytes=3),),
    )
    prompt = build(document, byte_level)
    save_record(home, KEY, document, prompt)
    record = load_record(home, KEY)
    assert record is not None
    assert record.document == document
    assert np.array_equal(record.prompt.ids, prompt.ids)
    for token in range(prompt.ids.size):
        assert record.prompt.map.place(token) == prompt.map.place(token)
        assert record.prompt.map.spans(token, token + 1) == prompt.map.spans(token, token + 1)


def test_the_arrays_of_a_record_are_memory_mapped_and_read_only(
    home: Home, byte_level: TextTokenizer
) -> None:
    _save(home, byte_level)
    record = load_record(home, KEY)
    assert record is not None
    assert isinstance(record.prompt.ids, np.memmap)
    assert not record.prompt.ids.flags.writeable
    assert isinstance(record.prompt.map.arrays.char_start, np.memmap)


def test_a_record_is_private(home: Home, byte_level: TextTokenizer) -> None:
    directory = _save(home, byte_level)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}
    assert [path.name for path in directory.parent.iterdir()] == [KEY]


def test_a_record_that_others_can_read_is_not_used(home: Home, byte_level: TextTokenizer) -> None:
    _save(home, byte_level).chmod(0o755)
    assert load_record(home, KEY) is None


def test_no_record_is_none(home: Home, byte_level: TextTokenizer) -> None:
    assert load_record(home, KEY) is None
    _save(home, byte_level)
    assert load_record(home, "cd" * 32) is None


def _names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "changed", "longer", "link"])
def test_damage_to_any_file_makes_the_record_absent_and_it_is_written_again(
    home: Home, byte_level: TextTokenizer, damage: str, tmp_path: Path
) -> None:
    names = _names(_save(home, byte_level))
    for name in names:
        file = _save(home, byte_level) / name
        data = file.read_bytes()
        if damage == "missing":
            file.unlink()
        elif damage == "link":
            shutil.move(file, tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        else:
            changed = data[:-1] + bytes([data[-1] ^ 1]) if data else b"x"
            file.write_bytes(
                {"empty": b"", "truncated": data[:-1], "changed": changed, "longer": data + b"x"}[
                    damage
                ]
            )
            if file.read_bytes() == data:  # an empty file cannot be emptied or cut
                continue
        assert load_record(home, KEY) is None, name
        _save(home, byte_level)
        assert load_record(home, KEY) is not None
        assert _names(home.records / "sources") == [KEY]


def test_a_file_where_the_record_should_be_is_replaced(
    home: Home, byte_level: TextTokenizer
) -> None:
    directory = _save(home, byte_level)
    shutil.rmtree(directory)
    directory.write_text("a file")
    assert load_record(home, KEY) is None
    _save(home, byte_level)
    assert load_record(home, KEY) is not None


def test_a_record_that_the_disk_has_no_room_for_leaves_nothing(
    home: Home, byte_level: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tsdoc.prompt.record.write_private", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        _save(home, byte_level)
    assert _names(home.records / "sources") == []


def test_records_used_least_recently_go_first(home: Home, byte_level: TextTokenizer) -> None:
    keys = [character * 64 for character in "abc"]
    for age, key in enumerate(keys):
        directory = _save(home, byte_level, key=key)
        os.utime(directory, (1000 - age, 1000 - age))
    size = sum(file.stat().st_size for file in directory.iterdir())
    assert load_record(home, keys[2]) is not None  # now the most recently used
    assert prune_records(home, max_bytes=2 * size) == 1
    assert _names(home.records / "sources") == [keys[0], keys[2]]
    assert prune_records(home, max_bytes=0) == 2


def test_what_interrupted_commands_left_is_removed_and_what_is_being_written_stays(
    home: Home, byte_level: TextTokenizer
) -> None:
    directory = _save(home, byte_level)
    for name in (".left", ".written", ".new"):
        directory.with_name(name).mkdir()
        if name != ".new":
            os.utime(directory.with_name(name), (1000, 1000))
    with directory.with_name(".written").joinpath("ids.npy").open("w"):
        lock = os.open(directory.with_name(".written"), os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(directory.with_name(".written"), (1000, 1000))
        prune_records(home, max_bytes=1 << 30)
        os.close(lock)
    assert _names(home.records / "sources") == [".new", ".written", KEY]


def test_only_the_records_that_are_wanted_stay(home: Home, byte_level: TextTokenizer) -> None:
    keys = [character * 64 for character in "abc"]
    for key in keys:
        _save(home, byte_level, key=key)
    assert prune_records(home, max_bytes=1 << 30, keep=keys[1:]) == 1
    assert _names(home.records / "sources") == keys[1:]


def test_the_key_covers_everything_that_decides_a_prompt(
    byte_level: TextTokenizer, llama3: TextTokenizer
) -> None:
    rendered = RenderedTemplate(head="h", tail="t", turn=None, has_template=True)
    template = ChatTemplate(rendered, byte_level)
    other = ChatTemplate(replace(rendered, head="i"), byte_level)
    keys = [
        record_key("f", byte_level, template, tree_tokens=1),
        record_key("g", byte_level, template, tree_tokens=1),
        record_key("f", llama3, template, tree_tokens=1),
        record_key("f", byte_level, other, tree_tokens=1),
        record_key("f", byte_level, template, tree_tokens=2),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == record_key("f", byte_level, template, tree_tokens=1)


def test_a_token_map_by_itself_is_saved_and_opened(
    tmp_path: Path, byte_level: TextTokenizer
) -> None:
    arrays = build(make_document(["a", "</document>"]), byte_level).map.arrays
    arrays.save(tmp_path)
    opened = MapArrays.load(tmp_path)
    assert all(
        np.array_equal(getattr(opened, name), getattr(arrays, name)) for name in arrays.__slots__
    )
