"""`maskaq list`."""

import argparse
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from maskaq.cli.arguments import Invocation
from maskaq.errors import MaskaqError, unknown

SUMMARY = "list names that other commands take"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    what: str
    pattern: str
    family: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(_LISTS))
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="only these names, such as 'swin*'")
    parser.add_argument("--family", help="only models of a family, such as eva; also shows what stays in float")


def run(arguments: Arguments, invocation: Invocation) -> None:
    what, pattern = arguments.what, arguments.pattern
    if arguments.family is not None and what != "models":
        raise MaskaqError(f"--family is for `maskaq list models`, not for {what}")
    found = _models(pattern, arguments.family) if what == "models" else _LISTS[what](pattern)
    lines = [line for line in found if fnmatchcase(line.split()[0], pattern)]
    if not lines:
        raise MaskaqError(f"no name in `maskaq list {what}` matches {pattern!r}: expected a pattern such as '*tiny*'")
    for line in lines:
        print(line)
    if arguments.family is not None:
        print(_about_family(lines))
    sys.stdout.flush()


def _models(pattern: str, family: str | None = None) -> Iterator[str]:
    from maskaq import zoo
    from maskaq.models import hosts
    from maskaq.models.names import FAMILIES, supported_names

    if family is not None and family not in FAMILIES:
        raise MaskaqError(unknown("family", family, FAMILIES))
    for name in zoo.embedded_names() if family is None else ():
        yield f"{name} (embedded)"
    for name in supported_names(family):
        if fnmatchcase(name, pattern):  # do not look up the weights of the others
            yield f"{name}  {_weights_of(name)}"
    for name in hosts.names() if family is None else ():
        yield f"{name}  (give --checkpoint, such as OpenMMLab's)"


def _about_family(lines: list[str]) -> str:
    """What is quantized in the first model listed, and what stays in float; needs only its shapes."""
    from maskaq.models import expose, in_float
    from maskaq.models.load import load_shape
    from maskaq.quant.kinds import layers

    name = lines[0].split()[0]
    exposed = expose(load_shape(name))
    kinds = [kind.name for _, kind in layers(exposed).values()]
    counts = ", ".join(f"{kinds.count(kind)} {kind}s" for kind in dict.fromkeys(kinds))
    whole = sum(parameter.numel() for parameter in exposed.parameters())
    kept = in_float(exposed)
    words = ", ".join(f"{kind} {100 * count / whole:.2g} %" for kind, count in kept.items()) or "biases alone"
    return f"\nquantized in {name}: {counts}\nleft in float, of all parameters: {words}"


def _weights_of(name: str) -> str:
    """The tags of timm's weights for an architecture, as in NAME.TAG, grouped by task."""
    from maskaq.models import classifier_tags, pretrained_tags

    tags, usable = pretrained_tags(name), classifier_tags(name)
    headless = [tag for tag in tags if tag not in usable]
    if not tags:
        return "(timm has no weights: give --checkpoint)"
    groups = [", ".join(usable)] if usable else []
    groups += [f"features: {', '.join(headless)}"] if headless else []
    return "  ".join(groups)


def _recipes(_: str) -> Iterator[str]:
    from maskaq.recipe.schema import shipped_recipes

    for name, text in shipped_recipes().items():
        yield _hanging(name, _first_comment(text))
    yield _hanging("images:DIR", "Real images from a folder, as an upper bound: NOT data-free.")


def _first_comment(text: str) -> str:
    """The first paragraph of the comment that a recipe starts with."""
    lines = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#")]
    return " ".join(itertools.takewhile(bool, lines))


def _hanging(name: str, text: str) -> str:
    """A name and what it means, in lines of at most 120 characters."""
    return textwrap.fill(text, 120, initial_indent=f"{name:12}", subsequent_indent=" " * 12)


def _terms(_: str) -> Iterator[str]:
    from maskaq.losses.terms import CALIBRATION_TERMS, SYNTHESIS_TERMS

    for stage, terms in {"synthesis": SYNTHESIS_TERMS, "calibration": CALIBRATION_TERMS}.items():
        for spec in terms.values():
            yield f"{stage}.terms.{spec.name:26}{spec.doc}"


def _quantizers(_: str) -> Iterator[str]:
    from maskaq.quant.quantizers import QUANTIZERS

    for name, cls in QUANTIZERS.items():
        yield f"{name:13}{(cls.__doc__ or '').splitlines()[0]}"


def _keys(_: str) -> Iterator[str]:
    from maskaq.recipe.schema import describe_keys

    keys = list(describe_keys())
    width = 2 + max(len(default) for _, default, _ in keys)
    for key, default, doc in keys:
        yield f"{key:42}{default:{width}}{doc}"


_LISTS: dict[str, Callable[[str], Iterator[str]]] = {
    "models": _models,
    "recipes": _recipes,
    "terms": _terms,
    "quantizers": _quantizers,
    "keys": _keys,
}
