"""Every objective: transformers' own losses and weights after training are the oracle. What does not fit is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from fullshard import FullshardError, on_torch
from fullshard.checkpoint.other_formats.export import export
from fullshard.on_torch.loss.batch_checks import objective_fault
from tests.cpu import objectives

OTHERS = [kind for kind in objectives.KINDS if kind != "LlamaForCausalLM"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", OTHERS)
def test_training_matches_transformers_own_loss(ranks, tmp_path, kind):
    objectives.save(kind, tmp_path)
    want = objectives.by_transformers(kind, str(tmp_path))
    for found in ranks(2).run(objectives.by_fullshard, kind, str(tmp_path)):
        assert found["objective"] == objectives.KINDS[kind]
        assert found["losses"] == pytest.approx(want["losses"], rel=2e-6)
        for name, p in found["params"].items():
            torch.testing.assert_close(p, want["params"][name], atol=2e-6, rtol=1e-5)
    assert want["losses"][-1] != pytest.approx(want["losses"][0], rel=1e-4)


@pytest.mark.parametrize("kind", OTHERS)
def test_sums_and_accuracy_are_those_of_the_logits(kind):
    model, batch = objectives.build(kind).eval(), objectives.batch(kind, 0)
    with torch.no_grad():
        found, output = on_torch.loss_of(model)(model, batch), model(**batch)
    count = int((batch["labels"] != -100).sum())
    assert int(found.count) == count
    assert float(found.sum) == pytest.approx(float(output.loss) * count, rel=1e-5)
    assert int(found.metrics["accuracy"]) == int((output.logits.argmax(-1) == batch["labels"]).sum())


def test_renamed_tensors_come_back_as_transformers_names_them(ranks, tmp_path):
    """transformers stores a ViT under other names than its modules have."""
    kind = "ViTForImageClassification"
    original = objectives.save(kind, tmp_path / "model")
    names = load_file(tmp_path / "model/model.safetensors").keys()
    found = ranks(2).run(objectives.by_fullshard, kind, str(tmp_path / "model"), str(tmp_path / "checkpoints"))[0]
    export(str(tmp_path / "checkpoints"), tmp_path / "out", "hf", config=tmp_path / "model")
    assert load_file(tmp_path / "out/model.safetensors").keys() == names
    again, info = type(original).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    for name, p in again.named_parameters():
        assert torch.equal(p, found["params"][name]), name


# -- which class ---------------------------------------------------------------------------------------------


def directory(tmp_path: Path, kind: str, **keys) -> str:
    objectives.config(kind).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return str(tmp_path)


@pytest.mark.parametrize("kind", objectives.KINDS)
def test_architectures_decide_the_class(tmp_path, kind):
    model = on_torch.load_model(directory(tmp_path, kind, architectures=[kind]))
    assert type(model) is getattr(transformers, kind)
    assert on_torch.objective_of(model) == objectives.KINDS[kind]


@pytest.mark.parametrize(
    ("kind", "keys", "built", "objective"),
    [
        ("LlamaForCausalLM", {}, "LlamaForCausalLM", "causal"),
        ("BertForMaskedLM", {}, "BertModel", None),
        ("BertForMaskedLM", {"is_decoder": True}, "BertLMHeadModel", "causal"),
        ("BertForMaskedLM", {"architectures": ["BertLMHeadModel"]}, "BertLMHeadModel", "masked"),
        ("BertForMaskedLM", {"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering", None),
        ("T5ForConditionalGeneration", {}, "T5Model", None),
        ("BartForConditionalGeneration", {}, "BartModel", None),
        ("BartForConditionalGeneration", {"architectures": ["BartForCausalLM"]}, "BartForCausalLM", "causal"),
        ("ViTForImageClassification", {}, "ViTModel", None),
    ],
)
def test_what_is_built_otherwise(tmp_path, kind, keys, built, objective):
    model = on_torch.load_model(directory(tmp_path, kind, **keys))
    assert type(model).__name__ == built
    assert on_torch.objective_of(model) == objective


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (["LamaForCausalLM"], "'LamaForCausalLM', which is no class of transformers for model_type 'llama'; did you mean 'Llama"),
        (["BertForMaskedLM"], "'BertForMaskedLM', which is no class of transformers for model_type 'llama'"),
        (["os.system"], "'os.system', which is no class"),
        (["PreTrainedModel"], "'PreTrainedModel', which is no class"),
        ([3], "architectures"),
        ("LlamaForCausalLM", "architectures"),
    ],
)
def test_an_unknown_architecture_is_one_sentence(tmp_path, wanted, says):
    with pytest.raises(FullshardError) as caught:
        on_torch.load_model(directory(tmp_path, "LlamaForCausalLM", architectures=wanted))
    assert says in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


# -- which loss ----------------------------------------------------------------------------------------------


class Own(nn.Module):
    """Not of transformers: any loss may be its own."""

    def forward(self, x):
        return x


def test_other_modules_are_causal_and_take_any_loss():
    assert on_torch.objective_of(Own()) == "causal"
    assert on_torch.loss_of(Own()) is on_torch.summed_loss
    assert objective_fault(Own(), on_torch.masked_loss) is None


def wide(key: str, value: int):
    return {key: lambda b: torch.full_like(b[key], value)}


SHOWN = "would show it the answers; write train_step(state, batches, loss=on_torch."
BAD = {
    "BertForMaskedLM": [
        ("summed_loss", {}, f"BertForMaskedLM sees the whole text, so that a loss on next tokens {SHOWN}masked_loss)"),
        ("chunked_loss", {}, f"{SHOWN}masked_loss)"),
        ("class_loss", {}, "class_loss is not the loss of BertForMaskedLM, whose objective is 'masked'; write"),
        ("masked_loss", {"labels": None}, "needs the model's inputs and labels, as tensors; this one has input_ids"),
        ("masked_loss", {"labels": lambda b: b["labels"].float()}, "labels of a batch is float32, but tokens are whole numbers"),
        ("masked_loss", {"labels": lambda b: b["labels"][:, :-1]}, "labels is 2 × 9 and input_ids 2 × 10; give each token its"),
        ("masked_loss", wide("input_ids", 40), "input_ids holds token 40, but the model has 40 (0 to 39)"),
        ("masked_loss", wide("labels", 77), "labels holds token 77, but the model has 40"),
        ("masked_loss", {"labels": lambda b: b["input_ids"]}, "labels equal input_ids wherever they count"),
    ],
    "T5ForConditionalGeneration": [
        ("summed_loss", {}, f"Generation writes one text from another, so that a loss on next tokens {SHOWN}seq2seq_loss)"),
        ("seq2seq_loss", wide("labels", 40), "labels holds token 40, but the model has 40"),
    ],
    "ViTForImageClassification": [
        ("summed_loss", {"input_ids": lambda b: b["labels"][:, None], "labels": lambda b: b["labels"][:, None]}, "class_loss)"),
        ("class_loss", wide("labels", 5), "labels holds class 5, but the model has 5 (0 to 4); write num_labels"),
        ("class_loss", wide("labels", -1), "labels holds class -1"),
        ("class_loss", {"labels": lambda b: b["labels"].float()}, "labels of a batch is float32, but classes are whole numbers"),
        ("class_loss", {"labels": lambda b: b["labels"][:, None]}, "the model's logits are [2, 5], but labels are [2, 1]"),
    ],
    "LlamaForCausalLM": [("masked_loss", {}, "masked_loss is not the loss of LlamaForCausalLM, whose objective is 'causal'")],
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_the_first_step_refuses_in_one_sentence(ranks, tmp_path, kind):
    objectives.save(kind, tmp_path)
    cases = BAD[kind]
    for said in ranks(2).run(Refusals(kind, str(tmp_path), len(cases))):
        for (_, _, says), sentence in zip(cases, said, strict=True):
            assert says in sentence
            assert "\n" not in sentence


class Refusals:
    """A call that ranks can be sent: functions in `BAD` have no names to be sent by."""

    def __init__(self, kind: str, directory: str, count: int):
        self.kind, self.directory, self.count = kind, directory, count

    def __call__(self) -> list[str]:
        return objectives.refusals(self.kind, self.directory, [(name, change) for name, change, _ in BAD[self.kind]])


@pytest.mark.parametrize(("key", "value"), [("problem_type", "regression"), ("num_labels", 1)])
def test_models_of_numbers_are_no_classifiers(key, value):
    from fullshard.on_torch.loss.batch_checks import first_batch_fault

    kind = "BertForSequenceClassification"
    model = objectives.build(kind)
    setattr(model.config, key, value)
    said = first_batch_fault(model, [objectives.batch(kind, 0)], on_torch.class_loss)
    assert said is not None
    assert "does not predict one class of several; give a loss of your own" in said


def test_a_run_on_next_tokens_refuses_other_models(tmp_path):
    from fullshard.runs.prepare.prepare import prepare
    from fullshard.runs.recipe.recipe import Recipe

    objectives.save("BertForMaskedLM", tmp_path)
    recipe = {"model": {"name": str(tmp_path)}, "data": {"path": "none", "sequence": 8}, "optim": {"lr": 1e-3}}
    recipe |= {"train": {"steps": 1, "global_batch": 2}}
    with pytest.raises(FullshardError, match="BertForMaskedLM sees the whole text"):
        prepare(Recipe.model_validate(recipe), 2)
    with pytest.raises(FullshardError, match=r"BertModel has no head .*write .*\"BertForMaskedLM\"] \(or Bert") as caught:
        prepare(Recipe.model_validate(recipe | {"model": {"name": directory(tmp_path, "BertForMaskedLM")}}), 2)
    assert "BertLMHeadModel" not in str(caught.value)  # it would see the answers


def test_a_head_without_a_loss():
    with pytest.raises(FullshardError, match="BertForQuestionAnswering has no head that a loss is known for"):
        on_torch.loss_of(transformers.BertForQuestionAnswering(objectives.config("BertForMaskedLM")))
