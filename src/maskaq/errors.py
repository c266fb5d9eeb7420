"""Every error a user can cause: one class per kind, one message that says what was expected, what came, what to do.

The command line prints the message alone and exits with 1; a traceback from anything else is a bug in maskaq.
"""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class MaskaqError(Exception):
    """Base of all errors that carry a message for the user."""


class RecipeError(MaskaqError):
    """A recipe or an override has an unknown key, a wrong type or an impossible value."""


class ModelError(MaskaqError):
    """The model is unknown, or has a layer that cannot be quantized."""


class CheckpointError(MaskaqError):
    """A weights file is missing, damaged, or does not fit the model."""


class DataError(MaskaqError):
    """An image folder is missing, or its classes do not match the model's."""


class RunFolderError(MaskaqError):
    """A run folder is in use, damaged, or belongs to another run."""


class BusyError(RunFolderError):
    """Another process is working in a run folder."""


class PretrainedError(MaskaqError):
    """A saved model is missing, damaged, changed, or in an unknown format."""


class SynthesisError(MaskaqError):
    """Too many synthetic images were lost to NaN or Inf."""


class CalibrationError(MaskaqError):
    """The student's loss stopped being a finite number."""


class DeviceError(MaskaqError):
    """The requested device is not available."""


class RankError(MaskaqError):
    """Another one of the processes that calibrate together has ended."""


class ExportError(MaskaqError):
    """A model cannot be exported: the format or a package is missing, or the file's outputs differ from the model's."""


class DependencyError(MaskaqError):
    """A library of an optional part is not installed."""


class RangeError(MaskaqError):
    """A quantizer was used before its range was set, or was given values it cannot cover."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name, with the closest known one."""
    known = sorted(known)
    close = get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}"


def unwritable(file: str | Path) -> str | None:
    """Why a file could not be written there, so that a command fails early; None if it could."""
    if not str(file):
        return "expected the name of a file to write, got an empty one"
    try:
        path = Path(file).absolute()
        if path.is_dir():
            return f"{file} is a folder: expected the name of a file to write"
        if path.exists() and not path.is_file():
            return f"{file} is a device or a pipe: expected the name of a file to write"
        path.with_name(f".{path.name}.{os.getpid()}.{17 * 'x'}.tmp").exists()  # its first name may be too long
        above = next(parent for parent in path.parents if os.path.lexists(parent))
        if not above.is_dir():
            return f"{file} cannot be written: {above} is not a folder"
        if not os.access(above, os.W_OK | os.X_OK):
            return f"{file} cannot be written: {above} is read-only"
    except OSError as error:
        return f"{file} cannot be written: {error.strerror}"
    except ValueError as error:  # a NUL character
        return f"{str(file)!r} cannot be written: {error}"
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened and without its full stop; the class name if there is none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rstrip(".") if len(text) <= 240 else text[:240] + " ..."
