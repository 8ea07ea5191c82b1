import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from harness import distributed
from ptx.mesh import build_mesh
from ptx.parallel._tp import apply_tp
from ptx.parallel._tp_styles import HeadParallel, Replicated


class Projections(nn.Module):
    """Two query heads a kv head; k is repeated for them, as attention does."""

    def __init__(self, kv_heads, bias):
        super().__init__()
        self.q = nn.Linear(6, 8 * 2, bias=bias)
        self.k = nn.Linear(6, kv_heads * 2, bias=bias)

    def forward(self, x):
        q, k = self.q(x).unflatten(-1, (-1, 2)), self.k(x).unflatten(-1, (-1, 2))
        return q * k.repeat_interleave(q.shape[-2] // k.shape[-2], dim=-2)


def seeded(build, *args):
    torch.manual_seed(0)
    return build(*args), torch.randn(2, 3, 6)


@distributed(world_size=4)
def test_replicated_heads_and_their_gradients():
    mesh = build_mesh(tp=4, device_type="cpu")["tp"]
    rank = mesh.get_local_rank()
    mine = slice(2 * rank, 2 * rank + 2)  # this rank's query heads
    for kv_heads, bias, layout in (
        (1, True, None),
        (2, True, Replicate()),
        (2, False, Shard(1)),
        (4, True, Replicate()),
    ):
        reference, x = seeded(Projections, kv_heads, bias)
        model, given = seeded(Projections, kv_heads, bias)
        plan = {"q": HeadParallel(8), "k": HeadParallel(kv_heads, replicate=True)}
        apply_tp(model, mesh, plan)
        want = reference(x.requires_grad_())
        weights = torch.randn_like(want)
        (want * weights).sum().backward()

        hidden = given.requires_grad_()
        if layout is not None:
            hidden = DTensor.from_local(hidden, mesh, [Replicate()])
            hidden = hidden.redistribute(placements=[layout])
        got = model(hidden)
        torch.testing.assert_close(got, want[:, :, mine])
        (got * weights[:, :, mine]).sum().backward()
        torch.testing.assert_close(given.grad, x.grad)
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=name)
            if name.startswith("k") and kv_heads < 4:
                assert p.placements == (Replicate(),)
                assert p.grad.placements == (Partial(),)


@distributed(world_size=2)
def test_T06_bias_of_a_row_parallel_layer_is_added_once():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    reference, x = seeded(nn.Linear, 6, 3)
    want = reference(x)
    want.square().sum().backward()
    for output in (Replicate(), Shard(1)):
        for start in (reference.weight, torch.zeros(3, 6)):
            holder = nn.ModuleDict({"down": seeded(nn.Linear, 6, 3)[0]})
            holder["down"].weight.data.copy_(start)
            style = RowwiseParallel(output_layouts=output, use_local_output=False)
            apply_tp(holder, mesh, {"down": style})
            got = holder["down"](x.chunk(2, dim=-1)[mesh.get_local_rank()]).full_tensor()
            if start is reference.weight:
                torch.testing.assert_close(got, want)
                got.square().sum().backward()
                for p, q in zip(holder["down"].parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(p.grad.full_tensor(), q.grad)
            else:
                assert torch.equal(got, reference.bias.expand_as(got))


@distributed(world_size=2)
def test_replicated_modules_compute_in_full():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]

    class Router(nn.Linear):
        def forward(self, x, scale):
            scores = super().forward(x) * scale
            return scores, scores.argmax(-1), "note"

    reference, x = seeded(Router, 6, 3)
    model, _ = seeded(Router, 6, 3)
    apply_tp(holder := nn.ModuleDict({"router": model}), mesh, {"router": Replicated()})
    for given in (x, DTensor.from_local(x.chunk(2)[mesh.get_local_rank()], mesh, [Shard(0)])):
        model.zero_grad()
        reference.zero_grad()
        (scores, best, note), (want, want_best, _) = holder["router"](given, 2.0), reference(x, 2.0)
        assert type(scores) is type(best) is torch.Tensor
        assert note == "note"
        torch.testing.assert_close(scores, want)
        assert torch.equal(best, want_best)
        scores.square().sum().backward()
        want.square().sum().backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad.placements == (Replicate(),)
            torch.testing.assert_close(p.grad.to_local(), q.grad)


@distributed(world_size=2)
def test_unequal_parts_are_right_where_they_are_allowed():
    mesh = build_mesh(tp=2, device_type="cpu")["tp"]
    reference, x = seeded(nn.Linear, 6, 5)
    for style in (
        ColwiseParallel(use_local_output=False),
        ColwiseParallel(output_layouts=Replicate()),
    ):
        holder = nn.ModuleDict({"head": seeded(nn.Linear, 6, 5)[0]})
        apply_tp(holder, mesh, {"head": style})
        got = holder["head"](x)
        got = got.full_tensor() if isinstance(got, DTensor) else got
        torch.testing.assert_close(got, reference(x))
