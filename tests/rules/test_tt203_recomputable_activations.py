import pytest
from msgspec.structs import replace

from profiles import Made, Step, training_step
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.tt203_recomputable_activations import check
from torchtrim.step.step import OVERHEAD

MB = 1_000_000


def assert_saves(finding: Finding, size: int) -> None:
    """The price is that size, less a generator's state for each block, and one stashed during a rerun."""
    assert finding.price_bytes is not None
    assert 0 <= size - finding.price_bytes <= (finding.count_per_step + 1) * OVERHEAD.random_state


def test_a_chain_of_blocks() -> None:
    (finding,) = check(training_step(blocks=4, size=2**20))
    assert (finding.code, finding.path, finding.line) == ("TT203", "train.py", 10)
    assert finding.count_per_step == 4
    assert_saves(finding, 3 * 3 * 2**20)
    assert finding.message.startswith(
        "4 Block blocks (net.0 to net.3) keep 12.0 MiB of activations at the peak; computing them "
        "again in backward frees about 8.98 MiB, "
    )
    assert finding.message.endswith("about 6.03 ms more a step on this CPU")


def test_its_time_says_where_it_holds_and_a_dry_run_has_none() -> None:
    made = training_step(size=MB)
    (finding,) = check(replace(made, device="emulated h100"))
    assert finding.message.endswith(" more a step on H100, modelled")
    timeless = [replace(op, seconds=0.0) for op in made.operators]
    (finding,) = check(replace(made, operators=timeless))
    assert finding.message.endswith("of the peak")


def test_the_fix_is_the_command_for_the_script() -> None:
    (finding,) = check(training_step(size=MB))
    assert finding.fix is not None
    assert (finding.fix.kind, finding.fix.equivalence) == ("advice", "BITWISE")
    assert "`torchtrim optimize train.py --memory 60%`" in finding.fix.reason


def test_one_block_alone_gains_nothing() -> None:
    assert not list(check(training_step(blocks=1, size=MB)))


def test_blocks_of_different_types_are_no_repeat() -> None:
    profile = training_step(blocks=2, size=MB)
    types = iter(("Net", "Encoder", "Decoder"))
    modules = [replace(module, type=next(types)) for module in profile.modules]
    assert not list(check(replace(profile, modules=modules)))


def test_inference_keeps_nothing() -> None:
    profile = training_step(size=MB)
    calls = [replace(call, graded=False) for call in profile.calls]
    assert not list(check(replace(profile, calls=calls)))


def test_two_roots_of_a_type_are_no_blocks() -> None:
    profile = training_step(blocks=4, size=MB)
    modules = [replace(module, parent=-1) for module in profile.modules]
    assert not list(check(replace(profile, modules=modules)))


@pytest.mark.parametrize(("always", "count"), [(0, 1), (60 * MB, 1), (70 * MB, 0)])
def test_below_a_tenth_of_the_peak_it_is_not_worth_it(always: int, count: int) -> None:
    profile = training_step(blocks=4, size=MB)
    weight = replace(profile.storages[0], bytes=always)
    profile = replace(profile, storages=[weight, *profile.storages[1:]])
    assert len(list(check(profile))) == count


class Chain:
    """Parts in a row, each reading what the last one gave, then a loss and their backward."""

    def __init__(self) -> None:
        self.step = Step()
        self._saved: list[tuple[Made, Made]] = []
        self._last: list[Made] = []

    def part(self, *, inside: int = MB, output: int = 8) -> Made:
        """Saves so many bytes inside if there are any, else its output; what it gives."""
        first = self.step.op("aten::addmm", *self._last, makes=inside) if inside else None
        read = [first] if first is not None else self._last
        made = self.step.op("aten::mm", *read, makes=output)
        self._saved.append((made, first if first is not None else made))
        self._last = [made]
        return made

    def profile(self) -> Profile:
        """The step, with the backward of all parts."""
        loss = self.step.op("aten::mse_loss", *self._last, makes=MB, kind="temporary")
        for made, saved in reversed(self._saved):
            self.step.backward("aten::mm", made, saved)
            self.step.free(saved, made)
        self.step.free(loss)
        return self.step.profile()


def leaves_that_keep_only_their_outputs() -> Profile:
    chain = Chain()
    with chain.step.module("net"):
        for number in range(4):
            with chain.step.module(f"net.{number}", "Linear") as call:
                call.outputs.append(chain.part(inside=0, output=MB).out)
    return chain.profile()


def test_modules_that_keep_only_their_outputs_gain_nothing() -> None:
    assert not list(check(leaves_that_keep_only_their_outputs()))


def nested(*, inner_output: bool) -> Profile:
    """Two layers, each of two parts; a part keeps a megabyte inside, unless that is its output."""
    chain = Chain()
    with chain.step.module("net"):
        for layer in range(2):
            with chain.step.module(f"net.{layer}", "Layer"):
                for part in range(2):
                    with chain.step.module(f"net.{layer}.{part}", "Part") as call:
                        kept = (0, MB) if inner_output else (MB, 8)
                        made = chain.part(inside=kept[0], output=kept[1])
                        call.outputs.append(made.out)
    return chain.profile()


def test_of_nested_types_the_one_that_saves_most_is_reported() -> None:
    (inner,) = check(nested(inner_output=False))
    assert inner.count_per_step == 4
    assert_saves(inner, 3 * MB)
    assert "Part blocks (net.0.0 to net.1.1)" in inner.message
    (outer,) = check(nested(inner_output=True))
    assert outer.count_per_step == 2
    assert_saves(outer, MB)
    assert "Layer blocks (net.0 to net.1)" in outer.message


def test_a_type_inside_itself_counts_once() -> None:
    profile = nested(inner_output=False)
    modules = [replace(m, type="Layer") if m.parent >= 0 else m for m in profile.modules]
    (finding,) = check(replace(profile, modules=modules))
    assert finding.count_per_step == 2
    assert_saves(finding, 2 * MB)


def test_two_separate_types_are_two_findings() -> None:
    chain = Chain()
    with chain.step.module("net"):
        for kind in ("Encoder", "Decoder"):
            for number in range(2):
                with chain.step.module(f"net.{kind}{number}", kind):
                    chain.part()
    found = list(check(chain.profile()))
    assert sorted(f.message.split()[1] for f in found) == ["Decoder", "Encoder"]
    assert all(f.price_bytes is not None and f.price_bytes >= MB - 2**15 for f in found)


def test_a_step_without_operators() -> None:
    assert not list(check(Step().profile()))


def test_cousins_of_a_type_are_no_repeat() -> None:
    step = Step()
    made: list[Made] = []
    with step.module("net"):
        for branch in ("Left", "Right"):
            with step.module(f"net.{branch}", branch), step.module(f"net.{branch}.a", "Part"):
                made.append(step.op("aten::addmm", makes=MB))
    for one in reversed(made):
        step.backward("aten::mm", one, one)
        step.free(one)
    assert not list(check(step.profile()))
