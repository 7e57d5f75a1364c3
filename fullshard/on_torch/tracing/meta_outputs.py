"""Call operators on meta tensors, and remember what they return.

Many meta kernels are written in Python and take most of a trace's time. A trace calls the same operators with the same
shapes again and again.
"""

from typing import Any

import torch
from torch import Tensor

from fullshard.on_torch.tracing.convolutions import CONVOLUTIONS, in_cuda_layout

Key = tuple[Any, ...]
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides and dtype of a new dense tensor
_FORMS: dict[Key, tuple[Any, list[Form | None]]] = {}  # the type of a result, and the forms of its tensors
_MAX_FORMS = 200_000
_NAMES: dict[int, str] = {}  # by operator
_MAY_REMEMBER: dict[int, bool] = {}  # by operator: torch keeps each for the life of the process, so that its id tells it
SEQUENCES, CONTAINERS, PLAIN = (tuple, list), (tuple, list, dict), (Tensor, torch.nn.Parameter)


class NotRememberedError(Exception):
    """An argument of which a meta kernel may see more than its form."""


def name_of(func: Any) -> str:
    """The name of an operator, such as `aten::mm`."""
    found = _NAMES.get(id(func))
    if found is None:
        found = _NAMES[id(func)] = func._schema.name
    return found


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in arguments or results of an operator, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, SEQUENCES) else ():
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, CONTAINERS):
            found += tensors_in(part)
    return found


def call_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """`func(*args, **kwargs)` on meta tensors, from memory if it was called with such arguments before."""
    if not _may_remember(func):
        return func(*args, **kwargs)
    try:
        key = (id(func), _described(args), _described(tuple(kwargs.items())) if kwargs else ())
        known = _FORMS.get(key)
    except (TypeError, NotRememberedError):  # TypeError: an argument without a hash
        return func(*args, **kwargs)
    if known is not None:
        return _made(*known)
    out = func(*args, **kwargs)
    if name_of(func) in CONVOLUTIONS:
        out = in_cuda_layout(args, out)
    forms = _forms(out, tensors_in((args, kwargs)))
    if forms is not None and len(_FORMS) < _MAX_FORMS:
        _FORMS[key] = (type(out), forms)
    return out


def _may_remember(func: Any) -> bool:
    """True if the operator's schema says that it returns new tensors and changes none."""
    found = _MAY_REMEMBER.get(id(func))
    if found is None:
        schema = func._schema
        values = [*schema.arguments, *schema.returns]
        found = _MAY_REMEMBER[id(func)] = bool(schema.returns) and not any(v.alias_info for v in values)
    return found


def _described(value: Any) -> Any:
    """What a meta kernel can see of an argument."""
    if isinstance(value, Tensor):
        dtype = value.dtype
        if type(value) not in PLAIN or not value.is_meta or dtype.is_complex:
            raise NotRememberedError
        return value.shape, value.stride(), dtype
    if isinstance(value, SEQUENCES):
        return tuple(map(_described, value))
    return type(value), value


def _forms(out: Any, inputs: list[Tensor]) -> list[Form | None] | None:
    """The forms of a result that is one tensor, or a tuple or list of tensors; None if it is not so simple."""
    if type(out) not in (Tensor, tuple, list):
        return None
    found: list[Form | None] = []
    seen = {t.untyped_storage()._cdata for t in inputs}
    for t in [out] if isinstance(out, Tensor) else out:
        if t is None:
            found.append(None)
            continue
        if type(t) is not Tensor or not t.is_meta or t.storage_offset() or t.untyped_storage()._cdata in seen:
            return None
        form = (t.shape, t.stride(), t.dtype)
        if _made(Tensor, [form]).untyped_storage().nbytes() != t.untyped_storage().nbytes():
            return None
        seen.add(t.untyped_storage()._cdata)
        found.append(form)
    return found


def _made(kind: Any, forms: list[Form | None]) -> Any:
    made = [None if f is None else torch.empty_strided(f[0], f[1], dtype=f[2], device="meta") for f in forms]
    return made[0] if kind is Tensor else kind(made)
