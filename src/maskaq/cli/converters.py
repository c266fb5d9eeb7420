"""Converters from the text of an argument to its value; argparse reports an error and exits with 2."""

import argparse
import errno
import math
import os

from maskaq.errors import unwritable


def path(text: str) -> str:
    """A path that the system can look up, whether it exists or not."""
    if not text:  # Python takes it for the working directory, or for no option at all
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    try:
        os.lstat(text)
    except ValueError as error:  # a NUL character
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"expected a path, got {text}: {error.strerror}") from error
    return text


def new_file(text: str) -> str:
    if problem := unwritable(text):
        raise argparse.ArgumentTypeError(problem)
    return text


def share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text}")
    return float(text)


def image_size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.strip().isdigit() for side in sides):
        raise argparse.ArgumentTypeError(f"expected N or HxW in pixels, such as 224 or 192x256, got {text!r}")
    return (int(sides[0]), int(sides[1])) if len(sides) == 2 else int(sides[0])


def numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        example = "expected one number or one per channel, such as 0.5 or 0.485,0.456,0.406"
        raise argparse.ArgumentTypeError(f"{example}, got {text!r}") from None


def positive(text: str) -> int:
    return _at_least(1, text)


def count(text: str) -> int:
    return _at_least(0, text)


def limit(text: str) -> float:
    found = _number(text)
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, got {text!r}")
    return found


def seconds(text: str) -> float:
    found = _number(text)
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _at_least(low: int, text: str) -> int:
    if not text.strip().lstrip("+-").isdigit() or int(text) < low:
        raise argparse.ArgumentTypeError(f"expected a whole number, {low} or more, got {text!r}")
    return int(text)
