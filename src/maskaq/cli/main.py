"""The command line: commands, exit codes and errors. torch is imported late, so that --help is fast."""

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console

import maskaq
from maskaq import torchrun
from maskaq.cli import (
    bench,
    bench_runtime,
    calibrate,
    compare,
    demo,
    evaluate,
    export,
    filter_images,
    inspect,
    launch,
    list_names,
    push,
    quantize,
    report,
    status,
    synthesize,
    work,
)
from maskaq.cli.arguments import Invocation, typed
from maskaq.errors import MaskaqError, RankError


class Command(Protocol):
    """Protocol of a command, which is a module."""

    SUMMARY: str
    RESUMABLE: bool
    """Whether the same command continues where it was interrupted."""

    @property
    def Arguments(self) -> type[Any]:
        """A frozen dataclass."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    @property
    def run(self) -> Callable[[Any, Invocation], None]:
        """Imports what it needs only when it is called."""


COMMANDS: dict[str, Command] = {
    "quantize": quantize,
    "synthesize": synthesize,
    "calibrate": calibrate,
    "work": work,
    "status": status,
    "evaluate": evaluate,
    "export": export,
    "push": push,
    "report": report,
    "compare": compare,
    "filter": filter_images,
    "inspect": inspect,
    "bench": bench,
    "bench-runtime": bench_runtime,
    "list": list_names,
    "demo": demo,
}

_EXAMPLES = """examples:
  maskaq demo                                          a small embedded model, end to end, on any machine
  maskaq inspect deit_tiny_patch16_224 --bits w4a4     what would be quantized, and how small it gets
  maskaq quantize deit_tiny_patch16_224 --bits w4a4 --recipe quick --out runs/deit_t
  maskaq quantize deit_tiny_patch16_224 --checkpoint deit_t.safetensors --bits w4a8 --data imagenet/val
  maskaq evaluate runs/deit_t --data imagenet/val
  maskaq export runs/deit_t --format onnx              a file for ONNX Runtime or OpenVINO, verified
  maskaq report runs/deit_t                            an HTML report, in the run folder
  maskaq list keys                                     every setting, for --set key=value

Repeat a command to resume an interrupted run."""


_HOW_TO_GO_ON = (
    ". Finished shards of images and the latest checkpoint are kept, work since then is done again: "
    "give the same command again to go on"
)


def main(argv: list[str] | None = None) -> int:
    """Run one command; exit code: 0 done, 1 a clear error, 2 a mistake in the command, 130 Ctrl-C, 143 SIGTERM."""
    _prepare_process()
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 0
    parsed, unknown = parser.parse_known_args(words)
    if unknown:  # told with the options of the command, which argparse would not show
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command = COMMANDS[parsed.command]
    arguments = typed(command.Arguments, parsed)
    width = None if sys.stdout.isatty() else 140  # a log file has room for whole table rows
    plain = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}  # a path may hold [x] or :x:
    console = Console(width=width, quiet=torchrun.rank() > 0, **plain)  # type: ignore[arg-type]
    errors = Console(stderr=True, **plain)  # type: ignore[arg-type]
    try:
        with _sigterm_interrupts():
            if getattr(arguments, "workers", 1) > 1 and not torchrun.are_started():
                return launch.launch(words, arguments.workers)
            command.run(arguments, Invocation(words, console))
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated) or "SIGTERM" in stop.args
        go_on = _HOW_TO_GO_ON if command.RESUMABLE else ""
        if torchrun.rank() == 0 and not launch.is_launched():
            errors.print(f"\n{'terminated' if terminated else 'interrupted'}{go_on}")
        return 143 if terminated else 130
    except BrokenPipeError:  # `maskaq list models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (MaskaqError, OSError, RuntimeError, MemoryError) as error:
        message = _message_of(error)
        if message is None:
            raise
        if launch.is_reported_elsewhere(error):
            return 0
        errors.print(f"error: {message}", style="red")
        return 1 if isinstance(error, RankError) else launch.ended(1)
    return 0


def _prepare_process() -> None:
    # On a busy machine, threads that spin while they wait take the cores from each other; threads that sleep at once
    # wake up late, thousands of times per step. So they spin briefly. torch reads both when it is first imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):  # a terminal without ± or a path's letters gets them as \xb1
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _message_of(error: Exception) -> str | None:
    """The message for an error that the user can fix; None for a bug, which keeps its traceback."""
    if isinstance(error, MaskaqError):
        return str(error)
    if isinstance(error, OSError):  # a file or folder that the commands did not foresee
        return None if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be imported
        return f"out of GPU memory even with one image at a time: {error}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "out of memory: lower --batch, or in a recipe synthesis.images, synthesis.batch or calibration.batch"
    return None


class _Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which batch systems send before SIGKILL: exits like Ctrl-C, so that locks are released."""


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return

    def terminate(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="maskaq",
        description="Quantize vision transformers without any training data (MaskAQ).",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"maskaq {maskaq.__version__}")
    parsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        summary = command.SUMMARY
        description = summary[0].upper() + summary[1:] + "."
        sub = parsers.add_parser(name, help=summary, description=description, formatter_class=raw)
        sub.set_defaults(command=name, parser=sub)
        command.add_arguments(sub)
    return parser
