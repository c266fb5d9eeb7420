"""Mean IoU and average precision: against plain loops, and against COCO's own tool."""

import json

import pytest
import torch

from maskaq.cli.main import main
from maskaq.errors import DataError, DependencyError
from maskaq.tasks import metrics
from maskaq.tasks.metrics import Confusion, Instances


def maps(n, classes, size=(12, 9), seed=0):
    """(predictions, truths) that agree more often than by chance; some pixels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    truths = torch.randint(classes, (n, *size), generator=generator)
    wrong = torch.rand(n, *size, generator=generator) < 0.4
    predictions = torch.where(wrong, torch.randint(classes, (n, *size), generator=generator), truths)
    return predictions, truths.masked_fill(torch.rand(n, *size, generator=generator) < 0.1, 255)


def measured(predictions, truths, classes):
    confusion = Confusion(classes)
    for prediction, truth in zip(predictions, truths, strict=True):
        confusion.add(prediction, truth)
    return confusion


def looped_miou(predictions, truths, classes):
    """One confusion matrix over all pixels, pixel by pixel."""
    matrix = [[0] * classes for _ in range(classes)]
    for p, t in zip(predictions.flatten().tolist(), truths.flatten().tolist(), strict=True):
        if t != 255:
            matrix[t][p] += 1
    ious = []
    for k in range(classes):
        union = sum(matrix[k]) + sum(row[k] for row in matrix) - matrix[k][k]
        if union:
            ious.append(matrix[k][k] / union)
    right = sum(matrix[k][k] for k in range(classes))
    return 100 * sum(ious) / len(ious), 100 * right / sum(map(sum, matrix))


# --- mean IoU --------------------------------------------------------------------------------------------------


def test_mean_iou_is_that_of_one_confusion_matrix_over_all_images():
    predictions, truths = maps(7, 5)
    truths[3] = truths[3].masked_fill(truths[3] == 2, 255)  # classes are not alike in all images
    found = measured(predictions, truths, 5)
    assert (found.miou, found.pixel_accuracy) == pytest.approx(looped_miou(predictions, truths, 5))
    assert found.n == 7


def test_a_class_that_is_nowhere_does_not_count_and_one_that_is_only_predicted_counts_as_0():
    truths = torch.zeros(1, 4, 4, dtype=torch.long)
    truths[0, 2:] = 1
    assert measured(truths, truths, 9).miou == 100.0
    predictions = truths.clone()
    predictions[0, 0, 0] = 5
    found = measured(predictions, truths, 9)
    assert found.iou[5] == 0 and found.iou[7].isnan()
    assert found.miou == pytest.approx(100 * (7 / 8 + 1 + 0) / 3)


def test_ignored_pixels_change_nothing_whatever_is_predicted_there():
    predictions, truths = maps(3, 4)
    other = torch.where(truths == 255, (predictions + 1) % 4, predictions)
    assert measured(predictions, truths, 4).miou == measured(other, truths, 4).miou


def test_a_wrong_map_gives_0():
    truths = torch.zeros(2, 4, 4, dtype=torch.long)
    assert measured(truths + 1, truths, 2).miou == 0.0


def test_the_standard_error_of_mean_iou_is_the_spread_among_samples_of_images():
    """Many data sets of the same kind differ by as much as the bootstrap says of one of them."""
    found = [measured(*maps(40, 4, size=(4, 4), seed=seed), 4) for seed in range(60)]
    spread = torch.tensor([f.miou for f in found]).std().item()
    errors = torch.tensor([f.standard_error for f in found])
    assert errors.mean().item() == pytest.approx(spread, rel=0.3)
    assert found[0].standard_error == found[0].standard_error


def test_classes_and_sizes_that_cannot_be_are_refused():
    with pytest.raises(DataError, match="class 7.*0 to 3"):
        measured(torch.zeros(1, 2, 2), torch.full((1, 2, 2), 7), 4)
    with pytest.raises(DataError, match=r"\(2, 3\)"):
        measured(torch.zeros(1, 2, 2), torch.zeros(1, 2, 3), 4)
    with pytest.raises(DataError, match="no images"):
        _ = Confusion(3).miou


# --- average precision -----------------------------------------------------------------------------------------

detection = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("faster_coco_eval") is None, reason="needs maskaq[detection]"
)
SIZE = (40, 60)


def rectangles(boxes, size=SIZE):
    """(n, H, W): the masks that fill boxes."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.round().int().tolist(), strict=True):
        mask[top:bottom, left:right] = True
    return masks


def objects(boxes, labels, **more):
    boxes = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": boxes, "labels": torch.as_tensor(labels, dtype=torch.long), "masks": rectangles(boxes), **more}


def random_images(n, classes=3, seed=0):
    """(detections, truths) of n images: objects found with some error, missed, of a wrong class, or invented."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        corner = torch.rand(count, 2, generator=generator) * torch.tensor([SIZE[1] - 20.0, SIZE[0] - 15.0])
        sides = 5 + torch.rand(count, 2, generator=generator) * 10
        return torch.cat([corner, corner + sides], dim=1), torch.randint(classes, (count,), generator=generator)

    detections, truths = [], []
    for _ in range(n):
        boxes, labels = draw(int(torch.randint(0, 5, (), generator=generator)))
        crowd = (torch.rand(len(labels), generator=generator) < 0.15).long()
        truths.append(objects(boxes, labels, iscrowd=crowd))
        seen = torch.rand(len(labels), generator=generator) < 0.9
        moved = boxes[seen] + torch.randn(int(seen.sum()), 4, generator=generator)
        invented, kinds = draw(int(torch.randint(0, 3, (), generator=generator)))
        found = torch.cat([moved, invented]).clamp(min=0)
        scores = torch.rand(len(found), generator=generator)
        detections.append(objects(found, torch.cat([labels[seen], kinds]), scores=scores))
    return detections, truths


def precision(detections, truths, of="boxes", classes=3):
    instances = Instances(classes)
    for found, truth in zip(detections, truths, strict=True):
        instances.add(found, truth, SIZE)
    return instances.precision(of)


@detection
@pytest.mark.parametrize("of", ["boxes", "masks"])
def test_perfect_detections_have_a_precision_of_100_and_none_have_0(of):
    _, truths = random_images(6)
    perfect = [{**truth, "scores": torch.ones(len(truth["labels"]))} for truth in truths]
    found = precision(perfect, truths, of)
    assert (found.ap, found.ap50, found.standard_error) == pytest.approx((100, 100, 0))
    nothing = [{key: value[:0] for key, value in image.items()} for image in perfect]
    found = precision(nothing, truths, of)
    assert (found.ap, found.ap50, found.standard_error) == (0, 0, 0)


@detection
@pytest.mark.parametrize("of", ["boxes", "masks"])
def test_average_precision_is_that_of_pycocotools(of, tmp_path):
    pytest.importorskip("pycocotools")
    import numpy as np
    from pycocotools import coco, cocoeval, mask

    detections, truths = random_images(30)
    entries = {"truth": [], "found": []}
    for name, images in (("truth", truths), ("found", detections)):
        for number, image in enumerate(images):
            for i, (x1, y1, x2, y2) in enumerate(image["boxes"].double().tolist()):
                run = mask.encode(np.asfortranarray(image["masks"][i].numpy().astype("uint8")))
                run["counts"] = run["counts"].decode()
                entry = {"id": len(entries[name]) + 1, "image_id": number, "category_id": int(image["labels"][i])}
                entry |= {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "segmentation": run}
                entry |= {"iscrowd": int(image.get("iscrowd", torch.zeros(9))[i])}
                entry |= {"score": float(image["scores"][i])} if "scores" in image else {}
                entries[name].append(entry)
    images = [{"id": i, "height": SIZE[0], "width": SIZE[1]} for i in range(len(truths))]
    file = tmp_path / "instances.json"
    categories = [{"id": i, "name": str(i)} for i in range(3)]
    file.write_text(json.dumps({"images": images, "categories": categories, "annotations": entries["truth"]}))
    reference = coco.COCO(str(file))
    evaluation = cocoeval.COCOeval(reference, reference.loadRes(entries["found"]), {"boxes": "bbox"}.get(of, "segm"))
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    found = precision(detections, truths, of)
    assert (found.ap, found.ap50) == pytest.approx(tuple(100 * evaluation.stats[:2]), abs=1e-9)
    assert 20 < found.ap < 95


@detection
@pytest.mark.slow
def test_the_standard_error_of_average_precision_is_the_spread_among_samples_of_images():
    found = [precision(*random_images(40, seed=seed)) for seed in range(25)]
    spread = torch.tensor([f.ap for f in found]).std().item()
    assert torch.tensor([f.standard_error for f in found]).mean().item() == pytest.approx(spread, rel=0.5)


@detection
def test_the_jackknife_leaves_out_one_group_of_images_at_a_time():
    """IoUs are computed once; a part of the images has the precision that it has alone."""
    detections, truths = random_images(12)
    without = []
    for group in range(10):
        kept = [i for i in range(12) if i % 10 != group]
        without.append(precision([detections[i] for i in kept], [truths[i] for i in kept]).ap)
    left = torch.tensor(without, dtype=torch.float64)
    expected = ((9 / 10) * (left - left.mean()).square().sum()).sqrt().item()
    assert precision(detections, truths).standard_error == pytest.approx(expected)


@detection
def test_a_crowd_is_no_object_to_find_and_nothing_found_inside_it_is_wrong():
    one = objects([[5, 5, 15, 15], [20, 5, 55, 35]], [0, 0], iscrowd=torch.tensor([0, 1]))
    inside = objects([[5, 5, 15, 15], [25, 10, 35, 20]], [0, 0], scores=torch.tensor([0.5, 0.9]))
    assert precision([inside], [one]).ap == pytest.approx(100)
    one["iscrowd"][1] = 0
    assert precision([inside], [one]).ap < 50


@detection
def test_images_without_objects_and_masks_of_another_size_are_refused():
    empty = objects([], [])
    with pytest.raises(DataError, match="no annotated objects"):
        precision([{**empty, "scores": torch.zeros(0)}], [empty])
    instances = Instances(3)
    truth = objects([[1, 1, 5, 5]], [0])
    with pytest.raises(DataError, match=r"\(40, 60\)"):
        instances.add({**truth, "scores": torch.ones(1)}, truth, (41, 60))


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faster_coco_eval", None)
    with pytest.raises(DependencyError, match=r"maskaq\[detection\]"):
        metrics.Instances(3)


def test_a_detectors_run_asks_for_the_library_before_it_begins(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(__import__("sys").modules, "faster_coco_eval", None)
    out = tmp_path / "run"
    assert main(["quantize", "scenes_detector", "--recipe", "demo-boxes", "--data", "scenes", "--out", str(out)]) == 1
    assert "maskaq[detection]" in capsys.readouterr().err and not out.exists()
