from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ptx
from ckpt.small import Small
from ptx.ckpt import AsyncCheckpointer, PerRank, train_state
from ptx.ckpt._parts import Stateful


def saved_and_loaded(tmp_path: Path, saved: Any, loaded: Any, **options: Any) -> int | None:
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(0, saved, block=True)
        return checkpointer.load(loaded, **options)


def test_it_is_a_plain_dict_of_statefuls_that_refer_to_live_tensors() -> None:
    small = Small()
    assert type(small.state) is dict
    assert list(small.state) == ["model", "optimizer", "rng"]
    assert all(isinstance(value, Stateful) for value in small.state.values())
    model = small.state["model"].state_dict()
    assert list(model) == ["0.weight", "0.bias", "1.weight"]
    assert model["0.bias"] is small.model[0].bias
    optimizer = small.state["optimizer"].state_dict()
    assert optimizer["state"]["0.bias"] is small.optimizer.state[small.model[0].bias]
    assert optimizer["param_groups"]["0"]["betas"] == (0.9, 0.999)


def test_names_carry_no_wrappers() -> None:
    with torch.device("cpu"):
        model = ptx.Transformer(ptx.preset("debug"))
    plain = list(train_state(model)["model"].state_dict())
    ptx.apply_compile(model, backend="eager")
    ptx.apply_ac(model, "full")
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    state = train_state(model, optimizer)
    assert list(state["model"].state_dict()) == plain
    assert list(state["optimizer"].state_dict()["state"]) == plain


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    with pytest.raises(
        ValueError, match=r"2 of the 4 parameters that the optimizer holds.*2, 2.*b"
    ):
        train_state(model, optimizer)


def test_two_optimizers_share_the_parameters_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first = torch.optim.AdamW(model[0].parameters(), lr=0.5)
    second = torch.optim.SGD(model[1].parameters(), lr=0.25, momentum=0.9)

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        first.step()
        second.step()

    step()
    state = train_state(model, [first, second])
    momentum = second.state[model[1].weight]["momentum_buffer"].clone()
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state, block=True)
        step()
        second.param_groups[0]["lr"] = 7.0
        checkpointer.load(state)
    assert torch.equal(second.state[model[1].weight]["momentum_buffer"], momentum)
    assert [first.param_groups[0]["lr"], second.param_groups[0]["lr"]] == [0.5, 0.25]
    with pytest.raises(ValueError, match="two optimizers hold the same parameter"):
        train_state(model, [first, torch.optim.SGD(model.parameters())])
    with pytest.raises(ValueError, match=r"'other' is an optimizer; pass optimizer=\[..., other\]"):
        train_state(model, first, other=second)


def test_parts_of_a_model_are_saved_as_one(tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    parts = [nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1]})]
    optimizer = torch.optim.AdamW(whole.parameters())
    state = train_state(parts, optimizer)
    assert list(state["model"].state_dict()) == list(whole.state_dict())
    fresh = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    saved_and_loaded(tmp_path, state, train_state(fresh, torch.optim.AdamW(fresh.parameters())))
    assert all(map(torch.equal, fresh.parameters(), whole.parameters()))
    with pytest.raises(ValueError, match=r"'0\.weight' is in two parts of the model"):
        train_state([parts[0], parts[0]])


class Stranger(nn.Module):
    """A buffer that is saved, one that isn't, a tie, and a state beyond tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note, "more": torch.arange(2)}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"] + str(state["more"].tolist())


def test_buffers_ties_and_extra_state(tmp_path: Path) -> None:
    saved, loaded = Stranger(), Stranger()
    saved.note = "saved"
    with torch.no_grad():
        saved.kept.fill_(3.0)
        saved.passing.fill_(4.0)
    state = train_state(saved)
    names = list(state["model"].state_dict())
    assert names == ["kept", "a.weight", "a.bias", "b.bias", "_extra_state"]
    saved_and_loaded(tmp_path, state, train_state(loaded))
    assert loaded.note == "saved[0, 1]"
    assert loaded.kept.tolist() == [3.0, 3.0]
    assert loaded.passing.tolist() == [0.0, 0.0]
    assert loaded.b.weight is loaded.a.weight
    assert torch.equal(loaded.a.weight, saved.a.weight)


def test_a_tie_is_known_by_any_of_its_names(tmp_path: Path) -> None:
    """Another order of modules makes another name the first one."""

    def tied(first: str, second: str) -> nn.Module:
        model = nn.ModuleDict(
            {first: nn.Linear(2, 2, bias=False), second: nn.Linear(2, 2, bias=False)}
        )
        model[second].weight = model[first].weight
        return model

    saved, loaded = tied("a", "b"), tied("b", "a")
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (saved, loaded)]
    for p in saved.parameters():
        p.grad = torch.ones_like(p)
    optimizers[0].step()
    saved_and_loaded(
        tmp_path, train_state(saved, optimizers[0]), train_state(loaded, optimizers[1])
    )
    assert torch.equal(loaded["a"].weight, saved["a"].weight)
    moment = optimizers[1].state[loaded["a"].weight]["exp_avg"]
    assert torch.equal(moment, optimizers[0].state[saved["a"].weight]["exp_avg"])


def test_a_tied_checkpoint_does_not_fill_an_untied_model_in_silence(tmp_path: Path) -> None:
    loaded = Stranger()
    loaded.b.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"lacks 'model\.b\.weight'"):
        saved_and_loaded(tmp_path, train_state(Stranger()), train_state(loaded))


def test_extras_are_loaded_in_place(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    extras: dict[str, Any] = {
        "tensor": torch.arange(3),
        "generator": torch.Generator().manual_seed(3),
        "a_list": [1, "two"],
        "a_dict": {"x": 1.5, "t": torch.ones(2)},
        "ema": nn.Linear(2, 2),
    }
    others: dict[str, Any] = {
        "tensor": torch.zeros(3, dtype=torch.int64),
        "generator": torch.Generator(),
        "a_list": [0],
        "a_dict": {"y": 0},
        "ema": nn.Linear(2, 2),
    }
    saved_and_loaded(tmp_path, train_state(model, **extras), train_state(model, **others))
    assert others["tensor"].tolist() == [0, 1, 2]
    assert others["generator"].initial_seed() == 3
    assert others["a_list"] == [1, "two"]
    assert others["a_dict"]["x"] == 1.5
    assert others["a_dict"]["t"].tolist() == [1.0, 1.0]
    assert torch.equal(others["ema"].weight, extras["ema"].weight)


@pytest.mark.parametrize("value", [3, "text", None, (1,), object(), nn.Linear])
def test_what_cannot_be_loaded_in_place_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"train_state: 'x' is a .*save\(meta=...\)"):
        train_state(nn.Linear(1, 1), x=value)
    with pytest.raises(ValueError, match="PerRank"):
        PerRank(value)


def test_keys_of_its_own_are_taken() -> None:
    with pytest.raises(ValueError, match=r"\['rng'\] name parts of the state already"):
        train_state(nn.Linear(1, 1), rng=[])


def test_a_bare_optimizer_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with (
        AsyncCheckpointer(tmp_path) as checkpointer,
        pytest.raises(ValueError, match=r"'optimizer' is an optimizer.*numbers its parameters"),
    ):
        checkpointer.save(0, {"model": model, "optimizer": torch.optim.SGD(model.parameters())})


OPTIMIZERS: dict[str, Any] = {
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, OPTIMIZERS[name](model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = (model(torch.linspace(0, 1, 8).view(2, 4)) - 1).square().sum()
            loss.backward()
            return loss.item()

        optimizer.step(closure)

    model, optimizer = start()
    for _ in range(3):
        step(model, optimizer)
    resumed = start()
    saved_and_loaded(tmp_path, train_state(model, optimizer), train_state(*resumed))
    for _ in range(3):
        step(model, optimizer)
        step(*resumed)
    assert all(map(torch.equal, model.parameters(), resumed[0].parameters()))


def test_group_options_follow_the_parameters(tmp_path: Path) -> None:
    """Not the positions of the groups; and how a step is computed stays as the optimizer was built."""
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    saved = torch.optim.AdamW(groups, foreach=True)
    swapped = [{"params": [model.bias]}, {"params": [model.weight]}]
    loaded = torch.optim.AdamW(swapped, foreach=False)
    saved_and_loaded(tmp_path, train_state(model, saved), train_state(model, loaded))
    assert [g["lr"] for g in loaded.param_groups] == [0.25, 0.5]
    assert [g["foreach"] for g in loaded.param_groups] == [False, False]
    merged = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(ValueError, match=r"group 0 .* saved groups \['0', '1'\]"),
        AsyncCheckpointer(tmp_path) as checkpointer,
    ):
        checkpointer.load(train_state(model, merged))


def test_a_parameter_that_was_never_stepped_has_no_state_after_a_load(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(optimizer.state) == 2
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other = torch.optim.AdamW(fresh.parameters())
    fresh(torch.ones(1, 2)).sum().backward()
    other.step()
    assert len(other.state) == 4
    saved_and_loaded(tmp_path, train_state(model, optimizer), train_state(fresh, other))
    assert set(other.state) == {fresh[0].weight, fresh[0].bias}
    fresh(torch.ones(1, 2)).sum().backward()
    other.step()
    assert other.state[fresh[1].weight]["step"] == 1
    assert other.state[fresh[0].weight]["step"] == 2


def test_state_of_a_parameter_frozen_after_training_is_kept(tmp_path: Path) -> None:
    small, fresh = Small(), Small(stepped=False)
    for run in (small, fresh):
        run.model[0].weight.requires_grad_(False)
    saved_and_loaded(tmp_path, small.state, fresh.state)
    want = small.optimizer.state[small.model[0].weight]
    got = fresh.optimizer.state[fresh.model[0].weight]
    assert torch.equal(got["exp_avg"], want["exp_avg"])
    assert not fresh.model[0].weight.requires_grad


# Strictness: what doesn't fit is refused, all of it at once, and nothing is written.


class Tiny(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, out: int = 2, **more: Any) -> None:
        super().__init__()
        self.lin = nn.Linear(2, out, dtype=dtype)
        for name in more:
            self.register_parameter(name, nn.Parameter(torch.zeros(1)))


def test_missing_extra_reshaped_and_cast_tensors_are_refused_with_their_names(
    tmp_path: Path,
) -> None:
    model = Tiny(torch.bfloat16, out=3, new=1)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="load: ") as caught:
        saved_and_loaded(tmp_path, train_state(Tiny(old=1)), train_state(model))
    text = str(caught.value)
    assert "'model.lin.weight' has shape (2, 2) in it, (3, 2) here" in text
    assert "'model.lin.bias' has shape (2,) in it, (3,) here" in text
    assert "the checkpoint lacks 'model.new' (allow_missing" in text
    assert "nothing here takes 'model.old' (allow_unexpected" in text
    assert all(map(torch.equal, before, model.parameters()))


def test_a_cast_is_refused_unless_allowed(tmp_path: Path) -> None:
    saved, loaded = Tiny(), Tiny(torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"'model\.lin\.weight' \(torch\.float32 in it, torch.bfloat16"
    ):
        saved_and_loaded(tmp_path, train_state(saved), train_state(loaded))
    saved_and_loaded(tmp_path, train_state(saved), train_state(loaded), allow_cast=True)
    assert torch.equal(loaded.lin.weight, saved.lin.weight.bfloat16())


def test_missing_and_unexpected_names_can_be_allowed_by_globs(tmp_path: Path) -> None:
    saved, loaded = Tiny(old=1), Tiny(new=1)
    optimizer = torch.optim.AdamW(loaded.parameters())
    state = train_state(loaded, optimizer, more=[1])
    with pytest.raises(ValueError, match=r"lacks 'model\.new', 'optimizer', 'more'"):
        saved_and_loaded(tmp_path, train_state(saved), state)
    options: dict[str, Any] = {
        "allow_missing": ["optimizer", "mor?", "model.n*"],
        "allow_unexpected": ["model.old"],
    }
    assert saved_and_loaded(tmp_path, train_state(saved), state, **options) == 0
    assert torch.equal(loaded.lin.weight, saved.lin.weight)
    with pytest.raises(ValueError, match=r"'modle\.new' matches nothing"):
        saved_and_loaded(tmp_path, train_state(saved), state, allow_missing=["modle.new"])
    with pytest.raises(ValueError, match=r"must be a list of names; write \['more'\]"):
        saved_and_loaded(tmp_path, train_state(saved), state, allow_missing="more")


def test_load_takes_any_subset_of_the_keys(tmp_path: Path) -> None:
    small, other = Small(), Small(stepped=False)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(0, small.state, block=True)
        assert checkpointer.load({"model": other.state["model"]}) == 0
        assert not other.optimizer.state
        assert all(map(torch.equal, other.model.parameters(), small.model.parameters()))
        assert checkpointer.load({"model": other.model}) == 0  # a bare module will do


def test_a_meta_model_is_refused_with_the_fix(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Tiny()
    with pytest.raises(
        ValueError, match=r"on meta, .*materialize\(model, device, seed=None\) first"
    ):
        saved_and_loaded(tmp_path, train_state(Tiny()), train_state(model))
    with (
        AsyncCheckpointer(tmp_path) as checkpointer,
        pytest.raises(ValueError, match=r"'model\.lin\.weight' is on meta, without values"),
    ):
        checkpointer.save(1, train_state(model))


def test_F02_buffers_are_right_after_meta_materialize_and_load(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=61,
    )
    plain = LlamaForCausalLM(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ptx.materialize(model, "cpu", seed=None)
    saved_and_loaded(tmp_path, train_state(plain), train_state(model))
    want, got = dict(plain.named_buffers()), dict(model.named_buffers())
    assert list(got) == list(want)
    assert len(want) > 0
    assert all(torch.equal(got[name], want[name]) for name in want)
    tokens = torch.arange(12)[None]
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any], /) -> None:
            raise KeyError("b")

    with pytest.raises(RuntimeError, match="load: 'x' refused its state: 'b'"):
        saved_and_loaded(tmp_path, {"x": Picky()}, {"x": Picky()})


def test_C10_schedules_and_random_states_continue(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
        return schedule, train_state(model, optimizer, schedule=schedule)

    def rates(schedule: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            found.append(schedule.get_last_lr()[0])
            schedule.optimizer.step()
            schedule.step()
        return found

    schedule, state = start()
    rates(schedule, 4)
    torch.manual_seed(11)
    resumed, other = start()
    torch.manual_seed(11)
    with AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(4, state, block=True)
        draws = _draws()
        torch.manual_seed(12)
        checkpointer.load(other)
    assert _draws() == draws
    assert rates(resumed, 4) == pytest.approx([0.5, 0.6, 0.7, 0.8])


def _draws() -> list[float]:
    import random

    import numpy as np

    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), float(np.random.rand())]


SCHEDULES: dict[str, Any] = {
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        ],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_can_be_saved(name: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = SCHEDULES[name](optimizer)
        return optimizer, schedule, train_state(model, optimizer, schedule=schedule)

    def step(optimizer: Any, schedule: Any) -> float:
        optimizer.step()
        schedule.step(*([1.0] if name == "plateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    optimizer, schedule, state = start()
    for _ in range(4):
        step(optimizer, schedule)
    other, resumed, target = start()
    saved_and_loaded(tmp_path, state, target)
    want = [step(optimizer, schedule) for _ in range(4)]
    assert [step(other, resumed) for _ in range(4)] == want
