import contextlib
import os
import pickle
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calgp.data.pickles import read_pickle
from calgp.errors import CalgpError

X = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
CONTENT = {"batch_label": "training batch 1 of 5", "labels": [0, 3, 300, 70000], "data": X, "files": ("a", b"b", None)}


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_python_3_writes_is_read(protocol):
    content = read_pickle(pickle.dumps(CONTENT, protocol))
    assert np.array_equal(content.pop("data"), X)
    assert content == {key: value for key, value in CONTENT.items() if key != "data"}


def test_a_fortran_ordered_array_keeps_its_values():
    content = read_pickle(pickle.dumps({"data": np.asfortranarray(X)}, 2))
    assert np.array_equal(content["data"], X)


def test_keys_in_bytes_become_text():
    assert read_pickle(pickle.dumps({b"labels": [1]}, 3)) == {"labels": [1]}


class Evil:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_runs_nothing(protocol, tmp_path):
    target = tmp_path / "touched"
    for evil in (Evil(os.system, f"touch {target}"), Evil(os.mkdir, str(target)), Evil(eval, f"open({str(target)!r})")):
        with pytest.raises(CalgpError):
            read_pickle(pickle.dumps({"data": evil}, protocol))
    assert not target.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # protocol 0
        b"\x80\x02cnumpy\nload\n.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.",
        b"\x80\x02}(K\x01K\x02u.",  # a key that is a number
        b"\x80\x02]q\x00h\x00a.",  # a list in itself, and no dict
        b"\x80\x02(.",
        b"\x80\x02u.",
        b"\x80\x02h\x07.",
        b"\x80\x02.",
        b"",
        b"\x80\x02P1\n.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension
    ],
)
def test_other_pickles_are_refused(data):
    with pytest.raises(CalgpError):
        read_pickle(data)


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros(3, np.int8), np.array([None]), np.zeros(2, ">u2")])
def test_arrays_of_other_types_are_refused(array):
    with pytest.raises(CalgpError, match="uint8"):
        read_pickle(pickle.dumps({"data": array}, 2))


def test_a_small_pickle_cannot_unfold_to_a_large_one():
    text = b"X" + (1000).to_bytes(4, "little") + b"a" * 1000
    start = b"\x80\x02(c_codecs\nencode\nq\x00" + text + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    with pytest.raises(CalgpError, match="more than its own size"):
        read_pickle(start + b"h\x00h\x01h\x02\x86R" * 10000 + b"t.")


def test_nested_keys_are_refused_before_they_are_walked():
    deep = b"\x80\x02}q\x01)q\x00" + b"h\x00h\x00\x86q\x00" * 200  # 2²⁰⁰ leaves
    for rest in (b"h\x01h\x00K\x01s.", b"h\x01(h\x00K\x01u.", b"h\x00h\x00\x93."):
        with pytest.raises(CalgpError, match="text expected"):
            read_pickle(deep + rest)


@pytest.mark.parametrize("protocol", [2, 4])
def test_damage_is_refused_or_read_and_nothing_else(protocol):
    small = pickle.dumps({"labels": [1, 2], "data": X[:, :16].copy(), "names": ["a", "b"]}, protocol)
    chance = random.Random(0)  # noqa: S311
    for _ in range(3000):
        broken = bytearray(small[: chance.randrange(len(small) + 1)] if chance.random() < 0.3 else small)
        for _ in range(chance.randrange(1, 4)):
            if broken:
                broken[chance.randrange(len(broken))] = chance.randrange(256)
        with contextlib.suppress(CalgpError):
            assert isinstance(read_pickle(bytes(broken)), dict)


@pytest.mark.parametrize("opcodes", [b"}", b"]\x94", b"(", b"K\x01\x94"], ids=["tables", "lists", "marks", "numbers"])
def test_a_pickle_of_countless_objects_is_refused(opcodes, monkeypatch):
    """A byte makes an object of a hundred: what may be made is counted."""
    monkeypatch.setattr("calgp.data.pickles.MAX_OPCODES", 1000)
    with pytest.raises(CalgpError, match="more than 1000 opcodes"):
        read_pickle(b"\x80\x04" + opcodes * 1001 + b".")


def test_a_place_in_the_memo_takes_no_memory():
    """Python's own unpickler takes 16 bytes for each place before it: 512 MB for this one."""
    tracemalloc.start()
    with pytest.raises(CalgpError, match="instead of a dict"):
        read_pickle(b"\x80\x02Nr\x00\x00\x00\x02.")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


PIECES = st.sampled_from([
    b"\x80\x02", b"}", b"]", b")", b"(", b"K\x05", b"X\x01\x00\x00\x00a", b"U\x02u1", b"q\x00", b"h\x00", b"\x94", b"t",
    b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u", b"R", b"b", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"N",
    b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n", b"X\x06\x00\x00\x00latin1", b"C\x02ab", b"\x93",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=40))
def test_any_opcodes_are_a_table_or_refused(pieces):
    with contextlib.suppress(CalgpError):
        assert isinstance(read_pickle(b"".join(pieces) + b"."), dict)
