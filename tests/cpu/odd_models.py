"""Models that use their parameters where FSDP does not expect it."""

from types import SimpleNamespace

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


PLAIN = {"stages": Stages, "list_of_parameters": ListOfParameters, "frozen_last": FrozenLast}
SHOWN = {"uncalled_table": UncalledTable, "part_called_alone": PartCalledAlone, "without_hooks": WithoutHooks}
