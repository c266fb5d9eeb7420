"""The paper's information-bottleneck analysis (Sec. 2.4, Eqs. 17-25) as a measurement. Pure functions; all in nats.

The paper's variables, and what stands for them here, on n synthetic images x with p(x) = 1/n:

    y         the task target: the label an image was made for
    z_p, z_q  the "discrete prediction output" of P and Q: a class drawn from the model's softmax, p(z | x). For the
              predicted class itself, give one-hot rows: every function here takes either
    a         the informative-region variable, "supported on a finite alphabet": the cluster that the image's region
              features fall in. P picks the region, once, and both models are judged by it: p(a, y) is shared

So a model is the table p(z, y, a) = (1/n) sum_i p(z | x_i) [y_i = y] [a_i = a], and everything is computed from two
such tables. Approximated are the distribution of images, by n of them; a, which is coarser than the region itself (a
finer a never makes the distance of Eq. 19 smaller); and real images (a_r, z^r), by synthetic ones: of Theorem 2, which
compares the two, only I(a_s; y) can be known without real images; `theorem_2_report` takes some.

Plug-in estimates of information are too large when there are few samples. `corrected` takes off the bias that the delta
method gives: the entropy of a mean p of n rows w falls short by sum_c Var(w_c) / (2 n p_c), which for one-hot rows is
Miller and Madow's (cells - 1) / (2 n). It is the first-order term, and too small where a label has fewer images than
its predictions have classes to spread over: `chance_information`, the plug-in estimate with the labels shuffled, shows
how much of a figure may be bias.

Two things the paper's statement hides, from which `direct_bound` follows (docs/METHOD.md, section 5). As p(a) is
shared, the averaged distance given a is the distance of the tables themselves, so Eq. 19 alone implies Theorem 1 and
Eq. 20 is not needed. And as p(y) is shared, |I(z_q; y) - I(z_p; y)| <= 2 phi(eps; |Z|), without any region variable.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from maskaq import randomness

# --- distributions


def entropy(p: Tensor) -> float:
    """H = -sum p log p of a whole table of probabilities, with 0 log 0 = 0."""
    return float(torch.special.entr(p.double()).sum())


def mutual_information(joint: Tensor) -> float:
    """I(a; b) = H(a) + H(b) - H(a, b) of a table (A, B) of probabilities."""
    return entropy(joint.double().sum(1)) + entropy(joint.double().sum(0)) - entropy(joint)


def total_variation(p: Tensor, q: Tensor) -> float:
    """D_TV = 1/2 sum |p - q| of two tables of one shape; at most 1, whatever rounding says."""
    return min(1.0, 0.5 * float((p.double() - q.double()).abs().sum()))


def averaged_total_variation(p: Tensor, q: Tensor) -> float:
    """sum_a p(a) D_TV(p(u | a), q(u | a)) of two tables (A, U): the paper's "averaged conditional TV".

    The weights are the first table's, as in the paper. Where only the first knows an a, the distance is 1, the largest.
    """
    p, q = p.double(), q.double()
    p_a, q_a = p.sum(1), q.sum(1)
    distance = 0.5 * (p / p_a[:, None] - q / q_a[:, None]).abs().sum(1)
    return float((p_a * torch.where(q_a > 0, distance, 1.0))[p_a > 0].sum())


def joint(groups: Tensor, probs: Tensor) -> Tensor:
    """(n,) groups and (n, C) rows p(z | x) -> the table p(g, z) over the groups that occur, in their order."""
    values, place = groups.cpu().unique(return_inverse=True)
    rows = probs.detach().cpu().double()
    return torch.zeros(len(values), rows.shape[1], dtype=torch.float64).index_add_(0, place, rows) / len(rows)


def pairs(a: Tensor, b: Tensor) -> Tensor:
    """(n,) and (n,) -> (n,): one number for each pair that occurs."""
    return torch.stack([a.cpu(), b.cpu()], dim=1).unique(dim=0, return_inverse=True)[1]


# --- estimates from samples


@dataclass(frozen=True)
class Estimate:
    """An information estimated from n samples."""

    plug_in: float
    """Of the empirical distribution: too large when there are few samples."""
    corrected: float
    """Less its first-order bias. A little below 0 or above log M is chance."""
    n: int


def information(labels: Tensor, probs: Tensor) -> Estimate:
    """I(z; y) = H(z) - H(z | y) of labels (n,) and rows p(z | x) (n, C), softmax or one-hot.

    Labels are dealt out, not drawn: p(y) is known, and what varies are the rows of one label.
    """
    rows = probs.detach().cpu().double()
    n = len(probs)
    table = joint(labels, rows)
    squares = joint(labels, rows.square())
    p_y = table.sum(1, keepdim=True)
    p_z = table.sum(0)
    spread = (squares - table.square() / p_y).clamp(min=0)  # p(y) Var(z | y), from all n_y rows of a label;
    spread = spread * p_y / (p_y - 1 / n).clamp(min=1 / n)  # from n_y - 1, as their mean is theirs too
    plug_in = mutual_information(table)
    lost = _ratio(spread.sum(0), p_z) - _ratio(spread, table)
    return Estimate(plug_in, plug_in + lost / (2 * n), n)


def prediction_information(probs: Tensor) -> Estimate:
    """I(x; z) = H(mean row) - mean H(row): what a prediction tells about its image (Eq. 17). At most log n."""
    rows = probs.detach().cpu().double()
    n = len(probs)
    plug_in = entropy(rows.mean(0)) - entropy(rows) / n
    return Estimate(plug_in, plug_in + _ratio(rows.var(0, correction=0), rows.mean(0)) / (2 * n), n)


def chance_information(labels: Tensor, probs: Tensor, seed: int = 0, draws: int = 5) -> float:
    """The plug-in I(z; y) with shuffled labels, mean of some draws: the value for independent variables."""
    orders = [randomness.permutation(seed, draw, len(labels)) for draw in range(draws)]
    return sum(mutual_information(joint(labels.cpu()[order], probs)) for order in orders) / draws


def _ratio(part: Tensor, whole: Tensor) -> float:
    """sum of part / whole, where there is a whole."""
    return float((part / whole)[whole > 0].sum())


# --- the informative-region variable


def cluster(features: Tensor, k: int, seed: int = 0, starts: int = 8, steps: int = 100) -> Tensor:
    """(n, d) -> (n,) cluster numbers below k: k-means, the best of some k-means++ starts.

    It runs on the distinct rows in sorted order, so the order of the samples does not matter, equal rows stay together
    and no more clusters come out than there are distinct rows.
    """
    rows, place, counts = features.detach().cpu().double().unique(dim=0, return_inverse=True, return_counts=True)
    if k < 1 or not rows.isfinite().all():
        raise ValueError(f"clusters are of finite features and at least one: got k = {k}")
    weights = counts.double()
    draws = randomness.uniform(
        randomness.fold(randomness.image_keys(seed, torch.arange(starts)), "cluster"), k
    ).double()
    best = torch.zeros(len(rows), dtype=torch.int64)
    least = math.inf
    for draw in draws:
        centres = _spread(rows, weights, min(k, len(rows)), draw)
        nearest = _distances(rows, centres).argmin(1)
        for _ in range(steps):
            mass = torch.zeros(len(centres), dtype=torch.float64).index_add_(0, nearest, weights)
            sums = torch.zeros_like(centres).index_add_(0, nearest, rows * weights[:, None])
            centres = torch.where(mass[:, None] > 0, sums / mass[:, None], centres)  # an empty one stays
            before = nearest
            nearest = _distances(rows, centres).argmin(1)
            if torch.equal(before, nearest):
                break
        cost = float((weights * (rows - centres[nearest]).square().sum(1)).sum())
        if cost < least * (1 - 1e-12):
            best, least = nearest, cost
    return best.unique(return_inverse=True)[1][place]


def _spread(rows: Tensor, weights: Tensor, k: int, draws: Tensor) -> Tensor:
    """k-means++: each centre is drawn with probability proportional to the squared distance from those before."""
    chosen: list[int] = []
    distance = torch.ones_like(weights)
    for draw in draws[:k]:
        mass = (weights * distance).cumsum(0)
        chosen.append(min(int(torch.searchsorted(mass, draw * mass[-1], right=True)), len(rows) - 1))
        distance = _distances(rows, rows[chosen]).amin(1)
    return rows[chosen]


def _distances(rows: Tensor, centres: Tensor) -> Tensor:
    return torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist").square()


# --- the theorems' bounds


def phi(eps: float, size: int) -> float:
    """phi(eps; M) = h2(eps) + eps log(M - 1): how far the entropies of two distributions over M values at distance eps
    lie apart at most (entropy continuity, the paper's first lemma).

    The formula rises up to eps = 1 - 1/M, where it is log M, and no two entropies differ by more. There it is held: so
    phi is a true bound, rising and concave, for every eps; and phi(eps; 1) = 0, where the formula has log 0.
    """
    if not 0 <= eps <= 1 or size < 1:
        raise ValueError(f"phi(eps; M) is for 0 <= eps <= 1 and M >= 1: got {eps} and {size}")
    if eps >= 1 - 1 / size:
        return math.log(size)
    return binary_entropy(eps) + (eps * math.log(size - 1) if eps else 0.0)


def binary_entropy(p: float) -> float:
    """h2(p) = -p log p - (1 - p) log(1 - p)."""
    return entropy(torch.tensor([p, 1 - p], dtype=torch.float64))


def delta_s(eps: float, outputs: int, labels: int) -> float:
    """phi(eps; |Z|) + phi(eps; |Y|) + phi(eps; |Z||Y|): for |I(z_q; y | a) - I(z_p; y | a)|."""
    return phi(eps, outputs) + phi(eps, labels) + phi(eps, outputs * labels)


def delta_a(eps: float, regions: int, labels: int) -> float:
    """phi(eps; |A|) + phi(eps; |Y|) + phi(eps; |A||Y|): for |I(a; y | z_q) - I(a; y | z_p)|."""
    return phi(eps, regions) + phi(eps, labels) + phi(eps, regions * labels)


def delta_r(eps: float, outputs: int, labels: int, regions: int) -> float:
    """Theorem 1's bound on |I(z_q; y) - I(z_p; y)|; infinite for eps > 1/2, where the theorem says nothing.

    Theorem 2's is the same sum plus xi. That theorem is not true as it stands (docs/METHOD.md, section 5).
    """
    return delta_s(eps, outputs, labels) + delta_a(eps, regions, labels) if eps <= 0.5 else math.inf


def direct_bound(eps: float, outputs: int) -> float:
    """2 phi(eps; |Z|) >= |I(z_q; y) - I(z_p; y)| for eps = averaged distance of z given y, and p(y) shared.

    I(z; y) = H(z) - H(z | y); each part moves by at most phi(eps; |Z|), the second as phi is concave. It holds for
    every eps, needs no region variable, and is at most Theorem 1's bound for the same eps.
    """
    return 2 * phi(eps, outputs)


def vacuous_from(bound: Callable[[float], float], limit: float) -> float:
    """The eps from which a rising bound is no better than a limit that always holds, to 1e-6."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if bound(middle) < limit else (low, middle)
    return high


# --- the report


@dataclass(frozen=True)
class Figure:
    """A number with a plain sentence; None where there is none to give, and the sentence says why."""

    value: float | None
    meaning: str


def information_report(
    teacher_probs: Tensor,
    student_probs: Tensor,
    labels: Tensor | None,
    region_features: Tensor,
    regions: int = 8,
    seed: int = 0,
) -> dict[str, Figure]:
    """Everything above on n images: softmax outputs (n, C) of P and Q, labels (n,), features (n, d) of P's informative
    regions, clustered into at most `regions` groups.

    Without labels (None) what is about y has no value and says so; the distances are then of predictions and regions
    alone, and never larger than with labels.
    """
    n = len(region_features) if labels is None else len(labels)
    p, q = _rows(teacher_probs, n), _rows(student_probs, n)
    if p.shape != q.shape or len(region_features) != n:
        raise ValueError("teacher, student and region features describe the same images and classes")
    classes = p.shape[1]
    a = cluster(region_features, regions, seed)
    if labels is None:
        return _unlabelled(p, q, a)
    sizes = (classes, len(labels.unique()), len(a.unique()))

    teacher, student, region = (information(labels, rows) for rows in (p, q, F.one_hot(a)))
    chances = [chance_information(labels, rows, seed) for rows in (p, q, F.one_hot(a))]
    x_teacher, x_student = prediction_information(p), prediction_information(q)
    gap = abs(student.plug_in - teacher.plug_in)
    limit = math.log(min(sizes[0], sizes[1]))

    p_joint, q_joint = joint(pairs(labels, a), p), joint(pairs(labels, a), q)
    eps_joint = total_variation(q_joint, p_joint)  # = averaged over a (Eq. 19), as P and Q share p(a)
    eps_conditional = averaged_total_variation(q_joint.T, p_joint.T)  # Eq. 20
    eps = max(eps_joint, eps_conditional)
    eps_direct = total_variation(joint(labels, q), joint(labels, p))
    eps_image = 0.5 * float((p - q).abs().sum()) / n
    bound = delta_r(eps, *sizes)
    direct = direct_bound(eps_direct, classes)
    useful = vacuous_from(lambda e: delta_r(e, *sizes), limit)

    def estimated(what: str, value: Estimate, chance: float) -> Figure:
        text = f"{what}, in nats; corrected for bias, {value.plug_in:.3f} before, on {n} images."
        return Figure(value.corrected, f"{text} Shuffled labels give {chance:.3f} before correction.")

    def bounded(what: str, value: float) -> str:
        if value < limit:
            return what
        return f"{what} It says nothing here: no two such informations differ by more than {limit:.3f}."

    if math.isinf(bound):
        theorem = Figure(None, f"Theorem 1 asks for eps of at most 1/2, and it is {eps:.3f}: the theorem says nothing.")
    else:
        what = f"Delta_r(eps), Theorem 1's upper bound on the gap. Only below eps = {useful:.4f} could it say anything."
        theorem = Figure(bound, bounded(what, bound))
    warning = " There are too few images to tell information from chance." if chances[0] > 0.5 * teacher.plug_in else ""
    summary = (
        f"On these {n} synthetic images the quantized model's predictions carry {student.corrected:.3f} nats about the "
        f"label, the full-precision model's {teacher.corrected:.3f}: plug-in estimates, corrected to first order."
        f"{warning} The bounds limit the gap on these very images, where it is measured too and no larger. Nothing "
        "here is about real images, nor about being right: classes that are always confused lose no information. "
        "Regions are clusters, coarser than the regions themselves; finer ones can raise eps_joint, up to "
        f"{eps_image:.3f}."
    )
    return {
        "summary": Figure(None, summary),
        "images": Figure(n, f"Images measured on, with {sizes[1]} different labels, in {sizes[2]} region clusters."),
        "limit": Figure(limit, "log of the number of classes or labels, whichever is smaller: no I(z; y) is larger."),
        "teacher_information": estimated("I(z_p; y): what P's prediction tells about the label", teacher, chances[0]),
        "student_information": estimated("I(z_q; y): what Q's prediction tells about the label", student, chances[1]),
        "gap": Figure(gap, "|I(z_q; y) - I(z_p; y)|, plug-in: part of the bias cancels, and the bounds are for it."),
        "region_information": estimated(
            "I(a_s; y): what the region tells about the label (Theorem 2)", region, chances[2]
        ),
        "teacher_input_information": Figure(
            x_teacher.corrected, "I(x; z_p): what P's prediction tells about which image it is for, corrected."
        ),
        "student_input_information": Figure(
            x_student.corrected, "I(x; z_q), the same of Q. The paper expects it not to exceed P's (Eq. 17)."
        ),
        "eps_joint": Figure(
            eps_joint, "Averaged total variation of P's and Q's (prediction, label) given the region (Eq. 19); 0 to 1."
        ),
        "eps_conditional": Figure(
            eps_conditional, "The same of (region, label) given the prediction (Eq. 20), averaged over Q's predictions."
        ),
        "eps": Figure(eps, "The larger of both: Theorem 1's eps_r, measured on synthetic images."),
        "theorem_1": theorem,
        "eps_direct": Figure(eps_direct, "Averaged total variation of P's and Q's prediction given the label alone."),
        "direct_bound": Figure(
            direct, bounded("2 phi(eps_direct; C): an upper bound on the gap that needs no region variable.", direct)
        ),
        "eps_image": Figure(
            eps_image,
            "Mean total variation of P's and Q's prediction per image: eps_joint if each image were a region.",
        ),
    }


def theorem_2_report(
    student_probs: Tensor,
    labels: Tensor,
    region_features: Tensor,
    real_probs: Tensor,
    real_labels: Tensor,
    real_features: Tensor,
    regions: int = 8,
    seed: int = 0,
) -> dict[str, Figure]:
    """What Theorem 2 compares (Eqs. 22-25): Q on synthetic images with P on real ones, of the labels that both have.

    The regions of both are clustered together, so that a_s and a_r have one alphabet. `delta`, the distance of their
    frequencies, is what the theorem leaves out and needs (docs/METHOD.md, section 5).
    """
    common = [label for label in labels.unique().tolist() if label in set(real_labels.tolist())]
    ours, real = (torch.isin(found, torch.tensor(common)) for found in (labels, real_labels))
    n, m = int(ours.sum()), int(real.sum())
    if not common:
        return {"theorem_2_images": Figure(None, "Theorem 2 needs labels that synthetic and real images share: none.")}
    q, p = _rows(student_probs[ours], n), _rows(real_probs[real], m)
    y_s, y_r = (torch.bucketize(found, torch.tensor(common)) for found in (labels[ours], real_labels[real]))
    a = cluster(torch.cat([region_features[ours], real_features[real]]), regions, seed)
    a_s, a_r = a[:n], a[n:]
    sizes = (q.shape[1], len(common), int(a.max()) + 1)

    def table(regions: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        """p(a, y, z), (A, Y, Z)."""
        flat = torch.zeros(sizes[2] * sizes[1], sizes[0], dtype=torch.float64)
        return (flat.index_add_(0, regions * sizes[1] + labels, rows) / len(rows)).unflatten(0, (sizes[2], sizes[1]))

    q_table, p_table = table(a_s, y_s, q), table(a_r, y_r, p)
    eps_joint = averaged_total_variation(q_table.flatten(1), p_table.flatten(1))
    eps_conditional = averaged_total_variation(*(t.movedim(2, 0).flatten(1) for t in (q_table, p_table)))
    eps = max(eps_joint, eps_conditional)
    delta = total_variation(q_table.sum(dim=(1, 2)), p_table.sum(dim=(1, 2)))
    region_s, region_r = (information(y, F.one_hot(found)) for y, found in ((y_s, a_s), (y_r, a_r)))
    xi = abs(region_s.plug_in - region_r.plug_in)
    z_s, z_r = information(y_s, q), information(y_r, p)
    gap = abs(z_s.plug_in - z_r.plug_in)
    bound = delta_s(eps, *sizes[:2]) + xi + delta_a(eps, sizes[2], sizes[1]) if eps <= 0.5 else math.inf
    limit = math.log(min(sizes[:2]))
    what = "Delta_s + xi + Delta_a (Eq. 25), the upper bound that Theorem 2 gives for the gap"
    if math.isinf(bound):
        figure = Figure(None, f"{what}: it asks for eps_s of at most 1/2, and it is {eps:.3f}.")
    else:
        figure = Figure(
            bound, f"{what}; no two differ by more than {limit:.3f}, and the theorem is not true as it stands."
        )
    per_label = min(n, m) / len(common)
    about = f"Theorem 2 on {n} synthetic and {m} real images of {len(common)} labels that both have"
    if per_label < 2:
        about += ": fewer than two images per label in one of them, so information about labels is mostly chance"
    return {
        "theorem_2_images": Figure(n + m, f"{about}."),
        "eps_s_joint": Figure(
            eps_joint, "Averaged total variation of (prediction, label) given the region, Q synthetic, P real (Eq. 22)."
        ),
        "eps_s_conditional": Figure(
            eps_conditional, "The same of (region, label) given the prediction (Eq. 23), averaged over Q's predictions."
        ),
        "eps_s": Figure(eps, "The larger of both."),
        "xi": Figure(
            xi,
            f"|I(a_s; y) - I(a_r; y)| (Eq. 24), plug-in: {region_s.plug_in:.3f} and {region_r.plug_in:.3f}.",
        ),
        "region_frequencies": Figure(delta, "Total variation of p(a_s) and p(a_r), which the theorem needs and omits."),
        "synthetic_gap": Figure(
            gap, f"|I(z_q^s; y) - I(z_p^r; y)|, plug-in: {z_s.plug_in:.3f} and {z_r.plug_in:.3f}: what it bounds."
        ),
        "theorem_2": figure,
    }


def _unlabelled(p: Tensor, q: Tensor, a: Tensor) -> dict[str, Figure]:
    """The same report of images without labels."""
    n = len(p)
    unknown = "needs labels, and these images have none."
    p_joint, q_joint = joint(a, p), joint(a, q)
    x_teacher, x_student = prediction_information(p), prediction_information(q)
    eps_image = 0.5 * float((p - q).abs().sum()) / n
    summary = (
        f"These {n} images have no labels, so nothing can be said of what a prediction tells about the label, nor of "
        "the gap that Theorem 1 bounds: its eps is of predictions together with labels. What is left compares P's and "
        "Q's predictions on these very images. It says nothing about being right."
    )
    return {
        "summary": Figure(None, summary),
        "images": Figure(n, f"Images measured on, without labels, in {len(a.unique())} region clusters."),
        "teacher_information": Figure(None, f"I(z_p; y): what P's prediction tells about the label {unknown}"),
        "student_information": Figure(None, f"I(z_q; y): what Q's prediction tells about the label {unknown}"),
        "teacher_input_information": Figure(
            x_teacher.corrected, "I(x; z_p): what P's prediction tells about which image it is for, in nats, corrected."
        ),
        "student_input_information": Figure(
            x_student.corrected, "I(x; z_q), the same of Q. The paper expects it not to exceed P's (Eq. 17)."
        ),
        "eps_joint": Figure(
            total_variation(q_joint, p_joint),
            "Averaged total variation of P's and Q's prediction given the region; 0 to 1. With labels (Eq. 19) it is "
            "never smaller.",
        ),
        "theorem_1": Figure(None, f"Delta_r(eps), Theorem 1's upper bound on the gap, {unknown}"),
        "eps_image": Figure(
            eps_image,
            "Mean total variation of P's and Q's prediction per image: eps_joint if each image were a region.",
        ),
    }


def _rows(probs: Tensor, n: int) -> Tensor:
    """Rows of probabilities, in float64, each divided by its sum: softmax in float32 is off by its rounding."""
    rows = probs.detach().cpu().double()
    if rows.ndim != 2 or len(rows) != n or not n:
        raise ValueError(f"probabilities are (n, C), one row for each of the {n} images: got {tuple(rows.shape)}")
    total = rows.sum(1, keepdim=True)
    if not rows.isfinite().all() or (rows < 0).any() or ((total - 1).abs() > 1e-2).any():
        raise ValueError("a row of probabilities is not finite, has a negative entry or does not sum to 1")
    return rows / total
