"""The workshop's core: blanks, forbidden references, comparisons, predictions, and what a notebook is told."""

import json
import os
import signal
import subprocess
import sys
from textwrap import dedent

import pytest
import torch

from minifsdp import ring
from minifsdp.course.workshop import checking, earlier, exercise, hint, notebook, outcome, predict, process, yours
from minifsdp.course.workshop.catalogue import setup_of
from minifsdp.course.workshop.checking import AnswerError, expect, on_ranks, same
from minifsdp.course.workshop.lines import wrapped
from minifsdp.course.workshop.process import run_check
from minifsdp.course.workshop.references import Reference, find_reference, forbidden, is_blank, lab_of, written
from minifsdp.course.workshop.store import Store
from minifsdp.course.workshop.submission import Submission
from minifsdp.course.workshop.verdict import Verdict
from minifsdp.instruments.warm.client import server

STUB = """
@exercise("4.1")
def pad_and_chunk(flat: Tensor, ranks: int) -> list[Tensor]:
    '''Any text.'''
    ...
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notebook, "_states", {})
    monkeypatch.setattr(notebook, "_submissions", {})


class TestBlank:
    def test_the_stub_is_blank_whatever_its_docstring_comments_and_layout(self):
        ref = find_reference("4.1")
        assert is_blank(STUB, ref)
        assert is_blank(STUB.replace("'''Any text.'''\n", "# a comment\n").replace("    ...", "\n    ..."), ref)
        assert is_blank("import math\n" + STUB, ref)

    @pytest.mark.parametrize("body", ["pass", "return None", "return ...", "raise NotImplementedError", "...\n    ..."])
    def test_every_other_body_is_an_answer(self, body):
        assert not is_blank(STUB.replace("    ...", f"    {body}"), find_reference("4.1"))

    def test_another_signature_is_an_answer(self):
        assert not is_blank(STUB.replace("ranks: int", "n: int"), find_reference("4.1"))

    @pytest.mark.parametrize("cell", ["x = 1", "def pad_and_chunk(:", "%%time\n" + STUB, ""])
    def test_what_is_not_python_or_lacks_the_function_is_an_answer(self, cell):
        assert not is_blank(cell, find_reference("4.1"))


class TestLines:
    def test_a_long_line_is_wrapped_with_an_indent_and_others_are_as_they_were(self):
        assert wrapped("a  table   of\n  two lines\n", 12) == "a  table\n    of\n  two lines\n"
        assert wrapped("  one two three", 9) == "  one two\n      three"
        assert wrapped("short", 9) == "short"
        assert wrapped("one-hyphenated-word", 9) == "one-hyphenated-word"

    def test_a_prediction_s_line_fits_the_page(self, capsys):
        predict("4.1", ..., "bytes of " + "many words " * 20)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3
        assert max(map(len, lines)) <= 100


class TestReferences:
    def test_an_unknown_exercise_names_those_of_its_lab(self):
        with pytest.raises(ValueError, match=r"no exercise '4\.99': lab 04 has 4\.1"):
            find_reference("4.99")
        with pytest.raises(ValueError, match="lab 77 has none"):
            find_reference("77.1")

    @pytest.mark.parametrize("name", ["", "4", "4.1.2", "four", "-1.2"])
    def test_what_is_no_exercise_is_refused(self, name):
        with pytest.raises(ValueError, match=r"is not an exercise: give lab and number, such as 5\.2"):
            lab_of(name)

    @pytest.mark.parametrize(("exercise", "lab"), [("5.2", "05"), ("11.1", "11"), ("10a.3", "10a"), ("9b.12", "09b")])
    def test_an_exercise_belongs_to_its_lab(self, exercise, lab):
        assert lab_of(exercise) == lab

    def test_the_reference_raises_under_every_name_while_its_exercise_is_checked(self):
        ref = find_reference("4.1")
        alias = ref.function
        with forbidden(ref), pytest.raises(RuntimeError, match=r"pad_and_chunk is the answer to 4\.1"):
            alias(torch.ones(3), 2)
        assert len(alias(torch.ones(3), 2)) == 2

    def test_a_decorated_function_with_a_closure_can_be_forbidden_too(self):
        ref = Reference("9.9", ring.all_reduce, ("", ""), (ring.all_gather,), "")
        with forbidden(ref):
            for function in (ring.all_reduce, ring.all_gather):
                with pytest.raises(RuntimeError, match=r"is the answer to 9\.9"):
                    function(torch.ones(1), None)

    def test_the_written_source_has_no_decorator(self):
        assert written(find_reference("4.1").function).startswith("def pad_and_chunk(flat: Tensor")

    def test_the_reference_is_forbidden_on_the_ranks_as_well(self):
        def use(flat):
            return find_reference("4.1").function(flat, 2)

        with (
            checking.checking("4.1"),
            pytest.raises(AnswerError, match=r"rank 0 failed: RuntimeError: pad_and_chunk is the answer to 4\.1"),
        ):
            on_ranks(2, use, torch.ones(3))
        assert len(on_ranks(2, use, torch.ones(3))) == 2


class TestExpect:
    @pytest.mark.parametrize(
        ("got", "wanted"),
        [
            (True, 1),
            (1.0, 1),
            (None, 0),
            (torch.ones(3), torch.ones(3, dtype=torch.float64)),
            (torch.ones(3), torch.ones(1, 3)),
            (torch.ones(3), torch.full((3,), 1.001)),
            (torch.full((3,), float("nan")), torch.ones(3)),
            ([1, 2], [1, 2, 3]),
            ({"a": 1}, {"b": 1}),
            (torch.ones(3).tolist(), torch.ones(3)),
        ],
    )
    def test_what_differs_is_not_the_same(self, got, wanted):
        assert not same(got, wanted, 1e-6)

    @pytest.mark.parametrize(
        ("got", "wanted"),
        [(1, 1.0), ((1, 2), [1, 2]), (torch.ones(3) + 1e-7, torch.ones(3)), (torch.ones(0), torch.ones(0))],
    )
    def test_what_is_equal_within_the_tolerance_is_the_same(self, got, wanted):
        assert same(got, wanted, 1e-6)

    def test_the_line_names_rank_quantity_both_values_and_the_slip(self):
        wanted, got = torch.tensor([0.5, 1.0]), torch.tensor([1.0, 2.0])
        with pytest.raises(AnswerError) as error:
            expect("the gradient", got, wanted, rank=1, slips={"a": wanted, "the sum, not the mean": 2 * wanted})
        assert str(error.value).splitlines() == [
            "rank 1, the gradient: expected [0.5, 1.0] ([2] float32), got [1.0, 2.0] ([2] float32)",
            "likely slip: the sum, not the mean",
        ]

    @pytest.mark.parametrize(
        ("got", "words"),
        [
            ([*range(9), 0, 10], "number 9 is 0 instead of 9"),
            ([0, 2, 1], "number 1 is 2 instead of 1"),
            ([*range(8)], "equal as far as both go, 8 values instead of 11"),
        ],
    )
    def test_long_lists_are_described_by_their_first_difference(self, got, words):
        with pytest.raises(AnswerError, match=words):
            expect("the order", got, [*range(11)])

    def test_a_long_tensor_is_described_by_its_first_difference(self):
        got, wanted = torch.arange(10.0), torch.arange(10.0)
        got[7] = -1
        with pytest.raises(AnswerError, match=r"element 7 is -1 instead of 7, 1 differ"):
            expect("values", got, wanted)

    @pytest.mark.parametrize(
        ("got", "wanted", "words"),
        [
            (4.0, 4, r"expected 4 \(int\), got 4.0 \(float\)"),
            (209.4, 209.375, r"expected 209.375 \(float\), got 209.4 \(float\)"),
            ([1.0, 2.00001], [1.0, 2.00002], r"1: expected 2.00002 \(float\), got 2.00001"),
            ({"a": 1, "b": torch.ones(9)}, {"a": 1, "b": torch.zeros(9)}, "b: .*: element 0 is 1 instead of 0"),
            (torch.tensor([1.00001]), torch.tensor([1.00003]), ".*element 0 is 1.00001001 instead of 1.00003004"),
        ],
    )
    def test_what_looks_the_same_is_told_apart(self, got, wanted, words):
        with pytest.raises(AnswerError, match=f"the value: {words}"):
            expect("the value", got, wanted)

    def test_a_rank_s_own_words_are_kept_whole(self):
        def observe() -> None:
            expect("the sum", 1, 2, slips={"the mean": 1})

        with pytest.raises(AnswerError, match=r"^rank \d failed: the sum: expected 2, got 1\nlikely slip: the mean$"):
            on_ranks(2, observe)

    def test_the_fallback_serves_where_no_slip_fits(self):
        with pytest.raises(AnswerError, match="likely slip: look at the order"):
            expect("calls", ["b", "a"], ["a", "b"], slips={"none at all": []}, slip="look at the order")


class TestPredictions:
    @pytest.mark.parametrize(
        ("said", "words"),
        [
            (4000, "as you predicted"),
            (1000, "elements against bytes"),
            (8000, "the whole against one rank's part: there are 2 ranks"),
            (4004, "the padding"),
            (1234, "you said 1,234"),
        ],
    )
    def test_the_answer_names_the_likely_slip(self, capsys, said, words):
        predict("4.1", said, "bytes")
        outcome("4.1", 4000, ranks=2)
        assert words in capsys.readouterr().out.splitlines()[1]

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            (529_200, "you said 529,200: the weights alone: biases and norms are missing"),
            (530_000, "you said 530,000: 0.9 % too low: the weights alone: biases and norms are missing"),
            (534_000, "you said 534,000: 0.1 % too low"),  # the gap is another than that of the named miss
            (540_000, "you said 540,000: 1.0 % too high"),
            (534_660, "you said 534,660: without the padding"),
            (600_000, "you said 600,000"),  # not near
        ],
    )
    def test_a_near_prediction_hears_how_near_and_what_it_missed(self, capsys, said, words):
        predict("5.2", said, "bytes")
        slips = {"the weights alone: biases and norms are missing": 529_200, "without the padding": 534_660}
        outcome("5.2", 534_664, ranks=2, slips=slips)
        assert capsys.readouterr().out.splitlines()[1] == f"prediction 5.2: measured 534,664, {words}"

    @pytest.mark.parametrize(("said", "words"), [(53, "1 too low"), (55, "1 too high"), (-54, "you said -54")])
    def test_a_count_that_is_nearly_right_is_told_by_how_many(self, capsys, said, words):
        predict("2.1", said)
        outcome("2.1", 54)
        assert capsys.readouterr().out.splitlines()[1].endswith(words)

    @pytest.mark.parametrize(
        ("said", "words"),
        [
            (10, "you said 10: units of a rank"),
            (10.2, "you said 10.2: units of a rank"),
            (1.29, "you said 1.29: its own part"),
            (9, "you said 9"),  # not near
            (20, "you said 20"),  # near a whole number, which nobody rounds
        ],
    )
    def test_a_rounded_slip_is_a_slip(self, capsys, said, words):
        predict("15.8", said)
        outcome("15.8", 1.125, slips={"units of a rank": 72 / 7, "its own part": 9 / 7, "a count": 21})
        assert capsys.readouterr().out.splitlines()[1].endswith(words)

    def test_nothing_is_near_zero(self, capsys):
        predict("7.4", 1)
        outcome("7.4", 0)
        assert capsys.readouterr().out.splitlines()[1].endswith("you said 1")

    def test_the_question_s_own_slips_come_first(self, capsys):
        predict("4.1", 8000)
        outcome("4.1", 4000, ranks=2, slips={"both directions": 8000})
        assert "both directions" in capsys.readouterr().out

    def test_dots_are_no_prediction(self, capsys):
        predict("4.1", ..., "bytes")
        outcome("4.1", 4000)
        assert capsys.readouterr().out.splitlines() == [
            "prediction 4.1 (bytes): none yet",
            "prediction 4.1: measured 4,000, nothing was predicted",
        ]

    def test_a_prediction_is_not_judged_by_an_answer_that_failed(self, capsys):
        notebook._states["4.1"] = notebook.FAILED
        predict("4.1", 4000)
        outcome("4.1", 4000)
        assert "4,000, with an answer that failed its check" in capsys.readouterr().out

    def test_dots_keep_what_was_said_before(self, capsys):
        predict("4.1", 14, "bytes")
        predict("4.1", ..., "bytes")
        outcome("4.1", 14)
        assert capsys.readouterr().out.splitlines()[1:] == [
            "prediction 4.1 (bytes): 14, as before",
            "prediction 4.1: measured 14, as you predicted",
        ]

    def test_what_is_no_number_is_refused(self):
        with pytest.raises(TypeError, match="replace the dots with a number"):
            predict("4.1", "many")  # type: ignore[arg-type]


def pad_and_chunk_of(body):
    """As a notebook cell would define it; `inspect` finds the source in linecache."""
    import linecache

    source = STUB.replace("    ...", f"    {body}")
    filename = f"<cell {body!r}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {"exercise": exercise, "torch": torch, "Tensor": torch.Tensor}
    exec(compile(source, filename, "exec"), namespace)
    return namespace["pad_and_chunk"]


RIGHT = "return list(torch.cat([flat, flat.new_zeros(-len(flat) % ranks)]).chunk(ranks))"


class TestStates:
    def test_blank_says_so_and_the_reference_stands_in(self, capsys):
        piece = pad_and_chunk_of("...")
        assert capsys.readouterr().out == "4.1 pad_and_chunk: not attempted, reference in use\n"
        assert piece is find_reference("4.1").function
        assert yours("04") == "with the reference answers"
        assert not Store().read("answers", "4.1")

    def test_a_right_answer_is_used_kept_and_serves_later_labs(self, capsys):
        piece = pad_and_chunk_of(f"import time; time.sleep(0.02); {RIGHT}")
        *alive, verdict = capsys.readouterr().out.split("\r")
        assert len({len(line) for line in alive}) == 1, "each overwrites the one before"
        assert len(verdict) > len(alive[0])
        checks = [line.rstrip() for line in alive if "starting" not in line]  # the first check starts a server
        assert checks[:2] == ["4.1 pad_and_chunk: checking ...", "4.1 pad_and_chunk: checking ... 1 s of at most 60 s"]
        assert verdict.startswith("4.1 pad_and_chunk: yours: passed. ")
        assert piece is not find_reference("4.1").function
        assert yours("04") == "with your answer to 1 of 1 exercise", "those whose cells have not run are left out"
        assert "chunk(ranks)" in Store().read("answers", "4.1")["cell"]
        later = earlier("4.1")
        assert capsys.readouterr().out == "4.1 pad_and_chunk: yours: passed, kept from lab 04\n"
        assert [len(shard) for shard in later(torch.ones(5), 2)] == [3, 3]
        assert later is not find_reference("4.1").function

    def test_a_wrong_answer_is_said_to_fail_with_reasons_and_a_hint_and_is_used_all_the_same(self, capsys):
        piece = pad_and_chunk_of("return list(flat.chunk(ranks))")
        lines = capsys.readouterr().out.split("\r")[-1].split("\n")[:-1]
        assert lines[0] == "4.1 pad_and_chunk: yours: failed; the cells below use it all the same"
        assert lines[1].strip().startswith("rank 1, ")
        assert lines[-1].strip().startswith("hint 1 of 2: ")
        assert [len(shard) for shard in piece(torch.ones(5), 2)] == [3, 2]
        assert yours("04").endswith("; failed: 4.1")
        assert not Store().read("answers", "4.1")

    def test_an_answer_that_calls_the_reference_fails(self, capsys):
        pad_and_chunk_of("from minifsdp.answers.lab04 import pad_and_chunk; return pad_and_chunk(flat, ranks)")
        assert "pad_and_chunk is the answer to 4.1: write it yourself" in capsys.readouterr().out

    def test_a_name_from_another_cell_is_explained(self, capsys):
        pad_and_chunk_of("return my_helper(flat, ranks)")
        said = capsys.readouterr().out
        assert "NameError: name 'my_helper' is not defined" in said
        assert "a check runs the set-up cell and this exercise's cell, nothing else" in said

    def test_an_earlier_piece_that_was_never_written_is_the_reference(self, capsys):
        assert earlier("4.1") is find_reference("4.1").function
        assert capsys.readouterr().out == "4.1 pad_and_chunk: not attempted, reference in use\n"

    def test_a_function_of_another_name_is_refused(self):
        with pytest.raises(ValueError, match=r"exercise 4\.1 is called pad_and_chunk, not other"):

            @exercise("4.1")
            def other(): ...


class TestHints:
    def test_they_come_one_after_the_other_and_the_second_again(self, capsys):
        for _ in range(3):
            hint("4.1")
        said = capsys.readouterr().out.splitlines()
        assert [line[:11] for line in said] == ["hint 1 of 2", "hint 2 of 2", "hint 2 of 2"]

    def test_a_failure_shows_the_next_one_and_counts_none(self, capsys):
        for _ in range(2):
            assert "hint 1 of 2" in notebook.told("4.1", Verdict("failed", "why"), Store())
        hint("4.1")
        assert "hint 2 of 2" in notebook.told("4.1", Verdict("failed", "why"), Store())
        assert Store().read("hints", "4.1") == 1

    def test_a_syntax_error_needs_none(self):
        assert "hint" not in notebook.told("4.1", Verdict("failed", "SyntaxError: invalid syntax"), Store())


class TestStore:
    def test_a_damaged_record_reads_as_none(self, tmp_path):
        store = Store(tmp_path)
        store.write("hints", "4.1", 1)
        (tmp_path / ".minifsdp/hints/4.1.json").write_text("{")
        assert store.read("hints", "4.1") is None

    def test_nothing_but_whole_files_is_left(self, tmp_path):
        store = Store(tmp_path)
        for given in range(3):
            store.write("hints", "4.1", given)
        assert [path.name for path in (tmp_path / ".minifsdp/hints").iterdir()] == ["4.1.json"]
        assert json.loads((tmp_path / ".minifsdp/hints/4.1.json").read_text()) == 2

    def test_where_nothing_can_be_written_the_lab_goes_on(self, tmp_path):
        (tmp_path / ".minifsdp").write_text("a file")
        Store(tmp_path).write("hints", "4.1", 1)
        assert Store(tmp_path).read("hints", "4.1") is None


JUDGE = """
    import sys
    from minifsdp.course.workshop.child import judge
    result = judge({task})
    print(result["state"], "torch.distributed.tensor" in sys.modules)
"""


@pytest.mark.parametrize("exercise", ["0.1", "12.3"])
def test_a_check_of_plain_tensors_imports_no_dtensors(exercise: str) -> None:
    cell = f'@exercise("{exercise}")\n{find_reference(exercise).source}'
    task = {"exercise": exercise, "setup": setup_of(lab_of(exercise)), "cell": cell, "variant": {}}
    command = [sys.executable, "-c", dedent(JUDGE.format(task=task))]
    assert subprocess.check_output(command, text=True) == "passed False\n"


def test_a_check_that_does_not_start_is_said_to_and_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LONGEST_START", 1.0)
    server.prepare(())
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    answer = Submission("4.1", setup_of("04"), f'@exercise("4.1")\n{find_reference("4.1").source}')
    late = run_check(answer)
    assert late == Verdict("unchecked", "the check did not start within 1 s: check again")
    monkeypatch.undo()
    assert run_check(answer).state == "passed"
