"""Information: estimators on distributions with known answers; the paper's theorems, where they hold and where not."""

import itertools
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import VIT, VIT_ARGS, small_recipe, tiny_swin, tiny_vit
from safetensors.torch import save_file
from torch import Tensor

from maskaq.errors import RunFolderError
from maskaq.models import expose, geometry
from maskaq.models.taps import taps
from maskaq.progress import Progress
from maskaq.report import collect
from maskaq.report.information import (
    averaged_total_variation,
    binary_entropy,
    chance_information,
    cluster,
    delta_a,
    delta_r,
    delta_s,
    direct_bound,
    entropy,
    information,
    information_report,
    joint,
    mutual_information,
    pairs,
    phi,
    prediction_information,
    theorem_2_report,
    total_variation,
    vacuous_from,
)
from maskaq.runs.opened import write_report
from maskaq.runs.quantize import noise, quantize
from maskaq.storage.runfolder import RunFolder


def random_table(rng: np.random.Generator, *shape: int, sharpness: float = 1.0) -> Tensor:
    return torch.from_numpy(rng.dirichlet(np.full(math.prod(shape), sharpness)).reshape(shape))


def softmax_rows(n: int, classes: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return (scale * torch.randn(n, classes, generator=torch.Generator().manual_seed(seed))).softmax(1)


# --- distributions


def test_entropy_of_known_distributions():
    assert entropy(torch.full((8,), 1 / 8)) == pytest.approx(math.log(8))
    assert entropy(torch.tensor([1.0, 0.0, 0.0])) == 0
    assert entropy(torch.tensor([[0.5, 0.25], [0.25, 0.0]])) == pytest.approx(1.5 * math.log(2))


def test_information_of_independent_variables_is_zero_and_of_a_copy_is_its_entropy():
    a, b = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.1, 0.9])
    assert mutual_information(a[:, None] * b) == pytest.approx(0, abs=1e-7)
    assert mutual_information(torch.diag(a)) == pytest.approx(entropy(a))
    assert mutual_information(torch.eye(10) / 10) == pytest.approx(math.log(10))


@pytest.mark.parametrize("flip", [0.0, 0.01, 0.11, 0.3, 0.5])
def test_information_through_a_binary_symmetric_channel(flip):
    channel = torch.tensor([[1 - flip, flip], [flip, 1 - flip]], dtype=torch.float64) / 2
    assert mutual_information(channel) == pytest.approx(math.log(2) - binary_entropy(flip), abs=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.9])
def test_information_of_a_finely_cut_gaussian_pair_is_its_closed_form(rho):
    x = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    density = torch.exp(-(x[:, None] ** 2 - 2 * rho * x[:, None] * x + x**2) / (2 * (1 - rho**2)))
    assert mutual_information(density / density.sum()) == pytest.approx(-0.5 * math.log(1 - rho**2), abs=1e-6)


def test_total_variation_of_known_distributions():
    assert total_variation(torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])) == 0.5
    assert total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
    assert total_variation(torch.eye(3) / 3, torch.eye(3) / 3) == 0


def test_averaged_total_variation_is_the_loop_weighted_by_the_first():
    rng = np.random.default_rng(0)
    p, q = random_table(rng, 4, 5), random_table(rng, 4, 5)
    loop = sum(float(a.sum()) * total_variation(a / a.sum(), b / b.sum()) for a, b in zip(p, q, strict=True))
    assert averaged_total_variation(p, q) == pytest.approx(loop)
    p, q = torch.tensor([[0.25, 0.25], [0.5, 0.0], [0.0, 0.0]]), torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.5, 0.0]])
    assert averaged_total_variation(p, q) == 0.5 * 0.5 + 0.5 * 1  # the second has nothing to compare the 2nd row with


def test_joint_is_the_mean_of_the_outer_products_over_the_groups_that_occur():
    labels, probs = torch.tensor([7, 2, 7, 2, 2]), softmax_rows(5, 3)
    table = torch.zeros(2, 3, dtype=torch.float64)
    for label, row in zip(labels.tolist(), probs.double(), strict=True):
        table[[2, 7].index(label)] += row / 5
    torch.testing.assert_close(joint(labels, probs), table)
    assert len(pairs(labels, torch.tensor([0, 0, 1, 0, 1])).unique()) == 4


# --- estimates


def test_predictions_that_ignore_the_label_have_no_information_after_correction():
    rng, labels = np.random.default_rng(0), torch.arange(400) % 4
    hard = [information(labels, F.one_hot(torch.from_numpy(rng.integers(0, 4, 400)), 4)) for _ in range(300)]
    soft = [information(labels, torch.from_numpy(rng.dirichlet([0.3] * 4, 400))) for _ in range(300)]
    assert np.mean([e.plug_in for e in hard]) == pytest.approx(9 / 800, rel=0.1)
    assert 0 < np.mean([e.plug_in for e in soft]) < np.mean([e.plug_in for e in hard])
    for estimates in (hard, soft):
        assert np.mean([e.corrected for e in estimates]) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("m", [2, 10, 100])
def test_a_prediction_that_is_the_label_carries_log_m(m):
    labels = torch.arange(50 * m) % m
    got = information(labels, F.one_hot(labels))
    assert got.plug_in == pytest.approx(math.log(m))
    assert got.corrected == pytest.approx(math.log(m))


@pytest.mark.parametrize("flip", [0.05, 0.2, 0.5])
def test_samples_of_a_binary_symmetric_channel(flip):
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        a = rng.integers(0, 2, 200)
        b = torch.from_numpy(a ^ (rng.random(200) < flip))
        found.append(information(torch.from_numpy(a), F.one_hot(b, 2)))
    truth = math.log(2) - binary_entropy(flip)
    assert np.mean([e.corrected for e in found]) == pytest.approx(truth, abs=0.006)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_signs_of_a_gaussian_pair_are_a_symmetric_channel(rho):
    rng = np.random.default_rng(2)
    x, noise = rng.standard_normal((2, 40_000))
    a, b = (torch.from_numpy(v > 0) for v in (x, rho * x + math.sqrt(1 - rho**2) * noise))
    truth = math.log(2) - binary_entropy(math.acos(rho) / math.pi)
    assert information(a, F.one_hot(b.long(), 2)).corrected == pytest.approx(truth, abs=0.01)


@pytest.mark.parametrize("alpha", [[0.5] * 10, [1.0, 2.0, 3.0], [0.1] * 5])
def test_information_of_dirichlet_predictions_is_its_closed_form_even_for_few_samples(alpha):
    """H(mean) - E[H(row)], and E[H(row)] = psi(a0 + 1) - sum a/a0 psi(a + 1)."""
    rng, a = np.random.default_rng(3), torch.tensor(alpha, dtype=torch.float64)
    truth = entropy(a / a.sum()) - float((a.sum() + 1).digamma() - (a / a.sum() * (a + 1).digamma()).sum())
    assert prediction_information(torch.from_numpy(rng.dirichlet(alpha, 200_000))).plug_in == pytest.approx(
        truth, abs=3e-3
    )
    few = [prediction_information(torch.from_numpy(rng.dirichlet(alpha, 25))) for _ in range(2000)]
    lost = truth - np.mean([e.plug_in for e in few])
    left = truth - np.mean([e.corrected for e in few])
    assert lost > 0 and abs(left) < 0.3 * lost


def test_the_correction_of_soft_samples_takes_most_of_the_bias():
    """z drawn around the label: the truth from many images, the bias from 40."""

    def draw(n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.arange(n) % 4
        return labels, (1.5 * torch.from_numpy(rng.standard_normal((n, 4))) + 2 * F.one_hot(labels, 4)).softmax(1)

    rng = np.random.default_rng(4)
    truth = information(*draw(200_000, rng)).plug_in
    few = [information(*draw(40, rng)) for _ in range(500)]
    bias = np.mean([e.plug_in for e in few]) - truth
    assert bias > 0.02 and abs(np.mean([e.corrected for e in few]) - truth) < 0.3 * bias


def test_chance_is_near_zero_for_many_images_and_everything_for_one_image_per_label():
    labels = torch.arange(2000) % 5
    assert chance_information(labels, F.one_hot(labels)) == pytest.approx(16 / 4000, rel=0.4)
    labels = torch.arange(64)
    assert chance_information(labels, F.one_hot(labels)) == pytest.approx(math.log(64))


@pytest.mark.parametrize("seed", range(5))
def test_a_prediction_tells_no_more_about_the_label_than_about_the_image(seed):
    labels, probs = torch.arange(60) % 6, softmax_rows(60, 6, seed)
    assert information(labels, probs).plug_in <= prediction_information(probs).plug_in
    assert information(torch.arange(60), probs).plug_in == pytest.approx(prediction_information(probs).plug_in)


def test_estimates_do_not_depend_on_the_order_of_samples_or_the_names_of_labels():
    labels, probs = torch.arange(60) % 6, softmax_rows(60, 6)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    names = torch.tensor([12, 3, 40, 5, 0, 7])
    for other in (
        information(labels[order], probs[order]),
        information(names[labels], probs),
        information(labels, probs[:, [3, 1, 2, 0, 5, 4]]),
    ):
        assert other.plug_in == pytest.approx(information(labels, probs).plug_in)
        assert other.corrected == pytest.approx(information(labels, probs).corrected)


# --- clusters


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_well_separated_clusters_are_found(k):
    truth = torch.arange(20 * k) % k
    noise = torch.randn(20 * k, 6, generator=torch.Generator().manual_seed(k))
    centres = 30 * F.one_hot(torch.arange(k) % 6, 6) * (1 + torch.arange(k)[:, None] // 6)
    found = cluster(centres[truth] + noise, k)
    assert len(found.unique()) == k
    assert mutual_information(joint(found, F.one_hot(truth))) == pytest.approx(math.log(k), abs=1e-9)


def test_clusters_are_the_same_twice_and_follow_a_permutation_of_the_samples():
    features = torch.randn(300, 9, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    found = cluster(features, 7)
    assert torch.equal(found, cluster(features, 7))
    assert torch.equal(found[order], cluster(features[order], 7))
    assert set(found.tolist()) == set(range(7))


def test_every_sample_is_in_the_cluster_with_the_nearest_centre():
    features = torch.randn(200, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = cluster(features, 6)
    centres = torch.stack([features[found == i].mean(0) for i in range(6)])
    assert torch.equal(torch.cdist(features, centres).argmin(1), found)


def test_equal_samples_stay_together_and_give_no_more_clusters_than_values():
    features = torch.tensor([[1.0], [2.0], [1.0], [2.0], [5.0]])
    found = cluster(features, 4)
    assert torch.equal(found[:, None] == found, features == features.T)
    assert cluster(torch.zeros(5, 3), 4).tolist() == [0] * 5


@pytest.mark.parametrize(("features", "k"), [(torch.zeros(3, 2), 0), (torch.tensor([[math.nan], [0.0]]), 1)])
def test_clusters_that_cannot_be_are_refused(features, k):
    with pytest.raises(ValueError, match="finite"):
        cluster(features, k)


# --- phi


def test_phi_at_known_points():
    assert phi(0, 10) == 0
    assert phi(0.5, 2) == pytest.approx(math.log(2))
    assert phi(0.1, 2) == pytest.approx(binary_entropy(0.1))
    assert phi(0.25, 5) == pytest.approx(binary_entropy(0.25) + 0.25 * math.log(4))
    assert phi(0.9, 10) == phi(1, 10) == math.log(10)
    assert phi(0.3, 1) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1000, 10**6])
def test_phi_is_continuous_rising_concave_and_at_most_log_m(size):
    values = np.array([phi(e, size) for e in np.linspace(0, 1, 4001)])
    assert values[0] == 0 and values.max() <= math.log(size) + 1e-12
    assert (np.diff(values) >= -1e-12).all() and (np.diff(values, 2) <= 1e-9).all()
    assert np.diff(values).max() <= phi(1 / 4000, size) + 1e-12
    top = 1 - 1 / size
    assert phi(max(0, top - 1e-9), size) == pytest.approx(phi(top, size), abs=1e-6)


@pytest.mark.parametrize("eps", [-0.1, 1.1, math.nan])
def test_phi_refuses_what_is_no_distance(eps):
    with pytest.raises(ValueError):
        phi(eps, 3)


def test_entropies_differ_by_at_most_phi_and_by_no_less_in_the_worst_case():
    rng = np.random.default_rng(5)
    for m, sharpness in itertools.product((2, 3, 10, 50), (0.05, 0.3, 1.0)):
        for _ in range(100):
            p, q = (random_table(rng, m, sharpness=sharpness) for _ in range(2))
            assert abs(entropy(p) - entropy(q)) <= phi(min(1, total_variation(p, q)), m) + 1e-12
    for eps, m in itertools.product((0.05, 0.3, 0.5), (2, 4, 30)):
        one = F.one_hot(torch.tensor(0), m).double()
        rest = torch.full((m,), eps / (m - 1), dtype=torch.float64)
        rest[0] = 1 - eps
        assert total_variation(one, rest) == pytest.approx(eps)
        assert entropy(rest) - entropy(one) == pytest.approx(phi(eps, m))


# --- the theorems


def test_delta_r_is_the_sum_of_the_papers_terms_and_infinite_outside_the_theorem():
    z, y, a, e = 7, 5, 3, 0.2
    terms = phi(e, z) + 2 * phi(e, y) + phi(e, z * y) + phi(e, a) + phi(e, a * y)
    assert delta_r(e, z, y, a) == pytest.approx(terms) == pytest.approx(delta_s(e, z, y) + delta_a(e, a, y))
    assert delta_r(0, z, y, a) == 0 and delta_r(1e-9, z, y, a) < 1e-5
    assert delta_r(0.5, z, y, a) < math.inf and delta_r(0.5 + 1e-9, z, y, a) == math.inf


def twin_tables(seed: int) -> tuple[Tensor, Tensor]:
    """Tables (Z, Y, A) of P and Q with one p(y, a): Q is P, moved some way towards another."""
    rng = np.random.default_rng(seed)
    z, y, a = (int(v) for v in rng.integers(2, 7, 3))
    shared = random_table(rng, y, a, sharpness=rng.choice([0.1, 1.0]))
    p, other = (torch.from_numpy(rng.dirichlet(np.full(z, rng.choice([0.05, 1.0])), (y, a))) for _ in range(2))
    share = rng.choice([1e-3, 0.03, 0.2, 0.5, 1.0])
    q = (1 - share) * p + share * other
    return tuple((t * shared[..., None]).permute(2, 0, 1).contiguous() for t in (p, q))  # type: ignore[return-value]


def by_region(table: Tensor) -> Tensor:
    return table.flatten(0, 1).T


@pytest.mark.parametrize("seeds", [range(start, start + 250) for start in range(0, 1000, 250)])
def test_theorem_1_holds_and_so_does_the_direct_bound_that_needs_less(seeds):
    inside = 0
    for seed in seeds:
        p, q = twin_tables(seed)
        z, y, a = p.shape
        gap = abs(mutual_information(q.sum(2)) - mutual_information(p.sum(2)))
        eps_joint = averaged_total_variation(by_region(q), by_region(p))  # Eq. 19
        eps_conditional = averaged_total_variation(q.flatten(1), p.flatten(1))  # Eq. 20
        eps_direct = averaged_total_variation(q.sum(2).T, p.sum(2).T)
        eps = max(eps_joint, eps_conditional)
        assert eps_joint == pytest.approx(total_variation(q, p))  # as p(a) is shared
        assert eps_direct <= eps_joint + 1e-12  # a region variable can only enlarge eps
        assert gap <= delta_r(eps, z, y, a) + 1e-9
        assert gap <= delta_r(eps_joint, z, y, a) + 1e-9  # Eq. 20 is not needed
        assert gap <= direct_bound(eps_direct, z) + 1e-9
        assert direct_bound(eps_direct, z) <= delta_r(eps, z, y, a) + 1e-9
        inside += eps <= 0.5
    assert inside > 100


def test_conditional_entropy_continuity_needs_equal_frequencies_of_the_condition():
    fair, sure = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    p, q = (torch.stack([share * fair, (1 - share) * sure]) for share in (0.75, 0.25))
    assert averaged_total_variation(p, q) == 0 == averaged_total_variation(q, p)
    given = [entropy(table) - entropy(table.sum(1)) for table in (p, q)]  # H(u | a) = H(a, u) - H(a)
    assert given == pytest.approx([0.75 * math.log(2), 0.25 * math.log(2)])


def silent_and_telling(share: float) -> Tensor:
    """(Z, Y, A): in region 0, which `share` of the images have, z is the label; in region 1 it is a third value."""
    table = torch.zeros(3, 2, 2, dtype=torch.float64)
    table[0, 0, 0] = table[1, 1, 0] = share / 2
    table[2, :, 1] = (1 - share) / 2
    return table


def test_theorem_2_fails_where_regions_are_as_telling_but_not_as_frequent():
    """eps_s = 0 and xi = 0, so the paper's bound is 0; the informations differ by 0.8 log 2."""
    p, q = silent_and_telling(0.9), silent_and_telling(0.1)
    for first, second in ((p, q), (q, p)):
        assert averaged_total_variation(by_region(first), by_region(second)) == pytest.approx(0)  # Eq. 22
        assert averaged_total_variation(first.flatten(1), second.flatten(1)) == pytest.approx(0)  # Eq. 23
    assert mutual_information(p.sum(0)) == pytest.approx(0) == mutual_information(q.sum(0))  # Eq. 24
    assert delta_s(0, 3, 2) + delta_a(0, 2, 2) == 0
    gap = mutual_information(p.sum(2)) - mutual_information(q.sum(2))
    assert gap == pytest.approx(0.8 * math.log(2))
    delta = total_variation(p.sum((0, 1)), q.sum((0, 1)))  # what the theorem would have to ask for as well
    assert gap <= delta_s(delta, 3, 2)


def test_theorem_2_holds_with_the_distance_of_region_frequencies_added():
    for seed in range(300):
        p, q = twin_tables(seed)
        z, y, a = p.shape
        q = q / q.sum((0, 1)).clamp(min=1e-300) * random_table(np.random.default_rng(seed), a)
        q = q / q.sum()
        eps = averaged_total_variation(by_region(q), by_region(p)) + total_variation(q.sum((0, 1)), p.sum((0, 1)))
        gap = abs(mutual_information(q.sum(2)) - mutual_information(p.sum(2)))
        assert gap <= delta_s(min(1, eps), z, y) + 1e-9


@pytest.mark.parametrize(("m", "theorem", "direct"), [(10, 0.057, 0.262), (100, 0.089, 0.359), (1000, 0.107, 0.402)])
def test_where_the_bounds_stop_saying_anything(m, theorem, direct):
    """The table in docs/METHOD.md: m classes, 8 regions."""
    assert vacuous_from(lambda e: delta_r(e, m, m, 8), math.log(m)) == pytest.approx(theorem, abs=5e-4)
    assert vacuous_from(lambda e: direct_bound(e, m), math.log(m)) == pytest.approx(direct, abs=5e-4)


# --- the report


def report_inputs(n: int = 240, classes: int = 6, change: float = 0.05, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    logits = torch.randn(n, classes, generator=g) + 5 * F.one_hot(labels, classes)
    moved = logits + change * torch.randn(n, classes, generator=g)
    return logits.softmax(1), moved.softmax(1), labels, torch.randn(n, 16, generator=g)


@pytest.mark.parametrize(("seed", "change"), itertools.product(range(5), (0.01, 0.3, 3.0)))
def test_the_reported_gap_is_within_the_reported_bounds(seed, change):
    report = information_report(*report_inputs(seed=seed, change=change))
    value = {name: figure.value for name, figure in report.items()}
    assert value["gap"] <= value["direct_bound"]
    assert value["theorem_1"] is None or value["direct_bound"] <= value["theorem_1"]
    assert value["eps_direct"] <= value["eps_joint"] <= value["eps_image"] + 1e-12
    assert value["eps"] == max(value["eps_joint"], value["eps_conditional"])
    assert value["teacher_information"] == pytest.approx(
        information(*reversed(report_inputs(seed=seed)[:3:2])).corrected
    )


def test_the_reported_distances_are_those_of_the_whole_tables():
    p, q, labels, features = report_inputs(change=1.0)
    report, a = information_report(p, q, labels, features, regions=4), cluster(features, 4)

    def table(probs: Tensor) -> Tensor:
        spots = F.one_hot(labels)[:, None, :, None] * F.one_hot(a)[:, None, None, :]
        return (probs.double()[:, :, None, None] * spots).mean(0)

    p_table, q_table = table(p), table(q)
    assert report["eps_joint"].value == pytest.approx(averaged_total_variation(by_region(q_table), by_region(p_table)))
    assert report["eps_conditional"].value == pytest.approx(
        averaged_total_variation(q_table.flatten(1), p_table.flatten(1))
    )


def test_a_student_that_is_its_teacher_loses_nothing():
    p, _, labels, features = report_inputs()
    report = information_report(p, p, labels, features)
    for name in ("gap", "eps", "eps_image", "theorem_1", "direct_bound"):
        assert report[name].value == 0
    assert report["student_information"].value == report["teacher_information"].value


def test_the_report_does_not_depend_on_the_order_of_images():
    inputs = report_inputs(change=1.0)
    order = torch.randperm(240, generator=torch.Generator().manual_seed(1))
    one, other = information_report(*inputs), information_report(*(x[order] for x in inputs))
    for name in one:
        assert one[name].value == pytest.approx(other[name].value)


def test_the_report_says_where_it_says_nothing():
    p, _, labels, features = report_inputs()
    report = information_report(p, p.roll(1, dims=1), labels, features)
    assert report["eps"].value > 0.5 and report["theorem_1"].value is None
    assert "says nothing" in report["theorem_1"].meaning and "says nothing" in report["direct_bound"].meaning
    never = information_report(F.one_hot(labels).float(), F.one_hot((labels + 1) % 6).float(), labels, features)
    assert never["eps"].value == 1 and never["gap"].value == pytest.approx(0)  # all is wrong, and nothing is lost
    report = information_report(*report_inputs(change=2.0))
    assert "says nothing" in report["theorem_1"].meaning and "says nothing" not in report["direct_bound"].meaning
    assert "real images" in report["summary"].meaning and "too few" not in report["summary"].meaning
    assert "too few" in information_report(*report_inputs(n=30, classes=30))["summary"].meaning
    assert all(figure.meaning.endswith(".") for figure in report.values())


def test_without_labels_what_needs_them_has_no_value_and_the_rest_is_never_larger():
    p, q, labels, features = report_inputs(change=1.0)
    known, unknown = information_report(p, q, labels, features), information_report(p, q, None, features)
    for name in ("teacher_information", "student_information", "theorem_1"):
        assert unknown[name].value is None and "needs labels" in unknown[name].meaning
    for name in ("images", "eps_image", "teacher_input_information", "student_input_information"):
        assert unknown[name].value == known[name].value
    a = cluster(features, 8)
    parts = [(a == k) for k in a.unique()]  # p(a) times the distance of the mean predictions of a
    each = [
        0.5 * float((p[k].double().mean(0) - q[k].double().mean(0)).abs().sum()) * len(p[k]) / len(p) for k in parts
    ]
    assert unknown["eps_joint"].value == pytest.approx(sum(each), rel=1e-5)
    assert unknown["eps_joint"].value <= known["eps_joint"].value
    assert information_report(p, p, None, features)["eps_joint"].value == 0


def test_what_is_no_set_of_predictions_is_refused():
    p, q, labels, features = report_inputs()
    for wrong in (p[:5], p * 2, -p, p * math.nan, p[0]):
        with pytest.raises(ValueError):
            information_report(wrong, q, labels, features)
    with pytest.raises(ValueError, match="same images"):
        information_report(p, q, labels, features[:5])


# --- synthetic against real images, and what regions and labels are measured on


def loop_averaged_variation(p: dict, q: dict) -> float:
    """sum over a of p(a) D_TV(p(. | a), q(. | a)) of tables {(a, u): probability}."""
    total = 0.0
    for a in {key[0] for key in p}:
        p_a, q_a = (sum(value for key, value in table.items() if key[0] == a) for table in (p, q))
        if p_a:
            others = {key[1] for key in (*p, *q) if key[0] == a}
            gaps = [abs(p.get((a, u), 0) / p_a - (q.get((a, u), 0) / q_a if q_a else 0)) for u in others]
            total += p_a * (sum(gaps) / 2 if q_a else 1.0)
    return total


def test_theorem_2_is_measured_from_the_tables_of_synthetic_and_real_images():
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(n, 3, generator=generator, dtype=torch.float64).softmax(dim=1) for n in (12, 10))
    y_s, y_r = torch.arange(12) % 4, torch.arange(10) % 3  # class 3 has no real image
    f_s, f_r = (torch.randn(n, 2, generator=generator) + 5 * (torch.arange(n) % 2)[:, None] for n in (12, 10))
    report = theorem_2_report(q, y_s, f_s, p, y_r, f_r, regions=2)
    keep = y_s < 3
    a = cluster(torch.cat([f_s[keep], f_r]), 2)
    a_s, a_r = a[: int(keep.sum())].tolist(), a[int(keep.sum()) :].tolist()

    def tables(rows, labels, regions):
        by_region, by_output = {}, {}
        for row, y, a in zip(rows.tolist(), labels.tolist(), regions, strict=True):
            for z, share in enumerate(row):
                by_region[a, (y, z)] = by_region.get((a, (y, z)), 0) + share / len(rows)
                by_output[z, (a, y)] = by_output.get((z, (a, y)), 0) + share / len(rows)
        return by_region, by_output

    (q_a, q_z), (p_a, p_z) = tables(q[keep], y_s[keep], a_s), tables(p, y_r, a_r)
    assert report["eps_s_joint"].value == pytest.approx(loop_averaged_variation(q_a, p_a))
    assert report["eps_s_conditional"].value == pytest.approx(loop_averaged_variation(q_z, p_z))
    assert report["eps_s"].value == max(report["eps_s_joint"].value, report["eps_s_conditional"].value)
    shares = [sum(found.count(r) / len(found) * sign for found, sign in ((a_s, 1), (a_r, -1))) for r in (0, 1)]
    assert report["region_frequencies"].value == pytest.approx(sum(map(abs, shares)) / 2)
    one_hot = [F.one_hot(torch.tensor(found), 2) for found in (a_s, a_r)]
    xi = information(y_s[keep], one_hot[0]).plug_in - information(y_r, one_hot[1]).plug_in
    assert report["xi"].value == pytest.approx(abs(xi))
    assert report["theorem_2_images"].value == 9 + 10


def test_equal_images_have_no_distance_and_no_common_label_is_told():
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.8, 0.2], [0.1, 0.9]])
    y, features = torch.tensor([0, 1, 0, 1]), torch.tensor([[0.0], [9.0], [0.1], [9.1]])
    same = theorem_2_report(p, y, features, p, y, features, regions=2)
    for name in ("eps_s", "xi", "region_frequencies", "synthetic_gap", "theorem_2"):
        assert same[name].value == pytest.approx(0, abs=1e-12)
    none = theorem_2_report(p, y, features, p, y + 2, features)
    assert list(none) == ["theorem_2_images"] and none["theorem_2_images"].value is None


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_region_features_are_the_mean_head_outputs_of_the_k_ir_most_attended_patches(build):
    recipe = small_recipe("synthesis.mask.region=0.25")
    teacher = expose(build())
    images = noise(teacher, 3, seed=0)
    seen = collect.look(teacher, [images], Progress(), recipe)
    last = geometry(teacher).layers[-1]
    with torch.no_grad(), taps(teacher, "heads") as taken:
        teacher(images)
        heads = last.raster_heads(taken["heads"][-1])
    rows = [
        alpha
        for layer, alpha in zip(geometry(teacher).layers, seen.received["scores"], strict=True)
        if layer.grid == last.grid
    ]
    for b in range(3):
        alpha = [sum(row[b, n].item() for row in rows) for n in range(heads.shape[1])]
        chosen = sorted(range(len(alpha)), key=lambda n: -alpha[n])[: round(0.25 * len(alpha))]
        wanted = torch.stack([heads[b, n] for n in chosen]).mean(dim=0)
        torch.testing.assert_close(seen.regions[b], wanted, rtol=1e-4, atol=1e-5)


def test_images_per_label_are_all_images_of_the_first_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "SAMPLED", 6)
    recipe = small_recipe("synthesis.images=12", "refresh.every=0", "calibration.epochs=1")
    quantize(tiny_vit(), recipe, tmp_path / "run", report=False)
    run = RunFolder.read(tmp_path / "run")
    found = collect.images_per_label(run, recipe, classes=4)
    assert found.labels.bincount().tolist() == [3, 3] and sorted(found.indices.tolist()) == [0, 1, 4, 5, 8, 9]
    assert collect.images_per_label(run, recipe, classes=12) is None  # one image each tells nothing


def test_a_report_takes_real_images_for_theorem_2_and_keeps_what_it_found(tmp_path):
    pytest.importorskip("jinja2")
    recipe = small_recipe("synthesis.images=8", "refresh.every=0", "calibration.epochs=1")
    source = {"name": VIT, "args": VIT_ARGS, "checkpoint": str(tmp_path / "weights.safetensors")}
    model = tiny_vit()
    save_file(model.state_dict(), source["checkpoint"])
    quantize(model, recipe, tmp_path / "run", source=source)
    labelled = [(noise(expose(model), 8, seed=3), torch.arange(8) % 4)]
    write_report(tmp_path / "run", device="cpu", real=lambda model: labelled)
    kept = collect.read(RunFolder.read(tmp_path / "run")).facts["information"]
    assert 0 <= kept["eps s"]["value"] <= 1 and kept["xi"]["value"] >= 0
    assert "Eq. 22" in (tmp_path / "run/report.html").read_text()
    shutil.rmtree(tmp_path / "run/images")  # as `maskaq compare` does with those of its rows
    with pytest.raises(RunFolderError, match="--keep-images"):
        write_report(tmp_path / "run", device="cpu", real=lambda model: labelled)
