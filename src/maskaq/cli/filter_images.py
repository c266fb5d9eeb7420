"""`maskaq filter`."""

import argparse
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import Invocation, ModelOptions
from maskaq.errors import DataError

SUMMARY = "select the generated images of a folder that a model recognises well, for the recipe genq"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    folder: str
    model: ModelOptions
    out: str
    energy: float
    entropy: float
    temperature: float
    device: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=converters.path, metavar="DIR", help="generated images, in sub-folders or not")
    options.add_named_model(parser)
    parser.add_argument(
        "--out", type=converters.path, required=True, metavar="DIR", help="a new folder for the selected images"
    )
    for name, what in (("energy", "lowest energy"), ("entropy", "highest patch-similarity entropy, of these")):
        parser.add_argument(
            f"--{name}", type=converters.share, default=0.75, metavar="X", help=f"share with the {what} (default: 0.75)"
        )
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of the energy (default: 1)")
    options.add_device(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    import os
    import shutil
    from pathlib import Path

    from maskaq.cli import console as draw  # they bring torch and timm
    from maskaq.cli import resolve
    from maskaq.images.filtering import chosen, score_images
    from maskaq.runs.provenance import pick_device
    from maskaq.storage.files import write_json_atomic

    out = Path(arguments.out)
    if out.exists() and (not out.is_dir() or os.listdir(out)):
        raise DataError(f"--out {out}: expected a new or empty folder")
    if not arguments.temperature > 0:
        raise DataError(f"--temperature: expected a number above 0, got {arguments.temperature}")
    model = resolve.full_precision(arguments.model)
    with draw.progress_for(invocation.console) as progress:
        scores = score_images(
            model,
            arguments.folder,
            temperature=arguments.temperature,
            device=pick_device(arguments.device),
            progress=progress,
        )
    kept = chosen(scores, arguments.energy, arguments.entropy)
    root = Path(arguments.folder)
    for score in kept:
        target = out / score.file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(score.file, target)
    files = {
        str(s.file.relative_to(root)): {"energy": s.energy, "entropy": s.entropy, "kept": s in kept} for s in scores
    }
    write_json_atomic(out / "scores.json", {"model": arguments.model.model, "files": files})
    invocation.console.print(f"{len(kept)} of {len(scores)} images are in {out}; scores of all: {out / 'scores.json'}")
    invocation.console.print(
        f"go on with: maskaq quantize {arguments.model.model} --recipe genq+images:{out} --out RUN"
    )
