import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import ptx
from ptx.flops import estimate_flops_fake

ROWS, IN, WIDE = 10, 32, 64
LINEAR = 2 * ROWS * IN * WIDE  # one product


def grad(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, WIDE), nn.ReLU(), nn.Linear(WIDE, IN))


def numbers(count: ptx.flops.Flops) -> tuple[int, int, int]:
    return count.forward, count.backward, count.recompute


def test_mlp_by_hand():
    count = estimate_flops_fake(mlp(), torch.randn(ROWS, IN))
    # No gradient of the input: the first layer has that of its weight only.
    assert numbers(count) == (2 * LINEAR, 3 * LINEAR, 0)
    assert count.total == count.hardware_total == 5 * LINEAR
    assert count.causal == "full"
    assert {name: numbers(part) for name, part in count.by_module.items()} == {
        "": (2 * LINEAR, 3 * LINEAR, 0),
        "0": (LINEAR, LINEAR, 0),
        "2": (LINEAR, 2 * LINEAR, 0),
    }
    assert {name: numbers(part) for name, part in count.by_op.items()} == {
        "addmm": (2 * LINEAR, 0, 0),
        "mm": (0, 3 * LINEAR, 0),
    }


def test_forward_alone():
    count = estimate_flops_fake(mlp(), grad(ROWS, IN), backward=False)
    assert numbers(count) == (2 * LINEAR, 0, 0)


def test_cnn_by_hand():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=4),  # 2 input channels each
        nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),  # 2 output channels each
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    first = 2 * 2 * 16 * 16 * 8 * 3 * 9
    grouped = 2 * 2 * 8 * 8 * 8 * 2 * 9
    transposed = 2 * 2 * 8 * 8 * 8 * 2 * 4
    head = 2 * 2 * 4 * 5
    count = estimate_flops_fake(model, torch.randn(2, 3, 16, 16))
    forward = first + grouped + transposed + head
    assert numbers(count) == (forward, 2 * forward - first, 0)
    assert numbers(count.by_module["3"]) == (grouped, 2 * grouped, 0)
    assert numbers(count.by_op["convolution"]) == (forward - head, 2 * (forward - head) - first, 0)


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 8)).transpose(1, 2).chunk(2, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("causal", "pairs"), [("full", 12 * 12), ("half", 12 * 13 // 2)])
def test_attention_block_by_hand(causal, pairs):
    projections = 2 * (3 * 12) * 32 * (32 + 16 + 32)
    attention = 2 * 2 * (3 * 4) * pairs * 8
    count = estimate_flops_fake(AttentionBlock(), grad(3, 12, 32), causal=causal)
    forward = projections + attention
    assert numbers(count) == (forward, 2 * forward, 0)
    assert numbers(count.by_op["attention"]) == (attention, 2 * attention, 0)
    assert count.causal == causal


def llama(**changes) -> LlamaForCausalLM:
    config = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**config))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("causal", ["full", "half"])
def test_transformers_llama_by_hand(tied, causal):
    tokens = torch.zeros(2, 16, dtype=torch.long)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 112
    pairs = 16 * 16 if causal == "full" else 16 * 17 // 2
    forward = 2 * 32 * (3 * layer + 64 * 100) + 3 * 2 * 2 * (2 * 4) * pairs * 16
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = llama(tie_word_embeddings=tied)
        count = estimate_flops_fake(model, tokens, causal=causal)
        assert numbers(count) == (forward, 2 * forward, 0)
    # A ModelOutput with a loss, by keywords
    count = estimate_flops_fake(model, input_ids=tokens, labels=tokens, causal=causal)
    assert numbers(count) == (forward, 2 * forward, 0)


def test_P10_look_ups_are_free_and_a_tied_head_counts():
    tokens = torch.zeros(10, dtype=torch.long)
    embedding, head = nn.Embedding(100, 32), nn.Linear(32, 100, bias=False)
    for tied in (False, True):
        if tied:
            head.weight = embedding.weight
        model = nn.Sequential(embedding, head)
        assert numbers(estimate_flops_fake(model, tokens)) == (64_000, 128_000, 0)
        fused = estimate_flops_fake(
            lambda x, e, h: ptx.fused_linear_ce(e(x), h, x), tokens, embedding, head
        )
        assert numbers(fused) == (64_000, 128_000, 0)


# What goes in and what comes out


@dataclass
class Batch:
    x: Tensor
    scale: float


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Reads(nn.Module):
    """One linear layer behind any form of input."""

    def __init__(self, read) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(IN, WIDE), read

    def forward(self, *args, **kwargs):
        return self.linear(self.read(*args, **kwargs))


@pytest.mark.parametrize(
    ("read", "args", "kwargs"),
    [
        (lambda x: x, [grad(ROWS, IN)], {}),
        (lambda *, x: x, [], {"x": grad(ROWS, IN)}),
        (lambda batch: batch["images"][0], [{"images": [grad(ROWS, IN), "a name", None]}], {}),
        (lambda batch: batch.x * batch.scale, [Batch(grad(ROWS, IN), 2.0)], {}),
        (lambda pair: pair.first + pair.second, [Pair(grad(ROWS, IN), grad(ROWS, IN))], {}),
        (lambda a, b: a + b, [grad(ROWS, IN), grad(ROWS, 1)], {}),
        (lambda x, n: x[:n], [grad(2 * ROWS, IN), ROWS], {}),
        (lambda x, n: x[: int(n)], [grad(2 * ROWS, IN), torch.tensor(ROWS)], {}),  # one number
    ],
)
def test_inputs_of_any_form(read, args, kwargs):
    count = estimate_flops_fake(Reads(read), *args, **kwargs)
    assert numbers(count) == (LINEAR, 2 * LINEAR, 0)


@dataclass
class Output:
    logits: Tensor
    ids: Tensor
    loss: Tensor | None = None


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y,
        lambda y: y.sum(),
        lambda y: {"loss": y.sum(), "logits": y, "ids": y.argmax(-1), "name": "a"},
        lambda y: [(y.detach(), y), 3],
        lambda y: Output(y, y.argmax(-1)),
        lambda y: Output(y, y.argmax(-1), y.square().mean()),
        lambda y: Pair(y, y.detach()),
        lambda y: Plain(y),
    ],
)
def test_outputs_of_any_form(write):
    model = mlp()
    count = estimate_flops_fake(lambda x: write(model(x)), grad(ROWS, IN))
    assert numbers(count) == (2 * LINEAR, 4 * LINEAR, 0)


def test_frozen_weights_save_their_gradients():
    model = mlp()
    model[0].weight.requires_grad_(False)
    assert numbers(estimate_flops_fake(model, grad(ROWS, IN))) == (2 * LINEAR, 3 * LINEAR, 0)
    model.requires_grad_(False)
    assert numbers(estimate_flops_fake(model, grad(ROWS, IN))) == (2 * LINEAR, 2 * LINEAR, 0)
    with pytest.raises(ValueError, match="no output requires grad; pass backward=False"):
        estimate_flops_fake(model, torch.randn(ROWS, IN))
    assert numbers(estimate_flops_fake(model, torch.randn(ROWS, IN), backward=False))[0] > 0


def test_one_output_in_two_places_counts_once():
    linear = nn.Linear(IN, WIDE)
    count = estimate_flops_fake(lambda x: [y := linear(x), y, {"again": y}], grad(ROWS, IN))
    assert numbers(count) == (LINEAR, 2 * LINEAR, 0)


def test_modules_of_a_function_are_found():
    encoder, decoder = nn.Linear(IN, WIDE), nn.Linear(WIDE, IN)
    helper = lambda x: decoder(x)  # noqa: E731
    want = (2 * LINEAR, 4 * LINEAR, 0)
    count = estimate_flops_fake(lambda x: helper(encoder(x)), grad(ROWS, IN))
    assert numbers(count) == want
    assert set(count.by_module) == {"", "encoder", "helper", "helper.decoder"}
    assert numbers(estimate_flops_fake(_two_calls, encoder, decoder, grad(ROWS, IN))) == want
    assert numbers(estimate_flops_fake(_global_call, grad(ROWS, IN))) == (LINEAR, 2 * LINEAR, 0)
    assert encoder.weight.grad is decoder.weight.grad is None


GLOBAL = nn.Linear(IN, WIDE)


def _two_calls(encoder, decoder, x):
    return decoder(encoder(x))


def _global_call(x):
    return GLOBAL(x)


def test_a_module_that_is_called_twice_counts_twice():
    linear = nn.Linear(IN, IN, bias=False)
    count = estimate_flops_fake(lambda x: linear(linear(x)), grad(ROWS, IN))
    assert numbers(count) == (LINEAR, 2 * LINEAR, 0)  # half as wide each


def test_recurrent_layers_count_their_products():
    # In one direction: a step has 4 gates of two products each; the first hidden state is constant,
    # so its gradient isn't computed.
    steps, batch, width, hidden = 5, 3, 8, 16
    into, through = 2 * batch * width * 4 * hidden, 2 * batch * hidden * 4 * hidden
    count = estimate_flops_fake(nn.LSTM(width, hidden), grad(steps, batch, width))
    forward = steps * (into + through)
    assert numbers(count) == (forward, 2 * forward - through, 0)
    for kind in (nn.GRU, nn.RNN):
        assert estimate_flops_fake(kind(width, hidden), grad(steps, batch, width)).forward > 0


@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_multihead_attention(need_weights):
    module, x = nn.MultiheadAttention(32, 4, batch_first=True), grad(2, 7, 32)
    count = estimate_flops_fake(module, x, x, x, need_weights=need_weights)
    forward = 2 * 14 * 4 * 32 * 32 + 2 * 2 * (2 * 4) * 49 * 8
    assert numbers(count) == (forward, 2 * forward, 0)
    assert (
        estimate_flops_fake(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval(), x, backward=False
        ).forward
        == forward + 2 * 2 * 14 * 32 * 64
    )


def test_meta_real_and_mixed_tensors_are_one():
    want = estimate_flops_fake(mlp(), torch.randn(ROWS, IN))
    model = mlp().to("meta")
    assert estimate_flops_fake(model, torch.randn(ROWS, IN)) == want
    assert estimate_flops_fake(model, torch.empty(ROWS, IN, device="meta")) == want
    model[0] = nn.Linear(IN, WIDE)
    assert estimate_flops_fake(model, torch.randn(ROWS, IN)) == want
    with torch.device("meta"):
        offset = nn.Sequential(mlp(), Reads(lambda x: x + torch.zeros(IN)))
        assert estimate_flops_fake(offset, torch.empty(ROWS, IN)).forward == 3 * LINEAR


@pytest.mark.gpu
def test_an_accelerator_counts_the_same():
    device = torch.accelerator.current_accelerator()
    args = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=16)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    model = ptx.Transformer(args)
    ptx.apply_ac(model, "selective")
    want = estimate_flops_fake(model, tokens)
    assert want == ptx.flops.transformer_flops(args, 2, 8, ac="selective")
    assert estimate_flops_fake(model.to(device), tokens.to(device)) == want
    assert estimate_flops_fake(model, tokens) == want  # tokens from the host


def test_code_under_autocast_and_no_grad_counts_the_same():
    want = estimate_flops_fake(mlp(), torch.randn(ROWS, IN))
    with torch.no_grad():
        assert estimate_flops_fake(mlp(), torch.randn(ROWS, IN)) == want
    with torch.inference_mode():
        assert estimate_flops_fake(mlp(), torch.randn(ROWS, IN)) == want
    with torch.autocast("cpu", torch.bfloat16):
        assert estimate_flops_fake(mlp(), torch.randn(ROWS, IN)) == want
        count = estimate_flops_fake(AttentionBlock(), grad(3, 12, 32))
    assert count == estimate_flops_fake(AttentionBlock(), grad(3, 12, 32))


def test_parametrized_and_normed_weights():
    weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(IN, WIDE))
    assert numbers(estimate_flops_fake(weight_norm, grad(ROWS, IN))) == (LINEAR, 2 * LINEAR, 0)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(IN, WIDE))
    # One power iteration, two products of the weight with a vector, and one for the norm
    extra = estimate_flops_fake(spectral, grad(ROWS, IN)).forward - LINEAR
    assert 2 * 2 * IN * WIDE <= extra <= 4 * 2 * IN * WIDE


def test_bare_flags_and_small_buffers_can_be_read():
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(IN, WIDE)
            self.register_buffer("started", torch.tensor(False))

        def forward(self, x):
            if not self.started:
                self.started.fill_(True)
                x = x * 2
            return self.linear(x)

    model = Once()
    assert numbers(estimate_flops_fake(model, grad(ROWS, IN))) == (LINEAR, 2 * LINEAR, 0)
    assert not model.started


# What stops a count


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match='causal must be "full" or "half", got \'both\''):
        estimate_flops_fake(mlp(), torch.randn(ROWS, IN), causal="both")
    with pytest.raises(ValueError, match="must be a module or a function"):
        estimate_flops_fake([mlp()], torch.randn(ROWS, IN))


def test_nothing_to_count_raises():
    with pytest.raises(ValueError, match="no product, convolution or attention ran"):
        estimate_flops_fake(nn.Sequential(nn.Embedding(5, 6)), torch.zeros(3, dtype=torch.long))


def test_values_that_decide_raise_and_say_where():
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(IN, IN), nn.Linear(IN, IN)])
            self.choose = Reads(lambda x: x)

        def forward(self, x):
            return self.experts[int(self.choose(x).sum() > 0)](x)

    with pytest.raises(ValueError, match=r"_local_scalar_dense.* module '1' stopped.* values"):
        estimate_flops_fake(nn.Sequential(nn.ReLU(), Picks()), grad(ROWS, IN))


def test_errors_of_the_model_come_with_a_note():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError("missing")

    with pytest.raises(KeyError) as caught:
        estimate_flops_fake(nn.Sequential(mlp(), Broken()), grad(ROWS, IN))
    assert "module '1'" in caught.value.__notes__[0]
    with pytest.raises(
        ValueError, match=r"aten.addmm.* in module '0' stopped the count: .*(32|33)"
    ):
        estimate_flops_fake(mlp(), grad(ROWS, IN + 1))


def test_a_part_of_a_pipeline_is_refused():
    args = ptx.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=50, multiple_of=16)
    model = ptx.Transformer(args)
    del model.layers["1"]
    with pytest.raises(ValueError, match=r"part of a pipeline.*before apply_pp"):
        estimate_flops_fake(model, torch.zeros(1, 4, dtype=torch.long))
    marked = nn.Linear(IN, WIDE)
    marked._ptx_part = True
    with pytest.raises(ValueError, match="part of a pipeline"):
        estimate_flops_fake(marked, grad(ROWS, IN))


def test_modules_without_shapes_or_source_are_refused():
    with pytest.raises(ValueError, match="call the model once"):
        estimate_flops_fake(nn.LazyLinear(4), grad(ROWS, IN))


def test_a_real_parameter_that_nobody_holds_is_refused():
    stray = [nn.Parameter(torch.randn(IN, WIDE))]
    constant = torch.randn(ROWS, IN)
    holder = type("Holder", (), {"weights": stray})  # a class: nothing that could be copied
    with pytest.raises(ValueError, match=r"\[32, 64\] that requires grad is in no module"):
        estimate_flops_fake(lambda x: x @ holder.weights[0], grad(ROWS, IN))
    count = estimate_flops_fake(lambda x: x @ stray[0] + constant @ stray[0], grad(ROWS, IN))
    assert numbers(count) == (2 * LINEAR, 3 * LINEAR, 0)
    assert stray[0].grad is None


def test_random_numbers_are_drawn_from_nowhere():
    model = nn.Sequential(nn.Linear(IN, IN), nn.Dropout(0.5))
    x = grad(ROWS, IN)
    states = torch.get_rng_state(), random.getstate()
    estimate_flops_fake(lambda x: model(x) * random.random(), x)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
