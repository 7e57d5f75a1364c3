"""What cuDNN and torch do for convolutions and group norms on CUDA: products, copies between layouts, workspaces.

In 16 bits cuDNN multiplies tensors whose channels lie last. It copies others to that layout before a product and back after it,
into its workspace. Depthwise convolutions are no matrix products: CUDA cores compute them, by cuDNN's kernels where channels
lie last and by torch's, which take four times as long, where they do not. Measured on an H200 (`benchmarks/layer_rates.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullshard.model.costs import OpKind

KernelWork = tuple[OpKind, int, int, tuple[int, ...]]  # kind, flops, bytes moved, and a shape as `costs.Op` has it
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
GROUP_NORMS = ("aten::native_group_norm", "aten::native_group_norm_backward")
HALF = (torch.bfloat16, torch.float16)
FORMS = {4: torch.channels_last, 5: torch.channels_last_3d}
TORCH_DEPTHWISE = 4  # times cuDNN's


class Convolution:
    """One call of a convolution or of its backward."""

    def __init__(self, name: str, args: tuple[Any, ...], outputs: list[Tensor]):
        self.backward = name.endswith("_backward")
        if self.backward:
            self.result, self.source, self.weight = args[:3]
            self.bias, self.stride, self.transposed, self.groups, self.wanted = args[3], args[4], args[7], args[9], args[10]
        else:
            self.source, self.weight, self.bias, self.stride = args[:4]
            self.result, self.transposed, self.groups, self.wanted = outputs[0], args[6], args[8], (True, False, False)

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.groups == self.source.shape[1] and not self.transposed

    @property
    def channels_last(self) -> bool:
        return _form_of((self.source, self.weight)) is not None

    @property
    def converted(self) -> bool:
        """Whether cuDNN copies to and from the layout of its products. It multiplies 1 × 1 kernels as they are."""
        plain = all(n == 1 for n in self.weight.shape[2:]) and all(n == 1 for n in self.stride)
        return self.source.dtype in HALF and not (plain or self.depthwise or self.channels_last)

    def work(self, moved: int) -> KernelWork:
        """The products: one of patches and weight, in backward one for each of the two gradients."""
        products = sum(map(bool, self.wanted[:2]))
        positions = self.source if self.transposed else self.result  # one patch, or its sum, for each of these and their channels
        depth, width = self.weight[0].numel(), self.weight.shape[0]
        flops = 2 * products * positions.numel() * depth
        if self.depthwise:
            return "depthwise", flops, moved, (1 if self.channels_last else TORCH_DEPTHWISE,)
        return "conv", flops, moved, (positions.numel() // max(positions.shape[1], 1), width, depth)

    def further_work(self) -> list[KernelWork]:
        """The kernels beside the products: copies between layouts, the sum with the bias or its gradient."""
        both = [self.source, self.weight, self.result]  # each product reads two of these and writes the third
        copies = both * sum(map(bool, self.wanted[:2])) if self.converted else []
        found: list[KernelWork] = [("pointwise", t.numel(), 2 * t.nbytes, ()) for t in copies]
        if self.backward and self.wanted[2]:
            found.append(("pointwise", self.result.numel(), self.result.nbytes, ()))
        if not self.backward and self.bias is not None:
            found.append(("pointwise", self.result.numel(), 2 * self.result.nbytes, ()))
        return found

    def workspace(self) -> tuple[str, tuple[int, ...]] | None:
        """The copies of what a product reads and writes."""
        return ("layout_copies", tuple(t.nbytes for t in (self.source, self.weight, self.result))) if self.converted else None


def group_norm_passes(name: str, args: tuple[Any, ...]) -> list[KernelWork]:
    """Group norm reads its tensors once for sums and once more for the result. In forward one block of threads adds up a whole
    group, however few there are."""
    if name.endswith("_backward"):
        return [("pointwise", args[1].numel(), args[0].nbytes + args[1].nbytes, ())]
    source, groups = args[0], args[3] * args[6]  # rows × groups
    return [("reduction", source.numel(), source.nbytes, (source.numel() // max(groups, 1), groups))]


def in_cuda_layout(args: tuple[Any, ...], out: Any) -> Any:
    """The results of a convolution or its backward: on CUDA, unlike on meta, channels lie last where they do in an argument."""
    form = _form_of([a for a in args if isinstance(a, Tensor)])
    if form is None:
        return out
    change = lambda t: torch.empty_like(t, memory_format=form) if isinstance(t, Tensor) and t.ndim in FORMS else t
    return change(out) if isinstance(out, Tensor) else type(out)(map(change, out))


def _form_of(tensors: Sequence[Tensor]) -> torch.memory_format | None:
    """The layout with channels last that one of the tensors has."""
    for t in tensors:
        form = FORMS.get(t.ndim)
        if form is not None and t.is_contiguous(memory_format=form) and not t.is_contiguous():
            return form
    return None
