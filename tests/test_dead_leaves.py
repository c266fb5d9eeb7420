"""What dead leaves promise: images of their own numbers, with the edges and the spectrum of natural ones."""

import math

import pytest
import torch
from helpers import Ears, pair, small_recipe, tiny_swin, tiny_vit

from maskaq import randomness
from maskaq.errors import RunFolderError
from maskaq.images.dead_leaves import _light, _spots, _stripes, _texture, _topmost, dead_leaves
from maskaq.images.synthesis import Synthesizer
from maskaq.recipe.schema import to_toml
from maskaq.runs.arguments import identity
from maskaq.runs.quantize import quantize
from maskaq.storage.runfolder import RunFolder


def keys(n: int, seed: int = 0) -> torch.Tensor:
    return randomness.image_keys(seed, torch.arange(n))


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 24, 56), (4, 33, 17), (1, 1, 1)])
def test_leaves_are_pixels_of_any_shape_that_depend_on_nothing_but_their_key(channels, height, width):
    images = dead_leaves(keys(40), channels, height, width)  # so many that vectors of numbers are rounded together
    assert images.shape == (40, channels, height, width) and images.min() >= 0 and images.max() <= 1
    for alone in range(0, 40, 3):
        assert torch.equal(dead_leaves(keys(40)[alone : alone + 1], channels, height, width)[0], images[alone])
    if height > 1:
        assert all((images[i] - images[j]).abs().mean() > 0.05 for i in range(5) for j in range(i))
    assert not torch.equal(dead_leaves(keys(40, seed=1), channels, height, width), images)


def slope(images: torch.Tensor) -> float:
    """Exponent of the mean amplitude over frequency, by least squares on logarithms."""
    size = images.shape[-1]
    amplitude = torch.fft.fft2(images - images.mean(dim=(2, 3), keepdim=True)).abs().mean(dim=(0, 1))
    frequency = torch.fft.fftfreq(size).square()
    frequency = (frequency[:, None] + frequency[None]).sqrt()
    used = (frequency > 1.5 / size) & (frequency < 0.4)
    x, y = frequency[used].log(), amplitude[used].log()
    return float(((x - x.mean()) * (y - y.mean())).mean() / x.var(correction=0))


def test_the_amplitude_of_leaves_falls_about_as_one_over_the_frequency_and_that_of_noise_does_not():
    assert -1.5 < slope(dead_leaves(keys(32), 3, 64, 64)) < -0.7
    assert abs(slope(torch.rand(32, 3, 64, 64, generator=torch.Generator().manual_seed(0)))) < 0.1


def test_leaves_have_edges_most_neighbours_are_alike_and_a_few_far_apart():
    images = dead_leaves(keys(32), 3, 64, 64)
    steps = (images[..., 1:] - images[..., :-1]).flatten()
    kurtosis = float((steps / steps.std()).pow(4).mean())
    assert kurtosis > 6  # 3 for a Gaussian, as noise of any spectrum has; natural images 10 and more
    assert math.isclose(float(steps.mean()), 0, abs_tol=0.01)


def test_every_image_has_a_palette_of_its_own():
    images = dead_leaves(keys(64), 3, 64, 64)
    colour = (images.amax(dim=1) - images.amin(dim=1)).mean(dim=(1, 2))
    light = images.mean(dim=(1, 2, 3))
    assert colour.quantile(0.9) > 2.2 * colour.quantile(0.1)  # 1.7 where all images draw from the same colours
    assert light.quantile(0.9) > 1.7 * light.quantile(0.1)


def test_leaves_of_many_sizes_cover_each_other():
    seen = _topmost(keys(16), 96, 96)
    areas = torch.stack([(seen == leaf).sum(dim=(1, 2)) for leaf in range(1, int(seen.max()) + 1)])  # (leaves, B)
    visible = (areas > 0).sum(dim=0)
    assert visible.min() > 8 and visible.max() < 75  # of 149
    assert areas.max(dim=0).values.float().mean() > 15 * areas[areas > 0].float().median()


def test_one_texture_is_rough_others_are_striped_or_spotted():
    rough, striped, spotted = (_texture(keys(64), number, 1, 64, 64) for number in (0, 1, 2))
    for texture in (rough, striped, spotted):
        assert texture.mean(dim=(1, 2, 3)).abs().max() < 1e-4
        torch.testing.assert_close(texture.std(dim=(1, 2, 3), correction=0), torch.ones(64))

    def strongest_wave(texture: torch.Tensor) -> torch.Tensor:
        """How often it fits the side."""
        down, across = torch.fft.fftfreq(64, 1 / 64)[:, None], torch.fft.rfftfreq(64, 1 / 64)
        strongest = torch.fft.rfft2(texture).abs().flatten(1).argmax(dim=1)
        return (down.square() + across.square()).sqrt().flatten()[strongest]

    assert strongest_wave(rough).median() < 2 < 3 < strongest_wave(striped).median()
    sharp = _spots(keys(64), 64, 64).abs()
    assert (sharp > 0.8).float().mean() > 0.5 > 0.2 > (sharp < 0.2).float().mean()  # light or dark, little between


def test_no_stripe_is_finer_than_two_pixels():
    """Finer ones would be noise, and another pattern."""
    stripes = _stripes(keys(64), 32, 32).sign()
    turns = (stripes[..., 1:] != stripes[..., :-1]).float().mean(dim=(1, 2, 3))
    assert turns.max() < 0.75  # of all neighbours; 1 is a stripe for each pixel


def test_every_leaf_is_lit_from_a_side_of_its_own():
    leaf = _topmost(keys(4), 48, 48)
    light = _light(keys(4), leaf)[:, 0]
    across, down = light[:, 1:-1, 2:] - light[:, 1:-1, :-2], light[:, 2:, 1:-1] - light[:, :-2, 1:-1]
    slopes = []
    for image in range(4):
        for number in leaf[image].unique().tolist():
            same = leaf[image] == number
            inner = same[1:-1, 2:] & same[1:-1, :-2] & same[2:, 1:-1] & same[:-2, 1:-1]
            if inner.any():
                slope = torch.stack([across[image][inner], down[image][inner]])
                assert (slope - slope[:, :1]).abs().max() < 1e-5  # a plane
                slopes.append(slope[:, 0])
    assert len(slopes) > 20 and torch.stack(slopes).std(dim=0).min() > 5e-3


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_synthesis_starts_from_leaves_where_the_recipe_says_so_and_without_steps_they_are_the_images(build):
    recipe = small_recipe("synthesis.start=dead_leaves", "synthesis.steps=0", "refresh.every=0")
    made = Synthesizer(*pair(recipe, build), recipe, seed=5)(torch.arange(8))
    other = Synthesizer(*pair(recipe, build), recipe, seed=5)(torch.arange(4, 8))
    assert torch.equal(made.images[4:], other.images)
    noise_recipe = small_recipe("synthesis.steps=0", "refresh.every=0")
    noise = Synthesizer(*pair(noise_recipe, build), noise_recipe, seed=5)(torch.arange(8))
    assert rough(made.images) < 40 < rough(noise.images)


def rough(images: torch.Tensor) -> float:
    """How far apart neighbours are, in grey levels."""
    return float((images[..., 1:].float() - images[..., :-1].float()).abs().median())


def test_a_refresh_from_the_start_has_other_leaves(tmp_path):
    recipe = small_recipe("synthesis.start=dead_leaves", "synthesis.steps=1", "refresh.steps=1", "refresh.start=cold")
    quantize(tiny_vit(), recipe, tmp_path / "run")
    folder = RunFolder.read(tmp_path / "run")
    first, second = (folder.load_shard(round, 0).tensors["images"].float() for round in (0, 1))
    assert (first - second).abs().mean() > 20


@pytest.mark.slow
def test_a_run_that_an_earlier_version_began_with_the_old_name_is_continued(tmp_path):
    recipe = small_recipe("synthesis.start=dead_leaves", "synthesis.steps=0", "refresh.every=0")
    old = identity(tiny_vit(), recipe, seed=0)
    old["recipe"]["synthesis"]["start"] = "leaves"
    del old["recipe"]["calibration"]["pace"]  # a setting that came later
    RunFolder.open(tmp_path / "old", old, to_toml(recipe).replace("dead_leaves", "leaves")).close()
    with pytest.raises(RunFolderError, match=r'recipe\.synthesis\.start: "dead_leaves" in the folder, "noise" asked'):
        quantize(tiny_vit(), small_recipe("synthesis.steps=0", "refresh.every=0"), tmp_path / "old")
    ears = Ears()
    continued = quantize(tiny_vit(), recipe, tmp_path / "old", progress=ears)
    straight = quantize(tiny_vit(), recipe, tmp_path / "new")
    assert torch.equal(continued.images.images, straight.images.images)
    assert not [note for note in ears.notes if "was changed" in note]
    assert quantize(tiny_vit(), recipe, tmp_path / "old", progress=ears).folder and "is finished" in ears.notes[-1]
