"""Random numbers are a function of their keys and nothing else, and look random from every side we use them from."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from maskaq.randomness import fold, image_keys, normal, permutation, uniform

SEEDS = [0, 1, 2, -1, -2, 2**31, 2**63 - 1, 2**63, 2**64 - 3, 10**30, -(10**30)]


def keys_of(n: int, seed: int = 0) -> Tensor:
    return image_keys(seed, torch.arange(n))


def splitmix(key: int, n: int) -> list[int]:
    """SplitMix64 in Python's own integers: n outputs from the state `key`."""
    mask, outputs = (1 << 64) - 1, []
    for _ in range(n):
        key = (key + 0x9E3779B97F4A7C15) & mask
        z = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1].item()


def test_uniform_draws_the_published_splitmix64_sequence():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix(1234567, 4) == published
    got = uniform(torch.tensor([1234567]), 4)
    assert got.tolist() == [[(x >> 40) * 2.0**-24 for x in published]]


def test_uniform_equals_splitmix64_in_python_integers_for_any_key():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 123456789123456789]
    got = uniform(torch.tensor(keys), 50)
    for key, row in zip(keys, got.tolist(), strict=True):
        assert row == [(x >> 40) * 2.0**-24 for x in splitmix(key % 2**64, 50)]


def test_the_same_keys_give_the_same_draws():
    for sample in (uniform, normal):
        assert torch.equal(sample(keys_of(5), 3, 4), sample(keys_of(5), 3, 4))
    assert torch.equal(keys_of(5, seed=3), keys_of(5, seed=3))


def test_torchs_own_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    first, state = normal(keys_of(3), 4), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(first, normal(keys_of(3), 4))
    torch.manual_seed(0)
    permutation(0, 0, 10), uniform(keys_of(3), 4), fold(keys_of(3), "x")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("sample", [uniform, normal])
def test_an_images_draws_do_not_depend_on_the_batch(sample):
    whole = sample(fold(keys_of(8), "noise"), 3, 5)
    for i in range(8):
        alone = sample(fold(image_keys(0, torch.tensor([i])), "noise"), 3, 5)
        assert torch.equal(alone[0], whole[i])
    order = torch.tensor([5, 2, 7])
    assert torch.equal(sample(fold(image_keys(0, order), "noise"), 3, 5), whole[order])


def test_a_longer_draw_starts_with_the_shorter_one():
    keys = keys_of(4)
    assert torch.equal(uniform(keys, 12)[:, :5], uniform(keys, 5))
    assert torch.equal(uniform(keys, 3, 4), uniform(keys, 12).reshape(4, 3, 4))


@pytest.mark.parametrize("shape", [(), (1,), (3, 2, 4), (0,)])
@pytest.mark.parametrize("sample", [uniform, normal])
def test_draws_have_the_asked_shape_in_float32(sample, shape):
    for n in (0, 1, 5):
        got = sample(keys_of(n), *shape)
        assert got.shape == (n, *shape) and got.dtype == torch.float32 and got.isfinite().all()


def test_uniform_is_in_zero_to_one_with_one_excluded_and_has_its_moments():
    u = uniform(keys_of(400), 1000).double()
    assert u.min() >= 0 and u.max() < 1
    assert u.min() < 1e-4 and u.max() > 1 - 1e-4
    for power in range(1, 5):
        assert (u**power).mean().item() == pytest.approx(1 / (power + 1), abs=0.002)


def test_uniform_fills_its_buckets_evenly_within_and_between_images():
    u = uniform(keys_of(1000), 1000)
    for values in (u, u[:, 0], u[0]):
        count = torch.histc(values, bins=20, min=0, max=1)
        expected = values.numel() / 20
        chi_squared = ((count - expected) ** 2 / expected).sum().item()
        assert chi_squared < 50  # 19 degrees of freedom: one in ten thousand is above 50


def test_normal_has_the_moments_and_tails_of_a_standard_normal():
    z = normal(keys_of(400), 1000).double()
    for power, moment in [(1, 0), (2, 1), (3, 0), (4, 3)]:
        assert (z**power).mean().item() == pytest.approx(moment, abs=0.05 if power > 2 else 0.01)
    for bound in (0.5, 1.0, 2.0, 3.0):
        outside = (z.abs() > bound).double().mean().item()
        assert outside == pytest.approx(math.erfc(bound / math.sqrt(2)), abs=0.003)
    assert z.abs().max() < 6


def test_neighbours_within_and_between_images_are_uncorrelated():
    for sample in (uniform, normal):
        x = sample(keys_of(300), 300)
        assert abs(correlation(x[:, 1:], x[:, :-1])) < 0.015
        assert abs(correlation(x[1:], x[:-1])) < 0.015


def test_purposes_steps_and_seeds_give_unrelated_draws():
    keys = keys_of(200)
    others = [
        keys,
        keys_of(200, seed=1),
        fold(keys, "start"),
        fold(keys, "noise"),
        fold(keys, 0),
        fold(keys, 1),
        fold(fold(keys, 0), 1),
        fold(fold(keys, 1), 0),
    ]
    draws = [uniform(k, 200) for k in others]
    for a, b in itertools.combinations(draws, 2):
        assert abs(correlation(a, b)) < 0.025


def test_keys_of_many_images_steps_and_seeds_are_all_different():
    keys = [fold(image_keys(seed, torch.arange(1000)), step) for seed in range(5) for step in range(20)]
    every = torch.cat(keys)
    assert len(every.unique()) == len(every)


def test_fold_with_a_tensor_is_fold_with_each_of_its_numbers():
    keys, values = keys_of(4), torch.tensor([7, 0, -3, 2**40])
    got = fold(keys, values)
    for i in range(4):
        assert got[i] == fold(keys[i : i + 1], int(values[i]))[0]


def test_fold_tells_names_from_each_other_and_from_numbers():
    keys = keys_of(3)
    names = ["", "a", "b", "ab", "ba", "1", "mask (14, 14)", "mask (7, 7)", "größe"]
    folded = torch.cat([fold(keys, name) for name in names] + [fold(keys, value) for value in (0, 1, -1, 2**62)])
    assert len(folded.unique()) == len(folded)


def test_one_changed_bit_of_a_key_changes_half_of_the_bits():
    keys = keys_of(200)
    for bit in (0, 1, 31, 62):
        changed = fold(keys, "x") ^ fold(keys ^ (1 << bit), "x")
        share = sum(bin(v % 2**64).count("1") for v in changed.tolist()) / (200 * 64)
        assert share == pytest.approx(0.5, abs=0.02)


def test_negative_and_huge_seeds_work_and_differ():
    keys = [image_keys(seed, torch.arange(50)) for seed in SEEDS]
    assert len(torch.cat(keys).unique()) == 50 * len(SEEDS)
    for k in keys:
        assert k.dtype == torch.int64
        assert uniform(k, 100).mean().item() == pytest.approx(0.5, abs=0.02)


def test_image_keys_do_not_depend_on_the_integer_type_of_the_indices():
    assert torch.equal(image_keys(3, torch.arange(5, dtype=torch.int32)), keys_of(5, seed=3))


@pytest.mark.parametrize("n", [0, 1, 2, 100, 1000])
def test_permutation_holds_every_index_once(n):
    assert sorted(permutation(0, 0, n).tolist()) == list(range(n))


@pytest.mark.parametrize("seed", SEEDS)
def test_permutation_differs_by_epoch_and_repeats_for_the_same_one(seed):
    orders = [tuple(permutation(seed, epoch, 100).tolist()) for epoch in range(20)]
    assert len(set(orders)) == 20
    assert orders[7] == tuple(permutation(seed, 7, 100).tolist())


def test_permutation_differs_by_seed():
    assert len({tuple(permutation(seed, 0, 100).tolist()) for seed in SEEDS}) == len(SEEDS)


def test_permutation_puts_every_image_in_every_place_equally_often():
    orders = torch.stack([permutation(0, epoch, 6) for epoch in range(3000)])
    for place in range(6):
        share = torch.bincount(orders[:, place], minlength=6) / 3000
        assert ((share - 1 / 6).abs() < 0.03).all()  # four standard deviations
