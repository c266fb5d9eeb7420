"""Several workers, one run: leases, and images that do not depend on who makes them."""

import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import yaml
from helpers import (
    VIT,
    VIT_ARGS,
    Ears,
    assert_same_run,
    hook,
    in_process,
    mostly_slow,
    rewrite_run_json,
    small_recipe,
    tiny_vit,
)

from maskaq.cli import main as cli
from maskaq.cli.main import main
from maskaq.errors import RunFolderError
from maskaq.runs import work as working
from maskaq.runs.quantize import quantize
from maskaq.runs.status import status
from maskaq.runs.work import work
from maskaq.storage import leases as leasing
from maskaq.storage.files import write_bytes_atomic
from maskaq.storage.leases import Leases, Worker, check_shared
from maskaq.storage.runfolder import LEADER, RunFolder

RECIPE = small_recipe("synthesis.images=12", "synthesis.batch=2", "calibration.batch=6")
"""Two rounds of 6 shards, with two epochs after each."""
ELSEWHERE = Worker(host="elsewhere", machine="ffffffff", pid=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tiny model as a file, which every worker loads."""
    file = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    safetensors.torch.save_file(tiny_vit().state_dict(), file)
    return {"name": VIT, "args": VIT_ARGS, "checkpoint": str(file)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, source):
    """The run of one process."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    lead(out, source)
    return out


def lead(out: Path, source: dict, **more) -> None:
    quantize(tiny_vit(), RECIPE, out, device="cpu", source=source, checkpoint_seconds=0, report=False, **more)


def lead_and_die(out: Path, source: dict, where: str, n: int) -> None:
    hook(setattr, where, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
    lead(out, source)


def help_out(out: Path, lease: float = 60.0, fault: str = "", n: int = 1, wait: float = 30.0) -> None:
    """A worker that has a fault, or none; exits with the number of shards it made."""
    working.SECONDS_BETWEEN_LOOKS = 0.02
    if fault == "killed":
        hook(setattr, "maskaq.images.synthesis:Synthesizer._step", n, lambda: os.kill(os.getpid(), signal.SIGKILL))
    if fault == "full disk":
        hook(setattr, "maskaq.storage.runfolder:RunFolder.write_shard", n, fill_the_disk)
    if fault.startswith("clock"):
        shift_clock(float(fault.split()[1]))
    working.wait_for(out, 30, print)
    try:
        os._exit(work(out, device="cpu", lease=lease, wait=wait))
    except RunFolderError as error:
        (out.parent / "refused").write_text(str(error))
        os._exit(100)


def fill_the_disk() -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.fsync = full


def shift_clock(seconds: float) -> None:
    """Files that this process touches have the time of a clock that is wrong."""
    touch, now = os.utime, time.time
    time.time = lambda: now() + seconds
    os.utime = lambda path, *_, **__: touch(path, (now() + seconds, now() + seconds))


def start(*args) -> multiprocessing.Process:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers", "maskaq.cli.running", "maskaq.runs.work"])
    process = context.Process(target=help_out, args=args)
    process.start()
    return process


def assert_same_bytes(a: Path, b: Path) -> None:
    """The same images, file by file, and the same model."""
    for path in (*a.glob("images/*/*.safetensors"), *a.glob("quantized/*.safetensors")):
        assert path.read_bytes() == (b / path.relative_to(a)).read_bytes(), path
    assert_same_run(a, b)


def makers(out: Path) -> set[str]:
    return {event["worker"] for event in RunFolder.read(out).events() if "shard" in event}


# ---- runs


@pytest.fixture
def together(monkeypatch):
    """The leader begins its first shard when others have begun theirs."""

    def wait(out: Path, others: int) -> None:
        until = time.monotonic() + 30
        while len(list((out / "leases").glob("round_*"))) <= others and time.monotonic() < until:
            time.sleep(0.01)

    def arrange(out: Path, others: int) -> None:
        hook(monkeypatch.setattr, "maskaq.images.stored:StoredImages._make", 1, lambda: wait(out, others))

    return arrange


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_images_and_weights_are_the_same_bytes_for_any_number_of_workers(tmp_path, source, alone, together, workers):
    out = tmp_path / "run"
    together(out, workers)
    helpers = [start(out) for _ in range(workers)]
    lead(out, source)
    for helper in helpers:
        helper.join()
    assert_same_bytes(alone, out)
    assert len(makers(out)) == 1 + workers and not (out / "leases").exists()


@pytest.mark.slow
def test_the_leader_says_how_many_images_a_part_has(tmp_path, source, alone):
    out = tmp_path / "run"
    lead(out, source, part=5)
    order = json.loads((out / "images/round_00/order.json").read_text())
    assert order["shards_at_once"] == 2, "whole shards of 2 images"
    assert json.loads((alone / "images/round_00/order.json").read_text())["shards_at_once"] == 1
    shards = [event for event in RunFolder.read(out).events() if event.get("round") == 0 and "shard" in event]
    assert sorted(event["shard"] for event in shards) == list(range(6)), "each was made once"


def test_workers_finish_a_round_whose_leader_died_and_the_leader_takes_what_they_made(tmp_path, source, alone):
    out = tmp_path / "run"
    died = in_process(lead_and_die, out, source, "maskaq.storage.runfolder:RunFolder.write_shard", 2)
    assert died == -signal.SIGKILL
    assert in_process(help_out, out, 60.0, "", 1, 0.1) == 5
    lead(out, source)
    assert_same_bytes(alone, out)
    shards = [event["shard"] for event in RunFolder.read(out).events() if "shard" in event and event["round"] == 0]
    assert sorted(shards) == list(range(6)), "each was made once"
    assert len(makers(out)) == 3


@pytest.mark.parametrize("fault", mostly_slow(["killed", "full disk", "clock 600", "clock -600"], "killed"))
def test_a_faulty_worker_does_no_harm(tmp_path, source, alone, together, fault):
    out = tmp_path / "run"
    together(out, 1)
    helper = start(out, 1.0, fault, 2)
    lead(out, source)
    helper.join()
    assert_same_bytes(alone, out)
    if fault == "killed":
        assert helper.exitcode == -signal.SIGKILL
    elif fault == "full disk":
        assert helper.exitcode == 100 and "disk full" in (tmp_path / "refused").read_text()
    else:
        assert helper.exitcode > 0, "it has made some of the images"
    assert fault == "killed" or not list(out.rglob("*.tmp")), "nothing is left half written"


def test_the_progress_of_a_worker_counts_what_others_make(tmp_path, source, alone, monkeypatch):
    out, ears = tmp_path / "run", Ears()
    in_process(lead_and_die, out, source, "maskaq.storage.runfolder:RunFolder.write_shard", 2)
    last = Path("images/round_00/shard_0005.safetensors")
    others = partial(shutil.copy, alone / last, out / last)
    hook(monkeypatch.setattr, "maskaq.images.stored:StoredImages._make", 1, others)
    monkeypatch.setattr(working, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(Leases, "place", 1)
    assert work(out, device="cpu", wait=0.1, progress=ears) == 4
    ((_, total, done),) = (stage for stage in ears.stages if stage[0].startswith("synthesize"))
    assert done == total / 6 and done + sum(units for units, _ in ears.advances) == total


def test_a_worker_that_was_overtaken_leaves_what_the_other_wrote(tmp_path, source, alone, monkeypatch):
    """The lease expires while its owner lives: two write the shard, the first wins."""
    out = tmp_path / "run"
    in_process(lead_and_die, out, source, "maskaq.storage.runfolder:RunFolder.write_shard", 2)
    place = out / "images/round_00/shard_0001.safetensors"
    first = (alone / place.relative_to(out)).read_bytes()
    hook(monkeypatch.setattr, "maskaq.storage.runfolder:RunFolder.write_shard", 1, lambda: place.write_bytes(first))
    monkeypatch.setattr(working, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(Leases, "place", 1)  # begins with shard 1
    assert work(out, device="cpu", wait=0.1) == 4, "all but the one of the leader and the one of the other"
    assert len([e for e in RunFolder.read(out).events() if e.get("shard") == 1]) == 0
    monkeypatch.undo()
    lead(out, source)
    assert_same_bytes(alone, out)


@pytest.mark.parametrize("key", mostly_slow(["maskaq", "torch", "device", "commit"], "maskaq"))
def test_a_worker_whose_images_would_differ_is_refused(tmp_path, source, key):
    out = tmp_path / "run"
    in_process(lead_and_die, out, source, "maskaq.storage.runfolder:RunFolder.write_shard", 2)

    def change(text: str) -> str:
        run = json.loads(text)
        owner = run["facts"]["versions"] if key in ("maskaq", "torch") else run["facts"]
        owner[key] = "another"
        return json.dumps(run)

    rewrite_run_json(out, change)
    with pytest.raises(RunFolderError, match=f"{key} another there, .* here"):
        work(out, device="cpu", wait=0.1)
    if key == "device":
        assert work(out, device="cpu", wait=0.1, any_device=True) == 5


@pytest.mark.slow
def test_a_worker_whose_student_differs_is_refused(tmp_path, source):
    out = tmp_path / "run"
    in_process(lead_and_die, out, source, "maskaq.storage.runfolder:RunFolder.write_shard", 2)
    order = out / "images/round_00/order.json"
    order.write_text(json.dumps(json.loads(order.read_text()) | {"against": "0" * 64}))
    with pytest.raises(RunFolderError, match="another student"):
        work(out, device="cpu", wait=0.1)


# ---- leases


def test_a_lease_has_one_owner_until_it_is_given_back(tmp_path):
    a, b = Leases(tmp_path), Leases(tmp_path)
    assert a.claim("x") and not b.claim("x") and not a.claim("x")
    a.release("x")
    assert b.claim("x")
    a.release("x")  # no longer its own
    assert not a.claim("x")
    b.close()
    assert a.claim("x")
    a.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_while_leases_are_given_back_leaves_none(tmp_path, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    leases = Leases(tmp_path)
    assert leases.claim("x")
    monkeypatch.setattr(leases._heart, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        leases.close()
    assert list(tmp_path.iterdir()) == []


def test_the_lease_of_a_silent_worker_passes_to_one_other_after_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Leases, "_beat", lambda self: None)
    silent = Leases(tmp_path, ELSEWHERE, seconds=0.2)
    assert silent.claim("x")
    others = [Leases(tmp_path) for _ in range(3)]
    assert not any(other.claim("x") for other in others), "nobody knows yet that it is silent"
    time.sleep(0.3)
    assert [other.claim("x") for other in others] == [True, False, False]
    silent.release("x")
    assert not silent.claim("x"), "who lost a lease cannot give it back"


def test_the_lease_of_a_dead_process_of_this_machine_passes_on_at_once(tmp_path):
    gone = Leases(tmp_path, replace(Worker(), pid=in_process_pid()))
    gone._create("x")
    gone._stop.set()
    assert Leases(tmp_path).claim("x")


def in_process_pid() -> int:
    """The number of a process that has ended."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    return process.pid


@pytest.mark.parametrize("wrong", mostly_slow([-600.0, 600.0], 600.0))
def test_a_wrong_clock_neither_loses_a_lease_nor_keeps_a_dead_one(tmp_path, monkeypatch, wrong):
    touch = os.utime
    monkeypatch.setattr(os, "utime", lambda path: touch(path, (time.time() + wrong,) * 2))
    living, other = Leases(tmp_path, ELSEWHERE, seconds=0.3), Leases(tmp_path)
    assert living.claim("x")
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert not other.claim("x")
        time.sleep(0.02)
    living._stop.set()
    living._heart.join()
    other.claim("x")
    time.sleep(0.4)
    assert other.claim("x")
    other.close()


def test_a_lease_that_was_taken_again_meanwhile_is_not_taken_away(tmp_path):
    """Two found it expired; the slower one must not rob the quicker."""
    slow, quick = Leases(tmp_path), Leases(tmp_path)
    (tmp_path / "x.lease").write_text("")
    expired = slow.read("x")
    (tmp_path / "x.lease").unlink()
    assert quick.claim("x")
    assert not slow._take_away("x", expired)
    assert quick.read("x").token == quick._token
    quick.close()


def test_a_lease_with_the_number_of_this_process_that_is_not_its_own_passes_on_at_once(tmp_path):
    earlier, living = Leases(tmp_path), Leases(tmp_path)
    assert earlier.claim("x") and living.claim("y")
    shutil.copy(tmp_path / "x.lease", tmp_path / "copy")
    earlier.close()
    shutil.copy(tmp_path / "copy", tmp_path / "x.lease")  # as a folder that was copied while its process ran
    later = Leases(tmp_path)
    assert later.claim("x") and not later.claim("y")
    later.close()
    living.close()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "[" * 9000])
def test_a_lease_that_cannot_be_read_is_waited_for_and_then_taken(tmp_path, monkeypatch, content):
    monkeypatch.setattr(leasing, "_UNWRITTEN", 0.1)
    (tmp_path / "x.lease").write_text(content)
    leases = Leases(tmp_path)
    assert not leases.claim("x")
    time.sleep(0.2)
    assert leases.claim("x")
    leases.close()


def test_work_is_shared_and_that_of_the_dead_taken_up(tmp_path):
    done: list[tuple[str, str]] = []
    names = list("abcdef")
    dead = Leases(tmp_path, replace(Worker(), pid=in_process_pid()))
    assert dead.claim("c")
    dead._stop.set()

    def is_done(name: str) -> bool:
        return name in [what for what, _ in done]

    one, other = (Leases(tmp_path).each(names, is_done, wait=0.01) for _ in range(2))
    for who, shared in (("one", one), ("other", other)):
        done.append((next(shared), who))  # both are at work on what they gave
    for who, shared in (("one", one), ("other", other)):
        done.extend((name, who) for name in shared)
    assert sorted(what for what, _ in done) == names, "each was done once"
    assert {who for _, who in done} == {"one", "other"}


def test_the_leader_of_a_run_is_seen_by_others(tmp_path):
    with RunFolder.open(tmp_path / "run", {}):
        joined = RunFolder.join(tmp_path / "run")
        assert joined.leases.is_held(LEADER)
        with pytest.raises(RunFolderError, match="reading only"):
            joined.write_json("metrics.json", {})
    assert not joined.leases.is_held(LEADER)


def test_a_lease_is_claimed_although_another_worker_removes_the_folder_with_its_last_one(tmp_path, monkeypatch):
    folder = tmp_path / "leases"
    leases = Leases(folder)
    hook(monkeypatch.setattr, "pathlib:Path.mkdir", 1, folder.rmdir, after=True)
    assert leases.claim("x")
    leases.close()


def test_a_run_folder_that_was_removed_is_not_made_again_by_its_workers(tmp_path):
    with RunFolder.open(tmp_path / "run", {}):
        joined = RunFolder.join(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunFolderError, match="run"):
            joined.leases.claim("x")
        assert not (tmp_path / "run").exists()


# ---- folders


def test_the_first_of_two_writers_wins(tmp_path):
    assert write_bytes_atomic(tmp_path / "x", b"first", replace=False)
    assert not write_bytes_atomic(tmp_path / "x", b"second", replace=False)
    assert (tmp_path / "x").read_bytes() == b"first" and len(list(tmp_path.iterdir())) == 1


def test_the_first_of_two_writers_wins_without_hard_links(tmp_path, monkeypatch):
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    test_the_first_of_two_writers_wins(tmp_path)


def ignoring_exclusive(path, flags, *args, real=os.open, **more):
    return real(path, flags & ~os.O_EXCL, *args, **more)


def not_supported(*_: object, **__: object) -> None:
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


@pytest.mark.parametrize(
    ("name", "fake", "told"),
    [
        ("os.open", ignoring_exclusive, "O_EXCL"),
        ("os.replace", not_supported, "rename"),
        ("os.utime", lambda *_, **__: None, "time"),
        ("os.utime", not_supported, "time"),
        ("fcntl.flock", not_supported, "lock"),
    ],
)
def test_a_folder_that_workers_cannot_share_is_refused(tmp_path, monkeypatch, name, fake, told):
    check_shared(tmp_path)
    monkeypatch.setattr(name, fake)
    with pytest.raises(RunFolderError, match=f"cannot be shared .*{told}.*choose another --out"):
        check_shared(tmp_path)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_what_another_machine_is_writing_stays_when_the_run_is_opened_again(tmp_path):
    with RunFolder.open(tmp_path / "run", {}) as run:
        root = run.root
    recent, old = (root / f".shard.{pid}.ffffffff-01234567.tmp" for pid in (7, 8))
    recent.touch()
    old.touch()
    os.utime(old, (time.time() - 4000,) * 2)
    with RunFolder.open(root, {}):
        assert recent.exists() and not old.exists()


def test_a_run_is_opened_while_workers_remove_folders_in_it(tmp_path, monkeypatch):
    RunFolder.open(tmp_path / "run", {}).close()
    listed = os.scandir

    def scandir(path="."):
        if Path(path).name == "leases":
            Path(path).rmdir()
        return listed(path)

    (tmp_path / "run/leases").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    with RunFolder.open(tmp_path / "run", {}) as run:
        assert run.leads


def test_what_a_killed_check_of_the_folder_left_is_cleared_away(tmp_path):
    died = in_process(check_and_die, tmp_path / "run")
    assert died == -signal.SIGKILL and len(list((tmp_path / "run").iterdir())) == 1
    RunFolder.open(tmp_path / "run", {}).close()
    assert not list((tmp_path / "run").glob(".trial*"))


def check_and_die(folder: Path) -> None:
    hook(setattr, "maskaq.storage.leases:_lacking", 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    check_shared(folder)


# ---- status


def test_status_tells_how_far_a_run_is_and_who_works_on_it(tmp_path, source, alone, capsys):
    done = status(alone)
    assert (done.stage, done.round, done.shards, done.epochs, done.workers) == ("finished", 2, 6, 4, [])
    out = tmp_path / "run"
    in_process(lead_and_die, out, source, "maskaq.storage.runfolder:RunFolder.write_shard", 3)
    leases = Leases(out / "leases")
    assert leases.claim("round_00-part_0004")
    half = status(out)
    assert (half.stage, half.round, half.rounds, half.shards, half.shards_in_round) == ("synthesize", 1, 2, 2, 6)
    assert any("part 5 of round 1" in worker.does and worker.silent < 60 for worker in half.workers)
    assert any("leads the run" in worker.does and worker.gone and worker.rate > 0 for worker in half.workers)
    assert half.is_worked_on, "not by its leader, which was killed"
    assert half.left is None, "the one at work has made nothing yet"
    leases.close()
    assert not status(out).is_worked_on
    in_process(help_out, out, 60.0, "", 1, 0.1)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["status", str(out), "--json", str(tmp_path / "status.json")]) == 0
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}, "it only reads"
    found = json.loads((tmp_path / "status.json").read_text())
    assert found["stage"] == "calibrate" and found["left"] > 0, "although no epoch was timed yet"
    assert sorted(worker["shards"] for worker in found["workers"]) == [2, 4], "with those who hold no lease any more"
    printed = capsys.readouterr().out
    assert "6 of 6 in this round" in printed and "nobody works on it" in printed


def test_status_of_a_table_tells_its_rows_and_the_runs_of_those_at_work(tmp_path, source, capsys):
    (tmp_path / "rows.jsonl").write_text('{"name": "a", "seconds": 30}\n{"name": "b", "seconds": 50}\n{"na')
    in_process(lead_and_die, tmp_path / "c", source, "maskaq.storage.runfolder:RunFolder.write_shard", 3)
    leases = Leases(tmp_path / "leases")
    assert leases.claim("c") and leases.claim("d")
    found = status(tmp_path)
    assert (found.done, found.seconds, list(found.rows)) == (2, 40, ["c", "d"])
    assert [run.shards for run in found.runs] == [2]
    assert main(["status", str(tmp_path)]) == 0 and "2 rows done, 0:40 each, 2 at work" in capsys.readouterr().out
    leases.close()
    gone = Leases(tmp_path / "leases", replace(Worker(), pid=in_process_pid()))
    gone._create("c")
    gone._stop.set()
    assert (status(tmp_path).rows, status(tmp_path).stage) == ({}, "nobody works on it"), "its process was killed"


# ---- files for clusters

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_files_for_clusters_hold_commands_of_maskaq():
    parse = cli._parser().parse_args
    with open(EXAMPLES / "k8s.yaml") as file:
        jobs = [part["spec"]["template"]["spec"] for part in yaml.safe_load_all(file) if part["kind"] == "Job"]
    words = [job["containers"][0]["command"] for job in jobs]
    lead, helps = (parse(list(map(str, command[1:]))) for command in words)
    assert (lead.command, lead.workers, helps.command) == ("quantize", 8, "work")
    assert lead.out == helps.folder, "both are of one run"
    script = (EXAMPLES / "slurm.sh").read_text()
    assert subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"]).returncode == 0
    options = re.search(r"OPTIONS:-(.*)}", script)[1]
    assert parse(["quantize", "deit_base_patch16_224", *options.split(), "--out", "run"]).command == "quantize"
    assert parse(["work", *re.search(r"maskaq work (.*) &", script)[1].split()]).wait == 900
