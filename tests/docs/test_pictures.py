"""The pictures are text that every browser shows, on light and on dark pages, from nowhere but the file."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.blocks import PAGES, ROOT

PICTURES = sorted((ROOT / "docs" / "images").glob("*"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_stands_alone_and_follows_the_readers_colours(picture: Path) -> None:
    text = picture.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.find(f"{SVG}title") is not None
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|<script|<image|@import|url\((?!#)", text)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_nothing_is_outside_of_the_picture(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text())
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for shape in [*root.iter(f"{SVG}rect"), *root.iter(f"{SVG}text")]:
        x, y = float(shape.get("x", 0)), float(shape.get("y", 0))
        assert 0 <= x <= width - float(shape.get("width", 0))
        assert 0 <= y <= height - float(shape.get("height", 0))


def test_every_picture_is_on_a_page_with_words_for_those_who_cannot_see_it() -> None:
    pages = "\n".join((ROOT / page).read_text() for page in PAGES)
    for picture in PICTURES:
        assert re.search(rf"!\[[^\]]{{20,}}\]\([\w./]*{picture.name}\)", pages), picture.name
