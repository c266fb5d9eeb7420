"""Each loss equals a plain loop over its equation, keeps images apart, and has gradients wherever it may be led."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F

from maskaq.errors import RecipeError
from maskaq.images.masks import kept_size, mask_size, thin, top_patches
from maskaq.losses import attention, distill, image
from maskaq.losses.terms import (
    CALIBRATION_TERMS,
    SYNTHESIS_TERMS,
    CalibrationView,
    Objective,
    SynthesisView,
    calibration_term,
    synthesis_term,
)
from maskaq.randomness import image_keys
from maskaq.shapes import Geometry, Layer

Rows = list[list[float]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(got: Tensor, wanted: Any, **tolerance: float) -> None:
    torch.testing.assert_close(got, torch.as_tensor(wanted, dtype=got.dtype), rtol=1e-9, atol=1e-11, **tolerance)


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


MAPS = (3, 2, 3, 4, 4)  # images, windows, heads, queries, keys
HEADS = (3, 2, 5, 3)  # images, heads, patches, channels


def maps(seed: int = 0) -> Tensor:
    return draw(*MAPS, seed=seed)


def head_pair(seed: int = 0) -> tuple[Tensor, Tensor]:
    teacher = draw(*HEADS, seed=seed)
    return teacher, teacher + 0.5 * draw(*HEADS, seed=seed + 100)


def patch_weights(seed: int = 7) -> Tensor:
    return draw(3, 5, seed=seed).abs() + 0.5


# ---------------------------------------------------------------- loops, each straight from its equation


def loop_ssim(x: list[float], y: list[float]) -> float:
    """Wang et al. 2004 with one window over everything, for two rows brought to [0, 1]."""
    c1, c2 = 0.01**2, 0.03**2
    x = [(v - min(x)) / (max(x) - min(x) + 1e-8) for v in x]
    y = [(v - min(y)) / (max(y) - min(y) + 1e-8) for v in y]
    mx, my = mean(x), mean(y)
    vx, vy = mean((v - mx) ** 2 for v in x), mean((v - my) ** 2 for v in y)
    covariance = mean((a - mx) * (b - my) for a, b in zip(x, y, strict=True))
    return (2 * mx * my + c1) * (2 * covariance + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))


def loop_head_similarity(raw: list[list[Rows]], power: int = 1) -> float:
    """Eq. 3 of one image and one layer: 1 - mean SSIM over windows, queries and ordered pairs of heads."""
    values = []
    for window in raw:
        heads, queries = len(window), len(window[0])
        for n, i, j in itertools.product(range(queries), range(heads), range(heads)):
            values.append(loop_ssim(window[i][n], window[j][n]) ** power)
    return 1 - mean(values)


def loop_entropy(raw: list[list[Rows]]) -> float:
    """Eqs. 5, 8, 9 and H_l, of one image: cosine of rows of the head-mean map, pairs i != j of a window."""
    found = []
    for window in raw:
        heads, queries, keys = len(window), len(window[0]), len(window[0][0])
        rows = [[mean(window[h][q][k] for h in range(heads)) for k in range(keys)] for q in range(queries)]
        for i, j in itertools.permutations(range(queries), 2):
            dot = sum(a * b for a, b in zip(rows[i], rows[j], strict=True))
            found.append(dot / math.hypot(*rows[i]) / math.hypot(*rows[j]))
    mu = mean(found)
    variance = mean((s - mu) ** 2 for s in found)
    return -0.5 * math.log(2 * math.pi * math.e * variance)


def loop_masked_difference(teacher: list[float], student: list[float], mask: list[float]) -> float:
    """Eq. 14 of one image and one layer."""
    total = sum(m * abs(p - q) for p, q, m in zip(teacher, student, mask, strict=True))
    return total / sum(m != 0 for m in mask)


def loop_differences(picture: list[Rows], down: int, across: int) -> Iterator[float]:
    for channel in picture:
        height, width = len(channel), len(channel[0])
        for h, w in itertools.product(range(height), range(width)):
            if 0 <= h + down < height and 0 <= w + across < width:
                yield channel[h + down][w + across] - channel[h][w]


def loop_total_variation(picture: list[Rows]) -> float:
    """Eq. 2 of one image."""
    return sum(d * d for step in ((1, 0), (0, 1)) for d in loop_differences(picture, *step))


def loop_total_variation_norm(picture: list[Rows]) -> float:
    norm = {step: math.hypot(*loop_differences(picture, *step)) for step in ((1, 0), (0, 1), (1, 1), (1, -1))}
    return norm[1, 0] + norm[0, 1] + (norm[1, 1] + norm[1, -1]) / math.sqrt(2)


def loop_head_structure(teacher: list[Rows], student: list[Rows], weights: list[float]) -> float:
    """Structural SSIM of weighted moments over patches, of one image, mean over heads and channels."""
    c2, total, values = 0.03**2, sum(weights), []
    for p_head, q_head in zip(teacher, student, strict=True):
        for channel in range(len(p_head[0])):
            p, q = [row[channel] for row in p_head], [row[channel] for row in q_head]
            mp = sum(w * v for w, v in zip(weights, p, strict=True)) / total
            mq = sum(w * v for w, v in zip(weights, q, strict=True)) / total
            vp = sum(w * (v - mp) ** 2 for w, v in zip(weights, p, strict=True)) / total
            vq = sum(w * (v - mq) ** 2 for w, v in zip(weights, q, strict=True)) / total
            covariance = sum(w * (a - mp) * (b - mq) for w, a, b in zip(weights, p, q, strict=True)) / total
            values.append((2 * covariance + c2) / (vp + vq + c2))
    return 1 - mean(values)


def loop_calibration(teacher: list[Rows], student: list[Rows], weights: list[float], distance: Callable) -> float:
    """Eq. 16 of one image and one layer, for any distance D of two vectors."""
    heads = []
    for p_head, q_head in zip(teacher, student, strict=True):
        total = sum(w * distance(p, q) for w, p, q in zip(weights, p_head, q_head, strict=True))
        heads.append(total / sum(weights))
    return mean(heads)


def loop_cosine_distance(p: list[float], q: list[float]) -> float:
    return 1 - sum(a * b for a, b in zip(p, q, strict=True)) / math.hypot(*p) / math.hypot(*q)


def loop_squared_error(p: list[float], q: list[float]) -> float:
    return mean((a - b) ** 2 for a, b in zip(p, q, strict=True))


# ---------------------------------------------------------------- equations


def test_head_ssim_of_every_ordered_pair_equals_the_loop():
    x = maps()
    got = attention.head_ssim(x)
    assert got.shape == (3, 2, 4, 3, 3)
    for b, w, q, i, j in itertools.product(*map(range, got.shape)):
        near(got[b, w, q, i, j], loop_ssim(x[b, w, i, q].tolist(), x[b, w, j, q].tolist()))


def test_head_ssim_of_a_head_with_itself_is_one_and_pairs_are_symmetric():
    got = attention.head_ssim(maps())
    near(got.diagonal(dim1=-2, dim2=-1), torch.ones(3, 2, 4, 3))
    near(got, got.transpose(-2, -1))


def test_head_similarity_equals_the_loop_over_windows_queries_and_pairs():
    near(attention.head_similarity(maps()), [loop_head_similarity(x) for x in maps().tolist()])


def test_head_similarity_squared_equals_the_loop():
    near(attention.head_similarity_squared(maps()), [loop_head_similarity(x, power=2) for x in maps().tolist()])


def test_head_similarity_ignores_the_scale_and_offset_of_each_head():
    scale, offset = draw(1, 1, 3, 1, 1, seed=1).exp(), draw(1, 1, 3, 1, 1, seed=2)
    torch.testing.assert_close(
        attention.head_similarity(maps() * scale + offset), attention.head_similarity(maps()), rtol=1e-6, atol=1e-6
    )


def test_head_similarity_is_zero_for_equal_heads_and_squared_also_for_mirrored_ones_of_mean_one_half():
    same = draw(2, 2, 1, 4, 4).expand(-1, -1, 3, -1, -1)
    near(attention.head_similarity(same), [0, 0])
    near(attention.head_similarity_squared(same), [0, 0])
    row = torch.tensor([0.0, 1.0, 0.25, 0.75], dtype=torch.float64)
    mirrored = torch.stack([row, 1 - row])[None, None, :, None, :]
    assert attention.head_similarity(mirrored).item() > 0.9
    assert attention.head_similarity_squared(mirrored).item() < 0.02


def test_similarity_entropy_equals_the_loop_over_off_diagonal_pairs_of_all_windows():
    near(attention.similarity_entropy(maps()), [loop_entropy(x) for x in maps().tolist()])


def test_similarity_entropy_of_one_window_equals_the_loop():
    x = draw(2, 1, 3, 6, 6)
    near(attention.similarity_entropy(x), [loop_entropy(y) for y in x.tolist()])


def test_similarity_entropy_does_not_count_the_diagonal():
    # Any two different rows have cosine 1/2: no spread off the diagonal, though the diagonal's ones would add some.
    basis = torch.eye(4, dtype=torch.float64)
    rows = torch.stack([basis[0] + basis[i] for i in (1, 2, 3)])[None, None, None]
    assert attention.similarity_entropy(rows).item() > 10  # -log of a variance near 0


def test_similarity_entropy_falls_as_similarities_spread():
    base, change = torch.ones(1, 1, 1, 8, 8, dtype=torch.float64), draw(1, 1, 1, 8, 8)
    losses = [attention.similarity_entropy(base + share * change).item() for share in (0.01, 0.1, 0.3, 1.0)]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 1


@pytest.mark.parametrize("loss", [attention.head_similarity, attention.head_similarity_squared])
def test_windows_of_head_similarity_equal_the_loop_over_windows(loss):
    near(loss(maps()), torch.stack([loss(maps()[:, w : w + 1]) for w in range(2)]).mean(dim=0))


def test_windows_of_similarity_entropy_give_one_distribution_whatever_their_order():
    near(attention.similarity_entropy(maps().flip(1)), attention.similarity_entropy(maps()))
    doubled = maps()[:, :1].expand(-1, 3, -1, -1, -1)
    near(attention.similarity_entropy(doubled), attention.similarity_entropy(maps()[:, :1]))


def test_masked_difference_equals_the_loop():
    teacher, student = draw(3, 6), draw(3, 6, seed=1)
    mask = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.float64)
    wanted = [loop_masked_difference(*x) for x in zip(teacher.tolist(), student.tolist(), mask.tolist(), strict=True)]
    near(attention.masked_difference(teacher, student, mask), wanted)
    near(attention.masked_difference(teacher, teacher, mask), [0, 0, 0])


def test_masked_difference_outside_the_mask_has_no_gradient():
    teacher, student = draw(1, 4), draw(1, 4, seed=1).requires_grad_()
    mask = torch.tensor([[1.0, 0, 1, 0]], dtype=torch.float64)
    attention.masked_difference(teacher, student, mask).sum().backward()
    assert student.grad is not None
    assert (student.grad[0] != 0).tolist() == [True, False, True, False]


def test_total_variation_equals_the_loop():
    x = draw(3, 2, 4, 5)
    near(image.total_variation(x), [loop_total_variation(y) for y in x.tolist()])


def test_total_variation_norm_equals_the_loop_over_four_directions():
    x = draw(3, 2, 4, 5)
    near(image.total_variation_norm(x), [loop_total_variation_norm(y) for y in x.tolist()])


def test_a_constant_image_has_no_total_variation_and_finite_gradients():
    for loss in (image.total_variation, image.total_variation_norm):
        x = torch.full((2, 3, 4, 4), 0.7, requires_grad=True)
        value = loss(x)
        assert (value.abs() < 1e-5).all()
        (gradient,) = torch.autograd.grad(value.sum(), x)
        assert (gradient == 0).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 5.0])
def test_logit_kl_equals_torch_kl_div_times_the_squared_temperature(temperature):
    teacher, student = draw(4, 7), draw(4, 7, seed=1)
    wanted = F.kl_div(
        F.log_softmax(student / temperature, dim=-1), F.softmax(teacher / temperature, dim=-1), reduction="none"
    ).sum(dim=-1)
    near(distill.logit_kl(teacher, student, temperature), wanted * temperature**2)


def test_logit_kl_equals_the_loop_ignores_a_common_offset_and_is_zero_only_for_equal_predictions():
    teacher, student = draw(2, 4), draw(2, 4, seed=1)
    for p, q, got in zip(
        teacher.tolist(), student.tolist(), distill.logit_kl(teacher, student, 2.0).tolist(), strict=True
    ):
        p, q = [math.exp(v / 2) for v in p], [math.exp(v / 2) for v in q]
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        assert got == pytest.approx(4 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-9)
        assert got > 0
    near(distill.logit_kl(teacher, teacher + 3, 5.0), [0, 0])


def test_logit_kl_of_far_apart_logits_is_finite():
    teacher, student = torch.tensor([[1e4, -1e4, 0.0]]), torch.tensor([[-1e4, 1e4, 0.0]], requires_grad=True)
    value = distill.logit_kl(teacher, student, 1.0)
    value.sum().backward()
    assert student.grad is not None
    assert value.isfinite().all() and student.grad.isfinite().all()


def test_head_structure_equals_the_loop_with_weighted_moments():
    (p, q), w = head_pair(), patch_weights()
    wanted = [loop_head_structure(*x) for x in zip(p.tolist(), q.tolist(), w.tolist(), strict=True)]
    near(distill.head_structure(p, q, w), wanted)


def test_head_structure_with_equal_weights_is_unweighted_whatever_their_size():
    p, q = head_pair()
    wanted = [loop_head_structure(*x, [1.0] * 5) for x in zip(p.tolist(), q.tolist(), strict=True)]
    for size in (1.0, 0.3, 20.0):
        near(distill.head_structure(p, q, torch.full((3, 5), size, dtype=torch.float64)), wanted)


def test_head_structure_with_a_whole_weight_is_that_many_copies_of_the_patch():
    p, q = head_pair()
    weights = torch.tensor([[1, 2, 1, 3, 1]], dtype=torch.float64).expand(3, -1)
    copies = [0, 1, 1, 2, 3, 3, 3, 4]
    once = torch.ones(3, len(copies), dtype=torch.float64)
    for loss in (distill.head_structure, distill.head_cosine):
        near(loss(p, q, weights), loss(p[:, :, copies], q[:, :, copies], once))


def test_the_gradient_of_head_structure_is_whole_although_none_passes_through_the_mean():
    (p, q), w = head_pair(), patch_weights()
    assert torch.autograd.gradcheck(lambda student: distill.head_structure(p, student, w), q.requires_grad_())


def test_head_structure_ignores_an_offset_of_each_channel():
    (p, q), w = head_pair(), patch_weights()
    near(distill.head_structure(p, q + draw(3, 2, 1, 3, seed=9), w), distill.head_structure(p, q, w))


def test_head_cosine_equals_the_loop_of_equation_16():
    (p, q), w = head_pair(), patch_weights()
    rows = zip(p.tolist(), q.tolist(), w.tolist(), strict=True)
    near(distill.head_cosine(p, q, w), [loop_calibration(*x, loop_cosine_distance) for x in rows])


def test_head_mse_equals_the_loop_of_equation_16():
    (p, q), w = head_pair(), patch_weights()
    wanted = []
    for x in zip(p.tolist(), q.tolist(), w.tolist(), strict=True):
        power = mean(v * v for head in x[0] for row in head for v in row)
        wanted.append(loop_calibration(*x, loop_squared_error) / power)
    near(distill.head_mse(p, q, w), wanted)


def test_a_heavier_patch_counts_more_in_every_head_loss():
    p = draw(1, 2, 5, 3)
    q = p.clone()
    q[:, :, 2] += draw(1, 2, 3, seed=4)  # only patch 2 is wrong
    light = torch.ones(1, 5, dtype=torch.float64)
    heavy = torch.tensor([[1, 1, 2, 1, 1]], dtype=torch.float64)
    for loss in (distill.head_structure, distill.head_cosine, distill.head_mse):
        assert loss(p, q, heavy).item() > loss(p, q, light).item() > 0


def test_relative_error_equals_the_loop_over_tokens_for_any_number_of_axes():
    for shape in ((3, 6), (3, 4, 5), (3, 2, 3, 4)):
        p, q = draw(*shape), draw(*shape, seed=1)
        wanted = []
        for tokens, others in zip(
            p.reshape(3, -1, shape[-1]).tolist(), q.reshape(3, -1, shape[-1]).tolist(), strict=True
        ):
            errors = []
            for a, b in zip(tokens, others, strict=True):
                variance = mean((v - mean(a)) ** 2 for v in a)
                errors.append(mean((u - v) ** 2 for u, v in zip(a, b, strict=True)) / variance)
            wanted.append(mean(errors))
        near(distill.relative_error(p, q), wanted)


def test_relative_error_of_each_tokens_mean_is_one():
    p = draw(3, 4, 5)
    near(distill.relative_error(p, p.mean(dim=-1, keepdim=True).expand_as(p)), [1, 1, 1])


def test_a_token_a_hundred_times_as_long_counts_as_any_other():
    p, q = draw(2, 10, 6), draw(2, 10, 6, seed=1)
    before = distill.relative_error(p, q)
    p[:, 3] *= 100
    q[:, 3] *= 100
    near(distill.relative_error(p, q), before.tolist())


def test_a_constant_token_does_not_drown_the_others():
    p, q = draw(1, 10, 6), draw(1, 10, 6, seed=1)
    p[:, 3] = 0
    assert distill.relative_error(p, q).item() < 1e3 * distill.relative_error(p[:, 4:], q[:, 4:]).item()


@pytest.mark.parametrize("loss", [distill.head_structure, distill.head_cosine, distill.head_mse])
def test_a_student_equal_to_its_teacher_has_no_head_loss(loss):
    p, _ = head_pair()
    near(loss(p, p, patch_weights()), [0, 0, 0])


def test_a_student_equal_to_its_teacher_has_no_relative_error_and_no_kl():
    p = draw(3, 4)
    near(distill.relative_error(p, p), [0, 0, 0])
    near(distill.logit_kl(p, p, 5.0), [0, 0, 0])


# ---------------------------------------------------------------- every loss at once: gradients, dtype, independence

BINARY = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.float64)

LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "head_similarity": (attention.head_similarity, (maps(),)),
    "head_similarity_squared": (attention.head_similarity_squared, (maps(),)),
    "similarity_entropy": (attention.similarity_entropy, (maps(),)),
    "masked_difference": (attention.masked_difference, (draw(3, 5), draw(3, 5, seed=1), BINARY)),
    "total_variation": (image.total_variation, (draw(3, 2, 3, 4),)),
    "total_variation_norm": (image.total_variation_norm, (draw(3, 2, 3, 4),)),
    "logit_kl": (lambda p, q: distill.logit_kl(p, q, 3.0), (draw(3, 4), draw(3, 4, seed=1))),
    "head_structure": (distill.head_structure, (*head_pair(), patch_weights())),
    "head_cosine": (distill.head_cosine, (*head_pair(), patch_weights())),
    "head_mse": (distill.head_mse, (*head_pair(), patch_weights())),
    "relative_error": (distill.relative_error, (draw(3, 2, 4), draw(3, 2, 4, seed=1))),
}
each_loss = pytest.mark.parametrize(("loss", "inputs"), LOSSES.values(), ids=LOSSES.keys())


@each_loss
def test_gradients_are_those_of_finite_differences(loss, inputs):
    fixed = inputs[2:]  # masks and weights are given, not learned
    inputs = [x.clone().requires_grad_() for x in inputs[:2]]
    assert gradcheck(lambda *x: loss(*x, *fixed), inputs, eps=1e-6, atol=1e-5)


def test_gradients_of_head_ssim_hold_for_weights_that_no_mean_would_give():
    weights = draw(*attention.head_ssim(maps()).shape, seed=2)  # not alike for a pair and its mirror
    assert gradcheck(lambda x: (weights * attention.head_ssim(x)).sum(), [maps().requires_grad_()], eps=1e-6, atol=1e-5)


def test_the_ends_of_a_map_have_the_values_and_gradients_of_amin_and_amax():
    x = torch.tensor([[3.0, 1.0, 1.0, 2.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0], [-1.0, 0.5, 4.0, 0.0, 1e-30]])
    weights, found = torch.tensor([[1.5], [-2.0], [0.7]]), []
    for ends in (attention._Ends.apply, lambda y: (y.amin(dim=-1, keepdim=True), y.amax(dim=-1, keepdim=True))):
        leaf = x.clone().requires_grad_()
        low, high = ends(leaf)
        (low * weights + 3 * high * weights.square()).sum().backward()
        found.append((low, high, leaf.grad))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@each_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_is_one_number_per_image_in_the_dtype_of_the_input(loss, inputs, dtype):
    got = loss(*[x.to(dtype) for x in inputs])
    assert got.shape == (3,) and got.dtype == dtype
    torch.testing.assert_close(got.double(), loss(*inputs), rtol=1e-3, atol=1e-4)


@each_loss
def test_an_image_does_not_feel_the_batch_it_is_in(loss, inputs):
    whole = loss(*inputs)
    for i in range(3):
        near(loss(*[x[i : i + 1] for x in inputs]), whole[i : i + 1])
        others = [
            torch.where(torch.arange(3).reshape(-1, *[1] * (x.ndim - 1)) == i, x, 3 * x.abs() + 1) for x in inputs
        ]
        near(loss(*others)[i], whole[i])


@each_loss
def test_an_images_gradient_is_zero_for_all_other_images(loss, inputs):
    x = inputs[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x, *inputs[1:])[1], x)
    assert (gradient[0] == 0).all() and (gradient[2] == 0).all() and gradient[1].abs().sum() > 0


@pytest.mark.parametrize(
    "loss", [attention.head_similarity, attention.head_similarity_squared, attention.similarity_entropy]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case", ["zero", "constant", "equal rows", "equal heads", "huge", "tiny", "one hot", "one patch"]
)
def test_degenerate_attention_has_finite_values_and_gradients(loss, dtype, case):
    x = {
        "zero": torch.zeros(MAPS),
        "constant": torch.full(MAPS, 0.25),
        "equal rows": maps()[:, :, :, :1].expand(MAPS),  # every patch attends alike
        "equal heads": maps()[:, :, :1].expand(MAPS),
        "huge": maps() * 1e6,
        "tiny": maps() * 1e-9,
        "one hot": torch.eye(4).expand(MAPS),
        "one patch": torch.ones(3, 2, 3, 1, 1),
    }[case]
    x = x.to(dtype).clone().requires_grad_()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert value.shape == (3,) and value.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("loss", [distill.head_structure, distill.head_cosine, distill.head_mse])
@pytest.mark.parametrize("case", ["both zero", "both constant", "zero teacher", "zero student", "one dead channel"])
def test_degenerate_head_outputs_have_finite_values_and_gradients(loss, case):
    p, q = head_pair()
    dead = torch.tensor([1.0, 0.0, 1.0])
    p, q = {
        "both zero": (0 * p, 0 * q),
        "both constant": (torch.ones_like(p), torch.ones_like(q)),
        "zero teacher": (0 * p, q),
        "zero student": (p, 0 * q),
        "one dead channel": (p * dead, q * dead),
    }[case]
    q = q.float().requires_grad_()
    value = loss(p.float(), q, patch_weights().float())
    (gradient,) = torch.autograd.grad(value.sum(), q)
    assert value.isfinite().all() and gradient.isfinite().all()


def test_relative_error_to_a_constant_teacher_is_finite():
    q = draw(2, 4).float().requires_grad_()
    value = distill.relative_error(torch.ones(2, 4), q)
    (gradient,) = torch.autograd.grad(value.sum(), q)
    assert value.isfinite().all() and gradient.isfinite().all()


# ---------------------------------------------------------------- layers: one form for every model


def vit_layer(prefix: int = 2, *, class_query: bool = True) -> Layer:
    return Layer("a", "b", grid=(2, 3), prefix_tokens=prefix)


def received(raw: Tensor, prefix: int, class_query: bool) -> Tensor:
    return raw[:, :, 0] if class_query else raw[:, :, prefix:].mean(dim=2)


def attentions(maps: list[Tensor]) -> list[Tensor]:
    """(B, N) of each of the mixed layers: two ViTs that read a class token, one Swin."""
    pairs = zip(mixed_layers(), maps, strict=False)
    return [x.patch_attention(received(raw, x.prefix_tokens, x.prefix_tokens > 0)) for x, raw in pairs]


def swin_layer() -> tuple[Layer, list[int]]:
    """A grid of 2 x 4 in two windows of 2 x 2, cyclically shifted by one column; and the raster patch of each token."""
    patch_of_token = []
    for window in range(2):
        for row, column in itertools.product(range(2), range(2)):
            patch_of_token.append(row * 4 + (window * 2 + column + 1) % 4)
    raster = torch.tensor([patch_of_token.index(n) for n in range(8)])
    return Layer("a", "b", grid=(2, 4), windows=2, raster=raster), patch_of_token


def loop_patch_attention(
    raw: Tensor, windows: int, prefix: int, class_query: bool, patch_of_token: list[int]
) -> Tensor:
    """alpha of each raster patch: mean over heads of the class row, or over heads and the queries of its window."""
    images, heads, tokens = len(raw) // windows, raw.shape[1], raw.shape[2]
    size = tokens - prefix
    got = torch.zeros(images, windows * size, dtype=raw.dtype)
    for b, w, k in itertools.product(range(images), range(windows), range(size)):
        queries = [0] if class_query else range(prefix, tokens)
        values = [raw[b * windows + w, h, q, prefix + k].item() for h in range(heads) for q in queries]
        got[b, patch_of_token[w * size + k]] = mean(values)
    return got


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_maps_of_a_vit_are_its_patch_rows_and_columns(prefix):
    raw = draw(3, 2, prefix + 6, prefix + 6)
    got = vit_layer(prefix, class_query=False).maps(raw)
    assert got.shape == (3, 1, 2, 6, 6)
    for b, h, q, k in itertools.product(range(3), range(2), range(6), range(6)):
        assert got[b, 0, h, q, k] == raw[b, h, prefix + q, prefix + k]


def test_maps_of_a_windowed_layer_keep_the_windows_of_an_image_together():
    raw = draw(6, 3, 4, 4)
    got = swin_layer()[0].maps(raw)
    assert got.shape == (3, 2, 3, 4, 4)
    for b, w in itertools.product(range(3), range(2)):
        assert torch.equal(got[b, w], raw[b * 2 + w])


@pytest.mark.parametrize(("prefix", "class_query"), [(1, True), (2, True), (0, False), (2, False)])
def test_patch_attention_of_a_vit_is_the_class_row_or_else_the_mean_over_patch_queries(prefix, class_query):
    raw = draw(3, 2, prefix + 6, prefix + 6)
    got = vit_layer(prefix).patch_attention(received(raw, prefix, class_query))
    near(got, loop_patch_attention(raw, 1, prefix, class_query, list(range(6))))


def test_patch_attention_of_shifted_windows_lies_in_raster_order():
    layer, patch_of_token = swin_layer()
    raw = draw(6, 3, 4, 4)
    near(layer.patch_attention(received(raw, 0, False)), loop_patch_attention(raw, 2, 0, False, patch_of_token))


def test_patch_heads_of_a_vit_drop_the_prefix():
    raw = draw(3, 2, 8, 5)
    assert torch.equal(vit_layer().patch_heads(raw), raw[:, :, 2:])


def test_patch_heads_of_shifted_windows_stay_window_by_window():
    layer, _ = swin_layer()
    raw = draw(3 * 2, 4, 3, 5).transpose(1, 2)  # as an attention gives them: (B*W, T, H, D) in memory
    got = layer.patch_heads(raw)
    assert got.shape == (3, 3, 8, 5) and got.data_ptr() == raw.data_ptr(), "no copy"
    for b, h, w, q in itertools.product(range(3), range(3), range(2), range(4)):
        assert torch.equal(got[b, h, w * 4 + q], raw[b * 2 + w, h, q])


def test_geometry_normalises_and_goes_back():
    facts = Geometry(
        layers=(swin_layer()[0], vit_layer()),
        image_size=(4, 4),
        channels=2,
        task="classification",
        classes=3,
        mean=(0.5, 0.25),
        std=(0.5, 2.0),
        first=(),
        last=(),
    )
    pixels = draw(2, 2, 4, 4).sigmoid()
    images = facts.normalise(pixels)
    near(images[:, 0], (pixels[:, 0] - 0.5) / 0.5)
    near(images[:, 1], (pixels[:, 1] - 0.25) / 2.0)
    near(facts.pixels(images), pixels)
    moved = facts.to("cpu")
    assert moved.layers[1].raster is None and torch.equal(moved.layers[0].raster, facts.layers[0].raster)


# ---------------------------------------------------------------- terms and objectives


@pytest.fixture
def registries() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    before = dict(SYNTHESIS_TERMS), dict(CALIBRATION_TERMS)
    yield
    for terms, old in zip((SYNTHESIS_TERMS, CALIBRATION_TERMS), before, strict=True):
        terms.clear()
        terms.update(old)


def mixed_layers() -> list[Layer]:
    """Two ViT-like layers on one grid and a Swin-like one on another."""
    return [vit_layer(), vit_layer(), swin_layer()[0]]


def raw_maps(seed: int = 0) -> list[Tensor]:
    return [draw(3, 2, 8, 8, seed=seed), draw(3, 2, 8, 8, seed=seed + 1), draw(6, 3, 4, 4, seed=seed + 2)]


def random_masks() -> dict[tuple[int, int], Tensor]:
    return {
        (2, 3): top_patches(draw(3, 6, seed=20), 3),
        (2, 4): top_patches(draw(3, 8, seed=21), 2),
    }


def synthesis_view(**changes: Any) -> SynthesisView:
    values: dict[str, Any] = {
        "images": draw(3, 2, 4, 4),
        "labels": torch.tensor([1, 0, 2]),
        "outputs": {"logits": draw(3, 5, seed=3)},
        "layers": mixed_layers(),
        "maps": raw_maps(),
        "attention": attentions(raw_maps()),
        "student_attention": attentions(raw_maps(seed=50)),
        "masks": random_masks(),
    }
    return SynthesisView(**values | changes)


def calibration_view(**changes: Any) -> CalibrationView:
    heads = [draw(3, 2, 8, 4), draw(3, 2, 8, 4, seed=1), draw(6, 3, 4, 4, seed=2)]
    values: dict[str, Any] = {
        "layers": mixed_layers(),
        "outputs": {"logits": draw(3, 5, seed=3)},
        "student_outputs": {"logits": draw(3, 5, seed=4)},
        "heads": heads,
        "student_heads": [x + 0.3 * draw(*x.shape, seed=9) for x in heads],
        "blocks": [draw(3, 8, 6), draw(3, 4, 2, 6, seed=1)],
        "student_blocks": [draw(3, 8, 6, seed=2), draw(3, 4, 2, 6, seed=3)],
        "patch_weights": [1 + random_masks()[x.grid] for x in mixed_layers()],
        "temperature": 5.0,
    }
    return CalibrationView(**values | changes)


def value_of(name: str, view: Any) -> Tensor:
    terms = SYNTHESIS_TERMS if isinstance(view, SynthesisView) else CALIBRATION_TERMS
    return Objective(terms, {name: 1.0}, "terms")(view)[0]


def test_class_prior_is_minus_the_log_probability_of_the_label():
    view = synthesis_view()
    probabilities = view.logits.softmax(dim=1)
    near(value_of("class_prior", view), [-math.log(probabilities[b, view.labels[b]]) for b in range(3)])


def test_total_variation_terms_look_at_the_images_as_optimised():
    view = synthesis_view()
    near(value_of("total_variation", view), image.total_variation(view.images))
    near(value_of("total_variation_norm", view), image.total_variation_norm(view.images))


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("head_similarity", loop_head_similarity),
        ("head_similarity_squared", lambda x: loop_head_similarity(x, power=2)),
        ("similarity_entropy", loop_entropy),
    ],
)
def test_attention_terms_are_the_mean_over_layers_of_patch_maps(name, loop):
    view = synthesis_view()
    wanted = []
    for b in range(3):
        layers = [[raw[b, :, 2:, 2:].tolist()] for raw in view.maps[:2]]  # one window, without the prefix
        layers.append(view.maps[2][2 * b : 2 * b + 2].tolist())
        wanted.append(mean(loop(x) for x in layers))
    near(value_of(name, view), wanted)


def loop_alignment(view: SynthesisView) -> list[float]:
    """Eq. 14, each layer under the mask of its own grid."""
    layouts = [(1, 2, True, list(range(6))), (1, 2, True, list(range(6))), (2, 0, False, swin_layer()[1])]
    totals = [0.0] * 3
    for layer, p, q, (windows, prefix, class_query, order) in zip(
        view.layers, raw_maps(), raw_maps(seed=50), layouts, strict=True
    ):
        alpha_p = loop_patch_attention(p, windows, prefix, class_query, order).tolist()
        alpha_q = loop_patch_attention(q, windows, prefix, class_query, order).tolist()
        for b in range(3):
            totals[b] += loop_masked_difference(alpha_p[b], alpha_q[b], view.masks[layer.grid][b].tolist())
    return totals


def test_attention_alignment_equals_the_loop_over_layers_of_equation_14():
    view = synthesis_view()
    near(value_of("attention_alignment", view), loop_alignment(view))


def test_attention_alignment_of_shifted_windows_is_non_zero_and_moves_teacher_and_student():
    layer, _ = swin_layer()
    p, q = draw(6, 3, 4, 4).requires_grad_(), draw(6, 3, 4, 4, seed=1).requires_grad_()
    alphas = [layer.patch_attention(received(raw, 0, False)) for raw in (p, q)]
    view = synthesis_view(layers=[layer], attention=alphas[:1], student_attention=alphas[1:])
    value = value_of("attention_alignment", view)
    assert (value > 0).all()
    for gradient in torch.autograd.grad(value.sum(), (p, q)):
        assert (gradient.unflatten(0, (3, 2)).abs().sum(dim=(1, 2, 3, 4)) > 0).all()


def test_attention_alignment_of_windows_equals_that_of_one_window_with_the_same_attention():
    layer, patch_of_token = swin_layer()
    p, q = draw(6, 3, 4, 4), draw(6, 3, 4, 4, seed=1)

    def as_class_row(raw: Tensor) -> Tensor:  # a ViT whose class token attends as the windows do on average
        whole = draw(3, 1, 9, 9, seed=30)
        whole[:, 0, 0, 1:] = loop_patch_attention(raw, 2, 0, False, patch_of_token)
        return whole

    def view(layer: Layer, p: Tensor, q: Tensor, class_query: bool) -> SynthesisView:
        alphas = [layer.patch_attention(received(raw, layer.prefix_tokens, class_query)) for raw in (p, q)]
        return synthesis_view(layers=[layer], attention=alphas[:1], student_attention=alphas[1:])

    vit = Layer("a", "b", grid=(2, 4), prefix_tokens=1)
    one = value_of("attention_alignment", view(layer, p, q, class_query=False))
    near(one, value_of("attention_alignment", view(vit, as_class_row(p), as_class_row(q), class_query=True)))


def test_attention_alignment_under_a_full_mask_without_drop_is_the_plain_mean_difference():
    view = synthesis_view()
    masks, wanted = {}, torch.zeros(3, dtype=torch.float64)
    for layer, alpha, q in zip(view.layers, view.attention, view.student_attention, strict=True):
        k = mask_size(alpha.shape[1], 0.3, 1.0, 1.0)
        masks[layer.grid] = thin(top_patches(alpha, k), kept_size(k, 0.0, 1), image_keys(0, torch.arange(3)))
        wanted += (alpha - q).abs().mean(dim=1)
    near(value_of("attention_alignment", synthesis_view(masks=masks)), wanted)


def test_attention_alignment_of_equal_models_is_zero():
    near(value_of("attention_alignment", synthesis_view(student_attention=attentions(raw_maps()))), [0, 0, 0])


@pytest.mark.parametrize("name", ["head_structure", "head_cosine", "head_mse"])
def test_head_terms_are_the_mean_over_layers(name):
    view = calibration_view()
    parts = []
    for layer, p, q, w in zip(view.layers, view.heads, view.student_heads, view.patch_weights, strict=True):
        parts.append(getattr(distill, name)(layer.patch_heads(p), layer.patch_heads(q), w))
    near(value_of(name, view), sum(parts) / 3)


def test_block_error_is_the_mean_over_blocks_and_logit_kl_uses_the_views_temperature():
    view = calibration_view()
    near(
        value_of("block_error", view),
        sum(distill.relative_error(p, q) for p, q in zip(view.blocks, view.student_blocks, strict=True)) / 2,
    )
    near(value_of("logit_kl", view), distill.logit_kl(view.logits, view.student_logits, 5.0))


@pytest.mark.parametrize("name", ["logit_kl", "head_structure", "head_cosine", "head_mse", "block_error"])
def test_every_calibration_term_is_zero_for_a_student_equal_to_its_teacher(name):
    view = calibration_view()
    same = calibration_view(student_outputs=view.outputs, student_heads=view.heads, student_blocks=view.blocks)
    near(value_of(name, same), [0, 0, 0])


def test_layers_without_their_maps_are_an_error_not_a_shorter_sum():
    with pytest.raises(ValueError, match="zip"):
        value_of("attention_alignment", synthesis_view(student_attention=attentions(raw_maps()[:2])))


@pytest.mark.parametrize("terms", [SYNTHESIS_TERMS, CALIBRATION_TERMS], ids=["synthesis", "calibration"])
def test_every_term_has_a_line_of_documentation_and_known_needs(terms):
    for term in terms.values():
        assert term.doc and "\n" not in term.doc
        assert set(term.needs) <= {
            *("maps", "student", "student_maps", "masks", "received", "regions", "heads", "blocks")
        }


def test_an_unknown_term_is_named_with_the_known_ones():
    with pytest.raises(RecipeError) as error:
        Objective(SYNTHESIS_TERMS, {"class_prior": 1.0, "atention_alignment": 1.0}, "synthesis.terms")
    message = str(error.value)
    assert "[synthesis.terms]" in message and "'atention_alignment'" in message
    assert "Did you mean 'attention_alignment'?" in message
    assert all(name in message for name in SYNTHESIS_TERMS)


def test_an_unknown_term_is_an_error_even_at_weight_zero():
    with pytest.raises(RecipeError, match="nonsense"):
        Objective(CALIBRATION_TERMS, {"logit_kl": 1.0, "nonsense": 0.0}, "calibration.terms")


@pytest.mark.parametrize("weights", [{}, {"logit_kl": 0.0, "head_mse": 0.0}])
def test_an_objective_without_any_weight_is_an_error(weights):
    with pytest.raises(RecipeError, match=r"\[calibration\.terms\].*weight 0"):
        Objective(CALIBRATION_TERMS, weights, "calibration.terms")


def test_the_objective_is_the_weighted_sum_and_reports_each_part_unweighted():
    view = synthesis_view()
    weights = {"class_prior": 0.5, "total_variation": -2.0, "attention_alignment": 3.0, "head_similarity": 0.0}
    total, parts = Objective(SYNTHESIS_TERMS, weights, "synthesis.terms")(view)
    values = {name: value_of(name, view) for name in weights}
    near(total, 0.5 * values["class_prior"] - 2 * values["total_variation"] + 3 * values["attention_alignment"])
    assert set(parts) == {"class_prior", "total_variation", "attention_alignment"}
    for name, part in parts.items():
        near(part, values[name])


def test_the_parts_carry_no_gradient_and_the_total_does():
    view = synthesis_view(images=draw(3, 2, 4, 4).requires_grad_())
    total, parts = Objective(SYNTHESIS_TERMS, {"total_variation": 1.0}, "synthesis.terms")(view)
    assert total.requires_grad and not parts["total_variation"].requires_grad


def test_an_objective_needs_only_what_its_weighted_terms_need():
    def needs(**weights: float) -> set[str]:
        return Objective(SYNTHESIS_TERMS, weights, "synthesis.terms").needs

    assert needs(class_prior=1.0, attention_alignment=0.0) == set()
    assert needs(class_prior=1.0, attention_alignment=0.1) == {"student", "masks"}
    assert Objective(CALIBRATION_TERMS, {"head_mse": 1.0, "block_error": 1.0}, "x").needs == {"heads", "blocks"}


def test_a_term_of_ones_own_joins_the_objective(registries):
    @synthesis_term
    def brightness(v: SynthesisView) -> Tensor:
        """How far the mean is from zero."""
        return v.images.mean(dim=(1, 2, 3)).square()

    @calibration_term(needs=("blocks",))
    def block_mean(v: CalibrationView) -> Tensor:
        return v.student_blocks[0].mean(dim=(1, 2))

    view = synthesis_view()
    total, _ = Objective(SYNTHESIS_TERMS, {"brightness": 2.0, "total_variation": 1.0}, "synthesis.terms")(view)
    near(total, 2 * view.images.mean(dim=(1, 2, 3)) ** 2 + image.total_variation(view.images))
    assert SYNTHESIS_TERMS["brightness"].doc == "How far the mean is from zero."
    assert brightness(view).shape == (3,)  # the decorator gives the function back
    assert "brightness" not in CALIBRATION_TERMS
    assert Objective(CALIBRATION_TERMS, {"block_mean": 1.0}, "calibration.terms").needs == {"blocks"}
    assert CALIBRATION_TERMS["block_mean"].doc == ""


def test_a_second_term_of_the_same_name_is_refused(registries):
    def class_prior(v: SynthesisView) -> Tensor:
        return v.logits.sum(dim=1)

    before = SYNTHESIS_TERMS["class_prior"]
    with pytest.raises(ValueError, match="'class_prior' exists already"):
        synthesis_term(class_prior)
    with pytest.raises(ValueError, match="'class_prior' exists already"):
        synthesis_term(needs=("student",))(class_prior)
    assert SYNTHESIS_TERMS["class_prior"] is before
    calibration_term(class_prior)  # the two stages have names of their own


@pytest.mark.parametrize("name", ["loss", "lr", "step", "seconds", "round", "epoch"])
def test_a_term_cannot_take_the_name_of_what_is_recorded_beside_it(registries, name):
    def term(v: SynthesisView) -> Tensor:
        return v.logits.sum(dim=1)

    term.__name__ = name
    for register, terms in ((synthesis_term, SYNTHESIS_TERMS), (calibration_term, CALIBRATION_TERMS)):
        with pytest.raises(ValueError, match=f"'{name}' .* choose another name"):
            register(term)
        assert name not in terms
