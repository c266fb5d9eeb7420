"""Random damage to random files of a run or a saved model: the same model comes out, or a MaskaqError; nothing else."""

import json
import os
import random
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers import (
    SWIN,
    SWIN_ARGS,
    VIT,
    VIT_ARGS,
    WEIGHTS,
    assert_same,
    packed,
    small_recipe,
    tensors,
    tiny_swin,
    tiny_vit,
)

from maskaq.artifact import saved as pretrained
from maskaq.errors import MaskaqError
from maskaq.progress import Progress
from maskaq.runs import quantize as run
from maskaq.storage.runfolder import QUANTIZED

pytestmark = pytest.mark.slow

MODELS = {"vit": (tiny_vit, {"name": VIT, "args": VIT_ARGS}), "swin": (tiny_swin, {"name": SWIN, "args": SWIN_ARGS})}
RECIPE = small_recipe("refresh.start=warm")
SECONDS = 60  # a case that takes longer hangs


class Snapshots(Progress):
    """Copies the run folder whenever a stage begins, and some way into it."""

    def __init__(self, root: Path, to: Path) -> None:
        self.root, self.to, self.stages = root, to, 0

    def stage(self, title: str, total: int, done: int = 0) -> None:
        self.stages, self.moves = self.stages + 1, 0
        self._copy()

    def advance(self, units: int = 1, **metrics: float) -> None:
        self.moves += 1
        if self.moves in (3, 4):
            self._copy()

    def _copy(self) -> None:
        shutil.copytree(self.root, self.to / f"{self.stages}-{self.moves}", ignore=shutil.ignore_patterns(".lock*"))


@pytest.fixture(scope="module", params=MODELS)
def snapshots(request, tmp_path_factory):
    """A model, its finished run, and its run folder at many moments."""
    build, source = MODELS[request.param]
    root, to = tmp_path_factory.mktemp(request.param) / "run", tmp_path_factory.mktemp(f"{request.param}-stages")
    quantize(build(), root, source, progress=Snapshots(root, to))
    shutil.copytree(root, to / "finished", ignore=shutil.ignore_patterns(".lock*"))
    return build, source, root, sorted(to.iterdir())


def quantize(model, out, source, **more):
    return run.quantize(model, RECIPE, out, device="cpu", source=source, checkpoint_seconds=0, lease=3.0, **more)


def cut(lots: random.Random, path: Path, others: list[Path]) -> None:
    path.write_bytes(path.read_bytes()[: lots.randrange(max(1, path.stat().st_size))])


def flip(lots: random.Random, path: Path, others: list[Path]) -> None:
    data = bytearray(path.read_bytes() or b" ")
    data[lots.randrange(len(data))] ^= 1 << lots.randrange(8)
    path.write_bytes(data)


def delete(lots: random.Random, path: Path, others: list[Path]) -> None:
    path.unlink()


def empty(lots: random.Random, path: Path, others: list[Path]) -> None:
    path.write_bytes(b"")


def swap(lots: random.Random, path: Path, others: list[Path]) -> None:
    other = lots.choice(others)
    data = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(data)


def link(lots: random.Random, path: Path, others: list[Path]) -> None:
    target = lots.choice(others)
    path.unlink()
    path.symlink_to(target)


def link_folder(lots: random.Random, path: Path, others: list[Path]) -> None:
    inner = path.parent
    outside = inner.with_name(f"elsewhere-{inner.name}")
    inner.rename(outside)
    inner.symlink_to(outside)


DAMAGE = (cut, flip, delete, empty, swap, link, link_folder)


@contextmanager
def limited():
    def too_long(*_):
        raise AssertionError(f"no answer in {SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def damaged_copy(lots: random.Random, source: Path, to: Path) -> tuple[Path, str]:
    """A copy of a folder with one or two files damaged, and what was done to it."""
    shutil.rmtree(to.parent, ignore_errors=True)
    shutil.copytree(source, to)
    done = [source.name]
    for _ in range(lots.choice((1, 1, 2))):
        files = sorted(path for path in to.rglob("*") if path.is_file() and not path.is_symlink())
        path, damage = lots.choice(files), lots.choice(DAMAGE)
        if damage is link_folder and path.parent == to:
            damage = link
        damage(lots, path, files)
        done.append(f"{damage.__name__} {path.relative_to(to)}")
    return to, ", ".join(done)


@pytest.mark.parametrize("part", range(4))
def test_a_damaged_run_ends_in_the_same_model_or_in_an_error(snapshots, tmp_path, part):
    build, source, root, stages = snapshots
    expected, model = tensors(root / WEIGHTS), build()
    outcomes = {"same": 0, "error": 0}
    for case in range(30):
        lots = random.Random(f"run {part} {case}")
        out, what = damaged_copy(lots, lots.choice(stages), tmp_path / "case" / "run")
        try:
            with limited():
                quantize(model, out, source, report=case % 10 == 0)
            assert_same(tensors(out / WEIGHTS), expected)
            outcomes["same"] += 1
        except MaskaqError:
            outcomes["error"] += 1
        except BaseException as error:
            raise AssertionError(f"case {part}, {case}: {what}") from error
    assert all(outcomes.values()), outcomes  # the damage must not be all of one kind


@pytest.mark.parametrize("part", range(2))
def test_a_damaged_saved_model_gives_the_same_outputs_or_an_error(snapshots, tmp_path, part):
    _, _, root, _ = snapshots
    expected = packed(pretrained.from_pretrained(root / QUANTIZED))
    outcomes = {"same": 0, "error": 0}
    for case in range(40):
        lots = random.Random(f"saved {part} {case}")
        folder, what = damaged_copy(lots, root / QUANTIZED, tmp_path / "case" / "saved")
        try:
            with limited():
                loaded = pretrained.from_pretrained(folder)
            assert_same(packed(loaded), expected)
            labels = json.loads((root / QUANTIZED / "config.json").read_text()).get("id2label")
            assert loaded.maskaq_config.get("id2label") == labels
            outcomes["same"] += 1
        except MaskaqError:
            outcomes["error"] += 1
        except BaseException as error:
            raise AssertionError(f"case {part}, {case}: {what}") from error
    assert all(outcomes.values()), outcomes


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "report", "export", "inspect"])
def test_no_command_leaves_a_damaged_folder_in_a_traceback(snapshots, tmp_path, command, capfd):
    from maskaq.cli.main import main

    _, _, root, stages = snapshots
    images = tmp_path / "images"
    for label in range(4):
        (images / str(label)).mkdir(parents=True)
        torch.manual_seed(label)
        from torchvision.utils import save_image

        save_image(torch.rand(3, 32, 32), images / str(label) / "0.png")
    more = {
        "calibrate": ["--no-report"],
        "evaluate": ["--data", str(images)],
        "report": [],
        "export": ["--format", "pt2"],
        "inspect": [],
    }
    for case in range(12):
        lots = random.Random(f"{command} {case}")
        out, what = damaged_copy(lots, lots.choice([stages[-1], *stages]), tmp_path / "case" / "run")
        try:
            with limited():
                code = main(
                    [
                        command,
                        str(out),
                        *more[command],
                        *(["--device", "cpu"] * (command in ("calibrate", "evaluate", "report"))),
                    ]
                )
        except BaseException as error:
            raise AssertionError(f"case {case}: {what}") from error
        printed = capfd.readouterr()
        assert code in (0, 1), what
        assert "Traceback" not in printed.err, what
    assert os.path.isdir(root)
