"""Step times at several batches, for benchmarks/simulate.py: what smaller parts and slices of a batch cost.

    python benchmarks/steps.py --json benchmarks/results/DATE-DEVICE-steps.json

One process for each model, stage and batch, random weights, the paper's objective, as `maskaq bench` measures. What the
file holds already is not measured again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = {"deit_tiny_patch16_224": 256, "deit_base_patch16_224": 64, "swin_tiny_patch4_window7_224": 256}
"""And the largest batch of synthesis, which a run would choose."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--synthesis", type=int, nargs="*", default=[32, 64, 128, 256], metavar="BATCH")
    parser.add_argument("--calibration", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64], metavar="BATCH")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further words for maskaq bench")
    args = parser.parse_args()
    cases = [
        (model, stage, size)
        for model in args.models
        for stage, sizes in (("synthesis", args.synthesis), ("calibration", args.calibration))
        for size in sizes
        if stage == "calibration" or size <= MODELS.get(model, 256)
    ]
    found: dict = json.loads(args.json.read_text()) if args.json.exists() else {"timings": []}
    known = {(timing["model"], timing["stage"], timing["batch"]) for timing in found["timings"]}
    for model, stage, size in (case for case in cases if case not in known):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "bench.json")
            option = "--batch" if stage == "synthesis" else "--calibration-batch"
            words = ["bench", model, "--only", stage, option, size, "--steps", 10, "--repeats", 4, "--json", file]
            subprocess.run([sys.executable, "-m", "maskaq", *map(str, words), *args.options], check=True)
            measured = json.loads(file.read_text())
        found = measured | {"timings": found["timings"] + measured["timings"]}
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
