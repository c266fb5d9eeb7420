"""What a run folder promises: nothing is lost to a kill, no damage goes unnoticed, every refusal says what to do."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maskaq import runfolder
from maskaq.errors import RunFolderError
from maskaq.runfolder import (
    RunFolder,
    flatten_state,
    read_tensors,
    restore_state,
    write_bytes_atomic,
    write_json_atomic,
    write_tensors,
)

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
        "import os, signal, sys\nfrom maskaq.runfolder import RunFolder\n"
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
    with runfolder.safetensors.safe_open(tmp_path / "1", "pt") as file:
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
    with pytest.raises(RunFolderError, match="x.safetensors is damaged .* made anew"):
        read_tensors(path)


def test_a_missing_tensor_file_is_named(tmp_path):
    with pytest.raises(RunFolderError, match="x.safetensors is missing"):
        read_tensors(tmp_path / "x.safetensors")


# ---- opening


def python(code: str, *args: object) -> subprocess.Popen:
    """A second process that runs code with the identity as its last argument."""
    env = {**os.environ, "PYTHONPATH": str(Path(runfolder.__file__).parents[1])}
    command = [sys.executable, "-c", code, *map(str, args), repr(IDENTITY)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_a_new_folder_holds_identity_facts_and_recipe(tmp_path):
    with RunFolder.open(tmp_path / "a/b", IDENTITY, "x = 1\n", {"torch": "2.9"}) as run:
        assert run.identity == IDENTITY and run.facts == {"torch": "2.9"}
    found = json.loads((tmp_path / "a/b/run.json").read_text())
    assert found == {"format": 1, "identity": IDENTITY, "facts": {"torch": "2.9"}}
    assert (tmp_path / "a/b/recipe.toml").read_text() == "x = 1\n"


def test_resuming_elsewhere_keeps_the_first_facts_and_adds_the_new(tmp_path):
    for version in ("2.9", "2.9", "2.10", "2.10"):
        RunFolder.open(tmp_path / "run", IDENTITY, facts={"torch": version}).close()
    found = json.loads((tmp_path / "run/run.json").read_text())
    assert found["facts"] == {"torch": "2.9"} and found["resumed"] == [{"torch": "2.10"}]


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    hold = (
        "import sys, time\nfrom maskaq.runfolder import RunFolder\n"
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


@pytest.mark.parametrize("content", ["", '{"format": 1, "iden', "[]", "{}", '{"format": 1}', "\udcff"])
def test_a_damaged_run_json_is_named(run, content):
    run.close()
    (run.root / "run.json").write_bytes(content.encode(errors="surrogateescape"))
    for open_it in (reopen, RunFolder.read):
        with pytest.raises(RunFolderError, match="run.json is damaged"):
            open_it(run.root)


def test_another_format_is_refused_by_name(run):
    run.close()
    write_json_atomic(run.root / "run.json", {"format": 2})
    with pytest.raises(RunFolderError, match="run.json has format 2, this maskaq works with format 1"):
        reopen(run.root)


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
        lambda: reader.save_shard(0, 0, {"x": torch.ones(1)}),
        lambda: reader.drop_shard(0, 0),
        lambda: reader.save_checkpoint({}, {}),
    ):
        with pytest.raises(RunFolderError, match="reading only"):
            write()
    assert names(run.root) == [".lock", ".lock.pid", "recipe.toml", "run.json"]


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


def shard_path(run: RunFolder, number: int = 0) -> Path:
    return run.path(f"images/round_00/shard_{number:04d}.safetensors")


def test_shards_come_back_with_count_and_extra_in_the_manifest(run):
    images = {"images": torch.rand(5, 3, 4, 4), "labels": torch.arange(5)}
    run.save_shard(0, 2, images, discarded=1)
    run.save_shard(0, 0, images)
    assert run.shards(0) == [0, 2] and run.shards(1) == []
    assert run.has_shard(0, 2) and not run.has_shard(0, 1) and not run.has_shard(1, 2)
    loaded = RunFolder.read(run.root).load_shard(0, 2)
    assert all(torch.equal(loaded[name], images[name]) for name in images)
    entry = run.manifest(0)["shard_0002.safetensors"]
    assert entry["count"] == 5 and entry["discarded"] == 1 and len(entry["sha256"]) == 64


def test_a_shard_without_manifest_entry_does_not_exist(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "_write_manifest", raises_os_error(errno.EIO))
        with pytest.raises(OSError):
            run.save_shard(0, 0, {"x": torch.ones(2)})
    assert shard_path(run).exists() and not run.has_shard(0, 0) and run.shards(0) == []
    with pytest.raises(RunFolderError, match="not in the manifest"):
        run.load_shard(0, 0)
    run.save_shard(0, 0, {"x": torch.ones(2)})
    assert run.has_shard(0, 0)


def test_a_kill_while_a_shard_is_replaced_leaves_no_mismatched_pair(run, monkeypatch):
    run.save_shard(0, 0, {"x": torch.zeros(2)})
    written = []

    def stop_before_the_second_manifest(self: RunFolder, round: int, manifest: dict) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(manifest)
        self.write_json(f"images/round_{round:02d}/manifest.json", manifest)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "_write_manifest", stop_before_the_second_manifest)
        with pytest.raises(KeyboardInterrupt):
            run.save_shard(0, 0, {"x": torch.ones(2)})
    assert not run.has_shard(0, 0)


def test_a_flipped_bit_in_a_shard_is_noticed_and_both_sums_named(run):
    run.save_shard(0, 0, {"x": torch.ones(100)})
    flip_bit(shard_path(run), -7)
    assert run.has_shard(0, 0)  # the size is right; loading is what verifies
    expected = run.manifest(0)["shard_0000.safetensors"]["sha256"][:12]
    with pytest.raises(
        RunFolderError, match=rf"shard_0000.safetensors is damaged \(sha256 {expected}\.\.\. .*made anew"
    ):
        run.load_shard(0, 0)


def test_a_truncated_shard_is_to_be_made_anew(run):
    run.save_shard(0, 0, {"x": torch.ones(100)})
    os.truncate(shard_path(run), 300)
    assert not run.has_shard(0, 0)
    with pytest.raises(RunFolderError, match=r"shard_0000.safetensors is damaged \(\d+ bytes expected, 300 found\)"):
        run.load_shard(0, 0)


def test_a_deleted_or_dropped_shard_is_made_anew(run):
    for remove in (shard_path(run).unlink, lambda: run.drop_shard(0, 0)):
        run.save_shard(0, 0, {"x": torch.ones(2)})
        remove()
        assert not run.has_shard(0, 0) and not shard_path(run).exists()
    assert run.manifest(0) == {}
    run.drop_shard(3, 3)  # nothing there, nothing to do


@pytest.mark.parametrize("content", ["{", "[]", '{"shard_0000.safetensors": 1}', '{"shard_0000.safetensors": {}}'])
def test_a_damaged_manifest_is_named(run, content):
    run.save_shard(0, 0, {"x": torch.ones(2)})
    run.path("images/round_00/manifest.json").write_text(content)
    with pytest.raises(RunFolderError, match="manifest.json is damaged .* delete .*round_00 and run"):
        run.has_shard(0, 0)


# ---- checkpoints


def test_the_newest_checkpoint_is_loaded_and_two_are_kept(run):
    assert run.load_checkpoint() is None
    for step in range(4):
        path = run.save_checkpoint({"w": torch.full((2,), float(step))}, {"step": step, "loss": 0.1})
        assert path.exists() and len(names(path.parent)) == min(step + 1, 2)
    tensors, progress = RunFolder.read(run.root).load_checkpoint()
    assert progress == {"step": 3, "loss": 0.1} and torch.equal(tensors["w"], torch.full((2,), 3.0))


def test_a_failed_checkpoint_leaves_the_earlier_ones(run, monkeypatch):
    for step in range(2):
        run.save_checkpoint({"w": torch.ones(2)}, {"step": step})
    monkeypatch.setattr(os, "replace", raises_os_error(errno.ENOSPC))
    with pytest.raises(RunFolderError, match="disk full"):
        run.save_checkpoint({"w": torch.ones(2)}, {"step": 2})
    assert run.load_checkpoint()[1] == {"step": 1} and len(names(run.path("checkpoints"))) == 2


@pytest.mark.parametrize("damage", [lambda path: flip_bit(path, -1), lambda path: os.truncate(path, 40)])
def test_a_damaged_checkpoint_is_named_and_deleting_it_goes_back_one(run, damage):
    older = run.save_checkpoint({"w": torch.ones(2)}, {"step": 0})
    newer = run.save_checkpoint({"w": torch.ones(2)}, {"step": 1})
    damage(newer)
    with pytest.raises(RunFolderError, match=rf"{newer.name} is damaged .* delete that file .* {older.name}"):
        run.load_checkpoint()
    newer.unlink()
    assert run.load_checkpoint()[1] == {"step": 0}
    damage(older)
    with pytest.raises(RunFolderError, match=rf"{older.name} is damaged .* goes back to the start"):
        run.load_checkpoint()


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
    run.save_checkpoint(tensors, {"step": 3, "state": meta})
    saved, progress = run.load_checkpoint()
    state = restore_state(saved, progress["state"])
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
    runfolder.replace_together({new: place})
    assert seen == [(new, place)] and place.read_text() == "new" and list(tmp_path.iterdir()) == [place]
