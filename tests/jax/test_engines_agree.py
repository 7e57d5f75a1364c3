"""What both engines show has one name, and what an engine lacks is in its row of facts."""

import pytest

from fullshard import FullshardError, on_jax, on_torch
from fullshard.engine.engine import Engine, load_engine
from fullshard.plan.engine_traits import ENGINES, TRAITS

PARTS = ("ranks", "model", "trainer", "saver", "machine")
SAME = {
    *("Checkpointer", "Loss", "State", "StepResult", "called_loss", "chunked_cross_entropy", "chunked_loss", "describe"),
    *("evaluate", "finish", "generate", "is_first", "load_model", "measure", "memory", "shard", "start", "summed_loss"),
    "train_step",
}


def test_the_public_faces_share_their_names():
    assert set(on_torch.__all__) & set(on_jax.__all__) == SAME | {"Factory"}


def test_all_that_the_face_of_jax_names_is_there():
    assert [name for name in on_jax.__all__ if not hasattr(on_jax, name)] == []
    assert on_jax.__all__ == sorted(on_jax.__all__, key=lambda name: (name[0].islower(), name))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_what_its_traits_say(name):
    engine = load_engine(name)
    assert isinstance(engine, Engine)
    assert (engine.name, engine.traits) == (name, TRAITS[name])
    assert engine.traits.traces == (engine.model.trace_costs is not None)
    assert ("lora" in engine.traits.limits) == (engine.model.add_adapters is None)
    assert ("model.scan" in engine.traits.limits) == (engine.model.scan is None)
    assert engine.traits.one_program == (engine.machine.host_share is None)


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_of_both_engines_have_the_same_names(part):
    torch, jax = (getattr(load_engine(name), part) for name in ENGINES)
    assert torch.__all__ == jax.__all__


def test_what_an_engine_lacks_is_refused_in_a_sentence():
    engine = load_engine("jax")
    with pytest.raises(
        FullshardError, match=r"^lora: the JAX engine trains whole models; use --engine torch, or leave lora out$"
    ):
        engine.offered(engine.model.add_adapters, "lora")
