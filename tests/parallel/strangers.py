"""Models that ptx has never seen, written as people write them, and what a user adds to train each on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from transformers import LlamaConfig, LlamaForCausalLM

import ptx
from ptx.parallel import HeadParallel, Replicated

VOCAB, SEQ, DIM, HEADS = 61, 12, 32, 4  # 61 rows split unevenly
SAMPLES = 4
CLASSES = 7

Plan = dict[str, ParallelStyle]


@dataclass(frozen=True)
class Stranger:
    """One model with what its user writes.

    Attributes:
        model: Builds it.
        batch: A generator -> tensors of SAMPLES rows.
        loss: (model, *batch) -> the mean over the rows given.
        plan: The model -> a plan for `apply_tp`; None: its user has none.
        fsdp: Options of `apply_fsdp2`.
        init: For `materialize`; None: the model's own way.
        meta: Whether it is built on meta; else by every rank, from random states that differ.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    plan: Callable[[nn.Module], Plan] | None = None
    fsdp: Mapping[str, Any] = field(default_factory=dict)
    init: Callable[[Any], object] | None = None
    meta: bool = True


# Styles that a user writes; docs/your_own_model.md shows the same code


class SplitFused(ParallelStyle):
    """An nn.Linear whose rows are several matrices, [q; k; v]: each rank computes its part of each."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        Replicated()._apply(module, device_mesh)
        module.__class__, module.parts = SplitFusedLinear, self.parts
        return module


class SplitFusedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # [..., dim], equal on every rank -> [..., rows / tp]
        mesh = self.weight.device_mesh
        x = DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        bias = None if self.bias is None else self.my_rows(self.bias, mesh)
        return F.linear(x, self.my_rows(self.weight, mesh), bias)

    def my_rows(self, whole: DTensor, mesh: DeviceMesh) -> Tensor:
        # Partial: this rank's gradient is its share of a sum over the ranks.
        local = whole.to_local(grad_placements=[Partial()])
        parts = local.unflatten(0, (self.parts, mesh.size(), -1))
        return parts[:, mesh.get_local_rank()].flatten(0, 1)


# A GPT-2-like model


class FusedAttention(nn.Module):
    """Rows of ``qkv`` are [q; k; v], or [q; k; v] of one head after the other (GPT-NeoX, Megatron)."""

    def __init__(self, by_heads: bool) -> None:
        super().__init__()
        self.by_heads = by_heads
        self.head_dim = DIM // HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        if self.by_heads:
            q, k, v = self.qkv(x).view(B, S, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = self.qkv(x).view(B, S, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.proj(y.transpose(1, 2).reshape(B, S, -1)))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GptBlock(nn.Module):
    def __init__(self, by_heads: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(DIM)
        self.attn = FusedAttention(by_heads)
        self.ln_2 = nn.LayerNorm(DIM)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, by_heads: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.wpe = nn.Embedding(2 * SEQ, DIM)
        self.h = nn.ModuleList(GptBlock(by_heads) for _ in range(2))
        self.ln_f = nn.LayerNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(p, std=0.1 / (2 * len(self.h)) ** 0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.1)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def init_gpt(model: Gpt) -> None:
    model.apply(model._init_weights)


def _gpt_plan(**attention: ParallelStyle) -> Plan:
    return {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "wpe": Replicated(),
        "h.*.ln_*": Replicated(),
        **{f"h.*.attn.{name}": style for name, style in attention.items()},
        "h.*.mlp.up": ColwiseParallel(),
        "h.*.mlp.down": RowwiseParallel(),
        "ln_f": Replicated(),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def gpt_plan(_: nn.Module) -> Plan:
    return _gpt_plan(qkv=SplitFused(3), proj=RowwiseParallel())


def gpt_plan_with_whole_attention(_: nn.Module) -> Plan:
    return _gpt_plan(qkv=Replicated(), proj=Replicated())


def gpt_plan_cut_through_the_fused_matrix(_: nn.Module) -> Plan:
    """Wrong: the first of two ranks would take all of q and half of k."""
    return _gpt_plan(qkv=ColwiseParallel(), proj=RowwiseParallel())


def gpt_plan_by_heads(_: nn.Module) -> Plan:
    """Sequence parallel: between the blocks each rank has a part of the sequence."""
    part = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        # [S, dim]: its rows are the sequence
        "wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "h.*.ln_*": SequenceParallel(),
        "h.*.attn": part,
        "h.*.attn.qkv": HeadParallel(HEADS),
        "h.*.attn.proj": RowwiseParallel(output_layouts=Shard(1)),
        "h.*.mlp": part,
        "h.*.mlp.up": ColwiseParallel(),
        "h.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "ln_f": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def token_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def token_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    output = model(tokens)
    logits = output if isinstance(output, Tensor) else output.logits
    if isinstance(logits, DTensor):  # sharded over the vocabulary
        return ptx.cross_entropy(logits, labels)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def llama(tied: bool) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=DIM,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=VOCAB,
            max_position_embeddings=SEQ,
            tie_word_embeddings=tied,
            pad_token_id=None,
            use_cache=False,
        )
    )


# A nested model without `.layers`


class Mixer(nn.Module):
    """One norm and one MLP, both called twice, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.mlp = Mlp()
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.gain * self.attend(y, y, y, need_weights=False)[0]
        x = x + self.mlp(self.norm(x))
        return x + self.gain * self.mlp(x)


class Stage(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.pool = nn.Linear(2 * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(self.pool(x.unflatten(1, (-1, 2)).flatten(2)))


class Encoder(nn.Module):
    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        first, last = Mixer(), Mixer()
        again = [last, first] if recurrent else []  # the same modules at several places
        self.stages = nn.ModuleList([Stage(first, Mixer()), Stage(last, Mixer(), *again)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Twins(nn.Module):
    """Compares two signals by one encoder, so each of its blocks runs twice, one four times."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((5,), 0.5))
        self.register_buffer("waves", torch.linspace(1, 2, DIM), persistent=False)
        self.stem = nn.Sequential(nn.Linear(5, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.mark = nn.Parameter(torch.zeros(2, 1, DIM))
        self.encoder = Encoder(recurrent)
        self.scales = nn.ParameterList([torch.ones(DIM), torch.ones(1)])
        self.score = nn.Bilinear(DIM, DIM, 1)
        self.unused = nn.Linear(DIM, 3)
        self.unused_too = nn.Parameter(torch.zeros(3))
        for frozen in (self.stem, self.encoder.stages[0].blocks[0]):
            frozen.requires_grad_(False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # [B, S, 5] -> [B]
        ends = [self.encode(x, side) for side, x in enumerate((first, second))]
        return self.score(*ends).squeeze(-1) * self.scales[1]

    def encode(self, x: Tensor, side: int) -> Tensor:
        x = self.stem(x - self.mean) + self.mark[side]
        return self.encoder(x * self.waves).mean(1) * self.scales[0]


def init_twins(model: Twins) -> None:
    for name, p in model.named_parameters():
        centre = float("gain" in name or "scales" in name or "norm.weight" in name)
        nn.init.normal_(p, mean=centre, std=0.2)
    model.mean.fill_(0.5)
    model.waves.copy_(torch.linspace(1, 2, DIM))


class Fourier(nn.Module):
    """Random features, drawn once, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(5, DIM))
        self.mlp = Mlp()
        self.score = nn.Linear(DIM, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # [B, S, 5] -> [B]
        return self.score(self.mlp(torch.cos((first - second) @ self.waves)).mean(1)).sum(-1)


def mlp_plan(_: nn.Module) -> Plan:
    """Split the MLPs, keep all the rest whole: the least that one has to know of a model."""
    return {
        "encoder.stages.*.blocks.*.mlp.up": ColwiseParallel(),
        "encoder.stages.*.blocks.*.mlp.down": RowwiseParallel(),
        "": Replicated(),
    }


def fourier_plan(_: nn.Module) -> Plan:
    return {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(), "": Replicated()}


def pair_batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    first, second = torch.randn(2, SAMPLES, 8, 5, generator=generator)
    return first, second, torch.randn(SAMPLES, generator=generator)


def pair_loss(model: nn.Module, first: Tensor, second: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(first, second), target)


# Vision


class VitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(3))
        self.k = nn.Linear(DIM, DIM, bias=False)  # which the softmax would take away again

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = VitAttention(), Mlp()
        self.gamma = nn.Parameter(torch.ones(DIM))  # a scale for each layer

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, 4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, DIM))
        self.blocks = nn.Sequential(VitBlock(), VitBlock())
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def init_weights(self) -> None:
        for name, p in self.named_parameters():
            nn.init.trunc_normal_(p, mean=float("norm" in name or "gamma" in name), std=0.2)

    def forward(self, images: Tensor) -> Tensor:  # [B, 3, 8, 8]
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_plan(_: nn.Module) -> Plan:
    return {
        "blocks.*.attn.[qkv]": HeadParallel(HEADS),
        "blocks.*.attn.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "": Replicated(),
    }


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class ConvNet(nn.Module):
    """BatchNorm uses its running statistics (fine-tuning); from a batch they would be each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
        self.layer1 = nn.Sequential(ResidualBlock(5), ResidualBlock(5))
        self.down = nn.Conv2d(5, 6, 2, stride=2)
        self.layer2 = nn.Sequential(ResidualBlock(6), ResidualBlock(6))
        self.fc = nn.Linear(6, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, std=0.3)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
        self.to(memory_format=torch.channels_last)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer2(self.down(self.layer1(self.stem(images))))
        return self.fc(x.mean((2, 3)))


def image_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return images, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


# The tables

_TOKENS = {"batch": token_batch, "loss": token_loss}
_GPT = {**_TOKENS, "init": init_gpt, "fsdp": {"head": "lm_head"}}
_PAIRS = {"batch": pair_batch, "loss": pair_loss}
_TWIN_UNITS = {"units": ["encoder.stages.*.blocks.*", "score", "unused"]}
_RECURRENT_TWINS = functools.partial(Twins, recurrent=True)
_IMAGES = {"batch": image_batch, "loss": image_loss}

STRANGERS = {
    "gpt": Stranger(Gpt, plan=gpt_plan, **_GPT),
    "gpt, attention whole": Stranger(Gpt, plan=gpt_plan_with_whole_attention, **_GPT),
    "gpt by heads, sequence parallel": Stranger(
        functools.partial(Gpt, by_heads=True), plan=gpt_plan_by_heads, **_GPT
    ),
    "llama": Stranger(functools.partial(llama, tied=False), plan=ptx.tp_plan, **_TOKENS),
    "llama, tied": Stranger(functools.partial(llama, tied=True), plan=ptx.tp_plan, **_TOKENS),
    "twins": Stranger(Twins, plan=mlp_plan, init=init_twins, fsdp=_TWIN_UNITS, **_PAIRS),
    "twins, recurrent": Stranger(_RECURRENT_TWINS, plan=mlp_plan, init=init_twins, **_PAIRS),
    "random buffer": Stranger(Fourier, plan=fourier_plan, meta=False, fsdp={"units": []}, **_PAIRS),
    "vit": Stranger(Vit, plan=vit_plan, **_IMAGES),
    "convnet": Stranger(ConvNet, meta=False, **_IMAGES),
}

# What a user could write and ptx can't know to be wrong.
WRONG = {
    "gpt, fused matrix cut": Stranger(Gpt, plan=gpt_plan_cut_through_the_fused_matrix, **_GPT),
}
