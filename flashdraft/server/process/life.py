"""One life of the engine's process, as the front holds it: spawn, send, read, end.

What the messages mean, and whether there is a next life, is client.py's.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from flashdraft.children import module_command, python_environment
from flashdraft.killable.frames import HEADER, Message, frame_length, pack, unpack

WORKER_COMMAND = module_command("flashdraft.server.process.worker")
_STDERR = 2  # what a library prints in there is not an answer


class EngineProcess:
    """A running engine process and our end of its socket."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, command: Sequence[str], arguments: Mapping[str, Any]) -> EngineProcess:
        """Start the process; it gets the socket's other end and the arguments as JSON."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                json.dumps(arguments),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR,
                env=python_environment(),
                process_group=0,  # Ctrl-C is the front's to hear
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_unsent(self) -> int:
        """Bytes that were sent and that the process has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: Message, data: bytes | None = None) -> None:
        """Send without waiting; to a process that has gone nothing is sent."""
        if not self._writer.is_closing():
            self._writer.write(pack(message, data))

    async def messages(self) -> AsyncIterator[Message]:
        """Everything the process sends, until it ends. WireError if that is no message."""
        try:
            while True:
                length = frame_length(await self._reader.readexactly(HEADER.size))
                yield unpack(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def kill(self) -> None:
        """End the process now, whatever it is doing."""
        if self._process.returncode is None:
            self._process.kill()

    async def end(self, grace_s: float) -> str:
        """Close the socket, give the process a moment, then kill it; say how it ended."""
        self._writer.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        return describe_exit(self._process.returncode)


def describe_exit(code: int | None) -> str:
    """A process's exit code in words."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
