"""The files of the page, without a browser."""

import re

import numpy as np
import pytest

from calgp.serve.app import STATIC
from calgp.serve.model_info import entropy_percentiles

from .conftest import sampled

FILES = sorted(file for file in STATIC.iterdir() if file.is_file())
HTML = (STATIC / "index.html").read_text("utf-8")
SCRIPTS = {file.name: file.read_text("utf-8") for file in FILES if file.suffix == ".js"}


def test_every_file_is_served_by_its_kind(client):
    kinds = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    for file in FILES:
        response = client.get("/" if file.name == "index.html" else f"/static/{file.name}")
        assert response.content == file.read_bytes()
        assert response.headers["content-type"].startswith(kinds[file.suffix])
        assert "default-src 'none'" in response.headers["content-security-policy"]


def test_the_page_has_no_script_or_style_inside_and_names_no_host():
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", HTML)
    for name, text in {**SCRIPTS, "index.html": HTML, "style.css": (STATIC / "style.css").read_text("utf-8")}.items():
        hosts = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[\w/]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not hosts, (name, hosts)
        assert "innerHTML" not in text and "eval(" not in text


def test_scripts_and_page_know_the_same_names():
    ids = set(re.findall(r'\bid="([\w-]+)"', HTML))
    assert len(ids) == len(re.findall(r'\bid="', HTML))
    wanted = {name for text in SCRIPTS.values() for name in re.findall(r'byId\("([\w-]+)"\)', text)}
    assert wanted <= ids
    referred = re.findall(r'(?:aria-labelledby|aria-describedby|for)="([\w-]+)"|href="#([\w-]+)"', HTML)
    assert {a or b for a, b in referred} <= ids
    for text in SCRIPTS.values():
        for names, module in re.findall(r'import (?:\{ ([^}]+) \}|\* as \w+) from "\./([\w.]+)"', text):
            for name in filter(None, names.split(", ")):
                assert re.search(rf"export (?:const|class|function|async function\*?) {name}\b", SCRIPTS[module]), name


@pytest.mark.parametrize("source", ["digits", "letters"])
def test_percentiles_are_those_of_the_predictions(client, source):
    found = {each["source"]: each["entropy_percentiles"] for each in client.get("/v1/model").json()["evaluations"]}
    entropy = sampled().folder.predictions(source, None, 10)["entropy"].numpy()
    # NumPy's interpolates in another order of operations
    np.testing.assert_allclose(found[source], np.percentile(entropy.astype(float), range(101)).clip(0), atol=1e-9)


def test_percentiles_are_unknown_where_predictions_were_not_kept():
    assert entropy_percentiles(sampled(), "mnist", None) is None
