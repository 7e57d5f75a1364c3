"""Conversations, compared with hand-written texts and with transformers' rendering and mask of answers."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest

from fullshard import FullshardError
from fullshard.data import Batches, TokenFile
from fullshard.data.chat import messages_of
from fullshard.data.pack_tokens import pack
from fullshard.data.sources import HubDataset

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content | trim }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content | trim }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant speak') }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # leaves out an earlier answer once another follows
    "{% for message in messages %}{{ message.role }}: "
    "{% if message.role == 'user' or loop.last %}{{ message.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TURNS = [("system", "Be brié."), ("user", "Hello  there"), ("assistant", "Hi 日本!\n"), ("user", "More?"), ("assistant", "no")]
CHAT = [{"role": role, "content": content} for role, content in TURNS]
CHATS = [CHAT, CHAT[1:3], [*CHAT[1:], *CHAT[1:4]], *[[CHAT[1], {"role": "assistant", "content": "x" * n}] for n in range(90)]]


def write(path, chats, key="messages"):
    path.write_text("".join(json.dumps({key: chat}) + "\n" for chat in chats))
    return path


def parts(tokens: TokenFile) -> list[tuple[list[int], list[bool]]]:
    """Each document's tokens and answers."""
    edges = [0, *tokens.ends().tolist()]
    return [(tokens.read(a, b - a).tolist(), tokens.read_answers(a, b - a).tolist()) for a, b in pairwise(edges)]


def told(row: list[int], answers: list[bool]) -> str:
    """The bytes of the answers alone, `_` for the others."""
    return bytes(t if a else ord("_") for t, a in zip(row, answers, strict=True)).decode()


# -- bytes: what was said can be read ------------------------------------------------------------------------


def test_bytes_are_chat_ml_and_only_the_answers_are_marked(tmp_path):
    made = pack([write(tmp_path / "a.jsonl", [CHAT])], tmp_path / "x", chat=True, workers=1)
    ((row, answers),) = parts(made)
    before = "<|im_start|>system\nBe brié.<|im_end|>\n<|im_start|>user\nHello  there<|im_end|>\n<|im_start|>assistant\n"
    between = "<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    assert bytes(row).decode() == f"{before}Hi 日本!\n<|im_end|>\n{between}no<|im_end|>\n\0"
    blank = "_" * len(before.encode()), "_" * len(between)
    assert told(row, answers) == f"{blank[0]}Hi 日本!\n<|im_end|>\n{blank[1]}no<|im_end|>\n\0"


def test_a_conversation_that_the_user_ends_asks_for_nothing_after_the_answer(tmp_path):
    made = pack([write(tmp_path / "a.jsonl", [CHAT[1:4]])], tmp_path / "x", chat=True, workers=1)
    ((row, answers),) = parts(made)
    assert told(row, answers).strip("_") == "Hi 日本!\n<|im_end|>\n"
    assert answers[-1] is False


def test_training_sees_labels_in_answers_only(tmp_path):
    made = pack([write(tmp_path / "a.jsonl", [CHAT])], tmp_path / "x", chat=True, workers=1)
    labels = Batches(made, 200, 1, boundaries="labels", packing="whole").sample(0)["labels"]
    assert bytes(labels[labels >= 0].tolist()).decode() == "Hi 日本!\n<|im_end|>\nno<|im_end|>\n\0"


def test_the_number_of_workers_does_not_matter(tmp_path):
    source = write(tmp_path / "a.jsonl", CHATS)
    one, two = (pack([source], tmp_path / str(n), chat=True, workers=n) for n in (1, 2))
    for name in ("00000.tokens", "00000.answers", "00000.ends", "index.json"):
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()


# -- records -------------------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"messages": ASKED}, None),
        ({"messages": [{**m, "name": None} for m in ASKED], "prompt": None}, None),  # as in a table
        ({"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}, None),
        ({"conversations": ASKED}, None),
        ({"messages": [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in ASKED]}, None),
        ({"prompt": "1+1?", "completion": "2"}, None),
        ({"instruction": "1+1?", "output": "2"}, None),
        ({"instruction": "1+1?", "input": "", "output": "2"}, None),
        ({"chosen": ASKED, "messages": []}, "chosen"),
    ],
)
def test_every_custom_is_the_same_conversation(record, field):
    assert messages_of("here", record, field) == ASKED


def test_input_follows_the_instruction_and_system_comes_first():
    record = {"instruction": "Translate.", "input": "Haus", "output": "house", "system": "Be exact."}
    assert messages_of("here", record) == [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Translate.\n\nHaus"},
        {"role": "assistant", "content": "house"},
    ]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"messages": CHAT[:2]}, "a.jsonl:2 has no message of the assistant"),
        ({"messages": "hello"}, "a.jsonl:2 has no list of messages in 'messages' (it has messages)"),
        ({"messages": []}, "a.jsonl:2 has no list of messages"),
        ({"text": "hello"}, "a.jsonl:2 has no conversation (it has text); give messages"),
        ({"prompt": "hello"}, "a.jsonl:2 has no conversation (it has prompt)"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "a.jsonl:2, message 1 has the role 'robot'; a role is one of"),
        ({"messages": [*ASKED, {"role": "user"}]}, "a.jsonl:2, message 3 has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 1 has a content that is not text"),
        ({"messages": ASKED, "tools": "{"}, "a.jsonl:2: its tools are not JSON"),
    ],
)
def test_a_record_that_is_no_conversation(tmp_path, record, sentence):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": ASKED}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(FullshardError) as caught:
        pack([tmp_path / "a.jsonl"], tmp_path / "x", chat=True, workers=1)
    assert sentence in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_worker_says_where_it_failed(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": ASKED}) + "\n") * 150 + json.dumps({"messages": CHAT[:2]}))
    with pytest.raises(FullshardError, match=r"a\.jsonl:151 has no message of the assistant"):
        pack([tmp_path / "a.jsonl"], tmp_path / "x", chat=True, workers=2)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_text_files_hold_no_conversations(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(FullshardError, match=r"holds no conversations; give .jsonl, .parquet"):
        pack([tmp_path / "a.txt"], tmp_path / "x", chat=True)
    with pytest.raises(FullshardError, match=r"has no .jsonl, .parquet files"):
        pack([tmp_path], tmp_path / "x", chat=True)


def test_parquet_and_datasets_hold_conversations_too(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    want = pack([write(tmp_path / "a.jsonl", CHATS)], tmp_path / "want", chat=True, workers=1)
    parquet.write_table(arrow.table({"id": range(len(CHATS)), "messages": CHATS}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"talk": CHATS}).save_to_disk(tmp_path / "saved")
    pack([tmp_path / "a.parquet"], tmp_path / "parquet", chat=True, workers=1)
    pack([HubDataset(str(tmp_path / "saved"))], tmp_path / "dataset", chat=True, field="talk", workers=1)
    for made in ("parquet", "dataset"):
        assert parts(TokenFile(tmp_path / made)) == parts(want)
    with pytest.raises(FullshardError, match="has none of the columns messages, conversations"):
        pack([HubDataset(str(tmp_path / "saved"))], tmp_path / "y", chat=True, workers=1)


# -- tokenizers and templates ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte-level tokenizer with merges over the words of the chats, as Hugging Face directories have it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([content for _, content in TURNS] * 9 + ["assistant\n", "user\n"] * 9, trainer)
    folder = tmp_path_factory.mktemp("model")
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def packed(tmp_path, model, jinja, chats=CHATS, **options) -> list[tuple[list[int], list[bool]]]:
    (tmp_path / "template.jinja").write_text(jinja)
    source, output = write(tmp_path / "a.jsonl", chats), tmp_path / f"x{len(list(tmp_path.iterdir()))}"
    options = {"template": tmp_path / "template.jinja", "workers": 1} | options
    return parts(pack([source], output, chat=True, tokenizer=str(model), **options))


def test_the_mask_is_the_one_of_transformers(tmp_path, model):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(model)
    end = oracle.eos_token_id
    for (row, answers), chat in zip(packed(tmp_path, model, CHATML), CHATS, strict=True):
        want = oracle.apply_chat_template(chat, chat_template=CHATML, return_dict=True, return_assistant_tokens_mask=True)
        assert row == [*want["input_ids"], end]
        assert answers == [*map(bool, want["assistant_masks"]), chat[-1]["role"] == "assistant"]


def test_answers_found_by_prefix_are_those_that_the_template_marks(tmp_path, model):
    assert packed(tmp_path, model, UNMARKED) == packed(tmp_path, model, CHATML)


@pytest.mark.parametrize("template", [UNMARKED, INSTRUCT, FORGETFUL])
def test_templates_render_as_in_transformers(tmp_path, model, template):
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(model)
    chats = [CHAT[1:3]] if template == FORGETFUL else [c for c in CHATS if c[0]["role"] == "user"]
    found = packed(tmp_path, model, template, chats)
    for (row, _), chat in zip(found, chats, strict=True):
        text = oracle.apply_chat_template(chat, chat_template=template, tokenize=False)
        want = oracle(text, add_special_tokens=False)["input_ids"]
        assert row == (want if text.endswith("</s>") else [*want, oracle.eos_token_id])


def test_the_end_that_a_template_writes_is_not_written_twice(tmp_path, model):
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(model / "tokenizer.json")).decode
    ((row, answers),) = packed(tmp_path, model, INSTRUCT, [CHAT[1:]])
    assert decode(row, skip_special_tokens=False) == ("<s>[INST] Hello  there [/INST] Hi 日本!</s>[INST] More? [/INST] no</s>")
    assert decode(np.array(row)[answers].tolist(), skip_special_tokens=False) == " Hi 日本!</s> no</s>"
    ((row, answers),) = packed(tmp_path, model, UNMARKED, [CHAT[1:3]], end="<|im_end|>")
    assert decode(row, skip_special_tokens=False).endswith("!\n<|im_end|>\n")


def test_the_template_lies_beside_the_tokenizer(tmp_path, model):
    want = packed(tmp_path, model, UNMARKED)
    config = json.loads((model / "tokenizer_config.json").read_text())
    shutil.copytree(model, tmp_path / "one")
    named = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": UNMARKED}]}
    (tmp_path / "one" / "tokenizer_config.json").write_text(json.dumps(config | named))
    assert packed(tmp_path, tmp_path / "one", "", template=None) == want
    assert packed(tmp_path, tmp_path / "one" / "tokenizer.json", "", template=None) == want
    (tmp_path / "one" / "chat_template.jinja").write_text(INSTRUCT)
    assert packed(tmp_path, tmp_path / "one", "", [CHAT[1:3]], template=None) == packed(tmp_path, model, INSTRUCT, [CHAT[1:3]])


def test_tools_reach_the_template(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ tools | tojson }}\n{% for m in messages %}{{ m.content }}|{% endfor %}")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": ASKED, "tools": [{"name": "<é>"}]}))
    made = pack([tmp_path / "a.jsonl"], tmp_path / "x", chat=True, template=tmp_path / "t.jinja", workers=1)
    ((row, answers),) = parts(made)
    assert bytes(row).decode() == '[{"name": "<é>"}]\n1+1?|2|\0'
    assert told(row, answers).strip("_") == "2|\0"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (FORGETFUL, "a.jsonl:1: the chat template {} renders message 3 differently depending on the messages around it"),
        (INSTRUCT, "a.jsonl:1: the chat template {} fails: only user and assistant speak"),
        ("{% for %}", "the chat template {} is not Jinja"),
        ("{{ strftime_now('%Y') }}", "a.jsonl:1: the chat template {} fails: 'strftime_now' is undefined"),
        ("{{ messages.append(1) }}", "a.jsonl:1: the chat template {} fails:"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}", "marks no answer with {{% generation %}}"),
    ],
)
def test_a_template_that_does_not_do(tmp_path, model, template, sentence):
    with pytest.raises(FullshardError) as caught:
        packed(tmp_path, model, template, [CHAT])
    assert sentence.format(tmp_path / "template.jinja") in str(caught.value)
    assert not (tmp_path / "x2").exists()


def test_a_tokenizer_without_a_template(tmp_path, model):
    with pytest.raises(FullshardError, match=r"has no chat template .* give one with --template"):
        packed(tmp_path, model, "", template=None)
    with pytest.raises(FullshardError, match=r"there is no chat template nowhere\.jinja"):
        packed(tmp_path, model, "", template="nowhere.jinja")
