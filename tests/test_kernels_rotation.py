"""maskaq.engine.kernels.rotation: GELU, rotation and grid in one kernel say what the plain ops say, both ways.

No GPU is needed, as for the kernels of attention (test_kernels_attention.py).
"""

import pytest
import torch
from helpers import inside, outside, pair, small_recipe, tiny_swin, tiny_vit
from torch import nn
from torch.nn import functional as F

from maskaq.models.structure import gelu_mlps
from maskaq.quant import grid
from maskaq.quant.rotation import Rotation, hadamard, mean_keeping

triton = pytest.importorskip("triton", reason="the fused kernels need Triton")

from maskaq.engine import fast  # noqa: E402
from maskaq.engine.kernels import rotation as kernels  # noqa: E402

# ------------------------------------------------------------------------------------------------------- compilation


def compiled(kernel, size, absent):
    """The kernel for an H200 with bf16 tensors, where the tensors named in `absent` are None."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"LOW": 0, "HIGH": 15, "SIZE": size, "BLOCK": kernels.BLOCK, **dict.fromkeys(absent)}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        of_values = name in ("x_ptr", "y_ptr", "dx_ptr", "dy_ptr")
        signature[name] = "*bf16" if of_values else "*fp32" if name.endswith("_ptr") else "i32"
        attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, {name: constants[name] for name in constants}, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@outside
@pytest.mark.parametrize("size", [16, 32])
def test_kernels_compile_for_tensor_cores_and_compute_gelu_once(size):
    for kernel, absent, exponentials in (
        (kernels._forward_kernel, (), 1),
        (kernels._backward_kernel, (), 2),
        (kernels._backward_kernel, ("d_grid_ptr",), 2),
    ):
        binary = compiled(kernel, size, {name for name in absent if name in kernel.arg_names})
        code = binary.asm["ptx"]
        assert binary.metadata.shared < 16 * 1024
        assert "wgmma" in code
        assert code.count("ex2.approx") == exponentials * kernels.BLOCK // 128, "of erf, and of its slope"


def test_fits_says_which_blocks_the_kernels_serve():
    assert [size for size in range(1, 65) if kernels.fits(size)] == [16, 32]


# ------------------------------------------------------------------------------------------------------------ values


def plain(x, matrix, scale, zero_point, low, high):
    rotation = Rotation(torch.eye(len(matrix)))
    rotation.matrix = matrix
    return grid.fake_quantize(rotation(F.gelu(x)), scale, zero_point, low, high)


def case(*shape, size=32, step=0.1, zero_point=6.0, dtype=torch.float32):
    torch.manual_seed(0)
    x = 1.5 * torch.randn(shape, dtype=dtype)
    inputs = [x, hadamard(size).float(), torch.tensor([step]), torch.tensor([zero_point])]
    return [tensor.requires_grad_(index != 1) for index, tensor in enumerate(inputs)]


def results(function, inputs, low=0, high=15):
    """The output, and the gradients of all that wants one, from a random gradient of the output."""
    y = function(*inputs, low, high)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad((y.float() * dy).sum(), [x for x in inputs if x.requires_grad])]


def assert_same(ours, theirs, **tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **tolerance or dict(atol=2e-5, rtol=2e-5))


@inside
@pytest.mark.parametrize("step", [0.1, 1.0], ids=["clipped", "wide"])
@pytest.mark.parametrize(("low", "high", "zero_point"), [(0, 15, 6.0), (0, 255, 100.0), (-8, 7, 0.0)])
@pytest.mark.parametrize(
    ("shape", "size"), [((1, 1, 32), 32), ((3, 5, 64), 32), ((7, 13, 96), 32), ((5, 9, 48), 16)], ids=str
)
def test_equals_the_plain_ops(shape, size, low, high, zero_point, step):
    """One row, an odd number of rows, and several programs of which the last is not full."""
    inputs = case(*shape, size=size, step=step, zero_point=zero_point)
    assert_same(*(results(function, inputs, low, high) for function in (kernels.rotated_gelu, plain)))


@inside
def test_clipped_values_pass_their_gradient_to_the_range_alone():
    inputs = case(3, 5, 64, step=1e-4)  # all values lie below or above the grid
    ours = results(kernels.rotated_gelu, inputs)
    assert_same(ours, results(plain, inputs))
    assert len(ours[0].unique()) == 2 and not ours[1].any() and ours[2] != 0 and ours[3] != 0


@inside
def test_the_matrix_need_not_be_symmetric():
    inputs = case(3, 5, 64)
    inputs[1] = mean_keeping(32).float() @ hadamard(32).float().roll(1, 0)
    assert_same(results(kernels.rotated_gelu, inputs), results(plain, inputs))


@inside
def test_half_precision():
    inputs = case(3, 5, 64, step=0.001, zero_point=2000.0, dtype=torch.float16)  # no bfloat16 in the interpreter
    exact = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    ours, theirs = (results(f, i, 0, 4095) for f, i in ((kernels.rotated_gelu, inputs), (plain, exact)))
    assert [x.dtype for x in ours] == [torch.float16, torch.float16, torch.float32, torch.float32]
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert (mine.float() - other).norm() < 0.01 * other.norm()


@inside
def test_nan_stays_nan():
    x, *rest = case(1, 3, 32)
    x.data[0, 1, 7] = torch.nan
    y = kernels.rotated_gelu(x, *rest, 0, 15)
    assert y[0, 1].isnan().all() and not y[0, ::2].isnan().any()


@inside
def test_any_strides():
    inputs = case(3, 5, 64)
    odd = [inputs[0].detach().mT.contiguous().mT.requires_grad_(), *inputs[1:]]
    ours = results(lambda *arguments: kernels.rotated_gelu(*arguments).mT, odd)
    assert_same(ours, results(lambda *arguments: plain(*arguments).mT, inputs))


@inside
@pytest.mark.parametrize("learned", [(), (2,), (2, 3)], ids=str)
def test_is_a_good_citizen_of_torch_and_of_its_compiler(learned):
    inputs = [x.detach().requires_grad_(index in (0, *learned)) for index, x in enumerate(case(3, 5, 64))]
    assert_same(results(kernels.rotated_gelu, inputs), results(plain, inputs))
    torch.library.opcheck(torch.ops.maskaq.rotated_gelu.default, (*inputs, 0, 15))
    whole = torch.compile(kernels.rotated_gelu, backend="aot_eager", fullgraph=True)
    assert_same(results(whole, inputs), results(kernels.rotated_gelu, inputs))


# ---------------------------------------------------------------------------------------------------------- in a MLP


def rotated_mlps(build, *overrides):
    """The student's, whose ranges are learned."""
    recipe = small_recipe("quantization.rotate=hidden", "quantization.activation=lsq", *overrides)
    _, student = pair(recipe, build)
    return [student.get_submodule(name) for name in gelu_mlps(student)]


def passed_through(forward, mlp, tokens=7):
    """What an MLP gives for an odd number of rows, and the gradients of all parameters and of what it reads."""
    x = torch.randn(3, tokens, mlp.fc1.in_features, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = forward(mlp, x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad(y, [x, *mlp.parameters()], dy)]


@inside
@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_an_mlp_has_the_plain_output_and_gradients(build, monkeypatch):
    mlps = rotated_mlps(build)
    wanted = [passed_through(type(mlp).forward, mlp) for mlp in mlps]
    monkeypatch.setattr(nn.GELU, "forward", None)  # the kernel does it
    for mlp, want in zip(mlps, wanted, strict=True):
        assert fast._is_rotated_to_grid(mlp)
        assert_same(passed_through(fast._fused_mlp, mlp), want, atol=1e-4, rtol=1e-4)


@inside
def test_values_that_are_left_in_float_take_the_plain_path():
    mlp = rotated_mlps(tiny_vit)[0]
    for drop in (0.5, 1.0):
        mlp.fc2.input_quantizer.drop, mlp.fc2.input_quantizer.drop_key = drop, torch.zeros(1, dtype=torch.int64)
        x = torch.ones(2, 3, mlp.fc1.in_features)
        assert torch.equal(fast._fused_mlp(mlp, x), type(mlp).forward(mlp, x))


@outside
def test_an_mlp_takes_the_kernel_where_it_fits():
    def fitting(change=None, *overrides):
        mlp = rotated_mlps(tiny_vit, *overrides)[0]
        if change is not None:
            change(mlp)
        return fast._is_rotated_to_grid(mlp)

    assert fitting()
    assert not fitting(lambda mlp: setattr(mlp, "act", nn.GELU(approximate="tanh")))
    assert not fitting(lambda mlp: setattr(mlp, "norm", nn.Identity())), "not rotated"
    assert not fitting(lambda mlp: setattr(mlp, "norm", nn.Sequential(nn.LayerNorm(64), mlp.norm)))
    assert not fitting(lambda mlp: setattr(mlp, "norm", Rotation(hadamard(8))))
    assert not fitting(lambda mlp: setattr(mlp.fc2, "input_quantizer", nn.Identity())), "in float"
    assert not fitting(lambda mlp: setattr(mlp, "fc2", nn.Linear(64, 16))), "the teacher's"
