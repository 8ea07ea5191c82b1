import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from harness import distributed
from ptx.mesh import build_mesh
from ptx.model import ModelArgs, Transformer
from ptx.model import _transformer as transformer_module

ARGS = ModelArgs(
    dim=32, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=50, multiple_of=16, max_seq_len=64
)
MIXED = replace(
    ARGS,
    sliding_window=4,
    window_layers=(True, False, True, False),
    nope_layers=(False, False, True, True),
    qk_norm=True,
)


def make(args=ARGS, seed=0):
    torch.manual_seed(seed)
    model = Transformer(args)
    for parameter in model.parameters():  # larger than at init, so that masks and RoPE matter
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return model


def tokens(batch=2, seq=16, seed=1):
    return torch.randint(50, (batch, seq), generator=torch.Generator().manual_seed(seed))


def gradients(model, *losses):
    model.zero_grad()
    sum(losses).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_gradients_close(got, want):
    assert got.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max()
        assert scale > 0, name
        assert (got[name] - want[name]).abs().max() <= 1e-5 * scale, name


# --- documents and positions


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("args", [ARGS, MIXED])
def test_packed_documents_equal_the_documents_apart(args, restart):
    model = make(args)
    first, second, third = tokens(1, 9, 1), tokens(1, 7, 2), tokens(1, 16, 3)
    batch = torch.cat((torch.cat((first, second), dim=1), third))
    documents = torch.tensor([[4] * 9 + [1] * 7, [0] * 16])
    positions = None
    if restart:
        positions = torch.stack((torch.cat((torch.arange(9), torch.arange(7))), torch.arange(16)))

    packed = model(batch, positions=positions, documents=documents)
    apart = [model(x) for x in (first, second, third)]
    torch.testing.assert_close(packed[:1, :9], apart[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:1, 9:], apart[1], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(packed[1:], apart[2], atol=2e-5, rtol=1e-5)

    # Not symmetric in the vocabulary: else the gradient of the logits' sum would be all there is.
    weight = torch.randn(50, generator=torch.Generator().manual_seed(0))
    got = gradients(model, (packed * weight).tanh().sum())
    want = gradients(model, *((logits * weight).tanh().sum() for logits in apart))
    assert_gradients_close(got, want)

    crossing = model(batch, positions=positions)
    assert (crossing[:1, 9:] - apart[1]).abs().max() > 1e-1


def test_attention_is_causal_in_every_kind_of_layer():
    model = make(MIXED)
    one = tokens()
    other = one.clone()
    other[:, 10:] = 49 - other[:, 10:]
    documents = torch.zeros(2, 16, dtype=torch.int64)
    for kwargs in ({}, {"documents": documents}, {"positions": torch.arange(15, -1, -1)}):
        a, b = model(one, **kwargs), model(other, **kwargs)
        torch.testing.assert_close(a[:, :10], b[:, :10])
        assert (a[:, 10:] - b[:, 10:]).abs().max() > 1e-2


def test_positions_default_to_counting_and_move_rope_only():
    model = make()
    batch = tokens()
    counted = model(batch)
    for positions in (torch.arange(16), torch.arange(16).expand(2, 16), torch.arange(16).int()):
        torch.testing.assert_close(model(batch, positions=positions), counted)
    torch.testing.assert_close(
        model(batch, positions=torch.arange(16) + 5), counted, atol=1e-4, rtol=1e-4
    )
    assert (model(batch, positions=torch.arange(16) * 3) - counted).abs().max() > 1e-2


def test_tables_and_masks_are_made_once_and_shared(monkeypatch):
    model = make(MIXED)
    made = []

    def count(name, real):
        def counted(*args, **kwargs):
            made.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(transformer_module, name, counted)

    count("mask_info", transformer_module.mask_info)
    count("rope_tables", transformer_module.rope_tables)
    seen = []
    for block in model.layers.values():
        block.register_forward_pre_hook(lambda _, args: seen.append(args[1:]))
    model(tokens(), documents=torch.zeros(2, 16, dtype=torch.int64))
    assert sorted(made) == ["mask_info", "mask_info", "rope_tables"]
    ropes, masks = zip(*seen)
    assert [mask.window for mask in masks] == [4, None, 4, None]
    assert masks[0] is masks[2]
    assert masks[1] is masks[3]
    assert ropes[0] is ropes[1]
    assert ropes[2:] == (None, None)


# --- parts, hidden states, hooks


def test_return_hidden_is_what_the_output_takes():
    model = make()
    hidden = model(tokens(), return_hidden=True)
    assert hidden.shape == (2, 16, 32)
    torch.testing.assert_close(model.output(hidden), model(tokens()), atol=0, rtol=0)


@pytest.mark.parametrize("args", [ARGS, MIXED, replace(ARGS, tie_embeddings=True)])
def test_parts_in_a_row_equal_the_whole(args):
    whole = make(args)
    parts = [copy.deepcopy(whole) for _ in range(3)]
    for part, keep in zip(parts, ("0", "12", "3")):
        for key in set("0123") - set(keep):
            del part.layers[key]
    parts[0].norm = parts[0].output = None
    parts[1].tok_embeddings = parts[1].norm = parts[1].output = None
    parts[2].tok_embeddings = None

    batch, documents = tokens(), torch.tensor([[0] * 5 + [1] * 11] * 2)
    x = batch
    for part in parts:
        x = part(x, documents=documents)
    torch.testing.assert_close(x, whole(batch, documents=documents), atol=0, rtol=0)
    names = set().union(*(dict(part.named_parameters()) for part in parts))
    assert names >= set(dict(whole.named_parameters()))


def test_any_part_may_be_absent():
    model = make()
    model.layers.clear()
    assert model(tokens()).shape == (2, 16, 50)
    del model.norm
    del model.output
    torch.testing.assert_close(model(tokens()), model.tok_embeddings(tokens()))
    del model.tok_embeddings
    x = torch.randn(2, 16, 32)
    assert model(x) is x
    assert model(x, return_hidden=True) is x


def test_F10_hidden_states_come_through_call():
    """Wrappers hook __call__, so everything that touches parameters must run below it."""
    model = make()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append("root"))
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    model(tokens(), return_hidden=True)
    owners = {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    assert set(calls) == {"root"} | (owners - {"output"})
    calls.clear()
    model(tokens())
    assert set(calls) == {"root"} | owners
    assert len(calls) == len(set(calls))


@distributed(world_size=1)
def test_F10_hidden_states_under_fsdp():
    from torch.distributed.fsdp import fully_shard

    want = make()(tokens(), return_hidden=True)
    model = make()
    mesh = build_mesh(device_type="cpu")["dp_shard"]
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.testing.assert_close(model(tokens(), return_hidden=True), want)


# --- buffers, dtypes, compile


def test_F02_no_buffers_to_lose():
    model = make()
    assert not list(model.buffers())
    with torch.device("meta"):
        empty = Transformer(ARGS)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty(tokens()), model(tokens()))


@distributed(world_size=1)
def test_M05_mixed_precision_leaves_the_tables_in_float32():
    """cast_forward_inputs rounds float tensors in tuples and dataclasses handed to a block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make()
    seen = []
    model.layers["1"].attention.register_forward_pre_hook(lambda _, args: seen.append(args))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = build_mesh(device_type="cpu")["dp_shard"]
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    logits = model(tokens(), documents=torch.zeros(2, 16, dtype=torch.int64))
    ((x, rope, mask),) = seen
    assert logits.dtype == x.dtype == torch.bfloat16
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    assert mask.dense.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_in_its_dtype_and_near_float32(dtype):
    model = make()
    want = model(tokens())
    got = model.to(dtype)(tokens())
    assert got.dtype == dtype
    assert (got.float() - want).abs().max() < 0.1 * want.abs().max()


# Dynamo looks at .grad of the block's input under a filter that "error" overrides.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("n_layers", [12, 24])
def test_A05_graphs_do_not_grow_with_depth(n_layers):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(replace(ARGS, n_layers=n_layers))
    want = model(tokens())
    counter = CompileCounter()
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    model(tokens()).sum().backward()
    assert 1 <= counter.frame_count <= 2
    torch.testing.assert_close(model(tokens()), want)
    torch._dynamo.reset()


def test_whole_model_compiles_in_one_graph():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = make(MIXED)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    documents = torch.tensor([[0] * 5 + [1] * 11] * 2)
    torch.testing.assert_close(
        compiled(tokens(), documents=documents), model(tokens(), documents=documents)
    )
    assert counter.frame_count == 1
    torch._dynamo.reset()


# --- tensor parallel, by a plan written out


def parallelize(model, tp):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1))

    def gather(n_args):
        rest = (None,) * (n_args - 1)
        return PrepareModuleInput(
            input_layouts=(Shard(1), *rest), desired_input_layouts=(Replicate(), *rest)
        )

    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(len(model.layers)):
        block = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": gather(3),
            "feed_forward": gather(1),
            **{f"attention.{name}": column for name in ("wq", "wk", "wv")},
            **{f"feed_forward.{name}": column for name in ("w1", "w3")},
            "attention.wo": row,
            "feed_forward.w2": row,
        }
        plan |= {f"layers.{i}.{name}": style for name, style in block.items()}
    return parallelize_module(model, tp, plan)


TP_ARGS = replace(
    ARGS, n_layers=2, sliding_window=4, window_layers=(True, False), nope_layers=(False, True)
)


@distributed(world_size=2)
def test_same_code_runs_with_local_heads_and_a_split_sequence():
    tp = build_mesh(tp=2, device_type="cpu")["tp"]
    batch, documents = tokens(), torch.tensor([[0] * 5 + [1] * 11] * 2)
    plain = make(TP_ARGS)
    want = gradients(
        plain, F.cross_entropy(plain(batch, documents=documents).flatten(0, 1), batch.flatten())
    )
    model = parallelize(make(TP_ARGS), tp)
    logits = model(batch, documents=documents).full_tensor()
    model.zero_grad()
    F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert_gradients_close(got, want)


@distributed(world_size=2)
def test_T11_full_hidden_state_into_a_parallel_block_is_refused():
    from ptx.model._mask import mask_info
    from ptx.model._rope import rope_tables

    tp = build_mesh(tp=2, device_type="cpu")["tp"]
    model = parallelize(make(TP_ARGS), tp)
    positions = torch.arange(4)
    block, full = model.layers["0"], torch.randn(2, 4, 32)
    inputs = (rope_tables(TP_ARGS, positions), mask_info(positions, None, None))
    with pytest.raises(ValueError, match=r"8 positions.* made for 4"):
        block(full, *inputs)
    assert block(full.chunk(2, dim=1)[tp.get_local_rank()], *inputs).shape == (2, 2, 32)

    model.tok_embeddings = None  # a pipeline part: the hidden state is split, positions are not
    part = full.chunk(2, dim=1)[tp.get_local_rank()]
    assert model(part, positions=positions).shape == (2, 4, 50)
    with pytest.raises(ValueError, match=r"4 positions.* made for 2"):
        model(part)


# --- errors


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"tokens": torch.zeros(2, 4)}, ["tokens [2, 4] float32", "int64"]),
        ({"tokens": torch.zeros(8, dtype=torch.int64)}, ["tokens [8]", "[batch, sequence]"]),
        ({"positions": torch.arange(5)}, ["positions [5] int64", "[4] or [2, 4]"]),
        ({"positions": torch.zeros(1, 4, dtype=torch.int64)}, ["positions [1, 4]"]),
        ({"positions": torch.zeros(4)}, ["positions [4] float32 must be integers"]),
        ({"documents": torch.arange(4)}, ["documents [4]", "[2, 4]"]),
        ({"tokens": torch.zeros(1, 65, dtype=torch.int64)}, ["65", "max_seq_len=64", "replace"]),
    ],
)
def test_bad_inputs_are_refused_with_shapes_and_fix(inputs, words):
    model = Transformer(ARGS)
    inputs = {"tokens": torch.zeros(2, 4, dtype=torch.int64), **inputs}
    with pytest.raises(ValueError, match="Transformer: ") as error:
        model(inputs.pop("tokens"), **inputs)
    for word in words:
        assert word in str(error.value)


def test_all_bad_inputs_are_listed():
    with pytest.raises(ValueError, match=r"positions .*; positions .*; documents "):
        Transformer(ARGS)(tokens(), positions=torch.zeros(3), documents=torch.zeros(2, dtype=int))


def test_part_without_embedding_wants_a_hidden_state():
    model = Transformer(ARGS)
    model.tok_embeddings = None
    with pytest.raises(ValueError, match="tok_embeddings is absent"):
        model(tokens())


def test_given_positions_may_pass_max_seq_len():
    """They aren't read, and packed rows may be longer than any of their documents."""
    batch = tokens(1, 80)
    documents = (torch.arange(80) // 40).unsqueeze(0)
    positions = (torch.arange(80) % 40).unsqueeze(0)
    assert make()(batch, positions=positions, documents=documents).shape == (1, 80, 50)
