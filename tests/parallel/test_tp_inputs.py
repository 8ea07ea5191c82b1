"""What goes into a model: bad tokens are refused on all tp ranks, a data rank may have no sample."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import ptx
from harness import distributed

ARGS = ptx.ModelArgs(dim=16, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=24, vocab_size=13)


@distributed(world_size=2)
def test_L07_tokens_that_are_no_row_of_the_embedding_raise():
    """One process raises IndexError; rank by rank a bad id is some other rank's, and gives zeros."""
    mesh = ptx.build_mesh(tp=2, device_type="cpu")
    for sequence_parallel in (True, False):
        model = ptx.Transformer(ARGS)
        ptx.apply_tp(model, mesh["tp"], ptx.tp_plan(model, sequence_parallel=sequence_parallel))
        for bad in (13, 1_000_000, -1, -100):
            tokens = torch.tensor([[0, 12, bad, 3]])
            with pytest.raises(ValueError, match=rf"tokens must be in \[0, 13\).* first is {bad}"):
                model(tokens)
        model(torch.tensor([[0, 12, 5, 3]]))  # and works again


@distributed(world_size=2)
def test_a_rank_without_a_sample_takes_part():
    mesh = ptx.build_mesh(dp_shard=2, device_type="cpu")
    torch.manual_seed(0)
    want, model = ptx.Transformer(ARGS), ptx.Transformer(ARGS)
    model.load_state_dict(want.state_dict())
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    tokens = torch.randint(13, (3, 8))
    F.cross_entropy(want(tokens).flatten(0, 1), tokens.flatten()).backward()
    mine = tokens[:3] if mesh["dp_shard"].get_local_rank() == 0 else tokens[:0]
    scale = ptx.token_scale(mine, ptx.loss_mesh(mesh))
    (ptx.cross_entropy(model(mine), mine, reduction="sum") * scale).backward()
    for (name, got), expected in zip(model.named_parameters(), want.parameters()):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad, msg=name)


@distributed(world_size=2)
def test_an_empty_batch_over_tp_is_refused():
    mesh = ptx.build_mesh(tp=2, device_type="cpu")
    model = ptx.apply_tp(ptx.Transformer(ARGS), mesh["tp"])
    with pytest.raises(ValueError, match=r"tokens \[0, 8\] are empty.*all ignored"):
        model(torch.zeros(0, 8, dtype=torch.int64))


@distributed(world_size=2)
def test_llama_refuses_what_its_shards_would_answer_wrongly():
    mesh = ptx.build_mesh(tp=2, device_type="cpu")
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        vocab_size=13,
        pad_token_id=None,
    )
    model = ptx.apply_tp(LlamaForCausalLM(config), mesh["tp"])
    tokens = torch.randint(13, (2, 8))
    with pytest.raises(ValueError, match="labels was passed"):
        model(tokens, labels=tokens)
    with pytest.raises(ValueError, match="labels was passed"):
        model(tokens, None, None, None, None, tokens)  # by position
    with pytest.raises(ValueError, match="output_attentions was passed"):
        model(tokens, output_attentions=True)


@distributed(world_size=2)
def test_the_data_dim_is_no_tp_mesh():
    mesh = ptx.build_mesh(dp_shard=2, device_type="cpu")
    with pytest.raises(ValueError, match=r'pass the 1-D mesh.*mesh\["tp"\]'):
        ptx.apply_tp(ptx.Transformer(ARGS), mesh["dp_shard"])
