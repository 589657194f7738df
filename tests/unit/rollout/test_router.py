"""Routing: least outstanding requests, sticky sessions."""

from __future__ import annotations

import pytest

from verl_opd.rollout.router import Router


def test_requests_go_where_least_is_outstanding_and_ties_to_the_lowest_index():
    router = Router(3)
    assert [router.acquire(name) for name in "abcde"] == [0, 1, 2, 0, 1]
    router.release("c")
    assert router.outstanding == [2, 2, 0]
    assert [router.acquire(name) for name in "fgh"] == [2, 2, 0]


def test_a_session_keeps_its_server_between_turns_until_it_is_closed():
    router = Router(2)
    assert router.acquire("chat") == 0
    router.release("chat")
    assert router.acquire("other") == 0
    assert router.acquire("chat") == 0  # although server 1 is idle
    assert router.outstanding == [2, 0]
    router.release("chat")
    router.close("chat")
    assert router.acquire("chat") == 1


def test_a_session_may_have_several_requests_at_once():
    router = Router(2)
    assert [router.acquire("s"), router.acquire("s")] == [0, 0]
    router.release("s")
    assert router.outstanding == [1, 0]


def test_a_reset_forgets_what_never_signed_off():
    router = Router(2)
    for name in "abc":
        router.acquire(name)
    router.reset()
    assert router.outstanding == [0, 0]
    assert [router.acquire("a"), router.acquire("d")] == [0, 1]


def test_misuse_is_an_error():
    with pytest.raises(ValueError, match="at least one server"):
        Router(0)
    router = Router(1)
    router.close("never opened")
    with pytest.raises(KeyError):
        router.release("never opened")
