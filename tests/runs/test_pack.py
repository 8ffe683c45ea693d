"""A packed run is the run, to the byte, or it is refused."""

import hashlib
import io
import json
import random
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from calgp import cli
from calgp.errors import CalgpError
from calgp.runs import shipped_run
from calgp.runs.folder import RunFolder
from calgp.runs.pack import MANIFEST, pack, unpack


def content(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    file = tmp_path_factory.mktemp("packed") / "run.calgp"
    pack(shipped_run(), file)
    return file


def test_what_is_unpacked_is_what_was_packed(packed, tmp_path):
    folder = unpack(packed, tmp_path / "new" / "run")
    expected = {name: each for name, each in content(shipped_run().path).items() if not name.startswith((".", "__"))}
    assert {name: each for name, each in content(folder.path).items() if not name.startswith("__")} == expected
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run"]
    assert folder.model() is not None


def test_the_same_run_makes_the_same_bytes(packed, tmp_path):
    folder = unpack(packed, tmp_path / "run")
    (folder.path / ".lock").touch()
    pack(folder, tmp_path / "again.calgp")
    assert (tmp_path / "again.calgp").read_bytes() == packed.read_bytes()


def test_it_is_a_plain_tar_file(packed):
    with tarfile.open(packed, "r:") as tar:
        names = tar.getnames()
        manifest = json.load(tar.extractfile(MANIFEST))
        for each in manifest["files"]:
            assert hashlib.sha256(tar.extractfile(each["name"]).read()).hexdigest() == each["sha256"]
    assert names == [MANIFEST, *(each["name"] for each in manifest["files"])]
    assert "run.json" in names and "model.safetensors" in names


def test_the_command_line_packs_unpacks_and_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((28, 28), np.uint8)).save("digit.png")
    for command in (
        ["pack", "shipped", "digits.calgp"],
        ["unpack", "digits.calgp", "runs/digits"],
        ["predict", "runs/digits", "digit.png"],
    ):
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == 0, (command, result.output, result.exception)


def test_one_changed_bit_anywhere_is_found(packed, tmp_path):
    data, chance = packed.read_bytes(), random.Random(0)  # noqa: S311
    places = [0, 124, 156, 511, 512, 600, len(data) - 1, *(chance.randrange(len(data)) for _ in range(40))]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << chance.randrange(8)
        (tmp_path / "changed.calgp").write_bytes(changed)
        with pytest.raises(CalgpError, match=r"[Nn]othing was written|cannot be read|format"):
            unpack(tmp_path / "changed.calgp", tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["changed.calgp"]


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d[: len(d) // 2], lambda d: d[:100], lambda d: b"",
                                    lambda d: d + b"\0", lambda d: d[:-1024]])  # fmt: skip
def test_a_file_that_was_cut_or_grew_is_refused(packed, tmp_path, change):
    (tmp_path / "cut.calgp").write_bytes(change(packed.read_bytes()))
    with pytest.raises(CalgpError, match="is damaged, or no file of `calgp pack`"):
        unpack(tmp_path / "cut.calgp", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def made(tmp_path, *files, **manifest):
    """A tar file as an enemy makes it: files are (TarInfo, bytes), the manifest says of them what `pack` would."""
    described = [
        {"name": info.name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for info, data in files
    ]
    text = json.dumps({"format": "calgp-pack-1", "files": described} | manifest, indent=1).encode() + b"\n"
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in ((tarfile.TarInfo(MANIFEST), text), *files):
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        end = tar.offset + 1024
    (tmp_path / "evil.calgp").write_bytes(file.getvalue()[:end])
    return tmp_path / "evil.calgp"


@pytest.mark.parametrize("name", ["../run.json", "/etc/run.json", "a/../../b", "a//b", "C:evil", "a\\b", ".hidden", ".",
                                  "a/.", "", "x\nrun.json", "/".join("abcdefghijk")])  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused(tmp_path, name):
    with pytest.raises(CalgpError, match="Invalid file name"):
        unpack(made(tmp_path, (tarfile.TarInfo(name or "x"), b"{}"), files=[{"name": name, "size": 2, "sha256": ""}]),
               tmp_path / "run")  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["evil.calgp"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE,
                                  tarfile.GNUTYPE_SPARSE])  # fmt: skip
def test_links_and_devices_are_refused(tmp_path, kind):
    info = tarfile.TarInfo("run.json")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(CalgpError, match="is not where the manifest says"):
        unpack(made(tmp_path, (info, b"")), tmp_path / "run")


def test_claims_beyond_the_file_are_refused_before_anything_is_written(tmp_path):
    claimed = [{"name": "run.json", "size": 2**50, "sha256": "0"}]
    with pytest.raises(CalgpError, match="it claims 1,125,899,906,842,624 bytes"):
        unpack(made(tmp_path, files=claimed), tmp_path / "run")
    with pytest.raises(CalgpError, match="manifest cannot be read"):
        unpack(
            made(tmp_path, files=[{"name": str(k), "size": 0, "sha256": ""} for k in range(10_001)]), tmp_path / "run"
        )
    with pytest.raises(CalgpError, match="have the same name"):
        unpack(made(tmp_path, files=[{"name": n, "size": 0, "sha256": ""} for n in ("a", "A/b")]), tmp_path / "run")
    with pytest.raises(CalgpError, match="is of format 'calgp-pack-9'"):
        unpack(made(tmp_path, format="calgp-pack-9"), tmp_path / "run")


def test_plain_files_that_are_no_run_are_refused(tmp_path):
    with pytest.raises(CalgpError, match="is no run folder"):
        unpack(made(tmp_path, (tarfile.TarInfo("notes.txt"), b"hello")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_is_overwritten(packed, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CalgpError, match="it exists, and nothing is overwritten"):
        unpack(packed, tmp_path / "run")
    with pytest.raises(CalgpError, match="There is no packed run"):
        unpack(tmp_path / "nothing.calgp", tmp_path / "other")


def test_what_cannot_be_packed_is_refused(tmp_path):
    copy = RunFolder(shutil.copytree(shipped_run().path, tmp_path / "run"))
    with pytest.raises(CalgpError, match="it is a folder; give the name of a file"):
        pack(copy, tmp_path)
    (copy.path / "link").symlink_to("/etc/passwd")
    with pytest.raises(CalgpError, match="is a link, which cannot be packed"):
        pack(copy, tmp_path / "run.calgp")
    (copy.path / "link").unlink()
    (copy.path / "model.safetensors").unlink()
    with pytest.raises(CalgpError, match="neither a model nor a checkpoint"):
        pack(copy, tmp_path / "run.calgp")
    assert not (tmp_path / "run.calgp").exists()
