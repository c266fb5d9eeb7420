"""What a run folder promises: nothing is lost to a kill, no damage goes unnoticed, every refusal says what to do."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from torch import Tensor

from maskaq.errors import RunFolderError
from maskaq.storage import files, runfolder
from maskaq.storage.files import (
    DamagedError,
    flatten_state,
    read_tensors,
    restore_state,
    write_bytes_atomic,
    write_json_atomic,
    write_tensors,
)
from maskaq.storage.runfolder import Checkpoint, RunFolder

IDENTITY = {"recipe": {"synthesis": {"steps": 200, "lr": 0.1}}, "model": "resnet20", "seed": 0}


@pytest.fixture
def run(tmp_path: Path):
    with RunFolder.open(tmp_path / "run", IDENTITY, "steps = 200\n") as run:
        yield run


def reopen(root: Path) -> RunFolder:
    return RunFolder.open(root, IDENTITY)


def flip_bit(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def raises_os_error(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


# ---- files


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_bytes_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", raises_os_error(errno.EIO))
        with pytest.raises(RunFolderError, match="a.bin"):
            write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a.bin"]
    write_bytes_atomic(path, b"new")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["a.bin"]


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes_atomic(tmp_path / "a.bin", b"new")
    assert names(tmp_path) == []


def test_a_kill_before_the_rename_leaves_the_old_content_and_the_next_open_cleans_up(tmp_path):
    with reopen(tmp_path / "run") as run:
        run.write_json("metrics.json", {"top1": 1})
    killed = (
        "import os, signal, sys\nfrom maskaq.storage.runfolder import RunFolder\n"
        "run = RunFolder.open(sys.argv[1], {**eval(sys.argv[2])})\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run.write_json('metrics.json', {'top1': 2})\n"
    )
    assert python(killed, tmp_path / "run").wait() == -signal.SIGKILL
    assert any(name.endswith(".tmp") and name.startswith(".") for name in names(tmp_path / "run"))
    with reopen(tmp_path / "run") as run:
        assert run.read_json("metrics.json") == {"top1": 1}
        assert not any(name.endswith(".tmp") for name in names(run.root))


def test_what_another_living_process_is_writing_stays_when_the_run_is_opened_again(tmp_path):
    with reopen(tmp_path / "run") as run:
        root = run.root
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    living = [root / f".model.{sleeper.pid}.unproven.onnx", root / f".report.html.{sleeper.pid}.tmp"]
    for file in living:
        file.touch()
    with reopen(root):
        assert all(file.exists() for file in living)
    sleeper.communicate(b"\n")
    with reopen(root):
        assert not any(file.exists() for file in living)


def test_disk_full_says_how_much_is_needed_and_that_the_run_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", raises_os_error(errno.ENOSPC))
    with pytest.raises(RunFolderError, match=r"disk full: 3 bytes needed for .*a.bin; free space .* continues where"):
        write_bytes_atomic(tmp_path / "a.bin", b"new")
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_read_only_folder_is_named(tmp_path, monkeypatch, number):
    monkeypatch.setattr("builtins.open", raises_os_error(number))
    with pytest.raises(RunFolderError, match=r"cannot write to .*a.bin: .*choose another --out"):
        write_bytes_atomic(tmp_path / "a.bin", b"new")


def test_tensors_come_back_as_they_were_whatever_their_layout(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    given = {
        "transposed": base.T,
        "row": base[1],
        "expanded": base[:1].expand(5, 4),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "half": base.to(torch.bfloat16),
        "é": base.double(),
    }
    write_tensors(tmp_path / "x.safetensors", given, {"note": '"digest":"' + "0" * 64 + '"', "b": "2", "a": "ü"})
    tensors, metadata = read_tensors(tmp_path / "x.safetensors")
    assert metadata == {"note": '"digest":"' + "0" * 64 + '"', "b": "2", "a": "ü"}
    assert tensors.keys() == given.keys()
    for name, tensor in given.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
    tensors["row"] += 1  # what was read can be trained on


def test_tensor_files_are_plain_safetensors_and_equal_input_gives_equal_bytes(tmp_path):
    given, metadata = {"b": torch.ones(3), "a": torch.zeros(())}, {key: key for key in "abcdefgh"}
    for name in ("1", "2", "3"):
        write_tensors(tmp_path / name, given, metadata)
    assert len({(tmp_path / name).read_bytes() for name in "123"}) == 1
    with safetensors.safe_open(tmp_path / "1", "pt") as file:
        assert torch.equal(file.get_tensor("b"), given["b"]) and file.metadata()["c"] == "c"


def test_every_flipped_bit_of_a_tensor_file_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": torch.arange(4.0)}, {"epoch": "3"})
    whole = path.read_bytes()
    for byte in range(len(whole)):
        path.write_bytes(whole)
        flip_bit(path, byte, byte % 8)
        with pytest.raises(RunFolderError, match="x.safetensors is damaged"):
            read_tensors(path)


@pytest.mark.parametrize("size", [0, 5, 60, -17, -1])
def test_a_truncated_tensor_file_is_noticed(tmp_path, size):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"w": torch.arange(4.0)})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(RunFolderError, match="x.safetensors is damaged .* from a copy"):
        read_tensors(path)


def test_a_missing_tensor_file_is_named(tmp_path):
    with pytest.raises(RunFolderError, match="x.safetensors is missing"):
        read_tensors(tmp_path / "x.safetensors")


# ---- opening


def python(code: str, *args: object) -> subprocess.Popen:
    """A second process that runs code with the identity as its last argument."""
    env = {**os.environ, "PYTHONPATH": str(Path(runfolder.__file__).parents[2])}
    command = [sys.executable, "-c", code, *map(str, args), repr(IDENTITY)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_new_folder_holds_identity_facts_and_recipe(tmp_path):
    with RunFolder.open(tmp_path / "a/b", IDENTITY, "x = 1\n", {"torch": "2.9"}) as run:
        assert run.identity == IDENTITY and run.facts == {"torch": "2.9"}
    found = json.loads((tmp_path / "a/b/run.json").read_text())
    assert len(found.pop("sha256")) == 64
    assert found == {"format": 2, "identity": IDENTITY, "facts": {"torch": "2.9"}}
    assert (tmp_path / "a/b/recipe.toml").read_text() == "x = 1\n"


def test_resuming_elsewhere_keeps_the_first_facts_and_adds_the_new(tmp_path):
    for version in ("2.9", "2.9", "2.10", "2.10"):
        RunFolder.open(tmp_path / "run", IDENTITY, facts={"torch": version}).close()
    found = json.loads((tmp_path / "run/run.json").read_text())
    assert found["facts"] == {"torch": "2.9"} and found["resumed"] == [{"torch": "2.10"}]


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    hold = (
        "import sys, time\nfrom maskaq.storage.runfolder import RunFolder\n"
        "run = RunFolder.open(sys.argv[1], eval(sys.argv[2]))\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    holder = python(hold, tmp_path / "run")
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        for _ in range(2):  # being refused must not make the next message worse
            with pytest.raises(
                RunFolderError, match=rf"another maskaq process \(pid {holder.pid}\) is working in .*run"
            ):
                reopen(tmp_path / "run")
        assert RunFolder.read(tmp_path / "run").identity == IDENTITY
    finally:
        holder.kill()
        holder.wait()
    reopen(tmp_path / "run").close()


def test_the_same_process_cannot_open_twice_and_closing_frees(run):
    with pytest.raises(RunFolderError, match=f"pid {os.getpid()}"):
        reopen(run.root)
    run.close()
    reopen(run.root).close()


def test_another_identity_is_refused_with_every_differing_key(run):
    run.close()
    before = {path: path.read_bytes() for path in run.root.iterdir()}
    other = {"recipe": {"synthesis": {"steps": 300, "lr": 0.1}, "extra": {}}, "model": "resnet20"}
    with pytest.raises(RunFolderError) as refused:
        RunFolder.open(run.root, other)
    message = str(refused.value)
    assert "recipe.synthesis.steps: 200 in the folder, 300 asked" in message
    assert "recipe.extra: absent in the folder, {} asked" in message
    assert "seed: 0 in the folder, absent asked" in message
    assert "lr" not in message and "model" not in message and "--out" in message
    assert "absent on one side is of another version" in message
    assert before == {path: path.read_bytes() for path in run.root.iterdir()}
    reopen(run.root).close()  # the refused one does not keep the lock


def test_identity_is_compared_as_json(tmp_path):
    RunFolder.open(tmp_path / "run", {"sizes": (1, 2), "bits": {4: "w"}}).close()
    RunFolder.open(tmp_path / "run", {"bits": {"4": "w"}, "sizes": [1, 2]}).close()


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="exists and is not a run folder"):
        reopen(tmp_path)
    assert names(tmp_path) == ["thesis.tex"]
    with pytest.raises(RunFolderError, match="thesis.tex exists and is not a run folder"):
        reopen(tmp_path / "thesis.tex")


def test_a_run_killed_before_its_first_file_was_whole_starts_anew(tmp_path):
    for name in (".lock", ".lock.pid", ".run.json.123.tmp"):
        (tmp_path / name).touch()
    reopen(tmp_path).close()
    assert names(tmp_path) == [".lock", ".lock.pid", "recipe.toml", "run.json"]


def test_every_change_of_run_json_is_noticed(run):
    """`maskaq calibrate` takes the recipe from it: a changed digit would be another run."""
    run.close()
    path = run.root / "run.json"
    whole = path.read_bytes()
    for byte in range(len(whole)):
        path.write_bytes(whole)
        flip_bit(path, byte)
        try:
            reopen(run.root).close()
        except RunFolderError as error:
            assert "run.json" in str(error)
        else:
            assert json.loads(path.read_bytes()) == json.loads(whole)  # white space


@pytest.mark.parametrize("content", ["", '{"format": 2, "iden', "[]", "{}", '{"format": 2}', "\udcff", "[" * 10**5])
def test_a_damaged_run_json_is_named(run, content):
    run.close()
    (run.root / "run.json").write_bytes(content.encode(errors="surrogateescape"))
    for open_it in (reopen, RunFolder.read):
        with pytest.raises(RunFolderError, match="run.json is damaged"):
            open_it(run.root)


def test_another_format_is_refused_by_name(run):
    run.close()
    write_json_atomic(run.root / "run.json", {"format": 3})
    with pytest.raises(RunFolderError, match="run.json has format 3, this maskaq works with format 2"):
        reopen(run.root)


def test_a_run_of_0_1_0_can_be_read_but_not_continued(run):
    run.close()
    write_json_atomic(run.root / "run.json", {"format": 1, "identity": IDENTITY, "facts": {}})
    write_tensors(run.root / "images/round_00/shard_0000.safetensors", {"images": torch.ones(3)})
    old = RunFolder.read(run.root)
    assert old.identity == IDENTITY and old.shards(0) == [0]
    assert torch.equal(old.load_shard(0, 0).tensors["images"], torch.ones(3))
    for call in (reopen, lambda root: RunFolder.check(root, IDENTITY)):
        with pytest.raises(RunFolderError, match=r"0\.1\.0.* not continued"):
            call(run.root)


def test_reading_needs_a_run_folder_and_does_not_write(run, tmp_path):
    with pytest.raises(RunFolderError, match="nowhere does not exist: expected"):
        RunFolder.read(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(RunFolderError, match="other is not a run folder: expected"):
        RunFolder.read(tmp_path / "other")
    reader = RunFolder.read(run.root)
    for write in (
        lambda: reader.write_json("metrics.json", {}),
        lambda: reader.event(kind="x"),
        lambda: reader.write_shard(0, 0, b""),
        lambda: reader.save_checkpoint(Checkpoint(1, {}, "", {})),
    ):
        with pytest.raises(RunFolderError, match="reading only"):
            write()
    assert names(run.root) == [".lock", ".lock.pid", "leases", "recipe.toml", "run.json"]


def test_json_files_come_back_and_damage_is_named(run):
    run.write_json("metrics.json", {"top1": 0.25})
    assert run.read_json("metrics.json") == {"top1": 0.25} == json.loads(run.path("metrics.json").read_text())
    run.path("metrics.json").write_text("{")
    with pytest.raises(RunFolderError, match="metrics.json is damaged"):
        run.read_json("metrics.json")
    with pytest.raises(RunFolderError, match="ranges.json is missing"):
        run.read_json("ranges.json")


# ---- events


def test_events_are_kept_in_order_with_their_time(run):
    assert run.events() == []
    run.event(kind="start", loss=0.5)
    run.event(kind="näht\nzeile")
    first, second = RunFolder.read(run.root).events()
    assert first["kind"] == "start" and first["loss"] == 0.5 and second["kind"] == "näht\nzeile"
    assert first["time"] <= second["time"] and first["time"].endswith("+00:00")


def test_a_torn_last_event_is_dropped_and_the_log_goes_on(run):
    run.event(n=1)
    run.close()
    with open(run.path("events.jsonl"), "a") as file:
        file.write('{"time": "2024-')
    assert [event["n"] for event in run.events()] == [1]
    with reopen(run.root) as run:
        run.event(n=2)
        assert [event["n"] for event in run.events()] == [1, 2]


def test_a_damaged_event_in_the_middle_is_named(run):
    run.path("events.jsonl").write_text('{"n": 1}\n{"n"\n{"n": 3}\n')
    with pytest.raises(RunFolderError, match="events.jsonl is damaged"):
        run.events()


# ---- shards


def save_shard(run: RunFolder, round: int, shard: int, tensors: dict, **about) -> Path:
    run.write_shard(round, shard, run.seal_shard(round, shard, tensors, **about))
    return run.path(f"images/round_{round:02d}/shard_{shard:04d}.safetensors")


def test_shards_come_back_with_what_they_say_of_themselves(run):
    images = {"images": torch.rand(5, 3, 4, 4), "labels": torch.arange(5)}
    save_shard(run, 0, 2, images, student="abc", lost=[11])
    save_shard(run, 0, 0, images)
    assert run.shards(0) == [0, 2] and run.shards(1) == []
    loaded = RunFolder.read(run.root).load_shard(0, 2)
    assert all(torch.equal(loaded.tensors[name], images[name]) for name in images)
    assert loaded.student == "abc" and loaded.lost == [11] and len(loaded.digest) == 64
    assert loaded.digest == files.digest_of(run.seal_shard(0, 2, images, "abc", [11]))


def test_equal_shards_have_equal_digests_and_others_have_others(run):
    ones = {"x": torch.ones(3)}
    same, again, *others = (
        files.digest_of(run.seal_shard(*where, tensors, student))
        for where, tensors, student in (
            ((0, 0), ones, "a"),
            ((0, 0), ones, "a"),
            ((0, 1), ones, "a"),
            ((1, 0), ones, "a"),
            ((0, 0), ones, "b"),
            ((0, 0), {"x": torch.zeros(3)}, "a"),
        )
    )
    assert same == again and len({same, *others}) == 5


@pytest.mark.parametrize("damage", [lambda path: flip_bit(path, -7), lambda path: os.truncate(path, 300)])
def test_a_damaged_shard_is_named(run, damage):
    path = save_shard(run, 0, 0, {"x": torch.ones(100)})
    damage(path)
    with pytest.raises(DamagedError, match=r"shard_0000.safetensors is damaged \(.*digest"):
        run.load_shard(0, 0)
    path.unlink()
    with pytest.raises(RunFolderError, match=r"shard_0000.safetensors is missing"):
        run.load_shard(0, 0)


def test_a_shard_in_a_place_that_is_not_its_own_is_named(run, tmp_path):
    here = save_shard(run, 0, 0, {"x": torch.ones(3)})
    with RunFolder.open(tmp_path / "other", {**IDENTITY, "seed": 1}) as other:
        foreign = save_shard(other, 0, 0, {"x": torch.ones(3)})
    for wrong in (save_shard(run, 0, 1, {"x": torch.ones(3)}), save_shard(run, 1, 0, {"x": torch.ones(3)}), foreign):
        here.write_bytes(wrong.read_bytes())
        with pytest.raises(DamagedError, match="another run, or of another place"):
            run.load_shard(0, 0)
    write_tensors(here, {"x": torch.ones(3)}, {"note": "sealed, and no shard"})
    with pytest.raises(DamagedError, match="no shard"):
        run.load_shard(0, 0)


# ---- checkpoints


def checkpoint(epoch: int, value: float = 1.0) -> Checkpoint:
    return Checkpoint(epoch, {"w": torch.full((2,), value)}, "{}", {0: ["a", "b"]})


def test_the_newest_checkpoint_is_loaded_and_two_are_kept(run):
    assert run.load_checkpoint() is None
    for epoch in range(1, 5):
        path = run.save_checkpoint(checkpoint(epoch, float(epoch)))
        assert path.exists() and len(names(path.parent)) == min(epoch, 2)
    found = RunFolder.read(run.root).load_checkpoint()
    assert found is not None and torch.equal(found.tensors["w"], torch.full((2,), 4.0))
    assert (found.epoch, found.layout, found.shards) == (4, "{}", {0: ["a", "b"]})
    assert run.load_checkpoint(2) is None and run.load_checkpoint(3).epoch == 3


def test_checkpoints_that_are_still_needed_are_kept(run):
    for epoch in range(1, 6):
        run.save_checkpoint(checkpoint(epoch), keep=(2,))
    assert list(run.checkpoints()) == [2, 4, 5]
    run.drop_checkpoints(keep=[5])
    assert list(run.checkpoints()) == [5]


def test_a_failed_checkpoint_leaves_the_earlier_ones(run, monkeypatch):
    for epoch in (1, 2):
        run.save_checkpoint(checkpoint(epoch))
    monkeypatch.setattr(os, "replace", raises_os_error(errno.ENOSPC))
    with pytest.raises(RunFolderError, match="disk full"):
        run.save_checkpoint(checkpoint(3))
    assert run.load_checkpoint().epoch == 2 and len(names(run.path("checkpoints"))) == 2


@pytest.mark.parametrize("damage", [lambda path: flip_bit(path, -1), lambda path: os.truncate(path, 40)])
def test_a_damaged_checkpoint_is_named_and_deleting_it_goes_back_one(run, damage):
    older, newer = run.save_checkpoint(checkpoint(1)), run.save_checkpoint(checkpoint(2))
    damage(newer)
    with pytest.raises(DamagedError, match=rf"{newer.name} is damaged .* delete it .* {older.name}"):
        run.load_checkpoint()
    newer.unlink()
    assert run.load_checkpoint().epoch == 1
    damage(older)
    with pytest.raises(DamagedError, match=rf"{older.name} is damaged .* the start"):
        run.load_checkpoint()


def test_a_file_that_is_no_checkpoint_of_this_run_is_named(run, tmp_path):
    path = run.save_checkpoint(checkpoint(1))
    sound = path.read_bytes()
    run.save_checkpoint(checkpoint(2)).write_bytes(sound)  # of another epoch
    with pytest.raises(DamagedError, match="another epoch"):
        run.load_checkpoint()
    write_tensors(run.path("checkpoints/checkpoint_000002.safetensors"), {"w": torch.ones(1)}, {"note": "sealed"})
    with pytest.raises(DamagedError, match="no checkpoint"):
        run.load_checkpoint()


# ---- links


@pytest.mark.parametrize("name", ["a.json", "folder", "folder/a.json"])
def test_nothing_below_a_run_folder_may_be_a_link(run, tmp_path, name):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a.json").write_text("{}")
    place = run.root / name.split("/")[0]
    place.symlink_to(tmp_path / "outside" / ("a.json" if place.suffix else "."))
    for use in (run.path, run.read_json, run.read_text, lambda name: run.write_json(name, {"x": 1})):
        with pytest.raises(RunFolderError, match=f"{place.name} is not used: .*symbolic link"):
            use(name)
    assert (tmp_path / "outside/a.json").read_text() == "{}"


def test_a_link_in_the_place_of_a_temporary_file_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".a.bin.{os.getpid()}.tmp").symlink_to(victim)
    write_bytes_atomic(tmp_path / "a.bin", b"new")
    (tmp_path / f".folder.{os.getpid()}.tmp").symlink_to(tmp_path)
    files.write_folder_atomic(tmp_path / "folder", {"victim": b"new"})
    assert victim.read_text() == "precious" and (tmp_path / "folder/victim").read_bytes() == b"new"


def test_the_folder_itself_may_be_reached_through_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    with reopen(tmp_path / "run") as run:
        run.event(n=1)
    assert (tmp_path / "disk/events.jsonl").exists()


# ---- nested state


def same(a: object, b: object) -> bool:
    """Equal in type, order and value, tensors bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_a_nested_tree_comes_back_exactly():
    base = torch.arange(6.0).reshape(2, 3)
    tree = {
        0: {"a.b": base.T, "a": {"b": base}}, "0": [base[0], (torch.tensor(3), ()), []], "1": {}, 1: None,
        "scalars": [True, 1, 1.0, -0.1, 1e-300, float("inf"), 2**70, "ü", "", {"tensor": "x", "tuple": 1}],
    }  # fmt: skip
    tensors, meta = flatten_state(tree)
    assert same(restore_state(tensors, meta), tree)
    base.zero_()
    assert tensors[next(iter(tensors))].any()  # a copy: later steps do not change it
    assert same(restore_state(*flatten_state(torch.ones(()))), torch.ones(()))


@pytest.mark.parametrize("leaf", [object(), {1.5: 0}, {True: 0}, {1, 2}])
def test_what_needs_pickle_is_refused(leaf):
    with pytest.raises(TypeError, match="at state.x without pickle"):
        flatten_state({"state": {"x": leaf}})


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
        lambda params: torch.optim.AdamW(params, lr=1e-3, betas=(0.5, 0.999), amsgrad=True),
    ],
)
def test_an_optimiser_saved_in_a_checkpoint_continues_bit_for_bit(run, make):
    def step(model, optimiser, seed):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()

    model = torch.nn.Linear(4, 2)
    optimiser = make(model.parameters())
    for seed in range(3):
        step(model, optimiser, seed)
    tensors, meta = flatten_state({"model": dict(model.state_dict()), "optimiser": optimiser.state_dict()})
    run.save_checkpoint(Checkpoint(3, tensors, meta, {}))
    saved = run.load_checkpoint()
    state = restore_state(saved.tensors, saved.layout)
    assert same(state["optimiser"], optimiser.state_dict())

    model_2 = torch.nn.Linear(4, 2)
    optimiser_2 = make(model_2.parameters())
    model_2.load_state_dict(state["model"])
    optimiser_2.load_state_dict(state["optimiser"])
    step(model, optimiser, 3)
    step(model_2, optimiser_2, 3)
    assert torch.equal(model.weight, model_2.weight) and torch.equal(model.bias, model_2.bias)


def test_a_path_that_is_not_utf_8_survives_in_json(tmp_path):
    name = os.fsdecode(b"caf\xe9 \xc3\xbc")
    write_json_atomic(tmp_path / "a.json", {"path": name})
    assert json.loads((tmp_path / "a.json").read_bytes()) == {"path": name}


def test_one_file_takes_its_place_at_once(tmp_path, monkeypatch):
    """A kill then leaves the old one or the new one, and nothing aside."""
    new, place = tmp_path / "new", tmp_path / "place"
    new.write_text("new"), place.write_text("old")
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append((a, b)), replace(a, b)))
    files.replace_together({new: place})
    assert seen == [(new, place)] and place.read_text() == "new" and list(tmp_path.iterdir()) == [place]
