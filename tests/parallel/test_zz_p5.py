import warnings, sys
import pytest, torch, torch._dynamo, torch._dynamo.testing, torch.nn.functional as F
import harness, traceback
from parallel.test_compile import *
from torch.utils.checkpoint import CheckpointPolicy as P
def none(ctx,op,*a,**k): return P.PREFER_RECOMPUTE
def must(ctx,op,*a,**k): return P.MUST_RECOMPUTE
def att(ctx,op,*a,**k): return P.MUST_SAVE if "attention" in op.name() else P.PREFER_RECOMPUTE
def mm(ctx,op,*a,**k): return P.MUST_SAVE if "::mm" in op.name() else P.PREFER_RECOMPUTE
def rs(ctx,op,*a,**k): return P.MUST_SAVE if "::reduce_scatter" in op.name() else P.PREFER_RECOMPUTE
def ag(ctx,op,*a,**k): return P.MUST_SAVE if "_c10d" in op.name() else P.PREFER_RECOMPUTE
def nestings():
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    mesh = build_mesh(tp=2, device_type="cpu")
    reference = build(); tokens, labels = batch(); step(reference, tokens, labels); want = gradients(reference)
    for pol in (none,must,att,mm,rs,ag):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        model = apply_tp(build(n_layers=2), mesh["tp"])
        try:
            apply_ac(model, pol)
            apply_compile(model, backend=counter)
            step(model, tokens, labels)
            err = max(float((g - want[n]).abs().max() / want[n].abs().max()) for n, g in gradients(model).items())
            print(pol.__name__, err, counter.frame_count, flush=True)
        except Exception as e: 
            print(pol.__name__,type(e),str(e)[:300])
            if pol is none: traceback.print_exc()
    return 1/0
def test_n(): harness.run(nestings,2,timeout=100)
