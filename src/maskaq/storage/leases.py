"""Leases: which worker does which piece of work, agreed on through files in a folder that all of them can access.

A lease is a file that its owner created exclusively and touches regularly. A lease that stays untouched for its time
limit has expired: whoever renames it away first may claim the work. Clocks are never compared: a lease expires if it
does not change while another worker watches it, by the monotonic clock of that worker.

A lease only prevents duplicate work. Its owner may be stopped, lose it and go on, so it must be harmless if two workers
do the same work.
"""

import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import maskaq
from maskaq.errors import RunFolderError
from maskaq.storage.files import explained, machine, misfit, writer

SECONDS = 60.0
"""How long a lease is valid after it was last touched."""
_BEATS = 6  # how often a lease is touched in that time: a few touches may be late
_UNWRITTEN = 10.0  # seconds for which a lease may be unreadable: it is written right after it was created
_LIVING: set[str] = set()  # tokens of this process
_FORM = {"host": str, "machine": str, "pid": int, "token": str, "seconds": float, "version": str, "rank?": int}


@dataclass(frozen=True)
class Worker:
    """A worker process, as others see it."""

    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=machine)
    """Where its process number is unique: two containers may have one host name."""
    pid: int = field(default_factory=os.getpid)
    rank: int | None = None
    version: str = field(default_factory=lambda: maskaq.__version__)

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}" + ("" if self.rank is None else f", rank {self.rank}")

    def is_here(self) -> bool:
        """Whether it has the number of this process."""
        return self.pid == os.getpid() and self.machine == machine()

    def is_dead(self) -> bool:
        """Whether it is certain that this worker is gone: only its own machine can tell."""
        if os.name != "posix" or self.machine != machine():
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            pass
        return False


@dataclass(frozen=True)
class Held:
    """A lease as found in the folder."""

    worker: Worker | None
    """None for a file that has not been written yet, or is not readable."""
    token: str
    seconds: float
    touched: float
    """When, by the clock of the file system."""

    @property
    def sign(self) -> tuple[str, float]:
        """A value that keeps changing while the owner is alive."""
        return self.token, self.touched


class Leases:
    """The leases in a folder, and those of them that this process holds.

    Args:
        seconds: how long others wait for this process after it has died.
    """

    def __init__(self, folder: Path, worker: Worker | None = None, seconds: float = SECONDS) -> None:
        self.folder = folder
        self.worker = worker or Worker()
        self.seconds = seconds
        self._token = secrets.token_hex(8)
        _LIVING.add(self._token)
        self._mine: set[str] = set()
        self._seen: dict[str, tuple[tuple[str, float], float]] = {}  # the last sign, and since when it is the last
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def claim(self, name: str) -> bool:
        """Take a lease that nobody holds or whose owner is gone; False if another worker has it."""
        with explained(self.folder):
            if self._create(name):
                return True
            held = self.read(name)
            return held is not None and self._is_expired(name, held) and self._take_away(name, held)

    def take(self, name: str) -> None:
        """Claim a lease regardless of who holds it, for a process that knows that the owner is gone."""
        with explained(self.folder):
            while not self._create(name):
                self._path(name).unlink(missing_ok=True)

    @property
    def place(self) -> int:
        """A random number of this process, so that workers can start at different places."""
        return int(self._token, 16)

    @contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Whether the lease could be claimed; it is given back at the end."""
        mine = self.claim(name)
        try:
            yield mine
        finally:
            if mine:
                self.release(name)

    def each(self, names: Iterable[str], is_done: Callable[[str], bool], wait: float = 1.0) -> Iterator[str]:
        """The names whose work is not done, one after another, each while its lease is held.

        Work of other processes is left to them, and taken up if they die. The iteration ends when all work is done,
        here or elsewhere. A name whose work is not done after it was yielded is yielded again.
        """
        left = [name for name in names if not is_done(name)]
        while left:
            for name in left:
                with self.claimed(name) as mine:
                    if mine and not is_done(name):  # by another, since we looked
                        yield name
            before, left = left, [name for name in left if not is_done(name)]
            if len(left) == len(before):
                time.sleep(wait)

    def release(self, name: str) -> None:
        """Give a lease back if this process still has it."""
        with self._lock:
            self._mine.discard(name)
            held = self.read(name)
            if held is not None and held.token == self._token:
                with suppress(OSError):
                    self._path(name).unlink()

    def close(self) -> None:
        """Give all leases back."""
        self._stop.set()
        for name in list(self._mine):  # first of all: a second signal may interrupt the rest
            self.release(name)
        if self._heart is not None:
            self._heart.join()
        _LIVING.discard(self._token)

    def all(self) -> dict[str, Held]:
        """Every lease in the folder, of living and of dead owners."""
        try:
            names = sorted(path.stem for path in self.folder.glob("*.lease"))
        except OSError:
            return {}
        return {name: held for name in names if (held := self.read(name)) is not None}

    def is_held(self, name: str) -> bool:
        """Whether somebody holds the lease and, as far as this process watched, has not let it expire."""
        held = self.read(name)
        return held is not None and not self._is_expired(name, held)

    def read(self, name: str) -> Held | None:
        """A lease as it is now; None if there is none."""
        return _read(self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.lease"

    def _create(self, name: str) -> bool:
        flags, file = os.O_CREAT | os.O_EXCL | os.O_WRONLY, -1
        while file < 0:
            try:
                file = os.open(self._path(name), flags, 0o666)
            except FileExistsError:
                return False
            except FileNotFoundError:  # the first lease, or the owner of the last one has just removed the folder
                with suppress(FileExistsError):
                    self.folder.mkdir()
        about = asdict(self.worker) | {"token": self._token, "seconds": self.seconds}
        try:
            with open(file, "wb") as opened:
                opened.write(json.dumps(about).encode())
        except BaseException:  # a full disk: nobody has to wait for it
            self._path(name).unlink(missing_ok=True)
            raise
        with self._lock:
            self._mine.add(name)
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, name="maskaq leases", daemon=True)
            self._heart.start()
        return True

    def _is_expired(self, name: str, held: Held) -> bool:
        if held.worker is not None and held.token != self._token and held.worker.is_dead():
            return True
        if held.worker is not None and held.token not in _LIVING and held.worker.is_here():
            return True  # of an earlier process that had this one's number, or of a folder that was copied
        sign, since = self._seen.get(name, (None, 0.0))
        if sign != held.sign:
            self._seen[name] = (held.sign, time.monotonic())
            return False
        return time.monotonic() - since > held.seconds

    def _take_away(self, name: str, expired: Held) -> bool:
        """Rename an expired lease, which only one worker can do, and claim the work."""
        aside = self._path(name).with_suffix(f".{self._token}.expired")
        try:
            os.rename(self._path(name), aside)
        except FileNotFoundError:
            return False
        found = _read(aside)
        if found is not None and found.token != expired.token:  # another was quicker, and this is its new one
            with suppress(OSError):
                os.link(aside, self._path(name))
        with suppress(OSError):
            aside.unlink()
        return self._create(name)

    def _beat(self) -> None:
        while not self._stop.wait(self.seconds / _BEATS):
            for name in list(self._mine):
                with self._lock, suppress(OSError):  # one that fails leaves others for the lease's time
                    held = self.read(name)
                    if name in self._mine and held is not None and held.token == self._token:
                        os.utime(self._path(name))


def _read(path: Path) -> Held | None:
    try:
        # On NFS it is the opening that asks the server. A link is not followed, and a pipe does not hang.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(path, flags), "rb") as file:
            data, touched = file.read(10_000) or b"", os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    try:
        found: dict[str, Any] = json.loads(data)
        if misfit(found, _FORM):
            raise ValueError
    except (ValueError, RecursionError):  # its owner may be about to write it
        return Held(None, "", _UNWRITTEN, touched)
    worker = Worker(found["host"], found["machine"], found["pid"], found.get("rank"), found["version"])
    return Held(worker, found["token"], found["seconds"] or SECONDS, touched)


def check_shared(folder: Path) -> None:
    """RunFolderError unless a folder has what several workers need: exclusive creation, renaming, times, locks."""
    lacks = ""
    # A temporary file by its name: what a kill leaves of it, the next leader of the run clears away.
    trial = folder / f".trial.{secrets.token_hex(4)}.{writer()}.tmp"
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            trial.mkdir()
            lacks = _lacking(trial)
        finally:
            shutil.rmtree(trial, ignore_errors=True)
    if lacks:
        raise RunFolderError(
            f"{folder} cannot be shared by several workers: its file system {lacks}. Expected a local disk, NFS, "
            "Lustre or another file system with exclusive creation, atomic renaming and locks (most mounts of object "
            "stores lack some of them): choose another --out and copy the result, or use `quantize` with one worker"
        )


def _lacking(folder: Path) -> str:
    """What a file system cannot do, in words; empty if nothing is missing."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    first, second = folder / "first", folder / "second"
    for path in (first, second):
        with open(os.open(path, flags), "wb") as file:
            file.write(path.name.encode())
    trial = "tell that a file is there already (O_EXCL)"
    try:
        with suppress(FileExistsError):
            os.close(os.open(first, flags))
            return "creates a file that is there already (O_EXCL is ignored)"
        trial = "rename a file over another"
        os.replace(first, second)
        if first.exists() or second.read_bytes() != b"first":
            return "does not rename a file over another as a whole"
        with suppress(FileNotFoundError):
            os.rename(first, folder / "third")
            return "renames a file that is not there"
        trial = "set the time of a file"
        before = second.stat().st_mtime_ns
        os.utime(second, ns=(before + 10**10, before + 10**10))
        if second.stat().st_mtime_ns == before:
            return "does not keep the time at which a file was touched"
        trial = "lock a file (flock)"
        if os.name == "posix":
            import fcntl

            with open(second, "r+b") as file:  # NFS locks only what is open for writing
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"cannot {trial}: {error.strerror}"
    return ""
