"""Fashion-MNIST: finds, fetches, verifies and reads the four files.

They are looked for in $SAMESTEP_DATA, in the user's cache and where Debian's package puts them; what is missing comes
from the public mirrors or, when none answers, from Debian's package, which can be unpacked without being root.

The hashes are those of the decompressed content: Debian strips names and times from the gzip headers, so its files
differ from upstream's though their content is the same. One hash then holds for every source, and for plain files too.
(With names and times put back, Debian's files have the MD5s that upstream publishes.)
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.client
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from samestep.data.examples import Data
from samestep.errors import DataUnavailable

# name: (bytes, SHA-256), both of the decompressed content
FILES: dict[str, tuple[int, str]] = {
    "train-images-idx3-ubyte.gz": (47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
    "train-labels-idx1-ubyte.gz": (60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
    "t10k-images-idx3-ubyte.gz": (7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
    "t10k-labels-idx1-ubyte.gz": (10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
}
MIRRORS: tuple[str, ...] = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # no TLS there; the hash decides what is taken
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
)
PACKAGE = "dataset-fashion-mnist"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
TIMEOUT = 10.0  # seconds without a byte from a mirror
TRIES = 5  # connections to one mirror for one file, each resuming the one before
APT_TIMEOUT = 300.0  # seconds for one command

ELSEWHERE = "set SAMESTEP_DATA to a folder with the four files"
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)

Split = tuple[NDArray[np.float32], NDArray[np.int64]]
Advance = Callable[[int, int | None], None]  # (bytes so far, bytes in all if known)


@dataclass(frozen=True)
class FileStatus:
    """One of the four files: where it was found, whether its content is right, its bytes on disk."""

    name: str
    path: Path | None
    state: Literal["ok", "damaged", "missing"]
    bytes: int


def fashion_mnist() -> Data:
    """Fashion-MNIST: 60,000 images of clothes to train on and 10,000 to test on, 28 x 28, in 10 classes."""
    return Data(*load())


def load() -> tuple[Split, Split]:
    """((train images, train labels), (test images, test labels)), found or fetched and verified.

    Images are float32 of shape (n, 1, 28, 28), byte / 255; labels are int64 of shape (n,).
    """
    files = _contents()

    def split(kind: str) -> Split:
        # The idx format: a header, which is known where the hash holds, then the bytes of all items.
        images = np.frombuffer(files[f"{kind}-images-idx3-ubyte.gz"][1], np.uint8, offset=16)
        labels = np.frombuffer(files[f"{kind}-labels-idx1-ubyte.gz"][1], np.uint8, offset=8)
        # divided as float32: no float64 in between, which would round twice
        return np.divide(images, 255, dtype=np.float32).reshape(-1, 1, 28, 28), labels.astype(np.int64)

    return split("train"), split("t10k")


def status() -> list[FileStatus]:
    """What is on this machine, verified; nothing is downloaded."""
    found: list[FileStatus] = []
    for name in FILES:
        path = _find(name)
        try:
            found.append(FileStatus(name, path, "ok" if path and _read(path, name) else "missing", _size(path)))
        except DataUnavailable:
            found.append(FileStatus(name, path, "damaged", _size(path)))
    return found


def _folders() -> list[Path]:
    """Where the files are looked for; what is missing is fetched into the first."""
    override, base = os.environ.get("SAMESTEP_DATA"), os.environ.get("XDG_CACHE_HOME", "")
    try:  # XDG: a relative path counts as unset
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        raise DataUnavailable("the home folder is unknown: set HOME or XDG_CACHE_HOME") from None
    mine = [Path(override).expanduser()] if override else []
    return [*mine, cache / "samestep" / "fashion-mnist", DEBIAN]


def _find(name: str) -> Path | None:
    files = (folder / file for folder in _folders() for file in (name, name.removesuffix(".gz")))
    return next(filter(os.path.exists, files), None)


def _read(path: Path, name: str) -> bytes:
    """The decompressed content of `path`, which is exactly that of `name`."""
    size, sha256 = FILES[name]
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"  # not by the suffix: some downloaders unpack and keep the name
            file.seek(0)
            # One byte more than expected: reaches gzip's checksum, and bounds what a false file can unpack to.
            content = gzip.GzipFile(fileobj=file).read(size + 1) if packed else file.read(size + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, _one_line(error)) from None
    except OSError as error:
        raise DataUnavailable(f"{path} cannot be read ({error.strerror}): make it readable, or {ELSEWHERE}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise _damaged(path, "SHA-256 does not match")
    return content


def _damaged(path: Path, why: str) -> DataUnavailable:
    remedy = f"reinstall Debian's {PACKAGE}" if path.parent == DEBIAN else "delete it and run again"
    return DataUnavailable(f"{path} is damaged ({why}): {remedy}, or {ELSEWHERE}")


def _contents() -> dict[str, tuple[Path, bytes]]:
    # What is here is verified before anything is fetched: no download is made useless by a damaged file.
    found = {name: (path, _read(path, name)) for name in FILES if (path := _find(name))}
    if len(found) == len(FILES):
        return found
    _fetch(_folders()[0])
    return _contents()


def _fetch(folder: Path) -> None:
    """Put the missing files into `folder`, or say in one line what was tried."""
    tried: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for another process that fetches; freed when the file is closed
            for mirror in (*MIRRORS, None):
                missing = [name for name in FILES if _find(name) is None]
                try:
                    return _download(mirror, missing, folder) if mirror else _take_from_debian(missing, folder)
                except (*NETWORK_ERRORS, subprocess.SubprocessError, FileNotFoundError) as error:
                    source = urlsplit(mirror).netloc if mirror else "Debian's package"
                    tried.append(f"{source}: {_one_line(error)}")
    except OSError as error:
        where = error.filename or folder
        raise DataUnavailable(f"cannot write {where} ({error.strerror}): set XDG_CACHE_HOME or SAMESTEP_DATA") from None
    raise DataUnavailable(
        f"{', '.join(missing)} missing from {folder} and could not be fetched (tried {'; '.join(tried)}): "
        f"install Debian's package {PACKAGE}, or {ELSEWHERE}"
    )


def _download(mirror: str, names: list[str], folder: Path) -> None:
    """Fetch files from a mirror. It is left for the next one as soon as one of them cannot be had."""
    for name in names:
        part = folder / f"{name}.part"
        for left in reversed(range(TRIES)):
            before = _size(part)
            try:
                _transfer(mirror + name, part)
                if _settle(part, name):
                    break
                raise http.client.HTTPException("SHA-256 does not match")
            except NETWORK_ERRORS:
                # Cut midway: resume. Or the first bytes were left over from elsewhere: once more from the start.
                # But if nothing came or all of it is false, asking again would only wait again.
                if not left or _size(part) == before:
                    raise


def _transfer(url: str, part: Path) -> None:
    """Append to `part` what it lacks of `url`; if the server sends everything all the same, begin it anew."""
    have = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # nothing after byte `have`: whether `part` is whole or false, the hash will tell
            return
        raise
    with response, open(part, "ab" if response.status == 206 else "wb") as file, _progress(part.stem) as advance:
        start = file.tell()
        length = response.headers["Content-Length"]
        end = None if length is None else start + int(length)
        # read1 gives what has come, so a cut loses nothing; it may give an empty end before all is there.
        while file.tell() != end and (chunk := response.read1(1 << 16)):
            file.write(chunk)
            advance(file.tell(), end)
        if end is not None and file.tell() != end:
            raise ConnectionError(f"connection cut after {file.tell()} of {end} bytes")


def _take_from_debian(missing: list[str], folder: Path) -> None:
    """Take the missing files from Debian's package, with apt's state in a temporary folder, as any user."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("no apt-get and dpkg-deb here")
    with tempfile.TemporaryDirectory(prefix="samestep-") as temporary, _progress(PACKAGE):
        root = Path(temporary)
        root.chmod(0o755)  # run by root, apt downloads as the user _apt, who must get in
        for subfolder in ("state/lists/partial", "cache/archives/partial"):
            (root / subfolder).mkdir(parents=True)
        # Hooks are cleared: they would tidy or refresh the system's own state, which this does not touch.
        (root / "apt.conf").write_text(
            f'Dir::State "{root}/state"; Dir::State::lists "lists"; Dir::State::status "/var/lib/dpkg/status";\n'
            f'Dir::Cache "{root}/cache"; Acquire::Languages "none";\n'
            f'Acquire::http::Timeout "{TIMEOUT:.0f}"; Acquire::https::Timeout "{TIMEOUT:.0f}";\n'
            "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
        )
        apt = ["apt-get", "-qq", "-c", f"{root}/apt.conf"]
        _run([*apt, "update"], root, check=False)  # any unreachable source fails it; the next line tells
        _run([*apt, "download", PACKAGE], root)
        _run(["dpkg-deb", "-x", *(str(deb) for deb in root.glob("*.deb")), "files"], root)
        for name in missing:
            part = folder / f"{name}.part"
            shutil.copyfile(root / "files" / DEBIAN.relative_to("/") / name, part)
            if not _settle(part, name):
                raise subprocess.SubprocessError(f"{name}: SHA-256 does not match")


def _run(command: list[str], folder: Path, check: bool = True) -> None:
    env = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=APT_TIMEOUT
    )
    if check and done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise subprocess.SubprocessError(f"{command[0]}: {last}")


def _settle(part: Path, name: str) -> bool:
    """Give a verified `part` its name; delete a false one."""
    try:
        _read(part, name)
    except DataUnavailable:
        part.unlink(missing_ok=True)
        return False
    with open(part, "rb") as file:
        os.fsync(file.fileno())  # the content is on disk before the name says so
    os.replace(part, part.with_name(name))
    return True


def _size(path: Path | None) -> int:
    return path.stat().st_size if path and path.exists() else 0


def _one_line(error: Exception) -> str:
    reason = error.reason if type(error) is urllib.error.URLError else error  # the reason is what the user can act on
    return " ".join(str(reason).split()) or type(error).__name__


@contextmanager
def _progress(label: str) -> Iterator[Advance]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console  # here: most runs download nothing
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)  # total unknown: the bar pulses
        yield lambda done, total: bar.update(task, completed=done, total=total)
