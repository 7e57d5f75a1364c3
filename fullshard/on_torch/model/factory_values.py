"""The values that a factory gives its model, from the first rank to the shards of all.

The first rank builds the model for real and sends one tensor after the other. Each rank keeps its part. So the other
ranks never hold more than one whole tensor, and the values are the same at every world size.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.base.errors import FullshardError
from fullshard.base.text import bytes_text
from fullshard.on_torch.model.factory import Factory, replace_tensor, tensors_of
from fullshard.on_torch.model.scalars import make_vectors
from fullshard.on_torch.ranks.rank_agreement import GroupAgreement
from fullshard.on_torch.tensors.shard_ranges import local_part, local_tensor

Header = dict[str, tuple[torch.Size, torch.dtype, torch.layout]]


class FactoryValues:
    """The values of a model's tensors, by name. With `together`, methods are collective and only the first rank has them."""

    def __init__(self, factory: Factory, model: nn.Module, seed: int, *, together: bool):
        self.factory, self.ranks = factory, GroupAgreement() if together else None
        self.held: dict[str, Tensor] = {}  # on the first rank
        make = lambda: self._build(model, seed)
        self.header, self.uncalled, self.nbytes = self.ranks.decide(make) if self.ranks else make()
        self.used: set[str] = set()

    def _build(self, model: nn.Module, seed: int) -> tuple[Header, bool, int]:
        """Build it for real and hold its values. Returns what each tensor is, whether the model's own rule was never called, and
        the bytes of all tensors. `model`: the one on meta, which must have the same tensors."""
        self.factory.refuse_too_large(model)
        built, uncalled = self.factory.for_real(seed)
        own = {id(tensor): tensor for tensor in _named(built).values()}  # tied ones once
        make_vectors(built)
        self.held = {name: tensor.detach() for name, tensor in _named(built).items()}
        header = {name: (tensor.shape, tensor.dtype, tensor.layout) for name, tensor in self.held.items()}
        found = {name: tensor.shape for name, tensor in _named(model).items()}
        if wrong := sorted(n for n in {*found, *header} if n not in header or found.get(n) != header[n][0]):
            raise FullshardError(
                f"{self.factory.title} builds another {wrong[0]} for real than on the meta device; make it build the same "
                "model on every call"
            )
        return header, uncalled, sum(t.numel() * t.element_size() for t in own.values())

    def fill(self, model: nn.Module, names: Collection[str], device: torch.device) -> None:
        """Give these parameters and buffers their values, and plain attributes that are still on meta."""
        wanted = set(names) & {*dict(model.named_parameters()), *dict(model.named_buffers())}  # a tied parameter once
        with torch.no_grad():
            for name, (module, key, tensor) in _placed(model).items():
                if key in vars(module):
                    if tensor.is_meta:
                        replace_tensor(module, key, self._whole(name).to(device))
                elif name in wanted:
                    self._fill_one(module, key, tensor, self._whole(name))

    def _fill_one(self, module: nn.Module, key: str, tensor: Tensor, whole: Tensor) -> None:
        if whole.layout is not torch.strided:
            replace_tensor(module, key, whole.to(tensor.device))
            return
        part = local_part(whole, tensor) if isinstance(tensor, DTensor) else whole
        local_tensor(tensor.detach()).copy_(part)

    def _whole(self, name: str) -> Tensor:
        """The whole tensor, on the CPU. The first rank forgets it."""
        self.used.add(name)
        if self.ranks is None:
            return self.held.pop(name)
        shape, dtype, layout = self.header[name]
        if layout is not torch.strided:  # a sparse buffer
            return self.ranks.decide(lambda: self.held.pop(name))
        whole = self.held.pop(name).contiguous() if dist.get_rank() == 0 else torch.empty(shape, dtype=dtype, device="cpu")
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0, group=self.ranks.group)
        return whole

    def close(self) -> tuple[str, ...]:
        """Forget the values. Returns what a user should know."""
        self.held = {}
        if self.ranks:
            self.ranks.close()
        title = self.factory.title
        built = (
            f"{title} sets {len(self.used)} tensors itself: the model was built once in host memory, {bytes_text(self.nbytes)}"
        )
        rule = f"{title} never calls the model's _init_weights; write model.init = 'modules' if it is to set the weights"
        return (built, rule) if self.uncalled else (built,)


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, (_, _, tensor) in _placed(model).items()}


def _placed(model: nn.Module) -> dict[str, tuple[nn.Module, str, Any]]:
    """Every tensor by all its names, with the module and the key that hold it."""
    paths = {module: path for path, module in model.named_modules()}
    return {f"{paths[m]}.{key}".removeprefix("."): (m, key, tensor) for m, key, tensor in tensors_of(model)}
