"""Several ranks calibrate one student: the same run as one process, up to the order of sums."""

import contextlib
import errno
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import VIT, VIT_ARGS, assert_same_run, hook, small_recipe, tensors, tiny_vit

import maskaq
from maskaq import ranks as group
from maskaq.calibrate.calibrator import Share
from maskaq.errors import MaskaqError
from maskaq.images.augment import REACH, mix
from maskaq.randomness import image_keys
from maskaq.ranks import ALONE, Ranks
from maskaq.runs import work as working
from maskaq.runs.quantize import quantize
from maskaq.storage.runfolder import RunFolder

RECIPE = small_recipe("synthesis.images=14", "synthesis.batch=2", "calibration.batch=8")
"""Two rounds of 7 shards, each with two epochs of two steps: one of 8 images, one of 6."""


def rank(number: int, size: int, port: int, function, *args) -> None:
    """A process as torchrun would start it."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(size), "LOCAL_RANK": str(number)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
    function(*args)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def in_ranks(size: int, function, *args) -> list[int | None]:
    """The exit codes of ranks that call a function together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers", "maskaq.cli.running", "torch.distributed"])
    port = free_port()
    processes = [context.Process(target=rank, args=(n, size, port, function, *args)) for n in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def run(out: Path, recipe=RECIPE, **more) -> None:
    quantize(tiny_vit(), recipe, out, device="cpu", report=False, **more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "alone"
    run(out, checkpoint_seconds=0)
    return out


def checkpoint(out: Path, epoch: int) -> dict[str, torch.Tensor]:
    return tensors(out / f"checkpoints/checkpoint_{epoch:06d}.safetensors")


def farthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of two students, over the largest value of each tensor."""
    assert a.keys() == b.keys()
    floats = [name for name in a if a[name].is_floating_point() and name.startswith("student")]
    return max(float((a[n] - b[n]).abs().max() / a[n].abs().max().clamp(min=1e-6)) for n in floats)


def losses(out: Path) -> list[float]:
    events = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if "epoch" in event]


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (2, ()),
        pytest.param(3, (), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
        pytest.param(2, ("calibration.augment.cutmix=0.5", "calibration.augment.mixup=0.5"), marks=pytest.mark.slow),
        pytest.param(4, ("calibration.batch=3", "calibration.clip_grad=0.1"), marks=pytest.mark.slow),
        pytest.param(2, ("quantization.weight=lsq", "calibration.pace=error"), marks=pytest.mark.slow),
        pytest.param(
            2,
            ("calibration.stages=['reconstruct','calibrate']", "calibration.reconstruct.epochs=2"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_give_the_run_of_one_process_up_to_the_order_of_sums(tmp_path, size, overrides):
    """Ranges and their gradients included: before rounding differences can grow, that is, in the first epochs."""
    recipe = small_recipe("synthesis.images=14", "synthesis.batch=2", "calibration.batch=8", *overrides)
    for out, how_many in ((tmp_path / "one", 1), (tmp_path / "ranks", size)):
        if how_many == 1:
            run(out, recipe, checkpoint_seconds=0)
        else:
            assert in_ranks(how_many, run, out, recipe) == [0] * size
    for shard in (tmp_path / "one/images/round_00").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "ranks/images/round_00" / shard.name).read_bytes()
    first = min(3, recipe.rounds[1].start)  # of the first round
    one, ranks = (json.loads((tmp_path / out / "run.json").read_text())["plan"] for out in ("one", "ranks"))
    assert one == ranks
    assert losses(tmp_path / "one")[:first] == pytest.approx(losses(tmp_path / "ranks")[:first], rel=1e-4)
    assert (tmp_path / "ranks/quantized/model.safetensors").exists()


@pytest.mark.slow
def test_a_step_of_ranks_differs_from_one_process_by_rounding_alone(tmp_path, monkeypatch):
    """One epoch of one step: weights, ranges and the state of the optimiser."""
    recipe = small_recipe(
        "synthesis.images=8", "calibration.epochs=1", "calibration.batch=8", "quantization.weight=lsq",
        "calibration.augment.cutmix=0.5", "calibration.augment.mixup=0.5",
    )  # fmt: skip
    run(tmp_path / "one", recipe)
    assert in_ranks(3, run, tmp_path / "ranks", recipe) == [0, 0, 0]
    one, ranks = (checkpoint(tmp_path / out, 1) for out in ("one", "ranks"))
    assert farthest(one, ranks) < 2e-6
    moments = [name for name in one if name.startswith("optimizer") and one[name].dim()]
    assert moments
    for name in moments:
        scale = one[name].abs().max().clamp(min=1e-12)
        assert float((one[name] - ranks[name]).abs().max() / scale) < 1e-4, name


@pytest.mark.slow
def test_ranks_halve_the_first_step_as_often_as_one_process(tmp_path):
    """Each decides for itself: ranks that disagreed would wait for each other forever."""
    recipe = small_recipe(
        "synthesis.images=8", "calibration.epochs=1", "calibration.batch=8", "calibration.lr=1",
        "calibration.pace=first_step",
    )  # fmt: skip
    run(tmp_path / "one", recipe)
    assert in_ranks(2, run, tmp_path / "ranks", recipe) == [0, 0]
    states = [RunFolder.read(tmp_path / out).load_checkpoint(1).state()["optimizer"] for out in ("one", "ranks")]
    one, ranks = ([group["pace"] for group in state["param_groups"]] for state in states)
    assert one == pytest.approx(ranks, rel=1e-4) and max(one) < 0.1, "0.13 before it was halved"


def test_the_parts_of_ranks_are_mixed_as_the_whole_batch_is():
    pixels, keys = torch.rand(9, 3, 8, 8), image_keys(0, torch.arange(9))
    whole = mix(pixels, keys, cutmix=0.7, mixup=0.6)
    for size in (1, 2, 3, 9, 12):
        found = []
        for number in range(size):
            one = Ranks()
            one.rank, one.size = number, size
            share = Share.of(one, 9)
            rows = share.rows(torch.arange(9))
            mixed = mix(pixels[rows], keys[rows], cutmix=0.7, mixup=0.6)[share.before : share.before + share.own]
            found += [mixed] if share.counts else []
            assert len(rows) <= share.own + max(REACH, 9 - share.own if share.own + REACH >= 9 else 0)
        assert torch.equal(torch.cat(found), whole)


def test_one_process_takes_the_batch_as_it_is():
    chosen = torch.arange(5)
    share = Share.of(ALONE, 5)
    assert share.rows(chosen) is chosen and (share.own, share.before, share.counts) == (5, 0, True)


def wait_for_the_leader(folder: Path) -> None:
    with group.joined(torch.device("cpu")) as ranks:
        began = time.process_time()
        with ranks.leader_first():
            if ranks.leads:
                time.sleep(2)
        if not ranks.leads:
            (folder / "seconds").write_text(str(time.process_time() - began))


@pytest.mark.slow
def test_ranks_wait_for_the_leader_without_spinning(tmp_path):
    assert in_ranks(2, wait_for_the_leader, tmp_path) == [0, 0]
    assert float((tmp_path / "seconds").read_text()) < 0.5


def follow_a_late_leader(folder: Path) -> None:
    with group.joined(torch.device("cpu")) as ranks:
        real = ranks.dist.broadcast

        def broadcast(*args, **kwargs):
            assert (folder / "leader").exists(), "NCCL's would spin"
            return real(*args, **kwargs)

        ranks.dist.broadcast = broadcast
        if ranks.leads:
            time.sleep(1)
            (folder / "leader").touch()
        layer = torch.nn.Linear(2, 2)
        ranks.follow(layer)
        safetensors.torch.save_file(layer.state_dict(), folder / str(ranks.rank))


@pytest.mark.slow
def test_ranks_take_the_student_of_the_leader_when_it_is_there(tmp_path):
    assert in_ranks(2, follow_a_late_leader, tmp_path) == [0, 0]
    one, other = (safetensors.torch.load_file(tmp_path / rank) for rank in "01")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_and_tell(out: Path, recipe) -> None:
    try:
        run(out, recipe)
    except MaskaqError as error:
        Path(f"{out}.{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None


@pytest.mark.slow
def test_an_error_of_the_leader_ends_all_ranks(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "mine.txt").touch()  # no run folder
    assert in_ranks(2, run_and_tell, out, RECIPE) == [1, 1]
    assert "is not a run folder" in Path(f"{out}.0").read_text()
    assert Path(f"{out}.1").read_text().startswith("RankError: rank 1 lost another rank")


# ---- faults


def run_with_a_full_disk(out: Path) -> None:
    if os.environ["RANK"] == "1":
        fill_the_disk()
    run(out)


@pytest.mark.slow
def test_a_rank_with_a_full_disk_leaves_the_images_to_others_and_calibrates(tmp_path, alone):
    out = tmp_path / "run"
    assert in_ranks(2, run_with_a_full_disk, out) == [0, 0]
    for shard in (alone / "images/round_00").glob("shard_*"):
        assert shard.read_bytes() == (out / "images/round_00" / shard.name).read_bytes()
    assert not list((out / "events").glob("*")) if (out / "events").exists() else True


def lead_with_a_full_disk(out: Path) -> None:
    if os.environ["RANK"] == "0":
        hook(setattr, "maskaq.storage.runfolder:RunFolder.write_shard", 1, fill_the_disk)
    run_and_tell(out, RECIPE)


def fill_the_disk() -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full


def test_an_error_of_the_leader_in_synthesis_ends_all_ranks(tmp_path):
    out = tmp_path / "run"
    assert in_ranks(2, lead_with_a_full_disk, out) == [1, 1]
    assert "disk full" in Path(f"{out}.0").read_text()
    assert Path(f"{out}.1").read_text().startswith("RankError")


def run_as_another_version(out: Path) -> None:
    if os.environ["RANK"] == "1":
        maskaq.__version__ = "0.0.1"
    run_and_tell(out, RECIPE)


@pytest.mark.slow
def test_a_rank_of_another_version_is_refused(tmp_path):
    out = tmp_path / "run"
    assert in_ranks(2, run_as_another_version, out) == [1, 1]
    assert "maskaq 0.0.1 here" in Path(f"{out}.1").read_text().replace(f"{maskaq.__version__} there, ", "")


# ---- kills at random moments: torchrun starts all ranks again when one dies, as is done here


def help_out(out: Path) -> None:
    """A worker without a rank."""
    working.SECONDS_BETWEEN_LOOKS = 0.02
    working.wait_for(out, 30, lambda _: None)
    working.work(out, device="cpu", lease=1.0, wait=5.0)


def run_of_a_file(out: Path, source: dict) -> None:
    run(out, source=source, checkpoint_seconds=0, lease=1.0)


class Team:
    """Some ranks, and a worker beside them."""

    def __init__(self, size: int, out: Path, source: dict) -> None:
        self.size, self.out, self.source = size, out, source
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["helpers", "maskaq.cli.running", "maskaq.runs.work", "torch.distributed"])
        self.helper = self.context.Process(target=help_out, args=(out,))
        self.helper.start()
        self.start()

    def start(self) -> None:
        port = free_port()
        given = [(number, self.size, port, run_of_a_file, self.out, self.source) for number in range(self.size)]
        self.ranks = [self.context.Process(target=rank, args=args) for args in given]
        for process in self.ranks:
            process.start()

    def finish(self) -> None:
        """Start all again when one has died, until none has."""
        for _ in range(5):
            while all(process.is_alive() for process in self.ranks):
                time.sleep(0.01)
            until = time.monotonic() + 60
            while any(p.is_alive() for p in self.ranks) and not any(p.exitcode for p in self.ranks):
                assert time.monotonic() < until, "a rank is stuck"
                time.sleep(0.01)
            if not any(process.exitcode for process in self.ranks):
                break
            for process in self.ranks:
                process.kill()
                process.join()
            self.start()
        self.helper.join()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ten_kills_at_random_moments_cost_nothing_but_time(tmp_path, size):
    """Of any rank or of the worker beside them; thirty in all."""
    file = tmp_path / "tiny.safetensors"
    safetensors.torch.save_file(tiny_vit().state_dict(), file)
    source = {"name": VIT, "args": VIT_ARGS, "checkpoint": str(file)}
    undisturbed, began = tmp_path / "undisturbed", time.monotonic()
    Team(size, undisturbed, source).finish()
    took = time.monotonic() - began
    chance = random.Random(size)
    for trial in range(10):
        out = tmp_path / str(trial)
        team = Team(size, out, source)
        time.sleep(chance.uniform(0.1, 1.0) * took)
        chance.choice([*team.ranks, team.helper]).kill()
        team.finish()
        assert_same_run(out, undisturbed)
        for shard in undisturbed.glob("images/*/shard_*"):
            assert shard.read_bytes() == (out / shard.relative_to(undisturbed)).read_bytes()


# ---- processes that `--workers` starts, and torchrun

SMALL = ("synthesis.images=24", "synthesis.batch=4", "synthesis.steps=6", "refresh.every=3", "refresh.steps=4")
MODEL = ("quantize", "cifar10_vit", "--recipe", "demo", "--bits", "w4a4", "--device", "cpu", "--no-report")
QUICK = (*MODEL, "--lease", "2", "--set", *SMALL, "calibration.epochs=6", "calibration.batch=12")


def command(*words: object, torchrun: bool = False) -> subprocess.Popen:
    how = ["torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=1", "-m"] if torchrun else []
    return subprocess.Popen(
        [sys.executable, "-m", *how, "maskaq", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def rank_of(launcher: int, number: int) -> int | None:
    """The process that is this rank, once it is there."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_child = f"PPid:\t{launcher}\n" in (folder / "status").read_text()
            if is_child and f"\0RANK={number}\0" in "\0" + (folder / "environ").read_text():
                return int(folder.name)
    return None


def wait_until(fact, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not fact() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "two"
    process = command(*QUICK, "--workers", 2, "--out", out)
    assert process.wait() == 0, process.stderr.read()
    return out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("phase", ["synthesis", "calibration"])
@pytest.mark.parametrize("torchrun", [False, True], ids=["workers", "torchrun"])
def test_a_rank_that_is_killed_costs_nothing_but_time(tmp_path, two_workers, number, phase, torchrun):
    out = tmp_path / "run"
    words = [*QUICK, "--out", out, *(() if torchrun else ("--workers", 2))]
    process = command(*words, torchrun=torchrun)
    events = out / "events.jsonl"
    begun = {
        "synthesis": lambda: len(list(out.glob("images/round_00/shard_*"))) > 0,
        "calibration": lambda: events.exists() and '"epoch": 3' in events.read_text(),  # after a checkpoint
    }
    wait_until(begun[phase], process)
    os.kill(rank_of(process.pid, number), signal.SIGKILL)
    assert process.wait() == 0, process.stderr.read()
    assert_same_run(out, two_workers)
    for shard in two_workers.glob("images/*/shard_*"):
        assert shard.read_bytes() == (out / shard.relative_to(two_workers)).read_bytes()


@pytest.mark.slow
def test_ctrl_c_ends_all_workers_and_the_same_command_goes_on(tmp_path, two_workers):
    out = tmp_path / "run"
    process = command(*QUICK, "--workers", 2, "--out", out)
    wait_until(lambda: len(list(out.glob("images/round_00/shard_*"))) > 0, process)
    ranks = [rank_of(process.pid, number) for number in (0, 1)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.count("interrupted") == 1
    assert "Traceback" not in errors and "torch" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert command(*QUICK, "--workers", 2, "--out", out).wait() == 0
    assert_same_run(out, two_workers)


@pytest.mark.slow
def test_a_mistake_is_told_once_by_all_workers(tmp_path):
    process = command("quantize", "no_such_model", "--workers", 3, "--device", "cpu", "--out", tmp_path / "run")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and errors.count("no_such_model") == 1 and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_mistake_of_one_worker_alone_ends_all(tmp_path, monkeypatch, number):
    """It fails before the others have met it: they wait for it, in a call that no signal interrupts."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif os.environ.get('RANK') == '{number}':\n"
        "    from maskaq import errors, ranks\n"
        "    def broken(): raise errors.DeviceError('this GPU is broken')\n"
        "    ranks.local_device = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    words = [word for word in QUICK if word not in ("--device", "cpu")]
    process = command(*words, "--workers", 2, "--out", tmp_path / "run")
    wait_until(lambda: rank_of(process.pid, 1 - number), process)
    other = rank_of(process.pid, 1 - number)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 1 and errors.count("this GPU is broken") == 1 and "Traceback" not in errors
    assert not Path(f"/proc/{other}").exists()
