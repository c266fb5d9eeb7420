"""Make images for a run that another process leads, distributed by leases, until it is finished."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from maskaq.engine import Engine, pick_engine
from maskaq.errors import RunFolderError
from maskaq.images.stored import StoredImages, StudentHistory
from maskaq.progress import Progress
from maskaq.quant.twin import quantized_twin
from maskaq.runs.opened import OpenedRun, open_run
from maskaq.runs.provenance import check_alike, pick_device, surroundings
from maskaq.runs.sources import image_source
from maskaq.runs.torch_modes import own_torch_modes
from maskaq.storage.leases import SECONDS, check_shared
from maskaq.storage.runfolder import LEADER, QUANTIZED, RunFolder, Shard, is_run

SECONDS_BETWEEN_LOOKS = 1.0


@own_torch_modes()
def work(
    run: OpenedRun | str | Path,
    *,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    fast: bool | None = None,
    lease: float = SECONDS,
    wait: float = 60.0,
    any_device: bool = False,
) -> int:
    """Make images for a run that another process leads; returns the number of shards made.

    Returns when the run is finished. A worker may start late, be stopped or be killed at any time.

    Args:
        lease: seconds after which other workers take over the images of this process if it dies.
        wait: seconds without work and without a leader after which it returns even if the run is not finished.
        any_device: also work on another kind of device, whose images differ from the leader's in their last bits.
    """
    progress = progress or Progress()
    opened = run if isinstance(run, OpenedRun) else open_run(run)
    device = pick_device(device)
    check_shared(opened.folder)
    with RunFolder.join(opened.folder, lease) as folder:
        engine = pick_engine(device, fast, progress)
        ours = surroundings(device) | {"engine": engine.name}
        check_alike(folder, ours, any_device)
        return _Helper(opened, folder, engine, device, progress, partial(check_alike, folder, ours, any_device)).help(
            wait
        )


def wait_for(run: str | Path, seconds: float, tell: Callable[[str], None]) -> None:
    """Wait until a run has begun, at most this long: a worker may start before the process that leads the run."""
    until = time.monotonic() + seconds
    if not is_run(run):
        tell(f"waiting for {run} to begin")
    while not is_run(run) and time.monotonic() < until:
        time.sleep(min(SECONDS_BETWEEN_LOOKS, max(0.0, until - time.monotonic())))


class _Helper:
    """Makes images for a run that another process leads."""

    def __init__(
        self,
        opened: OpenedRun,
        folder: RunFolder,
        engine: Engine,
        device: torch.device,
        progress: Progress,
        check: Callable[[], None],
    ) -> None:
        self.folder = folder
        self.progress = progress
        self.check = check
        self.recipe = recipe = opened.recipe
        teacher = opened.teacher().to(device)
        plan = opened.plan()
        student = quantized_twin(teacher, recipe.quantization, plan)
        source = image_source(teacher, student, recipe, opened.seed, progress, engine)
        self.history = StudentHistory(folder, teacher, student, recipe, plan, opened.seed)
        self.history.epoch = -1  # at the start of no round yet
        self.images = StoredImages(folder, source, self.history)
        self.found: dict[int, Shard] = {}
        self.entered: tuple[Any, ...] = ()
        self.made_before = 0
        """Shards that this process had added when it entered the round."""
        self.others = 0
        """Shards of the round that others have added, as far as the progress shows them."""

    def help(self, wait: float) -> int:
        """Make images until the run is finished; returns the number of shards made."""
        idle = time.monotonic()
        while not self.folder.path(QUANTIZED).exists():
            round_index = self._latest_round()
            if round_index is not None and self._enter(round_index):
                made = self.images.make_some(round_index, self.found)
                self._show_others(round_index)
                if made:
                    idle = time.monotonic()
                    continue
            if self.folder.leases.is_held(LEADER):
                idle = time.monotonic()
            elif time.monotonic() - idle > wait:
                self.progress.note(f"nobody leads {self.folder.root}, and it has no work: leaving")
                break
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return self.images.made

    def _latest_round(self) -> int | None:
        rounds = range(len(self.recipe.rounds))
        return max((index for index in rounds if self.folder.order(index) is not None), default=None)

    def _enter(self, round_index: int) -> bool:
        """Give the student its state at the start of a round; False if the round is over."""
        order = self.folder.order(round_index) or {}
        entering = (round_index, order.get("against"), self.folder.path("run.json").stat().st_mtime_ns)
        if entering == self.entered:
            return True
        self.check()  # another version may have resumed the run
        if not self.history.enter(round_index):
            return False
        if self.images.made_against(round_index) != order.get("against"):
            raise RunFolderError(
                f"{self.folder.root}: the images of round {round_index} are made against another student than this "
                "machine computes: use the same kind of device, as many threads and the same versions as its leader"
            )
        self.entered, self.found = entering, {}
        self.made_before, self.others = self.images.made, len(self.folder.shards(round_index))
        title = f"{self.images.source.stage}, round {round_index + 1} of {len(self.recipe.rounds)}"
        total = self.recipe.synthesis.images * max(1, self.recipe.steps_in_round(round_index))
        self.progress.stage(title, total, done=min(total, self.others * self._work_of_shard(round_index)))
        return True

    def _show_others(self, round_index: int) -> None:
        others = len(self.folder.shards(round_index)) - (self.images.made - self.made_before)
        if others > self.others:
            self.progress.advance((others - self.others) * self._work_of_shard(round_index))
            self.others = others

    def _work_of_shard(self, round_index: int) -> int:
        """Images times steps, which the progress counts."""
        return self.recipe.synthesis.batch * max(1, self.recipe.steps_in_round(round_index))
