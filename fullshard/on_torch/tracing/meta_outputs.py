"""Call operators on meta tensors, and remember what they return.

Many meta kernels are written in Python and take most of a trace's time. A trace calls the same operators with the same
shapes again and again.
"""

from typing import Any

import torch
from torch import Tensor

Key = tuple[Any, ...]
Form = tuple[torch.Size, tuple[int, ...], torch.dtype]  # shape, strides and dtype of a new dense tensor
_FORMS: dict[Key, tuple[Any, list[Form | None]]] = {}  # the type of a result, and the forms of its tensors
_MAX_FORMS = 200_000
_MAY_REMEMBER: dict[Any, bool] = {}  # by operator


class NotRememberedError(Exception):
    """An argument of which a meta kernel may see more than its form."""


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in arguments or results of an operator, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [t for part in tree if isinstance(part, Tensor | tuple | list | dict) for t in tensors_in(part)]
    return tensors_in(list(tree.values())) if isinstance(tree, dict) else []


def call_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """`func(*args, **kwargs)` on meta tensors, from memory if it was called with such arguments before."""
    if not _may_remember(func):
        return func(*args, **kwargs)
    try:
        key = (func, _described(args), _described(tuple(kwargs.items())))
        known = _FORMS.get(key)
    except (TypeError, NotRememberedError):  # TypeError: an argument without a hash
        return func(*args, **kwargs)
    if known is not None:
        return _made(*known)
    out = func(*args, **kwargs)
    forms = _forms(out, tensors_in((args, kwargs)))
    if forms is not None and len(_FORMS) < _MAX_FORMS:
        _FORMS[key] = (type(out), forms)
    return out


def _may_remember(func: Any) -> bool:
    """True if the operator's schema says that it returns new tensors and changes none."""
    if func not in _MAY_REMEMBER:
        schema = func._schema
        values = [*schema.arguments, *schema.returns]
        _MAY_REMEMBER[func] = bool(schema.returns) and not any(v.alias_info for v in values)
    return _MAY_REMEMBER[func]


def _described(value: Any) -> Any:
    """What a meta kernel can see of an argument."""
    if isinstance(value, Tensor):
        if not value.is_meta or value.dtype.is_complex or type(value) not in (Tensor, torch.nn.Parameter):
            raise NotRememberedError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
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
