"""What can be told of a value."""

from __future__ import annotations

from functools import reduce

from torchtrim.linter.kinds import (
    ARRAY,
    PLAIN,
    UNKNOWN,
    device,
    function,
    joined,
    part_of,
    placed,
    places,
    refined,
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


def test_a_tuple_knows_its_places_where_they_differ() -> None:
    pair = places([HOST, PLAIN])
    assert placed(pair, 2) == [HOST, PLAIN]
    assert placed(pair, 3) is None
    assert places([HOST, HOST]) == sequence(HOST)
    assert joined(pair, places([DEVICE, PLAIN])) == places([ANY, PLAIN])
    assert joined(pair, sequence(HOST)) == sequence(UNKNOWN)


def test_code_tells_what_an_annotation_leaves_open() -> None:
    said = tensor(sure=False)
    assert refined(UNKNOWN, HOST) == HOST
    assert refined(said, HOST) == HOST
    assert refined(said, PLAIN) == said
    assert refined(PLAIN, HOST) == PLAIN
    assert refined(places([said, PLAIN]), places([HOST, UNKNOWN])) == places([HOST, PLAIN])
    assert refined(places([said, PLAIN]), sequence(HOST)) == places([said, PLAIN])


def test_one_of_several_functions() -> None:
    either = joined(function("torch.sin"), function("torch.cos"))
    assert [name for name, _ in either.items] == ["torch.sin", "torch.cos"]
    some = joined(either, UNKNOWN)
    assert some == joined(UNKNOWN, either) == joined(some, either) == joined(some, UNKNOWN)
    assert {name for name, _ in some.items} == {"", "torch.sin", "torch.cos"}
    assert joined(either, PLAIN) == UNKNOWN
    assert joined(either, function(gives=HOST)).part == HOST
    many = [function(f"torch.f{n}") for n in range(20)]
    assert len(reduce(joined, many).items) < 20
