import pytest
import torch

from harness import distributed
from ptx.mesh import build_mesh
from ptx.model._norm import RMSNorm


def by_hand(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize(("eps", "want"), [(1e-5, 0.3015113), (1e-6, 0.7071068)])
def test_M07_eps_is_used(eps, want):
    out = RMSNorm(4, eps=eps)(torch.full((4,), 1e-3))
    torch.testing.assert_close(out, torch.full((4,), want), atol=1e-6, rtol=0)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_M07_float32_inside_one_rounding_and_the_input_dtype(weight_dtype):
    """Also with float32 weights, which must neither promote the stream nor warn."""
    torch.manual_seed(0)
    norm = RMSNorm(512, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    norm.to(weight_dtype)
    x = (100 * torch.randn(64, 512)).bfloat16()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out, by_hand(x.float(), norm.weight.float(), 1e-5).bfloat16(), atol=0, rtol=0
    )


def test_matches_the_formula_with_gradients():
    torch.manual_seed(0)
    norm = RMSNorm(32, eps=1e-2)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 32, requires_grad=True)
    seed = torch.randn(2, 3, 32)
    norm(x).backward(seed)
    got = (x.grad, norm.weight.grad)
    want = torch.autograd.grad(by_hand(x, norm.weight, 1e-2), (x, norm.weight), seed)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@distributed(world_size=2)
def test_sequence_parallel_norm():
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    tp = build_mesh(tp=2, device_type="cpu")["tp"]
    torch.manual_seed(0)
    norm, plain = RMSNorm(8, eps=1e-5), RMSNorm(8, eps=1e-5)
    full = torch.randn(2, 6, 8, requires_grad=True)
    want = plain(full)
    want.square().sum().backward()

    parallelize_module(norm, tp, SequenceParallel())
    mine = full.detach().chunk(2, dim=1)[tp.get_local_rank()].requires_grad_()
    got = norm(mine)
    assert isinstance(got, DTensor)
    assert got.placements == (Shard(1),)
    got.to_local().square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), want)
    torch.testing.assert_close(norm.weight.grad.full_tensor(), plain.weight.grad)
    torch.testing.assert_close(mine.grad, full.grad.chunk(2, dim=1)[tp.get_local_rank()])
