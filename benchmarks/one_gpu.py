"""What several workers do on one GPU: are images and steps the same, and what does one worker leave idle?

    python benchmarks/one_gpu.py deit_tiny_patch16_224 --out runs/one_gpu --json FILE [--checkpoint FILE]

Four measurements, each in processes of its own:

* `images`: those of one process, and of one with a `maskaq work` on the same GPU: the same bytes? (Where they are not,
  one process makes them once more, to tell whether two workers are the reason.)
* `idle`: the images per second of two workers at once, over those of one; and the share of the time in which the GPU
  runs kernels while one worker makes images, from a profile of its steps.
* `steps`: seconds of a calibration step, captured in a CUDA graph: alone; with the sum over an NCCL group of one rank
  inside the graph; and with the sum outside of it, as gloo needs it.
* `ranks`: one epoch of two ranks on this GPU, which sum by gloo, against one process: losses and weights.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import maskaq
from maskaq import ranks as group
from maskaq.bench import _images, _seconds, _shaped, _student
from maskaq.calibrate.calibrator import Calibrator
from maskaq.engine import pick_engine
from maskaq.images.synthesis import Synthesizer
from maskaq.models import expose, geometry
from maskaq.recipe.schema import load_recipe
from maskaq.runs.provenance import pick_device, surroundings
from maskaq.storage.files import read_tensors, write_tensors

EMBEDDED = "cifar10_"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="deit_tiny_patch16_224")
    parser.add_argument("--checkpoint", help="weights; without them random ones, which serve as well here")
    parser.add_argument("--out", type=Path, default=Path("runs/one_gpu"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--images", type=int, default=2048, help="of the runs whose images are compared")
    parser.add_argument("--run-steps", type=int, default=400, help="of these runs: long enough for a helper to begin")
    parser.add_argument("--batch", type=int, default=256, help="of synthesis")
    parser.add_argument("--calibration-batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30, help="for which rates are measured")
    parser.add_argument("--only", nargs="+", help="images, idle, steps or ranks")
    parser.add_argument("--device")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(globals()[f"part_{args.part}"](args)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    measured = {
        "images": lambda: same_images(args),
        "idle": lambda: two_workers(args),
        "steps": lambda: child(args, "step", **one_rank()),
        "ranks": lambda: two_ranks(args),
    }
    found: dict[str, Any] = {"model": args.model} | surroundings(pick_device(args.device))
    for name, measure in measured.items():
        if args.only is None or name in args.only:
            found[name] = measure()
            print(name, json.dumps(found[name], indent=2), flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=2) + "\n")


# ---- processes


def start(args: argparse.Namespace, part: str, **variables: str) -> subprocess.Popen:
    words = [args.model, "--part", part, "--calibration-batch", args.calibration_batch]
    for option in ("batch", "steps", "seconds", "out", "checkpoint", "device"):
        words += [f"--{option}", getattr(args, option)] if getattr(args, option) else []
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables)


def result(process: subprocess.Popen) -> Any:
    output, _ = process.communicate()
    if process.returncode:
        return {"failed": process.returncode}
    return json.loads(output.strip().splitlines()[-1])


def child(args: argparse.Namespace, part: str, **variables: str) -> Any:
    return result(start(args, part, **variables))


def one_rank(rank: int = 0, size: int = 1, port: int = 0) -> dict[str, str]:
    """As torchrun would start it."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port()}
    return {name: str(value) for name, value in variables.items()}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# ---- images


def same_images(args: argparse.Namespace) -> dict[str, Any]:
    weights = args.out / "model.safetensors"
    if args.checkpoint:
        weights = Path(args.checkpoint)
    elif not args.model.startswith(EMBEDDED):
        import safetensors.torch

        safetensors.torch.save_file(model_of(args).state_dict(), weights)
    seconds, differ = {}, {}
    for name in ("alone", "helped", "again"):
        if name == "again" and not differ["helped"]:
            break
        out = args.out / name
        shutil.rmtree(out, ignore_errors=True)
        device = ["--device", args.device] if args.device else []
        words = ["synthesize", args.model, *([] if args.model.startswith(EMBEDDED) else ["--checkpoint", weights])]
        words += ["--recipe", "quick", "--set", f"synthesis.images={args.images}", f"synthesis.steps={args.run_steps}"]
        words += ["--part", args.batch, "--out", out, *device]
        began = time.monotonic()
        run = subprocess.Popen([sys.executable, "-m", "maskaq", *map(str, words)], stdout=subprocess.DEVNULL)
        work = [sys.executable, "-m", "maskaq", "work", out, *device]
        helper = subprocess.Popen(work, stdout=subprocess.DEVNULL) if name == "helped" else None
        assert run.wait() == 0
        seconds[name] = round(time.monotonic() - began, 1)
        if helper is not None:
            helper.terminate()  # it would wait for more work
            helper.wait()
        files = sorted((args.out / "alone").glob("images/round_00/shard_*"))
        differ[name] = [f.name for f in files if f.read_bytes() != (out / "images/round_00" / f.name).read_bytes()]
    events = (args.out / "helped/events").glob("*.jsonl")
    helped = sum('"shard"' in line for file in events for line in file.read_text().splitlines())
    return {"shards": len(files), "differ": differ, "made by the helper": helped, "seconds": seconds}


# ---- parts that run in processes of their own


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    if args.checkpoint or args.model.startswith(EMBEDDED):
        return maskaq.load_model(args.model, args.checkpoint)
    import timm

    torch.manual_seed(0)
    model = timm.create_model(args.model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # none of them zero, as they never are in use
    return model


def prepared(args: argparse.Namespace) -> tuple[Any, Any, Any, Any]:
    device = pick_device(args.device)
    teacher = expose(model_of(args)).to(device)
    recipe = load_recipe("quick", bits="w4a4")
    return teacher, _student(teacher, recipe), recipe, pick_engine(device, None)


def synthesis(args: argparse.Namespace) -> Synthesizer:
    teacher, student, recipe, engine = prepared(args)
    make = Synthesizer(teacher, student, _shaped(recipe, args.batch, args.steps), engine=engine)
    for _ in range(2):
        make.trial(args.batch, args.steps)  # compiled, captured
    return make


def part_rate(args: argparse.Namespace) -> dict[str, float]:
    """Images times steps per second, begun together with others; of one that works alone also its profile."""
    make = synthesis(args)
    Path(args.out, f"ready-{os.getpid()}").touch()
    workers = int(os.environ["WORKERS"])
    while len(list(Path(args.out).glob("ready-*"))) < workers:
        time.sleep(0.01)
    began, done = time.monotonic(), 0
    while time.monotonic() - began < args.seconds:
        make.trial(args.batch, args.steps)
        done += args.batch * args.steps
    rate = {"rate": done / (time.monotonic() - began)}
    return rate | (profiled(make, args) if workers == 1 else {})


def profiled(make: Synthesizer, args: argparse.Namespace) -> dict[str, float]:
    """Kernel time over wall time, of steps of one worker."""
    seconds = _seconds(lambda: make.trial(args.batch, args.steps), make.device)
    on_gpu = make.device.type == "cuda"
    kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        _seconds(lambda: make.trial(args.batch, args.steps), make.device)
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kernels = sum(getattr(event, time_of) for event in profile.key_averages()) / 1e6
    return {"wall": seconds, "kernels": kernels, "busy": kernels / seconds}


def two_workers(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for workers in (1, 2):
        for file in args.out.glob("ready-*"):
            file.unlink()
        processes = [start(args, "rate", WORKERS=str(workers)) for _ in range(workers)]
        found[workers] = [result(process) for process in processes]
    (one,), two = found[1], found[2]
    if any("failed" in worker for worker in (one, *two)):
        return {"one": one, "two": two}
    both = sum(worker["rate"] for worker in two)
    return {"profile of one": one, "two": both, "two over one": both / one["rate"]}


def part_step(args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a calibration step: alone, and with a sum over a group of one rank in its graph and outside of it."""
    import torch.distributed as dist

    found = {}
    for where in ("alone", "sum outside the graph", "sum inside the graph"):
        teacher, student, recipe, engine = prepared(args)
        fit = Calibrator(teacher, student, _shaped(recipe, args.calibration_batch, 1), engine=engine)
        data = _images(geometry(teacher), args.calibration_batch * args.steps)
        if where != "alone":
            if not dist.is_initialized():
                dist.init_process_group("gloo" if fit.device.type == "cpu" else "cpu:gloo,cuda:nccl")
            fit.ranks = group.ProcessGroup()
            fit.ranks.size = 2  # so that it sums; its part of the batch stays whole
            fit.ranks.part = lambda count: range(count)  # type: ignore[method-assign]
            fit.ranks.in_graphs = where == "sum inside the graph"
        for _ in range(2):
            fit.epoch(data, 0)
        found[where] = min(_seconds(lambda: fit.epoch(data, 0), fit.device) for _ in range(4)) / args.steps  # noqa: B023
    dist.destroy_process_group()
    return found


def part_epoch(args: argparse.Namespace) -> dict[str, Any]:
    """One epoch, alone or as one of two ranks: its losses, and the weights in a file of this rank."""
    teacher, student, recipe, engine = prepared(args)
    fit = Calibrator(teacher, student, _shaped(recipe, args.calibration_batch, 1), engine=engine)
    data = _images(geometry(teacher), args.calibration_batch * 8)
    with group.joined(fit.device) as ranks:
        fit.ranks = ranks
        losses = fit.epoch(data, 0)
        if ranks.leads:
            write_tensors(Path(args.out, f"epoch-{ranks.size}.safetensors"), student.state_dict())
    return losses


def two_ranks(args: argparse.Namespace) -> dict[str, Any]:
    port = free_port()
    alone = child(args, "epoch")
    processes = [start(args, "epoch", **one_rank(rank, 2, port)) for rank in range(2)]
    both = [result(process) for process in processes]
    one, two = (read_tensors(args.out / f"epoch-{size}.safetensors")[0] for size in (1, 2))
    floats = [name for name in one if one[name].is_floating_point()]
    differences = {n: float((one[n] - two[n]).abs().max() / one[n].abs().max().clamp(min=1e-6)) for n in floats}
    worst = max(differences, key=differences.__getitem__)
    return {"alone": alone, "ranks": both[0], "largest relative difference": differences[worst], "of": worst}


if __name__ == "__main__":
    main()
