import functools
import weakref
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from ptx.flops import estimate_flops_fake
from ptx.flops._copy import PlainCopy

PRODUCT = 2 * 3 * 8 * 8


def copier() -> PlainCopy:
    return PlainCopy(FakeTensorMode(), torch.device("cpu"))


def x() -> Tensor:
    return torch.randn(3, 8, requires_grad=True)


def test_ties_and_flags_stay():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    new = copier()(model)
    assert new[1].weight is new[0].weight is not model[0].weight
    assert isinstance(new[0].weight, FakeTensor)
    assert isinstance(new[0].weight, nn.Parameter)
    assert not new[0].bias.requires_grad
    assert not new.training
    assert [type(m) for m in new.modules()] == [type(m) for m in model.modules()]


def test_shapes_strides_and_dtypes_stay():
    model = nn.Conv2d(3, 4, 5).to(torch.bfloat16, memory_format=torch.channels_last)
    new = copier()(model)
    assert new.weight.shape == model.weight.shape
    assert new.weight.stride() == model.weight.stride()
    assert new.weight.dtype == torch.bfloat16


def test_containers_of_every_kind():
    linear = nn.Linear(8, 8)
    holder = nn.Module()
    holder.linear = linear
    holder.in_list = [linear, {"a": (linear, {linear.weight})}]
    holder.in_deque = deque([linear])
    holder.in_order = OrderedDict(a=linear)
    holder.by_default = defaultdict(list, a=[linear])
    holder.in_object = SimpleNamespace(inner=linear, number=3)
    holder.by_partial = functools.partial(F.linear, weight=linear.weight)
    holder.by_method = linear.forward
    holder.by_ref = weakref.ref(linear)
    holder.plain = ("a", 1, None)
    holder.loop = [holder]
    new = copier()(holder)
    inner = new.linear
    assert inner is not linear
    assert new.in_list[0] is inner
    assert new.in_list[1]["a"][0] is inner
    assert next(iter(new.in_list[1]["a"][1])) is inner.weight
    assert new.in_deque[0] is inner
    assert type(new.in_order) is OrderedDict
    assert new.in_order["a"] is inner
    assert new.by_default["a"][0] is inner
    assert new.by_default["new"] == []
    assert new.in_object.inner is inner
    assert new.by_partial.keywords["weight"] is inner.weight
    assert new.by_method.__self__ is inner
    assert new.by_ref() is inner
    assert new.plain is holder.plain
    assert new.loop[0] is new
    assert holder.in_object.inner is linear
    assert "new" not in holder.by_default


def test_functions_close_over_copies():
    linear, unrelated = nn.Linear(8, 8), lambda y: y + 1
    count = [0]

    def inner(y, *, layer=linear):
        count[0] += 1
        return layer(unrelated(y))

    @functools.wraps(inner)
    def outer(y):
        return inner(y)

    new = copier()(outer)
    assert new is not outer
    assert new.__name__ == "inner"
    assert copier()(unrelated) is unrelated
    counted = estimate_flops_fake(outer, x())
    assert (counted.forward, counted.backward) == (PRODUCT, 2 * PRODUCT)
    assert count == [0]
    assert linear.weight.grad is None


def test_an_instance_forward_is_moved_to_the_copy():
    linear = nn.Linear(8, 8)
    before = linear.forward
    linear.forward = lambda y: before(before(y))
    count = estimate_flops_fake(linear, x())
    assert (count.forward, count.backward) == (2 * PRODUCT, 4 * PRODUCT)


def test_hooks_of_the_model_run_and_may_compute():
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    first.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    first.register_forward_hook(lambda m, args, out: second(out))
    count = estimate_flops_fake(first, x())
    assert (count.forward, count.backward) == (2 * PRODUCT, 4 * PRODUCT)


def test_modules_that_cannot_be_reached_are_not_run():
    hidden = nn.Linear(8, 8)

    class Holder:
        __slots__ = ("module",)  # nothing to look into

    holder = Holder()
    holder.module = hidden
    model = nn.Sequential(hidden)
    model.append(nn.Identity())
    model[1].forward = lambda y: holder.module(y)
    with pytest.raises(ValueError, match="called through an object that couldn't be copied"):
        estimate_flops_fake(model, x())


def test_wrappers_of_torch_are_looked_through():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    want = estimate_flops_fake(model, x())
    assert estimate_flops_fake(nn.DataParallel(model), x()) == want
    assert estimate_flops_fake(torch.compile(model, backend="eager"), x()) == want
    compiled = torch.compile(model.forward, backend="eager")
    assert estimate_flops_fake(compiled, x()).by_op == want.by_op
    compiled = torch.compile(lambda y: model(y), backend="eager")
    assert estimate_flops_fake(compiled, x()).by_op == want.by_op
    model[0].compile(backend="eager")
    assert estimate_flops_fake(model, x()) == want
    assert set(want.by_module) == {"", "0", "1"}


def test_a_module_in_anothers_place_names_the_one_it_stands_for():
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    stand_in = nn.Identity()
    object.__setattr__(stand_in, "_ptx_plain", nn.Linear(8, 8))
    model[1] = stand_in
    assert estimate_flops_fake(model, x()).forward == 2 * PRODUCT


def test_scripted_modules_are_refused():
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="scripted; count the module it was made of"):
        estimate_flops_fake(scripted, x())


def test_plain_attributes_that_are_tensors():
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.randn(8, 8)
            self.tables = [torch.randn(8, 8, requires_grad=True)]

        def forward(self, y: Tensor) -> Tensor:
            return y @ self.table @ self.tables[0]

    model = Tables()
    count = estimate_flops_fake(model, x())
    assert (count.forward, count.backward) == (2 * PRODUCT, 3 * PRODUCT)
    assert model.tables[0].grad is None


def test_sparse_tensors_are_refused():
    model = nn.Linear(8, 8)
    model.table = torch.eye(8).to_sparse()
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo can't be counted"):
        estimate_flops_fake(model, x())


def test_traced_modules_and_classes_with_a_new_of_their_own():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    assert estimate_flops_fake(traced, x()).total == 3 * PRODUCT

    class Picks(nn.Linear):
        def __new__(cls, size, kind):
            return super().__new__(cls)

        def __init__(self, size, kind):
            super().__init__(size, size)

    assert estimate_flops_fake(Picks(8, "a"), x()).total == 3 * PRODUCT


def test_function_transforms():
    linear = nn.Linear(8, 8)
    each = torch.vmap(lambda y: linear(y[None])[0])
    assert estimate_flops_fake(each, x()).total == 3 * PRODUCT
    called = torch.func.functional_call
    weights = dict(linear.named_parameters())
    assert estimate_flops_fake(called, linear, weights, x()).total == 3 * PRODUCT


def test_a_model_that_is_fake_already():
    with FakeTensorMode():
        model, y = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
        assert estimate_flops_fake(model, y).total == 3 * PRODUCT
    assert estimate_flops_fake(model, y).total == 3 * PRODUCT
