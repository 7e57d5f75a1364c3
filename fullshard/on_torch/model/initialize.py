"""Initialise a sharded model that was built on the meta device.

One unit at a time is allocated in full, initialised by the model's own rules, cut to this rank's shard and freed. So a
rank never holds more than its shards and one full unit. Each module has its own random stream, seeded by the seed and
the module's path: the weights are the same at every world size, strategy and grouping. A model that a `Factory` made gets
the values of its own code instead.

New memory is filled with NaN first. A tensor that still has NaN afterwards was never initialised, which is an error.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fullshard.base.errors import FullshardError
from fullshard.base.text import first_of
from fullshard.on_torch.model.factory import Factory, kept_factory, tensors_of
from fullshard.on_torch.model.factory_values import FactoryValues
from fullshard.on_torch.private.fsdp_groups import Owner
from fullshard.on_torch.private.torch_internals import dtensor_like
from fullshard.on_torch.tensors.shard_ranges import local_part, local_tensor

if TYPE_CHECKING:
    from fullshard.on_torch.model.weights import Weights

Initializer = Callable[[nn.Module], object]
DRAWS = {
    getattr(Tensor, name)
    for name in ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")
}


@dataclass(frozen=True)
class Initialized:
    """`unset`: the names of tensors that nobody initialised. `notes`: what a user should know."""

    unset: list[str]
    notes: tuple[str, ...] = ()


def initialize(model: nn.Module, device: torch.device, seed: int, init: Initializer | Factory | None = None) -> None:
    """Initialise an unsharded model with the same weights that `shard` gives it."""
    refuse_unset(materialize(model, [], device, seed, init, together=False).unset)


def factory_of(model: nn.Module, init: Initializer | Factory | None) -> Factory | None:
    """The factory whose values a model on meta gets: the caller's, or the one that `load_model` called."""
    if init is not None:
        return init if isinstance(init, Factory) else None
    return kept_factory(model)


def materialize(
    model: nn.Module,
    units: list[list[str]],
    device: torch.device,
    seed: int,
    init: Initializer | Factory | None = None,
    weights: "Weights | None" = None,
    preallocated: Mapping[int, Tensor] = MappingProxyType({}),
    *,
    together: bool = True,
) -> Initialized:
    """Allocate and initialise every parameter and buffer that is on meta. Collective, unless `together` is False.

    `units`: the module paths of each unit. `init`, if given, is called with each module instead of the model's own
    `_init_weights`, `reset_parameters` or `init_weights`; a `Factory` is called once. Tensors that `weights` has are read
    from it, after all initialisers have run. `preallocated`: memory for this rank's shard by parameter id, for shards that
    are not on the device.
    """
    factory = factory_of(model, init)
    values = None
    if factory and _lacks_values(model, weights):
        values = FactoryValues(factory, model, seed, together=together)
    unset = _allocate(model, device, preallocated)
    for tensor in weights.tensors(model) if weights else ():
        unset.pop(id(tensor), None)
    found: list[str] = []
    if values:
        values.fill(model, _names_of(model, unset), device)
    else:
        found = _initialize_unset(model, units, unset, device, seed, None if isinstance(init, Factory) else init)
    if weights:
        weights.read(model)
    names = sorted({*found, *names_with_nan({**dict(model.named_parameters()), **dict(model.named_buffers())})})
    return Initialized(names, values.close() if values else ())


def _lacks_values(model: nn.Module, weights: "Weights | None") -> bool:
    """True if tensors are on meta that no file has."""
    read = {id(t) for t in weights.tensors(model)} if weights else set()
    return any(t.is_meta and id(t) not in read for _, _, t in tensors_of(model))


def _names_of(model: nn.Module, unset: dict[int, int]) -> list[str]:
    tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    return [name for name, tensor in tensors.items() if id(tensor) in unset]


def _initialize_unset(
    model: nn.Module, units: list[list[str]], unset: dict[int, int], device: torch.device, seed: int, init: Initializer | None
) -> list[str]:
    """Run the initialisers of all modules with unset tensors. Returns the names of the buffers that stayed unset."""
    if not unset:
        return []
    rules = _rules(model, init)
    paths = {module: path for path, module in model.named_modules()}
    done: set[nn.Module] = set()
    # `device` as a context: initialisers create tensors, and the caller may still be inside torch.device("meta").
    cuda = _generators(device)
    with torch.random.fork_rng(cuda), torch.no_grad(), device, _WholeDraws():
        for modules in [*[[model.get_submodule(p) for p in unit if p] for unit in units], [model]]:
            members = [m for root in modules for m in _post_order(root) if m not in done]
            done.update(members)
            pending = [m for m in members if any(id(t) in unset for t in [*m.parameters(), *m.buffers()])]
            with _unsharded(pending, unset, device):
                for module in pending:
                    _seed(_module_seed(seed, paths[module]), cuda)
                    rules[module](module)
    return [n for n, b in model.named_buffers() if unset.get(id(b)) == b._version]


def _generators(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _seed(seed: int, cuda: list[int]) -> None:
    """Seed the generators that initialisers draw from. `torch.manual_seed` also keeps the stack of its caller for each kind of
    device that is not in use: a millisecond for every module."""
    torch.default_generator.manual_seed(seed)
    for index in cuda:
        torch.cuda.default_generators[index].manual_seed(seed)


def _allocate(model: nn.Module, device: torch.device, preallocated: Mapping[int, Tensor]) -> dict[int, int]:
    """Allocate everything that is on meta, filled with NaN. Returns the ids of the new tensors with their version counters:
    a tensor of booleans or integers cannot hold NaN, so for buffers a changed version shows a write."""
    unset: dict[int, int] = {}
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in replaced:  # tied parameters stay tied
                    part = preallocated.get(id(p))
                    made = torch.empty_like(p, device=device) if part is None else dtensor_like(cast(DTensor, p), part)
                    replaced[id(p)] = nn.Parameter(made, requires_grad=p.requires_grad)
                    _fill_with_nan(replaced[id(p)])
                    unset[id(replaced[id(p)])] = replaced[id(p)]._version
                module._parameters[name] = replaced[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                module._buffers[name] = fresh = _fill_with_nan(torch.empty_like(b, device=device))
                unset[id(fresh)] = fresh._version
    return unset


def _fill_with_nan(tensor: Tensor) -> Tensor:
    local = local_tensor(tensor.detach())
    if local.is_floating_point():
        local.fill_(torch.nan)
    return tensor


def names_with_nan(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors with a NaN in this rank's part."""
    return [n for n, t in tensors.items() if _has_nan(local_tensor(t.detach()))]


def refuse_unset(names: Sequence[str]) -> None:
    """Raise if there are tensors that were never initialised."""
    if names:
        raise FullshardError(
            f"{first_of(names, 3)} was never initialised (or is NaN): give its module a reset_parameters() that sets it, "
            "or pass shard(..., init=function_of_a_module), or init=on_torch.Factory(function_that_returns_the_model), which "
            "keeps the values of __init__"
        )


def _has_nan(local: Tensor) -> bool:
    return local.is_floating_point() and bool(local.isnan().any())


# -- one unit in full --------------------------------------------------------------------------------


@contextmanager
def _unsharded(modules: list[nn.Module], unset: dict[int, int], device: torch.device) -> Iterator[None]:
    """Inside, the unset parameters of `modules` are full plain tensors. On exit, this rank's part is copied to its shard."""
    swaps: dict[int, tuple[DTensor, nn.Parameter, list[Owner]]] = {}
    for module in modules:
        for name, p in module._parameters.items():
            if p is not None and id(p) in unset and isinstance(p, DTensor):
                full = swaps[id(p)][1] if id(p) in swaps else nn.Parameter(_empty_full(p, device), requires_grad=p.requires_grad)
                swaps.setdefault(id(p), (p, full, []))[2].append((module, name))
    for _, full, owners in swaps.values():
        for module, name in owners:
            module._parameters[name] = full
    yield
    for sharded, full, owners in swaps.values():
        local_tensor(sharded.detach()).copy_(local_part(full.detach(), sharded))
        for module, name in owners:
            module._parameters[name] = cast(nn.Parameter, sharded)


class _WholeDraws(TorchFunctionMode):
    """Inside, random values for a sharded tensor are drawn for the whole tensor, and each rank keeps its part.

    A rule may set parameters of another unit, as T5's sets the shared embedding from the root. DTensor's own draws depend on
    how a tensor is sharded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharded = args[0] if args else kwargs.get("tensor")  # torch.nn.init names it
        draws = func in DRAWS or getattr(func, "__module__", None) == nn.init.__name__
        if not draws or not isinstance(sharded, DTensor):
            return func(*args, **kwargs)
        full = torch.empty(sharded.shape, dtype=sharded.dtype, device=sharded.device)
        func(full, *args[1:], **{k: v for k, v in kwargs.items() if k != "tensor"})
        local_tensor(sharded).copy_(local_part(full, sharded))
        return sharded


def _empty_full(p: DTensor, device: torch.device) -> Tensor:
    return _fill_with_nan(torch.empty(p.shape, dtype=p.dtype, device=device))


# -- which initialiser -------------------------------------------------------------------------------


def _rules(model: nn.Module, init: Initializer | None) -> dict[nn.Module, Initializer]:
    """The function that initialises each module: the caller's, or the nearest `_init_weights` of a parent (the convention of
    Hugging Face and nanoGPT), or the module's own `reset_parameters` or `init_weights`."""
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
    if hasattr(module, "reset_lora_parameters"):  # PEFT: A random, B zero; post-order has set its linear layers before
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


def _module_seed(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:8], "big") >> 1
