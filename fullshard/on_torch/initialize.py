"""Weights from nothing, shard by shard.

A unit at a time is made whole, initialised by the model's own rules, cut to this rank's part and dropped,
so that no rank ever holds more than its shards and one unit. Each module draws from its own random
stream, keyed by seed and module path: the weights are the same at every world size, strategy and grouping.

Memory is poisoned before and scanned after: what nobody initialised is an error, not a surprise.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import FullshardError
from fullshard.on_torch.private import same_cut
from fullshard.on_torch.shard_ranges import local_part

if TYPE_CHECKING:
    from fullshard.on_torch.weights import Weights

Initializer = Callable[[nn.Module], object]
Owners = list[tuple[nn.Module, str]]


def initialize(model: nn.Module, device: torch.device, seed: int, init: Initializer | None = None) -> None:
    """Give an unsharded model the weights that `shard` would give it."""
    refuse_unset(materialize(model, [], device, seed, init))


def materialize(
    model: nn.Module,
    units: list[list[str]],
    device: torch.device,
    seed: int,
    init: Initializer | None = None,
    weights: "Weights | None" = None,
    elsewhere: Mapping[int, Tensor] = MappingProxyType({}),
) -> list[str]:
    """Give every parameter and buffer that is still on meta its memory and its initial value; the names of
    those that nobody set.

    `units`: the module paths that are made whole together. `init`, if given, is called with each module
    in place of the model's own `_init_weights`, `reset_parameters` or `init_weights`. What `weights` has is
    read from it instead, last of all, so that no rule can overwrite it. `elsewhere`: by the id of a parameter, the memory
    for this rank's part of it, where that is not to be on the device.
    """
    unset = _allocate(model, device, elsewhere)
    for tensor in weights.tensors(model) if weights else ():
        unset.pop(id(tensor), None)
    found = _initialize_unset(model, units, unset, device, seed, init)
    if weights:
        weights.read(model)
    return sorted({*found, *not_numbers({**dict(model.named_parameters()), **dict(model.named_buffers())})})


def _initialize_unset(
    model: nn.Module,
    units: list[list[str]],
    unset: dict[int, int],
    device: torch.device,
    seed: int,
    init: Initializer | None,
) -> list[str]:
    """Run the rules of all modules that hold something unset; the names of the buffers that stayed so."""
    if not unset:
        return []
    rules = _rules(model, init)
    paths = {module: path for path, module in model.named_modules()}
    done: set[nn.Module] = set()
    # The device: initialisers make tensors of their own, and the caller may still be inside torch.device("meta").
    with torch.random.fork_rng(_generators(device)), torch.no_grad(), device:
        for modules in [*[[model.get_submodule(p) for p in unit if p] for unit in units], [model]]:
            members = [m for root in modules for m in _post_order(root) if m not in done]
            done.update(members)
            waiting = [m for m in members if any(id(t) in unset for t in [*m.parameters(), *m.buffers()])]
            with _whole(waiting, unset, device):
                for module in waiting:
                    torch.manual_seed(_key(seed, paths[module]))
                    rules[module](module)
    return [n for n, b in model.named_buffers() if unset.get(id(b)) == b._version]


def _generators(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _allocate(model: nn.Module, device: torch.device, elsewhere: Mapping[int, Tensor]) -> dict[int, int]:
    """Poisoned memory for everything on meta; the ids of the tensors that got it, with torch's count of
    writes to each (a mask of booleans has no value that could serve as poison)."""
    unset: dict[int, int] = {}
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in replaced:  # tied parameters stay tied
                    part = elsewhere.get(id(p))
                    made = torch.empty_like(p, device=device) if part is None else same_cut(cast(DTensor, p), part)
                    replaced[id(p)] = nn.Parameter(made, requires_grad=p.requires_grad)
                    _poison(replaced[id(p)])
                    unset[id(replaced[id(p)])] = replaced[id(p)]._version
                module._parameters[name] = replaced[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = fresh = _poison(torch.empty_like(b, device=device))
                unset[id(fresh)] = fresh._version
    return unset


def _poison(tensor: Tensor) -> Tensor:
    local = _local(tensor.detach())
    if local.is_floating_point():
        local.fill_(torch.nan)
    return tensor


def not_numbers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those of which this rank's part holds a NaN."""
    return [n for n, t in tensors.items() if _has_nan(_local(t.detach()))]


def refuse_unset(names: Sequence[str]) -> None:
    """Raise for tensors that were never written, or hold NaN."""
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise FullshardError(
            f"{', '.join(names[:3])}{more} was never initialised (or is NaN): give its module a reset_parameters() that sets it, "
            "or pass shard(..., init=function_of_a_module)"
        )


def _has_nan(local: Tensor) -> bool:
    return local.is_floating_point() and bool(local.isnan().any())


# -- one unit, whole for a moment ------------------------------------------------------------------


@contextmanager
def _whole(modules: list[nn.Module], unset: dict[int, int], device: torch.device) -> Iterator[None]:
    """Inside, the unset parameters of `modules` are whole plain tensors; after, this rank keeps its part."""
    swaps: dict[int, tuple[DTensor, nn.Parameter, Owners]] = {}
    for module in modules:
        for name, p in module._parameters.items():
            if p is not None and id(p) in unset and isinstance(p, DTensor):
                full = swaps[id(p)][1] if id(p) in swaps else nn.Parameter(_full(p, device), requires_grad=p.requires_grad)
                swaps.setdefault(id(p), (p, full, []))[2].append((module, name))
    for _, full, owners in swaps.values():
        for module, name in owners:
            module._parameters[name] = full
    yield
    for sharded, full, owners in swaps.values():
        _local(sharded.detach()).copy_(local_part(full.detach(), sharded))
        for module, name in owners:
            module._parameters[name] = cast(nn.Parameter, sharded)


def _full(p: DTensor, device: torch.device) -> Tensor:
    return _poison(torch.empty(p.shape, dtype=p.dtype, device=device))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- whose rules ----------------------------------------------------------------------------------


def _rules(model: nn.Module, init: Initializer | None) -> dict[nn.Module, Initializer]:
    """For each module the function that initialises it: the caller's, the nearest `_init_weights` above
    it (Hugging Face's convention, and nanoGPT's), or its own `reset_parameters` / `init_weights`."""
    rules: dict[nn.Module, Initializer] = {}

    def visit(module: nn.Module, above: Initializer | None) -> None:
        if module in rules:
            return
        own = getattr(module, "_init_weights", None)
        above = own if callable(own) else above
        rules[module] = init or _rule(module, above)
        for child in module.children():
            visit(child, above)

    visit(model, None)
    return rules


def _rule(module: nn.Module, above: Initializer | None) -> Initializer:
    if hasattr(module, "reset_lora_parameters"):  # PEFT: A random, B zero; its linears are set before it
        return _reset_lora
    if above is not None:
        return above
    for name in ("reset_parameters", "_reset_parameters", "init_weights"):
        method = getattr(module, name, None)
        if callable(method) and not _requires_arguments(method):
            return lambda _: method()
    return lambda _: None


def _reset_lora(module: nn.Module) -> None:
    for adapter in [*module.lora_A, *module.lora_embedding_A]:  # type: ignore[misc]
        module.reset_lora_parameters(adapter, True)  # type: ignore[operator]


def _requires_arguments(method: Callable[..., object]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters
    )


def _post_order(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _post_order(child)
    yield module


def _key(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:8], "big") >> 1
