"""The open loop: every request leaves when it is due, however many are still without an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing

from loadtest.exchange import End, Failure, Request, Sender
from loadtest.records import Record

__all__ = ["CANCELLED", "Drive"]

CANCELLED = "cancelled"
"""Kind of error of a request that this side gave up before its time."""
_DETAIL_CHARACTERS = 200


class Drive:
    """Sends requests and keeps their records, in `records`, also those of a run that was broken off.

    senders: protocol -> the way there. timeout_s: from a request's start to its end. server: goes into the records.
    on_record: called with each record and the number of requests still under way.
    """

    def __init__(
        self,
        senders: Mapping[str, Sender],
        timeout_s: float,
        server: str = "",
        on_record: Callable[[Record, int], None] | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._senders = senders
        self._timeout_s = timeout_s
        self._server = server
        self._on_record = on_record
        self._under_way = 0

    async def run(self, requests: Sequence[Request], patience_s: float | None = None) -> None:
        """Send `requests`, in the order of their times, and wait for their ends.

        patience_s: how long to wait after the last one has left; what is under way then is cancelled. None: until its
        own timeout.
        """
        start = time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        try:
            for request in sorted(requests, key=lambda one: one.at_s):
                await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
                tasks.append(asyncio.create_task(self._send(request, start)))
            if tasks:
                await asyncio.wait(tasks, timeout=patience_s)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
                raise end

    async def _send(self, request: Request, start: float) -> None:
        self._under_way += 1
        started = time.monotonic()
        first: float | None = None
        last = started
        received = 0
        gaps: list[float] = []
        end: End | None = None
        error: str | None = None
        detail: str | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = self._senders[request.protocol].send(request, self._timeout_s)
                async with aclosing(answer) as parts:
                    async for part in parts:
                        now = time.monotonic()
                        if isinstance(part, End):
                            end = part
                            continue
                        received += part
                        if first is None:
                            first = now
                        else:
                            gaps.append(round((now - last) * 1000, 3))
                        last = now
        except Failure as failure:
            error, detail = failure.kind, str(failure)
        except TimeoutError:
            error, detail = "timeout", f"no end within {self._timeout_s:g} s"
        except Exception as unforeseen:
            # A request that this client could not carry out has failed too, and the others go on.
            error, detail = "client", f"{type(unforeseen).__name__}: {unforeseen}"
        except asyncio.CancelledError:
            error, detail = CANCELLED, "given up by the load test"
            raise
        finally:
            self._under_way -= 1
            record = Record(
                request_id=request.request_id,
                workload=request.prompt.workload,
                protocol=request.protocol,
                server=self._server,
                scheduled_s=round(request.at_s, 6),
                started_s=round(started - start, 6),
                first_token_s=None if first is None else round(first - start, 6),
                end_s=round(time.monotonic() - start, 6),
                received_tokens=received,
                answer_id=None if end is None else end.answer_id,
                prompt_tokens=None if end is None else end.prompt_tokens,
                completion_tokens=None if end is None else end.completion_tokens,
                finish_reason=None if end is None else end.finish_reason,
                gaps_ms=gaps,
                error=error,
                detail=None if detail is None else detail[:_DETAIL_CHARACTERS],
                speculation=None if end is None else end.speculation,
            )
            self.records.append(record)
            if self._on_record is not None:
                self._on_record(record, self._under_way)
