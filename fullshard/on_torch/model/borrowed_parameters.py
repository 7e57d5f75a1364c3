"""Run a module's forward with other tensors in place of its parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def borrowed_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, `module` has these tensors under the names of its own parameters. Its hooks do not run again, as they would in
    `torch.func.functional_call`, and gradients go through the tensors to what they were made of."""
    own = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)
