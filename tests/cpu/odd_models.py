"""Models that use their parameters where FSDP does not expect it."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, WORDS = 16, 40


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(torch.relu(self.scale(x)))


class Odd(nn.Module):
    """An embedding, blocks and a head; `body` is what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.body(self.embed(input_ids))))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stages(Odd):
    """Its repeated modules are lists, as in PoolFormer, PVT and HRNet."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for stage in self.blocks:
            for block in stage:
                x = block(x)
        return x


class UncalledTable(Odd):
    """Reads the weight of a module that it never calls, as SEW-D and LayoutLMv3 do."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(32, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.positions.weight[: x.size(1)])


class UnfoldedTable(UncalledTable):
    """Reads such a weight by an operation that shards do not have."""

    def body(self, x: Tensor) -> Tensor:
        return Odd.body(self, x + self.positions.weight.unfold(0, 3, 1).mean(-1)[: x.size(1)])


class Scales(nn.ParameterList):
    def reset_parameters(self) -> None:
        for scale in self:
            nn.init.ones_(scale)


class ListOfParameters(Odd):
    """Owns its parameters in a list, which does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = Scales(nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x * self.scales[0]) * self.scales[1]


class PartCalledAlone(Odd):
    """Calls a part of the first block before the blocks, as DiT does."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + self.blocks[0].scale(x))


class WithoutHooks(Odd):
    """Calls `forward` itself, as SqueezeBERT does."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class FrozenLast(Odd):
    """The last module of its first unit is frozen, as RoFormer's positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.positions = nn.LayerNorm(WIDTH), nn.Embedding(32, WIDTH).requires_grad_(False)
        self.blocks = self._modules.pop("blocks")  # after them, so that they are one unit with the embedding

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.norm(x) + self.positions(torch.arange(x.size(1))))


class MixedBuffer(Odd):
    """Multiplies by a buffer, which no plan casts unasked, as Swin's attention does with its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotation", torch.eye(WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x @ self.rotation)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.eye_(self.rotation)
        elif isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()


class Narrow(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.relu(self.scale(x)))


class OutputInPlace(Odd):
    """Changes in place what its blocks return, which are views, as DETR does with its boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrow() for _ in range(3))
        self.head = self._modules.pop("head")

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x[..., :4] += 1
        return x


class Cached(Narrow):
    def forward(self, x: Tensor, cache: SimpleNamespace) -> Tensor:
        cache.layers.append(SimpleNamespace(keys=self.scale(x)))
        return x + self.mix(x)


class ReadsCache(Odd):
    """Its first blocks return into a cache, and the output of the last of them is not used, as in PI0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        cache = SimpleNamespace(layers=[])
        for block in self.blocks:
            last, x = x, block(x, cache)
        return last + sum(layer.keys for layer in cache.layers)


class SharedList(Odd):
    """A list of modules that a module inside has as well, as DETR's decoder has the heads for boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.add_module("boxes", nn.ModuleList(Block() for _ in range(2)))
        self.boxes = self.decoder.boxes
        del self.blocks

    def body(self, x: Tensor) -> Tensor:
        for block in self.boxes:
            x = block(x)
        return x


class SharedParts(Odd):
    """Its blocks share a module, which the model has as well, as CoaT's position encodings are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.mix = self.shared


class DenseList(nn.ModuleList):
    """A list that runs."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class ListsThatRun(Odd):
    """Its repeated modules are lists with a forward of their own, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DenseList([Block(), Block()]) for _ in range(2))


class EmptyParameter(Odd):
    """Has a parameter without elements, as CHMv2 has without register tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, 0, WIDTH))

    def body(self, x: Tensor) -> Tensor:
        return super().body(torch.cat([x, self.registers.expand(len(x), 0, WIDTH)], 1))


class ScaledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        assert self.strength.ndim == 0
        return super().forward(x) * self.strength.exp()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.strength, 0.5)


class ScalarParameters(Odd):
    """Has scalars as parameters, as CLIP has its temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def body(self, x: Tensor) -> Tensor:
        return torch.stack([super().body(x).mean(-1), self.temperature.expand(x.shape[:2])], -1).repeat(1, 1, WIDTH // 2)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.temperature, 2.0)


class AddsToInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class InputInPlace(Odd):
    """Its blocks change their input in place, as those of UNetControlNetXS do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AddsToInput() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        return super().body(x + 0)


class Reversed(torch.autograd.Function):
    """Keeps nothing of a block, and computes a part of it again in backward, as Reformer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Narrow) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = x + ctx.block.mix(x)
        again.backward(grad)
        return x.grad, None


class OwnBackward(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrow() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Reversed.apply(x, block)
        return x


PLAIN = {
    "stages": Stages,
    "list_of_parameters": ListOfParameters,
    "frozen_last": FrozenLast,
    "output_in_place": OutputInPlace,
    "reads_cache": ReadsCache,
    "shared_list": SharedList,
    "shared_parts": SharedParts,
    "lists_that_run": ListsThatRun,
    "empty_parameter": EmptyParameter,
    "scalar_parameters": ScalarParameters,
}
SHOWN = {
    "uncalled_table": UncalledTable,
    "unfolded_table": UnfoldedTable,
    "part_called_alone": PartCalledAlone,
    "without_hooks": WithoutHooks,
}
REFUSED = {"mixed_buffer": MixedBuffer, "input_in_place": InputInPlace, "own_backward": OwnBackward}
