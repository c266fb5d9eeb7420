"""Start a command as several processes on this machine, as `torchrun --standalone` does, for `--workers N`.

torchrun restarts all processes if one of them is killed, and the run resumes. An error that maskaq reports does not
need a restart: the process writes its exit code into a file, and all processes exit with 0. Those that do not notice,
because they wait for it or still make images, are terminated after a while.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from maskaq import torchrun
from maskaq.cli.processes import cores
from maskaq.errors import MaskaqError, RankError

_RESTARTS = 3
_OUTCOME = "MASKAQ_OUTCOME"
_PATIENCE = 3.0  # seconds for the rank with the error to record it, before others assume that it was killed
_GRACE = 10.0  # seconds for the others to exit by themselves


class WorkersError(MaskaqError):
    """Processes were killed repeatedly."""


def launch(words: Sequence[str], workers: int) -> int:
    """Run `maskaq WORDS` in several processes; returns the exit code of the run."""
    # Before torch is imported: a store that survives the processes would send new ones to the addresses of dead ones
    # (pytorch/pytorch#167288).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // workers)))

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder, "outcome")
        os.environ[_OUTCOME] = str(outcome)  # for the processes
        logging.disable(logging.WARNING)  # torch logs every signal, with loggers that have their own levels
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=f"maskaq-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=_RESTARTS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            with _ended_with(outcome):
                elastic_launch(config, sys.executable)("-m", "maskaq", *words)
        except SignalException as stop:
            if not outcome.exists():
                raise KeyboardInterrupt(stop.sigval.name) from stop
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise WorkersError(
                f"{_RESTARTS + 1} times one of the {workers} workers ended before the run was done, the last time rank "
                f"{rank} with exit code {failure.exitcode} (-9: killed, often for want of memory). The same command "
                "goes on where it stopped"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[_OUTCOME]
        return int(outcome.read_text()) if outcome.exists() else 0


@contextmanager
def _ended_with(outcome: Path) -> Iterator[None]:
    """Context of a launch that gets SIGTERM if processes go on long after one of them has reported an error."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if outcome.exists():
                if not over.wait(_GRACE):
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, name="maskaq launch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()


def ended(code: int) -> int:
    """Record the exit code of an error; returns that of this process, which is 0 if torchrun would restart it."""
    place = os.environ.get(_OUTCOME)
    if place is None:
        return code
    Path(place).write_text(str(code))
    return 0


def is_reported_elsewhere(error: Exception) -> bool:
    """Whether another process of the command has reported an error, so that this one does not report its own."""
    place = os.environ.get(_OUTCOME)
    if place is None:
        return False
    if torchrun.rank() or isinstance(error, RankError):
        until = time.monotonic() + _PATIENCE
        while not os.path.exists(place) and time.monotonic() < until:
            time.sleep(0.05)
    return os.path.exists(place)


def is_launched() -> bool:
    """Whether this process is one of those that `launch` started."""
    return _OUTCOME in os.environ
