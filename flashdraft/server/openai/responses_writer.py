"""An answer as a response object, or as its events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from flashdraft.chat.answers.blocks import Block, BlockChange
from flashdraft.server.answering.answers import AnswerPart
from flashdraft.server.answering.blocks import CollectedAnswer, new_id
from flashdraft.server.answering.logprobs import chat_logprobs
from flashdraft.server.answering.questions import Question
from flashdraft.server.answering.serving import Serving
from flashdraft.server.answering.usage import TokenView, reasoning_tokens, statistics
from flashdraft.server.http.errors import ApiError
from flashdraft.server.http.sse import KEEP_ALIVE, sse
from flashdraft.server.openai.responses_fields import ResponsesRequest
from flashdraft.text.exact_json import repeated

_PREFIXES = {"reasoning": "rs_", "content": "msg_", "call": "fc_"}


class ResponseWriter:
    """Writes one answer as a response object or as its events."""

    def __init__(self, serving: Serving, body: ResponsesRequest, question: Question) -> None:
        self._serving = serving
        self._body = body
        self._model = serving.model_name(body.model)
        self._question = question
        self._texts = serving.token_texts if question.params.logprobs is not None else None
        self._view = TokenView(serving) if body.drafting.tokens else None
        self._ids: list[str] = []  # of the items, in their order
        self._number = -1
        self._frame = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time())}

    # -- the object ----------------------------------------------------------------------------

    async def response(self, answer: CollectedAnswer) -> dict[str, Any]:
        """The whole response."""
        is_cut = answer.end.reason == "length"
        last = len(answer.blocks) - 1
        output = [
            self._item(index, block, "incomplete" if is_cut and index == last else "completed")
            for index, block in enumerate(answer.blocks)
        ]
        if self._texts is not None:
            entries = chat_logprobs(self._texts, answer.tokens, self._body.top_logprobs or 0)
            texts = [item for item in output if item["type"] == "message"]
            for item in texts[-1:]:
                item["content"][0]["logprobs"] = entries
        return self._object(
            "incomplete" if is_cut else "completed",
            output,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=await self._usage(answer),
            flashdraft=statistics([answer.end.generation]),
        )

    def _object(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        body, params = self._body, self._question.params
        shown = body.model_dump(
            by_alias=True,
            include={"tools", "text", "reasoning", "metadata", "user", "tool_choice"},
        )
        shown = {name: repeated(value) for name, value in shown.items()}
        return {
            **self._frame,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": shown["reasoning"] or {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": shown["text"] or {"format": {"type": "text"}},
            "tool_choice": shown["tool_choice"] or "auto",
            "tools": shown["tools"] or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": shown["user"],
            "metadata": shown["metadata"] or {},
            **fields,
        }

    async def _usage(self, answer: CollectedAnswer) -> dict[str, Any]:
        generation = answer.end.generation
        prompt, made = len(self._question.prompt_ids), len(generation.token_ids)
        thought = await reasoning_tokens(self._serving, [answer])
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": generation.stats.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + made,
        }

    def _item(self, index: int, block: Block, status: str) -> dict[str, Any]:
        while len(self._ids) <= index:
            self._ids.append(new_id(_PREFIXES[block.kind]))
        item = {"id": self._ids[index], "status": status}
        if block.kind == "reasoning":
            content = [_part(block)] if block.text else []
            return {**item, "type": "reasoning", "summary": [], "content": content}
        if block.kind == "content":
            content = [_part(block)] if block.text else []
            return {**item, "type": "message", "role": "assistant", "content": content}
        return {
            **item,
            "type": "function_call",
            "call_id": "call_" + self._ids[index].removeprefix("fc_"),
            "name": block.name,
            "arguments": block.text,
        }

    # -- the stream ----------------------------------------------------------------------------

    async def events(self, parts: AsyncIterator[AnswerPart | None]) -> AsyncIterator[str]:
        """All events of the stream."""
        begun = self._object("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        answer = CollectedAnswer()
        async for part in parts:
            if part is None:
                yield KEEP_ALIVE
                continue
            is_cut = part.end is not None and part.end.reason == "length"
            extra = self._extra(part)
            changes = [(change, "completed") for change in answer.add(part)]
            if part.end is not None:
                status = "incomplete" if is_cut else "completed"
                changes += [(change, status) for change in answer.parsed.close()]
            for change, status in changes:
                for event in self._of_change(change, status, extra):
                    yield event
        whole = await self.response(answer)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _extra(self, part: AnswerPart) -> dict[str, Any]:
        """What the first delta of a part carries besides its text."""
        extra: dict[str, Any] = {}
        if self._view is not None and (shown := self._view.show(part)) is not None:
            extra["flashdraft"] = shown
        if self._texts is not None:
            count = self._body.top_logprobs or 0
            extra["logprobs"] = chat_logprobs(self._texts, part.tokens, count)
        return extra

    def _of_change(self, change: BlockChange, status: str, extra: dict[str, Any]) -> list[str]:
        """The events of a change; a delta takes what is in `extra` with it."""
        index, block = change.index, change.block
        if change.change == "begin":
            item = self._item(index, Block(block.kind, block.name), "in_progress")
            added = self._event("response.output_item.added", output_index=index, item=item)
            if block.kind == "call":
                return [added]
            empty = _part(Block(block.kind))
            return [added, self._of_item("response.content_part.added", index, 0, part=empty)]
        if change.change == "end":
            return self._end(index, block, status)
        fields = {"delta": change.text}
        if "flashdraft" in extra:
            fields["flashdraft"] = extra.pop("flashdraft")
        if block.kind == "call":
            return [self._of_item("response.function_call_arguments.delta", index, None, **fields)]
        if block.kind == "reasoning":
            return [self._of_item("response.reasoning_text.delta", index, 0, **fields)]
        logprobs = extra.pop("logprobs", [])
        kind = "response.output_text.delta"
        return [self._of_item(kind, index, 0, **fields, logprobs=logprobs)]

    def _end(self, index: int, block: Block, status: str) -> list[str]:
        events = []
        if block.kind == "call":
            kind = "response.function_call_arguments.done"
            events += [self._of_item(kind, index, None, arguments=block.text, name=block.name)]
        elif block.kind == "reasoning":
            events += [self._of_item("response.reasoning_text.done", index, 0, text=block.text)]
        else:
            kind = "response.output_text.done"
            events += [self._of_item(kind, index, 0, text=block.text, logprobs=[])]
        if block.kind != "call":
            whole = _part(block)
            events += [self._of_item("response.content_part.done", index, 0, part=whole)]
        item = self._item(index, block, status)
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    def _of_item(self, kind: str, index: int, content_index: int | None, **fields: Any) -> str:
        place = {} if content_index is None else {"content_index": content_index}
        return self._event(kind, item_id=self._ids[index], output_index=index, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)

    def failure(self, error: ApiError) -> str:
        """The last event of a stream that fails."""
        told = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._object("failed", [], error=told))


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
