"""Low-rank adapters (LoRA), with PEFT."""

from collections.abc import Sequence

from torch import nn

from fullshard.base.errors import FullshardError, first_line, nearest


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that adapters were added to; another model itself."""
    return model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]


def add_adapters(model: nn.Module, *, rank: int, alpha: int, dropout: float, targets: Sequence[str]) -> nn.Module:
    """Add adapters to the linear layers named `targets` and freeze everything else. A meta model stays on meta."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise FullshardError("adapters need peft: pip install 'fullshard[hf]'") from None
    linears = sorted({path.rpartition(".")[2] for path, m in model.named_modules() if isinstance(m, nn.Linear)})
    for target in targets:
        if target not in linears:
            raise FullshardError(
                f"lora.targets: no linear is called {target!r} (the model has {', '.join(linears)}){nearest(target, linears)}"
            )
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets), bias="none")
    try:
        return get_peft_model(model, config, low_cpu_mem_usage=True)
    except (ValueError, TypeError) as error:
        raise FullshardError(f"adapters could not be added: {first_line(error)}") from error
