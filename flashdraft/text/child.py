"""What runs in a killable process: a checkpoint's tokenizer and its chat template.

python -m flashdraft.text.child DESCRIPTOR; tokenizer.py starts it. It imports no torch.
"""

from __future__ import annotations

import json
import sys
from functools import cached_property
from typing import Any

import tokenizers

from flashdraft.killable.child import RefusalError, serve
from flashdraft.killable.frames import Message
from flashdraft.text import exact_json
from flashdraft.text.fitting import fit_to_template
from flashdraft.text.forms import TemplateForms
from flashdraft.text.open_turn import OpenTurn
from flashdraft.text.protocol import MAX_CHARS, identity, pack_ids
from flashdraft.text.template import MAX_MESSAGE, render

_MAX_GROWTH = 64.0  # of a text, by what decodes it
_MAX_DECODERS = 32
_REPLACED = {  # every decoder that is known, and which of its fields it replaces in a text
    "BPEDecoder": ("suffix",),
    "ByteFallback": (),
    "ByteLevel": (),
    "CTC": ("word_delimiter_token", "pad_token"),
    "Fuse": (),
    "Metaspace": (),
    "Replace": (),
    "Strip": (),
    "WordPiece": (),
}


class TextChild:
    """Answers load, encode and render, in the words of tokenizer.py."""

    def __init__(self) -> None:
        self._backend: tokenizers.Tokenizer | None = None
        self._template = ""
        self._special_tokens: dict[str, str] = {}

    def answer(self, message: Message) -> Message:
        """One message's answer; RefusalError where there is none."""
        kind = message["type"]
        if kind == "load":
            self._template = message["template"] or ""
            self._special_tokens = message["special_tokens"]
            self._backend = _load(message)
            return {}
        if kind == "encode":
            return {"ids": self._encode(message["texts"], message["add_special"])}
        text = self._render(exact_json.read(message["variables"]), message.get("continues", False))
        most = message["encode"]
        if most is None:
            return {"text": text}
        if len(text) > most:
            raise RefusalError("length", str(len(text)))
        return {"ids": self._encode([text], False)}

    def _render(self, variables: dict[str, Any], continues: bool) -> str:
        turn = OpenTurn(variables["messages"]) if continues else None
        fitted = fit_to_template(variables["messages"], self._template, self._forms)
        text = render(self._template, {**variables, "messages": fitted}, MAX_CHARS)
        return text if turn is None else turn.cut(text)

    @cached_property
    def _forms(self) -> TemplateForms:
        settings = {"tools": None, "documents": None, "add_generation_prompt": False}
        variables = {**self._special_tokens, **settings}

        def rendered(messages: list[dict[str, Any]]) -> str | None:
            try:
                return render(self._template, {**variables, "messages": messages}, MAX_CHARS)
            except RefusalError as refusal:
                if refusal.kind != "template":
                    raise
                return None

        return TemplateForms(rendered)

    def _encode(self, texts: list[str], add_special: bool) -> list[str]:
        assert self._backend is not None, "load comes first"
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special)
        except (TypeError, UnicodeEncodeError):  # how the library sees a lone surrogate
            raise RefusalError("text", "must be text of valid Unicode") from None
        except MemoryError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise RefusalError("tokenizer", str(error)[:MAX_MESSAGE]) from None
        except BaseException as panic:  # of the library, which is no Exception
            raise RefusalError("tokenizer", str(panic)[:MAX_MESSAGE], retire=True) from None
        return [pack_ids(one.ids) for one in found]


def _load(message: Message) -> tokenizers.Tokenizer | None:
    try:
        if message["path"] is not None:
            if identity(message["path"]) != message["identity"]:
                raise RefusalError("checkpoint", "it has changed since the model was loaded")
            backend = tokenizers.Tokenizer.from_file(message["path"])
        else:
            backend = tokenizers.Tokenizer.from_str(message["json"])
    except (MemoryError, RefusalError):
        raise
    except BaseException as error:  # the library raises plain Exception, and panics
        raise RefusalError("checkpoint", str(error)[:MAX_MESSAGE], retire=True) from None
    backend.no_truncation()
    backend.no_padding()
    if backend.decoder is not None:
        _check_decoders(_flat(json.loads(backend.decoder.__getstate__())))
    return backend


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [one for part in decoder["decoders"] for one in _flat(part)]


def _check_decoders(decoders: list[dict[str, Any]]) -> None:
    """Refuse what could make a text much longer, or a pattern run away.

    Texts are decoded token by token where they are needed, in the engine and in the server, which
    nobody may kill.
    """
    growth = 1.0
    for decoder in decoders:
        kind = decoder["type"]
        if kind not in _REPLACED:
            raise RefusalError("checkpoint", f"its decoder {kind} is not known")
        pattern = decoder["pattern"] if kind == "Replace" else {}
        if "Regex" in pattern:
            raise RefusalError("checkpoint", "its decoder has a regular expression")
        replaced = [decoder[name] for name in _REPLACED[kind]] + list(pattern.values())
        if "" in replaced:  # is found before every character
            raise RefusalError("checkpoint", f"its decoder {kind} replaces an empty text")
        if pattern:
            growth *= max(1.0, len(decoder["content"]) / len(pattern["String"]))
    if growth > _MAX_GROWTH or len(decoders) > _MAX_DECODERS:
        raise RefusalError(
            "checkpoint",
            f"its {len(decoders)} decoders (at most {_MAX_DECODERS} are taken) make a text "
            f"{growth:.0f} times as long (at most {_MAX_GROWTH:.0f})",
        )


def main() -> int:
    """The process."""
    serve(int(sys.argv[1]), TextChild().answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
