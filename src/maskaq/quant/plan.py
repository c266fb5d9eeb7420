"""The quantization plan: a list of every tensor that is quantized, with its bits and quantizer.

A plan is built from a recipe: its bits and quantizers apply to every site, then its rules are applied in order, and the
last rule that matches a site wins. The student, its ranges, the saved model, exports and reports follow the plan.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from maskaq.errors import ModelError, RecipeError, unknown
from maskaq.models import AttentionProducts, Matmul, geometry
from maskaq.models.structure import gelu_mlps
from maskaq.quant.deployed import CodedWeight, FixedGrid
from maskaq.quant.kinds import kind_of, refuse_quantized
from maskaq.quant.quantizers import Quantizer
from maskaq.quant.rotation import rotated
from maskaq.quant.site import Site
from maskaq.recipe.schema import Bits, Quantization, Rule
from maskaq.storage.files import misfit

_LATER = frozenset({"rotation", "heads", "symmetric"})
"""Settings of a site that older plans do not have. They are not written while they have no value."""


@dataclass(frozen=True)
class QuantPlan:
    """Site name -> site, in the model's order. A tensor without a site stays in float."""

    sites: Mapping[str, Site] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites.values())

    def __len__(self) -> int:
        return len(self.sites)

    def get(self, layer: str, slot: str) -> Site | None:
        return self.sites.get(f"{layer}.{slot}")

    def with_bits(self, bits: Mapping[str, int]) -> "QuantPlan":
        """The plan with other bits at some of its sites."""
        return QuantPlan({n: replace(site, bits=bits.get(n, site.bits)) for n, site in self.sites.items()})

    def with_range(self, method: str) -> "QuantPlan":
        """The plan with one range method for all sites."""
        return QuantPlan({name: replace(site, range=method) for name, site in self.sites.items()})

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Site name -> its settings, as JSON types; without those of `_LATER` that have no value."""
        return {s.name: {k: v for k, v in asdict(s).items() if k != "name" and (v or k not in _LATER)} for s in self}

    @classmethod
    def from_dict(cls, rows: Any) -> "QuantPlan":
        """What `to_dict` gave; RecipeError for anything else."""
        form = {"role": str, "bits": int, "channels?": int, "quantizer": str, "range": str}
        form |= {"rotation?": str, "heads?": int}
        names = {field.name for field in fields(Site)} - {"name"}
        if wrong := misfit(rows, {"*": form}, "plan"):
            raise RecipeError(f"the quantization plan is not one of maskaq's: {wrong}")
        if odd := next((name for name, row in rows.items() if row.keys() | _LATER != names), None):
            raise RecipeError(f"the quantization plan is not one of maskaq's: plan.{odd}: expected {sorted(names)}")
        return cls({name: Site(name=name, **row) for name, row in rows.items()})


def plan_of(model: nn.Module) -> QuantPlan | None:
    """The plan that a student or a deployed model was built from; None for a saved model of 0.1, which has none."""
    found: dict[str, Site] = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        for slot in kind.slots if kind is not None else ():
            part = kind.part(module, slot)  # type: ignore[union-attr]
            if isinstance(part, Quantizer | FixedGrid | CodedWeight):
                if part.site is None:
                    return None
                found[f"{name}.{slot}"] = part.site
    return QuantPlan(found)


def build_plan(teacher: nn.Module, scheme: Quantization) -> QuantPlan:
    """The plan of a recipe for an exposed model, rotated as the recipe says."""
    refuse_quantized(teacher)
    before = rotated(teacher)
    if set(before.names) != set(scheme.rotate):
        raise ModelError(
            f"quantization.rotate asks for {list(scheme.rotate)}, the model has {list(before.names)}: give "
            "maskaq.quant.rotation.teacher_of(model, recipe.quantization)"
        )
    bits = Bits.parse(scheme.bits)
    mlps = gelu_mlps(teacher)
    behind_gelu = {f"{name}.fc2.input" for name in mlps} - before.sites.keys()  # rotated values have both signs
    if scheme.mlp == "relu" and not mlps:
        raise ModelError("quantization.mlp = relu: this model has no MLP of two layers with a GELU between them")
    sites: dict[str, Site] = {}
    for name, module in teacher.named_modules():
        kind = kind_of(module)
        for index, slot in enumerate(kind.slots if kind is not None else ()):
            if scheme.scope == "backbone" and not geometry(teacher).in_backbone(name):
                continue
            if slot == "weight":
                channels = len(module.weight)  # type: ignore[arg-type]
                site = Site(f"{name}.{slot}", "weight", bits.weight, True, channels, scheme.weight, scheme.weight_range)
            elif slot == "input" and name in geometry(teacher).first:
                continue  # the image itself is never quantized
            else:
                signed = module.signed[index] if isinstance(module, Matmul) else True
                special = "same"
                if isinstance(module, Matmul) and not signed:
                    special = scheme.softmax
                elif f"{name}.{slot}" in behind_gelu:
                    special, signed = scheme.gelu, scheme.mlp != "relu"
                site = Site(f"{name}.{slot}", "activation", bits.activation, signed)
                own = scheme.activation if special == "same" else special
                site = replace(site, quantizer=own, range=scheme.activation_range)
                site = replace(site, rotation=before.sites.get(site.name, ""))
            sites[site.name] = _for_target(site, scheme.target)
    heads = {name: m.num_heads for name, m in teacher.named_modules() if isinstance(m, AttentionProducts)}
    return QuantPlan(_ruled(sites, (*_first_and_last(teacher, scheme), *scheme.rule), heads))


def _for_target(site: Site, target: str) -> Site:
    """The site for a target. `openvino`: signed operands of attention products are symmetric; `symmetric`: all signed.

    Codes of values that are never negative, such as the softmax, start at 0: 7-bit codes are int8 without a zero point.
    """
    if not site.signed:
        return replace(site, bits=min(site.bits, 7)) if target == "symmetric" else site
    return replace(site, symmetric=target == "symmetric" or (target == "openvino" and site.slot in ("a", "b")))


def with_own_mlps(
    teacher: nn.Module, scheme: Quantization, plan: QuantPlan | None
) -> tuple[Quantization, QuantPlan | None]:
    """Scheme and plan of a student with the teacher's own MLPs, as in baselines, whichever MLPs the method uses."""
    if scheme.mlp == "same":
        return scheme, plan
    own = replace(scheme, mlp="same")
    found = build_plan(teacher, own)
    known = {} if plan is None else {site.name: site for site in plan}
    sites = {
        n: replace(s, bits=known[n].bits, range=known[n].range) if n in known else s for n, s in found.sites.items()
    }
    return own, QuantPlan(sites)


def _first_and_last(teacher: nn.Module, scheme: Quantization) -> list[Rule]:
    """`first_last` as rules: the patch embedding and the classifier."""
    if scheme.first_last == "same":
        return []
    spec = geometry(teacher)
    ends = [name for name in (*spec.first, *spec.last) if scheme.scope == "all" or spec.in_backbone(name)]
    return [Rule(match=f"{name}.*", bits=scheme.first_last) for name in ends]


def has_own_bits(teacher: nn.Module, scheme: Quantization, name: str) -> bool:
    """Whether a rule or `first_last` sets the bits of a site."""
    rules = (*_first_and_last(teacher, scheme), *scheme.rule)
    return any(rule.bits and fnmatchcase(name, rule.match) for rule in rules)


def _ruled(sites: dict[str, Site], rules: Iterable[Rule], heads: Mapping[str, int]) -> dict[str, Site]:
    """The sites after all rules.

    Args:
        heads: attention -> its number of heads.
    """
    in_float: set[str] = set()
    for rule in rules:
        matched = [name for name in sites if fnmatchcase(name, rule.match)]
        if not matched:
            message = unknown("site", rule.match, sites)
            raise RecipeError(f"quantization.rule: nothing matches. {message[:400]} ... (`maskaq inspect` prints all)")
        for name in matched:
            changes: dict[str, Any] = {"quantizer": rule.quantizer, "range": rule.range}
            if rule.bits:
                in_float.discard(name)
                if rule.bits == "float":
                    in_float.add(name)
                else:
                    changes["bits"] = int(rule.bits)
            site = replace(sites[name], **{key: value for key, value in changes.items() if value})
            if site.role == "weight" and site.range == "relative":
                raise RecipeError(
                    f"quantization.rule: range relative is for activations, and {name} is a weight; use mse"
                )
            sites[name] = _with_granularity(site, rule.granularity, heads) if rule.granularity else site
    return {name: site for name, site in sites.items() if name not in in_float}


def _with_granularity(site: Site, granularity: str, heads: Mapping[str, int]) -> Site:
    attention = site.layer.rpartition(".")[0]
    if site.slot not in ("a", "b") or attention not in heads:
        raise RecipeError(
            f"quantization.rule: granularity is for the operands of attention products (*.qk.*, *.av.*), and "
            f"{site.name} has one range for each {site.granularity}"
        )
    return replace(site, heads=heads[attention] if granularity == "head" else None)
