"""Losses of segmenters and detectors, against plain loops and torchvision."""

import math

import pytest
import torch
from torch.nn import functional as F
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.ops import box_iou

from maskaq.boxes import ROI_UNITS, decoded, encoded, iou
from maskaq.losses import dense
from maskaq.losses.layouts import objects
from maskaq.randomness import fold, image_keys

B, A, R, K, M, N = 3, 60, 24, 4, 6, 8
SIZE = (64, 96)
KEYS = fold(image_keys(5, torch.arange(B)), "layout")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def boxes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    corner = 60 * torch.rand(*shape, 2, generator=generator)
    return torch.cat([corner, corner + 1 + 30 * torch.rand(*shape, 2, generator=generator)], dim=-1)


def predictions(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "class_logits": random(B, R, K + 1, seed=seed),
        "box_deltas": random(B, R, K, 4, seed=seed),
        "mask_logits": random(B, R, K, M, M, seed=seed),
    }


# ---- boxes


def test_overlap_and_deltas_are_torchvisions():
    ours, others = boxes(5, seed=1), boxes(7, seed=2)
    torch.testing.assert_close(iou(ours, others), box_iou(ours, others))
    coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
    wanted = boxes(5, seed=3)
    torch.testing.assert_close(encoded(ours, wanted, ROI_UNITS), coder.encode_single(wanted, ours))
    deltas = random(5, 4)
    torch.testing.assert_close(decoded(ours, deltas, ROI_UNITS), coder.decode_single(deltas, ours))
    torch.testing.assert_close(decoded(ours, encoded(ours, wanted)), wanted)


def test_empty_boxes_overlap_nothing_and_have_finite_deltas():
    empty, some = torch.tensor([[3.0, 4.0, 3.0, 4.0]]), boxes(4)
    assert not iou(empty, some).any() and not iou(empty, empty).any()
    for pair in ((empty, some[:1]), (some[:1], empty), (empty, empty)):
        assert encoded(*pair).isfinite().all()


# ---- towards a layout


def test_the_pixel_loss_is_the_mean_cross_entropy_of_an_image():
    logits, classes = random(B, K, 5, 7), torch.arange(B * 35).view(B, 5, 7) % K
    wanted = [F.cross_entropy(logits[i : i + 1], classes[i : i + 1]) for i in range(B)]
    torch.testing.assert_close(dense.pixel_loss(logits, classes), torch.stack(wanted))


def test_anchors_are_matched_as_torchvision_matches_them_and_both_kinds_weigh_the_same():
    layout = objects(KEYS, K, SIZE)
    near = layout["objects"] + 2.0 * random(B, N, 4)
    anchors = torch.cat([near, boxes(B, A - N, seed=4)], dim=1)
    objectness, deltas = random(B, A), random(B, A, 4)
    found = dense.proposal_loss(objectness, deltas, anchors, layout["objects"], layout["present"])
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    for i in range(B):
        there = layout["objects"][i][layout["present"][i] > 0]
        matched = matcher(box_iou(there, anchors[i]))
        hit, miss = matched >= 0, matched == Matcher.BELOW_LOW_THRESHOLD
        classes = 0.5 * (F.softplus(-objectness[i][hit]).mean() + F.softplus(objectness[i][miss]).mean())
        wanted = BoxCoder((1.0, 1.0, 1.0, 1.0)).encode_single(there[matched[hit]], anchors[i][hit])
        moved = F.smooth_l1_loss(deltas[i][hit], wanted, beta=1 / 9, reduction="sum") / hit.sum()
        torch.testing.assert_close(found[i], classes + moved)


def test_the_heads_are_taught_the_object_that_a_box_overlaps_by_half_with_its_ellipse():
    layout, heads = objects(KEYS, K, SIZE), predictions()
    rois = layout["boxes"]
    found = dense.roi_loss(*heads.values(), rois, layout["objects"], layout["labels"], layout["present"])
    for i in range(B):
        errors: dict[bool, list[float]] = {True: [], False: []}
        moved, masks = [], []
        for r in range(R):
            overlap = box_iou(rois[i, r : r + 1], layout["objects"][i])[0] * layout["present"][i]
            which = int(overlap.argmax())
            shows = bool(overlap[which] >= 0.5)
            label = int(layout["labels"][i, which])
            target = torch.tensor(label + 1 if shows else 0)
            errors[shows].append(F.cross_entropy(heads["class_logits"][i, r], target).item())
            if not shows:
                continue
            box = layout["objects"][i, which]
            wanted = BoxCoder((10.0, 10.0, 5.0, 5.0)).encode_single(box[None], rois[i, r : r + 1])[0]
            moved.append(F.smooth_l1_loss(heads["box_deltas"][i, r, label], wanted, reduction="sum").item())
            left, top, right, bottom = rois[i, r].tolist()
            drawn = torch.zeros(M, M)
            for row in range(M):
                for column in range(M):
                    x, y = left + (column + 0.5) / M * (right - left), top + (row + 0.5) / M * (bottom - top)
                    u = (x - (box[0] + box[2]) / 2) / ((box[2] - box[0]) / 2)
                    v = (y - (box[1] + box[3]) / 2) / ((box[3] - box[1]) / 2)
                    drawn[row, column] = float(u * u + v * v <= 1)
            masks.append(F.binary_cross_entropy_with_logits(heads["mask_logits"][i, r, label], drawn).item())
        mean = {kind: sum(values) / len(values) for kind, values in errors.items()}
        wanted = 0.5 * (mean[True] + mean[False]) + sum(moved) / len(moved) + sum(masks) / len(masks)
        assert found[i].item() == pytest.approx(wanted, rel=1e-4)


CASES = {
    "objects at the border": (torch.tensor([0.0, 0.0, 96.0, 64.0]), 1.0),
    "tiny boxes": (torch.tensor([5.0, 5.0, 5.01, 5.01]), 1.0),
    "empty boxes": (torch.tensor([5.0, 5.0, 5.0, 5.0]), 1.0),
    "no object": (torch.tensor([5.0, 5.0, 25.0, 30.0]), 0.0),
}


@pytest.mark.parametrize(("box", "there"), CASES.values(), ids=CASES)
def test_losses_and_gradients_are_finite(box, there):
    layout = objects(KEYS, K, SIZE)
    found, present = box.expand(B, N, 4), torch.full((B, N), there)
    rois = torch.cat([found, layout["boxes"][:, N:]], dim=1)
    heads = [x.requires_grad_() for x in predictions().values()]
    rpn = [random(B, A).requires_grad_(), random(B, A, 4).requires_grad_()]
    loss = dense.proposal_loss(*rpn, boxes(B, A), found, present)
    loss = loss + dense.roi_loss(*heads, rois, found, layout["labels"], present)
    assert loss.shape == (B,) and loss.isfinite().all()
    gradients = torch.autograd.grad(loss.sum(), [*rpn, *heads])
    assert all(gradient.isfinite().all() for gradient in gradients)
    if not there:  # nothing to draw and nothing to move
        assert not gradients[1].any() and not gradients[3].any() and not gradients[4].any() and gradients[2].any()


# ---- between teacher and student


def test_kl_of_pixels_and_of_single_logits_is_that_of_the_probabilities():
    p, q = random(B, K, 3, 5, seed=1), random(B, K, 3, 5, seed=2)
    wanted = F.kl_div(q.log_softmax(1), p.log_softmax(1), log_target=True, reduction="none").sum(1).mean((1, 2))
    torch.testing.assert_close(dense.pixel_kl(p, q), wanted)
    a, b = random(9, seed=1), random(9, seed=2)
    two = [torch.stack([x.sigmoid(), 1 - x.sigmoid()]) for x in (a, b)]
    torch.testing.assert_close(dense.binary_kl(a, b), (two[0] * (two[0] / two[1]).log()).sum(0))
    far = torch.tensor([-200.0, 200.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(dense.binary_kl(-far.detach(), far).sum(), far)
    assert gradient.tolist() == [-1.0, 1.0]


def test_the_map_error_is_the_squared_error_by_the_variance_of_each_place():
    p, q = random(B, K, 2, 3, seed=1), random(B, K, 2, 3, seed=2)
    for i in range(B):
        ratios = []
        for row in range(2):
            for column in range(3):
                x, y = p[i, :, row, column], q[i, :, row, column]
                ratios.append(((x - y).square().mean() / x.var(correction=0)).item())
        assert dense.map_error(p, q)[i].item() == pytest.approx(sum(ratios) / len(ratios), rel=0.02)


def test_proposals_count_by_the_teachers_objectness():
    p, q = (random(B, A, seed=1), random(B, A, 4, seed=1)), (random(B, A, seed=2), random(B, A, 4, seed=2))
    found = dense.proposal_gap(*p, *q)
    for i in range(B):
        weight = p[0][i].sigmoid()
        classes = (dense.binary_kl(p[0][i], q[0][i]) * (weight + 0.02)).sum() / (weight + 0.02).sum()
        moved = sum(
            w * F.smooth_l1_loss(theirs, ours, beta=1 / 9, reduction="sum")
            for w, ours, theirs in zip(weight, p[1][i], q[1][i], strict=True)
        )
        torch.testing.assert_close(found[i], classes + moved / weight.sum())


def test_heads_are_compared_for_the_class_that_the_teacher_sees():
    p, q = predictions(1), predictions(2)
    found = dense.roi_gap(*p.values(), *q.values())
    for i in range(B):
        classes, rest, weights = 0.0, 0.0, 0.0
        for r in range(R):
            probability = p["class_logits"][i, r].softmax(0)
            theirs = q["class_logits"][i, r].softmax(0)
            classes += (probability * (probability / theirs).log()).sum().item() / R
            label = int(p["class_logits"][i, r, 1:].argmax())
            moved = F.smooth_l1_loss(q["box_deltas"][i, r, label], p["box_deltas"][i, r, label], reduction="sum")
            masks = dense.binary_kl(p["mask_logits"][i, r, label], q["mask_logits"][i, r, label]).mean()
            weight = 1 - probability[0].item()
            rest, weights = rest + weight * (moved + masks).item(), weights + weight
        assert found[i].item() == pytest.approx(classes + rest / weights, rel=1e-4)


def all_losses(which: slice) -> torch.Tensor:
    """Every loss, (losses, B), of some images."""
    layout, p, q = objects(KEYS, K, SIZE), predictions(1), predictions(2)
    layout = {name: x[which] for name, x in layout.items()}
    p, q = ([x[which] for x in found.values()] for found in (p, q))
    rpn = [x[which] for seed in (1, 2) for x in (random(B, A, seed=seed), random(B, A, 4, seed=seed))]
    maps = [random(B, K, 3, 5, seed=seed)[which] for seed in (1, 2)]
    target = layout["objects"], layout["present"]
    found = [
        dense.proposal_loss(*rpn[:2], boxes(B, A)[which], *target),
        dense.roi_loss(*p, layout["boxes"], layout["objects"], layout["labels"], layout["present"]),
        dense.pixel_loss(maps[0], maps[1].argmax(dim=1)),
        dense.pixel_kl(*maps),
        dense.map_error(*maps),
        dense.proposal_gap(*rpn),
        dense.roi_gap(*p, *q),
    ]
    return torch.stack(found)


def test_each_loss_gives_a_number_for_every_image_whatever_the_batch():
    whole = all_losses(slice(None))
    assert whole.shape == (7, B)
    alone = torch.cat([all_losses(slice(i, i + 1)) for i in range(B)], dim=1)
    torch.testing.assert_close(whole, alone, rtol=1e-6, atol=1e-7)


def test_a_student_that_equals_the_teacher_has_no_distance_and_no_gradient():
    p = [random(B, A), random(B, A, 4), *predictions().values(), random(B, K, 3, 5)]
    q = [x.clone().requires_grad_() for x in p]
    losses = [
        dense.proposal_gap(*p[:2], *q[:2]),
        dense.roi_gap(*p[2:5], *q[2:5]),
        dense.pixel_kl(p[5], q[5]),
        dense.map_error(p[5], q[5]),
    ]
    for loss in losses:
        assert loss.abs().max() < 1e-6
        for gradient in torch.autograd.grad(loss.sum(), q, allow_unused=True):
            assert gradient is None or gradient.abs().max() < 1e-6


def test_a_teacher_that_sees_no_object_still_compares_finitely():
    p, q = predictions(1), predictions(2)
    p["class_logits"][..., 0] = 500.0
    found = dense.roi_gap(*p.values(), *(x.requires_grad_() for x in q.values()))
    gradients = torch.autograd.grad(found.sum(), list(q.values()))
    assert found.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    assert not math.isnan(
        dense.proposal_gap(
            torch.full((1, A), -500.0), *(random(1, A, n) for n in (4,)), random(1, A), random(1, A, 4)
        ).item()
    )
