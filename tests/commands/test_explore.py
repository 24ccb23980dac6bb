"""The explorer is the run's own log: its bytes are the ledger's, its states those of the units, on every rank."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minifsdp.course.ladder import run as ladder
from minifsdp.course.ladder.measure import Settings
from minifsdp.instruments.explore.log import Change, LoggedStep, Moment, on_one_clock
from minifsdp.instruments.watch.storages import TAGS
from minifsdp.instruments.watch.timeline import Span

RUNGS = ("ddp", "zero2", "fsdp", "fsdp-prefetch", "fsdp-limit")


class Explored(NamedTuple):
    path: Path
    record: dict[str, Any]
    data: dict[str, Any]


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    out = tmp_path_factory.mktemp("explore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIFSDP_DEVICE", "cpu")
        settings = Settings(rungs=RUNGS, steps=2, layers=3, width=35, context=16)
        ladder.run(ladder.check(settings, "cpu", out), lambda *_: None)
    text = (out / "explore.html").read_text()
    data = re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return Explored(out / "explore.html", json.loads((out / "ladder.json").read_text()), json.loads(data[1]))


def own(data: dict[str, Any], name: str) -> dict[str, Any]:
    rung = next(each for each in data["rungs"] if each["name"] == name)
    step: dict[str, Any] = rung["variants"][rung["own"]]
    return step


def moments_of(rank: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """The moments of a rank, with the sum of all changes of memory before each."""
    now, found = list(rank["start"]), []
    for _, what, *rest in rank["entries"]:
        if isinstance(what, str):
            found.append((what, list(now)))
        elif what is not None:
            for tag, change in zip([what, *rest][::2], [what, *rest][1::2], strict=True):
                now[tag] += change
    return found


def holdings_of(rank: dict[str, Any], row: int) -> list[tuple[str, str]]:
    return [tuple(rest[1:]) for _, what, *rest in rank["entries"] if what is None and rest[0] == row]


@pytest.mark.parametrize("name", RUNGS)
def test_bytes_at_every_moment_are_the_ledger_s(explored: Explored, name: str) -> None:
    rung = next(each for each in explored.record["rungs"] if each["name"] == name)
    for rank, moments in zip(own(explored.data, name)["ranks"], rung["moments"], strict=True):
        assert moments_of(rank) == [(what, [sizes[tag] for tag in TAGS]) for what, sizes in moments]
        assert [what for what, _ in moments if " " not in what] == [
            "forward", "backward", "optimizer", "zero_grad", "end"
        ]  # fmt: skip
    rest = [dict(moments)["zero_grad"] for moments in rung["moments"]]
    for key in ("parameters", "gradients", "optimizer"):
        assert [sizes[key] for sizes in rest] == [sizes[key] for sizes in rung["bytes"]]


@pytest.mark.parametrize("name", RUNGS)
def test_entries_are_in_the_order_of_time_within_the_step(explored: Explored, name: str) -> None:
    step = own(explored.data, name)
    for rank in step["ranks"]:
        times = [entry[0] for entry in rank["entries"]]
        assert times == sorted(times)
        assert 0 <= times[0] <= times[-1] <= step["length"]


def test_an_fsdp_unit_s_life(explored: Explored) -> None:
    step = own(explored.data, "fsdp")
    assert step["units"] == ["root", "blocks.0", "blocks.1", "blocks.2"]
    for rank in step["ranks"]:
        for row in (1, 2, 3):
            parameters = [held for held, _ in holdings_of(rank, row)]
            once = [one for one, next_one in pairwise([*parameters, "end"]) if one != next_one]
            assert once == ["shard", *["on its way", "whole", "shard"] * 2], "gathered for forward and for backward"
            gradients = [gradient for _, gradient in holdings_of(rank, row)]
            assert list(dict.fromkeys(gradients)) == ["none", "whole", "on its way", "shard"]
            assert gradients[-1] == "none", "after zero_grad"
        root = [held for held, _ in holdings_of(rank, 0)]
        assert root.count("on its way") == 1, "the root stays whole from forward to backward"


def test_a_gather_is_on_its_way_from_when_it_is_issued(explored: Explored) -> None:
    """Also if it is waited for at once; "on its way" was shown only when it had arrived."""
    before = after = 0
    step = own(explored.data, "fsdp")
    for rank in step["ranks"]:
        for row, unit in enumerate(step["units"]):
            last = 0
            for at, what, *rest in rank["entries"]:
                if what is None and rest[:2] == [row, "on its way"]:
                    before, last = before + at - last, at
                elif isinstance(what, str) and what.startswith(f"all_gather of {unit} "):
                    after, last = after + (at - last) * what.endswith("arrived"), at
    assert before < after


def test_what_replicates_parameters_always_has_them_whole(explored: Explored) -> None:
    for name, last in (("ddp", "whole"), ("zero2", "shard")):
        for rank in own(explored.data, name)["ranks"]:
            for row in range(4):
                held = holdings_of(rank, row)
                assert {parameters for parameters, _ in held} == {"whole"}
                kept = [gradient for _, gradient in held if gradient != "none"]
                assert last in kept
                assert (kept[0], "shard" in kept) == ("whole", name == "zero2")


def test_it_opens_on_fsdp_and_says_where_it_ran_without_the_reason(explored: Explored) -> None:
    assert explored.data["rungs"][explored.data["first"]]["name"] == "fsdp"
    assert "2 ranks over gloo on CPU. Each rank" in explored.data["about"]


def test_a_run_has_its_variants(explored: Explored) -> None:
    """At most k units are whole or on their way beside the root, for each k."""
    limit = explored.data["rungs"][-1]
    assert (limit["varies"], [each["label"] for each in limit["variants"]], limit["own"]) == ("k", ["1", "2", "3"], 1)
    prefetch = explored.data["rungs"][-2]
    assert [each["label"] for each in prefetch["variants"]] == ["1", "2", "all"]
    for variant in limit["variants"]:
        held, most = dict.fromkeys(range(4), "shard"), 0
        for _, what, *rest in variant["ranks"][1]["entries"]:
            if what is None:
                held[rest[0]] = rest[1]
                most = max(most, sum(held[row] != "shard" for row in (1, 2, 3)))
        assert most == int(variant["label"])


def test_the_page_asks_for_nothing_and_is_small(explored: Explored) -> None:
    text = explored.path.read_text()
    assert not re.search(r"https?://|@import|src=|href=", text)
    assert len(text) < 3e6


def moment(at: float, name: str, events: int = 0) -> Moment:
    return Moment(at, name, name, events, dict.fromkeys(TAGS, 0))


def test_bytes_are_shown_at_the_time_of_the_traced_step() -> None:
    """The step with the ledger takes ten times as long; what lies between two moments stays between them."""
    ours = [moment(100.0, "forward"), moment(110.0, "backward", 1), moment(120.0, "end", 1)]
    traced = [moment(5.0, "forward"), moment(6.0, "backward"), moment(9.0, "end")]
    log = LoggedStep(["root"], ours, [], dict.fromkeys(TAGS, 0), [(105.0, {"gradients": 8})])
    step = on_one_clock([log], traced, [Span("compute", "mm", 0.5, 1.0)])
    gradients = TAGS.index("gradients")
    assert step["ranks"][0]["entries"] == [
        [0, "forward"], [500_000, gradients, 8], [1_000_000, "backward"], [4_000_000, "end"]
    ]  # fmt: skip
    assert (step["length"], step["spans"]) == (4_000_000, [["compute", "mm", 500_000, 1_000_000]])


def test_steps_with_other_collectives_are_tied_at_their_phases() -> None:
    ours = [moment(0.0, "forward"), moment(1.0, "all_gather issued"), moment(2.0, "backward"), moment(4.0, "end")]
    traced = [moment(0.0, "forward"), moment(1.0, "backward"), moment(2.0, "end")]
    step = on_one_clock([LoggedStep([], ours, [], dict.fromkeys(TAGS, 0), [])], traced, [])
    assert [at for at, _ in step["ranks"][0]["entries"]] == [0, 500_000, 1_000_000, 2_000_000]


def test_a_gradient_is_not_lost_while_it_is_handed_over() -> None:
    held = [("whole", "whole"), ("shard", "none"), ("shard", "on its way"), ("shard", "shard"), ("shard", "none")]
    changes = [Change(float(at), 0, 0, state) for at, state in enumerate(held)]  # type: ignore[arg-type]
    ours = [moment(0.0, "forward"), moment(9.0, "end")]
    step = on_one_clock([LoggedStep(["root"], ours, changes, dict.fromkeys(TAGS, 0), [])], ours, [])
    shown = [entry[3:] for entry in step["ranks"][0]["entries"] if entry[1] is None]
    assert shown == [list(state) for place, state in enumerate(held) if place != 1]


# In a browser


@pytest.fixture(scope="module")
def page(explored: Explored) -> Any:
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install minifsdp[slides]")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium here: apt install chromium")
    found: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 1000}, offline=True)
        page.on("pageerror", lambda error: found.append(str(error)))
        page.on("request", lambda each: found.append(each.url) if not each.url.startswith("file:") else None)
        page.goto(explored.path.as_uri())
        yield page
        browser.close()
    assert found == []


def test_it_opens_on_fsdp_and_a_frame_around_it_learns_how_high_it_is(page: Any, explored: Explored) -> None:
    outer = explored.path.with_name("outer.html")
    outer.write_text(
        '<script>addEventListener("message", ({ data }) => { window.told = data.explorerHeight; });</script>'
        f'<iframe src="{explored.path.name}" style="width: 760px"></iframe>'
    )
    page.goto(outer.as_uri())
    page.wait_for_function("window.told > 400")
    heights = page.frames[1].evaluate("[...document.querySelectorAll('#bytes td')].map((cell) => cell.offsetHeight)")
    assert max(heights) < 40, "a number and its unit are on one line"
    page.goto(explored.path.as_uri())
    assert page.locator("#rung option:checked").text_content() == "fsdp"


def shown_bytes(page: Any) -> list[int]:
    cells = {tag: page.get_attribute(f'#bytes tr[data-tag="{tag}"]', "data-bytes") for tag in TAGS}
    return [int(size) for size in cells.values()]


@pytest.mark.parametrize("name", RUNGS)
def test_dragged_through_a_step_it_shows_the_record_s_bytes(page: Any, explored: Explored, name: str) -> None:
    """Ten moments of rank 1, by the slider."""
    page.select_option("#rung", label=name)
    page.select_option("#rank", label="1")
    number = RUNGS.index(name)
    moments = explored.record["rungs"][number]["moments"][1]
    entries = own(explored.data, name)["ranks"][1]["entries"]
    places = [place for place, entry in enumerate(entries, 1) if isinstance(entry[1], str)]
    assert len(places) == len(moments)
    for k in range(10):
        which = k * (len(places) - 1) // 9
        page.locator("#place").fill(str(places[which]))
        assert shown_bytes(page) == [moments[which][1][tag] for tag in TAGS], moments[which][0]
        assert page.text_content("#now").endswith(moments[which][0])


def test_the_picture_can_be_dragged_and_stepped_through(page: Any, explored: Explored) -> None:
    page.select_option("#rung", label="fsdp-limit")
    page.select_option("#rank", label="0")
    box = page.locator("#step svg").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20)
    page.mouse.down()
    seen = []
    for share in (0.4, 0.6, 0.8):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 20)
        seen.append(int(page.input_value("#place")))
    page.mouse.up()
    assert 0 < seen[0] < seen[1] < seen[2]
    page.keyboard.press("ArrowRight")
    assert int(page.input_value("#place")) > seen[2]
    page.select_option("#variant", label="3")
    assert page.locator("#ranks tr[data-unit]").count() == 4
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "it fits a phone"
