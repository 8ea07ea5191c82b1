from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from collectives import CollectiveLog
from harness import distributed
from ptx.loss import cross_entropy, token_scale
from ptx.mesh import build_mesh, data_mesh, fsdp_mesh, loss_mesh
from ptx.model import ModelArgs, Transformer
from ptx.parallel._accumulate import FLAGS, accumulate_grads
from ptx.parallel._fsdp2 import apply_fsdp2
from ptx.parallel._tp import apply_tp
from ptx.parallel._tp_plan import tp_plan

VOCAB, SEQ, ROWS = 31, 8, 4  # ROWS: samples of a micro-batch, over all ranks
REDUCE = ("last", "every")


def own(tie=False, frozen=()):
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 24}
    model = Transformer(ModelArgs(vocab_size=VOCAB, max_seq_len=SEQ, tie_embeddings=tie, **sizes))
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    return model


def llama(tie=False):
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=24,
            vocab_size=VOCAB,
            max_position_embeddings=SEQ,
            tie_word_embeddings=tie,
            use_cache=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


# (model, reshard_after_forward, also under tensor parallelism)
MODELS = [
    (own, True, True),
    (lambda: own(tie=True), False, True),
    (lambda: own(frozen=("tok_embeddings", "layers.0.feed_forward")), True, False),
    (llama, False, False),
    (lambda: llama(tie=True), True, True),
]


def window_of(micro_batches, seed=0):
    """Global micro-batches; the second half of the samples, and the last but one, have few labels or none."""
    generator = torch.Generator().manual_seed(seed)
    window = []
    for i in range(micro_batches):
        tokens = torch.randint(VOCAB, (ROWS, SEQ), generator=generator)
        labels = torch.randint(VOCAB, (ROWS, SEQ), generator=generator)
        labels[ROWS // 2 :] = -100
        labels[0, : 3 * i] = -100
        if i == micro_batches - 2:
            labels[:] = -100
            labels[ROWS - 1, 0] = 5
        window.append((tokens, labels))
    return window


def logits_of(model, tokens):
    output = model(tokens)
    return output if isinstance(output, torch.Tensor) else output.logits


def full_batch_gradients(model, window):
    """What one process computes on all tokens of the window at once."""
    tokens, labels = (torch.cat(parts) for parts in zip(*window))
    logits = logits_of(model, tokens)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    return gradients(model)


def accumulate(model, mesh, window, reduce, logs=None):
    data = data_mesh(mesh)
    rows = ROWS // data.size()
    mine = slice(data.get_local_rank() * rows, (data.get_local_rank() + 1) * rows)
    window = [(tokens[mine], labels[mine]) for tokens, labels in window]
    scale = token_scale([labels for _, labels in window], loss_mesh(mesh))
    for i, (tokens, labels) in enumerate(window):
        last = i == len(window) - 1
        with CollectiveLog() as log, accumulate_grads(model, last=last, reduce=reduce):
            loss = cross_entropy(logits_of(model, tokens), labels, reduction="sum")
            (loss * scale).backward()
        if logs is not None:
            logs.append(log)


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_gradients(model, want, rtol=1e-5):
    got = gradients(model)
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, g in got.items():
        assert (g - want[name]).abs().max() <= rtol * want[name].abs().max(), name


def flags(model):
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [g for module in modules for g in module._get_fsdp_state()._fsdp_param_groups]
    return [[getattr(group, flag) for flag in FLAGS] for group in groups]


def wrap(model, mesh, *, sequence_parallel=True, **options):
    apply_tp(model, mesh["tp"], tp_plan(model, sequence_parallel=sequence_parallel))
    return apply_fsdp2(model, fsdp_mesh(mesh), **options)


MESHES = {
    "dp 2": {"dp_shard": 2},
    "dp 2 x tp 2": {"dp_shard": 2, "tp": 2},
    "HSDP 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "HSDP 2 x 1 x tp 2": {"dp_replicate": 2, "dp_shard": 1, "tp": 2},
}


def assert_exact_on(degrees):
    mesh = build_mesh(**degrees, device_type="cpu")
    windows = window_of(3), window_of(2, seed=1)
    for build, reshard, with_tp in MODELS:
        if mesh["tp"].size() > 1 and not with_tp:
            continue
        torch.manual_seed(0)
        reference = build()
        start = {key: value.clone() for key, value in reference.state_dict().items()}
        want = []
        for window in windows:
            want.append(full_batch_gradients(reference, window))
            reference.zero_grad()
        for reduce in REDUCE:
            model = build()
            model.load_state_dict(start)
            wrap(model, mesh, sequence_parallel=reshard, reshard_after_forward=reshard)
            before = flags(model)
            for window, grads in zip(windows, want):
                accumulate(model, mesh, window, reduce)
                assert_gradients(model, grads)
                assert flags(model) == before
                model.zero_grad()


@distributed(world_size=2)
def test_equals_the_full_batch_on_dp_2():
    assert_exact_on(MESHES["dp 2"])


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "dp 2"])
@distributed(world_size=4)
def test_equals_the_full_batch_on(mesh):
    assert_exact_on(MESHES[mesh])


@pytest.mark.parametrize("sequence_parallel", [True, False])
@distributed(world_size=2)
def test_tensor_parallel_alone_has_nothing_to_do(sequence_parallel):
    mesh = build_mesh(tp=2, device_type="cpu")
    torch.manual_seed(0)
    reference, model = own(), own()
    model.load_state_dict(reference.state_dict())
    apply_tp(model, mesh["tp"], tp_plan(model, sequence_parallel=sequence_parallel))
    want = full_batch_gradients(reference, window_of(3))
    for reduce in REDUCE:
        accumulate(model, mesh, window_of(3), reduce)
        assert_gradients(model, want)
        model.zero_grad()


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def loss_of(model, x):
    return model(x).square().mean()


@distributed(world_size=4)
def test_F08_hsdp_in_each_sync_mode():
    """Full-batch gradient, equal replicas, flags put back also by an exception, a normal step after."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    reference, x = Mlp(), torch.randn(8, 6)
    (loss_of(reference, x) * 2).backward()  # two micro-batches, not divided by their number
    want = gradients(reference)
    mine = x.view(2, 4, 1, 6)[:, dist.get_rank()]
    for mode in ("always", *REDUCE):
        model = Mlp()
        model.load_state_dict(reference.state_dict())
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        before = flags(model)
        for step in range(2):
            for i, micro_batch in enumerate(mine):
                if mode == "always" or step == 1:
                    loss_of(model, micro_batch).backward()
                else:
                    with accumulate_grads(model, last=i == 1, reduce=mode):
                        assert (flags(model) == before) == (i == 1 and mode == "last")
                        loss_of(model, micro_batch).backward()
                assert flags(model) == before
            assert_gradients(model, want)
            for p in model.parameters():
                replicas = [torch.empty_like(p.grad.to_local()) for _ in range(2)]
                dist.all_gather(replicas, p.grad.to_local(), group=mesh.get_group("replicate"))
                assert torch.equal(*replicas)
            model.zero_grad()
        for last, reduce in product((False, True), REDUCE):
            with pytest.raises(KeyError), accumulate_grads(model, last=last, reduce=reduce):
                raise KeyError
            assert flags(model) == before


@distributed(world_size=1)
def test_L01_plain_model_in_one_process():
    """Sums over the tokens of the window, not a mean of the micro-batches' means."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]])
    x = torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, -1.0], [1.0, 1.0]])
    y = torch.tensor([0, -100, 2, 1])
    model, reference = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(weight)
        reference.weight.copy_(weight)
    want = F.cross_entropy(reference(x), y)
    want.backward()
    scale = token_scale([y[:2], y[2:]], loss_mesh(build_mesh(device_type="cpu")))
    total = torch.zeros(())
    for i, rows in enumerate((slice(0, 2), slice(2, 4))):
        with accumulate_grads(model, last=i == 1):
            loss = cross_entropy(model(x[rows]), y[rows], reduction="sum") * scale
            loss.backward()
            total += loss.detach()
    assert total.item() == pytest.approx(2.48947, abs=1e-5)
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)


@distributed(world_size=2)
def test_L01_unequal_micro_batches_and_ranks():
    """The numbers of L01, one row per rank and micro-batch; rank 1 has nothing in the first."""
    mesh = build_mesh(device_type="cpu")
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]]))
    reference = nn.Linear(2, 3, bias=False)
    reference.load_state_dict(model[0].state_dict())
    x = torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, -1.0], [1.0, 1.0]])
    y = torch.tensor([0, -100, 2, 1])
    F.cross_entropy(reference(x), y).backward()
    fully_shard(model, mesh=fsdp_mesh(mesh))
    mine = [slice(dist.get_rank() + 2 * i, dist.get_rank() + 2 * i + 1) for i in range(2)]
    scale = token_scale([y[rows] for rows in mine], loss_mesh(mesh))
    for reduce in REDUCE:
        total = torch.zeros(())
        for i, rows in enumerate(mine):
            with accumulate_grads(model, last=i == 1, reduce=reduce):
                loss = cross_entropy(model(x[rows]), y[rows], reduction="sum") * scale
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        assert total.item() == pytest.approx(2.48947, abs=1e-5)
        torch.testing.assert_close(full(model[0].weight.grad), reference.weight.grad)
        model.zero_grad()


@distributed(world_size=2)
def test_D09_incomplete_last_window():
    mesh = build_mesh(device_type="cpu")
    micro_batches = window_of(10)
    for reduce in REDUCE:
        torch.manual_seed(0)
        reference, model = own(), own()
        model.load_state_dict(reference.state_dict())
        wrap(model, mesh)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
        sizes = []
        for window in (micro_batches[at : at + 4] for at in (0, 4, 8)):
            want = full_batch_gradients(reference, window)
            accumulate(model, mesh, window, reduce)
            assert_gradients(model, want)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            sizes.append(len(window))
        assert sizes == [4, 4, 2]
        for p, q in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(full(p), q, rtol=1e-5, atol=1e-6)


def counts(degrees, reshard, reduce, build=own):
    """(all-gathers, reduce-scatters, all-reduces) of three micro-batches, and of a step without."""
    mesh = build_mesh(**degrees, device_type="cpu")
    model = wrap(build(), mesh, reshard_after_forward=reshard)
    logs = []
    for _ in range(2):  # the first window sets the root up
        logs.clear()
        accumulate(model, mesh, window_of(3), reduce, logs)
    with CollectiveLog() as log:
        logits_of(model, window_of(1)[0][0]).sum().backward()
    rows = [
        tuple(one.count(name) for name in ("allgather", "reduce_scatter", "allreduce"))
        for one in (*logs, log)
    ]
    return rows[:-1], rows[-1]


@distributed(world_size=2)
def test_collectives_on_fsdp():
    """Groups: embedding, 2 blocks, head, root with the norm."""
    scatters = {"last": (0, 0, 5), "every": (5, 5, 5)}
    for reduce in REDUCE:
        window, alone = counts({}, True, reduce)
        assert alone == (5 + 3, 5, 0)
        # The blocks and the embedding are freed after each forward; head and root stay.
        assert window == [(8 - 2 * (i > 0), scatters[reduce][i], 0) for i in range(3)], window
        window, alone = counts({}, False, reduce)
        assert alone == (5, 5, 0)
        assert window == [(5 * (i == 0), scatters[reduce][i], 0) for i in range(3)], window


@distributed(world_size=4)
def test_collectives_on_hsdp():
    """Reduce-scatters in each micro-batch of "every", all-reduces over replicas only in the last."""
    degrees = {"dp_replicate": 2, "dp_shard": 2}
    for build in (own, llama):  # llama: two roots
        window, alone = counts(degrees, True, "last", build)
        assert alone[1:] == (5, 5)
        assert [row[1:] for row in window] == [(0, 0), (0, 0), (5, 5)]
        window, _ = counts(degrees, True, "every", build)
        assert [row[1:] for row in window] == [(5, 0), (5, 0), (5, 5)]


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, message):
        ctx.message = message
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(ctx.message)


def boom_in_forward(x, message):
    raise RuntimeError(message)


def fail(model, window, reduce, boom, failing_step):
    """Accumulates up to a micro-batch in which ``boom`` is called in the midst of the model."""
    for i, (tokens, _) in enumerate(window):
        if i == failing_step:
            handle = model.model.layers[1].mlp.down_proj.register_forward_hook(
                lambda module, args, output, i=i: boom(output, f"boom in {i}")
            )
        try:
            with accumulate_grads(model, last=i == len(window) - 1, reduce=reduce):
                logits_of(model, tokens[:1]).square().sum().backward()
        finally:
            if i == failing_step:
                handle.remove()


@pytest.mark.parametrize("boom", [boom_in_forward, Boom.apply])
@distributed(world_size=4)
def test_an_exception_voids_the_window(boom):
    """torch alone keeps what the failed window had not reduced, for the next window to add to."""
    mesh = build_mesh(dp_replicate=2, device_type="cpu")
    window, failing = window_of(2), window_of(3, seed=1)
    torch.manual_seed(0)
    reference = llama()
    want = full_batch_gradients(reference, window)
    for reduce, reshard in product(REDUCE, (True, False)):
        model = llama()
        model.load_state_dict(reference.state_dict())
        wrap(model, mesh, reshard_after_forward=reshard)
        before = flags(model)
        for failing_step in range(3):
            with pytest.raises(RuntimeError, match=f"boom in {failing_step}"):
                fail(model, failing, reduce, boom, failing_step)
            assert flags(model) == before
            assert all(isinstance(p, DTensor) for p in model.parameters())
            model.zero_grad()
            accumulate(model, mesh, window, reduce)
            assert_gradients(model, want)
            model.zero_grad()


class Branches(nn.Module):
    """Takes other branches with other inputs; same shapes, so that nothing but numbers can go wrong."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6))

    def forward(self, x, branch):
        x = self.c(x).tanh()
        if branch == "inner":
            return self.inner(x)
        return {"a": self.a, "b": self.b, "c": nn.Identity()}[branch](x)


@distributed(world_size=4)
def test_branches_that_some_micro_batches_do_not_take():
    """Under HSDP torch adds up flat buffers whose layout follows from the gradients there are."""
    torch.manual_seed(0)
    reference, x = Branches(), torch.randn(4, 4, 6)  # micro-batch, rank
    for path in (("a", "b", "b", "c"), ("inner", "a", "c", "c"), ("b", "inner", "a", "a")):
        reference.zero_grad()
        for inputs, branch in zip(x, path):
            reference(inputs, branch).square().mean().backward()
        want = gradients(reference)
        for shape, reduce, reshard in product(((4,), (2, 2)), REDUCE, (True, False)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
            model = Branches()
            model.load_state_dict(reference.state_dict())
            fully_shard(model.inner, mesh=mesh, reshard_after_forward=reshard)
            fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
            for _ in range(2):
                for i, (inputs, branch) in enumerate(zip(x, path)):
                    with accumulate_grads(model, last=i == 3, reduce=reduce):
                        mine = inputs[dist.get_rank()][None]
                        model(mine, branch).square().mean().backward()
                got = gradients(model)
                assert got.keys() >= want.keys()
                for name, g in got.items():
                    torch.testing.assert_close(g, want.get(name, torch.zeros_like(g)))
                model.zero_grad()


@distributed(world_size=4)
def test_parts_of_which_one_has_no_share_in_the_last_micro_batch():
    """Each part is an FSDP root of its own; no hook of the idle one runs in the last backward."""
    torch.manual_seed(0)
    encoder, decoder = nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6))
    x = torch.randn(3, 4, 6)

    def run(parts, inputs, with_encoder):
        hidden = parts[0](inputs) if with_encoder else inputs
        parts[1](hidden).square().mean().backward()

    for i in range(3):
        run((encoder, decoder), x[i], i < 2)
    want = [gradients(part) for part in (encoder, decoder)]
    for shape, reduce, reshard in product(((4,), (2, 2)), REDUCE, (True, False)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")[-len(shape) :])
        parts = [nn.Sequential(nn.Linear(6, 6)) for _ in range(2)]
        for part, plain in zip(parts, (encoder, decoder)):
            part.load_state_dict(plain.state_dict())
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        for _ in range(2):
            for i in range(3):
                with accumulate_grads(parts, last=i == 2, reduce=reduce):
                    run(parts, x[i, dist.get_rank()][None], i < 2)
            for part, grads in zip(parts, want):
                assert all(isinstance(p, DTensor) for p in part.parameters())  # not left gathered
                assert_gradients(part, grads)
                part.zero_grad()


@distributed(world_size=2)
def test_flags_of_the_user_are_put_back():
    mesh = build_mesh(device_type="cpu")
    model = Mlp()
    fully_shard(model.layers[0], mesh=fsdp_mesh(mesh))
    fully_shard(model, mesh=fsdp_mesh(mesh))
    model.set_requires_gradient_sync(False)
    model.layers[0].set_reshard_after_backward(False)
    before = flags(model)
    for last, reduce in product((False, True), REDUCE):
        with accumulate_grads(model, last=last, reduce=reduce):
            loss_of(model, torch.ones(1, 6)).backward()
        assert flags(model) == before
    model.layers[0].reshard()
    assert all(p.grad is not None for p in model.parameters())  # the last ones were synchronised


@distributed(world_size=2)
def test_mixed_precision_sums_in_reduce_dtype():
    """Three equal gradients in fp32 are three times one, which bf16 could not hold."""
    mesh = build_mesh(device_type="cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    model = fully_shard(Mlp(), mesh=fsdp_mesh(mesh), mp_policy=policy)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    loss_of(model, x).backward()
    one = gradients(model)
    for reduce in REDUCE:
        model.zero_grad()
        for i in range(3):
            with accumulate_grads(model, last=i == 2, reduce=reduce):
                loss_of(model, x).backward()
        for name, g in gradients(model).items():
            torch.testing.assert_close(g, 3 * one[name], rtol=1e-6, atol=0)


@distributed(world_size=2)
def test_distributed_data_parallel():
    torch.manual_seed(0)
    reference, x = Mlp(), torch.randn(3, 2, 6)
    for inputs in x:
        loss_of(reference, inputs).backward()
    want = gradients(reference)
    reference.zero_grad()
    model = nn.parallel.DistributedDataParallel(reference)
    for reduce in REDUCE:
        for i, inputs in enumerate(x):
            with accumulate_grads(model, last=i == 2, reduce=reduce):
                loss_of(model, inputs[dist.get_rank()][None]).backward()
            local = [p.grad.clone() for p in model.parameters()]
            peers = [torch.empty_like(local[0]) for _ in range(2)]
            dist.all_gather(peers, local[0])
            assert torch.equal(*peers) == (reduce == "every" or i == 2)
        assert_gradients(model.module, want)
        model.zero_grad()


def test_wrong_reduce():
    with (
        pytest.raises(
            ValueError, match="accumulate_grads: reduce='never' must be 'last' or 'every'"
        ),
        accumulate_grads(nn.Linear(2, 2), last=True, reduce="never"),
    ):
        pass
