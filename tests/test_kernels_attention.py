"""maskaq.engine.kernels.attention: the fused kernels say what the plain ops say, forward and backward.

No GPU is needed: the checks of values run in Triton's interpreter, in the process that test_engine.py starts; and the
kernels are compiled for a GPU that need not be there.
"""

import pytest
import torch
from helpers import inside, mostly_slow, outside
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from maskaq.quant import grid

triton = pytest.importorskip("triton", reason="the fused kernels need Triton")

from maskaq.engine.kernels import attention as kernels  # noqa: E402

SCALE = 0.3


# ------------------------------------------------------------------------------------------------------- compilation


def compiled(kernel, absent, constants, options):
    """The kernel for an H200 with bf16 tensors, where the tensors named in `absent` are None.

    Of a launch's options those in capitals are constants of the kernel.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    full_precision = {
        "p_scale_ptr",
        "p_table_ptr",
        "bias_ptr",
        "lse_ptr",
        "d_p_scale_ptr",
        "received_ptr",
        "d_received_ptr",
    }
    blocks = {name: value for name, value in options.items() if name.isupper()}
    constants = {**constants, **blocks, **dict.fromkeys(absent)}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in full_precision else "*bf16"
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
        if name not in constants and name.endswith(("_ptr", "_batch", "_head", "_token")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {name: constants[name] for name in constants}, attributes)
    launch = {name: value for name, value in options.items() if name not in blocks}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


@outside
@pytest.mark.parametrize(
    ("tokens", "head_dim", "absent"),
    mostly_slow(
        {
            "ViT": (197, 64, {"bias_ptr", "d_logits_ptr", "p_table_ptr"}),
            "ViT, log grid": (197, 64, {"bias_ptr", "d_logits_ptr"}),
            "window": (49, 32, set()),
            "a rest": (257, 64, {"bias_ptr", "d_logits_ptr", "p_table_ptr"}),
            "the largest": (288, 64, set()),
        },
        "window",
        "a rest",
    ),
)
def test_kernels_compile_and_fit_the_shared_memory(tokens, head_dim, absent):
    pitch = -(-tokens // 8) * 8
    table = "p_table_ptr" not in absent
    shape = dict(T=tokens, D=head_dim, PITCH=pitch, P_TOP=15, FIRST_READER=0, READERS=1)
    rows = dict(
        D_SCORES_BATCH=3 * tokens * pitch, D_SCORES_HEAD=tokens * pitch, D_SCORES_TOKEN=pitch, D_SCORES_READ=pitch
    )
    for kernel, options, more in (
        (kernels._forward_kernel, kernels._forward_options(tokens, head_dim, table), {}),
        (kernels._backward_kernel, kernels._backward_options(tokens, head_dim, table), rows),
    ):
        binary = compiled(kernel, absent & set(kernel.arg_names), {**shape, **more}, options)
        assert binary.metadata.shared < 227 * 1024
        assert "wgmma" in binary.asm["ptx"], "the products should run on the tensor cores"


@outside
def test_the_bias_of_a_window_is_read_in_whole_rows():
    shape, options = (
        dict(T=49, D=32, PITCH=56, P_TOP=15, FIRST_READER=0, READERS=0),
        kernels._forward_options(49, 32, False),
    )

    def loads(*absent):
        return compiled(kernels._forward_kernel, ("p_table_ptr", *absent), shape, options).asm["ptx"].count("ld.global")

    of_bias = loads("scores_ptr", "received_ptr") - loads("scores_ptr", "received_ptr", "bias_ptr")
    assert 0 < of_bias <= 64 * 64 // 128 // 4, "four values at a time"


def test_fits_says_which_shapes_the_kernels_serve():
    assert kernels.fits(197, 64, torch.bfloat16)
    assert kernels.fits(49, 32, torch.float16)
    assert kernels.fits(100, 128, torch.bfloat16)
    assert kernels.fits(257, 64, torch.bfloat16) and kernels.fits(288, 32, torch.bfloat16)
    assert not kernels.fits(289, 64, torch.bfloat16)
    assert not kernels.fits(257, 80, torch.bfloat16)
    assert not kernels.fits(577, 64, torch.bfloat16)
    assert not kernels.fits(197, 128, torch.bfloat16)
    assert not kernels.fits(197, 64, torch.float32)


# ------------------------------------------------------------------------------------------------------------ values


def plain(q, k, v, bias, p_scale, p_top):
    scores = q @ k.transpose(-2, -1)
    logits = scores * SCALE
    if bias is not None:
        logits = (logits.unflatten(0, (-1, len(bias))) + bias).flatten(0, 1)
    probs = logits.float().softmax(-1)
    if p_scale is not None:
        probs = grid.fake_quantize(probs, p_scale, 0, 0, p_top)
    return probs.to(v.dtype) @ v, scores, scores[:, :, 1:].float().mean(dim=2)


def fused(q, k, v, bias, p_scale, p_top):
    patches = (1, q.shape[2] - 1)
    heads, scores, received = kernels.attention(q, k, v, SCALE, bias, p_scale, p_top, True, patches)
    return heads, scores[..., : q.shape[2]], received


def case(tokens=13, head_dim=8, windows=0, step=None, batch=4, heads=1, dtype=torch.float32):
    """q, k, v as a qkv layer gives them, bias and p_scale; all of them want a gradient."""
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, dtype=dtype)
    bias = torch.randn(windows, heads, tokens, tokens) if windows else None
    p_scale = None if step is None else torch.tensor(step)
    inputs = (*qkv.permute(2, 0, 3, 1, 4).unbind(0), bias, p_scale)
    return [x if x is None else x.detach().requires_grad_() for x in inputs]


def results(function, inputs, use, p_top=15):
    """Outputs, and the gradients of all inputs from a random gradient of the outputs that `use` names."""
    named = dict(zip(("heads", "scores", "received"), function(*inputs, p_top), strict=True))
    generator = torch.Generator().manual_seed(1)
    grads = {name: torch.randn(x.shape, generator=generator) for name, x in named.items()}
    loss = sum((x.float() * grads[name]).sum() for name, x in named.items() if name in use)
    leaves = [x for x in inputs if x is not None]
    return [*named.values(), *torch.autograd.grad(loss, leaves, allow_unused=True)]


def assert_same(ours, theirs, **tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine.float(), other.float(), **tolerance)


@inside
@pytest.mark.parametrize(
    "use",
    [("heads",), ("scores",), ("received",), ("heads", "received"), ("heads", "scores", "received")],
    ids="+".join,
)
@pytest.mark.parametrize("step", [None, 0.011])
@pytest.mark.parametrize("windows", [0, 2])
@pytest.mark.parametrize(("tokens", "head_dim", "heads"), [(2, 8, 1), (13, 8, 2), (37, 20, 1)])
def test_equals_the_plain_ops(tokens, head_dim, heads, windows, step, use):
    inputs = case(tokens, head_dim, windows, step, batch=2, heads=heads)
    assert_same(results(fused, inputs, use), results(plain, inputs, use), atol=2e-5, rtol=2e-5)


@inside
@pytest.mark.parametrize("steps", [[0.001], [0.001, 0.003]], ids=["tensor", "head"])
@pytest.mark.parametrize("levels", [None, grid.log_levels(3, 6.5)], ids=["uniform", "log"])
def test_levels_and_a_step_for_each_head_equal_the_plain_ops(levels, steps):
    *inputs, _ = case(tokens=13, windows=2, batch=2, heads=2)
    inputs.append(torch.tensor(steps).requires_grad_())
    table = None if levels is None else grid.level_table(levels)

    def plain(q, k, v, bias, p_scale, p_top):
        scores = q @ k.transpose(-2, -1)
        probs = ((scores * SCALE).unflatten(0, (-1, len(bias))) + bias).flatten(0, 1).softmax(-1)
        step = p_scale.view(-1, 1, 1)
        on_grid = grid.fake_quantize(probs, step, 0, 0, p_top) if levels is None else None
        on_grid = grid.log_fake_quantize(probs, step, levels) if on_grid is None else on_grid
        return on_grid @ v, scores, scores[:, :, 1:].mean(dim=2)

    def fused(q, k, v, bias, p_scale, p_top):
        patches = (1, q.shape[2] - 1)
        heads, scores, received = kernels.attention(q, k, v, SCALE, bias, p_scale, p_top, True, patches, table)
        return heads, scores[..., : q.shape[2]], received

    use = ("heads", "scores", "received")
    ours, theirs = (results(function, inputs, use, p_top=255) for function in (fused, plain))
    assert_same(ours, theirs, atol=2e-5, rtol=2e-5)
    assert ours[-1].shape == (len(steps),) and ours[-1].all(), "some probabilities are clipped, some are not"


@inside
def test_blocks_of_queries_add_up():
    inputs = case(tokens=70, head_dim=8, windows=1, step=0.01, batch=1)  # 70 keys: three blocks of 32 queries backward
    use = ("heads", "scores", "received")
    assert_same(results(fused, inputs, use), results(plain, inputs, use), atol=2e-5, rtol=2e-5)


@inside
@pytest.mark.parametrize("use", [("heads",), ("heads", "scores", "received")], ids="+".join)
@pytest.mark.parametrize(("tokens", "windows", "step"), [(257, 0, 0.001), (257, 1, None), (288, 2, 0.001)])
def test_more_keys_than_a_tile_holds_equal_the_plain_ops(tokens, windows, step, use):
    inputs = case(tokens, 8, windows, step, batch=2)
    assert_same(results(fused, inputs, use), results(plain, inputs, use), atol=5e-5, rtol=2e-5)


@inside
def test_half_precision():
    inputs = case(tokens=37, head_dim=16, step=0.01, dtype=torch.float16)  # the interpreter cannot multiply bfloat16
    exact = [x if x is None else x.detach().float().requires_grad_() for x in inputs]
    use = ("heads", "scores", "received")
    ours, theirs = results(fused, inputs, use), results(plain, exact, use)
    assert ours[0].dtype == ours[1].dtype == torch.float16
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.float() - other).norm() < 0.01 * other.norm()


@inside
def test_clipping_passes_its_gradient_to_the_scale_alone():
    inputs = case(tokens=5, step=0.001)  # p_top is 15 steps: all probabilities lie above the grid
    ours = results(fused, inputs, ("heads",))
    assert_same(ours, results(plain, inputs, ("heads",)), atol=2e-5, rtol=2e-5)
    dq, dk, _, d_p_scale = ours[3:]
    assert not dq.any() and not dk.any() and d_p_scale != 0


@inside
def test_rounds_half_to_even():
    v = torch.ones(1, 1, 2, 8)
    zero = torch.zeros_like(v)  # both probabilities are a half
    heads, *_ = kernels.attention(zero, zero, v, 1.0, None, torch.tensor([1.0]), 15, False)
    assert not heads.any()


@inside
def test_scores_of_patches_alone():
    inputs = case(tokens=14, heads=2, batch=2)

    def patches_of(function):
        def run(*arguments):
            heads, scores, received = function(*arguments)
            return heads, scores[..., 1:, 1:], received

        return run

    use = ("heads", "scores", "received")
    ours, theirs = (results(patches_of(function), inputs, use) for function in (fused, plain))
    assert_same(ours, theirs, atol=2e-5, rtol=2e-5)


@inside
def test_any_strides():
    inputs = case(tokens=13, step=0.01)
    odd = [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs[:3]] + inputs[3:]
    use = ("heads", "scores", "received")
    assert_same(results(fused, odd, use), results(plain, inputs, use), atol=2e-5, rtol=2e-5)


@inside
def test_layout_of_the_results():
    q, k, v, _, _ = case(tokens=13, heads=2)
    heads, scores, received = kernels.attention(q, k, v, SCALE, keep_scores=True, readers=(0, 1))
    assert heads.transpose(1, 2).is_contiguous()
    assert scores.shape == (4, 2, 13, 16) and scores.is_contiguous()
    assert not scores[..., 13:].any(), "the padding is zero"
    assert received.shape == (4, 2, 13) and received.dtype == torch.float32
    assert [x.numel() for x in kernels.attention(q, k, v, SCALE)[1:]] == [0, 0]


class Calls(TorchDispatchMode):
    """The arguments of every backward."""

    def __init__(self):
        super().__init__()
        self.arguments = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.maskaq.attention_backward.default:
            self.arguments.append(args)
        return function(*args, **(kwargs or {}))


@inside
@pytest.mark.parametrize("use", ["heads", "scores", "received"])
def test_a_result_that_nobody_used_costs_no_zeros(use):
    with Calls() as calls:
        results(fused, case(), (use,))
    (arguments,) = calls.arguments
    given = dict(zip(("heads", "scores", "received"), arguments[9:12], strict=True))
    assert [name for name, gradient in given.items() if gradient is not None] == [use]


@inside
def test_gradients_of_scores_may_be_dense_or_padded_with_anything():
    q, k, v = (x.detach() for x in case(tokens=13)[:3])
    *_, lse = torch.ops.maskaq.attention(q, k, v, SCALE, None, None, 0, None, True, 0, 0)
    dense = torch.randn(4, 1, 13, 13)
    padded = torch.full((4, 1, 13, 16), torch.nan)
    padded[..., :13] = dense
    given, rest = [torch.randn_like(v), dense], (None, 0, 0, False, False)
    expected, _, _ = torch.ops.maskaq.attention_backward(q, k, v, SCALE, None, None, 0, None, lse, *given, *rest)
    given[1] = padded
    actual, _, _ = torch.ops.maskaq.attention_backward(q, k, v, SCALE, None, None, 0, None, lse, *given, *rest)
    torch.testing.assert_close(actual, expected)


@inside
@pytest.mark.parametrize("windows", [0, 2])
def test_is_a_good_citizen_of_torch(windows):
    q, k, v, bias, p_scale = case(windows=windows, step=0.01)
    if bias is not None:  # what the operator takes has padded rows
        bias = F.pad(bias.detach(), (0, -bias.shape[-1] % 8)).requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(
        torch.ops.maskaq.attention.default, (q, k, v, SCALE, bias, p_scale, 15, None, True, 1, 12), test_utils=tests
    )


@inside
def test_is_opaque_to_the_compiler():
    inputs = case(windows=2, step=0.01)
    whole = torch.compile(fused, backend="aot_eager", fullgraph=True)
    assert_same(results(whole, inputs, ("heads",)), results(fused, inputs, ("heads",)))
