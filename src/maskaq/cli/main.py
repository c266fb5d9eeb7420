"""The command line: the only file that reads argv. It stays light, so that --help is quick."""

import argparse
import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

import maskaq
from maskaq.errors import MaskaqError, unwritable

DEMO_DATA = "cifar10-demo"

_EXAMPLES = """examples:
  maskaq demo                                          a small embedded model, end to end, on any machine
  maskaq inspect deit_tiny_patch16_224 --bits w4a4     what would be quantized, and how small it gets
  maskaq quantize deit_tiny_patch16_224 --bits w4a4 --recipe quick --out runs/deit_t
  maskaq quantize deit_tiny_patch16_224 --checkpoint deit_t.safetensors --bits w4a8 --data imagenet/val
  maskaq evaluate runs/deit_t --data imagenet/val
  maskaq export runs/deit_t --format onnx              a file for ONNX Runtime or OpenVINO, verified
  maskaq report runs/deit_t                            an HTML report, in the run folder
  maskaq list keys                                     every setting, for --set key=value

A run continues where it stopped when the same command is given again."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; exit code: 0 done, 1 a clear error, 2 a mistake in the command, 130 Ctrl-C, 143 SIGTERM."""
    # Threads that spin while they wait take the cores from each other on a busy machine, threads that sleep at once
    # wake up late thousands of times a step: they spin briefly. Both are read when torch is first imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):  # a terminal without ± or a path's letters gets them as \xb1
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    args.words = words
    width = None if sys.stdout.isatty() else 140  # a log file has room for whole table rows
    plain = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}  # a path may hold [x] or :x:
    console, errors = Console(width=width, **plain), Console(stderr=True, **plain)  # type: ignore[arg-type]
    try:
        with _sigterm_interrupts():
            commands = importlib.import_module(
                "maskaq.cli.commands"
            )  # brings torch, timm: only for a command that parsed
            getattr(commands, args.command)(args, console)
    except MaskaqError as error:
        errors.print(f"error: {error}", style="red")
        return 1
    except KeyboardInterrupt as stop:
        errors.print(
            f"\n{'terminated' if isinstance(stop, _Terminated) else 'interrupted'}{_how_to_go_on(args.command)}"
        )
        return 143 if isinstance(stop, _Terminated) else 130
    except BrokenPipeError:  # `maskaq list models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a file or folder that the commands did not foresee
        if error.filename is None:
            raise
        errors.print(f"error: {os.fsdecode(error.filename)}: {error.strerror}", style="red")
        return 1
    except (RuntimeError, MemoryError) as error:
        if type(error).__name__ == "OutOfMemoryError":
            errors.print(f"error: out of GPU memory even with one image at a time: {error}", style="red")
        elif isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
            remedy = "lower --batch, or in a recipe synthesis.images, synthesis.batch or calibration.batch"
            errors.print(f"error: out of memory: {remedy}", style="red")
        else:
            raise
        return 1
    return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they kill: the same way out as Ctrl-C, so that locks are freed."""


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return

    def terminate(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _how_to_go_on(command: str) -> str:
    if command not in ("quantize", "synthesize", "calibrate", "demo"):
        return ""
    return (
        ". Finished shards of images and the latest checkpoint are kept, work since then is done again: "
        "give the same command again to go on"
    )


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

    def command(name: str, does: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".", formatter_class=raw)
        sub.set_defaults(command=name)
        return sub

    for name, does in (
        ("quantize", "a model in, a quantized model out: all stages"),
        ("synthesize", "only the synthetic images of the first round (`quantize` or `calibrate` goes on)"),
    ):
        sub = command(name, does)
        _model_options(sub)
        _recipe_options(sub)
        sub.add_argument("--out", type=_path, metavar="DIR", help="run folder (default: runs/MODEL-BITS)")
        sub.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
        _device_option(sub)
        if name == "quantize":
            _end_options(sub)
            _data_options(sub, required=False)
        else:
            sub.set_defaults(keep="better", no_report=True)

    sub = command("calibrate", "go on with a run folder: calibration, refreshes, final model")
    sub.add_argument("folder", type=_path, metavar="RUN", help="run folder of `synthesize` or `quantize`")
    sub.add_argument("--checkpoint", type=_path, metavar="FILE", help="the model's weights, where they moved")
    _device_option(sub)
    _end_options(sub, keep=None)
    _data_options(sub, required=False)

    sub = command(
        "evaluate",
        "accuracy of a run (full precision, round to nearest, searched ranges, maskaq), a saved model or a model",
    )
    sub.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run folder, a saved model's folder, or a model as in `quantize`"
    )
    sub.add_argument(
        "--checkpoint", type=_path, metavar="FILE", help="weights of the model, or of a run's where they moved"
    )
    _timm_options(sub)
    sub.add_argument("--json", type=_new_file, metavar="FILE", help="write the table as JSON too")
    _device_option(sub, plain=False)
    _data_options(sub, required=True)

    sub = command("export", "write a finished run's model for other runtimes, and verify the file")
    sub.add_argument("folder", type=_path, metavar="RUN_OR_MODEL", help="run folder, or a saved model's folder")
    sub.add_argument(
        "--format",
        choices=("onnx", "openvino", "pt2"),
        default="onnx",
        help="onnx: standard operators, integer products; openvino: the same as FILE.xml and FILE.bin; "
        "pt2: torch.export.load (default: onnx)",
    )
    sub.add_argument(
        "-o", "--output", type=_path, metavar="FILE", help="default: model.onnx, .xml or .pt2 in the run folder"
    )
    _data_options(sub, required=False)

    sub = command("report", "an HTML report: images, attention, curves, layers; several runs side by side")
    sub.add_argument("folders", type=_path, metavar="RUN", nargs="+", help="run folders")
    sub.add_argument(
        "-o",
        "--out",
        type=_new_file,
        metavar="FILE.html",
        help="the page (default: RUN/report.html; compare.html for several runs)",
    )
    sub.add_argument("--checkpoint", type=_path, metavar="FILE", help="the model's weights, where they moved")
    sub.add_argument("--device", help="for what has to be computed anew (default: cuda where there is one)")

    sub = command(
        "inspect",
        "what would be quantized, or is in a run or saved model, layer by layer, with sizes (fetches no weights)",
    )
    _model_options(sub)
    _recipe_options(sub)

    sub = command("bench", "how fast synthesis and calibration run here")
    sub.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        default=["cifar10_vit"],
        help="timm names, with random weights, or embedded models (default: cifar10_vit)",
    )
    _recipe_options(sub, recipe="paper")
    sub.add_argument("--batch", type=_count, default=0, help="images optimised together (default: as a run would)")
    sub.add_argument("--calibration-batch", type=_count, default=0, help="images per step (default: the recipe's)")
    sub.add_argument("--steps", type=_positive, default=20, help="steps of one measurement (default: 20)")
    sub.add_argument("--repeats", type=_positive, default=5, help="measurements, after one for the set-up (default: 5)")
    sub.add_argument("--json", type=_new_file, metavar="FILE", help="write the figures as JSON too")
    sub.add_argument("--note", default="", help="a word for the JSON file, such as the commit")
    _device_option(sub)

    sub = command("bench-runtime", "how fast exported files (.onnx, .xml) run on this CPU, beside float32")
    sub.set_defaults(command="bench_runtime")
    sub.add_argument(
        "files", type=_path, metavar="FILE", nargs="+", help="files of `maskaq export`, of one model at any bits"
    )
    sub.add_argument("--batch", type=_positive, nargs="+", default=[1, 32], help="images at once (default: 1 32)")
    sub.add_argument("--threads", type=_positive, default=2, help="threads of each runtime (default: 2)")
    sub.add_argument("--repeats", type=_positive, default=10, help="interleaved measurements of each (default: 10)")
    sub.add_argument("--json", type=_new_file, metavar="FILE", help="write the figures as JSON too")
    _data_options(sub, required=False)

    sub = command("list", "names that other commands take")
    sub.set_defaults(command="list_names")
    sub.add_argument("what", choices=("models", "recipes", "terms", "quantizers", "keys"))
    sub.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="only these names, such as 'swin*'")

    sub = command("demo", "quantize an embedded CIFAR-10 model without data and show the accuracy that is recovered")
    sub.add_argument("--model", choices=("vit", "swin"), default="vit")
    sub.add_argument("--bits", default="w3a3", help="wXaY, X and Y from 2 to 8 (default: w3a3)")
    sub.add_argument("--out", type=_path, metavar="DIR", help="run folder (default: runs/demo-MODEL-BITS)")
    sub.add_argument("--seed", type=int, default=0)
    _set_option(sub)
    _device_option(sub)
    _end_options(sub)
    return parser


def _model_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="timm name of a ViT, DeiT or Swin, or an embedded model")
    sub.add_argument(
        "--checkpoint",
        type=_path,
        metavar="FILE",
        help="weights (.safetensors, .pth, .bin); default: timm's own, online",
    )
    _timm_options(sub)


def _timm_options(sub: argparse.ArgumentParser) -> None:
    """What a model takes that neither its name nor its weights tell."""
    sub.add_argument(
        "--model-arg",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="argument for timm, e.g. num_classes=10",
    )
    sub.add_argument(
        "--img-size", type=_size, metavar="N|HxW", help="image size (default: what the weights tell, or the name's)"
    )
    for key, example in (("mean", "0.485,0.456,0.406"), ("std", "0.229,0.224,0.225")):
        sub.add_argument(
            f"--{key}",
            type=_numbers,
            metavar="X[,X,...]",
            help=f"of normalised images with pixels from 0 to 1: one number or one per channel, e.g. {example} "
            "(default: timm's for the name)",
        )


def _recipe_options(sub: argparse.ArgumentParser, recipe: str = "quick") -> None:
    sub.add_argument("--bits", help="bits of weights and activations, wXaY, 2 to 8 each (default: the recipe's, w4a4)")
    sub.set_defaults(default_recipe=recipe)
    sub.add_argument(
        "--recipe",
        help=f"shipped name or .toml file (default: {recipe}; see `maskaq list recipes`); budget+method, such as "
        "quick+mimiq, lays the one over the other",
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


def _device_option(sub: argparse.ArgumentParser, plain: bool = True) -> None:
    sub.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    if plain:
        words = "every step as it is written, in float32: for comparison, and if in doubt"
        sub.add_argument("--plain", action="store_true", help=words)


def _end_options(sub: argparse.ArgumentParser, keep: str | None = "better") -> None:
    sub.add_argument(
        "--keep",
        choices=("better", "last"),
        default=keep,
        help="better: hand over the model before calibration if calibration made it worse on synthetic images that it "
        f"did not see; last: the last epoch's in any case (default: {keep or 'what the run was last asked for'})",
    )
    sub.add_argument("--no-report", action="store_true", help="skip the report and its measurements")


def _data_options(sub: argparse.ArgumentParser, required: bool) -> None:
    group = sub.add_argument_group("evaluation images")
    group.add_argument(
        "--data",
        type=_path,
        metavar="DIR",
        required=required,
        help=f"one sub-folder of images per class; or {DEMO_DATA}, the packaged 1,000",
    )
    group.add_argument(
        "--class-index", type=_path, metavar="FILE", help="JSON, sub-folder name -> class, for a subset of the classes"
    )
    group.add_argument(
        "--crop-pct", type=_share, metavar="X", help="share of the resized image that is kept (default: timm's)"
    )
    group.add_argument(
        "--interpolation", choices=("bilinear", "bicubic", "nearest"), help="of the resize (default: timm's)"
    )
    group.add_argument("--workers", type=_count, default=0, help="processes that read images (default: 0)")


def _path(text: str) -> str:
    """A path that the system can look up, whether something is there or not."""
    if not text:  # Python takes it for the working directory, or for no option at all
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    try:
        os.lstat(text)
    except ValueError as error:  # a NUL character
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}: {error}") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise argparse.ArgumentTypeError(f"expected a path, got {text}: {error.strerror}") from error
    return text


def _new_file(text: str) -> str:
    if problem := unwritable(text):
        raise argparse.ArgumentTypeError(problem)
    return text


def _share(text: str) -> float:
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text}")
    return float(text)


def _size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.strip().isdigit() for side in sides):
        raise argparse.ArgumentTypeError(f"expected N or HxW in pixels, such as 224 or 192x256, got {text!r}")
    return (int(sides[0]), int(sides[1])) if len(sides) == 2 else int(sides[0])


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        example = "expected one number or one per channel, such as 0.5 or 0.485,0.456,0.406"
        raise argparse.ArgumentTypeError(f"{example}, got {text!r}") from None


def _positive(text: str) -> int:
    return _at_least(1, text)


def _count(text: str) -> int:
    return _at_least(0, text)


def _at_least(low: int, text: str) -> int:
    if not text.strip().lstrip("+-").isdigit() or int(text) < low:
        raise argparse.ArgumentTypeError(f"expected a whole number, {low} or more, got {text!r}")
    return int(text)
