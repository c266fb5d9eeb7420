"""A recipe holds what its file, its overrides and the defaults say; every mistake is an error that names the key."""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import numpy
import pytest

from maskaq.errors import RecipeError
from maskaq.losses.terms import CALIBRATION_TERMS, SYNTHESIS_TERMS
from maskaq.quant.quantizers import QUANTIZERS
from maskaq.recipe.schema import (
    Augment,
    Bits,
    Calibration,
    Mask,
    Quantization,
    Recipe,
    Refresh,
    Rule,
    Synthesis,
    describe_keys,
    load_recipe,
    recipe_from_dict,
    shipped_recipes,
    to_dict,
    to_toml,
    up_to_date,
)
from maskaq.runs.quantize import quantize

OVERRIDES = (
    "quantization.bits=w3a8",
    "quantization.first_last=8",
    "quantization.percentile=0.99",
    "synthesis.steps=7",
    "synthesis.lr=1e-30",
    "synthesis.roll=0.1",
    "synthesis.mask.drop=0",
    "synthesis.mask.keep_at_least=3",
    "synthesis.terms.total_variation=1e-22",
    "synthesis.terms.my_own=-2",
    "calibration.optimizer=adamw",
    "calibration.augment.crop=[0.5, 1]",
    "calibration.terms.block_error=10",
    "refresh.start=cold",
)


def fields_of(cls: type, path: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """(dotted key, field, type) of every setting, walked without the code under test."""
    for spec in dataclasses.fields(cls):
        dotted, hint = f"{path}{spec.name}", get_type_hints(cls)[spec.name]
        if dataclasses.is_dataclass(hint):
            yield from fields_of(hint, f"{dotted}.")
        else:
            yield dotted, spec, hint


def known_keys(section: str) -> list[str]:
    cls: Any = Recipe
    for part in filter(None, section.split(".")):
        cls = get_type_hints(cls)[part]
    return [spec.name for spec in dataclasses.fields(cls)]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def message_of(*args: Any, **options: Any) -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(*args, **options)
    return str(error.value)


# ---------------------------------------------------------------- what loads


def test_the_shipped_recipes_are_there():
    assert {"paper", "quick", "reference"} <= set(shipped_recipes())


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_loads_and_names_terms_and_quantizers_that_exist(name):
    recipe = load_recipe(name)
    assert set(recipe.synthesis.terms) <= set(SYNTHESIS_TERMS)
    assert set(recipe.calibration.terms) <= set(CALIBRATION_TERMS)
    assert {recipe.quantization.weight, recipe.quantization.activation} <= set(QUANTIZERS)
    assert any(recipe.synthesis.terms.values()) and any(recipe.calibration.terms.values())


def test_the_paper_recipe_equals_the_defaults_of_the_settings():
    assert load_recipe("paper") == Recipe()


def test_a_recipe_without_a_name_is_the_one_that_quantize_takes():
    by_default = inspect.signature(quantize).parameters["recipe"].default
    assert load_recipe() == load_recipe(by_default) == load_recipe("quick") != Recipe()


@pytest.mark.parametrize("name", shipped_recipes())
@pytest.mark.parametrize("overrides", [(), OVERRIDES], ids=["plain", "overridden"])
def test_the_written_toml_loads_to_an_equal_recipe(tmp_path, name, overrides):
    recipe = load_recipe(name, *overrides)
    assert load_recipe(write(tmp_path / "recipe.toml", to_toml(recipe))) == recipe


def test_the_written_toml_holds_odd_names_and_strings_too(tmp_path):
    odd = {'a "quoted" term': 1.0, "größe": 2.0, "with.dot": 3.0, "back\\slash": 4.0}
    recipe = recipe_from_dict(
        {
            "quantization": {"weight": 'my "own"\\quantizer\n'},
            "synthesis": {"terms": odd},
            "calibration": {"terms": odd},
        }
    )
    assert load_recipe(write(tmp_path / "recipe.toml", to_toml(recipe))) == recipe


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_dict_goes_back_to_an_equal_recipe_also_through_json(name):
    recipe = load_recipe(name, *OVERRIDES)
    assert recipe_from_dict(to_dict(recipe)) == recipe
    assert recipe_from_dict(json.loads(json.dumps(to_dict(recipe)))) == recipe


def test_building_a_recipe_leaves_its_dict_alone():
    tree = {"synthesis": {"steps": 3, "terms": {"class_prior": 2}}}
    recipe_from_dict(tree)
    assert tree == {"synthesis": {"steps": 3, "terms": {"class_prior": 2}}}


def test_an_empty_recipe_is_all_defaults():
    assert recipe_from_dict({}) == recipe_from_dict({"synthesis": {"mask": {}, "terms": {}}}) == Recipe()


def test_recipes_share_no_state_and_cannot_be_changed():
    Recipe().synthesis.terms["class_prior"] = 99.0
    assert Recipe().synthesis.terms["class_prior"] == 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().synthesis.steps = 3  # type: ignore[misc]


# ---------------------------------------------------------------- overrides


def test_overrides_change_what_they_name_and_nothing_else():
    got, wanted = to_dict(load_recipe("paper", "synthesis.mask.drop=0.4", "refresh.every=5")), to_dict(Recipe())
    wanted["synthesis"]["mask"]["drop"] = 0.4
    wanted["refresh"]["every"] = 5
    assert got == wanted


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("synthesis.steps=50", lambda r: r.synthesis.steps, 50),
        (" synthesis.steps = 1_000 ", lambda r: r.synthesis.steps, 1000),
        ("synthesis.lr=1", lambda r: r.synthesis.lr, 1.0),
        ("synthesis.lr=2e-4", lambda r: r.synthesis.lr, 2e-4),
        ("calibration.optimizer=adamw", lambda r: r.calibration.optimizer, "adamw"),
        ('calibration.optimizer="adamw"', lambda r: r.calibration.optimizer, "adamw"),
        ("quantization.first_last=8", lambda r: r.quantization.first_last, "8"),
        ("calibration.augment.crop=[0.2, 0.9]", lambda r: r.calibration.augment.crop, (0.2, 0.9)),
        ("calibration.augment.crop=[1, 1]", lambda r: r.calibration.augment.crop, (1.0, 1.0)),
        ("synthesis.terms.brightness=0.1", lambda r: r.synthesis.terms["brightness"], 0.1),
        ("synthesis.terms={brightness=2}", lambda r: r.synthesis.terms["brightness"], 2.0),
        ("synthesis={steps=3, lr=0.5}", lambda r: (r.synthesis.steps, r.synthesis.lr), (3, 0.5)),
    ],
)
def test_an_override_is_read_as_its_setting_wants_it(override, read, value):
    got = read(load_recipe("paper", override))
    assert got == value and type(got) is type(value)


def test_later_overrides_win_and_bits_win_over_all():
    recipe = load_recipe("paper", "synthesis.steps=1", "synthesis.steps=2", "quantization.bits=w2a2", bits="w3a5")
    assert recipe.synthesis.steps == 2 and recipe.bits == Bits(3, 5)


def test_a_term_that_is_overridden_leaves_the_weights_of_the_others():
    recipe = load_recipe("reference", "synthesis.terms.class_prior=0.25")
    assert recipe.synthesis.terms == load_recipe("reference").synthesis.terms | {"class_prior": 0.25}


def test_a_recipe_file_overrides_what_it_extends_also_over_several_files(tmp_path):
    base = write(tmp_path / "base.toml", 'extends = "quick"\n[synthesis]\nsteps = 11\nlr = 0.5\n')
    top = write(tmp_path / "top.toml", f"extends = '{base}'\n[synthesis]\nsteps = 22\nterms.class_prior = 3\n")
    recipe, quick = load_recipe(Path(top), "synthesis.batch=4"), load_recipe("quick")
    terms = quick.synthesis.terms | {"class_prior": 3.0}
    assert recipe.synthesis == dataclasses.replace(quick.synthesis, steps=22, lr=0.5, batch=4, terms=terms)
    assert recipe.calibration == quick.calibration and recipe.refresh == quick.refresh


def test_a_file_without_extends_stands_on_the_defaults(tmp_path):
    assert load_recipe(write(tmp_path / "a.toml", "# nothing\n")) == Recipe()


@pytest.mark.parametrize("text", ["w4a8", "W4A8", " w4a8 "])
def test_bits_are_parsed(text):
    assert Bits.parse(text) == Bits(weight=4, activation=8)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("override", "section", "key"),
    [
        ("nonsense=1", "", "nonsense"),
        ("sythesis.steps=1", "", "sythesis"),
        ("extends=quick", "", "extends"),
        ("synthesis.stepz=1", "synthesis", "stepz"),
        ("synthesis.mask.dropp=1", "synthesis.mask", "dropp"),
        ("calibration.augment.crops=[0, 1]", "calibration.augment", "crops"),
        ("calibration.steps=1", "calibration", "steps"),
        ("quantization..bits=w4a4", "quantization", ""),
    ],
)
def test_an_unknown_key_is_named_with_its_section_and_the_known_ones(override, section, key):
    message = message_of("paper", override)
    assert (f"[{section}]" if section else "the recipe") in message and repr(key) in message
    assert all(name in message for name in known_keys(section))


def test_a_near_miss_is_answered_with_the_nearest_key():
    assert "Did you mean 'steps'?" in message_of("paper", "synthesis.stepz=1")


def test_an_unknown_section_of_a_file_is_named_with_the_known_ones(tmp_path):
    message = message_of(write(tmp_path / "a.toml", "[training]\nlr = 1\n"))
    assert "'training'" in message and all(name in message for name in known_keys(""))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("synthesis.steps=many", "synthesis.steps: expected a whole number, got 'many'"),
        ("synthesis.steps=1.5", "synthesis.steps: expected a whole number, got 1.5"),
        ("synthesis.steps=true", "synthesis.steps: expected a whole number, got True"),
        ("synthesis.steps=", "synthesis.steps: expected a whole number, got ''"),
        ("synthesis.steps=[1]", "synthesis.steps: expected a whole number, got [1]"),
        ("synthesis.batch=1" + "0" * 30, "synthesis.batch: expected a whole number below 2147483648, got 10"),
        ("synthesis.steps.x=1", "synthesis.steps: expected a whole number"),
        ("synthesis.lr=fast", "synthesis.lr: expected a finite number, got 'fast'"),
        ("synthesis.lr=false", "synthesis.lr: expected a finite number, got False"),
        ("synthesis.lr=nan", "synthesis.lr: expected a finite number, got nan"),
        ("synthesis.lr=inf", "synthesis.lr: expected a finite number, got inf"),
        ("synthesis.lr=-inf", "synthesis.lr: expected a finite number, got -inf"),
        ("synthesis.lr=1" + "0" * 400, "synthesis.lr: expected a finite number, got 10"),
        ("synthesis.mask.drop=nan", "synthesis.mask.drop: expected a finite number"),
        ("synthesis.terms.class_prior=nan", "synthesis.terms.class_prior: expected a finite number"),
        ("synthesis.terms.class_prior=true", "synthesis.terms.class_prior: expected a finite number"),
        ("synthesis.terms.class_prior=on", "synthesis.terms.class_prior: expected a finite number, got 'on'"),
        ("synthesis.terms.a.b=1", "synthesis.terms.a: expected a finite number"),
        ("synthesis.terms=1", "synthesis.terms: expected a table of name = weight, got 1"),
        ("synthesis=1", "synthesis is a table of settings, not 1"),
        ("synthesis.mask=0.5", "synthesis.mask is a table of settings, not 0.5"),
        ("calibration.optimizer=1.5", "calibration.optimizer: expected a word, got 1.5"),
        ("calibration.optimizer=true", "calibration.optimizer: expected a word, got True"),
        ("calibration.optimizer=[]", "calibration.optimizer: expected a word, got []"),
        ("calibration.augment.crop=0.5", "calibration.augment.crop: expected 2 numbers such as [0.08, 1.0], got 0.5"),
        ("calibration.augment.crop=[0.5]", "calibration.augment.crop: expected 2 numbers"),
        ("calibration.augment.crop=[0.5, 1, 1]", "calibration.augment.crop: expected 2 numbers"),
        ("calibration.augment.crop=[nan, 1]", "calibration.augment.crop: expected a finite number, got nan"),
        ("calibration.augment.crop=[true, 1]", "calibration.augment.crop: expected a finite number, got True"),
        ("calibration.augment.crop=[0.9, 0.5]", "calibration.augment.crop: expected the smaller number first"),
        (
            "calibration.augment.crop=[0.5, 1.5]",
            "calibration.augment.crop: expected a number from 0.01 to 1.0, got 1.5",
        ),
        ("synthesis.batch=0", "synthesis.batch: expected a number at least 1, got 0"),
        ("synthesis.mask.drop=1", "synthesis.mask.drop: expected a number from 0.0 to 0.99, got 1.0"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_is_expected(override, expected):
    assert expected in message_of("paper", override)


NUMBERS = [
    (key, spec.metadata["low"], spec.metadata["high"], hint)
    for key, spec, hint in fields_of(Recipe)
    if hint in (int, float)
]


@pytest.mark.parametrize(("key", "low", "high", "hint"), NUMBERS, ids=[x[0] for x in NUMBERS])
def test_every_number_has_a_lower_limit_and_takes_its_limits_but_nothing_beyond(key, low, high, hint):
    room = ("synthesis.mask.start=1.0", "synthesis.mask.end=0.0")  # so that no limit of the one offends the other
    assert low is not None
    for limit, beyond in ((low, low - 1), (high, None if high is None else high + 1)):
        if limit is not None:
            load_recipe("paper", *room, f"{key}={hint(limit)!r}")
            message = message_of("paper", f"{key}={hint(beyond)!r}")
            assert message.startswith(f"{key}: expected a number") and str(limit) in message


@pytest.mark.parametrize("key", [key for key, _, _, hint in NUMBERS if hint is float])
def test_every_float_has_an_upper_limit(key):
    assert message_of("paper", f"{key}=1e308").startswith(f"{key}: expected a number from")


@pytest.mark.parametrize("weight", ["1e308", "-1e308", "1e10"])
@pytest.mark.parametrize("key", ["synthesis.terms.class_prior", "calibration.terms.logit_kl"])
def test_the_weight_of_a_term_has_limits(key, weight):
    assert message_of("paper", f"{key}={weight}").startswith(f"{key}: expected a number from")


CHOICES = [(key, spec.metadata["choices"]) for key, spec, _ in fields_of(Recipe) if spec.metadata["choices"]]


@pytest.mark.parametrize(("key", "choices"), CHOICES, ids=[x[0] for x in CHOICES])
def test_every_choice_is_taken_and_another_is_named_with_the_choices(key, choices):
    for choice in choices:
        load_recipe("paper", f"{key}={choice}")
    message = message_of("paper", f"{key}=nonsense")
    assert message.startswith(f"{key}: unknown value 'nonsense'") and all(choice in message for choice in choices)


@pytest.mark.parametrize(
    "bits", ["", "4", "w4", "a4", "w4a", "w1a4", "w4a9", "w9a4", "w4a16", "a4w4", "w4a4x", "w-4a4"]
)
def test_bad_bits_are_named_with_their_key_and_what_is_allowed(bits):
    for message in (message_of("paper", bits=bits), message_of("paper", f"quantization.bits={bits}")):
        assert f"quantization.bits {bits!r}: expected wXaY" in message and "from 2 to 8" in message
    with pytest.raises(RecipeError):
        Recipe(quantization=Quantization(bits=bits))


def test_a_mask_that_grows_is_refused_with_both_keys():
    message = message_of("paper", "synthesis.mask.start=0.2", "synthesis.mask.end=0.3")
    assert "synthesis.mask.end 0.3" in message and "synthesis.mask.start 0.2" in message
    with pytest.raises(RecipeError):
        Recipe(synthesis=Synthesis(mask=Mask(start=0.1, end=0.5)))


FROM_PYTHON = {
    "synthesis.images=-1": lambda: Synthesis(images=-1),
    "synthesis.lr=nan": lambda: Synthesis(lr=float("nan")),
    "synthesis.start=nosie": lambda: Synthesis(start="nosie"),
    "synthesis.terms.class_prior=1e10": lambda: Synthesis(terms={"class_prior": 1e10}),
    "synthesis.mask.drop=1.0": lambda: Mask(drop=1.0),
    "synthesis.mask.end=0.9": lambda: Mask(end=0.9),
    "quantization.bits=w1a4": lambda: Quantization(bits="w1a4"),
    "quantization.rule=3": lambda: Quantization(rule=3),
    'quantization.rule=[{bits="8"}]': lambda: Rule(bits="8"),
    'quantization.rule=[{match="*", bits="9"}]': lambda: Rule(match="*", bits="9"),
    "calibration.batch=0": lambda: Calibration(batch=0),
    "calibration.batch=1.5": lambda: Calibration(batch=1.5),
    "calibration.augment.crop=[0.5, 0.2]": lambda: Augment(crop=(0.5, 0.2)),
    "calibration.augment.hue=0.6": lambda: Augment(hue=0.6),
    "refresh.start=tepid": lambda: Refresh(start="tepid"),
}


@pytest.mark.parametrize("override", FROM_PYTHON)
def test_python_is_refused_what_a_file_is_refused_with_the_same_message(override):
    with pytest.raises(RecipeError) as raised:
        FROM_PYTHON[override]()
    assert str(raised.value) == message_of("paper", override)


def test_a_table_in_python_is_the_dataclass_of_its_name():
    with pytest.raises(RecipeError, match=r"^synthesis: expected a Synthesis, got \{'images': 3\}"):
        Recipe(synthesis={"images": 3})
    with pytest.raises(RecipeError, match=r"^quantization\.rule: expected a list of tables"):
        Quantization(rule=[{"match": "*", "bits": "8"}])


def test_values_from_python_have_the_types_of_their_fields():
    synthesis = Synthesis(images=numpy.int64(3), lr=1, terms={"class_prior": 2})
    assert [type(value) for value in (synthesis.images, synthesis.lr, synthesis.terms["class_prior"])] == [
        int,
        float,
        float,
    ]
    assert synthesis.terms == {"class_prior": 2.0}, "the terms named in Python are all there are"
    assert Quantization(rule=[Rule(match="*", bits="8")]).rule == (Rule(match="*", bits="8"),)


def test_a_renamed_value_is_understood_by_its_old_name(tmp_path):
    file = write(tmp_path / "old.toml", '[synthesis]\nstart = "leaves"\n')
    found = [
        load_recipe(file),
        load_recipe("paper", "synthesis.start=leaves"),
        Recipe(synthesis=Synthesis(start="leaves")),
    ]
    assert {recipe.synthesis.start for recipe in found} == {"dead_leaves"}
    assert 'start = "dead_leaves"' in to_toml(found[0])


def test_a_stored_recipe_of_an_earlier_version_is_brought_up_to_date():
    old = to_dict(Recipe())
    old["synthesis"] |= {"start": "leaves", "later": 1}
    del old["calibration"]["pace"]
    wanted = to_dict(load_recipe("paper", "synthesis.start=dead_leaves"))
    assert up_to_date(old) == {**wanted, "synthesis": {**wanted["synthesis"], "later": 1}}


def test_a_setting_that_is_gone_may_stand_in_an_older_recipe_only_where_it_did_nothing(tmp_path):
    gone = ("average", "float_weights", "terms.class_feature")
    old = to_dict(Recipe())
    old["calibration"] |= {"average": 0.0, "float_weights": 0.0}
    old["calibration"]["terms"]["class_feature"] = 0.0
    assert up_to_date(old) == to_dict(Recipe()) and recipe_from_dict(old) == Recipe()
    lines = "".join(f"{key} = 0.0\n" for key in gone)
    assert load_recipe(write(tmp_path / "old.toml", f"[calibration]\n{lines}")) == Recipe()
    for key in gone[:2]:
        assert f"unknown key {key!r}" in message_of("paper", f"calibration.{key}=0.25")
    old["calibration"]["average"] = 0.25
    assert up_to_date(old)["calibration"]["average"] == 0.25  # a run that had it is another run


@pytest.mark.parametrize("override", [5, None, {"synthesis": {"steps": 3}}])
def test_an_override_that_is_no_text_is_told(override):
    with pytest.raises(RecipeError, match="overrides: expected texts"):
        load_recipe("demo", override)


@pytest.mark.parametrize("text", ["", "synthesis.steps", "=3", "  = 3", "synthesis.steps:3"])
def test_a_malformed_override_is_shown_with_the_right_form(text):
    message = message_of("paper", text)
    assert repr(text) in message and "expected key=value" in message


def test_an_unknown_recipe_is_named_with_the_shipped_ones():
    message = message_of("papr")
    assert "unknown recipe 'papr'" in message and "Did you mean 'paper'?" in message and ".toml" in message
    assert all(name in message for name in shipped_recipes())


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "nowhere.toml"
    assert message_of(path) == f"cannot read recipe file {path}: No such file or directory"


def test_a_folder_is_not_a_recipe(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    assert "cannot read recipe file" in message_of(tmp_path / "folder.toml")


@pytest.mark.parametrize("text", ["[synthesis\nsteps = 1", "steps", "a = 1\na = 2", "lr = 1.2.3"])
def test_bad_toml_is_named_with_its_file_and_line(tmp_path, text):
    path = write(tmp_path / "bad.toml", f"{text}\n\n# the end\n")
    message = message_of(path)
    assert f"recipe {path} is not valid TOML" in message and "line" in message


def test_a_file_that_is_not_text_is_not_valid_toml(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\x80\x81\xff = 1\n")
    assert f"recipe {path} is not valid TOML" in message_of(path)


def test_a_comment_in_any_language_is_read_as_utf8(tmp_path):
    path = write(tmp_path / "a.toml", "# größer, 更多\n[synthesis]\nsteps = 9\n")
    assert load_recipe(path).synthesis.steps == 9


def test_recipes_that_extend_each_other_are_named_in_their_order(tmp_path):
    a, b = str(tmp_path / "a.toml"), str(tmp_path / "b.toml")
    write(Path(a), f"extends = '{b}'\n")
    write(Path(b), f"extends = '{a}'\n")
    message = message_of(a)
    assert "in a circle" in message and message.endswith(f": {a} -> {b} -> {a}")


def test_a_recipe_that_extends_itself_is_refused(tmp_path):
    path = tmp_path / "a.toml"
    write(path, f"extends = '{path}'\n")
    assert "in a circle" in message_of(path)


@pytest.mark.parametrize(("base", "expected"), [("'papr'", "'papr'"), ("'nowhere.toml'", "nowhere.toml"), ("3", "'3'")])
def test_extending_what_is_not_there_is_named(tmp_path, base, expected):
    assert expected in message_of(write(tmp_path / "a.toml", f"extends = {base}\n"))


# ---------------------------------------------------------------- what follows from a recipe


@pytest.mark.parametrize(
    ("epochs", "every", "wanted"),
    [
        (200, 30, [(0, 30), (30, 60), (60, 90), (90, 120), (120, 150), (150, 180), (180, 200)]),
        (60, 30, [(0, 30), (30, 60)]),
        (5, 2, [(0, 2), (2, 4), (4, 5)]),
        (3, 1, [(0, 1), (1, 2), (2, 3)]),
        (10, 0, [(0, 10)]),
        (10, 10, [(0, 10)]),
        (10, 99, [(0, 10)]),
        (1, 1, [(0, 1)]),
        (0, 30, [(0, 0)]),
        (0, 0, [(0, 0)]),
    ],
)
def test_rounds_cover_every_epoch_once_in_pieces_of_refresh_every(epochs, every, wanted):
    recipe = Recipe(calibration=Calibration(epochs=epochs), refresh=Refresh(every=every))
    assert recipe.rounds == [range(*x) for x in wanted]
    assert [epoch for piece in recipe.rounds for epoch in piece] == list(range(epochs))


def test_a_refresh_has_its_own_steps_and_lr_where_they_are_set():
    plain = load_recipe("paper", "synthesis.steps=20", "synthesis.lr=0.2")
    assert [plain.steps_in_round(n) for n in range(3)] == [20, 20, 20]
    assert [plain.lr_in_round(n) for n in range(3)] == [0.2, 0.2, 0.2]
    own = load_recipe("paper", "synthesis.steps=20", "synthesis.lr=0.2", "refresh.steps=5", "refresh.lr=0.05")
    assert [own.steps_in_round(n) for n in range(3)] == [20, 5, 5]
    assert [own.lr_in_round(n) for n in range(3)] == [0.2, 0.05, 0.05]


def test_describe_keys_covers_every_setting_once_with_its_meaning():
    described = list(describe_keys())
    keys = [key for key, _, _ in described]
    settings = {key: spec for key, spec, _ in fields_of(Recipe)}
    terms = {f"{s}.terms.{n}" for s in ("synthesis", "calibration") for n in getattr(Recipe(), s).terms}
    assert len(keys) == len(set(keys)) and set(keys) == set(settings) | terms
    for key, _, doc in described:
        if key in settings:
            assert doc.startswith(settings[key].metadata["doc"]) and len(doc) > 3
            assert all(choice in doc for choice in settings[key].metadata["choices"] or ())


def test_every_described_default_can_be_set_and_is_the_default():
    for key, default, _ in describe_keys():
        if default:
            assert load_recipe("paper", f"{key}={default}") == Recipe(), key
