"""Step times at several batches, for benchmarks/simulate.py: what smaller parts and slices of a batch cost.

    python benchmarks/steps.py --json benchmarks/results/DATE-DEVICE-steps.json

One process for each model, random weights, the paper's objective, as `maskaq bench` measures.
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
    parser.add_argument("--synthesis", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--calibration", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="further words for maskaq bench")
    args = parser.parse_args()
    found: dict = {}
    for model in args.models:
        synthesis = [size for size in args.synthesis if size <= MODELS.get(model, 256)]
        sizes = max(len(synthesis), len(args.calibration))
        for number in range(sizes):
            pair = synthesis[number % len(synthesis)], args.calibration[number % len(args.calibration)]
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "bench.json")
                words = ["bench", model, "--batch", pair[0], "--calibration-batch", pair[1], "--steps", 10]
                words += ["--repeats", 4, "--json", file, *args.options]
                subprocess.run([sys.executable, "-m", "maskaq", *map(str, words)], check=True)
                measured = json.loads(file.read_text())
            timings = found.get("timings", [])
            known = {(t["model"], t["stage"], t["batch"]) for t in timings}
            new = [t for t in measured["timings"] if (t["model"], t["stage"], t["batch"]) not in known]
            found = measured | {"command": f"python benchmarks/steps.py {args.json}", "timings": timings + new}
            args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
