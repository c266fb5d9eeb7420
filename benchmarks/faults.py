"""Kill workers of a run at random moments, again and again, and compare what comes out with an undisturbed run.

    python benchmarks/faults.py --kills 30 --workers 3 --out runs/faults

Each trial is `maskaq quantize cifar10_vit --workers N` with a small recipe, and a `maskaq work` beside it. One of these
processes, at random, gets SIGKILL at a random moment. A trial passes if the run ends by itself with the images, byte
for byte, and the weights of a run of as many ranks that nothing happened to. Needs /proc to find the processes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from maskaq.runs.provenance import commit

SMALL = (
    "synthesis.images=48",
    "synthesis.batch=4",
    "synthesis.steps=6",
    "calibration.epochs=6",
    "calibration.batch=16",
    "refresh.every=3",
    "refresh.steps=4",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    began = time.monotonic()
    undisturbed = args.out / "undisturbed"
    assert finish(start(undisturbed, args.workers)) == 0
    took = time.monotonic() - began
    chance, passed = random.Random(args.seed), 0
    for number in range(args.kills):
        result = trial(args.out / f"{number:02d}", undisturbed, args.workers, chance, took)
        passed += result["passed"]
        print(json.dumps({"trial": number} | result), flush=True)
    print(f"{passed} of {args.kills} passed; {args.workers} ranks and a worker, commit {commit()}")
    sys.exit(passed != args.kills)


def trial(out: Path, undisturbed: Path, workers: int, chance: random.Random, took: float) -> dict:
    began = time.monotonic()
    run = start(out, workers)
    helper = subprocess.Popen([sys.executable, "-m", "maskaq", "work", out, "--device", "cpu"], **quiet(out))
    victims: list[int] = []
    while not victims and run.poll() is None:  # every rank has begun
        time.sleep(0.05)
        found = ranks(run.pid)
        victims = [*found.values(), helper.pid] if len(found) == workers and (out / "run.json").exists() else []
    time.sleep(chance.uniform(0, took - (time.monotonic() - began)) if took > time.monotonic() - began else 0)
    names = {pid: f"rank {rank}" for rank, pid in ranks(run.pid).items()} | {helper.pid: "worker"}
    pid = chance.choice(sorted(names))
    when = stage(out)
    try:
        os.kill(pid, signal.SIGKILL)
        killed = names[pid]
    except ProcessLookupError:
        killed = "nobody: it had ended"
    code = finish(run)
    helper.terminate()
    helper.wait()
    same = code == 0 and alike(undisturbed, out)
    if same:
        shutil.rmtree(out)
    return {"killed": killed, "when": when, "code": code, "passed": same, "seconds": round(time.monotonic() - began, 1)}


def start(out: Path, workers: int) -> subprocess.Popen:
    words = ["quantize", "cifar10_vit", "--recipe", "demo", "--bits", "w4a4", "--device", "cpu", "--no-report"]
    words += ["--workers", str(workers), "--lease", "5", "--out", str(out), "--set", *SMALL]
    return subprocess.Popen([sys.executable, "-m", "maskaq", *words], **quiet(out))


def quiet(out: Path) -> dict:
    out.parent.mkdir(parents=True, exist_ok=True)
    log = open(out.with_suffix(".log"), "a")  # noqa: SIM115
    return {"stdout": log, "stderr": log, "env": os.environ | {"OMP_NUM_THREADS": "1"}}


def finish(run: subprocess.Popen) -> int:
    try:
        return run.wait(timeout=600)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)
        run.wait()
        return -1


def ranks(parent: int) -> dict[int, int]:
    """Rank -> process, of those that the launcher has started."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and f"PPid:\t{parent}\n" in (folder / "status").read_text():
                variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
                found[int(variables["RANK"])] = int(folder.name)
        except (OSError, KeyError):
            continue
    return found


def stage(out: Path) -> str:
    lines = (out / "events.jsonl").read_text().splitlines() if (out / "events.jsonl").exists() else []
    last = json.loads(lines[-1]) if lines else {}
    return f"after {last.get('stage', 'nothing')} of round {last.get('round', 0)}"


def alike(a: Path, b: Path) -> bool:
    """The same images, model and last checkpoint."""
    names = [p.relative_to(a) for p in (*a.glob("images/*/shard_*"), a / "quantized/model.safetensors")]
    names += [sorted(a.glob("checkpoints/*"))[-1].relative_to(a)]
    return len(names) > 2 and all((b / n).exists() and (a / n).read_bytes() == (b / n).read_bytes() for n in names)


if __name__ == "__main__":
    main()
