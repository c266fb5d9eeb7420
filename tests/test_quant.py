"""maskaq.quant: grids hold exactly 2^b codes, floats say what integers say, LSQ learns with LSQ's gradients."""

import math
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

from maskaq.errors import RangeError, RecipeError
from maskaq.quant import grid, ranges
from maskaq.quant.layers import QuantConv2d, QuantLinear, QuantMatmul
from maskaq.quant.quantizers import QUANTIZERS, MinMax, Quantizer, Static, make_quantizer, quantizer
from maskaq.quant.site import Site
from maskaq.recipe.schema import Quantization

BITS = range(2, 9)
KINDS = [
    *((name, "weight", True, channels) for name in ("lsq", "static", "minmax") for channels in (6, None)),
    *((name, "activation", signed, None) for name in ("lsq", "static") for signed in (True, False)),
    *((name, "activation", True, 6) for name in ("lsq", "static")),
]
every_kind = pytest.mark.parametrize(("name", "role", "signed", "channels"), KINDS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def site(role="weight", bits=4, signed=True, channels=None, name="layer"):
    return Site(name, role, bits, signed, channels)


def ready(name, role="weight", bits=4, signed=True, channels=None, values=None, method="minmax"):
    """A quantizer whose range was set on these values."""
    made = make_quantizer(name, site(role, bits, signed, channels))
    made.set_range(samples(signed) if values is None else values, method)
    return made


def samples(signed=True, shape=(6, 40), seed=0):
    """Skewed values with a heavy tail, some exactly zero."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).pow(3) + 0.3
    x = x if signed else x.abs()
    x.view(-1)[::17] = 0
    return x


# --- the grid ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_a_code_range_has_exactly_two_to_the_bits_codes(bits):
    for signed in (True, False):
        low, high = grid.code_range(bits, signed)
        assert high - low + 1 == 2**bits
        assert low == (-(2 ** (bits - 1)) if signed else 0)


def test_a_learned_grid_is_a_length_and_a_code_with_scaled_gradients_straight_through():
    scale = torch.tensor([0.3, -0.2], requires_grad=True)
    zero_point = torch.tensor([2.6, 99.0], requires_grad=True)
    length, code = grid.learned_grid(scale, zero_point, 0, 7, 0.0123)
    assert torch.equal(length, scale.abs()) and code.tolist() == [3, 7]
    (length.sum() + 2 * code.sum()).backward()
    torch.testing.assert_close(scale.grad, torch.tensor([0.0123, -0.0123]))
    torch.testing.assert_close(zero_point.grad, torch.full((2,), 0.0246))


@every_kind
@pytest.mark.parametrize("bits", BITS)
def test_the_forward_pass_is_dequantize_of_quantize_exactly(name, role, signed, channels, bits):
    """With atol 0, on values inside and outside the range, and at other sizes than the range was set on."""
    made = ready(name, role, bits, signed, channels)
    for x in (samples(signed), samples(signed, (6, 7, 5), seed=1) * 3, samples(signed, (6, 1), seed=2)):
        codes = made.codes(x)
        assert codes.dtype == torch.int32 and codes.min() >= made.low and codes.max() <= made.high
        assert torch.equal(made.dequantize(codes), made(x))


@every_kind
@pytest.mark.parametrize("bits", BITS)
def test_there_are_at_most_two_to_the_bits_values(name, role, signed, channels, bits):
    out = ready(name, role, bits, signed, channels)(samples(signed, (6, 4000), seed=3) * 2)
    rows = out if channels else out.reshape(1, -1)
    assert max(len(row.unique()) for row in rows) <= 2**bits


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["lsq", "static", "minmax"])
def test_weights_have_two_to_the_bits_levels_half_a_step_around_each_value(name, bits):
    values = torch.linspace(-1, 1, 5001).repeat(2, 1)
    made = ready(name, "weight", bits, channels=2, values=values)
    step = made.scale.detach()[:, None]
    assert ((made(values) - values).abs() <= step / 2 * 1.001).all()  # no value loses more than half a step
    levels = [len(row.unique()) for row in made(values)]
    assert set(levels) <= {2**bits - 1, 2**bits}  # the lowest is for the very end of the range
    if name != "minmax":  # whose range would follow
        assert [len(row.unique()) for row in made(values * 2)] == [2**bits] * 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", ["lsq", "static"])
def test_softmax_outputs_get_the_unsigned_grid_with_all_levels_and_zero_point_zero(name, bits):
    probs = torch.linspace(0, 1, 5001)
    made = ready(name, "activation", bits, signed=False, values=probs)
    assert (made.low, made.high) == (0, 2**bits - 1)
    assert made.zero_point.item() == 0 and not isinstance(made.zero_point, nn.Parameter)
    assert torch.equal(made.codes(probs).unique(), torch.arange(2**bits, dtype=torch.int32))
    assert made(probs).min() == 0 and made(probs).max().item() == pytest.approx(1)


@every_kind
def test_zero_is_a_value_of_every_grid(name, role, signed, channels):
    for shift in (-5.0, 0.0, 5.0) if signed else (0.0, 5.0):
        made = ready(name, role, 3, signed, channels, values=samples(signed) + shift)
        zeros = torch.zeros(6, 4)
        assert torch.equal(made(zeros), zeros)


def test_zero_stays_a_value_whatever_the_zero_point_has_learned():
    made = ready("lsq", "activation", 4)
    for learned in (3.4, 3.6, -7.2, 99.0):
        made.zero_point.data.fill_(learned)
        assert made(torch.zeros(3)).abs().max() == 0


# --- LSQ's gradients ---------------------------------------------------------------------------------------------


def analytic(x, scale, zero_point, low, high, upstream):
    """Gradients of LSQ and LSQ+ to x, scale and zero point, written down; inside is where rounding hits a code."""
    codes = torch.round(x / scale) + zero_point
    inside = (codes >= low) & (codes <= high)
    clipped = codes.clamp(low, high) - zero_point
    to_scale = torch.where(inside, torch.round(x / scale) - x / scale, clipped)
    to_zero_point = torch.where(inside, torch.zeros_like(x), -scale.expand_as(x))
    return upstream * inside, upstream * to_scale, upstream * to_zero_point


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lsq_activation_gradients_are_the_papers(bits):
    made = ready("lsq", "activation", bits)
    made.zero_point.data += 0.3  # learned ones are no integers
    x, upstream = samples(shape=(5, 6, 7), seed=4).mul(4).requires_grad_(), torch.randn(5, 6, 7)
    made(x).backward(upstream)
    zero_point = made.zero_point.detach().round()
    expected = analytic(x.detach(), made.scale.detach(), zero_point, 0, 2**bits - 1, upstream)
    factor = 1 / math.sqrt(x.numel() * (2**bits - 1))
    torch.testing.assert_close(x.grad, expected[0])
    torch.testing.assert_close(made.scale.grad, expected[1].sum()[None] * factor, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(made.zero_point.grad, expected[2].sum()[None] * factor, rtol=1e-4, atol=1e-6)
    assert made.zero_point.grad.abs() > 0


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lsq_weight_gradients_are_the_papers_for_each_channel(bits):
    made = ready("lsq", "weight", bits, channels=6)
    made.scale.data *= 0.7  # so that some values are clipped
    x, upstream = samples().requires_grad_(), torch.randn(6, 40)
    made(x).backward(upstream)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    expected = analytic(x.detach(), made.scale.detach()[:, None], torch.zeros(6, 1), low, high, upstream)
    torch.testing.assert_close(x.grad, expected[0])
    factor = 1 / math.sqrt(40 * high)  # 40 values share a scale
    torch.testing.assert_close(made.scale.grad, expected[1].sum(dim=1) * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("low", "high", "zero_point"), [(0, 7, 3), (0, 7, 0), (-4, 3, 0), (0, 255, 200)])
def test_gradients_at_ties_just_beside_a_clamp_bound_follow_the_rounding(low, high, zero_point):
    """Halves round to even: whether a value half a step beyond the last code is inside depends on that code."""
    bounds = torch.tensor([low, high]) - zero_point
    x = (bounds[:, None] + torch.linspace(-2, 2, 33)).flatten().requires_grad_()
    scale, zero = torch.tensor(1.0, requires_grad=True), torch.tensor(float(zero_point), requires_grad=True)
    upstream = torch.randn(x.shape)
    grid.fake_quantize(x, scale, zero, low, high).backward(upstream)
    to_x, to_scale, to_zero_point = analytic(x.detach(), scale.detach(), zero.detach(), low, high, upstream)
    assert torch.equal(x.grad, to_x)
    torch.testing.assert_close(scale.grad, to_scale.sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(zero.grad, to_zero_point.sum(), rtol=1e-4, atol=1e-4)


def test_gradients_do_not_depend_on_how_values_lie_in_memory():
    x, upstream = samples(shape=(3, 4, 5)), torch.randn(3, 4, 5)
    found = []
    for lie in (lambda t: t, lambda t: t.mT.contiguous().mT):
        for lie_upstream in (lambda t: t, lambda t: t.mT.contiguous().mT):
            made, leaf = ready("lsq", "activation", 3), lie(x).clone().requires_grad_()
            made(leaf).backward(lie_upstream(upstream))
            found.append((leaf.grad, made.scale.grad, made.zero_point.grad))
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, same)


def test_bfloat16_values_get_the_codes_of_float32():
    values = torch.linspace(-3, 5, 4001).bfloat16()
    made = ready("static", "activation", 8, values=values.float())
    x = values.clone().requires_grad_()
    out = made(x)
    assert out.dtype == torch.bfloat16 and torch.equal(out, made(values.float()).bfloat16())
    out.sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_values_at_both_ends_of_the_grid_and_a_zero_point_there_still_learn():
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 1.6, -2.6], requires_grad=True)
    grid.fake_quantize(x, torch.tensor(1.0), 0, -2, 1).sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 1, 0, 0]
    made = ready("lsq", "activation", 4, values=torch.linspace(0, 1, 100))
    assert made.zero_point.item() == 0
    made(torch.tensor([-1.0])).sum().backward()
    assert made.zero_point.grad < 0


def test_lsq_on_softmax_outputs_learns_a_scale_and_no_zero_point():
    made = ready("lsq", "activation", 4, signed=False)
    assert [name for name, _ in made.named_parameters()] == ["scale"]
    made(samples(signed=False).requires_grad_()).sum().backward()
    assert made.scale.grad.abs() > 0


def test_a_scale_that_learned_to_be_negative_works_as_its_length():
    made = ready("lsq", "activation", 4)
    x = samples()
    positive = made(x)
    made.scale.data.neg_()
    assert torch.equal(made(x), positive)


def test_static_and_minmax_learn_nothing_and_pass_gradients_straight_through():
    for name in ("static", "minmax"):
        made = ready(name, "weight", 4, channels=6)
        assert not list(made.parameters())
        x = samples().mul(0.9).requires_grad_()
        made(x).sum().backward()
        assert (x.grad == 1).float().mean() > 0.9


# --- ranges ------------------------------------------------------------------------------------------------------


def error(made, x):
    return (made(x).detach() - x).square().mean(dim=1)


@pytest.mark.parametrize("bits", BITS)
def test_minmax_covers_every_value_to_half_a_step(bits):
    x = samples()
    activation = ready("static", "activation", bits, values=x)
    assert (activation(x) - x).abs().max() <= activation.scale * 1.001  # the zero point's rounding adds a half
    weight = ready("static", "weight", bits, channels=6, values=x)
    assert ((weight(x) - x).abs() <= weight.scale[:, None] / 2 * 1.001).all()


def test_percentile_leaves_out_the_outer_share_half_at_each_end():
    values = torch.randperm(1001)[None].float()
    low, high = ranges.percentile(values, 4, False, 0.9)
    assert (low.item(), high.item()) == (50, 950)
    low, high = ranges.percentile(values, 4, False, 1.0)
    assert (low.item(), high.item()) == (0, 1000)
    made = make_quantizer("static", site("activation", 8))
    made.set_range(torch.cat([torch.randn(9_998), torch.tensor([1e4, -1e4])]), "percentile", 0.999)
    assert made.scale * 255 < 20


@pytest.mark.parametrize("shape", [(32, 64, 96), (32, 197, 768), (8, 4, 16, 16), (7, 100_003), (5, 3)])
def test_a_sample_sees_every_place_of_every_axis_and_both_ends(shape):
    x = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    sample = ranges.sample(x, 1 << 14)
    places = torch.unravel_index(sample.long(), shape)
    for place, size in zip(places, shape, strict=True):
        assert len(place.unique()) == size or size > len(sample)
    assert len(sample) <= (1 << 14) + 2 and {0, x.numel() - 1} <= set(sample.long().tolist())


@pytest.mark.parametrize("bits", BITS)
def test_mse_is_never_worse_than_minmax(bits):
    cases = [("weight", True, 6), ("weight", True, None), ("activation", True, None), ("activation", False, None)]
    for role, signed, channels in cases:
        for seed in range(3):
            x = samples(signed, seed=seed)
            one, other = (ready("static", role, bits, signed, channels, x, method) for method in ("mse", "minmax"))
            errors = error(one, x), error(other, x)
            if not channels:
                errors = errors[0].mean(), errors[1].mean()
            assert (errors[0] <= errors[1] * (1 + 1e-6)).all()


def test_mse_clips_an_outlier_at_low_bits_and_each_channel_for_itself():
    x = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    x[0, 0] = 30
    scale = ready("static", "weight", 4, channels=2, values=x, method="mse").scale
    assert scale[0] < 0.5 * 60 / 15 and scale[1] <= 6 / 15


def test_mse_finds_the_best_bound_of_each_channel_in_steps_of_two_percent():
    x = torch.randn(3, 30_000).pow(3)  # more than one pass searches
    bounds = torch.linspace(1.0, 0.02, 50)[:, None] * x.abs().amax(dim=1)  # (S, C)
    steps = 2 * bounds / 15
    errors = torch.stack([((x / s[:, None]).round().clamp(-8, 7) * s[:, None] - x).square().mean(dim=1) for s in steps])
    expected = bounds.gather(0, errors.argmin(dim=0, keepdim=True))[0]
    low, high = ranges.mse(x, 4, True, 1.0)
    torch.testing.assert_close(high, expected)
    assert torch.equal(low, -high) and (high < 0.9 * x.abs().amax(dim=1)).all()


def squared_error(x, low, high, bits, weights=1.0):
    """Of the unsigned grid over [low, high], by hand."""
    scale = (high - low) / (2**bits - 1)
    zero = (-low / scale).round()
    return (((((x / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale - x).square() * weights).mean().item()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_mse_finds_a_range_as_good_as_any_of_a_fine_grid(bits):
    draw = torch.Generator().manual_seed(bits)
    x = torch.randn(1, 20_000, generator=draw)
    x[0, :20] *= torch.randn(20, generator=draw) * 40  # a few values far out, on both sides
    found = squared_error(x, *ranges.mse(x, bits, False, 1.0), bits)
    low, high = x.amin(), x.amax()
    tried = [
        squared_error(x, low * a, high * b, bits) for a in torch.logspace(0, -3, 40) for b in torch.logspace(0, -3, 40)
    ]
    assert found <= 1.02 * min(tried)


def test_relative_ranges_fit_the_many_tokens_and_not_the_longest():
    x = torch.randn(1, 100, 16, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 200  # one token in a hundred, as pretrained ViTs have them
    scales = {}
    for method in ("mse", "relative"):
        made = make_quantizer("static", replace(site("activation", 4), range=method))
        made.observed = []
        made(x)
        made.set_observed_range(1.0)
        made.observed = None
        scales[method] = made.scale.item()
        errors = (made(x) - x).square().mean(dim=-1) / x.square().mean(dim=-1)
        assert (errors.median() < 0.05) == (method == "relative")
    assert scales["relative"] < scales["mse"] / 20


def test_a_value_counts_by_the_vector_that_enters_the_dot_product():
    x = torch.randn(2, 3, 4, 5)
    for axis, size in ((-1, 5), (-2, 4)):
        weights = ranges.importance(x, axis)
        assert weights.shape == x.shape
        torch.testing.assert_close((weights * x.square()).sum(dim=axis), torch.full_like(x.sum(dim=axis), size))


@pytest.mark.parametrize("method", sorted(ranges.RANGES))
@pytest.mark.parametrize("value", [0.0, 2.5, -2.5, 1e-30])
def test_constant_tensors_give_numbers_and_gradients(method, value):
    for name, role, signed, channels in KINDS:
        constant = torch.full((6, 8), value if signed else abs(value))
        made = ready(name, role, 4, signed, channels, constant, method)
        if method != "lsq":  # its step is a multiple of the mean, which no extreme bounds
            assert (made(constant) - constant).abs().max() <= 0.17  # half a step of [-2.5, 2.5] at 4 bits
        x = torch.full((6, 8), 1e-3, requires_grad=True)  # and what passes there later may be no zero
        made(x).sum().backward()
        assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in made.parameters())


def test_lsq_starts_from_twice_the_mean_magnitude_over_the_root_of_the_largest_code():
    x = samples()
    weights, signed = ready("lsq", "weight", 4, True, 6, x, "lsq"), ready("lsq", "activation", 4, True, None, x, "lsq")
    for c in range(6):
        mean = sum(abs(v) for v in x[c].tolist()) / x.shape[1]
        assert weights.scale[c].item() == pytest.approx(2 * mean / math.sqrt(7), rel=1e-5)
    assert signed.scale.item() == pytest.approx(2 * x.abs().mean().item() / math.sqrt(7), rel=1e-5)
    assert signed.zero_point.item() == 8
    unsigned = ready("lsq", "activation", 4, False, None, x.abs(), "lsq")
    assert unsigned.scale.item() == pytest.approx(2 * x.abs().mean().item() / math.sqrt(15), rel=1e-5)


def test_the_best_percentile_is_the_one_of_least_error():
    x = torch.cat([torch.randn(1, 99_999, generator=torch.Generator().manual_seed(0)), torch.full((1, 1), 50.0)], dim=1)
    low, high = ranges.best_percentile(x, 4, False, 1.0)
    errors = {}
    for share in (0.999, 0.9999, 0.99999):
        ends = [x[0].sort().values[round((1 - share) * 99_999)], x[0].sort().values[-1 - round((1 - share) * 99_999)]]
        scale, zero = ranges.affine(*(end[None] for end in ends), 4)
        codes = (torch.round(x / scale) + zero).clamp(0, 15)
        errors[ends[1].item()] = ((codes - zero) * scale - x).square().mean().item()
    assert high.item() == min(errors, key=errors.get) < 50 and low.item() < 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_cannot_set_a_range(bad):
    values = samples()
    values[2, 3] = bad
    for method in ranges.RANGES:
        made = make_quantizer("lsq", site(name="blocks.0.attn.qkv.weight"))
        with pytest.raises(RangeError, match=r"blocks\.0\.attn\.qkv\.weight.*NaN or Inf"):
            made.set_range(values, method)
        assert not made.ready


# --- a quantizer's life ------------------------------------------------------------------------------------------


@every_kind
def test_a_quantizer_refuses_to_run_before_its_range_is_set(name, role, signed, channels):
    made = make_quantizer(name, site(role, 4, signed, channels, name="blocks.3.mlp.fc1.input"))
    for use in (made, made.codes):
        with pytest.raises(RangeError, match=r"blocks\.3\.mlp\.fc1\.input has no range yet.*init_ranges_"):
            use(samples(signed))
    assert made.scale.isnan().all()


@every_kind
def test_a_range_from_a_state_dict_is_as_good_as_one_that_was_set(name, role, signed, channels):
    first = ready(name, role, 4, signed, channels)
    second = make_quantizer(name, site(role, 4, signed, channels))
    second.load_state_dict(safetensors.torch.load(safetensors.torch.save(first.state_dict())))
    assert second.ready and torch.equal(second(samples(signed)), first(samples(signed)))
    gradients = []
    for made in (first, second):
        made(samples(signed).requires_grad_()).sum().backward()
        gradients.append([p.grad for p in made.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)  # its gradient scale came along
    unset = make_quantizer(name, site(role, 4, signed, channels)).state_dict()
    second.load_state_dict(unset)
    assert not second.ready


def test_a_range_does_not_follow_what_passes():
    for name in ("lsq", "static"):
        made = ready(name, "activation", 4)
        before = {key: value.clone() for key, value in made.state_dict().items()}
        made(samples() * 100)
        torch.testing.assert_close(made.state_dict(), before, rtol=0, atol=0)


def test_a_minmax_range_follows_its_weight():
    made = ready("minmax", "weight", 4, channels=6)
    for factor in (0.1, 10.0):
        x = samples() * factor
        assert torch.equal(made.dequantize(made.codes(x)), made(x))
        torch.testing.assert_close(made.scale, 2 * x.abs().amax(dim=1) / 15)


def test_minmax_codes_follow_a_weight_that_changed_since_the_last_forward():
    made = ready("minmax", "weight", 4, channels=6)
    made(samples())
    codes = made.codes(samples() * 5)
    assert torch.equal(made.dequantize(codes), made(samples() * 5))


@every_kind
def test_two_forward_passes_before_a_backward_pass(name, role, signed, channels):
    made, x = ready(name, role, 4, signed, channels), samples(signed).requires_grad_()
    (made(x) + made(x)).sum().backward()
    assert x.grad.isfinite().all() and x.grad.max() == 2


def test_an_observing_quantizer_passes_values_on_and_keeps_their_extremes():
    made = make_quantizer("static", site("activation"))
    made.observed = []
    x = torch.randn(7, 20_011)
    assert made(x) is x
    (kept,) = made.observed
    assert kept.numel() < x.numel() / 4 and kept.max() == x.max() and kept.min() == x.min()


# --- names and doors ---------------------------------------------------------------------------------------------


def test_an_unknown_quantizer_is_refused_with_the_nearest_name():
    with pytest.raises(
        RecipeError,
        match=r"unknown quantizer 'lqs'. Did you mean 'lsq'\? Known: log, lsq, lsq_free, minmax, minmax_full, static",
    ):
        make_quantizer("lqs", site())


def test_minmax_refuses_activations():
    with pytest.raises(RecipeError, match=r"MinMax cannot serve fc1\.input: it is for weights only"):
        make_quantizer("minmax", site("activation", name="fc1.input"))


@pytest.fixture
def registry():
    before = dict(QUANTIZERS)
    yield QUANTIZERS
    QUANTIZERS.clear()
    QUANTIZERS.update(before)


def test_a_new_quantizer_is_one_class_and_one_name(registry):
    @quantizer("power_of_two")
    class PowerOfTwo(Static):
        def _store(self, scale, zero_point):
            super()._store(2 ** scale.log2().ceil(), zero_point)

    made = ready("power_of_two", "weight", 4, channels=6)
    assert torch.equal(made.scale.log2(), made.scale.log2().round())
    assert torch.equal(made.dequantize(made.codes(samples())), made(samples()))


def test_a_name_is_given_once(registry):
    with pytest.raises(ValueError, match="'lsq' is already LSQ"):
        quantizer("lsq")(Static)


def test_registered_quantizers_are_the_recipes_defaults_and_more():
    assert {Quantization().weight, Quantization().activation} <= set(QUANTIZERS)
    assert QUANTIZERS["minmax"] is MinMax and all(issubclass(cls, Quantizer) for cls in QUANTIZERS.values())


# --- layers ------------------------------------------------------------------------------------------------------


def test_quantized_layers_compute_with_quantized_operands():
    weight, inputs = ready("static", "weight", 4, channels=6), ready("static", "activation", 4)
    linear = nn.Linear(40, 6)
    x = samples(shape=(3, 40), seed=1)
    layer = QuantLinear.from_float(linear, weight, inputs)
    weight.set_range(linear.weight.detach(), "minmax")
    torch.testing.assert_close(layer(x), inputs(x) @ weight(linear.weight).T + linear.bias)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    a, b = ready("static", "activation", 4, signed=False), ready("static", "activation", 4)
    left, right = samples(False, (2, 3, 4)), samples(True, (2, 4, 5))
    assert torch.equal(QuantMatmul.from_float(nn.Module.__new__(Plain), a, b)(left, right), a(left) @ b(right))


class Plain(nn.Module):
    signed = (False, True)


@pytest.mark.parametrize(
    "kwargs", [{}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2}, {"padding": 1, "padding_mode": "reflect"}]
)
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantized_convolution_keeps_every_setting(kwargs, bias):
    conv = nn.Conv2d(4, 6, 3, bias=bias, **kwargs)
    layer = QuantConv2d.from_float(conv, nn.Identity(), nn.Identity())
    x = torch.randn(2, 4, 9, 9)
    assert torch.equal(layer(x), conv(x))
