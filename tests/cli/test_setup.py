"""models, profiles and cache."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.cli.conftest import Cli, FakeServices
from tests.store.damage import OLD_KEY, flip, rewrite_as_version_1
from tests.store.synthetic import BLOCK, KEY, SHAPE, make_ids, make_key, prefill
from tsdoc.cli.services import Services
from tsdoc.errors import UsageError
from tsdoc.models.config import RopeConfig
from tsdoc.progress import Silent
from tsdoc.session.calibration import Calibration
from tsdoc.session.repairing import Repaired
from tsdoc.store import Store
from tsdoc.terminal import format_bytes


def test_models_list_marks_the_default(cli: Cli) -> None:
    result = cli("models", "list")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["model", "here", "download", "licence", "source"],
        ["tiny", "92.9", "MB", "Apache-2.0", "pypi:small-model"],
    ]
    assert "chosen when it is first used" in result.stderr
    assert cli("models", "use", "tiny").stdout == "default model: tiny\n"
    assert "* tiny" in cli("models", "list").stdout
    value = cli("models", "list", "--json").json()
    assert (value["schema"], value["default"]) == ("tsdoc.models.list/1", "tiny")
    assert value["models"][0]["download_bytes"] == 92_900_000


def test_models_use_can_be_taken_back(cli: Cli) -> None:
    assert cli("models", "use", "tiny", "--json").json()["default"] == "tiny"
    assert cli("models", "use", "default", "--json").json()["default"] is None
    assert cli("models", "list", "--json").json()["default"] is None


def test_models_use_refuses_what_there_is_not(cli: Cli) -> None:
    assert cli("models", "use", "nonsense").code == 2


def test_models_get_says_where_the_model_lies(cli: Cli) -> None:
    result = cli("models", "get", "tiny")
    assert result.stdout == "tiny: /models/tiny\n"
    assert "Download tiny?" in result.stderr
    value = cli("models", "get", "tiny", "--json").json()
    assert (value["schema"], value["directory"]) == ("tsdoc.models.get/1", "/models/tiny")


def test_models_get_refuses_what_there_is_not_before_it_looks_for_it(
    services: FakeServices,
) -> None:
    with pytest.raises(UsageError, match="neither a profile nor a path"):
        Services().get_model("tinny", home=services.home(), offline=True, reporter=Silent())


def test_profiles_list(cli: Cli) -> None:
    lines = cli("profiles", "list").stdout.splitlines()
    assert lines[2].split() == ["tiny", "Apache-2.0", "pypi:small-model"]
    value = cli("profiles", "list", "--json").json()
    assert [profile["name"] for profile in value["profiles"]] == ["default", "tiny"]


def test_the_profiles_that_ship_can_be_listed(services: FakeServices) -> None:
    names = [p.name for p in Services().list_profiles(services.home())]
    assert {"default", "tiny", "embedded"} <= set(names)


def test_profiles_show_is_yaml_that_can_be_used(cli: Cli, services: FakeServices) -> None:
    text = cli("profiles", "show", "tiny").stdout
    file = services.root.parent / "mine.yaml"
    file.write_text(text)
    args = ("config", "show", "--json", "--profile")
    mine, theirs = cli(*args, str(file)).json(), cli(*args, "tiny").json()
    values = [[row["value"] for row in shown["settings"]] for shown in (mine, theirs)]
    assert values[0] == values[1]
    value = cli("profiles", "show", "tiny", "--json").json()
    assert value["settings"]["model"]["licence"] == "Apache-2.0"


def test_an_unknown_profile_is_exit_2_with_the_nearest(cli: Cli) -> None:
    result = cli("profiles", "show", "tinny")
    assert result.code == 2
    assert "Did you mean tiny?" in result.stderr


@pytest.fixture
def entries(services: FakeServices) -> list[str]:
    """Two entries, the second incomplete; returns their ids."""
    store = Store(services.home().store)
    ids = [make_ids(1100, seed=1), make_ids(1100, seed=2)]
    name, meta = "\x1b[31mbook[b]", {"sources": ["book.txt"], "record": "mine"}
    with store.begin(KEY, SHAPE, ids[0], prefill_block=BLOCK, name=name, meta=meta) as writer:
        prefill(writer, ids[0])
        writer.finish()
    meta = {"record": "other's"}
    with store.begin(KEY, SHAPE, ids[1], prefill_block=BLOCK, name="other", meta=meta) as writer:
        prefill(writer, ids[1], stop=512)
    return [store.find(KEY, one).entry_id for one in ids]


def test_an_empty_cache(cli: Cli) -> None:
    result = cli("cache", "list")
    assert (result.code, result.stdout) == (0, "")
    assert "nothing is kept" in result.stderr
    assert cli("cache", "list", "--json").json()["entries"] == []


def test_cache_list(cli: Cli, entries: list[str]) -> None:
    rows = cli("cache", "list").stdout.splitlines()[1:]
    shown = {row.split()[0]: row for row in rows}
    first, second = (shown[entry_id[:10]] for entry_id in entries)
    assert "1,100" in first
    assert "complete" in first
    assert "\\x1b[31mbook[b]" in first
    assert "46 % done" in second
    assert "the budget is" in cli("cache", "list").stderr
    value = cli("cache", "list", "--json").json()
    assert {entry["entry_id"] for entry in value["entries"]} == set(entries)
    assert {entry["committed_tokens"] for entry in value["entries"]} == {1100, 512}


def test_cache_show(cli: Cli, entries: list[str]) -> None:
    value = cli("cache", "show", entries[0][:6], "--json").json()
    assert (value["entry_id"], value["sources"]) == (entries[0], ["book.txt"])
    shown = cli("cache", "show", entries[1]).stdout
    assert "1,100, of which 512 are computed" in shown
    assert ["to", "redo", "?"] in [line.split() for line in shown.splitlines()]


def test_what_an_eviction_costs_is_known_once_the_machine_was_measured(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    (key,) = {e["model_key"] for e in cli("cache", "list", "--json").json()["entries"]}
    Calibration(home=services.home(), model_key=key, device="cpu", threads=2).note(
        1000, 100.0, memory_bytes=1, prompt_tokens=1000
    )
    listed = {e["entry_id"]: e["redo_s"] for e in cli("cache", "list", "--json").json()["entries"]}
    assert listed == {entries[0]: 110.0, entries[1]: 51.2}
    assert "110 s" in cli("cache", "list").stdout
    shown = cli("cache", "show", entries[1]).stdout.splitlines()
    assert ["to", "redo", "51", "s"] in [line.split() for line in shown]


def test_cache_list_and_show_know_an_entry_that_lost_a_file(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    for path in services.home().store.rglob("kv.bin"):
        path.unlink()
    listed = {row.split()[0]: row for row in cli("cache", "list").stdout.splitlines()}
    assert " damaged " in listed[entries[0][:10]]
    shown = cli("cache", "show", entries[0]).stdout
    assert "kv.bin is missing or empty" in shown
    value = cli("cache", "show", entries[0], "--json").json()
    assert (value["status"], value["committed_tokens"]) == ("damaged", 0)
    result = cli("cache", "verify", entries[0])
    assert result.code == 5
    assert "kv.bin is missing or empty" in result.stderr


@pytest.mark.parametrize("command", ["list", "show"])
def test_the_cache_fits_a_terminal_of_80_columns(
    cli: Cli, entries: list[str], command: str
) -> None:
    result = cli("cache", command, *entries[: command == "show"], terminal=True)
    assert result.code == 0
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_cache_remove(cli: Cli, entries: list[str]) -> None:
    value = cli("cache", "remove", entries[0][:6], "--json").json()
    assert value["removed"] == [entries[0]]
    assert value["freed_bytes"] > 0
    left = cli("cache", "list", "--json").json()["entries"]
    assert [entry["entry_id"] for entry in left] == [entries[1]]


def test_removing_an_entry_removes_its_text_and_no_other(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    records = services.home().records / "sources"
    for name in ("mine", "orphaned", "other's"):
        (records / name).mkdir(parents=True)
    kept = dict(zip(entries, ("mine", "other's"), strict=True))
    assert cli("cache", "remove", entries[0]).code == 0
    assert sorted(p.name for p in records.iterdir()) == [kept[entries[1]]]


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize(("typed", "left"), [("n\n", 2), ("\n", 2), ("y\n", 0)])
def test_removing_everything_is_asked_on_a_terminal(cli: Cli, typed: str, left: int) -> None:
    assert cli("cache", "remove", "--all", terminal=True, stdin=typed).code == 0
    assert len(cli("cache", "list", "--json").json()["entries"]) == left


@pytest.mark.parametrize("named", [True, False])
def test_what_is_in_use_stays_and_the_rest_is_removed(
    cli: Cli, services: FakeServices, entries: list[str], named: bool
) -> None:
    with Store(services.home().store).load(entries[0]):
        result = cli("cache", "remove", *(entries if named else ["--all"]))
        assert result.code == 5
        assert result.stderr.count(entries[0][:10]) == 1
        assert "stays: is in use" in result.stderr
        assert result.stdout.startswith("removed 1 entry, ")
        left = cli("cache", "list", "--json").json()["entries"]
    assert [entry["entry_id"] for entry in left] == [entries[0]]


def test_cache_remove_needs_ids_or_all_and_knows_them(cli: Cli, entries: list[str]) -> None:
    assert cli("cache", "remove").code == 2
    result = cli("cache", "remove", entries[0], "--all")
    assert (result.code, "none can be named beside it" in result.stderr) == (2, True)
    assert cli("cache", "remove", "zzz").code == 2
    assert cli("cache", "remove", "").code == 2
    assert len(cli("cache", "list", "--json").json()["entries"]) == 2


@pytest.mark.parametrize("command", ["show", "remove", "verify", "repair"])
def test_what_no_entry_is_called_is_a_usage_error_that_says_what_there_is(
    cli: Cli, entries: list[str], command: str
) -> None:
    result = cli("cache", command, "otter")
    assert result.code == 2
    assert "no entry is called 'otter'" in result.stderr
    likeliest = f"There are {entries[1][:10]} (other), {entries[0][:10]} ("
    assert likeliest in result.stderr


def test_an_empty_cache_says_so_when_an_entry_is_named(cli: Cli) -> None:
    result = cli("cache", "show", "book")
    assert (result.code, "Nothing is kept." in result.stderr) == (2, True)


@pytest.mark.parametrize("name", ["other", "oth…", "\\x1b[31mbook[b]", "\x1b[31mbook[b]"])
def test_an_entry_is_found_by_the_name_that_the_list_shows(
    cli: Cli, entries: list[str], name: str
) -> None:
    value = cli("cache", "show", name, "--json").json()
    assert value["entry_id"] == entries[name.startswith("oth")]


def test_a_name_that_several_entries_have_is_refused_with_their_ids(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    store, ids = Store(services.home().store), make_ids(700, seed=3)
    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="other") as writer:
        prefill(writer, ids)
        writer.finish()
    result = cli("cache", "remove", "other")
    assert result.code == 2
    for entry_id, tokens in ((entries[1], "1,100"), (store.find(KEY, ids).entry_id, "700")):
        assert f"{entry_id[:10]} ({tokens} tokens)" in result.stderr
    assert len(cli("cache", "list", "--json").json()["entries"]) == 3


def test_entries_of_parts_of_a_document_say_which(cli: Cli, services: FakeServices) -> None:
    store, found = Store(services.home().store), {}
    for seed, part in enumerate(("pages 1-5", "section \x1b[31mScope", "")):
        ids, meta = make_ids(700, seed=seed), {"part": part, "model": f"model-{seed}"}
        with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="b.pdf", meta=meta) as writer:
            prefill(writer, ids)
            found[part] = writer.finish().entry_id[:10]
    lines = cli("cache", "list").stdout.splitlines()
    pages, section, whole = (
        next(line for line in lines if line.startswith(found_id)) for found_id in found.values()
    )
    assert pages.endswith("b.pdf, pages 1-5")
    assert "b.pdf, section " in section
    assert "\x1b" not in section
    assert whole.endswith(" b.pdf")
    hint = cli("cache", "show", "b.pdf").stderr
    assert f"{found['pages 1-5']} (700 tokens, pages 1-5)" in hint
    assert f"{found['']} (700 tokens)" in hint
    assert "pages 1-5" in cli("cache", "show", "b.pdf, pages 1-5").stdout
    assert cli("cache", "remove", "b.pdf, pages 1-5").code == 0


def test_entries_of_one_document_are_told_apart_by_their_settings(
    cli: Cli, services: FakeServices
) -> None:
    store, ids, said = Store(services.home().store), make_ids(700, seed=3), []
    for dtype in ("float32", "bfloat16"):
        key = make_key(compute_dtype=dtype)
        with store.begin(key, SHAPE, ids, prefill_block=BLOCK, name="both") as writer:
            prefill(writer, ids)
            found = writer.finish().entry_id
        said.append(f"{found[:10]} (700 tokens, compute_dtype {dtype})")
    result = cli("cache", "show", "both")
    assert result.code == 2
    assert all(part in result.stderr for part in said)


def test_sizes_add_up_where_entries_share_pages(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    assert "shared" not in cli("cache", "list").stdout + cli("cache", "list").stderr
    store = Store(services.home().store)
    grown = np.concatenate([make_ids(1100, seed=1), make_ids(900, seed=5)])
    with store.begin(KEY, SHAPE, grown, prefill_block=BLOCK, name="grown") as writer:
        prefill(writer, grown)
        writer.finish()
    value = cli("cache", "list", "--json").json()
    own = sum(entry["exclusive_bytes"] for entry in value["entries"])
    assert own + value["shared_bytes"] == value["bytes"] == store.num_bytes()
    listed = {entry["name"]: entry for entry in value["entries"]}
    grown_id = listed["grown"]["entry_id"]
    assert listed["grown"]["shared_with"] == [entries[0]]
    assert listed["other"]["shared_with"] == []
    result = cli("cache", "list")
    assert result.stdout.splitlines()[0].split()[2:4] == ["own", "shared"]
    parent = next(row for row in result.stdout.splitlines() if row.startswith(entries[0][:10]))
    own_bytes = listed["\x1b[31mbook[b]"]["exclusive_bytes"]  # behind its last whole chunk
    assert " ".join(parent.split()[2:4]) == format_bytes(own_bytes)
    assert 0 < own_bytes < 0.1 * value["shared_bytes"]
    assert "are shared and counted once" in result.stderr
    assert "removing an entry frees its own bytes" in result.stderr
    shown = cli("cache", "show", entries[0]).stdout
    shared = format_bytes(value["shared_bytes"])
    own_size = format_bytes(own_bytes)
    assert (
        f"{own_size} its own, freed by removing it; {shared} shared with {grown_id[:10]}" in shown
    )


def test_what_everything_takes_is_said_before_it_is_removed(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    size = format_bytes(Store(services.home().store).num_bytes())
    asked = cli("cache", "remove", "--all", terminal=True, stdin="n\n").stderr
    assert f"Remove all entries (2 entries, {size})?" in asked


@pytest.mark.usefixtures("entries")
def test_what_stays_is_said_when_everything_is_removed(cli: Cli, services: FakeServices) -> None:
    home = services.home()
    said = "not removed with entries: "
    assert said not in cli("cache", "remove", "--all", terminal=True, stdin="n\n").stderr
    home.evals.mkdir(mode=0o700)
    (home.evals / "0123.jsonl").touch()
    home.conversations.mkdir(mode=0o700)
    (home.conversations / "book.json").touch()
    for args in (["--all"], ["--all", "--json"]):  # the second finds no entry any more
        (line,) = [x for x in cli("cache", "remove", *args).stderr.splitlines() if said in x]
        assert "1 conversation (" in line
        assert "`tsdoc chat --forget NAME` removes" in line
        assert line.endswith(f" and results of `tsdoc eval` in {home.evals}")
    assert said not in cli("cache", "prune").stderr


def test_a_model_key_is_shown_as_people_read_it(cli: Cli, services: FakeServices) -> None:
    rope = RopeConfig(rope_type="yarn", theta=1e6, factor=4.0, original_window=32_768)
    store, ids = Store(services.home().store), make_ids(300, seed=1)
    key = make_key(rope=rope.fields())
    with store.begin(key, SHAPE, ids, prefill_block=BLOCK, name="book") as writer:
        prefill(writer, ids)
        writer.finish()
    shown = cli("cache", "show", "book").stdout
    rows = [line.split(maxsplit=1) for line in shown.splitlines()]
    assert ["rope", "yarn, theta 1,000,000, factor 4, original window 32,768"] in rows
    assert ["tokens", "300"] in rows
    assert not re.search(r"\w\(|None|True|False", shown)


@pytest.mark.usefixtures("entries")
def test_cache_prune(cli: Cli) -> None:
    assert cli("cache", "prune").stdout == "removed 0 entries, 0 B\n"
    assert cli("cache", "prune", "--max-bytes", "1 GB").stdout == "removed 0 entries, 0 B\n"
    assert cli("cache", "prune", "--max-bytes", "much").code == 2
    value = cli("cache", "prune", "--max-bytes", "0", "--json").json()
    assert len(value["removed"]) == 2
    assert cli("cache", "list", "--json").json()["entries"] == []


def test_cache_verify_finds_a_damaged_page(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    assert cli("cache", "verify").code == 0
    files = [path for path in services.home().store.rglob("*") if path.is_file()]
    largest = max(path.stat().st_size for path in files)
    for path in files:
        if path.stat().st_size == largest:  # K and V
            content = bytearray(path.read_bytes())
            content[10] ^= 1
            path.write_bytes(content)
    result = cli("cache", "verify", "--json")
    damaged = {e["entry_id"]: e["damaged"] for e in result.json()["entries"]}
    assert result.code == 5
    assert damaged[entries[0]][0]["start"] == 0
    result = cli("cache", "verify")
    assert f"{entries[0][:10]}  damaged       " in result.stdout
    assert f"{entries[1][:10]}  not finished  other" in result.stdout
    assert (
        "`tsdoc cache repair` or the next question computes what is damaged again" in result.stderr
    )


@pytest.mark.parametrize(
    ("name", "at", "what"),
    [
        ("tokens.bin", -5, "its token ids are lost: ask about its sources again, or `tsdoc cache "),
        ("model.json", 9, "what it was computed with is lost: ask about its sources again, or `"),
        ("manifest.json", 9, "`tsdoc cache repair` or the next question computes"),
    ],
)
def test_cache_verify_advises_what_helps(
    cli: Cli, services: FakeServices, entries: list[str], name: str, at: int, what: str
) -> None:
    for path in services.home().store.rglob(name):
        flip(path, at)
    if name == "model.json":
        for path in services.home().store.rglob("kv.bin"):
            path.unlink()
    result = cli("cache", "verify", entries[0])
    assert result.code == 5
    assert what in " ".join(result.stderr.split())
    assert ("cache repair" in result.stderr) == (name == "manifest.json")
    assert result.stderr.count("match its checksum") <= 1


def test_cache_repair_says_what_became_of_each_entry(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    services.repaired = {entries[0]: Repaired(num_blocks=1, num_tokens=512)}
    result = cli("cache", "repair", "--profile", "tiny")
    assert result.code == 0
    title, *rows = result.stdout.splitlines()
    assert title.split() == ["id", "status", "computed", "again", "document"]
    assert {row.index(name) for row in rows for name in ("\\x1b", "other") if name in row} == {
        title.index("document")
    }
    assert f"{entries[0][:10]}  repaired          512 tokens" in result.stdout
    assert f"{entries[1][:10]}  not finished" in result.stdout
    services.repaired = {entries[0]: Repaired(problem="the model is not on this disk")}
    result = cli("cache", "repair", entries[0], "--json")
    assert result.code == 5
    assert result.json()["entries"][0]["problem"] == "the model is not on this disk"
    result = cli("cache", "repair", entries[0])
    assert result.stdout.splitlines()[1].startswith(f"{entries[0][:10]}  not repaired  \\x1b")
    assert f"warning: {entries[0][:10]}: the model is not on this disk" in result.stderr


@pytest.fixture
def older(services: FakeServices) -> str:
    """An entry that version 1 has kept; returns its id."""
    store, ids = Store(services.home().store), make_ids(900)
    with store.begin(OLD_KEY, SHAPE, ids, prefill_block=BLOCK, name="old.txt") as writer:
        prefill(writer, ids)
        writer.finish()
    rewrite_as_version_1(services.home().store)
    return store.find(OLD_KEY, ids).entry_id


def test_what_another_version_has_kept_is_neither_damaged_nor_repaired(
    cli: Cli, services: FakeServices, entries: list[str], older: str
) -> None:
    services.repaired = {older: Repaired(problem="was written by an older tsdoc")}
    for command in ("verify", "repair"):
        result = cli("cache", command)
        assert result.code == 0
        rows = [row.split() for row in result.stdout.splitlines()[1:]]
        assert len(rows) == 3
        assert [older[:10], "not", "checked", "old.txt"] in rows
        assert "1 entry of an older tsdoc: never read" in result.stderr
        assert "warning" not in result.stderr
        (value,) = cli("cache", command, "old.txt", "--json").json()["entries"]
        assert (value["entry_id"], value["status"]) == (older, "stale")
        assert "older tsdoc" in value["problem"]


def test_what_another_version_has_kept_is_one_entry_with_all_that_is_its_own(
    cli: Cli, services: FakeServices, entries: list[str], older: str
) -> None:
    rows = [row.split() for row in cli("cache", "list").stdout.splitlines()[1:]]
    (row,) = [row for row in rows if "stale" in row]
    assert (len(rows), row[0], row[1], row[-1]) == (3, older[:10], "900", "old.txt")
    shown = [line.split(maxsplit=1) for line in cli("cache", "show", older).stdout.splitlines()]
    assert ["tokens", "900"] in shown
    (value,) = [e for e in cli("cache", "list", "--json").json()["entries"] if e["name"] == row[-1]]
    removed = cli("cache", "remove", "old.txt", "--json").json()
    assert removed == {**removed, "removed": [older], "freed_bytes": value["num_bytes"]}
    assert not (services.home().store / OLD_KEY.digest).exists()


def test_of_an_older_entry_nothing_is_made_up(cli: Cli, services: FakeServices, older: str) -> None:
    (manifest,) = services.home().store.rglob("manifest.json")
    manifest.write_text("{")
    rows = [r.split() for r in cli("cache", "list").stdout.splitlines() if r.startswith(older[:10])]
    assert [row[1] for row in rows] == ["?"]
    shown = cli("cache", "show", older).stdout
    assert "1970" not in shown
    rows = [line.split(maxsplit=1) for line in shown.splitlines()]
    for name in ("document", "tokens", "created"):
        assert [name, "unknown"] in rows


def test_pages_that_were_not_read_are_not_called_ok(
    cli: Cli, services: FakeServices, entries: list[str]
) -> None:
    store = services.home().store
    (manifest,) = (p for p in store.rglob("manifest.json") if p.parent.name == entries[0])
    manifest.unlink()
    result = cli("cache", "verify")
    assert result.code == 0
    assert f"{entries[0][:10]}  not checked" in result.stdout
    shown = cli("cache", "show", entries[0]).stdout
    assert "orphan: its entry is gone, its sources find the pages again" in shown
