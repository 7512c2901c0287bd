"""Tasks: files and their broken lines, one's own prompts, the Hub, the built-in samples."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from flashdraft.bench.accuracy.answers import check_answer
from flashdraft.bench.tasks import (
    PUBLISHED,
    SAMPLES,
    load_prompts,
    load_tasks,
    prompt_of,
    tasks_in,
)
from flashdraft.errors import RequestError


def write_rows(path: Path, rows: list[object]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_samples_are_five_kinds_and_offline() -> None:
    tasks = load_tasks(["sample"], None, None, seed=0)
    assert [task.name for task in tasks] == list(SAMPLES)
    assert all(len(task.prompts) == 8 and not task.problems for task in tasks)
    assert [task.num_requests for task in tasks] == [8, 8, 8, 8, 16]  # the chats have two turns


@pytest.mark.parametrize("name", ["sample-arithmetic", "sample-mathematics"])
def test_the_samples_own_answers_are_right(name: str) -> None:
    [task] = load_tasks([name], None, None, seed=0)
    for prompt in task.prompts:
        assert prompt.row is not None
        answer = prompt.row["answer"]
        assert check_answer(task.checked_as, prompt.row, f"So it is \\boxed{{{answer}}}.") is True
        assert check_answer(task.checked_as, prompt.row, "So it is \\boxed{12345}.") is False


@pytest.mark.parametrize("name", ["sample-docstring", "sample-programming"])
def test_the_samples_tests_compile(name: str) -> None:
    [task] = load_tasks([name], None, None, seed=0)
    for prompt in task.prompts:
        assert prompt.row is not None
        for code in [prompt.row.get("test", ""), *prompt.row.get("tests", [])]:
            compile(code, "sample", "exec")


def test_a_folder_holds_tasks_under_their_own_or_their_splits_name(tmp_path: Path) -> None:
    write_rows(tmp_path / "gsm8k_test.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    write_rows(tmp_path / "mt_bench.jsonl", [{"prompt": "a", "turns": ["a", "b"]}])
    first, second = load_tasks(["gsm8k", "mt_bench"], str(tmp_path), None, seed=0)
    assert [prompt.messages for prompt in first.prompts] == [(user("one"),), (user("two"),)]
    assert second.prompts[0].messages == (user("a"),)
    assert second.prompts[0].follow_ups == ("b",)


def test_the_tasks_of_a_folder_are_those_whose_files_it_has(tmp_path: Path) -> None:
    assert tasks_in(None) == ["sample"] and tasks_in("hub") == list(PUBLISHED)
    with pytest.raises(RequestError, match="no file of the tasks"):
        tasks_in(str(tmp_path))
    for name in ("mt_bench", "mbpp_sanitized_test", "other"):
        write_rows(tmp_path / f"{name}.jsonl", [{"prompt": "a"}])
    assert tasks_in(str(tmp_path)) == ["mbpp", "mt_bench"]


def test_half_a_character_is_a_broken_line(tmp_path: Path) -> None:
    """JSON can spell half of a pair of surrogates, which no encoding has."""
    halves = ['{"prompt": "\\ud83d"}', '{"turns": ["a", "\\udc00"]}']
    rows = [*halves, {"messages": [{"role": "user", "content": "fine \U0001f600"}]}]
    path = write_rows(tmp_path / "mine.jsonl", [*rows])
    task = load_prompts(path, None, seed=0)
    assert len(task.prompts) == 1 and "2 of 3 lines of mine.jsonl are broken" in task.problems[0]


def test_broken_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    rows: list[object] = [
        {"prompt": "good"},
        "{broken",
        "",
        {"prompt": ""},
        [1],
        {"turns": ["a", 3]},
        {"answer": 1},
        {"prompt": "also good\u2028still"},  # a line break for Unicode, not for a file of lines
        '{"a":' * 5000,
    ]
    write_rows(tmp_path / "gsm8k.jsonl", rows)
    [task] = load_tasks(["gsm8k"], str(tmp_path), None, seed=0)
    assert [prompt.messages[0]["content"] for prompt in task.prompts] == [
        "good",
        "also good\u2028still",
    ]
    [problem] = task.problems
    assert problem.startswith("6 of 8 lines of gsm8k.jsonl are broken")
    assert "line 2, 4, 5, 6, 7, …" in problem


def test_a_file_with_nothing_good_in_it_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "mbpp.jsonl", ["nonsense", "{}"])
    with pytest.raises(RequestError, match="no usable prompt .2 broken lines.; a line is a JSON"):
        load_tasks(["mbpp"], str(tmp_path), None, seed=0)
    write_rows(tmp_path / "mbpp.jsonl", ["nonsense", ""])
    with pytest.raises(RequestError, match="no usable prompt .1 broken line.;"):
        load_tasks(["mbpp"], str(tmp_path), None, seed=0)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_text_is_told_what_a_text_should_hold(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(content)
    with pytest.raises(RequestError) as caught:
        load_prompts(path, None, seed=0)
    assert (
        str(caught.value) == f"{path} holds no prompt: all its lines are empty; write one a line."
    )


@pytest.mark.parametrize(
    ("names", "data", "message"),
    [
        (["gsm8k"], None, "--data"),
        (["gsm9k"], None, "known are gsm8k, math500"),
        (["gsm8k"], "nowhere", "no folder"),
        (["gsm8k"], ".", "holds no gsm8k.jsonl and no gsm8k_test.jsonl"),
        ([], None, "No task"),
    ],
)
def test_what_cannot_be_found_is_named(
    names: list[str],
    data: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=message):
        load_tasks(names, data, None, seed=0)


def test_prompts_are_drawn_by_the_seed_and_keep_their_order(tmp_path: Path) -> None:
    write_rows(tmp_path / "gsm8k.jsonl", [{"prompt": f"{n:03}"} for n in range(100)])

    def draw(seed: int) -> list[str]:
        [task] = load_tasks(["gsm8k"], str(tmp_path), 7, seed)
        return [prompt.messages[0]["content"] for prompt in task.prompts]

    assert len(draw(1)) == 7 and draw(1) == draw(1) == sorted(draw(1))
    assert draw(1) != draw(2)


def test_ones_own_prompts_come_from_lines_of_text_or_json(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("first\n\n second \n", encoding="utf-8")
    task = load_prompts(text, None, seed=0)
    assert task.name == "mine"
    assert [p.messages for p in task.prompts] == [(user("first"),), (user("second"),)]
    system = {"role": "system", "content": "Be brief."}
    chat = {"messages": [system, user("a"), {"role": "assistant", "content": "x"}, user("b")]}
    task = load_prompts(write_rows(tmp_path / "mine.jsonl", [chat]), None, seed=0)
    assert task.prompts[0].messages == (system, user("a"))
    assert task.prompts[0].follow_ups == ("b",)  # the answer between is the model's own
    with pytest.raises(RequestError, match=r"\.jsonl or \.txt"):
        load_prompts(tmp_path / "mine.csv", None, seed=0)
    with pytest.raises(RequestError, match="cannot be read"):
        load_prompts(tmp_path / "absent.txt", None, seed=0)


def test_the_digest_is_of_what_is_sent(tmp_path: Path) -> None:
    def digest(*rows: dict[str, object]) -> str:
        write_rows(tmp_path / "gsm8k.jsonl", list(rows))
        return load_tasks(["gsm8k"], str(tmp_path), None, seed=0)[0].digest()

    one, other = {"prompt": "a", "answer": 1}, {"prompt": "b"}
    assert digest(one, other) == digest({"prompt": "a", "answer": 2}, other)
    assert len({digest(one, other), digest(other, one), digest(one), digest(other)}) == 4
    assert digest({"turns": ["a", "b"]}) != digest({"turns": ["a"]}, {"turns": ["b"]})


HUB_ROWS = {
    "gsm8k": {"question": "How many?", "answer": "Some steps.\n#### 1,200"},
    "math500": {"problem": "What is x?", "answer": "4"},
    "humaneval": {"prompt": "def f():\n", "entry_point": "f", "test": "def check(c): ..."},
    "mbpp": {"prompt": "Write f.", "test_list": ["assert f()"], "test_imports": []},
    "mt_bench": {"prompt": ["one", "two"]},
}


def test_hub_rows_take_the_files_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, configuration: str | None, split: str) -> list[object]:
        asked.append(name)
        task = next(key for key, one in PUBLISHED.items() if one.hub[0] == name)
        return [HUB_ROWS[task]]

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    tasks = {task.name: task for task in load_tasks(list(PUBLISHED), "hub", 5, seed=0)}
    assert len(asked) == len(tasks) == 5
    rows = {name: task.prompts[0].row for name, task in tasks.items()}
    assert rows["gsm8k"] is not None and rows["gsm8k"]["answer"] == "1200"
    assert rows["mbpp"] is not None and rows["mbpp"]["prompt"].endswith("assert f()")
    assert rows["humaneval"] is not None and rows["humaneval"]["code_prompt"] == "def f():\n"
    assert tasks["mt_bench"].prompts[0].follow_ups == ("two",)


def test_without_the_package_or_the_network_the_hub_names_the_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RequestError, match="pip install datasets.*--data FOLDER"):
        load_tasks(["gsm8k"], "hub", None, seed=0)

    def fail(*_arguments: object, **_options: object) -> None:
        raise ConnectionError("no network")

    fake = types.SimpleNamespace(load_dataset=fail)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(RequestError, match="no network.*--data"):
        load_tasks(["gsm8k"], "hub", None, seed=0)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [user("a"), {"role": "system", "content": "late"}]},
        {"messages": [user("")]},
        {"messages": ["text", user("a")]},
        {"turns": [], "prompt": None},
    ],
)
def test_rows_without_a_question_are_none(row: dict[str, object]) -> None:
    assert prompt_of(row) is None
