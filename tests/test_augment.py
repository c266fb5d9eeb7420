"""Every sample of a batch is augmented on its own, by its own key, as torchvision would with the same parameters."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision.transforms.v2.functional as TF
from torch import Tensor

from maskaq.images.augment import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    crop_boxes,
    gaussian_blur,
    greyscale,
    jitter,
    resized_crop,
    roll_each,
    roll_offsets,
    simclr,
)
from maskaq.randomness import fold, image_keys

OFF: dict[str, Any] = dict(
    crop=(1.0, 1.0),
    flip=0.0,
    brightness=0.0,
    contrast=0.0,
    saturation=0.0,
    hue=0.0,
    jitter_prob=0.0,
    grey=0.0,
    blur=0.0,
)
FULL: dict[str, Any] = dict(
    crop=(0.2, 1.0),
    flip=0.5,
    brightness=0.8,
    contrast=0.8,
    saturation=0.8,
    hue=0.2,
    jitter_prob=0.8,
    grey=0.2,
    blur=0.5,
)
JITTER: dict[str, Any] = dict(roll=3, noise=0.2, colour=0.3)


def keys_of(n: int, seed: int = 0) -> Tensor:
    return image_keys(seed, torch.arange(n))


def pixels(n: int = 4, channels: int = 3, height: int = 20, width: int = 20) -> Tensor:
    """Reproducible images in [0, 1], of which the last is grey and black in part: the corners of the hue formula."""
    images = torch.rand(n, channels, height, width, generator=torch.Generator().manual_seed(1))
    images[-1, :, : height // 2] = images[-1, :1, : height // 2]
    images[-1, :, 0] = 0
    return images


def assert_near(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def one_by_one(function: Callable[[Tensor, float], Tensor], images: Tensor, parameters: Tensor) -> Tensor:
    return torch.stack([function(image, value) for image, value in zip(images, parameters.tolist(), strict=True)])


# --- the operations are torchvision's, per sample ---------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(adjust_brightness, TF.adjust_brightness), (adjust_contrast, TF.adjust_contrast)]
)
def test_brightness_and_contrast_equal_torchvision_image_by_image(ours, theirs, channels):
    images, factor = pixels(channels=channels), torch.tensor([0.0, 0.6, 1.0, 1.7])
    assert_near(ours(images, factor), one_by_one(theirs, images, factor))


def test_saturation_equals_torchvision_image_by_image():
    images, factor = pixels(), torch.tensor([0.0, 0.6, 1.0, 1.7])
    assert_near(adjust_saturation(images, factor), one_by_one(TF.adjust_saturation, images, factor))


def test_hue_equals_torchvision_image_by_image():
    images, turns = pixels(6), torch.tensor([-0.5, -0.2, 0.0, 0.1, 0.5, 0.3])
    assert_near(adjust_hue(images, turns), one_by_one(TF.adjust_hue, images, turns))


def test_greyscale_equals_torchvision():
    assert_near(greyscale(pixels()), TF.rgb_to_grayscale(pixels()))


@pytest.mark.parametrize("size", [3, 7])
def test_blur_equals_torchvision_image_by_image(size):
    images, sigma = pixels(height=16), torch.tensor([0.1, 0.5, 1.1, 2.0])
    expected = one_by_one(lambda image, s: TF.gaussian_blur(image, [size, size], [s, s]), images, sigma)
    assert_near(gaussian_blur(images, sigma, size), expected)


def test_crop_aligned_to_pixels_equals_torchvision_inside_the_box():
    height, width = 20, 32
    images = pixels(3, height=height, width=width)
    boxes = torch.tensor([[0, 0, height, width], [3, 5, 10, 16], [10, 8, 5, 24]])  # top, left, height, width in pixels
    fractions = boxes / torch.tensor([height, width, height, width])
    actual = resized_crop(images, fractions, torch.zeros(3, dtype=torch.bool))
    for image, result, (top, left, h, w) in zip(images, actual, boxes.tolist(), strict=True):
        expected = TF.resized_crop(image, top, left, h, w, [height, width], antialias=False)
        # Within half a source pixel of the box's edge torchvision repeats the edge; we see the true neighbour.
        y, x = math.ceil(height / h / 2), math.ceil(width / w / 2)
        assert_near(result[:, y:-y, x:-x], expected[:, y:-y, x:-x])


def test_flip_equals_horizontal_flip_where_chosen():
    images, flip = pixels(3, width=27), torch.tensor([True, False, True])
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(3, -1)
    expected = torch.where(flip[:, None, None, None], TF.horizontal_flip(images), images)
    assert_near(resized_crop(images, whole, flip), expected)


def test_boxes_lie_in_the_image_with_area_and_stretch_in_range():
    top, left, height, width = crop_boxes(keys_of(2000), (0.2, 0.5)).unbind(1)
    assert min(top.min(), left.min()) >= 0 and max((top + height).max(), (left + width).max()) <= 1 + 1e-6
    area, stretch = height * width, width / height
    assert area.min() >= 0.2 - 1e-6 and area.max() <= 0.5 + 1e-6 and area.mean().sub(0.35).abs() < 0.01
    assert stretch.min() >= 3 / 4 - 1e-6 and stretch.max() <= 4 / 3 + 1e-6 and stretch.log().mean().abs() < 0.02


# --- simclr -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 20, 20), (3, 33, 20), (1, 20, 20)])
def test_simclr_with_everything_off_returns_its_input(shape):
    images = pixels(4, *shape)
    assert_near(simclr(images, keys_of(4), **OFF), images)


@pytest.mark.parametrize("shape", [(3, 24, 24), (3, 45, 24), (1, 24, 24), (2, 24, 31)])
def test_simclr_keeps_shape_and_range_for_any_sides_and_channels(shape):
    views = simclr(pixels(16, *shape), keys_of(16), **FULL)
    assert views.shape == (16, *shape) and views.min() >= 0 and views.max() <= 1


@pytest.mark.parametrize(
    "only",
    [
        dict(crop=(0.3, 0.9)),
        dict(flip=0.5),
        dict(brightness=0.8, jitter_prob=1.0),
        dict(contrast=0.8, jitter_prob=1.0),
        dict(saturation=0.8, jitter_prob=1.0),
        dict(hue=0.4, jitter_prob=1.0),
        dict(grey=0.5),
        dict(blur=1.0),
    ],
    ids=lambda only: next(iter(only)),
)
def test_each_part_of_simclr_draws_per_sample(only):
    same = pixels(1).expand(12, -1, -1, -1)
    views = simclr(same, keys_of(12), **{**OFF, **only})
    assert (views - views[:1]).abs().amax((1, 2, 3)).max() > 1e-3


@pytest.mark.parametrize(("name", "setting"), [("jitter_prob", dict(brightness=0.8)), ("grey", {}), ("blur", {})])
def test_parts_with_a_probability_change_that_share_of_samples_and_leave_the_rest(name, setting):
    images = pixels(1, height=8, width=8).expand(2000, -1, -1, -1)
    views = simclr(images, keys_of(2000), **{**OFF, **setting, name: 0.3})
    untouched = (views - images).abs().amax((1, 2, 3)) < 1e-5
    assert 0.65 < untouched.float().mean() < 0.75


def test_grey_views_are_the_greyscale_of_the_image():
    assert_near(simclr(pixels(), keys_of(4), **{**OFF, "grey": 1.0}), TF.rgb_to_grayscale(pixels(), 3))


def test_colour_operations_leave_single_channel_images_alone():
    images = pixels(channels=1)
    colour = dict(saturation=0.8, hue=0.2, jitter_prob=1.0, grey=1.0)
    assert_near(simclr(images, keys_of(4), **{**OFF, **colour}), images)


# --- jitter -----------------------------------------------------------------------------------------------------------


def test_roll_equals_torch_roll_by_the_offsets_drawn():
    images, offsets = pixels(height=9, width=13), roll_offsets(keys_of(4), 20)
    rolled = [torch.roll(x, (dy, dx), (1, 2)) for x, (dy, dx) in zip(images, offsets.tolist(), strict=True)]
    assert torch.equal(jitter(images, keys_of(4), roll=20, noise=0, colour=0), torch.stack(rolled))


def test_offsets_reach_every_integer_of_the_range_equally_often():
    counts = (roll_offsets(keys_of(5000), 2) + 2).flatten().bincount()
    assert len(counts) == 5 and (counts / 10_000 - 0.2).abs().max() < 0.02


def test_jitter_recolours_each_channel_by_a_shift_and_a_bounded_scale():
    images = pixels(400, height=4, width=4)
    out = jitter(images, keys_of(400), roll=0, noise=0, colour=0.3)
    gain = out.std((2, 3)) / images.std((2, 3))
    mean = images.mean((2, 3)) - out.mean((2, 3)) / gain
    assert_near((images - mean[..., None, None]) * gain[..., None, None], out)
    assert 0.28 < gain.log().abs().max() <= 0.3 + 1e-5 and 0.28 < mean.abs().max() <= 0.3 + 1e-5


def test_jitter_noise_is_one_offset_per_channel_of_the_asked_spread():
    images = pixels(2000, height=4, width=4)
    offset = jitter(images, keys_of(2000), roll=0, noise=0.5, colour=0) - images
    assert offset.var((2, 3)).max() < 1e-9
    assert abs(offset.mean()) < 0.02 and abs(offset[:, :, 0, 0].std() - 0.5) < 0.02


def test_jitter_with_everything_off_returns_its_input():
    assert torch.equal(jitter(pixels(), keys_of(4), roll=0, noise=0.0, colour=0.0), pixels())


def test_jitter_gradient_and_second_gradient_are_right():
    images = pixels(2, height=4, width=3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: jitter(x, keys_of(2), **JITTER), images)
    assert torch.autograd.gradgradcheck(lambda x: jitter(x, keys_of(2), **JITTER) ** 2, images)


def test_rolling_back_undoes_rolling():
    offsets = roll_offsets(keys_of(4), 7)
    assert torch.equal(roll_each(roll_each(pixels(), offsets), -offsets), pixels())


def test_jitter_never_looks_at_a_value_and_so_never_waits_for_the_device():
    images = torch.empty(4, 3, 8, 8, device="meta", requires_grad=True)  # meta tensors have no values to look at
    out = jitter(images, keys_of(4).to("meta"), **JITTER)
    out.sum().backward()
    assert out.shape == images.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_jitter_replays_in_a_cuda_graph_with_new_keys_and_its_gradient():
    images, keys = pixels().cuda().requires_grad_(), keys_of(4).cuda()

    def step() -> Tensor:
        return torch.autograd.grad(jitter(images, keys, **JITTER).square().sum(), images)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grad = step()
    keys.copy_(fold(keys, 1))
    graph.replay()
    assert_near(grad, step())


# --- both: a pure function of image and key ---------------------------------------------------------------------------

BOTH = pytest.mark.parametrize(
    "augment", [lambda x, k: jitter(x, k, **JITTER), lambda x, k: simclr(x, k, **FULL)], ids=["jitter", "simclr"]
)


@BOTH
def test_samples_in_one_batch_get_different_draws(augment):
    out = augment(pixels(1).expand(8, -1, -1, -1), keys_of(8))
    assert all((out[i] - out[j]).abs().max() > 1e-3 for i in range(8) for j in range(i))


@BOTH
def test_the_result_for_an_image_does_not_depend_on_its_batch(augment):
    images, keys = pixels(8), keys_of(8)
    alone = torch.cat([augment(images[i : i + 1], keys[i : i + 1]) for i in range(8)])
    assert_near(augment(images, keys), alone)


@BOTH
def test_equal_keys_give_equal_results_whatever_the_global_generator_does(augment):
    torch.manual_seed(0)
    state, first = torch.get_rng_state(), augment(pixels(), keys_of(4))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(augment(pixels(), keys_of(4)), first)


@BOTH
def test_other_keys_give_other_results(augment):
    first, second = augment(pixels(), keys_of(4)), augment(pixels(), fold(keys_of(4), 1))
    assert (first - second).abs().amax((1, 2, 3)).min() > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@BOTH
def test_cuda_gives_what_the_cpu_gives(augment):
    assert_near(augment(pixels().cuda(), keys_of(4).cuda()).cpu(), augment(pixels(), keys_of(4)), atol=1e-3)
