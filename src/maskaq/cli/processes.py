"""A command as several processes on this machine that share work through files, for `maskaq compare --workers N`.

They are not torchrun ranks: each runs whole rows by itself, and does not end because another one does.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SECONDS_TO_END = 20.0  # for a process to save what it has, before it is killed


@dataclass(frozen=True)
class Process:
    """A process and its output."""

    process: subprocess.Popen[bytes]
    messages: Path

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def failure(self) -> str:
        """Why it ended before its work was done; empty if it did not."""
        code = self.process.poll()
        if not code:
            return ""
        lines = self.messages.read_text(errors="replace").strip().splitlines()
        return f"exit code {code}{': ' if lines else ''}{lines[-1] if lines else ''}"


@contextmanager
def copies(words: Sequence[str], environments: Sequence[dict[str, str]]) -> Iterator[list[Process]]:
    """Context in which `maskaq WORDS` runs once in each of these environments; at its end, the rest is terminated."""
    started: list[Process] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, environment in enumerate(environments):
                messages = Path(folder, str(number))
                with messages.open("wb") as out:
                    command = [sys.executable, "-m", "maskaq", *words]
                    started.append(
                        Process(subprocess.Popen(command, env=environment, stdout=out, stderr=out), messages)
                    )
            yield started
        finally:
            _end([found.process for found in started])


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.terminate()  # nothing happens to one that has ended
    until = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def environments(count: int, gpus: int) -> list[dict[str, str]]:
    """Environments for several processes, each with a share of the cores and, if there are several, a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // count)))}
    own = [{"CUDA_VISIBLE_DEVICES": visible.split(",")[i % gpus]} if gpus > 1 else {} for i in range(count)]
    return [{**os.environ, **threads, **found} for found in own]


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
