"""One run with one process and with several, at one thread each: how much faster, and how equal?

    python benchmarks/efficiency.py --workers 2 --out runs/efficiency

Runs `maskaq quantize cifar10_vit --recipe demo` on the CPU with each number of workers. The time of synthesis is that
from the beginning of the first shard to the end of the last, that of calibration the sum over epochs: starting Python
is not counted. Efficiency is the time of one process over the time of N, over N.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from maskaq.runs.provenance import commit
from maskaq.storage.files import read_tensors
from maskaq.storage.runfolder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--bits", default="w3a3")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--evaluate", action="store_true", help="also on the 1,000 packaged test images")
    parser.add_argument("--out", type=Path, default=Path("runs/efficiency"))
    args = parser.parse_args()
    found = {}
    for workers in (1, args.workers):
        out = args.out / str(workers)
        shutil.rmtree(out, ignore_errors=True)
        words = ["quantize", "cifar10_vit", "--recipe", "demo", "--bits", args.bits, "--device", "cpu", "--no-report"]
        words += ["--workers", str(workers), "--out", str(out), *(["--data", "cifar10-demo"] if args.evaluate else [])]
        words += ["--set", *args.set] if args.set else []
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        before = time.monotonic(), busy(), own()
        subprocess.run([sys.executable, "-m", "maskaq", *words], check=True, env=environment, stdout=sys.stderr)
        wall, everybody, ours = (b - a for a, b in zip(before, (time.monotonic(), busy(), own()), strict=True))
        found[workers] = measured(out) | {"cores used by others": round((everybody - ours) / wall, 2)}
    one, many = found[1], found[args.workers]
    for stage in ("synthesis", "calibration"):
        efficiency = one[stage] / many[stage] / args.workers
        print(f"{stage}: {one[stage]:.1f} s with 1 process, {many[stage]:.1f} s with {args.workers}: {efficiency:.1%}")
    for what in ("first loss", "last loss", "top-1", "cores used by others"):
        print(f"{what}: {one[what]} with 1 process, {many[what]} with {args.workers}")
    print(f"images equal, byte for byte: {same_images(args.out / '1', args.out / str(args.workers))}")
    print(f"largest difference of a weight or range, over its tensor's largest: {apart(args.out, args.workers):.1e}")
    print(f"commit {commit()}")


def busy() -> float:
    """CPU seconds of all processes of this machine."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    """CPU seconds of the processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(out: Path) -> dict[str, Any]:
    run = RunFolder.read(out)
    events = run.events()
    shards = [event for event in events if "shard" in event and event["round"] == 0]
    ends = [datetime.fromisoformat(event["time"]).timestamp() for event in shards]
    begins = [end - event["seconds"] for end, event in zip(ends, shards, strict=True)]
    epochs = [event for event in events if "epoch" in event]
    metrics = out / "metrics.json"
    return {
        "synthesis": max(ends) - min(begins),
        "calibration": sum(event["seconds"] for event in epochs),
        "first loss": epochs[0]["loss"],
        "last loss": epochs[-1]["loss"],
        "top-1": json.loads(metrics.read_text())["accuracy"]["maskaq"]["top1"] if metrics.exists() else None,
    }


def same_images(a: Path, b: Path) -> bool:
    names = [path.relative_to(a) for path in a.glob("images/round_00/shard_*")]
    return bool(names) and all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def apart(out: Path, workers: int) -> float:
    files = (sorted((out / str(count) / "checkpoints").glob("*"))[-1] for count in (1, workers))
    one, many = (read_tensors(file)[0] for file in files)
    names = [name for name in one if name.startswith("student") and one[name].is_floating_point()]
    return max(float((one[n] - many[n]).abs().max() / one[n].abs().max().clamp(min=1e-6)) for n in names)


if __name__ == "__main__":
    main()
