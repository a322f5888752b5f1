"""kopf, as far as it is told anything: how to reach the API server."""

from __future__ import annotations

from elastic_operator.kube.api import Access
from elastic_operator.kube.watching import connection


def test_a_token_is_handed_on_with_its_scheme() -> None:
    info = connection(Access("https://server:6443", authority="PEM", authorization="bearer abc", proxy="http://proxy"))
    assert info.server == "https://server:6443"
    assert info.as_http_headers() == {"Authorization": "bearer abc"}
    assert (info.ca_data, info.proxy_url) == ("PEM", "http://proxy")
    assert connection(Access("https://server", authorization="abc")).as_http_headers() == {
        "Authorization": "Bearer abc"
    }


def test_without_a_token_no_header_claims_that_there_is_one() -> None:
    info = connection(Access("https://server", certificate_file="/cert", key_file="/key", insecure=True))
    assert info.as_http_headers() == {}
    assert (info.certificate_path, info.private_key_path, info.insecure) == ("/cert", "/key", True)


def test_a_token_is_not_shown_where_the_way_is_printed() -> None:
    assert "secret" not in repr(Access("https://server", authorization="Bearer secret"))
