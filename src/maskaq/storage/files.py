"""Atomic writes, tensor files with a digest of every bit, and reads that follow no link."""

import ctypes
import errno
import functools
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from filelock import FileLock
from torch import Tensor

from maskaq.errors import MaskaqError, RunFolderError

RESTORE = "put the file back from a copy"

_ZEROS = b"0" * 64
# Inside a JSON string the quotes would be escaped, so in a header this matches our metadata entry and nothing else.
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
_SHA256 = re.compile("[0-9a-f]{64}")


@contextmanager
def explained(path: Path, needed: int = 4096) -> Iterator[None]:
    """Context that turns an OSError into a message that says what to do.

    Args:
        needed: bytes to be written; a new folder takes 4096.
    """
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


def rename_(error: MaskaqError, temp: Path, path: Path) -> None:
    """Make an error name a file or folder by the name that it would have had, not by its temporary one."""
    error.args = (str(error).replace(str(temp), str(path)),)


class DamagedError(RunFolderError):
    """A file exists but is not what was written."""

    def __init__(self, path: Path, reason: object, remedy: str) -> None:
        super().__init__(f"{path} is damaged ({reason}): {remedy}")
        self.path = path
        self.reason = reason


def short(value: Any) -> Any:
    """The first digits of a SHA-256 digest, for messages; anything else unchanged."""
    return f"{value[:12]}..." if isinstance(value, str) and _SHA256.fullmatch(value) else value


def write_bytes_atomic(path: str | Path, data: bytes, replace: bool = True) -> bool:
    """Put data at path, durably: whatever happens, path holds its old content or all of the new.

    Args:
        replace: if False, an existing file is kept and False is returned: of several writers the first one wins.
    """
    path = Path(path)
    temp = path.with_name(f".{path.name}.{writer()}.tmp")
    with explained(path, len(data)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_new(temp, data)
            if not replace:
                return _place_new(temp, path)
            os.replace(temp, path)
        finally:
            with suppress(OSError):  # after the rename there is nothing left to remove
                temp.unlink()
    _sync_folder(path.parent)
    return True


def _place_new(temp: Path, path: Path) -> bool:
    """Give a finished file its name, unless another has it."""
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links, where two who come at the same instant both succeed
        if path.exists():
            return False
        os.replace(temp, path)
    _sync_folder(path.parent)
    return True


def machine() -> str:
    """Eight hexadecimal digits for this machine or container, inside which process numbers are unique."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # on Linux: names of hosts are not always their own
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return sha256(" ".join(parts).encode()).hexdigest()[:8]


@functools.cache
def _tag(pid: int) -> str:
    return f"{machine()}-{secrets.token_hex(4)}"


def writer() -> str:
    """The name of this process in its temporary files: PID.MACHINE-RANDOM."""
    return f"{os.getpid()}.{_tag(os.getpid())}"


def _write_new(path: Path, data: bytes) -> None:
    """Write a new file, durably; whatever has its name, such as a link, is removed first."""
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_folder_atomic(path: str | Path, files: Mapping[str, bytes]) -> None:
    """Put a folder with these files, and no others, at path: it is the old folder or all of the new one."""
    path = Path(os.path.realpath(path))  # through a link, or the link itself would be replaced
    temp = path.with_name(f".{path.name}.{writer()}.tmp")
    with explained(path, sum(map(len, files.values()))):
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
        finally:  # what could not be finished, or the old folder, or a file that had its place
            shutil.rmtree(temp, ignore_errors=True)
            with suppress(OSError):
                temp.unlink()
    _sync_folder(path.parent)


def replace_together(files: Mapping[Path, Path]) -> None:
    """Rename finished files to their places: all of them, or none if one cannot be renamed.

    A kill in between leaves the last place empty, so that the last file is never beside files of another set: put the
    one that readers look for last.
    """
    aside = {place: place.with_name(f".{place.name}.{os.getpid()}.aside.tmp") for place in files.values()}
    one_alone = len(files) == 1  # it takes its place at once, and a kill leaves the old or the new
    with explained(next(iter(aside))):
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
    """Exchange two folders: atomically where the system supports it, else through a third name."""
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
    """Put obj at path as readable JSON, like `write_bytes_atomic`."""
    write_bytes_atomic(path, json_bytes(obj))


def json_bytes(obj: Any) -> bytes:
    """obj as readable JSON."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    # A path that is not UTF-8 comes as surrogates, whose backslash form is also their JSON escape.
    return text.encode(errors="backslashreplace")


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Put tensors and metadata at path as safetensors; the metadata key "digest" is ours. Same input, same bytes."""
    write_bytes_atomic(path, seal(tensors, metadata or {}))


def read_tensors(path: str | Path, remedy: str = RESTORE) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors (on the CPU) and metadata `write_tensors` put at path, every bit verified."""
    path = Path(path)
    return unseal(read_bytes(path), path, remedy)


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file. OSError for a symbolic link, which is not followed, and for a pipe or a device."""
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, _FOLDER if stat.S_ISDIR(mode) else _NOT_A_FILE)
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)), "rb") as file:
        return file.read()


_NOT_A_FILE = (
    "it is a symbolic link, a pipe or a device: expected the file itself (`cp -rL` copies what links point to)"
)
_FOLDER = "it is a folder: expected a file"


def own_path(root: Path, name: str) -> Path:
    """A path below a folder. RunFolderError if part of it is a symbolic link, a pipe or a device."""
    path = root
    for part in Path(name).parts:
        path = path / part
        try:
            mode = path.lstat().st_mode
        except OSError:  # not there, so there is nothing to follow
            break
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise RunFolderError(f"{path} is not used: {_NOT_A_FILE}")
    return root / name


def read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RunFolderError(f"{path} is missing: {RESTORE}") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error


def read_json(path: Path, remedy: str = RESTORE) -> Any:
    try:
        return json.loads(read_bytes(path))
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
    """What `seal` was given; path and remedy are for the error if a bit has changed."""
    end = min(8 + int.from_bytes(data[:8], "little"), len(data))
    found = _DIGEST.search(data, 8, end)
    if found is None:
        raise DamagedError(path, f"{len(data)} bytes, without the digest maskaq writes", remedy)
    digest = sha256(data[: found.start(1)] + _ZEROS)
    digest.update(memoryview(data)[found.end(1) :])
    if digest.hexdigest() != found[1].decode():
        expected = found[1].decode()
        raise DamagedError(path, f"digest {short(expected)} expected, {short(digest.hexdigest())} found", remedy)
    try:
        metadata: dict[str, str] = json.loads(data[8:end])["__metadata__"]
        del metadata["digest"]
        return safetensors.torch.load(data), metadata
    except Exception as error:  # a digest that was not computed by `seal`
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


def misfit(value: Any, form: Any, key: str = "") -> str:
    """In words, the first place where a value read from JSON does not have the form; empty if it has.

    A form is a type, a list of one form, or a dict of forms, in which a key that ends in ? may be missing or null and *
    is any key. float is any number or null.
    """
    if isinstance(form, dict) and isinstance(value, dict):
        named = {name: value.get(name.removesuffix("?")) for name in form if name != "*"}
        parts = {name: (item, form[name]) for name, item in named.items() if item is not None or name[-1] != "?"}
        parts |= {name: (item, form["*"]) for name, item in value.items()} if "*" in form else {}
        found = (misfit(*part, f"{key}.{name.removesuffix('?')}".lstrip(".")) for name, part in parts.items())
        return next(filter(None, found), "")
    if isinstance(form, list) and isinstance(value, list):
        return next(filter(None, (misfit(item, form[0], f"{key}[{i}]") for i, item in enumerate(value))), "")
    kind = type(form) if isinstance(form, dict | list) else form
    kinds = (int, float, type(None)) if kind is float else (kind,)
    fits = isinstance(value, kinds) and not isinstance(form, dict | list) and not isinstance(value, bool)
    return "" if fits else f"{key}: expected {kind.__name__}, found {type(value).__name__}"


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line, without a line cut by a kill; none if there is no file."""
    found = []
    for line in read_regular(Path(path)).decode(errors="replace").splitlines() if os.path.exists(path) else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Context that only one process at a time can enter, by an OS lock on a file; the others wait."""
    with FileLock(path):
        yield
