"""The folder of one run: everything the run writes, in a form that survives `kill -9` at any moment.

    run.json                       what the run is (identity) and where it ran (facts)
    recipe.toml                    the recipe as text
    events.jsonl                   one JSON object per line, appended
    images/round_00/               shard_0000.safetensors ..., each with what it is and what it was made against
    checkpoints/                   named by the epochs done: the latest, the one before, and the start of every round
    quantized/                     the result, and metrics.json its accuracy, written for the stages that make them
    .lock, .lock.pid               held by the one process that writes

Files appear whole or not at all (temporary file, fsync, rename), and tensor files carry a digest of all their bytes.
Nothing below the folder may be a symbolic link: a folder from a stranger cannot lead a read or a write out of itself.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from filelock import BaseFileLock, FileLock, Timeout
from torch import Tensor

from maskaq.errors import RunFolderError, unwritable

FORMAT = 2
READABLE = (1, 2)
"""Formats that can be evaluated, reported and exported; only `FORMAT` can be continued."""

_RESTORE = "put the file back from a copy"
_ZEROS = b"0" * 64
# Inside a JSON string the quotes would be escaped, so in a header this matches our metadata entry and nothing else.
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
QUANTIZED = "quantized"
"""The folder of a run with its model, as `maskaq.from_pretrained` takes it."""
METRICS_FILE = "metrics.json"
STRIP_FILE = "images/round_{round:02}/strip.safetensors"
"""One image of a round on its way from its start."""

# What a run killed before its run.json was in place may have left behind.
_UNBORN = re.compile(r"\.lock|\.lock\.pid|\.run\.json\.\d+\.tmp")
_SHA256 = re.compile("[0-9a-f]{64}")
_SHARD = re.compile(r"shard_(\d+)\.safetensors")
_CHECKPOINT = re.compile(r"checkpoint_(\d{6,})\.safetensors")


@contextmanager
def _explained(path: Path, needed: int = 4096) -> Iterator[None]:
    """Turns an OSError of the block into a message that says what to do; a new folder needs a block of 4096 bytes."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = (
                f"disk full: {needed} bytes needed for {path}; "
                "free space and run the same command again: a run continues where it stopped"
            )
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            message = f"cannot write to {path}: {error.strerror}; make it writable, or choose another --out"
        else:
            message = f"cannot write {path}: {error.strerror or error}"
        raise RunFolderError(message) from error


class DamagedError(RunFolderError):
    """A file is there and is not what was written."""

    def __init__(self, path: Path, reason: object, remedy: str) -> None:
        super().__init__(f"{path} is damaged ({reason}): {remedy}")
        self.path, self.reason = path, reason


def _short(value: Any) -> Any:
    """A SHA-256 digest cut to what tells it from another one at a glance; anything else as it is."""
    return f"{value[:12]}..." if isinstance(value, str) and _SHA256.fullmatch(value) else value


def write_bytes_atomic(path: str | Path, data: bytes) -> None:
    """Puts data at path, durably: whatever happens, path holds its old content or all of the new."""
    path = Path(path)
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _explained(path, len(data)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_new(temp, data)
            os.replace(temp, path)
        finally:
            with suppress(OSError):  # after the rename there is nothing left to remove
                temp.unlink()
    _sync_folder(path.parent)


def _write_new(path: Path, data: bytes) -> None:
    """Writes a file that is not there yet, durably; whatever has its name, a link above all, is removed first."""
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_folder_atomic(path: str | Path, files: Mapping[str, bytes]) -> None:
    """Puts a folder with these files, and no others, at path: it is the old folder or all of the new one."""
    path = Path(os.path.realpath(path))  # through a link, or the link itself would be replaced
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _explained(path, sum(map(len, files.values()))):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temp, ignore_errors=True)
            if temp.is_symlink():
                temp.unlink()
            temp.mkdir()
            for name, data in files.items():
                _write_new(temp / name, data)
            _sync_folder(temp)
            if path.exists():
                _exchange(temp, path)
            else:
                os.replace(temp, path)
        finally:
            shutil.rmtree(temp, ignore_errors=True)  # what could not be finished, or the old folder
    _sync_folder(path.parent)


def replace_together(files: Mapping[Path, Path]) -> None:
    """Renames finished files to their places: all of them, or, where one cannot be renamed, none.

    A kill in between leaves the last place empty, never with its file beside those of another: put last the file
    that stands for all.
    """
    aside = {place: place.with_name(f".{place.name}.{os.getpid()}.aside.tmp") for place in files.values()}
    one_alone = len(files) == 1  # it takes its place at once, and a kill leaves the old or the new
    with _explained(next(iter(aside))):
        try:
            for file in files:
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            for place, old in reversed(aside.items()):
                if place.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                if not one_alone:
                    with suppress(FileNotFoundError):
                        os.replace(place, old)
            for file, place in files.items():
                os.replace(file, place)
        except BaseException:
            for (file, place), old in zip(files.items(), aside.values(), strict=True):
                if not one_alone and not file.exists():  # it has its place already
                    os.replace(place, file)
                if old.exists():
                    os.replace(old, place)
            raise
        finally:
            for old in aside.values():
                with suppress(OSError):
                    old.unlink()
    for folder in {place.parent for place in aside}:
        _sync_folder(folder)


def _exchange(a: Path, b: Path) -> None:
    """Two folders change places: at once where the system can, else by way of a third name."""
    with suppress(OSError, AttributeError):
        at_here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE: of Linux, like the call
        if ctypes.CDLL(None).renameat2(at_here, os.fsencode(a), at_here, os.fsencode(b), exchange) == 0:
            return
    aside = b.with_name(f".{b.name}.{os.getpid()}.aside.tmp")
    os.replace(b, aside)
    try:
        os.replace(a, b)
    except BaseException:
        os.replace(aside, b)
        raise
    os.replace(aside, a)


def _sync_folder(path: Path) -> None:
    with suppress(OSError):  # not every file system can sync a folder; a kill, unlike a power cut, does not need it
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json_atomic(path: str | Path, obj: Any) -> None:
    """Puts obj at path as readable JSON, like `write_bytes_atomic`."""
    write_bytes_atomic(path, json_bytes(obj))


def json_bytes(obj: Any) -> bytes:
    """obj as readable JSON."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    # A path that is not UTF-8 comes as surrogates, whose backslash form is also their JSON escape.
    return text.encode(errors="backslashreplace")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Puts tensors and metadata at path as safetensors; the metadata key "digest" is ours. Same input, same bytes."""
    write_bytes_atomic(path, seal(tensors, metadata or {}))


def read_tensors(path: str | Path, remedy: str = _RESTORE) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (on the CPU) and metadata `write_tensors` put at path, every bit verified."""
    path = Path(path)
    return unseal(_read_bytes(path), path, remedy)


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. OSError for a symbolic link, which is not followed, and for a pipe or a device."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, _ODD_FILE)
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        return file.read()


_ODD_FILE = "it is a symbolic link, a pipe or a device: expected the file itself (`cp -rL` copies what links point to)"


def own_path(root: Path, name: str) -> Path:
    """The path of something below a folder. RunFolderError if a symbolic link, a pipe or a device is on the way."""
    path = root
    for part in Path(name).parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except OSError:  # not there, so there is nothing to follow
            break
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise RunFolderError(f"{path} is not used: {_ODD_FILE}")
    return root / name


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(f"{path} is missing: {_RESTORE}") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error


def _read_json(path: Path, remedy: str = _RESTORE) -> Any:
    try:
        return json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise DamagedError(path, error, remedy) from None


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares no storage: what safetensors takes, and no later step changes."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def seal(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file whose metadata holds the sha256 of the whole file, taken with zeros in the digest's place."""
    plain = {name: _plain(tensor) for name, tensor in tensors.items()}
    blob = memoryview(safetensors.torch.save(plain, {**metadata, "digest": _ZEROS.decode()}))
    end = 8 + int.from_bytes(blob[:8], "little")
    # safetensors writes metadata in random order; a sorted header makes equal runs give equal files.
    fields = json.loads(bytes(blob[8:end]))
    header = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    digest = sha256(head)
    digest.update(blob[end:])
    sealed = head.replace(b'"digest":"' + _ZEROS, b'"digest":"' + digest.hexdigest().encode(), 1)
    return b"".join((sealed, blob[end:]))


def unseal(data: bytes, path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `seal` was given; path and remedy are for the message when a bit of data is not as it was."""
    end = min(8 + int.from_bytes(data[:8], "little"), len(data))
    found = _DIGEST.search(data, 8, end)
    if found is None:
        raise DamagedError(path, f"{len(data)} bytes, without the digest maskaq writes", remedy)
    digest = sha256(data[: found.start(1)] + _ZEROS)
    digest.update(memoryview(data)[found.end(1) :])
    if digest.hexdigest() != found[1].decode():
        expected = found[1].decode()
        raise DamagedError(path, f"digest {_short(expected)} expected, {_short(digest.hexdigest())} found", remedy)
    try:
        metadata: dict[str, str] = json.loads(data[8:end])["__metadata__"]
        del metadata["digest"]
        return safetensors.torch.load(data), metadata
    except Exception as error:  # a digest that somebody else computed
        raise DamagedError(path, error, remedy) from error


def digest_of(sealed: bytes) -> str:
    """The digest in a file that `seal` made."""
    found = _DIGEST.search(sealed)
    assert found is not None
    return found[1].decode()


def flatten_state(tree: Any) -> tuple[dict[str, Tensor], str]:
    """A state_dict (dicts, lists, tuples, scalars, None, tensors) as named tensors (copies) and one JSON string."""
    tensors: dict[str, Tensor] = {}

    def pack(node: Any, name: str) -> Any:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, Tensor):
            while not name or name in tensors:  # keys 0 and "0" give the same name
                name += "_"
            tensors[name] = _plain(node)
            return {"tensor": name}
        if isinstance(node, list | tuple):
            items = [pack(item, f"{name}.{i}" if name else str(i)) for i, item in enumerate(node)]
            return items if isinstance(node, list) else {"tuple": items}
        if isinstance(node, Mapping) and all(type(key) in (int, str) for key in node):
            # Pairs, because a JSON object would turn int keys into strings.
            return {"dict": [[key, pack(value, f"{name}.{key}" if name else str(key))] for key, value in node.items()]}
        raise TypeError(f"cannot save {type(node).__name__} at {name or 'the root'} without pickle")

    return tensors, json.dumps(pack(tree, ""))


def restore_state(tensors: Mapping[str, Tensor], meta: str) -> Any:
    """The tree that `flatten_state` took apart; its tensors are those given, on the CPU if they come from a file."""

    def unpack(node: Any) -> Any:
        if isinstance(node, list):
            return [unpack(item) for item in node]
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "tuple":
            return tuple(unpack(item) for item in value)
        return {key: unpack(item) for key, item in value}

    return unpack(json.loads(meta))


def dotted(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}: each leaf under its dotted path."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in dotted(sub, f"{prefix}.{key}" if prefix else key).items()}


def _check_identity(root: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises, with every differing key, unless the run in the folder is the run asked for."""
    if old == new:
        return
    was, asked = dotted(old), dotted(new)
    lines = [f"{root} holds another run:"]
    for key in was | asked:
        here, there = (
            json.dumps(_short(side[key]), ensure_ascii=False) if key in side else "absent" for side in (was, asked)
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
    """The content of run.json, checked to be of our format and as it was written."""
    path, remedy = own_path(root, "run.json"), f"{_RESTORE}, or start anew with another --out"
    run = _read_json(path, remedy)
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
    if not isinstance(run.get("identity"), dict) or not isinstance(run.get("facts"), dict):
        raise DamagedError(path, "no identity or facts", remedy)
    return run


def _check_format(root: Path, run: dict[str, Any]) -> None:
    if run["format"] != FORMAT:
        raise RunFolderError(
            f"{root} was made by maskaq 0.1.0: it can be evaluated, exported and reported, but not continued; "
            "finish it with maskaq 0.1.0, or choose another --out"
        )


def _lock(root: Path) -> BaseFileLock:
    """The lock on root, held. It is the kernel's: it goes when its holder goes, however that ends."""
    lock = FileLock(own_path(root, ".lock"), timeout=0)
    with _explained(root):
        try:
            lock.acquire()
        except Timeout:
            # The pid lives beside the lock, not in it: some versions of filelock empty a lock they fail to take.
            note = root / ".lock.pid"
            pid = f" (pid {read_regular(note).decode(errors='replace')})" if note.is_file() else ""
            message = f"another maskaq process{pid} is working in {root}: wait until it ends, or choose another --out"
            raise RunFolderError(message) from None
    return lock


def _check_ours(root: Path) -> None:
    """Raises if root is there and is something else than a run folder; leaves no trace in it."""
    with _explained(root):
        names = os.listdir(root) if root.is_dir() else ["a file"] if root.exists() else []
    if "run.json" not in names and not all(_UNBORN.fullmatch(name) for name in names):
        raise RunFolderError(f"{root} exists and is not a run folder: choose another --out")


def _is_being_written(temp: Path) -> bool:
    """Whether the process in a temporary file's name lives: an export or a report, which need no lock."""
    pid = re.search(r".*\.([1-9]\d*)\.(?:aside\.)?(?:tmp|unproven)", temp.name)  # the last, if there are more
    if pid is None or int(pid[1]) == os.getpid() or os.name != "posix":
        return False  # we write none yet; and on other systems one cannot ask without harm
    try:
        os.kill(int(pid[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it lives, and is somebody else's
        pass
    return True


def _start_or_resume(root: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The content of run.json after a new run wrote it, or a continued one was found to be the same run."""
    path = root / "run.json"
    run = _read_run(root) if path.exists() else asked
    _check_format(root, run)
    _check_identity(root, run["identity"], asked["identity"])
    for name in ("events.jsonl", "images", "checkpoints", QUANTIZED, ".lock.pid"):
        own_path(root, name)
    # Only now, as a folder that is refused stays as it is: clear away what a kill left half done.
    with suppress(RunFolderError):  # it only serves a message
        write_bytes_atomic(root / ".lock.pid", str(os.getpid()).encode())
    with _explained(root):
        for temp in [*root.rglob(".*.[0-9]*.tmp"), *root.rglob(".*.[0-9]*.unproven.*")]:
            if not _is_being_written(temp):
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
    """Where a run can go on from."""

    epoch: int
    """Epochs that are done."""
    tensors: dict[str, Tensor]
    layout: str
    shards: list[str]
    """Digests of the shards that the latest of these epochs was calibrated on."""


class RunFolder:
    """One run's files. `open` it to work (a context manager, one process at a time) or `read` it to look."""

    def __init__(self, root: Path, run: dict[str, Any], lock: BaseFileLock | None = None) -> None:
        self.root = root
        self.identity: dict[str, Any] = run["identity"]
        self.facts: dict[str, Any] = run["facts"]
        sources = [facts.get("source") for facts in (run["facts"], *run.get("resumed", []))]
        self.source: dict[str, Any] | None = next((source for source in reversed(sources) if source), None)
        """What the model is and where its weights were when the run was last continued."""
        self.digest = _digest_of_json(run["identity"])
        """Of the identity: every shard and checkpoint carries it, so that none of another run is taken."""
        self._lock = lock

    @classmethod
    def open(
        cls,
        path: str | Path,
        identity: Mapping[str, Any],
        recipe_text: str = "",
        facts: Mapping[str, Any] | None = None,
    ) -> "RunFolder":
        """The folder of the run with this identity, new or to be continued, locked until it is closed."""
        root = Path(path)
        _check_ours(root)
        with _explained(root):
            root.mkdir(parents=True, exist_ok=True)
        record = {"format": FORMAT, "identity": identity, "facts": facts or {}}
        asked = json.loads(json.dumps(record, default=str))  # a path among the facts
        lock = _lock(root)
        try:
            run = _start_or_resume(root, asked)
            if not (root / "recipe.toml").exists():
                write_bytes_atomic(root / "recipe.toml", recipe_text.encode())
        except BaseException:
            lock.release()
            raise
        return cls(root, run, lock)

    @staticmethod
    def check(path: str | Path, identity: Mapping[str, Any]) -> None:
        """Raises what `open` would raise for a folder of something or somebody else; touches nothing."""
        root = Path(path)
        _check_ours(root)
        if problem := unwritable(root / "run.json"):
            raise RunFolderError(f"{problem}; choose another --out")
        if os.path.lexists(root / "run.json"):
            run = _read_run(root)
            _check_format(root, run)
            _check_identity(root, run["identity"], json.loads(json.dumps(identity)))

    @classmethod
    def read(cls, path: str | Path) -> "RunFolder":
        """The folder for reading only, without lock; another process may be at work in it."""
        root = Path(path)
        if not os.path.lexists(root / "run.json"):
            what = "is not a run folder" if os.path.exists(root) else "does not exist"
            raise RunFolderError(f"{root} {what}: expected the --out of an earlier run, with run.json in it")
        return cls(root, _read_run(root))

    def close(self) -> None:
        """Gives the lock back; from here on the folder is for reading only."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def path(self, name: str) -> Path:
        """Where the file called name is, or would be; RunFolderError if a symbolic link is on the way."""
        return own_path(self.root, name)

    def _ours(self, name: str) -> Path:
        """The path of a file about to be written."""
        if self._lock is None:
            raise RunFolderError(f"cannot write {self.root / name}: the run folder is open for reading only")
        return self.path(name)

    def write_json(self, name: str, obj: Any) -> None:
        """Puts obj into the file called name, whole or not at all."""
        write_json_atomic(self._ours(name), obj)

    def read_json(self, name: str) -> Any:
        """What `write_json` put into the file called name."""
        return _read_json(self.path(name))

    def read_text(self, name: str) -> str:
        """The file called name as text; bytes that are not UTF-8 come as question marks."""
        return _read_bytes(self.path(name)).decode(errors="replace")

    # ---- events

    def event(self, **fields: Any) -> None:
        """Appends one line to events.jsonl: the fields and the time (UTC)."""
        path, time = self._ours("events.jsonl"), datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        line = (json.dumps({"time": time, **fields}, ensure_ascii=False) + "\n").encode()
        with _explained(path, len(line)), open(path, "ab", buffering=0) as file:
            start = file.tell()
            if file.write(line) != len(line):
                file.truncate(start)  # or the next event would be glued to this torn one
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first, without a last line still being written or torn by a kill."""
        path = self.path("events.jsonl")
        *lines, _torn = _read_bytes(path).split(b"\n") if path.exists() else [b""]
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise DamagedError(path, error, "remove the lines that are not JSON") from None

    # ---- shards of images

    def shards(self, round: int) -> list[int]:
        """The numbers of the shards of a round that are there; `load_shard` says whether they are sound."""
        folder = self.path(f"images/round_{round:02d}")
        found = [match for name in (os.listdir(folder) if folder.is_dir() else ()) if (match := _SHARD.fullmatch(name))]
        return sorted(int(match[1]) for match in found)

    def seal_shard(
        self, round: int, shard: int, tensors: Mapping[str, Tensor], student: str = "", lost: Sequence[int] = ()
    ) -> bytes:
        """The file of a shard: tensors that share their first dimension, and what they are."""
        about = {"run": self.digest, "round": round, "shard": shard, "student": student, "lost": list(lost)}
        return seal(tensors, {"shard": json.dumps(about, sort_keys=True)})

    def write_shard(self, round: int, shard: int, sealed: bytes) -> None:
        """Puts what `seal_shard` gave into its place."""
        write_bytes_atomic(self._ours(_shard_name(round, shard)), sealed)

    def load_shard(self, round: int, shard: int) -> Shard:
        """A shard, verified to the bit. RunFolderError if it is not there, DamagedError if it is not as written."""
        path = self.path(_shard_name(round, shard))
        data = _read_bytes(path)
        tensors, metadata = unseal(data, path, _RESTORE)
        try:  # format 1 kept what a shard is in a file beside it
            about = json.loads(metadata["shard"]) if metadata else {}
        except (KeyError, ValueError, RecursionError) as error:
            raise DamagedError(path, "it is no shard of images", _RESTORE) from error
        expected = {"run": self.digest, "round": round, "shard": shard}
        if about and any(about.get(key) != value for key, value in expected.items()):
            raise DamagedError(path, "it is a shard of another run, or of another place in this one", _RESTORE)
        return Shard(tensors, about.get("student", ""), about.get("lost", []), digest_of(data))

    # ---- checkpoints

    def checkpoints(self) -> dict[int, Path]:
        """Epochs done -> file, of all checkpoints, oldest first."""
        folder = self.path("checkpoints")
        found = [
            match for name in (os.listdir(folder) if folder.is_dir() else ()) if (match := _CHECKPOINT.fullmatch(name))
        ]
        return {int(match[1]): folder / match[0] for match in sorted(found, key=lambda match: int(match[1]))}

    def save_checkpoint(self, checkpoint: Checkpoint, keep: Sequence[int] = ()) -> Path:
        """Saves a checkpoint and gives its file. Of the others, the one before and those of the epochs `keep` stay."""
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
        """Deletes the checkpoints of all other epochs."""
        for epoch, path in self.checkpoints().items():
            if epoch not in keep:
                with _explained(self._ours(f"checkpoints/{path.name}")):
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
        remedy = f"{_RESTORE}; or delete it and run the same command again, which repeats the epochs since {back}"
        tensors, metadata = read_tensors(path, remedy)
        try:
            about = json.loads(metadata["checkpoint"])
            found = Checkpoint(about["epoch"], tensors, about["layout"], about["shards"])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(path, "it is no checkpoint", remedy) from error
        if about.get("run") != self.digest or found.epoch != number:
            raise DamagedError(path, "it is a checkpoint of another run, or of another epoch", remedy)
        return found


def _shard_name(round: int, shard: int) -> str:
    return f"images/round_{round:02d}/shard_{shard:04d}.safetensors"
