"""Arguments that several losses take: what is wrong with them, before anything is computed."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def require_tensors(where: str, **given: object) -> None:
    """Refuse what isn't a tensor, and tensors that lie on different devices."""
    wrong = []
    for name, value in given.items():
        if not isinstance(value, Tensor):
            fields = [f for f in ("logits", "last_hidden_state") if hasattr(value, f)]
            fix = f"; pass its .{fields[0]}" if fields else ""
            wrong.append(f"{name} is a {type(value).__name__}, it must be a tensor{fix}")
    if not wrong:
        wrong = device_errors(**given)
    if wrong:
        raise ValueError(f"{where}: {'; '.join(wrong)}")


def device_errors(**given: object) -> list[str]:
    """What is wrong with where these tensors lie.

    A matmul into memory on CPU of a weight without values (meta) leaves that memory as it was.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if len({value.device for value in tensors.values()}) <= 1:
        return []
    places = ", ".join(f"{name} on {value.device}" for name, value in tensors.items())
    return [f"{places}: they must be on one device"]


def size_errors(name: str, value: object, most: int | None = None, of: str = "") -> list[str]:
    """What is wrong with a number of classes; None is for the caller to allow."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, int) and is_int and value >= 1 and (most is None or value <= most):
        return []
    allowed = "an int >= 1" if most is None else f"an int in [1, {of}={most}]"
    return [f"{name}={value!r} must be {allowed}"]


def flag_errors(name: str, value: object) -> list[str]:
    return [] if isinstance(value, bool) else [f"{name}={value!r} must be True or False"]


def mesh_errors(mesh: object, fix: str) -> list[str]:
    """What is wrong with a mesh that has to be 1-D and to contain this rank."""
    if not isinstance(mesh, DeviceMesh):
        return [f"the mesh is a {type(mesh).__name__}, it must be {fix}"]
    if mesh.ndim != 1:
        return [f"the mesh has dims {mesh.mesh_dim_names}, it must be {fix}"]
    if mesh.get_coordinate() is None:
        return [f"this rank isn't in the mesh {mesh}; it must be {fix}"]
    return []
