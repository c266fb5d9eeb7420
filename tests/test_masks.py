"""The adaptive mask: exactly the k largest, thinned at random to exactly k_keep, fairly, and by the image's own key."""

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from maskaq.images.masks import kept_size, mask_size, thin, top_patches
from maskaq.randomness import fold, image_keys


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys_of(n: int, seed: int = 0) -> Tensor:
    return image_keys(seed, torch.arange(n))


def loop_top(values: list[float], k: int) -> list[float]:
    """Eq. 11; of equal values the first ones come in."""
    largest = sorted(range(len(values)), key=lambda n: (-values[n], n))[:k]
    return [float(n in largest) for n in range(len(values))]


@pytest.mark.parametrize("k", [0, 1, 3, 7, 8])
def test_the_mask_holds_the_k_largest_of_each_row(k):
    attention = draw(5, 8)
    assert top_patches(attention, k).tolist() == [loop_top(row, k) for row in attention.tolist()]


@pytest.mark.parametrize("k", range(1, 9))
def test_ties_are_broken_by_position_so_that_there_are_exactly_k(k):
    attention = torch.tensor([[1.0] * 8, [0, 1, 1, 0, 2, 1, 0, 1], [-1, -1, -2, -2, -1, -1, -2, -2]])
    got = top_patches(attention, k)
    assert got.sum(dim=1).tolist() == [k] * 3
    assert got.tolist() == [loop_top(row, k) for row in attention.tolist()]


def test_ties_in_long_rows_are_broken_by_position_too():
    attention = torch.randint(0, 3, (4, 196), generator=torch.Generator().manual_seed(0)).float()
    for k in (1, 20, 98, 195):
        assert top_patches(attention, k).tolist() == [loop_top(row, k) for row in attention.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_mask_has_the_dtype_of_the_attention_and_only_zeros_and_ones(dtype):
    got = top_patches(draw(4, 50).to(dtype), 20)
    assert got.dtype == dtype and set(got.unique().tolist()) == {0.0, 1.0} and (got.sum(dim=1) == 20).all()
    assert thin(got, 7, keys_of(4)).dtype == dtype


def test_sizes_may_be_tensors_on_the_device():
    attention, keys = draw(4, 9), keys_of(4)
    mask = top_patches(attention, torch.tensor(5))
    assert torch.equal(mask, top_patches(attention, 5))
    assert torch.equal(thin(mask, torch.tensor(2), keys), thin(mask, 2, keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "keep"), [(1, 1), (10, 7), (64, 1), (100, 100), (150, 105), (196, 196)])
def test_thinning_keeps_exactly_so_many_and_only_inside_the_mask(dtype, k, keep):
    mask = top_patches(draw(300, 196), k).to(dtype)
    got = thin(mask, keep, keys_of(300))
    assert (got.float().sum(dim=1) == keep).all()
    assert (got <= mask).all() and set(got.unique().tolist()) <= {0.0, 1.0}


def test_thinning_to_the_size_of_the_mask_or_more_drops_nothing():
    mask = top_patches(draw(6, 20), 5)
    for keep in (5, 6, 20):
        assert torch.equal(thin(mask, keep, keys_of(6)), mask)


def test_thinning_is_a_function_of_the_images_key_alone():
    mask, keys = top_patches(draw(6, 30), 15), keys_of(6)
    whole = thin(mask, 7, keys)
    assert torch.equal(whole, thin(mask, 7, keys))
    for i in range(6):
        assert torch.equal(thin(mask[i : i + 1], 7, keys[i : i + 1])[0], whole[i])
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert torch.equal(thin(mask[order], 7, keys[order]), whole[order])


def test_thinning_differs_between_images_steps_and_seeds():
    mask = torch.ones(1, 40).expand(50, -1)
    keys = keys_of(50)
    draws = [thin(mask, 20, k) for k in (keys, fold(keys, 1), fold(keys, 2), keys_of(50, seed=1))]
    rows = torch.cat(draws)
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_masked_patch_and_every_pair_is_kept_equally_often(dtype):
    n, inside, keep = 20_000, [1, 2, 4, 5, 7, 8], 3
    mask = torch.zeros(1, 9, dtype=dtype)
    mask[0, inside] = 1
    kept = thin(mask.expand(n, -1), keep, keys_of(n)).float()
    share = kept.mean(dim=0)
    for patch in inside:
        assert share[patch].item() == pytest.approx(keep / len(inside), abs=0.015)  # four standard deviations
    for a, b in itertools.combinations(inside, 2):
        together = (kept[:, a] * kept[:, b]).mean().item()
        assert together == pytest.approx(keep * (keep - 1) / len(inside) / (len(inside) - 1), abs=0.012)


@pytest.mark.parametrize(
    ("patches", "first", "last"), [(196, 98, 20), (100, 50, 10), (49, 24, 5), (16, 8, 2), (1, 1, 1)]
)
def test_the_mask_shrinks_from_half_to_a_tenth_of_the_patches(patches, first, last):
    sizes = [mask_size(patches, step / 100, 0.5, 0.1) for step in range(101)]
    assert sizes[0] == first and sizes[-1] == last
    assert sizes == sorted(sizes, reverse=True)


def test_the_mask_shrinks_linearly():
    for step in range(101):
        assert abs(mask_size(196, step / 100, 0.5, 0.1) - 196 * (0.5 - 0.4 * step / 100)) <= 0.5 + 1e-9


@pytest.mark.parametrize("patches", [1, 3, 49, 196])
def test_the_mask_is_never_empty_and_never_larger_than_the_image(patches):
    for start, end in [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.001, 0.001)]:
        for progress in (0.0, 0.5, 1.0):
            assert 1 <= mask_size(patches, progress, start, end) <= patches
    assert mask_size(patches, 0.7, 1.0, 1.0) == patches


def test_kept_size_is_equation_13_in_exact_arithmetic():
    for k, percent, least in itertools.product(range(1, 197), range(100), (1, 2, 5, 20)):
        exact = max(least, int(k * (1 - Fraction(percent, 100))))  # int floors what is not negative
        assert kept_size(k, percent / 100, least) == min(k, exact), (k, percent, least)


def test_kept_size_never_exceeds_the_mask_even_where_k_min_does():
    assert kept_size(3, 0.3, keep_at_least=10) == 3
    assert kept_size(1, 0.99, keep_at_least=1) == 1


def test_the_mask_of_the_papers_settings_has_the_size_that_the_formulas_say():
    attention = draw(4, 196)
    for progress, k, keep in [(0.0, 98, 68), (1.0, 20, 14)]:
        size = mask_size(196, progress, 0.5, 0.1)
        assert (size, kept_size(size, 0.3, 1)) == (k, keep)
        assert (thin(top_patches(attention, size), keep, keys_of(4)).sum(dim=1) == keep).all()
