"""The images of a run in its folder: read if they exist, otherwise made, and made again if they were lost.

If a shard that calibration has used is lost (deleted, truncated, swapped, a flipped bit), the result must not change.
So every checkpoint holds the digests of the shards it was calibrated on, and the student that a round's images were
made against is kept until the run ends. A lost shard is made again from that student, and accepted only if it is the
same to the bit. If that is not possible, the run stops.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from maskaq import randomness
from maskaq.errors import RankError, RunFolderError, SynthesisError
from maskaq.images.sets import SyntheticSet, to_pixels
from maskaq.images.source import ImageSource
from maskaq.models import geometry
from maskaq.quant.plan import QuantPlan
from maskaq.quant.twin import init_ranges_, quantized_twin, quantizers
from maskaq.recipe.schema import Recipe, recipe_from_dict
from maskaq.storage import files
from maskaq.storage.runfolder import LEADER, QUANTIZED, RunFolder, Shard

_SECONDS_BETWEEN_LOOKS = 0.5  # at the work of others, while there is nothing to do


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names and values of a state dict."""
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def noise(teacher: nn.Module, n: int, seed: int) -> Tensor:
    """n images of Gaussian noise, to set the student's ranges before the first synthesis."""
    spec = geometry(teacher)
    device = next(teacher.parameters()).device
    keys = randomness.fold(randomness.image_keys(seed, torch.arange(n, device=device)), "range noise")
    return randomness.normal(keys, spec.channels, *spec.image_size)


def load_images(run: RunFolder, round_index: int, shard: int) -> SyntheticSet:
    """The images of a stored shard; DamagedError if it does not hold valid images."""
    return _as_images(run, round_index, shard, run.load_shard(round_index, shard))


def _as_images(run: RunFolder, round_index: int, shard: int, found: Shard) -> SyntheticSet:
    tensors = found.tensors
    size = run.identity.get("preparation", {}).get("image_size")
    kinds = {name: (value.dtype, value.dim(), len(value) if value.dim() else 0) for name, value in tensors.items()}
    count = kinds.get("labels", (None, 0, 0))[2]
    expected = {
        "images": (torch.uint8, 4, count),
        "labels": (torch.int64, 1, count),
        "indices": (torch.int64, 1, count),
    }
    if kinds != expected or (size is not None and list(tensors["images"].shape[2:]) != list(size)):
        path = run.path(f"images/round_{round_index:02d}")
        raise files.DamagedError(path, f"shard {shard} does not hold images of this run", files.RESTORE)
    return SyntheticSet(**tensors)


def first_images(run: RunFolder, count: int) -> SyntheticSet:
    """The first images of the first round, from the folder; RunFolderError if one of their shards is lost."""
    config = recipe_from_dict(run.identity["recipe"]).synthesis
    needed = -(-min(count, config.images) // config.batch)
    found = [load_images(run, 0, shard) for shard in range(needed)]
    for shard in range(needed, -(-config.images // config.batch)):  # images that became NaN leave room for later ones
        if sum(map(len, found)) < count:
            found.append(load_images(run, 0, shard))
    return SyntheticSet.concatenate(found)[:count]


def latest_images(run: RunFolder) -> SyntheticSet:
    """The images of the last round: all of them for a finished run, else those of the latest round that has any."""
    recipe = recipe_from_dict(run.identity["recipe"])
    if run.path(QUANTIZED).exists():
        latest = len(recipe.rounds) - 1
        there = list(range(-(-recipe.synthesis.images // recipe.synthesis.batch)))
    else:
        latest = next(
            (round_index for round_index in reversed(range(len(recipe.rounds))) if run.shards(round_index)), 0
        )
        there = run.shards(latest)
    if not there:
        raise RunFolderError(f"{run.root} has no images yet")
    return SyntheticSet.concatenate(load_images(run, latest, shard) for shard in there)


def range_images(teacher: nn.Module, images: SyntheticSet, recipe: Recipe) -> Tensor:
    """The first synthetic images, normalised, to set the ranges that calibration starts from."""
    chosen = images[: recipe.quantization.range_images].to(next(teacher.parameters()).device)
    return geometry(teacher).normalise(to_pixels(chosen.images))


def first_student(teacher: nn.Module, recipe: Recipe, plan: QuantPlan, seed: int) -> nn.Module:
    """The student with ranges from noise, against which the first images are synthesised."""
    scheme = recipe.quantization
    student = quantized_twin(teacher, scheme, plan)
    init_ranges_(student, noise(teacher, scheme.range_images, seed), scheme)
    return student


class StudentHistory:
    """The student now, and as it was at the start of each round."""

    def __init__(
        self, run: RunFolder, teacher: nn.Module, student: nn.Module, recipe: Recipe, plan: QuantPlan, seed: int
    ) -> None:
        self.run = run
        self.teacher = teacher
        self.student = student
        self.recipe = recipe
        self.plan = plan
        self.seed = seed
        self.epoch = 0
        """Number of epochs that the student was calibrated for."""

    @contextmanager
    def at_start_of(self, round_index: int) -> Iterator[None]:
        """Context in which the student has its weights from the start of the round."""
        if self._is_at_start_of(round_index):
            yield
            return
        state = self._start_of(round_index)
        assert state is not None  # `digest_at_start_of` was asked before
        now = {name: value.clone() for name, value in self.student.state_dict().items()}
        try:
            self.student.load_state_dict(state)
            yield
        finally:
            self.student.load_state_dict(now)

    def enter(self, round_index: int) -> bool:
        """Give the student its weights from the start of the round; False if they are no longer known."""
        state = self._start_of(round_index)
        if state is None:
            return False
        self.student.load_state_dict(state)
        self.epoch = self.recipe.rounds[round_index].start
        return True

    def digest_at_start_of(self, round_index: int) -> str | None:
        """Digest of the student as the round began; None if that student is no longer known."""
        state = self.student.state_dict() if self._is_at_start_of(round_index) else self._start_of(round_index)
        if state is None:
            return None
        derived = {f"{name}.{key}" for name, q in quantizers(self.student).items() for key in q.derived}
        return state_digest({key: value for key, value in state.items() if key not in derived})

    def _is_at_start_of(self, round_index: int) -> bool:
        return self.epoch == self.recipe.rounds[round_index].start

    def _start_of(self, round_index: int) -> dict[str, Any] | None:
        if round_index == 0:
            return dict(first_student(self.teacher, self.recipe, self.plan, self.seed).state_dict())
        saved = self.run.load_checkpoint(self.recipe.rounds[round_index].start)
        return None if saved is None else saved.state()["student"]


class StoredImages:
    """The images of every round, in shards of `synthesis.batch` images.

    Args:
        others_make: if this process does not lead the run and cannot write images, it waits for those of others.
        part: number of images that are made together; by default what is fastest on this device. A round that has begun
            keeps its own.
    """

    def __init__(
        self,
        run: RunFolder,
        source: ImageSource,
        history: StudentHistory,
        others_make: bool = False,
        part: int | None = None,
    ) -> None:
        self.run = run
        self.part = part
        self.others_make = others_make
        self.source = source
        self.history = history
        self.recipe = source.recipe
        self.progress = source.progress
        numbers = torch.arange(self.recipe.synthesis.images)
        self.numbers: list[Tensor] = list(numbers.split(self.recipe.synthesis.batch))
        """Numbers of the images in each shard."""
        self.used: dict[int, list[str]] = {}
        """Round -> digests of the shards that the newest checkpoint was calibrated on."""
        self.digests: dict[int, list[str]] = {}
        """The same for the rounds that were requested since."""
        self._against: dict[tuple[int, int], str | None] = {}
        self._unsound: dict[tuple[int, int], tuple[int, ...]] = {}  # files that were rejected
        self.made = 0
        """Shards that this process has added."""
        self._gave_up = False
        self._not_before: dict[int, float] = {}

    def of_round(self, round_index: int) -> SyntheticSet:
        """All images of a round, made by this process and by others."""
        config = self.recipe.synthesis
        work = max(1, self.recipe.steps_in_round(round_index))
        found: dict[int, Shard] = {}
        missing = self._look(round_index, found)
        if self.run.leads and self._is_warm(round_index):
            for shard in missing:  # before this round's progress begins
                self._ensure(round_index - 1, shard)
        if missing:
            self._check_source(round_index)
        done = sum(len(self.numbers[shard]) for shard in found)
        title = f"{self.source.stage}, round {round_index + 1} of {len(self.recipe.rounds)}"
        self.progress.stage(title, config.images * work, done=done * work)
        while missing:
            if not self._try_some(round_index, found):
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            before = len(found)
            missing = self._look(round_index, found)
            others = list(found)[before:]  # made by other processes
            if others:
                self.progress.advance(sum(len(self.numbers[shard]) for shard in others) * work)
            if missing and not self.run.leads and not self.run.leases.is_held(LEADER):
                raise RankError(f"nobody leads {self.run.root} any more: the message of rank 0 says why")
        self.digests[round_index] = [found[shard].digest for shard in range(len(self.numbers))]
        images = SyntheticSet.concatenate(
            _as_images(self.run, round_index, shard, found[shard]) for shard in sorted(found)
        )
        self._check_lost(round_index, config.images - len(images))
        return images

    def _try_some(self, round_index: int, found: dict[int, Shard]) -> bool:
        if self.run.leads or not self.others_make:
            return self.make_some(round_index, found)
        try:
            return not self._gave_up and self.make_some(round_index, found)
        except RunFolderError as error:  # only this machine's disk may be full or its folder read-only
            self._gave_up = True
            self.progress.note(f"{self.run.leases.worker} makes no more images, and waits for those of others: {error}")
            return False

    def make_some(self, round_index: int, found: dict[int, Shard]) -> bool:
        """Make the next shards that nobody else makes, and put them into `found`; False if there is nothing to do.

        Shards are claimed in parts that are made together. The parts are the same for all workers, so a shard is the
        same whichever worker makes it.
        """
        leases = self.run.leases
        if time.monotonic() < self._not_before.get(round_index, 0.0):
            return False
        parts = self._parts(round_index)
        first = 0 if self.run.leads else leases.place % max(1, len(parts))  # workers start at different parts
        for number in (*range(first, len(parts)), *range(first)):
            if all(shard in found for shard in parts[number]):
                continue
            with leases.claimed(f"round_{round_index:02d}-part_{number:04d}") as mine:
                if not mine:
                    continue
                missing = self._look(round_index, found, parts[number])
                if missing:
                    found |= self._make(round_index, missing)
                return True
        # All parts are taken: a thousand workers must not ask the file server for each of them all the time.
        self._not_before[round_index] = time.monotonic() + leases.seconds / 20 if parts else 0.0
        return False

    def _look(self, round_index: int, found: dict[int, Shard], shards: Iterable[int] | None = None) -> list[int]:
        """Put the sound shards of a round (or of `shards`) into `found`; returns those that are still missing."""
        shards = range(len(self.numbers)) if shards is None else shards
        for shard in shards:
            if shard not in found and (sound := self._find(round_index, shard)) is not None:
                found[shard] = sound
        return [shard for shard in shards if shard not in found]

    def _shards_at_once(self) -> int:
        if self.part is not None:
            return max(1, min(self.part // self.recipe.synthesis.batch, len(self.numbers)))
        return self.source.shards_at_once(len(self.numbers))

    def _parts(self, round_index: int) -> list[list[int]]:
        """Lists of shards that are made together; empty until the leader of the run requests the round's images."""
        order, against = self.run.order(round_index), self.made_against(round_index)
        if self.run.leads:
            at_once = order["shards_at_once"] if order else self._shards_at_once()
            asked = {"against": against or "", "shards_at_once": at_once}
            if order != asked:
                self.run.write_order(round_index, order := asked)
        if order is None or order["against"] != (against or ""):
            return []
        at_once = max(1, order["shards_at_once"])
        self.source.expect(min(self.recipe.synthesis.images, at_once * self.recipe.synthesis.batch))
        shards, parts = list(range(len(self.numbers))), []
        while shards:
            calls = -(-len(shards) // at_once)
            together = -(-len(shards) // calls)  # as equal as possible
            parts.append(shards[:together])
            shards = shards[together:]
        return parts

    def first(self, count: int) -> SyntheticSet:
        """The first images of the first round, to set the ranges that calibration starts from."""
        found: list[SyntheticSet] = []
        for shard in range(len(self.numbers)):
            if sum(map(len, found)) < count:
                found.append(self._ensure(0, shard))
        return SyntheticSet.concatenate(found)[:count]

    def _ensure(self, round_index: int, shard: int) -> SyntheticSet:
        """The images of one shard, made again if it was lost."""
        found = self._find(round_index, shard)
        if found is None:
            work = len(self.numbers[shard]) * max(1, self.recipe.steps_in_round(round_index))
            self.progress.stage(f"{self.source.stage} again: shard {shard} of round {round_index + 1}", work)
            self._check_source(round_index)
            found = self._make(round_index, [shard])[shard]
        return _as_images(self.run, round_index, shard, found)

    def _find(self, round_index: int, shard: int) -> Shard | None:
        """A stored shard that belongs to this run; None if it has to be made."""
        sign, key = self.run.shard_sign(round_index, shard), (round_index, shard)
        if sign is None or self._unsound.get(key) == sign:
            return None
        try:
            found = self.run.load_shard(round_index, shard)
        except files.DamagedError as error:
            self.progress.note(f"{error.path} is damaged ({error.reason}): it is made again")
            self._unsound[key] = sign
            return None
        used = self.used.get(round_index)
        if used is not None:
            fits = shard < len(used) and found.digest == used[shard]
        else:
            fits = not self.recipe.data_free or self.made_against(round_index) in (None, found.student)
        if not fits:
            why = "is not the one that calibration used" if used else "was made against another student"
            self.progress.note(f"shard {shard} of round {round_index} {why}: it is made again")
            self._unsound[key] = sign
        return found if fits else None

    def _make(self, round_index: int, shards: list[int]) -> dict[int, Shard]:
        """Make some shards together and store them. A shard that calibration has used must be the same again."""
        began = time.monotonic()
        used = self.used.get(round_index)
        against = self.made_against(round_index)
        if against is None:
            raise self._lost(round_index, shards, "the student that they were made against is not kept any more")
        earlier = [self._ensure(round_index - 1, shard) for shard in shards if self._is_warm(round_index)]
        start = SyntheticSet.concatenate(earlier) if earlier else None
        with self.history.at_start_of(round_index):
            images = self.source(torch.cat([self.numbers[shard] for shard in shards]), round_index, start)
        seconds = (time.monotonic() - began) / len(shards)
        new, sealed = {}, {}
        for shard in shards:
            part = images[torch.isin(images.indices, self.numbers[shard])]
            lost = sorted(set(self.numbers[shard].tolist()) - set(part.indices.tolist()))
            sealed[shard] = self.run.seal_shard(round_index, shard, part.tensors(), against, lost)
            new[shard] = Shard(part.tensors(), against, lost, files.digest_of(sealed[shard]))
        if used is not None:
            differ = [shard for shard in shards if shard >= len(used) or new[shard].digest != used[shard]]
            if differ:
                why = "made again they come out different (another device, other versions, or a GPU's own batches)"
                raise self._lost(round_index, differ, why)
        self._keep_trajectory(round_index, first=shards[0] == 0)
        for shard in shards:
            unsound = self._unsound.get((round_index, shard))
            is_unsound = unsound is not None and unsound == self.run.shard_sign(round_index, shard)
            if not self.run.write_shard(round_index, shard, sealed[shard], replace=is_unsound):
                theirs = self._find(round_index, shard)  # of a worker that took over and was faster
                if theirs is not None:
                    new[shard] = theirs
                    continue
                self.run.write_shard(round_index, shard, sealed[shard])
            about = {"stage": self.source.stage, "round": round_index, "shard": shard, "seconds": seconds}
            about |= {"worker": str(self.run.leases.worker)}
            self.made += 1
            self.run.event(**about, lost=new[shard].lost, curves=self.source.curves)
        return new

    def _check_source(self, round_index: int) -> None:
        """RunFolderError if the image folder has changed since the round's other shards were read from it."""
        if self.source.fingerprint is None:
            return
        for shard in self.run.shards(round_index):
            with suppress(files.DamagedError):
                if self.run.load_shard(round_index, shard).student == self.source.fingerprint:
                    return  # one sound shard is enough
                raise RunFolderError(
                    f"{self.recipe.synthesis.folder} has changed since {self.run.root} was begun: put its images "
                    "back as they were and run the same command again, or start a new run with another --out"
                )

    def _lost(self, round_index: int, shards: list[int], why: str) -> RunFolderError:
        return RunFolderError(
            f"{self.run.root}: shards {', '.join(map(str, shards))} of round {round_index}, which the student was "
            f"calibrated on, are lost or damaged, and {why}. Going on would give another model: put the files back "
            "from a copy and run the same command again, or start a new run with another --out"
        )

    def _is_warm(self, round_index: int) -> bool:
        return round_index > 0 and self.recipe.refresh.start == "warm"

    def made_against(self, round_index: int) -> str | None:
        """Digest of what the round's images are made against: the image folder, or the student as the round began."""
        key = (round_index, self.history.epoch)
        if key not in self._against:
            self._against[key] = self.source.fingerprint or self.history.digest_at_start_of(round_index)
        return self._against[key]

    def _keep_trajectory(self, round_index: int, first: bool) -> None:
        """Store the trajectory of the round's first image, or of the first of a later shard if that one was lost."""
        trajectory = self.source.trajectory
        if trajectory is not None:
            words = {"number": str(trajectory.number), "steps": " ".join(map(str, trajectory.steps))}
            self.run.write_trajectory(round_index, trajectory.images, words, replace=first)

    def _check_lost(self, round_index: int, lost: int) -> None:
        """SynthesisError if too many images of a round became NaN or Inf."""
        config = self.recipe.synthesis
        if lost <= config.max_lost * config.images and lost < config.images:
            return
        cause = f"check the model's weights, or lower synthesis.lr (now {config.lr})"
        if round_index:  # the round before succeeded with the same teacher: only the student has changed
            refresh_lr = f", or refresh.lr (now {self.recipe.refresh.lr})" if self.recipe.refresh.lr else ""
            cause = (
                f"by round {round_index + 1} the student has probably diverged: lower calibration.lr "
                f"(now {self.recipe.calibration.lr}) or set calibration.clip_grad{refresh_lr}"
            )
        cause = self.source.blamed or cause
        raise SynthesisError(
            f"{lost} of {config.images} images were lost to NaN or Inf, more than synthesis.max_lost "
            f"{config.max_lost} allows; {cause}, in a new run folder"
        )
