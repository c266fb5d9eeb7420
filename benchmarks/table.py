"""Run the rows of a table of docs/RESULTS.md in one process, where they share compiled code; print each as it ends.

    python benchmarks/table.py benchmarks/rows/peers.txt --checkpoint deit_t.safetensors --data VAL_A VAL_B --out DIR

A row is `name | model | recipe | bits | seed | key=value ...`: what `maskaq quantize MODEL --recipe ...` runs.
{0} in a recipe is the first folder of --data, {1} the second. For each row a line of OUT/rows.jsonl keeps its top-1 on
each folder, which images were hit, and its seconds; OUT/NAME is its model. A row that has its line is not run again,
but its model is evaluated on folders that it has not been on. Several processes with one OUT, on any machines that see
it, share the rows: each takes those that no other has begun, or whose process has died.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

import maskaq
from maskaq import zoo
from maskaq.artifact.saved import read_config
from maskaq.errors import MaskaqError
from maskaq.images.sets import TensorImages, image_folder
from maskaq.quant.twin import frozen
from maskaq.recipe.schema import Recipe, load_recipe
from maskaq.runs.provenance import commit, pick_device
from maskaq.storage.files import write_bytes_atomic
from maskaq.storage.leases import Leases
from maskaq.storage.runfolder import QUANTIZED

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--checkpoint", help="weights of the rows' timm model")
    parser.add_argument(
        "--data", nargs="+", default=[], help="folders to evaluate on; cifar10-demo for embedded models"
    )
    parser.add_argument("--crop-pct", type=float, help="of the evaluation images, in place of timm's for the model")
    parser.add_argument("--out", type=Path, default=Path("runs/table"))
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no row after so many seconds")
    parser.add_argument("--only", help="names of rows, separated by commas")
    args = parser.parse_args()
    rows = [row for file in args.rows for row in read(file)]
    began = time.monotonic()
    table = Table(args)
    failed = False
    asked = {row["name"]: row for row in rows if not args.only or row["name"] in args.only.split(",")}
    for name in [name for name in asked if name in table.finished]:
        table.evaluate_further(asked[name])
    for row in map(asked.get, table.leases.each(asked, lambda name: name in table.read())):
        if time.monotonic() - began > args.limit:
            print(f"{row['name']}: not begun, over --limit", flush=True)
            continue
        try:
            table.run(row)
        except (MaskaqError, RuntimeError) as error:
            failed = True
            print(f"{row['name']}: failed: {error}", file=sys.stderr, flush=True)
    sys.exit(failed)


def read(file: Path) -> list[dict[str, Any]]:
    try:
        lines = [line.split("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"cannot read the rows in {file}: {error}")
    return [_row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line]


def _row(line: str, where: str) -> dict[str, Any]:
    keys = ("name", "model", "recipe", "bits", "seed", "overrides")
    parts = [part.strip() for part in line.split("|")]
    row = dict(zip(keys, parts, strict=False))
    if len(parts) != len(keys) or not re.fullmatch(r"[\w.-]*\w", row["name"]) or not row["seed"].isdecimal():
        sys.exit(
            f"{where}: expected NAME | model | recipe | bits | SEED | key=value ..., with a plain name, got: {line}"
        )
    return row | {"seed": int(row["seed"]), "overrides": row["overrides"].split()}


class Table:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, pick_device()
        self.models: dict[str, Any] = {}
        self.images: dict[tuple[str, str], Batches] = {}
        args.out.mkdir(parents=True, exist_ok=True)
        self.file = args.out / "rows.jsonl"
        self.lock = FileLock(args.out / "rows.lock")
        self.leases = Leases(args.out / "leases")
        self.finished = self.read()

    def read(self) -> dict[str, dict[str, Any]]:
        """Row name -> its line."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut one
        return {line["name"]: line for line in found}

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, or replace the one of the same row; other processes may do so at the same time."""
        with self.lock:
            self.finished = self.read() | {line["name"]: line}
            lines = "".join(json.dumps(kept) + "\n" for kept in self.finished.values())
            write_bytes_atomic(self.file, lines.encode())

    def evaluate_further(self, row: dict[str, Any]) -> None:
        """Measure a finished row's model on the folders that its line does not have, and write the line again."""
        line = self.finished[row["name"]]
        missing = [data for data in self.args.data if data not in line["top1"]]
        if not missing:
            return
        model = maskaq.from_pretrained(self.args.out / row["name"], self.model(row["model"])).to(self.device)
        for data in missing:
            hits = self.hits(row["model"], model, data)
            line["hits"][data] = hits
            line["top1"][data] = round(100 * sum(map(int, hits)) / len(hits), 2)
        self.write(line)
        self.show(line)

    def show(self, line: dict[str, Any]) -> None:
        top1 = "  ".join(f"{Path(data).name} {value:.1f}" for data, value in line["top1"].items())
        settings = f"{line['name']:24} {line['recipe']:20} {line['bits']} seed {line['seed']}"
        print(f"{settings}  {top1}  {line['seconds']:.0f} s", flush=True)

    def run(self, row: dict[str, Any]) -> None:
        folders = {f"{{{i}}}": os.path.abspath(data) for i, data in enumerate(self.args.data)}
        name = re.sub(r"\{\d\}", lambda found: folders.get(found[0], found[0]), row["recipe"])
        recipe = load_recipe(name, *row["overrides"], bits=row["bits"])
        model = self.model(row["model"])
        began, folder = time.monotonic(), self.args.out / f"{row['name']}.run"
        result = maskaq.quantize(model, recipe, folder, seed=row["seed"], source={"name": row["model"]}, report=False)
        seconds = time.monotonic() - began
        with frozen(result.model.eval()):
            hits = {data: self.hits(row["model"], result.model, data) for data in self.args.data}
        line = row | {
            "images": f"{recipe.synthesis.images} x {_steps(recipe)}",
            "top1": {data: round(100 * sum(map(int, found)) / len(found), 2) for data, found in hits.items()},
            "hits": hits,
            "seconds": round(seconds, 1),
            "handover": read_config(folder / QUANTIZED)["made"].get("handover"),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "commit": commit(),
        }
        shutil.rmtree(self.args.out / row["name"], ignore_errors=True)
        shutil.move(folder / QUANTIZED, self.args.out / row["name"])
        self.write(line)
        self.show(line)
        shutil.rmtree(folder)  # its images are hundreds of megabytes
        torch.cuda.empty_cache()

    def model(self, name: str) -> Any:
        if name not in self.models:
            checkpoint = None if name.startswith("cifar10") else self.args.checkpoint
            self.models[name] = maskaq.load_model(name, checkpoint)
        return self.models[name]

    @torch.no_grad()
    def hits(self, name: str, model: torch.nn.Module, data: str) -> str:
        """One character for each image: 1 where the model is right."""
        if (name, data) not in self.images:
            source: Any
            if data == "cifar10-demo":
                source = torch.utils.data.DataLoader(TensorImages(*zoo.test_images(), self.model(name)), batch_size=250)
            else:
                source = image_folder(data, self.model(name), crop_pct=self.args.crop_pct, workers=os.cpu_count() or 1)
            self.images[name, data] = [(x.to(self.device), y.to(self.device)) for x, y in source]
        right = [model(x).argmax(dim=1) == y for x, y in self.images[name, data]]
        return "".join("01"[hit] for hit in torch.cat(right).tolist())


def _steps(recipe: Recipe) -> str:
    return " + ".join(str(recipe.steps_in_round(round)) for round in range(len(recipe.rounds)))


if __name__ == "__main__":
    main()
