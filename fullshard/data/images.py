"""Images: a folder with a sub-folder for each class, and decoding one to the array that a model takes."""

import hashlib
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fullshard.base.errors import FullshardError, first_line
from fullshard.base.reading import is_directory, is_plain_file, parse_json, read_text
from fullshard.data.sources import Record

ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
Resize = Literal["crop", "stretch", "none"]
HALF = (0.5, 0.5, 0.5)


# -- a folder of images ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ImageFolder:
    """`FOLDER/CLASS/image.png`. Classes are sorted by name; samples by class, then by path."""

    path: str
    classes: tuple[str, ...]
    files: tuple[tuple[str, int], ...]  # path within the folder, class

    names = ("image", "label")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> Record:
        name, label = self.files[i]
        return {"image": str(Path(self.path, name)), "label": label}

    def place(self, i: int) -> str:
        return str(Path(self.path, self.files[i][0]))

    @cached_property
    def identity(self) -> str:
        """A short digest of the names of all files."""
        return hashlib.sha256(repr((self.classes, self.files)).encode()).hexdigest()[:16]


def open_image_folder(path: str, classes: tuple[str, ...] | None = None) -> ImageFolder:
    """List a folder of images. `classes`: those of the training data, for held-out images."""
    folders = sorted(p.name for p in Path(path).iterdir() if is_directory(p) and not p.name.startswith("."))
    if not folders:
        raise FullshardError(f"{path} has no sub-folders; give each class of images one, as in {path}/cat/1.png")
    known = classes if classes is not None else tuple(folders)
    if other := [name for name in folders if name not in known]:
        raise FullshardError(f"{path} has the class {other[0]!r}, which the training data has not; remove it, or train on it too")
    files = []
    for name in folders:
        inside = list(Path(path, name).iterdir())
        images = sorted(f"{name}/{p.name}" for p in inside if p.suffix.lower() in ENDINGS and is_plain_file(p))
        if not images and any(is_directory(p) for p in inside):
            raise FullshardError(f"{path}/{name} holds folders, not images; write the path of one of them, or move the images up")
        if not images:
            raise FullshardError(f"{path}/{name} has no images ({', '.join(sorted(ENDINGS))}); remove the folder, or add some")
        files += [(file, known.index(name)) for file in images]
    return ImageFolder(path, known, tuple(files))


# -- one image -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decode:
    """From a file, bytes or a picture to `3 × size × size` numbers in float32.

    `crop` resizes the shorter side and cuts the middle out; `stretch` resizes both sides; `none` keeps the size. Values
    become (v / 255 − mean) / std.
    """

    size: int | None
    resize: Resize = "crop"
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    beside: str = "."  # the directory that relative paths start from

    def __call__(self, value: Any, place: str) -> NDArray[np.float32]:
        pixels = np.asarray(self._resized(_picture(value, self.beside, place)), np.float32)  # height × width × 3
        if self.size is not None and pixels.shape[:2] != (self.size, self.size):
            shown = f"{pixels.shape[0]} × {pixels.shape[1]} pixels, the model takes {self.size} × {self.size}"
            raise FullshardError(f"{place} has {shown}; write data.resize = 'crop' or 'stretch'")
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return np.ascontiguousarray(((pixels / np.float32(255) - mean) / std).transpose(2, 0, 1))

    def _resized(self, picture: Any) -> Any:
        size = self.size
        if self.resize == "none" or size is None:
            return picture
        if self.resize == "stretch":
            return picture.resize((size, size), BILINEAR)
        scale = size / min(picture.size)
        width, height = (max(size, round(side * scale)) for side in picture.size)
        left, top = (width - size) // 2, (height - size) // 2
        return picture.resize((width, height), BILINEAR).crop((left, top, left + size, top + size))


BILINEAR = 2  # PIL.Image.Resampling.BILINEAR


def _picture(value: Any, beside: str, place: str) -> Any:
    """Open an image: a path, bytes, `{"bytes", "path"}` as `datasets` stores them, or a PIL image."""
    try:
        from PIL import Image
    except ImportError:
        raise FullshardError("images need pillow: pip install 'fullshard[data]'") from None
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if hasattr(value, "convert"):
        return value.convert("RGB")
    if not isinstance(value, str | bytes):
        raise FullshardError(f"{place} has no image, but {value!r:.60}; remove the row, or give it one")
    file = io.BytesIO(value) if isinstance(value, bytes) else Path(beside, value)
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise FullshardError(f"{place}: there is no image {file}; add it, or remove the row") from None
    except Exception as error:  # PIL raises many kinds for damaged files
        raise FullshardError(f"{place} is not an image that can be read: {first_line(error)}; remove it") from None


def processor_of(model_dir: str) -> tuple[int | None, tuple[float, ...], tuple[float, ...]]:
    """Size, mean and std of a Hugging Face directory's preprocessor_config.json, or (None, halves) without one."""
    path = Path(model_dir, "preprocessor_config.json")
    config = parse_json(read_text(path, "preprocessor config"), str(path)) if path.is_file() else {}
    if not isinstance(config, dict):
        raise FullshardError(f"{path} is no preprocessor config: it is not a JSON object")
    size = config.get("crop_size") or config.get("size")
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge")
    mean, std = (_triple(config.get(key)) for key in ("image_mean", "image_std"))
    return size if isinstance(size, int) else None, mean, std


def _triple(given: Any) -> tuple[float, ...]:
    usable = isinstance(given, list) and len(given) == 3 and all(isinstance(v, int | float) for v in given)
    return tuple(float(v) for v in given) if usable else HALF
