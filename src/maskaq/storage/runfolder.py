"""The folder of one run: everything the run writes, in a form that survives `kill -9` at any moment.

    run.json                       what the run is (identity) and where it ran (facts)
    recipe.toml                    the recipe as text
    events.jsonl                   one JSON object per line, appended
    images/round_00/               shard_0000.safetensors ..., each with what it is and what it was made against
    checkpoints/                   named by the epochs done: the latest, the one before, and the start of every round
    quantized/                     the quantized model
    metrics.json                   its accuracy
    events/                        events of workers that joined, one file each
    leases/                        which worker is making which images
    .lock, .lock.pid               held by the one process that leads the run: others may join it to make images

Files appear whole or not at all (temporary file, fsync, rename), and tensor files carry a digest of all their bytes.
Nothing below the folder may be a symbolic link, so that a folder from elsewhere cannot redirect a read or a write.
"""

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout
from torch import Tensor

from maskaq.errors import BusyError, RunFolderError, unwritable
from maskaq.storage.files import (
    RESTORE,
    DamagedError,
    digest_of,
    explained,
    json_bytes,
    machine,
    misfit,
    own_path,
    read_bytes,
    read_json,
    read_regular,
    read_tensors,
    restore_state,
    seal,
    short,
    unseal,
    write_bytes_atomic,
    write_json_atomic,
    write_tensors,
    writer,
)
from maskaq.storage.leases import SECONDS, Leases, Worker

FORMAT = 2
READABLE = (1, 2)
"""Formats that can be evaluated, reported and exported; only `FORMAT` can be continued."""

QUANTIZED = "quantized"
"""The sub-folder with the model, as `maskaq.from_pretrained` takes it."""
METRICS_FILE = "metrics.json"
LEADER = "leader"
"""The lease of the process that leads a run, which shows others that there is one."""
TRAJECTORY_FILE = "images/round_{round:02}/trajectory.safetensors"
"""Snapshots of the optimisation of one image of a round."""

# What a run killed before its run.json was in place may have left behind.
_LEFTOVERS = re.compile(r"\.lock|\.lock\.pid|\.(run\.json|trial\.[0-9a-f]{8})\.\d+(\.[0-9a-f-]+)?\.tmp")
_ORDER = "images/round_{round:02}/order.json"
_SHARD = re.compile(r"shard_(\d+)\.safetensors")
_CHECKPOINT = re.compile(r"checkpoint_(\d{6,})\.safetensors")


def is_run(folder: str | Path) -> bool:
    """Whether a run has begun in a folder; `RunFolder.read` checks that it is sound."""
    return os.path.exists(os.path.join(folder, "run.json"))


Update = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
"""Brings the identity of a run of an earlier version up to date, so that it compares with the one asked for."""


def _unchanged(identity: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    return identity


def dotted(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}: each leaf under its dotted path."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in dotted(sub, f"{prefix}.{key}" if prefix else key).items()}


def _check_identity(root: Path, old: dict[str, Any], new: dict[str, Any], update: Update) -> None:
    """RunFolderError, with every differing key, unless the run in the folder is the run asked for."""
    old = json.loads(json.dumps(update(old, new)))
    new = json.loads(json.dumps(update(new, new)))
    if old == new:
        return
    was, asked = dotted(old), dotted(new)
    lines = [f"{root} holds another run:"]
    for key in was | asked:
        here, there = (
            json.dumps(short(side[key]), ensure_ascii=False) if key in side else "absent" for side in (was, asked)
        )
        if key not in was or key not in asked or was[key] != asked[key]:
            lines.append(f"  {key}: {here} in the folder, {there} asked")
    advice = "choose another --out, or give the settings of the folder"
    if any(".terms." not in key for key in was.keys() ^ asked.keys()):  # a recipe has every key but names terms freely
        advice += (
            ". A setting that is absent on one side is of another version of maskaq: the run can be finished with that"
        )
    raise RunFolderError("\n".join([*lines, advice]))


def _run_json(run: dict[str, Any]) -> bytes:
    """run.json with a digest of itself: what a run is must not change under it."""
    return json_bytes({**run, "sha256": _digest_of_json(run)})


def _digest_of_json(tree: Any) -> str:
    return sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _read_run(root: Path) -> dict[str, Any]:
    """The content of run.json, if it has our format and is as it was written."""
    path = own_path(root, "run.json")
    remedy = f"{RESTORE}, or start a new run with another --out"
    run = read_json(path, remedy)
    if not isinstance(run, dict) or "format" not in run:
        raise DamagedError(path, "no format", remedy)
    if run["format"] not in READABLE:
        raise RunFolderError(
            f"{path} has format {run['format']}, this maskaq works with format {FORMAT}: "
            "use the maskaq that made it, or choose another --out"
        )
    found = run.pop("sha256", None)
    if run["format"] == FORMAT and found != _digest_of_json(run):
        raise DamagedError(path, "it is not what was written", remedy)
    if wrong := misfit(run, {"identity": {}, "facts": {}, "resumed?": [{}], "plan?": {}}):
        raise DamagedError(path, wrong, remedy)
    return run


def _check_format(root: Path, run: dict[str, Any]) -> None:
    if run["format"] != FORMAT:
        raise RunFolderError(
            f"{root} was made by maskaq 0.1.0: it can be evaluated, exported and reported, but not continued; "
            "finish it with maskaq 0.1.0, or choose another --out"
        )


def _lock(root: Path, patience: float = 0.0) -> BaseFileLock:
    """The lock on root, held: an OS lock, released when the process exits, however that ends."""
    lock = FileLock(own_path(root, ".lock"), timeout=patience)
    with explained(root):
        try:
            lock.acquire()
        except Timeout:
            # The pid lives beside the lock, not in it: some versions of filelock empty a lock they fail to take.
            note = root / ".lock.pid"
            pid = f" (pid {read_regular(note).decode(errors='replace')})" if note.is_file() else ""
            message = f"another maskaq process{pid} is working in {root}: wait until it ends, or choose another --out"
            raise BusyError(message) from None
    return lock


def _check_ours(root: Path) -> None:
    """RunFolderError if root exists and is not a run folder; changes nothing in it."""
    with explained(root):
        names = os.listdir(root) if root.is_dir() else ["a file"] if root.exists() else []
    if "run.json" not in names and not all(_LEFTOVERS.fullmatch(name) for name in names):
        raise RunFolderError(f"{root} exists and is not a run folder: choose another --out")


_TEMPORARY = re.compile(r".*\.([1-9]\d*)(?:\.([0-9a-f]{8})-[0-9a-f]{8})?\.(?:aside\.)?(?:tmp|unproven)")
_TEMPORARY_FORMS = (".*.[0-9]*.tmp", ".*.[0-9]*.unproven.*")
_FORGOTTEN = 3600.0  # seconds after which what another machine was writing counts as left behind


def _temporary(root: Path) -> list[Path]:
    """Temporary files and folders. `os.walk`, unlike `rglob`, bears that workers remove folders meanwhile."""
    found = [Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files)]
    return [path for path in found if any(fnmatchcase(path.name, form) for form in _TEMPORARY_FORMS)]


def _is_being_written(temp: Path, now: float) -> bool:
    """Whether a process that is alive writes a temporary file: a worker, an export or a report, which need no lock.

    Args:
        now: the time by the clock of the file system, which is that of the file.
    """
    found = _TEMPORARY.match(temp.name)  # greedy: the last numbers, if there are more
    if found is not None and found[2] not in (None, machine()):
        with suppress(OSError):
            return now - temp.lstat().st_mtime < _FORGOTTEN
        return False
    if found is None or int(found[1]) == os.getpid() or os.name != "posix":
        return False  # we write none yet; and on other systems one cannot ask without harm
    try:
        os.kill(int(found[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is alive and belongs to another user
        pass
    return True


def _start_or_resume(root: Path, asked: dict[str, Any], update: Update) -> dict[str, Any]:
    """The content of run.json: written for a new run, or checked to be of the same run."""
    path = root / "run.json"
    run = _read_run(root) if path.exists() else asked
    _check_format(root, run)
    _check_identity(root, run["identity"], asked["identity"], update)
    for name in ("events.jsonl", "events", "leases", "images", "checkpoints", QUANTIZED, ".lock.pid"):
        own_path(root, name)
    # Only now, as a folder that is refused stays as it is: clear away what a kill left half done.
    with suppress(RunFolderError):  # it only serves a message
        write_bytes_atomic(root / ".lock.pid", str(os.getpid()).encode())
    with explained(root):
        note = root / ".lock.pid"
        now = note.stat().st_mtime if note.exists() else 0.0  # it was written just now
        for temp in _temporary(root):
            if not _is_being_written(temp, now):
                shutil.rmtree(temp) if temp.is_dir() and not temp.is_symlink() else temp.unlink(missing_ok=True)
        events = root / "events.jsonl"
        if events.exists() and not (data := events.read_bytes()).endswith(b"\n"):
            os.truncate(events, data.rfind(b"\n") + 1)
    if not path.exists():
        write_bytes_atomic(path, _run_json(run))
    elif asked["facts"] != [run["facts"], *run.get("resumed", [])][-1]:
        run = {**run, "resumed": [*run.get("resumed", []), asked["facts"]]}
        write_bytes_atomic(path, _run_json(run))
    return run


@dataclass(frozen=True)
class Shard:
    """A stored part of a round's images."""

    tensors: dict[str, Tensor]
    student: str
    """Digest of the student it was made against."""
    lost: list[int]
    """Numbers of the images that became NaN or Inf."""
    digest: str
    """Of the file: equal shards have equal digests."""


@dataclass(frozen=True)
class Checkpoint:
    """State from which a run can be resumed."""

    epoch: int
    """Number of epochs done."""
    tensors: dict[str, Tensor]
    layout: str
    shards: dict[int, list[str]]
    """Round -> digests of its shards, of the rounds that the student was calibrated on."""
    path: Path | None = None

    def state(self) -> dict[str, Any]:
        """The states of student and optimiser, as they were flattened."""
        try:
            found: dict[str, Any] = restore_state(self.tensors, self.layout)
            return {"student": found["student"], "optimizer": found["optimizer"]}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(self.path or Path(), "its layout is not that of its tensors", RESTORE) from error


class RunFolder:
    """The files of a run: `open` to lead it (a context manager, one process at a time), `join` or `read`."""

    leases: Leases

    def __init__(self, root: Path, run: dict[str, Any], lock: BaseFileLock | None = None) -> None:
        self.root = root
        self.identity: dict[str, Any] = run["identity"]
        self.format: int = run["format"]
        self.plan: dict[str, Any] | None = run.get("plan")
        """The quantization plan that the run began with; None in folders of 0.1.0."""
        self.facts: dict[str, Any] = run["facts"]
        self.latest_facts: dict[str, Any] = [run["facts"], *run.get("resumed", [])][-1]
        """Those of the latest call that continued the run."""
        sources = [facts.get("source") for facts in (run["facts"], *run.get("resumed", []))]
        self.source: dict[str, Any] | None = next((source for source in reversed(sources) if source), None)
        """What the model is and where its weights were when the run was last continued."""
        self.digest = _digest_of_json(run["identity"])
        """Of the identity: every shard and checkpoint carries it, so that none of another run is taken."""
        self._lock = lock
        self._joined = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        identity: Mapping[str, Any],
        recipe_text: str = "",
        facts: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
        update: Update = _unchanged,
        lease: float = SECONDS,
        worker: Worker | None = None,
        patience: float = 0.0,
    ) -> "RunFolder":
        """The folder of the run with this identity, new or to be continued, led by this process until it is closed.

        Args:
            update: brings the identity of an older run up to date.
            lease: seconds after which others take over the work of this process if it dies.
            patience: seconds to wait for the lock of a process that is about to end.
        """
        root = Path(path)
        _check_ours(root)
        with explained(root):
            root.mkdir(parents=True, exist_ok=True)
        record = {"format": FORMAT, "identity": identity, "facts": facts or {}} | ({"plan": plan} if plan else {})
        asked = json.loads(json.dumps(record, default=str))  # a path among the facts
        lock = _lock(root, patience)
        try:
            run = _start_or_resume(root, asked, update)
            if not (root / "recipe.toml").exists():
                write_bytes_atomic(root / "recipe.toml", recipe_text.encode())
            folder = cls(root, run, lock)
            folder.leases = Leases(folder.path("leases"), worker, lease)
            folder.leases.take(LEADER)  # the lock is ours, so nobody else leads
        except BaseException:
            lock.release()
            raise
        return folder

    @classmethod
    def join(
        cls, path: str | Path, lease: float = SECONDS, worker: Worker | None = None, patience: float = 0.0
    ) -> "RunFolder":
        """The folder of a run that another process leads: images may be added to it, and nothing else.

        Args:
            patience: seconds to wait for the run to begin, or for this machine to see that it has.
        """
        until = time.monotonic() + patience
        while not is_run(path) and time.monotonic() < until:
            time.sleep(min(1.0, patience))
        run = cls.read(path)
        _check_format(run.root, {"format": run.format})
        run._joined = True
        run.leases = Leases(run.path("leases"), worker, lease)
        return run

    @staticmethod
    def check(path: str | Path, identity: Mapping[str, Any], update: Update = _unchanged) -> None:
        """Raise what `open` would raise for a folder that does not belong to this run; changes nothing."""
        root = Path(path)
        _check_ours(root)
        if problem := unwritable(root / "run.json"):
            raise RunFolderError(f"{problem}; choose another --out")
        if os.path.lexists(root / "run.json"):
            run = _read_run(root)
            _check_format(root, run)
            _check_identity(root, run["identity"], json.loads(json.dumps(identity)), update)

    @classmethod
    def read(cls, path: str | Path) -> "RunFolder":
        """The folder for reading only, without a lock; another process may be working in it."""
        if not isinstance(path, str | Path):
            raise RunFolderError(f"expected the path of a run folder, got {path!r}")
        root = Path(path)
        if not os.path.lexists(root / "run.json"):
            what = "is not a run folder" if os.path.exists(root) else "does not exist"
            raise RunFolderError(f"{root} {what}: expected the --out of an earlier run, with run.json in it")
        return cls(root, _read_run(root))

    def close(self) -> None:
        """Release lock and leases; the folder is read-only from then on."""
        if self._joined or self._lock is not None:
            self.leases.close()
            with suppress(OSError):  # others hold some, or there were none
                self.leases.folder.rmdir()
        self._joined = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, name: str) -> Path:
        """The path of the file called name; RunFolderError if part of it is a symbolic link."""
        return own_path(self.root, name)

    @property
    def leads(self) -> bool:
        """Whether this process leads the run, or has only joined it."""
        return self._lock is not None

    def refresh(self) -> "RunFolder":
        """The folder as it is now, for reading."""
        return RunFolder.read(self.root)

    def _ours(self, name: str, joined: bool = False) -> Path:
        """The path of a file about to be written; `joined` if a process that joined the run may do so."""
        if self._lock is None and not (joined and self._joined):
            raise RunFolderError(f"cannot write {self.root / name}: the run folder is open for reading only")
        return self.path(name)

    def write_json(self, name: str, obj: Any) -> None:
        """Put obj into the file called name, whole or not at all."""
        write_json_atomic(self._ours(name), obj)

    def read_json(self, name: str) -> Any:
        """What `write_json` put into the file called name."""
        return read_json(self.path(name))

    def read_text(self, name: str) -> str:
        """The file called name as text; bytes that are not UTF-8 come as question marks."""
        return read_bytes(self.path(name)).decode(errors="replace")

    # ---- events

    def event(self, **fields: Any) -> None:
        """Append one line to events.jsonl, or to a file of this worker alone: the fields and the time (UTC)."""
        path = self._ours("events.jsonl" if self.leads else f"events/{writer()}.jsonl", joined=True)
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = (json.dumps({"time": now, **fields}, ensure_ascii=False) + "\n").encode()
        with explained(path, len(line)):
            path.parent.mkdir(exist_ok=True)
        with explained(path, len(line)), open(path, "ab", buffering=0) as file:
            start = file.tell()
            if file.write(line) != len(line):
                file.truncate(start)  # or the next event would be glued to this torn one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def events(self) -> list[dict[str, Any]]:
        """All events, first those of workers that joined, without a last line that is being written or was cut."""
        folder = self.path("events")
        names = sorted(os.listdir(folder)) if folder.is_dir() else []
        found = []
        for name in (*(f"events/{name}" for name in names if name.endswith(".jsonl")), "events.jsonl"):
            path = self.path(name)
            *lines, _torn = read_bytes(path).split(b"\n") if path.exists() else [b""]
            try:
                found += [json.loads(line) for line in lines]
            except (ValueError, RecursionError) as error:
                raise DamagedError(path, error, "remove the lines that are not JSON") from None
        return found

    # ---- shards of images

    def shards(self, round_index: int) -> list[int]:
        """The numbers of the shards of a round that exist; `load_shard` checks whether they are sound."""
        folder = self.path(f"images/round_{round_index:02d}")
        found = [match for name in (os.listdir(folder) if folder.is_dir() else ()) if (match := _SHARD.fullmatch(name))]
        return sorted(int(match[1]) for match in found)

    def seal_shard(
        self, round_index: int, shard: int, tensors: Mapping[str, Tensor], student: str = "", lost: Sequence[int] = ()
    ) -> bytes:
        """The file of a shard: tensors that share their first dimension, and what they are."""
        about = {"run": self.digest, "round": round_index, "shard": shard, "student": student, "lost": list(lost)}
        return seal(tensors, {"shard": json.dumps(about, sort_keys=True)})

    def write_shard(self, round_index: int, shard: int, sealed: bytes, replace: bool = True) -> bool:
        """Put what `seal_shard` gave into its place; without `replace` a shard that is there stays, and wins."""
        return write_bytes_atomic(self._ours(_shard_name(round_index, shard), joined=True), sealed, replace)

    def shard_sign(self, round_index: int, shard: int) -> tuple[int, ...] | None:
        """A value that changes when the shard's file does; None if there is no file."""
        try:
            found = self.path(_shard_name(round_index, shard)).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    # ---- orders for workers that join

    def order(self, round_index: int) -> dict[str, Any] | None:
        """The order for the workers of a round; None if the round has not begun."""
        path = self.path(_ORDER.format(round=round_index))
        if not path.exists():
            return None
        remedy = "delete it and give the run's command again"
        found = read_json(path, remedy)
        if wrong := misfit(found, {"against": str, "shards_at_once": int}):
            raise DamagedError(path, wrong, remedy)
        return dict(found)

    def write_order(self, round_index: int, order: Mapping[str, Any]) -> None:
        """Tell the workers of a round what its images are made against, and how many shards together."""
        write_json_atomic(self._ours(_ORDER.format(round=round_index)), dict(order))

    def write_trajectory(self, round_index: int, images: Tensor, words: Mapping[str, str], replace: bool) -> None:
        """Put the snapshots of an image of a round into their place."""
        path = self._ours(TRAJECTORY_FILE.format(round=round_index), joined=True)
        write_bytes_atomic(path, seal({"images": images}, words), replace)

    def load_shard(self, round_index: int, shard: int) -> Shard:
        """A shard, verified to the bit. RunFolderError if it is missing, DamagedError if it is not as written."""
        path = self.path(_shard_name(round_index, shard))
        data = read_bytes(path)
        tensors, metadata = unseal(data, path, RESTORE)
        if self.format == 1:  # which kept what a shard is in a file beside it
            return Shard(tensors, "", [], digest_of(data))
        try:
            about = json.loads(metadata["shard"])
        except (KeyError, ValueError, RecursionError) as error:
            raise DamagedError(path, "it is no shard of images", RESTORE) from error
        if wrong := misfit(about, {"run": str, "round": int, "shard": int, "student": str, "lost": [int]}):
            raise DamagedError(path, wrong, RESTORE)
        expected = {"run": self.digest, "round": round_index, "shard": shard}
        if any(about[key] != value for key, value in expected.items()):
            raise DamagedError(path, "it is a shard of another run, or of another place in this one", RESTORE)
        return Shard(tensors, about["student"], about["lost"], digest_of(data))

    # ---- checkpoints

    def checkpoints(self) -> dict[int, Path]:
        """Epochs done -> file, of all checkpoints, oldest first."""
        folder = self.path("checkpoints")
        found = [
            match for name in (os.listdir(folder) if folder.is_dir() else ()) if (match := _CHECKPOINT.fullmatch(name))
        ]
        return {int(match[1]): folder / match[0] for match in sorted(found, key=lambda match: int(match[1]))}

    def save_checkpoint(self, checkpoint: Checkpoint, keep: Sequence[int] = ()) -> Path:
        """Save a checkpoint; returns its file. Of the others, the one before and those of the epochs `keep` stay."""
        earlier = [epoch for epoch in self.checkpoints() if epoch < checkpoint.epoch]
        path = self._ours(f"checkpoints/checkpoint_{checkpoint.epoch:06d}.safetensors")
        about = {
            "run": self.digest,
            "epoch": checkpoint.epoch,
            "shards": checkpoint.shards,
            "layout": checkpoint.layout,
        }
        write_tensors(path, checkpoint.tensors, {"checkpoint": json.dumps(about)})
        self.drop_checkpoints(keep=(*keep, *earlier[-1:], checkpoint.epoch))
        return path

    def drop_checkpoints(self, keep: Sequence[int]) -> None:
        """Delete the checkpoints of all other epochs."""
        for epoch, path in self.checkpoints().items():
            if epoch not in keep:
                with explained(self._ours(f"checkpoints/{path.name}")):
                    path.unlink(missing_ok=True)

    def load_checkpoint(self, epoch: int | None = None) -> Checkpoint | None:
        """The newest checkpoint, or that of an epoch; None if there is none. A damaged one is an error."""
        files = self.checkpoints()
        if not files or (epoch is not None and epoch not in files):
            return None
        number = max(files) if epoch is None else epoch
        path = self.path(f"checkpoints/{files[number].name}")
        earlier = [files[other].name for other in files if other < number]
        back = f"the one before, {earlier[-1]}" if earlier else "the start"
        remedy = f"{RESTORE}; or delete it and run the same command again"
        remedy += f", which repeats the epochs since {back}" if number == max(files) else ""
        tensors, metadata = read_tensors(path, remedy)
        try:
            about = json.loads(metadata["checkpoint"])
        except (KeyError, ValueError, RecursionError) as error:
            raise DamagedError(path, "it is no checkpoint", remedy) from error
        if wrong := misfit(about, {"run": str, "epoch": int, "layout": str, "shards": {"*": [str]}}):
            raise DamagedError(path, wrong, remedy)
        shards = {
            int(round_index): digests for round_index, digests in about["shards"].items() if round_index.isdecimal()
        }
        found = Checkpoint(about["epoch"], tensors, about["layout"], shards, path)
        if about["run"] != self.digest or found.epoch != number:
            raise DamagedError(path, "it is a checkpoint of another run, or of another epoch", remedy)
        return found


def _shard_name(round_index: int, shard: int) -> str:
    return f"images/round_{round_index:02d}/shard_{shard:04d}.safetensors"
