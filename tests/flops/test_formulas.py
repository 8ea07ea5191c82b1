import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import flop_counter

from ptx.flops import estimate_flops_fake
from ptx.flops._attention import ATTENTION
from ptx.flops._formulas import _PRODUCTS, _WITH_FLAGS, is_like_a_product


def grad(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("fn", "shapes", "forward", "backward"),
    [
        (torch.mm, [(3, 4), (4, 5)], 2 * 60, 2 * 2 * 60),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 120, 2 * 2 * 120),
        (torch.addmm, [(3, 5), (3, 4), (4, 5)], 2 * 60, 2 * 2 * 60),
        (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2 * 120, 2 * 2 * 120),
        (torch.addbmm, [(3, 5), (2, 3, 4), (2, 4, 5)], 2 * 120, 2 * 2 * 120),
        (torch.matmul, [(6, 2, 3, 4), (4, 5)], 12 * 2 * 60, 2 * 12 * 2 * 60),
        (torch.matmul, [(6, 2, 3, 4), (2, 4, 5)], 12 * 2 * 60, 2 * 12 * 2 * 60),
        (F.linear, [(2, 3, 4), (5, 4), (5,)], 2 * 2 * 60, 2 * 2 * 2 * 60),
        (torch.mv, [(3, 4), (4,)], 2 * 12, 2 * 12),  # the matrix's gradient is element-wise
        (torch.dot, [(4,), (4,)], 2 * 4, 0),
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [(2, 3, 4), (2, 4, 5)], 240, 480),
        (lambda a, b: torch.einsum("bhsd,hde->bse", a, b), [(2, 3, 7, 4), (3, 4, 5)], 1680, 3360),
        (lambda a, b: torch.tensordot(a, b, 2), [(3, 4, 5), (4, 5, 6)], 720, 1440),
        (F.bilinear, [(7, 3), (7, 4), (5, 3, 4)], 2 * 7 * 60, 3 * 2 * 7 * 60),
        (F.conv1d, [(2, 4, 9), (6, 4, 3)], 2 * 2 * 7 * 6 * 12, 2 * 2 * 2 * 7 * 6 * 12),
        (F.conv1d, [(4, 9), (6, 4, 3)], 2 * 7 * 6 * 12, 2 * 2 * 7 * 6 * 12),  # no batch
        (F.conv3d, [(2, 4, 3, 3, 3), (6, 4, 2, 2, 2)], 2 * 2 * 8 * 6 * 32, 4 * 2 * 8 * 6 * 32),
    ],
)
def test_products_by_hand(fn, shapes, forward, backward):
    count = estimate_flops_fake(fn, *(grad(*shape) for shape in shapes))
    assert (count.forward, count.backward) == (forward, backward)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_convolutions_count_their_own_channels(groups, transposed):
    # torch's counter has ``groups`` times too many for the weight's gradient.
    x = grad(2, 4, 9, 9)
    if transposed:
        weight, positions = grad(4, 8 // groups, 3, 3), 81
        fn = lambda x, w: F.conv_transpose2d(x, w, groups=groups, stride=2)  # noqa: E731
    else:
        weight, positions = grad(8, 4 // groups, 3, 3), 25
        fn = lambda x, w: F.conv2d(x, w, groups=groups, stride=2, padding=1)  # noqa: E731
    want = 2 * 2 * positions * weight.numel()
    count = estimate_flops_fake(fn, x, weight)
    assert (count.forward, count.backward) == (want, 2 * want)
    frozen = estimate_flops_fake(fn, x, weight.detach())
    assert (frozen.forward, frozen.backward) == (want, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_of_experts(dtype):
    tokens, experts = grad(32, 16, dtype=dtype), grad(4, 16, 24, dtype=dtype)
    ends = torch.tensor([8, 8, 20, 32], dtype=torch.int32)
    count = estimate_flops_fake(F.grouped_mm, tokens, experts, offs=ends)
    assert (count.forward, count.backward) == (2 * 32 * 16 * 24, 2 * 2 * 32 * 16 * 24)
    batched = estimate_flops_fake(F.grouped_mm, grad(4, 8, 16, dtype=dtype), experts)
    assert (batched.forward, batched.backward) == (2 * 32 * 16 * 24, 2 * 2 * 32 * 16 * 24)


def test_products_in_other_number_formats():
    eight = torch.zeros(32, 32, dtype=torch.int8)
    assert estimate_flops_fake(torch._int_mm, eight, eight, backward=False).forward == 2 * 32**3
    fp8, one = torch.zeros(32, 32).to(torch.float8_e4m3fn), torch.ones(())
    count = estimate_flops_fake(torch._scaled_mm, fp8, fp8.t(), one, one, backward=False)
    assert count.forward == 2 * 32**3
    assert count.by_op.keys() == {"_scaled_mm"}


def test_in_place_and_out_variants_count():
    def fn(a, b):
        out = torch.zeros(3, 5)
        torch.mm(a, b, out=out)
        return out.addmm_(a, b)

    count = estimate_flops_fake(fn, torch.randn(3, 4), torch.randn(4, 5), backward=False)
    assert count.forward == 2 * 2 * 60


@pytest.mark.parametrize("fn", [torch.fft.rfft, torch.linalg.svdvals, torch.linalg.inv])
def test_what_has_no_formula_raises_and_says_how_to_give_one(fn):
    with pytest.raises(ValueError, match=r"aten\.\w+.default has no formula; register one") as info:
        estimate_flops_fake(fn, grad(4, 4))
    assert re.search(
        r"register_flop_formula\(torch\.ops\.aten\.\w+, get_raw=True\)", str(info.value)
    )


# Custom ops


@torch.library.custom_op("ptx_test::gemm", mutates_args=())
def gemm(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@gemm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gemm_backward(ctx, g: Tensor):
    a, b = ctx.saved_tensors
    return gemm(g, b.t()), gemm(a.t(), g)


gemm.register_autograd(_gemm_backward, setup_context=_save)


def test_a_custom_op_raises_until_it_has_a_formula():
    linear = torch.nn.Linear(4, 5)
    model = torch.nn.Sequential(linear, torch.nn.Identity())
    model[1].forward = lambda x: gemm(x, linear.weight)
    with pytest.raises(ValueError, match=r"ptx_test.gemm.default in module '1' stopped") as info:
        estimate_flops_fake(model, grad(3, 4))
    # The message is code.
    written = re.search(
        r"torch\.utils\.flop_counter\.(register_flop_formula\(.*?\))\(f\)", str(info.value)
    )
    register = eval(written[1], {"torch": torch, **vars(flop_counter)})
    try:
        register(lambda a, b, *, out_val: 2 * a.shape[0] * a.shape[1] * b.shape[1])
        count = estimate_flops_fake(model, grad(3, 4))
    finally:
        del flop_counter.flop_registry[torch.ops.ptx_test.gemm]
    assert (count.forward, count.backward) == (2 * 2 * 60, 2 * 2 * 2 * 60)
    assert count.by_op["ptx_test.gemm"].total == 3 * 2 * 60
    assert count.by_module["1"].total == 3 * 2 * 60


def test_a_collective_in_the_model_is_refused():
    def gathers(x):
        return torch.ops._c10d_functional.all_gather_into_tensor(x @ x.t(), 2, "0")

    with pytest.raises(ValueError, match=r"communicates.*before it is made parallel"):
        estimate_flops_fake(gathers, torch.randn(3, 4), backward=False)


# All of torch's ops

# What has "mm", "conv" ... in its name and multiplies nothing. An op that a new version of torch adds
# must be given a formula, or a place here.
HARMLESS = re.compile(
    r"_?convert_.*|\w*gamma\w*|_?cumm\w+|hamming_window|upsample_\w+|_upsample_\w+|is_distributed"
    r"|_?pack_padded_\w+|_nested_get_jagged_dummy|_pad_packed_\w+|_?cudnn_rnn_flatten_weight|_use_cudnn_rnn_flatten_weight"
    r"|_thnn_\w+_cell\w*|dist|pairwise_distance|resolve_(conj|neg)|_nnpack_available"
    r"|_foreach_lgamma_?|_sparse_semi_structured_(apply|apply_dense|tile)|_to_sparse_semi_structured"
)


def test_every_op_of_torch_that_looks_like_a_product_is_known_as_one():
    names = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    looks = re.compile(
        r"mm|matmul|conv|attention|attn|linear|gemm|rnn|lstm|gru|fft_|_fft|svd|solve"
    )
    known = {*_PRODUCTS, *_WITH_FLAGS, *ATTENTION}
    missed = {
        name
        for name in names
        if looks.search(name)
        and name.removesuffix("_") not in known
        and not is_like_a_product(name)
        and not HARMLESS.fullmatch(name)
    }
    assert missed <= {
        "_cufft_clear_plan_cache",
        "_cufft_get_plan_cache_max_size",
        "_cufft_get_plan_cache_size",
        "_cufft_set_plan_cache_max_size",
        "fft_fftfreq",
        "fft_fftshift",
        "fft_ifftshift",
        "fft_rfftfreq",
        "linalg_svdvals",  # made of others, as the next ones
        "linalg_tensorsolve",
    }
    assert len(known & names) > 30  # their names are still torch's


def test_harmless_ops_count_nothing():
    def fn(x, w):
        x = F.layer_norm(F.gelu(x), x.shape[-1:]).softmax(-1).cumsum(0)
        x = F.interpolate(x[None, None], scale_factor=2, mode="bilinear")[0, 0, :3, :4]
        return F.embedding(torch.zeros(3, dtype=torch.long), w) * x.sum(0) + x.lgamma() @ w.t() @ w

    count = estimate_flops_fake(fn, grad(3, 4), grad(5, 4))
    assert count.forward == 2 * 3 * 4 * 5 * 2
    assert count.by_op.keys() == {"mm"}
