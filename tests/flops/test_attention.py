import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ptx
from ptx.flops import estimate_flops_fake
from ptx.flops._attention import attention_pairs


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def sdpa(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_P01_attention_counts_without_a_gpu(device):
    for seq, forward in [(64, 12_582_912), (128, 4 * 12_582_912)]:  # quadratic
        q = torch.empty(1, 12, seq, 64, device=device, requires_grad=True)
        count = estimate_flops_fake(sdpa(), q, q, q)
        assert (count.forward, count.total) == (forward, 3 * forward)


def test_P04_the_convention_is_named_and_counts_causal_calls_only():
    q = grad(1, 1, 8, 4)
    square, triangle = 2 * 2 * 64 * 4, 2 * 2 * 36 * 4
    for causal, want in [("full", square), ("half", triangle)]:
        count = estimate_flops_fake(sdpa(is_causal=True), q, q, q, causal=causal)
        assert (count.forward, count.backward) == (want, 2 * want)
        assert count.causal == causal
        assert f'causal attention "{causal}"' in str(count)
        assert estimate_flops_fake(sdpa(), q, q, q, causal=causal).forward == square
    masks = [torch.ones(8, 8, dtype=torch.bool).tril(), grad(8, 8), grad(1, 1, 1, 8)]
    for mask in masks:  # what a mask hides isn't known
        count = estimate_flops_fake(sdpa(attn_mask=mask), q, q, q, causal="half")
        assert (count.forward, count.backward) == (square, 2 * square)


@pytest.mark.parametrize(
    ("queries", "keys", "pairs"), [(4, 4, 10), (1, 5, 1), (2, 5, 3), (5, 2, 1 + 2 * 4), (5, 1, 5)]
)
def test_causal_pairs_are_those_that_torch_computes(queries, keys, pairs):
    # The scores of a causal call are as many as the gradients of v that arrive.
    assert attention_pairs(queries, keys, is_causal=True, causal="half") == pairs
    assert attention_pairs(queries, keys, is_causal=True, causal="full") == queries * keys
    assert attention_pairs(queries, keys, is_causal=False, causal="half") == queries * keys
    seen = torch.ones(queries, keys, dtype=torch.bool).tril()
    assert int(seen.sum()) == pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("q", "k", "v", "options"),
    [
        ((2, 4, 8, 16), (2, 4, 8, 16), (2, 4, 8, 16), {}),
        ((2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), {"enable_gqa": True}),
        ((2, 4, 8, 16), (2, 1, 8, 16), (2, 1, 8, 16), {}),  # broadcast
        ((2, 4, 8, 16), (1, 4, 6, 16), (2, 4, 6, 16), {}),
        ((2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 24), {}),  # values of another width
        ((2, 4, 8, 16), (2, 2, 6, 16), (2, 2, 6, 24), {"enable_gqa": True}),
        ((2, 4, 8, 16), (2, 2, 6, 16), (2, 2, 6, 16), {"enable_gqa": True, "attn_mask": (8, 6)}),
        ((2, 4, 8, 16), (2, 4, 6, 16), (2, 4, 6, 16), {"attn_mask": (2, 1, 8, 6)}),
        ((4, 8, 16), (4, 6, 16), (4, 6, 16), {}),
        ((4, 8, 16), (2, 6, 16), (2, 6, 16), {"enable_gqa": True}),
        ((8, 16), (6, 16), (6, 16), {"attn_mask": (8, 6)}),
        ((3, 2, 4, 8, 16), (3, 2, 4, 8, 16), (3, 2, 4, 8, 16), {"is_causal": True}),
        ((2, 4, 8, 3), (2, 4, 8, 3), (2, 4, 8, 3), {"is_causal": True}),
    ],
)
def test_any_shape_counts_two_products_forward_and_four_backward(q, k, v, options, dtype, dropout):
    if "attn_mask" in options:
        options = {**options, "attn_mask": torch.ones(options["attn_mask"], dtype=torch.bool)}
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in (q, k, v)]
    attend = sdpa(**options, dropout_p=dropout)
    shapes = []
    count = estimate_flops_fake(lambda *x: shapes.append(attend(*x).shape) or attend(*x), *inputs)
    real = attend(*inputs)
    batch_heads = real.shape[:-2].numel()
    forward = 2 * batch_heads * q[-2] * k[-2] * (q[-1] + v[-1])
    assert count.forward == 2 * forward  # called twice
    assert count.backward == 2 * forward  # one of the results is used
    assert count.by_op.keys() == {"attention"}
    assert not shapes  # appended to the copy's list


def test_shapes_and_layouts_are_those_of_the_real_call():
    def check(q, k, v, **options):
        out = F.scaled_dot_product_attention(q, k, v, **options)
        assert out.shape == (*q.shape[:-1], v.shape[-1])
        # Models fold the heads away so, which works for one memory layout only
        return out.transpose(1, 2).view(q.shape[0], q.shape[2], -1) if options else out

    q, k = grad(2, 8, 4, 16).transpose(1, 2), grad(2, 8, 2, 16).transpose(1, 2)
    estimate_flops_fake(check, q, q, q)
    estimate_flops_fake(check, q, k, k, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_backend_that_is_chosen_changes_nothing(backend):
    q = grad(2, 4, 8, 16)
    want = estimate_flops_fake(sdpa(is_causal=True), q, q, q, causal="half")
    with sdpa_kernel(backend):
        assert estimate_flops_fake(sdpa(is_causal=True), q, q, q, causal="half") == want


def test_fused_ops_called_by_themselves():
    aten = torch.ops.aten
    q, k = grad(2, 4, 8, 16), grad(2, 2, 8, 16)
    want = estimate_flops_fake(sdpa(is_causal=True, enable_gqa=True), q, k, k, causal="half")
    ops = {
        "flash": lambda q, k: aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True)[0],
        "cudnn": lambda q, k: aten._scaled_dot_product_cudnn_attention(
            q, k, k, None, True, 0.0, True
        )[0],
        "cpu": lambda q, k: aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, 0.0, True)[0],
        "token-major": lambda q, k: aten._flash_attention_forward(
            *(t.transpose(1, 2) for t in (q, k, k)), None, None, 8, 8, 0.0, True, False
        )[0],
    }
    for name, op in ops.items():
        count = estimate_flops_fake(op, q, k, causal="half", backward=False)
        assert count.forward == want.forward, name
        assert count.by_op.keys() == {"attention"}


def test_written_out_attention_counts_the_same_square():
    def written(q, k, v):
        scores = (q @ k.mT).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    q = grad(2, 4, 8, 16)
    count = estimate_flops_fake(written, q, q, q, causal="half")
    want = estimate_flops_fake(sdpa(is_causal=True), q, q, q)
    assert (count.forward, count.backward) == (want.forward, want.backward)


def test_flex_attention_counts_the_square_and_trains_without_a_gpu():
    q, k = grad(1, 4, 128, 16), grad(1, 2, 128, 16)
    square = 2 * 2 * 4 * 128 * 128 * 16
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    for block_mask in (None, mask):
        count = estimate_flops_fake(
            lambda q, k, m: flex_attention(q, k, k, block_mask=m, enable_gqa=True),
            q,
            k,
            block_mask,
            causal="half",
        )
        assert (count.forward, count.backward) == (square, 2 * square)
    with pytest.raises(NotImplementedError, match="backward on CPU"):  # torch's own again
        flex_attention(q, q, q)


def test_windows_and_documents_are_masks():
    args = ptx.ModelArgs(
        dim=32, n_layers=2, n_heads=4, vocab_size=50, multiple_of=16, sliding_window=3
    )
    tokens = torch.zeros(2, 8, dtype=torch.long)
    square = 2 * 2 * 2 * (2 * 4) * 64 * 8
    for causal in ("full", "half"):
        model = ptx.Transformer(args)
        count = estimate_flops_fake(model, tokens, causal=causal)
        assert count.by_op["attention"].forward == square
        model = ptx.Transformer(ptx.ModelArgs(**{**vars(args), "sliding_window": None}))
        count = estimate_flops_fake(model, tokens, documents=tokens, causal=causal)
        assert count.by_op["attention"].forward == square


def test_lengths_that_only_tensors_say_are_refused():
    def varlen(q, lengths):
        op = torch.ops.aten._flash_attention_forward
        return op(q, q, q, lengths, lengths, 8, 8, 0.0, True, False)[0]

    lengths = torch.tensor([0, 5, 16], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"_flash_attention_forward.*lengths that only tensors say"
    ):
        estimate_flops_fake(varlen, torch.randn(16, 4, 16), lengths, backward=False)


def test_wrong_calls_fail_as_they_do_in_torch():
    q, mask = grad(1, 1, 8, 4), torch.ones(8, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="attn_mask or is_causal, not both"):
        estimate_flops_fake(sdpa(is_causal=True, attn_mask=mask), q, q, q)
    with pytest.raises(RuntimeError, match="broadcast"):
        estimate_flops_fake(sdpa(), q, grad(3, 1, 8, 4), grad(2, 1, 8, 4))


class Attends(nn.Module):
    def forward(self, q):
        return F.scaled_dot_product_attention(q, q, q)


def test_frozen_keys_count_as_the_kernels_do():
    # A fused backward computes all of its gradients.
    q, k = grad(1, 2, 8, 4), torch.randn(1, 2, 8, 4)
    count = estimate_flops_fake(sdpa(), q, k, k)
    assert count.backward == 2 * count.forward
