"""Opens the data of a recipe, checks it against the model, and makes the batches of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from fullshard.base.callables import is_callable_name, load_callable
from fullshard.base.errors import FullshardError, first_line
from fullshard.base.reading import is_directory, is_plain_file
from fullshard.data import TokenFile
from fullshard.data.collate import Collate, PadRows, stack_rows
from fullshard.data.images import Decode, ImageFolder, open_image_folder, processor_of
from fullshard.data.objective_samples import (
    KeepSample,
    LabelImage,
    Labels,
    LabelText,
    MakeSample,
    MaskText,
    MaskTokens,
    PairTexts,
)
from fullshard.data.sample_batches import SampleRules, is_indexed
from fullshard.data.step_batches import StepBatches
from fullshard.data.tables import Columns, is_table, open_columns
from fullshard.data.text_encoder import TextEncoder, open_encoder
from fullshard.data.token_batches import IGNORED
from fullshard.data.token_rows import TokenRows
from fullshard.data.tokenizer import refuse_different, refuse_other_tokenizer, tokenizer_hash
from fullshard.data.training_data import SampleData, Share, TokenData, TrainingData
from fullshard.engine.engine import Engine
from fullshard.engine.model import ModelFacts
from fullshard.plan.plan import Plan
from fullshard.ranks.local_ranks import ranks_here
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.recipe.recipe_sections import COLUMNS, changed

ARRAYS = "return a list of samples, or an object with __len__ and __getitem__, or with __iter__"
LOOKED_AT = 100_000  # labels and paths of images that are checked before ranks start


def open_data(recipe: Recipe, model: Any, engine: Engine[Any, Any]) -> tuple[TrainingData, TrainingData | None]:
    """Open training and held-out data and check both against the model."""
    facts = engine.model.facts(model)
    if (longest := facts.longest) is not None and recipe.sequence > longest:
        raise FullshardError(f"data.sequence = {recipe.sequence} is longer than the model's {longest}; shorten it")
    given, valid = Source.of(recipe.data.source or recipe.data.path or ""), recipe.data.valid
    if recipe.data.objective == "causal" and recipe.data.source is None and given.kind != "table":
        return _open_tokens(recipe, facts)
    for key in sorted({"boundaries", "packing"} & changed(recipe.data)):
        raise FullshardError(f"data.{key} is for token files, not for {given.name}; leave it out")
    opened = _Opening(recipe, facts, engine)
    found = opened.open(given, None)
    return found, opened.open(Source.of(valid), found) if valid else None


@dataclass(frozen=True)
class Source:
    """A path or a callable by its name, and what lies there."""

    name: str
    kind: Literal["callable", "table", "tokens", "directory", "file", "nothing"]

    @classmethod
    def of(cls, name: str) -> Self:
        directory = is_directory(name)
        if is_callable_name(name) and not directory:
            return cls(name, "callable")
        if is_table(name):
            return cls(name, "table")
        if directory:
            return cls(name, "tokens" if is_plain_file(Path(name) / "index.json") else "directory")
        return cls(name, "file" if is_plain_file(name) else "nothing")


def _open_tokens(recipe: Recipe, facts: ModelFacts) -> tuple[TokenData, TokenData | None]:
    wanted, directory = recipe.data, recipe.data.path or ""
    data, valid = TokenFile(directory), TokenFile(wanted.valid) if wanted.valid else None
    for key in ("columns", "collate"):
        if getattr(wanted, key):
            raise FullshardError(f"data.{key} has no effect with token files; leave it out")
    if (vocab := facts.vocabulary) is not None and data.vocab > vocab:
        raise FullshardError(
            f"{data.path} has a vocabulary of {data.vocab}, the model one of {vocab}; use the model's own tokenizer"
        )
    if wanted.boundaries == "attention" and not facts.takes_positions:
        raise FullshardError(
            f"data.boundaries = 'attention' needs a model whose forward takes position_ids; {recipe.model.name}'s does not: "
            "write 'labels'"
        )
    if Path(recipe.model.name).is_dir():
        refuse_other_tokenizer(data, recipe.model.name)
    if valid:
        refuse_different(data, valid)
    opened = [TokenData(t, recipe.sequence, wanted.boundaries, wanted.packing) for t in (data, valid) if t is not None]
    return opened[0], opened[1] if valid else None


# -- other data ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Opening:
    """Opens data sets of one recipe."""

    recipe: Recipe
    facts: ModelFacts
    engine: Engine[Any, Any]

    def open(self, given: Source, trained: SampleData | None) -> SampleData:
        """Open what the recipe names. `trained`: the training data, for held-out data."""
        if given.kind == "callable":
            return self._called(given)
        data = self._rows(given, trained)
        classes, encoder = self._classes(data, trained), self._encoder(given)
        make = self._make(given, classes, encoder)
        rules = SampleRules(given.name, make, self._collate(make, encoder), self._remedy())
        if isinstance(data, Columns):
            data = self._picked(data)
            _refuse_labels(data, make)
        identity = data.identity if not isinstance(data, TokenRows) else TokenData(data.source, data.sequence).identity
        return SampleData(rules, identity + _encoding(encoder), data, classes=classes)

    def _rows(self, given: Source, trained: SampleData | None) -> Columns | ImageFolder | TokenRows:
        objective, name = self.recipe.data.objective, given.name
        if given.kind == "table":
            return open_columns(name)
        if given.kind in ("file", "nothing"):
            known = "a .parquet, .jsonl or .csv file, a directory of datasets' save_to_disk, or file.py:callable"
            ending = Path(name).suffix or "a file without an ending"
            what = f"cannot read {ending}" if given.kind == "file" else "there is no such path"
            raise FullshardError(f"data.path = {name!r}: {what}; write {known}")
        if objective == "image":
            return open_image_folder(name, trained.classes if trained else None)
        if objective == "masked" and given.kind == "tokens":
            return TokenRows(TokenFile(name), self.recipe.sequence)
        raise FullshardError(
            f"{name} is no data for data.objective = '{objective}'; write a .parquet, .jsonl or .csv file, or a directory of "
            "datasets' save_to_disk"
        )

    def _called(self, given: Source) -> SampleData:
        spec = given.name
        if (workers := self.recipe.data.workers) and not self.engine.traits.forks:
            raise FullshardError(
                f"data.workers = {workers} has no effect on {spec} with --engine {self.engine.name}: its ranks must not fork, "
                "and a data set of your own may not be safe in threads; leave data.workers out, or use --engine torch"
            )
        call = load_callable(spec, "a data set")

        def make() -> Any:
            try:
                return call()
            except FullshardError:
                raise
            except Exception as error:
                raise FullshardError(f"{spec} raised {type(error).__name__}: {first_line(error)}; {ARRAYS}") from error

        data = make()
        encoder = self._encoder(given)
        own = self._make(given, (), encoder)
        rules = SampleRules(spec, own, self._collate(own, encoder), self._remedy(), self.engine.trainer.seeded)
        if is_indexed(data, spec):
            return SampleData(rules, f"{spec.rpartition(':')[2]} {len(data)}{_encoding(encoder)}", data, threads=False)
        return SampleData(rules, f"{spec.rpartition(':')[2]}{_encoding(encoder)}", None, make, threads=False)

    def _classes(self, data: Any, trained: SampleData | None) -> tuple[str, ...]:
        """The names of the classes, by number; empty where labels are numbers already."""
        if trained is not None:
            return trained.classes
        if isinstance(data, ImageFolder):
            return data.classes
        if self.recipe.data.objective not in ("classify", "image"):
            return ()
        label = self.recipe.data.column("label")
        return tuple(data.pick([label]).class_names(label) or ())

    def _picked(self, data: Columns) -> Columns:
        wanted = self.recipe.data
        if wanted.objective in COLUMNS:
            return data.pick([wanted.column(part) for part in COLUMNS[wanted.objective]])
        return data.pick(list(dict.fromkeys(wanted.columns.values()))) if wanted.columns else data

    # -- samples and batches -----------------------------------------------------------------------------------

    def _make(self, given: Source, classes: tuple[str, ...], encoder: TextEncoder | None) -> MakeSample:
        wanted, seed, sequence = self.recipe.data, self.recipe.train.seed, self.recipe.sequence
        labels = Labels(wanted.column("label"), classes or None, self._class_count(classes))
        if wanted.objective == "image":
            return LabelImage(self._decode(given), wanted.column("image"), labels)
        if encoder is None:
            return KeepSample(tuple(wanted.columns.items()))
        match wanted.objective:
            case "masked" if given.kind == "tokens":
                return MaskTokens(encoder, wanted.mask, seed)
            case "masked":
                encoder.mask_id  # noqa: B018 - raises here rather than in a worker
                return MaskText(encoder, wanted.column("text"), sequence, wanted.mask, seed)
            case "seq2seq":
                target = wanted.target_sequence or sequence
                return PairTexts(encoder, wanted.column("source"), wanted.column("target"), sequence, target)
        return LabelText(encoder, wanted.column("text"), labels, sequence)

    def _collate(self, make: MakeSample, encoder: TextEncoder | None) -> Collate:
        wanted = self.recipe.data
        if wanted.collate:
            return load_callable(wanted.collate, "a batch")
        if isinstance(make, LabelImage | MaskTokens):
            return stack_rows
        if encoder is None:
            return self.engine.trainer.collate
        labels = {"masked": self.recipe.sequence, "seq2seq": wanted.target_sequence or self.recipe.sequence}
        fills = [("input_ids", encoder.pad_id, self.recipe.sequence), ("attention_mask", 0, self.recipe.sequence)]
        fills += [("labels", IGNORED, labels[wanted.objective])] if wanted.objective in labels else []
        return PadRows(tuple(fills), wanted.pad)

    def _remedy(self) -> str:
        wanted = self.recipe.data
        if wanted.objective == "image":
            return "write data.resize = 'crop' or 'stretch'"
        return "check data.collate" if wanted.collate else "make their shapes equal, or write data.collate = 'file.py:callable'"

    def _encoder(self, given: Source) -> TextEncoder | None:
        """The tokenizer of texts; None where the objective has none."""
        if self.recipe.data.objective not in ("masked", "seq2seq", "classify"):
            return None
        wanted, near = self.recipe.data.tokenizer, Path(self.recipe.model.name) / "tokenizer.json"
        if wanted is None and not is_plain_file(near):
            raise FullshardError(
                f"data.objective = '{self.recipe.data.objective}' needs a tokenizer, and {self.recipe.model.name} has none; "
                "write data.tokenizer = 'path/to/tokenizer.json', or 'bytes'"
            )
        found = open_encoder(wanted or str(near))
        if wanted is not None and is_plain_file(near) and found.identity != tokenizer_hash(near):
            raise FullshardError(f"data.tokenizer = {wanted!r} is not the model's own, {near}; leave it out")
        if given.kind == "tokens" and found.identity != (tokens := TokenFile(given.name)).tokenizer:
            raise FullshardError(f"{tokens.path} was packed with another tokenizer than {wanted or near}; pack the text again")
        vocab = self.facts.vocabulary
        if vocab is not None and found.vocab > vocab:
            raise FullshardError(f"{wanted or near} has {found.vocab} tokens, the model {vocab}; use the model's own tokenizer")
        return found

    def _class_count(self, classes: tuple[str, ...]) -> int | None:
        count = self.facts.classes
        if count is not None and len(classes) > count:
            raise FullshardError(
                f"the data has {len(classes)} classes ({', '.join(classes[:4])}, …), the model {count}; give the model as many"
            )
        return count

    def _decode(self, given: Source) -> Decode:
        wanted, own = self.recipe.data, self.facts.image_size
        size, mean, std = processor_of(self.recipe.model.name)
        if wanted.image_size and own and wanted.image_size != own:
            raise FullshardError(f"data.image_size = {wanted.image_size}, but the model takes {own} × {own} pixels; leave it out")
        size = wanted.image_size or own or size
        if size is None and wanted.resize != "none":
            raise FullshardError("the model does not say how large its images are; write data.image_size, in pixels")
        beside = "." if given.kind != "table" else given.name if is_directory(given.name) else str(Path(given.name).parent)
        return Decode(size, wanted.resize, wanted.mean or mean, wanted.std or std, beside)


def _encoding(encoder: TextEncoder | None) -> str:
    """The tokenizer's part of the identity of data."""
    return f" {encoder.identity[:16]}" if encoder else ""


# -- before ranks start ----------------------------------------------------------------------------------------


def _refuse_labels(data: Columns, make: MakeSample) -> None:
    """Raise where a label is no class of the model, or a path leads to no image."""
    if not isinstance(make, LabelText | LabelImage):
        return
    seen: set[Any] = set()
    for i, value in enumerate(data.values(make.label.column)[:LOOKED_AT]):
        if value not in seen:
            seen.add(value)
            make.label.number(value, data.place(i))
    if isinstance(make, LabelImage):
        for i, value in enumerate(data.values(make.image)[:LOOKED_AT]):
            path = value.get("path") if isinstance(value, dict) and not value.get("bytes") else value
            if isinstance(path, str) and not is_plain_file(file := Path(make.decode.beside, path)):
                raise FullshardError(f"{data.place(i)}: there is no image {file}; add it, or remove the row")


def refuse_first_batch(recipe: Recipe, plan: Plan, data: TrainingData) -> Any:
    """Make one micro-batch, so that what is wrong with the data is found before ranks start. Returns it."""
    found = data.batches(Share(plan.batch.micro_batch), seed=recipe.train.seed, shuffle=recipe.data.shuffle)
    batch = next(iter(found))[0]
    if recipe.data.objective == "causal" and not (isinstance(batch, Mapping) and {"input_ids", "labels"} <= set(batch)):
        has = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise FullshardError(
            f"a batch of {data.path} has {has}, but data.objective = 'causal' trains on input_ids and labels; write "
            "data.objective = 'custom', or name the columns that hold them in data.columns"
        )
    return batch


def largest_batch(recipe: Recipe, data: TrainingData) -> Any:
    """The first micro-batch, of the largest shape that the data's rules allow: texts are padded to the full length."""
    if isinstance(data, SampleData) and isinstance(data.rules.collate, PadRows):
        data = replace(data, rules=replace(data.rules, collate=replace(data.rules.collate, pad="full")))
    return next(iter(data.batches(Share(recipe.train.micro_batch or 1), seed=recipe.train.seed, shuffle=recipe.data.shuffle)))[0]


def batches(
    recipe: Recipe, plan: Plan, data: TrainingData, share: tuple[int, int], engine: Engine[Any, Any], *, held_out: bool = False
) -> StepBatches:
    """The batches of a share of each step's rows, loaded ahead. Of held-out data: the first `eval.batches` in the order of
    the file.

    `share`: its number, and of how many; a share may hold the rows of several devices.
    """
    wanted = recipe.data
    workers = data.workers(ranks_here()) if wanted.workers is None else wanted.workers
    loader = engine.trainer.loader(workers, wanted.prefetch, seed=recipe.train.seed, threads=data.threads)
    rank, ranks = share
    rows = plan.batch.micro_batch * plan.mesh.data // ranks
    taken = Share(rows, plan.batch.accumulate, rank, ranks, loader=loader)
    if held_out:
        taken = replace(taken, accumulate=1, last=recipe.eval.batches * plan.mesh.data * plan.batch.micro_batch)
    return data.batches(taken, seed=0 if held_out else recipe.train.seed, shuffle=wanted.shuffle and not held_out)
