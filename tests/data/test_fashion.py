"""fashion: where files are looked for, how they are fetched, and that nothing false is ever taken for data.

No internet: small files with hashes of their own, an HTTP server on 127.0.0.1, apt-get and dpkg-deb as shell scripts.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from samestep.data import fashion
from samestep.errors import DataUnavailable

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def idx(array: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


RANDOM = np.random.default_rng(0)
ARRAYS = {
    TRAIN_IMAGES: RANDOM.integers(0, 256, (6, 28, 28), np.uint8),
    TRAIN_LABELS: RANDOM.integers(0, 10, 6, np.uint8),
    TEST_IMAGES: RANDOM.integers(0, 256, (4, 28, 28), np.uint8),
    TEST_LABELS: RANDOM.integers(0, 10, 4, np.uint8),
}
ARRAYS[TRAIN_IMAGES][0, 0, :2] = 0, 255
PLAIN = {name: idx(array) for name, array in ARRAYS.items()}
PACKED = {name: gzip.compress(content, mtime=1) for name, content in PLAIN.items()}
TABLE = {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in PLAIN.items()}


def locate() -> dict[str, Path]:
    """The path of each of the four files, found or fetched, its content verified."""
    return {name: path for name, (path, _) in fashion._contents().items()}


@pytest.fixture(autouse=True)
def sealed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No real cache, Debian folder, mirror or apt can be reached by accident."""
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(fashion, "FILES", TABLE)
    monkeypatch.setattr(fashion, "MIRRORS", ())
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("SAMESTEP_DATA", raising=False)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "xdg" / "samestep" / "fashion-mnist"


class Mirror:
    """An HTTP server of PACKED, with faults to switch on; it records (name, Range header, bytes sent)."""

    def __init__(self) -> None:
        self.files = dict(PACKED)
        self.requests: list[tuple[str, str | None, int]] = []
        self.cut_at: int | None = None  # the next request for more than this many bytes is cut there
        self.cut_always = False
        self.ranges = True
        self.lengths = True
        self.on_request: Callable[[], object] = lambda: None
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/data/"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name = handler.path.removeprefix("/data/")
        asked = handler.headers["Range"]
        if name not in self.files:
            self.requests.append((name, asked, 0))
            handler.send_error(404)
            return
        body = self.files[name]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if start >= len(body):
            self.requests.append((name, asked, 0))
            handler.send_error(416)
            return
        rest = body[start:]
        sent = rest
        if self.cut_at is not None and len(rest) > self.cut_at:
            sent = rest[: self.cut_at]
            if not self.cut_always:
                self.cut_at = None
        self.requests.append((name, asked, len(sent)))
        self.on_request()
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if self.lengths:
            handler.send_header("Content-Length", str(len(rest)))
        handler.end_headers()
        handler.wfile.write(sent)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def new_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Mirror]]:
    """Each call starts one more mirror and appends it to the mirrors that are asked."""
    started: list[Mirror] = []

    def start() -> Mirror:
        started.append(Mirror())
        monkeypatch.setattr(fashion, "MIRRORS", tuple(mirror.url for mirror in started))
        return started[-1]

    yield start
    for mirror in started:
        mirror.close()


@pytest.fixture
def mirror(new_mirror: Callable[[], Mirror]) -> Mirror:
    return new_mirror()


@pytest.fixture
def dead_url() -> Iterator[str]:
    """Refuses connections: the port is bound, so nobody else gets it, and never listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}/"


def put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def message(function: Callable[[], object]) -> str:
    with pytest.raises(DataUnavailable) as caught:
        function()
    text = str(caught.value)
    assert "\n" not in text
    return text


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


# --- what load gives


def test_load_gives_float32_images_and_int64_labels(cache: Path) -> None:
    put(cache, PACKED)
    (train_x, train_y), (test_x, test_y) = fashion.load()
    assert (train_x.shape, train_x.dtype.name, train_y.dtype.name) == ((6, 1, 28, 28), "float32", "int64")
    assert (test_x.shape, test_x.dtype.name, test_y.dtype.name) == ((4, 1, 28, 28), "float32", "int64")
    assert train_x[0, 0, 0, :2].tolist() == [0.0, 1.0]
    expected = ARRAYS[TEST_IMAGES].astype(np.float32) / np.float32(255)
    assert np.array_equal(test_x[:, 0], expected)
    assert train_y.tolist() == ARRAYS[TRAIN_LABELS].tolist()
    assert test_y.tolist() == ARRAYS[TEST_LABELS].tolist()


def test_the_real_table_has_the_sizes_of_60000_and_10000_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes = [size for size, _ in fashion.FILES.values()]
    assert sizes == [16 + 60000 * 784, 8 + 60000, 16 + 10000 * 784, 8 + 10000]
    assert list(fashion.FILES) == list(NAMES)


# --- where files are looked for


def test_samestep_data_comes_first_then_cache_then_debian(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    debian = put(tmp_path / "debian", PACKED)
    assert locate() == {name: debian / name for name in NAMES}
    put(cache, {TEST_IMAGES: PACKED[TEST_IMAGES], TEST_LABELS: PACKED[TEST_LABELS]})
    assert {name: path.parent for name, path in locate().items()} == {
        TRAIN_IMAGES: debian,
        TRAIN_LABELS: debian,
        TEST_IMAGES: cache,
        TEST_LABELS: cache,
    }
    mine = put(tmp_path / "mine", PACKED)
    monkeypatch.setenv("SAMESTEP_DATA", str(mine))
    assert locate() == {name: mine / name for name in NAMES}


def test_plain_files_and_plain_content_under_the_gz_name_are_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {name.removesuffix(".gz"): content for name, content in PLAIN.items()}
    del files["t10k-labels-idx1-ubyte"]
    mine = put(tmp_path / "mine", {**files, TEST_LABELS: PLAIN[TEST_LABELS]})
    monkeypatch.setenv("SAMESTEP_DATA", str(mine))
    assert locate()[TRAIN_IMAGES] == mine / "train-images-idx3-ubyte"
    assert fashion.load()[1][1].tolist() == ARRAYS[TEST_LABELS].tolist()


def test_the_home_folder_is_used_without_a_valid_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = put(tmp_path / ".cache" / "samestep" / "fashion-mnist", PACKED)
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert locate() == {name: home / name for name in NAMES}


# --- damage


DAMAGE = {
    "truncated": PACKED[TRAIN_IMAGES][:-9],
    "no trailer": PACKED[TRAIN_IMAGES][:-1],
    "flipped bit": PACKED[TRAIN_IMAGES][:99] + bytes([PACKED[TRAIN_IMAGES][99] ^ 4]) + PACKED[TRAIN_IMAGES][100:],
    "trailing garbage": PACKED[TRAIN_IMAGES] + b"garbage",
    "other content": PACKED[TEST_IMAGES],
    "longer content": gzip.compress(PLAIN[TRAIN_IMAGES] + b"\0"),
    "not gzip": b"<html>login</html>",
    "empty": b"",
}


@pytest.mark.parametrize("place", ["cache", "mine", "debian"])
@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_an_error_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, mirror: Mirror, place: str, content: bytes
) -> None:
    folder = {"cache": cache, "mine": tmp_path / "mine", "debian": tmp_path / "debian"}[place]
    put(folder, {TRAIN_IMAGES: content})  # the other three are missing, but nothing is fetched either
    if place == "mine":
        monkeypatch.setenv("SAMESTEP_DATA", str(folder))
    text = message(fashion.load)
    remedy = "reinstall Debian's dataset-fashion-mnist" if place == "debian" else "delete it and run again"
    assert text.startswith(f"{folder / TRAIN_IMAGES} is damaged (")
    assert text.endswith(f"): {remedy}, or set SAMESTEP_DATA to a folder with the four files")
    assert (folder / TRAIN_IMAGES).read_bytes() == content
    assert mirror.requests == []


def test_a_file_that_cannot_be_read_is_named(cache: Path) -> None:
    put(cache, PACKED)
    (cache / TRAIN_LABELS).unlink()
    (cache / TRAIN_LABELS).mkdir()  # root may read anything but a folder
    assert message(fashion.load).startswith(f"{cache / TRAIN_LABELS} cannot be read (Is a directory)")


def test_status_tells_and_never_downloads(cache: Path, mirror: Mirror) -> None:
    assert [(entry.state, entry.path, entry.bytes) for entry in fashion.status()] == [("missing", None, 0)] * 4
    put(cache, {TRAIN_IMAGES: PACKED[TRAIN_IMAGES], TEST_LABELS: b"123", f"{TEST_IMAGES}.part": PACKED[TEST_IMAGES]})
    assert fashion.status() == [
        fashion.FileStatus(TRAIN_IMAGES, cache / TRAIN_IMAGES, "ok", len(PACKED[TRAIN_IMAGES])),
        fashion.FileStatus(TRAIN_LABELS, None, "missing", 0),
        fashion.FileStatus(TEST_IMAGES, None, "missing", 0),
        fashion.FileStatus(TEST_LABELS, cache / TEST_LABELS, "damaged", 3),
    ]
    assert mirror.requests == []


# --- download


def test_files_are_downloaded_once_and_quietly(cache: Path, mirror: Mirror, capfd: pytest.CaptureFixture[str]) -> None:
    assert locate() == {name: cache / name for name in NAMES}
    fashion.load()
    assert mirror.requests == [(name, None, len(PACKED[name])) for name in NAMES]
    assert {name: (cache / name).read_bytes() for name in names_in(cache)} == PACKED
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_progress_bar(monkeypatch: pytest.MonkeyPatch, mirror: Mirror) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    locate()
    assert all(name in terminal.getvalue() for name in NAMES)


def test_only_what_is_missing_is_downloaded_and_into_samestep_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, mirror: Mirror
) -> None:
    put(cache, {TRAIN_IMAGES: PACKED[TRAIN_IMAGES]})
    mine = tmp_path / "new" / "mine"
    monkeypatch.setenv("SAMESTEP_DATA", str(mine))
    assert locate()[TRAIN_IMAGES] == cache / TRAIN_IMAGES
    assert names_in(mine) == set(NAMES[1:])
    assert [name for name, *_ in mirror.requests] == list(NAMES[1:])


def test_a_cut_download_is_resumed_where_it_ended(cache: Path, mirror: Mirror) -> None:
    mirror.cut_at = 1000
    locate()
    size = len(PACKED[TRAIN_IMAGES])
    assert mirror.requests[:2] == [(TRAIN_IMAGES, None, 1000), (TRAIN_IMAGES, "bytes=1000-", size - 1000)]
    assert (cache / TRAIN_IMAGES).read_bytes() == PACKED[TRAIN_IMAGES]
    assert names_in(cache) == set(NAMES)


def test_a_server_without_ranges_sends_everything_again(cache: Path, mirror: Mirror) -> None:
    mirror.cut_at = 1000
    mirror.ranges = False
    locate()
    assert mirror.requests == [
        (TRAIN_IMAGES, None, 1000),
        (TRAIN_IMAGES, "bytes=1000-", len(PACKED[TRAIN_IMAGES])),
        *((name, None, len(PACKED[name])) for name in NAMES[1:]),
    ]
    assert (cache / TRAIN_IMAGES).read_bytes() == PACKED[TRAIN_IMAGES]


def test_a_mirror_that_keeps_cutting_is_left_for_the_next_which_resumes(
    cache: Path, mirror: Mirror, new_mirror: Callable[[], Mirror]
) -> None:
    mirror.cut_at, mirror.cut_always = 100, True
    second = new_mirror()
    locate()
    tries = fashion.TRIES
    ranges = [None, *(f"bytes={100 * n}-" for n in range(1, tries))]
    assert mirror.requests == [(TRAIN_IMAGES, asked, 100) for asked in ranges]  # and not asked for the other files
    assert second.requests[0] == (TRAIN_IMAGES, f"bytes={100 * tries}-", len(PACKED[TRAIN_IMAGES]) - 100 * tries)
    assert names_in(cache) == set(NAMES)


def test_a_cut_without_a_content_length_is_not_taken_for_the_end(cache: Path, mirror: Mirror) -> None:
    mirror.cut_at, mirror.cut_always, mirror.lengths = 1000, True, False
    assert "SHA-256 does not match" in message(locate)
    assert names_in(cache) == set()


def test_a_wrong_hash_goes_to_the_next_mirror(cache: Path, mirror: Mirror, new_mirror: Callable[[], Mirror]) -> None:
    second = new_mirror()
    mirror.files[TRAIN_IMAGES] = PACKED[TEST_IMAGES]
    locate()
    assert mirror.requests == [(TRAIN_IMAGES, None, len(PACKED[TEST_IMAGES]))]
    assert second.requests == [(name, None, len(PACKED[name])) for name in NAMES]  # None: the false bytes were deleted
    assert {name: (cache / name).read_bytes() for name in names_in(cache)} == PACKED


@pytest.mark.parametrize("left", [b"x" * 50, b"x" * 100_000, PACKED[TEST_IMAGES]], ids=["short", "long", "other"])
def test_a_false_leftover_is_thrown_away(cache: Path, mirror: Mirror, left: bytes) -> None:
    put(cache, {f"{TRAIN_IMAGES}.part": left})
    locate()
    assert [(name, asked) for name, asked, _ in mirror.requests[:2]] == [
        (TRAIN_IMAGES, f"bytes={len(left)}-"),
        (TRAIN_IMAGES, None),
    ]
    assert {name: (cache / name).read_bytes() for name in names_in(cache)} == PACKED


def test_a_whole_leftover_needs_no_second_download(cache: Path, mirror: Mirror) -> None:
    size = len(PACKED[TRAIN_IMAGES])
    put(cache, {f"{TRAIN_IMAGES}.part": PACKED[TRAIN_IMAGES]})  # ended between the last byte and the rename
    locate()
    assert mirror.requests[:2] == [(TRAIN_IMAGES, f"bytes={size}-", 0), (TRAIN_LABELS, None, len(PACKED[TRAIN_LABELS]))]


def test_a_leftover_is_never_taken_for_a_file(cache: Path) -> None:
    put(cache, {**PACKED, f"{TEST_LABELS}.part": PACKED[TEST_LABELS][:20]})
    (cache / TEST_LABELS).unlink()
    assert message(fashion.load).startswith(f"{TEST_LABELS} missing from {cache} and could not be fetched")
    assert names_in(cache) == {*NAMES[:3], f"{TEST_LABELS}.part"}  # kept: the next run resumes it


def test_one_line_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mirror: Mirror, dead_url: str
) -> None:
    mirror.files.clear()
    monkeypatch.setattr(fashion, "MIRRORS", (dead_url, mirror.url))
    mine = put(tmp_path / "mine", {name: PACKED[name] for name in NAMES[:2]})
    monkeypatch.setenv("SAMESTEP_DATA", str(mine))
    assert message(fashion.load) == (
        f"{TEST_IMAGES}, {TEST_LABELS} missing from {mine} and could not be fetched (tried "
        f"{dead_url[7:-1]}: [Errno {errno.ECONNREFUSED}] Connection refused; "
        f"{mirror.url[7:-6]}: HTTP Error 404: Not Found; "
        "Debian's package: no apt-get and dpkg-deb here): "
        "install Debian's package dataset-fashion-mnist, or set SAMESTEP_DATA to a folder with the four files"
    )
    assert [name for name, *_ in mirror.requests] == [TEST_IMAGES]  # a mirror that failed is not asked again


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SAMESTEP_DATA", str(tmp_path / "file" / "below"))
    assert message(fashion.load).startswith(f"cannot write {tmp_path / 'file' / 'below'} (Not a directory)")


# Tells when it is about to wait for the lock, then fetches as any program would.
FETCHER = """
import fcntl, json, sys
from samestep.data import fashion
fashion.FILES, fashion.MIRRORS = json.loads(sys.argv[1]), [sys.argv[2]]
flock = fcntl.flock
def telling(*args):
    print("at the lock", flush=True)
    flock(*args)
fcntl.flock = telling
print(len(fashion._contents()), flush=True)
"""


def test_two_processes_fetch_each_file_once(cache: Path, mirror: Mirror) -> None:
    first_asks, second_waits = threading.Event(), threading.Event()

    def hold_the_first_until_the_second_waits() -> None:
        first_asks.set()
        assert second_waits.wait(20)

    mirror.on_request = hold_the_first_until_the_second_waits
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FETCHER, json.dumps(TABLE), mirror.url]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as first:
        assert first_asks.wait(20)
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "at the lock\n"
            second_waits.set()
            assert first.communicate(timeout=20)[0] == "at the lock\n4\n"
            assert second.communicate(timeout=20)[0] == "4\n"
    assert mirror.requests == [(name, None, len(PACKED[name])) for name in NAMES]
    assert {name: (cache / name).read_bytes() for name in names_in(cache)} == PACKED


# --- Debian's package


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Fake apt-get and dpkg-deb that hand out the folder `package`; what they were asked is in `log`."""
    folder = tmp_path / "apt"
    put(folder / "package" / fashion.DEBIAN.relative_to("/"), PACKED)
    scripts = {
        # real apt-get update fails when one of many sources does, and the download may still work
        "apt-get": f"""
            echo "$@" >> {folder}/log; cp apt.conf {folder}/apt.conf; pwd > {folder}/cwd
            for last; do :; done
            [ -d state/lists/partial -a -d cache/archives/partial ] || exit 1
            case "$last" in
              update) echo 'E: some source failed' >&2; exit 100 ;;
              *) [ -e {folder}/offline ] || {{ : > "$last"_1_all.deb; exit 0; }}
                 printf 'W: old\\nE: Unable to locate package %s\\n' "$last" >&2; exit 100 ;;
            esac""",
        "dpkg-deb": f"""
            echo "dpkg-deb $@" >> {folder}/log; cp -r {folder}/package "$3" """,
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_debians_package_is_unpacked_when_no_mirror_answers(
    monkeypatch: pytest.MonkeyPatch, apt: Path, cache: Path, mirror: Mirror, dead_url: str
) -> None:
    del mirror.files[TEST_IMAGES]  # two files come from the mirror, two from Debian
    monkeypatch.setattr(fashion, "MIRRORS", (dead_url, mirror.url))
    assert locate() == {name: cache / name for name in NAMES}
    assert {name: (cache / name).read_bytes() for name in names_in(cache)} == PACKED
    temporary = (apt / "cwd").read_text().strip()
    assert (apt / "log").read_text().splitlines() == [
        f"-qq -c {temporary}/apt.conf update",
        f"-qq -c {temporary}/apt.conf download dataset-fashion-mnist",
        f"dpkg-deb -x {temporary}/dataset-fashion-mnist_1_all.deb files",
    ]
    conf = (apt / "apt.conf").read_text()
    assert f'Dir::State "{temporary}/state"' in conf
    assert f'Dir::Cache "{temporary}/cache"' in conf
    assert not os.path.lexists(temporary)


def test_a_package_that_apt_cannot_find_is_told_in_one_line(apt: Path, cache: Path) -> None:
    (apt / "offline").touch()
    text = message(locate)
    assert "tried Debian's package: apt-get: E: Unable to locate package dataset-fashion-mnist)" in text
    assert names_in(cache) == set()


@pytest.mark.parametrize("missing", ["apt-get", "dpkg-deb"])
def test_one_of_debians_two_commands_is_not_enough(
    missing: str, apt: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(apt))  # not those of this machine
    (apt / missing).unlink()
    assert "Debian's package: no apt-get and dpkg-deb here" in message(locate)
    assert not (apt / "log").exists()


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file or directory"), (b"false", f"{TRAIN_LABELS}: SHA-256 does not match")]
)
def test_a_package_with_other_files_is_refused(apt: Path, cache: Path, content: bytes | None, why: str) -> None:
    file = apt / "package" / fashion.DEBIAN.relative_to("/") / TRAIN_LABELS
    file.unlink()
    if content:
        file.write_bytes(content)
    text = message(locate)
    assert "Debian's package: " in text
    assert why in text
    assert names_in(cache) == {TRAIN_IMAGES}  # the one that was right
