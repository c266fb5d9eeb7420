"""The fused losses of the maps against the plain ones, in the interpreter's process that test_engine.py starts."""

import pytest
import torch
from helpers import INTERPRETED, inside

from maskaq.losses import attention

pytest.importorskip("triton", reason="the kernels need triton")

if INTERPRETED:
    from maskaq.engine.kernels import maps as kernels


def make_scores(count, heads, tokens, padding=0, ties=False, dtype=torch.float32):
    """Maps whose rows are followed by NaN, which nobody may see."""
    torch.manual_seed(0)
    shape = (count, heads, tokens, tokens)
    values = torch.randint(0, 4, shape).float() if ties else (2 * torch.randn(shape)).softmax(dim=-1)
    rows = torch.full((*shape[:3], tokens + padding), float("nan")).to(dtype)
    rows[..., :tokens] = values
    return rows.requires_grad_()


def plain(scores, windows, prefix, squared):
    maps = scores.unflatten(0, (-1, windows))[..., prefix:, prefix:]
    similarity = attention.head_similarity_squared if squared else attention.head_similarity
    return similarity(maps), attention.similarity_entropy(maps)


def compare(scores, windows, prefix, squared, which=(True, True), value=1e-5, gradient=1e-4):
    """Values and gradients; `which` of the two losses are gone back from. The plain ones are in double precision."""
    tokens = scores.shape[2]
    exact = scores.detach()[..., :tokens].double().contiguous().requires_grad_()
    got, want = kernels.map_losses(scores, windows, prefix, squared), plain(exact, windows, prefix, squared)
    images = len(scores) // windows
    weights = torch.tensor([[1.0], [0.02]]) * (1 + torch.rand(2, images))
    for x, y in zip(got, want, strict=True):
        assert x.shape == (images,) and x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=value, atol=value)
    for losses in (got, want):
        sum((x * w).sum() for x, w, used in zip(losses, weights, which, strict=True) if used).backward()
    assert scores.grad.dtype == scores.dtype
    error = (scores.grad[..., :tokens].double() - exact.grad).norm()
    assert error <= gradient * exact.grad.norm() + 1e-12, f"relative error of the gradient {error / exact.grad.norm()}"
    assert not scores.grad[..., :prefix, :].any() and not scores.grad[..., :prefix].any()
    assert not scores.grad[..., tokens:].any(), "the padding is zero"


@inside
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize(
    "heads, windows, prefix", [(1, 1, 0), (1, 4, 1), (2, 4, 0), (3, 1, 1), (3, 4, 1), (6, 1, 2), (12, 1, 1), (12, 2, 0)]
)
def test_equals_the_plain_losses(heads, windows, prefix, squared):
    compare(make_scores(2 * windows, heads, 7 + prefix), windows, prefix, squared)


@inside
@pytest.mark.parametrize("tokens, padding", [(16, 0), (17, 0), (18, 6), (35, 5), (13, 3)])
def test_sizes_and_padded_rows(tokens, padding):
    """18 tokens with two in front fill a tile without them, 17 with one too; 40 and 24 are rows of whole vectors."""
    compare(make_scores(1, 3, tokens, padding), 1, 2 if tokens == 18 else 1, False)


@inside
def test_more_rows_than_a_block():
    compare(make_scores(1, 2, 70, 2), 1, 1, False)


@inside
@pytest.mark.parametrize("squared", [False, True])
def test_ties_share_the_gradient(squared):
    compare(make_scores(2, 3, 9, ties=True), 1, 1, squared)


@inside
@pytest.mark.parametrize("which", [(True, False), (False, True)])
def test_one_loss_alone(which):
    compare(make_scores(4, 3, 9), 2, 1, False, which)


@inside
def test_a_constant_map_gets_no_gradient_from_the_head_similarity():
    scores = make_scores(1, 3, 9).detach()
    scores[:, 0] = 1 / 9
    scores.requires_grad_()
    kernels.map_losses(scores, 1, 0, False)[0].sum().backward()
    assert not scores.grad[:, 0].any() and scores.grad[:, 1:].isfinite().all() and scores.grad[:, 1:].any()


@inside
@pytest.mark.parametrize("heads, squared", [(3, False), (6, True), (12, False)])
def test_bf16(heads, squared):
    compare(make_scores(2, heads, 21, 3, dtype=torch.bfloat16), 1, 1, squared, value=1e-3, gradient=1e-2)


@inside
def test_other_strides():
    scores = make_scores(2, 3, 9).detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    compare(scores, 1, 1, False)


@inside
def test_is_a_well_formed_operator():
    scores = make_scores(2, 3, 8)
    torch.library.opcheck(kernels._map_losses, (scores, 2, 1, False))
    padded = make_scores(2, 2, 13, 3).detach()
    _, _, *saved = kernels._map_losses(padded, 1, 1, True)
    arguments = (padded, *saved, torch.ones(2), torch.ones(2), 1, 1, True)
    torch.library.opcheck(kernels._map_losses_backward, arguments, test_utils=("test_schema", "test_faketensor"))
    assert kernels._map_losses_backward(*arguments).shape == padded.shape


@inside
def test_fits():
    assert kernels.fits(3, 196) and kernels.fits(16, 1024) and kernels.fits(32, 512)
    assert not kernels.fits(33, 196) and not kernels.fits(3, 1025) and not kernels.fits(32, 1024)
