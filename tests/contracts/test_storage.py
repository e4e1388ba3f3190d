"""What every storage must do, run against each implementation."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftfleet.errors import StorageError, StorageUnreadable, StorageUnsafe, StorageUnwritable
from draftfleet.storage import FileStorage, Storage, open_storage, probe


@pytest.fixture(params=["file", "s3"])
def any_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    urls = {"file": lambda: f"file://{tmp_path}/shared", "s3": lambda: request.getfixturevalue("s3_url")}
    return open_storage(urls[request.param]())


def test_the_first_put_wins_and_the_second_is_told_so(any_storage: Storage) -> None:
    assert any_storage.put_if_absent("a/b.txt", b"first") is True

    assert any_storage.put_if_absent("a/b.txt", b"second") is False
    assert any_storage.read("a/b.txt") == b"first"


def _race(url: str, number: int, answers: multiprocessing.Queue[tuple[int, int, bool]]) -> None:
    storage = open_storage(url)
    for path in range(50):
        answers.put((path, number, storage.put_if_absent(f"race/{path}", str(number).encode() * 1000)))


def test_of_racing_processes_exactly_one_wins_each_path_and_its_bytes_are_there(any_storage: Storage) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[tuple[int, int, bool]] = context.Queue()
    racers = [context.Process(target=_race, args=(any_storage.url, number, answers)) for number in range(3)]

    for racer in racers:
        racer.start()
    results = [answers.get(timeout=60) for _ in range(150)]
    for racer in racers:
        racer.join()

    wins = {path: number for path, number, won in results if won}
    assert Counter(path for path, _, won in results if won) == Counter(range(50))
    assert all(any_storage.read(f"race/{path}") == str(number).encode() * 1000 for path, number in wins.items())


def test_files_are_put_in_order_and_none_beyond_one_that_is_there(any_storage: Storage) -> None:
    files = [(f"folder/{number}", str(number).encode()) for number in range(20)]
    any_storage.put_if_absent("folder/13", b"another's")

    assert any_storage.put_in_order(files[:5]) == 5
    assert any_storage.put_in_order(files[5:]) == 8
    assert any_storage.put_in_order([]) == 0

    assert sorted(any_storage.list("folder"), key=int) == [str(number) for number in range(14)]
    assert [any_storage.read(path) for path, _ in files[:14]] == [*(data for _, data in files[:13]), b"another's"]


def _race_in_order(url: str, number: int, answers: multiprocessing.Queue[tuple[int, int]]) -> None:
    files = [(f"race/{path:03d}", str(number).encode() * 1000) for path in range(50)]
    answers.put((number, open_storage(url).put_in_order(files)))


def test_of_processes_that_put_the_same_names_in_order_only_one_goes_on(any_storage: Storage) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[tuple[int, int]] = context.Queue()
    racers = [context.Process(target=_race_in_order, args=(any_storage.url, number, answers)) for number in range(3)]

    for racer in racers:
        racer.start()
    num_put = dict(answers.get(timeout=60) for _ in racers)
    for racer in racers:
        racer.join()

    assert sorted(num_put.values()) == [0, 0, 50]
    winner = str(max(num_put, key=lambda number: num_put[number])).encode()
    assert {any_storage.read(f"race/{path:03d}") for path in range(50)} == {winner * 1000}


def test_put_replaces_and_leaves_no_other_file(any_storage: Storage) -> None:
    any_storage.put("folder/control.json", b"one")

    any_storage.put("folder/control.json", b"two")

    assert any_storage.read("folder/control.json") == b"two"
    assert list(any_storage.list("folder")) == ["control.json"]


def test_the_same_bytes_put_twice_were_put_once(any_storage: Storage) -> None:
    assert [any_storage.put_if_absent("a", b"same") for _ in range(2)] == [True, False]


def test_files_are_listed_with_their_sizes_and_without_folders_and_hidden_ones(any_storage: Storage) -> None:
    for path in ("run/samples/a", "run/samples/b", "run/samples/.hidden", "run/samples/deeper/c", "run/samples-2/d"):
        any_storage.put(path, b"12345")

    assert sorted(any_storage.list("run/samples")) == ["a", "b"]
    assert any_storage.sizes("run/samples") == {"a": 5, "b": 5}
    assert sorted(any_storage.folders("run")) == ["samples", "samples-2"]


def test_more_files_than_a_page_of_a_listing_are_all_there(any_storage: Storage) -> None:
    names = {f"{number:04d}" for number in range(1003)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: any_storage.put(f"many/{name}", b""), names))

    assert set(any_storage.list("many")) == names


def test_a_renamed_file_is_there_under_its_new_name_alone(any_storage: Storage) -> None:
    any_storage.put("run/a", b"data")

    any_storage.rename("run/a", "corrupt/b")

    assert (any_storage.exists("run/a"), any_storage.read("corrupt/b")) == (False, b"data")
    with pytest.raises(FileNotFoundError):
        any_storage.rename("run/a", "corrupt/c")


def test_a_path_can_be_put_again_after_it_was_deleted(any_storage: Storage) -> None:
    any_storage.put_if_absent("a", b"first")
    any_storage.delete("a")

    assert any_storage.put_if_absent("a", b"second") is True
    assert any_storage.read("a") == b"second"


def test_what_is_not_there_is_absent_and_not_an_error_to_list_or_delete(any_storage: Storage) -> None:
    assert not any_storage.exists("nothing")
    assert list(any_storage.list("nowhere")) == []
    any_storage.delete("nothing")
    with pytest.raises(FileNotFoundError):
        any_storage.read("nothing")


def test_a_folder_is_deleted_with_all_that_lies_below_it_and_nothing_beside(any_storage: Storage) -> None:
    for path in ("run/run.json", "run/samples/a", "run/deep/er/b", "run-2/run.json"):
        any_storage.put(path, b"x")

    any_storage.delete_folder("run")
    any_storage.delete_folder("nothing")

    assert not any(any_storage.exists(f"run/{path}") for path in ("run.json", "samples/a", "deep/er/b"))
    assert list(any_storage.list("run/samples")) == []
    assert any_storage.exists("run-2/run.json")


def test_folders_at_the_top_are_listed_without_files_and_hidden_ones(any_storage: Storage) -> None:
    any_storage.put("run-a/run.json", b"{}")
    any_storage.put("run-b/run.json", b"{}")
    any_storage.put("file", b"")
    probe(any_storage)

    assert sorted(any_storage.folders()) == ["run-a", "run-b"]


def test_the_probe_passes_and_leaves_nothing(any_storage: Storage) -> None:
    probe(any_storage)

    assert list(any_storage.list(".probe")) == []


def test_the_probe_refuses_a_storage_that_overwrites(tmp_path: Path) -> None:
    class Overwriting(FileStorage):
        def put_if_absent(self, path: str, data: bytes) -> bool:
            self.put(path, data)
            return True

    with pytest.raises(StorageUnsafe, match="two writers"):
        probe(Overwriting(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EMFILE, errno.ETIMEDOUT])
def test_a_full_or_read_only_folder_says_so_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage = FileStorage(tmp_path)

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(StorageUnwritable, match=os.strerror(number)):
        storage.put_if_absent("samples/x", b"data")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_first_fault_is_told_though_cleaning_up_fails_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "unlink", fail)

    with pytest.raises(StorageUnwritable, match="Make room or make it writable"):
        probe(FileStorage(tmp_path))


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", fail)

    with pytest.raises(StorageUnsafe, match="has no hard links"):
        probe(FileStorage(tmp_path))


def test_a_file_where_the_folder_should_be_is_named_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = FileStorage(tmp_path / "file")

    with pytest.raises(StorageError, match=r"file.*Correct storage\.url") as error:
        probe(storage)

    assert not isinstance(error.value, StorageUnwritable)
    for read in (lambda: storage.read("run/run.json"), lambda: list(storage.folders())):
        with pytest.raises(StorageUnreadable, match=r"Correct storage\.url"):
            read()


@pytest.mark.parametrize("away", [False, True], ids=["an empty folder in its place", "nothing in its place"])
def test_a_folder_that_is_not_the_probed_one_is_neither_written_nor_believed(tmp_path: Path, away: bool) -> None:
    storage = FileStorage(tmp_path / "mounted")
    probe(storage)
    storage.put("run/file", b"data")

    storage.root.rename(tmp_path / "elsewhere")
    if not away:
        storage.root.mkdir()

    for ask in (
        lambda: storage.put_if_absent("run/new", b""),
        lambda: storage.put("run/new", b""),
        lambda: storage.rename("run/file", "run/new"),
        lambda: storage.read("run/file"),
        lambda: storage.exists("run/file"),
        lambda: list(storage.list("run")),
    ):
        with pytest.raises(StorageUnreadable, match=r"no folder \.probe.*mount the file system again"):
            ask()
    assert not list(storage.root.rglob("*"))

    if not away:
        storage.root.rmdir()
    (tmp_path / "elsewhere").rename(storage.root)
    assert storage.read("run/file") == b"data"


def test_a_write_ends_in_the_folder_that_it_began_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FileStorage(tmp_path / "mounted")
    probe(storage)
    sync = os.fsync

    def move_the_folder(file: int) -> None:
        if not (tmp_path / "elsewhere").exists():
            storage.root.rename(tmp_path / "elsewhere")
            (storage.root / "run").mkdir(parents=True)
        sync(file)

    monkeypatch.setattr(os, "fsync", move_the_folder)

    assert storage.put_if_absent("run/file", b"data")
    assert (tmp_path / "elsewhere/run/file").read_bytes() == b"data"
    assert list(storage.root.rglob("*")) == [storage.root / "run"]


def test_an_unknown_scheme_is_named_with_what_is_allowed() -> None:
    with pytest.raises(StorageError, match=r"gopher:// is not known; use file://"):
        open_storage("gopher://host/path")
