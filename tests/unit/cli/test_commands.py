"""The commands over a scripted model: history, interruption, comparison, and how errors end."""

from __future__ import annotations

import io
import json
import logging
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashdraft.cli import main
from flashdraft.cli.chat.conversation import Conversation
from flashdraft.cli.chat.session import Chat
from flashdraft.cli.chat.talk import Talk
from flashdraft.cli.commands import generate, models
from flashdraft.cli.display import Screen
from flashdraft.core import (
    ChatParts,
    FinishReason,
    Generation,
    GenerationStats,
    SamplingParams,
    TokenEvent,
)
from flashdraft.errors import (
    ContextLengthError,
    FlashdraftError,
    RequestError,
    UnsupportedModelError,
)
from flashdraft.kernels.kinds import QUANTIZE
from flashdraft.models.config.quantization import read_quantization
from flashdraft.models.readable import (
    ADAPTERS,
    FAMILIES,
    REFUSED_ADAPTERS,
    REFUSED_FAMILIES,
    REFUSED_FORMATS,
)
from flashdraft.models.sources import KnownModel, readable_kinds
from flashdraft.models.tokenizer import Tokenizer
from tests.tiny import CHAT_TEMPLATE, make_tiny_tokenizer


class ScriptedLLM:
    """Answers with given words, one a step; `plain_words` when asked to decode plainly."""

    model = "scripted"

    def __init__(self, words: Sequence[str], plain_words: Sequence[str] | None = None) -> None:
        self.words = words
        self.plain_words = words if plain_words is None else plain_words
        self.tokenizer: Tokenizer | None = Tokenizer(
            make_tiny_tokenizer(), chat_template=CHAT_TEMPLATE
        )
        self.kernels = SimpleNamespace(name="torch", device=SimpleNamespace(type="cpu"))
        self.engine = SimpleNamespace(max_context=1000, config=SimpleNamespace(ngram=True))
        self.drafter_name: str | None = None
        self.generation_config: dict[str, Any] = {}
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.num_cancelled = 0
        self.error: str | None = None
        self.reason = FinishReason.STOP

    def chat_prompt(self, messages: list[dict[str, str]]) -> Any:
        return [dict(message) for message in messages]

    def stream(
        self, prompt: Any, params: SamplingParams, verify: int | None = None
    ) -> Iterator[TokenEvent]:
        self.prompts.append(prompt)
        self.params.append(params)
        words = self.plain_words if verify == 0 else self.words
        stats = GenerationStats(steps=len(words), decode_tokens=len(words), decode_s=1.0)
        stats.histogram = {1: len(words)}
        reason = self.reason if self.error is None else FinishReason.ERROR
        ids = [ord(word[0]) for word in words]
        try:
            for word, token in zip(words, ids, strict=True):
                yield TokenEvent("1", (token,), word, (False,))
            generation = Generation("".join(words), ids, reason, stats, error=self.error)
            yield TokenEvent("1", (), "", (), generation=generation)
        except GeneratorExit:
            self.num_cancelled += 1
            raise


class InterruptingStream(io.StringIO):
    """A screen in front of which somebody presses Ctrl-C when a word appears."""

    word = "two"

    def write(self, text: str) -> int:
        if self.word in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def new_chat(llm: ScriptedLLM, out: io.StringIO | None = None, colours: bool = False) -> Chat:
    screen = Screen(out or io.StringIO(), io.StringIO(), colours, False, colours)
    model: Any = llm
    return Chat(Talk(model, SamplingParams(), screen, Conversation()), screen)


def notes(chat: Chat) -> str:
    assert isinstance(chat._screen.err, io.StringIO)
    return chat._screen.err.getvalue()


def use(monkeypatch: pytest.MonkeyPatch, llm: ScriptedLLM, command: str = "generate") -> None:
    monkeypatch.setattr(f"flashdraft.cli.commands.{command}.load_model", lambda _: llm)


# -- chat --------------------------------------------------------------------------------------


def test_history_grows_by_turns() -> None:
    llm = ScriptedLLM(["fine", " thanks"])
    chat = new_chat(llm)
    assert chat.take("how are you?") and chat.take("  ") and chat.take("good")
    assert [m["content"] for m in llm.prompts[-1]] == ["how are you?", "fine thanks", "good"]


def test_ctrl_c_cancels_the_answer_and_keeps_what_was_said() -> None:
    llm = ScriptedLLM(["one ", "two ", "three ", "four"])
    chat = new_chat(llm, InterruptingStream())
    before = signal.getsignal(signal.SIGINT)
    chat.take("count")
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.num_cancelled == 1 and "interrupted" in notes(chat)
    llm.words = ["yes"]
    chat.take("go on")
    assert [m["content"] for m in llm.prompts[-1]] == ["count", "one two ", "go on"]
    chat.take("/stats")
    assert "2 answers (1 interrupted) · 3 tokens" in notes(chat)


def test_a_second_ctrl_c_leaves_and_the_request_is_cancelled() -> None:
    class Impatient(InterruptingStream):
        def write(self, text: str) -> int:
            super().write(text)
            return super().write(text)

    llm = ScriptedLLM(["one ", "two ", "three"])
    chat = new_chat(llm, Impatient())
    with pytest.raises(KeyboardInterrupt):
        chat.take("count")
    assert llm.num_cancelled == 1 and chat._talk.conversation.turns == []


def test_a_failed_turn_is_not_history() -> None:
    llm = ScriptedLLM(["oops"])
    llm.error = "The device ran out of memory."
    chat = new_chat(llm)
    with pytest.raises(FlashdraftError, match="out of memory"):
        chat.take("first")
    llm.error = None
    chat.take("second")
    assert [m["content"] for m in llm.prompts[-1]] == ["second"]


def test_old_turns_are_left_out_visibly() -> None:
    llm = ScriptedLLM(["ok"])
    llm.engine.max_context = 8  # the scripted model counts a message as a token
    chat = new_chat(llm)
    chat.take("/system be brief")
    for n in range(4):
        chat.take(f"q{n}")
    assert [m["content"] for m in llm.prompts[-1]] == ["be brief", "q2", "ok", "q3"]
    assert notes(chat).count("the oldest turn was left out") == 2
    chat.take("/reset")
    chat.take("new")
    assert [m["content"] for m in llm.prompts[-1]] == ["be brief", "new"]


def test_commands_change_the_conversation() -> None:
    llm = ScriptedLLM(["ok"])
    chat = new_chat(llm)
    for line in ("/system be brief", "one", "two", "/undo", "/undo", "/undo", "/system", "three"):
        assert chat.take(line)
    assert [m["content"] for m in llm.prompts[-1]] == ["three"]
    assert "Took back: two" in notes(chat) and "Nothing to undo." in notes(chat)
    assert not chat.take("/exit")


WRONG = ("/nope", "/colour", "/colour red", "/save", "/colour on", "/load", "/set x 1", "/set seed")
FILES = ("~nobody-here/x.json", "x" * 300, ".", "none/x.json")


@pytest.mark.parametrize(
    "line", [*WRONG, *(f"/{word} {name}" for word in ("save", "load") for name in FILES)]
)
def test_wrong_commands_are_errors(line: str) -> None:
    with pytest.raises(RequestError):
        new_chat(ScriptedLLM(["x"])).take(line)


@pytest.mark.parametrize("line", ["/bye", "/exit", "/quit", " /bye "])
def test_leaving_has_several_names(line: str) -> None:
    assert not new_chat(ScriptedLLM(["x"])).take(line)


def test_a_mistyped_command_is_answered_with_what_was_meant() -> None:
    for typed, meant in (("/quti", "quit"), ("/tempe", None), ("/sav x", "save")):
        with pytest.raises(RequestError) as error:
            new_chat(ScriptedLLM(["x"])).take(typed)
        assert (f"Did you mean {meant}?" in str(error.value)) == (meant is not None)
        assert "/help" in str(error.value)
    with pytest.raises(RequestError, match="/set lists the settings, /help the commands"):
        new_chat(ScriptedLLM(["x"])).take("/show")  # as Ollama has it


def test_a_text_of_several_lines_is_one_question() -> None:
    llm = ScriptedLLM(["ok"])
    chat = new_chat(llm)
    for line in ('"""', "one", "/exit", 'three"""', "four \\", "five"):
        assert chat.take(line)
    questions = [m["content"] for m in llm.prompts[-1] if m["role"] == "user"]
    assert questions == ["one\n/exit\nthree", "four \nfive"]


def test_set_changes_what_the_next_answer_is_asked_with() -> None:
    llm = ScriptedLLM(["ok"])
    chat = new_chat(llm)
    for line in ("/set temperature 0.8", "/set stop END", "one", "/set temperature default", "two"):
        chat.take(line)
    assert llm.params == [
        SamplingParams(temperature=0.8, stop=["END"]),
        SamplingParams(stop=["END"]),
    ]
    assert "temperature is 0.8." in notes(chat) and 'stop is ["END"].' in notes(chat)
    assert "temperature is 0.0." in notes(chat)  # as it is again
    chat.take("/set")
    assert "temperature  " in notes(chat) and '["END"]' in notes(chat)
    with pytest.raises(RequestError, match="/set temperature is -1.0"):
        chat.take("/set temperature -1")


def test_a_saved_chat_goes_on_in_another(tmp_path: Path) -> None:
    path = tmp_path / "talk one.json"
    chat = new_chat(ScriptedLLM(["fine"]))
    for line in ("/system be brief", "/set top-k 3", "how are you?", f"/save {path}"):
        chat.take(line)
    llm = ScriptedLLM(["good"])
    other = new_chat(llm)
    other.take("forget this")
    other.take(f"/load {path}")
    other.take("and now?")
    asked = [m["content"] for m in llm.prompts[-1]]
    assert asked == ["be brief", "how are you?", "fine", "and now?"]
    assert llm.params[-1].top_k == 3
    assert "Loaded 1 turn and the settings; the 1 turn before are forgotten" in notes(other)


def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps({"messages": [], "settings": {"temperature": -1}}))
    llm = ScriptedLLM(["ok"])
    chat = new_chat(llm)
    chat.take("one")
    with pytest.raises(RequestError, match="temperature is -1"):
        chat.take(f"/load {path}")
    chat.take("two")
    assert [m["content"] for m in llm.prompts[-1]] == ["one", "ok", "two"]


def test_no_file_is_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "mine.md"
    path.write_text("precious")
    chat = new_chat(ScriptedLLM(["ok"]))
    chat.take("one")
    with pytest.raises(RequestError, match="exists; the same /save once more replaces it"):
        chat.take(f"/save {path}")
    assert path.read_text() == "precious"
    chat.take(f"/save {path}")
    assert "one" in path.read_text() and "Replaced" in notes(chat)
    chat.take(f"/save {path}")  # it is this chat's own now
    assert notes(chat).count("Replaced") == 2


def test_notes_hold_no_control_characters_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    messages = [
        {"role": "user", "content": "\x1b]0;mine\x07"},
        {"role": "assistant", "content": "x"},
    ]
    path.write_text(json.dumps({"messages": messages, "model": "\x1b[2J"}))
    chat = new_chat(ScriptedLLM(["ok"]))
    chat.take(f"/load {path}")
    chat.take("/undo")
    assert "\x1b" not in notes(chat) and "Took back: \\x1b]0;mine\\x07" in notes(chat)


def test_a_cut_answer_says_by_what_and_what_gives_more() -> None:
    llm = ScriptedLLM(["one"] * 4)
    llm.reason = FinishReason.LENGTH
    chat = new_chat(llm)
    chat.take("/set max-tokens 4")
    chat.take("go")
    assert "cut off by --max-tokens 4; /set max-tokens 16 gives it more room]" in notes(chat)
    chat.take("/set max-tokens 400")
    chat.take("go")
    assert "cut off by the end of the context, 1000 tokens" in notes(chat)


def test_a_path_is_no_command() -> None:
    llm = ScriptedLLM(["x"])
    new_chat(llm).take("/etc/hosts is what?")
    assert llm.prompts[-1][0]["content"] == "/etc/hosts is what?"


def test_colour_on_shows_a_legend_and_colours() -> None:
    out = io.StringIO()
    chat = new_chat(ScriptedLLM(["one"]), out, colours=True)
    chat.take("/colour on")
    assert "drafted" in notes(chat) and "chosen by the target" in notes(chat)
    chat.take("x")
    assert out.getvalue() == "\x1b[33mone\x1b[0m\n"
    chat.take("/colour off")
    chat.take("x")
    assert out.getvalue().endswith("\none\n")


def test_help_names_every_command() -> None:
    chat = new_chat(ScriptedLLM(["x"]))
    chat.take("/help")
    for name in (*chat._commands, "bye", "exit", "quit"):
        assert f"/{name}" in notes(chat)


def test_in_a_terminal_errors_end_their_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[Any] = ["/nope", KeyboardInterrupt(), "hello", EOFError()]

    def type_next(_prompt: str) -> str:
        line = typed.pop(0)
        if isinstance(line, BaseException):
            raise line
        assert isinstance(line, str)
        return line

    monkeypatch.setattr("builtins.input", type_next)
    llm = ScriptedLLM(["hi"])
    chat = new_chat(llm)
    chat.talk_in_terminal()
    assert "There is no command /nope" in notes(chat) and "Ctrl-D" in notes(chat)
    assert len(llm.prompts) == 1 and not typed


def test_an_error_of_a_turn_names_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["x"])
    llm.error = "The prompt is too long; raise max_context."
    typed = ["hello", "/exit"]
    monkeypatch.setattr("builtins.input", lambda _: typed.pop(0))
    screen = Screen(io.StringIO(), io.StringIO(), False, False, False)
    model: Any = llm
    flags = {"max_context": "--max-context"}
    chat = Chat(Talk(model, SamplingParams(), screen, Conversation()), screen, flags)
    chat.talk_in_terminal()
    assert "too long; raise --max-context." in notes(chat)


def test_chat_samples_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["hi"])
    llm.generation_config = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    use(monkeypatch, llm, "chat")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\nnever\n"))
    assert main(["chat", "--top-k", "5", "--system", "be brief"]) == 0
    assert llm.params == [SamplingParams(temperature=0.6, top_k=5)]
    assert [m["content"] for m in llm.prompts[0]] == ["be brief", "hello"]


def test_run_asks_once_and_names_its_model_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["hi"])
    asked: list[str] = []
    monkeypatch.setattr(
        "flashdraft.cli.commands.chat.load_model", lambda given: asked.append(given.model) or llm
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("notes\n"))
    llm.reason = FinishReason.LENGTH
    words = ["why", "is", "it?", "--system", "be brief", "--max-tokens", "1"]
    assert main(["run", "org/model", *words]) == 0
    assert asked == ["org/model"]
    assert [m["content"] for m in llm.prompts[0]] == ["be brief", "notes\n\nwhy is it?"]
    captured = capsys.readouterr()
    assert captured.out == "hi\n" and "1 token" in captured.err
    assert "cut off by --max-tokens 1; --max-tokens 4 gives it more room" in captured.err


def test_run_is_interrupted_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ScriptedLLM(["one ", "two ", "three"])
    use(monkeypatch, llm, "chat")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr("sys.stdout", InterruptingStream())
    assert main(["chat", "smollm2-135m", "count"]) == 130
    assert llm.num_cancelled == 1


# -- generate ----------------------------------------------------------------------------------


def test_compare_prints_speeds_and_identity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["a", "b", "c", "d"])
    use(monkeypatch, llm)
    assert main(["generate", "x", "--compare", "--temperature", "1"]) == 0
    out = capsys.readouterr().out
    assert "plain" in out and "drafted" in out and "1.00x" in out and "identical" in out
    assert llm.params[1].seed is not None and llm.params[1] == llm.params[2]


def test_compare_fails_on_a_cpu_where_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["a", "b", "c"], plain_words=["a", "b", "d"])
    use(monkeypatch, llm)
    assert main(["generate", "x", "--compare"]) == 1
    assert "differ from token 2 on" in capsys.readouterr().out
    llm.kernels.device.type = "cuda"
    assert main(["generate", "x", "--compare"]) == 0
    llm.kernels.device.type, llm.plain_words = "cpu", ["a", "b"]
    assert main(["generate", "x", "--compare"]) == 1
    assert "differ from token 2 on" in capsys.readouterr().out


def test_a_cut_answer_says_so_and_json_keeps_its_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["one ", "two"])
    llm.reason = FinishReason.LENGTH
    use(monkeypatch, llm)
    for flags in ([], ["--json"]):
        assert main(["generate", "x", "--max-tokens", "2", *flags]) == 0
        captured = capsys.readouterr()
        assert "Cut off by --max-tokens 2; --max-tokens 8 gives it more room.\n" in captured.err
        assert "Cut off" not in captured.out
    assert main(["generate", "x", "--max-tokens", "3"]) == 0
    assert "Cut off by the end of the context, 1000 tokens" in capsys.readouterr().err
    llm.reason = FinishReason.STOP
    assert main(["generate", "x", "--max-tokens", "2"]) == 0
    assert "Cut off" not in capsys.readouterr().err


def test_ctrl_c_shows_what_was_made_and_writes_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Interrupted(ScriptedLLM):
        def stream(self, *arguments: Any, **named: Any) -> Iterator[TokenEvent]:
            for number, event in enumerate(super().stream(*arguments, **named)):
                if number == 2:
                    raise KeyboardInterrupt
                yield event

    use(monkeypatch, Interrupted(["one ", "two ", "three"]))
    assert main(["generate", "x"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "one two \n"
    assert "Interrupted.\nscripted" in captured.err and "2 tokens · " in captured.err
    path = tmp_path / "page.html"
    path.write_text("good")
    assert main(["generate", "x", "-o", str(path)]) == 130
    assert "page.html is not written" in capsys.readouterr().err and path.read_text() == "good"


def test_a_page_is_the_code_block_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    llm = ScriptedLLM(["Here:\n```html\n", "<p>tea</p>\n", "```\n", "Enjoy!"])
    use(monkeypatch, llm)
    assert main(["generate", "x", "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == "<p>tea</p>\n"
    err = capsys.readouterr().err
    assert "page.html: the code block of the answer, 1 line\n" in err
    assert "tok/s" in err and "accepted length" in err


def test_thoughts_are_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Thinking(ScriptedLLM):
        def stream(self, *arguments: Any, **named: Any) -> Iterator[TokenEvent]:
            for event in super().stream(*arguments, **named):
                if event.generation is not None and isinstance(arguments[0][0], dict):
                    event.generation.parts = ChatParts("".join(self.words[2:]), "a draft", ())
                yield event

    words = ["<think>```html\nno\n```", "</think>", "```html\n<p>tea</p>\n```"]
    use(monkeypatch, Thinking(words))
    assert main(["generate", "x", "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == "<p>tea</p>\n"


def test_a_request_that_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["a"])
    llm.error = "The device ran out of memory."
    use(monkeypatch, llm)
    assert main(["generate", "x"]) == 2
    assert "flashdraft: error: The device ran out of memory." in capsys.readouterr().err


def test_without_chat_template_raw_is_suggested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = ScriptedLLM(["a"])
    llm.tokenizer = Tokenizer(make_tiny_tokenizer())
    for command in ("generate", "chat"):
        use(monkeypatch, llm, command)
    for argv in (["generate", "x"], ["chat"]):
        assert main(argv) == 2
        assert "generate --raw" in capsys.readouterr().err
    assert main(["generate", "x", "--raw"]) == 0
    assert llm.prompts == ["x"]


# -- the frame ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ContextLengthError("too long"), 2, "flashdraft: error: too long\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_errors_end(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(generate, "load_model", fail)
    assert main(["generate", "x"]) == code
    assert capsys.readouterr().err == said


def test_warnings_of_the_library_are_visible_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn() -> list[KnownModel]:
        logging.getLogger("flashdraft.kernels.select").warning("the native kernels are missing")
        return []

    monkeypatch.setattr(models, "known_models", warn)
    for _ in range(2):
        assert main(["models"]) == 0
        assert capsys.readouterr().err == "flashdraft: the native kernels are missing\n"


def test_models_as_table_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        KnownModel("small", "A small one", "F", "PyPI x 1", True, None, "GGUF Q4_0", 98_400_000),
        KnownModel("org/large", "A large one", "F", "Hugging Face Hub", False, "org/large-draft"),
        KnownModel(
            "Qwen/Qwen3-4B", "Known to plan", "F", "Hugging Face Hub", False, None, "bfloat16"
        ),
    ]
    monkeypatch.setattr(models, "known_models", lambda: rows)
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    shown, _, below = printed.partition("\n\n")
    table = [line.split("  ") for line in shown.splitlines()]
    cells = [[cell.strip() for cell in line if cell] for line in table]
    assert cells == [
        ["MODEL", "CACHED", "FORMAT", "SIZE", "DRAFTER"],
        ["small", "yes", "GGUF Q4_0", "98 MB", "n-gram lookup"],
        ["org/large", "no", "-", "-", "org/large-draft"],
        ["Qwen/Qwen3-4B", "no", "bfloat16", "~8.0 GB", "n-gram lookup"],
    ]
    words = set(below.replace(",", " ").replace(".", " ").replace(";", " ").split())
    kinds = readable_kinds()
    assert {*kinds.gguf, *QUANTIZE, "compressed-tensors"} <= words
    assert {*REFUSED_FAMILIES, *REFUSED_FORMATS, *REFUSED_ADAPTERS} <= words
    assert {row.gguf for row in FAMILIES if row.gguf} <= words
    assert all(row.names in below and row.unread in below for row in FAMILIES)
    assert "Qwen3-4B, Qwen3-8B" in below
    assert main(["models", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["formats"]["gguf"] == list(kinds.gguf)
    assert content["formats"]["quantize"] == list(QUANTIZE)
    assert content["formats"]["compressed_tensors"] == list(kinds.compressed_tensors)
    read = {row["names"]: row for row in content["families"]["read"]}
    assert read["Gemma 3"]["model_types"] == ["gemma3", "gemma3_text"]
    assert read["Qwen3"]["targets"] == ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B"]
    assert content["families"]["refused"] == REFUSED_FAMILIES
    assert len(content["adapters"]["merged"]) == len(ADAPTERS)
    assert content["adapters"]["refused"] == list(REFUSED_ADAPTERS)
    listed = content["models"]
    assert listed[0]["num_bytes"] == 98_400_000 and 8.0e9 < listed[2]["num_bytes"] < 8.1e9
    assert listed[1] == {
        "name": "org/large",
        "description": "A large one",
        "family": "F",
        "source": "Hugging Face Hub",
        "cached": False,
        "drafter": "org/large-draft",
        "format": None,
        "num_bytes": None,
        "is_estimate": False,
    }
    assert [row["is_estimate"] for row in listed] == [False, False, True]


@pytest.mark.parametrize("name", REFUSED_FORMATS)
def test_the_formats_that_models_calls_refused_are(name: str) -> None:
    for said in ({"quant_method": name.lower()}, {"quant_algo": name}):
        with pytest.raises(UnsupportedModelError, match=rf"(?i)\b{name}\b"):
            read_quantization({"quantization_config": said})
