"""Opens the data of a recipe, checks it against the model, and makes the batches of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from fullshard.engine.protocols import Engine
from fullshard.plan.plan import Plan
from fullshard.runs.recipe.recipe import Recipe
from fullshard.runs.recipe.recipe_sections import COLUMNS, changed

ARRAYS = "return a list of samples, or an object with __len__ and __getitem__, or with __iter__"
LOOKED_AT = 100_000  # labels and paths of images that are checked before ranks start


def open_data(recipe: Recipe, model: Any, engine: Engine[Any, Any]) -> tuple[TrainingData, TrainingData | None]:
    """Open training and held-out data and check both against the model."""
    vocab, longest = engine.limits(model)
    if longest is not None and recipe.sequence > longest:
        raise FullshardError(f"data.sequence = {recipe.sequence} is longer than the model's {longest}; shorten it")
    given, valid = recipe.data.source or recipe.data.path or "", recipe.data.valid
    if recipe.data.objective == "causal" and recipe.data.source is None and not is_table(given):
        return _open_tokens(recipe, model, engine, vocab)
    for key in sorted({"boundaries", "packing"} & changed(recipe.data)):
        raise FullshardError(f"data.{key} is for token files, not for {given}; leave it out")
    opened = _Opening(recipe, model, engine)
    found = opened.open(given, None)
    return found, opened.open(valid, found) if valid else None


def _open_tokens(recipe: Recipe, model: Any, engine: Engine[Any, Any], vocab: int | None) -> tuple[TokenData, TokenData | None]:
    wanted, directory = recipe.data, recipe.data.path or ""
    data, valid = TokenFile(directory), TokenFile(wanted.valid) if wanted.valid else None
    for key in ("columns", "collate"):
        if getattr(wanted, key):
            raise FullshardError(f"data.{key} has no effect with token files; leave it out")
    if vocab is not None and data.vocab > vocab:
        raise FullshardError(
            f"{data.path} has a vocabulary of {data.vocab}, the model one of {vocab}; use the model's own tokenizer"
        )
    if wanted.boundaries == "attention" and not engine.takes_positions(model):
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
    model: Any
    engine: Engine[Any, Any]

    def open(self, given: str, trained: SampleData | None) -> SampleData:
        """Open a path or a callable. `trained`: the training data, for held-out data."""
        if is_callable_name(given) and not is_directory(given):
            return self._called(given)
        data = self._rows(given, trained)
        classes = self._classes(data, trained)
        make = self._make(given, classes)
        rules = SampleRules(given, make, self._collate(make), self._remedy())
        if isinstance(data, Columns):
            data = self._picked(data, make)
            _refuse_labels(data, make)
        identity = data.identity if not isinstance(data, TokenRows) else TokenData(data.source, data.sequence).identity
        return SampleData(rules, identity + self._encoding(), data, classes=classes)

    def _rows(self, given: str, trained: SampleData | None) -> Columns | ImageFolder | TokenRows:
        objective, path = self.recipe.data.objective, Path(given)
        if is_table(given):
            return open_columns(given)
        if not is_directory(given):
            known = "a .parquet, .jsonl or .csv file, a directory of datasets' save_to_disk, or file.py:callable"
            what = f"cannot read {path.suffix or 'a file without an ending'}" if is_plain_file(given) else "there is no such path"
            raise FullshardError(f"data.path = {given!r}: {what}; write {known}")
        if objective == "image":
            return open_image_folder(given, trained.classes if trained else None)
        if objective == "masked" and is_plain_file(path / "index.json"):
            return TokenRows(TokenFile(given), self.recipe.sequence)
        raise FullshardError(
            f"{given} is no data for data.objective = '{objective}'; write a .parquet, .jsonl or .csv file, or a directory of "
            "datasets' save_to_disk"
        )

    def _called(self, spec: str) -> SampleData:
        if (workers := self.recipe.data.workers) and not self.engine.forks:
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
        own = self._make(spec, ())
        rules = SampleRules(spec, own, self._collate(own), self._remedy(), self.engine.seeded)
        if is_indexed(data, spec):
            return SampleData(rules, f"{spec.rpartition(':')[2]} {len(data)}{self._encoding()}", data, threads=False)
        return SampleData(rules, f"{spec.rpartition(':')[2]}{self._encoding()}", None, make, threads=False)

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

    def _picked(self, data: Columns, make: MakeSample) -> Columns:
        wanted = self.recipe.data
        if wanted.objective in COLUMNS:
            return data.pick([wanted.column(part) for part in COLUMNS[wanted.objective]])
        return data.pick(list(dict.fromkeys(wanted.columns.values()))) if wanted.columns else data

    # -- samples and batches -----------------------------------------------------------------------------------

    def _make(self, given: str, classes: tuple[str, ...]) -> MakeSample:
        wanted, seed = self.recipe.data, self.recipe.train.seed
        labels = Labels(wanted.column("label"), classes or None, self._class_count(classes))
        match wanted.objective:
            case "masked" if is_plain_file(Path(given) / "index.json"):
                return MaskTokens(self._encoder(TokenFile(given)), wanted.mask, seed)
            case "masked":
                encoder = self._encoder()
                encoder.mask_id  # noqa: B018 - raises here rather than in a worker
                return MaskText(encoder, wanted.column("text"), self.recipe.sequence, wanted.mask, seed)
            case "seq2seq":
                target = wanted.target_sequence or self.recipe.sequence
                return PairTexts(self._encoder(), wanted.column("source"), wanted.column("target"), self.recipe.sequence, target)
            case "classify":
                return LabelText(self._encoder(), wanted.column("text"), labels, self.recipe.sequence)
            case "image":
                return LabelImage(self._decode(given), wanted.column("image"), labels)
        return KeepSample(tuple(wanted.columns.items()))

    def _collate(self, make: MakeSample) -> Collate:
        wanted = self.recipe.data
        if wanted.collate:
            return load_callable(wanted.collate, "a batch")
        if isinstance(make, KeepSample):
            return self.engine.collate
        if isinstance(make, LabelImage | MaskTokens):
            return stack_rows
        labels = {"masked": self.recipe.sequence, "seq2seq": wanted.target_sequence or self.recipe.sequence}
        fills = [("input_ids", self._encoder().pad_id, self.recipe.sequence), ("attention_mask", 0, self.recipe.sequence)]
        fills += [("labels", IGNORED, labels[wanted.objective])] if wanted.objective in labels else []
        return PadRows(tuple(fills), wanted.pad)

    def _remedy(self) -> str:
        wanted = self.recipe.data
        if wanted.objective == "image":
            return "write data.resize = 'crop' or 'stretch'"
        return "check data.collate" if wanted.collate else "make their shapes equal, or write data.collate = 'file.py:callable'"

    def _encoder(self, tokens: TokenFile | None = None) -> TextEncoder:
        wanted, near = self.recipe.data.tokenizer, Path(self.recipe.model.name) / "tokenizer.json"
        if wanted is None and not is_plain_file(near):
            raise FullshardError(
                f"data.objective = '{self.recipe.data.objective}' needs a tokenizer, and {self.recipe.model.name} has none; "
                "write data.tokenizer = 'path/to/tokenizer.json', or 'bytes'"
            )
        found = open_encoder(wanted or str(near))
        if wanted is not None and is_plain_file(near) and found.identity != tokenizer_hash(near):
            raise FullshardError(f"data.tokenizer = {wanted!r} is not the model's own, {near}; leave it out")
        if tokens is not None and found.identity != tokens.tokenizer:
            raise FullshardError(f"{tokens.path} was packed with another tokenizer than {wanted or near}; pack the text again")
        vocab = self.engine.limits(self.model)[0]
        if vocab is not None and found.vocab > vocab:
            raise FullshardError(f"{wanted or near} has {found.vocab} tokens, the model {vocab}; use the model's own tokenizer")
        return found

    def _encoding(self) -> str:
        """The tokenizer's part of the identity of data."""
        texts = self.recipe.data.objective in ("masked", "seq2seq", "classify")
        return f" {self._encoder().identity[:16]}" if texts else ""

    def _class_count(self, classes: tuple[str, ...]) -> int | None:
        count = self.engine.classes_and_image_size(self.model)[0]
        if count is not None and len(classes) > count:
            raise FullshardError(
                f"the data has {len(classes)} classes ({', '.join(classes[:4])}, …), the model {count}; give the model as many"
            )
        return count

    def _decode(self, given: str) -> Decode:
        wanted, own = self.recipe.data, self.engine.classes_and_image_size(self.model)[1]
        size, mean, std = processor_of(self.recipe.model.name)
        if wanted.image_size and own and wanted.image_size != own:
            raise FullshardError(f"data.image_size = {wanted.image_size}, but the model takes {own} × {own} pixels; leave it out")
        size = wanted.image_size or own or size
        if size is None and wanted.resize != "none":
            raise FullshardError("the model does not say how large its images are; write data.image_size, in pixels")
        beside = str(Path(given).parent) if is_plain_file(given) else given if is_directory(given) else "."
        beside = "." if not is_table(given) else beside
        return Decode(size, wanted.resize, wanted.mean or mean, wanted.std or std, beside)


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
    workers = data.workers(engine.ranks_here()) if wanted.workers is None else wanted.workers
    loader = engine.loader(workers, wanted.prefetch, seed=recipe.train.seed, threads=data.threads)
    rank, ranks = share
    rows = plan.batch.micro_batch * plan.mesh.data // ranks
    taken = Share(rows, plan.batch.accumulate, rank, ranks, loader=loader)
    if held_out:
        taken = replace(taken, accumulate=1, last=recipe.eval.batches * plan.mesh.data * plan.batch.micro_batch)
    return data.batches(taken, seed=0 if held_out else recipe.train.seed, shuffle=wanted.shuffle and not held_out)
