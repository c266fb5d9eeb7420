"""The two losses on a layer's attention maps in one pass over them: L_IH (Eq. 3) and -H_l of L_fb (Eqs. 5, 8-10).

The plain version is losses/attention.py. It keeps some ten tensors as large as the maps; here the maps are read once
forward and once backward, and their gradient is written once.

Forward   _rows_kernel    SSIM of the heads, query by query; R, the normalised head-mean rows
          _mean_kernel    sum of all off-diagonal similarities R R^T, without forming them
          _spread_kernel  sum of (similarity - mean)^2, and its gradient with respect to the head-mean map
          _finish_kernel  both losses of every image
Backward  _scores_kernel  gradient with respect to the scores

No atomics: partial sums are written out and added in a fixed order, so equal inputs give equal bits.
"""

# mypy: disable-error-code="no-untyped-def"
# (parameters of a kernel have no Python types)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

C1 = tl.constexpr(0.01**2)  # SSIM's constants for maps in [0, 1]
C2 = tl.constexpr(0.03**2)
LOG_2_PI_E = tl.constexpr(2.8378770664093453)


def fits(heads: int, patches: int) -> bool:
    """Whether the kernels can serve this shape; the plain functions serve every shape."""
    return (1 <= heads <= 16 and 1 <= patches <= 1024) or (16 < heads <= 32 and 1 <= patches <= 512)


def map_losses(scores: Tensor, windows: int, prefix: int, squared: bool) -> tuple[Tensor, Tensor]:
    """(B*W, H, T, T) maps -> head_similarity (head_similarity_squared if `squared`) and similarity_entropy, both (B,).

    Rows may be longer than T, up to the next multiple of 8: the rest is padding, and such rows are read and written
    fastest. The last axis must be contiguous.
    """
    similarity, entropy, *_ = _map_losses(scores, windows, prefix, squared)
    return similarity, entropy


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. Row r of a tile is head r % H of token r // H of a group of tokens: tensor cores want 16 rows, and one query
# of few heads would leave most of them empty. Products of all rows with all rows are masked to rows of one query.


@triton.jit
def _load_tile(
    scores, window, first_token, stride_window, stride_head, stride_row,
    TOKENS: tl.constexpr, PREFIX: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """-> scores (ROWS, COLUMNS) in fp32, token and head of each row, which rows are queries, which columns are keys."""
    row = tl.arange(0, ROWS)
    token, head = first_token + row // HEADS, row % HEADS
    inside = (row < GROUP * HEADS) & (token < TOKENS)
    query = inside & (token >= PREFIX)
    column = FIRST + tl.arange(0, COLUMNS)
    key = (column >= PREFIX) & (column < TOKENS)
    # Strides come in units of ALIGN elements: so the compiler knows that they are multiples of it.
    start = scores + window.to(tl.int64) * (stride_window * ALIGN)
    offset = head * (stride_head * ALIGN) + token * (stride_row * ALIGN)
    # The mask covers whole vectors: prefix and padding are read too, and left out by `key`.
    tile = tl.load(
        start + offset[:, None] + column[None, :], mask=query[:, None] & (column < WIDTH)[None, :], other=0.0
    )
    return tile.to(tl.float32), token, head, inside, query, key[None, :]


@triton.jit
def _centred(s, low, high, mean, key):
    """Rows brought to [0, 1], without their mean there; and 1 / (high - low)."""
    scale = 1.0 / (high - low + 1e-8)
    return tl.where(key, (s - low[:, None]) * scale[:, None] - mean[:, None], 0.0), scale


@triton.jit
def _ssim(
    centred, mean, query, PATCHES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr
):
    """SSIM = l t of all pairs of rows, (ROWS, ROWS), with what its gradient needs."""
    covariance = tl.dot(centred, tl.trans(centred), input_precision=PRECISION) * (1.0 / PATCHES)
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    diagonal = i == j
    variances = tl.where(diagonal, covariance, 0.0)
    variance_sum = tl.sum(variances, axis=1)[:, None] + tl.sum(variances, axis=0)[None, :] + C2
    # Adding a zero of the product's layout keeps the pairs there; in the layout of `mean` each would be held 8 times.
    zero = covariance * 0
    mean_i, mean_j = mean[:, None] + zero, mean[None, :] + zero
    mean_sum = mean_i * mean_i + mean_j * mean_j + C1
    per = 1.0 / (mean_sum * variance_sum)
    per_luminance = per * variance_sum
    per_structure = per * mean_sum * C2
    luminance = (2 * mean_i * mean_j + C1) * per_luminance
    structure = (covariance * (2 / C2) + 1) * per_structure
    pair = (i // HEADS == j // HEADS) & query[:, None] & query[None, :]
    return covariance, mean_i, mean_j, per_luminance, luminance, per_structure, structure, pair, diagonal


@triton.jit
def _rows_kernel(
    scores, rows, per_norm, ssim_sums, statistics, plane, stride_window, stride_head, stride_row,
    TOKENS: tl.constexpr, PREFIX: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROW_WIDTH: tl.constexpr,
    SQUARED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of SSIM over the head pairs of a group of queries; their R and 1 / ||m||."""
    GROUPS: tl.constexpr = (TOKENS + GROUP - 1) // GROUP
    PATCHES: tl.constexpr = TOKENS - PREFIX
    program = tl.program_id(0)
    window, first_token = program // GROUPS, program % GROUPS * GROUP
    s, _token, _head, inside, query, key = _load_tile(
        scores, window, first_token, stride_window, stride_head, stride_row,
        TOKENS, PREFIX, HEADS, GROUP, ROWS, COLUMNS, FIRST, WIDTH, ALIGN,
    )  # fmt: skip

    # L_IH (Eq. 3)
    low = tl.min(tl.where(key, s, float("inf")), axis=1)
    high = tl.max(tl.where(key, s, float("-inf")), axis=1)
    mean = tl.sum(tl.where(key, s - low[:, None], 0.0), axis=1) * (1.0 / PATCHES) / (high - low + 1e-8)
    centred, _scale = _centred(s, low, high, mean, key)
    _c, _i, _j, _pl, luminance, _ps, structure, pair, _d = _ssim(
        centred.to(DOT), mean, query, PATCHES, HEADS, ROWS, PRECISION
    )
    ssim = tl.where(pair, luminance * structure, 0.0)
    if SQUARED:
        ssim = ssim * ssim
    tl.store(ssim_sums + program, tl.sum(ssim))

    # What the backward pass needs of each row. One sum counts both kinds of ties: there are fewer than 2048 keys.
    ties = tl.where(s == low[:, None], 1.0, 0.0) + tl.where(s == high[:, None], 2048.0, 0.0)
    ties = tl.sum(tl.where(key, ties, 0.0), axis=1)
    row = statistics + (window * TOKENS + first_token) * HEADS + tl.arange(0, ROWS)
    tl.store(row, low, mask=inside)
    tl.store(row + plane, high, mask=inside)
    tl.store(row + 2 * plane, mean, mask=inside)
    tl.store(row + 3 * plane, ties, mask=inside)

    # R of L_fb (Eq. 5). The sum over heads is a product with ones; bf16 scores are exact in tf32.
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    ones = tl.where((j // HEADS == i) & (j < GROUP * HEADS), 1.0, 0.0)
    m = tl.dot(ones, tl.where(key, s, 0.0), input_precision=PRECISION) * (1.0 / HEADS)
    per = 1.0 / tl.maximum(tl.sqrt(tl.sum(m * m, axis=1)), 1e-12)
    patch = first_token - PREFIX + tl.arange(0, ROWS)
    valid = (tl.arange(0, ROWS) < GROUP) & (patch >= 0) & (patch < PATCHES)
    patch += window * PATCHES
    tl.store(per_norm + patch, per, mask=valid)
    column = tl.arange(0, COLUMNS)
    target = rows + patch.to(tl.int64)[:, None] * ROW_WIDTH + column[None, :]
    tl.store(target, m * per[:, None], mask=valid[:, None] & (column < ROW_WIDTH)[None, :])


@triton.jit
def _mean_kernel(
    rows, similarity_sums,
    PATCHES: tl.constexpr, ROW_WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Sum of off-diagonal similarities of a window, ||sum_q R_q||^2 - sum_q ||R_q||^2, over some of the columns."""
    window, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    column = part * PART + tl.arange(0, PART)
    start = rows + window.to(tl.int64) * (PATCHES * ROW_WIDTH)
    total = tl.zeros((BLOCK, PART), tl.float32)
    squares = tl.zeros((BLOCK, PART), tl.float32)
    for first in range(0, PATCHES, BLOCK):
        patch = first + tl.arange(0, BLOCK)
        mask = (patch < PATCHES)[:, None] & (column < ROW_WIDTH)[None, :]
        r = tl.load(start + patch[:, None] * ROW_WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        total += r
        squares += r * r
    over_patches = tl.sum(total, axis=0)
    tl.store(similarity_sums + tl.program_id(0), tl.sum(over_patches * over_patches) - tl.sum(squares))


@triton.jit
def _spread_kernel(
    rows, per_norm, similarity_sums, direction, spread_sums,
    PATCHES: tl.constexpr, COLUMNS: tl.constexpr, ROW_WIDTH: tl.constexpr, WINDOWS: tl.constexpr, PAIRS: tl.constexpr,
    SUMS: tl.constexpr, SUMS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum of (similarity - mean)^2 over some rows of a window (Eq. 8), and a fourth of its gradient with respect to m.

    V = sum of D^2, D = R R^T - mean off the diagonal: dV/dR = 4 D R, as D is symmetric and its mean is zero.
    """
    BLOCKS: tl.constexpr = (PATCHES + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    window, first = program // BLOCKS, program % BLOCKS * BLOCK
    part = tl.arange(0, SUMS_BLOCK)  # all windows of an image give one distribution, so one mean
    sums = tl.load(similarity_sums + window // WINDOWS * SUMS + part, mask=part < SUMS, other=0.0)
    mean = tl.sum(sums) * (1.0 / PAIRS)

    column = tl.arange(0, COLUMNS)
    start = rows + window.to(tl.int64) * (PATCHES * ROW_WIDTH)
    i = first + tl.arange(0, BLOCK)
    mask = (i < PATCHES)[:, None] & (column < ROW_WIDTH)[None, :]
    r_i = tl.load(start + i[:, None] * ROW_WIDTH + column[None, :], mask=mask, other=0.0)
    gradient = tl.zeros((BLOCK, COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK, BLOCK_J), tl.float32)
    for first_j in range(0, PATCHES, BLOCK_J):
        j = first_j + tl.arange(0, BLOCK_J)
        mask_j = (j < PATCHES)[:, None] & (column < ROW_WIDTH)[None, :]
        r_j = tl.load(start + j[:, None] * ROW_WIDTH + column[None, :], mask=mask_j, other=0.0)
        similarity = tl.dot(r_i, tl.trans(r_j), input_precision=PRECISION)
        off_diagonal = (i[:, None] != j[None, :]) & (i < PATCHES)[:, None] & (j < PATCHES)[None, :]
        d = tl.where(off_diagonal, similarity - mean, 0.0)
        squares += d * d
        gradient = tl.dot(d.to(r_j.dtype), r_j, gradient, input_precision=PRECISION)
    tl.store(spread_sums + program, tl.sum(squares))

    # Through R = m / max(||m||, 1e-12); the clamp has no gradient.
    per = tl.load(per_norm + window * PATCHES + i, mask=i < PATCHES, other=0.0)
    r_i = tl.load(start + i[:, None] * ROW_WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    along = tl.where(per < 0.99e12, tl.sum(gradient * r_i, axis=1), 0.0)
    target = direction + window.to(tl.int64) * (PATCHES * ROW_WIDTH) + i[:, None] * ROW_WIDTH + column[None, :]
    tl.store(target, (gradient - along[:, None] * r_i) * per[:, None], mask=mask)


@triton.jit
def _finish_kernel(
    ssim_sums, spread_sums, similarity, entropy, variance,
    PATCHES: tl.constexpr, HEADS: tl.constexpr, WINDOWS: tl.constexpr, PAIRS: tl.constexpr,
    SSIM_SUMS: tl.constexpr, SPREAD_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both losses of an image from its partial sums."""
    image = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SSIM_SUMS, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(ssim_sums + image * SSIM_SUMS + part, mask=part < SSIM_SUMS, other=0.0)
    tl.store(similarity + image, 1 - tl.sum(total) * (1.0 / (WINDOWS * PATCHES * HEADS * HEADS)))
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, SPREAD_SUMS, BLOCK):
        part = first + tl.arange(0, BLOCK)
        total += tl.load(spread_sums + image * SPREAD_SUMS + part, mask=part < SPREAD_SUMS, other=0.0)
    v = tl.sum(total) * (1.0 / PAIRS)
    tl.store(variance + image, v)
    tl.store(entropy + image, -0.5 * (tl.log(v + 1e-12) + LOG_2_PI_E))  # 1e-12: equal patches have no log


@triton.jit
def _scores_kernel(
    scores, direction, variance, statistics, g_similarity, g_entropy, d_scores,
    plane, stride_window, stride_head, stride_row,
    TOKENS: tl.constexpr, PREFIX: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROW_WIDTH: tl.constexpr,
    WINDOWS: tl.constexpr, PAIRS: tl.constexpr, D_STRIDE: tl.constexpr, D_WIDTH: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr, SQUARED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of both losses with respect to the scores of a group of tokens; zero at the prefix."""
    GROUPS: tl.constexpr = (TOKENS + GROUP - 1) // GROUP
    PATCHES: tl.constexpr = TOKENS - PREFIX
    program = tl.program_id(0)
    window, first_token = program // GROUPS, program % GROUPS * GROUP
    s, token, head, inside, query, key = _load_tile(
        scores, window, first_token, stride_window, stride_head, stride_row,
        TOKENS, PREFIX, HEADS, GROUP, ROWS, COLUMNS, FIRST, WIDTH, ALIGN,
    )  # fmt: skip
    row = statistics + (window * TOKENS + first_token) * HEADS + tl.arange(0, ROWS)
    low = tl.load(row, mask=query, other=0.0)
    high = tl.load(row + plane, mask=query, other=0.0)
    mean = tl.load(row + 2 * plane, mask=query, other=0.0)
    ties = tl.load(row + 3 * plane, mask=query, other=2049.0).to(tl.int32)
    centred, scale = _centred(s, low, high, mean, key)

    # Eq. 3, for loss = sum of w S with S = l t (w = 2 S for S^2). A pair counts twice; S_ii is 1.
    #   dS_ij/dC_ij = 2 l / (v_i + v_j + C2)    dS_ij/dv_i = -S / (v_i + v_j + C2)
    #   dS_ij/dmean_i = 2 t (mean_j - l mean_i) / (mean_i^2 + mean_j^2 + C1)
    # C = c c^T / K, so dc = (2 / K) M c with M = dS/dC + diag(sum_j 2 dS/dv). C2 M is kept, which fits into fp16.
    centred = centred.to(DOT)
    covariance, mean_i, mean_j, per_luminance, luminance, per_structure, structure, pair, diagonal = _ssim(
        centred, mean, query, PATCHES, HEADS, ROWS, PRECISION
    )
    ssim = luminance * structure
    weight = 2 * ssim if SQUARED else tl.full((ROWS, ROWS), 1.0, tl.float32)
    weight = tl.where(pair & ~diagonal, weight, 0.0)
    own = tl.sum(weight * ssim * per_structure, axis=1) * -2
    matrix = weight * 2 * luminance * per_structure + tl.where(diagonal, own[:, None], 0.0)
    d_mean = tl.sum(4 * weight * structure * per_luminance * (mean_j - luminance * mean_i), axis=1)
    mixed = tl.dot(matrix.to(DOT), centred, input_precision=PRECISION)  # M c

    # Through a = (s - low) / (high - low + 1e-8), where da/dlow and da/dhigh need the sums of da and of da * a over the
    # keys. M c has no mean, so they are known without going over the keys again.
    image = window // WINDOWS
    unit = -tl.load(g_similarity + image) * (1.0 / (WINDOWS * PATCHES * HEADS * HEADS))
    unit = tl.where(high > low, unit * scale, 0.0)  # a constant map: exactly zero, not 1e8 times a rounding error
    product = tl.sum(matrix * covariance, axis=1) * (2 / C2) + d_mean * mean
    at_low = unit * (product - d_mean) / (ties % 2048).to(tl.float32)
    at_high = unit * product / (ties // 2048).to(tl.float32)
    d_s = mixed * (unit * (2 / (PATCHES * C2)))[:, None] + (unit * d_mean * (1.0 / PATCHES))[:, None]
    # Ties share the gradient of their extreme, as in amin and amax.
    d_s += tl.where(s == low[:, None], at_low[:, None], 0.0) - tl.where(s == high[:, None], at_high[:, None], 0.0)

    # L_fb (Eqs. 5, 8-10): d(-0.5 log var) = -0.5 / var, and `direction` is a fourth of the gradient of pairs * var.
    factor = tl.load(g_entropy + image) * (-2.0 / (PAIRS * HEADS)) / (tl.load(variance + image) + 1e-12)
    column = tl.arange(0, COLUMNS)
    patch = (window * PATCHES + token - PREFIX).to(tl.int64)
    mask = query[:, None] & (column < ROW_WIDTH)[None, :]
    d_m = tl.load(direction + patch[:, None] * ROW_WIDTH + column[None, :], mask=mask, other=0.0)
    d_s = tl.where(query[:, None] & key, d_s + d_m.to(tl.float32) * factor, 0.0)

    row = (window.to(tl.int64) * HEADS + head) * TOKENS + token
    target = d_scores + row[:, None] * D_STRIDE
    column += FIRST
    tl.store(target + column[None, :], d_s, mask=inside[:, None] & (column < D_WIDTH)[None, :])
    if FIRST > 0:
        before = tl.arange(0, PREFIX_BLOCK)
        zeros = tl.zeros((ROWS, PREFIX_BLOCK), tl.float32)
        tl.store(target + before[None, :], zeros, mask=inside[:, None] & (before < FIRST)[None, :])
    if FIRST + COLUMNS < D_WIDTH:
        after = FIRST + COLUMNS + tl.arange(0, 8)
        rest = tl.zeros((ROWS, 8), tl.float32)
        tl.store(target + after[None, :], rest, mask=inside[:, None] & (after < D_WIDTH)[None, :])


# ---------------------------------------------------------------------------------------------------------------------
# Launches.


class _Plan:
    """Block sizes for a shape, and what of it the kernels are told."""

    def __init__(self, scores: Tensor, windows: int, prefix: int) -> None:
        self.count, self.heads, tokens, width = scores.shape
        self.windows, self.patches = windows, tokens - prefix
        self.images = self.count // windows
        self.pairs = max(1, windows * self.patches * (self.patches - 1))  # a window of one patch has none
        self.columns, first, self.row_width = _columns(tokens, prefix)
        rows = 16 if self.heads <= 16 else 32
        group = rows // self.heads
        self.groups = triton.cdiv(tokens, group)
        # Rows of whole 16-byte vectors are read as such; the vector across the end of a row lies in its padding.
        *strides, last = scores.stride()
        assert last == 1 and fits(self.heads, self.patches) and tokens <= width <= _up(tokens, 8)
        align = 8 if all(x % 8 == 0 for x in strides) and strides[2] >= tokens else 1
        self.strides = [x // align for x in strides]
        # fp16 has as many digits as tf32, and all that it has to hold is between -1 and 1 or scaled to fit.
        self.exact = scores.dtype == torch.float32
        # Three products of tf32 are as good as fp32, but want more shared memory than large tiles leave.
        self.precision = "tf32x3" if self.exact and rows * self.columns <= 8192 else "tf32"
        self.tile: dict[str, Any] = {
            "TOKENS": tokens, "PREFIX": prefix, "HEADS": self.heads, "GROUP": group, "ROWS": rows,
            "COLUMNS": self.columns, "FIRST": first, "WIDTH": _up(tokens, align), "ALIGN": align,
            "ROW_WIDTH": self.row_width, "DOT": tl.float32 if self.exact else tl.float16, "PRECISION": self.precision,
            "num_warps": min(16, max(1, rows * self.columns // 1024)),
        }  # fmt: skip


def _columns(tokens: int, prefix: int) -> tuple[int, int, int]:
    """Columns of a tile, the first of them in the scores, and the columns of R in memory."""
    columns = max(16, triton.next_power_of_2(tokens - prefix))
    # Whole rows keep their alignment, so the prefix is read along, unless it would double the tile.
    first = 0 if tokens <= columns else prefix
    return columns, first, _up(tokens - first, 16)


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


@torch.library.custom_op("maskaq::map_losses", mutates_args=())
def _map_losses(
    scores: Tensor, windows: int, prefix: int, squared: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> both losses; for the backward pass the direction of dm, the variance, and low, high, mean, ties of rows."""
    p = _Plan(scores, windows, prefix)
    similarity, entropy, direction, variance, statistics = _outputs(scores, windows, prefix)
    f32: dict[str, Any] = {"device": scores.device, "dtype": torch.float32}
    rows = torch.empty_like(direction, dtype=torch.float32 if p.exact else torch.float16)
    per_norm = torch.empty(p.count * p.patches, **f32)
    ssim_sums = torch.empty(p.count * p.groups, **f32)
    part = min(64, p.columns)
    parts = p.columns // part
    similarity_sums = torch.empty(p.count * parts, **f32)
    block, block_j, warps = _spread_block(p.columns, p.exact)
    blocks = triton.cdiv(p.patches, block)
    spread_sums = torch.empty(p.count * blocks, **f32)
    with torch.cuda.device_of(scores):
        _rows_kernel[(p.count * p.groups,)](
            scores, rows, per_norm, ssim_sums, statistics, statistics[0].numel(), *p.strides, SQUARED=squared, **p.tile
        )
        _mean_kernel[(p.count * parts,)](
            rows, similarity_sums, PATCHES=p.patches, ROW_WIDTH=p.row_width, PARTS=parts, BLOCK=16, PART=part
        )
        _spread_kernel[(p.count * blocks,)](
            rows, per_norm, similarity_sums, direction, spread_sums,
            PATCHES=p.patches, COLUMNS=p.columns, ROW_WIDTH=p.row_width, WINDOWS=windows, PAIRS=p.pairs,
            SUMS=windows * parts, SUMS_BLOCK=triton.next_power_of_2(windows * parts), BLOCK=block, BLOCK_J=block_j,
            PRECISION=p.precision, num_warps=warps, num_stages=1,
        )  # fmt: skip
        _finish_kernel[(p.images,)](
            ssim_sums, spread_sums, similarity, entropy, variance,
            PATCHES=p.patches, HEADS=p.heads, WINDOWS=windows, PAIRS=p.pairs,
            SSIM_SUMS=windows * p.groups, SPREAD_SUMS=windows * blocks, BLOCK=128, num_warps=1,
        )  # fmt: skip
    return similarity, entropy, direction, variance, statistics


def _spread_block(columns: int, exact: bool) -> tuple[int, int, int]:
    """Rows of R that _spread_kernel keeps, rows that it goes through at a time, and its warps: without spilling."""
    if columns <= 64:
        return (32, 32, 4) if exact else (64, 64, 4)
    if columns <= 256:
        return (16, 16, 8) if exact else (64, 32, 4)
    return 16, 16, 8


@_map_losses.register_fake
def _outputs(scores: Tensor, windows: int, prefix: int, squared: bool = False) -> tuple[Tensor, ...]:
    count, heads, tokens, _ = scores.shape
    direction = scores.new_empty((count, tokens - prefix, _columns(tokens, prefix)[2]))
    similarity, entropy, variance = (scores.new_empty(count // windows, dtype=torch.float32) for _ in range(3))
    statistics = scores.new_empty((4, count, tokens, heads), dtype=torch.float32)
    return similarity, entropy, direction, variance, statistics


@torch.library.custom_op("maskaq::map_losses_backward", mutates_args=())
def _map_losses_backward(
    scores: Tensor, direction: Tensor, variance: Tensor, statistics: Tensor, g_similarity: Tensor, g_entropy: Tensor,
    windows: int, prefix: int, squared: bool,
) -> Tensor:  # fmt: skip
    p = _Plan(scores, windows, prefix)
    d_scores = _like(scores)
    stride = d_scores.stride(2)
    with torch.cuda.device_of(scores):
        _scores_kernel[(p.count * p.groups,)](
            scores, direction, variance, statistics, g_similarity.contiguous(), g_entropy.contiguous(), d_scores,
            statistics[0].numel(), *p.strides,
            WINDOWS=windows, PAIRS=p.pairs, D_STRIDE=stride, D_WIDTH=scores.shape[3],
            PREFIX_BLOCK=triton.next_power_of_2(max(1, prefix)), SQUARED=squared,
            **p.tile | {"num_warps": max(1, p.tile["num_warps"] // 4)},  # no reductions: small groups of threads do
        )  # fmt: skip
    return d_scores


@_map_losses_backward.register_fake
def _like(scores: Tensor, *rest: object, **named: object) -> Tensor:
    return scores.new_empty(scores.shape)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    scores, ctx.windows, ctx.prefix, ctx.squared = inputs
    saved = output[2:]
    ctx.save_for_backward(scores, *saved)
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, g_similarity: Tensor | None, g_entropy: Tensor | None, *_: None) -> tuple:
    scores, direction, variance, statistics = ctx.saved_tensors
    gradients = [torch.zeros_like(variance) if g is None else g for g in (g_similarity, g_entropy)]
    d_scores = _map_losses_backward(
        scores, direction, variance, statistics, *gradients, ctx.windows, ctx.prefix, ctx.squared
    )
    return d_scores, None, None, None


_map_losses.register_autograd(_backward, setup_context=_save)
