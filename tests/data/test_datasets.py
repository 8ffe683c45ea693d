import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from calgp.data import from_dataset
from calgp.errors import CalgpError

X = torch.randint(0, 256, (10, 3, 6, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
Y = torch.arange(10) % 3


class Pairs(Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, Y.tolist(), strict=True)


def one(image, label=0):
    return from_dataset(Pairs([(image, label)])).x


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(X, Y),
        TensorDataset(X.float() / 255, Y),
        DataLoader(TensorDataset(X, Y), batch_size=4),
        DataLoader(TensorDataset(X.double() / 255, Y), batch_size=3),
        DataLoader(TensorDataset(X, Y), batch_size=None),
        Pairs([(x.permute(1, 2, 0).numpy(), int(y)) for x, y in zip(X, Y, strict=True)]),
        Pairs([(x.numpy(), np.int64(y)) for x, y in zip(X, Y, strict=True)]),
        Pairs([[Image.fromarray(x.permute(1, 2, 0).numpy()), y.reshape(1)] for x, y in zip(X, Y, strict=True)]),
        Stream(),
    ],
)
def test_the_same_images_come_out_of_every_kind_of_data_set(dataset):
    images = from_dataset(dataset)
    assert torch.equal(images.x, X) and torch.equal(images.y, Y)
    assert images.classes == ("0", "1", "2") and images.rows.tolist() == list(range(10))


def test_grey_images_need_no_channel():
    assert one(X[0, 0]).shape == (1, 1, 6, 5)
    assert one(X[0, 0].numpy()).shape == (1, 1, 6, 5)
    assert torch.equal(one(Image.fromarray(X[0, 0].numpy()))[0, 0], X[0, 0])


def test_class_names_are_given_or_the_data_sets_own():
    dataset = Pairs([(X[0], 0), (X[1], 1)])
    dataset.classes = ["cat", "dog"]
    assert from_dataset(dataset).classes == ("cat", "dog")
    assert from_dataset(DataLoader(dataset)).classes == ("cat", "dog")
    assert from_dataset(dataset, ["a", "b", "c"]).classes == ("a", "b", "c")
    with pytest.raises(CalgpError, match="must be from 0 to 0, as there are 1 classes"):
        from_dataset(dataset, ["a"])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(X[0].float() / 255 - 0.5, 0)], "leave out normalisation"),
        ([(X[0].float(), 0)], "divide 0 … 255 by 255"),
        ([(torch.full((1, 2, 2), float("nan")), 0)], "from nan"),
        ([(X[0].long(), 0)], "must be uint8"),
        ([(X[0], 0.5)], "one integer"),
        ([(X[0], torch.tensor([0, 1]))], "one integer"),
        ([(X[0], True)], "one integer"),
        ([(X[0], -1)], "from -1"),
        ([(X[0], 0), (X[1, :, :4], 1)], "must have the shape of image 0"),
        ([(X[0].numpy()[:, :, :3], 0)], "channels either first or last"),
        ([(X, 0)], r"must be \[C, H, W\]"),
        ([("cat.png", 0)], "of type str"),
        ([(X[0], 0, 0)], r"must be a pair \(image, label\)"),
        ([X[0]], r"must be a pair \(image, label\)"),
        ([], "empty"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(pairs, message):
    with pytest.raises(CalgpError, match=message):
        from_dataset(Pairs(pairs))


def test_something_else_is_no_data_set():
    with pytest.raises(CalgpError, match="data set of type int"):
        from_dataset(3)  # type: ignore[arg-type]
