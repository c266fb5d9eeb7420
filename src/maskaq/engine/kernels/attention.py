"""Attention in one kernel each way: scores, softmax, fake-quantized probabilities and head outputs.

It equals the plain ops of `maskaq.models` and `maskaq.quant.grid`. One program serves one (image, head): its keys and
values stay in shared memory while blocks of queries pass by, so probabilities never reach global memory, and scores
only where the caller asks for them. The backward makes the probabilities again from q, k and the saved log-sum-exp.

Sizes of tiles are powers of two. So 257 tokens, the class token and 16 x 16 patches, are a tile of 256 keys and one of
16 (REST) beside it, where one of 512 would double the work and fill the registers.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of kernels are Triton's values, which have no types to write down)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)  # exp2 is the instruction that the hardware has
ROUNDER: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: floats there are integers, and sums round half to even

LARGEST_TILE = 256  # keys: see the module's docstring
ROW_ALIGNMENT = 8  # 16-bit values in one 16-byte access: score rows are padded to a multiple of it


def fits(tokens: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels serve this shape well; they also take float32, exactly but slowly (tests do)."""
    if dtype not in (torch.bfloat16, torch.float16) or tokens < 2 or head_dim < 1:
        return False
    block, rest = _tiles(tokens)
    return rest <= 32 and block * _block(head_dim) <= LARGEST_TILE * 64  # registers hold dk and dv


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    p_scale: Tensor | None = None,
    p_top: int = 0,
    keep_scores: bool = False,
    readers: tuple[int, int] = (0, 0),
    p_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """fake_quantize(softmax(q @ k^T * scale + bias)) @ v, the unscaled scores q @ k^T, and the mean of some score rows.

    Args:
        q, k, v: (B, H, T, D); any strides, best with a contiguous last axis.
        scale: factor of the scores before the softmax.
        bias: (W, H, T, T) added to the scaled scores, where row b of the batch uses bias[b % W].
        p_scale: step of the unsigned grid of the probabilities, one or one for each head; None leaves them as they are.
        p_top: the largest code of that grid.
        keep_scores: whether the scores are wanted; else an empty tensor stands for them.
        readers: first and number of the queries whose rows are averaged; of none, an empty tensor stands for the mean.
        p_table: (p_top + 1,) levels that stand for the codes, float32; None: the codes themselves.

    Returns:
        heads (B, H, T, D), whose memory is (B, T, H, D), and scores (B, H, T, P), whose rows are padded with zeros
        from T to P, a multiple of 8, both with the dtype of q; and the mean of the readers' rows (B, H, T), float32.
        All are differentiable.
    """
    if bias is not None:  # whole aligned rows: else the kernels read it value by value
        bias = F.pad(bias, (0, _pitch(bias.shape[-1]) - bias.shape[-1]))
    heads, scores, received, _ = torch.ops.maskaq.attention(
        q, k, v, scale, bias, p_scale, p_top, p_table, keep_scores, *readers
    )
    return heads, scores, received


# --------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _rows(ptr, stride, first, T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows first .. first + BLOCK of a (T, D) matrix, zero outside of it."""
    rows = first + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < T)[:, None] & (columns < D)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _round(x):
    """Half to even, as torch.round; for 0 <= x < 2^22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _share(queries, FIRST_READER: tl.constexpr, READERS: tl.constexpr):
    """What each query's row counts in the mean of the readers' rows."""
    return tl.where((queries >= FIRST_READER) & (queries < FIRST_READER + READERS), 1.0 / READERS, 0.0)


@triton.jit
def _logits(q, k, queries, keys, scores_ptr, bias_ptr, scale, T: tl.constexpr, PITCH: tl.constexpr):
    """What the softmax takes, to base 2, of some queries (rows) and keys; the scores are written on the way."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if scores_ptr is not None:
        # The padding is written too: whole aligned 16-byte pieces, and zeros for whoever reads over the end.
        tl.store(
            scores_ptr + queries[:, None] * PITCH + keys[None, :],
            scores.to(scores_ptr.dtype.element_ty),
            mask=(queries < T)[:, None] & (keys < PITCH)[None, :],
        )
    logits = scores * (scale * LOG2_E)
    if bias_ptr is not None:
        bias = tl.load(
            bias_ptr + queries[:, None] * PITCH + keys[None, :],
            mask=(queries < T)[:, None] & (keys < PITCH)[None, :],
            other=0.0,
        )
        logits += bias.to(tl.float32) * LOG2_E
    return tl.where((keys < T)[None, :], logits, float("-inf"))


@triton.jit
def _normalized(probs, total, p_scale, p_table_ptr, P_TOP: tl.constexpr):
    """Rows divided by their total, and on the grid where there is one."""
    if p_scale is not None:
        steps = probs * (1.0 / (total * p_scale))[:, None]
        codes = _round(tl.minimum(steps, P_TOP * 1.0))
        if p_table_ptr is not None:
            codes = tl.load(p_table_ptr + codes.to(tl.int32))
        return codes * p_scale
    else:
        return probs * (1.0 / total)[:, None]


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,  # or None
    p_scale_ptr,  # or None
    p_table_ptr,  # or None
    heads_ptr,
    scores_ptr,  # or None
    received_ptr,  # or None
    lse_ptr,
    scale,
    p_scale_head,
    head_count,
    window_count,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    T: tl.constexpr,
    D: tl.constexpr,
    PITCH: tl.constexpr,
    P_TOP: tl.constexpr,
    FIRST_READER: tl.constexpr,
    READERS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)  # offsets can pass 2^31
    batch = pair // head_count
    head = pair % head_count
    q_ptr += batch * q_batch + head * q_head
    heads_ptr += batch * head_count * (T * D) + head * D
    keys = tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)
    k = _rows(k_ptr + batch * k_batch + head * k_head, k_token, 0, T, D, BLOCK_T, BLOCK_D)
    v = _rows(v_ptr + batch * v_batch + head * v_head, v_token, 0, T, D, BLOCK_T, BLOCK_D)
    if REST:
        rest_keys = BLOCK_T + tl.arange(0, REST)
        rest_k = _rows(k_ptr + batch * k_batch + head * k_head, k_token, BLOCK_T, T, D, REST, BLOCK_D)
        rest_v = _rows(v_ptr + batch * v_batch + head * v_head, v_token, BLOCK_T, T, D, REST, BLOCK_D)
    p_scale = None
    if p_scale_ptr is not None:
        p_scale = tl.load(p_scale_ptr + head * p_scale_head)
    if bias_ptr is not None:
        bias_ptr += (batch % window_count * head_count + head) * (T * PITCH)
    if scores_ptr is not None:
        scores_ptr += pair * (T * PITCH)
    if received_ptr is not None:  # the mean of rows of q @ k^T is a mean of q times k^T
        everyone = _rows(q_ptr, q_token, 0, T, D, BLOCK_T, BLOCK_D).to(tl.float32)
        reader = tl.sum(everyone * _share(keys, FIRST_READER, READERS)[:, None], 0)
        if REST:
            others = _rows(q_ptr, q_token, BLOCK_T, T, D, REST, BLOCK_D).to(tl.float32)
            reader += tl.sum(others * _share(rest_keys, FIRST_READER, READERS)[:, None], 0)
            received = tl.sum(rest_k.to(tl.float32) * reader[None, :], 1)
            tl.store(received_ptr + pair * T + rest_keys, received, mask=rest_keys < T)
        received = tl.sum(k.to(tl.float32) * reader[None, :], 1)
        tl.store(received_ptr + pair * T + keys, received, mask=keys < T)

    for first in range(0, T, BLOCK_Q):
        queries = first + tl.arange(0, BLOCK_Q)
        q = _rows(q_ptr, q_token, first, T, D, BLOCK_Q, BLOCK_D)
        logits = _logits(q, k, queries, keys, scores_ptr, bias_ptr, scale, T, PITCH)
        largest = tl.max(logits, 1)
        if REST:
            rest_logits = _logits(q, rest_k, queries, rest_keys, scores_ptr, bias_ptr, scale, T, PITCH)
            largest = tl.maximum(largest, tl.max(rest_logits, 1))
        probs = tl.exp2(logits - largest[:, None])
        total = tl.sum(probs, 1)
        if REST:
            rest_probs = tl.exp2(rest_logits - largest[:, None])
            total += tl.sum(rest_probs, 1)
        tl.store(lse_ptr + pair * T + queries, largest + tl.log2(total), mask=queries < T)
        probs = _normalized(probs, total, p_scale, p_table_ptr, P_TOP)
        heads = tl.dot(probs.to(v.dtype), v, input_precision="ieee")
        if REST:
            rest_probs = _normalized(rest_probs, total, p_scale, p_table_ptr, P_TOP)
            heads = tl.dot(rest_probs.to(v.dtype), rest_v, heads, input_precision="ieee")
        tl.store(
            heads_ptr + queries[:, None] * (head_count * D) + dims[None, :],
            heads.to(heads_ptr.dtype.element_ty),
            mask=(queries < T)[:, None] & (dims < D)[None, :],
        )


@triton.jit
def _again(
    q,
    k,
    v,
    queries,
    keys,
    lse,
    d_heads,
    bias_ptr,
    scale,
    p_scale,
    p_table_ptr,
    T: tl.constexpr,
    PITCH: tl.constexpr,
    P_TOP: tl.constexpr,
):
    """Probabilities of some keys (rows) and queries, the same on their grid, the gradient of the former, and the
    gradient of the grid's step times that step, value by value."""
    logits = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2_E)  # (BLOCK_T, BLOCK_Q)
    if bias_ptr is not None:
        bias = tl.load(
            bias_ptr + queries[None, :] * PITCH + keys[:, None],
            mask=(queries < T)[None, :] & (keys < PITCH)[:, None],
            other=0.0,
        )
        logits += bias.to(tl.float32) * LOG2_E
    probs = tl.exp2(logits - lse[None, :])
    probs = tl.where((keys < T)[:, None], probs, 0.0)
    d_probs = tl.dot(v, tl.trans(d_heads), input_precision="ieee")
    quantized = probs
    d_steps = probs
    if p_scale is not None:
        codes = _round(tl.minimum(probs * (1.0 / p_scale), P_TOP + 1.0))
        quantized = tl.minimum(codes, P_TOP * 1.0)
        if p_table_ptr is not None:
            quantized = tl.load(p_table_ptr + quantized.to(tl.int32))
        quantized = quantized * p_scale
        d_quantized = d_probs
        d_probs = tl.where(codes <= P_TOP, d_probs, 0.0)  # straight through inside the grid, nothing outside
        d_steps = d_quantized * quantized - probs * d_probs  # inside by (code - steps), outside by P_TOP
    return probs, quantized, d_probs, d_steps


@triton.jit
def _d_scores(probs, d_probs, mean, queries, keys, d_logits_ptr, scale, T: tl.constexpr, PITCH: tl.constexpr):
    """The gradient of the scores through the softmax; that of the logits is written on the way."""
    d_logits = probs * (d_probs - mean[None, :])
    if d_logits_ptr is not None:
        tl.store(
            d_logits_ptr + queries[None, :] * PITCH + keys[:, None],
            d_logits.to(d_logits_ptr.dtype.element_ty),
            mask=(queries < T)[None, :] & (keys < PITCH)[:, None],
        )
    return d_logits * scale


@triton.jit
def _with_given(
    d_scores,
    queries,
    keys,
    d_scores_ptr,
    d_received,
    D_SCORES_TOKEN: tl.constexpr,
    D_SCORES_READ: tl.constexpr,
    T: tl.constexpr,
    FIRST_READER: tl.constexpr,
    READERS: tl.constexpr,
):
    """Plus the gradients that came for the scores themselves and for the mean of the readers' rows."""
    if d_scores_ptr is not None:
        given = tl.load(
            d_scores_ptr + queries[None, :] * D_SCORES_TOKEN + keys[:, None],
            mask=(queries < T)[None, :] & (keys < D_SCORES_READ)[:, None],
            other=0.0,
        )
        if D_SCORES_READ > T:  # the padding can hold anything
            given = tl.where((keys < T)[:, None], given, 0.0)
        d_scores += given
    if d_received is not None:
        d_scores += d_received[:, None] * _share(queries, FIRST_READER, READERS)[None, :]
    return d_scores


@triton.jit
def _backward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,  # or None
    p_scale_ptr,  # or None
    p_table_ptr,  # or None
    lse_ptr,
    d_heads_ptr,  # or None
    d_scores_ptr,  # or None
    d_received_ptr,  # or None
    d_qkv_ptr,
    d_logits_ptr,  # or None
    d_p_scale_ptr,  # or None
    scale,
    p_scale_head,
    head_count,
    window_count,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    d_heads_batch,
    d_heads_head,
    d_heads_token,
    D_SCORES_BATCH: tl.constexpr,  # constants, so that the compiler sees how far rows are aligned
    D_SCORES_HEAD: tl.constexpr,
    D_SCORES_TOKEN: tl.constexpr,
    D_SCORES_READ: tl.constexpr,  # readable values of a row
    T: tl.constexpr,
    D: tl.constexpr,
    PITCH: tl.constexpr,
    P_TOP: tl.constexpr,
    FIRST_READER: tl.constexpr,
    READERS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
):
    # All tiles are (keys, queries): so probabilities and their gradients are the left operands of the products for
    # dk and dv, which come from registers, and a block of queries can be smaller than the tensor cores' 64 rows.
    pair = tl.program_id(0).to(tl.int64)
    batch = pair // head_count
    head = pair % head_count
    q_ptr += batch * q_batch + head * q_head
    d_qkv_ptr += batch * head_count * (T * 3 * D) + head * D
    d_qkv_token = head_count * (3 * D)
    keys = tl.arange(0, BLOCK_T)
    dims = tl.arange(0, BLOCK_D)
    k = _rows(k_ptr + batch * k_batch + head * k_head, k_token, 0, T, D, BLOCK_T, BLOCK_D)
    dk = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    if REST:
        rest_keys = BLOCK_T + tl.arange(0, REST)
        rest_k = _rows(k_ptr + batch * k_batch + head * k_head, k_token, BLOCK_T, T, D, REST, BLOCK_D)
        rest_dk = tl.zeros((REST, BLOCK_D), tl.float32)
        rest_dv = tl.zeros((REST, BLOCK_D), tl.float32)
    if d_heads_ptr is not None:
        v = _rows(v_ptr + batch * v_batch + head * v_head, v_token, 0, T, D, BLOCK_T, BLOCK_D)
        if REST:
            rest_v = _rows(v_ptr + batch * v_batch + head * v_head, v_token, BLOCK_T, T, D, REST, BLOCK_D)
        d_heads_ptr += batch * d_heads_batch + head * d_heads_head
    p_scale = None
    if p_scale_ptr is not None:
        p_scale = tl.load(p_scale_ptr + head * p_scale_head)
    if bias_ptr is not None:
        bias_ptr += (batch % window_count * head_count + head) * (T * PITCH)
    if d_logits_ptr is not None:
        d_logits_ptr += pair * (T * PITCH)
    if d_scores_ptr is not None:
        d_scores_ptr += batch * D_SCORES_BATCH + head * D_SCORES_HEAD
    if d_p_scale_ptr is not None:
        d_p_scale = tl.zeros((BLOCK_T,), tl.float32)
        if REST:
            rest_d_p_scale = tl.zeros((REST,), tl.float32)
    d_received = None
    rest_d_received = None
    if d_received_ptr is not None:
        d_received = tl.load(d_received_ptr + pair * T + keys, mask=keys < T, other=0.0)
        if REST:
            rest_d_received = tl.load(d_received_ptr + pair * T + rest_keys, mask=rest_keys < T, other=0.0)

    for first in range(0, T, BLOCK_Q):
        queries = first + tl.arange(0, BLOCK_Q)
        q = _rows(q_ptr, q_token, first, T, D, BLOCK_Q, BLOCK_D)
        if d_heads_ptr is not None:
            d_heads = _rows(d_heads_ptr, d_heads_token, first, T, D, BLOCK_Q, BLOCK_D)
            lse = tl.load(lse_ptr + pair * T + queries, mask=queries < T, other=float("inf"))  # no such query: probs 0
            if REST:  # before the large tile takes the registers
                rest_probs, quantized, rest_d_probs, d_steps = _again(
                    q, rest_k, rest_v, queries, rest_keys, lse, d_heads, bias_ptr, scale, p_scale, p_table_ptr,
                    T, PITCH, P_TOP,
                )  # fmt: skip
                if d_p_scale_ptr is not None:
                    rest_d_p_scale += tl.sum(d_steps, 1)
                rest_dv = tl.dot(quantized.to(q.dtype), d_heads, rest_dv, input_precision="ieee")
                rest_mean = tl.sum(rest_probs * rest_d_probs, 0)
            probs, quantized, d_probs, d_steps = _again(
                q, k, v, queries, keys, lse, d_heads, bias_ptr, scale, p_scale, p_table_ptr, T, PITCH, P_TOP
            )
            if d_p_scale_ptr is not None:
                d_p_scale += tl.sum(d_steps, 1)
            dv = tl.dot(quantized.to(q.dtype), d_heads, dv, input_precision="ieee")
            mean = tl.sum(probs * d_probs, 0)
            if REST:
                mean += rest_mean
            d_scores = _d_scores(probs, d_probs, mean, queries, keys, d_logits_ptr, scale, T, PITCH)
            if REST:
                rest_d_scores = _d_scores(
                    rest_probs, rest_d_probs, mean, queries, rest_keys, d_logits_ptr, scale, T, PITCH
                )
        else:
            d_scores = tl.zeros((BLOCK_T, BLOCK_Q), tl.float32)
            if REST:
                rest_d_scores = tl.zeros((REST, BLOCK_Q), tl.float32)
        d_scores = _with_given(
            d_scores, queries, keys, d_scores_ptr, d_received, D_SCORES_TOKEN, D_SCORES_READ, T, FIRST_READER, READERS
        ).to(q.dtype)
        dk = tl.dot(d_scores, q, dk, input_precision="ieee")
        if REST:
            rest_d_scores = _with_given(
                rest_d_scores, queries, rest_keys, d_scores_ptr, rest_d_received, D_SCORES_TOKEN, D_SCORES_READ,
                T, FIRST_READER, READERS,
            ).to(q.dtype)  # fmt: skip
            rest_dk = tl.dot(rest_d_scores, q, rest_dk, input_precision="ieee")
        if BLOCK_Q < 64:  # the way round that gives the tensor cores their 64 rows
            dq = tl.zeros((BLOCK_D, BLOCK_Q), tl.float32)
            if REST:
                dq = tl.dot(tl.trans(rest_k), rest_d_scores, dq, input_precision="ieee")
            dq = tl.dot(tl.trans(k), d_scores, dq, input_precision="ieee")
            tl.store(
                d_qkv_ptr + queries[None, :] * d_qkv_token + dims[:, None],
                dq.to(d_qkv_ptr.dtype.element_ty),
                mask=(queries < T)[None, :] & (dims < D)[:, None],
            )
        else:
            dq = tl.dot(tl.trans(d_scores), k, input_precision="ieee")  # (BLOCK_Q, BLOCK_D); there is no rest
            tl.store(
                d_qkv_ptr + queries[:, None] * d_qkv_token + dims[None, :],
                dq.to(d_qkv_ptr.dtype.element_ty),
                mask=(queries < T)[:, None] & (dims < D)[None, :],
            )

    d_k_ptrs = d_qkv_ptr + head_count * D + keys[:, None] * d_qkv_token + dims[None, :]
    inside = (keys < T)[:, None] & (dims < D)[None, :]
    tl.store(d_k_ptrs, dk.to(d_qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(d_k_ptrs + head_count * D, dv.to(d_qkv_ptr.dtype.element_ty), mask=inside)
    if REST:
        d_k_ptrs = d_qkv_ptr + head_count * D + rest_keys[:, None] * d_qkv_token + dims[None, :]
        inside = (rest_keys < T)[:, None] & (dims < D)[None, :]
        tl.store(d_k_ptrs, rest_dk.to(d_qkv_ptr.dtype.element_ty), mask=inside)
        tl.store(d_k_ptrs + head_count * D, rest_dv.to(d_qkv_ptr.dtype.element_ty), mask=inside)
    if d_p_scale_ptr is not None:
        d_p_scale_sum = tl.sum(d_p_scale, 0)
        if REST:
            d_p_scale_sum += tl.sum(rest_d_p_scale, 0)
        tl.store(d_p_scale_ptr + pair, d_p_scale_sum / p_scale)


# --------------------------------------------------------------------------------------------------------- launches


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # tensor cores take no less than 16


_STAGES = {False: 2, True: 1}
"""Loads ahead of the products, without and with a table of levels. What is looked up depends on a product of the same
step, which Triton's pipeliner (3.6) cannot move: it fails to compile."""


def _tiles(tokens: int) -> tuple[int, int]:
    """Keys of the tile, and of the one beside it that holds what is over, or 0."""
    block = min(LARGEST_TILE, _block(tokens))
    return block, _block(tokens - block) if tokens > block else 0


def _forward_options(tokens: int, head_dim: int, table: bool) -> dict[str, int | None]:
    """Tiles of (BLOCK_Q, BLOCK_T) floats that stay in registers."""
    block, rest = _tiles(tokens)
    blocks = {"BLOCK_Q": min(64, block), "BLOCK_T": block, "BLOCK_D": _block(head_dim), "REST": rest}
    return {**blocks, "num_warps": 4, "num_stages": _STAGES[table]}


def _backward_options(tokens: int, head_dim: int, table: bool) -> dict[str, int | None]:
    """dk and dv stay in registers, beside two tiles of (BLOCK_T, BLOCK_Q) floats.

    With a rest, 32 queries at once would not leave enough: 776 bytes of each thread would go to memory, not 140.
    """
    (block, rest), block_d = _tiles(tokens), _block(head_dim)
    short = block <= 64
    return {
        "BLOCK_Q": 16 if rest else min(64, block) if short and block_d <= 64 else 32,
        "BLOCK_T": block,
        "BLOCK_D": block_d,
        "REST": rest,
        "num_warps": 4 if short else 8,
        "num_stages": _STAGES[table],
        "maxnreg": 128 if short and block_d <= 32 else None,  # small tiles are many: four at once hide each other
    }


def _pitch(tokens: int) -> int:
    return -(-tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _empty_scores(q: Tensor) -> Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, heads, tokens, _pitch(tokens))


def _per_head(p_scale: Tensor | None) -> int:
    """How far apart the steps of two heads are."""
    return int(p_scale is not None and p_scale.numel() > 1)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("maskaq::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    p_scale: Tensor | None,
    p_top: int,
    p_table: Tensor | None,
    keep_scores: bool,
    first_reader: int,
    readers: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """heads, scores, received, and the log-sum-exp of each row (to base 2, for the backward alone).

    Rows of the bias are padded as those of the scores are.
    """
    batch, head_count, tokens, head_dim = q.shape
    heads, scores, received, lse = _attention_fake(
        q, k, v, scale, bias, p_scale, p_top, p_table, keep_scores, first_reader, readers
    )
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    _forward_kernel[(batch * head_count,)](
        q,
        k,
        v,
        None if bias is None else bias.contiguous(),
        p_scale,
        p_table,
        heads,
        scores if keep_scores else None,
        received if readers else None,
        lse,
        scale,
        _per_head(p_scale),
        head_count,
        1 if bias is None else len(bias),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        T=tokens,
        D=head_dim,
        PITCH=_pitch(tokens),
        P_TOP=p_top,
        FIRST_READER=first_reader,
        READERS=readers,
        **_forward_options(tokens, head_dim, p_table is not None),
    )
    return heads, scores, received, lse


@_attention.register_fake
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    p_scale: Tensor | None,
    p_top: int,
    p_table: Tensor | None,
    keep_scores: bool,
    first_reader: int,
    readers: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, head_count, tokens, head_dim = q.shape
    heads = q.new_empty(batch, tokens, head_count, head_dim).transpose(1, 2)
    scores = _empty_scores(q) if keep_scores else q.new_empty(0)
    rows = (batch, head_count, tokens)
    received = q.new_empty(rows if readers else 0, dtype=torch.float32)
    return heads, scores, received, q.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("maskaq::attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    p_scale: Tensor | None,
    p_top: int,
    p_table: Tensor | None,
    lse: Tensor,
    d_heads: Tensor | None,
    d_scores: Tensor | None,
    d_received: Tensor | None,
    first_reader: int,
    readers: int,
    want_d_logits: bool,
    want_d_p_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv as (B, T, 3, H, D), the gradient of the logits, and that of p_scale from each (image, head)."""
    batch, head_count, tokens, head_dim = q.shape
    d_qkv, d_logits, d_p_scale = _attention_backward_fake(
        q, k, v, scale, bias, p_scale, p_top, p_table, lse, d_heads, d_scores, d_received, first_reader, readers,
        want_d_logits, want_d_p_scale,
    )  # fmt: skip
    q, k, v = _dense_rows(q), _dense_rows(k), _dense_rows(v)
    d_heads = None if d_heads is None else _dense_rows(d_heads)
    d_scores = None if d_scores is None else _dense_rows(d_scores)
    d_scores_batch, d_scores_head, d_scores_token = (0, 0, 0) if d_scores is None else d_scores.stride()[:3]
    _backward_kernel[(batch * head_count,)](
        q,
        k,
        v,
        None if bias is None else bias.contiguous(),
        p_scale,
        p_table,
        lse,
        d_heads,
        d_scores,
        None if d_received is None else d_received.contiguous(),
        d_qkv,
        d_logits if want_d_logits else None,
        d_p_scale if want_d_p_scale else None,
        scale,
        _per_head(p_scale),
        head_count,
        1 if bias is None else len(bias),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0) if d_heads is None else d_heads.stride()[:3]),
        D_SCORES_BATCH=d_scores_batch,
        D_SCORES_HEAD=d_scores_head,
        D_SCORES_TOKEN=d_scores_token,
        D_SCORES_READ=tokens if d_scores is None else d_scores.shape[-1],
        T=tokens,
        D=head_dim,
        PITCH=_pitch(tokens),
        P_TOP=p_top,
        FIRST_READER=first_reader,
        READERS=readers,
        **_backward_options(tokens, head_dim, p_table is not None),
    )
    return d_qkv, d_logits, d_p_scale


@_attention_backward.register_fake
def _attention_backward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    p_scale: Tensor | None,
    p_top: int,
    p_table: Tensor | None,
    lse: Tensor,
    d_heads: Tensor | None,
    d_scores: Tensor | None,
    d_received: Tensor | None,
    first_reader: int,
    readers: int,
    want_d_logits: bool,
    want_d_p_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, head_count, tokens, head_dim = q.shape
    d_qkv = q.new_empty(batch, tokens, 3, head_count, head_dim)
    d_logits = _empty_scores(q) if want_d_logits else q.new_empty(0)
    return d_qkv, d_logits, q.new_empty(batch * head_count if want_d_p_scale else 0, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, ctx.scale, bias, p_scale, ctx.p_top, p_table, ctx.keep_scores, ctx.first_reader, ctx.readers = inputs
    *_, lse = output
    ctx.set_materialize_grads(False)  # a result that nobody used arrives as None, not as zeros
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, bias, p_scale, p_table, lse)


def _backward(
    ctx: Any, d_heads: Tensor | None, d_scores: Tensor | None, d_received: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    q, k, v, bias, p_scale, p_table, lse = ctx.saved_tensors
    d_scores = d_scores if ctx.keep_scores else None  # of scores that were not kept, a compiler hands over zeros
    d_received = d_received if ctx.readers else None
    if d_heads is None and d_scores is None and d_received is None:
        return (None,) * 11
    want_d_bias = ctx.needs_input_grad[4] and d_heads is not None
    want_d_p_scale = ctx.needs_input_grad[5] and d_heads is not None
    d_qkv, d_logits, d_p_scale = torch.ops.maskaq.attention_backward(
        q, k, v, ctx.scale, bias, p_scale, ctx.p_top, p_table, lse, d_heads, d_scores, d_received, ctx.first_reader,
        ctx.readers, want_d_bias, want_d_p_scale,
    )  # fmt: skip
    dq, dk, dv = d_qkv.permute(2, 0, 3, 1, 4).unbind(0)
    d_bias = to_p_scale = None
    if want_d_bias:
        d_bias = d_logits.unflatten(0, (-1, len(bias))).sum(0, dtype=torch.float32).to(bias.dtype)
    if want_d_p_scale:
        sums = d_p_scale.view(len(q), -1).sum(0) if p_scale.numel() > 1 else d_p_scale.sum()
        to_p_scale = sums.to(p_scale.dtype).reshape(p_scale.shape)
    return dq, dk, dv if d_heads is not None else None, None, d_bias, to_p_scale, None, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)
