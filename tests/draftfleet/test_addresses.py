"""Addresses of servers, one by one and as ranges of ports."""

from __future__ import annotations

import pytest

from draftfleet.addresses import Address, expand
from draftfleet.errors import SettingsError


def test_an_address_is_taken_with_or_without_slash_and_v1_and_once() -> None:
    found = expand(["http://a:1/", "http://a:1/v1", " https://b/prefix/v1/ ", "http://[::1]:8000"])

    assert found == [Address("http://a:1"), Address("https://b/prefix"), Address("http://[::1]:8000")]


def test_a_range_is_its_ports_of_which_none_is_expected_to_be_there() -> None:
    assert expand(["http://127.0.0.1:8000-8002/v1"]) == [
        Address(f"http://127.0.0.1:{port}", is_named=False) for port in (8000, 8001, 8002)
    ]


def test_a_port_that_is_named_beside_its_range_is_expected_to_be_there() -> None:
    for servers in (["http://a:1-2", "http://a:2"], ["http://a:2", "http://a:1-2"]):
        assert set(expand(servers)) == {Address("http://a:1", is_named=False), Address("http://a:2")}


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("127.0.0.1:8000", "write addresses as http://HOST:PORT"),
        ("http://", "write addresses as http://HOST:PORT"),
        ("http://a:0", "write addresses as http://HOST:PORT"),
        ("http://a:70000", "write addresses as http://HOST:PORT"),
        ("http://a:80-x", "write addresses as http://HOST:PORT"),
        ("http://a:8007-8000", "write the smaller port first"),
        ("http://a:0-4", "ports from 1 to 65535"),
        ("http://a:8000-70000", "ports from 1 to 65535"),
        ("http://a:8000-8999", "which is 1000 ports: a range may have 256"),
    ],
)
def test_an_address_that_is_none_is_refused_with_how_to_write_it(server: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        expand([server])

    assert repr(server) in str(caught.value)
