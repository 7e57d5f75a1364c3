"""How a causal language model is called: from a batch of tokens to logits.

Read off the signature of the model's `forward`, unless the model was given a function `(model, batch) -> logits` of its
own. Models may take their tokens under any name, compute a loss of their own, and return tuples or dicts.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from fullshard.base.errors import FullshardError
from fullshard.on_torch.model.lora import without_adapters

ModelCall = Callable[[nn.Module, Any], Any]  # (model, batch) -> logits, or a Loss
TARGETS = ("targets", "target", "y")  # arguments that make a model compute a loss, and logits of all positions
CALL = "_fullshard_call"  # an attribute of a model, which copies of the model and adapters around it have too
FIXED: dict[str, Any] = {"start_pos": 0}  # arguments of models that also generate
WRITE = "write model.call = 'file.py:function' in a recipe, a function (model, batch) -> logits, or give train_step a loss="


@dataclass(frozen=True)
class CallForm:
    """What `forward` takes besides tokens. `targets`: the name of the labels of its own loss."""

    targets: str | None
    required: tuple[str, ...]
    fixed: tuple[str, ...]


def logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """The logits of all positions; or what the model's own call returns."""
    if call := own_call(model):
        return call(model, batch)
    return find_logits(model, call_model(model, batch), batch["input_ids"])


def next_logits(model: nn.Module, ids_BT: Tensor) -> Tensor:
    """The logits of the last position, of shape (rows, vocabulary)."""
    call = own_call(model)
    found = call(model, {"input_ids": ids_BT, "labels": ids_BT}) if call else call_model(model, {"input_ids": ids_BT}, own=False)
    for tensor in _tensors(found):
        if tensor.ndim == 3 and tensor.shape[0] == ids_BT.shape[0]:
            return tensor[:, -1]  # of a model that computes the last position only, too
        if tensor.ndim == 2 and tensor.shape[0] == ids_BT.numel():
            return tensor.unflatten(0, ids_BT.shape)[:, -1]
    what = "model.call" if call else type(model).__name__
    raise FullshardError(f"{what} returns {_shapes(found)}, no logits to sample from; return logits, or leave sample out")


def set_call(model: nn.Module, call: ModelCall) -> None:
    """Call the model through this function from now on."""
    setattr(model, CALL, call)


def own_call(model: nn.Module) -> ModelCall | None:
    """The function that the model is called through, if it was given one."""
    return cast(ModelCall | None, getattr(model, CALL, None))


def computes_loss(model: nn.Module) -> bool:
    """True if the model is called with targets, and so computes a loss of its own."""
    return _form(model).targets is not None


def call_model(model: nn.Module, batch: Mapping[str, Tensor], *, own: bool = True) -> Any:
    """The model's output. `own`: let it compute its own loss, if that is how it returns the logits of all positions."""
    form, extra, ids = _form(model), extra_inputs(model, batch), batch["input_ids"]
    if form.targets and form.targets not in extra and (own or form.targets in form.required):
        extra[form.targets] = ids.new_zeros(ids.shape)  # its loss is not used; -100 in labels may be an error to it
    extra |= {name: FIXED[name] for name in form.fixed if name not in extra}
    if missing := [name for name in form.required if name not in extra]:
        raise FullshardError(f"{type(model).__name__}'s forward needs {missing[0]}, which a batch of tokens has not; {WRITE}")
    return model(ids, **extra)


def extra_inputs(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Keyword arguments for the model's forward. Turns the cache of a Hugging Face model off: with a cache it ignores
    document boundaries in `position_ids`."""
    extra: dict[str, Any] = {k: v for k, v in batch.items() if k not in ("input_ids", "labels")}
    return extra | ({"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {})


def find_logits(model: nn.Module, output: Any, ids_BT: Tensor) -> Tensor:
    """The logits of all positions in a model's output: a tensor, a tuple, a dict or a Hugging Face output."""
    rows, tokens = ids_BT.shape[:2]
    for tensor in _tensors(output):
        if tensor.ndim >= 3 and tensor.shape[:2] == (rows, tokens):
            return tensor
        if tensor.ndim == 2 and tensor.shape[0] == rows * tokens:
            return tensor.unflatten(0, (rows, tokens))
    raise FullshardError(
        f"{type(model).__name__} returns {_shapes(output)} for {rows} × {tokens} tokens, no logits of all positions; {WRITE}"
    )


def _tensors(output: Any) -> list[Tensor]:
    """The float tensors of an output, those called logits first."""
    if isinstance(output, Tensor):
        found: list[Any] = [output]
    elif isinstance(output, Mapping):
        found = [output[k] for k in sorted(output, key=lambda k: k != "logits")]
    elif hasattr(output, "logits"):
        found = [output.logits]
    else:
        found = list(output) if isinstance(output, tuple | list) else []
    return [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]


def _shapes(output: Any) -> str:
    found = [f"a tensor of shape {list(t.shape)}" for t in _tensors(output)]
    return " and ".join(found) or f"a {type(output).__name__}"


def _form(model: nn.Module) -> CallForm:
    return _form_of(type(without_adapters(model)).forward)  # of the class: remat and compilation wrap the instance's


@functools.cache
def _form_of(forward: Callable[..., Any]) -> CallForm:
    named = [
        p
        for p in list(inspect.signature(forward).parameters.values())[2:]  # self, tokens
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    required = tuple(p.name for p in named if p.default is p.empty)
    asked = TARGETS if "labels" not in required else (*TARGETS, "labels")
    targets = next((p.name for p in named if p.name in asked), None)
    return CallForm(targets, required, tuple(name for name in required if name in FIXED))
