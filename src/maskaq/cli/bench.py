"""`maskaq bench`."""

import argparse
from dataclasses import dataclass

from maskaq.cli import arguments as options
from maskaq.cli import converters
from maskaq.cli.arguments import Invocation, ModelOptions, RecipeOptions

SUMMARY = "measure how fast synthesis and calibration run on this device"
RESUMABLE = False
_RECIPE = "paper"


@dataclass(frozen=True)
class Arguments:
    models: tuple[str, ...]
    recipe: RecipeOptions
    model_arg: tuple[str, ...]
    img_size: int | tuple[int, int] | None
    only: str | None
    batch: int
    calibration_batch: int
    steps: int
    repeats: int
    json: str | None
    note: str
    device: str | None
    plain: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        default=["cifar10_vit"],
        help="timm names, with random weights; embedded models; hf:DIR_OR_NAME (default: cifar10_vit)",
    )
    options.add_shape(parser)
    options.add_recipe(parser, _RECIPE)
    parser.add_argument("--only", choices=("synthesis", "calibration"), help="one stage (default: both)")
    count, positive = converters.count, converters.positive
    parser.add_argument("--batch", type=count, default=0, help="images optimised together (default: as in a run)")
    parser.add_argument("--calibration-batch", type=count, default=0, help="images per step (default: the recipe's)")
    parser.add_argument("--steps", type=positive, default=20, help="steps of one measurement (default: 20)")
    parser.add_argument(
        "--repeats", type=positive, default=5, help="number of measurements, after one for the set-up (default: 5)"
    )
    options.add_json(parser, "figures")
    parser.add_argument("--note", default="", help="a word for the JSON file, such as the commit")
    options.add_device(parser)
    options.add_plain(parser)


def run(arguments: Arguments, invocation: Invocation) -> None:
    from maskaq import bench as measure  # they bring torch and timm
    from maskaq.cli import console as draw
    from maskaq.cli import resolve
    from maskaq.cli.figures import write_figures
    from maskaq.engine import pick_engine
    from maskaq.models import hf
    from maskaq.models.load import load_model, rebuild
    from maskaq.quant.rotation import teacher_of
    from maskaq.runs import provenance

    recipe = resolve.recipe_of(arguments.recipe, _RECIPE)
    device = provenance.pick_device(arguments.device)
    repeats, steps = arguments.repeats, arguments.steps
    stages = (arguments.only,) if arguments.only else measure.STAGES
    sizes = {"batch": arguments.batch, "calibration_batch": arguments.calibration_batch}
    timings: list[measure.Timing] = []
    with draw.progress_for(invocation.console) as progress:
        engine = pick_engine(device, False if arguments.plain else None, progress)
        for name in arguments.models:
            shape = ModelOptions(name, model_arg=arguments.model_arg, img_size=arguments.img_size)
            if name.startswith(hf.PREFIX):
                model = load_model(name)
            else:
                model = rebuild({"name": name, "args": resolve.timm_args(shape)})
            teacher = teacher_of(model, recipe.quantization).to(device)
            progress.note(f"{name}: timing {' and '.join(stages)}, {repeats} repeats of {steps} steps each")
            timings += measure.bench(
                name, teacher, recipe, engine, **sizes, steps=steps, repeats=repeats, stages=stages
            )
    invocation.console.print(draw.bench_table(timings, provenance.device_name(device)))
    if arguments.json:
        figures = {"note": arguments.note, "timings": [timing.to_dict() for timing in timings]}
        write_figures(arguments.json, figures, invocation, device)
