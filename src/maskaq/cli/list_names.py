"""`maskaq list`."""

import argparse
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from maskaq.cli.arguments import Invocation
from maskaq.errors import MaskaqError

SUMMARY = "names that other commands take"
RESUMABLE = False


@dataclass(frozen=True)
class Arguments:
    what: str
    pattern: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(_LISTS))
    parser.add_argument("pattern", nargs="?", default="*", metavar="PATTERN", help="only these names, such as 'swin*'")


def run(arguments: Arguments, invocation: Invocation) -> None:
    what, pattern = arguments.what, arguments.pattern
    lines = [line for line in _LISTS[what](pattern) if fnmatchcase(line.split()[0], pattern)]
    if not lines:
        raise MaskaqError(f"no name in `maskaq list {what}` matches {pattern!r}: expected a pattern such as '*tiny*'")
    for line in lines:
        print(line)
    sys.stdout.flush()


def _models(pattern: str) -> Iterator[str]:
    from maskaq import zoo
    from maskaq.models import supported_names

    for name in zoo.embedded_names():
        yield f"{name} (embedded)"
    for name in supported_names():
        if fnmatchcase(name, pattern):  # the weights of all others are not looked up
            yield f"{name}  {_weights_of(name)}"


def _weights_of(name: str) -> str:
    """The tags of timm's weights of an architecture, as NAME.TAG takes them, by what the model is for."""
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
    yield _hanging("images:DIR", "Real images of a folder: the ceiling, NOT data-free.")


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
