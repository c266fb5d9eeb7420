"""The quantization plan: rules decide every site, everything follows it, mixed precision keeps to its budget."""

import itertools
import json

import pytest
import torch
from helpers import (
    SWIN,
    SWIN_ARGS,
    VIT,
    VIT_ARGS,
    WEIGHTS,
    assert_same,
    packed,
    small_recipe,
    tensors,
    tiny_swin,
    tiny_vit,
)

import maskaq
from maskaq.artifact.export import export
from maskaq.cli.main import main
from maskaq.errors import MaskaqError, RecipeError
from maskaq.images.stored import noise
from maskaq.models import expose
from maskaq.quant import mixed
from maskaq.quant.kinds import layers
from maskaq.quant.plan import QuantPlan, build_plan, plan_of
from maskaq.quant.twin import deploy, init_ranges_, quantized_twin
from maskaq.recipe.schema import Quantization, Rule, load_recipe, to_toml
from maskaq.runs import opened as results
from maskaq.runs.plans import make_plan
from maskaq.runs.quantize import quantize
from maskaq.storage.runfolder import QUANTIZED, RunFolder
from maskaq.tasks import TASKS

MODELS = {"vit": (tiny_vit, VIT, VIT_ARGS), "swin": (tiny_swin, SWIN, SWIN_ARGS)}
RULES = (
    Rule(match="*.mlp.fc2.input", bits="8"),
    Rule(match="*.mlp.fc1.weight", bits="2"),
    Rule(match="*.attn.qk.*", bits="float"),
    Rule(match="*.proj.weight", quantizer="lsq", range="mse"),
)
SET = [f'quantization.rule={{match="{rule.match}", bits="{rule.bits}"}}' for rule in RULES[:3]]


def ruled(*rules: Rule, **more) -> Quantization:
    return Quantization(rule=rules, **more)


# ---- rules


def test_without_rules_every_site_has_the_recipes_bits_and_the_image_has_no_site():
    plan = build_plan(expose(tiny_vit()), Quantization(bits="w3a5"))
    assert {site.bits for site in plan if site.role == "weight"} == {3}
    assert {site.bits for site in plan if site.role == "activation"} == {5}
    assert "patch_embed.proj.weight" in plan.sites and "patch_embed.proj.input" not in plan.sites
    assert all(site.granularity == ("channel" if site.role == "weight" else "tensor") for site in plan)


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_the_last_rule_that_matches_wins_for_what_it_says(build):
    teacher = expose(build())
    rules = (*RULES, Rule(match="*.fc2.*", quantizer="static"), Rule(match="*0.mlp.fc2.input", bits="5"))
    plan = build_plan(teacher, ruled(*rules))
    for site in plan:
        if site.name.endswith("0.mlp.fc2.input"):
            assert (site.bits, site.quantizer) == (5, "static")
        elif site.name.endswith("fc2.input"):
            assert (site.bits, site.quantizer) == (8, "static")
        elif site.name.endswith("fc1.weight"):
            assert site.bits == 2
        elif site.name.endswith("proj.weight"):
            assert (site.bits, site.quantizer, site.range) == (4, "lsq", "mse")
        else:
            assert site.bits == 4
    assert not [name for name in plan.sites if ".qk." in name]


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_the_softmax_may_have_a_quantizer_of_its_own(build):
    plan = build_plan(expose(build()), Quantization(activation="lsq", softmax="log"))
    activations = [site for site in plan if site.role == "activation"]
    assert {site.quantizer for site in activations if site.name.endswith(".av.a")} == {"log"}
    assert {site.quantizer for site in activations if not site.name.endswith(".av.a")} == {"lsq"}


def test_relative_ranges_are_for_activations():
    with pytest.raises(RecipeError, match="relative"):
        build_plan(expose(tiny_vit()), ruled(Rule(match="*.weight", range="relative")))
    with pytest.raises(RecipeError, match="weight_range"):
        Quantization(weight_range="relative")


def test_first_and_last_are_rules_that_others_can_overrule():
    plan = build_plan(expose(tiny_vit()), ruled(Rule(match="head.weight", bits="3"), first_last="8"))
    assert plan.sites["head.weight"].bits == 3 and plan.sites["head.input"].bits == 8
    assert plan.sites["patch_embed.proj.weight"].bits == 8


def test_a_rule_that_matches_nothing_is_an_error_with_a_near_name():
    with pytest.raises(RecipeError, match=r"head\.wieght.*head\.weight"):
        build_plan(expose(tiny_vit()), ruled(Rule(match="head.wieght", bits="8")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('quantization.rule={match="head.*"}', "expected bits, quantizer, range or granularity"),
        ("quantization.rule={bits=8}", "expected match"),
        ('quantization.rule={match="head.*", bits=9}', "bits"),
        ('quantization.rule={match="head.*", bist=8}', "bist"),
        ("quantization.rule=5", "table"),
    ],
)
def test_a_wrong_rule_is_told(text, words):
    with pytest.raises(RecipeError, match=words):
        load_recipe("quick", text)


def test_a_quantizer_of_a_rule_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(MaskaqError, match="lqs"):
        quantize(tiny_vit(), small_recipe('quantization.rule={match="head.*", quantizer="lqs"}'), tmp_path / "run")


def test_rules_of_files_and_of_set_add_up_and_come_back_from_toml(tmp_path):
    (tmp_path / "base.toml").write_text('[[quantization.rule]]\nmatch = "head.*"\nbits = 8\n')
    (tmp_path / "mine.toml").write_text(
        'extends = "base.toml"\n[[quantization.rule]]\nmatch = "*.fc1.*"\nbits = "float"\n'
    )
    recipe = load_recipe(tmp_path / "mine.toml", SET[1])
    assert [(rule.match, rule.bits) for rule in recipe.quantization.rule] == [
        ("head.*", "8"),
        ("*.fc1.*", "float"),
        ("*.mlp.fc1.weight", "2"),
    ]
    (tmp_path / "again.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml") == recipe


# ---- everything follows the plan


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_student_and_deployed_model_are_built_from_the_plan_and_tell_it(build):
    teacher, scheme = expose(build()), ruled(*RULES)
    plan = build_plan(teacher, scheme)
    student = quantized_twin(teacher, scheme)
    init_ranges_(student, noise(teacher, 4, 0), scheme)
    assert plan_of(student) == plan == plan_of(deploy(student))
    assert QuantPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("rows", [5, [], {"a": 5}, {"a": {"bits": 4}}, {"a": {"role": "weight", "bits": "x"}}])
def test_what_is_no_plan_is_told(rows):
    with pytest.raises(RecipeError, match="plan"):
        assert not QuantPlan.from_dict(rows)


@pytest.mark.parametrize("family", ["vit", pytest.param("swin", marks=pytest.mark.slow)])
def test_a_run_with_rules_is_saved_loaded_resumed_exported_and_reported(tmp_path, family):
    build, name, args = MODELS[family]
    recipe, out = small_recipe(*SET), tmp_path / "run"
    result = quantize(build(), recipe, out, source={"name": name, "args": args}, device="cpu", keep="last")
    plan = build_plan(expose(build()), recipe.quantization)
    assert QuantPlan.from_dict(RunFolder.read(out).plan) == plan == plan_of(result.model)
    saved = maskaq.from_pretrained(out / QUANTIZED)
    assert plan_of(saved) == plan
    assert_same(packed(saved), packed(result.model))
    assert plan_of(results.open_run(out).student()) == plan
    images = noise(saved, 4, 0)
    for file_format, suffix in (("onnx", ".onnx"), ("pt2", ".pt2")):
        export(saved, tmp_path / f"model{suffix}", file_format, images)
    rows = {row["name"]: row for row in json.loads((out / "report.json").read_text())["sizes"]}
    wide = next(name for name in rows if name.endswith("mlp.fc1"))
    assert rows[wide]["weight_bits"] == "2"
    assert results.write_report(out).exists()


@pytest.mark.slow
def test_openvino_takes_a_model_with_rules(tmp_path):
    pytest.importorskip("openvino")
    student = quantized_twin(teacher := expose(tiny_vit()), scheme := ruled(*RULES))
    init_ranges_(student, noise(teacher, 4, 0), scheme)
    export(deploy(student), tmp_path / "model.xml", "openvino", noise(teacher, 4, 0))


def test_an_edited_plan_of_a_saved_model_is_refused(tmp_path):
    out = tmp_path / "run"
    quantize(tiny_vit(), small_recipe(), out, source={"name": VIT, "args": VIT_ARGS}, device="cpu", report=False)
    config = json.loads((out / QUANTIZED / "config.json").read_text())
    config["quantization_config"]["plan"]["head.weight"]["quantizer"] = "lsq"
    (out / QUANTIZED / "config.json").write_text(json.dumps(config))
    with pytest.raises(MaskaqError, match=r"plan\.head\.weight\.quantizer"):
        maskaq.from_pretrained(out / QUANTIZED)


def test_inspect_prints_the_plan(capsys):
    assert main(["inspect", "cifar10_vit", "--bits", "w4a4", "--set", SET[0]]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "mlp.fc2" in line]
    assert rows and all("8" in row and "minmax, lsq" in row for row in rows)


# ---- mixed precision


def test_widths_stay_within_the_budget_and_are_near_the_best():
    torch.manual_seed(0)
    sizes = {name: int(size) for name, size in zip("abcd", torch.randint(50, 500, (4,)), strict=True)}
    costs = {
        name: {bits: float(scale) * 4.0**-bits for bits in mixed.WIDTHS}
        for name, scale in zip("abcd", torch.rand(4) * 100, strict=True)
    }
    for average in (2.0, 2.7, 3.0, 4.5, 8.0):
        budget = average * sum(sizes.values())
        chosen = mixed.allocate(costs, sizes, budget)
        used = sum(chosen[name] * sizes[name] for name in sizes)
        assert used <= budget + 1e-9
        best = min(
            sum(costs[name][bits] for name, bits in zip(sizes, widths, strict=True))
            for widths in itertools.product(mixed.WIDTHS, repeat=4)
            if sum(bits * sizes[name] for name, bits in zip(sizes, widths, strict=True)) <= budget
        )
        total = sum(costs[name][bits] for name, bits in chosen.items())
        assert best <= total <= 2 * best + 1e-12


def test_costs_are_of_one_layer_alone_and_leave_the_models_as_they_were():
    teacher, scheme = expose(tiny_vit()), Quantization(bits="w4a4", weight_range="mse")
    plan, images = build_plan(teacher, scheme), noise(teacher, 4, 0)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    costs = mixed.measure_costs(teacher, plan, scheme, ["head.weight"], images, TASKS["classification"])
    alone = quantized_twin(
        teacher, scheme, QuantPlan({"head.weight": plan.with_bits({"head.weight": 3}).sites["head.weight"]})
    )
    init_ranges_(alone, images, scheme)
    p, q = (model(images).double().log_softmax(1) for model in (teacher, alone))
    assert costs["head.weight"][3] == pytest.approx((p.exp() * (p - q)).sum(1).mean().item(), rel=1e-5)
    assert costs["head.weight"][2] > costs["head.weight"][8] >= 0
    assert_same(before, dict(teacher.state_dict()))


@pytest.mark.parametrize("bits", ["mixed:3.0", "mixed:2.5a4"])
def test_a_mixed_run_keeps_to_its_average_and_resumes_with_its_plan(tmp_path, bits, monkeypatch):
    recipe, out = small_recipe(f"quantization.bits={bits}"), tmp_path / "run"
    quantize(tiny_vit(), recipe, out, device="cpu", only_images=True)
    plan = QuantPlan.from_dict(RunFolder.read(out).plan)
    sizes = {
        f"{name}.weight": m.weight.numel()
        for name, (m, _) in layers(expose(tiny_vit())).items()
        if hasattr(m, "weight")
    }
    average = sum(plan.sites[name].bits * size for name, size in sizes.items()) / sum(sizes.values())
    assert recipe.bits.average - 0.5 < average <= recipe.bits.average
    assert len({plan.sites[name].bits for name in sizes}) > 1
    assert {site.bits for site in plan if site.role == "activation"} == {recipe.bits.activation}
    monkeypatch.setattr(mixed, "measure_costs", lambda *_, **__: pytest.fail("measured again"))
    result = quantize(tiny_vit(), recipe, out, device="cpu", keep="last", report=False)
    assert plan_of(result.model) == plan
    assert_same(packed(result.model), tensors(out / WEIGHTS))


@pytest.mark.parametrize("bits", ["mixed:1.9", "mixed:9", "mixed:", "mixed:4.0a9", "mixed"])
def test_an_average_that_cannot_be_is_told(bits):
    with pytest.raises(RecipeError, match=r"quantization\.bits"):
        load_recipe("quick", bits=bits)


def test_mixed_bits_cannot_be_inspected_without_weights(capsys):
    assert main(["inspect", "deit_tiny_patch16_224", "--bits", "mixed:3.0"]) == 1
    assert "--checkpoint" in capsys.readouterr().err


def test_fixed_sites_keep_their_bits_and_count_for_the_average():
    recipe = small_recipe("quantization.bits=mixed:3.0", 'quantization.rule={match="head.weight", bits=8}')
    plan = make_plan(expose(tiny_vit()), recipe)
    assert plan.sites["head.weight"].bits == 8


def test_a_rule_that_sets_the_base_width_fixes_it_and_an_average_out_of_reach_is_told():
    teacher = expose(tiny_vit())
    plan = make_plan(teacher, small_recipe("quantization.bits=mixed:3.0", SET[1].replace('"2"', '"3"')))
    assert {site.bits for site in plan if site.name.endswith("fc1.weight")} == {3}
    for words in (("quantization.first_last=8",), ('quantization.rule={match="*.weight", bits=8}',)):
        with pytest.raises(RecipeError, match="cannot be reached"):
            make_plan(teacher, small_recipe("quantization.bits=mixed:2", *words))


def test_a_plan_of_another_model_is_refused():
    plan = build_plan(expose(tiny_swin()), Quantization())
    with pytest.raises(MaskaqError, match="sites that this model does not have"):
        quantized_twin(expose(tiny_vit()), Quantization(), plan)


def test_evolution_of_widths_never_costs_more_than_its_start_and_keeps_the_budget():
    sizes = dict.fromkeys("abcdef", 10)
    best = dict(zip("abcdef", (2, 3, 4, 5, 6, 4), strict=True))

    def cost(bits):
        return sum(abs(bits[name] - best[name]) for name in bits)

    start = dict.fromkeys("abcdef", 4)
    found = mixed.evolve(start, sizes, budget=240, cost=cost)
    assert cost(found) < cost(start) and sum(found.values()) * 10 <= 240 and set(found.values()) <= set(mixed.WIDTHS)
    assert mixed.evolve(start, sizes, budget=240, cost=cost) == found


def test_a_recipe_may_ask_for_evolved_widths_within_the_same_average():
    teacher = expose(tiny_vit())
    images = noise(teacher, 2, seed=0)
    plans = []
    for how in ("greedy", "evolve"):
        recipe = load_recipe("paper", f"quantization.mixed={how}", bits="mixed:3.5")
        plan = build_plan(teacher, recipe.quantization)
        task = TASKS["classification"]
        plans.append(mixed.choose_bits(teacher, plan, recipe.quantization, 3.5, images, task))
    found = layers(teacher).items()
    weights = {name: module.weight.numel() for name, (module, kind) in found if kind.slots[0] == "weight"}
    for plan in plans:
        spent = sum(plan.sites[f"{name}.weight"].bits * size for name, size in weights.items())
        assert spent <= 3.5 * sum(weights.values())
