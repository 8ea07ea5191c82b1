import warnings, sys, os
import pytest, torch, torch._dynamo, torch._dynamo.testing, torch.nn.functional as F
import harness, traceback
from parallel.test_compile import *
from torch.utils.checkpoint import CheckpointPolicy as P


def none(ctx, op, *a, **k):
    return P.PREFER_RECOMPUTE


def att(ctx, op, *a, **k):
    return P.MUST_SAVE if "attention" in op.name() else P.PREFER_RECOMPUTE


def nestings():
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    sys.stdout = open(f"/tmp/ac/out{os.environ['RANK']}", "w")
    mesh = build_mesh(tp=2, device_type="cpu")
    tokens, labels = batch()
    import torch._functorch._aot_autograd.graph_compile as gc

    old = gc._categorize_saved_tensors_for_backward

    def new(fw, bw, *a):
        outs = next(iter(fw.graph.find_nodes(op="output"))).args[0]
        print(fw.graph, flush=True)
        print("BW", bw.graph, flush=True)
        for o in outs:
            print("OUT", o, o.op, o.target, type(o.meta.get("val")), gc.is_opaque_node(o))
        r = old(fw, bw, *a)
        return r

    gc._categorize_saved_tensors_for_backward = new
    for pol in (none, att):
        torch._dynamo.reset()
        model = apply_tp(build(n_layers=2), mesh["tp"])
        try:
            apply_ac(model, pol)
            apply_compile(model, backend="aot_eager")
            step(model, tokens, labels)
        except Exception as e:
            print(pol.__name__, type(e), str(e)[:300])
    sys.stdout.flush()


def test_n():
    harness.run(nestings, 2, timeout=100)
