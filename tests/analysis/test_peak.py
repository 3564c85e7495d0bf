import pytest
from msgspec.structs import replace

from profiles import Step, training_step
from torchtrim.analysis.peak import holders, library_note, workspace_rise
from torchtrim.analysis.timeline import peak_operator, timeline
from torchtrim.records.report import Holder


def by_module(found: tuple[Holder, ...]) -> dict[str, Holder]:
    return {holder.module: holder for holder in found}


def test_holders_add_up_to_the_peak_largest_first() -> None:
    profile = training_step(blocks=5)
    found = holders(profile, most=100)
    assert sum(h.bytes for h in found) == max(timeline(profile).high)
    assert [h.bytes for h in found] == sorted((h.bytes for h in found), reverse=True)


def test_beyond_the_most_the_rest_is_summed() -> None:
    profile = training_step(blocks=5)
    full, short = holders(profile, most=100), holders(profile, most=3)
    assert len(full) > 3 == len(short)
    assert short[:2] == full[:2]
    assert short[2].kind == "rest"
    assert short[2].bytes == sum(h.bytes for h in full[2:])
    assert short[2].count == sum(h.count for h in full[2:])
    assert short[2].why == f"{len(full) - 2} smaller groups"
    assert (short[2].path, short[2].line) == ("", 0)


@pytest.mark.parametrize(("groups", "shown"), [(12, 12), (13, 12)])
def test_twelve_are_shown_unless_said(groups: int, shown: int) -> None:
    step = Step()
    for line in range(groups):
        step.op("aten::relu", makes=10, line=1 + line)
    found = holders(step.profile())
    assert len(found) == shown
    assert (found[-1].kind == "rest") is (groups > shown)


def test_the_same_module_line_and_reason_is_one_holder() -> None:
    step = Step()
    with step.module("net.fc", graded=False):
        step.op("aten::addmm", makes=(20, 30), line=7)
        step.op("aten::addmm", makes=40, line=7)
        read = step.op("aten::addmm", makes=25, line=7)
        step.op("aten::addmm", makes=35, line=8)
        last = step.op("aten::cat", read)
    found = holders(step.profile(), last.index)
    assert [(h.bytes, h.count, h.line, h.why) for h in found] == [
        (90, 3, 7, "held by a Python reference"),
        (35, 1, 8, "held by a Python reference"),
        (25, 1, 7, "being read by concatenation"),
    ]


def test_a_holder_names_kind_module_place_and_reason() -> None:
    step = Step()
    with step.module("net.head", "Linear"):
        logits = step.op("aten::addmm", makes=500, line=42)
    loss = step.op("aten::nll_loss", logits, makes=4)
    step.backward("aten::nll_loss_backward", loss, logits)
    assert holders(step.profile())[0] == Holder(
        bytes=500,
        count=1,
        kind="activation",
        module="net.head",
        path="train.py",
        line=42,
        why="saved by NLL loss for backward",
        type="Linear",
        what="output of matmul",
    )


def test_repeated_blocks_of_equal_size_are_one_line() -> None:
    step = Step()
    made = []
    for number in range(3):
        with step.module(f"net.layers.{number}.fc"):
            made.append(step.op("aten::addmm", makes=50, line=9))
    peak = step.backward("aten::mm", made[0])
    for one in reversed(made):
        step.backward("aten::mm", one, one)
    (found,) = holders(step.profile(), peak.index)
    assert (found.module, found.count, found.bytes) == ("net.layers.*.fc", 3, 150)


def test_blocks_of_different_size_stay_apart() -> None:
    step = Step()
    made = []
    for number, size in enumerate((50, 60)):
        with step.module(f"net.layers.{number}"):
            made.append(step.op("aten::addmm", makes=size, line=9))
    step.op("aten::cat", *made)
    found = by_module(holders(step.profile(), 2))
    assert found["net.layers.0"].bytes == 50
    assert found["net.layers.1"].bytes == 60


def test_one_number_alone_keeps_its_path() -> None:
    step = Step()
    with step.module("net.layers.3"):
        step.op("aten::addmm", makes=50, line=9)
    assert holders(step.profile())[0].module == "net.layers.3"


def test_parameters_are_grouped_by_the_top_two_levels() -> None:
    step = Step()
    for path in ("net", "net.encoder", "net.encoder.layers", "net.encoder.layers.0", "net.head"):
        step.declare(path)
    for name in ("encoder.layers.0.weight", "encoder.layers.0.bias", "encoder.scale"):
        step.alive("parameter", 10, name=f"net.{name}")
    step.alive("parameter", 5, name="net.head.weight")
    step.alive("parameter", 1, name="net.scale")
    step.op("aten::relu")
    found = by_module(holders(step.profile()))
    assert {path: (h.bytes, h.count) for path, h in found.items()} == {
        "net.encoder": (30, 3),
        "net.head": (5, 1),
        "net": (1, 1),
    }


def test_optimizer_states_are_grouped_by_optimizer() -> None:
    step = Step()
    for number in range(20):
        step.alive("optimizer_state", 4, name=f"AdamW.{number}.exp_avg")
    step.op("aten::relu")
    (found,) = holders(step.profile())
    assert (found.module, found.bytes, found.count, found.line) == ("AdamW", 80, 20, 0)


def test_scratch_is_a_holder_of_its_own() -> None:
    step = Step()
    with step.module("net.conv"):
        step.op("aten::convolution", makes=10, transient=90, line=3)
    found = holders(step.profile())
    assert [(h.kind, h.bytes, h.module, h.line) for h in found] == [
        ("workspace", 80, "net.conv", 3),
        ("activation", 10, "net.conv", 3),
    ]
    assert found[0].why == "scratch of convolution while it runs"


def test_before_the_step_and_without_operators() -> None:
    step = Step()
    step.alive("parameter", 10, name="net.weight")
    assert [h.bytes for h in holders(step.profile())] == [10]
    step.op("aten::relu", makes=100)
    assert [h.bytes for h in holders(step.profile(), at=-1)] == [10]
    assert holders(Step().profile()) == ()


def test_empty_storages_hold_nothing() -> None:
    step = Step()
    step.alive("buffer", 0)
    step.op("aten::relu", makes=1)
    assert [h.kind for h in holders(step.profile())] == ["activation"]


def test_another_moment_than_the_peak() -> None:
    profile = training_step(blocks=4)
    assert sum(h.bytes for h in holders(profile, at=0)) == timeline(profile).high[0]
    assert timeline(profile).high[0] < timeline(profile).high[peak_operator(profile)]


@pytest.mark.parametrize(
    ("name", "dtype", "device", "noted"),
    [
        ("aten::convolution_backward", "float32", "cpu", True),
        ("aten::mkldnn_rnn_layer", "float32", "cpu", True),
        ("aten::addmm", "bfloat16", "cpu", True),
        ("aten::addmm", "float32", "cpu", False),
        ("aten::gelu", "bfloat16", "cpu", False),
        ("aten::convolution", "float32", "cuda:0", False),
        ("aten::addmm", "float32", "emulated v100", False),
    ],
)
def test_a_note_says_that_onednn_keeps_memory(
    name: str, dtype: str, device: str, noted: bool
) -> None:
    step = Step(device)
    step.op(name, makes=10)
    profile = step.profile()
    (operator,) = profile.operators
    outputs = tuple(replace(one, dtype=dtype) for one in operator.outputs)
    profile = replace(profile, operators=(replace(operator, outputs=outputs),))
    assert bool(library_note(profile)) is noted


def test_a_note_says_how_much_workspaces_of_convolutions_would_raise_the_peak() -> None:
    """The convolution handles 32 bytes, so 115 at 2,000 bytes; the peak is 100 above that."""
    step = Step("emulated v100")
    step.op("aten::convolution", step.alive("input", 1000), makes=1000)
    step.op("aten::cat", makes=100)
    profile = step.profile()
    assert workspace_rise(profile) == 15
    assert "would raise this peak by 15 B" in library_note(profile)
    assert library_note(replace(profile, device="cuda:0")) == ""
