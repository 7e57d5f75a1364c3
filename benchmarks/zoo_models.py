"""The models of the zoo by name: the heads of transformers, networks of timm, diffusers' transformers and UNets, all tiny."""

import copy
import inspect
import random
import types
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import zoo_configs, zoo_inputs, zoo_libraries

LARGEST = 40_000_000  # parameters of a model that is still trained
LIBRARIES = ("transformers", "timm", "diffusers")


@dataclass(frozen=True)
class Head:
    """A model of a library. `family`: the row of the table. `name`: as the library calls it."""

    library: str
    family: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.library}:{self.family}:{self.name}"


@dataclass
class Sample:
    """A model that runs, with its inputs for each step and rank."""

    model: nn.Module
    batches: list[list[dict[str, Any]]]
    how: str


def heads(library: str) -> list[Head]:
    return {"transformers": _transformers_heads, "timm": _timm_heads, "diffusers": _diffusers_heads}[library]()


def build(head: Head, how: str) -> nn.Module:
    """The model with values, the same in every process. `how`: as in `zoo_configs.changes`."""
    made = {"transformers": _build_transformers, "timm": _build_timm, "diffusers": _build_diffusers}[head.library]
    return made(head, how).train()


def sample(head: Head, steps: int, ranks: int) -> Sample:
    """The model with inputs that it takes. Raises what building it or running it raises."""
    first: Exception | None = None
    for how in ("all", "widths", "layers") if head.library == "transformers" else ("all",):
        try:
            model = build(head, how)
            guess, names = zoo_inputs.find(model, getattr(model, "config", None), lambda values, m=model: _try(m, values))
            batches = [[guess.of(names, 100 * step + rank + 1) for rank in range(ranks)] for step in range(steps)]
            for values in batches[0]:
                _try(model, values)
            return Sample(build(head, how), batches, how)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _refuse_large(model: nn.Module) -> None:
    if (count := sum(p.numel() for p in model.parameters())) > LARGEST:
        raise ValueError(f"no tiny configuration: {count:,} parameters")


def _try(model: nn.Module, values: dict[str, Any]) -> None:
    seed(3)
    with torch.no_grad():
        found = outputs(model, copy.deepcopy(values))
    if not found:
        raise ValueError("no output of floating point")


def outputs(model: nn.Module, values: dict[str, Any]) -> list[Tensor]:
    """The tensors of floating point that the model returns."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.numel() and id(value) not in seen:
                seen.add(id(value))
                found.append(value)
        elif isinstance(value, dict):
            for key, part in value.items():
                if "past_key" not in str(key) and "cache" not in str(key):
                    visit(part)
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part)
        elif hasattr(value, "sample") and isinstance(value.sample, Tensor):
            visit(value.sample)

    visit(model(**values))
    return found


def seed(number: int) -> None:
    import numpy as np

    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


# -- transformers --------------------------------------------------------------------------------------------


def _transformers_heads() -> list[Head]:
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found: dict[str, dict[str, None]] = defaultdict(dict)
    for name in sorted(vars(modeling_auto)):
        if name.endswith("_MAPPING_NAMES") and name != "CONFIG_MAPPING_NAMES":
            for kind, classes in vars(modeling_auto)[name].items():
                for cls in [classes] if isinstance(classes, str) else classes:
                    found[kind][cls] = None
    return [Head("transformers", kind, cls) for kind in CONFIG_MAPPING_NAMES for cls in found.get(kind, ())]


def _build_transformers(head: Head, how: str) -> nn.Module:
    import transformers

    cls = getattr(transformers, head.name)
    config = zoo_configs.tiny(cls.config_class or transformers.CONFIG_MAPPING[head.family], how)
    with torch.device("meta"):
        _refuse_large(cls(copy.deepcopy(config)))
    seed(7)
    return cls(config)


# -- timm ----------------------------------------------------------------------------------------------------


def _timm_heads() -> list[Head]:
    timm = zoo_libraries.load("timm")
    found: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models():
        module = timm.models.model_entrypoint(name).__module__.rsplit(".", 1)[-1]
        found[module].append(name)
    return [Head("timm", module, name) for module, names in sorted(found.items()) for name in _smallest(names)]


def _smallest(names: list[str]) -> list[str]:
    """The test models of a family, or else one whose name says that it is small."""
    if tests := [n for n in names if n.startswith("test_")]:
        return tests[:1]
    words = ("atto", "nano", "pico", "femto", "xxs", "xxtiny", "tiny", "_t", "small", "_s", "050", "b0", "xs")
    return sorted(names, key=lambda n: (next((i for i, w in enumerate(words) if w in n), len(words)), len(n)))[:1]


def _build_timm(head: Head, how: str) -> nn.Module:
    timm = zoo_libraries.load("timm")
    for more in ({"img_size": 64}, {}):
        try:
            seed(7)
            model = timm.create_model(head.name, num_classes=10, **more)
            break
        except TypeError:
            if not more:
                raise
    _refuse_large(model)
    side = 64 if more else (model.default_cfg.get("input_size") or (3, 64, 64))[-1]
    model.config = types.SimpleNamespace(image_size=side)
    return model


# -- diffusers -----------------------------------------------------------------------------------------------


def _diffusers_heads() -> list[Head]:
    diffusers = zoo_libraries.load("diffusers")
    found = []
    for name in sorted(dir(diffusers)):
        if name.endswith(("Transformer2DModel", "TransformerModel", "Transformer3DModel", "UNet1DModel")) or "UNet" in name:
            cls = getattr(diffusers, name, None)
            if inspect.isclass(cls) and issubclass(cls, nn.Module):
                found.append(Head("diffusers", cls.__module__.rsplit(".", 1)[-1], name))
    return found


def _build_diffusers(head: Head, how: str) -> nn.Module:
    cls = getattr(zoo_libraries.load("diffusers"), head.name)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    default = {p.name: p.default for p in parameters if p.default is not p.empty}
    changed = zoo_configs.changes(default, how)
    with torch.device("meta"):
        _refuse_large(cls(**changed))
    seed(7)
    return cls(**changed)
