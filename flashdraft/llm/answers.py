"""The answers to what was asked together, as their events come in.

Of several answers to one prompt the first is asked for first; the others follow with its second
event: by then the prompt's pages are in the cache, the drafter's part of them too.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashdraft.chat.answers.blocks import Blocks
from flashdraft.core import ChatParts, FinishReason, Generation, Request, TokenEvent, ToolCall
from flashdraft.engine.config import OUT_OF_MEMORY
from flashdraft.errors import CapacityError, FlashdraftError
from flashdraft.llm.asking import Asked, AskedChat


class Answers:
    """What every prompt is answered; a conversation's answers are taken apart as they come."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = list(asked)
        self._readers = {
            request.id: _ChatReader(one.chat, request)
            for one in asked
            if one.chat is not None
            for request in one.requests
        }
        self._left = [len(one.requests) for one in asked]  # answers to come, per prompt
        self._place = {r.id: place for place, one in enumerate(asked) for r in one.requests}
        self._done: dict[str, Generation] = {}
        self._followers = {one.requests[0].id: one.requests[1:] for one in asked}
        self._begun: set[str] = set()
        self.waiting = set(self._followers)  # for their last events; followers when they are sent
        self.num_done = 0  # prompts whose answers are all there

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def first_requests(self) -> list[Request]:
        """What the engine is asked at once, in order."""
        return [one.requests[0] for one in self._asked]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of all that the engine is asked sooner or later."""
        return tuple(self._place)

    def take(self, event: TokenEvent) -> Sequence[Request]:
        """Take the next event of any of the requests; return those that follow now.

        The `Generation` of a last event is completed.
        """
        followers: Sequence[Request] = ()
        if event.request_id in self._begun or event.generation is not None:
            followers = self._followers.pop(event.request_id, ())
            self.waiting.update(request.id for request in followers)
        self._begun.add(event.request_id)
        reader = self._readers.get(event.request_id)
        if reader is not None:
            reader.take(event)
        if event.generation is not None:
            self._end(event.request_id, event.generation, reader)
        return followers

    def _end(self, request_id: str, generation: Generation, reader: _ChatReader | None) -> None:
        if reader is not None:
            generation.parts = reader.parts()
        self._done[request_id] = generation
        self.waiting.discard(request_id)
        place = self._place[request_id]
        self._left[place] -= 1
        self.num_done += self._left[place] == 0

    def generations(self) -> list[Generation]:
        """The first answer to every prompt, with the others. Raises where all of them failed."""
        found = []
        for one in self._asked:
            first, *others = (self._done[request.id] for request in one.requests)
            first.others = others
            found.append(first)
        every = self._done.values()
        if every and all(one.finish_reason is FinishReason.ERROR for one in every):
            raise failure_of(found[0])
        return found


class _ChatReader:
    """Reads one answer of a chat."""

    def __init__(self, chat: AskedChat, request: Request) -> None:
        self._parser = chat.parser(request.prompt_ids)
        self._blocks = Blocks()

    def take(self, event: TokenEvent) -> None:
        self._blocks.push(self._parser.push(event.pieces))
        if event.generation is not None:
            self._blocks.push(self._parser.finish())

    def parts(self) -> ChatParts:
        texts = {"reasoning": "", "content": ""}
        calls = []
        for block in self._blocks.blocks:
            if block.kind == "call":
                calls.append(ToolCall(block.name, block.text or "{}"))
            else:
                texts[block.kind] += block.text
        return ChatParts(texts["content"], texts["reasoning"], tuple(calls))


def failure_of(generation: Generation) -> FlashdraftError:
    """The error behind a generation that ended with one."""
    kind = CapacityError if generation.error == OUT_OF_MEMORY else FlashdraftError
    return kind(generation.error or "The request failed.")
