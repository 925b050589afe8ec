"""The choices of one request as its client sees them: their chunks in one stream as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from router.responses import Response
from router.session import Session


class Choices:
    """One session for each choice, all with the same prompt; nearly always there is one."""

    def __init__(self, sessions: Sequence[Session], readable: asyncio.Event) -> None:
        """`readable`: the one that the sessions set."""
        self.sessions = tuple(sessions)
        self._readable = readable
        self._unfinished = deque(sessions)

    @property
    def request_id(self) -> str:
        return self.sessions[0].request_id

    @property
    def are_read(self) -> bool:
        """Whether the client has every completion."""
        return not self._unfinished

    async def next_response(self) -> Response:
        """The next chunk or completion of any choice, in turn.

        Raises GenerationError if one of them failed: then none goes on.
        """
        while True:
            self._readable.clear()
            for _ in range(len(self._unfinished)):
                session = self._unfinished[0]
                response = session.take_response()
                if response is None:
                    self._unfinished.rotate(-1)
                    continue
                if session.is_read:
                    self._unfinished.popleft()
                else:
                    self._unfinished.rotate(-1)
                return response
            await self._readable.wait()

    def abort(self) -> None:
        """Asked to end: the client gets its completions."""
        for session in self.sessions:
            if not session.machine.ended:
                session.abort()

    def cancel(self) -> None:
        """The client is gone, or one of them failed. Nothing happens to what has ended."""
        for session in self.sessions:
            session.cancel()
