"""What can be told of a value."""

from __future__ import annotations

from torchtrim.linter.kinds import (
    ARRAY,
    PLAIN,
    UNKNOWN,
    device,
    joined,
    part_of,
    sequence,
    singled,
    tensor,
    together,
)

HOST, DEVICE, ANY = tensor("host"), tensor("device"), tensor()


def test_only_a_tensor_that_may_lie_on_a_device_waits() -> None:
    assert [
        kind.waits for kind in (HOST, DEVICE, ANY, tensor("mixed"), PLAIN, device("device"))
    ] == [*(False, True, True, False, False, False)]


def test_where_a_result_lies() -> None:
    assert together(HOST, PLAIN) == "host"
    assert together(HOST, UNKNOWN) == "mixed"
    assert together(HOST, DEVICE) == "device"
    assert together(HOST, ANY) == ""
    assert together(PLAIN, ARRAY) == ""


def test_either_of_two_is_what_both_agree_on() -> None:
    assert joined(HOST, HOST) == HOST
    assert joined(HOST, DEVICE) == ANY
    assert joined(singled(ANY), ANY) == ANY
    assert joined(ANY, PLAIN) == UNKNOWN
    assert joined(sequence(HOST), sequence(DEVICE)) == sequence(ANY)


def test_what_a_part_is() -> None:
    assert part_of(sequence(PLAIN)) == PLAIN
    assert part_of(singled(DEVICE)) == DEVICE
    assert part_of(device("host")) == UNKNOWN
