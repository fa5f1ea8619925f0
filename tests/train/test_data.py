"""Data: read from made-up files in the standard layouts, shared fairly, and the same every time."""

import gzip
import inspect
import pickle
import random
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire_lab.train import data
from gradwire_lab.train.data.augment import Augment
from gradwire_lab.train.data.imagefolder import FolderLoader, crop, folder_evaluation
from gradwire_lab.train.data.images import ImageLoader, ImageTask, evaluation
from gradwire_lab.train.data.partition import columns, shards
from gradwire_lab.train.data.sequences import IGNORED, ColumnLoader, WindowLoader, reading
from gradwire_lab.train.data.text import TextTask, paragraphs, thirds

LOOSE = {"strict": False}


def rows(n: int, seed: int) -> tuple[np.ndarray, list[int]]:
    dice = np.random.default_rng(seed)
    return dice.integers(0, 256, (n, 3072), dtype=np.uint8), dice.integers(0, 10, n).tolist()


class Python2Pickler(pickle._Pickler):
    """Writes bytes as the strings of Python 2, and names NumPy as it was then: what the official batches look like."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, text: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(text)) + text)
        self.memoize(text)

    dispatch[bytes] = save_string


def write_batch(path: Path, content: dict[bytes, object]) -> None:
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)
    path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def write_cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i in range(1, 6):
        pixels, labels = rows(4, i)
        write_batch(folder / f"data_batch_{i}", {b"data": pixels, b"labels": labels})
    pixels, labels = rows(3, 6)
    write_batch(folder / "test_batch", {b"data": pixels, b"labels": labels})


def test_cifar10_of_the_python_version(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    task = data.load("cifar10", tmp_path, LOOSE)
    assert isinstance(task, ImageTask)
    pixels, labels = rows(4, 2)
    assert task.train.pixels.shape == (20, 3, 32, 32) and task.train.pixels.dtype == torch.uint8
    assert np.array_equal(task.train.pixels[4:8].reshape(4, -1), pixels)
    assert task.train.labels[4:8].tolist() == labels
    assert len(task.test) == 3 and task.facts == {"classes": 10, "channels": 3, "size": 32}


def test_cifar10_of_the_binary_version_is_the_same(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "a")
    folder = tmp_path / "b" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for i in range(1, 7):
        pixels, labels = rows(4 if i < 6 else 3, i)
        name = f"data_batch_{i}.bin" if i < 6 else "test_batch.bin"
        np.concatenate((np.array(labels, np.uint8)[:, None], pixels), 1).tofile(folder / name)
    a, b = (data.load("cifar10", tmp_path / part, LOOSE) for part in "ab")
    assert torch.equal(a.train.pixels, b.train.pixels) and torch.equal(a.test.labels, b.test.labels)
    (folder / "test_batch.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match="4 bytes, which make no whole number of images"):
        data.load("cifar10", tmp_path / "b", LOOSE)


def test_cifar100_reads_the_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, seed in (("train", 1), ("test", 2)):
        pixels, labels = rows(4, seed)
        fine = [90 + label for label in labels]
        write_batch(folder / name, {b"data": pixels, b"fine_labels": fine, b"coarse_labels": labels})
    task = data.load("cifar100", tmp_path, LOOSE)
    assert task.classes == 100 and task.train.labels.min() >= 90


def test_files_that_are_not_the_official_ones_are_refused(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    with pytest.raises(ValueError, match="data_batch_1 is not the official file: its MD5"):
        data.load("cifar10", tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(ValueError, match=r"test_batch is missing; unpack cifar-10-python\.tar\.gz"):
        data.load("cifar10", tmp_path, LOOSE)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_is_not_executed(tmp_path: Path, protocol: int) -> None:
    write_cifar10(tmp_path)
    mark = tmp_path / "mark"
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    batch.write_bytes(pickle.dumps({"data": Bomb(mark), "labels": []}, protocol=protocol))
    with pytest.raises(ValueError, match="more than plain arrays, or is damaged: it names "):
        data.load("cifar10", tmp_path, LOOSE)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps([1]), pickle.dumps({"data": np.zeros((2, 3072))}, 4)], ids=str
)
def test_a_damaged_pickle_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_3 .* Download it again"):
        data.load("cifar10", tmp_path, LOOSE)


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">I{values.ndim}I", 0x800 + values.ndim, *values.shape) + values.tobytes()


def write_mnist(root: Path) -> Path:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part, n in (("train", 6), ("t10k", 2)):
        images = np.arange(n * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(n, 28, 28)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(n, dtype=np.uint8))))
    return folder


def test_idx_files_zipped_or_not(tmp_path: Path) -> None:
    folder = write_mnist(tmp_path)
    zipped = data.load("mnist", tmp_path, LOOSE)
    for path in list(folder.iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = data.load("mnist", tmp_path, LOOSE)
    assert zipped.train.pixels.shape == (6, 1, 28, 28) and zipped.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(zipped.train.pixels, plain.train.pixels)
    with pytest.raises(ValueError, match="where 60000 of both belong"):
        data.load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"12", "is damaged"),
        (gzip.compress(b"no idx", mtime=0), "is not an idx file"),
        (gzip.compress(idx(np.zeros((2, 3), np.uint8))[:-1], mtime=0), r"announces \(2, 3\) values but holds 5"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, content: bytes, sentence: str) -> None:
    folder = write_mnist(tmp_path)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        data.load("mnist", tmp_path, LOOSE)


def test_digits_need_no_folder() -> None:
    task = data.load("digits")
    assert len(task.train) == 1200 and len(task.test) == 597
    assert task.train.pixels.max() == 16
    assert torch.equal(task.train.labels, data.load("digits").train.labels)


@pytest.mark.parametrize(
    ("name", "archive", "place"),
    [
        ("cifar10", "cifar-10-python.tar.gz", "cifar-10-batches-py"),
        ("cifar100", "cifar-100-python.tar.gz", "cifar-100-python"),
        ("mnist", "train-images-idx3-ubyte.gz", "MNIST"),
        ("fashion-mnist", "train-images-idx3-ubyte.gz", "FashionMNIST"),
        ("ptb", "simple-examples.tgz", "ptb"),
        ("wikitext-2", "wikitext-2-v1.zip", "wikitext-2"),
    ],
)
def test_a_missing_set_says_what_to_download_and_where_to_put_it(
    tmp_path: Path, name: str, archive: str, place: str
) -> None:
    with pytest.raises(ValueError, match="is not there: download") as caught:
        data.load(name, tmp_path)
    assert archive in str(caught.value) and str(tmp_path / place) in str(caught.value)
    with pytest.raises(ValueError, match="pass --data DIR"):
        data.load(name)


def test_wrong_names_are_met_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        data.load("cifar-10")
    with pytest.raises(ValueError, match="did you mean 'strict'"):
        data.load("ptb", None, {"stric": False})


def write_ptb(root: Path) -> None:
    (root / "ptb").mkdir(parents=True)
    for split, content in (("train", " a b <unk> \n b c \n"), ("valid", " c a \n"), ("test", " a d \n\n a \n")):
        (root / "ptb" / f"ptb.{split}.txt").write_text(content)


def test_words_end_their_lines_with_eos(tmp_path: Path) -> None:
    write_ptb(tmp_path)
    task = data.load("ptb", tmp_path, LOOSE)
    assert isinstance(task, TextTask)
    assert task.vocab == ("a", "b", "<unk>", "<eos>", "c")
    assert task.train.tolist() == [0, 1, 2, 3, 1, 4, 3]
    assert task.test.tolist() == [0, 2, 3, 3, 0, 3]  # d was never seen
    with pytest.raises(ValueError, match=r"\(7, 3, 6\) tokens and 5 words, not \(929589, 73760, 82430\) and 10000"):
        data.load("ptb", tmp_path)


def test_what_is_text() -> None:
    makers = {name: inspect.signature(maker).return_annotation for name, maker in data.TASKS.items()}
    assert {name for name, made in makers.items() if made is TextTask} == {*data.TEXTS}


def test_any_text_file(tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text("".join(f"line {i}, said she\n" for i in range(100)))
    task = data.load("text", tmp_path, {"file": "tale.txt"})
    assert task.name == "tale" and set(task.vocab) == {"line", ",", "said", "she", "<eos>", "<unk>"}
    assert len(task.train) == 91 * 6  # as many lines begin in the first nine tenths
    by_byte = data.load("text", tmp_path, {"file": "tale.txt", "level": "byte"})
    assert bytes(by_byte.train[:18].tolist()) == b"line 0, said she\nl"
    with pytest.raises(ValueError, match="there is no text"):
        data.load("text", tmp_path, {"file": "other.txt"})
    for level in ("word", "byte"):
        (tmp_path / "empty.txt").write_text("")
        with pytest.raises(ValueError, match=r"empty\.txt holds nothing .* --set data\.options\.file=FILE"):
            data.load("text", tmp_path, {"file": "empty.txt", "level": level})
    with pytest.raises(ValueError, match="choose 'word' or 'byte'"):
        data.load("text", tmp_path, {"file": "tale.txt", "level": "char"})
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} a a")
    three = data.load("text", tmp_path, {"file": "."})
    assert [three.vocab[i] for i in three.test.tolist()] == ["<unk>", "a", "a", "<unk>"]


def test_pydoc_teaches_nothing_that_it_tests() -> None:
    pieces = paragraphs()
    assert all(count == 1 for count in Counter(pieces).values())
    parts = thirds(pieces)
    assert "".join(parts) == "".join(pieces)
    task = data.load("pydoc")
    assert len(task.vocab) == 256 and bytes(task.train[:200].tolist()).decode() in parts[0]
    assert len(task.train) > 15 * len(task.test) > 100_000
    words = data.load("pydoc", None, {"level": "word"})
    assert {"<eos>", "<unk>", "class", "("} < set(words.vocab)


@pytest.mark.parametrize("kind", ["shuffled", "fixed", "sorted"])
@pytest.mark.parametrize(("n", "world"), [(12, 1), (103, 4), (8, 8)])
def test_shards_are_disjoint_and_cover_everything(kind: str, n: int, world: int) -> None:
    labels = torch.arange(n).flip(0) % 5
    for epoch in (0, 1):
        parts = shards(n, world, 3, epoch, kind, labels)
        assert len(parts) == world
        assert sorted(torch.cat(parts).tolist()) == list(range(n))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_shards_follow_seed_and_epoch() -> None:
    labels = torch.arange(1000) % 10
    for kind in ("shuffled", "fixed", "sorted"):
        first, again, later, other = (
            shards(1000, 4, s, e, kind, labels)[1] for s, e in ((1, 0), (1, 0), (1, 1), (2, 0))
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, later) and not torch.equal(first, other)
        assert (set(first.tolist()) == set(later.tolist())) == (kind != "shuffled")


def test_sorted_shards_hold_few_classes() -> None:
    labels = torch.randint(10, (1000,), generator=torch.Generator().manual_seed(0))
    parts = shards(1000, 5, 0, 0, "sorted", labels)
    assert all(len(labels[part].unique()) <= 4 for part in parts)
    assert all(len(labels[part].unique()) == 10 for part in shards(1000, 5, 0, 0, "fixed"))
    with pytest.raises(ValueError, match="needs labels to sort by"):
        shards(1000, 5, 0, 0, "sorted")
    with pytest.raises(ValueError, match="choose among shuffled, fixed, sorted"):
        shards(1000, 5, 0, 0, "random")
    with pytest.raises(ValueError, match="3 examples are not enough for 4 ranks"):
        shards(3, 4, 0, 0)


IMAGES = torch.randint(1, 256, (40, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def augmented(augment: Augment, generator: torch.Generator) -> Tensor:
    moves = augment.draw(*IMAGES[:, 0].shape, generator)
    return augment.cut(augment.take(IMAGES, torch.arange(len(IMAGES)), moves), moves)


@pytest.mark.parametrize("border", ["zero", "reflect"])
def test_a_crop_is_a_window_of_the_padded_image(border: str) -> None:
    augment = Augment(crop=4, border=border)
    moves = augment.draw(40, 12, 10, dice())
    taken = augment.take(IMAGES, torch.arange(40), moves)
    mode = "constant" if border == "zero" else "reflect"
    padded = torch.nn.functional.pad(IMAGES.float(), (4, 4, 4, 4), mode=mode).byte()
    for image, window, (down, right, *_) in zip(padded, taken, moves.tolist(), strict=True):
        assert torch.equal(window, image[:, down : down + 12, right : right + 10])
    assert moves[:, :2].min() == 0 and moves[:, :2].max() == 8


def test_a_flip_mirrors_about_half_the_images() -> None:
    flipped = augmented(Augment(flip=True), dice())
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, IMAGES, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, IMAGES, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 10 < sum(mirrored) < 30


def test_a_cutout_blanks_one_square() -> None:
    cut = augmented(Augment(cutout=4), dice())
    hidden = cut == 0
    assert torch.equal(hidden.sum((1, 2, 3)), torch.full((40,), 3 * 16))
    assert torch.equal(cut[~hidden], IMAGES[~hidden])
    assert all(rows.any(-1).sum() == 4 for rows in hidden[:, 0])


def test_augmentation_follows_its_generator_and_leaves_its_input() -> None:
    augment, before = Augment(4, "reflect", True, 3), IMAGES.clone()
    first, again, other = (augmented(augment, dice(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(IMAGES, before)
    assert torch.equal(augmented(Augment(), dice()), IMAGES)
    with pytest.raises(ValueError, match="choose 'zero' or 'reflect'"):
        Augment(border="mirror")
    with pytest.raises(ValueError, match="too large for images of 12x10"):
        augmented(Augment(cutout=11), dice())


def loader(world: int, ranks: tuple[int, ...], **options: object) -> ImageLoader:
    return ImageLoader(data.load("digits"), 32, world, ranks, seed=5, augment=Augment(1, "zero", True, 2), **options)


def test_simulated_ranks_get_what_real_ones_get() -> None:
    together = list(loader(4, (0, 1, 2, 3)).epoch(2))
    alone = [list(loader(4, (rank,)).epoch(2)) for rank in range(4)]
    assert len(together) == loader(4, (0,)).steps == 9
    for step, (x, y) in enumerate(together):
        assert x.shape == (128, 1, 8, 8) and x.dtype == torch.float32
        assert torch.equal(x, torch.cat([part[step].inputs for part in alone]))
        assert torch.equal(y, torch.cat([part[step].targets for part in alone]))


def test_an_epoch_can_start_in_the_middle_and_differs_from_the_next() -> None:
    whole, rest, later = (list(loader(2, (1,)).epoch(epoch, start)) for epoch, start in ((0, 0), (0, 15), (1, 0)))
    assert len(whole) == 18 and len(rest) == 3
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(whole[15:], rest, strict=True))
    assert not torch.equal(whole[0].targets, later[0].targets)
    kept = [next(iter(loader(2, (1,), reshuffle=False).epoch(epoch))) for epoch in (0, 1)]
    assert torch.equal(kept[0].targets, kept[1].targets)


def test_ranks_see_different_images() -> None:
    order = loader(4, (0, 1, 2, 3)).order(0)
    assert order.shape == (4, 288) and len(order.unique()) == order.numel()
    with pytest.raises(
        ValueError, match=r"each of 100 ranks has 12 images, which fill no batch of 32; lower train\.batch"
    ):
        loader(100, (0,))


def test_images_grow_by_epoch() -> None:
    growing = loader(2, (0,), sizes=((0, 4), (2, 6), (3, 8)))
    sides = [next(growing.epoch(epoch)).inputs.shape[2:] for epoch in range(5)]
    assert sides == [(4, 4), (4, 4), (6, 6), (8, 8), (8, 8)]
    small, full = next(growing.epoch(0)), next(loader(2, (0,)).epoch(0))
    assert torch.equal(small.targets, full.targets)  # the same images, each pixel a weighted mean of its neighbors
    torch.testing.assert_close(small.inputs.mean(), full.inputs.mean(), rtol=0.1, atol=0.0)
    assert torch.equal(next(growing.epoch(4)).inputs, next(loader(2, (0,)).epoch(4)).inputs)


def test_evaluation_sees_each_image_once() -> None:
    task = data.load("digits")
    seen = [batch for rank in range(4) for batch in evaluation(task, 100, rank, 4)]
    assert torch.equal(torch.cat([batch.targets for batch in seen]), task.test.labels)
    assert torch.allclose(torch.cat([batch.inputs for batch in seen]) * 16, task.test.pixels.float())


def test_columns_are_contiguous() -> None:
    inputs, targets = columns(torch.arange(23), 4)
    assert inputs.tolist() == [list(range(5 * i, 5 * i + 5)) for i in range(4)]
    assert torch.equal(targets, inputs + 1)
    with pytest.raises(ValueError, match=r"too short for 30 columns.*lower train\.batch"):
        columns(torch.arange(23), 30)


def test_a_recurrent_rank_reads_its_columns_on_and_on() -> None:
    text = torch.arange(100)
    both = list(ColumnLoader(text, batch=2, bptt=7, world=2, ranks=(0, 1)).epoch(0))
    second = list(ColumnLoader(text, batch=2, bptt=7, world=2, ranks=(1,)).epoch(3))
    assert [batch.inputs.shape[1] for batch in both] == [7, 7, 7, 3]
    assert torch.cat([batch.inputs for batch in second], 1).tolist() == [list(range(48, 72)), list(range(72, 96))]
    assert all(torch.equal(a.inputs[2:], b.inputs) for a, b in zip(both, second, strict=True))


def test_windows_do_not_overlap_and_shift_every_epoch() -> None:
    text = torch.arange(1000)
    first, again, later = (windows(WindowLoader(text, 4, 10, 2, (0, 1), seed=1), epoch) for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first % 10, later % 10)
    assert first.shape == (96, 10) and len(first.unique()) == first.numel()
    assert torch.equal(first - first[:, :1], torch.arange(10).expand(96, 10))
    alone = windows(WindowLoader(text, 4, 10, 2, (1,), seed=1), 0)
    assert torch.equal(first.view(12, 2, 4, 10)[:, 1].flatten(0, 1), alone)
    with pytest.raises(ValueError, match="too few for 2 ranks"):
        WindowLoader(text, 4, 200, 2)
    with pytest.raises(ValueError, match=r"are 0 windows of 200.*lower data\.length"):
        WindowLoader(text[:3], 4, 200, 2)


def windows(source: WindowLoader, epoch: int) -> Tensor:
    batches = list(source.epoch(epoch))
    assert len(batches) == source.steps
    assert all(torch.equal(batch.targets, batch.inputs + 1) for batch in batches)
    return torch.cat([batch.inputs for batch in batches])


@pytest.mark.parametrize("world", [1, 3, 8])
def test_a_text_is_evaluated_to_the_last_token_by_any_number_of_ranks(world: int) -> None:
    text = torch.arange(101) + 1
    batches = [batch for rank in range(world) for batch in reading(text, 6, 5, rank, world)]
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    assert sorted(targets[targets != IGNORED].tolist()) == list(range(2, 102))
    for x, y in batches:
        assert torch.equal(x[y != IGNORED] + 1, y[y != IGNORED])


def test_image_files_need_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        data.load("imagenet", tmp_path)


def test_a_random_crop_stays_inside() -> None:
    boxes = [crop(60, 40, random.Random(i)) for i in range(200)]
    assert all(0 <= left < right <= 60 and 0 <= top < bottom <= 40 for left, top, right, bottom in boxes)
    areas = [(right - left) * (bottom - top) / 2400 for left, top, right, bottom in boxes]
    assert min(areas) < 0.15 and max(areas) > 0.7
    left, top, right, bottom = crop(1000, 10, random.Random(0))
    assert right - left == pytest.approx(40 / 3) and (top, bottom) == (0, 10)


def test_folders_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "imagenet" / part / name
            folder.mkdir(parents=True)
            for i in range(4):
                image.new("RGB", (40, 30), (200 * label, 10 * i, 200)).save(folder / f"{i}.png")
    task = data.load("imagenet", tmp_path)
    assert task.classes == 2 and task.test.labels.tolist() == [0] * 4 + [1] * 4
    both = list(FolderLoader(task, 2, 2, (0, 1), size=16, threads=2).epoch(1))
    alone = list(FolderLoader(task, 2, 2, (1,), size=16, threads=2).epoch(1))
    assert len(both) == 2 and both[0].inputs.shape == (4, 3, 16, 16)
    assert torch.equal(both[1].inputs[2:], alone[1].inputs)
    growing = FolderLoader(task, 2, 2, (0,), size=16, threads=2, sizes=((0, 8), (1, 12)))
    assert [next(growing.epoch(epoch)).inputs.shape[-1] for epoch in (0, 1)] == [8, 12]
    red = torch.cat([batch.inputs[:, 0, 0, 0] for batch in both])
    assert torch.equal(red > 0, torch.cat([batch.targets for batch in both]) == 1)
    tested = list(folder_evaluation(task, 3, size=16, threads=2))
    assert torch.cat([batch.targets for batch in tested]).tolist() == [0] * 4 + [1] * 4
    (tmp_path / "imagenet" / "val" / "dog" / "0.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"0\.png is damaged"):
        list(folder_evaluation(task, 3, size=16, threads=2))
