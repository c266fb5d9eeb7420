"""The command line: words -> Recipe -> one function of the library. The only file that reads argv."""

import argparse
import ast
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import maskaq
from maskaq import console as draw
from maskaq import zoo
from maskaq.config import Recipe, describe_keys, load_recipe, shipped_recipes
from maskaq.data import TensorImages, image_folder
from maskaq.errors import DataError, MaskaqError, ModelError
from maskaq.evaluate import evaluate
from maskaq.inspection import inspect_model
from maskaq.losses.terms import CALIBRATION_TERMS, SYNTHESIS_TERMS
from maskaq.models import expose, geometry, supported_names
from maskaq.models.load import architecture_of, load_model
from maskaq.quant.quantizers import QUANTIZERS
from maskaq.results import FULL_PRECISION, compare, open_run, write_metrics
from maskaq.run import estimate_seconds, pick_device, quantize

DEMO_DATA = "cifar10-demo"

_EXAMPLES = """examples:
  maskaq demo                                          a small embedded model, end to end, on any machine
  maskaq inspect deit_tiny_patch16_224 --bits w4a4     what would be quantized, and how small it gets
  maskaq quantize deit_tiny_patch16_224 --bits w4a4 --recipe quick --out runs/deit_t
  maskaq quantize deit_tiny_patch16_224 --checkpoint deit_t.safetensors --bits w4a8 --data imagenet/val
  maskaq evaluate runs/deit_t --data imagenet/val
  maskaq list keys                                     every setting, for --set key=value

A run continues where it stopped when the same command is given again."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 a clear error, 2 a mistake in the command, 130 interrupted."""
    parser = _parser()
    args = parser.parse_args(argv)
    width = None if sys.stdout.isatty() else 140  # a log file has room for whole table rows
    console = Console(highlight=False, soft_wrap=True, width=width)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        args.run(args, console)
    except MaskaqError as error:
        errors.print(f"error: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        errors.print("\ninterrupted. Nothing is lost: give the same command again to go on where it stopped.")
        return 130
    except torch.OutOfMemoryError as error:
        errors.print(
            f"error: out of GPU memory even with one image at a time: {str(error).splitlines()[0]}", markup=False
        )
        return 1
    except BrokenPipeError:  # `maskaq list models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="maskaq",
        description="Make a vision transformer small without its training data (MaskAQ).",
        epilog=_EXAMPLES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"maskaq {maskaq.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., None], help: str, description: str = "") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=description or help, formatter_class=raw)
        sub.set_defaults(run=run)
        return sub

    for name, run, help in (
        ("quantize", _quantize, "a model in, a quantized model out: all stages"),
        ("synthesize", _synthesize, "only the synthetic images of the first round (`quantize` or `calibrate` goes on)"),
    ):
        sub = command(name, run, help)
        _model_options(sub)
        _recipe_options(sub)
        sub.add_argument("--out", metavar="DIR", help="run folder (default: runs/MODEL-BITS)")
        sub.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
        _device_option(sub)
        if name == "quantize":
            _data_options(sub, required=False)

    sub = command("calibrate", _calibrate, "go on with a run folder: calibration, refreshes, final model")
    sub.add_argument("folder", metavar="RUN", help="run folder of `synthesize` or `quantize`")
    _device_option(sub)
    _data_options(sub, required=False)

    sub = command("evaluate", _evaluate, "accuracy of a run (full precision, round to nearest, maskaq) or of a model")
    sub.add_argument("model", metavar="RUN_OR_MODEL", help="a run folder, or a model as in `quantize`")
    sub.add_argument("--checkpoint", metavar="FILE", help="weights of the model (.safetensors, .pth, .bin)")
    sub.add_argument(
        "--model-arg", metavar="KEY=VALUE", nargs="+", action="extend", default=[], help="argument for timm"
    )
    sub.add_argument("--json", metavar="FILE", help="write the table as JSON too")
    _device_option(sub)
    _data_options(sub, required=True)

    sub = command("inspect", _inspect, "what would be quantized, layer by layer, with sizes")
    _model_options(sub)
    _recipe_options(sub)

    sub = command("list", _list, "names that other commands take")
    sub.add_argument("what", choices=("models", "recipes", "terms", "quantizers", "keys"))

    sub = command("demo", _demo, "quantize an embedded CIFAR-10 model without data and show what was won back")
    sub.add_argument("--model", choices=("vit", "swin"), default="vit")
    sub.add_argument("--bits", default="w3a3", help="wXaY, X and Y from 2 to 8 (default: w3a3)")
    sub.add_argument("--out", metavar="DIR", help="run folder (default: runs/demo-MODEL-BITS)")
    sub.add_argument("--seed", type=int, default=0)
    _set_option(sub)
    _device_option(sub)
    return parser


def _model_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="timm name of a ViT, DeiT or Swin, or an embedded model")
    sub.add_argument(
        "--checkpoint", metavar="FILE", help="weights (.safetensors, .pth, .bin); default: timm's own, online"
    )
    sub.add_argument(
        "--model-arg",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="argument for timm, e.g. img_size=192",
    )


def _recipe_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--bits", help="bits of weights and activations, wXaY, 2 to 8 each (default: the recipe's, w4a4)")
    sub.add_argument(
        "--recipe", default="quick", help="shipped name or .toml file (default: quick; see `maskaq list recipes`)"
    )
    _set_option(sub)


def _set_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="override a recipe key (`maskaq list keys`)",
    )


def _device_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def _data_options(sub: argparse.ArgumentParser, required: bool) -> None:
    group = sub.add_argument_group("evaluation images")
    group.add_argument(
        "--data",
        metavar="DIR",
        required=required,
        help=f"one sub-folder of images per class; or {DEMO_DATA}, the packaged 1,000",
    )
    group.add_argument(
        "--class-index", metavar="FILE", help="JSON, sub-folder name -> class, for a subset of the classes"
    )
    group.add_argument(
        "--crop-pct", type=float, metavar="X", help="share of the resized image that is kept (default: timm's)"
    )
    group.add_argument(
        "--interpolation", choices=("bilinear", "bicubic", "nearest"), help="of the resize (default: timm's)"
    )
    group.add_argument("--workers", type=int, default=0, help="processes that read images (default: 0)")


def _quantize(args: argparse.Namespace, console: Console, only_images: bool = False) -> None:
    recipe = load_recipe(args.recipe, *args.set, bits=args.bits)
    args.out = args.out or f"runs/{args.model}-{recipe.quantization.bits}"
    model_args = _model_args(args.model_arg)
    model = load_model(args.model, args.checkpoint, model_args)
    source = {
        "name": args.model,
        "args": model_args,
        "checkpoint": str(Path(args.checkpoint).resolve()) if args.checkpoint else None,
        "architecture": architecture_of(model, args.model, model_args),
        "command": shlex.join(["maskaq", *sys.argv[1:]]),
    }
    _run(args, console, recipe, model, source, only_images)


def _synthesize(args: argparse.Namespace, console: Console) -> None:
    args.data = None
    _quantize(args, console, only_images=True)


def _calibrate(args: argparse.Namespace, console: Console) -> None:
    run = open_run(args.folder)
    model = load_model(run.source["name"], run.source["checkpoint"], run.source["args"])
    args.out, args.model, args.seed = args.folder, run.source["name"], run.seed
    _run(args, console, run.recipe, model, run.source, only_images=False)


def _run(
    args: argparse.Namespace,
    console: Console,
    recipe: Recipe,
    model: nn.Module,
    source: dict[str, Any],
    only_images: bool,
) -> None:
    """Plan, run, evaluate, summary."""
    began = time.monotonic()
    device = pick_device(args.device)
    teacher = expose(model)
    facts = geometry(teacher)
    batches = _batches(args) if args.data else None
    if batches:
        batches(model)  # a wrong folder is told now, not after the work
    megabytes = (
        recipe.synthesis.images * len(recipe.rounds) * facts.channels * facts.image_size[0] * facts.image_size[1] / 1e6
    )
    parameters = sum(p.numel() for p in model.parameters())
    console.print(draw.plan_table(args.model, parameters, recipe, str(device), args.out, megabytes))
    seconds = estimate_seconds(teacher, recipe, device, only_images)
    console.print(f"estimate   {draw.duration(seconds)} (rough, from a few steps here)\n")
    with draw.watch_for(console) as watch:
        quantize(
            model, recipe, args.out, seed=args.seed, device=device, watch=watch, source=source, only_images=only_images
        )
        table = compare(open_run(args.out), batches, device=device, watch=watch) if batches else None
    if only_images:
        console.print(f"\nimages are in {args.out}; go on with: maskaq calibrate {args.out}")
        return
    if table:
        write_metrics(args.out, table, args.data)
        console.print()
        console.print(draw.accuracy_table(table, f"{args.model} {recipe.quantization.bits} on {args.data}"))
    console.print(f"\nquantized model: {args.out}/model.safetensors   ({draw.duration(time.monotonic() - began)})")
    if not table:
        console.print(f"evaluate it with: maskaq evaluate {args.out} --data DIR")


def _evaluate(args: argparse.Namespace, console: Console) -> None:
    batches, device = _batches(args), pick_device(args.device)
    is_run = (Path(args.model) / "run.json").exists()
    if not is_run and Path(args.model).exists():
        raise ModelError(f"{args.model} is neither a run folder (it has no run.json) nor a model name")
    with draw.watch_for(console) as watch:
        if is_run:
            table = compare(open_run(args.model), batches, device=device, watch=watch)
            write_metrics(args.model, table, args.data)
        else:
            model = load_model(args.model, args.checkpoint, _model_args(args.model_arg))
            loader = batches(model)
            watch.stage(f"evaluate {args.model}", len(loader.dataset))  # type: ignore[attr-defined]
            table = {FULL_PRECISION: evaluate(model.to(device), loader, watch)}
    console.print(draw.accuracy_table(table, f"{args.model} on {args.data}"))
    if args.json:
        from maskaq.runfolder import write_json_atomic

        write_json_atomic(args.json, {k: v if isinstance(v, str) else v.to_dict() for k, v in table.items()})


def _inspect(args: argparse.Namespace, console: Console) -> None:
    recipe = load_recipe(args.recipe, *args.set, bits=args.bits)
    report = inspect_model(load_model(args.model, args.checkpoint, _model_args(args.model_arg)), recipe)
    table = Table(title=f"{args.model} {recipe.quantization.bits}", title_justify="left")
    for column in ("layer", "kind", "shape", "weight bits", "input bits", "fp32 kB", "quantized kB"):
        table.add_column(column, justify="left" if column in ("layer", "kind") else "right", no_wrap=True)
    for row in report.rows:
        size = (f"{row.float_bytes / 1e3:.1f}", f"{row.quantized_bytes / 1e3:.1f}") if row.float_bytes else ("", "")
        table.add_row(row.name, row.kind, row.shape, row.weight_bits, row.input_bits, *size)
    console.print(table)
    before, after = report.float_bytes / 1e6, report.quantized_bytes / 1e6
    smaller = f"{before / after:.1f} x smaller"
    console.print(f"{before:.2f} MB in float32 -> {after:.2f} MB with weights packed at their bits ({smaller})")


def _list(args: argparse.Namespace, console: Console) -> None:
    if args.what == "models":
        lines: Iterable[str] = [f"{name} (embedded)" for name in zoo.embedded_names()] + supported_names()
    elif args.what == "recipes":
        lines = [f"{name:12}{_first_comment(text)}" for name, text in shipped_recipes().items()]
    elif args.what == "terms":
        both = {"synthesis": SYNTHESIS_TERMS, "calibration": CALIBRATION_TERMS}
        lines = [f"{stage}.terms.{spec.name:26}{spec.doc}" for stage, terms in both.items() for spec in terms.values()]
    elif args.what == "quantizers":
        lines = [f"{name:10}{(cls.__doc__ or '').splitlines()[0]}" for name, cls in QUANTIZERS.items()]
    else:
        lines = [f"{key:42}{default:12}{doc}" for key, default, doc in describe_keys()]
    for line in lines:
        print(line)
    sys.stdout.flush()


def _demo(args: argparse.Namespace, console: Console) -> None:
    args.model = f"cifar10_{args.model}"
    args.out = args.out or f"runs/demo-{args.model}-{args.bits}"
    args.recipe, args.checkpoint, args.model_arg, args.data = "demo", None, [], DEMO_DATA
    _quantize(args, console)


def _batches(args: argparse.Namespace) -> Callable[[nn.Module], Iterable[tuple[Tensor, Tensor]]]:
    """The evaluation images, as a function of the model whose transform they need."""

    def batches(model: Any) -> DataLoader:
        if args.data == DEMO_DATA:
            images, labels = zoo.test_images()
            if model.num_classes != 10 or tuple(model.patch_embed.img_size) != (32, 32):
                raise DataError(
                    f"{DEMO_DATA} is for the embedded CIFAR-10 models; give --data DIR for {type(model).__name__}"
                )
            return DataLoader(TensorImages(images, labels, model), batch_size=100)
        return image_folder(
            args.data,
            model,
            class_index=args.class_index,
            crop_pct=args.crop_pct,
            interpolation=args.interpolation,
            workers=args.workers,
        )

    return batches


def _model_args(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign:
            raise ModelError(f"--model-arg {pair!r}: expected key=value, for example img_size=192")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def _first_comment(text: str) -> str:
    lines = text.splitlines()
    return lines[0].lstrip("# ") if lines and lines[0].startswith("#") else ""
