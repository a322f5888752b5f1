"""Pages of listings."""

from __future__ import annotations

import pytest

from elastic_operator.kube.page import Page


def test_the_objects_of_a_page_come_as_they_were_written() -> None:
    page = Page.of(
        b'{"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7", "continue": "more"}, '
        b'"items": [{"metadata": {"name": "a"}, "spec": {"x": [1, null]}}, {"metadata": {"name": "b"}}]}'
    )
    assert (page.version, page.after) == ("7", "more")
    assert list(page) == [{"metadata": {"name": "a"}, "spec": {"x": [1, None]}}, {"metadata": {"name": "b"}}]


@pytest.mark.parametrize("items", [b"null", b"[]"])
def test_the_last_page_asks_for_no_other_and_may_be_empty(items: bytes) -> None:
    page = Page.of(b'{"metadata": {"resourceVersion": "7", "continue": ""}, "items": ' + items + b"}")
    assert page.after == ""
    assert list(page) == []


@pytest.mark.parametrize(
    "text", [b"", b"<html>", b"[]", b'{"items": []}', b'{"metadata": {}, "items": []}', b'{"kind": "Status"}']
)
def test_what_is_no_listing_is_not_taken_for_an_empty_one(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Page.of(text)
